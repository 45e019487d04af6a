"""The folded step: as long as the timeline's, and as its longest path."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import Algorithm, Network
from lopsided.schedule import timeline
from lopsided.schedule.cost import Scale
from lopsided.schedule.critical_path import CriticalPath, FoldedStep, FractionalShares, MemoryRows, Path, Sizes
from lopsided.schedule.memory import Holding, bytes_per_kind
from lopsided.schedule.pricing import PricedStep
from lopsided.schedule.schedule import GatherBucket
from tests.support.schedules import (
    NAMES,
    PADDED,
    ROWS,
    cases,
    cluster_of,
    in_rounds,
    per_device,
    random_point,
    schedule_of,
    sent,
    work,
)


def length_s(path: Path | None, load: FoldedStep, walk: CriticalPath, sizes: Sizes) -> float:
    total = 0.0
    while path is not None:
        computed = load.joined(load.computed(path.start, path.stop)).at(sizes)
        total += max(computed) if path.message < 0 else walk.prices[path.message]
        path = path.before
    return total


@given(cases(), st.integers(0, 10**6))
def test_a_walk_takes_as_long_as_the_timeline(case: tuple[Cluster, PricedStep, Algorithm], seed: int) -> None:
    cluster, schedule, _ = case
    rng = random.Random(seed)
    network = Network(cluster)
    shares = per_device(cluster, *(random_point(rng, cluster) for _ in NAMES), names=NAMES)
    scale, load = Scale(cluster, shares), FoldedStep(schedule, network)
    walk = CriticalPath(load, scale, load.ways(network, scale))
    assert walk.step_s == pytest.approx(timeline.run(schedule, network, scale).step_s, rel=1e-9)
    assert walk.step_s == pytest.approx(length_s(walk.path, load, walk, scale), rel=1e-9)


@given(cases(), st.integers(0, 10**6), st.sampled_from((2, 3, 17)), st.booleans())
def test_many_rounds_are_folded_into_three(
    case: tuple[Cluster, PricedStep, Algorithm], seed: int, count: int, regather: bool
) -> None:
    """As long as nothing is under way from one round to the next, this is as exact as with one."""
    cluster, once, _ = case
    rng = random.Random(seed)
    network, priced = Network(cluster), in_rounds(once, count, regather=regather)
    shares = per_device(cluster, *(random_point(rng, cluster) for _ in NAMES), names=NAMES)
    scale, load = Scale(cluster, shares), FoldedStep(priced, network)
    walk = CriticalPath(load, scale, load.ways(network, scale))
    assert walk.step_s == pytest.approx(length_s(walk.path, load, walk, scale), rel=1e-9)
    assert len(load.events) <= 4 * len(FoldedStep(once, network).events)
    ahead = any(isinstance(item, GatherBucket) and item.hides for item in once.schedule.passes)
    if count <= 3 or not ahead:
        assert walk.step_s == pytest.approx(timeline.run(priced, network, scale).step_s, rel=1e-9)


def test_equal_layers_are_kept_once() -> None:
    layer = [work((0.01, 1), (0.02, 3)), sent(10**8, ROWS), work((0.0, 2), (0.01, 1)), sent(10**6)]
    load = FoldedStep(schedule_of(*(layer * 80)), Network(cluster_of(1, 1)))
    assert (len(load.segments), len(load.messages)) == (2, 2)
    assert list(load.stages.values()) == [80, 80]


def test_gathers_of_each_pass_are_waited_for() -> None:
    """Both passes gather three buckets, two at once: the third waits for the consumer of the second."""
    second, consumer = 10**9, work((1.0, 0.0), by=None)
    items = [sent(second, hides=True, ahead=True), consumer] * 3
    load = FoldedStep(schedule_of(*items, backward=items), Network(cluster_of(1)))
    walk = CriticalPath(load, FractionalShares({"": (1.0,)}, (1,)), [PADDED])
    # One second and a millisecond each, one after the other; each pass ends with the last of its consumers.
    assert walk.step_s == pytest.approx(2 * (3 * 1.001 + 1.0), rel=1e-6)


def test_what_is_held_is_what_memory_says() -> None:
    cluster = cluster_of(1, 2)
    scale = Scale(cluster, (0.5, 0.3, 0.2))
    held = (Holding("x", "saved", 1000, ("", 10)), Holding("y", "saved", 50, None), Holding("z", "saved", 70, ("", 7)))
    memory = MemoryRows(cluster, held, (590.0, 500.0))
    assert memory.held(scale) == pytest.approx(bytes_per_kind(held, scale))
    assert memory.held(scale, but=("", 10)) == pytest.approx(bytes_per_kind(held[1:], scale))
    assert memory.over(scale) == [0.0, 0.0]
    assert memory.tightened((100.0, 0.0)).over(scale) == [100.0, 0.0]


def test_what_is_sent_behind_computing_slows_it() -> None:
    """A gradient takes two seconds behind ten of computing: with a slowdown of a quarter, half a second is lost."""
    plain = cluster_of(1, 1)
    dragged = replace(plain, kinds=tuple(replace(kind, compute_slowdown=0.25) for kind in plain.kinds))
    gradient = sent(10**9, hides=True)
    items = schedule_of(backward=[gradient, work((10.0, 0.0), (10.0, 0.0), by=None)])
    scale = Scale(plain, (0.5, 0.5))
    took = [timeline.run(items, Network(on), Scale(on, (0.5, 0.5))) for on in (plain, dragged)]
    sending = Network(plain).best(gradient.collective, 10**9).seconds(10**9)
    assert took[1].step_s - took[0].step_s == pytest.approx(0.25 * sending)
    assert took[1].lanes[0].compute_s - took[0].lanes[0].compute_s == pytest.approx(0.25 * sending)
    walks = [
        CriticalPath(load := FoldedStep(items, Network(on)), scale, load.ways(Network(on), scale))
        for on in (plain, dragged)
    ]
    assert [walk.step_s for walk in walks] == pytest.approx([one.step_s for one in took])
    # Who stands still anyway loses nothing.
    idle = schedule_of(backward=[gradient])
    alone = [timeline.run(idle, Network(on), Scale(on, (0.5, 0.5))).step_s for on in (plain, dragged)]
    assert alone[0] == pytest.approx(alone[1])


@pytest.mark.parametrize(("computing_s", "step_s"), [(1.0, 1 + 1.5), (3.0, 3 + 0.5), (4.0, 4.0), (9.0, 9.0)])
def test_what_is_sent_behind_computing_takes_longer_until_it_is_awaited(computing_s: float, step_s: float) -> None:
    """Two seconds alone are four beside computing: after one second of it, a quarter is through."""
    plain = cluster_of(1, 1)
    gradient = sent(10**9, hides=True)
    sending = Network(plain).best(gradient.collective, 10**9).seconds(10**9)
    computing = work(*[(computing_s * sending / 2, 0.0)] * 2, by=None)
    items, on = schedule_of(backward=[gradient, computing], bucket_bytes=1), replace(plain, comm_slowdown=2.0)
    took = timeline.run(items, Network(on), Scale(on, (0.5, 0.5)), events=True)
    assert took.step_s == pytest.approx(step_s * sending / 2)
    assert took.exposed_s == pytest.approx((step_s - computing_s) * sending / 2)


def test_transfers_in_a_row_overlap_but_for_the_last() -> None:
    """At a slowdown of a half, three that take two seconds each are through after one, two and four."""
    on = replace(cluster_of(1, 1), comm_slowdown=0.5)
    gradient = sent(10**9, hides=True)
    taken = Network(on).best(gradient.collective, 10**9).seconds(10**9)
    alone = timeline.run(schedule_of(backward=[gradient], bucket_bytes=1), Network(on), Scale(on, (0.5, 0.5)))
    three = timeline.run(schedule_of(backward=[gradient] * 3, bucket_bytes=1), Network(on), Scale(on, (0.5, 0.5)))
    assert alone.step_s == pytest.approx(taken)
    assert three.step_s == pytest.approx(2 * taken)


def test_what_is_not_awaited_is_slow_again() -> None:
    """Of two buckets that are gathered at once the first is awaited, and the second runs on beside computing."""
    on = replace(cluster_of(1, 1), comm_slowdown=2.0)
    gather = sent(10**9, hides=True, ahead=True)
    computing = work((1.0, 0.0), (1.0, 0.0), by=None)
    taken = Network(on).best(gather.collective, 10**9).seconds(10**9)
    short = schedule_of(gather, computing, gather, computing, bucket_bytes=1)
    took = timeline.run(short, Network(on), Scale(on, (0.5, 0.5)), events=True)
    spans = [(event.start_s, event.end_s) for event in took.events if event.lane == timeline.NETWORK]
    assert spans[0] == pytest.approx((0.0, taken))
    # One second of computing is half a second of sending.
    assert spans[1] == pytest.approx((taken, taken + 1 + taken - 0.5))
    assert took.step_s == pytest.approx(spans[1][1] + 1)
