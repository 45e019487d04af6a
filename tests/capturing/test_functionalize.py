"""In-place ops, views, buffers and regions: a captured graph computes what the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lopsided
from lopsided.ir.graph import Context
from tests.support.models import ByHand, Forward, assert_captured, eager, example, only

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


@forward
def into_an_argument(m: Any, x: Tensor) -> Tensor:
    out = torch.empty(4, 6)
    torch.add(x, 1, out=out)
    return (m.lin(x) * out).sum()


@forward
def diagonals_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    between = (h @ h.t()).fill_diagonal_(float("-inf")).softmax(1).clone().fill_diagonal_(2.0)
    return (between * h.new_zeros(4, 4).fill_diagonal_(3.0)).sum() + h.clone().fill_diagonal_(0).pow(2).sum()


@forward
def a_distribution(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    return -torch.distributions.Normal(h, F.softplus(h)).log_prob(x).sum()


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
        "diagonals_in_place",
    ],
)
def test_what_was_written_in_place_can_be_cut(name: str) -> None:
    verified = lopsided.verify(ByHand(FORWARDS[name]), {"x": example()}, programs=8)
    assert verified.passed, (verified.capture_error, verified.worst.where, verified.worst.error)


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


def test_nodes_know_their_line() -> None:
    source = only(lopsided.capture(ByHand(buffer_is_overwritten), {"x": example()}), "linear").source
    assert source.file.endswith("support/models.py")
    assert source.function == "forward"
    assert source.module == "lin"
