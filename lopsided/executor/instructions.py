"""What a device does in a pass, one instruction after the other, over numbered slots.

In: tensors in slots. Out: tensors in slots. `executor` makes instructions from the items of a schedule.

    Convert    a redistribution that all devices wait for, or that is a local matter
    TakeCopy   a copy of a stored parameter: gathered ahead, or what is stored itself; its gradient goes by a bucket
    RunNode    one op by one rule
    Region     instructions that are run again in the backward pass in place of keeping what they made

A slot holds what a device has of one value in one placement, and is emptied after its last use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lopsided.comm.communicator import Label
from lopsided.comm.recorder import Recorder
from lopsided.comm.redistribute import Layout, Redistributor, Shape
from lopsided.executor.gradients import Gradients, ParameterCopy, PieceOfCopy, Synced
from lopsided.executor.local_op import AnyRandomness, RunOp, connected
from lopsided.executor.prefetch import Before, Gatherer, Gathers, Regathered
from lopsided.executor.randomness import RankRandomness, streams_of
from lopsided.ir.graph import Context, Node
from lopsided.ir.op_call import surroundings
from lopsided.ir.placement import Placement
from lopsided.ops.local_kernel import LocalKernel

Slots = list[Any]  # Tensor or None


class Pass:
    """What one forward pass keeps beside its slots: who gathers for it, and who for its backward pass."""

    def __init__(
        self,
        exchange: Redistributor,
        gathers: Gathers,
        again: Gathers,
        freed: frozenset[int],
        stored: dict[int, Tensor],
        recorder: Recorder | None,
        kept: dict[int, Tensor] | None = None,
    ) -> None:
        self.recorder, self.suffix = recorder, ""
        self.remembered: Remembered | None = None
        self._exchange, self._again, self._stored = exchange, again, stored
        self.gatherer = Gatherer(exchange, gathers, stored.__getitem__, kept)
        self._backward: Gatherer | None = None
        self.regathered = Regathered(freed, self.behind) if freed and torch.is_grad_enabled() else None

    def begin_backward(self) -> None:
        """The first buckets of the backward pass start with it."""
        self._backward = Gatherer(self._exchange, self._again, self._stored.__getitem__)
        if self.regathered is not None:
            self.regathered.begin()

    def behind(self) -> Gatherer:
        """Who gathers for the backward pass that is running."""
        if self._backward is None:
            self.begin_backward()
        return self._backward  # type: ignore[return-value]

    def again(self, remembered: Remembered) -> Pass:
        """The same for a region that runs once more, in the backward pass."""
        return self._but(gatherer=self.behind(), regathered=None, suffix=" again", remembered=remembered)

    def remembering(self, remembered: Remembered) -> Pass:
        """The same for a region that runs for the first time."""
        return self._but(regathered=None, remembered=remembered)

    def _but(self, **changed: object) -> Pass:
        other = object.__new__(Pass)
        other.__dict__ |= self.__dict__ | changed
        return other


@dataclass(slots=True)
class Remembered:
    """What the nodes of a region that do not run again made the first time, kernel by kernel, in order.

    An entry of `made` is a place in `kept`, or what describes a tensor that nobody needs (`spared`).
    """

    made: list[tuple[list[Any], Any]]
    kept: list[Tensor]

    def take(self) -> tuple[list[Any], Any]:
        return self.made.pop(0)


class BeginBackward(torch.autograd.Function):
    """The identity on the loss; going backward from it starts what the backward pass gathers first."""

    @staticmethod
    def forward(ctx: Any, this: Pass, loss: Tensor) -> Tensor:
        ctx.this = this
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.this.begin_backward()
        return None, gradient


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
    """`there` and `back` are what to call it forward and backward, `again` in a region that runs once more."""

    exchange: Redistributor
    source: int
    to: int
    way: tuple[Placement, Placement]
    shape: Shape
    there: Label
    again: Label
    back: Label

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.to,)

    def run(self, slots: Slots, this: Pass) -> None:
        there = self.again if this.suffix else self.there
        slots[self.to] = self.exchange.convert(slots[self.source], *self.way, self.shape, there, self.back)


@dataclass(slots=True)
class TakeCopy(Instruction):
    """A copy of a parameter, from the bucket that brings it, or cut from what is stored.

    Its gradient goes home by a bucket (`synced`), or is a piece of the copy's (`stored`), or is that of what is stored.
    """

    exchange: Redistributor
    gradients: Gradients
    source: int
    to: int
    way: tuple[Placement, Placement]
    shape: Shape
    gathered: bool
    synced: Synced | None
    stored: Layout | None

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.to,)

    def run(self, slots: Slots, this: Pass) -> None:
        stored = slots[self.source]
        differentiable = stored.requires_grad and torch.is_grad_enabled()
        if self.gathered:
            copy = this.gatherer.take(self.to)
        elif self.exchange.size == 1 or not (differentiable and self.synced is not None):
            slots[self.to] = self.exchange.convert(stored, *self.way, self.shape)
            return
        elif self.way[1].is_whole:
            copy = stored  # as a whole it is its own copy
        else:
            copy = self.exchange.move(stored.detach(), *self.way, self.shape)
        if differentiable and self.synced is not None:
            copy = ParameterCopy.apply(self.gradients, self.synced, stored, copy)  # type: ignore[no-untyped-call]
        elif differentiable and self.stored is not None:
            copy = PieceOfCopy.apply(self.stored, self.exchange.rank, stored, copy)  # type: ignore[no-untyped-call]
        if this.regathered is not None:
            this.regathered.watch(self.to, copy)
        slots[self.to] = copy


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
    kernel: LocalKernel | None = None  # where nothing is sent

    @property
    def reads(self) -> tuple[int, ...]:
        return self.operands

    @property
    def writes(self) -> tuple[int, ...]:
        return self.results

    @property
    def runs_once(self) -> bool:
        """Whether it has no part in its region's running again."""
        return False

    def run(self, slots: Slots, this: Pass) -> None:
        operands = [slots[k] for k in self.operands]
        kept = this.regathered if self.saves_copies else None
        if kept is None and self.context is None:
            made, differentiable = self.op(operands), torch.is_grad_enabled()
        else:
            with surrounded(self.context, kept):
                made, differentiable = self.op(operands), torch.is_grad_enabled()
        for slot, has_gradient, result in zip(self.results, self.has_gradient, made, strict=True):
            slots[slot] = as_planned(result, operands, has_gradient and differentiable, kept, self.again)


