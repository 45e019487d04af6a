"""Shares: the linear program against every other point, closed forms, and memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import load_cluster
from lopsided.cluster.collectives import Algorithm, Network
from lopsided.errors import DoesNotFitError, LopsidedError, SharesError
from lopsided.planner.balance import balance
from lopsided.schedule.layout import Schedule
from lopsided.schedule.memory import Holding
from tests.support.schedules import (
    GB,
    GROUPED,
    NAMES,
    PADDED,
    ROWS,
    OneWay,
    cases,
    cluster_of,
    equal,
    per_device,
    predicted,
    random_point,
    schedule_of,
    sent,
    solve,
    work,
)


@given(cases(), st.integers(0, 10**6))
def test_no_other_point_is_faster(case: tuple[Cluster, Schedule, Algorithm], seed: int) -> None:
    cluster, schedule, way = case
    network, rng = OneWay(cluster, way), random.Random(seed)
    found = balance(schedule, (), cluster, network, reference=equal(cluster), names=NAMES)
    answer = [found.point.of(name) for name in NAMES]
    assert found.objective_s == pytest.approx(found.bound_s, rel=1e-6)
    chosen = predicted(schedule, network, cluster, per_device(cluster, *answer, names=NAMES))
    assert chosen == pytest.approx(found.objective_s, rel=1e-9)
    for _ in range(40):
        points = [random_point(rng, cluster) for _ in NAMES]
        if rng.random() < 0.5:  # near the answer, where a mistake would show first
            pairs = zip(answer, points, strict=True)
            points = [tuple(0.97 * a + 0.03 * b for a, b in zip(*pair, strict=True)) for pair in pairs]
        other = predicted(schedule, network, cluster, per_device(cluster, *points, names=NAMES))
        assert other >= found.objective_s * (1 - 1e-6)


@given(cases(), st.integers(0, 10**6), st.lists(st.integers(2, 16), min_size=3, max_size=3))
def test_no_other_point_that_fits_is_faster(
    case: tuple[Cluster, Schedule, Algorithm], seed: int, memory: list[int]
) -> None:
    cluster, schedule, way = case
    network, rng = OneWay(cluster, way), random.Random(seed)
    limits = [size * GB for size in memory[: len(cluster.kinds)]]
    sizes = (10 * GB, 20 * GB, 5 * GB)  # in units so small that rounding does not matter
    held = [Holding("t", "saved", size, (name, 10**6)) for name, size in zip(NAMES, sizes, strict=True)]

    def fit(points: Sequence[Sequence[float]], part: float = 1.0) -> bool:
        needs = [sum(size * point[k] for size, point in zip(sizes, points, strict=True)) for k in range(len(limits))]
        return all(need <= limit * part for need, limit in zip(needs, limits, strict=True))

    try:
        found = balance(schedule, held, cluster, network, reference=equal(cluster), names=NAMES, memory_limits=limits)
    except DoesNotFitError:
        tries = [[random_point(rng, cluster) for _ in NAMES] for _ in range(200)]
        assert not any(fit(points, 1 - 1e-4) for points in tries)
        return
    assert fit([found.point.of(name) for name in NAMES], 1 + 1e-6)
    assert all(size <= limit + 1 for size, limit in zip(found.memory_bytes, limits, strict=True))
    for _ in range(60):
        points = [random_point(rng, cluster) for _ in NAMES]
        if fit(points):
            other = predicted(schedule, network, cluster, per_device(cluster, *points, names=NAMES))
            assert other >= found.objective_s * (1 - 1e-5)


def test_no_point_of_a_grid_is_faster() -> None:
    cluster = cluster_of(1, 2)
    schedule = schedule_of(
        work((0.01, 1.0), (0.02, 4.0)),
        sent(10**8, ROWS),
        work((0.0, 2.0), (0.03, 2.0)),
        backward=[work((0.0, 3.0), (0.0, 5.0)), sent(10**8, hides=True), sent(2 * 10**8, ("state", 64), hides=True)],
        optimizer=[work((0.0, 0.5), (0.0, 0.1), by=("state", 64))],
    )
    found = solve(schedule, cluster)
    network = OneWay(cluster, PADDED)
    for a, b in itertools.product(range(101), repeat=2):
        point = per_device(cluster, (a / 100, (1 - a / 100) / 2), (b / 100, (1 - b / 100) / 2), names=("", "state"))
        assert predicted(schedule, network, cluster, point) >= found.objective_s * (1 - 1e-7)


# Closed forms


def test_computing_only_is_shared_by_speed() -> None:
    cluster = cluster_of(1, 2, 1)
    found = solve(schedule_of(work((0.0, 1.0), (0.0, 2.0), (0.0, 4.0))), cluster)
    # Speeds 1, 1/2 (twice), 1/4.
    assert found.point.of("") == pytest.approx((4 / 9, 2 / 9, 1 / 9))
    assert found.objective_s == pytest.approx(4 / 9)


def test_constants_are_finished_with_at_the_same_time() -> None:
    cluster = cluster_of(1, 1)
    found = solve(schedule_of(work((0.1, 1.0), (0.3, 2.0))), cluster)
    first, second = found.point.of("")
    assert 0.1 + first == pytest.approx(0.3 + 2 * second)
    assert found.objective_s == pytest.approx(0.1 + first)


def test_a_padded_gather_wants_equal_shares() -> None:
    cluster = cluster_of(1, 3)
    found = solve(schedule_of(sent(10**9, ROWS)), cluster, PADDED)
    assert found.point.of("") == pytest.approx((0.25, 0.25))
    assert found.objective_s == pytest.approx(1e-3 + 1.0)


def test_a_grouped_gather_takes_any() -> None:
    cluster = cluster_of(1, 3)
    found = solve(schedule_of(sent(10**9, ROWS)), cluster, GROUPED)
    assert found.objective_s == pytest.approx(1e-3 + 1.0)
    for point in ((1.0, 0.0), (0.1, 0.3)):
        other = predicted(schedule_of(sent(10**9, ROWS)), OneWay(cluster, GROUPED), cluster, per_device(cluster, point))
        assert other == pytest.approx(found.objective_s)
    # Of equally fast shares, equal ones.
    assert found.point.of("") == pytest.approx((0.25, 0.25))


def test_between_computing_and_padding() -> None:
    cluster = cluster_of(1, 1)
    by_speed = (0.8, 0.2)
    for size, expected in ((10**5, by_speed), (10**10, (0.5, 0.5))):
        found = solve(schedule_of(work((0.0, 1.0), (0.0, 4.0)), sent(size, ROWS)), cluster)
        assert found.point.of("") == pytest.approx(expected)


def test_a_device_that_only_starts_slowly_rests() -> None:
    cluster = cluster_of(1, 1)
    found = solve(schedule_of(work((0.0, 1.0), (0.9, 1000.0)), work((0.0, 1.0), (0.2, 1000.0))), cluster)
    assert found.point.of("")[1] == pytest.approx(0.9 / 2002)
    found = solve(schedule_of(work((0.0, 1.0), (1.5, 1.0))), cluster)
    assert found.point.of("") == (1.0, 0.0)
    assert found.shares.cut(10_000) == (10_000, 0)
    assert found.objective_s == pytest.approx(1.5)


def test_stages_have_shares_of_their_own_if_named() -> None:
    cluster = cluster_of(1, 1)
    schedule = schedule_of(work((0, 1), (0, 3), by=("", 400)), sent(8), work((0, 3), (0, 1), by=("tail", 400)))
    apart, together = (
        solve(schedule, cluster),
        balance(schedule, (), cluster, OneWay(cluster, PADDED), reference=equal(cluster), names=("",)),
    )
    assert apart.point.of("") == pytest.approx((0.75, 0.25))
    assert apart.point.of("tail") == pytest.approx((0.25, 0.75))
    assert apart.shares.cut(400, "tail") == (100, 300)
    assert together.point.of("tail") == together.point.of("") == pytest.approx((0.5, 0.5))
    assert apart.objective_s < together.objective_s


def test_what_hides_costs_nothing_until_it_does_not() -> None:
    cluster = cluster_of(1, 1)
    for size, exposed in ((10**8, 0.0), (10**9, 0.0), (3 * 10**9, 3.001 - 2.0)):
        schedule = schedule_of(
            work((0, 1), (0, 1)), backward=[sent(size, hides=True), work((0, 4), (0, 4), backward=True)]
        )
        found = solve(schedule, cluster, GROUPED)
        assert found.objective_s == pytest.approx(2.5 + exposed)


def test_equal_layers_are_one_unknown() -> None:
    cluster = cluster_of(1, 1)
    layer = [work((0.01, 1), (0.02, 3)), sent(10**8, ROWS), work((0.0, 2), (0.01, 1)), sent(10**6)]
    one, many = (solve(schedule_of(*(layer * depth)), cluster) for depth in (1, 80))
    assert many.point.of("") == pytest.approx(one.point.of(""))
    assert many.objective_s == pytest.approx(80 * one.objective_s)


def test_a_thousand_devices_are_shared_like_eight() -> None:
    few, many = cluster_of(2, 2, 2, 2), cluster_of(256, 256, 256, 256)
    speeds = [(0.0, float(k + 1)) for k in range(4)]
    small, large = (solve(schedule_of(work(*speeds, by=("", 8192 * 25))), c) for c in (few, many))
    ratio = [a / b for a, b in zip(small.point.of(""), large.point.of(""), strict=True)]
    assert ratio == pytest.approx([128.0] * 4)
    assert len(large.shares) == 1024
    assert large.solves == small.solves


def test_the_cheaper_way_at_the_answer_is_taken() -> None:
    """At the reference, which is equal, padding is cheaper; with most rows on one device a group of broadcasts is."""

    @dataclass(frozen=True)
    class Two(Network):
        def best(self, collective: str, whole_bytes: float, largest: float = 1.0) -> Algorithm:
            ways = (Algorithm("any", "padded", 0.0, 0.0, 1e-9), Algorithm("any", "grouped", 0.0, 1.2e-9, 0.0))
            return min(ways, key=lambda way: way.seconds(whole_bytes, largest))

    cluster = cluster_of(1, 3)
    schedule = schedule_of(work((0, 1), (0, 20)), sent(10**7, ROWS))
    found = balance(schedule, (), cluster, Two(cluster), reference=equal(cluster))
    assert found.point.of("")[0] > 0.8
    assert found.objective_s == pytest.approx(predicted(schedule, Two(cluster), cluster, found.shares))
    assert found.objective_s < found.bound_s or found.solves > 1


# Memory


def test_more_memory_holds_more_state_and_does_no_more_work() -> None:
    cluster = cluster_of(1, 1, memory=(24 * GB, 12 * GB))
    update = work((0, 1e-3), (0, 1e-3), by=("state", 36_000))
    schedule = schedule_of(work((0, 1), (0, 1)), backward=[sent(10**6, hides=True)], optimizer=[update])
    held = (Holding("w", "parameter", 36 * GB, ("state", 36_000)),)
    found = solve(schedule, cluster, held=held)
    assert found.point.of("") == pytest.approx((0.5, 0.5))
    assert found.point.of("state") == pytest.approx((2 / 3, 1 / 3))
    assert found.shares.cut(36_000, "state") == (24_000, 12_000)
    assert found.memory_bytes == pytest.approx((24 * GB, 12 * GB))


def test_equally_fast_states_fill_memories_alike() -> None:
    cluster = cluster_of(1, 1, memory=(24 * GB, 12 * GB))
    held = (Holding("w", "parameter", 6 * GB, ("state", 60)),)
    found = solve(schedule_of(work((0, 1), (0, 1))), cluster, held=held)
    assert found.shares.cut(60, "state") == (40, 20)


def test_memory_moves_work() -> None:
    cluster = cluster_of(1, 1, memory=(2 * GB, 20 * GB))
    held = (Holding("x", "saved", 8 * GB, ROWS), Holding("w", "parameter", GB, None))
    found = solve(schedule_of(work((0, 1), (0, 4))), cluster, held=held)
    assert found.point.of("") == pytest.approx((1 / 8, 7 / 8))
    roomy = balance(
        schedule_of(work((0, 1), (0, 4))),
        held,
        cluster,
        OneWay(cluster, PADDED),
        reference=equal(cluster),
        memory_limits=(100 * GB, 100 * GB),
    )
    assert roomy.point.of("") == pytest.approx((0.8, 0.2))


def test_what_does_not_fit_is_named() -> None:
    cluster = cluster_of(2, 1, memory=(8 * 2**30, 4 * 2**30))
    held = (
        Holding("embedding", "parameter", 30 * 2**30, ("state", 1000)),
        Holding("x", "saved", 2**30, None),
    )
    with pytest.raises(DoesNotFitError) as caught:
        solve(schedule_of(work((0, 1), (0, 1))), cluster, held=held)
    text = str(caught.value)
    # Of 20 GiB, 3 are taken by x: 13 GiB of the embedding's 30 have no place.
    assert "embedding" in text
    assert "kind" in text
    assert "too much" in text
    assert "do " in text


def test_limits_are_one_per_kind() -> None:
    cluster = cluster_of(1, 1)
    with pytest.raises(SharesError, match=r"1 memory limits for 2 kinds"):
        balance(
            schedule_of(work((0, 1), (0, 1))),
            (),
            cluster,
            OneWay(cluster, PADDED),
            reference=equal(cluster),
            memory_limits=(1.0,),
        )


# The answer


def test_a_judge_has_the_last_word() -> None:
    cluster = cluster_of(1, 1)
    schedule = schedule_of(work((0, 1.0), (0, 3.5), by=("", 3)))
    found = balance(
        schedule,
        (),
        cluster,
        OneWay(cluster, PADDED),
        reference=equal(cluster),
        judge=lambda shares: float(shares.cut(3)[0]),
    )
    assert found.shares.cut(3) == (2, 1)
    assert found.rounded_s == pytest.approx(3.5 / 3)


@pytest.mark.parametrize(("status", "said"), [(1, "limit of iterations"), (4, "cannot tell apart"), (9, "gave up")])
def test_the_solvers_codes_become_sentences(status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = SimpleNamespace(status=status, message="HiGHS said something")
    monkeypatch.setattr("lopsided.planner.balance.linprog", lambda *_, **__: outcome)
    with pytest.raises(LopsidedError, match=said) as caught:
        solve(schedule_of(work((0, 1), (0, 1))), cluster_of(1, 1))
    assert "HiGHS said something" in str(caught.value)


def test_the_same_every_time() -> None:
    cluster = load_cluster("hap-4")
    layer = [work(*((1e-3, 1 / k.speed * 1e12) for k in cluster.kinds)), sent(10**8, ROWS), sent(10**8, hides=True)]
    results = {
        balance(schedule_of(*layer, backward=layer), (), cluster, Network(cluster), reference=equal(cluster)).shares
        for _ in range(3)
    }
    assert len(results) == 1
