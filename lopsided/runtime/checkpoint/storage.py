"""A safe storage for `torch.distributed.checkpoint`: tensors in safetensors files, the table of them in JSON.

In: a folder, and the chunks that each process has or wants. Out: `SafeWriter`, by which every process writes one file
and the first writes `metadata.json`; `SafeReader`, which reads of these files the boxes that are asked for. Torch's own
reader unpickles its table, that is, runs what a stranger wrote into it; here a stranger's table can only be refused:
`read_table` checks that every name is that of a plain file in the folder, that the chunks of a tensor lie side by side
along one dim and fill it, and that the files are as large as what they are said to hold.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from lopsided.errors import CheckpointError, shown
from lopsided.runtime.checkpoint.plain import read_json, write_json
from lopsided.runtime.checkpoint.tensor_file import DTYPES, NAMES, TensorEntry, TensorFile, check_dtype, write_tensors
from lopsided.runtime.pieces import Chunk

FORMAT = "lopsided-checkpoint"
VERSION = 1
TABLE = "metadata.json"

_FILE = re.compile(r"rank-\d{5,7}\.safetensors")
_MOST_TABLE_BYTES = 512 * 2**20
_MOST_DIMS = 64
_MOST_ELEMENTS = 2**50


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk of a tensor, and where it is."""

    chunk: Chunk
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Stored, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Table = Mapping[str, Record]


# Writing


