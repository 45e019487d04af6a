"""Measure what we run on: devices and links, all at the same time, as a `Cluster`.

In: a `Graph` (or several), this process's device, a process group. Out: the same `Cluster` in every process
(`measure`), and how far to believe it (`Measurement`). Device k of the cluster is rank k of the group.

All processes measure at once, because devices that share a core, a bus or a memory will do so in training, too; who is
done early works on until all are. First what the roofline is made of, then the calls that take most of a step by
their estimates, the optimizer's step, a whole step, by which the calls are corrected, collectives, and what
computing and sending cost each other.
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

from lopsided.cluster import Cluster
from lopsided.clusterfile import parse_cluster
from lopsided.collectives import Network
from lopsided.cost import fitted_line, update_call
from lopsided.devices import Kind, Link, Points
from lopsided.errors import InputError
from lopsided.graph import Graph
from lopsided.runtime.measure_beside import LARGEST_BYTES, SMALLEST_BYTES, Beside, measure_beside
from lopsided.runtime.measure_correction import Correction, Rehearsed, corrected, correction_by
from lopsided.runtime.measure_crowding import crowding_of, measure_crowding, shared_chips
from lopsided.runtime.measure_kinds import (
    Found,
    Seat,
    Turns,
    chip_of,
    kinds_of,
    memory_of,
    node_names,
    paces,
    printable,
    seat_of,
    took,
)
from lopsided.runtime.measure_links import TURNS, WAYS, Council, Fit, Talkers, fit_ways
from lopsided.runtime.measure_load import Load, Stopwatch, Used, quota_of_processors, used_so_far
from lopsided.runtime.measure_noise import Calm, Notice, notices, typical
from lopsided.runtime.measure_ops import (
    SHORTEST_ON_GPU_S,
    SHORTEST_S,
    Job,
    Speeds,
    choose_jobs,
    covered,
    layouts_of,
    measure_speeds,
    probe_calls,
    run_job,
    speed_dtypes,
)
from lopsided.runtime.measure_overhead import measure_overhead
from lopsided.runtime.measure_pairs import MOST_NODES, unlike_pairs
from lopsided.runtime.measure_rehearsal import (
    Rehearsal,
    expected,
    packing_of,
    prepared,
    prepared_alone,
    prepared_hiding,
)
from lopsided.runtime.measure_updates import fractions_of, measure_update, trained_dtypes
from lopsided.runtime.rehearse import alone_s, together_s
from lopsided.runtime.wire import Wire
from lopsided.runtime.world import lasting_group
from lopsided.schedule import BUCKET_BYTES

Progress = Callable[[int, int], object]

_SPEEDS_PART, _OPS_PART, _UPDATES_PART, _LINKS_PART, _BESIDE_PART = 0.06, 0.36, 0.07, 0.28, 0.07  # of the budget
_PROBE_PART, _OVERHEAD_PART, _REHEARSAL_PART, _AT_MOST = 0.05, 0.01, 0.10, 0.25  # what a rehearsal should take, and may
_CROWDING_PART, _HIDING_PART = 0.05, 0.35  # beside it: where devices share a chip, and at most, where steps are short
_PATIENCE_S = 300.0  # how long a rank waits for another that still measures
_PASSES = 3  # over all jobs, so that a moment's noise meets no call twice
_LOOKS, _DISTURBED = 2, 1.25  # at every step that is rehearsed, some time apart; times the shortest is no look at it
_LATE = 2.0  # times its part of the budget that updates may take before the rest is left out
_UNKNOWN = Link(1e-5, 1e10)  # of a world where nobody talks
_SKEWED = 1.25  # times the mean that the largest piece must have to tell what skew costs


@dataclass(frozen=True, slots=True)
class Line:
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
    lines: tuple[Line, ...] = ()
    ways: tuple[Fit, ...] = ()
    drag: tuple[float, ...] = ()  # of each rank: computing lost while something is sent
    stretch: float = 1.0
    covered: float = 0.0  # part of a step's estimated seconds whose calls were measured
    noticed: tuple[Notice, ...] = ()
    rehearsed: tuple[float, ...] = ()  # of each rank: a step's calls over the same one by one; none if not rehearsed

    @property
    def op_noise(self) -> float:
        """Of all calls together, the long ones counting more."""
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
    with council_of(group) as council, undisturbed(device):
        devices = _measure_devices(graphs, device, council, optimizers, dtypes, budget_s, progress)
        seats, parts = devices.seats, devices.parts
        ranks = len(seats)
        kinds = kinds_of(seats, devices.found, devices.jobs, [0.0] * ranks, devices.overheads)
        cluster = Cluster("measured", _about(seats, budget_s, group), kinds, _UNKNOWN, _UNKNOWN)
        rehearsal: Rehearsal | None = None
        steps = _Steps()
        crowdings: tuple[float, ...] = ()
        if len(graphs) == 1:
            rehearsal = _agreed(council, prepared(graphs[0], cluster, _AT_MOST * budget_s))
            if rehearsal is not None:
                steps = _rehearsed(rehearsal, device, council, devices, budget_s)
            progress(parts - _link_parts(ranks), parts)
        if steps.corrections:
            talking = frozenset(job.text for job in devices.jobs if job.talks)
            tables = zip(devices.found, steps.corrections, strict=True)
            found = [corrected(table, correction, talking) for table, correction in tables]
            devices = replace(devices, found=found)
        if shared_chips(seats):
            budget = _CROWDING_PART * budget_s
            by_calls = measure_crowding(graphs, device, council, seats, devices.found, devices.jobs, budget)
            crowdings = tuple(
                whole or calls for whole, calls in zip(steps.crowdings or by_calls, by_calls, strict=True)
            )
        if steps.corrections or crowdings:
            kinds = kinds_of(seats, devices.found, devices.jobs, [0.0] * ranks, devices.overheads, crowdings)
            cluster = replace(cluster, kinds=kinds)
        fits: tuple[Fit, ...] = ()
        drags: tuple[float, ...] = (0.0,) * ranks
        if ranks > 1:
            left = iter(range(parts - _link_parts(ranks) + 1, parts + 1))
            world = _World(_talking(group, seats), council, device, *_sent(graphs), budget_s)
            cluster, fits, drags = _with_links(cluster, world, devices, lambda: progress(next(left), parts))
            if rehearsal is not None and steps.corrections:
                cluster = replace(cluster, packing=_packing(rehearsal, cluster, world))
        lines = tuple(_lines(cluster, devices))
        measurement = Measurement(
            cluster,
            statistics.fmean(line.error for line in lines) if lines else 0.0,
            statistics.fmean(fit.error for fit in fits) if fits else 0.0,
            time.perf_counter() - started,
            lines,
            fits,
            drags,
            cluster.stretch,
            covered(graphs, devices.jobs, seats[0].speeds),
            tuple(_noticed(cluster, devices)),
            steps.ratios,
        )
        # What rank 0 has found is what everyone goes by, to the last digit.
        told, *_ = council.hear((cluster.text(), measurement))
    text, chosen = cast(tuple[str, Measurement], told)
    return replace(chosen, cluster=parse_cluster(text, "measured"))


@contextmanager
def council_of(group: dist.ProcessGroup | None) -> Iterator[Council]:
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
    gpus = {chip_of(seat) for seat in seats if seat.gpu}
    return "nccl" if len(gpus) == len(seats) and dist.is_nccl_available() else "gloo"


def _talking(group: dist.ProcessGroup | None, seats: Sequence[Seat]) -> dist.ProcessGroup:
    whole = _whole(group)
    return _group_of(dist.get_process_group_ranks(whole), _backend(seats), "talk", whole)


def talkers_of(cluster: Cluster, device: torch.device, group: dist.ProcessGroup | None, council: Council) -> Talkers:
    """All of a group, ready to talk as they would in training."""
    seats = cast(list[Seat], council.hear(seat_of(device, Speeds((), 0.0, 0.0))))
    return _World(_talking(group, seats), council, device, torch.float32, 0, 0.0).talkers(cluster)


def _group_of(ranks: Sequence[int], backend: str, use: str, whole: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group for one use among all processes. Where only some of them measure, the group they gave does for all.

    Groups that only their members make are named by torch after their ranks alone, so a second one over the same ranks
    would find the first one's addresses; and those that all make must be made by all.
    """
    if len(dist.get_process_group_ranks(whole)) < dist.get_world_size():
        return whole
    return lasting_group(f"measuring, {use}", ranks, backend, _PATIENCE_S)


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

    seats: list[Seat]
    found: list[Found]
    jobs: tuple[Job, ...]
    calm: list[Calm]
    overheads: list[float]
    parts: int


