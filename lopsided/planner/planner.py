"""Model + cluster → plan: search and balance in turn, on every sensible part of the cluster, against the classics.

In: a model and a batch (or a `Graph`) and a `Cluster`. Out: `Plan`.

The search proposes a program for given shares, the linear program proposes shares for a given program, and the timeline
of a whole step disposes: the best *pair* seen is kept, with the classics among the pairs, so that the answer is never
predicted slower than any of them.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from lopsided.capturing.call import LossFn
from lopsided.capturing.capture_graph import capture
from lopsided.capturing.retype import in_dtype
from lopsided.cluster.cluster import FEW_KINDS, Cluster, parts
from lopsided.cluster.cluster_file import load_cluster
from lopsided.errors import InputError, PlanError
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.ir.program import Program, RuleBook, check_program, parse_program
from lopsided.ops.derive import derive_rules
from lopsided.planner.ablation import ADDITIONS, DEVICES, SEGMENTS, Belief, additions_named, beliefs, fewer_rules
from lopsided.planner.allowed import EIGHT_BIT_STATE, allowed
from lopsided.planner.candidates import BETTER, Candidate, Limits, excess, memory_limits
from lopsided.planner.freeing import rounds_to_fit
from lopsided.planner.part_search import PartSearch
from lopsided.planner.pins import limits_of
from lopsided.planner.plan_data import INTERRUPTED, Baseline, Breakdown, Plan, SearchReport
from lopsided.planner.proposals import CandidatePool
from lopsided.planner.rounds import in_best_rounds, in_so_many, is_freed
from lopsided.planner.search import Progress
from lopsided.planner.segments import given_segments
from lopsided.planner.worth import Worth, worth
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.decisions import BUCKET_BYTES, Decisions, OnHost, Rerun
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, holdings
from lopsided.schedule.pricing import price
from lopsided.schedule.timeline import Timeline, run

ABOUT = {
    "dp-ev": "data parallelism, equal shares",
    "dp-cp": "data parallelism, shares by speed",
    "fsdp": "parameters stored cut and gathered for use (ZeRO-3), equal shares",
    "tensor": "the best tensor parallelism, shares by speed",
    "single": "everything on the fastest device",
    "dp-part": "data parallelism on the devices of this plan, shares by speed",
}

# The best program is made on four parts at most, those where it is estimated to take least.
_TRIES = 4
# So many numbers of kinds are compared at a time.
_GRID = 8
# What takes 1.1 times a step that is known does not become better than that by a finish.
_FINISHED = 1.1

_YOUNG_OBJECTS = 100_000
"""So many new objects are made before the collector looks at them while a plan is made; 700 are Python's own."""


def plan(
    model: nn.Module,
    batch: object,
    cluster: Cluster | str | Path,
    *,
    loss_fn: LossFn | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    time_limit_s: float = math.inf,
    pins: Sequence[str] = (),
    segments: Sequence[str] = (),
    without: Sequence[str] = (),
    known: Sequence[Plan] = (),
    microbatches: int | None = None,
    allow: Iterable[str] = (),
    progress: Callable[[Progress], None] = lambda _: None,
) -> Plan:
    """The fastest way to train `model` on `cluster` (a preset's name, a file or a `Cluster`).

    The batch is the global one: all devices together train on it in one step. `dtype` plans for the model in another
    floating dtype than it has. `pins` such as `"encoder.*.weight=I"` fix how parameters are stored, `segments` such as
    `"encoder.*"` give parts of the model shares of their own. `without` some of what this planner adds to HAP
    (`ablation`) it shows what that is worth. The batch is computed in `microbatches` rounds; if that is left open, in
    as many as it takes to fit, or as pay. `known` plans of the same model compete: the answer is never predicted slower
    than any of them is on this cluster. What changes the numbers that are computed is used only if it is named in
    `allow`: `"8bit-state"`, optimizer state in 8 bits (`allowed`).
    """
    where = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    started = time.perf_counter()
    graph = capture(model, batch, loss_fn=loss_fn)
    if dtype is not None:
        graph = in_dtype(graph, dtype)
    capture_s = time.perf_counter() - started
    found = plan_graph(
        graph,
        where,
        optimizer=optimizer,
        time_limit_s=time_limit_s,
        pins=pins,
        segments=segments,
        without=without,
        known=known,
        microbatches=microbatches,
        allow=allow,
        progress=progress,
    )
    return replace(found, capture_s=capture_s)


