"""Ops that draw random numbers: on whole values the same everywhere, on pieces each its part of one draw."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lopsided.ir.placement import Placement, R
from lopsided.ops.op import Call, Local, Op, number
from lopsided.ops.pointwise import nonlinear
from lopsided.ops.sample import Draw, Sample, sample


def _kept(local: Local, shape: tuple[int, ...], p: float) -> Tensor:
    """Ones where this device's part of a value of this shape is kept, zeros where it is dropped."""
    x, give = local.tensors[0], local.rule.gives[0]
    along = give.is_shard and shape[give.dim] > 1
    return (local.random.uniform(local, shape, give if along else R) >= p).to(x.dtype)


def _is_dropping(local: Local) -> bool:
    return bool(local.call.arg("train")) and number(local.call.arg("p")) > 0


def _features(call: Call) -> tuple[int, ...]:
    """The shape of a mask that drops whole channels."""
    x = call.shapes[0]
    return (*x[:2], *[1] * (len(x) - 2))


def _dropped(local: Local, shape: tuple[int, ...]) -> Tensor:
    x, p = local.tensors[0], number(local.call.arg("p"))
    if not _is_dropping(local):
        return x
    return x * _kept(local, shape, p) / (1 - p) if p < 1 else x * 0


def _alpha_dropped(local: Local, shape: tuple[int, ...]) -> Tensor:
    """Dropped elements become the negative saturation of SELU; then mean and variance are restored."""
    x, p = local.tensors[0], number(local.call.arg("p"))
    if not _is_dropping(local):
        return x
    if p >= 1:
        return x * 0
    saturation = -1.7580993408473766
    scale = 1 / math.sqrt((1 - p) * (1 + p * saturation**2))
    kept = _kept(local, shape, p)
    return scale * (x * kept + saturation * (1 - kept) - p * saturation)


def dropout(local: Local) -> Tensor:
    return _dropped(local, local.call.shapes[0])


def dropout_with_mask(local: Local) -> tuple[Tensor, Tensor]:
    p = number(local.call.arg("p"))
    if local.call.arg("train") is False or p == 0:
        return local.tensors[0], torch.ones_like(local.tensors[0], dtype=torch.bool)
    kept = _kept(local, local.call.shapes[0], p)
    return local.tensors[0] * kept / (1 - p) if p < 1 else local.tensors[0] * 0, kept.bool()


def feature_dropout(local: Local) -> Tensor:
    return _dropped(local, _features(local.call))


def alpha_dropout(local: Local) -> Tensor:
    return _alpha_dropped(local, local.call.shapes[0])


def feature_alpha_dropout(local: Local) -> Tensor:
    return _alpha_dropped(local, _features(local.call))


def rrelu(local: Local) -> Tensor:
    if not local.call.arg("training"):
        return torch.as_tensor(local.run())
    x, low, high = local.tensors[0], number(local.call.arg("lower")), number(local.call.arg("upper"))
    return torch.where(x >= 0, x, x * (local.draw().to(x.dtype) * (high - low) + low))


def bernoulli(local: Local) -> Tensor:
    # The probability is the last tensor, or a number.
    probability = (
        local.tensors[-1] if "p" not in local.call.given() or local.call.is_tensor("p") else local.call.arg("p")
    )
    return (local.draw() < probability).to(local.tensors[0].dtype)


def uniform_like(local: Local) -> Tensor:
    low, high = local.call.arg("from"), local.call.arg("to")
    drawn = local.draw().to(local.call.node.results[0].torch_dtype)
    return drawn if low is None else drawn * (number(high) - number(low)) + number(low)


def normal_like(local: Local) -> Tensor:
    drawn = local.draw(normal=True).to(local.call.node.results[0].torch_dtype)
    std, mean = local.call.arg("std"), local.call.arg("mean")
    return drawn if std is None else drawn * number(std) + number(mean)


def exponential(local: Local) -> Tensor:
    drawn = local.draw().clamp_min(1e-12).to(local.tensors[0].dtype)
    return -drawn.log() / number(local.call.arg("lambd"))


