"""One op on one device: its piece computed by its rule, everything that can be settled before the run settled.

In: a `Call`, a `Rule`, an `Redistributor`, random numbers. Out: `LocalOp`, whose `run` maps this device's operands to
results.

All devices must start the same collectives in the same order, also going backward, also those whose piece is empty. So
the autograd graph has the same shape everywhere: an op without elements is still a function with a backward
(`_Nothing`), and what the graph says has a gradient has one (`connected`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lopsided.comm.communicator import Label
from lopsided.comm.redistribute import Redistributor
from lopsided.executor.factors import ByFactors
from lopsided.executor.randomness import RankRandomness
from lopsided.ir.graph import Arg, Atom, Node, Ref
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import aten_overload, makes_tensors, resolve_op
from lopsided.ir.placement import Placement
from lopsided.ops import describe
from lopsided.ops.op import Ask, Call, Local
from lopsided.ops.simulated_devices import SeededRandomness, implementation_of, is_nothing, rule_pieces
from lopsided.ops.views import expand_to_local_shape, to_local_shape

Operands = Sequence[Tensor]
RunOp = Callable[[Operands], list[Tensor]]
AnyRandomness = RankRandomness | SeededRandomness


class LocalOp:
    """One op by one rule, prepared: what can be settled before the run is settled here."""

    def __init__(
        self, call: Call, rule: Rule, exchange: Redistributor, random: AnyRandomness, device: torch.device
    ) -> None:
        self.call, self.rule, self.exchange, self.random, self.device = call, rule, exchange, random, device
        self.pieces = rule_pieces(call, rule, exchange.shares)
        placed = zip(rule.gives, call.node.results, strict=True)
        self.shapes = tuple(give.local_shape(value.shape, self.pieces, exchange.rank) for give, value in placed)
        self.run = self._prepared()

    def _prepared(self) -> RunOp:
        call, rule = self.call, self.rule
        if rule.how == "sfb":
            return ByFactors(call, rule, self.exchange, self._by).__call__
        blank = self._local(())
        implementation, talks = implementation_of(call, rule)
        if talks:
            return lambda operands: _listed(self._talk(implementation(self._local(operands))))
        if is_nothing(blank):
            return lambda operands: list(_Nothing.apply(self, len(operands), *operands))  # type: ignore[no-untyped-call]
        draws = _draws(call)
        if not draws and (implementation is Local.run or not _changes(rule)):
            return prepared_call(call.node, self.device)
        if not draws and implementation in (to_local_shape, expand_to_local_shape):
            # Most of what has an implementation of its own: all that it needs is known.
            shape, expands = self.shapes[0], implementation is expand_to_local_shape
            return lambda operands: [operands[0].expand(shape) if expands else operands[0].reshape(shape)]
        if not draws:
            return lambda operands: _listed(implementation(self._local(operands)))
        own = bool(blank.pieces)
        if isinstance(self.random, SeededRandomness):
            return lambda operands: _listed(self._seeded(implementation, operands, own))
        if call.node.op in _NATIVE or implementation is Local.run:
            plain = prepared_call(call.node, self.device)
            give = rule.gives[0]
            # Dropped attention weights have no dim for the columns of values: cut along them, all drop alike.
            alike = call.node.op in _ATTENTION and give.is_shard and give.dim == len(call.results[0]) - 1
            return lambda operands: self._drawn(plain, operands, own and not alike)
        return lambda operands: _listed(implementation(self._local(operands)))

    def _by(self, call: Call, rule: Rule, operands: Operands) -> list[Tensor]:
        """Another rule of the same op; on whole values nothing is cut."""
        found: list[Tensor] = LocalOp(call, rule, self.exchange, self.random, self.device).run(operands)
        return found

    def _local(self, operands: Operands) -> Local:
        return Local(self.call, self.rule, tuple(operands), self.shapes, self.exchange.rank, self.pieces, self.random)

    def _drawn(self, plain: RunOp, operands: Operands, own: bool) -> list[Tensor]:
        if isinstance(self.random, SeededRandomness):
            return plain(operands)
        self.random.draw_from(own=own)
        return plain(operands)

    def _seeded(self, implementation: Callable[[Local], Any], operands: Operands, own: bool) -> Any:
        """As the simulator draws, so that a run can be compared with one device."""
        overload = aten_overload(self.call.node.op)
        if overload is None or torch.Tag.nondeterministic_seeded not in overload.tags:
            return implementation(self._local(operands))
        seed = self.random.of_node(self.call.node.name, self.exchange.rank if own else 0)  # type: ignore[union-attr]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return implementation(self._local(operands))

    def _talk(self, talking: Any) -> Any:
        """Drive an implementation that asks the other devices."""
        if not isinstance(talking, Generator):
            return talking
        answer = None
        for number in itertools.count():
            try:
                ask = talking.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self._answer(ask, number)
        return None

    def _answer(self, ask: Ask, number: int) -> Tensor:
        name = self.call.node.name
        what = Label(f"%{name} [{self.rule.how}]", f"{name} #{number}")
        if ask.largest:
            peak = ask.tensor.detach().clone(memory_format=torch.contiguous_format)
            self.exchange.wire.maximum(peak.view(-1), what=what).wait()
            return peak
        source, to = Placement(ask.source), Placement(ask.to)
        back = Label(f"gradient of {what}", f"∂{name}")
        return self.exchange.convert(ask.tensor, source, to, tuple(ask.tensor.shape), what, back)


_NATIVE = ("aten.dropout.default", "aten.native_dropout.default", "aten.scaled_dot_product_attention.default")
"""Random ops whose own kernel is right on pieces too, given the right stream: their masks have an element of their own
for every element."""
_ATTENTION = ("aten.scaled_dot_product_attention.default",)


def _draws(call: Call) -> bool:
    entry = describe(call.node.op)
    overload = aten_overload(call.node.op)
    tagged = overload is not None and torch.Tag.nondeterministic_seeded in overload.tags
    if not tagged and not (entry is not None and entry.random):
        return False
    # Attention without dropout and dropout that is off draw nothing.
    for name in ("dropout_p", "p"):
        if call.arg(name) == 0:
            return False
    return call.arg("train") is not False


def _changes(rule: Rule) -> bool:
    """Whether an implementation of its own is needed: on whole values the op itself will do."""
    return not all(placement.is_whole for placement in (*rule.needs, *rule.gives))


def _listed(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, tuple | list) else [made]


def prepared_call(node: Node, device: torch.device) -> RunOp:
    """The op of a node as a function of its operands, everything else filled in."""
    function = resolve_op(node.op)
    feed = itertools.count()

    def template(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return _Operand(next(feed))
        if isinstance(arg, tuple):
            return [template(part) for part in arg]
        if isinstance(arg, Atom):
            return device if arg.kind == "device" else arg.resolve()
        return arg

    args = [template(arg) for arg in node.args]
    kwargs = {key: template(arg) for key, arg in node.kwargs}
    if not node.operands and makes_tensors(node.op):
        kwargs["device"] = device
    positional = [(place, arg) for place, arg in enumerate(args) if _has_operand(arg)]
    named = [(name, arg) for name, arg in kwargs.items() if _has_operand(arg)]
    if not named and all(isinstance(arg, _Operand) for _, arg in positional):
        order = [(place, arg.number) for place, arg in positional]
        if order == [(k, k) for k in range(len(order))]:
            rest = args[len(order) :]
            return lambda operands: _listed(function(*operands, *rest, **kwargs))

        def simple(operands: Operands) -> list[Tensor]:
            filled = args.copy()
            for place, number in order:
                filled[place] = operands[number]
            made = function(*filled, **kwargs)
            return [made] if isinstance(made, Tensor) else list(made)

        return simple

    def general(operands: Operands) -> list[Tensor]:
        filled = args.copy()
        for place, arg in positional:
            filled[place] = _filled(arg, operands)
        by_name = kwargs | {name: _filled(arg, operands) for name, arg in named}
        made = function(*filled, **by_name)
        return [made] if isinstance(made, Tensor) else list(made)

    return general


@dataclass(frozen=True, slots=True)
class _Operand:
    number: int


def _has_operand(arg: Any) -> bool:
    return isinstance(arg, _Operand) or (isinstance(arg, list) and any(map(_has_operand, arg)))


def _filled(arg: Any, operands: Operands) -> Any:
    if isinstance(arg, _Operand):
        return operands[arg.number]
    return [_filled(part, operands) for part in arg] if isinstance(arg, list) else arg


class _Nothing(torch.autograd.Function):
    """An op whose results have no elements here; its operands' gradients are zero."""

    @staticmethod
    def forward(ctx: Any, op: LocalOp, count: int, *operands: Tensor) -> Any:
        ctx.about = [(t.shape, t.dtype, t.device) for t in operands]
        made = []
        for shape, value in zip(op.shapes, op.call.node.results, strict=True):
            result = torch.zeros(shape, dtype=value.torch_dtype, device=op.device)
            made.append(result)
        # What has no gradient elsewhere has none here.
        values = zip(made, op.call.node.results, strict=True)
        ctx.mark_non_differentiable(*(result for result, value in values if not value.grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if need else None
            for need, (shape, dtype, device) in zip(needed, ctx.about, strict=True)
        ]
        return (None, None, *zeros)


class _Connected(torch.autograd.Function):
    """A result that should have a gradient and has none here: connected to the operands, with gradient zero."""

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


def connected(result: Tensor, operands: Operands) -> Tensor:
    if not any(operand.requires_grad for operand in operands):
        return result
    made: Tensor = _Connected.apply(result, *operands)  # type: ignore[no-untyped-call]
    return made
