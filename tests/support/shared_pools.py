"""Worker processes that tests share: a pool of each size, started when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from lopsided.comm.worker_pool import WorkerPool

USES = 30
"""How often a pool is given out before its processes are started anew, which takes a second. Tests make process groups
of many kinds, and the thread of each wakes up a hundred times a second for as long as its process lives."""


class Pools(Protocol):
    """A pool of so many processes."""

    def __call__(self, size: int) -> WorkerPool: ...


@contextmanager
def shared_pools() -> Iterator[Pools]:
    made: dict[int, WorkerPool] = {}
    uses: dict[int, int] = {}

    def of(size: int) -> WorkerPool:
        uses[size] = uses.get(size, 0) + 1
        if size in made and uses[size] > USES:
            made.pop(size).close()
        if size not in made or not made[size].alive:
            made[size], uses[size] = WorkerPool(size, timeout_s=180), 1
        return made[size]

    yield of
    for pool in made.values():
        pool.close()
