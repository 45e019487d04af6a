"""`make test` runs a sample of long lists: the same one every time, and every value of every parameter is in it."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import sample


def items(*lengths: int, most: int | None) -> list[Any]:
    """What pytest makes of a test with parameters of these lengths."""
    mark = None if most is None else SimpleNamespace(args=(most,))
    numbers: list[dict[str, int]] = [{}]
    for position, length in enumerate(lengths):
        numbers = [{**one, f"p{position}": k} for one in numbers for k in range(length)]
    return [
        SimpleNamespace(callspec=SimpleNamespace(indices=one), get_closest_marker=lambda name: mark) for one in numbers
    ]


def test_without_a_mark_all_are_run() -> None:
    all_of_them = items(3, 2, most=None)
    assert sample(all_of_them) == all_of_them


@pytest.mark.parametrize(("lengths", "most"), [((10, 3), 10), ((10, 2), 6), ((132,), 36), ((3, 4, 5), 9), ((5,), 7)])
def test_every_value_is_taken_equally_often(lengths: tuple[int, ...], most: int) -> None:
    found = sample(items(*lengths, most=most))
    assert len(found) == min(most, math.prod(lengths))
    for position, length in enumerate(lengths):
        times = Counter(item.callspec.indices[f"p{position}"] for item in found)
        assert len(times) == min(length, len(found))
        assert max(times.values()) - min(times.values()) <= 1


def test_a_sample_is_spread_over_the_list() -> None:
    found = [item.callspec.indices["p0"] for item in sample(items(132, most=36))]
    assert found == sorted(found)
    assert max(later - sooner for sooner, later in pairwise(found)) <= 8


def test_a_sample_is_the_same_every_time() -> None:
    first, second = (sample(items(10, 3, most=7)) for _ in range(2))
    assert [item.callspec.indices for item in first] == [item.callspec.indices for item in second]
