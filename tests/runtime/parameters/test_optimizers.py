"""Which optimizers are right on pieces, and who is told when one is not."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.placement import I, S
from lopsided.runtime.parameters import optimizers
from lopsided.runtime.parameters.optimizers import NotElementwiseWarning, is_elementwise, watch_optimizers
from lopsided.runtime.parameters.pieces import Piece
from tests.support.small_net import batch_of, both, gap


class Lion(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-4, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p -= group["lr"] * (group["beta"] * momentum + p.grad).sign()
                momentum.lerp_(p.grad, 1 - group["beta"])


class Lamb(Optimizer):
    """An update as long as the parameter."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.norm() / p.grad.norm() * p.grad


class Stranger(Lion):
    """Cannot be built from its options."""

    def __init__(self, params: Any, schedule: Callable[[], float]) -> None:
        super().__init__(params, lr=schedule())


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=1e-9), True),
        (lambda ps: torch.optim.SGD(ps, lr=0.0, momentum=0.9, nesterov=True), True),
        (lambda ps: torch.optim.Adam(ps, amsgrad=True), True),
        (lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-3), fused=True), True),
        (torch.optim.NAdam, True),
        (torch.optim.RAdam, True),
        (torch.optim.RMSprop, True),
        (torch.optim.Rprop, True),
        (torch.optim.ASGD, True),
        (torch.optim.Adadelta, True),
        (torch.optim.Adamax, True),
        (torch.optim.Adagrad, True),
        (Lion, True),
        (torch.optim.Adafactor, False),
        (lambda ps: torch.optim.Muon(ps[:1]), False),
        (Lamb, False),
        (lambda ps: Lamb(ps, lr=0.0), False),
        (torch.optim.LBFGS, False),  # which must have a closure
        (torch.optim.SparseAdam, None),
        (lambda ps: Stranger(ps, lambda: 0.1), None),
    ],
)
def test_what_is_elementwise_is_found_by_experiment(build: Any, expected: bool | None) -> None:
    assert is_elementwise(build(parameters())) is expected


class Either(Lion):
    """Does as its group says."""

    def __init__(self, params: Any, lr: float = 1e-3, norms: bool = False) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("norms", norms)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (Lamb if self.param_groups[0]["norms"] else Lion).step(self)  # type: ignore[arg-type]


def test_the_options_of_a_group_count() -> None:
    one, other = parameters()
    assert is_elementwise(Either([one, other])) is True
    assert is_elementwise(Either([{"params": [one], "norms": True}])) is False
    assert is_elementwise(Either([{"params": [one]}, {"params": [other], "norms": True}])) is False


def test_an_experiment_is_made_once_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.random.get_rng_state()
    is_elementwise(Lamb(parameters(), lr=0.25))
    assert torch.equal(torch.random.get_rng_state(), before)
    monkeypatch.setattr(optimizers, "_tried", lambda *_: pytest.fail("tried again"))
    assert is_elementwise(Lamb(parameters(), lr=0.5)) is False


# The watch


class Model(nn.Module):
    """Two parameters, of which `weight` is stored in two pieces."""

    def __init__(self, counts: tuple[int, ...] = (4, 2), place: int = 0) -> None:
        super().__init__()
        self.weight, self.bias = parameters()
        at = S(0) if counts else I
        self.pieces = {
            "weight": Piece("weight", (), (6, 3), torch.float32, at, counts),
            "bias": Piece("bias", (), (3,), torch.float32, I),
        }
        self.world = SimpleNamespace(place=place)
        self.told_of: list[Optimizer] = []
        watch_optimizers(self)

    def before_step(self, optimizer: Optimizer) -> None:
        self.told_of.append(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        assert self.told_of[-1] is optimizer

    def gradients(self) -> list[nn.Parameter]:
        for p in self.parameters():
            p.grad = torch.ones_like(p)
        return list(self.parameters())


def told(optimizer: Optimizer, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step(*args)
    assert all(issubclass(warning.category, NotElementwiseWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


def test_the_first_step_with_pieces_tells_why_and_what_to_do() -> None:
    model = Model()
    optimizer = Lamb(model.gradients())
    (said,) = told(optimizer)
    assert "Lamb is not elementwise" in said
    assert "1 of its parameters are stored in pieces (weight)" in said
    assert '--pin "*=I"' in said
    assert told(optimizer) == []


def test_one_that_cannot_be_tried_is_told_of_more_mildly() -> None:
    model = Model()
    (said,) = told(Stranger(model.gradients(), lambda: 0.1))
    assert "could not be tried" in said
    assert "is not elementwise" not in said


def test_a_closure_is_handed_on() -> None:
    model = Model()

    def loss() -> Tensor:
        model.zero_grad()
        total = model.weight.square().sum()
        total.backward()
        return total

    assert len(told(torch.optim.LBFGS(model.parameters()), loss)) == 1
    assert model.weight.abs().max() < 1


@pytest.mark.parametrize(
    ("model", "held"),
    [
        (lambda: Model(counts=()), ("weight", "bias")),
        (lambda: Model(counts=(6, 0)), ("weight", "bias")),  # one device has it all
        (lambda: Model(place=1), ("weight", "bias")),  # another process tells
        (lambda: Model(), ("bias",)),
    ],
)
def test_nothing_is_told_where_nothing_differs(model: Callable[[], Model], held: Iterable[str]) -> None:
    with_gradients = model()
    with_gradients.gradients()
    assert told(Lamb([with_gradients.get_parameter(name) for name in held])) == []


def test_elementwise_optimizers_and_other_models_go_by() -> None:
    model = Model()
    assert told(torch.optim.AdamW(model.gradients())) == []
    other = nn.Linear(2, 2)
    other.weight.grad = torch.ones(2, 2)
    assert told(Lamb([other.weight])) == []


def test_models_are_not_kept() -> None:
    model = Model()
    gc.collect()
    before = len(optimizers._models)
    del model
    gc.collect()
    assert len(optimizers._models) == before - 1


def test_the_model_is_told_of_every_step() -> None:
    model, other = Model(), Model()
    optimizer = torch.optim.SGD(model.gradients(), lr=0.1)
    optimizer.step()
    optimizer.step()
    assert model.told_of == [optimizer, optimizer]
    assert other.told_of == []


def steps_with_closures() -> float:
    """SGD, whose steps show a norm that is wrong, with the loss and the clipping in its closure."""
    alone, pm = both("zero")
    for model in (alone, pm):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for k in range(3):

            def closure(model: nn.Module = model, optimizer: Optimizer = optimizer, k: int = k) -> Tensor:
                optimizer.zero_grad()
                if model is pm:
                    with pm.no_sync():
                        (pm(**batch_of(2 * k + 1)) / 2).backward()
                else:
                    (model(**batch_of(2 * k + 1)) / 2).backward()
                loss: Tensor = model(**batch_of(2 * k)) / 2
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return loss

            optimizer.step(closure)
    return gap(pm, alone, gradients=False)


def test_a_closure_clips_by_the_norm_of_the_whole(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert max(worker_pools(3).run(steps_with_closures)) < 1e-9
