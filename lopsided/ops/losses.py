"""Losses. A mean over a cut batch needs the global count; a cut vocabulary needs the global softmax."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lopsided.ir.placement import P, R
from lopsided.ops.op import Ask, Call, Local, Op, Talk, Talking, broadcast_shape, entries, number, spec, whole
from lopsided.ops.reduce import shifted
from lopsided.ops.sample import Draw, Sample, sample

_NONE, _MEAN, _SUM = 0, 1, 2


# Losses that treat every element by itself


def elementwise(call: Call) -> str:
    operands = ", ".join(["..."] * len(call.operands))
    return f"f[{operands}] -> {'...' if call.arg('reduction') == _NONE else '()'}"


def elementwise_of_piece(local: Local) -> object:
    """The mean of a piece counts by the piece's part of the whole."""
    if local.call.arg("reduction") != _MEAN:
        return local.run()
    total = torch.as_tensor(local.widened().run(reduction=_SUM))
    return local.as_result(total / math.prod(broadcast_shape(local.call.shapes)))


# Losses that treat every row by itself


def rowwise(call: Call) -> str:
    """Rows of features against each other; a target per row or per feature."""
    rows = ["n"] * (len(call.shapes[0]) - 1)
    features = " ".join([*rows, "D"])
    operands = [features if len(shape) == len(call.shapes[0]) else " ".join(rows) or "()" for shape in call.shapes]
    result = " ".join(rows) if call.arg("reduction") == _NONE and rows else "()"
    return f"f[{', '.join(operands)}] -> {result}"


def margins(call: Call) -> str:
    """Scores per class, the right class of each row, a weight per class."""
    rows = ["n"] * (len(call.shapes[0]) - 1)
    weight = ", C" if len(call.operands) > 2 else ""
    target = rows if len(call.shapes[1]) < len(call.shapes[0]) else [*rows, "C"]
    result = " ".join(rows) if call.arg("reduction") == _NONE and rows else "()"
    return f"f[{' '.join([*rows, 'C'])}, {' '.join(target) or '()'}{weight}] -> {result}"


def rowwise_of_piece(local: Local) -> object:
    if local.call.arg("reduction") != _MEAN:
        return local.run()
    if not local.tensors[0].numel():
        return local.nothing()
    return torch.as_tensor(local.run()) * local.fraction()


# Cross-entropy and negative log-likelihood


def _by_class(call: Call) -> bool:
    """Targets are class numbers, not probabilities."""
    return not call.operands[1].torch_dtype.is_floating_point


def classified(call: Call) -> str:
    logits = len(call.shapes[0])
    rows, space = ("n", "x") if call.arg("reduction") != _MEAN else ("N", "X")
    if logits == 1:
        dims, target = ["C"], [] if _by_class(call) else ["C"]
    else:
        dims = [rows, "C", *(f"{space}{k}" for k in range(logits - 2))]
        target = [name for name in dims if name != "C"] if _by_class(call) else dims
    result = [name for name in dims if name != "C"] if call.arg("reduction") == _NONE else []
    x, rest, out = spec(dims), [spec(target), *["C"] * (len(call.operands) - 2)], spec(result)
    if "nll" not in call.node.op:
        return f"f[{', '.join([x, *rest])}] -> {out}"
    # Log-probabilities are merely picked: linear in them, and in weights where no mean divides by their sum.
    if call.arg("reduction") == _MEAN:
        return f"{x} * f[{', '.join(rest)}] -> {out}"
    return f"{' * '.join([x, f'f[{rest[0]}]', *rest[1:]])} -> {out}"


def _classified_talks(call: Call) -> list[Talk]:
    logits = len(call.shapes[0])
    talks: list[Talk] = []
    if call.arg("reduction") == _MEAN and logits > 1:
        names = ["N", *(f"X{k}" for k in range(logits - 2))]
        talks = [Talk(name, "mean_of_rows", mean_of_rows, P) for name in names]
    return [*talks, Talk("C", "vocabulary", vocabulary, P, in_one_block=True)]


