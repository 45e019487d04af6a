"""Habits of training scripts that would go wrong without a word on pieces: right, or refused in words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.runtime.last_loss import LastLoss, NotFiniteWarning
from lopsided.runtime.parallel import Parallel
from tests.runtime.test_parallel import HERE, THREE, Products, batch_of, both, gap
from tests.support.jobs import plan_of, prices_of

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
