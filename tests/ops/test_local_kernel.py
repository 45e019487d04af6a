"""The op of a node as a function of the tensors that a device holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lopsided.capturing.capture_graph import capture
from lopsided.ops.local_kernel import prepared_call


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 2).sum()


def test_a_view_of_what_lies_in_another_order() -> None:
    """On one device a view was possible; what was gathered along another dim lies otherwise in memory."""
    graph = capture(Flat(), (torch.ones(2, 3, 4),))
    node = next(node for node in graph.nodes if node.op == "aten.view.default")
    x = torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0)
    assert torch.equal(prepared_call(node, torch.device("cpu"))([x])[0], x.reshape(-1, 2))
