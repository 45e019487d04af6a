"""A rank that fails, dies, leaves or goes astray is named to the others, and none of them hangs."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lopsided.comm.uncaught import within
from lopsided.comm.watchdog import Failure, Position, Watchdog, _Neighbour, blame, reason_of
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import World, default_store, side_group
from lopsided.errors import LopsidedError, WorldError
from tests.support.launched import unused_port

HERE = Position(5, 100.0, 12, "all_reduce of %w", 70.0)


def a_watch(timeout_s: float = 60.0, every_s: float = 0.3) -> Watchdog:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, tuple(range(size)), tuple(range(size)), torch.device("cpu"))
    return Watchdog(world, default_store(), timeout_s, side=side_group(world, timeout_s), every_s=every_s)


# Who is to blame


def verdict(there: Position | None, silent: dict[int, float] | None = None) -> str:
    return blame(HERE, {1: there, 2: HERE}, silent or {}, {1: "rank 1", 2: "rank 2"})[0]


def test_blame() -> None:
    astray = Position(5, 100.0, 11, "maximum of norms", 70.0)
    script = Position(5, 100.0, 11, "", 70.0)
    assert verdict(HERE, {1: 9.0}).startswith("rank 1 died or was stopped: silent for 9 s, last seen at step 12")
    assert verdict(Position(5, 0, 11, "", 0, "finished")).startswith("rank 1 finished after step 11, and this rank")
    assert verdict(None) == "rank 1 has not begun"
    assert "the same steps: rank 1 is at step 11: waiting for maximum of norms, for 30 s" in verdict(astray)
    assert verdict(script).startswith("rank 1 is at step 11: in the training script, for 30 s")
    assert "the network between them" in verdict(HERE)


def test_positions_travel_as_text() -> None:
    assert Position.parse(HERE.text()) == HERE


def test_a_reason_is_one_line_with_its_place() -> None:
    with pytest.raises(ValueError, match="too small") as caught:
        raise ValueError("too small\nby far")
    assert re.fullmatch(r"ValueError: too small at test_watchdog.py:\d+", reason_of(caught.value, caught.tb))
    assert reason_of(LopsidedError("what", where="here"), None) == "LopsidedError: what"


# Ranks of a pool


def beat() -> tuple[int, str]:
    watch = a_watch(every_s=0.05)
    watch.at_step(3)
    watch.entering("all_gather of %x")
    other = 1 - dist.get_rank()
    until = time.monotonic() + 20
    while time.monotonic() < until:
        there = watch._position_of(other, watch._asks)
        if there is not None and there.beat > 3 and there.waiting_for:
            break
        time.sleep(0.05)
    dist.barrier()
    watch.stop()
    dist.barrier()
    ended = watch._position_of(other, watch._asks)
    assert there is not None
    assert ended is not None
    assert not watch._thread.is_alive()
    return there.beat, f"{there} / {ended.ended}"


def test_heartbeats(worker_pools: Callable[[int], WorkerPool]) -> None:
    for beats, told in worker_pools(2).run(beat):
        assert beats > 3
        assert told == "step 3: waiting for all_gather of %x / stopped"


def go_astray() -> str:
    """Rank 1 waits for something else than the others, until the timeout."""
    watch = a_watch()
    rank = dist.get_rank()
    watch.at_step(7)
    group = dist.new_group(timeout=timedelta(seconds=3))
    pair = dist.new_group([1, 2], timeout=timedelta(seconds=30))
    what = "all_reduce of norms" if rank == 1 else "all_gather of %x"
    try:
        watch.entering(what)
        dist.all_reduce(torch.ones(1), group=pair if rank == 1 else group)
    except RuntimeError as error:
        told = watch.explain(error, what)
        dist.all_reduce(torch.ones(1), group=pair) if rank == 2 else None
        return str(told)
    return ""


def test_a_rank_in_another_collective_is_named() -> None:
    with WorkerPool(3) as pool:
        told = pool.run(go_astray)
    for said in (told[0], told[2]):
        assert "ranks do not run the same steps: rank 1 is at step 7: waiting for all_reduce of norms" in said
        assert "this rank at step 7: waiting for all_gather of %x" in said


def die(victim: int) -> str:
    watch = a_watch()
    dist.barrier()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    watch.at_step(4)
    try:
        watch.entering("all_reduce of %w")
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        told = watch.explain(error, "all_reduce of %w")
    # Explains again, as a second collective that fails would.
    again = watch.explain(RuntimeError("x"), "all_reduce of %w")
    return f"{told}\n{again.what}"


def test_a_rank_that_is_killed_is_named() -> None:
    with WorkerPool(3) as pool:
        first, second, third = pool.outcomes(die, 1)
    assert second[1] == "the process ended with exit code -9"
    for fine, told in (first, third):
        assert fine
        assert told.startswith("rank 1 died or was stopped: silent for")
        assert "step 4: waiting for all_reduce of %w" in told
        assert told.count("rank 1 died") == 2


def test_where_rank_0_held_the_store() -> None:
    with WorkerPool(2) as pool:
        outcomes = pool.outcomes(die, 0)
    assert outcomes[1][0], outcomes[1][1]
    assert "rank 0 is gone, and with it the store" in outcomes[1][1]


def hear_and_lose_the_store() -> str:
    """Rank 0 tells why it fails, and is gone with the store before rank 1 is asked about a collective."""
    watch = a_watch(every_s=0.05)
    if dist.get_rank() == 0:
        watch._fail(Failure(0, "rank 0 failed: no disk"), watch._asks)
        watch._stay("seen", 10.0)
        os.kill(os.getpid(), signal.SIGKILL)
    while within(1.0, lambda: watch._asks.check(["failed"])) is not None:
        time.sleep(0.05)
    return watch.explain(RuntimeError("x"), "all_reduce of %w").what


def test_a_reason_that_was_heard_outlives_the_store() -> None:
    with WorkerPool(2) as pool:
        outcomes = pool.outcomes(hear_and_lose_the_store)
    assert outcomes[1] == (True, "rank 0 failed: no disk")


# Handshakes


def shake(rounds: int) -> int:
    watch = a_watch()
    for step in range(rounds):
        watch.start_handshake(step, "program", "x f32[8, 4]", training=step % 2 == 0, sync=True)
        watch.finish_handshake()
    watch.finish_handshake()
    watch.stop()
    return watch.position.step


def disagree(facts: dict[str, dict[int, object]]) -> str:
    watch = a_watch()
    mine = {"step": 12, "program": "p", "inputs": "x f32[8, 4]", "training": True, "sync": True}
    mine |= {name: values[dist.get_rank()] for name, values in facts.items() if dist.get_rank() in values}
    watch.start_handshake(**mine)  # type: ignore[arg-type]
    try:
        watch.finish_handshake()
    except WorldError as error:
        return error.what
    finally:
        watch.stop()
    return ""


def test_ranks_that_do_the_same_shake_hands(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert worker_pools(3).run(shake, 20) == [19, 19, 19]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"step": {1: 11}}, "step is 11 on rank 1, 12 on ranks 0, 2"),
        ({"program": {2: "q"}}, "program is q on rank 2, p on ranks 0, 1"),
        ({"inputs": {0: "x f32[7, 4]"}}, "inputs is x f32[7, 4] on rank 0, x f32[8, 4] on ranks 1, 2"),
        (
            {"training": {1: False}, "sync": {1: False}},
            "mode is evaluation on rank 1, training on ranks 0, 2; gradients",
        ),
    ],
)
def test_ranks_that_do_not_are_named(
    worker_pools: Callable[[int], WorkerPool], facts: dict[str, dict[int, object]], said: str
) -> None:
    for told in worker_pools(3).run(disagree, facts):
        assert told.startswith(f"ranks do not do the same: {said}")


# Whole processes, that end

SCRIPT = """
import os, signal, sys, time, threading
import torch, torch.distributed as dist
from lopsided.comm.world import World, begin, default_store, side_group
from lopsided.comm import watchdog as module

