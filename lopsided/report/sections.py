"""The sections about a plan: each a heading, what one sees, a figure or table.

In: a `Plan` and `Chart`s. Out: `Html`. Charts that are not tables by nature have one behind them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from lopsided.calibration.run_record import Run
from lopsided.planner.baselines import STATE, batch_size
from lopsided.planner.plan_data import Plan
from lopsided.report.chart import BLOCKED, COMPUTE, DOING, EXPOSED, HIDDEN, IDLE, OPTIMIZER, WAITING, Chart
from lopsided.report.figures import bar, timeline
from lopsided.report.listing import (
    DeviceRow,
    bytes_text,
    device_rows,
    folded_seconds,
    parameters_of,
    seconds_text,
    segment_rows,
)
from lopsided.report.markup import Html, join, tag
from lopsided.report.parts import cell, chip, flowing, place_class, row_of, section, swatch, table, words_list
from lopsided.report.plan_text import count_text, inputs_of, plural, rate_text, search_lines, shape_text, worth_text
from lopsided.report.words import (
    labels_of,
    lede,
    memory_words,
    percent,
    share_words,
    time_words,
    times,
    worth_words,
)

# Top


def head(plan: Plan, title: str, run: Run | None) -> Html:
    batch = batch_size(plan.graph)
    best = plan.best_baseline
    elements = sum(leaf.value.elements for leaf in plan.graph.parameters)
    figures = [
        ("predicted step", seconds_text(plan.step_s)),
        *([("measured step", seconds_text(run.step_s))] if run else []),
        ("samples a second", rate_text(batch / plan.step_s) if batch and plan.step_s else "–"),
        (f"against {best.name}" if best else "against classics", times(best.step_s / plan.step_s) if best else "–"),
        ("devices", f"{len(plan.devices)} of {plan.cluster.devices}"),
        ("parameters", count_text(elements)),
    ]
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in figures]
    return tag(
        "header",
        tag("p", "Lopsided plan", class_="kicker"),
        tag("h1", title, class_="long" if len(title) > 24 else None),
        tag("p", f"on {plan.cluster.name}: {_devices(plan)}", class_="on"),
        tag("p", flowing(" ".join(lede(plan))), class_="lede"),
        tag("dl", *items, class_="figures"),
    )


def _devices(plan: Plan) -> str:
    kinds = ", ".join(f"{kind.devices} {kind.name}" for kind in plan.cluster.kinds[:6])
    more = ", ..." if len(plan.cluster.kinds) > 6 else ""
    return f"{kinds}{more} in {plan.cluster.nodes} {plural('node', plan.cluster.nodes)}"


# Time


def time_section(predicted: Chart, measured: Chart | None) -> Html:
    keys = tag(
        "p",
        "Keys, once the timeline is focused: ",
        *_keys(("+", "−"), " zoom, "),
        *_keys(("0",), " shows all, "),
        *_keys(("←", "→"), " go from block to block, "),
        *_keys(("↑", "↓"), " from lane to lane. With a mouse: Ctrl and wheel zoom, dragging moves."),
        id="keys",
        class_="hint",
    )
    tools = tag(
        "div",
        tag(
            "output",
            "Point at a block, or focus the timeline and press an arrow key.",
            id="readout",
            aria_live="polite",
        ),
        tag(
            "div",
            tag("button", "−", type="button", data_zoom="out", aria_label="Zoom out"),
            tag("button", "+", type="button", data_zoom="in", aria_label="Zoom in"),
            tag("button", "All", type="button", data_zoom="all", aria_label="Show the whole step"),
            class_="buttons",
        ),
        class_="tools",
    )
    words = words_list(time_words(predicted))
    if measured is not None:
        words = tag(
            "div",
            tag("div", tag("h3", "Predicted"), words),
            tag("div", tag("h3", "Recorded"), words_list(time_words(measured))),
            class_="pair",
        )
    return section(
        "time",
        "A step in time",
        words,
        tag("figure", tools, timeline(predicted, measured), _legend(predicted, measured), keys, class_="time"),
        tag("h3", "Where the time goes"),
        _spent(predicted, "predicted"),
        _spent(measured, "recorded") if measured else None,
        tag("p", "Recording takes time itself: a step that was only timed is shorter.", class_="hint")
        if measured
        else None,
    )


def _keys(names: Iterable[str], words: str) -> Iterator[str]:
    for name in names:
        yield tag("kbd", name)
    yield words


def _legend(predicted: Chart, measured: Chart | None) -> Html:
    charts = [chart for chart in (predicted, measured) if chart]
    seen = {block.doing for chart in charts for strip in chart.strips for block in strip.blocks}
    entries = [("fwd", "compute, forward"), ("bwd", "backward"), ("opt", "optimizer")]
    if BLOCKED in seen:
        entries.append(("blocked", "send, all wait"))
    if EXPOSED in seen:
        entries.append(("exposed", "send that did not hide"))
    if any(block.doing == HIDDEN for chart in charts for block in chart.network):
        entries.append(("hidden", "send behind computation"))
    if WAITING in seen:
        entries.append(("waiting", "waits for others"))
    if IDLE in seen:
        entries.append(("idle", "nothing recorded"))
    return tag("ul", *(tag("li", swatch(kind), words) for kind, words in entries), class_="legend")


def _spent(chart: Chart, title: str) -> Html:
    """Each strip's step as a bar, and in numbers."""
    rows = []
    for strip in chart.strips:
        update = sum(b.seconds for b in strip.blocks if b.doing == COMPUTE and b.phase == OPTIMIZER)
        forward = sum(b.seconds for b in strip.blocks if b.doing == COMPUTE and b.phase == "forward")
        compute, *stills = (strip.seconds(doing) for doing in DOING)
        parts = [("fwd", forward), ("bwd", compute - forward - update), ("opt", update)]
        parts += [*zip((BLOCKED, EXPOSED, WAITING, IDLE), stills, strict=True)]
        numbers = (compute, strip.seconds(BLOCKED), strip.seconds(EXPOSED), strip.seconds(WAITING, IDLE))
        cells = [
            cell(join([seconds_text(s), tag("small", percent(s / chart.step_s if chart.step_s else 0.0))]), name)
            for name, s in zip(("computes", "sends", "not hidden", "waits"), numbers, strict=True)
        ]
        rows.append(row_of(strip.label, tag("td", bar(parts, chart.step_s), class_="wide", role="cell"), *cells))
    heads = (
        f"{title} step {seconds_text(chart.step_s)}",
        "",
        ">computes",
        ">sends, all wait",
        ">sends, not hidden",
        ">waits",
    )
    return table(heads, rows, label=f"Where the time goes, {title}", class_="spent")