class SafeWriter(StorageWriter):
    """Writes into a folder, which the coordinator makes and which must not exist."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

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

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # The coordinator made the folder before it sent the plans.
        if not self.folder.is_dir():
            raise CheckpointError(
                "the folder that rank 0 made is not there on this machine",
                where=str(self.folder),
                do="save to a file system that all machines share",
            )
        items = {_key(item): item for item in plan.items}
        entries = [_entry(key, item) for key, item in items.items()]
        if len(items) < len(plan.items):
            raise CheckpointError("two chunks have the same name", where=str(self.folder), do="save each chunk once")
        if items:
            write_tensors(self.folder / plan.storage_data, entries, lambda key: _resolved(planner, items[key]))
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(items[entry.key].index, entry.bytes, (plan.storage_data, entry.key)) for entry in entries]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """By the coordinator, when everybody has written: the table, and all of it safe on disk."""
        places = {result.index: result.storage_data for written in results for result in written}
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                continue  # refused when it was to be written
            chunks = []
            for chunk in stored.chunks:
                file, key = places[MetadataIndex(name, chunk.offsets)]
                chunks.append({"offsets": [*chunk.offsets], "sizes": [*chunk.sizes], "file": file, "key": key})
            dtype = NAMES[stored.properties.dtype]
            tensors[name] = {"dtype": dtype, "shape": [*stored.size], "chunks": chunks}
        write_json(self.folder / TABLE, {"format": FORMAT, "version": VERSION, "tensors": tensors})
        sync_folder(self.folder)


def _key(item: WriteItem) -> str:
    """What a chunk is called in its file: the tensor's name, with the box where it is not the whole tensor."""
    if item.tensor_data is None:
        raise CheckpointError(
            f"{item.index.fqn} is not a tensor", where="save", do="keep it out of what is saved: only tensors are"
        )
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    spans = (f"{at}:{at + size}" for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{item.index.fqn}[{', '.join(spans)}]"


def _entry(key: str, item: WriteItem) -> TensorEntry:
    dtype = item.tensor_data.properties.dtype  # type: ignore[union-attr]
    check_dtype(dtype, item.index.fqn)
    return TensorEntry(key, dtype, tuple(item.tensor_data.chunk.sizes))  # type: ignore[union-attr]


def _resolved(planner: SavePlanner, item: WriteItem) -> Tensor:
    value = planner.resolve_data(item)
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{item.index.fqn} is not a tensor", where="save", do="save tensors only")
    return value


def sync_folder(folder: Path) -> None:
    """What was made, renamed or removed in the folder stays so, even if the machine stops."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading


class SafeReader(StorageReader):
    """Reads from a folder that a `SafeWriter` wrote, or that says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @cached_property
    def table(self) -> Table:
        return read_table(self.folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
            vars(self).pop("table", None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=record.dtype),
                    torch.Size(record.shape),
                    [
                        ChunkStorageMetadata(torch.Size(each.chunk.offsets), torch.Size(each.chunk.sizes))
                        for each in record.chunks
                    ],
                )
                for name, record in self.table.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Before anybody reads: are the files what the table says?"""
        names = {item.storage_index.fqn for item in plan.items}
        check_files(self.folder, {name: self.table[name] for name in names})
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ExitStack() as stack:
            files: dict[str, TensorFile] = {}
            for item in plan.items:
                record = self.table[item.storage_index.fqn]
                at = tuple(item.storage_index.offset or ())
                stored = next(each for each in record.chunks if each.chunk.offsets == at)
                if stored.file not in files:
                    files[stored.file] = stack.enter_context(TensorFile(self.folder / stored.file))
                value = files[stored.file].read(stored.key, item.storage_offsets, item.lengths)
                into = planner.resolve_tensor(item).detach()
                into.copy_(value)
                planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def whole(self, name: str) -> Tensor:
        """A whole tensor, in main memory."""
        record = self.table[name]
        check_files(self.folder, {name: record})
        whole = torch.empty(record.shape, dtype=record.dtype)
        for each in record.chunks:
            into = whole
            for dim, (at, size) in enumerate(zip(each.chunk.offsets, each.chunk.sizes, strict=True)):
                into = into.narrow(dim, at, size)
            with TensorFile(self.folder / each.file) as file:
                into.copy_(file.read(each.key, (0,) * len(record.shape), each.chunk.sizes))
        return whole


def check_files(folder: Path, table: Table) -> None:
    """Every chunk is in its file, with the dtype and the sizes that the table says."""
    with ExitStack() as stack:
        files: dict[str, TensorFile] = {}
        for name, record in table.items():
            for each in record.chunks:
                if each.file not in files:
                    files[each.file] = stack.enter_context(TensorFile(folder / each.file))
                entry = files[each.file].entry(each.key)
                if (entry.dtype, entry.shape) != (record.dtype, each.chunk.sizes):
                    raise _refuse(
                        folder / each.file,
                        f"{shown(name)} is {list(entry.shape)} of {entry.dtype} in its file, and in the table"
                        f" {list(each.chunk.sizes)} of {record.dtype}",
                    )


def read_table(folder: Path) -> Table:
    """The tensors of a checkpoint, or a refusal that says what is wrong with the table."""
    path = folder / TABLE
    told = read_json(path, _MOST_TABLE_BYTES)
    if told.get("format") != FORMAT:
        raise _refuse(path, f"the format is {shown(told.get('format'))}, not {FORMAT}")
    if told.get("version") != VERSION:
        raise _refuse(path, f"this is version {shown(told.get('version'))} of the format; {VERSION} is known here")
    tensors = told.get("tensors")
    if not isinstance(tensors, dict):
        raise _refuse(path, '"tensors" is missing')
    table = {name: _record(path, name, each) for name, each in tensors.items()}
    _check_sizes(folder, table.values())
    return table


def _refuse(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), do="use a checkpoint that was saved by this library and not changed")


def _record(path: Path, name: str, told: object) -> Record:
    where = f"tensor {shown(name)}"
    if not isinstance(told, dict) or told.keys() != {"dtype", "shape", "chunks"}:
        raise _refuse(path, f'{where} does not have just "dtype", "shape" and "chunks"')
    dtype = DTYPES.get(told["dtype"]) if isinstance(told["dtype"], str) else None
    if dtype is None:
        raise _refuse(path, f"{where} has dtype {shown(told['dtype'])}")
    shape = _numbers(path, where, told["shape"])
    # Dims of 0 count as 1: a tensor without elements must not have others beyond measure.
    if math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
        raise _refuse(path, f"{where} has shape {shown(list(shape))}, which is too large to be true")
    if not isinstance(told["chunks"], list):
        raise _refuse(path, f'"chunks" of {where} is no list')
    chunks = tuple(_stored(path, where, each, len(shape)) for each in told["chunks"])
    _check_filled(path, where, shape, [each.chunk for each in chunks])
    return Record(shape, dtype, chunks)


def _stored(path: Path, where: str, told: object, dims: int) -> Stored:
    if not isinstance(told, dict) or told.keys() != {"offsets", "sizes", "file", "key"}:
        raise _refuse(path, f'a chunk of {where} does not have just "offsets", "sizes", "file" and "key"')
    offsets, sizes = _numbers(path, where, told["offsets"]), _numbers(path, where, told["sizes"])
    if len(offsets) != dims or len(sizes) != dims:
        raise _refuse(path, f"a chunk of {where} has not its {dims} dims")
    file, key = told["file"], told["key"]
    if not isinstance(file, str) or not _FILE.fullmatch(file) or not isinstance(key, str):
        raise _refuse(path, f"a chunk of {where} is said to be in {shown(file)}")
    return Stored(Chunk(offsets, sizes), file, key)


def _numbers(path: Path, where: str, told: object) -> tuple[int, ...]:
    # A bool is an int to Python.
    if not isinstance(told, list) or len(told) > _MOST_DIMS or any(type(each) is not int for each in told):
        raise _refuse(path, f"{where} has {shown(told)} where whole numbers are expected")
    if any(not 0 <= each <= _MOST_ELEMENTS for each in told):
        raise _refuse(path, f"{where} has {shown(told)}, beyond what can be")
    return tuple(told)


def _check_filled(path: Path, where: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """The chunks lie side by side along one dim, and fill it. (Parameters are cut along one dim only.)"""
    cut = {dim for chunk in chunks for dim in range(len(shape)) if chunk.sizes[dim] != shape[dim]}
    end = 0
    if len(cut) == 1:
        dim = cut.pop()
        for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
            others = (at for d, at in enumerate(chunk.offsets) if d != dim)
            if chunk.offsets[dim] != end or not chunk.sizes[dim] or any(others):
                raise _refuse(path, f"the chunks of {where} overlap or leave gaps at {chunk.offsets}")
            end += chunk.sizes[dim]
        if end == shape[dim]:
            return
    elif not cut and len(chunks) == 1 and not any(chunks[0].offsets):
        return
    raise _refuse(path, f"the chunks of {where} do not fill its shape {list(shape)}")


def _check_sizes(folder: Path, records: Iterable[Record]) -> None:
    """What is said to be in a file is no more than the file holds, and nothing is there twice."""
    claimed: dict[str, int] = {}
    seen: set[tuple[str, str]] = set()
    for record in records:
        for each in record.chunks:
            if (each.file, each.key) in seen:
                raise _refuse(folder / each.file, f"{shown(each.key)} is the place of two chunks")
            seen.add((each.file, each.key))
            size = math.prod(each.chunk.sizes) * record.dtype.itemsize
            claimed[each.file] = claimed.get(each.file, 0) + size
    for file, size in claimed.items():
        path = folder / file
        # A link may lead anywhere.
        if path.is_symlink() or not path.is_file():
            raise _refuse(path, "this file is missing, or not a plain one")
        if path.stat().st_size < size:
            raise _refuse(path, f"the file has {path.stat().st_size:,} bytes, less than the {size:,} it should hold")
