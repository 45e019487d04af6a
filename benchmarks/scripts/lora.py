"""Fine-tuning with LoRA written by hand: a frozen language model, low-rank matrices beside its linear layers, only
these in the optimizer and in what is saved; a learning rate that warms up."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import lopsided
from scripts import CLUSTER
from scripts.mingpt import BATCH, SortDataset
from scripts.nanogpt import GPT


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 3, alpha: float = 6.0) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_A.t() @ self.lora_B.t() * self.scale


def with_adapters(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if name in ("c_attn", "c_proj"):
                setattr(module, name, LoRALinear(child))
    return model


def dataset(steps: int) -> Subset[tuple[Tensor, Tensor]]:
    return Subset(SortDataset(), [k % 64 for k in range(steps * BATCH)])


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    data = dataset(steps)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    model = with_adapters(GPT())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    model = DDP(model)
    for x, y in loader:
        _logits, loss = model(x, y)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    adapters = {name: value for name, value in model.module.state_dict().items() if "lora_" in name}
    losses += [value.abs().sum().item() for value in adapters.values()]
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    data = dataset(steps)
    loader = DataLoader(data, batch_size=BATCH)
    model = with_adapters(GPT())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    model = lopsided.parallelize(model, next(iter(loader)), cluster=CLUSTER)
    for x, y in lopsided.shard(loader, model):
        _logits, loss = model(x, y)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    adapters = {name: value for name, value in lopsided.full_state_dict(model).items() if "lora_" in name}
    losses += [value.abs().sum().item() for value in adapters.values()]
    return losses
