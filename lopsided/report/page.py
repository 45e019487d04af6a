"""A plan, and a run of it, as one page to look at: no network, no other files.

In: a `Plan` and perhaps a `Run`. Out: HTML: sections, each a heading, what one sees (`words`), a figure or a table.

    plan_tables, run_tables    what is told, as tables that the terminal shows as well
    markup                     text that cannot be broken out of, tables, bars and the timeline
    page.css, page.js          how it looks, and what it does when looked at closely

Names in plans come from strangers. All text is escaped (`markup`), and should that fail, the page's policy allows no
script and no style but the two here, known by their hashes, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from importlib import resources
from itertools import groupby

from lopsided.calibration.comparison import compare_run
from lopsided.calibration.run_record import Run
from lopsided.planner.baselines import STATE
from lopsided.planner.plan_data import Plan
from lopsided.report.chart import (
    BLOCKED,
    COMPUTE,
    DOING,
    EXPOSED,
    HIDDEN,
    IDLE,
    OPTIMIZER,
    WAITING,
    Chart,
    Strip,
    measured_chart,
    predicted_chart,
)
from lopsided.report.listing import listing, parameters_of
from lopsided.report.markup import (
    Html,
    bar,
    chip,
    coloured,
    flowing,
    hatches,
    html_table,
    join,
    place_class,
    section,
    steps_plot,
    swatch,
    tag,
    timeline,
    words_list,
)
from lopsided.report.plan_tables import (
    baseline_table,
    device_table,
    free_words,
    inputs_text,
    kinds_table,
    program_table,
    search_lines,
    segment_tables,
    segment_words,
    sent_table,
    worth_table,
)
from lopsided.report.run_tables import comparison_tables
from lopsided.report.table import (
    Bar,
    Cell,
    Column,
    Row,
    Table,
    bytes_text,
    count_text,
    percent,
    plural,
    rate_text,
    seconds_text,
    speed_text,
    times,
)
from lopsided.report.words import lede, memory_words, run_words, share_words, time_words, worth_words

__all__ = ["report_html"]

_LINKS = (
    ("time", "Time"),
    ("run", "Measured"),
    ("devices", "Devices"),
    ("classics", "Classics"),
    ("worth", "Worth"),
    ("program", "Program"),
    ("about", "About"),
)


def report_html(plan: Plan, run: Run | None = None, *, title: str = "") -> str:
    """The page. The title is the model's name as a rule, which a plan does not know and a run does."""
    name = title or (run.model if run else "") or "A plan"
    style, script = _file("page.css"), _file("page.js")
    sections = {
        "time": _time_section(predicted_chart(plan), measured_chart(run) if run else None),
        "run": _run_section(run) if run else None,
        "devices": _devices_section(plan),
        "classics": _classics_section(plan),
        "worth": _worth_section(plan),
        "program": _program_section(plan),
        "about": _about_section(plan),
    }
    links = [tag("a", words, href=f"#{where}") for where, words in _LINKS if sections[where]]
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    top = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="generator", content="lopsided"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{name} on {plan.cluster.name}"),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        hatches(),
        tag("a", "Skip to the timeline", href="#time", class_="skip"),
        _head(plan, name, run),
        tag("nav", *links, aria_label="Sections"),
        tag("main", *sections.values()),
        tag("script", Html(script)),
    )
    page = tag("html", top, body, lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _file(name: str) -> str:
    return (resources.files("lopsided.report") / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


# Top


def _head(plan: Plan, title: str, run: Run | None) -> Html:
    batch = plan.rows
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
        tag("p", f"on {plan.cluster.name}: {_devices_text(plan)}", class_="on"),
        tag("p", flowing(" ".join(lede(plan))), class_="lede"),
        tag("dl", *items, class_="figures"),
    )


def _devices_text(plan: Plan) -> str:
    kinds = ", ".join(f"{kind.devices} {kind.name}" for kind in plan.cluster.kinds[:6])
    more = ", ..." if len(plan.cluster.kinds) > 6 else ""
    return f"{kinds}{more} in {plan.cluster.nodes} {plural('node', plan.cluster.nodes)}"


# Time


_RECORDING = "Recording takes time itself: a step that was only timed is shorter."
_TOOLS = Html("""
<div class="tools">
<output id="readout" aria-live="polite">Point at a block, or focus the timeline and press an arrow key.</output>
<div class="buttons">
<button type="button" data-zoom="out" aria-label="Zoom out">−</button>
<button type="button" data-zoom="in" aria-label="Zoom in">+</button>
<button type="button" data-zoom="all" aria-label="Show the whole step">All</button>
</div></div>""")
_KEYS = Html("""
<p id="keys" class="hint">Keys, once the timeline is focused: <kbd>+</kbd><kbd>−</kbd> zoom, <kbd>0</kbd> shows all,
<kbd>←</kbd><kbd>→</kbd> go from block to block, <kbd>↑</kbd><kbd>↓</kbd> from lane to lane.
With a mouse: Ctrl and wheel zoom, dragging moves.</p>""")


def _time_section(predicted: Chart, measured: Chart | None) -> Html:
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
        tag("figure", _TOOLS, timeline(predicted, measured), _legend(predicted, measured), _KEYS, class_="time"),
        tag("h3", "Where the time goes"),
        _spent(predicted, "predicted"),
        _spent(measured, "recorded") if measured else None,
        tag("p", _RECORDING, class_="hint") if measured else None,
    )


