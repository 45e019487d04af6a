"""Ops that pick or place elements by index. They are linear in what is picked and in what is placed.

What is picked from may be cut: each device picks what it holds, zero elsewhere, and the sum over devices is
the pick (an embedding's table, a vocabulary). What is placed into may be cut: each device places what belongs
there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lopsided.ir.graph import Ref
from lopsided.ir.placement import P, R
from lopsided.ops.op import (
    Call,
    Local,
    Op,
    Talk,
    all_whole,
    broadcast_shape,
    dim_of,
    letters,
    spec,
    whole,
    wholes,
)
from lopsided.ops.sample import Draw, Sample, sample


def _here(local: Local, index: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Indices relative to the first operand's piece here, 0 for those outside it, and which are inside."""
    here = index - local.start(local.rule.needs[0])
    mine = (here >= 0) & (here < length)
    return torch.where(mine, here, 0), mine


def _picked_here(mine: Tensor, found: Tensor) -> Tensor:
    """What was found, zero where it lies on another device: chosen, since zero times -inf is no number."""
    return torch.where(mine, found, torch.zeros((), dtype=found.dtype, device=found.device))


# Picking


def _shared(call: Call, dim: int) -> tuple[list[str], list[str]]:
    """Names for two operands that share all dims but one; a dim where the second is shorter is not shared."""
    sizes = list(zip(call.shapes[0], call.shapes[1], strict=True))
    names = letters(len(sizes))
    alike = [d != dim and a == b for d, (a, b) in enumerate(sizes)]
    left, right = (
        [n if same else f"{c}{d}" for d, (n, same) in enumerate(zip(names, alike, strict=True))] for c in "XY"
    )
    return left, right


def _is_aligned(call: Call) -> bool:
    return bool(call.shapes[0]) and len(call.shapes[0]) == len(call.shapes[1]) and isinstance(call.arg("dim"), int)


def gather(call: Call) -> str:
    if not _is_aligned(call):
        (x, index), (out,) = wholes(call)
        return f"{x} * f[{index}] -> {out}"
    dim = dim_of(call)
    left, right = _shared(call, dim)
    right[dim] = right[dim].lower()
    return f"{spec(left)} * f[{spec(right)}] -> {spec(right)}"


def take_along(call: Call) -> str:
    """As `gather`, with dims of length one broadcast, and without a dim from the flattened tensor."""
    if call.arg("dim") is None:
        index = " ".join(f"{name}1" for name in letters(len(call.shapes[1])))
        return f"{wholes(call)[0][0]} * f[{index}] -> ({index})"
    rank, dim = len(call.shapes[0]), dim_of(call)
    names = letters(rank)
    left, right = [*names[:dim], "X", *names[dim + 1 :]], [*names[:dim], "y", *names[dim + 1 :]]
    return f"{spec(left)} * f[{spec(right)}] -> {spec(right)}"


def gather_from_piece(local: Local) -> Tensor:
    x, index = local.tensors
    dim = dim_of(local.call)
    if not x.shape[dim]:
        return local.nothing()
    safe, mine = _here(local, index, x.shape[dim])
    return _picked_here(mine, x.gather(dim, safe))


def _gather_talks(call: Call) -> list[Talk]:
    return [Talk(f"X{dim_of(call)}", "pick", gather_from_piece, P, in_one_block=True)] if _is_aligned(call) else []


def index_select(call: Call) -> str:
    rank, dim = len(call.shapes[0]), dim_of(call)
    names = letters(rank)
    left = [*names[:dim], "X", *names[dim + 1 :]] if rank else []
    if not call.shapes[1]:
        out = [*names[:dim], "1", *names[dim + 1 :]] if call.results[0] else []
        return f"{spec(left)} * f[()] -> {spec(out)}"
    return f"{spec(left)} * f[j9] -> {spec([*names[:dim], 'j9', *names[dim + 1 :]])}"


def select_from_piece(local: Local) -> Tensor:
    x, index = local.tensors
    dim = dim_of(local.call)
    if not x.shape[dim]:
        return local.nothing()
    safe, mine = _here(local, index.reshape(-1), x.shape[dim])
    mine = mine.reshape(-1, *[1] * (x.dim() - dim - 1))
    return _picked_here(mine, x.index_select(dim, safe)).reshape(local.shapes[0])


