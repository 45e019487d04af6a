"""Copies of a value: which there can be, and what having several of them costs.

In: `Prices`. Out: the cheapest tree of copies, each made from another, for one set of them or for many.

    closure        what follows from copies that are there, for nothing
    cheapest_tree  one set of copies: the price, and what each is made from
    tree_prices    the prices of many sets, which share their parts
    cheapest_store a parameter's set of copies, and how to keep it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from lopsided.graph import Leaf, Node, Value
from lopsided.notation import Rule
from lopsided.placement import P, Placement, R

Needs = frozenset[Placement]  # the placements one consumer takes a value in


class Prices(Protocol):
    """What the search adds up, in seconds. Calls and values that are equal but for their names have equal prices."""

    def rule(self, node: Node, rule: Rule) -> float:
        """Running the node, forward and backward."""
        ...

    def convert(self, value: Value, source: Placement, to: Placement) -> float:
        """Converting an activation, forward and backward."""
        ...

    def store(self, leaf: Leaf, placement: Placement) -> float:
        """Keeping and updating a parameter."""
        ...

    def fetch(self, leaf: Leaf, stored: Placement, to: Placement) -> float:
        """Converting a parameter for use, and its gradient back."""
        ...

    def is_cheap(self, node: Node) -> bool:
        """Whether a node may be run whole on every device without anyone noticing."""
        ...


Price = Callable[[Placement, Placement], float]  # of a conversion


def price_of(value: Value, leaf: Leaf | None, prices: Prices) -> Price:
    """The price of converting this value; a leaf is fetched, anything else converted. Truth values do not add up."""
    known: dict[tuple[Placement, Placement], float] = {}

    def price(source: Placement, to: Placement) -> float:
        found = known.get((source, to))
        if found is None:
            found = known[source, to] = ask(source, to)
        return found

    def ask(source: Placement, to: Placement) -> float:
        if source == to:
            return 0.0
        if value.dtype == "bool" and to.kind == "P":
            return math.inf
        return prices.convert(value, source, to) if leaf is None else prices.fetch(leaf, source, to)

    return price


def closure(placements: Iterable[Placement], known: Sequence[Placement], price: Price) -> Needs:
    """The placements together with those of `known` that follow from them for nothing."""
    have = set(placements)
    while True:
        more = {p for p in known if p not in have and any(price(q, p) == 0 for q in have)}
        if not more:
            return frozenset(have)
        have |= more


Tree = dict[Placement, Placement]  # for each copy, the one it is made from


def cheapest_tree(start: Placement, wanted: Iterable[Placement], price: Price) -> tuple[float, Tree]:
    """The cheapest way to have all `wanted` from `start`: the price, and what each copy is made from.

    Copies are made from each other, or by way of `P` or `R`: most often `P` follows from everything for nothing, and
    everything from `R`.
    """
    targets = frozenset(wanted) - {start}
    if not targets:
        return 0.0, {}
    if start == P or price(start, P) == 0:
        return _tree((start, P), targets - {P}, price) if start != P else _tree((P,), targets, price)
    direct = _tree((start,), targets, price)
    by_way_of_p = _tree((start,), targets | {P}, price)
    return by_way_of_p if by_way_of_p[0] < direct[0] else direct


def _tree(have: tuple[Placement, ...], targets: frozenset[Placement], price: Price) -> tuple[float, Tree]:
    """From what is there (of which `P` was made from the first), with `R` on the way where that is cheaper."""
    first = dict.fromkeys(have[1:], have[0])
    direct, made = _in_the_best_order(have, targets, price)
    if R not in targets and R not in have:
        around, source = min((price(q, R), q) for q in have)
        if around < direct and all(price(R, target) == 0 for target in targets):
            return around, {**first, R: source, **dict.fromkeys(targets, R)}
    return direct, {**first, **made}


def _in_the_best_order(have: tuple[Placement, ...], targets: frozenset[Placement], price: Price) -> tuple[float, Tree]:
    """Each copy made from one that is there; what costs nothing is taken at once."""
    if not targets:
        return 0.0, {}
    if len(targets) == 1:
        (target,) = targets
        paid, source = min((price(q, target), q) for q in have)
        return paid, {target: source}
    known: dict[frozenset[Placement], tuple[float, Tree]] = {frozenset(): (0.0, {})}

    def rest(missing: frozenset[Placement]) -> tuple[float, Tree]:
        if missing not in known:
            there = (*have, *(targets - missing))
            offers = sorted((*min((price(q, target), q) for q in there), target) for target in missing)
            if offers[0][0] == 0:
                offers = offers[:1]
            best: tuple[float, Tree] = (math.inf, {})
            for paid, source, target in offers:
                more, tree = rest(missing - {target})
                if paid + more < best[0] or not best[1]:
                    best = (paid + more, {target: source, **tree})
            known[missing] = best
        return known[missing]

    return rest(targets)


def tree_prices(start: Placement, sets: Sequence[Needs], price: Price) -> list[float]:
    """What `cheapest_tree` costs for each of many sets: they have most of their parts in common.

    A tree without one of its leaves is the cheapest tree of what is left. One that reaches `R` has everything, so it
    is the shortest way there.
    """
    p_is_free = start == P or price(start, P) == 0
    have = {start, P} if p_is_free else {start}
    known: dict[Needs, float] = {frozenset(): 0.0}

    def direct(targets: Needs) -> float:
        if targets not in known:
            known[targets] = grown(targets)
        return known[targets]

    def grown(targets: Needs) -> float:
        if R in targets and all(price(R, target) == 0 for target in targets):
            return _distance(have, R, targets, price)
        best = math.inf
        for leaf in targets:
            rest = targets - {leaf}
            best = min(best, direct(rest) + min(price(q, leaf) for q in (*have, *rest)))
        return best

    around = min(price(q, R) for q in have)
    found = []
    for wanted in sets:
        targets = wanted - have
        if not targets:
            found.append(0.0)
            continue
        by_way_of_r = around if all(price(R, target) == 0 for target in targets) else math.inf
        by_way_of_p = math.inf if p_is_free else direct(targets | {P})
        found.append(min(direct(targets), by_way_of_p, by_way_of_r))
    return found


def _distance(have: Iterable[Placement], to: Placement, over: Iterable[Placement], price: Price) -> float:
    """The price of the cheapest chain from something that is there."""
    reached = dict.fromkeys(have, 0.0)
    waiting = {p: min(price(q, p) for q in reached) for p in over}
    while True:
        nearest = min(waiting, key=lambda p: (waiting[p], p))
        reached[nearest] = waiting.pop(nearest)
        if nearest == to:
            return reached[to]
        for p in waiting:
            waiting[p] = min(waiting[p], reached[nearest] + price(nearest, p))


def generators(placements: Needs, price: Price) -> list[Placement]:
    """The placements of a closed set that none of the others gives for nothing."""
    return [p for p in placements if not any(price(q, p) == 0 for q in placements if q != p)]


def cheapest_store(
    leaf: Leaf, stores: Sequence[Placement], needs: Needs, prices: Prices, price: Price
) -> tuple[float, Placement]:
    """How to keep a parameter that is used in these placements: the price and the placement."""
    priced = [
        (prices.store(leaf, stored) + cheapest_tree(stored, needs, price)[0], k) for k, stored in enumerate(stores)
    ]
    best, k = min(priced)
    return best, stores[k]
