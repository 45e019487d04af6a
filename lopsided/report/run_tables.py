"""What was measured, as tables: a run against its plan, a measurement of devices and links, what a run corrected.

In: a `Comparison`, a `Measurement`, a `Calibrated`. Out: `Table`s for terminal, page and JSON, and the lines and JSON
around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lopsided.calibration.calibrate import Calibrated
from lopsided.calibration.comparison import AROUND, SLOWED, Comparison, ComparisonLine
from lopsided.calibration.run_record import NETWORK
from lopsided.profiling.measure import Measurement, ProfileLine
from lopsided.report.plan_tables import kinds_table
from lopsided.report.table import (
    DATA,
    PAGE,
    Bar,
    Cell,
    Column,
    Row,
    Table,
    bytes_text,
    count,
    fit,
    paragraph,
    percent,
    plural,
    records,
    seconds_text,
    speed_text,
    text_lines,
)
from lopsided.schedule.cost import UPDATED_ELEMENTS, fitted_line

PROFILE_WIDTH = 100
"""Columns of what `lopsided profile` prints."""

# Predicted against measured

_SHORT = 12
"""So many classes of ops are listed; the rest is one line."""


def comparison_table(title: str, lines: Sequence[ComparisonLine], *, of_bytes: bool = False) -> Table:
    unit = bytes_text if of_bytes else seconds_text
    most = max((max(line.predicted, line.measured) for line in lines), default=0.0)
    columns = (
        Column(title, key="what"),
        Column("times", count, "times"),
        Column(only=PAGE),
        Column("predicted", unit, "predicted"),
        Column("measured", unit, "measured"),
        Column("the prediction is"),
        Column(key="error", only=DATA),
    )
    rows = []
    for line in lines:
        bars = (Bar((("foreseen", line.predicted),), most), Bar((("found", line.measured),), most))
        often = Cell(line.times, None if line.times > 1 else "")
        said = verdict(line, of_bytes=of_bytes)
        rows.append(Row((line.what, often, Cell(None, bars=bars), line.predicted, line.measured, said, line.error)))
    return Table(title, columns, tuple(rows))


def comparison_tables(found: Comparison, *, full: bool = True) -> list[Table]:
    """Devices, ops, collectives and memory, as far as there are any."""
    tables = [
        comparison_table("device, all it computes", found.busy),
        comparison_table("op, all devices together", _shortened(found.classes, full)),
        comparison_table("collective", found.collectives),
        comparison_table("memory, peak", found.memory, of_bytes=True),
    ]
    return [table for table in tables if table.rows]


def _shortened(lines: Sequence[ComparisonLine], full: bool) -> Sequence[ComparisonLine]:
    if full or len(lines) <= _SHORT:
        return lines
    rest = lines[_SHORT - 1 :]
    predicted, measured = sum(line.predicted for line in rest), sum(line.measured for line in rest)
    others = ComparisonLine(f"{len(rest)} others", predicted, measured, sum(line.times for line in rest))
    return [*lines[: _SHORT - 1], others]


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


def worst_text(found: Comparison) -> str:
    """The line that is off by most."""
    whose, worst = found.worst
    step_s = found.step.measured
    part = abs(worst.predicted - worst.measured) / step_s if step_s else 0.0
    name = worst.what if whose == NETWORK else f"{worst.what} on {whose}"
    return f"{name}: {verdict(worst)}, {percent(part)} of the step"


def comparison_lines(found: Comparison, *, full: bool = False) -> Iterator[str]:
    step = found.step
    yield (
        f"step  predicted {seconds_text(step.predicted)}, measured {seconds_text(step.measured)}: "
        f"{error_text(step.error)}  (measured steps scatter by ±{found.noise:.0%})"
    )
    for table in comparison_tables(found, full=full):
        yield ""
        yield from text_lines(table)
    yield ""
    yield f"worst line  {worst_text(found)}"


def comparison_json(found: Comparison) -> dict[str, object]:
    def told(lines: Sequence[ComparisonLine]) -> list[dict[str, object]]:
        return records(comparison_table("", lines))

    whose, worst = found.worst
    return {
        "step": told([found.step])[0],
        "noise": found.noise,
        "devices": told(found.busy),
        "ops": {device: told(row) for device, row in zip(found.devices, found.computed, strict=True)},
        "collectives": told(found.collectives),
        "memory_bytes": told(found.memory),
        "worst": {"whose": whose, **told([worst])[0]},
    }


# A measurement

_CALLS = 8
_WORST = 3
# An error that is worth naming.
_BAD = 0.1
_CROWDED = 1.02


def short(text: str, width: int) -> str:
    """What a call is carried out by stays.

    >>> short("aten.linear.default(f32[32, 768])", 20), short("lopsided.batch_norm.default(f32[4]) by batch_norm", 30)
    ('aten.linear.default…', 'lopsided.batch_… by batch_norm')
    """
    if len(text) <= width:
        return text
    _, by, how = text.rpartition(" by ")
    end = f"… {by.strip()} {how}" if by and len(how) < width // 2 else "…"
    return text[: width - len(end)] + end


def _kind_name(found: Measurement, number: int) -> str:
    kind = found.cluster.kinds[number]
    return f"{kind.node}/{kind.name}"


def call_table(found: Measurement, lines: Iterable[ProfileLine], title: str = "") -> Table:
    """Calls that were measured: how often a step makes them, what they take, and how well that is known."""
    columns = (
        Column(key="kind", only=DATA),
        Column(title, key="call"),
        Column("times", count, "times"),
        Column("whole batch", seconds_text, "step_s"),
        Column("error", percent, "error"),
        Column("noise", percent, "noise"),
    )
    rows = tuple(
        Row(
            (
                _kind_name(found, line.kind),
                Cell(line.call, short(line.call, 58)),
                line.times,
                line.step_s,
                line.error,
                line.noise,
            )
        )
        for line in lines
    )
    return Table(title, columns, rows)


def _call_lines(found: Measurement) -> Iterator[str]:
    lines = [line for line in found.lines if line.times]
    if not lines:
        yield "no calls were measured: more time (--budget) is needed"
        return
    kinds = found.cluster.kinds
    number = min(range(len(kinds)), key=lambda k: kinds[k].speed)
    mine = sorted((line for line in lines if line.kind == number), key=lambda line: -line.step_s)
    yield (
        f"{len(mine)} {plural('call', len(mine))} measured, {percent(found.covered)} of a step by estimate; "
        f"off their lines by {percent(_weighted(lines))}, noise {percent(found.op_noise)}"
    )
    table = call_table(found, mine[:_CALLS], "calls" + (f" on {_kind_name(found, number)}" if len(kinds) > 1 else ""))
    yield from text_lines(table, indent=0, width=PROFILE_WIDTH)
    if rest := mine[_CALLS:]:
        total = seconds_text(sum(line.step_s for line in rest))
        yield f"{len(rest)} more take {total}, with an error of {percent(_weighted(rest))}"
    if found.rehearsed:
        yield (
            f"a whole step takes {_times(found.rehearsed)} times as long as its calls one by one; "
            "they are scaled by that"
        )
    worst = [line for line in sorted(lines, key=lambda line: -line.error * line.step_s) if line.error > _BAD]
    if worst:
        columns = (Column(unit=percent), Column(unit=seconds_text), Column(most=28), Column())
        fits = [(line.error, line.step_s, fit(_kind_name(found, line.kind), 28), line.call) for line in worst[:_WORST]]
        yield "worst fits"
        yield from text_lines(Table("", columns, tuple(map(Row, fits))), width=PROFILE_WIDTH)


def _times(ratios: Sequence[float]) -> str:
    """
    >>> _times([1.071]), _times([1.02, 1.09])
    ('1.07', '1.02 to 1.09')
    """
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return least if least == most else f"{least} to {most}"


def _weighted(lines: Sequence[ProfileLine]) -> float:
    total = sum(line.step_s for line in lines)
    return sum(line.error * line.step_s for line in lines) / total if total else 0.0


def update_table(found: Measurement) -> Table:
    """What the optimizer's step takes on each kind of device."""
    errors = {(line.kind, line.call): line for line in found.lines}
    rows = []
    for number, kind in enumerate(found.cluster.kinds):
        for entry in kind.measured:
            if entry.call.startswith("update:"):
                fitted, line = fitted_line(entry.forward), errors[number, entry.call]
                name = f"{entry.call.removeprefix('update:').partition('[')[0]}) on {_kind_name(found, number)}"
                million = fitted.slope * 1e6 / UPDATED_ELEMENTS
                rows.append(Row((short(name, 50), fitted.constant, million, line.error, line.noise)))
    columns = (
        Column("optimizer's step"),
        Column("a tensor", seconds_text),
        Column("a million elements", seconds_text),
        Column("error", percent),
        Column("noise", percent),
    )
    return Table("", columns, tuple(rows))


