"""Ops that combine elements along dims: linear ones may be cut along them, others keep them whole or talk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lopsided.ir.placement import I, P, Placement, R
from lopsided.ops.op import (
    Ask,
    Call,
    Implementation,
    Local,
    Op,
    Talk,
    Talking,
    Talks,
    accumulating,
    all_whole,
    dim_of,
    dims_of,
    entries,
    letters,
    number,
    spec,
)
from lopsided.ops.sample import Draw, Sample, sample

# Lines


def _reduction(call: Call, names: Sequence[str], dims: Sequence[int]) -> str:
    if call.arg("keepdim"):
        return spec(["1" if d in dims else name for d, name in enumerate(names)])
    return spec([name for d, name in enumerate(names) if d not in dims])


def linear(call: Call) -> str:
    names = letters(len(call.shapes[0]))
    # A sum of booleans counts them: that is a sum over pieces, though not linear in the operand.
    left = spec(names) if call.operands[0].dtype != "bool" else f"f[{spec(names)}]"
    return f"{left} -> {_reduction(call, names, dims_of(call))}"


def counted(call: Call) -> str:
    """A sum over pieces of something that is not linear in the operand."""
    names = letters(len(call.shapes[0]))
    return f"f[{spec(names)}] -> {_reduction(call, names, dims_of(call))}"


def coupled(call: Call) -> str:
    """Reduces dims in a way that pieces cannot: they stay whole."""
    dims = dims_of(call)
    names = letters(len(call.shapes[0]), dims)
    return f"f[{spec(names)}] -> {', '.join([_reduction(call, names, dims)] * len(call.results))}"


def vector_norm(call: Call) -> str:
    """A sum of absolute values, or a count, adds up over pieces; other norms do not."""
    return counted(call) if _order(call) in (0, 1) else coupled(call)


def along(call: Call) -> str:
    """Keeps every dim, but mixes along one (`softmax`, `sort`)."""
    names = spec(letters(len(call.shapes[0]), [_dim_or(call, -1)]))
    return f"f[{names}] -> {', '.join([names] * len(call.results))}"


def _dim_or(call: Call, otherwise: int) -> int:
    dim = call.arg("dim")
    return dim if isinstance(dim, int) else otherwise


def along_first(call: Call) -> str:
    names = spec(letters(len(call.shapes[0]), [0]))
    return f"f[{names}] -> {names}"


def linear_along(call: Call) -> str:
    names = spec(letters(len(call.shapes[0]), [call.arg("dim")]))
    return f"{names} -> {names}" if call.operands[0].dtype != "bool" else f"f[{names}] -> {names}"


def along_all_but(call: Call) -> str:
    """`renorm`: every slice of one dim by itself."""
    rank = len(call.shapes[0])
    names = spec(letters(rank, [d for d in range(rank) if d != dim_of(call)]))
    return f"f[{names}] -> {names}"


def top(call: Call) -> str:
    """`topk`, `kthvalue`, `median`: the dim may change length."""
    rank, dim = len(call.shapes[0]), call.arg("dim")
    if not isinstance(dim, int) or len(call.results[0]) < rank:
        return coupled(call)
    names = letters(rank, [dim])
    out = spec([name if name.islower() else "Y9" for name in names])
    return f"f[{spec(names)}] -> {', '.join([out] * len(call.results))}"


def quantile(call: Call) -> str:
    dims = dims_of(call)
    names = letters(len(call.shapes[0]), dims)
    out = _reduction(call, names, dims)
    if not call.is_tensor("q"):
        return f"f[{spec(names)}] -> {out}"
    if not call.shapes[1]:
        return f"f[{spec(names)}, ()] -> {out}"
    return f"f[{spec(names)}, q9] -> {'q9' if out == '()' else f'q9 {out}'}"


def differences(call: Call) -> str:
    """`diff`: linear, and the dim changes length."""
    dim, names = dim_of(call), letters(len(call.shapes[0]), [dim_of(call)])
    around = [spec([*names[:dim], f"X{k}", *names[dim + 1 :]]) for k in range(len(call.operands))]
    return f"{' + '.join(around)} -> {spec([*names[:dim], 'Y9', *names[dim + 1 :]])}"


def trapezoid(call: Call) -> str:
    """Linear in the heights and in the places, which broadcast to them."""
    dim, names = dim_of(call), letters(len(call.shapes[0]), [dim_of(call)])
    places = [spec(names[len(names) - len(shape) :]) for shape in call.shapes[1:]]
    out = names[:dim] + (["Y9"] if "cumulative" in call.node.op else []) + names[dim + 1 :]
    return f"{' * '.join([spec(names), *places])} -> {spec(out)}"


def histogram(call: Call) -> str:
    """With bounds given, counts add up over pieces; without, the bounds are those of all elements."""
    bounded = number(call.arg("min")) != number(call.arg("max"))
    rank = len(call.shapes[0])
    return f"f[{spec(letters(rank, () if bounded else range(rank)))}] -> Y9"


def pairwise(call: Call) -> str:
    rank = max(len(shape) for shape in call.shapes)
    dim = _dim_or(call, -1) % rank
    names = letters(rank, [dim])
    sides = [spec(names[rank - len(shape) :]) for shape in call.shapes]
    return f"f[{', '.join(sides)}] -> {_reduction(call, names, [dim])}"


def distances(call: Call) -> str:
    """Distances by absolute values are sums over features; by others, features stay whole."""
    k = "k" if call.arg("p") == 1 else "K"
    return f"f[... m {k}, ... n {k}] -> ... m n"


def distance(call: Call) -> str:
    rank = max(len(shape) for shape in call.shapes)
    names = letters(rank, range(rank))
    return f"f[{', '.join(spec(names[rank - len(shape) :]) for shape in call.shapes)}] -> ()"


# Pieces


def mean_of_piece(local: Local) -> object:
    """A mean of unequal means is wrong: each piece counts by its part of the whole."""
    x, result = local.tensors[0], local.call.node.results[0]
    if not x.numel():
        return local.as_result(x.sum() + x.new_zeros(local.shapes[0], dtype=result.torch_dtype))
    weight = (x.numel() / math.prod(local.shapes[0])) / (local.call.operands[0].elements / result.elements)
    mean = torch.as_tensor(local.run())
    return mean if weight == 1 else mean * weight


# Talks


def _operand(local: Local) -> Tensor:
    """Rounded as the op itself rounds it where it is given a dtype, then in a dtype to add up in."""
    return accumulating(local.as_result(local.tensors[0]))


def _peak(x: Tensor, dims: list[int]) -> Talking:
    """The largest element along dims, of all devices."""
    if all(x.shape[d] for d in dims):
        largest = x.detach().amax(dims, keepdim=True)
    else:
        # A device without a piece knows no largest element: what is lower than all stands for that.
        largest = x.detach().sum(dims, keepdim=True) - math.inf
    return (yield Ask(largest, largest=True))


def _shift(x: Tensor, dims: list[int]) -> Talking:
    """The largest element along dims as far as it is finite: a row of -inf alone has the answer NaN, as softmax has,
    and a shift of zero keeps it."""
    peak = yield from _peak(x, dims)
    return torch.where(peak.isfinite(), peak, torch.zeros_like(peak))


def shifted(x: Tensor, dims: list[int], to: Placement = R) -> Talking:
    """x less its largest along whole dims, the sum of exponentials over them as `to`, and the shift."""
    peak = yield from _shift(x, dims)
    less = x - peak
    total = yield Ask(less.exp().sum(dims, keepdim=True), P, to)
    return less, total, peak


def softmax_cut(local: Local) -> Talking:
    less, total, _ = yield from shifted(_operand(local), [dim_of(local.call)])
    return local.as_result(less.exp() / total)


def safe_softmax_cut(local: Local) -> Talking:
    """Rows of -inf alone become zeros."""
    less, total, _ = yield from shifted(_operand(local), [dim_of(local.call)])
    return local.as_result(less.exp() / torch.where(total == 0, torch.ones_like(total), total))


def log_softmax_cut(local: Local) -> Talking:
    less, total, _ = yield from shifted(_operand(local), [dim_of(local.call)])
    return local.as_result(less - total.log())


def logsumexp_cut(local: Local) -> Talking:
    _, total, peak = yield from shifted(_operand(local), dims_of(local.call), I)
    return local.as_result(total.log() + peak).reshape(local.shapes[0])


def extreme_cut(local: Local) -> Talking:
    """The largest or smallest; its gradient goes in equal parts to all elements that are it, anywhere."""
    x, dims = accumulating(local.tensors[0]), dims_of(local.call)
    sign = -1 if "min" in local.call.node.op else 1
    peak = sign * (yield from _peak(sign * x, dims))
    here = x == peak
    count = yield Ask(here.sum(dims, keepdim=True).to(x.dtype), P, R)
    part = (torch.where(here, x, torch.zeros_like(x)) / count).sum(dims, keepdim=True)
    value = yield Ask(part, P, I)
    # Dividing and adding up again may round: the value itself is known exactly.
    exact = torch.where(value == peak, value, value + (peak - value).detach())
    return local.as_result(exact).reshape(local.shapes[0])


def vector_norm_cut(local: Local) -> Talking:
    x, dims, order = _operand(local), dims_of(local.call), _order(local.call)
    powers = x.abs().pow(order) if order > 1 else _power(x, order)
    total = yield Ask(powers.sum(dims, keepdim=True), P, I)
    return local.as_result(_power(total, 1 / order)).reshape(local.shapes[0])


def _power(x: Tensor, order: float) -> Tensor:
    """|x| to a power below one: its slope at zero is infinite, and torch takes it for zero."""
    is_zero = x == 0
    elsewhere = torch.where(is_zero, torch.ones_like(x), x).abs().pow(order)
    return torch.where(is_zero, x.detach().abs().pow(order), elsewhere)


def _order(call: Call) -> float:
    given = call.arg("ord") if "ord" in call.given() else call.arg("p")
    return 2.0 if given is None else number(given)


def variance_cut(local: Local) -> Talking:
    """`var`, `std` and those with the mean beside."""
    x, dims, call = accumulating(local.tensors[0]), dims_of(local.call), local.call
    count = math.prod(call.shapes[0][d] for d in dims)
    unbiased, correction = call.arg("unbiased"), call.arg("correction")
    freedom = count - (float(unbiased) if unbiased is not None else 1 if correction is None else number(correction))
    shift: Tensor | float = 0.0
    if "std" in call.node.op:
        # Of a constant row the deviation is exactly zero. Its mean may be rounded, that of its differences is not.
        shift = yield from _shift(x, dims)
        x = x - shift
    total = x.sum(dims, keepdim=True)
    mean = (yield Ask(total, P, R)) / count
    spread = (yield Ask((x - mean).square().sum(dims, keepdim=True), P, I)) / freedom
    if "std" in call.node.op:
        spread = _power(spread, 0.5)
    spread = local.as_result(spread).reshape(local.shapes[0])
    if len(local.shapes) == 1:
        return spread
    mean = (yield Ask(total, P, I)) / count + shift
    return spread, local.as_result(mean, 1).reshape(local.shapes[1])


def cumulative_sum_cut(local: Local) -> Talking:
    """Each device adds what the devices before it sum to."""
    x, dim = _operand(local), dim_of(local.call)
    total = x.sum(dim, keepdim=True)
    mine = [total if d == local.device else torch.zeros_like(total) for d in range(len(local.pieces))]
    totals = yield Ask(torch.stack(mine), P, R)
    return local.as_result(x.cumsum(dim) + totals[: local.device].sum(0))


def _talks(
    how: str,
    implementation: Implementation,
    dims: Callable[[Call], Sequence[int]],
    *,
    in_one_block: bool = False,
) -> Talks:
    """Dims that stay whole may be cut after all, by talking; results without them are the same everywhere."""

    def talks(call: Call) -> list[Talk]:
        if not call.shapes[0]:
            return []
        names = letters(len(call.shapes[0]), dims(call))
        return [Talk(names[d], how, implementation, I, in_one_block) for d in sorted(set(dims(call)))]

    return talks


def _of_reals(talks: Talks) -> Talks:
    return lambda call: talks(call) if call.operands[0].torch_dtype.is_floating_point else []


def _along_dim(how: str, implementation: Implementation) -> Talks:
    return _of_reals(_talks(how, implementation, lambda call: [dim_of(call)]))


def _over_dims(how: str, implementation: Implementation) -> Talks:
    return _of_reals(_talks(how, implementation, dims_of))


def _extreme_talks(call: Call) -> Sequence[Talk]:
    """None for an op that gives places too (`max.dim`): those would have to travel with the values."""
    return _over_dims("extreme", extreme_cut)(call) if len(call.results) == 1 else []


def _norm_talks(call: Call) -> Sequence[Talk]:
    special = _order(call) in (0, 1, math.inf, -math.inf)
    return [] if special else _over_dims("vector_norm", vector_norm_cut)(call)


_SOFTMAX = Op(along, talks=_along_dim("softmax", softmax_cut))
_LOG_SOFTMAX = Op(along, talks=_along_dim("log_softmax", log_softmax_cut))
_LOGSUMEXP = Op(coupled, talks=_over_dims("logsumexp", logsumexp_cut))
_COUPLED = "argmax argmin any all prod aminmax nanmean linalg_norm linalg_matrix_norm frobenius_norm nuclear_norm"

REDUCE: dict[str, Op] = {
    "aten.sum": Op(linear),
    "aten.mean": Op(linear, local=mean_of_piece),
    "aten.nansum": Op(counted),
    "aten.count_nonzero": Op(counted),
    "aten.histc": Op(histogram),
    **entries(_COUPLED, Op(coupled)),
    **entries("amax amin max min", Op(coupled, talks=_extreme_talks)),
    # With two tensors these compare element by element.
    "aten.max.other": Op("f[..., ...] -> ..."),
    "aten.min.other": Op("f[..., ...] -> ..."),
    **entries("var std var_mean std_mean", Op(coupled, talks=_over_dims("variance", variance_cut))),
    "aten.norm": Op(vector_norm, talks=_norm_talks),
    "aten.linalg_vector_norm": Op(vector_norm, talks=_norm_talks),
    "aten.logsumexp": _LOGSUMEXP,
    "aten.special_logsumexp": _LOGSUMEXP,
    **entries("cumprod cummax cummin logcumsumexp sort argsort", Op(along)),
    "aten.msort": Op(along_first),
    "aten.renorm": Op(along_all_but),
    "aten.cumsum": Op(
        linear_along,
        talks=_talks("cumulative_sum", cumulative_sum_cut, lambda call: [dim_of(call)], in_one_block=True),
    ),
    "aten.diff": Op(differences),
    "aten.trapezoid": Op(trapezoid),
    "aten.cumulative_trapezoid": Op(trapezoid),
    **entries("topk kthvalue median nanmedian mode", Op(top)),
    "aten.quantile": Op(quantile),
    "aten.nanquantile": Op(quantile),
    **entries("softmax _softmax special_softmax", _SOFTMAX),
    **entries("log_softmax _log_softmax special_log_softmax", _LOG_SOFTMAX),
    "aten._safe_softmax": Op(along, talks=_along_dim("softmax", safe_softmax_cut)),
    "aten.cosine_similarity": Op(pairwise),
    "aten.pairwise_distance": Op(pairwise),
    "aten.dist": Op(distance),
    "aten.cdist": Op(distances),
    "aten.pdist": Op("f[M K] -> N"),
    "aten.cov": Op(all_whole),
    "aten.corrcoef": Op(all_whole),
}


# Samples


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _samples_of_sums(draw)
    yield from _samples_of_extremes(draw)
    yield from _samples_of_moments_and_norms(draw)
    yield from _samples_of_softmaxes(draw)
    yield from _samples_of_along(draw)
    yield from _samples_of_distances(draw)


def _samples_of_sums(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.sum.default", draw.real(5, 4))
    yield sample("aten.sum.default", draw.truths(5, 4))
    yield sample("aten.sum.dim_IntList", draw.real(5, 4, 6), [0, -1], True)
    yield sample("aten.sum.dim_IntList", draw.real(5, 4), None)
    yield sample("aten.sum.dim_IntList", draw.real(5, 4), [1])
    yield sample("aten.sum.default", draw.real())
    yield sample("aten.nansum.default", draw.with_nans(5, 4), [0])
    yield sample("aten.nansum.default", draw.with_nans(5, 4))
    yield sample("aten.mean.default", draw.real(5, 4))
    yield sample("aten.mean.dim", draw.real(5, 4, 6), [1], True)
    yield sample("aten.mean.dim", draw.real(5, 4, 6), [0, 2])
    yield sample("aten.mean.dim", draw.below(9, 5, 4), [0], dtype=torch.float64)
    yield sample("aten.nanmean.default", draw.with_nans(5, 4), [0])
    yield sample("aten.prod.default", draw.real(5, 4))
    yield sample("aten.prod.dim_int", draw.real(5, 4), 1, True)
    yield sample("aten.count_nonzero.default", draw.below(3, 5, 4))
    yield sample("aten.count_nonzero.dim_IntList", draw.below(3, 5, 4), [0])
    yield sample("aten.histc.default", draw.constant(5, 4), 7, -1, 1)
    yield sample("aten.histc.default", draw.constant(5, 4), 7)


def _samples_of_extremes(draw: Draw) -> Iterator[Sample]:
    for name in ("amax", "amin"):
        yield sample(f"aten.{name}.default", draw.real(5, 4), [1], True)
        yield sample(f"aten.{name}.default", draw.real(5, 4))
        yield sample(f"aten.{name}.default", draw.below(3, 5, 4).double().requires_grad_(), [0])
    for name in ("max", "min"):
        yield sample(f"aten.{name}.default", draw.real(5, 4))
        yield sample(f"aten.{name}.dim", draw.real(5, 4), 1)
        yield sample(f"aten.{name}.other", draw.real(5, 4), draw.real(4))
    for name in ("argmax", "argmin"):
        yield sample(f"aten.{name}.default", draw.constant(5, 4), 0, True)
        yield sample(f"aten.{name}.default", draw.constant(5, 4))
    for name in ("any", "all"):
        truths = draw.truths(5, 4) if name == "all" else draw.truths(5, 4) & draw.truths(5, 4)
        yield sample(f"aten.{name}.default", truths)
        yield sample(f"aten.{name}.dim", truths, 1)
        yield sample(f"aten.{name}.dims", truths, [0], True)
    yield sample("aten.aminmax.default", draw.real(5, 4), dim=1)
    yield sample("aten.aminmax.default", draw.real(5, 4))


def _samples_of_moments_and_norms(draw: Draw) -> Iterator[Sample]:
    for name in ("var", "std", "var_mean", "std_mean"):
        yield sample(f"aten.{name}.default", draw.real(5, 4), False)
        yield sample(f"aten.{name}.dim", draw.real(5, 4), [1])
        yield sample(f"aten.{name}.correction", draw.real(5, 4, 6), [0, 2], correction=0, keepdim=True)
    yield sample("aten.norm.Scalar", draw.real(5, 4), 2)
    yield sample("aten.norm.ScalarOpt_dim", draw.real(5, 4), 1, [1], True)
    yield sample("aten.norm.ScalarOpt_dtype", draw.real(5, 4), 2, dtype=torch.float64)
    yield sample("aten.norm.ScalarOpt_dim_dtype", draw.real(5, 4), 2, [0], False, dtype=torch.float64)
    for order in (2, 1, 3, 0.5, -1, math.inf, 0):
        yield sample("aten.linalg_vector_norm.default", draw.real(5, 4), order, [-1], True)
    yield sample("aten.linalg_vector_norm.default", draw.real(5, 4))
    yield sample("aten.linalg_norm.default", draw.real(5, 4), None, [1])
    yield sample("aten.linalg_norm.default", draw.real(5, 4))
    yield sample("aten.linalg_norm.ord_str", draw.real(3, 5, 4), "nuc", [1, 2])
    yield sample("aten.linalg_matrix_norm.default", draw.real(3, 5, 4), 2)
    yield sample("aten.linalg_matrix_norm.str_ord", draw.real(3, 5, 4), keepdim=True)
    yield sample("aten.frobenius_norm.dim", draw.real(3, 5, 4), [0, 1])
    yield sample("aten.nuclear_norm.default", draw.real(5, 4))
    yield sample("aten.nuclear_norm.dim", draw.real(3, 5, 4), [1, 2])
    yield sample("aten.renorm.default", draw.real(5, 4, 6), 2, 1, 0.5)
    yield sample("aten.trapezoid.dx", draw.real(5, 4), dx=0.5)
    yield sample("aten.trapezoid.x", draw.real(5, 4), draw.real(5, 4), dim=0)
    yield sample("aten.cumulative_trapezoid.dx", draw.real(5, 4), dim=0)
    yield sample("aten.cumulative_trapezoid.x", draw.real(5, 4), draw.real(4))


def _samples_of_softmaxes(draw: Draw) -> Iterator[Sample]:
    for name in ("softmax", "log_softmax"):
        yield sample(f"aten.{name}.int", draw.real(5, 4), -1)
        yield sample(f"aten.{name}.int", draw.real(5, 4, 6), 1, torch.float64)
        yield sample(f"aten._{name}.default", draw.real(5, 4), 0, False)
        yield sample(f"aten.special_{name}.default", draw.real(5, 4), 0)
    yield sample("aten._safe_softmax.default", draw.real(5, 4), 1)
    scores = draw.constant(5, 4)
    scores[1, :2], scores[3] = -math.inf, -math.inf
    yield sample("aten._safe_softmax.default", scores, 1)
    yield sample("aten.softmax.int", draw.real(5, 4).detach().masked_fill(draw.truths(5, 4), -math.inf), 0)
    for name in ("logsumexp", "special_logsumexp"):
        yield sample(f"aten.{name}.default", draw.real(5, 4), [1])
        yield sample(f"aten.{name}.default", draw.real(5, 4, 6), [0, 2], True)


def _samples_of_along(draw: Draw) -> Iterator[Sample]:
    for name in ("cumprod", "logcumsumexp", "cumsum", "cummax", "cummin"):
        yield sample(f"aten.{name}.default", draw.real(5, 4), 1)
    yield sample("aten.cumsum.default", draw.truths(5, 4), 0)
    for name in ("sort", "argsort"):
        yield sample(f"aten.{name}.default", draw.real(5, 4))
        yield sample(f"aten.{name}.stable", draw.real(5, 4), stable=True, dim=0, descending=True)
    yield sample("aten.msort.default", draw.real(5, 4))
    yield sample("aten.topk.default", draw.real(5, 7), 3)
    yield sample("aten.topk.default", draw.real(7, 5), 2, 0)
    yield sample("aten.kthvalue.default", draw.real(5, 4), 2, 0)
    for name in ("median", "nanmedian"):
        yield sample(f"aten.{name}.default", draw.real(5, 4))
        yield sample(f"aten.{name}.dim", draw.real(5, 4), 1, True)
    yield sample("aten.mode.default", draw.below(3, 5, 4))
    for name in ("quantile", "nanquantile"):
        yield sample(f"aten.{name}.default", draw.real(5, 4), torch.tensor([0.2, 0.5, 0.7], dtype=torch.float64), 1)
        yield sample(f"aten.{name}.scalar", draw.real(5, 4), 0.3, 0, True)
        yield sample(f"aten.{name}.scalar", draw.real(5, 4), 0.3)
    yield sample("aten.diff.default", draw.real(5, 4))
    yield sample("aten.diff.default", draw.real(5, 4), 2, 0)
    yield sample("aten.diff.default", draw.real(5, 4), 1, 1, draw.real(5, 1))


def _samples_of_distances(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.cosine_similarity.default", draw.real(5, 4), draw.real(5, 4))
    yield sample("aten.cosine_similarity.default", draw.real(5, 1, 4), draw.real(6, 4), -1)
    yield sample("aten.pairwise_distance.default", draw.real(5, 4), draw.real(5, 4))
    yield sample("aten.pairwise_distance.default", draw.real(5, 4), draw.real(4), keepdim=True)
    yield sample("aten.cdist.default", draw.real(3, 5, 4), draw.real(3, 6, 4))
    yield sample("aten.cdist.default", draw.real(5, 4), draw.real(6, 4), 1.0)
    yield sample("aten.pdist.default", draw.real(5, 4))
    yield sample("aten.dist.default", draw.real(5, 4), draw.real(4))
    yield sample("aten.cov.default", draw.real(5, 4))
    yield sample("aten.corrcoef.default", draw.real(5, 4))
