"""Worker processes of their own: what libraries find out about their surroundings they keep for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lopsided.comm.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def one() -> Iterator[WorkerPool]:
    with WorkerPool(1, timeout_s=180) as pool:
        yield pool


@pytest.fixture(scope="session")
def three() -> Iterator[WorkerPool]:
    with WorkerPool(3, timeout_s=180) as pool:
        yield pool
