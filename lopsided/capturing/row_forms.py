"""How a call is written on all rows where it had those that a mask selects.

In: the `Writer`, and a call of an exported program. Out: `Rows`, a node of fixed size, or several of them; `NotFixed`
where there is no such way.

NOTE Rows that do not count
    A row is often left out because something would be no number there, and zero times infinity is none either. At the
    selection, rows that do not count get the values of the first that does: whatever is finite there is finite on
    them, going backward, too. Where only what is finite everywhere follows, zero is enough and nothing is picked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lopsided.capturing.rows import NotFixed, Rows, Writer, aten, value_of

Form = Callable[[Writer, fx.Node], Any]

_POINTWISE = (
    "to clone contiguous detach alias zeros_like ones_like full_like softplus leaky_relu elu selu celu gelu silu relu6"
    " mish hardswish hardtanh logsigmoid log_sigmoid threshold prelu type_as expand_as addcmul addcdiv masked_fill"
    " where"
)
POINTWISE = frozenset(_POINTWISE.split())
_FINITE_NAMES = (
    "add sub rsub mul neg abs square relu gelu silu sigmoid tanh softplus leaky_relu elu clamp clamp_min clamp_max exp"
    " linear matmul mm bmm softmax log_softmax layer_norm embedding gather index index_select one_hot to clone detach"
    " contiguous type_as where masked_fill eq ne lt le gt ge logical_and logical_or logical_not zeros_like ones_like"
    " full_like maximum minimum sum mean amax amin max min any all logsumexp cross_entropy_loss nll_loss nll_loss_nd"
    " mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits soft_margin_loss kl_div reshape view"
    " flatten unsqueeze squeeze transpose permute t numpy_T select slice expand cat stack unbind split chunk index_put"
    " index_add scatter_add bitwise_and bitwise_or broadcast_tensors topk einsum"
)
_FINITE = frozenset(_FINITE_NAMES.split())
"""What is finite, with its gradient, wherever its operands are."""


# Selecting


def _selected(write: Writer, node: fx.Node, x: fx.Node, vector: fx.Node, dim: int) -> Rows:
    """Rows of `x` along `dim`, which the vector selects."""
    emit = write.emit
    value = value_of(x)
    rows = Rows(x, {dim: vector})
    if not value.dtype.is_floating_point or _only_finite(node):
        full = write.filled(rows, 0)
    else:
        at = emit.once(aten.argmax.default, emit.once(aten.to.dtype, vector, torch.int64))
        picked = emit.call(aten.index_select.default, x, dim, emit.once(aten.reshape.default, at, [1]))
        # Where none counts, a number at which little is no number.
        none = emit.once(aten.logical_not.default, emit.once(aten.any.default, vector))
        spare = emit.call(aten.masked_fill.Scalar, emit.call(aten.detach.default, picked), none, 0.5)
        full = emit.call(aten.where.self, write.mask(rows), x, spare)
    return write.rows(node.meta["val"], full, {dim: vector})  # type: ignore[no-any-return]


def _only_finite(node: fx.Node) -> bool:
    """Whether only ops that are finite everywhere use what a selection gives, until it is reduced."""
    seen, asked = {node}, [node]
    while asked:
        for user in asked.pop().users:
            name = str(user.target).removeprefix("aten.").partition(".")[0].removesuffix("_")
            if name == "pow" and isinstance(user.args[1], int) and user.args[1] >= 1:
                name = "mul"
            if name == "div" and not (isinstance(user.args[1], fx.Node) and user.args[1] in seen):
                name = "mul"
            made = user.meta.get("val")
            if user.op == "call_function" and isinstance(made, torch.Tensor) and name not in _FINITE:
                return False
            if user not in seen and isinstance(made, torch.Tensor | tuple | list):
                seen.add(user)
                if not isinstance(made, torch.Tensor) or any(not isinstance(size, int) for size in made.shape):
                    asked.append(user)
    return True


def _vector(write: Writer, mask: Any) -> fx.Node:
    """A mask as a vector, the same node for equal masks. Of rows, only those that count may be selected."""
    emit = write.emit
    if isinstance(mask, Rows):
        mask = emit.once(aten.logical_and.default, mask.full, write.mask(mask))
    mask = emit.first(mask)
    return mask if value_of(mask).dim() == 1 else emit.once(aten.reshape.default, mask, [-1])


def _flattened(write: Writer, x: fx.Node, first: int, count: int) -> fx.Node:
    if count == 1:
        return x
    shape = list(value_of(x).shape)
    flat = [*shape[:first], math.prod(shape[first : first + count]), *shape[first + count :]]
    return write.emit.call(aten.reshape.default, x, flat)


def index(write: Writer, node: fx.Node) -> Any:
    args = write.args(node)
    x, indices = args["self"], args["indices"]
    used = [d for d, given in enumerate(indices) if given is not None]
    if len(used) == 1 and value_of(indices[used[0]]).dtype == torch.bool:
        return _by_mask(write, node, x, indices[used[0]], used[0])
    place = _all_places(write, x, indices, used)
    if place is not None:
        vector, count = place
        return _selected(write, node, _flattened(write, x, used[0], count), vector, used[0])
    if isinstance(x, Rows):
        x, indices = _own_rows(write, x, list(indices))
    if any(value_of(indices[d]).dtype == torch.bool for d in used):
        raise NotFixed("indices meet rows that a mask selects")
    return _by_numbers(write, node, x, indices, used)


def _own_rows(write: Writer, x: Rows, indices: list[Any]) -> tuple[fx.Node, list[Any]]:
    """`rows[arange(len(rows)), i]`: every row picks of itself, wherever it is."""
    for dim, vector in x.counts.items():
        given = indices[dim] if dim < len(indices) else None
        if not isinstance(given, Rows) or not given.is_order or given.counts.get(0) is not vector:
            raise NotFixed("it picks among rows that a mask selects")
        every = write.emit.once(aten.arange.default, len(value_of(vector)), device=value_of(vector).device)
        indices[dim] = Rows(every, given.counts)
    return x.full, indices


def _by_mask(write: Writer, node: fx.Node, x: Any, mask: Any, first: int) -> Rows:
    count = value_of(mask).dim()
    if isinstance(mask, Rows) or isinstance(x, Rows):
        # Selected once more: what counts of a mask of rows are rows that counted before.
        if not isinstance(mask, Rows) or not isinstance(x, Rows):
            raise NotFixed("a mask of another length selects")
        there = {d - first: v for d, v in x.counts.items() if first <= d < first + count}
        if dict(mask.counts) != there or len(there) != len(x.counts):
            raise NotFixed("rows that different masks select meet")
        x = x.full
    return _selected(write, node, _flattened(write, x, first, count), _vector(write, mask), first)


def _all_places(write: Writer, x: Any, indices: Sequence[Any], used: list[int]) -> tuple[fx.Node, int] | None:
    """The mask whose `nonzero` the indices are, in order: indexing by them is selecting by it."""
    rows = [indices[d] for d in used]
    if isinstance(x, Rows) or not all(isinstance(r, Rows) and r.place for r in rows):
        return None
    shape = rows[0].place[0]
    adjacent = used == list(range(used[0], used[0] + len(shape)))
    if not adjacent or tuple(value_of(x).shape[used[0] : used[0] + len(shape)]) != shape:
        return None
    vectors = {r.counts[0] for r in rows}
    if len(vectors) > 1 or [r.place for r in rows] != [(shape, k) for k in range(len(shape))]:
        return None
    return vectors.pop(), len(shape)


def _by_numbers(write: Writer, node: fx.Node, x: fx.Node, indices: Sequence[Any], used: list[int]) -> Any:
    """Every row picks for itself; rows that do not count pick something, too."""
    counts = write.aligned([indices[d] for d in used])
    rank = max(value_of(indices[d]).dim() for d in used)
    adjacent = used == list(range(used[0], used[0] + len(used)))
    start = used[0] if adjacent else 0
    full = write.again(node, self=x, indices=list(indices))
    return write.rows(node.meta["val"], full, {start + rank + d: v for d, v in counts.items()})


def masked_select(write: Writer, node: fx.Node) -> Any:
    args = write.args(node)
    x, mask = args["self"], args["mask"]
    if isinstance(x, Rows) or isinstance(mask, Rows):
        counts = write.aligned([x, mask])
        if not isinstance(x, Rows) or set(x.counts.values()) != set(counts.values()):
            raise NotFixed("rows that different masks select meet")
        mask = write.emit.once(aten.logical_and.default, value_node(mask), write.mask(x))
        x = x.full
    shape = list(torch.broadcast_shapes(value_of(x).shape, value_of(mask).shape))
    if list(value_of(x).shape) != shape:
        x = write.emit.call(aten.expand.default, x, shape)
    if list(value_of(mask).shape) != shape:
        mask = write.emit.once(aten.expand.default, write.emit.first(mask), shape)
    return _selected(write, node, _flattened(write, x, 0, len(shape)), _vector(write, mask), 0)


def value_node(given: Rows | fx.Node) -> fx.Node:
    return given.full if isinstance(given, Rows) else given


def nonzero(write: Writer, node: fx.Node) -> Any:
    """The places of a mask: all of them, and which are in it."""
    emit, given = write.emit, write.became(node.args[0])
    if len(node.args) > 1 or isinstance(given, Rows) or not value_of(given).dim():
        raise NotFixed("of rows that a mask selects, or of several operands")
    mask = given if value_of(given).dtype == torch.bool else emit.once(aten.ne.Scalar, given, 0)
    vector, shape = _vector(write, mask), tuple(value_of(given).shape)
    left = math.prod(shape)
    columns: list[fx.Node] = []
    places = emit.once(aten.arange.default, left, device=value_of(given).device)
    for size in shape:
        left //= max(size, 1)
        at = emit.once(aten.floor_divide.Scalar, places, left) if left > 1 else places
        columns.append(emit.once(aten.remainder.Scalar, at, size) if len(columns) else at)
    made = node.meta["val"]
    if isinstance(made, torch.Tensor):
        full = emit.once(aten.stack.default, columns, 1)
        found = write.rows(made, full, {0: vector})
        return Rows(found.full, found.counts, (shape, None))
    kept = [write.rows(part, column, {0: vector}) for part, column in zip(made, columns, strict=True)]
    return tuple(Rows(rows.full, rows.counts, (shape, k)) for k, rows in enumerate(kept))


# Placing


def index_put(write: Writer, node: fx.Node) -> Any:
    """`h[mask] = values`, and `h[nonzero(mask)] = values`; adding may go to any place."""
    args = write.args(node)
    h, indices, values, adds = args["self"], args["indices"], args["values"], args["accumulate"]
    used = [d for d, given in enumerate(indices) if given is not None]
    if isinstance(h, Rows):
        raise NotFixed("it writes into rows that a mask selects")
    mask = indices[used[0]]
    place = _all_places(write, h, indices, used)
    if len(used) == 1 and isinstance(mask, fx.Node) and value_of(mask).dtype == torch.bool:
        place = _vector(write, mask), value_of(mask).dim()
    if place is None:
        return _added(write, node, h, indices, used, values, bool(adds))
    vector, count = place
    shape, first = value_of(h).shape, used[0]
    if isinstance(values, Rows):
        if write.aligned([values]) != {first - (len(shape) - count + 1): vector}:
            raise NotFixed("rows that different masks select meet")
        flat = [*shape[:first], len(value_of(vector)), *shape[first + count :]]
        wide = write.emit.call(aten.expand.default, values.full, flat)
        put = write.emit.call(aten.reshape.default, wide, list(shape))
    elif value_of(values).dim() <= len(shape) - first - count:
        put = values
    else:
        raise NotFixed("how many values it places is not known")
    where = [1] * len(shape)
    where[first : first + count] = shape[first : first + count]
    mask = write.emit.once(aten.reshape.default, vector, where)
    new = write.emit.call(aten.add.Tensor, h, put) if adds else put
    return _written(write, node, h, write.emit.call(aten.where.self, mask, new, h))


def _written(write: Writer, node: fx.Node, h: fx.Node, new: fx.Node) -> fx.Node:
    is_mutable = node.target._schema.is_mutable  # type: ignore[union-attr]
    return write.emit.call(aten.copy_.default, h, new) if is_mutable else new


def _added(write: Writer, node: fx.Node, h: fx.Node, indices: Any, used: list[int], values: Any, adds: bool) -> fx.Node:
    """Rows that do not count add zero, wherever that is."""
    if not adds or not isinstance(values, Rows) or any(value_of(indices[d]).dtype == torch.bool for d in used):
        raise NotFixed("places are overwritten in an order that the data decides")
    counts = write.aligned([indices[d] for d in used])
    if set(counts.values()) != set(values.counts.values()):
        raise NotFixed("rows that different masks select meet")
    return write.again(node, values=write.filled(values, 0))


def add_at(write: Writer, node: fx.Node) -> fx.Node:
    """`index_add` and `scatter_add` of rows: those that do not count add zero."""
    args = write.args(node)
    name = "source" if "source" in args else "src"
    h, at, source = args["self"], args["index"], args[name]
    if isinstance(h, Rows) or not isinstance(at, Rows) or not isinstance(source, Rows):
        raise NotFixed("rows that a mask selects meet others")
    if set(at.counts.values()) != set(source.counts.values()):
        raise NotFixed("rows that different masks select meet")
    return write.again(node, **{name: write.filled(source, 0)})


# Rows by themselves


def _kept(dims_gone: Callable[[dict[str, Any]], Sequence[int]]) -> Form:
    """A call that treats rows one by one and leaves all dims, unless these are ones that a mask selects."""

    def form(write: Writer, node: fx.Node) -> Any:
        args = write.args(node)
        x = args["self" if "self" in args else "input"]
        if any(isinstance(a, Rows) for name, a in args.items() if name not in ("self", "input")):
            raise NotFixed("rows that a mask selects stand where a fixed number must")
        rank = value_of(x).dim()
        if any(d % rank in x.counts for d in dims_gone(args)):
            raise NotFixed("it computes over rows that a mask selects")
        return write.rows(node.meta["val"], write.again(node), x.counts)

    return form


def softmax(write: Writer, node: fx.Node) -> Any:
    x = write.args(node)["self"]
    changed = {"self": write.filled(x, -math.inf)} if write.args(node)["dim"] % value_of(x).dim() in x.counts else {}
    return write.rows(node.meta["val"], write.again(node, **changed), x.counts)


def dropout(write: Writer, node: fx.Node) -> Any:
    args = write.args(node)
    if not args["train"] or not args["p"]:
        return args["input"]
    raise NotFixed("it draws as many random numbers as rows are selected; apply it before rows are selected")


def embedding(write: Writer, node: fx.Node) -> Any:
    at = write.args(node)["indices"]
    if not isinstance(at, Rows):
        raise NotFixed("the table is rows that a mask selects")
    return write.rows(node.meta["val"], write.again(node), at.counts)


def one_hot(write: Writer, node: fx.Node) -> Any:
    x = write.args(node)["self"]
    return write.rows(node.meta["val"], write.again(node), x.counts)


def gather(write: Writer, node: fx.Node) -> Any:
    args = write.args(node)
    x, at, dim = args["self"], args["index"], args["dim"]
    for given in (x, at):
        if isinstance(given, Rows) and dim % value_of(x).dim() in given.counts and given is x:
            raise NotFixed("it picks among rows that a mask selects")
    if isinstance(x, Rows) and (not isinstance(at, Rows) or dict(x.counts) != dict(at.counts)):
        raise NotFixed("rows that different masks select meet")
    return write.rows(node.meta["val"], write.again(node), at.counts)


def index_select(write: Writer, node: fx.Node) -> Any:
    args = write.args(node)
    x, at = args["self"], args["index"]
    dim = args["dim"] % value_of(x).dim()
    if isinstance(x, Rows):
        if dim in x.counts or isinstance(at, Rows):
            raise NotFixed("it picks among rows that a mask selects")
        return write.rows(node.meta["val"], write.again(node), x.counts)
    place = _all_places(write, x, [None] * dim + [at], [dim])
    if place is not None:
        return _selected(write, node, x, place[0], dim)
    return write.rows(node.meta["val"], write.again(node), {dim: at.counts[0]})


# Products


def linear(write: Writer, node: fx.Node) -> Any:
    args = write.args(node)
    x = args["input"]
    if not isinstance(x, Rows) or isinstance(args["weight"], Rows) or value_of(x).dim() - 1 in x.counts:
        raise NotFixed("the weights have as many columns as rows are selected")
    return write.rows(node.meta["val"], write.again(node), x.counts)


def matmul(write: Writer, node: fx.Node) -> Any:
    """Rows may be those of the product, or be summed over: then those that do not count are zero."""
    args = write.args(node)
    left, right = ("mat1", "mat2") if "mat1" in args else ("self", "mat2" if "mat2" in args else "other")
    a, b = args[left], args[right]
    (m, n) = (value_of(a).dim(), value_of(b).dim())
    if min(m, n) < 2 or isinstance(args.get("bias"), Rows):
        raise NotFixed("a vector is as long as rows are selected")
    of_a = {d - m: v for d, v in a.counts.items()} if isinstance(a, Rows) else {}
    of_b = {d - n: v for d, v in b.counts.items()} if isinstance(b, Rows) else {}
    if of_a.pop(-1, None) is not of_b.pop(-2, None):
        raise NotFixed("rows that different masks select meet")
    changed = {}
    for name, x, d in ((left, a, m - 1), (right, b, n - 2)):
        if isinstance(x, Rows) and d in x.counts:
            changed[name] = write.filled(x, 0, [d])
    for d in set(of_a) & set(of_b):
        if of_a[d] is not of_b[d]:
            raise NotFixed("rows that different masks select meet")
    full = write.again(node, **changed)
    rank = full.meta["val"].dim()
    return write.rows(node.meta["val"], full, {rank + d: v for d, v in (of_b | of_a).items()})


def einsum(write: Writer, node: fx.Node) -> Any:
    args = write.args(node)
    names, arrow, result = args["equation"].replace(" ", "").partition("->")
    if "." in names or not arrow:
        raise NotFixed("an equation without all of its letters")
    letters: dict[str, fx.Node] = {}
    tensors = []
    for text, given in zip(names.split(","), args["tensors"], strict=True):
        for d, letter in enumerate(text):
            if isinstance(given, Rows) and d in given.counts:
                letters[letter] = given.counts[d]
    for text, given in zip(names.split(","), args["tensors"], strict=True):
        own = {text[d]: v for d, v in given.counts.items()} if isinstance(given, Rows) else {}
        if any(own.get(letter) is not letters[letter] for letter in text if letter in letters):
            raise NotFixed("rows that different masks select meet")
        summed = [d for d, letter in enumerate(text) if letter in own and letter not in result]
        tensors.append(write.filled(given, 0, summed) if summed else given)
    counts = {d: letters[letter] for d, letter in enumerate(result) if letter in letters}
    return write.rows(node.meta["val"], write.again(node, tensors=tensors), counts)


# Views


def unsqueeze(write: Writer, node: fx.Node) -> Any:
    x, dim = write.args(node)["self"], write.args(node)["dim"]
    at = dim % (value_of(x).dim() + 1)
    return write.rows(node.meta["val"], write.again(node), {d + (d >= at): v for d, v in x.counts.items()})


def squeeze(write: Writer, node: fx.Node) -> Any:
    args = write.args(node)
    x = args["self"]
    shape = value_of(x).shape
    dim = args.get("dim", list(range(len(shape))))
    asked = {d % len(shape) for d in (dim if isinstance(dim, list) else [dim])}
    gone = {d for d in asked if shape[d] == 1 and d not in x.counts}
    counts = {d - sum(g < d for g in gone): v for d, v in x.counts.items()}
    full = write.emit.call(aten.squeeze.dims, x.full, sorted(gone)) if gone else x.full
    found = write.rows(node.meta["val"], full, counts)
    return _placed(found, x, 0) if gone == {1} else found


def _placed(rows: Rows, of: Rows, column: int) -> Rows:
    """A column of what `nonzero` made is a coordinate."""
    if of.place is None or of.place[1] is not None:
        return rows
    return Rows(rows.full, rows.counts, (of.place[0], column))


def select(write: Writer, node: fx.Node) -> Any:
    args = write.args(node)
    x, at = args["self"], args["index"]
    dim = args["dim"] % value_of(x).dim()
    if isinstance(at, fx.Node) and isinstance(x, fx.Node):
        # x[i], of a number that was read from a tensor.
        length = value_of(x).shape[dim]
        at = write.emit.once(aten.remainder.Scalar, at, length)
        picked = write.emit.call(aten.index_select.default, x, dim, write.emit.once(aten.reshape.default, at, [1]))
        return write.emit.call(aten.squeeze.dim, picked, dim)
    if not isinstance(x, Rows) or not isinstance(at, int) or dim in x.counts:
        raise NotFixed("it picks among rows that a mask selects")
    counts = {d - (d > dim): v for d, v in x.counts.items()}
    found = write.rows(node.meta["val"], write.again(node), counts)
    return _placed(found, x, args["index"] % value_of(x).shape[dim]) if dim == 1 else found


def slice_(write: Writer, node: fx.Node) -> Any:
    args = write.args(node)
    x, end = args["self"], args["end"]
    dim = args["dim"] % value_of(x).dim()
    if isinstance(x, fx.Node) and isinstance(end, fx.Node) and args["start"] in (None, 0) and args["step"] == 1:
        # x[:n]: rows with a smaller number; a negative one counts from the end.
        length = value_of(x).shape[dim]
        places = write.emit.once(aten.arange.default, length, device=value_of(x).device)
        behind = write.emit.once(aten.add.Scalar, end, length)
        last = write.emit.once(aten.where.self, write.emit.once(aten.lt.Scalar, end, 0), behind, end)
        return _selected(write, node, x, write.emit.once(aten.lt.Tensor, places, last), dim)
    if not isinstance(x, Rows) or isinstance(end, fx.Node) or dim in x.counts:
        raise NotFixed("where it begins or ends is a number that the data says")
    return write.rows(node.meta["val"], write.again(node), x.counts)


def permute(order_of: Callable[[dict[str, Any], int], Sequence[int]]) -> Form:
    def form(write: Writer, node: fx.Node) -> Any:
        x = write.args(node)["self"]
        order = order_of(write.args(node), value_of(x).dim())
        counts = {order.index(d): v for d, v in x.counts.items()}
        return write.rows(node.meta["val"], write.again(node), counts)

    return form


def _swapped(args: dict[str, Any], rank: int) -> list[int]:
    a, b = (args[name] % rank for name in ("dim0", "dim1"))
    return [b if d == a else a if d == b else d for d in range(rank)]


def reshape(write: Writer, node: fx.Node) -> Any:
    """A dim of rows stays one, or is merged with its neighbours: then each of them counts as often as they are long."""
    x, made = write.args(node)["self"], node.meta["val"]
    if not isinstance(x, Rows):
        raise NotFixed("it needs a size that the model reads from a tensor")
    shape = list(value_of(x).shape)
    if len(x.counts) != 1:
        raise NotFixed("several dims are as long as rows are selected")
    ((dim, vector),) = x.counts.items()
    at = next(k for k, size in enumerate(made.shape) if not isinstance(size, int))
    before, behind = math.prod(made.shape[:at]), math.prod(made.shape[at + 1 :])
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    if outer % before or inner % behind:
        sizes, where, vector = write.merged.get(vector, ((), 0, vector))
        if (before, behind) != (outer * math.prod(sizes[:where]), inner * math.prod(sizes[where + 1 :])) or not sizes:
            raise NotFixed("rows are not kept together")
        merged = vector
    else:
        parts = (outer // before, len(value_of(vector)), inner // behind)
        merged = vector
        if parts[0] > 1 or parts[2] > 1:
            tall = write.emit.once(aten.reshape.default, vector, [1, -1, 1])
            merged = write.emit.once(
                aten.reshape.default, write.emit.once(aten.expand.default, tall, list(parts)), [-1]
            )
            write.merged[merged] = (parts, 1, vector)
    full_shape = [len(value_of(merged)) if k == at else size for k, size in enumerate(made.shape)]
    full = write.emit.call(aten.reshape.default, x.full, full_shape)
    found = write.rows(made, full, {at: merged})
    return _placed(found, x, 0) if len(shape) == 2 and shape[1] == 1 and len(full_shape) == 1 else found


def expand(write: Writer, node: fx.Node) -> Any:
    x, made = write.args(node)["self"], node.meta["val"]
    full_shape, counts = write.sizes(made.shape)
    rank = len(full_shape)
    own = {d + rank - value_of(x).dim(): v for d, v in x.counts.items()} if isinstance(x, Rows) else {}
    if any(counts[d] is not v for d, v in own.items()):
        full_shape = [len(value_of(own[d])) if d in own else size for d, size in enumerate(full_shape)]
    full = write.emit.call(aten.expand.default, value_node(x), full_shape)
    return write.rows(made, full, counts | own)


def created(write: Writer, node: fx.Node) -> Any:
    """A tensor of as many equal values as rows are selected."""
    full_shape, counts = write.sizes(node.meta["val"].shape)
    return write.rows(node.meta["val"], write.again(node, size=full_shape), counts)


def tensor_of(write: Writer, node: fx.Node) -> fx.Node:
    """A number that was read from a tensor, as a tensor again."""
    return write.emit.call(aten.to.dtype, write.became(node.args[0]), node.meta["val"].dtype)


def numbered(write: Writer, node: fx.Node) -> Rows:
    """`arange(len(rows))`: how many rows that count come before."""
    args = write.args(node)
    _, counts = write.sizes(node.meta["val"].shape)
    if not counts or args.get("start", 0) != 0 or args.get("step", 1) != 1:
        raise NotFixed("where it ends is a number that the data says")
    places = write.emit.once(aten.cumsum.default, write.emit.once(aten.to.dtype, counts[0], torch.int64), 0)
    before = write.emit.once(aten.clamp.default, write.emit.once(aten.sub.Scalar, places, 1), 0)
    dtype = node.meta["val"].dtype
    full = before if dtype == torch.int64 else write.emit.once(aten.to.dtype, before, dtype)
    found = write.rows(node.meta["val"], full, counts)
    return Rows(found.full, found.counts, is_order=True)


def broadcast(write: Writer, node: fx.Node) -> Any:
    parts = write.args(node)["tensors"]
    counts = write.aligned(parts)
    full = write.again(node)
    rank = len(node.meta["val"][0].shape)
    return tuple(
        write.rows(part, write.emit.item(full, k), {rank + d: v for d, v in counts.items()})
        for k, part in enumerate(node.meta["val"])
    )


def joined(write: Writer, node: fx.Node) -> Any:
    """One behind the other: so are the places that count."""
    args = write.args(node)
    parts, made = args["tensors"], node.meta["val"]
    rank = made.dim()
    dim = args["dim"] % rank
    if isinstance(made.shape[dim], int):
        counts = write.aligned(parts)
        return write.rows(made, write.again(node), {rank + d: v for d, v in counts.items()})
    vectors = []
    for part in parts:
        if isinstance(part, Rows) and set(part.counts) == {dim}:
            vectors.append(part.counts[dim])
        elif isinstance(part, Rows):
            raise NotFixed("rows that different masks select meet")
        else:
            size = [value_of(part).shape[dim]]
            device = value_of(part).device
            vectors.append(write.emit.once(aten.full.default, size, True, dtype=torch.bool, device=device))
    return write.rows(made, write.again(node), {dim: write.emit.once(aten.cat.default, vectors)})


def stack(write: Writer, node: fx.Node) -> Any:
    args = write.args(node)
    dim = args["dim"] % node.meta["val"].dim()
    rank = value_of(args["tensors"][0]).dim()
    counts = {rank + d: v for d, v in write.aligned(args["tensors"]).items()}
    full = write.again(node)
    return write.rows(node.meta["val"], full, {d + (d >= dim): v for d, v in counts.items()})


def parted(write: Writer, node: fx.Node) -> Any:
    """`unbind`, `split`, `chunk` along another dim than that of the rows."""
    args = write.args(node)
    x = args["self"]
    dim = args["dim"] % value_of(x).dim()
    if dim in x.counts:
        raise NotFixed("it parts rows that a mask selects")
    full = write.again(node)
    gone = "unbind" in str(node.target)
    counts = {d - (gone and d > dim): v for d, v in x.counts.items()}
    found = []
    for k, part in enumerate(node.meta["val"]):
        rows = write.rows(part, write.emit.item(full, k), counts)
        found.append(_placed(rows, x, k) if gone and dim == 1 else rows)
    return tuple(found)


# Reducing


def _reduced(write: Writer, node: fx.Node) -> tuple[Rows, list[int], list[int], dict[int, fx.Node]]:
    """The operand, the dims reduced, those of them that a mask selects, and what counts of the result."""
    args = write.args(node)
    x = args["self"]
    rank = value_of(x).dim()
    dim = args.get("dim")
    dims = (
        sorted({d % rank for d in (dim if isinstance(dim, list) else [dim])})
        if dim not in (None, [])
        else list(range(rank))
    )
    over = [d for d in dims if d in x.counts]
    gone = 0 if args.get("keepdim") else 1
    counts = {d - gone * sum(g < d for g in dims): v for d, v in x.counts.items() if d not in over}
    return x, dims, over, counts


def reduction(neutral: float) -> Form:
    def form(write: Writer, node: fx.Node) -> Any:
        if "other" in write.args(node):
            return write.pointwise(node)
        x, _, over, counts = _reduced(write, node)
        changed = {"self": write.filled(x, neutral, over)} if over else {}
        full = write.again(node, **changed)
        if isinstance(node.meta["val"], tuple | list):
            values, places = node.meta["val"]
            found = write.rows(values, write.emit.item(full, 0), counts)
            return found, None if over else write.rows(places, write.emit.item(full, 1), counts)
        return write.rows(node.meta["val"], full, counts)

    return form


def topk(write: Writer, node: fx.Node) -> Any:
    """The largest of the rows that count, if there are that many."""
    args = write.args(node)
    x, dim = args["self"], args["dim"] % value_of(args["self"]).dim()
    if not isinstance(x, Rows) or not isinstance(args["k"], int):
        raise NotFixed("how many it takes is a number that the data says")
    is_over = dim in x.counts
    changed = {"self": write.filled(x, -math.inf if args["largest"] else math.inf, [dim])} if is_over else {}
    full = write.again(node, **changed)
    counts = {d: v for d, v in x.counts.items() if d != dim}
    values, places = node.meta["val"]
    found = write.rows(values, write.emit.item(full, 0), counts)
    return found, None if is_over else write.rows(places, write.emit.item(full, 1), counts)


def _total(write: Writer, x: Rows, full: fx.Node, dims: list[int], over: list[int], keepdim: bool) -> Any:
    """The sum over dims, and how many it adds up."""
    zeroed = write.filled(Rows(full, x.counts), 0, over)
    total = write.emit.call(aten.sum.dim_IntList, zeroed, dims, keepdim)
    number = write.count(x.counts[over[0]])
    for d in over[1:]:
        number = write.emit.call(aten.mul.Tensor, number, write.count(x.counts[d]))
    others = math.prod(value_of(x).shape[d] for d in dims if d not in over)
    if others != 1:
        number = write.emit.call(aten.mul.Scalar, number, others)
    return total, write.emit.call(aten.to.dtype, number, value_of(total).dtype)


def mean(write: Writer, node: fx.Node) -> Any:
    x, dims, over, counts = _reduced(write, node)
    if not over:
        return write.rows(node.meta["val"], write.again(node), counts)
    args = write.args(node)
    full = x.full if args.get("dtype") is None else write.emit.call(aten.to.dtype, x.full, args["dtype"])
    total, number = _total(write, x, full, dims, over, bool(args.get("keepdim")))
    return write.rows(node.meta["val"], write.emit.call(aten.div.Tensor, total, number), counts)


def variance(write: Writer, node: fx.Node) -> Any:
    x, dims, over, counts = _reduced(write, node)
    if not over:
        return write.rows(node.meta["val"], write.again(node), counts)
    emit, args = write.emit, write.args(node)
    less = args.get("correction", 1 if args.get("unbiased", True) else 0)
    less = 1 if less is None else less
    total, number = _total(write, x, x.full, dims, over, keepdim=True)
    off = emit.call(aten.sub.Tensor, x.full, emit.call(aten.div.Tensor, total, number))
    squares, _ = _total(write, x, emit.call(aten.square.default, off), dims, over, bool(args.get("keepdim")))
    found = emit.call(aten.div.Tensor, squares, emit.call(aten.sub.Scalar, number, less))
    if "std" in str(node.target):
        found = emit.call(aten.sqrt.default, found)
    return write.rows(node.meta["val"], found, counts)


def norm(write: Writer, node: fx.Node) -> Any:
    x, _, over, counts = _reduced(write, node)
    order = write.args(node)["ord"]
    if over and order <= 0:
        raise NotFixed(f"a norm of order {order} over rows that a mask selects")
    changed = {"self": write.filled(x, 0, over)} if over else {}
    return write.rows(node.meta["val"], write.again(node, **changed), counts)


# Losses


def loss(gone: Callable[[int], Sequence[int]]) -> Form:
    """Without its reduction, then the mean or the sum of what counts. `gone`: the dims of the first operand that the
    loss of a row has no longer."""

    def form(write: Writer, node: fx.Node) -> Any:
        args = write.args(node)
        tensors = [arg for arg in args.values() if isinstance(arg, Rows | fx.Node)]
        rank = max(value_of(t).dim() for t in tensors)
        counts = {rank + d: v for d, v in write.aligned(tensors).items()} if not gone(rank) else _first(tensors)
        if any(d in counts for d in gone(rank)):
            raise NotFixed("it computes over rows that a mask selects")
        single = write.again(node, reduction=0)
        counts = {d - sum(g < d for g in gone(rank)): v for d, v in counts.items()}
        return _reduced_loss(write, node, Rows(single, counts))

    return form


def _first(tensors: Sequence[Rows | fx.Node]) -> dict[int, fx.Node]:
    """Rows of a loss that has a result for each: they are dim 0 of every operand."""
    found = [dict(t.counts) if isinstance(t, Rows) else {} for t in tensors if value_of(t).dim()]
    if any(list(counts) != [0] or counts[0] is not found[0][0] for counts in found):
        raise NotFixed("rows that different masks select meet")
    return found[0]


def _reduced_loss(write: Writer, node: fx.Node, rows: Rows) -> Any:
    how = write.args(node)["reduction"]
    if how == 0:
        return write.rows(node.meta["val"], rows.full, rows.counts)
    dims = list(range(rows.value.dim()))
    total, number = _total(write, rows, rows.full, dims, sorted(rows.counts), keepdim=False)
    return write.emit.call(aten.div.Tensor, total, number) if how == 1 else total


def classified(write: Writer, node: fx.Node) -> Any:
    """Cross-entropy: rows that do not count have the class that is ignored."""
    args = write.args(node)
    x, target = args["self"], args["target"]
    if not isinstance(x, Rows) or not isinstance(target, Rows) or isinstance(args["weight"], Rows):
        raise NotFixed("rows that a mask selects meet others")
    by_class = not value_of(target).dtype.is_floating_point
    counts = {d - (d > 1): v for d, v in x.counts.items()}
    if 1 in x.counts and value_of(x).dim() > 1:
        raise NotFixed("classes are as many as rows are selected")
    if dict(target.counts) != (counts if by_class else dict(x.counts)):
        raise NotFixed("rows that different masks select meet")
    if not by_class:
        return _reduced_loss(write, node, Rows(write.again(node, reduction=0), counts))
    full = write.again(node, target=write.filled(target, args["ignore_index"]))
    return write.rows(node.meta["val"], full, counts if args["reduction"] == 0 else {})


_ELEMENTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
    " soft_margin_loss hinge_embedding_loss poisson_nll_loss margin_ranking_loss"
)
_VIEWS = "view reshape flatten ravel unflatten view_as reshape_as"

_OF_NUMBERS = "select slice arange zeros ones full new_zeros new_ones new_full expand scalar_tensor"
OF_NUMBERS = frozenset(_OF_NUMBERS.split())
"""Forms of calls that may have a number from the data and no rows."""

FORMS: dict[str, Form] = {
    "index": index,
    "masked_select": masked_select,
    **dict.fromkeys(("nonzero", "nonzero_numpy", "argwhere"), nonzero),
    "where": lambda write, node: nonzero(write, node) if len(node.args) == 1 else write.pointwise(node),
    "index_put": index_put,
    "index_add": add_at,
    "scatter_add": add_at,
    "softmax": softmax,
    "log_softmax": softmax,
    "layer_norm": _kept(lambda args: range(-len(args["normalized_shape"]), 0)),
    "rms_norm": _kept(lambda args: range(-len(args["normalized_shape"]), 0)),
    "group_norm": _kept(lambda args: range(1, value_of(args["input"]).dim())),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _kept(lambda args: range(1, value_of(args["input"]).dim()))),
    "cumsum": _kept(lambda args: [args["dim"]]),
    "glu": _kept(lambda args: [args["dim"]]),
    "flip": _kept(lambda args: args["dims"]),
    "dropout": dropout,
    "embedding": embedding,
    "one_hot": one_hot,
    "gather": gather,
    "index_select": index_select,
    "linear": linear,
    **dict.fromkeys(("mm", "matmul", "bmm"), matmul),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "select": select,
    "slice": slice_,
    "transpose": permute(_swapped),
    "permute": permute(lambda args, rank: [d % rank for d in args["dims"]]),
    **dict.fromkeys(("t", "numpy_T"), permute(lambda args, rank: list(reversed(range(rank))))),
    **dict.fromkeys(_VIEWS.split(), reshape),
    "expand": expand,
    **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full"), created),
    "arange": numbered,
    "scalar_tensor": tensor_of,
    "broadcast_tensors": broadcast,
    "einsum": einsum,
    "topk": topk,
    "cat": joined,
    "stack": stack,
    **dict.fromkeys(("unbind", "split", "chunk"), parted),
    "sum": reduction(0),
    "prod": reduction(1),
    "any": reduction(0),
    "all": reduction(1),
    **dict.fromkeys(("amax", "max", "logsumexp"), reduction(-math.inf)),
    **dict.fromkeys(("amin", "min"), reduction(math.inf)),
    "mean": mean,
    **dict.fromkeys(("var", "std"), variance),
    "linalg_vector_norm": norm,
    **dict.fromkeys(_ELEMENTWISE.split(), loss(lambda _: ())),
    **dict.fromkeys(("cosine_embedding_loss", "triplet_margin_loss"), loss(lambda rank: [rank - 1])),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd"), classified),
}
