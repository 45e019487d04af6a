"""A plan as a reader wants it: its program as rows with their prices, its step in time, devices alike once.

In: a `Plan`. Out: `StepRow`s (`listing`), the predicted events of a step (`timed`), `DeviceRow`s (`device_rows`) and
`SegmentRow`s, plain data. Nothing else of the report reads a schedule or prices a step.

    h = linear(x: S0, up.weight, bias: I→R) : S0        compute 9.60 µs, hides all_reduce ring 5.29 µs

The one idea: two steps are alike if they make the same call by the same rule, with parameters stored alike, and send
the same (what the first layer converts for nothing, the others find there). Steps become numbers, and a repeated layer
is a stretch of numbers that equals the next stretch (`repeats`). For each period the stretches are found in one pass,
so that this takes nodes × the longest period.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lopsided.calibration.run_record import Span
from lopsided.ir.graph import Leaf, Node
from lopsided.ir.placement import Placement
from lopsided.ir.program import Chain, Program
from lopsided.planner.baselines import STATE
from lopsided.planner.plan_data import Plan
from lopsided.report.table import NUMBERS, pattern_of, ranged, skeleton, told_apart
from lopsided.schedule import timeline
from lopsided.schedule.cost import OpCost, Scale, Transfer, cut_of
from lopsided.schedule.decisions import BUCKET_BYTES

LONGEST_PERIOD = 512
"""In nodes: the layers of large models have some 40, and what repeats may be two or three layers."""

_LEAST_SAVED = 4
_LEAST_SAVED_UNNAMED = 12
"""Rows that a fold must spare; more where it does not follow the numbers of modules, and may be chance."""


@dataclass(frozen=True, slots=True)
class Send:
    """What a step sends by one collective in one way. What hides may run behind computation."""

    collective: str
    implementation: str
    seconds: float
    hides: bool


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step, or where `repeats` is above 0 the head of `rows` rows that stand for as many layers each.

    `times` says how many steps of the program the row stands for. Seconds are those of one of them.
    """

    text: str
    module: str = ""
    compute_s: float = 0.0  # forward (again where recomputed) and backward, of the kind of device that takes longest
    sends: tuple[Send, ...] = ()
    times: int = 1
    repeats: int = 0
    rows: int = 0

    @property
    def blocking_s(self) -> float:
        return sum(send.seconds for send in self.sends if not send.hides)

    @property
    def hiding_s(self) -> float:
        return sum(send.seconds for send in self.sends if send.hides)

    @property
    def is_free(self) -> bool:
        return not self.repeats and self.compute_s == 0 and not self.sends


def listing(plan: Plan, *, fold: bool = True) -> tuple[StepRow, ...]:
    """The rows of a plan's program: every step, the conversions at its end, and the optimizer."""
    priced = _Priced(plan)
    rows, keys = [], []
    for key, row in priced.steps():
        rows.append(row)
        keys.append(key)
    found: list[StepRow] = []
    position = 0
    for repeat in repeats(keys, [step.node.source.module for step in plan.program.steps]) if fold else ():
        found += rows[position : repeat.start]
        found += _folded(rows[repeat.start : repeat.stop], repeat)
        position = repeat.stop
    return (*found, *rows[position:], *priced.ends(), *priced.optimizer())


def _folded(rows: Sequence[StepRow], repeat: Repeat) -> Iterator[StepRow]:
    """The first layer, with stars for the numbers in which the others differ, under a head."""
    first = rows[: repeat.period]
    columns = [[row.module for row in rows[k :: repeat.period]] for k in range(repeat.period)]
    patterns = [pattern_of(column) for column in columns]
    numbered = [module for column in columns for module in column if len({*column}) > 1]
    sends = merged(send for row in first for send in row.sends)
    compute_s = sum(row.compute_s for row in first)
    yield StepRow(ranged(numbered), "", compute_s, sends, repeat.times, repeat.times, repeat.period)
    for row, pattern in zip(first, patterns, strict=True):
        yield replace(row, module=pattern, times=repeat.times)


