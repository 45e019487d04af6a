"""Inside the lab, one process a host: models are profiled, plans are tried, and contestants race.

torchrun ... benchmarks/race.py profile FOLDER --measure SECONDS
torchrun ... benchmarks/race.py try FOLDER
torchrun ... benchmarks/race.py race FOLDER

In: a folder with subjects.json, to try with MODEL-rival-NUMBER.json, plans, and for a race with MODEL-race.json, a
`Race` each. Out: in the same folder MODEL-cluster.json, what was measured, MODEL-tried.json, the quickest plan, or of
every rank MODEL-rank-RANK.json, what it saw. Started by `proof.py`.

    profile   at the lab's speeds: `take_measurement`, all hosts at once
    try       at the lab's speeds: `runtime.autotune.quickest`, as `parallelize(tries=...)` does it
    race      all contestants are set up in the same processes, at full speed; then hosts get their shares,
              everyone warms up, and rounds follow in which each trains some steps, in an order shuffled anew; the
              first step of each in a round does not count
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from beat import Beat
from contestants import Contestant, Entry, Subject, enter
from lab import start_line
from lab_spec import BACKEND

from lopsided.capturing.capture_graph import capture
from lopsided.comm.world import backend_among, begin, tell
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import load_plan, plan_text
from lopsided.profiling.measure import take_measurement
from lopsided.runtime.autotune import TriedPlan, quickest

SCRIPT = Path(__file__).resolve()
AT_HAND_BYTES = 3 * 2**30
BEATS_ASIDE, BEATS_A_ROUND = 5, 2
"""Of the work that tells how steady the machine is: before and after a profile, and before every round."""
LEAD_IN = 1
"""So many steps of a contestant come before those that count, in every round."""
COMPARED = 4
"""So many losses of each contestant are compared and kept."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is done for a model."""

    measure_s: float
    warm_up: int
    rounds: int
    steps: int
    most_s: float  # after which no round begins


@dataclass(frozen=True, slots=True)
class Race:
    """What the ranks are told."""

    subject: Subject
    entries: tuple[Entry, ...]
    pace: Pace

    def text(self) -> str:
        return json.dumps(asdict(self))


def read_race(path: Path) -> Race:
    told = json.loads(path.read_text())
    entries = tuple(Entry(**{**entry, "rows": tuple(entry["rows"])}) for entry in told["entries"])
    return Race(Subject(**told["subject"]), entries, Pace(**told["pace"]))


def read_subjects(folder: Path) -> list[Subject]:
    return [Subject(**told) for told in json.loads((folder / "subjects.json").read_text())]


def profile_rank(folder: Path, budget_s: float) -> None:
    """Measure for each model, and have rank 0 write it down."""
    device = _arrived()
    beat = Beat(device)
    for subject in read_subjects(folder):
        with subject.casting(device):
            graph = capture(*subject.built(device))
        start_line(dist.get_rank())
        before = beat.times(BEATS_ASIDE)
        found = take_measurement(graph, device, optimizers=("adamw",), budget_s=budget_s)
        beats: list[list[float]] = [[]] * dist.get_world_size()
        dist.all_gather_object(beats, before + beat.times(BEATS_ASIDE))
        if dist.get_rank() == 0:
            told = {
                "beats_s": beats,
                "toml": found.cluster.text(),
                "op_error": found.op_error,
                "link_error": found.link_error,
                "rehearsed": found.rehearsed,
                "seconds": found.seconds,
            }
            (folder / f"{subject.name}-cluster.json").write_text(json.dumps(told))
        _tidy(device)
    _leave()


def try_ranks(folder: Path) -> None:
    """Of each model's plans the quickest, as `parallelize(tries=...)` takes it; rank 0 writes down what they took."""
    device = _arrived()
    for subject in read_subjects(folder):
        plans = [load_plan(path) for path in rival_files(folder, subject)]
        if plans:
            start_line(dist.get_rank())
            chosen, trials = quickest(plans, device)
            if dist.get_rank() == 0:
                told = {"plan": plan_text(chosen), "tried": [_told(trial, chosen) for trial in trials]}
                (folder / f"{subject.name}-tried.json").write_text(json.dumps(told))
        _tidy(device)
    _leave()


def _told(trial: TriedPlan, chosen: Plan) -> dict[str, Any]:
    plan, seconds = trial.plan, trial.seconds
    return {
        "predicted_s": plan.step_s,
        "tried_s": seconds if math.isfinite(seconds) else None,
        "devices": plan.on.devices,
        "shares": list(plan.shares.work),
        "taken": plan.program is chosen.program and plan.shares == chosen.shares,
    }


def rival_files(folder: Path, subject: Subject) -> list[Path]:
    """The plans of a model that compete, the planner's own choice first."""
    return sorted(folder.glob(f"{subject.name}-rival-*.json"))


def race_ranks(folder: Path) -> None:
    """One model after the other."""
    device = _arrived()
    for subject in read_subjects(folder):
        _race_rank(read_race(folder / f"{subject.name}-race.json"), folder, device)
        _tidy(device)
    _leave()


