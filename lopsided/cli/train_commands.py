"""The commands that hold a plan against the clock: train and record, and compare what was recorded with the plan.

In: arguments. Out: text or JSON. With `cli`, the only place that prints.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from lopsided.calibration.comparison import confront
from lopsided.calibration.run_record import RUN_FILE, load_run
from lopsided.cli.terminal import AsJson, Batch, Model, Verbose, print_json, say, say_all
from lopsided.codec import check_writable
from lopsided.errors import InputError
from lopsided.planner.plan_file import load_plan
from lopsided.report.run_tables import comparison_json, comparison_lines
from lopsided.report.table import seconds_text
from lopsided.runtime.launch import start_own
from lopsided.runtime.recording import RECORDED, SKIPPED, TIMED
from lopsided.runtime.train import MADE, train

Full = Annotated[bool, typer.Option("--full", help="Every class of ops, nothing put together.")]


def train_command(
    model: Model,
    plan: Annotated[str, typer.Option(help="A file that `lopsided plan -o` wrote.")] = "",
    cluster: Annotated[str, typer.Option(help="Plan for this cluster; without a plan and a cluster, measure.")] = "",
    batch: Batch = None,
    steps: Annotated[int, typer.Option(help="Steps to train.", min=1)] = SKIPPED + TIMED + RECORDED,
    optimizer: Annotated[
        str, typer.Option(help=f"One of {', '.join(MADE)}.", show_default="the plan's, or adamw")
    ] = "",
    lr: Annotated[float, typer.Option(help="The learning rate.")] = 1e-3,
    processes: Annotated[
        int, typer.Option(help="Start so many on this machine; else as many as the plan has devices.", min=0)
    ] = 0,
    tries: Annotated[
        int, typer.Option(help="Make up to so many plans, run each for some steps, take the quickest.", min=1)
    ] = 1,
    report: Annotated[
        str, typer.Option(metavar="RUN.json", help="Record the run in this file and hold it against the plan.")
    ] = "",
    full: Full = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train a model by a plan for some steps on its example batch, and say how true the plan was.

    Under torchrun this process is one of several; by itself it starts one for each device of the plan.
    """
    if report and os.environ.get("RANK", "0") == "0":
        check_writable(report, RUN_FILE)
    if plan and cluster:
        raise InputError("both a plan and a cluster are given", do="give --plan, or --cluster, or neither")
    if plan and tries > 1:
        raise InputError("a plan is given, and others are to be tried", do="leave --plan or --tries out")
    if "RANK" not in os.environ:
        wanted = processes or (load_plan(plan).on.devices if plan else 1)
        if wanted > 1:
            start_own(wanted, sys.argv[1:])
    done = train(
        model,
        plan=plan or None,
        cluster=cluster or None,
        batch=batch,
        optimizer=optimizer,
        lr=lr,
        steps=steps,
        tries=tries,
        report=report or None,
        record=steps >= SKIPPED,
    )
    if not done.is_first:
        return
    found = confront(done.run) if done.run is not None else None
    if as_json:
        told = {"model": model, "losses": list(done.losses), "predicted_step_s": done.plan.step_s}
        print_json(told | (comparison_json(found) if found is not None else {}))
        return
    say(f"{model}: {len(done.losses)} steps on {done.plan.on.devices} of {done.plan.cluster.devices} devices")
    say(f"loss {done.losses[0]:.4f} → {done.losses[-1]:.4f}, step predicted {seconds_text(done.plan.step_s)}")
    say_all(done.plan.notes if tries > 1 else ())
    if found is not None:
        say_all(comparison_lines(found, full=full))
    if report and done.run is not None:
        say(f"\nwritten to {report}: `lopsided report plan.json --run {report}` shows it")


def confront_command(
    file: Annotated[str, typer.Argument(metavar="RUN.json", help="A run that was recorded.")],
    full: Full = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Hold a recorded run against its plan: predicted and measured, per device, op, collective, and memory."""
    run = load_run(file)
    found = confront(run)
    if as_json:
        print_json({"run": file, "model": run.model} | comparison_json(found))
        return
    say(f"{run.model} on {len(run.devices)} devices, {len(run.timed_s)} steps timed")
    say_all(comparison_lines(found, full=full))