class _Priced:
    """The steps of a program with what they compute and send, conversions where they are made first."""

    def __init__(self, plan: Plan) -> None:
        self.program, self.graph = plan.program, plan.graph
        self.costs = plan.costs()
        self.scale = Scale(plan.on, plan.shares)
        self.leaves = {leaf.value.name: leaf for leaf in self.graph.leaves}
        self.parameters = self.graph.parameter_names
        self.sent_for = plan.schedule.sent_for
        self.schedule = plan.schedule
        self.optimizer_name = plan.optimizer

    def steps(self) -> Iterator[tuple[Hashable, StepRow]]:
        """A row for every step, and what makes steps alike."""
        for step in self.program.steps:
            node, rule = step.node, step.rule
            cost = self.costs.op(node, rule)
            sends = [self._send(transfer) for transfer in self.sent_for.get(node.name, ())]
            compute_s = max(self._seconds(node.name, cost))
            call = f"{short_op(node.op)}({self._operands(node, step.chains)})"
            how = "" if rule.how == "plain" else f" [{rule.how}]"
            text = f"{_results(node)} = {call} : {_gives(rule.gives)}{how}"
            stored = tuple(c for n, c in zip(node.operands, step.chains, strict=True) if n in self.parameters)
            row = StepRow(text, node.source.module, compute_s, merged(sends))
            yield (self.costs.number(node), rule, stored, row.sends), row

    def _seconds(self, node: str, cost: OpCost) -> Iterator[float]:
        """What each kind computes for a node in a whole step."""
        fractions = self.scale.fractions(cost.cut)
        for k, (there, back, f) in enumerate(zip(cost.forward, cost.backward, fractions, strict=True)):
            yield (1 + self.schedule.runs_again_on(node, k)) * there.at(f) + back.at(f)

    def ends(self) -> Iterator[StepRow]:
        """The loss and the buffers, which become whole."""
        graph, program = self.graph, self.program
        sends = merged(self._send(transfer) for transfer in self.sent_for.get("", ()))
        yield StepRow(f"return {_short(graph.loss)}: {_arrows(program.loss)}", sends=sends)
        ways: dict[str, int] = {}
        for chain in program.updates:
            ways[_arrows(chain)] = ways.get(_arrows(chain), 0) + 1
        if ways:
            counts = ", ".join(f"{count} {way}" for way, count in ways.items())
            yield StepRow(f"update buffers: {counts}")

    def optimizer(self) -> Iterator[StepRow]:
        totals = [0.0] * len(self.scale.cluster.kinds)
        count = 0
        for name, placement in self.program.leaves:
            leaf = self.leaves[name]
            if name in self.parameters and leaf.value.grad:
                fractions = self.scale.fractions(cut_of(placement, leaf.value.shape))
                seconds = self.costs.update(leaf, placement)
                totals = [t + s.at(f) for t, s, f in zip(totals, seconds, fractions, strict=True)]
                count += 1
        if count:
            yield StepRow(f"{self.optimizer_name}: update {count} parameters", compute_s=max(totals))

    def _send(self, transfer: Transfer) -> Send:
        size, largest = transfer.whole_bytes, self.scale.largest(transfer.cuts)
        # What hides travels in buckets and pays its part of one latency.
        bucket = max(size, BUCKET_BYTES) if transfer.hides else size
        way = self.costs.network.best(transfer.collective, bucket, largest)
        latency_s = way.latency_s * size / bucket if bucket else way.latency_s
        seconds = way.seconds(size, largest) - way.latency_s + latency_s
        return Send(transfer.collective, way.implementation, seconds, transfer.hides)

    def _operands(self, node: Node, chains: Sequence[Chain]) -> str:
        """Operands with their placements. Neighbours with the same one share it, and a module they both belong to."""
        pairs = zip(map(self._operand, node.operands), chains, strict=True)
        texts = []
        for chain, group in itertools.groupby(pairs, key=lambda pair: pair[1]):
            names: list[str] = []
            owner = ""
            for name, _ in group:
                module, _, last = name.rpartition(".")
                names.append(last if module and module == owner else name)
                owner = module
            texts.append(f"{', '.join(names)}: {_arrows(chain)}")
        return ", ".join(texts)

    def _operand(self, name: str) -> str:
        leaf = self.leaves.get(name)
        return _short(name) if leaf is None else short_target(leaf)


def merged(sends: Iterable[Send]) -> tuple[Send, ...]:
    """One for each collective and way, the longest first, what blocks before what hides."""
    totals: dict[tuple[bool, str, str], float] = {}
    for send in sends:
        key = (send.hides, send.collective, send.implementation)
        totals[key] = totals.get(key, 0.0) + send.seconds
    found = [Send(collective, way, seconds, hides) for (hides, collective, way), seconds in totals.items()]
    return tuple(sorted(found, key=lambda send: (send.hides, -send.seconds, send.collective, send.implementation)))


