"""Habits of training scripts that would go wrong without a word on pieces: right, or refused in words."""

from __future__ import annotations

import copy
import math
import pickle
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import World
from lopsided.ir.placement import Shares
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.runtime import first_values
from lopsided.runtime.first_values import take_first_values
from lopsided.runtime.last_loss import LastLoss, NotFiniteWarning
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.piece_tensors import Of, _parameter
from tests.runtime.test_parallel import HERE, THREE, Net, Products, batch_of, both, gap, net
from tests.runtime.test_parallel import planned as planned_net
from tests.support.jobs import cluster_of, plan_of, prices_of

Crews = Callable[[int], WorkerPool]


def numbers(seed: int = 0) -> Tensor:
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(seed)).to(HERE, torch.float64)


def products(seed: int = 0) -> Products:
    torch.manual_seed(seed)
    return Products().to(HERE, torch.float64)


def planned(cut: bool = True) -> Plan:
    book = derive_rules(capture(products(), (numbers(),)))
    program = data_parallel(book, prices_of(book.graph, THREE))
    return plan_of(stored_cut(program) if cut else program, THREE)


def small(*, cut: bool = True, **how: Any) -> tuple[Products, Parallel]:
    """Two matrices on one device, and stored in pieces (or whole) by three processes."""
    return products(), lopsided.parallelize(products(), (numbers(),), plan=planned(cut), **how)


def told(job: Callable[[], object]) -> str:
    """What is refused; "" if nothing is."""
    try:
        job()
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


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
def test_a_model_that_is_changed_afterwards(crews: Crews, change: Callable[[Parallel], None]) -> None:
    for said in crews(3).run(changed_after, change):
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
def test_a_script_may_skip_a_batch(crews: Crews, on_nan: str) -> None:
    for off, skipped, heard in crews(3).run(skip_the_batch, on_nan):
        assert off < 1e-12
        assert skipped == 2
        assert heard == (on_nan == "warn")


def test_otherwise_a_loss_that_is_no_number_ends_the_run(crews: Crews) -> None:
    for said in crews(3).run(stopped):
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
def test_an_optimizer_that_is_built_first(crews: Crews, cut: bool, late: bool) -> None:
    for off, decays, held in crews(3).run(optimizer_first, cut, late):
        assert off < 1e-12
        assert decays == [0.1, 0.01]
        assert held == [True, True]


def optimizer_with_state() -> str:
    model = products()
    optimizer = torch.optim.AdamW(model.parameters())
    model(numbers()).backward()
    optimizer.step()
    return told(lambda: lopsided.parallelize(model, (numbers(),), plan=planned()))


def test_an_optimizer_that_has_a_state(crews: Crews) -> None:
    for said in crews(3).run(optimizer_with_state):
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
def test_hooks_on_parameters(crews: Crews, kind: str, first: bool) -> None:
    for gradients, parameters, calls in crews(3).run(with_hooks, kind, first):
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


def test_hooks_that_cannot_be_right(crews: Crews) -> None:
    for kept, masked in crews(3).run(hook_without_sync):
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
def test_the_weights_of_rank_0_count(crews: Crews, kind: str) -> None:
    for parameters, gradients, buffers in crews(3).run(other_seeds, kind):
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
    size, first_values._CHUNK_BYTES = first_values._CHUNK_BYTES, 8
    try:
        found = take_first_values(model, world)
    finally:
        first_values._CHUNK_BYTES = size
    right = torch.equal(model.turned, torch.arange(12.0).view(3, 4).t().bfloat16()) and not model.weight.any()
    return found, take_first_values(model, world), bool(right and model.number == 0)


def test_what_differs_is_sent_in_chunks(crews: Crews) -> None:
    for found, again, right in crews(3).run(in_chunks):
        assert found == ("weight", "turned", "number")
        assert again == ()
        assert right


def built_on_meta_by_some() -> str:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = Products()
    world = World(dist.get_rank(), dist.get_world_size(), (0, 1, 2), (0, 1, 2), torch.device("cpu"))
    return told(lambda: take_first_values(model, world))


def test_models_that_are_not_built_alike(crews: Crews) -> None:
    for said in crews(3).run(built_on_meta_by_some):
        assert "the number of those on meta is 0 on rank 0, 2 on ranks 1, 2" in said


