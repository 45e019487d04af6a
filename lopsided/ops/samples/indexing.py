"""Samples of ops that pick and place by index: indices that repeat, or are fewer than there is to pick."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample, sample


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _tables(draw)
    yield from _picks(draw)
    yield from _places(draw)
    yield from _advanced(draw)
    yield from _searches(draw)


def _tables(draw: Draw) -> Iterator[Sample]:
    embedding = "aten.embedding.default"
    yield sample(embedding, draw.real(6, 4), draw.below(6, 5, 3))
    yield sample(embedding, draw.real(6, 4), draw.below(6, 5), 2)
    yield sample(embedding, draw.real(6, 4), draw.below(6, 5), -1, False)
    yield sample(embedding, draw.real(3, 4), draw.below(3, 7), -1, True)
    yield sample(embedding, draw.real(6, 4), draw.below(6))
    for mode in (0, 1):
        yield sample(
            "aten.embedding_bag.default",
            draw.real(6, 4),
            draw.below(6, 9),
            torch.tensor([0, 2, 2, 6, 7]),
            False,
            mode,
        )
    yield sample(
        "aten.embedding_bag.padding_idx",
        *(
            draw.real(6, 4),
            draw.below(6, 9),
            torch.tensor([0, 2, 2, 6, 7]),
            False,
            0,
            False,
            draw.real(9),
            False,
            1,
        ),
    )
    yield sample("aten.one_hot.default", draw.below(6, 5, 4), 6)


def _picks(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.gather.default", draw.real(5, 6), 1, draw.below(6, 5, 4))
    yield sample("aten.gather.default", draw.real(5, 6), 1, draw.below(6, 3, 4))
    yield sample("aten.gather.default", draw.real(6, 4), -2, draw.below(6, 7, 4))
    yield sample("aten.gather.default", draw.real(6), 0, draw.below(6))
    yield sample("aten.take_along_dim.default", draw.real(5, 6), draw.below(6, 5, 4), 1)
    yield sample("aten.take_along_dim.default", draw.real(5, 6), draw.below(6, 1, 4), 1)
    yield sample("aten.take_along_dim.default", draw.real(5, 6), draw.below(30, 7))
    yield sample("aten.index_select.default", draw.real(5, 6, 4), 1, draw.below(6, 7))
    yield sample("aten.index_select.default", draw.real(6), 0, draw.below(6))
    yield sample("aten.take.default", draw.real(5, 4), draw.below(20, 6, 3))


def _places(draw: Draw) -> Iterator[Sample]:
    every = torch.stack([draw.order(6)[:4] for _ in range(5)])
    yield sample("aten.scatter.src", draw.real(5, 6), 1, every, draw.real(5, 4))
    yield sample("aten.scatter.src", draw.real(5, 6), 1, every[:3], draw.real(3, 4))
    yield sample("aten.scatter.src", draw.real(5, 6), 1, every[:3], draw.constant(5, 7))
    yield sample("aten.scatter.value", draw.real(5, 6), 1, every, 0.5)
    yield sample("aten.scatter.value", draw.real(5, 6), 1, every, 0)
    yield sample("aten.scatter.reduce", draw.constant(5, 6), 1, draw.below(6, 5, 4), draw.constant(5, 4), reduce="add")
    yield sample("aten.scatter.value_reduce", draw.constant(5, 6), 1, draw.below(6, 5, 4), 2.0, reduce="multiply")
    for reduce in ("sum", "mean", "amax"):
        yield sample("aten.scatter_reduce.two", draw.real(5, 6), 1, draw.below(6, 5, 4), draw.real(5, 4), reduce)
    yield sample("aten.scatter_add.default", draw.real(5, 6), 1, draw.below(6, 5, 4), draw.real(5, 4))
    yield sample("aten.scatter_add.default", draw.real(6, 4), 0, draw.below(6, 5, 3), draw.real(5, 3))
    yield sample("aten.index_add.default", draw.real(5, 6), 1, draw.below(6, 7), draw.real(5, 7))
    yield sample("aten.index_add.default", draw.real(6, 5), 0, draw.below(6, 4), draw.real(4, 5), alpha=0.5)
    yield sample("aten.index_copy.default", draw.real(5, 6), 1, draw.order(6)[:4], draw.real(5, 4))
    yield sample("aten.index_fill.int_Scalar", draw.real(5, 6), 1, draw.order(6)[:4], 2.0)
    yield sample("aten.index_fill.int_Tensor", draw.real(5, 6), 1, draw.order(6)[:4], draw.real())
    for reduce in ("prod", "mean"):
        yield sample("aten.index_reduce.default", draw.real(5, 6), 1, draw.below(6, 7), draw.real(5, 7), reduce)
    for reduce in ("sum", "prod", "mean", "amax", "amin"):
        tensors = (draw.real(5, 6), 1, draw.below(6, 5, 4), draw.real(5, 4))
        yield sample("aten.scatter_reduce.two", *tensors, reduce, include_self=False)
    yield sample("aten.scatter_reduce.two", draw.real(5, 6), 1, draw.below(6, 5, 4), draw.real(5, 4), "prod")
    for reduce in ("prod", "mean", "amax", "amin"):
        tensors = (draw.real(5, 6), 1, draw.below(6, 7), draw.real(5, 7))
        yield sample("aten.index_reduce.default", *tensors, reduce, include_self=False)
    yield sample("aten.put.default", draw.real(5, 4), draw.order(20)[:6], draw.real(6))
    yield sample("aten.put.default", draw.real(5, 4), draw.below(20, 6), draw.real(6), True)
    yield sample("aten.masked_scatter.default", draw.real(5, 4), draw.truths(5, 4), draw.real(20))


def _advanced(draw: Draw) -> Iterator[Sample]:
    x = draw.real(5, 6, 4)
    yield sample("aten.index.Tensor", x, [draw.below(5, 7)])
    yield sample("aten.index.Tensor", x, [None, draw.below(6, 7, 3)])
    yield sample("aten.index.Tensor", x, [None, draw.below(6, 7), draw.below(4, 7)])
    yield sample("aten.index.Tensor", x, [draw.below(5, 7), None, draw.below(4, 7)])
    yield sample("aten.index.Tensor", x, [draw.below(5, 7, 1), draw.below(6, 3)])
    yield sample("aten.index.Tensor", draw.real(5, 4), [draw.truths(5)])
    for accumulate in (False, True):
        where = draw.below(6, 7) if accumulate else draw.order(6)[:3]
        count = len(where)
        yield sample("aten.index_put.default", draw.real(6, 5), [where], draw.real(count, 5), accumulate)
        yield sample("aten.index_put.default", draw.real(5, 6), [None, where], draw.real(5, count), accumulate)
        yield sample("aten.index_put.default", draw.real(6, 5), [where], draw.real(), accumulate)
        yield sample(
            "aten.index_put.default",
            draw.real(5, 6, 4),
            [None, where, draw.below(4, count)],
            draw.real(count),
            accumulate,
        )
        yield sample("aten.index_put.default", draw.real(5, 4), [draw.truths(5, 4)], draw.real(), accumulate)


def _searches(draw: Draw) -> Iterator[Sample]:
    edges = draw.constant(6).sort().values
    yield sample("aten.bucketize.Tensor", draw.constant(5, 4), edges)
    yield sample("aten.bucketize.Tensor", draw.below(6, 5, 4), edges, right=True)
    yield sample("aten.searchsorted.Tensor", edges, draw.constant(5, 4))
    yield sample("aten.searchsorted.Tensor", draw.constant(5, 6).sort().values, draw.constant(5, 4))
    yield sample("aten.isin.Tensor_Tensor", draw.below(9, 5, 4), draw.below(9, 6))
    yield sample("aten.isin.Tensor_Scalar", draw.below(9, 5, 4), 3)
