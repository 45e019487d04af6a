"""What the demonstration trains on: `text.txt`, a story written for it, one token a letter.

In: how long a sample is. Out: `Windows`, a dataset that gives the same samples in the same order to everyone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

_SEED = 0


@cache
def story() -> str:
    return (Path(__file__).parent / "text.txt").read_text(encoding="ascii")


@cache
def letters() -> str:
    """Every letter that occurs, in the order of their tokens."""
    return "".join(sorted(set(story())))


@cache
def _tokens() -> Tensor:
    token = {letter: k for k, letter in enumerate(letters())}
    return torch.tensor([token[letter] for letter in story()])


class Windows(Dataset[dict[str, Tensor]]):
    """Stretches of the story that begin anywhere, each with the letters that follow."""

    def __init__(self, samples: int, length: int) -> None:
        self.length = length
        dice = torch.Generator().manual_seed(_SEED)
        self._starts = torch.randint(len(story()) - length, (samples,), generator=dice).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        start, tokens = self._starts[number], _tokens()
        return {
            "input_ids": tokens[start : start + self.length],
            "labels": tokens[start + 1 : start + self.length + 1],
        }
