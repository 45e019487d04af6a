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

Files may come from strangers: nothing is evaluated, `codec` checks every key, type and range by the classes below, and
the program must follow from the rules of its graph.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import parse_cluster
from lopsided.codec import (
    FileKind,
    Fraction,
    Key,
    Line,
    Lines,
    Place,
    Seconds,
    SecondsOrInf,
    Whole,
    encode,
    json_text,
    lines_of,
    parse_json,
    read_text,
    write_text,
)
from lopsided.errors import LopsidedError, PlanError, shown
from lopsided.ir.graph import Graph
from lopsided.ir.graph_text import parse_graph
from lopsided.ir.placement import Placement, Shares
from lopsided.ir.program import Program, check_program, parse_program
from lopsided.ops.derive import derive_rules
from lopsided.planner.plan_data import Baseline, Breakdown, Plan, SearchReport
from lopsided.planner.planner import predict
from lopsided.schedule.coded_state import BITS
from lopsided.schedule.cost import optimizer_named
from lopsided.schedule.decisions import BUCKET_BYTES, OnHost, Rerun, parse_on_host, parse_rerun

FORMAT = "lopsided-plan"
VERSION = 1
EDITED = "edited by hand"
WORK = "work"
"""What the shares without a name are called in a file."""

PLAN_FILE = FileKind(
    PlanError, "plan", "`lopsided plan ... -o plan.json` writes such a file", format=FORMAT, version=VERSION
)

Predict = Callable[
    [Program, Shares, Cluster, str, bool, int, tuple[Rerun, ...], tuple[OnHost, ...], int, int],
    tuple[float, Breakdown, tuple[int, ...]],
]

_Stretch = Annotated[int, Key(least=0, most=10**6, rare=True)]
_BucketBytes = Annotated[int, Key(least=1, most=BUCKET_BYTES)]
_Reruns = Annotated[tuple[Line, ...], Key(rare=True)]
_Microbatches = Annotated[int, Key(least=1, most=10**6, rare=True)]
_StateBits = Annotated[int, Key(least=0, most=BITS, rare=True)]


