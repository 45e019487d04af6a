"""Worker processes of their own: what libraries find out about their surroundings they keep for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lopsided.comm.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], WorkerPool]]:
    made: dict[int, WorkerPool] = {}

    def of(size: int) -> WorkerPool:
        if size not in made or not made[size].alive:
            made[size] = WorkerPool(size, timeout_s=180)
        return made[size]

    yield of
    for pool in made.values():
        pool.close()


@pytest.fixture
def one(pools: Callable[[int], WorkerPool]) -> WorkerPool:
    return pools(1)


@pytest.fixture
def three(pools: Callable[[int], WorkerPool]) -> WorkerPool:
    return pools(3)
