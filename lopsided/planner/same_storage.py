"""Another graph of the same model on the storage of a plan: another shape, another mode, a loss with more around it.

In: a graph, a plan. Out: `stored_program`, a legal program of that graph that stores every parameter as the plan does,
with what is chosen beside it; `plan_for_shapes`, the plan whose storage is best for several shapes together.

Where the graph has the same calls as the planned one (another length), its best program is looked for: the plan's own
choices compete with what searches find that know where parameters are, each sent in what suits it, and the timeline
decides (`best_on`). Where it has more (an accuracy that is returned beside the loss), the plan's choices are taken over
and the search is asked for the rest. Where it is another one (batch norm in evaluation is another op), the search is
asked for all, with the plan's shares and stores.

Storage does not depend on shapes, so for a distribution of them the plans for the smallest, the largest, and the one on
which most time is spent offer theirs:

    argmin over plans p   Σ over shapes s   often(s) · step_s(best_on(s, p))

and where p is of another shape than the one asked for, its storage and its shares are taken over for that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lopsided.cluster.cluster import FEW_KINDS, Cluster
from lopsided.errors import LopsidedError, PlanError
from lopsided.ir.graph import Graph, Leaf, Node
from lopsided.ir.notation import Rule
from lopsided.ir.placement import Placement, S, Shares
from lopsided.ir.program import Program, RuleBook, Step, check_program, parse_program
from lopsided.ops.derive import derive_rules
from lopsided.planner.candidates import Candidate, Limits, excess, shares_by
from lopsided.planner.part_search import ESTIMATES
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import breakdown_of, every_device, plan_graph
from lopsided.planner.proposals import CandidatePool
from lopsided.planner.search import search
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.decisions import Decisions, Rerun, parse_decisions
from lopsided.schedule.regions import reruns_in

# Of the storages that are offered, the two that seem best are looked at closely.
_OFFERS = 2


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """A program on the storage of a plan, and what is chosen beside it. It prints and parses."""

    program: Program
    decisions: Decisions

    def __str__(self) -> str:
        return f"{self.decisions}\n{self.program}"


def parse_stored_program(text: str, graph: Graph) -> StoredProgram:
    """The stored program of `graph` that prints as `text`."""
    decisions, _, program = text.partition("\n")
    return StoredProgram(parse_program(program, graph), parse_decisions(decisions))


def plan_for_shapes(
    graphs: Sequence[Graph], often: Sequence[float], cluster: Cluster, *, optimizer: str = "adamw"
) -> Plan:
    """The plan of the first graph with the storage that is best for all, met so often. They are of one model."""
    if not graphs or len(graphs) != len(often):
        raise PlanError("every shape needs a graph and how often it is met", do="give as many weights as graphs")
    shapes: dict[str, _Shape] = {}
    for graph, weight in zip(graphs, often, strict=True):
        known = shapes.get(graph.fingerprint)
        shapes[graph.fingerprint] = (
            _Shape(graph, derive_rules(graph), weight) if known is None else replace(known, often=known.often + weight)
        )
    first = shapes[graphs[0].fingerprint]
    sizes = sorted(shapes.values(), key=lambda shape: shape.size)
    most = max(sizes, key=lambda shape: shape.often * shape.size)
    # At once: a batch in rounds has another graph.
    plans = {
        id(shape): plan_graph(shape.graph, cluster, book=shape.book, optimizer=optimizer, microbatches=1)
        for shape in {id(shape): shape for shape in (first, sizes[0], most, sizes[-1])}.values()
    }
    met = [shape for shape in sizes if shape.often]
    offers = list({_storage(plan): plan for plan in plans.values()}.values())
    if len(offers) > _OFFERS:
        offers = sorted(offers, key=lambda offer: _expected(met, offer, closely=False))[:_OFFERS]
    best: tuple[tuple[int, float], Plan] | None = None
    for offer in offers:
        expected = _expected(met, offer, closely=len(offers) > 1)
        if best is None or expected < best[0]:
            best = expected, offer
    if best is None or best[0][0]:
        raise PlanError(
            "no storage that one shape is planned with has room for all of them",
            where=f"{len(shapes)} shapes on {cluster.name}",
            do="plan for the largest shape alone, by leaving batches= out",
        )
    return _moved(best[1], first, plans[id(first)])


@dataclass(frozen=True)
class _Shape:
    """One of a distribution: its graph, and how often it is met."""

    graph: Graph
    book: RuleBook
    often: float

    @property
    def size(self) -> int:
        """Elements of all values: about how long it takes."""
        return sum(value.elements for value in self.graph.values.values())


def _storage(plan: Plan) -> object:
    """What two plans have in common that store every parameter alike."""
    return plan.on.fingerprint, plan.shares, tuple(_stored(plan).items())


def _stored(plan: Plan) -> dict[str, Placement]:
    placed = dict(plan.program.leaves)
    return {leaf.target: placed[leaf.value.name] for leaf in plan.graph.parameters}


def _expected(shapes: Sequence[_Shape], offer: Plan, *, closely: bool) -> tuple[int, float]:
    """On the storage of a plan: how many shapes have no room, and the mean step, or a guess at it."""
    made = []
    for shape in shapes:
        judged = _Judged(shape.graph, offer, shape.book)
        if closely:
            judged.search(offer.shares)
        made.append((judged.best, shape.often))
    return sum(not one.fits for one, _ in made), sum(often * one.step_s for one, often in made)


def _moved(plan: Plan, shape: _Shape, alone: Plan) -> Plan:
    """A plan for this shape, of which `alone` is the plan by itself: that one with another storage."""
    found = best_on(shape.graph, plan, shape.book)
    if plan.graph is shape.graph and found.step_s >= plan.step_s:
        return plan
    note = f"stored as is best for a distribution of shapes; for this one alone a step would take {alone.step_s:.4g} s"
    return replace(
        alone,
        on=plan.on,
        program=found.program,
        shares=plan.shares,
        regather=found.regather,
        bucket_bytes=found.bucket_bytes,
        reruns=found.reruns,
        on_host=found.on_host,
        step_s=found.step_s,
        breakdown=breakdown_of(found.timeline),
        memory_bytes=every_device(plan.on, found.memory),
        notes=(*alone.notes, note),
    )


def step_on(graph: Graph, plan: Plan) -> float:
    """Seconds of a step of this graph on a plan's storage and shares; infinite where a device has no room for it."""
    found = best_on(graph, plan)
    return found.step_s if found.fits else math.inf


