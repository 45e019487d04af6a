"""A step as a Chrome trace, which Perfetto and chrome://tracing open: the predicted one, and the measured one below it.

In: a `Plan`, and a `Run` of it if there is one. Out: JSON of the trace event format, times in microseconds.

A process is a device, and it has a thread each for what it computes, what the network does for it, and what it waits
for. Where many devices do the same, one stands for all of them, and says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from lopsided.calibration.run_record import Run
from lopsided.planner.plan_data import Plan
from lopsided.report.chart import COMPUTE, IDLE, WAITING, Chart, ChartBlock, Strip, measured_chart, predicted_chart

_THREADS = ("compute", "network", "waiting")
_MOST_EVENTS = 100_000
"""Beyond this many, devices that do the same at the same time become one process."""

_Json = dict[str, object]


def trace(plan: Plan, run: Run | None = None) -> _Json:
    """The trace as plain data. `traceEvents` begin with the names of processes and threads."""
    charts = [("predicted", predicted_chart(plan))]
    if run is not None and (measured := measured_chart(run)) is not None:
        charts.append(("measured", measured))
    place = {name: k for k, name in enumerate(plan.devices)}
    events: list[_Json] = []
    for number, (title, chart) in enumerate(charts):
        for strip in _strips(chart):
            # Predicted and measured of a device stand below each other.
            process = 1 + number + len(charts) * place[strip.devices[0]]
            events += _names(process, f"{strip.label} {title}")
            events += (_event(process, *each) for each in _blocks(strip, chart))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def trace_text(plan: Plan, run: Run | None = None) -> str:
    return json.dumps(trace(plan, run), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _strips(chart: Chart) -> Iterator[Strip]:
    count = sum(len(strip.devices) * (len(strip.blocks) + len(chart.network)) for strip in chart.strips)
    for strip in chart.strips:
        if count > _MOST_EVENTS:
            yield strip
        else:
            yield from (replace(strip, label=name, devices=(name,)) for name in strip.devices)


def _blocks(strip: Strip, chart: Chart) -> Iterator[tuple[str, ChartBlock]]:
    for block in strip.blocks:
        if block.doing == COMPUTE:
            yield "compute", block
        elif block.doing in (WAITING, IDLE):
            yield "waiting", block
    yield from (("network", block) for block in chart.network)


def _names(process: int, name: str) -> Iterator[_Json]:
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, words in enumerate(_THREADS, 1):
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": words}}
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _event(process: int, thread: str, block: ChartBlock) -> _Json:
    told = {
        "module": block.module,
        "collective": block.collective,
        "way": block.way,
        "bytes": block.whole_bytes,
        "waits for": block.awaits,
    }
    what = block.what
    if not what:
        what = f"waits for {block.awaits}" if block.awaits else block.doing
    return {
        "ph": "X",
        "pid": process,
        "tid": 1 + _THREADS.index(thread),
        "name": what,
        "cat": f"{block.phase},{block.doing}",
        "ts": round(block.start_s * 1e6, 3),
        "dur": round(block.seconds * 1e6, 3),
        "args": {name: value for name, value in told.items() if value},
    }
