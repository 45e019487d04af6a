"""Parameters stored cut, on their way to copies ahead of their use, in the buckets of the schedule.

In: which buckets start when (`Gathers`, read off one pass of a `Schedule`). Out: `Gatherer`, which starts them and
hands out copies. A copy lives as long as somebody holds it.

Where the schedule gathers again for the backward pass, `Regathered` keeps autograd from holding the copies: what an op
saves of one is replaced by a note, and when going backward reaches the op the copy is gathered anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lopsided.comm.communicator import Label
from lopsided.comm.redistribute import Layout, Moving, Redistributor

Copy = int  # the slot a gathered copy goes to: its name within a program


@dataclass(frozen=True, slots=True)
class GatheredCopy:
    """A copy to make: where it goes, where the stored piece is, how it is cut, and how the copy is (None: whole)."""

    copy: Copy
    stored: int  # slot of the stored piece
    source: Layout
    to: Layout | None


@dataclass(frozen=True, slots=True)
class CopyBucket:
    """Copies that one collective makes."""

    copies: tuple[GatheredCopy, ...]
    label: Label


@dataclass(frozen=True, slots=True)
class Gathers:
    """When the buckets of a pass start: the first ones with the pass, others right before some copy is taken."""

    first: tuple[CopyBucket, ...]
    due: Mapping[Copy, tuple[CopyBucket, ...]]

    @property
    def stored(self) -> frozenset[int]:
        """The slots of the pieces that are sent."""
        buckets = (*self.first, *(bucket for buckets in self.due.values() for bucket in buckets))
        return frozenset(one.stored for bucket in buckets for one in bucket.copies)


class Gatherer:
    """The gathers of one pass. `piece` gives the stored piece in a slot.

    Where several rounds use the same copies, `kept` holds them: what the first round has put there is not gathered
    again.
    """

    def __init__(
        self,
        exchange: Redistributor,
        gathers: Gathers,
        piece: Callable[[int], Tensor],
        kept: dict[Copy, Tensor] | None = None,
    ) -> None:
        self.exchange, self.gathers, self.piece, self._kept = exchange, gathers, piece, kept
        self._under_way: dict[Copy, tuple[CopyBucket, Moving]] = {}
        self._there: dict[Copy, Tensor] = {}
        for bucket in gathers.first if not kept else ():
            self._start(bucket)

    def take(self, copy: Copy) -> Tensor:
        """The copy; it is the taker's from now on. What should start before it is taken does."""
        if self._kept is None:
            return self._taken(copy)
        if copy not in self._kept:
            self._kept[copy] = self._taken(copy)
        return self._kept[copy]

    def _taken(self, copy: Copy) -> Tensor:
        for bucket in self.gathers.due.get(copy, ()):
            self._start(bucket)
        if copy not in self._there:
            bucket, moving = self._under_way[copy]
            for one, made in zip(bucket.copies, moving.wait(), strict=True):
                self._there[one.copy] = made
                del self._under_way[one.copy]
        return self._there.pop(copy)

    def _start(self, bucket: CopyBucket) -> None:
        parts = [self.piece(one.stored).detach() for one in bucket.copies]
        sources = [one.source for one in bucket.copies]
        targets = [one.to for one in bucket.copies if one.to is not None]
        moving: Moving
        if targets:
            moving = self.exchange.start_reshard(parts, sources, targets, bucket.label)
        else:
            moving = self.exchange.start_gather(parts, sources, bucket.label)
        self._under_way |= {one.copy: (bucket, moving) for one in bucket.copies}


@dataclass(frozen=True, slots=True)
class _Note:
    """Stands for a saved tensor: which copy it is a view of, and how."""

    copy: Copy
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Regathered:
    """The copies of one forward pass that its backward pass gathers again."""

    def __init__(self, again: frozenset[Copy], gatherer: Callable[[], Gatherer]) -> None:
        self._again, self._gatherer = again, gatherer
        self._storages: dict[int, Copy] = {}  # of copies in use in the forward pass, by address
        self._addresses: dict[Copy, int] = {}
        self._notes: dict[Copy, int] = {}
        self._left: dict[Copy, int] = {}
        self._there: dict[Copy, Tensor] = {}
        self._arrived: set[Copy] = set()

    def begin(self) -> None:
        """A backward pass begins. Should the graph be kept and run backward again, it begins anew."""
        self._arrived = set()

    def watch(self, copy: Copy, whole: Tensor) -> None:
        if copy in self._again:
            self._addresses[copy] = whole.untyped_storage().data_ptr()
            self._storages[self._addresses[copy]] = copy

    def unwatch(self, copy: Copy) -> None:
        """Its memory is about to be free for something else."""
        self._storages.pop(self._addresses.pop(copy, -1), None)

    def pack(self, tensor: Tensor) -> Tensor | _Note:
        copy = self._storages.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if copy is None:
            return tensor
        self._notes[copy] = self._notes.get(copy, 0) + 1
        return _Note(copy, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Tensor | _Note) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        whole = self._there[saved.copy]
        self._left[saved.copy] -= 1
        if not self._left[saved.copy]:
            del self._there[saved.copy]
        return whole.as_strided(saved.size, saved.stride, saved.offset)

    def before(self, copies: Sequence[Copy]) -> None:
        """Going backward has reached an op that saved these copies."""
        for copy in copies:
            if copy in self._arrived:  # by another result of the same op
                continue
            self._arrived.add(copy)
            whole = self._gatherer().take(copy)
            # A device whose piece of the op is empty took part in the gathering, and needs nothing of it.
            if self._notes.get(copy):
                self._there[copy], self._left[copy] = whole, self._notes[copy]


class Before(torch.autograd.Function):
    """The identity on an op's result; backward, its copies are gathered before the op's own backward pass runs."""

    @staticmethod
    def forward(ctx: Any, regathered: Regathered, copies: Sequence[Copy], result: Tensor) -> Tensor:
        ctx.about = (regathered, copies)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        regathered, copies = ctx.about
        regathered.before(copies)
        return None, None, gradient
