"""N imaginary devices in one process: a value is a list with what each device holds.

In: lists of tensors, placements, shares. Out: lists of tensors, differentiable. `convert` changes a placement,
`run_rule` runs one op by one rule. The simulator, the validator and the experiments are made of these two.

A conversion and its transpose are one table. Going backward, the cotangent of `I` is placed `I`, of `R` it is `P`, of
`P` it is `R`, of `S` it is `S`; so the transpose of `a → b` is the conversion `cotangent(b) → cotangent(a)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lopsided.errors import ProgramError, RuleError
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import aten_overload, surroundings
from lopsided.ir.placement import AnyShares, I, P, Placement, R, join_pieces, pieces_of, place_in_zeros, take_piece
from lopsided.ops import describe
from lopsided.ops.op import Ask, Call, Implementation, Local

Parts = list[Tensor]  # what each device holds of one value

_COTANGENT = {"I": I, "R": P, "P": R}


def cotangent(placement: Placement) -> Placement:
    """How the gradient of a value with this placement is placed."""
    return _COTANGENT.get(placement.kind, placement)


# Conversions


def move(parts: Sequence[Tensor], source: Placement, to: Placement, shape: Sequence[int], shares: AnyShares) -> Parts:
    """Change the placement of a value; no gradient."""
    devices = range(len(parts))
    if source.is_whole and to.is_whole:
        return list(parts)
    if to.kind == "P":
        if source.is_whole:
            return [part if d == 0 else torch.zeros_like(part) for d, part in enumerate(parts)]
        pieces = pieces_of(source, shape, shares)
        return [place_in_zeros(parts[d], source, shape, pieces, d) for d in devices]
    if source.is_whole:
        wholes = list(parts)
    else:
        whole = join_pieces(parts, source) if source.is_shard else sum_parts(parts)
        wholes = [whole for _ in devices]
    if to.is_whole:
        return wholes
    pieces = pieces_of(to, shape, shares)
    return [take_piece(wholes[d], to, pieces, d) for d in devices]


def sum_parts(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: Placement,
        to: Placement,
        shape: tuple[int, ...],
        shares: AnyShares,
        *parts: Tensor,
    ) -> Any:
        ctx.way = (source, to, shape, shares)
        # Autograd wants outputs of their own, also where nothing moves.
        return tuple(part.clone() for part in move(parts, source, to, shape, shares))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        source, to, shape, shares = ctx.way
        return (None, None, None, None, *move(gradients, cotangent(to), cotangent(source), shape, shares))


def convert(parts: Parts, source: Placement, to: Placement, shape: Sequence[int], shares: AnyShares) -> Parts:
    """Change the placement of a value, forward and backward."""
    if source == to:
        return parts
    if not any(part.requires_grad for part in parts):
        return move(parts, source, to, shape, shares)
    made: tuple[Tensor, ...] = _Convert.apply(source, to, tuple(shape), shares, *parts)  # type: ignore[no-untyped-call]
    return list(made)


# Running a rule


@dataclass(frozen=True, slots=True)
class SeededRandomness:
    """Random numbers as a function of a seed and the node: a piece gets its part of what one device would draw."""

    seed: int
    shares: AnyShares

    def of_node(self, name: str, device: int = 0) -> int:
        digest = hashlib.sha256(f"{self.seed} {name} {device}".encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def uniform(self, local: Local, shape: Sequence[int], placement: Placement, *, normal: bool = False) -> Tensor:
        # Drawn on the CPU, so that a GPU sees what a CPU saw.
        generator = torch.Generator("cpu").manual_seed(self.of_node(local.call.node.name))
        draw = torch.randn if normal else torch.rand
        whole = draw(tuple(shape), generator=generator, dtype=torch.float64, device="cpu")
        if placement.is_shard:
            whole = take_piece(whole, placement, pieces_of(placement, shape, self.shares), local.device)
        return whole.to(local.tensors[0].device if local.tensors else torch.get_default_device())


def run_rule(
    call: Call, rule: Rule, operands: Sequence[Parts], shares: AnyShares, random: SeededRandomness
) -> list[Parts]:
    """Run one op by one rule on every device; `operands` are placed as the rule needs, the results as it gives."""
    if rule.how == "sfb":
        return _with_gathered_factors(call, rule, operands, shares, random)
    return _run(call, rule, operands, shares, random)


def _run(call: Call, rule: Rule, operands: Sequence[Parts], shares: AnyShares, random: SeededRandomness) -> list[Parts]:
    locals_ = [_local(call, rule, [parts[d] for parts in operands], d, shares, random) for d in range(len(shares))]
    implementation, talks = implementation_of(call, rule)
    with surroundings(call.node.context):
        if talks:
            made = _in_step([implementation(local) for local in locals_], shares)
        else:
            made = [
                _nothing(local) if is_nothing(local) else _seeded(implementation, local, random) for local in locals_
            ]
    results = [list(out) if isinstance(out, tuple | list) else [out] for out in made]
    for local, out in zip(locals_, results, strict=True):
        _check_shapes(local, out)
    return [[out[k] for out in results] for k in range(len(call.node.results))]


def _local(
    call: Call,
    rule: Rule,
    tensors: list[Tensor],
    device: int,
    shares: AnyShares,
    random: SeededRandomness,
) -> Local:
    pieces = rule_pieces(call, rule, shares)
    shapes = tuple(
        give.local_shape(value.shape, pieces, device) for give, value in zip(rule.gives, call.node.results, strict=True)
    )
    return Local(call, rule, tuple(tensors), shapes, device, pieces, random)


def rule_pieces(call: Call, rule: Rule, shares: AnyShares) -> tuple[int, ...]:
    """The pieces of the index this rule cuts: one index, so one length, whichever tensor tells it."""
    placed = [*zip(rule.gives, call.node.results, strict=True), *zip(rule.needs, call.operands, strict=True)]
    found = {(p.length(value.shape), p.by): (p, value.shape) for p, value in placed if p.is_shard}
    if len(found) > 1:
        texts = [f"{length} by {by}" if by else str(length) for length, by in sorted(found)]
        raise ProgramError(
            f"{call.node.op} by {rule} cuts lengths {', '.join(texts)} as one", do="cut one index at a time"
        )
    return next((pieces_of(p, shape, shares) for p, shape in found.values()), ())


def implementation_of(call: Call, rule: Rule) -> tuple[Implementation, bool]:
    """The function that computes a piece, and whether it may talk to the other devices."""
    entry = describe(call.node.op)
    if rule.how not in ("plain", "sfb"):
        talk = next((t for t in (entry.talks(call) if entry and entry.talks else ()) if t.how == rule.how), None)
        if talk is None:
            raise ProgramError(f"{call.node.op} has no implementation {rule.how!r}", do="derive the rules anew")
        return talk.implementation, True
    return (entry.local if entry is not None and entry.local is not None else Local.run), False


def is_nothing(local: Local) -> bool:
    return bool(local.shapes) and all(0 in shape for shape in local.shapes)


def _nothing(local: Local) -> list[Tensor]:
    """Results without elements need no kernel, and some kernels refuse to make them."""
    where = local.tensors[0].device if local.tensors else torch.get_default_device()
    return [
        torch.zeros(shape, dtype=value.torch_dtype, device=where)
        for shape, value in zip(local.shapes, local.call.node.results, strict=True)
    ]


def _seeded(implementation: Implementation, local: Local, random: SeededRandomness) -> Any:
    overload = aten_overload(local.call.node.op)
    if overload is None or torch.Tag.nondeterministic_seeded not in overload.tags:
        return implementation(local)
    # Whole values draw alike on every device, pieces each their own.
    device = local.device if local.pieces else 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.of_node(local.call.node.name, device))
        return implementation(local)


def _check_shapes(local: Local, out: Sequence[Any]) -> None:
    made = tuple(tuple(t.shape) for t in out)
    if made != local.shapes:
        raise RuleError(
            f"{local.call.node.op} by {local.rule} gives {list(made)} on device {local.device}, "
            f"not {list(local.shapes)}",
            where=str(local.call.node.source),
            do="correct its line or its local implementation in lopsided/ops",
        )


def _in_step(talking: list[Any], shares: AnyShares) -> list[Any]:
    """Drive one generator per device: all ask the same question, all get their part of the answer."""
    results: list[Any] = [None] * len(talking)
    if not isinstance(talking[0], Generator):
        return talking
    answers: Sequence[Tensor | None] = [None] * len(talking)
    while True:
        asks: list[Ask] = []
        for d, generator in enumerate(talking):
            try:
                asks.append(generator.send(answers[d]))
            except StopIteration as stop:
                results[d] = stop.value
        if not asks:
            return results
        answers = _answer(asks, shares)


def _answer(asks: list[Ask], shares: AnyShares) -> Parts:
    parts = [ask.tensor for ask in asks]
    if asks[0].largest:
        peak = torch.stack(parts).amax(0)
        return [peak for _ in parts]
    return convert(parts, Placement(asks[0].source), Placement(asks[0].to), parts[0].shape, shares)


# Sufficient factor broadcasting


def _with_gathered_factors(
    call: Call, rule: Rule, operands: Sequence[Parts], shares: AnyShares, random: SeededRandomness
) -> list[Parts]:
    """Forward as ever; backward, the `I` operands' gradient from gathered factors, whole on every device."""
    plain = replace(rule, how="plain")
    held = [
        [part.detach() for part in parts] if need == I else parts
        for need, parts in zip(rule.needs, operands, strict=True)
    ]
    results = _run(call, plain, held, shares, random)
    flat = [part for parts in (*results, *operands) for part in parts]
    attached = _GatheredFactors.apply(call, rule, shares, random, len(results), *flat)  # type: ignore[no-untyped-call]
    devices = len(shares)
    return [list(attached[k * devices : (k + 1) * devices]) for k in range(len(results))]


