"""Ops that treat every element by itself. Most are picked up by torch's own tag; those that are linear are listed."""

from __future__ import annotations

import torch

from lopsided.call import aten_overload
from lopsided.ops.op import Call, Local, Op, number


def nonlinear(call: Call) -> str:
    return f"f[{', '.join(['...'] * len(call.operands))}] -> ..."


def product(call: Call) -> str:
    return " * ".join(["..."] * len(call.operands)) + " -> ..."


def summands(call: Call) -> str:
    # A number added to a P value would be added once per device.
    return "... + ... -> ..." if len(call.operands) == 2 else "f[...] -> ..."


def quotient(call: Call) -> str:
    if call.arg("rounding_mode") is not None:
        return nonlinear(call)
    return "... * f[...] -> ..." if len(call.operands) == 2 else "... -> ..."


def masked_fill(call: Call) -> str:
    if len(call.operands) == 2 and number(call.arg("value")) == 0:
        return "... * f[...] -> ..."
    return nonlinear(call)


def where(call: Call) -> str:
    if len(call.operands) == 3:
        return "f[...] * {... + ...} -> ..."
    numbers = [number(v) for v in (call.arg("self"), call.arg("other")) if isinstance(v, int | float)]
    return "f[...] * ... -> ..." if numbers == [0.0] and len(call.operands) == 2 else nonlinear(call)


def cast(call: Call) -> str:
    continuous = [v.torch_dtype.is_floating_point or v.torch_dtype.is_complex for v in (*call.operands, *call.node.results)]
    return "... -> ..." if all(continuous) else "f[...] -> ..."


def cast_like(call: Call) -> str:
    """`x.to(other)`: only the dtype of the other tensor matters, whatever its shape."""
    other = " ".join("ABCDEFGH"[: len(call.operands[1].shape)]) or "()"
    return f"... * f[{other}] -> ..." if cast(call).startswith("...") else f"f[..., {other}] -> ..."


def prelu(call: Call) -> str:
    x, weight = call.shapes
    if len(x) < 2 or weight == (1,):
        return "f[..., 1] -> ..." if len(weight) else "f[..., ()] -> ..."
    rest = " ".join("cdefgh"[: len(x) - 2])
    return f"f[n o {rest}, o] -> n o {rest}"


def dropout(local: Local) -> object:
    x, p = local.tensors[0], number(local.call.arg("p"))
    if not local.call.arg("train") or p == 0:
        return x
    return x * (local.draw() >= p).to(x.dtype) / (1 - p) if p < 1 else x * 0


def bernoulli(local: Local) -> object:
    p = local.call.arg("p")
    probability = local.tensors[0] if p is None else p
    return (local.draw() < probability).to(local.tensors[0].dtype)


def uniform_like(local: Local) -> object:
    low, high = local.call.arg("from"), local.call.arg("to")
    drawn = local.draw().to(local.call.node.results[0].torch_dtype)
    return drawn if low is None else drawn * (number(high) - number(low)) + number(low)


def normal_like(local: Local) -> object:
    drawn = local.draw(normal=True).to(local.call.node.results[0].torch_dtype)
    std, mean = local.call.arg("std"), local.call.arg("mean")
    return drawn if std is None else drawn * number(std) + number(mean)


def exponential(local: Local) -> object:
    drawn = local.draw().clamp_min(1e-12).to(local.tensors[0].dtype)
    return -drawn.log() / number(local.call.arg("lambd"))


_LINEAR = ("neg", "clone", "contiguous", "alias", "detach", "positive", "real", "imag", "conj", "_conj", "resolve_conj", "resolve_neg")
# Pointwise in fact, but without torch's tag.
_UNTAGGED = (
    "mish hardswish hardsigmoid hardtanh softplus softshrink hardshrink log_sigmoid celu selu elu leaky_relu relu6"
    " threshold isnan isfinite isinf isclose nan_to_num clip logical_not square special_expit special_erf"
    " special_log1p special_expm1 special_xlogy special_gammaln special_sinc polar complex angle frac fmod remainder"
    " floor_divide zeros_like ones_like full_like empty_like fill zero bitwise_not __and__ __or__ __xor__"
    " hypot logit heaviside float_power rsqrt gelu silu softsign tanhshrink logaddexp logaddexp2 copysign nextafter"
    " sgn fix absolute arctan2 arctan arcsin arccos arcsinh arccosh arctanh"
    " less less_equal greater greater_equal not_equal"
).split()

POINTWISE: dict[str, Op] = {
    **{f"aten.{name}": Op("... -> ...") for name in _LINEAR},
    **{f"aten.{name}": Op(nonlinear) for name in _UNTAGGED},
    "aten.add": Op(summands),
    "aten.sub": Op(summands),
    "aten.subtract": Op(summands),
    "aten.rsub": Op(summands),
    "aten.mul": Op(product),
    "aten.multiply": Op(product),
    "aten.div": Op(quotient),
    "aten.divide": Op(quotient),
    "aten.true_divide": Op(quotient),
    "aten.addcmul": Op("... + ... * ... -> ..."),
    "aten.addcdiv": Op("... + ... * f[...] -> ..."),
    "aten.lerp.Scalar": Op("... + ... -> ..."),
    "aten.lerp.Tensor": Op("{... + ...} * f[...] -> ..."),
    "aten.where": Op(where),
    "aten.masked_fill": Op(masked_fill),
    "aten.to.other": Op(cast_like),
    "aten.type_as": Op(cast_like),
    "aten.to": Op(cast),
    "aten._to_copy": Op(cast),
    "aten.float": Op(cast),
    "aten.prelu": Op(prelu),
    "aten.dropout": Op("... -> ...", local=dropout, random=True),
    "aten.bernoulli": Op(nonlinear, local=bernoulli, random=True),
    "aten.rand_like": Op(nonlinear, local=uniform_like, random=True),
    "aten.uniform": Op(nonlinear, local=uniform_like, random=True),
    "aten.randn_like": Op(nonlinear, local=normal_like, random=True),
    "aten.normal_functional": Op(nonlinear, local=normal_like, random=True),
    "aten.exponential": Op(nonlinear, local=exponential, random=True),
}


def by_tag(op: str) -> Op | None:
    """The entry of an op that torch tags as pointwise and that nothing above describes."""
    overload = aten_overload(op)
    return Op(nonlinear) if overload is not None and torch.Tag.pointwise in overload.tags else None
