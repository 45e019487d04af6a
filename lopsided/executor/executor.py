"""A program as one device runs it.

In: a `Program`, an `Redistributor`, this device's random numbers. Out: `Executor`, whose `run` takes the leaves and
returns the loss and the new buffers, differentiable.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lopsided.comm.redistribute import Redistributor
from lopsided.executor.gradients import Gradients, Synced
from lopsided.executor.instructions import (
    Convert,
    Gather,
    Instruction,
    Pass,
    Region,
    RunNode,
    Slots,
    UseReplicated,
    run_all,
)
from lopsided.executor.local_op import AnyRandomness, LocalOp
from lopsided.executor.prefetch import GatheredCopy, Gatherer, Regathered, in_buckets
from lopsided.executor.randomness import streams_of
from lopsided.ir.graph import Context
from lopsided.ir.op_call import surroundings
from lopsided.ir.placement import Placement, R
from lopsided.ir.program import Chain, Program, Step
from lopsided.ir.recompute import reruns
from lopsided.ops.op import Call
from lopsided.schedule.layout import BUCKET_BYTES, regathered


class Executor:
    """The instructions of a program on one device."""

    def __init__(
        self,
        program: Program,
        exchange: Redistributor,
        gradients: Gradients,
        random: AnyRandomness,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        *,
        regather: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        compiler = _Compiler(
            program, exchange, gradients, random, parameters, device, regather=regather, bucket_bytes=bucket_bytes
        )
        self.exchange, self.random = exchange, random
        self.instructions = compiler.instructions()
        self.count = len(compiler.slots)
        self.leaves = {name: compiler.slots[name, placement] for name, placement in program.leaves}
        self.loss = compiler.slots[program.graph.loss, program.loss[-1]]
        self.own_loss = compiler.slots[program.graph.loss, program.loss[0]]
        self.updates = tuple(
            (buffer, compiler.slots[name, chain[-1]])
            for (buffer, name), chain in zip(program.graph.updates, program.updates, strict=True)
        )
        self.context = compiler.context
        self.gathers = compiler.gathers(self.instructions)
        self.regathers = compiler.regathers

    def run(self, leaves: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The loss, the new value of every buffer that changes, and this device's own term of the loss."""
        slots: Slots = [None] * self.count
        for name, tensor in leaves.items():
            slots[self.leaves[name]] = tensor
        this = self._begin(slots)
        with surroundings(self.context), streams_of(self.random):
            run_all(self.instructions, slots, this)
        updates = {buffer: slots[slot].detach() for buffer, slot in self.updates}
        return slots[self.loss], updates, slots[self.own_loss].detach()

    def _begin(self, slots: Slots) -> Pass:
        stored = {one.stored: slots[one.stored] for bucket in self.gathers for one in bucket}
        again = None
        if self.regathers and torch.is_grad_enabled():
            again = Regathered(self.exchange, self.regathers, stored.__getitem__)
        gatherer = Gatherer(self.exchange, self.gathers, stored.__getitem__)
        gatherer.begin()
        return Pass(gatherer, again, self.exchange.wire.recorder)


# From a program to instructions


