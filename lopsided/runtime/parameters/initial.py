"""First values: of a model built on `meta`, drawn piece by piece; of one that has values, those of rank 0.

In: a model, the pieces this process holds, a seed. Out: the local pieces, and the buffers. No more than the tensors of
one module are ever whole, and every process and every plan sees the same whole values: they are drawn on the CPU (GPUs
of different kinds draw different numbers) from a seed made of the given one and the module's name.

What a constructor would have done is done later, in its order: `reset_parameters` of the module and then of those
around it (a module may set what is inside it: GPT-2 scales the projections in its blocks), then `init`, or the
`_init_weights` that a model of transformers has, likewise. All that time the rest of the model stays on `meta`, where
writing has no effect.

A model that has values starts from rank 0's, as with data-parallel trainers: every rank has built it for itself,
perhaps from another seed (`take_first_values`). Digests are compared first (8 bytes a tensor), and only what differs is
sent, in chunks.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lopsided.comm.world import World, group_to_talk, odd_ones, waiting
from lopsided.errors import ModelError, WorldError
from lopsided.runtime.parameters.pieces import Piece
from lopsided.runtime.parameters.replicas import digest

Init = Callable[[nn.Module], object]

_CPU = torch.device("cpu")
_NOT_COPIED = ("_is_hf_initialized",)
"""Marks on parameters that say of the tensor on `meta` what is not true of its stand-in."""


def initialise(
    model: nn.Module,
    pieces: Mapping[str, Piece],
    device: torch.device,
    *,
    init: Init | None = None,
    seed: int,
    needed: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """The pieces of parameters and the whole buffers by name, on `device`. The model itself is left as it is.

    `init(module)` is called as `model.apply(init)` would. What is on a real device already is only cut. Buffers that
    nothing initialises are refused unless `needed`, the names of those that the loss depends on, leaves them out.
    """
    held = _Held(model, pieces, device)
    lacking: dict[str, str] = {}  # and the class of the module that owns each
    for path, module in model.named_modules():
        fresh = [own for own in _own_tensors(module) if own.tensor.is_meta and not held.has(own.tensor)]
        if fresh:
            with _Drawing(model, path, module, init, seed) as drawn:
                for own in fresh:
                    name, whole = held.name(own.tensor), drawn.whole(own)
                    if drawn.is_complete(own):
                        held.keep(own.tensor, whole)
                    elif own.is_parameter or needed is None or name in needed:
                        lacking[name] = type(module).__name__
                    else:
                        held.keep(own.tensor, torch.zeros_like(own.tensor, device=_CPU))
                    del whole
        for own in _own_tensors(module):
            if not own.tensor.is_meta and not held.has(own.tensor):
                held.keep(own.tensor, own.tensor.detach())
    if lacking:
        raise ModelError(
            f"{len(lacking)} tensors on meta have no first values: {', '.join(list(lacking)[:8])}"
            + (", ..." if len(lacking) > 8 else ""),
            where=", ".join(sorted(set(lacking.values()))),
            do="pass init=, a function of a module that fills its tensors; or give these modules a reset_parameters "
            "method; or build this part of the model on a real device",
        )
    return held.local


@dataclass(frozen=True, slots=True)
class _Own:
    """A parameter or buffer that a module holds itself."""

    key: str
    tensor: Tensor
    is_parameter: bool


def _own_tensors(module: nn.Module) -> list[_Own]:
    parameters = [_Own(key, tensor, True) for key, tensor in module._parameters.items() if tensor is not None]
    return parameters + [_Own(key, tensor, False) for key, tensor in module._buffers.items() if tensor is not None]


class _Held:
    """What this process holds so far, by name. A tied tensor has one name, that of its piece."""

    def __init__(self, model: nn.Module, pieces: Mapping[str, Piece], device: torch.device) -> None:
        self.pieces, self.device = pieces, device
        self.local: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
            for name, tensor in named:
                if name in pieces or id(tensor) not in self._names:
                    self._names[id(tensor)] = name

    def name(self, tensor: Tensor) -> str:
        return self._names[id(tensor)]

    def has(self, tensor: Tensor) -> bool:
        return self.name(tensor) in self.local

    def keep(self, tensor: Tensor, whole: Tensor) -> None:
        name = self.name(tensor)
        part = self.pieces[name].take(whole) if name in self.pieces else whole
        moved = part.to(self.device)
        # A piece is a copy, or the whole would stay for as long as the piece does.
        is_view = moved is part and part is not whole
        self.local[name] = moved.clone(memory_format=torch.contiguous_format) if is_view else moved.contiguous()


class _Drawing:
    """The tensors of one module, whole: inside, `whole` gives each and `is_complete` says if it was initialised."""

    def __init__(self, model: nn.Module, path: str, module: nn.Module, init: Init | None, seed: int) -> None:
        self._module, self._path, self._seed = module, path, seed
        self._calls = list(_initialisers(model, path, init))
        self._originals = _own_tensors(module)
        self._before: dict[str, Tensor] = {}

    def __enter__(self) -> _Drawing:
        try:
            # Integers have no value that says "not set": drawn twice, what nobody sets is what it was filled with.
            exact = [own.key for own in self._originals if own.tensor.is_meta and not _has_nan(own.tensor)]
            if exact:
                self._draw(1)
                self._before = {own.key: self.whole(own) for own in self._originals if own.key in exact}
            self._draw(0)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def whole(self, own: _Own) -> Tensor:
        held = self._module._parameters if own.is_parameter else self._module._buffers
        found = held.get(own.key)
        if found is None or found.shape != own.tensor.shape or found.is_meta:
            raise ModelError(
                f"initialising {self._path or 'the model'} left {own.key} without its values",
                where=type(self._module).__name__,
                do=f"keep it a tensor of shape {list(own.tensor.shape)} on its device in init= and reset_parameters",
            )
        return found.detach().to(own.tensor.dtype)

    def is_complete(self, own: _Own) -> bool:
        whole = self.whole(own)
        if not whole.numel():
            return True
        if own.key in self._before:
            return torch.equal(whole, self._before[own.key])
        # The smallest element is no number if any is none, and finding it takes no memory.
        return not torch.view_as_real(whole).isnan().any() if whole.is_complex() else not whole.amin().isnan()

    def _draw(self, fill: int) -> None:
        stand_ins: dict[int, Tensor] = {}
        for own in self._originals:
            if id(own.tensor) not in stand_ins:
                stand_ins[id(own.tensor)] = _stand_in(own, fill)
            held = self._module._parameters if own.is_parameter else self._module._buffers
            held[own.key] = stand_ins[id(own.tensor)]  # type: ignore[assignment]
        digest = hashlib.sha256(f"{self._seed} {self._path}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _CPU:
            # Only the CPU's: torch.manual_seed would seed every GPU too.
            torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
            for what, call in self._calls:
                try:
                    call()
                except Exception as error:
                    raise ModelError(
                        f"{what} failed while {self._path or 'the model'} was initialised: {error}",
                        where=type(self._module).__name__,
                        do="only this module's own tensors are real at that time, the others are on meta: "
                        "do not read those, or build this part of the model on a real device",
                    ) from error

    def _restore(self) -> None:
        for own in self._originals:
            held = self._module._parameters if own.is_parameter else self._module._buffers
            held[own.key] = own.tensor  # type: ignore[assignment]


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _stand_in(own: _Own, fill: int) -> Tensor:
    """A real tensor in place of one on meta, filled so that it shows where nobody wrote. A real one is copied."""
    tensor = own.tensor
    if not tensor.is_meta:
        made = tensor.detach().clone()
    else:
        made = torch.empty_like(tensor, device=_CPU, requires_grad=False)
        made.fill_(float("nan") if _has_nan(tensor) else fill)
    if own.is_parameter:
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        # Initialisers look at marks on parameters.
        made.__dict__.update({name: value for name, value in tensor.__dict__.items() if name not in _NOT_COPIED})
    return made


# What initialises a module


def _initialisers(model: nn.Module, path: str, init: Init | None) -> Iterator[tuple[str, Callable[[], object]]]:
    """Everything that writes to a module's tensors, in the order of one device: by name, and as a call."""
    line = _from_within(model, path)
    for module, _ in line:
        for name in ("reset_parameters", "_reset_parameters"):
            method = getattr(module, name, None)
            if callable(method) and _takes(method, 0):
                yield f"{type(module).__name__}.{name}", method
                break
    for module, ruler in line:
        if init is not None:
            yield f"init({type(module).__name__})", _call(init, module)
        elif ruler is not None:
            yield f"_init_weights({type(module).__name__})", _call(ruler, module)


