"""TRL's `SFTTrainer` on unequal devices.

In: what an `SFTTrainer` takes, and a plan, a cluster, or neither, as `lopsided.integrations.trainer` has it. Out: one
with the losses of the plain one on a single device with the global batch.

TRL computes its loss outside of the model, from log-probabilities of the rows at hand. Here the model computes it, as
`transformers.Trainer` does: the same number, as a part of the step that is planned. TRL's own metrics beside the loss
(entropy, token accuracy) are not computed; `compute_metrics` is.
"""

from __future__ import annotations

from typing import Any

import transformers
import trl
from torch import nn

from lopsided.errors import InputError
from lopsided.integrations.trainer import OnUnequalDevices


class SFTTrainer(OnUnequalDevices, trl.SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer` with `plan=` or `cluster=`; without either, the devices are measured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        asked = {"loss_type": self.args.loss_type == "nll", "padding_free": not self.args.padding_free}
        asked["activation_offloading"] = not self.args.activation_offloading
        if wrong := [name for name, fine in asked.items() if not fine]:
            raise InputError(
                f"{wrong[0]}={getattr(self.args, wrong[0])!r} computes on the rows or the memory of one device",
                where="SFTConfig",
                do="leave it out: the model's own loss is planned, of rows with a batch dim",
            )
        # TRL puts a forward pass that can leave logits out before the model's own.
        base: nn.Module = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        vars(base).pop("forward", None)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return transformers.Trainer.compute_loss(self, *args, **kwargs)