def _select_talks(call: Call) -> list[Talk]:
    return [Talk("X", "pick", select_from_piece, P, in_one_block=True)]


def take(call: Call) -> str:
    return f"{wholes(call)[0][0]} * f[...] -> ..."


def _indexed(call: Call) -> list[int]:
    return [d for d, index in enumerate(call.arg("indices")) if isinstance(index, Ref)]


def _by_mask(call: Call, indices: slice) -> bool:
    return any(value.dtype in ("bool", "u8") for value in call.operands[indices])


def _masked(call: Call, names: list[str]) -> list[str]:
    """The dims of the tensor that one mask covers."""
    first = _indexed(call)[0]
    return names[first : first + len(call.shapes[1])]


def _picked(call: Call, names: list[str], picked: list[str]) -> list[str]:
    """The dims of `x[indices]`: those of the indices stand where adjacent ones stood, else in front."""
    indexed = _indexed(call)
    adjacent = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    kept = [name for d, name in enumerate(names) if d not in indexed]
    at = indexed[0] if adjacent else 0
    return [*kept[:at], *picked, *kept[at:]]


def advanced_index(call: Call) -> str:
    """`x[:, i, j]`: dims without an index keep their letters, the indices' own dims may be cut, too."""
    if _by_mask(call, slice(1, None)):
        operands, results = wholes(call)
        if len(operands) > 2:
            return f"{operands[0]} * {' * '.join(f'f[{text}]' for text in operands[1:])} -> {results[0]}"
        first, count = _indexed(call)[0], len(call.shapes[1])
        names = letters(len(call.shapes[0]), range(first, first + count))
        out = [*names[:first], "Y9", *names[first + count :]]
        return f"{spec(names)} * f[{spec(_masked(call, names))}] -> {spec(out)}"
    names = letters(len(call.shapes[0]), _indexed(call))
    picked = [f"j{k}" for k in range(len(broadcast_shape(call.shapes[1:])))]
    parts = [f"f[{spec(picked[len(picked) - len(shape) :])}]" for shape in call.shapes[1:]]
    return f"{' * '.join([spec(names), *parts])} -> {spec(_picked(call, names, picked))}"


def index_from_piece(local: Local) -> Tensor:
    """One index, into a dim that is cut."""
    x, index = local.tensors
    (dim,) = _indexed(local.call)
    if not x.shape[dim]:
        return local.nothing()
    length = local.call.shapes[0][dim]
    safe, mine = _here(local, torch.where(index < 0, index + length, index), x.shape[dim])
    out = x.index_select(dim, safe.reshape(-1)).reshape(local.shapes[0])
    return _picked_here(mine.reshape(*mine.shape, *[1] * (x.dim() - dim - 1)), out)


def _index_talks(call: Call) -> list[Talk]:
    indexed = _indexed(call)
    if len(indexed) != 1 or _by_mask(call, slice(1, None)):
        return []
    name = letters(len(call.shapes[0]), indexed)[indexed[0]]
    return [Talk(name, "pick", index_from_piece, P, in_one_block=True)]


# Placing


def scatter(call: Call) -> str:
    """Places overwrite each other, so what is placed stays whole along the dim."""
    reduce = call.arg("reduce")
    if not _is_aligned(call):
        return all_whole(call)
    left, right = map(spec, _shared(call, dim_of(call)))
    if len(call.operands) == 2:
        linear = reduce == "multiply" or (reduce is None and call.arg("value") == 0)
        return f"{left} * f[{right}] -> {left}" if linear else f"f[{left}, {right}] -> {left}"
    if call.shapes[1] != call.shapes[2]:
        return _overwritten(call, *wholes(call)[0])
    if reduce in ("add", "sum") and call.arg("include_self") is not False:
        return scatter_add(call)
    return _overwritten(call, left, right, right)


def _overwritten(call: Call, x: str, index: str, source: str) -> str:
    """Linear in both where values are put in, averaged, added; in the tensor alone where it is multiplied."""
    reduce, is_factor = call.arg("reduce"), call.arg("include_self") is not False
    if reduce in (None, "mean", "add", "sum"):
        return f"{x} * f[{index}] + {source} -> {x}"
    factors = (
        f"{x} * f[{index}, {source}]" if reduce in ("prod", "multiply") and is_factor else f"f[{x}, {index}, {source}]"
    )
    return f"{factors} -> {x}"


