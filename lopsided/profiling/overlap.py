"""What work at the same time costs: computing beside sending, and processes beside others on one chip.

In: talkers and how much to send; what all ranks are, and what they found when all measured at once. Out: `Overlap`: the
compute slowdown of this rank, and the comm slowdown of what is sent; and the contention of every rank, the same on all
of them.

Collectives over gloo are carried by threads that need a processor, those over NCCL by some of the GPU's. Some
all_reduces are started one after the other, as a backward pass starts them, and blocks of computing run until all have
come through:

    compute_slowdown = computing lost / seconds the all_reduces took meanwhile
    comm_slowdown    = seconds of one among them / seconds of one when all stand and wait for it

Who has more than one thread to carry with (gloo has two) gets several through in less than one after the other: where
computing leaves the threads alone, as on a GPU, comm_slowdown is less than one.

Ranks of a chip take turns: one works while the others rest, then the next, then all work at once. Chips do so side by
side. The work is the calls that take most of a step, where they fit into a turn.

    contention = seconds of the work with all / seconds of it alone, medians over rounds

Seconds are those on the wall: who shares a processor stands still while the other runs. A turn is longer than the
slices in which a processor is shared out, and only its means count.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from lopsided.cluster.coefficients import CLUSTER, KIND, coefficient
from lopsided.comm.communicator import Handle
from lopsided.ir.graph import Graph
from lopsided.profiling.kinds import Found, RankHost, chip_of
from lopsided.profiling.links import ControlGroup, Talkers
from lopsided.profiling.noise import BackgroundLoad, typical, wait_for
from lopsided.profiling.op_times import OpJob, layouts_of, run_job, samples_of

LARGEST_BYTES = 16 * 2**20
SMALLEST_BYTES = 2**20

_FEWEST, _MOST = 2, 16
_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Overlap:
    """The `compute_slowdown` of this rank, and the `comm_slowdown`, which is the same on all ranks."""

    compute_slowdown: float
    comm_slowdown: float


def measure_overlap(talkers: Talkers, size_bytes: int, budget_s: float) -> Overlap:
    """All ranks call this. Rounds of both take turns, so that a busy moment falls on either."""
    council, communicator, load = talkers.council, talkers.communicator, talkers.load
    length = max(size_bytes // talkers.dtype.itemsize, 1)
    flats = [torch.zeros(length, dtype=talkers.dtype, device=talkers.device) for _ in range(_IN_A_ROW)]

    def begin(how_many: int) -> list[Handle]:
        load()
        council.gather()
        return [communicator.all_reduce(flat, what="measuring", algorithm="ring") for flat in flats[:how_many]]

    once = council.slowest(_alone(begin(1)[0], talkers.device))
    rounds = min(max(int(budget_s / ((3 + _IN_A_ROW) * once + 0.01)), _FEWEST), _MOST)
    alone, beside, lost_parts = [], [], []
    for _ in range(rounds):
        alone.append(council.mean([_alone(begin(1)[0], talkers.device)])[0])
        block_s = _block(talkers, alone[-1])
        took, lost = _while_computing(begin(_IN_A_ROW), talkers, block_s)
        lost_parts.append(lost)
        beside.append(council.mean([took])[0] / _IN_A_ROW)
    return Overlap(
        coefficient(KIND, "compute_slowdown").clamp(typical(lost_parts)),
        coefficient(CLUSTER, "comm_slowdown").clamp(typical(beside) / typical(alone)),
    )


def _alone(handle: Handle, device: torch.device) -> float:
    started = time.perf_counter()
    handle.wait()
    wait_for(device)
    return time.perf_counter() - started


def _block(talkers: Talkers, lasting_s: float) -> float:
    """Seconds of a block, all ranks computing and nothing being sent."""
    talkers.council.gather()
    blocks, started, passed = 0, time.perf_counter(), 0.0
    while passed < lasting_s or blocks < 2:
        talkers.load()
        blocks += 1
        passed = time.perf_counter() - started
    return passed / blocks


def _while_computing(handles: Sequence[Handle], talkers: Talkers, block_s: float) -> tuple[float, float]:
    """Seconds of the collectives, and which part of them computing lost."""
    landed = threading.Event()
    started, ended = time.perf_counter(), 0.0

    def land() -> None:
        nonlocal ended
        with _own_stream(talkers.device):
            for handle in handles:
                handle.wait()
            if talkers.device.type == "cuda":
                torch.cuda.current_stream(talkers.device).synchronize()
        ended = time.perf_counter()
        landed.set()

    waiting = threading.Thread(target=land, name="lopsided-landing", daemon=True)
    waiting.start()
    blocks = 0
    while not landed.is_set():
        talkers.load()
        blocks += 1
    passed = time.perf_counter() - started
    waiting.join()
    took = max(ended - started, 1e-9)
    return took, (passed - blocks * block_s) / took


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Waiting for NCCL makes a stream wait: not the one that computes."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


# Chips that are shared

# The shortest turn, in seconds: longer than the slices in which a processor is shared out.
_SHORTEST_S = 0.05
# The most rounds; fewer and longer turns tell more, since in short ones a shared processor looks slower than it is.
_MOST_ROUNDS = 3
# How many different calls the work of a turn is made of, at most.
_CALLS = 3
# How often a call must fit into its part of a turn: once to warm up, the rest to measure.
_RUNS = 4
_REST_S = 1e-3


def measure_contention(
    graphs: Sequence[Graph],
    device: torch.device,
    council: ControlGroup,
    seats: Sequence[RankHost],
    found: Sequence[Found],
    jobs: Sequence[OpJob],
    budget_s: float,
) -> tuple[float, ...]:
    """The contention of each rank, in about so many seconds. All ranks call this with the same, but for the device."""
    chips = shared_chips(seats)
    if not chips:
        return (1.0,) * len(seats)
    me = dist.get_rank(council.group)
    mine = next((chip for chip in chips if me in chip), ())
    turns = arranged(jobs, found, max(map(len, chips)), budget_s)
    load = BackgroundLoad(device)
    work = _work(turns, graphs, device, load)
    alone, together = list[float](), list[float]()
    for _ in range(turns.rounds):
        for turn in range(turns.each):
            council.gather()
            if mine[turn : turn + 1] == (me,):
                alone.append(work())
        council.gather()
        if mine:
            together.append(work())
        # Who is done early works on, but for those who have nobody to crowd.
        council.meet(load if mine else lambda: time.sleep(_REST_S))
    return tuple(cast(list[float], council.hear(contention_of(alone, together))))


def shared_chips(seats: Sequence[RankHost]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each chip that has several."""
    chips: dict[tuple[str, ...], list[int]] = {}
    for rank, seat in enumerate(seats):
        chips.setdefault(chip_of(seat), []).append(rank)
    return tuple(tuple(ranks) for ranks in chips.values() if len(ranks) > 1)


