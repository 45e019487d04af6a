"""A whole step is run dry where that can be done, and the calls add up to it. No times are asserted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lopsided.calibration.calibrate import DRY_RUN, LineCorrection, ObservedCalls, Scope, calibrate
from lopsided.calibration.comparison import expected_calls
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import Network
from lopsided.cluster.devices import Link, Measured
from lopsided.comm.communicator import Communicator
from lopsided.comm.in_process import LoneCommunicator
from lopsided.comm.redistribute import Redistributor
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.graph import Graph
from lopsided.ir.placement import I, P, Placement, S, Shares
from lopsided.models import zoo
from lopsided.profiling import dry_run
from lopsided.profiling import op_times as measure_ops
from lopsided.profiling.dry_run import (
    DryRun,
    alone_s,
    packing_of,
    predicted_s,
    prepared,
    prepared_alone,
    prepared_hiding,
)
from lopsided.profiling.kinds import Found, Took, rank_kinds, seat_of, with_table
from lopsided.profiling.links import ControlGroup
from lopsided.profiling.measure import take_measurement
from lopsided.profiling.op_times import Speeds, choose_jobs, distinct_calls, probe_calls
from lopsided.schedule.decisions import BUCKET_BYTES
from tests.support import clusters

CPU = torch.device("cpu")
SIZES: dict[str, dict[str, int]] = {
    "mlp": {"layers": 2, "width": 256, "classes": 5, "batch": 64},
    "gpt2": {"layers": 2, "width": 32, "heads": 4, "seq": 10, "vocab": 61, "batch": 6},
    "resnet50": {"width": 6, "image": 35, "classes": 7, "batch": 6},
    "bert-moe": {"layers": 1, "width": 24, "heads": 3, "seq": 11, "vocab": 61, "batch": 6},
    "t5": {"layers": 2, "width": 48, "heads": 3, "ffn": 80, "seq": 22, "target_seq": 14, "vocab": 61, "batch": 6},
}


@cache
def graph_of(name: str) -> Graph:
    return capture(*zoo.build(name, **SIZES[name]))


def measured(graph: Graph, *, call_s: float = 1e-3, overhead_s: float = 0.0, memory: int = 2**34) -> Cluster:
    """Two kinds, one twice as fast, that took so long for every whole call, and as long backward."""
    kinds = []
    for number, name in enumerate(("fast", "slow")):
        points = ((0.5, call_s * (number + 1) / 2), (1.0, call_s * (number + 1)))
        table = tuple(Measured(one.text, points, points) for one in distinct_calls([graph]))
        figures = {"speed": 1e10 / (number + 1), "bytes_per_s": 1e10, "memory": memory, "launch_s": 0.0}
        kinds.append(clusters.kind(name, **figures, measured=table, overhead_s=overhead_s))
    return clusters.cluster(*kinds, link=Link(0.0, 1e12))


# A communicator without others


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("source", "to"), [(S(0), I), (P, I), (P, S(0)), (S(0), S(1)), (S(1), S(0)), (P, S(1))])
def test_an_echo_answers_in_the_shapes_of_a_communicator(source: Placement, to: Placement, rank: int) -> None:
    shares, shape = Shares((0.75, 0.25)), (8, 4)
    exchange = Redistributor(cast(Communicator, LoneCommunicator(rank, 2)), shares, Network(measured(graph_of("mlp"))))

    def local(placement: Placement) -> tuple[int, ...]:
        pieces = shares.cut(placement.length(shape)) if placement.is_shard else ()
        return placement.local_shape(shape, pieces, rank)

    part = torch.arange(float(torch.Size(local(source)).numel())).view(local(source))
    assert tuple(exchange.move(part, source, to, shape).shape) == local(to)


def test_an_echo_keeps_what_is_its_own() -> None:
    piece = torch.tensor([1.0, 2.0])
    assert LoneCommunicator(1, 3).all_gather(piece, (1, 2, 1)).wait().tolist() == [0.0, 1.0, 2.0, 0.0]
    into = torch.zeros(4)
    assert LoneCommunicator(1, 3).all_gather(piece, (1, 2, 1), out=into).wait() is into
    assert LoneCommunicator(2, 3).reduce_scatter(torch.arange(4.0), (1, 2, 1)).wait().tolist() == [3.0]
    assert LoneCommunicator(0, 1).all_gather(piece, (2,)).wait() is piece
    assert LoneCommunicator(0, 1).reduce_scatter(piece, (2,)).wait() is piece


# What tables say


def test_calls_and_what_lies_around_them_are_told_apart() -> None:
    graph = graph_of("mlp")
    bare, around = (prepared(graph, measured(graph, overhead_s=extra), 1e6) for extra in (0.0, 1e-6))
    assert bare is not None
    assert around is not None
    for rank in range(2):
        assert expected_calls(bare, rank).measured_s == pytest.approx(expected_calls(around, rank).measured_s)
        assert expected_calls(around, rank).rest_s > expected_calls(bare, rank).rest_s


def test_a_call_that_talks_has_seconds_of_its_own() -> None:
    """Batch norm over several devices makes more passes over its input than one device does."""
    graph = graph_of("resnet50")
    cluster = measured(graph)
    kinds = []
    for kind in cluster.kinds:
        talking = [
            Measured(f"{entry.call} by batch_norm", entry.forward, tuple((f, 3 * s) for f, s in entry.backward))
            for entry in kind.measured
            if entry.call.startswith("lopsided.batch_norm")
        ]
        assert talking
        kinds.append(replace(kind, measured=(*kind.measured, *talking)))
    plain, talks = (prepared(graph, one, 1e6) for one in (cluster, replace(cluster, kinds=tuple(kinds))))
    assert plain is not None
    assert talks is not None
    alone = [prepared_alone(one, 0, 1e6) for one in (plain, talks)]
    for rank in range(2):
        assert expected_calls(talks, rank).measured_s > 1.1 * expected_calls(plain, rank).measured_s
        assert expected_calls(talks, rank).rest_s == pytest.approx(expected_calls(plain, rank).rest_s)
    assert expected_calls(cast(DryRun, alone[0]), 0) == expected_calls(cast(DryRun, alone[1]), 0)
    norms = [node for node in graph.nodes if node.op.startswith("lopsided.batch_norm")]
    assert [expected_calls(one, 0).talking for one in (plain, talks)] == [0, 2 * len(norms)]
    assert expected_calls(cast(DryRun, alone[1]), 0).talking == 0


def test_what_talking_takes_is_added_to_calls_that_talk() -> None:
    points = tuple((f, f) for f in (0.5, 1.0)), tuple((f, 2 * f) for f in (0.5, 1.0))
    correction = LineCorrection(1.0, 2.0, 0.0, 3.0)
    longer = [correction.of_entry(Measured(f"op(){by}", *points)) for by in ("", " by batch_norm")]
    seconds = [
        [(there, back) for (_, there), (_, back) in zip(one.forward, one.backward, strict=True)] for one in longer
    ]
    assert seconds == [[(1, 2), (2, 4)], [(4, 5), (5, 7)]]


def test_a_call_that_talks_is_measured_both_ways() -> None:
    graph = graph_of("resnet50")
    jobs, _ = choose_jobs([graph], [Speeds((("f32", 1e9),), 1e9, 1e-6)] * 2, 2**34, 1e3)
    norms = [job for job in jobs if job.text.startswith("lopsided.batch_norm")]
    by_itself = {job.text for job in norms if job.as_is}
    assert by_itself
    assert {job.text for job in norms if not job.as_is} == {f"{text} by batch_norm" for text in by_itself}
    layouts = measure_ops.layouts_of(graph)
    for job in (next(job for job in norms if job.as_is), next(job for job in norms if not job.as_is)):
        there, back = measure_ops.run_job(job, layouts, CPU, 0.0)
        assert min(there) > 0
        assert min(back) > 0


def test_estimates_stay() -> None:
    """A call that nobody measured is among the rest."""
    graph = graph_of("mlp")
    whole = measured(graph)
    kinds = tuple(replace(kind, measured=kind.measured[:-1]) for kind in whole.kinds)
    every, fewer = (prepared(graph, cluster, 1e6) for cluster in (whole, replace(whole, kinds=kinds)))
    assert every is not None
    assert fewer is not None
    assert expected_calls(fewer, 0).measured_s < expected_calls(every, 0).measured_s
    assert expected_calls(fewer, 0).rest_s > expected_calls(every, 0).rest_s


def update_of(cluster: Cluster, number: int) -> Measured:
    (entry,) = [entry for entry in cluster.kinds[number].measured if entry.call.startswith("update:")]
    return entry


@pytest.mark.parametrize("with_all", [None, 1.0, 1.3, 1.6])
@pytest.mark.parametrize("rank", [0, 1])
def test_corrected_calls_add_up_to_the_steps(rank: int, with_all: float | None) -> None:
    graph = graph_of("mlp")
    cluster = measured(graph, overhead_s=1e-5)
    update = Measured("update:sgd(f32[1048576])", ((1.0, 1.0),))
    cluster = replace(cluster, kinds=tuple(replace(k, measured=(*k.measured, update)) for k in cluster.kinds))
    before = prepared(graph, cluster, 1e6)
    assert before is not None
    alone = prepared_alone(before, rank, 1e6)
    assert alone is not None
    steps = [(before, rank, 1.3 * expected_calls(before, rank).all_s)]
    if with_all is not None:
        steps.append((alone, 0, with_all * expected_calls(alone, 0).all_s))
    observed = [ObservedCalls(rank, Scope.CALLS, expected_calls(what, seat), step_s) for what, seat, step_s in steps]
    found = calibrate(cluster, observed, limits=DRY_RUN)
    assert [one.factor for one in found.corrections] == [pytest.approx(observed[0].ratio, rel=1e-5)]
    assert found.cluster.kinds[1 - rank] == cluster.kinds[1 - rank]
    assert update_of(found.cluster, rank) == update
    after = prepared(graph, found.cluster, 1e6)
    assert after is not None
    assert expected_calls(after, rank).all_s == pytest.approx(steps[0][2], rel=0.12 if with_all == 1.6 else 0.01)
    if with_all is not None:
        again = prepared_alone(after, rank, 1e6)
        assert again is not None
        # Calls cannot take less than nothing with nothing of a batch: what grows faster than it is met halfway.
        assert expected_calls(again, 0).all_s == pytest.approx(steps[1][2], rel=0.12 if with_all == 1.6 else 0.01)


def test_a_corrected_table_is_what_the_rank_found() -> None:
    """Seconds are those of the table, noise is the rank's, and what has no backward pass has none."""
    found: Found = {("op", f): Took(f, 2 * f, 0.1) for f in (0.5, 1.0)} | {("update:sgd(f32[9])", 1.0): Took(3.0, None)}
    (kind,) = rank_kinds([seat_of(CPU, Speeds((("f32", 1e9),), 1e9, 1e-6))], [found])
    assert with_table(found, kind.measured) == found
    twice = with_table(found, [LineCorrection(2.0, 2.0).of_entry(entry) for entry in kind.measured])
    assert {key: (one.forward_s, one.backward_s, one.noise) for key, one in twice.items()} == {
        ("op", 0.5): (1.0, 2.0, 0.1),
        ("op", 1.0): (2.0, 4.0, 0.1),
        ("update:sgd(f32[9])", 1.0): (6.0, None, 0.0),
    }


