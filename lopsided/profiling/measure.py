"""Measure what we run on: devices and links, all at the same time, as a `Cluster`.

In: a `Graph` (or several), this process's device, a process group. Out: the same `Cluster` in every process
(`measure`), and how far to believe it (`Measurement`). Device k of the cluster is rank k of the group.

All processes measure at once, because devices that share a core, a bus or a memory will do so in training, too; who is
done early works on until all are. First what the roofline is made of, then the calls that take most of a step by
their estimates, the optimizer's step, a whole step, collectives, what computing and sending cost each other, and
the whole step once more: by what it takes the calls are corrected.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import cast

import torch
import torch.distributed as dist

from lopsided.calibration.calibrate import DRY_RUN, calibrate
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import parse_cluster
from lopsided.cluster.devices import Link, Points
from lopsided.errors import InputError
from lopsided.ir.graph import Graph
from lopsided.profiling.dry_run import (
    LOOKS_AFTER,
    LOOKS_BEFORE,
    REHEARSAL_PART,
    StepMeasurements,
    StepTimings,
    agreed,
    forget_peaks,
    memory_reserve,
    packing,
)
from lopsided.profiling.kinds import (
    Found,
    RankHost,
    Turns,
    kinds_of,
    memory_of,
    node_names,
    paces,
    printable,
    rank_kinds,
    seat_of,
    took,
    with_table,
)
from lopsided.profiling.links import ControlGroup, Fit, measure_host_link
from lopsided.profiling.noise import (
    BackgroundLoad,
    NoiseStats,
    Notice,
    Stopwatch,
    Used,
    notices,
    quota_of_processors,
    typical,
    used_so_far,
)
from lopsided.profiling.op_times import (
    SHORTEST_ON_GPU_S,
    SHORTEST_S,
    OpJob,
    choose_jobs,
    covered,
    layouts_of,
    measure_speeds,
    probe_calls,
    run_job,
    speed_dtypes,
)
from lopsided.profiling.overhead import fractions_of, measure_overhead, measure_update, trained_dtypes
from lopsided.profiling.overlap import measure_contention, shared_chips
from lopsided.profiling.topology import (
    BESIDE_PART,
    LINKS_PART,
    Topology,
    council_of,
    group_to_talk,
    link_parts,
    sent,
    with_links,
)
from lopsided.schedule.cost import fitted_line, update_call

Progress = Callable[[int, int], object]

# Parts of the budget: for the roofline, calls, updates, a glance at every call, and what lies around ops.
_SPEEDS_PART, _OPS_PART, _UPDATES_PART, _PROBE_PART, _OVERHEAD_PART = 0.06, 0.36, 0.07, 0.05, 0.01
# What contention takes on top of the budget, in parts of it, where devices share a chip.
_CONTENTION_PART = 0.05
# All calls are timed in three passes, so that a busy moment meets no call in all of its timings.
_PASSES = 3
# Updates may take twice their part of the budget; optimizers that are left then are not measured.
_LATE = 2.0
# The link of a cluster whose links are not measured yet, or of one device; no price is made of it.
_UNKNOWN = Link(1e-5, 1e10)


@dataclass(frozen=True, slots=True)
class ProfileLine:
    """What was measured of a call on the devices of a kind: seconds of all of them in a step on a whole batch, how far
    points lie from their line, and how far the same measured again might be; the last two as fractions."""

    kind: int
    call: str
    times: int
    step_s: float
    error: float
    noise: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured cluster, and how far to believe it. Errors and noises are fractions."""

    cluster: Cluster
    op_error: float
    link_error: float
    seconds: float
    lines: tuple[ProfileLine, ...] = ()
    ways: tuple[Fit, ...] = ()
    compute_slowdowns: tuple[float, ...] = ()  # of each rank
    comm_slowdown: float = 1.0
    covered: float = 0.0  # part of a step's estimated seconds whose calls were measured
    noticed: tuple[Notice, ...] = ()
    rehearsed: tuple[float, ...] = ()  # of each rank: a step's calls over the same one by one; none without a dry run

    @property
    def op_noise(self) -> float:
        """The noise of all calls together, the long ones counting more."""
        total = sum(line.step_s for line in self.lines)
        return sum(line.noise * line.step_s for line in self.lines) / total if total else 0.0

    @property
    def link_noise(self) -> float:
        return statistics.fmean(way.noise for way in self.ways) if self.ways else 0.0


