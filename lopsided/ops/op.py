"""What the table says about an op, and what an op's own implementation gets to see.

In: nothing. Out: `Op` (one entry of the table), `Call` (a node with its operands, as line functions see it),
`Local` (one device's part of a call, as implementations see it), and `Ask` (what an implementation asks of
the other devices).

An implementation that talks is a generator: it yields an `Ask` and receives the answer. `simulated_devices` drives the
generators of all devices in step; the executor drives one and answers by collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lopsided.errors import ProgramError
from lopsided.ir.graph import Arg, Node, Ref, Value
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import aten_overload, filled, resolve_op
from lopsided.ir.placement import P, Placement, R, start_of


@dataclass(frozen=True, slots=True)
class Call:
    """A node with the values it is called on."""

    node: Node
    operands: tuple[Value, ...]
    # A call is asked for its arguments wherever it is run: they are looked up once.
    _given: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, node: Node, values: Mapping[str, Value]) -> Call:
        return cls(node, tuple(values[name] for name in node.operands))

    def arg(self, name: str) -> Any:
        """The argument of this name in the op's schema, or its default."""
        return self.given().get(name)

    def given(self) -> Mapping[str, Any]:
        if not self._given:
            self._given.update(self._looked_up())
        return self._given

    def _looked_up(self) -> dict[str, Any]:
        overload = aten_overload(self.node.op)
        if overload is None:
            return dict(self.node.kwargs)
        found: dict[str, Any] = {}
        for k, argument in enumerate(overload._schema.arguments):
            found[argument.name] = self.node.args[k] if k < len(self.node.args) else argument.default_value
        found.update(self.node.kwargs)
        return found

    def is_tensor(self, name: str) -> bool:
        return isinstance(self.arg(name), Ref)

    def tensor_slots(self) -> tuple[Value | None, ...]:
        """One entry per tensor argument of the schema, None where the call has none or a number."""
        overload = aten_overload(self.node.op)
        by_name = {value.name: value for value in self.operands}
        if overload is None:
            return tuple(
                by_name[a.name] if isinstance(a, Ref) else None
                for a in self.node.args
                if a is None or isinstance(a, Ref)
            )
        given = self.given()
        slots: list[Value | None] = []
        for argument in overload._schema.arguments:
            if "Tensor" not in str(argument.type):
                continue
            value = given[argument.name]
            if "List" in str(argument.type):
                slots += [by_name[v.name] for v in value if isinstance(v, Ref)]
            else:
                slots.append(by_name[value.name] if isinstance(value, Ref) else None)
        return tuple(slots)

    def placed(self, rule: Rule) -> list[tuple[Placement, Value]]:
        """Results and operands, each as the rule has it."""
        results = zip(rule.gives, self.node.results, strict=True)
        return [*results, *zip(rule.needs, self.operands, strict=True)]

    def cut_by(self, rule: Rule) -> tuple[Placement, Value] | None:
        """What tells which index the rule cuts: one index, so one length, whichever tensor tells it."""
        found = {(p.length(value.shape), p.by): (p, value) for p, value in self.placed(rule) if p.is_shard}
        if len(found) > 1:
            texts = [f"{length} by {by}" if by else str(length) for length, by in sorted(found)]
            raise ProgramError(
                f"{self.node.op} by {rule} cuts lengths {', '.join(texts)} as one", do="cut one index at a time"
            )
        return next(iter(found.values()), None)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(value.shape for value in self.operands)

    @property
    def results(self) -> tuple[tuple[int, ...], ...]:
        return tuple(value.shape for value in self.node.results)


class Randomness(Protocol):
    """Where random numbers come from."""

    def uniform(self, local: Local, shape: Sequence[int], placement: Placement, *, normal: bool = False) -> Tensor:
        """This device's part of a tensor of random numbers: the same on whole values, its own on pieces."""
        ...


@dataclass(frozen=True, slots=True)
class Local:
    """One device's part of a call."""

    call: Call
    rule: Rule
    tensors: tuple[Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]  # of its results
    device: int
    pieces: tuple[int, ...]  # of the index that is cut, in units, for every device; empty if none is
    random: Randomness

    def args(self) -> tuple[list[Any], dict[str, Any]]:
        where = self.tensors[0].device if self.tensors else torch.get_default_device()
        return filled(self.call.node, self.tensors, where)

    def run(self, /, **changed: Any) -> Any:
        """Call the op on the pieces, with some arguments changed."""
        args, kwargs = self.args()
        if changed:
            overload = aten_overload(self.call.node.op)
            names = [a.name for a in overload._schema.arguments] if overload is not None else []
            for name, value in changed.items():
                if name in names[: len(args)]:
                    args[names.index(name)] = value
                else:
                    kwargs[name] = value
        return resolve_op(self.call.node.op)(*args, **kwargs)

    def slots(self) -> list[Tensor | None]:
        """The local tensors, one entry per tensor argument of the schema."""
        feed = iter(self.tensors)
        return [None if slot is None else next(feed) for slot in self.call.tensor_slots()]

    def widened(self) -> Local:
        """The same part with its tensors in dtypes to add up in."""
        return replace(self, tensors=tuple(map(accumulating, self.tensors)))

    def as_result(self, x: Tensor, k: int = 0) -> Tensor:
        """The tensor in the dtype that result `k` has in the graph: under autocast not always that of an operand."""
        return x.to(self.call.node.results[k].torch_dtype)

    def nothing(self, k: int = 0) -> Tensor:
        """Zeros as result `k`, for a device that has nothing to add to it; every operand has a gradient of zero.

        Not the operands times zero: of a masked score, which is -inf, that would be no number.
        """
        value = self.call.node.results[k]
        where = self.tensors[0].device if self.tensors else torch.get_default_device()
        return connected(torch.zeros(self.shapes[k], dtype=value.torch_dtype, device=where), self.tensors)

    def start(self, placement: Placement) -> int:
        """Where in its dim this device's piece begins."""
        return start_of(self.pieces, self.device) * placement.unit

    def fraction(self, k: int = 0) -> float:
        """How much of operand `k` this device holds."""
        whole = self.call.operands[k].elements
        return self.tensors[k].numel() / whole if whole else 1.0

    def draw(self, *, normal: bool = False, result: int = 0) -> Tensor:
        """Random numbers for a result of this call."""
        return self.random.uniform(self, self.call.node.results[result].shape, self.rule.gives[result], normal=normal)


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the other devices: convert this tensor's placement, or take the largest of each."""

    tensor: Tensor
    source: Placement = P
    to: Placement = R
    largest: bool = False
    shape: tuple[int, ...] | None = None  # of the whole value, where the tensor is a piece of it
    what: str = ""  # is converted; that of the op if nothing is said


