"""Norms. Where the normalised dims are cut, or a batch norm's batch, the devices talk about sums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lopsided.ir.placement import I, P, R
from lopsided.ops.op import (
    Ask,
    Call,
    Implementation,
    Local,
    Op,
    Talk,
    Talking,
    Talks,
    Written,
    accumulating,
    dim_of,
    letters,
    number,
    spec,
)
from lopsided.ops.sample import Draw, Sample, sample


def layer_norm(call: Call) -> str:
    dims = " ".join(f"D{k}" for k in range(len(call.arg("normalized_shape"))))
    scale = f" * {dims}" if call.is_tensor("weight") else ""
    shift = f" + {dims}" if call.is_tensor("bias") else ""
    return f"f[... {dims}]{scale}{shift} -> ... {dims}"


def layer_norm_with_statistics(call: Call) -> str:
    """Mean and deviation beside the output are not linear in scale and shift."""
    rank = len(call.arg("normalized_shape"))
    dims, ones = " ".join(f"D{k}" for k in range(rank)), " ".join(["1"] * rank)
    operands = ", ".join([f"... {dims}", *[dims] * (len(call.operands) - 1)])
    return f"f[{operands}] -> ... {dims}, ... {ones}, ... {ones}"


def _normalised_talks(how: str, implementation: Implementation) -> Talks:
    def talks(call: Call) -> list[Talk]:
        return [Talk(f"D{k}", how, implementation, P) for k in range(len(call.arg("normalized_shape")))]

    return talks


def _scaled(x: Tensor, local: Local) -> Tensor:
    scale, shift = local.call.is_tensor("weight"), local.call.is_tensor("bias")
    if scale:
        x = x * local.tensors[1]
    return local.as_result(x + local.tensors[-1] if shift else x)


def layer_norm_cut(local: Local) -> Talking:
    x = accumulating(local.tensors[0])
    shape = local.call.arg("normalized_shape")
    dims, count = tuple(range(-len(shape), 0)), math.prod(shape)
    mean = (yield Ask(x.sum(dims, keepdim=True), P, R)) / count
    centred = x - mean
    variance = (yield Ask(centred.square().sum(dims, keepdim=True), P, R)) / count
    return _scaled(centred * torch.rsqrt(variance + number(local.call.arg("eps"))), local)


def rms_norm_cut(local: Local) -> Talking:
    x = accumulating(local.tensors[0])
    shape, eps = local.call.arg("normalized_shape"), local.call.arg("eps")
    dims = tuple(range(-len(shape), 0))
    square = (yield Ask(x.square().sum(dims, keepdim=True), P, R)) / math.prod(shape)
    return _scaled(x * torch.rsqrt(square + (torch.finfo(x.dtype).eps if eps is None else number(eps))), local)


def group_norm(call: Call) -> Written:
    rank, groups = len(call.shapes[0]), int(call.arg("num_groups"))
    space = " ".join(f"X{k}" for k in range(rank - 2))
    channels = "(g C)"
    scale = f" * {channels}" if call.is_tensor("weight") else ""
    shift = f" + {channels}" if call.is_tensor("bias") else ""
    line = f"f[n {channels} {space}]{scale}{shift} -> n {channels} {space}"
    return line, {"g": groups, "C": call.shapes[0][1] // groups}


def group_norm_of_piece(local: Local) -> object:
    whole, groups = local.call.shapes[0][1], int(local.call.arg("num_groups"))
    return local.run(num_groups=groups * local.tensors[0].shape[1] // whole)


def group_norm_with_statistics(call: Call) -> Written:
    rank, groups = len(call.shapes[0]), int(call.arg("group"))
    space = " ".join(f"X{k}" for k in range(rank - 2))
    x = f"n (g C) {space}"
    operands = ", ".join([x, *["(g C)"] * (len(call.operands) - 1)])
    return f"f[{operands}] -> {x}, n g, n g", {"g": groups, "C": call.shapes[0][1] // groups}


def group_norm_with_statistics_of_piece(local: Local) -> object:
    x, whole = local.tensors[0], local.call.shapes[0][1]
    return local.run(N=x.shape[0], C=x.shape[1], group=int(local.call.arg("group")) * x.shape[1] // whole)


def _channels(call: Call, batch: str, space: str) -> tuple[str, str]:
    """The dims of the input, and of one vector per channel."""
    rank = len(call.shapes[0])
    return " ".join([batch, "c", *(f"{space}{k}" for k in range(rank - 2))]), "c"


def batch_norm_training(call: Call) -> str:
    x, c = _channels(call, "N", "X")
    # All in one: scale and shift are linear for the output, but not for the statistics beside it.
    return f"f[{', '.join([x, *[c] * (len(call.operands) - 1)])}] -> {x}, {c}, {c}"


def batch_norm_evaluated(call: Call) -> str:
    """In evaluation a fixed scale per channel; in training without running statistics as above."""
    if call.arg("training"):
        return _scaled_and_shifted(call, *_channels(call, "N", "X"))
    return _by_running_statistics(call)


def _by_running_statistics(call: Call) -> str:
    """A fixed scale and shift per channel; without a scale and shift of its own, linear in input and mean together."""
    x, c = _channels(call, "n", "x")
    if len(call.operands) == 3:
        return f"{{{x} + {c}}} * f[{c}] -> {x}"
    return f"f[{', '.join([x, *[c] * (len(call.operands) - 1)])}] -> {x}"


def _scaled_and_shifted(call: Call, x: str, c: str) -> str:
    scale = f" * {c}" if call.is_tensor("weight") else ""
    shift = f" + {c}" if call.is_tensor("bias") else ""
    return f"f[{x}]{scale}{shift} -> {x}"


def _batch_talks(call: Call) -> list[Talk]:
    dims = ["N", *(f"X{k}" for k in range(len(call.shapes[0]) - 2))]
    exact = [Talk(dim, "batch_norm", batch_norm_cut, I) for dim in dims]
    return [*exact, Talk("N", "batch_norm_local", batch_norm_local, P, exact=False)]


def _evaluated_talks(call: Call) -> list[Talk]:
    return [talk for talk in _batch_talks(call) if talk.exact] if call.arg("training") else []


def _batch_statistics(x: Tensor, count: int) -> Talking:
    mean = (yield Ask(x.sum(_but_channels(x)), P, R)) / count
    spread = _Spread.apply(x, mean)  # type: ignore[no-untyped-call]
    variance = (yield Ask(spread, P, R)) / count
    return mean, variance


def _but_channels(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _along_channels(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape([1, -1, *[1] * (x.dim() - 2)])


class _Spread(torch.autograd.Function):
    """Squares of what is off a mean, added up for each channel. Written out, it would be kept three times over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean)
        return (x - _along_channels(mean, x)).square_().sum(_but_channels(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, mean = ctx.saved_tensors
        off = (x - _along_channels(mean, x)).mul_(_along_channels(2 * gradient, x))
        return off, -off.sum(_but_channels(x))


class _Normalised(torch.autograd.Function):
    """`(x - mean) / √(variance + eps) · weight + bias` by torch's kernel, which takes mean and variance for constants:
    their gradients follow from those of weight and bias.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, mean, variance, weight)
        ctx.eps = eps
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, variance, weight = ctx.saved_tensors
        dims, scale = _but_channels(x), torch.rsqrt(variance + ctx.eps)
        shifted = gradient.sum(dims)
        scaled = scale * (x - _along_channels(mean, x)).mul_(gradient).sum(dims)
        towards_x = gradient * _along_channels(weight * scale, x)
        towards_mean, towards_variance = -weight * scale * shifted, -weight * scale.square() * scaled / 2
        return towards_x, towards_mean, towards_variance, scaled, shifted, None


def _moved(running: Tensor, towards: Tensor, momentum: float) -> Tensor:
    """A running statistic after one step. Not by `lerp`, which refuses two dtypes."""
    return (1 - momentum) * accumulating(running) + momentum * towards.detach()


def batch_norm_cut(local: Local) -> Talking:
    """Statistics over the whole batch, however unequally it is cut."""
    x, weight, bias, running_mean, running_var, momentum, eps = _batch_norm_arguments(local)
    whole = local.call.operands[0]
    count = whole.elements // whole.shape[1]
    mean, variance = yield from _batch_statistics(x, count)
    y = local.as_result(_normalised(x, mean, variance, weight, bias, eps))
    if running_mean is None or running_var is None:
        return y
    new_mean = _moved(running_mean, mean, momentum)
    new_var = _moved(running_var, variance * count / max(count - 1, 1), momentum)
    return y, local.as_result(new_mean, 1), local.as_result(new_var, 2)


def batch_norm_local(local: Local) -> object:
    """Statistics of each device's own rows, as data-parallel trainers have them: not what one device does.

    The running statistics become the mean over devices, weighted by rows: partial sums.
    """
    x, weight, bias, _, _, momentum, eps = _batch_norm_arguments(local)
    running_mean, running_var = map(accumulating, local.tensors[-2:])
    count, part = x.numel() // x.shape[1], local.fraction()
    # A device without rows has no statistics. It normalises nothing by others, so that scale and shift have a gradient
    # on it too: of zero, yet the devices add up as many gradients everywhere.
    variance, mean = torch.var_mean(x, _but_channels(x), correction=0) if count else (running_var, running_mean)
    y = _normalised(x, mean, variance, weight, bias, eps)
    new_mean = _moved(running_mean, mean, momentum)
    new_var = _moved(running_var, variance * count / max(count - 1, 1), momentum)
    return local.as_result(y), local.as_result(new_mean * part, 1), local.as_result(new_var * part, 2)


def _batch_norm_arguments(
    local: Local,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, float, float]:
    args, _ = local.args()
    if local.call.node.op.startswith("lopsided"):
        x, weight, bias, mean, var, momentum, eps = args
    else:
        x, weight, bias, mean, var, _, momentum, eps, _ = args
    return accumulating(x), weight, bias, mean, var, momentum, eps


def _normalised(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    scale = torch.ones_like(mean) if weight is None else weight.to(x.dtype)
    shift = torch.zeros_like(mean) if bias is None else bias.to(x.dtype)
    normalised: Tensor = _Normalised.apply(x, mean, variance, scale, shift, eps)  # type: ignore[no-untyped-call]
    return normalised


def instance_norm(call: Call) -> str:
    """By statistics of each row; by running statistics in evaluation. Capture refuses training that writes those."""
    if not call.arg("use_input_stats"):
        return _by_running_statistics(call)
    return _scaled_and_shifted(call, *_channels(call, "n", "X"))


def weight_norm(call: Call) -> str:
    """`v · g / |v|`, with a length per slice of one dim, or of all for -1: linear in g."""
    rank = len(call.shapes[0])
    if call.arg("dim") == -1:
        v = spec(letters(rank, range(rank)))
        return f"f[{v}] * {spec(['1'] * len(call.shapes[1]))} -> {v}"
    dim = dim_of(call)
    names = letters(rank, [d for d in range(rank) if d != dim])
    lengths = spec(["1" if d != dim else name for d, name in enumerate(names)])
    if len(call.results) > 1:
        return f"f[{spec(names)}, {lengths}] -> {spec(names)}, {lengths}"
    return f"f[{spec(names)}] * {lengths} -> {spec(names)}"


NORMS: dict[str, Op] = {
    "aten.layer_norm": Op(layer_norm, talks=_normalised_talks("layer_norm", layer_norm_cut)),
    "aten.rms_norm": Op(layer_norm, talks=_normalised_talks("rms_norm", rms_norm_cut)),
    "aten.native_layer_norm": Op(layer_norm_with_statistics),
    "aten.group_norm": Op(group_norm, local=group_norm_of_piece),
    "aten.native_group_norm": Op(group_norm_with_statistics, local=group_norm_with_statistics_of_piece),
    "lopsided.batch_norm": Op(batch_norm_training, talks=_batch_talks),
    "aten.batch_norm": Op(batch_norm_evaluated, talks=_evaluated_talks),
    "aten.instance_norm": Op(instance_norm),
    "aten._weight_norm": Op(weight_norm),
    "aten._weight_norm_interface": Op(weight_norm),
}


# Samples


def samples(draw: Draw) -> Iterator[Sample]:
    layer = "aten.layer_norm.default"
    yield sample(layer, draw.real(5, 4, 6), [6], draw.real(6), draw.real(6))
    yield sample(layer, draw.real(5, 4, 6), [6], draw.real(6))
    yield sample(layer, draw.real(5, 4, 6), [4, 6])
    yield sample("aten.native_layer_norm.default", draw.real(5, 6), [6], draw.real(6), draw.real(6), 1e-5)
    yield sample("aten.rms_norm.default", draw.real(5, 4, 6), [6], draw.real(6))
    yield sample("aten.rms_norm.default", draw.real(5, 6), [6], None, 1e-3)
    yield sample("aten.group_norm.default", draw.real(5, 8, 3), 4, draw.real(8), draw.real(8))
    yield sample("aten.group_norm.default", draw.real(5, 6, 3, 4), 1)
    yield sample("aten.group_norm.default", draw.real(5, 4), 2, draw.real(4))
    yield sample("aten.native_group_norm.default", draw.real(5, 8, 3), draw.real(8), draw.real(8), 5, 8, 3, 4, 1e-5)
    running = (draw.constant(4), draw.positive(4, grad=False))
    own = "lopsided.batch_norm.default"
    yield sample(own, draw.real(5, 4, 6), draw.real(4), draw.real(4), *running, 0.1, 1e-5)
    yield sample(own, draw.real(5, 4), None, None, *running, 0.1, 1e-5)
    batch = "aten.batch_norm.default"
    yield sample(batch, draw.real(5, 4, 6), draw.real(4), draw.real(4), *running, False, 0.1, 1e-5, False)
    yield sample(batch, draw.real(5, 4, 6), None, None, *running, False, 0.1, 1e-5, False)
    yield sample(batch, draw.real(5, 4), draw.real(4), draw.real(4), None, None, True, 0.1, 1e-5, False)
    instance = "aten.instance_norm.default"
    yield sample(instance, draw.real(5, 4, 6), draw.real(4), draw.real(4), None, None, True, 0.1, 1e-5, False)
    yield sample(instance, draw.real(5, 4, 3, 6), None, None, None, None, True, 0.1, 1e-5, False)
    yield sample(instance, draw.real(5, 4, 6), draw.real(4), draw.real(4), *running, False, 0.1, 1e-5, False)
    yield sample(instance, draw.real(5, 4, 6), None, None, *running, False, 0.1, 1e-5, False)
    yield sample("aten._weight_norm.default", draw.real(5, 4, 3), draw.real(5, 1, 1))
    yield sample("aten._weight_norm.default", draw.real(5, 4, 3), draw.real(), -1)
    yield sample("aten._weight_norm.default", draw.real(5, 4), draw.real(1, 1), -1)
    yield sample("aten._weight_norm.default", draw.real(4, 5), draw.real(1, 5), 1)
    yield sample("aten._weight_norm_interface.default", draw.real(5, 4), draw.real(5, 1))
