"""Predicted against measured: steps that ran, held against the schedule they were priced by.

In: a `Run`. Out: `Comparison`: the step, every device, class of op and collective, and memory, each predicted and
measured; how far off the step is, and which line is to blame most (`compare_run`). And what was observed beside what
was expected, for `calibrate`: of every call and collective of a run (`observed_run`), of each device's part of a plan's
step (`observed_parts`), and what tables say of a step that will be run (`expected_calls`). All that joins a schedule
with what was recorded of it is here, and so is the cluster of a run's plan, corrected by what the run saw
(`calibrated_by`).

Lines add up per device. A device computes ops (by class: the forward and backward seconds of all nodes with that op)
and updates parameters. What lies around that has lines of its own: conversions (tensors cut, joined and packed to be
sent) and what is between ops; where nobody measured them, a plan takes both to be free. By how much sending slows
computing is predicted as a line, and measured within the ops that it slows.

The k-th collective is the same one on every device; the device that came last waited least, so the shortest of their
times is what the collective itself took.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from lopsided.calibration.calibrate import RUN, Calibrated, Expected, ObservedCalls, ObservedTransfers, Scope, calibrate
from lopsided.calibration.run_record import (
    BUCKETS,
    COMPUTE,
    CONVERSIONS,
    NETWORK,
    OPTIMIZER,
    DeviceRun,
    Run,
    Span,
    StepRun,
)
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import COLLECTIVES, Network
from lopsided.ir.placement import Shares
from lopsided.ir.program import Program
from lopsided.planner.plan_data import Plan
from lopsided.schedule import timeline
from lopsided.schedule.cost import Costs, Cut, Scale, fitted_line, optimizer_named
from lopsided.schedule.flops import asks_others, call_text, call_texts
from lopsided.schedule.pricing import Computed, PricedStep
from lopsided.schedule.schedule import Phase, compute_id

BETWEEN = "between ops"
SLOWED = "slowed by sending"
AROUND = (CONVERSIONS, BETWEEN)
"""What lies around ops; free in a plan for devices of which it was not measured."""


@dataclass(frozen=True, slots=True)
class ComparisonLine:
    """Something in seconds (or bytes): what the plan said, and what was."""

    what: str
    predicted: float
    measured: float
    times: int = 1  # how often it happens in a step

    @property
    def error(self) -> float:
        """By how much the prediction is off, as a part of what was measured."""
        if not self.measured:
            return 0.0 if not self.predicted else float("inf")
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Comparison:
    """Predicted against measured. `computed` has a row of lines for each device, `collectives` one for each way.

    `noise` is how far measured steps are apart, as a part of the median: no error below it means anything.
    """

    step: ComparisonLine
    noise: float
    devices: tuple[str, ...]
    busy: tuple[ComparisonLine, ...]  # of each device: all that it computes
    computed: tuple[tuple[ComparisonLine, ...], ...]
    collectives: tuple[ComparisonLine, ...]
    memory: tuple[ComparisonLine, ...]

    @cached_property
    def worst(self) -> tuple[str, ComparisonLine]:
        """The line that is off by most seconds, and whose it is."""
        lines = [(device, line) for device, row in zip(self.devices, self.computed, strict=True) for line in row]
        lines = [pair for pair in lines if pair[1].what != SLOWED]
        lines += [("network", line) for line in self.collectives]
        return max(lines, key=lambda pair: abs(pair[1].predicted - pair[1].measured))

    @property
    def classes(self) -> tuple[ComparisonLine, ...]:
        """The lines of all devices together, the longest first."""
        totals: dict[str, list[ComparisonLine]] = {}
        for row in self.computed:
            for line in row:
                totals.setdefault(line.what, []).append(line)
        found = [
            ComparisonLine(
                what, sum(x.predicted for x in lines), sum(x.measured for x in lines), max(x.times for x in lines)
            )
            for what, lines in totals.items()
        ]
        return tuple(sorted(found, key=lambda line: -max(line.measured, line.predicted)))


def compare_run(run: Run) -> Comparison:
    plan = run.plan
    costs = plan.costs()
    priced = plan.priced(costs)
    bare = Costs(plan.graph, without_overhead(plan.on), optimizer_named(plan.optimizer))
    ops = plan.priced(bare)
    step = timeline.run(priced, costs.network, Scale(plan.on, plan.shares))
    classes = {item.id: op_class(plan.schedule.steps[item.node].node.op) for item in plan.schedule.computes}
    computed = tuple(
        tuple(_device_lines(_Predicted(priced, ops, step), plan, number, device, classes))
        for number, device in enumerate(run.devices)
    )
    busy = tuple(
        ComparisonLine(device.device, sum(line.predicted for line in row), sum(line.measured for line in row))
        for device, row in zip(run.devices, computed, strict=True)
    )
    memory = tuple(
        ComparisonLine(device.device, float(predicted), float(device.peak_bytes))
        for device, predicted in zip(run.devices, plan.memory_bytes, strict=True)
        if device.peak_bytes
    )
    return Comparison(
        ComparisonLine("step", plan.step_s, run.step_s),
        run.spread,
        tuple(device.device for device in run.devices),
        busy,
        computed,
        tuple(_collective_lines(run, costs)),
        memory,
    )


def op_class(op: str) -> str:
    """
    >>> op_class("aten.linear.default")
    'linear'
    """
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


# What devices compute


@dataclass(frozen=True, slots=True)
class _Predicted:
    """The step as it was priced, the same without what lies around ops, and how it runs."""

    priced: PricedStep
    ops: PricedStep
    step: timeline.Timeline


def without_overhead(cluster: Cluster) -> Cluster:
    """The cluster as if nothing lay around ops."""
    return replace(cluster, kinds=tuple(replace(kind, overhead_s=0.0) for kind in cluster.kinds))


def _device_lines(
    told: _Predicted, plan: Plan, number: int, device: DeviceRun, classes: dict[str, str]
) -> Iterator[ComparisonLine]:
    kind = plan.on.kind_numbers[number]
    predicted: dict[str, float] = {}
    times: dict[str, int] = {}
    priced = told.priced

    def seconds(item: Computed) -> float:
        return item.seconds[kind].at(fraction_of(plan, item.cut, number))

    for item in told.ops.computes:
        what = classes[item.id]
        predicted[what] = predicted.get(what, 0.0) + seconds(item)
        times[what] = times.get(what, 0) + 1
    all_s, ops_s = sum(map(seconds, priced.computes)), sum(predicted.values())
    predicted[BETWEEN] = min(plan.on.kinds[kind].overhead_s * len(priced.computes), all_s - ops_s)
    predicted[CONVERSIONS] = all_s - ops_s - predicted[BETWEEN]
    # The timeline has one lane a kind: that of its largest device.
    scale = Scale(plan.on, plan.shares)
    largest_s = sum(item.seconds[kind].at(scale.fractions(item.cut)[kind]) for item in priced.computes)
    if (slowed_s := told.step.lanes[kind].compute_s - largest_s) > 1e-9:
        predicted[SLOWED] = slowed_s
    predicted[OPTIMIZER] = _updating_s(plan, priced, number)
    measured = measured_classes(device, classes)
    for what in {**predicted, **measured}:
        yield ComparisonLine(what, predicted.get(what, 0.0), measured.get(what, 0.0), times.get(what, 1))


def _updating_s(plan: Plan, priced: PricedStep, device: int) -> float:
    kind = plan.on.kind_numbers[device]
    return sum(item.seconds[kind].at(fraction_of(plan, item.cut, device)) for item in priced.updates)


class _Shared(Protocol):
    """What has shares: a plan, or a dry run."""

    @property
    def shares(self) -> Shares: ...


def fraction_of(shared: _Shared, cut: Cut | None, number: int) -> float:
    """What part of a cut one device has; all of what is not cut."""
    if cut is None:
        return 1.0
    by, length = cut
    return shared.shares.cut(length, by)[number] / max(length, 1)


def measured_classes(device: DeviceRun, classes: dict[str, str]) -> dict[str, float]:
    """Median seconds of a recorded step by class of op; what no span accounts for is in between."""
    steps: list[dict[str, float]] = []
    for step in device.recorded:
        totals: dict[str, float] = {}
        for span in step.spans:
            if span.lane == COMPUTE:
                what = classes.get(span.id, CONVERSIONS if span.what == BUCKETS else span.what)
                totals[what] = totals.get(what, 0.0) + span.seconds
        standing = sum(span.waited_s for span in step.spans if span.lane == NETWORK)
        totals[BETWEEN] = max(step.seconds - sum(totals.values()) - standing, 0.0)
        steps.append(totals)
    names = dict.fromkeys(what for totals in steps for what in totals)
    return {what: statistics.median(totals.get(what, 0.0) for totals in steps) for what in names}


# What they send


@dataclass(frozen=True, slots=True)
class Carried:
    """One collective of a step: what it was, and how long it took, in the median of recorded steps."""

    what: str
    collective: str
    way: str
    bytes: int
    largest: float
    seconds: float


def carried(run: Run) -> tuple[Carried, ...]:
    """The collectives of a recorded step, in order, each by the device that had to wait least for the others."""
    steps = zip(*(device.recorded for device in run.devices), strict=False)
    takes = [_once(step) for step in steps]
    if not takes or len({len(take) for take in takes}) != 1:
        return ()
    found = []
    for same in zip(*takes, strict=True):
        first = same[0][0]
        seconds = statistics.median(taken for _, taken in same)
        found.append(Carried(first.what, first.collective, first.way, first.bytes, first.largest, seconds))
    return tuple(found)


def _once(step: Sequence[StepRun]) -> list[tuple[Span, float]]:
    """Each collective and what it took, with how long the device that came last, and waited least, stood for it."""
    rows = [[span for span in one.spans if span.lane == NETWORK] for one in step]
    taken = [own_seconds(row) for row in rows]
    found = []
    for k, same in enumerate(zip(*rows, strict=False)):
        seconds, last = min((row[k], device) for device, row in enumerate(taken))
        found.append((replace(of_all(same), waited_s=same[last].waited_s), seconds))
    return found


def of_all(same: Sequence[Span]) -> Span:
    """One collective as all devices saw it. In an all_to_all each knows its own part only."""
    first = same[0]
    if first.collective != "all_to_all":
        return first
    mean = statistics.fmean(span.bytes for span in same)
    most = max(span.bytes for span in same)
    return replace(first, bytes=round(mean), largest=most / mean if mean else 1.0)


def own_seconds(spans: Sequence[Span]) -> list[float]:
    """What each took by itself: one that was started while another was under way had to wait for that."""
    found, free = [], 0.0
    for span in spans:
        found.append(max(span.end_s - max(span.start_s, free), 0.0))
        free = max(free, span.end_s)
    return found


def _collective_lines(run: Run, costs: Costs) -> Iterator[ComparisonLine]:
    if run.plan.on.devices == 1:
        return
    totals: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in carried(run):
        if one.collective in COLLECTIVES:
            ways = costs.network.ways(one.collective)
            way = next((way for way in ways if way.implementation == one.way), ways[0])
            pair = (way.seconds(one.bytes, one.largest), one.seconds)
            totals.setdefault((one.collective, one.way), []).append(pair)
    for (collective, name), pairs in totals.items():
        predicted, measured = (sum(column) for column in zip(*pairs, strict=True))
        yield ComparisonLine(f"{collective}, {name}", predicted, measured, len(pairs))


# What was observed, for `calibrate`


class ExpectedStep(_Shared, Protocol):
    """A step to be run: its program and where it runs, priced as it is and as if nothing lay around ops."""

    @property
    def program(self) -> Program: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def priced(self) -> PricedStep: ...
    @property
    def bare(self) -> PricedStep: ...


def expected_calls(step: ExpectedStep, device: int) -> Expected:
    """What tables say of one device's pass there and back: its measured calls, and the rest."""
    number = step.cluster.kind_numbers[device]
    tables = {entry.call: entry for entry in step.cluster.kinds[number].measured}
    ops = {op.node.name: op for op in step.program.steps}
    measured_s, scaling_s, calls, talking = 0.0, 0.0, 0, 0
    for item in step.bare.computes:
        op = ops[item.node]
        texts = call_texts(op.node, step.program.graph.values, op.rule.how)
        entry = next((tables[text] for text in texts if text in tables), None)
        points = () if entry is None else entry.backward if item.backward else entry.forward
        if entry is None or not points:
            continue
        part = fraction_of(step, item.cut, device)
        measured_s += item.seconds[number].at(part)
        scaling_s += fitted_line(points).slope * part
        calls += 1
        talking += asks_others(entry.call)
    all_s = sum(item.seconds[number].at(fraction_of(step, item.cut, device)) for item in step.priced.computes)
    return Expected(measured_s - scaling_s, scaling_s, all_s - measured_s, calls, talking)


