"""Measure what we run on: devices and links, all at the same time, as a `Cluster`.

In: a `Graph`, this process's device, a process group. Out: the same `Cluster` in every process (`measure`), and how far
to believe it (`Measurement`). Device k of the cluster is rank k of the group.

All processes measure at once, because devices that share a core, a bus or a memory will do so in training, too; who is
done early works on until all are. First what the roofline is made of, then the calls that take most of a step by
their estimates, then collectives. Ranks that are neighbours, sit in one host, have the same hardware and differ by
less than a tenth become one kind.
"""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from lopsided.cluster import Cluster, parse_cluster
from lopsided.collectives import Network
from lopsided.devices import Kind, Link, Measured
from lopsided.errors import InputError
from lopsided.graph import Graph
from lopsided.runtime.measure_links import WAYS, Council, fit_ways, line_through
from lopsided.runtime.measure_ops import (
    Job,
    Speeds,
    choose_jobs,
    layouts_of,
    measure_speeds,
    run_job,
    speed_dtypes,
    wait_for,
)
from lopsided.runtime.wire import Wire
from lopsided.runtime.world import lasting_group

Progress = Callable[[int, int], object]

_SPEEDS_PART, _OPS_PART, _LINKS_PART = 0.1, 0.6, 0.3  # of the budget
_PATIENCE_S = 300.0  # how long a rank waits for another that still measures
_PASSES = 3  # over all jobs, so that a moment's noise meets no call twice
_ALIKE = 1.1
_UNKNOWN = Link(1e-5, 1e10)  # of a world where nobody talks


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured cluster, and how far points lie from the lines drawn through them, as a fraction."""

    cluster: Cluster
    op_error: float
    link_error: float
    seconds: float


def measure(
    graph: Graph,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    budget_s: float = 20.0,
    progress: Progress = lambda done, total: None,
) -> Cluster:
    """The cluster that the processes of a group (all, if none is given) are, for this graph. All of them call this.

    It takes about `budget_s` seconds. `progress` is told how many parts are done, and of how many.
    """
    return take_measurement(graph, device, group, budget_s=budget_s, progress=progress).cluster


def take_measurement(
    graph: Graph,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    budget_s: float = 20.0,
    progress: Progress = lambda done, total: None,
) -> Measurement:
    """`measure`, and how well it went."""
    if not 0 <= budget_s < math.inf:
        raise InputError(f"{budget_s} s are no time to measure in", do="give budget_s in seconds, for example 20")
    started = time.perf_counter()
    with _council(group) as council, _undisturbed(device):
        seats, found, jobs = _measure_devices(graph, device, council, budget_s, progress)
        kinds, op_error = _kinds(seats, found, jobs)
        about = _about(seats, budget_s, group)
        cluster = Cluster("measured", about, kinds, _UNKNOWN, _UNKNOWN)
        link_error = 0.0
        if len(seats) > 1:
            done = _PASSES * len(jobs) + 1
            steps = iter(range(done + 1, done + len(WAYS) + 1))
            dtype = _sent_dtype(graph)
            whole = _whole(group)
            talking = _group_of(dist.get_process_group_ranks(whole), _backend(seats), "talk", whole)
            cluster, link_error = _with_links(
                cluster,
                _World(talking, council, device, dtype, _LINKS_PART * budget_s),
                seats,
                lambda: progress(next(steps), done + len(WAYS)),
            )
        # What rank 0 has found is what everyone goes by, to the last digit.
        text, *_ = council.hear((cluster.text(), op_error, link_error))
    chosen, op_error, link_error = cast(tuple[str, float, float], text)
    return Measurement(parse_cluster(chosen, "measured"), op_error, link_error, time.perf_counter() - started)


@contextmanager
def _council(group: dist.ProcessGroup | None) -> Iterator[Council]:
    """A group of its own to agree over, which needs no GPU."""
    if not dist.is_initialized():
        yield Council(None)
        return
    ranks = dist.get_process_group_ranks(_whole(group))
    if len(ranks) == 1:
        yield Council(None)
        return
    yield Council(_group_of(ranks, "gloo", "council", _whole(group)))


def _whole(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, group or dist.group.WORLD)


def _backend(seats: Sequence[Seat]) -> str:
    """What training will talk over: NCCL where every process has a GPU of its own, gloo otherwise."""
    gpus = {(seat.host, seat.boot, seat.gpu) for seat in seats if seat.gpu}
    return "nccl" if len(gpus) == len(seats) and dist.is_nccl_available() else "gloo"


def _group_of(ranks: Sequence[int], backend: str, use: str, whole: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group for one use among all processes. Where only some of them measure, the group they gave does for all.

    Groups that only their members make are named by torch after their ranks alone, so a second one over the same ranks
    would find the first one's addresses; and those that all make must be made by all.
    """
    if len(dist.get_process_group_ranks(whole)) < dist.get_world_size():
        return whole
    return lasting_group(f"measuring, {use}", ranks, backend, _PATIENCE_S)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """The model's random numbers are the same whether or not anyone has measured."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Devices


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a process sits, and what it has there."""

    host: str
    boot: str  # machines may be called alike
    hardware: str
    gpu: str  # its serial number; "" for a CPU
    memory_bytes: int  # of the GPU, or what is left of the host's
    speeds: Speeds


