"""The state of a parallel module as that of the model it was made of: whole tensors under the original names.

In: a parallel module, of which every process holds pieces. Out: `full_state_dict`, joined a parameter at a time;
`load_full_state_dict`, which gives every process its pieces of whole tensors and reads no more than those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lopsided.errors import CheckpointError, shown
from lopsided.runtime.checkpoint.tensor_file import TensorEntry, TensorFile
from lopsided.runtime.control_plane import Holder, accord_of
from lopsided.runtime.pieces import Chunk, Piece

Source = Mapping[str, Tensor] | str | Path | None

_FIRST_FEW = 5


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of the model's state dict, on this process: its whole shape, and what is held of it."""

    names: tuple[str, ...]  # the first is where it is stored, the others are tied to it
    shape: tuple[int, ...]
    dtype: torch.dtype
    local: Tensor
    piece: Piece | None  # a buffer has none

    @property
    def name(self) -> str:
        return self.names[0]

    def chunks(self) -> tuple[Chunk, ...]:
        return self.piece.chunks() if self.piece else (Chunk((0,) * len(self.shape), self.shape),)

    def boxes(self) -> tuple[Tensor, ...]:
        return self.piece.boxes(self.local) if self.piece else (self.local,)


def tensors_of(pm: Holder) -> list[Named]:
    """Every tensor of the model's state dict once, in its order."""
    piece_of = {name: piece for piece in pm.pieces.values() for name in (piece.name, *piece.also)}
    state = pm.state_dict()
    found: dict[str, Named] = {}
    for key, local in state.items():
        piece = piece_of.get(key)
        if piece is None:
            if not isinstance(local, Tensor):
                raise CheckpointError(
                    f"{key} of the model's state is a {type(local).__name__}, not a tensor",
                    where="state_dict",
                    do="keep it in a buffer, or outside of the model",
                )
            found[key] = Named((key,), tuple(local.shape), local.dtype, local, None)
        elif piece.name not in found:
            names = (piece.name, *(name for name in piece.also if name in state))
            found[piece.name] = Named(names, piece.shape, piece.dtype, local, piece)
    return list(found.values())


def full_state_dict(pm: Holder, *, everywhere: bool = True) -> dict[str, Tensor]:
    """What `state_dict()` of the original model would be, in main memory. Every rank must call this.

    With `everywhere=False` only rank 0 keeps the values; the others return an empty dict.
    """
    world = pm.world
    held = tensors_of(pm)
    keep = everywhere or world.rank == 0
    # Ranks whose devices the plan does not use hold nothing: the first one that does sends them what it has.
    missing = len(world.ranks) < world.size and (everywhere or 0 not in world.ranks)
    if missing:
        outlines = accord_of(pm).all(lambda: [(each.shape, each.dtype) for each in held])
        outline = outlines[world.ranks[0]]
    wholes: dict[str, Tensor] = {}
    for number, each in enumerate(held):
        whole = _joined(pm, each) if world.place >= 0 else None
        if missing:
            shape, dtype = outline[number]
            # A replica takes what is sent beside its own: this is no place to mend one.
            mine = whole if world.rank == world.ranks[0] else None
            sent = torch.empty(shape, dtype=dtype) if mine is None else mine.cpu().contiguous()
            accord_of(pm).send(sent, world.ranks[0])
            whole = sent if whole is None else whole
        if keep and whole is not None:
            whole = whole.to("cpu", copy=True) if each.local.data_ptr() == whole.data_ptr() else whole.cpu()
            wholes |= dict.fromkeys(each.names, whole)
    return {key: wholes[key] for key in pm.state_dict()} if keep else {}


def _joined(pm: Holder, each: Named) -> Tensor:
    local, piece = each.local.detach(), each.piece
    if piece is None or not piece.is_cut or pm.wire is None:
        return local
    shapes = [piece.placement.local_shape(piece.shape, piece.counts, rank) for rank in range(len(piece.counts))]
    counts = [math.prod(shape) for shape in shapes]
    flat = pm.wire.all_gather(local.reshape(-1).contiguous(), counts, what=f"{piece.name} for the full state").wait()
    return piece.join([part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)])


# Loading


