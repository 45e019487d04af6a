"""Capture: an ordinary model and a batch become one `Graph`.

In: an `nn.Module` whose forward gives a scalar loss (or an object with `.loss`, or `loss_fn` makes one), and a batch,
real, fake or on `meta`. Out: a `Graph` of the ops as people write them (`linear`, `layer_norm`, ...), from
`torch.export` before dispatch. On the way everything that is not a pure call of an op is settled:

    a tensor given twice in the batch        separate inputs                     `flatten_batch`
    autocast and no-grad regions             kept as each node's context         `Tracer.call`
    activation checkpointing                 the same, regions numbered from 1   `Tracer.graph`
    in-place ops, also through views         functional ops                      `lopsided.capturing.functionalize`
    batch norm and buffers it changes        results of the node, graph updates  `Tracer.batch_norm`
    parameters used under two names          one leaf                            `Tracer.leaf`
    sizes and numbers that depend on data    all rows, and which count           `lopsided.capturing.selections`
    control flow that depends on data        refused with the user's line        `lopsided.capturing.diagnosis`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lopsided.capturing.call import (
    Arguments,
    Handed,
    LossFn,
    NotReturned,
    Rebuild,
    find_loss,
    flatten_batch,
    hand_out,
    in_form_of,
    take_apart,
    the_loss,
)
from lopsided.capturing.diagnosis import explain, refuse_calls, refuse_modules
from lopsided.capturing.eager_check import check_against_eager, fewer_rows
from lopsided.capturing.export import assignments, export_flat, quiet
from lopsided.capturing.reads import LeftTensor, Reading, Reads
from lopsided.capturing.saved_tensors import record_saved
from lopsided.capturing.selections import fix_sizes, sizes_agree
from lopsided.capturing.tracer import Tracer, numbered
from lopsided.capturing.variables import Variables
from lopsided.errors import CaptureError
from lopsided.ir.graph import Graph, Node


def capture(model: nn.Module, batch: object, *, loss_fn: LossFn | None = None) -> Graph:
    """The training graph of `model` on a batch of this shape.

    `batch` is a mapping (keyword arguments), a tuple (positional arguments) or a single argument. Where the model
    returns no loss, `loss_fn` makes one: `loss_fn(output, *rest)` of the entries that forward does not take, or
    `loss_fn(output, batch)` where it takes all.
    """
    return record_saved(without_unused(trace(model, batch, loss_fn=loss_fn)))


@dataclass(frozen=True)
class Returned:
    """What a call returns: values of the graph by name, in the structure the model gave them.

    `loss` is the position of the loss among them; None where a loss function made it. `dropped` are the names of values
    that have a gradient in the model and none in the graph, since the loss does not need them.
    """

    names: tuple[str, ...]
    build: Callable[[Sequence[Any]], Any]
    loss: int | None
    dropped: frozenset[str] = frozenset()

    def rebuilt(self, loss: Tensor, parts: Sequence[Tensor], *, has_loss: bool) -> Any:
        """What the call returns, of these tensors; the loss alone where a loss function made it."""
        if has_loss and self.loss is None:
            return loss
        return self.build([loss if k == self.loss else part for k, part in enumerate(parts)])


@dataclass(frozen=True)
class Captured:
    """A call of a model: the graph of its loss, the same with what else is returned, and what it was captured under."""

    graph: Graph
    whole: Graph  # with nodes, without gradients, that only what is returned needs; often the same
    returned: Returned
    has_loss: bool  # or else the sum of what is returned stands for one
    reads: Reads
    traced: Graph  # with everything that forward does, also what nothing needs
    stored: tuple[LeftTensor, ...] = ()  # what it leaves in attributes


def capture_call(
    model: nn.Module, batch: object, *, loss_fn: LossFn | None = None, needs_loss: bool = True
) -> Captured:
    """As `capture`, with everything that the model returns. Without a loss, unless it `needs_loss`, the sum of what is
    returned stands for one."""
    traced = _traced(model, batch, loss_fn, needs_loss=needs_loss)
    graph = record_saved(without_unused(traced.graph))
    whole = without_unused(traced.graph, kept=traced.returned.names)
    if len(whole.nodes) == len(graph.nodes) and len(whole.leaves) == len(graph.leaves):
        whole = graph
    else:
        whole = record_saved(whole)
    flows, kept = with_gradient(traced.graph), whole.values
    dropped = frozenset(name for name in traced.returned.names if name in flows and not kept[name].grad)
    return replace(traced, graph=graph, whole=whole, returned=replace(traced.returned, dropped=dropped))


def check_captured(model: nn.Module, batch: object, loss_fn: LossFn | None, captured: Captured) -> str:
    """Refuse a graph that does not compute what the model does. Returns why nothing was compared, or ""."""
    part = fewer_rows(model, batch, captured.traced)
    if part is None:
        return "it would take long here; `lopsided verify` compares it"
    if part is not batch:
        try:
            captured = _traced(model, part, loss_fn, needs_loss=False)
        except CaptureError:
            return "it would take long here, and fewer rows are another model"
    if not captured.has_loss:
        loss_fn = lambda output, batch: stand_in(take_apart(output)[0])  # noqa: E731
    # Only one rank compares: what forward does to lists of its own must not make it differ from the others.
    with captured.reads.left_alone():
        return check_against_eager(model, part, loss_fn, captured.traced)


def trace(model: nn.Module, batch: object, *, loss_fn: LossFn | None = None) -> Graph:
    """Every call the model makes, also those that nothing depends on: a draw that is thrown away still draws."""
    return _traced(model, batch, loss_fn).graph


def _traced(model: nn.Module, batch: object, loss_fn: LossFn | None, *, needs_loss: bool = True) -> Captured:
    check_model(model, loss_fn)
    tensors, rebuild = flatten_batch(batch)
    wrapped = _Step(model, rebuild, loss_fn, batch, needs_loss=needs_loss)
    args, kwargs = rebuild(list(tensors.values()))
    _check_call(model, hand_out(model, loss_fn, Arguments(args, kwargs), None).forward)
    inputs = _on_one_device(model, tensors)
    # A model on `meta` makes its own tensors there too, where it does not say otherwise.
    with torch.device("meta") if any(p.is_meta for p in model.parameters()) else nullcontext():
        exported = _export(wrapped, inputs)
    left_out = fix_sizes(exported)
    tracer = Tracer(model, exported, list(tensors), wrapped.replaced)
    graph, names = tracer.graph()
    returned = Returned(names, wrapped.build, wrapped.loss_at)
    if left_out:
        returned = _without(returned, left_out)
    reading = wrapped.reading
    reads = reading.reads(exported.constants.values())
    return Captured(graph, graph, returned, wrapped.has_loss, reads, graph, tuple(reading.stored))


def _without(returned: Returned, left_out: Collection[int]) -> Returned:
    """What a call returns, where some of it has no fixed size and is not handed on."""

    def build(parts: Sequence[Any]) -> Any:
        feed, total = iter(parts), len(parts) + len(left_out)
        return returned.build(
            [
                NotReturned("tensor whose size depends on the data") if k in left_out else next(feed)
                for k in range(total)
            ]
        )

    loss = returned.loss
    return Returned(returned.names, build, None if loss is None else loss - sum(k < loss for k in left_out))


def without_unused(graph: Graph, *, kept: Collection[str] = ()) -> Graph:
    """The graph without what neither the loss nor a buffer needs; parameters and inputs stay, used or not.

    What only the values `kept` need stays, too, without gradients.
    """
    wanted = {graph.loss, *(value for _, value in graph.updates)}
    trained: list[Node] = []
    for node in reversed(graph.nodes):
        if any(value.name in wanted for value in node.results):
            trained.append(node)
            wanted.update(node.operands)
    needed = {node.name for node in trained}
    also = wanted | {*kept}
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in needed:
            nodes.append(node)
        elif any(value.name in also for value in node.results):
            nodes.append(_without_gradient(node))
            also.update(node.operands)
    leaves = tuple(leaf for leaf in graph.leaves if leaf.kind in ("input", "parameter") or leaf.value.name in also)
    return Graph(leaves, numbered(reversed(nodes)), graph.loss, graph.updates)


def with_gradient(graph: Graph) -> set[str]:
    """The values that parameters or inputs with a gradient lead to, whether the loss needs them or not."""
    found = {leaf.value.name for leaf in graph.leaves if leaf.value.grad}
    for node in graph.nodes:
        if node.context.grad and node.op != "aten.detach.default" and not found.isdisjoint(node.operands):
            found |= {value.name for value in node.results if value.torch_dtype.is_floating_point}
    return found


def _without_gradient(node: Node) -> Node:
    results = tuple(replace(value, grad=False) for value in node.results)
    return replace(node, results=results, context=replace(node.context, grad=False, recompute=0))


class _Step(nn.Module):
    """The model as a function from the batch's tensors to its loss and whatever else it returns."""

    build: Callable[[Sequence[Any]], Any]
    loss_at: int | None
    has_loss: bool

    def __init__(
        self, model: nn.Module, rebuild: Rebuild, loss_fn: LossFn | None, batch: object, *, needs_loss: bool
    ) -> None:
        super().__init__()
        self.model = model
        self._rebuild = rebuild
        self._batch = batch
        self._needs_loss = needs_loss
        self.replaced: set[str] = set()
        self.reading = Reading()
        Variables(self.reading).note(model, loss_fn)
        # In a list, so that a loss module's tensors are captured as constants and not as parameters to train.
        self._loss_fn = [loss_fn]
        self.training = model.training

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self._rebuild(list(tensors))
        call = Arguments(args, kwargs)
        handed = hand_out(self.model, self._loss_fn[0], call, in_form_of(self._batch, args, kwargs))
        with sizes_agree(), self.reading.watching():
            with assignments(self.model, self.replaced):
                output = self.model(*handed.forward.args, **handed.forward.kwargs)
            parts, self.build = take_apart(output)
            loss = self._loss(output, handed)
        self.has_loss = loss is not None
        self.loss_at = next((k for k, part in enumerate(parts) if part is loss), None)
        if loss is None:
            loss = stand_in(parts)
        return (loss.reshape(()) if loss.dim() else loss, *parts)

    def _loss(self, output: object, handed: Handed) -> Tensor | None:
        loss_fn = self._loss_fn[0]
        if loss_fn is not None:
            made = handed.loss(loss_fn, output)
            the_loss(made)
            return find_loss(made)
        found = find_loss(output)
        if found is None and self._needs_loss:
            the_loss(output)
        return found


