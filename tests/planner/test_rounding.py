"""Whole units: against brute force, the nearest, the timeline, and the memory there is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import load_cluster
from lopsided.cluster.collectives import Algorithm, Network
from lopsided.errors import DoesNotFitError
from lopsided.ir.placement import cut
from lopsided.planner.balance import balance
from lopsided.planner.rounding import nearest
from lopsided.schedule import timeline
from lopsided.schedule.cost import Cut, Scale
from lopsided.schedule.layout import Item, Schedule
from lopsided.schedule.memory import Holding, bytes_per_kind
from tests.support.schedules import (
    GB,
    PADDED,
    OneWay,
    affine,
    cases,
    cluster_of,
    equal,
    predicted,
    schedule_of,
    sent,
    solve,
    work,
)


@given(cases())
def test_the_step_in_whole_units_is_the_timelines(case: tuple[Cluster, Schedule, Algorithm]) -> None:
    cluster, schedule, _ = case
    network = Network(cluster)  # with all its ways
    found = balance(schedule, (), cluster, network, reference=equal(cluster))
    run = timeline.run(schedule, network, Scale(cluster, found.shares))
    assert found.rounded_s == pytest.approx(run.step_s, rel=1e-9)
    assert predicted(schedule, network, cluster, found.shares) == pytest.approx(found.objective_s, rel=1e-9)
    assert found.objective_s <= found.bound_s * (1 + 1e-6)


@given(cases())
def test_whole_units_are_never_worse_than_the_nearest(case: tuple[Cluster, Schedule, Algorithm]) -> None:
    cluster, schedule, way = case
    network = OneWay(cluster, way)
    found = solve(schedule, cluster, way)
    near = replace(found.shares, cuts=())
    assert found.rounded_s <= timeline.run(schedule, network, Scale(cluster, near)).step_s * (1 + 1e-12)
    for _, length, pieces in found.shares.cuts:
        assert sum(pieces) == length
        for start, stop in cluster.spans:
            assert max(pieces[start:stop]) - min(pieces[start:stop]) <= 1


def every_cut(length: int, devices: int) -> list[tuple[int, ...]]:
    if devices == 1:
        return [(length,)]
    return [(first, *rest) for first in range(length + 1) for rest in every_cut(length - first, devices - 1)]


@given(
    st.lists(st.integers(1, 2), min_size=1, max_size=3),
    st.integers(1, 9),
    st.lists(affine(), min_size=3, max_size=3),
    st.booleans(),
)
def test_one_length_is_cut_as_well_as_can_be(
    counts: list[int], length: int, seconds: list[tuple[float, float]], padded: bool
) -> None:
    cluster, by = cluster_of(*counts), ("", length)
    items: list[Item] = [work(*seconds[: len(counts)], by=by)]
    if padded:
        items.append(sent(2 * 10**8, by))
    schedule, network = schedule_of(*items), OneWay(cluster, PADDED)
    found = solve(schedule, cluster)
    best = min(
        timeline.run(schedule, network, Scale(cluster, replace(found.shares, cuts=(("", length, pieces),)))).step_s
        for pieces in every_cut(length, cluster.devices)
    )
    assert found.rounded_s == pytest.approx(best, rel=1e-9)


def test_nearest_is_not_best() -> None:
    """Three units by speed 3.5:1 are 2.33 and 0.67: nearest is (2, 1), but one unit takes the slow device longer than
    all three take the fast one."""
    cluster = cluster_of(1, 1)
    found = solve(schedule_of(work((0, 1.0), (0, 3.5), by=("", 3))), cluster)
    assert cut(3, found.shares.work) == (2, 1)
    assert found.shares.cut(3) == (3, 0)


def test_a_length_of_nothing_is_not_cut() -> None:
    schedule = schedule_of(work((0, 1), (0, 3), by=("", 0)), sent(10**6, ("", 0)), work((0, 1), (0, 3), by=("", 8)))
    found = solve(schedule, cluster_of(1, 1))
    assert found.shares.cuts == (("", 8, (6, 2)),)
    assert found.rounded_s == pytest.approx(0.75 + 1e-3)


def test_twelve_heads_on_sixty_four_devices() -> None:
    cluster = load_cluster("hap-64")
    fast = max(range(len(cluster.kinds)), key=lambda k: cluster.kinds[k].speed)
    seconds = [(0.0, 1 / kind.speed) for kind in cluster.kinds]
    heads: Cut = ("", 12)
    found = balance(schedule_of(work(*seconds, by=heads)), (), cluster, Network(cluster), reference=equal(cluster))
    pieces = found.shares.cut(12)
    start, stop = cluster.spans[fast]
    assert sorted(pieces[start:stop]) == [0, 0, 0, 0] + [1] * 12
    assert sum(pieces) == 12


@given(
    st.lists(st.tuples(st.integers(1, 5), st.floats(0, 1)), min_size=1, max_size=4).filter(
        lambda kinds: sum(count * part for count, part in kinds) > 0.01
    ),
    st.integers(0, 50),
)
def test_nearest_is_what_a_cut_by_largest_remainder_is(kinds: list[tuple[int, float]], length: int) -> None:
    whole = sum(count * part for count, part in kinds)
    shares, counts = [part / whole for _, part in kinds], [count for count, _ in kinds]
    pieces = iter(cut(length, tuple(share for share, count in zip(shares, counts, strict=True) for _ in range(count))))
    by_kind = tuple(sum(itertools.islice(pieces, count)) for count in counts)
    assert nearest(length, shares, counts) == by_kind


def test_without_polish_units_are_still_no_worse_than_the_nearest() -> None:
    cluster = cluster_of(2, 3)
    schedule = schedule_of(
        work((0.0, 1.0), (0.01, 3.5), by=("", 7)), sent(10**8, ("", 7)), work((0, 1), (0, 2), by=("", 16))
    )
    network = OneWay(cluster, PADDED)
    quick = balance(schedule, (), cluster, network, reference=equal(cluster), polish=False)
    near = timeline.run(schedule, network, Scale(cluster, replace(quick.shares, cuts=()))).step_s
    assert solve(schedule, cluster).rounded_s <= quick.rounded_s <= near


# Memory


@given(st.integers(1, 3), st.integers(1, 3), st.integers(7, 40), st.integers(5, 40), st.integers(5, 40))
def test_whole_units_fit_in_memory(a: int, b: int, length: int, first: int, second: int) -> None:
    """A unit is as large as a gigabyte here: what fits in fractions of one may not fit in whole ones."""
    cluster = cluster_of(a, b, memory=(first * GB + GB // 2, second * GB + GB // 3))
    by: Cut = ("", length)
    held = (Holding("x", "saved", length * GB, by),)
    schedule = schedule_of(work((0, 1), (0, 3), by=by))
    if a * first + b * second < length:
        with pytest.raises(DoesNotFitError):
            solve(schedule, cluster, held=held)
        return
    found = solve(schedule, cluster, held=held)
    used = bytes_per_kind(held, Scale(cluster, found.shares))
    assert used == tuple(round(size) for size in found.memory_bytes)
    assert all(size <= kind.memory_bytes for size, kind in zip(used, cluster.kinds, strict=True))


def test_a_unit_that_fits_nowhere_is_named() -> None:
    cluster = cluster_of(1, 1, memory=(6 * 2**30, 6 * 2**30))
    held = (Holding("experts", "parameter", 12 * 2**30, ("state", 3)),)
    with pytest.raises(DoesNotFitError, match=r"experts"):
        solve(schedule_of(work((0, 1), (0, 1))), cluster, held=held)
