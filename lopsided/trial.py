"""Trying a rule on real kernels: does it compute what one device computes, forward and backward?

In: a `Call`, tensors for its operands, a `Rule`. Out: the worst relative error over the joined results and the joined
gradients of every operand, in float64; `inf` if the kernels refuse. The validator and the experiments are made of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lopsided.errors import LopsidedError
from lopsided.graph import Arg, Atom, Value
from lopsided.imaginary import Parts, SeededRandomness, cotangent, move, run_rule, sum_parts
from lopsided.notation import Rule
from lopsided.ops.op import Call
from lopsided.placement import I, Placement, R, join_pieces

SHARES = (0.5, 0.2, 0.3)
_WIDE = {"f64", "f32", "f16", "bf16"}


def in_float64(call: Call) -> Call:
    """The same call in float64, so that a wrong rule cannot hide in rounding."""

    def widen(value: Value) -> Value:
        return replace(value, dtype="f64" if value.dtype in _WIDE else "c128" if value.dtype == "c64" else value.dtype)

    return Call(
        replace(
            call.node,
            args=tuple(widen_argument(arg) for arg in call.node.args),
            kwargs=tuple((key, widen_argument(arg)) for key, arg in call.node.kwargs),
            results=tuple(map(widen, call.node.results)),
            context=replace(call.node.context, autocast=""),
        ),
        tuple(map(widen, call.operands)),
    )


def widen_argument(arg: Arg) -> Arg:
    """An argument with every dtype in it widened."""
    if isinstance(arg, tuple):
        return tuple(widen_argument(part) for part in arg)
    if isinstance(arg, Atom) and arg.kind == "dtype":
        return Atom("dtype", "f64" if arg.name in _WIDE else "c128" if arg.name == "c64" else arg.name)
    return arg


def random_operands(call: Call, seed: int = 0) -> list[Tensor] | None:
    """Tensors this call accepts without making infinities, or None if none were found.

    Whole numbers stay below every size in sight, so that they can serve as indices.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [size for shape in call.shapes for size in shape if size > 1]
    below = max(min(sizes, default=2), 2)
    for low, high in ((-1.5, 1.5), (0.1, 0.9), (1.1, 2.0)):
        operands = []
        for value in call.operands:
            if value.dtype == "bool":
                operands.append(torch.rand(value.shape, generator=generator) < 0.5)
            elif value.torch_dtype.is_floating_point or value.torch_dtype.is_complex:
                drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64) * (high - low) + low
                operands.append(drawn.to(value.torch_dtype))
            else:
                operands.append(torch.randint(0, below, value.shape, generator=generator, dtype=value.torch_dtype))
        try:
            made = run_whole(call, operands, SeededRandomness(seed, (1.0,)))
        except (RuntimeError, IndexError, ValueError, TypeError, LopsidedError):
            return None
        if all(bool(torch.isfinite(out).all()) for out in made if out.dtype.is_floating_point):
            return operands
    return None


def run_whole(call: Call, operands: Sequence[Tensor], random: SeededRandomness) -> list[Tensor]:
    """The call on one device."""
    rule = Rule((I,) * len(operands), (I,) * len(call.node.results))
    return [parts[0] for parts in run_rule(call, rule, [[t] for t in operands], (1.0,), random)]


def try_rule(
    call: Call,
    operands: Sequence[Tensor],
    rule: Rule,
    shares: tuple[float, ...] = SHARES,
    *,
    seed: int = 0,
    backward: bool = True,
) -> float:
    """The worst relative error of running `call` by `rule`, against one device."""
    if not all(p.fits(v.shape) for p, v in zip(rule.needs, call.operands, strict=True)):
        return math.inf
    try:
        return _try_rule(call, operands, rule, shares, seed, backward)
    except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError, LopsidedError):
        return math.inf


def _try_rule(
    call: Call, operands: Sequence[Tensor], rule: Rule, shares: tuple[float, ...], seed: int, backward: bool
) -> float:
    generator = torch.Generator().manual_seed(seed + 1)
    grads = [value.grad for value in call.operands]
    wholes = [_leaf(t, grad) for t, grad in zip(operands, grads, strict=True)]
    expected = run_whole(call, wholes, SeededRandomness(seed, (1.0,)))
    placed = [
        [_leaf(part, grad) for part in distribute(t.detach(), need, shares, generator)]
        for t, need, grad in zip(wholes, rule.needs, grads, strict=True)
    ]
    made = run_rule(call, rule, placed, shares, SeededRandomness(seed, shares))
    error = max(
        (_disagreement(parts, give, out) for parts, give, out in zip(made, rule.gives, expected, strict=True)),
        default=0.0,
    )
    if not backward or error > 1e-6 or not any(out.requires_grad for out in expected):
        return error
    ends, seeds, whole_ends, whole_seeds = [], [], [], []
    for parts, give, out in zip(made, rule.gives, expected, strict=True):
        if out.requires_grad:
            dy = torch.rand(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) - 0.5
            whole_ends.append(out)
            whole_seeds.append(dy)
            for part, gradient in zip(parts, distribute(dy, cotangent(give), shares, generator), strict=True):
                if part.requires_grad:
                    ends.append(part)
                    seeds.append(gradient)
    torch.autograd.backward(whole_ends, whole_seeds)
    if ends:
        torch.autograd.backward(ends, seeds)
    for parts, need, whole in zip(placed, rule.needs, wholes, strict=True):
        if whole.requires_grad:
            gradients = [_gradient(part) for part in parts]
            error = max(error, _disagreement(gradients, cotangent(need), _gradient(whole)))
    return error


def _leaf(tensor: Tensor, grad: bool) -> Tensor:
    return tensor.detach().clone().requires_grad_(grad)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def distribute(whole: Tensor, placement: Placement, shares: tuple[float, ...], generator: torch.Generator) -> Parts:
    """A whole value as the devices would hold it; terms of a sum are random, so that none can pass for the whole."""
    if placement.kind != "P":
        return move([whole for _ in shares], R, placement, whole.shape, shares)
    terms: list[Tensor] = []
    for _ in shares[1:]:
        if whole.dtype.is_floating_point or whole.dtype.is_complex:
            terms.append((torch.rand(whole.shape, generator=generator, dtype=torch.float64) - 0.5).to(whole.dtype))
        else:
            terms.append(torch.randint(-3, 4, whole.shape, generator=generator).to(whole.dtype))
    return [whole - sum_parts(terms) if terms else whole, *terms]


def _disagreement(parts: Parts, placement: Placement, whole: Tensor) -> float:
    """How far the parts are from the whole value they should be, relative to its size."""
    if placement.is_shard:
        candidates = [join_pieces(parts, placement)]
    elif placement.kind == "P":
        candidates = [sum_parts(parts)]
    else:
        candidates = parts
    return max(relative_error(candidate, whole) for candidate in candidates)


def relative_error(found: Tensor, expected: Tensor, floor: float = 1e-6) -> float:
    """The largest difference, relative to the largest element expected; `floor` keeps noise around zero small."""
    if found.shape != expected.shape or found.dtype.is_floating_point != expected.dtype.is_floating_point:
        return math.inf
    if not expected.numel():
        return 0.0
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return 0.0 if torch.equal(found.to(expected.dtype), expected) else math.inf
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, torch.zeros_like(found), found - expected).detach().abs().max().item()
    finite = expected.detach()[expected.detach().isfinite()]
    scale = max(finite.abs().max().item() if finite.numel() else 0.0, floor)
    if difference == 0:
        return 0.0
    return math.inf if math.isnan(difference) or not scale else difference / scale