def computing_s(plan: Plan) -> tuple[float, ...]:
    """What each device of a plan is predicted to compute in a pass there and back, in seconds."""
    items = plan.priced(plan.costs()).computes
    return tuple(
        sum(item.seconds[number].at(fraction_of(plan, item.cut, device)) for item in items)
        for device, number in enumerate(plan.on.kind_numbers)
    )


def observed_parts(plan: Plan, seconds: Sequence[float]) -> tuple[ObservedCalls, ...]:
    """For each kind of device, the mean of what its devices took for their parts of a step, of which nothing else is
    known."""
    told, found = computing_s(plan), []
    for number, (first, last) in enumerate(plan.on.spans):
        was_s, is_s = (statistics.fmean(each[first:last]) for each in (told, seconds))
        found.append(ObservedCalls(number, Scope.EVERYTHING, Expected(was_s, 0.0, 0.0, 1), is_s))
    return tuple(found)


def observed_run(run: Run) -> tuple[tuple[ObservedCalls, ...], tuple[ObservedTransfers, ...]]:
    """The calls, updates and collectives of recorded steps, each beside what its plan said."""
    costs = run.plan.costs()
    calls = [one for number in range(len(run.plan.on.kinds)) for one in _observed_calls(run, costs, number)]
    return tuple(calls), tuple(_observed_transfers(run, costs.network)) if run.plan.on.devices > 1 else ()


