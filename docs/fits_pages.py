"""The pages about memory: fits.md, what has a plan on clusters that people own, and memory.md, what plans predict
against what processes hold. `generate.py` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

_GOALS = {"pairs": 88, "cells": 24}
# A plan is to be at least 0.95 times as fast as the best by hand.
_CLOSE = 0.95
# Planning is to take at most 6 times an export.
_EXPORTS = 6
_COLUMNS = (
    *("model", "cluster", "step", "devices", "rounds", "again", "loss rows", "state in host memory"),
    *("best by hand", "by hand", "gain", "planning"),
)
_PROOF = {
    "uses": "What takes it",
    "biggest": "The biggest",
    "rounds": "Rounds",
    "host": "Hosts",
    "do": "What would make it fit",
}


def fits_page(data: Row) -> str:
    rows = [*data["pairs"], *data["cells"]]
    lines = [
        "# What fits\n",
        "Predicted steps of plans on clusters that people own, beside the best configuration that is made by hand: one "
        "choice of checkpointing for all layers, gradients accumulated, ZeRO or not, optimizer state on the devices or "
        "in host memory, equal shares or shares by speed, on all devices, on those of one kind or on one. Both are "
        "priced by the same timeline and the same count of memory. `benchmarks/fits.py` has the models and clusters, "
        "`benchmarks/by_hand.py` what is enumerated.\n",
        f"`python benchmarks/fits.py`, commit {data['about']['commit']}, torch {data['about']['torch']}.\n",
        *([f"{data['note']}\n"] if "note" in data else []),
        *_summary(data),
        "## Models on clusters\n",
        "bf16, or f16 where a device has no bf16; AdamW; sequences of 2048 for Llamas and the mixture.\n",
        *_table(data["pairs"]),
    ]
    if data["cells"]:
        lines += [
            "\n## Cells of planning.md that had no plan\n",
            "f32, AdamW, so many rows a device: what did not fit without recomputation, rounds and chunks.\n",
            *_table(data["cells"]),
        ]
    if without := [row for row in rows if not row["fits"]]:
        lines.append("\n## What does not fit, and what is missing\n")
        for row in without:
            lines.append(f"- **{row['model']} on {_where(row)}**: {row['why']}.")
            lines += [f"  {what}: {row[key]}." for key, what in _PROOF.items() if row.get(key)]
    return "\n".join(lines) + "\n"


def _summary(data: Row) -> list[str]:
    lines = [
        "| | planned so far | have a plan | goal | by hand | median gain | more than 5 % slower than by hand |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("pairs", "cells"):
        rows = data[name]
        if rows:
            fit, by_hand = [row for row in rows if row["fits"]], [row for row in rows if row["hand_s"]]
            gains = [row["hand_s"] / row["step_s"] for row in fit if row["hand_s"]]
            slower = sum(gain < _CLOSE for gain in gains) + sum(not row["fits"] for row in by_hand)
            gain = f"{statistics.median(gains):.2f}×" if gains else ""
            goal = f"{_GOALS[name]}"
            lines.append(
                f"| {name} | {len(rows)} of {data['asked'][name]} | {len(fit)} | {goal} | {len(by_hand)} | {gain} "
                f"| {slower} |"
            )
    rows = [*data["pairs"], *data["cells"]]
    ratios = [row["planning_cpu_s"] / row["export_cpu_s"] for row in rows]
    within = sum(ratio <= _EXPORTS for ratio in ratios)
    fit = [row for row in rows if row["fits"]]
    counts = {
        "run something again": sum(bool(row["reruns"]) for row in fit),
        "compute the batch in rounds": sum(row["rounds"] > 1 for row in fit),
        "have the loss in chunks": sum(bool(row["rows"]) for row in fit),
        "have optimizer state in host memory": sum(bool(row["on_host"]) for row in fit),
    }
    said = (
        f"\nOf {len(fit)} plans {', '.join(f'{count} {what}' for what, count in counts.items())}. Planning took "
        f"{statistics.median(ratios):.1f} times an export of the same model in the median and {max(ratios):.1f} times "
        f"at most, by seconds of the processor (goal: at most {_EXPORTS} times, met by {within} of {len(ratios)}).\n"
    )
    return [*lines, said]


def _where(row: Row) -> str:
    return f"{row['cluster']}, {row['batch']} rows a device" if "batch" in row else str(row["cluster"])


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
    ]
    for row in rows:
        hand = f"{row['hand_s']:.3g} s" if row["hand_s"] else "does not fit"
        planning = f"{row['planning_cpu_s']:.1f} s, {row['planning_cpu_s'] / row['export_cpu_s']:.1f}×"
        if row["fits"]:
            again = f"{row['reruns']} blocks{' on some kinds' if row['some_kinds'] else ''}" if row["reruns"] else ""
            loss = ", ".join(f"{count:,}" for count in row["rows"])
            gain = f"{row['hand_s'] / row['step_s']:.2f}" if row["hand_s"] else ""
            rounds = str(row["rounds"]) if row["rounds"] > 1 else ""
            made = (f"{row['step_s']:.3g} s", str(row["devices"]), rounds, again, loss, ", ".join(row["on_host"]))
        else:
            made, gain = ("does not fit", "", "", "", "", ""), ""
        how = row["hand"] if row["hand_s"] else ""
        lines.append(f"| {' | '.join((row['model'], _where(row), *made, hand, how, gain, planning))} |")
    return lines


def memory_page(data: Row) -> str:
    rows = data["rows"]
    worst = [max(row["off"], key=abs) for row in rows]
    within = sum(abs(off) <= data["goal"] for off in worst)
    lines = [
        "# Memory: predicted and measured\n",
        "Two processes of one thread each, over gloo, with "
        f"{' and '.join(f'{share:.0%}' for share in data['shares'])} of the batch. Measured is the most bytes of "
        "tensors at once in the third step, by the account of torch's allocator. A technique is used everywhere: "
        "`whole`, for example, runs every block again. Where state is in host memory, a CPU has both memories in one, "
        "and both are counted. Buckets are of 256 KiB, in proportion to these small models.\n",
        f"`python benchmarks/memory.py`, commit {data['about']['commit']}, torch {data['about']['torch']}, "
        f"{data['about']['machine']}. Within {data['goal']:.0%}: {within} of {len(rows)}; the median of how far the "
        f"worse process is off is {statistics.median(map(abs, worst)):.1%}.\n",
        *([f"{data['note']}\n"] if "note" in data else []),
        "| model | parameters | technique | measured, MiB | predicted, MiB | off |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = [
            ", ".join(f"{size / 2**20:.1f}" for size in row[f"{name}_bytes"]) for name in ("measured", "predicted")
        ]
        off = ", ".join(f"{off:+.1%}" for off in row["off"])
        lines.append(f"| {' | '.join((row['model'], row['stored'], row['technique'], *sizes, off))} |")
    lines += ["", *(f"`{name}`: `{spec}`\n" for name, spec in data["models"].items())]
    return "\n".join(lines)
