"""Fits find the numbers that points were made of, and slow pairs are found. Real processes, no asserted times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lopsided.cluster.collectives import Algorithm, Network
from lopsided.cluster.devices import Link
from lopsided.comm.communicator import Communicator
from lopsided.comm.worker_pool import WorkerPool
from lopsided.profiling import links
from lopsided.profiling.links import ControlGroup, Fit, LinkSample, Talkers, fit_ways, fitted, line_through
from lopsided.profiling.noise import BackgroundLoad
from lopsided.profiling.overlap import measure_overlap
from tests.support import clusters

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("points", "constant", "slope"),
    [
        ([(1.0, 3.0), (2.0, 5.0), (10.0, 21.0)], 1.0, 2.0),
        ([(1.0, 4.0), (2.0, 4.0)], 4.0, 0.0),
        ([(1.0, 2.0), (2.0, 4.0)], 0.0, 2.0),
        ([(5.0, 2.0)], 0.0, 0.4),
    ],
)
def test_a_line_is_found(points: list[tuple[float, float]], constant: float, slope: float) -> None:
    assert line_through(points) == pytest.approx((constant, slope, 0.0), abs=1e-9)


def test_no_part_of_a_line_is_negative() -> None:
    assert line_through([(1.0, 1.0), (2.0, 4.0)])[0] == pytest.approx(0, abs=1e-12)
    assert line_through([(1.0, 4.0), (2.0, 1.0)])[1] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("skew", [0.0, 0.3, 1.0])
def test_latency_bytes_and_skew_are_found(skew: float) -> None:
    way = Algorithm("all_gather", "padded", 2e-4, (1 - skew) * 1e-9, skew * 1e-9)
    points = [
        LinkSample(size, largest, way.seconds(size, largest))
        for largest, sizes in ((1.0, (2**12, 2**17, 2**22)), (2.2, (2**20, 2**22)))
        for size in sizes
    ]
    fit = fitted("all_gather", "padded", points)
    assert (fit.link.latency_s, fit.link.bytes_per_s, fit.link.skew) == pytest.approx((2e-4, 1e9, skew), abs=1e-6)
    assert fit.error == pytest.approx(0, abs=1e-9)
    # As a cluster has it, it gives the same prices.
    assert way.seconds(2**21, 1.7) == pytest.approx(_way(fit).seconds(2**21, 1.7))


def _way(fit: Fit) -> Algorithm:
    measured = ((fit.collective, fit.way, fit.link),)
    cluster = clusters.cluster(clusters.kind(count=4), link=Link(1e-4, 1e9), collectives=measured)
    return next(way for way in Network(cluster).ways(fit.collective) if way.implementation == fit.way)


def test_points_that_shook_count_less() -> None:
    points = [
        LinkSample(2**12, 1.0, 1e-3),
        LinkSample(2**20, 1.0, 1e-3 + 2**20 * 1e-9),
        LinkSample(2**22, 1.0, 1e-3 + 2**22 * 1e-9),
    ]
    wrong = replace(points[0], seconds=2e-3)
    believed = fitted("all_reduce", "ring", [wrong, *points[1:]]).link.latency_s
    doubted = fitted("all_reduce", "ring", [replace(wrong, noise=1.0), *points[1:]]).link.latency_s
    assert abs(doubted - 1e-3) < abs(believed - 1e-3)
    assert fitted("all_reduce", "ring", points).link.skew is None


# In processes


def talkers() -> Talkers:
    group = dist.group.WORLD
    cluster = clusters.cluster(clusters.kind(count=dist.get_world_size()), link=Link(1e-4, 1e9))
    assert group is not None
    return Talkers(
        Communicator(group, CPU, Network(cluster)), ControlGroup(group), BackgroundLoad(CPU), CPU, torch.float32
    )


def fit_some() -> tuple[tuple[Fit, ...], int]:
    steps = list[int]()
    ways = (("all_reduce", "ring"), ("all_gather", "grouped"), ("all_to_all", "direct"))
    fits = fit_ways(talkers(), 0.4, ways, (0.5, 0.3, 0.2), lambda: steps.append(1))
    return fits, len(steps)


def test_all_ranks_fit_the_same(worker_pools: Callable[[int], WorkerPool]) -> None:
    (fits, steps), *others = worker_pools(3).run(fit_some)
    assert all(other == (fits, steps) for other in others)
    assert steps == 6
    assert {point.largest > 1.4 for point in fits[0].points} == {False}
    for fit in fits[1:]:
        assert fit.link.skew is not None
        assert {point.largest > 1.4 for point in fit.points} == {False, True}
    assert all(point.seconds > 0 for fit in fits for point in fit.points)


def beside() -> tuple[float, float]:
    found = measure_overlap(talkers(), 2**20, 0.2)
    return found.compute_slowdown, found.comm_slowdown


def test_the_compute_slowdown_is_a_part_and_the_comm_slowdown_is_agreed_on(
    worker_pools: Callable[[int], WorkerPool],
) -> None:
    found = worker_pools(2).run(beside)
    assert all(0 <= slowdown <= 1 for slowdown, _ in found)
    assert found[0][1] == found[1][1] > 0


def pairs(slow: bool) -> tuple[Link, tuple[tuple[str, str, Link], ...]]:
    """As if what rank 2 sends and receives went over a slow link."""
    real = links._between
    made = talkers()

    def between(talkers: Talkers, one: int, other: int) -> Link:
        link = real(talkers, one, other)
        assert link.bytes_per_s > 0
        return Link(1e-3, 1e6) if slow and 2 in (one, other) else Link(1e-4, 1e9)

    links._between = between
    try:
        return links.unlike_pairs(made, ["a", "b", "c"], Link(5e-4, 5e8))
    finally:
        links._between = real


def test_slow_pairs_are_told_from_the_others(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert worker_pools(3).run(pairs, False)[0] == (Link(5e-4, 5e8), ())
    near, found = worker_pools(3).run(pairs, True)[0]
    assert near == Link(1e-4, 1e9)
    assert found == (("a", "c", Link(1e-3, 1e6)), ("b", "c", Link(1e-3, 1e6)))
