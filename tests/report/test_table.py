"""One table, three renderers: the same values for terminal, page and JSON."""

from __future__ import annotations

import json
import math
import re

from hypothesis import given
from hypothesis import strategies as st

from lopsided.report.markup import coloured, html_table
from lopsided.report.table import (
    DATA,
    PAGE,
    TERMINAL,
    Bar,
    Cell,
    Column,
    Row,
    Table,
    by_name,
    percent,
    records,
    seconds_text,
    text_lines,
    wrapped,
)

COLUMNS = (
    Column("op", key="op", most=20),
    Column(only=PAGE),
    Column("takes", seconds_text, "seconds"),
    Column("empty", percent),
    Column("room", key="bytes", draws=True),
    Column(key="points", only=DATA),
    Column("where", only=TERMINAL),
)


def row(name: str, seconds: object = 0.0012, **more: str) -> Row:
    bar = Cell(None, bars=(Bar((("bwd", 1.0),), 2.0),))
    room = Cell(3, "3 of 6", (Bar((("held", 3.0), ("room", 3.0)), 12.0),))
    return Row((name, bar, seconds, None, room, [1, 2], f"in {name}"), **more)


def table(*rows: Row) -> Table:
    return Table("ops", COLUMNS, rows, ("a note",))


def test_terminals_show_values_in_their_units_under_aligned_heads() -> None:
    assert [*text_lines(table(row("linear"), row("relu", 12.0)))] == [
        "  op        takes  room               where",
        "  linear  1.20 ms  █████░░░░░ 3 of 6  in linear",
        "  relu     12.0 s  █████░░░░░ 3 of 6  in relu",
        "  a note",
    ]


def test_json_has_the_values_themselves_and_null_for_what_cannot_be() -> None:
    made = table(row("linear"), row("relu", math.inf))
    assert records(made) == [
        {"op": "linear", "seconds": 0.0012, "bytes": 3, "points": [1, 2]},
        {"op": "relu", "seconds": None, "bytes": 3, "points": [1, 2]},
    ]
    assert by_name(made, "seconds") == {"linear": 0.0012, "relu": None}
    json.dumps(records(made), allow_nan=False)


def test_pages_show_bars_and_neither_data_nor_what_terminals_alone_have() -> None:
    page = html_table(table(row("<b>", style="left-out", about="a layer")), class_="ops")
    assert page is not None
    heads = re.findall(r"<th[^>]*columnheader[^>]*>([^<]*)</th>", page)
    assert heads == ["op", "", "takes", "room"]
    assert '<th scope="row" role="rowheader" title="a layer">&lt;b&gt;</th>' in page
    assert '<tr class="left-out" role="row">' in page
    assert '<td class="num" data-head="takes" role="cell">1.20 ms</td>' in page
    assert 'class="bwd" x="0%" width="50%"' in page
    assert "<span>3 of 6</span>" in page
    assert "in &lt;b&gt;" not in page


def test_a_table_without_rows_is_not_drawn() -> None:
    assert html_table(table()) is None
    assert records(table()) == []


def test_names_of_rows_can_be_more_than_text() -> None:
    page = html_table(table(row("relu(x: S0)")), named=coloured)
    assert page is not None
    assert '<i class="chip chip-S0">S0</i>' in page


def test_a_long_name_has_lines_of_its_own_and_a_long_call_is_wrapped() -> None:
    lines = [*text_lines(table(row("x" * 40), row("add(left: S0, right: S0) : S0")))]
    assert lines[1] == f"  {'x' * 40}"
    assert lines[2].split()[:2] == ["1.20", "ms"]
    assert lines[3].startswith("  add(left: S0,")
    assert lines[4] == "      right: S0) : S0"


def test_the_last_column_goes_on_below_itself() -> None:
    made = Table("", (Column(), Column()), (Row(("a", "one two three four five six")),))
    assert [*text_lines(made, width=22)] == ["  a  one two three", "         four five six"]


@given(st.lists(st.text(st.characters(codec="utf-8", categories=("L", "Nd", "Zs")), max_size=200), min_size=1))
def test_no_line_is_wider_than_the_terminal(names: list[str]) -> None:
    lines = [*text_lines(table(*map(row, names)), width=100)]
    assert max(map(len, lines)) <= 100


def test_placements_stay_with_their_operands() -> None:
    assert wrapped("  linear(x: S0, weight: I→R) : S0", 20) == ["  linear(x: S0,", "      weight: I→R) : S0"]
