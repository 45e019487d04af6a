"""A module of local pieces, cut by hand: what the tests of state and checkpoints use in the place of a planned one."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lopsided.comm.world import World
from lopsided.executor.randomness import RankRandomness
from lopsided.ir.placement import I, Placement, S, Shares, pieces_of
from lopsided.runtime.parameters.pieces import Piece

# How a cluster is cut. A share of 0 holds nothing of what is cut; a rank without a share is a bystander.
FOUR = (0.5, 0.3, 0.0, 0.2)
TWO = (0.25, 0.75)
THREE = (0.1, 0.6, 0.3)
PLACEMENTS = {"embed.weight": S(0), "qkv.weight": S(0, outer=3, unit=64), "out.weight": S(1), "norm.weight": I}


class Model(nn.Module):
    """Rows, blocks of heads, columns, a whole one, a frozen one, one that no plan knows, a tied one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.qkv = nn.Linear(2, 3 * 4 * 64, bias=False)
        self.out = nn.Linear(8, 3, bias=False)
        self.norm = nn.LayerNorm(5, bias=False)
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(2))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor([3, 4]))
        self.register_buffer("cache", torch.rand(2), persistent=False)


def whole_model(seed: int = 1) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model()


class _Gathered:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_gather(self, piece: Tensor, counts: Sequence[int], *, what: str = "") -> SimpleNamespace:
        parts: list[Tensor] = [piece] * len(counts)
        dist.all_gather_object(parts, piece, group=self.group)
        return SimpleNamespace(wait=lambda: torch.cat(parts))


class ByHand(nn.Module):
    """A model cut by shares, on the ranks that take part."""

    def __init__(self, shares: tuple[float, ...], *, ranks: tuple[int, ...] | None = None, seed: int = 1) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        ranks = tuple(range(len(shares))) if ranks is None else ranks
        self.world = World(rank, size, ranks, tuple(range(len(ranks))), torch.device("cpu"))
        self.shares = Shares(shares)
        self.plan = SimpleNamespace(
            shares=self.shares, program="by hand", graph=SimpleNamespace(fingerprint="0123456789abcdef")
        )
        group = dist.new_group(list(ranks))
        self.communicator = _Gathered(group) if self.world.takes_part else None
        self.randomness = RankRandomness(7, max(self.world.place, 0), self.world.device)
        self.steps_done = 0
        self.looked = 0
        model = whole_model(seed)
        self.pieces = {name: self._piece(name, p) for name, p in model.named_parameters() if name != "unused"}
        for name, piece in self.pieces.items():
            for each in (name, *piece.also):
                owner, _, last = each.rpartition(".")
                if each == name:
                    local = piece.take(model.get_parameter(name).detach()).clone()
                    parameter = nn.Parameter(local, requires_grad=piece.trained)
                setattr(model.get_submodule(owner), last, parameter)
        self._modules.update(model._modules)
        self._parameters.update(model._parameters)
        self._buffers.update(model._buffers)
        self._non_persistent_buffers_set |= model._non_persistent_buffers_set

    def _piece(self, name: str, parameter: nn.Parameter) -> Piece:
        placement: Placement = PLACEMENTS.get(name, I)
        shape = tuple(parameter.shape)
        counts = pieces_of(placement, shape, self.shares) if placement.is_shard else ()
        also = ("head.weight",) if name == "embed.weight" else ()
        return Piece(name, also, shape, parameter.dtype, placement, counts, self.world.place, parameter.requires_grad)

    def together(self, call: str) -> None:
        """Nobody watches over these processes."""

    def before_saving(self) -> None:
        self.looked += 1


def gradient(name: str, shape: Sequence[int], step: int) -> Tensor:
    """What the gradient of a whole parameter is in a step."""
    made = torch.Generator().manual_seed(step * 1000 + len(name))
    return torch.rand(tuple(shape), generator=made) - 0.5


def train(pm: ByHand, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for name, piece in pm.pieces.items():
            if piece.trained:
                pm.get_parameter(name).grad = piece.take(gradient(name, piece.shape, pm.steps_done)).clone()
        optimizer.step()
        pm.steps_done += 1


def trained_whole(steps: int) -> dict[str, Tensor]:
    """The same on one device."""
    model = whole_model()
    optimizer = make_optimizer(model)
    for step in range(steps):
        for name, p in model.named_parameters():
            if p.requires_grad and name != "unused":
                p.grad = gradient(name, p.shape, step)
        optimizer.step()
    return {key: value.detach() for key, value in model.state_dict().items()}


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Two groups, chosen by name."""
    named = dict(model.named_parameters())
    norms = [p for name, p in named.items() if "norm" in name]
    others = [p for name, p in named.items() if "norm" not in name and p.requires_grad]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, amsgrad=True)