def contention_of(alone: Sequence[float], together: Sequence[float]) -> float:
    """Contention from seconds of the same work, round by round; 1 where there are none.

    >>> contention_of([1.0, 1.0, 9.0], [1.5, 1.5, 1.5]), contention_of([1.0], [0.9]), contention_of([], [1.0])
    (1.5, 1.0, 1.0)
    """
    each = [[s for s in times if 0 < s < math.inf] for times in (alone, together)]  # not so for nan either
    if not all(each):
        return 1.0
    quick, slow = (statistics.median(times) for times in each)
    return coefficient(KIND, "contention").clamp(slow / quick)


# What is done in a turn


@dataclass(frozen=True, slots=True)
class Turns:
    """How often each rank of a chip works alone, and then all; for how long, on what (nothing: on blocks of load)."""

    each: int
    rounds: int
    seconds: float
    jobs: tuple[OpJob, ...]


def arranged(jobs: Sequence[OpJob], found: Sequence[Found], ranks: int, budget_s: float) -> Turns:
    """Turns for so many ranks of a chip: the calls that take most of a step and fit. Of what all ranks know alone, so
    that all arrange the same."""
    longest_s = max(budget_s / (ranks + 1), _SHORTEST_S)

    def takes(job: OpJob) -> float:
        """Seconds on the slowest rank."""
        return max(table[job.key].forward_s + (table[job.key].backward_s or 0.0) for table in found)

    def needs(job: OpJob) -> float:
        return _RUNS * _CALLS * takes(job)

    known = [job for job in jobs if all(job.key in table for table in found)]
    fitting = [job for job in known if needs(job) <= longest_s]
    chosen: dict[str, OpJob] = {}
    for job in sorted(fitting, key=lambda job: -job.distinct.times * takes(job)):
        if len(chosen) < _CALLS:
            chosen.setdefault(job.text, job)
    seconds = max([_SHORTEST_S, *map(needs, chosen.values())])
    rounds = min(max(int(longest_s / seconds), 1), _MOST_ROUNDS)
    return Turns(ranks, rounds, max(longest_s / rounds, _SHORTEST_S), tuple(chosen.values()))


def _work(turns: Turns, graphs: Sequence[Graph], device: torch.device, load: BackgroundLoad) -> Callable[[], float]:
    """A turn's work, which tells seconds of its calls as often as a step makes them; no number if an op refuses."""
    layouts = {number: layouts_of(graphs[number]) for number in {job.distinct.graph for job in turns.jobs}}

    def blocks() -> float:
        return statistics.fmean(samples_of(load, device, turns.seconds))

    def calls() -> float:
        total = 0.0
        for job in turns.jobs:
            there, back = run_job(job, layouts[job.distinct.graph], device, turns.seconds / len(turns.jobs))
            once = (statistics.fmean(there) if there else math.nan) + (statistics.fmean(back) if back else 0.0)
            total += job.distinct.times * once
        return total

    return calls if turns.jobs else blocks
