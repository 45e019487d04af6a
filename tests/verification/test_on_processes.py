"""Real processes compute what one device computes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.placement import Shares
from lopsided.models.zoo import SMALL
from tests.support.jobs import Run, at_random, classic, step, training

SHARES = {
    2: Shares((0.7, 0.3), named=(("state", (0.4, 0.6)),)),
    3: Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),)),
    4: Shares((0.4, 0.0, 0.35, 0.25), named=(("state", (0.1, 0.5, 0.4, 0.0)),)),
}


def assert_same(pool: WorkerPool, runs: list[Run]) -> None:
    for rank, found in enumerate(pool.run(step, runs)):
        for run, (error, where) in zip(runs, found, strict=True):
            assert error < 1e-9, f"rank {rank}: {where} is {error:g} off\n{run.program}"


@pytest.mark.sampled(7)
@pytest.mark.parametrize("size", SHARES)
@pytest.mark.parametrize("spec", SMALL.values(), ids=list(SMALL))
def test_a_step_is_that_of_one_device(
    worker_pools: Callable[[int], WorkerPool], spec: str, size: int, everything: bool
) -> None:
    runs = [classic(spec, name, SHARES[size]) for name in ("dp", "zero", "zero-again", "planned")]
    seeds = range(3) if everything else range(size % 2, size % 2 + 1)  # odd ones gather parameters again
    assert_same(worker_pools(size), [*runs, *(at_random(spec, SHARES[size], seed) for seed in seeds)])


TRAININGS = ["dp", "planned", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero-again", "random"))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("spec", SMALL.values(), ids=list(SMALL))
def test_a_training_is_that_of_one_device(
    worker_pools: Callable[[int], WorkerPool], spec: str, name: str, everything: bool
) -> None:
    steps = 20 if everything else 10
    run = at_random(spec, SHARES[3], 5) if name == "random" else classic(spec, name, SHARES[3])
    found = worker_pools(3).run(training, run, steps, 1.0 if name == "dp" else math.inf)
    assert len(found[0].expected) == steps
    assert max(found[0].curve_errors) < 1e-4, run.program
    assert all(same.curve == found[0].curve for same in found)
