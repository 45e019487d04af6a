"""A wire to others who are not there: every collective is over at once, and nobody's pieces are zeros.

In: a rank and how many there are. Out: `LoneCommunicator`, which answers as `Communicator` does. A program runs on it
as it runs on this device, with all the work around its collectives, and without the others: to see what that takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from lopsided.comm.communicator import Communicator, Handle, What
from lopsided.comm.recorder import Recorder


class LoneCommunicator:
    """Stands in for a `Communicator`; sums are what was given."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self.rank, self.size = rank, size
        self.recorder: Recorder | None = None

    def all_reduce(self, flat: Tensor, *, what: What = "", way: str = "") -> Handle:
        return self._over(flat, what)

    def maximum(self, flat: Tensor, *, what: What = "") -> Handle:
        return self._over(flat, what)

    def all_gather(
        self, piece: Tensor, counts: Sequence[int], *, what: What = "", way: str = "", out: Tensor | None = None
    ) -> Handle:
        if out is None and self.size == 1:
            return self._over(piece, what)
        whole = piece.new_zeros(sum(counts)) if out is None else out
        before = sum(counts[: self.rank])
        whole[before : before + counts[self.rank]] = piece.detach()
        return self._over(whole, what)

    def reduce_scatter(self, whole: Tensor, counts: Sequence[int], *, what: What = "", way: str = "") -> Handle:
        if self.size == 1:
            return self._over(whole, what)
        before = sum(counts[: self.rank])
        return self._over(whole.detach()[before : before + counts[self.rank]].clone(), what)

    def all_to_all(
        self,
        send: Tensor,
        give: Sequence[int],
        take: Sequence[int],
        *,
        what: What = "",
        whole_bytes: int = 0,
        largest: float = 1.0,
    ) -> Handle:
        return self._over(send if self.size == 1 else send.new_zeros(sum(take)), what)

    def _over(self, result: Tensor, what: What) -> Handle:
        return Handle(cast(Communicator, self), what, result)
