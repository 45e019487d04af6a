"""How each algorithm of a collective is started on NCCL and on gloo.

In: flat tensors of a dtype that the backends know, of what is given and of what is to be filled. Out: `Flight`, what to
wait for and what is left to do then.

| collective, algorithm  | NCCL                                      | gloo                                |
|------------------------|-------------------------------------------|-------------------------------------|
| all_reduce ring, tree  | one call                                  | the same                            |
| ... scatter+gather     | reduce-scatter and all-gather, in place   | one all-reduce (note)               |
| all_gather padded      | one call; unequal pieces padded to the    | the same                            |
|                        | largest and cut out afterwards            |                                     |
| ... grouped            | one group of broadcasts                   | broadcasts side by side             |
| ... all_to_all         | one exchange, nothing copied              | sends and receives, nothing copied  |
| reduce_scatter padded  | one call, padded likewise                 | one all-reduce of a copy (note)     |
| ... grouped            | one group of reduces                      | reduces side by side, of copies     |
| ... all_to_all         | one exchange, added up here               | sends and receives, added up here   |

Note: gloo's own reduce-scatter is an all-reduce of a copy, of which each process keeps its piece. Done here it needs no
padding; and as everyone then has the whole sum, scatter+gather has nothing left to gather. gloo's all-to-all wants one
buffer with the piece once for every receiver, which sends and receives do without.

CUDA tensors over gloo (`HostStaging`) go into pinned host memory, through the collective, and back, while the device
computes on. One thread embarks: it brings a tensor to the host and starts its collective, in the order in which they
were given, which must be the same on all processes. Another lands what has come through. So gloo, which has two threads
of its own, has the next collective at hand while one is under way, as DistributedDataParallel gives it.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

_HALF = (torch.float16, torch.bfloat16)


class PendingWork(Protocol):
    def wait(self) -> object: ...


class _Options(Protocol):
    timeout: timedelta
    asyncOp: bool


# What is to be waited for, and what is to be done then.
Flight = tuple[Sequence[PendingWork], Callable[[], object] | None]
_Starts = Sequence[tuple[Callable[..., PendingWork], Tensor, object]]


class Backend(ABC):
    """What both backends do alike. The group's own methods are called: the functions of `torch.distributed` change
    their names between versions and take no timeout. Options are made once, as making them takes as long as a start."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta, *, pinned: bool = False
    ) -> None:
        self.group, self.device, self.timeout, self.pinned = group, device, timeout, pinned
        self.rank, self.size = group.rank(), group.size()
        self.adding, self.choosing = AllreduceOptions(), AllreduceOptions()
        self.choosing.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self.gathering, self.scattering = AllgatherOptions(), ReduceScatterOptions()
        self.exchanging = AllToAllOptions()
        self.sending = [BroadcastOptions() for _ in range(self.size)]
        self.bringing = [ReduceOptions() for _ in range(self.size)]
        for rank in range(self.size):
            self.sending[rank].rootRank = self.bringing[rank].rootRank = rank
        alone: list[_Options] = [self.adding, self.choosing, self.gathering, self.scattering, self.exchanging]
        every = [*alone, *self.sending, *self.bringing]
        for options in every:
            options.timeout, options.asyncOp = timeout, True

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def all_reduce(self, flat: Tensor, algorithm: str) -> list[PendingWork]:
        return [self.group.allreduce([flat], self.adding)]

    def maximum(self, flat: Tensor) -> list[PendingWork]:
        return [self.group.allreduce([flat], self.choosing)]

    def broadcast(self, flat: Tensor, source: int) -> list[PendingWork]:
        return [self.group.broadcast([flat], self.sending[source])]

    def all_gather(self, piece: Tensor, whole: Tensor, counts: Sequence[int], algorithm: str) -> Flight:
        if algorithm == "padded":
            return self._gather_padded(piece, whole, counts)
        parts = whole.split_with_sizes(list(counts))
        if algorithm == "grouped":
            _fill(parts[self.rank], piece)
            starts = zip(parts, self.sending, strict=True)
            return self._group(
                [(self.group.broadcast, part, sending) for part, sending in starts if part.numel()]
            ), None
        works = self._exchange([piece] * self.size, parts)
        _fill(parts[self.rank], piece)
        return works, None

    def reduce_scatter(self, whole: Tensor, piece: Tensor, counts: Sequence[int], algorithm: str) -> Flight:
        if algorithm == "padded":
            return self._scatter_padded(whole, piece, counts)
        parts = whole.split_with_sizes(list(counts))
        if algorithm == "grouped":
            piece.copy_(parts[self.rank])
            given = [piece if rank == self.rank else self._lend(part) for rank, part in enumerate(parts)]
            starts = zip(given, self.bringing, strict=True)
            return self._group([(self.group.reduce, part, bringing) for part, bringing in starts if part.numel()]), None
        return self._scatter_by_exchange(parts, piece)

    def all_to_all(self, send: Tensor, taken: Tensor, give: Sequence[int], take: Sequence[int]) -> Flight:
        given, came = send.split_with_sizes(list(give)), taken.split_with_sizes(list(take))
        works = self._exchange(given, came)
        _fill(came[self.rank], given[self.rank])
        return works, None

    def _gather_padded(self, piece: Tensor, whole: Tensor, counts: Sequence[int]) -> Flight:
        slot = max(counts)
        if slot * self.size == whole.numel():
            return [self.group._allgather_base(whole, piece, self.gathering)], None
        padded = self.empty(slot * self.size, whole.dtype)
        mine = padded.narrow(0, self.rank * slot, slot)
        mine.narrow(0, 0, piece.numel()).copy_(piece)
        work = self.group._allgather_base(padded, mine, self.gathering)
        used = [padded.narrow(0, rank * slot, count) for rank, count in enumerate(counts)]
        return [work], lambda: torch.cat(used, out=whole)

    def _scatter_by_exchange(self, parts: Sequence[Tensor], piece: Tensor) -> Flight:
        mine, count = parts[self.rank], piece.numel()
        came = self.empty(count * (self.size - 1), piece.dtype)
        others = came.split_with_sizes([count] * (self.size - 1))
        works = self._exchange(parts, [*others[: self.rank], came[:0], *others[self.rank :]])

        def add() -> None:
            # In half precision every term would be rounded once more.
            total = mine.float() if piece.dtype in _HALF else piece.copy_(mine)
            for other in others:
                total.add_(other)
            if total is not piece:
                piece.copy_(total)

        return works, add

    @abstractmethod
    def _scatter_padded(self, whole: Tensor, piece: Tensor, counts: Sequence[int]) -> Flight: ...

    @abstractmethod
    def _exchange(self, given: Sequence[Tensor], came: Sequence[Tensor]) -> list[PendingWork]:
        """Each other rank's part goes there, and its part comes here. What a rank has for itself is left alone."""

    @abstractmethod
    def _group(self, starts: _Starts) -> list[PendingWork]:
        """Several collectives at once."""

    @abstractmethod
    def _lend(self, part: Tensor) -> Tensor:
        """A part that is reduced on another rank, and that this rank must find unchanged."""


