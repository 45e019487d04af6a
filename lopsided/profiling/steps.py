"""Whole steps, run by all ranks at the same time, and what they tell of calls, of shared chips, and of packing.

In: a cluster whose calls are measured. Out: the step to rehearse (`agreed`), what it tells of each rank
(`StepTimings`), and what gathering and scattering parameters costs beside sending them (`packing`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from lopsided.cluster.cluster import Cluster
from lopsided.ir.graph import Graph
from lopsided.profiling.contention import crowding_of, shared_chips
from lopsided.profiling.correction import CallCorrection, Rehearsed, correction_by
from lopsided.profiling.dry_run import alone_s, together_s
from lopsided.profiling.kinds import RankHost
from lopsided.profiling.links import ControlGroup
from lopsided.profiling.load import BackgroundLoad, Stopwatch
from lopsided.profiling.step_times import (
    Rehearsal,
    expected,
    packing_of,
    prepared,
    prepared_alone,
    prepared_hiding,
)
from lopsided.profiling.topology import Topology

REHEARSAL_PART, _AT_MOST = 0.10, 0.25  # of the budget: what a rehearsal should take, and may
_HIDING_PART = 0.35  # beside it, at most, where steps are short
LOOKS_BEFORE, LOOKS_AFTER = 2, 1  # links are measured: at every step that is rehearsed
_LOOKS, _DISTURBED = LOOKS_BEFORE + LOOKS_AFTER, 1.1  # times the shortest is no look at it


def agreed(graph: Graph, cluster: Cluster, council: ControlGroup, budget_s: float) -> Rehearsal | None:
    """The step to rehearse; it is for all or for none."""
    return _for_all(council, prepared(graph, cluster, _AT_MOST * budget_s))


@dataclass(frozen=True, slots=True)
class StepMeasurements:
    """What whole steps tell of each rank: by what its calls are to be corrected to add up to them, how many times as
    long its own step takes as its calls, and how many times as long as with all others at rest (0 where that was not
    run). Nothing, unless all ranks know."""

    corrections: tuple[CallCorrection, ...] = ()
    ratios: tuple[float, ...] = ()
    crowdings: tuple[float, ...] = ()


class StepTimings:
    """Seconds of this rank's part of a step, and of a whole one by itself, taken again after some time: in the busy
    moment of a machine that others use, all calls together look slower than they are. All ranks do all of it."""

    def __init__(
        self, rehearsal: Rehearsal, device: torch.device, council: ControlGroup, got: float, budget_s: float
    ) -> None:
        """`got` is the part of the time that this one's process runs."""
        self._device, self._council, self._got = device, council, got
        self._seat = council.rank * rehearsal.smaller
        self._share, self._all = rehearsal, prepared_alone(rehearsal, self._seat, _AT_MOST * budget_s)
        self._lasting_s = REHEARSAL_PART * budget_s / 2 / _LOOKS
        self._load = BackgroundLoad(device)
        self._looks: list[tuple[float, float]] = []

    def take(self, count: int) -> None:
        for _ in range(count):
            self._looks.append((self._seconds(self._share, self._seat), self._seconds(self._all, 0)))

    def _seconds(self, what: Rehearsal | None, seat: int) -> float:
        watch = Stopwatch(self._device)
        self._council.meet(self._load)
        taken = None if what is None else alone_s(what.play, seat, self._device, self._lasting_s, watch.now)
        self._council.meet(self._load)
        # By the clock of the calls, and stretched as they are: it is too short to tell what a quota makes of it.
        return math.inf if taken is None else taken / self._got

    def tell(self, seats: Sequence[RankHost]) -> StepMeasurements:
        """What they come to."""
        share_s, all_s = (_undisturbed_mean(seconds) for seconds in zip(*self._looks, strict=True))
        with_share = Rehearsed(expected(self._share, self._seat), share_s) if share_s < math.inf else None
        whole = self._all if all_s < math.inf else None
        with_all = Rehearsed(expected(whole, 0), all_s) if whole is not None else None
        quiet_s = _with_others_at_rest(whole, self._device, self._council, seats, self._lasting_s)
        crowding = crowding_of([quiet_s], [all_s]) if quiet_s else 0.0
        mine = None if with_share is None else correction_by(with_share, with_all)
        told = (mine, 0.0 if with_share is None else round(with_share.ratio, 6), crowding)
        everyone = cast(list[tuple[CallCorrection | None, float, float]], self._council.hear(told))
        corrections, ratios, crowdings = zip(*everyone, strict=True)
        return StepMeasurements(corrections, ratios, crowdings) if None not in corrections else StepMeasurements()


def _with_others_at_rest(
    what: Rehearsal | None, device: torch.device, council: ControlGroup, seats: Sequence[RankHost], lasting_s: float
) -> float:
    """Seconds of a step while the others of this rank's GPU wait for their turn; 0 where it was not run.

    Of a processor that is shared the clock of a step does not tell: it counts seconds of work (`Stopwatch`).
    """
    taken = None
    chips = shared_chips(seats) if all(seat.gpu for seat in seats) else ()
    for turn in range(max(map(len, chips), default=0)):
        council.gather()
        if what is not None and any(chip[turn : turn + 1] == (council.rank,) for chip in chips):
            taken = alone_s(what.play, 0, device, lasting_s, time.perf_counter)
    return taken or 0.0


def _undisturbed_mean(seconds: Sequence[float]) -> float:
    """Without looks that took far longer than the shortest: whatever else a chip does makes a step longer.

    >>> _undisturbed_mean([1.15, 1.15, 1.0]), _undisturbed_mean([1.5, 1.0, 1.1]), _undisturbed_mean([math.inf] * 2)
    (1.0, 1.05, inf)
    """
    return statistics.fmean(s for s in seconds if s <= _DISTURBED * min(seconds))


def packing(rehearsal: Rehearsal, cluster: Cluster, world: Topology) -> float:
    """What gathering and scattering parameters costs beside sending them, by a whole step if there is time for one."""
    council, device, rank = world.council, world.device, world.council.rank
    hiding = _for_all(council, prepared_hiding(rehearsal, cluster, _HIDING_PART * world.budget_s))
    if hiding is None:
        return 1.0
    runs = alone_s(hiding.play, rank, device, 0.0, time.perf_counter) is not None
    if not all(council.hear(runs)):
        return 1.0
    return packing_of(hiding, together_s(hiding.play, world.talkers(cluster).wire, council, device))


def _for_all(council: ControlGroup, rehearsal: Rehearsal | None) -> Rehearsal | None:
    """It is for all or for none."""
    return rehearsal if all(council.hear(rehearsal is not None)) else None
