"""A small classifier and its samples, for training loops of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from lopsided.capturing.call import LossFn
from lopsided.capturing.capture_graph import capture_call
from lopsided.ir.placement import Shares
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from tests.support.jobs import plan_of, prices_of

BATCH = 12  # of all processes together
SHARES = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))
NONE_FOR_ONE = Shares((0.6, 0.0, 0.4), named=(("state", (0.3, 0.3, 0.4)),))


class Classifier(nn.Module):
    """Returns its loss, if it is given labels, and saves itself as models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.down(torch.tanh(self.up(x)))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), Path(folder) / "model.safetensors")


def classifier() -> Classifier:
    torch.manual_seed(1)
    return Classifier()


def samples(count: int, label: str = "labels") -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(count, 8, generator=draw)
    return [{"x": row, label: row[:5].argmax()} for row in x]


def plan_for(model: nn.Module, batch: Any, how: str, shares: Shares, loss_fn: LossFn | None = None) -> Plan:
    """Data parallelism, or that with parameters stored in pieces ("zero")."""
    book = derive_rules(capture_call(model, batch, loss_fn=loss_fn, needs_loss=False).graph)
    program = data_parallel(book, prices_of(book.graph, shares))
    return plan_of(stored_cut(program) if how == "zero" else program, shares)
