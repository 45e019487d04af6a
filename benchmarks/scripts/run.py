"""Train every script on one device and on three unequal processes. Writes results/scripts.json.

python benchmarks/scripts/run.py [--only mnist] [--steps 20]
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() not in (HERE, HERE.parent))]

import record  # noqa: E402

from lopsided.comm.worker_pool import WorkerPool  # noqa: E402
from lopsided.runtime.parallel import Parallel  # noqa: E402

SCRIPTS = tuple(sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("__init__", "run")))
GOALS = {"float32": 1e-5, "float64": 1e-9}
PROCESSES = 3


def losses_of(name: str, loop: str, dtype: str, steps: int) -> list[float]:
    """The losses of one loop of a script, in the process that calls this."""
    script = importlib.import_module(f"scripts.{name}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: list[float] = getattr(script, loop)(steps)
    finally:
        torch.set_default_dtype(before)
    return found


def shares_of(name: str) -> list[list[float]]:
    """The shares of the work that were planned for a script, in the process that calls this: of each model it has."""
    found: list[list[float]] = []
    begun = Parallel.__init__

    def noting(self: Parallel, *args: Any, **kwargs: Any) -> None:
        begun(self, *args, **kwargs)
        found.append([float(share) for share in self.plan.shares])

    Parallel.__init__ = noting  # type: ignore[method-assign]
    try:
        losses_of(name, "with_lopsided", "float32", 2)
    finally:
        Parallel.__init__ = begun  # type: ignore[method-assign]
    return found


def worst_difference(found: list[float], expected: list[float]) -> float:
    """The greatest difference between two runs, relative to the numbers of the second (absolute from a zero)."""
    if len(found) != len(expected):
        raise ValueError(f"{len(found)} losses, {len(expected)} on one device")
    return max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(found, expected, strict=True))


def lines_of(name: str) -> dict[str, int]:
    """How many lines the loop for DistributedDataParallel has, and how many of them change: what takes the place of
    some lines counts as often as the longer of both."""
    script = importlib.import_module(f"scripts.{name}")
    ddp, ours = (inspect.getsource(getattr(script, loop)).splitlines()[1:] for loop in ("with_ddp", "with_lopsided"))
    changes = difflib.SequenceMatcher(None, ddp, ours, autojunk=False).get_opcodes()
    changed = sum(max(b - a, d - c) for what, a, b, c, d in changes if what != "equal")
    return {"ddp": len(ddp), "lopsided": len(ours), "changed": changed}


def compare(name: str, dtype: str, steps: int, one: WorkerPool, three: WorkerPool) -> dict[str, Any]:
    """A script on one device and on three: how far the losses are apart on any rank."""
    expected = one.run(losses_of, name, "with_ddp", dtype, steps)[0]
    found = three.run(losses_of, name, "with_lopsided", dtype, steps)
    return {
        "worst": max(worst_difference(losses, expected) for losses in found),
        "losses": len(expected),
        "first": expected[0],
        "last": expected[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="scripts whose name has this in it; nothing is written")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    rows = []
    with WorkerPool(1, timeout_s=600) as one, WorkerPool(PROCESSES, timeout_s=600) as three:
        for name in SCRIPTS:
            if arguments.only not in name:
                continue
            began = time.perf_counter()
            row = {"script": name, "about": inspect.getdoc(importlib.import_module(f"scripts.{name}"))}
            row |= {"lines": lines_of(name), "shares": three.run(shares_of, name)[0]}
            row |= {dtype: compare(name, dtype, arguments.steps, one, three) for dtype in GOALS}
            rows.append(row | {"seconds": time.perf_counter() - began})
            differences = ", ".join(f"{row[dtype]['worst']:.0e} in {dtype}" for dtype in GOALS)
            print(f"{name:<20}{row['lines']['changed']:>3} lines changed, {differences}", flush=True)
    if not arguments.only:
        about = {"steps": arguments.steps, "processes": PROCESSES, "goals": GOALS}
        print(record.write("scripts", {**about, "rows": rows}))


if __name__ == "__main__":
    main()
