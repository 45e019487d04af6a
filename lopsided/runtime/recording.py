"""A stretch of a run is recorded: which steps are timed, which are noted, and what all processes saw, in one file.

In: the ends of steps, told by `parallel`, and what each process notes of them (`recorder`). Out: `Recording`, whose
`run` is a `Run`.

    skipped     steps in which memory is found, kernels are chosen and buffers are made
    timed       steps of which only the end is noted: nothing else is different from any other step
    recorded    steps of which everything is noted; they take a little longer
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lopsided.calibration.run_record import OPTIMIZER, DeviceRun, Run, StepRun, save_run
from lopsided.comm.recorder import DIGITS, Recorder, hardware_of
from lopsided.comm.world import World
from lopsided.errors import InputError, RunError
from lopsided.planner.plan_data import Plan

RECORD_VARIABLE = "LOPSIDED_RECORD"
"""The file into which every parallelized model records its first steps, if set."""

SKIPPED, TIMED, RECORDED = 3, 10, 3


class NotRecordedWarning(UserWarning):
    """A record that could not be written; training goes on."""


def start_recording(
    pm: nn.Module,
    plan: Plan,
    world: World,
    group: dist.ProcessGroup | None,
    path: str | Path | None,
    *,
    model: str,
    skipped: int,
    timed: int,
    recorded: int,
) -> Recording | None:
    """That of a parallel model, from here on. `group` is of the processes that take part; None in all others."""
    if min(skipped, recorded) < 0 or timed < 1:
        raise InputError(
            f"{skipped} steps skipped, {timed} timed and {recorded} recorded cannot be",
            do="time one step or more",
        )
    if group is None:
        return None
    return Recording(
        plan,
        world.device,
        group,
        world.order[world.place],
        model=model,
        hardware=hardware_of(world.device),
        path=path,
        skipped=skipped,
        timed=timed,
        recorded=recorded,
        held_bytes=_held_bytes(pm),
    )


def _held_bytes(pm: nn.Module) -> int:
    held = [*pm.parameters(), *(p.grad for p in pm.parameters() if p.grad is not None)]
    return sum(tensor.nbytes for tensor in held)


class Recording:
    """A stretch of a run: steps that are skipped, timed and recorded in turn, then brought together.

    In the first process that takes part, `run` is what came of it; it is None before, and in all others. `number` is
    that of this process's device in the plan.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        group: dist.ProcessGroup,
        number: int,
        *,
        model: str = "",
        hardware: str = "",
        path: str | Path | None = None,
        skipped: int = SKIPPED,
        timed: int = TIMED,
        recorded: int = RECORDED,
        held_bytes: int = 0,
    ) -> None:
        self.run: Run | None = None
        self.recorder: Recorder | None = Recorder(device)
        self._plan, self._group, self._number, self._path = plan, group, number, path
        self._about = (model, hardware)
        # The first step that is looked at begins where one ends.
        skipped = max(skipped, 1)
        self._skipped, self._timed, self._all = skipped, skipped + timed, skipped + timed + recorded
        self._ended = 0
        self._memory = _Memory(device, held_bytes)
        self._zero_s = self._together_s()

    @property
    def is_done(self) -> bool:
        return self.recorder is None

    @property
    def noting(self) -> Recorder | None:
        """Where all that happens in this step is noted; None if that is not wanted of it."""
        return self.recorder if self.recorder is not None and self.recorder.is_noting else None

    def before_update(self) -> None:
        if (recorder := self.noting) is not None:
            recorder.mark(OPTIMIZER)

    def after_update(self) -> None:
        """The end of a step."""
        recorder = self.recorder
        if recorder is None:
            return
        if recorder.is_noting:
            recorder.idle()
        self._ended += 1
        if self._ended >= self._skipped:
            recorder.end_step()
        recorder.is_noting = self._ended >= self._timed
        if self._ended == self._all:
            self.recorder = None
            self._bring_together(recorder)

    def _together_s(self) -> float:
        """One moment on everybody's clock."""
        dist.barrier(self._group)
        return time.perf_counter()

    def _bring_together(self, recorder: Recorder) -> None:
        mine = [(began - self._zero_s, step) for began, step in recorder.finished()]
        told = (self._number, self._about[1], self._memory.peak_bytes(), mine)
        heard: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(heard, told, group=self._group)
        if dist.get_rank(self._group) != 0:
            return
        heard.sort(key=lambda one: one[0])
        # Devices begin a step when they have ended the last: all spans are counted from the first of them.
        first = [min(one[3][k][0] for one in heard) for k in range(len(mine))]
        devices = tuple(
            DeviceRun(
                self._plan.devices[number],
                hardware,
                peak,
                tuple(_shifted(step, began - first[k]) for k, (began, step) in enumerate(steps)),
            )
            for number, hardware, peak, steps in heard
        )
        self.run = Run(self._about[0], torch.__version__, self._plan, devices)
        if self._path is not None:
            try:
                save_run(self.run, self._path)
            except RunError as error:
                # Training is worth more than its record, and the others wait for this process.
                warnings.warn(NotRecordedWarning(str(error)), stacklevel=2)


def _shifted(step: StepRun, by_s: float) -> StepRun:
    moved = tuple(
        replace(span, start_s=round(span.start_s + by_s, DIGITS), end_s=round(span.end_s + by_s, DIGITS))
        for span in step.spans
    )
    return StepRun(step.seconds, moved)


class _Memory:
    """The most a process held, the interpreter and its libraries apart."""

    def __init__(self, device: torch.device, held_bytes: int) -> None:
        self._device, self._base = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            # The kernel's mark of the most pages starts anew. What is there now beside the model is not the model's.
            Path("/proc/self/clear_refs").write_text("5")
            self._base = _status("VmRSS") - held_bytes
        except OSError:
            self._base = -1

    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(_status("VmHWM") - self._base, 0) if self._base >= 0 else 0


def most_held(device: torch.device) -> int:
    """The most that this process has held on a device; on the host, all of it."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
