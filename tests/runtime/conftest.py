"""Worker processes shared by the tests of the runtime: a crew of each size, started once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lopsided.comm.worker_pool import Crew


@pytest.fixture(scope="session")
def crews() -> Iterator[Callable[[int], Crew]]:
    made: dict[int, Crew] = {}

    def of(size: int) -> Crew:
        if size not in made or not made[size].alive:
            made[size] = Crew(size, timeout_s=180)
        return made[size]

    yield of
    for crew in made.values():
        crew.close()
