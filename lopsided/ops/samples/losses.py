"""Samples of losses: every reduction, ignored rows, class weights, smoothing, probabilities, space."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample, sample

_NONE, _MEAN, _SUM = 0, 1, 2
_REDUCTIONS = (_NONE, _MEAN, _SUM)


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _elementwise(draw)
    yield from _cross_entropy(draw)
    yield from _rows(draw)
    yield from _ctc(draw)


def _elementwise(draw: Draw) -> Iterator[Sample]:
    for reduction in _REDUCTIONS:
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"):
            yield sample(f"aten.{name}.default", draw.real(5, 4), draw.positive(5, 4), reduction)
        signs = draw.below(2, 5, 4).double() * 2 - 1
        yield sample("aten.soft_margin_loss.default", draw.real(5, 4), signs, reduction)
        yield sample("aten.hinge_embedding_loss.default", draw.real(5, 4), signs, 1.0, reduction)
        yield sample("aten.margin_ranking_loss.default", draw.real(5), draw.real(5), signs[:, 0], 0.3, reduction)
        yield sample(
            "aten.binary_cross_entropy.default",
            draw.positive(5, 4),
            draw.constant(5, 4, low=0, high=1),
            None,
            reduction,
        )
        yield sample(
            "aten.binary_cross_entropy_with_logits.default",
            *(
                draw.real(5, 4),
                draw.positive(5, 4),
                draw.positive(4, grad=False),
                draw.positive(5, 1, grad=False),
            ),
            reduction,
        )
        yield sample(
            "aten.poisson_nll_loss.default",
            draw.real(5, 4),
            draw.positive(5, 4),
            True,
            False,
            1e-8,
            reduction,
        )
    yield sample("aten.mse_loss.default", draw.real(5, 4), draw.real(4))
    yield sample(
        "aten.binary_cross_entropy.default",
        draw.positive(5, 4),
        draw.truths(5, 4).double(),
        draw.constant(4, low=0),
    )
    yield sample("aten.kl_div.default", draw.real(5, 4), draw.real(5, 4), log_target=True)


def _targets(draw: Draw, *shape: int, classes: int, ignored: int | None) -> Tensor:
    target = draw.below(classes, *shape)
    return target if ignored is None else target.masked_fill(draw.below(3, *shape) == 0, ignored)


def _cross_entropy(draw: Draw) -> Iterator[Sample]:
    cross_entropy = "aten.cross_entropy_loss.default"
    for reduction, ignored, smoothing, weighted in itertools.product(
        _REDUCTIONS, (None, 2, -100), (0.0, 0.2), (False, True)
    ):
        weight = draw.positive(6, grad=False) if weighted else None
        target = _targets(draw, 5, classes=6, ignored=ignored)
        number = -100 if ignored is None else ignored
        yield sample(cross_entropy, draw.real(5, 6), target, weight, reduction, number, smoothing)
    for reduction, smoothing, weighted in itertools.product(_REDUCTIONS, (0.0, 0.2), (False, True)):
        weight = draw.positive(6, grad=False) if weighted else None
        yield sample(cross_entropy, draw.real(5, 6), draw.positive(5, 6), weight, reduction, -100, smoothing)
    for reduction in _REDUCTIONS:
        target = _targets(draw, 3, 5, classes=4, ignored=-100)
        weight = draw.positive(4, grad=False)
        yield sample(cross_entropy, draw.real(3, 4, 5), target, weight, reduction, -100, 0.1)
        yield sample(cross_entropy, draw.real(3, 4, 5), draw.positive(3, 4, 5), None, reduction)
        yield sample(cross_entropy, draw.real(6), draw.below(6), None, reduction)
        for name in ("nll_loss", "nll_loss_nd"):
            target = _targets(draw, 5, classes=6, ignored=-100)
            yield sample(f"aten.{name}.default", draw.real(5, 6), target, draw.positive(6, grad=False), reduction)
        for name in ("nll_loss2d", "nll_loss_nd"):
            target = _targets(draw, 3, 2, 5, classes=4, ignored=1)
            yield sample(f"aten.{name}.default", draw.real(3, 4, 2, 5), target, None, reduction, 1)


def _rows(draw: Draw) -> Iterator[Sample]:
    for reduction in _REDUCTIONS:
        signs = torch.tensor([1, -1, 1, -1, -1])
        yield sample("aten.cosine_embedding_loss.default", draw.real(5, 4), draw.real(5, 4), signs, 0.1, reduction)
        yield sample("aten.cosine_embedding_loss.default", draw.real(4), draw.real(4), torch.tensor(1), 0.1, reduction)
        triple = (draw.real(5, 4), draw.real(5, 4), draw.real(5, 4))
        yield sample("aten.triplet_margin_loss.default", *triple, reduction=reduction)
        weight = draw.positive(4, grad=False)
        target = draw.below(4, 5)
        yield sample("aten.multi_margin_loss.default", draw.real(5, 4), target, 1, 1, weight, reduction)
        labels = torch.tensor([[0, 2, -1, -1], [1, -1, -1, -1], [3, 1, 0, -1], [2, -1, -1, -1], [0, 1, 2, 3]])
        yield sample("aten.multilabel_margin_loss.default", draw.real(5, 4), labels, reduction)


def _ctc(draw: Draw) -> Iterator[Sample]:
    for reduction in _REDUCTIONS:
        log_p = draw.real(7, 5, 4).detach().log_softmax(-1).requires_grad_()
        inputs, targets = torch.tensor([7, 6, 7, 5, 7]), torch.tensor([3, 2, 1, 2, 3])
        yield sample("aten.ctc_loss.Tensor", log_p, draw.below(4, 5, 3, start=1), inputs, targets, 0, reduction)
    strung = draw.below(4, 11, start=1)
    yield sample("aten.ctc_loss.IntList", log_p, strung, inputs.tolist(), targets.tolist(), 0, _SUM)
    yield sample("aten.ctc_loss.IntList", log_p, strung, inputs.tolist(), targets.tolist(), 0, _NONE)
