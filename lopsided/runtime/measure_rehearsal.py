"""A whole step against the sum of its calls: what calls that were measured one by one do not tell.

In: a graph, a cluster whose calls are measured, which of its devices this is. Out: how many times as long a step's
calls take as they were measured to (`ratio_of`), from what the tables say (`expected`) and what a step took
(`step_seconds`); and how many times as long as reading and writing it once it takes to pack what is gathered and
scattered (`packing_of`), from what a step took all ranks together (`step_together`).

One by one and again and again, a call finds its operands in a cache and its memory at hand; in a step it comes after
all the others. So data parallelism is run as this device would run it, with shares by speed, forward and backward, over
a network that answers at once; and, where there is room and time, the model as one device alone would run it: with a
larger piece of the batch a step may be another matter, and alone nobody norms a batch together with others. Once links
are measured data parallelism is run together with everyone, with all parameters gathered ahead of their use and their
gradients scattered: what that takes beyond what calls and collectives add up to is what programs that gather parameters
cost, whatever it is that hosts do then.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from lopsided.classics import STATE, data_parallel, stored_cut
from lopsided.cluster import Cluster
from lopsided.collectives import Network
from lopsided.cost import Costs, Scale, optimizer_named
from lopsided.devices import Kind, Link
from lopsided.errors import LopsidedError
from lopsided.graph import Graph, Leaf
from lopsided.memory import bytes_per_kind, holdings
from lopsided.ops.op import Call
from lopsided.placement import Placement, Shares, pieces_of
from lopsided.prices import SharePrices
from lopsided.program import Program
from lopsided.rules import RuleBook, derive_rules
from lopsided.runtime.echo import Echo
from lopsided.runtime.exchange import Exchange
from lopsided.runtime.gradients import Gradients
from lopsided.runtime.measure_links import Council
from lopsided.runtime.measure_load import wait_for
from lopsided.runtime.measure_ops import REFUSED, drawn, indices_below
from lopsided.runtime.randomness import Randomness
from lopsided.runtime.steps import Steps
from lopsided.runtime.wire import Wire
from lopsided.schedule import BUCKET_BYTES, Compute, Schedule, lay_out
from lopsided.simulate import one_device
from lopsided.timeline import run
from lopsided.work import call_texts

_FEWEST = 3  # steps, after one to warm up
_ROOM = 1.2  # times what a step is predicted to hold
_SMALLER = (1, 2, 4)
"""As if there were so many times as many devices, where a piece of the batch is too large for the memory."""
_LEAST, _LARGEST = 0.25, 8.0
"""Beyond these, what was run is not what was priced."""
_KNOWN = 1 / 3  # of a step, at the least: what was measured answers for the rest
_SLOW = Link(1.0, 1e6)
"""So that no op leaves the batch's cut for one that rounds a little better."""
_MOST_PACKING, _HALVINGS = 1e5, 30
_BITS, _LEAST_BYTES = 8, 2**18
_LOOKUPS = ("embedding", "gather", "index", "scatter", "take_along_dim", "one_hot", "cross_entropy", "nll_loss")


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Data parallelism on a cluster, with shares by speed; in time as it is, and as if nothing lay around calls."""

    book: RuleBook
    program: Program
    cluster: Cluster
    shares: Shares
    schedule: Schedule
    bare: Schedule
    bucket_bytes: int = BUCKET_BYTES
    smaller: int = 1  # device k of the cluster that was measured is device k · smaller of this one

    def number_of(self, rank: int) -> int:
        """That of a device's kind."""
        return next(k for k, (start, stop) in enumerate(self.cluster.spans) if start <= rank < stop)

    def kind_of(self, rank: int) -> Kind:
        return self.cluster.kinds[self.number_of(rank)]


