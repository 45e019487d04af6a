"""What regions save in host memory: the decision, bytes and seconds, the same numbers, and what the planner chooses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Link
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import DoesNotFitError, ProgramError
from lopsided.executor import offload
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.models import zoo
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.candidates import memory_limits
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import parse_plan, plan_text
from lopsided.planner.planner import plan_graph
from lopsided.planner.recompute import blocks_of
from lopsided.report.plan_tables import rerun_lines
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.decisions import Decisions, Level, Rerun, parse_rerun
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, holdings, sent_to_host
from lopsided.schedule.offload import offloaded_bytes_per_kind
from lopsided.schedule.pricing import price
from lopsided.schedule.regions import reruns_in
from lopsided.schedule.rounds import in_rounds
from lopsided.schedule.schedule import Schedule, check_schedule, parse_schedule
from lopsided.verification.simulator import Simulation, simulate
from lopsided.verification.verifier import compare, random_program
from tests.support import clusters, jobs
from tests.support.jobs import model_of, run_of

SPEC = "llama:layers=3,width=32,heads=4,kv_heads=2,ffn=56,seq=16,vocab=61,batch=64"
SHARES = (0.5, 0.3, 0.2)
SGD = optimizer_named("sgd")


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


def in_blocks(graph: Graph, level: Level = "offload", kinds: tuple[int, ...] = ()) -> tuple[Rerun, ...]:
    return tuple(Rerun(graph.nodes[a].name, graph.nodes[b - 1].name, level, kinds) for a, b in blocks_of(graph))


def lowered(graph: Graph, *reruns: Rerun) -> Schedule:
    return lower(lopsided.one_device(graph), Decisions(reruns=reruns))


# The decision


@pytest.mark.parametrize("kinds", [(), (0, 2)])
def test_a_schedule_says_so_and_parses(graph: Graph, kinds: tuple[int, ...]) -> None:
    reruns = in_blocks(graph, kinds=kinds)
    schedule = lowered(graph, *reruns)
    check_schedule(schedule)
    assert parse_schedule(str(schedule), schedule.program) == schedule
    assert tuple(map(parse_rerun, map(str, reruns))) == reruns
    assert len(schedule.offloaded) == len(reruns)
    # Nothing runs again, and nothing is sent otherwise.
    assert schedule.passes == lowered(graph).passes


def test_what_excludes_each_other_is_refused(graph: Graph) -> None:
    one = in_blocks(graph)[1]
    with pytest.raises(ProgramError, match="where parameters are gathered again"):
        lower(lopsided.one_device(graph), Decisions(regather=True, reruns=(one,)))
    for other in (replace(one, level="whole"), replace(one, level="cheap", kinds=(0,))):
        with pytest.raises(ProgramError, match="on the same devices"):
            lowered(graph, one, other)
    with pytest.raises(ProgramError, match="two regions"):
        lowered(graph, one, one)
    with pytest.raises(ProgramError, match="no node 'nobody'"):
        lowered(graph, replace(one, first="nobody"))
    with pytest.raises(ProgramError, match="ends before it begins"):
        lowered(graph, replace(one, first=one.last, last=one.first))
    apart = (replace(one, kinds=(0,)), replace(one, level="whole", kinds=(1,)))
    assert len(lowered(graph, *apart).offloaded) == 1
    assert tuple(reruns_in(graph, apart)) == apart


# Bytes and seconds


def test_the_device_holds_what_it_would_if_all_ran_again(graph: Graph) -> None:
    scale = Scale(pair(640, 640).only([0]), (1.0,))

    def held(*reruns: Rerun) -> int:
        return bytes_per_kind(holdings(lowered(graph, *reruns), SGD), scale)[0]

    assert held(*in_blocks(graph)) == held(*in_blocks(graph, "whole")) < 0.5 * held()
    here, there = in_blocks(graph, kinds=(0,)), in_blocks(graph, kinds=(1,))
    assert held(*here) == held(*in_blocks(graph))
    assert held(*there) == held()


def test_what_is_sent_takes_what_the_link_takes_both_ways(graph: Graph) -> None:
    costs = Costs(graph, pair(640, 640, link=1e8), SGD)
    schedule = lowered(graph, *in_blocks(graph, kinds=(1,)))
    before, after = (price(one, costs).computed for one in (lowered(graph), schedule))
    sent = sum(one.bytes for _, _, held in sent_to_host(schedule) for one in held)
    assert sent > 0
    for kind, expected in ((0, 0.0), (1, 2 * sent / 1e8)):
        more = [sum(one.seconds[kind].at(1.0) for one in priced.values()) for priced in (after, before)]
        assert more[0] - more[1] == pytest.approx(expected)
    filled = offloaded_bytes_per_kind(schedule, Scale(costs.cluster, (0.5, 0.5)))
    assert filled[0] == 0
    assert filled[1] >= 0.5 * sum(one.bytes for _, _, held in sent_to_host(schedule) for one in held)


# The same numbers


def step_of(spec: str, reruns: tuple[Rerun, ...]) -> Simulation:
    torch.manual_seed(0)
    module, batch = load(spec)
    module, batch = module.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    program = lopsided.one_device(capture(module, batch))
    return simulate(program, module, batch, (1.0,), decisions=Decisions(reruns=reruns))


@pytest.mark.parametrize("spec", [SPEC, zoo.SMALL["gpt2"], zoo.SMALL["resnet50"]])
def test_a_step_is_the_same_to_the_last_bit(spec: str) -> None:
    reruns = in_blocks(capture(*model_of(spec)))
    plain, away = step_of(spec, ()), step_of(spec, reruns)
    assert compare(away, plain)[0] == 0.0


def test_rounds_save_there_one_after_the_other() -> None:
    torch.manual_seed(0)
    module, batch = load(SPEC)
    rounds = in_rounds(capture(module.double(), batch), 4)
    found = [
        simulate(
            lopsided.one_device(rounds.graph),
            module,
            batch,
            (1.0,),
            decisions=Decisions(microbatches=4, reruns=reruns),
            rounds=rounds,
        )
        for reruns in ((), in_blocks(rounds.graph))
    ]
    assert compare(found[1], found[0])[0] == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_are_the_same_on_unequal_devices(seed: int) -> None:
    spec = zoo.SMALL["gpt2"]
    module, batch = load(spec)
    module = module.double()
    graph = capture(module, batch)
    expected = simulate(lopsided.one_device(graph), module, batch, (1.0,))
    program = random_program(derive_rules(graph), random.Random(seed))
    for kinds in ((), (1,)):
        decisions = Decisions(reruns=in_blocks(graph, kinds=kinds))
        found = simulate(program, module, batch, SHARES, decisions=decisions, kinds=(0, 1, 1))
        error, where = compare(found, expected)
        assert error < 1e-9, where


def test_processes_step_as_one_device(worker_pools: Callable[[int], WorkerPool]) -> None:
    spec, shares = zoo.SMALL["gpt2"], Shares(SHARES, named=(("state", (0.2, 0.5, 0.3)),))
    none = Shares((0.7, 0.0, 0.3), named=(("state", (0.4, 0.6, 0.0)),))
    book = derive_rules(capture(*model_of(spec)))
    graph = book.graph
    plain = data_parallel(book, jobs.prices_of(graph, shares))
    mixed = (*in_blocks(graph, kinds=(0, 1))[:-1], *in_blocks(graph, "whole", (2,))[:-1])
    runs = [
        run_of(spec, plain, shares, reruns=in_blocks(graph)),
        run_of(spec, plain, none, reruns=mixed),
        run_of(spec, stored_cut(plain), none, reruns=in_blocks(graph)),
    ]
    for found in worker_pools(3).run(jobs.step, runs):
        assert all(error < 1e-9 for error, _ in found), found


# What is really sent


def test_what_is_counted_is_sent_once_and_leaves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Llama in float32: the bytes of each block, and after the forward pass only those that others hold are here."""
    sent: list[tuple[StorageWeakRef, int]] = []
    left: list[int] = []
    make, fetch = offload._Memory.__init__, offload._Memory.fetched

    def noted(self: Any, tensor: torch.Tensor) -> None:
        make(self, tensor)
        sent.append((StorageWeakRef(tensor.untyped_storage()), self._host.numel()))

    def fetched(self: offload._Memory) -> torch.Tensor:
        if not left:
            left.append(sum(size for storage, size in sent if not storage.expired()))
        return fetch(self)

    monkeypatch.setattr(offload._Memory, "__init__", noted)
    monkeypatch.setattr(offload._Memory, "fetched", fetched)
    module, batch = load(SPEC)
    program = lopsided.one_device(capture(module, batch))
    decisions = Decisions(reruns=in_blocks(program.graph))
    simulate(program, module, batch, (1.0,), decisions=decisions)
    counted = sum(one.bytes for _, _, held in sent_to_host(lower(program, decisions)) for one in held)
    assert sum(size for _, size in sent) == pytest.approx(counted, rel=0.1)
    assert left[0] < 0.15 * counted


