"""Copies of a value: which there can be, and what having several of them costs.

In: `Prices`. Out: the cheapest tree of copies, each made from another, for any set of them.

    closure        what follows from copies that are there, for nothing
    Trees          sets of copies: their prices, and what each copy is made from
    cheapest_store a parameter's set of copies, and how to keep it
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lopsided.ir.graph import Leaf, Node, Value
from lopsided.ir.notation import Rule
from lopsided.ir.placement import Placement

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


Free = frozenset[tuple[Placement, Placement]]  # conversions that cost nothing


def closure(placements: Iterable[Placement], known: Sequence[Placement], free: Free) -> Needs:
    """The placements together with those of `known` that follow from them for nothing."""
    have = set(placements)
    while True:
        more = {p for p in known if p not in have and any((q, p) in free for q in have)}
        if not more:
            return frozenset(have)
        have |= more


Tree = dict[Placement, Placement]  # for each copy, the one it is made from
_Array = NDArray[np.float64]  # of prices, from each placement
_ROUNDING = 1e-9


class Trees:
    """The cheapest ways to have copies of a value, each made from another, by way of any of its `placements`.

    A tree of several copies is a way to where it branches, and from there a tree for each part of them. From every
    placement at once, because trees of different starts have most of their branches in common (Dreyfus and Wagner):

        way(p, q)     = the cheapest chain of conversions                                `_shortest`
        tree(p, some) = min over q of way(p, q) + branching(q, some)                     `_from_each`
        branching(q, some) = min over part of tree(q, part) + tree(q, some without it)   `_branching`
    """

    def __init__(self, placements: Iterable[Placement], price: Price) -> None:
        self.placements = sorted(placements)
        self._number = {placement: k for k, placement in enumerate(self.placements)}
        self._ways, self._next = _shortest(
            np.array([[price(source, to) for to in self.placements] for source in self.placements])
        )
        self._is_free = (self._ways == 0).tolist()
        self._known: dict[tuple[int, ...], _Array] = {}
        self._known_trees: dict[tuple[Placement, Needs], Tree] = {}

    def prices(self, starts: Iterable[Placement], wanted: Needs) -> list[float]:
        """The prices of having all `wanted` from each of the starts."""
        found = self._from_each(self._generators(wanted))
        return [float(found[self._number[start]]) for start in starts]

    def tree(self, start: Placement, wanted: Iterable[Placement]) -> Tree:
        """What each copy is made from, those on the way among them."""
        key = (start, frozenset(wanted))
        if key not in self._known_trees:
            self._known_trees[key] = self._tree(*key)
        return self._known_trees[key]

    def _tree(self, start: Placement, wanted: Needs) -> Tree:
        made: dict[int, int] = {}
        root = self._number[start]

        def go(at: int, to: int) -> None:
            while at != to:
                stop = int(self._next[at, to])
                if stop != root:
                    made.setdefault(stop, at)
                at = stop

        def grow(at: int, targets: tuple[int, ...]) -> None:
            if len(targets) == 1:
                go(at, targets[0])
                return
            fork = int((self._ways[at] + self._branching(targets)).argmin())
            go(at, fork)
            for part in min(_parts(targets), key=lambda parts: sum(self._from_each(part)[fork] for part in parts)):
                grow(fork, part)

        targets = self._generators(wanted)
        if targets:
            grow(root, targets)
        for free in sorted(self._number[placement] for placement in wanted):
            if free not in made:
                go(min((root, *made), key=lambda at: (self._ways[at, free], at)), free)
        return {self.placements[to]: self.placements[source] for to, source in made.items()}

    def _generators(self, wanted: Iterable[Placement]) -> tuple[int, ...]:
        """Those that no other gives for nothing; of several that give each other, the first."""
        numbers = sorted(self._number[placement] for placement in wanted)
        free = self._is_free
        return tuple(k for k in numbers if not any(free[j][k] and (j < k or not free[k][j]) for j in numbers if j != k))

    def _from_each(self, targets: tuple[int, ...]) -> _Array:
        found = self._known.get(targets)
        if found is None:
            if len(targets) > 1:
                found = (self._ways + self._branching(targets)).min(axis=1)
            else:
                found = self._ways[:, targets[0]] if targets else np.zeros(len(self.placements))
            self._known[targets] = found
        return found

    def _branching(self, targets: tuple[int, ...]) -> _Array:
        offers = [self._from_each(part) + self._from_each(rest) for part, rest in _parts(targets)]
        cheapest: _Array = np.min(offers, axis=0)
        return cheapest


def _shortest(prices: _Array) -> tuple[_Array, NDArray[np.intp]]:
    """The price of the cheapest chain between any two, and its next stop (Floyd and Warshall).

    Ties go straight, and what differs by rounding is a tie.
    """
    ways, stops = prices, np.broadcast_to(np.arange(len(prices)), prices.shape)
    for middle in range(len(prices)):
        around = ways[:, middle, None] + ways[middle]
        shorter = around < ways * (1 - _ROUNDING)
        ways, stops = np.where(shorter, around, ways), np.where(shorter, stops[:, middle, None], stops)
    return ways, stops


def _parts(targets: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way to make two of several, neither empty."""
    first, *others = targets
    for count in range(len(others)):
        for more in itertools.combinations(others, count):
            yield (first, *more), tuple(target for target in others if target not in more)


def generators(placements: Needs, free: Free) -> list[Placement]:
    """The placements of a closed set that none of the others gives for nothing."""
    return [p for p in placements if not any((q, p) in free for q in placements if q != p)]


def cheapest_store(
    leaf: Leaf, stores: Sequence[Placement], needs: Needs, prices: Prices, trees: Trees
) -> tuple[float, Placement]:
    """How to keep a parameter that is used in these placements: the price and the placement."""
    fetched = trees.prices(stores, needs)
    best, k = min((prices.store(leaf, stored) + fetched[k], k) for k, stored in enumerate(stores))
    return best, stores[k]
