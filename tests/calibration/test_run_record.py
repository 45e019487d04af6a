"""Runs as files, and runs held against their plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopsided.calibration.comparison import Comparison, ComparisonLine, carried, compare_run, fraction_of, of_all
from lopsided.calibration.run_record import (
    COMPUTE,
    NETWORK,
    OPTIMIZER,
    DeviceRun,
    Run,
    Span,
    StepRun,
    load_run,
    parse_run,
    run_text,
    save_run,
)
from lopsided.errors import RunError
from lopsided.planner.plan_data import Plan
from lopsided.report.run_tables import comparison_lines, error_text
from lopsided.schedule.cost import Costs, optimizer_named
from lopsided.schedule.pricing import Computed
from tests.support.plans import plan_of
from tests.support.schedules import lay_out


def as_predicted(plan: Plan, *, slower: float = 1.0, late_s: float = 0.0) -> Run:
    """A run that does exactly what its plan says, each op `slower` times as long; its second device comes late."""
    costs = Costs(plan.graph, plan.on, optimizer_named(plan.optimizer))
    schedule = lay_out(plan.program, costs, regather=plan.regather, bucket_bytes=plan.bucket_bytes)
    devices = []
    for number, device in enumerate(plan.devices):
        kind = plan.on.kind_numbers[number]
        spans, now = [], late_s * number
        for item in (*schedule.forward, *schedule.backward, *schedule.optimizer):
            if isinstance(item, Computed):
                what = OPTIMIZER if item in schedule.optimizer else f"{'∂' if item.backward else ''}{item.node}"
                took = slower * item.seconds[kind].at(fraction_of(plan, item.cut, number))
                spans.append(Span(COMPUTE, what, now, now + took))
                now += took
        arrived = 10.0 - 0.5 * number
        spans.append(Span(NETWORK, "a sum", arrived, 12.0, "all_reduce", "ring", 4096, 1.0, 12.0 - arrived))
        steps = (StepRun(1.0), StepRun(1.2), StepRun(1.1), StepRun(now + 12.0 - arrived, tuple(spans)))
        devices.append(DeviceRun(device, "a processor", plan.memory_bytes[number] or 1, steps))
    return Run("by hand", "2.13", plan, tuple(devices))


@pytest.fixture(scope="module")
def run() -> Run:
    return as_predicted(plan_of())


def rounded(run: Run) -> Run:
    """With times as a file keeps them."""

    def step(one: StepRun) -> StepRun:
        spans = tuple(
            replace(s, start_s=round(s.start_s, 7), end_s=round(s.end_s, 7), waited_s=round(s.waited_s, 7))
            for s in one.spans
        )
        return StepRun(one.seconds, spans)

    return replace(run, devices=tuple(replace(d, steps=tuple(map(step, d.steps))) for d in run.devices))


def test_a_run_loads_back_to_itself(run: Run, tmp_path: Path) -> None:
    kept = rounded(run)
    save_run(kept, tmp_path / "run.json")
    assert load_run(tmp_path / "run.json") == kept
    assert run_text(load_run(tmp_path / "run.json")) == run_text(kept)


def test_a_step_is_the_median_of_those_that_were_only_timed(run: Run) -> None:
    assert run.timed_s == (1.0, 1.2, 1.1)
    assert run.step_s == 1.1
    assert 0 < run.spread < 0.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "lopsided-plan"}, 'its "format" is not'),
        ({"version": 2}, "no version 2"),
        ({"more": 1}, "'more' is not known here"),
        ({"devices": []}, "not those of its plan"),
        ({"torch": None}, '"torch" is None'),
    ],
)
def test_what_is_no_run_is_refused(run: Run, change: dict[str, Any], said: str) -> None:
    with pytest.raises(RunError, match=said):
        parse_run(json.dumps(json.loads(run_text(run)) | change))


@pytest.mark.parametrize(
    "row",
    [
        "",
        "0 1 compute - - 0 1 0",
        "0 1 elsewhere - - 0 1 0 x",
        "1 0 compute - - 0 1 0 x",
        "nan 1 compute - - 0 1 0 x",
        "0 1e99 compute - - 0 1 0 x",
        "0 1 compute - - -1 1 0 x",
        "a 1 compute - - 0 1 0 x",
    ],
)
def test_a_span_that_cannot_be_is_refused(run: Run, row: str) -> None:
    told = json.loads(run_text(run))
    told["devices"][0]["steps"][3]["spans"][0] = row
    with pytest.raises(RunError, match=r"a span reads|give a text"):
        parse_run(json.dumps(told))


def test_an_edited_number_of_steps_is_refused(run: Run) -> None:
    told = json.loads(run_text(run))
    del told["devices"][0]["steps"][0]
    with pytest.raises(RunError, match="different numbers of steps"):
        parse_run(json.dumps(told))
    for device in told["devices"]:
        device["steps"] = device["steps"][-1:]
    with pytest.raises(RunError, match="no step was timed alone"):
        parse_run(json.dumps(told))


# Confronting


def test_an_all_to_all_is_as_large_as_all_of_its_parts() -> None:
    seen = [Span(NETWORK, "x", 0.0, 1.0, "all_to_all", "direct", size) for size in (200, 100, 50, 50)]
    whole = of_all(seen)
    assert (whole.bytes, whole.largest) == (100, 2.0)
    assert of_all([replace(span, collective="all_reduce") for span in seen]).bytes == 200


def test_a_run_that_does_what_was_predicted_is_not_off(run: Run) -> None:
    found = compare_run(run)
    assert found.step == ComparisonLine("step", run.plan.step_s, 1.1)
    for row in found.computed:
        for line in row:
            assert line.predicted == pytest.approx(line.measured, rel=1e-6, abs=1e-9), line.what
    assert [line.error for line in found.memory] == pytest.approx([0.0] * len(run.devices))


def test_what_is_slower_is_found_on_every_device_and_in_every_class(run: Run) -> None:
    found = compare_run(as_predicted(run.plan, slower=2.0))
    for line in (*found.busy, *found.classes):
        if line.predicted:
            assert line.error == pytest.approx(-0.5, rel=1e-6), line.what


def test_a_collective_takes_what_the_last_to_come_waits_for_it(run: Run) -> None:
    (one,) = carried(run)
    # The first came at 10.0 and the second at 9.5; it ended at 12.0 for both.
    assert (one.collective, one.way, one.bytes) == ("all_reduce", "ring", 4096)
    assert one.seconds == pytest.approx(2.0)
    (line,) = compare_run(run).collectives
    assert line.measured == pytest.approx(2.0)
    assert 0 < line.predicted < 2.0
    assert compare_run(run).worst == ("network", line)


def test_what_waits_behind_another_is_not_charged_for_it(run: Run) -> None:
    def with_second(device: DeviceRun) -> DeviceRun:
        last = device.steps[3]
        later = Span(NETWORK, "another", 11.0, 13.0, "all_reduce", "ring", 4096, 1.0, 0.0)
        return replace(device, steps=(*device.steps[:3], replace(last, spans=(*last.spans, later))))

    both = carried(replace(run, devices=tuple(map(with_second, run.devices))))
    assert [one.seconds for one in both] == pytest.approx([2.0, 1.0])


def test_what_nobody_predicted_is_in_between(run: Run) -> None:
    def longer(device: DeviceRun) -> DeviceRun:
        last = device.steps[3]
        return replace(device, steps=(*device.steps[:3], replace(last, seconds=last.seconds + 0.25)))

    found = compare_run(replace(run, devices=tuple(map(longer, run.devices))))
    between = [line for row in found.computed for line in row if line.what == "between ops"]
    assert [line.measured for line in between] == pytest.approx([0.25] * len(run.devices))


def test_the_text_names_the_error_and_the_worst_line(run: Run) -> None:
    found: Comparison = compare_run(run)
    text = "\n".join(comparison_lines(found, full=True))
    assert error_text(found.step.error) in text
    assert "worst line  all_reduce, ring" in text
    assert all(device in text for device in found.devices)
    assert all(line.what in text for line in found.classes)
    assert max(map(len, text.splitlines())) <= 110