def test_a_memory_is_sent_once_and_what_stays_is_not_taken_for_another() -> None:
    store = offload.HostStore()
    stays, saved = torch.randn(40, 25), torch.randn(30, 20)
    store.leave(stays)
    held = StorageWeakRef(stays.untyped_storage())
    assert store.pack(stays[3]).data_ptr() == stays[3].data_ptr()  # type: ignore[union-attr]
    del stays
    assert not held.expired()
    views = (saved, saved.t(), saved[5:, 3::4], saved[:1].expand(7, 20))
    kept = [store.pack(view) for view in views]
    expected = [view.clone() for view in views]
    assert len(store._sent) == 1
    assert store.unpack(store.pack(torch.ones(()))) == 1
    gone = StorageWeakRef(saved.untyped_storage())
    store.done()
    del saved, views
    assert gone.expired()
    assert held.expired()
    for one, view in zip(kept, expected, strict=True):
        assert torch.equal(store.unpack(one), view)


# What the planner chooses


@pytest.fixture(scope="module")
def plenty(graph: Graph) -> Plan:
    return plan_graph(graph, pair(640, 640, link=1e10), pins=("*=I",), microbatches=1)


def short_of(graph: Graph, plenty: Plan, part: float, **more: float) -> Plan:
    large, small = (part * plenty.memory_bytes[place] / 2**20 / 0.92 for place in (0, -1))
    return plan_graph(graph, pair(large, small, **more), pins=("*=I",), optimizer="sgd", microbatches=1)


