"""Ranks in another order, bystanders, a world of one, no plan: the same training."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import World, meet
from lopsided.ir.placement import Shares
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel
from lopsided.planner.plan_data import Plan
from lopsided.runtime.parallel import Parallel
from tests.support.jobs import plan_of, prices_of
from tests.support.small_net import HERE, THREE, Net, batch_of, gap, net, planned


def in_another_order(order: tuple[int, ...]) -> tuple[float, float]:
    """Ranks that are not the plan's devices in their order."""
    alone, model = net(), net()
    plan = planned(model, "zero", Shares((0.61, 0.04, 0.35), named=(("state", (0.2, 0.5, 0.3)),)))
    met = meet(plan)
    world = World(met.rank, met.size, met.ranks, order, met.device, met.told)
    pm = Parallel(model, batch_of(), plan.graph, plan, world)
    loss, expected = pm(**batch_of()), alone(**batch_of())
    loss.backward()
    expected.backward()
    assert pm.shares.work == tuple(plan.shares.work[k] for k in order)
    return abs(loss.item() - expected.item()), gap(pm, alone)


def test_ranks_in_another_order(worker_pools: Callable[[int], WorkerPool]) -> None:
    for loss, gradients in worker_pools(3).run(in_another_order, (2, 0, 1)):
        assert loss < 1e-12
        assert gradients < 1e-12


def with_a_bystander() -> tuple[float, float, float, int]:
    """Three processes, a plan for two of three devices."""
    alone, model = net(), net()
    two = planned(model, "zero", Shares((0.7, 0.3), named=(("state", (0.5, 0.5)),)))
    from lopsided.cluster.cluster import Cluster
    from tests.support.jobs import cluster_of

    three: Cluster = cluster_of(3)
    plan = Plan(
        three,
        three.without_device(three.device_names[2]),
        two.program,
        two.shares,
        "adamw",
        False,
        1.0,
        two.breakdown,
        two.memory_bytes,
        (),
        two.search,
        (),
        (),
    )
    pm = lopsided.parallelize(model, batch_of(), plan=plan)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for _ in range(3):
        loss, expected = pm(**batch_of()), alone(**batch_of())
        loss.backward()
        expected.backward()
        norm, whole = lopsided.clip_grad_norm_(pm, 0.5), nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    pm.eval()
    alone.eval()
    loss, expected = pm(**batch_of()), alone(**batch_of())
    assert pm.steps_done == 3
    full = lopsided.full_state_dict(pm)
    away = max((full[name] - value.cpu()).abs().max().item() for name, value in alone.state_dict().items())
    return abs(loss.item() - expected.item()), abs(norm.item() - whole.item()), away, pm.world.place


def test_a_bystander_follows(worker_pools: Callable[[int], WorkerPool]) -> None:
    found = worker_pools(3).run(with_a_bystander)
    assert [place for *_, place in found] == [0, 1, -1]
    assert max(max(errors) for *errors, _ in found) < 1e-9


def alone_in_the_world() -> tuple[float, float]:
    alone, model = net(), net()
    pm = lopsided.parallelize(model, batch_of(), plan=planned(model, "dp", Shares((1.0,))))
    loss, expected = pm(**batch_of()), alone(**batch_of())
    loss.backward()
    expected.backward()
    return abs(loss.item() - expected.item()), gap(pm, alone)


def test_a_world_of_one(worker_pools: Callable[[int], WorkerPool]) -> None:
    loss, gradients = worker_pools(1).run(alone_in_the_world)[0]
    assert loss == 0
    assert gradients < 1e-12


def other_batches() -> float:
    """A tuple in place of a mapping, a loss made outside of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(HERE)
    alone = copy.deepcopy(model)
    x = torch.randn(10, 6, device=HERE)

    def loss_fn(output: Tensor, batch: object) -> Tensor:
        return output.square().mean()

    book = derive_rules(capture(model, (x,), loss_fn=loss_fn))
    plan = plan_of(data_parallel(book, prices_of(book.graph, THREE)), THREE)
    pm = lopsided.parallelize(model, (x,), plan=plan, loss_fn=loss_fn)
    loss, expected = pm(x), loss_fn(alone(x), x)
    loss.backward()
    expected.backward()
    return max(abs(loss.item() - expected.item()), gap(pm, alone))


def test_tuples_and_a_loss_of_ones_own(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert max(worker_pools(3).run(other_batches)) < 1e-6


def measured_first() -> tuple[float, tuple[str, ...]]:
    """No plan and no cluster: the devices are measured and a plan is made."""
    alone, model = net(), net()
    pm = lopsided.parallelize(model, batch_of(), measure_s=2)
    loss, expected = pm(**batch_of()), alone(**batch_of())
    loss.backward()
    expected.backward()
    assert pm.world.place < 0 or gap(pm, alone) < 1e-9
    return abs(loss.item() - expected.item()), pm.plan.cluster.device_names


def test_without_a_plan_the_devices_are_measured(worker_pools: Callable[[int], WorkerPool]) -> None:
    worker_pools(2).run(measured_first)
    found = worker_pools(2).run(measured_first)  # as often as one likes
    assert max(error for error, _ in found) < 1e-9
    assert found[0][1] == found[1][1]
    assert len(found[0][1]) == 2


def on_meta(kind: str) -> tuple[dict[str, float], int, int]:
    with torch.device("meta"):
        model = Net()
    plan = planned(net(torch.float32), kind)
    pm = lopsided.parallelize(model, batch_of(), plan=plan, seed=3)
    pm(**batch_of()).backward()
    full = lopsided.full_state_dict(pm)
    held = sum(p.numel() for p in pm.parameters())
    return (
        {name: value.double().sum().item() for name, value in full.items()},
        held,
        sum(p.numel() for p in model.parameters()),
    )


def test_a_model_on_meta_is_initialised_alike_whatever_the_plan(worker_pools: Callable[[int], WorkerPool]) -> None:
    whole, cut = worker_pools(3).run(on_meta, "dp"), worker_pools(3).run(on_meta, "zero")
    assert all(sums == whole[0][0] for sums, *_ in (*whole, *cut))
    elements = sum(parameter.numel() for parameter in net().parameters())
    assert all(held == elements for _, held, _ in whole)
    assert all(held < elements for _, held, _ in cut)
