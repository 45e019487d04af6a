"""Techniques that change what is computed: taken where they are allowed and must be or are quicker, never otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Link
from lopsided.errors import DoesNotFitError, InputError, PlanError, ProgramError
from lopsided.ir.graph import Graph
from lopsided.planner.allowed import EIGHT_BIT_STATE, allowed
from lopsided.planner.candidates import memory_limits
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import parse_plan, plan_text
from lopsided.planner.planner import plan_graph
from lopsided.report.plan_diff import diff_plans
from lopsided.report.plan_tables import host_lines, plan_json
from lopsided.schedule.coded_state import BITS, is_coded, state_bytes
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.decisions import Decisions, OnHost
from lopsided.schedule.host_state import host_bytes_per_kind
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, holdings
from lopsided.schedule.pricing import price
from lopsided.schedule.schedule import check_schedule, parse_schedule
from tests.support import clusters
from tests.support.jobs import model_of

# Of few activations and much state.
WIDE = "llama:layers=2,width=64,heads=4,kv_heads=2,ffn=112,seq=4,vocab=61,batch=4"
ADAMW = optimizer_named("adamw")
ALLOW = (EIGHT_BIT_STATE,)


def one_device(mib: float, link: float = 0.0) -> Cluster:
    figures = {"bytes_per_s": 1e9, "launch_s": 1e-6, "host_bytes_per_s": link}
    made = clusters.kind("big", speed=4e9, memory=int(mib * 2**20), **figures)
    return clusters.cluster(made, link=Link(1e-5, 1e9))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(*model_of(WIDE))


@pytest.fixture(scope="module")
def plenty(graph: Graph) -> Plan:
    return plan_graph(graph, one_device(640), microbatches=1, allow=ALLOW)


def short_of(graph: Graph, plenty: Plan, part: float, *, link: float = 0.0, allow: tuple[str, ...] = ALLOW) -> Plan:
    room = part * max(plenty.memory_bytes) / 2**20 / 0.92
    return plan_graph(graph, one_device(room, link), microbatches=1, allow=allow)


@pytest.fixture(scope="module")
def short(graph: Graph, plenty: Plan) -> Plan:
    return short_of(graph, plenty, 0.8)


# The decision


@pytest.mark.parametrize("on_host", [(), (OnHost(0, 40),)])
def test_a_schedule_says_so_and_parses(graph: Graph, on_host: tuple[OnHost, ...]) -> None:
    schedule = lower(lopsided.one_device(graph), Decisions(state_bits=BITS, on_host=on_host))
    check_schedule(schedule)
    assert parse_schedule(str(schedule), schedule.program) == schedule
    assert "state_bits=8" in str(schedule)
    coded = {update.parameter for update in schedule.update if update.bits}
    assert coded == {value.name for value in graph.updated if value.elements >= 4096}
    assert 0 < len(coded) < len(schedule.update)
    with pytest.raises(ProgramError, match="cannot be kept in 3 bits"):
        lower(schedule.program, Decisions(state_bits=3))


def test_bytes_and_seconds_by_hand(graph: Graph) -> None:
    program, where = lopsided.one_device(graph), one_device(640, link=1e8)
    scale, costs = Scale(where, (1.0,)), Costs(graph, where, ADAMW)

    def held(bits: int, *on_host: OnHost) -> tuple[int, int, float]:
        schedule = lower(program, Decisions(state_bits=bits, on_host=on_host))
        update_s = sum(one.seconds[0].at(1.0) for one in price(schedule, costs).updates)
        of_host = host_bytes_per_kind(schedule, ADAMW, scale)[0]
        return bytes_per_kind(holdings(schedule, ADAMW), scale)[0], of_host, update_s

    coded = [value for value in graph.updated if is_coded(value, BITS)]
    saved = sum(2 * value.bytes - state_bytes(ADAMW, value, BITS) for value in coded)
    assert saved == sum(2 * (3 * value.elements - 4 * -(-value.elements // 256)) for value in coded)
    plain, bits = held(0), held(BITS)
    assert plain[0] - bits[0] == saved
    more = sum(2 * (54 * value.elements / 1e9 + 10 * 1e-6) for value in coded)
    assert bits[2] - plain[2] == pytest.approx(more)
    both, away = held(BITS, OnHost(0)), held(0, OnHost(0))
    assert both[1] < 0.5 * away[1]  # and as much less travels
    state = sum(state_bytes(ADAMW, value, BITS) for value in graph.updated)
    assert both[2] - bits[2] == pytest.approx(2 * state / 1e8)


# What the planner chooses


def test_nothing_is_in_8_bits_where_all_fits(plenty: Plan) -> None:
    assert plenty.state_bits == 0


def test_it_is_where_it_must_be_and_is_allowed(graph: Graph, plenty: Plan, short: Plan) -> None:
    assert short.state_bits == BITS
    assert all(held <= limit for held, limit in zip(short.memory_bytes, memory_limits(short.on), strict=True))
    with pytest.raises(DoesNotFitError, match="--allow 8bit-state"):
        short_of(graph, plenty, 0.8, allow=())
    with pytest.raises(DoesNotFitError, match="optimizer state in 8 bits") as refused:
        short_of(graph, plenty, 0.3)
    assert "--allow" not in str(refused.value)


def test_the_quicker_of_fetching_and_8_bits_is_taken(graph: Graph, plenty: Plan, short: Plan) -> None:
    quick = short_of(graph, plenty, 0.8, link=1e12)
    assert (quick.state_bits, bool(quick.on_host)) == (0, True)
    assert quick.step_s < short.step_s
    slow = short_of(graph, plenty, 0.8, link=1e3)
    assert (slow.state_bits, slow.on_host) == (BITS, ())
    assert slow.step_s == pytest.approx(short.step_s)


def test_plans_that_say_so_go_into_files_and_tables(short: Plan, plenty: Plan) -> None:
    text = plan_text(short)
    assert parse_plan(text) == short
    assert "state_bits" not in plan_text(plenty)
    assert plan_json(short)["state_bits"] == BITS
    assert any("kept in 8 bits" in line for line in host_lines(short))
    assert any(one.what == "bits of optimizer state" for one in diff_plans(short, plenty))
    edited = parse_plan(text.replace('"state_bits": 8', '"state_bits": 0', 1))
    assert max(edited.memory_bytes) > max(short.memory_bytes)
    assert any("edited by hand: state_bits" in note for note in edited.notes)
    with pytest.raises(PlanError, match="cannot be kept in 5 bits"):
        parse_plan(text.replace('"state_bits": 8', '"state_bits": 5', 1))


def test_a_known_plan_competes_only_where_it_is_allowed(graph: Graph, short: Plan) -> None:
    with pytest.raises(PlanError, match="keeps optimizer state in 8 bits, which is not allowed"):
        plan_graph(graph, short.cluster, microbatches=1, known=(short,))
    again = plan_graph(graph, short.cluster, microbatches=1, known=(short,), allow=ALLOW)
    assert again.step_s <= short.step_s


def test_what_nobody_knows_is_refused() -> None:
    assert allowed(()) == frozenset()
    assert allowed("8bit-state") == frozenset(ALLOW)
    with pytest.raises(InputError, match="'4bit-state' is no technique") as refused:
        allowed(["8bit-state", "4bit-state"], "--allow")
    assert "8bit-state" in str(refused.value)
    assert "--allow" in str(refused.value)


def test_an_optimizer_without_state_has_none_in_8_bits(graph: Graph) -> None:
    room = one_device(640)
    made = plan_graph(graph, room, optimizer="sgd", microbatches=1, allow=ALLOW)
    assert made.state_bits == 0
    coded = replace(made, state_bits=BITS)
    assert (
        coded.priced(Costs(graph, room, optimizer_named("sgd"))).updates
        == made.priced(Costs(graph, room, optimizer_named("sgd"))).updates
    )
