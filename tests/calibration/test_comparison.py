"""What a run saw is what the next plan expects. Runs are made up from plans: every op so many times as long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from lopsided.calibration.comparison import calibrated_by, compare_run, fraction_of
from lopsided.calibration.run_record import COMPUTE, NETWORK, OPTIMIZER, DeviceRun, Run, Span, StepRun
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import parse_cluster
from lopsided.cluster.collectives import Network
from lopsided.cluster.devices import Link, Measured
from lopsided.models import zoo
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import plan_graph
from lopsided.schedule.cost import Costs, Transfer, optimizer_named, update_call
from lopsided.schedule.flops import call_text
from lopsided.schedule.pricing import Computed
from tests.support import clusters
from tests.support.schedules import lay_out


def cluster_of(*, measured: tuple[Measured, ...] = (), overhead_s: float = 0.0, comm_slowdown: float = 1.0) -> Cluster:
    figures = {"bytes_per_s": 1e9, "launch_s": 1e-6, "measured": measured, "overhead_s": overhead_s}
    made = (clusters.kind(name, speed=speed, **figures) for name, speed in (("fast", 4e8), ("slow", 2e8)))
    return replace(clusters.cluster(*made, link=Link(1e-5, 1e9), comm_slowdown=comm_slowdown), about="Made up.")


@cache
def plan_on(cluster: Cluster) -> Plan:
    graph = capture(*zoo.build("gpt2", layers=2, width=32, heads=4, seq=10, vocab=61, batch=8))
    plan = plan_graph(graph, cluster, optimizer="adamw")
    assert plan.on.devices == 2
    return plan


def times_as_long(factor: float) -> Callable[[str], float]:
    return lambda _: factor


def spans_of(plan: Plan, number: int, slower: Callable[[str], float], talk: float, standing: float) -> Iterator[Span]:
    """One after the other, all of a step: ops by `slower(call)`, collectives `talk` times as long as predicted."""
    costs = Costs(plan.graph, plan.on, optimizer_named(plan.optimizer))
    schedule = lay_out(plan.program, costs, regather=plan.regather, bucket_bytes=plan.bucket_bytes)
    texts = {node.name: call_text(node, plan.graph.values) for node in plan.graph.nodes}
    kind = plan.on.kind_numbers[number]
    at = 0.0
    for item in (*schedule.forward, *schedule.backward):
        if isinstance(item, Transfer):
            way = costs.network.best(item.collective, item.whole_bytes)
            took = talk * way.seconds(item.whole_bytes)
            names = (item.collective, way.implementation)
            yield Span(NETWORK, item.what, at, at + took, *names, item.whole_bytes, 1.0, took * standing)
        else:
            overhead = plan.on.kinds[kind].overhead_s
            predicted = item.seconds[kind].at(fraction_of(plan, item.cut, number)) - overhead
            took = predicted * slower(texts[item.node]) + overhead
            yield Span(COMPUTE, f"∂{item.node}" if item.backward else item.node, at, at + took)
        at += took
    updating = sum(item.seconds[kind].at(fraction_of(plan, item.cut, number)) for item in schedule.optimizer)
    yield Span(COMPUTE, OPTIMIZER, at, at + updating * slower(OPTIMIZER))


def run_of(plan: Plan, slower: Callable[[str], float], talk: float = 1.0, standing: float = 1.0) -> Run:
    devices = []
    for number, name in enumerate(plan.devices):
        spans = tuple(spans_of(plan, number, slower, talk, standing))
        seconds = max(span.end_s for span in spans)
        devices.append(DeviceRun(name, "cpu", 0, (StepRun(seconds), StepRun(seconds, spans))))
    return Run("gpt2", "2.13", plan, tuple(devices))


def busy(cluster: Cluster, plan: Plan) -> list[float]:
    """Seconds that each kind computes, by the prices of a cluster."""
    on = replace(plan, on=cluster)
    costs = Costs(plan.graph, cluster, optimizer_named(plan.optimizer))
    schedule = lay_out(plan.program, costs, regather=plan.regather, bucket_bytes=plan.bucket_bytes)
    items = [item for item in schedule.computes if isinstance(item, Computed)]
    return [
        sum(item.seconds[kind].at(fraction_of(on, item.cut, kind)) for item in items)
        for kind in range(len(cluster.kinds))
    ]


@pytest.mark.parametrize("overhead_s", [0.0, 2e-5])
def test_ops_take_what_the_run_saw(overhead_s: float) -> None:
    plan = plan_on(cluster_of(measured=measured_updates(), overhead_s=overhead_s))
    run = run_of(plan, lambda call: 3.0 if "linear" in call else 0.5)
    before = compare_run(run)
    learnt_plan = replace(plan, on=calibrated_by(run).cluster, cluster=calibrated_by(run).cluster)
    after = compare_run(replace(run, plan=learnt_plan))
    for was, now in zip(before.busy, after.busy, strict=True):
        assert abs(was.error) > 0.2
        assert abs(now.error) < 0.05


def measured_updates() -> tuple[Measured, ...]:
    return (Measured(update_call("adamw", "f32"), ((1 / 256, 2e-5), (1.0, 2e-3))),)


def test_a_run_that_went_as_planned_changes_next_to_nothing() -> None:
    plan = plan_on(cluster_of(measured=measured_updates()))
    again = calibrated_by(run_of(plan, times_as_long(1.0))).cluster
    assert busy(again, plan) == pytest.approx(busy(plan.cluster, plan), rel=0.02)
    for collective, way, link in again.collectives:
        said = next(w for w in Network(plan.on).ways(collective) if w.implementation == way)
        assert (link.latency_s, 1 / link.bytes_per_s) == pytest.approx((said.latency_s, said.s_per_byte_if_equal))


def test_updates_are_scaled() -> None:
    plan = plan_on(cluster_of(measured=measured_updates()))
    again = calibrated_by(run_of(plan, lambda call: 2.0 if call == OPTIMIZER else 1.0)).cluster
    for kind in again.kinds:
        points = next(entry.forward for entry in kind.measured if entry.call.startswith("update:"))
        assert [seconds for _, seconds in points] == pytest.approx([4e-5, 4e-3])


def test_measured_calls_keep_their_shape() -> None:
    graph = plan_on(cluster_of()).graph
    node = next(node for node in graph.nodes if "linear" in node.op)
    entry = Measured(call_text(node, graph.values), ((0.5, 3e-4), (1.0, 5e-4)), ((0.5, 6e-4), (1.0, 1e-3)))
    plan = plan_on(cluster_of(measured=(entry,)))
    again = calibrated_by(run_of(plan, lambda call: 2.0 if call == entry.call else 1.0)).cluster
    for kind in again.kinds:
        (found,) = [one for one in kind.measured if one.call == entry.call]
        assert [seconds for _, seconds in found.forward] == pytest.approx([6e-4, 1e-3])
        assert [seconds for _, seconds in found.backward] == pytest.approx([1.2e-3, 2e-3])


def test_collectives_are_scaled_way_by_way() -> None:
    plan = plan_on(cluster_of())
    run = run_of(plan, times_as_long(1.0), talk=1.7)
    again = calibrated_by(run).cluster
    used = {(span.collective, span.way) for span in run.devices[0].recorded[0].spans if span.lane == NETWORK}
    assert used
    for collective, way in used:
        was, now = (
            next(w for w in Network(cluster).ways(collective) if w.implementation == way)
            for cluster in (plan.on, again)
        )
        assert now.seconds(2**20) == pytest.approx(1.7 * was.seconds(2**20))


def test_what_hid_behind_computing_was_stretched() -> None:
    """Twice as long, because devices computed beside it: that is not the link's fault."""
    plan = plan_on(cluster_of(comm_slowdown=2.0))
    again = calibrated_by(run_of(plan, times_as_long(1.0), talk=2.0, standing=0.0)).cluster
    for collective, way, link in again.collectives:
        said = next(w for w in Network(plan.on).ways(collective) if w.implementation == way)
        assert link.latency_s == pytest.approx(said.latency_s)


def test_the_cluster_is_a_legal_one_and_says_where_it_comes_from() -> None:
    plan = plan_on(cluster_of())
    once = calibrated_by(run_of(plan, times_as_long(1.3))).cluster
    assert parse_cluster(once.text()) == once
    assert once.device_names == plan.cluster.device_names
    assert "Made up. Corrected by a run of gpt2" in once.about
    twice = calibrated_by(run_of(plan_on(once), times_as_long(1.3))).cluster
    assert twice.about.count("Corrected by a run") == 1


def test_corrections_are_told() -> None:
    plan = plan_on(cluster_of(measured=measured_updates()))
    fed = calibrated_by(run_of(plan, times_as_long(2.0), talk=3.0))
    assert {round(one.factor, 6) for one in fed.corrections if one.kind} == {2.0}
    assert {round(one.factor, 6) for one in fed.corrections if not one.kind} == {3.0}
    assert any(one.what == OPTIMIZER for one in fed.corrections)


def test_nonsense_does_not_change_a_figure_without_bound() -> None:
    fed = calibrated_by(run_of(plan_on(cluster_of()), times_as_long(1e9)))
    assert max(one.factor for one in fed.corrections) == 20.0
    assert parse_cluster(fed.cluster.text()) == fed.cluster