def _observed_calls(run: Run, costs: Costs, number: int) -> Iterator[ObservedCalls]:
    """What one kind took: mean seconds of its devices, all calls of one text and pass together."""
    plan = run.plan
    devices = range(*plan.on.spans[number])
    medians = [_median_by_id(run.devices[device]) for device in devices]
    around_s = plan.on.kinds[number].overhead_s
    found: dict[tuple[str, bool], ObservedCalls] = {}
    for step in plan.program.steps:
        if not step.node.operands:
            continue
        cost = costs.op(step.node, step.rule)
        text = call_text(step.node, plan.graph.values, step.rule.how)
        rounds = plan.microbatches
        forwards = rounds * (1 + plan.schedule.runs_again_on(step.node.name, number))
        for backward, priced, runs in ((False, cost.forward, forwards), (True, cost.backward, rounds)):
            phases: tuple[Phase, ...] = ("backward",) if backward else ("forward", "again")
            ids = [compute_id(step.node.name, phase) for phase in phases]
            seen = [seconds for table in medians if (seconds := sum(table.get(name, 0.0) for name in ids))]
            if len(seen) < len(medians):
                continue
            # What lies around a call is not the call's.
            line = replace(priced[number], constant=max(priced[number].constant - around_s, 0.0))
            was_s = statistics.fmean(runs * line.at(fraction_of(plan, cost.cut, device)) for device in devices)
            is_s = max(statistics.fmean(seen) - runs * around_s, 0.0)
            before = found.get((text, backward))
            told = before.expected if before is not None else Expected(0.0, 0.0, 0.0, 0)
            found[text, backward] = ObservedCalls(
                number,
                Scope.CALL,
                replace(told, constant_s=told.constant_s + was_s, calls=told.calls + 1),
                is_s + (before.seconds if before is not None else 0.0),
                text,
                backward,
                before.line if before is not None else line,
                before.is_cut if before is not None else cost.cut is not None,
            )
    yield from found.values()
    whole = plan.priced(costs)
    taken = [table[OPTIMIZER] for table in medians if table.get(OPTIMIZER)]
    if whole.updates and len(taken) == len(medians):
        was_s = statistics.fmean(_updating_s(plan, whole, device) for device in devices)
        expected = Expected(was_s, 0.0, 0.0, 1)
        yield ObservedCalls(number, Scope.UPDATES, expected, statistics.fmean(taken), plan.optimizer)


