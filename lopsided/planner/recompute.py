"""What runs again in the backward pass so that a step fits: by time per byte, and on each kind of device apart.

In: a `Graph`, and a `Candidate` that does not fit. Out: `Rerun`s with which it is expected to.

The one idea: a model falls into blocks between the places where few values pass (`blocks_of`). For every block and
level of recomputation it is known what it frees and how long it takes (`_Choice`), so the cheapest bytes are freed
first, on each kind of device until that fits. A block that sends nothing forward may run again on some kinds and not on
others: the small card recomputes, the large one keeps. Where a byte travels to the memory of the host and back in less
time than it is made again, it travels (`_with_offload`). What the sum of all this holds at its peak, the exact count
says, and as long as that is too much, more is freed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lopsided.ir.graph import Graph, reruns
from lopsided.ir.program import Step
from lopsided.planner.candidates import Candidate
from lopsided.schedule.cost import Costs, Cut, Scale
from lopsided.schedule.decisions import LEVELS, REGION_LEVELS, Level, Rerun
from lopsided.schedule.flops import is_product
from lopsided.schedule.host_state import seconds_a_byte
from lopsided.schedule.memory import saved_in, taken_by
from lopsided.schedule.regions import region_of
from lopsided.schedule.schedule import Exchange, Redistribute, Schedule, nodes_of

_AROUND = 8  # nodes on either side among which a boundary has the fewest values passing
_LONG = 40  # nodes: what passes by more (a skip over half the model) is at many boundaries, and makes none
_COARSER = (1, 2, 4)  # so many blocks in one, where all of them run again

_ORDER = REGION_LEVELS.index  # by what is freed

_Priced = tuple[Level, tuple[float, ...], tuple[float, ...]]
"""A level of a block, with what it frees and takes on each kind beyond the one before."""

Span = tuple[int, int]
"""The first node of a block and the one after its last, by number."""


def blocks_of(graph: Graph, apart: Collection[str] = ()) -> tuple[Span, ...]:
    """Stretches of nodes between places where few values with a gradient pass, each with a product in it.

    Regions that the model checkpoints itself are its own matter: a block ends where one begins. So it is with nodes
    that are to stand `apart`.
    """
    nodes, passing, own = graph.nodes, _passing(graph), {*reruns(graph), *apart}
    parameters = graph.parameter_names
    found: list[Span] = []
    start, has_product = 0, False
    for k, node in enumerate(nodes):
        if node.name in own:
            start, has_product = k + 1, False
            continue
        has_product |= is_product(node.op) and not parameters.isdisjoint(node.operands)
        ends = k + 1 == len(nodes) or nodes[k + 1].name in own
        around = [count for count in passing[max(k - _AROUND, 0) : k + _AROUND + 1] if count]
        few = 0 < passing[k] == min(around, default=0)
        if has_product and (few or ends):
            found.append((start, k + 1))
            start, has_product = k + 1, False
    return tuple(found)


def _passing(graph: Graph) -> list[int]:
    """After each node, how many values with a gradient that nodes made before are used later."""
    last: dict[str, int] = {}
    for k, node in enumerate(graph.nodes):
        last.update(dict.fromkeys(node.operands, k))
    changes = [0] * (len(graph.nodes) + 1)
    for k, node in enumerate(graph.nodes):
        for value in node.results:
            if value.grad and k < last.get(value.name, k) <= k + _LONG:
                changes[k] += 1
                changes[last[value.name]] -= 1
    return list(itertools.accumulate(changes[:-1]))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A block at a level: which bytes it frees beyond the level before, and how long it takes for that, per kind."""

    block: int
    level: Level
    freed: tuple[float, ...]
    seconds: tuple[float, ...]

    def price(self, kind: int) -> float:
        return self.seconds[kind] / self.freed[kind]


