"""Ops that pick or place elements by index. They are linear in what is picked; the table they pick from stays whole,
except an embedding's, which may be cut: each device then looks up the rows it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from lopsided.graph import Ref
from lopsided.ops.op import Call, Local, Op, Talk, Written, letters, spec
from lopsided.placement import P


def _alike(call: Call, first: int, second: int, dim: int) -> tuple[list[str], list[str]]:
    """Names for two operands that share all dims but one; a dim where their sizes differ is not shared."""
    one, two = call.shapes[first], call.shapes[second]
    names = letters(len(one))
    left = [n if d != dim and a == b else f"X{d}" for d, (n, a, b) in enumerate(zip(names, one, two, strict=True))]
    right = [n if d != dim and a == b else f"Y{d}" for d, (n, a, b) in enumerate(zip(names, one, two, strict=True))]
    return left, right


def gather(call: Call) -> str:
    rank = len(call.shapes[0])
    if not rank or len(call.shapes[1]) != rank:
        return _all_whole(call)
    dim = call.arg("dim")
    if not isinstance(dim, int):
        return _all_whole(call)
    left, right = _alike(call, 0, 1, dim % rank)
    right = [n.lower() if n.startswith("Y") else n for n in right]
    return f"{spec(left)} * f[{spec(right)}] -> {spec(right)}"


def _all_whole(call: Call) -> str:
    tensors = [spec([f"{c}{k}" for c in letters(len(s), range(len(s)))]) for k, s in enumerate(call.shapes)]
    results = [spec([f"{c}{k + 90}" for c in letters(len(s), range(len(s)))]) for k, s in enumerate(call.results)]
    return f"f[{', '.join(tensors)}] -> {', '.join(results)}"


def index_select(call: Call) -> str:
    rank = len(call.shapes[0])
    dim = call.arg("dim") % max(rank, 1)
    names = letters(rank, [dim])
    return f"{spec(names)} * f[j9] -> {spec([*names[:dim], 'j9', *names[dim + 1 :]])}"


def scatter(call: Call) -> str:
    """`scatter` and `scatter_reduce`: places overwrite each other, so what is placed stays whole along the dim."""
    rank = len(call.shapes[0])
    if not rank or len(call.shapes[1]) != rank:
        return _all_whole(call)
    left, right = _alike(call, 0, 1, call.arg("dim") % rank)
    if len(call.operands) == 3 and call.arg("reduce") is None and call.shapes[1] == call.shapes[2]:
        return f"{spec(left)} * f[{spec(right)}] + {spec(right)} -> {spec(left)}"
    if len(call.operands) == 3 and call.shapes[1] != call.shapes[2]:
        return _all_whole(call)
    return f"f[{', '.join([spec(left), *[spec(right)] * (len(call.operands) - 1)])}] -> {spec(left)}"


def scatter_add(call: Call) -> str:
    rank = len(call.shapes[0])
    if not rank or call.shapes[1] != call.shapes[2]:
        return _all_whole(call)
    left, right = _alike(call, 0, 1, call.arg("dim") % rank)
    # Along the dim, what is added may be cut: the result is then a sum over devices. A dim that is merely longer
    # in the destination is not summed over, though its letter stands only on the left: keep it whole.
    right = [n.lower() if n == f"Y{call.arg('dim') % rank}" else n for n in right]
    return f"{spec(left)} + f[{spec(right)}] * {spec(right)} -> {spec(left)}"


def index_add(call: Call) -> str:
    rank = len(call.shapes[0])
    dim = call.arg("dim") % max(rank, 1)
    names = letters(rank, [dim])
    source = [*names[:dim], "j9", *names[dim + 1 :]]
    return f"{spec(names)} + f[j9] * {spec(source)} -> {spec(names)}"


def index_copy(call: Call) -> str:
    return index_add(call).replace("j9", "J9").replace(" + f", " * f", 1).replace("] * ", "] + ", 1)


def index_fill(call: Call) -> str:
    rank = len(call.shapes[0])
    names = letters(rank, [call.arg("dim")])
    return f"f[{spec(names)}, {', '.join(['J9', *['()'] * (len(call.operands) - 2)])}] -> {spec(names)}"


def advanced_index(call: Call) -> str:
    """`x[:, i, j]`: dims without an index keep their letters, the indices' own dims may be cut, too."""
    indices = call.arg("indices")
    if any(v.dtype in ("bool", "u8") for v in call.operands[1:]):
        return _all_whole(call)
    rank = len(call.shapes[0])
    indexed = [d for d, index in enumerate(indices) if isinstance(index, Ref)]
    names = letters(rank, indexed)
    shape = torch.broadcast_shapes(*call.shapes[1:])
    picked = [f"j{k}" for k in range(len(shape))]
    parts = [f"f[{spec(picked[len(picked) - len(s) :])}]" for s in call.shapes[1:]]
    adjacent = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    kept = [n for d, n in enumerate(names) if d not in indexed]
    at = indexed[0] if adjacent else 0
    return f"{' * '.join([spec(names), *parts])} -> {spec([*kept[:at], *picked, *kept[at:]])}"


