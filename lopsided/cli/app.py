"""The command line: where it begins, how it ends, and the commands about models and rules.

`main` turns every `LopsidedError` into a short message and an exit status: 2 for what the user gave, 1 for a check that
failed, 130 when interrupted. `-v` shows the traceback as well.
"""

from __future__ import annotations

import difflib
import errno
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.markup import escape
from torch.nn.parameter import is_lazy

from lopsided import interrupts
from lopsided.capturing.capture_graph import capture
from lopsided.cli import (
    demo_command,
    plan_commands,
    profile_commands,
    run_commands,
)
from lopsided.cli.terminal import (
    BROKEN_PIPE,
    AsJson,
    Batch,
    Model,
    Verbose,
    begin_quietly,
    err,
    is_verbose,
    load_shapes,
    print_json,
    progress_bar,
    say,
    say_all,
    spell_out,
    stop_writing,
)
from lopsided.comm.uncaught import in_a_line, rank_here, told_by
from lopsided.errors import InputError, LopsidedError, ModelError, NotationError, SharesError
from lopsided.ir.graph import Graph
from lopsided.ir.notation import parse_line
from lopsided.ir.op_call import TOLERANCE
from lopsided.ir.placement import check_shares
from lopsided.ir.program import RuleBook
from lopsided.models.by_name import load
from lopsided.ops import TABLE, describe
from lopsided.ops.derive import derive_rules, describe_call
from lopsided.ops.op import Op
from lopsided.ops.validator import Finding, as_call, known_reason, sampled_ops, samples_of, validate
from lopsided.report.table import Column, Row, Table, text_lines
from lopsided.verification.verifier import Verification, suspects, verify

