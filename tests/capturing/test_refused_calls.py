"""Calls and modules that no graph of pure ops can say are refused: what, where, and what to write in their place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lopsided
from tests.support import commands
from tests.support.models import ByHand, Forward, assert_captured, example, refused


def _places(x: Tensor) -> Tensor:
    return x.argsort(-1)


def _istft(m: nn.Module, x: Tensor) -> Tensor:
    window = torch.hann_window(8)
    signal = m.lin(x).repeat(1, 6)  # type: ignore[operator]
    spectrum = torch.stft(signal, 8, 4, window=window, return_complex=True)
    return torch.istft(spectrum, 8, 4, window=window).pow(2).mean()


def _cond(m: nn.Module, x: Tensor) -> Tensor:
    h = m.lin(x)  # type: ignore[operator]
    return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,)).mean()  # type: ignore[no-any-return]


def _jvp(m: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda a: m.lin(a).tanh(), (x,), (torch.ones_like(x),))[1].mean()  # type: ignore[no-any-return, operator]


def _embedding(m: nn.Module, x: Tensor) -> Tensor:
    return m.parts[0](_places(x)).pow(2).mean()  # type: ignore[index, no-any-return, operator]


def _normed(m: nn.Module, x: Tensor) -> Tensor:
    return m.parts[0](m.lin(x)).pow(2).mean()  # type: ignore[index, no-any-return, operator]


@pytest.mark.parametrize(
    ("forward", "parts", "what", "do"),
    [
        (_embedding, [nn.Embedding(6, 3, sparse=True)], "sparse gradient", "sparse=False"),
        (_embedding, [nn.Embedding(6, 3, max_norm=1.0)], "max_norm", "leave max_norm out"),
        (_istft, [], "torch.istft", "torch.fft.irfft"),
        (_cond, [], "torch.cond", "torch.where"),
        (_jvp, [], "torch.func.jvp", "outside of the model"),
        (_normed, [nn.BatchNorm1d(6, momentum=None)], "momentum=None", "give it a momentum"),
    ],
    ids=["sparse", "max_norm", "istft", "cond", "jvp", "cumulative batch norm"],
)
def test_it_is_refused_in_words(forward: Forward, parts: list[nn.Module], what: str, do: str) -> None:
    error = refused(ByHand(forward, *parts), {"x": example()})
    assert what in error.what
    assert do in error.do
    assert "test_refused_calls.py" in error.where or "models.py" in error.where or "parts.0" in error.where


def test_a_batch_norm_that_is_evaluated_counts_nothing() -> None:
    model = ByHand(_normed, nn.BatchNorm1d(6, momentum=None)).eval()
    assert model.parts[0].momentum is None
    assert_captured(model, {"x": example()})


def test_the_command_line_says_so_in_a_few_lines(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Bag(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(9, 4, sparse=True)\n"
        "    def forward(self, x):\n"
        "        return self.table(x).pow(2).mean()\n"
        "def make():\n"
        "    return Bag(), {'x': torch.arange(6).reshape(2, 3)}\n"
    )
    done = commands.lopsided("verify", f"{tmp_path / 'mine.py'}:make")
    assert done.returncode == 2
    assert "sparse=False" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_parameter_that_holds_tensors_is_refused() -> None:
    """Such as the quantised weights of other libraries, which are not traced before dispatch."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 3), torch.ones(2, 3)))
    with pytest.raises(lopsided.LopsidedError, match="the parameter weight is a TwoTensor"):
        lopsided.capture(model, torch.ones(4, 3), loss_fn=torch.sum)
