"""The command `demo`: real workers train a small GPT in several ways, side by side.

In: nothing. Out: text of at most 96 columns, or JSON. Progress goes to stderr.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape

from lopsided.cli.terminal import AsJson, Verbose, err, out, print_json
from lopsided.demo.contest import ALONE, BY_SPEED, EQUAL, LOPSIDED
from lopsided.demo.race import SAME, Busy, Outcome, RaceEntry, run_demo

TITLES = {
    ALONE: "one worker alone",
    EQUAL: "DDP, equal shares",
    BY_SPEED: "DDP, shares by speed",
    LOPSIDED: "Lopsided",
}
_BAR = 40  # columns of the longest step
_ALIKE = 0.03  # ratios as near to one as this say nothing
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
        print_json(json.dumps(_as_json(outcome)))
    else:
        for line in lines_of(outcome):
            out.print(line)
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


def lines_of(outcome: Outcome) -> Iterator[str]:
    """Everything, with markup."""
    yield from _setting_lines(outcome)
    yield from _step_lines(outcome)
    yield from _time_lines(outcome)
    yield from _loss_lines(outcome)
    yield from _last_lines(outcome)


def _setting_lines(outcome: Outcome) -> Iterator[str]:
    size, cluster = outcome.setting.size, outcome.cluster
    speeds = [kind.speed / 1e9 for kind in cluster.kinds for _ in range(kind.devices)]
    ring = next((link for name, way, link in cluster.collectives if (name, way) == ("all_reduce", "ring")), None)
    talk = f"; an all-reduce takes {1e3 * ring.latency_s:.1f} ms + {ring.bytes_per_s / 1e9:.1f} GB/s" if ring else ""
    millions, workers = outcome.parameters / 1e6, _count(len(speeds))
    yield f"[bold]A GPT of {millions:.1f} million parameters, trained by {workers} workers[/bold]"
    yield escape(f"  they are   {outcome.setting.about}")
    yield escape(f"  measured   {', '.join(f'{speed:,.0f}' for speed in speeds)} GFLOP/s{talk}")
    yield escape(
        f"  all train  on the same {outcome.steps} batches of {size.batch} × {size.seq} letters, "
        "from the same weights, by AdamW"
    )


def _count(number: int) -> str:
    return {1: "one", 2: "two", 3: "three"}.get(number, str(number))


def _step_lines(outcome: Outcome) -> Iterator[str]:
    yield ""
    yield "[bold]A step[/bold]                 predicted    measured     speed   share of the work of each worker"
    base = outcome[EQUAL]
    for entry in outcome.entries:
        shares = "  ".join("   –" if share is None else f"{share:4.0%}" for share in entry.shares)
        line = (
            f"  {TITLES[entry.name]:<20} {_ms(entry.predicted_s):>9}  {_ms(entry.measured_s):>10} "
            f"{entry.faster_than(base):>8.2f}×  {shares}"
        )
        yield f"[bold]{escape(line)}[/bold]" if entry.name == LOPSIDED else escape(line)
    how = {"whole": "whole on every worker", "cut": "cut where they are used", "gathered": "cut and gathered for use"}
    told = ", ".join(f"{part:.0%} {how[name]}" for name, part in outcome.stored if part >= 0.005)
    yield escape(f"  Lopsided keeps of its parameters {told}")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _time_lines(outcome: Outcome) -> Iterator[str]:
    entries = [entry for entry in outcome.entries if entry.name != ALONE]
    longest = max(entry.measured_s for entry in entries)
    yield ""
    yield "[bold]Where it goes[/bold]          █ compute and optimizer   – communication   ░ waiting for other workers"
    for entry in entries:
        for rank, busy in enumerate(entry.workers):
            title = TITLES[entry.name] if not rank else ""
            yield escape(f"  {title:<20} {rank}  {_bar_of(busy, longest)}")
    plan = outcome.plan.breakdown
    yield escape(
        f"  Lopsided predicted   for its busiest: compute {_ms(plan.compute_s + plan.optimizer_s)}, "
        f"communication {_ms(plan.blocking_s + plan.exposed_s)}, waiting {_ms(plan.waiting_s)}"
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


def _loss_lines(outcome: Outcome) -> Iterator[str]:
    steps = outcome.steps
    shown = sorted({round(k * (steps - 1) / 5) for k in range(6)})
    yield ""
    yield "[bold]Loss at step[/bold]           " + "".join(f"{step + 1:>9}" for step in shown)
    both = [outcome[ALONE], outcome[LOPSIDED]]
    for entry in both:
        curve = f"   {_curve(entry.losses)}" if out.encoding.lower().startswith("utf") else ""
        yield escape(f"  {TITLES[entry.name]:<20}  " + "".join(f"{entry.losses[step]:9.5f}" for step in shown) + curve)
    same = outcome.loss_difference <= SAME
    word = "[green]the same training[/green]" if same else "[red]NOT the same training[/red]"
    yield f"  the largest difference in {steps} steps is {outcome.loss_difference:.1e} of the loss: {word}"


def _curve(losses: Sequence[float], columns: int = 12) -> str:
    columns = min(columns, len(losses))
    picked = [losses[round(k * (len(losses) - 1) / max(columns - 1, 1))] for k in range(columns)]
    low, high = min(losses), max(losses)
    steps = len(_HEIGHTS) - 1
    return "".join(_HEIGHTS[round(steps * (loss - low) / (high - low or 1.0))] for loss in picked)


def _last_lines(outcome: Outcome) -> Iterator[str]:
    ours = outcome[LOPSIDED]
    yield ""
    yield f"[bold]{_verdict(ours, outcome[EQUAL], outcome[BY_SPEED])}[/bold]"
    if ours.faster_than(outcome[ALONE]) < 1 - _ALIKE:
        yield "One worker alone is faster here: on this machine the others cost more than they bring."
    yield f"All this took {outcome.seconds:.0f} s. Times are medians of {len(ours.rounds_s)} rounds in shuffled order."
    yield ""
    yield "Next   your cards    lopsided plan gpt2 --cluster 3090+3060 -o plan.json"
    yield escape("       your model    lopsided plan your_file.py:function --cluster your_cluster.toml -o plan.json")
    yield "       your training lopsided run plan.json train.py      (examples/05_train.py, README.md)"
    yield "       any program   lopsided verify gpt2:layers=2,width=64 --shares .5,.3,.2"


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
