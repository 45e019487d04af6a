"""Rows that a mask selects, kept in full: a graph without sizes that depend on the data.

In: an `ExportedProgram`, where `x[mask]`, `masked_select`, `nonzero` and `.item()` made sizes and numbers that only the
data knows. Out: the same program on values of fixed size. A selection becomes all rows, and which of them count
(`Rows`); what treats rows one by one runs on all of them; what adds them up, averages or maximises sees the neutral
element in place of those that do not count; a number read from a tensor stays a tensor.

    x[mask].mean()                         →   masked_fill(x, ~mask, 0).sum() / (mask.sum() * columns)
    cross_entropy(x[mask], y[mask])        →   cross_entropy(x, masked_fill(y, ~mask, ignore_index))
    h[mask] = f(x[mask])                   →   where(mask, f(x), h)

All else is refused with the line. `row_forms` has how every call is written.
"""

from __future__ import annotations

import operator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from lopsided.capturing.diagnosis import source_of
from lopsided.capturing.emission import Emission
from lopsided.capturing.row_forms import FORMS, OF_NUMBERS, POINTWISE
from lopsided.capturing.rows import NotFixed, Writer
from lopsided.errors import CaptureError

aten = torch.ops.aten
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CHECKS = ("_assert", "sym_constrain", "_functional_assert")
_DO = (
    "keep all rows and let a mask say which count: (f(x) * mask).sum() / mask.sum().clamp(min=1), "
    "torch.where(mask, f(x), h), or ignore_index of the loss"
)
_OTHER = {
    "bincount": "count into a fixed number of places: torch.zeros(n).index_add(0, x, torch.ones(x.shape))",
    "unique": "use a table of all values that there can be, and a mask of those that occur",
    "repeat_interleave": "pass output_size=, where the number of results is known, or index by a fixed vector",
    "dropout": "apply dropout before the mask selects rows",
    "slice": "compare torch.arange with the number, and use that as a mask: torch.where(arange < n, x, 0)",
}
_COMPARING = frozenset(
    (
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.kl_div,
    )
)
_ARITHMETIC: dict[str, OpOverload] = {
    "mul": aten.mul.Tensor,
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "truediv": aten.div.Tensor,
    "pow": aten.pow.Tensor_Tensor,
    "neg": aten.neg.default,
    "floordiv": aten.floor_divide.default,
    "sym_max": aten.maximum.default,
    "sym_min": aten.minimum.default,
}


def fix_sizes(exported: ExportedProgram) -> tuple[int, ...]:
    """Rewrite the program in place. Returns which outputs beside the loss have no fixed size; they are taken out."""
    graph = exported.graph_module.graph
    if not any(_is_symbolic(node.meta.get("val")) for node in graph.nodes):
        return ()
    mode = next(v.fake_mode for node in graph.nodes if hasattr(v := node.meta.get("val"), "fake_mode"))
    return _Rewriting(graph, Emission(graph, mode)).run()


