"""A training loop keeps its shape: everything a user does around `pm` does what it does on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.placement import I, Shares
from lopsided.ir.program import Program, Step
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel
from lopsided.runtime.parallel import Parallel
from tests.support.jobs import plan_of, prices_of
from tests.support.small_net import HERE, KINDS, NONE_FOR_ONE, THREE, Products, batch_of, both, gap, named, net, planned


def train(kind: str, shares: Shares) -> list[float]:
    """Ten steps with schedule, weight decay on some, clipping; losses and parameters compared."""
    alone, pm = both(kind, shares)
    gaps = []
    runs = []
    for model in (alone, pm):
        decayed = [p for name, p in model.named_parameters() if name.endswith("weight") and p.requires_grad]
        rest = [p for name, p in model.named_parameters() if not name.endswith("weight") and p.requires_grad]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2
        )
        runs.append((model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)))
    for k in range(10):
        losses = []
        for model, optimizer, schedule in runs:
            loss = model(**batch_of(k))
            loss.backward()
            if isinstance(model, Parallel):
                norm = lopsided.clip_grad_norm_(model, 0.5)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            losses += [loss.item(), norm.item()]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        gaps += [abs(losses[0] - losses[2]), abs(losses[1] - losses[3])]
    gaps.append(gap(pm, alone, gradients=False))
    gaps.append((pm.get_buffer("bn.running_var") - alone.bn.running_var).abs().max().item())
    assert pm.steps_done == 10
    return gaps


@pytest.mark.parametrize("shares", [THREE, NONE_FOR_ONE], ids=["all", "one-has-nothing"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_as_people_write_it(worker_pools: Callable[[int], WorkerPool], kind: str, shares: Shares) -> None:
    for gaps in worker_pools(3).run(train, kind, shares):
        assert max(gaps) < 1e-9


def accumulate(kind: str) -> tuple[float, bool]:
    alone, pm = both(kind)
    for k in range(3):
        (alone(**batch_of(k)) / 3).backward()
        if k < 2:
            with pm.no_sync():
                (pm(**batch_of(k)) / 3).backward()
        else:
            (pm(**batch_of(k)) / 3).backward()
    first = gap(pm, alone)
    # Without no_sync gradients add up as well, and two losses may share a backward pass.
    (alone(**batch_of(3)) + alone(**batch_of(4))).backward()
    (pm(**batch_of(3)) + pm(**batch_of(4))).backward()
    return max(first, gap(pm, alone)), pm.steps_done == 2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_accumulate(worker_pools: Callable[[int], WorkerPool], kind: str) -> None:
    for error, counted in worker_pools(3).run(accumulate, kind):
        assert error < 1e-12
        assert counted


def forget_to_sync() -> str:
    _, pm = both()
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    with pm.no_sync():
        pm(**batch_of()).backward()
    try:
        optimizer.step()
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


def test_a_step_on_gradients_that_were_not_synchronised(worker_pools: Callable[[int], WorkerPool]) -> None:
    for told in worker_pools(3).run(forget_to_sync):
        assert "no_sync" in told


def autocast(kind: str) -> tuple[float, float, float]:
    alone, pm = both(kind, dtype=torch.float32)
    with torch.autocast(HERE.type, torch.bfloat16):
        expected = alone(**batch_of())
        loss = pm(**batch_of())
    expected.backward()
    loss.backward()
    plain = pm(**batch_of()).item()  # and without it again
    return abs(loss.item() - expected.item()), gap(pm, alone), abs(plain - expected.item())


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(worker_pools: Callable[[int], WorkerPool], kind: str) -> None:
    for loss, gradients, plain in worker_pools(3).run(autocast, kind):
        assert loss < 2e-2
        assert gradients < 2e-2
        assert 0 < plain < 5e-2  # other numbers than under autocast, but not far


def evaluate(shares: Shares) -> tuple[float, float, bool]:
    alone, pm = both("zero-again", shares, drop=0.5)
    alone.bn.running_mean.fill_(0.3)
    pm.get_buffer("bn.running_mean").fill_(0.3)
    alone.eval()
    pm.eval()
    with torch.no_grad():
        off = abs(pm(**batch_of()).item() - alone(**batch_of()).item())
    before = pm.get_buffer("bn.running_mean").clone()
    loss, expected = pm(**batch_of()), alone(**batch_of())
    loss.backward()
    expected.backward()
    return off, gap(pm, alone), torch.equal(before, pm.get_buffer("bn.running_mean"))


@pytest.mark.parametrize("shares", [THREE, NONE_FOR_ONE], ids=["all", "one-has-nothing"])
def test_evaluation(worker_pools: Callable[[int], WorkerPool], shares: Shares) -> None:
    for off, gradients, kept in worker_pools(3).run(evaluate, shares):
        assert off < 1e-12
        assert gradients < 1e-12
        assert kept


def recomputed(kind: str, shares: Shares) -> tuple[float, float]:
    alone, pm = both(kind, shares, recompute=True)
    loss, expected = pm(**batch_of()), alone(**batch_of())
    loss.backward()
    expected.backward()
    return abs(loss.item() - expected.item()), gap(pm, alone)


@pytest.mark.parametrize("shares", [THREE, NONE_FOR_ONE], ids=["all", "one-has-nothing"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing(worker_pools: Callable[[int], WorkerPool], kind: str, shares: Shares) -> None:
    for loss, gradients in worker_pools(3).run(recomputed, kind, shares):
        assert loss < 1e-12
        assert gradients < 1e-12


class Odd(nn.Module):
    """What is easy to get wrong: a weight shared by two checkpointed blocks, a detached value, a buffer that is read
    and given a new value, a constant, a part that is in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.w, self.out = nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 13)
        self.bn = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embed(tokens).mean(1)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.w(y)), x, use_reentrant=False)
        x = self.bn(x * self.scale) + x.detach().sum(1, keepdim=True) + torch.tensor([0.5, 0.25] * 4, device=x.device)
        self.scale = 0.9 * self.scale + 0.1 * x.detach().mean(0)
        return F.cross_entropy(self.out(x), target)


