"""What runs again so that a step fits: levels, blocks, kinds of devices, and what the planner chooses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Link
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import DoesNotFitError, PlanError, ProgramError
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.models import zoo
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.candidates import memory_limits
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import parse_plan, plan_text
from lopsided.planner.planner import plan_graph, predict
from lopsided.planner.recompute import blocks_of
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.decisions import LEVELS, Decisions, Level, Rerun, parse_rerun
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, holdings
from lopsided.schedule.pricing import price
from lopsided.schedule.schedule import Stretch, check_schedule, parse_schedule
from lopsided.verification.on_processes import in_wide
from lopsided.verification.simulator import simulate
from lopsided.verification.verifier import compare, random_program
from tests.support import clusters, jobs
from tests.support.jobs import model_of, run_of
from tests.support.traced_only import traced_only

SPEC = "llama:layers=3,width=32,heads=4,kv_heads=2,ffn=56,seq=16,vocab=61,batch=64"
SHARES = (0.5, 0.3, 0.2)
SGD = optimizer_named("sgd")


def pair(big: float, small: float) -> Cluster:
    """A large and a small device with so many MiB."""
    made = (
        clusters.kind(name, speed=speed, bytes_per_s=speed, memory=int(size * 2**20), launch_s=1e-6)
        for name, speed, size in (("big", 4e9, big), ("small", 1e9, small))
    )
    return clusters.cluster(*made, link=Link(1e-5, 1e9))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(*model_of(SPEC))


def in_blocks(graph: Graph, level: Level, kinds: tuple[int, ...] = ()) -> tuple[Rerun, ...]:
    return tuple(Rerun(graph.nodes[a].name, graph.nodes[b - 1].name, level, kinds) for a, b in blocks_of(graph))


def agrees(plan: Plan, spec: str) -> None:
    """A step in float64 on simulated devices is that of one device."""
    wide = in_wide(plan)
    model, batch = load(spec)
    model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    expected = simulate(lopsided.one_device(wide.graph), model, batch, (1.0,))
    about = (wide.program, model, batch, wide.shares)
    found = simulate(*about, decisions=wide.decisions, kinds=wide.kind_numbers)
    error, where = compare(found, expected)
    assert error < 1e-9, where


# Blocks and regions


def test_blocks_end_where_few_values_pass(graph: Graph) -> None:
    blocks = blocks_of(graph)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(blocks))
    ends = [graph.nodes[stop - 1].op for _, stop in blocks]
    assert ends.count("aten.add.Tensor") == 6  # two of each layer


def test_what_a_model_checkpoints_itself_stays_its_own() -> None:
    from tests.ir.test_recompute import captured

    graph = captured(True)
    inside = {node.name for node in graph.nodes if node.context.recompute}
    assert inside
    assert not inside & {node.name for start, stop in blocks_of(graph) for node in graph.nodes[start:stop]}
    one = next(iter(inside))
    with pytest.raises(ProgramError, match="two regions"):
        lower(lopsided.one_device(graph), Decisions(reruns=(Rerun(one, one),)))


def test_each_level_holds_less_and_takes_longer(graph: Graph) -> None:
    program = lopsided.one_device(graph)
    costs = Costs(graph, pair(1, 1).without_device("box/small-1"), SGD)
    scale = Scale(costs.cluster, (1.0,))
    held, again = [], []
    for reruns in ((), *(in_blocks(graph, level) for level in LEVELS)):
        schedule = lower(program, Decisions(reruns=reruns))
        check_schedule(schedule)
        held.append(bytes_per_kind(holdings(schedule, SGD), scale)[0])
        twice = [item for item in price(schedule, costs).computes if item.phase == "again"]
        again.append(sum(item.seconds[0].at(1.0) for item in twice))
    assert held == sorted(held, reverse=True)
    assert again == sorted(again)
    assert len({*held}) == len(held)


def test_the_last_product_of_a_block_does_not_run_again(graph: Graph) -> None:
    schedule = lower(lopsided.one_device(graph), Decisions(reruns=in_blocks(graph, "whole")))
    for region in schedule.regions.values():
        assert region.nodes[-1] not in schedule.again or "dropout" in "".join(region.nodes)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kinds", [(), (0, 2)])
def test_a_schedule_with_regions_prints_and_parses(graph: Graph, level: Level, kinds: tuple[int, ...]) -> None:
    schedule = lower(lopsided.one_device(graph), Decisions(reruns=in_blocks(graph, level, kinds)))
    assert parse_schedule(str(schedule), schedule.program) == schedule
    assert all(parse_rerun(str(rerun)) == rerun for rerun in schedule.decisions.reruns)


def test_what_names_no_region_is_refused(graph: Graph) -> None:
    first, last = graph.nodes[0].name, graph.nodes[-1].name
    for text in ("", "a", "a..b", "a..b:some", f"{first}..{last}:whole:x"):
        with pytest.raises(ProgramError, match="names no region"):
            parse_rerun(text)
    program = lopsided.one_device(graph)
    with pytest.raises(ProgramError, match="no node 'nobody'"):
        lower(program, Decisions(reruns=(Rerun("nobody", last),)))
    with pytest.raises(ProgramError, match="ends before it begins"):
        lower(program, Decisions(reruns=(Rerun(last, first),)))


def test_a_region_that_sends_runs_again_on_all_kinds(graph: Graph) -> None:
    plain = data_parallel(derive_rules(graph), jobs.prices_of(graph, Shares(SHARES)))
    reruns = in_blocks(graph, "whole", (0,))[:-1]  # the last has the loss, of which all have a term
    assert {region.kinds for region in lower(plain, Decisions(reruns=reruns)).regions.values()} == {(0,)}
    assert {region.kinds for region in lower(stored_cut(plain), Decisions(reruns=reruns)).regions.values()} == {()}


# The same as one device


@pytest.mark.parametrize("model", ["gpt2", "llama", "bert-moe", "resnet50", "t5"])
def test_regions_of_every_level_are_exact(model: str) -> None:
    module, batch = load(zoo.SMALL[model])
    module, batch = module.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    graph = capture(module, batch)
    expected = simulate(lopsided.one_device(graph), module, batch, (1.0,))
    program = random_program(derive_rules(graph), random.Random(3))
    for level in LEVELS:
        found = simulate(program, module, batch, SHARES, decisions=Decisions(reruns=in_blocks(graph, level)))
        error, where = compare(found, expected)
        assert error < 1e-9, (level, where)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", ["gpt2", "llama", "bert-moe", "t5"])
def test_what_runs_again_does_so_in_functions(model: str, level: Level) -> None:
    module, batch = load(zoo.SMALL[model])
    module, batch = module.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    graph = capture(module, batch)
    expected = simulate(lopsided.one_device(graph), module, batch, (1.0,))
    book, where = derive_rules(graph), Shares(SHARES)
    programs = [
        (lopsided.one_device(graph), (1.0,)),
        (stored_cut(data_parallel(book, jobs.prices_of(graph, where))), (0.6, 0.0, 0.4)),
        (random_program(book, random.Random(3), calm=0.9), SHARES),
    ]
    for program, shares in programs:
        decisions = Decisions(reruns=in_blocks(graph, level), stretch=64, regather=True)
        schedule = lower(program, decisions)
        together = [one.nodes for one in schedule.forward if isinstance(one, Stretch) if one.nodes[0] in schedule.again]
        assert together
        assert all(schedule.again.issuperset(nodes) for nodes in together)
        with traced_only() as made:
            error, at = compare(simulate(program, module, batch, shares, decisions=decisions), expected)
        assert error < 1e-9, at
        assert made
        assert None not in made.values()


def test_processes_of_which_some_run_again(worker_pools: Callable[[int], WorkerPool]) -> None:
    """The small device recomputes, the others keep; and all of them do, with parameters gathered again."""
    graph = jobs.book_of(zoo.SMALL["gpt2"]).graph
    shares = Shares(SHARES)
    plain = data_parallel(jobs.book_of(zoo.SMALL["gpt2"]), jobs.prices_of(graph, shares))
    runs = [
        run_of(zoo.SMALL["gpt2"], plain, shares, reruns=in_blocks(graph, "whole", (2,))),
        run_of(zoo.SMALL["gpt2"], plain, shares, reruns=in_blocks(graph, "cheap", (0, 1))),
        run_of(zoo.SMALL["gpt2"], stored_cut(plain), shares, regather=True, reruns=in_blocks(graph, "attention")),
    ]
    for rank in worker_pools(3).run(jobs.step, runs):
        for error, where in rank:
            assert error < 1e-9, where


# What the planner chooses


@pytest.fixture(scope="module")
def plenty(graph: Graph) -> Plan:
    return plan_graph(graph, pair(640, 640))


@pytest.fixture(scope="module")
def short(graph: Graph, plenty: Plan) -> Plan:
    """Where the large device is full and the small one has less than it needs."""
    large, small = (held / 2**20 / 0.92 for held in plenty.memory_bytes)
    return plan_graph(graph, pair(1.01 * large, 0.6 * small), microbatches=1)


def test_nothing_runs_again_where_all_fits(plenty: Plan) -> None:
    assert plenty.reruns == ()


def test_what_does_not_fit_is_recomputed(short: Plan, plenty: Plan) -> None:
    plan = short
    assert plan.reruns
    assert all(held <= limit for held, limit in zip(plan.memory_bytes, memory_limits(plan.on), strict=True))
    assert plan.step_s < 1.5 * plenty.step_s
    agrees(plan, SPEC)
    assert parse_plan(plan_text(plan)) == plan


def test_a_plan_with_regions_loads_and_says_what_is_wrong_with_them(graph: Graph, plenty: Plan) -> None:
    where = pair(640, 640)
    prices = SharePrices(Costs(graph, where, optimizer_named("adamw")), Scale(where, (0.7, 0.3)))
    program = data_parallel(derive_rules(graph), prices)
    plan = replace(plenty, program=program, shares=Shares((0.7, 0.3)), reruns=in_blocks(graph, "whole", (1,)))
    before = predict(plan.program, plan.shares, plan.on, plan.optimizer, plan.regather, plan.bucket_bytes)[2]
    how = (plan.optimizer, plan.regather, plan.bucket_bytes, plan.reruns)
    step_s, breakdown, memory = predict(plan.program, plan.shares, plan.on, *how)
    assert memory[1] < before[1]
    assert memory[0] == before[0]
    plan = replace(plan, step_s=step_s, breakdown=breakdown, memory_bytes=memory)
    text = plan_text(plan)
    assert parse_plan(text) == plan
    with pytest.raises(PlanError, match="there are 2 kinds"):
        parse_plan(text.replace(":whole:1", ":whole:7"))
    with pytest.raises(PlanError, match="names no region"):
        parse_plan(text.replace(":whole:1", ":a lot"))


def test_no_uniform_choice_of_what_runs_again_is_better(graph: Graph, short: Plan) -> None:
    """Every level of every number of blocks, on every set of kinds, with the plan's own shares and program."""
    plan = short
    limits = memory_limits(plan.on)
    found = []
    for level, kinds in itertools.product(LEVELS, ((), (0,), (1,))):
        blocks = in_blocks(graph, level, kinds)
        for count in range(len(blocks) + 1):
            for chosen in (blocks[:count], blocks[len(blocks) - count :]):
                step_s, _, memory = predict(plan.program, plan.shares, plan.on, "adamw", False, 2**20, chosen)
                if all(held <= limit for held, limit in zip(memory, limits, strict=True)):
                    found.append(step_s)
    assert plan.step_s <= 1.02 * min(found)


