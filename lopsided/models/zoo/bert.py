"""The encoder of HAP's public benchmarks, as a language model, plain and with mixtures of experts.

HAP (Zhang et al., "HAP: SPMD DNN Training on Heterogeneous GPU Clusters with Automated Program Synthesis",
EuroSys 2024) trains post-norm ReLU encoders with fixed positions, a causal mask and an untied head, and sums
the loss: the sum over pieces of a batch is then the loss of the batch, however unequal the pieces.
"""

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
    next_tokens,
    require,
    require_divides,
)


class SelfAttention(nn.Module):
    """Every token looks at every token or, if `causal`, at none that follows it; one projection for all."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1))
        dropout_p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=self.causal)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, width))
        return projected


class FeedForward(nn.Module):
    """Two linear layers with a ReLU and a dropout between them."""

    def __init__(self, width: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, ffn)
        self.down = nn.Linear(ffn, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(F.relu(self.up(x))))
        return y


class MixtureOfExperts(nn.Module):
    """Each token goes to the two experts its gate likes best, through einsums of fixed shape.

    The letters: b batch, s sequence, d width, e expert, c place in an expert's queue, h inner width. A queue
    has `capacity` places per sequence. First choices take places before second choices, earlier tokens before
    later ones; a token that finds its queue full is dropped there, and only the residual carries it on.
    """

    def __init__(self, width: int, ffn: int, experts: int, seq: int, dropout: float) -> None:
        super().__init__()
        self.experts = experts
        self.capacity = math.ceil(seq / experts * 1.25) * 2
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, ffn))
        self.down = nn.Parameter(torch.empty(experts, ffn, width))
        self.drop = nn.Dropout(dropout)
        nn.init.normal_(self.up, std=width**-0.5)
        nn.init.normal_(self.down, std=ffn**-0.5)

    def route(self, x: Tensor) -> Tensor:
        """The weight with which token s fills place c of expert e: [b, s, e, c], zero where not sent."""
        probabilities = self.gate(x).softmax(dim=-1)
        best, chosen = probabilities.topk(2, dim=-1)
        weights = best / best.sum(dim=-1, keepdim=True)
        first, second = (F.one_hot(choice, self.experts) for choice in chosen.unbind(dim=-1))
        before_first = first.cumsum(dim=1) - first
        before_second = second.cumsum(dim=1) - second + first.sum(dim=1, keepdim=True)
        combine = torch.zeros((), dtype=x.dtype, device=x.device)
        for weight, sent, before in zip(
            weights.unbind(dim=-1), (first, second), (before_first, before_second), strict=True
        ):
            kept = sent * (before < self.capacity)
            # A dropped token has no place; it is given place 0 with weight 0, so that one_hot stays in range.
            place = F.one_hot((before * kept).sum(dim=-1), self.capacity)
            share = weight.unsqueeze(-1) * kept
            combine = combine + share.unsqueeze(-1) * place.unsqueeze(-2)
        return combine

    def forward(self, x: Tensor) -> Tensor:
        combine = self.route(x)
        dispatch = (combine > 0).to(x.dtype)
        queued = torch.einsum("bsd,bsec->becd", x, dispatch)
        inner = self.drop(F.relu(torch.einsum("edh,becd->bech", self.up, queued)))
        answers = torch.einsum("ehd,bech->becd", self.down, inner)
        return torch.einsum("becd,bsec->bsd", answers, combine)


class EncoderLayer(nn.Module):
    """Attention and a feed-forward part, each followed by residual and norm."""

    def __init__(self, width: int, heads: int, dropout: float, feed_forward: nn.Module, causal: bool = False) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, dropout, causal)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.drop(self.attention(x)))
        y: Tensor = self.norm(x + self.drop(self.feed_forward(x)))
        return y


def sinusoids(seq: int, width: int) -> Tensor:
    """Fixed positions: sines in the even columns, cosines in the odd ones."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = torch.arange(seq).unsqueeze(1) * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :width]


class Bert(nn.Module):
    """Embedding, encoder layers, an untied head with bias; the summed cross-entropy of the labels."""

    positions: Tensor

    def __init__(self, vocab: int, seq: int, width: int, layers: list[EncoderLayer]) -> None:
        super().__init__()
        self.words = embedding(vocab, width)
        self.register_buffer("positions", sinusoids(seq, width))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids) * math.sqrt(self.words.embedding_dim) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def bert(
    *,
    batch: int = 32,
    layers: int = 12,
    width: int = 768,
    heads: int = 0,
    ffn: int = 0,
    seq: int = 128,
    vocab: int = 0,
    dropout: float = 0.1,
) -> Built:
    """HAP's BERT: 136,205,824 parameters at the defaults."""
    heads, ffn = heads or heads_for(width, 64), ffn or 4 * width
    vocab = vocab or in_proportion(33280, width, 768)
    require_divides("heads", heads, "width", width)
    blocks = [EncoderLayer(width, heads, dropout, FeedForward(width, ffn, dropout), causal=True) for _ in range(layers)]
    input_ids, labels = next_tokens(batch, seq, vocab)
    return Bert(vocab, seq, width, blocks), {"input_ids": input_ids, "labels": labels}


def bert_moe(
    *,
    batch: int = 32,
    layers: int = 12,
    width: int = 768,
    heads: int = 0,
    ffn: int = 0,
    seq: int = 128,
    vocab: int = 0,
    dropout: float = 0.1,
    experts: int = 16,
) -> Built:
    """HAP's BERT-MoE, every second layer a mixture: 560,929,792 parameters at the defaults."""
    heads, ffn = heads or heads_for(width, 64), ffn or 4 * width
    vocab = vocab or in_proportion(33280, width, 768)
    require_divides("heads", heads, "width", width)
    require(experts >= 2, f"experts={experts}, but each token goes to two", "choose experts=2 or more")
    blocks = [
        EncoderLayer(
            width,
            heads,
            dropout,
            MixtureOfExperts(width, ffn, experts, seq, dropout) if i % 2 else FeedForward(width, ffn, dropout),
            causal=True,
        )
        for i in range(layers)
    ]
    input_ids, labels = next_tokens(batch, seq, vocab)
    return Bert(vocab, seq, width, blocks), {"input_ids": input_ids, "labels": labels}
