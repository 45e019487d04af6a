"""The demonstration runs as a person would run it, tells what it should, and leaves nobody behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lopsided.demo.contest import Windows, letters, story
from lopsided.demo.race import Busy, RaceEntry, Spent, _busy, _rows, on_cores

DEMO = [sys.executable, "-m", "lopsided", "demo", "--quick", "--json"]
THREE = ("ddp-equal", "ddp-by-speed", "lopsided")


def started() -> subprocess.Popen[str]:
    return subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def of_session(session: int) -> list[int]:
    """Processes that are not done yet."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def gone(session: int, within_s: float = 20.0) -> bool:
    until = time.monotonic() + within_s
    while of_session(session):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def test_demo_tells_the_truth_about_all_contestants() -> None:
    with started() as demo:
        told, said = demo.communicate(timeout=300)
    assert demo.returncode == 0, said
    assert gone(demo.pid)
    found = json.loads(told)
    assert found["loss_difference"] < 1e-4
    losses = {name: found["contestants"][name]["losses"] for name in (*THREE, "alone")}
    assert len(losses["alone"]) == found["steps"] >= 4
    for name in THREE:
        contestant = found["contestants"][name]
        assert contestant["measured_s"] > 0
        assert contestant["predicted_s"] > 0
        assert sum(share or 0 for share in contestant["shares"]) == pytest.approx(1)
        assert losses[name] == pytest.approx(losses["alone"], rel=1e-4)
    assert losses["alone"][-1] < losses["alone"][0]


def test_demo_interrupted_leaves_nobody_behind() -> None:
    with started() as demo:
        until = time.monotonic() + 120
        while len(of_session(demo.pid)) < 5 and time.monotonic() < until:  # the parent, its helpers, and workers
            time.sleep(0.1)
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does
        _, said = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert gone(demo.pid)


def test_the_story_is_the_same_for_everyone() -> None:
    assert len(story()) > 20_000
    assert len(letters()) < 100
    one, other = Windows(4, 16)[3], Windows(9, 16)[3]
    assert one["input_ids"].tolist() == other["input_ids"].tolist()
    assert one["labels"][:-1].tolist() == one["input_ids"][1:].tolist()


def test_workers_sit_where_they_are_unequal() -> None:
    assert on_cores([0, 1], ()).cores == ((0,), (1,), (1,))
    assert on_cores([2, 3, 8], (2, 3)).cores == ((2,), (8,), (8,))
    assert on_cores([4], (4,)).cores == ((4,),) * 3
    assert "share" in on_cores([4], (4,)).about
    assert on_cores([], ()).cores is None


def test_every_worker_of_ddp_has_a_row() -> None:
    assert _rows(12, [2.0, 1.0, 1.0]) == (6, 3, 3)
    assert _rows(12, [100.0, 1.0, 1.0]) == (10, 1, 1)


def test_who_stands_longest_waits_for_others() -> None:
    spent = [Spent(10.0, 1.0, 6.0), Spent(10.0, 3.0, 2.0), Spent(10.0, 0.0, 0.0)]
    fast, slow, absent = _busy(spent, [True, True, False], steps=2)
    assert fast == Busy(compute_s=1.5, optimizer_s=0.5, communication_s=1.0, waiting_s=2.0)
    assert slow == Busy(compute_s=2.5, optimizer_s=1.5, communication_s=1.0, waiting_s=0.0)
    assert absent is None


def test_ratios_are_taken_round_by_round() -> None:
    one = RaceEntry("one", 1.0, (1.0, 4.0, 1.0), (), (), ())
    other = RaceEntry("other", 1.0, (2.0, 8.0, 1.0), (), (), ())
    assert one.faster_than(other) == 2.0
