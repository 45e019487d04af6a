"""What all measuring is made of: clocks, a bit of computing, counters of the kernel, and how far to believe a clock.

In: a device; times of the same thing, turn by turn: what is looked at in one turn lies close together in time, turns
lie apart. Out: `Stopwatch`, how long computing takes; `BackgroundLoad`, a block of computing; `Used`, whose processors
worked for whom; one time (`typical`) and its `noise`; and of ranks that measured the same, what is worth saying
(`notices`).

A processor that is shared, or rationed, runs a process for some milliseconds and then not for some. A call shorter than
that runs undisturbed or stands still, and the clock on the wall tells either. So one thread on a CPU is timed by the
processor's seconds, which are steady, and they are stretched by what the wall showed over the whole of the measuring.

Times of one turn share its luck (a busy moment, a warm chip), so turns have a noise of their own, beside that of their
times. Whoever measures again will mostly find the same within the noise of both.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_BLOCK_S = 1e-3
_LARGEST = 4096


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Seconds of computing on a device. `now` is the clock to take differences of; `wall_per_now` turns those that were
    taken since `start` into seconds on the wall.
    """

    def __init__(self, device: torch.device) -> None:
        # The seconds of several threads add up, and those of a GPU are not the processor's.
        rationed = device.type == "cpu" and torch.get_num_threads() == 1
        self.now: Callable[[], float] = time.process_time if rationed else time.perf_counter
        self.start()

    def start(self) -> None:
        self._began = (time.perf_counter(), self.now())

    @property
    def wall_per_now(self) -> float:
        wall, mine = time.perf_counter() - self._began[0], self.now() - self._began[1]
        return max(wall / mine, 1.0) if mine > 0 else 1.0


class BackgroundLoad:
    """A block of computing of about a millisecond. Waits for itself, not for what else the device is doing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = 256
        while True:
            self._factor = torch.ones(size, size, device=device)
            self._into = torch.empty_like(self._factor)
            self._times = 1
            self()
            quickest = min(self._seconds() for _ in range(3))
            if quickest > _BLOCK_S / 4 or size >= _LARGEST:
                break
            size *= 2
        self._times = max(round(_BLOCK_S / quickest), 1)

    def __call__(self) -> None:
        for _ in range(self._times):
            torch.mm(self._factor, self._factor, out=self._into)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _seconds(self) -> float:
        started = time.perf_counter()
        self()
        return time.perf_counter() - started


# Whose processors


@dataclass(frozen=True, slots=True)
class Used:
    """Seconds of a host's processors, since it was started; 0 where the kernel does not tell. And of this process."""

    busy_s: float
    stolen_s: float
    all_s: float
    own_s: float

    def since(self, before: Used) -> Used:
        return Used(
            self.busy_s - before.busy_s,
            self.stolen_s - before.stolen_s,
            self.all_s - before.all_s,
            self.own_s - before.own_s,
        )


def used_so_far() -> Used:
    own = time.process_time()
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words[1:9]]
        user, nice, system, _, _, interrupts, softly, stolen = ticks
    except (OSError, ValueError):
        return Used(0.0, 0.0, 0.0, own)
    return Used(user + nice + system + interrupts + softly, stolen, sum(ticks), own)


def quota_of_processors() -> float:
    """How many processors the groups this process is in may use at most; 0 where nobody says."""
    found = []
    for controllers, path in _control_groups():
        base = Path("/sys/fs/cgroup")
        folders = [base / path.lstrip("/"), base] if not controllers else []
        if "cpu" in controllers.split(","):
            folders = [root / path.lstrip("/") for root in (base / "cpu", base / controllers)]
        for folder in folders:
            found += _quotas(folder)
    return min(found, default=0.0)


def _control_groups() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    return [(match[1], match[2]) for line in lines if (match := re.match(r"\d+:([^:]*):(.*)$", line))]


def _quotas(folder: Path) -> list[float]:
    try:
        if (folder / "cpu.max").is_file():
            most, period = (folder / "cpu.max").read_text().split()
        else:
            most, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return [int(most) / int(period)] if int(most) > 0 and int(period) > 0 else []
    except (OSError, ValueError):  # not there, or "max"
        return []


# How far to believe a clock

ANEW = 0.04
"""By so much the same process, started anew, is faster or slower, however long it is looked at (docs/profiling.md)."""

