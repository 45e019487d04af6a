"""Habits of training scripts that would go wrong without a word on pieces: right, or refused in words."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lopsided
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import World
from lopsided.runtime.calls.last_loss import LastLoss, NotFiniteWarning
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parameters import initial
from lopsided.runtime.parameters.initial import take_first_values
from tests.support.small_net import HERE, Net, Products, batch_of, both, gap, net
from tests.support.small_net import planned as planned_net
from tests.support.two_matrices import numbers, planned, products, small, told

Pools = Callable[[int], WorkerPool]


# Optimizers that do not do the same on every rank


def _other_rate(pm: Parallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 if pm.world.rank else 0.2
    optimizer.step()


def _no_step(pm: Parallel, optimizer: torch.optim.Optimizer) -> None:
    if pm.world.rank != 1:
        optimizer.step()


def decided_by_rank(decides: Callable[[Parallel, torch.optim.Optimizer], None]) -> str:
    _, pm = both()
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    try:
        for k in range(3):
            pm(**batch_of(k)).backward()
            optimizer.step() if k == 0 else decides(pm, optimizer)
    except lopsided.LopsidedError as error:
        return f"{pm._forwards} {error}"
    return ""


@pytest.mark.parametrize(
    ("decides", "told"),
    [(_other_rate, "SGD lr=0.2"), (_no_step, "after 1 steps")],
)
def test_ranks_whose_optimizers_differ_are_told(worker_pools: Pools, decides: Any, told: str) -> None:
    for text in worker_pools(3).run(decided_by_rank, decides):
        assert text.startswith("3 ranks do not do the same: optimizers is after")
        assert told in text
        assert "same learning rate on every rank" in text


# Batch norms that ask the other processes


class Synchronised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), target)


def synchronised() -> float:
    """As scripts for DistributedDataParallel convert them. What is captured is that of the whole batch, once."""
    torch.manual_seed(0)
    alone = Synchronised().double()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    draw = torch.Generator().manual_seed(1)
    x, target = torch.randn(10, 4, generator=draw).double(), torch.randint(0, 5, (10,), generator=draw)
    pm = lopsided.parallelize(model, (x, target), plan=planned_net(alone, batch=(x, target)))
    worst = []
    for _ in range(2):
        for one in (alone, pm):
            one.zero_grad()
        found, expected = pm(x, target), alone(x, target)
        found.backward()
        expected.backward()
        worst += [(found - expected).abs().item(), gap(pm, alone)]
    buffers = zip(lopsided.full_state_dict(pm).items(), alone.state_dict().items(), strict=True)
    return max(*worst, *((a - b).abs().max().item() for (_, a), (_, b) in buffers))


def test_synchronised_batch_norm_is_that_of_the_batch(worker_pools: Pools) -> None:
    assert max(worker_pools(3).run(synchronised)) < 1e-9


# A model that is changed afterwards


def _exchange_the_head(pm: Parallel) -> None:
    pm.down = nn.Linear(12, 8)


def _exchange_inside(pm: Parallel) -> None:
    pm._model[0].bn = nn.BatchNorm1d(8)


def _add_an_adapter(pm: Parallel) -> None:
    pm.get_submodule("up").register_module("lora", nn.Linear(8, 12))


def _add_a_parameter(pm: Parallel) -> None:
    pm.get_submodule("norm").register_parameter("scale", nn.Parameter(torch.ones(8)))


def _add_a_metric(pm: Parallel) -> None:
    pm.metric = nn.Identity()


CHANGES = {
    _exchange_the_head: "the module down was replaced after parallelize",
    _exchange_inside: "the module bn was replaced after parallelize",
    _add_an_adapter: "the module up.lora was added after parallelize",
    _add_a_parameter: "the parameter norm.scale was added after parallelize",
    _add_a_metric: "",
}


def changed_after(change: Callable[[Parallel], None]) -> str:
    _, pm = both("zero")
    pm(**batch_of()).backward()
    change(pm)
    return told(lambda: pm(**batch_of()))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_is_changed_afterwards(worker_pools: Pools, change: Callable[[Parallel], None]) -> None:
    for said in worker_pools(3).run(changed_after, change):
        assert said.startswith(CHANGES[change])
        assert bool(said) == bool(CHANGES[change])
        assert not said or "  do  " in said


# A loss that is no number


def skip_the_batch(on_nan: str) -> tuple[float, int, int]:
    """A script that skips such a batch goes on as if it had not been there."""
    alone, pm = small(on_nan=on_nan)
    steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, pm)]
    skipped = 0
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", NotFiniteWarning)
        for k in range(3):
            for model, optimizer in zip((alone, pm), steps, strict=True):
                x = numbers(k)
                x[-1] = float("inf") if k == 1 else x[-1]  # in the part of one rank
                loss = model(x)
                if not loss.isfinite():
                    skipped += 1
                    continue
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return gap(pm, alone, gradients=False), skipped, len([w for w in heard if w.category is NotFiniteWarning])


@pytest.mark.parametrize("on_nan", ["warn", "ignore"])
def test_a_script_may_skip_a_batch(worker_pools: Pools, on_nan: str) -> None:
    for off, skipped, heard in worker_pools(3).run(skip_the_batch, on_nan):
        assert off < 1e-12
        assert skipped == 2
        assert heard == (on_nan == "warn")


def test_otherwise_a_loss_that_is_no_number_ends_the_run(worker_pools: Pools) -> None:
    for said in worker_pools(3).run(stopped):
        assert said.startswith("the loss is nan in forward pass 1")
        assert 'on_nan="warn"' in said


def stopped() -> str:
    _, pm = small()
    return told(lambda: pm(numbers() * float("nan")))


def test_what_to_do_about_it_is_one_of_three() -> None:
    with pytest.raises(lopsided.LopsidedError, match="on_nan is 'skip'"):
        LastLoss("rank 0", "skip")


# An optimizer that is built first


def optimizer_first(cut: bool, late: bool) -> tuple[float, list[float], list[bool]]:
    """Groups, options, schedule and zero_grad of an optimizer that was made for the model's own parameters."""
    alone, model = products(), products()
    pairs = []
    for one in (alone, model):
        groups = [{"params": [one.a], "weight_decay": 0.1}, {"params": [one.b]}]
        if late and one is model:  # of a list of parameters that was made before
            pm = lopsided.parallelize(model, (numbers(),), plan=planned(cut))
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        pairs.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)))
    if not late:
        pm = lopsided.parallelize(model, (numbers(),), plan=planned(cut))
    for k in range(3):
        for one, (optimizer, schedule) in zip((alone, pm), pairs, strict=True):
            optimizer.zero_grad()
            one(numbers(k)).backward()
            optimizer.step()
            schedule.step()
    optimizer = pairs[1][0]
    held = [any(p is q for q in pm.parameters()) for group in optimizer.param_groups for p in group["params"]]
    return gap(pm, alone, gradients=False), [group["weight_decay"] for group in optimizer.param_groups], held


