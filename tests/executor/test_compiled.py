"""Compiled stretches compute what their nodes do, on one device and on processes with unequal and empty pieces."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm.watchdog import Position, blame
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import meet
from lopsided.executor import compiled
from lopsided.ir.op_call import TOLERANCE
from lopsided.ir.placement import Shares
from lopsided.ir.program import parse_program
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel
from lopsided.runtime.parallel import Parallel
from tests.support.jobs import at_random, classic, cluster_of, plan_of, prices_of, step
from tests.support.traced_only import traced_only

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
        patch.setattr("lopsided.planner.plan_data.most_nodes", lambda devices, nodes: 40)
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


class Islands(nn.Module):
    """Mostly autocast; a convolution in float32 between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x)) * 2 + 1
        with torch.autocast("cpu", enabled=False):
            h = torch.relu(self.inner(h.float())).mean((2, 3))
        return self.last(torch.tanh(self.last(h.float()))).float().pow(2).sum()


def test_autocast_does_not_reach_into_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, batch = Islands(), {"x": torch.randn(2, 3, 12, 12)}
    told: list[set[torch.dtype]] = []
    kept = compiled.function_of

    def watched(nodes: compiled.RunCompiled, operands: list[torch.Tensor]) -> compiled.Function | None:
        function = kept(nodes, operands)
        assert function is not None

        def run(*given: torch.Tensor) -> object:
            assert not torch.is_autocast_enabled("cpu")
            return function(*given)

        told.append({operand.dtype for operand in operands})
        return run  # type: ignore[return-value]

    monkeypatch.setattr(compiled, "function_of", watched)
    with torch.autocast("cpu", torch.bfloat16):
        pm = lopsided.parallelize(
            copy.deepcopy(net), batch, cluster=cluster_of(1), compile=True, check_capture=False, quiet=True
        )
        found = pm(**batch)
        expected = net(**batch)
    assert told
    found.backward()
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-2)
    torch.testing.assert_close(pm.inner.weight.grad, net.inner.weight.grad, rtol=2e-2, atol=1e-3)