def scatter_add(call: Call) -> str:
    if not _is_aligned(call) or call.shapes[1] != call.shapes[2]:
        return all_whole(call)
    dim = dim_of(call)
    left, right = _shared(call, dim)
    # Along the dim, what is added may be cut: the result is then a sum over devices. A dim that is merely
    # longer in the destination is not summed over, though its letter stands only on the left: keep it whole.
    right[dim] = right[dim].lower()
    return f"{spec(left)} + f[{spec(right)}] * {spec(right)} -> {spec(left)}"


def place_in_piece(local: Local) -> Tensor:
    """The dim placed into is cut: what belongs elsewhere is placed in a slot past the end, and dropped."""
    x, dim = local.tensors[0], dim_of(local.call)
    length = x.shape[dim]
    slot = (
        x.select(dim, 0).unsqueeze(dim)
        if length
        else x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])
    )
    index = local.tensors[1]
    safe, mine = _here(local, index, length)
    given = {name: value for name, value in _placed(local) if value.dim()}
    for name, value in given.items():
        along = mine if mine.dim() == value.dim() else mine.reshape([-1 if d == dim else 1 for d in range(value.dim())])
        # One is neutral in a product too, whose gradient divides by it.
        given[name] = torch.where(along, value, torch.ones((), dtype=value.dtype, device=value.device))
    out = local.run(self=torch.cat([x, slot.detach()], dim), index=torch.where(mine, safe, length), **given)
    return torch.as_tensor(out).narrow(dim, 0, length)


def _placed(local: Local) -> Iterator[tuple[str, Tensor]]:
    """What is placed, by the name of its argument; nothing where it is a number."""
    for name in ("src", "source"):
        if local.call.is_tensor(name):
            yield name, local.tensors[2]


def _place_talks(call: Call) -> list[Talk]:
    if not _is_aligned(call) or (len(call.operands) == 3 and call.shapes[1] != call.shapes[2]):
        return []
    return [Talk(f"X{dim_of(call)}", "place", place_in_piece, P, in_one_block=True)]


def _index_names(call: Call, index: str) -> tuple[str, str]:
    """The tensor, and what is placed into its dim by a vector of indices."""
    rank, dim = len(call.shapes[0]), dim_of(call)
    names = letters(rank)
    return spec([*names[:dim], "X", *names[dim + 1 :]]), spec([*names[:dim], index, *names[dim + 1 :]])


def index_add(call: Call) -> str:
    x, source = _index_names(call, "j9")
    return f"{x} + f[j9] * {source} -> {x}"


def index_copy(call: Call) -> str:
    x, source = _index_names(call, "J9")
    return f"{x} * f[J9] + {source} -> {x}"


def index_fill(call: Call) -> str:
    x, _ = _index_names(call, "J9")
    return f"{x} * f[J9] + () -> {x}" if len(call.operands) == 3 else f"f[{x}, J9] -> {x}"


def index_reduce(call: Call) -> str:
    x, source = _index_names(call, "J9")
    return _overwritten(call, x, "J9", source)


def _index_place_talks(call: Call) -> list[Talk]:
    return [Talk("X", "place", place_in_piece, P, in_one_block=True)] if call.shapes[0] and call.shapes[1] else []


def index_put(call: Call) -> str:
    """Overwriting keeps what is placed whole; adding may be cut along it, for a sum over devices."""
    accumulate = bool(call.arg("accumulate"))
    operands, _ = wholes(call)
    if _by_mask(call, slice(1, -1)):
        x, masks, values = operands[0], " * ".join(f"f[{text}]" for text in operands[1:-1]), operands[-1]
        if len(operands) == 3 and call.operands[-1].elements == 1:  # one value for all: as `masked_fill`
            names = letters(len(call.shapes[0]))
            x, masks = spec(names), f"f[{spec(_masked(call, names))}]"
        return f"{x} + {masks} * {values} -> {x}" if accumulate else f"{x} * {masks} + {values} -> {x}"
    names = letters(len(call.shapes[0]), _indexed(call))
    picked = [f"{'j' if accumulate else 'J'}{k}" for k in range(len(broadcast_shape(call.shapes[1:-1])))]
    full = _picked(call, names, picked)
    parts = " * ".join(f"f[{spec(picked[len(picked) - len(shape) :])}]" for shape in call.shapes[1:-1])
    values = spec(full[len(full) - len(call.shapes[-1]) :])
    if accumulate:
        return f"{spec(names)} + {parts} * {values} -> {spec(names)}"
    return f"{spec(names)} * {parts} + {values} -> {spec(names)}"


