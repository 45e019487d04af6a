"""What sections are made of: tables, lists of sentences, swatches and chips.

In: text and numbers. Out: `Html`. Tables say their roles themselves: on narrow pages their cells are laid out as
blocks, which would take the roles away.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lopsided.report.markup import Html, join, tag


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


def table(heads: Sequence[str], rows: Iterable[Html], *, label: str, class_: str = "") -> Html:
    """Heads that begin with a > are above numbers. Columns have a class by their number, for widths that hold for all
    tables of a class."""
    cells = [
        tag(
            "th",
            head.removeprefix(">"),
            scope="col",
            class_="num" if head.startswith(">") else None,
            role="columnheader",
        )
        for head in heads
    ]
    return tag(
        "table",
        tag("colgroup", *(tag("col", class_=f"col{k}") for k in range(1, len(heads) + 1))),
        tag("thead", tag("tr", *cells, role="row"), role="rowgroup"),
        tag("tbody", *rows, role="rowgroup"),
        class_=class_ or None,
        aria_label=label,
        role="table",
    )


def row_of(name: str, *cells: Html, class_: str = "") -> Html:
    return tag("tr", tag("th", name, scope="row", role="rowheader"), *cells, class_=class_ or None, role="row")


def cell(inside: str, head: str = "", class_: str = "num") -> Html:
    return tag("td", inside, class_=class_ or None, data_head=head or None, role="cell")


def swatch(kind: str) -> Html:
    return tag("svg", tag("rect", class_=kind, width="100%", height="100%"), class_="swatch", aria_hidden="true")


def place_class(placement: str) -> str:
    if not placement.startswith("S"):
        return placement
    dim = re.sub(r"[^0-9].*", "", placement[1:])
    return f"S{min(int(dim), 3)}" + ("-by" if "@" in placement else "")


def chip(placement: str) -> Html:
    return tag("i", placement, class_=f"chip chip-{place_class(placement)}")