Found = dict[tuple[str, int], tuple[float, float | None]]
"""Seconds forward and backward of each job, by call and units."""


def _measure_devices(
    graph: Graph, device: torch.device, council: Council, budget_s: float, progress: Progress
) -> tuple[list[Seat], list[Found], tuple[Job, ...]]:
    """What every rank is, what every rank found, and the jobs."""
    load = torch.ones(256, 256, device=device)

    def work_on() -> None:
        torch.mm(load, load)
        wait_for(device)

    speeds = measure_speeds(speed_dtypes(graph), device, _SPEEDS_PART * budget_s)
    council.meet(work_on)
    seats = cast(list[Seat], council.hear(_seat(device, speeds)))
    room = min(_memory(seat, seats) for seat in seats)
    jobs, slot = choose_jobs(graph, [seat.speeds for seat in seats], room, _OPS_PART * budget_s)
    total = 1 + _PASSES * len(jobs) + (len(WAYS) if len(seats) > 1 else 0)
    progress(1, total)
    layouts = layouts_of(graph)
    samples: list[tuple[list[float], list[float]]] = [([], []) for _ in jobs]
    until = time.perf_counter() + _OPS_PART * budget_s
    for turn in range(_PASSES):
        for number, job in enumerate(jobs):
            there, back = samples[number]
            # A call that took all of its time at once, or takes too long, is not run again.
            if not turn or (time.perf_counter() < until and sum(there) + sum(back) < slot):
                more_there, more_back = run_job(job, layouts, device, slot / _PASSES)
                there += more_there
                back += more_back
            progress(2 + turn * len(jobs) + number, total)
    council.meet(work_on)
    mine: Found = {
        (job.distinct.text, job.units): (statistics.median(there), statistics.median(back) if back else None)
        for job, (there, back) in zip(jobs, samples, strict=True)
        if there
    }
    return seats, cast(list[Found], council.hear(mine)), jobs