def put(call: Call) -> str:
    x, index, source = wholes(call)[0]
    if call.arg("accumulate") and call.shapes[1] == call.shapes[2]:
        places = spec([f"{name}1" for name in letters(len(call.shapes[1]))])
        return f"{x} + f[{places}] * {places} -> {x}"
    return f"{x} * f[{index}] + {source} -> {x}"


def masked_scatter(call: Call) -> str:
    """The source is used up in the order of the mask: nothing may be cut, sums pass."""
    x, mask, source = wholes(call)[0]
    return f"{x} * f[{mask}] + {source} -> {x}"


# Tables


def embedding(call: Call) -> str:
    if call.arg("scale_grad_by_freq"):
        # The gradient of a row is divided by how often it is read: by all devices together.
        index = whole(call.shapes[1], 0)
        return f"V d * f[{index}] -> {f'{index} d' if call.shapes[1] else 'd'}"
    return "V d * f[...] -> ... d"


def embedding_of_table_piece(local: Local) -> Tensor:
    """Rows of the table are cut: look up what is here, zero for the rest; the sum is the lookup."""
    table, index = local.tensors[0], local.tensors[1]
    if not table.shape[0]:
        return local.nothing()
    safe, mine = _here(local, index, table.shape[0])
    rows = F.embedding(safe, table)
    padding = local.call.arg("padding_idx")
    if isinstance(padding, int) and padding >= 0:
        # The padding row is read, and never trained.
        rows = torch.where((index == padding).unsqueeze(-1), rows.detach(), rows)
    return _picked_here(mine.unsqueeze(-1), rows)


def _embedding_talks(call: Call) -> list[Talk]:
    if call.arg("scale_grad_by_freq"):
        return []
    return [Talk("V", "table", embedding_of_table_piece, P, in_one_block=True)]


def embedding_bag(call: Call) -> str:
    """Where a bag ends is data, so bags stay whole; columns may be cut, see `_bag_talks`."""
    _, *others = wholes(call)[0]
    return f"f[{', '.join(['V D', *others])}] -> B D, {', '.join(wholes(call)[1][1:])}"


def _bag_talks(call: Call) -> list[Talk]:
    """Columns cut. Nothing is asked, but other results are the same everywhere, which no line can say."""
    return [Talk("D", "columns", Local.run, R)] if int(call.arg("mode")) != 2 else []


def one_hot_of_piece(local: Local) -> Tensor:
    start, length = local.start(local.rule.gives[0]), local.shapes[0][-1]
    classes = torch.arange(start, start + length, device=local.tensors[0].device)
    return (local.tensors[0].unsqueeze(-1) == classes).to(local.call.node.results[0].torch_dtype)


def _one_hot_talks(call: Call) -> list[Talk]:
    return [Talk("K", "classes", one_hot_of_piece, P, in_one_block=True)]


# Searching


def search_sorted(call: Call) -> str:
    """One sorted vector for all, or one for every row; counting what is smaller adds up over pieces."""
    return "f[k, ...] -> ..." if len(call.shapes[0]) == 1 else "f[... k, ... m] -> ... m"


def is_in(call: Call) -> str:
    return f"f[..., {wholes(call)[0][1]}] -> ..." if len(call.operands) == 2 else "f[...] -> ..."


INDEXING: dict[str, Op] = {
    "aten.embedding": Op(embedding, talks=_embedding_talks),
    "aten.embedding_bag": Op(embedding_bag, talks=_bag_talks),
    "aten.one_hot": Op("f[...] -> ... K", talks=_one_hot_talks),
    "aten.gather": Op(gather, talks=_gather_talks),
    "aten.take_along_dim": Op(take_along),
    "aten.index_select": Op(index_select, talks=_select_talks),
    "aten.take": Op(take),
    "aten.index": Op(advanced_index, talks=_index_talks),
    "aten.scatter": Op(scatter, talks=_place_talks),
    "aten.scatter_reduce": Op(scatter, talks=_place_talks),
    "aten.scatter_add": Op(scatter_add, talks=_place_talks),
    "aten.index_add": Op(index_add, talks=_index_place_talks),
    "aten.index_copy": Op(index_copy, talks=_index_place_talks),
    "aten.index_fill": Op(index_fill),
    "aten.index_reduce": Op(index_reduce, talks=_index_place_talks),
    "aten.index_put": Op(index_put),
    "aten.put": Op(put),
    "aten.masked_scatter": Op(masked_scatter),
    "aten.bucketize.Tensor": Op("f[..., k] -> ..."),
    "aten.searchsorted.Tensor": Op(search_sorted),
    "aten.isin": Op(is_in),
}


