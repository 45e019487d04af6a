"""The demonstration as a whole: find workers of honestly unequal speed, measure, plan, race, compare.

In: whether to be quick. Out: `Outcome`, plain data for the command line to print. The order of contestants is shuffled
anew in every round, so that what else the machine does meets all of them; times are medians over rounds.

Without a GPU one worker has a core to itself and two share another, so that they are about half as fast: nobody is
slowed down on purpose, and no rights are needed (`find_setting`).
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lopsided.cluster.cluster import Cluster
from lopsided.comm.worker_pool import WorkerPool
from lopsided.demo.contest import (
    ALONE,
    BY_SPEED,
    EQUAL,
    LOPSIDED,
    Part,
    Round,
    Size,
    Spent,
    backend_on,
    build,
    enter,
    leave,
    run_round,
    take_measure,
)
from lopsided.ir.placement import Shares
from lopsided.planner.baselines import STATE
from lopsided.planner.candidates import speed_dtype
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import save_plan
from lopsided.planner.planner import plan

SAME = 1e-4
"""Losses that differ by no more than this part are the same training: the order of sums in float32 differs."""

CONTESTANTS = (ALONE, EQUAL, BY_SPEED, LOPSIDED)
_PREDICTED_AS = {ALONE: "single", EQUAL: "dp-ev", BY_SPEED: "dp-cp"}
_QUICK_SIZE = Size(layers=2, width=128, heads=4, seq=32, batch=12)
_PATIENCE_S = 300.0

Say = Callable[[str, str], object]  # what is going on, and how far it is


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is done: seconds of measuring, rounds of so many steps, and seconds after which no round begins."""

    measure_s: float
    rounds: int
    steps: int
    most_s: float


_FULL = Pace(measure_s=10.0, rounds=12, steps=3, most_s=75.0)
_QUICK = Pace(measure_s=2.0, rounds=4, steps=2, most_s=30.0)


@dataclass(frozen=True, slots=True)
class Busy:
    """Where a worker's step goes, in seconds. `communication_s` is for how long even who stands least stands."""

    compute_s: float
    optimizer_s: float
    communication_s: float
    waiting_s: float


@dataclass(frozen=True, slots=True)
class RaceEntry:
    """What became of a contestant. `workers` and `shares` have an entry for each that takes part in it, else None."""

    name: str
    predicted_s: float
    rounds_s: tuple[float, ...]  # a step, in each round that counts
    shares: tuple[float | None, ...]
    workers: tuple[Busy | None, ...]
    losses: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        return statistics.median(self.rounds_s)

    def faster_than(self, other: RaceEntry) -> float:
        """Round by round, since what disturbs one disturbs its neighbours."""
        pairs = zip(other.rounds_s, self.rounds_s, strict=True)
        return statistics.median(theirs / mine for theirs, mine in pairs)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All there is to tell."""

    setting: Setting
    cluster: Cluster
    plan: Plan
    parameters: int
    stored: tuple[tuple[str, float], ...]  # "whole", "cut", "gathered": parts of all parameters
    entries: tuple[RaceEntry, ...]
    steps: int
    seconds: float

    def __getitem__(self, name: str) -> RaceEntry:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def loss_difference(self) -> float:
        """Between one worker alone and Lopsided, the largest of all steps, as a part of the loss."""
        pairs = zip(self[ALONE].losses, self[LOPSIDED].losses, strict=True)
        return max(abs(mine - theirs) / abs(theirs) for theirs, mine in pairs)


def run_demo(*, quick: bool, say: Say) -> Outcome:
    """All of it, in processes that are gone when it ends, however it ends."""
    started = time.perf_counter()
    setting, pace = find_setting(), _QUICK if quick else _FULL
    if quick:
        setting = replace(setting, size=_QUICK_SIZE)
    size, devices = setting.size, setting.devices
    say("starting", f"{len(devices)} workers")
    with WorkerPool(len(devices), cores=setting.cores, timeout_s=_PATIENCE_S) as pool:
        pool.run(leave)  # the first job is done when all have met
        say("measuring", f"all {len(devices)} at once, for about {pace.measure_s:g} s")
        cluster: Cluster = pool.run(take_measure, size, devices, pace.measure_s)[0]
        say("planning", size.spec)
        model, batch = build(size)
        found = plan(model, batch, cluster)
        if found.interrupted:
            raise KeyboardInterrupt  # the planner would go on with the best so far
        path = str(Path(pool.folder) / "plan.json")
        save_plan(found, path)
        say("entering", "the same model for everyone")
        rows = {EQUAL: _rows(size.batch, [1.0] * len(devices)), BY_SPEED: _rows(size.batch, _speeds(found))}
        parts: list[Part] = pool.run(enter, size, devices, pace.rounds * pace.steps, rows, path)
        rounds = _race(pool, pace, devices, say)
    shares: dict[str, list[float | None]] = {name: [n / size.batch for n in cut] for name, cut in rows.items()}
    shares[LOPSIDED] = [part.share if part.takes_part else None for part in parts]
    shares[ALONE] = [1.0, *[None] * (len(devices) - 1)]
    predicted = {b.name: b.step_s for b in found.baselines}
    entries = tuple(
        _entry(name, rounds, shares[name], predicted.get(_PREDICTED_AS.get(name, ""), found.step_s), pace.steps)
        for name in CONTESTANTS
    )
    return Outcome(
        setting,
        cluster,
        found,
        sum(parameter.numel() for parameter in model.parameters()),
        _stored(found),
        entries,
        len(rounds) * pace.steps,
        time.perf_counter() - started,
    )


def _race(pool: WorkerPool, pace: Pace, devices: tuple[str, ...], say: Say) -> list[list[Round]]:
    """Of every round what every worker tells; the first, in which all is made that is made once, does not count."""
    dice, order = random.Random(0), list(CONTESTANTS)
    rounds: list[list[Round]] = []
    until = time.perf_counter() + pace.most_s
    while len(rounds) < pace.rounds and (len(rounds) < 2 or time.perf_counter() < until):
        say("training", f"round {len(rounds) + 1} of {pace.rounds}, {pace.steps} steps of each contestant")
        dice.shuffle(order)
        rounds.append(pool.run(run_round, tuple(order), devices, pace.steps))
    return rounds


def _speeds(found: Plan) -> list[float]:
    dtype = speed_dtype(found.graph)
    return [kind.flops(dtype) for kind in found.cluster.device_kinds]


def _rows(batch: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Rows of a batch for each worker, in proportion; at least one, for DDP can do nothing with none."""
    shares = Shares(tuple(weight / sum(weights) for weight in weights))
    rows = shares.cut(batch)
    return rows if min(rows) else tuple(1 + more for more in shares.cut(batch - len(weights)))


