"""Worker processes shared by the tests of the runtime: a crew of each size, started once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lopsided.comm.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def crews() -> Iterator[Callable[[int], WorkerPool]]:
    made: dict[int, WorkerPool] = {}

    def of(size: int) -> WorkerPool:
        if size not in made or not made[size].alive:
            made[size] = WorkerPool(size, timeout_s=180)
        return made[size]

    yield of
    for crew in made.values():
        crew.close()
