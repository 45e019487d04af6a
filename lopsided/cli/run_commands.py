"""The commands about runs: start one, train and record, compare with the plan, prove, convert a checkpoint.

In: arguments. Out: text or JSON; of `run`, the run. `cli` alone prints.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from typer.core import TyperCommand

from lopsided.calibration.comparison import compare_run
from lopsided.calibration.run_record import RUN_FILE, load_run
from lopsided.capturing.capture_graph import capture
from lopsided.cli.terminal import (
    AsJson,
    Batch,
    Force,
    Model,
    PlanFile,
    Verbose,
    print_json,
    progress_bar,
    say,
    say_all,
    say_written,
)
from lopsided.codec import FileKind, check_writable
from lopsided.comm.uncaught import VERBOSE_VARIABLE
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import CheckpointError, InputError
from lopsided.executor.compiled import NOTHING_MADE, Made
from lopsided.models.by_name import load
from lopsided.planner.plan_file import load_plan
from lopsided.report.run_tables import comparison_json, comparison_lines
from lopsided.report.table import Cell, Column, Row, Table, plural, records, seconds_text, text_lines
from lopsided.runtime.agreement import ELASTIC_VARIABLE, PLAN_VARIABLE
from lopsided.runtime.checkpoint.checkpoint import convert
from lopsided.runtime.launch import launch_words, start, start_own, torchrun_options
from lopsided.runtime.recording import RECORD_VARIABLE, RECORDED, SKIPPED, TIMED
from lopsided.runtime.train import MADE, train
from lopsided.verification.on_processes import (
    Claim,
    ProcessesJob,
    Subject,
    jobs_at_large,
    jobs_of_plan,
    on_simulated_devices,
    planned,
    prove,
)
from lopsided.verification.verifier import check_memory, verify

_PATIENCE_S = 3600.0
_PASSED_ON = "torchrun"

# run


class RunCommand(TyperCommand):
    """What stands before the script is for us or for torchrun; everything behind it is the script's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [p for p in self.get_params(ctx) if p.opts[0].startswith("-")]
        own = {name: not getattr(p, "is_flag", False) for p in options for name in p.opts}
        theirs: dict[str, bool] = {}
        mine: list[str] = []
        passed: list[str] = []
        named: list[str] = []
        rest = list(args)
        while rest and len(named) < 2:
            word = rest.pop(0)
            if not word.startswith("-") or word == "-":
                named.append(word)
                continue
            name, equals, _ = word.partition("=")
            if name not in own:
                theirs = theirs or torchrun_options()
                if name not in theirs:
                    raise InputError(
                        f"there is no option {name}",
                        where="before the script",
                        do="`lopsided run --help` and `torchrun --help` list them; those of the script stand behind it",
                    )
            into, takes = (mine, own[name]) if name in own else (passed, theirs[name])
            into.append(word)
            if takes and not equals and rest:
                into.append(rest.pop(0))
        ctx.meta[_PASSED_ON] = passed
        return super().parse_args(ctx, [*mine, "--", *named, *rest])


def run_command(
    context: typer.Context,
    plan: PlanFile,
    script: Annotated[str, typer.Argument(help="A script that calls lopsided.parallelize(model, batch).")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="args", help="Its arguments.")] = None,
    node: Annotated[str, typer.Option(help="Which node of the plan this machine is, if there are several.")] = "",
    master: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the nodes meet: one of them.")] = "",
    report: Annotated[
        str, typer.Option(metavar="RUN.json", help="Record the first steps in this file; `lopsided compare` reads it.")
    ] = "",
    force: Force = False,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Go on when a process is lost: started again, planned anew for the devices there are."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the line for torchrun.")] = False,
    verbose: Verbose = False,
) -> None:
    """Train: start a script by a plan, one process a device. Options of torchrun are passed on to it."""
    words = launch_words(
        load_plan(plan),
        script,
        arguments or (),
        node=node,
        master=master,
        options=context.meta[_PASSED_ON],
        elastic=elastic,
    )
    if elastic:
        os.environ[ELASTIC_VARIABLE] = "1"
    if report:
        check_writable(report, RUN_FILE, force=force)
        os.environ[RECORD_VARIABLE] = str(Path(report).resolve())
    if verbose:
        os.environ[VERBOSE_VARIABLE] = "1"
    if dry_run:
        path = shlex.quote(str(Path(plan).resolve()))
        recorded = f"{RECORD_VARIABLE}={shlex.quote(os.environ[RECORD_VARIABLE])} " if report else ""
        wish = f"{ELASTIC_VARIABLE}=1 " if elastic else ""
        say(f"{PLAN_VARIABLE}={path} {wish}{recorded}torchrun {shlex.join(words)}")
        return
    start(plan, words)


# verify


