"""One thread and the same random numbers for every test."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from lopsided.comm.worker_pool import WorkerPool

torch.set_num_threads(1)
os.environ["LOPSIDED_CACHE"] = "0"  # nothing that is measured here is kept, or read from an earlier run
# A shell that starts the tests in the background has them, and all they start, ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "lopsided", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("lopsided")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def crews() -> Iterator[Callable[[int], WorkerPool]]:
    """Worker processes that tests share: a pool of each size, started once."""
    made: dict[int, WorkerPool] = {}

    def of(size: int) -> WorkerPool:
        if size not in made or not made[size].alive:
            made[size] = WorkerPool(size, timeout_s=180)
        return made[size]

    yield of
    for crew in made.values():
        crew.close()