# The step in time


@dataclass(frozen=True, slots=True)
class TimedStep:
    """What is predicted to happen in a step. `computed` and `updated` have an entry for each kind of device."""

    step_s: float
    forward_s: float
    backward_s: float
    computed: tuple[tuple[Span, ...], ...]
    updated: tuple[tuple[Span, ...], ...]
    sent: tuple[tuple[Span, bool], ...]  # and whether it may hide behind computation


def timed(plan: Plan) -> TimedStep:
    """The step as the planner sees it."""
    costs = plan.costs()
    priced = plan.priced(costs)
    # Kinds may share a name, or be called "network": numbers tell them apart.
    numbered = tuple(replace(kind, name=f"kind {k}") for k, kind in enumerate(plan.on.kinds))
    found = timeline.run(priced, costs.network, Scale(replace(plan.on, kinds=numbered), plan.shares), events=True)
    lanes: dict[str, list[tuple[Span, bool]]] = {lane: [] for lane in (*(k.name for k in numbered), timeline.NETWORK)}
    for e in found.events:
        span = Span(e.lane, e.what, e.start_s, e.end_s, e.collective, e.way, e.whole_bytes)
        lanes[e.lane].append((span, e.hides))
    *computed, sent = lanes.values()
    last = len(priced.updates)  # updates come behind all else
    kinds = [tuple(span for span, _ in lane) for lane in computed]
    return TimedStep(
        found.step_s,
        found.forward_s,
        found.backward_s,
        tuple(spans[: len(spans) - last] for spans in kinds),
        tuple(spans[len(spans) - last :] for spans in kinds),
        tuple(sent),
    )


def sends_in_usual_buckets(plan: Plan) -> bool:
    return plan.bucket_bytes == BUCKET_BYTES


# Words


def short_op(op: str) -> str:
    """The name people use.

    >>> short_op("aten.add.Tensor"), short_op("aten.scaled_dot_product_attention.default")
    ('add', 'attention')
    """
    parts = op.split(".")
    return _short(parts[1] if len(parts) > 1 else op)


def _short(name: str) -> str:
    return name.replace("scaled_dot_product_attention", "attention")


def short_target(leaf: Leaf) -> str:
    """The end of a leaf's name: what it is, and of what."""
    parts = leaf.target.split(".")
    # A number says nothing without what it counts.
    kept = next((k for k in range(2, len(parts)) if not parts[-k].isdigit()), len(parts))
    return ".".join(parts[-kept:]) or leaf.value.name


def _results(node: Node) -> str:
    names = [_short(value.name) for value in node.results]
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"


def _gives(gives: tuple[Placement, ...]) -> str:
    return str(gives[0]) if len({*gives}) == 1 else ", ".join(map(str, gives))


def _arrows(chain: Chain) -> str:
    return "→".join(map(str, chain))


# Repeats


@dataclass(frozen=True, slots=True)
class Repeat:
    """`times` equal stretches of `period` items, one after the other."""

    start: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.times


