"""Checkpoints in main memory: who loses a node goes on from what the others hold together, if that is everything."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import InputError
from lopsided.runtime.checkpoint import in_memory
from lopsided.runtime.checkpoint.automatic import Checkpoints
from lopsided.runtime.checkpoint.checkpoint import finish_last
from lopsided.runtime.checkpoint.in_memory import receivers
from lopsided.runtime.checkpoint.state import full_state_dict
from lopsided.runtime.control_plane import accord_of
from tests.support import held_pieces
from tests.support.held_pieces import FOUR, THREE, TWO, ByHand, make_optimizer, train, trained_whole

Pools = Callable[[int], WorkerPool]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 8))
def test_copies_lie_on_other_nodes_each_on_its_own(nodes: list[int], copies: int) -> None:
    for rank, to in enumerate(receivers(nodes, copies)):
        keeping = [nodes[other] for other in to]
        assert len({*keeping}) == len(keeping) == min(copies, len({*nodes}) - 1)
        assert nodes[rank] not in keeping


def on_nodes(homes: str, nodes: Sequence[int]) -> None:
    """From here on this process's node is one of these, whose memory is a folder."""

    def home(folder: Path) -> Path:
        made = Path(homes, f"node-{nodes[dist.get_rank()]}")
        made.mkdir(parents=True, exist_ok=True)
        return made

    in_memory.open_home = home


def run(
    homes: str, nodes: Sequence[int], shares: tuple[float, ...], copies: int | None, steps: int, cut: bool = True
) -> tuple[int, bool]:
    """Go on for so many steps, with a checkpoint in memory behind each and one on disk behind every second one: from
    where, and whether all is as on one device."""
    on_nodes(homes, nodes)
    placed = dict(held_pieces.PLACEMENTS)
    if not cut:
        held_pieces.PLACEMENTS.clear()
    try:
        pm = ByHand(shares)
    finally:
        held_pieces.PLACEMENTS.update(placed)
    optimizer = make_optimizer(pm)
    kept = Checkpoints(pm, optimizer, Path(homes, "run"), every=2, keep_copies=copies)
    began = kept.resume()
    for _ in range(steps):
        train(pm, optimizer, 1)
        if kept._in_memory is not None:
            kept._in_memory.save()
        if pm.steps_done % 2 == 0:
            kept.save()
    finish_last(accord_of(pm))
    whole = trained_whole(began + steps)
    return began, all(torch.equal(value, whole[key]) for key, value in full_state_dict(pm).items())


def test_a_process_that_is_lost_costs_nothing(worker_pools: Pools, tmp_path: Path) -> None:
    assert worker_pools(4).run(run, str(tmp_path), (0,) * 4, FOUR, 0, 3) == [(0, True)] * 4
    # All that was written is still there, whoever wrote it: with one fewer, and with as many again.
    assert worker_pools(3).run(run, str(tmp_path), (0,) * 3, THREE, 0, 2) == [(3, True)] * 3
    assert worker_pools(4).run(run, str(tmp_path), (0,) * 4, FOUR, 0, 0) == [(5, True)] * 4


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_lost_costs_nothing_where_there_are_copies(
    worker_pools: Pools, tmp_path: Path, lost: int
) -> None:
    assert worker_pools(3).run(run, str(tmp_path), (0, 0, 1), THREE, 1, 3) == [(0, True)] * 3
    shutil.rmtree(tmp_path / f"node-{lost}")
    left = 1 - lost
    # One process goes on where the other was, and one on a node that has nothing yet: it is sent what it needs.
    assert worker_pools(2).run(run, str(tmp_path), (left, 2), TWO, 1, 1) == [(3, True)] * 2


def test_without_copies_a_node_that_is_lost_costs_the_steps_since_the_last_on_disk(
    worker_pools: Pools, tmp_path: Path
) -> None:
    assert worker_pools(3).run(run, str(tmp_path), (0, 0, 1), THREE, 0, 3) == [(0, True)] * 3
    shutil.rmtree(tmp_path / "node-1")
    assert worker_pools(2).run(run, str(tmp_path), (0, 0), TWO, 0, 2) == [(2, True)] * 2


@pytest.mark.parametrize("lost", [0, 1])
def test_what_all_hold_survives_without_copies(worker_pools: Pools, tmp_path: Path, lost: int) -> None:
    assert worker_pools(3).run(run, str(tmp_path), (0, 0, 1), THREE, 0, 3, False) == [(0, True)] * 3
    shutil.rmtree(tmp_path / f"node-{lost}")
    assert worker_pools(2).run(run, str(tmp_path), (1 - lost, 2), TWO, 0, 1) == [(3, True)] * 2


