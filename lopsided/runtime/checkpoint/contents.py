"""What a checkpoint holds: which tensors, how each is cut, and who writes what all have.

In: tensors and how this process holds them. Out: `Held` tensors by key, in the form in which
`torch.distributed.checkpoint` asks for unequal chunks. To save, they are what this process writes (`spread`); to load,
they are where it wants what it needs (`model_wanted`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lopsided.errors import CheckpointError, shown
from lopsided.runtime.checkpoint.state import Named, few
from lopsided.runtime.checkpoint.storage import Record, Table
from lopsided.runtime.pieces import Chunk, Piece


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a checkpoint and the boxes of it that this process has or wants."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = ()
    boxes: tuple[Tensor, ...] = ()

    def copied(self) -> Held:
        """The same in main memory, for good."""
        return replace(self, boxes=tuple(box.detach().to("cpu", copy=True) for box in self.boxes))

    # The protocol of `torch.distributed.checkpoint`

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(stored, TensorProperties(dtype=self.dtype), self.size()),
            )
            for chunk, stored in zip(self.chunks, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        at = tuple(index.offset or ())
        return next(box for chunk, box in zip(self.chunks, self.boxes, strict=True) if chunk.offsets == at)


class SavePlanner(DefaultSavePlanner):
    """Finds boxes of `Held`; the default one looks for tensors only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        held: Held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default one first puts None in the place of everything that is neither tensor nor list.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        held: Held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index)


def whole_chunk(shape: Sequence[int]) -> Chunk:
    return Chunk((0,) * len(shape), tuple(shape))


# Who writes what


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor to be saved. `local` is what this process has of it, if anything."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    local: Tensor | None
    piece: Piece | None  # how it is cut; None: who takes part has the whole
    by_first: bool = False  # not all need have the same: the first one's counts

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def model_kept(named: Iterable[Named]) -> dict[str, Kept]:
    found = {}
    for each in named:
        cut = each.piece is not None and each.piece.is_cut and math.prod(each.shape) > 0
        found[f"model.{each.name}"] = Kept(
            each.shape, each.local.dtype, each.local, each.piece if cut else None, by_first=each.piece is None
        )
    return found


def spread(kept: Mapping[str, Kept], place: int, places: int) -> dict[str, Held]:
    """What the process at `place` writes. All know who holds how much, so all come to the same answer."""
    if place < 0:
        return {}
    found, load = {}, [0] * places
    for key, each in kept.items():
        if each.piece is not None:
            for rank in range(places):
                load[rank] += sum(math.prod(c.sizes) for c in each.piece.chunks(rank)) * each.dtype.itemsize
            boxes = each.piece.boxes(each.local) if each.local is not None else ()
            found[key] = Held(each.shape, each.dtype, each.piece.chunks() if boxes else (), boxes)
        elif each.by_first:
            load[0] += each.bytes
            found[key] = _whole(each, place == 0)
    # What all have: the largest first, each to who has least to write.
    alike = [key for key in kept if key not in found]
    for key in sorted(alike, key=lambda key: (-kept[key].bytes, key)):
        writer = min(range(places), key=lambda rank: (load[rank], rank))
        load[writer] += kept[key].bytes
        found[key] = _whole(kept[key], writer == place)
    return found


def _whole(kept: Kept, mine: bool) -> Held:
    if not mine or kept.local is None:
        return Held(kept.shape, kept.dtype)
    return Held(kept.shape, kept.dtype, (whole_chunk(kept.shape),), (kept.local,))


# Who reads what


def model_wanted(named: Iterable[Named], table: Table, where: str) -> dict[str, Held]:
    """Where the model's tensors go, if the checkpoint is of such a model."""
    wanted, missing, shapes = {}, [], []
    for each in named:
        key = f"model.{each.name}"
        record = table.get(key)
        if record is None:
            missing.append(each.name)
        elif record.shape != each.shape:
            shapes.append(f"{each.name} is {list(record.shape)}, not {list(each.shape)}")
        else:
            wanted[key] = wanted_pieces(record, each.piece, each.local)
    strangers = [shown(key.removeprefix("model.")) for key in table if key.startswith("model.") and key not in wanted]
    wrong = {"missing": missing, "unexpected": strangers if not shapes else [], "shapes": shapes}
    if any(wrong.values()):
        raise CheckpointError(
            "the checkpoint is of another model",
            where=where,
            do="build the model as it was when the checkpoint was saved",
            **{kind: few(found) for kind, found in wrong.items() if found},
        )
    return wanted


def wanted_pieces(record: Record, piece: Piece | None, local: Tensor) -> Held:
    """Where a process wants its piece of a tensor, or the whole where it is not cut."""
    if not math.prod(record.shape):
        return Held(record.shape, record.dtype)
    if piece is None:
        return Held(record.shape, record.dtype, (whole_chunk(record.shape),), (local,))
    return Held(record.shape, record.dtype, piece.chunks(), piece.boxes(local))
