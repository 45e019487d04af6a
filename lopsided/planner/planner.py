"""Model + cluster → plan: search and balance in turn, on every sensible part of the cluster, against the classics.

In: a model and a batch (or a `Graph`) and a `Cluster`. Out: `Plan`.

The search proposes a program for given shares, the linear program proposes shares for a given program, and the timeline
of a whole step disposes: the best *pair* seen is kept, with the classics among the pairs, so that the answer is never
predicted slower than any of them.
"""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from lopsided.capturing.capture_graph import LossFn, capture
from lopsided.capturing.retype import in_dtype
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import load_cluster
from lopsided.cluster.subclusters import parts
from lopsided.errors import InputError, PlanError, ProgramError
from lopsided.ir.graph import Graph, Leaf, Node
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, Placement, Shares, parse_placement
from lopsided.ir.program import Program, check_program, parse_program
from lopsided.ir.rule_book import RuleBook
from lopsided.ops.derive import derive_rules
from lopsided.planner.ablation import ADDITIONS, DEVICES, SEGMENTS, Belief, additions_named, beliefs, fewer_rules
from lopsided.planner.baselines import STATE, stored_so
from lopsided.planner.candidates import Candidate, Limits
from lopsided.planner.plan_data import INTERRUPTED, Baseline, Breakdown, Plan, SearchReport
from lopsided.planner.proposals import CandidatePool
from lopsided.planner.search import Progress
from lopsided.planner.search_cost import NOTHING_HIDDEN
from lopsided.planner.segments import given_segments
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, holdings
from lopsided.schedule.pricing import price
from lopsided.schedule.schedule import BUCKET_BYTES, Decisions
from lopsided.schedule.timeline import Timeline, run

