"""The same graph in another dtype: to plan for a model as it will be trained.

In: a `Graph`. Out: the same with its float32 in another floating dtype, and what the backward pass keeps found anew.
"""

from __future__ import annotations

from dataclasses import replace

from lopsided.capturing.saved_tensors import record_saved
from lopsided.errors import InputError
from lopsided.ir.graph import DTYPES, Arg, Atom, Graph, Node, Value


def in_dtype(graph: Graph, dtype: str) -> Graph:
    """The graph of the same model with its float32 parameters, inputs and values in another floating dtype."""
    floats = [name for name in DTYPES if DTYPES[name].is_floating_point]
    if dtype not in floats:
        raise InputError(f"there is no floating dtype {dtype!r}", do=f"choose from {', '.join(floats)}")
    if dtype == "f32":
        return graph

    def value(v: Value) -> Value:
        return replace(v, dtype=dtype) if v.dtype == "f32" else v

    def arg(a: Arg) -> Arg:
        if isinstance(a, tuple):
            return tuple(map(arg, a))
        return Atom("dtype", dtype) if a == Atom("dtype", "f32") else a

    def node(n: Node) -> Node:
        return replace(
            n,
            args=tuple(map(arg, n.args)),
            kwargs=tuple((key, arg(a)) for key, a in n.kwargs),
            results=tuple(map(value, n.results)),
        )

    leaves = tuple(replace(leaf, value=value(leaf.value)) for leaf in graph.leaves)
    # What the backward pass keeps depends on dtypes: some kernels keep statistics in float32.
    return record_saved(Graph(leaves, tuple(map(node, graph.nodes)), graph.loss, graph.updates))
