"""Shares: the linear program against every other point, closed forms, memory, and whole units against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopsided import timeline
from lopsided.cluster import Cluster, Kind, Link, load_cluster
from lopsided.collectives import Network, Way
from lopsided.cost import Affine, Cut, Scale, Transfer
from lopsided.errors import DoesNotFitError, SharesError
from lopsided.memory import Holding, bytes_per_kind
from lopsided.placement import Shares, cut
from lopsided.schedule import Compute, Item, Schedule
from lopsided.shares import Balance, balance, nearest, predicted

GB = 10**9
ROWS: Cut = ("", 10_000)
PADDED = Way("any", "padded", 1e-3, 0.0, 1e-9)
GROUPED = Way("any", "grouped", 1e-3, 1e-9, 0.0)


def cluster_of(*counts: int, memory: Sequence[int] = ()) -> Cluster:
    """Kinds of so many devices, each kind in a node of its own."""
    kinds = tuple(
        Kind(f"kind{k}", f"box{k}", 1, count, (("f32", 1e12),), 1e12, memory[k] if memory else 100 * GB, 1e-6)
        for k, count in enumerate(counts)
    )
    return Cluster("made-up", "", kinds, Link(1e-6, 1e10), Link(1e-5, 1e9))


@dataclass(frozen=True)
class OneWay(Network):
    """A network that carries everything out in one way, so that the step is convex in the shares."""

    way: Way = PADDED

    def best(self, collective: str, whole_bytes: float, largest: float = 1.0) -> Way:
        return self.way


def work(*seconds: tuple[float, float], by: Cut | None = ROWS, backward: bool = False) -> Compute:
    return Compute("node", backward, tuple(Affine(*pair) for pair in seconds), by)


def sent(size: int, *cuts: Cut, hides: bool = False, ahead: bool = False) -> Transfer:
    collective = "all_gather" if ahead else "all_reduce" if hides else "all_to_all"
    return Transfer("t", collective, size, cuts, hides, ahead)


def schedule_of(*items: Item, backward: Sequence[Item] = (), optimizer: Sequence[Compute] = ()) -> Schedule:
    return Schedule(items, tuple(backward), tuple(optimizer))


def equal(cluster: Cluster) -> Shares:
    return Shares((1 / cluster.devices,) * cluster.devices)


def per_device(cluster: Cluster, *shares: Sequence[float], names: Sequence[str] = ("",)) -> Shares:
    """Shares of one device of each kind, for each name, as shares of every device."""
    expanded = [
        tuple(share for share, kind in zip(each, cluster.kinds, strict=True) for _ in range(kind.devices))
        for each in shares
    ]
    return Shares(expanded[0], tuple(zip(names[1:], expanded[1:], strict=True)))


def solve(schedule: Schedule, cluster: Cluster, way: Way = PADDED, held: Sequence[Holding] = ()) -> Balance:
    return balance(schedule, held, cluster, OneWay(cluster, way), reference=equal(cluster))


def random_point(rng: random.Random, cluster: Cluster) -> tuple[float, ...]:
    parts = [rng.expovariate(1.0) * rng.choice((0.0, 1.0, 1.0, 1.0)) for _ in cluster.kinds]
    parts = parts if sum(parts) else [1.0] * len(parts)
    return tuple(part / sum(parts) / kind.devices for part, kind in zip(parts, cluster.kinds, strict=True))


# Schedules at random: every manner of item, names and lengths mixed

CUTS: tuple[Cut, ...] = (("", 64), ("", 12), ("state", 640), ("tail", 64))


@st.composite
def affine(draw: st.DrawFn) -> tuple[float, float]:
    return draw(st.sampled_from((0.0, 1e-3, 0.02))), draw(st.sampled_from((0.1, 0.3, 1.0, 4.0)))


@st.composite
def schedules(draw: st.DrawFn, kinds: int) -> Schedule:
    def compute() -> Compute:
        by = draw(st.sampled_from((*CUTS, None)))
        seconds = [draw(affine()) for _ in range(kinds)]
        return work(*seconds, by=by) if by else work(*((a, b / 50) for a, b in seconds), by=None)

    def transfer() -> Transfer:
        cuts = draw(st.sampled_from([(), *((c,) for c in CUTS), (CUTS[0], CUTS[2])]))
        size = draw(st.sampled_from((10**6, 2 * 10**7, 10**8, 3 * 10**8)))
        manner = draw(st.sampled_from(((False, False), (True, False), (True, True))))
        return sent(size, *cuts, hides=manner[0], ahead=manner[1])

    def items(most: int) -> list[Item]:
        return [compute() if draw(st.booleans()) else transfer() for _ in range(draw(st.integers(0, most)))]

    def gradients(item: Item) -> bool:
        return isinstance(item, Transfer) and item.hides and not item.ahead

    forward = [item for item in items(6) if not gradients(item)]
    optimizer = [compute() for _ in range(draw(st.integers(0, 2)))]
    return schedule_of(compute(), *forward, backward=[compute(), *items(8)], optimizer=optimizer)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cluster, Schedule, Way]:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    way = draw(st.sampled_from((PADDED, GROUPED, Way("any", "both", 1e-4, 2e-9, 5e-10))))
    return cluster_of(*counts), draw(schedules(len(counts))), way


NAMES = ("", "state", "tail")


@given(cases(), st.integers(0, 10**6))
def test_no_other_point_is_faster(case: tuple[Cluster, Schedule, Way], seed: int) -> None:
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


@given(cases(), st.integers(0, 10**6), st.lists(st.integers(1, 8), min_size=3, max_size=3))
def test_no_other_point_that_fits_is_faster(
    case: tuple[Cluster, Schedule, Way], seed: int, memory: list[int]
) -> None:
    cluster, schedule, way = case
    network, rng = OneWay(cluster, way), random.Random(seed)
    held = [Holding("w", "parameter", 8, None), Holding("x", "saved", 10 * GB, CUTS[0])]
    held += [Holding("m", "optimizer", 20 * GB, CUTS[2]), Holding("y", "saved", 5 * GB, CUTS[3])]
    limits = [size * GB * 2 for size in memory[: len(cluster.kinds)]]
    reference = equal(cluster)

    def fits(points: Sequence[Sequence[float]]) -> bool:
        parts = [held[0].bytes + sum(h.bytes * p[k] for h, p in zip(held[1:], (points[0], points[1], points[2]), strict=True)) for k in range(len(limits))]
        return all(part <= limit for part, limit in zip(parts, limits, strict=True))

    try:
        found = balance(schedule, held, cluster, network, reference=reference, names=NAMES, memory_limits=limits)
    except DoesNotFitError:
        points = [[random_point(rng, cluster) for _ in NAMES] for _ in range(200)]
        coarse = min(kind.devices for kind in cluster.kinds) > 0 and CUTS[1][1] < 64  # only whole units may be at fault
        assert coarse or not any(map(fits, points))
        return
    assert all(size <= limit + 1 for size, limit in zip(found.memory_bytes, limits, strict=True))
    for _ in range(60):
        points = [random_point(rng, cluster) for _ in NAMES]
        if fits(points):
            other = predicted(schedule, network, cluster, per_device(cluster, *points, names=NAMES))
            assert other >= found.objective_s * (1 - 1e-6)


@given(cases())
def test_the_step_in_whole_units_is_the_timelines(case: tuple[Cluster, Schedule, Way]) -> None:
    cluster, schedule, _ = case
    network = Network(cluster)  # with all its ways
    found = balance(schedule, (), cluster, network, reference=equal(cluster))
    run = timeline.run(schedule, network, Scale(cluster, found.shares))
    assert found.rounded_s == pytest.approx(run.step_s, rel=1e-9)
    assert predicted(schedule, network, cluster, found.shares) == pytest.approx(found.objective_s, rel=1e-9)
    assert found.objective_s <= found.bound_s * (1 + 1e-6)


@given(cases())
def test_whole_units_are_never_worse_than_the_nearest(case: tuple[Cluster, Schedule, Way]) -> None:
    cluster, schedule, way = case
    network = OneWay(cluster, way)
    found = solve(schedule, cluster, way)
    near = replace(found.shares, cuts=())
    assert found.rounded_s <= timeline.run(schedule, network, Scale(cluster, near)).step_s * (1 + 1e-12)
    for _, length, pieces in found.shares.cuts:
        assert sum(pieces) == length
        for start, stop in cluster.spans:
            assert max(pieces[start:stop]) - min(pieces[start:stop]) <= 1


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
        def best(self, collective: str, whole_bytes: float, largest: float = 1.0) -> Way:
            ways = (Way("any", "padded", 0.0, 0.0, 1e-9), Way("any", "grouped", 0.0, 1.2e-9, 0.0))
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


def test_a_unit_that_fits_nowhere_is_named() -> None:
    cluster = cluster_of(1, 1, memory=(6 * 2**30, 6 * 2**30))
    held = (Holding("experts", "parameter", 12 * 2**30, ("state", 3)),)
    with pytest.raises(DoesNotFitError, match=r"experts"):
        solve(schedule_of(work((0, 1), (0, 1))), cluster, held=held)


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


# Whole units


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
    """Three units by speed 3:1 are 2.25 and 0.75: nearest is (2, 1), but a unit takes the slow device three times as
    long, so all three on the fast one end no later."""
    cluster = cluster_of(1, 1)
    found = solve(schedule_of(work((0, 1.0), (0, 3.5), by=("", 3))), cluster)
    assert cut(3, found.shares.work) == (2, 1)
    assert found.shares.cut(3) == (3, 0)


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


def test_the_same_every_time() -> None:
    cluster = load_cluster("hap-4")
    layer = [work(*((1e-3, 1 / k.speed * 1e12) for k in cluster.kinds)), sent(10**8, ROWS), sent(10**8, hides=True)]
    results = {
        balance(schedule_of(*layer, backward=layer), (), cluster, Network(cluster), reference=equal(cluster)).shares
        for _ in range(3)
    }
    assert len(results) == 1
