"""Regions that run again in the backward pass in place of keeping what their nodes save.

In: a `Program` and `Decisions`: the regions that the model checkpoints itself, and those that the planner adds
(`Rerun`). Out: `RegionNodes`, each with the nodes that really run again, and those whose results are kept instead.

The one idea: going backward a region needs what its nodes save, and whatever that is made of. Walked from its end, a
node runs again if somebody needs what it makes, or if it makes something for itself to keep (a mask); a node that the
level spares is kept instead, if somebody needs it; and what nobody needs (the last product of a layer, the sum after
it) does neither. Ops that draw random numbers or talk run again in any case: the others' draws and the other devices
count on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lopsided.errors import ProgramError
from lopsided.ir.graph import Graph, Node, reruns
from lopsided.ir.notation import Rule
from lopsided.ir.program import Program, Step
from lopsided.ops import describe
from lopsided.ops.op import Call
from lopsided.schedule.decisions import Decisions, Level, Rerun
from lopsided.schedule.flops import is_product
from lopsided.schedule.loss_heads import head_of, loss_heads


@dataclass(frozen=True, slots=True)
class RegionNodes:
    """Consecutive nodes, those of them that run `again`, those whose results are `kept`, and on which kinds."""

    nodes: tuple[str, ...]
    again: frozenset[str]
    kept: tuple[str, ...] = ()
    kinds: tuple[int, ...] = ()

    def is_on(self, kind: int) -> bool:
        return not self.kinds or kind in self.kinds


def regions_of(program: Program, decisions: Decisions) -> tuple[RegionNodes, ...]:
    """The regions of a step, in the order of the program. Those of the model run again as they are."""
    graph = program.graph
    heads = [head_of(graph, rerun).nodes for rerun in decisions.reruns if rerun.level == "chunked"]
    places = {step.node.name: k for k, step in enumerate(program.steps)}
    own = reruns(graph) if decisions.recompute else {}
    found: list[tuple[int, RegionNodes]] = []
    numbered = itertools.groupby(graph.nodes, key=lambda node: node.context.recompute if node.name in own else 0)
    for number, nodes in numbered:
        if number:
            names = tuple(node.name for node in nodes)
            found.append((places[names[0]], RegionNodes(names, frozenset(names))))
    for rerun in decisions.reruns:
        if rerun.level not in ("chunked", "offload"):
            first, steps = _steps_of(program, places, rerun)
            found.append((first, region_of(graph, [(step.node, step.rule) for step in steps], rerun)))
    chunked = {name for nodes in heads for name in nodes}
    away = [(places[region.nodes[0]], region) for region in offloaded_of(program, decisions)]
    held = [name for _, region in (*found, *away) for name in region.nodes]
    if len(chunked) < sum(map(len, heads)) or not chunked.isdisjoint(held):
        raise ProgramError("a loss runs some rows at a time and again, or saves in host memory", do=_LEAVE_ONE)
    found.sort(key=lambda pair: pair[0])
    away.sort(key=lambda pair: pair[0])
    for (_, one), (start, other) in (*itertools.pairwise(found), *itertools.pairwise(away)):
        if start <= places[one.nodes[-1]]:
            raise ProgramError(
                f"{other.nodes[0]} is in two regions", do=f"{_LEAVE_ONE}; those of the model are its own"
            )
    for start, one in away:
        last = places[one.nodes[-1]]
        for begin, other in found:
            if begin <= last and start <= places[other.nodes[-1]] and not _are_apart(one.kinds, other.kinds):
                what = f"{other.nodes[0]} runs again, and what it saves is in host memory, on the same devices"
                raise ProgramError(what, do=_LEAVE_ONE)
    return tuple(region for _, region in found)


_LEAVE_ONE = "leave one out"


def offloaded_of(program: Program, decisions: Decisions) -> tuple[RegionNodes, ...]:
    """The regions of which nothing runs again, because what their nodes save is in the memory of the host."""
    offloaded = [rerun for rerun in decisions.reruns if rerun.level == "offload"]
    if offloaded and decisions.regather:
        # What is saved of gathered copies is a note to gather them again, and both would take its place.
        raise ProgramError(
            f"{offloaded[0]}: what is saved cannot be in host memory where parameters are gathered again",
            do="leave one out: regather, or the regions with offload",
        )
    places = {step.node.name: k for k, step in enumerate(program.steps)} if offloaded else {}
    found = []
    for rerun in offloaded:
        names = tuple(step.node.name for step in _steps_of(program, places, rerun)[1])
        found.append(RegionNodes(names, frozenset(), (), rerun.kinds))
    return tuple(found)


def _are_apart(kinds: Sequence[int], others: Sequence[int]) -> bool:
    return bool(kinds) and bool(others) and {*kinds}.isdisjoint(others)


def _steps_of(program: Program, places: Mapping[str, int], rerun: Rerun) -> tuple[int, Sequence[Step]]:
    first, last = (_place(places, name, rerun) for name in (rerun.first, rerun.last))
    steps = program.steps[first : last + 1]
    if not steps:
        raise ProgramError(f"{rerun} ends before it begins", do="name the first node first")
    return first, steps


def _place(places: Mapping[str, int], name: str, rerun: Rerun) -> int:
    if name not in places:
        raise ProgramError(f"the graph has no node {name[:60]!r}", where=f"region {rerun}", do="name the graph's nodes")
    return places[name]


def region_of(graph: Graph, steps: Sequence[tuple[Node, Rule | None]], rerun: Rerun) -> RegionNodes:
    """What of these nodes runs again. Without a rule, a node is taken to compute as it does on one device."""
    parameters = graph.parameter_names
    needed: set[str] = set()
    again: list[str] = []
    kept: list[str] = []
    for node, rule in reversed(steps):
        spared = is_spared(node, parameters, rerun.level)
        if any(value.grad for value in node.results):
            needed.update(node.saved.values)
            if "scaled_dot_product_attention" in node.op:
                # Its kernels differ in what they keep; those of GPUs keep all of these.
                needed.update((*node.operands, *(value.name for value in node.results)))
            if node.saved.extra_bytes or node.context.autocast:
                # What it has made for itself to keep (a narrow copy) is made of its operands.
                needed.update(node.operands)
        must = (rule is not None and rule.how not in ("plain", "sfb")) or _draws(graph, node)
        makes_own = node.saved.extra_bytes and not (is_product(node.op) and _has_weight(node, parameters))
        if not (must or makes_own or any(value.name in needed for value in node.results)):
            continue
        if spared and not must:
            kept.append(node.name)
        else:
            again.append(node.name)
            needed.update(node.operands)
    names = tuple(node.name for node, _ in steps)
    return RegionNodes(names, frozenset(again), tuple(reversed(kept)), rerun.kinds)


def is_spared(node: Node, parameters: frozenset[str], level: Level) -> bool:
    """Whether a level keeps what a node makes rather than running it again."""
    if level == "whole" or not is_product(node.op):
        return False
    return level == "cheap" or _has_weight(node, parameters)


def _has_weight(node: Node, parameters: frozenset[str]) -> bool:
    return any(name in parameters for name in node.operands)


def _draws(graph: Graph, node: Node) -> bool:
    """Whether an op may draw random numbers; one that nobody has described may."""
    entry = describe(node.op)
    if entry is None:
        return True
    call = Call.of(node, graph.values)
    if entry.random and "scaled_dot_product_attention" not in node.op:
        return True
    return any(bool(call.arg(name)) for name in ("dropout_p", "dropout"))


def reruns_in(graph: Graph, planned: Sequence[Rerun]) -> Iterator[Rerun]:
    """Those that another graph of the same model has too: of a batch of another shape, or without labels."""
    places = {node.name: k for k, node in enumerate(graph.nodes)}
    own, ends = reruns(graph), {True: -1, False: -1}  # of those that run again and of those that do not
    heads = {(head.first, head.last) for head in loss_heads(graph)}
    for rerun in planned:
        if rerun.level == "chunked" and (rerun.first, rerun.last) not in heads:
            continue
        first, last = places.get(rerun.first, -1), places.get(rerun.last, -1)
        end = ends[rerun.level == "offload"]
        if end < first <= last and not any(node.name in own for node in graph.nodes[first : last + 1]):
            ends[rerun.level == "offload"] = last
            yield rerun
