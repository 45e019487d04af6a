"""pytorch/examples imagenet: a residual network with batch norm, `criterion(output, target)`, accuracy, SGD, StepLR."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import lopsided
from scripts import CLUSTER

BATCH = 12


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(torch.relu_(self.bn1(self.conv1(x)))))
        out += self.down(x)
        return torch.relu_(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Block(4, 6, 2), Block(6, 8, 2))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.layers(self.stem(x))), 1))


def pictures(batches: int, seed: int) -> Dataset[tuple[Tensor, ...]]:
    drawn = torch.Generator().manual_seed(seed)
    rows = batches * BATCH
    return TensorDataset(torch.randn(rows, 3, 8, 8, generator=drawn), torch.randint(10, (rows,), generator=drawn))


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        predicted = output.topk(max(topk), dim=1).indices
        correct = predicted.eq(target[:, None])
        return [correct[:, :k].any(1).float().mean().item() for k in topk]


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    train_data, val_data = pictures(steps // 2, seed=2), pictures(2, seed=3)
    batch_size = BATCH // dist.get_world_size()
    train_loader = DataLoader(train_data, batch_size, sampler=DistributedSampler(train_data, shuffle=False))
    val_loader = DataLoader(val_data, BATCH)
    criterion = nn.CrossEntropyLoss()
    model = DDP(ResNet())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    for _ in range(2):
        model.train()
        for images, target in train_loader:
            output = model(images)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            for images, target in val_loader:
                output = model(images)
                loss = criterion(output, target)
                acc1, acc5 = accuracy(output, target, topk=(1, 5))
                losses += [loss.item(), acc1, acc5]
        scheduler.step()
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    train_data, val_data = pictures(steps // 2, seed=2), pictures(2, seed=3)
    train_loader = DataLoader(train_data, BATCH)
    val_loader = DataLoader(val_data, BATCH)
    criterion = nn.CrossEntropyLoss()
    model = lopsided.parallelize(ResNet(), next(iter(train_loader)), cluster=CLUSTER, loss_fn=criterion)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    for _ in range(2):
        model.train()
        for images, target in lopsided.shard(train_loader, model):
            output = model(images)
            loss = model.loss_fn(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            for images, target in val_loader:
                output = model(images)
                loss = criterion(output, target)
                acc1, acc5 = accuracy(output, target, topk=(1, 5))
                losses += [loss.item(), acc1, acc5]
        scheduler.step()
    return losses
