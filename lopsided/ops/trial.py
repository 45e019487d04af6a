"""Trying a rule on real kernels: does it compute what one device computes, forward and backward?

In: a `Call`, tensors for its operands, a `Rule`. Out: the worst relative error over the joined results and the joined
gradients of every operand, in float64; `inf` if the kernels refuse, or if going backward a device reaches other
operands than the others do: it would not start the collectives behind them. The validator and the experiments are made
of this.

Values at the edge (`edge_operands`) are what ordinary numbers never show, and models meet every day: masked scores are
-inf, a row may be masked altogether, a padding row is zeros, a constant feature has no spread, an index may lie outside
of the piece a device holds. On them one device may have no number to compare with. Then a result must be equal
where one device has a number or an infinity, and no number where it has none; a gradient, and what is summed from terms
that the devices were given, must be equal where one device has a finite one: infinite terms of both signs are no sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lopsided.errors import LopsidedError
from lopsided.ir.graph import Value
from lopsided.ir.notation import Rule
from lopsided.ir.placement import P, Placement, R, join_pieces
from lopsided.ir.program import whole_rule
from lopsided.ops.op import Call
from lopsided.ops.simulated_devices import Parts, SeededRandomness, cotangent, move, run_rule, sum_parts

SHARES = (0.5, 0.2, 0.3)


_RANGES = ((-1.5, 1.5), (0.1, 0.9), (1.1, 2.0), (-40.0, 40.0))


def random_operands(call: Call, seed: int = 0) -> list[list[Tensor]]:
    """Tensors this call accepts without making infinities: one set for each range of numbers where that is so.

    Whole numbers stay below every size in sight, so that they can serve as indices.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for low, high in _RANGES:
        operands = [_draw(value, low, high, call, generator) for value in call.operands]
        try:
            made = run_whole(call, operands, SeededRandomness(seed, (1.0,)))
        except (RuntimeError, IndexError, ValueError, TypeError, LopsidedError):
            continue
        if all(bool(torch.isfinite(out).all()) for out in made if out.dtype.is_floating_point):
            found.append(operands)
    return found


def _draw(value: Value, low: float, high: float, call: Call, generator: torch.Generator) -> Tensor:
    if value.dtype == "bool":
        return torch.rand(value.shape, generator=generator) < 0.5
    if value.torch_dtype.is_floating_point or value.torch_dtype.is_complex:
        drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64) * (high - low) + low
        return drawn.to(value.torch_dtype)
    below = max(min((size for shape in call.shapes for size in shape if size > 1), default=2), 2)
    return torch.randint(0, below, value.shape, generator=generator, dtype=value.torch_dtype)


def run_whole(call: Call, operands: Sequence[Tensor], random: SeededRandomness) -> list[Tensor]:
    """The call on one device."""
    rule = whole_rule(call.node)
    return [parts[0] for parts in run_rule(call, rule, [[t] for t in operands], (1.0,), random)]


def try_rule(
    call: Call,
    operands: Sequence[Tensor],
    rule: Rule,
    shares: tuple[float, ...] = SHARES,
    *,
    seed: int = 0,
    backward: bool = True,
    edge: bool = False,
) -> float:
    """The worst relative error of running `call` by `rule`, against one device."""
    if not all(p.fits(v.shape) for p, v in zip(rule.needs, call.operands, strict=True)):
        return math.inf
    try:
        return _try_rule(call, operands, rule, shares, seed, backward, edge)
    except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError, LopsidedError):
        return math.inf


