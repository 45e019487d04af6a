"""pytorch/examples mnist: a small convolutional network, `F.nll_loss` outside of the model, Adadelta and StepLR."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import lopsided
from scripts import CLUSTER

BATCH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.fc1, self.fc2 = nn.Linear(128, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def digits(batches: int, seed: int) -> Dataset[tuple[Tensor, ...]]:
    drawn = torch.Generator().manual_seed(seed)
    rows = batches * BATCH - 3  # the last batch is short
    return TensorDataset(torch.randn(rows, 1, 12, 12, generator=drawn), torch.randint(10, (rows,), generator=drawn))


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    train_data, test_data = digits(steps // 2, seed=2), digits(2, seed=3)
    batch_size = BATCH // dist.get_world_size()
    train_loader = DataLoader(train_data, batch_size, sampler=DistributedSampler(train_data, shuffle=False))
    test_loader = DataLoader(test_data, BATCH)
    model = DDP(Net())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        test_loss, correct = 0.0, 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += (output.argmax(dim=1) == target).sum().item()
        losses += [test_loss / len(test_data), correct / len(test_data)]
        scheduler.step()
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    train_data, test_data = digits(steps // 2, seed=2), digits(2, seed=3)
    train_loader = DataLoader(train_data, BATCH)
    test_loader = DataLoader(test_data, BATCH)
    model = lopsided.parallelize(Net(), next(iter(train_loader)), cluster=CLUSTER, loss_fn=F.nll_loss)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        model.train()
        for data, target in lopsided.shard(train_loader, model):
            optimizer.zero_grad()
            output = model(data)
            loss = model.loss_fn(output, target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        test_loss, correct = 0.0, 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += (output.argmax(dim=1) == target).sum().item()
        losses += [test_loss / len(test_data), correct / len(test_data)]
        scheduler.step()
    return losses
