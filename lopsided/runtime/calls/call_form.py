"""A call of the parallel model, read: which tensors it gives, what else, and so which program it needs.

In: the arguments of a call, in any mixture of positions and names. Out: `Given`, its tensors by the names they have in
the graph; `Signature`, which calls of the same program have in common. Everything that is not a tensor is part of the
signature, wherever in the batch it stands: a captured graph has it frozen. A number that turns out to vary becomes an
input, if the model can take it as a tensor.
"""

from __future__ import annotations

import inspect
import types
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lopsided.capturing.call import Arguments, LossFn, Rebuild, arguments_of, hand_out, named_leaves, rebuilder
from lopsided.errors import BatchError
from lopsided.runtime.parameters.replicas import some_of

_MARK = "_lopsided_batch"
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
# How deep an object among the arguments is looked through.
_DEEPEST = 3


@dataclass(frozen=True)
class HandedOut:
    """A batch that a sharded loader has given: which, and how many rows it has in all; 0 where it was given whole."""

    which: str = ""
    rows: int = 0

    def __str__(self) -> str:
        return f", {self.which}" if self.which else ""

    def mark(self, batch: object) -> None:
        """Tensors of a batch know which it is: a loop that fetches ahead is handed others before it uses this one."""
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, Tensor):
                # Plain values: a tensor with these can be saved.
                setattr(leaf, _MARK, (self.which, self.rows))

    def of(self, tensors: Iterable[Tensor]) -> HandedOut:
        """The batch that these tensors say they are of; this one, the last, where they do not know."""
        marks = {mark for tensor in tensors if (mark := getattr(tensor, _MARK, None)) is not None}
        return HandedOut(*marks.pop()) if len(marks) == 1 else self


def told_of_samples(indices: Sequence[Any]) -> str:
    """Samplers of a stranger may draw by random numbers of their own."""
    numbers = [one for one in indices if isinstance(one, int | np.integer)]
    return _holding(np.asarray(numbers, dtype=np.int64).tobytes()) if len(numbers) == len(indices) else ""


def told_of_batch(batch: object) -> str:
    """Of whole numbers alone: labels and words say which samples these are, however each process augments its rows."""
    found = [one for one in pytree.tree_leaves(batch) if isinstance(one, Tensor) and one.is_cpu and one.numel()]
    whole = [some_of(one) for one in found if not (one.is_floating_point() or one.is_complex())]
    return _holding(torch.cat([one.reshape(-1).long() for one in whole]).numpy().tobytes()) if whole else ""


def _holding(numbers: bytes) -> str:
    """What all processes must have drawn alike: each keeps its rows alone, and would not see that they differ."""
    return f" holding {zlib.crc32(numbers):08x}"


@dataclass(frozen=True)
class Given:
    """What a call gives."""

    batch: Any  # as it was given to parallelize, or `Arguments`
    tensors: dict[str, Tensor]
    others: tuple[tuple[str, object], ...]  # plain values by name; of an object its type and what is plain in it
    rebuild: Rebuild

    def inputs_of(self, signature: Signature) -> tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]:
        """The inputs of a signature, with tensors that it does not know added as they are."""
        known = {name: (name, shape, dtype, grad) for name, shape, dtype, grad in signature.inputs}
        return tuple(
            known.get(name, (name, tuple(tensor.shape), tensor.dtype, False)) for name, tensor in self.tensors.items()
        )


@dataclass(frozen=True)
class Signature:
    """What a captured graph depends on: `inputs` are names, shapes of the whole, dtypes, and whether they have a
    gradient; `mode` says of every module whether it is in training."""

    mode: bytes
    autocast: str
    inputs: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]
    others: tuple[tuple[str, object], ...]

    def varying_numbers(self, other: Signature) -> set[str]:
        """The numbers that alone make two signatures differ; none where something else does."""
        ours, theirs = dict(self.others), dict(other.others)
        alike = (self.mode, self.autocast, self.inputs) == (other.mode, other.autocast, other.inputs)
        if not alike or ours.keys() != theirs.keys():
            return set()
        differing = {name for name in ours if repr(ours[name]) != repr(theirs[name])}
        return (
            differing if all(isinstance(ours[n], float) and isinstance(theirs[n], float) for n in differing) else set()
        )

    def __str__(self) -> str:
        inputs = [f"{name} {list(shape)} {dtype}" for name, shape, dtype, _ in self.inputs]
        return ", ".join([*inputs, *(f"{name}={value!r}" for name, value in self.others)])


