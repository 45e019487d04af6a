"""Products: linear in each operand, so partial sums pass and sufficient factor broadcasting applies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from lopsided.ir.placement import P
from lopsided.ops.op import Call, Local, Op, Talk, Written, entries, letters, number, spec, whole, wholes
from lopsided.ops.sample import Draw, Sample, sample


def matmul(call: Call) -> str:
    first, second = (len(shape) for shape in call.shapes)
    left = "i" if first == 1 else "... m i"
    right = "i" if second == 1 else "... i n"
    lead = ["..."] if max(first, second) > 1 else []
    out = [*lead, *(["m"] if first > 1 else []), *(["n"] if second > 1 else [])]
    # A vector and a matrix without leading dims: nothing for '...' to stand for is no harm.
    return f"{left} * {right} -> {spec(out)}"


def einsum(call: Call) -> str:
    equation = str(call.arg("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        used = [c for c in sorted(set(left)) if c.isalpha() and left.count(c) == 1]
        right = ("..." if "..." in left else "") + "".join(used)
    plain = [term.replace("...", "") for term in (*terms, right)]
    if any(len(set(term)) != len(term) for term in plain):
        # A letter twice in one operand takes a diagonal.
        operands, results = wholes(call)
        return f"{' * '.join(operands)} -> {results[0]}"
    return f"{' * '.join(map(_einsum_spec, terms))} -> {_einsum_spec(right)}"


def _einsum_spec(term: str) -> str:
    # Einsum tells letters by case; here the case has a meaning, so capitals become numbered letters.
    parts = term.replace("...", ".")
    return spec(["..." if c == "." else c if c.islower() else f"{c.lower()}1" for c in parts])


def added(names: str, product: str) -> Op:
    """A product plus a tensor that broadcasts to it (`addmm` and its kin)."""

    def line(call: Call) -> str:
        return f"{spec(names.split()[len(names.split()) - len(call.shapes[0]) :])} + {product} -> {names}"

    return Op(line)


def inner(call: Call) -> str:
    left, right = ([f"{c}{k}" for k in range(len(shape) - 1)] for c, shape in zip("ab", call.shapes, strict=True))
    return f"{spec([*left, 'i'])} * {spec([*right, 'i'])} -> {spec([*left, *right])}"


def chain(call: Call) -> str:
    """Matrices multiplied in a row; the first and the last may be vectors."""
    links = [f"i{k}" for k in range(len(call.shapes) + 1)]
    terms = [links[k : k + 2] for k in range(len(call.shapes))]
    out = [links[0], links[-1]]
    if len(call.shapes[0]) == 1:
        terms[0], out = [links[1]], out[1:]
    if len(call.shapes[-1]) == 1:
        terms[-1], out = [links[-2]], out[:-1]
    return f"{' * '.join(map(spec, terms))} -> {spec(out)}"


def kron(call: Call) -> str:
    rank = len(call.results[0])
    left, right = ([f"{c}{d}" for d in range(rank)] for c in "ab")
    # The shorter one has dims of length one in front.
    lacking = [rank - len(shape) for shape in call.shapes]
    out = [
        f"({a} {b})" if d >= max(lacking) else a if d >= lacking[0] else b
        for d, (a, b) in enumerate(zip(left, right, strict=True))
    ]
    return f"{spec(left[lacking[0] :])} * {spec(right[lacking[1] :])} -> {spec(out)}"


def tensordot(call: Call) -> str:
    sides = []
    for c, name, shape in (("a", "dims_self", call.shapes[0]), ("b", "dims_other", call.shapes[1])):
        summed = {dim % len(shape): f"i{k}" for k, dim in enumerate(call.arg(name))}
        sides.append([summed.get(d, f"{c}{d}") for d in range(len(shape))])
    out = [name for side in sides for name in side if name[0] != "i"]
    return f"{spec(sides[0])} * {spec(sides[1])} -> {spec(out)}"


def _aligned(call: Call, dim: int, *, coupled: bool) -> list[str]:
    """Operands that broadcast against each other, with one dim singled out."""
    rank = max(map(len, call.shapes))
    names = letters(rank, [dim] if coupled else [])
    return [spec(names[rank - len(shape) :]) for shape in call.shapes]


def dot_along(call: Call) -> str:
    rank, dim = max(map(len, call.shapes)), call.arg("dim")
    out = [name for d, name in enumerate(letters(rank)) if d != dim % rank]
    return f"{' * '.join(_aligned(call, dim, coupled=False))} -> {spec(out)}"


def cross(call: Call) -> str:
    rank, dim = max(map(len, call.shapes)), _cross_dim(call)
    return f"{' * '.join(_aligned(call, dim, coupled=True))} -> {spec(letters(rank, [dim]))}"


def _cross_dim(call: Call) -> int:
    """Where none is given, the first dim of length three: of the whole tensors, whatever pieces look like."""
    dim = call.arg("dim")
    return dim if isinstance(dim, int) else call.results[0].index(3)


def cross_of_piece(local: Local) -> object:
    return local.run(dim=_cross_dim(local.call))


# Convolutions


def _is_transposed(call: Call) -> bool:
    return "transpose" in call.node.op or bool(call.arg("transposed"))


def _numbers(call: Call, name: str, rank: int) -> list[int]:
    """A setting that has one number per dim of space, or one for all."""
    given = call.arg(name)
    listed = [given] if isinstance(given, int) else list(given)
    return listed * rank if len(listed) == 1 else listed


def tiles(
    windows: Sequence[int], strides: Sequence[int], paddings: Sequence[int], dilations: Sequence[int]
) -> list[bool]:
    """Whether windows lie side by side along each dim: then space may be cut between them."""
    settings = zip(windows, strides, paddings, dilations, strict=True)
    return [stride == window and not padding and dilation == 1 for window, stride, padding, dilation in settings]


def convolution(call: Call) -> Written:
    """`n (g i) space * (g o) i window + (g o) -> n (g o) space`; transposed, weights are `(g i) o window`.

    Space stays whole where windows overlap. Windows side by side (patches, 1×1) may be cut between them.
    """
    x, weight = call.shapes[0], call.shapes[1]
    rank, groups, transposed = len(weight) - 2, int(call.arg("groups")), _is_transposed(call)
    batch = "n " if len(x) == rank + 2 else ""
    window, before, after = _convolved_space(call, rank)
    g_in, g_out = ("(g i)", "(g o)") if groups > 1 else ("i", "o")
    kernel = f"{g_in} o {window}" if transposed else f"{g_out} i {window}"
    line = f"{batch}{g_in} {before} * {kernel} + {g_out} -> {batch}{g_out} {after}"
    sizes = {f"K{k}": size for k, size in enumerate(weight[2:])}
    if groups > 1:
        outputs = weight[1] if transposed else weight[0] // groups
        sizes |= {"g": groups, "i": x[-rank - 1] // groups, "o": outputs}
    return line, sizes


def _convolved_space(call: Call, rank: int) -> tuple[str, str, str]:
    windows, space = call.shapes[1][2:], call.shapes[0][-rank:]
    side_by_side = [False] * rank
    if not _is_transposed(call) and not isinstance(call.arg("padding"), str):
        settings = (_numbers(call, name, rank) for name in ("stride", "padding", "dilation"))
        side_by_side = [
            tiled and not size % window
            for tiled, window, size in zip(tiles(windows, *settings), windows, space, strict=True)
        ]
    before = [f"(x{k} K{k})" if tiled else f"X{k}" for k, tiled in enumerate(side_by_side)]
    after = [f"x{k}" if tiled else f"Y{k}" for k, tiled in enumerate(side_by_side)]
    return spec([f"K{k}" for k in range(rank)]), spec(before), spec(after)


def convolution_of_piece(local: Local) -> object:
    x, weight = local.tensors[0], local.tensors[1]
    rank = weight.dim() - 2
    channels = x.shape[-rank - 1]
    if not channels or not weight.shape[1]:
        # Kernels refuse a convolution over no channels; as a term of a sum it is the bias alone.
        out = local.nothing()
        return local.as_result(out + local.tensors[2].reshape(-1, *[1] * rank)) if len(local.tensors) > 2 else out
    if int(local.call.arg("groups")) == 1:
        return local.run()
    if _is_transposed(local.call):
        return local.run(groups=local.shapes[0][-rank - 1] // weight.shape[1])
    return local.run(groups=channels // weight.shape[1])


# Bilinear forms


def bilinear_of_piece(local: Local) -> object:
    """Kernels refuse a form over no features; as a term of a sum it is the bias alone."""
    _, _, weight, *bias = local.tensors
    if weight.numel():
        return local.run()
    out = local.nothing()
    return local.as_result(out + bias[0] if bias else out)


# Recurrent layers


def recurrent(call: Call) -> str:
    """LSTM, GRU and RNN over padded batches: only the batch may be cut, and not where layers drop between them."""
    # The masks are drawn inside the kernel, in the shape of what it is given: a piece would draw others.
    is_dropping = bool(call.arg("train")) and number(call.arg("dropout")) > 0 and int(call.arg("num_layers")) > 1
    batch = "" if len(call.shapes[0]) < 3 else "N " if is_dropping else "n "
    sequence = "{batch}T {features}" if call.arg("batch_first") else "T {batch}{features}"
    states = [f"L {batch}H{k}" for k in range(len(call.results) - 1)]
    weights = [whole(shape, k) for k, shape in enumerate(call.shapes[1 + len(states) :])]
    x, out = (sequence.format(batch=batch, features=features) for features in ("X", "Y"))
    return f"f[{', '.join([x, *states, *weights])}] -> {', '.join([out, *states])}"


def recurrent_cell(call: Call) -> str:
    batch = "n " if len(call.shapes[0]) == 2 else ""
    states = [f"{batch}H{k}" for k in range(len(call.results))]
    weights = [whole(shape, k) for k, shape in enumerate(call.shapes[1 + len(states) :])]
    return f"f[{', '.join([f'{batch}X', *states, *weights])}] -> {', '.join(states)}"


# Experts


def grouped_mm(call: Call) -> str:
    """Tokens sorted by expert times a stack of matrices. Where an expert's end is data: they stay whole."""
    ranks = [len(shape) for shape in call.shapes[:2]]
    if ranks == [3, 3]:
        return "e m i * e i n -> e m n"
    tokens = {
        (2, 3): "T i * E i n * f[Z] -> T n",
        (3, 2): "E m i * i T * f[Z] -> m T",
        (2, 2): "m T * T n * f[Z] -> E m n",
    }
    return tokens[ranks[0], ranks[1]]


