"""Ranks that are threads of one process: collectives hand tensors from rank to rank, and nothing is sent.

In: a number of ranks, and a function of a rank's communicator. Out: `run_ranks`, what the function returned on each
rank. `InProcessCommunicator` answers as `Communicator` does.

One rank runs at a time. It keeps the turn until it waits for a collective that another rank has not started; then the
next rank that can go on has the turn. So a thread costs one switch per collective, ranks never draw from torch's
default generator at once, and the order of everything is the same in every run. The rank that starts a collective
last carries it out for all, terms of sums in the order of the ranks.

An error on one rank ends the others and is raised to the caller. Ranks that wait for each other for ever, or that
start different collectives, are told so.

`LoneCommunicator` has nobody to talk with: every collective is over at once, and the others' pieces are zeros. A
program runs on it as it runs on this device, with all the work around its collectives, to see what that takes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import Network
from lopsided.cluster.devices import Kind, Link
from lopsided.comm.communicator import CollectiveCall, Communicator, Handle
from lopsided.errors import WorldError

T = TypeVar("T")

_MOST_RANKS = 1 << 16
_SAME_ORDER = "let every rank start the same collectives in the same order"


def run_ranks(size: int, device: torch.device, run: Callable[[InProcessCommunicator], T]) -> list[T]:
    """What `run` returns on each of `size` ranks; rank 0 is the calling thread."""
    turns = _Turns(size)
    found: dict[int, T] = {}

    def run_rank(rank: int) -> None:
        turns.take(rank)
        try:
            if turns.error is None:
                found[rank] = run(InProcessCommunicator(turns, rank, device))
        except _AbandonedError:
            pass
        except BaseException as error:
            turns.error = turns.error or error
        finally:
            turns.end(rank)

    def run_thread(rank: int, states: Callable[[ExitStack], None]) -> None:
        with ExitStack() as stack:
            states(stack)
            run_rank(rank)

    # Going backward on a GPU, autograd has one thread for all ranks: one that waited in it would keep the others out.
    with torch.autograd.set_multithreading_enabled(size == 1):
        states = _states_of_this_thread(device)
        others = [_threads(os.getpid()).submit(run_thread, rank, states) for rank in range(1, size)]
        turns.begin()
        run_rank(0)
        for other in others:
            other.result()
    if turns.error is not None:
        raise turns.error
    return [found[rank] for rank in range(size)]


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Threads that stay for the next run: math libraries take milliseconds to get ready in a new one. A forked process
    has none of its parent's."""
    return ThreadPoolExecutor(_MOST_RANKS, thread_name_prefix="lopsided-rank")


def _states_of_this_thread(device: torch.device) -> Callable[[ExitStack], None]:
    """Torch keeps these for each thread: a rank's thread enters those of the caller."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    threaded, default = torch.autograd.is_multithreading_enabled(), torch.get_default_device()
    casting = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def enter(stack: ExitStack) -> None:
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch.autograd.set_multithreading_enabled(threaded))
        if default != torch.get_default_device():
            stack.enter_context(default)
        for kind, dtype in casting:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        if stream is not None:
            stack.enter_context(torch.cuda.stream(stream))

    return enter


# Taking turns


class _AbandonedError(Exception):
    """Another rank has failed: this one ends, too."""


class _Turns:
    """Decides which rank runs. A rank's lock is free for it to take when it is its turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.error: BaseException | None = None
        self.meetings: dict[int, _Meeting] = {}  # by number, those that some rank has yet to come to
        self._locks = [threading.Lock() for _ in range(size)]
        for lock in self._locks:
            lock.acquire()
        self._waiting: list[_Meeting | None] = [None] * size
        self._ended = [False] * size

    def begin(self) -> None:
        self._locks[0].release()

    def take(self, rank: int) -> None:
        try:
            self._locks[rank].acquire()
        except BaseException as error:
            # Interrupted while another rank runs: that one learns of it when it next waits, and hands over.
            self.error = self.error or error
            self._locks[rank].acquire()
            raise

    def wait(self, rank: int, meeting: _Meeting) -> None:
        """Let others run until all have come to this meeting."""
        if meeting.is_over:
            return
        self._waiting[rank] = meeting
        self._hand_over(rank)
        self.take(rank)
        self._waiting[rank] = None
        if self.error is not None:
            raise _AbandonedError

    def end(self, rank: int) -> None:
        self._ended[rank] = True
        self._hand_over(rank)

    def _hand_over(self, rank: int) -> None:
        after = [(rank + step) % self.size for step in range(1, self.size + 1)]
        left = [other for other in after if not self._ended[other]]
        ready = next((other for other in left if self._can_go_on(other)), None)
        if left and ready is None:
            self.error = self._stuck(left)
            ready = left[0]
        if ready is not None:
            self._locks[ready].release()

    def _can_go_on(self, rank: int) -> bool:
        meeting = self._waiting[rank]
        return self.error is not None or meeting is None or meeting.is_over

    def _stuck(self, left: Sequence[int]) -> WorldError:
        waiting = [(rank, meeting) for rank in sorted(left) if (meeting := self._waiting[rank]) is not None]
        said = "; ".join(f"rank {rank} waits for {meeting.what}" for rank, meeting in waiting)
        return WorldError(f"the ranks wait for each other for ever: {said}", do=_SAME_ORDER)