def levels(plan: Plan) -> set[str]:
    return {rerun.level for rerun in plan.reruns} - {"chunked"}


def test_the_quicker_of_travelling_and_running_again_is_taken(graph: Graph, plenty: Plan) -> None:
    assert levels(plenty) == set()
    without, slow, quick = (short_of(graph, plenty, 0.4, link=link) for link in (0.0, 1e6, 1e11))
    assert levels(without) == levels(slow) != set()
    assert "offload" not in levels(slow)
    assert levels(quick) == {"offload"}
    assert quick.step_s < without.step_s
    assert slow.step_s == pytest.approx(without.step_s)
    for plan in (slow, quick):
        assert all(held <= limit for held, limit in zip(plan.memory_bytes, memory_limits(plan.on), strict=True))
    assert parse_plan(plan_text(quick)) == quick
    assert any("goes to the memory of the host and back" in line for line in rerun_lines(quick))


def test_the_host_has_to_have_the_room(graph: Graph, plenty: Plan) -> None:
    quick = short_of(graph, plenty, 0.4, link=1e11, host_mib=0.01)
    assert "offload" not in levels(quick)


def test_what_has_no_room_anywhere_does_not_fit(graph: Graph, plenty: Plan) -> None:
    with pytest.raises(DoesNotFitError):
        short_of(graph, plenty, 0.01, link=1e11)
