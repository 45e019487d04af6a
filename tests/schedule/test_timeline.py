"""The simulated step in closed form on schedules made by hand, and what holds for every schedule."""

from __future__ import annotations

import itertools
import random
import runpy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lopsided
from lopsided.cluster.cluster import Cluster, Link
from lopsided.cluster.collectives import Algorithm, Network
from lopsided.ir.graph import Graph
from lopsided.ir.program import RuleBook, parse_program
from lopsided.models import zoo
from lopsided.schedule.cost import Affine, Costs, Scale, Transfer, optimizer_named, transfer_s
from lopsided.schedule.decisions import BUCKET_BYTES
from lopsided.schedule.pricing import PricedStep
from lopsided.schedule.schedule import Schedule
from lopsided.schedule.timeline import NETWORK, Timeline, run
from lopsided.verification.verifier import random_program, random_shares
from tests.support import ROOT, clusters
from tests.support.jobs import book_of
from tests.support.schedules import (
    NAMES,
    ByHand,
    Flat,
    Work,
    cases,
    in_rounds,
    lay_out,
    per_device,
    random_point,
    schedule_of,
)

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "02_write_a_program.py"))
NO_TIME = Link(0.0, 1e18)


def two(link: Link = NO_TIME, speeds: tuple[float, float] = (2e9, 1e9)) -> Cluster:
    """A fast and a slow device in one box; an all-reduce of b bytes takes 2 · latency + b / bytes_per_s."""
    figures = {"bytes_per_s": 1e18, "memory": 2**30, "launch_s": 0.0}
    kinds = (clusters.kind(name, speed=speed, **figures) for name, speed in zip(("fast", "slow"), speeds, strict=True))
    return clusters.cluster(*kinds, link=link)


ONE_A_BYTE = two(Link(0.5, 1.0))  # seconds


def compute(name: str, *seconds: float, backward: bool = False) -> Work:
    return Work(tuple(Affine(s, 0.0) for s in seconds), None, backward, name)


def gradient(name: str, size: int) -> Transfer:
    return Transfer(f"∂{name}", "all_reduce", size, hides=True)


def gather(name: str, size: int) -> Transfer:
    return Transfer(name, "all_gather", size, (("", 2),), hides=True, ahead=True)


def simulated(
    forward: Sequence[ByHand] = (),
    backward: Sequence[ByHand] = (),
    optimizer: Sequence[Work] = (),
    cluster: Cluster = ONE_A_BYTE,
    bucket_bytes: int = BUCKET_BYTES,
) -> Timeline:
    schedule = schedule_of(*forward, backward=backward, optimizer=optimizer, bucket_bytes=bucket_bytes)
    timeline = run(schedule, Network(cluster), Scale(cluster, (0.5, 0.5)), events=True)
    check(timeline)
    assert run(schedule, Network(cluster), Scale(cluster, (0.5, 0.5))) == replace(timeline, events=())
    return timeline


def check(timeline: Timeline) -> None:
    """What holds for every step."""
    step = timeline.step_s
    close = pytest.approx(step, rel=1e-9, abs=1e-12)
    slack = step * 1e-9 + 1e-12
    assert sum(timeline.breakdown.values()) == close
    for lane in timeline.lanes:
        assert lane.busy_s + lane.waiting_s + lane.exposed_s + timeline.blocking_s == close
        assert min(lane.compute_s, lane.optimizer_s, lane.waiting_s + slack, lane.exposed_s) >= 0
        assert lane.exposed_s <= timeline.hiding_s + slack
        assert lane.busy_s <= step + slack
    assert timeline.blocking_s + timeline.hiding_s <= step + slack
    assert timeline.hidden_s >= -slack
    lanes: dict[str, list[tuple[float, float]]] = {}
    for event in timeline.events:
        assert 0 <= event.start_s <= event.end_s <= step + slack
        lanes.setdefault(event.lane, []).append((event.start_s, event.end_s))
    for spans in lanes.values():
        assert all(before[1] <= after[0] + slack for before, after in itertools.pairwise(spans))


def spans(timeline: Timeline, lane: str = NETWORK) -> list[tuple[float, float]]:
    return [(event.start_s, event.end_s) for event in timeline.events if event.lane == lane]


# Blocking


def test_without_transfers_nobody_waits_before_the_end() -> None:
    timeline = simulated([compute("a", 1, 5), compute("b", 3, 1)], [compute("b", 1, 1)])
    assert timeline.step_s == 7
    assert timeline.compute_s == (5, 7)
    assert timeline.waiting_s == (2, 0)
    assert timeline.critical.kind == "slow"


