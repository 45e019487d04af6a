"""A lowered step as one device runs it.

In: a `Schedule`, a `Redistributor`, this device's random numbers. Out: `Executor`, whose `run` takes the leaves and
returns the loss and the new buffers, differentiable: autograd carries out the backward pass of the schedule.

Forward, an instruction is an item. Backward, the order is that of the schedule, too: autograd runs functions in the
reverse order of their making, gradients go by the schedule's buckets, and gathering again starts where the schedule has
it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lopsided.comm.communicator import Label
from lopsided.comm.redistribute import Layout, Redistributor
from lopsided.executor.chunked import Unmade, run_chunked
from lopsided.executor.compiled import RunCompiled, StretchSurroundings, compiled_parts
from lopsided.executor.gradients import GradientBucket, Gradients, Synced
from lopsided.executor.instructions import (
    BeginBackward,
    Convert,
    Instruction,
    Pass,
    Region,
    RunNode,
    Slots,
    TakeCopy,
    run_all,
)
from lopsided.executor.local_op import AnyRandomness, LocalOp
from lopsided.executor.offload import Offloaded
from lopsided.executor.prefetch import CopyBucket, GatheredCopy, Gathers
from lopsided.executor.randomness import streams_of
from lopsided.executor.spared import spared
from lopsided.ir.graph import Context
from lopsided.ir.op_call import surroundings
from lopsided.ir.placement import Placement
from lopsided.ops.local_kernel import prepared_call
from lopsided.ops.op import Ask, Call
from lopsided.ops.simulated_devices import cotangent
from lopsided.schedule.schedule import (
    Compute,
    GatherBucket,
    Item,
    Recompute,
    Redistribute,
    ReduceBucket,
    Schedule,
    Stretch,
    nodes_of,
)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a forward pass made: the loss, this device's own term of it, the new value of every buffer that changes,
    and this device's part of what was asked for besides."""

    loss: Tensor
    own: Tensor
    updates: dict[str, Tensor]
    outputs: dict[str, Tensor | Unmade]


class Executor:
    """The instructions of a schedule on one device. `outputs` are values that are handed out, as they are placed.

    `kind` is the number of the device's kind: some regions run again on some kinds only.
    """

    def __init__(
        self,
        schedule: Schedule,
        exchange: Redistributor,
        gradients: Gradients,
        random: AnyRandomness,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        outputs: Sequence[str] = (),
        kind: int = 0,
    ) -> None:
        compiler = _Compiler(schedule, exchange, gradients, random, parameters, device, outputs, kind)
        program = schedule.program
        self.schedule, self.exchange, self.random = schedule, exchange, random
        self.instructions = compiler.instructions()
        self.count = len(compiler.slots)
        self.leaves = {name: compiler.slots[name, placement] for name, placement in program.leaves}
        self.loss = compiler.slots[program.graph.loss, program.loss[-1]]
        self.own_loss = compiler.slots[program.graph.loss, program.loss[0]]
        self.updates = tuple(
            (buffer, compiler.slots[name, chain[-1]])
            for (buffer, name), chain in zip(program.graph.updates, program.updates, strict=True)
        )
        self.outputs = {name: compiler.slots[name, at] for name, at in compiler.placed.items()}
        self.placed: Mapping[str, Placement] = compiler.placed
        self.context = compiler.context
        self.gathers, self.again = compiler.gathers(schedule.forward), compiler.gathers(schedule.backward)
        self.freed = frozenset(compiler.freed)
        self.has_run = False

    @property
    def functions(self) -> int:
        """How many different functions it compiles."""
        return len({one.key for one in _inside(self.instructions) if isinstance(one, RunCompiled)})

    def run(self, leaves: Mapping[str, Tensor], kept: dict[int, Tensor] | None = None) -> Ran:
        """One forward pass. `kept` holds gathered copies from one round of a step to the next."""
        slots: Slots = [None] * self.count
        for name, tensor in leaves.items():
            slots[self.leaves[name]] = tensor
        stored = {slot: slots[slot] for slot in self.gathers.stored | self.again.stored}
        this = Pass(
            self.exchange, self.gathers, self.again, self.freed, stored, self.exchange.communicator.recorder, kept
        )
        with surroundings(self.context), streams_of(self.random):
            run_all(self.instructions, slots, this)
        self.has_run = True
        updates = {buffer: slots[slot].detach() for buffer, slot in self.updates}
        loss, own = slots[self.loss], slots[self.own_loss].detach()
        if self.again.first and loss.requires_grad:
            loss = BeginBackward.apply(this, loss)  # type: ignore[no-untyped-call]
        return Ran(loss, own, updates, {name: slots[slot] for name, slot in self.outputs.items()})