app = typer.Typer(
    name="lopsided",
    help="Distribute an ordinary PyTorch model over devices that are not alike: capture it, derive the ways to cut it, "
    "prove on simulated devices that each computes what one device does, and plan the fastest for yours.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
app.command("plan")(plan_commands.plan_command)
app.command("show")(plan_commands.show_command)
app.command("diff")(plan_commands.diff_command)
app.command("clusters")(plan_commands.clusters_command)
app.command("profile")(profile_commands.profile_command)
app.command("report")(plan_commands.report_command)
app.command("trace")(plan_commands.trace_command)
app.command("run", cls=run_commands.RunCommand)(run_commands.run_command)
app.command("convert")(run_commands.convert_command)
app.command("train")(run_commands.train_command)
app.command("compare")(run_commands.compare_command)
app.command("confront", hidden=True)(run_commands.compare_command)  # its name of before
app.command("demo")(demo_command.demo_command)


def main() -> NoReturn:
    """Run the command line; errors become messages."""
    begin_quietly()
    if interrupts.is_command():
        interrupts.guard()
    try:
        spell_out()
        try:
            app(standalone_mode=True)
        finally:
            interrupts.stay_if_ending()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            sys.exit(BROKEN_PIPE)
        if end.code == interrupts.STATUS:  # caught by typer, which says nothing
            _end_interrupted()
        raise
    except KeyboardInterrupt:
        _end_interrupted()
    except LopsidedError as error:
        if is_verbose():
            err.print_exception()
        if "--json" in sys.argv:
            print_json({"error": type(error).__name__, "what": error.what, "where": error.where, "do": error.do})
        first = told_by()
        told = error if first == rank_here() else in_a_line(error, first)
        err.print(f"[bold]{type(error).__name__}[/bold]: {escape(str(told))}")
        sys.exit(2 if isinstance(error, InputError) else 1)
    except Exception as error:
        # Not one of ours: a mistake of this program, or of a model in a place we did not expect.
        stop_writing()
        if is_verbose():
            err.print_exception()
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            err.print(escape(f"the output cannot be written: {error.strerror}"))
            err.print("  do      make room, or write somewhere else")
            sys.exit(1)
        err.print(escape(f"{type(error).__name__}: {error}"))
        err.print("  do      run it again with -v for the traceback; if the fault is not in the model, report it")
        sys.exit(1)
    sys.exit(0)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _end_interrupted() -> NoReturn:
    if interrupts.is_command():
        interrupts.say()
        interrupts.end()
    err.print("interrupted")
    sys.exit(interrupts.STATUS)


# capture


@app.command("capture")
def capture_command(
    model: Model,
    batch: Batch = None,
    rules: Annotated[bool, typer.Option("--rules", help="Also print the rules of every node.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Capture a model as one graph, and print it."""
    module, data = load_shapes(model, batch)
    started = time.perf_counter()
    graph = capture(module, data)
    captured_s = time.perf_counter() - started
    book = derive_rules(graph)
    facts = _graph_facts(graph, book) | {
        "capture_s": captured_s,
        "rules_s": time.perf_counter() - started - captured_s,
    }
    if as_json:
        print_json({"model": model, **facts, "graph": graph.text()})
        return
    say(_with_rules(graph, book) if rules else graph.text(sources=True))
    words = ", ".join(f"{facts[key]:,} {key}" for key in ("nodes", "parameters", "rules"))
    say(f"{words}; fingerprint {graph.fingerprint}; captured in {captured_s:.2f} s")
    for op in facts["by_experiment"]:
        node = next(n for n in book.by_experiment if n.op == op)
        rules_found = len(book.rules[node.name])
        say(f"{op} has no line in the table: {rules_found} rules found by experiment  {node.source}")


def _graph_facts(graph: Graph, book: RuleBook) -> dict[str, Any]:
    return {
        "nodes": len(graph.nodes),
        "parameters": sum(leaf.value.elements for leaf in graph.parameters),
        "rules": sum(len(rules) for rules in book.rules.values()),
        "fingerprint": graph.fingerprint,
        "by_experiment": sorted({node.op for node in book.by_experiment}),
        "only_whole": sorted({node.op for node in book.only_whole}),
    }


def _with_rules(graph: Graph, book: RuleBook) -> str:
    lines = []
    for node in graph.nodes:
        lines.append(f"{', '.join(map(str, node.results))} = {node.op}  {node.source}")
        lines += [f"    {rule}" for rule in book.rules[node.name]]
    return "\n".join(lines)


# rules


@app.command("rules")
def rules_command(
    op: Annotated[str, typer.Option(help="Only this op, for example linear or aten.linear.default.")] = "",
    listing: Annotated[bool, typer.Option("--list", help="Only name the ops, with a line each.")] = False,
    line: Annotated[str, typer.Option(help="Try this line for the op in place of the table's.")] = "",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Validate the table of rules on real kernels: wrong rules, and valid rules it does not derive."""
    ops = _ops_named(op)
    with _with_line(op, ops, line) if line else nullcontext():
        _validate_ops(op, ops, listing=listing, as_json=as_json)


def _validate_ops(op: str, ops: list[str], *, listing: bool, as_json: bool) -> None:
    if listing:
        for name in ops:
            described = describe_call(as_call(samples_of(name)[0])[0])
            say(f"{name:<40} {described.text if described else ''}")
        return
    torch.set_num_threads(1)  # thousands of tiny kernels: threads cost more than they bring
    findings: list[Finding] = []
    with progress_bar("validating", len(ops), quiet=as_json) as advance, _without_kernels_warnings():
        for name in ops:
            findings += [validate(example) for example in samples_of(name)]
            advance()
    wrong = sum(len(finding.wrong) for finding in findings)
    if as_json:
        print_json(_findings_json(findings))
    else:
        _print_findings(findings, details=bool(op))
    raise typer.Exit(1 if wrong else 0)


@contextmanager
def _with_line(op: str, ops: list[str], line: str) -> Iterator[None]:
    """In here, the table has another line for the op."""
    if not op:
        raise NotationError("--line needs an op to try it on", where="--line", do="name it with --op")
    parse_line(line)
    before = dict(TABLE)
    for name in ops:
        entry = describe(samples_of(name)[0].op)
        TABLE[name] = Op(line) if entry is None else replace(entry, line=line, talks=None)
    describe.cache_clear()
    try:
        yield
    finally:
        TABLE.clear()
        TABLE.update(before)
        describe.cache_clear()


def _ops_named(op: str) -> list[str]:
    ops = sampled_ops()
    if not op:
        return ops
    found = [name for name in ops if op in (name, name.split(".")[1], ".".join(name.split(".")[:2]))]
    if not found:
        close = difflib.get_close_matches(op, [name.split(".")[1] for name in ops], 3, 0.5)
        hint = f"did you mean {', '.join(dict.fromkeys(close))}? " if close else ""
        named = [name for name in TABLE if op in (name, name.split(".")[1])]
        if named:
            raise ModelError(
                f"{named[0]} has a line but no sample", do="add one to the `samples` of its family in lopsided/ops/"
            )
        raise ModelError(f"no op {op!r} in the table", do=f"{hint}`lopsided rules --list` names all {len(ops)}")
    return found


def _findings_json(findings: list[Finding]) -> dict[str, Any]:
    def about(f: Finding) -> dict[str, Any]:
        return {"sample": str(f.sample), "line": f.line}

    return {
        "ops": len({finding.sample.op for finding in findings}),
        "samples": len(findings),
        "rules": sum(len(finding.rules) for finding in findings),
        "wrong": [
            {**about(f), "rule": str(rule), "error": _or_refused(error)} for f in findings for rule, error in f.wrong
        ],
        "missing": [
            {**about(f), "rule": str(rule), "reason": known_reason(f.sample.op)} for f in findings for rule in f.missing
        ],
        "findings": [{"op": f.sample.op, **about(f), "rules": [str(rule) for rule, _ in f.rules]} for f in findings],
    }


def _or_refused(error: float) -> float | str:
    return error if math.isfinite(error) else "refused"


def _error_text(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "refused"


def _findings_table(findings: list[Finding]) -> Table:
    rows = []
    for op in dict.fromkeys(finding.sample.op for finding in findings):
        mine = [finding for finding in findings if finding.sample.op == op]
        worst = max((error for finding in mine for _, error in finding.rules), default=0.0)
        rows.append(Row((op, len(mine), sum(len(finding.rules) for finding in mine), worst, mine[0].line)))
    columns = (
        Column("op"),
        Column("samples", str),
        Column("rules", str),
        Column("worst error", _error_text),
        Column("line"),
    )
    return Table("rules", columns, tuple(rows))


def _print_findings(findings: list[Finding], *, details: bool) -> None:
    if not details:
        say_all(text_lines(_findings_table(findings), indent=0))
    for finding in findings if details else ():
        say(f"{finding.sample}\n  {finding.line}")
        say_all(f"    {rule!s:<44} {_error_text(error)}" for rule, error in finding.rules)
    for finding in findings:
        for rule, error in finding.wrong:
            say(f"WRONG    {finding.sample}  {finding.line}\n         {rule}  error {_or_refused(error)}")
        if finding.missing:
            rules_held = "; ".join(map(str, finding.missing))
            reason = known_reason(finding.sample.op) or "the line does not give this: should an index be lower case?"
            say(f"missing  {finding.sample}  {finding.line}\n         {rules_held}\n         {reason}")
    rules, wrong, missing = (sum(len(getattr(f, of)) for f in findings) for of in ("rules", "wrong", "missing"))
    ops = len({finding.sample.op for finding in findings})
    say(f"{ops} ops, {len(findings)} samples, {rules} rules: {wrong} wrong, {missing} valid but not derived")


# verify

_SHARES = "0.5,0.3,0.2"


@app.command("verify")
def verify_command(
    model: Model,
    shares: Annotated[
        str | None,
        typer.Option(help="What part each device does, in every second program.", show_default=_SHARES),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="In place of --shares: so many, all shares random.", min=1)
    ] = None,
    programs: Annotated[
        int | None, typer.Option(help="How many random programs.", min=1, show_default="50, with --processes 10")
    ] = None,
    plan_file: Annotated[
        str,
        typer.Option("--plan", help="Compare this plan, a file of `lopsided plan -o`, in place of random programs."),
    ] = "",
    processes: Annotated[
        bool, typer.Option("--processes", help="On local processes that talk, one a device: what training will run.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="With stretches compiled, as parallelize(compile=True) runs them. Slow.")
    ] = False,
    batch: Batch = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Run random programs, or a plan, on simulated devices or real processes and compare with one device."""
    if plan_file and (shares or devices or programs):
        given = "--shares" if shares else "--devices" if devices else "--programs"
        raise InputError("a plan has shares and a program of its own", where=given, do="leave it out, or --plan")
    if shares and devices:
        raise InputError("--shares already says how many devices", where="--devices", do="leave one of the two out")
    fractions = None if devices else _parse_shares(shares or _SHARES)
    if plan_file or processes:
        run_commands.verify_runs(
            model,
            batch,
            seed,
            plan_file=plan_file,
            shares=fractions,
            devices=devices or len(fractions or ()),
            programs=programs or 10,
            processes=processes,
            compiled=compiled,
            as_json=as_json,
        )
    torch.manual_seed(seed)
    module, data = load(model, batch=batch)
    _one_thread_if_small(module)
    started = time.perf_counter()
    with progress_bar("programs", programs or 50, quiet=as_json) as advance:
        result = verify(
            module,
            data,
            shares=fractions,
            devices=devices or 0,
            programs=programs or 50,
            seed=seed,
            compiled=compiled,
            progress=lambda done: advance(),
        )
    seconds = time.perf_counter() - started
    if as_json:
        print_json(_verification_json(model, result, seconds))
    else:
        _print_verification(model, result, seconds)
        say_all(run_commands.functions_lines(result.functions))
    raise typer.Exit(0 if result.passed else 1)


def _one_thread_if_small(module: torch.nn.Module) -> None:
    # Kernels of a small model are shorter than the waking of a thread.
    if sum(0 if is_lazy(p) else p.numel() for p in module.parameters()) < 1_000_000:
        torch.set_num_threads(1)


def _parse_shares(text: str) -> tuple[float, ...]:
    try:
        return check_shares([float(part) for part in text.split(",")])
    except ValueError:
        raise SharesError(
            f"{text!r} is not a list of numbers", where="--shares", do="write them like .5,.3,.2"
        ) from None


def _verification_json(model: str, result: Verification, seconds: float) -> dict[str, Any]:
    worst = result.worst
    return {
        "model": model,
        "passed": result.passed,
        "programs": len(result.trials),
        "worst_error": _or_refused(worst.error),
        "worst_where": worst.where,
        "capture_error": _or_refused(result.capture_error),
        "capture_tolerance": result.capture_tolerance,
        "tolerance": TOLERANCE,
        "nodes": len(result.graph.nodes),
        "placements": dict(result.placements),
        "conversions": dict(result.conversions),
        "rules": dict(result.rules),
        "by_experiment": list(result.by_experiment),
        "seconds": seconds,
        **run_commands.functions_json(result.functions),
        "failed": [
            {"program": str(t.program), "shares": t.shares, "error": _or_refused(t.error), "where": t.where}
            for t in result.trials
            if not t.error <= TOLERANCE
        ],
    }


def _print_verification(model: str, result: Verification, seconds: float) -> None:
    worst = result.worst
    say(f"{model}: {len(result.graph.nodes)} nodes, {len(result.trials)} random programs in {seconds:.1f} s")
    for what in ("placements", "conversions", "rules"):
        counts = sorted(getattr(result, what).items(), key=lambda pair: -pair[1])
        say(f"  {what:<12}{'  '.join(f'{name} {count}' for name, count in counts)}")
    if result.by_experiment:
        say(f"  no line     {', '.join(result.by_experiment)}: rules by experiment")
    say(f"  capture     the graph against the model itself: {result.capture_error:.1e}")
    say(f"  worst error {worst.error:.1e} in {worst.where}, shares {', '.join(f'{s:.2f}' for s in worst.shares)}")
    if result.capture_tolerance > TOLERANCE:
        say("              (the model does not run in float64, so that comparison is in its own dtype)")
    if result.passed:
        say(f"same as one device (within {TOLERANCE:.0e}, float64)", "green")
        return
    if not result.capture_error <= result.capture_tolerance:
        say(
            f"not the same as one device: the captured graph is not the model "
            f"({result.capture_error:.1e} > {result.capture_tolerance:.0e}). Does it depend on more than its inputs, "
            "parameters and buffers: a Python counter, another random generator, a hook?",
            "red",
        )
    if not worst.error <= TOLERANCE:
        say(f"\nthe worst program:\n{worst.program}")
        for op, rule, failing, others in suspects(result)[:3]:
            say(f"suspect  {op} by {rule}: in {failing} programs that differ, in {others} that do not")
        say("A rule is wrong: `lopsided rules --op NAME` tries those of one op. Please report it with the model.")
        say(f"not the same as one device: {worst.error:.1e} > {TOLERANCE:.0e}", "red")


@contextmanager
def _without_kernels_warnings() -> Iterator[None]:
    """Samples call deprecated ops, too; what kernels say about that goes to the file behind stderr, past Python."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
