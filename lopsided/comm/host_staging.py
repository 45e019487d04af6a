"""CUDA tensors over gloo: into pinned host memory, through the collective, and back, on threads of its own.

In: what to run on the host's tensors, a CUDA tensor to read and one to fill. Out: `Crossing`, to wait for. The device
computes on meanwhile.

One thread embarks: it brings a tensor to the host and starts its collective, in the order in which they were given,
which must be the same on all processes. Another lands what has come through. So gloo, which has two threads of its own,
has the next collective at hand while one is under way, as DistributedDataParallel gives it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch
from torch import Tensor

from lopsided.comm.backends import Backend, Flight

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
        """Until gloo is done; the copy back is left to the current stream to wait for."""
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
