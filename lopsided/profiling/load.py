"""Clocks, a bit of computing, and the counters of the kernel: what all measuring is made of.

In: a device. Out: `Stopwatch`, how long computing takes; `BackgroundLoad`, a block of computing; `Used`, whose
processors worked for whom.

A processor that is shared, or rationed, runs a process for some milliseconds and then not for some. A call shorter than
that runs undisturbed or stands still, and the clock on the wall tells either. So one thread on a CPU is timed by the
processor's seconds, which are steady, and they are stretched by what the wall showed over the whole of the measuring.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_BLOCK_S = 1e-3
_LARGEST = 4096


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was told."""
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
