"""Dry runs: whole steps on random leaves, and what they tell of calls that were measured one by one.

In: a program with its cluster and shares (`Play`), and a communicator, or nobody to talk with. Out: seconds of a pass
there and back, of one device over a network that answers at once (`alone_s`), or of all together (`together_s`).
Nothing of a model is needed but its graph, and nothing of it is changed.

Profiling makes three of them of a graph and a cluster whose calls are measured (`agreed`). One by one and again and
again, a call finds its operands in a cache and its memory at hand; in a step it comes after all the others. So data
parallelism is run as this device would run it, with shares by speed, forward and backward, over a network that answers
at once; and, where there is room and time, the model as one device alone would run it: with a larger piece of the batch
a step may be another matter, and alone nobody norms a batch together with others. By what both take the calls are
corrected (`StepTimings`). Once links are measured data parallelism is run together with everyone, with all parameters
gathered ahead of their use and their gradients scattered: what that takes beyond what calls and collectives add up to
is what programs that gather parameters cost, whatever it is that hosts do then (`packing`).
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from lopsided.calibration.calibrate import DRY_RUN, Expected, ObservedCalls, Scope
from lopsided.calibration.comparison import expected_calls, without_overhead
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.coefficients import KIND, coefficient
from lopsided.cluster.collectives import Network
from lopsided.cluster.devices import Link
from lopsided.comm.communicator import Communicator
from lopsided.comm.in_process import LoneCommunicator
from lopsided.comm.redistribute import Redistributor
from lopsided.errors import LopsidedError
from lopsided.executor.executor import Executor
from lopsided.executor.gradients import Gradients
from lopsided.executor.randomness import RankRandomness
from lopsided.executor.rounds import run_rounds
from lopsided.ir.graph import Graph, Leaf
from lopsided.ir.placement import Placement, Shares, pieces_of
from lopsided.ir.program import Program, RuleBook, one_device
from lopsided.ops.derive import derive_rules
from lopsided.ops.op import Call
from lopsided.planner.baselines import STATE, data_parallel, stored_cut
from lopsided.planner.search_cost import SharePrices
from lopsided.profiling.kinds import RankHost
from lopsided.profiling.links import ControlGroup
from lopsided.profiling.noise import BackgroundLoad, Stopwatch, wait_for
from lopsided.profiling.op_times import REFUSED, drawn, indices_below
from lopsided.profiling.overlap import contention_of, shared_chips
from lopsided.profiling.topology import Topology
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.decisions import BUCKET_BYTES, Decisions, Rerun
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, holdings
from lopsided.schedule.pricing import PricedStep, price
from lopsided.schedule.stretches import most_nodes
from lopsided.schedule.timeline import run

# The fewest steps that a median is taken of, after one step to warm up.
FEWEST = 3

_LOOKUPS = ("embedding", "gather", "index", "scatter", "take_along_dim", "one_hot", "cross_entropy", "nll_loss")


@dataclass(frozen=True, slots=True)
class Play:
    """What is run. Shares are in the order of the ranks."""

    program: Program
    cluster: Cluster
    shares: Shares
    bucket_bytes: int = BUCKET_BYTES
    regather: bool = False
    stretch: int = 0
    reruns: tuple[Rerun, ...] = ()
    kinds: tuple[int, ...] = ()  # the kind of each rank's device, where some run again what others keep
    microbatches: int = 1


def alone_s(
    play: Play, rank: int, device: torch.device, lasting_s: float, now: Callable[[], float], fewest: int = FEWEST
) -> float | None:
    """The median on the clock `now`, of so many steps and more for so long; None if an op refuses random operands."""
    casts = {node.context.autocast.partition(":")[0] for node in play.program.graph.nodes}
    if not casts <= {"", device.type}:
        return None  # another device's autocast would not cast here
    if device.type == "cuda" and not play.stretch:
        # As steps run there, so that calls are corrected to what they take when they are compiled.
        play = replace(play, stretch=most_nodes(play.cluster.devices, len(play.program.steps)))
    times: list[float] = []
    try:
        with _training():
            step = stepper(play, LoneCommunicator(rank, play.cluster.devices), device)
            step()
            until = time.perf_counter() + lasting_s
            while len(times) < fewest or time.perf_counter() < until:
                started = now()
                step()
                times.append(now() - started)
    except REFUSED:
        return None
    return statistics.median(times)


def together_s(play: Play, communicator: Communicator | None, council: ControlGroup, device: torch.device) -> float:
    """The median of a few steps until the last rank was done, everyone sending what there is to send.

    To be called by all ranks, once all know that it runs: one that gives up would leave the others waiting. Who has no
    communicator has no part in it and looks on.
    """
    times: list[float] = []
    with _training():
        step = stepper(play, communicator, device) if communicator is not None else lambda: None
        step()
        for _ in range(FEWEST):
            council.gather()
            started = time.perf_counter()
            step()
            times.append(council.slowest(time.perf_counter() - started))
    return statistics.median(times)


@contextmanager
def _training() -> Iterator[None]:
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def stepper(play: Play, communicator: Communicator, device: torch.device) -> Callable[[], None]:
    """A pass there and back."""
    program, shares = play.program, play.shares
    exchange = Redistributor(communicator, shares, Network(play.cluster))
    gradients = Gradients(exchange)
    placed = dict(program.leaves)
    leaves = {
        leaf.value.name: _leaf(leaf, program.graph, placed[leaf.value.name], shares, communicator.rank, device)
        for leaf in program.graph.leaves
    }
    parameters = {leaf.target: cast(nn.Parameter, leaves[leaf.value.name]) for leaf in program.graph.parameters}
    decisions = Decisions(
        play.bucket_bytes,
        regather=play.regather,
        stretch=play.stretch,
        reruns=play.reruns,
        microbatches=play.microbatches,
    )
    schedule = lower(program, decisions)
    kind = play.kinds[communicator.rank] if play.kinds else 0
    random = RankRandomness(0, communicator.rank, device)
    steps = Executor(schedule, exchange, gradients, random, parameters, device, kind=kind)

    one = torch.ones((), device=device)

    def step() -> None:
        for parameter in parameters.values():
            parameter.grad = None
        ran = run_rounds(steps, gradients, parameters.values(), lambda _: leaves, one)
        ran.taken_over(gradients, one)
        ran.rounds[-1].loss.reshape(()).backward()
        gradients.finish()
        wait_for(device)

    return step


def _leaf(leaf: Leaf, graph: Graph, placement: Placement, shares: Shares, rank: int, device: torch.device) -> Tensor:
    value = leaf.value
    if leaf.kind == "constant":
        return torch.tensor(leaf.data, dtype=value.torch_dtype, device=device).reshape(value.shape)
    pieces = pieces_of(placement, value.shape, shares) if placement.is_shard else ()
    shape = placement.local_shape(value.shape, pieces, rank)
    tensor = drawn(value, shape, (), _below(value.name, graph), device).detach()
    if leaf.kind != "parameter":
        return tensor
    if len(shape) > 1 and tensor.is_floating_point():
        # About as large as a model begins with: else values overflow or vanish, and processors are slow at tiny ones.
        tensor = (tensor - 0.5) * (4 / math.sqrt(max(math.prod(shape[1:]), 1)))
    return nn.Parameter(tensor, requires_grad=value.grad)


def _below(name: str, graph: Graph) -> int:
    """A bound for the whole numbers of a leaf that suits all who look something up by it, or by what becomes of it."""
    reached, bounds = {name}, list[int]()
    for node in graph.nodes:
        if reached.isdisjoint(node.operands):
            continue
        packet = node.op.split(".")[1] if "." in node.op else node.op
        if packet.startswith(_LOOKUPS):
            bounds.append(indices_below(Call.of(node, graph.values)))
        else:
            reached |= {v.name for v in node.results if not (v.torch_dtype.is_floating_point or v.dtype == "bool")}
    return min(bounds, default=2)


# What to run

_LIBRARIES = 0.03
"""The part of a GPU's memory that libraries take for themselves, beside tensors: assumed."""


