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
from torch._higher_order_ops.cond import CondOp
from torch.export import ExportedProgram
from torch.nn.modules.batchnorm import _NormBase

from lopsided.errors import CaptureError, LopsidedError
from lopsided.ir.graph import Source

# What to change, by a word in the exception that export raised.
_ADVICE = (
    (
        ("specialized integer",),
        "Python needs a number that only the data has (int(), float(), len() or range() of what a tensor says)",
        "keep it a tensor: x / mask.sum() divides by a tensor as by a number, rows.shape[0] counts rows that a mask "
        "selects, and .item() of a tensor may be computed with",
    ),
    (
        ("Could not guard on data-dependent",),
        "a branch in Python (if, while, and, or) depends on a tensor's values",
        "compute both sides and choose by torch.where(condition, a, b); where the branch asks whether a mask selects "
        "any row, leave it out: x[mask].sum() / mask.sum().clamp(min=1) is zero where it selects none",
    ),
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


# Calls that a graph of pure ops cannot have, by a part of the name: what they do, and what to write in their place.
_REFUSED_CALLS = (
    (
        "embedding_renorm",
        "embedding(max_norm=...) scales rows of its table while it reads them",
        "leave max_norm out, and scale the rows read (F.normalize) or the table after optimizer.step()",
    ),
    (
        "istft",
        "torch.istft looks at the values of its window",
        "write it as torch.fft.irfft of the frames times the window, F.fold, and a division by the folded square of the"
        " window",
    ),
    (
        "_make_dual",
        "the model differentiates inside its forward pass, by torch.func.jvp or forward-mode duals",
        "write the directional derivative out, or take it outside of the model",
    ),
)


def refuse_calls(exported: ExportedProgram) -> None:
    """Refuse what export traces and no graph of pure ops can say, with the user's line."""
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            found = _refused(node) if node.op == "call_function" else None
            if found is not None:
                what, do = found
                raise CaptureError(what, where=str(source_of(node)), do=do)


def _refused(node: fx.Node) -> tuple[str, str] | None:
    """What a call does that cannot be captured, and what to write in its place."""
    name = str(node.target)
    for part, what, do in _REFUSED_CALLS:
        if part in name:
            return what, do
    if isinstance(node.target, CondOp):
        return (
            "torch.cond takes one of two branches by a tensor's value",
            "compute both, and choose by torch.where",
        )
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if (dict(zip(names, node.args, strict=False)) | node.kwargs).get("sparse") is True:
        return (
            "an embedding with sparse=True has a sparse gradient",
            "build it with sparse=False, and give the table to an optimizer for dense gradients",
        )
    return None


def refuse_modules(model: nn.Module) -> None:
    """Refuse modules whose forward pass reads a number from a buffer, which changes from step to step."""
    for name, part in model.named_modules():
        if isinstance(part, _NormBase) and part.training and part.track_running_stats and part.momentum is None:
            raise CaptureError(
                f"{part._get_name()}(momentum=None) averages over all steps so far, and reads from a buffer how many",
                where=f"module {name or model._get_name()}",
                do="give it a momentum, for example 0.1, or track_running_stats=False",
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