# Whether to


def test_the_batch_stays_cut_however_cheap_it_is_to_send() -> None:
    graph = graph_of("mlp")
    dry = prepared(graph, measured(graph), 1e6)
    assert dry is not None
    assert not [t for t in dry.priced.schedule.transfers if not t.hides and t.whole_bytes > 8]


def test_what_does_not_fit_is_not_run_dry() -> None:
    graph = graph_of("mlp")
    assert prepared(graph, measured(graph), 1e6) is not None
    assert prepared(graph, measured(graph), 0.0) is None
    assert prepared(graph, measured(graph, memory=2**18), 1e6) is None


def test_where_memory_is_short_it_is_as_if_there_were_more_devices() -> None:
    """Activations of this one weigh more than its parameters."""
    graph = capture(*zoo.build("mlp", layers=2, width=32, classes=5, batch=4096))
    plenty = prepared(graph, measured(graph), 1e6)
    assert plenty is not None
    assert (plenty.smaller, plenty.cluster.devices) == (1, 2)
    least = next(size for k in range(10, 40) if (size := 2**k) and prepared(graph, measured(graph, memory=size), 1e6))
    found = prepared(graph, measured(graph, memory=least), 1e6)
    assert found is not None
    assert (found.smaller, found.cluster.devices) == (4, 8)
    for rank in range(2):
        assert found.cluster.device_kinds[4 * rank].name == plenty.cluster.device_kinds[rank].name
        assert found.shares.work[4 * rank] == pytest.approx(plenty.shares.work[rank] / 4)
        assert expected_calls(found, 4 * rank).all_s == pytest.approx(expected_calls(plenty, rank).all_s / 4, rel=0.01)
        assert alone_s(found.play, 4 * rank, CPU, 0.0, time.perf_counter) is not None
    # All together there are only so many as there are.
    assert prepared_hiding(found, measured(graph), 1e6) is None


