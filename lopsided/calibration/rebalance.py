"""A plan's shares once more, by how long its devices really compute.

In: a `Plan`, and seconds that each of its devices took to compute its part of a step. Out: the plan with the shares
that are best for devices of that pace, or None if these are the shares it has.

Tables of a device are made of many calls, and what is wrong with all of them alike shows in a whole step only: then one
device waits for the other in every step. Here that is one factor a kind. What was predicted of it is scaled, the linear
program solved again, and the plan says what it is predicted to take by the new tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from lopsided.calibration.comparison import fraction_of
from lopsided.cluster.cluster import Cluster
from lopsided.errors import DoesNotFitError, PlanError
from lopsided.ir.placement import Shares
from lopsided.planner.balance import balance
from lopsided.planner.candidates import memory_limits
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import baselines_of, predict
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.memory import holdings
from lopsided.schedule.timeline import run

_MOST = 4.0  # times as long or as short as predicted: beyond, what was run is not what was planned
_WORTH = 0.99  # times the step with the shares there are: what gains less is not worth a change


def computing_s(plan: Plan) -> tuple[float, ...]:
    """What each device of a plan is predicted to compute in a pass there and back, in seconds."""
    items = plan.priced(Costs(plan.graph, plan.on, optimizer_named(plan.optimizer))).computes
    return tuple(
        sum(item.seconds[number].at(fraction_of(plan, item.cut, device)) for item in items)
        for number, span in enumerate(plan.on.spans)
        for device in range(*span)
    )


def rebalanced(plan: Plan, seconds: Sequence[float]) -> Plan | None:
    """The plan with other shares, if others are better for devices that compute for so long with those it has."""
    if len(seconds) != plan.on.devices:
        raise PlanError(
            f"there are seconds of {len(seconds)} devices, and {plan.on.devices} in the plan",
            do="give those of each device of plan.on",
        )
    if len(plan.on.kinds) == 1 or not all(0 < one < math.inf for one in seconds):
        return None  # devices alike have equal shares already, and no time is no news
    told = computing_s(plan)
    times: dict[tuple[str, str], float] = {}
    for kind, (first, last) in zip(plan.on.kinds, plan.on.spans, strict=True):
        was, now = (statistics.fmean(each[first:last]) for each in (told, seconds))
        times[kind.node, kind.name] = min(max(now / was, 1 / _MOST), _MOST) if was else 1.0

    def paced(cluster: Cluster) -> Cluster:
        """Devices that the plan leaves out are as they were."""
        kinds = tuple(kind.taking(times.get((kind.node, kind.name), 1.0)) for kind in cluster.kinds)
        return replace(cluster, kinds=kinds)

    on, cluster, kept = paced(plan.on), paced(plan.cluster), optimizer_named(plan.optimizer)
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
    how = (plan.optimizer, plan.regather, plan.bucket_bytes)
    step_s, breakdown, memory = predict(plan.program, shares, on, *how)
    paces = ", ".join(f"{node}/{name} {factor:.2f}" for (node, name), factor in times.items())
    note = f"shares are balanced by what devices took, times what was predicted: {paces}"
    return replace(
        plan,
        cluster=cluster,
        on=on,
        shares=shares,
        step_s=step_s,
        breakdown=breakdown,
        memory_bytes=memory,
        baselines=baselines_of(plan.graph, cluster, plan.optimizer),
        notes=(*plan.notes, note),
    )
