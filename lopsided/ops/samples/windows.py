"""Samples of ops over windows of space: windows that overlap, that tile, that cover everything."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample, sample

_SPACE = {1: (6,), 2: (6, 4), 3: (4, 4, 6)}


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _pools(draw)
    yield from _upsamples(draw)
    yield from _grids(draw)


def _pools(draw: Draw) -> Iterator[Sample]:
    for rank, space in _SPACE.items():
        two, three, one = [2] * rank, [3] * rank, [1] * rank
        for name in (f"max_pool{rank}d", f"max_pool{rank}d_with_indices", f"avg_pool{rank}d"):
            yield sample(f"aten.{name}.default", draw.real(5, 3, *space), two)
            yield sample(f"aten.{name}.default", draw.real(3, *space), three, one, one)
        yield sample(f"aten.adaptive_max_pool{rank}d.default", draw.real(5, 3, *space), two)
        yield sample(f"aten.adaptive_avg_pool{rank}d.default", draw.real(5, 3, *space), two)
        yield sample(f"aten.adaptive_avg_pool{rank}d.default", draw.real(5, 3, *space), one)
    picked = torch.stack([draw.order(24)[:6] for _ in range(15)]).reshape(5, 3, 3, 2)
    yield sample("aten.max_unpool2d.default", draw.real(5, 3, 3, 2), picked, [6, 4])
    yield sample(
        "aten.max_unpool3d.default",
        draw.real(5, 3, 1, 3, 2),
        picked.unsqueeze(2),
        [1, 6, 4],
        [1, 2, 2],
        [0, 0, 0],
    )


def _upsamples(draw: Draw) -> Iterator[Sample]:
    for rank, space in {1: (3,), 2: (3, 2), 3: (3, 2, 2)}.items():
        doubled, odd = [2 * size for size in space], [size + 2 for size in space]
        for name in (f"upsample_nearest{rank}d", f"_upsample_nearest_exact{rank}d"):
            yield sample(f"aten.{name}.default", draw.real(5, 4, *space), doubled)
            yield sample(f"aten.{name}.default", draw.real(5, 4, *space), odd)
            yield sample(f"aten.{name}.vec", draw.real(5, 4, *space), None, [2.0] * rank)
    for name, space in (
        ("upsample_linear1d", (3,)),
        ("upsample_bilinear2d", (3, 2)),
        ("upsample_bicubic2d", (3, 2)),
        ("_upsample_bilinear2d_aa", (3, 2)),
        ("_upsample_bicubic2d_aa", (3, 2)),
        ("upsample_trilinear3d", (3, 2, 2)),
    ):
        yield sample(f"aten.{name}.default", draw.real(5, 4, *space), [2 * size for size in space], False)
        yield sample(f"aten.{name}.vec", draw.real(5, 4, *space), None, True, [2.0] * len(space))


def _grids(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.im2col.default", draw.real(5, 4, 6, 3), [2, 2], [1, 1], [0, 0], [1, 1])
    yield sample("aten.im2col.default", draw.real(4, 6, 3), [2, 2], [1, 1], [0, 0], [2, 1])
    yield sample("aten.col2im.default", draw.real(5, 16, 10), [6, 3], [2, 2], [1, 1], [0, 0], [1, 1])
    for name in ("grid_sampler", "grid_sampler_2d"):
        yield sample(f"aten.{name}.default", draw.real(5, 4, 3, 6), draw.positive(5, 7, 2, 2), 0, 0, False)
    for name in ("grid_sampler", "grid_sampler_3d"):
        yield sample(f"aten.{name}.default", draw.real(5, 4, 3, 6, 2), draw.positive(5, 7, 2, 3, 3), 0, 0, False)
    yield sample("aten.affine_grid_generator.default", draw.real(5, 2, 3), [5, 1, 4, 6], False)
    yield sample("aten.affine_grid_generator.default", draw.real(5, 3, 4), [5, 1, 4, 2, 6], True)
