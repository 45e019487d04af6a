"""Model and cluster → `Plan`."""
