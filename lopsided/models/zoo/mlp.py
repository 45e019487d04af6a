"""A multilayer perceptron: the smallest model that has something to cut."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lopsided.models.zoo.parts import Built, random_tokens, random_values


class MLP(nn.Module):
    """Linear and ReLU, `layers` times, the last Linear giving class scores; cross-entropy loss."""

    def __init__(self, layers: int, width: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - 1))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.hidden:
            x = F.relu(layer(x))
        return F.cross_entropy(self.head(x), labels)


def mlp(*, batch: int = 64, layers: int = 6, width: int = 1024, classes: int = 10) -> Built:
    """`layers` linear layers, counting the head."""
    inputs = {"x": random_values(batch, width), "labels": random_tokens(batch, below=classes)}
    return MLP(layers, width, classes), inputs
