"""A GAN: two networks, two losses, two optimizers, one plan for both.

    torchrun --nproc-per-node 2 examples/09_gan.py

Run alone (`python examples/09_gan.py`) it trains on one device. Both networks are in one module, and an argument says
which objective a call is for: every objective has a program of its own on the same pieces.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import lopsided

BATCH, LATENT = 32, 4


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, objective: str, noise: Tensor, real: Tensor | None = None) -> Tensor:
        fake = self.generator(noise)
        if objective == "generator":
            return softplus(-self.discriminator(fake)).mean()
        assert real is not None
        return softplus(-self.discriminator(real)).mean() + softplus(self.discriminator(fake.detach())).mean()


def main() -> None:
    torch.manual_seed(0)  # the same on every rank: whole batches are alike
    circle = nn.functional.normalize(torch.randn(BATCH * 40, 2), dim=1)
    gan = lopsided.parallelize(
        GAN(), {"objective": "discriminator", "noise": torch.randn(BATCH, LATENT), "real": circle[:BATCH]}, measure_s=2
    )
    of_discriminator = torch.optim.Adam(gan.discriminator.parameters(), lr=1e-2)
    of_generator = torch.optim.Adam(gan.generator.parameters(), lr=1e-2)
    for step, real in enumerate(circle.split(BATCH), 1):
        gan.zero_grad()
        loss = gan("discriminator", torch.randn(BATCH, LATENT), real)
        loss.backward()
        of_discriminator.step()

        gan.zero_grad()
        fooled = gan("generator", torch.randn(BATCH, LATENT))
        fooled.backward()
        of_generator.step()
        if gan.world.rank == 0 and step % 10 == 0:
            print(f"step {step}: discriminator {loss.item():.3f}, generator {fooled.item():.3f}")


if __name__ == "__main__":
    main()
