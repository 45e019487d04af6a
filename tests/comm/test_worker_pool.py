"""A pool does what it is told, tells what failed, and does not hang."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import RankError


def sum_of_ranks(start: int) -> float:
    total = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("nonsense")


def leave(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def test_every_worker_returns(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert worker_pools(3).run(sum_of_ranks, 10) == [33.0] * 3
    assert worker_pools(3).run(sum_of_ranks, 0) == [3.0] * 3


def test_a_failure_is_told() -> None:
    with WorkerPool(2) as pool, pytest.raises(RankError, match="worker 1 failed") as told:
        pool.run(fail_on, 1)
    assert "ValueError: nonsense" in str(told.value)


def test_a_worker_that_leaves_is_told() -> None:
    with WorkerPool(2) as pool, pytest.raises(RankError, match="exit code 3"):
        pool.run(leave, 0)
