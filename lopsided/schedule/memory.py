"""What a device has to hold: parameters, gradients, optimizer state, saved activations, gathered copies.

In: a `Schedule` and an `Optimizer`. Out: `Holding`s, bytes that are either whole on every device or cut like an index;
`bytes_per_kind` adds them up for given shares.

    stored parameter            bytes · (1 + 1 if trained + state of the optimizer)        `stored`
    saved for backward          what `Node.saved` names, in the placement of the copy that
                                the step uses; what the op makes for itself scales as the
                                rule cuts                                                  `_saved`
                                of a checkpointed region what it takes from outside, and   `_taken`
                                what it keeps of what its nodes made                       `_made`
                                the same of one that saves in the memory of the host
    recomputed                  the rest of what its steps save, while it runs backward:
                                of one region at a time                                    `_working`
    gathered copies             of parameters: all of them until the backward pass, or,
                                regathered, the largest two at once; of a checkpointed
                                region all, but of one region at a time                    `_gathered`
    streamed                    optimizer state that is in host memory or in 8 bits, while it
                                is written out here for the update: of the largest slice,
                                and nothing that is saved or at work is there any more      `_streamed`
    waiting                     gradients of gathered parameters, whole, until a bucket of
                                them is full                                               `_waiting`
    between rounds              sums of gradients that the last round sends, and the rows
                                of all rounds                                              `_between_rounds`
    working                     of the largest step: operands and results that are not
                                held anyway, and their gradients                           `_working`
                                of a loss that runs some rows at a time, what one chunk
                                takes, and the gradients it makes for the backward pass    `_parts_in_chunks`

Recomputed and working bytes are those of the region and step that have most of both together.

Memory is counted once. A view is its operand's memory seen differently, and `I` and `R` are the same copy; so each
(value, placement) of a program is followed to the copy whose memory it is (`_Copies`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy as twin
from dataclasses import dataclass, replace

from lopsided.ir.graph import DTYPES, Graph, Leaf, Node, Saved, reruns, signature
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, Placement
from lopsided.ir.program import Fact, Step
from lopsided.ops.op import Call
from lopsided.schedule.coded_state import state_bytes
from lopsided.schedule.cost import Cut, Optimizer, Scale, cut_of, rule_cut
from lopsided.schedule.flops import work_of
from lopsided.schedule.host_state import slice_bytes
from lopsided.schedule.loss_heads import VIEWS
from lopsided.schedule.regions import RegionNodes
from lopsided.schedule.schedule import Chunked, Redistribute, ReduceBucket, Schedule

USES = (
    "parameter",
    "gradient",
    "optimizer",
    "buffer",
    "saved",
    "recomputed",
    "gathered",
    "waiting",
    "working",
    "streamed",
)


@dataclass(frozen=True, slots=True)
class Kinds:
    """Kinds of devices by their numbers: these, or all others."""

    numbers: frozenset[int] = frozenset()
    others: bool = True

    def have(self, kind: int) -> bool:
        return (kind in self.numbers) != self.others


EVERY_KIND = Kinds()


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of the whole tensor that a device holds: all of them, or the piece that `cut` gives it.

    What waits does so while saved activations go: it has filled up when its part of `of` bytes is done with. What runs
    again on some kinds of devices only is held differently there (`on`).
    """

    what: str
    use: str  # one of USES
    bytes: int
    cut: Cut | None
    of: int = 0
    on: Kinds = EVERY_KIND


def stored(leaf: Leaf, placement: Placement, optimizer: Optimizer, state_bits: int = 0) -> tuple[Holding, ...]:
    """A leaf from step to step: a parameter with its gradient and state, a buffer, or what is loaded of an input."""
    size, cut, name = leaf.value.bytes, cut_of(placement, leaf.value.shape), leaf.value.name
    if leaf.kind != "parameter":
        return (Holding(name, "saved" if leaf.kind == "input" else "buffer", size, cut),)
    held = [Holding(name, "parameter", size, cut)]
    if leaf.value.grad:
        held.append(Holding(name, "gradient", size, cut))
        if optimizer.state:
            held.append(Holding(name, "optimizer", state_bytes(optimizer, leaf.value, state_bits), cut))
    return tuple(held)


