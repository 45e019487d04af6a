"""Checkpoints by the clock or by the step, written beside training: made once, then told of every step.

In: a parallel module, its optimizer, a folder, how often. Out: `Checkpoints`: `resume()` goes on from the latest
checkpoint that is whole, `step()` saves when it is time.

Who saves must save together, and clocks differ. The first rank's clock decides: now and then it tells all after how
many more steps they look again, half of those that are left at the pace so far; so between two checkpoints there are
few such moments, and the steps between them cost nothing.

A save that fails (no room on the disk) is told in the log; the checkpoint before stays, and training goes on. A copy to
a second, slow folder is made by a thread of the first rank, which nobody waits for.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torch.optim import Optimizer

from lopsided.errors import CheckpointError, DamagedError, InputError, shown
from lopsided.runtime.checkpoint.checkpoint import LiveRun, Saving, Stateful, finish_last, go_on, load, save
from lopsided.runtime.checkpoint.folder import (
    clear,
    give_name,
    keep_only,
    partial,
    restore,
    steps_in,
    sync_folder,
    written,
)
from lopsided.runtime.checkpoint.in_memory import InMemory
from lopsided.runtime.control_plane import accord_of

if TYPE_CHECKING:
    from lopsided.runtime.parallel import Parallel

_log = logging.getLogger("lopsided")

_UNITS: Final = {
    **dict.fromkeys(("s", "sec", "second"), 1.0),
    **dict.fromkeys(("m", "min", "minute"), 60.0),
    **dict.fromkeys(("h", "hour"), 3600.0),
    **dict.fromkeys(("d", "day"), 86400.0),
}
_now_s = time.monotonic
_EVERY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
_MOST_STEPS = 1_000_000


def parse_every(every: str | int) -> tuple[float, int]:
    """Seconds, or steps, between two checkpoints; the other one is 0.

    >>> parse_every("10min"), parse_every("500 steps"), parse_every(20)
    ((600.0, 0), (0.0, 500), (0.0, 20))
    """
    if isinstance(every, int) and not isinstance(every, bool) and 0 < every <= _MOST_STEPS:
        return 0.0, every
    match = _EVERY.fullmatch(every.lower()) if isinstance(every, str) and len(every) < 40 else None
    if match is not None:
        number, unit = float(match[1]), match[2].removesuffix("s") or "s"
        if unit == "step" and 1 <= number <= _MOST_STEPS and number.is_integer():
            return 0.0, int(number)
        if unit in _UNITS and number > 0:
            return number * _UNITS[unit], 0
    raise InputError(
        f"{shown(every)} is no time between checkpoints",
        where="every",
        do='write "10min", "30s" or "2h", or a number of steps',
    )


def steps_to_next_look(left_s: float, step_s: float) -> int:
    """After how many steps to look at the clock again, `left_s` before a checkpoint is due.

    >>> steps_to_next_look(60.0, 0.1), steps_to_next_look(0.15, 0.1), steps_to_next_look(60.0, 0.0)
    (300, 1, 1)
    """
    return max(min(int(left_s / 2 / step_s), _MOST_STEPS), 1) if step_s > 0 else 1


class Checkpoints:
    """Checkpoints of one training run. Every rank makes one, and calls its methods at the same places.

    `every` is a time ("10min") or a number of steps. `keep` checkpoints stay. With `then`, each is copied to that
    folder, too, behind training; `resume` looks there where `folder` has none. With `keep_copies`, every few steps one
    is kept in main memory as well, the pieces of each node on so many others besides (`in_memory`): processes that are
    started again go on from there.
    """

    def __init__(
        self,
        pm: Parallel,
        optimizer: Optimizer | None,
        folder: str | Path,
        *,
        every: str | int = "10min",
        loader: Stateful | None = None,
        scheduler: Stateful | None = None,
        keep: int | None = 3,
        then: str | Path | None = None,
        keep_copies: int | None = None,
    ) -> None:
        self._every_s, self._every_steps = parse_every(every)
        self._run = run = LiveRun(pm, optimizer, loader, scheduler)
        self.folder, self._keep = Path(folder).absolute(), keep
        self._mirror = _Mirror(Path(then).absolute(), keep) if then is not None and pm.world.rank == 0 else None
        self._then = Path(then).absolute() if then is not None else None
        self._saved_s = self._looked_s = _now_s()
        self._since_look, self._look_after = 0, 1
        self._last: Saving | None = None
        self._in_memory = None
        if keep_copies is not None:
            self._in_memory = InMemory(run, self.folder, keep_copies=keep_copies)

    def resume(self) -> int:
        """Go on from the latest checkpoint that is whole; the steps that were done, 0 where there is none."""
        run, accord = self._run, accord_of(self._run.pm)
        on_disk = accord.first(lambda: max(_restored(self.folder), default=0))
        found = self._in_memory.latest() if self._in_memory is not None else None
        if found is not None and found[1].step >= on_disk:
            accord.warn("going on from step %d, which the devices left have in memory", found[1].step)
            return go_on(run, *found)
        for folder in filter(None, (self.folder, self._then)):
            for step in reversed(accord.first(lambda folder=folder: _restored(folder))):  # type: ignore[misc]
                try:
                    return load(run.pm, run.optimizer, folder, loader=run.loader, scheduler=run.scheduler, step=step)
                except DamagedError as error:
                    accord.warn("%s; the checkpoint before is tried", error.what)
        return 0

    def step(self) -> bool:
        """A step of training is done; save if it is time. Whether a save began."""
        due = self._is_due()
        if due:
            self.save()
        elif self._in_memory is not None:
            self._in_memory.step()
        return due

    def save(self) -> None:
        """Save now, beside training. What kept the save before from the disk is told in the log."""
        run, accord = self._run, accord_of(self._run.pm)
        try:
            finish_last(accord)
        except CheckpointError as error:
            accord.warn("the last checkpoint could not be saved: %s", error.what)
        try:
            self._last = save(
                run.pm,
                run.optimizer,
                self.folder,
                loader=run.loader,
                scheduler=run.scheduler,
                wait=False,
                keep=self._keep,
                then=self._mirror.take if self._mirror is not None else None,
            )
        except CheckpointError as error:
            accord.warn("no checkpoint could be saved: %s", error.what)
        self._saved_s = self._looked_s = _now_s()
        self._since_look, self._look_after = 0, 1

    def close(self) -> None:
        """Wait for what is under way, at the end of training. Raises what kept the last save from the disk."""
        finish_last(accord_of(self._run.pm))
        if self._in_memory is not None:
            self._in_memory.close()
        if self._mirror is not None:
            self._mirror.wait()

    def _is_due(self) -> bool:
        if self._every_steps:
            return self._run.pm.steps_done % self._every_steps == 0
        self._since_look += 1
        if self._since_look < self._look_after:
            return False
        now_s = _now_s()
        left_s = self._every_s - (now_s - self._saved_s)
        after = steps_to_next_look(left_s, (now_s - self._looked_s) / self._since_look) if left_s > 0 else 0
        self._look_after = accord_of(self._run.pm).first(lambda: after)
        self._looked_s, self._since_look = now_s, 0
        return self._look_after == 0


def _restored(folder: Path) -> list[int]:
    restore(folder)
    return steps_in(folder)


class _Mirror:
    """Copies of checkpoints in a second folder, the latest first: one that comes while another is copied waits for its
    turn, and gives it to the next that comes."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        self._folder, self._keep = folder, keep
        self._waiting: Path | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, checkpoint: Path) -> None:
        with self._lock:
            self._waiting = checkpoint
            if self._thread is None:
                # Not a daemon: a script that ends has its last checkpoint in both folders.
                self._thread = threading.Thread(target=self._copy_all, name="lopsided-copies")
                self._thread.start()

    def wait(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()

    def _copy_all(self) -> None:
        while True:
            with self._lock:
                checkpoint, self._waiting = self._waiting, None
                if checkpoint is None:
                    self._thread = None
                    return
            try:
                _copy(checkpoint, self._folder, self._keep)
            except OSError as error:
                _log.warning("%s could not be copied to %s: %s", checkpoint.name, self._folder, error.strerror or error)


def _copy(checkpoint: Path, folder: Path, keep: int | None) -> None:
    step = int(checkpoint.name.partition("-")[2])
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
    beside = partial(folder, step)
    try:
        beside.mkdir()
        for file in sorted(checkpoint.iterdir()):
            with file.open("rb") as source, (beside / file.name).open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
        sync_folder(beside)
        give_name(beside, written(folder, step))
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if keep is not None:
        keep_only(folder, keep, step)
