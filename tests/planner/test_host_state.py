"""Optimizer state in host memory: what it frees and takes, and when the planner puts it there."""

from __future__ import annotations

from dataclasses import replace

import pytest

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Link
from lopsided.cluster.cluster_file import parse_cluster
from lopsided.errors import ClusterError, DoesNotFitError, PlanError, ProgramError
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel
from lopsided.planner.candidates import memory_limits
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import parse_plan, plan_text
from lopsided.planner.planner import plan_graph, predict
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.decisions import Decisions, OnHost, parse_on_host
from lopsided.schedule.host_state import host_bytes_per_kind, host_excess
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, holdings
from lopsided.schedule.pricing import price
from lopsided.schedule.schedule import check_schedule, parse_schedule
from tests.support import clusters, jobs
from tests.support.jobs import model_of

SPEC = "llama:layers=3,width=32,heads=4,kv_heads=2,ffn=56,seq=16,vocab=61,batch=64"
WIDE = "llama:layers=2,width=64,heads=4,kv_heads=2,ffn=112,seq=4,vocab=61,batch=4"
ADAMW = optimizer_named("adamw")


def pair(big: float, small: float, *, link: float = 0.0, host_mib: float = 0.0) -> Cluster:
    """A large and a small device with so many MiB, and a link to their host's memory of so many bytes a second."""
    made = (
        clusters.kind(
            name,
            speed=speed,
            bytes_per_s=speed,
            memory=int(size * 2**20),
            launch_s=1e-6,
            host_bytes_per_s=link,
            host_memory_bytes=int(host_mib * 2**20),
        )
        for name, speed, size in (("big", 4e9, big), ("small", 1e9, small))
    )
    return clusters.cluster(*made, link=Link(1e-5, 1e9))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(*model_of(SPEC))


@pytest.fixture(scope="module")
def wide() -> Graph:
    """Of few activations and much state."""
    return capture(*model_of(WIDE))


def trained_bytes(graph: Graph) -> int:
    return sum(leaf.value.bytes for leaf in graph.parameters if leaf.value.grad)


# The decision


@pytest.mark.parametrize("on_host", [(), (OnHost(0),), (OnHost(0, 40), OnHost(1, 100))])
def test_a_schedule_says_so_and_parses(graph: Graph, on_host: tuple[OnHost, ...]) -> None:
    schedule = lower(lopsided.one_device(graph), Decisions(on_host=on_host))
    check_schedule(schedule)
    assert parse_schedule(str(schedule), schedule.program) == schedule
    assert tuple(map(parse_on_host, map(str, on_host))) == on_host
    assert ("from host on 0" in str(schedule)) == bool(on_host)


def test_nonsense_is_refused(graph: Graph) -> None:
    for text in ("", "0", "0:0", "0:101", "a:3", "0:3:4", "-1:5"):
        with pytest.raises(ProgramError, match="whose optimizer state"):
            parse_on_host(text)
    program = lopsided.one_device(graph)
    for wrong in ((OnHost(0), OnHost(0, 3)), (OnHost(-1),), (OnHost(0, 200),)):
        with pytest.raises(ProgramError, match="give every kind of devices once"):
            lower(program, Decisions(on_host=wrong))
    with pytest.raises(ClusterError, match="host_bytes_per_s"):
        pair(1, 1, link=-1.0)
    with pytest.raises(ClusterError, match="host_memory"):
        pair(1, 1, host_mib=-1.0)
    text = pair(1, 1, link=1e9, host_mib=2048).text()
    assert parse_cluster(text) == pair(1, 1, link=1e9, host_mib=2048)
    for right, wrong, what in (
        ('host_memory = "2 GiB"', 'host_memory = "much"', "memory is 'much'"),
        ("host_bytes_per_s = 1000000000.0", "host_bytes_per_s = nan", "host_bytes_per_s"),
        ("launch_s = 1e-06", "launch_s = 1e-06\nmemory_reserve = 1.0", "memory_reserve is 1.0"),
    ):
        assert right in text
        with pytest.raises(ClusterError, match=what):
            parse_cluster(text.replace(right, wrong))


def test_device_bytes_fall_by_what_host_bytes_hold(graph: Graph) -> None:
    program, where = lopsided.one_device(graph), pair(640, 640, link=1e9).only([0])
    scale = Scale(where, (1.0,))
    whole = trained_bytes(graph)

    def held(*on_host: OnHost) -> tuple[int, int]:
        schedule = lower(program, Decisions(on_host=on_host))
        return (
            bytes_per_kind(holdings(schedule, ADAMW), scale)[0],
            host_bytes_per_kind(schedule, ADAMW, scale)[0],
        )

    none, half, full = held(), held(OnHost(0, 50)), held(OnHost(0))
    assert none[1] == 0
    assert none[0] - full[0] == 2 * whole
    assert 2 * whole <= full[1] < 4 * whole  # powers of two
    # By parameters, so not quite half.
    assert 0.9 * whole < none[0] - half[0] < 1.6 * whole
    assert held(OnHost(1))[0] == none[0]  # another kind's matter


