"""What was captured is compared with the model before it is distributed, and what no trace shows is found."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lopsided.capturing.capture_graph import capture_call, check_captured
from lopsided.capturing.eager_check import PassSize, fewer_rows
from lopsided.errors import CaptureError
from lopsided.models.by_name import load


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.bn = nn.Linear(6, 8), nn.Linear(8, 6), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.body = [body]
        self.count = 0
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.body[0](self, x).square().mean()


def block(net: Net, x: Tensor) -> Tensor:
    return net.down(torch.relu(net.up(x)))


def checked(body: Callable[[Any, Tensor], Tensor]) -> str:
    torch.manual_seed(0)
    net, x = Net(body), torch.randn(5, 6)
    return check_captured(net, x, None, capture_call(net, x))


def under_inference_mode(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        seen = net.up(x)
    return net.down(torch.relu(net.up(x) * seen.clone()))


def batch_norm_in_a_checkpoint(net: Net, x: Tensor) -> Tensor:
    return net.down(checkpoint(lambda y: torch.relu(net.bn(net.up(y))), x, use_reentrant=False))


def nested_checkpoints(net: Net, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return torch.relu(net.up(y))

    def outer(y: Tensor) -> Tensor:
        return net.down(checkpoint(inner, y, use_reentrant=False))

    return x + checkpoint(outer, net.down(net.up(x)), use_reentrant=False)


def test_what_no_trace_shows_is_refused() -> None:
    with pytest.raises(CaptureError) as refused:
        checked(under_inference_mode)
    assert "check_capture=False" in refused.value.do


@pytest.mark.parametrize("body", [nested_checkpoints, batch_norm_in_a_checkpoint])
def test_checkpoints_that_are_easy_to_get_wrong(body: Callable[[Any, Tensor], Tensor]) -> None:
    assert checked(body) == ""


def test_what_is_right_passes_and_leaves_everything_alone() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        return net.down(net.drop(torch.relu(net.bn(net.up(x)))))

    torch.manual_seed(0)
    net, x = Net(body), torch.randn(5, 6)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    captured = capture_call(net, x)
    assert check_captured(net, x, None, captured) == ""
    assert torch.equal(torch.get_rng_state(), state)
    for name, held in net.state_dict().items():
        assert torch.equal(held, before[name]), name
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    "spec", ["gpt2:layers=1,width=32,vocabulary=64", "resnet50:classes=4", "bert-moe:layers=2,width=32"]
)
def test_zoo_models_are_what_was_captured(spec: str) -> None:
    try:
        model, batch = load(spec)
    except Exception:
        model, batch = load(spec.partition(":")[0])
    captured = capture_call(model, batch)
    assert check_captured(model, batch, None, captured) in (
        "",
        "it would take long here; `lopsided verify` compares it",
    )


def test_a_large_batch_is_compared_on_fewer_rows() -> None:
    net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    x = torch.randn(4096, 512)
    loss_fn = lambda output, batch: output.square().mean()  # noqa: E731
    captured = capture_call(net, x, loss_fn=loss_fn)
    part = fewer_rows(net, x, captured.traced)
    assert isinstance(part, Tensor)
    assert 1 <= len(part) < 4096
    assert PassSize.of(captured.traced).flop >= 2 * 2 * 4096 * 512 * 2048
    assert check_captured(net, x, loss_fn, captured) == ""


def test_a_batch_that_does_not_run_is_not_compared() -> None:
    net = nn.Embedding(5, 3)
    bad = torch.full((4,), 9)
    captured = capture_call(net, bad, needs_loss=False)
    assert "does not run on the example batch" in check_captured(net, bad, None, captured)


def pythons_random(net: Net, x: Tensor) -> Tensor:
    return block(net, x) * random.random()


def numpys_random(net: Net, x: Tensor) -> Tensor:
    return block(net, x) * torch.tensor(np.random.rand(1).astype("float32"))


def counter(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return block(net, x) * net.count


CALLS = [0]


def list_counter(net: Net, x: Tensor) -> Tensor:
    CALLS[0] += 1
    return block(net, x) * CALLS[0]


def collector(net: Net, x: Tensor) -> Tensor:
    net.kept.append(block(net, x))
    return net.kept[-1]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (pythons_random, "draws from Python's random"),
        (numpys_random, "draws from numpy's random"),
        (counter, r"changes the Python number model.count \(0 became 1\)"),
        (list_counter, r"changes the Python number CALLS \(\[0\] became \[1\]\)"),
        (collector, "reads model.kept and leaves tensors with a gradient there"),
    ],
)
def test_what_would_be_frozen_is_refused(body: Callable[[Any, Tensor], Tensor], told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        checked(body)


def test_what_forward_reads_is_compared() -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.tau, self.unread = nn.Linear(4, 3), 0.5, 7

        def forward(self, x: Tensor) -> Tensor:
            return F.log_softmax(self.out(x) / self.tau, -1).mean()

    model = Tempered()
    reads = capture_call(model, torch.randn(2, 4)).reads
    model.unread = 8
    assert reads.holds()
    model.tau = 0.25
    assert not reads.holds()
    assert reads.changed() == "model.tau was 0.5 and is 0.25"
