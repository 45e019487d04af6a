"""HTML that cannot be broken out of: tags, tables, bars, and the timeline of a step as SVG.

In: text of anybody, `Table`s, `Chart`s. Out: `Html`. The one idea: the type says what is markup already (`Html`, made
by `tag` alone); every other string is text, and `tag` escapes it, in content and in attributes alike.

Lengths are percentages, so that a page of any width is filled. The timeline is drawn once, for all widths. To look
closer, the script makes it wider than its window, which scrolls; what it needs to say about a block under the pointer
or the cursor lies beside, as data (`_told`).
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lopsided.report.chart import (
    BLOCKED,
    COMPUTE,
    EXPOSED,
    FORWARD,
    HIDDEN,
    IDLE,
    OPTIMIZER,
    WAITING,
    Chart,
    ChartBlock,
    Strip,
)
from lopsided.report.table import PAGE, Bar, Row, Table, bytes_text, percent, seconds_text


class Html(str):
    """Markup, as it is to stand in the page."""

    __slots__ = ()


_EMPTY = {"meta", "rect", "line", "col", "input", "path", "br"}
"""Tags without content; the SVG ones among them are closed by their slash."""


def tag(name: str, /, *inside: str | None, **attributes: str | float | bool | None) -> Html:
    """An element. None and False leave an attribute away, True gives it no value; `class_` is `class`, `a_b` is `a-b`.

    >>> tag("p", "1 < 2", class_="sum")
    '<p class="sum">1 &lt; 2</p>'
    """
    told = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _EMPTY:
        return Html(f"<{name}{told}/>")
    return Html(f"<{name}{told}>{join(inside)}</{name}>")


def join(parts: Iterable[str | None], between: str = "") -> Html:
    return Html(between.join(text(part) for part in parts if part is not None))


def text(part: str) -> Html:
    """Text made safe. What cannot be printed (control characters, changes of direction) is a question mark."""
    if isinstance(part, Html):
        return part
    plain = "".join(c if c.isprintable() or c in "\n\N{NO-BREAK SPACE}" else "?" for c in part)
    return Html(html.escape(plain))


def _attribute(key: str, value: str | float | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{text(value if isinstance(value, str) else number(value))}"'


def number(value: float) -> str:
    """Short: four digits behind the point, and none that say nothing.

    >>> number(12.5), number(3.0), number(0.123456)
    ('12.5', '3', '0.1235')
    """
    return f"{value:.4f}".rstrip("0").rstrip(".")


def data(value: object, **attributes: str) -> Html:
    """Data for the page's script: JSON in which nothing can end the element."""
    told = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    safe = told.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return tag("script", Html(safe), type="application/json", **attributes)


# Sentences and placements


def section(name: str, title: str, *inside: str | None) -> Html:
    return tag("section", tag("h2", title, id=f"{name}-title"), *inside, id=name, aria_labelledby=f"{name}-title")


def words_list(sentences: Iterable[str]) -> Html | None:
    """Sentences, a line each."""
    told = [tag("li", flowing(sentence)) for sentence in sentences]
    return tag("ul", *told, class_="words") if told else None


_UNIT = re.compile(r"(?<=\d) (?=(?:%|×|s|ms|µs|B|[KMGT]iB)(?:\W|$))")
_HYPHENED = re.compile(r"[^\s()]{1,24}-[^\s(),;.]{1,24}")


def flowing(sentence: str) -> Html:
    """A sentence in which lines do not end between a number and its unit, nor in a name."""
    held = _UNIT.sub("\N{NO-BREAK SPACE}", sentence)
    parts: list[str] = []
    position = 0
    for match in _HYPHENED.finditer(held):
        parts += [held[position : match.start()], tag("span", match[0], class_="held-together")]
        position = match.end()
    return join([*parts, held[position:]])


def swatch(kind: str) -> Html:
    return tag("svg", tag("rect", class_=kind, width="100%", height="100%"), class_="swatch", aria_hidden="true")


def place_class(placement: str) -> str:
    if not placement.startswith("S"):
        return placement
    dim = re.sub(r"[^0-9].*", "", placement[1:])
    return f"S{min(int(dim), 3)}" + ("-by" if "@" in placement else "")


def chip(placement: str) -> Html:
    return tag("i", placement, class_=f"chip chip-{place_class(placement)}")


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


# Tables


