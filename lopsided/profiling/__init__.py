"""The processes at hand, measured: a `Cluster`."""
