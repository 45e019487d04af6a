"""One plan for all ranks: where it comes from, that it belongs to this model, and its shares in the order of the ranks.

In: a graph, and a plan, a cluster or nothing. Out: the `Plan` that every rank has; `Shares` for the group.
Where a plan was made for another graph, `differences` has the words: lines, the most telling first.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import load_cluster
from lopsided.comm.rank_mapping import cluster_of_those_there, find_seats
from lopsided.comm.world import World, group_to_talk, share_plan, waiting
from lopsided.comm.world import tell as tell_of_device
from lopsided.errors import InputError, PlanError, WorldError
from lopsided.ir.graph import Graph, Leaf
from lopsided.ir.placement import Placement, Shares
from lopsided.ir.program import Program
from lopsided.planner.allowed import EIGHT_BIT_STATE, allowed
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import load_plan, parse_plan, plan_text
from lopsided.planner.planner import plan_rivals
from lopsided.planner.same_storage import plan_for_shapes
from lopsided.profiling.op_times import forward_flops, measure_speeds
from lopsided.profiling.profile import measure_once
from lopsided.runtime.calls.shapes import Lengths, lengths_of
from lopsided.runtime.progress import Announcer
from lopsided.schedule.rounds import in_rounds

PLAN_VARIABLE = "LOPSIDED_PLAN"
"""The environment variable with the path of the plan, set by `lopsided run`."""

ELASTIC_VARIABLE = "LOPSIDED_ELASTIC"
"""Set to 1 by `lopsided run --elastic`: the plan is a wish, and another is made where other devices are there."""


# Devices that were not planned for are measured for five seconds at most: the run stands still meanwhile.
_BRIEFLY_S = 5.0

MEASURED_S, MEASURED_IF_SMALL_S = 20.0, 5.0
"""How long devices are measured, unless the caller says it."""

# A model is small if its forward pass has fewer FLOP: about a second on a slow core.
_SMALL_FLOPS = 1e10

# A speed is looked at for 0.05 s, and told of if it is four times off: a busy host may be half as fast for a moment.
_LOOK_S, _FAR_OFF = 0.05, 4.0


def agreed_plans(
    graph: Graph,
    plan: Plan | str | Path | None,
    cluster: Cluster | str | Path | None,
    optimizer: str,
    device: torch.device,
    measure_s: float | None,
    most: int,
    tell: Announcer,
    shapes: Callable[[], Sequence[tuple[Graph, float]]] = lambda: (),
    microbatches: int | None = None,
    allow: Iterable[str] = (),
) -> tuple[Plan, ...]:
    """Rank 0's plans, on every rank; refused unless they are for this graph. One that is given is the only one; else
    the best comes first, and at the most so many are made, all in `microbatches` rounds if that is given, and with
    techniques that change numbers only as `allow` has them."""
    may = allowed(allow)
    if plan is None and cluster is None and (path := os.environ.get(PLAN_VARIABLE)):
        plan = path
    if plan is not None and os.environ.get(ELASTIC_VARIABLE) == "1":
        wished = plan
        plan, cluster = _wish(plan, graph, device, tell)
        may |= _allowed_before(wished, graph.namespaces) if plan is None else frozenset()
        measure_s = _BRIEFLY_S if measure_s is None else min(measure_s, _BRIEFLY_S)
    if plan is not None and most > 1:
        raise InputError(
            f"a plan is given, and {most} are to be tried",
            do="leave the plan out (and LOPSIDED_PLAN, which `lopsided run` sets), or tries=",
        )
    measured = None
    if plan is None and cluster is None:
        measured = _measured(graph, device, optimizer, measure_s, tell)

    def made() -> str:
        if plan is not None:
            plans: tuple[Plan, ...] = (plan if isinstance(plan, Plan) else load_plan(plan, graph.namespaces),)
        else:
            tell("planning")
            where = measured or (cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster)))
            if others := shapes():
                if microbatches not in (None, 1):
                    raise InputError(
                        f"a plan for several lengths is wanted in {microbatches} rounds",
                        do="leave out batches= or microbatches=",
                    )
                if may:
                    raise InputError(
                        f"a plan for several lengths keeps all state as it is, and {min(may)} is allowed",
                        do="leave out batches= or allow=",
                    )
                graphs, often = zip(*others, strict=True)
                plans = (plan_for_shapes((graph, *graphs), (0.0, *often), where, optimizer=optimizer),)
            else:
                plans = plan_rivals(graph, where, most, optimizer=optimizer, microbatches=microbatches, allow=may)
        if microbatches not in (None, plans[0].microbatches):
            raise PlanError(
                f"the plan has {rounds_text(plans[0].microbatches)} of the batch, and {microbatches} are asked for",
                do="leave microbatches= out, or plan anew with --microbatches",
            )
        if differs := differences(plans[0].graph, _of_a_round(graph, plans[0])):
            raise PlanError(
                "the plan belongs to another model or batch: " + "; ".join(differs),
                where=str(plan) if isinstance(plan, str | Path) else "the plan",
                do="plan this model and batch anew with `lopsided plan` or lopsided.plan, or give what was planned",
            )
        return json.dumps([plan_text(one) for one in plans])

    agreed = tuple(parse_plan(text, namespaces=graph.namespaces) for text in json.loads(from_first(made)))
    if differs := differences(agreed[0].graph, _of_a_round(graph, agreed[0])):
        raise PlanError(
            "this rank's model or batch is not the one that was planned: " + "; ".join(differs),
            do="build the same model with the same batch shape on every rank",
        )
    return agreed


def _of_a_round(graph: Graph, plan: Plan) -> Graph:
    """What a plan is to be compared with: of a batch in rounds, one of them."""
    return in_rounds(graph, plan.microbatches).graph


def rounds_text(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"


def _wish(
    plan: Plan | str | Path, graph: Graph, device: torch.device, tell: Announcer
) -> tuple[Plan | str | Path | None, Cluster | None]:
    """The plan, where the devices are there that it is for; else the part of its cluster that is there; or neither,
    where others are there, which are to be measured. The same on every rank."""
    known = graph.namespaces
    if isinstance(plan, Plan):
        given = plan
    else:
        given = parse_plan(from_first(lambda: plan_text(load_plan(plan, known))), namespaces=known)
    told = tell_of_device(device)
    try:
        find_seats(told, given.cluster, given.on)
    except WorldError as error:
        left = cluster_of_those_there(told, given.cluster)
        what = "the devices there are measured" if left is None else f"planned anew for {left.devices} of its devices"
        tell.warn(f"{error.what}: {what}")
        return None, left
    return given, None


def _allowed_before(plan: Plan | str | Path, namespaces: Collection[str]) -> frozenset[str]:
    """What whoever made a plan has allowed, as far as it is used: one in its place may use it too."""
    if isinstance(plan, Plan):
        bits = plan.state_bits
    else:
        bits = int(from_first(lambda: str(load_plan(plan, namespaces).state_bits)))
    return frozenset((EIGHT_BIT_STATE,)) if bits else frozenset()


def agreed_lengths(batch: object, batches: Iterable[object], tell: Announcer) -> Lengths:
    """Rank 0's batches decide, and only rank 0 looks at them."""

    def made() -> str:
        return json.dumps(astuple(lengths_of(batch, batches)))

    lengths, often, dims = json.loads(from_first(made))
    found = Lengths(tuple(lengths), tuple(often), tuple((name, dim) for name, dim in dims))
    pairs = zip(found.lengths, found.often, strict=True)
    tell(
        "planning for lengths " + ", ".join(f"{n} ({part:.0%} of batches)" for n, part in pairs)
        if lengths
        else "all batches have the same length"
    )
    return found


