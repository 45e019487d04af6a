"""Steps with optimizer state in host memory: the same to the last bit, whatever the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lopsided
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.placement import Shares
from lopsided.runtime.checkpoint.checkpoint import load, save
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parameters import host_state
from lopsided.runtime.parameters.host_state import is_on_host, is_under_way, keep_on_host, watch_steps
from lopsided.runtime.parameters.optimizers import is_sliceable
from lopsided.schedule.decisions import OnHost
from tests.support.small_net import THREE, batch_of, net, planned

Pools = Callable[[int], WorkerPool]
Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class CountsInGroup(torch.optim.Optimizer):
    """Counts its steps in the group, as some fused optimizers do, and keeps a tensor of state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.5)
                    p.add_(mean, alpha=-group["lr"] / group["step"])


class LooksAtAll(CountsInGroup):
    """Divides by a norm over all parameters: not one after the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        for grad in grads:
            grad.div_(norm)
        super().step()


class Derived(torch.optim.AdamW):
    """Steps within a step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)
        return found


MAKERS: dict[str, Maker] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02),
    "adamw one by one": lambda ps: torch.optim.AdamW(ps, lr=0.02, foreach=False, amsgrad=True),
    "adam with a tensor lr": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.02), fused=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "groups": lambda ps: torch.optim.AdamW([{"params": ps[:2], "lr": 0.01}, {"params": ps[2:], "weight_decay": 0.1}]),
    "counts in group": CountsInGroup,
    "looks at all": LooksAtAll,
    "derived": lambda ps: Derived(ps, lr=0.02),
}
STEPS = 4


@pytest.fixture(autouse=True)
def _nothing_stays_on_the_host() -> Iterator[None]:
    yield
    host_state._away.clear()


def parameters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((6, 4), (3,), (5, 2), (1,), (8, 8))
    return [nn.Parameter(torch.randn(size, generator=draw, dtype=torch.float64)) for size in sizes]


def gradients(step: int, held: list[nn.Parameter]) -> None:
    draw = torch.Generator().manual_seed(step + 1)
    for p in held:
        p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)


def watched(optimizer: torch.optim.Optimizer) -> None:
    watch_steps(optimizer, is_sliceable=lambda: is_sliceable(optimizer))


def trained(make: Maker, away: slice | None) -> tuple[list[Tensor], list[Tensor], torch.optim.Optimizer]:
    held = parameters()
    optimizer = make(held)
    if away is not None:
        keep_on_host(held[away])
    for step in range(STEPS):
        gradients(step, held)
        if away is not None:
            watched(optimizer)
        optimizer.step()
    state = [v for p in held for _, v in sorted(optimizer.state.get(p, {}).items()) if isinstance(v, Tensor)]
    return [p.detach() for p in held], state, optimizer


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("away", [slice(None), slice(1, 3)], ids=["all", "some"])
def test_steps_are_the_same_to_the_last_bit(name: str, away: slice) -> None:
    here, state, before = trained(MAKERS[name], None)
    there, fetched, after = trained(MAKERS[name], away)
    assert all(map(torch.equal, here, there))
    assert all(map(torch.equal, state, fetched))
    assert [len(group["params"]) for group in after.param_groups] == [len(g["params"]) for g in before.param_groups]
    for mine, other in zip(after.param_groups, before.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}


def test_which_optimizers_may_update_some_parameters_after_the_others() -> None:
    found = {name: is_sliceable(make(parameters())) for name, make in MAKERS.items()}
    assert [name for name, sliceable in found.items() if not sliceable] == ["looks at all"]


