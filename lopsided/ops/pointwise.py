"""Ops that treat every element by itself. Most are picked up by torch's own tag; linear ones are listed."""

from __future__ import annotations

import math

import torch

from lopsided.ir.op_call import aten_overload
from lopsided.ops.op import Call, Local, Op, dim_of, entries, letters, number, spec


def nonlinear(call: Call) -> str:
    return f"f[{', '.join(['...'] * len(call.operands))}] -> ..."


def product(call: Call) -> str:
    return " * ".join(["..."] * len(call.operands)) + " -> ..."


def summands(call: Call) -> str:
    # A number added to a P value would be added once per device.
    return "... + ... -> ..." if len(call.operands) == 2 else "f[...] -> ..."


def scaled(call: Call) -> str:
    """The first operand times something made of the second: `div`, `xlogy`, shifts to the left."""
    if call.arg("rounding_mode") is not None or not call.is_tensor("self"):
        return nonlinear(call)
    return "... * f[...] -> ..." if len(call.operands) == 2 else "... -> ..."


def masked_fill(call: Call) -> str:
    if len(call.operands) == 3:
        return "... * f[...] + ... -> ..."
    # Infinity filled in on every device is infinity, added up.
    passes = number(call.arg("value")) == 0 or math.isinf(number(call.arg("value")))
    return "... * f[...] -> ..." if passes else nonlinear(call)


def where(call: Call) -> str:
    if len(call.operands) == 3:
        return "f[...] * {... + ...} -> ..."
    numbers = [number(v) for v in (call.arg("self"), call.arg("other")) if isinstance(v, int | float)]
    return "f[...] * ... -> ..." if numbers == [0.0] and len(call.operands) == 2 else nonlinear(call)


# Casts


def _is_linear_cast(call: Call) -> bool:
    """Not from truth values, and not from real numbers to whole ones."""
    before, after = call.operands[0].torch_dtype, call.node.results[0].torch_dtype
    if torch.bool in (before, after):
        return False
    return after.is_floating_point or after.is_complex or not (before.is_floating_point or before.is_complex)


def cast(call: Call) -> str:
    return "... -> ..." if _is_linear_cast(call) else "f[...] -> ..."


def cast_like(call: Call) -> str:
    """`x.to(other)`: only the dtype of the other matters; dims as long as those of x are cut with them."""
    x, other = call.shapes
    names = letters(len(x))
    like = spec([names[d] if d < len(x) and x[d] == size else f"X{d}" for d, size in enumerate(other)])
    return (
        f"{spec(names)} * f[{like}] -> {spec(names)}"
        if _is_linear_cast(call)
        else f"f[{spec(names)}, {like}] -> {spec(names)}"
    )


def bits(call: Call) -> str:
    """`view(dtype)`: the last dim changes where the dtypes differ in size."""
    return "f[...] -> ..." if call.shapes == call.results else "f[... X] -> ... Y"


# Gates and slopes


def prelu(call: Call) -> str:
    x, weight = call.shapes
    if len(x) < 2 or weight == (1,):
        return "f[..., 1] -> ..." if len(weight) else "f[..., ()] -> ..."
    rest = " ".join(f"x{k}" for k in range(len(x) - 2))
    return f"f[n o {rest}, o] -> n o {rest}"


def glu(call: Call) -> str:
    """One half gates the other: both may be cut alike."""
    names, dim = letters(len(call.shapes[0])), dim_of(call)
    halves = [*names[:dim], f"(B {names[dim]})", *names[dim + 1 :]]
    return f"f[{spec(halves)}] -> {spec(names)}"


def zeros(local: Local) -> object:
    """Memory that nobody wrote to: zeros, so that every device holds the same."""
    return local.tensors[0].new_zeros(local.shapes[0], dtype=local.call.node.results[0].torch_dtype)


_LINEAR = (
    "neg negative clone contiguous alias detach lift_fresh_copy positive real imag conj _conj conj_physical"
    " resolve_conj resolve_neg rad2deg deg2rad zeros_like zero"
)
# Pointwise in fact, but without torch's tag.
_UNTAGGED = (
    "hardswish log_sigmoid isclose isreal special_expit special_erf special_erfc special_log1p special_expm1"
    " special_gammaln special_sinc special_digamma special_psi special_erfinv special_exp2 special_i0"
    " special_ndtr special_round special_logit special_gammainc special_gammaincc special_polygamma"
    " special_multigammaln polar floor_divide ones_like full_like __and__ __or__ fix absolute arctan2 arctan"
    " arcsin arccos arcsinh arccosh arctanh less less_equal greater greater_equal not_equal"
)

_SCALED = "ldexp xlogy special_xlogy special_xlog1py bitwise_left_shift __lshift__"

POINTWISE: dict[str, Op] = {
    **entries(_LINEAR, Op("... -> ...")),
    **entries(_UNTAGGED, Op(nonlinear)),
    "aten.complex": Op("... + ... -> ..."),
    "aten.add": Op(summands),
    "aten.sub": Op(summands),
    "aten.subtract": Op(summands),
    "aten.rsub": Op(summands),
    "aten.mul": Op(product),
    "aten.multiply": Op(product),
    "aten.div": Op(scaled),
    "aten.divide": Op(scaled),
    "aten.true_divide": Op(scaled),
    **entries(_SCALED, Op(scaled)),
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
    "aten.view.dtype": Op(bits),
    "aten.prelu": Op(prelu),
    "aten.glu": Op(glu),
    "aten.empty_like": Op("... -> ...", local=zeros),
    "aten.fill.Tensor": Op("f[...] * () -> ..."),
    "aten.fill.Scalar": Op(nonlinear),
}


def by_tag(op: str) -> Op | None:
    """The entry of an op that torch tags as pointwise and that nothing above describes."""
    overload = aten_overload(op)
    return Op(nonlinear) if overload is not None and torch.Tag.pointwise in overload.tags else None