# A device is called a straggler if it takes 1.25 times as long as the quickest of the same hardware.
_STRAGGLES = 1.25
# Repeats are said to scatter if their median is 15 % above the quickest.
_SCATTERS = 0.15
# A device is said to drift if its last turn is 8 % off its first.
_DRIFTS = 0.08
# Others are mentioned if they used 5 % of a host's processor time.
_OTHERS = 0.05
# A process that runs less than 90 % of the time shares its processor: one that has it to itself runs longer.
_SHARED = 0.9


def typical(times: Sequence[float]) -> float:
    """The mean without the quickest and the slowest sixth, or of three and more at least one of each: sums of means are
    means, and one bad moment is no rule.

    >>> typical([1.0, 1.0, 2.0, 2.0, 3.0, 90.0]), typical([1.0, 2.0, 90.0])
    (2.0, 2.0)
    """
    middle = sorted(times)
    away = max(len(middle) // 6, min(len(middle) - 1, 2) // 2)
    return statistics.fmean(middle[away : len(middle) - away])


def noise(turns: Sequence[Sequence[float]]) -> float:
    """Two standard errors of the typical time, as a fraction of it: of times around their turn's and of turns around
    each other; and what processes differ by when they are started anew.

    >>> round(noise([[1.0, 1.1], [1.0, 1.1]]), 3), round(noise([[1.0, 1.1], [2.0, 2.1]]), 3)
    (0.068, 0.747)
    """
    times = [seconds for turn in turns for seconds in turn]
    middle = typical(times) if times else 0.0
    if len(times) < 2 or not middle:
        return ANEW
    levels = [typical(turn) for turn in turns if turn]
    # Without the slowest sixth, as in what is typical.
    kept = sorted(times)[: max(len(times) - len(times) // 6, 2)]
    squared = statistics.variance(kept) / len(times)
    squared += statistics.variance(levels) / len(levels) if len(levels) > 1 else 0.0
    return math.hypot(2 * math.sqrt(squared) / middle, ANEW)


# What is worth saying


@dataclass(frozen=True, slots=True)
class NoiseStats:
    """What a rank noticed while it measured."""

    scatter: float = 0.0  # of repeats: middle over quickest, less one
    drift: float = 0.0  # last turn over first, less one
    others: float = 0.0  # part of its host's processors that worked for someone else
    stolen: float = 0.0  # part of them that the machine under a virtual one kept
    got: float = 1.0  # part of the time that its one thread was let run
    quota: float = 0.0  # processors that this process may use at most; 0 where it may use all


@dataclass(frozen=True, slots=True)
class Notice:
    """Something about a device that a reader of the figures should know."""

    about: str  # straggler, busy or drift
    device: str
    text: str


def notices(
    devices: Sequence[str], hardware: Sequence[str], paces: Sequence[float], calm: Sequence[NoiseStats]
) -> list[Notice]:
    """What stands out, by device: its name, its hardware, seconds for the same work, what it noticed."""
    found = []
    for name, chip, pace, mine in zip(devices, hardware, paces, calm, strict=True):
        like = [(other, n) for other, c, n in zip(paces, hardware, devices, strict=True) if c == chip]
        best, quickest = min(like)
        if pace > _STRAGGLES * best:
            why = f": it runs {mine.got:.0%} of the time" if mine.got < _SHARED else ""
            why += f", it may use {mine.quota:.0%} of a processor" if mine.quota else ""
            found.append(
                Notice(
                    "straggler", name, f"takes {pace / best:.1f} times as long as {quickest}, the same hardware{why}"
                )
            )
    told: set[tuple[float, float]] = set()
    for name, mine in zip(devices, calm, strict=True):
        expect = max(mine.scatter, mine.others, mine.stolen)
        reasons = []
        if mine.others > _OTHERS and (mine.others, mine.stolen) not in told:
            reasons.append(f"{mine.others:.0%} of its host's processors worked for others")
        if mine.stolen > _OTHERS and (mine.others, mine.stolen) not in told:
            reasons.append(f"{mine.stolen:.0%} of them were taken by the machine underneath")
        told.add((mine.others, mine.stolen))
        # Under a quota a call runs or stands still, whoever else there is.
        if mine.scatter > _SCATTERS and not mine.quota:
            reasons.append(f"repeats scatter by {mine.scatter:.0%}")
        if reasons:
            text = f"measured while something else ran: expect {expect:.0%} ({', '.join(reasons)})"
            found.append(Notice("busy", name, text))
        if abs(mine.drift) > _DRIFTS and not mine.quota:
            changed = "slower" if mine.drift > 0 else "faster"
            found.append(Notice("drift", name, f"became {abs(mine.drift):.0%} {changed} while it was measured"))
    return found
