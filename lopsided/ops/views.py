"""Ops that move elements without computing: their lines follow from the shapes of the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lopsided.call import resolve_op
from lopsided.graph import Ref
from lopsided.ops.op import Call, Local, Op, Talk, Written, dim_of, dims_of, letters, number, spec, sum_of_wholes, whole
from lopsided.placement import P

# Reshapes


def reshape(call: Call) -> Written:
    return reshape_line(call.shapes[0], call.results[0])


def reshape_line(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[str, dict[str, int]]:
    """Split and merge dims where their boundaries agree; where they do not, keep the dims whole.

    >>> reshape_line((4, 8, 6), (32, 2, 3))
    ('a1 a2 (a3 a4) -> (a1 a2) a3 a4', {'a1': 4, 'a2': 8, 'a3': 2, 'a4': 3})
    """
    if 0 in before:
        return f"{whole(before, 0)} -> {whole(after, 1)}", {}
    # A boundary is the product of the dims left of it: both shapes are the same elements in the same order.
    boundaries = [_prefixes(before), _prefixes(after)]
    atoms = [1]
    sizes: dict[str, int] = {}
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
    """`new_zeros` and its kin: dims that are as long as in the given tensor are cut with it, its values do not matter."""
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


def part(call: Call) -> str:
    """`slice` and `narrow`: an aligned block of equal blocks may be cut within the blocks, alike in each."""
    dim, before, after = dim_of(call), call.shapes[0], call.results[0]
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
    dim, before, after = dim_of(call), call.shapes[0], call.results[0]
    start = call.arg("start") or 0
    if call.arg("step") not in (None, 1) or not isinstance(start, int) or not after[dim] or before[dim] % after[dim]:
        return None
    start = start % before[dim] if start < 0 else start
    return None if start % after[dim] else start // after[dim]


def part_of_piece(local: Local) -> object:
    dim = dim_of(local.call)
    need, block = local.rule.needs[0], _block(local.call)
    if need.is_shard and need.dim == dim and block is not None:
        length = local.shapes[0][dim]
        return local.tensors[0].narrow(dim, block * length, length)
    return local.run()


def parts(call: Call) -> Written:
    """`split` and `chunk`: equal parts may be cut alike, unequal ones stay whole."""
    dim, before = _split_dim(call), call.shapes[0]
    sizes = [shape[dim] for shape in call.results]
    names = letters(len(before), [dim])
    outs = []
    for k in range(len(sizes)):
        out = list(names)
        out[dim] = "h9" if len(set(sizes)) == 1 else f"Y{k}"
        outs.append(spec(out))
    names[dim] = ("(B h9)" if len(sizes) > 1 else "h9") if len(set(sizes)) == 1 else "X"
    return f"{spec(names)} -> {', '.join(outs)}"


def _split_dim(call: Call) -> int:
    """`hsplit`, `vsplit` and `dsplit` have their dim in their name."""
    kind = call.node.op.removeprefix("aten.")[:6]
    if kind not in _SPLIT_DIMS:
        return dim_of(call)
    return min(_SPLIT_DIMS[kind], len(call.shapes[0]) - 1)


_SPLIT_DIMS = {"vsplit": 0, "hsplit": 1, "dsplit": 2}


def parts_of_piece(local: Local) -> object:
    dim = _split_dim(local.call)
    lengths = [shape[dim] for shape in local.shapes]
    return list(torch.split(local.tensors[0], lengths, dim))


def unbind(call: Call) -> str:
    dim = dim_of(call)
    names = letters(len(call.shapes[0]), [dim])
    rest = spec([n for d, n in enumerate(names) if d != dim])
    return f"{spec(names)} -> {', '.join([rest] * len(call.results))}"


def cat(call: Call) -> str:
    return _joined(call, call.arg("dim") % len(call.results[0]), call.shapes)


def stack_along(call: Call) -> str:
    """`hstack`, `vstack`, `dstack`, `column_stack`: a `cat` of tensors that first get the dims they lack."""
    rank = len(call.results[0])
    kind = call.node.op.removeprefix("aten.").partition(".")[0]
    dim = 0 if kind in ("vstack", "row_stack") or rank == 1 else 2 if kind == "dstack" else 1
    # Rows are lines of a matrix for `vstack`; otherwise new dims come last, except that `dstack` sees rows, too.
    if kind == "dstack" and any(len(shape) < 2 for shape in call.shapes):
        return sum_of_wholes(call)
    first = kind in ("vstack", "row_stack")
    shapes = [(*[1] * (rank - len(s)), *s) if first else (*s, *[1] * (rank - len(s))) for s in call.shapes]
    return _joined(call, dim, shapes)


def _joined(call: Call, dim: int, shapes: Sequence[tuple[int, ...]]) -> str:
    """Equal parts may be cut alike, unequal ones stay whole; a dim that a tensor only gets is not written."""
    if any(len(shape) != len(call.results[0]) for shape in shapes):  # torch still joins an empty vector to anything
        return sum_of_wholes(call)
    sizes = [shape[dim] for shape in shapes]
    names = letters(len(call.results[0]), [dim])
    alike = len(set(sizes)) == 1
    ins = []
    for k, shape in enumerate(call.shapes):
        written = [*names[:dim], "h9" if alike else f"X{k}", *names[dim + 1 :]]
        lacking = len(written) - len(shape)
        ins.append(spec(written[lacking:] if dim < lacking else written[: len(shape)]))
    out = [*names[:dim], ("(B h9)" if len(sizes) > 1 else "h9") if alike else "Y", *names[dim + 1 :]]
    return f"{' + '.join(ins)} -> {spec(out)}"


def stack(call: Call) -> str:
    dim = call.arg("dim") % len(call.results[0])
    names = letters(len(call.shapes[0]))
    return f"{' + '.join([spec(names)] * len(call.shapes))} -> {spec([*names[:dim], 'Y', *names[dim:]])}"


def scatter_part(call: Call) -> str:
    """`select_scatter`, `slice_scatter`: put a part back into a whole."""
    dim, names = dim_of(call), letters(len(call.shapes[0]), [dim_of(call)])
    inner = [n for d, n in enumerate(names) if d != dim] if "select" in call.node.op else list(names)
    if "slice" in call.node.op:
        inner[dim] = "X9"
    return f"{spec(names)} + {spec(inner)} -> {spec(names)}"


def diagonal_scatter(call: Call) -> str:
    first, second = dim_of(call, "dim1"), dim_of(call, "dim2")
    names = letters(len(call.shapes[0]), [first, second])
    return f"{spec(names)} + {spec([*(n for n in names if n.islower()), 'Z9'])} -> {spec(names)}"


def triangle_of_piece(local: Local) -> object:
    """Rows or columns are cut: the diagonal of a piece lies where the whole one meets it."""
    need, diagonal = local.rule.needs[0], int(local.call.arg("diagonal"))
    start = local.start(need)
    return local.run(diagonal=diagonal + (start if need.dim == local.tensors[0].dim() - 2 else -start))


def _triangle_talks(call: Call) -> list[Talk]:
    return [Talk(name, "triangle", triangle_of_piece, P, in_one_block=True) for name in ("X", "Y")]


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


def padded_space(call: Call) -> str:
    rank = len(call.shapes[0])
    return coupled(list(range(rank - len(call.arg("padding")) // 2, rank)), call)


def reordered(call: Call) -> str:
    """`flip` and `roll`."""
    return coupled(dims_of(call, "dims"), call)


def mirrored(call: Call) -> str:
    """`fliplr` and `flipud`."""
    return coupled([1 if "lr" in call.node.op else 0], call)


def turned(call: Call) -> str:
    """`rot90`: two dims are mirrored, and for odd turns change places."""
    first, second = dims_of(call, "dims")
    names = letters(len(call.shapes[0]), [first, second])
    out = list(names)
    if int(call.arg("k")) % 2:
        out[first], out[second] = out[second], out[first]
    return f"{spec(names)} -> {spec(out)}"


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
    before, names = call.shapes[0], letters(len(call.shapes[0]))
    sizes = {"T": call.arg("repeats"), **dict(zip(names, before, strict=True))}
    if call.arg("dim") is None:
        return f"{spec(names)} -> ({' '.join([*names, 'T'])})", sizes
    dim = dim_of(call)
    return f"{spec(names)} -> {spec([*names[:dim], f'({names[dim]} T)', *names[dim + 1 :]])}", sizes


def unfold(call: Call) -> str:
    dim = dim_of(call, "dimension")
    names = letters(len(call.shapes[0]), [dim])
    out = [*names, "Z"]
    out[dim] = "Y9"
    return f"{spec(names)} -> {spec(out)}"


def diagonal(call: Call) -> str:
    first, second = (dim_of(call, "dim1"), dim_of(call, "dim2"))
    names = letters(len(call.shapes[0]), [first, second])
    return f"{spec(names)} -> {spec([*(n for n in names if n.islower()), 'Z9'])}"


def diagonal_embedded(call: Call) -> str:
    rank = len(call.results[0])
    new_dims = {call.arg("dim1") % rank, call.arg("dim2") % rank}
    names = iter(letters(rank - 2))
    out = [f"Y{d}" if d in new_dims else next(names) for d in range(rank)]
    return f"{spec([*letters(rank - 2), 'Z9'])} -> {spec(out)}"


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


# Fourier transforms


def fourier(call: Call) -> str:
    sizes = call.arg("s")
    if call.arg("dim") is None and sizes is not None:
        rank = len(call.shapes[0])
        return coupled(list(range(rank - len(sizes), rank)), call)
    return coupled(dims_of(call), call)


def short_fourier(call: Call) -> str:
    """Linear in the signal and in the window."""
    batch = "n " if len(call.shapes[0]) == 2 else ""
    window = " * W" if call.is_tensor("window") else ""
    return f"{batch}T{window} -> {batch}F L" + (" C" if len(call.results[0]) == len(call.shapes[0]) + 2 else "")


def inverse_short_fourier(call: Call) -> str:
    batch = "n " if len(call.shapes[0]) == 3 else ""
    window = " * f[W]" if call.is_tensor("window") else ""
    return f"{batch}F L{window} -> {batch}T"


_RESHAPE = (
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze _reshape_alias ravel"
    " atleast_1d.default atleast_2d.default atleast_3d.default"
).split()
_PERMUTE = (
    "permute transpose t numpy_T mT mH movedim moveaxis swapaxes swapdims adjoint matrix_H"
).split()
_SPLIT = (
    "split chunk split_with_sizes unsafe_split unsafe_split_with_sizes unsafe_chunk tensor_split.sections"
    " tensor_split.indices hsplit vsplit dsplit"
).split()
_FOURIER = [
    f"fft_{inverse}{kind}"
    for inverse in ("", "i")
    for kind in ("fft", "fft2", "fftn", "rfft", "rfft2", "rfftn", "hfft", "hfft2", "hfftn", "fftshift")
]

VIEWS: dict[str, Op] = {
    **{f"aten.{name}": Op(reshape, local=to_local_shape) for name in _RESHAPE},
    "aten.view_as": Op(reshape_as, local=to_local_shape),
    "aten.reshape_as": Op(reshape_as, local=to_local_shape),
    **{f"aten.{name}": Op(permuted) for name in _PERMUTE},
    "aten.expand": Op(expand, local=expand_to_local_shape),
    "aten.expand_as": Op(expand_as, local=expand_to_local_shape),
    "aten.broadcast_to": Op(expand, local=expand_to_local_shape),
    "aten.broadcast_tensors": Op(broadcast_tensors, local=expand_each_to_local_shape),
    "aten.sum_to_size": Op(sum_to_size, local=sum_to_local_size),
    "aten.meshgrid": Op(meshgrid),
    "aten.cartesian_prod": Op(cartesian_product),
    **{f"aten.{name}": Op(new, local=new_of_local_shape) for name in ("new_zeros", "new_ones", "new_full", "new_empty")},
    "aten.slice": Op(part, local=part_of_piece),
    "aten.narrow.default": Op(part, local=part_of_piece),
    **{f"aten.{name}": Op(parts, local=parts_of_piece) for name in _SPLIT},
    "aten.unbind": Op(unbind),
    "aten.select": Op(unbind),
    **{f"aten.{name}": Op(cat) for name in ("cat", "concat", "concatenate")},
    **{f"aten.{name}": Op(stack_along) for name in ("hstack", "vstack", "row_stack", "dstack", "column_stack")},
    "aten.stack": Op(stack),
    "aten.block_diag": Op(sum_of_wholes),
    "aten.select_scatter": Op(scatter_part),
    "aten.slice_scatter": Op(scatter_part),
    "aten.diagonal_scatter": Op(diagonal_scatter),
    "aten.tril": Op("... X Y -> ... X Y", talks=_triangle_talks),
    "aten.triu": Op("... X Y -> ... X Y", talks=_triangle_talks),
    "aten.pad": Op(pad),
    "aten.constant_pad_nd": Op(pad),
    **{f"aten.{kind}_pad{d}d": Op(padded_space) for kind in ("reflection", "replication") for d in (1, 2, 3)},
    "aten.flip": Op(reordered),
    "aten.roll": Op(reordered),
    "aten.fliplr": Op(mirrored),
    "aten.flipud": Op(mirrored),
    "aten.rot90": Op(turned),
    "aten.repeat": Op(repeat),
    "aten.tile": Op(repeat),
    "aten.repeat_interleave.self_int": Op(repeat_interleave),
    "aten.unfold": Op(unfold),
    "aten.diagonal": Op(diagonal),
    "aten.linalg_diagonal": Op(diagonal),
    "aten.diag": Op(sum_of_wholes),
    "aten.diagflat": Op(sum_of_wholes),
    "aten.diag_embed": Op(diagonal_embedded),
    "aten.trace": Op("X Y -> ()"),
    "aten.view_as_complex": Op("... K -> ..."),
    "aten.view_as_real": Op("... -> ... K"),
    "aten.pixel_shuffle": Op(pixel_shuffle),
    "aten.pixel_unshuffle": Op(pixel_unshuffle),
    "aten.channel_shuffle": Op(channel_shuffle),
    **{f"aten.{name}": Op(fourier) for name in _FOURIER},
    "aten.stft": Op(short_fourier),
    "aten.istft": Op(inverse_short_fourier),
}