def plan_graph(
    graph: Graph,
    cluster: Cluster,
    *,
    book: RuleBook | None = None,
    optimizer: str = "adamw",
    time_limit_s: float = math.inf,
    pins: Sequence[str] = (),
    segments: Sequence[str] = (),
    without: Sequence[str] = (),
    known: Sequence[Plan] = (),
    microbatches: int | None = None,
    allow: Iterable[str] = (),
    progress: Callable[[Progress], None] = lambda _: None,
) -> Plan:
    """The plan of a captured graph."""
    if not time_limit_s >= 0:
        raise InputError(f"a time limit of {time_limit_s} s is not one", do="give seconds, 0 or more")
    started = time.perf_counter()
    rules = book or derive_rules(graph)
    left_out = additions_named(without)
    may = allowed(allow)
    task = Task(graph, rules, optimizer, started, time_limit_s, pins, segments, left_out, known, progress, allow=may)
    if not left_out:
        return in_best_rounds(task, cluster, microbatches, _searched)[0]
    task = in_so_many(task, microbatches or 1)
    if segments and SEGMENTS in left_out:
        raise InputError("segments are given, and are to be left out", do="leave one of the two away")
    as_believed = [(_freed(task, belief.cluster).plans(1)[0], belief) for belief in beliefs(cluster, left_out)]
    found, belief = min(as_believed, key=lambda pair: pair[0].step_s)
    return _as_it_is(task, found, belief, cluster)


