"""One calibration: what was observed of steps in, a corrected cluster out; before, during and after a run.

In: a `Cluster`, what devices took for some of their calls (`ObservedCalls`), and what collectives took
(`ObservedTransfers`), each beside what the cluster says of it. Out: `Calibrated`: the cluster with its tables
corrected, and what was corrected by how much.

    when         what is observed                                  built by
    before       whole steps of each rank, by dry runs             `profiling/dry_run.py`
    during       each device's part of the plan's step             `comparison.observed_parts`
    after        every call and collective of a recorded run       `comparison.observed_run`

    seconds of a call      constant + slope · fraction                                     `fitted_line`
    corrected              constants · constant + each_s + slopes · slope · fraction       `LineCorrection.of`
                           and talking_s more of a call that asks others on its way

Of one observation there is one number to find: all of it takes so many times as long. Of two, one with a device's share
of a batch and one with the whole, there is more to tell. Where a host does not keep up with its device, a step takes as
long with a piece of the batch as with all of it: calls then have something in common that no fraction changes
(`each_s`). And alone no call has anyone to ask: what asking takes its host shows in the step with a share only. Of all
corrections that make both steps add up, the least is taken (`line_correction`).

A run that ended for want of memory says what a device gives: plans that follow leave more of it (`with_memory_seen`). A
plan that was predicted to fill P of a device, of which L may be filled, and failed when H was held:

    may be filled now    least · min(P, H, L · P / H)                                  `_less_memory`

If less than predicted was held, the device does not give more; if more, predictions are too small by as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from scipy.optimize import lsq_linear

from lopsided.calibration.run_record import Run
from lopsided.cluster.cluster import MEASURABLE, Cluster
from lopsided.cluster.coefficients import KIND, LINK, coefficient
from lopsided.cluster.collectives import Network
from lopsided.cluster.devices import Kind, Link, Measured, Points
from lopsided.errors import RunError
from lopsided.planner.candidates import memory_limits
from lopsided.schedule.cost import FREE, Affine, fitted_line, update_call
from lopsided.schedule.flops import asks_others

_LEAST_PART = 0.05
"""No correction leaves less than this part of a constant or of a slope: a call that takes no time would be wrong."""
_TALKING_CALLS = 4.0
"""What a call that asks others does besides is sought in units of so many mean calls; a guess of its size."""
_WEIGHT_OF_CHANGE = 1e-2
"""What changing a line by its own size weighs against missing a step by as much: steps come first."""
_LONGEST_CALL_S = 1e6
"""The longest time of a call that a cluster file may state."""
_FRACTIONS = (0.25, 0.5, 1.0)
"""Where points are put on the line of an estimate; any three would do, since they lie on a line."""


# What is observed


class Scope(Enum):
    """Which of a device's calls were timed together, by the name that a correction is told under."""

    CALL = "one call"
    CALLS = "measured calls"
    UPDATES = "optimizer"
    EVERYTHING = "computing"


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of a pass there and back by tables: of so many measured calls (`talking` of them ask other devices) what
    does not scale with a fraction and what does; and of the rest: estimates, and what lies around calls."""

    constant_s: float
    scaling_s: float
    rest_s: float
    calls: int
    talking: int = 0

    @property
    def measured_s(self) -> float:
        return self.constant_s + self.scaling_s

    @property
    def all_s(self) -> float:
        return self.measured_s + self.rest_s


@dataclass(frozen=True, slots=True)
class ObservedCalls:
    """Calls of a step on one kind of device, by its number: what tables say of them, and what they and the rest took.

    `what` is a call's text, or the optimizer of updates. A call of which nobody had measured anything has its estimate
    in `line`, and `is_cut` if its work is divided among devices.
    """

    kind: int
    scope: Scope
    expected: Expected
    seconds: float
    what: str = ""
    backward: bool = False
    line: Affine = FREE
    is_cut: bool = True

    @property
    def calls_s(self) -> float:
        """What its measured calls took."""
        return self.seconds - self.expected.rest_s

    @property
    def ratio(self) -> float:
        return self.calls_s / self.expected.measured_s

    @property
    def title(self) -> str:
        return f"{'∂' if self.backward else ''}{self.what}" if self.scope is Scope.CALL else self.scope.value


@dataclass(frozen=True, slots=True)
class ObservedTransfers:
    """All transfers of a step that went one way: what the network said, and what they took."""

    collective: str
    implementation: str
    expected_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CorrectionLimits:
    """How many times as long as expected something may take and be believed; beyond, it was not what was priced.

    What is beyond is brought to the nearest limit, or, where `clamps` is not set, corrects nothing.
    """

    low: float
    high: float
    clamps: bool = True

    def holds(self, seen: ObservedCalls) -> bool:
        return seen.expected.measured_s > 0 and self.low <= seen.ratio <= self.high

    def factor(self, expected_s: float, seconds: float) -> float:
        """How many times as long, within limits; to six digits, so that equal steps make equal clusters."""
        return round(min(max(seconds / expected_s, self.low), self.high), 6) if expected_s > 0 else 1.0


# A dry run is of the very step that was priced: what is further off is another step, and says nothing of the calls.
DRY_RUN = CorrectionLimits(0.25, 8.0, clamps=False)
# The part of a plan's step: shares must not follow a busy moment further than this.
OWN_PART = CorrectionLimits(0.25, 4.0)
# Calls that nobody had measured are estimates, which may be off by an order of magnitude.
RUN = CorrectionLimits(0.05, 20.0)


# What is corrected


@dataclass(frozen=True, slots=True)
class Correction:
    """Seconds of a step that were expected and that were observed; of a kind of device, or of the network ("")."""

    kind: str
    what: str
    was_s: float
    is_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The corrected cluster, and what is new in it."""

    cluster: Cluster
    corrections: tuple[Correction, ...]


