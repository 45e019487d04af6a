"""Samples, small calls of ops for the validator and the tests, and the tensors they are made of.

In: the name of an op and its arguments. Out: `Sample`. `Draw` gives tensors from one seeded stream, so that no two
tensors of a call are alike. Sizes are to be distinct and partly even, so that a length tells an index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lopsided.ir.graph import DTYPE_NAMES


@dataclass(frozen=True)
class Sample:
    """One call of an op on real tensors; those that require a gradient have theirs compared."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return (
            f"{self.op}({', '.join([*map(_short, self.args), *(f'{k}={_short(v)}' for k, v in self.kwargs.items())])})"
        )


def sample(op: str, *args: Any, **kwargs: Any) -> Sample:
    return Sample(op, args, kwargs)


def _short(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return f"{DTYPE_NAMES[arg.dtype]}{list(arg.shape)}"
    return f"[{', '.join(map(_short, arg))}]" if isinstance(arg, list | tuple) else repr(arg)


class Draw:
    """A stream of small tensors; real ones are float64 and trained unless said otherwise."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def real(self, *shape: int, low: float = -1.5, high: float = 1.5, grad: bool = True) -> Tensor:
        drawn = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        return (drawn * (high - low) + low).requires_grad_(grad)

    def constant(self, *shape: int, low: float = -1.5, high: float = 1.5) -> Tensor:
        return self.real(*shape, low=low, high=high, grad=False)

    def positive(self, *shape: int, low: float = 0.1, high: float = 0.9, grad: bool = True) -> Tensor:
        return self.real(*shape, low=low, high=high, grad=grad)

    def complex(self, *shape: int) -> Tensor:
        return torch.complex(self.constant(*shape), self.constant(*shape)).requires_grad_()

    def below(self, end: int, *shape: int, start: int = 0) -> Tensor:
        """Whole numbers from `start` up to, but without, `end`."""
        return torch.randint(start, end, shape, generator=self._generator)

    def truths(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator) < 0.5

    def order(self, length: int) -> Tensor:
        """The numbers below `length`, shuffled."""
        return torch.randperm(length, generator=self._generator)

    def well_conditioned(self, *batch: int, n: int) -> Tensor:
        """Symmetric positive definite matrices."""
        half = self.constant(*batch, n, n)
        return (half @ half.mT + 2 * torch.eye(n, dtype=torch.float64)).requires_grad_()

    def with_nans(self, *shape: int) -> Tensor:
        x = self.constant(*shape)
        return x.masked_fill(self.truths(*shape), torch.nan)