# Calls that all ranks must make, made by some


def _save(pm: Parallel, folder: str) -> object:
    return lopsided.save_checkpoint(pm, None, folder)


def _load(pm: Parallel, folder: str) -> object:
    return lopsided.load_checkpoint(pm, None, folder)


def _clip(pm: Parallel, folder: str) -> object:
    return lopsided.clip_grad_norm_(pm, 1.0)


def _full(pm: Parallel, folder: str) -> object:
    return lopsided.full_state_dict(pm)


def _fill(pm: Parallel, folder: str) -> object:
    return lopsided.load_full_state_dict(pm, {})


def _record(pm: Parallel, folder: str) -> object:
    return pm.record()


CALLS = {
    _save: "save_checkpoint",
    _load: "load_checkpoint",
    _clip: "clip_grad_norm_",
    _full: "full_state_dict",
    _fill: "load_full_state_dict",
    _record: "pm.record",
}


def one_rank_only(call: Callable[[Parallel, str], object], folder: str, timeout_s: float) -> str:
    """Rank 0 makes a call, and the others go on with the next step."""
    _, pm = small(timeout_s=timeout_s)
    pm(numbers()).backward()
    said = told(lambda: call(pm, folder) if dist.get_rank() == 0 else pm(numbers()))
    # The others look for the reason before this rank says goodbye.
    dist.barrier()
    pm.close()
    return said


@pytest.mark.parametrize("call", CALLS, ids=CALLS.values())
def test_a_call_that_one_rank_makes(crews: Crews, call: Callable[[Parallel, str], object], tmp_path: Path) -> None:
    # A timeout of its own, so that no other test has the groups that are broken off here.
    timeout_s = 4 + [*CALLS].index(call) / 100
    for said in crews(3).run(one_rank_only, call, str(tmp_path), timeout_s):
        assert said.startswith(
            f"ranks do not do the same: the call is {CALLS[call]} on rank 0, a forward pass on ranks 1, 2"
        )
        assert "`if rank == 0`" in said or "see the output of rank 0" in said


def nobody_else_comes(folder: str) -> tuple[str, float]:
    """Rank 0 saves, the others do something else for longer than the timeout."""
    _, pm = small(timeout_s=2)
    began = time.monotonic()
    said = ""
    if dist.get_rank() == 0:
        said = told(lambda: lopsided.save_checkpoint(pm, None, folder))
        dist.distributed_c10d._get_default_store().set(f"waited {folder}", "")
    else:
        dist.distributed_c10d._get_default_store().wait([f"waited {folder}"])
    pm.close()
    return said, time.monotonic() - began


def test_a_call_that_the_others_never_make(tmp_path: Path) -> None:
    with WorkerPool(3, timeout_s=120) as crew:
        (said, waited_s), *_ = crew.run(nobody_else_comes, str(tmp_path))
    assert "rank 1" in said
    assert "in the training script" in said
    assert "waiting for save_checkpoint" in said
    assert waited_s < 25


def for_two_of_three() -> Plan:
    """A plan that leaves the third process without a device."""
    two = Shares((0.7, 0.3), named=(("state", (0.5, 0.5)),))
    book = derive_rules(capture(products(), (numbers(),)))
    plan = plan_of(stored_cut(data_parallel(book, prices_of(book.graph, two))), two)
    three = cluster_of(3)
    return replace(plan, cluster=three, on=three.without_device(three.device_names[2]))


def bystander_elsewhere(folder: str) -> tuple[str, str]:
    """A rank without a device clips where the others save."""
    pm = lopsided.parallelize(products(), (numbers(),), plan=for_two_of_three(), timeout_s=31)
    pm(numbers()).backward()
    alike = told(lambda: lopsided.clip_grad_norm_(pm, 1.0))
    if pm.world.takes_part:
        said = told(lambda: lopsided.save_checkpoint(pm, None, folder))
    else:
        said = told(lambda: lopsided.clip_grad_norm_(pm, 1.0))
    pm.close()
    return alike, said


def test_ranks_without_a_device_are_asked_too(crews: Crews, tmp_path: Path) -> None:
    for alike, said in crews(3).run(bystander_elsewhere, str(tmp_path)):
        assert alike == ""
        assert "the call is clip_grad_norm_ on rank 2, save_checkpoint on ranks 0, 1" in said


