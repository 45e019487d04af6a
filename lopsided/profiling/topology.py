"""All processes that measure: how they agree, whom they talk with, and how fast they do.

In: a process group, a cluster whose devices are measured. Out: a `ControlGroup` to agree over (`council_of`), talkers
as training will have them (`talkers_of`), and the cluster with its collectives and links measured, with what computing
and sending cost each other (`with_links`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import Network
from lopsided.cluster.devices import Link
from lopsided.comm.backend_choice import choose_backend
from lopsided.comm.communicator import Communicator
from lopsided.comm.world import lasting_group, patience_s
from lopsided.ir.graph import Graph
from lopsided.profiling.kinds import RankHost, chip_of, node_names, seat_of
from lopsided.profiling.links import MOST_NODES, TURNS, WAYS, ControlGroup, Fit, Talkers, fit_ways, unlike_pairs
from lopsided.profiling.noise import BackgroundLoad
from lopsided.profiling.op_times import Speeds
from lopsided.profiling.overlap import LARGEST_BYTES, SMALLEST_BYTES, Overlap, measure_overlap
from lopsided.schedule.decisions import BUCKET_BYTES

# Parts of the budget: for computing beside sending, and for collectives.
BESIDE_PART, LINKS_PART = 0.07, 0.28

# How many seconds a rank waits at most for another that still measures.
_PATIENCE_S = 300.0
# The largest piece must be 1.25 times the mean one for a timing to tell what skew costs.
_SKEWED = 1.25


def council_of(group: dist.ProcessGroup | None) -> ControlGroup:
    """A group of its own to agree over, which needs no GPU."""
    ranks = dist.get_process_group_ranks(_whole(group)) if dist.is_initialized() else [0]
    return ControlGroup(_group_of(ranks, "gloo", "council", _whole(group)) if len(ranks) > 1 else None)


def _whole(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, group or dist.group.WORLD)


def _backend(seats: Sequence[RankHost]) -> str:
    """What training will talk over."""
    return choose_backend([chip_of(seat) if seat.gpu else "" for seat in seats], [seat.nccl for seat in seats]).name


def group_to_talk(group: dist.ProcessGroup | None, seats: Sequence[RankHost]) -> dist.ProcessGroup:
    whole = _whole(group)
    return _group_of(dist.get_process_group_ranks(whole), _backend(seats), "talk", whole)


def talkers_of(cluster: Cluster, device: torch.device, council: ControlGroup) -> Talkers:
    """All processes, ready to talk as they would in training."""
    seats = cast(list[RankHost], council.hear(seat_of(device, Speeds((), 0.0, 0.0))))
    return Topology(group_to_talk(None, seats), council, device, torch.float32, 0, 0.0).talkers(cluster)


def _group_of(ranks: Sequence[int], backend: str, use: str, whole: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group for one use among all processes. Where only some of them measure, the group they gave does for all.

    Groups that only their members make are named by torch after their ranks alone, so a second one over the same ranks
    would find the first one's addresses; and those that all make must be made by all.
    """
    if len(dist.get_process_group_ranks(whole)) < dist.get_world_size():
        return whole
    return lasting_group(f"measuring, {use}", ranks, backend, min(_PATIENCE_S, patience_s()))


# Links


@dataclass(frozen=True, slots=True)
class Topology:
    """Whom to talk with, how to agree, on what, and for how long all of the measuring may take."""

    group: dist.ProcessGroup
    council: ControlGroup
    device: torch.device
    dtype: torch.dtype
    most_bytes: int  # that training sends at once
    budget_s: float

    def talkers(self, cluster: Cluster) -> Talkers:
        communicator = Communicator(self.group, self.device, Network(cluster))
        return Talkers(communicator, self.council, BackgroundLoad(self.device), self.device, self.dtype)


def link_parts(ranks: int) -> int:
    return TURNS * len(WAYS) + 1 if ranks > 1 else 0


def sent(graphs: Sequence[Graph]) -> tuple[torch.dtype, int]:
    """What most of the bytes are that training sends, and how many at once: the gradients of parameters."""
    sizes: dict[torch.dtype, int] = {}
    for leaf in (leaf for graph in graphs for leaf in graph.parameters):
        if leaf.value.grad:
            sizes[leaf.value.torch_dtype] = sizes.get(leaf.value.torch_dtype, 0) + leaf.value.bytes
    return max(sizes, key=sizes.__getitem__, default=torch.float32), min(sum(sizes.values()), BUCKET_BYTES)


