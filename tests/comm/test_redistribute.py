"""Pieces cut by other shares; what conversions compute is tested with the executor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lopsided.comm import redistribute
from lopsided.comm.communicator import Communicator
from lopsided.comm.in_process import run_ranks
from lopsided.comm.redistribute import Redistributor
from lopsided.ir.placement import Shares, parse_placement


def test_which_elements_go_where_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's host would stand for it in every step."""
    made: list[int] = []
    real = redistribute._places

    def counted(of: list[int], device: torch.device) -> Tensor:
        made.append(len(of))
        return real(of, device)

    monkeypatch.setattr(redistribute, "_places", counted)
    shares = Shares((0.5, 0.5, 0.0), named=(("state", (0.2, 0.0, 0.8)),))
    source, to = parse_placement("S1"), parse_placement("S1@state")
    whole = torch.arange(30.0).reshape(3, 10)

    def rank(communicator: Communicator) -> list[Tensor]:
        exchange = Redistributor(communicator, shares, communicator.network)
        found = []
        for factor in (1.0, 2.0):
            part = exchange.layout(source, whole.shape).piece(whole, communicator.rank)
            with torch.inference_mode(factor == 1.0):
                found.append(exchange.move(factor * part, source, to, whole.shape))
            if factor == 1.0:
                made.append(-1)
        return found

    for number, (first, second) in enumerate(run_ranks(3, torch.device("cpu"), rank)):
        wanted = whole.split([2, 0, 8], 1)[number]
        assert torch.equal(first, wanted)
        assert torch.equal(second, 2 * wanted)
    # Of each of three ranks: what goes to each, and what comes from each.
    assert (made.count(-1), len(made)) == (3, 3 + 3 * 6)
