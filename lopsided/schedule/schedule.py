"""The lowered step: everything a device does in a training step, in order. Frozen, printed, parsed back, checked.

In: what `lower` decided. Out: `Schedule`, three lists of items: forward, backward, update. The timeline, the critical
path, the memory, the executor, the report, the recorder and the calibration read these lists; nobody derives them
again.

    Compute         a node runs by its rule: forward, backward, or forward *again* in a checkpointed region
    Exchange        a collective inside a node: what a talking rule or factor broadcasting sends by itself
    Redistribute    a value changes its placement; a parameter does so by a bucket, behind computing
    GatherBucket    parameters on their way to copies, started here, each waited for where it is taken
    ReduceBucket    gradients on their way to stored pieces, sent here, waited for by the optimizer; of rounds, here
                    in the last (`Schedule.rounds`)
    Recompute       the forward items that the backward pass runs again from here on
    Stretch         the nodes that run from here on as one function
    Chunked         the nodes that run from here on forward and backward together, so many rows at a time
    Update          the optimizer updates a parameter

An item's `id` is a function of the program alone, so it is the same on every device and in every run: what a run
records is joined with what was predicted by it. A schedule is the same for all devices, and knows nothing of shares or
seconds. In text a line is an item:

    forward
      gather.0 = all_gather f32 w S0→R, b S0→R
      take w S0→R by gather.0
      convert x S1→S0
      run h
    backward
      back h
      give ∂w P→S0 by reduce.0
      reduce.0 = reduce_scatter f32 ∂w P→S0
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from lopsided.errors import ProgramError
from lopsided.ir.graph import reruns
from lopsided.ir.placement import Placement
from lopsided.ir.program import Program, Step, placement_at
from lopsided.ops.simulated_devices import cotangent
from lopsided.schedule.cost import Transfer, conversion, sent_by
from lopsided.schedule.decisions import (
    Decisions,
    parse_decisions,
)
from lopsided.schedule.regions import RegionNodes, offloaded_of

Phase = Literal["forward", "again", "backward"]

# Items


@dataclass(frozen=True, slots=True)
class Compute:
    """One node by its rule. `conversions` were made for it, which packed `packed_bytes` to send them."""

    id: str
    node: str
    phase: Phase
    conversions: int = 0
    packed_bytes: int = 0

    @property
    def backward(self) -> bool:
        return self.phase == "backward"


@dataclass(frozen=True, slots=True)
class Exchange:
    """The collective with this number among those that a node's rule sends in a phase. All devices wait for it."""

    id: str
    node: str
    phase: Phase
    number: int
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Redistribute:
    """A value, or going backward its cotangent, changes its placement.

    Without a transfer it is a local matter: a slice, zeros around a piece. With a `bucket` it travels in that: a copy
    of a parameter is taken from it here, a gradient is given to it here. Otherwise all devices wait for it.
    """

    id: str
    value: str
    source: Placement
    to: Placement
    phase: Phase
    transfer: Transfer | None
    bucket: str = ""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Redistributions of one collective and one dtype, sent as one."""

    id: str
    members: tuple[str, ...]  # ids, in the order in which they are taken or given
    transfers: tuple[Transfer, ...]  # what each of them sends
    hides: bool = True

    @property
    def collective(self) -> str:
        return self.transfers[0].collective

    @property
    def dtype(self) -> str:
        return self.transfers[0].dtype

    @property
    def whole_bytes(self) -> int:
        return sum(transfer.whole_bytes for transfer in self.transfers)

    @property
    def what(self) -> str:
        """Some of its members, to be read."""
        more = f" and {len(self.members) - 3} more" if len(self.members) > 3 else ""
        return ", ".join(transfer.what for transfer in self.transfers[:3]) + more


@dataclass(frozen=True, slots=True)
class GatherBucket(Bucket):
    """Starts here. Its members are taken later, the first of them where the first consumer needs it."""


@dataclass(frozen=True, slots=True)
class ReduceBucket(Bucket):
    """Is sent here: its last member has just been given, or nothing more is to come."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """From here on the backward pass runs these nodes forward again, then backward.

    Of what they made forward it has `kept` some: these do not run again, nor do those whose results nobody needs. On
    other `kinds` of devices than these, where there are any, all is as if nothing ran again.
    """

    id: str
    nodes: tuple[str, ...]
    kept: tuple[str, ...] = ()
    kinds: tuple[int, ...] = ()

    def runs_on(self, kind: int) -> bool:
        return not self.kinds or kind in self.kinds


@dataclass(frozen=True, slots=True)
class Stretch:
    """From here on these nodes run as one function, forward and backward, with nothing sent in between."""

    id: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chunked:
    """From here on these nodes run forward and backward together, so many rows at a time: a loss, and what makes the
    large values that it alone needs."""

    id: str
    nodes: tuple[str, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer updates what this device stores of a parameter.

    Devices of the kinds `on_host` fetch its state from the memory of their host for that, and take it back there. State
    that is kept in so many `bits` is written out for it, and put into them again.
    """

    id: str
    parameter: str
    placement: Placement
    on_host: tuple[int, ...] = ()
    bits: int = 0


