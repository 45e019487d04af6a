"""Shares follow what devices really take."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from lopsided.calibration.comparison import computing_s
from lopsided.calibration.rebalance import rebalanced
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.devices import Link
from lopsided.errors import PlanError
from lopsided.models import zoo
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import parse_plan, plan_text
from lopsided.planner.planner import plan_graph, predict
from tests.support import clusters

LINK = Link(1e-6, 1e9)
SIZES = {"layers": 2, "width": 32, "heads": 4, "seq": 10, "vocab": 61, "batch": 32, "dropout": 0}


def cluster_of(speeds: tuple[float, ...], memory: int = 2**34) -> Cluster:
    return clusters.cluster(*clusters.kinds(*speeds, bytes_per_s=1e9, memory=memory, launch_s=0.0), link=LINK)


@cache
def plan_of(speeds: tuple[float, ...] = (2e8, 1e8)) -> Plan:
    plan = plan_graph(capture(*zoo.build("gpt2", **SIZES)), cluster_of(speeds))
    assert plan.on.devices == len(speeds)
    return plan


def test_as_predicted_shares_stay() -> None:
    plan = plan_of()
    assert rebalanced(plan, computing_s(plan)) is None


def test_a_device_that_takes_longer_gets_less() -> None:
    plan = plan_of()
    fast_s, slow_s = computing_s(plan)
    found = rebalanced(plan, (fast_s, 2 * slow_s))
    assert found is not None
    assert str(found.program) == str(plan.program)
    assert found.shares.work[1] < 0.8 * plan.shares.work[1]
    how = (plan.optimizer, plan.regather, plan.bucket_bytes)
    assert found.step_s < predict(plan.program, plan.shares, found.on, *how)[0]
    assert found.step_s == pytest.approx(predict(plan.program, found.shares, found.on, *how)[0])
    assert found.on.kinds[1].speed == pytest.approx(plan.on.kinds[1].speed / 2)
    assert found.on.kinds[0].speed == pytest.approx(plan.on.kinds[0].speed)
    assert "box/k0 1.00, box/k1 2.00" in found.notes[-1]
    assert {one.name for one in found.baselines} == {one.name for one in plan.baselines}
    now, told = computing_s(found), (fast_s * found.shares.work[0] / plan.shares.work[0], 0.0)
    assert now[0] == pytest.approx(told[0], rel=0.1)


def test_it_is_a_plan_like_any() -> None:
    plan = plan_of()
    fast_s, slow_s = computing_s(plan)
    found = rebalanced(plan, (fast_s, 3 * slow_s))
    assert found is not None
    again = parse_plan(plan_text(found))
    assert (again.shares, again.step_s, again.on.fingerprint) == (found.shares, found.step_s, found.on.fingerprint)
    assert len(found.memory_bytes) == 2
    assert sum(found.shares.cut(32)) == 32


def test_devices_that_are_left_out_stay_as_they_were() -> None:
    whole = cluster_of((2e8, 1e8, 1e3))
    plan = replace(plan_of(), cluster=whole, on=whole.only((0, 1)))
    fast_s, slow_s = computing_s(plan)
    found = rebalanced(plan, (fast_s, 2 * slow_s))
    assert found is not None
    assert found.cluster.kinds[2] == whole.kinds[2]
    assert found.cluster.kinds[1] == whole.kinds[1].taking(2.0) == found.on.kinds[1]


def test_nonsense_is_bounded_or_refused() -> None:
    plan = plan_of()
    fast_s, slow_s = computing_s(plan)
    found = rebalanced(plan, (fast_s, 1e9))
    assert found is not None
    assert found.on.kinds[1] == plan.on.kinds[1].taking(4.0)
    assert rebalanced(plan, (fast_s, 0.0)) is None
    assert rebalanced(plan, (fast_s, math.nan)) is None
    with pytest.raises(PlanError, match="seconds of 1 devices, and 2 in the plan"):
        rebalanced(plan, (slow_s,))


def test_devices_alike_are_balanced_already() -> None:
    alike = clusters.kind(count=2, speed=1e8, bytes_per_s=1e9, launch_s=0.0)
    plan = plan_graph(plan_of().graph, clusters.cluster(alike, link=LINK))
    assert plan.on.devices == 2
    assert rebalanced(plan, (1.0, 2.0)) is None
