"""How much slower processes that share a chip are together than each is alone.

In: what all ranks are, and what they found when all measured at once. Out: the crowding of every rank, the same on all
of them; 1 for who has a chip to itself.

Ranks of a chip take turns: one works while the others rest, then the next, then all work at once. Chips do so side by
side. The work is the calls that take most of a step, where they fit into a turn.

    crowding = seconds of the work with all / seconds of it alone, medians over rounds

Seconds are those on the wall: who shares a processor stands still while the other runs. A turn is longer than the
slices in which a processor is shared out, and only its means count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from lopsided.ir.graph import Graph
from lopsided.profiling.kinds import Found, RankHost, chip_of
from lopsided.profiling.links import ControlGroup
from lopsided.profiling.load import BackgroundLoad
from lopsided.profiling.op_times import OpJob, layouts_of, run_job, samples_of

_MOST = 100.0  # that a cluster file may say
_SHORTEST_S = 0.05  # a turn
_MOST_ROUNDS = 3  # longer turns tell more: in short ones a processor that is shared looks slower than it is
_CALLS = 3  # different ones
_RUNS = 4  # of a call in its part of a turn: to warm up, and to measure
_REST_S = 1e-3


def measure_crowding(
    graphs: Sequence[Graph],
    device: torch.device,
    council: ControlGroup,
    seats: Sequence[RankHost],
    found: Sequence[Found],
    jobs: Sequence[OpJob],
    budget_s: float,
) -> tuple[float, ...]:
    """The crowding of each rank, in about so many seconds. All ranks call this with the same, but for the device."""
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
    return tuple(cast(list[float], council.hear(crowding_of(alone, together))))


def shared_chips(seats: Sequence[RankHost]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each chip that has several."""
    chips: dict[tuple[str, ...], list[int]] = {}
    for rank, seat in enumerate(seats):
        chips.setdefault(chip_of(seat), []).append(rank)
    return tuple(tuple(ranks) for ranks in chips.values() if len(ranks) > 1)


def crowding_of(alone: Sequence[float], together: Sequence[float]) -> float:
    """From seconds of the same work, round by round; 1 where there are none.

    >>> crowding_of([1.0, 1.0, 9.0], [1.5, 1.5, 1.5]), crowding_of([1.0], [0.9]), crowding_of([], [1.0])
    (1.5, 1.0, 1.0)
    """
    each = [[s for s in times if 0 < s < math.inf] for times in (alone, together)]  # not so for nan either
    if not all(each):
        return 1.0
    quick, slow = (statistics.median(times) for times in each)
    return min(max(slow / quick, 1.0), _MOST)


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
        """On the slowest."""
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
