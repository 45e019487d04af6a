"""N imaginary devices in one process: a value is a list with what each device holds.

In: lists of tensors, placements, shares. Out: lists of tensors, differentiable. `convert` changes a placement,
`run_rule` runs one op by one rule. The simulator, the validator and the experiments are made of these two.

A conversion and its transpose are one table. Going backward, the cotangent of `I` is placed `I`, of `R` it is `P`, of
`P` it is `R`, of `S` it is `S`; so the transpose of `a → b` is the conversion `cotangent(b) → cotangent(a)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lopsided.errors import RuleError
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import surroundings
from lopsided.ir.placement import AnyShares, I, P, Placement, R, join_pieces, pieces_of, place_in_zeros, take_piece
from lopsided.ops.local_kernel import ByFactors, LocalKernel
from lopsided.ops.op import Ask, Call, Local, Talking

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

    @property
    def by_position(self) -> bool:
        return True

    @contextmanager
    def drawing(self, node: str, rank: int | None) -> Iterator[None]:
        seed, device = self._of_node(node, rank or 0), torch.get_default_device()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # Not by `torch.manual_seed`, which takes a millisecond where a GPU might yet be used.
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                torch.cuda.manual_seed(seed)
            yield

    def _of_node(self, name: str, device: int = 0) -> int:
        digest = hashlib.sha256(f"{self.seed} {name} {device}".encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def uniform(self, local: Local, shape: Sequence[int], placement: Placement, *, normal: bool = False) -> Tensor:
        # Drawn on the CPU, so that a GPU sees what a CPU saw.
        generator = torch.Generator("cpu").manual_seed(self._of_node(local.call.node.name))
        draw = torch.randn if normal else torch.rand
        whole = draw(tuple(shape), generator=generator, dtype=torch.float64, device="cpu")
        if placement.is_shard:
            whole = take_piece(whole, placement, pieces_of(placement, shape, self.shares), local.device)
        return whole.to(local.tensors[0].device if local.tensors else torch.get_default_device())


def run_rule(
    call: Call, rule: Rule, operands: Sequence[Parts], shares: AnyShares, random: SeededRandomness
) -> list[Parts]:
    """Run one op by one rule on every device; `operands` are placed as the rule needs, the results as it gives."""
    held = list(zip(*operands, strict=True)) if operands else [()] * len(shares)
    where = held[0][0].device if operands else torch.get_default_device()
    by_factors = ByFactors(call, rule, range(len(rule.needs)), random, where) if rule.how == "sfb" else None
    if by_factors is not None:
        held, rule = [tuple(by_factors.held(tensors)) for tensors in held], by_factors.plain
    kernels = [LocalKernel(call, rule, shares, d, random, where) for d in range(len(shares))]
    with surroundings(call.node.context):
        if kernels[0].talks:
            made = _in_step([kernel.talk(tensors) for kernel, tensors in zip(kernels, held, strict=True)], shares)
        else:
            made = [kernel.run(tensors) for kernel, tensors in zip(kernels, held, strict=True)]
    for kernel, out in zip(kernels, made, strict=True):
        _check_shapes(kernel, out)
    results = [[out[k] for out in made] for k in range(len(call.node.results))]
    return results if by_factors is None else _attached(by_factors, results, operands, shares)


def _check_shapes(kernel: LocalKernel, out: Sequence[Tensor]) -> None:
    made = tuple(tuple(t.shape) for t in out)
    if made != kernel.shapes:
        raise RuleError(
            f"{kernel.call.node.op} by {kernel.rule} gives {list(made)} on device {kernel.rank}, "
            f"not {list(kernel.shapes)}",
            where=str(kernel.call.node.source),
            do="correct its line or its local implementation in lopsided/ops",
        )


def _in_step(talking: Sequence[Talking], shares: AnyShares) -> list[Any]:
    """Drive one generator per device: all ask the same question, all get their part of the answer."""
    results: list[Any] = [None] * len(talking)
    answers: Sequence[Any] = [None] * len(talking)
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
    parts, first = [ask.tensor for ask in asks], asks[0]
    if first.largest:
        peak = torch.stack(parts).amax(0)
        return [peak for _ in parts]
    shape = tuple(first.tensor.shape) if first.shape is None else first.shape
    return convert(parts, first.source, first.to, shape, shares)


def _attached(by_factors: ByFactors, results: list[Parts], operands: Sequence[Parts], shares: AnyShares) -> list[Parts]:
    """The results, with the gradient of the `I` operands from gathered factors."""
    flat = [part for parts in (*results, *operands) for part in parts]
    attached = _GatheredFactors.apply(by_factors, shares, len(results), *flat)  # type: ignore[no-untyped-call]
    devices = len(shares)
    return [list(attached[k * devices : (k + 1) * devices]) for k in range(len(results))]


class _GatheredFactors(torch.autograd.Function):
    """The results as they are; going backward, all devices' factors are gathered in step."""

    @staticmethod
    def forward(ctx: Any, by_factors: ByFactors, shares: AnyShares, results: int, *flat: Tensor) -> Any:
        ctx.about = (by_factors, shares)
        ctx.save_for_backward(*flat[results * len(shares) :])
        return tuple(part.clone() for part in flat[: results * len(shares)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        by_factors, shares = ctx.about
        devices = len(shares)
        saved = [tensor.detach() for tensor in ctx.saved_tensors]
        talking = [
            by_factors.gradients({k: saved[k * devices + d] for k in by_factors.beside}, gradients[d::devices])
            for d in range(devices)
        ]
        found = _in_step(talking, shares)
        back = [of_device[k] for k in range(len(by_factors.call.operands)) for of_device in found]
        return (None, None, None, *gradients, *back)
