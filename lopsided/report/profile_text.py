"""A measurement as lines to read, at most 100 columns, and as JSON.

In: a `Measurement`. Out: lines: devices, calls, updates, collectives, and what was noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lopsided.calibration.calibrate import Calibrated
from lopsided.cluster.devices import Kind
from lopsided.profiling.measure import Measurement, ProfileLine
from lopsided.report.listing import bytes_text, seconds_text
from lopsided.report.plan_text import plural, rate_text
from lopsided.schedule.cost import UPDATED_ELEMENTS, fitted_line

WIDTH = 100
_CALLS = 8
_WORST = 3
_BAD = 0.1  # an error that is worth naming
_CROWDED = 1.02

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def metric_text(number: float, unit: str) -> str:
    """
    >>> metric_text(41.23e9, "FLOP/s"), metric_text(12.0, "B/s")
    ('41.2 GFLOP/s', '12 B/s')
    """
    for size, prefix in _PREFIXES:
        if number >= size:
            return f"{rate_text(number / size)} {prefix}{unit}"
    return f"{rate_text(number)} {unit}"


def percent(part: float) -> str:
    """
    >>> percent(0.0123), percent(0.314), percent(0.0)
    ('1.2 %', '31 %', '0.0 %')
    """
    return f"{100 * part:.1f} %" if part < 0.0995 else f"{100 * part:.0f} %"


def measurement_lines(found: Measurement) -> Iterator[str]:
    yield from _device_lines(found)
    yield ""
    yield from _call_lines(found)
    yield from _update_lines(found)
    if found.ways:
        yield ""
        yield from _way_lines(found)
    yield ""
    yield from _notice_lines(found)


def _table(rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    to_left = {*left}
    for row in rows:
        cells = (
            cell.ljust(width) if k in to_left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


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


# Devices


def _device_lines(found: Measurement) -> Iterator[str]:
    cluster = found.cluster
    dtypes = [dtype for dtype, _ in cluster.kinds[0].flops_per_s]
    rows = [["devices", *dtypes, "memory moves", "launch", "memory", "slowdown"]]
    for kind in cluster.kinds:
        name = f"{kind.node}/{kind.name}" + (f" × {kind.devices}" if kind.devices > 1 else "")
        flops = [metric_text(kind.flops(dtype), "FLOP/s") for dtype in dtypes]
        moves = metric_text(kind.bytes_per_s, "B/s")
        launch, memory = seconds_text(kind.launch_s), bytes_text(kind.memory_bytes)
        rows.append([short(name, 34), *flops, moves, launch, memory, percent(kind.compute_slowdown)])
    if not found.ways:
        rows = [row[:-1] for row in rows]
    yield from _table(rows)
    contentions = [kind.contention for kind in cluster.kinds]
    if max(contentions) > _CROWDED:
        yield f"devices that share a chip are {_times(contentions)} times as fast alone as all together"
    for hardware in dict.fromkeys(kind.source.removeprefix("measured: ") for kind in cluster.kinds):
        yield f"  {short(hardware, WIDTH - 2)}"


# Calls


def _call_lines(found: Measurement) -> Iterator[str]:
    lines = [line for line in found.lines if line.times]
    if not lines:
        yield "no calls were measured: more time (--budget) is needed"
        return
    slowest = max(found.cluster.kinds, key=lambda kind: -kind.speed)
    number = found.cluster.kinds.index(slowest)
    mine = sorted((line for line in lines if line.kind == number), key=lambda line: -line.step_s)
    where = f" on {slowest.node}/{slowest.name}" if len(found.cluster.kinds) > 1 else ""
    calls = f"{len(mine)} {plural('call', len(mine))}"
    yield (
        f"{calls} measured, {percent(found.covered)} of a step by estimate; "
        f"off their lines by {percent(_weighted(lines))}, noise {percent(found.op_noise)}"
    )
    rows = [[f"calls{where}", "times", "whole batch", "error", "noise"]]
    rows += [_call_row(line) for line in mine[:_CALLS]]
    if len(mine) > _CALLS:
        rest = mine[_CALLS:]
        total = sum(line.step_s for line in rest)
        rows.append([f"{len(rest)} more", "", seconds_text(total), percent(_weighted(rest)), ""])
    yield from _table(rows)
    if found.rehearsed:
        times = _times(found.rehearsed)
        yield f"a whole step takes {times} times as long as its calls one by one; they are scaled by that"
    worst = [line for line in sorted(lines, key=lambda line: -line.error * line.step_s) if line.error > _BAD]
    if worst:
        yield "worst fits"
        kinds = found.cluster.kinds
        named = [(f"{kinds[line.kind].node}/{kinds[line.kind].name}", line) for line in worst[:_WORST]]
        rows = [[percent(line.error), seconds_text(line.step_s), short(name, 28), line.call] for name, line in named]
        for row in _table(rows, (2, 3)):
            yield short(f"  {row}", WIDTH)


def _times(ratios: Sequence[float]) -> str:
    """
    >>> _times([1.071]), _times([1.02, 1.09])
    ('1.07', '1.02 to 1.09')
    """
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return least if least == most else f"{least} to {most}"


def _call_row(line: ProfileLine) -> list[str]:
    call = short(line.call, 58)
    return [call, str(line.times), seconds_text(line.step_s), percent(line.error), percent(line.noise)]


def _weighted(lines: Sequence[ProfileLine]) -> float:
    total = sum(line.step_s for line in lines)
    return sum(line.error * line.step_s for line in lines) / total if total else 0.0


def _update_lines(found: Measurement) -> Iterator[str]:
    errors = {(line.kind, line.call): line for line in found.lines}
    rows = [["optimizer's step", "a tensor", "a million elements", "error", "noise"]]
    for number, kind in enumerate(found.cluster.kinds):
        for name, constant, slope in _updates(kind):
            line = errors[number, name]
            label = f"{name.removeprefix('update:').partition('[')[0]}) on {kind.node}/{kind.name}"
            millions = seconds_text(slope * 1e6 / UPDATED_ELEMENTS)
            rows.append([short(label, 50), seconds_text(constant), millions, percent(line.error), percent(line.noise)])
    if len(rows) > 1:
        yield ""
        yield from _table(rows)


def _updates(kind: Kind) -> Iterator[tuple[str, float, float]]:
    for entry in kind.measured:
        if entry.call.startswith("update:"):
            line = fitted_line(entry.forward)
            yield entry.call, line.constant, line.slope


# Collectives


def _way_lines(found: Measurement) -> Iterator[str]:
    rows = [["collectives", "", "latency", "bytes of the whole", "by the largest", "error", "noise"]]
    for fit in found.ways:
        speed, skew = metric_text(fit.link.bytes_per_s, "B/s"), fit.link.skew
        grows = percent(skew) if skew is not None else ""
        latency = seconds_text(fit.link.latency_s)
        rows.append([fit.collective, fit.way, latency, speed, grows, percent(fit.error), percent(fit.noise)])
    yield from _table(rows, (0, 1))
    yield (
        f"behind computing they take {found.comm_slowdown:.2f} times as long, and computing loses "
        f"{percent(min(found.compute_slowdowns))} to {percent(max(found.compute_slowdowns))}"
    )
    if found.cluster.packing > 1:
        packing = f"{found.cluster.packing:.1f} times as long as to read and write it once"
        yield from _wrapped(f"to put together what is gathered and scattered takes {packing}, by a whole step", "  ")
    for one, other, link in found.cluster.pairs:
        speed = metric_text(link.bytes_per_s, "B/s")
        yield f"between {one} and {other} it is slower: {seconds_text(link.latency_s)}, {speed}"


# Notices


def _notice_lines(found: Measurement) -> Iterator[str]:
    if not found.noticed:
        yield "noticed   nothing: no device stands out, and nobody else was at work"
        return
    for notice in found.noticed:
        yield from _wrapped(f"{notice.about:<9} {notice.device} {notice.text}", " " * 10)


def _wrapped(text: str, indent: str) -> Iterator[str]:
    line = ""
    for word in text.split(" "):
        if line.strip() and len(line) + 1 + len(word) > WIDTH:
            yield line
            line = indent + word
        else:
            line = f"{line} {word}" if line else word
    yield line


# Corrections


def correction_lines(fed: Calibrated) -> Iterator[str]:
    """What a run corrected, what matters most first."""
    ordered = sorted(fed.corrections, key=lambda c: -abs(c.is_s - c.was_s))
    yield f"{len(ordered)} {plural('figure', len(ordered))} corrected"
    rows = [["", "", "predicted", "measured", "factor"]]
    for one in ordered[: 2 * _CALLS]:
        seconds = [seconds_text(one.was_s), seconds_text(one.is_s)]
        rows.append([short(one.kind or "network", 20), short(one.what, 46), *seconds, f"{one.factor:.2f}"])
    yield from _table(rows, (0, 1))
    if len(ordered) > 2 * _CALLS:
        yield f"and {len(ordered) - 2 * _CALLS} more"


# JSON


def measurement_json(found: Measurement) -> dict[str, Any]:
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
        "calls": [
            {
                "kind": f"{cluster.kinds[line.kind].node}/{cluster.kinds[line.kind].name}",
                "call": line.call,
                "times": line.times,
                "step_s": line.step_s,
                "error": line.error,
                "noise": line.noise,
            }
            for line in found.lines
        ],
        "collectives": [
            {
                "collective": fit.collective,
                "way": fit.way,
                "latency_s": fit.link.latency_s,
                "bytes_per_s": fit.link.bytes_per_s,
                "skew": fit.link.skew,
                "error": fit.error,
                "noise": fit.noise,
                "points": [
                    {"bytes": p.bytes, "largest": p.largest, "seconds": p.seconds, "noise": p.noise} for p in fit.points
                ],
            }
            for fit in found.ways
        ],
        "noticed": [{"about": n.about, "device": n.device, "text": n.text} for n in found.noticed],
    }
