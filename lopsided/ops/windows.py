"""Ops over windows of space: batch and channels are independent; space is, where windows lie side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from lopsided.ops.op import Call, Local, Op, Written, entries, spec
from lopsided.ops.products import tiles
from lopsided.ops.reduce import mean_of_piece
from lopsided.ops.sample import Draw, Sample, sample


def _rank(call: Call) -> int:
    found = re.search(r"([123])d", call.node.op)
    return int(found.group(1)) if found else len(call.shapes[0]) - 2


def _windows(call: Call, *, linear: bool) -> str:
    rank = _rank(call)
    before, after = (spec(["...", *(f"{c}{k}" for k in range(rank))]) for c in "XY")
    return f"{before if linear else f'f[{before}]'} -> {', '.join([after] * len(call.results))}"


def linear(call: Call) -> str:
    return _windows(call, linear=True)


def nonlinear(call: Call) -> str:
    return _windows(call, linear=False)


def _pooled(call: Call, *, linear: bool) -> Written:
    """Windows side by side may be cut between them, unless places in the whole are reported, too."""
    rank = _rank(call)
    windows, strides, paddings, dilations = (
        _per_dim(call.arg(name), rank, otherwise)
        for name, otherwise in (("kernel_size", 1), ("stride", 0), ("padding", 0), ("dilation", 1))
    )
    space = call.shapes[0][-rank:]
    side_by_side = tiles(windows, [s or w for s, w in zip(strides, windows, strict=True)], paddings, dilations)
    before, after, sizes = ["..."], ["..."], {}
    for k, (tiled, window, size) in enumerate(zip(side_by_side, windows, space, strict=True)):
        cuttable = tiled and not size % window and len(call.results) == 1
        before.append(f"(x{k} K{k})" if cuttable else f"X{k}")
        after.append(f"x{k}" if cuttable else f"Y{k}")
        if cuttable:
            sizes[f"K{k}"] = window
    left = spec(before) if linear else f"f[{spec(before)}]"
    return f"{left} -> {', '.join([spec(after)] * len(call.results))}", sizes


def _per_dim(given: object, rank: int, otherwise: int) -> list[int]:
    listed = [given] if isinstance(given, int) else list(given) if isinstance(given, Sequence) else []
    listed = listed or [otherwise]
    return listed * rank if len(listed) == 1 else listed


def averaged(call: Call) -> Written:
    return _pooled(call, linear=True)


def largest(call: Call) -> Written:
    return _pooled(call, linear=False)


def adaptive_average(call: Call) -> str:
    """Down to one element it is a mean over space, and a mean may be cut."""
    rank = _rank(call)
    if any(size != 1 for size in call.results[0][-rank:]):
        return linear(call)
    return f"{spec(['...', *(f'x{k}' for k in range(rank))])} -> {spec(['...', *['1'] * rank])}"


def nearest(call: Call) -> Written:
    """Where every element is repeated a whole number of times, space may be cut."""
    rank = _rank(call)
    before, after = call.shapes[0][-rank:], call.results[0][-rank:]
    if not _scales_are_whole(call) or not all(map(_repeats, before, after)):
        return linear(call)
    left, right = (spec([form.format(k) for k in range(rank)]) for form in ("x{0}", "(x{0} T{0})"))
    return f"... {left} -> ... {right}", {
        f"T{k}": new // old for k, (old, new) in enumerate(zip(before, after, strict=True))
    }


def _repeats(before: int, after: int) -> bool:
    """Whether every element is repeated as often; kernels divide in float32, which rounds for some (41 times)."""
    if not before or after % before:
        return False
    places = torch.arange(after, device="cpu")
    scale = torch.tensor(before, device="cpu").float() / after
    return torch.equal((places.float() * scale).floor().long(), places // (after // before))


def _scales_are_whole(call: Call) -> bool:
    """Scales that are given are used, also where their size comes out as a multiple: 2.05 times 16 is
    32, and the first element is then taken three times, the last once."""
    given = [scale for name, scale in call.given().items() if name.startswith("scale") and scale is not None]
    listed = [part for scale in given for part in (scale if isinstance(scale, Sequence) else [scale])]
    return all(float(scale).is_integer() for scale in listed)


def nearest_of_piece(local: Local) -> object:
    need, rank = local.rule.needs[0], _rank(local.call)
    if not need.is_shard or need.dim < len(local.call.shapes[0]) - rank:
        return local.run()
    changed = {name: None for name in local.call.given() if name.startswith("scale")}
    return local.run(output_size=list(local.shapes[0][-rank:]), **changed)


def im2col(call: Call) -> Written:
    """[n, channels, X, Y] → [n, channels × window, places]."""
    channels = call.shapes[0][-3]
    batch = "n " if len(call.shapes[0]) == 4 else ""
    return f"{batch}c X0 X1 -> {batch}(c W) L", {"c": channels, "W": call.results[0][-2] // channels}


def col2im(call: Call) -> Written:
    channels = call.results[0][-3]
    batch = "n " if len(call.shapes[0]) == 3 else ""
    return f"{batch}(c W) L -> {batch}c Y0 Y1", {"c": channels, "W": call.shapes[0][-2] // channels}


def grid_sample(call: Call) -> str:
    rank = len(call.shapes[0]) - 2
    before, after = (" ".join(f"{c}{k}" for k in range(rank)) for c in "Xy")
    return f"n c {before} * f[n {after} G] -> n c {after}"


def affine_grid(call: Call) -> str:
    return f"n A B -> n {spec([f'Y{k}' for k in range(len(call.results[0]) - 2)])} A"


def affine_grid_of_piece(local: Local) -> object:
    return local.run(size=[local.tensors[0].shape[0], *local.call.arg("size")[1:]])


def unpooled(call: Call) -> str:
    """Each element goes to a place in the whole plane. Windows that overlap name a place twice, and the last to write
    there counts: pieces of space would add up, so space stays whole."""
    before, after = (spec(["...", *(f"{c}{k}" for k in range(_rank(call)))]) for c in "XY")
    return f"{before} * f[{before}] -> {after}"


def unpooled_of_piece(local: Local) -> object:
    """Going backward, the kernel wants indices in one block of memory, and a piece may be a view."""
    x, indices = local.tensors
    return local.run(self=x, indices=indices.clone(memory_format=torch.contiguous_format))


_NEAREST = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d"
    " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
)
_UPSAMPLE = (
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
    " _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)

WINDOWS: dict[str, Op] = {
    **entries("max_pool1d max_pool2d max_pool3d", Op(largest)),
    **entries("max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices", Op(largest)),
    **entries("avg_pool1d avg_pool2d avg_pool3d", Op(averaged)),
    **entries(
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
        Op(adaptive_average, local=mean_of_piece),
    ),
    **entries("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", Op(nonlinear)),
    **entries("max_unpool2d max_unpool3d", Op(unpooled, local=unpooled_of_piece)),
    **entries(_NEAREST, Op(nearest, local=nearest_of_piece)),
    **entries(_UPSAMPLE, Op(linear)),
    "aten.im2col": Op(im2col),
    "aten.col2im": Op(col2im),
    "aten.grid_sampler": Op(grid_sample),
    "aten.grid_sampler_2d": Op(grid_sample),
    "aten.grid_sampler_3d": Op(grid_sample),
    "aten.affine_grid_generator": Op(affine_grid, local=affine_grid_of_piece),
}


# Samples


_SPACE = {1: (6,), 2: (6, 4), 3: (4, 4, 6)}


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _samples_of_pools(draw)
    yield from _samples_of_upsamples(draw)
    yield from _samples_of_grids(draw)


def _samples_of_pools(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_upsamples(draw: Draw) -> Iterator[Sample]:
    for rank, space in {1: (3,), 2: (3, 2), 3: (3, 2, 2)}.items():
        doubled, odd = [2 * size for size in space], [size + 2 for size in space]
        for name in (f"upsample_nearest{rank}d", f"_upsample_nearest_exact{rank}d"):
            yield sample(f"aten.{name}.default", draw.real(5, 4, *space), doubled)
            yield sample(f"aten.{name}.default", draw.real(5, 4, *space), odd)
            if rank == 1:
                yield sample(f"aten.{name}.default", draw.real(1, 2, 8), [328])
            yield sample(f"aten.{name}.vec", draw.real(5, 4, *space), None, [2.0] * rank)
            yield sample(f"aten.{name}.vec", draw.real(3, 2, *(16, 2, 4)[:rank]), None, [2.05] * rank)
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


def _samples_of_grids(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.im2col.default", draw.real(5, 4, 6, 3), [2, 2], [1, 1], [0, 0], [1, 1])
    yield sample("aten.im2col.default", draw.real(4, 6, 3), [2, 2], [1, 1], [0, 0], [2, 1])
    yield sample("aten.col2im.default", draw.real(5, 16, 10), [6, 3], [2, 2], [1, 1], [0, 0], [1, 1])
    for name in ("grid_sampler", "grid_sampler_2d"):
        yield sample(f"aten.{name}.default", draw.real(5, 4, 3, 6), draw.positive(5, 7, 2, 2), 0, 0, False)
    for name in ("grid_sampler", "grid_sampler_3d"):
        yield sample(f"aten.{name}.default", draw.real(5, 4, 3, 6, 2), draw.positive(5, 7, 2, 3, 3), 0, 0, False)
    yield sample("aten.affine_grid_generator.default", draw.real(5, 2, 3), [5, 1, 4, 6], False)
    yield sample("aten.affine_grid_generator.default", draw.real(5, 3, 4), [5, 1, 4, 2, 6], True)