def forget_peaks(device: torch.device) -> None:
    """What comes is a step alone, in memory without gaps."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def memory_reserve(device: torch.device) -> float:
    """The part of its memory that a plan should leave free, after dry runs: how much more the allocator took at its
    peak than tensors had, and what libraries take. Of a device that has no such allocator, what is usual."""
    row = coefficient(KIND, "memory_reserve")
    taken = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    if not taken or row.default is None:
        return row.default or 0.0
    return row.clamp(1 - torch.cuda.max_memory_allocated(device) / taken + _LIBRARIES)


# A dry run is made only where memory has 1.2 times what it is predicted to hold: allocators leave gaps.
_ROOM = 1.2
_SMALLER = (1, 2, 4)
"""As if there were so many times as many devices, where a piece of the batch is too large for the memory."""
# Measured calls must make up a third of a step's expected seconds; with less, a step says little about them.
_KNOWN = 1 / 3
_SLOW = Link(1.0, 1e6)
"""So that no op leaves the batch's cut for one that rounds a little better."""
_MOST_PACKING, _HALVINGS = 1e5, 30
_BITS, _LEAST_BYTES = 8, 2**18


@dataclass(frozen=True, slots=True)
class DryRun:
    """Data parallelism on a cluster, with shares by speed; in time as it is, and as if nothing lay around calls."""

    book: RuleBook
    program: Program
    cluster: Cluster
    shares: Shares
    priced: PricedStep
    bare: PricedStep
    bucket_bytes: int = BUCKET_BYTES
    smaller: int = 1  # device k of the cluster that was measured is device k · smaller of this one

    @property
    def play(self) -> Play:
        return Play(self.program, self.cluster, self.shares, self.bucket_bytes)


