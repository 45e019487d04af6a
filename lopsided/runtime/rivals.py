"""Plans that compete by the clock: each is run for a few steps, and the quickest is taken.

In: several plans of one graph, the same on every rank. Out: one of them, the same on every rank, and what each took.

Predictions rank plans well and not perfectly; where several are predicted to take about as long, some steps of each
cost less than an hour with the wrong one. What is run is the whole step but for the optimizer, whose prediction is
added, on random leaves (`rehearse`): the model itself is not needed, and nothing of it is changed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from lopsided.collectives import Network
from lopsided.errors import PlanError
from lopsided.plan import Plan
from lopsided.runtime.agreement import in_group_order
from lopsided.runtime.measure import council_of, undisturbed
from lopsided.runtime.measure_links import Council
from lopsided.runtime.rehearse import Play, alone_s, together_s
from lopsided.runtime.wire import Wire
from lopsided.runtime.world import TIMEOUT_S, group_of, meet

_ROUNDS = 2  # over all plans, so that a busy moment does not fall on one alone
_CLEARLY = 0.99  # times what the first plan takes: by less, chance decides


def quickest(
    plans: Sequence[Plan],
    device: torch.device,
    *,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Plan, tuple[float, ...]]:
    """The quickest plan, and seconds of each; infinite, of one that does not run. All ranks call it with the same.

    The first is taken unless another is clearly quicker; and if none can be tried, for an op that refuses random
    numbers will refuse them in all of them.
    """
    if not plans:
        raise PlanError("there are no plans to try", do="give at least one")
    with council_of(None) as council, undisturbed(device):
        tries = [_prepared(plan, device, council, timeout_s) for plan in plans]
        rounds: list[list[float]] = []
        for turn in range(_ROUNDS):
            progress(f"trying {len(plans)} plans, round {turn + 1} of {_ROUNDS}")
            rounds.append([one() if one is not None else math.inf for one in tries])
    seconds = tuple(statistics.fmean(times) for times in zip(*rounds, strict=True))
    return chosen_by(plans, seconds), seconds


def chosen_by(plans: Sequence[Plan], seconds: Sequence[float]) -> Plan:
    """The plan that took least, with a note of what the others took."""
    least = min(range(len(plans)), key=seconds.__getitem__)
    taken = least if seconds[least] < _CLEARLY * seconds[0] else 0
    if len(plans) == 1 or not math.isfinite(seconds[taken]):
        return plans[taken]
    others = [f"{s:.4g} s" if math.isfinite(s) else "did not run" for k, s in enumerate(seconds) if k != taken]
    note = f"tried for some steps, each took {seconds[taken]:.4g} s; of other plans {', '.join(others)}"
    return replace(plans[taken], notes=(*plans[taken].notes, note))


def _prepared(plan: Plan, device: torch.device, council: Council, timeout_s: float) -> Callable[[], float] | None:
    """Some steps of a plan, to be run by all ranks; None where it does not run on some rank."""
    world = meet(plan, device=device)
    group = group_of(world, timeout_s)
    wire = Wire(group, world.device, Network(plan.on), timeout_s=timeout_s) if group is not None else None
    play = Play(plan.program, plan.on, in_group_order(plan, world), plan.bucket_bytes, plan.regather)
    # With nobody to talk to: whoever cannot do it says so before others wait for it.
    runs = wire is None or alone_s(play, world.place, world.device, 0.0, time.perf_counter, fewest=1) is not None
    if not all(council.hear(runs)):
        return None
    once = partial(together_s, play, wire, council, world.device)
    return lambda: once() + plan.breakdown.optimizer_s
