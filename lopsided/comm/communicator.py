"""The devices of a plan talk: collectives on flat tensors whose pieces need not be equal, by every algorithm.

In: a process group, this process's device, the prices. Out: `Communicator`, whose methods start a collective and return
a `Handle` to wait for it. How an algorithm is carried out on which backend stands in `backends`. Here is what is the
same for all: which algorithm, as which dtype, and who is to blame if it fails.

Every process must start the same collectives in the same order and wait for each. Until it has waited, it must neither
change what it gave nor use what it gets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lopsided.cluster.collectives import Network
from lopsided.comm.backends import Backend, Flight, GlooBackend, HostStaging, NcclBackend, PendingWork, Run
from lopsided.comm.recorder import Recorder, Sent
from lopsided.errors import ClusterError, RankError, WorldError

if TYPE_CHECKING:
    from lopsided.comm.watchdog import Watchdog

_ALGORITHMS = {
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
"""Of a collective: which, by which algorithm, bytes of the whole tensor, and how large the largest piece is."""


class CollectiveCall(NamedTuple):
    """A collective to be started, checked already."""

    collective: str
    what: What
    given: Tensor
    result: Tensor  # is what was given, where it is changed in place
    algorithm: str = ""  # "": the cheapest is chosen
    counts: Sequence[int] = ()  # of every rank's piece; of an all_to_all, of what goes to each
    taken: Sequence[int] = ()  # by an all_to_all, from each
    whole_bytes: int = 0
    largest: float = 1.0
    source: int = 0  # the rank that a broadcast comes from


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

    __slots__ = ("_communicator", "_error", "_result", "_sent", "_then", "_what", "_works")

    def __init__(
        self,
        communicator: Communicator,
        what: What,
        result: Tensor,
        works: Sequence[PendingWork] = (),
        then: Sequence[Callable[[], object]] = (),
        sent: Sent | None = None,
    ) -> None:
        self._communicator, self._what, self._result = communicator, what, result
        self._works, self._then, self._sent = works, then, sent
        self._error: Exception | None = None

    def wait(self) -> Tensor:
        """The result; again the same when asked again. CUDA tensors are ready for the stream that is current here."""
        if self._error is not None:
            raise self._error
        if self._works or self._then:
            try:
                self._communicator._stand(self._works, self._what, self._sent)
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
    this process stood in `Handle.wait`.
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
        self.waited_s = 0.0
        self.recorder: Recorder | None = None  # notes of this step, if it is recorded
        timeout, backend = timedelta(seconds=timeout_s), _backend(group, device)
        self._staging: HostStaging | None = None
        self._backend: Backend
        if backend == "nccl":
            self._backend = NcclBackend(group, device, timeout)
        elif device.type == "cpu" or self.size == 1:
            self._backend = GlooBackend(group, device, timeout)
        else:
            self._backend = GlooBackend(group, torch.device("cpu"), timeout, pinned=True)
            self._staging = HostStaging(self._backend, device)

    def all_reduce(self, flat: Tensor, *, what: What = "", algorithm: str = "") -> Handle:
        """The sum over all devices, in place."""
        return self._start_in_place(CollectiveCall("all_reduce", what, flat, flat, algorithm))

    def maximum(self, flat: Tensor, *, what: What = "") -> Handle:
        """The largest over all devices, in place."""
        if flat.is_complex():
            raise WorldError(f"{what or 'a collective'}: {flat.dtype} has no largest number", do="use a real dtype")
        return self._start_in_place(CollectiveCall("maximum", what, flat, flat))

    def broadcast(self, flat: Tensor, source: int, *, what: What = "") -> Handle:
        """What rank `source` has, in place."""
        return self._start_in_place(CollectiveCall("broadcast", what, flat, flat, source=source))

    def _start_in_place(self, call: CollectiveCall) -> Handle:
        if self.size == 1 or not call.given.numel():
            return Handle(self, call.what, call.result)
        return self._start(call)

    def all_gather(
        self, piece: Tensor, counts: Sequence[int], *, what: What = "", algorithm: str = "", out: Tensor | None = None
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
        whole = self._empty(total, piece) if out is None else out
        if not total:
            return Handle(self, what, whole)
        largest = self.size * max(counts) / total
        return self._start(
            CollectiveCall("all_gather", what, piece, whole, algorithm, counts, (), whole.nbytes, largest)
        )

    def reduce_scatter(self, whole: Tensor, counts: Sequence[int], *, what: What = "", algorithm: str = "") -> Handle:
        """Of the sum over all devices this one's piece, of `counts[rank]` elements. `whole` stays as it is."""
        total = self._total(counts, what)
        self._check(whole, total, what)
        if self.size == 1:
            return Handle(self, what, whole)
        piece = self._empty(counts[self.rank], whole)
        if not total:
            return Handle(self, what, piece)
        largest = self.size * max(counts) / total
        return self._start(
            CollectiveCall("reduce_scatter", what, whole, piece, algorithm, counts, (), whole.nbytes, largest)
        )

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
        taken = self._empty(self._total(take, what), send)
        whole_bytes = whole_bytes or max(send.nbytes, taken.nbytes) * self.size  # as if all had as much
        return self._start(CollectiveCall("all_to_all", what, send, taken, "direct", give, take, whole_bytes, largest))

    # How it is carried out: `in_process` has two classes that do it otherwise

    def _start(self, call: CollectiveCall) -> Handle:
        match call.collective:
            case "all_reduce" | "maximum":
                return self._start_reduction(call)
            case "all_gather":
                return self._start_gather(call)
            case "reduce_scatter":
                return self._start_scatter(call)
            case "all_to_all":
                return self._start_exchange(call)
            case _:
                return self._start_broadcast(call)

    def _start_reduction(self, call: CollectiveCall) -> Handle:
        flat = call.given
        adds = call.collective == "all_reduce"
        algorithm = self._choose(call, flat.nbytes) if adds else "ring"
        about = ("all_reduce", algorithm, flat.nbytes, 1.0)
        held, summed = flat.detach(), _summable(flat, call.what)

        def run(backend: Backend, _: Tensor, target: Tensor) -> Flight:
            return backend.all_reduce(target, algorithm) if adds else backend.maximum(target), None

        then = () if summed.data_ptr() == flat.data_ptr() else (lambda: held.copy_(summed),)
        return self._begin(call.what, flat, run, summed, summed, about, then)

    def _start_gather(self, call: CollectiveCall) -> Handle:
        piece, whole = call.given, call.result
        algorithm = self._choose(call, call.whole_bytes)
        sizes = _sizes(call.counts, piece)
        about = (call.collective, algorithm, call.whole_bytes, call.largest)

        def run(backend: Backend, source: Tensor, target: Tensor) -> Flight:
            return backend.all_gather(source, target, sizes, algorithm)

        return self._begin(call.what, whole, run, _movable(piece), _movable(whole), about)

    def _start_scatter(self, call: CollectiveCall) -> Handle:
        whole, piece = call.given, call.result
        algorithm = self._choose(call, call.whole_bytes)
        about = (call.collective, algorithm, call.whole_bytes, call.largest)

        source = _summable(whole, call.what)
        sizes = [count * (source.numel() // whole.numel()) for count in call.counts]

        def run(backend: Backend, source: Tensor, target: Tensor) -> Flight:
            return backend.reduce_scatter(source, target, sizes, algorithm)

        if source.data_ptr() == whole.data_ptr():
            return self._begin(call.what, piece, run, source, _summable(piece, call.what), about)
        target = self._empty(piece.numel(), source)
        return self._begin(call.what, piece, run, source, target, about, (lambda: piece.copy_(target),))

    def _start_exchange(self, call: CollectiveCall) -> Handle:
        send, taken = call.given, call.result
        given, came = _sizes(call.counts, send), _sizes(call.taken, send)
        about = (call.collective, call.algorithm, call.whole_bytes, call.largest)

        def run(backend: Backend, source: Tensor, target: Tensor) -> Flight:
            return backend.all_to_all(source, target, given, came)

        return self._begin(call.what, taken, run, _movable(send), _movable(taken), about)

    def _start_broadcast(self, call: CollectiveCall) -> Handle:
        flat = call.given
        moved, about = _movable(flat), (call.collective, "direct", flat.nbytes, 1.0)

        def run(backend: Backend, _: Tensor, target: Tensor) -> Flight:
            return backend.broadcast(target, call.source), None

        return self._begin(call.what, flat, run, moved, moved, about)

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
        if self.recorder is not None and (self._staging is not None or self.device.type == "cpu"):
            sent = self.recorder.starts(what.text, *about, item=what.item)
        if self._staging is not None:
            crossing = self._staging.cross(run, source, target, sent.begins if sent is not None else None)
            if sent is not None:
                crossing.arrived.add_done_callback(lambda _: sent.arrived())
            return Handle(self, what, result, (crossing,), then, sent)
        try:
            works, finish = run(self._backend, source, target)
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

    def _choose(self, call: CollectiveCall, whole_bytes: int) -> str:
        """The algorithm that was asked for, or else the cheapest."""
        collective, known = call.collective, _ALGORITHMS[call.collective]
        algorithm = call.algorithm or self.network.best(collective, whole_bytes, call.largest).implementation
        if algorithm not in known:
            raise ClusterError(
                f"{collective} cannot be carried out as {algorithm!r}", do=f"choose from {', '.join(known)}"
            )
        return algorithm

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

    def _empty(self, count: int, like: Tensor) -> Tensor:
        return torch.empty(count, dtype=like.dtype, device=self.device)


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