def prepared(graph: Graph, cluster: Cluster, budget_s: float) -> Rehearsal | None:
    """What to rehearse; None where it does not fit into memory or time, or was hardly measured, and then for everyone.

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
            everyone = [expected(found, rank) for rank in range(found.cluster.devices)]
            known = all(one.measured_s > _KNOWN * one.all_s for one in everyone)
            return replace(found, smaller=smaller) if known and _in_time(everyone, budget_s) else None
    return None


def prepared_alone(rehearsal: Rehearsal, rank: int, budget_s: float) -> Rehearsal | None:
    """The whole batch on this device by itself; None where that does not fit into memory or time, or is the same."""
    if rehearsal.cluster.devices == 1:
        return None
    kind = rehearsal.kind_of(rank)
    alone = replace(rehearsal.cluster, kinds=(replace(kind, nodes=1, count=1),))
    found = _laid_out(rehearsal.book, alone)
    return found if found is not None and _fits(found) and _in_time([expected(found, 0)], budget_s) else None


def _laid_out(book: RuleBook, cluster: Cluster) -> Rehearsal | None:
    """Data parallelism with shares by speed, or one device alone, where nobody knows of links."""
    graph = book.graph
    cluster = replace(cluster, within=_SLOW, between=_SLOW, collectives=(), pairs=())
    speeds = [kind.speed for kind in cluster.kinds for _ in range(kind.devices)]
    shares = Shares(tuple(speed / sum(speeds) for speed in speeds))
    costs = Costs(graph, cluster, optimizer_named("sgd"))
    kinds = tuple(replace(kind, overhead_s=0.0) for kind in cluster.kinds)
    bare = Costs(graph, replace(cluster, kinds=kinds), costs.optimizer)
    try:
        # Alone an op is itself: it has nobody to talk with.
        program = (
            one_device(graph)
            if cluster.devices == 1
            else data_parallel(book, SharePrices(costs, Scale(cluster, shares)))
        )
    except LopsidedError:
        return None
    return Rehearsal(book, program, cluster, shares, lay_out(program, costs), lay_out(program, bare))


def _fits(rehearsal: Rehearsal) -> bool:
    cluster = rehearsal.cluster
    what = holdings(rehearsal.program, optimizer_named("sgd"), devices=cluster.devices)
    held = bytes_per_kind(what, Scale(cluster, rehearsal.shares))
    return all(_ROOM * size <= kind.memory_bytes for size, kind in zip(held, cluster.kinds, strict=True))


def _in_time(everyone: Sequence[Expected], budget_s: float) -> bool:
    return (_FEWEST + 1) * max(one.all_s for one in everyone) < budget_s


def _has_some(rehearsal: Rehearsal, rank: int) -> bool:
    """With an empty piece of the batch there is no step to speak of."""
    graph, placed = rehearsal.program.graph, dict(rehearsal.program.leaves)
    shards = [(placed[leaf.value.name], leaf.value.shape) for leaf in graph.leaves if placed[leaf.value.name].is_shard]
    return all(pieces_of(placement, shape, rehearsal.shares)[rank] for placement, shape in shards)


# What tables say


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of a pass there and back: of the calls that were measured, and of the rest: estimates, and what lies
    around calls."""

    measured_s: float
    rest_s: float

    @property
    def all_s(self) -> float:
        return self.measured_s + self.rest_s


def expected(rehearsal: Rehearsal, rank: int) -> Expected:
    cluster, graph = rehearsal.cluster, rehearsal.program.graph
    number = rehearsal.number_of(rank)
    tables = {entry.call: entry for entry in cluster.kinds[number].measured}
    steps = {step.node.name: step for step in rehearsal.program.steps}

    def seconds(item: Compute) -> float:
        if item.cut is None:
            return item.seconds[number].at(1.0)
        by, length = item.cut
        return item.seconds[number].at(rehearsal.shares.cut(length, by)[rank] / max(length, 1))

    def is_measured(item: Compute) -> bool:
        step = steps[item.node]
        texts = call_texts(step.node, graph.values, step.rule.how)
        entry = next((tables[text] for text in texts if text in tables), None)
        return entry is not None and bool(entry.backward if item.backward else entry.forward)

    measured_s = sum(seconds(item) for item in _passes(rehearsal.bare) if is_measured(item))
    return Expected(measured_s, sum(seconds(item) for item in _passes(rehearsal.schedule)) - measured_s)


def _passes(schedule: Schedule) -> list[Compute]:
    return [item for item in (*schedule.forward, *schedule.backward) if isinstance(item, Compute)]


@dataclass(frozen=True, slots=True)
class Ratio:
    """What the measured calls of a device are to be multiplied by: with its share of the batch, and, where that was
    run, with the whole."""

    share: float
    with_share: float
    with_all: float | None = None

    def at(self, fraction: float) -> float:
        """With another piece of the batch: in between, on a line.

        >>> Ratio(0.5, 1.4, 1.0).at(0.75), Ratio(0.5, 1.4, 1.0).at(0.25), Ratio(0.5, 1.4).at(1.0)
        (1.2, 1.4, 1.4)
        """
        if self.with_all is None or self.share >= 1:
            return self.with_share
        part = min(max((fraction - self.share) / (1 - self.share), 0.0), 1.0)
        return round(self.with_share + part * (self.with_all - self.with_share), 6)


def ratio_of(told: Expected, step_s: float) -> float | None:
    """What the measured calls are to be multiplied by, so that all adds up to a step; None where that is beyond belief.

    >>> ratio_of(Expected(0.8, 0.2), 1.08)
    1.1
    """
    ratio = (step_s - told.rest_s) / told.measured_s
    return round(ratio, 6) if _LEAST <= ratio <= _LARGEST else None


# All together


