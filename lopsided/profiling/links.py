"""How fast processes talk: seconds of every collective, every way, at several sizes and at unequal pieces.

In: a `Communicator` among the processes of a group. Out: `Fit`s: latency, bytes per second, and which part of the
seconds grows with the largest piece. All processes do the same at the same time: how often a collective is repeated and
when sizes are large enough is decided from seconds they agree on.

A collective is timed as training meets it. Before each, every process computes for a millisecond, so threads that carry
it have gone to sleep and a process may have used up its turn of the processor; then all meet, and each times the
collective alone. What it took is the mean over the ranks: who comes last from the meeting waits least, but is not the
last to go on (docs/profiling.md has the figures, also of other ways to time it).

A fit is least squares of relative errors, points weighted by how steady they were: else the largest size would be the
only one that counts, and latency whatever is left over. With w bytes of the whole and the largest piece λ times the
mean one,

    seconds = latency + w · (1 - skew + skew · λ) / bytes_per_s

And how fast a device fetches what lies in the memory of its host, and takes it back: optimizer state may be kept there
(`measure_host_link`). All processes measure at once, as they fetch at once in training: devices that share a bus share
it here.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

from lopsided.cluster.cluster import MEASURABLE
from lopsided.cluster.coefficients import KIND, LINK, coefficient
from lopsided.cluster.devices import Link
from lopsided.comm.communicator import Communicator
from lopsided.comm.world import waiting
from lopsided.profiling.noise import BackgroundLoad, noise, typical, wait_for

WAYS = tuple((collective, way) for collective, found in MEASURABLE.items() for way in found)
"""All that a cluster can have measured."""
TURNS = 2
"""Over all ways, so that a busy moment meets none of them twice."""

_SIZES = tuple(2**power for power in (12, 17, 20, 22, 24, 26, 28))
# Every way is timed at four sizes at least: latency shows at the smallest, bytes per second at the largest.
_FEWEST_SIZES = 4
_SKEWED_SIZES = (2**20, 2**22)
# How many sizes of a way are timed in a turn, in the mean; the time for one size is planned by it.
_LOOKS = 3.5
# The fewest and the most repeats of one size in a turn.
_FEWEST, _MOST = 2, 40
# A size that takes 20 ms shows the bytes per second, once four sizes are timed; one that takes 0.2 s, at once.
_LONG_S, _TOO_LONG_S = 0.02, 0.2
# Nothing is sent that would take longer than this, in seconds.
_MOST_S = 1.0
_SHAKES = 64
# A point's relative error is taken to be 5 % at least: else one steady point would outweigh all others.
_STEADY = 0.05


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Seconds of one way at one size: bytes of the whole, the largest piece over the mean one."""

    bytes: float
    largest: float
    seconds: float
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """One way of a collective."""

    collective: str
    way: str
    link: Link
    error: float  # how far, relatively, a point is from the fit
    noise: float = 0.0  # how far, relatively, the same measured again might be
    points: tuple[LinkSample, ...] = ()


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The processes that measure, and how they agree: over a group that needs no GPU. None where there is but one."""

    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.group is not None else 0

    def slowest(self, seconds: float) -> float:
        """The largest of what everyone has found; equal everywhere."""
        return self._agreed([seconds], dist.ReduceOp.MAX)[0]

    def mean(self, seconds: Sequence[float]) -> list[float]:
        """The mean of each number over all ranks; equal everywhere."""
        everyone = dist.get_world_size(self.group) if self.group is not None else 1
        return [total / everyone for total in self._agreed(seconds, dist.ReduceOp.SUM)]

    def _agreed(self, seconds: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.group is None:
            return list(seconds)
        agreed = torch.tensor(list(seconds), dtype=torch.float64)
        with waiting("what others have measured"):
            dist.all_reduce(agreed, how, group=self.group)
        return [float(number) for number in agreed]

    def hear(self, told: object) -> list[object]:
        """What everyone tells, by rank."""
        if self.group is None:
            return [told]
        heard: list[object] = [None] * dist.get_world_size(self.group)
        with waiting("what others have measured"):
            dist.all_gather_object(heard, told, group=self.group)
        return heard

    def gather(self) -> None:
        """Wait until all are here."""
        self.slowest(0.0)

    def meet(self, meanwhile: Callable[[], object]) -> None:
        """Wait until all are here. Who comes early works on, or the last would measure a machine that is empty."""
        if self.group is None:
            return
        arriving = dist.barrier(group=self.group, async_op=True)
        if arriving is None:
            return
        while not arriving.is_completed():
            meanwhile()
        with waiting("others that measure"):
            arriving.wait()


# Lines


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Constant, slope and mean relative error of the line nearest to (x, y) by relative error, neither part negative.

    >>> constant, slope, error = line_through([(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)])
    >>> round(constant, 9), round(slope, 9), round(error, 9)
    (1.0, 2.0, 0.0)
    """
    if len(points) == 1:  # which says nothing about what does not grow
        return 0.0, points[0][1] / points[0][0], 0.0
    (constant, slope), error = _nearest([(1.0, x) for x, _ in points], [y for _, y in points])
    return constant, slope, error


