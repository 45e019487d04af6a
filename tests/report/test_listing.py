"""Plans as rows: what a step costs and sends, layers that repeat, devices that are alike."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster_file import load_cluster
from lopsided.ir.placement import Shares
from lopsided.ir.program import parse_program
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import predict
from lopsided.planner.search_cost import SharePrices
from lopsided.report import listing as module
from lopsided.report.listing import (
    Repeat,
    Row,
    bytes_text,
    device_rows,
    folded_seconds,
    listing,
    pattern_of,
    ranged,
    repeats,
    seconds_text,
    segment_rows,
    told_apart,
)
from lopsided.report.plan_diff import diff_plans
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.layout import lay_out
from tests.support.plans import DATA_PARALLEL, SHARES, ZERO, cluster, graph, plan_of

# Rows


def test_rows_say_what_a_step_does() -> None:
    rows = listing(plan_of())
    assert [row.text for row in rows] == [
        "linear = linear(x: S0, up.weight, bias: I→R) : S0",
        "relu = relu(linear: S0) : S0",
        "linear_1 = linear(relu: S0, down.weight, bias: I→R) : S0",
        "mse_loss = mse_loss(linear_1, y: S0) : P",
        "return mse_loss: P→I",
        "adamw: update 4 parameters",
    ]
    assert [row.module for row in rows][:3] == ["up", "", "down"]
    up, relu, _, _, end, update = rows
    assert [(send.collective, send.hides) for send in up.sends] == [("all_reduce", True)]
    assert relu.sends == ()
    assert [(send.collective, send.hides) for send in end.sends] == [("all_reduce", False)]
    assert update.compute_s > 0


def test_gathered_parameters_hide_and_regathered_ones_twice() -> None:
    once, twice = listing(plan_of(ZERO)), listing(plan_of(ZERO, regather=True))
    assert {send.collective for send in once[2].sends} == {"all_gather", "all_reduce", "reduce_scatter"}
    assert all(send.hides for send in once[2].sends)

    def gathered(row: Row) -> float:
        return sum(send.seconds for send in row.sends if send.collective == "all_gather")

    # The first layer's input has no gradient, so its backward pass does not need the weight.
    assert gathered(twice[0]) == gathered(once[0])
    assert gathered(twice[2]) == pytest.approx(2 * gathered(once[2]))


@functools.cache
def planned(spec: str, zero: bool = False) -> Plan:
    """Data parallelism on unequal devices, as a plan."""
    with torch.device("meta"):
        model, batch = load(spec)
    graph = capture(model, batch)
    on = load_cluster("hap-4")
    shares = Shares((0.3, 0.3, 0.2, 0.2))
    prices = SharePrices(Costs(graph, on, optimizer_named("adamw")), Scale(on, shares))
    program = data_parallel(derive_rules(graph), prices)
    program = stored_cut(program) if zero else program
    step_s, breakdown, memory = predict(program, shares, on, "adamw", False)
    return replace(
        plan_of(),
        cluster=on,
        on=on,
        program=program,
        shares=shares,
        step_s=step_s,
        breakdown=breakdown,
        memory_bytes=memory,
        without_device=(),
    )


# A first layer that converts what the others find there stands alone; every second layer of bert-moe has experts.
BERT = "bert:layers=12,width=16,heads=2,vocab=31,seq=4,batch=8"
MODELS = {
    BERT: ("layers.0–11", 12),
    "gpt2:layers=12,width=16,heads=2,vocab=31,seq=4,batch=8": ("layers.0–11", 12),
    "llama:layers=9,width=16,heads=2,vocab=31,seq=4,batch=8": ("layers.0–8", 9),
    "t5:layers=6,width=16,heads=2,vocab=31,seq=4,batch=8": ("decoder.layers.1–5", 5),
    "vit:layers=5,width=16,heads=2,image=8,batch=8": ("layers.0–4", 5),
    "resnet50:width=4,image=16,classes=5,batch=8": ("stages.8–12", 5),
    "mlp:layers=7,width=12,classes=5,batch=8": ("hidden.1–5", 5),
    "bert-moe:layers=6,width=16,heads=2,vocab=31,seq=4,batch=8,experts=4": ("layers.0–5", 3),
}


@pytest.mark.parametrize("spec", MODELS)
def test_layers_that_repeat_are_shown_once(spec: str) -> None:
    plan = planned(spec)
    rows = listing(plan)
    heads = {row.text: row.repeats for row in rows if row.repeats}
    text, times = MODELS[spec]
    assert heads[text] == times
    assert sum(row.times for row in rows if not row.repeats and " = " in row.text) == len(plan.graph.nodes)


@pytest.mark.parametrize("spec", [*MODELS][:4])
@pytest.mark.parametrize("zero", [False, True])
def test_folded_or_not_the_sums_are_those_of_the_schedule(spec: str, zero: bool) -> None:
    plan = planned(spec, zero)
    folded = [row for row in listing(plan) if not row.repeats]
    full = listing(plan, fold=False)
    for field in ("compute_s", "blocking_s", "hiding_s"):
        total = math.fsum(getattr(row, field) for row in full)
        assert math.fsum(getattr(row, field) * row.times for row in folded) == pytest.approx(total)
    assert math.fsum(row.blocking_s for row in full) == pytest.approx(plan.breakdown.blocking_s)
    # Row by row the slowest kind is taken: never less than any one kind's sum.
    busy = plan.breakdown.compute_s + plan.breakdown.optimizer_s
    assert math.fsum(row.compute_s for row in full) >= busy * (1 - 1e-9)


def test_every_transfer_of_the_schedule_is_in_a_row() -> None:
    plan = planned([*MODELS][3], True)
    costs = Costs(plan.graph, plan.on, optimizer_named(plan.optimizer))
    sent = {transfer.collective for transfer in lay_out(plan.program, costs).transfers}
    assert {send.collective for row in listing(plan) for send in row.sends} == sent


def test_folded_rows_show_modules_with_stars() -> None:
    rows = listing(planned(BERT))
    head = next(k for k, row in enumerate(rows) if row.repeats)
    inside = rows[head + 1 : head + 1 + rows[head].rows]
    assert inside[0].module == "layers.*.attention.qkv"
    assert {row.times for row in inside} == {12}
    assert rows[head].compute_s == pytest.approx(math.fsum(row.compute_s for row in inside))


# Repeats


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 3), max_size=4), st.integers(2, 6))
def test_repeats_are_repeats(rest: list[int], block: list[int], times: int) -> None:
    keys = [*rest[:20], *block * times, *rest[20:]]
    found = repeats(keys, [""] * len(keys))
    position = 0
    for repeat in found:
        assert repeat.start >= position
        assert repeat.times >= 2
        first = keys[repeat.start : repeat.start + repeat.period]
        assert keys[repeat.start : repeat.stop] == first * repeat.times
        position = repeat.stop
    assert position <= len(keys)


def test_repeats_begin_where_modules_do() -> None:
    # The norm before the layers looks like the norm that ends each of them.
    keys = ["norm", *["attention", "add", "norm"] * 4, "head"]
    modules = ["norm", *(f"layers.{k}.{name}" for k in range(4) for name in "abc"), "head"]
    assert repeats(keys, modules) == (Repeat(1, 3, 4),)


def test_a_first_layer_that_differs_stands_alone() -> None:
    keys = [*"aXcd", *"abcd" * 5, "z"]
    modules = [f"layers.{k}" for k in range(6) for _ in range(4)] + ["head"]
    assert repeats(keys, modules) == (Repeat(4, 4, 5),)


def test_two_layers_that_alternate_are_one_stretch() -> None:
    keys = [*"abcdefgh" * 3]
    modules = [f"layers.{k}" for k in range(6) for _ in range(4)]
    assert repeats(keys, modules) == (Repeat(0, 8, 3),)


def test_a_small_repeat_is_not_worth_a_head() -> None:
    assert repeats([*"aabb"], [""] * 4) == ()
    assert repeats([*"abab"], ["x.0", "x.0", "x.1", "x.1"]) == ()
    assert repeats([], []) == ()


def test_deep_models_are_folded_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is nodes × the longest period, whatever the depth."""
    monkeypatch.setattr(module, "LONGEST_PERIOD", 64)
    keys = [k % 30 for k in range(30 * 2000)]
    modules = [f"layers.{k // 30}" for k in range(len(keys))]
    assert repeats(keys, modules) == (Repeat(0, 30, 2000),)