# Norms and sums over pieces


def norms_by_hand(cut: bool) -> dict[str, float]:
    """What scripts compute of gradients and parameters, each against one device."""
    alone, pm = small(cut=cut)
    alone(numbers()).backward()
    pm(numbers()).backward()

    def by_hand(model: nn.Module) -> dict[str, Any]:
        grads = [p.grad for p in model.parameters()]
        first = next(iter(model.parameters()))
        return {
            "get_total_norm": nn.utils.get_total_norm(grads),
            "get_total_norm, 1": nn.utils.get_total_norm(grads, norm_type=1.0),
            "get_total_norm, inf": nn.utils.get_total_norm(grads, norm_type=math.inf),
            "one by one": nn.utils.get_total_norm(grads, foreach=False),
            "squares": sum(g.norm() ** 2 for g in grads) ** 0.5,
            "sums of squares": sum((g**2).sum() for g in grads),
            "data": sum(p.grad.detach().data.norm(2).item() ** 2 for p in model.parameters()),
            "flat": torch.linalg.vector_norm(first.grad.flatten(), 3),
            "double": first.grad.float().double().pow(2).mean(),
            "largest": torch.max(first.grad.abs()),
            "smallest": first.min(),
            "norm inf": first.norm(math.inf),
            "norm 0": first.norm(0),
            "any": first.grad.isnan().any(),
            "all": torch.isfinite(first.grad).all(),
            "dot": torch.dot(first.view(-1), first.grad.view(-1)),
            "positive": (first > 0).sum(),
            "distance": (first - 0.5 * first.grad).norm(),
            "joined": torch.cat([first.view(-1), first.grad.view(-1)]).norm(),
            "clipped": nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        }

    expected, found = by_hand(alone), by_hand(pm)
    off = {name: abs(float(found[name]) - float(expected[name])) for name in expected}
    return off | {"gradients": gap(pm, alone)}


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_norms_by_hand_are_those_of_the_whole(crews: Crews, cut: bool) -> None:
    for off in crews(3).run(norms_by_hand, cut):
        assert {name: error for name, error in off.items() if not error < 1e-7} == {}


def sharpness_aware() -> float:
    """SAM: a step uphill by the norm of the gradient, the gradient there, and back; with a penalty on weights."""
    alone, pm = small()
    for model in (alone, pm):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for k in range(2):
            model(numbers(k)).backward()
            norm = torch.norm(torch.stack([(p.abs() * p.grad).norm(p=2) for p in model.parameters()]), p=2)
            old = {p: p.data.clone() for p in model.parameters()}
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.pow(2) * p.grad, alpha=0.05 / norm.item())
            optimizer.zero_grad()
            (model(numbers(k)) + 0.1 * sum(p.norm() + p.abs().sum() for p in model.parameters())).backward()
            for p, data in old.items():
                p.data = data
            optimizer.step()
            optimizer.zero_grad()
    return gap(pm, alone, gradients=False)


def test_sharpness_aware_minimisation(crews: Crews) -> None:
    assert max(crews(3).run(sharpness_aware)) < 1e-9


def not_of_pieces() -> list[str]:
    _, pm = small()
    pm(numbers()).backward()
    a, b = pm.parameters()
    whole = torch.ones(3, dtype=torch.float64)
    cut = pm.pieces["a"].placement.dim
    along = a.norm(dim=1 - cut)
    jobs: list[Callable[[], object]] = [
        lambda: a.norm(dim=cut),
        lambda: a.grad.std(),
        lambda: a.grad.mean(dim=(0, 1)),
        lambda: torch.linalg.norm(a, "nuc"),
        lambda: torch.cat([b.view(-1), whole]).norm(),
        lambda: torch.ones(6, 9, dtype=torch.float64).lerp_(a.data, 0.1),
        lambda: 0.9 * torch.ones(9, 3, dtype=torch.float64) + 0.1 * b.data,
    ]
    copied = pickle.loads(pickle.dumps(pm.state_dict()["a"]))
    assert type(copied) is Tensor
    assert along.shape == a.shape[cut : cut + 1]
    assert repr(a).startswith("Parameter containing")
    return [told(job) for job in jobs]


