"""Which optimizer state goes to host memory so that a step fits: as much as is missing, on each kind of device apart.

In: a `Candidate` that does not fit. Out: `OnHost`s. A byte of state is fetched and taken back in every step, for
`StateOnHost.byte_s`; what runs again for less is the other way to free one (`recompute`), and the timeline of a whole
step says which of the two is quicker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lopsided.cluster.cluster import Cluster
from lopsided.planner.candidates import Candidate
from lopsided.schedule.coded_state import state_bytes
from lopsided.schedule.cost import Optimizer, Scale, cut_of
from lopsided.schedule.decisions import OnHost
from lopsided.schedule.host_state import can_hold_state, kept_on_host, seconds_a_byte


class StateOnHost:
    """What state of a candidate may be in host memory, at its shares."""

    def __init__(self, candidate: Candidate, optimizer: Optimizer) -> None:
        self.program, on = candidate.program, candidate.on
        self.kinds = can_hold_state(on) if optimizer.state else ()
        self.byte_s = seconds_a_byte(on) if optimizer.state else {}
        scale, placed = Scale(on, candidate.shares), dict(candidate.program.leaves)
        self.sizes: dict[str, tuple[float, ...]] = {}  # of every parameter the state, on each kind
        for value in candidate.program.graph.updated:
            fractions = scale.fractions(cut_of(placed[value.name], value.shape))
            size = state_bytes(optimizer, value, candidate.state_bits)
            self.sizes[value.name] = tuple(size * part for part in fractions)
        self.whole = tuple(map(sum, zip(*self.sizes.values(), strict=True)))

    def freeing(self, wanted: Sequence[float]) -> tuple[OnHost, ...]:
        """What frees so many bytes on each kind, or all there is."""
        parts = [(k, math.ceil(100 * wanted[k] / self.whole[k])) for k in self.kinds if self.whole[k] and wanted[k] > 0]
        return tuple(OnHost(k, min(part, 100)) for k, part in parts)

    def back(self, on_host: Sequence[OnHost], room: Sequence[float]) -> tuple[OnHost, ...]:
        """Less of that on the host, where there is room for it on the device."""
        found = []
        for one in on_host:
            fits = math.floor(100 * room[one.kind] / self.whole[one.kind]) if self.whole[one.kind] else 0
            if (left := one.percent - max(fits, 0)) > 0:
                found.append(OnHost(one.kind, left))
        return tuple(found)

    def everything(self) -> tuple[OnHost, ...]:
        return tuple(map(OnHost, self.kinds))

    def freed(self, on_host: Sequence[OnHost]) -> tuple[float, ...]:
        """Bytes that this frees on each kind."""
        found = [0.0] * len(self.whole)
        for name, kinds in kept_on_host(self.program, on_host).items():
            for k in kinds:
                found[k] += self.sizes[name][k]
        return tuple(found)


def on_hosts(on: Cluster) -> tuple[OnHost, ...]:
    """All state, wherever a host has memory for it."""
    return tuple(map(OnHost, can_hold_state(on)))


def on_every_host(candidate: Candidate, on: Cluster) -> tuple[OnHost, ...]:
    """What a candidate keeps in host memory, for devices that are not those it was chosen for: as much on all, if all
    can."""
    most = max((one.percent for one in candidate.on_host), default=0)
    kinds = can_hold_state(on)
    return tuple(OnHost(k, most) for k in kinds) if most and len(kinds) == len(on.kinds) else ()
