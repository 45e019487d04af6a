"""What one sees, in sentences: a figure without one leaves the reader to guess what it is for.

In: a `Plan`, its `Chart`, a `Run`. Out: sentences, plain text.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from lopsided.calibration.comparison import Comparison
from lopsided.calibration.run_record import Run
from lopsided.planner.baselines import STATE
from lopsided.planner.plan_data import Plan
from lopsided.report.chart import BLOCKED, COMPUTE, EXPOSED, HIDDEN, IDLE, WAITING, Chart, ChartBlock, Strip, subject_of
from lopsided.report.listing import device_rows
from lopsided.report.run_tables import error_text, worst_text
from lopsided.report.table import (
    LEAST,
    bytes_text,
    labels_of,
    percent,
    plural,
    rate_text,
    seconds_text,
    times,
    told_apart,
)

_MOST_NAMED = 4


def spoken(groups: Sequence[Sequence[str]]) -> list[str]:
    """What groups of devices are called in a sentence: by their kind, if that says it.

    >>> spoken([["box/a6000-1", "box/a6000-2"], ["box/rtx3060-1"]])
    ['a6000', 'rtx3060']
    >>> spoken([["one/v100-1"], ["two/v100-1", "two/v100-2"]])
    ['one/v100-1', 'two/v100-*']
    """
    kinds = [re.sub(r"-[0-9]+$", "", names[0].rpartition("/")[2]) for names in groups]
    every = told_apart(groups)
    return [kind if kinds.count(kind) == 1 else label for kind, label in zip(kinds, every, strict=True)]


def _each(name: str, count: int) -> str:
    return f"Each {name}" if count > 1 else name


def listed(parts: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1]))) if parts else ""


# The whole


def lede(plan: Plan) -> Iterator[str]:
    used, every = len(plan.devices), plan.cluster.devices
    of = f"{used} of {every} devices" if used < every else f"{every} {plural('device', every)}"
    batch = plan.rows
    rate = f", {rate_text(batch / plan.step_s)} samples a second" if batch and plan.step_s else ""
    yield f"One training step is predicted to take {seconds_text(plan.step_s)}{rate}, on {of}."
    yield from against_classics(plan)


def against_classics(plan: Plan) -> Iterator[str]:
    best = plan.best_baseline
    if best is None or not plan.step_s:
        if plan.baselines:
            yield "None of the classic strategies fits into the memory of these devices."
        return
    ratio = best.step_s / plan.step_s
    if abs(ratio - 1) < 0.005:
        yield f"The best classic that fits, {best.name}, takes as long: here it is hard to beat."
    else:
        yield f"That is {times(ratio)} as fast as the best classic strategy that fits, {best.name} ({best.about})."
    equal = next((b for b in plan.baselines if b.name == "dp-ev" and b is not best and b.fits), None)
    if equal is not None and equal.step_s > plan.step_s * 1.005:
        yield f"Equal shares for all ({equal.name}) would take {equal.step_s / plan.step_s:,.2f} times as long."


# The timeline


def time_words(chart: Chart) -> Iterator[str]:
    names = dict(zip((s.label for s in chart.strips), spoken([s.devices for s in chart.strips]), strict=True))
    for strip in _telling(chart.strips):
        yield _strip_words(strip, chart.step_s, names)
    yield from _sent_words(chart, names[chart.busiest.label])


def _telling(strips: Sequence[Strip]) -> Sequence[Strip]:
    """All of a few; of many, who computes most and who stands still most."""
    if len(strips) <= _MOST_NAMED:
        return strips
    chosen = (max(strips, key=lambda s: s.seconds(COMPUTE)), min(strips, key=lambda s: s.seconds(COMPUTE)))
    return [*dict.fromkeys(chosen)]


def _strip_words(strip: Strip, step_s: float, names: Mapping[str, str]) -> str:
    parts = [f"computes {percent(_part(strip.seconds(COMPUTE), step_s))} of the step"]
    if (sends := _part(strip.seconds(BLOCKED, EXPOSED), step_s)) >= LEAST:
        parts.append(f"stands still for {percent(sends)} while something is sent")
    if (waits := _part(strip.seconds(WAITING), step_s)) >= LEAST:
        awaited: Counter[str] = Counter()
        for block in strip.blocks:
            if block.doing == WAITING and block.awaits:
                awaited[block.awaits] += round(block.seconds * 1e12)
        last = awaited.most_common(1)[0][0] if awaited else ""
        parts.append(f"waits {percent(waits)}{f' for {names.get(last, last)}' if last else ''}")
    if (idle := _part(strip.seconds(IDLE), step_s)) >= LEAST:
        parts.append(f"does nothing that was recorded for {percent(idle)}")
    return f"{_each(names[strip.label], len(strip.devices))} {listed(parts)}."


def _part(seconds: float, step_s: float) -> float:
    return seconds / step_s if step_s else 0.0


def _sent_words(chart: Chart, busiest: str) -> Iterator[str]:
    blocking = [block for block in chart.network if block.doing == BLOCKED]
    if blocking:
        total = sum(block.seconds for block in blocking)
        largest = _largest(blocking)
        yield (
            f"{seconds_text(total)} ({percent(_part(total, chart.step_s))}) go to sends that everyone takes part in "
            f"and waits for, above all {listed([f'{what} ({seconds_text(s)})' for what, s in largest])}."
        )
    hiding = sum(block.seconds for block in chart.network if block.doing == HIDDEN)
    if hiding > 0:
        exposed = chart.busiest.seconds(EXPOSED)
        if exposed < LEAST * chart.step_s:
            yield f"{seconds_text(hiding)} of sending parameters and gradients hide behind computation."
        elif exposed > 0.99 * hiding:
            yield f"{seconds_text(hiding)} of sending parameters and gradients do not hide behind computation at all."
        else:
            yield (
                f"Of {seconds_text(hiding)} of sending parameters and gradients, {seconds_text(exposed)} do not hide "
                f"behind computation on {busiest}."
            )
    if not chart.network:
        yield "Nothing is sent."


def _largest(blocks: Sequence[ChartBlock]) -> list[tuple[str, float]]:
    """What most is sent for: forward and backward as one, alike ones of many layers as one."""
    taken: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for block in blocks:
        subject = re.sub(r"_[0-9]+$", "", subject_of(block.what))
        named = block.collective if subject == block.collective else f"{block.collective} of {subject}"
        taken[named] += round(block.seconds * 1e12)
        counts[named] += 1
    found = taken.most_common(2)
    if found[-1][1] < taken.total() / 20:
        found = found[:1]
    return [(f"{counts[what]} × {what}" if counts[what] > 1 else what, t / 1e12) for what, t in found]


# Devices


def share_words(plan: Plan) -> Iterator[str]:
    rows = [row for row in device_rows(plan) if row.shares]
    labels = dict(zip((row.names for row in rows), spoken([row.names for row in rows]), strict=True))
    most = max(rows, key=lambda row: dict(row.shares)["work"])
    least = min(rows, key=lambda row: dict(row.shares)["work"])
    high, low = dict(most.shares)["work"], dict(least.shares)["work"]
    if high - low < 0.0005:
        yield "All devices that take part do the same share of the work."
    elif low > 0:
        yield f"One {labels[most.names]} does {high / low:.2g} times the work of one {labels[least.names]}."
    else:
        yield f"One {labels[most.names]} does {percent(high)} of the work, {labels[least.names]} none."
    stored = dict(plan.shares.named).get(STATE)
    if stored and max(abs(a - b) for a, b in zip(stored, plan.shares.work, strict=True)) > 0.005:
        yield "What is stored is cut by shares of its own: who computes less can still hold as much."
    idle = [row for row in device_rows(plan) if not row.shares]
    if idle:
        left_out = listed(labels_of([row.names for row in idle]))
        yield f"Left out: {left_out}. No plan with them was found to be faster."


def memory_words(plan: Plan) -> str:
    rows = [row for row in device_rows(plan) if row.shares and row.limit_bytes]
    labels = spoken([row.names for row in rows])
    part, label, row = max(
        ((row.memory_bytes / row.limit_bytes, label, row) for label, row in zip(labels, rows, strict=True)),
        key=lambda each: each[0],
    )
    held, limit = bytes_text(row.memory_bytes), bytes_text(row.limit_bytes)
    return f"The fullest memory is that of {label}: {held} of {limit}, {percent(part)}."


def worth_words(plan: Plan) -> Iterator[str]:
    rows = [row for row in device_rows(plan) if row.without_s is not None]
    labels = spoken([row.names for row in rows])
    pairs = [(label, row.without_s or 0.0) for label, row in zip(labels, rows, strict=True)]
    if needed := [label for label, without_s in pairs if not math.isfinite(without_s)]:
        yield f"Without {listed(needed)} nothing fits into memory."
    known = [(label, without_s / plan.step_s - 1) for label, without_s in pairs if math.isfinite(without_s)]
    if not known or not plan.step_s:
        return
    label, most = max(known, key=lambda pair: pair[1])
    if most >= LEAST:
        yield f"Taking one {label} away would cost most: {_longer(most)}."
    idle = [label for label, more in known if abs(more) < LEAST]
    if idle:
        yield f"One fewer of {listed(idle)} would make no difference."


def _longer(more: float) -> str:
    return (
        f"the step would take {more + 1:,.1f} times as long"
        if more >= 1
        else f"the step would take {percent(more)} longer"
    )


# A run


def run_words(run: Run, found: Comparison) -> Iterator[str]:
    step = found.step
    yield (
        f"The median of {len(run.timed_s):,} {plural('step', len(run.timed_s))} took {seconds_text(step.measured)}, "
        f"and {seconds_text(step.predicted)} were predicted: {error_text(step.error)}, "
        f"while measured steps scatter by ± {percent(found.noise)}."
    )
    if run.devices[0].recorded:
        yield f"Most of it is due to {worst_text(found)}."
