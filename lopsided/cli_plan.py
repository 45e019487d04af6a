"""The commands about plans: make one, show it, compare two, list clusters. With `cli`, the only place that prints.

In: arguments. Out: text of at most 120 columns, or JSON.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.markup import escape

from lopsided.classics import STATE, batch_size
from lopsided.cluster import Cluster, load_cluster, preset_names
from lopsided.cost import optimizer_named
from lopsided.devices import shown
from lopsided.errors import ClusterError, InputError, PlanError
from lopsided.graph import DTYPES, Leaf
from lopsided.listing import (
    DeviceRow,
    Row,
    bytes_text,
    device_rows,
    folded_seconds,
    listing,
    merged,
    seconds_text,
    segment_rows,
    told_apart,
)
from lopsided.plan import Plan
from lopsided.plandiff import Difference, diff_plans
from lopsided.planfile import check_writable, load_plan, save_plan
from lopsided.planner import plan
from lopsided.search import Progress
from lopsided.terminal import AsJson, Batch, Model, Verbose, err, load_shapes, out, print_json

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
    dtype: Annotated[str | None, typer.Option(help="Plan for the model in this dtype: bf16, f16, f32, f64.")] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds after which the best so far is taken.")] = math.inf,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            help='Fix how parameters are stored: "encoder.*.weight=I", or cut by the state shares and gathered for '
            'use: "encoder.*.weight=S0@state"; or how a value is made: "%linear_3=S0", named as `lopsided capture` '
            "prints it. Can be repeated."
        ),
    ] = None,
    segment: Annotated[
        list[str] | None,
        typer.Option(
            help='Modules with shares of their own: "encoder.*". Can be repeated, and each gets shares of its own.'
        ),
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Write the plan to this file.")] = "",
    full: Annotated[bool, typer.Option("--full", help="Every step, nothing folded or shortened.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Plan the fastest training of a model on a cluster: what is cut how, and who does how much."""
    if output:
        check_writable(output)
    on = _cluster_option(cluster)
    optimizer_named(optimizer)
    _check_dtype(dtype)
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
    unwritten = None
    try:
        # First: whoever reads what is printed may stop after a line.
        if output:
            save_plan(found, output)
    except PlanError as error:
        unwritten = error
    if as_json and not unwritten:
        _print_json({"model": model, "dtype": dtype} | plan_json(found))
    elif not as_json:
        _print_plan(found, model, full=full)
        if output and not unwritten:
            _say(f"\nwritten to {output}")
    if unwritten:
        raise unwritten


def _cluster_option(cluster: str) -> Cluster:
    try:
        return load_cluster(cluster)
    except ClusterError as error:
        raise ClusterError(error.what, where=error.where or f"--cluster {shown(cluster)}", do=error.do) from None


