"""Rows that a mask selects, and numbers read from tensors: captured, or refused with a rewrite that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lopsided
from lopsided.capturing.capture_graph import capture_call
from lopsided.ir.op_call import run_graph
from tests.support.models import assert_captured, refused

Forward = Callable[[Any, Tensor, Tensor], Any]


class Net(nn.Module):
    """Two layers, and a forward given as a function `(module, x, y)`."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin, self.up = nn.Linear(6, 4), nn.Linear(4, 3)
        self.by_hand = [forward]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.by_hand[0](self, x, y)


def batch_of(low: int = -1, high: int = 4) -> dict[str, Tensor]:
    state = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(12, 6, generator=state, dtype=torch.float64),
        "y": torch.randint(low, high, (12,), generator=state),
    }


def loss_of_rows(m: Any, x: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(m.lin(x)[y >= 0], y[y >= 0], label_smoothing=0.1)


def mean_of_rows(m: Any, x: Tensor, y: Tensor) -> Any:
    return m.up(m.lin(x)[y > 0]).sigmoid().mean()


def hard_examples(m: Any, x: Tensor, y: Tensor) -> Any:
    losses = F.cross_entropy(m.lin(x), y.clamp(min=0), reduction="none")
    return losses[losses > 1.2].mean() + losses[y >= 0].topk(3).values.sum()


def placed(m: Any, x: Tensor, y: Tensor) -> Any:
    h = m.lin(x) * 1
    h[y > 1] = m.lin(x[y > 1]).tanh() * 3
    h[(y == 0).nonzero().squeeze(1)] = 0.5
    return h.pow(2).mean()


def elements(m: Any, x: Tensor, y: Tensor) -> Any:
    h, mask = m.lin(x), x[:, :4] > 0
    rows, columns = torch.where(mask)
    return torch.masked_select(h, mask).exp().sum() + h[rows, columns].mean() + h[mask].std()


def singular_elsewhere(m: Any, x: Tensor, y: Tensor) -> Any:
    """On rows that are left out there is no number, forward or backward."""
    h = m.lin(x)
    distance = (m.lin(x[y > 0]) - m.lin(x.flip(0)[y > 0])).pow(2).sum(-1).sqrt()
    return (h[h > 0].log() + h[h > 0].sqrt()).sum() + distance.mean()


def routed(m: Any, x: Tensor, y: Tensor) -> Any:
    out = torch.zeros_like(m.lin(x))
    for k in range(3):
        rows = torch.where(y == k)[0]
        out.index_add_(0, rows, m.lin(x[rows]) * (k + 1))
    return out.pow(2).sum()


def by_numbers(m: Any, x: Tensor, y: Tensor) -> Any:
    count = max((y >= 0).sum().item(), 1)
    total = F.cross_entropy(m.lin(x), y, ignore_index=-1, reduction="sum")
    picked = sum(m.lin(x)[k].sum() for k in y.clamp(min=0).tolist())
    return total / count + picked * x.abs().max().item() + m.lin(x)[: (y > 0).sum().item()].pow(2).sum()


def shapes(m: Any, x: Tensor, y: Tensor) -> Any:
    h, target = m.lin(x)[y > 0], y[y > 0]
    pairs = torch.stack((h, h * 2), 1).view(-1, 2, 2, 2).transpose(1, 2).flatten()
    logs = h.log_softmax(-1)
    nll = -logs[torch.arange(h.shape[0]), target].sum() / h.shape[0] - logs.gather(1, target[:, None]).mean()
    both = torch.cat((h, m.lin(x)[y <= 0]))
    return pairs.pow(2).mean() + nll + (h.T @ h).pow(2).sum() + torch.einsum("nd,nd->d", h, h).sum() + both.std()


def losses(m: Any, x: Tensor, y: Tensor) -> Any:
    mask = y > 0
    a, b, c = m.lin(x)[mask], x[mask][:, :4], m.lin(x.flip(0))[mask]
    rows = F.triplet_margin_loss(a, b, c) + F.cosine_embedding_loss(a, c, (y[mask] > 1) * 2 - 1)
    bce = F.binary_cross_entropy_with_logits(a, torch.zeros_like(a)) + F.binary_cross_entropy(a.sigmoid(), b.sigmoid())
    kl = F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")
    kl = kl + F.gaussian_nll_loss(a, b, c.exp())
    return F.mse_loss(a, b) + F.smooth_l1_loss(a, c, reduction="sum") + rows + bce + kl


def reduced(m: Any, x: Tensor, y: Tensor) -> Any:
    h = m.lin(x)[y > 0]
    over_rows = h.exp().sum(0).log().sum() + h.amax(0).sum() + h.max(0).values.sum() + h.var(0, unbiased=False).sum()
    return over_rows + h.norm() + h.softmax(0).pow(2).sum() + h[h > 0].numel() * h.mean() + h.max(1).values.sum()


FORMS = (
    loss_of_rows,
    mean_of_rows,
    hard_examples,
    placed,
    elements,
    singular_elsewhere,
    routed,
    by_numbers,
    shapes,
    losses,
    reduced,
)


@pytest.mark.parametrize("forward", FORMS, ids=lambda f: f.__name__)
def test_it_computes_what_the_model_does_on_unequal_devices(forward: Forward) -> None:
    model = Net(forward).double()
    assert_captured(model, batch_of())
    assert lopsided.verify(model, batch_of(), shares=(0.5, 0, 0.5), programs=3).passed


def sums(m: Any, x: Tensor, y: Tensor) -> Any:
    """Sums of rows, which there may be none of, where a logarithm would have no gradient."""
    h = m.lin(x[y > 0])
    inner = h.abs().log().sum() + F.cross_entropy(h, y[y > 0].clamp(max=3), reduction="sum")
    return inner + h.sum() / max(h.shape[0], 1) + m.up(m.lin(x)).pow(2).mean()


@pytest.mark.parametrize(("low", "high"), [(-5, 0), (1, 4)], ids=["none", "all"])
def test_masks_that_select_nothing_or_everything(low: int, high: int) -> None:
    model = Net(sums).double()
    assert_captured(model, batch_of(low, high))
    assert lopsided.verify(model, batch_of(low, high), shares=(0.5, 0, 0.5), programs=3).passed


def test_a_mask_of_another_time_is_another_mask() -> None:
    """Masks are equal only if what they are made of was not written to in between, and nothing was drawn."""

    def written(m: Any, x: Tensor, y: Tensor) -> Any:
        h = m.lin(x) * 1
        before = h[h > 0]
        h += 0.1
        return (before * h[h > 0]).sum()

    def drawn(m: Any, x: Tensor, y: Tensor) -> Any:
        return (m.lin(x)[torch.rand_like(x[:, 0]) > 0.5] * m.lin(x)[torch.rand_like(x[:, 0]) > 0.5]).sum()

    for forward in (written, drawn):
        assert "different masks" in refused(Net(forward).double(), batch_of()).what


def test_what_is_returned_beside_the_loss_may_have_any_size() -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        rows = m.lin(x)[y > 0]
        return {"kept": rows, "loss": rows.pow(2).mean(), "all": m.lin(x)}

    assert_captured(Net(forward).double(), batch_of())


def test_numbers_beside_the_loss_are_those_of_every_call() -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
        loss = m.lin(x).pow(2).mean()
        return {"loss": loss, "number": loss.item() * 2, "count": (y > 0).sum().item()}

    model = Net(forward).double()
    captured = capture_call(model, batch_of())
    for low in (-1, 1):
        batch = batch_of(low)
        values = {
            leaf.value.name: batch[leaf.target] if leaf.kind == "input" else model.get_parameter(leaf.target)
            for leaf in captured.whole.leaves
        }
        run_graph(captured.whole, values, torch.device("cpu"))
        made = captured.returned.build([values[name] for name in captured.returned.names])
        assert {name: type(value) for name, value in made.items()} == {"loss": Tensor, "number": float, "count": int}
        assert made == model(**batch)


# What is refused, and what the refusal says to write


def _float(m: Any, x: Tensor, y: Tensor) -> Any:
    return m.lin(x).sum() / float((y > 0).sum())


def _float_rewritten(m: Any, x: Tensor, y: Tensor) -> Any:
    return m.lin(x).sum() / (y > 0).sum()


def _len(m: Any, x: Tensor, y: Tensor) -> Any:
    rows = m.lin(x)[y > 0]
    return rows.sum() / len(rows)


def _len_rewritten(m: Any, x: Tensor, y: Tensor) -> Any:
    rows = m.lin(x)[y > 0]
    return rows.sum() / rows.shape[0]


def _branch(m: Any, x: Tensor, y: Tensor) -> Any:
    mask = y > 0
    return m.lin(x)[mask].mean() if mask.any() else m.lin(x).sum() * 0


def _branch_rewritten(m: Any, x: Tensor, y: Tensor) -> Any:
    mask = y > 0
    return m.lin(x)[mask].sum() / (4 * mask.sum().clamp(min=1))


def _dropout(m: Any, x: Tensor, y: Tensor) -> Any:
    return F.dropout(m.lin(x)[y > 0], 1.0).sum()


def _dropout_rewritten(m: Any, x: Tensor, y: Tensor) -> Any:
    return F.dropout(m.lin(x), 1.0)[y > 0].sum()


def _counted(m: Any, x: Tensor, y: Tensor) -> Any:
    weights = y.clamp(min=0).bincount(minlength=4)[:4]
    return (m.lin(x) * weights).sum()


def _counted_rewritten(m: Any, x: Tensor, y: Tensor) -> Any:
    weights = torch.zeros(4).index_add(0, y.clamp(min=0), torch.ones(y.shape))
    return (m.lin(x) * weights).sum()


def _repeated(m: Any, x: Tensor, y: Tensor) -> Any:
    return m.lin(x).repeat_interleave(torch.full_like(y, 2), dim=0).pow(2).sum()


def _repeated_rewritten(m: Any, x: Tensor, y: Tensor) -> Any:
    return m.lin(x).repeat_interleave(torch.full_like(y, 2), dim=0, output_size=24).pow(2).sum()


def _flipped(m: Any, x: Tensor, y: Tensor) -> Any:
    return (m.lin(x)[y > 0].flip(0) ** 2).mean()


def _flipped_rewritten(m: Any, x: Tensor, y: Tensor) -> Any:
    mask = (y > 0).unsqueeze(1)
    return (m.lin(x) ** 2 * mask).sum() / (4 * mask.sum().clamp(min=1))


@pytest.mark.parametrize(
    ("forward", "rewritten", "do"),
    [
        (_float, _float_rewritten, "divides as by a number"),
        (_len, _len_rewritten, "rows.shape[0]"),
        (_branch, _branch_rewritten, "mask.sum().clamp(min=1)"),
        (_dropout, _dropout_rewritten, "before the mask selects"),
        (_counted, _counted_rewritten, "index_add(0, x, torch.ones(x.shape))"),
        (_repeated, _repeated_rewritten, "output_size="),
        (_flipped, _flipped_rewritten, "(f(x) * mask).sum() / mask.sum().clamp(min=1)"),
    ],
    ids=["float", "len", "branch", "dropout", "bincount", "repeat_interleave", "flip"],
)
def test_a_refusal_names_the_line_and_a_rewrite_that_works(forward: Forward, rewritten: Forward, do: str) -> None:
    error = refused(Net(forward).double(), batch_of())
    assert do in error.do
    assert "test_selections.py" in error.where
    model = Net(rewritten).double()
    assert_captured(model, batch_of())
    wanted = Net(forward).double()(**batch_of())
    torch.testing.assert_close(model(**batch_of()), wanted)
