"""The search finds the optimum: equal to enumeration, by a bound that never exceeds the true rest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.planner.search import astar
from lopsided.planner.search.astar import Progress, gap_of, solve
from lopsided.planner.search.problem import Factor, Problem, solve_by_enumeration
from lopsided.planner.search.reduction import reduce_problem

PRICES = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.5, 7.0, math.inf])
LIMITS = st.sampled_from([1, 4, 12, 1 << 20])


@st.composite
def problems(draw: st.DrawFn, most_variables: int = 6) -> Problem:
    """Small problems, some with tables that are the same object, as equal layers have."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=most_variables)))
    factors = []
    tables: dict[tuple[int, ...], np.ndarray] = {}
    for _ in range(draw(st.integers(0, 9))):
        scope = tuple(sorted(draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=3))))
        shape = tuple(sizes[v] for v in scope)
        if shape not in tables or draw(st.booleans()):
            count = math.prod(shape)
            tables[shape] = np.array(draw(st.lists(PRICES, min_size=count, max_size=count))).reshape(shape)
        factors.append(Factor(scope, tables[shape]))
    return Problem(sizes, tuple(factors))


@given(problems(), LIMITS)
@settings(max_examples=400)
def test_the_solution_is_that_of_enumeration(problem: Problem, limit: int) -> None:
    expected, _ = solve_by_enumeration(problem)
    found = solve(problem, limit=limit)
    assert found.price == pytest.approx(expected)
    assert found.why == "proven"
    if math.isfinite(expected):
        assert found.gap == 0
        assert found.price == pytest.approx(problem.price(found.assignment))


@given(problems(), LIMITS)
def test_what_is_remembered_changes_nothing(problem: Problem, limit: int) -> None:
    assert solve(problem, limit=limit).assignment == solve(problem, limit=limit, remember=False).assignment


@given(problems(most_variables=5), LIMITS)
@settings(max_examples=200)
def test_the_bound_never_exceeds_the_true_rest(problem: Problem, limit: int) -> None:
    """For every partial assignment in the order of the search: f is at most the best completion, and never falls."""
    reduction = reduce_problem(problem, limit=limit)
    search = astar._Search(problem, reduction)
    order = [bucket.variable for bucket in reversed(reduction.buckets)]
    best = best_completions(problem, order)
    layer = [search.root]
    assert search.root.f <= best[()] + 1e-9
    for _ in order:
        children = []
        for state in layer:
            for child in search.children(state):
                assert child.f >= state.f - 1e-9
                assert child.f <= best[tuple(child.choices[v] for v in order[: len(child.choices)])] + 1e-9
                children.append(child)
        layer = children
    for state in layer:
        whole = tuple(state.choices[v] for v in range(len(problem.sizes)))
        assert state.f == pytest.approx(problem.price(whole))


def best_completions(problem: Problem, order: Sequence[int]) -> dict[tuple[int, ...], float]:
    """The price of the best whole assignment that begins so, for every beginning."""
    best: dict[tuple[int, ...], float] = {}
    for choices in itertools.product(*(range(problem.sizes[v]) for v in order)):
        assignment = [0] * len(order)
        for v, choice in zip(order, choices, strict=True):
            assignment[v] = choice
        price = problem.price(assignment)
        for k in range(len(order) + 1):
            best[choices[:k]] = min(best.get(choices[:k], math.inf), price)
    return best


def tangled(variables: int, choices: int, seed: int) -> Problem:
    """Every pair of variables has a table: nothing to reduce."""
    random = np.random.default_rng(seed)
    pairs = itertools.combinations(range(variables), 2)
    factors = tuple(Factor(pair, random.random((choices, choices))) for pair in pairs)
    return Problem((choices,) * variables, factors)


@pytest.mark.parametrize("limit", [1, 9, 27, 1 << 20])
def test_a_tangle_is_left_to_the_search(limit: int) -> None:
    problem = tangled(8, 3, seed=1)
    found = solve(problem, limit=limit)
    assert found.price == pytest.approx(solve_by_enumeration(problem)[0])
    assert (found.states > 0) == (limit < 3**8)


def test_out_of_time_the_best_so_far_is_returned_with_its_gap() -> None:
    problem = tangled(14, 4, seed=2)
    seen: list[Progress] = []
    hurried = solve(problem, limit=16, time_limit_s=0.0, progress=seen.append)
    assert hurried.why == "time limit"
    assert hurried.gap == gap_of(hurried.price, hurried.bound) > 0
    assert hurried.price == pytest.approx(problem.price(hurried.assignment))
    assert seen[0].best >= hurried.price
    patient = solve(problem)
    assert hurried.bound <= patient.price <= hurried.price


def test_interrupted_the_best_so_far_is_returned_with_its_gap() -> None:
    problem = tangled(14, 4, seed=2)

    def interrupt(progress: Progress) -> None:
        if progress.states > 50:
            raise KeyboardInterrupt

    found = solve(problem, limit=16, progress=interrupt)
    assert found.why == "interrupted"
    assert found.gap > 0
    assert found.bound <= solve(problem).price <= found.price


def test_equal_layers_are_folded_by_heart() -> None:
    """Depth is free: of forty layers, each with something inside, one is worked out."""
    random = np.random.default_rng(0)
    enter, leave, around = random.random((5, 2)), random.random((2, 5)), random.random((5, 5))

    def layers(count: int) -> Problem:
        factors = []
        for k in range(0, 3 * count, 3):
            for inside in (k + 1, k + 2):
                factors += [Factor((k, inside), enter), Factor((inside, k + 3), leave)]
            factors.append(Factor((k, k + 3), around))
        return Problem((*(5, 2, 2) * count, 5), tuple(factors))

    short, long = solve(layers(20)), solve(layers(40))
    assert (short.remembered, long.remembered) == (19, 39)
    assert solve(layers(40), remember=False).price == long.price


def test_a_problem_without_a_solution_costs_infinity() -> None:
    never = Factor((0, 1), np.array([[math.inf, math.inf], [math.inf, math.inf]]))
    assert solve(Problem((2, 2), (never,))).price == math.inf
