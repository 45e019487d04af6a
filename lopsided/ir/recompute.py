"""Activation checkpointing: which nodes run forward a second time, before the backward pass of their region.

In: a `Graph` whose nodes say which region they belong to (`Context.recompute`). Out: which nodes those are, and what
they take from outside.

A region keeps what it takes from outside, and nothing of what its nodes save. Its backward pass first runs all of it
forward again. Parameters that are gathered in a region are gathered once more for that, and stay until the region has
run backward; nothing else that a region sends forward is spared.
"""

from __future__ import annotations

import itertools

from lopsided.ir.graph import Graph


def reruns(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Every node that runs again, by name, with the operands that come from outside its region, parameters apart.

    A region without a gradient has no backward pass, and is none.
    """
    parameters = {leaf.value.name for leaf in graph.parameters}
    found: dict[str, tuple[int, ...]] = {}
    for number, region in itertools.groupby(graph.nodes, key=lambda node: node.context.recompute):
        nodes = list(region)
        if not number or not any(value.grad for node in nodes for value in node.results):
            continue
        inside = set(parameters)
        for node in nodes:
            found[node.name] = tuple(k for k, name in enumerate(node.operands) if name not in inside)
            inside.update(value.name for value in node.results)
    return found


def retaken(graph: Graph) -> frozenset[str]:
    """What is taken again: if it is converted for that, then twice."""
    again = reruns(graph)
    return frozenset(name for node in graph.nodes if node.name in again for name in node.operands)
