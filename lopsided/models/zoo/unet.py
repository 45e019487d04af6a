"""The U-Net of denoising diffusion: it is shown a noisy image and the noise level, and predicts the noise."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopsided.models.zoo.parts import Built, random_tokens, random_values, require_divides
from lopsided.models.zoo.vision import whole_numbers

STEPS = 1000
"""Noise levels of the diffusion."""


class ResidualBlock(nn.Module):
    """Two normed convolutions around which the image passes; the noise level shifts every channel between."""

    def __init__(self, channels: int, width: int, time_width: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(math.gcd(groups, channels), channels)
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.shift = nn.Linear(time_width, width)
        self.second_norm = nn.GroupNorm(groups, width)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, width, 1) if channels != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.first_norm(x)))
        y = y + self.shift(F.silu(time)).unsqueeze(-1).unsqueeze(-1)
        y = self.second(self.drop(F.silu(self.second_norm(y))))
        joined: Tensor = y + self.shortcut(x)
        return joined


class PixelAttention(nn.Module):
    """Every pixel looks at every pixel."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, height, breadth = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, self.heads, width // self.heads, height * breadth)
        q, k, v = qkv.transpose(-1, -2).unbind(dim=1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2)
        joined: Tensor = x + self.out(y.reshape(batch, width, height, breadth))
        return joined


class UNet(nn.Module):
    """Down through the levels, through the middle, and up again with what each level put aside.

    `images` are clean; the forward pass adds `noise` in the amount of step `time`, as training does, and
    returns the mean squared error of its guess.
    """

    signal: Tensor
    blur: Tensor
    rates: Tensor

    def __init__(self, widths: list[int], layers: int, heads: int, groups: int, dropout: float) -> None:
        super().__init__()
        base, time_width = widths[0], 4 * widths[0]
        kept = torch.cumprod(1.0 - torch.linspace(1e-4, 0.02, STEPS), dim=0)
        self.register_buffer("signal", kept.sqrt())
        self.register_buffer("blur", (1.0 - kept).sqrt())
        self.register_buffer("rates", torch.exp(torch.arange(base // 2) * (-math.log(10000.0) / (base // 2))))
        self.time = nn.Sequential(nn.Linear(2 * (base // 2), time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.entry = nn.Conv2d(3, base, 3, padding=1)

        def block(channels: int, width: int) -> ResidualBlock:
            return ResidualBlock(channels, width, time_width, groups, dropout)

        self.down = nn.ModuleList()
        self.shrink = nn.ModuleList()
        channels = base
        for level, width in enumerate(widths):
            self.down.append(nn.ModuleList(block(channels if i == 0 else width, width) for i in range(layers)))
            channels = width
            if level < len(widths) - 1:
                self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
        self.before = block(channels, channels)
        self.attention = PixelAttention(channels, heads, groups)
        self.after = block(channels, channels)
        self.up = nn.ModuleList()
        self.grow = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            # Each block of the way up also reads what the matching block of the way down put aside.
            self.up.append(nn.ModuleList(block((channels if i == 0 else width) + width, width) for i in range(layers)))
            channels = width
            if level > 0:
                self.grow.append(nn.Conv2d(width, width, 3, padding=1))
        self.exit_norm = nn.GroupNorm(groups, base)
        self.exit = nn.Conv2d(base, 3, 3, padding=1)

    def guess(self, x: Tensor, time: Tensor) -> Tensor:
        """The noise in `x`, which has that of step `time`."""
        angles = time.unsqueeze(-1) * self.rates
        level_of_noise = self.time(torch.cat((angles.sin(), angles.cos()), dim=-1))
        x = self.entry(x)
        aside: list[Tensor] = []
        for i, blocks in enumerate(self.down):
            for block in blocks:  # type: ignore[attr-defined]  # a ModuleList in a ModuleList is typed Module
                x = block(x, level_of_noise)
                aside.append(x)
            if i < len(self.shrink):
                x = self.shrink[i](x)
        x = self.after(self.attention(self.before(x, level_of_noise)), level_of_noise)
        for i, blocks in enumerate(self.up):
            for block in blocks:  # type: ignore[attr-defined]  # as above
                x = block(torch.cat((x, aside.pop()), dim=1), level_of_noise)
            if i < len(self.grow):
                x = self.grow[i](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        y: Tensor = self.exit(F.silu(self.exit_norm(x)))
        return y

    def forward(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        signal, blur = (table[time].view(-1, 1, 1, 1) for table in (self.signal, self.blur))
        return F.mse_loss(self.guess(signal * images + blur * noise, time), noise)


def unet(
    *,
    batch: int = 16,
    layers: int = 2,
    width: int = 128,
    factors: str = "1-2-2-4",
    heads: int = 4,
    groups: int = 32,
    image: int = 32,
    dropout: float = 0.1,
) -> Built:
    """`layers` blocks per level; `factors` the levels' widths relative to `width`."""
    widths = [width * factor for factor in whole_numbers("factors", factors)]
    require_divides("groups", groups, "width", width)
    require_divides("heads", heads, "width", widths[-1])
    require_divides("2", 2, "width", width)
    halvings = len(widths) - 1
    require_divides(f"2^{halvings}", 2**halvings, "image", image)
    inputs = {
        "images": random_values(batch, 3, image, image),
        "noise": random_values(batch, 3, image, image, seed=1),
        "time": random_tokens(batch, below=STEPS, seed=2),
    }
    return UNet(widths, layers, heads, groups, dropout), inputs
