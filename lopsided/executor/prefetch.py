"""Parameters stored cut, gathered ahead of their use: two buckets at once, as the plan's timeline has it.

In: which copies a pass will need, in order. Out: `Gatherer`, which starts the next bucket when the first copy of the
one before it is taken. A copy lives as long as somebody holds it.

Where the plan gathers again for the backward pass, `Regathered` keeps autograd from holding the copies: what an op
saves of one is replaced by a note, and when going backward reaches the op the copy is gathered anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lopsided.comm.redistribute import Gathering, Layout, Redistributor
from lopsided.schedule.layout import BUCKET_BYTES, GATHERS_AT_ONCE

Copy = int  # the slot a gathered copy goes to: its name within a program


@dataclass(frozen=True, slots=True)
class GatheredCopy:
    """A copy to gather: where it goes, where the stored piece is, how it is cut, and its dtype."""

    copy: Copy
    stored: int  # slot of the stored piece
    layout: Layout
    dtype: torch.dtype
    name: str

    @property
    def whole_bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.layout.shape:
            size *= length
        return size


def in_buckets(
    consumers: Sequence[Sequence[GatheredCopy]], bucket_bytes: int = BUCKET_BYTES
) -> list[list[GatheredCopy]]:
    """What consecutive consumers want, put together up to a bucket's size; what one consumer wants is never parted."""
    found: list[list[GatheredCopy]] = []
    size = 0
    for wanted in consumers:
        more = sum(one.whole_bytes for one in wanted)
        if not wanted:
            continue
        if not found or size + more > bucket_bytes:
            found.append([])
            size = 0
        found[-1] += wanted
        size += more
    return found


class Gatherer:
    """The gathers of one pass. `piece` gives the stored piece in a slot."""

    def __init__(
        self, exchange: Redistributor, buckets: Sequence[Sequence[GatheredCopy]], piece: Callable[[int], Tensor]
    ) -> None:
        self.exchange, self.buckets, self.piece = exchange, buckets, piece
        self._number = {wanted.copy: k for k, bucket in enumerate(buckets) for wanted in bucket}
        self._started: list[list[tuple[Sequence[GatheredCopy], Gathering]]] = []
        self._there: dict[Copy, Tensor] = {}
        self._waited = 0

    def begin(self) -> None:
        while len(self._started) < min(GATHERS_AT_ONCE, len(self.buckets)):
            self._start()

    def arrive(self, copy: Copy) -> None:
        """Go on to the bucket of this copy: the next one is started, its own is waited for."""
        number = self._number[copy]
        while len(self._started) < min(number + GATHERS_AT_ONCE, len(self.buckets)):
            self._start()
        while self._waited <= number:
            for bucket, gathering in self._started[self._waited]:
                self._there |= zip((one.copy for one in bucket), gathering.wait(), strict=True)
            self._started[self._waited] = []
            self._waited += 1

    def take(self, copy: Copy) -> Tensor:
        """The whole copy; it is the taker's from now on."""
        self.arrive(copy)
        return self._there.pop(copy)

    def _start(self) -> None:
        bucket = self.buckets[len(self._started)]
        under_way: list[tuple[Sequence[GatheredCopy], Gathering]] = []
        for dtype in dict.fromkeys(one.dtype for one in bucket):
            same = [one for one in bucket if one.dtype == dtype]
            more = f" and {len(same) - 1} more" if len(same) > 1 else ""
            parts = [self.piece(one.stored).detach() for one in same]
            gathering = self.exchange.start_gather(parts, [one.layout for one in same], f"{same[0].name}{more}")
            under_way.append((same, gathering))
        self._started.append(under_way)


@dataclass(frozen=True, slots=True)
class _Note:
    """In place of a saved tensor: which copy it is a view of, and how."""

    copy: Copy
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Regathered:
    """The copies of one forward pass that its backward pass gathers again, bucket by bucket."""

    def __init__(
        self, exchange: Redistributor, buckets: Sequence[Sequence[GatheredCopy]], piece: Callable[[int], Tensor]
    ) -> None:
        self._make: Callable[[], Gatherer] = lambda: Gatherer(exchange, buckets, piece)
        self._gatherer: Gatherer | None = None
        self._last = buckets[-1][-1].copy if buckets else None
        self._again = {one.copy for bucket in buckets for one in bucket}
        self._storages: dict[int, Copy] = {}  # of copies in use in the forward pass, by address
        self._addresses: dict[Copy, int] = {}
        self._notes: dict[Copy, int] = {}
        self._left: dict[Copy, int] = {}
        self._there: dict[Copy, Tensor] = {}
        self._arrived: set[Copy] = set()

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
        gatherer = self._gatherer
        if gatherer is None:
            gatherer = self._gatherer = self._make()
            gatherer.begin()
        for copy in copies:
            if copy in self._arrived:  # by another result of the same op
                continue
            self._arrived.add(copy)
            whole = gatherer.take(copy)
            # A device whose piece of the op is empty took part in the gathering, and needs nothing of it.
            if self._notes.get(copy):
                self._there[copy], self._left[copy] = whole, self._notes[copy]
            if copy == self._last:
                # All are there. Should the graph be kept and run backward again, it begins anew.
                self._gatherer, self._arrived = None, set()


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
