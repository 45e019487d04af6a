"""What every zoo model needs: seeded batches on any device, and checks that say what to change."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lopsided.errors import ModelError

Batch = dict[str, Tensor]
Built = tuple[nn.Module, Batch]


def require(ok: bool, what: str, do: str) -> None:
    """Refuse a combination of sizes that no model can have."""
    if not ok:
        raise ModelError(what, where="zoo overrides", do=do)


def require_divides(small: str, small_value: int, big: str, big_value: int) -> None:
    """Refuse `big_value` unless it is a multiple of `small_value`."""
    require(
        big_value % small_value == 0,
        f"{big}={big_value} is not a multiple of {small}={small_value}",
        f"choose {big} as a multiple of {small}, e.g. {big}={max(1, big_value // small_value) * small_value}",
    )


def heads_for(width: int, head: int) -> int:
    """How many heads a width has by default: of `head` channels each, or of 16 where four would not fit."""
    heads = max(width // (head if width >= 4 * head else 16), 1)
    return next(h for h in range(heads, 0, -1) if width % h == 0)


def in_proportion(full: int, width: int, full_width: int) -> int:
    """A size that was not given: as in the full model, or as much smaller as the model is narrower.

    A narrow model with a full vocabulary would be a vocabulary with little else: gigabytes of logits.
    """
    return full if width >= full_width else max(full * width // full_width, 16)


def random_tokens(*shape: int, below: int, seed: int = 0) -> Tensor:
    """Whole numbers in [0, below), the same on every device."""
    device = torch.get_default_device()
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.int64, device=device)
    # Drawn on the CPU by a generator of our own: the caller's random state stays untouched, and a GPU run
    # sees the batch a CPU run saw.
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(below, shape, generator=generator, device="cpu").to(device)


def random_values(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same on every device."""
    device = torch.get_default_device()
    if device.type == "meta":
        return torch.empty(shape, device=device)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(device)


def next_tokens(batch: int, seq: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Token ids, and at each position the id that follows: two tensors that share no memory."""
    text = random_tokens(batch, seq + 1, below=vocab)
    return text[:, :-1].clone(), text[:, 1:].clone()


def embedding(count: int, width: int, std: float = 0.02) -> nn.Embedding:
    """An embedding small enough that a head tied to it starts with a loss near log(count)."""
    table = nn.Embedding(count, width)
    nn.init.normal_(table.weight, std=std)
    return table
