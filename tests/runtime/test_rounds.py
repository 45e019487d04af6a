"""A batch in rounds on real, unequal processes: the call is as without, and so are the loss and the gradients."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lopsided
from lopsided.capturing.capture_graph import capture, capture_call
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import TrainingError
from lopsided.ir.placement import Shares
from lopsided.models import zoo
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.runtime.parallel import Parallel
from lopsided.schedule.rounds import in_rounds
from tests.support import jobs
from tests.support.jobs import plan_of, prices_of

SHARES = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))
ROWS, ROUNDS = 24, 3


class Net(nn.Module):
    """Rows of tokens; some targets do not count."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.up, self.out = nn.Embedding(13, 8), nn.Linear(8, 12), nn.Linear(12, 5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, target: Tensor | None = None) -> Any:
        logits = self.out(self.dropout(torch.relu(self.up(self.embed(tokens).mean(1)))))
        loss = None if target is None else F.cross_entropy(logits, target, ignore_index=-100)
        return {"loss": loss, "logits": logits, "mean": logits.mean()} if loss is not None else {"logits": logits}


def batch_of(seed: int = 0, rows: int = ROWS) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 5, (rows,), generator=made)
    return {
        "tokens": torch.randint(0, 13, (rows, 4), generator=made),
        "target": torch.where(torch.rand(rows, generator=made) < 0.4, -100, target),
    }


def plan_for(model: nn.Module, batch: object, how: str, rounds: int = ROUNDS) -> Plan:
    graph = in_rounds(capture_call(model, batch).graph, rounds).graph
    program = data_parallel(derive_rules(graph), prices_of(graph, SHARES))
    made = plan_of(program if how == "dp" else stored_cut(program), SHARES, regather=how == "zero-again")
    return replace(made, microbatches=rounds, bucket_bytes=2**9)


def both(how: str, dropout: float = 0.0) -> tuple[Net, Parallel]:
    torch.manual_seed(0)
    model = Net(dropout).double()
    alone = copy.deepcopy(model)
    return alone, lopsided.parallelize(model, batch_of(), plan=plan_for(model, batch_of(), how))


def gap(pm: Parallel, alone: nn.Module) -> float:
    """How far this rank's gradients are from its part of one device's."""
    whole = dict(alone.named_parameters())
    apart = [
        (parameter.grad - pm.pieces[name].take(whole[name].grad)).abs().max().item()
        for name, parameter in pm.named_parameters()
        if parameter.numel()
    ]
    return max(apart)


@dataclass(frozen=True)
class Seen:
    loss: float
    gradients: float
    outputs: float
    again: float  # a second step, its loss scaled by what the first was not
    accumulated: float
    rows: float
    evaluated: float
    short: float
    hooks: int
    refusals: tuple[str, ...]


def seen(how: str) -> Seen:
    """In a worker: steps as people write them, compared with one device."""
    alone, pm = both(how)
    batch = batch_of()
    got, expected = pm(**batch), alone(**batch)
    got["loss"].backward()
    expected["loss"].backward()
    loss = abs((got["loss"] - expected["loss"]).item())
    gradients = gap(pm, alone)
    outputs = max((got[key] - expected[key]).abs().max().item() for key in ("logits", "mean"))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (pm, alone)]
    called: list[int] = []
    _name, parameter = next((n, p) for n, p in pm.named_parameters() if n == "up.weight")
    handle = parameter.register_hook(lambda gradient: called.append(1))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    batch = batch_of(1)
    (pm(**batch)["loss"] * 1000.0).backward()
    (alone(**batch)["loss"] * 1000.0).backward()
    again = gap(pm, alone) / 1000
    handle.remove()
    # Gradients of several calls add up, and those of calls under no_sync too.
    for optimizer in optimizers:
        optimizer.zero_grad()
    with pm.no_sync():
        pm(**batch_of(2))["loss"].backward()
    one, other = pm(**batch_of(3))["loss"], pm(**batch_of(4))["loss"]
    (one / 3 + other).backward()
    for seed, times in ((2, 1.0), (3, 1 / 3), (4, 1.0)):
        (alone(**batch_of(seed))["loss"] * times).backward()
    accumulated = gap(pm, alone)
    # This rank's rows of a batch.
    for optimizer in optimizers:
        optimizer.zero_grad()
    share = next(iter(lopsided.shard([batch_of(5)], pm)))
    got, expected = pm(**share), alone(**batch_of(5))
    got["loss"].backward()
    expected["loss"].backward()
    rows = max(
        gap(pm, alone),
        (lopsided.gather(got["logits"]) - expected["logits"]).abs().max().item(),
        abs((got["loss"] - expected["loss"]).item()),
        float(got["logits"].shape[0] != share["tokens"].shape[0]),
    )
    for optimizer in optimizers:
        optimizer.zero_grad()
    short_batch = batch_of(6, rows=14)
    got, expected = pm(**short_batch)["loss"], alone(**short_batch)["loss"]
    got.backward()
    expected.backward()
    short = max(gap(pm, alone), abs((got - expected).item()))
    pm.eval()
    alone.eval()
    with torch.no_grad():
        given = batch_of(7)
        evaluated = (pm(tokens=given["tokens"])["logits"] - alone(given["tokens"])["logits"]).abs().max().item()
    pm.train()
    refusals = []
    got = pm(**batch)
    for call in (
        got["logits"].sum().backward,
        lambda: (got["loss"].backward(retain_graph=True), got["loss"].backward()),
    ):
        try:
            call()
        except TrainingError as error:
            refusals.append(str(error))
    pm.close()
    return Seen(loss, gradients, outputs, again, accumulated, rows, evaluated, short, len(called), tuple(refusals))


