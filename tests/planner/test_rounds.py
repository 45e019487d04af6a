"""In how many rounds the batch is computed: what must be, what pays, and what is said of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Link
from lopsided.errors import DoesNotFitError
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.ir.program import one_device
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.candidates import memory_limits
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import parse_plan, plan_text
from lopsided.planner.planner import plan_graph, plan_rivals, predict
from lopsided.report.plan_tables import plan_json, round_lines
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.critical_path import CriticalPath, FoldedStep
from lopsided.schedule.decisions import Decisions
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import holdings
from lopsided.schedule.pricing import price
from lopsided.schedule.rounds import NoRoundsError, in_rounds
from lopsided.schedule.timeline import run
from tests.support import clusters
from tests.support.jobs import model_of, prices_of

SPEC = "llama:layers=1,width=24,heads=3,kv_heads=3,ffn=40,seq=16,vocab=61,batch=16"
SHARES = Shares((0.6, 0.4), named=(("state", (0.5, 0.5)),))
SGD = optimizer_named("sgd")


def pair(big: float, small: float, launch_s: float = 1e-6) -> Cluster:
    """A large and a small device with so many MiB."""
    made = (
        clusters.kind(name, speed=speed, bytes_per_s=speed, memory=int(size * 2**20), launch_s=launch_s)
        for name, speed, size in (("big", 4e9, big), ("small", 1e9, small))
    )
    return clusters.cluster(*made, link=Link(1e-5, 1e9))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(*model_of(SPEC))


@pytest.fixture(scope="module")
def short(graph: Graph) -> Plan:
    return plan_graph(graph, pair(0.2, 0.15), optimizer="sgd")


def test_what_does_not_fit_at_once_is_computed_in_rounds(graph: Graph, short: Plan) -> None:
    with pytest.raises(DoesNotFitError):
        plan_graph(graph, pair(0.2, 0.15), optimizer="sgd", microbatches=1)
    assert short.microbatches > 1
    limits = dict(zip([kind.name for kind in short.on.kinds], memory_limits(short.on), strict=True))
    for device, held in zip(short.on.kinds, short.memory_bytes, strict=True):
        assert held <= limits[device.name]
    assert short.graph == in_rounds(graph, short.microbatches).graph
    assert short.rows == 16


def test_rounds_are_chosen_where_they_are_quicker_than_running_again(graph: Graph) -> None:
    at_once = plan_graph(graph, pair(0.5, 0.3), optimizer="sgd", microbatches=1)
    assert at_once.reruns or at_once.regather
    chosen = plan_graph(graph, pair(0.5, 0.3), optimizer="sgd")
    assert chosen.microbatches > 1
    assert chosen.step_s < at_once.step_s


def test_what_fits_is_computed_at_once(graph: Graph) -> None:
    plenty = plan_graph(graph, pair(500, 500), optimizer="sgd")
    assert plenty.microbatches == 1
    assert not list(round_lines(plenty))
    pinned = plan_graph(graph, pair(500, 500), optimizer="sgd", microbatches=4)
    assert pinned.microbatches == 4
    assert pinned.step_s > plenty.step_s


def test_what_fits_in_no_rounds_says_so(graph: Graph) -> None:
    with pytest.raises(DoesNotFitError, match="rounds  not in up to 16 rounds"):
        plan_graph(graph, pair(0.05, 0.05), optimizer="sgd")


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def sizes_in(text: str) -> list[float]:
    return [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) ([KMG]?i?B)", text)]


def test_what_fits_nowhere_tells_the_least_need_and_what_takes_it(graph: Graph) -> None:
    with pytest.raises(DoesNotFitError) as at_once:
        plan_graph(graph, pair(0.05, 0.05), optimizer="sgd", microbatches=1)
    with pytest.raises(DoesNotFitError, match=r"even in \d+ rounds") as at_all:
        plan_graph(graph, pair(0.05, 0.05), optimizer="sgd")
    needs, has, usable, missing = sizes_in(at_all.value.what)
    assert needs < sizes_in(at_once.value.what)[0]
    assert has == pytest.approx(0.05 * 2**20, rel=0.01)
    assert usable == pytest.approx(0.92 * has, rel=0.01)
    assert missing == pytest.approx(needs - usable, rel=0.05)
    assert sum(sizes_in(at_all.value.facts["uses"])) == pytest.approx(needs, rel=0.05)
    # A round has fewer rows already.
    assert "a batch of at most" not in at_all.value.do
    assert sizes_in(at_all.value.do)[0] == missing
    enough = pair(*(1.05 * (has + missing / 0.92) / 2**20 for _ in range(2)))
    assert plan_graph(graph, enough, optimizer="sgd").microbatches > 1


def test_what_fits_in_rounds_is_not_made_to_fit_otherwise(graph: Graph) -> None:
    """Where rounds cost next to nothing, nothing runs again, nothing is gathered again."""
    plan = plan_graph(graph, pair(0.6, 0.6, launch_s=1e-9), optimizer="sgd")
    assert plan.microbatches > 1
    assert not plan.reruns
    assert not plan.regather
    assert plan.step_s < plan_graph(graph, pair(0.6, 0.6, launch_s=1e-9), optimizer="sgd", microbatches=1).step_s


@pytest.mark.parametrize(("mib", "bytes_per_s"), [(2.4, 1e7), (3.0, 1e8)])
def test_no_other_number_of_rounds_is_better(mib: float, bytes_per_s: float) -> None:
    """Where rounds are not free, as parameters are gathered in each, and not all that is freed is needed in more."""
    graph = capture(*model_of("gpt2:layers=2,width=64,heads=2,seq=32,vocab=97,dropout=0,batch=32"))
    cluster = replace(pair(mib, mib), between=Link(1e-5, bytes_per_s))
    steps = [plan_graph(graph, cluster, microbatches=count).step_s for count in (4, 8, 16, 32)]
    plan = plan_graph(graph, cluster)
    assert plan.microbatches > 1
    assert plan.step_s <= min(steps) * 1.001


def test_what_cannot_be_in_rounds_says_why() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 5))
    batch = (torch.randn(64, 64), torch.zeros(64, dtype=torch.long))
    graph = capture(model, batch, loss_fn=nn.functional.cross_entropy)
    with pytest.raises(DoesNotFitError, match="batch norm in training"):
        plan_graph(graph, pair(0.02, 0.02), optimizer="sgd")
    with pytest.raises(NoRoundsError, match="batch norm"):
        plan_graph(graph, pair(500, 500), optimizer="sgd", microbatches=2)


def test_a_plan_in_rounds_is_text_and_tells_it(short: Plan) -> None:
    text = plan_text(short)
    again = parse_plan(text)
    assert again == short
    # A plan that was edited is predicted anew, rounds included.
    edited = parse_plan(text.replace(f'"microbatches": {short.microbatches}', '"microbatches": 1', 1))
    assert edited.microbatches == 1
    assert edited.step_s < short.step_s
    said = " ".join(round_lines(short))
    assert f"in {short.microbatches} rounds of {16 // short.microbatches} rows" in said
    assert plan_json(short)["microbatches"] == short.microbatches
    assert plan_json(short)["batch"] == 16


def test_rivals_are_in_as_many_rounds(graph: Graph) -> None:
    made = plan_rivals(graph, pair(500, 500), 2, optimizer="sgd", microbatches=2)
    assert {plan.microbatches for plan in made} == {2}


def test_every_round_pays_for_its_kernels(graph: Graph) -> None:
    on = pair(500, 500, launch_s=1e-3).without_device("box/small-1")
    steps = {}
    for count in (1, 2, 4):
        rounds = in_rounds(graph, count)
        step_s, _, _ = predict(one_device(rounds.graph), Shares((1.0,)), on, "sgd", False, microbatches=count)
        steps[count] = step_s
    calls = sum(len(item.results) > 0 for item in graph.nodes)
    assert steps[1] < steps[2] < steps[4]
    assert steps[4] - steps[2] > calls * 1e-3  # two more rounds, at least a launch for every call


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_the_folded_step_and_the_timeline_agree_on_rounds(graph: Graph, cut: bool, regather: bool) -> None:
    on, rounds = pair(500, 500), in_rounds(graph, 4)
    program = data_parallel(derive_rules(rounds.graph), prices_of(rounds.graph, SHARES))
    program = stored_cut(program) if cut else program
    costs, scale = Costs(rounds.graph, on, SGD), Scale(on, SHARES)
    priced = price(lower(program, Decisions(2**12, regather=regather, microbatches=4)), costs)
    folded = FoldedStep(priced, costs.network)
    path = CriticalPath(folded, scale, folded.ways(costs.network, scale))
    assert path.step_s == pytest.approx(run(priced, costs.network, scale).step_s, rel=1e-9)


def test_memory_has_one_rounds_activations_and_the_sums(graph: Graph) -> None:
    def held(count: int, *, regather: bool = False) -> dict[str, int]:
        made = in_rounds(graph, count).graph
        program = stored_cut(data_parallel(derive_rules(made), prices_of(made, SHARES)))
        schedule = lower(program, Decisions(regather=regather, microbatches=count))
        found: dict[str, int] = {}
        inputs = {leaf.value.name for leaf in made.leaves if leaf.kind == "input"}
        for holding in holdings(schedule, SGD):
            use = "inputs" if holding.what in inputs else holding.use
            found[use] = found.get(use, 0) + holding.bytes
        return found

    once, four, again = held(1), held(4), held(4, regather=True)
    parameters = sum(leaf.value.bytes for leaf in graph.parameters)
    assert four["saved"] < once["saved"] / 3
    assert four["inputs"] == once["inputs"]
    assert four["gradient"] == once["gradient"] + parameters
    assert again["gradient"] == once["gradient"]


def test_a_known_plan_in_rounds_competes(graph: Graph, short: Plan) -> None:
    again = plan_graph(graph, pair(0.2, 0.15), optimizer="sgd", known=[short])
    assert again.step_s <= short.step_s * (1 + 1e-9)


def test_rounds_are_wanted_by_the_function_too(short: Plan) -> None:
    model, batch = model_of(SPEC)
    made = lopsided.plan(model, batch, pair(500, 500), optimizer="sgd", microbatches=2)
    assert made.microbatches == 2
    assert replace(made, capture_s=0.0, planning_s=0.0).graph == in_rounds(capture(model, batch), 2).graph
