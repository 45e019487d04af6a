"""The pace of every device, step by step, and shares that follow it.

In: a parallel module that trains. Out: `Paced`, which notes how long this process computed in each step, looks at all
processes' medians every few steps, and takes other shares when the decision (`pace`) says so.

What is noted costs two readings of a clock: the waits of a step are counted where they are posted for the watch anyway.
Medians are told with the next step's handshake, which all take part in anyway: nobody waits for anybody to look.
A device computes while it does not wait; that holds for CPUs, where the process that waits does nothing else. Of a GPU
the host does not see when it waits, so with GPUs nothing is noted, and shares are changed by hand only.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lopsided.comm.world import waiting
from lopsided.errors import InputError, LopsidedError, shown
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import parse_plan, plan_text
from lopsided.runtime.agreement import from_first
from lopsided.runtime.live.moving import bytes_to_move, check_movable, cuts_alike, take_shares, with_shares
from lopsided.runtime.live.pace import (
    CONFIRMED,
    LOOK,
    Balancing,
    PaceSeen,
    in_proportion,
    median_and_error,
    steps_to_look,
)

if TYPE_CHECKING:
    from lopsided.runtime.parallel import Parallel

_log = logging.getLogger("lopsided")

Step = tuple[float, float]  # seconds of it, and of this process's part of it

_PER_S = 1e-9  # of what is told with a handshake, in whole numbers
_PROGRAMS_S = 2.0  # about what it takes to make programs and groups of a loader anew


def check_replan(replan: str) -> None:
    if replan not in ("auto", "off"):
        raise InputError(f"replan is {shown(replan)}", where="parallelize", do='give "auto" or "off"')


class Paced:
    """Of one module. Made by all ranks at the same place. Shares change by themselves once it `follows`."""

    follows = False

    def __init__(self, pm: Parallel, side: dist.ProcessGroup | None) -> None:
        self._pm, self._side = pm, side
        self._steps: list[Step]  # since the last look
        self._last: deque[Step] = deque(maxlen=CONFIRMED * LOOK)
        self._began_s: float
        self._waited_s: float
        self._decision = Balancing()
        self._look_after = LOOK
        self._tells: bool  # medians go with the next handshake
        self.begin_anew()
        # The same on every rank: all devices are CPUs, and all processes have one.
        world = pm.world
        on_cpus = not any(one.is_gpu for one in world.told) and world.device.type == "cpu"
        self.notes = on_cpus and world.size == len(world.ranks) > 1

    def step_done(self) -> None:
        """A step of training is over."""
        if not self.notes:
            return
        now_s, waited_s = time.monotonic(), self._pm.watch.waited_s
        step_s = now_s - self._began_s
        self._last.append((step_s, max(step_s - (waited_s - self._waited_s), 0.0)))
        self._began_s, self._waited_s = now_s, waited_s
        if not self.follows:
            return
        self._steps.append(self._last[-1])
        watch = self._pm.watch
        if self._tells and watch.noted is not None:
            self._tells = False
            self._look(_seen(watch.noted.double() * _PER_S))
        if len(self._steps) >= self._look_after and not self._tells:
            step_s, own_s, error_s = (round(seconds / _PER_S) for seconds in _medians(self._steps))
            watch.notes, watch.noted = (step_s, own_s, error_s), None
            self._steps, self._tells = [], True

    def begin_anew(self) -> None:
        """Shares are others: steps before were not theirs, and what was sent and moved meanwhile belongs to none."""
        self._steps, self._tells = [], False
        self._last.clear()
        self._began_s, self._waited_s = time.monotonic(), self._pm.watch.waited_s

    def now(self) -> bool:
        """Take the shares that the last steps ask for; whether there are any."""
        if not self._last:
            return False
        heard = torch.empty(len(self._pm.world.ranks), 3, dtype=torch.float64)
        with waiting("the pace of all devices"):
            dist.all_gather(
                list(heard.unbind()), torch.tensor(_medians(self._last), dtype=torch.float64), group=self._side
            )
        pace = _seen(heard)
        return self._take(in_proportion(self._pm.shares.work, pace.own_s), pace)

    def _look(self, pace: PaceSeen) -> None:
        self._look_after = steps_to_look(pace.step_s)
        self._decision.cost_s = _PROGRAMS_S + pace.step_s * 2
        work = self._decision.look(self._pm.shares.work, pace)
        if work is not None and not self._take(work, pace):
            self._decision.refused()

    def _take(self, work: tuple[float, ...], pace: PaceSeen) -> bool:
        pm = self._pm
        # Shares are in the order of the ranks here, and in that of the devices in a plan.
        by_device = dict(zip(pm.world.order, work, strict=True))
        ordered = tuple(by_device[number] for number in range(len(work)))
        found = from_first(lambda: self._made(ordered), self._side, pm.world.ranks[0])
        if not json.loads(found):
            return False
        plan = parse_plan(json.loads(found), namespaces=pm.plan.graph.namespaces)
        before = pm.plan
        took = bytes_to_move(pm, plan)
        take_shares(pm, plan)
        if pm.world.rank == pm.world.ranks[0]:
            told = ", ".join(
                f"{name} {old:.0%} → {new:.0%}"
                for name, old, new in zip(plan.devices, before.shares.work, plan.shares.work, strict=True)
                if abs(old - new) >= 0.005
            )
            slowest = max(pace.own_s)
            _log.warning(
                "shares follow the pace of the devices: %s (the slowest took %.3g s of a step; up to %.3g MB moved)",
                told,
                slowest,
                took / 1e6,
            )
        return True

    def _made(self, work: tuple[float, ...]) -> str:
        """The plan with these shares; nothing, where it cannot be taken or is the same to the row."""
        pm = self._pm
        try:
            plan: Plan = with_shares(pm.plan, work)
            check_movable(pm, plan)
        except LopsidedError as error:
            _log.info("shares stay as they are: %s", error.what)
            return json.dumps("")
        return json.dumps("" if cuts_alike(pm.plan, plan) else plan_text(plan))


def _medians(steps: Sequence[Step]) -> tuple[float, float, float]:
    """A step, this process's part of it, and how far off that may be."""
    own_s, error_s = median_and_error([own for _, own in steps])
    return statistics.median(step for step, _ in steps), own_s, error_s


def _seen(rows: Tensor) -> PaceSeen:
    """Of the medians of all processes, by their place in the group; equal everywhere."""
    step_s, own_s, error_s = rows.T.tolist()
    return PaceSeen(max(step_s), tuple(own_s), max(error_s))
