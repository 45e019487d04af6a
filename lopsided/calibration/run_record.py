"""What a run did: seconds of steps, what every device computed and sent in some of them, and its peak of memory.

In: what the processes of a run noted (`runtime/recording`). Out: `Run`, plain data, to JSON and back;
`parse_run(run_text(run)) == run`. A run carries its plan, so that it can be compared with it (`compare_run`), shown
(`report`) and learnt from (`calibrated_by`).

A step is either timed alone or recorded in full; noting every op takes time itself, so how long a step takes is read
off those that were only timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from lopsided.codec import (
    FileKind,
    Key,
    Line,
    Lines,
    Place,
    Seconds,
    Whole,
    encode,
    json_text,
    lines_of,
    parse_json,
    read_text,
    write_text,
)
from lopsided.errors import RunError
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import parse_plan, plan_text

FORMAT, VERSION = "lopsided-run", 1
RUN_FILE = FileKind(
    RunError,
    "run",
    "`lopsided train --report run.json` and `lopsided run --report run.json` write one",
    format=FORMAT,
    version=VERSION,
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

    @property
    def id(self) -> str:
        """What joins it with the schedule. Runs that were recorded before items had ids call nodes by theirs."""
        return self.item or self.what


def _row(span: Span) -> str:
    """A span as a row of its fields: there are thousands."""
    fields = (f"{span.start_s:.7f}", f"{span.end_s:.7f}", span.lane, span.collective or "-", span.way or "-")
    return " ".join((*fields, str(span.bytes), f"{span.largest:.6g}", f"{span.waited_s:.7f}", span.what + _item(span)))


_ITEM = " | "
"""Between what a span is, to be read, and the id of its item."""


def _item(span: Span) -> str:
    return f"{_ITEM}{span.item}" if span.item else ""


def _read_row(value: object, place: Place) -> Span:
    row: str = place.read(Line, value)
    parts = row.split(" ", 8)
    try:
        start_s, end_s, largest, waited_s = (float(parts[k]) for k in (0, 1, 6, 7))
        lane, collective, way = (parts[k] for k in (2, 3, 4))
        what, _, item = parts[8].partition(_ITEM)
        size = int(parts[5])
        if lane not in (COMPUTE, NETWORK):
            raise ValueError
    except (IndexError, ValueError):
        raise place.refuse(f"a span reads {row[:80]!r}", "run it anew") from None
    if not all(0 <= number < 1e15 for number in (start_s, end_s - start_s, largest, waited_s, size)):
        raise place.refuse(f"a span reads {row[:80]!r}", "run it anew")
    collective, way = ("" if word == "-" else word for word in (collective, way))
    return Span(lane, what, start_s, end_s, collective, way, size, largest, waited_s, item)


@dataclass(frozen=True, slots=True)
class StepRun:
    """One step of one device; `spans` only where it was recorded."""

    seconds: Seconds
    spans: tuple[Annotated[Span, Key(read=_read_row, write=_row)], ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceRun:
    device: Line
    hardware: Line
    peak_bytes: Whole  # 0: not known
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
    out_of_memory: str = ""  # the device that ended it so

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunFile:
    """What is in a file, in its order."""

    format: str = FORMAT
    version: int = VERSION
    model: Line
    torch: Line
    out_of_memory: Annotated[Line, Key(rare=True)] = ""
    devices: tuple[DeviceRun, ...]
    plan: Lines


def save_run(run: Run, path: str | Path) -> None:
    write_text(path, run_text(run), RUN_FILE)


def load_run(path: str | Path, namespaces: Collection[str] = (), *, failed: bool = False) -> Run:
    """The run in a file. `namespaces` are those of your own ops, if its model uses any. One that ended for want of
    memory has no steps, and is taken only where a `failed` one is of use."""
    return parse_run(read_text(path, RUN_FILE), str(path), namespaces, failed=failed)


def run_text(run: Run) -> str:
    plan = lines_of(plan_text(run.plan))
    about = (run.model, run.torch, run.out_of_memory)
    file = _RunFile(model=about[0], torch=about[1], out_of_memory=about[2], devices=run.devices, plan=plan)
    return json_text(encode(file)) + "\n"


def parse_run(text: str, where: str = "run", namespaces: Collection[str] = (), *, failed: bool = False) -> Run:
    root = Place(RUN_FILE, where)
    file = parse_json(_RunFile, text, root)
    plan = parse_plan("\n".join(file.plan) + "\n", f'{where}, "plan"', namespaces)
    if tuple(device.device for device in file.devices) != plan.devices:
        raise root.refuse('"devices" are not those of its plan, in their order', "run it anew")
    if file.out_of_memory:
        return _ended(file, plan, root, failed)
    if len({len(device.steps) for device in file.devices}) != 1 or not file.devices[0].steps:
        raise root.refuse('"devices" have different numbers of steps, or none', "run it anew")
    run = Run(file.model, file.torch, plan, file.devices)
    if not run.timed_s:
        raise root.refuse("no step was timed alone", "run it anew")
    return run


def _ended(file: _RunFile, plan: Plan, root: Place, failed: bool) -> Run:
    if file.out_of_memory not in plan.devices:
        raise root.refuse(
            f'"out_of_memory" is {file.out_of_memory!r}, no device of its plan', "name one of its devices"
        )
    if not failed:
        raise root.refuse(
            f"the run ended when {file.out_of_memory} was out of memory: it has no steps",
            "plan anew with it: lopsided plan MODEL --cluster CLUSTER --known FILE",
        )
    return Run(file.model, file.torch, plan, file.devices, file.out_of_memory)
