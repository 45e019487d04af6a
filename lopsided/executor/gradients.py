"""Gradients on their way to where parameters are stored: in the buckets of the schedule, behind the backward pass.

In: the gradients of copies of parameters, as autograd finishes them. Out: `param.grad`, complete when `backward()`
returns.

    stored    used    its gradient
    whole     whole   is a sum over devices: all-reduced
    cut       whole   is a sum over devices: reduce-scattered
    whole     cut     is a piece: gathered
    cut       cut     is another piece: exchanged

Of a batch in rounds, every round before the last adds up what it makes (`RoundSums`), and the last one sends the sums,
but for buckets that are sent in every round. The schedule says which gradients travel together. Autograd runs the
functions of a graph in exactly the reverse order of their making, so they arrive in the order of the schedule on every
device, and a bucket is sent when all of it is there. What does not fill a bucket is sent at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from lopsided.calibration.run_record import BUCKETS
from lopsided.comm.communicator import Label
from lopsided.comm.redistribute import Layout, Redistributor
from lopsided.errors import TrainingError

SCATTERS_AT_ONCE = 2
"""How many buckets of gradients that end up cut are on their way at once."""


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients that one collective brings home."""

    id: str
    collective: str
    members: tuple[str, ...]  # ids of the redistributions that give to it
    number: int  # in the order in which they are sent
    at_end: bool  # it is sent when the backward pass is over, and not as soon as all of it is there
    in_every_round: bool = True  # or else behind the last


@dataclass(frozen=True, slots=True, eq=False)
class Synced:
    """A parameter's copy whose gradient goes by a bucket: cut as `source` there, as `to` where it is stored."""

    id: str
    name: str
    parameter: nn.Parameter
    source: Layout | None
    to: Layout | None
    bucket: GradientBucket


@dataclass(slots=True)
class RoundSums:
    """What the rounds before the last have added up: gradients of copies, which are still to be sent, and of pieces as
    they are stored."""

    copies: dict[Synced, Tensor] = field(default_factory=dict)
    pieces: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)

    def multiply(self, factor: Tensor) -> None:
        for gradient in (*self.copies.values(), *(gradient for _, gradient in self.pieces)):
            gradient.mul_(factor.to(gradient.device))


