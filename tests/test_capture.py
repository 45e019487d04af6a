"""A captured graph computes the model's loss, gradients and buffers. What cannot be captured is refused."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models_by_hand import ByHand, Forward, assert_captured, eager, example, ops
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import lopsided
from lopsided.errors import CaptureError
from lopsided.graph import Context, Graph

FORWARDS: dict[str, Forward] = {}


def forward(function: Forward) -> Forward:
    """Register a forward that must be captured as it runs."""
    FORWARDS[function.__name__] = function
    return function


# In-place ops on whole tensors


@forward
def add_in_place_on_a_result(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    h += x
    return h.pow(2).sum()


@forward
def result_of_an_in_place_op_is_the_same_tensor(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = h.add_(1)
    y.mul_(2)
    return (h * y).sum()


@forward
def many_in_place_ops(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    h.addcmul_(x, x, value=0.5)
    h.lerp_(x, 0.3)
    h.clamp_(min=-1)
    h.pow_(2)
    h.div_(3).sub_(1)
    return (h * x).sum()


@forward
def activations_in_place(m: Any, x: Tensor) -> Tensor:
    h = F.relu(m.lin(x), inplace=True) * 2
    h = F.leaky_relu_(h, 0.1) * 2
    h = F.hardtanh(h, -1, 1, inplace=True) * 2
    return (F.silu(h, inplace=True) * 2).sum()


@forward
def fill_and_zero(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    row = h[1]
    h.zero_()
    h.add_(row + 1)
    return (h.pow(2) * m.lin(x)).sum()


@forward
def masked_fill_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    h.masked_fill_(x > 0, 0.5)
    h[x < -1] = 2.0
    return h.pow(2).sum()


@forward
def index_put_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    rows = torch.tensor([0, 2])
    h[rows] = x[rows] * 2
    h[:, rows] += 1
    h.index_put_((rows,), x[rows], accumulate=True)
    return h.pow(2).sum()


@forward
def promotion_stops_at_the_destination(m: Any, x: Tensor) -> Tensor:
    n = torch.zeros(4, 6, dtype=torch.int64)
    n += 2
    n.add_(3)
    h = m.lin(x) * 1
    h += n
    n.mul_(2)
    h.mul_(x.double())
    return (h * n).sum()


@forward
def a_scalar_adds_up(m: Any, x: Tensor) -> Tensor:
    h, total = m.lin(x), torch.zeros(())
    for row in range(4):
        total += h[row].pow(2).sum() * row
    return total


@forward
def the_input_is_written(m: Any, x: Tensor) -> Tensor:
    x.add_(1)
    x[0].mul_(2)
    return m.lin(x).pow(2).sum()


@forward
def a_literal_is_written(m: Any, x: Tensor) -> Tensor:
    t = torch.tensor([1.0, 2, 3, 4, 5, 6])
    t.add_(1)
    t[0] = 9
    return (m.lin(x) * t).sum()


# Copies are values of their own


@forward
def destination_written_after_copy(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = torch.empty_like(h)
    y.copy_(h)
    y.add_(1)
    return (h * y).sum()


@forward
def source_written_after_copy(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = torch.zeros_like(h)
    y.copy_(h)
    h.add_(1)
    return (h * y).sum()


@forward
def destination_written_after_copy_into_a_slice(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = torch.zeros(8, 6)
    y[2:6].copy_(h)
    y.add_(1)
    return (h * y[2:6]).sum()


@forward
def source_written_after_copy_into_a_slice(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = torch.zeros(8, 6)
    y[2:6].copy_(h)
    h.add_(1)
    return (h * y[2:6]).sum()


@forward
def one_source_in_many_places(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = torch.zeros(3, 4, 6)
    y[0] = h
    y[1] = h
    h += 1
    y[2] = h
    return y.pow(2).sum() * h.sum()


@forward
def copy_broadcasts_and_casts(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    h.copy_(x[0].double())
    h[1].copy_(m.lin(x)[0, 0])
    return (h * m.lin(x)).sum()


@forward
def rows_swap(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    kept = h[0].clone()
    h[0] = h[1]
    h[1] = kept
    h[2].copy_(h[3])
    h[2:].copy_(h[:2].clone())
    return (h * x).pow(2).sum()


@forward
def a_clone_stays(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    kept = h.clone()
    h.mul_(3)
    return (h * kept).sum()


# Views


@forward
def set_items(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    h[:, 0] = 0
    h[1] = x[0]
    h[1:3] += x[1:3]
    h[:, 2] *= 3
    h[:, None, ::2] = 1
    h[..., -1] = 2
    h[-2:] = x[:2]
    return (h * m.lin(x)).sum()


@forward
def chains_of_views(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    v = h.t()
    w = v[1:4]
    u = w.unsqueeze(0).permute(2, 0, 1)
    u.mul_(2)
    w[0].add_(1)
    return h.pow(2).sum() + v.pow(3).sum() + (w * u.squeeze(1).t()).sum()


@forward
def views_taken_before_the_write(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    column, seen = h[:, 1], h.view(2, 12)
    h.transpose(0, 1)[2].fill_(3.0)
    column.mul_(2)
    return h.pow(2).sum() + column.sum() * seen.pow(2).sum()


@forward
def every_kind_of_view(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    h.T[1] = 5
    h.mT[2].mul_(2)
    h.movedim(0, 1)[3] += 1
    h.swapaxes(0, 1)[0] -= 1
    h.narrow(1, 1, 2).mul_(2)
    h.diagonal().mul_(2)
    h.unflatten(1, (2, 3))[:, 1].mul_(3)
    h.view_as(x).add_(1)
    h.unsqueeze(1).squeeze(1)[0].mul_(7)
    return h.pow(2).sum()


@forward
def reshape_that_is_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = h.reshape(-1)
    y.add_(1)
    return (h.reshape(-1) * y).sum()


@forward
def reshape_that_is_a_copy(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = h.t().reshape(-1)
    y.add_(1)
    return h.pow(2).sum() + y.pow(2).sum()


@forward
def contiguous_that_is_the_tensor(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = h.contiguous()
    y.add_(1)
    return (h * y).sum()


@forward
def contiguous_that_is_a_copy(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = h.t().contiguous()
    y.add_(1)
    return (h.t() * y).sum()


@forward
def flatten_that_is_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = h.flatten()
    y.mul_(2)
    return (h.flatten() * y).sum()


@forward
def cast_that_is_the_tensor(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = h.to(torch.float32)
    y.mul_(2)
    return (h * y).sum()


@forward
def cast_that_is_a_copy(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = h.to(torch.float64)
    y.mul_(2)
    return (h * y).sum()


@forward
def dropout_that_drops_nothing_is_the_tensor(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    y = F.dropout(h, 0.5, training=False)
    y.add_(1)
    z = F.dropout(h, 0.0)
    z.mul_(2)
    return (h * y).sum()


@forward
def base_of_an_expanded_view_is_written(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)[:, :1] * 1
    wide, alike = h.expand(4, 6), h.expand_as(x)
    h.add_(1)
    return (wide * x * alike).pow(2).sum()


@forward
def base_of_chunks_is_written(m: Any, x: Tensor) -> Tensor:
    y = x * 1
    a, b = y.chunk(2, 1)
    y.add_(1)
    c = a * 2
    y.mul_(2)
    return (m.lin(y)[:, :3] * a * b * c).sum()


# Buffers


@forward
def buffers_change_under_no_grad(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    with torch.no_grad():
        m.ema.mul_(0.9).add_(h, alpha=0.1)
        m.steps += 1
    return (h * m.ema).sum() / m.steps


@forward
def buffer_read_before_and_after_it_changes(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    before = m.ema * 2
    m.ema.add_(1.0)
    return (h * before).sum() + (h * m.ema).sum()


@forward
def view_of_a_buffer_sees_it_change(m: Any, x: Tensor) -> Tensor:
    h, row = m.lin(x), m.ema[0]
    m.ema.mul_(0.5)
    m.ema[1] = h[0].detach()
    return (h * row).sum()


@forward
def buffer_is_overwritten(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    m.ema.copy_(h.detach())
    return (h * m.ema).sum()


@forward
def buffer_is_assigned(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    m.ema = m.ema * 0.9 + h.detach() * 0.1
    m.steps = m.steps + 1
    return (h * m.ema).sum()


# Regions


@forward
def autocast_and_no_grad_nested(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = m.lin(x)
        with torch.autocast("cpu", enabled=False):
            h = m.lin(h.float())
        with torch.no_grad():
            k = m.lin(h)
            with torch.enable_grad():
                z = m.lin(x)
        h = m.lin(h) + k + z
    return h.float().pow(2).sum()


@forward
def autocast_leaves_in_place_ops_alone(m: Any, x: Tensor) -> Tensor:
    square = x @ x.t()
    with torch.autocast("cpu", torch.bfloat16):
        h = m.lin(x)
        h.addmm_(square.bfloat16(), h.detach().clone())
        y = x * 1
        y.addmm_(square, m.lin(x).float())
        h.pow_(2).exp_()
    return h.float().sum() + y.pow(2).sum()


@forward
def no_grad_around_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        k = m.lin(x)
    return (m.lin(x) * k).sum()


@forward
def views_under_no_grad_have_no_gradient(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    with torch.no_grad():
        targets = [h.view(4, 6), h.reshape(4, 6), h[:], h.expand(4, 6), h.to(torch.float64)]
    return sum((h * target).sum() for target in targets)


@forward
def casts_to_the_same_dtype_keep_their_gradient_under_no_grad(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    with torch.no_grad():
        same, off = h.to(torch.float32), F.dropout(h, 0.5, training=False)
    return (h * same * off).sum()


@forward
def copies_in_another_memory_format(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x).reshape(1, 2, 2, 6) * 1
    copy = h.to(memory_format=torch.channels_last)
    copy.add_(1)
    other = h.to(torch.float32, copy=True)
    other.mul_(2)
    return (h * copy * other).sum()


@forward
def detached_branch(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    return (h * h.detach()).sum()


@forward
def checkpointed(m: Any, x: Tensor) -> Tensor:
    def block(h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = m.lin(h)
        with torch.no_grad():
            k = h * 2
        return m.lin(torch.relu(h.float() * k.float()))

    return checkpoint(block, x, use_reentrant=False).pow(2).sum()


# Odds and ends


@forward
def outputs_of_a_call_that_nobody_uses(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    values, _ = h.max(dim=1)
    a, _, c = h.split(2, dim=1)
    _, mean = torch.var_mean(h, dim=0)
    return values.sum() + (a * c).sum() + mean.pow(2).sum()


@forward
def the_same_value_in_every_place(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    return torch.cat([h, h, h * h]).pow(2).sum() + torch.where(h > 0, h, h).sum() + (h @ h.t()).sum()


@forward
def complex_numbers(m: Any, x: Tensor) -> Tensor:
    z = torch.fft.rfft(m.lin(x), dim=1)
    return (z * z.conj()).real.sum() + torch.view_as_real(z)[..., 1].pow(2).sum()


@pytest.mark.parametrize("name", FORWARDS)
def test_a_graph_computes_what_the_model_computes(name: str) -> None:
    assert_captured(ByHand(FORWARDS[name]), {"x": example()})


@pytest.mark.parametrize(
    "name",
    [
        "set_items",
        "chains_of_views",
        "views_taken_before_the_write",
        "one_source_in_many_places",
        "index_put_in_place",
        "buffers_change_under_no_grad",
        "outputs_of_a_call_that_nobody_uses",
        "the_same_value_in_every_place",
        "autocast_and_no_grad_nested",
    ],
)
def test_what_was_written_in_place_can_be_cut(name: str) -> None:
    verified = lopsided.verify(ByHand(FORWARDS[name]), {"x": example()}, programs=8)
    assert verified.passed, (verified.capture_error, verified.worst.where, verified.worst.error)


# What the graph records


def only(graph: Graph, op: str) -> Any:
    found = [node for node in graph.nodes if node.op.startswith(f"aten.{op}.")]
    assert len(found) == 1, ops(graph)
    return found[0]


def test_regions_are_the_context_of_each_node() -> None:
    graph = lopsided.capture(ByHand(autocast_and_no_grad_nested), {"x": example()})
    contexts = [node.context for node in graph.nodes if node.op == "aten.linear.default"]
    assert contexts == [
        Context("cpu:bf16"),
        Context("cpu:off"),
        Context("cpu:bf16", grad=False),
        Context("cpu:bf16"),
        Context("cpu:bf16"),
    ]


def test_capture_under_no_grad_is_a_training_step_all_the_same() -> None:
    model, batch = ByHand(add_in_place_on_a_result), {"x": example()}
    graph = lopsided.capture(model, batch)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert lopsided.capture(model, batch) == graph
            found = lopsided.simulate(lopsided.one_device(graph), model, batch, (1.0,))
        torch.testing.assert_close(found.gradients["lin.weight"], eager(model, batch).gradients["lin.weight"])


def test_capture_under_autocast_captures_the_autocast() -> None:
    model = ByHand(lambda m, x: m.lin(x).float().sum())
    with torch.autocast("cpu", torch.bfloat16):
        graph = lopsided.capture(model, {"x": example()})
    assert only(graph, "linear").context == Context("cpu:bf16")
    assert only(graph, "linear").results[0].dtype == "bf16"


def test_nodes_know_their_line() -> None:
    source = only(lopsided.capture(ByHand(buffer_is_overwritten), {"x": example()}), "linear").source
    assert source.file.endswith("models_by_hand.py")
    assert source.function == "forward"
    assert source.module == "lin"


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


class LanguageModel(nn.Module):
    """Returns what it is told to: an object, a dict, or a plain loss."""

    def __init__(self, how: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        loss = F.cross_entropy(self.head(self.embed(input_ids)).flatten(0, 1), labels.flatten())
        return {
            "tensor": loss,
            "one": loss.reshape(1),
            "dict": {"loss": loss},
            "object": SimpleNamespace(loss=loss),
        }[self.how]


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


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return dy * (s + x * s * (1 - s))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, by: float) -> Tensor:
        return x * by

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.by, None


class Reverse(Scale):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return -dy * ctx.by, None


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class BoundedRoot(torch.autograd.Function):
    """As the square root, with a gradient that stays a number where the root's does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy / (4 * x).clamp(min=1e-6).sqrt()