@pytest.mark.parametrize(("cut", "late"), [(True, False), (False, False), (True, True)])
def test_an_optimizer_that_is_built_first(worker_pools: Pools, cut: bool, late: bool) -> None:
    for off, decays, held in worker_pools(3).run(optimizer_first, cut, late):
        assert off < 1e-12
        assert decays == [0.1, 0.01]
        assert held == [True, True]


def optimizer_with_state() -> str:
    model = products()
    optimizer = torch.optim.AdamW(model.parameters())
    model(numbers()).backward()
    optimizer.step()
    return told(lambda: lopsided.parallelize(model, (numbers(),), plan=planned()))


def test_an_optimizer_that_has_a_state(worker_pools: Pools) -> None:
    for said in worker_pools(3).run(optimizer_with_state):
        assert said.startswith("AdamW has a state of the whole parameter a")
        assert "build it after parallelize" in said


# Hooks on parameters


def with_hooks(kind: str, first: bool) -> tuple[float, float, list[str]]:
    """A clamp on two, a step in the backward pass on one; set before `parallelize` or after; one is removed again."""
    calls: list[str] = []

    def set_on(model: nn.Module, told: list[str]) -> Any:
        found = dict(model.named_parameters())
        found["embed.weight"].register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        found["up.weight"].register_hook(lambda g: told.append("up") or g * 3)

        def step(p: Tensor) -> None:
            told.append("norm")
            p.data.sub_(0.1 * p.grad)

        found["norm.bias"].register_post_accumulate_grad_hook(step)
        return found["up.weight"].register_hook(lambda g: g + 7)

    alone, model = net(), net()
    plan = planned_net(net(), kind)
    removed = set_on(model, calls) if first else None
    pm = lopsided.parallelize(model, batch_of(), plan=plan, bucket_bytes=800)
    (removed or set_on(pm, calls)).remove()
    set_on(alone, []).remove()
    for k in range(3):  # gradients add up
        for one in (alone, pm):
            one(**batch_of(k)).backward()
    return gap(pm, alone), gap(pm, alone, gradients=False), calls


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["dp", "zero"])
def test_hooks_on_parameters(worker_pools: Pools, kind: str, first: bool) -> None:
    for gradients, parameters, calls in worker_pools(3).run(with_hooks, kind, first):
        assert gradients < 1e-12
        assert parameters < 1e-12
        assert sorted(calls) == ["norm"] * 3 + ["up"] * 3


def hook_without_sync() -> tuple[str, str]:
    _, pm = small()
    mask = torch.ones(6, 9, dtype=torch.float64)
    handle = pm.get_parameter("a").register_hook(lambda g: g * mask)
    with pm.no_sync():
        loss = pm(numbers())
        kept = told(loss.backward)
    loss = pm(numbers())
    masked = told(loss.backward)
    handle.remove()
    pm(numbers()).backward()
    return kept, masked


