"""The commands that show a plan: a page to look at, and a trace. With `cli`, the only place that prints.

In: arguments. Out: a file, and a line that says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lopsided.calibration.run_record import Run, load_run
from lopsided.cli.terminal import AsJson, PlanFile, Verbose, say_written
from lopsided.codec import FileKind, check_writable, write_text
from lopsided.errors import InputError, PlanError
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import load_plan
from lopsided.report.chart import trace_text
from lopsided.report.page import report_html

RunFile = Annotated[str, typer.Option("--run", help="A run of the plan, to show what was measured.")]
_REPORT = FileKind(PlanError, "report", "")
_TRACE = FileKind(PlanError, "trace", "")


def report_command(
    file: PlanFile,
    run: RunFile = "",
    output: Annotated[str, typer.Option("-o", "--output", help="The page that is written.")] = "report.html",
    title: Annotated[str, typer.Option(help="What the page is called: the model, as a rule.")] = "",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Draw a plan, and a run of it, as one page that opens in any browser and needs no network."""
    check_writable(output, _REPORT)
    plan, measured = _loaded(file, run)
    page = report_html(plan, measured, title=title or (measured.model if measured else Path(file).stem))
    write_text(output, page, _REPORT)
    say_written(output, len(page.encode()), as_json)


def trace_command(
    file: PlanFile,
    run: RunFile = "",
    output: Annotated[str, typer.Option("-o", "--output", help="The trace that is written.")] = "trace.json",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Write the predicted step of a plan, and the measured one of a run, as a trace for ui.perfetto.dev."""
    check_writable(output, _TRACE)
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
