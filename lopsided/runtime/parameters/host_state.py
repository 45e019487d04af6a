"""Optimizer state in the memory of the host, or in 8 bits: fetched a slice at a time for the update, and taken back.

In: parameters whose state the plan keeps there (`keep_on_host`) or so (`keep_coded`), and optimizers as they take
steps. Out: the same steps of any optimizer that treats every parameter on its own, from host memory to the last bit;
one that does not has all of its state fetched at once. State in 8 bits is written out to be fetched, and coded when it
is taken back (`coded_state`).

    first         of what has been made or loaded meanwhile, state is taken where it belongs
    slice         some parameters, whose state is fetched; the optimizer's own step, with its groups narrowed to them;
                  their state is taken back
    last slice    what stays on the device with it: its step is the one that the script has called

Hooks of the script see whole groups: those before a step run before the first slice, those after it after the last.

What is copied and what is computed are in the order of one stream: memory of one slice is that of the next. On a GPU
state lies in pinned memory; the end of a step waits until all has arrived there, so that it may be read. Where
parameters are in the memory of the host themselves (a plan may say so, no planner does), state is kept apart all the
same.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lopsided.runtime.parameters.coded_state import NEVER_NEGATIVE, Coded
from lopsided.schedule.host_state import slice_bytes

_away: Any = WeakIdKeyDictionary()  # the parameters whose state is in host memory
_coded: Any = WeakIdKeyDictionary()  # those whose state is in 8 bits
_steps: weakref.WeakKeyDictionary[Optimizer, HostSteps] = weakref.WeakKeyDictionary()
# Before there is any, state is taken to have twice the bytes of its parameter.
_AS_MUCH = 2


def keep_on_host(parameters: Iterable[nn.Parameter]) -> None:
    """From the next step on, the state of these parameters is in host memory, whatever optimizer has it."""
    for parameter in parameters:
        _away[parameter] = True


def keep_coded(parameters: Iterable[nn.Parameter]) -> None:
    """From the next step on, the state of these parameters is in 8 bits, whatever optimizer has it."""
    for parameter in parameters:
        _coded[parameter] = True


def is_on_host(parameter: Tensor) -> bool:
    return parameter in _away


def is_coded(parameter: Tensor) -> bool:
    return parameter in _coded


def is_apart(parameter: Tensor) -> bool:
    """Whether its state is fetched for the update."""
    return parameter in _away or parameter in _coded


def kept(parameter: Tensor, key: str, value: Tensor) -> Tensor:
    """A tensor of state, wherever it was read or moved to, as it is kept between steps."""
    if _is_to_be_coded(parameter, value):
        value = value.to(parameter.device)
        return Coded.of(value, is_signed=key not in NEVER_NEGATIVE, pinned_on_host=is_on_host(parameter))
    return on_host(value) if is_on_host(parameter) else value.to(parameter.device)


def _is_to_be_coded(parameter: Tensor, value: Tensor) -> bool:
    """What has a number for each of the parameter's; an optimizer's own kinds of tensors stay its own."""
    return (
        is_coded(parameter) and type(value) is Tensor and value.is_floating_point() and _is_shaped_as(value, parameter)
    )


def _is_shaped_as(value: Tensor, parameter: Tensor) -> bool:
    with DisableTorchFunctionSubclass():
        return value.shape == parameter.shape and value.numel() > 1


def on_host(tensor: Tensor, *, copied: bool = True) -> Tensor:
    """Room in host memory for a tensor, or a copy of it there. Pinned, where it comes from a GPU."""
    room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return room.copy_(tensor) if copied else room


def watch_steps(optimizer: Optimizer, *, is_sliceable: Callable[[], bool]) -> None:
    """Called before every step: its hooks run last before it, and first after it."""
    if not (len(_away) or len(_coded)):
        return
    steps = _steps.get(optimizer)
    if steps is None:
        if not any(is_apart(p) for group in optimizer.param_groups for p in group["params"]):
            return
        steps = _steps[optimizer] = HostSteps(optimizer, sliced=is_sliceable())
    steps.put_hooks_inside(optimizer)


def is_under_way(optimizer: Optimizer) -> bool:
    """Whether a step in slices has begun and not ended: a step within it is a part of it."""
    steps = _steps.get(optimizer)
    return steps is not None and steps.is_under_way


def closure_is_done(optimizer: Optimizer) -> None:
    """The closure that a step was given has returned, so gradients are there."""
    if (steps := _steps.get(optimizer)) is not None:
        steps.begin(optimizer, (optimizer,), {})


def end_failed_steps() -> None:
    """Give optimizers back their groups after a step that has failed."""
    for optimizer, steps in list(_steps.items()):
        steps.give_up(optimizer)


def raw_step(optimizer: Optimizer) -> Callable[..., object]:
    """The step of an optimizer's class without the hooks that torch has put around it."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


