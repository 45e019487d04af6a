"""The oracle: any program on N imaginary devices, in one process, with gradients.

In: a `Program`, the model and batch it was captured from, shares. Out: `Simulation` — loss, every parameter's gradient
and every changed buffer, joined from the devices. One device is the special case of a single share.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lopsided.capturing.capture_graph import flatten_batch
from lopsided.errors import CaptureError
from lopsided.ir.graph import Graph, Leaf
from lopsided.ir.placement import AnyShares, I, Placement, Shares, check_shares, join_pieces
from lopsided.ir.program import Chain, Program, Step, check_facts
from lopsided.ops.op import Call
from lopsided.ops.simulated_devices import Parts, SeededRandomness, convert, move, run_rule
from lopsided.ops.trial import relative_error


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the devices computed together. `spread` is how far, relatively, replicas are apart that should be
    equal."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    spread: float


def simulate(
    program: Program, model: nn.Module, batch: object, shares: Sequence[float] | Shares, *, seed: int = 0
) -> Simulation:
    """Run `program` on one imaginary device per share: forward, backward, and join the results.

    Random ops draw from `seed`: what a device draws for its piece is the piece of what one device would draw. Whether
    the rules of the program are rules of its ops is for `check_program` to say.
    """
    fractions = shares if isinstance(shares, Shares) else check_shares(shares)
    check_facts(program)
    with torch.inference_mode(False), torch.enable_grad():
        sources = tensors_of(program.graph, model, batch)
        with next((tensor.device for tensor in sources.values()), torch.device("cpu")):
            return _simulate(program, sources, fractions, seed)


def _simulate(program: Program, sources: Mapping[str, Tensor], fractions: AnyShares, seed: int) -> Simulation:
    devices = _Devices(program.graph, fractions, SeededRandomness(seed, fractions))
    stored = {}
    for name, placement in program.leaves:
        stored[name] = devices.load(name, placement, sources[name])
    for step in program.steps:
        devices.run(step)
    losses = devices.take(program.graph.loss, program.loss)
    if any(loss.requires_grad for loss in losses):
        torch.autograd.backward(
            [loss.reshape(()) for loss in losses], [torch.ones_like(loss.reshape(())) for loss in losses]
        )
    gradients, spread = _gradients(program, stored)
    updated = {
        buffer: [part.detach() for part in devices.take(name, chain)]
        for (buffer, name), chain in zip(program.graph.updates, program.updates, strict=True)
    }
    spread = max([spread, _spread([loss.detach() for loss in losses]), *map(_spread, updated.values())])
    buffers = {buffer: parts[0] for buffer, parts in updated.items()}
    return Simulation(losses[0].detach().reshape(()), gradients, buffers, spread)


def _spread(replicas: Parts) -> float:
    """How far, relatively, values that should be equal are apart."""
    return max((relative_error(part, replicas[0]) for part in replicas[1:]), default=0.0)


def tensors_of(graph: Graph, model: nn.Module, batch: object) -> dict[str, Tensor]:
    """The tensor of every leaf, in the dtype the graph has it."""
    inputs, _ = flatten_batch(batch)
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    found = {}
    for leaf in graph.leaves:
        tensor = _tensor(leaf, model, inputs)
        if tuple(tensor.shape) != leaf.value.shape:
            raise CaptureError(
                f"{leaf.kind} {leaf.target} has shape {tuple(tensor.shape)}, "
                f"the graph was captured with {leaf.value.shape}",
                do="capture the model again with a batch of this shape",
            )
        if tensor.is_meta:
            raise CaptureError(
                f"{leaf.kind} {leaf.target} is on meta and has no elements",
                do="build the model on a real device to run it",
            )
        found[leaf.value.name] = tensor.detach().to(where, leaf.value.torch_dtype)
    return found


def _tensor(leaf: Leaf, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    if leaf.kind == "constant":
        return torch.tensor(leaf.data, dtype=leaf.value.torch_dtype).reshape(leaf.value.shape)
    try:
        if leaf.kind == "parameter":
            return model.get_parameter(leaf.target)
        return model.get_buffer(leaf.target) if leaf.kind == "buffer" else inputs[leaf.target]
    except (AttributeError, KeyError):
        raise CaptureError(
            f"the {'batch' if leaf.kind == 'input' else 'model'} has no {leaf.kind} {leaf.target!r}",
            do="use the model and batch the program was made for",
        ) from None


class _Devices:
    """The facts every device holds, by value and placement."""

    def __init__(self, graph: Graph, shares: AnyShares, random: SeededRandomness) -> None:
        self.graph, self.shares, self.random = graph, shares, random
        self.facts: dict[tuple[str, Placement], Parts] = {}

    def load(self, name: str, placement: Placement, whole: Tensor) -> Parts:
        """Store a leaf; every device gets memory of its own, so that gradients stay apart."""
        value = self.graph.values[name]
        parts = move([whole for _ in self.shares], I, placement, value.shape, self.shares)
        leaves = [part.detach().clone().requires_grad_(value.grad) for part in parts]
        self.facts[name, placement] = leaves
        return leaves

    def take(self, name: str, chain: Chain) -> Parts:
        """The value in the placement a chain ends with; conversions on the way are made once and kept."""
        shape = self.graph.values[name].shape
        for source, to in itertools.pairwise(chain):
            if (name, to) not in self.facts:
                self.facts[name, to] = convert(self.facts[name, source], source, to, shape, self.shares)
        return self.facts[name, chain[-1]]

    def run(self, step: Step) -> None:
        node = step.node
        call = Call(node, tuple(self.graph.values[name] for name in node.operands))
        operands = [self.take(name, chain) for name, chain in zip(node.operands, step.chains, strict=True)]
        results = run_rule(call, step.rule, operands, self.shares, self.random)
        for value, give, parts in zip(node.results, step.rule.gives, results, strict=True):
            self.facts[value.name, give] = parts


def _gradients(program: Program, stored: Mapping[str, Parts]) -> tuple[dict[str, Tensor], float]:
    placements = dict(program.leaves)
    gradients, spread = {}, 0.0
    for leaf in program.graph.parameters:
        if not leaf.value.grad:
            continue
        placement = placements[leaf.value.name]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in stored[leaf.value.name]]
        if placement.is_shard:
            gradients[leaf.target] = join_pieces(parts, placement)
        else:
            gradients[leaf.target] = parts[0]
            spread = max(spread, _spread(parts))
    return gradients, spread