def prepared(graph: Graph, cluster: Cluster, budget_s: float) -> DryRun | None:
    """What to run dry; None where it does not fit into memory or time, or was hardly measured, and then for everyone.

    Decided by what all devices know of each other.
    """
    if not all(kind.measured for kind in cluster.kinds):
        return None
    try:
        book = derive_rules(graph)
    except LopsidedError:
        return None
    for smaller in _SMALLER:
        kinds = tuple(replace(kind, count=smaller * kind.count) for kind in cluster.kinds)
        found = _laid_out(book, replace(cluster, kinds=kinds))
        if found is None or not all(_has_some(found, rank) for rank in range(found.cluster.devices)):
            return None
        if _fits(found):
            everyone = [expected_calls(found, rank) for rank in range(found.cluster.devices)]
            known = all(one.measured_s > _KNOWN * one.all_s for one in everyone)
            return replace(found, smaller=smaller) if known and _in_time(everyone, budget_s) else None
    return None


def prepared_alone(dry: DryRun, rank: int, budget_s: float) -> DryRun | None:
    """The whole batch on this device by itself; None where that does not fit into memory or time, or is the same."""
    if dry.cluster.devices == 1:
        return None
    kind = dry.cluster.device_kinds[rank]
    alone = replace(dry.cluster, kinds=(replace(kind, nodes=1, count=1),))
    found = _laid_out(dry.book, alone)
    return found if found is not None and _fits(found) and _in_time([expected_calls(found, 0)], budget_s) else None


def _laid_out(book: RuleBook, cluster: Cluster) -> DryRun | None:
    """Data parallelism with shares by speed, or one device alone, where nobody knows of links."""
    graph = book.graph
    cluster = replace(cluster, within=_SLOW, between=_SLOW, collectives=(), pairs=())
    speeds = [kind.speed for kind in cluster.device_kinds]
    shares = Shares(tuple(speed / sum(speeds) for speed in speeds))
    costs = Costs(graph, cluster, optimizer_named("sgd"))
    bare = Costs(graph, without_overhead(cluster), costs.optimizer)
    try:
        # Alone an op is itself: it has nobody to talk with.
        program = (
            one_device(graph)
            if cluster.devices == 1
            else data_parallel(book, SharePrices(costs, Scale(cluster, shares)))
        )
    except LopsidedError:
        return None
    schedule = lower(program)
    return DryRun(book, program, cluster, shares, price(schedule, costs), price(schedule, bare))


