"""A contrastive script (SimCLR): two views of every picture, each compared with all others of the batch (InfoNCE)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import lopsided
from scripts import CLUSTER

BATCH = 10


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 16))
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(16, 8))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        z1, z2 = self.projector(self.backbone(torch.cat([first, second]))).chunk(2)
        return F.normalize(z1, dim=1), F.normalize(z2, dim=1)


def info_nce(z1: Tensor, z2: Tensor, temperature: float = 0.2) -> Tensor:
    z = torch.cat([z1, z2])
    similar = z @ z.t() / temperature
    similar = similar.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), float("-inf"))
    partner = torch.arange(len(z), device=z.device).roll(len(z1))
    return F.cross_entropy(similar, partner)


def views(steps: int) -> Dataset[tuple[Tensor, ...]]:
    drawn = torch.Generator().manual_seed(4)
    x = torch.randn(steps * BATCH, 20, generator=drawn)
    return TensorDataset(*(x + 0.3 * torch.randn(x.shape, generator=drawn) for _ in range(2)))


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    dataset = views(steps)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    model = DDP(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-6)
    for first, second in loader:
        z1, z2 = model(first, second)
        z1 = torch.cat(torch.distributed.nn.all_gather(z1))
        z2 = torch.cat(torch.distributed.nn.all_gather(z2))
        loss = info_nce(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    dataset = views(steps)
    loader = DataLoader(dataset, batch_size=BATCH)
    loss_fn = lambda output, batch: info_nce(*output)  # noqa: E731
    model = lopsided.parallelize(Encoder(), next(iter(loader)), cluster=CLUSTER, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-6)
    for first, second in lopsided.shard(loader, model):
        loss = model(first, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
