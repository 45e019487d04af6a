"""What `parallelize` tells while it works, and where that is shown.

In: messages, and how many seconds something still takes. Out: records of the logger `lopsided`, level INFO, on rank 0
alone. `shown` puts a handler behind that logger where nobody has configured one and somebody is there to read it: under
torchrun, or on a terminal. It writes on stderr, and is gone when the model is ready.

A script decides as for any library: its own handlers get the records, `logging.getLogger("lopsided").setLevel(...)`
chooses among them, and `quiet=True` shows none.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from lopsided.planner.plan_data import Plan

_log = logging.getLogger("lopsided")

# Seconds between two lines about the time that is left, where lines cannot be overwritten.
_EVERY_S = 5.0
# Seconds between two of these lines in any case.
_COUNTED_S = 1.0
_MOST_NAMED = 8
_PASSING = "lopsided_passing"


class Announcer:
    """Tells of one `parallelize`. Called with a message, it hands it to whoever listens and, on rank 0, to the log."""

    def __init__(self, listener: Callable[[str], None], *, logs: bool) -> None:
        self._listener, self._logs, self._began_s = listener, logs, time.perf_counter()

    def __call__(self, message: str) -> None:
        self._listener(message)
        if self._logs:
            _log.info(message)

    def passing(self, message: str) -> None:
        """Something that soon is no longer so: the next message may take its place."""
        if self._logs:
            _log.info(message, extra={_PASSING: True})

    def warn(self, message: str) -> None:
        self._listener(message)
        if self._logs:
            _log.warning(message)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began_s

    def countdown(self, what: str, budget_s: float) -> Callable[[int, int], None]:
        """To be called with how many parts are done, and of how many: tells how many seconds are left."""
        began_s = told_s = time.perf_counter()

        def part_done(done: int, total: int) -> None:
            nonlocal told_s
            now_s = time.perf_counter()
            spent_s = now_s - began_s
            # Parts differ in length: the first few say little.
            left_s = spent_s * (total / done - 1) if 4 * done > total else budget_s - spent_s
            if left_s >= 0.5 and now_s - told_s >= _COUNTED_S:
                told_s = now_s
                self.passing(f"{what}, {left_s:.0f} s left")

        return part_done


@contextmanager
def shown(*, quiet: bool, is_first: bool) -> Iterator[None]:
    """In here, messages of rank 0 are seen by whoever started the run, unless the script says how it logs."""
    somebody_reads = "TORCHELASTIC_RUN_ID" in os.environ or sys.stderr.isatty()
    before = _log.level
    if quiet:
        _log.setLevel(max(logging.ERROR, before))
        try:
            yield
        finally:
            _log.setLevel(before)
    elif is_first and somebody_reads and before == logging.NOTSET and not _log.hasHandlers():
        handler = _OnTerminal()
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
        try:
            yield
        finally:
            handler.end_line()
            _log.removeHandler(handler)
            _log.setLevel(before)
    else:
        yield


@contextmanager
def compiling(functions: int, *, quiet: bool, is_first: bool) -> Iterator[None]:
    """In here a step runs for the first time that compiles so many functions, if any."""
    if not functions:
        yield
        return
    with nullcontext() if quiet else shown(quiet=False, is_first=is_first):
        tell = Announcer(lambda _: None, logs=is_first and not quiet)
        tell(f"compiling {functions} function{'' if functions == 1 else 's'}")
        yield
        tell(f"compiled after {tell.seconds:.1f} s")


class _OnTerminal(logging.StreamHandler):  # type: ignore[type-arg]
    """Lines on stderr. What passes is overwritten on a terminal, and told now and then elsewhere."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("lopsided  %(message)s"))
        self._open = 0  # characters of a line that may be overwritten
        self._told_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, _PASSING, False):
            self._clear()
            self._told_s = time.monotonic()
            super().emit(record)
        elif self.stream.isatty():
            self._clear()
            text = self.format(record)
            self.stream.write(text)
            self.flush()
            self._open = len(text)
        elif time.monotonic() - self._told_s >= _EVERY_S:
            self._told_s = time.monotonic()
            super().emit(record)

    def _clear(self) -> None:
        if self._open:
            self.stream.write("\r" + " " * self._open + "\r")
            self._open = 0

    def end_line(self) -> None:
        """Nothing is left on the line."""
        self._clear()
        self.flush()


def about_plan(plan: Plan) -> Iterator[str]:
    """What was chosen, why, and which devices stay idle: a line each."""
    used, of = plan.on.devices, plan.cluster.devices
    shares = [f"{name} {share:.0%}" for name, share in zip(plan.devices, plan.shares, strict=True)]
    more = f" and {used - _MOST_NAMED} more" if used > _MOST_NAMED else ""
    yield (
        f"chosen: {_milliseconds(plan.step_s)} a step predicted, on {used} of {of} device{'' if of == 1 else 's'}: "
        f"{', '.join(shares[:_MOST_NAMED])}{more}"
    )
    classics = sorted((one for one in plan.baselines if one.fits), key=lambda one: one.step_s)
    same = [one.about for one in classics if one.step_s <= plan.step_s]
    others = [f"{one.about} would take {_milliseconds(one.step_s)}" for one in classics if one.step_s > plan.step_s]
    if classics:
        yield "why: " + "; ".join([*(f"this is {about}" for about in same[:1]), *others[:3]])
    elif plan.baselines:
        yield "why: none of the usual strategies fits into the memory of these devices"
    idle = [name for name in plan.cluster.device_names if name not in plan.devices]
    if idle:
        more = f" and {len(idle) - _MOST_NAMED} more" if len(idle) > _MOST_NAMED else ""
        yield f"idle: {', '.join(idle[:_MOST_NAMED])}{more}: no plan that uses them is predicted to be quicker"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
