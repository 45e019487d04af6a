"""Samples of reductions: over one dim, several, all, kept or not; scans, orders, distances."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample, sample


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _sums(draw)
    yield from _extremes(draw)
    yield from _moments_and_norms(draw)
    yield from _softmaxes(draw)
    yield from _along(draw)
    yield from _distances(draw)


def _sums(draw: Draw) -> Iterator[Sample]:
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


def _extremes(draw: Draw) -> Iterator[Sample]:
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


def _moments_and_norms(draw: Draw) -> Iterator[Sample]:
    for name in ("var", "std", "var_mean", "std_mean"):
        yield sample(f"aten.{name}.default", draw.real(5, 4), False)
        yield sample(f"aten.{name}.dim", draw.real(5, 4), [1])
        yield sample(f"aten.{name}.correction", draw.real(5, 4, 6), [0, 2], correction=0, keepdim=True)
    yield sample("aten.norm.Scalar", draw.real(5, 4), 2)
    yield sample("aten.norm.ScalarOpt_dim", draw.real(5, 4), 1, [1], True)
    yield sample("aten.norm.ScalarOpt_dtype", draw.real(5, 4), 2, dtype=torch.float64)
    yield sample("aten.norm.ScalarOpt_dim_dtype", draw.real(5, 4), 2, [0], False, dtype=torch.float64)
    for order in (2, 1, 3, math.inf, 0):
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


def _softmaxes(draw: Draw) -> Iterator[Sample]:
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


def _along(draw: Draw) -> Iterator[Sample]:
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


def _distances(draw: Draw) -> Iterator[Sample]:
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
