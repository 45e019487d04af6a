"""pytorch/examples super_resolution: convolutions, a pixel shuffle, MSE, and the signal-to-noise ratio of a test."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import lopsided
from scripts import CLUSTER

BATCH = 9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 5, padding=2), nn.Conv2d(8, 6, 3, padding=1)
        self.conv3, self.pixel_shuffle = nn.Conv2d(6, 4, 3, padding=1), nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.pixel_shuffle(self.conv3(x))


def pictures(batches: int, seed: int) -> Dataset[tuple[Tensor, ...]]:
    large = torch.rand(batches * BATCH, 1, 12, 12, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(F.avg_pool2d(large, 2), large)


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(123)
    losses: list[float] = []
    train_set, test_set = pictures(steps, seed=1), pictures(2, seed=2)
    batch_size = BATCH // dist.get_world_size()
    training_loader = DataLoader(train_set, batch_size, sampler=DistributedSampler(train_set, shuffle=False))
    testing_loader = DataLoader(test_set, BATCH)
    criterion = nn.MSELoss()
    model = DDP(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for input, target in training_loader:
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for input, target in testing_loader:
            mse = criterion(model(input), target)
            losses.append(10 * math.log10(1 / mse.item()))
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(123)
    losses: list[float] = []
    train_set, test_set = pictures(steps, seed=1), pictures(2, seed=2)
    training_loader = DataLoader(train_set, BATCH)
    testing_loader = DataLoader(test_set, BATCH)
    criterion = nn.MSELoss()
    model = lopsided.parallelize(Net(), next(iter(training_loader)), cluster=CLUSTER, loss_fn=criterion)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for input, target in lopsided.shard(training_loader, model):
        optimizer.zero_grad()
        loss = model(input, target)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for input, target in testing_loader:
            mse = criterion(model(input), target)
            losses.append(10 * math.log10(1 / mse.item()))
    return losses