def html_table(
    table: Table, *, label: str = "", class_: str = "", named: Callable[[str], Html] = text, rows: Sequence[Row] = ()
) -> Html | None:
    """A table, or those rows of it. `named` makes the name of a row, which is its first cell.

    Roles are said in words: on narrow pages cells are laid out as blocks, which would take the roles away.
    """
    seen = table.seen_on(PAGE)
    if not seen:
        return None
    kinds = {k: _column_class(table, k) for k in seen}
    heads = [
        tag(
            "th",
            table.columns[k].head,
            scope="col",
            class_=kinds[k] if kinds[k] == "num" else None,
            role="columnheader",
        )
        for k in seen
    ]
    body = [
        tag(
            "tr",
            tag("th", named(table.text(row, seen[0])), scope="row", role="rowheader", title=row.about or None),
            *(_cell(table, row, k, kinds[k]) for k in seen[1:]),
            class_=row.style or None,
            role="row",
        )
        for row in rows or table.rows
    ]
    return tag(
        "table",
        tag("colgroup", *(tag("col", class_=f"{kinds[k]}-col") for k in seen)),
        tag("thead", tag("tr", *heads, role="row"), role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
        class_=class_ or None,
        aria_label=label or table.title,
        role="table",
    )


def _column_class(table: Table, number: int) -> str:
    """How wide a column is and where its cells stand: `wide` are bars, `meter` bars with words, `num` numbers."""
    cells = [row.cell(number) for row in table.rows]
    if any(cell.bars for cell in cells):
        return "meter" if any(table.text(row, number) for row in table.rows) else "wide"
    return "num" if table.columns[number].unit else "text"


def _cell(table: Table, row: Row, number: int, kind: str) -> Html:
    cell, words = row.cell(number), table.text(row, number)
    drawn = [bar(each) for each in cell.bars]
    small = tag("small", cell.small) if cell.small else None
    told: str = tag("span", words) if kind == "meter" else words
    two = " two" if len(cell.bars) > 1 else ""
    head = table.columns[number].head
    return tag("td", *drawn, told, small, class_=f"{kind}{two}", data_head=head or None, role="cell")


# Bars


def bar(drawn: Bar, label: str = "") -> Html:
    """Said in words by `label`, or beside it in a table."""
    whole = drawn.whole
    rects: list[Html] = []
    at = 0.0
    for kind, size in drawn.parts:
        if size > 0 and whole > 0 and math.isfinite(size):
            rects.append(_rect(kind, at, size, whole, "100%"))
            at += size
    lines = [
        tag("line", class_="mark", x1=_at(mark, whole), x2=_at(mark, whole), y1="0", y2="100%")
        for mark in drawn.marks
        if whole
    ]
    spoken = {"role": "img", "aria_label": label} if label else {"aria_hidden": "true"}
    return tag("svg", *rects, *lines, class_="bar", **spoken)


def _at(part: float, whole: float) -> str:
    return f"{part / whole * 100:.5f}".rstrip("0").rstrip(".") + "%"


def _rect(kind: str, start: float, size: float, whole: float, height: str | int) -> Html:
    return tag("rect", class_=kind, x=_at(start, whole), width=_at(size, whole), height=height)


def doing_class(block: ChartBlock) -> str:
    """How a block is coloured: by what is done, and computation by its phase."""
    if block.doing != COMPUTE:
        return block.doing
    return {FORWARD: "fwd", OPTIMIZER: "opt"}.get(block.phase, "bwd")


# The timeline

_MOST_BLOCKS = 6000
"""In a page: with more, neighbours that are too short to be seen become one."""
_MOST_MEASURED = 16
"""Devices of a run that have a strip of their own."""
# Heights of lanes and rows in pixels.
_LANE, _NETWORK, _ROW = 26, 12, 15


@dataclass(frozen=True, slots=True)
class _Lane:
    label: str
    facts: str
    blocks: tuple[ChartBlock, ...]
    height: int
    of: str = ""  # predicted or measured, where there are both


def timeline(predicted: Chart, measured: Chart | None = None) -> Html:
    """Lanes of all devices and of the network over one axis of time."""
    whole = max(predicted.step_s, measured.step_s if measured else 0.0)
    lanes = _coarse(list(_lanes(predicted, measured)), whole)
    strings: dict[str, int] = {}
    title = "predicted " if measured else ""
    phases = [(f"{title}{name} {seconds_text(end - start)}", name, start, end) for name, start, end in predicted.phases]
    # Which part of the model the busiest devices are at.
    layers = layers_of(predicted.busiest)
    parts = [(name, "odd" if k % 2 else "even", start, end) for k, (name, start, end) in enumerate(layers)]
    drawn = [_axis(whole), _named_row("phases", phases, whole), _named_row("layers", parts, whole)]
    for k, lane in enumerate(lanes):
        drawn.append(tag("p", tag("b", lane.label), " ", tag("span", lane.facts), class_="name"))
        rects = (_rect(doing_class(b), b.start_s, b.seconds, whole, lane.height) for b in lane.blocks)
        drawn.append(
            tag(
                "svg",
                *rects,
                tag("g", class_="labels"),
                class_=f"lane {lane.of}".strip(),
                data_lane=k,
                height=lane.height,
                role="img",
                aria_label=f"{lane.label}: {lane.facts}",
            )
        )
    told = {
        "step_s": whole,
        "lanes": [[lane.label, [_told(block, strings) for block in lane.blocks]] for lane in lanes],
        "layers": [[name, start, end] for name, start, end in layers],
    }
    told["strings"] = [*strings]
    scroller = tag(
        "div",
        tag("div", *drawn, class_="sheet"),
        class_="scroller",
        tabindex="0",
        role="application",
        aria_label="Timeline of a step",
        aria_describedby="keys",
    )
    return join([scroller, data(told, id="blocks")])


def _lanes(predicted: Chart, measured: Chart | None) -> Iterator[_Lane]:
    found = {strip.label: strip for strip in measured.strips[:_MOST_MEASURED]} if measured else {}
    for strip in predicted.strips:
        title = "predicted" if measured else ""
        yield _Lane(strip.label, facts_of(strip, predicted.step_s, title), strip.blocks, _LANE, title)
        for name in strip.devices:
            if name in found and measured is not None:
                mine = found[name]
                yield _Lane(name, facts_of(mine, measured.step_s, "recorded"), mine.blocks, _LANE, "measured")
    for title, chart in (("predicted", predicted), ("recorded", measured)):
        if chart is not None and chart.network:
            said = f"{title}, " if measured else ""
            total = sum(block.seconds for block in chart.network)
            busy = f"{said}busy {percent(total / chart.step_s if chart.step_s else 0.0)}"
            yield _Lane("network", busy, chart.network, _NETWORK, title if measured else "")


def facts_of(strip: Strip, step_s: float, title: str = "") -> str:
    """What a strip adds up to."""
    told = [title] if title else []
    does = {"computes": (COMPUTE,), "sends": (BLOCKED, EXPOSED), "waits": (WAITING,), "idle": (IDLE,)}
    for words, doing in does.items():
        part = strip.seconds(*doing) / step_s if step_s else 0.0
        if part or words == "computes":
            told.append(f"{words} {percent(part)}")
    return ", ".join(told)


def _coarse(lanes: Sequence[_Lane], whole: float) -> list[_Lane]:
    """Lanes of so few blocks that a page can hold them."""
    least = 0.0
    found = list(lanes)
    while sum(len(lane.blocks) for lane in found) > _MOST_BLOCKS and least < whole:
        least = least * 2 or whole / 2**16
        found = [replace(lane, blocks=tuple(_joined(lane.blocks, least))) for lane in lanes]
    return found


def _joined(blocks: Sequence[ChartBlock], least_s: float) -> Iterator[ChartBlock]:
    """Neighbours of one class that are shorter than this, as one."""
    held: list[ChartBlock] = []
    for block in blocks:
        alike = (
            held
            and doing_class(block) == doing_class(held[0])
            and block.seconds < least_s
            and block.end_s - held[0].start_s < 4 * least_s
            and block.start_s - held[-1].end_s < least_s
        )
        if not alike:
            yield from _one(held)
            held = []
        held.append(block)
    yield from _one(held)


def _one(held: Sequence[ChartBlock]) -> Iterator[ChartBlock]:
    if len(held) > 1:
        what = f"{held[0].what or held[0].doing} … {held[-1].what or held[-1].doing} ({len(held)})"
        yield replace(held[0], what=what, end_s=held[-1].end_s)
    else:
        yield from held


def _told(block: ChartBlock, strings: dict[str, int]) -> list[float]:
    """Start, seconds, and numbers of strings: what, and more about it."""
    more = [block.module] if block.module else []
    if block.collective:
        more.append(f"{block.collective} by {block.way}, {bytes_text(block.whole_bytes)}")
    kind = {BLOCKED: "sends, everyone waits", EXPOSED: "stands still for a send", HIDDEN: "sends meanwhile"}
    if block.doing == WAITING:
        what = f"waits for {block.awaits}" if block.awaits else "waits"
    else:
        what = block.what or block.doing
    more.append(block.phase if block.doing in (COMPUTE, WAITING, IDLE) else f"{block.phase}, {kind[block.doing]}")
    numbers = [strings.setdefault(text, len(strings)) for text in (what, "  ·  ".join(more))]
    return [*(float(f"{seconds:.6g}") for seconds in (block.start_s, block.seconds)), *numbers]


def _axis(whole: float) -> Html:
    marks: list[Html] = []
    for at in ticks(whole):
        x = _at(at, whole)
        marks.append(tag("line", x1=x, x2=x, y1="12", y2="18"))
        marks.append(tag("text", seconds_text(at), x=x, y="10", class_="first" if not at else None))
    return tag("svg", *marks, class_="axis", height=18, aria_hidden="true")


def ticks(whole: float, most: int = 8) -> list[float]:
    """Round numbers from 0 on.

    >>> ticks(0.339)
    [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]
    """
    if not whole > 0:
        return [0.0]
    power = 10 ** math.floor(math.log10(whole / most))
    gap = next(power * k for k in (1, 2, 5, 10, 20) if whole / (power * k) <= most)
    return [float(f"{k * gap:.12g}") for k in range(int(whole / gap * (1 - 1e-9)) + 1)]


def _named_row(class_: str, parts: Iterable[tuple[str, str, float, float]], whole: float) -> Html:
    """A row of parts (name, class, start, end), each with its name where there is room."""
    drawn: list[Html] = []
    spans = [part for part in parts if part[3] > part[2]]
    for name, kind, start, end in spans:
        drawn.append(_rect(kind, start, end - start, whole, _ROW))
        # For a width at which most pages are printed; the script names layers for the width there is.
        if (end - start) / whole * 900 > 6.5 * len(name) + 6:
            drawn.append(tag("text", name, x=_at(start, whole), dx="4", y="11"))
    words = ", ".join(name for name, *_ in spans)
    return tag("svg", *drawn, class_=class_, height=_ROW, role="img", aria_label=f"{class_}: {words}")


_NUMBERED = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def layer_of(module: str) -> str:
    """The part of the model that a module belongs to: up to its first number, or its first name.

    >>> layer_of("layers.3.attention.out"), layer_of("head"), layer_of("")
    ('layers.3', 'head', '')
    """
    match = _NUMBERED.search(module)
    return module[: match.end()] if match else module.partition(".")[0]


def layers_of(strip: Strip) -> list[tuple[str, float, float]]:
    """The layers in order, and when each computes. What belongs to none is part of what is before it."""
    found: list[tuple[str, float, float]] = []
    for block in strip.blocks:
        if block.doing != COMPUTE or block.phase == OPTIMIZER:
            continue
        name = layer_of(block.module)
        if found and name in ("", found[-1][0]):
            found[-1] = (found[-1][0], found[-1][1], block.end_s)
        else:
            found.append((name or "–", block.start_s, block.end_s))
    return found


def hatches() -> Html:
    """Patterns for standing still, defined once."""
    patterns = [
        tag(
            "pattern",
            tag("rect", width="6", height="6", class_=f"{name}-ground"),
            tag("path", d="M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2", class_=f"{name}-lines"),
            id=name,
            width="6",
            height="6",
            patternUnits="userSpaceOnUse",
        )
        for name in ("still", "late")
    ]
    return tag("svg", tag("defs", *patterns), class_="defs", width="0", height="0", aria_hidden="true")


def steps_plot(timed_s: Sequence[float], predicted_s: float) -> Html:
    """Every step that was timed as a dot, the prediction as a line."""
    top = max(*timed_s, predicted_s) * 1.08 or 1.0
    y = f"{100 - predicted_s / top * 100:.2f}%"
    dots = [
        tag("circle", cx=f"{(k + 0.5) / len(timed_s) * 100:.3f}%", cy=f"{100 - seconds / top * 100:.2f}%", r="2.5")
        for k, seconds in enumerate(timed_s)
    ]
    words = f"{len(timed_s)} steps from {seconds_text(min(timed_s))} to {seconds_text(max(timed_s))}"
    line = tag("line", x1="0", x2="100%", y1=y, y2=y)
    return tag(
        "svg", line, *dots, class_="steps", role="img", aria_label=f"{words}; predicted {seconds_text(predicted_s)}"
    )
