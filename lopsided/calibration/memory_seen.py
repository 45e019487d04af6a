"""A run that ended for want of memory says what a device gives: plans that follow leave more of it.

In: a cluster, and runs of plans for devices of these names. Out: the cluster, with more `memory_reserve` where
memory ran out. A plan that was predicted to fill P of a device, of which L may be filled, and failed when H was held:

    may be filled now    least · min(P, H, L · P / H)                                  `with_memory_seen`

If less than predicted was held, the device does not give more; if more, predictions are too small by as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lopsided.calibration.run_record import Run
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.coefficients import KIND, coefficient
from lopsided.errors import RunError
from lopsided.planner.candidates import memory_limits

_LESS = 0.95
"""Of what has just failed."""


def with_memory_seen(cluster: Cluster, runs: Iterable[Run]) -> Cluster:
    """The cluster as it is after what these runs met."""
    for run in runs:
        if run.out_of_memory:
            cluster = _less(cluster, run)
    return cluster


def _less(cluster: Cluster, run: Run) -> Cluster:
    name = run.out_of_memory
    if name not in cluster.device_names:
        raise RunError(
            f"memory ran out on {name}, which this cluster does not have",
            where=f"cluster {cluster.name}",
            do="give the cluster that the run was planned for",
        )
    at = cluster.device_names.index(name)
    number = next(k for k, (_, stop) in enumerate(cluster.spans) if at < stop)
    kind, limit = cluster.kinds[number], memory_limits(cluster)[number]
    predicted = run.plan.memory_of(name)
    held = run.devices[run.plan.devices.index(name)].peak_bytes or predicted
    may = _LESS * min(predicted, held, limit * predicted / held)
    reserve = coefficient(KIND, "memory_reserve").clamp(max(1 - may / kind.memory_bytes, kind.memory_reserve))
    kinds = (*cluster.kinds[:number], replace(kind, memory_reserve=reserve), *cluster.kinds[number + 1 :])
    return replace(cluster, kinds=kinds)