# Words


def test_patterns() -> None:
    assert pattern_of(["v100-box-1/v100-3"]) == "v100-box-1/v100-3"
    assert pattern_of(["v100-box-1/v100-3", "v100-box-2/v100-1"]) == "v100-box-*/v100-*"
    assert ranged(["layer1.0", "layer1.1", "layer1.10"]) == "layer1.0–10"
    assert ranged(["a.x", "b.x"]) == "steps"
    assert ranged([]) == "steps"


@given(st.floats(0, 1e5))
def test_times_are_short_and_never_off(seconds: float) -> None:
    text = seconds_text(seconds)
    number, _, unit = text.replace(",", "").partition(" ")
    assert len(text) <= 9
    assert float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6, "": 0}[unit] == pytest.approx(seconds, rel=0.02, abs=1e-7)


@given(st.integers(0, 2**50))
def test_sizes_are_short(size: int) -> None:
    assert len(bytes_text(size)) <= 12


# Devices


def test_devices_alike_are_one_row() -> None:
    plan = replace(plan_of(), without_device=(("box/big-1", 2.0), ("box/small-1", 1.0), ("box/small-2", 1.0)))
    big, small = device_rows(plan)
    assert (big.name, big.names, big.shares) == ("box/big-1", ("box/big-1",), (("work", 0.5), ("state", 0.2)))
    assert (small.name, len(small.names), small.without_s) == ("box/small-*", 2, 1.0)
    assert small.limit_bytes == 4 * 2**30


