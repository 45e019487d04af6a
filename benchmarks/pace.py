"""A device is slowed to a third while training, and let go again; noise; and what watching costs. Writes
results/pace.json.

python benchmarks/pace.py [--steps 100] [--noise 500] [--watched 400]      some 3 minutes on two idle cores

Two processes train with replan="auto". One of them is stopped for two thirds of every 9 ms, as a quota of a control
group would, and some hundred steps later is let go. Told are, for both changes,

    steps_to_follow    steps until the median of five is within a tenth of that of a plan made for the new speeds
    reference_step_s   what a step takes by that plan, made by hand, with the same stops

With `--noise`, every process waits in each of so many steps for a time of its own, a tenth of its step as a standard
deviation: shares must not change. With `--watched`, steps of 50 ms are taken with all watching on (watchdog and
pace): `cost` is, over a step, the processor's time of its threads and of all its calls, on the rank that spends most.
Its one collective, the handshake, is sent before a step is computed and looked at behind it: who waits there would wait
for the same rank in the step's own collectives.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import record
import torch
from faults import ended, started

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Kind, Link
from lopsided.models.by_name import load
from lopsided.planner.plan_file import save_plan
from lopsided.planner.planner import plan_graph
from lopsided.runtime.live.moving import with_shares

SPEC = "mlp:layers=4,width=512,classes=16,batch=768"
WATCHED = "mlp:layers=2,width=12,classes=5,batch=8"
WORLD, SLOW, PERIOD_S = 2, 3.0, 0.009
NOISE_S = 0.01  # a tenth of a step of some 100 ms
WATCHING = ("step_done", "start_handshake", "finish_handshake", "entering", "left", "at_step")  # calls in every step
NEAR, OF = 1.1, 5  # "within a tenth", of the median of so many steps


def plan_for(spec: str, folder: Path) -> Path:
    kinds = tuple(Kind(f"cpu-{k}", "box", 1, 1, (("f32", 2e9), ("f64", 2e9)), 1e10, 2**34, 1e-9) for k in range(WORLD))
    where = Cluster("two", "", kinds, within=Link(1e-7, 1e12), between=Link(1e-7, 1e12))
    torch.manual_seed(0)
    save_plan(plan_graph(capture(*load(spec)), where), folder / "plan.json")
    return folder / "plan.json"


def train(folder: Path, steps: int, replan: str, spec: str, before: Callable[[Any, int], None]) -> None:
    """Steps with what is said before each; rank 0 tells how long each took, and who does how much."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch = load(spec)
    pm = lopsided.parallelize(model, batch, plan=folder / "plan.json", timeout_s=60, quiet=True, replan=replan)
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    with (folder / f"steps-{pm.world.rank}.txt").open("w") as told:
        for number in range(steps):
            began_s = time.perf_counter()
            before(pm, number)
            pm(**batch).backward()
            opt.step()
            opt.zero_grad()
            told.write(f"{time.perf_counter() - began_s} {' '.join(map(str, pm.plan.shares.work))}\n")
            told.flush()


def steps_in(folder: Path) -> list[list[float]]:
    path = folder / "steps-0.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [[float(word) for word in line.split()] for line in lines if len(line.split()) == WORLD + 1]


class Slowed:
    """In here a process runs in a third of the time."""

    def __init__(self, process: int) -> None:
        self.process, self._over = process, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            os.kill(self.process, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - 1 / SLOW))
            os.kill(self.process, signal.SIGCONT)
            time.sleep(PERIOD_S / SLOW)


def wait_for(folder: Path, steps: int) -> None:
    until = time.monotonic() + 600
    while len(steps_in(folder)) < steps and time.monotonic() < until:
        time.sleep(0.002)


def middle(rows: list[list[float]]) -> float:
    return statistics.median(row[0] for row in rows)


def follows(rows: list[list[float]], reference_s: float) -> int | None:
    """After how many steps shares have changed and the step is near the reference, for as many as are looked at.

    A step that is near it without a change of shares was not slowed: other work on the machine hid what was done to it.
    """
    change = next((k for k, row in enumerate(rows) if row[1:] != rows[0][1:]), len(rows))
    return next((k for k in range(change, len(rows) - OF + 1) if middle(rows[k : k + OF]) <= NEAR * reference_s), None)


