"""Worker processes of their own: what libraries find out about their surroundings they keep for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lopsided.comm.worker_pool import WorkerPool
from tests.support.shared_pools import shared_pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], WorkerPool]]:
    with shared_pools() as made:
        yield made


@pytest.fixture
def one(pools: Callable[[int], WorkerPool]) -> WorkerPool:
    return pools(1)


@pytest.fixture
def three(pools: Callable[[int], WorkerPool]) -> WorkerPool:
    return pools(3)
