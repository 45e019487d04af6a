"""A BYOL script: an online network predicts what a momentum encoder makes of another view; the second follows the first
after every step and has no gradient."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import lopsided
from scripts import CLUSTER
from scripts.contrastive import BATCH, views


class BYOL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(20, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8))
        self.predictor = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        loss = first.new_zeros(())
        for one, other in ((first, second), (second, first)):
            predicted = F.normalize(self.predictor(self.online(one)), dim=-1)
            with torch.no_grad():
                wanted = F.normalize(self.target(other), dim=-1)
            loss = loss + (2 - 2 * (predicted * wanted).sum(dim=-1)).mean()
        return loss

    @torch.no_grad()
    def update_target(self, tau: float) -> None:
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.data = tau * target.data + (1 - tau) * online.data


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    dataset = views(steps)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    model = DDP(BYOL(), find_unused_parameters=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)
    for first, second in loader:
        loss = model(first, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.module.update_target(0.9)
        losses.append(loss.item())
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    dataset = views(steps)
    loader = DataLoader(dataset, batch_size=BATCH)
    model = BYOL()
    # Both networks are stored alike, so that one can follow the other element by element.
    plan = lopsided.plan(model, next(iter(loader)), CLUSTER, pins=["*=I"])
    model = lopsided.parallelize(model, next(iter(loader)), plan)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)
    for first, second in lopsided.shard(loader, model):
        loss = model(first, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.module.update_target(0.9)
        losses.append(loss.item())
    return losses
