"""Rule book + prices → the cheapest program, with a proof.

In: a `RuleBook` and `Prices` (seconds of every rule and conversion at given shares). Out: `Found`: the program, its
price, the bound, and the gap between them. `choices` writes the search down as a problem, `reduction` computes its
bound, `astar` solves it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from lopsided.errors import ProgramError
from lopsided.ir.graph import Node
from lopsided.ir.notation import Rule
from lopsided.ir.program import Program, RuleBook
from lopsided.planner.search.astar import TABLE_LIMIT, Progress, gap_of, solve
from lopsided.planner.search.choices import ChoiceSpace, Conversions, Stores
from lopsided.planner.search.copies import Prices

__all__ = ["ChoiceSpace", "Conversions", "Found", "Prices", "Progress", "gap_of", "search"]


@dataclass(frozen=True, slots=True)
class Found:
    """The best program found. `states` are partial programs that were priced, in tables or one by one."""

    program: Program
    cost_s: float
    bound_s: float
    states: int
    expanded: int  # of the states, those A* expanded because the bound alone did not decide
    remembered: int  # parts known from an equal part of the model
    seconds: float
    why: str  # what ended it: "proven", "time limit", "interrupted", or what was left out

    @property
    def gap(self) -> float:
        return gap_of(self.cost_s, self.bound_s)


def search(
    book: RuleBook,
    prices: Prices,
    *,
    stores: Stores | None = None,
    allowed: Callable[[Node, Rule], bool] = lambda node, rule: True,
    reduce: bool = True,
    remember: bool = True,
    space: ChoiceSpace | None = None,
    conversions: Conversions | None = None,
    time_limit_s: float = math.inf,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Found:
    """The cheapest program of the book. With `reduce` off everything is left to A*, for those who have the time.

    Searches of one book, with the same `stores` and `allowed`, have a `space` in common, which remembers what does not
    depend on prices. Those with the same shares on the same devices have `conversions` in common, too.
    """
    started = time.perf_counter()
    space = space or ChoiceSpace(book, prices, stores=stores, allowed=allowed)
    chosen = space.priced(prices, conversions)
    built_s = time.perf_counter() - started
    solution = solve(
        chosen.problem,
        limit=TABLE_LIMIT if reduce else 1,
        remember=remember,
        known=space.eliminations,
        time_limit_s=max(time_limit_s - built_s, 0.0),
        progress=progress,
    )
    if not math.isfinite(solution.price):
        raise ProgramError("no program of the rule book fits together", do="pin less, or allow more rules")
    program = chosen.program(solution.assignment)
    return Found(
        program,
        solution.price,
        # Where some sets of copies were not considered, nothing is proven below what they might save.
        solution.bound if chosen.complete else 0.0,
        solution.entries + solution.states,
        solution.states,
        solution.remembered,
        time.perf_counter() - started,
        solution.why if chosen.complete else "too many sets of copies to consider all",
    )