def _from_within(model: nn.Module, path: str) -> list[tuple[nn.Module, Init | None]]:
    """The module and those around it, outwards, each with the `_init_weights` of the nearest model it is part of."""
    line = [model]
    for name in path.split(".") if path else ():
        inner = line[-1]._modules[name]
        line += [inner] if inner is not None else []
    ruler: Init | None = None
    found = []
    for module in line:
        own = getattr(module, "_init_weights", None)
        ruler = own if callable(own) and _takes(own, 1) else ruler
        found.append((module, ruler))
    return found[::-1]


def _call(function: Init, module: nn.Module) -> Callable[[], object]:
    return lambda: function(module)


def _takes(function: Callable[..., object], count: int) -> bool:
    """Whether it can be called with this many arguments, and needs no fewer."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind in (*positional, p.KEYWORD_ONLY)]
    return len(required) == count and all(p.kind in positional for p in required)


# Models that have values: every rank starts from rank 0's


_CHUNK_BYTES = 2**24


@torch.no_grad()
def take_first_values(model: nn.Module, world: World) -> tuple[str, ...]:
    """Give every rank rank 0's values; the names of tensors that differed. All ranks call it."""
    held = dict(_tensors(model))
    if world.size == 1 or not held:
        return ()
    mine = torch.stack([_said(tensor) for tensor in held.values()])
    group = group_to_talk()
    _check_outline(held, world, group)
    heard = [torch.empty_like(mine) for _ in range(world.size)]
    with waiting("digests of the first values"):
        dist.all_gather(heard, mine, group=group)
    differs = torch.stack(heard).ne(heard[0]).any(0).tolist()
    names = tuple(name for name, is_other in zip(held, differs, strict=True) if is_other)
    for name in names:
        for part in _parts(held[name].data):
            sent = part.to("cpu", copy=True, memory_format=torch.contiguous_format)
            # As bytes, since gloo does not know every dtype.
            with waiting("rank 0's first values"):
                dist.broadcast(sent.view(-1).view(torch.uint8), 0, group=group)
            if world.rank != 0:
                part.copy_(sent)
    return names


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _said(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64) if tensor.is_meta else digest(tensor).cpu()


def _check_outline(held: dict[str, Tensor], world: World, group: dist.ProcessGroup) -> None:
    """Ranks that have other tensors than others would wait for each other, or start from two sets of values."""
    on_meta = sum(tensor.is_meta for tensor in held.values())
    facts = {
        "the number of tensors": str(len(held)),
        "the number of those on meta": str(on_meta),
        "their bytes": str(sum(tensor.nbytes for tensor in held.values())),
    }
    told = [facts] * world.size
    with waiting("the outlines of the models"):
        dist.all_gather_object(told, facts, group=group)
    if found := odd_ones(dict(enumerate(told))):
        raise WorldError(
            f"models are not built alike: {found}",
            where=f"rank {world.rank}",
            do="build the same model on every rank, on a real device everywhere or on meta everywhere; "
            "load_full_state_dict(pm, state) then gives it the values that rank 0 has",
        )


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Views of at most a chunk, or of one row."""
    if not tensor.numel():
        return
    rows = tensor.view(-1) if tensor.is_contiguous() else tensor
    yield from rows.split(max(_CHUNK_BYTES * len(rows) // tensor.nbytes, 1)) if rows.dim() else (rows,)
