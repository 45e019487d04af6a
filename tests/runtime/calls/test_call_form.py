"""A parallel model is called like the model: what it returns, any loss function, any shape, numbers that change."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lopsided
from lopsided.capturing.capture_graph import capture_call
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.placement import Shares
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.runtime.parallel import Parallel
from tests.support.jobs import cluster_of, plan_of, prices_of

SHARES = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))
NONE_FOR_ONE = Shares((0.6, 0.0, 0.4), named=(("state", (0.3, 0.3, 0.4)),))
ROWS = 10


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.out = nn.Embedding(13, 8), nn.Linear(8, 12), nn.Linear(12, 5)

    def features(self, tokens: Tensor) -> Tensor:
        return torch.relu(self.up(self.embed(tokens).mean(1)))

    def forward(self, tokens: Tensor) -> Any:
        return self.out(self.features(tokens))


class WithLoss(Classifier):
    """As nanoGPT returns it."""

    def forward(self, tokens: Tensor, target: Tensor | None = None) -> Any:
        logits = self.out(self.features(tokens))
        return logits, None if target is None else F.cross_entropy(logits, target)


@dataclass
class Result:
    loss: Tensor | None
    logits: Tensor
    extra: dict[str, Any]


class InADataclass(Classifier):
    def forward(self, tokens: Tensor, target: Tensor | None = None) -> Any:
        hidden = self.features(tokens)
        logits = self.out(hidden)
        loss = None if target is None else F.cross_entropy(logits, target)
        right = (logits.argmax(-1) == target).double().mean() if target is not None else None
        return Result(loss, logits, {"accuracy": right, "layers": 2, "hidden": hidden.t()})


def tokens_of(seed: int = 0, rows: int = ROWS, length: int = 4) -> Tensor:
    return torch.randint(0, 13, (rows, length), generator=torch.Generator().manual_seed(seed))


def target_of(seed: int = 0, rows: int = ROWS) -> Tensor:
    return torch.randint(0, 5, (rows,), generator=torch.Generator().manual_seed(100 + seed))


def built(kind: type[nn.Module], **how: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**how).double()


def plan_for(model: nn.Module, batch: object, kind: str, shares: Shares = SHARES, loss_fn: Any = None) -> Plan:
    book = derive_rules(capture_call(model, batch, loss_fn=loss_fn, needs_loss=False).graph)
    program = data_parallel(book, prices_of(book.graph, shares))
    return plan_of(stored_cut(program) if kind == "zero" else program, shares)


def both(
    kind: type[nn.Module], batch: object, how: str = "dp", shares: Shares = SHARES, loss_fn: Any = None, **of: Any
) -> tuple[Any, Parallel]:
    alone, model = built(kind, **of), built(kind, **of)
    plan = plan_for(model, batch, how, shares, loss_fn)
    return alone, lopsided.parallelize(model, batch, plan=plan, loss_fn=loss_fn)


def gap(pm: Parallel, alone: nn.Module) -> float:
    """How far this rank's gradients are from its part of one device's."""
    whole = dict(alone.named_parameters())
    worst = 0.0
    for name, parameter in pm.named_parameters():
        theirs = whole[name].grad
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        part = pm.pieces[name].take(torch.zeros_like(whole[name]) if theirs is None else theirs)
        worst = max(worst, (mine - part).abs().max().item() if part.numel() else 0.0)
    return worst


def rows_of(pm: Parallel, tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor with a row for each of the batch's."""
    loader = lopsided.shard([dict.fromkeys(pm.inputs, tensor)], pm)
    return next(iter(next(iter(loader)).values()))  # type: ignore[no-any-return]


def far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return (a - b).abs().max().item() if a.numel() else 0.0


# What is returned


def returns_a_tuple(how: str, shares: Shares) -> float:
    batch = {"tokens": tokens_of(), "target": target_of()}
    alone, pm = both(WithLoss, batch, how, shares)
    logits, loss = pm(**batch)
    expected, one = alone(**batch)
    worst = [far(loss, one), far(logits, expected)]  # given the whole batch, the whole comes back
    loss.backward()
    one.backward()
    worst.append(gap(pm, alone))
    share = next(iter(lopsided.shard([batch], pm)))
    logits, loss = pm(**share)
    worst += [far(logits, rows_of(pm, expected)), far(lopsided.gather(logits), expected)]
    guesses = lopsided.gather(logits.argmax(-1))
    assert torch.equal(guesses, expected.argmax(-1))
    assert torch.equal(lopsided.gather(share["target"], pm), batch["target"])
    pm.eval()
    with torch.no_grad():
        logits, loss = pm(batch["tokens"])  # by position, and without a target
        assert loss is None
        worst.append(far(logits, alone.eval()(batch["tokens"])[0]))
    return max(worst)


