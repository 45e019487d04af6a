"""The same piece of work, again and again: does the machine still run as it did?

In: this rank's device. Out: `Beat`, whose `times` says what the work took here, all ranks at once. Whoever else is on
the machine slows down profile and race, and seldom both alike. What is predicted from a profile then misses the race,
and says nothing about predicting; nobody who competes has a part in this work, so it can tell.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

UNSTEADY = 0.12
"""By so much a race may be slower or quicker than the profile; beyond, the two were not of one machine. On hosts with
quotas the same work differs by up to a tenth from minute to minute with nobody else around."""


class Beat:
    """Products, copies through memory, and on a GPU many small calls: some 120 ms of a core, or 20 of a whole GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        side, megabytes = (4096, 256) if on_gpu else (512, 16)
        self._products, self._copies, self._small = (4, 8, 400) if on_gpu else (32, 12, 0)
        self._factor = torch.full((side, side), 1e-3, device=device)
        self._product = torch.empty_like(self._factor)
        self._source = torch.ones(megabytes * 2**18, device=device)
        self._to = torch.empty_like(self._source)
        self._little = torch.zeros(8, device=device)
        self._once()

    def _once(self) -> None:
        for _ in range(self._products):
            torch.mm(self._factor, self._factor, out=self._product)
        for _ in range(self._copies):
            self._to.copy_(self._source)
        for _ in range(self._small):
            self._little.add_(1.0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def times(self, count: int) -> list[float]:
        found = []
        for _ in range(count):
            dist.barrier()
            began = time.perf_counter()
            self._once()
            found.append(time.perf_counter() - began)
        return found


def drift(profile: Sequence[Sequence[float]], race: Sequence[Sequence[float]]) -> float:
    """How much longer the work took in the race than in the profile, as a part, on the rank that changed most.

    On the mean: where parts of a GPU get in each other's way now and then, there are two usual times and none between.
    """
    ranks = zip(profile, race, strict=True)
    changes = [statistics.fmean(later) / statistics.fmean(before) - 1 for before, later in ranks]
    return max(changes, key=abs)