# One shape


def stored_program(graph: Graph, plan: Plan) -> StoredProgram:
    """A legal program of `graph` with the plan's parameters where they are, and what is chosen beside it."""
    if _is_another_shape(graph, plan):
        best = best_on(graph, plan)
        how = Decisions(
            best.bucket_bytes,
            regather=best.regather,
            stretch=plan.stretch,
            reruns=best.reruns,
            on_host=best.on_host,
            microbatches=plan.microbatches,
        )
        return StoredProgram(best.program, how)
    reruns = tuple(reruns_in(graph, plan.reruns))
    return StoredProgram(_like_the_plan(graph, plan, derive_rules(graph)), replace(plan.decisions, reruns=reruns))


def best_on(graph: Graph, plan: Plan, book: RuleBook | None = None) -> Candidate:
    """The quickest that fits of the programs of another shape on the plan's storage, with the plan's shares; if none
    fits, the one that comes nearest."""
    judged = _Judged(graph, plan, book or derive_rules(graph))
    for shares in judged.seeds():
        judged.search(shares)
    if not judged.best.fits:
        judged.add_recomputed()
    return judged.best


class _Judged:
    """Programs of a graph on the storage of a plan, as the timeline judges them."""

    def __init__(self, graph: Graph, plan: Plan, book: RuleBook) -> None:
        self.plan, stored = plan, _stored(plan)

        def stores(leaf: Leaf) -> tuple[Placement, ...]:
            return (stored[leaf.target],)

        limits = Limits(stores, lambda node, rule: True)
        optimizer = optimizer_named(plan.optimizer)
        self.pool = CandidatePool(graph, book, optimizer, limits, lambda progress: None, microbatches=plan.microbatches)
        # What is done so that the planned shape fits may be more than another needs.
        self.ways = list(dict.fromkeys(((tuple(reruns_in(graph, plan.reruns)), plan.regather), ((), False))))
        self._made: list[Candidate] = []
        self._known: list[Program] = []
        self.add(_like_the_plan(graph, plan, book))

    @property
    def best(self) -> Candidate:
        return min(self._made, key=lambda one: (0.0, one.step_s) if one.fits else (excess(one), one.step_s))

    def seeds(self) -> Iterator[Shares]:
        """The shares by which searches price: those of the plan, and those by which few devices would do the work."""
        on, shares = self.plan.on, self.plan.shares
        yield shares
        if 1 < len(on.kinds) <= FEW_KINDS:
            for number in range(len(on.kinds)):
                alone = shares_by(on, [float(k == number) for k in range(len(on.kinds))])
                yield Shares(alone.work, shares.named)

    def search(self, shares: Shares) -> None:
        """What searches find that price by these shares, whatever is expected to hide."""
        for hidden in ESTIMATES:
            self.add(self.pool.search(self.plan.on, shares, hidden=hidden, regather=self.plan.regather).program)

    def add(self, program: Program) -> None:
        """This program, in buckets that suit it, with what is run or gathered again in the planned shape or without."""
        if program in self._known:
            return
        self._known.append(program)
        for reruns, regather in self.ways:
            made = self._judge(program, self.plan.bucket_bytes, reruns, regather)
            self._made.append(self._judge(program, self.pool.bucket_for(made), reruns, regather))

    def add_recomputed(self) -> None:
        """What is there, with all that may run again run again."""
        for program in self._known:
            self._made.append(self._judge(program, self.plan.bucket_bytes, self.pool.everything(program), True))

    def _judge(self, program: Program, bucket_bytes: int, reruns: tuple[Rerun, ...], regather: bool) -> Candidate:
        plan = self.plan
        about = ("same storage", plan.on, program, plan.shares, regather)
        return self.pool.judge(*about, bucket_bytes=bucket_bytes, reruns=reruns, on_host=plan.on_host)


