"""Ops that nobody has described get their rules by experiment, and nothing an op does can end the process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lopsided
from lopsided import ops
from lopsided.ir.graph import Graph
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, P, R, S
from lopsided.ops import experiment
from lopsided.ops.derive import call_rules, derive_rules
from lopsided.ops.op import Call
from tests.support.models import ByHand, Forward, example


@pytest.fixture
def undescribed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Forget what is known about ops; remember nothing for the next test."""
    monkeypatch.setattr(experiment, "_known", {})
    yield monkeypatch
    monkeypatch.undo()
    ops.describe.cache_clear()


def without(undescribed: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        undescribed.delitem(ops.TABLE, name)
    ops.describe.cache_clear()


def a_call(forward: Forward, op: str, x: Tensor | None = None) -> Call:
    graph = lopsided.capture(ByHand(forward), {"x": example() if x is None else x})
    node = next(node for node in graph.nodes if op in node.op)
    return Call(node, tuple(graph.values[name] for name in node.operands))


CALLS: dict[str, tuple[Forward, tuple[str, ...]]] = {
    "linear": (lambda m, x: m.lin(x).sum(), ("aten.linear",)),
    "softmax": (lambda m, x: m.lin(x).softmax(-1).pow(2).sum(), ("aten.softmax",)),
    "matmul": (lambda m, x: (m.lin(x) @ m.lin.weight).sum(), ("aten.matmul",)),
    "embedding": (lambda m, x: F.embedding(x.argmax(1), m.lin.weight).pow(2).sum(), ("aten.embedding",)),
    "layer_norm": (lambda m, x: F.layer_norm(x, (6,), m.lin.bias).pow(2).sum(), ("aten.layer_norm",)),
    "gather": (lambda m, x: m.lin(x).gather(1, x.argsort(1)).pow(2).sum(), ("aten.gather",)),
}


@pytest.mark.parametrize("op", CALLS)
def test_an_experiment_finds_the_plain_rules_of_the_table(op: str, undescribed: pytest.MonkeyPatch) -> None:
    forward, names = CALLS[op]
    call = a_call(forward, op)
    known = {rule for rule in call_rules(call) if rule.how == "plain"}
    without(undescribed, *names)
    found = set(call_rules(call))
    assert known <= found, f"not found: {known - found}"
    # What else holds are rules of this call alone, where lengths happen to agree.
    assert all(rule.how == "plain" for rule in found)


def test_models_are_verified_with_rules_by_experiment(undescribed: pytest.MonkeyPatch) -> None:
    without(undescribed, "aten.linear", "aten.softmax")
    model = ByHand(lambda m, x: m.lin(m.lin(x).softmax(-1)).pow(2).sum())
    found = lopsided.verify(model, {"x": example()}, programs=12)
    assert found.passed, (found.worst.where, found.worst.error)
    assert set(found.by_experiment) == {"aten.linear.default", "aten.softmax.int"}
    assert found.placements["S"]


def test_experiments_are_reported_and_remembered(undescribed: pytest.MonkeyPatch) -> None:
    without(undescribed, "aten.linear")
    runs: list[Call] = []
    original = experiment._found

    def counted(call: Call) -> tuple[Rule, ...]:
        runs.append(call)
        return original(call)

    undescribed.setattr(experiment, "_found", counted)
    graph = lopsided.capture(ByHand(lambda m, x: m.lin(m.lin(x) * 2).sum() + m.lin(x).sum()), {"x": example()})
    book = derive_rules(graph)
    assert [node.op for node in book.by_experiment] == ["aten.linear.default"] * 3
    assert book.only_whole == ()
    # Two signatures: with and without a gradient of the input.
    assert len(runs) == 2
    assert derive_rules(graph).rules == book.rules
    assert len(runs) == 2


def test_large_calls_are_tried_in_small(undescribed: pytest.MonkeyPatch) -> None:
    without(undescribed, "aten.softmax")
    call = a_call(lambda m, x: m.lin(x).softmax(-1).sum(), "softmax", torch.zeros(100_000, 6))
    assert set(call_rules(call)) == {Rule((p,), (p,)) for p in (I, R, S(0))}


# Ops of the user's own


@torch.library.custom_op("lopsided_tests::scaled_square", mutates_args=())
def scaled_square(x: Tensor, w: Tensor) -> Tensor:
    return x * x * w


@scaled_square.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def _keep(ctx: object, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)  # type: ignore[attr-defined]


def _backward(ctx: object, dy: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors  # type: ignore[attr-defined]
    return 2 * x * w * dy, (x * x * dy).sum_to_size(w.shape)


scaled_square.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("lopsided_tests::fragile", mutates_args=())
def fragile(x: Tensor, w: Tensor) -> Tensor:
    if x.shape != (4, 6):
        os.abort()
    return (x * w).exp()


@fragile.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


def _fragile_backward(ctx: object, dy: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors  # type: ignore[attr-defined]
    dz = dy * (x * w).exp()
    return dz * w, (dz * x).sum(0)


fragile.register_autograd(_fragile_backward, setup_context=_keep)


def graph_with(op: object) -> tuple[ByHand, dict[str, Tensor], Graph]:
    model = ByHand(lambda m, x: op(m.lin(x), m.lin.bias).pow(2).sum())  # type: ignore[operator]
    batch = {"x": example()}
    return model, batch, lopsided.capture(model, batch)


def test_an_op_of_the_users_own_gets_rules_and_is_verified(undescribed: pytest.MonkeyPatch) -> None:
    model, batch, graph = graph_with(torch.ops.lopsided_tests.scaled_square)
    book = derive_rules(graph)
    (node,) = book.by_experiment
    assert node.op == "lopsided_tests.scaled_square.default"
    rules = set(book.rules[node.name])
    assert rules == {
        Rule((I, I), (I,)),
        Rule((R, R), (R,)),
        Rule((R, P), (P,)),
        Rule((S(0), R), (S(0),)),
        Rule((S(1), S(0)), (S(1),)),
    }
    assert book.only_whole == ()
    found = lopsided.verify(model, batch, programs=20)
    assert found.passed, (found.worst.where, found.worst.error)


def test_a_kernel_that_crashes_runs_whole(undescribed: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    model, batch, graph = graph_with(torch.ops.lopsided_tests.fragile)
    book = derive_rules(graph)
    (node,) = book.only_whole
    assert book.rules[node.name] == (Rule((I, I), (I,)), Rule((R, R), (R,)))
    found = lopsided.verify(model, batch, programs=5)
    assert found.passed, (found.worst.where, found.worst.error)
    assert found.by_experiment == ("lopsided_tests.fragile.default",)
    assert capfd.readouterr() == ("", "")


def test_a_kernel_that_hangs_is_ended(undescribed: pytest.MonkeyPatch) -> None:
    undescribed.setattr(experiment, "_PATIENCE_S", 0.1)
    undescribed.setattr(experiment, "_MOST_DEATHS", 3)
    undescribed.setattr(experiment, "holds", lambda *_: time.sleep(600))
    without(undescribed, "aten.linear")
    call = a_call(CALLS["linear"][0], "linear")
    assert set(call_rules(call)) == {Rule((p,) * 3, (p,)) for p in (I, R)}