def test_what_is_fetched_counts_where_little_else_is_held(wide: Graph) -> None:
    """In the update there is a slice of the state: where a step holds next to no activations, that is the peak."""
    schedule = lower(lopsided.one_device(wide), Decisions(on_host=(OnHost(0),)))
    held = holdings(schedule, ADAMW)
    scale = Scale(pair(640, 640, link=1e9).only([0]), (1.0,))
    streamed = sum(one.bytes for one in held if one.use == "streamed")
    stays = sum(one.bytes for one in held if one.use in ("parameter", "gradient", "buffer"))
    assert streamed >= 2 * 2 * max(leaf.value.bytes for leaf in wide.parameters)
    without = bytes_per_kind([one for one in held if one.use not in ("streamed",)], scale)[0]
    assert bytes_per_kind(held, scale)[0] == max(without, stays + streamed)


def test_fetching_takes_what_the_link_takes(graph: Graph) -> None:
    where, program = pair(640, 640, link=1e8), lopsided.one_device(graph)
    costs = Costs(graph, where, ADAMW)

    def update_s(*on_host: OnHost) -> list[float]:
        priced = price(lower(program, Decisions(on_host=on_host)), costs)
        return [sum(one.seconds[k].at(1.0) for one in priced.updates) for k in (0, 1)]

    before, after = update_s(), update_s(OnHost(1))
    assert after[0] == before[0]
    assert after[1] - before[1] == pytest.approx(2 * 2 * trained_bytes(graph) / 1e8)


def test_kinds_of_a_node_share_its_memory() -> None:
    roomy = pair(1, 1, host_mib=3)
    assert host_excess(roomy, (2**20, 2**21)) is None
    too_much = host_excess(roomy, (2**31, 2**31 + 3 * 2**20))
    assert too_much is not None
    assert "needs 4.0 GiB more" in too_much.what
    assert host_excess(pair(1, 1), (2**50, 2**50)) is None  # nobody said how much there is
    apart = roomy.kinds[0], replace(roomy.kinds[1], node="other")
    assert host_excess(replace(roomy, kinds=apart), (2**21, 2**21)) is None


# What the planner chooses


def small_of(graph: Graph, plenty: Plan, part: float, **more: float) -> Plan:
    large, small = (plenty.memory_bytes[place] / 2**20 / 0.92 for place in (0, -1))
    return plan_graph(graph, pair(part * large, part * small, **more), pins=("*=I",), microbatches=1)


@pytest.fixture(scope="module")
def plenty(wide: Graph) -> Plan:
    return plan_graph(wide, pair(640, 640, link=1e10), pins=("*=I",))


def test_nothing_is_on_the_host_where_all_fits(plenty: Plan) -> None:
    assert plenty.on_host == ()


@pytest.fixture(scope="module")
def short(wide: Graph, plenty: Plan) -> Plan:
    return small_of(wide, plenty, 0.8, link=1e10)


def test_state_is_on_the_host_where_it_must_be(short: Plan) -> None:
    assert short.on_host
    assert all(held <= limit for held, limit in zip(short.memory_bytes, memory_limits(short.on), strict=True))
    assert any(update.on_host for update in short.schedule.update)
    assert parse_plan(plan_text(short)) == short


def test_no_more_is_on_the_host_than_must_be(wide: Graph, short: Plan) -> None:
    less = tuple(OnHost(one.kind, one.percent // 2) for one in short.on_host if one.percent > 1)
    how = (short.optimizer, short.regather, short.bucket_bytes, short.reruns)
    step_s, _, memory = predict(short.program, short.shares, short.on, *how, less)
    assert step_s < short.step_s
    assert any(held > limit for held, limit in zip(memory, memory_limits(short.on), strict=True))


def test_nothing_is_there_without_a_link_or_room(wide: Graph, plenty: Plan) -> None:
    with pytest.raises(DoesNotFitError) as refused:
        small_of(wide, plenty, 0.8)
    assert "host" not in str(refused.value)
    with pytest.raises(DoesNotFitError, match="in the memory of box needs"):
        small_of(wide, plenty, 0.8, link=1e10, host_mib=0.001)


def test_the_quicker_of_fetching_and_running_again_is_taken(graph: Graph) -> None:
    """With a slow link all is made again; with a quick one the plan is never slower than without."""
    plenty = plan_graph(graph, pair(640, 640), pins=("*=I",))
    without = small_of(graph, plenty, 0.95)
    slow, quick = (small_of(graph, plenty, 0.95, link=link) for link in (1e3, 1e12))
    assert without.reruns
    assert slow.on_host == ()
    assert slow.step_s == pytest.approx(without.step_s)
    assert quick.step_s <= without.step_s * (1 + 1e-9)


def test_a_file_that_says_so_wrongly_is_refused(short: Plan) -> None:
    text = plan_text(short)
    first = f'"{short.on_host[0]}"'
    with pytest.raises(PlanError, match="has a kind 7"):
        parse_plan(text.replace(first, '"7:50"'))
    with pytest.raises(PlanError, match="whose optimizer state"):
        parse_plan(text.replace(first, '"all"'))
    edited = parse_plan(text.replace(first, f'"{short.on_host[0].kind}:100"', 1))
    assert edited.on_host[0].percent == 100
    assert edited.step_s != short.step_s or short.on_host[0].percent == 100


def test_an_optimizer_without_state_has_none_to_fetch(wide: Graph) -> None:
    shares = Shares((0.7, 0.3))
    program = data_parallel(derive_rules(wide), jobs.prices_of(wide, shares))
    where = pair(640, 640, link=1e6)
    plain, away = (predict(program, shares, where, "sgd", False, 2**20, (), k) for k in ((), (OnHost(0), OnHost(1))))
    assert plain == away
