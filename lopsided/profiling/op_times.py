"""How fast this device is: at the calls of a graph, at several sizes, and at multiplying, moving and launching.

In: a `Graph` and a device. Out: `Speeds` (what the roofline is made of), and for each `OpJob` (a call cut to some of
its units) seconds forward and backward, by `run_job`. Which jobs are worth their time is decided by `choose_jobs` from
the speeds of all devices, so that every process comes to the same list.

Operands are drawn at random, in the layout they have in the graph. A sample is the mean over a batch of runs.

Calls on a GPU are timed by its own clock while it has enough to do: in a step the host runs ahead, and what it takes to
tell the device of a view or of a small kernel is not waited for. Where it is, a dry run tells.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from lopsided.cluster.devices import SPEED_DTYPES
from lopsided.errors import LopsidedError
from lopsided.executor.randomness import RankRandomness
from lopsided.ir.graph import DTYPES, Graph, Node, Value, signature
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import call_op, filled, listed, resolve_op, surroundings
from lopsided.ir.placement import Placement
from lopsided.ir.program import whole_rule
from lopsided.ops import describe
from lopsided.ops.derive import call_rules, describe_call
from lopsided.ops.op import Call, Local
from lopsided.profiling.noise import Stopwatch, typical, wait_for
from lopsided.schedule.flops import Work, call_text, carried_out, is_product, work_of

Layouts = Mapping[str, tuple[int, ...]]
"""The dims of a value, the one with the largest stride first."""

_BATCHES = 2
# Seconds of calls between two looks at the clock, where looking means waiting for a GPU.
_CHUNK_S = 1e-3
# The host queues 64 calls at most: a GPU's queue holds about a thousand kernels, and a call may be many.
_MOST_AHEAD = 64
_LONGEST_HEAD_START_S = 5e-3
# How often a batch is queued again that the host did not queue before the GPU was through with its head start.
_TRIES = 3
# The highest clock rate of a GPU, to turn seconds of a head start into cycles; on slower ones it is longer.
_CYCLES_PER_S = 2e9
# The least seconds of a call on a GPU: no kernel is shorter, and a view has none.
_LEAST_S = 1e-6
# Calls are chosen until they make up 99.5 % of a step's estimated seconds.
_ENOUGH = 0.995
# The least seconds that a job is timed for; fewer on a GPU, whose own clock is steadier.
SHORTEST_S, SHORTEST_ON_GPU_S = 0.06, 0.02
_LONGEST_S = 0.4
# A glance at a call is at a quarter of an equal share of it.
_GLANCE = 4
# Glances may take three seconds however short the budget is: the first calls load libraries.
_GLANCES_S = 3.0
# How often a long call is run: once to warm up, once or twice to measure.
_RUNS = 3
# What ops say to random operands; a kernel that is missing is a RuntimeError too.
REFUSED = (RuntimeError, IndexError, ValueError, TypeError, LopsidedError)


# Time


def samples_of(
    work: Callable[[], object], device: torch.device, lasting_s: float, now: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of one run on the clock `now`, as means over batches that together last about so long. Run it once
    before."""
    wait_for(device)
    chunk, samples, started = 1, list[float](), time.perf_counter()
    while len(samples) < _BATCHES and (not samples or time.perf_counter() - started < lasting_s):
        runs, begun, passed = 0, time.perf_counter(), 0.0
        mine = now()
        while not runs or passed < lasting_s / _BATCHES:
            for _ in range(chunk):
                work()
            wait_for(device)
            runs += chunk
            passed = time.perf_counter() - begun
            if device.type == "cuda":
                chunk = min(max(int(_CHUNK_S * runs / passed), 1), 1000)
        samples.append((now() - mine) / runs)
    return samples


