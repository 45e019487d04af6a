"""The devices of a plan talk: collectives on flat tensors whose pieces need not be equal, every way a plan can choose.

In: a process group, this process's device, the prices. Out: `Communicator`, whose methods start a collective and return
a `Handle` to wait for it. How a way is carried out on which backend stands in `lanes`; CUDA tensors go over gloo by
`ferry`. Here is what is the same for all: which way, as which dtype, and who is to blame if it fails.

Every process must start the same collectives in the same order and wait for each. Until it has waited, it must neither
change what it gave nor use what it gets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lopsided.cluster.collectives import Network
from lopsided.comm.backends import Backend, Flight, GlooBackend, NcclBackend, PendingWork
from lopsided.comm.host_staging import HostStaging, Run
from lopsided.comm.recorder import Recorder, Sent
from lopsided.errors import ClusterError, RankError, WorldError

if TYPE_CHECKING:
    from lopsided.comm.watchdog import Watchdog

_WAYS = {
    "all_reduce": ("ring", "tree", "scatter+gather"),
    "all_gather": ("padded", "grouped", "all_to_all"),
    "reduce_scatter": ("padded", "grouped", "all_to_all"),
}


@dataclass(frozen=True, slots=True)
class Label:
    """What a collective is for: words to be read, and the id of the schedule's item that it carries out."""

    text: str
    item: str = ""

    def __str__(self) -> str:
        return self.text


What = str | Label


def as_label(what: What) -> Label:
    return what if isinstance(what, Label) else Label(what)


About = tuple[str, str, int, float]
"""Of a collective: which, which way, bytes of the whole tensor, and how large the largest piece is."""

# What both backends take as it is. Other dtypes are moved as bytes.
_KNOWN = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
# Integers that the backends do not add up, and bool, of which gloo makes a byte that is neither true nor false.
_WIDER = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}

# RuntimeErrors that are this process's own trouble.
_OWN = (torch.OutOfMemoryError, torch.AcceleratorError)


class Handle:
    """A collective under way."""

    __slots__ = ("_error", "_result", "_sent", "_then", "_what", "_wire", "_works")

    def __init__(
        self,
        wire: Communicator,
        what: What,
        result: Tensor,
        works: Sequence[PendingWork] = (),
        then: Sequence[Callable[[], object]] = (),
        sent: Sent | None = None,
    ) -> None:
        self._wire, self._what, self._result, self._works, self._then = wire, what, result, works, then
        self._sent = sent
        self._error: Exception | None = None

    def wait(self) -> Tensor:
        """The result; again the same when asked again. CUDA tensors are ready for the stream that is current here."""
        if self._error is not None:
            raise self._error
        if self._works or self._then:
            try:
                self._wire._stand(self._works, self._what, self._sent)
                for finish in self._then:
                    finish()
            except Exception as error:
                self._error = error
                raise
            # Lets go of buffers that only the collective needed.
            self._works = self._then = ()
        return self._result


