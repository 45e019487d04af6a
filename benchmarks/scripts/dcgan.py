"""pytorch/examples dcgan: a generator and a discriminator, two optimizers, and a loss of one through the other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import lopsided
from scripts import CLUSTER

BATCH, LATENT = 10, 6


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(LATENT, 8, 4, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input: Tensor) -> Tensor:
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 6, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(6, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 1, 4, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input: Tensor) -> Tensor:
        return self.main(input).view(-1)


def pictures(steps: int) -> Tensor:
    return torch.randn(steps * BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(5)).tanh()


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    dataset = pictures(steps)
    sampler = DistributedSampler(dataset, shuffle=False)
    dataloader = DataLoader(dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    criterion = nn.BCELoss()
    netG, netD = Generator(), Discriminator()
    noise_of = torch.Generator().manual_seed(6)
    ones, zeros = torch.ones(BATCH), torch.zeros(BATCH)
    netG = DDP(netG)
    netD = DDP(netD)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for real in dataloader:
        netD.zero_grad()
        errD_real = criterion(netD(real), ones)
        errD_real.backward()
        noise = torch.randn(BATCH, LATENT, 1, 1, generator=noise_of)
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), zeros)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()
        losses += [errD_real.item() + errD_fake.item(), errG.item()]
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    dataset = pictures(steps)
    dataloader = DataLoader(dataset, batch_size=BATCH)
    criterion = nn.BCELoss()
    netG, netD = Generator(), Discriminator()
    noise_of = torch.Generator().manual_seed(6)
    ones, zeros = torch.ones(BATCH), torch.zeros(BATCH)
    netG = lopsided.parallelize(netG, torch.randn(BATCH, LATENT, 1, 1), cluster=CLUSTER)
    netD = lopsided.parallelize(netD, (dataset[:BATCH], ones), cluster=CLUSTER, loss_fn=criterion)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for real in dataloader:
        netD.zero_grad()
        errD_real = netD.loss_fn(netD(real), ones)
        errD_real.backward()
        noise = torch.randn(BATCH, LATENT, 1, 1, generator=noise_of)
        fake = netG(noise)
        errD_fake = netD.loss_fn(netD(fake.detach()), zeros)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = netD.loss_fn(netD(fake), ones)
        errG.backward()
        optimizerG.step()
        losses += [errD_real.item() + errD_fake.item(), errG.item()]
    return losses
