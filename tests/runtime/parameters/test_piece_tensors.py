"""Pieces know that they are pieces: norms, scaled gradients, copies and averages are those of the whole."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lopsided.comm.worker_pool import WorkerPool
from lopsided.runtime.parameters.piece_tensors import Of, PieceWarning, _parameter
from tests.support.small_net import batch_of, both, gap
from tests.support.two_matrices import numbers, small, told

Pools = Callable[[int], WorkerPool]


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
            "what is a number": first.log().nansum(),
            "distance": (first - 0.5 * first.grad).norm(),
            "joined": torch.cat([first.view(-1), first.grad.view(-1)]).norm(),
            "clipped": nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        }

    expected, found = by_hand(alone), by_hand(pm)
    off = {name: abs(float(found[name]) - float(expected[name])) for name in expected}
    return off | {"gradients": gap(pm, alone)}


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_norms_by_hand_are_those_of_the_whole(worker_pools: Pools, cut: bool) -> None:
    for off in worker_pools(3).run(norms_by_hand, cut):
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


def test_sharpness_aware_minimisation(worker_pools: Pools) -> None:
    assert max(worker_pools(3).run(sharpness_aware)) < 1e-9


def compiled_steps() -> float:
    """Steps that torch.compile has seen, by optimizers that are elementwise."""
    alone, pm = small()
    for kind in (torch.optim.SGD, torch.optim.Adam):
        for model in (alone, pm):
            optimizer = kind(model.parameters(), lr=0.1)
            step = torch.compile(optimizer.step, backend="eager")
            for k in range(2):
                model(numbers(k)).backward()
                step()
                optimizer.zero_grad()
    return gap(pm, alone, gradients=False)


def test_a_compiled_step(worker_pools: Pools) -> None:
    assert max(worker_pools(3).run(compiled_steps)) < 1e-9


def closures() -> tuple[float, bool]:
    """Steps that call the loss themselves, with clipping, one of which fails."""
    alone, pm = small()
    for model in (alone, pm):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def again(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(numbers())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            return loss

        def fails(again: Callable[[], Tensor] = again) -> float:
            again()
            raise KeyError("the script's own")

        optimizer.step(again)
        with pytest.raises(KeyError):
            optimizer.step(fails)  # type: ignore[arg-type]
        again()
        optimizer.step()
    return gap(pm, alone, gradients=False), type(next(iter(pm.parameters()))) is not nn.Parameter


def test_norms_in_the_closure_of_a_step_are_of_the_whole(worker_pools: Pools) -> None:
    for off, knows in worker_pools(3).run(closures):
        assert off < 1e-9
        assert knows


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
    extra = nn.Parameter(whole.clone())
    extra.grad = torch.ones_like(extra)
    jobs.append(partial(torch.optim.LBFGS([a, extra]).step, lambda: torch.tensor(1.0)))
    said = [told(job) for job in jobs]
    with pytest.warns(PieceWarning, match="this process's piece of a, .*full_state_dict"):
        copied = pickle.loads(pickle.dumps(pm.state_dict()["a"]))
    assert type(copied) is Tensor
    with pytest.warns(PieceWarning, match="what is written is this process's piece of a"):
        safetensors.torch.save(pm.state_dict())
    assert along.shape == a.shape[cut : cut + 1]
    assert repr(a).startswith("Parameter containing")
    return said


def test_what_cannot_be_put_together_is_refused(worker_pools: Pools) -> None:
    for said in worker_pools(3).run(not_of_pieces):
        assert all(said)
        assert said[0].startswith("norm() would be of this process's piece of a alone: it goes along dim")
        assert "it cannot be put together from pieces" in said[1]
        assert "there is no 'nuc' norm of a from its pieces" in said[3]
        assert "it joins pieces with whole tensors" in said[4]
        assert said[5].startswith("lerp_ combines a piece of a, [")
        assert "with a whole tensor, [9, 3]" in said[6]
        assert "it joins pieces with whole tensors" in said[7]


def test_a_piece_of_one_row_is_not_broadcast_over_the_whole() -> None:
    of = Of("w", None, lambda call: None, 24, 0, (1, 8))  # type: ignore[arg-type]
    row = _parameter(torch.ones(1, 8), False, of)
    assert "combines a piece of w, [1, 8], with a whole tensor, [3, 8]" in told(lambda: torch.ones(3, 8).mul_(row))
    assert (row * torch.ones(1, 8)).shape == (1, 8)
    whole = torch.ones(3, 8)
    for combined in (
        lambda: torch._foreach_lerp_([torch.ones(5), whole], [torch.ones(5), row], 0.1),
        lambda: torch._foreach_copy_([whole], [row]),
        lambda: torch._foreach_add_([whole], [row.data], alpha=0.1),
        lambda: whole.add_(other=row),
    ):
        assert "combines a piece of w, [1, 8], with a whole tensor, [3, 8]" in told(combined)
    assert torch.equal(whole, torch.ones(3, 8))
    torch._foreach_add_([torch.ones(1, 8), whole], [row, whole])


def test_a_piece_is_not_combined_with_one_that_is_cut_otherwise() -> None:
    row = _parameter(torch.ones(1, 8), False, Of("w", None, lambda call: None, 24, 0, (1, 8)))  # type: ignore[arg-type]
    rows = _parameter(torch.ones(2, 8), False, Of("v", None, lambda call: None, 24, 0, (2, 8)))  # type: ignore[arg-type]
    for combined in (lambda: rows.mul_(row), lambda: torch._foreach_lerp_([rows], [row], 0.1)):
        said = "combines a piece of v, [2, 8], with one of w, [1, 8], which is cut otherwise"
        assert said in told(combined)


def switched_by_hand() -> float:
    """nanoGPT's accumulation: the switch of DistributedDataParallel in place of `no_sync`."""
    alone, pm = small()
    for k in range(3):
        pm.require_backward_grad_sync = k == 2
        for model in (alone, pm):
            model(numbers(k)).backward()
        assert pm.steps_done == (k == 2)
    return gap(pm, alone)


def test_the_switch_of_ddp_for_accumulation(worker_pools: Pools) -> None:
    assert max(worker_pools(3).run(switched_by_hand)) < 1e-12


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


def test_a_gradient_that_overflows_on_one_rank(worker_pools: Pools) -> None:
    for off, scales, moved in worker_pools(3).run(overflow):
        assert off < 1e-9
        assert scales[:4] == scales[4:] == [8.0, 4.0, 4.0, 8.0]
        assert moved == [True, False, True, True] * 2


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
def test_copies_and_averages_of_weights(worker_pools: Pools, kind: str) -> None:
    for losses, model, trained in worker_pools(3).run(averaged, kind):
        assert max(*losses, model, trained) < 1e-9