class Gradients:
    """Collects, sends and hands out the gradients of one model on one device."""

    def __init__(self, exchange: Redistributor) -> None:
        self.exchange = exchange
        self.syncing = True
        self.on_begin: Callable[[bool], None] = lambda syncing: None
        self.on_finish: Callable[[], None] = lambda: None
        self.quiet: Callable[[], AbstractContextManager[None]] = nullcontext  # around rounds before the last
        self._filling: dict[GradientBucket, dict[str, tuple[Synced, Tensor]]] = {}
        self._sent: list[tuple[Callable[[], Sequence[Tensor]], list[Synced]]] = []  # not handed out, the oldest first
        self._kept: dict[Synced, Tensor] = {}  # local sums of passes that were not synchronised
        self._begun = False
        self._memory = _BucketMemory()
        self._adding: RoundSums | None = None  # of the rounds that are running
        self._added: dict[Synced, Tensor] = {}  # by the rounds before the one that is running, the last

    @property
    def has_kept(self) -> bool:
        """Some backward pass was not synchronised, and no later one was."""
        self._drop_zeroed()
        return bool(self._kept)

    def reset(self) -> None:
        """Forget a backward pass that was broken off."""
        self._filling, self._sent, self._begun, self._added = {}, [], False, {}

    def begin(self) -> None:
        """A backward pass has started; `finish` is called when it ends."""
        if not self._begun:
            self.on_begin(self.syncing)
            self._begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def forget(self) -> None:
        """Drop what passes without synchronisation have added up."""
        self._kept = {}

    def _drop_zeroed(self) -> None:
        """What is kept goes with `param.grad`, whoever set that to None."""
        for synced in [synced for synced in self._kept if synced.parameter.grad is None]:
            del self._kept[synced]

    # Rounds

    @contextmanager
    def adding_to(self, sums: RoundSums, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Backward passes in here are of rounds before the last: nothing of theirs reaches `param.grad`."""
        with DisableTorchFunctionSubclass():
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            before = [parameter.grad for parameter in trained]
            for parameter in trained:
                parameter.grad = None
            self._adding = sums
            try:
                with self.quiet():
                    yield
                while self._sent:
                    self._hand_out(*self._sent.pop(0))
                sums.pieces = [(one, one.grad) for one in trained if one.grad is not None]
            finally:
                self._adding = None
                for parameter, gradient in zip(trained, before, strict=True):
                    parameter.grad = gradient

    def round_ends(self) -> None:
        """What is sent in every round and did not fill a bucket goes now. Nobody waits for it yet."""
        for bucket in sorted(self._filling, key=lambda bucket: bucket.number):
            self._send(bucket, self._filling[bucket])
        self._filling = {}

    def take_over(self, sums: RoundSums) -> None:
        """The backward pass that has begun is that of the last round: its gradients are added to these."""
        self._drop_zeroed()
        self._added = sums.copies
        with DisableTorchFunctionSubclass():
            for parameter, gradient in sums.pieces:
                accumulate(parameter, gradient)

    def add(self, synced: Synced, gradient: Tensor) -> None:
        if (recorder := self.exchange.communicator.recorder) is not None:
            recorder.mark(BUCKETS)
        if self._adding is not None:
            self._add_to(self._adding, synced, gradient)
            return
        earlier = self._added.pop(synced, None)
        if earlier is not None:
            gradient = earlier.add_(gradient)
        with DisableTorchFunctionSubclass():
            is_fresh = synced.parameter.grad is None
        if is_fresh:
            self._kept.pop(synced, None)
        if not self.syncing:
            before = self._kept.get(synced)
            # The tensor may belong to others too: the first is copied.
            self._kept[synced] = gradient.clone() if before is None else before.add_(gradient)
            if is_fresh:
                synced.parameter.grad = torch.zeros_like(synced.parameter)
            return
        before = self._kept.pop(synced, None)
        self._put(synced, gradient if before is None else before.add_(gradient))

    def _add_to(self, sums: RoundSums, synced: Synced, gradient: Tensor) -> None:
        if synced.bucket.in_every_round:
            self._put(synced, gradient)
        elif synced in sums.copies:
            sums.copies[synced].add_(gradient)
        else:
            sums.copies[synced] = gradient.clone()  # the tensor may belong to others too

    def _put(self, synced: Synced, gradient: Tensor) -> None:
        given = self._filling.setdefault(synced.bucket, {})
        if synced.id in given:  # a graph that was kept runs backward twice before anything is finished
            gradient = given[synced.id][1] + gradient
        given[synced.id] = (synced, gradient)
        if len(given) == len(synced.bucket.members) and not synced.bucket.at_end:
            self._send(synced.bucket, self._filling.pop(synced.bucket))

    def _send(self, bucket: GradientBucket, given: dict[str, tuple[Synced, Tensor]]) -> None:
        """All members of a bucket, or those that this backward pass has reached."""
        entries = [given[member] for member in bucket.members if member in given]
        named, tensors = [synced for synced, _ in entries], [gradient for _, gradient in entries]
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        label = Label(f"gradient of {named[0].name}{more}", bucket.id)
        self._sent.append((self._start(bucket.collective, named, tensors, label), named))

    def _start(
        self, collective: str, named: Sequence[Synced], tensors: Sequence[Tensor], label: Label
    ) -> Callable[[], Sequence[Tensor]]:
        """What to call for the gradients as their parameters are stored."""
        sources = [synced.source for synced in named if synced.source is not None]
        targets = [synced.to for synced in named if synced.to is not None]
        with DisableTorchFunctionSubclass():
            sizes = [synced.parameter.numel() for synced in named]
        if collective == "all_reduce":
            # A copy in any case: what autograd hands over may be shared with others.
            flat = self._memory.take(sum(sizes), tensors[0])
            torch.cat([gradient.reshape(-1) for gradient in tensors], out=flat)
            summed = self.exchange.communicator.all_reduce(flat, what=label)
            return lambda: summed.wait().split(sizes)
        if collective == "all_gather":
            return self.exchange.start_gather(tensors, sources, label).wait
        if collective == "all_to_all":
            return self.exchange.start_reshard(tensors, sources, targets, label).wait
        # What is sent is as large as whole parameters, which nobody should have to hold all at once.
        while len(self._sent) >= SCATTERS_AT_ONCE:
            self._hand_out(*self._sent.pop(0))
        scattered = self.exchange.start_scatter(tensors, targets, label)
        return lambda: scattered.wait().split(sizes)

    def finish(self) -> None:
        """Send what is left, wait for everything, and hand out."""
        self._begun = False
        if (recorder := self.exchange.communicator.recorder) is not None:
            recorder.mark(BUCKETS)
        for synced in list(self._added):  # which the last round did not reach
            self.add(synced, torch.zeros_like(self._added[synced]))
        if self.syncing:
            self._drop_zeroed()
            for synced in list(self._kept):
                self._put(synced, self._kept.pop(synced))
        self.round_ends()
        while self._sent:
            self._hand_out(*self._sent.pop(0))
        if recorder is not None:
            recorder.idle()
        self.on_finish()

    def _hand_out(self, arrived: Callable[[], Sequence[Tensor]], named: Sequence[Synced]) -> None:
        with DisableTorchFunctionSubclass():  # parameters may be of a type that answers more slowly
            for synced, gradient in zip(named, arrived(), strict=True):
                accumulate(synced.parameter, gradient.view(synced.parameter.shape))


class _BucketMemory:
    """Memory of buckets from step to step: fresh pages would have to be mapped and cleared in every step.

    A bucket is filled again when nobody else holds its memory: when the gradients that are views of it are gone.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, count: int, like: Tensor) -> Tensor:
        made = self._made.setdefault((count, like.dtype), [])
        # Handed out as a view: whoever waits for it counts as a holder.
        for flat in made:
            if _holders(flat) == _OURS_ALONE:
                return flat.view(-1)
        made.append(torch.empty(count, dtype=like.dtype, device=like.device))
        return made[-1].view(-1)