def queued_samples_of(work: Callable[[], object], device: torch.device, lasting_s: float) -> list[float]:
    """The same by the clock of a GPU, which is given something to wait with until the host has told it of a batch."""
    wait_for(device)
    begun = time.perf_counter()
    work()
    telling_s = time.perf_counter() - begun
    wait_for(device)
    runs_at_once = min(max(int(_CHUNK_S / (time.perf_counter() - begun)), 1), _MOST_AHEAD)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def batch() -> float:
        """Seconds of a batch; of the next one, if the host was held up and the device may have waited for it."""
        nonlocal telling_s
        for _ in range(_TRIES):
            ahead_s = min(2 * runs_at_once * telling_s, _LONGEST_HEAD_START_S)
            torch.cuda._sleep(int(ahead_s * _CYCLES_PER_S))
            begun = time.perf_counter()
            begin.record()
            for _ in range(runs_at_once):
                work()
            end.record()
            told_s = time.perf_counter() - begun
            end.synchronize()
            if told_s <= ahead_s:
                break
            telling_s = told_s / runs_at_once
        return float(begin.elapsed_time(end)) / 1e3

    samples, started = list[float](), time.perf_counter()
    while len(samples) < _BATCHES and (not samples or time.perf_counter() - started < lasting_s):
        runs, took_s, begun = 0, 0.0, time.perf_counter()
        while not runs or time.perf_counter() - begun < lasting_s / _BATCHES:
            took_s += batch()
            runs += runs_at_once
        samples.append(max(took_s / runs, _LEAST_S))
    return samples


def seconds_of(work: Callable[[], object], device: torch.device, lasting_s: float) -> float:
    """Seconds of one run, after a first one."""
    work()
    return typical(samples_of(work, device, lasting_s))