_LEGEND = {
    BLOCKED: "send, all wait",
    EXPOSED: "send that did not hide",
    HIDDEN: "send behind computation",
    WAITING: "waits for others",
    IDLE: "nothing recorded",
}


def _legend(*charts: Chart | None) -> Html:
    lanes = [lane for chart in charts if chart for lane in (chart.network, *(strip.blocks for strip in chart.strips))]
    seen = {block.doing for lane in lanes for block in lane}
    entries = [("fwd", "compute, forward"), ("bwd", "backward"), ("opt", "optimizer")]
    entries += [(doing, words) for doing, words in _LEGEND.items() if doing in seen]
    return tag("ul", *(tag("li", swatch(kind), words) for kind, words in entries), class_="legend")


def _spent(chart: Chart, title: str) -> Html | None:
    """Each strip's step as a bar, and in numbers."""
    heads = ("computes", "sends, all wait", "sends, not hidden", "waits")
    columns = (
        Column(f"{title} step {seconds_text(chart.step_s)}"),
        Column(),
        *(Column(head, seconds_text) for head in heads),
    )
    rows = [_spent_row(strip, chart.step_s) for strip in chart.strips]
    return html_table(Table(f"Where the time goes, {title}", columns, tuple(rows)), class_="spent")


def _spent_row(strip: Strip, step_s: float) -> Row:
    computed = [block for block in strip.blocks if block.doing == COMPUTE]
    update = sum(block.seconds for block in computed if block.phase == OPTIMIZER)
    forward = sum(block.seconds for block in computed if block.phase == "forward")
    compute, *stills = (strip.seconds(doing) for doing in DOING)
    parts = (
        ("fwd", forward),
        ("bwd", compute - forward - update),
        ("opt", update),
        *zip(DOING[1:], stills, strict=True),
    )
    numbers = (compute, strip.seconds(BLOCKED), strip.seconds(EXPOSED), strip.seconds(WAITING, IDLE))
    cells = [Cell(seconds, small=percent(seconds / step_s if step_s else 0.0)) for seconds in numbers]
    return Row((strip.label, Cell(None, bars=(Bar(parts, step_s),)), *cells))


# Devices


def _devices_section(plan: Plan) -> Html:
    parts = [each for table in segment_tables(plan) for each in _titled(table, "devices")]
    return section(
        "devices",
        "Who does how much",
        words_list([*share_words(plan), memory_words(plan)]),
        html_table(device_table(plan), label="Shares and memory of the devices", class_="devices"),
        tag("p", f"The line across a share is an equal one, {percent(1 / len(plan.devices))}.", class_="hint"),
        tag("details", tag("summary", segment_words(plan)), *parts) if parts else None,
        _stored(plan),
    )


def _titled(table: Table, class_: str) -> list[Html | None]:
    return [tag("p", table.title), html_table(table, class_=class_)] if table.rows else []


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
    parts = tuple((f"chip-{place_class(placement)}", float(sum(held))) for placement, held in found)
    items = [
        tag("li", chip(placement), f" {_stored_words(placement)}: {len(held):,} with {bytes_text(sum(held))}")
        for placement, held in found
    ]
    label = ", ".join(f"{placement} {bytes_text(sum(held))}" for placement, held in found)
    return join(
        [
            tag("h3", "How parameters are stored"),
            tag("div", bar(Bar(parts, whole), f"Bytes of parameters by placement: {label}"), class_="stored"),
            tag("ul", *items, class_="legend"),
        ]
    )


def _stored_words(placement: str) -> str:
    if placement == "I":
        return "whole on every device"
    words = f"cut along dim {re.sub(r'[^0-9].*', '', placement[1:])}"
    return f"{words} by the shares of the {STATE}, gathered for use" if placement.endswith(f"@{STATE}") else words


# Against others


def _classics_section(plan: Plan) -> Html | None:
    if not plan.baselines:
        return None
    words = "The same model on the same cluster by strategies that need no planner, all predicted alike."
    return section(
        "classics",
        "Against what everyone knows",
        tag("p", words, class_="words"),
        html_table(baseline_table(plan), label="Predicted steps of classic strategies", class_="classics"),
    )


