"""The variables of a script that a step reads: global ones, those of closures, attributes of objects that are called.

In: a `Reading`, a model and its loss function. Out: notes of what their functions name. Functions are followed by name
from `forward`, hooks and the loss function to others of the script; code that is installed is left out, whose variables
are no knobs of a script. A name may be there without being read in this step: then a program is made that was not
needed, and nothing is wrong.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lopsided.capturing.reads import HasValues, Reading

_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (_OURS, *(str(Path(of).parent) + os.sep for of in (os.__file__, torch.__file__)), "<frozen")
_MISSING = object()


class _OfCell:
    """A variable of a closure."""

    def __init__(self, cell: types.CellType) -> None:
        self.thing = cell

    def get(self, key: Any, default: object, /) -> object:
        try:
            return self.thing.cell_contents
        except ValueError:
            return default


class Variables:
    """What is read of a script, noted in `reading`."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._seen: set[int] = set()

    def note(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        for path, module in model.named_modules():
            self._reading.watch(module, path or "model")
            self._module(module)
        if loss_fn is not None:
            self._called(loss_fn, "the loss")

    def _module(self, module: nn.Module) -> None:
        self._function(type(module).forward, type(module))
        own = vars(module)
        if "forward" in own:
            self._called(own["forward"], "forward")
        forward = type(module).forward
        for key in _names_in(forward) if isinstance(forward, types.FunctionType) else ():
            held = own.get(key)
            for function in held if isinstance(held, tuple | list) else (held,):
                if isinstance(function, types.FunctionType | types.MethodType | functools.partial):
                    self._called(function, key)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            self._called(hook, "a forward hook")

    def _called(self, thing: object, name: str) -> None:
        """Something that may be called in the step."""
        if isinstance(thing, nn.Module):
            self._other_module(thing, name)
        elif isinstance(thing, functools.partial):
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self._called(part, name)
        elif isinstance(thing, types.MethodType):
            self._function(thing.__func__, type(thing.__self__))
            self._attributes(thing.__self__, thing.__func__, name)
        elif isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(call := vars(type(thing)).get("__call__"), types.FunctionType):
            self._function(call, type(thing))
            self._attributes(thing, call, name)

    def _other_module(self, module: nn.Module, name: str) -> None:
        """A module that is no part of the model: its tensors are constants of the graph."""
        if _file_of(type(module)).startswith(_OURS):
            return  # a parallel module
        for path, part in module.named_modules():
            if id(part) in self._reading.names:
                continue
            where = f"{name}.{path}" if path else name
            self._reading.watch(part, where)
            self._module(part)
            for tensors in (part._buffers, part._parameters):
                for key in tensors:
                    self._reading.note(tensors, key, f"{where}.{key}")

    def _attributes(self, thing: object, function: Callable[..., Any], name: str) -> None:
        """Those of an object that one of its methods names."""
        if isinstance(thing, nn.Module) or not isinstance(function, types.FunctionType) or _is_installed(function):
            return
        names = _names_in(function)
        own = getattr(thing, "__dict__", {})
        for key in names:
            if key in own:
                self._variable(own, key, f"{name}.{key}", names)

    def _function(self, function: object, owner: type | None = None) -> None:
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if not isinstance(function, types.FunctionType) or id(function) in self._seen or _is_installed(function):
            return
        self._seen.add(id(function))
        names = _names_in(function)
        for name in names:
            if name in function.__globals__:
                self._variable(function.__globals__, name, name, names)
            if isinstance(method := getattr(owner, name, None), types.FunctionType):
                self._function(method, owner)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._variable(_OfCell(cell), name, name, names)

    def _variable(self, holder: HasValues, key: str, name: str, names: Sequence[str]) -> None:
        value = holder.get(key, _MISSING)
        if isinstance(value, types.ModuleType | type):
            if not _is_file_installed(_file_of(value)):
                for part in names:
                    inner = vars(value).get(part, _MISSING)
                    if inner is not _MISSING and not isinstance(inner, types.ModuleType | type | property):
                        self._variable(vars(value), part, f"{name}.{part}", names)
        elif callable(value):
            self._called(value, name)
        else:
            self._reading.note(holder, key, name, of=names)


def _names_in(function: types.FunctionType) -> tuple[str, ...]:
    """Everything that a function names: variables, attributes, and texts, by which attributes may be looked up."""
    return tuple(dict.fromkeys(_names_of(function.__code__)))


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names_of(const)
        elif isinstance(const, str) and const.isidentifier():
            yield const


def _is_installed(function: types.FunctionType) -> bool:
    return _is_file_installed(function.__code__.co_filename)


def _is_file_installed(file: str) -> bool:
    return not file or file.startswith(_LIBRARIES) or f"-packages{os.sep}" in file


def _file_of(thing: types.ModuleType | type) -> str:
    module = sys.modules.get(thing.__module__) if isinstance(thing, type) else thing
    return getattr(module, "__file__", None) or ""