def measure(
    graph: Graph | Sequence[Graph],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    optimizers: Sequence[str] = (),
    budget_s: float = 20.0,
    progress: Progress = lambda done, total: None,
) -> Cluster:
    """The cluster that the processes of a group (all, if none is given) are, for this graph. All of them call this.

    It takes about `budget_s` seconds. `progress` is told how many parts are done, and of how many.
    """
    return take_measurement(graph, device, group, optimizers=optimizers, budget_s=budget_s, progress=progress).cluster


def take_measurement(
    graph: Graph | Sequence[Graph],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    optimizers: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    budget_s: float = 20.0,
    progress: Progress = lambda done, total: None,
) -> Measurement:
    """`measure`, and how well it went. Speeds are measured in the graphs' dtypes and in `dtypes`."""
    if not 0 <= budget_s < math.inf:
        raise InputError(f"{budget_s} s are no time to measure in", do="give budget_s in seconds, for example 20")
    started = time.perf_counter()
    graphs = (graph,) if isinstance(graph, Graph) else tuple(graph)
    council = council_of(group)
    with undisturbed(device):
        devices = _measure_devices(graphs, device, council, optimizers, dtypes, budget_s, progress)
        seats, parts = devices.seats, devices.parts
        ranks = len(seats)
        kinds = kinds_of(seats, devices.found, devices.jobs, [0.0] * ranks, devices.overheads)
        cluster = Cluster("measured", _about(seats, budget_s, group), kinds, _UNKNOWN, _UNKNOWN)
        is_run_dry = len(graphs) == 1
        dry = agreed(graphs[0], cluster, council, budget_s) if is_run_dry else None
        got = devices.calm[council.rank].got
        looks = None if dry is None else StepTimings(dry, device, council, got, budget_s)
        if looks is not None:
            forget_peaks(device)
            looks.take(LOOKS_BEFORE)
        fits: tuple[Fit, ...] = ()
        slowdowns: tuple[float, ...] = (0.0,) * ranks
        world: Topology | None = None
        if ranks > 1:
            left = iter(range(parts - link_parts(ranks) - is_run_dry + 1, parts + 1))
            world = Topology(group_to_talk(group, seats), council, device, *sent(graphs), budget_s)
            speeds = paces(seats, devices.found, devices.jobs)
            cluster, fits, slowdowns = with_links(cluster, world, seats, speeds, lambda: progress(next(left), parts))
        steps = StepMeasurements()
        if looks is not None:
            looks.take(LOOKS_AFTER)
            steps = looks.tell(seats)
        reserves = () if looks is None else cast(Sequence[float], council.hear(memory_reserve(device)))
        devices, rehearsed = _calibrated(devices, steps)
        contentions = _contentions(graphs, device, council, devices, steps, _CONTENTION_PART * budget_s)
        kinds = kinds_of(seats, devices.found, devices.jobs, slowdowns, devices.overheads, contentions, reserves)
        cluster = replace(cluster, kinds=kinds)
        if dry is not None and steps.observed and world is not None:
            cluster = replace(cluster, packing=packing(dry, cluster, world))
        if is_run_dry:
            progress(parts, parts)
        lines = tuple(_lines(cluster, devices))
        measurement = Measurement(
            cluster,
            statistics.fmean(line.error for line in lines) if lines else 0.0,
            statistics.fmean(fit.error for fit in fits) if fits else 0.0,
            time.perf_counter() - started,
            lines,
            fits,
            slowdowns,
            cluster.comm_slowdown,
            covered(graphs, devices.jobs, seats[0].speeds),
            tuple(_noticed(cluster, devices)),
            rehearsed,
        )
        # What rank 0 has found is what everyone goes by, to the last digit.
        told, *_ = council.hear((cluster.text(), measurement))
    text, chosen = cast(tuple[str, Measurement], told)
    return replace(chosen, cluster=parse_cluster(text, "measured"))


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """The model's random numbers are the same whether or not anyone has measured, and so is its room on a GPU."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Devices


@dataclass(frozen=True, slots=True)
class _Devices:
    """What every rank is, what every rank found, the jobs, what every rank noticed; and how many parts there are."""

    seats: list[RankHost]
    found: list[Found]
    jobs: tuple[OpJob, ...]
    calm: list[NoiseStats]
    overheads: list[float]
    parts: int


def _measure_devices(
    graphs: Sequence[Graph],
    device: torch.device,
    council: ControlGroup,
    optimizers: Sequence[str],
    dtypes: Sequence[str],
    budget_s: float,
    progress: Progress,
) -> _Devices:
    load = BackgroundLoad(device)
    wanted = tuple(dict.fromkeys((*speed_dtypes(graphs), *dtypes)))
    speeds = measure_speeds(wanted, device, _SPEEDS_PART * budget_s)
    council.meet(load)
    seats = cast(list[RankHost], council.hear(seat_of(device, speeds, measure_host_link(device))))
    room = min(memory_of(seat, seats) for seat in seats)
    # Alone there is nothing to send, and more time to compute.
    part = _OPS_PART + (LINKS_PART + BESIDE_PART if len(seats) == 1 else 0.0)
    # Of several graphs none is run dry.
    ops_s = (part + (REHEARSAL_PART if len(graphs) != 1 else 0.0)) * budget_s
    probed = _slowest_of_each(council, probe_calls(graphs, device, len(seats), room, _PROBE_PART * budget_s))
    shortest_s = SHORTEST_ON_GPU_S if all(seat.gpu for seat in seats) else SHORTEST_S
    jobs, slot = choose_jobs(graphs, [seat.speeds for seat in seats], room, ops_s, probed, shortest_s)
    updates = [(optimizer, dtype) for dtype in _trained(graphs) for optimizer in optimizers]
    parts = 1 + _PASSES * len(jobs) + len(updates) + (len(graphs) == 1) + link_parts(len(seats))
    progress(1, parts)
    before, watch = used_so_far(), Stopwatch(device)
    turns = _run_jobs(graphs, jobs, device, watch, slot, ops_s, lambda done: progress(1 + done, parts))
    around = measure_overhead(device, _OVERHEAD_PART * budget_s, watch.now)
    slowed = watch.wall_per_now
    council.meet(load)
    used = used_so_far().since(before)
    mine = {job.key: took(looks, slowed) for job, looks in zip(jobs, turns, strict=True) if any(looks[0])}
    done = 1 + _PASSES * len(jobs)
    watch.start()
    updated: dict[tuple[str, float], list[list[float]]] = {}
    sizes = fractions_of(graphs)
    updating_s = _UPDATES_PART * budget_s
    until = time.perf_counter() + _LATE * updating_s
    for number, (optimizer, dtype) in enumerate(updates, 1):
        # Tensors have to be made before they can be updated: with little time, only the first ones are.
        if number > 1 and time.perf_counter() > until:
            break
        each = updating_s / len(updates)
        found_here = measure_update(optimizer, dtype, device, room // 2, each, watch.now, sizes)
        for fraction, looks in found_here.items():
            updated[update_call(optimizer, dtype), fraction] = looks
        if number < len(updates):
            progress(done + number, parts)
    if updates:
        progress(done + len(updates), parts)
    mine |= {key: took((looks, []), watch.wall_per_now) for key, looks in updated.items()}
    council.meet(load)
    told = (mine, _calm(turns, slowed), used, around * slowed)
    found, calms, uses, overheads = zip(
        *cast(list[tuple[Found, NoiseStats, Used, float]], council.hear(told)), strict=True
    )
    return _Devices(seats, list(found), jobs, _with_others(seats, calms, uses), list(overheads), parts)


def _calibrated(devices: _Devices, steps: StepMeasurements) -> tuple[_Devices, tuple[float, ...]]:
    """Devices with calls that add up to whole steps, where these are known; and how many times as long as its calls one
    by one each rank's step took."""
    if not steps.observed:
        return devices, ()
    ranks = Cluster("ranks", "", rank_kinds(devices.seats, devices.found), _UNKNOWN, _UNKNOWN)
    found = calibrate(ranks, steps.observed, limits=DRY_RUN)
    tables = zip(devices.found, found.cluster.kinds, strict=True)
    corrected = [with_table(table, kind.measured) for table, kind in tables]
    return replace(devices, found=corrected), tuple(one.factor for one in found.corrections)