def test_alone_a_device_has_the_whole_batch_and_nobody_to_ask() -> None:
    graph = graph_of("resnet50")
    dry = prepared(graph, measured(graph), 1e6)
    assert dry is not None
    assert [t for t in dry.priced.schedule.transfers if not t.hides and t.whole_bytes > 8]
    alone = [prepared_alone(dry, rank, 1e6) for rank in range(2)]
    for rank, one in enumerate(alone):
        assert isinstance(one, DryRun)
        assert one.cluster.device_kinds[0].name == dry.cluster.device_kinds[rank].name
        assert one.shares.work == (1.0,)
        assert not one.priced.schedule.transfers
        assert {step.rule.how for step in one.program.steps} == {"plain"}
        assert expected_calls(one, 0).all_s > expected_calls(dry, rank).all_s
        assert alone_s(one.play, 0, CPU, 0.0, time.perf_counter) is not None
        assert prepared_alone(one, 0, 1e6) is None
    assert prepared_alone(dry, 0, 0.0) is None


def test_what_was_hardly_measured_is_not_run_dry() -> None:
    graph = graph_of("mlp")
    cluster = measured(graph)
    unmeasured = tuple(replace(kind, measured=()) for kind in cluster.kinds)
    assert prepared(graph, replace(cluster, kinds=unmeasured), 1e6) is None
    assert prepared(graph, measured(graph, call_s=1e-9, overhead_s=1e-3), 1e6) is None


