"""nanoGPT: the model returns (logits, loss), batches are drawn at random, gradients are accumulated and clipped, AdamW
decays matrices only, the learning rate is set by hand, and losses are estimated in evaluation."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lopsided
from scripts import CLUSTER

VOCAB, WIDTH, BLOCK, BATCH = 32, 16, 8, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (part.view(rows, length, 2, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h, self.ln_f = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        places = torch.arange(idx.shape[1], device=idx.device)
        x = self.ln_f(self.h(self.wte(idx) + self.wpe(places)))
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))

    def estimate_mfu(self, seconds: float) -> float:
        return 6 * sum(p.numel() for p in self.parameters()) * BATCH * BLOCK / seconds


def text(split: str) -> Tensor:
    return torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(len(split)))


def get_batch(split: str) -> tuple[Tensor, Tensor]:
    data = text(split)
    ix = torch.randint(len(data) - BLOCK, (BATCH,))
    return torch.stack([data[i : i + BLOCK] for i in ix]), torch.stack([data[i + 1 : i + 1 + BLOCK] for i in ix])


def get_lr(step: int) -> float:
    return 1e-2 * min((step + 1) / 5, 0.5 * (1 + math.cos(math.pi * step / 100)))


@torch.no_grad()
def estimate_loss(model: nn.Module) -> list[float]:
    model.eval()
    found = []
    for split in ("train", "val"):
        losses = torch.zeros(2)
        for k in range(2):
            x, y = get_batch(split)
            _logits, loss = model(x, y)
            losses[k] = loss.item()
        found.append(losses.mean().item())
    model.train()
    return found


def with_ddp(steps: int) -> list[float]:
    losses: list[float] = []
    gradient_accumulation_steps = 3 // dist.get_world_size()
    torch.manual_seed(1337 + dist.get_rank())
    model = GPT()
    optimizer = model.configure_optimizers()
    model = DDP(model)
    raw_model = model.module
    X, Y = get_batch("train")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        if step % 10 == 0:
            losses += estimate_loss(model)
        for micro_step in range(gradient_accumulation_steps):
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            _logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() * gradient_accumulation_steps)
        raw_model.estimate_mfu(1.0)
    return losses


def with_lopsided(steps: int) -> list[float]:
    losses: list[float] = []
    gradient_accumulation_steps = 3
    torch.manual_seed(1337)
    model = GPT()
    optimizer = model.configure_optimizers()
    X, Y = get_batch("train")
    model = lopsided.parallelize(model, (X, Y), cluster=CLUSTER)
    raw_model = model.module
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        if step % 10 == 0:
            losses += estimate_loss(model)
        for micro_step in range(gradient_accumulation_steps):
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            _logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() * gradient_accumulation_steps)
        raw_model.estimate_mfu(1.0)
    return losses
