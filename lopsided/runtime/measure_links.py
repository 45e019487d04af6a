"""How fast processes talk: seconds of every collective, every way, at several sizes, as latency and bytes per second.

In: a `Wire` among the processes of a group. Out: `Fit`s. All processes do the same at the same time: how often a
collective is repeated and when sizes are large enough is decided from seconds they agree on, those of the slowest.

A fit is a straight line over bytes of the whole tensor, least squares of relative errors: else the largest size would
be the only one that counts, and latency whatever is left over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lopsided.cluster import MEASURABLE
from lopsided.devices import Link
from lopsided.runtime.measure_ops import wait_for
from lopsided.runtime.wire import Wire

WAYS = tuple((collective, way) for collective, found in MEASURABLE.items() for way in found)
"""All that a cluster can have measured."""

_SIZES = tuple(2**power for power in (12, 16, 19, 22, 24, 26, 28))
_FEWEST_SIZES = 4  # latency shows at the first, bytes per second at the last
_BATCHES = 3
_MOST_REPEATS = 200
_LONG_S = 0.02  # a size that takes so long shows the bytes per second well enough


@dataclass(frozen=True, slots=True)
class Fit:
    """One way of a collective."""

    collective: str
    way: str
    link: Link
    error: float  # how far, relatively, a size is from the line


@dataclass(frozen=True, slots=True)
class Council:
    """The processes that measure, and how they agree: over a group that needs no GPU. None where there is but one."""

    group: dist.ProcessGroup | None

    def slowest(self, seconds: float) -> float:
        """The largest of what everyone has found; equal everywhere."""
        if self.group is None:
            return seconds
        agreed = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.group)
        return float(agreed)

    def hear(self, told: object) -> list[object]:
        """What everyone tells, by rank."""
        if self.group is None:
            return [told]
        heard: list[object] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(heard, told, group=self.group)
        return heard

    def meet(self, meanwhile: Callable[[], object]) -> None:
        """Until all are here. Who comes early works on, or the last would measure a machine that is empty."""
        if self.group is None:
            return
        arriving = dist.barrier(group=self.group, async_op=True)
        if arriving is None:
            return
        while not arriving.is_completed():
            meanwhile()
        arriving.wait()


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Constant, slope and mean relative error of the line nearest to (x, y) by relative error, neither part negative.

    >>> constant, slope, error = line_through([(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)])
    >>> round(constant, 9), round(slope, 9), round(error, 9)
    (1.0, 2.0, 0.0)
    """
    # With u = 1 / y and v = x / y, every point should have constant · u + slope · v = 1.
    scaled = [(1 / y, x / y) for x, y in points]
    uu, uv, vv = (sum(a * b for a, b in pairs) for pairs in _products(scaled))
    u, v = sum(a for a, _ in scaled), sum(b for _, b in scaled)
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        constant, slope = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
    else:
        constant, slope = 0.0, v / vv if vv else 0.0
    if constant < 0:
        constant, slope = 0.0, v / vv
    elif slope < 0:
        constant, slope = u / uu, 0.0
    return constant, slope, statistics.fmean(abs(constant * a + slope * b - 1) for a, b in scaled)


def _products(scaled: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    yield [(a, a) for a, _ in scaled]
    yield list(scaled)
    yield [(b, b) for _, b in scaled]


def fit_ways(
    wire: Wire,
    council: Council,
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float,
    ways: Sequence[tuple[str, str]] = WAYS,
    step: Callable[[], object] = lambda: None,
) -> tuple[Fit, ...]:
    """The lines of these ways, in about so many seconds. `step` is called after each."""
    fits = []
    for collective, way in ways:
        points = list(_points(wire, council, device, dtype, budget_s / len(ways), collective, way))
        latency_s, s_per_byte, error = line_through(points)
        fits.append(Fit(collective, way, Link(latency_s, min(1 / max(s_per_byte, 1e-18), 1e18)), error))
        step()
    return tuple(fits)


def _points(
    wire: Wire,
    council: Council,
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float,
    collective: str,
    way: str,
) -> Iterator[tuple[float, float]]:
    """Bytes of the whole tensor, and seconds."""
    left_s, slot = budget_s, budget_s / (_FEWEST_SIZES + 1)
    for number, size in enumerate(_SIZES):
        # Pieces are equal, and so are the pieces of pieces that all_to_all sends.
        piece = max(size // dtype.itemsize // wire.size**2, 1) * wire.size
        talk = _talk(wire, collective, way, piece, dtype, device)
        talk()
        one = council.slowest(_seconds(talk, device, 2))
        repeats = min(max(int(slot / _BATCHES / one), 1), _MOST_REPEATS)
        batches = _BATCHES if one * _BATCHES < slot else 1
        took = council.slowest(statistics.median(_seconds(talk, device, repeats) for _ in range(batches)))
        yield float(piece * wire.size * dtype.itemsize), took
        left_s = max(left_s - 3 * one - took * repeats * batches, 0.0)
        # The next size takes some four times as long.
        if number + 1 >= _FEWEST_SIZES and (took > _LONG_S or 20 * took > left_s):
            return


def _seconds(talk: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    wait_for(device)
    started = time.perf_counter()
    for _ in range(repeats):
        talk()
    wait_for(device)
    return (time.perf_counter() - started) / repeats


def _talk(
    wire: Wire, collective: str, way: str, piece: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    counts = [piece] * wire.size
    mine = torch.zeros(piece, dtype=dtype, device=device)
    if collective == "all_gather":
        return lambda: wire.all_gather(mine, counts, what="measuring", way=way).wait()
    if collective == "all_to_all":
        each = [piece // wire.size] * wire.size
        return lambda: wire.all_to_all(mine, each, each, what="measuring").wait()
    whole = torch.zeros(piece * wire.size, dtype=dtype, device=device)
    if collective == "reduce_scatter":
        return lambda: wire.reduce_scatter(whole, counts, what="measuring", way=way).wait()
    return lambda: wire.all_reduce(whole, what="measuring", way=way).wait()
