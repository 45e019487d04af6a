"""Parts of a cluster are asked how fast they talk, and told apart from what all of it lets expect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lopsided import zoo
from lopsided.capture import capture
from lopsided.cluster import Cluster
from lopsided.devices import Kind, Link
from lopsided.graph import Graph
from lopsided.processes import Crew
from lopsided.runtime import measure as room
from lopsided.runtime.measure import take_measurement
from lopsided.runtime.measure_among import factor_of, parts_to_ask
from lopsided.runtime.measure_links import Fit, Point, fit_ways


def hosts(*speeds: float, count: int = 1) -> Cluster:
    kinds = [Kind("cpu", f"box{k}", 1, count, (("f32", speed),), 1e10, 2**30, 0.0) for k, speed in enumerate(speeds, 1)]
    link, measured = Link(1e-4, 1e9), (("all_reduce", "ring", Link(3e-3, 1e8)),)
    return Cluster("measured", "", tuple(kinds), link, link, measured)


@pytest.mark.parametrize(
    ("cluster", "parts"),
    [
        (hosts(4e9, 1e9, 2e9, 1e9), [(0, 1, 2), (0, 2)]),
        (hosts(1e9, 2e9), []),
        (hosts(1e9, 2e9, count=2), [(1,)]),
        (hosts(2e9, 2e9, 1e9), [(0, 1)]),
        (hosts(*[1e9] * 16), [tuple(range(12)), tuple(range(8)), tuple(range(4))]),
    ],
)
def test_the_fastest_are_asked(cluster: Cluster, parts: list[tuple[int, ...]]) -> None:
    assert [*parts_to_ask(cluster)] == parts


def test_a_factor_is_what_was_measured_over_what_was_to_be_expected() -> None:
    part = hosts(4e9, 1e9, 2e9, 1e9).only([0, 2])
    *_, link = part.collectives[0]

    def fit(factor: float, *sizes: float) -> Fit:
        points = [Point(size, 1.0, factor * (link.latency_s + size / link.bytes_per_s)) for size in sizes]
        return Fit("all_reduce", "ring", link, 0.0, 0.0, tuple(points))

    assert factor_of(part, fit(0.4, 2**12, 2**20, 2**24)) == pytest.approx(0.4)
    assert factor_of(part, fit(1.7, 2**12)) == pytest.approx(1.7)
    assert factor_of(part, fit(1e6, 2**20)) == 100
    mixed = replace(fit(0.5, 2**20, 2**22), points=(*fit(9.0, 2**10).points, *fit(0.5, 2**20, 2**22).points))
    assert factor_of(part, mixed) == pytest.approx(0.5)  # small ones say little


def asked(graph: Graph) -> tuple[Cluster, list[int]]:
    """In a worker: the cluster, and how many talked when all_reduce alone was asked for."""
    sizes = []

    def noted(talkers: room.Talkers, budget_s: float, ways: object = room.WAYS, **more: object) -> tuple[Fit, ...]:
        if ways == (("all_reduce", "ring"),):
            sizes.append(talkers.wire.size)
        return real(talkers, budget_s, ways, **more)  # type: ignore[arg-type]

    real, room.fit_ways = fit_ways, noted
    real_kinds = room.kinds_of
    # Processes on one machine are alike: as if they were not.
    room.kinds_of = lambda *args: tuple(
        replace(real_kinds(*args)[0], name=f"cpu{k}", count=1, flops_per_s=(("f32", 1e9 * (3 - k)),)) for k in range(3)
    )
    try:
        found = take_measurement(graph, torch.device("cpu"), budget_s=1.0)
    finally:
        room.fit_ways, room.kinds_of = real, real_kinds
    return found.cluster, sizes


def test_all_know_how_fast_some_talk(crews: Callable[[int], Crew]) -> None:
    told = crews(3).run(asked, capture(*zoo.build("mlp", layers=1, width=16, classes=3, batch=6)))
    assert [cluster for cluster, _ in told] == [told[0][0]] * 3
    assert [sizes for _, sizes in told] == [[2], [2], []]
    ((names, factor),) = told[0][0].among
    assert names == told[0][0].device_names[:2]
    assert factor > 0
