"""A device that is out of memory: which, what was predicted, what was held, and how to plan anew with that knowledge.

In: the error that ends a process of a parallel module. Out: what to end with in its place, and a file of a run that
ended so, which `lopsided plan --known` reads (`with_memory_seen`).
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lopsided.calibration.run_record import DeviceRun, Run, save_run
from lopsided.cluster.cluster_file import preset_names
from lopsided.comm.recorder import hardware_of
from lopsided.errors import LopsidedError, TrainingError
from lopsided.planner.candidates import memory_limits
from lopsided.runtime.recording import most_held

if TYPE_CHECKING:
    from lopsided.runtime.parallel import Parallel

WRITTEN = "out_of_memory.json"
# The CPU's allocator says so in an error that is no OutOfMemoryError.
_SAYS = "can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and not isinstance(error, LopsidedError) and _SAYS in str(error)
    )


def explain(module: weakref.ref[Parallel], error: BaseException) -> TrainingError | None:
    """What to end with, if that is why this process ends."""
    pm = module()
    if pm is None or not pm.world.takes_part or not is_out_of_memory(error):
        return None
    plan, number = pm.plan, pm.world.order[pm.world.place]
    device, held = plan.devices[number], most_held(pm.world.device)
    kind = plan.kind_numbers[number]
    path = Path(f"rank{pm.world.rank}_{WRITTEN}") if pm.world.rank else Path(WRITTEN)
    runs = (
        DeviceRun(name, hardware_of(pm.world.device) if k == number else "", held if k == number else 0, ())
        for k, name in enumerate(plan.devices)
    )
    run = Run(type(pm.module).__name__, torch.__version__, plan, tuple(runs), device)
    try:
        save_run(run, path)
        cluster = plan.cluster.name if plan.cluster.name in preset_names() else "CLUSTER"
        do = f"plan with what is known now: lopsided plan MODEL --cluster {cluster} --known {path} -o plan.json"
    except LopsidedError as unwritten:
        do = f"give less memory for {device} in the cluster file, and plan anew ({unwritten.what})"
    last = str(error).strip().splitlines()
    made = TrainingError(
        f"{device} is out of memory",
        where=f"rank {pm.world.rank}, step {pm.steps_done + 1}",
        predicted=f"{_gib(plan.memory_bytes[number])}, of {_gib(memory_limits(plan.on)[kind])} that a plan may fill",
        held=f"{_gib(held)} at the most, of {_gib(plan.on.kinds[kind].memory_bytes)}",
        asked=last[0][:200] if last else type(error).__name__,
        do=do,
    )
    made.__cause__ = error
    return made


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"
