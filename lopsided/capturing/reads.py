"""What forward reads besides tensors: a captured graph has it frozen, so it is remembered and compared.

In: a model and its loss function, while they are traced. Out: `Reads`: what of the following was read, which `changed`
compares with what it is now.

    plain values (numbers, texts, flags)   attributes of modules, of their classes and configurations, as they are read;
                                           variables of the script (`lopsided.capturing.variables`)
    tensors that are no buffers            which one it is, and whether it was written to
    configurations, functions              which one it is
    hooks of modules                       which there are; those of the backward pass are refused

Attributes in which forward leaves tensors for others are `LeftTensor`s.

Refused are numbers that forward itself counts on, and random numbers of Python's or numpy's, which would be drawn once
and for all.
"""

from __future__ import annotations

import random
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lopsided.errors import CaptureError

_PLAIN = (bool, int, float, complex, str, type(None), np.generic, torch.dtype, torch.device)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, Enum)
# What every module has; whether it is in training is known elsewhere.
_OWN = frozenset((*vars(nn.Module()), *vars(nn.Module)))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# A configuration with more entries than this is not watched.
_MOST = 200
# How deep a configuration is looked through.
_DEEPEST = 3


class HasValues(Protocol):
    """Whatever has values by name: attributes of an object, variables of a script."""

    def get(self, key: Any, default: object, /) -> object: ...


class OfModule:
    """The attributes of a module, those of its class too."""

    def __init__(self, module: nn.Module) -> None:
        self.thing = module

    def get(self, key: Any, default: object, /) -> object:
        try:
            return object.__getattribute__(self.thing, key)
        except AttributeError:
            return default


class _OfEntry:
    """The entries of a dict, wherever that is by now: export puts copies of dicts in their place."""

    def __init__(self, holder: HasValues, key: Any) -> None:
        self._holder, self._key = holder, key
        self.place = _place(holder, key)

    def get(self, key: Any, default: object, /) -> object:
        entries = self._holder.get(self._key, None)
        return entries.get(key, default) if isinstance(entries, dict) else default


def _place(holder: HasValues, key: Any) -> tuple[Any, Any]:
    return getattr(holder, "place", None) or id(getattr(holder, "thing", holder)), key


class _HooksOf:
    """The numbers that torch gives the hooks of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.thing = vars(module)

    def get(self, key: Any, default: object, /) -> object:
        return self.now()

    def now(self) -> tuple[tuple[int, ...], ...]:
        each = [self.thing[key] for key in _HOOKS]
        return tuple(map(tuple, each)) if any(each) else ()


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


class _SeenTensor:
    """A tensor as it was when it became a constant of the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor, _version(tensor)

    def is_still(self, now: object) -> bool:
        return now is self.tensor and _version(self.tensor) == self._version

    def told(self, now: object) -> str:
        return "another" if now is not self.tensor else "written to"

    def __repr__(self) -> str:
        return f"a tensor {list(self.tensor.shape)}"


class _SeenThing:
    """A configuration or a function."""

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def is_still(self, now: object) -> bool:
        return now is self._thing

    def told(self, now: object) -> str:
        return "another"

    def __repr__(self) -> str:
        # Without an address, which is another on every rank.
        return f"a {type(self._thing).__name__} {getattr(self._thing, '__name__', '')}".rstrip()


class _SeenHooks:
    """The hooks that a module had, by the numbers torch gives them, which are others on every rank."""

    def __init__(self, numbers: tuple[tuple[int, ...], ...]) -> None:
        self._numbers = numbers

    def is_still(self, now: object) -> bool:
        return now == self._numbers

    def told(self, now: object) -> str:
        return "others"

    def __repr__(self) -> str:
        return f"{sum(map(len, self._numbers))} hooks"


_Seen = (_SeenTensor, _SeenThing, _SeenHooks)


_MISSING = _Nothing()


@dataclass(frozen=True)
class Read:
    holder: HasValues
    key: Any
    name: str
    value: object

    def now(self) -> object:
        return self.holder.get(self.key, _MISSING)

    def holds(self) -> bool:
        now = self.now()
        if isinstance(self.value, _Seen):
            return self.value.is_still(now)
        return now is self.value or (_is_plain(now) and now == self.value)

    def is_used(self, constants: Collection[int]) -> bool:
        """Whether the graph depends on it, whose constants have these ids."""
        if isinstance(self.value, _SeenTensor):
            return id(self.value.tensor) in constants
        return not isinstance(self.value, _SeenThing) or self.holds()

    def told(self) -> str:
        """What it was and what it is."""
        now = self.now()
        if isinstance(self.value, _Seen):
            return f"{self.name} was {self.value!r} and is {self.value.told(now)}"
        return f"{self.name} was {self.value!r} and is {'gone' if now is _MISSING else repr(now)}"


