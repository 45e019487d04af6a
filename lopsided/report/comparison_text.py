"""A confrontation in words and columns: what `lopsided train --report` and `lopsided confront` print.

In: a `Comparison`. Out: lines of text, at most some 100 characters wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lopsided.calibration.comparison import AROUND, SLOWED, Comparison, ComparisonLine
from lopsided.calibration.run_record import NETWORK
from lopsided.report.listing import bytes_text, seconds_text

_SHORT = 12
"""So many classes of ops are listed; the rest is one line."""


def confrontation_lines(found: Comparison, *, full: bool = False) -> Iterator[str]:
    step = found.step
    yield (
        f"step  predicted {seconds_text(step.predicted)}, measured {seconds_text(step.measured)}: "
        f"{error_text(step.error)}  (measured steps scatter by ±{found.noise:.0%})"
    )
    yield ""
    yield from _table("device, all it computes", found.busy)
    yield ""
    yield from _table("op, all devices together", _shortened(found.classes, full))
    if found.collectives:
        yield ""
        yield from _table("collective", found.collectives)
    if found.memory:
        yield ""
        yield from _table("memory, peak", found.memory, of_bytes=True)
    whose, worst = found.worst
    part = abs(worst.predicted - worst.measured) / step.measured if step.measured else 0.0
    name = worst.what if whose == NETWORK else f"{worst.what} on {whose}"
    said = verdict(worst)
    yield ""
    yield f"worst line  {name}: {said}, {part:.0%} of the step"


def verdict(line: ComparisonLine, *, of_bytes: bool = False) -> str:
    """What is to be said of a prediction."""
    if line.what in AROUND and not line.predicted:
        return "taken to be free"
    if line.what == SLOWED:
        return "measured within the ops"
    return error_text(line.error, *(("much", "little") if of_bytes else ("long", "short")))


def error_text(error: float, more: str = "long", less: str = "short") -> str:
    """
    >>> error_text(-0.031), error_text(0.2), error_text(float("inf"))
    ('3 % too short', '20 % too long', 'not measured')
    """
    if error == float("inf"):
        return "not measured"
    return f"{abs(error) * 100:.0f} % too {more if error > 0 else less}"


def _shortened(lines: Sequence[ComparisonLine], full: bool) -> list[ComparisonLine]:
    if full or len(lines) <= _SHORT:
        return list(lines)
    rest = lines[_SHORT - 1 :]
    predicted, measured = sum(line.predicted for line in rest), sum(line.measured for line in rest)
    return [
        *lines[: _SHORT - 1],
        ComparisonLine(f"{len(rest)} others", predicted, measured, sum(line.times for line in rest)),
    ]


def _table(head: str, lines: Sequence[ComparisonLine], *, of_bytes: bool = False) -> Iterator[str]:
    shown = bytes_text if of_bytes else seconds_text
    rows = [(head, "times", "predicted", "measured", "prediction")]
    for line in lines:
        said = verdict(line, of_bytes=of_bytes)
        times = str(line.times) if line.times > 1 else ""
        rows.append((line.what, times, shown(line.predicted), shown(line.measured), said))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:4], widths[1:4], strict=True)),
        ]
        yield f"  {'  '.join(cells)}  {row[4]}"
