"""A graph network: messages along edges are added up with `index_add`, all nodes in one batch, some without a label."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lopsided
from scripts import CLUSTER

NODES, EDGES, FEATURES, CLASSES = 30, 90, 12, 4


class SAGE(nn.Module):
    """The mean of the neighbours beside the node itself, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.self1, self.near1 = nn.Linear(FEATURES, 16), nn.Linear(FEATURES, 16, bias=False)
        self.self2, self.near2 = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES, bias=False)

    def gathered(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        total = torch.zeros_like(x).index_add(0, target, x[source])
        degree = x.new_zeros(len(x)).index_add(0, target, x.new_ones(len(target)))
        return total / degree.clamp(min=1)[:, None]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.relu(self.self1(x) + self.near1(self.gathered(x, edge_index)))
        return self.self2(x) + self.near2(self.gathered(x, edge_index))


def graph() -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    labels = torch.randint(CLASSES, (NODES,), generator=drawn)
    labels[::3] = -100  # not for training
    edges = torch.randint(NODES, (2, EDGES), generator=drawn)
    return torch.randn(NODES, FEATURES, generator=drawn), edges, labels


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    x, edge_index, y = graph()
    model = DDP(SAGE())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    for _ in range(steps):
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(x, edge_index).argmax(dim=-1) == y
        losses += [loss.item(), right.float().mean().item()]
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    x, edge_index, y = graph()
    model = lopsided.parallelize(SAGE(), (x, edge_index, y), cluster=CLUSTER, loss_fn=F.cross_entropy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    for _ in range(steps):
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = model.loss_fn(out, y)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(x, edge_index).argmax(dim=-1) == y
        losses += [loss.item(), right.float().mean().item()]
    return losses
