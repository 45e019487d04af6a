"""Samples of the views family: shapes that split, merge, cross, and parts that are equal or not."""

from __future__ import annotations

from collections.abc import Iterator

from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample, sample


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _reshapes(draw)
    yield from _orders(draw)
    yield from _parts(draw)
    yield from _joins(draw)
    yield from _lengths(draw)
    yield from _fourier(draw)


def _reshapes(draw: Draw) -> Iterator[Sample]:
    for before, after in (
        ((5, 24), (5, 4, 6)),
        ((5, 4, 6), (20, 6)),
        ((4, 6, 7), (24, 7)),
        ((12, 7), (4, 21)),
        ((4, 15), (12, 5)),
        ((4, 6), (6, 4)),
        ((2, 3, 5, 7), (6, 7, 5)),
        ((5, 1, 4), (5, 4)),
        ((5, 4), (1, 5, 1, 4)),
        ((20,), (5, -1)),
        ((), (1, 1)),
        ((1, 4), (4,)),
    ):
        yield sample("aten.view.default", draw.real(*before), list(after))
    for name in ("reshape", "_unsafe_view"):
        yield sample(f"aten.{name}.default", draw.real(5, 24), [5, 4, 6])
    yield sample("aten._reshape_alias.default", draw.real(5, 24), [5, 4, 6], [24, 6, 1])
    yield sample("aten.flatten.using_ints", draw.real(5, 4, 6), 1, -1)
    yield sample("aten.unflatten.int", draw.real(5, 24), -1, [4, -1])
    yield sample("aten.squeeze.default", draw.real(5, 1, 4, 1))
    yield sample("aten.squeeze.dim", draw.real(5, 1, 4), 1)
    yield sample("aten.squeeze.dim", draw.real(5, 4), 1)
    yield sample("aten.squeeze.dims", draw.real(5, 1, 4, 1), [1, 3])
    yield sample("aten.unsqueeze.default", draw.real(5, 4), 1)
    yield sample("aten.ravel.default", draw.real(5, 4))
    for name in ("atleast_1d", "atleast_2d", "atleast_3d"):
        yield sample(f"aten.{name}.default", draw.real(5))
        yield sample(f"aten.{name}.default", draw.real())
    yield sample("aten.expand.default", draw.real(4, 1), [5, 4, 6])
    yield sample("aten.expand.default", draw.real(1, 5), [-1, -1])
    yield sample("aten.broadcast_to.default", draw.real(5, 1), [5, 4])
    yield sample("aten.broadcast_tensors.default", [draw.real(5, 1), draw.real(4)])
    yield sample("aten.expand_as.default", draw.real(5, 1), draw.constant(5, 4))
    yield sample("aten.view_as.default", draw.real(5, 24), draw.constant(5, 4, 6))
    yield sample("aten.reshape_as.default", draw.real(5, 4, 6), draw.constant(20, 6))
    yield sample("aten.sum_to_size.default", draw.real(5, 4, 6), [4, 1])
    yield sample("aten.meshgrid.default", [draw.real(5), draw.real(4)])
    yield sample("aten.meshgrid.indexing", [draw.real(5), draw.real(4), draw.real(3)], indexing="xy")
    yield sample("aten.cartesian_prod.default", [draw.real(5), draw.real(4)])
    yield sample("aten.view_as_complex.default", draw.real(5, 4, 2))
    yield sample("aten.view_as_real.default", draw.complex(5, 4))