def plan_rivals(
    graph: Graph,
    cluster: Cluster,
    most: int,
    *,
    book: RuleBook | None = None,
    optimizer: str = "adamw",
    microbatches: int | None = None,
    allow: Iterable[str] = (),
    progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[Plan, ...]:
    """The plan of a captured graph and the best of other sorts, so many in all or fewer: on other devices, or with
    parameters stored otherwise. They are predicted to take about as long; which is quickest, a clock can tell
    (`runtime.rivals`).
    """
    if most < 1:
        raise InputError(f"{most} plans are none", do="ask for 1 or more")
    rules = book or derive_rules(graph)
    nothing = frozenset[str]()
    may = allowed(allow)
    task = Task(graph, rules, optimizer, time.perf_counter(), math.inf, (), (), nothing, (), progress, allow=may)
    return in_best_rounds(task, cluster, microbatches, _searched, most)


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked for."""

    graph: Graph
    rules: RuleBook
    optimizer: str
    started: float
    time_limit_s: float
    pins: Sequence[str]
    segments: Sequence[str]
    without: frozenset[str]
    known: Sequence[Plan]
    progress: Callable[[Progress], None]
    microbatches: int = 1  # the graph is that of one round of so many
    allow: frozenset[str] = frozenset()

    def pool(self, *, whole: bool = False) -> CandidatePool:
        """The pool; all of it, whatever is to be left out."""
        without = frozenset[str]() if whole else self.without
        rules = fewer_rules(self.rules, without)
        kept = optimizer_named(self.optimizer)
        about = (self.graph, rules, kept, self.limits(rules), self.progress, without, self.microbatches, self.allow)
        pool = CandidatePool(*about)
        pool.plain_book = self.rules
        return pool

    def limits(self, rules: RuleBook) -> Limits:
        return limits_of(rules, self.pins, self.started + self.time_limit_s)


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Planning makes millions of small objects, hardly any in cycles: the collector would take a third of its time."""
    usual = gc.get_threshold()
    gc.set_threshold(max(usual[0], _YOUNG_OBJECTS) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@dataclass
class _Searched:
    """What came of a search: the best candidate, and all that is needed to make plans of the best."""

    task: Task
    cluster: Cluster
    pool: CandidatePool
    classics: tuple[Candidate, ...]
    parts: tuple[PartSearch, ...]
    each_is_worth: Worth | None = None  # once devices were taken away

    @property
    def fits(self) -> bool:
        return self.pool.best is not None

    @property
    def step_s(self) -> float:
        return self.pool.chosen.step_s

    @property
    def lack(self) -> float:
        return excess(self.pool.nearest) if self.pool.tried else math.inf

    @property
    def least_s(self) -> float:
        return self.pool.least_s

    @property
    def rounds_to_fit(self) -> int:
        return rounds_to_fit(self.pool, self.cluster)

    @property
    def rounds_with_all_freed(self) -> int:
        return rounds_to_fit(self.pool, self.cluster, is_freed=True)

    @property
    def is_freed(self) -> bool:
        return self.fits and is_freed(self.pool.chosen)

    @property
    def is_broken_off(self) -> bool:
        return self.pool.interrupted or not self.pool.limits.left_s

    @_collecting_rarely()
    def free(self) -> None:
        """What does not fit is made to, where that may lead to something better."""
        pool = self.pool
        pool.frees = True
        pool.too_small.clear()
        pool.leanest.clear()
        try:
            for part in self.parts:
                if pool.is_promising(part.on) and pool.limits.left_s:
                    pool.known_s = pool.bar_s
                    part.free()
            _finish(pool)
        except KeyboardInterrupt:
            pool.interrupted = True

    @_collecting_rarely()
    def rest_devices(self) -> None:
        """The best is looked for without each of the devices, too."""
        self.pool.frees, self.pool.known_s = True, math.inf
        if self.each_is_worth is None and self.fits and not self.is_broken_off:
            try:
                self.each_is_worth = worth(self.pool, self.cluster)
            except KeyboardInterrupt:
                # The best so far is an answer; what each device is worth is not known then.
                self.pool.interrupted = True

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """What the classics would take."""
        return _baselines([*self.classics, *self.pool.classic_on_part(self.cluster)])

    @_collecting_rarely()
    def plans(self, most: int) -> tuple[Plan, ...]:
        """The best plan, and the best of other sorts, so many in all at the most."""
        pool, cluster = self.pool, self.cluster
        self.rest_devices()
        each_is_worth: Worth = self.each_is_worth or ({}, {})
        classics = [*self.classics, *pool.classic_on_part(cluster)]
        best = pool.chosen
        rivals = pool.rivals((cluster, best.on), most - 1) if most > 1 and not pool.interrupted else []
        seconds = time.perf_counter() - self.task.started
        # Those are for trying: with the right shares even a plain one may turn out to be the best.
        others = {id(one): one for one in (pool.chosen, best, *rivals)}
        return tuple(
            _answer(pool, cluster, classics, one, *(each_is_worth if one is best else ({}, {})), seconds)
            for one in list(others.values())[:most]
        )


@_collecting_rarely()
def _searched(task: Task, cluster: Cluster, known_s: float = math.inf) -> _Searched:
    """The best candidates that fit; nothing is made to yet. A plan with a step of `known_s` is known."""
    pool = task.pool()
    pool.frees, pool.known_s = False, known_s
    if DEVICES in task.without:
        pool.fewest_devices = cluster.devices
    in_segments = given_segments(pool.book, task.segments) if task.segments else None
    classics = tuple(pool.classics(cluster))
    for plan in task.known:
        _judge_known(pool, plan, cluster)
    parts: list[PartSearch] = []
    try:
        for on in [cluster] if DEVICES in task.without else _promising(pool, cluster):
            parts.append(PartSearch(pool, on))
            parts[-1].improve()
        if in_segments is not None:
            PartSearch(pool.within(in_segments, task.limits(in_segments)), cluster).improve()
        _finish(pool)
    except KeyboardInterrupt:
        pool.interrupted = True  # the best so far is an answer
    return _Searched(task, cluster, pool, classics, tuple(parts))


def _freed(task: Task, cluster: Cluster) -> _Searched:
    made = _searched(task, cluster)
    made.free()
    return made


def _finish(pool: CandidatePool) -> None:
    """What else may be made of the best."""
    for candidate in pool.leaders() if pool.best is not None else ():
        if candidate.step_s > pool.known_s * _FINISHED:
            continue
        for finish in (pool.partly_stored_cut, pool.segmented, pool.rebucketed, pool.rechunked, pool.settled):
            if pool.limits.left_s:
                finish(pool.of_part[candidate.on.fingerprint])


def _promising(pool: CandidatePool, cluster: Cluster) -> Iterator[Cluster]:
    """The cluster and the parts of it that may be faster, the most promising first: their steps bound the others'.

    Most devices of many kinds do as all of them do: such parts come after the cluster, and are left out where an
    estimate says so. Parts with most memory are tried where the cluster turned out to be short of it.
    """
    many = len(cluster.kinds) > FEW_KINDS
    quick = [*parts(cluster, pool.dtype, by_memory=False)]
    yield from _searchable(
        pool, cluster, [cluster, *(part for part in quick if not (many and _has_most(part, cluster)))]
    )
    most = [part for part in quick if many and _has_most(part, cluster)]
    learned = pool.learned.get(cluster.fingerprint)  # nothing, where no search of it was worth while
    if cluster.fingerprint not in pool.of_part or (learned is not None and learned.memory_price > 0):
        known = {part.fingerprint for part in quick}
        roomy = [part for part in parts(cluster, pool.dtype) if part.fingerprint not in known]
        most += [part for part in roomy if many and _has_most(part, cluster)]
        yield from _searchable(pool, cluster, [part for part in roomy if not (many and _has_most(part, cluster))])
    yield from _with_most(pool, cluster, most)
    if many:
        yield from _as_many_as_pay(pool, cluster)


def _with_most(pool: CandidatePool, cluster: Cluster, places: Sequence[Cluster]) -> Iterator[Cluster]:
    """Of parts with most devices of many kinds, the first that is not too small where the cluster is, and then the one
    that gains most by resting the others, if any does.

    The best program of so many devices is about the best of a few more or less: it is estimated on all, made where that
    promises something, and searched for anew only where it gains most.
    """
    known = [cluster.fingerprint, *(part.fingerprint for part in places)]
    for part in _searchable(pool, cluster, places):
        if any(one in pool.of_part for one in known):
            break
        yield part
    best = min((pool.of_part[one] for one in known if one in pool.of_part), key=lambda c: c.step_s, default=None)
    if best is None:
        return
    estimate = pool.estimate(best, cluster)
    bar_s = estimate.on(best.on, memory_limits(best.on)).step_s * pool.chosen.step_s / best.step_s * BETTER
    steps = [(estimate.on(part, memory_limits(part)).step_s, number) for number, part in enumerate(places)]
    for _, number in [one for one in sorted(steps) if one[0] < bar_s][:_TRIES]:
        pool.elsewhere(best, places[number])
    if pool.chosen is not best and pool.chosen.on.fingerprint in known[1:]:
        yield pool.chosen.on


def _as_many_as_pay(pool: CandidatePool, cluster: Cluster) -> Iterator[Cluster]:
    """So many of the fastest kinds as the best program is estimated to take least on, where that helps it.

    Only halving numbers were tried. The best number is looked for where the step is shortest on a grid that gets finer.
    """
    best = pool.best
    if best is None:
        return
    estimate = pool.estimate(best, cluster)
    order = sorted(range(len(cluster.kinds)), key=lambda k: (-cluster.kinds[k].flops(pool.dtype), k))
    steps: dict[int, float] = {}

    def step_s(count: int) -> float:
        if count not in steps:
            part = cluster.only(order[:count])
            steps[count] = estimate.on(part, memory_limits(part)).step_s
        return steps[count]

    low, high, stride = 1, len(order), len(order)
    while stride > 1:
        stride = -(-(high - low) // _GRID)
        quickest = min((*range(low, high, stride), high), key=step_s)
        low, high = max(quickest - stride, low), min(quickest + stride, high)
    part = cluster.only(order[:quickest])
    if (
        part.fingerprint in pool.learned
        or step_s(quickest) >= estimate.on(best.on, memory_limits(best.on)).step_s * BETTER
    ):
        return
    pool.elsewhere(best, part)
    if pool.chosen.on.fingerprint == part.fingerprint:
        yield part


def _has_most(part: Cluster, cluster: Cluster) -> bool:
    return 2 * part.devices > cluster.devices


def _searchable(pool: CandidatePool, cluster: Cluster, places: Sequence[Cluster]) -> Iterator[Cluster]:
    """Those on which a search may lead to something."""
    for part in _ranked(pool, cluster, places):
        if pool.is_promising(part):
            yield part


def _ranked(pool: CandidatePool, cluster: Cluster, places: Sequence[Cluster]) -> list[Cluster]:
    """In the order in which the classics are estimated to be quick on them; those first on which one of them fits, and
    of the others those with most devices."""
    if len(places) < 2:
        return [*places]
    estimates = [pool.estimate(one) for one in pool.plain_on(cluster)]

    def promise(part: Cluster) -> tuple[bool, int, float]:
        made = [one.on(part, memory_limits(part)) for one in estimates]
        return min((not one.fits, 0 if one.fits else -part.devices, one.step_s) for one in made)

    return sorted(places, key=promise)


def _judge_known(pool: CandidatePool, known: Plan, cluster: Cluster) -> None:
    """A plan that was made before, on the devices of these names."""
    if known.microbatches != pool.microbatches:
        return  # it competes where the batch is computed in as many rounds
    if known.graph.fingerprint != pool.graph.fingerprint:
        raise PlanError("a plan that should compete is for another model or batch", do="give a plan of the same model")
    here, used = {*cluster.device_names}, {*known.devices}
    gone = next((device for device in known.devices if device not in here), None)
    on = cluster
    if gone is None:
        for device in reversed(cluster.device_names):  # the last first: those left of its kind are counted anew
            if device not in used:
                on = on.without_device(device)
    if on.device_names != known.devices:
        raise PlanError(
            f"a plan that should compete uses {gone or known.devices[0]}, which this cluster does not have as it was",
            do="leave the plan out, or plan for the cluster it was made for",
        )
    if known.state_bits and not pool.state_bits:
        raise PlanError(
            f"a plan that should compete keeps optimizer state in {known.state_bits} bits, which is not allowed",
            do=f"allow {EIGHT_BIT_STATE}, or leave the plan out",
        )
    program = parse_program(str(known.program), pool.graph)
    about = ("known", on, program, known.shares, known.regather)
    kept = (known.reruns, known.on_host, known.state_bits)
    pool.judge_kept((*about, None), known.bucket_bytes, kept)


def _as_it_is(task: Task, found: Plan, belief: Belief, cluster: Cluster) -> Plan:
    """What was chosen with less than there is to know, predicted with all of it.

    What each device is worth was believed only, and is left away.
    """
    on = belief.as_it_is(found.on)
    step_s, breakdown, memory = predict(found.program, found.shares, on, *found.how)
    left_out = ", ".join(name for name in ADDITIONS if name in task.without)
    return replace(
        found,
        cluster=belief.real,
        on=on,
        step_s=step_s,
        breakdown=breakdown,
        memory_bytes=memory,
        baselines=_baselines(task.pool(whole=True).classics(cluster)),
        without_device=(),
        without_node=(),
        notes=(f"planned without {left_out}; chosen as a step of {found.step_s:.4g} s", *found.notes),
        planning_s=time.perf_counter() - task.started,
    )


# The answer


def predict(
    program: Program,
    shares: Shares,
    on: Cluster,
    optimizer: str,
    regather: bool,
    bucket_bytes: int = BUCKET_BYTES,
    reruns: tuple[Rerun, ...] = (),
    on_host: tuple[OnHost, ...] = (),
    microbatches: int = 1,
    state_bits: int = 0,
) -> tuple[float, Breakdown, tuple[int, ...]]:
    """Seconds of a step of any program with any shares, where they go, and bytes on every device."""
    kept = optimizer_named(optimizer)
    costs, scale = Costs(program.graph, on, kept), Scale(on, shares)
    decisions = Decisions(
        bucket_bytes,
        regather=regather,
        reruns=reruns,
        on_host=on_host,
        microbatches=microbatches,
        state_bits=state_bits,
    )
    schedule = lower(program, decisions)
    timeline = run(price(schedule, costs), costs.network, scale)
    held = holdings(schedule, kept, devices=on.devices)
    return timeline.step_s, breakdown_of(timeline), every_device(on, bytes_per_kind(held, scale))


def breakdown_of(timeline: Timeline) -> Breakdown:
    lane = timeline.critical
    return Breakdown(
        lane.compute_s, lane.optimizer_s, timeline.blocking_s, lane.exposed_s, lane.waiting_s, timeline.hidden_s
    )


def every_device(on: Cluster, per_kind: Sequence[int]) -> tuple[int, ...]:
    """What every device has, of what each kind has."""
    return tuple(size for kind, size in zip(on.kinds, per_kind, strict=True) for _ in range(kind.devices))


def _answer(
    pool: CandidatePool,
    cluster: Cluster,
    classics: Sequence[Candidate],
    best: Candidate,
    devices: dict[str, float],
    nodes: dict[str, float],
    seconds: float,
) -> Plan:
    check_program(best.program, pool.plain_book)
    found = best.found or pool.first
    if found is None:
        raise InputError("there was no time for a single search", do="give a longer time limit")
    why = found.why if best.found is not None else f"{found.why}; taken is {best.name}"
    return Plan(
        cluster=cluster,
        on=best.on,
        program=best.program,
        shares=_in_use(best.program, best.shares),
        optimizer=pool.optimizer.name,
        regather=best.regather,
        step_s=best.step_s,
        breakdown=breakdown_of(best.timeline),
        memory_bytes=every_device(best.on, best.memory),
        baselines=_baselines(classics),
        search=SearchReport(
            found.seconds,
            found.states,
            found.cost_s,
            found.bound_s,
            found.gap,
            why,
            pool.searches,
            tuple(pool.log),
        ),
        without_device=tuple(devices.items()),
        without_node=tuple(nodes.items()),
        notes=tuple(_notes(pool, cluster, best)),
        planning_s=seconds,
        bucket_bytes=best.bucket_bytes,
        reruns=best.reruns,
        on_host=best.on_host,
        microbatches=pool.microbatches,
        state_bits=best.state_bits,
    )


def baselines_of(graph: Graph, cluster: Cluster, optimizer: str) -> tuple[Baseline, ...]:
    """What the classics are predicted to take."""
    nothing = frozenset[str]()
    task = Task(
        graph, derive_rules(graph), optimizer, time.perf_counter(), math.inf, (), (), nothing, (), lambda _: None
    )
    return _baselines(task.pool().classics(cluster))


def _baselines(classics: Iterable[Candidate]) -> tuple[Baseline, ...]:
    return tuple(Baseline(c.name, ABOUT[c.name], c.step_s, c.fits) for c in classics)


def _in_use(program: Program, shares: Shares) -> Shares:
    """The shares of all names that cut something in the program, and of no others."""
    placed = [placement for _, placement in program.leaves]
    placed += [p for step in program.steps for chain in (step.rule.gives, *step.chains) for p in chain]
    names = {placement.by for placement in placed} - {""}
    return Shares(
        shares.work,
        tuple((name, shares.of(name)) for name in sorted(names)),
        tuple((name, length, pieces) for name, length, pieces in shares.cuts if not name or name in names),
    )


def _notes(pool: CandidatePool, cluster: Cluster, best: Candidate) -> Iterator[str]:
    """What a reader should know beside the numbers."""
    used = {*best.on.device_names}
    if idle := [name for name in cluster.device_names if name not in used]:
        if len(idle) == 1:
            yield f"{idle[0]} is left out: no plan that uses it was found to be faster"
        else:
            yield f"{len(idle)} of {cluster.devices} devices are left out: no plan with them was found to be faster"
    for node in pool.book.only_whole:
        yield f"{node.op} runs whole on every device ({node.source}): nobody has described how it could be cut"
    if pool.interrupted:
        yield f"{INTERRUPTED}: this is the best so far"
    elif not pool.limits.left_s:
        yield "the time limit was reached: this is the best so far"
    if best.found is not None and best.found.gap > 0:
        yield f"{best.found.why}: a program may exist that is up to {best.found.gap:.1%} cheaper"
