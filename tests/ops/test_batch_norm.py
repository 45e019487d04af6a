"""The parts that a batch norm over several devices is made of have the gradients they should."""

from __future__ import annotations

import pytest
import torch

from lopsided.ops import norms


def vectors(channels: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Mean, variance, weight and bias."""
    made = [torch.randn(channels, dtype=dtype) for _ in range(4)]
    made[1] = made[1].abs() + 0.5
    return [one.requires_grad_() for one in made]


@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (6, 4), (3, 2, 7)])
def test_gradients_are_those_of_differences(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    given = vectors(shape[1], torch.float64)
    assert torch.autograd.gradcheck(norms._Spread.apply, (x, given[0]))
    assert torch.autograd.gradcheck(lambda *tensors: norms._Normalised.apply(*tensors, 1e-5), (x, *given))


def test_no_rows_give_no_sums() -> None:
    x = torch.randn(0, 3, 2, 2, requires_grad=True)
    mean, variance, _, _ = vectors(3, torch.float32)
    y = norms._normalised(x, mean, variance, None, None, 1e-5)
    spread = norms._Spread.apply(x, mean)
    (y.sum() + spread.sum()).backward()
    assert y.shape == x.shape
    assert torch.equal(spread, torch.zeros(3))
    assert mean.grad is not None
    assert torch.equal(mean.grad, torch.zeros(3))


def test_a_large_mean_costs_no_digits() -> None:
    """A gradient of the scale that took sums of products apart would be off by the square of the mean."""
    torch.manual_seed(0)
    x = 1e4 + torch.randn(64, 2, 8, 8)
    gradient = torch.randn_like(x)
    mean, variance = x.double().mean([0, 2, 3]), x.double().var([0, 2, 3], correction=0)
    wanted = (gradient.double() * (x.double() - mean.reshape(1, -1, 1, 1))).sum([0, 2, 3]) / (variance + 1e-5).sqrt()
    weight = torch.ones(2, requires_grad=True)
    y = norms._normalised(x, mean.float(), variance.float(), weight, None, 1e-5)
    y.backward(gradient)
    assert weight.grad is not None
    assert torch.allclose(weight.grad.double(), wanted, rtol=1e-2, atol=0.5)
