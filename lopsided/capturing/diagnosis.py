"""Whose line, and what to say: exceptions from export become refusals, and nodes learn where they come from.

In: an exception raised while a model was captured, or a node of export's graph. Out: a `CaptureError` with the user's
line and what to change, or a `Source`.
"""

from __future__ import annotations

import os
import re
import traceback
from functools import cache, lru_cache

import torch
from torch import fx, nn

from lopsided.errors import CaptureError, LopsidedError
from lopsided.ir.graph import Source

# What to change, by a word in the exception that export raised.
_ADVICE = (
    (
        ("DataDependent", "data-dependent", "GuardOnDataDependent", "unbacked", "DynamicOutputShape"),
        "the model decides something in Python by looking at a tensor's values",
        "use torch.where or masks in place of the branch or the data-sized tensor, or switch the feature off"
        " in the model's configuration",
    ),
    (
        ("UnsupportedOperator", "NotImplementedError"),
        "the model calls an op that cannot be traced",
        "replace the op, or register a fake implementation for it with torch.library.register_fake",
    ),
    (
        ("DeviceMismatch", "different devices"),
        "the model meets tensors on different devices",
        "put the model, the batch and the tensors of loss_fn on one device, or all on meta",
    ),
    (
        ("fake tensor in the exported program constant",),
        "the model differentiates inside its forward pass, or reads .data of a parameter",
        "compute without torch.autograd.grad and .data in forward",
    ),
    (
        ("mutat", "in-place"),
        "the model changes a tensor in place in a way that cannot be traced",
        "write the update as a new tensor",
    ),
    (
        ("assigned during export",),
        "the model changes its own attributes while it runs",
        "keep changing state in registered buffers, or compute it without storing it on the module",
    ),
)


def explain(model: nn.Module, error: Exception) -> LopsidedError:
    """The refusal for an exception from export: what, the user's line, and what to change."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        if isinstance(link, LopsidedError):
            return link if link.where else type(link)(link.what, where=_user_frame(link), do=link.do, **link.facts)
        chain.append(link)
        link = link.__cause__ or link.__context__
    where = next((place for e in reversed(chain) if (place := _user_frame(e))), model._get_name())
    said = str(error).strip().splitlines()
    text = f"{type(error).__name__} {error}"
    cause = f"{type(error).__name__}: {said[0] if said else ''}"
    for words, what, do in _ADVICE:
        if any(word in text for word in words):
            return CaptureError(f"{model._get_name()} cannot be captured: {what}", where=where, cause=cause, do=do)
    return CaptureError(
        f"{model._get_name()} cannot be captured",
        where=where,
        cause=cause,
        do="check that model(**batch) runs; if it does, it takes another path while it is traced, and misses something"
        " there that the batch could give it",
    )


def _user_frame(error: BaseException) -> str:
    """The innermost line of the traceback that is the user's: not torch's and not ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_internal(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"
    return ""


_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_ZOO = os.path.join(_HERE, "zoo") + os.sep


@cache
def _is_internal(file: str) -> bool:
    if file.startswith(_ZOO):
        return False
    return file.startswith((_TORCH, _HERE, "<")) or f"{os.sep}contextlib.py" in file


_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


@lru_cache(maxsize=65536)
def _frame(trace: str) -> tuple[str, int, str]:
    frames = [(file, int(line), function) for file, line, function in _FRAME.findall(trace)]
    return next((f for f in reversed(frames) if not _is_internal(f[0])), frames[-1] if frames else ("", 0, ""))


def source_of(node: fx.Node) -> Source:
    """The user's line a node of export's graph comes from."""
    file, line, function = _frame(node.meta.get("stack_trace") or "")
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return Source(file, line, function, path.removeprefix("model").removeprefix("."))
