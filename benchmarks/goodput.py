"""Goodput: how much of what could be trained without faults is trained with one kill a minute. Writes
results/goodput.json.

python benchmarks/goodput.py [--minutes 30] [--every 60] [--processes 2] [--seed 0]       some 32 minutes

`lopsided run --elastic` trains a small model, whose step is made to last `--step-s`, with checkpoints in memory. Every
minute one of its processes, chosen at random, is killed. Told are

    goodput      useful steps over those that the same time, from the first step to the last, holds without faults
    lost_s       of every kill, the time until the step after the last one before it was done, less a step
    start_s      of these, what passed until the script of the new processes was running: the agent's ends and starts
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

STOP = "stop"


def work(folder: Path, step_s: float) -> None:
    import torch
    from faults import SPEC, data, named
    from torch.utils.data import DataLoader

    import lopsided
    from lopsided.models.by_name import load

    rank = os.environ["RANK"]
    (folder / f"process-{rank}").write_text(f"{os.getpid()} {time.time()}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = load(SPEC)
    pm = lopsided.parallelize(model, batch, timeout_s=60, quiet=True)
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    batches = lopsided.shard(DataLoader(data(), batch_size=8), pm)  # type: ignore[arg-type]
    kept = lopsided.Checkpoints(pm, opt, folder / "run", every="5min", loader=batches, keep_copies=0)
    kept.resume()
    over = False
    with (folder / f"steps-{rank}.txt").open("a") as told:
        while not over:
            for part in batches:
                began_s = time.perf_counter()
                pm(**named(part)).backward()
                opt.step()
                opt.zero_grad()
                kept.step()
                time.sleep(max(step_s - (time.perf_counter() - began_s), 0.0))
                told.write(f"{pm.steps_done} {time.time()}\n")
                told.flush()
                if pm.steps_done % 10 == 0 and (over := bool(pm.largest(int((folder / STOP).exists())))):
                    break
    kept.close()


def steps_in(folder: Path) -> list[tuple[int, float]]:
    path = folder / "steps-0.txt"
    rows = [line.split() for line in (path.read_text().splitlines() if path.exists() else [])]
    return [(int(row[0]), float(row[1])) for row in rows if len(row) == 2]


def processes_in(folder: Path) -> list[tuple[int, float]]:
    rows = [path.read_text().split() for path in sorted(folder.glob("process-*"))]
    return [(int(row[0]), float(row[1])) for row in rows if len(row) == 2]


def wait_for_steps(folder: Path, since: float, most_s: float) -> float | None:
    """Since when processes run that all started after this, once they have done a step that none had before."""
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        running = min((began for _, began in processes_in(folder)), default=0.0)
        rows = steps_in(folder)
        if running > since and next_step(rows, running) is not None:
            return running
        time.sleep(0.1)
    return None


def next_step(rows: list[tuple[int, float]], running: float) -> float | None:
    last = max((step for step, when in rows if when <= running), default=0)
    return min((when for step, when in rows if when > running and step > last), default=None)


def told(rows: list[tuple[int, float]], kills: list[tuple[float, float]]) -> dict[str, Any]:
    """`kills`: when each was, and when the new processes' script was running."""
    within = [b - a for (one, a), (other, b) in pairwise(rows) if other == one + 1]
    step_s = statistics.median(within)
    lost, started = [], []
    for at, running in kills:
        if (then := next_step(rows, running)) is not None:
            lost.append(round(then - at - step_s, 2))
            started.append(round(running - at, 2))
    possible = (rows[-1][1] - rows[0][1]) / step_s + 1
    return {
        "steps": rows[-1][0],
        "step_s": step_s,
        "seconds": rows[-1][1] - rows[0][1],
        "goodput": (rows[-1][0] - rows[0][0] + 1) / possible,
        "kills": len(kills),
        "went_on": len(lost),
        "lost_s": lost,
        "start_s": started,
    }


def measured(minutes: float, every_s: float, processes: int, step_s: float, seed: int) -> dict[str, Any]:
    import torch
    from faults import SPEC
    from pace import plan_for

    dice, kills = random.Random(seed), []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lopsided-goodput-") as name:
        folder = Path(name)
        plan = plan_for(SPEC, folder)
        words = [sys.executable, "-m", "lopsided", "run", "--elastic", "--nproc-per-node", str(processes), str(plan)]
        with (folder / "output").open("w") as output:
            run = subprocess.Popen(
                [*words, __file__, "--work", name, "--step-s", str(step_s)],
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdout=output,
                stderr=output,
            )
        try:
            if wait_for_steps(folder, 0.0, 300) is None:
                raise RuntimeError(f"no step in five minutes:\n{(folder / 'output').read_text()[-3000:]}")
            began = time.monotonic()
            while time.monotonic() - began < 60 * minutes - every_s / 2:
                time.sleep(max(every_s - (time.time() - kills[-1][0] if kills else 0.0), 1.0))
                last, victim = steps_in(folder)[-1][0], dice.choice(processes_in(folder))[0]
                os.kill(victim, signal.SIGKILL)
                at = time.time()
                running = wait_for_steps(folder, at, 300)
                if running is None:
                    raise RuntimeError(f"did not go on:\n{(folder / 'output').read_text()[-3000:]}")
                kills.append((at, running))
                print(f"killed {victim} at step {last}, on after {time.time() - at:.1f} s", flush=True)
            (folder / STOP).touch()
            code = run.wait(120)
        finally:
            run.terminate()
            run.wait(60)
        return {**told(steps_in(folder), kills), "code": code, "minutes": minutes, "every_s": every_s}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--step-s", type=float, default=0.1)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--work", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.work:
        work(Path(given.work), given.step_s)
        return
    import record

    found = measured(given.minutes, given.every, given.processes, given.step_s, given.seed)
    print(found)
    print(record.write("goodput", found))


if __name__ == "__main__":
    main()
