"""What a run did: seconds of steps, what every device computed and sent in some of them, and its peak of memory.

In: what the processes of a run noted (`runtime/recording`). Out: `Run`, plain data, to JSON and back;
`parse_run(run_text(run)) == run`. A run carries its plan, so that it can be confronted with it (`confront`), shown
(`report`) and learnt from (`feedback`).

A step is either timed alone or recorded in full; noting every op takes time itself, so how long a step takes is read
off those that were only timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lopsided.codec import Fields, FileKind, parse_fields, read_text, write_text, written
from lopsided.errors import RunError
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import parse_plan, plan_text

FORMAT, VERSION = "lopsided-run", 1
RUN_FILE = FileKind(
    RunError, "run", "`lopsided train --report run.json` and `lopsided run --report run.json` write one"
)

COMPUTE, NETWORK = "compute", "network"
OPTIMIZER, BUCKETS, CONVERSIONS = "optimizer", "gradient buckets", "conversions"
"""What is computed that is no op: the update, gradients put together for sending, tensors cut and joined."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something a device did, in seconds since its step began.

    Computed: a node by its name, with a ∂ in front for its backward pass, or "optimizer". Sent: the tensors, by their
    names; `bytes` are those of the whole tensor, `waited_s` is how long the device stood still for it.
    """

    lane: str
    what: str
    start_s: float
    end_s: float
    collective: str = ""
    way: str = ""
    bytes: int = 0
    largest: float = 1.0  # devices × the largest piece's part of the whole
    waited_s: float = 0.0
    item: str = ""  # id in the plan's schedule, if it is something of that

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class StepRun:
    """One step of one device; `spans` only where it was recorded."""

    seconds: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceRun:
    device: str
    hardware: str
    peak_bytes: int  # 0: not known
    steps: tuple[StepRun, ...]

    @property
    def recorded(self) -> tuple[StepRun, ...]:
        return tuple(step for step in self.steps if step.spans)


@dataclass(frozen=True)
class Run:
    """What was measured of a plan. `devices` are those of the plan, in its order."""

    model: str
    torch: str
    plan: Plan
    devices: tuple[DeviceRun, ...]

    @cached_property
    def timed_s(self) -> tuple[float, ...]:
        """Of each step that was timed only: seconds of the slowest device."""
        steps = zip(*(device.steps for device in self.devices), strict=True)
        return tuple(max(one.seconds for one in step) for step in steps if not any(one.spans for one in step))

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.timed_s)

    @property
    def spread(self) -> float:
        """How far steps are apart: half of what lies between the quartiles, as a part of the median."""
        if len(self.timed_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.timed_s, n=4)
        return (high - low) / 2 / self.step_s if self.step_s else 0.0


def save_run(run: Run, path: str | Path) -> None:
    write_text(path, run_text(run), RUN_FILE)


def load_run(path: str | Path, namespaces: Collection[str] = ()) -> Run:
    """The run in a file. `namespaces` are those of your own ops, if its model uses any."""
    return parse_run(read_text(path, RUN_FILE), str(path), namespaces)


# Text. A span is a row of its fields, in order: there are thousands.


def run_text(run: Run) -> str:
    told = {
        "format": FORMAT,
        "version": VERSION,
        "model": run.model,
        "torch": run.torch,
        "devices": [
            {
                "device": one.device,
                "hardware": one.hardware,
                "peak_bytes": one.peak_bytes,
                "steps": [
                    {"seconds": step.seconds, "spans": [_row(span) for span in step.spans]} for step in one.steps
                ],
            }
            for one in run.devices
        ],
        "plan": plan_text(run.plan).removesuffix("\n").split("\n"),
    }
    return written(told) + "\n"


def _row(span: Span) -> str:
    fields = (f"{span.start_s:.7f}", f"{span.end_s:.7f}", span.lane, span.collective or "-", span.way or "-")
    return " ".join((*fields, str(span.bytes), f"{span.largest:.6g}", f"{span.waited_s:.7f}", _named(span)))


def _named(span: Span) -> str:
    """What it is, and behind a tab the id of its item: either may have spaces."""
    return f"{span.what}\t{span.item}" if span.item else span.what


def parse_run(text: str, where: str = "run", namespaces: Collection[str] = ()) -> Run:
    root = parse_fields(text, where, RUN_FILE)
    if root.items.get("format") != FORMAT:
        raise root.refuse(f'this is not a run: its "format" is not "{FORMAT}"', RUN_FILE.made_by)
    if root.whole("version") != VERSION:
        raise root.refuse(f"there is no version {root.whole('version')} of the format", "update lopsided, or run anew")
    root.has_only(("format", "version", "model", "torch", "devices", "plan"))
    plan = parse_plan("\n".join(root.lines("plan")) + "\n", f'{where}, "plan"', namespaces)
    devices = tuple(_device(each) for each in root.parts("devices"))
    if tuple(device.device for device in devices) != plan.devices:
        raise root.refuse('"devices" are not those of its plan, in their order', "run it anew")
    if len({len(device.steps) for device in devices}) != 1 or not devices[0].steps:
        raise root.refuse('"devices" have different numbers of steps, or none', "run it anew")
    run = Run(root.text("model"), root.text("torch"), plan, devices)
    if not run.timed_s:
        raise root.refuse("no step was timed alone", "run it anew")
    return run


def _device(table: Fields) -> DeviceRun:
    table.has_only(("device", "hardware", "peak_bytes", "steps"))
    steps = []
    for step in table.parts("steps"):
        step.has_only(("seconds", "spans"))
        steps.append(StepRun(step.seconds("seconds"), tuple(_span(row, step) for row in step.texts("spans"))))
    return DeviceRun(table.text("device"), table.text("hardware"), table.whole("peak_bytes"), tuple(steps))


def _span(row: str, step: Fields) -> Span:
    parts = row.split(" ", 8)
    try:
        start_s, end_s, largest, waited_s = (float(parts[k]) for k in (0, 1, 6, 7))
        size = int(parts[5])
        lane, collective, way, named = (parts[k] for k in (2, 3, 4, 8))
        what, _, item = named.partition("\t")
    except (IndexError, ValueError):
        raise step.refuse(f"a span reads {row[:80]!r}", "run it anew") from None
    numbers = (start_s, end_s - start_s, largest, waited_s, size)
    if lane not in (COMPUTE, NETWORK) or not all(0 <= number < 1e15 for number in numbers):
        raise step.refuse(f"a span reads {row[:80]!r}", "run it anew")
    return Span(
        lane,
        what,
        start_s,
        end_s,
        "" if collective == "-" else collective,
        "" if way == "-" else way,
        size,
        largest,
        waited_s,
        item,
    )