# Samples


def samples(draw: Draw) -> Iterator[Sample]:
    yield from _samples_of_tables(draw)
    yield from _samples_of_picks(draw)
    yield from _samples_of_places(draw)
    yield from _samples_of_advanced(draw)
    yield from _samples_of_searches(draw)


def _samples_of_tables(draw: Draw) -> Iterator[Sample]:
    embedding = "aten.embedding.default"
    yield sample(embedding, draw.real(6, 4), draw.below(6, 5, 3))
    yield sample(embedding, draw.real(6, 4), draw.below(6, 5), 2)
    yield sample(embedding, draw.real(6, 4), draw.below(6, 5), -1, False)
    yield sample(embedding, draw.real(3, 4), draw.below(3, 7), -1, True)
    yield sample(embedding, draw.real(6, 4), draw.below(6))
    for mode in (0, 1):
        yield sample(
            "aten.embedding_bag.default",
            draw.real(6, 4),
            draw.below(6, 9),
            torch.tensor([0, 2, 2, 6, 7]),
            False,
            mode,
        )
    yield sample(
        "aten.embedding_bag.padding_idx",
        *(
            draw.real(6, 4),
            draw.below(6, 9),
            torch.tensor([0, 2, 2, 6, 7]),
            False,
            0,
            False,
            draw.real(9),
            False,
            1,
        ),
    )
    yield sample("aten.one_hot.default", draw.below(6, 5, 4), 6)


def _samples_of_picks(draw: Draw) -> Iterator[Sample]:
    yield sample("aten.gather.default", draw.real(5, 6), 1, draw.below(6, 5, 4))
    yield sample("aten.gather.default", draw.real(5, 6), 1, draw.below(6, 3, 4))
    yield sample("aten.gather.default", draw.real(6, 4), -2, draw.below(6, 7, 4))
    yield sample("aten.gather.default", draw.real(6), 0, draw.below(6))
    yield sample("aten.take_along_dim.default", draw.real(5, 6), draw.below(6, 5, 4), 1)
    yield sample("aten.take_along_dim.default", draw.real(5, 6), draw.below(6, 1, 4), 1)
    yield sample("aten.take_along_dim.default", draw.real(5, 6), draw.below(30, 7))
    yield sample("aten.index_select.default", draw.real(5, 6, 4), 1, draw.below(6, 7))
    yield sample("aten.index_select.default", draw.real(6), 0, draw.below(6))
    yield sample("aten.take.default", draw.real(5, 4), draw.below(20, 6, 3))


