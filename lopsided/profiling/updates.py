"""How long an optimizer's step takes: on lists of tensors like a model's, from small to large.

In: an optimizer's name, a dtype, a device. Out: of each size, seconds a tensor, turn by turn; fraction 1 has
`cost.UPDATED_ELEMENTS`. The optimizers are torch's own, with the choices that torch makes for the device (one tensor
after the other, several at once, fused). There are so many tensors that caches do not hold them from step to step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from lopsided.ir.graph import DTYPES, Graph
from lopsided.profiling.load import wait_for
from lopsided.profiling.op_times import samples_of
from lopsided.schedule.cost import UPDATED_ELEMENTS

FRACTIONS = (1 / 256, 1 / 16, 1.0)
"""Of sizes, where no model says which ones it has."""

_CPU_BYTES, _GPU_BYTES = 2**25, 2**28
_LEAST_BYTES = 2**22
_SMALL = 4096  # elements
_COPIES = 6  # of the parameters that may be in memory at once: gradients, state, and what a step makes in between
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
