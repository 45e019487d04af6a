"""Rows that are sorted by group, each times the matrix of its group: what a mixture of experts is made of.

In: rows, a stack of matrices, and where each group ends. Out: the products; rows behind the last end are zero.

torch's own `aten._grouped_mm` takes no float64, and wants rows of whole multiples of 16 bytes. `transformers` has an op
beside it for where that cannot run, which is what export finds in a model of float32, and which only exists where
`transformers` was imported. This one takes its place in graphs: it takes every dtype, and needs no other library.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUPED_MM = "lopsided.grouped_mm.default"
_SCHEMA = "(Tensor self, Tensor mat2, Tensor offs) -> Tensor"  # the names of aten._grouped_mm


def _bounds(offs: Tensor) -> list[tuple[int, int]]:
    """Where every group begins and ends. The host waits for the device once."""
    ends = offs.tolist()
    return [*zip([0, *ends], ends, strict=False)]


def _forward(x: Tensor, stack: Tensor, offs: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], stack.shape[2])
    for matrix, (begin, end) in zip(stack, _bounds(offs), strict=True):
        torch.mm(x[begin:end], matrix, out=out[begin:end])
    return out


def _backward(x: Tensor, stack: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    of_x, of_stack = torch.zeros_like(x), torch.zeros_like(stack)
    for group, (begin, end) in enumerate(_bounds(offs)):
        torch.mm(grad[begin:end], stack[group].T, out=of_x[begin:end])
        of_stack[group] = x[begin:end].T @ grad[begin:end]
    return of_x, of_stack


grouped_mm = torch.library.custom_op("lopsided::grouped_mm", _forward, mutates_args=(), schema=_SCHEMA)
_gradients = torch.library.custom_op(
    "lopsided::grouped_mm_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor self, Tensor mat2, Tensor offs, Tensor grad) -> (Tensor, Tensor)",
)


@grouped_mm.register_fake
def _(x: Tensor, stack: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], stack.shape[2])


@_gradients.register_fake
def _(x: Tensor, stack: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(stack)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _of_operands(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, stack, offs = ctx.saved_tensors  # type: ignore[attr-defined]
    of_x, of_stack = _gradients(x, stack, offs, grad)
    return of_x, of_stack, None


grouped_mm.register_autograd(_of_operands, setup_context=_keep)
