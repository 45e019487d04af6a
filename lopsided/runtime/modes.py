"""Other graphs of the same model: in evaluation, or under an autocast that the plan did not know.

In: the plan, and a graph captured in another mode. Out: a program for it that stores every parameter as the plan does.

Where the graph has the same calls as the planned one (autocast, dropout switched off) the plan's choices are taken
over. Where not (batch norm in evaluation is another op), the search is asked, with the plan's shares and stores.
"""

from __future__ import annotations

from lopsided.errors import LopsidedError
from lopsided.ir.graph import Graph
from lopsided.ir.program import Program, RuleBook, Step, check_program
from lopsided.ops.derive import derive_rules
from lopsided.planner.plan_data import Plan
from lopsided.planner.search import search
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, optimizer_named


def program_for(graph: Graph, plan: Plan) -> Program:
    """A legal program of `graph` with the plan's parameters where they are."""
    book = derive_rules(graph)
    taken_over = _taken_over(graph, plan.program, book)
    return taken_over if taken_over is not None else _searched(book, plan)


def _taken_over(graph: Graph, program: Program, book: RuleBook) -> Program | None:
    planned = {step.node.name: step for step in program.steps}
    nodes = {node.name: node for node in graph.nodes}
    if {*planned} != {*nodes} or graph.updates != program.graph.updates or graph.loss != program.graph.loss:
        return None
    if [leaf.value.name for leaf in graph.leaves] != [leaf.value.name for leaf in program.graph.leaves]:
        return None
    steps = []
    for step in program.steps:
        node = nodes[step.node.name]
        if node.op != step.node.op or node.operands != step.node.operands or len(node.results) != len(step.rule.gives):
            return None
        steps.append(Step(node, step.rule, step.chains))
    found = Program(graph, program.leaves, tuple(steps), program.loss, program.updates)
    try:
        check_program(found, book)
    except LopsidedError:
        return None
    return found


def _searched(book: RuleBook, plan: Plan) -> Program:
    costs = Costs(book.graph, plan.on, optimizer_named(plan.optimizer))
    prices = SharePrices(costs, Scale(plan.on, plan.shares), regather=plan.regather)
    targets = {leaf.value.name: leaf.target for leaf in plan.graph.parameters}
    stored = {targets[name]: placement for name, placement in plan.program.leaves if name in targets}
    return search(book, prices, stores=lambda leaf: (stored[leaf.target],)).program
