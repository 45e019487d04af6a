"""Checkpoints by the clock: when they are made, what a damaged one and a full disk do, and copies behind training."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lopsided.comm import world
from lopsided.comm.watchdog import Watchdog
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import CheckpointError, DamagedError, InputError
from lopsided.runtime.checkpoint import automatic, storage
from lopsided.runtime.checkpoint.automatic import Checkpoints, parse_every
from lopsided.runtime.checkpoint.checkpoint import convert, load, save
from lopsided.runtime.checkpoint.folder import steps_in
from lopsided.runtime.checkpoint.state import full_state_dict
from tests.support.held_pieces import THREE, TWO, ByHand, make_optimizer, train

Pools = Callable[[int], WorkerPool]


@pytest.mark.parametrize(
    "wrong", ["", "10", "ten minutes", "0s", "1.5 steps", 0, -3, True, "5 parsecs", "1" * 50 + "s"]
)
def test_what_is_no_time_is_refused(wrong: str | int) -> None:
    with pytest.raises(InputError, match="is no time between checkpoints"):
        parse_every(wrong)


def test_times() -> None:
    told = [parse_every(every) for every in ("10min", "1.5 h", "30 s", "2 days", "1 step")]
    assert told == [(600.0, 0), (5400.0, 0), (30.0, 0), (172800.0, 0), (0.0, 1)]


def by_the_clock(folder: str) -> tuple[int, int]:
    """Steps of 20 ms, checkpoints every second: how many there were, and how often all had to agree."""
    pm = ByHand(TWO)
    optimizer = make_optimizer(pm)
    now, asked = [0.0], [0]
    first = world.dist.all_gather_object

    def counted(*args: object, **kwargs: object) -> None:
        asked[0] += 1
        first(*args, **kwargs)  # type: ignore[arg-type]

    original, automatic._now_s = automatic._now_s, lambda: now[0]
    try:
        kept = Checkpoints(pm, optimizer, folder, every="1s", keep=2)
        saves = 0
        for _ in range(160):
            train(pm, optimizer, 1)
            # The clocks of the ranks differ: the first one's counts.
            now[0] += 0.02 * (1 + dist.get_rank())
            world.dist.all_gather_object = counted  # type: ignore[assignment]
            due = kept._is_due()
            world.dist.all_gather_object = first
            if due:
                kept.save()
                saves += 1
        kept.close()
    finally:
        automatic._now_s = original
        world.dist.all_gather_object = first
    return saves, asked[0]


def test_the_clock_of_the_first_rank_decides_and_is_asked_seldom(worker_pools: Pools, tmp_path: Path) -> None:
    one, other = worker_pools(2).run(by_the_clock, str(tmp_path / "run"))
    assert one == other
    saves, asked = one
    assert saves == 3
    assert asked <= 10 * (saves + 1)
    assert len(steps_in(tmp_path / "run")) == 2


def damaged(folder: str, other: str, name: str) -> list[object]:
    """Two checkpoints, of which the last has a flipped bit: what loading says, and from where the run goes on."""
    pm = ByHand(TWO)
    optimizer = make_optimizer(pm)
    kept = Checkpoints(pm, optimizer, folder, every=1, then=other)
    for _ in range(2):
        train(pm, optimizer, 1)
        kept.step()
    kept.close()
    if dist.get_rank() == 0:
        path = Path(folder, "step-00000002", name)
        data = bytearray(path.read_bytes())
        data[-9] ^= 4
        path.write_bytes(data)
    dist.barrier()
    fresh = ByHand(TWO, seed=9)
    with pytest.raises(DamagedError) as caught:
        load(fresh, None, folder)
    step = Checkpoints(fresh, make_optimizer(fresh), folder).resume()
    return [step, caught.value.what, caught.value.do]


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "training.json"])
def test_a_flipped_bit_is_noticed_and_the_one_before_is_offered(worker_pools: Pools, tmp_path: Path, name: str) -> None:
    folder, other = tmp_path / "run", tmp_path / "slow"
    for step, what, do in worker_pools(2).run(damaged, str(folder), str(other), name):
        assert step == 1
        assert what == f"{name} is not as it was saved: its digest is another one" or "training.json" in name
        assert do == "load the checkpoint before: step=1" or "training.json" in name
    with pytest.raises(DamagedError):
        convert(folder, tmp_path / "model.safetensors")
    # The copy behind training is whole.
    assert steps_in(other) == [1, 2] or steps_in(other) == [2]
    convert(other, tmp_path / "model.safetensors")


def without_room(folder: str) -> tuple[int, bool]:
    pm = ByHand(THREE)
    optimizer = make_optimizer(pm)
    kept = Checkpoints(pm, optimizer, folder, every=1)
    train(pm, optimizer, 1)
    kept.step()
    kept.close()
    good = full_state_dict(pm)
    original = storage.write_tensors

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        storage.write_tensors = full
    for _ in range(2):
        train(pm, optimizer, 1)
        kept.step()
    with pytest.raises(CheckpointError, match="No space left"):
        kept.close()
    storage.write_tensors = original
    fresh = ByHand(THREE, seed=5)
    step = Checkpoints(fresh, make_optimizer(fresh), folder).resume()
    return step, all(torch.equal(value, good[key]) for key, value in full_state_dict(fresh).items())


def test_a_full_disk_leaves_the_last_good_one_and_training_alive(worker_pools: Pools, tmp_path: Path) -> None:
    assert worker_pools(3).run(without_room, str(tmp_path / "run")) == [(1, True)] * 3


def saved_while_another_is_stuck(folder: str) -> str:
    """Rank 1 does not come back from its disk."""
    world.begin(torch.device("cpu"), timeout_s=3.0)
    pm = ByHand(THREE)
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = world.World(rank, size, (0, 1, 2), (0, 1, 2), torch.device("cpu"))
    Watchdog(everyone, world.default_store(), 3.0, every_s=0.3)
    original = storage.write_tensors

    def slow(*args: object) -> str:
        time.sleep(12)
        return original(*args)  # type: ignore[arg-type]

    if rank == 1:
        storage.write_tensors = slow
    begun = time.monotonic()
    try:
        save(pm, None, folder)
    except Exception as error:
        return f"{time.monotonic() - begun < 10} {error}"
    return "saved"


def test_who_waits_for_a_save_obeys_the_timeout_and_names_who_is_missing(tmp_path: Path) -> None:
    with WorkerPool(3) as pool:
        told = pool.run(saved_while_another_is_stuck, str(tmp_path / "run"))
    assert told[0].startswith("True rank 1 is at step 0: writing its part of .step-00000000.partial, for")
    assert told[2].startswith("True rank")
