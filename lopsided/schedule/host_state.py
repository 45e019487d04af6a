"""Optimizer state that devices keep in the memory of their host: of which parameters, and what that takes there.

In: a program and what was decided for each kind of device (`OnHost`); a `Schedule`. Out: of every parameter the kinds
that fetch its state for the update (`kept_on_host`), and bytes of host memory (`host_bytes_per_kind`,
`check_host_fits`).

State is fetched a slice at a time: of a few parameters with `slice_bytes` or less, or of one. Pinned memory is handed
out by torch in powers of two, and counted so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lopsided.cluster.cluster import Cluster
from lopsided.errors import DoesNotFitError, ProgramError
from lopsided.ir.program import Program
from lopsided.schedule.coded_state import coded_bytes
from lopsided.schedule.cost import Optimizer, Scale, cut_of
from lopsided.schedule.decisions import OnHost
from lopsided.schedule.schedule import Schedule

_SLICE_BYTES = 64 * 2**20
_SLICES = 8


def kept_on_host(program: Program, on_host: Sequence[OnHost]) -> dict[str, tuple[int, ...]]:
    """Of every parameter whose state is in host memory somewhere, the kinds of devices where it is."""
    if not on_host:
        return {}
    kinds = [one.kind for one in on_host]
    if len({*kinds}) < len(kinds) or not all(one.kind >= 0 and 1 <= one.percent <= 100 for one in on_host):
        raise ProgramError(
            f"optimizer state cannot be in host memory by {', '.join(map(str, on_host))}",
            do="give every kind of devices once, with a percentage from 1 to 100",
        )
    trained = program.graph.updated
    whole, before = sum(value.bytes for value in trained), 0
    found = {}
    for value in trained:
        if here := tuple(sorted(one.kind for one in on_host if 100 * before < one.percent * whole)):
            found[value.name] = here
        before += value.bytes
    return found


def slice_bytes(whole: float) -> int:
    """How much state is fetched at a time, of so much in all: a link is at its full speed with 64 MiB, and of less
    there are slices enough that most of it is not on the device."""
    return min(_SLICE_BYTES, int(whole) // _SLICES)


def host_bytes_per_kind(schedule: Schedule, optimizer: Optimizer, scale: Scale) -> tuple[int, ...]:
    """Bytes of host memory that each device of a kind fills."""
    values = schedule.program.graph.values
    found = [0] * len(scale.cluster.kinds)
    for update in schedule.update:
        if update.on_host:
            value = values[update.parameter]
            fractions = scale.fractions(cut_of(update.placement, value.shape))
            for k in update.on_host:
                if k < len(found):
                    size = coded_bytes(value.elements) if update.bits else value.bytes
                    found[k] += optimizer.state * pinned(round(size * fractions[k]))
    return tuple(found)


def pinned(size: int) -> int:
    """What an allocation of pinned memory takes.

    >>> [pinned(size) for size in (0, 1, 5, 4096, 5000)]
    [0, 1, 8, 4096, 8192]
    """
    return 1 << (size - 1).bit_length() if size > 0 else 0


def host_excess(cluster: Cluster, filled: Sequence[int]) -> DoesNotFitError | None:
    """What to say if a host has less memory than its devices fill, of those of which it is known how much they have."""
    over = _over(cluster, filled)
    k = max(range(len(over)), key=over.__getitem__)
    if not over[k]:
        return None
    node = cluster.kinds[k].node
    return DoesNotFitError(
        f"what is kept in the memory of {node} needs {over[k] / 2**30:,.1f} GiB more than it has",
        where=f"cluster {cluster.name}",
        do="use an optimizer with less state, or give host_memory as it is",
    )


def _over(cluster: Cluster, filled: Sequence[int]) -> list[int]:
    """Of every kind, by how many bytes its host has too little. Kinds of one node share a host."""
    over = []
    for kind in cluster.kinds:
        beside = [
            (one.count * size, one.host_memory_bytes)
            for one, size in zip(cluster.kinds, filled, strict=True)
            if one.node == kind.node
        ]
        limits = [limit for _, limit in beside if limit]
        over.append(max(sum(size for size, _ in beside) - min(limits), 0) if limits else 0)
    return over


def can_hold_state(cluster: Cluster) -> tuple[int, ...]:
    """The kinds of devices that have a host with memory beside their own, and a known link to it."""
    return tuple(k for k, kind in enumerate(cluster.kinds) if kind.host_bytes_per_s > 0)


def seconds_a_byte(cluster: Cluster) -> Mapping[int, float]:
    """What it takes to fetch a byte of state and to take it back, for kinds that can."""
    return {k: 2 / cluster.kinds[k].host_bytes_per_s for k in can_hold_state(cluster)}
