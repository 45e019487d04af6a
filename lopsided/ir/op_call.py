"""Calling the op of a node on tensors: the one place where a node's name becomes a function.

In: a `Node`, tensors for its operands. Out: what the op returns. Ops come from torch's `aten` by name, or from `OWN`:
functional forms of ops that torch only has with side effects. A graph may come from a stranger, so only ops that turn
tensors into tensors are called: not those that write, and not those that open files.

`in_float64` is the same graph with every floating number wide, also where the model casts to less: rounding must not
hide mistakes, and must not look like one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from lopsided.errors import GraphError
from lopsided.ir.graph import Arg, Atom, Context, Graph, Node, Ref, Value
from lopsided.ir.grouped_mm import GROUPED_MM, grouped_mm


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm in training that returns its new running statistics in place of writing them."""
    mean, var = mean.clone(), var.clone()
    y = F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    return y, mean, var


OWN: dict[str, Callable[..., Any]] = {"lopsided.batch_norm.default": batch_norm, GROUPED_MM: grouped_mm}

WORD_ARGUMENTS = frozenset(
    (
        "UPLO",
        "activation",
        "algorithm",
        "approximate",
        "driver",
        "equation",
        "indexing",
        "interpolation",
        "mode",
        "norm",
        "ord",
        "p",
        "pad_mode",
        "padding",
        "padding_side",
        "reduce",
        "rounding_mode",
        "side",
    )
)
"""The string arguments of aten ops that choose how to compute. Any other may name a file, as `from_file`'s does."""


@cache
def resolve_op(name: str) -> Callable[..., Any]:
    """The function behind the name of an op, for example `aten.linear.default`."""
    if name in OWN:
        return OWN[name]
    overload = aten_overload(name)
    if overload is None:
        raise GraphError(
            f"there is no op {name!r}", do="use the name of an op in torch.ops, such as aten.linear.default"
        )
    if (why := impurity(overload)) is not None:
        raise GraphError(
            f"{name} cannot be part of a graph: it {why}",
            do="use ops that return new tensors and do nothing else",
        )
    return overload


def impurity(overload: OpOverload) -> str | None:
    """What an op does besides making tensors of its arguments, by its schema; None if nothing."""
    schema = overload._schema
    if schema.is_mutable:
        return "writes to its arguments"
    if not schema.returns or not all(str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns):
        return "returns something else than tensors"
    if overload.namespace == "aten":
        for argument in schema.arguments:
            if "str" in str(argument.type) and argument.name not in WORD_ARGUMENTS:
                return f"takes a string, {argument.name!r}, that may name anything"
    return None


@cache
def aten_overload(name: str) -> OpOverload | None:
    """The torch op of this name; only registered ops are looked up, never attributes of anything else."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if not (namespace.isidentifier() and packet.isidentifier() and overload.isidentifier()):
        return None
    found = getattr(getattr(getattr(torch.ops, namespace, None), packet, None), overload, None)
    return found if isinstance(found, OpOverload) else None


def call_op(node: Node, operands: Sequence[Tensor], device: torch.device) -> Any:
    """Call the node's op with these tensors in place of its operands, making new tensors on `device`."""
    args, kwargs = filled(node, operands, device)
    return resolve_op(node.op)(*args, **kwargs)


def listed(made: Any) -> list[Tensor]:
    """What an op has made, one tensor or several."""
    return [made] if isinstance(made, Tensor) else list(made)


def run_graph(graph: Graph, values: dict[str, Tensor], device: torch.device) -> None:
    """Run a graph op by op in its order: `values` has its leaves by name, and gets everything else."""
    for node in graph.nodes:
        with surroundings(node.context):
            made = call_op(node, [values[name] for name in node.operands], device)
        for value, tensor in zip(node.results, listed(made), strict=True):
            values[value.name] = tensor


def filled(node: Node, operands: Sequence[Tensor], device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """The node's arguments, with tensors in place of references in the order `Node.operands` lists them."""
    feed = iter(operands)
    args = [_fill(arg, feed, device) for arg in node.args]
    kwargs = {key: _fill(arg, feed, device) for key, arg in node.kwargs}
    if not operands and makes_tensors(node.op):
        kwargs["device"] = device
    return args, kwargs


@cache
def makes_tensors(op: str) -> bool:
    """A factory such as `arange`: it can be told where to make its tensor, by keyword."""
    overload = aten_overload(op)
    return overload is not None and any(a.name == "device" and a.kwarg_only for a in overload._schema.arguments)


def _fill(arg: Arg, feed: Iterator[Tensor], device: torch.device) -> Any:
    if isinstance(arg, Ref):
        return next(feed)
    if isinstance(arg, tuple):
        return [_fill(part, feed, device) for part in arg]
    if isinstance(arg, Atom):
        return device if arg.kind == "device" else arg.resolve()
    return arg


@contextmanager
def surroundings(context: Context) -> Iterator[None]:
    """The autocast and grad mode that surrounded a node in the model."""
    with ExitStack() as stack:
        if not context.grad:
            stack.enter_context(torch.no_grad())
        if context.autocast:
            device, _, dtype = context.autocast.partition(":")
            under = None if dtype == "off" else Atom("dtype", dtype).resolve()
            stack.enter_context(torch.autocast(device, dtype=under, enabled=under is not None))  # type: ignore[arg-type]
        yield


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
