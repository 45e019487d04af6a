"""The command `demo`: real workers train a small GPT in several ways, side by side.

In: nothing. Out: text of at most 96 columns, or JSON. Progress goes to stderr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape

from lopsided.cli.terminal import AsJson, Verbose, err, out, print_json, say, say_all
from lopsided.demo.contest import ALONE, BY_SPEED, EQUAL, LOPSIDED
from lopsided.demo.race import SAME, Busy, Outcome, RaceEntry, run_demo
from lopsided.report.table import Cell, Column, Row, Table, percent, seconds_text, speed_text, text_lines, times

TITLES = {
    ALONE: "one worker alone",
    EQUAL: "DDP, equal shares",
    BY_SPEED: "DDP, shares by speed",
    LOPSIDED: "Lopsided",
}
# Columns of the longest step.
_BAR = 40
# A ratio as near to one as this says nothing.
_ALIKE = 0.03
_HEIGHTS = "▁▂▃▄▅▆▇█"


def demo_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller model and fewer steps: to see that it works.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train a small GPT on unequal local workers: DDP with equal shares, DDP with shares by speed, and Lopsided."""
    with _progress(quiet=as_json) as say:
        outcome = run_demo(quick=quick, say=say)
    if as_json:
        print_json(_as_json(outcome))
    else:
        _tell(outcome)
    raise typer.Exit(0 if outcome.loss_difference <= SAME else 1)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, str], None]]:
    """A live line on a terminal; elsewhere a line for each thing that begins."""
    if quiet:
        yield lambda stage, detail: None
        return
    if err.is_terminal:
        # Slow: what draws it takes time from the workers.
        with err.status("", refresh_per_second=2) as status:
            yield lambda stage, detail: status.update(escape(f"{stage}  {detail}"))
        return
    said: set[str] = set()

    def say(stage: str, detail: str) -> None:
        if stage not in said:
            said.add(stage)
            err.print(escape(f"{stage:<10} {detail}"))

    yield say


# As text


def _tell(outcome: Outcome) -> None:
    _tell_setting(outcome)
    _tell_steps(outcome)
    _tell_time(outcome)
    _tell_losses(outcome)
    _tell_last(outcome)


def _tell_setting(outcome: Outcome) -> None:
    size, cluster = outcome.setting.size, outcome.cluster
    speeds = [kind.speed / 1e9 for kind in cluster.device_kinds]
    ring = next((link for name, way, link in cluster.collectives if (name, way) == ("all_reduce", "ring")), None)
    talk = f"; an all-reduce takes {seconds_text(ring.latency_s)} + {speed_text(ring.bytes_per_s)}" if ring else ""
    workers = {1: "one", 2: "two", 3: "three"}.get(len(speeds), str(len(speeds)))
    say(f"A GPT of {outcome.parameters / 1e6:.1f} million parameters, trained by {workers} workers", "bold")
    say(f"  they are   {outcome.setting.about}")
    say(f"  measured   {', '.join(f'{speed:,.0f}' for speed in speeds)} GFLOP/s{talk}")
    say(
        f"  all train  on the same {outcome.steps} batches of {size.batch} × {size.seq} letters, "
        "from the same weights, by AdamW"
    )


def _tell_steps(outcome: Outcome) -> None:
    base = outcome[EQUAL]
    columns = (
        Column("A step"),
        Column("predicted", seconds_text),
        Column("measured", seconds_text),
        Column("speed", times),
        *(Column(f"worker {rank}" if rank else "share of worker 0", percent) for rank in range(len(base.shares))),
    )
    rows = []
    for entry in outcome.entries:
        shares = [Cell(share, "–" if share is None else None) for share in entry.shares]
        cells = (TITLES[entry.name], entry.predicted_s, entry.measured_s, entry.faster_than(base), *shares)
        rows.append(Row(cells))
    how = {"whole": "whole on every worker", "cut": "cut where they are used", "gathered": "cut and gathered for use"}
    told = ", ".join(f"{part:.0%} {how[name]}" for name, part in outcome.stored if part >= 0.005)
    say("")
    for line in text_lines(Table("A step", columns, tuple(rows), (f"Lopsided keeps of its parameters {told}",))):
        say(line, "bold" if line.strip().startswith(("A step", f"{TITLES[LOPSIDED]}  ")) else "")


def _tell_time(outcome: Outcome) -> None:
    entries = [entry for entry in outcome.entries if entry.name != ALONE]
    longest = max(entry.measured_s for entry in entries)
    say("\nWhere it goes          █ compute and optimizer   – communication   ░ waiting for other workers", "bold")
    for entry in entries:
        for rank, busy in enumerate(entry.workers):
            say(f"  {'' if rank else TITLES[entry.name]:<20} {rank}  {_bar_of(busy, longest)}")
    plan = outcome.plan.breakdown
    say(
        f"  Lopsided predicted   for its busiest: compute {seconds_text(plan.compute_s + plan.optimizer_s)}, "
        f"communication {seconds_text(plan.blocking_s + plan.exposed_s)}, waiting {seconds_text(plan.waiting_s)}"
    )


