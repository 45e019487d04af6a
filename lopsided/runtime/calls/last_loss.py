"""A loss that is no number ends the run, unless the script wants to go on, and says whose term it was.

In: the loss of a forward pass and this device's own term of it. Out: nothing, a `TrainingError`, or a warning. On a GPU
the loss is looked at one step later: the host would stand still until all that is queued is done.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lopsided.errors import InputError, TrainingError

ON_NAN = ("stop", "warn", "ignore")
"""What may be done about a loss that is not finite."""


class NotFiniteWarning(UserWarning):
    """A loss that is not finite, where the run goes on (`on_nan="warn"`)."""


class LastLoss:
    """The loss that was made last, until somebody has looked at it."""

    def __init__(self, where: str, on_nan: str = "stop") -> None:
        if on_nan not in ON_NAN:
            raise InputError(f"on_nan is {on_nan!r}", where="parallelize", do=f"choose from {', '.join(ON_NAN)}")
        self._where, self._on_nan = where, on_nan
        self._loss: Tensor | None = None
        self._own: Tensor | None = None
        self._told: torch.cuda.Event | None = None  # behind which both are on the host
        self._number = 0

    def remember(self, loss: Tensor, own: Tensor, number: int) -> None:
        """`number` is that of the forward pass."""
        if self._on_nan == "ignore":
            return
        self._number = number
        if loss.device.type == "cpu":
            self._loss, self._own = loss.detach(), own
            self.check()
            return
        # To the host behind the forward pass. Asked for later it would have to wait for all that is queued by then, and
        # the device would stand still between two steps.
        both = torch.stack((loss.detach().reshape(()).double(), own.reshape(-1).double().sum()))
        told = torch.empty(2, dtype=torch.float64, pin_memory=True).copy_(both, non_blocking=True)
        self._loss, self._own = told[0], told[1]
        self._told = torch.cuda.current_stream(loss.device).record_event()

    def check(self) -> None:
        loss, own = self._loss, self._own
        if self._told is not None:
            self._told.synchronize()
            self._told = None
        self._loss = self._own = None
        if loss is None or own is None or bool(loss.isfinite().all()):
            return
        mine = "its own term is not finite either" if not bool(own.isfinite().all()) else "its own term is finite"
        what = f"the loss is {loss.item():g} in forward pass {self._number}"
        if self._on_nan == "warn":
            warnings.warn(f"{what} ({self._where}: {mine})", NotFiniteWarning, stacklevel=4)
            return
        raise TrainingError(
            what,
            where=f"{self._where}: {mine}",
            do="lower the learning rate, clip gradients, or look at the data of the ranks whose term is not finite; "
            'parallelize(..., on_nan="warn") goes on, for a script that skips such a batch',
        )