class _GatheredFactors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        rule: Rule,
        shares: AnyShares,
        random: SeededRandomness,
        results: int,
        *flat: Tensor,
    ) -> Any:
        ctx.about = (call, rule, shares, random, results)
        ctx.save_for_backward(*flat[results * len(shares) :])
        return tuple(part.clone() for part in flat[: results * len(shares)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call, rule, shares, random, _results = ctx.about
        devices = len(shares)
        saved = [ctx.saved_tensors[k * devices : (k + 1) * devices] for k in range(len(rule.needs))]
        whole = [
            (join_pieces(parts, need) if need.is_shard else parts[0]).detach()
            for need, parts in zip(rule.needs, saved, strict=True)
        ]
        dy = [join_pieces(gradients[k * devices : (k + 1) * devices], give) for k, give in enumerate(rule.gives)]
        wanted = [k for k, need in enumerate(rule.needs) if need == I and call.operands[k].grad]
        for k in wanted:
            whole[k].requires_grad_()
        one_device = Rule((I,) * len(rule.needs), (I,) * len(rule.gives))
        with torch.enable_grad():
            made = _run(call, one_device, [[t] for t in whole], (1.0,), random)
            grads = torch.autograd.grad([parts[0] for parts in made], [whole[k] for k in wanted], dy, allow_unused=True)
        back: list[Tensor | None] = []
        for k in range(len(rule.needs)):
            gradient = grads[wanted.index(k)] if k in wanted else None
            back += [gradient] * devices
        return (None, None, None, None, None, *gradients, *back)
