"""Ops that move elements without computing: their lines follow from the shapes of the call."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

import torch

from lopsided.ir.graph import Ref
from lopsided.ir.op_call import resolve_op
from lopsided.ops.op import Call, Local, Op, Written, entries, letters, spec, whole
from lopsided.ops.sample import Draw, Sample, sample

# Reshapes


def reshape(call: Call) -> Written:
    return reshape_line(call.shapes[0], call.results[0])


def reshape_line(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[str, dict[str, int]]:
    """Split and merge dims where their boundaries agree; what lies between others stays whole.

    >>> reshape_line((4, 8, 6), (32, 2, 3))
    ('a1 a2 (a3 a4) -> (a1 a2) a3 a4', {'a1': 4, 'a2': 8, 'a3': 2, 'a4': 3})
    >>> reshape_line((6, 3, 8), (12, 12))[0]
    'a1 X0 X1 -> (a1 Y2) Y3'
    """
    if 0 in before:
        return f"{whole(before, 0)} -> {whole(after, 1)}", {}
    shared = _shared_indices(before, after)
    sides, sizes, fresh = [], dict[str, int](), itertools.count()
    for side, shape in zip("XY", (before, after), strict=True):
        dims = []
        for start, end in _spans(shape):
            names, reached = [], start
            for name, (low, high) in [*shared.items(), ("", (end, end))]:
                if start <= low and high <= end and end > start:
                    if low > reached:
                        names.append(f"{side}{next(fresh)}")
                        sizes[names[-1]] = low // reached
                    if name:
                        names.append(name)
                        sizes[name] = high // low
                    reached = high
            dims.append(f"({' '.join(names)})" if len(names) > 1 else names[0] if names else "1")
        sides.append(" ".join(dims) or "()")
    return f"{sides[0]} -> {sides[1]}", sizes


def _spans(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where each dim lies: the product of the dims left of it, and that times its size."""
    ends = list(itertools.accumulate(shape, operator.mul, initial=1))
    return list(itertools.pairwise(ends))