def _try_rule(
    call: Call,
    operands: Sequence[Tensor],
    rule: Rule,
    shares: tuple[float, ...],
    seed: int,
    backward: bool,
    edge: bool,
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
    left_out = None if not edge else _not_finite if P in rule.needs else _no_numbers
    if backward and not _go_back_alike(placed, made):
        return math.inf
    error = max(
        (
            _disagreement(parts, give, out, left_out)
            for parts, give, out in zip(made, rule.gives, expected, strict=True)
        ),
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
            left_out = _not_finite if edge else None
            error = max(error, _disagreement(gradients, cotangent(need), _gradient(whole), left_out))
    return error


def _go_back_alike(placed: Sequence[Parts], made: Sequence[Parts]) -> bool:
    """Whether every device reaches the same operands going backward."""
    ways = set()
    for on_device, operands in zip(zip(*made, strict=True), zip(*placed, strict=True), strict=True):
        ahead = [part.grad_fn for part in on_device if part.grad_fn is not None]
        leaves, seen = {id(part) for part in on_device}, set()
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaves.add(id(getattr(node, "variable", None)))
            ahead += [behind for behind, _ in node.next_functions]
        if any(part.requires_grad for part in on_device):  # or else it is connected with all operands
            ways.add(tuple(id(part) in leaves for part in operands if part.requires_grad))
    return len(ways) <= 1


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
            # Sixty-fourths: they add up to zero without rounding.
            drawn = torch.rand(whole.shape, generator=generator, dtype=torch.float64) - 0.5
            terms.append(((drawn * 64).round() / 64).to(whole.dtype))
        else:
            terms.append(torch.randint(-3, 4, whole.shape, generator=generator).to(whole.dtype))
    return [whole - sum_parts(terms) if terms else whole, *terms]


# At the edge much is zero, and rounding around it is no mistake: a norm of zeros divides by the root of its epsilon.
_EDGE_FLOOR = 10.0

_LeftOut = Callable[[Tensor, Tensor], Tensor]


def _not_finite(found: Tensor, whole: Tensor) -> Tensor:
    return ~whole.isfinite()


def _no_numbers(found: Tensor, whole: Tensor) -> Tensor:
    return whole.isnan() & ~found.isfinite()


def _disagreement(parts: Parts, placement: Placement, whole: Tensor, left_out: _LeftOut | None = None) -> float:
    """How far the parts are from the whole value they should be, relative to its size, but for what is `left_out`."""
    if placement.is_shard:
        candidates = [join_pieces(parts, placement)]
    elif placement.kind == "P":
        candidates = [sum_parts(parts)]
    else:
        candidates = parts
    if left_out is None:
        return max(relative_error(candidate, whole) for candidate in candidates)
    if any(candidate.shape != whole.shape for candidate in candidates):
        return math.inf
    compared = [torch.where(left_out(candidate, whole), whole, candidate) for candidate in candidates]
    return max(relative_error(candidate, whole, _EDGE_FLOOR) for candidate in compared)


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


# Values at the edge


_Edit = Callable[[Tensor], Tensor]


def edge_operands(call: Call, operands: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """The operands with each kind of edge put into them, where the op on one device accepts that."""
    found = {}
    for name, edit in _EDGES.items():
        if any(call.node.op.startswith(op) for op in _REFUSED.get(name, ())):
            continue
        edited = [edit(tensor) for tensor in operands]
        if any(not torch.equal(a, b) for a, b in zip(edited, operands, strict=True)) and _runs(call, edited):
            found[name] = edited
    return found


def _runs(call: Call, operands: Sequence[Tensor]) -> bool:
    """Whether one device can run the call on these, forward and backward."""
    try_whole = whole_rule(call.node)
    return try_rule(call, operands, try_whole, (1.0,), edge=True) == 0


def _of_reals(edit: _Edit) -> _Edit:
    return lambda tensor: edit(tensor) if tensor.dtype.is_floating_point and tensor.numel() else tensor


def _of_indices(edit: _Edit) -> _Edit:
    def edited(tensor: Tensor) -> Tensor:
        whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)
        return edit(tensor) if whole and tensor.numel() else tensor

    return edited


def _equal_in_rows(x: Tensor) -> Tensor:
    """Every row one number, of which a third is not exact: a mean of it rounds."""
    return x.select(-1, 0).unsqueeze(-1).expand(x.shape).clone() if x.dim() else x


def _equal_rows(x: Tensor) -> Tensor:
    return x.select(0, 0).unsqueeze(0).expand(x.shape).clone() if x.dim() else x


def _masked(x: Tensor) -> Tensor:
    """Every second element -inf, and of the first row and the first column all."""
    masked = x.clone().reshape(-1)
    masked[::2] = -math.inf
    masked = masked.reshape(x.shape)
    if x.dim():
        masked[0] = -math.inf
        masked[..., 0] = -math.inf
    return masked


def _unseen(x: Tensor) -> Tensor:
    """The first row and the first column of truths false."""
    if x.dtype != torch.bool or not x.dim() or not x.numel():
        return x
    unseen = x.clone()
    unseen[0], unseen[..., 0] = False, False
    if x.dim() > 1:
        unseen[..., 0, :] = False
    return unseen


_EDGES: dict[str, _Edit] = {
    "zeros": _of_reals(torch.zeros_like),
    "rows of one number": _of_reals(_equal_in_rows),
    "equal rows": _of_reals(_equal_rows),
    "masked": _of_reals(_masked),
    "nothing is seen": _unseen,
    "the first index": _of_indices(lambda x: torch.full_like(x, int(x.min()))),
    "the last index": _of_indices(lambda x: torch.full_like(x, int(x.max()))),
}
# What an op cannot be given, though its kernel does not say so.
_REFUSED: dict[str, tuple[str, ...]] = {
    "masked": ("aten.searchsorted", "aten.bucketize"),  # wants sorted numbers
    # Matrices that cannot be inverted: whether a kernel notices is a matter of its rounding.
    "rows of one number": ("aten.linalg_", "aten.inverse", "aten.cholesky", "aten.det", "aten.logdet", "aten.slogdet"),
    "the first index": ("aten._grouped_mm",),  # wants offsets up to the last row, and leaves others as memory was
}