@dataclass(frozen=True, slots=True)
class LineCorrection:
    """A correction of the lines of calls: factors of both parts, and seconds that are added."""

    constants: float
    slopes: float
    each_s: float = 0.0
    talking_s: float = 0.0

    def of(self, line: Affine, *, talks: bool = False) -> Affine:
        """
        >>> LineCorrection(1.0, 2.0, 0.5, 0.25).of(Affine(1.0, 4.0), talks=True)
        Affine(constant=1.75, slope=8.0)
        """
        extra_s = self.each_s + (self.talking_s if talks else 0.0)
        return Affine(self.constants * line.constant + extra_s, self.slopes * line.slope)

    def of_points(self, points: Points, *, talks: bool = False) -> Points:
        """Points as far, relatively, from the corrected line as they were from theirs."""
        if not points:
            return ()
        line = fitted_line(points)
        now = self.of(line, talks=talks)
        changed = []
        for fraction, seconds in points:
            before_s = line.at(fraction)
            times = now.at(fraction) / before_s if before_s else 1.0
            changed.append((fraction, min(times * seconds, _LONGEST_CALL_S)))
        return tuple(changed)

    def of_entry(self, entry: Measured) -> Measured:
        talks = asks_others(entry.call)
        forward, backward = (self.of_points(points, talks=talks) for points in (entry.forward, entry.backward))
        return replace(entry, forward=forward, backward=backward)


def calibrate(
    cluster: Cluster,
    observed: Sequence[ObservedCalls],
    transfers: Sequence[ObservedTransfers] = (),
    *,
    ran_on: Cluster | None = None,
    limits: CorrectionLimits = RUN,
) -> Calibrated:
    """The cluster as the observed steps show it.

    `ran_on` is the part of the cluster that the steps ran on, which numbers the kinds of what was observed; all of it,
    if not given. Devices that had no part in it are corrected like those they are alike to, if there are any.
    """
    ran_on = ran_on or cluster
    by_kind: dict[int, list[ObservedCalls]] = {}
    for one in observed:
        by_kind.setdefault(one.kind, []).append(one)
    numbers = {(kind.node, kind.name): number for number, kind in enumerate(ran_on.kinds)}
    alike = {kind.likeness: number for number, kind in enumerate(ran_on.kinds)}
    kinds = []
    for kind in cluster.kinds:
        number = numbers.get((kind.node, kind.name), alike.get(kind.likeness, -1))
        # A device of the cluster is described as it is with all of its node at work, which the steps may not have had.
        times = kind.contention / ran_on.kinds[number].contention if number >= 0 else 1.0
        kinds.append(_corrected(kind, by_kind.get(number, ()), limits, times)[0])
    told = [
        one for number, kind in enumerate(ran_on.kinds) for one in _corrected(kind, by_kind.get(number, ()), limits)[1]
    ]
    links, told_of_links = _corrected_links(cluster, transfers, limits)
    corrected = replace(cluster, kinds=tuple(kinds), collectives=links)
    return Calibrated(corrected, (*told, *told_of_links))


