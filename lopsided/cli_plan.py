"""The commands about plans: make one, show it, compare two, list clusters. With `cli`, the only place that prints.

In: arguments. Out: text of at most 120 columns, or JSON.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.markup import escape

from lopsided.classics import batch_size
from lopsided.cluster import Cluster, load_cluster, preset_names
from lopsided.cost import optimizer_named
from lopsided.errors import InputError
from lopsided.listing import (
    DeviceRow,
    Row,
    bytes_text,
    device_rows,
    folded_seconds,
    listing,
    merged,
    seconds_text,
)
from lopsided.plan import Plan
from lopsided.plandiff import Difference, diff_plans
from lopsided.planfile import load_plan, save_plan
from lopsided.planner import plan
from lopsided.search import Progress
from lopsided.terminal import AsJson, Batch, Model, Verbose, err, load_shapes, out

WIDTH = 120
_STEP, _SECONDS = 68, 8  # columns of the program's table
_HELD = "\N{NO-BREAK SPACE}"
_LEAST = 0.0005  # as part of a step: less is no difference

PlanFile = Annotated[str, typer.Argument(help="A file that `lopsided plan -o` wrote.")]


def plan_command(
    model: Model,
    cluster: Annotated[str, typer.Option(help="A preset (`lopsided clusters` lists them) or a cluster.toml.")],
    batch: Batch = None,
    optimizer: Annotated[str, typer.Option(help="Whose state has to be kept: adamw, sgd, ...")] = "adamw",
    dtype: Annotated[str | None, typer.Option(help="Plan for the model in this dtype: bf16, f16, f32.")] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds after which the best so far is taken.")] = math.inf,
    pin: Annotated[
        list[str] | None, typer.Option(help='Fix how parameters are stored: "encoder.*.weight=I". Can be repeated.')
    ] = None,
    segment: Annotated[
        list[str] | None, typer.Option(help='Modules with shares of their own: "encoder.*". Can be repeated.')
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Write the plan to this file.")] = "",
    full: Annotated[bool, typer.Option("--full", help="Every step, nothing folded or shortened.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Plan the fastest training of a model on a cluster: what is cut how, and who does how much."""
    on = load_cluster(cluster)
    optimizer_named(optimizer)
    if not time_limit >= 0:
        raise InputError(f"a time limit of {time_limit:g} s", where="--time-limit", do="give seconds, 0 or more")
    with _status(quiet=as_json) as say:
        say(f"capture and plan  {model}")
        module, data = load_shapes(model, batch)
        found = plan(
            module,
            data,
            on,
            dtype=dtype,
            optimizer=optimizer,
            time_limit_s=time_limit,
            pins=pin or (),
            segments=segment or (),
            progress=lambda progress: say(progress_text(progress)),
        )
    if output:
        save_plan(found, output)
    if as_json:
        _print_json({"model": model, "dtype": dtype} | plan_json(found))
        return
    _print_plan(found, model, full=full)
    if output:
        _say(f"\nwritten to {output}")


