"""What a device does in a pass, one instruction after the other, over numbered slots.

In: tensors in slots. Out: tensors in slots. `steps` makes instructions from a program.

    Convert    a conversion of an activation, by collective
    Whole      a parameter stored whole, used with a partial gradient: nothing now, a bucket in the backward pass
    Gather     a parameter stored cut: gathered ahead, freed after use
    Compute    one op by one rule
    Region     instructions that are run again in the backward pass in place of keeping what they made

A slot holds what a device has of one value in one placement, and is emptied after its last use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lopsided.comm.recorder import Recorder
from lopsided.comm.redistribute import Redistributor, Shape
from lopsided.executor.gradients import CopyOfPieces, CopyOfWhole, Gradients, Synced
from lopsided.executor.local_op import AnyRandomness, RunOp, connected
from lopsided.executor.prefetch import Before, GatheredCopy, Gatherer, Regathered
from lopsided.executor.randomness import RankRandomness, streams_of
from lopsided.ir.graph import Context, Node
from lopsided.ir.op_call import surroundings
from lopsided.ir.placement import Placement

Slots = list[Any]  # Tensor or None


@dataclass(slots=True)
class Pass:
    """What one forward pass keeps beside its slots."""

    gatherer: Gatherer
    regathered: Regathered | None
    recorder: Recorder | None = None


@dataclass(slots=True)
class Instruction(ABC):
    """Something to do. `free` are slots that nobody needs afterwards."""

    free: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    @abstractmethod
    def reads(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def writes(self) -> tuple[int, ...]: ...

    @abstractmethod
    def run(self, slots: Slots, this: Pass) -> None: ...


@dataclass(slots=True)
class Convert(Instruction):
    exchange: Redistributor
    source: int
    to: int
    way: tuple[Placement, Placement]
    shape: Shape
    what: str

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.to,)

    def run(self, slots: Slots, this: Pass) -> None:
        slots[self.to] = self.exchange.convert(slots[self.source], *self.way, self.shape, self.what)


@dataclass(slots=True)
class UseReplicated(Instruction):
    gradients: Gradients
    synced: Synced
    source: int
    to: int

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.to,)

    def run(self, slots: Slots, this: Pass) -> None:
        stored = slots[self.source]
        if stored.requires_grad and torch.is_grad_enabled() and self.gradients.exchange.size > 1:
            slots[self.to] = CopyOfWhole.apply(self.gradients, self.synced, stored)  # type: ignore[no-untyped-call]
        else:
            slots[self.to] = stored


@dataclass(slots=True)
class Gather(Instruction):
    gradients: Gradients
    synced: Synced
    wanted: GatheredCopy
    is_sum: bool

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.wanted.stored,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.wanted.copy,)

    def run(self, slots: Slots, this: Pass) -> None:
        whole = this.gatherer.take(self.wanted.copy)
        stored = slots[self.wanted.stored]
        if stored.requires_grad and torch.is_grad_enabled():
            whole = CopyOfPieces.apply(self.gradients, self.synced, self.is_sum, stored, whole)  # type: ignore[no-untyped-call]
        if this.regathered is not None:
            this.regathered.watch(self.wanted.copy, whole)
        slots[self.wanted.copy] = whole


@dataclass(slots=True)
class RunNode(Instruction):
    node: Node
    op: RunOp
    operands: tuple[int, ...]
    results: tuple[int, ...]
    has_gradient: tuple[bool, ...]
    context: Context | None  # None: that of the whole program
    again: tuple[int, ...] = ()  # copies that are gathered again before its backward pass
    saves_copies: bool = False  # that somebody gathers again

    @property
    def reads(self) -> tuple[int, ...]:
        return self.operands

    @property
    def writes(self) -> tuple[int, ...]:
        return self.results

    def run(self, slots: Slots, this: Pass) -> None:
        operands = [slots[k] for k in self.operands]
        kept = this.regathered if self.saves_copies else None
        if kept is None and self.context is None:
            made, differentiable = self.op(operands), torch.is_grad_enabled()
        else:
            made, differentiable = self._surrounded(operands, kept)
        for slot, has_gradient, result in zip(self.results, self.has_gradient, made, strict=True):
            if has_gradient and differentiable:
                if not result.requires_grad:
                    result = connected(result, operands)
                if kept is not None and self.again and result.requires_grad:
                    result = Before.apply(kept, self.again, result)  # type: ignore[no-untyped-call]
            elif result.requires_grad:
                # Or a device with an empty piece would go another way back than the others.
                result = result.detach()
            slots[slot] = result

    def _surrounded(self, operands: list[Tensor], kept: Regathered | None) -> tuple[list[Tensor], bool]:
        """In its own context, with what it saves of gathered copies replaced by notes."""
        with ExitStack() as stack:
            if self.context is not None:
                stack.enter_context(surroundings(self.context))
            if kept is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack))
            return self.op(operands), torch.is_grad_enabled()


def run_all(instructions: Sequence[Instruction], slots: Slots, this: Pass) -> None:
    for instruction in instructions:
        if this.recorder is None:
            instruction.run(slots, this)
        else:
            _run_recorded(instruction, slots, this, this.recorder)
        for slot in instruction.free:
            if this.regathered is not None:
                this.regathered.unwatch(slot)
            slots[slot] = None


def _run_recorded(instruction: Instruction, slots: Slots, this: Pass, recorder: Recorder) -> None:
    if not isinstance(instruction, RunNode):
        instruction.run(slots, this)
        return
    recorder.mark(instruction.node.name)
    instruction.run(slots, this)
    recorder.idle()
    for slot in instruction.results[:1]:
        recorder.mark_backward(instruction.node.name, slots[slot])


# Recomputation


@dataclass(slots=True)
class Region(Instruction):
    """Instructions whose results are not kept for the backward pass but made again in it.

    Of its own making and not `torch.utils.checkpoint`: that one starts to recompute when the first saved tensor is
    asked for, which on a device with an empty piece may be later than on the others, or never.
    """

    exchange: Redistributor
    random: AnyRandomness
    context: Context
    inside: list[Instruction]
    takes: tuple[int, ...]  # slots from outside, parameters apart
    stored: tuple[int, ...]  # slots of parameters
    gives: tuple[int, ...]
    gathers: list[list[GatheredCopy]]

    @property
    def reads(self) -> tuple[int, ...]:
        return (*self.takes, *self.stored)

    @property
    def writes(self) -> tuple[int, ...]:
        return self.gives

    def run(self, slots: Slots, this: Pass) -> None:
        if not torch.is_grad_enabled():
            run_all(self.inside, slots, this)
            return
        leaves = {slot: slots[slot] for slot in self.stored}
        # A tensor with a gradient among the inputs in any case, or parameters alone would not count.
        always = torch.zeros((), requires_grad=True)
        made = _Again.apply(self, slots, this, leaves, always, *(slots[slot] for slot in self.takes))  # type: ignore[no-untyped-call]
        for slot, result in zip(self.gives, made, strict=True):
            slots[slot] = result


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: Region, slots: Slots, this: Pass, leaves: dict[int, Tensor], always: Tensor, *taken: Tensor
    ) -> Any:
        state = region.random.state() if isinstance(region.random, RankRandomness) else None
        ctx.about = (region, leaves, state, len(slots), this.recorder)
        ctx.save_for_backward(*taken)
        inner: Slots = list(slots)
        run_all(region.inside, inner, this)
        # Detached: a slot may hold a parameter itself, which must not become the result of this function.
        made = tuple(inner[slot].detach() for slot in region.gives)
        ctx.mark_non_differentiable(*(t for t in made if not t.dtype.is_floating_point and not t.is_complex()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        region, leaves, state, count, recorder = ctx.about
        slots: Slots = [None] * count
        for slot, tensor in leaves.items():
            slots[slot] = tensor
        taken = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        for slot, tensor in zip(region.takes, taken, strict=True):
            slots[slot] = tensor
        now = region.random.state() if isinstance(region.random, RankRandomness) else None
        if now is not None:
            region.random.set_state(state)
        stored = {one.stored: slots[one.stored] for bucket in region.gathers for one in bucket}
        gatherer = Gatherer(region.exchange, region.gathers, stored.__getitem__)
        with torch.enable_grad(), surroundings(region.context), streams_of(region.random):
            gatherer.begin()
            run_all(region.inside, slots, Pass(gatherer, None, recorder))
        if now is not None:
            region.random.set_state(now)
        ends = [
            (slots[slot], gradient)
            for slot, gradient in zip(region.gives, gradients, strict=True)
            if slots[slot].requires_grad
        ]
        if ends:
            torch.autograd.backward([end for end, _ in ends], [gradient for _, gradient in ends])
        return (None, None, None, None, None, *(t.grad for t in taken))