def _contentions(
    graphs: Sequence[Graph],
    device: torch.device,
    council: ControlGroup,
    devices: _Devices,
    steps: StepMeasurements,
    budget_s: float,
) -> tuple[float, ...]:
    """The contention of each rank, by whole steps, or by calls where no step was run; nothing where nobody shares a
    chip."""
    if not shared_chips(devices.seats):
        return ()
    by_calls = measure_contention(graphs, device, council, devices.seats, devices.found, devices.jobs, budget_s)
    return tuple(whole or calls for whole, calls in zip(steps.contentions or by_calls, by_calls, strict=True))


def _slowest_of_each(council: ControlGroup, found: dict[str, float]) -> dict[str, float]:
    """What the slowest rank took, of what all have tried."""
    everyone = cast(list[dict[str, float]], council.hear(found))
    return {text: max(one[text] for one in everyone) for text in found if all(text in one for one in everyone)}


def _run_jobs(
    graphs: Sequence[Graph],
    jobs: Sequence[OpJob],
    device: torch.device,
    watch: Stopwatch,
    slot_s: float,
    budget_s: float,
    step: Callable[[int], object],
) -> list[Turns]:
    layouts = [layouts_of(graph) for graph in graphs]
    turns: list[Turns] = [([], []) for _ in jobs]
    watch.start()
    until = time.perf_counter() + budget_s
    for turn in range(_PASSES):
        for number, job in enumerate(jobs):
            there, back = turns[number]
            spent = sum(sum(samples) for samples in (*there, *back))
            # A call that took all of its time at once, or takes too long, is not run again.
            if not turn or (time.perf_counter() < until and spent < slot_s):
                more_there, more_back = run_job(job, layouts[job.distinct.graph], device, slot_s / _PASSES, watch.now)
                there.append(more_there)
                back.append(more_back)
            step(turn * len(jobs) + number + 1)
    return turns


