"""What the parallel model returns besides its loss, and how a rank gets the whole of it.

In: this rank's part of a value, as the plan places it. Out: tensors as the call gave its batch: whole for a whole
batch, this rank's rows for its rows; `gather`, the whole of either. What must be sent for that is sent when it is first
looked at (`Output`), so nobody pays for logits that only the loss needs; and logits that the loss was made without
having them all at once are made then (`Unmade`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lopsided.capturing.call import take_apart
from lopsided.capturing.capture_graph import Returned
from lopsided.comm.redistribute import Redistributor
from lopsided.comm.world import World, waiting
from lopsided.errors import TrainingError
from lopsided.executor.chunked import Unmade
from lopsided.ir.graph import DTYPES
from lopsided.ir.placement import I, Placement, S
from lopsided.runtime.calls.call_form import Given

_MOST_DIMS = 16
# The attribute of a tensor that knows the value whose rows it is.
_WHOLE = "lopsided_whole"
_LOOKED_UP = ("shape", "dtype", "device", "ndim", "size", "dim", "numel", "__len__", "is_floating_point")


class Output(Tensor):
    """A tensor that is brought here when it is used."""

    _bring: Callable[[], Tensor]
    _brought: Tensor | None
    _cut: RowCut | None
    _awaited: Awaited | None

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Output:
        made: Output = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        return made

    def brought(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if self._brought is None:
                self._brought = self._bring()
            return self._brought

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        first = args[0] if args else None
        if name in _LOOKED_UP and isinstance(first, Output) and first._cut is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(Output, Output.brought, (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Output, lambda one: one.brought().detach(), (args, kwargs or {}))
        return function(*args, **kwargs)


def output(shape: Sequence[int], dtype: torch.dtype, device: torch.device, bring: Callable[[], Tensor]) -> Output:
    made = Output(shape, dtype, device)
    made._bring, made._brought, made._cut, made._awaited = bring, None, None, None
    return made


def not_here(shape: Sequence[int], dtype: torch.dtype, device: torch.device, where: str) -> Output:
    """An output of a whole batch on a rank whose device the plan leaves idle."""

    def refuse() -> Tensor:
        raise TrainingError(
            "the plan leaves this rank's device idle, and an output of the whole batch is not there to look at",
            where=where,
            do="start as many processes as the plan uses (`lopsided run plan.json` does); or let pm make the loss "
            "(loss_fn=) and look at lopsided.gather(output), which all ranks call",
        )

    return output(shape, dtype, device, refuse)


@dataclass(frozen=True)
class RowCut:
    """Rows of a batch as the ranks have them: `rows` in all, this rank's by the placement `at`."""

    exchange: Redistributor
    at: Placement
    rows: int

    @cached_property
    def mine(self) -> int:
        """How many rows this rank has."""
        return self.exchange.layout(self.at, (self.rows,)).local_shapes[self.exchange.rank][0]

    @cached_property
    def is_with_one(self) -> bool:
        """Whether one rank has all rows."""
        return max(self.exchange.layout(self.at, (self.rows,)).counts) == self.rows

    def of(self, shape: Sequence[int]) -> Placement | None:
        """How a value of this shape is cut in the batch's rows; None where it has no rows of the batch."""
        if not shape or not self.rows or shape[0] % self.rows:
            return None
        return S(0, 1, self.at.unit * (shape[0] // self.rows), self.at.by)

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...] | None:
        """The shape of the whole of a tensor with this rank's rows; None where it can not be told."""
        if not local or (local[0] % self.mine if self.mine else local[0]):
            return None
        return (self.rows * (local[0] // self.mine if self.mine else 1), *local[1:])


@dataclass(frozen=True)
class OutputPart:
    """This rank's part of a value of the graph."""

    part: Tensor | Unmade
    at: Placement
    shape: tuple[int, ...]
    name: str
    dropped: bool = False  # it has a gradient in the model, and none here

    def to(self, exchange: Redistributor, wanted: Placement) -> Tensor:
        part = self.part.made if isinstance(self.part, Unmade) else self.part
        made = exchange.convert(part, self.at, wanted, self.shape, f"the output %{self.name}")
        if self.dropped and torch.is_grad_enabled():
            made = _Dropped.apply(made.detach().view_as(made).requires_grad_())  # type: ignore[no-untyped-call]
        return made


def hand_on(value: OutputPart, exchange: Redistributor, cut: RowCut | None) -> Tensor:
    """A value as the caller gets it: its rows of it by `cut`, or the whole."""
    rows = cut.of(value.shape) if cut is not None else None
    wanted = rows if rows is not None else I
    sends = value.at != wanted and not value.at.is_whole and exchange.size > 1
    sends |= isinstance(value.part, Unmade)
    whole = (exchange, value)
    if not sends:
        made = value.to(exchange, wanted)
        if rows is not None:
            made = _Rows.apply(made) if made.requires_grad and exchange.size > 1 else made.view_as(made)  # type: ignore[no-untyped-call]
            vars(made)[_WHOLE] = whole
        return made
    layout = exchange.layout(wanted, value.shape).local_shapes[exchange.rank] if rows is not None else value.shape
    differentiable = torch.is_grad_enabled()

    def bring() -> Tensor:
        with torch.set_grad_enabled(differentiable):
            moved = value.to(exchange, wanted)
            guarded = rows is not None and moved.requires_grad and exchange.size > 1
            return _Rows.apply(moved) if guarded else moved  # type: ignore[no-untyped-call]

    made = output(layout, value.part.dtype, value.part.device, bring)
    made._cut = cut or RowCut(exchange, I, 0)
    vars(made)[_WHOLE] = whole
    return made


class _Rows(torch.autograd.Function):
    """The identity on this rank's rows, which refuses a gradient from outside."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise TrainingError(
            "a loss outside of the model was made of this rank's rows of an output: ranks have unequal numbers of "
            "rows, so it is not a part of the whole batch's loss",
            do="pass it to parallelize as loss_fn=, or make it of lopsided.gather(output), the same on all ranks",
        )


class _Dropped(torch.autograd.Function):
    """The identity on an output that the captured loss does not need, which refuses a gradient: it would be lost."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise TrainingError(
            "a loss outside of the model needs the gradient of an output that the loss of the model does not "
            "depend on, so it was not planned",
            do="say what is minimised: parallelize(..., loss_fn=lambda output, batch: output.loss + 0.1 * output.aux)",
        )


# The loss function in the script's own hands


class Awaited:
    """An output that the loss function is still to be called with: only then is there a step to run."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.parts: Sequence[Tensor] | None = None
        self.outputs: list[Output] = []

    def part(self, k: int) -> Tensor:
        if self.parts is None:
            raise TrainingError(
                "the output is looked at before the loss function was called with it: the loss is a part of the step",
                do="call loss = pm.loss_fn(output, target) first, or the model under torch.no_grad() or in evaluation",
            )
        found = self.parts[k]
        return found.brought() if isinstance(found, Output) else found


def awaited_outputs(given: Given, returned: Returned, device: torch.device) -> Any:
    """What the model will have returned, once the loss function is called with it."""
    awaited = Awaited(given)
    for k, _ in enumerate(returned.names):
        made = output((0,), torch.float32, device, lambda k=k: awaited.part(k))  # type: ignore[misc]
        made._awaited = awaited
        awaited.outputs.append(made)
    return returned.build(awaited.outputs)


def awaited_in(output: object) -> Awaited | None:
    """What the loss function is called with, if it is the output of a step that has not run yet; all of it."""
    parts, _ = take_apart(output)
    found = next((part._awaited for part in parts if isinstance(part, Output) and part._awaited is not None), None)
    if found is None or found.parts is not None:
        return None
    if [*map(id, parts)] != [*map(id, found.outputs)]:
        raise TrainingError(
            "pm.loss_fn is called with a part of what the model returned",
            do="call it with all of it, and let the function given as loss_fn= take what it needs: "
            "loss_fn=lambda output, target: criterion(output.logits, target)",
        )
    return found


def with_loss(returned: Any) -> Any:
    """An object with `.loss`, which for now can also be used as if it were the loss."""
    kind = type(returned)
    if not hasattr(returned, "__dict__") or hasattr(kind, "backward") or isinstance(returned, tuple):
        return returned
    returned.__class__ = _named_like(kind)  # type: ignore[arg-type]
    return returned


@cache
def _named_like(kind: type) -> type:
    return type(kind.__name__, (WithLoss, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class WithLoss:
    """For scripts that took what the model returns for the loss itself, when that was all that came back."""

    loss: Tensor

    def __getattr__(self, name: str) -> Any:
        if name in ("backward", "item", "detach", "grad_fn", "requires_grad"):
            warnings.warn(
                f"the parallel model returns what the model returns: write output.loss.{name}",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(self.loss, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __truediv__(self, number: float) -> Tensor:
        return self.loss / number

    def __mul__(self, number: float) -> Tensor:
        return self.loss * number

    def __float__(self) -> float:
        return float(self.loss)


_last: weakref.ref[Any] | None = None
"""The model whose forward pass ran last: whose rows a tensor has, where nothing else tells."""


def remember(pm: Any) -> None:
    global _last
    _last = weakref.ref(pm)


def gather(tensor: Tensor, pm: Any = None) -> Tensor:
    """The whole of an output, or of anything with a row for each of the batch's, on every rank.

    All ranks call it. What is whole already is given back. Rows are those of the last batch that `pm` was called with
    (the model that ran last, unless given). Gradients flow through it, if all ranks go on with the same computation.
    """
    pm = pm if pm is not None else _last() if _last is not None else None
    if pm is None:
        raise TrainingError("nothing was computed yet whose rows could be gathered", do="call the parallel model first")
    pm.together("gather")
    return told_to_bystanders(_gathered(tensor, pm) if pm.world.takes_part else None, pm)


def _gathered(tensor: Tensor, pm: Any) -> Tensor:
    known: tuple[Redistributor, OutputPart] | None = vars(tensor).get(_WHOLE)
    if known is not None:
        return known[1].to(known[0], I)
    cut: RowCut | None = pm.last_cut
    if cut is None:
        return tensor
    shape = cut.whole_shape(tensor.shape)
    at = cut.of(shape) if shape is not None else None
    if shape is None or at is None:
        raise TrainingError(
            f"a tensor of shape {list(tensor.shape)} does not have this rank's {cut.mine} rows of {cut.rows}",
            where="lopsided.gather(tensor)",
            do="gather outputs, or tensors with a row for each of the batch's; a number per rank: torch.distributed",
        )
    return cut.exchange.convert(tensor, at, I, shape, "gathered rows")


def told_to_bystanders(tensor: Tensor | None, pm: Any) -> Tensor:
    """What the ranks that take part have, on those whose device the plan does not use as well; all ranks call it."""
    world: World = pm.world
    if len(world.ranks) == world.size and tensor is not None:
        return tensor
    where = world.device if world.backend_of_all == "nccl" else torch.device("cpu")
    about = torch.zeros(2 + _MOST_DIMS, dtype=torch.int64, device=where)
    dtypes = list(DTYPES.values())
    if tensor is not None:
        about[: 2 + tensor.dim()] = torch.tensor([dtypes.index(tensor.dtype), tensor.dim(), *tensor.shape])
    with waiting("the form of an output"):
        dist.broadcast(about, world.ranks[0])
    number, dims, *shape = about.tolist()
    flat = (
        torch.empty(shape[:dims], dtype=dtypes[number], device=where) if tensor is None else tensor.detach().to(where)
    )
    # As bytes, which every backend sends.
    told = flat.contiguous().reshape(-1).view(torch.uint8)
    with waiting("an output, told to all ranks"):
        dist.broadcast(told, world.ranks[0])
    return tensor if tensor is not None else told.view(dtypes[number]).reshape(shape[:dims]).to(world.device)
