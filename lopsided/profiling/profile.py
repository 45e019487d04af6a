"""Profiling as a whole: which graphs, on which processes, and what was found as plain data.

In: `ProfileRequest`: graphs, or those of a standard set. Out: a `Measurement`.

By torchrun every process calls `take_profile`. By itself one machine profiles itself: `profile_here` does it in this
process where there is one device, and starts a worker for each otherwise.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lopsided.capturing.capture_graph import capture
from lopsided.capturing.retype import in_dtype
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import begin
from lopsided.ir.graph import Graph
from lopsided.models.by_name import load
from lopsided.profiling.measure import Measurement, Progress, take_measurement
from lopsided.profiling.overhead import MEASURABLE_OPTIMIZERS

STANDARD = (
    "gpt2:layers=1,width=256,heads=4,seq=128,vocab=2000,batch=16",
    "gpt2:layers=1,width=512,heads=8,seq=128,vocab=2000,batch=8",
    "vgg19:width=16,ffn=256,classes=100,batch=16",
)
"""Small models whose calls most models make: products, attention, norms, convolutions."""

_LOOK_S = 0.2
_PATIENCE_S = 3600.0


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to profile: the calls of these graphs, products in these dtypes too, steps of these optimizers."""

    graphs: tuple[Graph, ...]
    dtypes: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = MEASURABLE_OPTIMIZERS
    budget_s: float = 60.0


def standard(dtype: str | None, batch: int | None) -> ProfileRequest:
    """What to profile for whatever model will come: in this dtype, or in those that people train in."""
    on_gpu = torch.cuda.is_available()
    graphs = [capture(*load(spec, batch=batch)) for spec in STANDARD]
    if dtype:
        return ProfileRequest(tuple(in_dtype(graph, dtype) for graph in graphs))
    if on_gpu:
        graphs += [in_dtype(graph, "bf16") for graph in graphs]
    return ProfileRequest(tuple(graphs), ("f32", "bf16", "f16") if on_gpu else ("f32", "bf16"))


def take_profile(wanted: ProfileRequest, progress: Progress = lambda done, total: None) -> Measurement:
    """In every process of the world: rank 0's measurement, the same in all."""
    device = begin()
    return take_measurement(
        wanted.graphs,
        device,
        optimizers=wanted.optimizers,
        dtypes=wanted.dtypes,
        budget_s=wanted.budget_s,
        progress=progress,
    )


def is_one_of_many() -> bool:
    """Whether torchrun started this process, beside others or alone."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this is the process that tells."""
    return not dist.is_initialized() or dist.get_rank() == 0


def profile_here(
    wanted: ProfileRequest, processes: int = 0, progress: Progress = lambda done, total: None
) -> Measurement:
    """This machine: every GPU, or the CPU; or so many processes."""
    many = processes or max(torch.cuda.device_count(), 1)
    if many == 1:
        return take_profile(wanted, progress)
    threads = max((os.cpu_count() or 1) // many, 1) if not torch.cuda.is_available() else 1
    with WorkerPool(many, threads=threads, timeout_s=_PATIENCE_S) as crew:
        told = Path(crew.folder) / "progress"
        with _followed(told, progress):
            found: Measurement = crew.run(_in_worker, wanted, str(told))[0]
    return found


def _in_worker(wanted: ProfileRequest, told: str) -> Measurement:
    def tell(done: int, total: int) -> None:
        if dist.get_rank() == 0:
            Path(told).write_text(f"{done} {total}")

    return take_profile(wanted, tell)


class _followed:
    """Hands on what a worker writes about its progress, as long as this is entered."""

    def __init__(self, told: Path, progress: Progress) -> None:
        self._told, self._progress, self._over = told, progress, threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(_LOOK_S):
            words = self._told.read_text().split() if self._told.is_file() else []
            if len(words) == 2:  # else it is being written
                self._progress(int(words[0]), int(words[1]))


def in_percent(advance: Callable[[], None]) -> Progress:
    """Progress for a bar of a hundred steps, whatever the number of parts."""
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        while shown < 100 * done // total:
            advance()
            shown += 1

    return progress
