"""The section of the program: every op with its placements in colour and what it costs, layers that repeat once.

In: a `Plan`. Out: `Html`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lopsided.planner.plan_data import Plan
from lopsided.report.figures import bar
from lopsided.report.listing import Row, listing, seconds_text
from lopsided.report.markup import Html, join, tag
from lopsided.report.parts import cell, chip, section, swatch, table
from lopsided.report.plan_text import plural
from lopsided.report.words import percent

_PLACEMENT = re.compile(
    r"(?<=[:→,] )(?:[IRP]|S\d+(?:x\d+)?(?:/\d+)?(?:@\w+)?)(?=[→,)\s]|$)|(?<=→)(?:[IRP]|S\d+(?:x\d+)?(?:/\d+)?(?:@\w+)?)"
)


def coloured(words: str) -> Html:
    """A line of the program with its placements as chips."""
    parts: list[str] = []
    position = 0
    for match in _PLACEMENT.finditer(words):
        parts += [words[position : match.start()], chip(match[0])]
        position = match.end()
    return join([*parts, words[position:]])


def program_section(plan: Plan) -> Html:
    rows = listing(plan)
    most = max((row.times * (row.compute_s + row.blocking_s) for row in rows if not row.repeats), default=0.0)
    free = sum(row.times for row in rows if row.is_free)
    inside: list[Html] = []
    plain: list[Html] = []
    waiting: tuple[Row, list[Html]] | None = None
    for row in rows:
        if row.repeats:
            if plain:
                inside.append(_steps(plain, "Steps"))
                plain = []
            waiting = (row, [])
            continue
        if waiting is None:
            plain.append(_step(row, most))
            continue
        waiting[1].append(_step(row, most))
        if len(waiting[1]) == waiting[0].rows:
            inside.append(_layer(*waiting, plan.step_s))
            waiting = None
    if plain:
        inside.append(_steps(plain, "Steps"))
    legend = tag(
        "ul",
        tag("li", chip("S0"), " cut along dim 0"),
        tag("li", chip("S1"), " along dim 1, and so on"),
        tag("li", chip("S0@state"), " cut by other shares than those of the work"),
        tag("li", chip("I"), " whole and the same everywhere"),
        tag("li", chip("R"), " whole, gradients differ"),
        tag("li", chip("P"), " parts of a sum"),
        class_="legend",
    )
    toggle = None
    if free:
        box = tag("input", type="checkbox", id="free")
        toggle = tag(
            "label", box, f" also show {free} {plural('step', free)} that take no time, such as views", class_="toggle"
        )
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
        legend,
        toggle,
        *inside,
    )


def _steps(rows: Sequence[Html], label: str) -> Html:
    heads = ("step", "", ">compute", ">blocks", ">hides", "sends")
    return table(heads, rows, label=label, class_="program")


def _step(row: Row, most: float) -> Html:
    drawn = bar([("bwd", row.times * row.compute_s), ("blocked", row.times * row.blocking_s)], most)
    sends = "; ".join(f"{send.collective} by {send.implementation}" for send in row.sends)
    cells = [
        tag("th", coloured(row.text), scope="row", role="rowheader", title=row.module or None),
        cell(drawn, class_="wide"),
        *(
            cell(seconds_text(seconds) if seconds > 1e-12 else "", name)
            for name, seconds in (("compute", row.compute_s), ("blocks", row.blocking_s), ("hides", row.hiding_s))
        ),
        cell(sends, "sends", "sends"),
    ]
    return tag("tr", *cells, class_="free" if row.is_free else None, role="row")


def _layer(head: Row, rows: Sequence[Html], step_s: float) -> Html:
    told = [f"compute {seconds_text(head.compute_s)}"]
    if head.blocking_s > 0:
        told.append(f"blocks {seconds_text(head.blocking_s)}")
    if head.hiding_s > 0:
        told.append(f"hides {seconds_text(head.hiding_s)}")
    whole = head.repeats * (head.compute_s + head.blocking_s)
    part = f"; {percent(whole / step_s)} of the step in all" if step_s else ""
    summary = tag("summary", tag("b", head.text), f" × {head.repeats} ", tag("span", f"each: {', '.join(told)}{part}"))
    return tag("details", summary, _steps(rows, f"Steps of {head.text}"), open=True, class_="layer")