def _trained(graphs: Sequence[Graph]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(dtype for graph in graphs for dtype in trained_dtypes(graph)))


def _calm(turns: Sequence[Turns], slowed: float) -> NoiseStats:
    """Whether repeats agree, and whether the last turn agrees with the first."""
    scatters, first, last = [], 0.0, 0.0
    for there, _ in turns:
        times = [seconds for turn in there for seconds in turn]
        if len(times) > 2:
            scatters.append(statistics.median(times) / min(times) - 1)
        if len(there) > 1 and there[0] and there[-1]:
            first, last = first + typical(there[0]), last + typical(there[-1])
    return NoiseStats(
        statistics.median(scatters) if scatters else 0.0,
        last / first - 1 if first else 0.0,
        got=1 / slowed,
        quota=quota_of_processors(),
    )


def _with_others(seats: Sequence[RankHost], calm: Sequence[NoiseStats], used: Sequence[Used]) -> list[NoiseStats]:
    """What of each host's processors was neither idle nor used by any of us."""
    found = []
    for seat, one, mine in zip(seats, calm, used, strict=True):
        ours = sum(other.own_s for s, other in zip(seats, used, strict=True) if s.boot == seat.boot)
        others = max(mine.busy_s - ours, 0.0) / mine.all_s if mine.all_s else 0.0
        found.append(replace(one, others=others, stolen=mine.stolen_s / mine.all_s if mine.all_s else 0.0))
    return found


def _noticed(cluster: Cluster, devices: _Devices) -> list[Notice]:
    rates = paces(devices.seats, devices.found, devices.jobs)
    hardware = [printable(seat.hardware) for seat in devices.seats]
    return notices(cluster.device_names, hardware, rates, devices.calm)


def _lines(cluster: Cluster, devices: _Devices) -> Iterator[ProfileLine]:
    times = {job.text: job.distinct.times for job in devices.jobs}
    for number, (kind, (first, last)) in enumerate(zip(cluster.kinds, cluster.spans, strict=True)):
        for entry in kind.measured:
            both = [points for points in (entry.forward, entry.backward) if points]
            noises = [
                table[entry.call, fraction].noise
                for table in devices.found[first:last]
                for fraction, _ in entry.forward
            ]
            often = times.get(entry.call, 0)  # updates are no calls of the graph
            step_s = often * sum(fitted_line(points).at(1.0) for points in both)
            error = statistics.fmean(_off_the_line(points) for points in both)
            yield ProfileLine(number, entry.call, often, step_s, error, statistics.fmean(noises))


def _off_the_line(points: Points) -> float:
    """How far points are, relatively, from the line that prices are made of."""
    line = fitted_line(points)
    return statistics.fmean(abs(line.at(fraction) / seconds - 1) for fraction, seconds in points if seconds)


def _about(seats: Sequence[RankHost], budget_s: float, group: dist.ProcessGroup | None) -> str:
    hosts = list(dict.fromkeys(node_names(seats)))
    things = list(dict.fromkeys(printable(seat.hardware) for seat in seats))
    backend = f", {dist.get_backend(group)}" if dist.is_initialized() else ""
    listed = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    processes = f"{len(seats)} process{'es' if len(seats) > 1 else ''}"
    return (
        f"Measured {when} in {budget_s:g} s by {processes} at once on {listed}: {', '.join(things[:4])}; "
        f"torch {torch.__version__}{backend}."
    )