def test_what_cannot_be_put_together_is_refused(crews: Crews) -> None:
    for said in crews(3).run(not_of_pieces):
        assert all(said)
        assert said[0].startswith("norm() would be of this process's piece of a alone: it goes along dim")
        assert "it cannot be put together from pieces" in said[1]
        assert "there is no 'nuc' norm of a from its pieces" in said[3]
        assert "it joins pieces with whole tensors" in said[4]
        assert said[5].startswith("lerp_ combines a piece of a, [")
        assert "with a whole tensor, [9, 3]" in said[6]


def test_a_piece_of_one_row_is_not_broadcast_over_the_whole() -> None:
    of = Of("w", None, lambda call: None, 24, 0, (1, 8))  # type: ignore[arg-type]
    row = _parameter(torch.ones(1, 8), False, of)
    assert "combines a piece of w, [1, 8], with a whole tensor, [3, 8]" in told(lambda: torch.ones(3, 8).mul_(row))
    assert (row * torch.ones(1, 8)).shape == (1, 8)


def switched_by_hand() -> float:
    """nanoGPT's accumulation: the switch of DistributedDataParallel in place of `no_sync`."""
    alone, pm = small()
    for k in range(3):
        pm.require_backward_grad_sync = k == 2
        for model in (alone, pm):
            model(numbers(k)).backward()
        assert pm.steps_done == (k == 2)
    return gap(pm, alone)


def test_the_switch_of_ddp_for_accumulation(crews: Crews) -> None:
    assert max(crews(3).run(switched_by_hand)) < 1e-12


# Mixed precision


def overflow() -> tuple[float, list[float], list[bool]]:
    """A gradient that overflows in the piece of one rank: all skip the step, and halve the scale."""
    alone, pm = small()
    scales, moved = [], []
    for model in (alone, pm):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for k in range(4):
            before = [p.detach().clone() for p in model.parameters()]
            scaler.scale(model(numbers(k))).backward()
            if k == 1:
                first = next(iter(model.parameters()))
                last = first.grad.view(-1)[-1:]
                if model is alone or dist.get_rank() == 2:
                    last.fill_(math.inf)
            if k != 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved.append(any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)))
            scales.append(scaler.get_scale())
    return gap(pm, alone, gradients=False), scales, moved


def test_a_gradient_that_overflows_on_one_rank(crews: Crews) -> None:
    for off, scales, moved in crews(3).run(overflow):
        assert off < 1e-9
        assert scales[:4] == scales[4:] == [8.0, 4.0, 4.0, 8.0]
        assert moved == [True, False, True, True] * 2


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


def test_other_trainers_around_it_are_refused(crews: Crews) -> None:
    names = ("DistributedDataParallel", "FSDP", "FSDP", "DataParallel")
    for said in crews(3).run(wrapped_again):
        for name, one in zip(names, said, strict=True):
            assert one.startswith(f"{name} around a parallel module")
            assert f"leave {name} out" in one


# Copies, and averages of weights


class ModelEma:
    """As image models are averaged: a copy, whose state follows that of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mine.lerp_(theirs, 0.25) if mine.is_floating_point() else mine.copy_(theirs)


def averaged(kind: str) -> tuple[list[float], float, float]:
    """Losses of averages in evaluation, and where the model and a copy that is trained itself are in the end."""
    found, models, copies = [], [], []
    for model in both(kind):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        swa, ema = torch.optim.swa_utils.AveragedModel(model), ModelEma(model)
        for k in range(3):
            model(**batch_of(k)).backward()
            optimizer.step()
            optimizer.zero_grad()
            swa.update_parameters(model)
            ema.update(model)
        trained = copy.deepcopy(model)
        step = torch.optim.SGD(trained.parameters(), lr=0.1)
        trained(**batch_of(4)).backward()
        step.step()
        with torch.no_grad():
            found.append([swa.eval()(**batch_of(5)).item(), ema.module(**batch_of(5)).item()])
        models.append(model)
        copies.append(trained)
    off = [abs(one - other) for one, other in zip(*found, strict=True)]
    return off, gap(models[1], models[0], gradients=False), gap(copies[1], copies[0], gradients=False)


@pytest.mark.parametrize("kind", ["dp", "zero"])
def test_copies_and_averages_of_weights(crews: Crews, kind: str) -> None:
    for losses, model, trained in crews(3).run(averaged, kind):
        assert max(*losses, model, trained) < 1e-9
