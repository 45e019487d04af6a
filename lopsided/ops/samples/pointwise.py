"""Samples of the pointwise family: numbers and tensors as operands, broadcasting, random ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample, sample


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _linear(draw)
    yield from _arithmetic(draw)
    yield from _untagged(draw)
    yield from _choices(draw)
    yield from _casts(draw)
    yield from _random(draw)


def _linear(draw: Draw) -> Iterator[Sample]:
    for name in (
        "neg",
        "negative",
        "clone",
        "contiguous",
        "alias",
        "detach",
        "positive",
        "zeros_like",
        "zero",
    ):
        yield sample(f"aten.{name}.default", draw.real(5, 4))
    for name in ("resolve_conj", "resolve_neg", "lift_fresh_copy"):
        yield sample(f"aten.{name}.default", draw.real(5, 4))
    for name in ("real", "imag", "conj", "_conj"):
        yield sample(f"aten.{name}.default", draw.complex(5, 4))
    for name in ("rad2deg", "deg2rad"):
        yield sample(f"aten.{name}.default", draw.real(5, 4))
    yield sample("aten.ldexp.Tensor", draw.real(5, 4), draw.below(3, 4))


def _arithmetic(draw: Draw) -> Iterator[Sample]:
    for name in ("add", "sub", "subtract", "rsub"):
        yield sample(f"aten.{name}.Tensor", draw.real(5, 4), draw.real(5, 4))
        yield sample(f"aten.{name}.Tensor", draw.real(5, 4), draw.real(4), alpha=0.5)
        yield sample(f"aten.{name}.Tensor", draw.real(5, 1, 6), draw.real(4, 1))
        yield sample(f"aten.{name}.Scalar", draw.real(5, 4), 0.5)
    yield sample("aten.add.Tensor", draw.real(5, 4), 2)
    yield sample("aten.add.Tensor", draw.below(9, 5, 4), draw.below(9, 4))
    yield sample("aten.add.Tensor", draw.real(5, 4), draw.real())
    for name in ("mul", "multiply"):
        yield sample(f"aten.{name}.Tensor", draw.real(5, 4), draw.real(5, 4))
        yield sample(f"aten.{name}.Tensor", draw.real(5, 4, 6), draw.real(6))
        yield sample(f"aten.{name}.Scalar", draw.real(5, 4), 0.5)
    yield sample("aten.mul.Tensor", draw.real(5, 4), 0.5)
    yield sample("aten.mul.Tensor", draw.real(5, 1, 6), draw.real(4, 1))
    yield sample("aten.mul.Tensor", draw.real(5, 4), draw.truths(5, 4))
    yield sample("aten.mul.Tensor", draw.real(), draw.real(4))
    for name in ("div", "divide", "true_divide"):
        yield sample(f"aten.{name}.Tensor", draw.real(5, 4), draw.positive(4))
        yield sample(f"aten.{name}.Scalar", draw.real(5, 4), 0.5)
    for name in ("div", "divide"):
        yield sample(f"aten.{name}.Tensor_mode", draw.real(5, 4), draw.positive(4), rounding_mode="floor")
        yield sample(f"aten.{name}.Tensor_mode", draw.real(5, 4), draw.positive(4), rounding_mode=None)
        yield sample(f"aten.{name}.Scalar_mode", draw.real(5, 4), 0.3, rounding_mode="trunc")
    yield sample("aten.div.Tensor", draw.real(5, 4), 3)
    yield sample("aten.addcmul.default", draw.real(5, 4), draw.real(5, 1), draw.real(4), value=0.5)
    yield sample("aten.mul.Tensor", draw.complex(5, 4), draw.complex(4))
    yield sample("aten.mul.Tensor", draw.complex(5, 4), draw.real(5, 1))
    yield sample("aten.div.Tensor", draw.complex(5, 4), draw.positive(4))
    yield sample("aten.addcmul.default", draw.complex(5, 4), draw.complex(5, 1), draw.complex(4), value=0.5)
    yield sample("aten.addcdiv.default", draw.real(5, 4), draw.real(4), draw.positive(5, 1))
    yield sample("aten.lerp.Scalar", draw.real(5, 4), draw.real(4), 0.3)
    yield sample("aten.lerp.Tensor", draw.real(5, 4), draw.real(5, 4), draw.real(4))


_UNARY = (
    "hardswish log_sigmoid special_expit special_erf special_erfc special_log1p special_expm1 special_gammaln"
    " special_sinc special_digamma special_psi special_erfinv special_exp2 special_i0 special_ndtr fix"
    " absolute arctan arcsin arccos arcsinh arctanh special_round special_logit"
)


def _untagged(draw: Draw) -> Iterator[Sample]:
    for name in _UNARY.split():
        yield sample(f"aten.{name}.default", draw.positive(5, 4))
    yield sample("aten.arccosh.default", draw.positive(5, 4, low=1.1, high=2.0))
    for name in ("special_gammainc", "special_gammaincc"):
        yield sample(f"aten.{name}.default", draw.positive(5, 4, grad=False), draw.positive(4))
    yield sample("aten.special_polygamma.default", 1, draw.positive(5, 4))
    yield sample("aten.special_multigammaln.default", draw.positive(5, 4, low=2.0, high=3.0), 2)
    yield sample("aten.special_xlogy.default", draw.real(5, 4), draw.positive(4))
    yield sample("aten.special_xlogy.other_scalar", draw.real(5, 4), 2.0)
    yield sample("aten.special_xlogy.self_scalar", 2.0, draw.positive(5, 4))
    yield sample("aten.polar.default", draw.positive(5, 4), draw.real(5, 4))
    yield sample("aten.complex.default", draw.real(5, 4), draw.real(4))
    yield sample("aten.floor_divide.default", draw.constant(5, 4), draw.positive(4, grad=False))
    yield sample("aten.floor_divide.Scalar", draw.constant(5, 4), 0.3)
    yield sample("aten.isclose.default", draw.constant(5, 4), draw.constant(4), 0.5, 0.5)
    yield sample("aten.isreal.default", draw.constant(5, 4))
    yield sample("aten.arctan2.default", draw.real(5, 4), draw.real(4))
    for name in ("less", "less_equal", "greater", "greater_equal", "not_equal"):
        yield sample(f"aten.{name}.Tensor", draw.constant(5, 4), draw.constant(4))
        yield sample(f"aten.{name}.Scalar", draw.constant(5, 4), 0.5)
    for name in ("__and__", "__or__"):
        yield sample(f"aten.{name}.Tensor", draw.truths(5, 4), draw.truths(4))
        yield sample(f"aten.{name}.Scalar", draw.below(64, 5, 4), 13)
    for name in ("ones_like", "empty_like"):
        yield sample(f"aten.{name}.default", draw.real(5, 4))
    yield sample("aten.full_like.default", draw.real(5, 4), 3.0)
    yield sample("aten.fill.Scalar", draw.real(5, 4), 3.0)
    yield sample("aten.fill.Tensor", draw.real(5, 4), draw.real())


def _choices(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.where.self", draw.truths(5, 4), draw.real(5, 4), draw.real(4))
    yield sample("aten.where.self", draw.truths(4), draw.real(5, 1), draw.real())
    yield sample("aten.where.ScalarOther", draw.truths(5, 4), draw.real(5, 4), 0.0)
    yield sample("aten.where.ScalarOther", draw.truths(5, 4), draw.real(5, 4), -1.0)
    yield sample("aten.where.ScalarSelf", draw.truths(5, 4), 0.0, draw.real(4))
    yield sample("aten.where.ScalarSelf", draw.truths(5, 4), 2.0, draw.real(4))
    yield sample("aten.where.Scalar", draw.truths(5, 4), 1.0, 2.0)
    yield sample("aten.masked_fill.Scalar", draw.real(5, 4), draw.truths(4), 0)
    yield sample("aten.masked_fill.Scalar", draw.real(5, 4), draw.truths(5, 1), -math.inf)
    yield sample("aten.masked_fill.Tensor", draw.real(5, 4), draw.truths(4), draw.real())
    yield sample("aten.prelu.default", draw.real(5, 4, 6), draw.real(4))
    yield sample("aten.prelu.default", draw.real(5, 4), draw.real(1))
    yield sample("aten.prelu.default", draw.real(5), draw.real(1))
    yield sample("aten.glu.default", draw.real(5, 8), -1)
    yield sample("aten.glu.default", draw.real(6, 5), 0)
    yield sample("aten.clamp.default", draw.real(5, 4), -0.5, 0.5)
    yield sample("aten.clamp.Tensor", draw.real(5, 4), draw.real(4), None)
    yield sample("aten.clamp.Tensor", draw.real(5, 4), None, draw.real(4))
    yield sample("aten.clamp.Tensor", draw.real(5, 4), draw.real(4), draw.real())
    yield sample("aten.clamp_min.Tensor", draw.real(5, 4), draw.real(4))
    yield sample("aten.nan_to_num.default", draw.with_nans(5, 4), 0.5)


def _casts(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.to.dtype", draw.real(5, 4), torch.complex128)
    yield sample("aten.to.dtype", draw.truths(5, 4), torch.float64)
    yield sample("aten.to.dtype", draw.constant(5, 4, low=-9, high=9), torch.int64)
    yield sample("aten._to_copy.default", draw.real(5, 4), dtype=torch.complex128)
    yield sample("aten.to.other", draw.real(5, 4), draw.constant(6))
    yield sample("aten.type_as.default", draw.real(5, 4), draw.constant(6, 7))
    yield sample("aten.type_as.default", draw.below(9, 5, 4), draw.constant())
    yield sample("aten.view.dtype", draw.constant(5, 4), torch.int64)
    yield sample("aten.view.dtype", draw.constant(5, 4), torch.int32)


def _random(draw: Draw) -> Iterator[Sample]:
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
