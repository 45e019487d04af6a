"""Whose line, and what to say: exceptions from export become refusals, and nodes learn where they come from.

In: an exception raised while a model was captured, or a node of export's graph. Out: a `CaptureError` with the user's
line and what to change, or a `Source`.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache

import torch
from torch import fx, nn
from torch._higher_order_ops.cond import CondOp
from torch.export import ExportedProgram
from torch.nn.modules.batchnorm import _NormBase

from lopsided.errors import CaptureError, LopsidedError
from lopsided.ir.graph import Source

# A tensor's truth was asked for; what for is told by how the user's line begins.
_TRUTH = ("Could not guard on data-dependent", "Boolean value of Tensor")
_ASKED_BY = (
    (
        ("assert",),
        "the model asserts something about a tensor's values",
        "take the assert out of forward; check the batch where it is made",
    ),
    (
        ("while",),
        "the model repeats something until a tensor's values say that it is done",
        "repeat it a fixed number of times, and keep what is done with torch.where",
    ),
    (
        ("for",),
        "the model goes through a tensor in a Python loop, or through as many steps as a tensor says",
        "let every row compute, and choose with a mask; of a model of transformers with experts,"
        ' model.set_experts_implementation("grouped_mm") or "batched_mm"',
    ),
    (
        ("",),
        "the model branches in Python on a tensor's values",
        "compute both ways and choose with torch.where(condition, this, that); leave out a branch that asks whether a"
        " mask selects any row (x[mask].sum() / mask.sum().clamp(min=1) is zero where it selects none); or switch it"
        " off in the model's configuration",
    ),
)

# What to change, by a word in the exception that export raised.
_ADVICE = (
    (
        ("Could not extract specialized integer",),
        "the model needs a whole number that it reads from a tensor (int(), float(), len(), range())",
        "keep it a tensor: x / mask.sum() divides as by a number, rows.shape[0] counts rows that a mask selects, and"
        " x.item() may be computed with and end a slice; for a loop, pass the number to forward as a Python integer",
    ),
    (
        ("DataDependent", "data-dependent", "GuardOnDataDependent", "unbacked", "DynamicOutputShape"),
        "the model makes something whose size depends on a tensor's values",
        "use torch.where or masks of fixed shape, or switch the feature off in the model's configuration",
    ),
    (
        ("FakeTensor.__format__",),
        "the model prints or formats a tensor's values",
        "return what is to be printed, and print it outside of forward",
    ),
    (
        (".numpy() is not supported", "can't convert cuda", "__array__"),
        "the model leaves torch for numpy",
        "write it with torch, or do it to the batch before forward",
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


def explain(model: nn.Module, error: Exception, once: Callable[[], object]) -> LopsidedError:
    """The refusal for an exception from export: what, the user's line, and what to change.

    `once` runs the model as it is: where nothing else is known, it tells a model that fails from one that fails
    while it is traced.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        if isinstance(link, LopsidedError):
            return link if link.where else type(link)(link.what, where=_user_frame(link), do=link.do, **link.facts)
        chain.append(link)
        link = link.__cause__ or link.__context__
    name = model._get_name()
    where = next((place for e in reversed(chain) if (place := _user_frame(e))), name)
    text, cause = f"{type(error).__name__} {error}", _first_line(error)
    if any(words in text for words in _TRUTH):
        line = where.partition(": ")[2]
        what, do = next((what, do) for begins, what, do in _ASKED_BY if line.startswith(begins))
        return CaptureError(f"{name} cannot be captured: {what}", where=where, cause=cause, do=do)
    for words, what, do in _ADVICE:
        if any(word in text for word in words):
            return CaptureError(f"{name} cannot be captured: {what}", where=where, cause=cause, do=do)
    try:
        with _nothing_changed(model):
            once()
    except Exception as failure:
        return CaptureError(
            f"{name} does not run on this batch",
            where=_user_frame(failure) or where,
            cause=_first_line(failure),
            do="make one step of the model alone run on this batch first: its shapes, and what its entries are called",
        )
    return CaptureError(
        f"{name} runs on this batch, and not while it is traced, where tensors have no values",
        where=where,
        cause=cause,
        do="write that line with torch operations alone, or do it to the batch before forward",
    )


def _first_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"


@contextmanager
def _nothing_changed(model: nn.Module) -> Iterator[None]:
    """In here the model may run: its buffers and torch's random numbers are afterwards what they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(), torch.no_grad():
        try:
            yield
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)


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
                do="give it a momentum, for example 0.1, or track_running_stats=False; swa_utils.update_bn, which "
                "takes it away, works on rank 0 with lopsided.whole(pm), or lopsided.whole(averaged.module)",
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
