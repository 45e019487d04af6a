"""What a run teaches: the cluster of its plan, its measured tables corrected by what the run saw.

In: a `Run`. Out: a `Cluster` (`fed_back`), and what was corrected by how much (`Correction`).

Of every call and kind of device the run has seconds, and the plan has what it took them to be. Their ratio scales the
points of the call, so that its line meets the run where the run was. A call that nobody had measured gets points from
its estimate, scaled alike. Of collectives it is the same, way by way. What hid behind computing took longer for it, and
the cluster's `comm_slowdown` has its part of that already.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lopsided.calibration.comparison import fraction_of, median_by_node, of_all, own_seconds
from lopsided.calibration.run_record import NETWORK, OPTIMIZER, Run, Span
from lopsided.cluster.cluster import MEASURABLE, Cluster
from lopsided.cluster.collectives import COLLECTIVES, Algorithm, Network
from lopsided.cluster.devices import Kind, Link, Measured, Points
from lopsided.schedule.cost import Affine, Costs, optimizer_named, update_call
from lopsided.schedule.flops import call_text
from lopsided.schedule.layout import Schedule

_MOST = 20.0
"""No figure is changed by more than this: what is further off was not what the plan meant."""
_FRACTIONS = (0.25, 0.5, 1.0)
"""Where points are made of an estimate; any would do, as they lie on a line."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What was predicted and what was measured, in seconds of a step; of a kind of device, or of all ("")."""

    kind: str
    what: str
    was_s: float
    is_s: float

    @property
    def factor(self) -> float:
        return min(max(self.is_s / self.was_s, 1 / _MOST), _MOST) if self.was_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The cluster that a run teaches, and what is new in it."""

    cluster: Cluster
    corrections: tuple[Correction, ...]


def fed_back(run: Run) -> Cluster:
    """The cluster of the run's plan, corrected by the run."""
    return learnt(run).cluster


def learnt(run: Run) -> Calibrated:
    """`fed_back`, and what was corrected."""
    plan = run.plan
    costs = Costs(plan.graph, plan.on, optimizer_named(plan.optimizer))
    schedule = plan.laid_out(costs)
    corrections: list[Correction] = []
    tables: dict[tuple[str, str], _Table] = {}
    alike: dict[str, _Table] = {}  # for devices that the plan left out
    for number, kind in enumerate(plan.on.kinds):
        calls = [*_calls(run, costs, schedule, number)]
        table, told = _table(kind, calls, plan.optimizer)
        tables[kind.node, kind.name] = alike[kind.likeness] = (table, kind.contention)
        corrections += told
    ways = [*_ways(run, costs.network)] if plan.on.devices > 1 else []
    corrections += [
        Correction("", f"{way.collective}, {way.implementation}", was, now)
        for way, was, now in ways
        if way.implementation in MEASURABLE.get(way.collective, ())
    ]
    kinds = tuple(
        _with(kind, tables.get((kind.node, kind.name), alike.get(kind.likeness))) for kind in plan.cluster.kinds
    )
    collectives = _collectives(plan.cluster, ways)
    cluster = replace(plan.cluster, kinds=kinds, collectives=collectives, about=_about(plan.cluster, run))
    return Calibrated(cluster, tuple(corrections))


_Table = tuple[tuple[Measured, ...], float]
"""What was measured, and how crowded it was then."""


def _with(kind: Kind, found: _Table | None) -> Kind:
    """The kind with a table, if there is one, as it would be with all devices of the cluster at work."""
    if found is None:
        return kind
    table, contention = found
    times = kind.contention / contention
    if times != 1:
        table = tuple(
            replace(one, forward=_scaled(one.forward, times), backward=_scaled(one.backward, times)) for one in table
        )
    return replace(kind, measured=table)


def _about(cluster: Cluster, run: Run) -> str:
    note = f"Corrected by a run of {run.model} in steps of {run.step_s:.4g} s."
    kept = cluster.about.split(" Corrected by a run of ")[0]
    return f"{kept} {note}".strip()


# Calls


@dataclass(frozen=True, slots=True)
class _Seen:
    """A call of one pass on a kind of device: its estimate, and seconds predicted and measured of all of them in a
    step."""

    text: str
    backward: bool
    line: Affine
    is_cut: bool
    was_s: float
    is_s: float
    times: int = 1


def _calls(run: Run, costs: Costs, schedule: Schedule, kind: int) -> Iterator[_Seen]:
    plan = run.plan
    devices = range(*plan.on.spans[kind])
    medians = [median_by_node(run.devices[device]) for device in devices]
    found: dict[tuple[str, bool], list[_Seen]] = {}
    for step in plan.program.steps:
        if not step.node.operands:
            continue
        cost = costs.op(step.node, step.rule)
        text = call_text(step.node, plan.graph.values, step.rule.how)
        for backward, priced, runs in ((False, cost.forward, cost.forwards), (True, cost.backward, 1)):
            name = f"∂{step.node.name}" if backward else step.node.name
            seen = [seconds for table in medians if (seconds := table.get(name))]
            if len(seen) < len(medians):
                continue
            # What lies around a call is not the call's.
            extra = plan.on.kinds[kind].overhead_s
            line = replace(priced[kind], constant=max(priced[kind].constant - extra, 0.0))
            predicted = statistics.fmean(runs * line.at(fraction_of(plan, cost.cut, device)) for device in devices)
            taken = max(statistics.fmean(seen) - runs * extra, 0.0)
            one = _Seen(text, backward, line, cost.cut is not None, predicted, taken)
            found.setdefault((text, backward), []).append(one)
    for same in found.values():
        was, now = sum(one.was_s for one in same), sum(one.is_s for one in same)
        yield replace(same[0], was_s=was, is_s=now, times=len(same))
    yield from _updates(run, schedule, kind, medians)