def repeats(keys: Sequence[Hashable], modules: Sequence[str]) -> tuple[Repeat, ...]:
    """Stretches that repeat, in order and apart: at each place the one that spares most.

    A stretch can be turned: that of `abcabcabc` begins at a, b or c. It is made to begin where the numbers in the
    modules change.
    """
    numbers: dict[Hashable, int] = {}
    items = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    saved, period = _longest(items)
    found: list[Repeat] = []
    position = 0
    while position < len(items):
        repeat = None
        if saved[position] >= _LEAST_SAVED:
            length = int(saved[position] + period[position])
            repeat = _aligned(items, Repeat(position, int(period[position]), length // int(period[position])), modules)
        if repeat is None:
            position += 1
            continue
        found.append(repeat)
        position = repeat.stop
    return tuple(found)


def _longest(items: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each place, what the best repeat that begins there spares, and its period."""
    count = len(items)
    saved, period = np.zeros(count, np.int64), np.ones(count, np.int64)
    for p in range(1, min(LONGEST_PERIOD, count // 2) + 1):
        differs = np.flatnonzero(items[:-p] != items[p:])
        # From each place, how many items in a row equal those a period later.
        ends = np.append(differs, count - p)
        run = ends[np.searchsorted(ends, np.arange(count - p))] - np.arange(count - p)
        spares = run // p * p
        better = spares > saved[: count - p]
        saved[: count - p][better] = spares[better]
        period[: count - p][better] = p
    return saved, period


def _aligned(items: NDArray[np.int64], repeat: Repeat, modules: Sequence[str]) -> Repeat | None:
    """The same repeat turned so that it follows the modules, at the price of one layer at most."""
    start, period, times = repeat.start, repeat.period, repeat.times
    end = start + period
    while end < len(items) and items[end] == items[end - period]:
        end += 1
    turned = [Repeat(start + t, period, (end - start - t) // period) for t in range(min(period, end - start - period))]
    for fewer in (0, 1):
        for each in turned:
            if each.times == times - fewer >= 2 and _follows(each, modules):
                return each
    return repeat if period * (times - 1) >= _LEAST_SAVED_UNNAMED else None


def _follows(repeat: Repeat, modules: Sequence[str]) -> bool:
    """Whether the numbers in the modules of one stretch are not also those of the next."""
    first = modules[repeat.start : repeat.start + repeat.period]
    second = modules[repeat.start + repeat.period : repeat.start + 2 * repeat.period]
    here: set[str] = set()
    there: set[str] = set()
    for a, b in zip(first, second, strict=True):
        if a == b:
            continue
        if skeleton(a) != skeleton(b):
            return False
        parts = list(zip(NUMBERS.split(a), NUMBERS.split(b), strict=True))
        k = next(k for k, (x, y) in enumerate(parts) if x != y)
        prefix = "".join(x for x, _ in parts[:k])
        here.add(prefix + parts[k][0])
        there.add(prefix + parts[k][1])
    return bool(here) and here.isdisjoint(there)


# Devices


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Devices that the plan treats alike; numbers are those of one of them. Shares are empty for those left out."""

    names: tuple[str, ...]
    shares: tuple[tuple[str, float], ...]
    memory_bytes: int
    limit_bytes: int
    without_s: float | None  # the step without one of them, if the plan knows

    @property
    def name(self) -> str:
        return pattern_of(self.names)


def device_rows(plan: Plan) -> tuple[DeviceRow, ...]:
    """A row for each kind of device, as long as the plan treats all of the kind alike."""
    position = {name: k for k, name in enumerate(plan.devices)}
    shares = (("work", plan.shares.work), *plan.shares.named)
    without = dict(plan.without_device)
    groups: dict[tuple[int, DeviceRow], list[str]] = {}
    for kind, (start, stop) in zip(plan.cluster.kinds, plan.cluster.spans, strict=True):
        for name in plan.cluster.device_names[start:stop]:
            k = position.get(name)
            own = () if k is None else tuple((by, fractions[k]) for by, fractions in shares)
            held = 0 if k is None else plan.memory_bytes[k]
            row = DeviceRow((), own, held, kind.memory_bytes, without.get(name))
            groups.setdefault((start, row), []).append(name)
    return tuple(replace(row, names=tuple(names)) for (_, row), names in groups.items())


def folded_seconds(named: Iterable[tuple[str, float]]) -> tuple[tuple[str, int, float], ...]:
    """Names that have the same seconds and differ in numbers only, as one: (pattern, how many, seconds)."""
    groups: dict[tuple[str, float], list[str]] = {}
    for name, seconds in named:
        groups.setdefault((skeleton(name), seconds), []).append(name)
    labels = told_apart([*groups.values()])
    return tuple(
        (label, len(names), seconds) for label, ((_, seconds), names) in zip(labels, groups.items(), strict=True)
    )


# Shares of parts of the model


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """Shares that belong to a part of the model: their name, and the modules whose steps are cut by them."""

    name: str
    modules: tuple[str, ...]
    steps: int


def segment_rows(plan: Plan) -> tuple[SegmentRow, ...]:
    """A row for each of the shares that is neither that of the work nor that of the state."""
    found = []
    for name, _ in plan.shares.named:
        if name == STATE:
            continue
        steps = [step for step in plan.program.steps if any(p.by == name for p in (*step.rule.needs, *step.rule.gives))]
        alike: dict[str, list[str]] = {}
        for module in dict.fromkeys(step.node.source.module for step in steps):
            alike.setdefault(skeleton(module), []).append(module)
        modules = tuple(pattern_of(names) or "outside of modules" for names in alike.values())
        found.append(SegmentRow(name, modules, len(steps)))
    return tuple(found)


def parameters_of(program: Program) -> dict[str, Placement]:
    """How each parameter is stored, by its name in the model."""
    placed = dict(program.leaves)
    return {leaf.target: placed[leaf.value.name] for leaf in program.graph.parameters}
