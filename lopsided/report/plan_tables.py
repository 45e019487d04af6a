"""A plan as tables and sentences: one builder for each subject, which terminal, page and JSON share.

In: a `Plan` (or a `Cluster`). Out: `Table`s, lines of at most 120 columns (`plan_sections`), and JSON (`plan_json`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from lopsided.cluster.cluster import Cluster
from lopsided.ir.graph import Leaf
from lopsided.planner.baselines import STATE
from lopsided.planner.plan_data import Plan
from lopsided.planner.search import Progress
from lopsided.report.listing import (
    DeviceRow,
    StepRow,
    device_rows,
    folded_seconds,
    listing,
    merged,
    segment_rows,
    sends_in_usual_buckets,
)
from lopsided.report.table import (
    DATA,
    LEAST,
    PAGE,
    TERMINAL,
    WIDTH,
    Bar,
    Cell,
    Column,
    Row,
    Table,
    by_name,
    bytes_text,
    count_text,
    counted,
    finite,
    fit,
    flops_text,
    labels_of,
    paragraph,
    percent,
    plural,
    rate_text,
    seconds_or_nothing,
    seconds_text,
    share_text,
    speed_text,
    text_lines,
    times,
)
from lopsided.schedule.cost import Scale, optimizer_named
from lopsided.schedule.decisions import REGION_LEVELS
from lopsided.schedule.host_state import host_bytes_per_kind
from lopsided.schedule.schedule import GatherBucket

# Columns: what `--full` prints is not cut off.
_UNLIMITED = 10**6
_LABEL = 30
"""The widest label that leaves room for its row; longer ones have a line of their own."""


# What is trained


def inputs_of(plan: Plan) -> list[Leaf]:
    return [leaf for leaf in plan.graph.leaves if leaf.kind == "input"]


def shape_text(leaf: Leaf) -> str:
    return f"{leaf.value.dtype}{list(leaf.value.shape)}"


_MOST_INPUTS = 8


def inputs_text(plan: Plan) -> str:
    every = inputs_of(plan)
    more = [f"{len(every) - _MOST_INPUTS} more"] if len(every) > _MOST_INPUTS else []
    return ", ".join([*(f"{leaf.target} {shape_text(leaf)}" for leaf in every[:_MOST_INPUTS]), *more])


def header_lines(plan: Plan, name: str = "") -> Iterator[str]:
    """How many parameters, in which dtype, on what batch."""
    elements: dict[str, int] = {}
    for leaf in plan.graph.parameters:
        elements[leaf.value.dtype] = elements.get(leaf.value.dtype, 0) + leaf.value.elements
    total = count_text(sum(elements.values()))
    if len(elements) == 1:
        dtypes = f" in {next(iter(elements))}"
    else:
        dtypes = f" ({', '.join(f'{count_text(n)} in {dtype}' for dtype, n in elements.items())})" if elements else ""
    batch = plan.rows
    samples = f", a global batch of {batch:,}" if batch else ""
    yield from paragraph(f"{total} parameters{dtypes}{samples}: {inputs_text(plan)}", indent=0)
    if name.startswith("hf:"):
        text = (
            "Models from transformers are built small unless sizes are given, by the names their configuration has: "
            "hf:CLASS:hidden_size=768,num_hidden_layers=12,vocab_size=30522,batch=32,seq=512"
        )
        yield from paragraph(text, indent=0, hanging=0)


# The program


def program_table(plan: Plan, *, fold: bool = True, brief: bool = False) -> Table:
    """Every step with what it computes and sends. A brief table leaves out what takes no time."""
    rows = listing(plan, fold=fold)
    most = max((row.times * (row.compute_s + row.blocking_s) for row in rows if not row.repeats), default=0.0)
    told: list[Row] = []
    inside = 0
    for row in rows:
        parts = (("bwd", row.times * row.compute_s), ("blocked", row.times * row.blocking_s))
        costs = (Cell(None, bars=(Bar(parts, most),)), row.compute_s, row.blocking_s, row.hiding_s)
        if row.repeats:
            part = row.repeats * (row.compute_s + row.blocking_s) / plan.step_s if plan.step_s else 0.0
            text = f"{row.text}  × {row.repeats}, each"
            told.append(Row((text, *costs, "", ""), "layer", about=f"{percent(part)} of the step in all"))
            inside = row.rows
            continue
        indent, inside = int(inside > 0), max(inside - 1, 0)
        if not (brief and row.is_free):
            module = f"# {row.module}" if row.module and not brief else ""
            cells = (row.text, *costs, _sends_text(row, brief=brief), module)
            told.append(Row(cells, "free" if row.is_free else "", indent, row.module))
    columns = (
        Column("step", most=67 if brief else _UNLIMITED),
        Column(only=PAGE),
        *(Column(head, seconds_or_nothing) for head in ("compute", "blocks", "hides")),
        Column("sends"),
        Column(only=TERMINAL),
    )
    free = free_words(rows)
    notes = (f"and {free} (--full shows them)",) if brief and free else ()
    return Table("program", columns, tuple(told), notes)


def _sends_text(row: StepRow, *, brief: bool) -> str:
    if brief and row.sends:
        more = f" +{len(row.sends) - 1}" if len(row.sends) > 1 else ""
        return f"{row.sends[0].collective} {row.sends[0].implementation}{more}"
    return "; ".join(f"{s.collective} {s.implementation} {seconds_text(s.seconds)}" for s in row.sends)


def free_words(rows: Iterable[StepRow]) -> str:
    """How many steps take no time; nothing if all do."""
    free = sum(row.times for row in rows if row.is_free)
    takes = "takes" if free == 1 else "take"
    return f"{free} {plural('step', free)} that {takes} no time, such as views" if free else ""


def sent_table(plan: Plan) -> Table:
    """What is sent in all, by which collective and how it is carried out."""
    steps = [row for row in listing(plan) if not row.repeats]
    sends = merged(send for row in steps for send in row.sends for _ in range(row.times))
    rows = tuple(
        Row(("hides" if send.hides else "blocks", send.seconds, f"{send.collective} by {send.implementation}"))
        for send in sends
        if seconds_or_nothing(send.seconds)
    )
    return Table("sent in a step", (Column(), Column(unit=seconds_text), Column()), rows)


# Devices

_EVERYWHERE = ("work", STATE)
"""The shares that any plan may have; others belong to parts of the model."""


def device_table(plan: Plan, *, fold: bool = True) -> Table:
    """Shares, memory and worth of each group of devices alike, or of each device."""
    rows: Sequence[DeviceRow] = device_rows(plan)
    if not fold:
        rows = [replace(row, names=(name,)) for row in rows for name in row.names]
    named = [name for name, _ in plan.shares.named]
    shares = [*dict.fromkeys((*_EVERYWHERE, *named))]
    most = max((share for row in rows for by, share in row.shares if by in _EVERYWHERE), default=1.0)
    fair = 1 / len(plan.devices)
    largest = max(row.limit_bytes for row in rows)
    columns = (
        Column("device", most=_LABEL),
        *(Column(by, share_text, by, only="" if by in _EVERYWHERE else DATA) for by in shares),
        Column("memory", key="memory_bytes", draws=True),
        Column(key="memory_limit_bytes", only=DATA),
        Column("without one", only=TERMINAL),
    )
    told = []
    for label, row in zip(labels_of([row.names for row in rows]), rows, strict=True):
        mine = [_share_cell(row, by, by in ("work", *named), most, fair) for by in shares]
        worth = Cell(row.without_s, worth_text(plan.step_s, row.without_s))
        cells = (label, *mine, _memory_cell(row, largest), row.limit_bytes, worth)
        told.append(Row(cells, "" if row.shares else "left-out"))
    return Table("devices", columns, tuple(told))


def _share_cell(row: DeviceRow, by: str, is_shown: bool, most: float, fair: float | None) -> Cell:
    shares = dict(row.shares)
    if not shares or not is_shown:
        return Cell(shares.get("work", 0.0), "–" if is_shown else "")
    kind = "share-state" if by == STATE else "share-work"
    marks = (fair,) if fair is not None and fair <= most else ()
    return Cell(shares[by], bars=(Bar(((kind, shares[by]),), most, marks),))


def _memory_cell(row: DeviceRow, largest: float) -> Cell:
    if not row.shares:
        return Cell(0, "left out")
    parts: tuple[tuple[str, float], ...] = (
        ("held", row.memory_bytes),
        ("room", row.limit_bytes - row.memory_bytes),
    )
    if row.memory_bytes > row.limit_bytes:
        parts = (("over", row.memory_bytes),)
    text = f"{bytes_text(row.memory_bytes)} of {bytes_text(row.limit_bytes)}"
    return Cell(row.memory_bytes, text, (Bar(parts, largest),))


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
    if abs(more) < LEAST:
        return "no difference"
    ratio = f"{more + 1:,.1f} ×" if more >= 9 else f"{more * 100:+.1f} %"
    return f"{'faster without: ' if more < 0 else ''}{seconds_text(without_s)} ({ratio})"


def worth_table(plan: Plan, *, devices: bool = True) -> Table:
    """The step without one device, and without one node; those alike once."""
    known = [row for row in device_rows(plan) if row.without_s is not None] if devices else []
    labels = labels_of([row.names for row in known])
    found = [(label, row.without_s or 0.0) for label, row in zip(labels, known, strict=True)]
    node = "node " if devices else ""
    found += [(counted(f"{node}{name}", count), s) for name, count, s in folded_seconds(plan.without_node)]
    most = max(plan.step_s, *(s for _, s in found if math.isfinite(s)), 0.0)
    rows = []
    for label, without_s in found:
        parts: tuple[tuple[str, float], ...] = (("needed", most),)
        if math.isfinite(without_s):
            more = max(without_s - plan.step_s, 0.0)
            parts = (("theirs", min(plan.step_s, without_s)), ("more", more))
        bar = Cell(None, bars=(Bar(parts, most, (plan.step_s,)),))
        rows.append(Row((label, bar, Cell(without_s, worth_text(plan.step_s, without_s)))))
    head = "device" if devices else "node"
    return Table("nodes", (Column(head, most=_LABEL), Column(only=PAGE), Column("without one")), tuple(rows))


def segment_tables(plan: Plan) -> Iterator[Table]:
    """For each part of the model that has shares of its own, what they are."""
    rows = [row for row in device_rows(plan) if row.shares]
    labels = labels_of([row.names for row in rows])
    for part in segment_rows(plan):
        most = max((dict(row.shares)[part.name] for row in rows), default=1.0)
        told = tuple(
            Row((label, _share_cell(row, part.name, True, most, None))) for label, row in zip(labels, rows, strict=True)
        )
        modules = ", ".join(part.modules) or "no module"
        title = f"{part.name}: {part.steps:,} {plural('step', part.steps)} of {modules}"
        yield Table(title, (Column("", most=_LABEL), Column("", share_text)), told)


def segment_words(plan: Plan) -> str:
    parts = len(segment_rows(plan))
    words = "part of the model has shares of its own" if parts == 1 else "parts of the model have shares of their own"
    return f"{parts} {words}"


def kinds_table(cluster: Cluster) -> Table:
    """What a cluster is made of."""
    dtypes = [*dict.fromkeys(dtype for kind in cluster.kinds for dtype, _ in kind.flops_per_s)]
    columns = (
        Column("devices", key="name", most=34),
        Column(key="count", only=DATA),
        *(Column(dtype, flops_text) for dtype in dtypes),
        Column("memory moves", speed_text),
        Column("launch", seconds_text),
        Column("memory", bytes_text, "memory_bytes"),
        Column("drag", percent),
    )
    rows = []
    for kind in cluster.kinds:
        label = f"{kind.node}/{kind.name}" + (f" × {kind.devices}" if kind.devices > 1 else "")
        speeds = [dict(kind.flops_per_s).get(dtype) for dtype in dtypes]
        rest = (kind.bytes_per_s, kind.launch_s, kind.memory_bytes, kind.compute_slowdown or None)
        rows.append(Row((Cell(kind.name, label), kind.devices, *speeds, *rest)))
    return Table("devices", columns, tuple(rows))


# The step, and others


def breakdown_table(plan: Plan) -> Table:
    about = {
        "compute": "forward and backward of the busiest devices",
        "optimizer": plan.optimizer,
        "blocking": "activations are sent, everyone waits",
        "exposed": "parameters and gradients are sent, and computation is too short to hide it",
        "waiting": "for slower devices",
    }
    rows = []
    for name, words in about.items():
        seconds = getattr(plan.breakdown, f"{name}_s")
        part = seconds / plan.step_s if plan.step_s and seconds_or_nothing(seconds) else 0.0
        rows.append(Row((name, seconds, part, words)))
    hidden_s = plan.breakdown.hidden_s
    if seconds_or_nothing(hidden_s):
        rows.append(Row(("hidden", hidden_s, None, "sent behind computation, beside the step")))
    notes = list(round_lines(plan))
    if plan.regather:
        notes.append("gathered parameters are freed after use and gathered again in the backward pass")
    notes += rerun_lines(plan)
    notes += host_lines(plan)
    if not sends_in_usual_buckets(plan) and plan.on.devices > 1:
        notes.append(f"parameters and gradients are sent {bytes_text(plan.bucket_bytes)} at a time")
    columns = (Column(), Column(unit=seconds_text), Column(unit=percent), Column())
    return Table(f"a step  {seconds_text(plan.step_s)}", columns, tuple(rows), tuple(notes))


def round_lines(plan: Plan) -> Iterator[str]:
    """In how many rounds the batch is computed, and what is done in each."""
    if plan.microbatches == 1:
        return
    rows = plan.rows // plan.microbatches
    yield f"the batch is computed in {plan.microbatches} rounds of {rows:,} rows, each forward and backward"
    if plan.on.devices == 1:
        return
    gathers = any(isinstance(item, GatherBucket) for item in plan.schedule.passes)
    if gathers:
        yield f"parameters are gathered {'once for all rounds' if plan.schedule.keeps_copies else 'in every round'}"
    if plan.regather and gathers:
        yield "gradients of parameters that are stored cut are sent in every round, others behind the last"
    else:
        yield "gradients are added up, and sent behind the last round"


def rerun_lines(plan: Plan) -> list[str]:
    """What runs again in the backward pass in place of being kept, level by level, and on which devices; and which
    losses never have all their logits."""
    words = {
        "cheap": "all but products",
        "attention": "all but products with parameters",
        "whole": "all that is needed",
    }
    chunked = plan.schedule.chunked
    found = [
        f"the loss %{rerun.last} and the product %{rerun.first} run {rerun.rows:,} rows at a time, forward and "
        "backward together: all logits are never there at once"
        for rerun in plan.reruns
        if rerun.last in chunked
    ]
    again = [rerun for rerun in plan.reruns if rerun.level != "chunked"]
    for (level, kinds), group in itertools.groupby(
        sorted(again, key=lambda one: (REGION_LEVELS.index(one.level), one.kinds)),
        key=lambda one: (one.level, one.kinds),
    ):
        count = len([*group])
        on = f" on {' and '.join(plan.on.kinds[k].name for k in kinds)}" if kinds else ""
        blocks = f"{count} block{'s' if count > 1 else ''} of the model"
        if level == "offload":
            found.append(f"what {blocks} save{'' if count > 1 else 's'} goes to the memory of the host and back{on}")
            continue
        found.append(f"of {blocks}, {words[level]} runs again in the backward pass in place of being kept{on}")
    return found


def host_lines(plan: Plan) -> list[str]:
    """In how many bits optimizer state is kept, and how much of it devices keep in the memory of their hosts."""
    found = []
    if plan.state_bits:
        coded = sum(update.bits > 0 for update in plan.schedule.update)
        found.append(f"optimizer state of {coded:,} parameters is kept in {plan.state_bits} bits, as it was allowed")
    if not plan.on_host:
        return found
    kept = host_bytes_per_kind(plan.schedule, optimizer_named(plan.optimizer), Scale(plan.on, plan.shares))
    for one in plan.on_host:
        kind = plan.on.kinds[one.kind]
        size = f"{bytes_text(kept[one.kind])}{' each' if kind.devices > 1 else ''}"
        found.append(f"{kind.name} keeps {size} of optimizer state in the memory of its host, fetched for every update")
    return found


def baseline_table(plan: Plan) -> Table:
    """The plan, and what everyone knows, the fastest first."""
    fits = [b.step_s for b in plan.baselines if b.fits and math.isfinite(b.step_s)]
    most = max(plan.step_s, *fits, 0.0)
    ours = Cell(None, bars=(Bar((("ours", plan.step_s),), most),))
    rows = [Row(("this plan", ours, plan.step_s, None, ""), "this")]
    for b in sorted(plan.baselines, key=lambda b: (not b.fits, b.step_s)):
        runs = b.fits and math.isfinite(b.step_s)
        bar = Cell(None, bars=(Bar((("theirs", b.step_s if runs else 0.0),), most),))
        step = Cell(b.step_s) if runs else Cell(None, "does not fit")
        ratio = b.step_s / plan.step_s if runs and plan.step_s else None
        rows.append(Row((b.name, bar, step, ratio, b.about), "" if runs else "left-out"))
    columns = (
        Column("strategy", key="name", most=_LABEL),
        Column(only=PAGE),
        Column("step", seconds_text, "step_s"),
        Column("speed-up", times),
        Column(),
    )
    return Table("compared with", columns, tuple(rows) if plan.baselines else ())


# The search


def progress_text(progress: Progress) -> str:
    """
    >>> progress_text(Progress(12410, 0.0412, 0.0389, 4.2))
    'search  12,410 states  best 41.2 ms  bound 38.9 ms  gap 5.6 %  0:04'
    """
    minutes, seconds = divmod(int(progress.seconds), 60)
    best = seconds_text(progress.best) if math.isfinite(progress.best) else "none yet"
    gap = percent(progress.gap) if math.isfinite(progress.gap) else "unknown"
    bound = seconds_text(progress.bound)
    return f"search  {progress.states:,} states  best {best}  bound {bound}  gap {gap}  {minutes}:{seconds:02}"


def search_lines(plan: Plan) -> Iterator[str]:
    s = plan.search
    ended, _, taken = s.why.partition(_TAKEN)
    searches = "1 search" if s.searches == 1 else f"{s.searches:,} searches"
    one = "one of them" if taken else "the one that found it"
    yield f"  {searches}; {one}: {s.states:,} {plural('state', s.states)} in {seconds_text(s.seconds)}"
    gap = f"gap {percent(s.gap)}" if math.isfinite(s.gap) else "no bound"
    yield f"  its cost {seconds_text(s.cost_s)}, bound {seconds_text(s.bound_s)}, {gap}: {_ENDED.get(ended, ended)}"
    yield "  (cost and bound are in the search's own prices, which know no overlap; they are not the step time)"
    if taken:
        yield fit(f"  the plan is {taken_text(taken, [b.name for b in plan.baselines])}", WIDTH)
    captured = f"captured in {seconds_text(plan.capture_s)}, " if plan.capture_s else ""
    yield f"  {captured}planned in {seconds_text(plan.planning_s)}"


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


# All of it


def plan_sections(plan: Plan, *, full: bool = False) -> Iterator[tuple[str, list[str]]]:
    """What a terminal shows of a plan: titles, and the lines below them."""
    program = program_table(plan, fold=not full, brief=not full)
    sent = sent_table(plan)
    yield "program", [*text_lines(program, width=_UNLIMITED if full else WIDTH), *_titled(sent)]
    devices = [*text_lines(device_table(plan))]
    if segment_rows(plan) and not full:
        devices.append(f"  {segment_words(plan)} (--full shows them)")
    yield "devices", devices
    yield "nodes", [*text_lines(worth_table(plan, devices=False))]
    if full:
        segments = [line for table in segment_tables(plan) for line in _titled(table)]
        yield "parts of the model with shares of their own", segments
    for table in (breakdown_table(plan), baseline_table(plan)):
        yield table.title, [*text_lines(table)]
    yield "search", [*search_lines(plan)]
    yield "notes", [line for note in plan.notes for line in paragraph(note)]


def _titled(table: Table) -> Iterator[str]:
    """A table below another one, under its title."""
    if table.rows:
        yield from paragraph(table.title)
        yield from text_lines(table, indent=4)


def plan_json(plan: Plan) -> dict[str, object]:
    """All that a plan says, devices by name; what cannot be is null."""
    devices = device_table(plan, fold=False)
    baselines = baseline_table(plan)
    best = plan.best_baseline
    shares = dict.fromkeys((*_EVERYWHERE, *(name for name, _ in plan.shares.named)))
    return {
        "cluster": plan.cluster.name,
        "batch": plan.rows,
        "parameters": sum(leaf.value.elements for leaf in plan.graph.parameters),
        "dtypes": [*dict.fromkeys(leaf.value.dtype for leaf in plan.graph.parameters)],
        "inputs": {leaf.target: shape_text(leaf) for leaf in inputs_of(plan)},
        "optimizer": plan.optimizer,
        "regather": plan.regather,
        "bucket_bytes": plan.bucket_bytes,
        "reruns": [str(rerun) for rerun in plan.reruns],
        "on_host": [str(one) for one in plan.on_host],
        "microbatches": plan.microbatches,
        "state_bits": plan.state_bits,
        "step_s": plan.step_s,
        "breakdown": asdict(plan.breakdown),
        "baselines": by_name(replace(baselines, rows=baselines.rows[1:]), "step_s"),
        "best_baseline": best.name if best else None,
        "devices": list(plan.devices),
        "shares": {name: by_name(devices, name) for name in shares},
        "memory_bytes": by_name(devices, "memory_bytes"),
        "memory_limit_bytes": by_name(devices, "memory_limit_bytes"),
        "search": {key: finite(value) for key, value in asdict(plan.search).items()},
        "capture_s": plan.capture_s,
        "planning_s": plan.planning_s,
        "without": {name: finite(step_s) for name, step_s in plan.without_device},
        "without_node": {name: finite(step_s) for name, step_s in plan.without_node},
        "notes": list(plan.notes),
        "fingerprints": {"graph": plan.graph.fingerprint, "cluster": plan.cluster.fingerprint},
        "program": str(plan.program).splitlines(),
    }


def headline(plan: Plan) -> str:
    """The step, and on how many devices."""
    used = f"{len(plan.devices)} of {plan.cluster.devices}" if plan.on != plan.cluster else f"{plan.cluster.devices}"
    batch = plan.rows
    rate = f", {rate_text(batch / plan.step_s)} samples/s" if batch and plan.step_s else ""
    return f"a step of {seconds_text(plan.step_s)}{rate}, with {used} {plural('device', plan.cluster.devices)}"
