"""Ops that combine elements along dims: linear ones may be cut along them, the others keep them whole."""

from __future__ import annotations

import torch

from lopsided.ops.op import Ask, Call, Local, Op, Talk, Talking, letters, spec
from lopsided.placement import P


def reduced_dims(call: Call) -> list[int]:
    rank = len(call.shapes[0])
    dim = call.arg("dim")
    if isinstance(dim, int) and not isinstance(dim, bool):
        return [dim % rank] if rank else []
    listed = [d for d in dim if isinstance(d, int)] if isinstance(dim, tuple) else []
    return [d % rank for d in listed] if listed else list(range(rank))


def _reduction(call: Call, names: list[str]) -> list[str]:
    dims = reduced_dims(call)
    if call.arg("keepdim"):
        return ["1" if d in dims else n for d, n in enumerate(names)]
    return [n for d, n in enumerate(names) if d not in dims]


def linear(call: Call) -> str:
    names = letters(len(call.shapes[0]))
    # A sum of booleans counts them: that is a sum over pieces, though not linear in the operand.
    left = spec(names) if call.operands[0].dtype != "bool" else f"f[{spec(names)}]"
    return f"{left} -> {spec(_reduction(call, names))}"


def coupled(call: Call) -> str:
    """Reduces dims in a way that pieces cannot: they stay whole."""
    names = letters(len(call.shapes[0]), reduced_dims(call))
    result = spec(_reduction(call, names))
    return f"f[{spec(names)}] -> {', '.join([result] * len(call.results))}"


def along(call: Call) -> str:
    """Keeps every dim, but mixes along one (`softmax`, `cumsum`, `sort`)."""
    dims = [call.arg("dim")] if isinstance(call.arg("dim"), int) else [-1]
    names = letters(len(call.shapes[0]), dims)
    return f"f[{spec(names)}] -> {', '.join([spec(names)] * len(call.results))}"


def linear_along(call: Call) -> str:
    names = letters(len(call.shapes[0]), [call.arg("dim")])
    return f"{spec(names)} -> {spec(names)}"


def top(call: Call) -> str:
    """`topk`, `kthvalue`, `median`: the dim may change length."""
    rank = len(call.shapes[0])
    dim = call.arg("dim")
    if not isinstance(dim, int):
        return coupled(call)
    names = letters(rank, [dim])
    if len(call.results[0]) < rank:
        return coupled(call)
    out = [n if n.islower() else "Y9" for n in names]
    return f"f[{spec(names)}] -> {', '.join([spec(out)] * len(call.results))}"


def mean_of_piece(local: Local) -> object:
    """A mean of unequal means is wrong: each piece counts by its part of the whole."""
    x = local.tensors[0]
    whole, result = local.call.operands[0].elements, local.call.node.results[0].elements
    outputs = 1
    for size in local.shapes[0]:
        outputs *= size
    if not x.numel():
        return x.sum() + x.new_zeros(local.shapes[0], dtype=local.call.node.results[0].torch_dtype)
    weight = (x.numel() / outputs) / (whole / result)
    mean = local.run()
    return mean if weight == 1 else mean * weight


def _softmax_dim(local: Local) -> tuple[torch.Tensor, int]:
    x = local.tensors[0]
    dtype = local.call.node.results[0].torch_dtype
    return x.to(dtype), local.call.arg("dim") % x.dim()


def _shifted(x: torch.Tensor, dim: int) -> Talking:
    """x less the largest of the whole dim, and its exponentials' sum over the whole dim."""
    # A device without a piece knows no largest element: the lowest number stands for that.
    if x.shape[dim]:
        peak = x.detach().amax(dim, keepdim=True)
    else:
        peak = x.detach().sum(dim, keepdim=True) + torch.finfo(x.dtype).min
    peak = yield Ask(peak, largest=True)
    # A row of -inf alone has the answer NaN, as softmax has; a shift of zero keeps it.
    shifted = x - torch.where(peak.isfinite(), peak, torch.zeros_like(peak))
    total = yield Ask(shifted.exp().sum(dim, keepdim=True), "P", "R")
    return shifted, total


def softmax_cut(local: Local) -> Talking:
    x, dim = _softmax_dim(local)
    shifted, total = yield from _shifted(x, dim)
    return shifted.exp() / total


def log_softmax_cut(local: Local) -> Talking:
    x, dim = _softmax_dim(local)
    shifted, total = yield from _shifted(x, dim)
    return shifted - total.log()


def _cut_dim(how: str, implementation: object) -> object:
    def talks(call: Call) -> list[Talk]:
        rank = len(call.shapes[0])
        if not rank or not call.operands[0].torch_dtype.is_floating_point:
            return []
        return [Talk(letters(rank, [call.arg("dim")])[call.arg("dim") % rank], how, implementation, P)]  # type: ignore[arg-type]

    return talks


_COUPLED = (
    "amax amin max min argmax argmin any all prod var std var_mean std_mean norm linalg_vector_norm logsumexp"
    " count_nonzero aminmax nanmean"
).split()

REDUCE: dict[str, Op] = {
    "aten.sum": Op(linear),
    "aten.nansum": Op(linear),
    "aten.mean": Op(linear, local=mean_of_piece),
    **{f"aten.{name}": Op(coupled) for name in _COUPLED},
    # With two tensors these compare element by element.
    "aten.max.other": Op("f[..., ...] -> ..."),
    "aten.min.other": Op("f[..., ...] -> ..."),
    **{f"aten.{name}": Op(along) for name in ("cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "msort")},
    "aten.cumsum": Op(linear_along),
    **{f"aten.{name}": Op(top) for name in ("topk", "kthvalue", "median", "nanmedian", "mode")},
    "aten.softmax": Op(along, talks=_cut_dim("softmax", softmax_cut)),  # type: ignore[arg-type]
    "aten._softmax": Op(along, talks=_cut_dim("softmax", softmax_cut)),  # type: ignore[arg-type]
    "aten.log_softmax": Op(along, talks=_cut_dim("log_softmax", log_softmax_cut)),  # type: ignore[arg-type]
    "aten._log_softmax": Op(along, talks=_cut_dim("log_softmax", log_softmax_cut)),  # type: ignore[arg-type]
    "aten.cosine_similarity": Op(lambda call: _pairwise(call)),
    "aten.cdist": Op("f[... m K, ... n K] -> ... m n"),
}


def _pairwise(call: Call) -> str:
    rank = max(len(shape) for shape in call.shapes)
    dim = call.arg("dim") % rank
    names = letters(rank, [dim])
    sides = [spec(names[rank - len(shape) :]) for shape in call.shapes]
    return f"f[{', '.join(sides)}] -> {spec([n for d, n in enumerate(names) if d != dim])}"
