"""The trace is what Perfetto reads: names, threads, microseconds."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from lopsided.report import chrome_trace as trace_module
from lopsided.report.chart import COMPUTE, predicted_chart
from lopsided.report.chrome_trace import trace_text
from tests.support.plans import ZERO, plan_of
from tests.support.recorded_runs import run_of


def events_of(text: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def processes(events: list[dict[str, Any]]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}


def test_processes_are_devices_and_threads_what_they_do() -> None:
    plan = plan_of(ZERO)
    events = events_of(trace_text(plan))
    assert list(processes(events).values()) == [f"{name} predicted" for name in plan.devices]
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {"compute", "network", "waiting"}


def test_times_are_microseconds_of_the_step() -> None:
    plan = plan_of(ZERO)
    events = [e for e in events_of(trace_text(plan)) if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(plan.step_s * 1e6, rel=1e-3)
    computed = sum(e["dur"] for e in events if e["pid"] == 1 and e["tid"] == 1)
    assert computed == pytest.approx(predicted_chart(plan).strips[0].seconds(COMPUTE) * 1e6, rel=1e-2)
    gathered = next(e for e in events if e["tid"] == 2)
    assert gathered["args"]["collective"] == "all_gather"
    assert gathered["args"]["bytes"] > 0


def test_blocks_of_a_thread_do_not_overlap() -> None:
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    plan = plan_of(ZERO)
    for e in events_of(trace_text(plan, run_of(plan))):
        if e["ph"] == "X" and e["tid"] != 2:
            rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["dur"]))
    assert rows
    for row in rows.values():
        row.sort()
        for (start, taken), (after, _) in pairwise(row):
            assert start + taken <= after + 0.01


def test_measured_stands_below_predicted() -> None:
    plan = plan_of(ZERO)
    names = processes(events_of(trace_text(plan, run_of(plan))))
    in_order = [names[number] for number in sorted(names)]
    assert in_order == [f"{name} {what}" for name in plan.devices for what in ("predicted", "measured")]


def test_many_devices_alike_are_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "_MOST_EVENTS", 1)
    names = processes(events_of(trace_text(plan_of())))
    assert list(names.values()) == ["box/big-1 predicted", "box/small-* (2) predicted"]