def _nearest(
    rows: Sequence[Sequence[float]], seconds: Sequence[float] | NDArray[np.float64], noises: Sequence[float] = ()
) -> tuple[list[float], float]:
    """Factors of the columns, none negative, by least squares of relative errors; and their mean."""
    scaled = np.array(rows) / np.array(seconds)[:, None]
    weights = 1 / np.hypot(_STEADY, np.array(noises or [0.0] * len(seconds)) / 2)
    sizes = scaled.max(axis=0)
    sizes[sizes == 0] = 1.0
    factors, _ = nnls(scaled / sizes * weights[:, None], weights)
    found = factors / sizes
    return [float(factor) for factor in found], float(np.average(np.abs(scaled @ found - 1), weights=weights))


def fitted(collective: str, way: str, points: Sequence[LinkSample]) -> Fit:
    """The line through these points; with a skew, if some have unequal pieces."""
    skewed = any(point.largest > 1.01 for point in points)
    rows = [(1.0, point.bytes, point.bytes * point.largest)[: 3 if skewed else 2] for point in points]
    seconds, noises = [point.seconds for point in points], [point.noise for point in points]
    (latency_s, *per_byte), error = _nearest(rows, seconds, noises)
    total = min(max(sum(per_byte), 1e-18), 1.0)
    skew = min(max(per_byte[1] / total, 0.0), 1.0) if skewed else None
    link = Link(latency_s, 1 / total, skew)
    return Fit(collective, way, link, error, _noise_of_fit(rows, seconds, noises), tuple(points))


def _noise_of_fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], noises: Sequence[float]) -> float:
    """How far the fits of points that are shaken by their own noise lie apart, at these points: twice the spread."""
    # The same shaking every time: the same points have the same noise.
    shaken = np.array(seconds) * np.random.default_rng(0).normal(1.0, np.array(noises) / 2, (_SHAKES, len(seconds)))
    floor = np.array(seconds) / 10
    found = [_nearest(rows, np.maximum(times, floor), noises)[0] for times in shaken]
    told = np.array(rows) @ np.array(found).T
    return float(np.mean(2 * told.std(axis=1) / told.mean(axis=1)))


# Measuring


@dataclass(frozen=True, slots=True)
class Talkers:
    """Processes that talk: over what, how they agree, and what they send."""

    communicator: Communicator
    council: ControlGroup
    load: BackgroundLoad
    device: torch.device
    dtype: torch.dtype


@dataclass(slots=True)
class _Series:
    """One way at growing sizes, with pieces by these shares. `turns` has of each size the times, turn by turn."""

    collective: str
    way: str
    shares: tuple[float, ...]
    sizes: tuple[int, ...]
    turns: dict[int, list[list[float]]] = field(default_factory=dict)

    @property
    def largest(self) -> float:
        return len(self.shares) * max(self.shares)

    def points(self) -> Iterator[LinkSample]:
        for size, turns in self.turns.items():
            times = [seconds for turn in turns for seconds in turn]
            yield LinkSample(float(size), self.largest, typical(times), noise(turns))


