"""The whole model again, as an ordinary module on one rank: to evaluate, to generate, to save as its library does.

In: a parallel model, on all ranks. Out: a copy of the model with its whole parameters and buffers on one of them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lopsided.runtime.checkpoint.state import full_state_dict
from lopsided.runtime.parallel import Parallel


def whole(pm: Parallel, *, device: torch.device | str = "cpu") -> Any:
    """An ordinary module with all parameters, on rank 0 and on `device`; None on other ranks. All ranks call it.

    It is a copy: what is trained later is not in it. `whole(pm).save_pretrained(folder)` writes a transformers model.
    """
    state = full_state_dict(pm, everywhere=False)
    if pm.world.rank != 0:
        return None
    model = pm.module
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    # Without copying the pieces: each is replaced by the whole at once.
    made: nn.Module = copy.deepcopy(model, dict(held))
    put: dict[int, Any] = {}
    for path, module in made.named_modules():
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in [(key, tensor) for key, tensor in tensors.items() if tensor is not None]:
                name = f"{path}.{key}" if path else key
                if id(tensor) not in put:
                    value = state[name].to(device) if name in state else tensor.detach().clone().to(device)
                    put[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if kind == "parameter" else value
                tensors[key] = put[id(tensor)]
    return made
