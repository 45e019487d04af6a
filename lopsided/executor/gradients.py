"""Gradients that are sums over devices: put in buckets and sent while the backward pass is still running.

In: the gradients of whole copies of parameters, as autograd finishes them. Out: `param.grad`, complete when
`backward()` returns.

A parameter stored whole and used whole (`I→R`) has its gradient all-reduced; one stored cut and gathered (`S→R`) has it
reduce-scattered. Autograd runs the functions of a graph in exactly the reverse order of their making, so gradients
arrive in the same order on every device, and buckets can be filled as they come: all devices fill the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lopsided.calibration.run_record import BUCKETS
from lopsided.comm.communicator import Handle
from lopsided.comm.redistribute import Layout, Redistributor
from lopsided.schedule.layout import BUCKET_BYTES

SCATTERS_AT_ONCE = 2
"""How many buckets of gradients that end up cut are on their way at once."""


@dataclass(frozen=True, slots=True)
class Synced:
    """One parameter whose copy's gradient is a sum; `layout` is how it is stored, None for whole."""

    name: str
    parameter: nn.Parameter
    layout: Layout | None


@dataclass(slots=True)
class _Bucket:
    entries: list[tuple[Synced, Tensor]] = field(default_factory=list)
    size: int = 0


class Gradients:
    """Collects, sends and hands out the gradients of one model on one device."""

    def __init__(self, exchange: Redistributor, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.exchange, self.bucket_bytes = exchange, bucket_bytes
        self.syncing = True
        self.on_finish: Callable[[], None] = lambda: None
        self._filling: dict[tuple[bool, torch.dtype], _Bucket] = {}
        self._sent: list[tuple[Handle, list[Synced]]] = []  # not yet handed out, the oldest first
        self._kept: dict[Synced, Tensor] = {}  # local sums of passes that were not synchronised
        self._begun = False
        self._memory = _BucketMemory()

    @property
    def has_kept(self) -> bool:
        """Some backward pass was not synchronised, and no later one was."""
        self._drop_zeroed()
        return bool(self._kept)

    def reset(self) -> None:
        """Forget a backward pass that was broken off."""
        self._filling, self._sent, self._begun = {}, [], False

    def begin(self) -> None:
        """A backward pass has started; `finish` is called when it ends."""
        if not self._begun:
            self._begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def forget(self) -> None:
        """Drop what passes without synchronisation have added up."""
        self._kept = {}

    def _drop_zeroed(self) -> None:
        """What is kept goes with `param.grad`, whoever set that to None."""
        for synced in [synced for synced in self._kept if synced.parameter.grad is None]:
            del self._kept[synced]

    def add(self, synced: Synced, gradient: Tensor) -> None:
        if (recorder := self.exchange.wire.recorder) is not None:
            recorder.mark(BUCKETS)
        if synced.parameter.grad is None:
            self._kept.pop(synced, None)
        if not self.syncing:
            before = self._kept.get(synced)
            # The tensor may belong to others too: the first is copied.
            self._kept[synced] = gradient.clone() if before is None else before.add_(gradient)
            if synced.parameter.grad is None:
                synced.parameter.grad = torch.zeros_like(synced.parameter)
            return
        before = self._kept.pop(synced, None)
        self._put(synced, gradient if before is None else before.add_(gradient))

    def _put(self, synced: Synced, gradient: Tensor) -> None:
        key = (synced.layout is None, gradient.dtype)
        bucket = self._filling.setdefault(key, _Bucket())
        bucket.entries.append((synced, gradient))
        bucket.size += gradient.nbytes
        if bucket.size >= self.bucket_bytes:
            self._send(self._filling.pop(key))

    def _send(self, bucket: _Bucket) -> None:
        named = [synced for synced, _ in bucket.entries]
        tensors = [gradient for _, gradient in bucket.entries]
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        what = f"gradient of {named[0].name}{more}"
        layouts = [synced.layout for synced in named if synced.layout is not None]
        if layouts:
            # What is sent is as large as whole parameters, which nobody should have to hold all at once.
            while len(self._sent) >= SCATTERS_AT_ONCE:
                self._hand_out(*self._sent.pop(0))
            handle = self.exchange.start_scatter(tensors, layouts, what)
        else:
            # A copy in any case: what autograd hands over may be shared with others.
            flat = self._memory.take(sum(gradient.numel() for gradient in tensors), tensors[0])
            torch.cat([gradient.reshape(-1) for gradient in tensors], out=flat)
            handle = self.exchange.wire.all_reduce(flat, what=what)
        self._sent.append((handle, named))

    def finish(self) -> None:
        """Send what is left, wait for everything, and hand out."""
        self._begun = False
        if (recorder := self.exchange.wire.recorder) is not None:
            recorder.mark(BUCKETS)
        if self.syncing:
            self._drop_zeroed()
            for synced in list(self._kept):
                self._put(synced, self._kept.pop(synced))
        for bucket in self._filling.values():
            self._send(bucket)
        self._filling = {}
        while self._sent:
            self._hand_out(*self._sent.pop(0))
        if recorder is not None:
            recorder.idle()
        self.on_finish()

    def _hand_out(self, handle: Handle, named: Sequence[Synced]) -> None:
        sizes = [synced.parameter.numel() for synced in named]
        for synced, run in zip(named, handle.wait().split(sizes), strict=True):
            accumulate(synced.parameter, run.view(synced.parameter.shape))


class _BucketMemory:
    """Memory of buckets from step to step: fresh pages would have to be mapped and cleared in every step.

    A bucket is filled again when nobody else holds its memory: when the gradients that are views of it are gone.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, count: int, like: Tensor) -> Tensor:
        made = self._made.setdefault((count, like.dtype), [])
        for flat in made:
            if _holders(flat) == _OURS_ALONE:
                return flat
        made.append(torch.empty(count, dtype=like.dtype, device=like.device))
        return made[-1]


def _holders(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_OURS_ALONE = _holders(torch.empty(1))


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class CopyOfWhole(torch.autograd.Function):
    """A parameter stored whole, used with a partial gradient: `I→R`."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, synced: Synced, parameter: Tensor) -> Tensor:
        ctx.about = (gradients, synced)
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradients, synced = ctx.about
        gradients.add(synced, gradient)
        return None, None, None


class CopyOfPieces(torch.autograd.Function):
    """A parameter stored cut and gathered: `S→R`, or `S→I` whose gradient needs no sum."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, synced: Synced, is_sum: bool, parameter: Tensor, whole: Tensor) -> Any:
        ctx.about = (gradients, synced, is_sum)
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradients, synced, is_sum = ctx.about
        if is_sum:
            gradients.add(synced, gradient)
            return None, None, None, None, None
        piece = synced.layout.piece(gradient, gradients.exchange.rank)
        return None, None, None, piece.contiguous(), None