def _entry(
    name: str, rounds: Sequence[Sequence[Round]], shares: Sequence[float | None], predicted_s: float, steps: int
) -> RaceEntry:
    counted = rounds[1:]
    takes_part = [share is not None for share in shares]
    busy = [_busy([worker.spent[name] for worker in told], takes_part, steps) for told in counted]
    workers: list[Busy | None] = []
    for rank, taking in enumerate(takes_part):
        mine = [one for told in busy if (one := told[rank]) is not None]
        workers.append(_median(mine) if taking else None)
    return RaceEntry(
        name,
        predicted_s,
        tuple(max(worker.spent[name].total_s for worker in told) / steps for told in counted),
        tuple(shares),
        tuple(workers),
        tuple(loss for told in rounds for loss in told[0].losses[name]),
    )


def _busy(spent: Sequence[Spent], takes_part: Sequence[bool], steps: int) -> list[Busy | None]:
    """One round. All stand while something is sent; who stands longer than the others waits for them."""
    sent_s = min(one.waited_s for one, taking in zip(spent, takes_part, strict=True) if taking)
    return [
        Busy(
            (one.total_s - one.optimizer_s - one.waited_s) / steps,
            one.optimizer_s / steps,
            sent_s / steps,
            (one.waited_s - sent_s) / steps,
        )
        if taking
        else None
        for one, taking in zip(spent, takes_part, strict=True)
    ]


def _median(found: Sequence[Busy]) -> Busy:
    return Busy(
        statistics.median(one.compute_s for one in found),
        statistics.median(one.optimizer_s for one in found),
        statistics.median(one.communication_s for one in found),
        statistics.median(one.waiting_s for one in found),
    )


def _stored(found: Plan) -> tuple[tuple[str, float], ...]:
    """What part of all parameters is whole on every worker, cut where it is used, and gathered for use."""
    placed = dict(found.program.leaves)
    sizes = {"whole": 0, "cut": 0, "gathered": 0}
    for leaf in found.graph.parameters:
        at = placed[leaf.value.name]
        sizes["whole" if not at.is_shard else "gathered" if at.by == STATE else "cut"] += leaf.value.elements
    total = sum(sizes.values())
    return tuple((how, elements / total) for how, elements in sizes.items())


# Who takes part

_MOST_GPUS = 8
_WORKERS = 3
# Few samples a step, so that what is sent and what the optimizer does matter beside what is computed.
_ON_CORES = Size(layers=2, width=768, heads=24, seq=16, batch=12)
_ON_GPUS = Size(layers=4, width=768, heads=12, seq=256, batch=96)


@dataclass(frozen=True, slots=True)
class Setting:
    """`devices` has an entry for each worker, and so have `cores`, unless nobody is pinned."""

    devices: tuple[str, ...]
    cores: tuple[tuple[int, ...], ...] | None
    about: str
    size: Size


def find_setting() -> Setting:
    """What this machine allows."""
    gpus = min(torch.cuda.device_count(), _MOST_GPUS)
    if gpus:
        return _on_gpus([torch.cuda.get_device_name(k) for k in range(gpus)])
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return on_cores(allowed, _siblings(allowed[0]) if allowed else ())


def on_cores(allowed: list[int], siblings: Collection[int]) -> Setting:
    """Three workers on these cores; `siblings` are threads of the first one's core."""
    devices = ("cpu",) * _WORKERS
    if not allowed:
        about = "three workers that go where the system puts them: it cannot pin them to cores"
        return Setting(devices, None, about, _ON_CORES)
    first, *others = allowed
    if not others:
        about = f"one core ({first}), which all three workers share: they are about equally fast"
        return Setting(devices, ((first,),) * _WORKERS, about, _ON_CORES)
    second = next((core for core in others if core not in siblings), others[0])
    about = f"two cores: worker 0 has core {first} to itself, workers 1 and 2 share core {second}"
    return Setting(devices, ((first,), (second,), (second,)), about, _ON_CORES)


def _on_gpus(names: list[str]) -> Setting:
    if len(names) == 1:
        devices = ("cuda:0",) * _WORKERS
        over = backend_on(devices)
        about = f"one GPU ({names[0]}), which three workers share over {over}: they are about equally fast"
        return Setting(devices, None, about, _ON_GPUS)
    kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    return Setting(tuple(f"cuda:{k}" for k in range(len(names))), None, f"one worker a GPU: {kinds}", _ON_GPUS)


def _siblings(core: int) -> tuple[int, ...]:
    """Which others are threads of the same core: two of them are not as fast as two cores."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    found: list[int] = []
    for part in path.read_text().strip().split(",") if path.is_file() else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