def _is_another_shape(graph: Graph, plan: Plan) -> bool:
    """Whether the graph has the calls of the planned one, whatever their sizes."""
    planned = {node.name: (node.op, node.operands) for node in plan.graph.nodes}
    return {node.name: (node.op, node.operands) for node in graph.nodes} == planned


def _like_the_plan(graph: Graph, plan: Plan, book: RuleBook) -> Program:
    """With the plan's choices, as far as the graph has the same calls, and the cheapest for the rest."""
    planned = {step.node.name: step for step in plan.program.steps}
    alike = {node.name for node in graph.nodes if _is_alike(node, planned.get(node.name))}
    if alike == {*planned}:
        if len(alike) == len(graph.nodes) and (taken_over := _taken_over(graph, plan.program, book)) is not None:
            return taken_over
        try:
            return _searched(book, plan, lambda node, rule: node.name not in alike or rule == planned[node.name].rule)
        except LopsidedError:
            pass  # with other sizes, the planned rules may not be there
    return _searched(book, plan, lambda node, rule: True)


def _is_alike(node: Node, step: Step | None) -> bool:
    return (
        step is not None
        and node.op == step.node.op
        and node.operands == step.node.operands
        and len(node.results) == len(step.rule.gives)
    )


def _taken_over(graph: Graph, program: Program, book: RuleBook) -> Program | None:
    """The program, with everything placed likewise at the sizes of another shape; None where that is none."""
    if graph.updates != program.graph.updates or graph.loss != program.graph.loss:
        return None
    if [leaf.value.name for leaf in graph.leaves] != [leaf.value.name for leaf in program.graph.leaves]:
        return None
    likewise = _Likewise(program.graph, graph, book)
    nodes = {node.name: node for node in graph.nodes}
    found = Program(
        graph,
        tuple((name, likewise.at(name, placement)) for name, placement in program.leaves),
        tuple(likewise.step(nodes[step.node.name], step) for step in program.steps),
        program.loss,
        program.updates,
    )
    try:
        check_program(found, book)
    except LopsidedError:
        return None
    return found


class _Likewise:
    """Placements of the values of one graph, for those of another of other sizes."""

    def __init__(self, graph: Graph, other: Graph, book: RuleBook) -> None:
        self.before, self.now = graph.values, other.values
        # Of the values of nodes that touch one of another size.
        self.known: dict[str, set[Placement]] = {}
        changed = {name for name, value in self.now.items() if value.shape != self.before[name].shape}
        for node in other.nodes:
            names = (*node.operands, *(value.name for value in node.results))
            if not changed.isdisjoint(names):
                for rule in book.rules[node.name]:
                    for name, placement in zip(names, (*rule.needs, *rule.gives), strict=True):
                        self.known.setdefault(name, set()).add(placement)

    def at(self, name: str, placement: Placement) -> Placement:
        """Cut in as many pieces of another size, where a cut has a size (`S0/64`), or else in the same units."""
        before, now = self.before[name].shape, self.now[name].shape
        if not placement.is_shard or before == now:
            return placement
        dim, outer, unit = placement.dim, placement.outer, placement.unit
        resized = now[dim] // (outer * max(placement.length(before), 1))
        ways = [S(dim, outer, resized)] if unit > 1 and resized else []
        ways.append(S(dim, outer, unit))
        known = self.known.get(name, set())
        return next((way.cut_by(placement.by) for way in ways if way.fits(now) and way in known), placement)

    def step(self, node: Node, step: Step) -> Step:
        """The step of this node, which is one of the other graph."""
        needs = tuple(map(self.at, node.operands, step.rule.needs))
        gives = tuple(self.at(value.name, give) for value, give in zip(node.results, step.rule.gives, strict=True))
        pairs = zip(node.operands, step.chains, strict=True)
        chains = tuple(tuple(self.at(name, placement) for placement in chain) for name, chain in pairs)
        return Step(node, replace(step.rule, needs=needs, gives=gives), chains)


def _searched(book: RuleBook, plan: Plan, allowed: Callable[[Node, Rule], bool]) -> Program:
    costs = Costs(book.graph, plan.on, optimizer_named(plan.optimizer))
    prices = SharePrices(costs, Scale(plan.on, plan.shares), regather=plan.regather, microbatches=plan.microbatches)
    stored = _stored(plan)
    return search(book, prices, stores=lambda leaf: (stored[leaf.target],), allowed=allowed).program
