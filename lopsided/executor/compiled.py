"""Nodes that run as one function, compiled by Inductor.

In: the nodes of a stretch (`Stretch` of a schedule), tensors. Out: `RunCompiled`, an instruction that does what the nodes
do one after the other, forward and backward.

What is compiled is traced with the shapes of this device's pieces, below autograd and autocast, so it holds whatever
implementations its nodes have. A function is remembered by what its nodes are and by how its tensors lie in memory, not
by their names: layers that repeat are compiled once. Inductor's own passes that reorder communication have nothing to
do here: nothing in a stretch sends.

What cannot be compiled runs node by node: a node that draws random numbers in a way of its own or has nothing but empty
pieces ends a function, and where tracing or compiling fails the log says which nodes and why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from lopsided.executor.instructions import Instruction, Pass, RunNode, Slots, as_planned, run_all, surrounded
from lopsided.executor.randomness import RankRandomness
from lopsided.ir.graph import Context, Value, signature
from lopsided.ir.op_call import surroundings

log = logging.getLogger(__name__)

LEAST = 2
"""Fewer nodes are not worth a function of their own."""

Function = Callable[..., Sequence[Tensor]]


def compiled_parts(
    nodes: Sequence[RunNode], values: Mapping[str, Value], random: object, context: Context, needed: set[int]
) -> Iterator[Instruction]:
    """The nodes of a stretch in as few functions as can be. `needed` are slots that are read after it."""
    # A node whose random numbers are of another stream begins a new function, as does one that is not compiled.
    runs: list[list[RunNode]] = []
    stream = ""
    for node in nodes:
        drawn = _stream(node)
        if drawn is None or not runs or _stream(runs[-1][-1]) is None or (drawn and stream and drawn != stream):
            runs.append([])
            stream = ""
        runs[-1].append(node)
        stream = drawn or stream
    later: list[set[int]] = []
    reads = set(needed)
    for run in reversed(runs):
        later.append(set(reads))
        reads |= {slot for node in run for slot in node.operands}
    for run, after in zip(runs, reversed(later), strict=True):
        if len(run) < LEAST:
            yield from run
        else:
            yield _as_one(run, values, random, context, after)


def _stream(node: RunNode) -> str | None:
    """Whose random numbers a node draws, "" if none; None if it is not to be compiled."""
    kernel = node.kernel
    if kernel is None or kernel.bare is None or all(0 in shape for shape in kernel.shapes):
        return None
    return kernel.stream


def _as_one(
    nodes: Sequence[RunNode], values: Mapping[str, Value], random: object, context: Context, after: set[int]
) -> RunCompiled:
    numbers: dict[int, int] = {}  # of slots within the function
    takes: list[int] = []
    described: list[object] = []
    for node in nodes:
        takes += [slot for slot in dict.fromkeys(node.operands) if slot not in numbers and slot not in takes]
        for slot in (*node.operands, *node.results):
            numbers.setdefault(slot, len(numbers))
        assert node.kernel is not None
        of_slots = tuple(numbers[s] for s in node.operands), tuple(numbers[s] for s in node.results)
        described.append(
            (signature(node.node, values), node.kernel.rule, node.kernel.pieces, node.kernel.rank, of_slots, node.context)
        )
    made = {slot: has for node in nodes for slot, has in zip(node.results, node.has_gradient, strict=True)}
    gives = tuple(slot for slot in made if slot in after)
    return RunCompiled(
        tuple(nodes),
        tuple(takes),
        gives,
        tuple(made[slot] for slot in gives),
        random,
        context,
        (*described, tuple(numbers[slot] for slot in gives), context),
        again=tuple(slot for node in nodes for slot in node.again),
        saves_copies=any(node.saves_copies for node in nodes),
    )


@dataclass(slots=True)
class RunCompiled(Instruction):
    """Nodes as one function of what they take. `key` is what they are, names apart."""

    nodes: tuple[RunNode, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    has_gradient: tuple[bool, ...]
    random: object
    context: Context
    key: tuple[object, ...]
    again: tuple[int, ...] = ()
    saves_copies: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        return self.takes

    @property
    def writes(self) -> tuple[int, ...]:
        return self.gives

    def run(self, slots: Slots, this: Pass) -> None:
        operands: list[Tensor] = [slots[k] for k in self.takes]
        function = None if this.recorder is not None else function_of(self, operands)
        if function is None:
            run_all(self.nodes, slots, this)
            for slot in {slot for node in self.nodes for slot in node.results}.difference(self.gives):
                slots[slot] = None
            return
        stream = next((node.kernel.stream for node in self.nodes if node.kernel and node.kernel.stream), "")
        if stream and isinstance(self.random, RankRandomness):
            self.random.draw_from(own=stream == "own")
        kept = this.regathered if self.saves_copies else None
        with surrounded(None, kept):
            made = function(*operands)
        differentiable = torch.is_grad_enabled()
        for slot, has_gradient, result in zip(self.gives, self.has_gradient, made, strict=True):
            slots[slot] = as_planned(result, operands, has_gradient and differentiable, kept, self.again)


# Compiling

_FUNCTIONS: dict[object, Function | None] = {}
_COMPILING = threading.Lock()  # ranks may be threads of one process, and a compiler's settings belong to the process


def function_of(nodes: RunCompiled, operands: Sequence[Tensor]) -> Function | None:
    """The compiled function for tensors that lie in memory like these, made when it is first needed."""
    if torch.is_inference_mode_enabled():
        return None
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

    names = [node.node.name for node in nodes.nodes]
    what = f"{names[0]} to {names[-1]} ({len(names)} ops)"
    log.info("compiling %s", what)
    try:
        with torch.random.fork_rng(devices=_cards(operands)):
            graph = make_fx(_as_function(nodes), tracing_mode="fake")(*operands)
            with ExitStack() as stack:
                # What autocast casts is in the graph already.
                for device in ("cpu", "cuda"):
                    stack.enter_context(torch.autocast(device, enabled=False))
                stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
                made: Function = compile_fx(graph, list(operands))
                return made
    except Exception as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
        log.warning("%s run one by one: %s", what, reason)
        return None


def _cards(operands: Sequence[Tensor]) -> list[int]:
    return sorted({t.device.index or 0 for t in operands if t.device.type == "cuda"})


def _as_function(nodes: RunCompiled) -> Function:
    """What the nodes do, as a function of tensors alone."""

    def run(*operands: Tensor) -> tuple[Tensor, ...]:
        held = dict(zip(nodes.takes, operands, strict=True))
        for node in nodes.nodes:
            assert node.kernel is not None and node.kernel.bare is not None
            with surroundings(node.context or nodes.context):
                made = node.kernel.bare([held[slot] for slot in node.operands])
            for slot, has_gradient, result in zip(node.results, node.has_gradient, made, strict=True):
                held[slot] = result if has_gradient else result.detach()
        return tuple(held[slot] for slot in nodes.gives)

    return run
