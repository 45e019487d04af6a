"""From the MODEL of a command line to a module and a batch.

Three forms, each with overrides after a last colon, all optional:

    bert:layers=24,width=1024               a model of the zoo
    train.py:make:depth=3                   a function in a file, or in a module (`package.module:make`),
                                            that returns (module, batch)
    hf:LlamaForCausalLM:num_hidden_layers=4 a randomly initialised `transformers` model

A batch is a dict of keyword arguments of the module, a tuple of its arguments by position, or its one argument.
Overrides are read by their type, never evaluated; a list is written [1,2,3].
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from torch import Tensor, nn

from lopsided.errors import ModelError
from lopsided.models import hugging_face as hf
from lopsided.models import zoo

Model = tuple[nn.Module, object]

_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")

SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def load(spec: str, *, batch: int | None = None) -> Model:
    """The module and the batch that `spec` names; `batch`, if given, wins over a `batch=` in the spec."""
    head, _, rest = spec.partition(":")
    if batch is not None and batch < 1:
        raise ModelError(f"a batch of {batch}", where=f"model {spec!r}", do="choose a batch from 1 up")
    if head == "hf":
        class_name, _, overrides = rest.partition(":")
        return hf.build(class_name, split_overrides(overrides, spec), batch=batch)
    if head.endswith(".py") and (not rest or "=" in rest.partition(":")[0]):
        raise ModelError(
            f"{head} is a file, and no function in it is named",
            where=f"model {spec!r}",
            do=f"write {head}:function, where the function returns (module, batch)",
        )
    if head not in zoo.ZOO and not head.endswith(".py") and Path(head).exists() and os.sep in head:
        kind = "a directory" if Path(head).is_dir() else "a file, but not a Python file"
        raise ModelError(f"{head} is {kind}", where=f"model {spec!r}", do="name a function in a file: file.py:function")
    if head in zoo.ZOO or "=" in rest.partition(":")[0] or not rest:
        return load_zoo(spec, batch)
    function_name, _, overrides = rest.partition(":")
    return load_function(head, function_name, split_overrides(overrides, spec), batch, spec)


def split_overrides(text: str, spec: str) -> dict[str, str]:
    """The pairs of "layers=2,depths=[1,1]"."""
    pairs: dict[str, str] = {}
    for item in filter(None, _OUTSIDE_BRACKETS.split(text)):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (equals and key and value):
            raise ModelError(
                f"{item!r} is not an override",
                where=f"model {spec!r}",
                do="write key=value, with commas between, e.g. layers=2,width=64",
            )
        if key in pairs:
            raise ModelError(f"{key} is set twice", where=f"model {spec!r}", do="keep one of the two")
        pairs[key] = value
    return pairs


def items_of(text: str) -> list[str] | None:
    """The items of a list in brackets; None for anything else."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    return [item.strip() for item in text[1:-1].split(",") if item.strip()]


def argument(text: str, like: object, key: str, spec: str) -> zoo.Size | list[zoo.Size]:
    """As `typed`, or a list of it."""
    if (items := items_of(text)) is None:
        return typed(text, like, key, spec)
    return [typed(item, like[0] if isinstance(like, list | tuple) and like else None, key, spec) for item in items]


