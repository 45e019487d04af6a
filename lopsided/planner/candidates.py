"""A program with shares on a part of a cluster: what the planner compares, and what narrows its search.

In: what a `CandidatePool` has judged. Out: `Candidate`, which beats another or not; `Limits` of the search; what a plan
may fill of a device's memory, and the shares that a search begins with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lopsided.cluster.cluster import Cluster
from lopsided.ir.graph import Graph, Leaf, Node
from lopsided.ir.notation import Rule
from lopsided.ir.placement import Placement, Shares
from lopsided.ir.program import Program
from lopsided.planner.baselines import STATE
from lopsided.planner.search import Found
from lopsided.planner.search_cost import Hidden
from lopsided.schedule.decisions import BUCKET_BYTES, OnHost, Rerun
from lopsided.schedule.memory import Holding
from lopsided.schedule.pricing import PricedStep
from lopsided.schedule.timeline import Timeline

BETTER = 1 - 1e-3
"""By less than this, another pair is not worth the change."""
GAIN = 0.98
"""What cannot be shorter than this part of the best step is not tried, nor made to fit."""

Stored = frozenset[tuple[bool, bool]]
"""How parameters are stored: whether cut, and whether to be gathered for use."""
Sort = tuple[int, Stored]
"""What is told apart where plans are tried: on how many devices, and how parameters are stored."""


@dataclass(frozen=True)
class Candidate:
    """A program with shares on a (part of a) cluster, and what a step takes."""

    name: str
    on: Cluster
    program: Program
    shares: Shares
    regather: bool
    timeline: Timeline
    memory: tuple[int, ...]  # bytes on the fullest device of each kind
    fits: bool
    sort: Sort
    found: Found | None = None  # the search it comes from
    bucket_bytes: int = BUCKET_BYTES
    reruns: tuple[Rerun, ...] = ()
    on_host: tuple[OnHost, ...] = ()
    state_bits: int = 0

    @property
    def step_s(self) -> float:
        return self.timeline.step_s

    def beats(self, other: Candidate | None) -> bool:
        if other is None or not self.fits:
            return self.fits
        if self.step_s > other.step_s * (1 + 1e-9):
            return False
        if self.step_s < other.step_s * BETTER:
            return True
        # As fast: fewer devices are better, and what a search has found as well comes with a proof.
        return (self.on.devices, self.found is None) < (other.on.devices, other.found is None)


@dataclass(frozen=True)
class LoweredCandidate:
    """A program lowered and priced, and what it holds, whatever the shares."""

    program: Program
    priced: PricedStep
    held: tuple[Holding, ...]
    stored: Stored


@dataclass(frozen=True, slots=True)
class Learned:
    """What a search on some devices has found out about them."""

    hidden: Hidden | None = None  # the estimate that led to the best program
    memory_price: float = 0.0  # at which the last search that was short of memory ended
    regather: bool = False
    bucket_bytes: int = BUCKET_BYTES


@dataclass(frozen=True)
class Limits:
    """What narrows the search: how parameters may be stored, which rules may be used, how long it may take."""

    stores: Callable[[Leaf], tuple[Placement, ...]]
    allowed: Callable[[Node, Rule], bool]
    stored: Mapping[str, Placement] = field(default_factory=dict)  # pinned parameters
    made: Mapping[str, Placement] = field(default_factory=dict)  # pinned values
    deadline: float = math.inf  # a time of time.perf_counter()

    def respected_by(self, program: Program) -> bool:
        """Whether a program that was not searched within these limits keeps to them.

        A pin that names no shares leaves open which they are.
        """
        placed = dict(program.leaves)
        if self.made:
            for step in program.steps:
                placed.update(step.made)
        pins = (*self.stored.items(), *self.made.items())
        return all(placed[name] == pin or placed[name].cut_by("") == pin for name, pin in pins)

    @property
    def left_s(self) -> float:
        return max(self.deadline - time.perf_counter(), 0.0)


def stored_in(program: Program) -> Stored:
    placed = dict(program.leaves)
    ways = [placed[leaf.value.name] for leaf in program.graph.parameters]
    return frozenset((way.is_shard, way.by == STATE) for way in ways)


def excess(candidate: Candidate) -> float:
    """How far the fullest device is over its limit, as a part of it."""
    used = zip(candidate.memory, memory_limits(candidate.on), strict=True)
    return max(size / limit for size, limit in used)


def memory_limits(cluster: Cluster) -> tuple[int, ...]:
    """Bytes that a plan may fill, for each kind."""
    return tuple(max(int(kind.memory_bytes * (1 - kind.memory_reserve)), 1) for kind in cluster.kinds)


def speed_dtype(graph: Graph) -> str:
    """The dtype most parameters are in: what "by speed" means."""
    sizes: dict[str, int] = {}
    for leaf in graph.parameters:
        sizes[leaf.value.dtype] = sizes.get(leaf.value.dtype, 0) + leaf.value.elements
    return max(sizes, key=lambda dtype: sizes[dtype], default="f32")


def shares_by(cluster: Cluster, weights: Sequence[float], *, tied: bool = False) -> Shares:
    """Work shares proportional to a weight per kind. State shares are equal to begin with: who gathers, pads.

    Unless they are tied to the work shares.
    """
    if tied:
        return Shares(_per_device(cluster, weights))
    equal = _per_device(cluster, [1.0 for _ in cluster.kinds])
    return Shares(_per_device(cluster, weights), named=((STATE, equal),))


def _per_device(cluster: Cluster, weights: Sequence[float]) -> tuple[float, ...]:
    total = sum(kind.devices * weight for kind, weight in zip(cluster.kinds, weights, strict=True))
    return tuple(
        weight / total for kind, weight in zip(cluster.kinds, weights, strict=True) for _ in range(kind.devices)
    )
