"""What a program would take on parts of a cluster, without searching or laying it out there.

In: a step folded on some devices (`FoldedStep`), what it holds, and a smaller cluster. Out: seconds.

The one idea: a folded step has a column for each kind of device, and a part of the cluster is some of these columns.
All that is computed is taken as one leg, which gives the shares in closed form; the critical path prices them:

    finish    Σ_k devices_k · max(finish − constant_k, 0) / slope_k = 1                    `_finishing_together`
    step      the critical path of the columns at these shares, with the part's network    `StepEstimate.on`

An estimate ranks parts, of which the best are then searched, and says what a device is worth where there are too many
kinds to plan without each. It is no bound: shares in whole units and other programs may be better or worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import Network
from lopsided.cluster.devices import Kind
from lopsided.planner.baselines import STATE
from lopsided.schedule.critical_path import CriticalPath, FoldedStep, FractionalShares, MemoryRows, Segment
from lopsided.schedule.memory import Holding

Column = tuple[int, float]
"""The number of a kind, and how many times as long as there its devices take here."""


class Estimated(NamedTuple):
    """Seconds of a step, and whether what it holds fits."""

    step_s: float
    fits: bool


class StepEstimate:
    """One program, on any part of the cluster it was folded on."""

    def __init__(self, load: FoldedStep, held: Sequence[Holding], whole: Cluster) -> None:
        self.load, self.held, self.whole = load, held, whole
        self._numbers = {kind.likeness: k for k, kind in reversed([*enumerate(whole.kinds)])}
        self._computed = load.joined(load.computed(0, len(load.events)))

    def on(self, part: Cluster, limits: Sequence[float]) -> Estimated:
        """A step there, with shares by finishing together, whatever these hold."""
        columns = [self._column(kind) for kind in part.kinds]
        counts = tuple(kind.devices for kind in part.kinds)
        equal = (1 / part.devices,) * len(counts)
        work = _finishing_together(_chosen(self._computed, columns), counts)
        sizes = FractionalShares({"": work, STATE: equal}, counts)
        load, network = copy(self.load), Network(part)
        load.kinds = len(columns)
        load.segments = tuple(_chosen(segment, columns) for segment in self.load.segments)
        step_s = CriticalPath(load, sizes, load.ways(network, sizes)).step_s
        return Estimated(step_s, not any(MemoryRows(part, self.held, limits).over(sizes)))

    def _column(self, kind: Kind) -> Column:
        """Devices crowd each other less in a smaller cluster, and are then described anew."""
        number = self._numbers.get(kind.likeness)
        if number is None:
            number = next(k for k, other in enumerate(self.whole.kinds) if kind.is_same_alone(other))
        return number, kind.contention / self.whole.kinds[number].contention


def _chosen(segment: Segment, columns: Sequence[Column]) -> Segment:
    slopes = tuple((cut, tuple(seconds[k] * times for k, times in columns)) for cut, seconds in segment.slopes)
    return Segment(tuple(segment.constants[k] * times for k, times in columns), slopes)


def _finishing_together(computed: Segment, counts: Sequence[int]) -> tuple[float, ...]:
    """The work share of one device of each kind with which all end at once; who would be late with none has none."""
    devices = np.array(counts, dtype=float)
    constants, slopes = np.array(computed.constants), np.zeros(len(counts))
    for (name, _), seconds in computed.slopes:
        if name == STATE:
            constants = constants + np.array(seconds) / devices.sum()
        else:
            slopes = slopes + np.array(seconds)
    if not (slopes > 0).all():
        return (1 / float(devices.sum()),) * len(counts)
    working = np.ones(len(counts), dtype=bool)
    while True:
        rates = np.where(working, devices / slopes, 0.0)
        finish = (1 + rates @ constants) / rates.sum()
        late = working & (constants >= finish)
        if not late.any():
            break
        working &= ~late
    shares = np.where(working, (finish - constants) / slopes, 0.0)
    return tuple((shares / (shares @ devices)).tolist())