class Groups:
    """The parameter groups of an optimizer, narrowed to some parameters at a time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._whole = [[*group["params"]] for group in optimizer.param_groups]
        # Some optimizers count steps in their groups. Every slice begins with what the step began with.
        self._options = [
            {key: _own(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    def narrow(self, optimizer: Optimizer, part: Iterable[Tensor], *, again: bool) -> None:
        names = set(map(id, part))
        for group, whole, options in zip(optimizer.param_groups, self._whole, self._options, strict=True):
            group["params"] = [parameter for parameter in whole if id(parameter) in names]
            for key, value in options.items() if again else ():
                if isinstance(value, Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def widen(self, optimizer: Optimizer) -> None:
        for group, whole in zip(optimizer.param_groups, self._whole, strict=True):
            group["params"] = whole


def _own(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else value


def step_in_slices(optimizer: Optimizer, slices: Sequence[Sequence[Tensor]]) -> None:
    """A step without hooks, some parameters after the others."""
    groups, step = Groups(optimizer), raw_step(optimizer)
    try:
        for number, part in enumerate(slices):
            groups.narrow(optimizer, part, again=number > 0)
            step(optimizer)
    finally:
        groups.widen(optimizer)


class HostSteps:
    """The steps of one optimizer, which it does not hold: it is asked for again with every step."""

    def __init__(self, optimizer: Optimizer, *, sliced: bool) -> None:
        self._sliced = sliced
        self._homes: dict[tuple[int, str], Tensor] = {}  # by parameter and key: where state is between steps
        self._groups: Groups | None = None
        self._last: Sequence[Tensor] = ()
        self._within = 0  # steps that a step makes of itself: super().step()
        self._before = optimizer.register_step_pre_hook(self._begins)
        self._after = optimizer.register_step_post_hook(self._ends)

    @property
    def is_under_way(self) -> bool:
        return self._groups is not None

    def put_hooks_inside(self, optimizer: Optimizer) -> None:
        cast(OrderedDict[int, object], optimizer._optimizer_step_pre_hooks).move_to_end(self._before.id)
        cast(OrderedDict[int, object], optimizer._optimizer_step_post_hooks).move_to_end(self._after.id, last=False)

    # Hooks

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_under_way:
            self._within += 1
        elif not any(map(callable, (*args, *kwargs.values()))):
            self.begin(optimizer, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._within:
            self._within -= 1
        elif self._groups is not None:
            self._take_back(optimizer, self._last)
            self.give_up(optimizer)
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            for device in {parameter.device for parameter in held if is_on_host(parameter)}:
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()

    # Slices

    def begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """All slices but the last, whose state is fetched."""
        self.give_up(optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._homes = {key: home for key, home in self._homes.items() if key[0] in set(map(id, held))}
        slices = self._slices(optimizer, held)
        if not slices:
            return
        groups, step = Groups(optimizer), raw_step(optimizer)
        self._groups = groups
        try:
            self._take_back(optimizer, held)
            for number, part in enumerate(slices):
                groups.narrow(optimizer, part, again=number > 0)
                self._fetch(optimizer, part)
                if number + 1 < len(slices):
                    step(*args, **kwargs)
                    self._take_back(optimizer, part)
        except BaseException:
            self.give_up(optimizer)
            raise
        self._last = slices[-1]

    def give_up(self, optimizer: Optimizer) -> None:
        if self._groups is not None:
            self._groups.widen(optimizer)
        self._groups, self._last, self._within = None, (), 0

    def _slices(self, optimizer: Optimizer, held: Sequence[Tensor]) -> list[list[Tensor]]:
        apart = [parameter for parameter in held if is_apart(parameter)]
        if not apart:
            return []
        if not self._sliced:
            return [[*held]]
        sizes = [_state_bytes(optimizer, parameter) for parameter in apart]
        most = slice_bytes(sum(sizes))
        slices: list[list[Tensor]] = [[]]
        filled = 0
        for parameter, size in zip(apart, sizes, strict=True):
            if slices[-1] and filled + size > most:
                slices.append([])
                filled = 0
            slices[-1].append(parameter)
            filled += size
        slices[-1] += [parameter for parameter in held if not is_apart(parameter)]
        return slices

    def _fetch(self, optimizer: Optimizer, part: Iterable[Tensor]) -> None:
        for parameter, key, value in _state_of(optimizer, part):
            home = self._homes.get((id(parameter), key))
            if isinstance(value, Coded):
                self._homes[id(parameter), key] = value
                optimizer.state[parameter][key] = value.decode(parameter.device)
            elif is_on_host(parameter) and (value is home or value.device != parameter.device):
                self._homes[id(parameter), key] = value
                optimizer.state[parameter][key] = value.to(parameter.device, non_blocking=True, copy=True)

    def _take_back(self, optimizer: Optimizer, part: Iterable[Tensor]) -> None:
        for parameter, key, value in _state_of(optimizer, part):
            home = self._homes.get((id(parameter), key))
            if isinstance(value, Coded):
                continue
            if _is_to_be_coded(parameter, value):
                if isinstance(home, Coded) and home.shape == value.shape and home.dtype == value.dtype:
                    optimizer.state[parameter][key] = home.encode(value.to(parameter.device))
                else:
                    home = self._homes[id(parameter), key] = kept(parameter, key, value)
                    optimizer.state[parameter][key] = home
                continue
            if not is_on_host(parameter) or value is home or value.device != parameter.device:
                continue
            if home is None or home.shape != value.shape or home.dtype != value.dtype:
                home = self._homes[id(parameter), key] = on_host(value, copied=False)
            optimizer.state[parameter][key] = home.copy_(value, non_blocking=True)


def _state_of(optimizer: Optimizer, part: Iterable[Tensor]) -> list[tuple[Tensor, str, Tensor]]:
    """Parameter, key and tensor of the state that is fetched; counts of steps stay where they are."""
    with DisableTorchFunctionSubclass():
        return [
            (parameter, key, value)
            for parameter in part
            if is_apart(parameter)
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.numel() > 1
        ]


def _state_bytes(optimizer: Optimizer, parameter: Tensor) -> int:
    held = sum(value.nbytes for _, _, value in _state_of(optimizer, (parameter,)))
    return held or _AS_MUCH * parameter.nbytes