def _holders(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_OURS_ALONE = _holders(torch.empty(1))


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class ParameterCopy(torch.autograd.Function):
    """A copy of a stored parameter. Its gradient is given to a bucket."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, synced: Synced, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.about = (gradients, synced)
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradients, synced = ctx.about
        _check_is_accumulated(ctx.next_functions[0][0], synced.name)
        gradients.add(synced, gradient)
        return None, None, None, None


def _check_is_accumulated(node: Any, name: str) -> None:
    """Refuse `torch.autograd.grad` with respect to a parameter whose gradient goes by a bucket: it gets nothing."""
    while node is not None and node.next_functions:
        node = node.next_functions[0][0]
    try:
        if node is not None:
            torch._C._will_engine_execute_node(node)
    except RuntimeError:  # which it raises of a leaf that autograd.grad is asked for, and of no other
        raise TrainingError(
            f"torch.autograd.grad is asked for the gradient of {name}, which is summed over devices on its way home",
            do="call loss.backward() and take p.grad; torch.autograd.grad with respect to inputs works",
        ) from None


class PieceOfCopy(torch.autograd.Function):
    """A copy of a parameter stored cut whose gradient is the same on all devices: each keeps its piece of it."""

    @staticmethod
    def forward(ctx: Any, stored: Layout, rank: int, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.about = (stored, rank)
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        stored, rank = ctx.about
        return None, None, stored.piece(gradient, rank).contiguous(), None