def saved_by(graph: Graph, node: Node, rule: Rule) -> tuple[Holding, ...]:
    """What one node keeps for its backward pass under a rule, seen by itself.

    Named by the value whose memory it is. Several nodes may name the same (what, cut): it is held once. Parameters and
    what is fixed are held anyway, and not named. A node of a checkpointed region keeps what it takes from outside.
    """
    sharing = _sharing(graph)
    roots = sharing.roots
    results = [value.name for value in node.results]
    copies = [*zip(node.operands, rule.needs, strict=True), *zip(results, rule.gives, strict=True)]
    anyway = graph.parameter_names | graph.fixed
    outside = sharing.reruns.get(node.name)
    kept = _kept(node).values if outside is None else tuple(node.operands[k] for k in outside)
    found: dict[tuple[str, Cut | None], Holding] = {}
    for name, placement in copies:
        if name in kept and roots[name] not in anyway:
            value = graph.values[name]
            cut = cut_of(placement, value.shape)
            found.setdefault((roots[name], cut), Holding(roots[name], "saved", value.bytes, cut))
    return (*found.values(), *(_extra(graph, node, rule) if outside is None else ()))


def saved_in(graph: Graph, steps: Sequence[Step]) -> dict[Cut | None, int]:
    """Bytes that consecutive steps keep, seen by themselves, by what cuts them."""
    return _by_cut(_saved_by_steps(graph, steps, _Copies.of_steps(graph, steps), "saved"))


def taken_by(graph: Graph, steps: Sequence[Step], kept: set[str]) -> dict[Cut | None, int]:
    """The same, if they run again, for what they take from outside and what these nodes have made."""
    copies = _Copies.of_steps(graph, steps)
    of_nodes = [step for step in steps if step.node.name in kept]
    return _by_cut(itertools.chain(_taken(steps, copies), _made(graph, of_nodes, copies)))


def _by_cut(held: Iterable[Holding]) -> dict[Cut | None, int]:
    found: dict[Cut | None, int] = {}
    for holding in held:
        found[holding.cut] = found.get(holding.cut, 0) + holding.bytes
    return found


def holdings(schedule: Schedule, optimizer: Optimizer, *, devices: int = 1) -> tuple[Holding, ...]:
    """Everything a device holds when it holds most.

    Which node works with most memory depends on how large pieces are: it is picked for `devices` equal shares.
    """
    program = schedule.program
    placed = dict(program.leaves)
    found: list[Holding] = []
    updated = {value.name for value in program.graph.updated}
    away = {update.parameter: Kinds(frozenset(update.on_host)) for update in schedule.update if update.on_host}
    for leaf in program.graph.leaves:
        held = stored(leaf, placed[leaf.value.name], optimizer, schedule.decisions.state_bits)
        if (here := away.get(leaf.value.name)) is not None:
            held = tuple(replace(one, on=here) if one.use == "optimizer" else one for one in held)
        # What nobody uses never has a gradient, and so no state.
        found += (one for one in held if one.use not in ("gradient", "optimizer") or leaf.value.name in updated)
    found += _gathered(schedule)
    found += _waiting(schedule)
    found += _between_rounds(schedule)
    found += _streamed(schedule, optimizer, 1 / devices)
    for on in _kinds_apart(schedule):
        copies, stretches = _Copies.of_schedule(schedule), list(_but_chunked(schedule, _stretches(schedule, on)))
        held = (*_saved(schedule, stretches, copies), *_working(schedule, stretches, copies, placed, 1 / devices))
        found += held if on == EVERY_KIND else (replace(holding, on=on) for holding in held)
    return tuple(found)


def _kinds_apart(schedule: Schedule) -> Iterator[Kinds]:
    """Kinds of devices that run the same again: those that some region names, each for itself, and all others."""
    regions, offloaded = schedule.regions, schedule.offloaded
    named = {kind for region in regions.values() for kind in region.kinds}
    named |= {kind for region in offloaded.values() for kind in region.kinds}
    alike: dict[tuple[str, ...], set[int]] = {}
    for kind in sorted(named):
        again = tuple(name for name, region in regions.items() if region.runs_on(kind))
        again += tuple(name for name, region in offloaded.items() if region.is_on(kind))
        alike.setdefault(again, set()).add(kind)
    yield from (Kinds(frozenset(kinds), others=False) for kinds in alike.values())
    yield Kinds(frozenset(named))