def test_stages_wait_for_the_slowest() -> None:
    send = Transfer("x", "all_reduce", 3)  # four seconds
    timeline = simulated([compute("a", 1, 5), send, compute("b", 4, 1)])
    assert spans(timeline) == [(5, 9)]
    assert timeline.step_s == 5 + 4 + 4
    assert timeline.blocking_s == 4
    assert timeline.waiting_s == (4, 3)
    assert timeline.breakdown == {"compute": 6, "optimizer": 0, "blocking": 4, "exposed": 0, "waiting": 3}


def test_phases_add_up() -> None:
    timeline = simulated([compute("a", 1, 2)], [compute("a", 2, 4), gradient("w", 9)], [compute("w", 3, 1)])
    assert (timeline.forward_s, timeline.backward_s, timeline.optimizer_s) == (2, 4 + 10, 3)
    assert timeline.step_s == 19


# Gradients


def test_a_gradient_hides_behind_the_rest_of_the_backward_pass() -> None:
    backward = [compute("b", 2, 3), gradient("w", 4), compute("a", 9, 9)]
    timeline = simulated(backward=backward, bucket_bytes=1)
    assert spans(timeline) == [(3, 8)]
    assert timeline.step_s == 12
    assert (timeline.hiding_s, timeline.exposed_s, timeline.hidden_s) == (5, 0, 5)


def test_what_does_not_hide_is_exposed() -> None:
    backward = [compute("b", 2, 3), gradient("w", 4), compute("a", 2, 2)]
    timeline = simulated(backward=backward, optimizer=[compute("w", 1, 1)], bucket_bytes=1)
    assert timeline.step_s == 3 + 5 + 1
    assert (timeline.hiding_s, timeline.exposed_s, timeline.hidden_s) == (5, 3, 2)
    fast, slow = timeline.lanes
    # The network is busy from 3 to 8; the fast one is done at 4 and stands still.
    assert (fast.exposed_s, fast.waiting_s) == (4, 0)
    assert slow.exposed_s == 3


def test_small_gradients_pay_latency_once() -> None:
    backward = [item for k in range(5) for item in (compute(f"n{k}", 1, 1), gradient(f"w{k}", 2))]
    apart = simulated(backward=backward, bucket_bytes=1)
    together = simulated(backward=backward)
    assert spans(apart) == [(1, 4), (4, 7), (7, 10), (10, 13), (13, 16)]
    assert spans(together) == [(5, 5 + 1 + 10)]
    halves = simulated(backward=backward, bucket_bytes=4)
    assert spans(halves) == [(2, 7), (7, 12), (12, 15)]
    assert "∂w0, ∂w1" in {event.what for event in halves.events}


def test_collectives_have_their_own_buckets() -> None:
    scatter = Transfer("∂v", "reduce_scatter", 4, (("", 2),), hides=True)
    timeline = simulated(backward=[compute("a", 1, 1), gradient("w", 4), scatter])
    assert spans(timeline) == [(1, 6), (6, 6 + 0.5 + 2)]


def test_a_blocking_transfer_queues_behind_a_bucket() -> None:
    backward = [compute("b", 1, 1), gradient("w", 9), compute("a", 1, 1), Transfer("x", "all_reduce", 1)]
    timeline = simulated(backward=backward, bucket_bytes=1)
    assert spans(timeline) == [(1, 11), (11, 13)]
    assert timeline.exposed_s == 9
    assert timeline.blocking_s == 2


# Gathering


def test_parameters_are_gathered_while_others_are_used() -> None:
    """Two copies at once: the third is started when the second one's consumer begins."""
    forward = [item for k in range(4) for item in (gather(f"w{k}", 5), compute(f"n{k}", 4, 4))]
    timeline = simulated(forward, bucket_bytes=1)
    # A gather takes three seconds.
    assert spans(timeline) == [(0, 3), (3, 6), (7, 10), (11, 14)]
    assert timeline.step_s == 3 + 4 * 4
    assert (timeline.hiding_s, timeline.exposed_s) == (12, 3)


def test_a_consumer_waits_for_its_own() -> None:
    forward = [gather("w0", 5), compute("n0", 1, 1), gather("w1", 19), compute("n1", 1, 1)]
    timeline = simulated(forward, bucket_bytes=1)
    assert spans(timeline) == [(0, 3), (3, 13)]
    assert timeline.step_s == 14
    assert timeline.exposed_s == 3 + 9


