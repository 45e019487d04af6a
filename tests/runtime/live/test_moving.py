"""Pieces move between ranks while training, and the losses stay those of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import PlanError
from lopsided.ir.placement import Shares
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.runtime.live.moving import with_shares
from tests.support.jobs import plan_of, prices_of

Pools = Callable[[int], WorkerPool]
SPEC = "gpt2:layers=1,width=16,heads=2,seq=6,vocab=31,dropout=0,batch=6"
SHARES = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))
STEPS = 9


def plan_by(how: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor], Plan]:
    torch.manual_seed(0)
    model, batch = load(SPEC)
    model = model.double()
    graph = capture(model, batch)
    book = derive_rules(graph)
    program = data_parallel(book, prices_of(graph, SHARES))
    if how == "cut":
        program = stored_cut(program)
    return model, batch, plan_of(program, SHARES, regather=how == "cut")  # type: ignore[return-value]


def data() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(31, (6 * 5, 6), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]


def curve(
    step: Callable[..., torch.Tensor], opt: torch.optim.Optimizer, batches: object, between: object
) -> list[float]:
    losses = list[float]()
    while len(losses) < STEPS:
        for batch in batches:  # type: ignore[attr-defined]
            if len(losses) == STEPS:
                break
            loss = step(**batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
            between(len(losses))  # type: ignore[operator]
    return losses


def moved(how: str, streamed: bool) -> tuple[list[float], list[float], float, list[int]]:
    """Nine steps in which shares change twice, beside one device: losses, the largest error, rows of this rank."""
    model, batch, plan = plan_by(how)
    whole = load(SPEC)[0].double()
    whole.load_state_dict(model.state_dict())
    loader = DataLoader(data(), batch_size=6, shuffle=False)  # type: ignore[arg-type]
    wanted = curve(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2, amsgrad=True), loader, lambda done: None)
    pm = lopsided.parallelize(model, batch, plan=plan, timeout_s=60)
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-2, amsgrad=True)
    rows, held = [], dict(pm.named_parameters())

    def between(done: int) -> None:
        rows.append(batches._rows.part(6)[1] - batches._rows.part(6)[0])
        if done == 3:
            named = (("state", (0.6, 0.0, 0.4)),)
            assert pm.replan(with_named(with_shares(pm.plan, (0.1, 0.6, 0.3)), named))
        if done == 7:
            assert pm.replan(with_shares(plan, (0.3, 0.4, 0.3)))

    batches = lopsided.shard([*loader] if streamed else loader, pm)
    losses = curve(pm, opt, batches, between)
    assert all(held[name] is parameter for name, parameter in pm.named_parameters())
    found, state = lopsided.full_state_dict(pm), whole.state_dict()
    pm.close()
    return losses, wanted, max((found[name] - state[name]).abs().max().item() for name in state), rows


def with_named(plan: Plan, named: tuple[tuple[str, tuple[float, ...]], ...]) -> Plan:
    from dataclasses import replace

    return replace(plan, shares=replace(plan.shares, named=named))


@pytest.mark.parametrize(("how", "streamed"), [("cut", False), ("whole", True)])
def test_shares_change_and_losses_do_not(worker_pools: Pools, how: str, streamed: bool) -> None:
    for rank, (losses, wanted, error, rows) in enumerate(worker_pools(3).run(moved, how, streamed)):
        assert losses == pytest.approx(wanted, rel=1e-9)
        assert error < 1e-9
        assert rows == [(3, 1, 2)[rank]] * 3 + [(1, 3, 2)[rank]] * 4 + [(2, 2, 2)[rank]] * 2


def refused() -> list[str]:
    model, batch, plan = plan_by("whole")
    pm = lopsided.parallelize(model, batch, plan=plan, timeout_s=60)
    told = []
    for other in (plan_by("cut")[2], with_shares(plan, (0.2, 0.4, 0.4))):
        try:
            if not told:
                pm.replan(other)
            else:
                import copy

                kept = copy.deepcopy(pm)
                pm.replan(other)
                del kept
        except PlanError as error:
            told.append(error.what)
    pm.close()
    return told


def test_what_needs_a_restart_is_refused(worker_pools: Pools) -> None:
    for told in worker_pools(3).run(refused):
        assert "its program is another one" in told[0]
        assert "its copy holds pieces too" in told[1]