class _Connected(torch.autograd.Function):
    """A result that should have a gradient and has none here, and the operands: with a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *operands: Tensor) -> Tensor:
        ctx.about = [(t.shape, t.dtype, t.device) for t in operands]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if need else None
            for need, (shape, dtype, device) in zip(needed, ctx.about, strict=True)
        ]
        return (None, *zeros)


def connected(result: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """The result as a function of the operands, so that going backward reaches them."""
    if not any(operand.requires_grad for operand in operands):
        return result
    made: Tensor = _Connected.apply(result, *operands)  # type: ignore[no-untyped-call]
    return made


Talking = Generator[Ask, Tensor, Any]
Implementation = Callable[[Local], Any]
Written = str | tuple[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Talk:
    """A rule that cuts an index the line keeps whole, by an implementation of its own.

    Results that do not carry the index are placed as `lacking`. An implementation that asks where its piece
    starts needs it `in_one_block`. One that is not `exact` relaxes the model and is used only where the user
    allows it.
    """

    index: str
    how: str
    implementation: Implementation
    lacking: Placement
    in_one_block: bool = False
    exact: bool = True


Talks = Callable[[Call], Sequence[Talk]]


@dataclass(frozen=True, slots=True)
class Op:
    """One entry of the table: the line, and what cannot be said in a line.

    `line` is a text, or a function of the call that returns a text (and sizes that shapes do not tell).
    `local` computes a piece where calling the op on the pieces would not, for example because it takes sizes.
    """

    line: str | Callable[[Call], Written]
    local: Implementation | None = None
    talks: Talks | None = None
    random: bool = False


def accumulating(x: Tensor) -> Tensor:
    """The tensor in a dtype to add up in: half precision counts exactly to 256 or 2048 only, and float16 ends at
    65504."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def entries(names: str, op: Op) -> dict[str, Op]:
    """The same entry for several aten ops, their names in a row."""
    return {f"aten.{name}": op for name in names.split()}


def number(value: Arg | Any) -> float:
    """A scalar argument as a number; a tensor in its place counts as not a number."""
    return float(value) if isinstance(value, bool | int | float) else float("nan")


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters(rank: int, whole: Sequence[int] = ()) -> list[str]:
    """A letter per dim, upper case for those kept whole."""
    kept = {dim % rank for dim in whole} if rank else set()
    return [LETTERS[d].upper() if d in kept else LETTERS[d] for d in range(rank)]


def spec(names: Sequence[str]) -> str:
    return " ".join(names) or "()"


def whole(shape: Sequence[int], tag: int) -> str:
    """A tensor with every dim kept whole; `tag` keeps its indices apart from those of other tensors."""
    return spec([f"{name}{tag}" for name in letters(len(shape), range(len(shape)))])


def wholes(call: Call) -> tuple[list[str], list[str]]:
    """Every operand and every result with all dims kept whole."""
    operands = [whole(shape, k) for k, shape in enumerate(call.shapes)]
    return operands, [whole(shape, k + len(operands)) for k, shape in enumerate(call.results)]


def all_whole(call: Call) -> str:
    """The line of an op that can be cut nowhere."""
    operands, results = wholes(call)
    return f"f[{', '.join(operands)}] -> {', '.join(results)}"


def sum_of_wholes(call: Call) -> str:
    """The line of an op that can be cut nowhere, but is linear in all operands together."""
    operands, results = wholes(call)
    return f"{' + '.join(operands)} -> {', '.join(results)}"


def dims_of(call: Call, name: str = "dim") -> list[int]:
    """The dims an argument lists, counted from the left; all of them where it lists none."""
    rank, dims = len(call.shapes[0]), call.arg(name)
    listed = [dims] if isinstance(dims, int) else list(dims or ())
    return [dim % max(rank, 1) for dim in listed] if listed else list(range(rank))


def dim_of(call: Call, name: str = "dim") -> int:
    """The dim an argument names, counted from the left; the first where it names none."""
    return dims_of(call, name)[0] if call.shapes[0] else 0


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    padded = [(*[1] * (rank - len(shape)), *shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))
