"""A program run on random leaves: forward and backward, over and over, as a device of a plan would.

In: a program with its cluster and shares (`Play`), and a wire, or nobody to talk with. Out: seconds of a pass there and
back, of one device over a network that answers at once (`alone_s`), or of all together (`together_s`). Nothing of a
model is needed but its graph, and nothing of it is changed.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import Network
from lopsided.comm.communicator import Communicator
from lopsided.comm.echo import LoneCommunicator
from lopsided.comm.redistribute import Redistributor
from lopsided.executor.executor import Executor
from lopsided.executor.gradients import Gradients
from lopsided.executor.randomness import RankRandomness
from lopsided.ir.graph import Graph, Leaf
from lopsided.ir.placement import Placement, Shares, pieces_of
from lopsided.ir.program import Program
from lopsided.ops.op import Call
from lopsided.profiling.links import ControlGroup
from lopsided.profiling.load import wait_for
from lopsided.profiling.op_times import REFUSED, drawn, indices_below
from lopsided.schedule.lower import lower
from lopsided.schedule.schedule import BUCKET_BYTES, Decisions

FEWEST = 3  # steps, after one to warm up

_LOOKUPS = ("embedding", "gather", "index", "scatter", "take_along_dim", "one_hot", "cross_entropy", "nll_loss")


@dataclass(frozen=True, slots=True)
class Play:
    """What is run. Shares are in the order of the ranks."""

    program: Program
    cluster: Cluster
    shares: Shares
    bucket_bytes: int = BUCKET_BYTES
    regather: bool = False


def alone_s(
    play: Play, rank: int, device: torch.device, lasting_s: float, now: Callable[[], float], fewest: int = FEWEST
) -> float | None:
    """The median on the clock `now`, of so many steps and more for so long; None if an op refuses random operands."""
    casts = {node.context.autocast.partition(":")[0] for node in play.program.graph.nodes}
    if not casts <= {"", device.type}:
        return None  # another device's autocast would not cast here
    times: list[float] = []
    try:
        with _training():
            step = stepper(play, cast(Communicator, LoneCommunicator(rank, play.cluster.devices)), device)
            step()
            until = time.perf_counter() + lasting_s
            while len(times) < fewest or time.perf_counter() < until:
                started = now()
                step()
                times.append(now() - started)
    except REFUSED:
        return None
    return statistics.median(times)


def together_s(play: Play, wire: Communicator | None, council: ControlGroup, device: torch.device) -> float:
    """The median of a few steps until the last rank was done, everyone sending what there is to send.

    To be called by all ranks, once all know that it runs: one that gives up would leave the others waiting. Who has no
    wire has no part in it and looks on.
    """
    times: list[float] = []
    with _training():
        step = stepper(play, wire, device) if wire is not None else lambda: None
        step()
        for _ in range(FEWEST):
            council.gather()
            started = time.perf_counter()
            step()
            times.append(council.slowest(time.perf_counter() - started))
    return statistics.median(times)


@contextmanager
def _training() -> Iterator[None]:
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def stepper(play: Play, wire: Communicator, device: torch.device) -> Callable[[], None]:
    """A pass there and back."""
    program, shares = play.program, play.shares
    exchange = Redistributor(wire, shares, Network(play.cluster))
    gradients = Gradients(exchange)
    placed = dict(program.leaves)
    leaves = {
        leaf.value.name: _leaf(leaf, program.graph, placed[leaf.value.name], shares, wire.rank, device)
        for leaf in program.graph.leaves
    }
    parameters = {leaf.target: cast(nn.Parameter, leaves[leaf.value.name]) for leaf in program.graph.parameters}
    schedule = lower(program, Decisions(play.bucket_bytes, regather=play.regather))
    steps = Executor(schedule, exchange, gradients, RankRandomness(0, wire.rank, device), parameters, device)

    def step() -> None:
        for parameter in parameters.values():
            parameter.grad = None
        loss, _, _ = steps.run(leaves)
        loss.reshape(()).backward()
        gradients.finish()
        wait_for(device)

    return step


def _leaf(leaf: Leaf, graph: Graph, placement: Placement, shares: Shares, rank: int, device: torch.device) -> Tensor:
    value = leaf.value
    if leaf.kind == "constant":
        return torch.tensor(leaf.data, dtype=value.torch_dtype, device=device).reshape(value.shape)
    pieces = pieces_of(placement, value.shape, shares) if placement.is_shard else ()
    shape = placement.local_shape(value.shape, pieces, rank)
    tensor = drawn(value, shape, (), _below(value.name, graph), device).detach()
    if leaf.kind != "parameter":
        return tensor
    if len(shape) > 1 and tensor.is_floating_point():
        # About as large as a model begins with: else values overflow or vanish, and processors are slow at tiny ones.
        tensor = (tensor - 0.5) * (4 / math.sqrt(max(math.prod(shape[1:]), 1)))
    return nn.Parameter(tensor, requires_grad=value.grad)


def _below(name: str, graph: Graph) -> int:
    """A bound for the whole numbers of a leaf that suits all who look something up by it, or by what becomes of it."""
    reached, bounds = {name}, list[int]()
    for node in graph.nodes:
        if reached.isdisjoint(node.operands):
            continue
        packet = node.op.split(".")[1] if "." in node.op else node.op
        if packet.startswith(_LOOKUPS):
            bounds.append(indices_below(Call(node, tuple(graph.values[operand] for operand in node.operands))))
        else:
            reached |= {v.name for v in node.results if not (v.torch_dtype.is_floating_point or v.dtype == "bool")}
    return min(bounds, default=2)