def randint_like(local: Local) -> Tensor:
    low, high = number(local.call.arg("low") or 0), number(local.call.arg("high"))
    return (local.draw() * (high - low) + low).floor().to(local.call.node.results[0].torch_dtype)


def multinomial(local: Local) -> Tensor:
    """With replacement by inverting the distribution; without, the largest of p / exponential noise."""
    p = local.tensors[0]
    if local.call.arg("replacement"):
        upto = p.cumsum(-1)
        return torch.searchsorted(upto, local.draw().to(p.dtype) * upto[..., -1:], right=True).clamp_max(
            p.shape[-1] - 1
        )
    give: Placement = local.rule.gives[0]
    noise = -local.random.uniform(local, local.call.shapes[0], give).clamp_min(1e-12).log()
    return (p / noise.to(p.dtype)).topk(int(local.call.arg("num_samples")), -1).indices


RANDOM: dict[str, Op] = {
    "aten.dropout": Op("... -> ...", local=dropout, random=True),
    "aten.native_dropout": Op("f[...] -> ..., ...", local=dropout_with_mask, random=True),
    "aten.feature_dropout": Op("... -> ...", local=feature_dropout, random=True),
    "aten.alpha_dropout": Op(nonlinear, local=alpha_dropout, random=True),
    "aten.feature_alpha_dropout": Op(nonlinear, local=feature_alpha_dropout, random=True),
    "aten.rrelu": Op(nonlinear, local=rrelu, random=True),
    "aten.bernoulli": Op(nonlinear, local=bernoulli, random=True),
    "aten.rand_like": Op(nonlinear, local=uniform_like, random=True),
    "aten.uniform": Op(nonlinear, local=uniform_like, random=True),
    "aten.randn_like": Op(nonlinear, local=normal_like, random=True),
    "aten.normal_functional": Op(nonlinear, local=normal_like, random=True),
    "aten.exponential": Op(nonlinear, local=exponential, random=True),
    "aten.randint_like": Op(nonlinear, local=randint_like, random=True),
    "aten.multinomial": Op("f[... K] -> ... J", local=multinomial, random=True),
}


# Samples


def samples(draw: Draw) -> Iterator[Sample]:
    for p, train in ((0.3, True), (0.3, False), (1.0, True)):
        yield sample("aten.dropout.default", draw.real(5, 4), p, train)
    yield sample("aten.native_dropout.default", draw.real(5, 4), 0.3, True)
    yield sample("aten.feature_dropout.default", draw.real(5, 4, 6), 0.4, True)
    yield sample("aten.alpha_dropout.default", draw.real(5, 4), 0.4, True)
    yield sample("aten.feature_alpha_dropout.default", draw.real(5, 4, 6), 0.4, True)
    yield sample("aten.rrelu.default", draw.real(5, 4), 0.1, 0.4, True)
    yield sample("aten.rrelu.default", draw.real(5, 4), 0.1, 0.4, False)
    yield sample("aten.bernoulli.default", draw.positive(5, 4, grad=False))
    yield sample("aten.bernoulli.p", draw.constant(5, 4), 0.3)
    yield sample("aten.bernoulli.Tensor", draw.constant(5, 4), draw.positive(5, 4, grad=False))
    yield sample("aten.rand_like.default", draw.constant(5, 4))
    yield sample("aten.uniform.default", draw.constant(5, 4), -2.0, 3.0)
    yield sample("aten.randn_like.default", draw.constant(5, 4))
    yield sample("aten.normal_functional.default", draw.constant(5, 4), 1.0, 0.5)
    yield sample("aten.exponential.default", draw.constant(5, 4), 2.0)
    yield sample("aten.multinomial.default", draw.positive(5, 4, grad=False), 6, True)
    yield sample("aten.multinomial.default", draw.positive(5, 7, grad=False), 3, False)
    yield sample("aten.multinomial.default", draw.positive(7, grad=False), 3, False)
    yield sample("aten.randint_like.default", draw.constant(5, 4), 9)
    yield sample("aten.randint_like.low_dtype", draw.constant(5, 4), 3, 9)
