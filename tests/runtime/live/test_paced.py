"""Shares follow devices while training: real steps, whose times are told by a clock of the test's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.placement import Shares
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel
from lopsided.runtime.live import paced
from tests.support.jobs import plan_of, prices_of

Pools = Callable[[int], WorkerPool]
SPEC = "mlp:layers=1,width=4,classes=3,batch=60"
FAST, SLOWED = (3.0, 2.0, 1.0), (1.0, 2.0, 1.0)
SLOW_AT, LET_GO_AT, STEPS = 10, 60, 110
BY_HAND = (SLOW_AT + 12, LET_GO_AT + 12, STEPS - 1)
STEP_S = 0.05

Change = tuple[int, tuple[float, ...]]


def trained(noise: float, replan: str = "auto") -> tuple[list[Change], list[float]]:
    """After which steps shares were others, and which; and the losses."""
    torch.manual_seed(0)
    model, batch = load(SPEC)
    whole = {name: each.double() if each.is_floating_point() else each for name, each in batch.items()}
    graph = capture(model.double(), whole)
    shares = Shares(tuple(speed / sum(FAST) for speed in FAST))
    plan = plan_of(data_parallel(derive_rules(graph), prices_of(graph, shares)), shares)
    now = [0.0]
    clock, paced.time = paced.time, SimpleNamespace(monotonic=lambda: now[0])  # type: ignore[assignment]
    changes, losses = list[Change](), list[float]()
    try:
        pm = lopsided.parallelize(model, whole, plan=plan, timeout_s=60, replan=replan, quiet=True)
        opt, dice = torch.optim.SGD(pm.parameters(), lr=1e-2), random.Random(pm.world.rank)
        for number in range(STEPS):
            before, waited_s = pm.shares.work, pm.watch.waited_s
            loss = pm(**whole)
            loss.backward()
            losses.append(loss.item())
            speeds = SLOWED if SLOW_AT <= number < LET_GO_AT and not noise else FAST
            least_s = STEP_S * sum(FAST)
            own_s = [least_s * share / speed for share, speed in zip(before, speeds, strict=True)]
            now[0] += max(own_s)
            mine_s = own_s[pm.world.rank] * max(1 + noise * dice.gauss(0, 1), 0.0)
            pm.watch.waited_s = waited_s + max(own_s) - mine_s
            opt.step()
            opt.zero_grad()
            if replan == "off" and number in BY_HAND:
                moved = pm.replan()
                assert moved == (number != BY_HAND[-1])
            if pm.shares.work != before:
                changes.append((number, pm.shares.work))
        pm.close()
    finally:
        paced.time = clock
    return changes, losses


def test_a_device_slowed_to_a_third_and_let_go_is_followed(worker_pools: Pools) -> None:
    (first, losses), *others = worker_pools(3).run(trained, 0.0)
    assert all(changes == first for changes, _ in others)
    (slowed, some), (let_go, all_again) = first
    assert SLOW_AT <= slowed <= SLOW_AT + 18
    assert some == pytest.approx([speed / sum(SLOWED) for speed in SLOWED])
    assert LET_GO_AT <= let_go <= LET_GO_AT + 18
    assert all_again == pytest.approx([speed / sum(FAST) for speed in FAST])
    steady = worker_pools(3).run(trained, 0.1)
    assert all(changes == [] for changes, _ in steady)
    # Other shares change nothing of what is computed.
    assert losses == pytest.approx(steady[0][1], rel=1e-9)


def test_by_hand_shares_are_those_of_the_last_steps(worker_pools: Pools) -> None:
    (changes, _), *others = worker_pools(3).run(trained, 0.0, "off")
    assert all(found == changes for found, _ in others)
    assert [number for number, _ in changes] == [*BY_HAND[:-1]]
    for (_, shares), speeds in zip(changes, (SLOWED, FAST), strict=True):
        assert shares == pytest.approx([speed / sum(speeds) for speed in speeds])