class NcclBackend(Backend):
    """All of it runs on one stream of NCCL's, in order, behind what the current stream was given so far."""

    def all_reduce(self, flat: Tensor, algorithm: str) -> list[PendingWork]:
        if algorithm != "scatter+gather":
            return super().all_reduce(flat, algorithm)
        each = flat.numel() // self.size
        works: list[PendingWork] = []
        if each:
            even = flat.narrow(0, 0, each * self.size)
            mine = even.narrow(0, self.rank * each, each)
            works.append(self.group._reduce_scatter_base(mine, even, self.scattering))
            works.append(self.group._allgather_base(even, mine, self.gathering))
        if each * self.size < flat.numel():
            # The few elements left over: to pad for their sake would copy all the others.
            rest = flat.narrow(0, each * self.size, flat.numel() - each * self.size)
            works.append(self.group.allreduce([rest], self.adding))
        return works

    def _scatter_padded(self, whole: Tensor, piece: Tensor, counts: Sequence[int]) -> Flight:
        slot, count = max(counts), piece.numel()
        if slot * self.size == whole.numel():
            return [self.group._reduce_scatter_base(piece, whole, self.scattering)], None
        padded = self.empty(slot * self.size, whole.dtype)
        for rank, part in enumerate(whole.split_with_sizes(list(counts))):
            padded.narrow(0, rank * slot, part.numel()).copy_(part)
        mine = piece if count == slot else self.empty(slot, whole.dtype)
        work = self.group._reduce_scatter_base(mine, padded, self.scattering)
        return [work], None if mine is piece else lambda: piece.copy_(mine.narrow(0, 0, count))

    def _exchange(self, given: Sequence[Tensor], came: Sequence[Tensor]) -> list[PendingWork]:
        given, came = list(given), list(came)
        given[self.rank], came[self.rank] = given[self.rank][:0], came[self.rank][:0]
        return [self.group.alltoall(came, given, self.exchanging)]

    def _group(self, starts: _Starts) -> list[PendingWork]:
        self.group._start_coalescing(self.device)
        for start, tensor, options in starts:
            start([tensor], options)
        return [self.group._end_coalescing(self.device)]

    def _lend(self, part: Tensor) -> Tensor:
        # NCCL writes on the receiving rank only.
        return part


