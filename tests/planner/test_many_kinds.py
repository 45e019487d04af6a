"""Many kinds of devices: the work of planning grows with their number at most linearly, and more is never worse."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Kind, Link, parts
from lopsided.cluster.cluster_file import load_cluster
from lopsided.cluster.collectives import Network
from lopsided.errors import DoesNotFitError
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner import part_search, proposals, worth
from lopsided.planner.balance import balance
from lopsided.planner.candidates import BETTER, memory_limits
from lopsided.planner.pins import limits_of
from lopsided.planner.planner import plan_graph
from lopsided.schedule import timeline
from lopsided.schedule.cost import Affine, Scale, optimizer_named
from lopsided.schedule.decisions import BUCKET_BYTES
from tests.support.schedules import Work, schedule_of


def kind(name: str, speed: float, *, count: int = 1, node: str = "", nodes: int = 1, gib: float = 16) -> Kind:
    return Kind(name, node or name, nodes, count, (("f32", speed * 1e12),), speed * 1e11, int(gib * 2**30), 1e-6)


def cluster_of(*kinds: Kind, within: float = 5e10, between: float = 5e9) -> Cluster:
    return Cluster("many", "", kinds, Link(1e-6, within), Link(5e-6, between))


def all_different(count: int, *, each: int = 1, seed: int = 0) -> Cluster:
    """So many kinds with speeds between 2 and 8 TFLOP/s, in nodes of their own."""
    state = random.Random(seed)
    return cluster_of(*(kind(f"d{k}", 2 * 4 ** state.random(), count=each) for k in range(count)))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(*load("gpt2:layers=2,width=128", batch=64))


def pool_of(graph: Graph) -> proposals.CandidatePool:
    book = derive_rules(graph)
    return proposals.CandidatePool(graph, book, optimizer_named("adamw"), limits_of(book, (), math.inf), lambda _: None)


class Counted:
    """What a plan takes, in calls."""

    def __init__(self, graph: Graph, on: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = dict.fromkeys(("search", "balance", "run"), 0)
        with monkeypatch.context() as patched:
            for name in self.calls:
                patched.setattr(proposals, name, self._counted(name))
            self.plan = plan_graph(graph, on)

    def _counted(self, name: str) -> object:
        called = getattr(proposals, name)

        def count(*args: object, **options: object) -> object:
            self.calls[name] += 1
            return called(*args, **options)

        return count


def test_work_does_not_grow_faster_than_the_number_of_kinds(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (Counted(graph, all_different(count), monkeypatch) for count in (6, 24))
    assert many.plan.on.devices > 6
    for name, calls in few.calls.items():
        assert many.calls[name] <= 24 / 6 * calls, name


def test_work_does_not_grow_with_the_number_of_devices_of_a_kind(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (Counted(graph, all_different(5, each=each), monkeypatch) for each in (40, 800))
    for name, calls in few.calls.items():
        assert many.calls[name] <= 2 * calls, name  # of twenty times as many devices


def test_a_plan_for_many_kinds_is_the_same_every_time(graph: Graph) -> None:
    first, second = (plan_graph(graph, all_different(9)) for _ in range(2))
    assert (first.program, first.shares, first.without_device) == (second.program, second.shares, second.without_device)


@pytest.mark.parametrize("count", [8, 64, 512])
def test_parts_are_as_many_as_the_logarithm(count: int) -> None:
    state = random.Random(1)
    on = cluster_of(*(kind(f"d{k}", 1 + state.random(), gib=16 + k % 7) for k in range(count)))
    found = [*parts(on, "f32")]
    assert len({part.fingerprint for part in found}) == len(found) <= 4 * count.bit_length()
    assert all(1 < part.devices < on.devices for part in found)


# Never worse for having more

KINDS = st.tuples(st.sampled_from((0.3, 1.0, 2.0, 8.0)), st.integers(1, 3), st.sampled_from((0.05, 1.0, 16.0)))


@settings(max_examples=9, deadline=None)
@given(
    st.lists(KINDS, min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from((1e7, 1e9, 1e11)),
    st.data(),
)
def test_a_plan_is_never_slower_than_that_for_a_part(
    graph: Graph, kinds: list[tuple[float, int, float]], one_node: bool, bytes_per_s: float, data: st.DataObject
) -> None:
    described = (
        kind(f"d{k}", speed, count=count, gib=gib, node="box" if one_node else "")
        for k, (speed, count, gib) in enumerate(kinds)
    )
    on = cluster_of(*described, within=10 * bytes_per_s, between=bytes_per_s)
    kept = data.draw(st.sets(st.sampled_from(range(len(kinds))), min_size=1), label="kinds of the part")
    part = on.only(kept)
    if part.devices > 1 and data.draw(st.booleans(), label="one device fewer"):
        part = part.without_device(data.draw(st.sampled_from(part.device_names), label="without"))
    try:
        of_part = plan_graph(graph, part)
    except DoesNotFitError:
        return
    assert plan_graph(graph, on).step_s <= of_part.step_s / BETTER * (1 + 1e-9)


def test_what_is_learned_on_devices_belongs_to_them(graph: Graph) -> None:
    """A slow network between the boxes teaches the search that nothing hides; inside a box that is wrong."""
    fast = kind("fast", 8, count=4)
    on = cluster_of(fast, kind("slow", 0.5, count=4), within=1e11, between=1e6)
    assert plan_graph(graph, on).step_s <= plan_graph(graph, cluster_of(fast, within=1e11)).step_s / BETTER


@pytest.mark.parametrize("between", [5e9, 5e10])
def test_as_many_of_the_fastest_are_used_as_pay(graph: Graph, between: float) -> None:
    """Fifteen of twenty-four are neither half of them nor all but one, two, four or eight."""
    speeds = [8 + k / 100 if k < 15 else (1 + k / 100) / 40 for k in range(24)]
    on = cluster_of(*(kind(f"d{k}", speed) for k, speed in enumerate(speeds)), between=between)
    assert plan_graph(graph, on).step_s <= plan_graph(graph, on.only(range(15))).step_s / BETTER * (1 + 1e-9)


# What devices are worth


def test_worth_by_estimate_is_near_worth_by_planning(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    on = all_different(6)
    estimated = dict(plan_graph(graph, on).without_device)
    monkeypatch.setattr(worth, "_FEW_GROUPS", 100)
    planned = dict(plan_graph(graph, on).without_device)
    assert estimated.keys() == planned.keys()
    for name, step_s in planned.items():
        assert estimated[name] == pytest.approx(step_s, rel=0.05), name


def test_a_quicker_device_is_worth_more(graph: Graph) -> None:
    on = all_different(12)
    made = plan_graph(graph, on)
    assert all(step_s >= made.step_s for _, step_s in made.without_device)
    speeds = dict(zip(on.device_names, (kind.speed for kind in on.kinds), strict=True))
    order = sorted(speeds, key=speeds.__getitem__)
    without = dict(made.without_device)
    assert without[order[-1]] > without[order[0]]


def test_an_estimate_of_all_devices_is_near_their_step(graph: Graph) -> None:
    on = all_different(8)
    made = plan_graph(graph, on)
    pool = pool_of(graph)
    judged = pool.judge("known", made.on, made.program, made.shares, made.regather, bucket_bytes=made.bucket_bytes)
    estimated = pool.estimate(judged).on(made.on, memory_limits(made.on))
    assert estimated.step_s == pytest.approx(made.step_s, rel=0.1)
    assert estimated.fits


# Whole units


def test_whole_units_of_many_kinds_are_no_worse_than_the_nearest() -> None:
    state = random.Random(3)
    on = all_different(12, each=2)
    computes = tuple(
        Work(
            tuple(Affine(state.uniform(0, 1e-3), state.uniform(0.5, 2) * 1e12 / kind.speed) for kind in on.kinds),
            ("", length),
        )
        for length in (37, 100, 4096)
    )
    schedule, network = schedule_of(*computes), Network(on)
    equal = Shares((1 / on.devices,) * on.devices)
    found = balance(schedule, (), on, network, reference=equal)
    near = replace(found.shares, cuts=())
    assert found.rounded_s <= timeline.run(schedule, network, Scale(on, near)).step_s * (1 + 1e-12)
    assert found.rounded_s <= found.objective_s * 1.2


def test_part_search_is_a_function_of_the_part(graph: Graph) -> None:
    """The same devices lead to the same candidates, whatever was searched before."""
    small = all_different(2, each=2)
    steps = []
    for before in ((), (all_different(2, each=3, seed=5),)):
        pool = pool_of(graph)
        list(pool.classics(small))
        pool.best = None
        for on in (*before, small):
            part_search.PartSearch(pool, on).improve()
            pool.best = None
        steps.append(pool.of_part[small.fingerprint].step_s)
    assert steps[0] == steps[1]


def test_a_program_may_send_more_at_a_time_than_suits_data_parallelism(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = replace(cluster_of(kind("d", 8, count=4)), within=Link(1e-4, 1e10))
    steps = []
    for size in (2**14, BUCKET_BYTES):
        pool = pool_of(graph)
        monkeypatch.setattr(pool, "bucket_on", lambda _, size=size: size)
        part_search.PartSearch(pool, on).improve()
        steps.append(pool.of_part[on.fingerprint].step_s)
    assert steps[0] <= steps[1] * (1 + 1e-9)


def test_a_part_is_not_left_for_the_first_estimate_where_data_parallelism_is_near_the_best() -> None:
    """As if nothing could hide, tensor parallelism is found first, and takes far longer than data parallelism does."""
    graph, on = capture(*load("vit:layers=2", batch=32)), load_cluster("2xA6000+2x2080Ti").only([0])
    steps = []
    for known in (True, False):
        pool = pool_of(graph)
        list(pool.classics(on))
        list(pool.plain_balanced(on))
        if not known:
            pool.best = None
        part_search.PartSearch(pool, on).improve()
        steps.append(pool.of_part[on.fingerprint].step_s)
    assert steps[0] == steps[1]