class Recomputation:
    """What may run again of a program at some shares, priced."""

    def __init__(self, blocks: Sequence[Span], candidate: Candidate, schedule: Schedule, costs: Costs) -> None:
        self.program, self.blocks, self.rounds = candidate.program, blocks, schedule.decisions.microbatches
        self.kinds = range(len(candidate.on.kinds))
        # What a byte takes to the memory of the host and back; nobody goes there where parameters are gathered again.
        self.byte_s = {} if candidate.regather else seconds_a_byte(candidate.on)
        self.scale, self.costs = Scale(candidate.on, candidate.shares), costs
        self.sending = self._sending(schedule)
        alike: dict[object, list[_Priced]] = {}
        self.choices: list[_Choice] = []
        for number, (start, stop) in enumerate(blocks):
            steps = self.program.steps[start:stop]
            calls = tuple((costs.number(step.node), step.rule, step.chains) for step in steps)
            key = (calls, number in self.sending)
            if key not in alike:
                levels = list(self._levels(steps))
                alike[key] = list(self._with_offload(levels, sends=number in self.sending))
            self.choices += [_Choice(number, *about) for about in alike[key]]

    def _sending(self, schedule: Schedule) -> frozenset[int]:
        """The blocks that send something forward: these run again on all kinds or on none."""
        senders = {
            node
            for item, node in zip(schedule.forward, nodes_of(schedule.forward), strict=True)
            if isinstance(item, Exchange) or (isinstance(item, Redistribute) and item.transfer is not None)
        }
        steps = self.program.steps
        return frozenset(
            k for k, (start, stop) in enumerate(self.blocks) if any(s.node.name in senders for s in steps[start:stop])
        )

    def _with_offload(self, levels: Sequence[_Priced], *, sends: bool) -> Iterator[_Priced]:
        """The levels of a block on the kinds for which they are, and its saved tensors in host memory on the others:
        where a byte takes less to go there and back than to be made again at the dearer levels.

        A block that sends something forward runs again on all kinds or on none, so no level of it is on some.
        """
        left = [[*freed] for _, freed, _ in levels]
        moved, moved_s = [0.0 for _ in self.kinds], [0.0 for _ in self.kinds]
        for k, byte_s in self.byte_s.items():
            whole, whole_s = sum(freed[k] for _, freed, _ in levels), sum(seconds[k] for _, _, seconds in levels)
            if whole <= 0 or whole * byte_s >= whole_s:
                continue
            freed = taken_s = 0.0
            kept_levels = 0
            for _, more, seconds in levels:
                if sends or (more[k] > 0 and seconds[k] >= byte_s * more[k]):
                    break
                freed, taken_s, kept_levels = freed + more[k], taken_s + seconds[k], kept_levels + 1
            for part in left[kept_levels:]:
                part[k] = 0.0
            moved[k], moved_s[k] = whole - freed, max(whole * byte_s - taken_s, 0.0)
        for (level, _, seconds), kept in zip(levels, left, strict=True):
            if max(kept) > 0:
                yield level, tuple(kept), seconds
        if max(moved) > 0:
            yield "offload", tuple(moved), tuple(moved_s)

    def _levels(self, steps: Sequence[Step]) -> Iterator[_Priced]:
        """Level by level, what more is freed and what more it takes; one that frees nothing more is left out."""
        graph = self.program.graph
        kept = self._bytes(saved_in(graph, steps))
        before_s = (0.0,) * len(self.kinds)
        for level in LEVELS:
            rerun = Rerun(steps[0].node.name, steps[-1].node.name, level)
            region = region_of(graph, [(step.node, step.rule) for step in steps], rerun)
            now = self._bytes(taken_by(graph, steps, {*region.kept}))
            seconds = self._seconds([step for step in steps if step.node.name in region.again])
            freed = tuple(a - b for a, b in zip(kept, now, strict=True))
            if max(freed) > 0:
                yield level, freed, tuple(max(a - b, 0.0) for a, b in zip(seconds, before_s, strict=True))
                kept, before_s = now, seconds

    def _bytes(self, held: Mapping[Cut | None, int]) -> tuple[float, ...]:
        parts = [(size, self.scale.fractions(cut)) for cut, size in held.items()]
        return tuple(sum(size * fractions[k] for size, fractions in parts) for k in self.kinds)

    def _seconds(self, steps: Sequence[Step]) -> tuple[float, ...]:
        total = [0.0 for _ in self.kinds]
        for step in steps:
            cost = self.costs.op(step.node, step.rule)
            fractions = self.scale.fractions(cost.cut)
            total = [t + affine.at(f) for t, affine, f in zip(total, cost.forward, fractions, strict=True)]
        return tuple(total)

    def cheaper_than(self, byte_s: Mapping[int, float]) -> tuple[float, ...]:
        """Bytes on each kind that reruns free for less than so many seconds a byte in a step, which has them in every
        round; where none are given, all."""
        return tuple(
            sum(one.freed[k] for one in self.choices if one.freed[k] > 0 and self.rounds * one.price(k) < most_s)
            for k in self.kinds
            for most_s in [byte_s.get(k, math.inf)]
        )

    def freeing(self, wanted: Sequence[float]) -> tuple[Rerun, ...]:
        """The cheapest reruns that free so many bytes on each kind, or as many as there are."""
        levels: dict[int, dict[int, Level]] = {}  # of each block, on each kind
        for kind in self.kinds:
            useful = [choice for choice in self.choices if choice.freed[kind] > 0]
            # A level comes after the one before: a dear one that frees much is reached through it.
            ranked = sorted(useful, key=lambda choice: (choice.price(kind), _ORDER(choice.level), choice.block))
            left = wanted[kind]
            for choice in ranked:
                if left <= 0:
                    break
                had = levels.setdefault(choice.block, {})
                if kind not in had or _ORDER(had[kind]) < _ORDER(choice.level):
                    had[kind] = choice.level
                left -= choice.freed[kind]
        return tuple(rerun for block in sorted(levels) for rerun in self._reruns(block, levels[block]))

    def _reruns(self, block: int, levels: Mapping[int, Level]) -> Iterator[Rerun]:
        """One on the kinds on which it runs again, and one on those on which it saves in host memory."""
        away = {kind for kind, level in levels.items() if level == "offload"}
        for kinds in (levels.keys() - away, away):
            if not kinds:
                continue
            level = max((levels[kind] for kind in kinds), key=_ORDER)
            # What sends and runs again does so on all.
            every = len(kinds) == len(self.kinds) or (block in self.sending and not away)
            yield _region(self.program.graph, self.blocks[block], level, () if every else tuple(sorted(kinds)))

    def everything(self) -> Iterator[tuple[Rerun, ...]]:
        """All blocks, whole, on all kinds: one by one, and several in one, which take less from outside."""
        for times in _COARSER:
            spans: list[Span] = []
            for k, (start, stop) in enumerate(self.blocks):
                if k % times and spans[-1][1] == start:
                    spans[-1] = (spans[-1][0], stop)
                else:
                    spans.append((start, stop))
            yield everything(self.program.graph, spans)


def everything(graph: Graph, blocks: Sequence[Span]) -> tuple[Rerun, ...]:
    """All blocks, whole, on all kinds."""
    return tuple(_region(graph, span, "whole") for span in blocks)


def _region(graph: Graph, span: Span, level: Level, kinds: tuple[int, ...] = ()) -> Rerun:
    start, stop = span
    return Rerun(graph.nodes[start].name, graph.nodes[stop - 1].name, level, kinds)


def on_every_kind(candidate: Candidate) -> tuple[Rerun, ...]:
    """Its reruns, for devices that are not those they were chosen for: there may be no host to save in."""
    found: dict[tuple[str, str], Rerun] = {}
    for rerun in candidate.reruns:
        level: Level = "whole" if rerun.level == "offload" else rerun.level
        found.setdefault((rerun.first, rerun.last), replace(rerun, level=level, kinds=()))
    return tuple(found.values())