def test_a_device_without_a_part_of_the_batch_is_not_run_dry() -> None:
    graph = graph_of("mlp")
    cluster = measured(graph)
    fast, slow = cluster.kinds
    kinds = (fast, replace(slow, flops_per_s=(("f32", 1e6),)))
    assert prepared(graph, replace(cluster, kinds=kinds), 1e6) is None


# The run


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("rank", [0, 1])
def test_steps_run_on_random_leaves(name: str, rank: int) -> None:
    dry = prepared(graph_of(name), measured(graph_of(name)), 1e6)
    assert dry is not None
    seconds = alone_s(dry.play, rank, CPU, 0.0, time.perf_counter)
    assert seconds is not None
    assert seconds > 0


def test_a_graph_that_refuses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    dry = prepared(graph_of("gpt2"), measured(graph_of("gpt2")), 1e6)
    assert dry is not None
    monkeypatch.setattr(dry_run, "_below", lambda name, graph: 2**40)  # beyond every table
    assert alone_s(dry.play, 0, CPU, 0.0, time.perf_counter) is None


class Lookup(nn.Module):
    """Indices that are cast and moved about before something is looked up by them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.small = nn.Embedding(50, 8), nn.Embedding(7, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x.transpose(0, 1).contiguous()
        return (self.table(shifted) + self.small(shifted)).sum()


def test_indices_suit_all_who_use_them() -> None:
    graph = capture(Lookup(), {"x": torch.zeros(4, 3, dtype=torch.int64)})
    leaf = next(leaf for leaf in graph.leaves if leaf.kind == "input")
    assert dry_run._below(leaf.value.name, graph) == 7


# Together


def take(graph: Graph, budget_s: float, refusing: int = -1) -> tuple[tuple[float, ...], Cluster]:
    """In a worker. One rank may refuse to run dry. Tables are made up: nothing is left to chance."""
    real = dry_run.alone_s
    if dist.get_rank() == refusing:
        dry_run.alone_s = lambda *_: None
    times = 1.25 + 0.25 * dist.get_rank()
    dry_run.ObservedCalls = lambda kind, scope, told, _: ObservedCalls(
        kind, scope, told, told.rest_s + times * told.measured_s
    )
    real_prepared = dry_run.prepared
    dry_run.prepared = lambda graph, cluster, budget_s: real_prepared(graph, measured(graph), 1e6)
    try:
        found = take_measurement(graph, CPU, budget_s=budget_s)
    finally:
        dry_run.alone_s, dry_run.ObservedCalls, dry_run.prepared = real, ObservedCalls, real_prepared
    return found.rehearsed, found.cluster


def test_all_ranks_scale_or_none(worker_pools: Callable[[int], WorkerPool]) -> None:
    graph = graph_of("mlp")
    told = worker_pools(2).run(take, graph, 3.0)
    assert [ratios for ratios, _ in told] == [told[0][0]] * 2
    assert told[0][0] == (1.25, 1.5)
    assert told[0][1] == told[1][1]
    assert [ratios for ratios, _ in worker_pools(2).run(take, graph, 3.0, 1)] == [(), ()]


def test_a_busy_moment_does_not_make_all_calls_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    dry = prepared(graph_of("gpt2"), measured(graph_of("gpt2")), 1e6)
    assert dry is not None
    step_s = 2 * expected_calls(dry, 0).all_s
    now = {"slower": 1.15}
    monkeypatch.setattr(dry_run, "alone_s", lambda *_: now["slower"] * step_s)
    looks = dry_run.StepTimings(dry, CPU, ControlGroup(None), 1.0, 1e6)
    looks.take(dry_run.LOOKS_BEFORE)
    now["slower"] = 1.0
    looks.take(dry_run.LOOKS_AFTER)
    told = looks.tell([])
    right = ObservedCalls(0, Scope.CALLS, expected_calls(dry, 0), step_s)
    assert told.observed[0].ratio == pytest.approx(right.ratio, rel=1e-5)
    assert {one.kind for one in told.observed} == {0}


def test_several_graphs_are_not_run_dry() -> None:
    found = take_measurement((graph_of("mlp"), graph_of("gpt2")), CPU, budget_s=0.5)
    assert found.rehearsed == ()


# All together


def test_hiding_is_run_dry_in_bits_and_explained_by_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "_LEAST_BYTES", 1)
    graph = graph_of("gpt2")
    cluster = measured(graph)
    slow = replace(cluster, within=Link(1e-6, 5e6), between=Link(1e-6, 5e6), comm_slowdown=2.0)
    dry = prepared(graph, cluster, 1e6)
    assert dry is not None
    hiding = prepared_hiding(dry, slow, 1e6)
    assert hiding is not None
    assert hiding.bucket_bytes < BUCKET_BYTES
    stored = dict(hiding.program.leaves)
    assert all(stored[leaf.value.name].is_shard for leaf in graph.parameters)
    expected_s = [predicted_s(hiding, packing) for packing in (1.0, 20.0, 300.0)]
    assert expected_s == sorted(expected_s)
    assert expected_s[0] < expected_s[2]
    assert packing_of(hiding, expected_s[1]) == pytest.approx(20.0, rel=0.01)
    assert packing_of(hiding, 0.0) == 1.0
    assert prepared_hiding(dry, slow, 1e-9) is None


def together(graph: Graph) -> tuple[float, float]:
    """In a worker: the packing that everyone knows, and what is left of the model's random numbers."""
    torch.manual_seed(5)
    found = take_measurement(graph, CPU, budget_s=6.0)
    return found.cluster.packing, float(torch.rand(()))


