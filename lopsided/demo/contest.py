"""What happens in each worker: it measures itself, enters the contest, and runs round after round.

In: jobs of the parent, one after the other. Out: the measured cluster; of each round, seconds and losses (`Round`).

All contestants live in the same processes, begin with the same weights and step through the same global batches. Each
writes its loop the way its users do: `DistributedDataParallel` on this worker's rows, its loss weighted by them so that
the averaged gradient is that of the global mean; `lopsided.parallelize` and `lopsided.shard`; the plain model.

They train on `text.txt`, a story written for it, one token a letter (`Windows`): the same samples in the same order for
everyone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster
from lopsided.comm.backend_choice import choose_backend, nccl_here
from lopsided.ir.placement import start_of
from lopsided.models.by_name import load
from lopsided.profiling.measure import measure
from lopsided.profiling.noise import wait_for
from lopsided.runtime.calls.batches import shard
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parallelizing import parallelize

EQUAL, BY_SPEED, LOPSIDED, ALONE = "ddp-equal", "ddp-by-speed", "lopsided", "alone"

_SEED = 0
_LEARNING_RATE = 3e-4


@dataclass(frozen=True, slots=True)
class Size:
    """The model and its global batch."""

    layers: int
    width: int
    heads: int
    seq: int
    batch: int

    @property
    def spec(self) -> str:
        # Dropout would draw other numbers on other devices, and losses could not be compared digit by digit.
        return (
            f"gpt2:layers={self.layers},width={self.width},heads={self.heads},seq={self.seq},"
            f"vocab={len(letters())},dropout=0,batch={self.batch}"
        )


def build(size: Size) -> tuple[nn.Module, object]:
    """The model, the same everywhere, and a batch for its shapes."""
    torch.manual_seed(_SEED)
    return load(size.spec)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a worker in one round. `waited_s` is how long it stood for others or for what was on its way."""

    total_s: float
    optimizer_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker has to do with the plan."""

    takes_part: bool
    share: float  # its part of the work


@dataclass(frozen=True, slots=True)
class Round:
    """What this worker spent on each contestant, and the losses of the steps (the global ones)."""

    spent: dict[str, Spent]
    losses: dict[str, list[float]]


class Contestant(Protocol):
    """Trains a step at a time."""

    def step(self) -> tuple[Tensor, float, float]:
        """What this worker adds to the global loss, seconds in the optimizer, and seconds it stood waiting."""
        ...


class _Alone:
    """The first worker, with everything, as if there were no others. These have no rows."""

    def __init__(self, size: Size, steps: int, device: torch.device) -> None:
        self.model = build(size)[0].to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE)
        self.batches = _batches(DataLoader(Windows(steps * size.batch, size.seq), size.batch))
        self.device = device

    def step(self) -> tuple[Tensor, float, float]:
        batch = {name: tensor.to(self.device) for name, tensor in next(self.batches).items()}
        loss: Tensor = self.model(**batch)
        loss.backward()
        return loss.detach(), _update(self.optimizer), 0.0


class _Ddp:
    """DistributedDataParallel, each worker with its rows of the global batch."""

    def __init__(
        self, size: Size, steps: int, device: torch.device, rows: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        rank = dist.get_rank()
        self.part = rows[rank] / size.batch
        model = build(size)[0].to(device)
        self.model = DistributedDataParallel(model, process_group=group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE)
        first = start_of(rows, rank)
        own = [list(range(k * size.batch + first, k * size.batch + first + rows[rank])) for k in range(steps)]
        self.batches = _batches(DataLoader(Windows(steps * size.batch, size.seq), batch_sampler=own))
        self.device, self.computed = device, 0.0
        # Their gradients come last: what is left of the backward pass after that is waiting for the buckets.
        for last in ("words.weight", "positions.weight"):
            model.get_parameter(last).register_post_accumulate_grad_hook(self._note)

    def _note(self, _: Tensor) -> None:
        self.computed = time.perf_counter()

    def step(self) -> tuple[Tensor, float, float]:
        batch = {name: tensor.to(self.device) for name, tensor in next(self.batches).items()}
        loss: Tensor = self.model(**batch) * self.part
        # Gradients are averaged over workers, and their sum is wanted.
        (loss * dist.get_world_size()).backward()
        waited_s = time.perf_counter() - self.computed
        return loss.detach(), _update(self.optimizer), waited_s


class _Lopsided:
    """The model by the plan. Its loss is the global one already."""

    def __init__(self, size: Size, steps: int, device: torch.device, plan: str) -> None:
        model, batch = build(size)
        self.model: Parallel = parallelize(model, batch, plan, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE)
        self.batches = _batches(shard(DataLoader(Windows(steps * size.batch, size.seq), size.batch), self.model))
        self.device = device

    def step(self) -> tuple[Tensor, float, float]:
        before_s = self._waited_s
        loss = self.model(**next(self.batches))
        loss.backward()
        own = loss.detach() if dist.get_rank() == 0 else torch.zeros_like(loss)
        return own, _update(self.optimizer), self._waited_s - before_s

    @property
    def _waited_s(self) -> float:
        return self.model.communicator.waited_s if self.model.communicator else 0.0


def _batches(loader: object) -> Iterator[dict[str, Tensor]]:
    return iter(loader)  # type: ignore[call-overload,no-any-return]


def _update(optimizer: torch.optim.Optimizer) -> float:
    """Let the optimizer step; its seconds."""
    started = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - started


# Jobs of the parent

_here: dict[str, Contestant] = {}  # the contestants in this worker, between jobs


def take_measure(size: Size, devices: tuple[str, ...], budget_s: float) -> Cluster:
    """What the workers are, measured by all at once."""
    device = _own(devices)
    return measure(capture(*build(size)), device, _group(devices), budget_s=budget_s)


def enter(size: Size, devices: tuple[str, ...], steps: int, rows: dict[str, Sequence[int]], plan: str) -> Part:
    """Set up all contestants for so many steps."""
    device = _own(devices)
    group = _group(devices)
    if dist.get_rank() == 0:
        _here[ALONE] = _Alone(size, steps, device)
    for name, cut in rows.items():
        _here[name] = _Ddp(size, steps, device, cut, group)
    _here[LOPSIDED] = entered = _Lopsided(size, steps, device, plan)
    world = entered.model.world
    return Part(world.takes_part, entered.model.shares.work[world.place] if world.takes_part else 0.0)


def run_round(order: Sequence[str], devices: tuple[str, ...], steps: int) -> Round:
    """So many steps of each, one contestant after the other."""
    device = _own(devices)
    spent: dict[str, Spent] = {}
    losses: dict[str, list[float]] = {}
    for name in order:
        told: list[Tensor] = []
        optimizer_s = waited_s = 0.0
        dist.barrier()
        started = time.perf_counter()
        if (contestant := _here.get(name)) is not None:
            for _ in range(steps):
                loss, updating_s, standing_s = contestant.step()
                told.append(loss)
                optimizer_s += updating_s
                waited_s += standing_s
            wait_for(device)
        spent[name] = Spent(time.perf_counter() - started, optimizer_s, waited_s)
        dist.barrier()
        # Added up when nobody's clock is running.
        total = torch.stack(told).cpu() if told else torch.zeros(steps)
        dist.all_reduce(total)
        losses[name] = total.tolist()
    return Round(spent, losses)


def leave() -> None:
    """Let the contestants go."""
    _here.clear()


def _own(devices: tuple[str, ...]) -> torch.device:
    device = torch.device(devices[dist.get_rank()])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


_groups: dict[tuple[str, ...], dist.ProcessGroup] = {}


def backend_on(devices: Sequence[str]) -> str:
    """What workers on these devices of this machine, which all have what this process has, talk over."""
    chips = [device if device.startswith("cuda") else "" for device in devices]
    return choose_backend(chips, [nccl_here()] * len(chips)).name


def _group(devices: tuple[str, ...]) -> dist.ProcessGroup | None:
    """A group of NCCL's, where that is what they talk over; else the group there is, which is gloo."""
    if backend_on(devices) != "nccl":
        return None
    if devices not in _groups:
        _groups[devices] = dist.new_group(backend="nccl")
    return _groups[devices]


_STORY_SEED = 0


@cache
def story() -> str:
    return (Path(__file__).parent / "text.txt").read_text(encoding="ascii")


@cache
def letters() -> str:
    """Every letter that occurs, in the order of their tokens."""
    return "".join(sorted(set(story())))


@cache
def _tokens() -> Tensor:
    token = {letter: k for k, letter in enumerate(letters())}
    return torch.tensor([token[letter] for letter in story()])


class Windows(Dataset[dict[str, Tensor]]):
    """Stretches of the story that begin anywhere, each with the letters that follow."""

    def __init__(self, samples: int, length: int) -> None:
        self.length = length
        dice = torch.Generator().manual_seed(_STORY_SEED)
        self._starts = torch.randint(len(story()) - length, (samples,), generator=dice).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        start, tokens = self._starts[number], _tokens()
        return {
            "input_ids": tokens[start : start + self.length],
            "labels": tokens[start + 1 : start + self.length + 1],
        }
