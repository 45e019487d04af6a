"""minGPT: a `Trainer` with callbacks, an endless loader, clipping, and no distributed code in the model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lopsided
from scripts import CLUSTER
from scripts.nanogpt import BLOCK, GPT, VOCAB

BATCH = 10


class SortDataset(Dataset[tuple[Tensor, Tensor]]):
    """Sequences to be sorted; the first half of the targets does not count."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(VOCAB, (BLOCK // 2 + 1,), generator=torch.Generator().manual_seed(index))
        both = torch.cat([drawn, drawn.sort().values])[: BLOCK + 1]
        y = both[1:].clone()
        y[: BLOCK // 2] = -1
        return both[:-1], y


def with_ddp(steps: int) -> list[float]:
    class Trainer:
        def __init__(self, model: nn.Module, train_dataset: Dataset[tuple[Tensor, Tensor]]) -> None:
            self.optimizer = model.configure_optimizers()
            self.model = DDP(model)
            self.dataset = train_dataset
            self.callbacks: list[Callable[[Trainer], None]] = []

        def run(self) -> None:
            model = self.model
            sampler = DistributedSampler(self.dataset, shuffle=False)
            train_loader = DataLoader(self.dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
            model.train()
            data_iter = cycle(train_loader)
            for _ in range(steps):
                x, y = next(data_iter)
                _logits, self.loss = model(x, y)
                model.zero_grad(set_to_none=True)
                self.loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                self.optimizer.step()
                for callback in self.callbacks:
                    callback(self)

    torch.manual_seed(3407)
    losses: list[float] = []
    trainer = Trainer(GPT(), SortDataset())
    trainer.callbacks.append(lambda trainer: losses.append(trainer.loss.item()))
    trainer.run()
    return losses


def with_lopsided(steps: int) -> list[float]:
    class Trainer:
        def __init__(self, model: nn.Module, train_dataset: Dataset[tuple[Tensor, Tensor]]) -> None:
            self.optimizer = model.configure_optimizers()
            self.train_loader = DataLoader(train_dataset, batch_size=BATCH)
            self.model = lopsided.parallelize(model, next(iter(self.train_loader)), cluster=CLUSTER)
            self.callbacks: list[Callable[[Trainer], None]] = []

        def run(self) -> None:
            model = self.model
            model.train()
            data_iter = cycle(self.train_loader)
            for _ in range(steps):
                x, y = next(data_iter)
                _logits, self.loss = model(x, y)
                model.zero_grad(set_to_none=True)
                self.loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                self.optimizer.step()
                for callback in self.callbacks:
                    callback(self)

    torch.manual_seed(3407)
    losses: list[float] = []
    trainer = Trainer(GPT(), SortDataset())
    trainer.callbacks.append(lambda trainer: losses.append(trainer.loss.item()))
    trainer.run()
    return losses
