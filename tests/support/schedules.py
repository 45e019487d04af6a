"""Clusters, networks and schedules that are made up, by hand and at random, for tests of shares."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from lopsided.cluster.cluster import Cluster, Link
from lopsided.cluster.collectives import Algorithm, Network
from lopsided.ir.placement import I, R, Shares
from lopsided.ir.program import Program
from lopsided.planner.balance import Balance, balance
from lopsided.schedule import timeline
from lopsided.schedule.cost import Affine, Costs, Cut, Optimizer, Scale, Transfer
from lopsided.schedule.decisions import BUCKET_BYTES, Decisions
from lopsided.schedule.lower import IN_A_BUCKET, Buckets, lower
from lopsided.schedule.memory import Holding, holdings
from lopsided.schedule.pricing import Computed, PricedStep, price
from lopsided.schedule.schedule import (
    Compute,
    Item,
    Phase,
    Redistribute,
    Schedule,
    Update,
    transfers_of,
)
from tests.support.clusters import cluster, kind

GB = 10**9
ROWS: Cut = ("", 10_000)
PADDED = Algorithm("any", "padded", 1e-3, 0.0, 1e-9)
GROUPED = Algorithm("any", "grouped", 1e-3, 1e-9, 0.0)


def cluster_of(*counts: int, memory: Sequence[int] = ()) -> Cluster:
    """Kinds of so many devices, each kind in a node of its own."""
    sizes = memory or (100 * GB,) * len(counts)
    figures = {"speed": 1e12, "bytes_per_s": 1e12, "launch_s": 1e-6}
    kinds = (kind(f"kind{k}", f"box{k}", 1, count, memory=sizes[k], **figures) for k, count in enumerate(counts))
    return cluster(*kinds, within=Link(1e-6, 1e10), between=Link(1e-5, 1e9))


@dataclass(frozen=True)
class OneWay(Network):
    """A network that carries everything out in one way, so that the step is convex in the shares."""

    way: Algorithm = PADDED

    def best(self, collective: str, whole_bytes: float, largest: float = 1.0) -> Algorithm:
        return self.way


@dataclass(frozen=True)
class Work:
    """Something to compute, by hand: seconds of each kind, and what cuts them."""

    seconds: tuple[Affine, ...]
    cut: Cut | None
    backward: bool = False
    node: str = "node"


ByHand = Work | Transfer


def work(*seconds: tuple[float, float], by: Cut | None = ROWS, backward: bool = False) -> Work:
    return Work(tuple(Affine(*pair) for pair in seconds), by, backward)


def sent(size: int, *cuts: Cut, hides: bool = False, ahead: bool = False) -> Transfer:
    collective = "all_gather" if ahead else "all_reduce" if hides else "all_to_all"
    return Transfer("t", collective, size, cuts, hides, ahead)


def schedule_of(
    *items: ByHand,
    backward: Sequence[ByHand] = (),
    optimizer: Sequence[Work] = (),
    bucket_bytes: int = BUCKET_BYTES,
) -> PricedStep:
    """A priced step by hand. What goes ahead is taken by what is computed next; what hides otherwise is given."""
    decisions = Decisions(bucket_bytes)
    buckets, computed = Buckets(decisions), dict[str, Computed]()
    passes = [
        tuple(buckets.filled(list(_items(one, phase, computed))))
        for one, phase in ((items, "forward"), (backward, "backward"))
    ]
    updates = []
    for k, one in enumerate(optimizer):
        updates.append(Update(f"update {k}", one.node, I))
        computed[f"update {k}"] = Computed(f"update {k}", one.node, "backward", one.seconds, one.cut)
    program = Program(None, (), (), ())  # type: ignore[arg-type]  # nobody asks for it
    return PricedStep(Schedule(program, decisions, *passes, tuple(updates)), computed)


def in_rounds(priced: PricedStep, count: int, *, regather: bool = False) -> PricedStep:
    """The same, so many times."""
    decisions = replace(priced.schedule.decisions, microbatches=count, regather=regather)
    return replace(priced, schedule=replace(priced.schedule, decisions=decisions))


def _items(by_hand: Sequence[ByHand], phase: Phase, computed: dict[str, Computed]) -> Iterator[Item]:
    ahead: list[Item] = []
    for k, one in enumerate(by_hand):
        name = f"{phase} {k}"
        if isinstance(one, Work):
            yield from ahead
            ahead = []
            computed[name] = Computed(name, one.node, "backward" if one.backward else "forward", one.seconds, one.cut)
            yield Compute(name, one.node, phase)
        elif one.ahead:
            ahead.append(Redistribute(name, "t", I, R, "forward", one, IN_A_BUCKET))
        else:
            yield Redistribute(name, "t", I, R, "backward", one, IN_A_BUCKET if one.hides else "")
    yield from ahead


def equal(cluster: Cluster) -> Shares:
    return Shares((1 / cluster.devices,) * cluster.devices)


def per_device(cluster: Cluster, *shares: Sequence[float], names: Sequence[str] = ("",)) -> Shares:
    """Shares of one device of each kind, for each name, as shares of every device."""
    expanded = [
        tuple(share for share, kind in zip(each, cluster.kinds, strict=True) for _ in range(kind.devices))
        for each in shares
    ]
    return Shares(expanded[0], tuple(zip(names[1:], expanded[1:], strict=True)))


def solve(schedule: PricedStep, cluster: Cluster, way: Algorithm = PADDED, held: Sequence[Holding] = ()) -> Balance:
    return balance(schedule, held, cluster, OneWay(cluster, way), reference=equal(cluster))


class Unrounded(Scale):
    """Pieces as large as the shares say, as if every length could be cut anywhere."""

    def fractions(self, cut: Cut | None) -> tuple[float, ...]:
        return self.expected(cut)


def predicted(schedule: PricedStep, network: Network, cluster: Cluster, shares: Shares) -> float:
    """Seconds of a step before lengths are rounded: what the linear program minimises, at any shares."""
    return timeline.run(schedule, network, Unrounded(cluster, shares)).step_s


# Schedules at random: every manner of item, names and lengths mixed

CUTS: tuple[Cut, ...] = (("", 64), ("", 12), ("state", 640), ("tail", 64))
NAMES = ("", "state", "tail")


def random_point(rng: random.Random, cluster: Cluster) -> tuple[float, ...]:
    parts = [rng.expovariate(1.0) * rng.choice((0.0, 1.0, 1.0, 1.0)) for _ in cluster.kinds]
    parts = parts if sum(parts) else [1.0] * len(parts)
    return tuple(part / sum(parts) / kind.devices for part, kind in zip(parts, cluster.kinds, strict=True))


@st.composite
def affine(draw: st.DrawFn) -> tuple[float, float]:
    return draw(st.sampled_from((0.0, 1e-3, 0.02))), draw(st.sampled_from((0.1, 0.3, 1.0, 4.0)))


@st.composite
def schedules(draw: st.DrawFn, kinds: int) -> PricedStep:
    def compute() -> Work:
        by = draw(st.sampled_from((*CUTS, None)))
        seconds = [draw(affine()) for _ in range(kinds)]
        return work(*seconds, by=by) if by else work(*((a, b / 50) for a, b in seconds), by=None)

    def transfer() -> Transfer:
        cuts = draw(st.sampled_from([(), *((c,) for c in CUTS), (CUTS[0], CUTS[2])]))
        size = draw(st.sampled_from((10**6, 2 * 10**7, 10**8, 3 * 10**8)))
        manner = draw(st.sampled_from(((False, False), (True, False), (True, True))))
        return sent(size, *cuts, hides=manner[0], ahead=manner[1])

    def items(most: int) -> list[ByHand]:
        return [compute() if draw(st.booleans()) else transfer() for _ in range(draw(st.integers(0, most)))]

    def gradients(item: ByHand) -> bool:
        return isinstance(item, Transfer) and item.hides and not item.ahead

    forward = [item for item in items(6) if not gradients(item)]
    optimizer = [compute() for _ in range(draw(st.integers(0, 2)))]
    size = draw(st.sampled_from((BUCKET_BYTES, 1, 10**6)))
    backward = [compute(), *items(8)]
    return schedule_of(compute(), *forward, backward=backward, optimizer=optimizer, bucket_bytes=size)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cluster, PricedStep, Algorithm]:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    way = draw(st.sampled_from((PADDED, GROUPED, Algorithm("any", "both", 1e-4, 2e-9, 5e-10))))
    return cluster_of(*counts), draw(schedules(len(counts))), way


# Schedules of programs, seen flat


@dataclass(frozen=True)
class Flat:
    """A priced step with what costs something only: what is computed, and every tensor that is sent, in order."""

    priced: PricedStep

    def _seen(self, items: Sequence[Item]) -> tuple[Computed | Transfer, ...]:
        found: list[Computed | Transfer] = []
        for item in items:
            if item.id in self.priced.computed:
                found.append(self.priced.computed[item.id])
            else:
                found += transfers_of([item])
        return tuple(found)

    @property
    def forward(self) -> tuple[Computed | Transfer, ...]:
        return self._seen(self.priced.schedule.forward)

    @property
    def backward(self) -> tuple[Computed | Transfer, ...]:
        return self._seen(self.priced.schedule.backward)

    @property
    def optimizer(self) -> tuple[Computed, ...]:
        return self.priced.updates

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return self.priced.schedule.transfers

    @property
    def computes(self) -> tuple[Computed, ...]:
        return (*self.priced.computes, *self.priced.updates)


def lay_out(program: Program, costs: Costs, *, regather: bool = False, bucket_bytes: int = BUCKET_BYTES) -> Flat:
    return Flat(price(lower(program, Decisions(bucket_bytes, regather=regather)), costs))


def held_by(program: Program, optimizer: Optimizer, *, regather: bool = False, devices: int = 1) -> tuple[Holding, ...]:
    return holdings(lower(program, Decisions(regather=regather)), optimizer, devices=devices)
