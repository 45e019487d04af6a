"""Processes are killed at random, and runs go on. Writes results/faults.json, after every kill, and results/soak.json.

python benchmarks/faults.py [--kills 48] [--soak 600] [--seed 0]

The whole benchmark, some three hours on two cores: --kills 288 (96 of each change of the world) --soak 5000.

A run of two processes trains a small model by a plan for three devices, with a checkpoint every second step, or, in
every second run, every sixteenth and in memory. One of its processes, chosen at random, is killed: at any moment (while
it starts, plans, trains), or while it saves, loads (a run that was killed before), takes other shares, or compiles.
When all have ended, the run goes on in a world of as many processes, one fewer, or one more. Told are

    went_on            runs that came to their last step
    same_losses        of these, those whose losses are one device's (1e-5 in float32)
    checkpoints_lost   runs that went on from an earlier step than the last checkpoint that was complete
    orphans            processes that lived longer than `ENDS_S` after one of them was killed
    from_memory        runs that went on from a later step than the last checkpoint on the disk
    ended_s, next_step_s   medians from the death to the end of all others, and to the next step of the new world; those
                           of a world that goes on from memory besides

With `--soak`, two processes then train so many steps, with checkpoints, evaluation and other shares now and then, and
memory, descriptors and threads after 500 (or a sixth) of them are compared with those at the end.

Processes are forked from this one, which has imported everything: what it takes to start an interpreter is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record
import torch
from torch.utils.data import DataLoader

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Kind, Link
from lopsided.models.by_name import load
from lopsided.planner.plan_file import save_plan
from lopsided.planner.planner import plan_graph
from lopsided.runtime.agreement import ELASTIC_VARIABLE
from lopsided.runtime.checkpoint import in_memory
from lopsided.runtime.checkpoint.folder import steps_in
from lopsided.runtime.control_plane import accord_of
from lopsided.runtime.live.moving import with_shares

SPEC = "mlp:layers=2,width=12,classes=5,batch=8"
STEPS, STEP_S = 24, 0.05
# Limits, not goals: who compiles ends that first, which takes long on a busy machine.
ENDS_S, MOST_S = 120.0, 600.0
WORLD = 2
AIMS = ("any", "save", "any", "replan", "any", "load", "any", "compile")
"""At which moment of a run somebody is killed, run after run."""


def cluster() -> Cluster:
    """Three devices so slow, and so well connected, that all are needed."""
    kinds = tuple(
        Kind(f"cpu-{k}", "box", 1, 1, (("f32", speed), ("f64", speed)), 1e10, 2**34, 1e-9)
        for k, speed in enumerate((4e6, 8e6, 6e6))
    )
    return Cluster("three", "", kinds, within=Link(1e-7, 1e12), between=Link(1e-7, 1e12))


def data() -> list[tuple[torch.Tensor, ...]]:
    made = torch.Generator().manual_seed(4)
    return [(torch.randn(12, generator=made), torch.randint(0, 5, (), generator=made)) for _ in range(8 * 10)]


def named(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(load(SPEC)[1], batch, strict=True))


def alone() -> list[float]:
    torch.manual_seed(0)
    model, losses = load(SPEC)[0], list[float]()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    while len(losses) < STEPS:
        for batch in DataLoader(data(), batch_size=8):  # type: ignore[arg-type]
            loss = model(**named(batch))
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    return losses[:STEPS]


@dataclass(frozen=True)
class Way:
    """How a run trains, and when one of its processes is to be killed."""

    aim: str
    in_memory: bool


def phase_of(folder: Path, attempt: str, rank: int) -> str:
    path = folder / f"{attempt}-{rank}.phase"
    return path.read_text() if path.exists() else ""


def train(folder: Path, attempt: str, way: Way) -> None:
    rank = os.environ["RANK"]

    def now(phase: str) -> None:
        beside = folder / f"{attempt}-{rank}.next"
        beside.write_text(phase)
        beside.rename(folder / f"{attempt}-{rank}.phase")

    now("plan")
    torch.manual_seed(0)
    model, batch = load(SPEC)
    compiles = way.aim == "compile"
    pm = lopsided.parallelize(
        model, batch, plan=folder / "plan.json", timeout_s=30, measure_s=1.0, quiet=True, compile=compiles
    )
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    batches = lopsided.shard(DataLoader(data(), batch_size=8), pm)  # type: ignore[arg-type]
    every, copies = (16, 0) if way.in_memory else (2, None)
    in_memory.PART_OF_TIME = 0.5  # a run has a second of training: in memory as often as can be
    kept = lopsided.Checkpoints(pm, opt, folder / "run", every=every, loader=batches, keep_copies=copies)
    now("load")
    began = kept.resume()
    now("compile" if compiles else "first step")
    with (folder / f"{attempt}-{pm.world.rank}.txt").open("w") as told:
        told.write(f"{began}\n")
        told.flush()
        while pm.steps_done < STEPS:
            for part in batches:
                loss = pm(**named(part))
                loss.backward()
                opt.step()
                opt.zero_grad()
                told.write(f"{pm.steps_done} {loss.item()!r} {time.time()}\n")
                told.flush()
                now("save")
                kept.step()
                if way.aim == "replan" and pm.steps_done % 4 == 0 and pm.plan.on.devices > 1:
                    now("replan")
                    pm.replan(with_shares(pm.plan, (*pm.plan.shares.work[1:], pm.plan.shares.work[0])))
                saving = accord_of(pm).saving
                now("train" if saving is None or saving.done else "save")
                time.sleep(STEP_S)
                if pm.steps_done == STEPS:
                    break
    kept.close()


def started(size: int, job: Callable[[], None], said: Path) -> dict[int, int]:
    """Ranks by their processes, forked from this one; they end as a script does, with its exception hook."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes = {}
    for rank in range(size):
        process = os.fork()
        if process == 0:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", ELASTIC_VARIABLE: "1",
            }  # fmt: skip
            out = os.open(said.with_suffix(f".{rank}"), os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            code = 0
            try:
                job()
            except BaseException:
                code = 1
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            threading._shutdown()  # type: ignore[attr-defined]  # as a script ends: what saves is awaited
            os._exit(code)
        processes[process] = rank
    return processes


def ended(processes: dict[int, int], most_s: float) -> dict[int, int]:
    """The exit codes, by rank, of those that end in time; the others are killed and missing."""
    codes, until = {}, time.monotonic() + most_s
    left = dict(processes)
    while left and time.monotonic() < until:
        for process in [*left]:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                codes[left.pop(process)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for process in left:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return codes


def lives(process: int) -> bool:
    """A child that has not ended; its status stays to be asked for."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def steps_of(folder: Path, attempt: str) -> tuple[int | None, dict[int, float], float]:
    """From where a world went on, its losses by step, and when its first step was done."""
    for path in sorted(folder.glob(f"{attempt}-*.txt")):
        first, *lines = path.read_text().splitlines() or [""]
        rows = [line.split() for line in lines if len(line.split()) == 3]
        if rows:
            return int(first), {int(step) - 1: float(loss) for step, loss, _ in rows}, float(rows[0][2])
    return None, {}, 0.0


def killed(folder: Path, attempt: str, way: Way, phase: str, dice: random.Random, typical_s: float) -> tuple[Any, ...]:
    """A world of which one is killed in this phase: when, in which phase it was, when the others had ended, and how
    many never did."""
    processes = started(WORLD, lambda: train(folder, attempt, way), folder / attempt)
    victim = dice.choice([*processes])
    rank, began_s = processes[victim], time.monotonic()
    if phase == "any":
        time.sleep(dice.uniform(0, typical_s))
    else:
        passes = dice.choice((1, 1, 2, 5)) if phase in ("save", "replan") else 1
        for wanted in [one for _ in range(passes) for one in (True, False)][:-1]:
            while lives(victim) and (phase_of(folder, attempt, rank) == phase) != wanted:
                if time.monotonic() - began_s > MOST_S:
                    break
                time.sleep(0.0005)
        time.sleep(dice.uniform(0, 0.02 if phase != "compile" else 2.0))
    was = phase_of(folder, attempt, rank) or "start"
    os.kill(victim, signal.SIGKILL)
    died_s = time.time()
    codes = ended(processes, ENDS_S)
    return died_s, was, time.time() - died_s, WORLD - len(codes)


def one_kill(
    wanted: list[float], plan: str, dice: random.Random, change: int, way: Way, typical_s: float
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lopsided-faults-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(plan)
        orphans = 0
        if way.aim == "load":
            *_, orphans = killed(folder, "a0", way, "train", dice, typical_s)
        died_s, phase, ended_s, more = killed(folder, "a1", way, way.aim, dice, typical_s)
        complete = steps_in(folder / "run")
        again = started(WORLD + change, lambda: train(folder, "b", way), folder / "b")
        codes_again = ended(again, MOST_S)
        before = {step: loss for one in ("a0", "a1") for step, loss in steps_of(folder, one)[1].items()}
        began, after, first_s = steps_of(folder, "b")
        losses = before | after
        went_on = len(codes_again) == len(again) and not any(codes_again.values())
        same = went_on and all(
            abs(losses.get(k, float("inf")) - loss) <= 1e-5 * abs(loss)
            for k, loss in enumerate(wanted)
            if k in losses or k >= (began or 0)
        )
        done_before = began is None and went_on  # killed behind the last step
        trouble = "" if went_on else "".join(p.read_text()[-1500:] for p in folder.glob("b.[0-9]"))
        return {
            "change": change,
            "aim": way.aim,
            "killed_while": phase,
            "in_memory": way.in_memory,
            "from_memory": bool(began is not None and began > max(complete, default=0)),
            "steps_before": len(before),
            "went_on": went_on,
            "same_losses": bool(same),
            "checkpoint_lost": bool(complete and began is not None and began < complete[-1]),
            "orphans": orphans + more,
            "ended_s": round(ended_s, 2),
            "next_step_s": None if done_before or not first_s else round(first_s - died_s, 2),
            "trouble": trouble,
        }


# Soak


def held() -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "memory_kB": int(status["VmRSS"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
    }


def soak(folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    model, batch = load(SPEC)
    pm = lopsided.parallelize(model, batch, plan=folder / "plan.json", timeout_s=30, quiet=True)
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    batches = lopsided.shard(DataLoader(data(), batch_size=8), pm)  # type: ignore[arg-type]
    kept = lopsided.Checkpoints(
        pm, opt, folder / "run", every=max(steps // 40, 1), loader=batches, keep=2, keep_copies=0
    )
    whole, told = named(next(iter(DataLoader(data(), batch_size=8)))), {}  # type: ignore[arg-type]
    shares = (pm.plan.shares.work, tuple(reversed(pm.plan.shares.work)))
    while pm.steps_done < steps:
        for part in batches:
            loss = pm(**named(part))
            loss.backward()
            opt.step()
            opt.zero_grad()
            kept.step()
            done = pm.steps_done
            if done % max(steps // 30, 1) == 0:
                pm.eval()
                with torch.no_grad():
                    pm(**whole)
                pm.train()
            if done % max(steps // 20, 1) == 0:
                pm.replan(with_shares(pm.plan, shares[done // max(steps // 20, 1) % 2]))
            if done in (min(500, steps // 6), steps):
                while (saving := accord_of(pm).saving) is not None and not saving.done:
                    time.sleep(0.01)  # its file is open meanwhile
                told[done] = held()
            if done == steps:
                break
    kept.close()
    (folder / f"soak-{pm.world.rank}.json").write_text(json.dumps(told))


def soaked(plan: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lopsided-faults-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(plan)
        codes = ended(started(WORLD, lambda: soak(folder, steps), folder / "soak"), 60.0 + 0.5 * steps)
        files = sorted(folder.glob("soak-*.json"))
        trouble = "" if len(files) == WORLD else "".join(p.read_text()[-1500:] for p in folder.glob("soak.[0-9]"))
        return {"steps": steps, "codes": codes, "ranks": [json.loads(p.read_text()) for p in files], "trouble": trouble}


def killing(plan: str, number_of_kills: int, seed: int) -> None:
    wanted, dice = alone(), random.Random(seed)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(plan)
        ended(started(WORLD, lambda: train(folder, "a1", Way("any", False)), folder / "a"), MOST_S)
    typical_s = time.monotonic() - began_s
    kills = []
    for number in range(number_of_kills):
        try:
            way = Way(AIMS[number // 6 % len(AIMS)], number % 2 == 1)
            kills.append(one_kill(wanted, plan, dice, (0, -1, 1)[number % 3], way, typical_s))
        except Exception:
            kills.append({"trouble": traceback.format_exc(), "went_on": False})
        print({key: value for key, value in kills[-1].items() if key != "trouble"}, kills[-1]["trouble"], flush=True)
        summary = summed(kills) | {"typical_run_s": round(typical_s, 2)}
        record.write("faults", {"summary": summary, "runs": kills, "seed": seed})
    print(summary)


def summed(kills: list[dict[str, Any]]) -> dict[str, Any]:
    def median(key: str, only: str = "") -> float | None:
        times = [one[key] for one in kills if one.get(key) is not None and (not only or one[only])]
        return round(statistics.median(times), 2) if times else None

    return {
        "kills": len(kills),
        **{key: sum(bool(one.get(key)) for one in kills) for key in ("went_on", "same_losses")},
        "checkpoints_lost": sum(bool(one.get("checkpoint_lost")) for one in kills),
        "orphans": sum(one.get("orphans", 0) for one in kills),
        "from_memory": sum(bool(one.get("from_memory")) for one in kills),
        "killed_while": dict(Counter(one.get("killed_while", "?") for one in kills)),
        "median_next_step_from_memory_s": median("next_step_s", "from_memory"),
        **{f"median_{key}": median(key) for key in ("ended_s", "next_step_s")},
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=48, help="0 for none; 288 for the whole benchmark")
    options.add_argument("--soak", type=int, default=600, help="steps; 0 for none")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    torch.set_num_threads(1)
    os.environ["LOPSIDED_CACHE"] = "0"
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "plan.json")
        torch.manual_seed(0)
        save_plan(plan_graph(capture(*load(SPEC)), cluster()), path)
        plan = path.read_text()
    if given.kills:
        killing(plan, given.kills, given.seed)
    if given.soak:
        found = soaked(plan, given.soak)
        print(found)
        print(record.write("soak", found))


if __name__ == "__main__":
    main()
