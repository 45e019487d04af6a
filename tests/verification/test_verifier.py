"""Random programs of the zoo's models compute what one device computes; a wrong rule is noticed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lopsided
from lopsided import ops
from lopsided.errors import ModelError, SharesError
from lopsided.executor.compiled import Made
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import TOLERANCE
from lopsided.ir.placement import I, R, S
from lopsided.ir.program import check_program
from lopsided.models import by_name as models
from lopsided.models import zoo
from lopsided.ops.op import Op
from lopsided.verification.simulator import Simulation
from lopsided.verification.verifier import Verification, compare, suspects
from tests.support.models import ByHand, example
from tests.support.traced_only import traced_only


def said(found: Verification) -> str:
    return f"capture {found.capture_error}; {found.worst.where}: {found.worst.error} with {found.worst.shares}"


@pytest.mark.parametrize("name", zoo.SMALL)
def test_models_of_the_zoo(name: str, everything: bool) -> None:
    programs = 100 if everything else 10
    model, batch = models.load(zoo.SMALL[name])
    found = lopsided.verify(model, batch, shares=(0.5, 0.3, 0.2), programs=programs)
    assert found.passed, said(found)
    assert found.by_experiment == ()
    assert [trial.shares for trial in found.trials[::2]] == [(0.5, 0.3, 0.2)] * (programs // 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", zoo.SMALL)
def test_models_of_the_zoo_as_functions(name: str, everything: bool) -> None:
    model, batch = models.load(zoo.SMALL[name])
    with traced_only() as made:
        found = lopsided.verify(model, batch, shares=(0.5, 0.3, 0.2), programs=40 if everything else 4, compiled=True)
    assert found.passed, said(found)
    assert found.functions == Made(len(made), 0)
    assert len(made) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.SMALL)
def test_models_of_the_zoo_compiled(name: str) -> None:
    model, batch = models.load(zoo.SMALL[name])
    found = lopsided.verify(model, batch, shares=(0.5, 0.3, 0.2), programs=4, compiled=True)
    assert found.passed, said(found)
    assert found.functions.compiled
    assert not found.functions.refused


def test_calm_programs_are_legal_and_convert_less() -> None:
    book = lopsided.derive_rules(lopsided.capture(*models.load(zoo.SMALL["gpt2"])))
    computed = {value.name for node in book.graph.nodes for value in node.results}

    def conversions(calm: float) -> int:
        state, count = random.Random(0), 0
        for _ in range(5):
            program = lopsided.random_program(book, state, calm=calm)
            check_program(program, book)
            count += sum(value.name in computed for value, _, _ in program.conversions())
        return count

    assert conversions(0.9) < conversions(0.0) / 2


def test_every_placement_conversion_and_kind_of_rule_is_used() -> None:
    def busy(m: nn.Module, x: Tensor) -> Tensor:
        h = m.parts[0](F.layer_norm(m.lin(x), (6,), m.lin.bias))  # type: ignore[index, operator]
        return F.cross_entropy(h.softmax(-1), x.argmax(1))

    found = lopsided.verify(ByHand(busy, nn.BatchNorm1d(6)), {"x": example()}, programs=80)
    assert found.passed, said(found)
    assert set(found.placements) == {"I", "R", "P", "S"}
    pairs = {f"{a}→{b}" for a in "IRPS" for b in "IRPS" if a != b} | {"S→S'"}
    assert set(found.conversions) == pairs
    assert {"plain", "sfb", "batch_norm", "layer_norm"} <= set(found.rules)


def test_verification_repeats() -> None:
    model, batch = ByHand(lambda m, x: m.lin(x).pow(2).sum()), {"x": example()}
    first, second = (lopsided.verify(model, batch, programs=5, seed=4) for _ in range(2))
    assert [(t.program, t.shares) for t in first.trials] == [(t.program, t.shares) for t in second.trials]
    assert lopsided.verify(model, batch, programs=5, seed=5).trials[0].program != first.trials[0].program


def test_progress_is_reported() -> None:
    seen: list[int] = []
    lopsided.verify(ByHand(lambda m, x: m.lin(x).sum()), {"x": example()}, programs=3, progress=seen.append)
    assert seen == [1, 2, 3]


def test_verify_leaves_the_model_alone() -> None:
    model = ByHand(lambda m, x: m.parts[0](m.lin(x)).pow(3).sum(), nn.BatchNorm1d(6))
    before = {name: held.clone() for name, held in model.state_dict().items()}
    lopsided.verify(model, {"x": example()}, programs=2)
    assert all(torch.equal(held, before[name]) for name, held in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_insists_on_float32_is_verified_all_the_same() -> None:
    model = ByHand(lambda m, x: F.linear(x.float(), m.lin.weight).float().pow(2).sum() + torch.zeros(3).sum())
    found = lopsided.verify(model, {"x": example()}, programs=5)
    assert found.passed, said(found)
    assert found.capture_tolerance > TOLERANCE


def test_a_float32_island_is_compared_as_closely_as_float32_allows() -> None:
    """The inverse of a triangle row by row, as linear attention has it, in float32 whatever the model is in."""

    def forward(m: Any, x: Tensor) -> Tensor:
        a = m.lin(x.repeat(2, 1)[:6]).float()
        for i in range(1, 6):
            row, above = a[i, :i].clone(), a[:i, :i].clone()
            a[i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
        return a.double().pow(2).sum()

    found = lopsided.verify(ByHand(forward), {"x": example()}, programs=2)
    assert found.passed, said(found)
    assert found.capture_tolerance > TOLERANCE
    plain = lopsided.verify(ByHand(lambda m, x: m.lin(x).pow(2).sum()), {"x": example()}, programs=2)
    assert plain.capture_tolerance == TOLERANCE


WRONG = {
    # op: a line that says too much
    "aten.softmax": "... a -> ... a",
    "aten.relu": "... -> ...",
    "aten.linear": "... i * o i * f[o] -> ... o",
    "aten.mean": "a b -> ()",
}


@pytest.mark.parametrize("op", WRONG)
def test_a_wrong_rule_is_caught(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.TABLE, op, Op(WRONG[op]))
    ops.describe.cache_clear()
    try:
        model = ByHand(lambda m, x: F.softmax(m.lin(x).relu() + 1, dim=-1).pow(2).mean())
        found = lopsided.verify(model, {"x": example()}, programs=40)
    finally:
        monkeypatch.undo()
        ops.describe.cache_clear()
    assert not found.passed
    assert found.worst.error > 1e-3
    assert found.capture_error == 0


def test_bad_shares_are_refused() -> None:
    with pytest.raises(SharesError):
        lopsided.verify(ByHand(lambda m, x: m.lin(x).sum()), {"x": example()}, shares=(0.5, 0.6))


# Comparing


def outcome(loss: float = 1.0, gradient: float = 1.0, buffer: float = 1.0, spread: float = 0.0) -> Simulation:
    one = torch.ones(3, dtype=torch.float64)
    return Simulation(torch.tensor(loss, dtype=torch.float64), {"w": one * gradient}, {"b": one * buffer}, spread)


@pytest.mark.parametrize(
    ("found", "where"),
    [
        (outcome(loss=1.1), "loss"),
        (outcome(gradient=1.1), "gradient of w"),
        (outcome(buffer=1.1), "buffer b"),
        (outcome(spread=0.1), "replicas that should be equal"),
    ],
)
def test_the_worst_error_has_a_name(found: Simulation, where: str) -> None:
    error, name = compare(found, outcome())
    assert name == where
    assert error == pytest.approx(0.1)


def test_not_a_number_is_not_equal_to_a_number() -> None:
    assert compare(outcome(gradient=float("nan")), outcome())[0] == float("inf")
    assert compare(outcome(loss=float("nan")), outcome())[0] == float("inf")
    assert compare(outcome(), outcome())[0] == 0


def test_counts_are_of_the_programs_that_were_run() -> None:
    found = lopsided.verify(ByHand(lambda m, x: m.lin(x).sum()), {"x": example()}, programs=7)
    conversions: Counter[str] = Counter()
    for trial in found.trials:
        for _, a, b in trial.program.conversions():
            conversions[f"{a.kind}→{b.kind}" + ("'" if a.is_shard and b.is_shard else "")] += 1
    assert conversions == found.conversions


def test_a_wrong_rule_is_a_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    # A mean over a cut dim whose pieces all count alike, however long they are.
    monkeypatch.setitem(ops.TABLE, "aten.mean", Op(ops.TABLE["aten.mean"].line))
    ops.describe.cache_clear()
    try:
        found = lopsided.verify(ByHand(lambda m, x: m.lin(x).relu().mean()), {"x": example()}, programs=40)
    finally:
        monkeypatch.undo()
        ops.describe.cache_clear()
    assert not found.passed
    op, rule, failing, others = suspects(found)[0]
    assert (op, rule.gives[0].kind, others) == ("aten.mean.default", "P", 0)
    assert failing > 1


def test_what_cannot_be_compared_is_refused() -> None:
    batch = {"x": example()}
    with pytest.raises(ModelError, match="the loss is not finite on one device"):
        lopsided.verify(ByHand(lambda m, x: m.lin(x).sum() * float("nan")), batch, programs=1)
    with pytest.raises(ModelError, match="no parameter of the model requires a gradient"):
        lopsided.verify(ByHand(lambda m, x: m.lin(x).sum()).requires_grad_(False), batch, programs=1)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = ByHand(lambda m, x: m.lin(x).sum())
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ModelError, match="cannot be copied"):
        lopsided.verify(model, {"x": example()}, programs=1)


def test_replicas_that_differ_are_noticed() -> None:
    model, batch = ByHand(lambda m, x: m.lin(x).sum()), {"x": example()}
    graph = lopsided.capture(model, batch)
    whole = lopsided.one_device(graph)
    # Partial sums that pass for the whole: each device returns a loss of its own.
    cut = Rule((S(0), R, R), (S(0),))
    first = replace(whole.steps[0], rule=cut, chains=((I, S(0)), (I, R), (I, R)))
    last = replace(whole.steps[1], rule=Rule((S(0),), (I,)), chains=((S(0),),))
    found = lopsided.simulate(replace(whole, steps=(first, last)), model, batch, (0.75, 0.25))
    assert found.spread > 1e-3