def _orders(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.permute.default", draw.real(5, 4, 6), [2, 0, 1])
    yield sample("aten.permute.default", draw.real(2, 1, 3, 1, 1, 4, 1, 1, 1, 5), [9, 1, 2, 3, 4, 5, 6, 8, 7, 0])
    yield sample("aten.transpose.int", draw.real(5, 4, 6), -1, 0)
    yield sample("aten.t.default", draw.real(5, 4))
    yield sample("aten.t.default", draw.real(5))
    yield sample("aten.numpy_T.default", draw.real(5, 4))
    for name in ("mT", "mH", "adjoint"):
        yield sample(f"aten.{name}.default", draw.real(5, 4, 6))
    yield sample("aten.matrix_H.default", draw.complex(5, 4))
    for name in ("movedim", "moveaxis"):
        yield sample(f"aten.{name}.int", draw.real(5, 4, 6), 0, -1)
        yield sample(f"aten.{name}.intlist", draw.real(5, 4, 6), [0, 1], [1, 2])
    for name in ("swapaxes", "swapdims"):
        yield sample(f"aten.{name}.default", draw.real(5, 4, 6), 0, 2)
    for name in ("fliplr", "flipud"):
        yield sample(f"aten.{name}.default", draw.real(5, 4, 6))
    yield sample("aten.flip.default", draw.real(5, 4, 6), [0, -1])
    yield sample("aten.roll.default", draw.real(5, 4), [2], [1])
    yield sample("aten.roll.default", draw.real(5, 4), [2])
    yield sample("aten.rot90.default", draw.real(5, 4, 6), 1, [0, 1])
    yield sample("aten.rot90.default", draw.real(5, 4, 6), 2, [0, 2])


def _parts(draw: Draw) -> Iterator[Sample]:
    for start, end, step in ((0, 3, 1), (3, 6, 1), (-3, 9, 1), (0, 6, 1), (1, 4, 1), (0, 6, 2), (0, 2, 1)):
        yield sample("aten.slice.Tensor", draw.real(6, 5), 0, start, end, step)
    yield sample("aten.slice.Tensor", draw.real(5, 6), 1)
    yield sample("aten.narrow.default", draw.real(5, 6), -1, 3, 3)
    yield sample("aten.narrow.default", draw.real(5, 6), 1, 1, 3)
    for name in ("split", "unsafe_split"):
        yield sample(f"aten.{name}.Tensor", draw.real(5, 6), 3, 1)
        yield sample(f"aten.{name}.Tensor", draw.real(5, 6), 4, -1)
    yield sample("aten.split.sizes", draw.real(5, 6), [3, 3], 1)
    for name in ("split_with_sizes", "unsafe_split_with_sizes"):
        yield sample(f"aten.{name}.default", draw.real(6, 5), [2, 2, 2])
        yield sample(f"aten.{name}.default", draw.real(6, 5), [1, 5])
    for name in ("chunk", "unsafe_chunk"):
        yield sample(f"aten.{name}.default", draw.real(5, 8), 2, -1)
        yield sample(f"aten.{name}.default", draw.real(5, 7), 3, 1)
    yield sample("aten.tensor_split.sections", draw.real(5, 6), 3, 1)
    yield sample("aten.tensor_split.sections", draw.real(7, 4), 3)
    yield sample("aten.tensor_split.indices", draw.real(5, 6), [2, 4], 1)
    yield sample("aten.hsplit.int", draw.real(5, 6), 2)
    yield sample("aten.hsplit.int", draw.real(6), 2)
    yield sample("aten.vsplit.array", draw.real(6, 5), [2])
    yield sample("aten.dsplit.int", draw.real(5, 4, 6), 2)
    yield sample("aten.unbind.int", draw.real(5, 3, 4), 1)
    yield sample("aten.select.int", draw.real(5, 4, 6), 1, -1)
    for name in ("tril", "triu"):
        yield sample(f"aten.{name}.default", draw.real(3, 5, 4))
        yield sample(f"aten.{name}.default", draw.real(5, 4), 1)
    yield sample("aten.diagonal.default", draw.real(5, 4, 6), 0, 0, 2)
    yield sample("aten.linalg_diagonal.default", draw.real(5, 4, 6))
    yield sample("aten.diag.default", draw.real(5))
    yield sample("aten.diag.default", draw.real(5, 4), 1)
    yield sample("aten.diagflat.default", draw.real(3, 4))
    yield sample("aten.diag_embed.default", draw.real(5, 4))
    yield sample("aten.diag_embed.default", draw.real(5, 4), 0, 0, 2)
    yield sample("aten.trace.default", draw.real(5, 4))
    yield sample("aten.unfold.default", draw.real(5, 7, 4), 1, 3, 2)


def _joins(draw: Draw) -> Iterator[Sample]:
    for name in ("cat", "concat", "concatenate"):
        yield sample(f"aten.{name}.default", [draw.real(5, 4), draw.real(5, 4)], -1)
    yield sample("aten.cat.default", [draw.real(5, 4), draw.real(5, 6)], 1)
    yield sample("aten.cat.default", [draw.real(4, 5), draw.real(4, 5), draw.real(4, 5)])
    yield sample("aten.cat.default", [draw.truths(0), draw.real(5, 4)], 1)  # an empty cache
    yield sample("aten.cat.default", [draw.real(5, 4)], 1)
    yield sample("aten.stack.default", [draw.real(5, 4), draw.real(5, 4)], -1)
    yield sample("aten.stack.default", [draw.real(5, 4), draw.real(5, 4), draw.real(5, 4)])
    yield sample("aten.hstack.default", [draw.real(5, 4), draw.real(5, 4)])
    yield sample("aten.hstack.default", [draw.real(4), draw.real(4)])
    for name in ("vstack", "row_stack"):
        yield sample(f"aten.{name}.default", [draw.real(4), draw.real(4)])
        yield sample(f"aten.{name}.default", [draw.real(5, 4), draw.real(5, 4)])
        yield sample(f"aten.{name}.default", [draw.real(4), draw.real(5, 4)])
    yield sample("aten.dstack.default", [draw.real(5, 4), draw.real(5, 4)])
    yield sample("aten.column_stack.default", [draw.real(5), draw.real(5, 4)])
    yield sample("aten.block_diag.default", [draw.real(5, 4), draw.real(2, 3)])
    yield sample("aten.select_scatter.default", draw.real(5, 4, 6), draw.real(5, 6), 1, 2)
    yield sample("aten.slice_scatter.default", draw.real(5, 6), draw.real(5, 3), 1, 1, 4)
    yield sample("aten.diagonal_scatter.default", draw.real(5, 4, 6), draw.real(6, 4), 0, 0, 1)


def _lengths(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.pad.default", draw.real(5, 4, 6), [1, 2])
    yield sample("aten.pad.default", draw.real(5, 4, 6), [0, 0, 1, 0], "constant", 2.0)
    yield sample("aten.pad.default", draw.real(5, 4, 6), [1, 2], "reflect")
    yield sample("aten.constant_pad_nd.default", draw.real(5, 4), [1, 1])
    yield sample("aten.constant_pad_nd.default", draw.real(5, 4), [0, -1], 1.0)
    for name in ("reflection_pad", "replication_pad"):
        for rank in (1, 2, 3):
            yield sample(f"aten.{name}{rank}d.default", draw.real(3, 2, *(4, 5, 6)[:rank]), [1] * 2 * rank)
    yield sample("aten.repeat.default", draw.real(5, 4), [3, 1, 2])
    yield sample("aten.tile.default", draw.real(5, 4, 3), [2, 1])
    yield sample("aten.repeat_interleave.self_int", draw.real(5, 4), 3, 1)
    yield sample("aten.repeat_interleave.self_int", draw.real(5, 4), 3)
    yield sample("aten.repeat_interleave.self_int", draw.real(5, 4), 3, 1, output_size=12)
    yield sample("aten.pixel_shuffle.default", draw.real(5, 12, 4, 3), 2)
    yield sample("aten.pixel_unshuffle.default", draw.real(5, 3, 4, 6), 2)
    yield sample("aten.channel_shuffle.default", draw.real(5, 12, 3, 2), 3)
    for name in ("new_zeros", "new_ones", "new_empty"):
        yield sample(f"aten.{name}.default", draw.constant(5, 4, 6), [5, 4])
    yield sample("aten.new_full.default", draw.constant(5, 4), [5, 7], 2.0)
    yield sample("aten.new_zeros.default", draw.constant(), [5])


def _fourier(draw: Draw) -> Iterator[Sample]:
    for name in ("fft", "ifft", "hfft", "irfft"):
        yield sample(f"aten.fft_{name}.default", draw.complex(5, 4))
    for name in ("rfft", "ihfft"):
        yield sample(f"aten.fft_{name}.default", draw.real(5, 4), None, 0)
    for name in ("fft2", "ifft2", "irfft2", "hfft2"):
        yield sample(f"aten.fft_{name}.default", draw.complex(3, 5, 4))
    for name in ("rfft2", "ihfft2"):
        yield sample(f"aten.fft_{name}.default", draw.real(3, 5, 4))
    for name in ("fftn", "ifftn", "irfftn", "hfftn"):
        yield sample(f"aten.fft_{name}.default", draw.complex(3, 5, 4), None, [0, 2])
        yield sample(f"aten.fft_{name}.default", draw.complex(3, 5, 4), [6])
    for name in ("rfftn", "ihfftn"):
        yield sample(f"aten.fft_{name}.default", draw.real(3, 4))
    for name in ("fftshift", "ifftshift"):
        yield sample(f"aten.fft_{name}.default", draw.real(5, 4), [1])
        yield sample(f"aten.fft_{name}.default", draw.real(5, 4))
    window = draw.positive(4)
    yield sample("aten.stft.default", draw.real(5, 12), 4, 2, 4, window, False, True, True)
    yield sample("aten.stft.center", draw.real(12), 4, 2, return_complex=True)
    yield sample("aten.istft.default", draw.complex(5, 3, 6), 4, 2, 4, draw.positive(4))