def _row_weights(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What each row counts in the mean: 1 or its class weight, 0 if it is ignored."""
    counted = target != ignore_index
    if weight is None:
        return counted.to(dtype)
    return torch.where(
        counted, weight[torch.where(counted, target, 0)], torch.zeros((), dtype=dtype, device=weight.device)
    )


def mean_of_rows(local: Local) -> Talking:
    """The rows' sum here, divided by the count of rows that are not ignored everywhere."""
    wide = local.widened()
    logits, target = wide.tensors[0], wide.tensors[1]
    total = torch.as_tensor(wide.run(reduction=_SUM))
    if not _by_class(local.call):
        whole = local.call.operands[0]
        return local.as_result(total / (whole.elements // whole.shape[1]))
    weight = wide.tensors[2] if len(wide.tensors) > 2 else None
    counted = _row_weights(target, weight, int(local.call.arg("ignore_index")), logits.dtype).sum()
    count = yield Ask(counted.detach(), P, R)
    return local.as_result(total / count)


def vocabulary(local: Local) -> Talking:
    """Classes cut: the softmax is global, each device adds the log-probabilities of the classes it holds."""
    logits, target, *weights = local.widened().tensors
    weight = weights[0] if weights else None
    reduction, smoothing = local.call.arg("reduction"), number(local.call.arg("label_smoothing") or 0)
    dim = 1 if logits.dim() > 1 else 0
    classes = local.call.shapes[0][dim]
    log_p = logits
    if "cross_entropy" in local.call.node.op:
        less, total, _ = yield from shifted(logits, [dim])
        log_p = less - total.log()
    if not _by_class(local.call):
        per_class = target * (1 - smoothing) + smoothing / classes
        loss = -(per_class * log_p * _per_class(weight, log_p, dim)).sum(dim)
        rows = local.call.operands[0].elements // classes
        return local.as_result(loss if reduction == _NONE else loss.sum() / (rows if reduction == _MEAN else 1))
    ignore_index = int(local.call.arg("ignore_index"))
    counted = target != ignore_index
    # Where this device holds the target class of a row.
    here = target - local.start(local.rule.needs[0])
    mine = counted & (here >= 0) & (here < log_p.shape[dim])
    safe = torch.where(mine, here, 0).unsqueeze(dim)
    zero = log_p.new_zeros(())
    if log_p.shape[dim]:
        of_target = log_p.gather(dim, safe).squeeze(dim)
        row_weight = weight[safe.squeeze(dim)] if weight is not None else torch.ones_like(of_target)
    else:
        of_target = row_weight = log_p.sum(dim)
    row_weight = torch.where(mine, row_weight, zero)
    loss = -torch.where(mine, of_target, zero) * row_weight * (1 - smoothing)
    if smoothing:
        spread = -(log_p * _per_class(weight, log_p, dim)).sum(dim)
        loss = loss + torch.where(counted, spread, zero) * smoothing / classes
    if reduction != _MEAN:
        return local.as_result(loss if reduction == _NONE else loss.sum())
    count = yield Ask(row_weight.detach().sum(), P, R)
    return local.as_result(loss.sum() / count)


def _per_class(weight: Tensor | None, log_p: Tensor, dim: int) -> Tensor | float:
    return 1.0 if weight is None else weight.reshape(-1, *[1] * (log_p.dim() - dim - 1))


# Connectionist temporal classification


def ctc(call: Call) -> str:
    reduction = call.arg("reduction")
    result = "n" if reduction == _NONE else "()"
    if len(call.operands) == 4 and len(call.shapes[1]) == 2 and len(call.shapes[0]) == 3:
        return f"f[T n C, n S, n, n] -> {result}"
    # Lengths as Python numbers, or targets strung together: which belong to a piece is not in the shapes.
    parts = [whole(shape, k) for k, shape in enumerate(call.shapes)]
    return f"f[{', '.join(parts)}] -> {'Y9' if reduction == _NONE else '()'}"


def ctc_of_piece(local: Local) -> object:
    log_p = local.tensors[0]
    if not log_p.numel():
        return local.nothing()  # the kernel refuses an empty batch
    loss = torch.as_tensor(local.run())
    return loss * local.fraction() if local.call.arg("reduction") == _MEAN else loss


_ELEMENTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
    " soft_margin_loss hinge_embedding_loss poisson_nll_loss margin_ranking_loss"
)

LOSSES: dict[str, Op] = {
    **entries(_ELEMENTWISE, Op(elementwise, local=elementwise_of_piece)),
    **entries("cosine_embedding_loss triplet_margin_loss", Op(rowwise, local=rowwise_of_piece)),
    **entries("multi_margin_loss multilabel_margin_loss", Op(margins, local=rowwise_of_piece)),
    **entries("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d", Op(classified, talks=_classified_talks)),
    "aten.ctc_loss": Op(ctc, local=ctc_of_piece),
}


# Samples


_REDUCTIONS = (_NONE, _MEAN, _SUM)


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _samples_of_elementwise(draw)
    yield from _samples_of_cross_entropy(draw)
    yield from _samples_of_rows(draw)
    yield from _samples_of_ctc(draw)


def _samples_of_elementwise(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_cross_entropy(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_rows(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_ctc(draw: Draw) -> Iterator[Sample]:
    for reduction in _REDUCTIONS:
        log_p = draw.real(7, 5, 4).detach().log_softmax(-1).requires_grad_()
        inputs, targets = torch.tensor([7, 6, 7, 5, 7]), torch.tensor([3, 2, 1, 2, 3])
        yield sample("aten.ctc_loss.Tensor", log_p, draw.below(4, 5, 3, start=1), inputs, targets, 0, reduction)
    strung = draw.below(4, 11, start=1)
    yield sample("aten.ctc_loss.IntList", log_p, strung, inputs.tolist(), targets.tolist(), 0, _SUM)
    yield sample("aten.ctc_loss.IntList", log_p, strung, inputs.tolist(), targets.tolist(), 0, _NONE)