def _shared_indices(before: tuple[int, ...], after: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """The indices both shapes have: each between two neighbouring boundaries of dims, which are products of the dims
    left of them. An index is one of a dim if what lies left and right of it within the dim is a whole number of times.
    """
    spans = [_spans(before), _spans(after)]
    found: dict[str, tuple[int, int]] = {}
    boundaries = sorted({end for side in spans for _, end in side} | {1})
    for number, (low, high) in enumerate(itertools.pairwise(boundaries), start=1):
        around = [next(span for span in side if span[0] <= low and high <= span[1]) for side in spans]
        # A dim is written as a product of indices, so the one before in the same dim must divide this one's place.
        last = [max((end for _, end in found.values() if start < end <= low), default=start) for start, _ in around]
        if high % low == 0 and not any(low % at for at in last) and not any(end % high for _, end in around):
            found[f"a{number}"] = low, high
    return found


def to_local_shape(local: Local) -> object:
    return local.tensors[0].reshape(local.shapes[0])


def reshape_as(call: Call) -> Written:
    """Of the other tensor only the shape matters; it is cut as the result is."""
    line, sizes = reshape_line(call.shapes[0], call.results[0])
    before, _, after = line.partition(" -> ")
    return f"{before} * f[{after}] -> {after}", sizes


def expand(call: Call) -> str:
    before, after = call.shapes[0], call.results[0]
    names = letters(len(after))
    kept = names[len(after) - len(before) :]
    return f"{spec(['1' if size == 1 else n for n, size in zip(kept, before, strict=True)])} -> {spec(names)}"


def expand_as(call: Call) -> str:
    before, _, after = expand(call).partition(" -> ")
    return f"{before} * f[{after}] -> {after}"


def expand_to_local_shape(local: Local) -> object:
    return local.tensors[0].expand(local.shapes[0])


def broadcast_tensors(call: Call) -> str:
    return f"{' + '.join(['...'] * len(call.operands))} -> {', '.join(['...'] * len(call.results))}"


def meshgrid(call: Call) -> str:
    names = letters(len(call.operands))
    swapped = call.arg("indexing") == "xy" and len(names) > 1
    out = [names[1], names[0], *names[2:]] if swapped else names
    return f"{' + '.join(names)} -> {', '.join([spec(out)] * len(names))}"


def cartesian_product(call: Call) -> str:
    names = letters(len(call.operands))
    return f"{' + '.join(names)} -> {f'({spec(names)}) K' if len(names) > 1 else names[0]}"


def new(call: Call) -> str:
    """`new_zeros` and its kin: dims as long as in the tensor given are cut with it, its values not used."""
    before, after = call.shapes[0], call.results[0]
    names = letters(len(after))
    old = [names[d] if d < len(after) and after[d] == size else f"X{d}" for d, size in enumerate(before)]
    left = spec(old) if call.node.op.startswith("aten.new_zeros") else f"f[{spec(old)}]"
    return f"{left} -> {spec(names)}"


def new_of_local_shape(local: Local) -> object:
    if local.call.node.op.startswith("aten.new_empty"):
        return local.tensors[0].new_zeros(local.shapes[0], dtype=local.call.node.results[0].torch_dtype)
    return local.run(size=list(local.shapes[0]))


def expand_each_to_local_shape(local: Local) -> object:
    return [x.expand(shape) for x, shape in zip(local.tensors, local.shapes, strict=True)]


def pixel_shuffle(call: Call) -> Written:
    factor = int(call.arg("upscale_factor"))
    return "... (c R S) h w -> ... c (h R) (w S)", {"R": factor, "S": factor}


def pixel_unshuffle(call: Call) -> Written:
    factor = int(call.arg("downscale_factor"))
    return "... c (h R) (w S) -> ... (c R S) h w", {"R": factor, "S": factor}


def channel_shuffle(call: Call) -> Written:
    space = " ".join(f"x{k}" for k in range(len(call.shapes[0]) - 2))
    return f"n (G c) {space} -> n (c G) {space}", {"G": int(call.arg("groups"))}


def sum_to_size(call: Call) -> str:
    before, after = call.shapes[0], call.results[0]
    names = letters(len(before))
    out = names[len(before) - len(after) :]
    return f"{spec(names)} -> {spec(['1' if size == 1 else n for n, size in zip(out, after, strict=True)])}"


def sum_to_local_size(local: Local) -> object:
    return local.run(size=list(local.shapes[0]))


# Orders of dims


def permuted(call: Call) -> str:
    """Any op that reorders dims, found by running it on a shape whose dims are all different."""
    rank = len(call.shapes[0])
    probe = torch.empty(tuple(range(2, rank + 2)), device="meta")
    args = [probe if isinstance(arg, Ref) else list(arg) if isinstance(arg, tuple) else arg for arg in call.node.args]
    moved = resolve_op(call.node.op)(*args)
    names = letters(rank)
    return f"{spec(names)} -> {spec([names[size - 2] for size in moved.shape])}"


_RESHAPE = (
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze _reshape_alias ravel"
    " atleast_1d.default atleast_2d.default atleast_3d.default"
)
_PERMUTE = "permute transpose t numpy_T mT mH movedim moveaxis swapaxes swapdims adjoint matrix_H"

VIEWS: dict[str, Op] = {
    **entries(_RESHAPE, Op(reshape, local=to_local_shape)),
    "aten.view_as": Op(reshape_as, local=to_local_shape),
    "aten.reshape_as": Op(reshape_as, local=to_local_shape),
    **entries(_PERMUTE, Op(permuted)),
    "aten.expand": Op(expand, local=expand_to_local_shape),
    "aten.expand_as": Op(expand_as, local=expand_to_local_shape),
    "aten.broadcast_to": Op(expand, local=expand_to_local_shape),
    "aten.broadcast_tensors": Op(broadcast_tensors, local=expand_each_to_local_shape),
    "aten.sum_to_size": Op(sum_to_size, local=sum_to_local_size),
    "aten.meshgrid": Op(meshgrid),
    "aten.cartesian_prod": Op(cartesian_product),
    **entries("new_zeros new_ones new_full new_empty", Op(new, local=new_of_local_shape)),
    "aten.view_as_complex": Op("... K -> ..."),
    "aten.view_as_real": Op("... -> ... K"),
    "aten.pixel_shuffle": Op(pixel_shuffle),
    "aten.pixel_unshuffle": Op(pixel_unshuffle),
    "aten.channel_shuffle": Op(channel_shuffle),
}


# Samples


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _samples_of_reshapes(draw)
    yield from _samples_of_orders(draw)
    yield from _samples_of_channels_and_fills(draw)


def _samples_of_reshapes(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_orders(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_channels_and_fills(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.pixel_shuffle.default", draw.real(5, 12, 4, 3), 2)
    yield sample("aten.pixel_unshuffle.default", draw.real(5, 3, 4, 6), 2)
    yield sample("aten.channel_shuffle.default", draw.real(5, 12, 3, 2), 3)
    for name in ("new_zeros", "new_ones", "new_empty"):
        yield sample(f"aten.{name}.default", draw.constant(5, 4, 6), [5, 4])
    yield sample("aten.new_full.default", draw.constant(5, 4), [5, 7], 2.0)
    yield sample("aten.new_zeros.default", draw.constant(), [5])
