"""What was made for a model's own parameters goes over to the pieces that take their place.

In: the parameters that were taken out of a model, and those that were put in. Out: optimizers that were built before
`parallelize` hold the pieces from then on, in the same groups with the same options, and hooks of parameters are hooks
of the pieces.

Optimizers that are alive are found among the objects that Python's garbage collector knows. One that is made later, of
a list of the old parameters, is found at its first step.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lopsided.errors import TrainingError

_successors = WeakIdKeyDictionary()  # of every parameter that was taken out of a model, what took its place


def hand_over(before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
    """Parameters of the same name: what knows those before knows those after."""
    for name, parameter in before.items():
        successor = after[name]
        _successors[parameter] = (name, successor)
        # The same dictionaries, so that a hook can still be removed by its handle.
        successor._backward_hooks = parameter._backward_hooks
        successor._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    for optimizer in _living_optimizers():
        adopt_parameters(optimizer)


def adopt_parameters(optimizer: Optimizer) -> None:
    """Put pieces in the place of parameters that were taken out of a model."""
    if not len(_successors):
        return
    for group in optimizer.param_groups:
        parameters = group["params"]
        found = {k: _successors[p] for k, p in enumerate(parameters) if p in _successors}
        for k, (name, successor) in found.items():
            if optimizer.state.get(parameters[k]):
                raise TrainingError(
                    f"{type(optimizer).__name__} has a state of the whole parameter {name}, which is in pieces now",
                    where="an optimizer that took steps, or loaded a state, before parallelize",
                    do="build it after parallelize, and load its state with lopsided.load_checkpoint",
                )
            # In place: some optimizers keep the list.
            parameters[k] = successor


def _living_optimizers() -> list[Optimizer]:
    # By type, and not isinstance: to ask a lazy object for its class may import or build what it stands for.
    return [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]