def _check_dtype(dtype: str | None) -> None:
    """Before the model is captured, which takes time."""
    floats = {name: str(kind).removeprefix("torch.") for name, kind in DTYPES.items() if kind.is_floating_point}
    if dtype is None or dtype in floats:
        return
    meant = [name for name, words in floats.items() if dtype.lower().removeprefix("torch.") in (words, name)]
    meant = meant or {"half": ["f16"], "float": ["f32"], "double": ["f64"]}.get(dtype.lower(), [])
    hint = f"did you mean {meant[0]}? " if meant else ""
    raise InputError(
        f"there is no floating dtype {shown(dtype)}", where="--dtype", do=f"{hint}choose from {', '.join(floats)}"
    )


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
        "parameters": sum(leaf.value.elements for leaf in plan.graph.parameters),
        "dtypes": [*dict.fromkeys(leaf.value.dtype for leaf in plan.graph.parameters)],
        "inputs": {leaf.target: _shape_text(leaf) for leaf in _inputs(plan)},
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
    print_json(json.dumps(told))


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
    rate = f", {rate_text(batch / plan.step_s)} samples/s" if batch and plan.step_s else ""
    _say(f"{name} on {plan.cluster.name}", "bold")
    _say(f"a step of {seconds_text(plan.step_s)}{rate}, with {used} {_plural('device', plan.cluster.devices)}")
    for line in header_lines(plan, name):
        _say(line)
    sections = (
        ("program", program_lines(plan, full=full)),
        ("devices", device_lines(plan, full=full)),
        ("nodes", node_lines(plan)),
        ("parts of the model with shares of their own", segment_lines(plan, full=full)),
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


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def rate_text(rate: float) -> str:
    """Three digits that count.

    >>> [rate_text(r) for r in (12837.2, 998.7, 51.26, 0.01234)]
    ['12,800', '999', '51.3', '0.0123']
    """
    digits = f"{rate:.3g}"
    return f"{float(digits):,.0f}" if rate >= 100 else digits


def count_text(count: int) -> str:
    """
    >>> [count_text(n) for n in (97, 12345, 125_400_000, 6_738_415_616)]
    ['97', '12,345', '125.4 million', '6.74 billion']
    """
    if count >= 1_000_000_000:
        return f"{count / 1e9:,.2f} billion"
    return f"{count / 1e6:.1f} million" if count >= 1_000_000 else f"{count:,}"


_MOST_INPUTS = 8


def _inputs(plan: Plan) -> list[Leaf]:
    return [leaf for leaf in plan.graph.leaves if leaf.kind == "input"]


def _shape_text(leaf: Leaf) -> str:
    return f"{leaf.value.dtype}{list(leaf.value.shape)}"


def header_lines(plan: Plan, name: str = "") -> Iterator[str]:
    """What is trained: how many parameters, in which dtype, on what batch."""
    elements: dict[str, int] = {}
    for leaf in plan.graph.parameters:
        elements[leaf.value.dtype] = elements.get(leaf.value.dtype, 0) + leaf.value.elements
    total = count_text(sum(elements.values()))
    if len(elements) == 1:
        dtypes = f" in {next(iter(elements))}"
    else:
        dtypes = f" ({', '.join(f'{count_text(n)} in {dtype}' for dtype, n in elements.items())})" if elements else ""
    batch = batch_size(plan.graph)
    samples = f", a global batch of {batch:,}" if batch else ""
    every = _inputs(plan)
    inputs = [f"{leaf.target} {_shape_text(leaf)}" for leaf in every[:_MOST_INPUTS]]
    more = [f"{len(every) - _MOST_INPUTS} more"] if len(every) > _MOST_INPUTS else []
    text = f"{total} parameters{dtypes}{samples}: {', '.join([*inputs, *more])}"
    yield from textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    if name.startswith("hf:"):
        text = (
            "Models from transformers are built small unless sizes are given, by the names their configuration has: "
            "hf:CLASS:hidden_size=768,num_hidden_layers=12,vocab_size=30522,batch=32,seq=512"
        )
        yield from textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def program_lines(plan: Plan, *, full: bool = False) -> Iterator[str]:
    """The table of steps. Steps that neither take time nor send are left out unless all are asked for."""
    rows = listing(plan, fold=not full)
    step = max(_STEP, *(len(row.text) + 2 for row in rows)) if full else _STEP
    yield f"  {'':<{step}}{'compute':>{_SECONDS}}{'blocks':>{_SECONDS}}{'hides':>{_SECONDS}}  sends"
    if full:
        yield from _full_lines(rows, step)
        yield from _ways_lines(rows)
        return
    inside = left_out = 0
    for row in rows:
        if row.repeats:
            yield _row_line(f"{row.text}  × {row.repeats}, each", row)
            inside = row.rows
            continue
        indent = "  " if inside else ""
        inside = max(inside - 1, 0)
        if row.is_free:
            left_out += row.times
        else:
            yield _row_line(indent + row.text, row)
    if left_out:
        takes = "takes" if left_out == 1 else "take"
        yield f"  and {left_out} {_plural('step', left_out)} that {takes} no time, such as views (--full shows them)"
    yield from _ways_lines(rows)


def _numbers(row: Row) -> str:
    return "".join(
        f"{seconds_text(seconds) if _is_shown(seconds) else '':>{_SECONDS}}"
        for seconds in (row.compute_s, row.blocking_s, row.hiding_s)
    )


def _full_lines(rows: Iterable[Row], step: int) -> Iterator[str]:
    """All of every row, in columns as wide as it takes."""
    sends = [
        "; ".join(f"{s.collective} {s.implementation} {seconds_text(s.seconds)}" for s in row.sends) for row in rows
    ]
    wide = max(map(len, sends), default=0)
    for row, sent in zip(rows, sends, strict=True):
        where = f"  # {row.module}" if row.module else ""
        yield f"  {row.text:<{step}}{_numbers(row)}  {sent:<{wide}}{where}".rstrip()


def _row_line(text: str, row: Row) -> str:
    room = WIDTH - 4 - _STEP - 3 * _SECONDS
    more = f" +{len(row.sends) - 1}" if len(row.sends) > 1 else ""
    first = f"{row.sends[0].collective} {row.sends[0].implementation}" if row.sends and not row.repeats else ""
    sends = _fit(first, room - len(more)) + more if first else ""
    head, *rest = _wrapped(text, _STEP - 1)
    return "\n".join([f"  {head:<{_STEP}}{_numbers(row)}  {sends}".rstrip(), *(f"  {line}" for line in rest)])


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
    sends = merged(send for row in steps for send in row.sends for _ in range(row.times))
    every = [send for send in sends if _is_shown(send.seconds)]
    if every:
        yield "  sent in a step"
    for send in every:
        how = "hides" if send.hides else "blocks"
        yield f"    {how:<6} {seconds_text(send.seconds):>8}  {send.collective} by {send.implementation}"


def _is_shown(seconds: float) -> bool:
    """Whether anything but zeros would be printed."""
    return seconds_text(seconds) not in ("0", "0.0 µs")


_LABEL = 30
"""The widest label that leaves room for its row; longer ones have a line of their own."""


def _labelled(label: str, wide: int, row: str) -> Iterator[str]:
    if len(label) > wide:
        yield from textwrap.wrap(label, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        label = ""
    yield f"  {label:<{wide}}{row}".rstrip()


def _width(labels: Iterable[str]) -> int:
    return min(max(map(len, labels), default=0), _LABEL)


def _device_labels(rows: Sequence[DeviceRow]) -> list[str]:
    names = told_apart([row.names for row in rows])
    return [_counted(name, len(row.names)) for name, row in zip(names, rows, strict=True)]


def device_lines(plan: Plan, *, full: bool = False) -> Iterator[str]:
    """Shares, memory and worth of each group of devices alike."""
    rows = device_rows(plan)
    names = [by for by, _ in max((row.shares for row in rows), key=len, default=()) if by in _EVERYWHERE]
    labels = _device_labels(rows)
    wide = _width(labels)
    heads = "".join(f"{name:>10}" for name in names)
    worth = "without one" if any(row.without_s is not None for row in rows) else ""
    yield f"  {'':<{wide}}{heads}  {'memory':<33}{worth}".rstrip()
    for label, row in zip(labels, rows, strict=True):
        memory = f"  {_memory_text(row):<33}{worth_text(plan.step_s, row.without_s)}"
        yield from _labelled(label, wide, _share_cells(row, names) + memory)
    parts = segment_rows(plan)
    if parts and not full:
        have = "part of the model has shares of its" if len(parts) == 1 else "parts of the model have shares of their"
        yield f"  {len(parts)} {have} own (--full shows them)"


_EVERYWHERE = ("work", STATE)
"""The shares that any plan may have; others belong to parts of the model."""


def _share_cells(row: DeviceRow, names: Iterable[str]) -> str:
    shares = dict(row.shares)
    return "".join(f"{shares[name] * 100:>8.2f} %" if name in shares else f"{'–':>10}" for name in names)


def node_lines(plan: Plan) -> Iterator[str]:
    """What nodes are worth, those alike once."""
    nodes = folded_seconds(plan.without_node)
    labels = [_counted(name, count) for name, count, _ in nodes]
    wide = _width(labels)
    if nodes:
        yield f"  {'':<{wide}}  without one"
    for label, (_, _, step_s) in zip(labels, nodes, strict=True):
        yield from _labelled(label, wide, f"  {worth_text(plan.step_s, step_s)}")


def segment_lines(plan: Plan, *, full: bool) -> Iterator[str]:
    """Which modules have shares of their own, and which."""
    parts = segment_rows(plan) if full else ()
    rows = [row for row in device_rows(plan) if row.shares]
    labels = _device_labels(rows)
    wide = max(map(len, labels), default=0)
    for part in parts:
        text = f"{part.name}: {part.steps:,} {_plural('step', part.steps)} of {', '.join(part.modules) or 'no module'}"
        yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        for label, row in zip(labels, rows, strict=True):
            yield f"    {label:<{wide}}{_share_cells(row, [part.name])}"


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
        part = seconds / plan.step_s if plan.step_s and _is_shown(seconds) else 0.0
        yield f"  {name:<10}{seconds_text(seconds):>9}{_percent(part):>9}  {words}"
    hidden_s = plan.breakdown.hidden_s
    if _is_shown(hidden_s):
        yield f"  {'hidden':<10}{seconds_text(hidden_s):>9}{'':>9}  sent behind computation, beside the step"
    if plan.regather:
        yield "  gathered parameters are freed after use and gathered again in the backward pass"


def baseline_lines(plan: Plan) -> Iterator[str]:
    wide = _width(b.name for b in plan.baselines)
    for b in plan.baselines:
        numbers = f"{'does not fit':>21}"
        if b.fits and math.isfinite(b.step_s):
            speed_up = f"{b.step_s / plan.step_s:,.2f} ×" if plan.step_s else ""
            numbers = f"{seconds_text(b.step_s):>10}{speed_up:>11}"
        yield _fit(f"  {_fit(b.name, wide):<{wide}}{numbers}  {b.about}", WIDTH)


def search_lines(plan: Plan) -> Iterator[str]:
    s = plan.search
    ended, _, taken = s.why.partition(_TAKEN)
    searches = "1 search" if s.searches == 1 else f"{s.searches:,} searches"
    one = "one of them" if taken else "the one that found it"
    yield f"  {searches}; {one}: {s.states:,} {_plural('state', s.states)} in {seconds_text(s.seconds)}"
    gap = f"gap {_percent(s.gap)}" if math.isfinite(s.gap) else "no bound"
    yield f"  its cost {seconds_text(s.cost_s)}, bound {seconds_text(s.bound_s)}, {gap}: {_ENDED.get(ended, ended)}"
    yield "  (cost and bound are in the search's own prices, which know no overlap; they are not the step time)"
    if taken:
        yield _fit(f"  the plan is {taken_text(taken, [b.name for b in plan.baselines])}", WIDTH)
    times = f"captured in {seconds_text(plan.capture_s)}, " if plan.capture_s else ""
    yield f"  {times}planned in {seconds_text(plan.planning_s)}"


_TAKEN = "; taken is "
_ENDED = {
    "proven": "proven, no program is cheaper",
    "time limit": "ended by the time limit",
    "interrupted": "ended by an interrupt",
}
_VARIATIONS = {
    "partly stored cut": "with part of the parameters stored cut",
    "dp balanced": "data parallelism with the best shares for it",
    "zero balanced": "ZeRO with the best shares for it",
}


def taken_text(name: str, baselines: Collection[str]) -> str:
    """What was taken in place of the very program that a search found.

    >>> taken_text("single", ["dp-ev", "single"])
    'the classic "single": nothing that the searches found is predicted to be faster'
    >>> taken_text("partly stored cut", [])
    'a variation, with part of the parameters stored cut: nothing that the searches found is predicted to be faster'
    """
    what = f'the classic "{name}"' if name in baselines else f"a variation, {_VARIATIONS.get(name, name)}"
    return f"{what}: nothing that the searches found is predicted to be faster"


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
