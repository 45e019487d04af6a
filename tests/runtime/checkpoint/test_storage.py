"""What is stored comes back, in other pieces; what a stranger wrote is refused."""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import CheckpointError
from lopsided.runtime.checkpoint.folder import read_table
from lopsided.runtime.checkpoint.storage import Held, LoadPlanner, SafeReader, SafeWriter, SavePlanner, check_files
from lopsided.runtime.checkpoint.tensor_file import NAMES, TensorEntry, TensorFile, write_tensors
from lopsided.runtime.parameters.pieces import Chunk

Pools = Callable[[int], WorkerPool]
ROWS = torch.arange(24.0).reshape(6, 4)


def rows_of(cuts: list[tuple[int, int]], source: Tensor) -> Held:
    chunks = tuple(Chunk((start, 0), (stop - start, 4)) for start, stop in cuts)
    return Held((6, 4), torch.float32, chunks, tuple(source[start:stop] for start, stop in cuts))


def stored(folder: str) -> dict[str, str]:
    """Save rows in unequal pieces and a number, load them in others; what files there are."""
    rank = dist.get_rank()
    number = Held((), torch.int64, (Chunk((), ()),) * (rank == 1), (torch.tensor(41),) * (rank == 1))
    mine = [[(0, 2), (5, 6)], [(2, 5)], []][rank]
    held = {"rows": rows_of(mine, ROWS), "number": number}
    state_dict_saver.save(held, storage_writer=SafeWriter(Path(folder)), planner=SavePlanner())
    found, into = torch.full((6, 4), -1.0), torch.tensor(0)
    want = [[(1, 6)], [], [(0, 1), (3, 4)]][rank]
    wanted = {"rows": rows_of(want, found), "number": Held((), torch.int64, (Chunk((), ()),), (into,))}
    state_dict_loader.load(wanted, storage_reader=SafeReader(Path(folder)), planner=LoadPlanner())
    assert into == 41
    for row in range(6):
        here = any(start <= row < stop for start, stop in want)
        assert torch.equal(found[row], ROWS[row] if here else torch.full((4,), -1.0))
    return {path.name: path.suffix for path in Path(folder).iterdir()}


def test_chunks_come_back_in_other_pieces(worker_pools: Pools, tmp_path: Path) -> None:
    folder = tmp_path / "stored"
    worker_pools(3).run(stored, str(folder))
    # The third has nothing to write.
    assert {path.name for path in folder.iterdir()} == {"metadata.json", *(f"rank-0000{r}.safetensors" for r in (0, 1))}
    assert torch.equal(SafeReader(folder).whole("rows"), ROWS)
    assert list(load_file(folder / "rank-00000.safetensors")) == ["rows[0:2, 0:4]", "rows[5:6, 0:4]"]


# Files of tensors


def bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", NAMES)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    values = {"odd": torch.zeros(3, dtype=torch.bool), "x": whole, "0-dim": whole[1, 1], "none": whole[:0]}
    path = tmp_path / "x.safetensors"
    write_tensors(
        path, [TensorEntry(k, v.dtype, tuple(v.shape)) for k, v in values.items()], values.__getitem__, {"a": "b"}
    )
    with TensorFile(path) as file:
        assert file.entry("x") == TensorEntry("x", dtype, (2, 3))
        assert torch.equal(bits(file.read("x", (1, 0), (1, 2))), bits(whole[1:, :2]))
        for key, value in values.items():
            assert torch.equal(bits(file.whole(key)), bits(value))
            assert (file.whole(key).dtype, file.whole(key).shape) == (value.dtype, value.shape)
    assert load_file(path).keys() == values.keys()


def test_a_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex128"):
        write_tensors(tmp_path / "x", [TensorEntry("w", torch.complex128, (1,))], lambda _: torch.zeros(1))


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", struct.pack("<Q", 2**60) + b"{}", b"PK\x03\x04" * 9])
def test_a_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorFile(tmp_path / "x.safetensors")


# Strangers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint of one tensor in two chunks."""
    inner = tmp_path / "inner"
    inner.mkdir()
    write_tensors(
        inner / "rank-00000.safetensors",
        [TensorEntry("top", torch.float32, (4, 4)), TensorEntry("end", torch.float32, (2, 4))],
        {"top": ROWS[:4], "end": ROWS[4:]}.__getitem__,
    )
    file = "rank-00000.safetensors"
    chunks = [
        {"offsets": [0, 0], "sizes": [4, 4], "file": file, "key": "top"},
        {"offsets": [4, 0], "sizes": [2, 4], "file": file, "key": "end"},
    ]
    table = {"w": {"dtype": "F32", "shape": [6, 4], "chunks": chunks}}
    write_table(inner, {"format": "lopsided-checkpoint", "version": 1, "tensors": table})
    return inner


