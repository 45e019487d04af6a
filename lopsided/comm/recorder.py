"""Notes what one process does: seconds of some steps, and of some others all that is computed and sent.

In: marks of the interpreter (`instructions`), of the communicator and of the optimizer. Out: `StepRun`s, and when each
began.

Computing is one line of marks: what begins ends what was going on. The backward pass of an op begins when the gradient
of its result is there, because autograd then runs it. What is sent ends when it has arrived, which a thread of its own
waits for. On a GPU marks are events on its stream, which nobody waits for before the end; collectives of NCCL run on
streams of its own and are not noted.
"""

from __future__ import annotations

import itertools
import platform
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from lopsided.calibration.run_record import COMPUTE, NETWORK, Span, StepRun
from lopsided.comm.backends import PendingWork

HANDSHAKE = "handshake"
# Of seconds in a file: tenths of a microsecond.
DIGITS = 7
_IDLE = ""

Stamp = float | torch.cuda.Event
_Mark = tuple[str, str, Stamp]  # what, the id of its item, since when


@dataclass(slots=True)
class Sent:
    """A collective under way."""

    what: str
    collective: str
    way: str
    bytes: int
    largest: float
    start_s: float
    end_s: float = 0.0
    waited_s: float = 0.0
    item: str = ""  # its item's id in the schedule

    def begins(self) -> None:
        """What is sent is computed only now."""
        self.start_s = time.perf_counter()

    def arrived(self) -> None:
        """The first time counts."""
        self.end_s = self.end_s or time.perf_counter()


@dataclass(slots=True)
class _Step:
    start: Stamp
    end: Stamp
    marks: list[_Mark] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)


class Recorder:
    """The notes of one process. `is_noting` is whether everything of this step is wanted."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_noting = device, False
        self._going_on = (_IDLE, "")
        self._marks: list[_Mark] = []
        self._sent: list[Sent] = []
        self._steps: list[_Step] = []
        self._last: Stamp | None = None
        self._arrivals = _Arrivals()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        # What events of the stream are counted from, and what that is on the host's clock.
        self._zero = self._stamp()
        if isinstance(self._zero, torch.cuda.Event):
            self._zero.synchronize()
        self._zero_s = time.perf_counter()

    # What is computed

    def mark(self, what: str, item: str = "") -> None:
        """From here on this is computed: the schedule's item of this id, if it is one."""
        self._going_on = (what, item)
        self._marks.append((what, item, self._stamp()))

    def idle(self) -> None:
        self.mark(_IDLE)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """This, and then what was computed before again."""
        before = self._going_on
        self.mark(what)
        try:
            yield
        finally:
            self.mark(*before)

    def mark_backward(self, node: str, result: Tensor) -> None:
        if result.requires_grad:
            result.register_hook(lambda _: self.mark(f"∂{node}", f"∂{node}"))

    def _stamp(self) -> Stamp:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    # What is sent

    def starts(self, what: str, collective: str, way: str, size: int, largest: float, item: str = "") -> Sent:
        sent = Sent(what, collective, way, size, largest, time.perf_counter(), item=item)
        self._sent.append(sent)
        return sent

    def follow(self, sent: Sent, works: Sequence[PendingWork]) -> list[PendingWork]:
        """What to wait for in place of these, which fill the host's memory."""
        return [self._arrivals.follow(sent, works)]

    @contextmanager
    def standing(self, sent: Sent | None) -> Iterator[None]:
        """This process stands still for something that is sent. What it was computing goes on afterwards."""
        before, since = self._going_on, time.perf_counter()
        self.idle()
        try:
            yield
        finally:
            if sent is not None:
                sent.arrived()
                sent.waited_s += time.perf_counter() - since
            self.mark(*before)

    @contextmanager
    def handshaking(self) -> Iterator[None]:
        """This process waits for the others to say that they do the same."""
        with self.standing(self.starts(HANDSHAKE, HANDSHAKE, "", 0, 1.0)):
            yield

    # Steps

    def end_step(self) -> None:
        """The optimizer is done. What was noted since the last time belongs to one step."""
        now = self._stamp()
        if self._last is not None:
            self._steps.append(_Step(self._last, now, self._marks, self._sent))
        self._last, self._marks, self._sent, self._going_on = now, [], [], (_IDLE, "")

    def finished(self) -> tuple[tuple[float, StepRun], ...]:
        """When every step began, on this host's clock, and the step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._arrivals.close()
        return tuple((self._seconds(step.start), self._told(step)) for step in self._steps)

    def _told(self, step: _Step) -> StepRun:
        start, end = self._seconds(step.start), self._seconds(step.end)
        spans = []
        times = [(what, item, self._seconds(stamp) - start) for what, item, stamp in step.marks]
        for (what, item, begins), (_, _, ends) in itertools.pairwise([*times, (_IDLE, "", end - start)]):
            if what != _IDLE:
                spans.append(replace(_span(COMPUTE, what, begins, ends), item=item))
        for sent in step.sent:
            last = sent.end_s or sent.start_s
            span = _span(NETWORK, sent.what, sent.start_s - start, last - start)
            rest = (sent.collective, sent.way, sent.bytes, float(f"{sent.largest:.6g}"), round(sent.waited_s, DIGITS))
            spans.append(Span(span.lane, span.what, span.start_s, span.end_s, *rest, sent.item))
        return StepRun(round(end - start, DIGITS), tuple(sorted(spans, key=lambda span: span.start_s)))

    def _seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return stamp
        # Stamps are of one sort: those of a stream are counted from one of that stream.
        return self._zero_s + float(cast(torch.cuda.Event, self._zero).elapsed_time(stamp)) / 1000


def _span(lane: str, what: str, start_s: float, end_s: float) -> Span:
    # What began before the step did (the clock of a stream and that of its host differ by a little) begins with it.
    start_s = max(round(start_s, DIGITS), 0.0)
    return Span(lane, what, start_s, max(round(end_s, DIGITS), start_s))


class _Arrivals:
    """A thread that waits for collectives in the order they were started and notes when each is done."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Followed | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def follow(self, sent: Sent, works: Sequence[PendingWork]) -> _Followed:
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_all, name="lopsided-recorder", daemon=True)
            self._thread.start()
        followed = _Followed(sent, works)
        self._queue.put(followed)
        return followed

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    def _wait_for_all(self) -> None:
        while (followed := self._queue.get()) is not None:
            followed.arrive()
            del followed


class _Followed:
    """A collective that somebody waits for already."""

    def __init__(self, sent: Sent, works: Sequence[PendingWork]) -> None:
        self._sent, self._works = sent, works
        self._done = threading.Event()
        self._error: Exception | None = None

    def arrive(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except Exception as error:
            self._error = error
        self._sent.arrived()
        self._works = ()
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


def hardware_of(device: torch.device) -> str:
    """What people call it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    facts = Path("/proc/cpuinfo")
    listed = facts.read_text() if facts.is_file() else ""
    named = (line.partition(":")[2].strip() for line in listed.splitlines() if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or device.type