class _Readable(Protocol):
    """Whole tensors to read boxes of."""

    def outline(self) -> dict[str, TensorEntry]: ...
    def read(self, key: str, chunk: Chunk) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Given:
    tensors: Mapping[str, Tensor]

    def outline(self) -> dict[str, TensorEntry]:
        return {
            key: TensorEntry(key, value.dtype, tuple(value.shape))
            for key, value in self.tensors.items()
            if isinstance(value, Tensor)
        }

    def read(self, key: str, chunk: Chunk) -> Tensor:
        spans = zip(chunk.offsets, chunk.sizes, strict=True)
        return self.tensors[key].detach()[tuple(slice(at, at + size) for at, size in spans)]


@dataclass(frozen=True, slots=True)
class _Lazily:
    file: TensorFile

    def outline(self) -> dict[str, TensorEntry]:
        return {key: self.file.entry(key) for key in sorted(self.file.keys)}

    def read(self, key: str, chunk: Chunk) -> Tensor:
        return self.file.read(key, chunk.offsets, chunk.sizes)


@contextmanager
def _opened(source: Source) -> Iterator[_Readable | None]:
    if source is None or isinstance(source, Mapping):
        yield None if source is None else _Given(source)
        return
    path = Path(source)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{shown(path.name)} is not a .safetensors file",
            where=str(path),
            do="convert it, or load it yourself (torch.load(..., weights_only=True)) and give the mapping",
        )
    with TensorFile(path) as file:
        yield _Lazily(file)


def load_full_state_dict(pm: Holder, source: Source, *, strict: bool = True) -> None:
    """Fill the module with whole tensors of the original names. Every rank must call this.

    `source` is a mapping or the path of a .safetensors file. Where all ranks have it, each reads what it holds. Where
    only rank 0 has it and others give None, rank 0 sends it, a tensor at a time. Of tied names one is enough. Keys that
    are missing, unexpected (both fine with `strict=False`) or of another shape are found before anything is changed.
    """
    accord = accord_of(pm)
    held = tensors_of(pm)
    with _opened_by_all(pm, source) as opened:
        outlines = accord.all(lambda: opened.outline() if opened else None)
        if outlines[0] is None:
            raise CheckpointError(
                "rank 0 has no state to load",
                where="load_full_state_dict",
                do="give a mapping or a path, on rank 0 at least",
            )
        sent = None in outlines
        outline = outlines[0] if sent else outlines[accord.rank] or {}
        accord.each(lambda: _check(held, outline, strict))
        for each in held:
            key = next((name for name in each.names if name in outline), None)
            if key is None:
                continue
            if sent:
                whole = Chunk((0,) * len(each.shape), each.shape)
                value = torch.empty(each.shape, dtype=outline[key].dtype)
                if accord.rank == 0 and opened is not None:
                    value.copy_(opened.read(key, whole))
                accord.send(value, 0)
                value = each.piece.take(value) if each.piece else value
                each.local.detach().copy_(value)
            elif opened is not None:
                for chunk, box in zip(each.chunks(), each.boxes(), strict=True):
                    box.detach().copy_(opened.read(key, chunk))


@contextmanager
def _opened_by_all(pm: Holder, source: Source) -> Iterator[_Readable | None]:
    """A source that one rank cannot open is refused by all."""
    opening = _opened(source)
    opened = accord_of(pm).each(opening.__enter__)
    try:
        yield opened
    finally:
        opening.__exit__(None, None, None)


def _check(held: list[Named], outline: Mapping[str, TensorEntry], strict: bool) -> None:
    known = {name for each in held for name in each.names}
    wrong = {
        "missing": [each.name for each in held if not any(name in outline for name in each.names)] if strict else [],
        "unexpected": [shown(key) for key in outline if key not in known] if strict else [],
        "shapes": [
            f"{name} is {list(outline[name].shape)}, not {list(each.shape)}"
            for each in held
            for name in each.names
            if name in outline and outline[name].shape != each.shape
        ],
    }
    if any(wrong.values()):
        raise CheckpointError(
            "the state is not that of this model",
            where="load_full_state_dict",
            do="load the state of the same model" + (", or pass strict=False to skip names" if strict else ""),
            **{kind: few(found) for kind, found in wrong.items() if found},
        )


def few(items: list[str]) -> str:
    """The first few, and how many more."""
    more = len(items) - _FIRST_FEW
    return ", ".join(items[:_FIRST_FEW]) + (f" and {more} more" if more > 0 else "")
