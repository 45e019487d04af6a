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
from lopsided.runtime.measure_among import known_among, parts_to_ask
from lopsided.runtime.measure_links import WAYS, Fit, Talkers, fit_ways


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


def test_what_unequal_pieces_cost_is_taken_from_all() -> None:
    cluster = hosts(4e9, 1e9, 2e9, 1e9)
    measured = (("all_reduce", "ring", Link(3e-3, 1e8)), ("all_gather", "padded", Link(1e-3, 1e8, 0.75)))
    fits = [Fit(c, way, Link(link.latency_s / 2, 1e9), 0.0) for c, way, link in measured]
    part = known_among(replace(cluster, collectives=measured), ("box1/cpu-1", "box3/cpu-1"), fits, 1.5, [0.1, 0.2])
    assert (part.stretch, part.drag) == (1.5, (0.1, 0.2))
    assert part.collectives == (
        ("all_reduce", "ring", Link(1.5e-3, 1e9)),
        ("all_gather", "padded", Link(5e-4, 1e9, 0.75)),
    )


def asked(graph: Graph) -> tuple[Cluster, list[int]]:
    """In a worker: the cluster, and how many talked each time."""
    sizes = []

    def noted(talkers: Talkers, budget_s: float, **more: object) -> tuple[Fit, ...]:
        sizes.append(talkers.wire.size)
        return real(talkers, budget_s, **more)  # type: ignore[arg-type]

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
    assert [sizes for _, sizes in told] == [[3, 2], [3, 2], [3]]
    (part,) = told[0][0].among
    assert part.devices == told[0][0].device_names[:2]
    assert {way[:2] for way in part.collectives} == {*WAYS}
    assert len(part.drag) == 2
    assert told[0][0].only([0, 1]).collectives == part.collectives
    assert told[0][0].only([0, 1]).stretch == part.stretch
