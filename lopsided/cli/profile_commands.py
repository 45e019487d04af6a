"""The command that measures: devices, links and what they cost each other. With `cli`, the only place that prints.

In: arguments, and of torchrun the environment. Out: a cluster.toml, and text of at most 100 columns or JSON.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lopsided.calibration.comparison import calibrated_by
from lopsided.calibration.run_record import load_run
from lopsided.capturing.capture_graph import capture
from lopsided.capturing.retype import in_dtype
from lopsided.cli.terminal import (
    AsJson,
    Batch,
    Force,
    Verbose,
    check_dtype,
    load_shapes,
    print_json,
    progress_bar,
    say,
    say_all,
)
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import CLUSTER_FILE
from lopsided.codec import check_writable, write_text
from lopsided.comm.world import begin
from lopsided.errors import InputError
from lopsided.profiling.measure import Measurement
from lopsided.profiling.profile import (
    ProfileRequest,
    in_percent,
    is_first,
    is_one_of_many,
    profile_here,
    standard,
    take_profile,
)
from lopsided.report.run_tables import correction_table, measurement_json, measurement_lines
from lopsided.report.table import plural, records, text_lines
from lopsided.schedule.cost import optimizer_named

_FULL_S, _QUICK_S = 60.0, 6.0
# So many lines are printed of what a run corrected.
_CORRECTIONS = 16


def profile_command(
    model: Annotated[
        str,
        typer.Argument(help="Whose calls to measure, as in `lopsided plan`. Without one, a standard set."),
    ] = "",
    output: Annotated[str, typer.Option("-o", "--output", help="Write the cluster.toml here.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Seconds, and less to be relied on.")] = False,
    budget: Annotated[
        float | None, typer.Option(help="Seconds to measure for, about.", show_default=f"{_FULL_S:g}")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="Whose step to measure.", show_default="adamw; without a model, all")
    ] = "",
    dtype: Annotated[str | None, typer.Option(help="Measure the model in this dtype: bf16, f16, f32, f64.")] = None,
    batch: Batch = None,
    processes: Annotated[
        int, typer.Option(min=0, help="Processes on this machine.", show_default="one for each GPU, or one")
    ] = 0,
    from_run: Annotated[
        str, typer.Option(metavar="RUN.JSON", help="Do not measure: correct the cluster of a recorded run by it.")
    ] = "",
    force: Force = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Measure devices and links, by torchrun on all machines or by itself on one, and write a cluster.toml."""
    if output and is_first():
        check_writable(output, CLUSTER_FILE, force=force)
    if from_run:
        _feed_back(from_run, output, as_json)
        return
    budget_s = _checked_budget(budget, quick)
    many = is_one_of_many()
    if many and processes > 1:
        raise InputError(
            "torchrun has started the processes", where="--processes", do="leave it out, or start without torchrun"
        )
    if many:
        begin()
    first = is_first()
    wanted = replace(_wanted(model, batch, dtype, optimizer), budget_s=budget_s)
    with progress_bar("measuring", 100, quiet=as_json or not first) as advance:
        progress = in_percent(advance)
        found = take_profile(wanted, progress) if many else profile_here(wanted, processes, progress)
    if first:
        _tell(found, model, output, as_json)


def _checked_budget(budget: float | None, quick: bool) -> float:
    if budget is not None and quick:
        raise InputError("--quick is a budget of its own", where="--budget", do="leave one of the two out")
    if budget is not None and not 0 < budget < math.inf:
        raise InputError(f"{budget:g} s are no time to measure in", where="--budget", do="give seconds, for example 20")
    return _QUICK_S if quick else budget or _FULL_S


def _wanted(model: str, batch: int | None, dtype: str | None, optimizer: str) -> ProfileRequest:
    if optimizer:
        optimizer_named(optimizer)
    check_dtype(dtype)
    if not model:
        wanted = standard(dtype, batch)
        return replace(wanted, optimizers=(optimizer,)) if optimizer else wanted
    graph = capture(*load_shapes(model, batch))
    return ProfileRequest((in_dtype(graph, dtype) if dtype else graph,), optimizers=(optimizer or "adamw",))


def _tell(found: Measurement, model: str, output: str, as_json: bool) -> None:
    found = replace(found, cluster=_written(found.cluster, output))
    if as_json:
        print_json({"model": model or None, "file": output or None} | measurement_json(found))
        return
    many, hosts = found.cluster.devices, found.cluster.nodes
    who = f"{many} {plural('device', many)} on {hosts} {plural('host', hosts)}"
    say(f"{model or 'a standard set of calls'} on {who}, measured in {found.seconds:.1f} s\n")
    say_all(measurement_lines(found))
    if output:
        say(f"\nwritten to {output}")


def _written(cluster: Cluster, output: str) -> Cluster:
    """The cluster, written to the file if there is to be one, and called as it is, where that can be a name."""
    stem = Path(output).stem if output else ""
    named = replace(cluster, name=stem) if stem and stem.isprintable() and len(stem) <= 100 else cluster
    if output:
        write_text(output, named.text(), CLUSTER_FILE)
    return named


def _feed_back(run_file: str, output: str, as_json: bool) -> None:
    fed = calibrated_by(load_run(run_file))
    cluster = _written(fed.cluster, output)
    table = correction_table(fed)
    if as_json:
        told = {"run": run_file, "file": output or None, "cluster": cluster.text()}
        print_json(told | {"corrections": records(table)})
        return
    more = len(table.rows) - _CORRECTIONS
    brief = replace(table, rows=table.rows[:_CORRECTIONS], notes=(f"and {more} more",) if more > 0 else ())
    say_all([table.title, *text_lines(brief, indent=0)])
    if output:
        say(f"\nwritten to {output}")
        again = f"lopsided plan MODEL --cluster {output} --known {run_file}"
        say(f"`{again}` plans anew, never predicted slower than the plan of this run")
