"""Outputs of a batch that was computed in rounds: as the call gave its batch, whole or this rank's rows.

In: this rank's part of every output in every round. Out: tensors as `calls.outputs` hands them on. They have values and
no gradients: the rounds' backward passes have been, and what they need is gone. A backward pass that comes to one is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lopsided.comm.redistribute import Redistributor
from lopsided.errors import TrainingError
from lopsided.executor.rounds import RoundsRan, detached
from lopsided.ir.placement import Placement
from lopsided.runtime.calls.inputs import row_cut_of_round
from lopsided.runtime.calls.outputs import Output, OutputPart, RowCut, hand_on, output
from lopsided.schedule.rounds import Rounds


def outputs_of_rounds(
    rounds: Rounds,
    ran: RoundsRan,
    placed: Mapping[str, Placement],
    names: Sequence[str],
    exchange: Redistributor,
    cut: RowCut | None,
) -> dict[str, Tensor]:
    """The outputs of these names; rows of the batch behind each other, sums added up, and what is the same once."""
    rows_at, found = row_cut_of_round(cut, rounds), dict[str, Tensor]()
    for name in names:
        shape = rounds.graph.values[name].shape
        at = rounds.placed[name]
        had_gradient = rounds.graph.values[name].grad and torch.is_grad_enabled()
        rowwise = rows_at if at.is_shard and at.dim == 0 else None
        parts = [
            hand_on(OutputPart(detached(one.outputs[name]), placed[name], shape, name), exchange, rowwise)
            for one in ran.rounds
        ]
        found[name] = _joined(rounds, parts, at, cut, refuses=had_gradient)
    return found


def _joined(rounds: Rounds, parts: list[Tensor], at: Placement, cut: RowCut | None, *, refuses: bool) -> Tensor:
    """Sent for, where something must be sent, when somebody looks."""

    def bring() -> Tensor:
        with torch.no_grad():
            there = [part.brought() if isinstance(part, Output) else part for part in parts]
            whole = rounds.joined(there, at)
        return _OfRounds.apply(whole.requires_grad_()) if refuses else whole  # type: ignore[no-untyped-call]

    if not any(isinstance(part, Output) for part in parts):
        return bring()
    first = parts[0]
    shape = tuple(sum(part.shape[at.dim] for part in parts) if d == at.dim else n for d, n in enumerate(first.shape))
    made = output(shape if at.is_shard else tuple(first.shape), first.dtype, first.device, bring)
    made._cut = cut
    return made


class _OfRounds(torch.autograd.Function):
    """The identity, which refuses a gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise TrainingError(
            "a loss was made outside of the model of an output, and the batch is computed in rounds: each has gone "
            "backward before the next began",
            do="make the loss in the model, or pass it to parallelize as loss_fn=; or plan without rounds, by "
            "microbatches=1",
        )