def test_state_is_fetched_a_slice_at_a_time_into_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps it is where it was, and never is more than a slice of it on the device."""
    held = parameters()
    optimizer = torch.optim.AdamW(held)
    keep_on_host(held)
    fetched: list[int] = []
    fetch = host_state.HostSteps._fetch

    def noted(self: Any, optimizer: Any, part: Any) -> None:
        before = {id(v) for s in optimizer.state.values() for v in s.values()}
        fetch(self, optimizer, part)
        new = [v for s in optimizer.state.values() for v in s.values() if id(v) not in before]
        fetched.append(sum(v.nbytes for v in new))

    monkeypatch.setattr(host_state.HostSteps, "_fetch", noted)
    for step in range(2):
        gradients(step, held)
        watched(optimizer)
        optimizer.step()
    homes = [optimizer.state[p]["exp_avg"] for p in held]
    fetched.clear()
    gradients(2, held)
    watched(optimizer)
    optimizer.step()
    assert all(
        a is b for a, b in zip(homes, (optimizer.state[p]["exp_avg"] for p in held), strict=True) if a.numel() > 1
    )
    whole = 2 * sum(p.nbytes for p in held if p.numel() > 1)
    assert sum(fetched) == whole
    assert max(fetched) == 2 * max(p.nbytes for p in held)


def test_hooks_of_the_script_see_whole_groups() -> None:
    held = parameters()
    optimizer = torch.optim.AdamW(held)
    keep_on_host(held)
    seen: list[tuple[str, int]] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(("before", len(o.param_groups[0]["params"]))))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(("after", len(o.param_groups[0]["params"]))))
    for step in range(2):
        gradients(step, held)
        watched(optimizer)
        optimizer.step()
        if not step:
            optimizer.register_step_pre_hook(lambda o, *_: seen.append(("late", len(o.param_groups[0]["params"]))))
    assert seen == [("before", 5), ("after", 5), ("before", 5), ("late", 5), ("after", 5)]


class Fails(CountsInGroup):
    at = -1

    def step(self, closure: Any = None) -> None:
        if any(p.numel() == 64 for group in self.param_groups for p in group["params"]) and self.at == 0:
            raise ValueError("no more")
        super().step()


def test_a_step_that_fails_gives_groups_back_and_the_next_one_goes_on() -> None:
    held = parameters()
    optimizer = Fails(held)
    keep_on_host(held[:4])  # the one that fails is in the last slice, which is the script's own call
    for step in range(3):
        gradients(step, held)
        optimizer.at = 0 if step == 1 else -1
        watched(optimizer)
        if step == 1:
            with pytest.raises(ValueError, match="no more"):
                optimizer.step()
            assert is_under_way(optimizer)
            host_state.end_failed_steps()
            assert [len(group["params"]) for group in optimizer.param_groups] == [5]
        else:
            optimizer.step()
    assert not is_under_way(optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [5]


def test_state_that_was_loaded_goes_to_the_host() -> None:
    here, _, first = trained(MAKERS["adamw"], None)
    saved = copy.deepcopy(first.state_dict())
    held = [nn.Parameter(p.clone()) for p in here]
    optimizer = torch.optim.AdamW(held, lr=0.02)
    optimizer.load_state_dict(saved)
    loaded = optimizer.state[held[0]]["exp_avg"]
    keep_on_host(held)
    gradients(9, held)
    watched(optimizer)
    optimizer.step()
    assert optimizer.state[held[0]]["exp_avg"] is not loaded
    others = first.param_groups[0]["params"]
    gradients(9, others)
    first.step()
    assert all(map(torch.equal, held, others))


# On processes

AWAY = (OnHost(0),)


def _parallel(away: bool, kind: str, shares: Shares = THREE) -> Parallel:
    model = net()
    plan = planned(model, kind, shares)
    return lopsided.parallelize(model, batch_of(), plan=replace(plan, on_host=AWAY if away else ()), bucket_bytes=800)


def _train(pm: Parallel, optimizer: torch.optim.Optimizer, steps: range, *, by_closure: bool = False) -> list[float]:
    losses = []
    for step in steps:

        def passes(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = pm(**batch_of(step))
            loss.backward()
            return loss

        if by_closure:
            losses.append(float(optimizer.step(passes)))  # type: ignore[arg-type]
        else:
            losses.append(passes().item())
            optimizer.step()
    return losses


def same_steps(kind: str, by_closure: bool) -> list[bool]:
    found = []
    runs = []
    for away in (False, True):
        pm = _parallel(away, kind)
        optimizer = torch.optim.AdamW(pm.parameters(), lr=0.01)
        losses = _train(pm, optimizer, range(3), by_closure=by_closure)
        trained = [name for name, p in pm.named_parameters() if p.requires_grad]
        found.append(all(is_on_host(pm.parameter(name)) == away for name in trained))
        runs.append((losses, [p.detach().clone() for p in pm.parameters()]))
        pm.close()
    found.append(runs[0][0] == runs[1][0])
    found.append(all(map(torch.equal, runs[0][1], runs[1][1])))
    return found


@pytest.mark.parametrize(("kind", "by_closure"), [("dp", False), ("zero", False), ("zero-again", True)])
def test_processes_train_the_same(worker_pools: Pools, kind: str, by_closure: bool) -> None:
    assert all(map(all, worker_pools(3).run(same_steps, kind, by_closure)))


def resumed(folder: str, away: bool, shares: Shares, saves: bool) -> tuple[list[float], bool]:
    pm = _parallel(away, "zero", shares)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.01)
    if not saves:
        load(pm, optimizer, folder)
        # What was read for parameters whose state is on the host has not been on the device.
        big = [v for s in optimizer.state.values() for v in s.values() if v.numel() > 1]
        there = all(v.device.type == "cpu" for v in big) and bool(big or 0.0 in shares.of("state"))
    losses = _train(pm, optimizer, range(2) if saves else range(2, 4))
    if saves:
        save(pm, optimizer, folder)
        losses += _train(pm, optimizer, range(2, 4))
        there = True
    pm.close()
    return losses, there


OTHER = Shares((0.2, 0.5, 0.3), named=(("state", (0.6, 0.1, 0.3)),))


@pytest.mark.parametrize("saved_away", [True, False])
def test_a_checkpoint_goes_on_wherever_state_lies(worker_pools: Pools, tmp_path: Path, saved_away: bool) -> None:
    folder = str(tmp_path / "saved")
    through = worker_pools(3).run(resumed, folder, saved_away, THREE, True)[0][0]
    again = worker_pools(3).run(resumed, folder, not saved_away, OTHER, False)
    assert all(there for _, there in again)
    assert again[0][0] == pytest.approx(through[2:], rel=1e-9)


def moved() -> tuple[list[float], list[float]]:
    from lopsided.runtime.live.moving import with_shares

    told = []
    for move in (False, True):
        pm = _parallel(True, "zero")
        optimizer = torch.optim.AdamW(pm.parameters(), lr=0.01)
        losses = _train(pm, optimizer, range(2))
        if move:
            assert pm.replan(replace(with_shares(pm.plan, (0.3, 0.3, 0.4)), shares=OTHER))
        losses += _train(pm, optimizer, range(2, 4))
        told.append(losses)
        pm.close()
    return told[0], told[1]


def test_pieces_move_with_state_on_the_host(worker_pools: Pools) -> None:
    for stayed, went in worker_pools(3).run(moved):
        assert went == pytest.approx(stayed, rel=1e-9)
