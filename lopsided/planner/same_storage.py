"""Another graph of the same model on the storage of a plan: another shape, another mode, a loss with more around it.

In: a graph, a plan. Out: `program_for`, a legal program of that graph that stores every parameter as the plan does;
`plan_for_shapes`, the plan whose storage is best for several shapes together.

Where the graph has the same calls as the planned one (autocast, dropout switched off, another length) the plan's
choices are taken over. Where it has more (an accuracy that is returned beside the loss), they are taken over and the
search is asked for the rest. Where it is another one (batch norm in evaluation is another op), the search is asked for
all, with the plan's shares and stores.

Storage does not depend on shapes, so for a distribution of them each shape's own best plan offers its storage:

    argmin over plans p   Σ over shapes s   often(s) · step_s(program_for(s, p))

and where p is of another shape than the one asked for, its storage and its shares are taken over for that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from lopsided.cluster.cluster import Cluster
from lopsided.errors import LopsidedError, PlanError
from lopsided.ir.graph import Graph, Node
from lopsided.ir.notation import Rule
from lopsided.ir.program import Program, RuleBook, Step, check_program
from lopsided.ops.derive import derive_rules
from lopsided.planner.candidates import memory_limits
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import plan_graph, predict
from lopsided.planner.search import search
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, optimizer_named


def plan_for_shapes(
    graphs: Sequence[Graph], often: Sequence[float], cluster: Cluster, *, optimizer: str = "adamw"
) -> Plan:
    """The plan of the first graph with the storage that is best for all, met so often. They are of one model."""
    if not graphs or len(graphs) != len(often):
        raise PlanError("every shape needs a graph and how often it is met", do="give as many weights as graphs")
    # At once: a batch in rounds has another graph.
    plans = [plan_graph(graph, cluster, optimizer=optimizer, microbatches=1) for graph in graphs]
    expected = [
        sum(weight * step_on(graph, offer) for graph, weight in zip(graphs, often, strict=True)) for offer in plans
    ]
    least = min(expected)
    if math.isinf(least):
        raise PlanError(
            "no storage that one shape is planned with has room for all of them",
            where=f"{len(graphs)} shapes on {cluster.name}",
            do="plan for the largest shape alone, by leaving batches= out",
        )
    return moved(plans[expected.index(least)], graphs[0], plans[0])


def step_on(graph: Graph, plan: Plan) -> float:
    """Seconds of a step of this graph on a plan's storage and shares; infinite where a device has no room for it."""
    if graph is plan.graph:
        return plan.step_s
    step_s, _, memory = predict(
        program_for(graph, plan), plan.shares, plan.on, plan.optimizer, plan.regather, plan.bucket_bytes
    )
    limits = memory_limits(plan.on)
    room = [limit for limit, kind in zip(limits, plan.on.kinds, strict=True) for _ in range(kind.devices)]
    return step_s if all(held <= most for held, most in zip(memory, room, strict=True)) else math.inf


def moved(plan: Plan, graph: Graph, alone: Plan) -> Plan:
    """The plan for this graph, of which `alone` is the plan by itself: that one with another storage."""
    if plan.graph is graph:
        return plan
    program = program_for(graph, plan)
    step_s, breakdown, memory = predict(program, plan.shares, plan.on, plan.optimizer, plan.regather, plan.bucket_bytes)
    note = f"stored as is best for a distribution of shapes; for this one alone a step would take {alone.step_s:.4g} s"
    return replace(
        alone,
        on=plan.on,
        program=program,
        shares=plan.shares,
        regather=plan.regather,
        bucket_bytes=plan.bucket_bytes,
        reruns=(),
        step_s=step_s,
        breakdown=breakdown,
        memory_bytes=memory,
        notes=(*alone.notes, note),
    )


def program_for(graph: Graph, plan: Plan) -> Program:
    """A legal program of `graph` with the plan's parameters where they are."""
    book = derive_rules(graph)
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
    if graph.updates != program.graph.updates or graph.loss != program.graph.loss:
        return None
    if [leaf.value.name for leaf in graph.leaves] != [leaf.value.name for leaf in program.graph.leaves]:
        return None
    found = program.for_graph(graph)
    try:
        check_program(found, book)
    except LopsidedError:
        return None
    return found


def _searched(book: RuleBook, plan: Plan, allowed: Callable[[Node, Rule], bool]) -> Program:
    costs = Costs(book.graph, plan.on, optimizer_named(plan.optimizer))
    prices = SharePrices(costs, Scale(plan.on, plan.shares), regather=plan.regather, microbatches=plan.microbatches)
    targets = {leaf.value.name: leaf.target for leaf in plan.graph.parameters}
    stored = {targets[name]: placement for name, placement in plan.program.leaves if name in targets}
    return search(book, prices, stores=lambda leaf: (stored[leaf.target],), allowed=allowed).program