class _Compiler:
    def __init__(
        self,
        program: Program,
        exchange: Redistributor,
        gradients: Gradients,
        random: AnyRandomness,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        *,
        regather: bool,
        bucket_bytes: int,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.program, self.exchange, self.gradients, self.random = program, exchange, gradients, random
        self.parameters, self.device, self.regather = parameters, device, regather
        self.targets = {leaf.value.name: leaf.target for leaf in program.graph.parameters}
        self.stored = dict(program.leaves)
        self.slots: dict[tuple[str, Placement], int] = {}
        self.wanted: dict[int, GatheredCopy] = {}
        self.again = self._gathered_again() if regather else {}
        contexts = [replace(step.node.context, grad=True, recompute=0) for step in program.steps]
        self.context = max(contexts, key=contexts.count) if contexts else Context()
        self.regathers: list[list[GatheredCopy]] = []

    def _gathered_again(self) -> dict[str, list[tuple[str, Placement]]]:
        """For each node the copies that are gathered again before its backward pass: it is the last to use them.

        In a region everything is gathered again anyway, when its forward pass is repeated.
        """
        kept = {transfer.what for transfers in regathered(self.program).values() for transfer in transfers}
        found: dict[str, list[tuple[str, Placement]]] = {}
        done: set[tuple[str, Placement]] = set()
        for step in reversed(self.program.steps):
            if step.node.context.recompute or not any(value.grad for value in step.node.results):
                continue
            for copy in zip(step.node.operands, step.rule.needs, strict=True):
                what = f"{copy[0]} {self.stored.get(copy[0])}→{copy[1]}"
                if what in kept and copy not in done:
                    done.add(copy)
                    found.setdefault(step.node.name, []).append(copy)
        return found

    def slot(self, name: str, placement: Placement) -> int:
        return self.slots.setdefault((name, placement), len(self.slots))

    def instructions(self) -> list[Instruction]:
        for name, placement in self.program.leaves:
            self.slot(name, placement)
        made: list[Instruction] = []
        regions: list[int] = []
        again = reruns(self.program.graph)
        for step in self.program.steps:
            before = len(made)
            for name, chain in zip(step.node.operands, step.chains, strict=True):
                made += self.conversions(name, chain)
            made.append(self.compute(step))
            number = step.node.context.recompute if step.node.name in again else 0
            regions += [number] * (len(made) - before)
        ends = [(self.program.graph.loss, self.program.loss)]
        ends += zip((name for _, name in self.program.graph.updates), self.program.updates, strict=True)
        for name, chain in ends:
            conversions = list(self.conversions(name, chain))
            made += conversions
            regions += [0] * len(conversions)
        self.regathers = self._regather_buckets(made)
        self._free(made, {self.slots[name, p] for name, chain in ends for p in (chain[0], chain[-1])})
        return list(self._in_regions(made, regions))

    def conversions(self, name: str, chain: Chain) -> Iterator[Instruction]:
        value = self.program.graph.values[name]
        for source, to in itertools.pairwise(chain):
            if (name, to) in self.slots:
                continue
            at, into = self.slots[name, source], self.slot(name, to)
            is_stored = name in self.targets and self.stored[name] == source
            if is_stored and source.kind == "I" and to.kind == "R":
                yield UseReplicated(self.gradients, self._synced(name, None), at, into)
            elif is_stored and source.is_shard and to.is_whole:
                layout = self.exchange.layout(source, value.shape)
                wanted = GatheredCopy(into, at, layout, value.torch_dtype, self.targets[name])
                self.wanted[into] = wanted
                yield Gather(self.gradients, self._synced(name, source), wanted, to == R)
            else:
                yield Convert(self.exchange, at, into, (source, to), value.shape, f"%{name} {source}→{to}")

    def _synced(self, name: str, placement: Placement | None) -> Synced:
        shape = self.program.graph.values[name].shape
        layout = None if placement is None else self.exchange.layout(placement, shape)
        return Synced(self.targets[name], self.parameters[self.targets[name]], layout)

    def compute(self, step: Step) -> RunNode:
        node = step.node
        call = Call(node, tuple(self.program.graph.values[name] for name in node.operands))
        context = node.context if replace(node.context, recompute=0) != self.context else None
        again = [self.slots[copy] for copy in self.again.get(node.name, ())]
        return RunNode(
            node,
            LocalOp(call, step.rule, self.exchange, self.random, self.device).run,
            tuple(self.slots[key] for key in zip(node.operands, step.rule.needs, strict=True)),
            tuple(self.slot(value.name, give) for value, give in zip(node.results, step.rule.gives, strict=True)),
            tuple(value.grad for value in node.results),
            context,
            tuple(again),
        )

    def _regather_buckets(self, made: Sequence[Instruction]) -> list[list[GatheredCopy]]:
        computes = [i for i in made if isinstance(i, RunNode)]
        copies = {copy for compute in computes for copy in compute.again}
        for compute in computes:
            compute.saves_copies = not copies.isdisjoint(compute.operands)
        return in_buckets([[self.wanted[copy] for copy in c.again] for c in reversed(computes)], self.bucket_bytes)

    def gathers(self, made: Sequence[Instruction]) -> list[list[GatheredCopy]]:
        """The copies that these instructions gather, in buckets, in the order of their consumers."""
        consumers: list[list[GatheredCopy]] = [[]]
        for instruction in flat(made):
            if isinstance(instruction, Gather):
                consumers[-1].append(instruction.wanted)
            elif isinstance(instruction, RunNode):
                consumers.append([])
        return in_buckets(consumers, self.bucket_bytes)

    def _free(self, made: Sequence[Instruction], keep: set[int]) -> None:
        """Note at each instruction the slots that it is the last to use, or that nobody uses."""
        leaves = {self.slots[leaf] for leaf in self.program.leaves}
        last: dict[int, int] = {}
        for k, instruction in enumerate(made):
            last |= dict.fromkeys((*instruction.reads, *instruction.writes), k)
        for slot, k in last.items():
            if slot not in keep and slot not in leaves:
                made[k].free = (*made[k].free, slot)

    def _in_regions(self, made: Sequence[Instruction], regions: Sequence[int]) -> Iterator[Instruction]:
        """Runs of instructions with the same region number become one instruction."""
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
            yield Region(
                self.exchange,
                self.random,
                self.context,
                inside,
                tuple(s for s in reads if s not in leaves),
                tuple(s for s in reads if s in leaves),
                tuple(s for s in written if s in later),
                self.gathers(inside),
                free=tuple(s for s in freed if s not in written),
            )

    def _ends(self) -> set[int]:
        ends = {self.slots[self.program.graph.loss, p] for p in (self.program.loss[0], self.program.loss[-1])}
        updates = zip(self.program.graph.updates, self.program.updates, strict=True)
        return ends | {self.slots[name, chain[-1]] for (_, name), chain in updates}


def flat(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    for instruction in instructions:
        if isinstance(instruction, Region):
            yield from instruction.inside
        else:
            yield instruction


def _needed_after(made: Sequence[Instruction]) -> list[set[int]]:
    """For each instruction the slots that later ones read."""
    needed: list[set[int]] = []
    later: set[int] = set()
    for instruction in reversed(made):
        needed.append(set(later))
        later |= {*instruction.reads}
    return needed[::-1]