def _measured(graph: Graph, device: torch.device, optimizer: str, measure_s: float | None, tell: Announcer) -> Cluster:
    """The devices as they are now, or as they were found when this model was measured before."""
    if measure_s is None:
        measure_s = MEASURED_S if forward_flops(graph) > _SMALL_FLOPS else MEASURED_IF_SMALL_S
    began_s = tell.seconds
    found = measure_once(
        graph,
        device,
        optimizers=(optimizer,),
        budget_s=measure_s,
        progress=tell.countdown("measuring", measure_s),
        told=tell,
    )
    tell(f"{found.devices} devices known after {tell.seconds - began_s:.1f} s")
    return found


def strange_speeds(plan: Plan, world: World) -> str:
    """What to say where devices are not as fast as the cluster says: it was made for others. All ranks call this.

    A glance at one product each, so only what is far off is told.
    """
    kinds = plan.on.device_kinds
    kind = kinds[world.order[world.place]] if world.takes_part else kinds[0]
    dtype = kind.flops_per_s[0][0]
    now = dict(measure_speeds((dtype,), world.device, _LOOK_S).flops_per_s)[dtype]
    mine = (now, kind.flops(dtype), kind.name) if world.takes_part else None
    heard = [mine] * world.size
    with waiting("the speed of every device"):
        dist.all_gather_object(heard, mine, group=group_to_talk())
    off = [
        f"rank {rank} does {now:.2g} flop/s, and {name} {said:.2g}"
        for rank, (now, said, name) in ((rank, one) for rank, one in enumerate(heard) if one is not None)
        if max(now / said, said / now) > _FAR_OFF
    ]
    if not off:
        return ""
    return (
        f"the cluster {plan.cluster.name} does not describe these devices: {'; '.join(off[:4])}. The run is right, and "
        "its shares are those of other devices. Leave cluster= out to have these measured"
    )


