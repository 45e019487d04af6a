"""A small network with a bit of everything, on one device and on three processes."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.ir.placement import Shares
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.runtime.parallel import Parallel
from tests.support.jobs import plan_of, prices_of

HERE = torch.device(os.environ.get("LOPSIDED_DEVICE", "cpu"))  # cuda:0 runs all of this on a GPU that is shared
THREE = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))
NONE_FOR_ONE = Shares((0.6, 0.0, 0.4), named=(("state", (0.3, 0.3, 0.4)),))


class Net(nn.Module):
    """A bit of everything: an embedding tied to the output, norm, dropout, a frozen layer, a buffer that changes."""

    def __init__(self, drop: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(13, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.bn = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(drop)
        self.out = nn.Linear(8, 13, bias=False)
        self.out.weight = self.embed.weight

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        x = self.bn((x + self.frozen(x)).mean(1))
        return F.cross_entropy(self.out(x), target)


def batch_of(seed: int = 0, rows: int = 10) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(0, 13, (rows, 4), generator=draw).to(HERE),
        "target": torch.randint(0, 13, (rows,), generator=draw).to(HERE),
    }


def net(dtype: torch.dtype = torch.float64, **how: object) -> Net:
    # In float64: Adam makes steps of full size of a gradient that is nothing but rounding.
    torch.manual_seed(0)
    return Net(**how).to(HERE, dtype)  # type: ignore[arg-type]


def planned(model: nn.Module, kind: str = "dp", shares: Shares = THREE, batch: object = None) -> Plan:
    book = derive_rules(capture(model, batch_of() if batch is None else batch))
    program = data_parallel(book, prices_of(book.graph, shares))
    if kind != "dp":
        program = stored_cut(program)
    return plan_of(program, shares, regather=kind == "zero-again")


def both(kind: str = "dp", shares: Shares = THREE, *, bucket_bytes: int = 800, **how: object) -> tuple[Net, Parallel]:
    """The model on one device, and the same on all; with small buckets, so that there are several."""
    alone, model = net(**how), net(**how)
    plan = planned(model, kind, shares)
    return alone, lopsided.parallelize(model, batch_of(), plan=plan, bucket_bytes=bucket_bytes)


def gap(pm: Parallel, alone: nn.Module, *, gradients: bool = True) -> float:
    """How far this rank's gradients (or parameters) are from its part of one device's."""
    worst = 0.0
    whole = dict(alone.named_parameters())
    for name, parameter in pm.named_parameters():
        mine = parameter.grad if gradients else parameter.detach()
        theirs = whole[name].grad if gradients else whole[name].detach()
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            part = pm.pieces[name].take(theirs)
            worst = max(worst, (mine - part).abs().max().item() if part.numel() else 0.0)
    return worst


KINDS = ("dp", "zero", "zero-again")


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.randn(9, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(x @ self.a) @ self.b).square().mean()


def named(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    tokens, target = zip(*rows, strict=True)
    return {"tokens": torch.stack(tokens), "target": torch.stack(target)}