@pytest.mark.parametrize("how", ["dp", "zero", "zero-again"])
def test_a_step_of_rounds_is_a_step(how: str, worker_pools: Callable[[int], WorkerPool]) -> None:
    for rank in worker_pools(3).run(seen, how):
        figures = (rank.loss, rank.gradients, rank.outputs, rank.again, rank.accumulated, rank.rows, rank.short)
        assert max(*figures, rank.evaluated) < 1e-9, rank
        assert rank.hooks == 1
        assert "made outside of the model" in rank.refusals[0]
        assert "twice" in rank.refusals[1]


def half(start: float, steps: int) -> list[tuple[float, bool, float]]:
    """In a worker: float16 under a scaler, whose scale is found in the first steps."""
    torch.manual_seed(0)
    model = Net().double()
    alone = copy.deepcopy(model)
    pm = lopsided.parallelize(model, batch_of(), plan=plan_for(model, batch_of(), "dp"))
    found = []
    scale = start
    for number in range(steps):
        pm.zero_grad()
        alone.zero_grad()
        (pm(**batch_of(number))["loss"] * scale).backward()
        (alone(**batch_of(number))["loss"] * scale).backward()
        found.append((scale, all(p.grad is not None for p in pm.parameters()), gap(pm, alone) / scale))
        scale *= 2.0
    pm.close()
    return found


def test_a_scale_that_changes_reaches_all_rounds(worker_pools: Callable[[int], WorkerPool]) -> None:
    for rank in worker_pools(3).run(half, 2.0**10, 3):
        assert all(there and apart < 1e-9 for _, there, apart in rank)


class Small(Net):
    """Gradients that float16 can say only if they are scaled before they are made."""

    def forward(self, tokens: Tensor, target: Tensor | None = None) -> Any:
        with torch.autocast("cpu", torch.float16):
            logits = self.out(self.dropout(torch.relu(self.up(self.embed(tokens).mean(1)))))
        return F.cross_entropy(logits.float(), target, ignore_index=-100) * 1e-6


def first_step(scale: float) -> list[float]:
    """In a worker: gradients of a first step and a second, apart from those of one device, relatively."""
    torch.manual_seed(0)
    model = Small()
    alone = copy.deepcopy(model)
    pm = lopsided.parallelize(model, batch_of(), plan=plan_for(model, batch_of(), "dp"))
    found = []
    for number in range(2):
        pm.zero_grad()
        alone.zero_grad()
        got = pm(**batch_of(number))
        (got * scale).backward()
        expected = alone(**batch_of(number))
        (expected * scale).backward()
        largest = max(p.grad.abs().max().item() for p in alone.parameters())
        found += [gap(pm, alone) / largest, abs((got - expected).item()) / abs(expected.item())]
    pm.close()
    return found


def test_the_scale_reaches_the_first_step_in_float16(worker_pools: Callable[[int], WorkerPool]) -> None:
    for rank in worker_pools(3).run(first_step, 2.0**20):
        assert max(rank) < 1e-2


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_verify_compares_rounds_with_one_device(name: str, worker_pools: Callable[[int], WorkerPool]) -> None:
    spec = re.sub(r"batch=\d+", "batch=6", zoo.SMALL[name])
    graph = in_rounds(capture(*jobs.model_of(spec)), 3).graph
    program = data_parallel(derive_rules(graph), prices_of(graph, SHARES))
    run = replace(jobs.run_of(spec, stored_cut(program), SHARES, regather=True), microbatches=3)
    for rank in worker_pools(3).run(jobs.step, [run]):
        assert all(error < 1e-9 for error, _ in rank), rank
    trained = worker_pools(3).run(jobs.training, run, 3, 1.0)
    assert all(same.curve == pytest.approx(same.expected, rel=1e-4) for same in trained)


def masks(seed: int) -> tuple[list[Tensor], list[int]]:
    """In a worker: which elements dropout left of equal rows, round by round."""
    _, pm = both("dp", dropout=0.5)
    batch = {"tokens": torch.ones(ROWS, 4, dtype=torch.long), "target": torch.zeros(ROWS, dtype=torch.long)}
    torch.manual_seed(seed)
    first = lopsided.gather(pm(**batch)["logits"])
    pm.close()
    return list(first.detach().split(ROWS // ROUNDS)), [ROWS // ROUNDS] * ROUNDS


def test_every_round_has_masks_of_its_own(worker_pools: Callable[[int], WorkerPool]) -> None:
    for rounds, _ in worker_pools(3).run(masks, 0):
        assert not any(torch.equal(a, b) for a, b in itertools.pairwise(rounds))
