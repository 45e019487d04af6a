"""Models with complex numbers, as processes can build them: `tests.support.complex_models:operator`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FourierOperator(nn.Module):
    """A layer of a Fourier neural operator: its weights are complex, and it writes into complex zeros."""

    def __init__(self, modes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.modes = modes
        self.lift = nn.Linear(2, 4)
        self.weight = nn.Parameter(torch.randn(4, 4, modes, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x).transpose(1, 2)
        spectrum = torch.fft.rfft(h)
        out = torch.zeros(len(x), 4, spectrum.shape[-1], dtype=torch.cfloat)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", spectrum[:, :, : self.modes], self.weight)
        out[:, 0, -1] = spectrum[:, 1, 1]
        return torch.fft.irfft(out, n=x.shape[1]).pow(2).mean()


def operator() -> tuple[nn.Module, dict[str, object]]:
    return FourierOperator(), {"x": torch.randn(5, 8, 2, generator=torch.Generator().manual_seed(1))}