def _arrived() -> torch.device:
    """In the world, with one thread, and with memory at hand that was written to before.

    A process gets memory page by page, when it first writes there, and that takes longer than what most ops do with
    it. Freed memory stays in the process (`proof.KEEPS_MEMORY`), so later steps are spared that; but each new size
    finds its place anew, and who trains early in the life of a process would pay for who comes later.
    """
    device = begin()
    if promised := os.environ.get(BACKEND):
        found = backend_among(tell(device))
        if found.name != promised:
            raise SystemExit(f"this lab is to talk over {promised}, and would over {found.name}: {found.why}")
    torch.set_num_threads(1)
    page, pages = (os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES"))
    block = torch.empty(min(page * pages // 8, AT_HAND_BYTES), dtype=torch.uint8)
    block[::page] = 1
    return device


def _tidy(device: torch.device) -> None:
    gc.enable()
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _race_rank(task: Race, folder: Path, device: torch.device) -> None:
    """Set everyone up, warm up, run rounds; every rank writes what it saw."""
    began = time.perf_counter()
    rank, pace = dist.get_rank(), task.pace
    entered: dict[str, Contestant] = {}
    unavailable: dict[str, str] = {}
    for entry in task.entries:
        made = enter(task.subject, entry, device)
        if isinstance(made, str):
            unavailable[entry.name] = made
        else:
            entered[entry.name] = made
    start_line(rank)
    ready = time.perf_counter()
    beat, beats = Beat(device), list[float]()
    losses: dict[str, list[float]] = {name: [] for name in entered}
    seconds: dict[str, list[float]] = {name: [] for name in entered}
    waited: dict[str, list[float]] = {name: [] for name in entered}
    for name in list(entered):
        trouble = _steps(name, entered[name], pace.warm_up, device, losses[name])[2]
        if trouble:
            unavailable[name] = trouble
            del entered[name]
    warm = time.perf_counter()
    shuffle = random.Random(0)  # the same on all ranks
    gc.collect()
    gc.freeze()  # what there is now stays, and need not be looked at again and again
    gc.disable()  # or one contestant pays for another's garbage
    until = time.perf_counter() + pace.most_s
    for _ in range(pace.rounds):
        if not _everyone(time.perf_counter() < until):
            break
        beats += beat.times(BEATS_A_ROUND)
        for name in shuffle.sample(list(entered), len(entered)):
            # The first step after another's finds nothing of its own at hand, and nobody trains like that.
            taken, stood, trouble = _steps(name, entered[name], LEAD_IN, device, losses[name])
            if not trouble:
                taken, stood, trouble = _steps(name, entered[name], pace.steps, device, losses[name])
            if trouble:
                unavailable[name] = trouble
                del entered[name]
                continue
            seconds[name].append(taken)
            waited[name].append(stood)
    told = {
        "beats": beats,
        "seconds": seconds,
        "waited": waited,
        "losses": {name: found[:COMPARED] for name, found in losses.items()},
        "unavailable": unavailable,
        "active": [name for name, one in entered.items() if one.active],
        "most_bytes": _most_bytes(device),
        "took_s": {"set up": ready - began, "warm up": warm - ready, "rounds": time.perf_counter() - warm},
    }
    (folder / f"{task.subject.name}-rank-{rank}.json").write_text(json.dumps(told))


def _steps(
    name: str, contestant: Contestant, steps: int, device: torch.device, losses: list[float]
) -> tuple[float, float, str]:
    """Seconds a step, seconds of it that this rank stood, and what went wrong. Adds the global losses."""
    gc.collect()
    dist.barrier()
    told: list[torch.Tensor] = []
    trouble = ""
    before_s = 0.0 if not contestant.active else contestant.waited_s
    started = time.perf_counter()
    try:
        for _ in range(steps):
            told.append(contestant.step())
    except Exception as error:
        trouble = f"{name}: {type(error).__name__}: {error}"
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = (time.perf_counter() - started) / max(steps, 1)
    stood = (contestant.waited_s - before_s) / max(steps, 1) if contestant.active else 0.0
    heard: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(heard, trouble)
    if any(heard):
        return taken, stood, next(one for one in heard if one)
    # Added up when nobody's clock is running.
    total = torch.stack([one.float().cpu() for one in told]) if told else torch.zeros(steps)
    dist.all_reduce(total)
    losses += total.tolist()
    return taken, stood, ""


def _everyone(yes: bool) -> bool:
    told = torch.tensor(int(yes))
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told)


def _most_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _leave() -> None:
    dist.barrier()
    # What some contestants leave behind does not survive an orderly end of the interpreter.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("profile", "try", "race"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--measure", type=float, default=12.0, metavar="SECONDS", help="for a profile")
    options = parser.parse_args()
    if options.what == "profile":
        profile_rank(options.folder, options.measure)
    elif options.what == "try":
        try_ranks(options.folder)
    else:
        race_ranks(options.folder)


if __name__ == "__main__":
    main()