@pytest.mark.parametrize("shares", [SHARES, NONE_FOR_ONE], ids=["all", "one-has-nothing"])
@pytest.mark.parametrize("how", ["dp", "zero"])
def test_a_tuple_as_the_model_returns_it(worker_pools: Callable[[int], WorkerPool], how: str, shares: Shares) -> None:
    assert max(worker_pools(3).run(returns_a_tuple, how, shares)) < 1e-9


def returns_a_dataclass() -> float:
    batch = {"tokens": tokens_of(), "target": target_of()}
    alone, pm = both(InADataclass, batch)
    found, expected = pm(**batch), alone(**batch)
    assert type(found).__name__ == "Result"
    assert isinstance(found, Result)
    assert found.extra["layers"] == 2
    assert found.loss is not None
    worst = [far(found.loss, expected.loss), far(found.logits, expected.logits)]
    worst += [far(found.extra[name], expected.extra[name]) for name in ("accuracy", "hidden")]
    # A term outside of the model, of the whole output: every rank adds the same.
    (found.loss + 0.1 * found.logits.pow(2).mean()).backward()
    (expected.loss + 0.1 * expected.logits.pow(2).mean()).backward()
    worst.append(gap(pm, alone))
    with pytest.warns(DeprecationWarning, match=r"write output.loss.backward"):
        pm(**batch).backward()
    return max(worst)


