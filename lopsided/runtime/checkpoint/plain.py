"""Numbers, texts and lists as JSON files: what a stranger wrote there can at worst be refused.

In: what optimizers, schedulers and loaders say of themselves. Out: JSON, and the same values back: tuples, counters and
numbers that are not finite too, each marked by the one key "~".
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lopsided.errors import CheckpointError, shown

_MARK = "~"
_DEEPEST = 50


def as_plain(value: object, where: str) -> object:
    """The value as JSON can hold it; `where` says whose it is, should it be none of those."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_MARK: "float", "of": str(value)}
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return as_plain(value.item(), where)
    if isinstance(value, list):
        return [as_plain(each, where) for each in value]
    if isinstance(value, tuple):
        return {_MARK: "tuple", "of": [as_plain(each, where) for each in value]}
    if isinstance(value, Mapping):
        if not isinstance(value, Counter) and all(isinstance(key, str) and key != _MARK for key in value):
            return {str(key): as_plain(each, where) for key, each in value.items()}
        pairs = [[as_plain(key, where), as_plain(each, where)] for key, each in value.items()]
        return {_MARK: "counter" if isinstance(value, Counter) else "pairs", "of": pairs}
    raise CheckpointError(
        f"a {type(value).__name__} cannot be saved", where=where, do="keep numbers, texts, lists and dicts there"
    )


def from_plain(value: object, depth: int = 0) -> object:
    """The inverse of `as_plain`, except that a tensor comes back as its number."""
    if depth > _DEEPEST:
        raise _refuse(f"lists nest more than {_DEEPEST} deep")
    if isinstance(value, list):
        return [from_plain(each, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: from_plain(each, depth + 1) for key, each in value.items()}
    made = _MADE.get(str(value[_MARK]))
    try:
        if made is None or value.keys() != {_MARK, "of"}:
            raise ValueError
        return made(from_plain(value["of"], depth + 1))
    except (KeyError, TypeError, ValueError):
        raise _refuse(f"{shown(value)} is no value that is saved") from None


def _refuse(what: str) -> CheckpointError:
    return CheckpointError(
        what, where="a value of the checkpoint", do="use a checkpoint that was saved by this library"
    )


def _a_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


_MADE: dict[str, Callable[[object], object]] = {
    "float": lambda text: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[str(text)],
    "tuple": lambda items: tuple(_a_list(items)),
    "pairs": lambda pairs: dict(_a_list(pairs)),
    "counter": lambda pairs: Counter(dict(_a_list(pairs))),
}


def like(value: object, fresh: object) -> object:
    """A value that was read, as its fresh counterpart is: a number in a tensor where that is one."""
    if isinstance(fresh, Tensor) and isinstance(value, bool | int | float):
        return torch.full_like(fresh, value)
    return value


def write_json(path: Path, value: object) -> None:
    """Written when this returns, even if the machine stops."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path, most_bytes: int) -> dict[str, object]:
    def refuse(what: str) -> CheckpointError:
        return CheckpointError(what, where=str(path), do="use a checkpoint that was saved completely")

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise refuse("a key is given twice")
        return found

    def constant(name: str) -> object:
        raise refuse(f"{name} is not JSON")

    if path.is_symlink() or not path.is_file():
        raise refuse("there is no such file, or it is not a plain one")
    try:
        if path.stat().st_size > most_bytes:
            raise refuse(f"the file is larger than {most_bytes:,} bytes")
        value = json.loads(path.read_bytes().decode(), object_pairs_hook=once, parse_constant=constant)
    except RecursionError:
        raise refuse("the lists of this file nest too deep") from None
    except (OSError, ValueError) as error:
        raise refuse(f"the file cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise refuse(f"this is {shown(value)}, not an object")
    return value