def index_put(call: Call) -> str:
    """Dims before the first index keep their letters where the values have them; the rest stays whole."""
    indices = call.arg("indices")
    if any(v.dtype in ("bool", "u8") for v in call.operands[1:-1]):
        return _all_whole_linear(call)
    indexed = [d for d, index in enumerate(indices) if isinstance(index, Ref)]
    rank = len(call.shapes[0])
    names = letters(rank, indexed)
    shape = torch.broadcast_shapes(*call.shapes[1:-1])
    picked = [f"J{k}" for k in range(len(shape))]
    adjacent = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    kept = [n for d, n in enumerate(names) if d not in indexed]
    at = indexed[0] if adjacent else 0
    full = [*kept[:at], *picked, *kept[at:]]
    values = call.shapes[-1]
    parts = [f"f[{spec(picked[len(picked) - len(s) :])}]" for s in call.shapes[1:-1]]
    return f"{' * '.join([spec(names), *parts])} + {spec(full[len(full) - len(values) :])} -> {spec(names)}"


def _all_whole_linear(call: Call) -> str:
    tensors = [spec([f"{c}{k}" for c in letters(len(s), range(len(s)))]) for k, s in enumerate(call.shapes)]
    middle = "".join(f" * f[{t}]" for t in tensors[1:-1])
    return f"{tensors[0]}{middle} + {tensors[-1]} -> {tensors[0]}"


def masked_scatter(call: Call) -> str:
    """The source is used up in the order of the mask: nothing may be cut, sums pass."""
    x, mask, source = (spec([f"{c}{k}" for c in letters(len(s), range(len(s)))]) for k, s in enumerate(call.shapes))
    return f"{x} * f[{mask}] + {source} -> {x}"


# Embedding


def embedding_of_table_piece(local: Local) -> Tensor:
    """Rows of the table are cut: look up what is here, zero for the rest; the sum over devices is the lookup."""
    table, index = local.tensors[0], local.tensors[1]
    here = index - local.start(local.rule.needs[0])
    mine = (here >= 0) & (here < table.shape[0])
    if not table.shape[0]:
        return table.new_zeros(local.shapes[0]) + 0 * table.sum()
    rows = torch.nn.functional.embedding(torch.where(mine, here, 0), table)
    padding = local.call.arg("padding_idx")
    if isinstance(padding, int) and padding >= 0:
        # The padding row is read, and never trained.
        rows = torch.where((index == padding).unsqueeze(-1), rows.detach(), rows)
    return rows * mine.unsqueeze(-1).to(rows.dtype)


def _embedding_talks(call: Call) -> list[Talk]:
    return [Talk("V", "table", embedding_of_table_piece, P, in_one_block=True)]


def one_hot(call: Call) -> str:
    return "f[...] -> ... K"


INDEXING: dict[str, Op] = {
    "aten.embedding": Op("V d * f[...] -> ... d", talks=_embedding_talks),
    "aten.gather": Op(gather),
    "aten.take_along_dim": Op(gather),
    "aten.index_select": Op(index_select),
    "aten.scatter": Op(scatter),
    "aten.scatter_reduce": Op(scatter),
    "aten.scatter_add": Op(scatter_add),
    "aten.index_add": Op(index_add),
    "aten.index_copy": Op(index_copy),
    "aten.index_fill": Op(index_fill),
    "aten.index": Op(advanced_index),
    "aten.index_put": Op(index_put),
    "aten.masked_scatter": Op(masked_scatter),
    "aten.one_hot": Op(one_hot),
    "aten.bucketize": Op("f[..., K] -> ..."),
}
