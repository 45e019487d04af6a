"""pytorch/examples vae: a loss of two terms that are sums over the batch, and noise for the reparametrisation."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import lopsided
from scripts import CLUSTER

BATCH, PIXELS, LATENT = 12, 36, 4
Output = tuple[Tensor, Tensor, Tensor]


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(PIXELS, 16), nn.Linear(16, LATENT), nn.Linear(16, LATENT)
        self.fc3, self.fc4 = nn.Linear(LATENT, 16), nn.Linear(16, PIXELS)

    def forward(self, x: Tensor, noise: Tensor) -> Output:
        hidden = F.relu(self.fc1(x.view(-1, PIXELS)))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + noise * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    bce = F.binary_cross_entropy(recon_x, x.view(-1, PIXELS), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def digits(steps: int) -> Tensor:
    return torch.rand(steps * BATCH, 1, 6, 6, generator=torch.Generator().manual_seed(5))


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    dataset = digits(steps)
    sampler = DistributedSampler(dataset, shuffle=False)
    train_loader = DataLoader(dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    model = DDP(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.train()
    noise_of = torch.Generator().manual_seed(6)
    for data in train_loader:
        noise = torch.randn(len(data), LATENT, generator=noise_of)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data, noise)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        losses.append(loss.item() / len(data))
        optimizer.step()
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    dataset = digits(steps)
    train_loader = DataLoader(dataset, batch_size=BATCH)
    example = dataset[:BATCH], torch.zeros(BATCH, LATENT)
    loss_fn = lambda output, batch: loss_function(output[0], batch[0], output[1], output[2])  # noqa: E731
    model = lopsided.parallelize(VAE(), example, cluster=CLUSTER, loss_fn=loss_fn)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.train()
    noise_of = torch.Generator().manual_seed(6)
    for data in train_loader:
        noise = torch.randn(len(data), LATENT, generator=noise_of)
        optimizer.zero_grad()
        loss = model(data, noise)
        loss.backward()
        losses.append(loss.item() / len(data))
        optimizer.step()
    return losses