def collective_table(found: Measurement) -> Table:
    columns = (
        Column("collectives", key="collective"),
        Column(key="way"),
        Column("latency", seconds_text, "latency_s"),
        Column("bytes of the whole", speed_text, "bytes_per_s"),
        Column("by the largest", percent, "skew"),
        Column("error", percent, "error"),
        Column("noise", percent, "noise"),
        Column(key="points", only=DATA),
    )
    rows = []
    for way in found.ways:
        points = [{"bytes": p.bytes, "largest": p.largest, "seconds": p.seconds, "noise": p.noise} for p in way.points]
        link = (way.link.latency_s, way.link.bytes_per_s, way.link.skew)
        rows.append(Row((way.collective, way.way, *link, way.error, way.noise, points)))
    return Table("", columns, tuple(rows))


def measurement_lines(found: Measurement) -> Iterator[str]:
    """Devices, calls, updates, collectives, and what was noticed."""
    kinds = found.cluster.kinds
    yield from text_lines(kinds_table(found.cluster), indent=0, width=PROFILE_WIDTH)
    contentions = [kind.contention for kind in kinds]
    if max(contentions) > _CROWDED:
        yield f"devices that share a chip are {_times(contentions)} times as fast alone as all together"
    for hardware in dict.fromkeys(kind.source.removeprefix("measured: ") for kind in kinds):
        yield f"  {short(hardware, PROFILE_WIDTH - 2)}"
    yield ""
    yield from _call_lines(found)
    if (updates := update_table(found)).rows:
        yield ""
        yield from text_lines(updates, indent=0, width=PROFILE_WIDTH)
    if found.ways:
        yield ""
        yield from _way_lines(found)
    yield ""
    if not found.noticed:
        yield "noticed   nothing: no device stands out, and nobody else was at work"
    for notice in found.noticed:
        yield from _flowing(f"{notice.about:<9} {notice.device} {notice.text}", 10)