class GlooBackend(Backend):
    """Host memory. gloo works on threads of its own; the processes' collectives find each other by number."""

    exchanges = 0

    def _scatter_padded(self, whole: Tensor, piece: Tensor, counts: Sequence[int]) -> Flight:
        total = whole.clone()
        mine = total.split_with_sizes(list(counts))[self.rank]
        return [self.group.allreduce([total], self.adding)], lambda: piece.copy_(mine)

    def _exchange(self, given: Sequence[Tensor], came: Sequence[Tensor]) -> list[PendingWork]:
        # Numbered, so that a process that is one exchange behind waits and does not take another's bytes.
        self.exchanges = number = (self.exchanges + 1) % 2**20
        # Each begins with its next rank, else all would send to the same one first. Empty parts go too: with
        # TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares how many calls each process made.
        turns = [(self.rank + step) % self.size for step in range(1, self.size)]
        group, timeout = self.group, self.timeout
        coming = [group.recv([came[peer]], peer, number) for peer in reversed(turns)]
        going = [group.send([given[peer]], peer, number) for peer in turns]
        return [_Timed(work, timeout) for work in (*coming, *going)]

    def _group(self, starts: _Starts) -> list[PendingWork]:
        return [start([tensor], options) for start, tensor, options in starts]

    def _lend(self, part: Tensor) -> Tensor:
        # gloo leaves partial sums in it.
        return part.clone()


class _Timed:
    """A send or receive of gloo's: these have no options, and learn the timeout when they are waited for."""

    __slots__ = ("_timeout", "_work")

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        self._work, self._timeout = work, timeout

    def wait(self) -> None:
        self._work.wait(self._timeout)


def _fill(place: Tensor, piece: Tensor) -> None:
    if place.data_ptr() != piece.data_ptr():
        place.copy_(piece)


Run = Callable[[Backend, Tensor, Tensor], Flight]


class Crossing:
    """One trip. `arrived` gets the event behind which the target is filled, or the error."""

    __slots__ = ("arrived", "begins", "ready", "run", "source", "target")

    def __init__(
        self,
        run: Run,
        source: Tensor,
        target: Tensor,
        ready: torch.cuda.Event,
        begins: Callable[[], object] | None = None,
    ) -> None:
        self.run, self.source, self.target, self.ready, self.begins = run, source, target, ready, begins
        self.arrived: Future[torch.cuda.Event] = Future()

    def wait(self) -> None:
        """Wait until gloo is done; the copy back is left to the current stream to wait for."""
        event = self.arrived.result()
        torch.cuda.current_stream(self.target.device).wait_event(event)


class HostStaging:
    """Works until nobody holds it any more."""

    def __init__(self, lane: Backend, device: torch.device) -> None:
        self._device = device
        # The threads know the queue and not this object, or it would be held for ever.
        self._quay = quay = SimpleQueue[Crossing | None]()
        under_way: SimpleQueue[_UnderWay | None] = SimpleQueue()
        out, back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        _thread("embark", lambda: _embark(quay, under_way, lane, out))
        _thread("land", lambda: _land(under_way, back))
        weakref.finalize(self, quay.put, None)

    def cross(self, run: Run, source: Tensor, target: Tensor, begins: Callable[[], object] | None = None) -> Crossing:
        """Where `target` is `source`, the collective runs in place. `begins` is called when the source is computed."""
        # Behind this event the source is computed, and whoever had the target's memory before has finished with it.
        ready = torch.cuda.current_stream(self._device).record_event()
        crossing = Crossing(run, source, target, ready, begins)
        self._quay.put(crossing)
        return crossing


_UnderWay = tuple[Crossing, Flight, Tensor, Tensor]
"""What crosses, what to wait for, and the host's tensors: the one it reads, kept until then, and the one it fills."""


def _thread(does: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=f"lopsided-ferry-{does}", daemon=True).start()


def _embark(
    quay: SimpleQueue[Crossing | None],
    under_way: SimpleQueue[_UnderWay | None],
    lane: Backend,
    stream: torch.cuda.Stream,
) -> None:
    # In inference mode, since only there may be written what the caller made in inference mode.
    with torch.inference_mode(), torch.cuda.stream(stream):
        while (crossing := quay.get()) is not None:
            try:
                under_way.put((crossing, *_started(crossing, lane, stream)))
            except Exception as error:
                crossing.arrived.set_exception(error)
            # While it waits for the next it keeps nothing of this one alive.
            del crossing
    under_way.put(None)


def _started(crossing: Crossing, lane: Backend, stream: torch.cuda.Stream) -> tuple[Flight, Tensor, Tensor]:
    source, target = crossing.source, crossing.target
    if crossing.begins is not None:
        crossing.ready.synchronize()
        crossing.begins()
    stream.wait_event(crossing.ready)
    here = lane.empty(source.numel(), source.dtype)
    here.copy_(source, non_blocking=True)
    # It is this thread that waits, not the device.
    stream.record_event().synchronize()
    there = here if target is source else lane.empty(target.numel(), target.dtype)
    return crossing.run(lane, here, there), here, there


def _land(under_way: SimpleQueue[_UnderWay | None], stream: torch.cuda.Stream) -> None:
    with torch.inference_mode(), torch.cuda.stream(stream):
        while (one := under_way.get()) is not None:
            crossing, (works, finish), here, there = one
            try:
                for work in works:
                    work.wait()
                if finish is not None:
                    finish()
                crossing.target.copy_(there, non_blocking=True)
                # Who does not wait may let go of it before it is filled.
                crossing.target.record_stream(stream)
                crossing.arrived.set_result(stream.record_event())
            except Exception as error:
                crossing.arrived.set_exception(error)
            del one, crossing, works, finish, here, there
