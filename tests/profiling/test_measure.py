"""Measuring gives every process the same sane cluster, in the order of the ranks. No times are asserted."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster_file import parse_cluster
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import InputError
from lopsided.ir.graph import Graph
from lopsided.ir.placement import S
from lopsided.models import zoo
from lopsided.profiling import kinds as room
from lopsided.profiling import op_times as measure_ops
from lopsided.profiling.kinds import Found, RankHost, Took
from lopsided.profiling.links import WAYS
from lopsided.profiling.measure import Measurement, measure, take_measurement
from lopsided.profiling.op_times import (
    Speeds,
    choose_jobs,
    distinct_calls,
    is_safe,
    layouts_of,
    measure_speeds,
    run_job,
    speed_dtypes,
)
from lopsided.profiling.overhead import fractions_of
from lopsided.schedule.cost import Costs, optimizer_named, update_call

CPU = torch.device("cpu")
SPEEDS = Speeds((("f32", 1e10),), 1e9, 1e-5)


@cache
def small_graph(name: str = "gpt2") -> Graph:
    sizes: dict[str, dict[str, int]] = {
        "gpt2": {"layers": 2, "width": 32, "heads": 4, "seq": 10, "vocab": 61, "batch": 6},
        "resnet50": {"width": 6, "image": 35, "classes": 7, "batch": 5},
        "bert-moe": {"layers": 2, "width": 24, "heads": 3, "seq": 11, "vocab": 61, "batch": 5},
    }
    return capture(*zoo.build(name, **sizes[name]))


def take(graph: Graph, names: tuple[str, ...] = ()) -> tuple[Measurement, list[tuple[int, int]], bool]:
    """In a worker; with `names`, as if each rank were on the host of that name."""
    told = list[tuple[int, int]]()
    before = torch.get_rng_state()
    real = platform.node
    if names:
        platform.node = lambda: names[dist.get_rank()]
    try:
        found = take_measurement(
            graph,
            CPU,
            optimizers=("adamw", "lion"),
            budget_s=1.5,
            progress=lambda done, total: told.append((done, total)),
        )
    finally:
        platform.node = real
    return found, told, torch.equal(before, torch.get_rng_state())


def of_some(graph: Graph, ranks: list[int]) -> int:
    """In a worker: how many devices a group of some of the ranks measures."""
    group = dist.new_group(ranks)
    return measure(graph, CPU, group, budget_s=0.5).devices if dist.get_rank() in ranks else 0


@pytest.fixture(scope="module")
def unequal() -> list[tuple[Measurement, list[tuple[int, int]], bool]]:
    with WorkerPool(3, cores=[[0], [1], [1]]) as pool:
        return pool.run(take, small_graph())


def test_every_rank_has_the_same_cluster(unequal: list[tuple[Measurement, list[tuple[int, int]], bool]]) -> None:
    clusters = [found.cluster for found, _, _ in unequal]
    assert clusters[0] == clusters[1] == clusters[2]
    assert parse_cluster(clusters[0].text()) == clusters[0]
    assert clusters[0].devices == 3
    assert clusters[0].nodes == 1
    assert len({kind.name for kind in clusters[0].kinds}) == len(clusters[0].kinds)
    assert "Measured" in clusters[0].about
    assert torch.__version__ in clusters[0].about


def test_points_are_sane(unequal: list[tuple[Measurement, list[tuple[int, int]], bool]]) -> None:
    found = unequal[0][0]
    tables = [{entry.call for entry in kind.measured} for kind in found.cluster.kinds]
    assert all(table == tables[0] for table in tables)
    # Of a model this small and in so short a time it is chance which calls seem worth it.
    assert any(call.startswith("aten.") for call in tables[0])
    for kind in found.cluster.kinds:
        for entry in kind.measured:
            assert all(0 < fraction <= 1 and seconds > 0 for fraction, seconds in (*entry.forward, *entry.backward))
        assert any(len(entry.forward) > 1 and entry.backward for entry in kind.measured)
    assert found.op_error >= 0
    assert found.link_error >= 0


def test_the_cost_model_finds_what_was_measured(unequal: list[tuple[Measurement, list[tuple[int, int]], bool]]) -> None:
    """The texts are those that prices are looked up by."""
    graph, cluster = small_graph(), unequal[0][0].cluster
    kinds = tuple(replace(kind, measured=()) for kind in cluster.kinds)
    measured, estimated = (
        Costs(graph, where, optimizer_named("sgd")) for where in (cluster, replace(cluster, kinds=kinds))
    )
    jobs = {job.distinct.text: job for job in choose_jobs([graph], [SPEEDS] * 3, 2**30, 1000.0)[0]}
    for entry in cluster.kinds[0].measured:
        if entry.call.startswith("update:"):
            continue
        node, rule = jobs[entry.call].distinct.call.node, jobs[entry.call].rule
        assert measured.op(node, rule).forward != estimated.op(node, rule).forward


def test_updates_are_measured_as_they_are_priced(
    unequal: list[tuple[Measurement, list[tuple[int, int]], bool]],
) -> None:
    """Of the optimizer that torch has; nobody measures one that it has not."""
    for kind in unequal[0][0].cluster.kinds:
        updates = [entry for entry in kind.measured if entry.call.startswith("update:")]
        assert [entry.call for entry in updates] == [update_call("adamw", "f32")]
        assert tuple(fraction for fraction, _ in updates[0].forward) == fractions_of([small_graph()])
        assert all(seconds > 0 for _, seconds in updates[0].forward)


def test_computing_and_sending_cost_each_other(
    unequal: list[tuple[Measurement, list[tuple[int, int]], bool]],
) -> None:
    found = unequal[0][0]
    assert len(found.compute_slowdowns) == 3
    assert all(0 <= slowdown <= 1 for slowdown in found.compute_slowdowns)
    assert found.cluster.comm_slowdown == found.comm_slowdown > 0
    assert [kind.compute_slowdown for kind in found.cluster.kinds if kind.count == 1] == [
        found.compute_slowdowns[first]
        for kind, (first, _) in zip(found.cluster.kinds, found.cluster.spans, strict=True)
        if kind.count == 1
    ]


def test_what_was_measured_is_told_with_its_noise(
    unequal: list[tuple[Measurement, list[tuple[int, int]], bool]],
) -> None:
    found = unequal[0][0]
    assert 0 < found.covered <= 1
    assert found.op_noise >= 0
    assert {line.call for line in found.lines if line.kind == 0} == {
        entry.call for entry in found.cluster.kinds[0].measured
    }
    assert all(line.times > 0 or line.call.startswith("update:") for line in found.lines)


def test_every_collective_is_measured(unequal: list[tuple[Measurement, list[tuple[int, int]], bool]]) -> None:
    cluster = unequal[0][0].cluster
    assert {(collective, way) for collective, way, _ in cluster.collectives} == set(WAYS)
    # Of all but the all_reduce, which has no pieces, it is known what unequal pieces cost.
    assert {collective for collective, _, link in cluster.collectives if link.skew is None} == {"all_reduce"}
    assert all(link.latency_s > 0 or link.bytes_per_s < 1e18 for _, _, link in cluster.collectives)


def test_progress_is_told_and_random_numbers_stay(
    unequal: list[tuple[Measurement, list[tuple[int, int]], bool]],
) -> None:
    for _, told, same in unequal:
        assert same
        assert told == [(k, len(told)) for k in range(1, len(told) + 1)]


def test_hosts_become_nodes(worker_pools: Callable[[int], WorkerPool]) -> None:
    """Two ranks of one host, one of another: a link of its own inside, and names that a cluster allows."""
    cluster = worker_pools(3).run(take, small_graph(), ("big/box", "big/box", "small box"))[0][0].cluster
    assert cluster.node_names == ("big-box", "small-box")
    assert [kind.node for kind in cluster.kinds][-1] == "small-box"
    assert cluster.within != cluster.between


def test_a_group_of_some(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert worker_pools(3).run(of_some, small_graph(), [0, 2]) == [2, 0, 2]


def test_one_process_needs_no_group() -> None:
    cluster = measure(small_graph(), CPU, budget_s=0.0)
    assert cluster.devices == 1
    assert cluster.collectives == ()
    assert parse_cluster(cluster.text()) == cluster


def test_updates_are_measured_at_the_sizes_of_the_model() -> None:
    assert fractions_of([]) == (1 / 256, 1 / 16, 1.0)
    small = [round(fraction * 2**20) for fraction in fractions_of([small_graph()])]
    large = capture(*zoo.build("mlp", layers=2, width=2048, classes=5, batch=2))
    assert small == [1024, 4096]
    assert [round(fraction * 2**20) for fraction in fractions_of([large])] == [4096, 2**18, 2**20]


# Which ranks are alike


def seat(host: str = "box", hardware: str = "some cpu", *, gpu: str = "", boot: str = "1") -> RankHost:
    return RankHost(host, boot, hardware, gpu, 8 * 2**30, SPEEDS)


def kinds_of(seats: list[RankHost], paces: list[float]) -> list[tuple[str, str, int]]:
    """The kinds of ranks that took so many seconds for the same call."""
    graph = small_graph()
    jobs, _ = choose_jobs([graph], [SPEEDS], 2**30, 10.0)
    job = jobs[0]
    found: list[Found] = [{job.key: Took(pace, None)} for pace in paces]
    kinds = room.kinds_of(seats, found, [job], [0.0] * len(seats), [0.0] * len(seats))
    return [(kind.name, kind.node, kind.count) for kind in kinds]


def test_neighbours_alike_are_one_kind() -> None:
    assert kinds_of([seat()] * 3, [1.0, 1.05, 1.02]) == [("cpu", "box", 3)]
    assert kinds_of([seat()] * 3, [1.0, 2.0, 2.1]) == [("cpu-fast", "box", 1), ("cpu-slow", "box", 2)]


def test_kinds_keep_the_order_of_ranks() -> None:
    assert kinds_of([seat()] * 3, [2.0, 1.0, 2.0]) == [
        ("cpu-slow", "box", 1),
        ("cpu-fast", "box", 1),
        ("cpu-slow-also1", "box", 1),
    ]


def test_hardware_and_hosts_set_apart() -> None:
    cards = [seat(hardware="NVIDIA GeForce RTX 2080 Ti", gpu=serial) for serial in ("a", "b")]
    assert kinds_of([*cards, seat()], [1.0, 1.0, 1.0]) == [("rtx-2080-ti", "box", 2), ("cpu", "box", 1)]
    assert kinds_of([seat(), seat(boot="2")], [1.0, 1.0]) == [("cpu", "box", 1), ("cpu", "box~2", 1)]


def test_processes_share_the_memory_of_their_host_or_gpu() -> None:
    seats = [seat(), seat(), seat("other"), seat(gpu="a"), seat(gpu="b"), seat(gpu="b")]
    assert [room.memory_of(mine, seats) // 2**30 for mine in seats] == [4, 4, 8, 8, 4, 4]


@pytest.mark.parametrize("budget_s", [-1.0, float("nan"), float("inf")])
def test_no_time_is_refused(budget_s: float) -> None:
    with pytest.raises(InputError, match="no time to measure in"):
        measure(small_graph(), CPU, budget_s=budget_s)


def test_what_one_rank_could_not_measure_nobody_has() -> None:
    jobs, _ = choose_jobs([small_graph()], [SPEEDS], 2**30, 10.0)
    full: Found = {job.key: Took(1.0, 1.0) for job in jobs}
    lacking = {key: points for key, points in full.items() if key[0] != jobs[0].distinct.text}
    kinds = room.kinds_of([seat("a"), seat("b")], [full, lacking], jobs, [0.0, 0.0], [1e-5, 3e-5])
    for kind in kinds:
        assert jobs[0].distinct.text not in {entry.call for entry in kind.measured}
        assert {entry.call for entry in kind.measured} == {call for call, _ in lacking}


# Jobs


@pytest.mark.parametrize("name", ["gpt2", "resnet50", "bert-moe"])
def test_most_calls_can_be_run(name: str) -> None:
    graph = small_graph(name)
    jobs, _ = choose_jobs([graph], [SPEEDS] * 3, 2**30, 1000.0)
    layouts = layouts_of(graph)
    assert len(jobs) > 20
    ran = [run_job(job, layouts, CPU, 1e-4)[0] for job in jobs]
    assert sum(bool(samples) for samples in ran) >= 0.9 * len(jobs)


def test_pieces_are_what_a_device_would_hold() -> None:
    jobs, _ = choose_jobs([small_graph()], [SPEEDS] * 3, 2**30, 1000.0)
    linear = [job for job in jobs if "aten.linear.default(f32[6, 10, 32], f32[96, 32]" in job.distinct.text]
    assert [job.rule.needs[0] for job in linear] == [S(0)] * 3
    assert [job.fraction for job in linear] == [1 / 6, 2 / 6, 3 / 6]
    assert linear[0].bytes < linear[-1].bytes


def test_the_budget_and_memory_bound_what_is_chosen() -> None:
    graph = small_graph()
    everything, _ = choose_jobs([graph], [SPEEDS] * 2, 2**30, 1000.0)
    some, _ = choose_jobs([graph], [SPEEDS] * 2, 2**30, 0.6)
    assert 0 < len(some) < len(everything)
    assert choose_jobs([graph], [SPEEDS] * 2, 2**30, 0.0)[0] == ()
    fitting, _ = choose_jobs([graph], [SPEEDS] * 2, 2**16, 1000.0)
    assert all(8 * job.bytes <= 2**16 for job in fitting)
    assert len(fitting) < len(everything)


def test_an_op_that_refuses_is_left_out() -> None:
    graph = small_graph()
    jobs, _ = choose_jobs([graph], [SPEEDS], 2**30, 1000.0)
    job = next(job for job in jobs if "embedding" in job.distinct.text)
    call = replace(job.distinct.call, node=replace(job.distinct.call.node, op="aten.no_such_op.default"))
    assert run_job(replace(job, distinct=replace(job.distinct, call=call)), {}, CPU, 1e-4) == ([], [])


def test_operands_lie_as_in_the_graph() -> None:
    layouts = layouts_of(small_graph())
    # Heads are moved before tokens by a transpose, which leaves memory as it was.
    assert (0, 2, 1, 3) in layouts.values()


def test_speeds_are_of_the_dtypes_that_multiply() -> None:
    graph = small_graph()
    assert speed_dtypes([graph]) == ("f32",)
    speeds = measure_speeds(("f32", "f64"), CPU, 0.1)
    assert [dtype for dtype, _ in speeds.flops_per_s] == ["f32", "f64"]
    assert min(speeds.bytes_per_s, speeds.launch_s, *(flops for _, flops in speeds.flops_per_s)) > 0


def test_indices_that_are_too_large_never_reach_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph("bert-moe")
    calls = {call.text.split("(")[0]: call for call in distinct_calls([graph])}
    one_hot = calls["aten.one_hot.default"]
    assert measure_ops.indices_below(one_hot.call) == one_hot.call.arg("num_classes")
    rules = {name: measure_ops._cut_of(call.call)[0] for name, call in calls.items()}
    assert all(is_safe(call.call, rules[name]) for name, call in calls.items())
    is_safe.cache_clear()
    monkeypatch.setattr(measure_ops, "indices_below", lambda call: 10**6)
    refused = {name for name, call in calls.items() if not is_safe(call.call, rules[name])}
    is_safe.cache_clear()
    assert refused == {"aten.embedding.default", "aten.one_hot.default", "aten.cross_entropy_loss.default"}