def _updates(run: Run, schedule: Schedule, kind: int, medians: Sequence[Mapping[str, float]]) -> Iterator[_Seen]:
    plan = run.plan
    start, stop = plan.on.spans[kind]
    taken = [table[OPTIMIZER] for table in medians if table.get(OPTIMIZER)]
    if len(taken) < len(medians) or not schedule.optimizer:
        return
    predicted = statistics.fmean(
        sum(item.seconds[kind].at(fraction_of(plan, item.cut, device)) for item in schedule.optimizer)
        for device in range(start, stop)
    )
    yield _Seen(OPTIMIZER, False, Affine(0.0, 0.0), True, predicted, statistics.fmean(taken))


def _table(kind: Kind, calls: Sequence[_Seen], optimizer: str) -> tuple[tuple[Measured, ...], list[Correction]]:
    table = {entry.call: entry for entry in kind.measured}
    told = []
    for seen in calls:
        correction = Correction(kind.name, f"{'∂' if seen.backward else ''}{seen.text}", seen.was_s, seen.is_s)
        if seen.text == OPTIMIZER:
            prefix = update_call(optimizer, "").partition("(")[0] + "("
            of_it = [call for call in table if call.startswith(prefix)]
            for call in of_it:
                table[call] = replace(table[call], forward=_scaled(table[call].forward, correction.factor))
            told += [correction] if of_it else []
            continue
        entry = table.get(seen.text)
        points = (entry.backward if seen.backward else entry.forward) if entry is not None else ()
        points = _scaled(points, correction.factor) if points else _made(seen, correction.factor)
        if entry is None:
            # Without a forward pass of its own there is no entry to put a backward pass into.
            if seen.backward:
                continue
            table[seen.text] = Measured(seen.text, points)
        else:
            table[seen.text] = replace(entry, backward=points) if seen.backward else replace(entry, forward=points)
        told.append(correction)
    return tuple(table.values()), told


def _scaled(points: Points, factor: float) -> Points:
    return tuple((fraction, min(seconds * factor, 1e6)) for fraction, seconds in points)


def _made(seen: _Seen, factor: float) -> Points:
    """Points on the line of an estimate."""
    if seen.was_s <= 0:
        return tuple((fraction, seen.is_s / seen.times) for fraction in _FRACTIONS)
    if not seen.is_cut:
        return ((1.0, seen.line.at(1.0) * factor),)
    return tuple((fraction, seen.line.at(fraction) * factor) for fraction in _FRACTIONS)


# Collectives


def _ways(run: Run, network: Network) -> Iterator[tuple[Algorithm, float, float]]:
    """Of every way that the run took: seconds predicted and measured in a step."""
    slowdown = run.plan.on.comm_slowdown
    totals: dict[tuple[str, str], list[tuple[float, float]]] = {}
    steps = [*zip(*(device.recorded for device in run.devices), strict=False)]
    for step in steps:
        rows = [[span for span in one.spans if span.lane == NETWORK] for one in step]
        takes = [own_seconds(row) for row in rows]
        for k, same in enumerate(zip(*rows, strict=False)):
            span = of_all(same)
            way = _way(network, span)
            if way is None:
                continue
            # Who came last waited least.
            quickest = min(range(len(rows)), key=lambda device, k=k: takes[device][k])  # type: ignore[misc]
            seconds = takes[quickest][k]
            standing = min(rows[quickest][k].waited_s / seconds, 1.0) if seconds else 1.0
            expected = way.seconds(span.bytes, span.largest) * (1 + (slowdown - 1) * (1 - standing))
            totals.setdefault((span.collective, span.way), []).append((expected, seconds))
    for (collective, name), pairs in totals.items():
        way = next(way for way in network.ways(collective) if way.implementation == name)
        was, now = (sum(column) / len(steps) for column in zip(*pairs, strict=True))
        if was > 0 and now > 0:
            yield way, was, now


def _way(network: Network, span: Span) -> Algorithm | None:
    if span.collective not in COLLECTIVES:
        return None
    return next((way for way in network.ways(span.collective) if way.implementation == span.way), None)


def _collectives(cluster: Cluster, ways: Sequence[tuple[Algorithm, float, float]]) -> tuple[tuple[str, str, Link], ...]:
    measured = {(collective, way): link for collective, way, link in cluster.collectives}
    modelled = Network(cluster)
    for way, was, now in ways:
        key = (way.collective, way.implementation)
        if way.implementation not in MEASURABLE.get(way.collective, ()):
            continue
        factor = Correction("", "", was, now).factor
        known = measured.get(key) or _link(modelled, *key)
        if known is not None:
            bytes_per_s = min(max(known.bytes_per_s / factor, 1.0), 1e18)
            measured[key] = Link(min(known.latency_s * factor, 3600.0), bytes_per_s, known.skew)
    return tuple((*key, link) for key, link in measured.items())


def _link(network: Network, collective: str, name: str) -> Link | None:
    way = next((way for way in network.ways(collective) if way.implementation == name), None)
    if way is None or way.s_per_byte_if_equal <= 0:
        return None
    skew = min(max(way.s_per_largest_byte / way.s_per_byte_if_equal, 0.0), 1.0)
    return Link(way.latency_s, min(1 / way.s_per_byte_if_equal, 1e18), skew)
