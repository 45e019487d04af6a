"""What a process takes around every op: its own work between ops, and autograd's.

In: a device. Out: seconds for each op and each conversion of a pass. A model of ops so small that they take next to
nothing is run as data parallelism runs it, forward and backward, over a network that answers at once; what is left when
the same ops written out in a row are taken off is what lies around them.

On a GPU the host runs ahead of the device, which does not wait for it as long as kernels are longer: nothing is added.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import Network
from lopsided.cluster.devices import Kind, Link
from lopsided.comm.communicator import Communicator
from lopsided.comm.echo import LoneCommunicator
from lopsided.comm.redistribute import Redistributor
from lopsided.executor.executor import Executor
from lopsided.executor.gradients import Gradients
from lopsided.executor.randomness import RankRandomness
from lopsided.ir.placement import Shares
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.lower import lower

_LAYERS, _WIDTH = 24, 8
_ROUNDS = 7


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def measure_overhead(device: torch.device, lasting_s: float, now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds around an op, forward or backward alike, by the clock `now`."""
    if device.type == "cuda":
        return 0.0
    model, x = _Small(), torch.ones(2 * _WIDTH, _WIDTH)
    kind = Kind("one", "here", 1, 2, (("f32", 1e9),), 1e9, 2**30, 0.0)
    cluster, shares = Cluster("two", "", (kind,), Link(0.0, 1e18), Link(0.0, 1e18)), Shares((0.5, 0.5))
    graph = capture(model, {"x": x})
    prices = SharePrices(Costs(graph, cluster, optimizer_named("sgd")), Scale(cluster, shares))
    program = data_parallel(derive_rules(graph), prices)
    exchange = Redistributor(cast(Communicator, LoneCommunicator()), shares, Network(cluster))
    parameters = {name: nn.Parameter(p.detach().to(device)) for name, p in model.named_parameters()}
    gradients = Gradients(exchange)
    schedule = lower(program)
    steps = Executor(schedule, exchange, gradients, RankRandomness(0, 0, device), parameters, device)
    x = x[:_WIDTH]
    names = {leaf.target: leaf.value.name for leaf in program.graph.leaves}
    leaves = {names[name]: parameter for name, parameter in parameters.items()} | {names["x"]: x.to(device)}

    def interpreted() -> None:
        loss, _, _ = steps.run(leaves)
        loss.backward()
        gradients.finish()

    weights = list(parameters.values())

    def plain() -> None:
        h = leaves[names["x"]]
        for weight, bias in zip(weights[::2], weights[1::2], strict=True):
            h = torch.ops.aten.tanh.default(torch.ops.aten.linear.default(h, weight, bias))
        h.sum().backward()

    interpreted()
    plain()
    taken: tuple[list[float], list[float]] = ([], [])
    until = time.perf_counter() + lasting_s
    while len(taken[0]) < _ROUNDS or time.perf_counter() < until:
        # In turn, so that both meet the same noise.
        for run, times in zip((interpreted, plain), taken, strict=True):
            started = now()
            run()
            times.append(now() - started)
    around = statistics.median(taken[0]) - statistics.median(taken[1])
    return max(around, 0.0) / (2 * (len(program.steps) + len(list(schedule.redistributed))))
