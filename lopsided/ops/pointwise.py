"""Ops that treat every element by itself. Most are picked up by torch's own tag; linear ones are listed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from lopsided.ir.op_call import aten_overload
from lopsided.ops.op import Call, Local, Op, dim_of, entries, letters, number, spec
from lopsided.ops.sample import Draw, Sample, sample


def nonlinear(call: Call) -> str:
    return f"f[{', '.join(['...'] * len(call.operands))}] -> ..."


def product(call: Call) -> str:
    return " * ".join(["..."] * len(call.operands)) + " -> ..."


def summands(call: Call) -> str:
    # A number added to a P value would be added once per device.
    return "... + ... -> ..." if len(call.operands) == 2 else "f[...] -> ..."


def scaled(call: Call) -> str:
    """The first operand times something made of the second: `div`, shifts to the left."""
    if call.arg("rounding_mode") is not None or not call.is_tensor("self"):
        return nonlinear(call)
    return "... * f[...] -> ..." if len(call.operands) == 2 else "... -> ..."


def times_logarithm(call: Call) -> str:
    """`xlogy`. Zero times the logarithm of zero is zero, but terms of both signs times it add up to no number: linear
    only where the logarithm is that of a number."""
    return scaled(call) if len(call.operands) == 1 else nonlinear(call)


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
    """Whether a cast is linear: not one from truth values, nor from real numbers to whole ones."""
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

_SCALED = "ldexp bitwise_left_shift __lshift__"

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
    **entries("xlogy special_xlogy special_xlog1py", Op(times_logarithm)),
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


# Samples


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _samples_of_linear(draw)
    yield from _samples_of_arithmetic(draw)
    yield from _samples_of_untagged(draw)
    yield from _samples_of_choices(draw)
    yield from _samples_of_casts(draw)


def _samples_of_linear(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_arithmetic(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_untagged(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_choices(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_casts(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.to.dtype", draw.real(5, 4), torch.complex128)
    yield sample("aten.to.dtype", draw.truths(5, 4), torch.float64)
    yield sample("aten.to.dtype", draw.constant(5, 4, low=-9, high=9), torch.int64)
    yield sample("aten._to_copy.default", draw.real(5, 4), dtype=torch.complex128)
    yield sample("aten.to.other", draw.real(5, 4), draw.constant(6))
    yield sample("aten.type_as.default", draw.real(5, 4), draw.constant(6, 7))
    yield sample("aten.type_as.default", draw.below(9, 5, 4), draw.constant())
    yield sample("aten.view.dtype", draw.constant(5, 4), torch.int64)
    yield sample("aten.view.dtype", draw.constant(5, 4), torch.int32)


_RANGES = ((0.15, 0.9), (1.1, 2.0))


_SHAPES = ((5, 4), (4,), (5, 1))


def samples_by_tag(draw: Draw) -> Iterator[Sample]:
    """A sample of every op that torch tags as pointwise: tensors for tensor arguments, numbers for the rest.

    Backward kernels are left out (autograd calls them, models do not), and so are ops that refuse the data below.
    """
    for name in sorted(dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        for overload in packet._overload_names if isinstance(packet, OpOverloadPacket) else ():
            op = getattr(packet, overload)
            if _is_sampled(op) and (found := _first_that_runs(op, draw)) is not None:
                yield found


def _is_sampled(op: OpOverload) -> bool:
    return (
        torch.Tag.pointwise in op.tags
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op._schema.is_mutable
        and "backward" not in str(op)
        and "_foreach" not in str(op)
    )


def _first_that_runs(op: OpOverload, draw: Draw) -> Sample | None:
    for low, high in _RANGES:
        for kind in ("trained", "real", "whole", "truth"):
            example = _example(op, draw, low, high, kind)
            if example is not None and _runs(op, example):
                return example
    return None


def _example(op: OpOverload, draw: Draw, low: float, high: float, kind: str) -> Sample | None:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    tensors = 0
    for argument in op._schema.arguments:
        value: Any
        text = str(argument.type)
        if text == "Tensor":
            shape = _SHAPES[min(tensors, len(_SHAPES) - 1)]
            value = _tensor(draw, shape, low, high, kind)
            tensors += 1
        elif argument.has_default_value():
            continue
        elif text == "number":
            value = 2 if kind in ("whole", "truth") else 0.5
        elif text in ("float", "int", "bool"):
            value = {"float": 0.5, "int": 1, "bool": False}[text]
        elif text.startswith("Optional"):
            value = None
        else:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Sample(str(op), tuple(args), kwargs)


def _tensor(draw: Draw, shape: tuple[int, ...], low: float, high: float, kind: str) -> Tensor:
    if kind == "whole":
        return draw.below(9, *shape, start=1)
    return draw.truths(*shape) if kind == "truth" else draw.real(*shape, low=low, high=high, grad=kind == "trained")


def _runs(op: OpOverload, example: Sample) -> bool:
    try:
        out = op(*example.args, **example.kwargs)
        if not isinstance(out, Tensor) or (out.dtype.is_floating_point and not bool(out.isfinite().all())):
            return False
        if out.requires_grad:
            trained = [t for t in example.args if isinstance(t, Tensor)]
            torch.autograd.grad(out, trained, torch.ones_like(out), allow_unused=True)
    except (RuntimeError, IndexError, ValueError, TypeError):  # no kernel for these is a RuntimeError, too
        return False
    return True
