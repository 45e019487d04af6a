"""What the proof has measured, read for its pictures and its page.

In: benchmarks/results/proof-*.json, zoo-*.json, ablation-*.json and programs-*.json, whichever are there. Out: `Cell`s,
each a model in a lab: who counts, how many times as fast one is as another, and whether the goal is reached.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof import BASELINES, OURS

from lopsided.planner.ablation import ADDITIONS, HAP

LABS = ("lab-cpu", "lab-cpu-2link", "lab-even", "lab-gpu", "lab-gpu-2")
EVEN = "lab-even"
GOAL_TIMES, GOAL_EVEN, GOAL_WORST, GOAL_MEAN, GOAL_RANK = 2.41, 1.03, 0.15, 0.07, 0.95
AS_FAST = 1.0
NAMES = {
    "dp-ev": "DDP, equal shares",
    "dp-cp": "DDP, shares by speed",
    "fsdp2": "FSDP2",
    "deepspeed-1": "DeepSpeed ZeRO-1",
    "deepspeed-3": "DeepSpeed ZeRO-3",
    HAP: "HAP",
    OURS: "Lopsided",
    "alone": "fastest host alone",
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """A model in a lab."""

    lab: str
    model: str
    row: Row

    @property
    def counted(self) -> dict[str, Row]:
        """The contestants that ran and trained the same model."""
        found = self.row["contestants"].items()
        return {name: one for name, one in found if "measured_s" in one and one["same"]}

    def seconds(self, name: str) -> float:
        return float(self.counted[name]["measured_s"]) if name in self.counted else math.nan

    @property
    def best_baseline(self) -> str:
        there = [name for name in BASELINES if name in self.counted]
        return min(there, key=self.seconds, default="")

    def faster(self, name: str, than: str = "dp-ev") -> float:
        """How many times as fast, round by round: what disturbs one disturbs its neighbours."""
        if name not in self.counted or than not in self.counted:
            return math.nan
        pairs = zip(self.counted[than]["rounds_s"], self.counted[name]["rounds_s"], strict=False)
        return float(statistics.median(theirs / own for theirs, own in pairs))

    @property
    def margin(self) -> float:
        """How many times as fast as the best baseline."""
        return self.faster(OURS, self.best_baseline) if self.best_baseline else math.nan

    @property
    def reached(self) -> bool:
        return bool(self.margin >= (1 / GOAL_EVEN if self.lab == EVEN else AS_FAST))


def read_cells(results: Path, kind: str = "proof") -> list[Cell]:
    found = []
    for lab in LABS:
        path = results / f"{kind}-{lab}.json"
        if path.is_file():
            told = json.loads(path.read_text())
            found += [Cell(lab, model, row) for model, row in told["models"].items()]
    return found


def read_programs(results: Path) -> list[Row]:
    return [json.loads(path.read_text()) for path in sorted(results.glob("programs-*.json"))]


def geometric_mean(values: Iterable[float]) -> float:
    """Of those that are there."""
    kept = [value for value in values if value > 0 and math.isfinite(value)]
    return math.exp(statistics.fmean(math.log(value) for value in kept)) if kept else math.nan


def times_without(cells: Sequence[Cell]) -> dict[str, list[tuple[Cell, float]]]:
    """Of each addition, and of HAP: how many times as long a step takes without it."""
    names = {**{f"no-{name}": name for name in ADDITIONS}, HAP: HAP}
    found: dict[str, list[tuple[Cell, float]]] = {}
    for key, name in names.items():
        for cell in cells:
            # Where the same plan is found without it, it brings nothing.
            own = cell.row["contestants"].get(key, {}).get("same_as", key)
            if own in cell.counted and OURS in cell.counted:
                found.setdefault(name, []).append((cell, 1 / cell.faster(own, OURS)))
    return found
