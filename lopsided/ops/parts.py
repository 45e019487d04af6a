"""Ops that take a part of a dim, join parts, or change how long a dim is: the other dims are independent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lopsided.ir.placement import P
from lopsided.ops.op import (
    Call,
    Local,
    Op,
    Talk,
    Written,
    dim_of,
    dims_of,
    entries,
    letters,
    number,
    spec,
    sum_of_wholes,
)
from lopsided.ops.sample import Draw, Sample, sample

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
    """Tensors joined along a dim; torch still joins an empty vector to anything."""
    rank = len(call.results[0])
    real = [len(shape) == rank for shape in call.shapes]
    if all(real):
        return _joined(call, call.arg("dim") % rank, call.shapes, call.shapes)
    first, last = real.index(True), len(real) - real[::-1].index(True)
    if not all(real[first:last]):
        return sum_of_wholes(call)
    tensors = call.shapes[first:last]
    joined, _, out = _joined(call, call.arg("dim") % rank, tensors, tensors).partition(" -> ")
    empty = [f"f[Z{k}]" for k in range(len(real))]
    return f"{' * '.join([*empty[:first], f'{{{joined}}}', *empty[last:]])} -> {out}"


def stack_along(call: Call) -> str:
    """`hstack`, `vstack`, `dstack`, `column_stack`: a `cat` of tensors that first get the dims they lack."""
    rank = len(call.results[0])
    kind = call.node.op.removeprefix("aten.").partition(".")[0]
    dim = 0 if kind in ("vstack", "row_stack") or rank == 1 else 2 if kind == "dstack" else 1
    # Vectors are rows for `vstack`; otherwise new dims come last, except that `dstack` sees rows, too.
    if kind == "dstack" and any(len(shape) < 2 for shape in call.shapes):
        return sum_of_wholes(call)
    first = kind in ("vstack", "row_stack")
    shapes = [(*[1] * (rank - len(s)), *s) if first else (*s, *[1] * (rank - len(s))) for s in call.shapes]
    return _joined(call, dim, call.shapes, shapes)


def _joined(call: Call, dim: int, given: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int, ...]]) -> str:
    """Equal parts may be cut alike, unequal ones not. Dims `shapes` have beyond `given` are not written."""
    sizes = [shape[dim] for shape in shapes]
    names = letters(len(call.results[0]), [dim])
    alike = len(set(sizes)) == 1
    ins = []
    for k, shape in enumerate(given):
        written = [*names[:dim], "h9" if alike else f"X{k}", *names[dim + 1 :]]
        lacking = len(written) - len(shape)
        ins.append(spec(written[lacking:] if dim < lacking else written[: len(shape)]))
    if sizes == [1] * len(sizes):
        return f"{' + '.join(ins)} -> {spec([*names[:dim], 'Y', *names[dim + 1 :]])}"
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
    adds_nothing = number(call.arg("value") or 0) == 0 or all(width <= 0 for width in widths)
    linear = mode not in (None, "constant") or adds_nothing
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
    """`rot90`: half a turn mirrors two dims; a quarter makes them change places and mirrors one of them."""
    (first, second), quarters = dims_of(call, "dims"), int(call.arg("k")) % 4
    names = letters(len(call.shapes[0]), ([], [second], [first, second], [first])[quarters])
    out = list(names)
    if quarters % 2:
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
    lengths = dict(zip(names[len(after) - len(before) :], before, strict=True))
    counts = {f"T{dim}": count for dim, count in enumerate(times)}
    return f"{spec(names[len(after) - len(before) :])} -> {spec(right)}", lengths | counts


def repeat_interleave(call: Call) -> Written:
    before, names = call.shapes[0], letters(len(call.shapes[0]))
    sizes = {"T": call.arg("repeats"), **dict(zip(names, before, strict=True))}
    if call.arg("dim") is None:
        return f"{spec(names)} -> ({' '.join([*names, 'T'])})", sizes
    dim = dim_of(call)
    return f"{spec(names)} -> {spec([*names[:dim], f'({names[dim]} T)', *names[dim + 1 :]])}", sizes


def repeat_interleave_of_piece(local: Local) -> object:
    return local.run(output_size=None)  # a hint about the whole dim, which a piece is not


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


_SPLIT = (
    "split chunk split_with_sizes unsafe_split unsafe_split_with_sizes unsafe_chunk tensor_split.sections"
    " tensor_split.indices hsplit vsplit dsplit"
)
_FOURIER = (
    "fft_fft fft_fft2 fft_fftn fft_rfft fft_rfft2 fft_rfftn fft_hfft fft_hfft2 fft_hfftn fft_fftshift"
    " fft_ifft fft_ifft2 fft_ifftn fft_irfft fft_irfft2 fft_irfftn fft_ihfft fft_ihfft2 fft_ihfftn"
    " fft_ifftshift"
)

PARTS: dict[str, Op] = {
    "aten.slice": Op(part, local=part_of_piece),
    "aten.narrow.default": Op(part, local=part_of_piece),
    **entries(_SPLIT, Op(parts, local=parts_of_piece)),
    "aten.unbind": Op(unbind),
    "aten.select": Op(unbind),
    **entries("cat concat concatenate", Op(cat)),
    **entries("hstack vstack row_stack dstack column_stack", Op(stack_along)),
    "aten.stack": Op(stack),
    "aten.block_diag": Op(sum_of_wholes),
    "aten.select_scatter": Op(scatter_part),
    "aten.slice_scatter": Op(scatter_part),
    "aten.diagonal_scatter": Op(diagonal_scatter),
    "aten.tril": Op("... X Y -> ... X Y", talks=_triangle_talks),
    "aten.triu": Op("... X Y -> ... X Y", talks=_triangle_talks),
    "aten.pad": Op(pad),
    "aten.constant_pad_nd": Op(pad),
    **entries("reflection_pad1d reflection_pad2d reflection_pad3d", Op(padded_space)),
    **entries("replication_pad1d replication_pad2d replication_pad3d", Op(padded_space)),
    "aten.flip": Op(reordered),
    "aten.roll": Op(reordered),
    "aten.fliplr": Op(mirrored),
    "aten.flipud": Op(mirrored),
    "aten.rot90": Op(turned),
    "aten.repeat": Op(repeat),
    "aten.tile": Op(repeat),
    "aten.repeat_interleave.self_int": Op(repeat_interleave, local=repeat_interleave_of_piece),
    "aten.unfold": Op(unfold),
    "aten.diagonal": Op(diagonal),
    "aten.linalg_diagonal": Op(diagonal),
    "aten.diag": Op(sum_of_wholes),
    "aten.diagflat": Op(sum_of_wholes),
    "aten.diag_embed": Op(diagonal_embedded),
    "aten.trace": Op("X Y -> ()"),
    **entries(_FOURIER, Op(fourier)),
    "aten.stft": Op(short_fourier),
    "aten.istft": Op(inverse_short_fourier),
}


# Samples


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _samples_of_parts(draw)
    yield from _samples_of_joins(draw)
    yield from _samples_of_mirrored(draw)
    yield from _samples_of_lengths(draw)
    yield from _samples_of_fourier(draw)


def _samples_of_parts(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_joins(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_mirrored(draw: Draw) -> Iterator[Sample]:
    for name in ("fliplr", "flipud"):
        yield sample(f"aten.{name}.default", draw.real(5, 4, 6))
    yield sample("aten.flip.default", draw.real(5, 4, 6), [0, -1])
    yield sample("aten.roll.default", draw.real(5, 4), [2], [1])
    yield sample("aten.roll.default", draw.real(5, 4), [2])
    yield sample("aten.rot90.default", draw.real(5, 4, 6), 1, [0, 1])
    yield sample("aten.rot90.default", draw.real(5, 4, 6), 2, [0, 2])


def _samples_of_lengths(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_fourier(draw: Draw) -> Iterator[Sample]:
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
