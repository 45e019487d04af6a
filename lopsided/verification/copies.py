"""A copy of a model to run or change, whatever it keeps beside its parameters.

In: an `nn.Module`. Out: one of its own memory, or a refusal. Tensors that forward computed and left on the module are
copied without their history: `torch.nn.utils.weight_norm` and `torch.nn.utils.prune` leave `weight` there, and compute
it anew in every pass.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lopsided.errors import ModelError


def copied(model: nn.Module) -> nn.Module:
    memory: dict[int, object] = {}
    for part in model.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                # As `copy.deepcopy` keeps what it has copied: by the identity of what was copied.
                memory[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, memory)
    except Exception as error:
        raise ModelError(
            f"{model._get_name()} cannot be copied: {error}",
            do="keep locks, files and lists of computed tensors out of the module",
        ) from error


def widened(model: nn.Module) -> nn.Module:
    """The model in float64, complex numbers in complex128: `Module.to(torch.float64)` would drop imaginary parts."""

    def wide(tensor: Tensor) -> Tensor:
        if tensor.dtype.is_floating_point:
            return tensor.double()
        return tensor.to(torch.complex128) if tensor.dtype.is_complex else tensor

    model._apply(wide)
    return model