def _fits(dry: DryRun) -> bool:
    cluster = dry.cluster
    what = holdings(dry.priced.schedule, optimizer_named("sgd"), devices=cluster.devices)
    held = bytes_per_kind(what, Scale(cluster, dry.shares))
    return all(_ROOM * size <= kind.memory_bytes for size, kind in zip(held, cluster.kinds, strict=True))


def _in_time(everyone: Sequence[Expected], budget_s: float) -> bool:
    return (FEWEST + 1) * max(one.all_s for one in everyone) < budget_s


def _has_some(dry: DryRun, rank: int) -> bool:
    """Whether a rank has some of the batch: without, there is no step to speak of."""
    graph, placed = dry.program.graph, dict(dry.program.leaves)
    shards = [(placed[leaf.value.name], leaf.value.shape) for leaf in graph.leaves if placed[leaf.value.name].is_shard]
    return all(pieces_of(placement, shape, dry.shares)[rank] for placement, shape in shards)


# All together


def prepared_hiding(dry: DryRun, cluster: Cluster, budget_s: float) -> DryRun | None:
    """The same with every parameter stored cut in equal pieces, and sent a bit at a time: nearly all of it behind
    computing.

    None where there is no time for it, or no room for pieces of the batch. `cluster` is the one with its links.
    """
    if dry.smaller > 1:
        return None
    size = sum(leaf.value.bytes for leaf in dry.program.graph.parameters)
    bit = min(max(size // _BITS, _LEAST_BYTES), BUCKET_BYTES)
    equal = (1 / cluster.devices,) * cluster.devices
    program, shares = stored_cut(dry.program), Shares(dry.shares.work, named=((STATE, equal),))
    hiding = replace(dry, program=program, cluster=cluster, shares=shares, bucket_bytes=bit)
    # Once alone, to see that it runs, and once together.
    return hiding if 2 * (FEWEST + 1) * predicted_s(hiding, 1.0) < budget_s else None


def packing_of(dry: DryRun, step_s: float) -> float:
    """How many times as long as reading and writing once packing must take for a pass to take so long."""
    low, high = 0.0, math.log(_MOST_PACKING)
    if predicted_s(dry, 1.0) >= step_s:
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if predicted_s(dry, math.exp(middle)) < step_s:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def predicted_s(dry: DryRun, packing: float) -> float:
    """Seconds of a pass there and back, as predicted."""
    cluster = replace(dry.cluster, packing=packing)
    costs = Costs(dry.program.graph, cluster, optimizer_named("sgd"))
    schedule = lower(dry.program, Decisions(dry.bucket_bytes))
    told = run(price(schedule, costs), costs.network, Scale(cluster, dry.shares))
    return told.forward_s + told.backward_s


# Looks at it

# The part of the profiling budget that dry runs are given, and the most that they may take of it.
REHEARSAL_PART, _AT_MOST = 0.10, 0.25
# The most, in parts of the budget, that the step of all ranks together may take on top of it.
_HIDING_PART = 0.35
# How often each dry run is timed before links are measured, and how often after that.
LOOKS_BEFORE, LOOKS_AFTER = 2, 1
_LOOKS = LOOKS_BEFORE + LOOKS_AFTER
# A timing of more than 1.1 times the shortest one is left out of the mean: something else used the chip.
_DISTURBED = 1.1


def agreed(graph: Graph, cluster: Cluster, council: ControlGroup, budget_s: float) -> DryRun | None:
    """The dry run to make; it is for all or for none."""
    return _for_all(council, prepared(graph, cluster, _AT_MOST * budget_s))


@dataclass(frozen=True, slots=True)
class StepMeasurements:
    """What whole steps tell of each rank: its own step and, where that was run, one with the whole batch, each beside
    what tables say of it; and how many times as long as with all others at rest it took (0 where that was not run).
    Nothing, unless all ranks know."""

    observed: tuple[ObservedCalls, ...] = ()
    contentions: tuple[float, ...] = ()


class StepTimings:
    """Seconds of this rank's part of a step, and of a whole one by itself, taken again after some time: in the busy
    moment of a machine that others use, all calls together look slower than they are. All ranks do all of it."""

    def __init__(self, dry: DryRun, device: torch.device, council: ControlGroup, got: float, budget_s: float) -> None:
        """`got` is the part of the time that this one's process runs."""
        self._device, self._council, self._got = device, council, got
        self._seat = council.rank * dry.smaller
        self._share, self._all = dry, prepared_alone(dry, self._seat, _AT_MOST * budget_s)
        self._lasting_s = REHEARSAL_PART * budget_s / 2 / _LOOKS
        self._load = BackgroundLoad(device)
        self._looks: list[tuple[float, float]] = []

    def take(self, count: int) -> None:
        for _ in range(count):
            self._looks.append((self._seconds(self._share, self._seat), self._seconds(self._all, 0)))

    def _seconds(self, what: DryRun | None, seat: int) -> float:
        watch = Stopwatch(self._device)
        self._council.meet(self._load)
        taken = None if what is None else alone_s(what.play, seat, self._device, self._lasting_s, watch.now)
        self._council.meet(self._load)
        # By the clock of the calls, and stretched as they are: it is too short to tell what a quota makes of it.
        return math.inf if taken is None else taken / self._got

    def tell(self, seats: Sequence[RankHost]) -> StepMeasurements:
        """What they come to."""
        share_s, all_s = (_undisturbed_mean(seconds) for seconds in zip(*self._looks, strict=True))
        whole = self._all if all_s < math.inf else None
        rank, mine = self._council.rank, list[ObservedCalls]()
        if share_s < math.inf:
            mine.append(ObservedCalls(rank, Scope.CALLS, expected_calls(self._share, self._seat), share_s))
            if whole is not None:
                mine.append(ObservedCalls(rank, Scope.CALLS, expected_calls(whole, 0), all_s))
        quiet_s = _with_others_at_rest(whole, self._device, self._council, seats, self._lasting_s)
        contention = contention_of([quiet_s], [all_s]) if quiet_s else 0.0
        everyone = cast(list[tuple[list[ObservedCalls], float]], self._council.hear((mine, contention)))
        observed, contentions = zip(*everyone, strict=True)
        if not all(steps and DRY_RUN.holds(steps[0]) for steps in observed):
            return StepMeasurements()
        return StepMeasurements(tuple(step for steps in observed for step in steps), contentions)


def _with_others_at_rest(
    what: DryRun | None, device: torch.device, council: ControlGroup, seats: Sequence[RankHost], lasting_s: float
) -> float:
    """Seconds of a step while the others of this rank's GPU wait for their turn; 0 where it was not run.

    Of a processor that is shared the clock of a step does not tell: it counts seconds of work (`Stopwatch`).
    """
    taken = None
    chips = shared_chips(seats) if all(seat.gpu for seat in seats) else ()
    for turn in range(max(map(len, chips), default=0)):
        council.gather()
        if what is not None and any(chip[turn : turn + 1] == (council.rank,) for chip in chips):
            taken = alone_s(what.play, 0, device, lasting_s, time.perf_counter)
    return taken or 0.0


def _undisturbed_mean(seconds: Sequence[float]) -> float:
    """Without looks that took far longer than the shortest: whatever else a chip does makes a step longer.

    >>> _undisturbed_mean([1.15, 1.15, 1.0]), _undisturbed_mean([1.5, 1.0, 1.1]), _undisturbed_mean([math.inf] * 2)
    (1.0, 1.05, inf)
    """
    return statistics.fmean(s for s in seconds if s <= _DISTURBED * min(seconds))


def packing(dry: DryRun, cluster: Cluster, world: Topology) -> float:
    """What gathering and scattering parameters costs beside sending them, by a whole step if there is time for one."""
    council, device, rank = world.council, world.device, world.council.rank
    hiding = _for_all(council, prepared_hiding(dry, cluster, _HIDING_PART * world.budget_s))
    if hiding is None:
        return 1.0
    runs = alone_s(hiding.play, rank, device, 0.0, time.perf_counter) is not None
    if not all(council.hear(runs)):
        return 1.0
    return packing_of(hiding, together_s(hiding.play, world.talkers(cluster).communicator, council, device))


def _for_all(council: ControlGroup, dry: DryRun | None) -> DryRun | None:
    """It is for all or for none."""
    return dry if all(council.hear(dry is not None)) else None
