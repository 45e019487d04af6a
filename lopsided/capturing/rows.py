"""Values of which not all counts, and how calls are written for them.

In: nodes of an exported program whose sizes or numbers depend on the data. Out: `Rows` (the whole of a value, and which
places of it count), and `Writer`, which adds the calls that compute with them. Two selections meet only if the vectors
that say what counts are the same node: masks that are provably equal were made one before (`Emission.first`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from lopsided.capturing.emission import Emission

aten = torch.ops.aten


@dataclass(frozen=True)
class Rows:
    """The whole of a value, and for some of its dims a vector that says which places count."""

    full: fx.Node
    counts: Mapping[int, fx.Node]
    place: tuple[tuple[int, ...], int | None] | None = None
    """Of indices that `nonzero` made: the shape of the mask, and which coordinate; None for a column for each."""
    is_order: bool = False
    """Whether rows have their own numbers, from 0, as `arange(len(rows))` does."""

    @property
    def value(self) -> Tensor:
        made: Tensor = self.full.meta["val"]
        return made


class NotFixed(Exception):
    """Why a call cannot be written for values of fixed size."""


def value_of(given: Rows | fx.Node) -> Tensor:
    made: Tensor = given.value if isinstance(given, Rows) else given.meta["val"]
    return made


def full_of(given: Any) -> Any:
    if isinstance(given, Rows):
        return given.full
    return [full_of(part) for part in given] if isinstance(given, list) else given


class Writer:
    """Writes calls on whole values in place of calls on what counts of them."""

    def __init__(self, emit: Emission) -> None:
        self.emit = emit
        self.known: dict[fx.Node, Any] = {}  # Rows, tuples of them, or a tensor node in place of a number
        self.lengths: dict[sympy.Symbol, fx.Node] = {}  # which places a size counts
        self.merged: dict[fx.Node, tuple[tuple[int, ...], int, fx.Node]] = {}  # a vector of dims in one: what it was

    def args(self, node: fx.Node) -> dict[str, Any]:
        """All arguments by name, defaults filled in, and what nodes became in place of them."""
        return {a.name: self.became(given(node, k)) for k, a in enumerate(op_of(node)._schema.arguments)}

    def became(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self.known.get(arg, arg)
        return [self.became(part) for part in arg] if isinstance(arg, tuple | list) else arg

    def again(self, node: fx.Node, /, **changed: Any) -> fx.Node:
        """The call on whole values, with some arguments changed."""
        args = {name: full_of(value) for name, value in (self.args(node) | changed).items()}
        schema = op_of(node)._schema.arguments
        plain = [args[a.name] for a in schema if not a.kwarg_only]
        named = {a.name: args[a.name] for a in schema if a.kwarg_only and args[a.name] is not None}
        return self.emit.call(op_of(node), *plain, **named)

    # Masks

    def mask(self, rows: Rows, dims: Sequence[int] | None = None) -> fx.Node:
        """Which elements count, as a mask that broadcasts over `rows.full`."""
        rank = rows.value.dim()

        def along(dim: int) -> fx.Node:
            shape = [-1 if k == dim else 1 for k in range(rank)]
            vector = rows.counts[dim]
            return vector if rank == 1 else self.emit.once(aten.reshape.default, vector, shape)

        first, *rest = rows.counts if dims is None else dims
        found = along(first)
        for dim in rest:
            found = self.emit.once(aten.logical_and.default, found, along(dim))
        return found

    def filled(self, rows: Rows, number: float, dims: Sequence[int] | None = None) -> fx.Node:
        """The whole value, with `number` where it does not count."""
        dtype = rows.value.dtype
        if math.isinf(number) and not dtype.is_floating_point:
            limits = (False, True) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            number = limits[number > 0]
        elsewhere = self.emit.once(aten.logical_not.default, self.mask(rows, dims))
        return self.emit.call(aten.masked_fill.Scalar, rows.full, elsewhere, number)

    def count(self, vector: fx.Node) -> fx.Node:
        return self.emit.once(aten.sum.default, vector)

    def length(self, size: sympy.Expr) -> fx.Node:
        """How many places a size counts, as a tensor."""
        if size in self.lengths:
            return self.count(self.lengths[size])
        if not isinstance(size, sympy.Add | sympy.Mul):
            raise NotFixed(f"it needs a size that is {size} of what the data says")
        op = aten.add if isinstance(size, sympy.Add) else aten.mul
        whole = [int(part) for part in size.args if part.is_Integer]
        total, *rest = [self.length(part) for part in size.args if not part.is_Integer]
        for part in rest:
            total = self.emit.call(op.Tensor, total, part)
        for number in whole:
            total = self.emit.call(op.Scalar, total, number)
        return total

    def sizes(self, shape: Sequence[Any]) -> tuple[list[int], dict[int, fx.Node]]:
        """A shape that depends on the data, in full, and which places count."""
        counts: dict[int, fx.Node] = {}
        for d, size in enumerate(shape):
            if isinstance(size, torch.SymInt):
                if size.node.expr not in self.lengths:
                    raise NotFixed("it makes a tensor of a size that the model reads from a tensor")
                counts[d] = self.lengths[size.node.expr]
        full = [counts[d].meta["val"].shape[0] if d in counts else size for d, size in enumerate(shape)]
        return full, counts

    def rows(self, made: Tensor, full: fx.Node, counts: Mapping[int, fx.Node]) -> Any:
        """`full` as what `made` was, checked against the sizes that export found; plain where all of it counts."""
        wanted, whole = made.shape, full.meta["val"].shape
        same = len(wanted) == len(whole) and all(
            size == whole[d] and d not in counts if isinstance(size, int) else d in counts
            for d, size in enumerate(wanted)
        )
        if not same:
            raise NotFixed("it does not treat rows one by one")
        for d, size in enumerate(wanted):
            if isinstance(size, torch.SymInt):
                self.lengths.setdefault(size.node.expr, counts[d])
        return Rows(full, dict(counts)) if counts else full

    def aligned(self, operands: Sequence[Any]) -> dict[int, fx.Node]:
        """Which places count where operands broadcast, by dim from the right."""
        found: dict[int, fx.Node] = {}
        for rows in operands:
            for d, vector in rows.counts.items() if isinstance(rows, Rows) else ():
                if found.setdefault(d - rows.value.dim(), vector) is not vector:
                    raise NotFixed("rows that different masks select meet")
        for operand in operands:
            if isinstance(operand, fx.Node | Rows):
                shape = value_of(operand).shape
                own = {d - len(shape) for d in operand.counts} if isinstance(operand, Rows) else set()
                if any(-d <= len(shape) and d not in own and shape[d] != 1 for d in found):
                    raise NotFixed("rows that a mask selects meet others")
        return found

    def pointwise(self, node: fx.Node) -> Any:
        """A call that treats every element by itself, with broadcasting."""
        counts = self.aligned(list(self.args(node).values()))
        full = self.again(node)
        made = full.meta["val"]
        return self.rows(node.meta["val"], full, {d + made.dim(): v for d, v in counts.items()})

    # Numbers

    def with_numbers(self, node: fx.Node) -> fx.Node:
        """The call with tensors in place of numbers that the model read from tensors."""
        target, args = op_of(node), self.args(node)
        schema = target._schema
        numbers = [a.name for k, a in enumerate(schema.arguments) if self.is_number(given(node, k))]
        like = next((a for n, a in args.items() if n not in numbers and isinstance(a, fx.Node | Rows)), None)
        if like is None:
            raise NotFixed("it needs a number that the model reads from a tensor (.item(), a count of rows)")
        dtype = value_of(like).dtype
        for name in numbers:
            if dtype.is_floating_point and value_of(args[name]).dtype != dtype:
                args[name] = self.emit.call(aten.to.dtype, args[name], dtype)
        plain = full_of([args[a.name] for a in schema.arguments if not a.kwarg_only])
        if all("Tensor" in str(a.type) for a in schema.arguments if a.name in numbers):
            return self.emit.call(target, *plain, **{a.name: args[a.name] for a in schema.arguments if a.kwarg_only})
        packet = getattr(aten, schema.name.removeprefix("aten::"))
        other = next((o for n in ("Tensor", "Tensor_Tensor") if (o := getattr(packet, n, None)) is not None), None)
        if other is None or any(a.kwarg_only and args[a.name] != a.default_value for a in schema.arguments):
            raise NotFixed("it needs a number that the model reads from a tensor (.item(), a count of rows)")
        tensors = [
            self.emit.call(aten.full.default, [], arg, dtype=dtype, device=value_of(like).device)
            if "Tensor" in str(a.type) and isinstance(arg, int | float)
            else arg
            for a, arg in zip(other._schema.arguments, plain, strict=False)
        ]
        return self.emit.call(other, *tensors)

    def is_number(self, arg: Any) -> bool:
        return isinstance(arg, fx.Node) and isinstance(self.known.get(arg), fx.Node)


def op_of(node: fx.Node) -> OpOverload:
    if not isinstance(node.target, OpOverload):
        raise NotFixed(f"{node.target} is no op")
    return node.target


def given(node: fx.Node, k: int) -> Any:
    """Argument `k` of a call, or its default."""
    argument = op_of(node)._schema.arguments[k]
    return node.args[k] if k < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