def write_table(folder: Path, table: object) -> None:
    (folder / "metadata.json").write_text(json.dumps(table))


def test_the_good_one(folder: Path) -> None:
    assert torch.equal(SafeReader(folder).whole("w"), ROWS)


def _set(*path: Any) -> Callable[[Any], None]:
    *inner, last, value = path

    def change(table: Any) -> None:
        for key in inner:
            table = table[key]
        table[last] = value

    return change


W = ("tensors", "w")
FIRST, SECOND = (*W, "chunks", 0), (*W, "chunks", 1)


@pytest.mark.parametrize(
    "change",
    {
        "a file outside": _set(*FIRST, "file", "../outside.safetensors"),
        "an absolute file": _set(*FIRST, "file", "/etc/passwd"),
        "a file that is not there": _set(*FIRST, "file", "rank-00007.safetensors"),
        "a file with an end of line": _set(*FIRST, "file", "rank-00000.safetensors\n"),
        "a file that is a number": _set(*FIRST, "file", 0),
        "a negative offset": _set(*SECOND, "offsets", [-4, 0]),
        "an overlap": _set(*SECOND, "offsets", [3, 0]),
        "a gap": _set(*W, "shape", [7, 4]),
        "a gap inside": _set(*SECOND, "offsets", [5, 0]),
        "one chunk only": _set(*W, "chunks", []),
        "the same chunk twice": _set(*SECOND, "key", "top"),
        "chunks that lie askew": _set(*SECOND, "offsets", [4, 1]),
        "cut along two dims": _set(*SECOND, "sizes", [2, 3]),
        "too many dims": _set(*W, "shape", [1] * 99),
        "other dims": _set(*SECOND, "sizes", [2]),
        "a huge shape": _set(*W, "shape", [2**70, 4]),
        "a huge whole": _set(*W, {"dtype": "F32", "shape": [2**49, 4], "chunks": []}),
        "a fraction": _set(*SECOND, "sizes", [2.0, 4]),
        "a truth": _set(*SECOND, "offsets", [4, False]),
        "an unknown dtype": _set(*W, "dtype", "object"),
        "a dtype that is a list": _set(*W, "dtype", ["F32"]),
        "a key that is a list": _set(*FIRST, "key", ["top"]),
        "chunks that are a text": _set(*W, "chunks", "ab"),
        "a tensor that is a list": _set(*W, [1]),
        "something more": _set(*W, "code", "print()"),
        "no tensors": _set("tensors", []),
        "another format": _set("format", "pickle"),
        "a later version": _set("version", 2),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_strangers_table_is_refused(folder: Path, change: tuple[str, Callable[[Any], None]]) -> None:
    table = json.loads((folder / "metadata.json").read_text())
    changed = copy.deepcopy(table)
    change[1](changed)
    write_table(folder, changed)
    with pytest.raises(CheckpointError, match=r"do      use a checkpoint that was saved"):
        read_table(folder)


def test_larger_than_its_file(folder: Path) -> None:
    table = json.loads((folder / "metadata.json").read_text())
    sizes = [2**40, 4]
    chunk = {"offsets": [0, 0], "sizes": sizes, "file": "rank-00000.safetensors", "key": "top"}
    table["tensors"]["w"] = {"dtype": "F32", "shape": sizes, "chunks": [chunk]}
    write_table(folder, table)
    with pytest.raises(CheckpointError, match="less than the 17,592,186,044,416"):
        read_table(folder)


@pytest.mark.parametrize(
    "change", [_set(*W, "dtype", "I32"), _set(*FIRST, "key", "other"), _set(*W, "chunks", 0, "key", "end")]
)
def test_a_file_that_holds_something_else(folder: Path, change: Callable[[Any], None]) -> None:
    table = json.loads((folder / "metadata.json").read_text())
    change(table)
    table["tensors"]["w"]["chunks"][1]["key"] = "end" if table["tensors"]["w"]["chunks"][0]["key"] != "end" else "top"
    write_table(folder, table)
    with pytest.raises(CheckpointError, match=r"in its file|there is no tensor"):
        check_files(folder, read_table(folder))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", '"\ud800"'],
    ids=lambda text: text[:9],
)
def test_text_that_is_no_table(folder: Path, text: str) -> None:
    (folder / "metadata.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError):
        read_table(folder)


def test_links_and_pipes_are_not_followed(folder: Path) -> None:
    file = folder / "rank-00000.safetensors"
    elsewhere = folder.parent / "elsewhere"
    os.rename(file, elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="not a plain one"):
        read_table(folder)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="not a plain one"):
        read_table(folder)
    table = folder / "metadata.json"
    table.unlink()
    os.mkfifo(table)
    with pytest.raises(CheckpointError, match="not a plain one"):
        read_table(folder)
