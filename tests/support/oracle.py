"""A program on simulated devices in another way than the library runs it: every value is a list of what devices hold.

It has no communicator, no buckets, no prefetch and no threads; conversions are those of `simulated_devices`, joint over
all devices. What the executor computes is compared with this.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lopsided.capturing.eager_check import tensors_of
from lopsided.ir.placement import AnyShares, I, Placement, Shares, check_shares, join_pieces
from lopsided.ir.program import Chain, Program, Step
from lopsided.ops.op import Call
from lopsided.ops.simulated_devices import Parts, SeededRandomness, convert, move, run_rule
from lopsided.ops.trial import relative_error
from lopsided.verification.simulator import Simulation


def simulate_by_lists(
    program: Program, model: nn.Module, batch: object, shares: Sequence[float] | Shares, *, seed: int = 0
) -> Simulation:
    """What `lopsided.simulate` should return."""
    fractions = shares if isinstance(shares, Shares) else check_shares(shares)
    devices = _Devices(program, fractions, SeededRandomness(seed, fractions))
    sources = tensors_of(program.graph, model, batch)
    stored = {name: devices.load(name, placement, sources[name]) for name, placement in program.leaves}
    for step in program.steps:
        devices.run(step)
    losses = [loss.reshape(()) for loss in devices.take(program.graph.loss, program.loss)]
    if any(loss.requires_grad for loss in losses):
        torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    updated = {
        buffer: [part.detach() for part in devices.take(name, chain)]
        for (buffer, name), chain in zip(program.graph.updates, program.updates, strict=True)
    }
    gradients, replicas = _gradients(program, stored)
    replicas += [[loss.detach() for loss in losses], *updated.values()]
    apart = max(relative_error(part, parts[0]) for parts in replicas for part in parts)
    return Simulation(losses[0].detach(), gradients, {buffer: parts[0] for buffer, parts in updated.items()}, apart)


class _Devices:
    """The facts every device holds, by value and placement."""

    def __init__(self, program: Program, shares: AnyShares, random: SeededRandomness) -> None:
        self.graph, self.shares, self.random = program.graph, shares, random
        self.facts: dict[tuple[str, Placement], Parts] = {}

    def load(self, name: str, placement: Placement, whole: Tensor) -> Parts:
        """Store a leaf; every device gets memory of its own, so that gradients stay apart."""
        value = self.graph.values[name]
        parts = move([whole for _ in self.shares], I, placement, value.shape, self.shares)
        self.facts[name, placement] = [part.detach().clone().requires_grad_(value.grad) for part in parts]
        return self.facts[name, placement]

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


def _gradients(program: Program, stored: Mapping[str, Parts]) -> tuple[dict[str, Tensor], list[Parts]]:
    """Every parameter's gradient, and the gradients that should be the same on all devices."""
    placements = dict(program.leaves)
    gradients: dict[str, Tensor] = {}
    replicas: list[Parts] = []
    for leaf in program.graph.parameters:
        if leaf.value.grad:
            placement = placements[leaf.value.name]
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in stored[leaf.value.name]]
            gradients[leaf.target] = join_pieces(parts, placement) if placement.is_shard else parts[0]
            replicas += [] if placement.is_shard else [parts]
    return gradients, replicas
