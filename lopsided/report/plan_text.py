"""A plan as lines to read, at most 120 columns wide: what `lopsided plan` and `show` print, section by section.

In: a `Plan`. Out: lines of text; who prints them is `cli_plan`.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence

from lopsided.ir.graph import Leaf
from lopsided.planner.baselines import STATE, batch_size
from lopsided.planner.plan_data import Plan
from lopsided.planner.search import Progress
from lopsided.report.listing import (
    DeviceRow,
    Row,
    bytes_text,
    device_rows,
    folded_seconds,
    listing,
    merged,
    seconds_text,
    segment_rows,
    told_apart,
)
from lopsided.report.plan_diff import Difference
from lopsided.schedule.schedule import BUCKET_BYTES

WIDTH = 120
_STEP, _SECONDS = 68, 8  # columns of the program's table
_HELD = "\N{NO-BREAK SPACE}"
_LEAST = 0.0005  # as part of a step: less is no difference


def progress_text(progress: Progress) -> str:
    """
    >>> progress_text(Progress(12410, 0.0412, 0.0389, 4.2))
    'search  12,410 states  best 41.2 ms  bound 38.9 ms  gap 5.6 %  0:04'
    """
    minutes, seconds = divmod(int(progress.seconds), 60)
    best = seconds_text(progress.best) if math.isfinite(progress.best) else "none yet"
    gap = _percent(progress.gap) if math.isfinite(progress.gap) else "unknown"
    bound = seconds_text(progress.bound)
    return f"search  {progress.states:,} states  best {best}  bound {bound}  gap {gap}  {minutes}:{seconds:02}"


def _percent(part: float) -> str:
    """
    >>> _percent(0.0558), _percent(0.0), _percent(0.00001)
    ('5.6 %', '0 %', '<0.1 %')
    """
    if part == 0:
        return "0 %"
    return "<0.1 %" if part < 0.0005 else f"{part * 100:.1f} %"


def plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def rate_text(rate: float) -> str:
    """Three digits that count.

    >>> [rate_text(r) for r in (12837.2, 998.7, 51.26, 0.01234)]
    ['12,800', '999', '51.3', '0.0123']
    """
    digits = f"{rate:.3g}"
    return f"{float(digits):,.0f}" if rate >= 100 else digits


def count_text(count: int) -> str:
    """
    >>> [count_text(n) for n in (97, 12345, 125_400_000, 6_738_415_616)]
    ['97', '12,345', '125.4 million', '6.74 billion']
    """
    if count >= 1_000_000_000:
        return f"{count / 1e9:,.2f} billion"
    return f"{count / 1e6:.1f} million" if count >= 1_000_000 else f"{count:,}"


_MOST_INPUTS = 8


def inputs_of(plan: Plan) -> list[Leaf]:
    return [leaf for leaf in plan.graph.leaves if leaf.kind == "input"]


def shape_text(leaf: Leaf) -> str:
    return f"{leaf.value.dtype}{list(leaf.value.shape)}"


def header_lines(plan: Plan, name: str = "") -> Iterator[str]:
    """What is trained: how many parameters, in which dtype, on what batch."""
    elements: dict[str, int] = {}
    for leaf in plan.graph.parameters:
        elements[leaf.value.dtype] = elements.get(leaf.value.dtype, 0) + leaf.value.elements
    total = count_text(sum(elements.values()))
    if len(elements) == 1:
        dtypes = f" in {next(iter(elements))}"
    else:
        dtypes = f" ({', '.join(f'{count_text(n)} in {dtype}' for dtype, n in elements.items())})" if elements else ""
    batch = batch_size(plan.graph)
    samples = f", a global batch of {batch:,}" if batch else ""
    every = inputs_of(plan)
    inputs = [f"{leaf.target} {shape_text(leaf)}" for leaf in every[:_MOST_INPUTS]]
    more = [f"{len(every) - _MOST_INPUTS} more"] if len(every) > _MOST_INPUTS else []
    text = f"{total} parameters{dtypes}{samples}: {', '.join([*inputs, *more])}"
    yield from textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    if name.startswith("hf:"):
        text = (
            "Models from transformers are built small unless sizes are given, by the names their configuration has: "
            "hf:CLASS:hidden_size=768,num_hidden_layers=12,vocab_size=30522,batch=32,seq=512"
        )
        yield from textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def program_lines(plan: Plan, *, full: bool = False) -> Iterator[str]:
    """The table of steps. Steps that neither take time nor send are left out unless all are asked for."""
    rows = listing(plan, fold=not full)
    step = max(_STEP, *(len(row.text) + 2 for row in rows)) if full else _STEP
    yield f"  {'':<{step}}{'compute':>{_SECONDS}}{'blocks':>{_SECONDS}}{'hides':>{_SECONDS}}  sends"
    if full:
        yield from _full_lines(rows, step)
        yield from _ways_lines(rows)
        return
    inside = left_out = 0
    for row in rows:
        if row.repeats:
            yield _row_line(f"{row.text}  × {row.repeats}, each", row)
            inside = row.rows
            continue
        indent = "  " if inside else ""
        inside = max(inside - 1, 0)
        if row.is_free:
            left_out += row.times
        else:
            yield _row_line(indent + row.text, row)
    if left_out:
        takes = "takes" if left_out == 1 else "take"
        yield f"  and {left_out} {plural('step', left_out)} that {takes} no time, such as views (--full shows them)"
    yield from _ways_lines(rows)


def _numbers(row: Row) -> str:
    return "".join(
        f"{seconds_text(seconds) if _is_shown(seconds) else '':>{_SECONDS}}"
        for seconds in (row.compute_s, row.blocking_s, row.hiding_s)
    )


def _full_lines(rows: Iterable[Row], step: int) -> Iterator[str]:
    """All of every row, in columns as wide as it takes."""
    sends = [
        "; ".join(f"{s.collective} {s.implementation} {seconds_text(s.seconds)}" for s in row.sends) for row in rows
    ]
    wide = max(map(len, sends), default=0)
    for row, sent in zip(rows, sends, strict=True):
        where = f"  # {row.module}" if row.module else ""
        yield f"  {row.text:<{step}}{_numbers(row)}  {sent:<{wide}}{where}".rstrip()


def _row_line(text: str, row: Row) -> str:
    room = WIDTH - 4 - _STEP - 3 * _SECONDS
    more = f" +{len(row.sends) - 1}" if len(row.sends) > 1 else ""
    first = f"{row.sends[0].collective} {row.sends[0].implementation}" if row.sends and not row.repeats else ""
    sends = _fit(first, room - len(more)) + more if first else ""
    head, *rest = _wrapped(text, _STEP - 1)
    return "\n".join([f"  {head:<{_STEP}}{_numbers(row)}  {sends}".rstrip(), *(f"  {line}" for line in rest)])


def _wrapped(text: str, width: int) -> list[str]:
    """A long call over several lines, between its operands."""
    indent = " " * (len(text) - len(text.lstrip()))
    # A placement stays with its operand, and what is given with the bracket before it.
    held = re.sub(r"(:| :|\)) ", lambda match: match[0].replace(" ", _HELD), text.strip())
    lines = textwrap.wrap(held, width - len(indent), subsequent_indent="    ", break_on_hyphens=False)
    return [indent + line.replace(_HELD, " ") for line in lines] or [""]


def _ways_lines(rows: Iterable[Row]) -> Iterator[str]:
    """What is sent in all, by which collective and how it is carried out."""
    steps = [row for row in rows if not row.repeats]
    sends = merged(send for row in steps for send in row.sends for _ in range(row.times))
    every = [send for send in sends if _is_shown(send.seconds)]
    if every:
        yield "  sent in a step"
    for send in every:
        how = "hides" if send.hides else "blocks"
        yield f"    {how:<6} {seconds_text(send.seconds):>8}  {send.collective} by {send.implementation}"


def _is_shown(seconds: float) -> bool:
    """Whether anything but zeros would be printed."""
    return seconds_text(seconds) not in ("0", "0.0 µs")


_LABEL = 30
"""The widest label that leaves room for its row; longer ones have a line of their own."""


def _labelled(label: str, wide: int, row: str) -> Iterator[str]:
    if len(label) > wide:
        yield from textwrap.wrap(label, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        label = ""
    yield f"  {label:<{wide}}{row}".rstrip()


def _width(labels: Iterable[str]) -> int:
    return min(max(map(len, labels), default=0), _LABEL)


def _device_labels(rows: Sequence[DeviceRow]) -> list[str]:
    names = told_apart([row.names for row in rows])
    return [_counted(name, len(row.names)) for name, row in zip(names, rows, strict=True)]


def device_lines(plan: Plan, *, full: bool = False) -> Iterator[str]:
    """Shares, memory and worth of each group of devices alike."""
    rows = device_rows(plan)
    names = [by for by, _ in max((row.shares for row in rows), key=len, default=()) if by in _EVERYWHERE]
    labels = _device_labels(rows)
    wide = _width(labels)
    heads = "".join(f"{name:>10}" for name in names)
    worth = "without one" if any(row.without_s is not None for row in rows) else ""
    yield f"  {'':<{wide}}{heads}  {'memory':<33}{worth}".rstrip()
    for label, row in zip(labels, rows, strict=True):
        memory = f"  {_memory_text(row):<33}{worth_text(plan.step_s, row.without_s)}"
        yield from _labelled(label, wide, _share_cells(row, names) + memory)
    parts = segment_rows(plan)
    if parts and not full:
        have = "part of the model has shares of its" if len(parts) == 1 else "parts of the model have shares of their"
        yield f"  {len(parts)} {have} own (--full shows them)"


_EVERYWHERE = ("work", STATE)
"""The shares that any plan may have; others belong to parts of the model."""


def _share_cells(row: DeviceRow, names: Iterable[str]) -> str:
    shares = dict(row.shares)
    return "".join(f"{shares[name] * 100:>8.2f} %" if name in shares else f"{'–':>10}" for name in names)


def node_lines(plan: Plan) -> Iterator[str]:
    """What nodes are worth, those alike once."""
    nodes = folded_seconds(plan.without_node)
    labels = [_counted(name, count) for name, count, _ in nodes]
    wide = _width(labels)
    if nodes:
        yield f"  {'':<{wide}}  without one"
    for label, (_, _, step_s) in zip(labels, nodes, strict=True):
        yield from _labelled(label, wide, f"  {worth_text(plan.step_s, step_s)}")


def segment_lines(plan: Plan, *, full: bool) -> Iterator[str]:
    """Which modules have shares of their own, and which."""
    parts = segment_rows(plan) if full else ()
    rows = [row for row in device_rows(plan) if row.shares]
    labels = _device_labels(rows)
    wide = max(map(len, labels), default=0)
    for part in parts:
        text = f"{part.name}: {part.steps:,} {plural('step', part.steps)} of {', '.join(part.modules) or 'no module'}"
        yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        for label, row in zip(labels, rows, strict=True):
            yield f"    {label:<{wide}}{_share_cells(row, [part.name])}"


def _counted(name: str, count: int) -> str:
    return f"{name} ({count})" if count > 1 else name


def _memory_text(row: DeviceRow) -> str:
    if not row.shares:
        return "left out"
    part = row.memory_bytes / row.limit_bytes
    full = min(max(round(part * 10), 1), 10)
    bar = "█" * full + "░" * (10 - full)
    return f"{bar} {bytes_text(row.memory_bytes)} of {bytes_text(row.limit_bytes)}"


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
    if abs(more) < _LEAST:
        return "no difference"
    times = f"{more + 1:,.1f} ×" if more >= 9 else f"{more * 100:+.1f} %"
    return f"{'faster without: ' if more < 0 else ''}{seconds_text(without_s)} ({times})"


def breakdown_lines(plan: Plan) -> Iterator[str]:
    about = {
        "compute": "forward and backward of the busiest devices",
        "optimizer": plan.optimizer,
        "blocking": "activations are sent, everyone waits",
        "exposed": "parameters and gradients are sent, and computation is too short to hide it",
        "waiting": "for slower devices",
    }
    for name, words in about.items():
        seconds = getattr(plan.breakdown, f"{name}_s")
        part = seconds / plan.step_s if plan.step_s and _is_shown(seconds) else 0.0
        yield f"  {name:<10}{seconds_text(seconds):>9}{_percent(part):>9}  {words}"
    hidden_s = plan.breakdown.hidden_s
    if _is_shown(hidden_s):
        yield f"  {'hidden':<10}{seconds_text(hidden_s):>9}{'':>9}  sent behind computation, beside the step"
    if plan.regather:
        yield "  gathered parameters are freed after use and gathered again in the backward pass"
    if plan.bucket_bytes != BUCKET_BYTES and plan.on.devices > 1:
        yield f"  parameters and gradients are sent {bytes_text(plan.bucket_bytes)} at a time"


def baseline_lines(plan: Plan) -> Iterator[str]:
    wide = _width(b.name for b in plan.baselines)
    for b in plan.baselines:
        numbers = f"{'does not fit':>21}"
        if b.fits and math.isfinite(b.step_s):
            speed_up = f"{b.step_s / plan.step_s:,.2f} ×" if plan.step_s else ""
            numbers = f"{seconds_text(b.step_s):>10}{speed_up:>11}"
        yield _fit(f"  {_fit(b.name, wide):<{wide}}{numbers}  {b.about}", WIDTH)


def search_lines(plan: Plan) -> Iterator[str]:
    s = plan.search
    ended, _, taken = s.why.partition(_TAKEN)
    searches = "1 search" if s.searches == 1 else f"{s.searches:,} searches"
    one = "one of them" if taken else "the one that found it"
    yield f"  {searches}; {one}: {s.states:,} {plural('state', s.states)} in {seconds_text(s.seconds)}"
    gap = f"gap {_percent(s.gap)}" if math.isfinite(s.gap) else "no bound"
    yield f"  its cost {seconds_text(s.cost_s)}, bound {seconds_text(s.bound_s)}, {gap}: {_ENDED.get(ended, ended)}"
    yield "  (cost and bound are in the search's own prices, which know no overlap; they are not the step time)"
    if taken:
        yield _fit(f"  the plan is {taken_text(taken, [b.name for b in plan.baselines])}", WIDTH)
    times = f"captured in {seconds_text(plan.capture_s)}, " if plan.capture_s else ""
    yield f"  {times}planned in {seconds_text(plan.planning_s)}"


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


def note_lines(plan: Plan) -> Iterator[str]:
    for note in plan.notes:
        yield from textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="    ")


def diff_lines(differences: Iterable[Difference]) -> Iterator[str]:
    """Differences under what they are about, columns aligned, long ones over two lines."""
    every = list(differences)
    titles = {
        "graph": "graph",
        "cluster": "cluster",
        "step": "a step",
        "options": "options",
        "devices": "devices",
        "stored": "how parameters are stored",
        "steps": "how steps are run",
        "baselines": "compared with",
    }
    for about, title in titles.items():
        mine = [d for d in every if d.about == about]
        if not mine:
            continue
        yield title
        wide = min(max(len(d.what) for d in mine), 50)
        for d in mine:
            count = f"  ({d.count})" if d.count > 1 else ""
            line = f"  {d.what:<{wide}}  {d.a} → {d.b}{count}"
            if len(line) <= WIDTH:
                yield line
            else:
                yield from (_fit(f"  {d.what}{count}", WIDTH), _fit(f"    - {d.a}", WIDTH), _fit(f"    + {d.b}", WIDTH))