def test_what_is_damaged_does_not_count(worker_pools: Pools, tmp_path: Path) -> None:
    assert worker_pools(3).run(run, str(tmp_path), (0, 0, 1), THREE, 1, 3) == [(0, True)] * 3
    for node, file in ((0, "rank-00001"), (1, "rank-00002")):
        path = tmp_path / f"node-{node}" / "step-00000003" / f"{file}.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    # Of each there is one more on the other node.
    again = tmp_path / "again"
    shutil.copytree(tmp_path, again)
    assert worker_pools(2).run(run, str(tmp_path), (0, 1), TWO, 0, 0) == [(3, True)] * 2
    copy = again / "node-1" / "step-00000003" / "rank-00001.json"
    copy.write_text(copy.read_text().replace("lopsided-part", "lopsided-prat"))
    assert worker_pools(2).run(run, str(again), (0, 1), TWO, 0, 0) == [(2, True)] * 2


def test_parts_of_two_attempts_are_never_mixed(worker_pools: Pools, tmp_path: Path) -> None:
    """Both came to the same step, by other cuts, and each has lost a node."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        assert worker_pools(2).run(run, str(folder), (0, 1), TWO, 0, 3) == [(0, True)] * 2
    shutil.rmtree(one / "node-1")
    shutil.copytree(other / "node-1", one / "node-1")
    assert worker_pools(2).run(run, str(one), (0, 1), TWO, 0, 0) == [(2, True)] * 2


def test_what_did_not_get_its_name_does_not_count(worker_pools: Pools, tmp_path: Path) -> None:
    assert worker_pools(2).run(run, str(tmp_path), (0, 1), TWO, 0, 3) == [(0, True)] * 2
    node = tmp_path / "node-1"
    (node / "step-00000003").rename(node / ".step-00000003.partial")
    assert worker_pools(2).run(run, str(tmp_path), (0, 1), TWO, 0, 0) == [(2, True)] * 2
    assert not list(node.iterdir())


def without_room(homes: str) -> tuple[int, bool]:
    on_nodes(homes, (0, 0))
    pm = ByHand(TWO)
    optimizer = make_optimizer(pm)
    kept = Checkpoints(pm, optimizer, Path(homes, "run"), every=2, keep_copies=0)
    memory = kept._in_memory
    assert memory is not None
    original = in_memory.room_in
    in_memory.room_in = lambda home: 1000 if dist.get_rank() == 1 else 2**40
    try:
        for _ in range(2):
            train(pm, optimizer, 1)
            kept.step()
    finally:
        in_memory.room_in = original
    kept.close()
    return Checkpoints(pm, optimizer, Path(homes, "run")).resume(), memory._off


def test_where_there_is_no_room_training_and_the_disk_go_on(worker_pools: Pools, tmp_path: Path) -> None:
    assert worker_pools(2).run(without_room, str(tmp_path)) == [(2, True)] * 2


def how_often(homes: str) -> tuple[list[int], bool]:
    """Steps of a second, a copy for which training waits 0.1 s, and 3 s twice: when it was made in 23 steps, and what
    is left."""
    on_nodes(homes, (0, 0))
    now = [0.0]
    original, in_memory._now_s = in_memory._now_s, lambda: now[0]
    try:
        pm = ByHand(TWO)
        saves = list[int]()
        pm.before_saving = lambda: now.__setitem__(  # type: ignore[method-assign]
            0, now[0] + (3.0 if len(saves) in (1, 3) else 0.1)
        )
        optimizer = make_optimizer(pm)
        kept = Checkpoints(pm, optimizer, Path(homes, "run"), every=1000, keep_copies=0)
        memory = kept._in_memory
        assert memory is not None
        save = memory.save
        memory.save = lambda: (saves.append(pm.steps_done), save())[1]  # type: ignore[func-returns-value,method-assign]
        for _ in range(23):
            now[0] += 1.0 + dist.get_rank()  # clocks differ
            train(pm, optimizer, 1)
            kept.step()
            finish_last(accord_of(pm))
        kept.close()
    finally:
        in_memory._now_s = original
    return saves, Path(homes, "node-0").exists()


def test_what_training_waits_for_is_a_small_part_of_its_time(worker_pools: Pools, tmp_path: Path) -> None:
    # What it takes is known behind the second: 0.1 s, of which five steps are fifty times as much. The steps between 3
    # and 8 took longer, since the first of them waited 3 s.
    assert worker_pools(2).run(how_often, str(tmp_path)) == [([1, 2, 3, 8, 12, 17, 22], False)] * 2


def wrong(copies: object) -> str:
    pm = ByHand(TWO)
    try:
        Checkpoints(pm, None, "nowhere", keep_copies=copies)  # type: ignore[arg-type]
    except InputError as error:
        return error.what
    return "taken"


@pytest.mark.parametrize("copies", [-1, True, "all"])
def test_what_is_no_number_of_copies_is_refused(worker_pools: Pools, copies: object) -> None:
    assert worker_pools(2).run(wrong, copies) == [f"keep_copies is {copies!r}"] * 2