# The roofline


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a device does in a second, whatever the call."""

    flops_per_s: tuple[tuple[str, float], ...]
    bytes_per_s: float
    launch_s: float

    def seconds(self, work: Work, fraction: float = 1.0) -> float:
        """An estimate of forward and backward together."""
        speeds = dict(self.flops_per_s)
        flops_per_s = speeds.get(work.dtype, min(speeds.values()))
        computing = (work.forward_flops + sum(work.gradient_flops)) / flops_per_s
        moving = (sum(work.forward_bytes) + sum(work.gradient_bytes)) / self.bytes_per_s
        return max(sum(work.kernels), 1) * self.launch_s + max(computing, moving) * fraction


def measure_speeds(dtypes: Iterable[str], device: torch.device, lasting_s: float) -> Speeds:
    """The speeds of this device, in about so many seconds."""
    dtypes = tuple(dtypes)
    each = lasting_s / (len(dtypes) + 2)
    flops = tuple((dtype, _flops_per_s(DTYPES[dtype], device, each)) for dtype in dtypes)
    tiny = torch.ones(16, device=device, requires_grad=True)
    return Speeds(flops, _bytes_per_s(device, each), seconds_of(lambda: tiny + tiny, device, each))


def _bytes_per_s(device: torch.device, lasting_s: float) -> float:
    """Measured by a sum: two are read, one is written. Larger than caches, and small beside any memory to train in."""
    big = torch.ones(2**27 if device.type == "cuda" else 2**23, device=device)
    other, into = torch.ones_like(big), torch.empty_like(big)
    # In place: what a page costs that is touched for the first time is no matter of bytes.
    took = seconds_of(lambda: torch.add(big, other, out=into), device, lasting_s)
    return 3 * big.numel() * big.element_size() / took


def _flops_per_s(dtype: torch.dtype, device: torch.device, lasting_s: float) -> float:
    """Measured by a product of square matrices, as large as one can be run several times in the time given."""
    size, best = 256, 1.0
    while size <= 8192:
        a, b = torch.ones(size, size, dtype=dtype, device=device), torch.ones(size, size, dtype=dtype, device=device)
        a @ b
        wait_for(device)
        started = time.perf_counter()
        a @ b
        wait_for(device)
        took = time.perf_counter() - started
        if took * 16 > lasting_s or size == 8192:
            best = 2 * size**3 / seconds_of(lambda a=a, b=b: a @ b, device, lasting_s)  # type: ignore[misc]
            break
        size *= 2
    return best


def speed_dtypes(graphs: Sequence[Graph]) -> tuple[str, ...]:
    """The dtypes that the products of these graphs compute in."""
    found = {call.work.dtype for call in distinct_calls(graphs) if is_product(call.call.node.op)}
    return tuple(dtype for dtype in SPEED_DTYPES if dtype in found) or ("f32",)


# What there is to measure


@dataclass(frozen=True, slots=True)
class Distinct:
    """A call that graphs make, once or more often; as the graph of this number makes it."""

    text: str
    call: Call
    work: Work
    times: int
    graph: int = 0


def distinct_calls(graphs: Sequence[Graph]) -> tuple[Distinct, ...]:
    """The calls of these graphs by their text, in the order of their first use.

    Calls of one text may differ in what has a gradient: the text stands for those that are made most often.
    """
    made: dict[str, dict[object, list[tuple[int, Node]]]] = {}
    for number, graph in enumerate(graphs):
        for node in graph.nodes:
            if node.operands:
                text = call_text(node, graph.values)
                made.setdefault(text, {}).setdefault(signature(node, graph.values), []).append((number, node))
    found = []
    for text, variants in made.items():
        number, node = max(variants.values(), key=len)[0]
        call = Call.of(node, graphs[number].values)
        found.append(Distinct(text, call, work_of(call), sum(map(len, variants.values())), number))
    return tuple(found)


def forward_flops(graph: Graph) -> int:
    """FLOPs of a forward pass of the whole batch."""
    return sum(distinct.times * distinct.work.forward_flops for distinct in distinct_calls((graph,)))


@dataclass(frozen=True, slots=True)
class OpJob:
    """A call with some of the units that its rule cuts; all of it, if no rule does."""

    distinct: Distinct
    rule: Rule
    units: int
    length: int
    as_is: bool = False  # the op itself on these units, whatever the rule makes of it

    @property
    def text(self) -> str:
        return self.distinct.text if self.as_is else carried_out(self.distinct.text, self.rule.how)

    @property
    def talks(self) -> bool:
        """Whether others are asked on the way."""
        return self.text != self.distinct.text

    @property
    def fraction(self) -> float:
        return self.units / self.length

    @property
    def key(self) -> tuple[str, float]:
        return self.text, self.fraction

    @property
    def pieces(self) -> tuple[int, ...]:
        return (self.units, self.length - self.units) if _shards(self.distinct.call, self.rule) else ()

    @property
    def bytes(self) -> int:
        """The bytes of its operands and results."""
        return sum(
            math.prod(placement.local_shape(value.shape, self.pieces, 0)) * value.torch_dtype.itemsize
            for placement, value in self.distinct.call.placed(self.rule)
        )


def _shards(call: Call, rule: Rule) -> list[tuple[Placement, Value]]:
    return [(placement, value) for placement, value in call.placed(rule) if placement.is_shard]


def _cut_of(call: Call) -> tuple[Rule, int]:
    """The rule by which a call is cut, and into how many units: by its first dim, where it can be, as a batch is."""
    whole = whole_rule(call.node)
    try:
        if describe_call(call) is None:
            return whole, 1  # to find out would take longer than to measure
        rules = call_rules(call)
    except LopsidedError:
        return whole, 1

    def worth(rule: Rule) -> tuple[bool, bool, int]:
        shards = _shards(call, rule)
        first, _ = shards[0]
        return first.dim == 0 and first.outer == 1, rule.how == "plain", sum(value.bytes for _, value in shards)

    rules = tuple(rule for rule in rules if rule.how != "sfb" and _shards(call, rule))
    if not rules:
        return whole, 1
    best = max(rules, key=worth)
    placement, value = _shards(call, best)[0]
    return best, max(placement.length(value.shape), 1)


def probe_calls(
    graphs: Sequence[Graph], device: torch.device, devices: int, memory_bytes: int, budget_s: float
) -> dict[str, float]:
    """Seconds, there and back, of a small part of every call.

    Some calls take a hundred times what can be estimated for them: kernels that add one element at a time, for one.
    """
    found: dict[str, float] = {}
    layouts = [layouts_of(graph) for graph in graphs]
    now = Stopwatch(device).now  # a single look on the wall would see whoever else has the processor just then
    # The first calls of a library take their time to load it, and say nothing of the others.
    until = time.perf_counter() + max(budget_s, _GLANCES_S)
    for distinct in distinct_calls(graphs):
        if time.perf_counter() > until:
            break
        rule, length = _cut_of(distinct.call)
        job = OpJob(distinct, rule, max(round(length / (_GLANCE * devices)), 1), length)
        if 4 * job.bytes > memory_bytes / 2:
            continue
        there, back = run_job(job, layouts[distinct.graph], device, 0.0, now)
        if there:
            found[distinct.text] = min(there) + min(back, default=0.0)
    return found


def choose_jobs(
    graphs: Sequence[Graph],
    everyone: Sequence[Speeds],
    memory_bytes: int,
    budget_s: float,
    probed: Mapping[str, float] | None = None,
    shortest_s: float = SHORTEST_S,
) -> tuple[tuple[OpJob, ...], float]:
    """What to measure on every device in about so many seconds, and seconds for each; by what the slowest needs.
    What calls take is estimated; if a glance at a small part of one took longer, it takes at least that. No call gets
    less than `shortest_s`.

    Calls are cut to fractions around shares by speed, where shares will lie. A straight line is all that is made of
    them, and from a fraction to a whole that fills another cache it would lead astray.
    """
    devices = len(everyone)
    paces = [speeds.flops_per_s[0][1] for speeds in everyone]
    fractions = (0.5 * min(paces) / sum(paces), 1 / devices, min(1.5 * max(paces) / sum(paces), 1.0))

    def estimate(distinct: Distinct, fraction: float) -> float:
        rough = max(speeds.seconds(distinct.work, fraction) for speeds in everyone)
        return max(rough, (probed or {}).get(distinct.text, 0.0))

    calls = sorted(distinct_calls(graphs), key=lambda d: -d.times * estimate(d, 1 / devices))
    total = sum(d.times * estimate(d, 1 / devices) for d in calls)
    chosen: list[OpJob] = []
    left_s, covered = budget_s, 0.0
    for distinct in calls:
        if covered >= _ENOUGH * total:
            break
        covered += distinct.times * estimate(distinct, 1 / devices)
        rule, length = _cut_of(distinct.call)
        units = sorted({min(max(round(fraction * length), 1), length) for fraction in fractions})
        # An op that talks under its rule is another matter by itself, which is what one device runs.
        alone = [OpJob(distinct, rule, units[-1], length, as_is=True)] if rule.how != "plain" else []
        for job in (*alone, *(OpJob(distinct, rule, count, length) for count in units)):
            needs_s = max(shortest_s, _RUNS * estimate(distinct, job.fraction))
            # Results, gradients and what is kept between them come on top of the operands.
            if needs_s <= min(left_s, max(budget_s / 8, shortest_s)) and 4 * job.bytes <= memory_bytes / 2:
                chosen.append(job)
                left_s -= needs_s
    return tuple(chosen), min(shortest_s + max(left_s, 0.0) / max(len(chosen), 1), _LONGEST_S)


def covered(graphs: Sequence[Graph], jobs: Sequence[OpJob], speeds: Speeds) -> float:
    """Which part of the estimated seconds of all calls those have that are measured."""
    chosen = {job.distinct.text for job in jobs}
    seconds = [(d.text in chosen, d.times * speeds.seconds(d.work)) for d in distinct_calls(graphs)]
    total = sum(s for _, s in seconds)
    return sum(s for is_chosen, s in seconds if is_chosen) / total if total else 0.0


def layouts_of(graph: Graph) -> dict[str, tuple[int, ...]]:
    """How values lie in memory, found by running the graph on tensors without any."""
    meta = torch.device("meta")
    tensors = {
        leaf.value.name: torch.empty(leaf.value.shape, dtype=leaf.value.torch_dtype, device=meta)
        for leaf in graph.leaves
    }
    found: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        try:
            with torch.no_grad(), surroundings(node.context):
                out = call_op(node, [tensors[name] for name in node.operands], meta)
            made = listed(out)
        except REFUSED:
            made = []  # what comes after is laid out as if this were contiguous
        if [tuple(t.shape) for t in made] != [value.shape for value in node.results]:
            made = [torch.empty(value.shape, dtype=value.torch_dtype, device=meta) for value in node.results]
        for value, tensor in zip(node.results, made, strict=True):
            tensors[value.name] = tensor
            order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
            if order != list(range(tensor.dim())):
                found[value.name] = tuple(order)
    return found


# Running a job


Samples = tuple[list[float], list[float]]
"""Seconds forward and backward; none backward where nothing flows back."""


def run_job(
    job: OpJob,
    layouts: Layouts,
    device: torch.device,
    lasting_s: float,
    now: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Seconds of a job on the clock `now`; none at all if the op refuses random operands."""
    if device.type == "cuda" and not is_safe(job.distinct.call, job.rule):
        return [], []
    try:
        with _ready(job.distinct.call.node, device) as once:
            forward = _prepared(job, layouts, device, once)
            made = forward()
            ends = [out for out in made if out.requires_grad]
            half = lasting_s / 2 if ends else lasting_s
            look = queued_samples_of if device.type == "cuda" else partial(samples_of, now=now)
            forward_s = look(forward, device, half)
            if not ends:
                return forward_s, []
            seeds = [torch.ones_like(out) for out in ends]
            leaves = forward.leaves

            def backward() -> None:
                torch.autograd.grad(ends, leaves, seeds, retain_graph=True, allow_unused=True)

            backward()
            return forward_s, look(backward, device, half)
    except REFUSED:
        return [], []