def line_correction(steps: Sequence[ObservedCalls], limits: CorrectionLimits) -> LineCorrection | None:
    """The least correction that makes these calls add up to what they took, the first observation before the others.

    None where the first is beyond limits that do not clamp; another one that is beyond them counts for nothing.

    >>> line_correction([ObservedCalls(0, Scope.CALLS, Expected(0.1, 0.7, 0.2, 8), 1.08)], DRY_RUN)
    LineCorrection(constants=1.1, slopes=1.1, each_s=0.0, talking_s=0.0)
    """
    first, *others = steps
    if not limits.clamps and not limits.holds(first):
        return None
    others = [step for step in others if limits.holds(step)]
    if not others:
        factor = limits.factor(first.expected.measured_s, first.calls_s)
        return LineCorrection(factor, factor)
    # Rows: the steps, then what is left as it is. Columns: constants, slopes, what calls have in common, and talking;
    # the last two in units of a mean call: where one call in hundreds talks, it has not all that two steps differ by.
    common_s = first.calls_s / max(first.expected.calls, 1)
    talking_s = _TALKING_CALLS * common_s
    rows = []
    for step in (first, *others):
        told = step.expected
        parts = (told.constant_s, told.scaling_s, told.calls * common_s, told.talking * talking_s)
        rows.append([part / step.calls_s for part in parts])
    wanted = [*(1.0 for _ in rows), _WEIGHT_OF_CHANGE, _WEIGHT_OF_CHANGE, 0.0, 0.0]
    bounds = ([_LEAST_PART, _LEAST_PART, 0.0, 0.0], [limits.high, limits.high, np.inf, np.inf])
    found = lsq_linear([*rows, *(_WEIGHT_OF_CHANGE * np.eye(4))], wanted, bounds).x
    constants, slopes, common, talking = (round(float(number), 6) for number in found)
    return LineCorrection(constants, slopes, common * common_s, talking * talking_s)


# Devices


def _corrected(
    kind: Kind, observed: Sequence[ObservedCalls], limits: CorrectionLimits, times: float = 1.0
) -> tuple[Kind, list[Correction]]:
    """A kind as the observations show it, and what changed. Points that are made of an estimate are `times` as long."""
    together: dict[tuple[Scope, str, bool], list[ObservedCalls]] = {}
    for one in observed:
        together.setdefault((one.scope, one.what, one.backward), []).append(one)
    table = {entry.call: entry for entry in kind.measured}
    pace, told = 1.0, []
    for steps in together.values():
        correction = line_correction(steps, limits)
        if correction is None:
            continue
        first = steps[0]
        if first.scope is Scope.EVERYTHING:
            pace = correction.slopes
        elif not _apply(correction, first, table, times):
            continue
        was_s, is_s = first.expected.measured_s, first.calls_s
        told.append(Correction(kind.name, first.title, was_s, is_s, limits.factor(was_s, is_s)))
    corrected = replace(kind, measured=tuple(table.values())) if told else kind
    return corrected.taking(pace) if pace != 1 else corrected, told