def test_hooks_that_cannot_be_right(worker_pools: Pools) -> None:
    for kept, masked in worker_pools(3).run(hook_without_sync):
        assert kept.startswith("a has a hook, and its gradient is not complete under no_sync()")
        assert masked.startswith("a hook of a failed on this process's piece of the gradient")


# Weights that differ by rank


def other_seeds(kind: str) -> tuple[float, float, float]:
    """`torch.manual_seed(seed + rank)`, and a buffer that only rank 0 has moved."""
    alone = net()
    torch.manual_seed(dist.get_rank())
    model = Net().to(HERE, torch.float64)
    if dist.get_rank() == 0:
        model.bn.running_mean.fill_(0.25)
    alone.bn.running_mean.fill_(0.25)
    pm = lopsided.parallelize(model, batch_of(), plan=planned_net(net(), kind))
    before = gap(pm, alone, gradients=False)
    loss, expected = pm(**batch_of()), alone(**batch_of())
    expected.backward()
    loss.backward()
    return before, gap(pm, alone), (pm.get_buffer("bn.running_mean") - alone.bn.running_mean).abs().max().item()


@pytest.mark.parametrize("kind", ["dp", "zero"])
def test_the_weights_of_rank_0_count(worker_pools: Pools, kind: str) -> None:
    for parameters, gradients, buffers in worker_pools(3).run(other_seeds, kind):
        assert parameters == 0
        assert max(gradients, buffers) < 1e-12


def in_chunks() -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """What differs is sent, in several parts, whatever its dtype and layout."""
    rank = dist.get_rank()
    model = nn.Module()
    wide = torch.arange(12.0).view(3, 4).add(rank).to(torch.bfloat16)
    model.register_buffer("turned", wide.t())
    model.register_buffer("number", torch.tensor(rank))
    model.register_buffer("same", torch.ones(5))
    model.register_buffer("nothing", torch.ones(0))
    model.weight = nn.Parameter(torch.full((7, 3), float(rank)))
    world = World(rank, dist.get_world_size(), (0, 1, 2), (0, 1, 2), torch.device("cpu"))
    size, initial._CHUNK_BYTES = initial._CHUNK_BYTES, 8
    try:
        found = take_first_values(model, world)
    finally:
        initial._CHUNK_BYTES = size
    right = torch.equal(model.turned, torch.arange(12.0).view(3, 4).t().bfloat16()) and not model.weight.any()
    return found, take_first_values(model, world), bool(right and model.number == 0)


def test_what_differs_is_sent_in_chunks(worker_pools: Pools) -> None:
    for found, again, right in worker_pools(3).run(in_chunks):
        assert found == ("weight", "turned", "number")
        assert again == ()
        assert right


def built_on_meta_by_some() -> str:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = Products()
    world = World(dist.get_rank(), dist.get_world_size(), (0, 1, 2), (0, 1, 2), torch.device("cpu"))
    return told(lambda: take_first_values(model, world))


def test_models_that_are_not_built_alike(worker_pools: Pools) -> None:
    for said in worker_pools(3).run(built_on_meta_by_some):
        assert "the number of those on meta is 0 on rank 0, 2 on ranks 1, 2" in said


# Other trainers around it


def wrapped_again() -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    found = []
    wraps: list[Callable[[Parallel], object]] = [
        DistributedDataParallel,
        lambda pm: FullyShardedDataParallel(pm, device_id=torch.device("cpu")),
        fully_shard,
        lambda pm: DataParallel(pm).module._replicate_for_data_parallel(),  # as it does with several GPUs
    ]
    for wrap in wraps:
        _, pm = small(cut=False)
        found.append(told(lambda wrap=wrap, pm=pm: wrap(pm)))  # type: ignore[misc]
    return found


def test_other_trainers_around_it_are_refused(worker_pools: Pools) -> None:
    names = ("DistributedDataParallel", "FSDP", "FSDP", "DataParallel")
    for said in worker_pools(3).run(wrapped_again):
        for name, one in zip(names, said, strict=True):
            assert one.startswith(f"{name} around a parallel module")
            assert f"leave {name} out" in one


def wrapped_before() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    _, pm = small(cut=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models: list[nn.Module] = [
        DistributedDataParallel(net()),
        nn.Sequential(DataParallel(net())),
        fully_shard(net(), mesh=mesh),  # type: ignore[list-item]
        pm,
    ]
    found = [told(lambda model=model: lopsided.parallelize(model, batch_of(), plan=pm.plan)) for model in models]  # type: ignore[misc]
    around = DistributedDataParallel(nn.Sequential(pm))
    return [*found, told(lambda: around(numbers()))]


def test_a_model_that_is_distributed_already_is_refused(worker_pools: Pools) -> None:
    expected = [
        "the model is a DistributedDataParallel already",
        "its part 0 is a DataParallel already",
        "the model is a FSDP already",
        "the model is a parallel module already",
        "DistributedDataParallel around a parallel module",
    ]
    for said in worker_pools(3).run(wrapped_before):
        assert all(one.startswith(words) for words, one in zip(expected, said, strict=True)), said
