"""Small models written for the tests, and the one way they are compared with eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lopsided
from lopsided.capturing.call import LossFn, flatten_batch, in_form_of, loss_of
from lopsided.errors import CaptureError
from lopsided.ir.graph import Graph
from lopsided.verification.simulator import Simulation

Forward = Callable[[Any, Tensor], Any]


class ByHand(nn.Module):
    """A linear layer, two buffers, and a forward given as a function `(module, x)`."""

    def __init__(self, forward: Forward, *parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(6, 6)
        self.parts = nn.ModuleList(parts)
        self.register_buffer("ema", torch.randn(4, 6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.by_hand = [forward]

    def forward(self, x: Tensor) -> Any:
        return self.by_hand[0](self, x)


def example() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


def eager(model: nn.Module, batch: object, loss_fn: LossFn | None = None) -> Simulation:
    """One training step of a copy of the model, on a copy of the batch."""
    tensors, rebuild = flatten_batch(batch)
    given = in_form_of(batch, *rebuild([tensor.clone() for tensor in tensors.values()]))
    trained = copy.deepcopy(model)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        loss = loss_of(trained, given, loss_fn)
    finally:
        torch.set_autocast_cache_enabled(cached)
    loss.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in trained.named_parameters()
        if p.requires_grad
    }
    return Simulation(loss.detach(), gradients, dict(trained.named_buffers()), 0.0)


def assert_captured(model: nn.Module, batch: object, loss_fn: LossFn | None = None) -> Graph:
    """The graph of a model whose loss, gradients and buffers on one device are those of eager PyTorch."""
    before = copy.deepcopy(model.state_dict())
    graph = lopsided.capture(model, batch, loss_fn=loss_fn)
    found = lopsided.simulate(lopsided.one_device(graph), model, batch, (1.0,))
    for name, held in model.state_dict().items():
        assert torch.equal(held, before[name]), f"capture changed {name}"
    wanted = eager(model, batch, loss_fn)
    assert set(found.gradients) == set(wanted.gradients)
    torch.testing.assert_close(found.loss, wanted.loss)
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, msg=lambda m, n=name: f"gradient of {n}: {m}")
    unchanged = dict(model.named_buffers())
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(
            found.buffers.get(name, unchanged[name]), buffer, msg=lambda m, n=name: f"buffer {n}: {m}"
        )
    return graph


def ops(graph: Graph) -> list[str]:
    return [node.op.removeprefix("aten.") for node in graph.nodes]


def only(graph: Graph, op: str) -> Any:
    found = [node for node in graph.nodes if node.op.startswith(f"aten.{op}.")]
    assert len(found) == 1, ops(graph)
    return found[0]


def refused(model: nn.Module, batch: object, **more: Any) -> CaptureError:
    with pytest.raises(CaptureError) as error:
        lopsided.capture(model, batch, **more)
    assert error.value.do, error.value
    return error.value


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
