"""What all ranks must agree on before they train: here, plans of models with ops of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import LopsidedError
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel
from lopsided.planner.plan_file import load_plan, save_plan
from tests.support.jobs import plan_of, prices_of
from tests.support.small_net import THREE


@torch.library.custom_op("agreement_tests::bent", mutates_args=())
def bent(x: Tensor) -> Tensor:
    return torch.tanh(x)


bent.register_fake(torch.empty_like)
bent.register_autograd(
    lambda ctx, grad: grad * (1 - ctx.saved_tensors[0] ** 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Bent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(bent(self.first(x))).square().mean()


def batch_of() -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(10, 4)}


def gap_of(plan: str) -> float:
    pm = lopsided.parallelize(Bent(), batch_of(), plan=plan)
    loss, alone = pm(**batch_of()), Bent()(**batch_of())
    loss.backward()
    return abs(loss.item() - alone.item())


def test_a_model_with_an_op_of_its_own(worker_pools: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    """Its plan names the op, which every rank knows, since its own model calls it."""
    book = derive_rules(capture(Bent(), batch_of()))
    path = str(tmp_path / "plan.json")
    save_plan(plan_of(data_parallel(book, prices_of(book.graph, THREE)), THREE), path)
    assert max(worker_pools(3).run(gap_of, path)) < 1e-12
    with pytest.raises(LopsidedError, match=r"agreement_tests.bent.default is not an op of aten or lopsided"):
        load_plan(path)