@lru_cache(maxsize=1024)
def is_safe(call: Call, rule: Rule) -> bool:
    """Whether an op takes random indices: tried with one unit of it on the host, where a wrong one is an error like
    any other. On a GPU it would be the end of the process.
    """
    if not any(_is_whole(value) for value in call.operands):
        return True
    host = torch.device("cpu")
    length = max((placement.length(value.shape) for placement, value in _shards(call, rule)), default=1)
    one = OpJob(Distinct("", call, work_of(call), 1), rule, 1, max(length, 1))
    try:
        with _ready(call.node, host) as once:
            _prepared(one, {}, host, once)()
    except REFUSED:
        return False
    return True


def _is_whole(value: Value) -> bool:
    dtype = value.torch_dtype
    return not (dtype.is_floating_point or dtype.is_complex or value.dtype == "bool")


@contextmanager
def _ready(node: Node, device: torch.device) -> Iterator[Callable[[], ExitStack]]:
    """The surroundings of a call, outside the clock where they can be. Autocast keeps the copies it made of a weight
    until it ends, so it is begun anew for every call.
    """
    context = node.context
    under = replace(context, autocast=f"{device.type}:{context.autocast.partition(':')[2]}" if context.autocast else "")

    def once() -> ExitStack:
        stack = ExitStack()
        if under.autocast:
            stack.enter_context(surroundings(under))
        return stack

    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad(), ExitStack() as outside:
        warnings.simplefilter("ignore")
        outside.enter_context(surroundings(replace(under, autocast="")))
        yield once


