"""A program laid out in time: what every device computes and what all of them send, in order, still without shares.

In: a `Program` and its `Costs`. Out: `Schedule`, three lists: forward, backward, optimizer. What `timeline` runs, and
what the linear program over shares sums up.

The backward pass is the forward pass in reverse. A copy that a conversion made may have several consumers; the
first of them in the forward pass is the last in the backward pass, and right after it the cotangent of the copy is
complete and is converted back. So the transpose of a conversion stands where going backward passes the step that made
it.

The steps of a checkpointed region are a stretch of the program (`Program.stretches`) that runs forward again before its
backward pass (`lopsided.ir.recompute`): it computes, converts and gathers all it did the first time.

What goes between parameters and their copies hides: gathering may start ahead of its place, and gradients are only
waited for by the optimizer. What converts activations blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lopsided.ir.graph import Leaf
from lopsided.ir.placement import Placement
from lopsided.ir.program import Chain, Program, Step
from lopsided.ir.recompute import reruns
from lopsided.schedule.cost import FREE, Affine, Costs, Cut, Transfer, conversion, cut_of

__all__ = ["BUCKET_BYTES", "GATHERS_AT_ONCE", "Compute", "Cut", "Item", "Schedule", "Transfer", "lay_out", "regathered"]

BUCKET_BYTES = 25 * 2**20
"""How many bytes of small tensors are sent together: what DistributedDataParallel does unless told otherwise."""

GATHERS_AT_ONCE = 2
"""How many gathered copies exist at once where they are freed after use: one in use, the next one on its way."""

_Copy = tuple[str, Placement]


@dataclass(frozen=True, slots=True)
class Compute:
    """What one node (of the optimizer: one parameter) computes: seconds for each kind of device."""

    node: str
    backward: bool
    seconds: tuple[Affine, ...]
    cut: Cut | None


Item = Compute | Transfer


@dataclass(frozen=True, slots=True)
class Schedule:
    """A training step in order. What costs nothing is left out. What hides is sent so many bytes at a time."""

    forward: tuple[Item, ...]
    backward: tuple[Item, ...]
    optimizer: tuple[Compute, ...]
    bucket_bytes: int = BUCKET_BYTES

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(item for item in (*self.forward, *self.backward) if isinstance(item, Transfer))

    @property
    def computes(self) -> tuple[Compute, ...]:
        passes = (item for item in (*self.forward, *self.backward) if isinstance(item, Compute))
        return (*passes, *self.optimizer)


def lay_out(program: Program, costs: Costs, *, regather: bool = False, bucket_bytes: int = BUCKET_BYTES) -> Schedule:
    """The schedule of a program. With `regather`, gathered parameters are freed after their forward use, and gathered
    once more for the backward pass where it needs them.
    """
    parameters = {leaf.value.name for leaf in program.graph.parameters}
    made: set[_Copy] = set(program.leaves)
    forward: list[Item] = []
    rerun: dict[str, list[Item]] = {}  # of each node in a checkpointed region: what it does once more
    # Of each step: how many conversions it made, and their transposes, in the order to run them.
    undo: list[tuple[int, list[Transfer]]] = []

    for step in program.steps:
        taken: list[Transfer] = []
        back: list[Transfer] = []
        conversions = 0
        for name, chain in zip(step.node.operands, step.chains, strict=True):
            for there, and_back in _conversions(program, name, chain, made):
                conversions += 1
                is_parameter = name in parameters
                if there is not None:
                    taken.append(replace(there, hides=True, ahead=True) if is_parameter else there)
                if and_back is not None:
                    back.append(replace(and_back, hides=True) if is_parameter else and_back)
        made.update((v.name, give) for v, give in zip(step.node.results, step.rule.gives, strict=True))
        undo.append((conversions, back[::-1]))
        cost = costs.op(step.node, step.rule)
        computed: list[Item] = []
        seconds = _and_around(cost.forward, costs, conversions, taken)
        if not _is_free(seconds):
            computed.append(Compute(step.node.name, False, seconds, cost.cut))
        computed += [_named(talk, step) for talk in cost.talks]
        forward += [*taken, *computed]
        if step.node.name in costs.reruns:
            rerun[step.node.name] = [*(transfer for transfer in taken if not transfer.ahead), *computed]

    ends: list[Transfer] = []
    updates = zip((name for _, name in program.graph.updates), program.updates, strict=True)
    for name, chain in ((program.graph.loss, program.loss), *updates):
        for there, and_back in _conversions(program, name, chain, made):
            forward += [there] if there is not None else []
            ends += [and_back] if and_back is not None else []

    gathered = regathered(program, regather=regather)
    backward: list[Item] = [*ends[::-1]]
    for stretch in reversed(program.stretches()):
        for step in stretch if stretch[0].node.name in rerun else ():
            backward += [*gathered.pop(step.node.name, ()), *rerun[step.node.name]]
        for step in reversed(stretch):
            cost = costs.op(step.node, step.rule)
            backward += gathered.get(step.node.name, ())
            backward += [_named(talk, step) for talk in cost.back_talks]
            conversions, transposes = undo.pop()
            seconds = _and_around(cost.backward, costs, conversions, transposes)
            if not _is_free(seconds):
                backward.append(Compute(step.node.name, True, seconds, cost.cut))
            backward += transposes
    return Schedule(tuple(forward), tuple(backward), tuple(_optimizer(program, costs)), bucket_bytes)


def _conversions(
    program: Program, name: str, chain: Chain, made: set[_Copy]
) -> Iterator[tuple[Transfer | None, Transfer | None]]:
    """What a chain sends; a copy that is there already is not made again."""
    for source, to in itertools.pairwise(chain):
        if (name, to) not in made:
            made.add((name, to))
            yield conversion(program.graph.values[name], source, to)


def _and_around(
    seconds: tuple[Affine, ...], costs: Costs, conversions: int, sent: Sequence[Transfer]
) -> tuple[Affine, ...]:
    """And what processes take around the conversions that an op made: their own work, and packing what is sent."""
    if not conversions or not any((*costs.overheads, *costs.packing)):
        return seconds
    size = sum(transfer.whole_bytes for transfer in sent)
    around = zip(seconds, costs.overheads, costs.packing, strict=True)
    return tuple(s + Affine(conversions * extra + size * packing) for s, extra, packing in around)


def _is_free(seconds: tuple[Affine, ...]) -> bool:
    return all(affine == FREE for affine in seconds)


def _named(talk: Transfer, step: Step) -> Transfer:
    return replace(talk, what=f"{step.node.name}: {talk.what}")


def _optimizer(program: Program, costs: Costs) -> Iterator[Compute]:
    leaves: dict[str, Leaf] = {leaf.value.name: leaf for leaf in program.graph.parameters}
    for name, placement in program.leaves:
        if name in leaves and leaves[name].value.grad:
            seconds = costs.update(leaves[name], placement)
            yield Compute(name, True, seconds, cut_of(placement, leaves[name].value.shape))


def regathered(program: Program, *, regather: bool = True) -> dict[str, tuple[Transfer, ...]]:
    """For each node, what is gathered again before its backward pass: copies it keeps of parameters stored cut.

    Once for each copy, before the first backward use, which is the last forward use. The nodes of a checkpointed region
    gather again what they gathered, before they run again; without `regather` only they do.
    """
    parameters = {leaf.value.name for leaf in program.graph.parameters}
    gathered: dict[_Copy, Transfer] = {}
    for value, source, to in program.conversions():
        there, _ = conversion(value, source, to)
        if there is not None and there.collective == "all_gather" and value.name in parameters:
            gathered[value.name, to] = replace(there, hides=True, ahead=True)
    found: dict[str, list[Transfer]] = {}
    again = reruns(program.graph)
    for stretch in reversed(program.stretches()):
        if stretch[0].node.name in again:
            wanted = [(step.node.name, copy) for step in stretch for copy in _made(step)]
        else:
            wanted = [(step.node.name, copy) for step in reversed(stretch) if regather for copy in _kept(step)]
        for node, copy in wanted:
            if copy in gathered:
                found.setdefault(node, []).append(gathered.pop(copy))
    return {node: tuple(transfers) for node, transfers in found.items()}


def _made(step: Step) -> Iterator[_Copy]:
    for name, chain in zip(step.node.operands, step.chains, strict=True):
        yield from ((name, to) for to in chain[1:])


def _kept(step: Step) -> Iterator[_Copy]:
    if any(value.grad for value in step.node.results):
        for copy in zip(step.node.operands, step.rule.needs, strict=True):
            if copy[0] in step.node.saved.values:
                yield copy
