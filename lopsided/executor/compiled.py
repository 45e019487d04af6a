"""Nodes that run as one function, compiled by Inductor.

In: the nodes of a stretch (`Stretch` of a schedule), tensors. Out: `RunCompiled`, an instruction that does what the
nodes do one after the other, forward and backward.

What is compiled is traced with the shapes of this device's pieces, below autograd and autocast, so it holds whatever
implementations its nodes have. A function is remembered by what its nodes are and by how its tensors lie in memory, not
by their names: layers that repeat are compiled once. Inductor's own passes that reorder communication have nothing to
do here: nothing in a stretch sends.

What cannot be compiled runs node by node: a node that draws random numbers in a way of its own or has nothing but empty
pieces ends a function, and where tracing or compiling fails the log says which nodes and why. So does a node whose
random numbers all ranks share: compiled it draws other numbers, and another rank may run it by itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from lopsided.comm.world import working
from lopsided.executor.instructions import Instruction, Pass, RunNode, Slots, as_planned, run_all, surrounded
from lopsided.executor.randomness import RankRandomness
from lopsided.ir.graph import Context, Value, signature
from lopsided.ir.op_call import surroundings
from lopsided.ops.local_kernel import LocalKernel, RunOp, Stream

log = logging.getLogger(__name__)

LEAST = 2
"""Fewer nodes are not worth a function of their own."""

Function = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class StretchSurroundings:
    """What the nodes of a program have in common: its values, its random numbers, the context of most of its nodes,
    and the slots of parameters' copies."""

    values: Mapping[str, Value]
    random: object
    context: Context
    parameters: frozenset[int]
    alone: bool  # no other rank draws the same random numbers


@dataclass(frozen=True, slots=True)
class _Traced:
    """A node that can be compiled: its kernel, as a function that no random numbers have to be chosen for."""

    node: RunNode
    kernel: LocalKernel
    bare: RunOp


def compiled_parts(nodes: Sequence[RunNode], around: StretchSurroundings, needed: set[int]) -> Iterator[Instruction]:
    """The nodes of a stretch in as few functions as can be. `needed` are slots that are read after it."""
    runs = list(_runs(nodes, alone=around.alone))
    later: list[set[int]] = []
    reads = set(needed)
    for run in reversed(runs):
        later.append(set(reads))
        reads |= {slot for node in _nodes(run) for slot in node.operands}
    for run, after in zip(runs, reversed(later), strict=True):
        if isinstance(run, RunNode) or len(run) < LEAST:
            yield from _nodes(run)
        else:
            yield _as_one(run, around, after)


def _runs(nodes: Sequence[RunNode], *, alone: bool) -> Iterator[RunNode | list[_Traced]]:
    """Nodes that may be one function: those that can be compiled and draw from the same random numbers, if any."""
    run: list[_Traced] = []
    stream: Stream = ""
    for node in nodes:
        traced = _traced(node, alone=alone)
        drawn: Stream = "" if traced is None else traced.kernel.stream
        if run and (traced is None or (drawn and stream and drawn != stream)):
            yield run
            run, stream = [], ""
        if traced is None:
            yield node
        else:
            run.append(traced)
            stream = drawn or stream
    if run:
        yield run


def _nodes(run: RunNode | Sequence[_Traced]) -> Sequence[RunNode]:
    return (run,) if isinstance(run, RunNode) else [one.node for one in run]


def _traced(node: RunNode, *, alone: bool) -> _Traced | None:
    kernel = node.kernel
    if kernel is None or kernel.bare is None or all(0 in shape for shape in kernel.shapes):
        return None
    if kernel.stream == "shared" and not alone:
        return None
    return _Traced(node, kernel, kernel.bare)


def _as_one(run: Sequence[_Traced], around: StretchSurroundings, after: set[int]) -> RunCompiled:
    numbers: dict[int, int] = {}  # of slots within the function
    takes: list[int] = []
    described: list[object] = []
    for one in run:
        node, kernel = one.node, one.kernel
        takes += [slot for slot in dict.fromkeys(node.operands) if slot not in numbers]
        for slot in (*node.operands, *node.results):
            numbers.setdefault(slot, len(numbers))
        what = (signature(node.node, around.values), node.context, kernel.rule, kernel.pieces, kernel.rank)
        described.append((what, node.has_gradient, [numbers[slot] for slot in (*node.operands, *node.results)]))
    made = {s: has for one in run for s, has in zip(one.node.results, one.node.has_gradient, strict=True)}
    gives = tuple(slot for slot in made if slot in after)
    return RunCompiled(
        tuple(run),
        tuple(takes),
        gives,
        tuple(made[slot] for slot in gives),
        around.random,
        around.context,
        repr((described, [numbers[slot] for slot in gives], around.context)),
        tuple(k for k, slot in enumerate(takes) if slot not in around.parameters),
        tuple(slot for one in run for slot in one.node.again),
        any(one.node.saves_copies for one in run),
        next((one.kernel.stream for one in run if one.kernel.stream), ""),
    )