def typed(text: str, like: object, key: str, spec: str) -> zoo.Size:
    """`text` as the type of `like`; where that is no size, as a number or a switch if it reads like one."""
    try:
        if isinstance(like, bool):
            return SWITCHES[text.lower()]
        if isinstance(like, int | float):
            return type(like)(text)
    except (KeyError, ValueError) as error:
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(like)]
        raise ModelError(
            f"{key}={text} is not {kind}", where=f"model {spec!r}", do=f"write it like {key}={like}"
        ) from error
    if isinstance(like, str):
        return text
    if text.lower() in ("true", "false"):
        return SWITCHES[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def load_zoo(spec: str, batch: int | None) -> Model:
    """A model of the zoo, its overrides read as its builder's defaults are."""
    name, _, text = spec.partition(":")
    defaults = zoo.sizes(name)
    overrides = {
        # Unknown keys go through as they are: the zoo's refusal lists the known ones.
        key: typed(value, defaults[key], key, spec) if key in defaults else value
        for key, value in split_overrides(text, spec).items()
    }
    if batch is not None:
        overrides["batch"] = batch
    return zoo.build(name, **overrides)


def load_function(place: str, function_name: str, overrides: dict[str, str], batch: int | None, spec: str) -> Model:
    """What the user's function returns, checked."""
    where = f"model {spec!r}"
    source = import_file(place, where) if place.endswith(".py") else import_module(place, where)
    function = getattr(source, function_name, None)
    if not callable(function):
        known = [name for name, value in vars(source).items() if callable(value) and name[0] != "_"]
        close = difflib.get_close_matches(function_name, known, n=3)
        raise ModelError(
            f"{place} has no function {function_name!r}",
            where=where,
            do=f"did you mean {' or '.join(close)}?" if close else "define it there; it returns (module, batch)",
        )
    arguments = arguments_of(function, overrides, batch, spec)
    # Everything the user's code raises is told as theirs, with its place, whatever its type.
    try:
        returned = function(**arguments)
    except Exception as error:
        raise in_user_code(f"{function_name}() failed", error, where) from error
    return checked(returned, function_name, where)


def import_file(place: str, where: str) -> ModuleType:
    """Run a file as a module, its folder on the path as if it were the script."""
    path = Path(place).resolve()
    if not path.is_file():
        raise ModelError(f"there is no file {place}", where=where, do=f"check the path; it means {path}")
    # The name keeps two files of one stem apart; classes in the file find their module under it by name.
    name = f"lopsided_user_{path.stem}_{abs(hash(path)):x}"
    loader_spec = importlib.util.spec_from_file_location(name, path)
    if loader_spec is None or loader_spec.loader is None:
        raise ModelError(f"{place} is not a Python file", where=where, do="name a file that ends in .py")
    module = importlib.util.module_from_spec(loader_spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        loader_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise in_user_code(f"{place} cannot be imported", error, where) from error
    return module


def import_module(place: str, where: str) -> ModuleType:
    """Import a module by its dotted name, looking in the current folder too."""
    try:
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # The module itself, or a package it is in; anything else is an import inside the user's code.
        if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
            raise in_user_code(f"{place} cannot be imported", error, where) from error
        close = difflib.get_close_matches(place, list(zoo.ZOO), n=3)
        raise ModelError(
            f"there is no module {error.name!r}",
            where=where,
            do=f"did you mean the zoo's {' or '.join(close)}?"
            if close
            else "write file.py:function, package.module:function, or one of " + ", ".join(zoo.ZOO),
        ) from error
    except Exception as error:
        raise in_user_code(f"{place} cannot be imported", error, where) from error


def arguments_of(
    function: Callable[..., object], overrides: dict[str, str], batch: int | None, spec: str
) -> dict[str, zoo.Size | list[zoo.Size]]:
    """The overrides as arguments, read by the defaults in the function's signature, if it has one."""
    where = f"model {spec!r}"
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # something in C without a signature: let the call decide
        parameters = {"anything": inspect.Parameter("anything", inspect.Parameter.VAR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments: dict[str, zoo.Size | list[zoo.Size]] = {}
    for key, text in overrides.items():
        if key not in parameters and not takes_any:
            close = difflib.get_close_matches(key, list(parameters), n=3)
            raise ModelError(
                f"the function takes no argument {key!r}",
                where=where,
                do=f"did you mean {' or '.join(close)}?"
                if close
                else f"choose among {', '.join(parameters) or 'none: it takes no arguments'}",
            )
        default = parameters[key].default if key in parameters else None
        arguments[key] = argument(text, default, key, spec)
    if batch is not None:
        if "batch" not in parameters and not takes_any:
            raise ModelError(
                f"the function does not take a batch size, and {batch} was asked for",
                where=where,
                do="give it a parameter named batch, or leave the batch size out",
            )
        arguments["batch"] = batch
    return arguments


def in_user_code(what: str, error: Exception, where: str) -> ModelError:
    """A failure in code we were asked to run, with the innermost line that is the user's own."""
    installed = ("site-packages", "dist-packages", f"{sys.base_prefix}/lib", "<frozen", __file__)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in installed)]
    at = f"{own[-1].filename}:{own[-1].lineno}, {own[-1].name}" if own else where
    if isinstance(error, SyntaxError) and error.filename:
        at = f"{error.filename}:{error.lineno}"
    said = str(error).strip() or "no message"
    return ModelError(
        f"{what}: {type(error).__name__}: {said.splitlines()[0]}", where=at, do="make it run on its own first"
    )


def checked(returned: object, function_name: str, where: str) -> Model:
    """`returned` if it is a module and a batch for it."""
    do = "return (module, batch): an nn.Module and the arguments of its forward, a dict by name or a tuple by position"
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        count = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise ModelError(
            f"{function_name}() returned a {type(returned).__name__}{count}, not a pair", where=where, do=do
        )
    module, batch = returned
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{function_name}() returned a {type(module).__name__} in place of a module", where=where, do=do
        )
    is_named = isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch)
    if not is_named and not isinstance(batch, tuple | list | Tensor):
        raise ModelError(f"{function_name}() returned a {type(batch).__name__} in place of a batch", where=where, do=do)
    return module, batch