ABOUT = {
    "dp-ev": "data parallelism, equal shares",
    "dp-cp": "data parallelism, shares by speed",
    "fsdp": "parameters stored cut and gathered for use (ZeRO-3), equal shares",
    "tensor": "the best tensor parallelism, shares by speed",
    "single": "everything on the fastest device",
    "dp-part": "data parallelism on the devices of this plan, shares by speed",
}
_TURNS = 3  # of looking what each device is worth: each time that finds a better plan


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
    progress: Callable[[Progress], None] = lambda _: None,
) -> Plan:
    """The fastest way to train `model` on `cluster` (a preset's name, a file or a `Cluster`).

    The batch is the global one: all devices together train on it in one step. `dtype` plans for the model in another
    floating dtype than it has. `pins` such as `"encoder.*.weight=I"` fix how parameters are stored, `segments` such as
    `"encoder.*"` give parts of the model shares of their own. `without` some of what this planner adds to HAP
    (`ablation`) it shows what that is worth. `known` plans of the same model compete: the answer is never
    predicted slower than any of them is on this cluster.
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
    progress: Callable[[Progress], None] = lambda _: None,
) -> Plan:
    """The plan of a captured graph."""
    if not time_limit_s >= 0:
        raise InputError(f"a time limit of {time_limit_s} s is not one", do="give seconds, 0 or more")
    started = time.perf_counter()
    rules = book or derive_rules(graph)
    left_out = additions_named(without)
    task = _Task(graph, rules, optimizer, started, time_limit_s, pins, segments, left_out, known, progress)
    if not left_out:
        return _planned(task, cluster)[0]
    if segments and SEGMENTS in left_out:
        raise InputError("segments are given, and are to be left out", do="leave one of the two away")
    as_believed = [(_planned(task, belief.cluster)[0], belief) for belief in beliefs(cluster, left_out)]
    found, belief = min(as_believed, key=lambda pair: pair[0].step_s)
    return _as_it_is(task, found, belief, cluster)


def plan_rivals(
    graph: Graph,
    cluster: Cluster,
    most: int,
    *,
    book: RuleBook | None = None,
    optimizer: str = "adamw",
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
    task = _Task(graph, rules, optimizer, time.perf_counter(), math.inf, (), (), nothing, (), progress)
    return _planned(task, cluster, most)


@dataclass(frozen=True, slots=True)
class _Task:
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

    def shop(self, *, whole: bool = False) -> CandidatePool:
        """The workshop; the whole of it, whatever is to be left out."""
        without = frozenset[str]() if whole else self.without
        rules = fewer_rules(self.rules, without)
        kept = optimizer_named(self.optimizer)
        shop = CandidatePool(self.graph, rules, kept, self.limits(rules), self.progress, without)
        shop.plain_book = self.rules
        return shop

    def limits(self, rules: RuleBook) -> Limits:
        return _limits(rules, self.pins, self.started + self.time_limit_s)


def _planned(task: _Task, cluster: Cluster, most: int = 1) -> tuple[Plan, ...]:
    """The best plan, and the best of other sorts, so many in all at the most."""
    shop = task.shop()
    if DEVICES in task.without:
        shop.fewest_devices = cluster.devices
    in_segments = given_segments(shop.book, task.segments) if task.segments else None
    classics = list(shop.classics(cluster))
    for plan in task.known:
        _judge_known(shop, plan, cluster)
    try:
        shop.find_bucket(classics[1])
        for part in [cluster] if DEVICES in task.without else parts(cluster, shop.dtype):
            if shop.is_promising(part):
                shop.improve(part, seeds=3 if part is cluster else 1)
        if in_segments is not None:
            shop.within(in_segments, task.limits(in_segments)).improve(cluster)
        for finish in (shop.partly_stored_cut, shop.segmented, shop.rebucketed, shop.settled):
            if shop.limits.left_s:
                finish(shop.chosen)
        worth = _without(shop, cluster) if shop.limits.left_s else ({}, {})
    except KeyboardInterrupt:
        # The best so far is an answer; what each device is worth is not known then.
        shop.interrupted = True
        worth = {}, {}
    classics += shop.classic_on_part(cluster)
    best = shop.chosen
    rivals = shop.rivals((cluster, best.on), most - 1) if most > 1 and not shop.interrupted else []
    seconds = time.perf_counter() - task.started
    # Those are for trying: with the right shares even a plain one may turn out to be the best.
    others = {id(one): one for one in (shop.chosen, best, *rivals)}
    return tuple(
        _answer(shop, cluster, classics, one, *(worth if one is best else ({}, {})), seconds)
        for one in list(others.values())[:most]
    )


def _judge_known(shop: CandidatePool, known: Plan, cluster: Cluster) -> None:
    """A plan that was made before, on the devices of these names."""
    if known.graph.fingerprint != shop.graph.fingerprint:
        raise PlanError("a plan that should compete is for another model or batch", do="give a plan of the same model")
    gone = next((device for device in known.devices if device not in cluster.device_names), None)
    on = cluster
    if gone is None:
        for device in reversed(cluster.device_names):  # the last first: those left of its kind are counted anew
            if device not in known.devices:
                on = on.without_device(device)
    if on.device_names != known.devices:
        raise PlanError(
            f"a plan that should compete uses {gone or known.devices[0]}, which this cluster does not have as it was",
            do="leave the plan out, or plan for the cluster it was made for",
        )
    program = parse_program(str(known.program), shop.graph)
    shop.judge("known", on, program, known.shares, known.regather, bucket_bytes=known.bucket_bytes)


def _as_it_is(task: _Task, found: Plan, belief: Belief, cluster: Cluster) -> Plan:
    """What was chosen with less than there is to know, predicted with all of it.

    What each device is worth was believed only, and is left away.
    """
    on = belief.as_it_is(found.on)
    how = (task.optimizer, found.regather, found.bucket_bytes)
    step_s, breakdown, memory = predict(found.program, found.shares, on, *how)
    left_out = ", ".join(name for name in ADDITIONS if name in task.without)
    return replace(
        found,
        cluster=belief.real,
        on=on,
        step_s=step_s,
        breakdown=breakdown,
        memory_bytes=memory,
        baselines=_baselines(task.shop(whole=True).classics(cluster)),
        without_device=(),
        without_node=(),
        notes=(f"planned without {left_out}; chosen as a step of {found.step_s:.4g} s", *found.notes),
        planning_s=time.perf_counter() - task.started,
    )


# What narrows the search


def _limits(book: RuleBook, pins: Sequence[str], deadline: float) -> Limits:
    """What pins leave to choose from. A pin is `parameter pattern=placement` or `%value pattern=placement`."""
    stored: dict[str, Placement] = {}
    given: dict[str, Placement] = {}
    for pin in pins:
        pattern, _, text = pin.rpartition("=")
        if not pattern:
            raise InputError(f"{pin!r} is not a pin", do='write PATTERN=PLACEMENT, for example "encoder.*.weight=I"')
        try:
            placement = parse_placement(text.strip())
        except ProgramError as error:
            raise InputError(error.what, where=f"pin {pin!r}", do="write I, S<dim> or S<dim>@state") from None
        if pattern.startswith("%"):
            _pin_values(book, pattern[1:], placement, pin, given)
        else:
            _pin_parameters(book, pattern, placement, pin, stored)

    every = stores_of(book)

    def stores(leaf: Leaf) -> tuple[Placement, ...]:
        name = leaf.value.name
        return (stored[name],) if name in stored else every[name]

    def allowed(node: Node, rule: Rule) -> bool:
        placed = zip(node.results, rule.gives, strict=True)
        return not given or all(given.get(value.name, give) == give for value, give in placed)

    return Limits(stores, allowed, stored, given, deadline)


def stores_of(book: RuleBook) -> dict[str, tuple[Placement, ...]]:
    """How each parameter may be stored: whole, cut by the state shares to be gathered for use, or as some op takes it.

    In this order: where a parameter is gathered anyway, how much each device stores is not tied to what it computes.
    """
    taken: dict[str, dict[Placement, None]] = {leaf.value.name: {} for leaf in book.graph.parameters}
    for node in book.graph.nodes:
        for k, name in enumerate(node.operands):
            if name in taken:
                taken[name].update((rule.needs[k], None) for rule in book.rules[node.name] if rule.needs[k].is_shard)
    return {
        leaf.value.name: tuple(dict.fromkeys((I, stored_so(leaf), *taken[leaf.value.name])))
        for leaf in book.graph.parameters
    }


def _pin_parameters(book: RuleBook, pattern: str, placement: Placement, pin: str, stored: dict[str, Placement]) -> None:
    found = [
        leaf
        for leaf in book.graph.parameters
        if any(fnmatch.fnmatchcase(name, pattern) for name in (leaf.target, *leaf.also))
    ]
    if not found:
        names = [leaf.target for leaf in book.graph.parameters]
        raise InputError(
            f"no parameter matches the pin {pin!r}",
            do=f"choose from {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}",
        )
    for leaf in found:
        plain = book.leaves[leaf.value.name]
        choices = dict.fromkeys([*plain, *(p.cut_by(STATE) for p in plain)])
        if placement not in choices:
            raise InputError(
                f"{leaf.target} cannot be stored {placement}",
                where=f"pin {pin!r}",
                do=f"choose from {', '.join(map(str, choices))}",
            )
        _add_pin(stored, leaf.value.name, placement, leaf.target, pin)


def _pin_values(book: RuleBook, pattern: str, placement: Placement, pin: str, given: dict[str, Placement]) -> None:
    found = [
        (node, k)
        for node in book.graph.nodes
        for k, value in enumerate(node.results)
        if fnmatch.fnmatchcase(value.name, pattern)
    ]
    if not found:
        raise InputError(f"no value matches the pin {pin!r}", do="name values as `lopsided capture` prints them")
    for node, k in found:
        choices = dict.fromkeys(rule.gives[k] for rule in book.rules[node.name])
        if placement not in choices:
            raise InputError(
                f"%{node.results[k].name} cannot be made {placement}",
                where=f"pin {pin!r}",
                do=f"choose from {', '.join(map(str, choices))}",
            )
        _add_pin(given, node.results[k].name, placement, f"%{node.results[k].name}", pin)


def _add_pin(pinned: dict[str, Placement], name: str, placement: Placement, shown: str, pin: str) -> None:
    if pinned.setdefault(name, placement) != placement:
        raise InputError(
            f"{shown} is pinned twice, as {pinned[name]} and as {placement}",
            where=f"pin {pin!r}",
            do="leave one of the pins out, or narrow its pattern",
        )


# The answer


def predict(
    program: Program,
    shares: Shares,
    on: Cluster,
    optimizer: str,
    regather: bool,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[float, Breakdown, tuple[int, ...]]:
    """Seconds of a step of any program with any shares, where they go, and bytes on every device."""
    kept = optimizer_named(optimizer)
    costs, scale = Costs(program.graph, on, kept), Scale(on, shares)
    schedule = lower(program, Decisions(bucket_bytes, regather=regather))
    timeline = run(price(schedule, costs), costs.network, scale)
    held = holdings(schedule, kept, devices=on.devices)
    return timeline.step_s, breakdown_of(timeline), _every_device(on, bytes_per_kind(held, scale))


def breakdown_of(timeline: Timeline) -> Breakdown:
    lane = timeline.critical
    return Breakdown(
        lane.compute_s, lane.optimizer_s, timeline.blocking_s, lane.exposed_s, lane.waiting_s, timeline.hidden_s
    )


def _every_device(on: Cluster, per_kind: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for kind, size in zip(on.kinds, per_kind, strict=True) for _ in range(kind.devices))


def _without(shop: CandidatePool, cluster: Cluster) -> tuple[dict[str, float], dict[str, float]]:
    """The step without each device and without each node. A smaller cluster that turns out faster becomes the best."""
    devices: dict[str, float] = {}
    nodes: dict[str, float] = {}
    for _ in range(_TURNS):
        before = shop.best
        for alike in cluster.alike_nodes() if cluster.nodes > 1 else ():
            nodes.update(dict.fromkeys(alike, _left_with(shop, alike, Cluster.without_node, cluster)))
        for alike in cluster.alike_devices() if cluster.devices > 1 else ():
            devices.update(dict.fromkeys(alike, _left_with(shop, alike, Cluster.without_device, cluster)))
        if before is shop.best:
            break
    # Who can do without a node can do without any one device of it.
    for name in devices:
        devices[name] = min(devices[name], nodes.get(name.partition("/")[0], math.inf))
    return devices, nodes


def _left_with(
    shop: CandidatePool, alike: Sequence[str], shrink: Callable[[Cluster, str], Cluster], cluster: Cluster
) -> float:
    """The step when one of these, which are alike, is gone; infinite if the model then fits nowhere."""
    best = shop.chosen
    names = {*best.on.device_names, *best.on.node_names}
    if not names.issuperset(alike):
        # One of them is idle and takes the place of the one that is gone.
        return best.step_s
    is_device = alike[0] in best.on.device_names
    left_over = (best.on.devices if is_device else best.on.nodes) > 1
    # What is left of the devices in use, and of all: an idle one may step in.
    left = [shrink(whole, alike[0]) for whole in (best.on, cluster) if whole is cluster or left_over]
    made: list[Candidate | None] = []
    for part in {part.fingerprint: part for part in left}.values():
        shares = shop.by_speed(part)
        made.append(shop.fitting("without", part, shares, shop.last_hidden or NOTHING_HIDDEN))
        made.append(shop.balanced("without", part, best.program, shares, best.regather, best.found))
        if made[-1] is None:
            made += shop.plain_balanced(part)
    return min((candidate.step_s for candidate in made if candidate is not None and candidate.fits), default=math.inf)


def _answer(
    shop: CandidatePool,
    cluster: Cluster,
    classics: Sequence[Candidate],
    best: Candidate,
    devices: dict[str, float],
    nodes: dict[str, float],
    seconds: float,
) -> Plan:
    check_program(best.program, shop.plain_book)
    found = best.found or shop.first
    if found is None:
        raise InputError("there was no time for a single search", do="give a longer time limit")
    why = found.why if best.found is not None else f"{found.why}; taken is {best.name}"
    return Plan(
        cluster=cluster,
        on=best.on,
        program=best.program,
        shares=_in_use(best.program, best.shares),
        optimizer=shop.optimizer.name,
        regather=best.regather,
        step_s=best.step_s,
        breakdown=breakdown_of(best.timeline),
        memory_bytes=_every_device(best.on, best.memory),
        baselines=_baselines(classics),
        search=SearchReport(
            found.seconds,
            found.states,
            found.cost_s,
            found.bound_s,
            found.gap,
            why,
            shop.searches,
            tuple(shop.log),
        ),
        without_device=tuple(devices.items()),
        without_node=tuple(nodes.items()),
        notes=tuple(_notes(shop, cluster, best)),
        planning_s=seconds,
        bucket_bytes=best.bucket_bytes,
    )


def baselines_of(graph: Graph, cluster: Cluster, optimizer: str) -> tuple[Baseline, ...]:
    """What the classics are predicted to take."""
    nothing = frozenset[str]()
    task = _Task(
        graph, derive_rules(graph), optimizer, time.perf_counter(), math.inf, (), (), nothing, (), lambda _: None
    )
    return _baselines(task.shop().classics(cluster))


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


def _notes(shop: CandidatePool, cluster: Cluster, best: Candidate) -> Iterator[str]:
    """What a reader should know beside the numbers."""
    if idle := [name for name in cluster.device_names if name not in best.on.device_names]:
        if len(idle) == 1:
            yield f"{idle[0]} is left out: no plan that uses it was found to be faster"
        else:
            yield f"{len(idle)} of {cluster.devices} devices are left out: no plan with them was found to be faster"
    for node in shop.book.only_whole:
        yield f"{node.op} runs whole on every device ({node.source}): nobody has described how it could be cut"
    if shop.interrupted:
        yield f"{INTERRUPTED}: this is the best so far"
    elif not shop.limits.left_s:
        yield "the time limit was reached: this is the best so far"
    if best.found is not None and best.found.gap > 0:
        yield f"{best.found.why}: a program may exist that is up to {best.found.gap:.1%} cheaper"