def slowed(steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lopsided-pace-") as name:
        folder = Path(name)
        plan_for(SPEC, folder)
        processes = started(WORLD, lambda: train(folder, 3 * steps, "auto", SPEC, lambda pm, k: None), folder / "a")
        victim = next(process for process, rank in processes.items() if rank == 1)
        wait_for(folder, steps)
        with Slowed(victim):
            changed = len(steps_in(folder))
            wait_for(folder, 2 * steps)
        back = len(steps_in(folder))
        ended(processes, 600)
        rows = steps_in(folder)

        def by_hand(pm: Any, number: int) -> None:
            if number == 0:
                speeds = [work / (SLOW if rank == 1 else 1) for rank, work in enumerate(pm.plan.shares.work)]
                pm.replan(with_shares(pm.plan, tuple(speed / sum(speeds) for speed in speeds)))

        (folder / "steps-0.txt").unlink()
        processes = started(WORLD, lambda: train(folder, steps, "off", SPEC, by_hand), folder / "b")
        victim = next(process for process, rank in processes.items() if rank == 1)
        wait_for(folder, 1)
        with Slowed(victim):
            wait_for(folder, steps - 1)
        ended(processes, 600)
        reference_s, even_s = middle(steps_in(folder)[2:]), middle(rows[5:changed])
        return {
            "slowed": {
                "before_step_s": even_s,
                "first_step_s": middle(rows[changed : changed + OF]),
                "reference_step_s": reference_s,
                "after_step_s": middle(rows[back - steps // 3 : back]),
                "steps_to_follow": follows(rows[changed:back], reference_s),
                "shares": rows[back - 1][1:],
            },
            "let_go": {
                "reference_step_s": even_s,
                "after_step_s": middle(rows[-steps // 3 :]),
                "steps_to_follow": follows(rows[back:], even_s),
                "shares": rows[-1][1:],
            },
            "step_s": [round(row[0], 5) for row in rows],
            "changes_at": [k for k in range(1, len(rows)) if rows[k][1:] != rows[k - 1][1:]],
            "slowed_at": [changed, back],
        }


def noisy(steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lopsided-pace-") as name:
        folder = Path(name)
        plan_for(SPEC, folder)
        dice = random.Random()

        def before(pm: Any, number: int) -> None:
            if number == 0:
                dice.seed(pm.world.rank)
            time.sleep(max(NOISE_S * (3 + dice.gauss(0, 1)), 0.0))

        codes = ended(started(WORLD, lambda: train(folder, steps, "auto", SPEC, before), folder / "a"), 60 + steps)
        rows = steps_in(folder)
        changes = sum(row[1:] != last[1:] for last, row in pairwise(rows))
        return {"steps": len(rows), "changes": changes, "step_s": middle(rows), "codes": codes}


def thread_ticks() -> float:
    """Processor seconds of the threads that watch."""
    found = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("lopsided-") and thread.native_id is not None:
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def watched(steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lopsided-pace-") as name:
        folder = Path(name)
        plan_for(WATCHED, folder)
        took = dict.fromkeys((*WATCHING, "calls_s", "threads_s"), 0.0)

        def timed(of: Any, name: str) -> None:
            call = getattr(of, name)

            def timing(*args: Any, **named: Any) -> None:
                began_s, used_s = time.perf_counter(), time.thread_time()
                call(*args, **named)
                took["calls_s"] += time.perf_counter() - began_s
                took[name] += time.thread_time() - used_s

            setattr(of, name, timing)

        def before(pm: Any, number: int) -> None:
            if number == 10:
                timed(pm.watch_pace(), "step_done")
                for name in WATCHING[1:]:
                    timed(pm.watch, name)
                took["threads_s"] = -thread_ticks()
            if number == steps + 9:
                took["threads_s"] += thread_ticks()
                (folder / f"watched-{pm.world.rank}.json").write_text(json.dumps(took))
            time.sleep(0.05)

        codes = ended(
            started(WORLD, lambda: train(folder, steps + 10, "auto", WATCHED, before), folder / "a"), 120 + steps
        )
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("watched-*.json"))]
        each = [{key: value / (steps - 1) for key, value in one.items()} for one in found]
        cost = max(sum(one[name] for name in (*WATCHING, "threads_s")) for one in each) / 0.05
        return {"steps": steps, "a_step": each, "cost": cost, "codes": codes}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=100, help="before, while and after a device is slow")
    options.add_argument("--noise", type=int, default=500, help="steps with noise")
    options.add_argument("--watched", type=int, default=400, help="steps of 50 ms")
    given = options.parse_args()
    torch.set_num_threads(1)
    os.environ["LOPSIDED_CACHE"] = "0"
    found = {"slow": slowed(given.steps), "noise": noisy(given.noise), "watched": watched(given.watched)}
    print({key: value for key, value in found["slow"].items() if key != "step_s"})
    print(found["noise"], found["watched"], sep="\n")
    print(record.write("pace", found))


if __name__ == "__main__":
    main()