_Stretch = tuple[str, list[Step]]


def _stretches(schedule: Schedule, on: Kinds | None = None) -> Iterator[_Stretch]:
    """The nodes in the order they run, in stretches that one region recomputes, with its id, or none.

    On some kinds of devices, which run the same again, with regions of which what is saved is in host memory; otherwise
    wherever there is a region that runs again.
    """
    region_of = schedule.recomputed
    if on is not None:
        kind = -1 if on.others else min(on.numbers)
        there = {name for name, region in schedule.regions.items() if region.runs_on(kind)}
        region_of = {node: region for node, region in region_of.items() if region in there}
        away = {name: region for name, region in schedule.offloaded.items() if region.is_on(kind)}
        region_of = {node: name for name, region in away.items() for node in region.nodes} | region_of
    for region, steps in itertools.groupby(schedule.program.steps, key=lambda step: region_of.get(step.node.name, "")):
        yield region, list(steps)


def _but_chunked(schedule: Schedule, stretches: Iterable[_Stretch]) -> Iterator[_Stretch]:
    """Without the nodes that run some rows at a time: these keep nothing."""
    for region, steps in stretches:
        yield region, [step for step in steps if step.node.name not in schedule.chunked]


def bytes_per_kind(held: Sequence[Holding], scale: Scale) -> tuple[int, ...]:
    """Bytes on the fullest device of each kind."""
    kinds = range(len(scale.cluster.kinds))
    saved = _added_up([h for h in held if h.use == "saved"], scale)
    rest = _added_up([h for h in held if h.use not in ("saved", "waiting", "streamed")], scale)
    streamed = any(h.use == "streamed" for h in held)
    updating = _added_up([h for h in held if h.use in _AT_UPDATE], scale) if streamed else [0.0 for _ in kinds]
    # Going backward, gradients gather in a bucket and activations go. Either there is most at the start, or when the
    # bucket is full.
    waiting = [h for h in held if h.use == "waiting"]
    more = [sum(h.bytes * max(1 - saved[k] / h.of, 0.0) for h in waiting) for k in kinds]
    return tuple(round(max(saved[k] + rest[k] + more[k], updating[k])) for k in kinds)


_AT_UPDATE = ("parameter", "gradient", "optimizer", "buffer", "streamed")
"""What is there while the optimizer updates: nothing that is saved or at work is any more."""


def _streamed(schedule: Schedule, optimizer: Optimizer, even: float) -> Iterator[Holding]:
    """On devices whose state is in host memory, or in few bits, the largest slice of it that is there for an update: of
    one large parameter, or of several small ones. And as much again, which an update of so much works with."""
    if not optimizer.state:
        return
    named = sorted({k for update in schedule.update for k in update.on_host})
    everywhere = any(update.bits for update in schedule.update)
    kinds = [(k, Kinds(frozenset((k,)), others=False)) for k in named]
    kinds += [(-1, Kinds(frozenset(named)))] if everywhere else []
    values = schedule.program.graph.values
    for k, on in kinds:
        fetched = [(values[one.parameter], one.placement) for one in schedule.update if k in one.on_host or one.bits]
        parts = [(optimizer.state * value.bytes, cut_of(placement, value.shape)) for value, placement in fetched]
        sizes = [size if cut is None else size * even for size, cut in parts]
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        yield Holding(
            f"state of {fetched[largest][0].name}", "streamed", 2 * parts[largest][0], parts[largest][1], on=on
        )
        if (more := round(slice_bytes(sum(sizes)) - sizes[largest])) > 0:
            yield Holding("state of small parameters", "streamed", 2 * more, None, on=on)


