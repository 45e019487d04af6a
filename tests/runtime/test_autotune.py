"""Plans compete by the clock. No times are asserted but made-up ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from lopsided.calibration.comparison import computing_s
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.devices import Link
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import InputError, PlanError
from lopsided.ir.graph import Graph
from lopsided.models import zoo
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import plan_graph, plan_rivals
from lopsided.runtime import autotune as room
from lopsided.runtime.autotune import TriedPlan, chosen_by, quickest
from lopsided.runtime.parallelizing import parallelize
from tests.support import clusters

CPU = torch.device("cpu")
SIZES = {"layers": 2, "width": 32, "heads": 4, "seq": 10, "vocab": 61, "batch": 8, "dropout": 0}
FAST_LINK = Link(1e-6, 1e10)


@cache
def graph_of() -> Graph:
    return capture(*zoo.build("gpt2", **SIZES))


def cluster_of(devices: int = 2, link: Link = FAST_LINK) -> Cluster:
    """Devices of one host, the first the fastest."""
    speeds = (1e9 / (number + 1) for number in range(devices))
    return clusters.cluster(*clusters.kinds(*speeds, name="cpu", bytes_per_s=1e9, launch_s=0.0), link=link)


@cache
def plans_of(most: int = 4) -> tuple[Plan, ...]:
    return plan_rivals(graph_of(), cluster_of(), most)


def stored(plan: Plan) -> tuple[int, frozenset[tuple[bool, bool]]]:
    leaves = dict(plan.program.leaves)
    ways = [leaves[leaf.value.name] for leaf in plan.graph.parameters]
    return plan.on.devices, frozenset((way.is_shard, way.by == "state") for way in ways)


# Planning several


def test_the_first_is_the_plan_and_the_others_are_of_other_sorts() -> None:
    plans = plans_of()
    assert len(plans) > 2
    best = plan_graph(graph_of(), cluster_of())
    assert plans[0].step_s <= best.step_s * (1 + 1e-9)
    assert len({stored(plan) for plan in plans}) == len(plans)
    assert [plan.step_s for plan in plans] == sorted(plan.step_s for plan in plans)
    assert plans[-1].step_s <= 1.25 * plans[0].step_s
    assert any(way == (2, frozenset({(False, False)})) for way in map(stored, plans))  # data parallelism


def test_one_is_the_plan_alone() -> None:
    (only,) = plan_rivals(graph_of(), cluster_of(), 1)
    best = plan_graph(graph_of(), cluster_of())
    assert (str(only.program), only.shares, only.step_s) == (str(best.program), best.shares, best.step_s)
    with pytest.raises(InputError, match="0 plans are none"):
        plan_rivals(graph_of(), cluster_of(), 0)


# Choosing


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [((1.0, 0.995), 0), ((1.0, 0.8), 1), ((math.inf, 0.8), 1), ((math.inf, math.inf), 0)],
)
def test_the_first_is_taken_unless_another_is_clearly_quicker(seconds: tuple[float, float], taken: int) -> None:
    plans = plans_of()[:2]
    trials = [TriedPlan(plan, each) for plan, each in zip(plans, seconds, strict=True)]
    assert chosen_by(trials) is plans[taken]


def test_without_plans_there_is_nothing_to_try() -> None:
    with pytest.raises(PlanError, match="no plans to try"):
        quickest((), CPU)


# Trying


def tried(graph: Graph, plans: tuple[Plan, ...], broken: int = -1) -> tuple[int, list[bool], float]:
    """In a worker: which was taken, which ran, and what is left of the model's random numbers. One rank may be unable
    to run any."""
    real = room.alone_s
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == broken:
        room.alone_s = lambda play, *_, **__: None  # type: ignore[assignment]
    torch.manual_seed(5)
    try:
        chosen, trials = quickest(plans, CPU)
    finally:
        room.alone_s = real
    which = next(k for k, plan in enumerate(plans) if str(plan.program) == str(chosen.program))
    return which, [math.isfinite(one.seconds) for one in trials], float(torch.rand(()))


def test_all_ranks_take_the_same_and_random_numbers_stay(worker_pools: Callable[[int], WorkerPool]) -> None:
    plans = plans_of()
    told = worker_pools(2).run(tried, graph_of(), plans)
    assert told[0] == told[1]
    assert all(told[0][1])
    torch.manual_seed(5)
    assert told[0][2] == float(torch.rand(()))


def test_a_plan_that_leaves_a_rank_out_is_tried_as_well(worker_pools: Callable[[int], WorkerPool]) -> None:
    slow = plan_graph(graph_of(), cluster_of(link=Link(1.0, 1e3)))
    assert slow.on.devices == 1
    alone = replace(slow, cluster=cluster_of(), on=cluster_of().only([0]))
    told = worker_pools(2).run(tried, graph_of(), (alone, plans_of()[0]))
    assert told[0] == told[1]
    assert told[0][1] == [True, True]


def test_where_one_rank_cannot_nobody_waits_for_it(worker_pools: Callable[[int], WorkerPool]) -> None:
    told = worker_pools(2).run(tried, graph_of(), plans_of()[:2], 1)
    assert [which for which, _, _ in told] == [0, 0]
    assert [ran for _, ran, _ in told] == [[False, False]] * 2


def slow_second(plans: tuple[Plan, ...]) -> tuple[list[float], list[float], tuple[str, ...], bool]:
    """In a worker: the work shares of the last that was tried and of the one taken. The second rank says it computes
    three times as long as it should, the first as long."""
    real, told = room.alone_s, computing_s(plans[0])

    def own(play: object, place: int, *_: object, **__: object) -> float:
        return (told[0], 3 * told[1])[place]

    room.alone_s = own  # type: ignore[assignment]
    try:
        chosen, trials = quickest(plans, CPU)
    finally:
        room.alone_s = real
    last = trials[-1].plan
    return list(last.shares.work), list(chosen.shares.work), chosen.notes, all(one.seconds > 0 for one in trials)


def test_a_plan_is_balanced_by_what_its_devices_take(worker_pools: Callable[[int], WorkerPool]) -> None:
    plan = next(one for one in plans_of() if one.on.devices == 2)
    told = worker_pools(2).run(slow_second, (plan,))
    assert told[0] == told[1]
    last, chosen, notes, ran = told[0]
    assert ran
    assert last[1] < plan.shares.work[1]
    assert chosen in (last, list(plan.shares.work))
    assert "tried for some steps" in notes[-1]


def by_script(plans: tuple[Plan, ...], balanced: Plan | None, times: list[list[float]]) -> tuple[int, list[float]]:
    """In a worker: which is taken, and seconds of each, if every time that some are tried they take what is told."""
    real, script = (room._Stage.tried, room._Stage.balanced), iter(times)
    room._Stage.tried = lambda _, tried: [TriedPlan(*one) for one in zip(tried, next(script), strict=True)]  # type: ignore[method-assign,assignment]
    room._Stage.balanced = lambda _, plan: balanced  # type: ignore[method-assign]
    try:
        chosen, trials = quickest(plans, CPU)
    finally:
        room._Stage.tried, room._Stage.balanced = real  # type: ignore[method-assign]
    every = [*plans, balanced]
    which = next(
        k for k, one in enumerate(every) if one and (one.program, one.shares) == (chosen.program, chosen.shares)
    )
    return which, [one.seconds for one in trials]


@pytest.mark.parametrize(
    ("times", "taken", "told"),
    [
        ([[1.0, 0.9, 1.3], [0.9, 0.8]], 3, [1.0, 1.3, 0.9, 0.8]),  # nobody came close
        ([[0.95, 0.9, 1.3], [1.0, 0.95, 1.2]], 0, [1.3, 1.0, 0.95, 1.2]),  # the quickest had been lucky
        ([[0.95, 0.9, math.inf], [0.9, 0.95, 1.2]], 1, [math.inf, 0.9, 0.95, 1.2]),
    ],
)
def test_who_came_close_runs_again_beside_the_balanced_one(
    worker_pools: Callable[[int], WorkerPool], times: list[list[float]], taken: int, told: list[float]
) -> None:
    plans = plans_of()[:3]
    assert len(plans) == 3
    second = replace(plans[1], shares=replace(plans[1].shares, work=tuple(reversed(plans[1].shares.work))))
    assert worker_pools(1).run(by_script, plans, second, times) == [(taken, told)]


def train(tries: int) -> tuple[str, tuple[str, ...], float]:
    """In a worker: a model that is parallelized by trying."""
    torch.manual_seed(0)
    model, batch = zoo.build("gpt2", **SIZES)
    pm = parallelize(model, batch, cluster=cluster_of(), tries=tries, seed=3)
    loss = pm(**batch)
    loss.backward()
    return str(pm.plan.program), pm.plan.notes, float(loss.detach())


def test_parallelize_tries_and_trains_the_same(worker_pools: Callable[[int], WorkerPool]) -> None:
    once, several = worker_pools(2).run(train, 1), worker_pools(2).run(train, 3)
    assert several[0] == several[1]
    assert "tried for some steps" in several[0][1][-1]
    assert not any("tried" in note for note in once[0][1])
    assert several[0][2] == pytest.approx(once[0][2], rel=1e-5)


def refused(plan: Plan) -> str:
    """In a worker."""
    model, batch = zoo.build("gpt2", **SIZES)
    with pytest.raises(InputError) as error:
        parallelize(model, batch, plan, tries=3)
    return str(error.value)


def test_a_plan_is_not_tried_against_others(worker_pools: Callable[[int], WorkerPool]) -> None:
    (told,) = worker_pools(1).run(refused, plans_of()[0])
    assert "a plan is given, and 3 are to be tried" in told