Item = Compute | Exchange | Redistribute | GatherBucket | ReduceBucket | Recompute | Stretch | Chunked


@dataclass(frozen=True)
class Schedule:
    """A training step in order, of one program with one set of decisions."""

    program: Program
    decisions: Decisions
    forward: tuple[Item, ...]
    backward: tuple[Item, ...]
    update: tuple[Update, ...]

    @cached_property
    def passes(self) -> tuple[Item, ...]:
        return (*self.forward, *self.backward)

    @cached_property
    def steps(self) -> Mapping[str, Step]:
        """The step of every node: by which rule it runs."""
        return {step.node.name: step for step in self.program.steps}

    @property
    def keeps_copies(self) -> bool:
        """What the first round gathers serves all rounds. Where something is gathered again, every round gathers."""
        return not self.decisions.regather and not self.regions

    def is_sent_in(self, bucket: Bucket, number: int) -> bool:
        """Whether a bucket is sent in a round, counted from 0.

        Gradients are added up where they are made, and sent behind the last round. Where parameters are stored cut and
        gathered again, sums of whole gradients would take the memory that this saves: they are sent in every round.
        """
        if isinstance(bucket, GatherBucket):
            return number == 0 or not self.keeps_copies
        every = self.decisions.regather and bucket.collective == "reduce_scatter"
        return every or number + 1 == self.decisions.microbatches

    def rounds(self) -> Iterator[tuple[Sequence[Item], Sequence[Item]]]:
        """The forward and the backward pass of every round."""
        return map(self.round, range(self.decisions.microbatches))

    def round(self, number: int) -> tuple[Sequence[Item], Sequence[Item]]:
        """One of them, counted from 0. All between the first and the last are alike."""
        forward, backward = (
            [item for item in items if not isinstance(item, Bucket) or self.is_sent_in(item, number)]
            for items in (self.forward, self.backward)
        )
        return forward, backward

    @property
    def redistributed(self) -> Iterator[Redistribute]:
        """Every copy that is made forward, once each."""
        return (item for item in self.forward if isinstance(item, Redistribute))

    @cached_property
    def items(self) -> Mapping[str, Item | Update]:
        """Every item by its id."""
        return {item.id: item for item in (*self.passes, *self.update)}

    @property
    def computes(self) -> tuple[Compute, ...]:
        return tuple(item for item in self.passes if isinstance(item, Compute))

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Everything that is sent, one tensor each, where it is needed or comes from."""
        return tuple(transfer for items in (self.forward, self.backward) for transfer in transfers_of(items))

    @cached_property
    def recomputed(self) -> Mapping[str, str]:
        """Every node that runs again, with the id of its region."""
        return {node: item.id for item in self.backward if isinstance(item, Recompute) for node in item.nodes}

    @cached_property
    def regions(self) -> Mapping[str, Recompute]:
        """What runs again, by the id of the region."""
        return {item.id: item for item in self.backward if isinstance(item, Recompute)}

    @cached_property
    def offloaded(self) -> Mapping[str, RegionNodes]:
        """What is saved in the memory of the host, by an id of the region."""
        return {f"offload.{k}": region for k, region in enumerate(offloaded_of(self.program, self.decisions))}

    @cached_property
    def chunked(self) -> Mapping[str, Chunked]:
        """Every node that runs some rows at a time, with what it does so with."""
        return {node: item for item in self.forward if isinstance(item, Chunked) for node in item.nodes}

    @cached_property
    def again(self) -> frozenset[str]:
        """The nodes that run forward a second time."""
        return frozenset(item.node for item in self.computes if item.phase == "again")

    def runs_again_on(self, node: str, kind: int) -> bool:
        """Whether devices of a kind run a node forward a second time."""
        return node in self.again and self.regions[self.recomputed[node]].runs_on(kind)

    @cached_property
    def sent_for(self) -> Mapping[str, tuple[Transfer, ...]]:
        """What is sent for each node in a whole step; under "" for the loss and the buffers at the end."""
        found: dict[str, list[Transfer]] = {}
        for items in (self.forward, self.backward):
            for item, node in zip(items, nodes_of(items), strict=True):
                found.setdefault(node, []).extend(transfers_of([item]))
        return {node: tuple(transfers) for node, transfers in found.items()}

    def __str__(self) -> str:
        return print_schedule(self)


def transfers_of(items: Sequence[Item]) -> Iterator[Transfer]:
    """What items send, tensor by tensor; what hides says so, and whether it is started ahead of its place."""
    for item in items:
        if isinstance(item, Exchange):
            yield item.transfer
        elif isinstance(item, Redistribute) and item.transfer is not None:
            hides = bool(item.bucket)
            yield replace(item.transfer, hides=hides, ahead=hides and item.phase != "backward")


def nodes_of(items: Sequence[Item]) -> list[str]:
    """For each item the node it is there for: forward that which runs next, of a cotangent that which ran last.

    What follows the last node has none.
    """
    found = [""] * len(items)
    last = ""
    for k, item in enumerate(items):
        if isinstance(item, Compute):
            last = item.node
        if isinstance(item, Compute | Exchange):
            found[k] = item.node
        elif isinstance(item, Redistribute) and item.phase == "backward":
            found[k] = last
    coming = ""
    for k in reversed(range(len(items))):
        one = items[k]
        if isinstance(one, Compute):
            coming = one.node
        elif isinstance(one, Redistribute) and one.phase != "backward":
            found[k] = coming
    return found


# Text


def print_schedule(schedule: Schedule) -> str:
    lines = [f"step {schedule.decisions}"]
    for name, items in (("forward", schedule.forward), ("backward", schedule.backward), ("update", schedule.update)):
        lines += [name, *(f"  {_line(item)}" for item in items)]
    return "\n".join(lines) + "\n"


_RUNS = {"forward": "run", "again": "again", "backward": "back"}


def _line(item: Item | Update) -> str:
    if isinstance(item, Compute):
        return f"{_RUNS[item.phase]} {item.node}"
    if isinstance(item, Exchange):
        return f"exchange {_RUNS[item.phase]} {item.node} #{item.number}"
    if isinstance(item, Bucket):
        hides = "" if item.hides else " waited for"
        return f"{item.id} = {item.collective} {item.dtype} {', '.join(item.members)}{hides}"
    if isinstance(item, Stretch):
        return f"{item.id} = {', '.join(item.nodes)}"
    if isinstance(item, Chunked):
        return f"{item.id} = {', '.join(item.nodes)} by {item.rows} rows"
    if isinstance(item, Recompute):
        kept = f" keeps {', '.join(item.kept)}" if item.kept else ""
        on = f" on {', '.join(map(str, item.kinds))}" if item.kinds else ""
        return f"{item.id} = {', '.join(item.nodes)}{kept}{on}"
    if isinstance(item, Update):
        on = f" from host on {', '.join(map(str, item.on_host))}" if item.on_host else ""
        bits = f" in {item.bits} bits" if item.bits else ""
        return f"update {item.parameter} {item.placement}{bits}{on}"
    if not item.bucket:
        return f"convert {item.id}"
    return f"{'give' if item.phase == 'backward' else 'take'} {item.id} by {item.bucket}"


_STEP = re.compile(r"step (\w+=.+)")
_RUN = re.compile(r"(run|again|back) (\S+)")
_EXCHANGE = re.compile(r"exchange (run|again|back) (\S+) #(\d+)")
_CONVERT = re.compile(r"(?:convert|take|give) ((∂?)(\S+) (\S+)→(\S+?)( again)?)(?: by (\S+))?")
_BUCKET = re.compile(r"((gather|reduce)\.\d+) = (\w+) (\w+) (.+?)( waited for)?")
_STRETCH = re.compile(r"(stretch\.\S+) = (.+)")
_CHUNKED = re.compile(r"(chunked\.\S+) = (.+) by (\d{1,12}) rows")
_RECOMPUTE = re.compile(r"(recompute\.\d+) = (.+?)(?: keeps (.+?))?(?: on ([\d, ]+))?")
_UPDATE = re.compile(r"update (\S+) (\S+)(?: in (\d{1,2}) bits)?(?: from host on ([\d, ]+))?")
_PHASES: Mapping[str, Phase] = {"run": "forward", "again": "again", "back": "backward"}


def parse_schedule(text: str, program: Program) -> Schedule:
    """The schedule of `program` that prints as `text`. `check_schedule` says whether a device can do that."""
    parser = _Parser(program)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            parser.read(line.strip(), f"line {number}: {line.strip()[:200]}")
    return parser.schedule()


class _Parser:
    def __init__(self, program: Program) -> None:
        self.program, self.decisions = program, Decisions()
        self.values = program.graph.values
        self.steps: dict[str, Step] = {step.node.name: step for step in program.steps}
        self.passes: dict[str, list[Item]] = {"forward": [], "backward": []}
        self.updates: list[Update] = []
        self.section = ""
        self.buckets: list[tuple[list[Item], int, str]] = []  # where each stands, until all members are known

    def read(self, line: str, where: str) -> None:
        if match := _STEP.fullmatch(line):
            self.decisions = _decisions(match[1], where)
        elif line in ("forward", "backward", "update"):
            self.section = line
        elif self.section == "update" and (match := _UPDATE.fullmatch(line)):
            self._known(match[1], where)
            kinds, bits = tuple(map(int, match[4].split(", "))) if match[4] else (), int(match[3] or 0)
            self.updates.append(Update(f"update {match[1]}", match[1], placement_at(match[2], where), kinds, bits))
        elif self.section in self.passes and (item := self._item(line, where)) is not None:
            self.passes[self.section].append(item)
        else:
            raise ProgramError("schedule text does not parse", where=where, do="compare with a printed schedule")

    def _item(self, line: str, where: str) -> Item | None:
        if match := _RUN.fullmatch(line):
            phase = _PHASES[match[1]]
            self._step(match[2], where)
            return Compute(compute_id(match[2], phase), match[2], phase)
        if match := _EXCHANGE.fullmatch(line):
            return self._exchange(match, where)
        if match := _CONVERT.fullmatch(line):
            return self._redistribute(match, where)
        if match := _BUCKET.fullmatch(line):
            kind = GatherBucket if match[2] == "gather" else ReduceBucket
            return kind(
                match[1], tuple(match[5].split(", ")), (Transfer("", match[3], 0, dtype=match[4]),), not match[6]
            )
        if match := _STRETCH.fullmatch(line):
            return Stretch(match[1], tuple(match[2].split(", ")))
        if match := _CHUNKED.fullmatch(line):
            return Chunked(match[1], tuple(match[2].split(", ")), int(match[3]))
        if match := _RECOMPUTE.fullmatch(line):
            kept, kinds = (tuple(part.split(", ")) if part else () for part in (match[3], match[4]))
            return Recompute(match[1], tuple(match[2].split(", ")), kept, tuple(map(int, kinds)))
        return None

    def _exchange(self, match: re.Match[str], where: str) -> Exchange:
        phase, number = _PHASES[match[1]], int(match[3])
        step = self._step(match[2], where)
        there, back = sent_by(self.program.graph, step.node, step.rule)
        sent = back if phase == "backward" else there
        if number >= len(sent):
            raise ProgramError(f"{match[2]} has no exchange {number}", where=where, do=f"it has {len(sent)}")
        return exchange(step, phase, number, sent[number])

    def _redistribute(self, match: re.Match[str], where: str) -> Redistribute:
        name, is_cotangent, again = match[3], bool(match[2]), bool(match[6])
        self._known(name, where)
        source, to = placement_at(match[4], where), placement_at(match[5], where)
        phase: Phase = "backward" if is_cotangent else "again" if again else "forward"
        transfer = sent_as(self.program, name, source, to, phase)
        return Redistribute(match[1], name, source, to, phase, transfer, match[7] or "")

    def schedule(self) -> Schedule:
        """The schedule, with the members of buckets filled in and what was made for each node counted."""
        known = {
            item.id: item.transfer
            for items in self.passes.values()
            for item in items
            if isinstance(item, Redistribute) and item.transfer is not None
        }
        for items in self.passes.values():
            for k, item in enumerate(items):
                if isinstance(item, Bucket):
                    items[k] = self._filled(item, known)
        conversions = conversions_of(self.program)
        forward, backward = counted(self.passes["forward"], self.passes["backward"], conversions)
        return Schedule(self.program, self.decisions, forward, backward, tuple(self.updates))

    def _filled(
        self, bucket: GatherBucket | ReduceBucket, known: Mapping[str, Transfer]
    ) -> GatherBucket | ReduceBucket:
        if missing := next((member for member in bucket.members if member not in known), None):
            raise ProgramError(f"{bucket.id} sends {missing!r}, which nobody takes or gives", do="add a line for it")
        transfers = tuple(known[member] for member in bucket.members)
        if {(t.collective, t.dtype) for t in transfers} != {(bucket.collective, bucket.dtype)}:
            raise ProgramError(
                f"not all of {bucket.id} is {bucket.collective} of {bucket.dtype}",
                do="put what differs in collective or dtype into buckets of its own",
            )
        return replace(bucket, transfers=transfers)

    def _known(self, name: str, where: str) -> None:
        if name not in self.values:
            raise ProgramError(f"the graph has no value {name[:60]!r}", where=where, do="name the graph's values")

    def _step(self, name: str, where: str) -> Step:
        if name not in self.steps:
            raise ProgramError(f"the graph has no node {name[:60]!r}", where=where, do="name the graph's nodes")
        return self.steps[name]


def _decisions(text: str, where: str) -> Decisions:
    try:
        return parse_decisions(text)
    except ProgramError as error:
        raise ProgramError(error.what, where=where, do=error.do) from None


# Items from a program


def compute_id(node: str, phase: Phase) -> str:
    return {"forward": node, "again": f"{node} again", "backward": f"∂{node}"}[phase]


def exchange(step: Step, phase: Phase, number: int, transfer: Transfer) -> Exchange:
    node = step.node.name
    named = replace(transfer, what=f"{node}: {transfer.what}")
    again = " again" if phase == "again" else ""
    of = compute_id(node, "forward" if again else phase)
    return Exchange(f"{of} #{number}{again}", node, phase, number, named)


def sent_as(program: Program, name: str, source: Placement, to: Placement, phase: Phase) -> Transfer | None:
    """What a redistribution sends; backward, `source` and `to` are those of the cotangent."""
    value = program.graph.values[name]
    if phase != "backward":
        return conversion(value, source, to)[0]
    # The cotangent of the cotangent is the value: the transpose of this redistribution is the one it undoes.
    return conversion(value, cotangent(to), cotangent(source))[1]


def conversions_of(program: Program) -> dict[str, int]:
    """How many conversions are made for each node."""
    made: set[tuple[str, Placement]] = set(program.leaves)
    found: dict[str, int] = {}
    for step in program.steps:
        before = len(made)
        for name, chain in step.taken:
            made.update((name, to) for to in chain[1:])
        found[step.node.name] = len(made) - before
        made.update(step.made)
    return found


def counted(
    forward: Sequence[Item], backward: Sequence[Item], conversions: Mapping[str, int]
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """The items of both passes, with each node told how many conversions were made for it, and how many bytes it packs
    to send.

    What is packed forward comes before the node, what is packed backward after it. Backward every conversion counts,
    also one whose transpose sends nothing: the process does some work there.
    """
    items = (*forward, *backward)
    packed = _packed(forward, backward)
    told = tuple(
        Compute(item.id, item.node, item.phase, conversions[item.node], packed.get(item.id, 0))
        if isinstance(item, Compute)
        else item
        for item in items
    )
    return told[: len(forward)], told[len(forward) :]


def _packed(*passes: Sequence[Item]) -> dict[str, int]:
    found: dict[str, int] = {}
    last = ""
    for items in passes:
        before = 0
        for item in items:
            if isinstance(item, Redistribute) and item.transfer is not None:
                if item.phase == "backward" and last:
                    found[last] = found.get(last, 0) + item.transfer.whole_bytes
                elif item.phase != "backward":
                    before += item.transfer.whole_bytes
            elif isinstance(item, Compute):
                if item.phase == "backward":
                    last, before = item.id, 0
                else:
                    found[item.id], before = before, 0
    return found


# Checking


def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule that no device can carry out as it stands, or that leaves something out."""
    seen: dict[str, Item | Update] = {}
    for item in (*schedule.passes, *schedule.update):
        if item.id in seen:
            raise ProgramError(f"{item.id!r} is there twice", do="do everything once")
        seen[item.id] = item
    for items in (schedule.forward, schedule.backward):
        _check_buckets(items)
    _check_order(schedule)
    program = schedule.program
    run = {item.node for item in schedule.forward if isinstance(item, Compute)}
    if missing := next((step.node.name for step in program.steps if step.node.name not in run), None):
        raise ProgramError(f"{missing} is not run", do="run every node forward once")
    trained = {leaf.value.name for leaf in program.graph.parameters if leaf.value.grad}
    updated = [item.parameter for item in schedule.update]
    if {*updated} != trained:
        odd = min(trained.symmetric_difference(updated))
        raise ProgramError(f"{odd} is trained or updated, and not both", do="update every trained parameter once")