@dataclass(slots=True)
class RunCompiled(Instruction):
    """Nodes as one function of what they take. `key` says what they are, names apart."""

    traced: tuple[_Traced, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    has_gradient: tuple[bool, ...]
    random: object
    context: Context
    key: str
    others: tuple[int, ...]  # the numbers of what it takes that is no parameter
    again: tuple[int, ...]  # copies that are gathered again before its backward pass
    saves_copies: bool  # that somebody gathers again
    stream: Stream  # of its random numbers
    known: dict[object, Function | None] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.takes

    @property
    def writes(self) -> tuple[int, ...]:
        return self.gives

    def run(self, slots: Slots, this: Pass) -> None:
        operands: list[Tensor] = [slots[k] for k in self.takes]
        # A run is recorded node by node.
        function = self._function(operands) if this.recorder is None else None
        if function is None:
            run_all([one.node for one in self.traced], slots, this)
            for slot in {slot for one in self.traced for slot in one.node.results}.difference(self.gives):
                slots[slot] = None
            return
        if self.stream and isinstance(self.random, RankRandomness):
            self.random.draw_from(own=self.stream == "own")
        kept = this.regathered if self.saves_copies else None
        # What autocast casts is in the function already, and what it leaves alone must stay so.
        with torch._C._DisableAutocast(), surrounded(None, kept):
            made = function(*operands)
        differentiable = torch.is_grad_enabled()
        for slot, has_gradient, result in zip(self.gives, self.has_gradient, made, strict=True):
            slots[slot] = as_planned(result, operands, has_gradient and differentiable, kept, self.again)

    def _function(self, operands: Sequence[Tensor]) -> Function | None:
        """The function for these tensors. How parameters lie does not change from step to step; of others it may."""
        if torch.is_inference_mode_enabled():
            return None
        lie = [(t.shape, t.stride()) for t in map(operands.__getitem__, self.others)]
        key = (*lie, *[t.requires_grad for t in operands], torch.is_grad_enabled())
        if key not in self.known:
            self.known[key] = function_of(self, operands)
        return self.known[key]


# Compiling

_FUNCTIONS: dict[object, Function | None] = {}
# Ranks may be threads of one process, and a compiler's settings belong to the process.
_COMPILING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Made:
    """How many functions were compiled in this process, and how many could not be and run op by op."""

    compiled: int = 0
    refused: int = 0

    def and_also(self, others: Made) -> Made:
        return Made(self.compiled + others.compiled, self.refused + others.refused)

    def since(self, before: Made) -> Made:
        return Made(self.compiled - before.compiled, self.refused - before.refused)


NOTHING_MADE = Made()


def made_so_far() -> Made:
    refused = sum(function is None for function in _FUNCTIONS.values())
    return Made(len(_FUNCTIONS) - refused, refused)


def function_of(nodes: RunCompiled, operands: Sequence[Tensor]) -> Function | None:
    """The compiled function for tensors that lie in memory like these, made when it is first needed."""
    lie = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in operands)
    key = (nodes.key, lie, torch.is_grad_enabled())
    if key not in _FUNCTIONS:
        with _COMPILING:
            if key not in _FUNCTIONS:
                _FUNCTIONS[key] = _compiled(nodes, operands)
    return _FUNCTIONS[key]


def _compiled(nodes: RunCompiled, operands: Sequence[Tensor]) -> Function | None:
    from torch._inductor.compile_fx import compile_fx  # takes a second to import
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    first, last = nodes.traced[0].node.node.name, nodes.traced[-1].node.node.name
    what = f"{first} to {last}, {len(nodes.traced)} ops"
    log.info("compiling %s", what)
    try:
        with working(f"compiling {what}"), torch.random.fork_rng(devices=_cards(operands)), ExitStack() as stack:
            graph = make_fx(_as_function(nodes), tracing_mode="fake")(*operands)
            for device in ("cpu", "cuda"):  # what autocast casts is in the graph already
                stack.enter_context(torch.autocast(device, enabled=False))
            # Now, where all ranks compile, and not while the others wait for a gradient.
            stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
            # Inductor keeps on disk only what has an environment of shapes, if one that it is told to leave alone.
            kept = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
            stack.enter_context(tracing(kept))
            return cast(Function, compile_fx(graph, list(operands), ignore_shape_env=True))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        log.warning("%s run one by one: %s", what, reason)
        return None


def _cards(operands: Sequence[Tensor]) -> list[int]:
    return sorted({t.device.index or 0 for t in operands if t.device.type == "cuda"})


def _as_function(nodes: RunCompiled) -> Function:
    """What the nodes do, as a function of tensors alone."""

    def run(*operands: Tensor) -> tuple[Tensor, ...]:
        held = dict(zip(nodes.takes, operands, strict=True))
        for one in nodes.traced:
            node = one.node
            with surroundings(node.context or nodes.context):
                made = one.bare(_laid(node, [held[slot] for slot in node.operands]))
            for slot, has_gradient, result in zip(node.results, node.has_gradient, made, strict=True):
                held[slot] = result if has_gradient else result.detach()
        return tuple(held[slot] for slot in nodes.gives)

    return run


_CONVOLUTIONS = ("aten.conv2d.default", "aten.conv2d.padding", "aten.convolution.default")


def _laid(node: RunNode, operands: list[Tensor]) -> list[Tensor]:
    """On a GPU images go into convolutions with their channels last, as its kernels want them, and stay so from there
    on: ops keep how their operands lie."""
    image = operands[0] if operands else None
    if image is None or node.node.op not in _CONVOLUTIONS or image.dim() != 4 or image.device.type != "cuda":
        return operands
    return [image.contiguous(memory_format=torch.channels_last), *operands[1:]]
