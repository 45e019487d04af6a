"""Samples made for every op that torch tags as pointwise: tensors for tensor arguments, numbers for the rest.

Backward kernels are left out (autograd calls them, models do not), and so are ops that refuse the data below.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample

_RANGES = ((0.15, 0.9), (1.1, 2.0))
_SHAPES = ((5, 4), (4,), (5, 1))


def samples(draw: Draw) -> Iterator[Sample]:
    for name in sorted(dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        for overload in packet._overload_names if isinstance(packet, OpOverloadPacket) else ():
            op = getattr(packet, overload)
            if _is_sampled(op) and (found := _first_that_runs(op, draw)) is not None:
                yield found


def _is_sampled(op: OpOverload) -> bool:
    return (
        torch.Tag.pointwise in op.tags
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op._schema.is_mutable
        and "backward" not in str(op)
        and "_foreach" not in str(op)
    )


def _first_that_runs(op: OpOverload, draw: Draw) -> Sample | None:
    for low, high in _RANGES:
        for kind in ("trained", "real", "whole", "truth"):
            example = _example(op, draw, low, high, kind)
            if example is not None and _runs(op, example):
                return example
    return None


def _example(op: OpOverload, draw: Draw, low: float, high: float, kind: str) -> Sample | None:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    tensors = 0
    for argument in op._schema.arguments:
        value: Any
        text = str(argument.type)
        if text == "Tensor":
            shape = _SHAPES[min(tensors, len(_SHAPES) - 1)]
            value = _tensor(draw, shape, low, high, kind)
            tensors += 1
        elif argument.has_default_value():
            continue
        elif text == "number":
            value = 2 if kind in ("whole", "truth") else 0.5
        elif text in ("float", "int", "bool"):
            value = {"float": 0.5, "int": 1, "bool": False}[text]
        elif text.startswith("Optional"):
            value = None
        else:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Sample(str(op), tuple(args), kwargs)


def _tensor(draw: Draw, shape: tuple[int, ...], low: float, high: float, kind: str) -> Tensor:
    if kind == "whole":
        return draw.below(9, *shape, start=1)
    return draw.truths(*shape) if kind == "truth" else draw.real(*shape, low=low, high=high, grad=kind == "trained")


def _runs(op: OpOverload, example: Sample) -> bool:
    try:
        out = op(*example.args, **example.kwargs)
        if not isinstance(out, Tensor) or (out.dtype.is_floating_point and not bool(out.isfinite().all())):
            return False
        if out.requires_grad:
            trained = [t for t in example.args if isinstance(t, Tensor)]
            torch.autograd.grad(out, trained, torch.ones_like(out), allow_unused=True)
    except (RuntimeError, IndexError, ValueError, TypeError):  # no kernel for these is a RuntimeError, too
        return False
    return True