@dataclass(frozen=True)
class Reads:
    """What was read, with the values it had."""

    all: tuple[Read, ...] = ()

    def values(self) -> tuple[object, ...]:
        return tuple(read.value for read in self.all)

    @cached_property
    def facts(self) -> dict[str, str]:
        """What all ranks must have read alike, by name."""
        return {read.name: repr(read.value) for read in self.all}

    @cached_property
    def text(self) -> str:
        return repr(self.facts)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return all(read.holds() for read in self.all)

    def changed(self) -> str:
        """The first that is not: its name, what it was, and what it is."""
        return next((read.told() for read in self.all if not read.holds()), "")

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Whatever forward does in here to lists and numbers of its own is undone."""
        kept = [(read, now, _copied(now)) for read in self.all if _is_plain(now := read.now())]
        try:
            yield
        finally:
            for read, now, copied in kept:
                if isinstance(now, list) and now != copied:
                    now[:] = copied  # type: ignore[call-overload]
                if isinstance(read.holder, dict) and read.now() is not now:
                    read.holder[read.key] = now


@dataclass(frozen=True)
class LeftTensor:
    """An attribute in which forward leaves a tensor."""

    module: nn.Module
    key: str
    name: str

    def leave_word(self) -> None:
        """Whoever looks there is told: a step on pieces has no such tensor."""
        vars(self.module)[self.key] = NotStored(self.name)


class NotStored:
    """Stands for a tensor that forward stores in an attribute."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __repr__(self) -> str:
        return f"<{self._name}, which was not handed on>"

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        raise self._refusal()

    def _refusal(self, *_: Any, **__: Any) -> CaptureError:
        return CaptureError(
            f"forward stores a tensor in {self.__dict__['_name']}, and what it stores is not handed on",
            do="return it beside the loss; where the loss needs it, add it in forward or in loss_fn=",
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refusal()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __pow__ = __matmul__ = __float__ = __len__ = __iter__ = __getitem__ = __bool__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = pytree.tree_leaves((args, kwargs))
        raise next(part for part in parts if isinstance(part, NotStored))._refusal()


class Reading:
    """Collects what forward reads, in the order of reading."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, Any], Read] = {}
        self.names: dict[int, str] = {}  # of the modules that are watched
        self._before: dict[int, dict[str, Any]] = {}  # their attributes
        self._modules: list[nn.Module] = []
        self.stored: list[LeftTensor] = []

    def reads(self, constants: Iterable[object]) -> Reads:
        """What the graph depends on, whose constants are given.

        Without tensors that were looked at alone, and without objects that each call, or export, puts in the place of
        others: they are never the same again.
        """
        used = {id(constant) for constant in constants}
        return Reads(tuple(read for read in self._found.values() if read.is_used(used)))

    def note(self, holder: HasValues, key: Any, name: str, *, of: Sequence[str] | None = None, depth: int = 0) -> bool:
        """What `holder` has under this key; of a configuration its entries, or those that `of` names. Whether that is
        anything to watch."""
        place = _place(holder, key)
        if place in self._found:
            return True
        value = holder.get(key, _MISSING)
        if _is_plain(value) or value is _MISSING:
            self._found[place] = Read(holder, key, name, _copied(value))
        elif type(value) in (Tensor, nn.Parameter):  # and none of the trace's own
            self._found[place] = Read(holder, key, name, _SeenTensor(value))  # type: ignore[arg-type]
        elif isinstance(value, dict) and depth < _DEEPEST:
            return self._note_inner(_OfEntry(holder, key), value, name, of, depth)
        elif isinstance(value, _FUNCTIONS) or (depth < _DEEPEST and self._note_object(value, name, of, depth)):
            self._found[place] = Read(holder, key, name, _SeenThing(value))
        return place in self._found

    def _note_object(self, value: object, name: str, of: Sequence[str] | None, depth: int) -> bool:
        if isinstance(value, nn.Module | Tensor | type | types.ModuleType) or callable(value):
            return False
        inner = getattr(value, "__dict__", {})
        named = {key: part for key, part in inner.items() if of is None or key in of}
        return self._note_inner(inner, named, name, of, depth)

    def _note_inner(
        self, holder: HasValues, inner: Mapping[Any, Any], name: str, of: Sequence[str] | None, depth: int
    ) -> bool:
        """Whatever is in a configuration may be read later."""
        if len(inner) > _MOST:
            return False
        inside = "{}[{!r}]" if isinstance(holder, _OfEntry) else "{}.{}"
        watched = [key for key, part in inner.items() if _is_plain(part) or isinstance(part, dict)]
        noted = [self.note(holder, key, inside.format(name, key), of=of, depth=depth + 1) for key in watched]
        return any(noted)

    def watch(self, module: nn.Module, name: str) -> None:
        """From now on, note what is read of this module."""
        if id(module) in self.names:
            return
        self.names[id(module)], self._before[id(module)] = name, dict(vars(module))
        self._modules.append(module)
        hooks = _HooksOf(module)
        self._found[id(module), "hooks"] = Read(hooks, "hooks", f"the hooks of {name}", _SeenHooks(hooks.now()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Surrounds a forward pass of what is watched."""
        read_plainly, look_elsewhere = nn.Module.__getattribute__, nn.Module.__getattr__

        def getattribute(module: nn.Module, key: str) -> Any:
            value = read_plainly(module, key)
            if key not in _OWN and id(module) in self.names:
                own, name = read_plainly(module, "__dict__"), self.names[id(module)]
                if key in own:
                    # What forward itself has just put there is no knob.
                    if _is_plain(value) or value is self._before[id(module)].get(key):
                        self.note(own, key, f"{name}.{key}")
                elif _is_plain(value):
                    self.note(OfModule(module), key, f"{name}.{key}")
            return value

        def missing(module: nn.Module, key: str) -> Any:
            """What is no plain attribute: it may not be there at all, `getattr(self, "tau", 1.0)`."""
            try:
                return look_elsewhere(module, key)
            except AttributeError:
                if id(module) in self.names and not key.startswith("_"):
                    self.note(OfModule(module), key, f"{self.names[id(module)]}.{key}")
                raise

        before = _generators()
        with (
            patch.object(nn.Module, "__getattribute__", getattribute),
            patch.object(nn.Module, "__getattr__", missing),
        ):
            yield
        _refuse_draws(before, _generators())
        self._refuse_counters()
        self.stored = [one for module in self._modules for one in self._stored_in(module)]

    def _stored_in(self, module: nn.Module) -> Iterator[LeftTensor]:
        """Attributes in which forward leaves tensors with a gradient, for a loss outside of it or for the next step."""
        own, before = vars(module), self._before[id(module)]
        for key, held in own.items():
            is_new = held is not before.get(key) or isinstance(held, list | dict)
            if key in _OWN or not is_new or not _has_gradient(held):
                continue
            name = f"{self.names[id(module)]}.{key}"
            if not {_place(own, key), _place(OfModule(module), key)}.isdisjoint(self._found):
                raise CaptureError(
                    f"forward reads {name} and leaves tensors with a gradient there, which a captured graph would not",
                    do="return them and let the loss use them, or pass what goes from step to step as an input",
                )
            yield LeftTensor(module, key, name)

    def _refuse_counters(self) -> None:
        for read in self._found.values():
            now = read.now()
            if _is_counted(read.value, now):
                raise CaptureError(
                    f"forward changes the Python number {read.name} ({read.value!r} became {now!r}), "
                    "and a captured graph would not",
                    do="register it with register_buffer(name, torch.tensor(...)) and count in place, or count in the "
                    "training loop and pass it to forward",
                )


def _is_counted(before: object, now: object) -> bool:
    if isinstance(before, tuple | list) and isinstance(now, tuple | list):
        return len(before) == len(now) and any(_is_counted(a, b) for a, b in zip(before, now, strict=True))
    are_numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in (before, now))
    return are_numbers and before != now


def _is_plain(value: object, depth: int = 0) -> bool:
    if isinstance(value, tuple | list) and depth < 2 and len(value) <= 64:
        return all(_is_plain(part, depth + 1) for part in value)
    return isinstance(value, _PLAIN)


def _copied(value: object) -> object:
    return [_copied(part) for part in value] if isinstance(value, list) else value


def _has_gradient(held: object) -> bool:
    kinds = (Tensor, list, tuple, dict)
    return isinstance(held, kinds) and any(
        isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and leaf.requires_grad
        for leaf in pytree.tree_leaves(held)
    )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _generators() -> Sequence[object]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, bytes(keys), *rest)  # type: ignore[arg-type]


def _refuse_draws(before: Sequence[object], after: Sequence[object]) -> None:
    for whose, was, now in zip(("Python's random", "numpy's random"), before, after, strict=True):
        if was != now:
            raise CaptureError(
                f"forward draws from {whose} module, and the numbers drawn now would be used in every step",
                do="draw with torch in forward, or outside of it and pass what was drawn as an input; in a model of "
                "transformers switch the masking off (mask_time_prob=0, mask_feature_prob=0, layerdrop=0)",
            )