def _apply(correction: LineCorrection, seen: ObservedCalls, table: dict[str, Measured], times: float) -> bool:
    """Correct the entries that an observation is about; False where the table has none of them, and can have none."""
    if seen.scope is not Scope.CALL:
        updating = update_call(seen.what, "").partition("(")[0] + "(" if seen.scope is Scope.UPDATES else ""
        about = [call for call in table if (call.startswith(updating) if updating else not call.startswith("update:"))]
        table |= {call: correction.of_entry(table[call]) for call in about}
        return bool(about)
    entry = table.get(seen.what)
    if entry is None:
        # Without a forward pass of its own there is no entry to put a backward pass into.
        if not seen.backward:
            table[seen.what] = Measured(seen.what, _estimated(correction, seen, times))
        return not seen.backward
    points = entry.backward if seen.backward else entry.forward
    changed = correction.of_points(points) or _estimated(correction, seen, times)
    table[seen.what] = replace(entry, backward=changed) if seen.backward else replace(entry, forward=changed)
    return True


def _estimated(correction: LineCorrection, seen: ObservedCalls, times: float) -> Points:
    """Points for a call that nobody had measured, on the corrected line of its estimate."""
    if seen.expected.measured_s <= 0:
        return tuple((fraction, times * seen.calls_s / seen.expected.calls) for fraction in _FRACTIONS)
    line = correction.of(seen.line)
    return tuple((fraction, times * line.at(fraction)) for fraction in (_FRACTIONS if seen.is_cut else (1.0,)))


# Links


def _corrected_links(
    cluster: Cluster, transfers: Sequence[ObservedTransfers], limits: CorrectionLimits
) -> tuple[tuple[tuple[str, str, Link], ...], list[Correction]]:
    """Collectives as they were observed, way by way; a way that nobody had measured starts from the links' model."""
    measured = {(collective, way): link for collective, way, link in cluster.collectives}
    most_s, speeds = coefficient(LINK, "latency_s").high, coefficient(LINK, "bytes_per_s")
    told = []
    for one in transfers:
        key = (one.collective, one.implementation)
        if one.implementation not in MEASURABLE.get(one.collective, ()):
            continue
        factor = limits.factor(one.expected_s, one.seconds)
        told.append(Correction("", f"{one.collective}, {one.implementation}", one.expected_s, one.seconds, factor))
        known = measured.get(key) or _modelled(cluster, *key)
        if known is not None:
            speed = speeds.clamp(known.bytes_per_s / factor)
            measured[key] = Link(min(known.latency_s * factor, most_s), speed, known.skew)
    return tuple((*key, link) for key, link in measured.items()), told


def _modelled(cluster: Cluster, collective: str, name: str) -> Link | None:
    ways = Network(cluster).ways(collective)
    way = next((way for way in ways if way.implementation == name), None)
    if way is None or way.s_per_byte_if_equal <= 0:
        return None
    skew = coefficient(LINK, "skew").clamp(way.s_per_largest_byte / way.s_per_byte_if_equal)
    return Link(way.latency_s, coefficient(LINK, "bytes_per_s").clamp(1 / way.s_per_byte_if_equal), skew)


# Memory that ran out


_LESS = 0.95
"""The part of what has just failed that may be filled from then on."""


def with_memory_seen(cluster: Cluster, runs: Iterable[Run]) -> Cluster:
    """The cluster as it is after what these runs met."""
    for run in runs:
        if run.out_of_memory:
            cluster = _less_memory(cluster, run)
    return cluster


def _less_memory(cluster: Cluster, run: Run) -> Cluster:
    name = run.out_of_memory
    if name not in cluster.device_names:
        raise RunError(
            f"memory ran out on {name}, which this cluster does not have",
            where=f"cluster {cluster.name}",
            do="give the cluster that the run was planned for",
        )
    number = cluster.kind_numbers[cluster.device_names.index(name)]
    kind, limit = cluster.kinds[number], memory_limits(cluster)[number]
    predicted = run.plan.memory_of(name)
    held = run.devices[run.plan.devices.index(name)].peak_bytes or predicted
    may = _LESS * min(predicted, held, limit * predicted / held)
    reserve = coefficient(KIND, "memory_reserve").clamp(max(1 - may / kind.memory_bytes, kind.memory_reserve))
    kinds = (*cluster.kinds[:number], replace(kind, memory_reserve=reserve), *cluster.kinds[number + 1 :])
    return replace(cluster, kinds=kinds)