def _bar_of(busy: Busy | None, longest_s: float) -> str:
    if busy is None:
        return "takes no part"
    parts = (("█", busy.compute_s + busy.optimizer_s), ("–", busy.communication_s), ("░", busy.waiting_s))
    drawn, end_s = "", 0.0
    for letter, seconds in parts:
        end_s += seconds
        drawn += letter * (round(_BAR * end_s / longest_s) - len(drawn))
    return f"{drawn:<{_BAR + 2}} {' + '.join(f'{1e3 * seconds:.0f}' for _, seconds in parts)} ms"


def _tell_losses(outcome: Outcome) -> None:
    steps = outcome.steps
    shown = sorted({round(k * (steps - 1) / 5) for k in range(6)})
    columns = (Column("Loss at step"), *(Column(str(step + 1), "{:.5f}".format) for step in shown), Column())
    rows = []
    for entry in (outcome[ALONE], outcome[LOPSIDED]):
        curve = _curve(entry.losses) if out.encoding.lower().startswith("utf") else ""
        rows.append(Row((TITLES[entry.name], *(entry.losses[step] for step in shown), curve)))
    head, *lines = text_lines(Table("Loss at step", columns, tuple(rows)))
    say(f"\n{head}", "bold")
    say_all(lines)
    same = outcome.loss_difference <= SAME
    word = "the same training" if same else "NOT the same training"
    difference = f"{outcome.loss_difference:.1e} of the loss"
    say(f"  the largest difference in {steps} steps is {difference}: {word}", "green" if same else "red")


def _curve(losses: Sequence[float], columns: int = 12) -> str:
    columns = min(columns, len(losses))
    picked = [losses[round(k * (len(losses) - 1) / max(columns - 1, 1))] for k in range(columns)]
    low, high = min(losses), max(losses)
    steps = len(_HEIGHTS) - 1
    return "".join(_HEIGHTS[round(steps * (loss - low) / (high - low or 1.0))] for loss in picked)


def _tell_last(outcome: Outcome) -> None:
    ours = outcome[LOPSIDED]
    say(f"\n{_verdict(ours, outcome[EQUAL], outcome[BY_SPEED])}", "bold")
    if ours.faster_than(outcome[ALONE]) < 1 - _ALIKE:
        say("One worker alone is faster here: on this machine the others cost more than they bring.")
    say(f"All this took {outcome.seconds:.0f} s. Times are medians of {len(ours.rounds_s)} rounds in shuffled order.")
    say("\nNext   your cards    lopsided plan gpt2 --cluster 3090+3060 -o plan.json")
    say("       your model    lopsided plan your_file.py:function --cluster your_cluster.toml -o plan.json")
    say("       your training lopsided run plan.json train.py      (examples/05_train.py, README.md)")
    say("       any program   lopsided verify gpt2:layers=2,width=64 --shares .5,.3,.2")


def _verdict(ours: RaceEntry, equal: RaceEntry, by_speed: RaceEntry) -> str:
    first, second = (_compared(ours.faster_than(other)) for other in (equal, by_speed))
    return f"Lopsided is {first} DDP with equal shares, and {second} DDP with shares by speed."


def _compared(ratio: float) -> str:
    """How fast, in words.

    >>> _compared(1.5), _compared(1.01), _compared(0.5)
    ('1.50 times as fast as', 'as fast as', '2.00 times as slow as')
    """
    if abs(math.log(ratio)) <= _ALIKE:
        return "as fast as"
    return f"{ratio:.2f} times as fast as" if ratio > 1 else f"{1 / ratio:.2f} times as slow as"


# As JSON


def _as_json(outcome: Outcome) -> dict[str, Any]:
    base = outcome[EQUAL]
    return {
        "model": outcome.setting.size.spec,
        "parameters": outcome.parameters,
        "workers": {"about": outcome.setting.about, "devices": outcome.setting.devices, "cores": outcome.setting.cores},
        "cluster": outcome.cluster.text(),
        "steps": outcome.steps,
        "contestants": {
            entry.name: {
                "title": TITLES[entry.name],
                "predicted_s": entry.predicted_s,
                "measured_s": entry.measured_s,
                "rounds_s": entry.rounds_s,
                "times_as_fast_as_equal": entry.faster_than(base),
                "shares": entry.shares,
                "workers": [asdict(busy) if busy else None for busy in entry.workers],
                "losses": entry.losses,
            }
            for entry in outcome.entries
        },
        "stored": dict(outcome.stored),
        "predicted_breakdown": asdict(outcome.plan.breakdown),
        "loss_difference": outcome.loss_difference,
        "same": outcome.loss_difference <= SAME,
        "seconds": outcome.seconds,
    }
