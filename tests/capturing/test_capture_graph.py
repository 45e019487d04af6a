"""What a captured graph records, in every form of model and batch; and that size does not matter."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import lopsided
from lopsided.capturing.saved_tensors import record_saved
from lopsided.ir.graph import Context, Graph, Node
from lopsided.models.by_name import load
from tests.support.models import ByHand, Forward, LanguageModel, assert_captured, eager, example, only, ops


def test_capture_under_autocast_captures_the_autocast() -> None:
    model = ByHand(lambda m, x: m.lin(x).float().sum())
    with torch.autocast("cpu", torch.bfloat16):
        graph = lopsided.capture(model, {"x": example()})
    assert only(graph, "linear").context == Context("cpu:bf16")
    assert only(graph, "linear").results[0].dtype == "bf16"


def test_tied_parameters_are_one_leaf() -> None:
    model = ByHand(lambda m, x: m.parts[0](m.lin(x)).pow(2).sum(), nn.Linear(6, 6))
    model.parts[0].weight = model.lin.weight
    graph = assert_captured(model, {"x": example()})
    (weight,) = (leaf for leaf in graph.parameters if leaf.target == "lin.weight")
    assert weight.also == ("parts.0.weight",)
    assert len(graph.parameters) == 3


def test_tied_buffers_are_one_leaf_and_change_together() -> None:
    def write_one_read_both(m: Any, x: Tensor) -> Tensor:
        m.ema.add_(1)
        return (m.lin(x) * m.ema * m.twin).sum()

    model = ByHand(write_one_read_both)
    model.register_buffer("twin", model.ema)
    graph = assert_captured(model, {"x": example()})
    assert [name for name, _ in graph.updates] == ["ema"]


def test_batch_norm_gives_its_new_statistics() -> None:
    model = ByHand(lambda m, x: m.parts[0](m.lin(x)).pow(3).sum(), nn.BatchNorm1d(6))
    graph = assert_captured(model, {"x": example()})
    assert {name for name, _ in graph.updates} == {
        "parts.0.running_mean",
        "parts.0.running_var",
        "parts.0.num_batches_tracked",
    }


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(6, affine=False),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.BatchNorm1d(6).eval(),
        nn.BatchNorm1d(6, momentum=0.7),
    ],
    ids=["no weight", "no statistics", "evaluation", "momentum"],
)
def test_batch_norm_in_its_other_forms(norm: nn.Module) -> None:
    assert_captured(ByHand(lambda m, x: m.parts[0](m.lin(x)).pow(3).sum(), norm), {"x": example()})


def test_batch_norm_twice_in_one_step() -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        before = m.parts[0].running_mean[1:]
        h = m.parts[0](m.lin(x)).pow(3) * m.parts[0](x)
        return (h * m.parts[0].running_mean).sum() * before.sum() + m.parts[0].running_var.sum() * m.lin(x).sum()

    assert_captured(ByHand(both, nn.BatchNorm1d(6)), {"x": example()})


class SubmoduleState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(6))
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        self.cache = x * 2
        return self.mean


def test_a_submodule_may_assign_its_buffers_and_is_left_as_it_was() -> None:
    model = ByHand(lambda m, x: (m.lin(x) * m.parts[0](x)).pow(2).sum(), SubmoduleState())
    graph = assert_captured(model, {"x": example()})
    assert [name for name, _ in graph.updates] == ["parts.0.mean"]
    assert model.parts[0].cache is None


class InstallsHooks(nn.Module):
    """Hooks itself up on its first call, and remembers that it did."""

    hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.register_forward_hook(lambda module, args, out: out * 2)
            self.hooked = True
        return x


def test_what_a_model_sets_up_on_its_first_call_stays() -> None:
    model = ByHand(lambda m, x: m.parts[0](m.lin(x)).sum(), InstallsHooks())
    lopsided.capture(model, {"x": example()})
    assert_captured(model, {"x": example()})
    assert model.parts[0].hooked
    assert len(model.parts[0]._forward_hooks) == 1


@pytest.mark.parametrize("how", ["tensor", "one", "dict", "object"])
def test_the_loss_is_found(how: str) -> None:
    tokens = torch.randint(0, 9, (3, 5))
    assert_captured(LanguageModel(how), {"input_ids": tokens, "labels": tokens.flip(1)})


def test_a_tensor_given_twice_is_two_inputs() -> None:
    tokens = torch.randint(0, 9, (3, 5))
    model = LanguageModel()
    graph = assert_captured(model, {"input_ids": tokens, "labels": tokens})
    assert [leaf.target for leaf in graph.leaves if leaf.kind == "input"] == ["input_ids", "labels"]
    other = {"input_ids": tokens, "labels": tokens.flip(0)}
    found = lopsided.simulate(lopsided.one_device(graph), model, other, (1.0,))
    torch.testing.assert_close(found.loss, eager(model, other).loss)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, data: dict[str, Any], scale: float = 2.0) -> Tensor:
        return self.lin(data["rows"][0]) * scale + data["shift"]


def test_batches_of_every_form() -> None:
    nested = {"rows": [example()], "shift": torch.randn(6)}
    for batch in ({"data": nested}, {"data": nested, "scale": 3.0}, (nested,), [nested, 0.5]):
        graph = assert_captured(Nested(), batch, loss_fn=lambda out, _: out.pow(2).sum())
        assert len([leaf for leaf in graph.leaves if leaf.kind == "input"]) == 2
    assert_captured(nn.Linear(6, 3), example(), loss_fn=lambda out, _: out.pow(2).sum())


def test_loss_fn_sees_the_batch_as_it_was_given() -> None:
    assert_captured(nn.Linear(6, 6), example(), loss_fn=lambda out, batch: (out - batch).pow(2).mean())
    assert_captured(nn.Linear(6, 6), (example(),), loss_fn=lambda out, batch: (out - batch[0]).pow(2).mean())
    assert_captured(nn.Linear(6, 6), {"input": example()}, loss_fn=lambda out, b: (out - b["input"]).pow(2).mean())


def test_tensors_of_a_loss_are_constants() -> None:
    weigh, target = nn.CrossEntropyLoss(weight=torch.arange(1.0, 7)), torch.tensor([0, 1, 5, -100])
    graph = assert_captured(nn.Linear(6, 6), example(), loss_fn=lambda out, _: weigh(out, target))
    constants = {leaf.data for leaf in graph.leaves if leaf.kind == "constant"}
    assert constants == {(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), (0, 1, 5, -100)}


def test_frozen_and_unused_parameters() -> None:
    model = ByHand(lambda m, x: m.parts[1](m.lin(x)).sum(), nn.Linear(2, 2), nn.Linear(6, 6))
    model.parts[1].weight.requires_grad_(False)
    graph = assert_captured(model, {"x": example()})
    grads = {leaf.target: leaf.value.grad for leaf in graph.parameters}
    assert grads == {
        "lin.weight": True,
        "lin.bias": True,
        "parts.0.weight": True,
        "parts.0.bias": True,
        "parts.1.weight": False,
        "parts.1.bias": True,
    }


def test_attributes_that_are_tensors_become_constants() -> None:
    model = ByHand(lambda m, x: (m.lin(x) * m.table).sum())
    model.table = torch.arange(6.0)
    graph = assert_captured(model, {"x": example()})
    assert [leaf.data for leaf in graph.leaves if leaf.kind == "constant"] == [(0.0, 1.0, 2.0, 3.0, 4.0, 5.0)]


def test_what_nothing_depends_on_is_left_out() -> None:
    def wasteful(m: Any, x: Tensor) -> Tensor:
        m.lin(x).relu().softmax(-1)
        return m.lin(x).sum()

    assert ops(lopsided.capture(ByHand(wasteful), {"x": example()})) == ["linear.default", "sum.default"]


def test_fake_and_meta_tensors() -> None:
    real = lopsided.capture(nn.Linear(6, 3), example(), loss_fn=lambda out, _: out.sum())
    with FakeTensorMode():
        fake_model, fake_batch = nn.Linear(6, 3), torch.randn(4, 6)
    with torch.device("meta"):
        meta_model, meta_batch = nn.Linear(6, 3), torch.randn(4, 6)
    for model, batch in (
        (fake_model, fake_batch),
        (nn.Linear(6, 3), fake_batch),
        (meta_model, meta_batch),
        (meta_model, example()),
    ):
        assert lopsided.capture(model, batch, loss_fn=lambda out, _: out.sum()) == real


# What the backward pass keeps


def saved_by(model_forward: Forward, op: str) -> tuple[tuple[str, ...], int]:
    saved = only(lopsided.capture(ByHand(model_forward), {"x": example()}), op).saved
    return saved.values, saved.extra_bytes


def test_what_linear_keeps() -> None:
    # Its input for the weight's gradient; not its weight, because the input has no gradient.
    assert saved_by(lambda m, x: m.lin(x).sum(), "linear") == (("x",), 0)
    graph = lopsided.capture(ByHand(lambda m, x: m.lin(m.lin(x)).sum()), {"x": example()})
    assert [node.saved.values for node in graph.nodes if "linear" in node.op] == [
        ("x",),
        ("linear", "lin_weight"),
    ]


def test_what_activations_keep() -> None:
    assert saved_by(lambda m, x: m.lin(x).relu().sum(), "relu") == (("relu",), 0)
    assert saved_by(lambda m, x: m.lin(x).softmax(-1).sum(), "softmax") == (("softmax",), 0)
    assert saved_by(lambda m, x: F.gelu(m.lin(x)).sum(), "gelu") == (("linear",), 0)
    assert saved_by(lambda m, x: (m.lin(x) + x).sum(), "add") == ((), 0)
    assert saved_by(lambda m, x: (m.lin(x) * x).sum(), "mul") == (("x",), 0)


def test_what_dropout_keeps_is_its_mask() -> None:
    values, extra = saved_by(lambda m, x: F.dropout(m.lin(x), 0.5).sum(), "dropout")
    assert values == ()
    assert extra in (4 * 6, 4 * 6 * 4)  # a byte per element, or a float where the mask is scaled


def test_nothing_is_kept_where_there_is_no_gradient() -> None:
    def no_gradient(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            k = m.lin(x)
        return (m.lin(x) * k).sum()

    graph = lopsided.capture(ByHand(no_gradient), {"x": example()})
    without = next(node for node in graph.nodes if not node.context.grad)
    assert not without.saved.values
    assert not without.results[0].grad


# Size


def test_a_70b_model_is_captured_without_being_allocated() -> None:
    code = textwrap.dedent("""
        import resource, torch, lopsided
        from lopsided.models import zoo
        torch.set_num_threads(1)
        with torch.device("meta"):
            model, batch = zoo.build("llama", layers=80, width=8192, heads=64, kv_heads=8, ffn=28672)
        graph = lopsided.capture(model, batch)
        print(len(graph.nodes), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    nodes, peak_kb = map(int, done.stdout.split())
    assert nodes > 80 * 10
    assert peak_kb < 4 * 2**20


@pytest.mark.parametrize(
    "spec", ["llama:layers=1,width=32,heads=4,ffn=64,seq=16,vocab=64,batch=4", "vit:layers=1,width=32,heads=2,batch=2"]
)
def test_what_is_saved_under_a_gpus_autocast_is_found_without_a_gpu(spec: str) -> None:
    module, batch = load(spec)
    with torch.autocast("cpu", torch.bfloat16):
        here = lopsided.capture(module, batch)

    def elsewhere(node: Node) -> Node:
        return replace(node, context=replace(node.context, autocast=node.context.autocast.replace("cpu", "cuda")))

    found = record_saved(Graph(here.leaves, tuple(map(elsewhere, here.nodes)), here.loss, here.updates))
    assert any(node.context.autocast.startswith("cuda") for node in found.nodes)
    assert [node.saved for node in found.nodes] == [node.saved for node in here.nodes]
