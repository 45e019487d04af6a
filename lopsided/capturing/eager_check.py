"""Is the captured graph the model? One training step of each, on the same numbers, before anything is distributed.

In: a model, a batch, the graph that was traced of them. Out: nothing, a `CaptureError` that names what differs, or why
it was not compared. Habits that no trace shows (values made under `torch.inference_mode`, a random number of one's own)
are found by their effect.

The step is done on the device of the model, if that takes about a second; on fewer rows of the batch where the whole of
it would take longer. The model, its buffers and all random generators are left as they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lopsided.capturing.call import LossFn, flatten_batch, in_form_of, loss_of
from lopsided.capturing.export import alone
from lopsided.errors import CaptureError
from lopsided.ir.graph import DTYPES, Graph, Leaf
from lopsided.ir.op_call import run_graph

_FLOP = {"cpu": 5e9, "cuda": 5e12}
"""What a forward pass may cost for a comparison; about a second for all of it on slow devices of the kind."""

_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}
"""What the values of the graph may hold."""

_TOLERANCE = {"f64": 1e-6, "f32": 1e-3}
_LOW_PRECISION = 0.1
_DO = (
    "write forward without torch.inference_mode, and without what changes from call to call (a random number or a "
    "counter of your own); or, if the difference is meant, pass check_capture=False"
)


@dataclass(frozen=True)
class PassSize:
    """What a forward pass of a graph takes, roughly."""

    flop: float
    bytes: int

    @staticmethod
    def of(graph: Graph) -> PassSize:
        weights = {leaf.value.name: leaf.value for leaf in graph.parameters if len(leaf.value.shape) > 1}
        flop = 0.0
        for node in graph.nodes:
            made = sum(value.elements for value in node.results)
            inner = [
                weights[name].elements / max(weights[name].shape[0], 1) for name in node.operands if name in weights
            ]
            flop += made * (2 * sum(inner) + 1)
        return PassSize(flop, sum(value.bytes for node in graph.nodes for value in node.results))

    def part_that_fits(self, kind: str) -> float:
        flop, held = _FLOP.get(kind, 0.0), _BYTES.get(kind, 0)
        return min(flop / max(self.flop, 1.0), held / max(self.bytes, 1))


def fewer_rows(model: nn.Module, batch: object, graph: Graph) -> object | None:
    """The batch, or as many rows of it as can be compared quickly; None where that is less than one."""
    tensors, rebuild = flatten_batch(batch)
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    if any(t.is_meta for t in (*model.parameters(), *model.buffers(), *tensors.values())):
        return None
    part = PassSize.of(graph).part_that_fits(where.type)
    if part >= 1:
        return batch
    rows = {t.shape[0] for t in tensors.values() if t.dim()}
    kept = int(part * max(rows, default=0))
    if len(rows) != 1 or kept < 1:
        return None
    made: object = in_form_of(batch, *rebuild([t[:kept] if t.dim() else t for t in tensors.values()]))
    return made


def check_against_eager(model: nn.Module, batch: object, loss_fn: LossFn | None, graph: Graph) -> str:
    """Refuse a graph that does not compute what the model does. Returns why nothing was compared, or ""."""
    with _left_alone(model):
        try:
            torch.manual_seed(0)
            loss = loss_of(model, batch, loss_fn)
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            made = torch.autograd.grad(loss, [*trained.values()], allow_unused=True) if loss.requires_grad else ()
        except Exception as error:
            if "nference tensor" in str(error):
                raise CaptureError(f"the model does not train as it is: {error}", do=_DO) from error
            return f"the model does not run on the example batch ({type(error).__name__}: {str(error)[:100]})"
        if not bool(loss.isfinite()):
            return "the loss of the example batch is not finite"
        expected = {name: g for name, g in zip(trained, made, strict=False) if g is not None}
        after = {name: model.get_buffer(name).clone() for name, _ in graph.updates}
    with _left_alone(model):
        torch.manual_seed(0)
        leaves = tensors_of(graph, model, batch)
        values = {name: t.clone().requires_grad_(graph.values[name].grad) for name, t in leaves.items()}
        starts = dict(values)
        where = next((value.device for value in values.values()), torch.device("cpu"))
        run_graph(graph, values, where)
        inputs = {leaf.target: starts[leaf.value.name] for leaf in graph.parameters if leaf.value.grad}
        end = values[graph.loss]
        given = torch.autograd.grad(end, [*inputs.values()], allow_unused=True) if end.requires_grad else ()
        found = {name: g for name, g in zip(inputs, given, strict=False) if g is not None}
    _refuse_differences(graph, loss.detach(), end.detach(), expected, found)
    for buffer, name in graph.updates:
        _refuse(f"the buffer {buffer}", after[buffer], values[name].detach(), _tolerance(graph), 0.0)
    return ""


def _refuse_differences(
    graph: Graph,
    loss: Tensor,
    end: Tensor,
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
) -> None:
    tolerance = _tolerance(graph)
    _refuse("the loss", loss.reshape(()), end.reshape(()), tolerance, 0.0)
    names = {also: leaf.target for leaf in graph.parameters for also in (leaf.target, *leaf.also)}
    floor = 1e-3 * max((g.norm().item() for g in expected.values()), default=0.0)
    for name in dict.fromkeys(names.values()):
        ours, theirs = found.get(name), next((expected[a] for a in names if names[a] == name and a in expected), None)
        some = ours if ours is not None else theirs
        if some is not None:
            zero = torch.zeros_like(some)
            eager, graphs = zero if theirs is None else theirs, zero if ours is None else ours
            _refuse(f"the gradient of {name}", eager, graphs, tolerance, floor)


def _refuse(what: str, eager: Tensor, ours: Tensor, tolerance: float, floor: float) -> None:
    if not eager.dtype.is_floating_point and not eager.is_complex():
        return
    scale = max(eager.norm().item(), floor)
    error = (eager - ours.to(eager.dtype)).norm().item()
    if error > tolerance * scale and error > 1e-9:
        raise CaptureError(
            f"the captured graph is not the model: {what} differs by {error / scale if scale else error:.2g} "
            "of its size from one eager step",
            where=f"norm {ours.norm().item():.6g} in the graph, {eager.norm().item():.6g} eagerly",
            do=_DO,
        )


def _tolerance(graph: Graph) -> float:
    """By the smallest dtype that values with a gradient have."""
    narrow = any(node.context.autocast.partition(":")[2] in ("bf16", "f16") for node in graph.nodes)
    dtypes = {value.dtype for value in graph.values.values() if value.grad and DTYPES[value.dtype].is_floating_point}
    return _LOW_PRECISION if narrow else max((_TOLERANCE.get(d, _LOW_PRECISION) for d in dtypes), default=1e-3)


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Buffers and random generators are put back, and hooks on gradients are not called."""
    hooks = [(p, p._backward_hooks) for p in model.parameters() if p._backward_hooks]
    # With their places: forward may put another tensor there.
    kept = [
        (module._buffers, key, buffer, buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    # What forward stores in attributes stays on this rank alone, and would keep the graph of this step.
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        for parameter, _ in hooks:
            parameter._backward_hooks = None
        with alone(), torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad(), torch.inference_mode(False):
            yield
    finally:
        for parameter, called in hooks:
            parameter._backward_hooks = called
        random.setstate(python)
        np.random.set_state(numpy)
        for own, earlier in attributes:
            for key in own.keys() - earlier.keys():
                del own[key]
            own.update(earlier)
        with torch.no_grad():
            for place, key, buffer, before in kept:
                place[key] = buffer
                buffer.copy_(before)


def tensors_of(graph: Graph, model: nn.Module, batch: object) -> dict[str, Tensor]:
    """The tensor of every leaf, in the dtype the graph has it."""
    inputs, _ = flatten_batch(batch)
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    found = {}
    for leaf in graph.leaves:
        tensor = _tensor(leaf, model, inputs)
        if tuple(tensor.shape) != leaf.value.shape:
            raise CaptureError(
                f"{leaf.kind} {leaf.target} has shape {tuple(tensor.shape)}, "
                f"the graph was captured with {leaf.value.shape}",
                do="capture the model again with a batch of this shape",
            )
        if tensor.is_meta:
            raise CaptureError(
                f"{leaf.kind} {leaf.target} is on meta and has no elements",
                do="build the model on a real device to run it",
            )
        found[leaf.value.name] = tensor.detach().to(where, leaf.value.torch_dtype)
    return found


def _tensor(leaf: Leaf, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    if leaf.kind == "constant":
        return torch.tensor(leaf.data, dtype=leaf.value.torch_dtype).reshape(leaf.value.shape)
    try:
        if leaf.kind == "parameter":
            return model.get_parameter(leaf.target)
        return model.get_buffer(leaf.target) if leaf.kind == "buffer" else inputs[leaf.target]
    except (AttributeError, KeyError):
        raise CaptureError(
            f"the {'batch' if leaf.kind == 'input' else 'model'} has no {leaf.kind} {leaf.target!r}",
            do="use the model and batch the program was made for",
        ) from None
