"""A step drawn in time: who does what from when to when. What the page shows, and the trace for Perfetto.

In: a `Plan`, or a `Run` of one. Out: `Chart`: a `Strip` for each kind of device (measured: for each device), of
`ChartBlock`s that follow each other without a gap, and what the network does meanwhile. Of both, a trace.

    compute    an op of the model, what sending takes from it, or the optimizer's update of all parameters
    blocked    something is sent, and all devices take part and wait for it
    exposed    something is sent that should have hidden behind computation
    waiting    for another device, which `awaits` names
    idle       nothing was recorded (measured only): the host prepares, or something else runs

The one idea: computation is known (predicted or recorded), all between is standing still, and what the network did
meanwhile says why (`_strip`). So each strip adds up to the step.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lopsided.calibration.run_record import COMPUTE as COMPUTED
from lopsided.calibration.run_record import OPTIMIZER as UPDATED
from lopsided.calibration.run_record import Run, Span
from lopsided.planner.plan_data import Plan
from lopsided.report.listing import timed
from lopsided.report.table import labels_of, plural
from lopsided.schedule.schedule import Bucket

COMPUTE, BLOCKED, EXPOSED, WAITING, IDLE = DOING = ("compute", "blocked", "exposed", "waiting", "idle")
HIDDEN = "hidden"
"""What the network does behind computation, or tries to."""
FORWARD, BACKWARD, OPTIMIZER = PHASES = ("forward", "backward", "optimizer")

_LEAST_S = 1e-10
"""Less is a rounding."""


@dataclass(frozen=True, slots=True)
class ChartBlock:
    """What a device, or the network, does for a while."""

    doing: str
    phase: str
    what: str
    start_s: float
    end_s: float
    module: str = ""
    collective: str = ""
    way: str = ""
    whole_bytes: int = 0
    awaits: str = ""  # whom a device waits for

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Strip:
    """The step of devices that do the same at the same time."""

    label: str
    devices: tuple[str, ...]
    blocks: tuple[ChartBlock, ...]

    def seconds(self, *doing: str) -> float:
        return sum(block.seconds for block in self.blocks if block.doing in doing)


@dataclass(frozen=True, slots=True)
class Chart:
    """A step. `network` are all sends, those that block and those that hide."""

    step_s: float
    forward_s: float
    backward_s: float
    strips: tuple[Strip, ...]
    network: tuple[ChartBlock, ...]

    @property
    def phases(self) -> tuple[tuple[str, float, float], ...]:
        """When each phase begins and ends on the slowest device."""
        ends = (0.0, self.forward_s, self.forward_s + self.backward_s, self.step_s)
        return tuple((phase, start, end) for phase, (start, end) in zip(PHASES, pairwise(ends), strict=True))

    @property
    def busiest(self) -> Strip:
        return max(self.strips, key=lambda strip: strip.seconds(COMPUTE))


# Predicted


def predicted_chart(plan: Plan) -> Chart:
    """The step as the planner sees it."""
    step = timed(plan)
    modules = _modules(plan)
    network = tuple(
        _sent_block(span, span.start_s, span.end_s, step.forward_s, modules, hides=hides) for span, hides in step.sent
    )
    groups = [plan.devices[start:stop] for start, stop in plan.on.spans]
    labels = labels_of(groups)
    computed = [
        [*(_computed(span, step.forward_s, modules) for span in spans), *_update(plan, updates)]
        for spans, updates in zip(step.computed, step.updated, strict=True)
    ]
    strips = [
        Strip(label, tuple(names), tuple(_strip(mine, network, step.step_s, rest)))
        for label, names, mine, rest in zip(labels, groups, computed, _arrivals(computed, labels), strict=True)
    ]
    return Chart(step.step_s, step.forward_s, step.backward_s, tuple(strips), network)


def _modules(plan: Plan) -> dict[str, str]:
    """For each node and value, the module it belongs to; for a parameter, its name in the model."""
    found = {name: leaf.target for leaf in plan.graph.leaves for name in (leaf.value.name, leaf.target)}
    for node in plan.graph.nodes:
        found[node.name] = node.source.module
        found.update((value.name, node.source.module) for value in node.results)
    return found


def subject_of(what: str) -> str:
    """The first name of what is computed or sent.

    >>> [subject_of(w) for w in ("∂linear_3", "∂add S0→R", "loss: all_reduce", "up_weight I→R, up_bias I→R and 7 more")]
    ['linear_3', 'add', 'loss', 'up_weight']
    >>> subject_of("gradient of norm.bias and 51 more"), subject_of("%loss P→I")
    ('norm.bias', 'loss')
    """
    first = what.removeprefix("gradient of ").partition(",")[0].partition(" ")[0]
    return first.lstrip("∂%").rstrip(":")


def _module_of(what: str, modules: Mapping[str, str]) -> str:
    return modules.get(subject_of(what), "")


def _shown(what: str) -> str:
    return what.replace("scaled_dot_product_attention", "attention")


def _computed(span: Span, forward_s: float, modules: Mapping[str, str]) -> ChartBlock:
    # What runs forward again behind the forward pass belongs to the backward pass.
    phase = BACKWARD if span.start_s >= forward_s or span.what.startswith("∂") else FORWARD
    return ChartBlock(COMPUTE, phase, _shown(span.what), span.start_s, span.end_s, _module_of(span.what, modules))


def _update(plan: Plan, updates: Sequence[Span]) -> Iterator[ChartBlock]:
    """The optimizer as one block: its updates follow each other, and nobody tells them apart."""
    if updates:
        what = f"{plan.optimizer}: update {len(updates)} {plural('parameter', len(updates))}"
        yield ChartBlock(COMPUTE, OPTIMIZER, what, updates[0].start_s, updates[-1].end_s)


def _sent_block(
    span: Span, start_s: float, end_s: float, forward_s: float, modules: Mapping[str, str], *, hides: bool
) -> ChartBlock:
    return ChartBlock(
        HIDDEN if hides else BLOCKED,
        FORWARD if start_s < forward_s else BACKWARD,
        _shown(span.what),
        start_s,
        end_s,
        _module_of(span.what, modules),
        span.collective,
        span.way,
        span.bytes,
    )


# Standing still

_Rest = Callable[[float, float, str], ChartBlock]


def _arrivals(computed: Sequence[Sequence[ChartBlock]], labels: Sequence[str]) -> Iterator[_Rest]:
    """For each strip, what it does when it neither computes nor sends: it waits for who was the last to end."""
    every = sorted((block.end_s, k) for k, blocks in enumerate(computed) for block in blocks)
    for mine in range(len(labels)):
        others = [(end, labels[k]) for end, k in every if k != mine]
        yield _waiting([end for end, _ in others], [label for _, label in others])


def _waiting(ends: Sequence[float], labels: Sequence[str]) -> _Rest:
    def rest(start_s: float, end_s: float, phase: str) -> ChartBlock:
        k = bisect_right(ends, end_s + _LEAST_S)
        return ChartBlock(WAITING, phase, "", start_s, end_s, awaits=labels[k - 1] if k else "")

    return rest


def _idle(start_s: float, end_s: float, phase: str) -> ChartBlock:
    return ChartBlock(IDLE, phase, "", start_s, end_s)


def _strip(
    computed: Iterable[ChartBlock], sends: Sequence[ChartBlock], step_s: float, rest: _Rest
) -> Iterator[ChartBlock]:
    """What is computed, and between it why not: by `sends`, in the order they begin, or else by `rest`."""
    now, passed, phase = 0.0, 0, FORWARD
    for block in (*sorted(computed, key=lambda block: block.start_s), None):
        until = step_s if block is None else block.start_s
        # What stands before the first of a phase is waited for by it; behind the last of all nothing comes.
        phase = OPTIMIZER if block is None else block.phase if block.phase != OPTIMIZER else BACKWARD
        while passed < len(sends) and sends[passed].end_s <= now:
            passed += 1
        for sent in sends[passed:] if until - now > _LEAST_S else ():
            if sent.start_s >= until:
                break
            begun, ended = max(sent.start_s, now), min(sent.end_s, until)
            if ended - begun > _LEAST_S:
                if begun - now > _LEAST_S:
                    yield rest(now, begun, phase)
                doing = EXPOSED if sent.doing == HIDDEN else sent.doing
                yield replace(sent, doing=doing, phase=phase, start_s=begun, end_s=ended)
                now = ended
        if until - now > _LEAST_S:
            yield rest(now, until, phase)
        now = max(now, until)
        if block is not None and block.end_s - now > 0:
            yield replace(block, start_s=now)
            now = block.end_s


# Measured

_Key = tuple[str, int]
"""A send: what, and the how manieth time."""


@dataclass(frozen=True, slots=True)
class _Send:
    """One collective as all devices saw it: it begins when the last has come, and ends when the last has left."""

    start_s: float
    end_s: float
    last: str


def measured_chart(run: Run) -> Chart | None:
    """The recorded step in the middle of all recorded ones; None where none was recorded."""
    steps = list(zip(*(device.steps for device in run.devices), strict=True))
    recorded = [step for step in steps if all(one.spans for one in step)]
    if not recorded:
        return None
    middle = sorted(recorded, key=lambda step: max(one.seconds for one in step))[len(recorded) // 2]
    names = [device.device for device in run.devices]
    spans = [one.spans for one in middle]
    step_s = max(*(one.seconds for one in middle), *(span.end_s for mine in spans for span in mine))
    modules = _modules(run.plan)
    buckets = {item.id for item in run.plan.schedule.passes if isinstance(item, Bucket)}
    sent = [_by_key(mine) for mine in spans]
    together = _together(names, sent)
    strips, computed = [], []
    for name, mine, keyed in zip(names, spans, sent, strict=True):
        computed.append(list(_ran([span for span in mine if span.lane == COMPUTED], modules)))
        stood = [block for key, span in keyed.items() for block in _stood(span, together[key], modules, buckets)]
        stood.sort(key=lambda block: block.start_s)
        strips.append(Strip(name, (name,), tuple(_strip(computed[-1], stood, step_s, _idle))))
    every = [block for blocks in computed for block in blocks]
    forward_s = max((block.end_s for block in every if block.phase == FORWARD), default=0.0)
    updates = [block.start_s for block in every if block.phase == OPTIMIZER]
    backward_s = max(max(updates, default=step_s) - forward_s, 0.0)
    first = {key: span for keyed in sent for key, span in keyed.items()}
    network = [_as_sent(first[key], send, forward_s, modules, buckets) for key, send in together.items()]
    return Chart(step_s, forward_s, backward_s, tuple(strips), tuple(sorted(network, key=lambda block: block.start_s)))


def _by_key(spans: Iterable[Span]) -> dict[_Key, Span]:
    times: Counter[str] = Counter()
    found = {}
    for span in spans:
        if span.lane != COMPUTED:
            times[span.id] += 1
            found[span.id, times[span.id]] = span
    return found


def _together(names: Sequence[str], sent: Sequence[Mapping[_Key, Span]]) -> dict[_Key, _Send]:
    found: dict[_Key, _Send] = {}
    for name, mine in zip(names, sent, strict=True):
        for key, span in mine.items():
            before = found.get(key, _Send(-1.0, 0.0, ""))
            last = name if span.start_s > before.start_s else before.last
            found[key] = _Send(max(span.start_s, before.start_s), max(span.end_s, before.end_s), last)
    return found


def _ran(spans: Iterable[Span], modules: Mapping[str, str]) -> Iterator[ChartBlock]:
    """What was computed. The runtime's own work (buckets, conversions) belongs to what was computed before it."""
    phase = FORWARD
    for span in spans:
        if span.what == UPDATED:
            phase = OPTIMIZER
        elif span.what.startswith("∂"):
            phase = BACKWARD
        yield ChartBlock(COMPUTE, phase, _shown(span.what), span.start_s, span.end_s, _module_of(span.what, modules))


