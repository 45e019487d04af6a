"""A batch in rounds has the losses and gradients of the whole batch; what has not is refused in words."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lopsided.capturing.capture_graph import capture
from lopsided.ir.graph_text import parse_graph
from lopsided.ir.placement import Shares
from lopsided.ir.program import Program, check_program, one_device
from lopsided.models import zoo
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.schedule.decisions import Decisions, Rerun
from lopsided.schedule.lower import lower
from lopsided.schedule.rounds import NoRoundsError, Rounds, in_rounds
from lopsided.schedule.schedule import check_schedule, parse_schedule
from lopsided.verification.simulator import Simulation, simulate
from lopsided.verification.verifier import random_program
from tests.support.jobs import prices_of

SHARES = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))


def apart(one: Simulation, other: Simulation) -> float:
    """How far two steps are apart, relatively to the largest gradient."""
    loss = abs(float(one.loss - other.loss)) / abs(float(other.loss))
    largest = max(float(gradient.abs().max()) for gradient in other.gradients.values())
    assert one.gradients.keys() == other.gradients.keys()
    gradients = [float((one.gradients[name] - other.gradients[name]).abs().max()) for name in one.gradients]
    return max(loss, max(gradients) / largest)


def still(model: nn.Module) -> nn.Module:
    """The model without dropout: rounds draw masks of their own."""
    for module in model.modules():
        for name in ("p", "dropout", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def wide(model: nn.Module, batch: object) -> tuple[nn.Module, object]:
    """The same in float64."""
    doubled = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)
    return model.double(), doubled


def programs_of(rounds: Rounds, number: int) -> Program:
    book = derive_rules(rounds.graph)
    if number > 1:
        return random_program(book, random.Random(number))
    program = data_parallel(book, prices_of(rounds.graph, SHARES))
    return stored_cut(program) if number else program


class Loss(nn.Module):
    """Two layers before a loss."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.lower, self.upper = how, nn.Linear(6, 10), nn.Linear(10, 5)
        self.offset = nn.Parameter(torch.randn(1, 5))
        self.register_buffer("weight", torch.rand(5) + 0.5)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        h = self.upper(torch.tanh(self.lower(x)))
        if self.how == "count":
            return F.cross_entropy(h, y, ignore_index=2)
        if self.how == "weighted":
            return F.cross_entropy(h, y, self.weight, ignore_index=2, label_smoothing=0.1)
        if self.how == "nll":
            return F.nll_loss(h.log_softmax(-1), y, ignore_index=2)
        if self.how == "masked":
            return ((h**2).mean(-1) * mask).sum() / mask.sum()
        if self.how == "by length":
            return (h**2).sum() / h.shape[0]
        if self.how == "decay":
            return F.mse_loss(h, h.detach() * 0.5) + 0.1 * self.lower.weight.square().sum()
        if self.how == "expanded":
            return (h * self.offset.expand(h.shape[0], 5)).mean() + h.abs().mean(0).sum()
        if self.how == "zeros":
            return (torch.cat([h, torch.zeros(h.shape[0], 1, dtype=h.dtype)], 1).sigmoid() * 2).sum()
        if self.how == "rows":
            places = torch.arange(h.shape[0], dtype=h.dtype)
            return (h.sigmoid().sum(-1) * places).mean()
        if self.how == "most":
            return (h.sigmoid().sum(-1) * (mask == mask.max())).sum()
        if self.how == "contrast":
            return F.cross_entropy(h @ h.T, y)
        if self.how == "spread":
            return h.std(0).sum()
        if self.how == "guessed":
            return F.cross_entropy(h, h.argmax(-1), ignore_index=2)
        raise AssertionError(self.how)


def batch_of(rows: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=made, dtype=torch.float64)
    y = torch.randint(5, (rows,), generator=made)
    # All rows of one round are ignored.
    return x, torch.where(torch.arange(rows) < 4, 2, y), torch.rand(rows, generator=made, dtype=torch.float64)


EXACT = ("count", "weighted", "nll", "masked", "by length", "decay", "expanded", "zeros", "rows", "most")