def _worth_section(plan: Plan) -> Html | None:
    table = worth_table(plan)
    if not table.rows:
        return None
    return section(
        "worth",
        "What each device is worth",
        words_list(worth_words(plan)),
        html_table(table, label="The step without one device or node", class_="worth"),
        tag("p", f"The line is the step with all of them, {seconds_text(plan.step_s)}.", class_="hint"),
    )


def _run_section(run: Run) -> Html:
    """Line by line what was predicted and what was measured, under what it is about."""
    found = compare_run(run)
    hardware = ", ".join(dict.fromkeys(device.hardware for device in run.devices if device.hardware))
    about = f" measured: {run.model}, with torch {run.torch}{f' on {hardware}' if hardware else ''}."
    return section(
        "run",
        "Predicted against measured",
        words_list(run_words(run, found)),
        tag("div", steps_plot(run.timed_s, found.step.predicted), class_="steps-box"),
        tag("p", "A dot for each step that was timed; the line is the prediction.", class_="hint"),
        *(
            html_table(table, label=f"Predicted and measured: {table.title}", class_="against")
            for table in comparison_tables(found)
        ),
        tag("p", swatch("foreseen"), " predicted, ", swatch("found"), about, class_="hint"),
    )


# The program


def _program_section(plan: Plan) -> Html:
    """Every op with its placements in colour and what it costs, layers that repeat once."""
    table = program_table(plan)
    legend = (
        ("S0", " cut along dim 0"),
        ("S1", " along dim 1, and so on"),
        (f"S0@{STATE}", " cut by other shares than those of the work"),
        ("I", " whole and the same everywhere"),
        ("R", " whole, gradients differ"),
        ("P", " parts of a sum"),
    )
    toggle = None
    if free := free_words(listing(plan)):
        box = tag("input", type="checkbox", id="free")
        toggle = tag("label", box, f" also show {free}", class_="toggle")
    return section(
        "program",
        "The program",
        tag(
            "p",
            "Every op, with how its operands are placed and what it gives; → is a conversion. Layers that repeat are "
            "shown once. Seconds are those of one execution, forward and backward; bars are those of all, ",
            swatch("bwd"),
            " computed and ",
            swatch("blocked"),
            " sent while everyone waits.",
            class_="words",
        ),
        tag("ul", *(tag("li", chip(placement), words) for placement, words in legend), class_="legend"),
        toggle,
        *_layers(table),
        *_titled(sent_table(plan), "sent"),
    )


def _layers(table: Table) -> Iterator[Html | None]:
    """The rows of the program; those of layers that repeat can be folded away."""
    for is_inside, group in groupby(_with_heads(table), key=lambda pair: pair[0]):
        rows = [row for _, row in group]
        if is_inside is None:
            yield html_table(table, label="Steps", class_="program", named=coloured, rows=rows)
            continue
        told = ", ".join(f"{table.columns[k].head} {text}" for k in (2, 3, 4) if (text := table.text(is_inside, k)))
        name = table.text(is_inside, 0)
        summary = tag("summary", tag("b", name), tag("span", f"{told}; {is_inside.about}"))
        steps = html_table(table, label=f"Steps of {name}", class_="program", named=coloured, rows=rows)
        yield tag("details", summary, steps, open=True, class_="layer")


def _with_heads(table: Table) -> Iterator[tuple[Row | None, Row]]:
    """Each step, and the head of the layers that it belongs to."""
    head = None
    for row in table.rows:
        if row.style == "layer":
            head = row
        else:
            head = head if row.indent else None
            yield head, row


# About


def _about_section(plan: Plan) -> Html:
    within, between = plan.cluster.within, plan.cluster.between
    links = f"Within a node {speed_text(within.bytes_per_s)} after {seconds_text(within.latency_s)}"
    if plan.cluster.nodes > 1:
        links += f", between nodes {speed_text(between.bytes_per_s)} after {seconds_text(between.latency_s)}"
    prints = f"graph {plan.graph.fingerprint}, cluster {plan.cluster.fingerprint}"
    about = f"{links}. Inputs: {inputs_text(plan)}. Optimizer: {plan.optimizer}. Fingerprints: {prints}."
    return section(
        "about",
        "How it was planned",
        tag("ul", *(tag("li", note) for note in plan.notes), class_="notes") if plan.notes else None,
        tag("p", " ".join(f"{line.strip().rstrip('.')}." for line in search_lines(plan)), class_="words"),
        tag("details", tag("summary", "What was tried"), tag("ul", *(tag("li", each) for each in plan.search.rounds))),
        tag("h3", "The cluster"),
        html_table(kinds_table(plan.cluster), label="Kinds of devices", class_="kinds"),
        tag("p", plan.cluster.about, class_="hint") if plan.cluster.about else None,
        tag("p", about, class_="hint"),
    )