def stand_in(parts: Sequence[Tensor]) -> Tensor:
    """A scalar that depends on everything that has a gradient, where a loss would be."""
    sums = [part.float().sum() for part in parts if part.dtype.is_floating_point]
    if not sums:
        raise CaptureError("the model returns no tensor of floating-point numbers", do="return a loss or outputs")
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def check_model(model: nn.Module, loss_fn: LossFn | None) -> None:
    """Refuse what no trace would show."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is a {type(model).__name__}", do="give an nn.Module")
    if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise CaptureError(
            f"the loss {loss_fn._get_name()} has parameters to train, and only the model's are trained",
            do="make the loss a part of the model, or its parameters constants with requires_grad_(False)",
        )
    refuse_modules(model)
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise CaptureError("the model has lazy parameters without a shape", do="run it once on a batch first")
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            raise CaptureError(
                f"the parameter {name} is a {type(parameter).__name__}, which holds tensors of its own",
                do="take ordinary weights; lopsided.integrations.quantized.quantize_frozen keeps frozen ones as codes",
            )
    for name, part in model.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise CaptureError(
                f"module {name or model._get_name()} has a backward hook, which a captured graph would not call",
                do="remove the hook, or write what it does to the gradient as an op of the forward pass",
            )


def _check_call(model: nn.Module, call: Arguments) -> None:
    try:
        inspect.signature(model.forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise CaptureError(
            f"the batch does not fit {model._get_name()}.forward: {error}",
            where=f"forward{inspect.signature(model.forward)}",
            do="name the batch's entries after the arguments of forward",
        ) from None


def _on_one_device(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The batch as tensors of their own, on `meta` if the model is there.

    Export identifies inputs by tensor: `labels=input_ids` would become one input, and be wrong when they differ.
    """
    on_meta = any(p.is_meta for p in model.parameters())
    seen: set[int] = set()
    distinct = []
    for tensor in tensors.values():
        if on_meta:
            distinct.append(torch.empty_like(tensor, device="meta"))
        else:
            distinct.append(tensor.clone() if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return tuple(distinct)


def _export(wrapped: _Step, tensors: tuple[Tensor, ...]) -> ExportedProgram:
    try:
        exported = export_flat(wrapped, tensors)
    except Exception as error:
        with quiet():
            refusal = explain(wrapped.model, error, lambda: wrapped(*tensors))
        raise refusal from error
    refuse_calls(exported)
    return exported
