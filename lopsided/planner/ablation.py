"""The planner without some of what it adds to HAP: what each addition is worth is what a plan without it takes longer.

In: names of additions (`ADDITIONS`; "hap" stands for all of them). Out: what the planner works with instead: fewer
rules (`fewer_rules`), a schedule in which nothing hides (`Decisions.overlap`), and what it believes of the cluster
(`beliefs`). What it then chooses is an ordinary plan, legal for everyone and predicted as it really is.

    sfb             no rule gathers factors instead of summing gradients
    invariant       no op computes `I`: the rule by which every device computes the same whole result, and knows its
                    whole gradient, is taken away wherever the op also has the one that computes `R`, whose gradient is
                    a sum over devices. Parameters are still stored `I` and the loss is still known to all, as in HAP,
                    which replicates parameters too and sums their gradients
    collectives     one switch for the whole model: all unequal gathers and scatters are padded, or all are groups of
                    broadcasts and reduces. Both are planned, and the better is taken. What the runtime then uses
                    follows: in the plan's cluster the other ways take an hour
    state-shares    a device stores what it computes: one set of shares for both
    segments        one set of shares for the whole model
    overlap         while choosing, nothing is taken to hide behind computing. Gradients and gathered parameters still
                    travel in buckets, of 25 MiB: only the hiding is missing, not the sharing of latencies
    devices         every device takes part, also one that costs more than it brings
    chunks          a loss has all of its logits at once, and all that is made of them
    measured-cost   while choosing, an op takes its flops over the device's flops/s: no measured tables, no bytes, no
                    launches. The network is still the measured one, as in HAP

What is left without all of these still has an exact search, latencies and limits on memory, which the published HAP
does not: it is a stronger HAP than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lopsided.cluster.cluster import MEASURABLE, Cluster
from lopsided.cluster.coefficients import KIND, optional
from lopsided.cluster.collectives import Algorithm, Network
from lopsided.cluster.devices import Kind, Link
from lopsided.errors import InputError
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, R
from lopsided.ir.program import RuleBook

SFB, INVARIANT, COLLECTIVES, STATE_SHARES = "sfb", "invariant", "collectives", "state-shares"
SEGMENTS, OVERLAP, DEVICES, CHUNKS, MEASURED_COST = "segments", "overlap", "devices", "chunks", "measured-cost"
ADDITIONS = (SFB, INVARIANT, COLLECTIVES, STATE_SHARES, SEGMENTS, OVERLAP, DEVICES, CHUNKS, MEASURED_COST)
HAP = "hap"

_SWITCH = ("padded", "grouped")
_SWITCHED = ("all_gather", "reduce_scatter")
# As slow as a link can be: nobody chooses it.
_NEVER = Link(3600.0, 1.0)
_ENDLESS_BYTES_PER_S = 1e18


def additions_named(names: Iterable[str]) -> frozenset[str]:
    """What is to be left out, checked."""
    found: set[str] = set()
    for name in names:
        if name != HAP and name not in ADDITIONS:
            raise InputError(
                f"{name!r} is nothing that the planner can do without",
                do=f"choose from {', '.join(ADDITIONS)}, or {HAP} for all of them",
            )
        found.update(ADDITIONS if name == HAP else (name,))
    return frozenset(found)


# Rules


def fewer_rules(book: RuleBook, without: frozenset[str]) -> RuleBook:
    """The rule book without factor broadcasting, or without results that are `I`."""
    if not without & {SFB, INVARIANT}:
        return book
    kept: dict[int, tuple[Rule, ...]] = {}  # calls that are alike share their rules
    for menu in book.rules.values():
        if id(menu) not in kept:
            kept[id(menu)] = tuple(_kept(menu, without))
    return replace(book, rules={name: kept[id(menu)] for name, menu in book.rules.items()})


def _kept(menu: Sequence[Rule], without: frozenset[str]) -> Iterable[Rule]:
    has_replicated = any(all(p == R for p in (*rule.needs, *rule.gives)) for rule in menu)
    for rule in menu:
        if SFB in without and rule.how == "sfb":
            continue
        computes_invariant = all(p == I for p in (*rule.needs, *rule.gives))
        if INVARIANT in without and computes_invariant and has_replicated:
            continue
        yield rule


# The cluster


@dataclass(frozen=True, slots=True)
class Belief:
    """What the planner takes the cluster for, and what it is."""

    cluster: Cluster
    real: Cluster

    def as_it_is(self, part: Cluster) -> Cluster:
        """The devices of a part of the believed cluster with what they really can do."""

        def real(kind: Kind) -> Kind:
            # What a believed kind says of its source is its number.
            known = self.real.kinds[int(kind.source)]
            known = known.with_fewer(self.real.beside(known), part.beside(kind))
            return replace(known, name=kind.name, node=kind.node, nodes=kind.nodes, count=kind.count)

        return replace(part, kinds=tuple(real(kind) for kind in part.kinds))


def beliefs(cluster: Cluster, without: frozenset[str]) -> tuple[Belief, ...]:
    """One belief, or with one switch for all collectives two."""
    real = [_by_one_way(cluster, way) for way in _SWITCH] if COLLECTIVES in without else [cluster]
    return tuple(Belief(_believed(one, flops_only=MEASURED_COST in without), one) for one in real)


def _believed(cluster: Cluster, *, flops_only: bool) -> Cluster:
    numbered = [replace(kind, source=str(number)) for number, kind in enumerate(cluster.kinds)]
    if flops_only:
        nothing: dict[str, Any] = {"launch_s": 0.0, "measured": (), **{one.name: one.default for one in optional(KIND)}}
        numbered = [replace(kind, bytes_per_s=_ENDLESS_BYTES_PER_S, **nothing) for kind in numbered]
    return replace(cluster, kinds=tuple(numbered))


def _by_one_way(cluster: Cluster, way: str) -> Cluster:
    """The cluster with every unequal gather and scatter carried out one way, and all else as it was."""
    if cluster.devices == 1:
        return cluster
    network = Network(cluster)
    found = {(each.collective, each.implementation): each for name in MEASURABLE for each in network.ways(name)}
    entries = [
        (name, each, _NEVER if name in _SWITCHED and each != way else _link(found[name, each]))
        for name, ways in MEASURABLE.items()
        for each in ways
        if (name, each) in found
    ]
    return replace(cluster, collectives=tuple(entries))


def _link(way: Algorithm) -> Link:
    """A way as if it had been measured."""
    equal = way.s_per_byte_if_equal
    if not equal:
        return Link(way.latency_s, 1e18)
    return Link(way.latency_s, min(max(1 / equal, 1.0), 1e18), way.s_per_largest_byte / equal)