def odd(kind: str, shares: Shares) -> float:
    torch.manual_seed(0)
    alone = Odd().to(HERE, torch.float64)
    model = copy.deepcopy(alone)
    pm = lopsided.parallelize(model, batch_of(), plan=planned(copy.deepcopy(model), kind, shares), bucket_bytes=500)
    worst = []
    for k in range(6):
        if k == 2:
            pm.get_submodule("bn").eval()
            alone.bn.eval()
        if k == 4:
            pm.eval()
            alone.eval()
        if k in (1, 5):
            with torch.inference_mode():
                found = pm(**batch_of(k)).item()
            with torch.no_grad():  # its new buffer would be an inference tensor
                worst.append(abs(found - alone(**batch_of(k)).item()))
        alone.zero_grad()
        pm.zero_grad()
        loss, expected = pm(**batch_of(k)), alone(**batch_of(k))
        loss.backward()
        expected.backward()
        worst += [abs(loss.item() - expected.item()), gap(pm, alone)]
        worst.append((pm.get_buffer("scale") - alone.scale).abs().max().item())
    assert not pm.get_submodule("bn").training
    return max(worst)


@pytest.mark.parametrize("shares", [THREE, NONE_FOR_ONE], ids=["all", "one-has-nothing"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_easy_to_get_wrong(worker_pools: Callable[[int], WorkerPool], kind: str, shares: Shares) -> None:
    assert max(worker_pools(3).run(odd, kind, shares)) < 1e-12


def zeroed_in_between(kind: str) -> float:
    alone, pm = both(kind)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    with pm.no_sync():
        pm(**batch_of(1)).backward()
    optimizer.zero_grad()
    pm(**batch_of(2)).backward()
    alone(**batch_of(1))  # the running statistics have seen it
    alone(**batch_of(2)).backward()
    return gap(pm, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_sync_kept_goes_with_zero_grad(worker_pools: Callable[[int], WorkerPool], kind: str) -> None:
    assert max(worker_pools(3).run(zeroed_in_between, kind)) < 1e-12


def by_factors() -> tuple[float, int]:
    """Factor broadcasting under autocast, of an op that has no gradient by hand."""
    torch.manual_seed(0)
    model, x = Products().to(HERE), torch.randn(10, 6, device=HERE)
    alone = copy.deepcopy(model)
    with torch.autocast(HERE.type, torch.bfloat16):
        book = derive_rules(capture(model, (x,)))
        program = data_parallel(book, prices_of(book.graph, THREE))
        steps = []
        for step in program.steps:
            sfb = [r for r in book.rules[step.node.name] if r.how == "sfb" and r.gives == step.rule.gives]
            if sfb and step.node.op.startswith("aten.matmul"):
                chains = tuple((I,) if need == I else c for c, need in zip(step.chains, sfb[0].needs, strict=True))
                step = Step(step.node, sfb[0], chains)
            steps.append(step)
        program = Program(program.graph, program.leaves, tuple(steps), program.loss, program.updates)
        pm = lopsided.parallelize(model, (x,), plan=plan_of(program, THREE))
        loss, expected = pm(x), alone(x)
    loss.backward()
    expected.backward()
    return gap(pm, alone), sum(step.rule.how == "sfb" for step in program.steps)


def test_factor_broadcasting_under_autocast(worker_pools: Callable[[int], WorkerPool]) -> None:
    for error, used in worker_pools(3).run(by_factors):
        assert used == 2
        assert error < 5e-2


def all_on_one() -> float:
    """One rank has all of the batch, and the loader hands out shares."""
    alone, pm = both("zero", Shares((1.0, 0.0, 0.0), named=(("state", (0.3, 0.3, 0.4)),)))
    data = TensorDataset(*batch_of().values())
    loader = DataLoader(data, batch_size=10, collate_fn=named)
    losses = [pm(**batch).item() for batch in lopsided.shard(loader, pm)]
    return abs(losses[0] - alone(**batch_of()).item())


def test_one_rank_may_have_the_whole_batch(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert max(worker_pools(3).run(all_on_one)) < 1e-12


def compiled() -> tuple[float, float]:
    alone, pm = both()
    faster = torch.compile(pm, backend="aot_eager")
    loss, expected = faster(**batch_of()), alone(**batch_of())
    loss.backward()
    expected.backward()
    return abs(loss.item() - expected.item()), gap(pm, alone)


def test_compile(worker_pools: Callable[[int], WorkerPool]) -> None:
    for loss, gradients in worker_pools(3).run(compiled):
        assert loss < 1e-12
        assert gradients < 1e-12


def dropped() -> tuple[list[float], list[float]]:
    """Losses of the same batch with dropout on, twice from the same state."""
    _, pm = both("zero-again", drop=0.5)
    state = pm.randomness.state()
    first = [pm(**batch_of()).item() for _ in range(3)]
    pm.randomness.set_state(state)
    return first, [pm(**batch_of()).item() for _ in range(3)]


def test_dropout_draws_anew_and_can_be_repeated(worker_pools: Callable[[int], WorkerPool]) -> None:
    found = worker_pools(3).run(dropped)
    assert all(first == second for first, second in found)
    assert len({tuple(first) for first, _ in found}) == 1  # the loss is the global one on every rank
    assert len(set(found[0][0])) == 3


def names() -> tuple[list[str], list[str], list[str], list[str]]:
    alone, pm = both("zero")
    full = lopsided.full_state_dict(pm)
    assert all(torch.equal(full[name], value.cpu()) for name, value in alone.state_dict().items())
    return list(alone.state_dict()), list(pm.state_dict()), list(full), [n for n, _ in pm.named_parameters()]


def test_names_are_the_models(worker_pools: Callable[[int], WorkerPool]) -> None:
    for expected, local, full, parameters in worker_pools(3).run(names):
        assert local == expected == full
        assert parameters == [name for name, _ in net().named_parameters()]