def grouped_mm_of_piece(local: Local) -> object:
    """Kernels want rows in multiples of 16 bytes: pieces are filled up with zeros."""
    x, stack = local.tensors[:2]
    if not x.numel() or not stack.numel():
        return local.nothing()
    return _grouped_mm(local, x, stack, local.tensors[2:])


def _grouped_mm(local: Local, x: torch.Tensor, stack: torch.Tensor, ends: Sequence[torch.Tensor]) -> torch.Tensor:
    multiple = max(16 // x.element_size(), 1)
    summed = -x.shape[-1] % multiple if local.call.shapes[1][-2] == local.call.shapes[0][-1] else 0
    columns = -stack.shape[-1] % multiple
    changed = {"offs": ends[0]} if ends else {}
    out = local.run(self=F.pad(x, (0, summed)), mat2=F.pad(stack, (0, columns, 0, summed)), **changed)
    return torch.as_tensor(out)[..., : stack.shape[-1]]


def experts_of_piece(local: Local) -> object:
    """Experts cut: each device multiplies the tokens of its own experts, the rest of its rows is zero."""
    x, stack, ends = local.tensors
    first = local.start(local.rule.needs[1])
    # Tokens before the first expert here go to an expert of zeros: the host need not know how many.
    begin = ends[first - 1 : first] if first else torch.zeros_like(ends[:1])
    mine = torch.cat([begin, ends[first : first + stack.shape[0]]])
    out = _grouped_mm(
        local,
        x,
        torch.cat([torch.zeros_like(stack[:1]), stack]) if stack.shape[0] else _no_expert(local),
        [mine],
    )
    rows = torch.arange(x.shape[0], device=x.device)
    return torch.where(((rows >= begin) & (rows < mine[-1])).unsqueeze(-1), out, 0)


def _no_expert(local: Local) -> torch.Tensor:
    return local.tensors[1].new_zeros(1, *local.call.shapes[1][1:]) + 0 * local.tensors[1].sum()


def _expert_talks(call: Call) -> list[Talk]:
    if [len(shape) for shape in call.shapes] != [2, 3, 1]:
        return []
    return [Talk("E", "experts", experts_of_piece, P, in_one_block=True)]


PRODUCTS: dict[str, Op] = {
    "aten.linear": Op("... i * o i + o -> ... o"),
    "aten.matmul": Op(matmul),
    "aten.linalg_matmul": Op(matmul),
    "aten.mm": Op("m i * i n -> m n"),
    "aten.bmm": Op("b m i * b i n -> b m n"),
    "aten.mv": Op("m i * i -> m"),
    "aten.dot": Op("i * i -> ()"),
    "aten.vdot": Op("i * i -> ()"),
    "aten.inner": Op(inner),
    "aten.outer": Op("m * n -> m n"),
    "aten.ger": Op("m * n -> m n"),
    "aten.addmm": added("m n", "m i * i n"),
    "aten.addmv": added("m", "m i * i"),
    "aten.addr": added("m n", "m * n"),
    "aten.baddbmm": added("b m n", "b m i * b i n"),
    "aten.addbmm": added("m n", "b m i * b i n"),
    "aten.bilinear": Op("... i * ... j * o i j + o -> ... o", local=bilinear_of_piece),
    "aten.einsum": Op(einsum),
    "aten.chain_matmul": Op(chain),
    "aten.linalg_multi_dot": Op(chain),
    "aten.kron": Op(kron),
    "aten.tensordot": Op(tensordot),
    "aten.linalg_vecdot": Op(dot_along),
    "aten.linalg_cross": Op(cross, local=cross_of_piece),
    "aten.cross": Op(cross, local=cross_of_piece),
    **entries("conv1d conv2d conv3d", Op(convolution, local=convolution_of_piece)),
    **entries("conv_transpose1d conv_transpose2d conv_transpose3d", Op(convolution, local=convolution_of_piece)),
    "aten.convolution": Op(convolution, local=convolution_of_piece),
    **entries("lstm.input gru.input rnn_tanh.input rnn_relu.input", Op(recurrent, random=True)),
    **entries("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", Op(recurrent_cell)),
    **dict.fromkeys(
        ("aten._grouped_mm", "lopsided.grouped_mm"), Op(grouped_mm, local=grouped_mm_of_piece, talks=_expert_talks)
    ),
}


# Samples


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _samples_of_matrices(draw)
    yield from _samples_of_einsums(draw)
    yield from _samples_of_complex(draw)
    yield from _samples_of_convolutions(draw)
    yield from _samples_of_recurrent(draw)
    yield from _samples_of_grouped(draw)


def _samples_of_matrices(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_einsums(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_complex(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.linear.default", draw.complex(5, 6), draw.complex(7, 6), draw.complex(7))
    yield sample("aten.matmul.default", draw.complex(5, 4), draw.complex(4, 6))
    yield sample("aten.matmul.default", draw.complex(3, 5, 4), draw.complex(4))
    yield sample("aten.mm.default", draw.complex(5, 4), draw.complex(4, 6))
    yield sample("aten.vdot.default", draw.complex(4), draw.complex(4))
    yield sample("aten.addmm.default", draw.complex(6), draw.complex(5, 4), draw.complex(4, 6))
    yield sample("aten.einsum.default", "bik,kj->bij", [draw.complex(5, 4, 6), draw.complex(6, 3)])
    yield sample("aten.einsum.default", "i,j,ij->i", [draw.complex(5), draw.complex(4), draw.complex(5, 4)])


def _samples_of_convolutions(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_recurrent(draw: Draw) -> Iterator[Sample]:
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


def _samples_of_grouped(draw: Draw) -> Iterator[Sample]:
    """The kernel knows no float64: whole numbers in float32 are nearly as good, without gradients."""

    def whole_numbers(*shape: int) -> torch.Tensor:
        return draw.below(9, *shape, start=-8).float()

    ends = torch.tensor([2, 2, 8], dtype=torch.int32)
    yield sample("aten._grouped_mm.default", whole_numbers(8, 4), whole_numbers(3, 4, 12), ends)
    yield sample("aten._grouped_mm.default", whole_numbers(3, 5, 4), whole_numbers(4, 8), ends)
    yield sample("aten._grouped_mm.default", whole_numbers(3, 5, 4), whole_numbers(3, 4, 12))
    yield sample("lopsided.grouped_mm.default", draw.real(8, 4), draw.real(3, 4, 5), ends)