def _stood(span: Span, send: _Send, modules: Mapping[str, str], buckets: Collection[str]) -> Iterator[ChartBlock]:
    """What a send is for one device: waiting until the last has come, then sending."""
    begun = min(max(send.start_s, span.start_s), span.end_s)
    if begun > span.start_s:
        yield ChartBlock(WAITING, BACKWARD, "", span.start_s, begun, awaits=send.last)
    yield replace(_as_sent(span, send, 0.0, modules, buckets), start_s=begun, end_s=span.end_s)


def _as_sent(
    span: Span, send: _Send, forward_s: float, modules: Mapping[str, str], buckets: Collection[str]
) -> ChartBlock:
    return _sent_block(span, send.start_s, send.end_s, forward_s, modules, hides=span.id in buckets)


# As a trace

_THREADS = ("compute", "network", "waiting")
_MOST_EVENTS = 100_000
"""Beyond this many, devices that do the same at the same time become one process."""

_Json = dict[str, object]


def trace_text(plan: Plan, run: Run | None = None) -> str:
    """JSON of the trace event format, which Perfetto and chrome://tracing open; times are in microseconds.

    A process is a device, and it has a thread each for what it computes, what the network does for it, and what it
    waits for. Where many devices do the same, one stands for all of them, and says so.
    """
    charts = [("predicted", predicted_chart(plan))]
    if run is not None and (measured := measured_chart(run)) is not None:
        charts.append(("measured", measured))
    place = {name: k for k, name in enumerate(plan.devices)}
    # The names of processes and threads come first.
    events: list[_Json] = []
    for number, (title, chart) in enumerate(charts):
        for strip in _processes(chart):
            # Predicted and measured of a device stand below each other.
            process = 1 + number + len(charts) * place[strip.devices[0]]
            events += _names(process, f"{strip.label} {title}")
            events += (_event(process, *each) for each in _blocks(strip, chart))
    told = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(told, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _processes(chart: Chart) -> Iterator[Strip]:
    count = sum(len(strip.devices) * (len(strip.blocks) + len(chart.network)) for strip in chart.strips)
    for strip in chart.strips:
        if count > _MOST_EVENTS:
            yield strip
        else:
            yield from (replace(strip, label=name, devices=(name,)) for name in strip.devices)


def _blocks(strip: Strip, chart: Chart) -> Iterator[tuple[str, ChartBlock]]:
    for block in strip.blocks:
        if block.doing == COMPUTE:
            yield "compute", block
        elif block.doing in (WAITING, IDLE):
            yield "waiting", block
    yield from (("network", block) for block in chart.network)


def _names(process: int, name: str) -> Iterator[_Json]:
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, words in enumerate(_THREADS, 1):
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": words}}
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _event(process: int, thread: str, block: ChartBlock) -> _Json:
    told = {
        "module": block.module,
        "collective": block.collective,
        "way": block.way,
        "bytes": block.whole_bytes,
        "waits for": block.awaits,
    }
    what = block.what
    if not what:
        what = f"waits for {block.awaits}" if block.awaits else block.doing
    return {
        "ph": "X",
        "pid": process,
        "tid": 1 + _THREADS.index(thread),
        "name": what,
        "cat": f"{block.phase},{block.doing}",
        "ts": round(block.start_s * 1e6, 3),
        "dur": round(block.seconds * 1e6, 3),
        "args": {name: value for name, value in told.items() if value},
    }
