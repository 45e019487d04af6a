"""Hooks on parameters (`p.register_hook`, `register_post_accumulate_grad_hook`) are called as on one device.

In: the parameters of a parallel module, and when a backward pass begins and ends. Out: every hook is called once a
pass, with this process's piece of the finished gradient.

Autograd would call them with what it brings itself, which is nothing where a gradient comes home by a bucket, or a part
of the sum where a parameter is used in two placements. So they are taken off while a pass runs, and called at its end,
when gradients are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from lopsided.errors import TrainingError

Hooks = dict[int, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class _Taken:
    """The hooks of a parameter while a backward pass runs, and the gradient that it had before."""

    name: str
    parameter: nn.Parameter
    on_gradient: Hooks
    on_accumulated: Hooks
    earlier: Tensor | None

    def take_off(self) -> None:
        # Emptied and not replaced: autograd keeps the dictionaries themselves.
        for hooks, _ in self._places():
            hooks.clear()

    def put_back(self) -> None:
        for hooks, held in self._places():
            hooks.update(held)

    def _places(self) -> list[tuple[Hooks, Hooks]]:
        """Where autograd looks for hooks, with those that were there."""
        places = (self.parameter._backward_hooks, self.parameter._post_accumulate_grad_hooks)
        held = (self.on_gradient, self.on_accumulated)
        return [(hooks, known) for hooks, known in zip(places, held, strict=True) if hooks is not None]


class ParameterHooks:
    """The hooks of these parameters, which are read anew in every pass: they come and go."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._taken: list[_Taken] = []

    def begin(self, syncing: bool) -> None:
        """A backward pass begins."""
        with DisableTorchFunctionSubclass():  # so that pieces are asked as quickly as others
            self._take_all(syncing)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """In here backward passes run that are parts of one: hooks are called when that ends."""
        with DisableTorchFunctionSubclass():
            places = [
                (hooks, dict(hooks))
                for parameter in self._parameters.values()
                for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
                if hooks
            ]
        for hooks, _ in places:
            hooks.clear()
        try:
            yield
        finally:
            for hooks, held in places:
                hooks.update(held)

    def _take_all(self, syncing: bool) -> None:
        for taken in self._taken:  # of a pass that was broken off
            taken.put_back()
        self._taken = []
        for name, parameter in self._parameters.items():
            on_gradient, on_accumulated = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            if not on_gradient and not on_accumulated:
                continue
            if not syncing:
                raise TrainingError(
                    f"{name} has a hook, and its gradient is not complete under no_sync()",
                    where="backward()",
                    do="accumulate without no_sync(), or remove the hook and change p.grad before the optimizer's step",
                )
            taken = _Taken(name, parameter, dict(on_gradient or {}), dict(on_accumulated or {}), parameter.grad)
            self._taken.append(taken)
            taken.take_off()
            if taken.earlier is not None:
                # Zeros and not None, which would say that what was added up so far is to be dropped.
                parameter.grad = torch.zeros_like(taken.earlier)

    def finish(self) -> None:
        """It has ended, and gradients are complete."""
        held, self._taken = self._taken, []
        for taken in held:
            taken.put_back()
        for taken in held:
            if taken.parameter.grad is None:
                continue
            try:
                _call(taken, taken.parameter.grad)
            except (RuntimeError, TrainingError) as error:
                why = error.what if isinstance(error, TrainingError) else error
                raise TrainingError(
                    f"a hook of {taken.name} failed on this process's piece of the gradient, "
                    f"{list(taken.parameter.shape)}: {why}",
                    where="backward()",
                    do='change elements one by one, or store the parameter whole (pins=["*=I"])',
                ) from error


@torch.no_grad()
def _call(taken: _Taken, gradient: Tensor) -> None:
    for hook in taken.on_gradient.values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    taken.parameter.grad = gradient if taken.earlier is None else taken.earlier.add_(gradient)
    for hook in taken.on_accumulated.values():
        hook(taken.parameter)
