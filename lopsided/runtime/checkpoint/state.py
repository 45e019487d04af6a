"""The state of a parallel module as that of the model it was made of: whole tensors under the original names.

In: a parallel module, of which every process holds pieces. Out: `full_state_dict`, joined a parameter at a time;
`load_full_state_dict`, which gives every process its pieces of whole tensors and reads no more than those. And for
checkpoints: which tensors there are (`tensors_of`), who writes what all have (`spread`), and where each process wants
what it needs (`model_wanted`).

And the whole model again, as an ordinary module on one rank (`whole`): to evaluate, to generate, to save as its library
does. `save_pretrained` of the model itself, which holds pieces, writes such a copy (`save_whole`).
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lopsided.errors import CheckpointError, shown
from lopsided.runtime.checkpoint.folder import Record, Table, few
from lopsided.runtime.checkpoint.storage import Held
from lopsided.runtime.checkpoint.tensor_file import TensorEntry, TensorFile, box_of
from lopsided.runtime.control_plane import accord_of
from lopsided.runtime.parameters.pieces import Chunk, Piece

if TYPE_CHECKING:
    from lopsided.runtime.parallel import Parallel

Source = Mapping[str, Tensor] | str | Path | None


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


def tensors_of(pm: Parallel) -> list[Named]:
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

    def written(self, by_this: bool) -> Held:
        if not by_this or self.local is None:
            return Held(self.shape, self.dtype)
        return Held.whole(self.shape, self.dtype, self.local)


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
            found[key] = each.written(place == 0)
    # What all have: the largest first, each to who has least to write.
    alike = [key for key in kept if key not in found]
    for key in sorted(alike, key=lambda key: (-kept[key].bytes, key)):
        writer = min(range(places), key=lambda rank: (load[rank], rank))
        load[writer] += kept[key].bytes
        found[key] = kept[key].written(writer == place)
    return found


# Who reads what


def model_wanted(named: Sequence[Named], table: Table, where: str) -> dict[str, Held]:
    """Where the model's tensors go, if the checkpoint is of such a model."""
    stored = {key.removeprefix("model."): record for key, record in table.items() if key.startswith("model.")}
    wrong = _differences(named, {name: record.shape for name, record in stored.items()})
    if wrong:
        raise CheckpointError(
            "the checkpoint is of another model",
            where=where,
            do="build the model as it was when the checkpoint was saved",
            **wrong,
        )
    found = {next(name for name in each.names if name in stored): each for each in named}
    return {f"model.{name}": wanted_pieces(stored[name], each.piece, each.local) for name, each in found.items()}


def _differences(named: Sequence[Named], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """What whole tensors of these names and shapes lack to be the model's state. Of tied names one is enough."""
    known = {name: each for each in named for name in each.names}
    wrong = {
        "missing": [each.name for each in named if not any(name in shapes for name in each.names)],
        "unexpected": [shown(name) for name in shapes if name not in known],
        "shapes": [
            f"{name} is {list(shapes[name])}, not {list(each.shape)}"
            for name, each in known.items()
            if name in shapes and shapes[name] != each.shape
        ],
    }
    return {kind: few(found) for kind, found in wrong.items() if found}


def wanted_pieces(record: Record, piece: Piece | None, local: Tensor) -> Held:
    """Where a process wants its piece of a tensor, or the whole where it is not cut."""
    if not math.prod(record.shape):
        return Held(record.shape, record.dtype)
    if piece is None:
        return Held.whole(record.shape, record.dtype, local)
    return Held(record.shape, record.dtype, piece.chunks(), piece.boxes(local))


# Whole


def full_state_dict(pm: Parallel, *, everywhere: bool = True) -> dict[str, Tensor]:
    """What `state_dict()` of the original model would be, in main memory. Every rank must call this.

    With `everywhere=False` only rank 0 keeps the values; the others return an empty dict.
    """
    pm.together("full_state_dict")
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


def _joined(pm: Parallel, each: Named) -> Tensor:
    local, piece = each.local.detach(), each.piece
    if piece is None or not piece.is_cut or pm.communicator is None:
        return local
    shapes = [piece.placement.local_shape(piece.shape, piece.counts, rank) for rank in range(len(piece.counts))]
    counts = [math.prod(shape) for shape in shapes]
    flat = pm.communicator.all_gather(
        local.reshape(-1).contiguous(), counts, what=f"{piece.name} for the full state"
    ).wait()
    return piece.join([part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)])


@dataclass(frozen=True, slots=True)
class _Opened:
    """Whole tensors to read boxes of."""

    outline: dict[str, TensorEntry]
    read: Callable[[str, Chunk], Tensor]


