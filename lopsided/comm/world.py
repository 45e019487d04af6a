"""Who is who: the processes of a training run, matched to the devices of its plan.

In: a `Plan`, and the environment that torchrun sets. Out: `World`; and the groups in which its processes talk.

    begin       join the other processes (or be alone) and choose this process's device
    share_plan  rank 0's plan, on every rank
    meet        match processes to devices
    check_same  refuse to go on where ranks disagree
    waiting     around every wait for other ranks: who is missing is named
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from lopsided.comm.backend_choice import BackendChoice, choose_backend, nccl_here
from lopsided.comm.rank_mapping import RankInfo, find_seats
from lopsided.comm.uncaught import tell_once
from lopsided.errors import LopsidedError, WorldError
from lopsided.planner.plan_data import Plan

TIMEOUT_S = 600.0
"""How long a process waits for the others, unless it is told otherwise."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class World:
    """The processes and the devices they are. `order` has of each of `ranks` which device of `plan.on` it is."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    order: tuple[int, ...]
    device: torch.device
    told: tuple[RankInfo, ...] = ()  # what every rank told of itself

    @property
    def takes_part(self) -> bool:
        return self.rank in self.ranks

    @property
    def place(self) -> int:
        """The rank in the group of those that take part; -1 for a bystander."""
        return self.ranks.index(self.rank) if self.takes_part else -1

    @property
    def backend(self) -> str:
        """What those that take part talk over."""
        return self.backend_choice.name

    @property
    def backend_choice(self) -> BackendChoice:
        return backend_among([one for one in self.told if one.rank in self.ranks])

    @property
    def backend_of_all(self) -> str:
        """The same, of all processes there are."""
        return backend_among(self.told).name


def backend_among(told: Sequence[RankInfo]) -> BackendChoice:
    # A chip's number is its own, whatever its host is called: two agents of torchrun may share one.
    chips = [(one.chip or f"{one.host} {one.device}") if one.is_gpu else "" for one in told]
    return choose_backend(chips, [one.nccl for one in told])


# Joining


def begin(device: torch.device | None = None, *, timeout_s: float | None = None) -> torch.device:
    """Join the other processes, if that was not done, and choose this process's device.

    The device is `device`, or what LOPSIDED_DEVICE says, or the GPU with this process's local rank, or the CPU.
    `timeout_s` is the patience of this process from now on; None leaves it as it is.
    """
    global _patience_s
    _patience_s = _patience_s if timeout_s is None else timeout_s
    device = device or _own_device()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda":
        # Collectives of Python objects over NCCL use the current device.
        torch.cuda.set_device(device)
    if dist.is_initialized():
        tell_once()
        return device
    timeout = timedelta(seconds=_patience_s)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)
        tell_once()
        return device
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    if missing:
        raise WorldError(
            f"{', '.join(missing)} is not set",
            where="environment of this process",
            do="start the script with torchrun, or set all of " + ", ".join(_NEEDED),
        )
    # Both, where there may be both: which is used among the devices is known when all have told what they are.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # The store of torchrun's agent outlives those that it started before, and has the addresses they had.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            backend, store=PrefixStore(f"attempt/{attempt}", store), rank=rank, world_size=size, timeout=timeout
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise WorldError(
            f"rank {os.environ['RANK']} could not join the other processes, {os.environ['WORLD_SIZE']} in all: "
            f"{_first_line(error)}",
            where=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            do="see that all were started, with the same address and port, and look for the first that failed",
        ) from error
    # After torch's own hook, which puts the rank before every line.
    tell_once()
    return device


def _own_device() -> torch.device:
    named = os.environ.get("LOPSIDED_DEVICE", "")
    if named:
        return _named_device(named)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, gpus = _local_rank(), torch.cuda.device_count()
    if local >= gpus:
        raise WorldError(
            f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()} has local rank {local}, "
            f"and there {'is' if gpus == 1 else 'are'} {gpus} GPU{'' if gpus == 1 else 's'}",
            where="LOCAL_RANK",
            do=f"start {gpus} on this host (torchrun --nproc-per-node {gpus}); LOPSIDED_DEVICE=cuda:0 or =cpu chooses "
            "a device whatever the local rank is",
        )
    return torch.device("cuda", local)


def _named_device(named: str) -> torch.device:
    gpus = torch.cuda.device_count()
    there = {f"cuda:{k}": torch.device("cuda", k) for k in range(gpus)} | {"cpu": torch.device("cpu")}
    if named not in there:
        raise WorldError(
            f"there is no device {named!r} on {socket.gethostname()}, which has {gpus} GPUs",
            where="LOPSIDED_DEVICE",
            do=f"choose from {', '.join(there)}",
        )
    return there[named]


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK") or 0)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


# Waiting

_patience_s = TIMEOUT_S


def patience_s() -> float:
    """How long this process waits for the others, as it was told last."""
    return _patience_s


class Watches(Protocol):
    """Knows what the other ranks do (`lopsided.comm.watchdog`)."""

    def entering(self, what: str) -> None: ...
    def left(self) -> None: ...
    def explain(self, error: BaseException, what: str) -> LopsidedError: ...
    def working(self, what: str) -> AbstractContextManager[None]: ...


_watches: list[Watches] = []  # of this process, the latest last


def watched_by(watch: Watches) -> None:
    _watches.append(watch)


def no_longer_watched_by(watch: Watches) -> None:
    if watch in _watches:
        _watches.remove(watch)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """In here this rank waits for others: they can see it, and what fails names who is missing."""
    watch = _watches[-1] if _watches else None
    if watch is None:
        yield
        return
    watch.entering(what)
    try:
        yield
    except RuntimeError as error:
        raise watch.explain(error, what) from error
    finally:
        watch.left()


def working(what: str) -> AbstractContextManager[None]:
    """In here, amid a wait, this rank is what others may wait for: they are told what it does."""
    return _watches[-1].working(what) if _watches else nullcontext()


# Talking before there is a plan


def group_to_talk() -> dist.ProcessGroup:
    """All ranks, for CPU tensors, with this process's patience: beside the default group, which may have another
    one, and may be NCCL alone."""
    if dist.group.WORLD is None:
        raise WorldError("this process has not joined the others", where="torch.distributed", do="call begin() first")
    return lasting_group("talk", range(dist.get_world_size()), "gloo", _patience_s)


def share_plan(
    plan_text: str | None, trouble: str = "", *, group: dist.ProcessGroup | None = None, source: int = 0
) -> str:
    """The text of rank `source`, on every rank of a group (of all, unless given). If it has `trouble` instead, every
    rank refuses to go on and says so."""
    group = group or group_to_talk()
    data = (trouble or plan_text or "").encode() if dist.get_rank() == source else b""
    size = torch.tensor([-len(data) if trouble or not plan_text else len(data)])
    with waiting(f"rank {source}'s word"):
        dist.broadcast(size, source, group=group)
        length = int(size.item())
        # A copy: the bytes of a Python string cannot be written to. At least one, for there is no buffer of none.
        buffer = torch.frombuffer(bytearray(data or bytes(abs(length) or 1)), dtype=torch.uint8)
        dist.broadcast(buffer, source, group=group)
    text = buffer[: abs(length)].numpy().tobytes().decode()
    if length <= 0:
        raise WorldError(
            f"rank {source} has no plan{f': {text}' if text else ''}",
            where=f"planning, on rank {source}",
            do=f"see what rank {source} says",
        )
    return text


def tell(device: torch.device) -> tuple[RankInfo, ...]:
    """What every rank tells of itself. All ranks call it."""
    hardware, memory, chip = "cpu", 0, ""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        hardware, memory, chip = torch.cuda.get_device_name(device), facts.total_memory, str(getattr(facts, "uuid", ""))
    who = (dist.get_rank(), socket.gethostname(), _local_rank(), str(device))
    mine = RankInfo(*who, hardware, memory, chip, nccl_here())
    heard: list[tuple[str, RankInfo]] = [("", mine)] * dist.get_world_size()
    with waiting("what every rank tells of itself"):
        dist.all_gather_object(heard, (os.environ.get("GROUP_RANK", ""), mine), group=group_to_talk())
    # Two agents of torchrun on one machine are two nodes.
    agents = Counter(host for _, host in {(agent, one.host) for agent, one in heard})
    return tuple(
        replace(one, host=f"{one.host}#{agent}") if agents[one.host] > 1 else one
        for agent, one in sorted(heard, key=lambda pair: pair[1].rank)
    )


# With a plan


def meet(plan: Plan, *, device: torch.device | None = None, timeout_s: float | None = None) -> World:
    """Match the processes to the devices of the plan. All ranks call it, with the same plan."""
    device = begin(device, timeout_s=timeout_s)
    told = tell(device)
    seats = find_seats(told, plan.cluster, plan.on)
    return World(dist.get_rank(), dist.get_world_size(), seats.ranks, seats.order, device, told)


def check_same(world: World, facts: Mapping[str, str]) -> None:
    """Refuse, on every rank, facts that are not the same on all. All ranks call it."""
    mine = dict(facts)
    heard: list[dict[str, str]] = [mine] * world.size
    with waiting("what all must have the same"):
        dist.all_gather_object(heard, mine, group=group_to_talk())
    if found := odd_ones(dict(enumerate(heard))):
        raise WorldError(
            f"ranks disagree: {found}",
            where=f"rank {world.rank}",
            do="start every rank with the same script, arguments, plan and versions",
        )


def odd_ones(heard: Mapping[int, Mapping[str, str]]) -> str:
    """Which ranks say otherwise than most (of as many, than the first); "" if none does.

    >>> odd_ones({0: {"step": "12"}, 1: {"step": "11"}, 2: {"step": "12"}})
    'step is 11 on rank 1, 12 on ranks 0, 2'
    """
    found = []
    for name in dict.fromkeys(name for one in heard.values() for name in one):
        ranks: dict[str, list[int]] = {}
        for rank, one in heard.items():
            ranks.setdefault(one.get(name, "not given"), []).append(rank)
        usual = max(ranks, key=lambda value: len(ranks[value]))
        others = these(ranks[usual]) if len(ranks[usual]) <= 4 else "the others"
        odd = [f"{value} on {these(who)}" for value, who in ranks.items() if value != usual]
        found += [f"{name} is {', '.join(odd)}, {usual} on {others}"] if odd else []
    return "; ".join(found)


def these(ranks: Sequence[int]) -> str:
    """Ranks in a sentence.

    >>> these([1]), these([1, 2])
    ('rank 1', 'ranks 1, 2')
    """
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def group_of(world: World, timeout_s: float = TIMEOUT_S) -> dist.ProcessGroup | None:
    """The group of those that take part; None for a bystander. All ranks call it."""
    group = lasting_group("work", world.ranks, world.backend, timeout_s)
    return group if world.takes_part else None


def side_group(world: World, timeout_s: float = TIMEOUT_S) -> dist.ProcessGroup | None:
    """The same ranks on the CPU, for handshakes beside the work; None for a bystander. All ranks call it."""
    group = lasting_group("side", world.ranks, "gloo", timeout_s)
    return group if world.takes_part else None


def lasting_group(use: str, ranks: Sequence[int], backend: str, timeout_s: float) -> dist.ProcessGroup:
    """A group for one use, made once and kept: its threads stay as long as the process. All ranks call it."""
    global _lasting
    default = dist.group.WORLD
    if _lasting is None or _lasting[0] is not default:
        _lasting = (default, {})
    key = (use, tuple(ranks), backend, timeout_s)
    if key not in _lasting[1]:
        with waiting(f"the group for {use}"):
            _lasting[1][key] = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend)
    return _lasting[1][key]


_lasting: tuple[object, dict[object, dist.ProcessGroup]] | None = None  # the default group, and groups beside it


def default_store() -> Store:
    """The store through which the processes found each other."""
    return distributed_c10d._get_default_store()
