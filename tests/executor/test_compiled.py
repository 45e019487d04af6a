"""Compiled stretches compute what their nodes do, on one device and on processes with unequal and empty pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import lopsided
from lopsided.comm.worker_pool import WorkerPool
from lopsided.executor import compiled
from lopsided.ir.op_call import TOLERANCE
from lopsided.ir.placement import Shares
from lopsided.models.by_name import load
from tests.support.jobs import at_random, classic, cluster_of, step

SMALL = "llama:layers=2,width=24,heads=2,kv_heads=1,ffn=28,seq=6,vocab=31,batch=5"


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[object, object]:
    """What is compiled in the test."""
    made: dict[object, object] = {}
    monkeypatch.setattr(compiled, "_FUNCTIONS", made)
    return made


def losses(model: nn.Module, batch: dict[str, torch.Tensor], **how: object) -> tuple[list[float], nn.Module]:
    pm = lopsided.parallelize(model, batch, cluster=cluster_of(1), check_capture=False, quiet=True, **how)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        loss = pm(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, pm


def test_a_deep_model_compiles_a_few_functions_and_trains_alike(functions: dict[object, object]) -> None:
    spec = SMALL.replace("layers=2", "layers=5")
    torch.manual_seed(0)
    model, batch = load(spec)
    other, _ = load(spec)
    other.load_state_dict(model.state_dict())
    plain, _ = losses(model.double(), batch, compile=False)
    assert not functions
    torch.manual_seed(0)
    made, pm = losses(other.double(), batch, compile=True)
    assert made == pytest.approx(plain, rel=1e-12)
    assert pm.plan.stretch
    whole = len(functions)
    assert whole == 1
    assert None not in functions.values()

    again, _ = load(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lopsided.runtime.agreement.most_nodes", lambda devices, nodes: 40)
        losses(again.double(), batch, compile=True)
    assert len(functions) - whole == 3  # the first layer, the last, and those between


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["dp", "zero", "zero-again", "tensor", 0, 1])
@pytest.mark.parametrize("shares", [(0.6, 0.4, 0.0), (0.5, 0.2, 0.3)])
def test_processes_with_compiled_stretches_equal_one_device(
    name: str | int, shares: tuple[float, ...], worker_pools: Callable[[int], WorkerPool]
) -> None:
    cut = Shares(shares)
    run = at_random(SMALL, cut, name) if isinstance(name, int) else classic(SMALL, name, cut)
    for found in worker_pools(3).run(step, [replace(run, stretch=24)]):
        [(error, where)] = found
        assert error <= TOLERANCE, where


def test_dropout_draws_from_the_same_stream_in_both_passes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 64, bias=False), nn.Linear(64, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.up(x), 0.5).pow(2).sum() + 0 * self.down.weight.sum()

    torch.manual_seed(0)
    net, batch = Net(), {"x": torch.randn(3, 8)}
    weight = net.up.weight.detach().clone()
    pm = lopsided.parallelize(net, batch, cluster=cluster_of(1), compile=True, check_capture=False, quiet=True)
    first, second = pm(**batch), pm(**batch)
    first.backward()
    # The loss is a form in the weight, so twice the loss is its product with the gradient: only with the same mask.
    assert torch.sum(pm.up.weight.grad * weight).item() == pytest.approx(2 * first.item(), rel=1e-4)
    assert first.item() != second.item()


def test_what_does_not_compile_runs_as_before_and_says_so(
    functions: dict[object, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    torch.manual_seed(0)
    model, batch = load(SMALL)
    other, _ = load(SMALL)
    other.load_state_dict(model.state_dict())
    plain, _ = losses(model, batch, compile=False)
    with caplog.at_level(logging.WARNING, logger="lopsided.executor.compiled"):
        made, _ = losses(other, batch, compile=True)
    assert made == plain
    assert [*functions.values()] == [None]
    assert "run one by one: no such kernel" in caplog.text
