"""Configurations that a competent engineer would try where memory is short, priced as plans are. Used by fits.py.

In: a graph and a cluster. Out: the quickest that fits, in seconds and in words. What is enumerated, one choice for all
layers and all devices alike:

    parameters   whole everywhere (dp); stored cut, gathered once a step and kept (zero), or gathered for every use
                 and freed (zero again)
    activations  kept; or of every block the cheap ones, attention, or all of them checkpointed; the loss whole or in
                 chunks
    state        of the optimizer on the devices, or all of it in the memory of the host
    rounds       the gradients of 1, 2, 4, … parts of the batch accumulated: the fewest with which the rest fits, since
                 more of them cost launches and sends and gain nothing else
    devices      all, those of one kind, or one; with equal shares, or by their datasheet's speed
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lopsided.cluster.cluster import Cluster
from lopsided.ir.graph import Graph
from lopsided.ir.program import Program, RuleBook, one_device
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.candidates import memory_limits, shares_by, speed_dtype
from lopsided.planner.recompute import blocks_of
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Calls, Costs, Scale, optimizer_named
from lopsided.schedule.decisions import LEVELS, Decisions, OnHost, Rerun
from lopsided.schedule.host_state import can_hold_state
from lopsided.schedule.loss_heads import loss_heads
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import Holding, bytes_per_kind, holdings
from lopsided.schedule.pricing import price
from lopsided.schedule.rounds import NoRoundsError, batch_size, in_rounds
from lopsided.schedule.schedule import Schedule
from lopsided.schedule.timeline import run

ADAMW = optimizer_named("adamw")
# The uses of memory of which a round has less than the batch.
_OF_A_ROUND = ("saved", "recomputed", "working")

Best = tuple[float, str]
NONE: Best = (float("inf"), "none")


@dataclass(frozen=True)
class _Way:
    """One choice for everything but the rounds."""

    parameters: str  # dp, zero, zero again, alone
    weights: tuple[float, ...]  # of each kind
    shared: str
    level: int  # of the levels below
    on_host: tuple[OnHost, ...]

    @property
    def regather(self) -> bool:
        return self.parameters == "zero again"


class _Round:
    """The graph of one round, and what is chosen of it for all clusters alike."""

    def __init__(self, graph: Graph, count: int, book: RuleBook) -> None:
        self.graph, self.count, self.book, self.calls = graph, count, book, Calls(graph)
        self._made: list[tuple[Program, dict[object, Schedule]]] = []
        self._held: dict[tuple[int, int], tuple[Holding, ...]] = {}

    @cached_property
    def levels(self) -> list[tuple[Rerun, ...]]:
        """What runs again, level by level, the loss whole and in chunks."""
        nodes, heads = self.graph.nodes, loss_heads(self.graph)
        chunks = tuple(head.chunked() for head in heads)
        whole, but_heads = blocks_of(self.graph), blocks_of(self.graph, {name for h in heads for name in h.nodes})
        found: list[tuple[Rerun, ...]] = []
        for blocks, beside in ((whole, ()), (but_heads, chunks)) if heads else ((whole, ()),):
            found.append(beside)
            for level in LEVELS:
                found.append((*(Rerun(nodes[a].name, nodes[b - 1].name, level) for a, b in blocks), *beside))
        return found

    def reruns(self, level: int) -> tuple[Rerun, ...]:
        """What runs again at a level of the batch at once. A loss of few rows has no chunks in a round."""
        return self.levels[level % len(self.levels)]

    def lowered(self, program: Program, way: _Way) -> Schedule:
        """Once for all clusters on which the program is the same."""
        known = next((kept for one, kept in self._made if one == program), None)
        if known is None:
            known = {}
            self._made.append((program, known))
        key = (way.regather, way.level, way.on_host)
        if key not in known:
            decisions = Decisions(
                regather=way.regather, reruns=self.reruns(way.level), on_host=way.on_host, microbatches=self.count
            )
            known[key] = lower(program, decisions)
        return known[key]

    def held(self, schedule: Schedule, devices: int) -> tuple[Holding, ...]:
        key = (id(schedule), devices)
        if key not in self._held:
            self._held[key] = holdings(schedule, ADAMW, devices=devices)
        return self._held[key]


class ByHand:
    """All of this for one graph."""

    def __init__(self, graph: Graph, book: RuleBook) -> None:
        self.graph = graph
        self.once = _Round(graph, 1, book)
        self._rounds: dict[int, _Round | None] = {1: self.once}

    def anywhere(self, on: Cluster) -> Best:
        """On all devices, on those of each kind, and on one of each."""
        found = self.best(on)
        for kind in on.kinds:
            if kind.devices > 1 and len(on.kinds) > 1:
                found = self.best(replace(on, kinds=(kind,)), f" on the {kind.devices} {kind.name}", found)
            if on.devices > 1:
                one = replace(on, kinds=(replace(kind, nodes=1, count=1),))
                found = self.best(one, f" on one {kind.name}", found)
        return found

    def best(self, on: Cluster, where: str = "", found: Best = NONE) -> Best:
        """The quickest that fits on all of these devices, or what was found before. No number of rounds is quicker than
        the batch at once would be with all else the same, had the devices the memory; and nothing that is checkpointed
        or on the host is quicker than what is not."""
        costs = Costs(self.graph, on, ADAMW, self.once.calls)
        programs = self.programs(self.once, on, costs)

        def bound_s(way: _Way) -> float:
            schedule = self.once.lowered(programs[way.parameters], way)
            return run(price(schedule, costs), costs.network, Scale(on, shares_by(on, way.weights))).step_s

        ways, rounds = self._ways(on), _RoundsOn(self, on)
        plain = [(bound_s(way), number) for number, way in enumerate(ways) if not way.level and not way.on_host]
        for least_s, number in sorted(plain):
            if least_s >= found[0]:
                break
            alike = [w for w in ways if (w.parameters, w.shared) == (ways[number].parameters, ways[number].shared)]
            needed = {way: rounds.needed(way) for way in alike}
            bounds = [(bound_s(way), number) for number, way in enumerate(alike) if needed[way] < math.inf]
            for least_s, number in sorted(bounds):
                if least_s >= found[0]:
                    break
                made = rounds.fewest(alike[number], needed[alike[number]])
                if made is not None:
                    found = min(found, (made[0], made[1] + where))
        return found

    def _ways(self, on: Cluster) -> list[_Way]:
        speeds = tuple(kind.flops(speed_dtype(self.graph)) for kind in on.kinds)
        even = tuple(1.0 for _ in speeds)
        shared = {"equal": even} if len({*speeds}) == 1 else {"equal": even, "by speed": speeds}
        levels = range(len(self.once.levels))
        hosts = can_hold_state(on)
        where = ((), tuple(map(OnHost, hosts))) if len(hosts) == len(on.kinds) else ((),)
        stored = ("dp", "zero", "zero again") if on.devices > 1 else ("alone",)
        return [
            _Way(parameters, weights, name, level, on_host)
            for parameters in stored
            for name, weights in shared.items()
            for level in levels
            for on_host in where
        ]

    @staticmethod
    def programs(rounds: _Round, on: Cluster, costs: Costs) -> dict[str, Program]:
        if on.devices == 1:
            return {"alone": one_device(rounds.graph)}
        even = shares_by(on, [1.0 for _ in on.kinds])
        plain = data_parallel(rounds.book, SharePrices(costs, Scale(on, even)))
        cut = stored_cut(plain)
        return {"dp": plain, "zero": cut, "zero again": cut}

    def counts(self) -> Iterator[int]:
        rows, last = batch_size(self.graph), 0
        for count in range(1, rows + 1):
            if rows % count == 0 and count >= 2 * last:
                last = count
                yield count

    def of(self, count: int) -> _Round | None:
        if count not in self._rounds:
            try:
                graph = in_rounds(self.graph, count).graph
                self._rounds[count] = _Round(graph, count, derive_rules(graph))
            except NoRoundsError:
                self._rounds[count] = None
        return self._rounds[count]


class _RoundsOn:
    """One cluster, in any number of rounds."""

    def __init__(self, by_hand: ByHand, on: Cluster) -> None:
        self.by_hand, self.on, self.limits = by_hand, on, memory_limits(on)
        self.made: dict[int, tuple[Costs, dict[str, Program]]] = {}

    def _laid(self, way: _Way, rounds: _Round) -> tuple[Schedule, Scale, Costs]:
        if rounds.count not in self.made:
            costs = Costs(rounds.graph, self.on, ADAMW, rounds.calls)
            self.made[rounds.count] = costs, self.by_hand.programs(rounds, self.on, costs)
        costs, programs = self.made[rounds.count]
        return rounds.lowered(programs[way.parameters], way), Scale(self.on, shares_by(self.on, way.weights)), costs

    def needed(self, way: _Way) -> float:
        """At least so many rounds, by what the batch at once holds; infinite where what rounds leave is too much."""
        schedule, scale, _ = self._laid(way, self.by_hand.once)
        held = self.by_hand.once.held(schedule, self.on.devices)
        of_round, kept = (
            bytes_per_kind([h for h in held if (h.use in _OF_A_ROUND) == of], scale) for of in (True, False)
        )
        rooms = [limit - size for limit, size in zip(self.limits, kept, strict=True)]
        return math.inf if min(rooms) <= 0 else max(a / b for a, b in zip(of_round, rooms, strict=True))

    def fewest(self, way: _Way, needed: float) -> Best | None:
        """The step with the fewest rounds that fit."""
        for count in self.by_hand.counts():
            if count < 0.99 * needed:
                continue
            rounds = self.by_hand.of(count)
            if rounds is None:
                return None
            schedule, scale, costs = self._laid(way, rounds)
            memory = bytes_per_kind(rounds.held(schedule, self.on.devices), scale)
            if all(used <= limit for used, limit in zip(memory, self.limits, strict=True)):
                step_s = run(price(schedule, costs), costs.network, scale).step_s
                return step_s, _told(way, rounds.reruns(way.level), count)
        return None


def _told(way: _Way, reruns: Sequence[Rerun], count: int) -> str:
    level = next((rerun.level for rerun in reruns if rerun.level != "chunked"), "no")
    said = [] if way.parameters == "alone" else [f"{way.parameters}, {way.shared}"]
    said.append(f"{level} checkpointing")
    said += ["loss in chunks"] if any(rerun.level == "chunked" for rerun in reruns) else []
    said += ["state on the host"] if way.on_host else []
    said += [f"{count} rounds"] if count > 1 else []
    return ", ".join(said)
