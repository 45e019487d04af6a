"""An op that nobody has described: its rules are found by trying.

python examples/03_your_own_op.py
"""

import torch
from torch import Tensor, nn

import lopsided


@torch.library.custom_op("example::soft_clip", mutates_args=())
def soft_clip(x: Tensor, limit: Tensor) -> Tensor:
    """x bent smoothly into ±limit, one limit per column."""
    return limit * torch.tanh(x / limit)


@soft_clip.register_fake
def _(x: Tensor, limit: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, limit = ctx.saved_tensors  # type: ignore[attr-defined]
    bent = torch.tanh(x / limit)
    return gradient * (1 - bent**2), (gradient * (bent - x / limit * (1 - bent**2))).sum(0)


soft_clip.register_autograd(_backward, setup_context=_keep)


class Clipped(nn.Module):
    """A regression with the op in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.limit, self.last = nn.Linear(5, 8), nn.Parameter(torch.ones(8)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(soft_clip(self.first(x), self.limit)).square().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    model, batch = Clipped(), {"x": torch.randn(9, 5)}
    book = lopsided.derive_rules(lopsided.capture(model, batch))
    for node in book.by_experiment:
        print(f"{node.op}, described by nobody, holds under:")
        for rule in book.rules[node.name]:
            print("  ", rule)
    result = lopsided.verify(model, batch, programs=20)
    print(f"worst relative error of 20 random programs: {result.worst.error:.1e}")
    assert result.passed
    assert any(rule.gives[0].is_shard for node in book.by_experiment for rule in book.rules[node.name])