def test_what_one_consumer_wants_is_gathered_together() -> None:
    forward = [gather("w", 5), gather("b", 1), compute("n", 1, 1), gather("v", 3), compute("m", 1, 1)]
    assert spans(simulated(forward, bucket_bytes=1)) == [(0, 3.5), (3.5, 5.5)]
    assert spans(simulated(forward)) == [(0, 5)]


def test_what_nobody_computes_with_is_gathered_all_the_same() -> None:
    timeline = simulated([compute("n", 1, 1), *(gather(f"w{k}", 10**9) for k in range(2))], bucket_bytes=1)
    assert timeline.step_s == timeline.hiding_s


def test_skew_in_a_bucket_is_that_of_its_parts() -> None:
    """Bytes × largest adds up: gathering together costs one latency less than apart."""
    items = [gather("w", 100), replace(gather("b", 10), cuts=(("", 1),))]
    network, scale = Network(ONE_A_BYTE), Scale(ONE_A_BYTE, (0.5, 0.5))
    padded = next(way for way in network.ways("all_gather") if way.implementation == "padded")
    apart = sum(padded.seconds(item.whole_bytes, scale.largest(item.cuts)) for item in items)
    assert scale.largest((("", 1),)) == 2
    assert simulated([*items, compute("n", 1, 1)]).hiding_s == pytest.approx(apart - padded.latency_s)


# Programs