def prepared_hiding(rehearsal: Rehearsal, cluster: Cluster, budget_s: float) -> Rehearsal | None:
    """The same with every parameter stored cut in equal pieces, and sent a bit at a time: nearly all of it behind
    computing.

    None where there is no time for it, or no room for pieces of the batch. `cluster` is the one with its links.
    """
    if rehearsal.smaller > 1:
        return None
    size = sum(leaf.value.bytes for leaf in rehearsal.program.graph.parameters)
    bit = min(max(size // _BITS, _LEAST_BYTES), BUCKET_BYTES)
    equal = (1 / cluster.devices,) * cluster.devices
    program, shares = stored_cut(rehearsal.program), Shares(rehearsal.shares.work, named=((STATE, equal),))
    hiding = replace(rehearsal, program=program, cluster=cluster, shares=shares, bucket_bytes=bit)
    # Once alone, to see that it runs, and once together.
    return hiding if 2 * (_FEWEST + 1) * predicted_s(hiding, 1.0) < budget_s else None


def step_together(rehearsal: Rehearsal, wire: Wire, council: Council, device: torch.device) -> float:
    """Seconds until the last rank has done a pass there and back, everyone sending what there is to send.

    To be called by all ranks, once all know that it runs: one that gives up would leave the others waiting.
    """
    with torch.inference_mode(False), torch.enable_grad():
        step = _stepper(rehearsal, wire, device)
        step()
        times = []
        for _ in range(_FEWEST):
            council.gather()
            started = time.perf_counter()
            step()
            times.append(council.slowest(time.perf_counter() - started))
    return statistics.median(times)


def packing_of(rehearsal: Rehearsal, step_s: float) -> float:
    """How many times as long as reading and writing once packing must take for a pass to take so long."""
    low, high = 0.0, math.log(_MOST_PACKING)
    if predicted_s(rehearsal, 1.0) >= step_s:
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if predicted_s(rehearsal, math.exp(middle)) < step_s:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def predicted_s(rehearsal: Rehearsal, packing: float) -> float:
    """Of a pass there and back."""
    cluster = replace(rehearsal.cluster, packing=packing)
    costs = Costs(rehearsal.program.graph, cluster, optimizer_named("sgd"))
    schedule = lay_out(rehearsal.program, costs, bucket_bytes=rehearsal.bucket_bytes)
    told = run(schedule, costs.network, Scale(cluster, rehearsal.shares))
    return told.forward_s + told.backward_s


# The run


def step_seconds(
    rehearsal: Rehearsal, rank: int, device: torch.device, lasting_s: float, now: Callable[[], float]
) -> float | None:
    """Seconds of a pass there and back on the clock `now`; None if an op refuses random operands."""
    casts = {node.context.autocast.partition(":")[0] for node in rehearsal.program.graph.nodes}
    if not casts <= {"", device.type}:
        return None  # another device's autocast would not cast here
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")
            return _step_seconds(rehearsal, rank, device, lasting_s, now)
    except REFUSED:
        return None


def _step_seconds(
    rehearsal: Rehearsal, rank: int, device: torch.device, lasting_s: float, now: Callable[[], float]
) -> float:
    step = _stepper(rehearsal, cast(Wire, Echo(rank, rehearsal.cluster.devices)), device)
    step()
    times: list[float] = []
    until = time.perf_counter() + lasting_s
    while len(times) < _FEWEST or time.perf_counter() < until:
        started = now()
        step()
        times.append(now() - started)
    return statistics.median(times)


def _stepper(rehearsal: Rehearsal, wire: Wire, device: torch.device) -> Callable[[], None]:
    """A pass there and back, over and over."""
    program, cluster, shares, rank = rehearsal.program, rehearsal.cluster, rehearsal.shares, wire.rank
    exchange = Exchange(wire, shares, Network(cluster))
    gradients = Gradients(exchange, rehearsal.bucket_bytes)
    placed = dict(program.leaves)
    leaves = {
        leaf.value.name: _leaf(leaf, program.graph, placed[leaf.value.name], shares, rank, device)
        for leaf in program.graph.leaves
    }
    parameters = {leaf.target: cast(nn.Parameter, leaves[leaf.value.name]) for leaf in program.graph.parameters}
    random, size = Randomness(0, rank, device), rehearsal.bucket_bytes
    steps = Steps(program, exchange, gradients, random, parameters, device, bucket_bytes=size)

    def step() -> None:
        for parameter in parameters.values():
            parameter.grad = None
        loss, _, _ = steps.run(leaves)
        loss.reshape(()).backward()
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
            bounds.append(indices_below(Call(node, tuple(graph.values[operand] for operand in node.operands))))
        else:
            reached |= {v.name for v in node.results if not (v.torch_dtype.is_floating_point or v.dtype == "bool")}
    return min(bounds, default=2)
