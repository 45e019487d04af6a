"""A problem of choices: variables with finite domains, and tables of prices over a few of them each.

In: nothing. Out: `Problem`, the plain form in which `reduction` computes bounds and `astar` finds the cheapest
assignment. It knows nothing of placements or devices, so both can be tested against brute force.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Assignment = tuple[int, ...]  # one choice per variable


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A price that depends on the variables in `scope`, in rising order; `table` has one axis for each."""

    scope: tuple[int, ...]
    table: Table

    def at(self, assignment: Sequence[int]) -> float:
        return float(self.table[tuple(assignment[v] for v in self.scope)])


@dataclass(frozen=True)
class Problem:
    """`sizes[v]` choices for variable v; the price of an assignment is the sum over all factors.

    Equal tables should be the same object: what is solved once is remembered by the tables it was made of.
    """

    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]

    def price(self, assignment: Sequence[int]) -> float:
        return math.fsum(factor.at(assignment) for factor in self.factors)


def solve_by_enumeration(problem: Problem) -> tuple[float, Assignment]:
    """Every assignment, one after the other: the oracle of the tests."""
    every = itertools.product(*(range(size) for size in problem.sizes))
    return min((problem.price(assignment), assignment) for assignment in every)
