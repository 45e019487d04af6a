"""A segmentation script: a U-Net, cross entropy plus Dice of the whole batch, RMSprop with momentum, a plateau schedule
that follows the Dice score of a validation set."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import lopsided
from scripts import CLUSTER

BATCH, CLASSES = 8, 3


def double(inputs: int, outputs: int) -> nn.Module:
    first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(
        first, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.Conv2d(outputs, outputs, 3, padding=1)
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down = double(3, 4), double(4, 6)
        self.up, self.conv = nn.ConvTranspose2d(6, 4, 2, stride=2), double(8, 4)
        self.outc = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.up(self.down(F.max_pool2d(x1, 2)))
        return self.outc(self.conv(torch.cat([x1, x2], dim=1)))


def dice_coeff(predicted: Tensor, target: Tensor) -> Tensor:
    """Over all pixels of all pictures, class by class."""
    both = 2 * (predicted * target).sum(dim=(0, 2, 3))
    sizes = predicted.sum(dim=(0, 2, 3)) + target.sum(dim=(0, 2, 3))
    return ((both + 1e-6) / (sizes + 1e-6)).mean()


def one_hot(masks: Tensor, like: Tensor) -> Tensor:
    return F.one_hot(masks, CLASSES).permute(0, 3, 1, 2).to(like.dtype)


def criterion(masks_pred: Tensor, true_masks: Tensor) -> Tensor:
    loss = F.cross_entropy(masks_pred, true_masks)
    return loss + 1 - dice_coeff(masks_pred.softmax(dim=1), one_hot(true_masks, masks_pred))


def scenes(batches: int, seed: int) -> Dataset[tuple[Tensor, ...]]:
    drawn = torch.Generator().manual_seed(seed)
    rows = batches * BATCH
    return TensorDataset(
        torch.randn(rows, 3, 8, 8, generator=drawn), torch.randint(CLASSES, (rows, 8, 8), generator=drawn)
    )


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    train_set, val_set = scenes(steps // 2, seed=2), scenes(1, seed=3)
    batch_size = BATCH // dist.get_world_size()
    train_loader = DataLoader(train_set, batch_size, sampler=DistributedSampler(train_set, shuffle=False))
    val_loader = DataLoader(val_set, BATCH)
    model = DDP(UNet())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
    for _ in range(2):
        model.train()
        for images, true_masks in train_loader:
            masks_pred = model(images)
            loss = criterion(masks_pred, true_masks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            for images, true_masks in val_loader:
                masks_pred = one_hot(model(images).argmax(dim=1), images)
                score = dice_coeff(masks_pred, one_hot(true_masks, images))
                scheduler.step(score)
                losses.append(score.item())
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    train_set, val_set = scenes(steps // 2, seed=2), scenes(1, seed=3)
    train_loader = DataLoader(train_set, BATCH)
    val_loader = DataLoader(val_set, BATCH)
    model = lopsided.parallelize(UNet(), next(iter(train_loader)), cluster=CLUSTER, loss_fn=criterion)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
    for _ in range(2):
        model.train()
        for images, true_masks in lopsided.shard(train_loader, model):
            masks_pred = model(images)
            loss = model.loss_fn(masks_pred, true_masks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            for images, true_masks in val_loader:
                masks_pred = one_hot(model(images).argmax(dim=1), images)
                score = dice_coeff(masks_pred, one_hot(true_masks, images))
                scheduler.step(score)
                losses.append(score.item())
    return losses
