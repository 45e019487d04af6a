"""Ops that treat every element by itself. Most are picked up by torch's own tag; those that are linear are listed."""

from __future__ import annotations

import torch

from lopsided.call import aten_overload
from lopsided.ops.op import Call, Local, Op, dim_of, letters, number, spec, whole


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
    if len(call.operands) == 3:
        return "... * f[...] + ... -> ..."
    return "... * f[...] -> ..." if number(call.arg("value")) == 0 else nonlinear(call)


def where(call: Call) -> str:
    if len(call.operands) == 3:
        return "f[...] * {... + ...} -> ..."
    numbers = [number(v) for v in (call.arg("self"), call.arg("other")) if isinstance(v, int | float)]
    return "f[...] * ... -> ..." if numbers == [0.0] and len(call.operands) == 2 else nonlinear(call)


# Casts


def _is_linear_cast(call: Call) -> bool:
    values = (call.operands[0], *call.node.results)
    return all(v.torch_dtype.is_floating_point or v.torch_dtype.is_complex for v in values)


def cast(call: Call) -> str:
    return "... -> ..." if _is_linear_cast(call) else "f[...] -> ..."


def cast_like(call: Call) -> str:
    """`x.to(other)`: only the dtype of the other tensor matters, whatever its shape."""
    other = whole(call.shapes[1], 0)
    return f"... * f[{other}] -> ..." if _is_linear_cast(call) else f"f[..., {other}] -> ..."


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
    "neg negative clone contiguous alias detach lift_fresh positive real imag conj _conj conj_physical _neg_view"
    " resolve_conj resolve_neg rad2deg deg2rad zeros_like zero"
).split()
# Pointwise in fact, but without torch's tag.
_UNTAGGED = (
    "hardswish log_sigmoid isclose isreal special_expit special_erf special_erfc special_log1p special_expm1"
    " special_xlogy special_gammaln special_sinc special_digamma special_psi special_erfinv special_exp2 special_i0"
    " special_ndtr special_round special_logit special_gammainc special_gammaincc special_polygamma"
    " special_multigammaln polar floor_divide ones_like full_like __and__ __or__ fix absolute arctan2 arctan arcsin"
    " arccos arcsinh arccosh arctanh less less_equal greater greater_equal not_equal"
).split()

POINTWISE: dict[str, Op] = {
    **{f"aten.{name}": Op("... -> ...") for name in _LINEAR},
    **{f"aten.{name}": Op(nonlinear) for name in _UNTAGGED},
    "aten.complex": Op("... + ... -> ..."),
    "aten.add": Op(summands),
    "aten.sub": Op(summands),
    "aten.subtract": Op(summands),
    "aten.rsub": Op(summands),
    "aten.mul": Op(product),
    "aten.multiply": Op(product),
    "aten.div": Op(quotient),
    "aten.divide": Op(quotient),
    "aten.true_divide": Op(quotient),
    "aten.ldexp": Op("... * f[...] -> ..."),
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
