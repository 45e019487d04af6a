"""The commands about plans: make one, show it, compare two, draw it as a page or a trace; list clusters.

In: arguments. Out: text of at most 120 columns, or JSON; a page or a trace as a file. `cli` alone prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from lopsided import interrupts
from lopsided.calibration.calibrate import with_memory_seen
from lopsided.calibration.run_record import Run, load_run
from lopsided.cli.terminal import (
    AsJson,
    Batch,
    Force,
    Model,
    PlanFile,
    Verbose,
    check_dtype,
    err,
    load_shapes,
    out,
    print_json,
    say,
    say_all,
    say_written,
)
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import load_cluster, preset_names
from lopsided.codec import FileKind, check_writable, write_text
from lopsided.errors import ClusterError, InputError, PlanError, RunError, shown
from lopsided.planner.ablation import ADDITIONS, HAP, additions_named
from lopsided.planner.allowed import TECHNIQUES, allowed
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import PLAN_FILE, load_plan, save_plan
from lopsided.planner.planner import plan
from lopsided.report.chart import trace_text
from lopsided.report.page import report_html
from lopsided.report.plan_diff import diff_plans, difference_tables
from lopsided.report.plan_tables import (
    header_lines,
    headline,
    kinds_table,
    plan_json,
    plan_sections,
    progress_text,
)
from lopsided.report.table import DATA, Column, Row, Table, bytes_text, plural, records, text_lines
from lopsided.schedule.cost import optimizer_named

# Seconds, after an interrupt, for a plan to be made of what was found so far.
_ANSWER_S = 20.0


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
            help="A plan of the same model, or a run that was recorded: the answer is never predicted slower. After a "
            "run that ended out of memory, less of that device's memory is filled. Can be repeated.",
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Compute the batch in so many rounds. Left open, it is as many as it takes to fit, or as pay; 1: at "
            "once.",
        ),
    ] = None,
    allow: Annotated[
        str,
        typer.Option(
            help="Let the plan use what changes the numbers that are computed, where it must or is quicker so: "
            f"{', '.join(TECHNIQUES)} (optimizer state in 8 bits). With commas between."
        ),
    ] = "",
    output: Annotated[str, typer.Option("-o", "--output", help="Write the plan to this file.")] = "",
    force: Force = False,
    full: Annotated[bool, typer.Option("--full", help="Every step, nothing folded or shortened.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Plan the fastest training of a model on a cluster: what is cut how, and who does how much."""
    if output:
        check_writable(output, PLAN_FILE, force=force)
    on = _cluster_option(cluster)
    optimizer_named(optimizer)
    check_dtype(dtype)
    before = [_plan_or_run(file) for file in known or ()]
    runs = [one for one in before if isinstance(one, Run)]
    on = with_memory_seen(on, runs)
    # A plan that failed is none that an answer may come to.
    kept = [one for one in before if not (isinstance(one, Run) and one.out_of_memory)]
    plans = [one.plan if isinstance(one, Run) else one for one in kept]
    without = sorted(additions_named(name.strip() for name in ablate.split(",") if name.strip()))
    may = allowed((name.strip() for name in allow.split(",") if name.strip()), "--allow")
    if not time_limit >= 0:
        raise InputError(f"a time limit of {time_limit:g} s", where="--time-limit", do="give seconds, 0 or more")
    # An answer takes a moment once the search is told to stop.
    with _status(quiet=as_json) as tell, interrupts.answering(_ANSWER_S):
        tell(f"capture and plan  {model}")
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
            known=plans,
            microbatches=microbatches,
            allow=may,
            progress=lambda progress: tell(progress_text(progress)),
        )
    unwritten = None
    try:
        # First: whoever reads what is printed may stop after a line.
        if output:
            save_plan(found, output)
    except PlanError as error:
        unwritten = error
    if as_json and not unwritten:
        print_json({"model": model, "dtype": dtype, "interrupted": found.interrupted} | plan_json(found))
    elif not as_json:
        _print_plan(found, model, full=full)
        if output and not unwritten:
            say(f"\nwritten to {output}")
    if unwritten:
        raise unwritten
    if found.interrupted:
        raise typer.Exit(interrupts.STATUS)


def _plan_or_run(file: str) -> Plan | Run:
    try:
        return load_plan(file)
    except PlanError as error:
        try:
            return load_run(file, failed=True)
        except RunError:
            raise error from None


def _cluster_option(cluster: str) -> Cluster:
    try:
        return load_cluster(cluster)
    except ClusterError as error:
        raise ClusterError(error.what, where=error.where or f"--cluster {shown(cluster)}", do=error.do) from None