def verify_runs(
    model: str,
    batch: int | None,
    seed: int,
    *,
    plan_file: str,
    shares: Sequence[float] | None,
    devices: int,
    programs: int,
    processes: bool,
    compiled: bool,
    as_json: bool,
) -> NoReturn:
    """Compare a plan, or programs on processes, with one device; ends the command."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    module, data = load(model, batch=batch)
    graph = capture(module, data)
    subject = Subject(model, batch, seed, "")
    if plan_file:
        subject, plan = planned(subject, plan_file, graph)
        plan = plan.compiled() if compiled else plan
        devices = plan.on.devices
    check_memory(graph, devices, processes=processes)
    # Is it the model that the programs are compared with?
    captured = verify(module, data, programs=0, seed=seed)
    claims = [Claim("the captured graph", captured.capture_error, "", captured.capture_tolerance)]
    if not processes:
        claims.append(on_simulated_devices(subject, plan))
    else:
        if plan_file:
            jobs = jobs_of_plan(subject, plan)
        else:
            jobs = jobs_at_large(subject, graph, shares, devices, programs, compiled=compiled)
        claims += _on_processes(jobs, devices, quiet=as_json)
    seconds = time.perf_counter() - started
    passed = all(claim.holds for claim in claims)
    table = _claim_table(claims)
    functions = reduce(Made.and_also, [claim.functions for claim in claims])
    if as_json:
        told = {"model": model, "plan": plan_file or None, "devices": devices, "processes": processes}
        print_json(told | {"passed": passed, "claims": records(table), "seconds": seconds} | functions_json(functions))
    else:
        who = f"{devices} {'processes' if processes else 'simulated devices'}"
        say(f"{model}{f' by {plan_file}' if plan_file else ''} on {who}, in {seconds:.1f} s")
        _print_claims(table, passed)
        say_all(functions_lines(functions))
    raise typer.Exit(0 if passed else 1)


def functions_json(functions: Made) -> dict[str, int]:
    return {"functions_compiled": functions.compiled, "functions_refused": functions.refused}


def functions_lines(functions: Made) -> list[str]:
    """Of what was compiled, if anything."""
    if functions == NOTHING_MADE:
        return []
    refused = f"; {functions.refused} could not be, and ran op by op" if functions.refused else ""
    return [f"{functions.compiled} {plural('function', functions.compiled)} compiled{refused}"]


def _on_processes(jobs: Sequence[ProcessesJob], processes: int, *, quiet: bool) -> list[Claim]:
    with (
        progress_bar("comparing", len(jobs), quiet=quiet) as advance,
        WorkerPool(processes, timeout_s=_PATIENCE_S) as pool,
    ):
        return prove(pool, jobs, advance)


def _claim_table(claims: Sequence[Claim]) -> Table:
    columns = (
        Column("what", key="what"),
        Column("worst error", "{:.1e}".format, "error"),
        Column("within", "{:.0e}".format, "tolerance"),
        Column("where", key="where"),
        Column("verdict", key="holds"),
    )
    words = {True: "same", False: "NOT the same"}
    rows = [Row((c.what, c.error, c.tolerance, c.where, Cell(c.holds, words[c.holds]))) for c in claims]
    return Table("claims", columns, tuple(rows))


def _print_claims(table: Table, passed: bool) -> None:
    lines = [*text_lines(table, indent=0)]
    say(lines[0])
    for line in lines[1:]:
        say(line, "red" if line.endswith("NOT the same") else "")
    if any("float16" in line for line in lines):
        say("In half precision sums in another order round to other numbers: its losses are compared loosely.")
    if passed:
        say("same as one device", "green")
    else:
        say("not the same as one device: please report it with the model and the plan", "red")


# convert

_TENSORS = FileKind(CheckpointError, "file of tensors", "", known_by=rb"(?s)^.{8}\{")
_SAVED = FileKind(CheckpointError, "file of tensors", "", known_by=rb"^PK\x03\x04")


def convert_command(
    checkpoint: Annotated[str, typer.Argument(help="The folder of a checkpoint, or of a run's: then its latest.")],
    output: Annotated[str, typer.Option("-o", "--output", help="The file: .safetensors, or .pt as torch.save writes.")],
    force: Force = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Write the model of a checkpoint as one plain file with the keys of its state dict."""
    kind = _TENSORS if output.endswith(".safetensors") else _SAVED
    check_writable(output, kind, force=force)
    written = convert(checkpoint, output)
    say_written(str(written), written.stat().st_size, as_json, checkpoint=checkpoint)


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
    force: Force = False,
    full: Full = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train a model by a plan for some steps on its example batch, and say how true the plan was.

    Under torchrun this process is one of several; by itself it starts one for each device of the plan.
    """
    if report and os.environ.get("RANK", "0") == "0":
        check_writable(report, RUN_FILE, force=force)
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
        quiet=as_json,
    )
    if not done.is_first:
        return
    found = compare_run(done.run) if done.run is not None else None
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


def compare_command(
    file: Annotated[str, typer.Argument(metavar="RUN.json", help="A run that was recorded.")],
    full: Full = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Hold a recorded run against its plan: predicted and measured, per device, op, collective, and memory."""
    run = load_run(file)
    found = compare_run(run)
    if as_json:
        print_json({"run": file, "model": run.model} | comparison_json(found))
        return
    say(f"{run.model} on {len(run.devices)} devices, {len(run.timed_s)} steps timed")
    say_all(comparison_lines(found, full=full))