# Devices


def devices_section(plan: Plan) -> Html:
    rows = device_rows(plan)
    labels = labels_of(rows)
    names = [by for by in ("work", STATE) if any(by == name for row in rows for name, _ in row.shares)]
    most = max((share for row in rows for by, share in row.shares if by in names), default=1.0)
    largest = max(row.limit_bytes for row in rows)
    fair = 1 / len(plan.devices)
    told = []
    for label, row in zip(labels, rows, strict=True):
        shares = dict(row.shares)
        cells = [_share_cell(shares.get(by), by, most, fair) for by in names]
        if row.shares:
            parts = [("held", row.memory_bytes), ("room", row.limit_bytes - row.memory_bytes)]
            if row.memory_bytes > row.limit_bytes:
                parts = [("over", row.memory_bytes)]
            held = f"{bytes_text(row.memory_bytes)} of {bytes_text(row.limit_bytes)}"
            cells.append(cell(join([bar(parts, largest), tag("span", held)]), "memory", "meter"))
        else:
            parts = [("room", row.limit_bytes)]
            cells.append(cell(join([bar(parts, largest), tag("span", "left out")]), "memory", "meter"))
        told.append(row_of(label, *cells, class_="" if row.shares else "left-out"))
    heads = ("device", *(f"{'share of the ' if by == 'work' else ''}{by}" for by in names), "memory, of its limit")
    sentences = [*share_words(plan), memory_words(plan)]
    return section(
        "devices",
        "Who does how much",
        words_list(sentences),
        table(heads, told, label="Shares and memory of the devices", class_="devices"),
        tag("p", f"The line across a share is an equal one, {percent(fair)}.", class_="hint"),
        _segments(plan, rows, labels),
        _stored(plan),
    )


