"""What every benchmark writes beside its numbers: the command, the commit, versions, the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def about() -> dict[str, str]:
    """Where results come from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": f"python benchmarks/{_script()} {' '.join(sys.argv[1:])}".strip(),
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": ", ".join(f"{one:.1f}" for one in os.getloadavg()) + " in the last 1, 5 and 15 minutes",
    }


def _script() -> str:
    """The script that runs, as its path below benchmarks/."""
    path, here = Path(sys.argv[0]).resolve(), Path(__file__).parent.resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def write(name: str, results: dict[str, Any]) -> Path:
    """Write `results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"about": about(), **results}, indent=1) + "\n")
    return path
