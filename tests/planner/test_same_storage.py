"""One storage for several shapes: against every storage and every program of a small case, and what a shape decides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Link
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Placement, Shares
from lopsided.ir.program import Program, RuleBook, Step, check_program
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import STATE, data_parallel, stored_cut
from lopsided.planner.pins import stores_of
from lopsided.planner.planner import plan_graph
from lopsided.planner.recompute import blocks_of
from lopsided.planner.same_storage import (
    _taken_over,
    best_on,
    parse_stored_program,
    plan_for_shapes,
    step_on,
    stored_program,
)
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.decisions import Decisions, Rerun
from lopsided.schedule.lower import lower
from lopsided.schedule.pricing import price
from lopsided.schedule.timeline import run
from tests.support.clusters import cluster, kinds
from tests.support.jobs import plan_of, prices_of
from tests.support.small_net import THREE

SPEC = "gpt2:layers=1,width=16,heads=2,vocab=31,dropout=0,batch=6,seq={}"
SHORT, LONG = 2, 24
GRID = (0.0, 1 / 3, 2 / 3, 1.0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight).sum()


def layer(length: int) -> Graph:
    return capture(Layer(), (torch.ones(4, length, 16),))


def unequal() -> Cluster:
    """Two devices: for short batches talking takes longer than the slow one can help."""
    return cluster(*kinds(2e8, 1e8, name="cpu-", bytes_per_s=1e10, launch_s=1e-9), link=Link(2e-5, 4e7), name="two")


# Every program of a small graph


def every_program(book: RuleBook, stored: Placement) -> Iterator[Program]:
    """Every rule of every node, with operands converted at once, or by way of P, from whatever there is."""
    graph = book.graph
    inputs = [leaf for leaf in graph.leaves if leaf.kind == "input"]
    for placed in itertools.product(*(book.leaves[leaf.value.name] for leaf in inputs)):
        leaves = {leaf.value.name: at for leaf, at in zip(inputs, placed, strict=True)}
        leaves |= {leaf.value.name: stored for leaf in graph.parameters}
        order = tuple((leaf.value.name, leaves[leaf.value.name]) for leaf in graph.leaves)
        yield from _from(book, order, (), {name: (at,) for name, at in order})


def _from(
    book: RuleBook,
    leaves: tuple[tuple[str, Placement], ...],
    steps: tuple[Step, ...],
    facts: dict[str, tuple[Placement, ...]],
) -> Iterator[Program]:
    graph = book.graph
    if len(steps) == len(graph.nodes):
        for source in facts[graph.loss]:
            chain = (source,) if str(source) == "I" else (source, Placement("I"))
            yield Program(graph, leaves, steps, chain)
        return
    node = graph.nodes[len(steps)]
    for rule in book.rules[node.name]:
        ways = [
            [(need,)] if need in facts[name] else [(source, need) for source in facts[name]]
            for name, need in zip(node.operands, rule.needs, strict=True)
        ]
        for chains in itertools.product(*ways):
            now = dict(facts)
            for name, chain in zip(node.operands, chains, strict=True):
                now[name] = tuple(dict.fromkeys((*now[name], *chain)))
            now |= {value.name: (give,) for value, give in zip(node.results, rule.gives, strict=True)}
            yield from _from(book, leaves, (*steps, Step(node, rule, tuple(chains))), now)


def best_steps(graph: Graph, on: Cluster) -> dict[object, float]:
    """For every storage (how the weight is placed, and by which shares) the shortest step of any program."""
    book = derive_rules(graph)
    costs, found = Costs(graph, on, optimizer_named("adamw")), dict[object, float]()
    (weight,) = graph.parameters
    for stored in stores_of(book)[weight.value.name]:
        for program in every_program(book, stored):
            check_program(program, book)
            priced = price(lower(program, Decisions()), costs)
            for work, state in itertools.product(GRID, GRID if stored.by else GRID[:1]):
                shares = Shares((work, 1 - work), ((STATE, (state, 1 - state)),))
                key = (stored, state if stored.by else work if stored.is_shard else 0.0)
                step_s = run(priced, costs.network, Scale(on, shares)).step_s
                found[key] = min(found.get(key, step_s), step_s)
    return found


def test_no_storage_of_a_small_case_is_better_and_none_suits_both_lengths() -> None:
    """Every storage × every program × shares in thirds: the one that is chosen is the best of all for the
    distribution, and where short batches want one device and long ones two, some length pays whatever is stored."""
    graphs, where = {length: layer(length) for length in (SHORT, LONG)}, unequal()
    fast = where.only([0])
    alone = {length: plan_graph(graph, fast).step_s for length, graph in graphs.items()}
    both = {length: best_steps(graph, where) for length, graph in graphs.items()}
    own = {length: min(alone[length], *both[length].values()) for length in graphs}
    assert own[SHORT] == alone[SHORT]
    assert own[LONG] < 0.8 * alone[LONG]
    every = [alone, *({length: both[length][key] for length in graphs} for key in both[SHORT])]
    least_loss = min(max(steps[length] / own[length] for length in graphs) for steps in every)
    assert least_loss > 1.2
    for often in (0.2, 0.9, 0.99):
        weights = {SHORT: often, LONG: 1 - often}
        best = min(sum(weights[length] * steps[length] for length in graphs) for steps in every)
        plan = plan_for_shapes([graphs[LONG], graphs[SHORT]], [weights[LONG], weights[SHORT]], where)
        found = sum(weights[length] * step_on(graph, plan) for length, graph in graphs.items())
        # Shares of the plan are finer than thirds.
        assert found <= best * (1 + 1e-9)


@cache
def text_of(length: int) -> Graph:
    return capture(*load(SPEC.format(length)))


def test_a_length_can_do_as_the_plan_does_in_units_of_its_own() -> None:
    """Rows of text are cut between texts, so in units of a length: those of the plan are no rule of another."""
    book = derive_rules(text_of(12))
    plan = plan_of(stored_cut(data_parallel(book, prices_of(book.graph, THREE))), THREE)
    assert "S0/12" in str(plan.program)
    found = _taken_over(text_of(5), plan.program, derive_rules(text_of(5)))
    assert found is not None
    assert str(found) == str(plan.program).replace("S0/12", "S0/5")


def test_what_only_the_planned_shape_needs_is_not_done_for_others() -> None:
    """A plan that gathers parameters again and runs a layer again, for lack of memory: a short batch has room."""
    book = derive_rules(text_of(12))
    plan = plan_of(stored_cut(data_parallel(book, prices_of(book.graph, THREE))), THREE, regather=True)
    blocks = blocks_of(plan.graph)
    names = [node.name for node in plan.graph.nodes]
    plan = replace(plan, reruns=tuple(Rerun(names[start], names[end - 1]) for start, end in blocks[:1]))
    short = stored_program(text_of(5), plan)
    assert not short.decisions.regather
    assert not short.decisions.reruns
    assert parse_stored_program(str(short), text_of(5)) == short
    # Where there is no room, both are taken over, or more.
    kept = best_on(text_of(5), plan).memory[0]
    small = replace(plan.on.kinds[0], memory_bytes=int(kept * 0.99))
    tight = replace(plan, on=replace(plan.on, kinds=(small,)))
    found = best_on(text_of(5), tight)
    assert found.regather or found.reruns
    assert found.memory[0] < kept
