"""A training loop keeps its shape: everything a user does around `pm` does what it does on one device."""

from __future__ import annotations

import copy
import os
import warnings
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
from lopsided.comm.world import World, meet
from lopsided.ir.placement import I, Shares
from lopsided.ir.program import Program, Step
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.runtime.parallel import Parallel
from tests.support.jobs import classic, parsed, plan_of, prices_of

HERE = torch.device(os.environ.get("LOPSIDED_DEVICE", "cpu"))  # cuda:0 runs all of this on a GPU that is shared
THREE = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))
NONE_FOR_ONE = Shares((0.6, 0.0, 0.4), named=(("state", (0.3, 0.3, 0.4)),))


class Net(nn.Module):
    """A bit of everything: an embedding tied to the output, norm, dropout, a frozen layer, a buffer that changes."""

    def __init__(self, drop: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(13, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.bn = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(drop)
        self.out = nn.Linear(8, 13, bias=False)
        self.out.weight = self.embed.weight

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        x = self.bn((x + self.frozen(x)).mean(1))
        return F.cross_entropy(self.out(x), target)


def batch_of(seed: int = 0, rows: int = 10) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(0, 13, (rows, 4), generator=draw).to(HERE),
        "target": torch.randint(0, 13, (rows,), generator=draw).to(HERE),
    }


def net(dtype: torch.dtype = torch.float64, **how: object) -> Net:
    # In float64: Adam makes steps of full size of a gradient that is nothing but rounding.
    torch.manual_seed(0)
    return Net(**how).to(HERE, dtype)  # type: ignore[arg-type]


def planned(model: nn.Module, kind: str = "dp", shares: Shares = THREE) -> Plan:
    book = derive_rules(capture(model, batch_of()))
    program = data_parallel(book, prices_of(book.graph, shares))
    if kind != "dp":
        program = stored_cut(program)
    return plan_of(program, shares, regather=kind == "zero-again")


def both(kind: str = "dp", shares: Shares = THREE, *, bucket_bytes: int = 800, **how: object) -> tuple[Net, Parallel]:
    """The model on one device, and the same on all; with small buckets, so that there are several."""
    alone, model = net(**how), net(**how)
    plan = planned(model, kind, shares)
    return alone, lopsided.parallelize(model, batch_of(), plan=plan, bucket_bytes=bucket_bytes)


def gap(pm: Parallel, alone: nn.Module, *, gradients: bool = True) -> float:
    """How far this rank's gradients (or parameters) are from its part of one device's."""
    worst = 0.0
    whole = dict(alone.named_parameters())
    for name, parameter in pm.named_parameters():
        mine = parameter.grad if gradients else parameter.detach()
        theirs = whole[name].grad if gradients else whole[name].detach()
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            part = pm.pieces[name].take(theirs)
            worst = max(worst, (mine - part).abs().max().item() if part.numel() else 0.0)
    return worst


KINDS = ("dp", "zero", "zero-again")


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
def test_a_loop_as_people_write_it(crews: Callable[[int], WorkerPool], kind: str, shares: Shares) -> None:
    for gaps in crews(3).run(train, kind, shares):
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
def test_gradients_accumulate(crews: Callable[[int], WorkerPool], kind: str) -> None:
    for error, counted in crews(3).run(accumulate, kind):
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


def test_a_step_on_gradients_that_were_not_synchronised(crews: Callable[[int], WorkerPool]) -> None:
    for told in crews(3).run(forget_to_sync):
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
def test_autocast(crews: Callable[[int], WorkerPool], kind: str) -> None:
    for loss, gradients, plain in crews(3).run(autocast, kind):
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
def test_evaluation(crews: Callable[[int], WorkerPool], shares: Shares) -> None:
    for off, gradients, kept in crews(3).run(evaluate, shares):
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
def test_activation_checkpointing(crews: Callable[[int], WorkerPool], kind: str, shares: Shares) -> None:
    for loss, gradients in crews(3).run(recomputed, kind, shares):
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
def test_what_is_easy_to_get_wrong(crews: Callable[[int], WorkerPool], kind: str, shares: Shares) -> None:
    assert max(crews(3).run(odd, kind, shares)) < 1e-12


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
def test_what_no_sync_kept_goes_with_zero_grad(crews: Callable[[int], WorkerPool], kind: str) -> None:
    assert max(crews(3).run(zeroed_in_between, kind)) < 1e-12


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.randn(9, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(x @ self.a) @ self.b).square().mean()


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


def test_factor_broadcasting_under_autocast(crews: Callable[[int], WorkerPool]) -> None:
    for error, used in crews(3).run(by_factors):
        assert used == 2
        assert error < 5e-2


def all_on_one() -> float:
    """One rank has all of the batch, and the loader hands out shares."""
    alone, pm = both("zero", Shares((1.0, 0.0, 0.0), named=(("state", (0.3, 0.3, 0.4)),)))
    data = TensorDataset(*batch_of().values())
    loader = DataLoader(data, batch_size=10, collate_fn=named)
    losses = [pm(**batch).item() for batch in lopsided.shard(loader, pm)]
    return abs(losses[0] - alone(**batch_of()).item())


def named(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    tokens, target = zip(*rows, strict=True)
    return {"tokens": torch.stack(tokens), "target": torch.stack(target)}


def test_one_rank_may_have_the_whole_batch(crews: Callable[[int], WorkerPool]) -> None:
    assert max(crews(3).run(all_on_one)) < 1e-12


def compiled() -> tuple[float, float]:
    alone, pm = both()
    faster = torch.compile(pm, backend="aot_eager")
    loss, expected = faster(**batch_of()), alone(**batch_of())
    loss.backward()
    expected.backward()
    return abs(loss.item() - expected.item()), gap(pm, alone)


def test_compile(crews: Callable[[int], WorkerPool]) -> None:
    for loss, gradients in crews(3).run(compiled):
        assert loss < 1e-12
        assert gradients < 1e-12


def dropped() -> tuple[list[float], list[float]]:
    """Losses of the same batch with dropout on, twice from the same state."""
    _, pm = both("zero-again", drop=0.5)
    state = pm.randomness.state()
    first = [pm(**batch_of()).item() for _ in range(3)]
    pm.randomness.set_state(state)
    return first, [pm(**batch_of()).item() for _ in range(3)]


def test_dropout_draws_anew_and_can_be_repeated(crews: Callable[[int], WorkerPool]) -> None:
    found = crews(3).run(dropped)
    assert all(first == second for first, second in found)
    assert len({tuple(first) for first, _ in found}) == 1  # the loss is the global one on every rank
    assert len(set(found[0][0])) == 3


def names() -> tuple[list[str], list[str], list[str], list[str]]:
    alone, pm = both("zero")
    full = lopsided.full_state_dict(pm)
    assert all(torch.equal(full[name], value.cpu()) for name, value in alone.state_dict().items())
    return list(alone.state_dict()), list(pm.state_dict()), list(full), [n for n, _ in pm.named_parameters()]


def test_names_are_the_models(crews: Callable[[int], WorkerPool]) -> None:
    for expected, local, full, parameters in crews(3).run(names):
        assert local == expected == full
        assert parameters == [name for name, _ in net().named_parameters()]


# Other worlds


def in_another_order(order: tuple[int, ...]) -> tuple[float, float]:
    """Ranks that are not the plan's devices in their order."""
    alone, model = net(), net()
    plan = planned(model, "zero", Shares((0.61, 0.04, 0.35), named=(("state", (0.2, 0.5, 0.3)),)))
    met = meet(plan)
    world = World(met.rank, met.size, met.ranks, order, met.device, met.told)
    pm = Parallel(model, batch_of(), plan.graph, plan, world)
    loss, expected = pm(**batch_of()), alone(**batch_of())
    loss.backward()
    expected.backward()
    assert pm.shares.work == tuple(plan.shares.work[k] for k in order)
    return abs(loss.item() - expected.item()), gap(pm, alone)


def test_ranks_in_another_order(crews: Callable[[int], WorkerPool]) -> None:
    for loss, gradients in crews(3).run(in_another_order, (2, 0, 1)):
        assert loss < 1e-12
        assert gradients < 1e-12


def with_a_bystander() -> tuple[float, float, float, int]:
    """Three processes, a plan for two of three devices."""
    alone, model = net(), net()
    two = planned(model, "zero", Shares((0.7, 0.3), named=(("state", (0.5, 0.5)),)))
    from lopsided.cluster.cluster import Cluster
    from tests.support.jobs import cluster_of

    three: Cluster = cluster_of(3)
    plan = Plan(
        three,
        three.without_device(three.device_names[2]),
        two.program,
        two.shares,
        "adamw",
        False,
        1.0,
        two.breakdown,
        two.memory_bytes,
        (),
        two.search,
        (),
        (),
    )
    pm = lopsided.parallelize(model, batch_of(), plan=plan)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for _ in range(3):
        loss, expected = pm(**batch_of()), alone(**batch_of())
        loss.backward()
        expected.backward()
        norm, whole = lopsided.clip_grad_norm_(pm, 0.5), nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    pm.eval()
    alone.eval()
    loss, expected = pm(**batch_of()), alone(**batch_of())
    assert pm.steps_done == 3
    full = lopsided.full_state_dict(pm)
    away = max((full[name] - value.cpu()).abs().max().item() for name, value in alone.state_dict().items())
    return abs(loss.item() - expected.item()), abs(norm.item() - whole.item()), away, pm.world.place


def test_a_bystander_follows(crews: Callable[[int], WorkerPool]) -> None:
    found = crews(3).run(with_a_bystander)
    assert [place for *_, place in found] == [0, 1, -1]
    assert max(max(errors) for *errors, _ in found) < 1e-9


def alone_in_the_world() -> tuple[float, float]:
    alone, model = net(), net()
    pm = lopsided.parallelize(model, batch_of(), plan=planned(model, "dp", Shares((1.0,))))
    loss, expected = pm(**batch_of()), alone(**batch_of())
    loss.backward()
    expected.backward()
    return abs(loss.item() - expected.item()), gap(pm, alone)


def test_a_world_of_one(crews: Callable[[int], WorkerPool]) -> None:
    loss, gradients = crews(1).run(alone_in_the_world)[0]
    assert loss == 0
    assert gradients < 1e-12


def other_batches() -> float:
    """A tuple in place of a mapping, a loss made outside of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(HERE)
    alone = copy.deepcopy(model)
    x = torch.randn(10, 6, device=HERE)

    def loss_fn(output: Tensor, batch: object) -> Tensor:
        return output.square().mean()

    book = derive_rules(capture(model, (x,), loss_fn=loss_fn))
    plan = plan_of(data_parallel(book, prices_of(book.graph, THREE)), THREE)
    pm = lopsided.parallelize(model, (x,), plan=plan, loss_fn=loss_fn)
    loss, expected = pm(x), loss_fn(alone(x), x)
    loss.backward()
    expected.backward()
    return max(abs(loss.item() - expected.item()), gap(pm, alone))


def test_tuples_and_a_loss_of_ones_own(crews: Callable[[int], WorkerPool]) -> None:
    assert max(crews(3).run(other_batches)) < 1e-6


def measured_first() -> tuple[float, tuple[str, ...]]:
    """No plan and no cluster: the devices are measured and a plan is made."""
    alone, model = net(), net()
    pm = lopsided.parallelize(model, batch_of(), measure_s=2)
    loss, expected = pm(**batch_of()), alone(**batch_of())
    loss.backward()
    expected.backward()
    assert pm.world.place < 0 or gap(pm, alone) < 1e-9
    return abs(loss.item() - expected.item()), pm.plan.cluster.device_names


def test_without_a_plan_the_devices_are_measured(crews: Callable[[int], WorkerPool]) -> None:
    crews(2).run(measured_first)
    found = crews(2).run(measured_first)  # as often as one likes
    assert max(error for error, _ in found) < 1e-9
    assert found[0][1] == found[1][1]
    assert len(found[0][1]) == 2


def on_meta(kind: str) -> tuple[dict[str, float], int, int]:
    with torch.device("meta"):
        model = Net()
    plan = planned(net(torch.float32), kind)
    pm = lopsided.parallelize(model, batch_of(), plan=plan, seed=3)
    pm(**batch_of()).backward()
    full = lopsided.full_state_dict(pm)
    held = sum(p.numel() for p in pm.parameters())
    return (
        {name: value.double().sum().item() for name, value in full.items()},
        held,
        sum(p.numel() for p in model.parameters()),
    )


def test_a_model_on_meta_is_initialised_alike_whatever_the_plan(crews: Callable[[int], WorkerPool]) -> None:
    whole, cut = crews(3).run(on_meta, "dp"), crews(3).run(on_meta, "zero")
    assert all(sums == whole[0][0] for sums, *_ in (*whole, *cut))
    elements = sum(parameter.numel() for parameter in net().parameters())
    assert all(held == elements for _, held, _ in whole)
    assert all(held < elements for _, held, _ in cut)


# What can go wrong


def refused(what: str) -> str:
    _, pm = both("zero")
    try:
        if what == "name":
            pm(tokens=batch_of()["tokens"])
        elif what == "more":
            pm(**batch_of(), mask=torch.ones(3))
        elif what == "replaced":
            pm.get_submodule("up").weight = nn.Parameter(torch.zeros(12, 8))
            pm(**batch_of())
        elif what == "dtype":
            pm.float()
            pm(**batch_of())
        elif what == "twice":
            loss = pm(**batch_of())
            loss.backward()
            loss.backward()
        elif what == "nan":
            with torch.no_grad():
                pm.get_parameter("norm.bias").fill_(float("nan"))
            pm(**batch_of())  # on a GPU it is looked at in the next one
            pm(**batch_of())
        elif what == "model":
            smaller = net()
            del smaller.frozen.bias
            smaller.frozen.register_parameter("bias", None)
            lopsided.parallelize(smaller, batch_of(), plan=pm.plan)
        elif what == "batch":
            model = net()
            lopsided.parallelize(model, batch_of(rows=8), plan=pm.plan)
        elif what == "world":
            model = net()
            lopsided.parallelize(model, batch_of(), plan=planned(model, "dp", Shares((0.5, 0.5))))
    except lopsided.LopsidedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("name", ("BatchError", "no 'target'")),
        ("more", ("BatchError", "'mask', which was not planned")),
        ("replaced", ("TrainingError", "up.weight was replaced")),
        ("dtype", ("TrainingError", "embed.weight was torch.float64")),
        ("twice", ("TrainingError", "without a forward pass")),
        ("nan", ("TrainingError", "the loss is nan")),
        ("model", ("Error", "parameter frozen.bias is planned and not there")),
        ("batch", ("Error", "tokens was planned as i64[10, 4] and is i64[8, 4]")),
        ("world", ("WorldError", "3 processes")),
    ],
)
def test_what_is_refused(crews: Callable[[int], WorkerPool], what: str, told: tuple[str, ...]) -> None:
    for rank, text in enumerate(crews(3).run(refused, what)):
        assert all(part in text for part in told), f"rank {rank}: {text}"
        assert "\n  do      " in text


def different_batches() -> str:
    """Every rank gives another batch, as under a DistributedSampler."""
    model = net()
    shares = Shares((0.5, 0.2, 0.3))
    pm = lopsided.parallelize(model, batch_of(), plan=planned(model, "dp", shares))
    try:
        pm(**batch_of(pm.world.rank))
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


def test_ranks_with_different_batches_are_told(crews: Callable[[int], WorkerPool]) -> None:
    for text in crews(3).run(different_batches):
        assert "ranks do not do the same" in text
        assert "holding" in text


def different_batches_later() -> str:
    """Alike at first, and then one rank draws its own noise."""
    model = net()
    pm = lopsided.parallelize(model, batch_of(), plan=planned(model, "dp", THREE))
    try:
        for k in range(5):
            pm(**batch_of(k if k < 4 else 10 + pm.world.rank))
    except lopsided.LopsidedError as error:
        return f"{pm._forwards}: {error}"
    return ""


def test_whole_batches_are_compared_in_every_step(crews: Callable[[int], WorkerPool]) -> None:
    for text in crews(3).run(different_batches_later):
        assert text.startswith("5: ranks do not do the same")


def skips_a_batch() -> str:
    _, pm = both()
    loader = DataLoader(TensorDataset(*batch_of(rows=30).values()), batch_size=10, collate_fn=named)
    try:
        for k, batch in enumerate(lopsided.shard(loader, pm)):
            if k != 1 or pm.world.rank != 1:
                pm(**batch)
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


def test_a_rank_that_skips_a_batch_is_named(crews: Callable[[int], WorkerPool]) -> None:
    for text in crews(3).run(skips_a_batch):
        assert "batch 3 of epoch 0 on rank 1" in text
        assert "batch 2 of epoch 0 on ranks 0, 2" in text


def drifted() -> tuple[list[str], bool]:
    model = net()
    pm = lopsided.parallelize(model, batch_of(), plan=planned(model), check_every=2)
    if pm.world.rank == 1:
        with torch.no_grad():
            pm.get_parameter("up.weight")[0, 0] += 1e-3
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            pm(**batch_of())
    return [str(w.message) for w in heard], torch.equal(pm.get_parameter("up.weight"), net().up.weight)


def test_drift_is_told_and_repaired(crews: Callable[[int], WorkerPool]) -> None:
    found = crews(3).run(drifted)
    assert "up.weight" in "".join(found[0][0])
    assert all(repaired for _, repaired in found)


def test_a_run_can_be_sent_to_another_process() -> None:
    run = classic("mlp:layers=3,width=24,classes=7,batch=7", "zero", THREE)
    assert str(parsed(run).program) == run.program