def _inside(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    for one in instructions:
        yield one
        if isinstance(one, Region | Offloaded):
            yield from _inside(one.inside)


# From a schedule to instructions


class _Compiler:
    def __init__(
        self,
        schedule: Schedule,
        exchange: Redistributor,
        gradients: Gradients,
        random: AnyRandomness,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        outputs: Sequence[str],
        kind: int,
    ) -> None:
        self.kind = kind
        self.schedule, self.program, self.exchange = schedule, schedule.program, exchange
        self.gradients, self.random, self.parameters, self.device = gradients, random, parameters, device
        self.values = self.program.graph.values
        self.targets = {leaf.value.name: leaf.target for leaf in self.program.graph.parameters}
        self.stored = dict(self.program.leaves)
        self.slots: dict[tuple[str, Placement], int] = {}
        made = dict(fact for step in self.program.steps for fact in step.made)
        self.placed = {name: made[name] if name in made else self.stored[name] for name in outputs}
        last = len(schedule.backward) - len(list(itertools.takewhile(_is_reduce, reversed(schedule.backward))))
        self.buckets = {
            item.id: GradientBucket(
                item.id, item.collective, item.members, k, at_end=k >= last, in_every_round=schedule.is_sent_in(item, 0)
            )
            for k, item in enumerate(schedule.backward)
            if isinstance(item, ReduceBucket)
        }
        self.away = {
            node: name for name, region in schedule.offloaded.items() if region.is_on(kind) for node in region.nodes
        }
        self.of_head: list[RunNode] = []  # that runs some rows at a time, its nodes so far
        self.answers: dict[str, Callable[[Ask], Tensor]] = {}
        self.freed: list[int] = []  # copies that are gathered again for some node's backward pass
        self.before = self._before_nodes()
        contexts = [replace(step.node.context, grad=True, recompute=0) for step in self.program.steps]
        counts = Counter(contexts)
        self.context = max(counts, key=counts.__getitem__) if counts else Context()  # of most nodes

    def _before_nodes(self) -> dict[str, list[tuple[str, Placement]]]:
        """For each node the copies that are gathered again right before its backward pass."""
        found: dict[str, list[tuple[str, Placement]]] = {}
        waiting: list[tuple[str, Placement]] = []
        runs_again = False  # a region, which takes its copies itself
        for item in self.schedule.backward:
            runs_again = isinstance(item, Recompute) or (runs_again and getattr(item, "phase", "again") == "again")
            if isinstance(item, Redistribute) and item.phase == "again" and not runs_again:
                waiting.append((item.value, item.to))
            elif isinstance(item, Compute):
                if item.phase == "backward" and waiting:
                    found[item.node] = waiting
                waiting = []
        return found

    def slot(self, name: str, placement: Placement) -> int:
        return self.slots.setdefault((name, placement), len(self.slots))

    def instructions(self) -> list[Instruction]:
        for name, placement in self.program.leaves:
            self.slot(name, placement)
        made: list[Instruction] = []
        regions: list[str] = []
        forward = self.schedule.forward
        for item, node in zip(forward, nodes_of(forward), strict=True):
            instruction = self._instruction(item)
            if isinstance(instruction, RunNode) and instruction.node.name in self.schedule.chunked:
                instruction = self._in_chunks(instruction)
            if instruction is not None:
                made.append(instruction)
                regions.append(self._region(node))
        self.freed = [copy for i in made if isinstance(i, RunNode) for copy in i.again]
        for instruction in made:
            if isinstance(instruction, RunNode):
                reads_freed = not {*self.freed}.isdisjoint(instruction.operands)
                instruction.saves_copies = reads_freed or bool(instruction.again)
        made, regions = self._in_stretches(made, regions)
        self._free(made, self._ends())
        return list(self._in_regions(made, regions))

    def _in_stretches(self, made: Sequence[Instruction], regions: Sequence[str]) -> tuple[list[Instruction], list[str]]:
        """Instructions with the nodes of a stretch, which follow each other, in as few functions as can be."""
        stretch_of = {n: item.id for item in self.schedule.forward if isinstance(item, Stretch) for n in item.nodes}
        if not stretch_of:
            return list(made), list(regions)
        copies = frozenset(slot for (name, _), slot in self.slots.items() if name in self.targets)
        around = StretchSurroundings(self.values, self.random, self.context, copies, self.exchange.size == 1)
        needed, ends = _needed_after(made), self._ends()
        found: list[tuple[Instruction, str]] = []
        stretches = [stretch_of.get(i.node.name, "") if isinstance(i, RunNode) else "" for i in made]
        for stretch, group in itertools.groupby(range(len(made)), key=stretches.__getitem__):
            numbers = list(group)
            if not stretch:
                found += [(made[k], regions[k]) for k in numbers]
                continue
            nodes = [node for node in (made[k] for k in numbers) if isinstance(node, RunNode)]
            parts = compiled_parts(nodes, around, needed[numbers[-1]] | ends)
            found += [(part, regions[numbers[0]]) for part in parts]
        return [part for part, _ in found], [region for _, region in found]

    def _region(self, node: str) -> str:
        """The region in which a node runs again on this device, or saves in host memory, or none."""
        name = self.schedule.recomputed.get(node, "")
        if name and self.schedule.regions[name].runs_on(self.kind):
            return name
        return self.away.get(node, "")

    def _instruction(self, item: Item) -> Instruction | None:
        if isinstance(item, Compute):
            return self._run_node(item) if item.phase == "forward" else None
        if isinstance(item, Redistribute):
            is_copy = item.value in self.targets and self.stored[item.value] == item.source
            return self._take_copy(item) if is_copy else self._convert(item)
        return None  # a bucket starts where it is due, and an exchange is part of its node

    def _in_chunks(self, node: RunNode) -> Instruction | None:
        """All of a head that runs some rows at a time, with the last of its nodes."""
        chunked = self.schedule.chunked[node.node.name]
        self.of_head = [*self.of_head, node]
        if node.node.name != chunked.nodes[-1]:
            return None
        nodes, self.of_head = self.of_head, []
        calls = [Call.of(one.node, self.values) for one in nodes]
        shown = [k for k, one in enumerate(nodes[:-1]) if one.node.results[0].name in self.placed]
        talks = self.schedule.steps[node.node.name].rule.how != "plain"
        answer = self.answers[node.node.name] if talks else None
        return run_chunked(nodes, calls, chunked.rows, answer, shown, lambda one: prepared_call(one.node, self.device))

    def _convert(self, item: Redistribute) -> Convert:
        at, into = self.slots[item.value, item.source], self.slot(item.value, item.to)
        back = f"∂{item.value} {cotangent(item.to)}→{cotangent(item.source)}"
        shape, way, what = self.values[item.value].shape, (item.source, item.to), f"%{item.id}"
        labels = Label(what, item.id), Label(what, f"{item.id} again"), Label(f"gradient of {what}", back)
        return Convert(self.exchange, at, into, way, shape, *labels)

    def _take_copy(self, item: Redistribute) -> TakeCopy:
        value = self.values[item.value]
        at, into = self.slots[item.value, item.source], self.slot(item.value, item.to)
        stored = self._layout(item.source, item.value)
        way = (item.source, item.to)
        gathered, synced = bool(item.bucket), self._synced(item)
        return TakeCopy(self.exchange, self.gradients, at, into, way, value.shape, gathered, synced, stored)

    def _layout(self, placement: Placement, name: str) -> Layout | None:
        return self.exchange.layout(placement, self.values[name].shape) if placement.is_shard else None

    def _synced(self, item: Redistribute) -> Synced | None:
        """How the gradient of a copy comes home, if it travels."""
        source, to = cotangent(item.to), cotangent(item.source)
        given = self.schedule.items.get(f"∂{item.value} {source}→{to}")
        if not isinstance(given, Redistribute) or not given.bucket:
            return None
        target = self.targets[item.value]
        layouts = self._layout(source, item.value), self._layout(to, item.value)
        return Synced(given.id, target, self.parameters[target], *layouts, self.buckets[given.bucket])

    def _run_node(self, item: Compute) -> RunNode:
        step = self.schedule.steps[item.node]
        node = step.node
        call = Call.of(node, self.values)
        op = LocalOp(call, step.rule, self.exchange, self.random, self.device)
        self.answers[node.name] = op.answer
        context = node.context if replace(node.context, recompute=0) != self.context else None
        return RunNode(
            node,
            op.run,
            tuple(self.slots[fact] for fact in step.needed),
            tuple(self.slot(*fact) for fact in step.made),
            tuple(value.grad for value in node.results),
            context,
            tuple(self.slots[copy] for copy in self.before.get(node.name, ())),
            kernel=op.kernel,
        )

    def gathers(self, items: Sequence[Item]) -> Gathers:
        """When the buckets of a pass start: with it, or right before the next copy is taken."""
        takes = {item.id: item for item in items if isinstance(item, Redistribute)}
        first: list[CopyBucket] = []
        due: dict[int, list[CopyBucket]] = {}
        waiting = first
        for item in items:
            if isinstance(item, GatherBucket):
                waiting.append(self._copies(item, [takes[member] for member in item.members]))
            elif isinstance(item, Redistribute) and item.bucket and item.phase != "backward":
                if waiting and waiting is not first:
                    due[self.slots[item.value, item.to]] = waiting
                waiting = []
            elif waiting is first:
                waiting = []
        return Gathers(tuple(first), {copy: tuple(buckets) for copy, buckets in due.items()})

    def _copies(self, bucket: GatherBucket, members: Sequence[Redistribute]) -> CopyBucket:
        copies = tuple(
            GatheredCopy(
                self.slots[item.value, item.to],
                self.slots[item.value, item.source],
                self.exchange.layout(item.source, self.values[item.value].shape),
                self._layout(item.to, item.value),
            )
            for item in members
        )
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        return CopyBucket(copies, Label(f"{self.targets[members[0].value]}{more}", bucket.id))

    def _free(self, made: Sequence[Instruction], keep: set[int]) -> None:
        """Note at each instruction the slots that it is the last to use, or that nobody uses."""
        leaves = {self.slots[leaf] for leaf in self.program.leaves}
        last: dict[int, int] = {}
        for k, instruction in enumerate(made):
            last |= dict.fromkeys((*instruction.reads, *instruction.writes), k)
        for slot, k in last.items():
            if slot not in keep and slot not in leaves:
                made[k].free = (*made[k].free, slot)

    def _in_regions(self, made: Sequence[Instruction], regions: Sequence[str]) -> Iterator[Instruction]:
        """Instructions of a region that is recomputed become one."""
        numbered = list(zip(regions, range(len(made)), strict=True))
        kept_later = _needed_after(made)
        for region, group in itertools.groupby(numbered, key=lambda pair: pair[0]):
            positions = [k for _, k in group]
            inside = [made[k] for k in positions]
            if not region:
                yield from inside
                continue
            written = {slot for i in inside for slot in i.writes}
            leaves = {self.slots[name, p] for name, p in self.program.leaves if name in self.targets}
            reads = dict.fromkeys(s for i in inside for s in i.reads if s not in written)
            later = kept_later[positions[-1]] | self._ends()
            freed = {slot for i in inside for slot in i.free}
            if region not in self.schedule.regions:
                yield Offloaded(inside, tuple(reads), tuple(s for s in written if s in later))
                continue
            yield Region(
                self.random,
                self.context,
                [self._in_region(instruction, region) for instruction in inside],
                tuple(s for s in reads if s not in leaves),
                tuple(s for s in reads if s in leaves),
                tuple(s for s in written if s in later),
                free=tuple(s for s in freed if s not in written),
            )

    def _in_region(self, instruction: Instruction, region: str) -> Instruction:
        if not isinstance(instruction, RunNode) or instruction.node.name in self.schedule.again:
            return instruction
        keeps = instruction.node.name in self.schedule.regions[region].kept
        trained = [self.values[name].grad for name in instruction.node.operands]
        return spared(instruction, keeps=keeps, trained=trained)

    def _ends(self) -> set[int]:
        """The slots that are asked for after the forward pass."""
        ends = {self.slots[self.program.graph.loss, p] for p in (self.program.loss[0], self.program.loss[-1])}
        for (_, name), chain in zip(self.program.graph.updates, self.program.updates, strict=True):
            ends |= {self.slots[name, p] for p in (chain[0], chain[-1])}
        return ends | {self.slots[name, at] for name, at in self.placed.items()}


def _is_reduce(item: Item) -> bool:
    return isinstance(item, ReduceBucket)


def _needed_after(made: Sequence[Instruction]) -> list[set[int]]:
    """For each instruction the slots that later ones read."""
    needed: list[set[int]] = []
    later: set[int] = set()
    for instruction in reversed(made):
        needed.append(set(later))
        later |= {*instruction.reads}
    return needed[::-1]