def _measure_devices(
    graphs: Sequence[Graph],
    device: torch.device,
    council: Council,
    optimizers: Sequence[str],
    dtypes: Sequence[str],
    budget_s: float,
    progress: Progress,
) -> _Devices:
    load = Load(device)
    wanted = tuple(dict.fromkeys((*speed_dtypes(graphs), *dtypes)))
    speeds = measure_speeds(wanted, device, _SPEEDS_PART * budget_s)
    council.meet(load)
    seats = cast(list[Seat], council.hear(seat_of(device, speeds)))
    room = min(memory_of(seat, seats) for seat in seats)
    # Alone there is nothing to send, and more time to compute.
    part = _OPS_PART + (_LINKS_PART + _BESIDE_PART if len(seats) == 1 else 0.0)
    # Of several graphs none is rehearsed.
    ops_s = (part + (_REHEARSAL_PART if len(graphs) != 1 else 0.0)) * budget_s
    probed = _slowest_of_each(council, probe_calls(graphs, device, len(seats), room, _PROBE_PART * budget_s))
    shortest_s = SHORTEST_ON_GPU_S if all(seat.gpu for seat in seats) else SHORTEST_S
    jobs, slot = choose_jobs(graphs, [seat.speeds for seat in seats], room, ops_s, probed, shortest_s)
    updates = [(optimizer, dtype) for dtype in _trained(graphs) for optimizer in optimizers]
    parts = 1 + _PASSES * len(jobs) + len(updates) + (len(graphs) == 1) + _link_parts(len(seats))
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
    found, calms, uses, overheads = zip(*cast(list[tuple[Found, Calm, Used, float]], council.hear(told)), strict=True)
    return _Devices(seats, list(found), jobs, _with_others(seats, calms, uses), list(overheads), parts)