def test_all_ranks_know_the_same_packing(worker_pools: Callable[[int], WorkerPool]) -> None:
    told = worker_pools(2).run(together, graph_of("mlp"))
    assert told[0] == told[1]
    assert 1 <= told[0][0] <= 1e6
    torch.manual_seed(5)
    assert told[0][1] == float(torch.rand(()))


# A glance


def test_a_call_that_takes_long_is_measured_whatever_its_estimate() -> None:
    graph = graph_of("gpt2")
    speeds = Speeds((("f32", 1e12),), 1e12, 1e-9)
    least = min(distinct_calls([graph]), key=lambda one: one.times * speeds.seconds(one.work))
    without, _ = choose_jobs([graph], [speeds], 2**30, 10.0)
    jobs, _ = choose_jobs([graph], [speeds], 2**30, 10.0, {least.text: 0.1})
    assert least.text not in {job.distinct.text for job in without}
    assert jobs[0].distinct.text == least.text


def test_a_glance_is_cast_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("gpt2")
    found = probe_calls([graph], CPU, 2, 2**32, 60.0)
    assert len(found) > 0.8 * len(distinct_calls([graph]))
    assert min(found.values()) > 0
    monkeypatch.setattr(measure_ops, "_GLANCES_S", 0.0)
    assert not probe_calls([graph], CPU, 2, 2**32, 0.0)