def _added_up(held: Sequence[Holding], scale: Scale) -> list[float]:
    totals: dict[tuple[Cut | None, Kinds], int] = {}
    for holding in held:
        key = (holding.cut, holding.on)
        totals[key] = totals.get(key, 0) + holding.bytes
    parts = [(size, scale.fractions(cut), on) for (cut, on), size in totals.items()]
    kinds = range(len(scale.cluster.kinds))
    return [sum(size * fractions[k] for size, fractions, on in parts if on.have(k)) for k in kinds]


def _waiting(schedule: Schedule) -> Iterator[Holding]:
    """Gradients of whole copies wait for each other, before they are summed and cut."""
    size = sum(
        item.transfer.whole_bytes
        for item in schedule.backward
        if isinstance(item, Redistribute)
        and item.bucket
        and item.transfer is not None
        and item.transfer.collective == "reduce_scatter"
    )
    if size:
        most = min(size, schedule.decisions.bucket_bytes)
        yield Holding("gradients in a bucket", "waiting", most, None, size)


def _between_rounds(schedule: Schedule) -> Iterator[Holding]:
    """What rounds have beside what one has: the other rounds' rows, and gradients that are still to be sent."""
    others, program = schedule.decisions.microbatches - 1, schedule.program
    if not others:
        return
    placed = dict(program.leaves)
    for leaf in program.graph.leaves:
        if leaf.kind == "input":
            cut = cut_of(placed[leaf.value.name], leaf.value.shape)
            yield Holding(leaf.value.name, "saved", leaf.value.bytes * others, cut)
    last = {
        member
        for item in schedule.backward
        if isinstance(item, ReduceBucket) and not schedule.is_sent_in(item, 0)
        for member in item.members
    }
    for item in schedule.backward:
        if item.id in last and isinstance(item, Redistribute):
            value = program.graph.values[item.value]
            yield Holding(value.name, "gradient", value.bytes, cut_of(item.source, value.shape))


# Whose memory it is


def _whole_alike(copy: Fact) -> Fact:
    return (copy[0], I) if copy[1].is_whole else copy


