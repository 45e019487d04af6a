"""How one process holds a parameter: whole, or a piece that is one or more boxes of the whole.

In: a parameter's shape, its placement, everybody's counts. Out: `Piece`, which cuts, joins and says where its elements
lie in the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lopsided.ir.graph import Leaf
from lopsided.ir.placement import Placement, Shares, join_pieces, pieces_of, start_of, take_piece


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a whole tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter on one process. `rank` counts in the group of devices that take part; a bystander has -1.

    >>> from lopsided.ir.placement import S
    >>> piece = Piece("w", (), (12, 2), torch.float32, S(0, outer=3), counts=(3, 1), rank=1)
    >>> piece.local_shape, piece.chunks()[1]
    ((3, 2), Chunk(offsets=(7, 0), sizes=(1, 2)))
    """

    name: str
    also: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    counts: tuple[int, ...] = ()  # units that each device holds; empty where all hold the whole
    rank: int = 0
    trained: bool = True
    local_shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        local = (0,) if self.rank < 0 else self.placement.local_shape(self.shape, self.counts, self.rank)
        object.__setattr__(self, "local_shape", local)

    @property
    def is_cut(self) -> bool:
        return self.placement.is_shard

    def take(self, whole: Tensor) -> Tensor:
        """This process's piece of the whole tensor; a view where that is possible."""
        if self.rank < 0:
            return whole.new_empty(0)
        return take_piece(whole, self.placement, self.counts, self.rank) if self.is_cut else whole

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from what each device holds."""
        return join_pieces(parts, self.placement) if self.is_cut else parts[0]

    def chunks(self, rank: int | None = None) -> tuple[Chunk, ...]:
        """The boxes of the whole tensor that a device (this one unless told) holds."""
        rank = self.rank if rank is None else rank
        if rank < 0:
            return ()
        if not self.is_cut:
            return (Chunk((0,) * len(self.shape), self.shape),)
        if not self.counts[rank]:
            return ()
        at, dim = self.placement, self.placement.dim
        start, size = start_of(self.counts, rank) * at.unit, self.counts[rank] * at.unit
        block = self.shape[dim] // at.outer
        found = []
        for outer in range(at.outer):
            offsets, sizes = [0] * len(self.shape), list(self.shape)
            offsets[dim], sizes[dim] = outer * block + start, size
            found.append(Chunk(tuple(offsets), tuple(sizes)))
        return tuple(found)

    def boxes(self, local: Tensor) -> tuple[Tensor, ...]:
        """Views of the local tensor, one for each of `chunks()`."""
        count = len(self.chunks())
        if count <= 1:
            return (local,) * count
        size = local.shape[self.placement.dim] // count
        return tuple(local.narrow(self.placement.dim, k * size, size) for k in range(count))


def piece_of(leaf: Leaf, placement: Placement, shares: Shares, rank: int) -> Piece:
    """How `rank` of the group holds a parameter; `shares` are in the group's order."""
    value = leaf.value
    counts = pieces_of(placement, value.shape, shares) if placement.is_shard else ()
    return Piece(leaf.target, leaf.also, value.shape, value.torch_dtype, placement, counts, rank, value.grad)