def _way_lines(found: Measurement) -> Iterator[str]:
    yield from text_lines(collective_table(found), indent=0, width=PROFILE_WIDTH)
    yield (
        f"behind computing they take {found.comm_slowdown:.2f} times as long, and computing loses "
        f"{percent(min(found.compute_slowdowns))} to {percent(max(found.compute_slowdowns))}"
    )
    if found.cluster.packing > 1:
        packing = f"{found.cluster.packing:.1f} times as long as to read and write it once"
        yield from _flowing(f"to put together what is gathered and scattered takes {packing}, by a whole step", 2)
    for one, other, link in found.cluster.pairs:
        speed = speed_text(link.bytes_per_s)
        yield f"between {one} and {other} it is slower: {seconds_text(link.latency_s)}, {speed}"


def _flowing(text: str, hanging: int) -> list[str]:
    return paragraph(text, indent=0, hanging=hanging, width=PROFILE_WIDTH)


def measurement_json(found: Measurement) -> dict[str, object]:
    cluster = found.cluster
    return {
        "cluster": cluster.text(),
        "seconds": found.seconds,
        "covered": found.covered,
        "op_error": found.op_error,
        "op_noise": found.op_noise,
        "link_error": found.link_error,
        "link_noise": found.link_noise,
        "comm_slowdown": found.comm_slowdown,
        "rehearsed": list(found.rehearsed),
        "devices": [
            {"name": name, "compute_slowdown": part}
            for name, part in zip(cluster.device_names, found.compute_slowdowns, strict=True)
        ],
        "calls": records(call_table(found, found.lines)),
        "collectives": records(collective_table(found)),
        "noticed": [{"about": n.about, "device": n.device, "text": n.text} for n in found.noticed],
    }


# Corrections


def correction_table(fed: Calibrated) -> Table:
    """What a run corrected, what matters most first."""
    columns = (
        Column(key="kind"),
        Column(key="what"),
        Column("predicted", seconds_text, "predicted_s"),
        Column("measured", seconds_text, "measured_s"),
        Column("factor", lambda factor: f"{factor:.2f}", "factor"),
    )
    rows = tuple(
        Row(
            (
                Cell(one.kind or None, fit(one.kind or "network", 20)),
                Cell(one.what, short(one.what, 46)),
                one.was_s,
                one.is_s,
                one.factor,
            )
        )
        for one in sorted(fed.corrections, key=lambda c: -abs(c.is_s - c.was_s))
    )
    return Table(f"{len(rows)} {plural('figure', len(rows))} corrected", columns, rows)