class sizes_agree(TorchFunctionMode):
    """Surrounds a forward pass: losses look at their operands in Python, which a trace cannot.

    Sizes that the data decides are taken to be equal, as they are where a program runs; `Rows` meet only where masks
    are equal.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.gaussian_nll_loss:
            with patch.object(torch, "any", lambda *_: False):  # its check of the variances' signs
                return func(*args, **(kwargs or {}))
        if func in _COMPARING:
            first, second = (list(args) + list((kwargs or {}).values()))[:2]
            if isinstance(first, Tensor) and isinstance(second, Tensor) and first.dim() == second.dim():
                for a, b in zip(first.shape, second.shape, strict=True):
                    if not isinstance(a, int) and not isinstance(b, int):
                        torch._check(a == b)
        return func(*args, **(kwargs or {}))


def _is_symbolic(made: object) -> bool:
    if isinstance(made, tuple | list):
        return any(map(_is_symbolic, made))
    if isinstance(made, Tensor):
        return not all(isinstance(size, int) for size in made.shape)
    return isinstance(made, _SYMBOLIC)


class _Rewriting:
    """One walk over the graph. What the data decides is `refused` if it cannot be written, and an op needs it."""

    def __init__(self, graph: fx.Graph, emit: Emission) -> None:
        self.graph, self.emit = graph, emit
        self.write = Writer(emit)
        self.refused: dict[fx.Node, CaptureError] = {}

    def run(self) -> tuple[int, ...]:
        dead: list[fx.Node] = []
        left_out: tuple[int, ...] = ()
        for node in list(self.graph.nodes):
            self.emit.visit(node)
            if node.op == "output":
                left_out = self.outputs(node)
            elif node.op == "call_function" and self.concerns(node):
                self.rewrite(node)
                dead.append(node)
            else:
                self.emit.first(node)
        for node in reversed(dead):
            self.graph.erase_node(node)
        return left_out

    def concerns(self, node: fx.Node) -> bool:
        unknown = self.write.known.keys() | self.refused.keys()
        return _is_symbolic(node.meta.get("val")) or not unknown.isdisjoint(node.all_input_nodes)

    def rewrite(self, node: fx.Node) -> None:
        if any(part in str(node.target) for part in _CHECKS):
            return
        is_number = isinstance(node.meta.get("val"), _SYMBOLIC)
        try:
            earlier = next((self.refused[n] for n in node.all_input_nodes if n in self.refused), None)
            if earlier is not None:
                raise earlier
            made = self.number(node) if is_number else self.made(node)
        except NotFixed as reason:
            refused: CaptureError = _refusal(node, str(reason))
        except CaptureError as error:
            refused = error
        else:
            if isinstance(made, fx.Node) and not is_number:
                node.replace_all_uses_with(made)
            else:
                self.write.known[node] = made
            return
        if not is_number and node.users:
            raise refused
        # What only checks ask for may stay unknown.
        self.refused[node] = refused

    def outputs(self, node: fx.Node) -> tuple[int, ...]:
        (given,) = node.args
        if not isinstance(given, tuple | list):
            return ()
        left_out = [k for k, n in enumerate(given) if isinstance(n, fx.Node) and n in self.write.known]
        if 0 in left_out and isinstance(given[0], fx.Node):
            raise _refusal(given[0], "the loss is rows that a mask selects")
        node.args = (tuple(n for k, n in enumerate(given) if k not in left_out),)
        return tuple(k - 1 for k in left_out)

    def made(self, node: fx.Node) -> Any:
        """What a call becomes: a node of fixed size, `Rows`, or several."""
        target = node.target
        if target is operator.getitem:
            found = self.write.known[node.args[0]][node.args[1]]  # type: ignore[index]
            if found is None:
                raise NotFixed("asks for places among them")
            return found
        if not isinstance(target, OpOverload):
            raise NotFixed(f"{getattr(target, '__name__', target)} is called with what depends on the data")
        name = target._schema.name.removeprefix("aten::").removesuffix("_")
        is_pointwise = torch.Tag.pointwise in target.tags or name in POINTWISE
        try:
            if is_pointwise and any(map(self.write.is_number, _flat(node))):
                return self.with_number(node)
            if name in FORMS and (name in OF_NUMBERS or not any(map(self.write.is_number, _flat(node)))):
                return FORMS[name](self.write, node)
            if any(map(self.write.is_number, _flat(node))):
                raise NotFixed("it needs a number that the model reads from a tensor")
            if is_pointwise:
                return self.write.pointwise(node)
            raise NotFixed("it does not treat rows one by one")
        except NotFixed as reason:
            raise NotFixed(f"{name}: {reason}") from None

    def with_number(self, node: fx.Node) -> Any:
        full = self.write.with_numbers(node)
        if full.meta["val"].dtype != node.meta["val"].dtype:
            full = self.emit.call(aten.to.dtype, full, node.meta["val"].dtype)
        operands = [arg for arg in self.write.args(node).values() if not isinstance(arg, list)]
        counts = self.write.aligned(operands)
        return self.write.rows(node.meta["val"], full, {d + full.meta["val"].dim(): v for d, v in counts.items()})

    def number(self, node: fx.Node) -> fx.Node:
        """A number that depends on the data, as a tensor."""
        name = str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "")
        if name in ("aten.item.default", "aten._local_scalar_dense.default"):
            given = self.write.became(node.args[0])
            if not isinstance(given, fx.Node):
                raise NotFixed(".item() of rows that a mask selects")
            return self.emit.call(aten.detach.default, given)
        if name in ("aten.sym_size.int", "aten.sym_numel.default"):
            return self.write.length(node.meta["val"].node.expr)
        if name == "sym_float":
            return self.emit.call(aten.to.dtype, self.write.became(node.args[0]), torch.float64)
        if name not in _ARITHMETIC:
            raise NotFixed(f"Python computes {name} of a number that the model reads from a tensor")
        args = [self.write.became(arg) for arg in node.args]
        like = next(arg.meta["val"] for arg in args if isinstance(arg, fx.Node))
        tensors = [
            arg
            if isinstance(arg, fx.Node)
            else self.emit.call(
                aten.full.default,
                [],
                arg,
                dtype=like.dtype if isinstance(arg, int) else torch.promote_types(like.dtype, torch.float32),
                device=like.device,
            )
            for arg in args
        ]
        return self.emit.call(_ARITHMETIC[name], *tensors)


def _flat(node: fx.Node) -> list[Any]:
    return [part for arg in (*node.args, *node.kwargs.values()) for part in (arg if isinstance(arg, list) else [arg])]


def _refusal(node: fx.Node, reason: str) -> CaptureError:
    advice = next((do for name, do in _OTHER.items() if name in str(node.target)), _DO)
    return CaptureError(f"sizes or numbers depend on the data: {reason}", where=str(source_of(node)), do=advice)
