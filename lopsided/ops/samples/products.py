"""Samples of products: matrix products, convolutions, attention, recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample, sample


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _matrices(draw)
    yield from _einsums(draw)
    yield from _complex(draw)
    yield from _convolutions(draw)
    yield from _attention(draw)
    yield from _recurrent(draw)
    yield from _grouped(draw)


def _matrices(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.linear.default", draw.real(5, 4, 6), draw.real(7, 6), draw.real(7))
    yield sample("aten.linear.default", draw.real(5, 6), draw.real(7, 6))
    yield sample("aten.linear.default", draw.real(6), draw.real(7, 6), draw.real(7))
    for name in ("matmul", "linalg_matmul"):
        yield sample(f"aten.{name}.default", draw.real(5, 4), draw.real(4, 6))
        yield sample(f"aten.{name}.default", draw.real(3, 5, 4), draw.real(4))
        yield sample(f"aten.{name}.default", draw.real(4), draw.real(3, 4, 6))
        yield sample(f"aten.{name}.default", draw.real(4), draw.real(4))
    yield sample("aten.matmul.default", draw.real(3, 5, 4), draw.real(3, 4, 6))
    yield sample("aten.matmul.default", draw.real(2, 1, 5, 4), draw.real(3, 4, 6))
    yield sample("aten.mm.default", draw.real(5, 4), draw.real(4, 6))
    yield sample("aten.bmm.default", draw.real(3, 5, 4), draw.real(3, 4, 6))
    yield sample("aten.mv.default", draw.real(5, 4), draw.real(4))
    for name in ("dot", "vdot", "inner"):
        yield sample(f"aten.{name}.default", draw.real(4), draw.real(4))
    yield sample("aten.inner.default", draw.real(5, 4), draw.real(3, 6, 4))
    for name in ("outer", "ger"):
        yield sample(f"aten.{name}.default", draw.real(5), draw.real(4))
    for bias in ((5, 6), (6,), (5, 1), ()):
        yield sample("aten.addmm.default", draw.real(*bias), draw.real(5, 4), draw.real(4, 6))
    yield sample("aten.addmv.default", draw.real(5), draw.real(5, 4), draw.real(4), beta=0.5, alpha=2.0)
    yield sample("aten.addr.default", draw.real(5, 4), draw.real(5), draw.real(4))
    yield sample("aten.baddbmm.default", draw.real(5, 6), draw.real(3, 5, 4), draw.real(3, 4, 6))
    yield sample("aten.addbmm.default", draw.real(6), draw.real(3, 5, 4), draw.real(3, 4, 6))
    yield sample("aten.bilinear.default", draw.real(5, 4), draw.real(5, 3), draw.real(6, 4, 3), draw.real(6))
    yield sample("aten.bilinear.default", draw.real(5, 4), draw.real(5, 3), draw.real(6, 4, 3))
    for name in ("chain_matmul", "linalg_multi_dot"):
        yield sample(f"aten.{name}.default", [draw.real(5, 4), draw.real(4, 6), draw.real(6, 3)])
    yield sample("aten.linalg_multi_dot.default", [draw.real(4), draw.real(4, 6), draw.real(6)])
    yield sample("aten.kron.default", draw.real(5, 4), draw.real(3, 2))
    yield sample("aten.kron.default", draw.real(5), draw.real(3, 2))
    yield sample("aten.tensordot.default", draw.real(5, 4, 6), draw.real(6, 3, 4), [1, 2], [2, 0])
    yield sample("aten.tensordot.default", draw.real(5), draw.real(4), [], [])
    yield sample("aten.linalg_vecdot.default", draw.real(5, 4), draw.real(5, 4))
    yield sample("aten.linalg_vecdot.default", draw.real(5, 4, 6), draw.real(4, 6), dim=1)
    yield sample("aten.linalg_cross.default", draw.real(5, 3), draw.real(5, 3))
    yield sample("aten.cross.default", draw.real(3, 5), draw.real(3, 5), 0)
    yield sample("aten.cross.default", draw.real(5, 3, 4), draw.real(5, 3, 4))


def _einsums(draw: Draw) -> Iterator[Sample]:
    for equation, *shapes in (
        ("bik,kj->bij", (5, 4, 6), (6, 3)),
        ("...ik,...kj->...ij", (5, 4, 6), (6, 3)),
        ("ik,kj", (5, 4), (4, 6)),
        ("Bi, Bj -> Bij", (5, 4), (5, 6)),
        ("bB,B->b", (5, 4), (4,)),
        ("ii->i", (4, 4)),
        ("ij->", (5, 4)),
        ("bhtd,bhsd->bhts", (2, 3, 5, 4), (2, 3, 6, 4)),
        ("i,j,ij->i", (5,), (4,), (5, 4)),
    ):
        yield sample("aten.einsum.default", equation, [draw.real(*shape) for shape in shapes])


def _complex(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.linear.default", draw.complex(5, 6), draw.complex(7, 6), draw.complex(7))
    yield sample("aten.matmul.default", draw.complex(5, 4), draw.complex(4, 6))
    yield sample("aten.matmul.default", draw.complex(3, 5, 4), draw.complex(4))
    yield sample("aten.mm.default", draw.complex(5, 4), draw.complex(4, 6))
    yield sample("aten.vdot.default", draw.complex(4), draw.complex(4))
    yield sample("aten.addmm.default", draw.complex(6), draw.complex(5, 4), draw.complex(4, 6))
    yield sample("aten.einsum.default", "bik,kj->bij", [draw.complex(5, 4, 6), draw.complex(6, 3)])
    yield sample("aten.einsum.default", "i,j,ij->i", [draw.complex(5), draw.complex(4), draw.complex(5, 4)])


def _convolutions(draw: Draw) -> Iterator[Sample]:
    space: tuple[int, ...]
    for rank, space in ((1, (7,)), (2, (5, 6)), (3, (4, 3, 3))):
        kernel = (3, 2, 2)[:rank]
        yield sample(f"aten.conv{rank}d.default", draw.real(2, 4, *space), draw.real(6, 4, *kernel), draw.real(6))
        overload = "default" if rank == 1 else "input"
        yield sample(
            f"aten.conv_transpose{rank}d.{overload}",
            draw.real(2, 4, *space),
            draw.real(4, 6, *kernel),
            draw.real(6),
        )
    conv, transposed = "aten.conv2d.default", "aten.conv_transpose2d.input"
    yield sample(conv, draw.real(2, 4, 5, 6), draw.real(6, 4, 3, 3), None, [2, 1], [1, 1])
    yield sample(conv, draw.real(2, 8, 5, 6), draw.real(12, 2, 3, 3), draw.real(12), [1, 1], [1, 1], [1, 1], 4)
    yield sample(conv, draw.real(2, 6, 5, 4), draw.real(6, 1, 3, 3), draw.real(6), groups=6)
    yield sample(conv, draw.real(4, 5, 6), draw.real(6, 4, 3, 3), draw.real(6))
    yield sample(conv, draw.real(2, 4, 5, 6), draw.real(7, 4, 1, 1), draw.real(7))
    yield sample(conv, draw.real(2, 3, 8, 12), draw.real(4, 3, 2, 3), draw.real(4), [2, 3])
    yield sample(conv, draw.real(3, 8, 12), draw.real(4, 3, 2, 3), None, [2, 3])
    yield sample("aten.conv1d.default", draw.real(2, 4, 7), draw.real(4, 1, 3), draw.real(4), [1], [2], [1], 4)
    for rank in (1, 2, 3):
        space = (7, 5, 3)[:rank]
        yield sample(
            f"aten.conv{rank}d.padding",
            draw.real(2, 4, *space),
            draw.real(6, 4, *[3] * rank),
            None,
            [1],
            "same",
        )
    yield sample(transposed, draw.real(2, 8, 3, 4), draw.real(8, 3, 2, 2), draw.real(12), [2, 2], [0, 0], [0, 0], 4)
    yield sample(transposed, draw.real(4, 3, 4), draw.real(4, 6, 2, 2), draw.real(6))
    for is_transposed in (False, True):
        yield sample(
            "aten.convolution.default",
            *(draw.real(2, 4, 5, 6), draw.real(4, 3, 2, 2) if is_transposed else draw.real(6, 2, 2, 2)),
            *(draw.real(6), [1, 1], [0, 0], [1, 1], is_transposed, [0, 0], 2),
        )


def _attention(draw: Draw) -> Iterator[Sample]:
    def attend(heads: int = 4, groups: int = 4, *mask: torch.Tensor, **kwargs: Any) -> Sample:
        q, k, v = draw.real(2, heads, 5, 6), draw.real(2, groups, 7, 6), draw.real(2, groups, 7, 3)
        return sample("aten.scaled_dot_product_attention.default", q, k, v, *mask, **kwargs)

    yield attend()
    yield attend(scale=0.3)
    yield attend(is_causal=True)
    yield attend(dropout_p=0.4)
    yield attend(dropout_p=0.4, is_causal=True)
    yield attend(4, 2, enable_gqa=True)
    yield attend(4, 2, enable_gqa=True, is_causal=True)
    yield attend(4, 1, enable_gqa=True)
    yield attend(4, 2, enable_gqa=True, dropout_p=0.4)
    keep = draw.truths(5, 7)
    keep[:, 0] = True
    yield attend(4, 4, keep)
    yield attend(4, 4, draw.real(2, 1, 5, 7))
    yield attend(4, 4, draw.constant(1, 4, 1, 7))
    yield attend(4, 2, draw.constant(4, 5, 7), enable_gqa=True)
    yield attend(4, 4, keep, dropout_p=0.4)
    rank3 = [draw.real(3, 5, 6), draw.real(3, 7, 6), draw.real(3, 7, 4)]
    yield sample("aten.scaled_dot_product_attention.default", *rank3)
    yield sample("aten.scaled_dot_product_attention.default", *rank3, draw.constant(5, 7))
    yield sample("aten.scaled_dot_product_attention.default", *rank3, is_causal=True)


def _recurrent(draw: Draw) -> Iterator[Sample]:
    def weights(gates: int, hidden: int, inputs: int, bias: bool = True) -> list[torch.Tensor]:
        shapes = [
            (gates * hidden, inputs),
            (gates * hidden, hidden),
            *([(gates * hidden,)] * 2 if bias else []),
        ]
        return [draw.real(*shape) for shape in shapes]

    for first in (False, True):
        shape = (5, 6, 3) if first else (6, 5, 3)
        state = [draw.real(1, 5, 4), draw.real(1, 5, 4)]
        tail = (True, 1, 0.0, True, False, first)
        yield sample("aten.lstm.input", draw.real(*shape), state, weights(4, 4, 3), *tail)
        yield sample("aten.gru.input", draw.real(*shape), draw.real(1, 5, 4), weights(3, 4, 3), *tail)
    both = [*weights(4, 4, 3), *weights(4, 4, 3)]
    yield sample(
        "aten.lstm.input",
        draw.real(6, 5, 3),
        [draw.real(2, 5, 4), draw.real(2, 5, 4)],
        both,
        *(True, 1, 0.0, True, True, False),
    )
    for train in (True, False):
        deep, states = [*weights(4, 4, 3), *weights(4, 4, 4)], [draw.real(2, 5, 4), draw.real(2, 5, 4)]
        yield sample("aten.lstm.input", draw.real(6, 5, 3), states, deep, True, 2, 0.4, train, False, False)
    deep = [*weights(3, 4, 3), *weights(3, 4, 4)]
    yield sample("aten.gru.input", draw.real(5, 6, 3), draw.real(2, 5, 4), deep, True, 2, 0.4, True, False, True)
    deep = [*weights(1, 4, 3), *weights(1, 4, 4)]
    yield sample("aten.rnn_tanh.input", draw.real(6, 3), draw.real(2, 4), deep, True, 2, 0.4, True, False, False)
    tail = (False, 1, 0.0, True, False, False)
    yield sample("aten.rnn_tanh.input", draw.real(6, 5, 3), draw.real(1, 5, 4), weights(1, 4, 3, False), *tail)
    yield sample("aten.rnn_relu.input", draw.real(6, 3), draw.real(1, 4), weights(1, 4, 3, False), *tail)
    yield sample("aten.lstm_cell.default", draw.real(5, 3), [draw.real(5, 4), draw.real(5, 4)], *weights(4, 4, 3))
    yield sample("aten.gru_cell.default", draw.real(5, 3), draw.real(5, 4), *weights(3, 4, 3))
    yield sample("aten.rnn_tanh_cell.default", draw.real(5, 3), draw.real(5, 4), *weights(1, 4, 3))
    yield sample("aten.rnn_relu_cell.default", draw.real(5, 3), draw.real(5, 4), *weights(1, 4, 3))


def _grouped(draw: Draw) -> Iterator[Sample]:
    """The kernel knows no float64: whole numbers in float32 are nearly as good, without gradients."""

    def whole_numbers(*shape: int) -> torch.Tensor:
        return draw.below(9, *shape, start=-8).float()

    ends = torch.tensor([2, 2, 8], dtype=torch.int32)
    yield sample("aten._grouped_mm.default", whole_numbers(8, 4), whole_numbers(3, 4, 12), ends)
    yield sample("aten._grouped_mm.default", whole_numbers(3, 5, 4), whole_numbers(4, 8), ends)
    yield sample("aten._grouped_mm.default", whole_numbers(3, 5, 4), whole_numbers(3, 4, 12))