@contextmanager
def surrounded(context: Context | None, kept: Regathered | None) -> Iterator[None]:
    """In a context of its own, with what is saved of gathered copies replaced by notes."""
    with ExitStack() as stack:
        if context is not None:
            stack.enter_context(surroundings(context))
        if kept is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack))
        yield


def as_planned(
    result: Tensor, operands: list[Tensor], has_gradient: bool, kept: Regathered | None, again: tuple[int, ...]
) -> Tensor:
    """The result with a gradient if it should have one; going backward, some copies are gathered before it."""
    if has_gradient:
        if not result.requires_grad:
            result = connected(result, operands)
        if kept is not None and again and result.requires_grad:
            result = Before.apply(kept, again, result)  # type: ignore[no-untyped-call]
        return result
    # Or a device with an empty piece would go another way back than the others.
    return result.detach() if result.requires_grad else result


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
    if not (this.suffix and instruction.runs_once):
        recorder.mark(instruction.node.name, instruction.node.name + this.suffix)
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

    random: AnyRandomness
    context: Context
    inside: list[Instruction]
    takes: tuple[int, ...]  # slots from outside, parameters apart
    stored: tuple[int, ...]  # slots of parameters
    gives: tuple[int, ...]

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
        remembered = Remembered([], [])
        inner: Slots = list(slots)
        run_all(region.inside, inner, this.remembering(remembered))
        ctx.about = (region, leaves, state, len(slots), this, remembered.made, len(taken))
        ctx.save_for_backward(*taken, *remembered.kept)
        # Detached: a slot may hold a parameter itself, which must not become the result of this function.
        made = tuple(inner[slot].detach() for slot in region.gives)
        ctx.mark_non_differentiable(*(t for t in made if not t.dtype.is_floating_point and not t.is_complex()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        region, leaves, state, count, this, made, from_outside = ctx.about
        slots: Slots = [None] * count
        for slot, tensor in leaves.items():
            slots[slot] = tensor
        saved = ctx.saved_tensors
        taken = [t.detach().requires_grad_(t.requires_grad) for t in saved[:from_outside]]
        remembered = Remembered(list(made), list(saved[from_outside:]))
        for slot, tensor in zip(region.takes, taken, strict=True):
            slots[slot] = tensor
        now = region.random.state() if isinstance(region.random, RankRandomness) else None
        if now is not None:
            region.random.set_state(state)
        with torch.enable_grad(), surroundings(region.context), streams_of(region.random):
            run_all(region.inside, slots, this.again(remembered))
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
