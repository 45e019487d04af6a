"""Values at the edge: what ordinary numbers never show, and models meet every day.

In: a `Call` and ordinary operands for it. Out: sets of operands by name, each with one kind of edge in it. Masked
scores are -inf, a row may be masked altogether, a padding row is zeros, a constant feature has no spread, an index may
lie outside of the piece a device holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lopsided.ir.notation import Rule
from lopsided.ir.placement import I
from lopsided.ops.op import Call
from lopsided.ops.trial import try_rule

_Edit = Callable[[Tensor], Tensor]


def edge_operands(call: Call, operands: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """The operands with each kind of edge put into them, where the op on one device accepts that."""
    found = {}
    for name, edit in _EDGES.items():
        if any(call.node.op.startswith(op) for op in _REFUSED.get(name, ())):
            continue
        edited = [edit(tensor) for tensor in operands]
        if any(not torch.equal(a, b) for a, b in zip(edited, operands, strict=True)) and _runs(call, edited):
            found[name] = edited
    return found


def _runs(call: Call, operands: Sequence[Tensor]) -> bool:
    """Whether one device can run the call on these, forward and backward."""
    try_whole = Rule((I,) * len(operands), (I,) * len(call.node.results))
    return try_rule(call, operands, try_whole, (1.0,), edge=True) == 0


def _of_reals(edit: _Edit) -> _Edit:
    return lambda tensor: edit(tensor) if tensor.dtype.is_floating_point and tensor.numel() else tensor


def _of_indices(edit: _Edit) -> _Edit:
    def edited(tensor: Tensor) -> Tensor:
        whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)
        return edit(tensor) if whole and tensor.numel() else tensor

    return edited


def _equal_in_rows(x: Tensor) -> Tensor:
    """Every row one number, of which a third is not exact: a mean of it rounds."""
    return x.select(-1, 0).unsqueeze(-1).expand(x.shape).clone() if x.dim() else x


def _equal_rows(x: Tensor) -> Tensor:
    return x.select(0, 0).unsqueeze(0).expand(x.shape).clone() if x.dim() else x


def _masked(x: Tensor) -> Tensor:
    """Every second element -inf, and of the first row and the first column all."""
    masked = x.clone().reshape(-1)
    masked[::2] = -math.inf
    masked = masked.reshape(x.shape)
    if x.dim():
        masked[0] = -math.inf
        masked[..., 0] = -math.inf
    return masked


def _unseen(x: Tensor) -> Tensor:
    """The first row and the first column of truths false."""
    if x.dtype != torch.bool or not x.dim() or not x.numel():
        return x
    unseen = x.clone()
    unseen[0], unseen[..., 0] = False, False
    if x.dim() > 1:
        unseen[..., 0, :] = False
    return unseen


_EDGES: dict[str, _Edit] = {
    "zeros": _of_reals(torch.zeros_like),
    "rows of one number": _of_reals(_equal_in_rows),
    "equal rows": _of_reals(_equal_rows),
    "masked": _of_reals(_masked),
    "nothing is seen": _unseen,
    "the first index": _of_indices(lambda x: torch.full_like(x, int(x.min()))),
    "the last index": _of_indices(lambda x: torch.full_like(x, int(x.max()))),
}
# What an op cannot be given, though its kernel does not say so.
_REFUSED: dict[str, tuple[str, ...]] = {
    "masked": ("aten.searchsorted", "aten.bucketize"),  # wants sorted numbers
    # Matrices that cannot be inverted: whether a kernel notices is a matter of its rounding.
    "rows of one number": ("aten.linalg_", "aten.inverse", "aten.cholesky", "aten.det", "aten.logdet", "aten.slogdet"),
    "the first index": ("aten._grouped_mm",),  # wants offsets up to the last row, and leaves others as memory was
}
