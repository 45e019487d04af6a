"""What a step takes beside its ops: the optimizer's update, and the host's work around every op.

In: a device; an optimizer's name and a dtype. Out: seconds around each op and each conversion of a pass
(`measure_overhead`), and of each size of tensor seconds an update of it takes, turn by turn (`measure_update`);
fraction 1 has `cost.UPDATED_ELEMENTS`.

Around ops: a model of ops so small that they take next to nothing is run as data parallelism runs it, forward and
backward, over a network that answers at once; what is left when the same ops written out in a row are taken off is what
lies around them. On a GPU the host runs ahead of the device, which does not wait for it as long as kernels are longer:
nothing is added.

Updates: the optimizers are torch's own, with the choices that torch makes for the device (one tensor after the other,
several at once, fused). There are so many tensors that caches do not hold them from step to step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.coefficients import KIND, coefficient
from lopsided.cluster.collectives import Network
from lopsided.cluster.devices import Kind, Link
from lopsided.comm.in_process import LoneCommunicator
from lopsided.comm.redistribute import Redistributor
from lopsided.executor.executor import Executor
from lopsided.executor.gradients import Gradients
from lopsided.executor.randomness import RankRandomness
from lopsided.ir.graph import DTYPES, Graph
from lopsided.ir.placement import Shares
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel
from lopsided.planner.search_cost import SharePrices
from lopsided.profiling.noise import wait_for
from lopsided.profiling.op_times import samples_of
from lopsided.schedule.cost import UPDATED_ELEMENTS, Costs, Scale, optimizer_named
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
    exchange = Redistributor(LoneCommunicator(), shares, Network(cluster))
    parameters = {name: nn.Parameter(p.detach().to(device)) for name, p in model.named_parameters()}
    gradients = Gradients(exchange)
    schedule = lower(program)
    steps = Executor(schedule, exchange, gradients, RankRandomness(0, 0, device), parameters, device)
    x = x[:_WIDTH]
    names = {leaf.target: leaf.value.name for leaf in program.graph.leaves}
    leaves = {names[name]: parameter for name, parameter in parameters.items()} | {names["x"]: x.to(device)}

    def interpreted() -> None:
        loss = steps.run(leaves).loss
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
    passed = 2 * (len(program.steps) + len(list(schedule.redistributed)))  # there and back
    return coefficient(KIND, "overhead_s").clamp(around / passed)


# Updates

FRACTIONS = (1 / 256, 1 / 16, 1.0)
"""Of sizes, where no model says which ones it has."""

_CPU_BYTES, _GPU_BYTES = 2**25, 2**28
_LEAST_BYTES = 2**22
# A small tensor, in elements: its update is mostly what does not grow with size.
_SMALL = 4096
# A step of an optimizer holds up to six times its parameters: gradients, state, and what it makes in between.
_COPIES = 6
_STEP = 1e-4

_MAKERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=_STEP),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=_STEP),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=_STEP, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=_STEP),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=_STEP),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=_STEP),
}
MEASURABLE_OPTIMIZERS = tuple(_MAKERS)
"""Those that most people use first."""


def trained_dtypes(graph: Graph) -> tuple[str, ...]:
    """The dtypes that parameters with a gradient have."""
    return tuple(dict.fromkeys(leaf.value.dtype for leaf in graph.parameters if leaf.value.grad))


def fractions_of(graphs: Sequence[Graph]) -> tuple[float, ...]:
    """At which sizes to measure an update for one model: a small one, and up to what most of its elements are in.

    A straight line is all that is made of them, and tensors that a cache holds lie on another one than those it does
    not.
    """
    if len(graphs) != 1:
        return FRACTIONS
    sizes = sorted(leaf.value.elements for leaf in graphs[0].parameters if leaf.value.grad)
    half, passed, usual = sum(sizes) / 2, 0, 1
    for size in sizes:
        passed, usual = passed + size, size
        if passed >= half:
            break
    usual = min(max(usual, _SMALL), UPDATED_ELEMENTS)
    return tuple(
        sorted({min(_SMALL, usual // 4) / UPDATED_ELEMENTS, usual // 4 / UPDATED_ELEMENTS, usual / UPDATED_ELEMENTS})
    )


def measure_update(
    optimizer: str,
    dtype: str,
    device: torch.device,
    room_bytes: int,
    lasting_s: float,
    now: Callable[[], float] = time.perf_counter,
    fractions: Sequence[float] = FRACTIONS,
) -> dict[float, list[list[float]]]:
    """Seconds a tensor on the clock `now` at each fraction; nothing for an optimizer that torch does not have."""
    if optimizer not in _MAKERS:
        return {}
    most = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    size = max(min(most, room_bytes // _COPIES), _LEAST_BYTES)
    each = lasting_s / len(fractions)
    return {
        fraction: _seconds_a_tensor(optimizer, DTYPES[dtype], device, fraction, size, each, now)
        for fraction in fractions
    }


def _seconds_a_tensor(
    optimizer: str,
    dtype: torch.dtype,
    device: torch.device,
    fraction: float,
    size: int,
    lasting_s: float,
    now: Callable[[], float],
) -> list[list[float]]:
    elements = round(fraction * UPDATED_ELEMENTS)
    count = max(size // dtype.itemsize // elements, 1)
    parameters = []
    for _ in range(count):
        parameter = nn.Parameter(torch.full((elements,), 0.5, dtype=dtype, device=device))
        parameter.grad = torch.full_like(parameter, 1e-3)
        parameters.append(parameter)
    made = _MAKERS[optimizer](parameters)
    made.step()  # makes the state
    wait_for(device)
    turns = list[list[float]]()
    until = time.perf_counter() + lasting_s
    while len(turns) < 3 and (not turns or time.perf_counter() < until):
        turns.append([seconds / count for seconds in samples_of(made.step, device, lasting_s / 3, now)])
    return turns