@contextmanager
def _opened(source: Source) -> Iterator[_Opened | None]:
    if source is None:
        yield None
        return
    if isinstance(source, Mapping):
        tensors = {key: value.detach() for key, value in source.items() if isinstance(value, Tensor)}
        yield _Opened(
            {key: TensorEntry(key, value.dtype, tuple(value.shape)) for key, value in tensors.items()},
            lambda key, chunk: box_of(tensors[key], chunk.offsets, chunk.sizes),
        )
        return
    path = Path(source)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{shown(path.name)} is not a .safetensors file",
            where=str(path),
            do="convert it, or load it yourself (torch.load(..., weights_only=True)) and give the mapping",
        )
    with TensorFile(path) as file:
        yield _Opened(
            {key: file.entry(key) for key in sorted(file.keys)},
            lambda key, chunk: file.read(key, chunk.offsets, chunk.sizes),
        )


def load_full_state_dict(pm: Parallel, source: Source, *, strict: bool = True) -> None:
    """Fill the module with whole tensors of the original names. Every rank must call this.

    `source` is a mapping or the path of a .safetensors file. Where all ranks have it, each reads what it holds. Where
    only rank 0 has it and others give None, rank 0 sends it, a tensor at a time. Of tied names one is enough. Keys that
    are missing, unexpected (both fine with `strict=False`) or of another shape are found before anything is changed.
    """
    pm.together("load_full_state_dict")
    accord = accord_of(pm)
    held = tensors_of(pm)
    with ExitStack() as stack:
        # A source that one rank cannot open is refused by all.
        opened = accord.each(lambda: stack.enter_context(_opened(source)))
        outlines = accord.all(lambda: opened.outline if opened else None)
        if outlines[0] is None:
            raise CheckpointError(
                "rank 0 has no state to load",
                where="load_full_state_dict",
                do="give a mapping or a path, on rank 0 at least",
            )
        sent = None in outlines
        outline = outlines[0] if sent else outlines[accord.rank] or {}
        accord.each(lambda: _check_state(held, outline, strict))
        for each in held:
            key = next((name for name in each.names if name in outline), None)
            if key is None:
                continue
            if sent:
                value = torch.empty(each.shape, dtype=outline[key].dtype)
                if accord.rank == 0 and opened is not None:
                    value.copy_(opened.read(key, Chunk((0,) * len(each.shape), each.shape)))
                accord.send(value, 0)
                value = each.piece.take(value) if each.piece else value
                each.local.detach().copy_(value)
            elif opened is not None:
                for chunk, box in zip(each.chunks(), each.boxes(), strict=True):
                    box.detach().copy_(opened.read(key, chunk))


def _check_state(held: Sequence[Named], outline: Mapping[str, TensorEntry], strict: bool) -> None:
    wrong = _differences(held, {key: entry.shape for key, entry in outline.items()})
    if not strict:
        wrong = {kind: found for kind, found in wrong.items() if kind == "shapes"}
    if wrong:
        raise CheckpointError(
            "the state is not that of this model",
            where="load_full_state_dict",
            do="load the state of the same model" + (", or pass strict=False to skip names" if strict else ""),
            **wrong,
        )


# An ordinary module again

# The attribute of a model that knows which parallel module it is of.
_PARALLEL = "_lopsided_parallel"


def whole(pm: Any, *, device: torch.device | str = "cpu") -> Any:
    """An ordinary module with all parameters, on rank 0 and on `device`; None on other ranks. All ranks call it.

    It is a copy: what is trained later is not in it. `whole(pm).save_pretrained(folder)` writes a transformers model.
    """
    state = full_state_dict(pm, everywhere=False)
    if pm.world.rank != 0:
        return None
    model = pm.module
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    # Without copying the pieces: each is replaced by the whole at once.
    made: nn.Module = copy.deepcopy(model, dict(held))
    if vars(made).pop(_PARALLEL, None) is not None:
        made.__class__ = type(made).__mro__[2]
    put: dict[int, Any] = {}
    for path, module in made.named_modules():
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in [(key, tensor) for key, tensor in tensors.items() if tensor is not None]:
                name = f"{path}.{key}" if path else key
                if id(tensor) not in put:
                    value = state[name].to(device) if name in state else tensor.detach().clone().to(device)
                    put[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if kind == "parameter" else value
                tensors[key] = put[id(tensor)]
    return made


def save_whole(model: nn.Module, pm: Any) -> None:
    """From here on `save_pretrained` of this model, which holds pieces of `pm`, writes the whole. All ranks call it."""
    if callable(getattr(model, "save_pretrained", None)):
        if _PARALLEL not in vars(model):
            model.__class__ = _saving(type(model))  # type: ignore[arg-type]
        vars(model)[_PARALLEL] = weakref.ref(pm)


class _SavesWhole:
    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is not None:
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]
        made = whole(vars(self)[_PARALLEL]())
        return None if made is None else made.save_pretrained(*args, **kwargs)


@cache
def _saving(kind: type) -> type:
    return type(kind.__name__, (_SavesWhole, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