Given = tuple[Tensor, ...]
"""What a rank brings to a collective: one tensor, or one for every rank."""
CarryOut = Callable[[Sequence[Given], Sequence[Tensor]], None]
"""Fills the result of every rank from what every rank gave; both in the order of the ranks."""


@dataclass(slots=True)
class _Meeting:
    """One collective: what each rank gave, and where its part of the result goes."""

    what: str
    given: dict[int, Given] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A rank that has come to a meeting, and may have to wait for the others."""

    turns: _Turns
    rank: int
    meeting: _Meeting

    def wait(self) -> None:
        self.turns.wait(self.rank, self.meeting)


# Collectives


def _add(given: Sequence[Given], results: Sequence[Tensor]) -> None:
    total = _sum(given)
    for result in results:
        result.copy_(total)


def _choose_largest(given: Sequence[Given], results: Sequence[Tensor]) -> None:
    largest = torch.stack([tensor for (tensor,) in given]).amax(0)
    for result in results:
        result.copy_(largest)


def _join(given: Sequence[Given], results: Sequence[Tensor]) -> None:
    whole = torch.cat([piece for (piece,) in given])
    for result in results:
        result.copy_(whole)


def _add_and_part(given: Sequence[Given], results: Sequence[Tensor]) -> None:
    pieces = _sum(given).split_with_sizes([result.numel() for result in results])
    for result, piece in zip(results, pieces, strict=True):
        result.copy_(piece)


def _exchange(given: Sequence[Given], results: Sequence[Tensor]) -> None:
    for rank, result in enumerate(results):
        torch.cat([parts[rank] for parts in given], out=result)


def _copy_from(source: int, given: Sequence[Given], results: Sequence[Tensor]) -> None:
    for result in results:
        result.copy_(given[source][0])


def _sum(given: Sequence[Given]) -> Tensor:
    (total,), *others = given
    for (term,) in others:
        total = total + term
    return total


_CARRY_OUT: dict[str, CarryOut] = {
    "all_reduce": _add,
    "maximum": _choose_largest,
    "all_gather": _join,
    "reduce_scatter": _add_and_part,
    "all_to_all": _exchange,
}


class InProcessCommunicator(Communicator):
    """The communicator of one rank among threads. Whatever algorithm is asked for, tensors are handed over directly."""

    def __init__(self, turns: _Turns, rank: int, device: torch.device) -> None:
        self.rank, self.size, self.device, self.network = rank, turns.size, device, _network(turns.size)
        self.waited_s = 0.0
        self.recorder = self.watch = None
        self._turns, self._number = turns, 0

    def _start(self, call: CollectiveCall) -> Handle:
        """Come to the next meeting; whoever comes last carries it out."""
        named, meetings = f"{call.collective} of {call.what or 'something'}", self._turns.meetings
        meeting = meetings.setdefault(self._number, _Meeting(named))
        if meeting.what != named:
            raise WorldError(
                f"rank {self.rank} starts {named} where another starts {meeting.what}",
                where=f"rank {self.rank} of {self.size}",
                do=_SAME_ORDER,
            )
        given = call.given.detach()
        parts = given.split_with_sizes(list(call.counts)) if call.collective == "all_to_all" else (given,)
        meeting.given[self.rank], meeting.results[self.rank] = parts, call.result.detach()
        if len(meeting.given) == self.size:
            ranks = range(self.size)
            carry_out = (
                partial(_copy_from, call.source) if call.collective == "broadcast" else _CARRY_OUT[call.collective]
            )
            carry_out([meeting.given[rank] for rank in ranks], [meeting.results[rank] for rank in ranks])
            meeting.is_over = True
            meeting.given, meeting.results = {}, {}
            del meetings[self._number]
        self._number += 1
        works = () if meeting.is_over else (_Arrival(self._turns, self.rank, meeting),)
        return Handle(self, call.what, call.result, works)


@cache
def _network(size: int) -> Network:
    """Prices among ranks that are all alike: what a choice between algorithms is made by."""
    kind = Kind("thread", "here", 1, size, (("f32", 1e10),), 1e10, 2**34, 0.0)
    return Network(Cluster("in process", "", (kind,), Link(0.0, 1e10), Link(0.0, 1e10)))


class LoneCommunicator(Communicator):
    """The communicator of one rank without the others; sums are what was given."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self.rank, self.size = rank, size
        self.recorder = None

    def _start(self, call: CollectiveCall) -> Handle:
        before = sum(call.counts[: self.rank])
        if call.collective == "all_gather":
            call.result[before : before + call.given.numel()] = call.given.detach()
        elif call.collective == "reduce_scatter":
            call.result.copy_(call.given.detach()[before : before + call.result.numel()])
        return Handle(self, call.what, call.result)

    def _empty(self, count: int, like: Tensor) -> Tensor:
        return like.new_zeros(count)