def show_command(
    file: PlanFile,
    full: Annotated[bool, typer.Option("--full", help="Every step, nothing folded or shortened.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show a plan from its file."""
    found = load_plan(file)
    if as_json:
        print_json({"model": None, "file": file} | plan_json(found))
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
    tables = difference_tables(diff_plans(one, other))
    same_graph = one.graph.fingerprint == other.graph.fingerprint
    if as_json:
        told = [each for table in tables for each in records(table)]
        print_json({"a": a, "b": b, "same_graph": same_graph, "differences": told})
        return
    if not tables:
        say("the plans are the same")
        return
    if not same_graph:
        say("The plans are for different graphs (another model, batch or dtype): compared is what both have.\n")
    for table in tables:
        say_all([table.title, *text_lines(table)])


def clusters_command(
    name: Annotated[str, typer.Argument(help="A preset or a file, to be printed as TOML.")] = "",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """List the clusters that come along; with a name, print one as TOML to copy and change."""
    if name:
        found = load_cluster(name)
        if as_json:
            print_json({"name": found.name, "devices": list(found.device_names), "toml": found.text()})
        else:
            out.print(escape(found.text()), end="")
        return
    table = _cluster_table([load_cluster(preset) for preset in preset_names()])
    if as_json:
        print_json({"clusters": records(table)})
        return
    say_all(text_lines(table, indent=0))
    say("\n`lopsided clusters NAME` prints one, to be copied and changed")


def _cluster_table(clusters: Sequence[Cluster]) -> Table:
    columns = (Column(key="name"), Column(), *(Column(key=key, only=DATA) for key in ("about", "nodes", "kinds")))
    rows = []
    for cluster in clusters:
        kinds = ", ".join(f"{kind.devices} {kind.name} ({bytes_text(kind.memory_bytes)})" for kind in cluster.kinds)
        text = f"{kinds} in {cluster.nodes} {plural('node', cluster.nodes)}"
        rows.append(Row((cluster.name, text, cluster.about, cluster.nodes, records(kinds_table(cluster)))))
    return Table("clusters", columns, tuple(rows))


# Text


@contextmanager
def _status(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A live line on a terminal, nothing elsewhere."""
    if quiet or not err.is_terminal:
        yield lambda text: None
        return
    with err.status("") as status:
        yield lambda text: status.update(escape(text))


def _print_plan(plan: Plan, name: str, *, full: bool) -> None:
    say(f"{name} on {plan.cluster.name}", "bold")
    say(headline(plan))
    say_all(header_lines(plan, name))
    for title, lines in plan_sections(plan, full=full):
        if lines:
            say(f"\n{title}", "bold")
            say_all(lines)


RunFile = Annotated[str, typer.Option("--run", help="A run of the plan, to show what was measured.")]
_REPORT = FileKind(PlanError, "report", "", known_by=b'name="generator" content="lopsided"')
_TRACE = FileKind(PlanError, "trace", "", known_by=b'^{"displayTimeUnit"')


def report_command(
    file: PlanFile,
    run: RunFile = "",
    output: Annotated[str, typer.Option("-o", "--output", help="The page that is written.")] = "report.html",
    force: Force = False,
    title: Annotated[str, typer.Option(help="What the page is called: the model, as a rule.")] = "",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Draw a plan, and a run of it, as one page that opens in any browser and needs no network."""
    check_writable(output, _REPORT, force=force)
    plan, measured = _loaded(file, run)
    page = report_html(plan, measured, title=title or (measured.model if measured else Path(file).stem))
    write_text(output, page, _REPORT)
    say_written(output, len(page.encode()), as_json)


def trace_command(
    file: PlanFile,
    run: RunFile = "",
    output: Annotated[str, typer.Option("-o", "--output", help="The trace that is written.")] = "trace.json",
    force: Force = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Write the predicted step of a plan, and the measured one of a run, as a trace for ui.perfetto.dev."""
    check_writable(output, _TRACE, force=force)
    text = trace_text(*_loaded(file, run))
    write_text(output, text, _TRACE)
    say_written(output, len(text.encode()), as_json)


def _loaded(file: str, run: str) -> tuple[Plan, Run | None]:
    plan = load_plan(file)
    if not run:
        return plan, None
    measured = load_run(run)
    theirs = measured.plan
    if theirs.program != plan.program or theirs.shares != plan.shares or theirs.devices != plan.devices:
        raise InputError(
            "the run is one of another plan", where=f"--run {run}", do="give the plan that was run, or another run"
        )
    return plan, measured
