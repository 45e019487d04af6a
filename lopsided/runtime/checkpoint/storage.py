"""What `torch.distributed.checkpoint` asks for: tensors in unequal chunks, and a safe storage for them.

In: a folder, and the boxes of tensors that each process has or wants (`Held`). Out: `SafeWriter`, by which every
process writes one safetensors file and the first writes `metadata.json`; `SafeReader`, which reads of these files the
boxes that are asked for. Torch's own reader unpickles its table, that is, runs what a stranger wrote into it; here a
stranger's table can only be refused (`folder.read_table`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import planner as torch_planner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from lopsided.comm.world import working
from lopsided.errors import CheckpointError, shown
from lopsided.runtime.checkpoint.folder import (
    TABLE,
    Record,
    Stored,
    Table,
    TableFile,
    read_tables,
    refuse,
    sync_folder,
    write_file,
)
from lopsided.runtime.checkpoint.tensor_file import TensorEntry, TensorFile, box_of, check_dtype, write_tensors
from lopsided.runtime.parameters.pieces import Chunk

T = TypeVar("T")


def _told(chunk: Chunk | Stored) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a checkpoint and the boxes of it that this process has or wants."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = ()
    boxes: tuple[Tensor, ...] = ()

    @classmethod
    def whole(cls, shape: Sequence[int], dtype: torch.dtype, box: Tensor) -> Held:
        """All of it, in one box."""
        return cls(tuple(shape), dtype, (Chunk((0,) * len(shape), tuple(shape)),), (box,))

    def copied(self) -> Held:
        """The same in main memory, for good."""
        return replace(self, boxes=tuple(box.detach().to("cpu", copy=True) for box in self.boxes))

    # The protocol of `torch.distributed.checkpoint`

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_told(chunk), properties, self.size()),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_told(chunk) for chunk in self.chunks]

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


class SafeWriter(StorageWriter):
    """Writes into a folder, which the coordinator makes and which must not exist."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.beside: dict[str, str] = {}  # digests of files that others have written there

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            try:
                self.folder.mkdir(parents=True)
            except OSError as error:
                raise CheckpointError(
                    f"the folder cannot be made: {error.strerror or error}",
                    where=str(self.folder),
                    do="name a folder in which you may write",
                ) from None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank-{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: torch_planner.SavePlanner) -> Future[list[WriteResult]]:
        # The coordinator made the folder before it sent the plans.
        if not self.folder.is_dir():
            raise CheckpointError(
                "the folder that rank 0 made is not there on this machine",
                where=str(self.folder),
                do="save to a file system that all machines share",
            )
        entries = [_entry(item) for item in plan.items]
        items = {entry.key: item for entry, item in zip(entries, plan.items, strict=True)}
        if len(items) < len(plan.items):
            raise CheckpointError("two chunks have the same name", where=str(self.folder), do="save each chunk once")
        digest = ""
        if items:
            # What is no tensor was refused with its entry.
            with working(f"writing its part of {self.folder.name}"):
                value_of: Any = lambda key: planner.resolve_data(items[key])  # noqa: E731
                digest = write_tensors(self.folder / plan.storage_data, entries, value_of)
        place = plan.storage_data
        return resolved(
            [WriteResult(items[entry.key].index, entry.bytes, (place, entry.key, digest)) for entry in entries]
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the table, and see all of it safe on disk; the coordinator does when everybody has written."""
        places = {result.index: result.storage_data[:2] for written in results for result in written}
        digests = {result.storage_data[0]: result.storage_data[2] for written in results for result in written}
        table = {}
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                continue  # refused when it was to be written
            chunks = tuple(
                Stored(tuple(chunk.offsets), tuple(chunk.sizes), *places[MetadataIndex(name, chunk.offsets)])
                for chunk in stored.chunks
            )
            table[name] = Record(stored.properties.dtype, tuple(stored.size), chunks)
        write_file(self.folder / TABLE, TableFile(tensors=table, files=digests | self.beside))
        sync_folder(self.folder)


def _entry(item: WriteItem) -> TensorEntry:
    told, name = item.tensor_data, item.index.fqn
    if told is None:
        raise CheckpointError(f"{name} is not a tensor", where="save", do="keep it out of what is saved")
    check_dtype(told.properties.dtype, name)
    chunk = Chunk(tuple(told.chunk.offsets), tuple(told.chunk.sizes))
    return chunk_entry(name, tuple(told.size), told.properties.dtype, chunk)


def chunk_entry(name: str, shape: tuple[int, ...], dtype: torch.dtype, chunk: Chunk) -> TensorEntry:
    """A chunk in its file: called as the tensor is, with the box where it is not the whole tensor."""
    spans = ", ".join(f"{at}:{at + size}" for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return TensorEntry(name if chunk.sizes == shape else f"{name}[{spans}]", dtype, chunk.sizes)


class SafeReader(StorageReader):
    """Reads from a folder that a `SafeWriter` wrote, or that says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @cached_property
    def tables(self) -> TableFile:
        return read_tables(self.folder)

    @property
    def table(self) -> Table:
        return self.tables.tensors

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
            vars(self).pop("tables", None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=record.dtype), torch.Size(record.shape), [_told(c) for c in record.chunks]
                )
                for name, record in self.table.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Before anybody reads: are the files what the table says?"""
        names = {item.storage_index.fqn for item in plan.items}
        with working(f"checking {self.folder.name}"):
            check_files(self.folder, {name: self.table[name] for name in names})
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: torch_planner.LoadPlanner) -> Future[None]:
        with working(f"reading {self.folder.name}"), ExitStack() as stack:
            files: dict[str, TensorFile] = {}
            for item in plan.items:
                stored = self.stored(item)
                if stored.file not in files:
                    files[stored.file] = stack.enter_context(TensorFile(self.folder / stored.file))
                value = files[stored.file].read(stored.key, item.storage_offsets, item.lengths)
                fill(planner, item, value)
        return resolved(None)

    def stored(self, item: ReadItem) -> Stored:
        """The chunk that is asked for."""
        at = tuple(item.storage_index.offset or ())
        return next(each for each in self.table[item.storage_index.fqn].chunks if each.offsets == at)

    def whole(self, name: str) -> Tensor:
        """A whole tensor, in main memory."""
        record = self.table[name]
        check_files(self.folder, {name: record})
        whole = torch.empty(record.shape, dtype=record.dtype)
        for each in record.chunks:
            with TensorFile(self.folder / each.file) as file:
                box_of(whole, each.offsets, each.sizes).copy_(file.whole(each.key))
        return whole


def fill(planner: torch_planner.LoadPlanner, item: ReadItem, value: Tensor) -> None:
    """Put what was read where it is wanted."""
    into = planner.resolve_tensor(item).detach()
    into.copy_(value)
    planner.commit_tensor(item, into)


def resolved(result: T) -> Future[T]:
    """What torch waits for, when there is nothing left to wait for."""
    made: Future[T] = Future()
    made.set_result(result)
    return made


def check_files(folder: Path, table: Table) -> None:
    """Every chunk is in its file, with the dtype and the sizes that the table says."""
    with ExitStack() as stack:
        files: dict[str, TensorFile] = {}
        for name, record in table.items():
            for each in record.chunks:
                if each.file not in files:
                    files[each.file] = stack.enter_context(TensorFile(folder / each.file))
                entry = files[each.file].entry(each.key)
                if (entry.dtype, entry.shape) != (record.dtype, each.sizes):
                    raise refuse(
                        f"{shown(name)} is {list(entry.shape)} of {entry.dtype} in its file, and in the table"
                        f" {list(each.sizes)} of {record.dtype}",
                        folder / each.file,
                    )