@pytest.mark.parametrize("how", EXACT)
def test_losses_of_rounds_add_up_to_that_of_the_batch(how: str) -> None:
    model, batch = Loss(how).double(), batch_of()
    graph = capture(model, batch)
    alone = simulate(one_device(graph), model, batch, (1.0,))
    for count in (2, 3, 12):
        rounds = in_rounds(graph, count)
        decisions = Decisions(microbatches=count)
        one = simulate(one_device(rounds.graph), model, batch, (1.0,), decisions=decisions, rounds=rounds)
        assert apart(one, alone) < 1e-9
        program = random_program(derive_rules(rounds.graph), random.Random(count))
        many = simulate(program, model, batch, SHARES, decisions=decisions, rounds=rounds, expected=0.25)
        assert apart(many, alone) < 1e-9


@pytest.mark.parametrize(
    ("how", "said"),
    [("contrast", "no rule"), ("spread", "no rule"), ("guessed", "no rule")],
)
def test_what_couples_rows_has_no_rounds(how: str, said: str) -> None:
    graph = capture(Loss(how).double(), batch_of())
    with pytest.raises(NoRoundsError, match=said) as refused:
        in_rounds(graph, 3)
    assert "test_rounds.py" in str(refused.value)
    assert "do " in str(refused.value)


def test_batch_norm_in_training_has_no_rounds() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    graph = capture(model, (torch.randn(12, 6), torch.zeros(12, dtype=torch.long)), loss_fn=F.cross_entropy)
    with pytest.raises(NoRoundsError, match="statistics of the whole batch"):
        in_rounds(graph, 2)
    model.eval()
    graph = capture(model, (torch.randn(12, 6), torch.zeros(12, dtype=torch.long)), loss_fn=F.cross_entropy)
    assert in_rounds(graph, 2).count == 2


def test_rounds_are_equal() -> None:
    graph = capture(Loss("count").double(), batch_of())
    with pytest.raises(NoRoundsError, match="12 rows cannot be computed in 5 equal rounds") as refused:
        in_rounds(graph, 5)
    assert "1, 2, 3, 4, 6, 12" in str(refused.value)
    with pytest.raises(NoRoundsError):
        in_rounds(graph, 24)


@pytest.mark.parametrize("name", [name for name in zoo.SMALL if name != "resnet50"])
@pytest.mark.sampled(12)
@pytest.mark.parametrize("number", range(5))
def test_random_programs_of_rounds_compute_what_one_device_does(name: str, number: int) -> None:
    torch.manual_seed(0)
    model, batch = wide(*load(zoo.SMALL[name], batch=6))
    still(model)
    graph = capture(model, batch)
    alone = simulate(one_device(graph), model, batch, (1.0,))
    count = (2, 3, 6)[number % 3]
    rounds = in_rounds(graph, count)
    program = programs_of(rounds, number)
    check_program(program, derive_rules(rounds.graph))
    decisions = Decisions(2**11, regather=number % 2 == 1, microbatches=count)
    if number == 4:
        names = [node.name for node in rounds.graph.nodes]
        decisions = replace(decisions, reruns=(Rerun(names[2], names[len(names) // 2]),))
    many = simulate(program, model, batch, SHARES, decisions=decisions, rounds=rounds, expected=2.0)
    assert apart(many, alone) < 1e-9
    assert many.spread < 1e-9


def test_a_graph_of_a_round_is_text() -> None:
    rounds = in_rounds(capture(Loss("count").double(), batch_of()), 3)
    assert any(leaf.kind == "precomputed" for leaf in rounds.graph.leaves)
    assert parse_graph(str(rounds.graph)) == rounds.graph


def test_buckets_of_gradients_stand_in_the_last_round() -> None:
    rounds = in_rounds(capture(Loss("count").double(), batch_of()), 3)
    program = stored_cut(data_parallel(derive_rules(rounds.graph), prices_of(rounds.graph, SHARES)))

    def buckets(decisions: Decisions) -> list[tuple[int, int]]:
        schedule = lower(program, decisions)
        check_schedule(schedule)
        assert parse_schedule(str(schedule), program) == schedule
        return [
            (sum(item.id.startswith("gather.") for item in there), sum(item.id.startswith("reduce.") for item in back))
            for there, back in schedule.rounds()
        ]

    first, second, last = buckets(Decisions(microbatches=3))
    assert first[0] > 0
    assert first[1] == 0
    assert second == (0, 0)
    assert last[0] == 0
    assert last[1] > 0
    again = buckets(Decisions(microbatches=3, regather=True))
    assert again[0] == again[1] == again[2]
    assert min(again[0]) > 0