def test_the_small_device_recomputes_and_the_large_one_keeps(graph: Graph) -> None:
    """With whole parameters nothing is sent forward, and each kind of device decides for itself."""
    plenty = plan_graph(graph, pair(640, 640), pins=("*=I",))
    large, small = (held / 2**20 / 0.92 for held in plenty.memory_bytes)
    plan = plan_graph(graph, pair(1.01 * large, 0.85 * small), pins=("*=I",), microbatches=1)
    assert {rerun.kinds for rerun in plan.reruns if rerun.level != "chunked"} == {(1,)}
    assert {region.kinds for region in plan.schedule.regions.values()} == {(1,)}
    agrees(plan, SPEC)


def test_what_fits_nowhere_is_refused(graph: Graph) -> None:
    with pytest.raises(DoesNotFitError, match="no program was found that fits"):
        plan_graph(graph, pair(0.3, 0.3), microbatches=1)


def test_numbers_are_no_numbers_where_nobody_needs_them(graph: Graph) -> None:
    """What stands in place of a result that nobody needs would be seen in a gradient."""
    model, batch = load(SPEC)
    reruns = in_blocks(graph, "whole")
    found = simulate(lopsided.one_device(graph), model, batch, (1.0,), decisions=Decisions(reruns=reruns))
    assert all(torch.isfinite(gradient).all() for gradient in found.gradients.values())