def with_links(
    cluster: Cluster, world: Topology, seats: Sequence[RankHost], paces: Sequence[float], step: Callable[[], object]
) -> tuple[Cluster, tuple[Fit, ...], tuple[float, ...]]:
    """The cluster with its collectives measured, their fits, and each rank's compute slowdown, which kinds lack yet."""
    # Groups inside hosts must be made by all processes: where only some measure, all links are taken to be alike.
    all_measure = dist.get_world_size(world.group) == dist.get_world_size()
    has_two_links = 1 < cluster.nodes < cluster.devices
    within = _inside_hosts(cluster, world, seats) if has_two_links and all_measure else None
    talkers = world.talkers(cluster)
    unequal = _unequal([1 / pace for pace in paces])
    fits = fit_ways(talkers, LINKS_PART * world.budget_s, unequal=unequal, step=step, most_bytes=world.most_bytes)
    gather = next(fit.link for fit in fits if (fit.collective, fit.way) == ("all_gather", "padded"))
    n, nodes = cluster.devices, cluster.nodes
    # The model of a padded all_gather (collectives.py), solved for the link.
    crossing = max(gather.latency_s - (n - nodes) * within.latency_s, 0.0) if within else gather.latency_s
    link = Link(crossing / ((nodes - 1) or (n - 1)), max(gather.bytes_per_s * (n - 1) / n, 1.0))
    pairs: tuple[tuple[str, str, Link], ...] = ()
    if 2 < nodes <= MOST_NODES:
        link, pairs = unlike_pairs(talkers, node_names(seats), link)
    reduce = next(fit.link for fit in fits if fit.collective == "all_reduce")
    overlap = _overlap(talkers, reduce, BESIDE_PART * world.budget_s)
    compute_slowdowns = tuple(cast(list[float], world.council.hear(overlap.compute_slowdown)))
    step()
    return (
        replace(
            cluster,
            within=within or link,
            between=link,
            collectives=tuple((fit.collective, fit.way, fit.link) for fit in fits),
            pairs=pairs,
            comm_slowdown=overlap.comm_slowdown,
        ),
        fits,
        compute_slowdowns,
    )


def _overlap(talkers: Talkers, reduce: Link, budget_s: float) -> Overlap:
    """Measure overlap with as much as takes an eighth of the time, so that it can be sent several times."""
    fitting = max(budget_s / 8 - reduce.latency_s, 0.0) * reduce.bytes_per_s
    return measure_overlap(talkers, int(min(max(fitting, SMALLEST_BYTES), LARGEST_BYTES)), budget_s)


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


def _inside_hosts(cluster: Cluster, world: Topology, seats: Sequence[RankHost]) -> Link:
    """The link of the slowest host, all hosts talking to themselves at once."""
    ranks, me = dist.get_process_group_ranks(world.group), dist.get_rank(world.group)
    nodes = node_names(seats)
    found: Link | None = None
    for node in dict.fromkeys(nodes):
        inside = [ranks[rank] for rank, other in enumerate(nodes) if other == node]
        if len(inside) == 1:
            continue
        group = lasting_group("measuring, talk", inside, _backend(seats), min(_PATIENCE_S, patience_s()))
        council = lasting_group("measuring, council", inside, "gloo", min(_PATIENCE_S, patience_s()))
        if node != nodes[me]:
            continue
        part = cluster.only(k for k, kind in enumerate(cluster.kinds) if kind.node == nodes[me])
        here = Topology(group, ControlGroup(council), world.device, world.dtype, world.most_bytes, world.budget_s)
        each = LINKS_PART * world.budget_s / len(WAYS)
        (fit,) = fit_ways(here.talkers(part), each, (("all_gather", "padded"),))
        size, line = len(inside), fit.link
        found = Link(line.latency_s / (size - 1), max(line.bytes_per_s * (size - 1) / size, 1.0))
    told = [link for link in cast(list[Link | None], world.council.hear(found)) if link is not None]
    return Link(max(link.latency_s for link in told), min(link.bytes_per_s for link in told))
