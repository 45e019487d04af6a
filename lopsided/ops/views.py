"""Ops that move elements without computing: their lines follow from the shapes of the call."""

from __future__ import annotations

from typing import Any

import torch

from lopsided.call import resolve_op
from lopsided.graph import Ref
from lopsided.ops.op import Call, Local, Op, Written, letters, number, spec

# Reshapes


def reshape(call: Call) -> Written:
    """Split and merge dims where their boundaries agree; where they do not, keep the dims whole.

    >>> reshape_line((4, 8, 6), (32, 2, 3))
    ('(a0 a1) (a2 a3) -> ...', ...)    # doctest: +SKIP
    """
    return reshape_line(call.shapes[0], call.results[0])


def reshape_line(before: tuple[int, ...], after: tuple[int, ...]) -> Written:
    if 0 in before:
        return f"{spec(letters(len(before), range(len(before))))} -> {spec([c + '9' for c in letters(len(after), range(len(after)))])}"
    # A boundary is the product of the dims left of it: both shapes are the same elements in the same order.
    boundaries = [_prefixes(before), _prefixes(after)]
    atoms, sizes = [1], {}
    broken: set[int] = set()
    for boundary in sorted({*boundaries[0], *boundaries[1]}):
        if boundary % atoms[-1]:
            broken.add(atoms[-1])
            broken.add(boundary)
        atoms.append(boundary)
    sides = []
    fresh = 0
    for side, shape in enumerate((before, after)):
        dims, start = [], 1
        for size in shape:
            if size == 1:
                dims.append("1")
                continue
            inside = [b for b in atoms if start < b <= start * size]
            crossing = any(b in broken for b in inside) or start in broken
            if crossing or any(later % earlier for earlier, later in zip([start, *inside], inside, strict=False)):
                dims.append(f"{'XY'[side]}{fresh}")
                fresh += 1
            else:
                names = [f"a{atoms.index(b)}" for b in inside]
                for name, earlier, later in zip(names, [start, *inside], inside, strict=False):
                    sizes[name] = later // earlier
                dims.append(names[0] if len(names) == 1 else f"({' '.join(names)})")
            start *= size
        sides.append(" ".join(dims) or "()")
    return f"{sides[0]} -> {sides[1]}", sizes


def _prefixes(shape: tuple[int, ...]) -> set[int]:
    found, product = set(), 1
    for size in shape:
        product *= size
        found.add(product)
    return found - {1}


def to_local_shape(local: Local) -> object:
    return local.tensors[0].reshape(local.shapes[0])


def expand(call: Call) -> str:
    (before,), (after,) = call.shapes, call.results
    names = letters(len(after))
    kept = names[len(after) - len(before) :]
    return f"{spec(['1' if size == 1 else n for n, size in zip(kept, before, strict=True)])} -> {spec(names)}"


def expand_to_local_shape(local: Local) -> object:
    return local.tensors[0].expand(local.shapes[0])


def broadcast_tensors(call: Call) -> str:
    return f"{' + '.join(['...'] * len(call.operands))} -> {', '.join(['...'] * len(call.results))}"


def expand_each_to_local_shape(local: Local) -> object:
    return [x.expand(shape) for x, shape in zip(local.tensors, local.shapes, strict=True)]


# Orders of dims


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def permuted(call: Call) -> str:
    """Any op that reorders dims, found by running it on a shape whose dims are all different."""
    rank = len(call.shapes[0])
    probe = torch.empty(_PRIMES[:rank], device="meta")
    args = [probe if isinstance(arg, Ref) else list(arg) if isinstance(arg, tuple) else arg for arg in call.node.args]
    moved = resolve_op(call.node.op)(*args)
    names = letters(rank)
    return f"{spec(names)} -> {spec([names[_PRIMES.index(size)] for size in moved.shape])}"


# Parts of a dim


def _dim(call: Call, name: str = "dim") -> int:
    dim = call.arg(name)
    return (dim if isinstance(dim, int) else 0) % max(len(call.shapes[0]), 1)


def part(call: Call) -> str:
    """`slice` and `narrow`: an aligned block of equal blocks may be cut within the blocks, alike in each."""
    dim, before, after = _dim(call), call.shapes[0], call.results[0]
    names = letters(len(before), [dim])
    target = list(names)
    if before[dim] == after[dim]:
        names[dim] = target[dim] = names[dim].lower()
    elif _block(call) is not None:
        names[dim], target[dim] = "(B h9)", "h9"
    else:
        names[dim], target[dim] = "X", "Y"
    return f"{spec(names)} -> {spec(target)}"


