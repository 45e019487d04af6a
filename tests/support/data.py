"""Data that tests compare, or take apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def gap(found: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> float:
    """How far numbers of the same names are apart at most, entry by entry."""
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    return max(abs(entry[key] - other[key]) for entry, other in zip(found, expected, strict=True) for key in entry)


def farthest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """How far tensors of the same names are apart at most; `found` may have more."""
    return max((found[key] - expected[key]).abs().max().item() for key in expected)


def paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The places of all values inside of one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(p for key, part in inner for p in paths(part, (*path, key)))]
