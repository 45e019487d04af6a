"""Calls that all ranks must make, made by some of them only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm import watchdog
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.placement import Shares
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.runtime.parallel import Parallel
from tests.support.jobs import cluster_of, plan_of, prices_of
from tests.support.two_matrices import numbers, products, small, told

Pools = Callable[[int], WorkerPool]


def _save(pm: Parallel, folder: str) -> object:
    return lopsided.save_checkpoint(pm, None, folder)


def _load(pm: Parallel, folder: str) -> object:
    return lopsided.load_checkpoint(pm, None, folder)


def _clip(pm: Parallel, folder: str) -> object:
    return lopsided.clip_grad_norm_(pm, 1.0)


def _full(pm: Parallel, folder: str) -> object:
    return lopsided.full_state_dict(pm)


def _fill(pm: Parallel, folder: str) -> object:
    return lopsided.load_full_state_dict(pm, {})


def _record(pm: Parallel, folder: str) -> object:
    return pm.record()


CALLS = {
    _save: "save_checkpoint",
    _load: "load_checkpoint",
    _clip: "clip_grad_norm_",
    _full: "full_state_dict",
    _fill: "load_full_state_dict",
    _record: "pm.record",
}


def one_rank_only(call: Callable[[Parallel, str], object], folder: str, timeout_s: float) -> str:
    """Rank 0 makes a call, and the others go on with the next step."""
    _, pm = small(timeout_s=timeout_s)
    pm(numbers()).backward()
    said = told(lambda: call(pm, folder) if dist.get_rank() == 0 else pm(numbers()))
    # The others look for the reason before this rank says goodbye.
    dist.barrier()
    pm.close()
    return said


@pytest.mark.parametrize("call", CALLS, ids=CALLS.values())
def test_a_call_that_one_rank_makes(
    worker_pools: Pools, call: Callable[[Parallel, str], object], tmp_path: Path
) -> None:
    # A timeout of its own, so that no other test has the groups that are broken off here.
    timeout_s = 4 + [*CALLS].index(call) / 100
    for said in worker_pools(3).run(one_rank_only, call, str(tmp_path), timeout_s):
        assert said.startswith(
            f"ranks do not do the same: the call is {CALLS[call]} on rank 0, a forward pass on ranks 1, 2"
        )
        assert "`if rank == 0`" in said or "see the output of rank 0" in said


def nobody_else_comes(folder: str) -> tuple[str, float]:
    """Rank 0 saves, the others do something else for longer than the timeout."""
    _, pm = small(timeout_s=2)
    began = time.monotonic()
    said = ""
    if dist.get_rank() == 0:
        said = told(lambda: lopsided.save_checkpoint(pm, None, folder))
        dist.distributed_c10d._get_default_store().set(f"waited {folder}", "")
    else:
        dist.distributed_c10d._get_default_store().wait([f"waited {folder}"])
    pm.close()
    return said, time.monotonic() - began


def test_a_call_that_the_others_never_make(tmp_path: Path) -> None:
    with WorkerPool(3, timeout_s=120) as pool:
        (said, waited_s), *_ = pool.run(nobody_else_comes, str(tmp_path))
    assert "rank 1" in said
    assert "in the training script" in said
    assert "waiting for save_checkpoint" in said
    assert waited_s < 25


def for_two_of_three() -> Plan:
    """A plan that leaves the third process without a device."""
    two = Shares((0.7, 0.3), named=(("state", (0.5, 0.5)),))
    book = derive_rules(capture(products(), (numbers(),)))
    plan = plan_of(stored_cut(data_parallel(book, prices_of(book.graph, two))), two)
    three = cluster_of(3)
    return replace(plan, cluster=three, on=three.without_device(three.device_names[2]))


def bystander_elsewhere(folder: str) -> tuple[str, str]:
    """A rank without a device clips where the others save."""
    pm = lopsided.parallelize(products(), (numbers(),), plan=for_two_of_three(), timeout_s=31)
    pm(numbers()).backward()
    alike = told(lambda: lopsided.clip_grad_norm_(pm, 1.0))
    if pm.world.takes_part:
        said = told(lambda: lopsided.save_checkpoint(pm, None, folder))
    else:
        said = told(lambda: lopsided.clip_grad_norm_(pm, 1.0))
    pm.close()
    return alike, said


def test_ranks_without_a_device_are_asked_too(worker_pools: Pools, tmp_path: Path) -> None:
    for alike, said in worker_pools(3).run(bystander_elsewhere, str(tmp_path)):
        assert alike == ""
        assert "the call is clip_grad_norm_ on rank 2, save_checkpoint on ranks 0, 1" in said


class Stalling(Dataset[tuple[Tensor]]):
    """Rows, of which one, on one rank, takes long: a disk that has fallen asleep."""

    def __init__(self, rank: int, stall_s: float) -> None:
        self.rows, self.given = [*numbers(), *numbers(1), *numbers(2)], 0
        self.late, self.stall_s = 5 if rank == 1 else -1, stall_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        self.given += 1
        if self.given == self.late:
            time.sleep(self.stall_s)
        return (self.rows[index],)


def stalled(silent_s: float, stall_s: float) -> tuple[list[float], list[float], float]:
    """The losses of one device and of three, and how long the longest step took here."""
    before, watchdog.SILENT_S = watchdog.SILENT_S, silent_s
    losses, longest_s = list[float](), 0.0
    try:
        alone, pm = small(timeout_s=120, quiet=True)
        pm.watch.every_s = 0.3
        loader = DataLoader(Stalling(pm.world.rank, stall_s), batch_size=10)
        began_s = time.monotonic()
        for batch in lopsided.shard(loader, pm):
            losses.append(pm(*batch).item())
            longest_s, began_s = max(longest_s, time.monotonic() - began_s), time.monotonic()
        pm.close()
    finally:
        watchdog.SILENT_S = before
    return [alone(numbers(seed)).item() for seed in range(3)], losses, longest_s


def test_a_rank_whose_loader_stalls_is_waited_for(worker_pools: Pools) -> None:
    """For twice the time after which one that is silent is dead."""
    for wanted, losses, longest_s in worker_pools(3).run(stalled, 4.0, 8.0):
        assert losses == pytest.approx(wanted, rel=1e-9)
        assert longest_s > 7.0
