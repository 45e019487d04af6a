"""A model's parameters, replaced by this process's pieces of them, and watched from then on.

In: a model, how each parameter is held (`Piece`), this process's tensors. Out: `Adopted`, which knows where each of
them is and refuses one that was exchanged, converted, thawed or moved, and modules that were exchanged; `replaced`, to
lend a model other parameters.

What was made for the parameters that were taken out goes over to the pieces (`hand_over`): optimizers that were built
before `parallelize` hold the pieces from then on, in the same groups with the same options, and hooks of parameters are
hooks of the pieces. Optimizers that are alive are found among the objects that Python's garbage collector knows. One
that is made later, of a list of the old parameters, is found at its first step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lopsided.comm.communicator import Communicator
from lopsided.errors import TrainingError
from lopsided.runtime.parameters.piece_tensors import piece_parameter
from lopsided.runtime.parameters.pieces import Piece


def adopt(
    model: nn.Module,
    pieces: Mapping[str, Piece],
    local: Mapping[str, Tensor],
    communicator: Communicator | None,
    together: Callable[[str], None],
) -> None:
    """Put this process's tensors in place of the model's. `communicator` is to those that hold the other pieces."""
    made = {name: piece_parameter(piece, local[name], communicator, together) for name, piece in pieces.items()}
    first = {also: name for name, piece in pieces.items() for also in (name, *piece.also)}
    for path, module in model.named_modules():
        for key in [key for key, tensor in module._parameters.items() if tensor is not None]:
            module._parameters[key] = made[first[f"{path}.{key}" if path else key]]
        for key in [key for key, tensor in module._buffers.items() if tensor is not None]:
            name = f"{path}.{key}" if path else key
            if name in local:
                module._buffers[key] = local[name]


class Adopted:
    """The parameters that were put in place, by name; tied names share one.

    `model` is the parallel module, `original` the one it was made of: their submodules are the same, but each has lists
    of its own, and either can be changed.
    """

    def __init__(self, model: nn.Module, pieces: Mapping[str, Piece], original: nn.Module) -> None:
        self._pieces = pieces
        self._structure = [
            _Structure(path, module._modules, module._parameters)
            for root in (model, original)
            for path, module in root.named_modules(remove_duplicate=False)
        ]
        self._members = [*map(_members, self._structure)]  # compared at once: there are hundreds in every step
        self.by_name: dict[str, nn.Parameter] = {}
        # Dictionaries of parameters, not their modules: one of them may hold this.
        self._places: list[tuple[Mapping[str, nn.Parameter | None], str, str]] = []
        for name, piece in pieces.items():
            for also in (name, *piece.also):
                path, _, key = also.rpartition(".")
                # By way of the original: a submodule may be called like an attribute of the parallel module.
                owner = original.get_submodule(path) if path else model
                self._places.append((owner._parameters, key, name))
                self.by_name[name] = owner.get_parameter(key)

    def check(self, device: torch.device, where: str) -> None:
        """Every parameter is still the one that was put there, in shape, dtype and place, and no others came."""
        if [*map(_members, self._structure)] != self._members:
            for structure in self._structure:
                structure.check(where)
        with DisableTorchFunctionSubclass():  # so that pieces are asked as quickly as others
            self._check_parameters(device, where)

    def _check_parameters(self, device: torch.device, where: str) -> None:
        for place, key, name in self._places:
            parameter, piece = self.by_name[name], self._pieces[name]
            if place.get(key) is not parameter:
                raise TrainingError(
                    f"the parameter {name} was replaced after parallelize",
                    where=where,
                    do="change parameters before parallelize, or in place: with torch.no_grad(): p.copy_(...)",
                )
            if parameter.shape != piece.local_shape or parameter.dtype != piece.dtype:
                raise TrainingError(
                    f"the parameter {name} was {piece.dtype}{list(piece.local_shape)} and is "
                    f"{parameter.dtype}{list(parameter.shape)}",
                    where=where,
                    do="convert the model before parallelize, and plan it so (`lopsided plan --dtype`)",
                )
            if parameter.requires_grad and not piece.trained:
                raise TrainingError(
                    f"the parameter {name} was frozen when it was planned, and is not any more",
                    where=where,
                    do="set requires_grad before parallelize, and plan anew",
                )
            if parameter.device != device:
                raise TrainingError(
                    f"the parameter {name} was moved from {device} to {parameter.device}",
                    where=where,
                    do="leave parameters where parallelize puts them; it takes device=",
                )


class _Structure:
    """The submodules and parameters that one module had when it was captured."""

    def __init__(
        self, path: str, modules: Mapping[str, nn.Module | None], parameters: Mapping[str, nn.Parameter | None]
    ) -> None:
        self._path = f"{path}." if path else ""
        # Dictionaries of modules, not their owner: it may hold this.
        self.modules, self.parameters = modules, parameters
        self._before, self._names = dict(modules), [*parameters]

    def check(self, where: str) -> None:
        before = self._before
        same = len(self.modules) == len(before) and all(map(is_, self.modules.values(), before.values()))
        if not same and (changed := self._changed()):
            raise TrainingError(
                f"the module {self._path}{changed} after parallelize: the step that runs does not know it",
                where=where,
                do="change the model before parallelize, or parallelize it anew: "
                "lopsided.full_state_dict(pm) gives its weights",
            )
        if len(self.parameters) > len(self._names):
            added = next(name for name in self.parameters if name not in self._names)
            raise TrainingError(
                f"the parameter {self._path}{added} was added after parallelize and would never be trained",
                where=where,
                do="add it to the model before parallelize",
            )

    def _changed(self) -> str:
        """Which module is another one, or was added with parameters of its own; a metric may be added."""
        for name, module in self._before.items():
            if self.modules.get(name) is not module:
                return f"{name} was replaced"
        for name, module in self.modules.items():
            if name not in self._before and module is not None and next(module.parameters(), None) is not None:
                return f"{name} was added"
        return ""


_TRAINERS = {
    "torch.DistributedDataParallel": "DistributedDataParallel",
    "torch.DataParallel": "DataParallel",
    "torch.FullyShardedDataParallel": "FSDP",
    "torch.FSDPModule": "FSDP",
    "lopsided.Parallel": "parallel module",
}
"""What distributes the model inside of it, by package and class. They need not be imported to be told."""


def check_bare(model: nn.Module) -> None:
    """Refuse a model that is distributed already, or has such a part."""
    for path, module in model.named_modules():
        kinds = (f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(module).__mro__)
        if (found := next((_TRAINERS[kind] for kind in kinds if kind in _TRAINERS), None)) is not None:
            raise TrainingError(
                f"{f'its part {path}' if path else 'the model'} is a {found} already",
                where=type(model).__name__,
                do="give the model itself, as it is written for one device: the plan takes the place of others",
            )


def check_not_inside(trained: nn.Module) -> None:
    """Refuse to run inside of DistributedDataParallel that holds a parallel module as a part of its own."""
    outer = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if outer is not None and any(part is trained for part in outer.modules()):
        raise wrapped("DistributedDataParallel")


def wrapped(by: str) -> TrainingError:
    """What to raise when another trainer is put around a parallel module."""
    return TrainingError(
        f"{by} around a parallel module: its gradients are complete already, and would be averaged or cut again",
        where="the module that parallelize returned",
        do=f"leave {by} out: parallelize takes its place",
    )


@contextmanager
def replaced(model: nn.Module, whole: Mapping[str, nn.Parameter], pieces: Mapping[str, Piece]) -> Iterator[None]:
    """The model with other parameters, put back afterwards."""
    before: list[tuple[nn.Module, str, nn.Parameter | None]] = []
    try:
        for name, piece in pieces.items():
            for also in (name, *piece.also):
                path, _, last = also.rpartition(".")
                owner = model.get_submodule(path)
                before.append((owner, last, owner._parameters[last]))
                owner._parameters[last] = whole[name]
        yield
    finally:
        for owner, last, parameter in before:
            owner._parameters[last] = parameter


def _members(structure: _Structure) -> tuple[object, ...]:
    return (len(structure.parameters), *structure.modules.values())


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
