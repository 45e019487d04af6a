"""GPT-2: learned positions, pre-norm, one projection for queries, keys and values, a tied head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopsided.models.zoo.parts import Built, embedding, heads_for, in_proportion, next_tokens, require_divides


class CausalAttention(nn.Module):
    """Every token looks at itself and at those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1))
        dropout_p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, width))
        return projected


class GPT2Block(nn.Module):
    """A pre-norm layer: attention, then two linear layers with a tanh GELU between them."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, ffn)
        self.down = nn.Linear(ffn, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        inner = F.gelu(self.up(self.norm(x)), approximate="tanh")
        y: Tensor = x + self.drop(self.down(inner))
        return y


class GPT2(nn.Module):
    """The mean cross-entropy of `labels`, which hold at each position the token that follows."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        ffn: int,
        seq: int,
        vocab: int,
        dropout: float,
        tied: bool,
    ) -> None:
        super().__init__()
        self.words = embedding(vocab, width)
        self.positions = embedding(seq, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(GPT2Block(width, heads, ffn, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.drop(self.words(input_ids) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt2(
    *,
    batch: int = 8,
    layers: int = 12,
    width: int = 768,
    heads: int = 0,
    ffn: int = 0,
    seq: int = 0,
    vocab: int = 0,
    dropout: float = 0.1,
    tied: bool = True,
) -> Built:
    """GPT-2 small with a padded vocabulary: 124,475,904 parameters at the defaults."""
    heads, ffn = heads or heads_for(width, 64), ffn or 4 * width
    seq, vocab = seq or in_proportion(1024, width, 768), vocab or in_proportion(50304, width, 768)
    require_divides("heads", heads, "width", width)
    model = GPT2(
        layers=layers,
        width=width,
        heads=heads,
        ffn=ffn,
        seq=seq,
        vocab=vocab,
        dropout=dropout,
        tied=tied,
    )
    input_ids, labels = next_tokens(batch, seq, vocab)
    return model, {"input_ids": input_ids, "labels": labels}