def test_autograd_functions_whose_backward_is_that_of_their_forward() -> None:
    assert_captured(ByHand(lambda m, x: BoundedRoot.apply(m.lin(x).abs()).pow(2).sum()), {"x": example()})
    assert_captured(ByHand(lambda m, x: Swish.apply(m.lin(x)).pow(2).sum()), {"x": example()})
    assert_captured(ByHand(lambda m, x: Scale.apply(m.lin(x), 3.0).pow(2).sum()), {"x": example()})


@pytest.mark.parametrize(("function", "rest"), [(Reverse, (2.0,)), (Round, ())])
def test_autograd_functions_with_a_backward_of_their_own_are_refused(function: Any, rest: tuple[float, ...]) -> None:
    model = ByHand(lambda m, x: function.apply(m.lin(x), *rest).pow(2).sum())
    error = refused(model, {"x": example()})
    assert f"{function.__name__}, an autograd function whose backward is not the gradient of its forward" in error.what
    assert "test_capture.py" in error.where
    assert "custom_op" in error.do


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


# Refusals


def refused(model: nn.Module, batch: object, **more: Any) -> CaptureError:
    with pytest.raises(CaptureError) as error:
        lopsided.capture(model, batch, **more)
    assert error.value.do, error.value
    return error.value


class DependsOnData(nn.Module):
    """Does what it is told, each on a line of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if self.how == "branch" and h.sum() > 0:  # branch
            h = h * 2
        if self.how == "size":
            h = h[: int(x.argmax().item())]  # size
        if self.how == "mask":
            h = h[x > 0]  # mask
        if self.how == "nonzero":
            h = h[x[:, 0].nonzero()]  # nonzero
        if self.how == "float":
            h = h * float(x.sum())  # float
        if self.how == "loop":
            for _ in range(int(x.argmax())):  # loop
                h = h + 1
        return h.sum()


@pytest.mark.parametrize("how", ["branch", "size", "mask", "nonzero", "float", "loop"])
def test_what_depends_on_data_is_refused_with_the_line(how: str) -> None:
    error = refused(DependsOnData(how), {"x": example()})
    lines = Path(__file__).read_text().splitlines()
    line = next(k for k, text in enumerate(lines, 1) if text.endswith(f"# {how}"))
    assert f"test_capture.py:{line}" in error.where, error
    assert re.search(r"torch\.where|keep it a tensor", error.do), error


def test_a_model_without_a_scalar_is_refused() -> None:
    assert "returns a (4, 6) torch.float32 tensor as its loss" in refused(nn.Linear(6, 6), example()).what
    model = ByHand(lambda m, x: [m.lin(x)])
    assert "returns no scalar loss but list" in refused(model, {"x": example()}).what
    model = ByHand(lambda m, x: {"logits": m.lin(x)})
    assert "returns no scalar loss but dict" in refused(model, {"x": example()}).what
    model = ByHand(lambda m, x: (m.lin(x) > 0).sum())
    error = refused(model, {"x": example()})
    assert "returns a () torch.int64 tensor as its loss" in error.what
    assert "loss_fn=" in error.do


def test_a_batch_that_does_not_fit_is_refused() -> None:
    error = refused(LanguageModel(), {"tokens": example()})
    assert "the batch does not fit LanguageModel.forward: missing a required argument: 'input_ids'" in error.what
    assert "input_ids" in error.where
    assert "too many positional arguments" in refused(nn.Linear(6, 6), (example(), example())).what


def test_a_shape_that_does_not_fit_is_refused_with_the_line() -> None:
    error = refused(ByHand(lambda m, x: (m.lin(x) @ x).sum()), {"x": example()})
    assert "test_capture.py" in error.where
    assert "[4, 6] X [4, 6]" in error.facts["cause"]


def test_writing_into_a_parameter_is_refused() -> None:
    def normalise(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.lin.weight[0].div_(2)
        return m.lin(x).sum()

    error = refused(ByHand(normalise), {"x": example()})
    assert error.what == "forward writes into the parameter lin.weight"
    assert "models_by_hand.py" in error.where


def behind_detach(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    h.detach().clamp_(0)
    return h.sum()


def behind_no_grad(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    with torch.no_grad():
        h[0].mul_(2)
    return h.sum()


def gradient_through_a_detached_view(m: Any, x: Tensor) -> Tensor:
    seen = m.ema.detach()
    seen.add_(m.lin(x))
    return (seen * m.ema).sum()


@pytest.mark.parametrize("hidden", [behind_detach, behind_no_grad, gradient_through_a_detached_view])
def test_writes_that_autograd_does_not_see_are_refused(hidden: Forward) -> None:
    error = refused(ByHand(hidden), {"x": example()})
    assert "changes a value behind the back of its gradient" in error.what
    assert "models_by_hand.py" in error.where


def unsqueezed(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    h.unsqueeze_(0)
    return h.sum()


def transposed(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    h.t_()
    return h.sum()


def into_an_argument(m: Any, x: Tensor) -> Tensor:
    out = torch.empty(4, 6)
    torch.add(x, 1, out=out)
    return (m.lin(x) * out).sum()


def through_another_dtype(m: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.view(torch.int32).add_(1)
    return m.lin(y).sum()


def through_a_chunk(m: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.chunk(2, 1)[0].add_(1)
    return m.lin(y).sum()


def without_a_functional_form(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) @ x.t()
    h.fill_diagonal_(0.5)
    return h.sum()


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (unsqueezed, "aten.unsqueeze_.default changes the shape of a tensor in place"),
        (transposed, "aten.t_.default changes the shape of a tensor in place"),
        (into_an_argument, "aten.add.out writes into an argument"),
        (through_another_dtype, "a view made by aten.view.dtype is written into"),
        (through_a_chunk, "a view made by aten.chunk.default is written into"),
        (without_a_functional_form, "aten.fill_diagonal_.default has no form that returns a new tensor"),
    ],
)
def test_writes_that_have_no_pure_form_are_refused(written: Forward, words: str) -> None:
    error = refused(ByHand(written), {"x": example()})
    assert words in error.what
    assert "models_by_hand.py" in error.where


def test_state_outside_of_buffers_is_refused() -> None:
    def writes(m: Any, x: Tensor) -> Tensor:
        m.seen.add_(1)
        return (m.lin(x) * m.seen).sum()

    def replaces(m: Any, x: Tensor) -> Tensor:
        m.seen = m.seen + 1
        return (m.lin(x) * m.seen).sum()

    for stateful, words in (
        (writes, "writes into the tensor"),
        (replaces, "reads and replaces the tensor seen"),
    ):
        model = ByHand(stateful)
        model.seen = torch.ones(6)
        error = refused(model, {"x": example()})
        assert words in error.what
        assert "register_buffer" in error.do


def test_buffers_that_share_memory_and_change_are_refused() -> None:
    def write_one_read_both(m: Any, x: Tensor) -> Tensor:
        m.ema.add_(1)
        return (m.lin(x) * m.seen).sum()

    model = ByHand(write_one_read_both)
    model.register_buffer("seen", model.ema.view(4, 6))
    assert "share memory" in refused(model, {"x": example()}).what


def test_instance_norm_with_running_statistics_is_refused() -> None:
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    model = ByHand(lambda m, x: m.parts[0](m.lin(x).reshape(2, 2, 6)).sum(), norm)
    assert "instance norm changes its running statistics" in refused(model, {"x": example()}).what


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    def grows(m: Any, x: Tensor) -> Tensor:
        m.ema = torch.cat([m.ema, x])
        return m.lin(x).sum()

    assert "changes the buffer ema" in refused(ByHand(grows), {"x": example()}).what


def test_reentrant_checkpoints_are_refused() -> None:
    model = ByHand(lambda m, x: checkpoint(m.lin, m.lin(x), use_reentrant=True).sum())
    error = refused(model, {"x": example()})
    assert "reentrant" in error.what
    assert "use_reentrant=False" in error.do


def test_dtypes_that_graphs_do_not_have_are_refused() -> None:
    model = ByHand(lambda m, x: m.lin(x.float()).sum())
    assert "torch.uint16" in refused(model, {"x": torch.zeros(4, 6, dtype=torch.uint16)}).what


def test_tensors_on_different_devices_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(6, 6)
    weight = torch.ones(6)
    assert "different devices" in refused(model, example(), loss_fn=lambda out, _: (out * weight).sum()).what


def test_a_refusal_leaves_nothing_on_the_streams(capfd: pytest.CaptureFixture[str]) -> None:
    refused(DependsOnData("branch"), {"x": example()})
    refused(ByHand(lambda m, x: m.parts[0](x).sum(), nn.BatchNorm1d(6, momentum=None)), {"x": example()})
    assert capfd.readouterr() == ("", "")


# Size


def test_a_70b_model_is_captured_without_being_allocated() -> None:
    code = textwrap.dedent("""
        import resource, torch, lopsided
        from lopsided import zoo
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