def _samples_of_places(draw: Draw) -> Iterator[Sample]:
    every = torch.stack([draw.order(6)[:4] for _ in range(5)])
    yield sample("aten.scatter.src", draw.real(5, 6), 1, every, draw.real(5, 4))
    yield sample("aten.scatter.src", draw.real(5, 6), 1, every[:3], draw.real(3, 4))
    yield sample("aten.scatter.src", draw.real(5, 6), 1, every[:3], draw.constant(5, 7))
    yield sample("aten.scatter.value", draw.real(5, 6), 1, every, 0.5)
    yield sample("aten.scatter.value", draw.real(5, 6), 1, every, 0)
    yield sample("aten.scatter.reduce", draw.constant(5, 6), 1, draw.below(6, 5, 4), draw.constant(5, 4), reduce="add")
    yield sample("aten.scatter.value_reduce", draw.constant(5, 6), 1, draw.below(6, 5, 4), 2.0, reduce="multiply")
    for reduce in ("sum", "mean", "amax"):
        yield sample("aten.scatter_reduce.two", draw.real(5, 6), 1, draw.below(6, 5, 4), draw.real(5, 4), reduce)
    yield sample("aten.scatter_add.default", draw.real(5, 6), 1, draw.below(6, 5, 4), draw.real(5, 4))
    yield sample("aten.scatter_add.default", draw.real(6, 4), 0, draw.below(6, 5, 3), draw.real(5, 3))
    yield sample("aten.index_add.default", draw.real(5, 6), 1, draw.below(6, 7), draw.real(5, 7))
    yield sample("aten.index_add.default", draw.real(6, 5), 0, draw.below(6, 4), draw.real(4, 5), alpha=0.5)
    yield sample("aten.index_copy.default", draw.real(5, 6), 1, draw.order(6)[:4], draw.real(5, 4))
    yield sample("aten.index_fill.int_Scalar", draw.real(5, 6), 1, draw.order(6)[:4], 2.0)
    yield sample("aten.index_fill.int_Tensor", draw.real(5, 6), 1, draw.order(6)[:4], draw.real())
    for reduce in ("prod", "mean"):
        yield sample("aten.index_reduce.default", draw.real(5, 6), 1, draw.below(6, 7), draw.real(5, 7), reduce)
    for reduce in ("sum", "prod", "mean", "amax", "amin"):
        tensors = (draw.real(5, 6), 1, draw.below(6, 5, 4), draw.real(5, 4))
        yield sample("aten.scatter_reduce.two", *tensors, reduce, include_self=False)
    yield sample("aten.scatter_reduce.two", draw.real(5, 6), 1, draw.below(6, 5, 4), draw.real(5, 4), "prod")
    for reduce in ("prod", "mean", "amax", "amin"):
        tensors = (draw.real(5, 6), 1, draw.below(6, 7), draw.real(5, 7))
        yield sample("aten.index_reduce.default", *tensors, reduce, include_self=False)
    yield sample("aten.put.default", draw.real(5, 4), draw.order(20)[:6], draw.real(6))
    yield sample("aten.put.default", draw.real(5, 4), draw.below(20, 6), draw.real(6), True)
    yield sample("aten.masked_scatter.default", draw.real(5, 4), draw.truths(5, 4), draw.real(20))


def _samples_of_advanced(draw: Draw) -> Iterator[Sample]:
    x = draw.real(5, 6, 4)
    yield sample("aten.index.Tensor", x, [draw.below(5, 7)])
    yield sample("aten.index.Tensor", x, [None, draw.below(6, 7, 3)])
    yield sample("aten.index.Tensor", x, [None, draw.below(6, 7), draw.below(4, 7)])
    yield sample("aten.index.Tensor", x, [draw.below(5, 7), None, draw.below(4, 7)])
    yield sample("aten.index.Tensor", x, [draw.below(5, 7, 1), draw.below(6, 3)])
    yield sample("aten.index.Tensor", draw.real(5, 4), [draw.truths(5)])
    for accumulate in (False, True):
        where = draw.below(6, 7) if accumulate else draw.order(6)[:3]
        count = len(where)
        yield sample("aten.index_put.default", draw.real(6, 5), [where], draw.real(count, 5), accumulate)
        yield sample("aten.index_put.default", draw.real(5, 6), [None, where], draw.real(5, count), accumulate)
        yield sample("aten.index_put.default", draw.real(6, 5), [where], draw.real(), accumulate)
        yield sample(
            "aten.index_put.default",
            draw.real(5, 6, 4),
            [None, where, draw.below(4, count)],
            draw.real(count),
            accumulate,
        )
        yield sample("aten.index_put.default", draw.real(5, 4), [draw.truths(5, 4)], draw.real(), accumulate)


def _samples_of_searches(draw: Draw) -> Iterator[Sample]:
    edges = draw.constant(6).sort().values
    yield sample("aten.bucketize.Tensor", draw.constant(5, 4), edges)
    yield sample("aten.bucketize.Tensor", draw.below(6, 5, 4), edges, right=True)
    yield sample("aten.searchsorted.Tensor", edges, draw.constant(5, 4))
    yield sample("aten.searchsorted.Tensor", draw.constant(5, 6).sort().values, draw.constant(5, 4))
    yield sample("aten.isin.Tensor_Tensor", draw.below(9, 5, 4), draw.below(9, 6))
    yield sample("aten.isin.Tensor_Scalar", draw.below(9, 5, 4), 3)
