"""Plans as files: readable JSON that a person can read, compare and edit, and that loads back to the same plan.

In: a `Plan`, or a text. Out: the other one; `parse_plan(plan_text(plan)) == plan`.

    "program"       the lines of the printed program: change a placement here
    "shares"        a fraction for each of "devices", in their order: "work", "state", and those of segments
    "cuts"          lengths that are cut otherwise than by rounding the shares
    "graph", "cluster", "on"   texts of what the plan is for, with "fingerprints": another model needs another plan
    "prediction_of" digests of what the step time, breakdown and memory were predicted for, and of all figures

An edit of the program or the shares changes what they predict, so these are then predicted anew, and the plan
says so in its notes; so they are where a figure itself was edited. Where fractions were edited and cuts were not, the
cuts are dropped: they were made for other fractions. Seconds that cannot be (a step without a device that is needed)
are null.

Files may come from strangers: nothing is evaluated, every key, type and range is checked, and the program must follow
from the rules of its graph.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import parse_cluster
from lopsided.codec import (
    Fields,
    FileKind,
    parse_fields,
    read_text,
    write_text,
    written,
)
from lopsided.errors import LopsidedError, PlanError, shown
from lopsided.ir.graph import Graph
from lopsided.ir.graph_text import parse_graph
from lopsided.ir.placement import Placement, Shares
from lopsided.ir.program import Program, check_program, parse_program
from lopsided.ops.derive import derive_rules
from lopsided.planner.plan_data import Baseline, Breakdown, Plan, SearchReport
from lopsided.planner.planner import predict
from lopsided.schedule.cost import optimizer_named
from lopsided.schedule.schedule import BUCKET_BYTES

FORMAT = "lopsided-plan"
VERSION = 1
EDITED = "edited by hand"
WORK = "work"
"""What the shares without a name are called in a file."""

_MADE_BY = "`lopsided plan ... -o plan.json` writes such a file"
PLAN_FILE = FileKind(PlanError, "plan", _MADE_BY)

Predict = Callable[[Program, Shares, Cluster, str, bool, int], tuple[float, Breakdown, tuple[int, ...]]]


def save_plan(plan: Plan, path: str | Path) -> None:
    write_text(path, plan_text(plan), PLAN_FILE)


def load_plan(path: str | Path, namespaces: Collection[str] = ()) -> Plan:
    """The plan in a file. `namespaces` are those of your own ops, if its model uses any."""
    return parse_plan(read_text(path, PLAN_FILE), str(path), namespaces)


# Writing


def plan_text(plan: Plan) -> str:
    names = [name for name, _ in plan.shares.named]
    if {"", WORK} & {*names} or len({*names}) < len(names):
        raise PlanError(
            f"shares are called {', '.join(map(shown, names))}", do=f"give each a name of its own, and none {WORK!r}"
        )
    told = {
        "format": FORMAT,
        "version": VERSION,
        "step_s": plan.step_s,
        "optimizer": plan.optimizer,
        "regather": plan.regather,
        "bucket_bytes": plan.bucket_bytes,
        "notes": list(plan.notes),
        "breakdown": _fields(plan.breakdown, _BREAKDOWN),
        "baselines": [_fields(baseline, _BASELINE) for baseline in plan.baselines],
        "devices": list(plan.devices),
        "memory_bytes": list(plan.memory_bytes),
        "shares": {WORK: list(plan.shares.work)} | {name: list(shares) for name, shares in plan.shares.named},
        "cuts": [
            {"shares": name or WORK, "length": length, "pieces": list(pieces)}
            for name, length, pieces in plan.shares.cuts
        ],
        "program": _lines(str(plan.program)),
        "prediction_of": _prediction_of(plan),
        "search": _fields(plan.search, _SEARCH) | {"rounds": list(plan.search.rounds)},
        "without_device": {name: _or_null(step_s) for name, step_s in plan.without_device},
        "without_node": {name: _or_null(step_s) for name, step_s in plan.without_node},
        "capture_s": plan.capture_s,
        "planning_s": plan.planning_s,
        "cluster": _lines(plan.cluster.text()),
        "on": _lines(plan.on.text()),
        "graph": _lines(plan.graph.text(sources=True)),
        "fingerprints": {
            "graph": plan.graph.fingerprint,
            "cluster": plan.cluster.fingerprint,
            "on": plan.on.fingerprint,
        },
    }
    return written(told) + "\n"


_BREAKDOWN = ("compute_s", "optimizer_s", "blocking_s", "exposed_s", "waiting_s", "hidden_s")
_BASELINE = ("name", "about", "step_s", "fits")
_SEARCH = ("seconds", "states", "cost_s", "bound_s", "gap", "why", "searches")


_PREDICTED = "figures"  # the step time, breakdown and memory
_COMPARED = "comparisons"  # the baselines, steps without something, and what is said of the search


def _fields(of: object, names: Iterable[str]) -> dict[str, object]:
    return {name: _or_null(getattr(of, name)) for name in names}


def _or_null(value: object) -> object:
    return None if value == math.inf else value


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n")


def _prediction_of(plan: Plan) -> dict[str, object]:
    """Of what the figures depend on, and of the figures: those that can be predicted anew, and those that cannot."""
    shares, search = plan.shares, plan.search
    predicted = [plan.step_s, astuple(plan.breakdown), plan.memory_bytes]
    compared = [
        [astuple(baseline) for baseline in plan.baselines],
        [plan.without_device, plan.without_node],
        [getattr(search, name) for name in _SEARCH],
        [plan.capture_s, plan.planning_s],
    ]
    return {
        "program": _digest(str(plan.program)),
        "shares": _digest(json.dumps([shares.work, shares.named])),
        "cuts": _digest(json.dumps(shares.cuts)),
        "optimizer": plan.optimizer,
        "regather": plan.regather,
        "bucket_bytes": plan.bucket_bytes,
        _PREDICTED: _digest(json.dumps(predicted)),
        _COMPARED: _digest(json.dumps(compared)),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# Reading


def parse_plan(text: str, where: str = "plan", namespaces: Collection[str] = (), *, predict: Predict = predict) -> Plan:
    """The plan a text describes; `where` is what refusals call the text."""
    root = parse_fields(text, where, PLAN_FILE)
    _check_version(root)
    root.has_only(_KEYS)
    cluster = _cluster(root, "cluster")
    on = _cluster(root, "on")
    if not {*on.device_names} <= {*cluster.device_names}:
        stranger = next(name for name in on.device_names if name not in cluster.device_names)
        raise root.refuse(f'"on" has a device {shown(stranger)} that "cluster" does not have', "make the plan anew")
    if root.texts("devices") != on.device_names:
        raise root.refuse('"devices" are not those of "on", in their order', "change shares, not the names of devices")
    graph = _graph(root, namespaces)
    program = _program(root, graph)
    shares = _shares(root, on)
    optimizer, regather = root.text("optimizer"), root.flag("regather")
    with root.located('"optimizer"'):
        optimizer_named(optimizer)
    memory = root.wholes("memory_bytes")
    if len(memory) != on.devices:
        raise root.refuse(f'"memory_bytes" has {len(memory)} numbers for {on.devices} devices', "give one per device")
    plan = Plan(
        cluster,
        on,
        program,
        shares,
        optimizer,
        regather,
        root.seconds("step_s"),
        _breakdown(root.part("breakdown")),
        memory,
        tuple(_baseline(each) for each in root.parts("baselines")),
        _search(root.part("search")),
        _named_seconds(root.part("without_device"), cluster.device_names),
        _named_seconds(root.part("without_node"), cluster.node_names),
        root.texts("notes"),
        root.seconds("capture_s"),
        root.seconds("planning_s"),
        _bucket_bytes(root),
    )
    edited = _edited(plan, root.part("prediction_of"))
    return _predicted_anew(plan, edited, root, predict) if edited else plan


_KEYS = (
    *("format", "version", "step_s", "optimizer", "regather", "bucket_bytes", "notes", "breakdown", "baselines"),
    *("devices", "memory_bytes", "shares", "cuts", "program", "prediction_of", "search", "without_device"),
    *("without_node", "capture_s", "planning_s", "cluster", "on", "graph", "fingerprints"),
)


def _bucket_bytes(root: Fields) -> int:
    """Plans that do not say so send as much at a time as everyone did then."""
    found = root.whole("bucket_bytes") if "bucket_bytes" in root.items else BUCKET_BYTES
    if not 1 <= found <= BUCKET_BYTES:
        raise root.wrong("bucket_bytes", found, f"a whole number from 1 to {BUCKET_BYTES:,}")
    return found


def _check_version(root: Fields) -> None:
    if root.items.get("format") != FORMAT:
        raise root.refuse(f'this is not a plan: its "format" is not "{FORMAT}"', _MADE_BY)
    version = root.whole("version")
    if version > VERSION:
        raise root.refuse(
            f"this plan has version {shown(version)} of the format and was made by a newer lopsided; "
            f"this one knows version {VERSION}",
            "update lopsided, or make the plan anew",
        )
    if version < VERSION:
        raise root.refuse(f"there is no version {shown(version)} of the format", "make the plan anew")


def _check_fingerprint(root: Fields, key: str, found: str) -> None:
    prints = root.part("fingerprints")
    prints.has_only(("graph", "cluster", "on"))
    if prints.text(key) != found:
        what = "the model's graph" if key == "graph" else "the devices"
        raise root.refuse(
            f'"{key}" is not what the plan was made for: its fingerprint is {found}, not {shown(prints.text(key))}',
            f"undo the edit; for a change of {what}, make the plan anew",
        )


def _cluster(root: Fields, key: str) -> Cluster:
    with root.located(f'"{key}"'):
        cluster = parse_cluster("\n".join(root.lines(key)) + "\n", "its TOML")
    _check_fingerprint(root, key, cluster.fingerprint)
    return cluster


def _graph(root: Fields, namespaces: Collection[str]) -> Graph:
    with root.located('"graph"'):
        graph = parse_graph("\n".join(root.lines("graph")) + "\n", namespaces=namespaces)
    _check_fingerprint(root, "graph", graph.fingerprint)
    return graph


def _program(root: Fields, graph: Graph) -> Program:
    lines = root.lines("program")
    try:
        program = parse_program("\n".join(lines) + "\n", graph)
        check_program(program, derive_rules(graph))
    except LopsidedError as error:
        place = f'{root.where}, "program" {_numbered(error.where, lines)}'.rstrip()
        raise PlanError(error.what, where=place, do=error.do, **error.facts) from None
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        # A graph that parses may still hold calls that no op takes.
        raise root.refuse(
            f"the rules of its graph cannot be derived: {type(error).__name__}: {shown(str(error))}",
            "make the plan anew",
        ) from None
    return program


def _numbered(place: str, lines: Sequence[str]) -> str:
    """The place of a refusal, with the number of the line where it names the line itself."""
    head = place.split("\n")[0].strip()
    number = next((k for k, line in enumerate(lines, 1) if head and line.strip() == head), None)
    if number is None and head.startswith("%"):  # a leaf, by its value
        name = head.split(":")[0].split(" ")[0]
        number = next((k for k, line in enumerate(lines, 1) if line.split(" ")[0].rstrip(",") == name), None)
        place = lines[number - 1].strip() if number is not None else place
    return place if number is None else f"line {number}: {place}"


def _shares(root: Fields, on: Cluster) -> Shares:
    table = root.part("shares")
    work = table.numbers(WORK)
    named = []
    for name in table.items:
        if not (name.isascii() and name.isidentifier() and len(name) <= 100):
            raise table.refuse(f"{shown(name)} cannot name shares", "use letters, digits and _")
        if name != WORK:
            named.append((name, table.numbers(name)))
    cuts: list[tuple[str, int, tuple[int, ...]]] = []
    for entry in root.parts("cuts"):
        entry.has_only(("shares", "length", "pieces"))
        name = entry.text("shares")
        if any((name, entry.whole("length")) == (by or WORK, length) for by, length, _ in cuts):
            raise entry.refuse(f"the cut of {entry.whole('length')} by {shown(name)} is given twice", "keep one")
        cuts.append(("" if name == WORK else name, entry.whole("length"), entry.wholes("pieces")))
    if len(work) != on.devices:
        raise table.refuse(f"there are {len(work)} shares for {on.devices} devices", "give one per device")
    with root.located('"shares" and "cuts"'):
        return Shares(work, tuple(named), tuple(cuts))


def _breakdown(table: Fields) -> Breakdown:
    table.has_only(_BREAKDOWN)
    # Differences of sums: what should be 0 can be a rounding below.
    return Breakdown(*(table.seconds(key, least=-1e-9) for key in _BREAKDOWN))


def _baseline(table: Fields) -> Baseline:
    table.has_only(_BASELINE)
    return Baseline(table.text("name"), table.text("about"), table.seconds("step_s", null=True), table.flag("fits"))


def _search(table: Fields) -> SearchReport:
    table.has_only((*_SEARCH, "rounds"))
    return SearchReport(
        table.seconds("seconds"),
        table.whole("states"),
        table.seconds("cost_s", null=True),
        table.seconds("bound_s", null=True),
        table.seconds("gap", null=True),
        table.text("why"),
        table.whole("searches"),
        table.texts("rounds"),
    )


def _named_seconds(table: Fields, names: Collection[str]) -> tuple[tuple[str, float], ...]:
    known = {*names}
    for name in table.items:
        if name not in known:
            raise table.refuse(f"the cluster has no {shown(name)}", "leave it out")
    return tuple((name, table.seconds(name, null=True)) for name in table.items)


# Edits


def _edited(plan: Plan, predicted: Fields) -> tuple[str, ...]:
    """What in the file is not what it was when the file was written."""
    now = _prediction_of(plan)
    predicted.has_only(tuple(now))
    then = replace(predicted, items={"bucket_bytes": BUCKET_BYTES, **predicted.items})
    return tuple(key for key, value in now.items() if then.get(key) != value)


def _predicted_anew(plan: Plan, edited: Sequence[str], root: Fields, predict: Predict) -> Plan:
    _check_names(plan, root)
    program, shares = plan.program, plan.shares
    dropped = "shares" in edited and "cuts" not in edited and bool(shares.cuts)
    if dropped:
        shares = replace(shares, cuts=())
    with root.located("edited " + " and ".join(edited)):
        step_s, breakdown, memory = predict(program, shares, plan.on, plan.optimizer, plan.regather, plan.bucket_bytes)
    notes = [note for note in plan.notes if not note.startswith(EDITED)]
    notes += [f"{EDITED}: {words}" for words in _what_was_edited(edited, dropped)]
    for kind, (start, stop) in zip(plan.on.kinds, plan.on.spans, strict=True):
        if max(memory[start:stop]) > kind.memory_bytes:
            needs, has = max(memory[start:stop]) / 2**30, kind.memory_bytes / 2**30
            notes.append(f"{EDITED}: it does not fit: {kind.name} needs {needs:,.1f} GiB and has {has:,.1f} GiB")
    # A figure that was edited says nothing about the program, which is still the one that was found.
    why = EDITED if {*edited} - {_PREDICTED, _COMPARED} else plan.search.why
    return replace(
        plan,
        shares=shares,
        step_s=step_s,
        breakdown=breakdown,
        memory_bytes=memory,
        notes=tuple(notes),
        search=replace(plan.search, why=why),
    )


def _what_was_edited(edited: Sequence[str], dropped: bool) -> Iterator[str]:
    choices = [key for key in edited if key not in (_PREDICTED, _COMPARED)]
    if choices:
        yield f"{', '.join(choices)}; step time, breakdown and memory are predicted anew, all else is not"
    if dropped:
        yield "the cuts in the file were made for other shares and are dropped; lengths are cut by rounding the shares"
    if _PREDICTED in edited:
        yield "step time, breakdown or memory in the file are not what was predicted; they are predicted anew"
    if _COMPARED in edited:
        yield (
            "baselines, steps without a device or what is said of the search are not what was found; these cannot be "
            "redone from the file and are as the file has them"
        )


def _check_names(plan: Plan, root: Fields) -> None:
    """A name without shares means the work shares; in a line that was typed it is more likely a slip."""
    known = {"", "state", *(name for name, _ in plan.shares.named)}
    for value, placement in _placed(plan.program):
        if placement.by not in known:
            listed = ", ".join(sorted(known - {""}))
            raise root.refuse(
                f"%{value} is placed {placement}, and there are no shares {placement.by!r}",
                f'use one of {listed}, or add {placement.by!r} to "shares"',
            )


def _placed(program: Program) -> Iterator[tuple[str, Placement]]:
    yield from program.leaves
    for step in program.steps:
        for name, chain in zip(step.node.operands, step.chains, strict=True):
            yield from ((name, placement) for placement in chain)
        yield from ((value.name, give) for value, give in zip(step.node.results, step.rule.gives, strict=True))
