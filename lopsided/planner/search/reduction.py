"""The bound: what the rest of a problem costs at least, found by folding its variables away one after the other.

In: a `Problem` and a limit on the size of tables. Out: `Reduction`, from which the bound of any partial assignment is
read off.

Folding a variable away adds the tables it stands in and minimises over it; what remains is a table over its
neighbours. A chain of ops so becomes one matrix (min-plus product), a region with one entry and one exit becomes one
matrix, a repeated layer is folded once and remembered by the tables it was made of, and a value that many regions
use is simply an axis of their tables. The smallest table first, so that all this happens from the inside out.

    fold(v)      m(rest) = min over v of Σ tables with v                     `Fold.of`
    bound        f(assigned) = Σ tables assigned + Σ folded tables assigned  `astar`

Where a table would be larger than the limit, its parts are minimised apart: min a + min b ≤ min (a + b). The bound is
then still a bound, no longer the truth, and the search has something to do. Without a limit it is exact.

Which variable is folded when, and which folds are equal, depends on where tables stand and not on what is in them
(`Elimination`). Problems that differ in prices alone have that in common (`Eliminations`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lopsided.planner.search.problem import Problem, Table

Place = tuple[tuple[int, ...], int]
"""A table where it stands: its variables in rising order, and its number."""


@dataclass(frozen=True, slots=True)
class EliminationBucket:
    """One variable at the moment it was folded away: the tables it stood in, and what they became.

    Buckets of one `kind` have the same tables, lined up alike; `others` are the variables beside it, in rising order.
    """

    variable: int
    others: tuple[int, ...]
    factors: tuple[Place, ...]
    folded: tuple[Place, ...]
    kind: int

    @property
    def is_exact(self) -> bool:
        return len(self.folded) <= 1


@dataclass(frozen=True, slots=True)
class Fold:
    """Tables, by number and by the shape in which they are lined up, added up and minimised over an axis."""

    parts: tuple[tuple[int, tuple[int, ...]], ...]
    shape: tuple[int, ...]
    axis: int
    is_split: bool  # the table of all that was to be folded is too large

    def of(self, tables: Sequence[Table]) -> Table:
        total: Table = np.zeros((1,) * len(self.shape))
        for number, shape in self.parts:
            total = total + tables[number].reshape(shape)
        folded: Table = np.broadcast_to(total, self.shape).min(axis=self.axis)
        return folded


@dataclass(frozen=True, slots=True)
class Elimination:
    """All variables of a problem in the order they are folded. Each fold makes the table with the next number."""

    buckets: tuple[EliminationBucket, ...]
    folds: tuple[Fold, ...]  # folds that differ from each other
    constants: tuple[int, ...]  # tables of no variable that are left
    remembered: int  # folds that equal one before

    def tables(self, given: Sequence[Table], out_of_time: Callable[[], bool]) -> list[Table] | None:
        """All tables, those given first. None when time is up and there are tables that could be smaller."""
        made = list(given)
        for fold in self.folds:
            if fold.is_split and out_of_time():
                return None
            made.append(fold.of(made))
        return made


Eliminations = dict[object, Elimination]
"""Those of problems met before, by where their tables stand."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """The buckets in the order they were folded, all tables by number, and the bound of the whole problem."""

    buckets: tuple[EliminationBucket, ...]
    tables: Sequence[Table]
    bound: float
    entries: int  # entries of all tables that were computed
    remembered: int  # folds that had been done before


def reduce_problem(
    problem: Problem,
    *,
    limit: int,
    remember: bool = True,
    known: Eliminations | None = None,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Reduction:
    """Fold every variable away. When time is up the limit falls to almost nothing: a weak bound, but at once."""
    numbers: dict[int, int] = {}
    given: list[Table] = []
    places: list[Place] = []
    for factor in problem.factors:
        key = id(factor.table) if remember else len(given)
        if key not in numbers:
            numbers[key] = len(given)
            given.append(factor.table)
        places.append((factor.scope, numbers[key]))
    count = len(given)
    order = _elimination(problem.sizes, tuple(places), count, limit, limit, known)
    tables = order.tables(given, out_of_time)
    if tables is None:
        order = _elimination(problem.sizes, tuple(places), count, limit, 1, known)
        tables = order.tables(given, lambda: False) or []
    bound = sum((float(tables[number]) for number in order.constants), 0.0)
    entries = sum(math.prod(fold.shape) for fold in order.folds)
    return Reduction(order.buckets, tables, bound, entries, order.remembered)


def _elimination(
    sizes: tuple[int, ...],
    places: tuple[Place, ...],
    tables: int,
    limit: int,
    split_limit: int,
    known: Eliminations | None,
) -> Elimination:
    if known is None:
        return _Order(sizes, places, tables, limit, split_limit).elimination()
    key = (sizes, places, limit, split_limit)
    if key not in known:
        known[key] = _Order(sizes, places, tables, limit, split_limit).elimination()
    return known[key]


class _Order:
    """Folds one variable after the other; tables are numbers here."""

    def __init__(
        self, sizes: tuple[int, ...], places: tuple[Place, ...], tables: int, limit: int, split_limit: int
    ) -> None:
        self.sizes, self.given, self.limit, self.split_limit = sizes, tables, limit, split_limit
        self.standing: list[dict[int, Place]] = [{} for _ in sizes]  # by variable: the tables it stands in
        self.neighbours: list[set[int]] = [set() for _ in sizes]
        self.constants: list[int] = []
        self.count = 0  # how many tables were put somewhere
        self.folds: dict[Fold, int] = {}
        self.kinds: dict[object, int] = {}
        self.remembered = 0
        for place in places:
            self._put(place)
        for v, near in enumerate(self.neighbours):
            near.discard(v)

    def _put(self, place: Place) -> None:
        scope, number = place
        if not scope:
            self.constants.append(number)
            return
        for v in scope:
            self.standing[v][self.count] = place
            self.neighbours[v].update(scope)
        self.count += 1

    def _entries(self, v: int) -> int:
        return self.sizes[v] * math.prod([self.sizes[w] for w in self.neighbours[v]])

    def elimination(self) -> Elimination:
        queue = [(self._entries(v), v) for v in range(len(self.sizes))]
        heapq.heapify(queue)
        done = [False] * len(self.sizes)
        buckets: list[EliminationBucket] = []
        while queue:
            size, v = heapq.heappop(queue)
            if done[v]:
                continue
            if (now := self._entries(v)) != size:
                heapq.heappush(queue, (now, v))
                continue
            done[v] = True
            near = sorted(self.neighbours[v])
            buckets.append(self._folded(v, near, is_split=size > self.limit))
            for w in near:
                heapq.heappush(queue, (self._entries(w), w))
        return Elimination(tuple(buckets), tuple(self.folds), tuple(self.constants), self.remembered)

    def _folded(self, v: int, near: Sequence[int], *, is_split: bool) -> EliminationBucket:
        """Takes a variable away, and puts what its tables became where they stood."""
        mine = sorted(self.standing[v].items())
        for key, (scope, _) in mine:
            for w in scope:
                if w != v:
                    self.standing[w].pop(key)
        factors = tuple(place for _, place in mine)
        groups = [factors] if not is_split else _groups(factors, self.sizes, self.split_limit)
        folded = tuple(self._fold(group, v, is_split) for group in groups if group)
        for w in near:
            self.neighbours[w].discard(v)
        for place in folded:
            self._put(place)
        for w in near:
            if len(folded) > 1:
                # A split bucket does not tie all its neighbours together.
                self.neighbours[w] = {u for scope, _ in self.standing[w].values() for u in scope}
            self.neighbours[w].discard(w)
        seen = (v, *near)
        kind = tuple((number, tuple(seen.index(w) for w in scope)) for scope, number in (*factors, *folded))
        number = self.kinds.setdefault((kind, len(folded)), len(self.kinds))
        return EliminationBucket(v, tuple(near), factors, folded, number)

    def _fold(self, group: Sequence[Place], v: int, is_split: bool) -> Place:
        union = sorted({w for scope, _ in group for w in scope})
        parts = tuple((number, tuple(self.sizes[w] if w in scope else 1 for w in union)) for scope, number in group)
        fold = Fold(parts, tuple(self.sizes[w] for w in union), union.index(v), is_split)
        number = self.folds.get(fold)
        if number is None:
            number = self.folds[fold] = self.given + len(self.folds)
        else:
            self.remembered += 1
        return tuple(w for w in union if w != v), number


def _groups(places: Sequence[Place], sizes: Sequence[int], limit: int) -> list[tuple[Place, ...]]:
    """Tables in as few groups as the limit on what they are joined to allows, first fit, the largest first."""

    def entries(scope: Sequence[int] | set[int]) -> int:
        return math.prod([sizes[w] for w in scope])

    groups: list[tuple[set[int], list[Place]]] = []
    for place in sorted(places, key=lambda place: (-entries(place[0]), place[0])):
        for scope, group in groups:
            union = scope.union(place[0])
            if entries(union) <= limit:
                scope.update(union)
                group.append(place)
                break
        else:
            groups.append((set(place[0]), [place]))
    return [tuple(group) for _, group in groups]