def _median_by_id(device: DeviceRun) -> dict[str, float]:
    """Median seconds of every computed item of a recorded step, by its id."""
    found: dict[str, list[float]] = {}
    for step in device.recorded:
        totals: dict[str, float] = {}
        for span in step.spans:
            if span.lane == COMPUTE:
                totals[span.id] = totals.get(span.id, 0.0) + span.seconds
        for name, seconds in totals.items():
            found.setdefault(name, []).append(seconds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _observed_transfers(run: Run, network: Network) -> Iterator[ObservedTransfers]:
    """Seconds in a step of every way that the run took. What hid behind computing is expected to take longer."""
    slowdown = run.plan.on.comm_slowdown
    totals: dict[tuple[str, str], list[tuple[float, float]]] = {}
    steps = [*zip(*(device.recorded for device in run.devices), strict=False)]
    for step in steps:
        for span, seconds in _once(step):
            ways = network.ways(span.collective) if span.collective in COLLECTIVES else ()
            way = next((way for way in ways if way.implementation == span.way), None)
            if way is None:
                continue
            standing = min(span.waited_s / seconds, 1.0) if seconds else 1.0
            expected_s = way.seconds(span.bytes, span.largest) * (1 + (slowdown - 1) * (1 - standing))
            totals.setdefault((span.collective, span.way), []).append((expected_s, seconds))
    for (collective, name), pairs in totals.items():
        was_s, is_s = (sum(column) / len(steps) for column in zip(*pairs, strict=True))
        if was_s > 0 and is_s > 0:
            yield ObservedTransfers(collective, name, was_s, is_s)


def calibrated_by(run: Run) -> Calibrated:
    """The cluster of a run's plan as the run shows it, with a note of that."""
    calls, transfers = observed_run(run)
    found = calibrate(run.plan.cluster, calls, transfers, ran_on=run.plan.on, limits=RUN)
    kept = run.plan.cluster.about.split(" Corrected by a run of ")[0]
    note = f"Corrected by a run of {run.model} in steps of {run.step_s:.4g} s."
    return replace(found, cluster=replace(found.cluster, about=f"{kept} {note}".strip()))