def step(watch, group, number):
    watch.at_step(number)
    watch.entering("all_reduce of %w")
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        raise watch.explain(error, "all_reduce of %w") from None
    watch.left()

begin(torch.device("cpu"), timeout_s=40)
rank, size = dist.get_rank(), dist.get_world_size()
world = World(rank, size, tuple(range(size)), tuple(range(size)), torch.device("cpu"))
side = side_group(world, 40)
module._GRACE_S = 1.0
watch = module.Watchdog(world, default_store(), 40, side=side, every_s=0.3)
step(watch, side, 1)
"""


FORKING = """
import json, os, sys
import torch, torch.distributed
import lopsided

def begin(job, rank):
    os.environ |= job["environment"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.dup2(os.open(f"{job['folder']}/{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return compile(open(job["script"]).read(), job["script"], "exec")

script = None
while script is None and (line := sys.stdin.readline()):
    job, ranks = json.loads(line), {}
    for rank in range(job["size"]):
        if (process := os.fork()) == 0:
            script = begin(job, rank)
            break
        ranks[process] = rank
    else:
        print(json.dumps(ranks), flush=True)
        while ranks:
            process, status = os.wait()
            print(json.dumps([ranks.pop(process), os.waitstatus_to_exitcode(status)]), flush=True)
if script is not None:
    exec(script, {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def forking() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has imported what ranks need and forks: these then end as any script does."""
    command = [sys.executable, "-c", FORKING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as started:
        yield started
        started.kill()


def told_by(forking: subprocess.Popen[bytes], within_s: float) -> Any:
    assert forking.stdout is not None
    assert select.select([forking.stdout], [], [], within_s)[0], "no answer in time"
    return json.loads(forking.stdout.readline())


def run_ranks(
    forking: subprocess.Popen[bytes], size: int, body: str, folder: Path, awaited: Sequence[int] | None = None
) -> list[tuple[int, str]]:
    """Exit code and stderr of each rank's own process; of those `awaited`, the others then are killed."""
    script = folder / "train.py"
    script.write_text(SCRIPT + body)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
    common = meeting | {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    job = {"size": size, "script": str(script), "folder": str(folder), "environment": common}
    assert forking.stdin is not None
    forking.stdin.write(f"{json.dumps(job)}\n".encode())
    processes = {rank: int(process) for process, rank in told_by(forking, 60).items()}
    wanted = range(size) if awaited is None else awaited
    codes: dict[int, int] = {}
    try:
        while not codes.keys() >= {*wanted}:
            codes.update([told_by(forking, 90)])
    finally:
        for rank in processes.keys() - codes.keys():
            os.kill(processes[rank], signal.SIGKILL)
        while len(codes) < size:
            codes.update([told_by(forking, 60)])
    return [(codes[rank], (folder / f"{rank}.txt").read_text()) for rank in wanted]


@pytest.mark.parametrize("odd", [0, 1])
def test_the_reason_of_a_failure_reaches_the_others(odd: int, forking: subprocess.Popen[bytes], tmp_path: Path) -> None:
    body = f"""
if rank == {odd}:
    raise ValueError("learning rate is no number")
step(watch, side, 2)
"""
    outcomes = run_ranks(forking, 3, body, tmp_path)
    line = (SCRIPT + body).splitlines().index('    raise ValueError("learning rate is no number")') + 1
    for rank, (code, told) in enumerate(outcomes):
        assert code == 1
        said = f"rank {odd} failed: ValueError: learning rate is no number at train.py:{line}"
        assert (said in told) == (rank != odd), told


def test_a_rank_that_failed_and_lives_on_does_not_hold_the_others(
    forking: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    body = """
if rank == 1:
    threading.Thread(target=time.sleep, args=(80,)).start()
    raise ValueError("nonsense")
step(watch, side, 2)
"""
    [(code, told)] = run_ranks(forking, 2, body, tmp_path, awaited=[0])
    assert code == 1
    assert "rank 0 ends: rank 1 failed: ValueError: nonsense" in told


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_is_stopped_is_named_although_it_holds_the_store(
    odd: int, forking: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    body = f"""
module.SILENT_S = 3.0
if rank == {odd}:
    os.kill(os.getpid(), signal.SIGSTOP)
step(watch, side, 2)
"""
    [(code, told)] = run_ranks(forking, 2, body, tmp_path, awaited=[1 - odd])
    assert code == 1
    assert f"rank {odd} died or was stopped: silent for" in told or (odd == 0 and "rank 0 is gone" in told), told


def test_a_rank_that_is_slow_is_not_dead(forking: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """One that sleeps, as who waits for a disk does, and one that computes and lets no other thread of its run."""
    body = """
module.SILENT_S = 3.0
if rank == 1:
    time.sleep(6)
if rank == 0:
    until = time.monotonic() + 6
    while time.monotonic() < until:
        sum(range(10**7))
step(watch, side, 2)
"""
    for code, told in run_ranks(forking, 2, body, tmp_path):
        assert (code, told) == (0, "")


def test_the_time_in_which_nobody_looked_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may have been stopped itself, or the store of positions."""
    now = iter([0.0, 1.0, 1.0, 500.0, 500.0, 501.0, 501.0, 502.0, 502.0])
    monkeypatch.setattr("lopsided.comm.watchdog.time.monotonic", lambda: next(now))
    other = _Neighbour(1)
    assert [other.silent_s(HERE, 3.0) for _ in range(4)] == [0.0, 3.0, 4.0, 5.0]


def test_a_rank_with_fewer_steps_is_named(forking: subprocess.Popen[bytes], tmp_path: Path) -> None:
    body = """
for number in range(2, 5 if rank == 1 else 4):
    step(watch, side, number)
"""
    (fine, _), (code, told) = run_ranks(forking, 2, body, tmp_path)
    assert (fine, code) == (0, 1)
    assert "rank 0 finished after step 3, and this rank is at step 4: waiting for all_reduce of %w" in told


def test_a_run_without_trouble_ends_without_a_word(forking: subprocess.Popen[bytes], tmp_path: Path) -> None:
    for code, told in run_ranks(forking, 2, "time.sleep(0.5)\nstep(watch, side, 2)\n", tmp_path):
        assert (code, told) == (0, "")
