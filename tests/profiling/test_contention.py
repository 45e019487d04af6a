"""Crowding is 1 or more, the same on every rank, and only of those who share a chip. No times are asserted."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.devices import Link
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.graph import Graph
from lopsided.models import zoo
from lopsided.ops.derive import derive_rules
from lopsided.profiling import dry_run
from lopsided.profiling.dry_run import DryRun, _laid_out
from lopsided.profiling.kinds import Found, RankHost, Took, kinds_of, seat_of
from lopsided.profiling.links import ControlGroup
from lopsided.profiling.op_times import OpJob, Speeds, choose_jobs
from lopsided.profiling.overlap import arranged, contention_of, measure_contention, shared_chips
from lopsided.profiling.topology import council_of
from tests.support import clusters

CPU = torch.device("cpu")
SPEEDS = Speeds((("f32", 1e10),), 1e9, 1e-5)


@cache
def small_graph() -> Graph:
    return capture(*zoo.build("gpt2", layers=2, width=32, heads=4, seq=10, vocab=61, batch=6))


@cache
def small_jobs() -> tuple[OpJob, ...]:
    return choose_jobs([small_graph()], [SPEEDS] * 3, 2**30, 10.0)[0]


def seat(host: str = "box", *, gpu: str = "") -> RankHost:
    return RankHost(host, "1", "some hardware", gpu, 8 * 2**30, SPEEDS)


def table_of(seconds: float) -> Found:
    return {job.key: Took(seconds, seconds) for job in small_jobs()}


# Processes


def crowding_here(graph: Graph, jobs: tuple[OpJob, ...], seconds: float, names: tuple[str, ...]) -> tuple[float, ...]:
    """In a worker: as if each rank were on the host of that name, and all calls took so long."""
    real = platform.node
    platform.node = lambda: names[dist.get_rank()]
    try:
        council = council_of(None)
        seats = council.hear(seat_of(CPU, SPEEDS))
        found = [{job.key: Took(seconds, seconds) for job in jobs}] * len(seats)
        return measure_contention([graph], CPU, council, seats, found, jobs, 0.4)  # type: ignore[arg-type]
    finally:
        platform.node = real


@pytest.mark.parametrize("seconds", [1e-4, 10.0])  # calls that fit into a turn; calls that do not
def test_every_rank_hears_the_same(worker_pools: Callable[[int], WorkerPool], seconds: float) -> None:
    told = worker_pools(3).run(crowding_here, small_graph(), small_jobs(), seconds, ("a", "b", "a"))
    assert told[0] == told[1] == told[2]
    assert len(told[0]) == 3
    assert all(math.isfinite(contention) and 1 <= contention <= 100 for contention in told[0])
    assert told[0][1] == 1


def test_who_shares_nothing_is_not_measured() -> None:
    jobs, seats = small_jobs(), [seat("a"), seat("b"), seat("b", gpu="0")]
    found = [table_of(1e-3)] * 3
    # There is nobody to agree with: it would fail if it were tried.
    assert measure_contention([small_graph()], CPU, ControlGroup(None), seats, found, jobs, 1.0) == (1.0, 1.0, 1.0)


# Whole steps


def turn_taken(gpus: tuple[str, ...], what: DryRun | None) -> tuple[float, float, float]:
    """In a worker: what the step took, and when it began and ended; nothing is really run."""
    began, ended = 0.0, 0.0

    def run(*_: object) -> float:
        nonlocal began, ended
        began = time.monotonic()
        time.sleep(0.05)
        ended = time.monotonic()
        return 2.0

    real, dry_run.alone_s = dry_run.alone_s, run
    try:
        seats = [seat(gpu=gpu) for gpu in gpus]
        return dry_run._with_others_at_rest(what, CPU, council_of(None), seats, 0.1), began, ended
    finally:
        dry_run.alone_s = real


def test_those_of_one_gpu_run_dry_in_turn_and_others_at_the_same_time(
    worker_pools: Callable[[int], WorkerPool],
) -> None:
    graph = small_graph()
    alike = clusters.kind(count=2, speed=1e9, bytes_per_s=1e9, launch_s=0.0)
    what = _laid_out(derive_rules(graph), clusters.cluster(alike, link=Link(1e-6, 1e9)))
    assert what is not None
    told = worker_pools(3).run(turn_taken, ("0", "1", "0"), what)
    assert [taken for taken, _, _ in told] == [2.0, 0.0, 2.0]  # who has a GPU to itself has nobody to be crowded by
    (_, _, first_ended), _, (_, second_began, _) = told
    assert first_ended <= second_began
    assert [taken for taken, _, _ in worker_pools(2).run(turn_taken, ("0", "0"), None)] == [0.0, 0.0]
    assert [taken for taken, _, _ in worker_pools(2).run(turn_taken, ("", ""), what)] == [0.0, 0.0]


# What is made of times


@pytest.mark.parametrize(
    ("alone", "together", "contention"),
    [
        ([1.0, 1.0, 7.0], [1.25, 1.25, 9.0], 1.25),
        ([1.0], [0.8], 1.0),
        ([1e-9], [1.0], 100.0),
        ([], [1.0], 1.0),
        ([1.0], [], 1.0),
        ([math.nan, 2.0], [3.0, math.nan], 1.5),
        ([0.0], [1.0], 1.0),
        ([math.nan], [math.nan], 1.0),
    ],
)
def test_a_ratio_of_medians_within_bounds(alone: list[float], together: list[float], contention: float) -> None:
    assert contention_of(alone, together) == contention


def test_chips_are_shared_by_processes_of_a_host_or_a_gpu() -> None:
    cards = [seat("box", gpu="0"), seat("box", gpu="1"), seat("box", gpu="0")]
    assert shared_chips([*cards, seat(), seat("other"), seat()]) == ((0, 2), (3, 5))
    assert shared_chips([seat(), seat("other")]) == ()


def test_the_calls_that_take_most_of_a_step_are_run() -> None:
    jobs = small_jobs()
    slow = {job.distinct.text for job in jobs if job.distinct.times == 1}
    found = {job.key: Took(1.0 if job.distinct.text in slow else 1e-4 * job.fraction, None) for job in jobs}
    turns = arranged(jobs, [found, found], 2, 1.0)
    texts = [job.distinct.text for job in turns.jobs]
    assert 0 < len(texts) == len({*texts})
    assert not slow & {*texts}
    most = max(job.distinct.times * found[job.key].forward_s for job in jobs if job.distinct.text not in slow)
    assert turns.jobs[0].distinct.times * found[turns.jobs[0].key].forward_s == most


@pytest.mark.parametrize("budget_s", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("seconds", [1e-5, 1e-2, 1.0])
@pytest.mark.parametrize("ranks", [2, 8])
def test_turns_fit_the_budget_where_it_is_not_too_small(budget_s: float, seconds: float, ranks: int) -> None:
    turns = arranged(small_jobs(), [table_of(seconds)], ranks, budget_s)
    assert turns.rounds >= 1
    assert turns.seconds >= 0.05
    shortest = 0.05 * (ranks + 1)
    assert turns.rounds * (ranks + 1) * turns.seconds <= max(budget_s, shortest) * (1 + 1e-9)


def test_what_one_rank_did_not_find_is_not_run() -> None:
    turns = arranged(small_jobs(), [table_of(1e-4), {}], 2, 1.0)
    assert turns.jobs == ()


# Kinds


def test_a_kind_has_the_mean_crowding_of_its_ranks() -> None:
    seats, found, nothing = [seat()] * 3, [table_of(1.0), table_of(2.0), table_of(2.0)], [0.0] * 3
    kinds = kinds_of(seats, found, small_jobs(), nothing, nothing, (1.5, 2.0, 3.0))
    assert [(kind.count, kind.contention) for kind in kinds] == [(1, 1.5), (2, 2.5)]
    assert [kind.contention for kind in kinds_of(seats, found, small_jobs(), nothing, nothing)] == [1.0, 1.0]