class CallForm:
    """How a model is called: as its first batch was given, whatever a call does by position or by name."""

    def __init__(self, model: nn.Module, batch: object, loss_fn: LossFn | None) -> None:
        self._loss_fn, self._is_mapping = loss_fn, isinstance(batch, Mapping)
        self._forward = model.forward
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
        self._order = [*names, *(key for key in batch if key not in names)] if isinstance(batch, Mapping) else names
        self.varying: set[str] = set()  # numbers that are inputs
        self._call = hand_out(model, loss_fn, arguments_of(batch), batch)
        self._model_type = type(model).__name__

    @property
    def has_left(self) -> bool:
        """Whether the loss function takes entries of the batch that forward does not."""
        return self._call.left != Arguments()

    def is_forward_alone(self, given: Given) -> bool:
        """Whether a call gives what forward takes and nothing for the loss function."""
        call = arguments_of(given.batch)
        planned = self._call.forward
        return self.has_left and len(call.args) == len(planned.args) and {*call.kwargs} <= {*planned.kwargs}

    def with_left(self, given: Given, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
        """The whole call, from one of forward alone and what the loss function was given."""
        call = arguments_of(given.batch)
        if not self._is_mapping:
            return self.read((*call.args, *args), {**call.kwargs, **kwargs})
        names = [name for name in self._call.left.kwargs if name not in kwargs]
        return self.read(call.args, {**call.kwargs, **dict(zip(names, args, strict=False)), **kwargs})

    def read_batch(self, batch: object) -> Given:
        """A batch as a call, with what is known by now to vary."""
        call = arguments_of(batch)
        return self.read(call.args, call.kwargs)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
        batch = self._in_form(args, kwargs)
        leaves, spec = named_leaves(batch)
        changed = {name: value.item() for name, value in leaves.items() if isinstance(value, np.generic)}
        numbers = [name for name in self.varying if isinstance(changed.get(name, leaves.get(name)), float)]
        changed |= {name: torch.tensor(changed.get(name, leaves[name]), dtype=torch.float64) for name in numbers}
        if changed:
            leaves |= changed
            batch = Arguments(*pytree.tree_unflatten(list(leaves.values()), spec))
        tensors = {name: value for name, value in leaves.items() if isinstance(value, Tensor)}
        rebuild = rebuilder(leaves, spec)
        others = tuple((name, _plain(value)) for name, value in leaves.items() if not isinstance(value, Tensor))
        return Given(batch, tensors, others, rebuild)

    def _in_form(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._is_mapping:
            twice = [name for name in self._order[: len(args)] if name in kwargs]
            if twice or len(args) > len(self._order):
                raise BatchError(
                    f"the call gives {twice[0]} twice" if twice else f"the call gives {len(args)} values by position",
                    where=f"a call of {self._model_type}, whose entries are {', '.join(self._order)}",
                    do="give every entry once, in the order of forward or by name",
                )
            return dict(zip(self._order, args, strict=False)) | dict(kwargs)
        filled, left = list(args), dict(kwargs)
        while len(filled) < len(self._order) and self._order[len(filled)] in left:
            filled.append(left.pop(self._order[len(filled)]))
        return Arguments(tuple(filled), left) if left else tuple(filled)

    def complaint(self, given: Given, planned: Mapping[str, Any]) -> str:
        """What is missing in a call that forward can not take, or what it does not know; "" where it can."""
        call = arguments_of(given.batch)
        handed = hand_out(self._forward.__self__, self._loss_fn, call, given.batch).forward  # type: ignore[attr-defined]
        try:
            inspect.signature(self._forward).bind(*handed.args, **handed.kwargs)
        except TypeError as error:
            missing = [name for name in planned if name not in given.tensors]
            unknown = [name for name in given.tensors if name not in planned]
            return (
                f"no {missing[0]!r}" if missing else f"{unknown[0]!r}, which was not planned" if unknown else str(error)
            )
        return ""


def _plain(value: object, depth: int = 0) -> object:
    """What of a value can be told from another's, equal on all ranks that give the same."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        code, cells = getattr(value, "__code__", None), getattr(value, "__closure__", None) or ()
        kept = [_plain(cell.cell_contents, depth + 1) for cell in cells if depth < _DEEPEST]
        return f"{value.__module__}.{value.__qualname__}:{code.co_firstlineno if code is not None else ''}{kept}"
    if depth == _DEEPEST:
        return type(value).__qualname__
    if isinstance(value, tuple | list | set | frozenset):
        inner = tuple(_plain(part, depth + 1) for part in value)
    elif isinstance(value, Mapping):
        inner = tuple((str(key), _plain(part, depth + 1)) for key, part in value.items())
    else:
        held = getattr(value, "__dict__", {})
        inner = tuple((key, _plain(part, depth + 1)) for key, part in held.items() if not key.startswith("__"))
    return (type(value).__qualname__, *inner) if inner else type(value).__qualname__