def from_first(make: Callable[[], str], group: dist.ProcessGroup | None = None, first: int = 0) -> str:
    """What rank `first` makes, on every rank of a group (of all, unless given); if it cannot, no rank goes on."""
    if dist.get_rank() != first:
        return share_plan(None, group=group, source=first)
    try:
        made = make()
    except Exception as error:
        with suppress(WorldError):
            share_plan(None, trouble=str(error), group=group, source=first)
        raise
    return share_plan(made, group=group, source=first)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def in_group_order(plan: Plan, world: World) -> Shares:
    """The plan's shares in the order of the ranks that take part, every cut that its program makes settled."""
    shares, order = plan.shares, world.order
    if order == tuple(range(len(order))):
        return shares
    lengths: dict[tuple[str, int], None] = {(by, length): None for by, length, _ in shares.cuts}
    for placement, shape in cuts_of(plan.program):
        lengths[placement.by, placement.length(shape)] = None

    def ordered(row: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(row[device] for device in order)

    return Shares(
        ordered(shares.work),
        tuple((name, ordered(fractions)) for name, fractions in shares.named),
        tuple((by, length, ordered(shares.cut(length, by))) for by, length in lengths),
    )


def compiled_where_wanted(plans: Sequence[Plan], compile: bool | None, device: torch.device) -> tuple[Plan, ...]:
    """The plans with or without compiled stretches, the same on all ranks: as rank 0 wants it, else as a plan says, and
    if that says nothing where some device is a GPU."""
    wanted = from_first(lambda: str(compile))
    gpus = torch.tensor([int(device.type == "cuda")])
    if dist.get_world_size() > 1:
        dist.all_reduce(gpus, dist.ReduceOp.MAX, group=group_to_talk())
    found = []
    for plan in plans:
        on = wanted == str(True) or (wanted == str(None) and (plan.stretch > 0 or bool(gpus.item())))
        found.append(plan.compiled() if on else replace(plan, stretch=0))
    return tuple(found)


def kinds_in_group_order(plan: Plan, world: World) -> tuple[int, ...]:
    """The numbers of the kinds of the ranks that take part."""
    return tuple(plan.kind_numbers[device] for device in world.order)


def cuts_of(program: Program) -> Iterator[tuple[Placement, tuple[int, ...]]]:
    """Every placement by which something is cut, with the shape of what is."""
    values = program.graph.values
    for name, placement in program.leaves:
        if placement.is_shard:
            yield placement, values[name].shape
    for step in program.steps:
        placed = [*step.taken, *((name, (give,)) for name, give in step.made)]
        for name, chain in placed:
            yield from ((p, values[name].shape) for p in chain if p.is_shard)


# Why a plan does not belong to a model


def differences(planned: Graph, here: Graph, most: int = 4) -> tuple[str, ...]:
    """At most so many lines; empty for graphs that compute the same."""
    if planned.fingerprint == here.fingerprint:
        return ()
    found = [
        *_leaves("input", planned, here),
        *_leaves("parameter", planned, here),
        *_leaves("buffer", planned, here),
    ]
    if not found:
        found = _ops(planned, here)
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return (*found[:most], *more)


def _leaves(kind: str, planned: Graph, here: Graph) -> list[str]:
    before = {leaf.target: leaf for leaf in planned.leaves if leaf.kind == kind}
    after = {leaf.target: leaf for leaf in here.leaves if leaf.kind == kind}
    lines = []
    for name, leaf in before.items():
        if name not in after:
            lines.append(f"{kind} {name} is planned and not there")
        elif _shape(leaf) != _shape(after[name]):
            lines.append(f"{kind} {name} was planned as {_shape(leaf)} and is {_shape(after[name])}")
        elif leaf.value.grad != after[name].value.grad:
            was = "trained" if leaf.value.grad else "frozen"
            lines.append(f"{kind} {name} was planned {was} and is not")
        elif leaf.also != after[name].also:
            lines.append(f"{kind} {name} is tied to other names than planned")
    lines += [f"{kind} {name} is there and not planned" for name in after if name not in before]
    return lines


def _shape(leaf: Leaf) -> str:
    return f"{leaf.value.dtype}[{', '.join(map(str, leaf.value.shape))}]"


def _ops(planned: Graph, here: Graph) -> list[str]:
    before, after = (Counter(node.op for node in graph.nodes) for graph in (planned, here))
    lines = [f"{op} is called {after[op]} times, {before[op]} were planned" for op in before if before[op] != after[op]]
    lines += [f"{op} is called and was not planned" for op in after if op not in before]
    if lines:
        return lines
    for one, other in zip(planned.nodes, here.nodes, strict=False):
        if one.context != other.context:
            was, now = (n.context.autocast or "no autocast" for n in (one, other))
            if was != now:
                return [f"%{one.name} was planned under {was} and runs under {now}"]
        if (one.op, one.args, one.kwargs) != (other.op, other.args, other.kwargs):
            return [f"%{one.name} is called otherwise than planned: {other.op}{other.args}"]
    return ["values differ in dtype or gradient"]
