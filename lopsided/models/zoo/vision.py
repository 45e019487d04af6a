"""Image classifiers: VGG-19 and ViT as HAP benchmarks them, and the standard ResNet-50."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopsided.errors import ModelError
from lopsided.models.zoo.bert import EncoderLayer, FeedForward
from lopsided.models.zoo.parts import Batch, Built, heads_for, random_tokens, random_values, require, require_divides

# Convolutions before each of the five poolings of VGG-19, and their width relative to the first.
VGG19_STAGES = ((2, 1), (2, 2), (4, 4), (4, 8), (4, 8))


def labelled_images(batch: int, image: int, classes: int) -> Batch:
    """Random square RGB images with a class each."""
    return {"images": random_values(batch, 3, image, image), "labels": random_tokens(batch, below=classes)}


class VGG19(nn.Module):
    """3×3 convolutions with bias and no batch norm, pooled to 7×7 whatever the image; the loss is a sum."""

    def __init__(self, width: int, ffn: int, classes: int, dropout: float) -> None:
        super().__init__()
        features: list[nn.Module] = []
        channels = 3
        for count, factor in VGG19_STAGES:
            for _ in range(count):
                features += [nn.Conv2d(channels, width * factor, 3, padding=1), nn.ReLU()]
                channels = width * factor
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(channels * 49, ffn),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(ffn, ffn),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(ffn, classes),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(self.features(images)).flatten(1)
        return F.cross_entropy(self.classifier(x), labels, reduction="sum")


def vgg19(
    *,
    batch: int = 32,
    width: int = 64,
    ffn: int = 4096,
    image: int = 32,
    classes: int = 10,
    dropout: float = 0.1,
) -> Built:
    """HAP's VGG-19, `width` the first convolution's channels: 139,611,210 parameters at the defaults."""
    require(image >= 32, f"image={image} vanishes in five halvings", "choose image=32 or more")
    return VGG19(width, ffn, classes, dropout), labelled_images(batch, image, classes)


class ViT(nn.Module):
    """Patches as tokens after a class token; post-norm encoder layers, hence no final norm; a summed loss."""

    def __init__(self, tokens: int, patch: int, width: int, classes: int, layers: list[EncoderLayer]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, tokens, width))
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.class_token.expand(patches.shape[0], -1, -1), patches), dim=1)
        x = tokens + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, 0]), labels, reduction="sum")


def vit(
    *,
    batch: int = 32,
    layers: int = 12,
    width: int = 768,
    heads: int = 0,
    ffn: int = 0,
    image: int = 32,
    patch: int = 4,
    classes: int = 10,
    dropout: float = 0.1,
) -> Built:
    """HAP's ViT: 85,150,474 parameters at the defaults."""
    heads, ffn = heads or heads_for(width, 64), ffn or 4 * width
    require_divides("heads", heads, "width", width)
    require_divides("patch", patch, "image", image)
    tokens = (image // patch) ** 2 + 1
    blocks = [EncoderLayer(width, heads, dropout, FeedForward(width, ffn, dropout)) for _ in range(layers)]
    return ViT(tokens, patch, width, classes, blocks), labelled_images(batch, image, classes)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with batch norms, around them a residual; the stride sits on the 3×3."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of bottlenecks that halve the image and double the width, a mean over pixels, a head."""

    def __init__(self, blocks: list[int], width: int, classes: int, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            for i in range(count):
                stages.append(Bottleneck(channels, inner, stride=2 if stage and not i else 1))
                channels = 4 * inner
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(self.stages(self.stem(images))).flatten(1)
        return F.cross_entropy(self.head(x), labels, label_smoothing=self.label_smoothing)


def whole_numbers(key: str, text: str) -> list[int]:
    """The numbers of "3-4-6-3"."""
    numbers = text.split("-")
    if not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ModelError(
            f"{key}={text} is not a list of whole numbers",
            where="zoo overrides",
            do=f"write numbers from 1 up with dashes between them, e.g. {key}=3-4-6-3",
        )
    return [int(n) for n in numbers]


def resnet50(
    *,
    batch: int = 32,
    width: int = 64,
    blocks: str = "3-4-6-3",
    image: int = 224,
    classes: int = 1000,
    label_smoothing: float = 0.1,
) -> Built:
    """ResNet-50, `blocks` the bottlenecks per stage: 25,557,032 parameters at the defaults."""
    counts = whole_numbers("blocks", blocks)
    return ResNet(counts, width, classes, label_smoothing), labelled_images(batch, image, classes)
