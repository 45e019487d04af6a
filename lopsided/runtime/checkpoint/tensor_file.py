"""Files of tensors in the safetensors format, written and read a tensor at a time.

In: which tensors there are, and a function that gives each when it is its turn. Out: a file that any reader of the
format opens; `TensorFile`, which reads boxes of its tensors. Nothing in such a file can be code.

The library's own `save_file` wants all tensors in main memory at once, which is why the header is written here: its
length (8 bytes), JSON with dtype, shape and place of each tensor, then their bytes without a gap.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lopsided.errors import CheckpointError, shown

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}

_MOST_HEADER_BYTES = 100_000_000
"""Of the format: readers refuse more."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check_dtype(dtype: torch.dtype, where: str) -> None:
    if dtype not in NAMES:
        raise CheckpointError(
            f"a tensor of {dtype} cannot be saved", where=where, do=f"use one of {', '.join(map(str, NAMES))}"
        )


def write_tensors(
    path: Path, entries: Iterable[TensorEntry], tensor: Callable[[str], Tensor], notes: Mapping[str, str] | None = None
) -> str:
    """Write a file. `tensor` is asked for one key after another; the file is safe on disk when this returns.

    Returns the digest of what was meant to be written, whatever the disk makes of it (`digest_of_file`).
    """
    # Wide elements first, as the format's own writer does: then each tensor begins at a multiple of its element's size.
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.key))
    header: dict[str, object] = {"__metadata__": dict(notes)} if notes else {}
    at = 0
    for entry in ordered:
        check_dtype(entry.dtype, entry.key)
        header[entry.key] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.bytes],
        }
        at += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER_BYTES:
        raise CheckpointError(
            f"{len(ordered):,} tensors are too many for one file", where=str(path), do="save from more processes"
        )
    digest = hashlib.sha256()
    try:
        with path.open("wb") as file:
            for part in (struct.pack("<Q", len(text)), text):
                file.write(part)
                digest.update(part)
            for entry in ordered:
                value = tensor(entry.key).detach()
                if (value.dtype, tuple(value.shape)) != (entry.dtype, entry.shape):
                    raise CheckpointError(
                        f"{entry.key} is not what it was when the save began",
                        where=str(path),
                        do="do not change shapes or dtypes while a save is under way",
                    )
                data = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                file.write(data)
                digest.update(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"the file cannot be written: {error.strerror or error}", where=str(path), do="see that the disk has room"
        ) from None
    return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """SHA-256 of what is on disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def box_of(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A view of the box that begins at `offsets`."""
    for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


class TensorFile:
    """A file to read from. Only what is asked for is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A pipe would wait for ever.
        if not path.is_file():
            raise self._refuse("there is no such file, or it is not a plain one")
        try:
            opened: Any = safe_open  # its methods are not annotated
            self._file = opened(path, framework="pt", device="cpu")
            self._keys = frozenset(self._file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise self._refuse(f"the file cannot be read: {error}") from None

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def _refuse(self, what: str) -> CheckpointError:
        return CheckpointError(what, where=str(self.path), do="give a whole file in the safetensors format")

    @property
    def keys(self) -> frozenset[str]:
        return self._keys

    def entry(self, key: str) -> TensorEntry:
        if key not in self._keys:
            raise self._refuse(f"there is no tensor {shown(key)}")
        found = self._file.get_slice(key)
        dtype = DTYPES.get(found.get_dtype())
        if dtype is None:
            raise self._refuse(f"{shown(key)} has dtype {found.get_dtype()}, which is not read here")
        return TensorEntry(key, dtype, tuple(found.get_shape()))

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The box of a tensor that begins at `offsets`."""
        entry = self.entry(key)
        try:
            if not math.prod(sizes):
                return torch.empty(tuple(sizes), dtype=entry.dtype)
            if not entry.shape or tuple(sizes) == entry.shape:
                found: Tensor = self._file.get_tensor(key)
            else:
                found = self._file.get_slice(key)[
                    tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
                ]
        except (SafetensorError, OSError, ValueError, IndexError) as error:
            raise self._refuse(f"{shown(key)} cannot be read: {error}") from None
        return found.reshape(tuple(sizes))

    def whole(self, key: str) -> Tensor:
        shape = self.entry(key).shape
        return self.read(key, (0,) * len(shape), shape)
