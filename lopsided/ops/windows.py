"""Ops over windows of space: batch and channels are independent, space stays whole."""

from __future__ import annotations

import re

from lopsided.ops.op import Call, Op, Written


def _space(call: Call) -> int:
    found = re.search(r"([123])d", call.node.op)
    return int(found.group(1)) if found else len(call.shapes[0]) - 2


def _windows(call: Call, *, linear: bool) -> str:
    rank = _space(call)
    before = " ".join(f"X{k}" for k in range(rank))
    after = " ".join(f"Y{k}" for k in range(rank))
    left = f"... {before}" if linear else f"f[... {before}]"
    return f"{left} -> {', '.join([f'... {after}'] * len(call.results))}"


def linear(call: Call) -> str:
    return _windows(call, linear=True)


def nonlinear(call: Call) -> str:
    return _windows(call, linear=False)


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


_DIMS = (1, 2, 3)
_UPSAMPLE = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d"
    " _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
    " _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
).split()

WINDOWS: dict[str, Op] = {
    **{f"aten.max_pool{d}d": Op(nonlinear) for d in _DIMS},
    **{f"aten.max_pool{d}d_with_indices": Op(nonlinear) for d in _DIMS},
    **{f"aten.avg_pool{d}d": Op(linear) for d in _DIMS},
    **{f"aten.adaptive_avg_pool{d}d": Op(linear) for d in _DIMS},
    **{f"aten.adaptive_max_pool{d}d": Op(nonlinear) for d in _DIMS},
    **{f"aten.{name}": Op(linear) for name in _UPSAMPLE},
    "aten.im2col": Op(im2col),
    "aten.col2im": Op(col2im),
    "aten.grid_sampler": Op(grid_sample),
    "aten.grid_sampler_2d": Op(grid_sample),
}