@dataclass(frozen=True, slots=True)
class _Forward:
    run: Callable[[], object]
    once: Callable[[], ExitStack] | None
    leaves: tuple[Tensor, ...]  # whose gradients are wanted

    def __call__(self) -> list[Tensor]:
        if self.once is None:
            out = self.run()
        else:
            with self.once():
                out = self.run()
        return listed(out)


def _prepared(job: OpJob, layouts: Layouts, device: torch.device, once: Callable[[], ExitStack]) -> _Forward:
    call, rule, pieces = job.distinct.call, job.rule, job.pieces
    below = indices_below(call)
    tensors = tuple(
        drawn(value, need.local_shape(value.shape, pieces, 0), layouts.get(value.name, ()), below, device)
        for need, value in zip(rule.needs, call.operands, strict=True)
    )
    shapes = tuple(
        give.local_shape(value.shape, pieces, 0) for give, value in zip(rule.gives, call.node.results, strict=True)
    )
    entry = describe(call.node.op)
    leaves = tuple(t for t in tensors if t.requires_grad)
    begin = once if call.node.context.autocast else None
    local = Local(call, rule, tensors, shapes, 0, pieces, RankRandomness(0, 0, device))
    if rule.how != "plain" and not job.as_is:
        talks = entry.talks(call) if entry is not None and entry.talks is not None else ()
        implementation = next(talk.implementation for talk in talks if talk.how == rule.how)
        return _Forward(lambda: _alone(implementation(local)), begin, leaves)
    if entry is not None and entry.local is not None:
        compute = entry.local
        return _Forward(lambda: compute(local), begin, leaves)
    args, kwargs = filled(call.node, tensors, device)
    op = resolve_op(call.node.op)
    return _Forward(lambda: op(*args, **kwargs), begin, leaves)