class Thirds(torch.nn.Module):
    """The example's block with widths that three divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)

    forward = EXAMPLE["Block"].forward


@pytest.fixture(scope="module")
def graph() -> Graph:
    return lopsided.capture(EXAMPLE["Block"](), {"x": torch.randn(9, 6), "y": torch.randn(9, 6)})


def of_program(text: str, graph: Graph, cluster: Cluster, shares: tuple[float, ...]) -> tuple[Flat, Timeline]:
    costs = Costs(graph, cluster, optimizer_named("adamw"))
    schedule = lay_out(parse_program(EXAMPLE[text], graph), costs)
    timeline = run(schedule.priced, costs.network, Scale(cluster, shares), events=True)
    check(timeline)
    return schedule, timeline


def test_one_device_takes_the_sum(graph: Graph) -> None:
    cluster = replace(two(), kinds=two().kinds[:1])
    costs = Costs(graph, cluster, optimizer_named("adamw"))
    schedule = lay_out(lopsided.one_device(graph), costs)
    timeline = run(schedule.priced, costs.network, Scale(cluster, (1.0,)))
    assert timeline.step_s == pytest.approx(sum(item.seconds[0].at(1.0) for item in schedule.computes))
    assert timeline.blocking_s == timeline.hiding_s == 0
    assert timeline.waiting_s == (0,)


@pytest.mark.parametrize("text", ["DATA_PARALLEL", "ZERO", "TENSOR_PARALLEL"])
def test_shares_by_speed_finish_together(text: str) -> None:
    """On devices bound by flops, at lengths that divide."""
    wide = lopsided.capture(Thirds(), {"x": torch.randn(9, 6), "y": torch.randn(9, 6)})
    costs = Costs(wide, two(), optimizer_named("adamw"))
    schedule = lay_out(parse_program(EXAMPLE[text], wide), costs)
    timeline = run(schedule.priced, costs.network, Scale(two(), (2 / 3, 1 / 3)))
    check(timeline)
    scale = Scale(two(), (2 / 3, 1 / 3))
    for item in schedule.computes:
        if item.cut is not None:
            fast, slow = (a.at(f) for a, f in zip(item.seconds, scale.fractions(item.cut), strict=True))
            assert fast == pytest.approx(slow, rel=1e-6)
    # Tensor parallelism runs the loss whole on both.
    if text != "TENSOR_PARALLEL":
        assert timeline.waiting_s == pytest.approx((0, 0), abs=timeline.step_s * 1e-6)


def test_with_a_network_that_takes_no_time_stages_are_what_is_left(graph: Graph) -> None:
    schedule, timeline = of_program("TENSOR_PARALLEL", graph, two(), (0.5, 0.5))
    scale = Scale(two(), (0.5, 0.5))
    stages, totals = 0.0, [0.0, 0.0]
    for item in (*schedule.forward, *schedule.backward, *schedule.optimizer):
        if isinstance(item, Transfer):
            stages, totals = stages + max(totals), [0.0, 0.0]
        else:
            each = zip(totals, item.seconds, scale.fractions(item.cut), strict=True)
            totals = [total + affine.at(fraction) for total, affine, fraction in each]
    assert timeline.step_s == pytest.approx(stages + max(totals))
    assert timeline.exposed_s == pytest.approx(0, abs=1e-12)
    assert timeline.blocking_s == pytest.approx(0, abs=1e-12)


def test_data_parallelism_sends_parameters_once(graph: Graph) -> None:
    link = Link(1e-6, 1e9)
    _, timeline = of_program("DATA_PARALLEL", graph, two(link), (0.6, 0.4))
    parameters = sum(leaf.value.bytes for leaf in graph.parameters)
    assert parameters < BUCKET_BYTES
    assert timeline.hiding_s == pytest.approx(2 * link.latency_s + parameters / link.bytes_per_s)
    assert timeline.blocking_s == pytest.approx(2 * link.latency_s + 4 / link.bytes_per_s)  # the loss


@pytest.fixture(scope="module", params=["mlp", "bert"])
def book(request: pytest.FixtureRequest) -> RuleBook:
    return book_of(zoo.SMALL[request.param])


@given(
    seed=st.integers(0, 10**6),
    latency=st.sampled_from([0.0, 1e-6, 1e-3]),
    speed=st.sampled_from([1e6, 1e9, 1e18]),
    bucket=st.sampled_from([1, 1000, BUCKET_BYTES]),
    regather=st.booleans(),
)
def test_every_step_is_between_its_busiest_lane_and_the_sum_of_everything(
    book: RuleBook, seed: int, latency: float, speed: float, bucket: int, regather: bool
) -> None:
    state = random.Random(seed)
    cluster = two(Link(latency, speed), (state.uniform(1e6, 1e9), 1e8))
    scale = Scale(cluster, random_shares(2, state))
    costs = Costs(book.graph, cluster, optimizer_named("adam"))
    schedule = lay_out(random_program(book, state), costs, regather=regather, bucket_bytes=bucket)
    timeline = run(schedule.priced, costs.network, scale, events=True)
    check(timeline)
    computing = sum(
        max(a.at(f) for a, f in zip(item.seconds, scale.fractions(item.cut), strict=True)) for item in schedule.computes
    )
    assert timeline.step_s <= (computing + timeline.blocking_s + timeline.hiding_s) * (1 + 1e-9)
    sent = sum(transfer_s(item, costs.network, scale) for item in schedule.transfers if not item.hides)
    assert timeline.blocking_s == pytest.approx(sent)
    if latency == 0 and speed == 1e18:
        assert timeline.exposed_s == pytest.approx(0, abs=1e-9)


# Rounds


@given(
    cases(),
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([(1.0, 0.0), (1.5, 0.0), (0.8, 0.2), (1.2, 0.3)]),
)
def test_rounds_that_repeat_are_not_walked(
    case: tuple[Cluster, PricedStep, Algorithm], seed: int, count: int, regather: bool, slowed: tuple[float, float]
) -> None:
    """Whoever wants the events walks all of them: the step has to be the same."""
    cluster, once, _ = case
    kinds = tuple(replace(kind, compute_slowdown=slowed[1]) for kind in cluster.kinds)
    cluster = replace(cluster, kinds=kinds, comm_slowdown=slowed[0])
    rng = random.Random(seed)
    scale = Scale(cluster, per_device(cluster, *(random_point(rng, cluster) for _ in NAMES), names=NAMES))
    priced = in_rounds(once, count, regather=regather)
    found, walked = (run(priced, Network(cluster), scale, events=events) for events in (False, True))
    if slowed == (1.0, 0.0):
        check(found)
    for name in ("forward_s", "backward_s", "optimizer_s", "blocking_s", "hiding_s"):
        assert getattr(found, name) == pytest.approx(getattr(walked, name), rel=1e-7, abs=1e-12), name
    for lane, other in zip(found.lanes, walked.lanes, strict=True):
        for name in ("compute_s", "optimizer_s", "waiting_s", "exposed_s"):
            close = pytest.approx(getattr(other, name), rel=1e-7, abs=1e-7 * walked.step_s)
            assert getattr(lane, name) == close, name


def test_of_many_rounds_a_few_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = [gather("w", 1), compute("a", 1.0, 3.0), gather("v", 2), compute("b", 2.0, 1.0)]
    once = schedule_of(*ahead, backward=[compute("c", 4.0, 4.0, backward=True)], bucket_bytes=1)
    walked: list[int] = []
    real = Schedule.round

    def counted(schedule: Schedule, number: int) -> object:
        walked.append(number)
        return real(schedule, number)

    monkeypatch.setattr(Schedule, "round", counted)
    for count in (10, 10_000):
        walked.clear()
        timeline = run(in_rounds(once, count, regather=True), Network(ONE_A_BYTE), Scale(ONE_A_BYTE, (0.5, 0.5)))
        assert len(walked) < 6
        assert timeline.step_s > 7.0 * count