def _slowest_of_each(council: Council, found: dict[str, float]) -> dict[str, float]:
    """What the slowest rank took, of what all have tried."""
    everyone = cast(list[dict[str, float]], council.hear(found))
    return {text: max(one[text] for one in everyone) for text in found if all(text in one for one in everyone)}


def _run_jobs(
    graphs: Sequence[Graph],
    jobs: Sequence[Job],
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


def _agreed(council: Council, rehearsal: Rehearsal | None) -> Rehearsal | None:
    """It is for all or for none."""
    return rehearsal if all(council.hear(rehearsal is not None)) else None


@dataclass(frozen=True, slots=True)
class _Steps:
    """What whole steps tell of each rank: by what its calls are to be corrected to add up to them, how many times as
    long its own step takes as its calls, and how many times as long as with all others at rest (0 where that was not
    run). Nothing, unless all ranks know."""

    corrections: tuple[Correction, ...] = ()
    ratios: tuple[float, ...] = ()
    crowdings: tuple[float, ...] = ()


def _rehearsed(
    rehearsal: Rehearsal, device: torch.device, council: Council, devices: _Devices, budget_s: float
) -> _Steps:
    rank, got = _rank(council), devices.calm[_rank(council)].got
    seat = rank * rehearsal.smaller
    lasting_s = _REHEARSAL_PART * budget_s / 2 / _LOOKS
    load = Load(device)

    def look(what: Rehearsal | None, seat: int) -> float:
        watch = Stopwatch(device)
        council.meet(load)
        taken = None if what is None else alone_s(what.play, seat, device, lasting_s, watch.now)
        council.meet(load)
        # By the clock of the calls, and stretched as they are: it is too short to tell what a quota makes of it.
        return math.inf if taken is None else taken / got

    alone = prepared_alone(rehearsal, seat, _AT_MOST * budget_s)
    looks = [(look(rehearsal, seat), look(alone, 0)) for _ in range(_LOOKS)]
    share_s, all_s = (_undisturbed_mean(seconds) for seconds in zip(*looks, strict=True))
    with_share = Rehearsed(expected(rehearsal, seat), share_s) if share_s < math.inf else None
    with_all = Rehearsed(expected(alone, 0), all_s) if alone is not None and all_s < math.inf else None
    crowding = 0.0
    for turn in range(_turns(devices.seats)):
        council.gather()
        if with_all is not None and alone is not None and _has_turn(devices.seats, rank, turn):
            quiet_s = alone_s(alone.play, 0, device, lasting_s, time.perf_counter)
            crowding = crowding_of([quiet_s or 0.0], [all_s])
    mine = None if with_share is None else correction_by(with_share, with_all)
    told = (mine, 0.0 if with_share is None else round(with_share.ratio, 6), crowding)
    everyone = cast(list[tuple[Correction | None, float, float]], council.hear(told))
    corrections, ratios, crowdings = zip(*everyone, strict=True)
    return _Steps(corrections, ratios, crowdings) if None not in corrections else _Steps()


def _turns(seats: Sequence[Seat]) -> int:
    """How many ranks there are at most to a GPU. Of a processor that is shared, a step's own clock does not tell."""
    return max(map(len, shared_chips(seats)), default=0) if all(seat.gpu for seat in seats) else 0


def _has_turn(seats: Sequence[Seat], rank: int, turn: int) -> bool:
    return any(chip[turn : turn + 1] == (rank,) for chip in shared_chips(seats))


def _undisturbed_mean(seconds: Sequence[float]) -> float:
    """Without looks that took far longer than the shortest: whatever else a chip does makes a step longer.

    >>> _undisturbed_mean([1.0, 1.5]), _undisturbed_mean([1.5, 1.0, 1.25]), _undisturbed_mean([math.inf, math.inf])
    (1.0, 1.125, inf)
    """
    return statistics.fmean(s for s in seconds if s <= _DISTURBED * min(seconds))


def _packing(rehearsal: Rehearsal, cluster: Cluster, world: _World) -> float:
    """What gathering and scattering parameters costs beside sending them, by a whole step if there is time for one."""
    council, device, rank = world.council, world.device, _rank(world.council)
    hiding = _agreed(council, prepared_hiding(rehearsal, cluster, _HIDING_PART * world.budget_s))
    if hiding is None:
        return 1.0
    runs = alone_s(hiding.play, rank, device, 0.0, time.perf_counter) is not None
    if not all(council.hear(runs)):
        return 1.0
    return packing_of(hiding, together_s(hiding.play, world.talkers(cluster).wire, council, device))


def _rank(council: Council) -> int:
    return dist.get_rank(council.group) if council.group is not None else 0


def _trained(graphs: Sequence[Graph]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(dtype for graph in graphs for dtype in trained_dtypes(graph)))


def _calm(turns: Sequence[Turns], slowed: float) -> Calm:
    """Whether repeats agree, and whether the last turn agrees with the first."""
    scatters, first, last = [], 0.0, 0.0
    for there, _ in turns:
        times = [seconds for turn in there for seconds in turn]
        if len(times) > 2:
            scatters.append(statistics.median(times) / min(times) - 1)
        if len(there) > 1 and there[0] and there[-1]:
            first, last = first + typical(there[0]), last + typical(there[-1])
    return Calm(
        statistics.median(scatters) if scatters else 0.0,
        last / first - 1 if first else 0.0,
        got=1 / slowed,
        quota=quota_of_processors(),
    )


def _with_others(seats: Sequence[Seat], calm: Sequence[Calm], used: Sequence[Used]) -> list[Calm]:
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


def _lines(cluster: Cluster, devices: _Devices) -> Iterator[Line]:
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
            yield Line(number, entry.call, often, step_s, error, statistics.fmean(noises))


def _off_the_line(points: Points) -> float:
    """How far points are, relatively, from the line that prices are made of."""
    line = fitted_line(points)
    return statistics.fmean(abs(line.at(fraction) / seconds - 1) for fraction, seconds in points if seconds)


def _about(seats: Sequence[Seat], budget_s: float, group: dist.ProcessGroup | None) -> str:
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


# Links


@dataclass(frozen=True, slots=True)
class _World:
    """Whom to talk with, how to agree, on what, and for how long all of the measuring may take."""

    group: dist.ProcessGroup
    council: Council
    device: torch.device
    dtype: torch.dtype
    most_bytes: int  # that training sends at once
    budget_s: float

    def talkers(self, cluster: Cluster) -> Talkers:
        wire = Wire(self.group, self.device, Network(cluster))
        return Talkers(wire, self.council, Load(self.device), self.device, self.dtype)


def _link_parts(ranks: int) -> int:
    return TURNS * len(WAYS) + 1 if ranks > 1 else 0


def _sent(graphs: Sequence[Graph]) -> tuple[torch.dtype, int]:
    """What most of the bytes are that training sends, and how many at once: the gradients of parameters."""
    sizes: dict[torch.dtype, int] = {}
    for leaf in (leaf for graph in graphs for leaf in graph.parameters):
        if leaf.value.grad:
            sizes[leaf.value.torch_dtype] = sizes.get(leaf.value.torch_dtype, 0) + leaf.value.bytes
    return max(sizes, key=sizes.__getitem__, default=torch.float32), min(sum(sizes.values()), BUCKET_BYTES)


def _with_links(
    cluster: Cluster, world: _World, devices: _Devices, step: Callable[[], object]
) -> tuple[Cluster, tuple[Fit, ...], tuple[float, ...]]:
    """The cluster with its collectives measured, their fits, and the drag of each rank."""
    # Groups inside hosts must be made by all processes: where only some measure, all links are taken to be alike.
    all_measure = dist.get_world_size(world.group) == dist.get_world_size()
    has_two_links = 1 < cluster.nodes < cluster.devices
    within = _inside_hosts(cluster, world, devices.seats) if has_two_links and all_measure else None
    talkers = world.talkers(cluster)
    unequal = _unequal([1 / pace for pace in paces(devices.seats, devices.found, devices.jobs)])
    fits = fit_ways(talkers, _LINKS_PART * world.budget_s, unequal=unequal, step=step, most_bytes=world.most_bytes)
    gather = next(fit.link for fit in fits if (fit.collective, fit.way) == ("all_gather", "padded"))
    n, nodes = cluster.devices, cluster.nodes
    # The model of a padded all_gather (collectives.py), solved for the link.
    crossing = max(gather.latency_s - (n - nodes) * within.latency_s, 0.0) if within else gather.latency_s
    link = Link(crossing / ((nodes - 1) or (n - 1)), max(gather.bytes_per_s * (n - 1) / n, 1.0))
    pairs: tuple[tuple[str, str, Link], ...] = ()
    if 2 < nodes <= MOST_NODES:
        link, pairs = unlike_pairs(talkers, node_names(devices.seats), link)
    reduce = next(fit.link for fit in fits if fit.collective == "all_reduce")
    beside = _beside(talkers, reduce, _BESIDE_PART * world.budget_s)
    drags = tuple(cast(list[float], world.council.hear(beside.drag)))
    step()
    return (
        replace(
            cluster,
            kinds=_dragging(cluster, drags),
            within=within or link,
            between=link,
            collectives=tuple((fit.collective, fit.way, fit.link) for fit in fits),
            pairs=pairs,
            stretch=beside.stretch,
        ),
        fits,
        drags,
    )


def _beside(talkers: Talkers, reduce: Link, budget_s: float) -> Beside:
    """With as much as takes an eighth of the time there is, so that it can be sent several times."""
    fitting = max(budget_s / 8 - reduce.latency_s, 0.0) * reduce.bytes_per_s
    return measure_beside(talkers, int(min(max(fitting, SMALLEST_BYTES), LARGEST_BYTES)), budget_s)


def _dragging(cluster: Cluster, drags: Sequence[float]) -> tuple[Kind, ...]:
    spans = zip(cluster.kinds, cluster.spans, strict=True)
    return tuple(replace(kind, drag=statistics.fmean(drags[first:last])) for kind, (first, last) in spans)


def _unequal(speeds: Sequence[float]) -> tuple[float, ...]:
    """Shares to measure what skew costs with: by speed, if that is unequal enough.

    >>> _unequal([1.0, 1.0, 1.0, 1.0])
    (0.5, 0.25, 0.125, 0.125)
    """
    n, total = len(speeds), sum(speeds)
    if n * max(speeds) / total < _SKEWED:
        speeds = [4.0, 2.0, *[1.0] * (n - 2)] if n > 2 else [3.0, 1.0]
        total = sum(speeds)
    return tuple(speed / total for speed in speeds)


def _inside_hosts(cluster: Cluster, world: _World, seats: Sequence[Seat]) -> Link:
    """The link of the slowest host, all hosts talking to themselves at once."""
    ranks, me = dist.get_process_group_ranks(world.group), dist.get_rank(world.group)
    nodes = node_names(seats)
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
        here = _World(group, Council(council), world.device, world.dtype, world.most_bytes, world.budget_s)
        each = _LINKS_PART * world.budget_s / len(WAYS)
        (fit,) = fit_ways(here.talkers(part), each, (("all_gather", "padded"),))
        size, line = len(inside), fit.link
        found = Link(line.latency_s / (size - 1), max(line.bytes_per_s * (size - 1) / size, 1.0))
    told = [link for link in cast(list[Link | None], world.council.hear(found)) if link is not None]
    return Link(max(link.latency_s for link in told), min(link.bytes_per_s for link in told))