def _alone(talking: object) -> object:
    """What an implementation computes when every question it asks is its own answer."""
    if not isinstance(talking, Generator):
        return talking
    answer: Tensor | None = None
    while True:
        try:
            answer = talking.send(answer).tensor
        except StopIteration as stop:
            return stop.value


def indices_below(call: Call) -> int:
    """A bound for whole numbers that makes them indices of this call: as wide as can be told, since a few rows picked
    again and again are in a cache, and their gradients in each other's way.
    """
    packet = call.node.op.split(".")[1] if call.node.op.count(".") else ""
    table = call.shapes[0]
    if packet in ("embedding", "embedding_bag") and table:
        return table[0]
    if packet.startswith(("cross_entropy", "nll_loss")) and table:
        return table[1] if len(table) > 1 else table[0]
    if packet == "one_hot" and isinstance(classes := call.arg("num_classes"), int) and classes > 0:
        return classes
    along = packet in ("gather", "take_along_dim") or packet.startswith(("index_", "scatter"))
    if along and table and isinstance(dim := call.arg("dim"), int):
        return table[dim]
    return max(min((size for shape in call.shapes for size in shape if size > 1), default=2), 2)


def drawn(value: Value, shape: Sequence[int], order: tuple[int, ...], below: int, device: torch.device) -> Tensor:
    """Random elements for a part of a value of this shape, lying in this order; whole numbers from 0 to `below`."""
    order = order or tuple(range(len(shape)))
    lying = [shape[dim] for dim in order]
    dtype = value.torch_dtype
    if value.dtype == "bool":
        made = torch.rand(lying, device=device) < 0.5
    elif dtype.is_complex:
        made = torch.rand(lying, device=device, dtype=dtype)
    elif dtype.is_floating_point:
        made = torch.empty(lying, device=device, dtype=dtype).uniform_(0.1, 0.9)
    else:
        made = torch.randint(0, below, lying, device=device, dtype=dtype)
    differentiable = value.grad and (dtype.is_floating_point or dtype.is_complex)
    return made.permute([order.index(dim) for dim in range(len(order))]).detach().requires_grad_(differentiable)
