"""What forward reads besides tensors: a captured graph has it frozen, so it is remembered and compared.

In: a model, while its forward pass is traced. Out: `Reads`, the plain values (numbers, texts, flags) of the modules'
attributes and configurations that were read, which `changed` compares with what they are now. Refused are numbers that
forward itself counts on, and random numbers of Python's or numpy's, which would be drawn once and for all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor, nn

from lopsided.errors import CaptureError

_PLAIN = (bool, int, float, complex, str, type(None))
_OWN = frozenset(vars(nn.Module())) | {"training"}  # what every module has; the mode is known elsewhere
_MISSING = object()
_MOST = 200  # entries of a configuration that are worth watching


@dataclass(frozen=True)
class Read:
    holder: dict[str, Any]  # the attributes of a module or a configuration
    key: str
    name: str
    value: object


@dataclass(frozen=True)
class Reads:
    """What was read, with the values it had."""

    all: tuple[Read, ...] = ()

    def values(self) -> tuple[object, ...]:
        return tuple(read.value for read in self.all)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return all(read.holder.get(read.key, _MISSING) == read.value for read in self.all)

    def changed(self) -> str:
        """The first that is not: its name, what it was, and what it is."""
        for read in self.all:
            now = read.holder.get(read.key, _MISSING)
            if now != read.value:
                return f"{read.name} was {read.value!r} and is {'gone' if now is _MISSING else repr(now)}"
        return ""


class Reading:
    """Collects what forward reads, in the order of reading."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], Read] = {}

    @property
    def reads(self) -> Reads:
        return Reads(tuple(self._found.values()))

    def note(self, holder: dict[str, Any], key: str, name: str) -> None:
        if (id(holder), key) in self._found:
            return
        value = holder[key]
        if _is_plain(value):
            self._found[id(holder), key] = Read(holder, key, name, _copied(value))
        elif not isinstance(value, nn.Module | Tensor | type) and not callable(value):
            # A configuration: whatever is in it may be read later.
            inner = getattr(value, "__dict__", {})
            for part in list(inner) if len(inner) <= _MOST else ():
                if _is_plain(inner[part]):
                    self.note(inner, part, f"{name}.{part}")

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Surrounds a forward pass of `model`."""
        names = {id(module): path for path, module in model.named_modules()}
        read_plainly = nn.Module.__getattribute__

        def getattribute(module: nn.Module, key: str) -> Any:
            value = read_plainly(module, key)
            if key not in _OWN and id(module) in names:
                own = read_plainly(module, "__dict__")
                if key in own:
                    path = names[id(module)]
                    self.note(own, key, f"{path}.{key}" if path else f"model.{key}")
            return value

        before = _generators()
        with patch.object(nn.Module, "__getattribute__", getattribute):
            yield
        _refuse_draws(before, _generators())
        self._refuse_counters()

    def _refuse_counters(self) -> None:
        for read in self._found.values():
            now = read.holder.get(read.key)
            is_number = isinstance(now, int | float) and not isinstance(now, bool)
            if is_number and isinstance(read.value, int | float) and now != read.value:
                raise CaptureError(
                    f"forward changes the Python number {read.name} ({read.value!r} became {now!r}), "
                    "and a captured graph would not",
                    do="register it with register_buffer(name, torch.tensor(...)) and count in place, or count in the "
                    "training loop and pass it to forward",
                )


def _is_plain(value: object, depth: int = 0) -> bool:
    if isinstance(value, tuple | list) and depth < 2 and len(value) <= 64:
        return all(_is_plain(part, depth + 1) for part in value)
    return isinstance(value, _PLAIN)


def _copied(value: object) -> object:
    return [_copied(part) for part in value] if isinstance(value, list) else value


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
