"""Models that meet values at the edge: `verify` runs on them, and devices compute what one computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import lopsided
from tests.support.models import ByHand, example


def _attention(m: nn.Module, x: Tensor) -> Tensor:
    q = m.lin(x).reshape(1, 1, len(x), -1)  # type: ignore[operator]
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril(-1)  # the first row may see nothing
    return F.scaled_dot_product_attention(q, q, q, attn_mask=seen, dropout_p=0.3).pow(2).mean()


def _fractions(m: nn.Module, x: Tensor) -> Tensor:
    """Whole numbers become float32, whatever the model is in; `linear` wants one dtype."""
    h = m.lin(x)  # type: ignore[operator]
    places = (torch.arange(h.shape[1]) * 0.1).expand(h.shape)
    return F.linear(places, m.lin.weight[:, : h.shape[1]].T).float().pow(2).mean() + h.mean()  # type: ignore[index, union-attr]


def _counts(m: nn.Module, x: Tensor) -> Tensor:
    count = x.argmax(-1) * 0.1
    return (m.lin(x).float() * count[:, None]).pow(2).mean() * count.mean()  # type: ignore[operator]


def _masked_log_probabilities(m: nn.Module, x: Tensor) -> Tensor:
    logits = m.lin(x)  # type: ignore[operator]
    allowed = torch.arange(logits.shape[1]) % 2 == 0
    log_p = logits.masked_fill(~allowed, float("-inf")).log_softmax(-1)
    return -log_p.gather(1, (torch.arange(len(x)) % 2 * 2)[:, None]).mean()


def _nearest(m: nn.Module, x: Tensor) -> Tensor:
    wide = m.lin(x).repeat(1, 3)[:, None, :16]  # type: ignore[operator]
    up = F.interpolate(wide, scale_factor=2.05, mode="nearest")
    return (up * torch.arange(up.shape[-1])).pow(2).mean()


def _constant_rows(m: nn.Module, x: Tensor) -> Tensor:
    h = m.lin(x)  # type: ignore[operator]
    return ((h * 0).std(1) + h.std(1)).sum()


def _unpooled(m: nn.Module, x: Tensor) -> Tensor:
    plane = m.lin(x).repeat(1, 2)[None, None, :, :7]  # type: ignore[operator]
    pooled, places = F.max_pool2d(plane, 3, 2, return_indices=True)
    return F.max_unpool2d(pooled, places, 3, 2, output_size=plane.shape).pow(2).mean()


def _crossing(m: nn.Module, x: Tensor) -> Tensor:
    h = m.lin(x).repeat(3, 4)[:6, :].reshape(6, -1)[:, :12]  # type: ignore[operator]
    return (h.reshape(6, 3, 4).reshape(9, 8) * torch.arange(8)).pow(2).mean()


@pytest.mark.parametrize(
    "forward",
    [
        _attention,
        _fractions,
        _counts,
        _masked_log_probabilities,
        _nearest,
        _constant_rows,
        _unpooled,
        _crossing,
    ],
)
def test_programs_at_the_edge_are_those_of_one_device(forward: Callable[..., Tensor]) -> None:
    found = lopsided.verify(ByHand(forward), {"x": example()}, programs=40)
    assert found.passed, f"capture {found.capture_error}; {found.worst.where}: {found.worst.error}"


def test_the_default_dtype_stays_as_it_was() -> None:
    lopsided.verify(ByHand(_fractions), {"x": example()}, programs=1)
    assert torch.get_default_dtype() == torch.float32


def _normed() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return torch.nn.utils.weight_norm(nn.Linear(6, 6))


def _pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(6, 6), "weight", amount=0.3)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("layer", [_normed, _pruned])
def test_a_module_that_keeps_a_computed_tensor_is_verified(layer: Callable[[], nn.Module]) -> None:
    """Old weight norm and pruning leave `weight` on the module, which `copy.deepcopy` refuses."""
    model = ByHand(lambda m, x: m.parts[0](m.lin(x)).pow(2).mean(), layer())
    found = lopsided.verify(model, {"x": example()}, programs=10)
    assert found.passed, f"capture {found.capture_error}; {found.worst.where}: {found.worst.error}"