class Dropped(nn.Module):
    """Dropout on a whole value; then something of which a rank may have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.skip = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = nn.functional.dropout(x, 0.5)
        return (self.down(torch.relu(self.up(kept))) + self.skip(kept)).pow(2).mean()


CUT_IN_THE_MIDDLE = """
%up_weight = parameter "up.weight" : S0
%up_bias = parameter "up.bias" : S0
%down_weight = parameter "down.weight" : S1
%down_bias = parameter "down.bias" : I
%skip_weight = parameter "skip.weight" : I
%x = input "x" : I
%dropout = aten.dropout.default(%x: I) : I
%linear = aten.linear.default(%dropout: I→R, %up_weight: S0, %up_bias: S0) : S1
%relu = aten.relu.default(%linear: S1) : S1
%linear_1 = aten.linear.default(%relu: S1, %down_weight: S1, %down_bias: I→P) : P
%linear_2 = aten.linear.default(%dropout: I, %skip_weight: I) : I
%add = aten.add.Tensor(%linear_1: P→I, %linear_2: I) : I
%pow_1 = aten.pow.Tensor_Scalar(%add: I) : I
%mean = aten.mean.default(%pow_1: I) : I
return %mean: I
"""


def skips_after_training() -> tuple[list[str], list[list[float]]]:
    """In a worker: the ops that are compiled, and a parameter that all ranks hold, after some steps."""
    torch.manual_seed(0)
    net, batch = Dropped(), {"x": torch.randn(5, 6)}
    graph = capture(net, batch)
    plan = replace(plan_of(parse_program(CUT_IN_THE_MIDDLE, graph), Shares((0.6, 0.4, 0.0))), stretch=64)
    pm = Parallel(net, batch, graph, plan, meet(plan), seed=3)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    for _ in range(3):
        pm(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    found: list[list[float]] = pm.skip.weight.tolist()
    (program,) = (one for known in pm._programs._calls.values() for one in known)
    pm.close()
    functions = [one for one in program.executor.instructions if isinstance(one, compiled.RunCompiled)]
    return [one.node.node.op for function in functions for one in function.traced], found


def test_ranks_that_compile_other_functions_drop_the_same_of_whole_values(
    worker_pools: Callable[[int], WorkerPool],
) -> None:
    """On a GPU a compiled dropout draws other numbers than its own kernel, so no rank may compile it."""
    told = worker_pools(3).run(skips_after_training)
    assert [skip for _, skip in told] == [told[0][1]] * 3
    ops = [ops for ops, _ in told]
    assert all("aten.mean.default" in some and "aten.dropout.default" not in some for some in ops)
    assert "aten.relu.default" in ops[0]
    assert "aten.relu.default" not in ops[2]


EVEN = "mlp:layers=2,width=6,classes=5,batch=4"


def in_turn(folder: str) -> tuple[int, int, str]:
    """In a worker: rank 1 compiles what rank 0 has compiled before it. How much was found on disk and how much not, and
    where the rank was meanwhile."""
    rank, shares, alone, real = dist.get_rank(), Shares((0.5, 0.5)), compiled._compiled, compile_fx.compile_fx
    torch.manual_seed(0)
    model, batch = load(EVEN)
    graph = capture(model, batch)
    plan = plan_of(data_parallel(derive_rules(graph), prices_of(graph, shares)), shares).compiled()
    pm = Parallel(model, batch, graph, plan, meet(plan))
    said: list[str] = []

    def one_after_the_other(nodes: compiled.RunCompiled, operands: Sequence[torch.Tensor]) -> compiled.Function | None:
        if rank == 1:
            dist.barrier()
        made = alone(nodes, operands)
        if rank == 0:
            dist.barrier()
        return made

    def watched(*about: object, **how: object) -> object:
        said.append(pm.watch.position.text())
        return real(*about, **how)  # type: ignore[arg-type]

    counted = counters["aot_autograd"]
    before = counted["autograd_cache_hit"], counted["autograd_cache_miss"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        patch.setattr(compiled, "_FUNCTIONS", {})
        patch.setattr(compiled, "_compiled", one_after_the_other)
        patch.setattr(compile_fx, "compile_fx", watched)
        pm(**batch).backward()
    pm.close()
    return counted["autograd_cache_hit"] - before[0], counted["autograd_cache_miss"] - before[1], said[0]


def test_what_another_process_compiled_is_found_on_disk_and_who_compiles_is_at_work(
    worker_pools: Callable[[int], WorkerPool], tmp_path: Path
) -> None:
    (found, made, _), (found_then, made_then, there) = worker_pools(2).run(in_turn, str(tmp_path))
    assert made
    assert (found_then, made_then) == (found + made, 0)
    waits = Position(1, 0.0, 1, "gradients", 0.0)
    reason, _ = blame(waits, {1: Position.parse(there)}, {}, {1: "rank 1"})
    assert reason.startswith("rank 1 is at step 1: compiling ")


def test_the_first_step_tells_how_much_it_compiles(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = load(SMALL)
    with caplog.at_level(logging.INFO, logger="lopsided"), traced_only() as functions:
        pm = lopsided.parallelize(model, batch, cluster=cluster_of(1), check_capture=False, compile=True)
        for _ in range(2):
            pm(**batch).backward()
    assert len(functions) == 1
    lines = [record.message for record in caplog.records if record.message.startswith("compil")]
    assert lines[0] == "compiling 1 function"
    assert re.fullmatch(r"compiling \w+ to \w+, \d+ ops", lines[1])
    assert re.fullmatch(r"compiled after \d+\.\d s", lines[2])
    assert len(lines) == 3


def test_what_does_not_compile_runs_as_before_and_says_so(
    functions: dict[object, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **options: object) -> None:
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
