"""T5: an encoder and a decoder whose attention knows distances, in buckets, and nothing else of positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopsided.models.zoo.parts import (
    Built,
    embedding,
    heads_for,
    in_proportion,
    random_tokens,
    require,
    require_divides,
)

IGNORED = -100
"""The label of a token that does not count, as F.cross_entropy has it."""

MAX_DISTANCE = 128
"""Distances from here on share the last bucket."""


def distance_buckets(seq: int, buckets: int, both_ways: bool) -> Tensor:
    """The bucket of the distance from each query to each key: [seq, seq].

    Half of the buckets hold one short distance each, the others grow by a constant factor. An encoder spends
    half of all on keys to the right; a decoder never looks there.
    """
    places = torch.arange(seq)
    ahead = places.unsqueeze(0) - places.unsqueeze(1)
    if both_ways:
        buckets //= 2
        offset, distance = (ahead > 0).long() * buckets, ahead.abs()
    else:
        offset, distance = torch.zeros_like(ahead), (-ahead).clamp(min=0)
    exact = buckets // 2
    growth = (distance.clamp(min=1) / exact).log() / math.log(MAX_DISTANCE / exact)
    far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    """What each head adds to its scores for the distance of query and key: [1, heads, seq, seq]."""

    buckets: Tensor

    def __init__(self, seq: int, heads: int, buckets: int, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.table = embedding(buckets, heads)
        self.register_buffer("buckets", distance_buckets(seq, buckets, not decoder), persistent=False)

    def forward(self) -> Tensor:
        bias: Tensor = self.table(self.buckets).permute(2, 0, 1).unsqueeze(0)
        if self.decoder:
            future = torch.ones_like(self.buckets, dtype=torch.bool).triu(1)
            bias = bias.masked_fill(future, -math.inf)
        return bias


class Attention(nn.Module):
    """Attention without biases in its projections and without scaling of its scores."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        # Scores are not divided by the square root of the head's width; the queries start smaller instead.
        nn.init.normal_(self.q.weight, std=width**-0.5 * (width // heads) ** -0.5)

    def split(self, x: Tensor) -> Tensor:
        """[batch, seq, width] to [batch, heads, seq, width of a head]."""
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(source)), self.split(self.v(source))
        dropout_p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=1.0)
        projected: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return projected


class Layer(nn.Module):
    """Self-attention, in a decoder attention to the encoder's output, and a ReLU feed-forward; pre-norm."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float, decoder: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, dropout)
        self.decoder = decoder
        if decoder:
            self.cross_norm = nn.RMSNorm(width, eps=1e-6)
            self.cross = Attention(width, heads, dropout)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor, source: Tensor | None) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.drop(self.attention(normed, normed, bias))
        if self.decoder:
            x = x + self.drop(self.cross(self.cross_norm(x), source, None))
        inner = self.drop(F.relu(self.up(self.norm(x))))
        y: Tensor = x + self.drop(self.down(inner))
        return y


class Stack(nn.Module):
    """The layers of the encoder or of the decoder, with the bias they share."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        ffn: int,
        seq: int,
        buckets: int,
        dropout: float,
        decoder: bool,
    ) -> None:
        super().__init__()
        self.bias = RelativeBias(seq, heads, buckets, decoder)
        self.layers = nn.ModuleList(Layer(width, heads, ffn, dropout, decoder) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        bias = self.bias()
        x = self.drop(x)
        for layer in self.layers:
            x = layer(x, bias, source)
        y: Tensor = self.drop(self.norm(x))
        return y


class T5(nn.Module):
    """The mean cross-entropy of the labels that count."""

    def __init__(self, vocab: int, width: int, tied: bool, encoder: Stack, decoder: Stack) -> None:
        super().__init__()
        self.words = embedding(vocab, width, std=1.0)
        self.encoder, self.decoder = encoder, decoder
        self.head = nn.Linear(width, vocab, bias=False)
        # A tied head reads an embedding of unit variance, so what it reads it with is made smaller.
        self.scale = width**-0.5 if tied else 1.0
        if tied:
            self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, labels: Tensor) -> Tensor:
        source = self.encoder(self.words(input_ids))
        x = self.decoder(self.words(decoder_input_ids), source)
        logits = self.head(x * self.scale)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def t5(
    *,
    batch: int = 8,
    layers: int = 6,
    width: int = 512,
    heads: int = 0,
    ffn: int = 0,
    seq: int = 0,
    target_seq: int = 0,
    vocab: int = 0,
    buckets: int = 32,
    dropout: float = 0.1,
    tied: bool = True,
) -> Built:
    """T5-small at the defaults: 60,506,624 parameters. `layers` counts those of the encoder alone."""
    heads, ffn = heads or heads_for(width, 64), ffn or 4 * width
    seq, vocab = seq or in_proportion(512, width, 512), vocab or in_proportion(32128, width, 512)
    target_seq = target_seq or in_proportion(128, width, 512)
    require_divides("heads", heads, "width", width)
    require_divides("4", 4, "buckets", buckets)
    require(
        buckets < 2 * MAX_DISTANCE,
        f"buckets={buckets} leaves no distances for the growing half to cover",
        f"choose buckets below {2 * MAX_DISTANCE}",
    )
    encoder, decoder = (
        Stack(
            layers=layers,
            width=width,
            heads=heads,
            ffn=ffn,
            seq=target_seq if decoder else seq,
            buckets=buckets,
            dropout=dropout,
            decoder=decoder,
        )
        for decoder in (False, True)
    )
    targets = random_tokens(batch, target_seq + 1, below=vocab, seed=1)
    # Targets end at different lengths; what follows their end does not count.
    ends = target_seq - torch.arange(batch).unsqueeze(1) % 3
    labels = targets[:, 1:].masked_fill(torch.arange(target_seq) >= ends.clamp(min=1), IGNORED)
    inputs = {
        "input_ids": random_tokens(batch, seq, below=vocab),
        "decoder_input_ids": targets[:, :-1].clone(),
        "labels": labels,
    }
    return T5(vocab, width, tied, encoder, decoder), inputs
