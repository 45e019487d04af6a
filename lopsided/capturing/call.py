"""The call of a model: what of a batch goes to forward and what to the loss function, and what comes back.

In: a batch (a mapping, a tuple, one argument, or `Arguments`), what a model returned. Out: tensors by name and the way
back to a call (`flatten_batch`); what forward and the loss function take of it (`Handed`); the loss in what was
returned (`find_loss`), and all of its tensors with the way back to the same structure (`take_apart`).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from lopsided.errors import CaptureError

LossFn = Callable[..., Tensor]
Rebuild = Callable[[list[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Arguments:
    """A batch that goes partly by position and partly by name."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def arguments_of(batch: object) -> Arguments:
    if isinstance(batch, Arguments):
        return batch
    if isinstance(batch, Mapping):
        return Arguments((), dict(batch))
    return Arguments(tuple(batch)) if isinstance(batch, tuple | list) else Arguments((batch,))


def in_form_of(batch: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call as a batch of the same form as `batch`."""
    if isinstance(batch, Arguments):
        return Arguments(args, kwargs)
    return kwargs if isinstance(batch, Mapping) else args if isinstance(batch, tuple | list) else args[0]


def named_leaves(batch: object) -> tuple[dict[str, Any], pytree.TreeSpec]:
    """Everything in a batch by its dotted name, tensors and others, and how it is put together."""
    call = arguments_of(batch)
    leaves, spec = pytree.tree_flatten_with_path((call.args, dict(call.kwargs)))
    names = [".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:]) for path, _ in leaves]
    return dict(zip(names, (value for _, value in leaves), strict=True)), spec


def flatten_batch(batch: object) -> tuple[dict[str, Tensor], Rebuild]:
    """The tensors of a batch by name, and the way back from tensors to the model's arguments."""
    leaves, spec = named_leaves(batch)
    for name, value in leaves.items():
        _refuse_hidden(name, value)
    return {name: value for name, value in leaves.items() if isinstance(value, Tensor)}, rebuilder(leaves, spec)


def _refuse_hidden(name: str, value: object) -> None:
    """What is in a tensor that nobody finds would be that of the first batch for ever."""
    if isinstance(value, np.ndarray):
        raise CaptureError(
            f"{name} in the batch is an array of numpy's, which would be that of the first batch in every step",
            do=f"give torch.from_numpy({name})",
        )
    if not isinstance(value, Tensor) and _holds(value, (Tensor, np.ndarray)):
        kind = type(value).__name__
        register = "torch.export.register_dataclass" if dataclasses.is_dataclass(value) else "torch.utils._pytree"
        raise CaptureError(
            f"{name} in the batch is a {kind} with tensors in it, which would be those of the first batch for ever",
            do=f"give its tensors in tuples, dicts or named tuples, or register the class ({register})",
        )


def rebuilder(leaves: Mapping[str, Any], spec: pytree.TreeSpec) -> Rebuild:
    """A function from other tensors, in the place of these, to the arguments of a call."""

    def rebuild(given: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        feed = iter(given)
        filled = [next(feed) if isinstance(value, Tensor) else value for value in leaves.values()]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return args, kwargs

    return rebuild


# Forward and the loss function


@dataclass(frozen=True)
class Handed:
    """What forward takes of a call, and what is left for the loss function."""

    forward: Arguments
    left: Arguments
    batch: Any  # all of it, as the user wrote it

    def loss(self, loss_fn: LossFn, output: object) -> Any:
        """What the loss function makes of an output: `criterion(output, target)` of what forward does not take.

        Where forward takes everything, and where the second argument is called `batch`, it is given the batch; a
        function of one argument is given the output alone.
        """
        if len(_parameters(loss_fn)) == 1 and not (self.left.args or self.left.kwargs):
            return loss_fn(output)
        if not (self.left.args or self.left.kwargs) or _wants_batch(loss_fn):
            return loss_fn(output, self.batch)
        if _binds(loss_fn, (output, *self.left.args), self.left.kwargs):
            return loss_fn(output, *self.left.args, **self.left.kwargs)
        return loss_fn(output, *self.left.args, *self.left.kwargs.values())


def hand_out(model: nn.Module, loss_fn: LossFn | None, call: Arguments, batch: Any) -> Handed:
    """Without a loss function forward takes all. With one, forward takes the positions it must have and the names it
    knows, and the loss function the rest."""
    if loss_fn is None:
        return Handed(call, Arguments(), batch)
    parameters = inspect.signature(model.forward).parameters
    kinds = inspect.Parameter
    by_position = [p for p in parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is kinds.empty and p.name not in call.kwargs for p in by_position)
    takes_any = {p.kind for p in parameters.values()}
    if kinds.VAR_POSITIONAL in takes_any:
        required = max(required, len(call.args) - max(len(_parameters(loss_fn)) - 1, 0))
    elif _wants_batch(loss_fn):
        required = len(by_position)
    if kinds.VAR_KEYWORD in takes_any:
        theirs = {p.name for p in _parameters(loss_fn)[1:]} - {p.name for p in parameters.values()}
    else:
        theirs = {name for name in call.kwargs if name not in parameters}
    return Handed(
        Arguments(call.args[:required], {k: v for k, v in call.kwargs.items() if k not in theirs}),
        Arguments(call.args[required:], {k: v for k, v in call.kwargs.items() if k in theirs}),
        batch,
    )


def _parameters(of: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a loss function without a default, the output first."""
    try:
        found = inspect.signature(of.forward if isinstance(of, nn.Module) else of).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in found if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _wants_batch(loss_fn: LossFn) -> bool:
    found = _parameters(loss_fn)
    return len(found) == 2 and found[1].name == "batch"


def _binds(of: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(of.forward if isinstance(of, nn.Module) else of).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        return True  # a builtin that does not tell
    return True


# What comes back


def find_loss(output: object) -> Tensor | None:
    """The scalar to be made smaller: the output itself, its `.loss` or `["loss"]`, or the only scalar of a tuple that
    has a gradient. None where there is none."""
    if isinstance(output, Tensor):
        return output if _is_scalar(output) else None
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is not None:
        return found if isinstance(found, Tensor) and _is_scalar(found) else None
    if not isinstance(output, tuple | list):
        return None
    scalars = [part for part in output if isinstance(part, Tensor) and _is_scalar(part)]
    trained = [scalar for scalar in scalars if scalar.requires_grad] if len(scalars) > 1 else scalars
    if len(trained) > 1:
        raise CaptureError(
            f"the model returns {len(trained)} scalars with a gradient, and any of them could be the loss",
            do="pass loss_fn=lambda output, batch: ..., which says what is minimised, such as output[0] + output[1]",
        )
    return trained[0] if trained else None


def _is_scalar(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and tensor.dtype.is_floating_point and tensor.dim() <= 1


def loss_of(model: nn.Module, batch: object, loss_fn: LossFn | None) -> Tensor:
    """The loss of a batch, by the model as it is."""
    call = arguments_of(batch)
    handed = hand_out(model, loss_fn, call, batch)
    output = model(*handed.forward.args, **handed.forward.kwargs)
    return the_loss(output if loss_fn is None else handed.loss(loss_fn, output))


def the_loss(made: object) -> Tensor:
    """The scalar loss in what a model or a loss function returned, or a refusal that says what was returned instead."""
    loss = find_loss(made)
    if loss is not None:
        return loss.reshape(()) if loss.dim() else loss
    found = made.get("loss") if isinstance(made, Mapping) else getattr(made, "loss", made)
    if found is None or (not isinstance(found, Tensor) and found is made):
        raise CaptureError(
            f"the model returns no scalar loss but {type(made).__name__}",
            do="return a scalar, an object with .loss, or pass loss_fn=criterion",
        )
    what = f"a {tuple(found.shape)} {found.dtype} tensor" if isinstance(found, Tensor) else type(found).__name__
    raise CaptureError(
        f"the model returns {what} as its loss, not a floating-point scalar",
        do="reduce it to one number in the model, or pass loss_fn=criterion",
    )


class NotReturned:
    """Stands for an object of the model's that holds tensors in a way nobody described."""

    def __init__(self, kind: str) -> None:
        self.__dict__["_kind"] = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CaptureError(
            f"the model returned a {self._kind}, whose tensors are not handed on",
            do="return tensors in tuples, dicts or dataclasses, or register the class with torch.utils._pytree",
        )

    def __repr__(self) -> str:
        return f"<a {self._kind} that was not handed on>"


def take_apart(output: object) -> tuple[list[Tensor], Callable[[Sequence[Any]], Any]]:
    """The tensors in what a model returned, and the way back from as many others to the same structure."""
    leaves, spec = pytree.tree_flatten(output)
    parts = [_take_leaf(leaf) for leaf in leaves]

    def rebuilt(given: Sequence[Any]) -> Any:
        feed = iter(given)
        made = [make([next(feed) for _ in tensors]) for tensors, make in parts]
        return pytree.tree_unflatten(made, spec)

    return [tensor for tensors, _ in parts for tensor in tensors], rebuilt


def _take_leaf(leaf: Any) -> tuple[list[Tensor], Callable[[Sequence[Any]], Any]]:
    if isinstance(leaf, Tensor):
        return [leaf], lambda given: given[0]
    if isinstance(leaf, torch.SymInt | torch.SymFloat):
        # A number that the model took out of a tensor, `loss.item()`: there is another in every step.
        dtype = torch.int64 if isinstance(leaf, torch.SymInt) else torch.float64
        number: Any = leaf
        return [torch.scalar_tensor(number, dtype=dtype)], lambda given: given[0].item()
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return _take_fields(leaf)
    kept = NotReturned(type(leaf).__name__) if _holds(leaf, (FakeTensor,)) else leaf
    return [], lambda _: kept


def _take_fields(leaf: Any) -> tuple[list[Tensor], Callable[[Sequence[Any]], Any]]:
    fields = {f.name: getattr(leaf, f.name, None) for f in dataclasses.fields(leaf)}
    tensors, make = take_apart(fields)
    bare = copy.copy(leaf)
    for name in fields:
        object.__setattr__(bare, name, None)

    def rebuilt(given: Sequence[Any]) -> Any:
        made = copy.copy(bare)
        for name, value in make(given).items():
            object.__setattr__(made, name, value)
        return made

    return tensors, rebuilt


def _holds(thing: object, kinds: tuple[type, ...], depth: int = 0) -> bool:
    """Whether an object keeps tensors of these kinds among its attributes."""
    if isinstance(thing, kinds):
        return True
    if depth > 3 or isinstance(thing, bool | int | float | complex | str | bytes | type | torch.dtype | None):
        return False
    if isinstance(thing, Mapping):
        return any(_holds(part, kinds, depth + 1) for part in thing.values())
    if isinstance(thing, tuple | list):
        return any(_holds(part, kinds, depth + 1) for part in thing)
    return any(_holds(part, kinds, depth + 1) for part in getattr(thing, "__dict__", {}).values())