def _seat(device: torch.device, speeds: Speeds) -> Seat:
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text().strip() if boot.is_file() else ""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        serial = str(getattr(facts, "uuid", torch.cuda.current_device() if device.index is None else device.index))
        return Seat(platform.node(), identity, facts.name, serial, facts.total_memory, speeds)
    return Seat(platform.node(), identity, _processor(), "", _free_memory(), speeds)


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    listed = facts.read_text() if facts.is_file() else ""
    found = re.search(r"^model name\s*: (.+)$", listed, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "cpu"


def _free_memory() -> int:
    """What this host, or the container around us, has left."""
    facts = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", facts.read_text() if facts.is_file() else "", re.MULTILINE)
    free = int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current")]
    if all(path.is_file() for path in limits):
        most, used = (path.read_text().strip() for path in limits)
        if most.isdigit() and used.isdigit():
            free = min(free, int(most) - int(used))
    return max(free, 2**20)


# Kinds


def _kinds(seats: Sequence[Seat], found: Sequence[Found], jobs: Sequence[Job]) -> tuple[tuple[Kind, ...], float]:
    """Runs of ranks that are alike, and how far points lie from their lines."""
    # Only what all have measured: else one device would be priced by a clock and another by an estimate.
    common = [job for job in jobs if all((job.distinct.text, job.units) in table for table in found)]
    paces = [_pace(seat, table, common) for seat, table in zip(seats, found, strict=True)]
    runs: list[list[int]] = []
    for rank, seat in enumerate(seats):
        last = runs[-1] if runs else []
        with_me = [paces[member] for member in (*last, rank)]
        if last and _same_place(seats[last[0]], seat) and max(with_me) <= _ALIKE * min(with_me):
            last.append(rank)
        else:
            runs.append([rank])
    nodes = _node_names(seats)
    names = _kind_names([(nodes[run[0]], _word(seats[run[0]]), paces[run[0]]) for run in runs])
    errors: list[float] = []
    kinds = []
    for run, name in zip(runs, names, strict=True):
        measured = tuple(_table([found[rank] for rank in run], common))
        for entry in measured:
            errors += [line_through(points)[2] for points in (entry.forward, entry.backward) if len(points) > 1]
        first = seats[run[0]]
        kinds.append(
            Kind(
                name,
                nodes[run[0]],
                1,
                len(run),
                _mean_flops([seats[rank].speeds for rank in run]),
                statistics.fmean(seats[rank].speeds.bytes_per_s for rank in run),
                _memory(first, seats),
                statistics.fmean(seats[rank].speeds.launch_s for rank in run),
                f"measured: {_printable(first.hardware)}",
                measured,
            )
        )
    return tuple(kinds), statistics.fmean(errors) if errors else 0.0


def _same_place(one: Seat, other: Seat) -> bool:
    return (one.host, one.boot, one.hardware, not one.gpu) == (other.host, other.boot, other.hardware, not other.gpu)


def _pace(seat: Seat, table: Found, jobs: Sequence[Job]) -> float:
    """One number to compare devices by: seconds of all that was measured, as often as the graph calls it."""
    if not jobs:
        return 1 / seat.speeds.flops_per_s[0][1]
    points = ((job.distinct.times, *table[job.distinct.text, job.units]) for job in jobs)
    return sum(times * (there + (back or 0.0)) for times, there, back in points)


def _table(found: Sequence[Found], jobs: Sequence[Job]) -> Iterator[Measured]:
    """The mean over the ranks of a kind."""
    by_call: dict[str, list[Job]] = {}
    for job in jobs:
        by_call.setdefault(job.distinct.text, []).append(job)
    for text, same in by_call.items():
        forward, backward = [], []
        for job in same:
            there, back = zip(*(table[text, job.units] for table in found), strict=True)
            forward.append((job.fraction, statistics.fmean(there)))
            if all(seconds is not None for seconds in back):
                backward.append((job.fraction, statistics.fmean(back)))
        yield Measured(text, tuple(forward), tuple(backward))


def _mean_flops(speeds: Sequence[Speeds]) -> tuple[tuple[str, float], ...]:
    dtypes = [dtype for dtype, _ in speeds[0].flops_per_s]
    return tuple((dtype, statistics.fmean(dict(one.flops_per_s)[dtype] for one in speeds)) for dtype in dtypes)


def _memory(seat: Seat, seats: Sequence[Seat]) -> int:
    """Of one process, to the MiB: those without a GPU share what their host has left, those on one GPU its memory."""
    same = [s for s in seats if (s.host, s.boot, s.gpu) == (seat.host, seat.boot, seat.gpu)]
    return max(min(s.memory_bytes for s in same) // len(same) // 2**20, 1) * 2**20


# Names


def _node_names(seats: Sequence[Seat]) -> list[str]:
    """The name of each rank's host; different hosts have different names."""
    known: dict[tuple[str, str], str] = {}
    for seat in seats:
        if (seat.host, seat.boot) not in known:
            name = re.sub(r"[^\w.-]+", "-", seat.host, flags=re.ASCII).strip("-.")[:80] or "host"
            taken = sum(other == name or other.startswith(f"{name}~") for other in known.values())
            known[seat.host, seat.boot] = f"{name}~{taken + 1}" if taken else name
    return [known[seat.host, seat.boot] for seat in seats]


def _word(seat: Seat) -> str:
    """What people call the hardware: "NVIDIA GeForce RTX 2080 Ti" is an rtx-2080-ti."""
    if not seat.gpu:
        return "cpu"
    words = re.findall(r"[a-z0-9]+", seat.hardware.lower())
    telling = [word for word in words if word not in ("nvidia", "geforce", "tesla", "amd", "instinct", "graphics")]
    return "-".join(telling)[:60] or "gpu"


def _kind_names(runs: Sequence[tuple[str, str, float]]) -> list[str]:
    """Of each (node, hardware, pace): the hardware, and how fast it is among its like in the node."""
    names = []
    for node, word, pace in runs:
        like = sorted(other for where, what, other in runs if (where, what) == (node, word))
        classes = [like[0]]
        for other in like:
            if other > _ALIKE * classes[-1]:
                classes.append(other)
        mine = max(k for k, start in enumerate(classes) if start <= pace)
        labels = {1: [""], 2: ["-fast", "-slow"], 3: ["-fast", "-middle", "-slow"]}
        label = labels[len(classes)][mine] if len(classes) in labels else f"-speed{mine + 1}"
        names.append((node, word + label))
    counted = [names[:k].count(name) for k, name in enumerate(names)]
    return [name if not before else f"{name}-also{before}" for (_, name), before in zip(names, counted, strict=True)]


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)[:200]


def _about(seats: Sequence[Seat], budget_s: float, group: dist.ProcessGroup | None) -> str:
    hosts = list(dict.fromkeys(_node_names(seats)))
    things = list(dict.fromkeys(_printable(seat.hardware) for seat in seats))
    backend = f", {dist.get_backend(group)}" if dist.is_initialized() else ""
    listed = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    processes = f"{len(seats)} process{'es' if len(seats) > 1 else ''}"
    return (
        f"Measured {when} in {budget_s:g} s by {processes} at once on {listed}: {', '.join(things[:4])}; "
        f"torch {torch.__version__}{backend}."
    )


# Links


@dataclass(frozen=True, slots=True)
class _World:
    """Whom to talk with, how to agree, and on what."""

    group: dist.ProcessGroup
    council: Council
    device: torch.device
    dtype: torch.dtype
    budget_s: float


def _sent_dtype(graph: Graph) -> torch.dtype:
    """What most of the bytes are that training sends: the gradients of parameters."""
    sizes: dict[torch.dtype, int] = {}
    for leaf in graph.parameters:
        if leaf.value.grad:
            sizes[leaf.value.torch_dtype] = sizes.get(leaf.value.torch_dtype, 0) + leaf.value.bytes
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _with_links(
    cluster: Cluster, world: _World, seats: Sequence[Seat], step: Callable[[], object]
) -> tuple[Cluster, float]:
    """The cluster with its collectives measured, and how far they lie from their lines."""
    # Groups inside hosts must be made by all processes: where only some measure, all links are taken to be alike.
    all_measure = dist.get_world_size(world.group) == dist.get_world_size()
    has_two_links = 1 < cluster.nodes < cluster.devices
    within = _inside_hosts(cluster, world, seats) if has_two_links and all_measure else None
    wire = Wire(world.group, world.device, Network(cluster))
    fits = fit_ways(wire, world.council, world.device, world.dtype, world.budget_s, step=step)
    gather = next(fit.link for fit in fits if (fit.collective, fit.way) == ("all_gather", "padded"))
    n, nodes = cluster.devices, cluster.nodes
    # The model of a padded all_gather (collectives.py), solved for the link.
    crossing = max(gather.latency_s - (n - nodes) * within.latency_s, 0.0) if within else gather.latency_s
    link = Link(crossing / ((nodes - 1) or (n - 1)), max(gather.bytes_per_s * (n - 1) / n, 1.0))
    collectives = tuple((fit.collective, fit.way, fit.link) for fit in fits)
    return (
        replace(cluster, within=within or link, between=link, collectives=collectives),
        statistics.fmean(fit.error for fit in fits),
    )


def _inside_hosts(cluster: Cluster, world: _World, seats: Sequence[Seat]) -> Link:
    """The link of the slowest host, all hosts talking to themselves at once."""
    ranks, me = dist.get_process_group_ranks(world.group), dist.get_rank(world.group)
    nodes = _node_names(seats)
    found: Link | None = None
    for node in dict.fromkeys(nodes):
        inside = [ranks[rank] for rank, other in enumerate(nodes) if other == node]
        if len(inside) == 1:
            continue
        group = lasting_group("measuring, talk", inside, _backend(seats), _PATIENCE_S)
        council = lasting_group("measuring, council", inside, "gloo", _PATIENCE_S)
        if node != nodes[me]:
            continue
        part = cluster.only(k for k, kind in enumerate(cluster.kinds) if kind.node == nodes[me])
        wire = Wire(group, world.device, Network(part))
        fits = fit_ways(
            wire,
            Council(council),
            world.device,
            world.dtype,
            world.budget_s / len(WAYS),
            (("all_gather", "padded"),),
        )
        size, line = len(inside), fits[0].link
        found = Link(line.latency_s / (size - 1), max(line.bytes_per_s * (size - 1) / size, 1.0))
    told = [link for link in cast(list[Link | None], world.council.hear(found)) if link is not None]
    return Link(max(link.latency_s for link in told), min(link.bytes_per_s for link in told))