def _share_cell(share: float | None, by: str, most: float, fair: float) -> Html:
    if share is None:
        return cell("–", by, "meter")
    drawn = bar([(f"share-{by}", share)], most, marks=[fair] if fair <= most else [])
    return cell(join([drawn, tag("span", f"{share * 100:.2f} %")]), by, "meter")


def _segments(plan: Plan, rows: Sequence[DeviceRow], labels: Sequence[str]) -> Html | None:
    parts = segment_rows(plan)
    if not parts:
        return None
    inside: list[Html] = []
    for part in parts:
        words = f"{part.name}: {part.steps:,} {plural('step', part.steps)} of {', '.join(part.modules) or 'no module'}"
        shares = [(label, dict(row.shares).get(part.name)) for label, row in zip(labels, rows, strict=True)]
        most = max((share for _, share in shares if share is not None), default=1.0)
        told = [row_of(label, _share_cell(share, "work", most, 2.0)) for label, share in shares]
        inside += [tag("p", words), table(("device", "share"), told, label=f"Shares of {part.name}", class_="devices")]
    summary = (
        f"{len(parts)} {'part of the model has' if len(parts) == 1 else 'parts of the model have'} shares of their own"
    )
    return tag("details", tag("summary", summary), *inside)


def _stored(plan: Plan) -> Html | None:
    """How much of the parameters is stored how."""
    sizes: dict[str, list[int]] = {}
    placed = parameters_of(plan.program)
    for leaf in plan.graph.parameters:
        sizes.setdefault(str(placed[leaf.target]), []).append(leaf.value.bytes)
    whole = sum(map(sum, sizes.values()))
    if not whole:
        return None
    found = sorted(sizes.items(), key=lambda pair: -sum(pair[1]))
    parts = [(f"chip-{place_class(placement)}", float(sum(held))) for placement, held in found]
    items = [
        tag("li", chip(placement), f" {_stored_words(placement)}: {len(held):,} with {bytes_text(sum(held))}")
        for placement, held in found
    ]
    label = ", ".join(f"{placement} {bytes_text(sum(held))}" for placement, held in found)
    return join(
        [
            tag("h3", "How parameters are stored"),
            tag("div", bar(parts, whole, f"Bytes of parameters by placement: {label}"), class_="stored"),
            tag("ul", *items, class_="legend"),
        ]
    )


def _stored_words(placement: str) -> str:
    if placement == "I":
        return "whole on every device"
    words = f"cut along dim {re.sub(r'[^0-9].*', '', placement[1:])}"
    return f"{words} by the shares of the {STATE}, gathered for use" if placement.endswith(f"@{STATE}") else words


# Against others


def classics_section(plan: Plan) -> Html | None:
    if not plan.baselines:
        return None
    fits = [b.step_s for b in plan.baselines if b.fits and math.isfinite(b.step_s)]
    most = max(plan.step_s, *fits) if fits else plan.step_s
    rows = [
        row_of(
            "this plan",
            cell(bar([("ours", plan.step_s)], most), class_="wide"),
            cell(seconds_text(plan.step_s), "step"),
            cell("", "slower"),
            class_="this",
        )
    ]
    for b in sorted(plan.baselines, key=lambda b: (not b.fits, b.step_s)):
        runs = b.fits and math.isfinite(b.step_s)
        rows.append(
            row_of(
                b.name,
                cell(join([bar([("theirs", b.step_s if runs else 0.0)], most), tag("small", b.about)]), class_="wide"),
                cell(seconds_text(b.step_s) if runs else "does not fit", "step"),
                cell(times(b.step_s / plan.step_s) if runs and plan.step_s else "", "speed-up"),
                class_="" if runs else "left-out",
            )
        )
    return section(
        "classics",
        "Against what everyone knows",
        tag(
            "p",
            "The same model on the same cluster by strategies that need no planner, all predicted alike.",
            class_="words",
        ),
        table(
            ("strategy", "", ">step", ">speed-up"),
            rows,
            label="Predicted steps of classic strategies",
            class_="classics",
        ),
    )