class Communicator:
    """Talks among the devices of a plan; a rank of the group is a device's number. All tensors are flat and contiguous.

    With one device nothing is sent, and nothing copied: the result is the tensor that was given. `waited_s` is how long
    this process stood in `Handle.wait`. `sent_bytes` is what it sent, as the table in `collectives` counts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        network: Network,
        *,
        timeout_s: float = 600.0,
        watch: Watchdog | None = None,
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.device, self.network, self.watch = device, network, watch
        self.waited_s, self.sent_bytes = 0.0, 0
        self.recorder: Recorder | None = None  # of this step
        timeout, backend = timedelta(seconds=timeout_s), _backend(group, device)
        self._ferry: HostStaging | None = None
        self._lane: Backend
        if backend == "nccl":
            self._lane = NcclBackend(group, device, timeout)
        elif device.type == "cpu" or self.size == 1:
            self._lane = GlooBackend(group, device, timeout)
        else:
            self._lane = GlooBackend(group, torch.device("cpu"), timeout, pinned=True)
            self._ferry = HostStaging(self._lane, device)

    def all_reduce(self, flat: Tensor, *, what: What = "", way: str = "") -> Handle:
        """The sum over all devices, in place."""
        if self.size == 1 or not flat.numel():
            return Handle(self, what, flat)
        way = self._choose("all_reduce", way, flat.nbytes, 1.0)
        about = ("all_reduce", way, flat.nbytes, 1.0)
        return self._in_place(what, flat, lambda lane, _, target: (lane.all_reduce(target, way), None), about)

    def maximum(self, flat: Tensor, *, what: What = "") -> Handle:
        """The largest over all devices, in place."""
        if self.size == 1 or not flat.numel():
            return Handle(self, what, flat)
        if flat.is_complex():
            raise WorldError(f"{what or 'a collective'}: {flat.dtype} has no largest number", do="use a real dtype")
        about = ("all_reduce", "ring", flat.nbytes, 1.0)
        return self._in_place(what, flat, lambda lane, _, target: (lane.maximum(target), None), about)

    def all_gather(
        self, piece: Tensor, counts: Sequence[int], *, what: What = "", way: str = "", out: Tensor | None = None
    ) -> Handle:
        """All devices' pieces in the order of their ranks, of `counts` elements each; in `out` if that is given.

        `piece` may be its own part of `out`, and is then not copied.
        """
        total = self._total(counts, what)
        self._check(piece, counts[self.rank], what)
        if out is not None:
            self._check(out, total, what)
        if self.size == 1:
            if out is not None and out.data_ptr() != piece.data_ptr():
                out.copy_(piece.detach())
            return Handle(self, what, piece if out is None else out)
        whole = self._empty(total, piece.dtype) if out is None else out
        if not total:
            return Handle(self, what, whole)
        largest = self.size * max(counts) / total
        way = self._choose("all_gather", way, whole.nbytes, largest)
        self._count(way, counts, total, counts[self.rank] * (self.size - 1), piece.itemsize)
        source, target = _movable(piece), _movable(whole)
        sizes = _sizes(counts, piece)
        about = ("all_gather", way, whole.nbytes, largest)
        return self._begin(what, whole, lambda lane, a, b: lane.all_gather(a, b, sizes, way), source, target, about)

    def reduce_scatter(self, whole: Tensor, counts: Sequence[int], *, what: What = "", way: str = "") -> Handle:
        """Of the sum over all devices this one's piece, of `counts[rank]` elements. `whole` stays as it is."""
        total, count = self._total(counts, what), counts[self.rank]
        self._check(whole, total, what)
        if self.size == 1:
            return Handle(self, what, whole)
        piece = self._empty(count, whole.dtype)
        if not total:
            return Handle(self, what, piece)
        largest = self.size * max(counts) / total
        way = self._choose("reduce_scatter", way, whole.nbytes, largest)
        about = ("reduce_scatter", way, whole.nbytes, largest)
        self._count(way, counts, total, total - count, whole.itemsize)

        source = _summable(whole, what)
        sizes = [count * (source.numel() // total) for count in counts]

        def run(lane: Backend, source: Tensor, target: Tensor) -> Flight:
            return lane.reduce_scatter(source, target, sizes, way)

        if source.data_ptr() == whole.data_ptr():
            return self._begin(what, piece, run, source, _summable(piece, what), about)
        target = self._empty(count, source.dtype)
        return self._begin(what, piece, run, source, target, about, (lambda: piece.copy_(target),))

    def all_to_all(
        self,
        send: Tensor,
        give: Sequence[int],
        take: Sequence[int],
        *,
        what: What = "",
        whole_bytes: int = 0,
        largest: float = 1.0,
    ) -> Handle:
        """`give[r]` elements, in the order of the ranks, go to each rank r, and `take[r]` come from it.

        Nobody here knows how large the others' parts are. Who does says so, to be recorded: bytes of all parts
        together, and devices × the largest part of them.
        """
        self._check(send, self._total(give, what), what)
        if self.size == 1:
            return Handle(self, what, send)
        self.sent_bytes += (send.numel() - give[self.rank]) * send.itemsize
        taken = self._empty(self._total(take, what), send.dtype)
        source, target = _movable(send), _movable(taken)
        given, came = _sizes(give, send), _sizes(take, send)
        whole_bytes = whole_bytes or max(send.nbytes, taken.nbytes) * self.size  # as if all had as much
        about = ("all_to_all", "direct", whole_bytes, largest)
        return self._begin(what, taken, lambda lane, a, b: lane.all_to_all(a, b, given, came), source, target, about)

    def broadcast(self, flat: Tensor, source: int, *, what: What = "") -> Handle:
        """What rank `source` has, in place."""
        if self.size == 1 or not flat.numel():
            return Handle(self, what, flat)
        self.sent_bytes += flat.nbytes * (self.size - 1) // self.size
        moved, about = _movable(flat), ("broadcast", "direct", flat.nbytes, 1.0)
        return self._begin(
            what, flat, lambda lane, _, target: (lane.broadcast(target, source), None), moved, moved, about
        )

    def _in_place(self, what: What, flat: Tensor, run: Run, about: About) -> Handle:
        self.sent_bytes += 2 * flat.nbytes * (self.size - 1) // self.size
        held, summed = flat.detach(), _summable(flat, what)
        if summed.data_ptr() == flat.data_ptr():
            return self._begin(what, flat, run, summed, summed, about)
        return self._begin(what, flat, run, summed, summed, about, (lambda: held.copy_(summed),))

    def _begin(
        self,
        what: What,
        result: Tensor,
        run: Run,
        source: Tensor,
        target: Tensor,
        about: About,
        then: Sequence[Callable[[], object]] = (),
    ) -> Handle:
        what = as_label(what or "a collective")
        sent = None
        if self.recorder is not None and (self._ferry is not None or self.device.type == "cpu"):
            sent = self.recorder.starts(what.text, *about, item=what.item)
        if self._ferry is not None:
            crossing = self._ferry.cross(run, source, target, sent.begins if sent is not None else None)
            if sent is not None:
                crossing.arrived.add_done_callback(lambda _: sent.arrived())
            return Handle(self, what, result, (crossing,), then, sent)
        try:
            works, finish = run(self._lane, source, target)
        except _OWN:
            raise
        except RuntimeError as error:
            raise self._explain(error, what) from error
        if self.recorder is not None and sent is not None:
            works = self.recorder.follow(sent, works)
        return Handle(self, what, result, works, then if finish is None else (finish, *then), sent)

    def _stand(self, works: Sequence[PendingWork], what: What, sent: Sent | None) -> None:
        """Wait for them, and say who is to blame if that fails."""
        if self.watch is not None:
            self.watch.entering(str(what))
        since = time.perf_counter()
        try:
            with self.recorder.standing(sent) if self.recorder is not None else nullcontext():
                for work in works:
                    work.wait()
        except _OWN:
            raise
        except RuntimeError as error:
            raise self._explain(error, what) from error
        finally:
            self.waited_s += time.perf_counter() - since
            if self.watch is not None:
                self.watch.left()

    def _explain(self, error: RuntimeError, what: What) -> RankError:
        if self.watch is not None:
            return self.watch.explain(error, str(what))
        said = next(iter(str(error).splitlines()), type(error).__name__)
        return RankError(
            f"{what} did not finish: {said}",
            where=f"rank {self.rank} of {self.size}",
            do="see what the other processes say: one has ended or stopped taking part; or allow more by timeout_s",
        )

    def _choose(self, collective: str, way: str, whole_bytes: int, largest: float) -> str:
        way = way or self.network.best(collective, whole_bytes, largest).implementation
        if way not in _WAYS[collective]:
            raise ClusterError(
                f"{collective} cannot be carried out as {way!r}", do=f"choose from {', '.join(_WAYS[collective])}"
            )
        return way

    def _count(self, way: str, counts: Sequence[int], total: int, direct: int, itemsize: int) -> None:
        """What a device sends in a gather or scatter: what is `direct`ly for the others, or else all but its n-th."""
        carried = max(counts) * self.size if way == "padded" else total
        self.sent_bytes += itemsize * (direct if way == "all_to_all" else carried * (self.size - 1) // self.size)

    def _total(self, counts: Sequence[int], what: What) -> int:
        if len(counts) != self.size:
            raise self._disagreement(f"{len(counts)} counts for {self.size} devices", what)
        return sum(counts)

    def _check(self, tensor: Tensor, count: int, what: What) -> None:
        if tensor.numel() != count:
            raise self._disagreement(f"{tensor.numel()} elements where {count} were agreed on", what)

    def _disagreement(self, found: str, what: What) -> WorldError:
        return WorldError(
            f"{what or 'a collective'}: {found}",
            where=f"rank {self.rank} of {self.size}",
            do="give every process the same counts, one for each rank, and each tensor as many elements as they say",
        )

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        name = group._get_backend(device).name()
    except RuntimeError as error:
        name = str(error)
    if name not in ("gloo", "nccl"):
        raise WorldError(
            f"the process group cannot carry {device.type} tensors: {name}",
            do='start it by init_process_group("gloo"), or "cpu:gloo,cuda:nccl" for GPUs',
        )
    return str(name)


def _movable(flat: Tensor) -> Tensor:
    """The same memory in a dtype that every backend moves."""
    flat = flat.detach()
    # A single element may have any stride, and seen as bytes it must be one.
    return flat if flat.dtype in _KNOWN else flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _sizes(counts: Sequence[int], flat: Tensor) -> list[int]:
    """The counts in what `_movable` makes of it."""
    return list(counts) if flat.dtype in _KNOWN else [count * flat.itemsize for count in counts]


def _summable(flat: Tensor, what: What) -> Tensor:
    """The same values in a dtype that every backend adds up without losing more than its own would. Complex ones are
    the same memory: real and imaginary parts add up by themselves."""
    flat = flat.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.dtype in _KNOWN:
        return flat
    wider = torch.float32 if flat.dtype.is_floating_point else _WIDER.get(flat.dtype)
    if wider is None:
        raise WorldError(f"{what or 'a collective'}: {flat.dtype} cannot be added up", do="use a real dtype")
    return flat.to(wider)
