"""The whole model again, as an ordinary module on one rank: to evaluate, to generate, to save as its library does.

In: a parallel model, on all ranks. Out: a copy of the model with its whole parameters and buffers on one of them.
`save_pretrained` of the model itself, which holds pieces, writes such a copy.
"""

from __future__ import annotations

import copy
import weakref
from functools import cache
from typing import Any

import torch
from torch import nn

from lopsided.runtime.checkpoint.state import full_state_dict

# The attribute of a model that knows which parallel module it is of.
_PARALLEL = "_lopsided_parallel"


def whole(pm: Any, *, device: torch.device | str = "cpu") -> Any:
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
    if vars(made).pop(_PARALLEL, None) is not None:
        made.__class__ = type(made).__mro__[2]
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


def save_whole(model: nn.Module, pm: Any) -> None:
    """From here on `save_pretrained` of this model, which holds pieces of `pm`, writes the whole. All ranks call it."""
    if callable(getattr(model, "save_pretrained", None)):
        if _PARALLEL not in vars(model):
            model.__class__ = _saving(type(model))  # type: ignore[arg-type]
        vars(model)[_PARALLEL] = weakref.ref(pm)


class _SavesWhole:
    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is not None:
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]
        made = whole(vars(self)[_PARALLEL]())
        return None if made is None else made.save_pretrained(*args, **kwargs)


@cache
def _saving(kind: type) -> type:
    return type(kind.__name__, (_SavesWhole, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