def show_command(
    file: PlanFile,
    full: Annotated[bool, typer.Option("--full", help="Every step, nothing folded or shortened.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show a plan from its file."""
    found = load_plan(file)
    if as_json:
        _print_json({"model": None, "file": file} | plan_json(found))
    else:
        _print_plan(found, file, full=full)


def diff_command(
    a: PlanFile,
    b: PlanFile,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Say what differs between two plans."""
    one, other = load_plan(a), load_plan(b)
    differences = diff_plans(one, other)
    if as_json:
        fields = ("about", "what", "a", "b", "count")
        told = [{field: getattr(difference, field) for field in fields} for difference in differences]
        _print_json({"a": a, "b": b, "same_graph": _same_graph(one, other), "differences": told})
        return
    if not differences:
        _say("the plans are the same")
        return
    if not _same_graph(one, other):
        _say("The plans are for different graphs (another model, batch or dtype): compared is what both have.\n")
    for line in diff_lines(differences):
        _say(line)


def _same_graph(a: Plan, b: Plan) -> bool:
    return a.graph.fingerprint == b.graph.fingerprint


def clusters_command(
    name: Annotated[str, typer.Argument(help="A preset or a file, to be printed as TOML.")] = "",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """List the clusters that come along; with a name, print one as TOML to copy and change."""
    if name:
        found = load_cluster(name)
        if as_json:
            _print_json({"name": found.name, "devices": list(found.device_names), "toml": found.text()})
        else:
            out.print(escape(found.text()), end="")
        return
    presets = [load_cluster(preset) for preset in preset_names()]
    if as_json:
        _print_json({"clusters": [_cluster_json(cluster) for cluster in presets]})
        return
    width = max(len(cluster.name) for cluster in presets)
    for cluster in presets:
        _say(f"{cluster.name:<{width}}  {_devices_text(cluster)}")
    _say("\n`lopsided clusters NAME` prints one, to be copied and changed")


def _cluster_json(cluster: Cluster) -> dict[str, object]:
    kinds = [{"name": k.name, "count": k.devices, "memory_bytes": k.memory_bytes} for k in cluster.kinds]
    return {"name": cluster.name, "about": cluster.about, "nodes": cluster.nodes, "kinds": kinds}


def _devices_text(cluster: Cluster) -> str:
    kinds = ", ".join(f"{kind.devices} {kind.name} ({bytes_text(kind.memory_bytes)})" for kind in cluster.kinds)
    return f"{kinds} in {cluster.nodes} {'node' if cluster.nodes == 1 else 'nodes'}"


# JSON


def plan_json(plan: Plan) -> dict[str, object]:
    """All that a plan says, devices by name; what cannot be is null."""
    used = {name: k for k, name in enumerate(plan.devices)}
    names = plan.cluster.device_names
    limits = [kind.memory_bytes for kind in plan.cluster.kinds for _ in range(kind.devices)]
    best = plan.best_baseline
    shares = dict.fromkeys(("state", *(name for name, _ in plan.shares.named)))
    return {
        "cluster": plan.cluster.name,
        "batch": batch_size(plan.graph),
        "optimizer": plan.optimizer,
        "regather": plan.regather,
        "step_s": plan.step_s,
        "breakdown": {
            name: getattr(plan.breakdown, name)
            for name in ("compute_s", "optimizer_s", "blocking_s", "exposed_s", "waiting_s", "hidden_s")
        },
        "baselines": {b.name: _finite(b.step_s) if b.fits else None for b in plan.baselines},
        "best_baseline": best.name if best else None,
        "devices": list(plan.devices),
        "shares": {"work": _by_name(names, used, plan.shares.work)}
        | {name: _by_name(names, used, plan.shares.of(name)) for name in shares},
        "memory_bytes": {name: plan.memory_bytes[used[name]] if name in used else 0 for name in names},
        "memory_limit_bytes": dict(zip(names, limits, strict=True)),
        "search": {
            "seconds": plan.search.seconds,
            "states": plan.search.states,
            "cost_s": _finite(plan.search.cost_s),
            "bound_s": _finite(plan.search.bound_s),
            "gap": _finite(plan.search.gap),
            "why": plan.search.why,
            "searches": plan.search.searches,
            "rounds": list(plan.search.rounds),
        },
        "capture_s": plan.capture_s,
        "planning_s": plan.planning_s,
        "without": {name: _finite(step_s) for name, step_s in plan.without_device},
        "without_node": {name: _finite(step_s) for name, step_s in plan.without_node},
        "notes": list(plan.notes),
        "fingerprints": {"graph": plan.graph.fingerprint, "cluster": plan.cluster.fingerprint},
        "program": str(plan.program).splitlines(),
    }


def _by_name(names: Iterable[str], used: dict[str, int], fractions: tuple[float, ...]) -> dict[str, float]:
    return {name: fractions[used[name]] if name in used else 0.0 for name in names}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _print_json(told: dict[str, object]) -> None:
    out.print_json(json.dumps(told))


# Text


def _say(line: str, style: str = "") -> None:
    """A line as it is: what strangers' files say can neither be markup nor move the cursor."""
    plain = "".join(c if c.isprintable() or c == "\n" else "?" for c in line)
    out.print(escape(plain), style=style or None)


@contextmanager
def _status(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A live line on a terminal, nothing elsewhere."""
    if quiet or not err.is_terminal:
        yield lambda text: None
        return
    with err.status("") as status:
        yield lambda text: status.update(escape(text))


def progress_text(progress: Progress) -> str:
    """
    >>> progress_text(Progress(12410, 0.0412, 0.0389, 4.2))
    'search  12,410 states  best 41.2 ms  bound 38.9 ms  gap 5.6 %  0:04'
    """
    minutes, seconds = divmod(int(progress.seconds), 60)
    best = seconds_text(progress.best) if math.isfinite(progress.best) else "none yet"
    gap = _percent(progress.gap) if math.isfinite(progress.gap) else "unknown"
    bound = seconds_text(progress.bound)
    return f"search  {progress.states:,} states  best {best}  bound {bound}  gap {gap}  {minutes}:{seconds:02}"


def _percent(part: float) -> str:
    """
    >>> _percent(0.0558), _percent(0.0), _percent(0.00001)
    ('5.6 %', '0 %', '<0.1 %')
    """
    if part == 0:
        return "0 %"
    return "<0.1 %" if part < 0.0005 else f"{part * 100:.1f} %"


def _print_plan(plan: Plan, name: str, *, full: bool) -> None:
    used = f"{len(plan.devices)} of {plan.cluster.devices}" if plan.on != plan.cluster else f"{plan.cluster.devices}"
    batch = batch_size(plan.graph)
    rate = f", {batch / plan.step_s:,.0f} samples/s" if batch and plan.step_s else ""
    _say(f"{name} on {plan.cluster.name}", "bold")
    _say(f"a step of {seconds_text(plan.step_s)}{rate}, with {used} devices")
    sections = (
        ("program", program_lines(plan, full=full)),
        ("devices", device_lines(plan)),
        (f"a step  {seconds_text(plan.step_s)}", breakdown_lines(plan)),
        ("compared with", baseline_lines(plan)),
        ("search", search_lines(plan)),
        ("notes", note_lines(plan)),
    )
    for title, lines in sections:
        for number, line in enumerate(lines):
            if not number:
                _say(f"\n{title}", "bold")
            _say(line)


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def program_lines(plan: Plan, *, full: bool = False) -> Iterator[str]:
    """The table of steps. Steps that neither take time nor send are left out unless all are asked for."""
    rows = listing(plan, fold=not full)
    yield f"  {'':<{_STEP}}{'compute':>{_SECONDS}}{'blocks':>{_SECONDS}}{'hides':>{_SECONDS}}  sends"
    inside = left_out = 0
    for row in rows:
        if row.repeats:
            yield _row_line(f"{row.text}  × {row.repeats}, each", row, full=full)
            inside = row.rows
            continue
        indent = "  " if inside else ""
        inside = max(inside - 1, 0)
        if row.is_free and not full:
            left_out += row.times
        else:
            yield _row_line(indent + row.text, row, full=full)
    if left_out:
        yield f"  and {left_out} steps that take no time, such as views (--full shows them)"
    yield from _ways_lines(rows)


def _row_line(text: str, row: Row, *, full: bool) -> str:
    numbers = "".join(
        f"{seconds_text(seconds) if seconds else '':>{_SECONDS}}"
        for seconds in (row.compute_s, row.blocking_s, row.hiding_s)
    )
    if full:
        sends = "; ".join(f"{s.collective} {s.implementation} {seconds_text(s.seconds)}" for s in row.sends)
        where = f"  # {row.module}" if row.module else ""
        return f"  {text:<{_STEP}}{numbers}  {sends}{where}".rstrip()
    room = WIDTH - 4 - _STEP - 3 * _SECONDS
    more = f" +{len(row.sends) - 1}" if len(row.sends) > 1 else ""
    first = f"{row.sends[0].collective} {row.sends[0].implementation}" if row.sends and not row.repeats else ""
    sends = _fit(first, room - len(more)) + more if first else ""
    head, *rest = _wrapped(text, _STEP - 1)
    return "\n".join([f"  {head:<{_STEP}}{numbers}  {sends}".rstrip(), *(f"  {line}" for line in rest)])


def _wrapped(text: str, width: int) -> list[str]:
    """A long call over several lines, between its operands."""
    indent = " " * (len(text) - len(text.lstrip()))
    # A placement stays with its operand, and what is given with the bracket before it.
    held = re.sub(r"(:| :|\)) ", lambda match: match[0].replace(" ", _HELD), text.strip())
    lines = textwrap.wrap(held, width - len(indent), subsequent_indent="    ", break_on_hyphens=False)
    return [indent + line.replace(_HELD, " ") for line in lines] or [""]


def _ways_lines(rows: Iterable[Row]) -> Iterator[str]:
    """What is sent in all, by which collective and how it is carried out."""
    steps = [row for row in rows if not row.repeats]
    every = merged(send for row in steps for send in row.sends for _ in range(row.times))
    if every:
        yield "  sent in a step"
    for send in every:
        how = "hides" if send.hides else "blocks"
        yield f"    {how:<6} {seconds_text(send.seconds):>8}  {send.collective} by {send.implementation}"


def device_lines(plan: Plan) -> Iterator[str]:
    """Shares, memory and worth of each group of devices alike, and the worth of nodes."""
    rows = device_rows(plan)
    names = [by for by, _ in max((row.shares for row in rows), key=len, default=())]
    labels = [_counted(row.name, len(row.names)) for row in rows]
    nodes = folded_seconds(plan.without_node)
    wide = max(map(len, [*labels, *(_counted(name, count) for name, count, _ in nodes)]), default=0)
    heads = "".join(f"{name:>10}" for name in names)
    yield f"  {'':<{wide}}{heads}  {'memory':<33}without one"
    for label, row in zip(labels, rows, strict=True):
        shares = dict(row.shares)
        cells = "".join(f"{shares[name] * 100:>8.2f} %" if name in shares else f"{'–':>10}" for name in names)
        yield f"  {label:<{wide}}{cells}  {_memory_text(row):<33}{worth_text(plan.step_s, row.without_s)}".rstrip()
    if nodes:
        for name, count, step_s in nodes:
            gap = " " * (10 * len(names) + 35)
            yield f"  {_counted(name, count):<{wide}}{gap}{worth_text(plan.step_s, step_s)}"


def _counted(name: str, count: int) -> str:
    return f"{name} ({count})" if count > 1 else name


def _memory_text(row: DeviceRow) -> str:
    if not row.shares:
        return "left out"
    part = row.memory_bytes / row.limit_bytes
    full = min(max(round(part * 10), 1), 10)
    bar = "█" * full + "░" * (10 - full)
    return f"{bar} {bytes_text(row.memory_bytes)} of {bytes_text(row.limit_bytes)}"


def worth_text(step_s: float, without_s: float | None) -> str:
    """What a step would take without something, beside what it takes.

    >>> worth_text(0.1, 0.112), worth_text(0.1, 0.1), worth_text(0.1, 0.08)
    ('112 ms (+12.0 %)', 'no difference', 'faster without: 80.0 ms (-20.0 %)')
    """
    if without_s is None or not step_s:
        return ""
    if not math.isfinite(without_s):
        return "needed: nothing fits without"
    more = without_s / step_s - 1
    if abs(more) < _LEAST:
        return "no difference"
    times = f"{more + 1:,.1f} ×" if more >= 9 else f"{more * 100:+.1f} %"
    return f"{'faster without: ' if more < 0 else ''}{seconds_text(without_s)} ({times})"


def breakdown_lines(plan: Plan) -> Iterator[str]:
    about = {
        "compute": "forward and backward of the busiest devices",
        "optimizer": plan.optimizer,
        "blocking": "activations are sent, everyone waits",
        "exposed": "parameters and gradients are sent, and computation is too short to hide it",
        "waiting": "for slower devices",
    }
    for name, words in about.items():
        seconds = getattr(plan.breakdown, f"{name}_s")
        part = seconds / plan.step_s if plan.step_s else 0.0
        yield f"  {name:<10}{seconds_text(seconds):>9}{_percent(part):>9}  {words}"
    yield f"  {'hidden':<10}{seconds_text(plan.breakdown.hidden_s):>9}{'':>9}  sent behind computation, beside the step"
    if plan.regather:
        yield "  gathered parameters are freed after use and gathered again in the backward pass"


def baseline_lines(plan: Plan) -> Iterator[str]:
    wide = max((len(b.name) for b in plan.baselines), default=0)
    for b in plan.baselines:
        if b.fits and math.isfinite(b.step_s):
            speed_up = f"{b.step_s / plan.step_s:,.2f} ×" if plan.step_s else ""
            yield f"  {b.name:<{wide}}{seconds_text(b.step_s):>10}{speed_up:>11}  {b.about}"
        else:
            yield f"  {b.name:<{wide}}{'does not fit':>21}  {b.about}"


def search_lines(plan: Plan) -> Iterator[str]:
    s = plan.search
    yield f"  {s.searches:,} searches; the one that found it: {s.states:,} states in {seconds_text(s.seconds)}"
    gap = f"gap {_percent(s.gap)}" if math.isfinite(s.gap) else "no bound"
    yield f"  cost {seconds_text(s.cost_s)}, bound {seconds_text(s.bound_s)}, {gap}: {s.why}"
    times = f"captured in {seconds_text(plan.capture_s)}, " if plan.capture_s else ""
    yield f"  {times}planned in {seconds_text(plan.planning_s)}"


def note_lines(plan: Plan) -> Iterator[str]:
    for note in plan.notes:
        yield from textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="    ")


def diff_lines(differences: Iterable[Difference]) -> Iterator[str]:
    """Differences under what they are about, columns aligned, long ones over two lines."""
    every = list(differences)
    titles = {
        "graph": "graph",
        "cluster": "cluster",
        "step": "a step",
        "options": "options",
        "devices": "devices",
        "stored": "how parameters are stored",
        "steps": "how steps are run",
        "baselines": "compared with",
    }
    for about, title in titles.items():
        mine = [d for d in every if d.about == about]
        if not mine:
            continue
        yield title
        wide = min(max(len(d.what) for d in mine), 50)
        for d in mine:
            count = f"  ({d.count})" if d.count > 1 else ""
            line = f"  {d.what:<{wide}}  {d.a} → {d.b}{count}"
            if len(line) <= WIDTH:
                yield line
            else:
                yield from (_fit(f"  {d.what}{count}", WIDTH), _fit(f"    - {d.a}", WIDTH), _fit(f"    + {d.b}", WIDTH))
