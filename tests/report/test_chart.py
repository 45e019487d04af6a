"""A chart adds up to the step, and says of every moment what it is for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from lopsided.ir.placement import Shares
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import predict
from lopsided.report.chart import (
    BLOCKED,
    COMPUTE,
    EXPOSED,
    HIDDEN,
    IDLE,
    OPTIMIZER,
    WAITING,
    measured_chart,
    predicted_chart,
)
from tests.support.plans import DATA_PARALLEL, ZERO, plan_of
from tests.support.recorded_runs import run_of


def plans() -> list[Plan]:
    uneven = Shares((0.9, 0.05, 0.05), named=(("state", (0.2, 0.4, 0.4)),))
    every = [plan_of(), plan_of(ZERO), plan_of(ZERO, regather=True), plan_of(DATA_PARALLEL, uneven)]
    return [*every, *map(measured_so, every[:2])]


def measured_so(plan: Plan) -> Plan:
    """The same plan where sending slows computing, and processes take time around ops."""
    kinds = tuple(replace(kind, compute_slowdown=0.3, overhead_s=2e-6) for kind in plan.on.kinds)
    on = replace(plan.on, kinds=kinds)
    step_s, breakdown, memory = predict(plan.program, plan.shares, on, plan.optimizer, plan.regather, plan.bucket_bytes)
    return replace(plan, cluster=on, on=on, step_s=step_s, breakdown=breakdown, memory_bytes=memory)


@pytest.mark.parametrize("plan", plans())
def test_strips_follow_without_gaps_and_add_up_to_the_step(plan: Plan) -> None:
    chart = predicted_chart(plan)
    assert chart.step_s == plan.step_s
    assert [strip.devices for strip in chart.strips] == [("box/big-1",), ("box/small-1", "box/small-2")]
    for strip in chart.strips:
        assert strip.blocks[0].start_s == 0
        assert strip.blocks[-1].end_s == pytest.approx(chart.step_s)
        for before, after in pairwise(strip.blocks):
            assert before.end_s == pytest.approx(after.start_s, abs=1e-12)


@pytest.mark.parametrize("plan", plans())
def test_the_busiest_strip_is_the_breakdown_of_the_plan(plan: Plan) -> None:
    strip = predicted_chart(plan).busiest
    update = sum(b.seconds for b in strip.blocks if b.phase == OPTIMIZER and b.doing == COMPUTE)
    told = plan.breakdown
    assert update == pytest.approx(told.optimizer_s, abs=1e-12)
    assert strip.seconds(COMPUTE) - update == pytest.approx(told.compute_s, abs=1e-12)
    assert strip.seconds(BLOCKED) == pytest.approx(told.blocking_s, abs=1e-9)
    assert strip.seconds(EXPOSED) == pytest.approx(told.exposed_s, abs=1e-9)
    assert strip.seconds(WAITING) == pytest.approx(told.waiting_s, abs=1e-9)


def test_who_has_little_to_do_waits_for_who_has_much() -> None:
    big, small = predicted_chart(plans()[3]).strips
    assert small.seconds(WAITING) > big.seconds(WAITING)
    assert {block.awaits for block in small.blocks if block.doing == WAITING} == {big.label}


def test_sends_say_what_and_how() -> None:
    chart = predicted_chart(plan_of(ZERO))
    gathers = [block for block in chart.network if block.collective == "all_gather"]
    assert gathers
    assert all(block.doing == HIDDEN and block.way and block.whole_bytes for block in gathers)
    assert any(block.module == "up.weight" for block in gathers)
    assert [block.what for block in chart.network if block.doing == BLOCKED] == ["mse_loss P→I"]


def test_kinds_of_one_name_are_told_apart() -> None:
    plan = plan_of()
    kinds = tuple(replace(kind, name="network", node=f"box{k}") for k, kind in enumerate(plan.on.kinds))
    chart = predicted_chart(replace(plan, on=replace(plan.on, kinds=kinds)))
    assert [strip.label for strip in chart.strips] == ["box0/network-1", "box1/network-* (2)"]
    assert chart.step_s == pytest.approx(sum(block.seconds for block in chart.strips[0].blocks))


def test_a_run_is_charted_from_its_recorded_step() -> None:
    plan = plan_of(ZERO)
    run = run_of(plan, slower=2.0)
    chart = measured_chart(run)
    assert chart is not None
    foreseen = predicted_chart(plan)
    assert [strip.label for strip in chart.strips] == list(plan.devices)
    assert chart.strips[0].seconds(COMPUTE) == pytest.approx(2 * foreseen.strips[0].seconds(COMPUTE))
    for strip in chart.strips:
        assert sum(block.seconds for block in strip.blocks) == pytest.approx(chart.step_s)
    # The first device comes a microsecond late to everything, and the others wait for it.
    late = [block for block in chart.strips[1].blocks if block.doing == WAITING and block.awaits == plan.devices[0]]
    assert late
    assert not [block for block in chart.strips[0].blocks if block.doing == WAITING]
    assert chart.strips[0].seconds(IDLE) < chart.step_s / 2


def test_a_run_without_recorded_steps_has_no_chart() -> None:
    run = run_of(plan_of())
    timed = tuple(replace(device, steps=device.steps[:1]) for device in run.devices)
    assert measured_chart(replace(run, devices=timed)) is None