@dataclass(frozen=True, slots=True)
class _Cut:
    shares: Line
    length: Whole
    pieces: tuple[Whole, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PredictionOf:
    """What the figures depend on, or a digest of it, and digests of the figures: those that can be predicted anew
    (step time, breakdown, memory), and those that cannot (baselines, steps without something, the search)."""

    program: Line
    shares: Line
    cuts: Line
    optimizer: Line
    regather: bool
    bucket_bytes: _BucketBytes = BUCKET_BYTES
    reruns: _Reruns = ()
    on_host: _Reruns = ()
    microbatches: _Microbatches = 1
    state_bits: _StateBits = 0
    figures: Line
    comparisons: Line


@dataclass(frozen=True, slots=True)
class _Fingerprints:
    graph: Line
    cluster: Line
    on: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFile:
    """What is in a file, in its order."""

    format: str = FORMAT
    version: int = VERSION
    step_s: Seconds
    optimizer: Line
    regather: bool
    # Plans that do not say so send as much at a time as everyone did then.
    bucket_bytes: _BucketBytes = BUCKET_BYTES
    stretch: _Stretch = 0
    reruns: _Reruns = ()  # FIRST..LAST:LEVEL, and :KIND+KIND where not all kinds do
    on_host: _Reruns = ()  # KIND:PERCENT
    microbatches: _Microbatches = 1  # rounds; the graph and the program are those of one
    state_bits: _StateBits = 0  # 8, or 0 where optimizer state is kept as it is
    notes: tuple[Line, ...]
    breakdown: Breakdown
    baselines: tuple[Baseline, ...]
    devices: tuple[Line, ...]
    memory_bytes: tuple[Whole, ...]
    shares: Mapping[str, tuple[Fraction, ...]]
    cuts: tuple[_Cut, ...]
    program: Lines
    prediction_of: _PredictionOf
    search: SearchReport
    without_device: Mapping[str, SecondsOrInf]
    without_node: Mapping[str, SecondsOrInf]
    capture_s: Seconds
    planning_s: Seconds
    cluster: Lines
    on: Lines
    graph: Lines
    fingerprints: _Fingerprints


def _in_both(of: Plan | _PlanFile) -> dict[str, Any]:
    """What a plan and its file have under the same names, as it is."""
    names = (
        "step_s",
        "optimizer",
        "regather",
        "bucket_bytes",
        "stretch",
        "microbatches",
        "state_bits",
        "notes",
        "breakdown",
        "baselines",
        "memory_bytes",
    )
    return {name: getattr(of, name) for name in (*names, "search", "capture_s", "planning_s")}


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
    file = _PlanFile(
        **_in_both(plan),
        devices=plan.devices,
        reruns=tuple(map(str, plan.reruns)),
        on_host=tuple(map(str, plan.on_host)),
        shares={WORK: plan.shares.work, **dict(plan.shares.named)},
        cuts=tuple(_Cut(name or WORK, length, pieces) for name, length, pieces in plan.shares.cuts),
        program=lines_of(str(plan.program)),
        prediction_of=_prediction_of(plan),
        without_device=dict(plan.without_device),
        without_node=dict(plan.without_node),
        cluster=lines_of(plan.cluster.text()),
        on=lines_of(plan.on.text()),
        graph=lines_of(plan.graph.text(sources=True)),
        fingerprints=_Fingerprints(plan.graph.fingerprint, plan.cluster.fingerprint, plan.on.fingerprint),
    )
    return json_text(encode(file)) + "\n"


def _prediction_of(plan: Plan) -> _PredictionOf:
    shares, search = plan.shares, plan.search
    compared = [
        [astuple(baseline) for baseline in plan.baselines],
        [plan.without_device, plan.without_node],
        [getattr(search, field.name) for field in fields(search) if field.name != "rounds"],
        [plan.capture_s, plan.planning_s],
    ]
    return _PredictionOf(
        program=_digest(str(plan.program)),
        shares=_digest(json.dumps([shares.work, shares.named])),
        cuts=_digest(json.dumps(shares.cuts)),
        optimizer=plan.optimizer,
        regather=plan.regather,
        bucket_bytes=plan.bucket_bytes,
        reruns=tuple(map(str, plan.reruns)),
        on_host=tuple(map(str, plan.on_host)),
        microbatches=plan.microbatches,
        state_bits=plan.state_bits,
        figures=_digest(json.dumps([plan.step_s, astuple(plan.breakdown), plan.memory_bytes])),
        comparisons=_digest(json.dumps(compared)),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# Reading


def parse_plan(text: str, where: str = "plan", namespaces: Collection[str] = (), *, predict: Predict = predict) -> Plan:
    """The plan a text describes; `where` is what refusals call the text."""
    root = Place(PLAN_FILE, where)
    file = parse_json(_PlanFile, text, root)
    cluster, on, graph = _subjects(file, root, namespaces)
    with root.located('"optimizer"'):
        optimizer_named(file.optimizer)
    if len(file.memory_bytes) != on.devices:
        what = f'"memory_bytes" has {len(file.memory_bytes)} numbers for {on.devices} devices'
        raise root.refuse(what, "give one per device")
    for given, names in ((file.without_device, cluster.device_names), (file.without_node, cluster.node_names)):
        if strangers := given.keys() - {*names}:
            raise root.refuse(f"the cluster has no {shown(min(strangers))}", "leave it out")
    plan = Plan(
        cluster=cluster,
        on=on,
        program=_program(file.program, graph, root),
        shares=_shares(file, on, root),
        without_device=tuple(file.without_device.items()),
        without_node=tuple(file.without_node.items()),
        reruns=_reruns(file, on, root),
        on_host=_on_host(file, on, root),
        **_in_both(file),
    )
    for key in ("reruns", "on_host", "state_bits"):
        if getattr(plan, key):
            with root.located(f'"{key}"'):
                _ = plan.schedule
    now, then = _prediction_of(plan), file.prediction_of
    edited = [field.name for field in fields(now) if getattr(now, field.name) != getattr(then, field.name)]
    return _predicted_anew(plan, edited, root, predict) if edited else plan


def _reruns(file: _PlanFile, on: Cluster, root: Place) -> tuple[Rerun, ...]:
    with root.located('"reruns"'):
        found = tuple(map(parse_rerun, file.reruns))
    _check_kinds({kind for rerun in found for kind in rerun.kinds}, "reruns", on, root)
    return found


def _on_host(file: _PlanFile, on: Cluster, root: Place) -> tuple[OnHost, ...]:
    with root.located('"on_host"'):
        found = tuple(map(parse_on_host, file.on_host))
    _check_kinds({one.kind for one in found}, "on_host", on, root)
    return found


def _check_kinds(named: set[int], key: str, on: Cluster, root: Place) -> None:
    if strangers := named - {*range(len(on.kinds))}:
        what = f'"{key}" has a kind {max(strangers)}, and there are {len(on.kinds)} kinds of devices'
        raise root.refuse(what, "count them from 0, in the order of the cluster")


def _subjects(file: _PlanFile, root: Place, namespaces: Collection[str]) -> tuple[Cluster, Cluster, Graph]:
    """The cluster, the part of it that takes part, and the graph, if they are those that the plan was made for."""
    clusters = []
    for key, lines in (("cluster", file.cluster), ("on", file.on)):
        with root.located(f'"{key}"'):
            clusters.append(parse_cluster("\n".join(lines) + "\n", "its TOML"))
    cluster, on = clusters
    with root.located('"graph"'):
        graph = parse_graph("\n".join(file.graph) + "\n", namespaces=namespaces)
    for key, subject in (("cluster", cluster), ("on", on), ("graph", graph)):
        said, found = getattr(file.fingerprints, key), subject.fingerprint
        if found != said:
            what = "the model's graph" if key == "graph" else "the devices"
            raise root.refuse(
                f'"{key}" is not what the plan was made for: its fingerprint is {found}, not {shown(said)}',
                f"undo the edit; for a change of {what}, make the plan anew",
            )
    if strangers := {*on.device_names} - {*cluster.device_names}:
        what = f'"on" has a device {shown(min(strangers))} that "cluster" does not have'
        raise root.refuse(what, "make the plan anew")
    if file.devices != on.device_names:
        raise root.refuse('"devices" are not those of "on", in their order', "change shares, not the names of devices")
    return cluster, on, graph


def _program(lines: Sequence[str], graph: Graph, root: Place) -> Program:
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


def _shares(file: _PlanFile, on: Cluster, root: Place) -> Shares:
    table = Place(root.kind, f'{root.where}, "shares"')
    if WORK not in file.shares:
        raise table.refuse(f'"{WORK}" is missing', "give a fraction for each device")
    for name in file.shares:
        if not (name.isascii() and name.isidentifier() and len(name) <= 100):
            raise table.refuse(f"{shown(name)} cannot name shares", "use letters, digits and _")
    work = file.shares[WORK]
    if len(work) != on.devices:
        raise table.refuse(f"there are {len(work)} shares for {on.devices} devices", "give one per device")
    for (name, length), times in Counter((cut.shares, cut.length) for cut in file.cuts).items():
        if times > 1:
            raise root.refuse(f"the cut of {length} by {shown(name)} is given twice", "keep one")
    named = tuple((name, shares) for name, shares in file.shares.items() if name != WORK)
    cuts = tuple(("" if cut.shares == WORK else cut.shares, cut.length, cut.pieces) for cut in file.cuts)
    with root.located('"shares" and "cuts"'):
        return Shares(work, named, cuts)


# Edits

_FIGURES, _COMPARISONS = "figures", "comparisons"


def _predicted_anew(plan: Plan, edited: Sequence[str], root: Place, predict: Predict) -> Plan:
    _check_names(plan, root)
    program, shares = plan.program, plan.shares
    dropped = "shares" in edited and "cuts" not in edited and bool(shares.cuts)
    if dropped:
        shares = replace(shares, cuts=())
    with root.located("edited " + " and ".join(edited)):
        step_s, breakdown, memory = predict(program, shares, plan.on, *plan.how)
    notes = [note for note in plan.notes if not note.startswith(EDITED)]
    notes += [f"{EDITED}: {words}" for words in _what_was_edited(edited, dropped)]
    for kind, (start, stop) in zip(plan.on.kinds, plan.on.spans, strict=True):
        if max(memory[start:stop]) > kind.memory_bytes:
            needs, has = max(memory[start:stop]) / 2**30, kind.memory_bytes / 2**30
            notes.append(f"{EDITED}: it does not fit: {kind.name} needs {needs:,.1f} GiB and has {has:,.1f} GiB")
    # A figure that was edited says nothing about the program, which is still the one that was found.
    why = EDITED if {*edited} - {_FIGURES, _COMPARISONS} else plan.search.why
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
    choices = [key for key in edited if key not in (_FIGURES, _COMPARISONS)]
    if choices:
        yield f"{', '.join(choices)}; step time, breakdown and memory are predicted anew, all else is not"
    if dropped:
        yield "the cuts in the file were made for other shares and are dropped; lengths are cut by rounding the shares"
    if _FIGURES in edited:
        yield "step time, breakdown or memory in the file are not what was predicted; they are predicted anew"
    if _COMPARISONS in edited:
        yield (
            "baselines, steps without a device or what is said of the search are not what was found; these cannot be "
            "redone from the file and are as the file has them"
        )


def _check_names(plan: Plan, root: Place) -> None:
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
        for name, chain in step.taken:
            yield from ((name, placement) for placement in chain)
        yield from step.made
