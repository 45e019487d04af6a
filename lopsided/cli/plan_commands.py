"""The commands about plans: make one, show it, compare two, list clusters. With `cli`, the only place that prints.

In: arguments. Out: text of at most 120 columns, or JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.markup import escape

from lopsided.calibration.run_record import load_run
from lopsided.cli.terminal import AsJson, Batch, Model, Verbose, err, load_shapes, out, print_json
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import load_cluster, preset_names
from lopsided.codec import check_writable
from lopsided.errors import ClusterError, InputError, PlanError, RunError, shown
from lopsided.ir.graph import DTYPES
from lopsided.planner.ablation import ADDITIONS, HAP, additions_named
from lopsided.planner.baselines import batch_size
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import PLAN_FILE, load_plan, save_plan
from lopsided.planner.planner import plan
from lopsided.report.listing import (
    bytes_text,
    seconds_text,
)
from lopsided.report.plan_diff import diff_plans
from lopsided.report.plan_text import (
    baseline_lines,
    breakdown_lines,
    device_lines,
    diff_lines,
    header_lines,
    inputs_of,
    node_lines,
    note_lines,
    plural,
    program_lines,
    progress_text,
    rate_text,
    search_lines,
    segment_lines,
    shape_text,
)
from lopsided.schedule.cost import optimizer_named

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
    ablate: Annotated[
        str,
        typer.Option(
            help="Plan without some of what is added to HAP, to see what it is worth: "
            f"{', '.join(ADDITIONS)}, with commas between, or {HAP} for all."
        ),
    ] = "",
    known: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A plan of the same model, or a run that was recorded: the answer is never predicted slower. Can be "
            "repeated.",
        ),
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Write the plan to this file.")] = "",
    full: Annotated[bool, typer.Option("--full", help="Every step, nothing folded or shortened.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Plan the fastest training of a model on a cluster: what is cut how, and who does how much."""
    if output:
        check_writable(output, PLAN_FILE)
    on = _cluster_option(cluster)
    optimizer_named(optimizer)
    _check_dtype(dtype)
    without = sorted(additions_named(name.strip() for name in ablate.split(",") if name.strip()))
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
            without=without,
            known=[_plan_or_run(file) for file in known or ()],
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


def _plan_or_run(file: str) -> Plan:
    try:
        return load_plan(file)
    except PlanError as error:
        try:
            return load_run(file).plan
        except RunError:
            raise error from None


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
        "inputs": {leaf.target: shape_text(leaf) for leaf in inputs_of(plan)},
        "optimizer": plan.optimizer,
        "regather": plan.regather,
        "bucket_bytes": plan.bucket_bytes,
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


def _print_plan(plan: Plan, name: str, *, full: bool) -> None:
    used = f"{len(plan.devices)} of {plan.cluster.devices}" if plan.on != plan.cluster else f"{plan.cluster.devices}"
    batch = batch_size(plan.graph)
    rate = f", {rate_text(batch / plan.step_s)} samples/s" if batch and plan.step_s else ""
    _say(f"{name} on {plan.cluster.name}", "bold")
    _say(f"a step of {seconds_text(plan.step_s)}{rate}, with {used} {plural('device', plan.cluster.devices)}")
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
