"""In what two graphs differ, in words: why a plan does not belong to a model.

In: the graph a plan was made for, the graph of this model and batch. Out: lines, the most telling first.
"""

from __future__ import annotations

from collections import Counter

from lopsided.ir.graph import Graph, Leaf


def differences(planned: Graph, here: Graph, most: int = 4) -> tuple[str, ...]:
    """At most so many lines; empty for graphs that compute the same."""
    if planned.fingerprint == here.fingerprint:
        return ()
    found = [
        *_leaves("input", planned, here),
        *_leaves("parameter", planned, here),
        *_leaves("buffer", planned, here),
    ]
    if not found:
        found = _ops(planned, here)
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return (*found[:most], *more)


def _leaves(kind: str, planned: Graph, here: Graph) -> list[str]:
    before = {leaf.target: leaf for leaf in planned.leaves if leaf.kind == kind}
    after = {leaf.target: leaf for leaf in here.leaves if leaf.kind == kind}
    lines = []
    for name, leaf in before.items():
        if name not in after:
            lines.append(f"{kind} {name} is planned and not there")
        elif _shape(leaf) != _shape(after[name]):
            lines.append(f"{kind} {name} was planned as {_shape(leaf)} and is {_shape(after[name])}")
        elif leaf.value.grad != after[name].value.grad:
            was = "trained" if leaf.value.grad else "frozen"
            lines.append(f"{kind} {name} was planned {was} and is not")
        elif leaf.also != after[name].also:
            lines.append(f"{kind} {name} is tied to other names than planned")
    lines += [f"{kind} {name} is there and not planned" for name in after if name not in before]
    return lines


def _shape(leaf: Leaf) -> str:
    return f"{leaf.value.dtype}[{', '.join(map(str, leaf.value.shape))}]"


def _ops(planned: Graph, here: Graph) -> list[str]:
    before, after = (Counter(node.op for node in graph.nodes) for graph in (planned, here))
    lines = [f"{op} is called {after[op]} times, {before[op]} were planned" for op in before if before[op] != after[op]]
    lines += [f"{op} is called and was not planned" for op in after if op not in before]
    if lines:
        return lines
    for one, other in zip(planned.nodes, here.nodes, strict=False):
        if one.context != other.context:
            was, now = (n.context.autocast or "no autocast" for n in (one, other))
            if was != now:
                return [f"%{one.name} was planned under {was} and runs under {now}"]
        if (one.op, one.args, one.kwargs) != (other.op, other.args, other.kwargs):
            return [f"%{one.name} is called otherwise than planned: {other.op}{other.args}"]
    return ["values differ in dtype or gradient"]
