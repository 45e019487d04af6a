"""A model by name, trained for some steps on its example batch: what `lopsided train` runs in every process.

In: the name of a model, a plan (or a cluster, or neither), how many steps. Out: `Trained`: losses, and the recorded run
where one was wanted. For trying and measuring; a training of one's own is a loop around `parallelize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lopsided.calibration.run_record import Run
from lopsided.capturing.call import arguments_of
from lopsided.cluster.cluster import Cluster
from lopsided.errors import InputError
from lopsided.models.by_name import load
from lopsided.planner.plan_data import Plan
from lopsided.runtime.parallelizing import parallelize
from lopsided.runtime.recording import RECORDED, SKIPPED, TIMED

MADE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
"""The optimizers of a plan that torch has."""

_SEED = 0


@dataclass(frozen=True)
class Trained:
    """What came of it."""

    plan: Plan
    losses: tuple[float, ...]
    run: Run | None
    is_first: bool  # of the processes that take part: it has the run, and tells


def train(
    model: str,
    *,
    plan: Plan | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
    batch: int | None = None,
    optimizer: str = "",
    lr: float = 1e-3,
    steps: int = SKIPPED + TIMED + RECORDED,
    report: str | Path | None = None,
    record: bool = False,
    measure_s: float | None = None,
    tries: int = 1,
    quiet: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Trained:
    """Train for so many steps; with `report` (a file) or `record`, time and record the last of them.

    Without an optimizer it is the plan's, or AdamW. Of up to `tries` plans the quickest is taken. Every process calls
    this. The batch is the model's example, whole and the same everywhere and in every step.
    """
    windows = _windows(steps) if report is not None or record else None
    _check_optimizer(optimizer or "adamw")
    torch.manual_seed(_SEED)
    module, data = load(model, batch=batch)
    pm = parallelize(
        module,
        data,
        plan,
        cluster=cluster,
        optimizer=optimizer or "adamw",
        measure_s=measure_s,
        tries=tries,
        seed=_SEED,
        quiet=quiet,
        progress=progress,
    )
    planned = pm.plan.optimizer
    if optimizer and optimizer != planned:
        raise InputError(f"the plan is for {planned}, not for {optimizer}", do="leave the optimizer out, or plan anew")
    _check_optimizer(planned)
    update = MADE[planned](pm.parameters(), lr=lr)
    recording = pm.record(report, model=model, **windows) if windows is not None else None
    losses = []
    whole = arguments_of(pytree.tree_map_only(Tensor, lambda part: part.to(pm.world.device), data))
    for step in range(steps):
        progress(f"step {step + 1} of {steps}")
        loss = pm(*whole.args, **whole.kwargs)
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.detach())
    run = recording.run if recording is not None else None
    return Trained(pm.plan, tuple(map(float, losses)), run, pm.world.rank == pm.world.ranks[0])


def _check_optimizer(name: str) -> None:
    if name not in MADE:
        raise InputError(f"torch has no optimizer for {name!r}", do=f"choose from {', '.join(MADE)}")


def _windows(steps: int) -> dict[str, int]:
    """How many steps are skipped, timed and recorded."""
    if steps < 3:
        raise InputError(f"{steps} steps are too few to time and record", do="train for 3 steps or more")
    recorded = max(min(RECORDED, steps // 4), 1)
    skipped = max(min(SKIPPED, steps // 4), 1)
    return {"skipped": skipped, "timed": steps - skipped - recorded, "recorded": recorded}
