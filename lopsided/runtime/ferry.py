"""CUDA tensors over gloo: into pinned host memory, through the collective, and back, on a thread of its own.

In: what to run on the host's tensors, a CUDA tensor to read and one to fill. Out: `Crossing`, to wait for. The thread
takes them in the order they were given, which must be the same on all processes; the device computes on meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch
from torch import Tensor

from lopsided.runtime.lanes import Flight, Lane

Run = Callable[[Lane, Tensor, Tensor], Flight]


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


class Ferry:
    """Works until nobody holds it any more."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self._device = device
        self._queue: SimpleQueue[Crossing | None] = SimpleQueue()
        args = (self._queue, lane, torch.cuda.Stream(device))
        threading.Thread(target=_sail, args=args, name="lopsided-ferry", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def cross(self, run: Run, source: Tensor, target: Tensor, begins: Callable[[], object] | None = None) -> Crossing:
        """Where `target` is `source`, the collective runs in place. `begins` is called when the source is computed."""
        # Behind this event the source is computed, and whoever had the target's memory before has finished with it.
        ready = torch.cuda.current_stream(self._device).record_event()
        crossing = Crossing(run, source, target, ready, begins)
        self._queue.put(crossing)
        return crossing


def _sail(queue: SimpleQueue[Crossing | None], lane: Lane, stream: torch.cuda.Stream) -> None:
    # In inference mode, since only there may be written what the caller made in inference mode.
    with torch.inference_mode(), torch.cuda.stream(stream):
        while (crossing := queue.get()) is not None:
            try:
                crossing.arrived.set_result(_carry(crossing, lane, stream))
            except Exception as error:
                crossing.arrived.set_exception(error)
            # While it waits for the next it keeps nothing of this one alive.
            del crossing


def _carry(crossing: Crossing, lane: Lane, stream: torch.cuda.Stream) -> torch.cuda.Event:
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
    works, finish = crossing.run(lane, here, there)
    for work in works:
        work.wait()
    if finish is not None:
        finish()
    target.copy_(there, non_blocking=True)
    # Who does not wait may let go of it before it is filled.
    target.record_stream(stream)
    arrived: torch.cuda.Event = stream.record_event()
    return arrived
