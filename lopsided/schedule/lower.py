"""A program and decisions → the lowered step.

In: a `Program`, `Decisions`. Out: `Schedule`, what every device does in a training step.

The backward pass is the forward pass in reverse. A copy that a redistribution made may have several consumers; the
first of them in the forward pass is the last in the backward pass, and right after it the cotangent of the copy is
complete and is redistributed back. So the transpose of a redistribution stands where going backward passes the node
that it was made for. A cotangent that nobody has (nothing that leads to the loss used the copy) is not sent.

A loss that runs some rows at a time (`Chunked`) does so forward and backward together, where it stands in the forward
pass: what it is made of runs there, and not in its own places, forward or backward. What its operands' gradients need
to be sent stays in the backward pass.

A checkpointed region (`Recompute`) runs forward again before its backward pass: it computes, redistributes and gathers
all it did the first time.

What goes between a stored parameter and its copies travels in buckets (`Buckets`), behind computing:

    gathered, forward     what consecutive consumers take, up to `bucket_bytes`; what one consumer takes is never
    parted.
                          `prefetch` buckets exist at once: the next starts when the first of the one before it is taken
    gathered, backward    the same: copies that `regather` has freed, and those of checkpointed regions
    gradients             in the order in which they are complete; a bucket is sent when it has `bucket_bytes`, and
                          what is left at the end

Nodes between two communications may run as one function (`stretches`): then what they take comes before the first of
them, and what they give after the last.

A bucket holds one dtype and one collective, because it is one buffer. What changes the placement of anything else, or
of a copy that was redistributed before, is waited for by all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lopsided.ir.placement import Placement
from lopsided.ir.program import Chain, Program, Step
from lopsided.ops.simulated_devices import cotangent
from lopsided.schedule.coded_state import bits_of_state
from lopsided.schedule.cost import Transfer, conversion, sent_by
from lopsided.schedule.decisions import Decisions
from lopsided.schedule.host_state import kept_on_host
from lopsided.schedule.loss_heads import LossHead, chunks_of
from lopsided.schedule.regions import offloaded_of, regions_of
from lopsided.schedule.schedule import (
    Bucket,
    Chunked,
    Compute,
    Exchange,
    GatherBucket,
    Item,
    Recompute,
    Redistribute,
    ReduceBucket,
    Schedule,
    Stretch,
    Update,
    compute_id,
    counted,
    exchange,
)
from lopsided.schedule.stretches import Joinable, grouped

_Copy = tuple[str, Placement]
_Runs = TypeVar("_Runs", bound=Compute | Exchange | Redistribute)
_Kind = TypeVar("_Kind", GatherBucket, ReduceBucket)
IN_A_BUCKET = "?"
"""The bucket of a redistribution that travels in one, until that has a name."""


def lower(program: Program, decisions: Decisions | None = None) -> Schedule:
    """What every device does in a step of this program."""
    return _Lowering(program, decisions or Decisions()).schedule()


def rebucketed(schedule: Schedule, bucket_bytes: int) -> Schedule:
    """The same step with other buckets: what `lower` makes with them, without lowering anew.

    What is computed, redistributed and packed does not depend on buckets, nor does the order of it.
    """
    decisions = replace(schedule.decisions, bucket_bytes=bucket_bytes)
    buckets = Buckets(decisions)
    forward, backward = (
        tuple(buckets.filled([item for item in items if not isinstance(item, Bucket)]))
        for items in (schedule.forward, schedule.backward)
    )
    return Schedule(schedule.program, decisions, forward, backward, schedule.update)


@dataclass(slots=True)
class _Lowered:
    """One step of the program."""

    step: Step
    made: list[Redistribute]  # copies that are made for it going forward
    forward: list[Compute | Exchange | Redistribute]
    back: list[Redistribute] = field(default_factory=list)  # their transposes, in the order to run them


class _Lowering:
    def __init__(self, program: Program, decisions: Decisions) -> None:
        self.program, self.decisions = program, decisions
        self.stored = dict(program.leaves)
        self.parameters = program.graph.parameter_names
        self.marked = regions_of(program, decisions)
        self.regions = {name: k for k, region in enumerate(self.marked) for name in region.nodes}
        away = offloaded_of(program, decisions)
        self.away = {name: k for k, region in enumerate(away) for name in region.nodes}
        heads = chunks_of(program, decisions)
        self.heads = {head.last: (head, rows) for head, rows in heads}
        self.chunked = {name for head, _ in heads for name in head.nodes}
        self.made: set[_Copy] = set(program.leaves)
        self.steps = [self._forward(step) for step in program.steps]
        self.ends = list(self._ends())
        self.reached = self._reached()

    def schedule(self) -> Schedule:
        for one in self.steps:
            one.back = [back for item in reversed(one.made) for back in self._transpose(item)]
        program, buckets = self.program, Buckets(self.decisions)
        self.groups = list(self._grouped())
        forward = buckets.filled([*(item for group in self.groups for item in self._run_forward(group)), *self.ends])
        backward = buckets.filled(list(self._backward()))
        from_host = kept_on_host(program, self.decisions.on_host)
        bits = bits_of_state(program, self.decisions.state_bits)
        update = tuple(
            Update(f"update {name}", name, placement, from_host.get(name, ()), bits.get(name, 0))
            for name, placement in program.leaves
            if name in self.parameters and program.graph.values[name].grad
        )
        conversions = {one.step.node.name: len(one.made) for one in self.steps}
        passes = counted(forward, backward, conversions)
        return Schedule(program, self.decisions, *passes, update)

    # Forward

    def _forward(self, step: Step) -> _Lowered:
        name = step.node.name
        made: list[Redistribute] = []
        for operand, chain in step.taken:
            made += self._redistributed(operand, chain)
        self.made.update(step.made)
        made = _waited_for_first(made)
        talks, _ = sent_by(self.program.graph, step.node, step.rule)
        exchanges = [exchange(step, "forward", k, talk) for k, talk in enumerate(talks)]
        return _Lowered(step, made, [*made, Compute(name, name, "forward"), *exchanges])

    def _redistributed(self, name: str, chain: Chain) -> Iterator[Redistribute]:
        """What a chain makes; a copy that is there already is not made again."""
        for source, to in itertools.pairwise(chain):
            if (name, to) not in self.made:
                self.made.add((name, to))
                transfer, _ = conversion(self.program.graph.values[name], source, to)
                bucket = IN_A_BUCKET if transfer is not None and self._is_stored(name, source) else ""
                yield Redistribute(f"{name} {source}→{to}", name, source, to, "forward", transfer, bucket)

    def _is_stored(self, name: str, placement: Placement) -> bool:
        return name in self.parameters and placement == self.stored[name]

    def _ends(self) -> Iterator[Redistribute]:
        """The loss and the changed buffers become whole."""
        yield from self._redistributed(self.program.graph.loss, self.program.loss)
        for (_, name), chain in zip(self.program.graph.updates, self.program.updates, strict=True):
            yield from self._redistributed(name, chain)

    # Stretches

    def _grouped(self) -> Iterator[list[_Lowered]]:
        """The steps, those together that run as one function."""
        if not self.decisions.stretch:
            yield from ([one] for one in self.steps)
            return
        candidates = [self._candidate(one) for one in self.steps]
        for numbers in grouped(self.program, candidates, self.decisions.stretch):
            yield [self.steps[k] for k in numbers]

    def _candidate(self, one: _Lowered) -> Joinable:
        sends = any(isinstance(item, Exchange) for item in one.forward) or any(
            not item.bucket and not self._is_local(item) for item in one.made
        )
        _, talks_back = sent_by(self.program.graph, one.step.node, one.step.rule)
        region = self._region(one.step)
        # A node of a region that does not run again with it runs by itself.
        spared = region >= 0 and one.step.node.name not in self.marked[region].again
        apart = spared or one.step.node.name in self.chunked
        takes = None if sends or talks_back or apart else tuple(item.value for item in one.made)
        return Joinable(one.step, takes, (region, self.away.get(one.step.node.name, -1)))

    def _run_forward(self, group: Sequence[_Lowered]) -> Iterator[Item]:
        """A group where it stands; of a head that runs some rows at a time, all of it where its loss stands."""
        name = group[0].step.node.name
        if name not in self.chunked:
            yield from self._run_together(group)
        elif name in self.heads:
            yield from self._in_chunks(*self.heads[name])

    def _in_chunks(self, head: LossHead, rows: int) -> Iterator[Item]:
        inside = [one for one in self.steps if one.step.node.name in head.nodes]
        yield from (item for one in inside for item in one.made)
        yield Chunked(f"chunked.{head.first}", head.nodes, rows)
        yield from (item for one in inside for item in one.forward if not isinstance(item, Redistribute))
        yield from (item for one in reversed(inside) for item in self._run_back(one.step))

    def _is_local(self, item: Redistribute) -> bool:
        """It sends nothing, forward or backward, that anybody waits for: a gradient in a bucket travels behind."""
        return item.transfer is None and all(back.bucket for back in self._transpose(item))

    def _run_together(self, group: Sequence[_Lowered]) -> Iterator[Compute | Exchange | Redistribute | Stretch]:
        if len(group) == 1:
            yield from group[0].forward
            return
        first = group[0].step.node.name
        yield from (item for one in group for item in one.made)
        yield Stretch(f"stretch.{first}", tuple(one.step.node.name for one in group))
        yield from (item for one in group for item in one.forward if not isinstance(item, Redistribute))

    # Backward

    def _reached(self) -> set[_Copy]:
        """The copies that lead to the loss: these have a cotangent."""
        values = self.program.graph.values
        found = {(self.program.graph.loss, self.program.loss[-1])}
        for item in reversed(self.ends):
            if (item.value, item.to) in found:
                found.add((item.value, item.source))
        for one in reversed(self.steps):
            results = zip(one.step.node.results, one.step.rule.gives, strict=True)
            if any(value.grad and (value.name, give) in found for value, give in results):
                taken = one.step.needed
                found.update((name, need) for name, need in taken if values[name].grad)
            for item in reversed(one.made):
                if (item.value, item.to) in found:
                    found.add((item.value, item.source))
        return found

    def _runs_backward(self, step: Step) -> bool:
        results = zip(step.node.results, step.rule.gives, strict=True)
        return any(value.grad and (value.name, give) in self.reached for value, give in results)

    def _transpose(self, item: Redistribute) -> Iterator[Redistribute]:
        _, transfer = conversion(self.program.graph.values[item.value], item.source, item.to)
        if transfer is not None and (item.value, item.to) in self.reached:
            source, to = cotangent(item.to), cotangent(item.source)
            bucket = IN_A_BUCKET if self._is_stored(item.value, item.source) else ""
            yield Redistribute(f"∂{item.value} {source}→{to}", item.value, source, to, "backward", transfer, bucket)

    def _backward(self) -> Iterator[Item]:
        for item in reversed(self.ends):
            yield from self._transpose(item)
        regathered = self._regathered()
        inside = itertools.groupby(self.groups, key=lambda group: self._region(group[0].step))
        count = 0
        for groups in reversed([list(groups) for _, groups in inside]):
            if groups[0][0].step.node.name in self.regions:
                yield from self._recomputed(f"recompute.{count}", groups)
                count += 1
            for group in reversed(groups):
                for one in reversed(group):
                    yield from regathered.get(one.step.node.name, ())
                for one in reversed(group):
                    if one.step.node.name not in self.chunked:
                        yield from self._run_back(one.step)
                for one in reversed(group):
                    yield from one.back

    def _run_back(self, step: Step) -> Iterator[Item]:
        if self._runs_backward(step):
            name = step.node.name
            _, talks = sent_by(self.program.graph, step.node, step.rule)
            yield from (exchange(step, "backward", k, talk) for k, talk in enumerate(talks))
            yield Compute(compute_id(name, "backward"), name, "backward")

    def _region(self, step: Step) -> int:
        return self.regions.get(step.node.name, -1)

    def _recomputed(self, name: str, groups: Sequence[Sequence[_Lowered]]) -> Iterator[Item]:
        """A region runs again: its conversions, and of its nodes those that somebody needs and nobody has kept."""
        region = self.marked[self._region(groups[0][0].step)]
        items = [
            item
            for group in groups
            for item in self._run_together(group)
            if isinstance(item, Redistribute) or (not isinstance(item, Stretch) and item.node in region.again)
        ]
        # Who sends needs the others.
        sends = any(isinstance(i, Exchange) or (isinstance(i, Redistribute) and i.transfer is not None) for i in items)
        yield Recompute(name, region.nodes, region.kept, () if sends else region.kinds)
        yield from map(_again, items)

    def _regathered(self) -> Mapping[str, Sequence[Redistribute]]:
        """For each node the gathered copies that it saved and is the first to use backward: they are gathered again.

        A checkpointed region gathers again what it gathered, when it runs again, and keeps it until it has run
        backward.
        """
        if not self.decisions.regather:
            return {}
        gathered = {
            (item.value, item.to): item
            for one in self.steps
            if one.step.node.name not in self.regions
            for item in one.made
            if item.bucket and item.transfer is not None and item.transfer.collective == "all_gather"
        }
        found: dict[str, list[Redistribute]] = {}
        for one in reversed(self.steps):
            node = one.step.node
            apart = node.name in self.regions or node.name in self.chunked
            if not apart and self._runs_backward(one.step):
                for copy in zip(node.operands, one.step.rule.needs, strict=True):
                    if copy[0] in node.saved.values and copy in gathered:
                        found.setdefault(node.name, []).append(_again(gathered.pop(copy)))
        return found


def _waited_for_first(made: Sequence[Redistribute]) -> list[Redistribute]:
    """What all wait for comes before what travels in buckets, unless it starts from such a copy."""
    copies = {(item.value, item.to) for item in made if item.bucket}

    def place(item: Redistribute) -> int:
        if item.bucket:
            return 1
        after = (item.value, item.source) in copies
        if after:
            copies.add((item.value, item.to))
        return 2 if after else 0

    return sorted(made, key=place)


def _again(item: _Runs) -> _Runs:
    return replace(item, id=f"{item.id} again", phase="again")


# Buckets


class Buckets:
    """Numbers buckets through the whole step."""

    def __init__(self, decisions: Decisions) -> None:
        self.decisions = decisions
        self.gathers, self.reduces = itertools.count(), itertools.count()

    def filled(self, items: Sequence[Item]) -> list[Item]:
        """One pass, with its buckets, and every redistribution told by which it travels."""
        coming = self._gathered(items)
        named = {member: bucket.id for group in coming for bucket in group for member in bucket.members}
        number = {member: k for k, group in enumerate(coming) for bucket in group for member in bucket.members}
        full, rest = self._reduced(items)
        named |= {member: bucket.id for bucket in (*full.values(), *rest) for member in bucket.members}
        done: list[Item] = []
        started = 0

        def start(until: int) -> None:
            nonlocal started
            while started < min(until, len(coming)):
                done.extend(coming[started])
                started += 1

        if self.decisions.overlap:
            start(self.decisions.prefetch)
        for item in items:
            if item.id not in named or not isinstance(item, Redistribute):
                done.append(item)
                continue
            if item.id in number:
                start(number[item.id] + (self.decisions.prefetch if self.decisions.overlap else 1))
            bucket = named[item.id]
            done.append(item if item.bucket == bucket else replace(item, bucket=bucket))
            if item.id in full:
                done.append(full[item.id])
        return [*done, *rest]

    def _reduced(self, items: Iterable[Item]) -> tuple[dict[str, ReduceBucket], list[ReduceBucket]]:
        """The buckets of gradients that fill up, each by its last member, after which it is sent, and the others."""
        filling: dict[tuple[str, str], list[Redistribute]] = {}
        sizes: dict[tuple[str, str], int] = {}
        full: list[list[Redistribute]] = []
        for item in items:
            if (
                isinstance(item, Redistribute)
                and item.bucket
                and item.transfer is not None
                and item.phase == "backward"
            ):
                buffer = (item.transfer.collective, item.transfer.dtype)
                filling.setdefault(buffer, []).append(item)
                sizes[buffer] = sizes.get(buffer, 0) + item.transfer.whole_bytes
                if sizes[buffer] >= self.decisions.bucket_bytes:
                    full.append(filling.pop(buffer))
                    sizes[buffer] = 0
        sent = {members[-1].id: self._reduce_bucket(members) for members in full}
        return sent, [self._reduce_bucket(members) for members in filling.values()]

    def _reduce_bucket(self, members: Sequence[Redistribute]) -> ReduceBucket:
        return _bucket(ReduceBucket, f"reduce.{next(self.reduces)}", members, self.decisions.overlap)

    def _gathered(self, items: Iterable[Item]) -> list[list[GatherBucket]]:
        """What is gathered together: for each group of consumers a bucket of every collective and dtype."""
        groups: list[list[Redistribute]] = []
        wanted: list[Redistribute] = []
        group_bytes = 0  # in the last group so far
        for item in items:
            if (
                isinstance(item, Redistribute)
                and item.bucket
                and item.transfer is not None
                and item.phase != "backward"
            ):
                wanted.append(item)
            elif isinstance(item, Compute) and wanted:
                wanted_bytes = _size(wanted)
                if not groups or group_bytes + wanted_bytes > self.decisions.bucket_bytes:
                    groups.append([])
                    group_bytes = 0
                groups[-1] += wanted
                group_bytes += wanted_bytes
                wanted = []
        if wanted:
            groups.append(wanted)
        return [self._by_buffer(group) for group in groups]

    def _by_buffer(self, group: Sequence[Redistribute]) -> list[GatherBucket]:
        alike: dict[tuple[str, str], list[Redistribute]] = {}
        for item in group:
            if item.transfer is not None:
                alike.setdefault((item.transfer.collective, item.transfer.dtype), []).append(item)
        return [
            _bucket(GatherBucket, f"gather.{next(self.gathers)}", members, self.decisions.overlap)
            for members in alike.values()
        ]


def _size(members: Iterable[Redistribute]) -> int:
    return sum(item.transfer.whole_bytes for item in members if item.transfer is not None)


def _bucket(kind: type[_Kind], name: str, members: Sequence[Redistribute], hides: bool) -> _Kind:
    transfers: tuple[Transfer, ...] = tuple(item.transfer for item in members if item.transfer is not None)
    return kind(name, tuple(item.id for item in members), transfers, hides)
