"""Nodes of a region that do not run again although their region does.

In: a `RunNode` of such a region. Out: `Spared`, which runs it the first time, and from then on has what its kernels
made: the very tensors, where the region keeps them, or something of their form, where nobody needs them.

The one idea: autograd must see the node again, since its backward pass is to run, but the kernels below autograd need
not. So a mode below autograd hands out what they made the first time. Views are made anew, and copies (casts) too,
which are cheaper than what they hold. In place of what nobody needs stands what is no number, so that a mistake would
be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lopsided.executor.instructions import Pass, Remembered, RunNode, Slots

_MADE_AGAIN = ("aten::_to_copy", "aten::clone", "aten::copy_", "aten::detach", "aten::alias")


@dataclass(frozen=True, slots=True)
class _Form:
    """Stands for a tensor that nobody needs: its form."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def filled(self) -> Tensor:
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        floating = self.dtype.is_floating_point or self.dtype.is_complex
        return made.fill_(torch.nan) if floating else made.zero_()


class _Remembering(TorchDispatchMode):
    def __init__(self, into: Remembered, keeps: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.into, self.keeps = into, keeps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if _is_spared(func):
            entries, spec = tree_flatten(made)
            self.into.made.append(([self._entry(entry) for entry in entries], spec))
        return made

    def _entry(self, made: Any) -> Any:
        """Where a kept tensor lies in `kept`, or its form; anything else as it is."""
        if not isinstance(made, Tensor):
            return (made,)
        if not self.keeps:
            return _Form(tuple(made.shape), made.stride(), made.dtype, made.device)
        self.into.kept.append(made.detach())
        return len(self.into.kept) - 1


class _Replaying(TorchDispatchMode):
    def __init__(self, remembered: Remembered) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.remembered = remembered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_spared(func):
            return func(*args, **(kwargs or {}))
        entries, spec = self.remembered.take()
        return tree_unflatten([self._made(entry) for entry in entries], spec)

    def _made(self, entry: Any) -> Any:
        if isinstance(entry, _Form):
            return entry.filled()
        return entry[0] if isinstance(entry, tuple) else self.remembered.kept[entry].detach()


def _is_spared(func: Any) -> bool:
    schema = func._schema
    views = any(one.alias_info is not None for one in (*schema.returns, *schema.arguments))
    return not views and schema.name not in _MADE_AGAIN


@dataclass(slots=True)
class Spared(RunNode):
    """A node of a region that runs once; `keeps` what it made. `trained` are the operands with a gradient."""

    keeps: bool = False
    trained: tuple[bool, ...] = ()

    @property
    def runs_once(self) -> bool:
        return True

    def run(self, slots: Slots, this: Pass) -> None:
        remembered = this.remembered
        if remembered is None:
            RunNode.run(self, slots, this)
        elif this.suffix:
            with _Replaying(remembered):
                RunNode.run(self, slots, this)
        else:
            self._first(slots, this, remembered)

    def _first(self, slots: Slots, this: Pass, remembered: Remembered) -> None:
        """With gradients on, as it will be seen again: which kernels run, and what they make, depends on it."""
        operands = [slots[k] for k in self.operands]
        for k, operand, trained in zip(self.operands, operands, self.trained, strict=True):
            slots[k] = operand.detach().requires_grad_(trained)
        with torch.enable_grad(), _Remembering(remembered, self.keeps):
            RunNode.run(self, slots, this)
        for k, operand in zip(self.operands, operands, strict=True):
            slots[k] = operand
        for k in self.results:
            slots[k] = slots[k].detach()


def spared(node: RunNode, *, keeps: bool, trained: Sequence[bool]) -> Spared:
    """The same node as one that does not run again."""
    about = {field.name: getattr(node, field.name) for field in fields(RunNode)}
    return Spared(**about, keeps=keeps, trained=tuple(trained))
