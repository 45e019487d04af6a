"""Plans that compete by the clock: each is run for a few steps, the quickest is balanced by what its devices took, and
of the two and all that came close the quickest is taken.

In: several plans of one graph, the same on every rank. Out: a plan, the same on every rank, and what each took
(`TriedPlan`).

Predictions rank plans well and not perfectly; where several are predicted to take about as long, some steps of each
cost less than an hour with the wrong one. And a device that is a little slower than its tables say makes all others
wait in every step: its own part of a step, run by itself, shows it (`rebalance`). What is run is the whole
step but for the optimizer, whose prediction is added, on random leaves (`dry_run`): the model itself is not needed,
and nothing of it is changed.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from lopsided.calibration.rebalance import rebalanced
from lopsided.cluster.collectives import Network
from lopsided.comm.communicator import Communicator
from lopsided.comm.world import TIMEOUT_S, World, group_of, meet
from lopsided.errors import PlanError
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import parse_plan, plan_text
from lopsided.profiling.dry_run import Play, alone_s, together_s
from lopsided.profiling.links import ControlGroup
from lopsided.profiling.measure import undisturbed
from lopsided.profiling.noise import BackgroundLoad
from lopsided.profiling.topology import council_of
from lopsided.runtime.agreement import from_first, in_group_order, kinds_in_group_order

# All plans are tried in two rounds, so that a busy moment does not fall on one of them alone.
_ROUNDS = 2
# Another plan is taken if its step takes less than 0.99 of the first one's: by less, chance would decide.
_CLEARLY = 0.99
# Plans that took up to 1.1 times as long as the quickest are tried again beside it: they may be the better ones.
_CLOSE = 1.1
# Seconds for which a device runs its part of a step by itself, and a few steps at least.
_OWN_S = 0.5


@dataclass(frozen=True, slots=True)
class TriedPlan:
    """A plan, and seconds of a step of it; infinite, of one that does not run."""

    plan: Plan
    seconds: float


def quickest(
    plans: Sequence[Plan],
    device: torch.device,
    *,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Plan, tuple[TriedPlan, ...]]:
    """The quickest plan, and what each took, the one with new shares last. All ranks call it with the same.

    The first is taken unless another is clearly quicker; and if none can be tried, for an op that refuses random
    numbers will refuse them in all of them.
    """
    if not plans:
        raise PlanError("there are no plans to try", do="give at least one")
    with undisturbed(device):
        stage = _Stage(device, council_of(None), timeout_s, progress)
        trials = stage.tried(plans) if len(plans) > 1 else []
        chosen = chosen_by(trials) if trials else plans[0]
        again = stage.balanced(chosen)
        if again is not None:
            # Anew, also for the quickest: who is first of several had luck, too, and others would look slow beside it.
            final = stage.tried((*_nearest(chosen, trials), again))
            trials = [*(one for one in trials if all(one.plan is not other.plan for other in final)), *final]
            chosen = chosen_by(final)
    return _noted(chosen, trials), tuple(trials)


def chosen_by(trials: Sequence[TriedPlan]) -> Plan:
    """The plan that took least; the first, unless by far."""
    least = min(trials, key=lambda one: one.seconds)
    return least.plan if least.seconds < _CLEARLY * trials[0].seconds else trials[0].plan


def _nearest(chosen: Plan, trials: Sequence[TriedPlan]) -> list[Plan]:
    """The chosen plan, and those that took hardly longer."""
    took = next((one.seconds for one in trials if one.plan is chosen), math.inf)
    others = (one for one in trials if one.plan is not chosen)
    return [chosen, *(one.plan for one in others if one.seconds <= _CLOSE * took and math.isfinite(one.seconds))]


def _noted(plan: Plan, trials: Sequence[TriedPlan]) -> Plan:
    """The plan with a note of what it took, and what others did."""
    took = next((one.seconds for one in trials if one.plan is plan), math.inf)
    if not math.isfinite(took):
        return plan
    rest = [one.seconds for one in trials if one.plan is not plan]
    others = [f"{seconds:.4g} s" if math.isfinite(seconds) else "did not run" for seconds in rest]
    note = f"tried for some steps, each took {took:.4g} s; of other plans {', '.join(others)}"
    return replace(plan, notes=(*plan.notes, note))


@dataclass(frozen=True, slots=True)
class _Stage:
    """Where plans are run: on what, agreeing how, waiting how long."""

    device: torch.device
    council: ControlGroup
    timeout_s: float
    progress: Callable[[str], None]

    def tried(self, plans: Sequence[Plan]) -> list[TriedPlan]:
        """Some steps of each, in turn."""
        tries = [self._prepared(plan) for plan in plans]
        rounds: list[list[float]] = []
        for turn in range(_ROUNDS):
            self.progress(f"trying {len(plans)} plans, round {turn + 1} of {_ROUNDS}")
            rounds.append([one() if one is not None else math.inf for one in tries])
        means = (statistics.fmean(times) for times in zip(*rounds, strict=True))
        return [TriedPlan(plan, seconds) for plan, seconds in zip(plans, means, strict=True)]

    def balanced(self, plan: Plan) -> Plan | None:
        """The plan with shares by what its devices take to compute, all at the same time; None if it has them."""
        if len(plan.on.kinds) == 1:
            return None
        self.progress("balancing the plan by what its devices take")
        world, load = meet(plan, device=self.device), BackgroundLoad(self.device)
        self.council.meet(load)
        own_s = None if not world.takes_part else self._own_s(_play(plan, world), world.place)
        self.council.meet(load)
        mine = None if own_s is None else (world.order[world.place], own_s)
        told = cast(list[tuple[int, float] | None], self.council.hear(mine))
        seconds = dict(one for one in told if one is not None)
        if len(seconds) < plan.on.devices:
            return None  # somebody could not

        def made() -> str:
            found = rebalanced(plan, [seconds[number] for number in range(plan.on.devices)])
            return json.dumps([] if found is None else [plan_text(found)])

        return next(map(parse_plan, json.loads(from_first(made))), None)

    def _own_s(self, play: Play, place: int) -> float | None:
        return alone_s(play, place, self.device, _OWN_S, time.perf_counter)

    def _prepared(self, plan: Plan) -> Callable[[], float] | None:
        """Some steps of a plan, to be run by all ranks; None where it does not run on some rank."""
        world = meet(plan, device=self.device)
        group = group_of(world, self.timeout_s)
        communicator = (
            Communicator(group, world.device, Network(plan.on), timeout_s=self.timeout_s) if group is not None else None
        )
        play = _play(plan, world)
        # With nobody to talk to: whoever cannot do it says so before others wait for it.
        runs = (
            communicator is None
            or alone_s(play, world.place, world.device, 0.0, time.perf_counter, fewest=1) is not None
        )
        if not all(self.council.hear(runs)):
            return None
        once = partial(together_s, play, communicator, self.council, world.device)
        return lambda: once() + plan.breakdown.optimizer_s


def _play(plan: Plan, world: World) -> Play:
    how = (plan.bucket_bytes, plan.regather, plan.stretch, plan.reruns, kinds_in_group_order(plan, world))
    return Play(plan.program, plan.on, in_group_order(plan, world), *how, microbatches=plan.microbatches)
