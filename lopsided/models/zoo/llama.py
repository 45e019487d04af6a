"""Llama 3: rotary positions, grouped-query attention, RMS norms, gated feed-forward, an untied head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopsided.models.zoo.parts import (
    Built,
    embedding,
    heads_for,
    in_proportion,
    next_tokens,
    require,
    require_divides,
)

IGNORED = -100
"""The label of a token that does not count, as F.cross_entropy has it."""


def rotary(seq: int, size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angle of each position in each pair of channels: [seq, size] each."""
    rates = base ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(seq).unsqueeze(1) * rates
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel i and channel i + size/2 by their angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class GroupedAttention(nn.Module):
    """Causal attention in which `heads / kv_heads` queries share a key and a value."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, heads * self.size, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.out = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (project(x).view(batch, seq, -1, self.size).transpose(1, 2) for project in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, -1))
        return projected


class LlamaBlock(nn.Module):
    """A pre-norm layer with a SwiGLU."""

    def __init__(self, width: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = GroupedAttention(width, heads, kv_heads)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        normed = self.norm(x)
        y: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return y


class Llama(nn.Module):
    """The mean cross-entropy of the labels that count, each the token that follows its position."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        seq: int,
        vocab: int,
        rope_base: float,
    ) -> None:
        super().__init__()
        self.words = embedding(vocab, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)
        cos, sin = rotary(seq, width // heads, rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def llama(
    *,
    batch: int = 1,
    layers: int = 32,
    width: int = 4096,
    heads: int = 0,
    kv_heads: int = 0,
    ffn: int = 0,
    seq: int = 0,
    vocab: int = 0,
    rope_base: float = 500000.0,
) -> Built:
    """Llama-3-8B at the defaults: 8,030,261,248 parameters; `layers=80,width=8192` is the 70B.

    `kv_heads=0` means 8, or half the heads where there are no more than 8; `ffn=0` means 3.5 times the width.
    """
    heads = heads or heads_for(width, 128)
    kv_heads = kv_heads or (8 if heads > 8 and heads % 8 == 0 else max(heads // 2, 1))
    ffn = ffn or 7 * width // 2
    seq, vocab = seq or in_proportion(2048, width, 4096), vocab or in_proportion(128256, width, 4096)
    require_divides("heads", heads, "width", width)
    require_divides("kv_heads", kv_heads, "heads", heads)
    require(
        width // heads % 2 == 0,
        f"width/heads={width // heads} is odd, and rotary positions turn channels in pairs",
        "choose width as an even multiple of heads",
    )
    model = Llama(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        seq=seq,
        vocab=vocab,
        rope_base=rope_base,
    )
    input_ids, labels = next_tokens(batch, seq, vocab)
    # A prompt does not count, and prompts differ in length: unequal pieces of a batch then hold unequal
    # numbers of counted tokens, which a mean of means would get wrong.
    prompt = torch.arange(batch).unsqueeze(1) % 3 + 1
    labels = labels.masked_fill(torch.arange(seq) < prompt.clamp(max=seq - 1), IGNORED)
    return model, {"input_ids": input_ids, "labels": labels}
