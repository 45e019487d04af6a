"""A whole step against the sum of its calls: what calls that were measured one by one do not tell.

In: a graph, a cluster whose calls are measured, which of its devices this is. Out: what to run (`Rehearsal`) and what
that takes by the tables (`expected`); by what it took (`rehearse`) the calls are corrected (`measure_correction`). And
how many times as long as reading and writing it once it takes to pack what is gathered and scattered (`packing_of`),
from what a step took all ranks together.

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
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.devices import Kind, Link
from lopsided.errors import LopsidedError
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares, pieces_of
from lopsided.ir.program import Program, one_device
from lopsided.ir.rule_book import RuleBook
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import STATE, data_parallel, stored_cut
from lopsided.planner.search_cost import SharePrices
from lopsided.profiling.correction import Expected
from lopsided.profiling.dry_run import FEWEST, Play
from lopsided.schedule.cost import Costs, Scale, fitted_line, optimizer_named
from lopsided.schedule.flops import call_texts
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, holdings
from lopsided.schedule.pricing import Computed, PricedStep, price
from lopsided.schedule.schedule import BUCKET_BYTES, Decisions
from lopsided.schedule.timeline import run

_ROOM = 1.2  # times what a step is predicted to hold
_SMALLER = (1, 2, 4)
"""As if there were so many times as many devices, where a piece of the batch is too large for the memory."""
_KNOWN = 1 / 3  # of a step, at the least: what was measured answers for the rest
_SLOW = Link(1.0, 1e6)
"""So that no op leaves the batch's cut for one that rounds a little better."""
_MOST_PACKING, _HALVINGS = 1e5, 30
_BITS, _LEAST_BYTES = 8, 2**18


@dataclass(frozen=True, slots=True)
class Rehearsal:
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
    schedule = lower(program)
    return Rehearsal(book, program, cluster, shares, price(schedule, costs), price(schedule, bare))


def _fits(rehearsal: Rehearsal) -> bool:
    cluster = rehearsal.cluster
    what = holdings(rehearsal.priced.schedule, optimizer_named("sgd"), devices=cluster.devices)
    held = bytes_per_kind(what, Scale(cluster, rehearsal.shares))
    return all(_ROOM * size <= kind.memory_bytes for size, kind in zip(held, cluster.kinds, strict=True))


def _in_time(everyone: Sequence[Expected], budget_s: float) -> bool:
    return (FEWEST + 1) * max(one.all_s for one in everyone) < budget_s


def _has_some(rehearsal: Rehearsal, rank: int) -> bool:
    """With an empty piece of the batch there is no step to speak of."""
    graph, placed = rehearsal.program.graph, dict(rehearsal.program.leaves)
    shards = [(placed[leaf.value.name], leaf.value.shape) for leaf in graph.leaves if placed[leaf.value.name].is_shard]
    return all(pieces_of(placement, shape, rehearsal.shares)[rank] for placement, shape in shards)


# What tables say


def expected(rehearsal: Rehearsal, rank: int) -> Expected:
    cluster, graph = rehearsal.cluster, rehearsal.program.graph
    number = rehearsal.number_of(rank)
    tables = {entry.call: entry for entry in cluster.kinds[number].measured}
    steps = {step.node.name: step for step in rehearsal.program.steps}

    def fraction(item: Computed) -> float:
        if item.cut is None:
            return 1.0
        by, length = item.cut
        return rehearsal.shares.cut(length, by)[rank] / max(length, 1)

    measured_s, scaling_s, calls, talking = 0.0, 0.0, 0, 0
    for item in rehearsal.bare.computes:
        step = steps[item.node]
        texts = call_texts(step.node, graph.values, step.rule.how)
        entry = next((tables[text] for text in texts if text in tables), None)
        points = () if entry is None else entry.backward if item.backward else entry.forward
        if entry is None or not points:
            continue
        part = fraction(item)
        measured_s += item.seconds[number].at(part)
        scaling_s += fitted_line(points).slope * part
        calls += 1
        talking += entry.call != texts[-1]  # the last is the op by itself
    all_s = sum(item.seconds[number].at(fraction(item)) for item in rehearsal.priced.computes)
    return Expected(measured_s - scaling_s, scaling_s, all_s - measured_s, calls, talking)


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
    return hiding if 2 * (FEWEST + 1) * predicted_s(hiding, 1.0) < budget_s else None


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
    schedule = lower(rehearsal.program, Decisions(rehearsal.bucket_bytes))
    told = run(price(schedule, costs), costs.network, Scale(cluster, rehearsal.shares))
    return told.forward_s + told.backward_s
