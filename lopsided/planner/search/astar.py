"""A*: the cheapest assignment of a problem, with a proof.

In: a `Problem`. Out: `Solution`: the best assignment, its price, the bound below which none can be, and the states it
took to know. States are partial assignments, made in the reverse of the order in which `reduction` folded the
variables, so that the folded tables are the bound of what is not yet assigned:

    f(root) = the bound of the whole                                                        `Reduction.bound`
    f(state + choice of v) = f(state) + Σ tables of v's bucket − what they were folded into  `_children`

The difference is never negative: f rises along every path and ends as the true price (admissible and consistent).
States that agree on every variable the rest still looks at have the same rest; the cheapest of them is kept. Below
the last bucket that had to be split f is exact, and the best choice of each variable is simply taken (`_descend`).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lopsided.planner.search.problem import Assignment, Problem, Table
from lopsided.planner.search.reduction import EliminationBucket, Eliminations, Place, Reduction, reduce_problem

# Entries, 8 MB: a larger table costs more time than the search it saves.
TABLE_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search stands."""

    states: int
    best: float
    bound: float
    seconds: float

    @property
    def gap(self) -> float:
        return gap_of(self.best, self.bound)


@dataclass(frozen=True, slots=True)
class Solution:
    """The best assignment found, and the proof of how good it is. `why` says what ended the search."""

    assignment: Assignment
    price: float
    bound: float
    states: int  # expanded by A*
    entries: int  # of tables computed for the bound
    remembered: int  # folds known from an equal part of the problem
    seconds: float
    why: str  # "proven", "time limit" or "interrupted"

    @property
    def gap(self) -> float:
        return gap_of(self.price, self.bound)


def gap_of(price: float, bound: float) -> float:
    """How far, relatively, the best is above the bound; rounding in the last digits is no gap."""
    if not math.isfinite(price):
        return math.inf
    return 0.0 if price - bound <= 1e-9 * abs(price) else (price - bound) / price


def solve(
    problem: Problem,
    *,
    limit: int = TABLE_LIMIT,
    remember: bool = True,
    known: Eliminations | None = None,
    time_limit_s: float = math.inf,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Solution:
    """The cheapest assignment; `limit=1` switches reduction off, `remember=False` its memory.

    `known` is what problems with the same tables in the same places were found to have in common.
    """
    started = time.perf_counter()

    def seconds() -> float:
        return time.perf_counter() - started

    reduction = reduce_problem(
        problem,
        limit=limit,
        remember=remember,
        known=known,
        out_of_time=lambda: seconds() > time_limit_s,
    )
    search = _Search(problem, reduction)
    # A first answer before any state is expanded: follow the bound down.
    best = search.descend(search.root)
    why = "proven"
    bound = reduction.bound
    if search.branching and gap_of(best.f, bound) > 0:
        best, bound, why = _expand(search, best, lambda: seconds() > time_limit_s, progress, seconds)
    assignment = tuple(best.choices[v] for v in range(len(problem.sizes)))
    price = problem.price(assignment)
    return Solution(
        assignment,
        price,
        min(bound, price),
        search.states,
        reduction.entries,
        reduction.remembered,
        seconds(),
        why,
    )


@dataclass(frozen=True, slots=True)
class _State:
    f: float
    level: int  # buckets not yet assigned
    choices: dict[int, int]


class _Search:
    """The tree of partial assignments."""

    def __init__(self, problem: Problem, reduction: Reduction) -> None:
        self.buckets, self.tables = reduction.buckets, reduction.tables
        # Levels count down from the bucket folded last; those above `branching` may need several tries.
        split = [k for k, bucket in enumerate(self.buckets) if not bucket.is_exact]
        self.branching = len(self.buckets) - split[0] if split else 0
        self.lowest = split[0] if split else len(self.buckets)
        self.root = _State(reduction.bound, len(self.buckets), {})
        self.states = 0
        self.contexts = self._contexts()
        self._descents: dict[tuple[int, tuple[int, ...]], tuple[int, float]] = {}

    def _contexts(self) -> dict[int, tuple[int, ...]]:
        """For each level that may branch: the assigned variables that buckets below still look at."""
        seen: set[int] = set()
        contexts: dict[int, tuple[int, ...]] = {0: ()}
        for k, bucket in enumerate(self.buckets):
            seen.update(bucket.others)
            seen.discard(bucket.variable)
            if k + 1 >= self.lowest:
                contexts[k + 1] = tuple(sorted(seen))
        return contexts

    def rises(self, bucket: EliminationBucket, choices: dict[int, int]) -> Table:
        """How much f rises with each choice of the bucket's variable."""
        total: Table | None = None
        for scope, number in bucket.factors:
            part = self.tables[number][tuple(slice(None) if w == bucket.variable else choices[w] for w in scope)]
            total = part if total is None else total + part
        folded = sum(self._value(place, choices) for place in bucket.folded)
        if total is None:
            return np.zeros(1)
        return np.maximum(total - folded, 0.0) if math.isfinite(folded) else np.full(len(total), math.inf)

    def descend(self, state: _State) -> _State:
        """Down to a whole assignment by the best choice at every level."""
        choices, f = dict(state.choices), state.f
        for bucket in reversed(self.buckets[: state.level]):
            # Equal layers are equal choices after what is chosen around them.
            key = (bucket.kind, tuple([choices[w] for w in bucket.others]))
            if key not in self._descents:
                rises = self.rises(bucket, choices)
                choice = int(rises.argmin())
                self._descents[key] = choice, float(rises[choice])
            choices[bucket.variable], rise = self._descents[key]
            f += rise
        return _State(f, 0, choices)

    def children(self, state: _State) -> list[_State]:
        self.states += 1
        bucket = self.buckets[state.level - 1]
        rises = self.rises(bucket, state.choices)
        return [
            _State(state.f + float(rise), state.level - 1, {**state.choices, bucket.variable: choice})
            for choice, rise in enumerate(rises)
            if math.isfinite(rise)
        ]

    def _value(self, place: Place, choices: dict[int, int]) -> float:
        scope, number = place
        return float(self.tables[number][tuple(choices[w] for w in scope)])


def _expand(
    search: _Search,
    best: _State,
    out_of_time: Callable[[], bool],
    progress: Callable[[Progress], None],
    seconds: Callable[[], float],
) -> tuple[_State, float, str]:
    """Best-first over the levels that branch. Returns the best state, the bound, and why it ended."""
    tick = 0
    queue: list[tuple[float, int, int, _State]] = [(search.root.f, search.root.level, tick, search.root)]
    cheapest: dict[tuple[int, tuple[int, ...]], float] = {}
    bound = search.root.f
    try:
        while queue:
            f, _, _, state = heapq.heappop(queue)
            bound = f
            if gap_of(best.f, f) <= 0:
                return best, f, "proven"
            if state.level <= search.lowest:
                # Nothing below branches: its bound is its price, and no other state's bound is lower.
                whole = search.descend(state)
                return (whole if whole.f < best.f else best), f, "proven"
            if tick % 64 == 0:
                progress(Progress(search.states, best.f, bound, seconds()))
                if out_of_time():
                    return min(best, search.descend(state), key=lambda s: s.f), bound, "time limit"
            for child in search.children(state):
                if gap_of(best.f, child.f) <= 0:
                    continue
                key = (child.level, tuple(child.choices[w] for w in search.contexts[child.level]))
                if child.f < cheapest.get(key, math.inf):
                    cheapest[key] = child.f
                    tick += 1
                    heapq.heappush(queue, (child.f, child.level, tick, child))
    except KeyboardInterrupt:
        return best, bound, "interrupted"
    return best, best.f, "proven"