def worth_section(plan: Plan) -> Html | None:
    rows = [row for row in device_rows(plan) if row.without_s is not None]
    pairs = [(label, row.without_s or 0.0) for label, row in zip(labels_of(rows), rows, strict=True)]
    nodes = [
        (f"node {name} ({count})" if count > 1 else f"node {name}", without_s)
        for name, count, without_s in folded_seconds(plan.without_node)
    ]
    if not pairs and not nodes:
        return None
    most = max(plan.step_s, *(s for _, s in (*pairs, *nodes) if math.isfinite(s)), 0.0)
    told = []
    for label, without_s in (*pairs, *nodes):
        known = math.isfinite(without_s)
        more = max(without_s - plan.step_s, 0.0) if known else 0.0
        parts = [("theirs", min(plan.step_s, without_s)), ("more", more)] if known else [("needed", most)]
        told.append(
            row_of(
                label,
                cell(bar(parts, most, marks=[plan.step_s]), class_="wide"),
                cell(worth_text(plan.step_s, without_s), "without one"),
            )
        )
    return section(
        "worth",
        "What each device is worth",
        words_list(worth_words(plan)),
        table(("without one", "", ">step"), told, label="The step without one device or node", class_="worth"),
        tag("p", f"The line is the step with all of them, {seconds_text(plan.step_s)}.", class_="hint"),
    )


# About


def about_section(plan: Plan) -> Html:
    kinds = []
    for kind in plan.cluster.kinds:
        speeds = ", ".join(f"{speed / 1e12:.3g} TFLOP/s in {dtype}" for dtype, speed in kind.flops_per_s)
        where = f"{kind.devices} in {kind.nodes} {plural('node', kind.nodes)} {kind.node}"
        kinds.append(
            row_of(
                kind.name,
                cell(where, "where", "left"),
                cell(speeds, "speed", "left"),
                cell(f"{kind.bytes_per_s / 1e9:,.0f} GB/s", "memory moves"),
                cell(bytes_text(kind.memory_bytes), "memory"),
            )
        )
    within, between = plan.cluster.within, plan.cluster.between
    links = f"Within a node {within.bytes_per_s / 1e9:.3g} GB/s after {seconds_text(within.latency_s)}"
    if plan.cluster.nodes > 1:
        links += f", between nodes {between.bytes_per_s / 1e9:.3g} GB/s after {seconds_text(between.latency_s)}"
    inputs = ", ".join(f"{leaf.target} {shape_text(leaf)}" for leaf in inputs_of(plan)[:8])
    prints = f"graph {plan.graph.fingerprint}, cluster {plan.cluster.fingerprint}"
    return section(
        "about",
        "How it was planned",
        tag("ul", *(tag("li", note) for note in plan.notes), class_="notes") if plan.notes else None,
        tag("p", " ".join(f"{line.strip().rstrip('.')}." for line in search_lines(plan)), class_="words"),
        tag("details", tag("summary", "What was tried"), tag("ul", *(tag("li", each) for each in plan.search.rounds))),
        tag("h3", "The cluster"),
        table(("kind", "where", "speed", ">moves", ">memory"), kinds, label="Kinds of devices", class_="kinds"),
        tag("p", plan.cluster.about, class_="hint") if plan.cluster.about else None,
        tag("p", f"{links}. Inputs: {inputs}. Optimizer: {plan.optimizer}. Fingerprints: {prints}.", class_="hint"),
    )