def _block(call: Call) -> int | None:
    """Which of several equal blocks a slice takes, if it takes exactly one."""
    dim, before, after = _dim(call), call.shapes[0], call.results[0]
    start = call.arg("start") or 0
    if call.arg("step") not in (None, 1) or not isinstance(start, int) or not after[dim] or before[dim] % after[dim]:
        return None
    start = start % before[dim] if start < 0 else start
    return None if start % after[dim] else start // after[dim]


def part_of_piece(local: Local) -> object:
    dim = _dim(local.call)
    need, block = local.rule.needs[0], _block(local.call)
    if need.is_shard and need.dim == dim and block is not None:
        length = local.shapes[0][dim]
        return local.tensors[0].narrow(dim, block * length, length)
    return local.run()


def parts(call: Call) -> Written:
    """`split` and `chunk`: equal parts may be cut alike, unequal ones stay whole."""
    dim, before = _dim(call), call.shapes[0]
    sizes = [shape[dim] for shape in call.results]
    names = letters(len(before), [dim])
    outs = []
    for k in range(len(sizes)):
        out = list(names)
        out[dim] = "h9" if len(set(sizes)) == 1 else f"Y{k}"
        outs.append(spec(out))
    names[dim] = ("(B h9)" if len(sizes) > 1 else "h9") if len(set(sizes)) == 1 else "X"
    return f"{spec(names)} -> {', '.join(outs)}"


def parts_of_piece(local: Local) -> object:
    dim = _dim(local.call)
    lengths = [shape[dim] for shape in local.shapes]
    return list(torch.split(local.tensors[0], lengths, dim))


def unbind(call: Call) -> str:
    dim = _dim(call)
    names = letters(len(call.shapes[0]), [dim])
    rest = spec([n for d, n in enumerate(names) if d != dim])
    return f"{spec(names)} -> {', '.join([rest] * len(call.results))}"


def select(call: Call) -> str:
    return unbind(call)


def cat(call: Call) -> Written:
    dim = call.arg("dim") % len(call.results[0])
    sizes = [shape[dim] if len(shape) > dim else 0 for shape in call.shapes]
    if len({len(shape) for shape in call.shapes}) > 1:  # torch still joins an empty vector to anything
        return " + ".join(spec([f"{c}{k}" for c in letters(len(s), range(len(s)))]) for k, s in enumerate(call.shapes)) + (
            " -> " + spec([f"{c}99" for c in letters(len(call.results[0]), range(len(call.results[0])))])
        )
    names = letters(len(call.results[0]), [dim])
    alike = len(set(sizes)) == 1
    ins = [spec([*names[:dim], "h9" if alike else f"X{k}", *names[dim + 1 :]]) for k in range(len(sizes))]
    out = [*names[:dim], ("(B h9)" if len(sizes) > 1 else "h9") if alike else "Y", *names[dim + 1 :]]
    return f"{' + '.join(ins)} -> {spec(out)}"


def stack(call: Call) -> str:
    dim = call.arg("dim") % len(call.results[0])
    names = letters(len(call.shapes[0]))
    return f"{' + '.join([spec(names)] * len(call.shapes))} -> {spec([*names[:dim], 'Y', *names[dim:]])}"


def scatter_part(call: Call) -> str:
    """`select_scatter`, `slice_scatter`: put a part back into a whole."""
    dim, names = _dim(call), letters(len(call.shapes[0]), [_dim(call)])
    inner = [n for d, n in enumerate(names) if d != dim] if "select" in call.node.op else list(names)
    if "slice" in call.node.op:
        inner[dim] = "X9"
    return f"{spec(names)} + {spec(inner)} -> {spec(names)}"


def keep_last_two(call: Call) -> str:
    return "... X Y -> ... X Y"


# Dims that change length


def coupled(dims: list[int], call: Call, *, linear: bool = True) -> str:
    """These dims are mixed or change length, the others are independent; the rank stays."""
    rank = len(call.shapes[0])
    names = letters(rank, dims)
    changed = [n if n.islower() else n + "9" for n in names]
    same = call.shapes[0] == call.results[0]
    left = spec(names) if linear else f"f[{spec(names)}]"
    return f"{left} -> {spec(names if same else changed)}"