def fit_ways(
    talkers: Talkers,
    budget_s: float,
    ways: Sequence[tuple[str, str]] = WAYS,
    unequal: Sequence[float] = (),
    step: Callable[[], object] = lambda: None,
    most_bytes: int = 0,
) -> tuple[Fit, ...]:
    """The fits of these ways, in about so many seconds; with pieces equal and, if given, by these shares.

    `most_bytes` is what training sends at once: it is looked at too, where there is time, since what passes a switch's
    or a socket's buffers at once says little about what does not fit into them. `step` is called after each way in each
    turn.
    """
    n = talkers.communicator.size
    every: list[list[_Series]] = []
    for collective, way in ways:
        same = [_Series(collective, way, (1 / n,) * n, _SIZES)]
        if unequal and collective != "all_reduce":
            same.append(_Series(collective, way, tuple(unequal), _SKEWED_SIZES))
        every.append(same)
    pace = _Pace(budget_s / TURNS / sum(map(len, every)) / _LOOKS, time.perf_counter() + budget_s, most_bytes)
    for turn in range(TURNS):
        for same in every:
            for series in same:
                _take_turn(series, turn, talkers, pace)
            step()
    return tuple(fitted(same[0].collective, same[0].way, [p for s in same for p in s.points()]) for same in every)


@dataclass(frozen=True, slots=True)
class _Pace:
    """How long to look at a size in a turn, and when to have done."""

    slot_s: float
    until: float
    most_bytes: int


def _take_turn(series: _Series, turn: int, talkers: Talkers, pace: _Pace) -> None:
    council = talkers.council
    # How late it is: clocks of different hosts have nothing in common.
    if turn and council.slowest(time.perf_counter() - pace.until) > 0:
        return
    # It has no unequal pieces to spend time on, and is what training does most.
    slot_s = pace.slot_s * (2 if series.collective == "all_reduce" else 1)
    for number, size in enumerate(series.sizes):
        talk, whole_bytes = _talk(series, talkers, size)
        if turn and whole_bytes not in series.turns:
            return
        if not turn:
            talk()
        before, first = occurrence(talk, talkers)
        whole_s, one = (council.slowest(seconds) for seconds in (before, first))
        repeats = min(max(int(slot_s / whole_s), _FEWEST), _MOST) - 1
        times = council.mean([first, *(occurrence(talk, talkers)[1] for _ in range(repeats))])
        series.turns.setdefault(whole_bytes, []).append(times)
        # The next size takes some four times as long.
        late = one > _LONG_S or 4 * _FEWEST * one > slot_s
        if one > _TOO_LONG_S or (number + 1 >= _FEWEST_SIZES and late):
            if series.largest < 1.01 and size < pace.most_bytes and one * pace.most_bytes / size < _MOST_S:
                talk, whole_bytes = _talk(series, talkers, pace.most_bytes)
                if talkers.device.type == "cuda":
                    talk()  # pages of the host are pinned once, and that takes longer than to send them
                times = council.mean([occurrence(talk, talkers)[1] for _ in range(_FEWEST)])
                series.turns.setdefault(whole_bytes, []).append(times)
            return


def occurrence(talk: Callable[[], Tensor], talkers: Talkers) -> tuple[float, float]:
    """Seconds with what comes before, and alone."""
    started = time.perf_counter()
    talkers.load()
    talkers.council.gather()
    alone = _seconds(talk, talkers)
    return time.perf_counter() - started, alone


def _seconds(talk: Callable[[], Tensor], talkers: Talkers) -> float:
    started = time.perf_counter()
    talk()
    wait_for(talkers.device)
    return time.perf_counter() - started


