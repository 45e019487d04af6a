"""During a start: a plan's shares once more, by how long its devices really compute.

In: a `Plan`, and seconds that each of its devices took to compute its part of a step. Out: the plan with the shares
that are best for devices of that pace, or None if these are the shares it has.

Tables of a device are made of many calls, and what is wrong with all of them alike shows in a whole step only: then one
device waits for the other in every step. Each device's part of a step is one observation (`observed_parts`), which
corrects all that its kind computes by one factor (`calibrate`). Then the linear program is solved again, and the plan
says what it is predicted to take by the new tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lopsided.calibration.calibrate import OWN_PART, calibrate
from lopsided.calibration.comparison import observed_parts
from lopsided.errors import DoesNotFitError, PlanError
from lopsided.ir.placement import Shares
from lopsided.planner.balance import balance
from lopsided.planner.candidates import memory_limits
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import baselines_of, predict
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.memory import holdings
from lopsided.schedule.timeline import run

_WORTH = 0.99
"""A step must take less than this part of what it takes with the shares there are; else the change is not worth it."""


def rebalanced(plan: Plan, seconds: Sequence[float]) -> Plan | None:
    """The plan with other shares, if others are better for devices that compute for so long with those it has."""
    if len(seconds) != plan.on.devices:
        raise PlanError(
            f"there are seconds of {len(seconds)} devices, and {plan.on.devices} in the plan",
            do="give those of each device of plan.on",
        )
    if len(plan.on.kinds) == 1 or not all(0 < one < math.inf for one in seconds):
        return None  # devices alike have equal shares already, and no time is no news
    observed = observed_parts(plan, seconds)
    found = calibrate(plan.on, observed, limits=OWN_PART)
    on, kept = found.cluster, optimizer_named(plan.optimizer)
    cluster = calibrate(plan.cluster, observed, ran_on=plan.on, limits=OWN_PART).cluster
    costs = Costs(plan.graph, on, kept)
    priced = plan.priced(costs)

    def step_of(shares: Shares) -> float:
        return run(priced, costs.network, Scale(on, shares)).step_s

    try:
        shares = balance(
            priced,
            # The step that works with most is that of the device with the largest share.
            holdings(plan.schedule, kept, devices=max(round(1 / max(plan.shares.work)), 1)),
            on,
            costs.network,
            reference=plan.shares,
            memory_limits=memory_limits(on),
            polish=True,
            judge=step_of,
        ).shares
    except DoesNotFitError:
        return None
    if step_of(shares) > _WORTH * step_of(plan.shares):
        return None
    step_s, breakdown, memory = predict(plan.program, shares, on, *plan.how)
    told = zip(plan.on.kinds, found.corrections, strict=True)
    paces = ", ".join(f"{kind.node}/{kind.name} {one.factor:.2f}" for kind, one in told)
    note = f"shares are balanced by what devices took, times what was predicted: {paces}"
    return replace(
        plan,
        cluster=cluster,
        on=on,
        shares=shares,
        step_s=step_s,
        breakdown=breakdown,
        memory_bytes=memory,
        # Of a batch in rounds the graph of the whole is not there to be planned.
        baselines=plan.baselines if plan.microbatches > 1 else baselines_of(plan.graph, cluster, plan.optimizer),
        notes=(*plan.notes, note),
    )