def pad(call: Call) -> str:
    widths = call.arg("pad")
    rank = len(call.shapes[0])
    padded = [rank - 1 - k // 2 for k, width in enumerate(widths) if width]
    mode = call.arg("mode")
    linear = mode not in (None, "constant") or number(call.arg("value") or 0) == 0
    return coupled(padded, call, linear=linear)


def reordered(call: Call) -> str:
    """`flip` and `roll`."""
    dims = call.arg("dims")
    rank = len(call.shapes[0])
    listed = [dims] if isinstance(dims, int) else list(dims or ()) or list(range(rank))
    return coupled(listed, call)


def repeat(call: Call) -> Written:
    times = list(call.arg("repeats") if call.arg("repeats") is not None else call.arg("dims"))
    before, after = call.shapes[0], call.results[0]
    times = [1] * (len(after) - len(times)) + times
    names = letters(len(after))
    right = []
    for dim, (name, count) in enumerate(zip(names, times, strict=True)):
        new = dim < len(after) - len(before)
        right.append((f"N{dim}" if new else name) if new or count == 1 else f"(T{dim} {name})")
    lengths = {n: size for n, size in zip(names[len(after) - len(before) :], before, strict=True)}
    counts = {f"T{dim}": count for dim, count in enumerate(times)}
    return f"{spec(names[len(after) - len(before) :])} -> {spec(right)}", lengths | counts


def repeat_interleave(call: Call) -> Written:
    before = call.shapes[0]
    if call.arg("dim") is None:
        return f"{spec(letters(len(before), range(len(before))))} -> Y9"
    dim, names = _dim(call), letters(len(before))
    times = call.arg("repeats")
    return f"{spec(names)} -> {spec([*names[:dim], f'({names[dim]} T)', *names[dim + 1 :]])}", {"T": times, names[dim]: before[dim]}


def unfold(call: Call) -> str:
    dim = _dim(call, "dimension")
    names = letters(len(call.shapes[0]), [dim])
    out = [*names, "Z"]
    out[dim] = "Y9"
    return f"{spec(names)} -> {spec(out)}"


def diagonal(call: Call) -> str:
    rank = len(call.shapes[0])
    first, second = call.arg("dim1") % rank, call.arg("dim2") % rank
    names = letters(rank, [first, second])
    return f"{spec(names)} -> {spec([*(n for n in names if n.islower()), 'Z9'])}"


def fourier(call: Call) -> str:
    dims: Any = call.arg("dim")
    rank = len(call.shapes[0])
    listed = [dims] if isinstance(dims, int) else list(dims) if dims is not None else list(range(rank))
    return coupled(listed, call)


_RESHAPE = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "_reshape_alias", "atleast_1d", "ravel")
_PERMUTE = ("permute", "transpose", "t", "numpy_T", "mT", "mH", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "matrix_H")
_FOURIER = [f"fft_{inverse}{kind}" for inverse in ("", "i") for kind in ("fft", "fft2", "fftn", "rfft", "rfft2", "rfftn", "hfft")]

VIEWS: dict[str, Op] = {
    **{f"aten.{name}": Op(reshape, local=to_local_shape) for name in _RESHAPE},
    **{f"aten.{name}": Op(permuted) for name in _PERMUTE},
    "aten.expand": Op(expand, local=expand_to_local_shape),
    "aten.broadcast_to": Op(expand, local=expand_to_local_shape),
    "aten.broadcast_tensors": Op(broadcast_tensors, local=expand_each_to_local_shape),
    "aten.slice": Op(part, local=part_of_piece),
    "aten.narrow": Op(part, local=part_of_piece),
    **{f"aten.{name}": Op(parts, local=parts_of_piece) for name in ("split", "chunk", "split_with_sizes", "unsafe_split", "unsafe_chunk", "tensor_split")},
    "aten.unbind": Op(unbind),
    "aten.select": Op(select),
    "aten.cat": Op(cat),
    "aten.concat": Op(cat),
    "aten.concatenate": Op(cat),
    "aten.stack": Op(stack),
    "aten.select_scatter": Op(scatter_part),
    "aten.slice_scatter": Op(scatter_part),
    "aten.tril": Op(keep_last_two),
    "aten.triu": Op(keep_last_two),
    "aten.pad": Op(pad),
    "aten.constant_pad_nd": Op(pad),
    "aten.flip": Op(reordered),
    "aten.roll": Op(reordered),
    "aten.repeat": Op(repeat),
    "aten.tile": Op(repeat),
    "aten.repeat_interleave.self_int": Op(repeat_interleave),
    "aten.unfold": Op(unfold),
    "aten.diagonal": Op(diagonal),
    "aten.view_as_complex": Op("... K -> ..."),
    "aten.view_as_real": Op("... -> ... K"),
    "aten.pixel_shuffle": Op("... X Y Z -> ... A B C"),
    "aten.pixel_unshuffle": Op("... X Y Z -> ... A B C"),
    **{f"aten.{name}": Op(fourier) for name in _FOURIER},
}
