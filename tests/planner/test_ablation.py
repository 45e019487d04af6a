"""Plans made with less than there is: they lack what they should, are legal, compute the same, and cost no less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Link, Measured
from lopsided.cluster.cluster_file import load_cluster
from lopsided.cluster.collectives import Network
from lopsided.errors import InputError
from lopsided.ir.graph import Graph
from lopsided.ir.op_call import TOLERANCE, in_float64
from lopsided.ir.placement import I, Shares
from lopsided.ir.program import RuleBook, check_program, one_device
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.ablation import ADDITIONS, HAP, additions_named, beliefs, fewer_rules
from lopsided.planner.baselines import STATE, data_parallel, stored_cut
from lopsided.planner.plan_file import parse_plan, plan_text
from lopsided.planner.planner import plan_graph, predict
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, Transfer, optimizer_named
from lopsided.schedule.decisions import Decisions
from lopsided.schedule.lower import lower
from lopsided.schedule.pricing import Computed, price
from lopsided.schedule.schedule import Bucket, Schedule, check_schedule
from lopsided.schedule.timeline import run
from lopsided.verification.simulator import simulate
from lopsided.verification.verifier import compare
from tests.support import clusters
from tests.support.schedules import Flat, lay_out

SMALL = "bert:layers=1,width=32,heads=4,seq=8,vocab=64,dropout=0,batch=16"


def unequal(*speeds: float, memory: float = 2**34) -> Cluster:
    """Devices of these speeds, in GFLOP/s, each a kind. Launches cost nothing, so that a small model is worth it."""
    figures = ({"speed": speed * 1e9, "bytes_per_s": speed * 1e9, "memory": memory} for speed in speeds)
    kinds = (clusters.kind(f"d{k}", f"n{k}", launch_s=1e-9, **each) for k, each in enumerate(figures))
    return clusters.cluster(*kinds, link=Link(1e-6, 1e10))


@pytest.fixture(scope="module")
def small() -> Graph:
    return capture(*load(SMALL))


@pytest.fixture(scope="module")
def book(small: Graph) -> RuleBook:
    return derive_rules(small)


# Names


def test_hap_stands_for_all() -> None:
    assert additions_named([HAP]) == {*ADDITIONS}
    assert additions_named(["sfb", "overlap"]) == {"sfb", "overlap"}
    assert additions_named([]) == frozenset()


def test_what_cannot_be_left_out_is_refused() -> None:
    with pytest.raises(InputError, match="nothing that the planner can do without"):
        additions_named(["memory"])


def test_segments_cannot_be_given_and_left_out(small: Graph, book: RuleBook) -> None:
    with pytest.raises(InputError, match="segments"):
        plan_graph(small, unequal(2, 1), book=book, segments=["layers.*"], without=["segments"])


# Rules


def test_without_sfb_no_rule_gathers_factors(book: RuleBook) -> None:
    assert any(rule.how == "sfb" for menu in book.rules.values() for rule in menu)
    fewer = fewer_rules(book, frozenset({"sfb"}))
    assert not any(rule.how == "sfb" for menu in fewer.rules.values() for rule in menu)


def test_without_invariant_no_op_with_another_way_computes_it(book: RuleBook) -> None:
    fewer = fewer_rules(book, frozenset({"invariant"}))
    left = 0
    for name, menu in fewer.rules.items():
        assert menu, f"{name} has no rule left"
        if name not in book.graph.fixed:
            left += any(all(p == I for p in (*rule.needs, *rule.gives)) for rule in menu)
    whole = sum(any(all(p == I for p in (*r.needs, *r.gives)) for r in menu) for menu in book.rules.values())
    assert left < whole / 4


def test_all_rules_are_there_when_nothing_is_left_out(book: RuleBook) -> None:
    assert fewer_rules(book, frozenset({"overlap"})) is book


# The schedule


def test_in_the_open_everything_is_still_sent_and_nothing_hides(small: Graph, book: RuleBook) -> None:
    where = unequal(4, 2, 1)
    shares = Shares((1 / 3,) * 3)
    costs = Costs(small, where, optimizer_named("adamw"))
    program = stored_cut(data_parallel(book, SharePrices(costs, Scale(where, shares))))
    hidden = lay_out(program, costs, regather=True)
    schedule = lower(program, Decisions(regather=True, overlap=False))
    check_schedule(schedule)
    opened = Flat(price(schedule, costs))

    def buckets(schedule: Schedule) -> list[tuple[str, ...]]:
        return [item.members for item in schedule.passes if isinstance(item, Bucket)]

    def sent(collective: str, transfers: tuple[Transfer, ...]) -> int:
        return sum(one.whole_bytes for one in transfers if one.collective == collective)

    for collective in ("all_gather", "reduce_scatter"):
        assert sent(collective, opened.transfers) == sent(collective, hidden.transfers) > 0
    assert not any(item.hides for item in schedule.passes if isinstance(item, Bucket))
    assert [*map(len, buckets(schedule))] == [*map(len, buckets(hidden.priced.schedule))]
    computed = [[item for item in made.forward if isinstance(item, Computed)] for made in (opened, hidden)]
    assert computed[0] == computed[1]
    scale = Scale(where, shares)
    before, after = run(hidden.priced, costs.network, scale), run(opened.priced, costs.network, scale)
    assert after.hiding_s == 0 < before.hiding_s
    assert after.step_s > before.step_s


# Beliefs


@pytest.mark.parametrize(("number", "way"), [(0, "padded"), (1, "grouped")])
def test_one_switch_leaves_one_way_for_all_sizes(number: int, way: str) -> None:
    where = unequal(4, 2, 1)
    belief = beliefs(where, frozenset({"collectives"}))[number]
    network, before = Network(belief.real), Network(where)
    for size in (1e3, 1e6, 1e9):
        for largest in (1.0, 3.0):
            for collective in ("all_gather", "reduce_scatter"):
                best = network.best(collective, size, largest)
                assert best.implementation == way
                asked = next(one for one in before.ways(collective) if one.implementation == way)
                assert best.seconds(size, largest) == pytest.approx(asked.seconds(size, largest))
            # What has no switch is not slower than the way it was.
            for collective, given in (("all_reduce", "ring"), ("all_to_all", "direct")):
                asked = next(one for one in before.ways(collective) if one.implementation == given)
                assert (
                    network.best(collective, size, largest).seconds(size, largest)
                    <= asked.seconds(size, largest) + 1e-9
                )


def test_flops_alone_are_believed_and_the_rest_is_found_again() -> None:
    where = unequal(4, 2, 1)
    measured = replace(where.kinds[0], measured=(Measured("a call", ((1.0, 1.0),)),))
    where = replace(where, kinds=(measured, *where.kinds[1:]))
    (belief,) = beliefs(where, frozenset({"measured-cost"}))
    assert all(kind.bytes_per_s == 1e18 and not kind.launch_s and not kind.measured for kind in belief.cluster.kinds)
    assert [kind.flops_per_s for kind in belief.cluster.kinds] == [kind.flops_per_s for kind in where.kinds]
    part = belief.cluster.without_device("n1/d1-1")
    assert belief.as_it_is(part) == where.without_device("n1/d1-1")


# Plans


@pytest.mark.parametrize("name", [*ADDITIONS, HAP])
def test_a_plan_without_it_is_legal_and_predicted_as_it_is(name: str, small: Graph, book: RuleBook) -> None:
    where = unequal(8, 4, 1)
    whole, fewer = plan_graph(small, where, book=book), plan_graph(small, where, book=book, without=[name])
    check_program(fewer.program, book)
    step_s, breakdown, memory = predict(
        fewer.program, fewer.shares, fewer.on, "adamw", fewer.regather, fewer.bucket_bytes
    )
    assert (fewer.step_s, fewer.breakdown, fewer.memory_bytes) == (step_s, breakdown, memory)
    # Rounding and turns of the search may by chance end a little better.
    assert fewer.step_s >= whole.step_s * 0.98
    assert fewer.notes[0].startswith("planned without")
    assert [b.step_s for b in fewer.baselines if b.name == "dp-ev"] == [
        b.step_s for b in whole.baselines if b.name == "dp-ev"
    ]
    assert parse_plan(plan_text(fewer)) == fewer


@pytest.mark.parametrize("name", [*ADDITIONS, HAP])
def test_a_plan_without_it_trains_the_same(name: str) -> None:
    model, batch = load(SMALL)
    graph = in_float64(capture(model, batch))
    found = plan_graph(graph, unequal(8, 4, 3), without=[name])
    assert len(found.devices) == 3
    together = simulate(found.program, model, batch, found.shares)
    error, where = compare(together, simulate(one_device(graph), model, batch, (1.0,)))
    assert error <= TOLERANCE, where


def test_without_sfb_and_invariant_plans_do_without(small: Graph, book: RuleBook) -> None:
    where = unequal(8, 4, 3)
    assert not any(s.rule.how == "sfb" for s in plan_graph(small, where, book=book, without=["sfb"]).program.steps)
    fixed = small.fixed
    found = plan_graph(small, where, book=book, without=["invariant", "devices"])
    for step in found.program.steps:
        if step.node.name not in fixed:
            assert I not in step.rule.gives, step


def test_without_state_shares_a_device_stores_what_it_computes(small: Graph, book: RuleBook) -> None:
    pins = ["*.feed_forward.*.weight=S0@state"]
    free, tied = (
        plan_graph(small, unequal(8, 2, 1), book=book, pins=pins, without=["devices", *more])
        for more in ([], ["state-shares"])
    )
    assert free.shares.of(STATE) != free.shares.work
    assert tied.shares.of(STATE) == tied.shares.work


def test_without_devices_all_take_part(small: Graph, book: RuleBook) -> None:
    where = unequal(8, 8, 0.01)
    assert len(plan_graph(small, where, book=book).devices) < 3
    found = plan_graph(small, where, book=book, without=["devices"])
    assert len(found.devices) == 3
    assert len(found.shares.work) == 3


def test_without_segments_one_set_of_shares(small: Graph, book: RuleBook) -> None:
    found = plan_graph(small, unequal(8, 4, 3), book=book, without=["segments"])
    assert {name for name, _ in found.shares.named} <= {STATE}


def test_presets_with_several_devices_a_node_can_be_planned_without(small: Graph, book: RuleBook) -> None:
    where = load_cluster("hap-4")
    found = plan_graph(small, where, book=book, without=[HAP])
    assert found.on.devices == where.devices
    assert not any(isinstance(kind.source, str) and kind.source.isdigit() for kind in found.on.kinds)