def _talk(series: _Series, talkers: Talkers, size: int) -> tuple[Callable[[], Tensor], int]:
    """The collective, and how many bytes the whole has."""
    communicator, dtype, device, way = talkers.communicator, talkers.dtype, talkers.device, series.way
    counts = [max(int(share * size / dtype.itemsize), 1) for share in series.shares]
    total, me = sum(counts), communicator.rank
    if series.collective == "all_to_all":
        # From every piece by rows to every piece by columns.
        parts = [[max(count * other // total, 1) for other in counts] for count in counts]
        give, take = parts[me], [row[me] for row in parts]
        send = torch.zeros(sum(give), dtype=dtype, device=device)
        talk = lambda: communicator.all_to_all(send, give, take, what="measuring").wait()  # noqa: E731
        return talk, sum(map(sum, parts)) * dtype.itemsize
    whole = torch.zeros(total, dtype=dtype, device=device)
    piece = torch.zeros(counts[me], dtype=dtype, device=device)
    talks: dict[str, Callable[[], Tensor]] = {
        "all_gather": lambda: communicator.all_gather(piece, counts, what="measuring", algorithm=way).wait(),
        "reduce_scatter": lambda: communicator.reduce_scatter(whole, counts, what="measuring", algorithm=way).wait(),
        "all_reduce": lambda: communicator.all_reduce(whole, what="measuring", algorithm=way).wait(),
    }
    return talks[series.collective], total * dtype.itemsize


# Pairs of nodes that are unlike the others

MOST_NODES = 8
"""There are n · (n - 1) / 2 pairs: of more nodes that would take too long."""

_PAIR_SIZES = (2**12, 2**18, 2**20)
_PAIR_LOOKS = 4
# A pair of nodes has a link of its own if a message takes twice as long as between the quickest pair.
_SLOWER = 2.0
_TOLD_BYTES = 2**20


def unlike_pairs(talkers: Talkers, nodes: Sequence[str], usual: Link) -> tuple[Link, tuple[tuple[str, str, Link], ...]]:
    """The link between most nodes (`usual`, where all are alike) and the pairs that are slower than that."""
    first = {node: nodes.index(node) for node in dict.fromkeys(nodes)}
    found = {
        (one, other): _between(talkers, first[one], first[other]) for one, other in itertools.combinations(first, 2)
    }
    seconds = {pair: link.latency_s + _TOLD_BYTES / link.bytes_per_s for pair, link in found.items()}
    quickest = min(seconds.values())
    slow = [pair for pair in found if seconds[pair] > _SLOWER * quickest]
    if not slow:
        return usual, ()
    others = [link for pair, link in found.items() if pair not in slow]
    near = Link(
        statistics.median(link.latency_s for link in others), statistics.median(link.bytes_per_s for link in others)
    )
    return near, tuple((one, other, found[one, other]) for one, other in slow)


def _between(talkers: Talkers, one: int, other: int) -> Link:
    communicator, council = talkers.communicator, talkers.council
    points = []
    for size in _PAIR_SIZES:
        count = size // talkers.dtype.itemsize
        peers = {one: other, other: one}
        counts = [count if peers.get(communicator.rank) == rank else 0 for rank in range(communicator.size)]
        send = torch.zeros(sum(counts), dtype=talkers.dtype, device=talkers.device)
        times = []
        for _ in range(_PAIR_LOOKS + 1):
            council.gather()
            started = time.perf_counter()
            communicator.all_to_all(send, counts, counts, what="measuring").wait()
            wait_for(talkers.device)
            # Only the two know: the others had nothing to wait for.
            times.append(council.slowest(time.perf_counter() - started))
        # The least: whoever was not running just then says nothing about the link.
        points.append((float(size), min(times[1:])))
    latency_s, s_per_byte, _ = line_through(points)
    bytes_per_s = coefficient(LINK, "bytes_per_s")
    return Link(latency_s, bytes_per_s.clamp(1 / max(s_per_byte, 1 / bytes_per_s.high)))


# The memory of the host


_FETCHED_BYTES = 64 * 2**20
"""What optimizers' steps fetch at a time."""
_FETCHES = 5


def measure_host_link(device: torch.device) -> float:
    """Bytes a second, one way, of pinned memory; 0 for a device whose memory is the host's own."""
    if device.type != "cuda":
        return 0.0
    here = torch.empty(_FETCHED_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(_FETCHED_BYTES, dtype=torch.uint8, pin_memory=True)
    seconds = []
    for look in range(_FETCHES + 1):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        here.copy_(there, non_blocking=True)
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize(device)
        if look:  # the first one makes ready
            seconds.append(time.perf_counter() - started)
    return coefficient(KIND, "host_bytes_per_s").clamp(2 * _FETCHED_BYTES / statistics.median(seconds))
