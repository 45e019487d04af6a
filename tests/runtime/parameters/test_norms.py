"""The norm of a gradient in pieces is the norm of the whole, and clipping does what one device would do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import InputError, TrainingError
from lopsided.ir.placement import I, Placement, S
from lopsided.runtime.parameters.norms import clip_grad_norm_, grad_norm
from lopsided.runtime.parameters.pieces import Piece

PLACED: dict[str, tuple[tuple[int, ...], Placement, tuple[int, ...]]] = {
    "whole": ((5, 3), I, ()),
    "rows": ((7, 4), S(0), (4, 3, 0)),
    "also_whole": ((3,), I, ()),
    "columns": ((2, 12), S(1, outer=2, unit=2), (0, 2, 1)),
    "frozen": ((6,), S(0), (2, 2, 2)),
    "scalar": ((), I, ()),
}


class Model(nn.Module):
    """Gradients drawn from a seed; those of a process, if it is one of several."""

    def __init__(self, place: int | None, dtype: torch.dtype, change: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.pieces = {}
        for name, (shape, at, counts) in PLACED.items():
            gradient = change(name, torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype)
            piece = Piece(name, (), shape, dtype, at, counts, rank=place or 0)
            if place is not None:
                self.pieces[name] = piece
                gradient = piece.take(gradient)
            parameter = nn.Parameter(torch.zeros_like(gradient, memory_format=torch.contiguous_format))
            if name != "frozen":
                parameter.grad = gradient.clone()
            self.register_parameter(name, parameter)
        self.tied = self.rows

    def together(self, call: str) -> None:
        assert call in ("clip_grad_norm_", "grad_norm")

    def alone(self) -> Model:
        self.world = SimpleNamespace(rank=0, size=1, ranks=(0,), place=0, device=torch.device("cpu"))
        self.communicator = _Wire()
        return self


class _Wire:
    """The default group, or nobody."""

    def __init__(self, group: Any = None) -> None:
        self.group, self.used = group, 0

    def all_reduce(self, flat: Tensor, *, what: str = "") -> Any:
        return self._reduce(flat, dist.ReduceOp.SUM)

    def maximum(self, flat: Tensor, *, what: str = "") -> Any:
        return self._reduce(flat, dist.ReduceOp.MAX)

    def _reduce(self, flat: Tensor, op: Any) -> Any:
        self.used += 1
        assert flat.shape == (1,)
        if dist.is_initialized():
            dist.all_reduce(flat, op, group=self.group)
        return SimpleNamespace(wait=lambda: flat)


def plain(name: str, gradient: Tensor) -> Tensor:
    return gradient


def with_nan(name: str, gradient: Tensor) -> Tensor:
    return gradient.index_fill(0, torch.tensor([5]), math.nan) if name == "rows" else gradient


def with_infinity(name: str, gradient: Tensor) -> Tensor:
    return gradient * math.inf if name == "also_whole" else gradient


CHANGES = {"plain": plain, "nan": with_nan, "inf": with_infinity}


def _clipped(dtype: torch.dtype, change: str, order: float, max_norm: float) -> tuple[Tensor, dict[str, Tensor], int]:
    """In a world of four, of which the last is a bystander."""
    rank, ranks = dist.get_rank(), (0, 1, 2)
    group = dist.new_group(list(ranks))
    model = Model(rank if rank in ranks else -1, dtype, CHANGES[change])
    model.world = SimpleNamespace(
        rank=rank, size=4, ranks=ranks, place=rank if rank in ranks else -1, device=torch.device("cpu")
    )
    model.communicator = _Wire(group) if rank in ranks else None
    norm = clip_grad_norm_(model, max_norm, order)
    used = model.communicator.used if model.communicator is not None else 0
    return norm, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, used


@pytest.mark.parametrize("order", [2.0, 1.0, 3.5, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_in_processes_equals_one_device(
    worker_pools: Callable[[int], WorkerPool], order: float, max_norm: float
) -> None:
    one = Model(None, torch.float64, plain)
    expected = nn.utils.clip_grad_norm_(one.parameters(), max_norm, order)
    answers = worker_pools(4).run(_clipped, torch.float64, "plain", order, max_norm)
    assert [used for *_, used in answers] == [1, 1, 1, 0]
    for norm, _, _ in answers:
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for name, (shape, at, counts) in PLACED.items():
        parts = [grads.get(name) for _, grads, _ in answers[:3]]
        if name == "frozen":
            assert parts == [None] * 3
        else:
            whole = Piece(name, (), shape, torch.float64, at, counts).join(parts)
            torch.testing.assert_close(whole, one.get_parameter(name).grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("change", ["nan", "inf"])
def test_what_is_not_finite_reaches_every_process(
    worker_pools: Callable[[int], WorkerPool], change: str, order: float
) -> None:
    for norm, _, _ in worker_pools(4).run(_clipped, torch.float32, change, order, 1.0):
        assert norm.isnan() if change == "nan" else norm.isinf()


class Alone(Model):
    """One process that holds everything."""

    def __init__(self, dtype: torch.dtype, change: Callable[[str, Tensor], Tensor] = plain) -> None:
        super().__init__(None, dtype, change)
        self.pieces = {name: Piece(name, (), shape, dtype, I) for name, (shape, _, _) in PLACED.items()}
        self.alone()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_is_added_up_in_single(dtype: torch.dtype) -> None:
    model = Alone(dtype)
    exact = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]).norm()
    norm = grad_norm(model)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
    clip_grad_norm_(model, 0.25)
    assert all(p.grad.dtype == dtype for p in model.parameters() if p.grad is not None)
    torch.testing.assert_close(grad_norm(model), torch.full_like(norm, 0.25), rtol=1e-2, atol=0)


def test_half_precision_and_double_side_by_side() -> None:
    model = Alone(torch.float32)
    model.rows.data = model.rows.data.bfloat16()
    model.rows.grad = torch.ones(7, 4, dtype=torch.bfloat16)
    one = copy.deepcopy({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    exact = torch.cat([grad.double().flatten() for grad in one.values()]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 1.0).double(), exact, rtol=1e-6, atol=0)


def test_without_gradients_the_norm_is_zero() -> None:
    model = Alone(torch.float32)
    model.zero_grad()
    assert clip_grad_norm_(model, 1.0) == 0
    assert grad_norm(model, math.inf) == 0


def test_an_error_names_what_is_not_finite() -> None:
    model = Alone(torch.float32, with_nan)
    with pytest.raises(TrainingError, match="the norm of the gradient is nan") as raised:
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert raised.value.where == "on this process: rows"
    assert torch.isfinite(model.whole.grad).all()


def test_no_norm_of_order_zero() -> None:
    with pytest.raises(InputError, match="no norm of order 0"):
        grad_norm(Alone(torch.float32), 0)
