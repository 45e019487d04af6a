"""A timm-like script: a vision transformer, mixup of the whole batch, soft targets, AdamW with two groups, a cosine
schedule, and an exponential moving average of the weights that is evaluated."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import lopsided
from scripts import CLUSTER

BATCH, WIDTH, CLASSES = 10, 16, 5


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 5, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x)[:, 0]))


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1).mean()


class Mixup:
    """One weight and one order for the whole batch."""

    def __init__(self) -> None:
        self.drawn = torch.Generator().manual_seed(7)

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        lam = torch.rand((), generator=self.drawn).item()
        order = torch.randperm(len(x), generator=self.drawn)
        soft = F.one_hot(target, CLASSES).to(x.dtype)
        return lam * x + (1 - lam) * x[order], lam * soft + (1 - lam) * soft[order]


def pictures(batches: int, seed: int) -> Dataset[tuple[Tensor, ...]]:
    drawn = torch.Generator().manual_seed(seed)
    rows = batches * BATCH
    return TensorDataset(torch.randn(rows, 3, 8, 8, generator=drawn), torch.randint(CLASSES, (rows,), generator=drawn))


def param_groups(model: nn.Module) -> list[dict[str, object]]:
    plain = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": plain, "weight_decay": 0.0}]


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(42)
    losses: list[float] = []
    train_data, eval_data = pictures(steps, seed=1), pictures(2, seed=2)
    batch_size = BATCH // dist.get_world_size()
    loader_train = DataLoader(train_data, batch_size, sampler=DistributedSampler(train_data, shuffle=False))
    loader_eval = DataLoader(eval_data, BATCH)
    mixup_fn, train_loss_fn, validate_loss_fn = Mixup(), SoftTargetCrossEntropy(), nn.CrossEntropyLoss()
    model = ViT()
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model = DDP(model)
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for input, target in loader_train:
        input, target = mixup_fn(input, target)
        output = model(input)
        loss = train_loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model_ema.update_parameters(model)
        scheduler.step()
        losses.append(loss.item())
    model_ema.eval()
    with torch.no_grad():
        for input, target in loader_eval:
            losses.append(validate_loss_fn(model_ema(input), target).item())
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(42)
    losses: list[float] = []
    train_data, eval_data = pictures(steps, seed=1), pictures(2, seed=2)
    loader_train = DataLoader(train_data, BATCH)
    loader_eval = DataLoader(eval_data, BATCH)
    mixup_fn, train_loss_fn, validate_loss_fn = Mixup(), SoftTargetCrossEntropy(), nn.CrossEntropyLoss()
    model = ViT()
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    example = Mixup()(*next(iter(loader_train)))
    model = lopsided.parallelize(model, example, cluster=CLUSTER, loss_fn=train_loss_fn)
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for input, target in loader_train:
        input, target = mixup_fn(input, target)
        output = model(input)
        loss = model.loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model_ema.update_parameters(model)
        scheduler.step()
        losses.append(loss.item())
    model_ema.eval()
    with torch.no_grad():
        for input, target in loader_eval:
            losses.append(validate_loss_fn(model_ema(input), target).item())
    return losses
