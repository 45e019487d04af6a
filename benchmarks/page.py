"""The page of the proof, in words and tables: docs/proof.md.

In: what was measured (`cells`). Out: `proof_page`, the page as text, to be written beside its pictures by `figures`.
No number is typed; only the reasons why a goal is missed are (`WHY`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from accuracy import clock_of, errors
from beat import UNSTEADY
from cells import (
    EVEN,
    GOAL_EVEN,
    GOAL_MEAN,
    GOAL_RANK,
    GOAL_TIMES,
    GOAL_WORST,
    LABS,
    NAMES,
    Cell,
    Row,
    geometric_mean,
    times_without,
)
from proof import BASELINES, OURS
from subjects import ON_CPU

from lopsided.planner.ablation import HAP

WHY = {
    "lab-gpu": "parts of a GPU share its memory and its host, and how fast they send varies from hour to hour.",
    "lab-gpu-2": "differences of a few percent between one process that trains by a plan and one of plain torch.",
    "lab-even": "where the plan is data parallelism, what is left is the difference between two implementations of it, "
    "and noise of a few percent.",
    "lab-cpu": "a plan was predicted too fast: on hosts with a quota, threads that carry bytes use up the quota of "
    "those that compute.",
    "lab-cpu-2link": "as on `lab-cpu`.",
}
"""What is known of the reasons, by lab; printed only where a goal is missed."""
NOTE = "<!-- Written by `make figures` from benchmarks/results; edit benchmarks/page.py instead. -->\n"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if math.isfinite(seconds) else "–"


def _times(value: float) -> str:
    return f"{value:.2f}×" if math.isfinite(value) else "–"


def _met(yes: bool) -> str:
    return "reached" if yes else "**not reached**"


def _not_run(count: int) -> str:
    return f", {count} not measured" if count else ""


def goals(cells: Sequence[Cell], zoo: Sequence[Cell], programs: Sequence[Row]) -> Iterator[str]:
    unequal, even = [c for c in cells if c.lab != EVEN], [c for c in cells if c.lab == EVEN]
    models = {subject.name for subject in ON_CPU}
    yield "| goal | | |\n|---|---|---|"
    if unequal:
        reached, every = sum(cell.reached for cell in unequal), len(models) * (len(LABS) - 1)
        yield (
            f"| as fast as the best baseline or faster, every model on every unequal lab | {reached} of {every}"
            f"{_not_run(every - len(unequal))} | {_met(reached == every)} |"
        )
        best = max(unequal, key=lambda cell: cell.faster(OURS) if math.isfinite(cell.faster(OURS)) else 0)
        yield (
            f"| {GOAL_TIMES}× DP-EV or more on one of them | {_times(best.faster(OURS))} ({best.model}, {best.lab}) "
            f"| {_met(best.faster(OURS) >= GOAL_TIMES)} |"
        )
    if even:
        reached, every = sum(cell.reached for cell in even), len(models)
        yield (
            f"| within {GOAL_EVEN - 1:.0%} of the best baseline on `{EVEN}` | {reached} of {every}"
            f"{_not_run(every - len(even))} | {_met(reached == every)} |"
        )
    ours = errors(cell.row["contestants"][OURS] for cell in (*cells, *zoo) if OURS in cell.counted)
    if ours["count"]:
        for which, goal in (("worst", GOAL_WORST), ("mean", GOAL_MEAN)):
            met = _met(ours[which] <= goal)
            yield f"| {which} error of a predicted step at most {goal:.0%} | {ours[which]:.1%} | {met} |"
    for told in programs:
        runs = [told["rank_correlation"], *told.get("other_runs", ())]
        reached = sum(run >= GOAL_RANK for run in runs) if told["enough"] else 0
        met = (
            _met(reached == len(runs)) if reached in (0, len(runs)) else f"**reached in {reached} of {len(runs)} runs**"
        )
        found = f"{runs[0]:.3f}" if len(runs) == 1 else f"{runs[0]:.3f}; all runs {min(runs):.3f} to {max(runs):.3f}"
        yield (
            f"| rank correlation {GOAL_RANK} over {told['programs']} programs of {told['model']} on `{told['lab']}` "
            f"| {found} | {met} |"
        )


def lab_table(lab: str, cells: Sequence[Cell], about: str) -> Iterator[str]:
    yield f"\n### `{lab}`: {about}\n"
    yield "Milliseconds a step, medians over rounds. In brackets, how many times as fast as DP-EV.\n"
    ran = {name for cell in cells for name, one in cell.row["contestants"].items() if "measured_s" in one}
    names = [name for name in (*BASELINES, "alone", HAP, OURS) if name in ran]
    yield "| model | " + " | ".join(NAMES[name] for name in names) + " | over the best baseline |"
    yield "|---" * (len(names) + 2) + "|"
    for cell in cells:
        figures = []
        for name in names:
            wrong = "measured_s" in cell.row["contestants"].get(name, {}) and name not in cell.counted
            told = "trains otherwise" if wrong else f"{_ms(cell.seconds(name))} ({_times(cell.faster(name))})"
            bold = "**" if name in (OURS, cell.best_baseline) else ""
            figures.append(f"{bold}{told}{bold}")
        yield f"| {cell.model} | " + " | ".join(figures) + f" | {_times(cell.margin)} |"
    absent = {
        name: _first_line(one["unavailable"])
        for cell in cells
        for name, one in cell.row["contestants"].items()
        if "unavailable" in one
    }
    if absent:
        yield "\nNot there: " + "; ".join(f"{NAMES.get(n, n)} (`{why[:160]}`)" for n, why in absent.items()) + "."


def plans_table(cells: Sequence[Cell]) -> Iterator[str]:
    yield "\n## What the plans are\n"
    yield "| lab | model | devices | work shares | predicted | measured | error | where a predicted step goes |"
    yield "|---|---|---|---|---|---|---|---|"
    for cell in cells:
        if OURS not in cell.counted:
            continue
        one = cell.counted[OURS]
        shares = " ".join(f"{share:.0%}" for share in one["shares"]["work"])
        parts = ", ".join(
            f"{name} {seconds / one['predicted_s']:.0%}"
            for name, seconds in one["breakdown"].items()
            if name != "hidden" and seconds > 0.005 * one["predicted_s"]
        )
        yield (
            f"| {cell.lab} | {cell.model} | {len(one['devices'])} of {len(cell.row['devices'])} | {shares} "
            f"| {_ms(one['predicted_s'])} ms | {_ms(one['measured_s'])} ms | {one['error']:+.1%} | {parts} |"
        )


def set_aside(cells: Sequence[Cell]) -> Iterator[str]:
    """Attempts that do not count, because the machine changed more in them than in the one that does."""
    told = [
        (cell, one)
        for cell in cells
        for one in cell.row.get("attempts", ())
        if one["drift"] != cell.row["drift"] and OURS in one["measured_s"]
    ]
    if told:
        yield "\nSet aside, because the machine changed more between profile and race than in the row above:\n"
    for cell, one in told:
        measured, ours = one["measured_s"], one["measured_s"][OURS]
        baselines = [measured[name] for name in BASELINES if name in measured]
        over = f", {_times(min(baselines) / ours)} of the best baseline" if baselines else ""
        yield (
            f"- {cell.model} on `{cell.lab}`, machine {one['drift']:+.0%} ({cell.row['drift']:+.0%} above): "
            f"predicted {_ms(one['predicted_s'])} ms, measured {_ms(ours)} "
            f"({one['predicted_s'] / ours - 1:+.1%}){over}"
        )


def errors_table(cells: Sequence[Cell]) -> Iterator[str]:
    yield "\n## Predicted against measured\n"
    yield "![predicted against measured](figures/predicted.svg)\n"
    yield "| of | steps | mean error | worst error |\n|---|---|---|---|"
    groups: dict[str, Callable[[str], bool]] = {
        "our plans": lambda name: name == OURS,
        "HAP and plans without an addition": lambda name: name == HAP or name.startswith("no-"),
        "DDP, equal shares": lambda name: name == "dp-ev",
        "DDP, shares by speed": lambda name: name == "dp-cp",
        "FSDP2 and ZeRO-3, as the planner sees them": lambda name: name in ("fsdp2", "deepspeed-3"),
        "one device": lambda name: name == "alone",
    }
    for about, of in groups.items():
        found = errors(one for cell in cells for name, one in cell.counted.items() if of(name))
        if found["count"]:
            yield f"| {about} | {found['count']} | {found['mean']:.1%} | {found['worst']:.1%} |"


def ablation_table(cells: Sequence[Cell]) -> Iterator[str]:
    rows = times_without(cells)
    if not rows:
        return
    yield "\n## What each addition brings\n"
    yield "![a step without each addition](figures/ablation.svg)\n"
    yield (
        "A step of the plan that is found without it, over a step of ours, both measured in the same rounds; 1 where "
        "the same plan is found. HAP is without all of them (`lopsided/planner/ablation.py` says what each means).\n"
    )
    yield "| without | geometric mean | most | least |\n|---|---|---|---|"
    for name, found in rows.items():
        (most, high), (least, low) = max(found, key=lambda f: f[1]), min(found, key=lambda f: f[1])
        yield (
            f"| {name} | {_times(geometric_mean(v for _, v in found))} | {_times(high)} ({most.model}, {most.lab}) "
            f"| {_times(low)} ({least.model}, {least.lab}) |"
        )


def _first_line(words: str) -> str:
    return next(iter(words.splitlines()), "")


def missed(cells: Sequence[Cell]) -> Iterator[str]:
    """Where the goal is not reached, with the timeline of that case."""
    short = [cell for cell in cells if not cell.reached and OURS in cell.counted]
    gone = [cell for cell in cells if OURS not in cell.counted]
    yield "\n## Where the goal is not reached\n"
    if not short and not gone:
        yield "Nowhere of what was measured."
    for cell in gone:
        own = cell.row["contestants"].get(OURS, {})
        why = _first_line(own.get("unavailable", "its losses differ"))
        yield f"**{cell.model} on `{cell.lab}`**: no step counts: {why}.\n"
    yield from (f"- `{lab}`: {why}" for lab, why in WHY.items() if any(cell.lab == lab for cell in (*short, *gone)))
    if short:
        yield ""
    for cell in short:
        own, best = cell.counted[OURS], cell.counted.get(cell.best_baseline)
        against = f"{NAMES[cell.best_baseline]} takes {_ms(best['measured_s'])} ms" if best else "no baseline ran"
        believed = ""
        if best and "predicted_s" in best:
            believed = f", and was predicted to take {_ms(best['predicted_s'])} ms"
        yield (
            f"**{cell.model} on `{cell.lab}`**: {_times(cell.margin)} of the best baseline. Ours takes "
            f"{_ms(own['measured_s'])} ms (predicted {_ms(own['predicted_s'])} ms), {against}{believed}.\n\n"
            f"![{cell.model} on {cell.lab}](figures/timeline-{cell.lab}-{cell.model}.svg)\n"
        )


def sizes_table(cells: Sequence[Cell]) -> Iterator[str]:
    yield "\n## Sizes\n"
    yield "| model | where | parameters | as built | autocast |\n|---|---|---|---|---|"
    seen: dict[tuple[str, str], list[str]] = {}
    rows: dict[tuple[str, str], Row] = {}
    for cell in cells:
        key = (cell.model, cell.row["spec"])
        seen.setdefault(key, []).append(cell.lab)
        rows[key] = cell.row
    for (model, spec), labs in seen.items():
        row = rows[model, spec]
        yield f"| {model} | {', '.join(labs)} | {row['parameters']:,} | `{spec}` | {row['autocast'] or 'none'} |"


def proof_page(
    cells: Sequence[Cell],
    zoo: Sequence[Cell],
    ablated: Sequence[Cell],
    programs: Sequence[Row],
    about: Mapping[str, Row],
) -> str:
    """`zoo` are models of which only predictions are looked at."""
    lines = [NOTE, "# The proof\n"]
    lines.append(
        "Each model is profiled in the lab (`benchmarks/lab.py`), planned from that, and trained by everyone in the "
        "same processes, in rounds whose order is shuffled anew. In a round each trains one step that does not count "
        "and then some that do (in rows of e8c15fb and earlier the first step counts and is the only one). All train "
        "with AdamW on the same global batch; losses are compared step by step, and who trains something else does not "
        "count. `make proof` measures, "
        "`make figures` writes this page.\n\n"
        "Since b7a7c6e all hosts also do the same piece of work around the profile and before every round "
        f"(`benchmarks/beat.py`). If it takes {UNSTEADY:.0%} longer or shorter in the race than in the profile, the "
        "machine has changed in between; the model is then measured again, three times at most, and the steadiest "
        "attempt counts, whoever won in it. The others are told below the plans.\n"
    )
    if not cells:
        return "\n".join([*lines, "Nothing was measured yet.", ""])
    lines += ["![speed-up over data parallelism](figures/speedup.svg)\n", *goals(cells, zoo, programs)]
    lines.append("\n## Steps\n")
    for lab in LABS:
        if own := [cell for cell in cells if cell.lab == lab]:
            lines += lab_table(lab, own, about[lab]["what"])
    lines += [
        *missed(cells),
        *plans_table([*cells, *zoo]),
        *set_aside([*cells, *zoo]),
        *ablation_table(ablated),
        *errors_table([*cells, *zoo]),
    ]
    for told in programs:
        found = told["errors"]
        lines.append(
            f"\n{told['programs']} programs of {told['model']} on `{told['lab']}`: rank correlation "
            f"{told['rank_correlation']:.3f}, mean error {found['mean']:.1%}, worst {found['worst']:.1%}. "
            "The clock's rank correlation with itself, every other round against the rounds between, was "
            f"{clock_of(told):.3f}."
        )
    lines += sizes_table([*cells, *zoo])
    lines += [f"\nNote on `{lab}`: {note}." for lab, told in about.items() for note in told.get("notes", ())]
    lines.append("\n## How\n\n| lab | command | commit | torch | machine | rounds |\n|---|---|---|---|---|---|")
    for lab, told in about.items():
        made = told["about"]
        lines.append(
            f"| {lab} | `{made['command']}` | {_commits(told)} | {made['torch']} | {made['machine']} "
            f"| {told['pace']['rounds']} of {told['pace']['steps']} |"
        )
    return "\n".join(lines) + "\n"


def _commits(told: Row) -> str:
    """Of what was measured; with the models, where not all were measured at one."""
    models: dict[str, list[str]] = {}
    for model, row in told["models"].items():
        models.setdefault(row.get("by", told["about"])["commit"], []).append(model)
    if len(models) == 1:
        return next(iter(models))
    return ", ".join(f"{commit} ({', '.join(names)})" for commit, names in models.items())