def test_devices_left_out_have_no_shares() -> None:
    on = cluster().only([1])
    plan = replace(plan_of(), on=on, shares=Shares((0.5, 0.5)), memory_bytes=(5, 5), without_device=())
    big, small = device_rows(plan)
    assert (big.shares, big.memory_bytes, big.without_s) == ((), 0, None)
    assert small.shares == (("work", 0.5),)


def test_seconds_of_names_alike_are_one() -> None:
    named = (("a-1", 1.0), ("a-2", 1.0), ("a-3", 2.0), ("b-1", 1.0))
    assert folded_seconds(named) == (("a-*", 2, 1.0), ("a-3", 1, 2.0), ("b-1", 1, 1.0))


def test_groups_with_the_same_pattern_are_told_apart() -> None:
    named = (("a-1", 1.0), ("a-2", 1.0), ("a-3", 2.0), ("a-4", 2.0))
    assert folded_seconds(named) == (("a-1 … a-2", 2, 1.0), ("a-3 … a-4", 2, 2.0))
    groups = [["b-1/x-1", "b-1/x-2"], ["b-1/x-3", "b-2/x-1"], ["b-2/x-2"]]
    assert told_apart(groups) == ["b-1/x-*", "b-*/x-*", "b-2/x-2"]


def test_shares_of_parts_name_their_modules() -> None:
    plan = plan_of()
    assert segment_rows(plan) == ()
    program = parse_program(DATA_PARALLEL.replace("%relu: S0, %down", "%relu: S0→S0@segment1, %down"), graph())
    program = parse_program(str(program).replace("down_bias: I→R) : S0", "down_bias: I→R) : S0@segment1"), graph())
    (row,) = segment_rows(replace(plan, program=program, shares=replace(SHARES, named=(*SHARES.named, SEGMENT))))
    assert row.name == "segment1"
    assert "down" in row.modules
    assert "up" not in row.modules


SEGMENT = ("segment1", (0.6, 0.2, 0.2))


# Differences


def test_equal_plans_do_not_differ() -> None:
    assert diff_plans(plan_of(), replace(plan_of(), planning_s=9.0)) == ()


def test_differences_are_named_and_folded() -> None:
    a, b = plan_of(), replace(plan_of(ZERO, Shares((0.6, 0.2, 0.2)), regather=True), optimizer="sgd", baselines=())
    found = {(d.about, d.what): (d.a, d.b, d.count) for d in diff_plans(a, b)}
    assert found["stored", "up.weight"] == ("I", "S0@state", 1)
    assert found["options", "optimizer"] == ("adamw", "sgd", 1)
    assert found["options", "parameters gathered again"] == ("no", "yes", 1)
    assert found["devices", "box/small-* work share"] == ("25.00 %", "20.00 %", 2)
    assert found["devices", "box/small-* state share"] == ("40.00 %", "–", 2)
    assert found["steps", "up linear"] == ("(S0, I→R, I→R) : S0", "(S0, S0@state→R, I→R) : S0", 1)
    assert found["baselines", "single"] == ("does not fit", "–", 1)
    assert ("step", "step") in found
    assert ("graph", "graph") not in found


def test_differences_of_layers_are_one() -> None:
    spec = BERT
    found = [str(d) for d in diff_plans(planned(spec), planned(spec, True))]
    assert "layers.*.attention.out.weight  I → S0@state  (12)" in found


def test_plans_of_different_models_are_compared_where_they_agree() -> None:
    small = planned(BERT)
    large = planned(BERT.replace("layers=12", "layers=3"), True)
    found = diff_plans(small, large)
    assert found[0].about == "graph"
    assert "layers.*.attention.out.weight  I → S0@state  (3)" in [str(d) for d in found]
    assert not any("layers.7" in d.what for d in found)
    other = diff_plans(small, plan_of())
    assert not any(d.about in ("stored", "steps") for d in other)
    assert any(d.about == "cluster" for d in other)


def test_the_plan_by_hand_is_of_its_graph() -> None:
    assert plan_of().graph is graph()
    assert plan_of().shares == SHARES
