"""The same graph in float64: rounding must not hide mistakes, and must not look like one.

In: a value, node or graph. Out: the same with every floating number wide, also where the model casts to less.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from lopsided.ir.graph import Arg, Atom, Graph, Node, Value
from lopsided.ir.op_call import aten_overload

TOLERANCE = 1e-9
"""How far, relatively, a distributed program may be from one device in float64."""

_WIDE = {"f32": "f64", "f16": "f64", "bf16": "f64", "c64": "c128"}


def widen_value(value: Value) -> Value:
    return replace(value, dtype=_WIDE.get(value.dtype, value.dtype))


def widen_node(node: Node) -> Node:
    """The node on wide numbers; autocast, which would narrow them again, is off."""
    return replace(
        node,
        args=tuple(_widen(arg) for arg in node.args),
        kwargs=_with_dtype(node, tuple((key, _widen(arg)) for key, arg in node.kwargs)),
        results=tuple(map(widen_value, node.results)),
        context=replace(node.context, autocast=""),
    )


def in_float64(graph: Graph) -> Graph:
    leaves = tuple(replace(leaf, value=widen_value(leaf.value)) for leaf in graph.leaves)
    return Graph(leaves, tuple(map(widen_node, graph.nodes)), graph.loss, graph.updates)


@contextmanager
def default_dtype_of(graph: Graph) -> Iterator[None]:
    """In here torch makes float64 of whole numbers (`arange(8) * 0.1`), if the graph has no narrower dtype."""
    before = torch.get_default_dtype()
    if not any(value.dtype in _WIDE for value in graph.values.values()):
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _widen(arg: Arg) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_widen(part) for part in arg)
    return Atom("dtype", _WIDE.get(arg.name, arg.name)) if isinstance(arg, Atom) and arg.kind == "dtype" else arg


def _with_dtype(node: Node, kwargs: tuple[tuple[str, Arg], ...]) -> tuple[tuple[str, Arg], ...]:
    """`torch.zeros(3)` makes float32 unless told otherwise."""
    overload = aten_overload(node.op)
    takes = overload is not None and any(argument.name == "dtype" for argument in overload._schema.arguments)
    told = any(key == "dtype" and arg for key, arg in kwargs)
    if node.operands or not takes or told or node.results[0].dtype != "f32":
        return kwargs
    return (*((key, arg) for key, arg in kwargs if key != "dtype"), ("dtype", Atom("dtype", "f64")))