def _check_buckets(items: Sequence[Item]) -> None:
    """Every member of a bucket is taken after it has started, or given before it is sent, and by this bucket only."""
    places = {item.id: k for k, item in enumerate(items)}
    for k, item in enumerate(items):
        if isinstance(item, Bucket):
            for member in item.members:
                at, one = places.get(member), items[places[member]] if member in places else None
                if at is None or not isinstance(one, Redistribute) or one.bucket != item.id:
                    raise ProgramError(f"{item.id} sends {member!r}, which does not travel by it", do="name its bucket")
                if (at < k) != isinstance(item, ReduceBucket):
                    raise ProgramError(
                        f"{member!r} is {'given after' if at > k else 'taken before'} {item.id} is on its way",
                        do="take what is gathered after its bucket, give gradients before theirs",
                    )
        elif isinstance(item, Redistribute) and item.bucket:
            bucket = items[places[item.bucket]] if item.bucket in places else None
            if not isinstance(bucket, Bucket) or item.id not in bucket.members:
                raise ProgramError(f"{item.id!r} travels by {item.bucket}, which does not send it", do="send it there")


def _check_order(schedule: Schedule) -> None:
    """Forward, a value is there before it is used; backward, a node follows those that used what it made."""
    program = schedule.program
    facts = set(program.leaves)
    steps = {step.node.name: step for step in program.steps}
    for item in schedule.forward:
        if isinstance(item, Redistribute):
            if (item.value, item.source) not in facts:
                raise ProgramError(f"{item.id!r}: there is no {item.source} of {item.value} yet", do="make it before")
            facts.add((item.value, item.to))
        elif isinstance(item, Compute) and item.phase == "backward":
            if item.node not in schedule.chunked:
                raise ProgramError(f"{item.node} runs backward too early", do="go backward in the backward pass")
        elif isinstance(item, Compute):
            step = steps[item.node]
            for copy in step.needed:
                if copy not in facts:
                    raise ProgramError(f"{item.node} runs before it has {copy[0]} as {copy[1]}", do="redistribute it")
            facts.update(step.made)
    order = {step.node.name: k for k, step in enumerate(program.steps)}
    last, again = len(order), reruns(program.graph)
    names = [step.node.name for step in program.steps]
    spans = ((order[rerun.first], order[rerun.last]) for rerun in schedule.decisions.reruns)
    planned = {name for first, end in spans for name in names[first : end + 1]}
    for item in schedule.backward:
        if isinstance(item, Compute) and item.phase == "backward":
            if order[item.node] >= last:
                raise ProgramError(f"{item.node} runs backward too late", do="go backward in the opposite order")
            last = order[item.node]
        elif isinstance(item, Recompute) and not {*item.nodes} <= {*again, *planned}:
            raise ProgramError(f"{item.id} has nodes that no region checkpoints", do="recompute a checkpointed region")
