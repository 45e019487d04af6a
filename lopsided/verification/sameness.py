"""Proof of sameness on real processes: what they compute together against one device.

In: a model, a batch and a plan, on every process of a world. Out: `Sameness`, the worst relative errors of loss,
gradients and buffers in float64, and of the losses of a short training in float32. One device is the simulator's, which
draws the same random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lopsided.capturing.call import flatten_batch
from lopsided.comm.world import World
from lopsided.ir.dtypes import default_dtype_of, in_float64
from lopsided.ir.graph import Graph
from lopsided.ir.program import Program, Step, one_device
from lopsided.ops.simulated_devices import SeededRandomness
from lopsided.ops.trial import relative_error
from lopsided.planner.plan_data import Plan
from lopsided.runtime.agreement import in_group_order
from lopsided.runtime.norms import clip_grad_norm_
from lopsided.runtime.parallel import Parallel
from lopsided.verification.copies import copied, widened
from lopsided.verification.simulator import simulate

Batch = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Sameness:
    """Seen from one process. `where` names what has the worst error in float64; `curve` are the losses of a training
    on the processes, `expected` those of one device."""

    error: float
    where: str
    curve: tuple[float, ...] = ()
    expected: tuple[float, ...] = ()

    @property
    def curve_error(self) -> float:
        pairs = zip(self.curve, self.expected, strict=True)
        return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)


def compare_step(model: nn.Module, batch: Batch, plan: Plan, world: World, *, seed: int = 0) -> Sameness:
    """One forward and backward pass in float64."""
    wide = in_wide(plan)
    model64, batch64 = widened(copied(model).to(world.device)), _double(batch, world.device)
    expected = simulate(one_device(wide.graph), model64, batch64, (1.0,), seed=seed)
    pm = seeded(copied(model64), batch64, wide, world, seed)
    with default_dtype_of(wide.graph):
        loss = pm(**batch64)
        loss.backward()
    errors = [(relative_error(loss.detach(), expected.loss), "loss")]
    # A gradient that is nothing but rounding is measured against the largest there is.
    floor = 1e-5 * max((g.abs().max().item() for g in expected.gradients.values() if g.numel()), default=1.0)
    for name, parameter in pm.named_parameters():
        piece = pm.pieces[name]
        if piece.trained and piece.rank >= 0:
            whole = expected.gradients[name]
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            errors.append((_error(found, piece.take(whole), whole, floor), f"gradient of {name}"))
    for name, buffer in expected.buffers.items() if world.takes_part else ():
        errors.append((relative_error(pm.get_buffer(name), buffer), f"buffer {name}"))
    pm.close()
    worst = max(errors, key=lambda pair: pair[0])
    return Sameness(*worst)


def _error(found: Tensor, expected: Tensor, whole: Tensor, floor: float) -> float:
    """Of a piece, relative to the largest element of the whole."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    scale = max(whole.abs().max().item(), floor)
    error = (found - expected).abs().max().item() / scale
    return math.inf if math.isnan(error) else error


def compare_training(
    model: nn.Module,
    batch: Batch,
    plan: Plan,
    world: World,
    *,
    steps: int = 20,
    seed: int = 0,
    lr: float = 1e-3,
    max_norm: float = math.inf,
) -> Sameness:
    """`steps` steps of AdamW in the plan's own dtype, the same batch every time, on the processes and on one device; as
    long as the loss of one device is a number."""
    alone = copied(model).to(world.device)
    pm = seeded(copied(model), batch, plan, world, seed)
    ours = torch.optim.AdamW(pm.parameters(), lr=lr)
    theirs = torch.optim.AdamW(alone.parameters(), lr=lr)
    whole = one_device(plan.graph)
    curve, expected = [], []
    # Convolutions on a GPU round to 10 bits unless told otherwise, which is another matter.
    exact, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    for _ in range(steps):
        # Once for all, on rank 0: the processes may share few cores.
        told = torch.zeros((), dtype=torch.float64)
        if world.rank == 0:
            told.fill_(_step_alone(whole, alone, batch, theirs, seed, max_norm))
        dist.broadcast(told, 0)
        one = told.item()
        if not math.isfinite(one):
            break  # there is nothing to compare with: the curves end here
        expected.append(one)
        loss = pm(**batch)
        loss.backward()
        if math.isfinite(max_norm):
            clip_grad_norm_(pm, max_norm)
        ours.step()
        ours.zero_grad()
        curve.append(loss.item())
    torch.backends.cudnn.allow_tf32 = exact
    pm.close()
    return Sameness(0.0, "", tuple(curve), tuple(expected))


def _step_alone(
    program: Program, model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, seed: int, max_norm: float
) -> float:
    found = simulate(program, model, batch, (1.0,), seed=seed)
    for name, parameter in model.named_parameters():
        parameter.grad = found.gradients.get(name)
    if math.isfinite(max_norm):
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    with torch.no_grad():
        for name, buffer in found.buffers.items():
            model.get_buffer(name).copy_(buffer)
    return float(found.loss.item())


def seeded(model: nn.Module, batch: Batch, plan: Plan, world: World, seed: int) -> Parallel:
    """A parallel model whose random numbers are those that one device would draw."""
    random = SeededRandomness(seed, in_group_order(plan, world))
    return Parallel(model, batch, plan.graph, plan, world, seed=seed, randomness=random)


def in_wide(plan: Plan) -> Plan:
    """The plan for the same model in float64."""
    graph = in_float64(plan.graph)
    return replace(plan, program=_on(graph, plan.program))


def _on(graph: Graph, program: Program) -> Program:
    """The same choices for a graph with the same names."""
    nodes = {node.name: node for node in graph.nodes}
    steps = tuple(Step(nodes[step.node.name], step.rule, step.chains) for step in program.steps)
    return Program(graph, program.leaves, steps, program.loss, program.updates)


def _double(batch: Batch, device: torch.device) -> dict[str, object]:
    tensors, rebuild = flatten_batch(batch)
    moved = [t.to(device) for t in tensors.values()]
    _, wide = rebuild([t.double() if t.dtype.is_floating_point else t for t in moved])
    return wide