class _Copies:
    """Follows every (value, placement) of a program to the copy whose memory it is."""

    def __init__(self, graph: Graph, steps: Sequence[Step], held: Iterable[Fact]) -> None:
        self.values = graph.values
        self.memory: dict[Fact, Fact] = {}
        self.held: set[Fact] = {_whole_alike(copy) for copy in held}
        views = _sharing(graph).views
        for step in steps:
            if step.node.name in views:
                whose = self.of(step.node.operands[0], step.rule.needs[0])
                for copy in step.made:
                    self.memory[_whole_alike(copy)] = whose

    @staticmethod
    def of_schedule(schedule: Schedule) -> _Copies:
        """Those of a step. Copies of parameters are counted where they are gathered."""
        program = schedule.program
        parameters = program.graph.parameter_names
        of_parameters = [(item.value, item.to) for item in schedule.redistributed if item.value in parameters]
        return _Copies(program.graph, program.steps, [*program.leaves, *of_parameters])

    @staticmethod
    def of_steps(graph: Graph, steps: Sequence[Step]) -> _Copies:
        """Those of some steps by themselves. Leaves are held anyway, and so is what is fixed."""
        anyway = {leaf.value.name for leaf in graph.leaves} | graph.fixed
        taken = [(name, p) for step in steps for name, chain in step.taken for p in chain if name in anyway]
        return _Copies(graph, steps, taken)

    def of(self, name: str, placement: Placement) -> Fact:
        copy = _whole_alike((name, placement))
        return self.memory.get(copy, copy)

    def hold(self, copy: Fact) -> bool:
        """Hold a copy; whether it was not held before."""
        if copy in self.held:
            return False
        self.held.add(copy)
        return True

    def apart(self) -> _Copies:
        """The same, with what is held from here on for itself."""
        other = twin(self)
        other.held = set(self.held)
        return other

    def holding(self, copy: Fact, use: str) -> Holding:
        value = self.values[copy[0]]
        return Holding(value.name, use, value.bytes, cut_of(copy[1], value.shape))


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Which values of a graph share memory: nodes whose results are views, and for each value whose memory it is.

    And which nodes run again instead of keeping anything.
    """

    views: frozenset[str]
    roots: Mapping[str, str]
    reruns: Mapping[str, tuple[int, ...]]


_SEEN: dict[int, tuple[weakref.ref[Graph], _Sharing]] = {}


def _sharing(graph: Graph) -> _Sharing:
    """Remembered for each graph that is alive."""
    seen = _SEEN.get(id(graph))
    if seen is not None and seen[0]() is graph:
        return seen[1]
    for number in [number for number, (graph_of, _) in _SEEN.items() if graph_of() is None]:
        del _SEEN[number]
    views = _views(graph)
    roots = {leaf.value.name: leaf.value.name for leaf in graph.leaves}
    for node in graph.nodes:
        for value in node.results:
            roots[value.name] = roots[node.operands[0]] if node.name in views else value.name
    _SEEN[id(graph)] = (weakref.ref(graph), _Sharing(views, roots, reruns(graph)))
    return _SEEN[id(graph)][1]


def _views(graph: Graph) -> frozenset[str]:
    known: dict[object, bool] = {}
    found = set()
    for node in graph.nodes:
        key = signature(node, graph.values)
        if key not in known:
            call = Call.of(node, graph.values)
            # Only a view launches nothing.
            known[key] = bool(node.operands) and work_of(call).kernels[0] == 0
        if known[key]:
            found.add(node.name)
    return frozenset(found)


# What is held


def _kept(node: Node) -> Saved:
    """What a node keeps on the devices it is planned for.

    Capture saw kernels of the CPU, and there attention with dropout keeps its scores, and dropout a mask of numbers.
    Flash and memory-efficient attention keep operands, result, and a number a row; dropout on a GPU a mask of bytes.
    """
    if node.op.startswith("aten.dropout.") and node.saved.extra_bytes:
        return replace(node.saved, extra_bytes=node.results[0].elements)
    if node.saved == Saved() or not node.op.startswith("aten.scaled_dot_product_attention."):
        return node.saved
    out = node.results[0]
    rows = out.elements // max(out.shape[-1], 1)
    return Saved(tuple(dict.fromkeys((*node.operands, out.name))), 4 * rows)


_Stretches = Sequence[_Stretch]


def _saved(schedule: Schedule, stretches: _Stretches, copies: _Copies) -> Iterator[Holding]:
    graph = schedule.program.graph
    for region, steps in stretches:
        if region:
            yield from _taken(steps, copies)
            kept = _kept_by(schedule, region)
            yield from _made(graph, [step for step in steps if step.node.name in kept], copies)
        else:
            yield from _saved_by_steps(graph, steps, copies, "saved")


def _kept_by(schedule: Schedule, region: str) -> set[str]:
    """The nodes whose results a region keeps; one in host memory keeps none."""
    return {*schedule.regions[region].kept} if region in schedule.regions else set()


def sent_to_host(schedule: Schedule) -> Iterator[tuple[RegionNodes, str, tuple[Holding, ...]]]:
    """Of every node whose region saves in host memory what it makes, with the region. What a region takes from outside
    stays where it is."""
    for region in schedule.offloaded.values():
        steps, copies = [schedule.steps[name] for name in region.nodes], _Copies.of_schedule(schedule)
        list(_taken(steps, copies))
        for step in steps:
            yield region, step.node.name, tuple(_saved_by_steps(schedule.program.graph, [step], copies, "saved"))


def _made(graph: Graph, kept: Sequence[Step], copies: _Copies) -> Iterator[Holding]:
    """What nodes make that a region keeps in place of running them again; casts for their own use are made again."""
    parameters = graph.parameter_names
    for step in kept:
        for copy in step.made:
            whose = copies.of(*copy)
            if copies.hold(whose):
                yield copies.holding(whose, "saved")
        if parameters.isdisjoint(step.node.operands):
            yield from _extra(graph, step.node, step.rule)


def _taken(stretch: Sequence[Step], copies: _Copies) -> Iterator[Holding]:
    """What a checkpointed region has from outside, in the placement it is there in: conversions are made again."""
    inside: set[Fact] = set()
    for step in stretch:
        for name, chain in step.taken:
            whose = copies.of(name, chain[0])
            if (name, chain[0]) not in inside and copies.hold(whose):
                yield copies.holding(whose, "saved")
            inside.update((name, placement) for placement in chain)
        inside.update(step.made)


def _saved_by_steps(graph: Graph, steps: Sequence[Step], copies: _Copies, use: str) -> Iterator[Holding]:
    for step in steps:
        node, rule = step.node, step.rule
        for name in _kept(node).values:
            placements = [n for operand, n in zip(node.operands, rule.needs, strict=True) if operand == name]
            placements += [g for value, g in zip(node.results, rule.gives, strict=True) if value.name == name]
            for placement in placements:
                whose = copies.of(name, placement)
                if copies.hold(whose):
                    yield copies.holding(whose, use)
        yield from _extra(graph, node, rule, use)


def _recomputed(graph: Graph, steps: Sequence[Step], kept: set[str], copies: _Copies) -> Iterator[Holding]:
    """What the steps of a region save when they run again; what attention makes for itself may have been kept."""
    parameters = graph.parameter_names
    for step in steps:
        own = f"{step.node.name} (its own)"
        was_kept = step.node.name in kept and parameters.isdisjoint(step.node.operands)
        for holding in _saved_by_steps(graph, [step], copies, "recomputed"):
            if not (was_kept and holding.what == own):
                yield holding


def _extra(graph: Graph, node: Node, rule: Rule, use: str = "saved") -> Iterator[Holding]:
    """What an op makes for itself to keep (masks, statistics) scales with its pieces.

    Under autocast it also keeps operands it has cast. Those of whole matrices stay whole.
    """
    extra = _kept(node).extra_bytes
    if not extra:
        return
    _, _, under = node.context.autocast.partition(":")
    whole = 0
    if under in DTYPES:
        for name, need in zip(node.operands, rule.needs, strict=True):
            value = graph.values[name]
            if not need.is_shard and len(value.shape) > 1 and value.torch_dtype.is_floating_point:
                whole += value.elements * DTYPES[under].itemsize if value.dtype != under else 0
    whole = min(whole, extra)
    call = Call.of(node, graph.values)
    cut = rule_cut(call, rule)
    if whole and cut is not None:
        yield Holding(f"{node.name} (its own)", use, whole, None)
        extra -= whole
    if extra:
        yield Holding(f"{node.name} (its own)", use, extra, cut)


def _gathered(schedule: Schedule) -> Iterator[Holding]:
    """Copies of parameters that are no slice of what is stored.

    Those that are gathered again are there a few at a time: for a checkpointed region together, until it has run
    backward.
    """
    parameters = schedule.program.graph.parameter_names
    region_of = _regions(schedule)
    together: dict[object, list[Holding]] = {}
    for item in schedule.redistributed:
        if item.value not in parameters or (item.source.is_whole and item.to.kind != "P"):
            continue
        value = schedule.program.graph.values[item.value]
        holding = Holding(value.name, "gathered", value.bytes, cut_of(item.to, value.shape))
        region = region_of.get((item.value, item.to), "")
        gathered = item.transfer is not None and item.transfer.collective == "all_gather"
        if (schedule.decisions.regather or region) and gathered:
            together.setdefault(region or holding, []).append(holding)
        else:
            yield holding
    groups = sorted(together.values(), key=lambda group: -sum(holding.bytes for holding in group))
    for group in groups[:1]:
        yield from group
    ahead = sorted((holding for group in groups[1:] for holding in group), key=lambda holding: -holding.bytes)
    yield from ahead[: schedule.decisions.prefetch - 1]


def _regions(schedule: Schedule) -> dict[Fact, str]:
    """The copies of values that one checkpointed region uses and no other node, with its id."""
    users: dict[Fact, set[str]] = {}
    for region, steps in _stretches(schedule):
        for step in steps:
            for copy in step.needed:
                users.setdefault(copy, set()).add(region)
    return {copy: min(regions) for copy, regions in users.items() if len(regions) == 1 and regions != {""}}


def _working(
    schedule: Schedule, stretches: _Stretches, copies: _Copies, placed: Mapping[str, Placement], even: float
) -> tuple[Holding, ...]:
    """Of the node that works with most, together with what its checkpointed region has recomputed."""
    graph = schedule.program.graph
    parameters = graph.parameter_names
    views = _sharing(graph).views
    most = 0.0
    found: tuple[Holding, ...] = ()
    for region, steps in stretches:
        held = copies
        again: tuple[Holding, ...] = ()
        if region:
            held = copies.apart()
            kept = _kept_by(schedule, region)
            again = tuple(_recomputed(graph, steps, kept, held))
        recomputed = sum(holding.bytes if holding.cut is None else holding.bytes * even for holding in again)
        for step in steps:
            if step.node.name in views:
                continue
            parts: dict[Cut | None, int] = {}
            for size, cut in _parts_at_work(step, held, placed, parameters):
                parts[cut] = parts.get(cut, 0) + size
            total = recomputed + sum(size if cut is None else size * even for cut, size in parts.items())
            if total > most:
                most = total
                found = (*again, *(Holding(step.node.name, "working", size, cut) for cut, size in parts.items()))
    for chunked in (item for item in schedule.forward if isinstance(item, Chunked)):
        inside = [schedule.steps[name] for name in chunked.nodes]
        parts = {}
        for size, cut in _parts_in_chunks(inside, chunked.rows, copies, placed, parameters):
            parts[cut] = parts.get(cut, 0) + size
        total = sum(size if cut is None else size * even for cut, size in parts.items())
        if total > most:
            most = total
            found = tuple(Holding(inside[-1].node.name, "working", size, cut) for cut, size in parts.items())
    return found


def _parts_in_chunks(
    steps: Sequence[Step], rows: int, copies: _Copies, placed: Mapping[str, Placement], parameters: frozenset[str]
) -> Iterator[tuple[int, Cut | None]]:
    """What is multiplied, its gradients (sums over rows in a wide dtype), and the logits of so many rows."""
    product, *between, loss = steps
    logits = product.node.results[0].torch_dtype.itemsize
    wide = max(logits, DTYPES["f32"].itemsize)
    for k, (name, placement) in enumerate(product.needed):
        value, cut = copies.values[name], cut_of(placement, copies.values[name].shape)
        if name not in parameters and copies.of(name, placement) not in copies.held:
            yield value.bytes, cut
        as_stored = name in parameters and _whole_alike((name, placement)) == (name, placed[name])
        if k:
            cast = logits if logits != value.torch_dtype.itemsize else 0
            given = 0 if as_stored else value.torch_dtype.itemsize
            one_chunk = logits if logits != wide else 0
            summed = wide + max(one_chunk + cast, given) if value.grad else cast
            yield value.elements * summed, cut
        elif value.grad:
            yield value.bytes, cut
    of_loss = loss.node.operands[0]
    each = logits + (wide if copies.values[of_loss].torch_dtype.itemsize != wide or logits != wide else 0)
    each += logits if logits != wide else 0  # the gradient that is multiplied on
    each += sum(2 * step.node.results[0].torch_dtype.itemsize for step in between if step.node.op not in VIEWS)
    yield min(rows, copies.values[of_loss].shape[0]) * copies.values[of_loss].shape[1] * each, None


def _parts_at_work(
    step: Step, copies: _Copies, placed: Mapping[str, Placement], parameters: frozenset[str]
) -> Iterator[tuple[int, Cut | None]]:
    values = copies.values
    seen: set[Fact] = set()
    for name, placement in (*dict.fromkeys(step.needed), *step.made):
        value = values[name]
        copy = copies.of(name, placement)
        if name not in parameters and copy not in copies.held and copy not in seen:
            seen.add(copy)
            held = copies.holding(copy, "working")
            yield held.bytes, held.cut
        # The gradient of a parameter that is used as it is stored is the one that is held.
        if value.grad and not (name in parameters and _whole_alike((name, placement)) == (name, placed[name])):
            yield value.bytes, cut_of(placement, value.shape)
        if step.rule.how == "sfb" and placement.is_shard and value.torch_dtype.is_floating_point:
            yield value.bytes, None
