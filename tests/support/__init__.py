"""Clusters, models, plans and jobs that several tests use."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
