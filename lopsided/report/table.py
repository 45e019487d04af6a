"""One table behind the terminal, the page and JSON; numbers with their units and names that are alike, as text.

In: what builders (`plan_tables`, `plan_diff`, `run_tables`) know of a plan, a run or a measurement. Out: a `Table` of
plain values, and of it

    text_lines(table)            lines for a terminal
    markup.html_table(table)     a table of the page
    records(table), by_name      lists and objects for JSON

The one idea: a cell holds a value, and its column says in which unit a reader sees it. What only a page can show (a
bar) or only a script wants (a list) is a column of that place alone (`only`).
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

WIDTH = 120
"""Columns of a terminal that no line exceeds."""

PAGE, TERMINAL, DATA = "page", "terminal", "data"
Unit = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Column:
    """`unit` turns its numbers into text; a column without one holds text. `key` is its name in JSON, if it is there.

    `only` names the one place that shows it. Text wider than `most` characters goes on in the next line.
    """

    head: str = ""
    unit: Unit | None = None
    key: str = ""
    only: str = ""
    most: int = WIDTH
    draws: bool = False  # a terminal draws the bars of its cells as well


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts (a colour's class, a size) beside each other; `marks` are lines across. `whole` is the longest bar."""

    parts: tuple[tuple[str, float], ...]
    whole: float
    marks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """A value, for readers perhaps said in other words. `small` is printed beside it on a page."""

    value: object
    text: str | None = None
    bars: tuple[Bar, ...] = ()
    small: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Cells, one for each column; plain values are cells without more to them.

    `style` is a class of the page. `about` is more about a row, which a page shows on request.
    """

    cells: tuple[object, ...]
    style: str = ""
    indent: int = 0
    about: str = ""

    def cell(self, number: int) -> Cell:
        found = self.cells[number]
        return found if isinstance(found, Cell) else Cell(found)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns. `title` says what they are, `notes` are sentences below."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def seen_on(self, place: str) -> list[int]:
        """Columns that a place shows. One without anything in it is left out."""
        return [
            k
            for k, column in enumerate(self.columns)
            if column.only in ("", place) and any(self.text(row, k) or row.cell(k).bars for row in self.rows)
        ]

    def text(self, row: Row, number: int) -> str:
        """What a reader sees in a cell."""
        cell, unit = row.cell(number), self.columns[number].unit
        if cell.text is not None:
            return cell.text
        if unit is not None and isinstance(cell.value, int | float):
            return unit(cell.value)
        return "" if cell.value is None else str(cell.value)


# For JSON


def records(table: Table) -> list[dict[str, object]]:
    """An object for each row. What is not finite is null."""
    keyed = [(k, column.key) for k, column in enumerate(table.columns) if column.key]
    return [{key: finite(row.cell(k).value) for k, key in keyed} for row in table.rows]


def by_name(table: Table, key: str) -> dict[str, object]:
    """One column as an object: names of the first column, and values."""
    number = next(k for k, column in enumerate(table.columns) if column.key == key)
    return {str(row.cell(0).value): finite(row.cell(number).value) for row in table.rows}


def finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# For terminals


def text_lines(table: Table, *, indent: int = 2, width: int = WIDTH) -> Iterator[str]:
    """Heads, rows and notes. The first and the last column are wrapped where they need more room than there is."""
    seen = table.seen_on(TERMINAL)
    columns = [table.columns[k] for k in seen]
    rows = [[_drawn(table, row, k) for k in seen] for row in table.rows]
    heads = [column.head for column in columns]
    widths = [
        max(len(head), *(min(len(row[k]), column.most) for row in rows))
        for k, (head, column) in enumerate(zip(heads, columns, strict=True))
    ]
    if len(widths) > 1:
        widths[-1] = min(widths[-1], max(width - indent - sum(widths[:-1]) - 2 * (len(widths) - 1), 16))
    margin = " " * indent
    for cells in ([heads] if any(heads) else []) + rows:
        wraps = [[cell] for cell in cells]
        for k in {0, len(cells) - 1}:
            wraps[k] = wrapped(cells[k], widths[k])
        if len(wraps[0][0]) > widths[0]:
            # A name that cannot be broken has lines of its own.
            yield from (margin + fit(line, width - indent) for line in wrapped(cells[0], width - indent))
            wraps[0] = [""]
        for line in zip_longest(*wraps, fillvalue=""):
            padded = [
                cell.rjust(size) if column.unit else cell.ljust(size)
                for cell, size, column in zip(line, widths, columns, strict=True)
            ]
            yield fit((margin + "  ".join(padded)).rstrip(), width)
    for note in table.notes:
        yield from paragraph(note, indent=indent, width=width)


def _drawn(table: Table, row: Row, number: int) -> str:
    text = table.text(row, number)
    if table.columns[number].draws and (bars := row.cell(number).bars):
        sizes = [size for _, size in bars[0].parts]
        full = min(max(round(10 * sizes[0] / (sum(sizes) or 1.0)), 1), 10)
        text = f"{'█' * full}{'░' * (10 - full)} {text}"
    return "  " * row.indent + text if number == 0 else text


def fit(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


_HELD = "\N{NO-BREAK SPACE}"


def wrapped(text: str, width: int) -> list[str]:
    """A long text over several lines, for example a call between its operands. Words are not broken."""
    if len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()))
    # A placement stays with its operand, and what is given with the bracket before it.
    held = re.sub(r"(:| :|\)) ", lambda match: match[0].replace(" ", _HELD), text.strip())
    lines = textwrap.wrap(
        held, width - len(indent), subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
    return [indent + line.replace(_HELD, " ") for line in lines] or [""]


def paragraph(text: str, *, indent: int = 2, hanging: int = 2, width: int = WIDTH) -> list[str]:
    """A sentence in lines that a terminal holds."""
    first, later = " " * indent, " " * (indent + hanging)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


# Numbers


def seconds_text(seconds: float) -> str:
    """
    >>> [seconds_text(s) for s in (0.0, 3.21e-7, 0.0123, 1.5, 321.0)]
    ['0', '0.3 µs', '12.3 ms', '1.50 s', '321 s']
    """
    if abs(seconds) < 1e-12:
        return "0"
    if not math.isfinite(seconds):
        return "–"
    # At the edges of a unit as it will be rounded: 999.96 µs is 1.00 ms.
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * unit:
            number = seconds / unit
            return f"{number:,.0f} {name}" if number >= 99.95 else f"{number:.{1 if number >= 9.995 else 2}f} {name}"
    return f"{seconds * 1e6:.1f} µs" if seconds < 99.95e-6 else f"{seconds * 1e6:.0f} µs"


def seconds_or_nothing(seconds: float) -> str:
    """Nothing where only zeros would be printed."""
    text = seconds_text(seconds)
    return "" if text in ("0", "0.0 µs") else text


def bytes_text(size: float) -> str:
    """
    >>> [bytes_text(b) for b in (12, 4096, 3 * 2**20, 2**34)]
    ['12 B', '4.0 KiB', '3.0 MiB', '16.0 GiB']
    """
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} B"


LEAST = 0.0005
"""As a part of a step: less is no difference."""


def percent(part: float) -> str:
    """
    >>> percent(0.0558), percent(0.0), percent(0.00001), percent(0.736)
    ('5.6 %', '0 %', '<0.1 %', '74 %')
    """
    if abs(part) < 1e-12:
        return "0 %"
    if abs(part) < LEAST:
        return "<0.1 %"
    return f"{part * 100:.0f} %" if abs(part) >= 0.0995 else f"{part * 100:.1f} %"


def share_text(share: float) -> str:
    return f"{share * 100:.2f} %"


def times(ratio: float) -> str:
    return f"{ratio:,.2f} ×"


def count(number: float) -> str:
    return f"{number:,}"


def rate_text(rate: float) -> str:
    """Three digits that count.

    >>> [rate_text(r) for r in (12837.2, 998.7, 51.26, 0.01234)]
    ['12,800', '999', '51.3', '0.0123']
    """
    digits = f"{rate:.3g}"
    return f"{float(digits):,.0f}" if rate >= 100 else digits


def metric_text(number: float, unit: str) -> str:
    """
    >>> metric_text(41.23e9, "FLOP/s"), metric_text(12.0, "B/s")
    ('41.2 GFLOP/s', '12 B/s')
    """
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{rate_text(number / size)} {prefix}{unit}"
    return f"{rate_text(number)} {unit}"


def flops_text(flops_per_s: float) -> str:
    return metric_text(flops_per_s, "FLOP/s")


def speed_text(bytes_per_s: float) -> str:
    return metric_text(bytes_per_s, "B/s")


def count_text(number: int) -> str:
    """
    >>> [count_text(n) for n in (97, 12345, 125_400_000, 6_738_415_616)]
    ['97', '12,345', '125.4 million', '6.74 billion']
    """
    if number >= 1_000_000_000:
        return f"{number / 1e9:,.2f} billion"
    return f"{number / 1e6:.1f} million" if number >= 1_000_000 else f"{number:,}"


def plural(word: str, number: int) -> str:
    return word if number == 1 else f"{word}s"


def counted(name: str, number: int) -> str:
    """A name, and for how many it stands."""
    return f"{name} ({number})" if number > 1 else name


# Names

NUMBERS = re.compile(r"(\d+)")


def pattern_of(names: Sequence[str]) -> str:
    """One name for several, with stars for the numbers in which they differ.

    >>> pattern_of(["box-1/v100-1", "box-1/v100-2"]), pattern_of(["layers.0.up", "layers.1.up", "layers.2.up"])
    ('box-1/v100-*', 'layers.*.up')
    >>> pattern_of(["encoder.norm", "decoder.norm"])
    'encoder.norm …'
    """
    split = [NUMBERS.split(name) for name in dict.fromkeys(names)]
    if len({tuple(parts[::2]) for parts in split}) > 1:
        return f"{names[0]} …"
    return "".join(column[0] if len({*column}) == 1 else "*" for column in zip(*split, strict=True))


def skeleton(name: str) -> str:
    """A name without its numbers: equal for names that `pattern_of` can put into one."""
    return NUMBERS.sub("*", name)


def ranged(names: Sequence[str]) -> str:
    """What numbered modules have in common, with the range of their first number that differs.

    >>> ranged(["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"])
    'layers.0–1'
    """
    split = [NUMBERS.split(name) for name in names]
    shared: list[str] = []
    for column in zip(*split, strict=False):
        if len({*column}) == 1:
            shared.append(column[0])
        elif len(shared) % 2 and all(part.isdigit() for part in column):
            numbers = [int(part) for part in column]
            return f"{''.join(shared)}{min(numbers)}–{max(numbers)}"
        else:
            break
    return "".join(shared).rstrip(".") or "steps"


def told_apart(groups: Sequence[Sequence[str]]) -> list[str]:
    """A label for each group of names: their pattern, or where that could be another group's, from where to where.

    >>> told_apart([["box/v100-1", "box/v100-2"], ["box/v100-3", "box/v100-4"], ["box/p100-1"]])
    ['box/v100-1 … v100-2', 'box/v100-3 … v100-4', 'box/p100-1']
    """
    patterns = [pattern_of(names) for names in groups]
    return [
        pattern if patterns.count(pattern) == 1 else _from_to(names)
        for pattern, names in zip(patterns, groups, strict=True)
    ]


def _from_to(names: Sequence[str]) -> str:
    first, last = names[0], names[-1]
    if first == last:
        return first
    node, _, device = last.rpartition("/")
    return f"{first} … {device if node and first.startswith(f'{node}/') else last}"


def labels_of(groups: Sequence[Sequence[str]]) -> list[str]:
    """Labels for groups of names, with how many there are."""
    return [counted(name, len(names)) for name, names in zip(told_apart(groups), groups, strict=True)]