def test_a_dataclass_with_a_metric_that_the_loss_does_not_need(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert max(worker_pools(3).run(returns_a_dataclass)) < 1e-9


class WithAux(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.aux = 0.0

    def forward(self, tokens: Tensor, target: Tensor) -> Any:
        logits = self.out(self.features(tokens))
        self.aux = logits.pow(2).mean()
        return {"loss": F.cross_entropy(logits, target), "logits": logits, "aux": logits.logsumexp(-1).mean()}


def terms_the_loss_does_not_know() -> list[str]:
    batch = {"tokens": tokens_of(), "target": target_of()}
    _, pm = both(WithAux, batch)
    told = []
    for term in (lambda output: output["aux"], lambda output: pm.aux, lambda output: torch.exp(pm.module.aux)):
        output = pm(**batch)
        try:
            (output["loss"] + 0.1 * term(output)).backward()
        except lopsided.LopsidedError as error:
            told.append(str(error))
    output = pm(**batch)
    output["loss"].backward()  # which needs none of them
    return told


def test_a_term_that_would_lose_its_gradient_is_refused(worker_pools: Callable[[int], WorkerPool]) -> None:
    for returned, stored, again in worker_pools(3).run(terms_the_loss_does_not_know):
        assert "an output that the loss of the model does not depend on" in returned
        assert "forward stores a tensor in model.aux" in stored
        assert "forward stores a tensor in model.aux" in again


def twice_differentiated() -> str:
    _, pm = both(Classifier, (tokens_of(), target_of()), loss_fn=F.cross_entropy)
    try:
        loss = pm(tokens_of(), target_of())
        loss.backward(create_graph=True)
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


def gradients_asked_for(how: str) -> tuple[str, float]:
    """With respect to parameters they would be nothing; with respect to inputs they leave parameters alone."""
    alone, pm = both(Classifier, (tokens_of(), target_of()), how, loss_fn=F.cross_entropy)
    told = ""
    try:
        torch.autograd.grad(pm(tokens_of(), target_of()), [*pm.parameters()])
    except lopsided.LopsidedError as error:
        told = str(error)
    for k in range(2):
        pm(tokens_of(k), target_of(k)).backward()
        F.cross_entropy(alone(tokens_of(k)), target_of(k)).backward()
    return told, gap(pm, alone)


@pytest.mark.parametrize("how", ["dp", "zero"])
def test_gradients_with_respect_to_parameters_are_asked_for(
    worker_pools: Callable[[int], WorkerPool], how: str
) -> None:
    for told, worst in worker_pools(3).run(gradients_asked_for, how):
        assert "torch.autograd.grad is asked for the gradient of" in told
        assert "loss.backward()" in told
        assert worst < 1e-9


def test_second_derivatives_are_refused(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert all("create_graph=True" in text for text in worker_pools(3).run(twice_differentiated))


def whole_state(how: str) -> tuple[float, str]:
    """A checkpoint of one device is loaded as everybody does it; initialising anew is refused on pieces."""
    _, pm = both(Classifier, (tokens_of(), target_of()), how, loss_fn=F.cross_entropy)
    torch.manual_seed(5)
    other = Classifier().double()
    pm.load_state_dict(other.state_dict())
    worst = far(pm(tokens_of(), target_of()), F.cross_entropy(other(tokens_of()), target_of()))
    try:
        nn.init.xavier_uniform_(pm.up.weight)
    except lopsided.LopsidedError as error:
        return worst, str(error)
    return worst, ""


def test_whole_tensors_are_loaded_and_not_drawn(worker_pools: Callable[[int], WorkerPool]) -> None:
    for worst, told in worker_pools(3).run(whole_state, "zero"):
        assert worst < 1e-9
        assert "would draw for this process's piece of up.weight" in told


def term_of_rows() -> str:
    batch = {"tokens": tokens_of(), "target": target_of()}
    _, pm = both(WithLoss, batch)
    logits, loss = pm(**next(iter(lopsided.shard([batch], pm))))
    try:
        (loss + logits.pow(2).mean()).backward()
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


def test_a_loss_of_some_rows_is_refused(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert all("this rank's rows of an output" in text for text in worker_pools(3).run(term_of_rows))


def loss_outside(how: str) -> float:
    """No loss is known to anyone but the script: of whole outputs it is the same on every rank."""
    alone, pm = both(Classifier, (tokens_of(),), how)
    worst = []
    for k in range(3):
        for model in (alone, pm):
            model.zero_grad()
            loss = F.cross_entropy(model(tokens_of(k)), target_of(k))
            loss.backward()
        worst.append(gap(pm, alone))
    for batch in lopsided.shard([(tokens_of(7),)], pm):
        pm.zero_grad(), alone.zero_grad()
        F.cross_entropy(lopsided.gather(pm(*batch)), target_of(7)).backward()
        F.cross_entropy(alone(tokens_of(7)), target_of(7)).backward()
        worst.append(gap(pm, alone))
    return max(worst)


@pytest.mark.parametrize("how", ["dp", "zero"])
def test_a_loss_that_only_the_script_knows(worker_pools: Callable[[int], WorkerPool], how: str) -> None:
    assert max(worker_pools(3).run(loss_outside, how)) < 1e-9


# The loss function


def usual_loop(how: str) -> float:
    """`criterion(model(x), y)`, as everybody writes it, trained and evaluated."""
    criterion: Any = nn.CrossEntropyLoss(label_smoothing=0.1)
    alone, pm = both(Classifier, (tokens_of(), target_of()), how, loss_fn=criterion)
    worst = []
    runs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (alone, pm)]
    data = TensorDataset(tokens_of(rows=33), target_of(rows=33))  # the last batch has 3 rows
    loader = DataLoader(data, batch_size=ROWS)
    for (x, y), (own_x, own_y) in zip(loader, lopsided.shard(loader, pm), strict=True):
        losses = []
        for (model, optimizer), batch, loss_fn in zip(
            runs, ((x, y), (own_x, own_y)), (criterion, pm.loss_fn), strict=True
        ):
            output = model(batch[0])
            loss = loss_fn(output, batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            right = (output.argmax(1) == batch[1]).sum()
            assert right >= 0
        worst.append(far(*losses))
    pm.eval()
    with torch.no_grad():
        for (x, y), (own_x, own_y) in zip(loader, lopsided.shard(loader, pm), strict=True):
            worst.append(far(pm.loss_fn(pm(own_x), own_y), criterion(alone.eval()(x), y)))
    assert {*lopsided.full_state_dict(pm)} == {*alone.state_dict()}
    pm.train()
    worst.append(far(pm(tokens_of(), target_of()), criterion(alone(tokens_of()), target_of())))
    return max(worst)


@pytest.mark.parametrize("how", ["dp", "zero"])
def test_the_usual_loop(worker_pools: Callable[[int], WorkerPool], how: str) -> None:
    assert max(worker_pools(3).run(usual_loop, how)) < 1e-9


def loss_is_a_module() -> tuple[float, set[str]]:
    """The loss module's tensors are not the model's, and copies of the model have it too."""
    criterion = nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0, dtype=torch.float64))
    alone, pm = both(Classifier, (tokens_of(), target_of()), loss_fn=criterion)
    copied = copy.deepcopy(pm)
    worst = far(copied(tokens_of(), target_of()), criterion(alone(tokens_of()), target_of()))
    return worst, {*pm.state_dict()} ^ {*alone.state_dict()}


def test_a_loss_that_is_a_module_is_no_part_of_the_model(worker_pools: Callable[[int], WorkerPool]) -> None:
    for worst, keys in worker_pools(3).run(loss_is_a_module):
        assert worst < 1e-9
        assert keys == set()


def usual_loop_beside_an_idle_device() -> tuple[float, int]:
    """Three processes, a plan for two of three devices: the third goes through the same loop."""
    criterion: Any = nn.CrossEntropyLoss()
    alone, model = built(Classifier), built(Classifier)
    two = Shares((0.7, 0.3), named=(("state", (0.5, 0.5)),))
    plan = plan_for(model, (tokens_of(), target_of()), "zero", two, criterion)
    three = cluster_of(3)
    plan = replace(plan, cluster=three, on=three.without_device(three.device_names[2]))
    pm = lopsided.parallelize(model, (tokens_of(), target_of()), plan=plan, loss_fn=criterion)
    worst = []
    runs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (alone, pm)]
    whole = [(tokens_of(k), target_of(k)) for k in range(3)]
    for (x, y), (own_x, own_y) in zip(whole, lopsided.shard(whole, pm), strict=True):
        losses = []
        for (trained, optimizer), batch in zip(runs, ((x, y), (own_x, own_y)), strict=True):
            output = trained(batch[0])
            loss = (criterion if trained is alone else pm.loss_fn)(output, batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        worst.append(far(*losses))
    output, told = pm(tokens_of()), ""
    pm.loss_fn(output, target_of())
    try:
        output.argmax(1)
    except lopsided.LopsidedError as error:
        told = str(error)
    assert ("leaves this rank's device idle" in told) == (pm.world.place < 0)
    worst.append(far(lopsided.gather(output), alone(tokens_of())))
    pm.eval()
    with torch.no_grad():
        for (x, y), (own_x, own_y) in zip(whole, lopsided.shard(whole, pm), strict=True):
            output, expected = pm(own_x), alone(x)
            worst.append(far(lopsided.gather(output), expected))
            worst.append(far(pm.loss_fn(output, own_y), criterion(expected, y)))
            assert torch.equal(lopsided.gather(own_y), y)
    return max(worst), pm.world.place


def test_the_usual_loop_on_a_rank_whose_device_is_idle(worker_pools: Callable[[int], WorkerPool]) -> None:
    found = worker_pools(3).run(usual_loop_beside_an_idle_device)
    assert [place for _, place in found] == [0, 1, -1]
    assert max(worst for worst, _ in found) < 1e-9


def wrong_uses() -> list[str]:
    _, pm = both(InADataclass, (tokens_of(), target_of()), loss_fn=lambda out, y: F.cross_entropy(out.logits, y))
    told = []
    for use in (
        lambda: pm(tokens_of()).logits.argmax(),
        lambda: pm.loss_fn(pm(tokens_of()).logits, target_of()),
        lambda: lopsided.parallelize(built(Classifier), (tokens_of(),), plan=pm.plan).loss_fn(1, 2),
    ):
        try:
            use()
            told.append("")
        except lopsided.LopsidedError as error:
            told.append(str(error))
    return told


def test_an_output_before_its_loss_is_refused(worker_pools: Callable[[int], WorkerPool]) -> None:
    for before, part, _ in worker_pools(3).run(wrong_uses):
        assert "before the loss function was called" in before
        assert "a part of what the model returned" in part


def loss_of_outputs_alone() -> float:
    def spread(output: Tensor) -> Tensor:
        return output.var(0).sum()

    alone, pm = both(Classifier, (tokens_of(),), loss_fn=spread)
    loss, one = pm(tokens_of()), spread(alone(tokens_of()))
    loss.backward()
    one.backward()
    return max(far(loss, one), gap(pm, alone))


def test_a_loss_of_the_output_alone(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert max(worker_pools(3).run(loss_of_outputs_alone)) < 1e-9


# Any shape


def shapes(how: str) -> tuple[float, int]:
    batch = {"tokens": tokens_of(), "target": target_of()}
    alone, pm = both(WithLoss, batch, how)
    worst = []
    for seed, (rows, length) in enumerate([(10, 4), (7, 4), (10, 9), (2, 3), (7, 4), (1, 1), (10, 4)]):
        given = {"tokens": tokens_of(seed, rows, length), "target": target_of(seed, rows)}
        for loader in ([given], lopsided.shard([given], pm)):
            for handed in loader:
                alone.zero_grad(), pm.zero_grad()
                expected, one = alone(**given)
                logits, loss = pm(**handed)
                one.backward()
                loss.backward()
                worst += [far(loss, one), far(lopsided.gather(logits), expected), gap(pm, alone)]
    return max(worst), len(pm._programs._calls)


@pytest.mark.parametrize("how", ["dp", "zero"])
def test_any_shape_on_the_same_pieces(worker_pools: Callable[[int], WorkerPool], how: str) -> None:
    for worst, programs in worker_pools(3).run(shapes, how):
        assert worst < 1e-9
        assert programs == 5


def padded() -> tuple[float, list[int]]:
    batch = {"tokens": tokens_of(length=16), "target": target_of()}
    alone, pm = both(Masked, batch)
    samples = [tokens_of(k, rows=1, length=1 + k % 13)[0].clamp(min=1) for k in range(40)]

    def collate(rows: list[int]) -> dict[str, Tensor]:
        padded = nn.utils.rnn.pad_sequence([samples[k] for k in rows], batch_first=True)
        return {"tokens": padded, "target": torch.tensor([k % 5 for k in rows])}

    loader = DataLoader(range(40), batch_size=ROWS, collate_fn=collate)  # type: ignore[arg-type]
    worst, lengths = [], []
    for own, whole in zip(lopsided.shard(loader, pm, pad={"tokens": 0}), loader, strict=True):
        lengths.append(own["tokens"].shape[1])
        worst.append(far(pm(**own)[1], alone(**whole)[1]))
    return max(worst), lengths


class Masked(Classifier):
    """Padding, which is token 0, does not count."""

    def forward(self, tokens: Tensor, target: Tensor) -> Any:
        counts = (tokens != 0)[..., None].to(self.up.weight.dtype)
        mean = (self.embed(tokens) * counts).sum(1) / counts.sum(1)
        logits = self.out(torch.relu(self.up(mean)))
        return logits, F.cross_entropy(logits, target)


def test_samples_of_different_lengths_are_padded_to_a_few(worker_pools: Callable[[int], WorkerPool]) -> None:
    found = worker_pools(3).run(padded)
    for worst, lengths in found:
        assert worst < 1e-9
        assert lengths == found[0][1]
        assert {*lengths} <= {4, 6, 8, 12, 16}


# What is not a tensor


class Scaled(Classifier):
    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.tau = tau
        self.settings = type("Settings", (), {})()
        self.settings.power = 2

    def forward(self, tokens: Tensor, target: Tensor, scale: Any = 1.0, options: Any = None) -> Any:
        logits = self.out(self.features(tokens)) * self.tau * scale
        if options is not None and options["square"]:
            logits = logits.pow(self.settings.power)
        return F.cross_entropy(logits, target)


def numbers() -> tuple[float, int]:
    alone, pm = both(Scaled, (tokens_of(), target_of()))
    worst = []
    before = len(pm._programs._calls)
    for k, more in enumerate([(1.0,), (0.5,), (0.25,), (0.125,), (2.0, {"square": True}), (3.0, {"square": False})]):
        alone.zero_grad(), pm.zero_grad()
        one, loss = alone(tokens_of(k), target_of(k), *more), pm(tokens_of(k), target_of(k), *more)
        one.backward()
        loss.backward()
        worst += [far(loss, one), gap(pm, alone)]
    made = len(pm._programs._calls) - before
    for model in (alone, pm):
        model.tau = 0.3
        model.settings.power = 3
    more = (1.0, {"square": True})
    worst.append(far(pm(tokens_of(), target_of(), *more), alone(tokens_of(), target_of(), *more)))
    return max(worst), made


def test_numbers_and_attributes_may_change(worker_pools: Callable[[int], WorkerPool]) -> None:
    for worst, programs in worker_pools(3).run(numbers):
        assert worst < 1e-9
        assert programs <= 6  # those of the scale alone share one


# What else the loss depends on: each may change between two steps

SETTINGS = {"power": 2.0}
OFFSET = 0.0


class Weighed:
    """A loss function that is an object with settings of its own."""

    def __init__(self) -> None:
        self.weight, self.classes = 1.0, torch.ones(5, dtype=torch.float64)

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.weight * F.cross_entropy(logits, target, weight=self.classes)


class Knobs(Classifier):
    shift = 0.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.options = {"scale": 1.0}
        self.mask, self.act = torch.ones(12, dtype=torch.float64), torch.tanh

    def forward(self, tokens: Tensor, settings: Any = None) -> Any:
        hidden = self.act(self.features(tokens) * self.mask + self.shift + OFFSET)
        hidden = hidden * getattr(self, "late", 1.0) * (settings.gain if settings is not None else 1.0)
        return self.out(hidden) * self.options["scale"] * SETTINGS["power"]


def turned(which: str, model: Any, criterion: Weighed) -> None:
    global OFFSET
    if which == "entry of a dict":
        model.options["scale"] = 3.0
    elif which == "dict":
        model.options = {"scale": 3.0}
    elif which == "global":
        OFFSET = 0.5
    elif which == "entry of a global dict":
        SETTINGS["power"] = 3.0
    elif which == "tensor":
        model.mask = torch.arange(12, dtype=torch.float64)
    elif which == "tensor in place":
        model.mask.mul_(2)
    elif which == "function":
        model.act = torch.sigmoid
    elif which == "attribute of the class":
        model.shift = 0.7
    elif which == "attribute that was not there":
        model.late = 0.3
    elif which == "loss":
        criterion.weight = 2.0
    elif which == "tensor of the loss":
        criterion.classes[1] = 5.0
    elif which == "hook":
        model.up.register_forward_hook(lambda module, args, output: 2 * output)


KNOBS = ["entry of a dict", "dict", "global", "entry of a global dict", "tensor", "tensor in place", "function"]
KNOBS += ["attribute of the class", "attribute that was not there", "loss", "tensor of the loss", "hook"]


def with_knobs() -> dict[str, float]:
    global OFFSET
    found = {}
    for which in KNOBS:
        OFFSET, SETTINGS["power"] = 0.0, 2.0
        criterion = Weighed()
        alone, pm = both(Knobs, (tokens_of(), target_of()), loss_fn=criterion)
        far_before = far(pm.loss_fn(pm(tokens_of()), target_of()), criterion(alone(tokens_of()), target_of()))
        turned(which, alone, criterion)
        if not which.startswith(("global", "entry of a global", "loss", "tensor of")):
            turned(which, pm, Weighed())
        one = criterion(alone(tokens_of()), target_of())
        loss = pm.loss_fn(pm(tokens_of()), target_of())
        one.backward()
        loss.backward()
        found[which] = max(far_before, far(loss, one), gap(pm, alone))
        before = len(pm._programs._calls), sum(map(len, pm._programs._calls.values()))
        pm.loss_fn(pm(tokens_of()), target_of())
        assert before == (len(pm._programs._calls), sum(map(len, pm._programs._calls.values())))
    return found


def test_whatever_the_loss_depends_on_may_change(worker_pools: Callable[[int], WorkerPool]) -> None:
    for found in worker_pools(3).run(with_knobs):
        assert [which for which, worst in found.items() if worst > 1e-9] == []


def hooked_later() -> str:
    _, pm = both(Classifier, (tokens_of(), target_of()), loss_fn=F.cross_entropy)
    pm(tokens_of(), target_of())
    pm.up.register_full_backward_hook(lambda module, inside, outside: None)
    try:
        pm(tokens_of(), target_of())
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


def test_a_backward_hook_that_comes_later_is_refused(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert all("module up has a backward hook" in text for text in worker_pools(3).run(hooked_later))


class Gain:
    def __init__(self, gain: float) -> None:
        self.gain = gain


def objects_as_arguments() -> float:
    alone, pm = both(Knobs, (tokens_of(), Gain(1.0)))
    return max(far(pm(tokens_of(), Gain(k)), alone(tokens_of(), Gain(k))) for k in (1.0, 0.5, np.float32(0.25)))


def test_an_object_among_the_arguments_may_change(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert max(worker_pools(3).run(objects_as_arguments)) < 1e-9


def set_on_one_rank(known: bool) -> str:
    _, pm = both(Scaled, (tokens_of(), target_of()))
    pm(tokens_of(), target_of())
    # Where all set it, each to another value, all make a program; where one does, the others have begun their step.
    pm.tau = 0.5 + 0.1 * (pm.world.rank == 1)
    if known and pm.world.rank != 1:
        pm.tau = 1.0
    try:
        pm(tokens_of(), target_of())
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


def test_an_attribute_that_differs_by_rank_is_named(worker_pools: Callable[[int], WorkerPool]) -> None:
    for text in worker_pools(3).run(set_on_one_rank, False):
        assert "what forward reads is other than before: model.tau was 1.0 and is 0.6 on rank 1" in text


def test_a_rank_that_is_told_alone_ends_the_others() -> None:
    with WorkerPool(3, timeout_s=60) as pool:
        outcomes = pool.outcomes(set_on_one_rank, True)
    assert "model.tau was 1.0 and is 0.6 on rank 1" in outcomes[1][1]
    for rank in (0, 2):  # which wait in a collective: their processes end, long before timeout_s
        assert outcomes[rank][0] is False


def annealed() -> str:
    _, pm = both(Scaled, (tokens_of(), target_of()))
    try:
        for k in range(12):
            pm.tau = 1.0 - 0.05 * k
            pm(tokens_of(), target_of())
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


def test_an_attribute_that_changes_in_every_step_is_named(worker_pools: Callable[[int], WorkerPool]) -> None:
    for text in worker_pools(3).run(annealed):
        assert "model.tau was 0." in text
        assert "pass it to forward as an argument" in text


def gradient_of_input(how: str) -> float:
    """A small module in front of the parallel one, as adversarial training or a frozen encoder has it."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 5)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.out(x), target)

    torch.manual_seed(1)
    front = nn.Linear(3, 8).double()
    fronts = front, copy.deepcopy(front)
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    alone, pm = both(Behind, (front(x).detach(), target_of()), how)
    losses = []
    for model, ahead in zip((alone, pm), fronts, strict=True):
        # An attack first: parameters have no part of its gradient.
        at = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (slope,) = torch.autograd.grad(model(ahead(at), target_of()), at)
        loss = model(ahead(x + 0.1 * slope), target_of())
        loss.backward()
        losses.append(loss.detach())
    return max(far(*losses), gap(pm, alone), far(fronts[0].weight.grad, fronts[1].weight.grad))


@pytest.mark.parametrize("how", ["dp", "zero"])
def test_an_input_gets_its_whole_gradient(worker_pools: Callable[[int], WorkerPool], how: str) -> None:
    assert max(worker_pools(3).run(gradient_of_input, how)) < 1e-9


# The model itself


def whole_again() -> tuple[list[str], float]:
    criterion: Any = nn.CrossEntropyLoss()
    alone, pm = both(Classifier, (tokens_of(), target_of()), "zero", loss_fn=criterion)
    told = []
    for use in (lambda: pm.module(tokens_of()), lambda: pm.features(tokens_of())):
        try:
            use()
            told.append("")
        except lopsided.LopsidedError as error:
            told.append(str(error))
    for model in (alone, pm):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (criterion(model(tokens_of()), target_of()) if model is alone else pm(tokens_of(), target_of())).backward()
        optimizer.step()
    made = lopsided.whole(pm)
    assert (made is None) == (pm.world.rank != 0)
    if made is None:
        return told, 0.0
    assert type(made) is Classifier
    return told, far(made(tokens_of()), alone(tokens_of()))


def test_the_whole_model_on_one_rank(worker_pools: Callable[[int], WorkerPool]) -> None:
    for told, gap in worker_pools(3).run(whole_again):
        assert all("lopsided.whole(pm)" in text for text in told)
        assert gap < 1e-9


def test_submodules_may_be_called_like_attributes_of_the_parallel_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.inputs, self.plan = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.plan(self.inputs(self.module(x))).pow(2).sum()

    torch.manual_seed(0)
    net, batch = Net(), {"x": torch.randn(3, 4)}
    wanted = net(**batch).item()
    pm = lopsided.parallelize(net, batch, cluster=cluster_of(1), quiet=True)
    loss = pm(**batch)
    loss.backward()
    assert loss.item() == pytest.approx(wanted)
    assert {name for name, p in pm.named_parameters() if p.grad is not None} == {*dict(Net().named_parameters())}
