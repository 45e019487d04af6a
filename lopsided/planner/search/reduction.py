"""The bound: what the rest of a problem costs at least, found by folding its variables away one after the other.

In: a `Problem` and a limit on the size of tables. Out: `Reduction`, from which the bound of any partial assignment is
read off.

Folding a variable away adds the tables it stands in and minimises over it; what remains is a table over its
neighbours. A chain of ops so becomes one matrix (min-plus product), a region with one entry and one exit becomes one
matrix, a repeated layer is folded once and remembered by the tables it was made of, and a value that many regions
use is simply an axis of their tables. The smallest table first, so that all this happens from the inside out.

    fold(v)      m(rest) = min over v of Σ tables with v                     `_fold`
    bound        f(assigned) = Σ tables assigned + Σ folded tables assigned  `astar`

Where a table would be larger than the limit, its parts are minimised apart: min a + min b ≤ min (a + b). The bound is
then still a bound, no longer the truth, and the search has something to do. Without a limit it is exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lopsided.planner.search.problem import Factor, Problem, Table


@dataclass(frozen=True, slots=True)
class EliminationBucket:
    """One variable at the moment it was folded away: the tables it stood in, and what they became."""

    variable: int
    factors: tuple[Factor, ...]
    folded: tuple[Factor, ...]

    @property
    def is_exact(self) -> bool:
        return len(self.folded) <= 1


@dataclass(frozen=True, slots=True)
class Reduction:
    """The buckets in the order they were folded, and the bound of the whole problem."""

    buckets: tuple[EliminationBucket, ...]
    bound: float
    entries: int  # of tables computed
    remembered: int  # folds that had been done before


@dataclass(slots=True)
class SolvedRegions:
    """Folds done before: by the tables, how they were lined up, and which axis was folded."""

    folds: dict[object, Table]
    kept: list[Table]  # alive as long as their ids are keys

    @staticmethod
    def empty() -> SolvedRegions:
        return SolvedRegions({}, [])


def reduce_problem(
    problem: Problem,
    *,
    limit: int,
    memory: SolvedRegions | None = None,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Reduction:
    """Fold every variable away. When time is up the limit falls to almost nothing: a weak bound, but at once."""
    sizes = problem.sizes
    standing: list[dict[int, Factor]] = [{} for _ in sizes]  # by variable: the tables it stands in, by number
    neighbours: list[set[int]] = [set() for _ in sizes]
    constant = 0.0
    number = 0

    def put(factor: Factor) -> None:
        nonlocal constant, number
        if not factor.scope:
            constant += float(factor.table)
            return
        for v in factor.scope:
            standing[v][number] = factor
            neighbours[v].update(factor.scope)
        number += 1

    for factor in problem.factors:
        put(factor)
    for v, near in enumerate(neighbours):
        near.discard(v)

    def entries_of(v: int) -> int:
        return sizes[v] * math.prod(sizes[w] for w in neighbours[v])

    queue = [(entries_of(v), v) for v in range(len(sizes))]
    heapq.heapify(queue)
    done = [False] * len(sizes)
    buckets: list[EliminationBucket] = []
    entries = remembered = 0
    while queue:
        size, v = heapq.heappop(queue)
        if done[v]:
            continue
        if (now := entries_of(v)) != size:
            heapq.heappush(queue, (now, v))
            continue
        done[v] = True
        mine = sorted(standing[v].items())
        for key, factor in mine:
            for w in factor.scope:
                if w != v:
                    standing[w].pop(key)
        factors = tuple(factor for _, factor in mine)
        groups = [factors] if size <= limit else _groups(factors, v, sizes, 1 if out_of_time() else limit)
        folded = []
        for group in groups:
            made, cost, known = _fold(group, v, sizes, memory)
            entries += cost
            remembered += known
            folded.append(made)
        buckets.append(EliminationBucket(v, factors, tuple(folded)))
        near = neighbours[v]
        for w in near:
            neighbours[w].discard(v)
        for made in folded:
            put(made)
        if len(folded) > 1:
            # A split bucket does not tie all its neighbours together.
            for w in near:
                neighbours[w] = {u for factor in standing[w].values() for u in factor.scope} - {w}
        else:
            for w in near:
                neighbours[w].discard(w)
        for w in near:
            heapq.heappush(queue, (entries_of(w), w))
    return Reduction(tuple(buckets), constant, entries, remembered)


def _groups(factors: Sequence[Factor], v: int, sizes: Sequence[int], limit: int) -> list[tuple[Factor, ...]]:
    """Factors in as few groups as tables within the limit allow, first fit, the largest first."""
    groups: list[tuple[set[int], list[Factor]]] = []
    for factor in sorted(factors, key=lambda f: (-f.table.size, f.scope)):
        for scope, group in groups:
            union = scope.union(factor.scope)
            if math.prod(sizes[w] for w in union) <= limit:
                scope.update(union)
                group.append(factor)
                break
        else:
            groups.append((set(factor.scope), [factor]))
    return [tuple(group) for _, group in groups]


def _fold(
    factors: Sequence[Factor], v: int, sizes: Sequence[int], memory: SolvedRegions | None
) -> tuple[Factor, int, bool]:
    """The factors added up and minimised over `v`; how many entries that took, and whether it was remembered."""
    union = sorted({w for factor in factors for w in factor.scope})
    if not factors:
        return Factor((), np.zeros(())), 0, False
    place = {w: k for k, w in enumerate(union)}
    axis = place[v]
    scope = tuple(w for w in union if w != v)
    key = (axis, tuple((id(f.table), tuple(place[w] for w in f.scope)) for f in factors))
    if memory is not None and (known := memory.folds.get(key)) is not None:
        return Factor(scope, known), 0, True
    total = joined(factors, union, sizes)
    table = total.min(axis=axis)
    if memory is not None:
        memory.folds[key] = table
        memory.kept += [f.table for f in factors]
    return Factor(scope, table), total.size, False


def joined(factors: Sequence[Factor], union: Sequence[int], sizes: Sequence[int]) -> Table:
    """The sum of the factors, over the variables of `union` in rising order."""
    place = {w: k for k, w in enumerate(union)}
    total: Table = np.zeros((1,) * len(union))
    for factor in factors:
        shape = [1] * len(union)
        for w in factor.scope:
            shape[place[w]] = sizes[w]
        total = total + factor.table.reshape(shape)
    return np.broadcast_to(total, tuple(sizes[w] for w in union))
