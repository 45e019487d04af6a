"""Loops of public training scripts: with Lopsided on three unequal processes they see one device's losses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lopsided.comm.worker_pool import WorkerPool

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from scripts import run  # noqa: E402

MOST_LINES = {"nanogpt": 5, "mingpt": 5, "mnist": 5, "imagenet": 5}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", run.SCRIPTS)
def test_losses_are_those_of_one_device(worker_pools: Callable[[int], WorkerPool], name: str) -> None:
    found = run.compare(name, "float64", 4, worker_pools(1), worker_pools(run.PROCESSES))
    assert found["worst"] < run.GOALS["float64"]
    assert found["losses"] >= 4


@pytest.mark.parametrize("name", run.SCRIPTS)
def test_few_lines_change(name: str) -> None:
    lines = run.lines_of(name)
    assert 0 < lines["changed"] <= MOST_LINES.get(name, 8)


def test_the_table_is_of_these_scripts() -> None:
    """Every script stands in what was measured, within the goals, with as many lines as it has now."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "scripts.json").read_text())
    assert [row["script"] for row in measured["rows"]] == list(run.SCRIPTS)
    for row in measured["rows"]:
        assert row["lines"] == run.lines_of(row["script"])
        assert all(row[dtype]["worst"] < goal for dtype, goal in run.GOALS.items())
    page = (ROOT / "docs" / "scripts.md").read_text()
    assert all(f"`{name}`" in page for name in run.SCRIPTS)
