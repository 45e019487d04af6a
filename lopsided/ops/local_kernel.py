"""One op on one device: its piece computed by its rule, everything that can be settled before the run settled.

In: a `Call`, a `Rule`, shares, a rank, random numbers. Out: `LocalKernel`, whose `run` maps this device's operands to
its results, or whose `talk` does and asks the other devices on the way. Who answers is not its business: the executor
answers by collectives (`answered`), `simulated_devices` from a list with what every device holds.

All devices must start the same collectives in the same order, also going backward, also those whose piece is empty. So
the autograd graph has the same shape everywhere: an op without elements is still a function with a backward
(`connected`).

Under a rule `[sfb]` an op runs as ever going forward, and the gradients of its whole operands come from gathered
factors (`ByFactors`): each device computes the whole gradient, the same everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lopsided.errors import ProgramError
from lopsided.ir.graph import Arg, Atom, Node, Ref
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import aten_overload, listed, makes_tensors, resolve_op, surroundings
from lopsided.ir.placement import AnyShares, I, pieces_of
from lopsided.ops import describe
from lopsided.ops.op import Ask, Call, Implementation, Local, Randomness, Talking, connected
from lopsided.ops.views import expand_to_local_shape, to_local_shape

Operands = Sequence[Tensor]
Stream = Literal["", "own", "shared"]
RunOp = Callable[[Operands], list[Tensor]]


class KernelRandomness(Randomness, Protocol):
    """Random numbers for kernels, too. `by_position`: what a piece draws is that piece of what one device would draw,
    so kernels that draw by themselves will not do."""

    @property
    def by_position(self) -> bool: ...

    def drawing(self, node: str, rank: int | None) -> AbstractContextManager[None]:
        """In here torch's default generator draws for this node: its own numbers on the piece of a rank, the same
        everywhere on a whole value (None)."""
        ...


class LocalKernel:
    """One op by one rule on one device, prepared. Where it `talks`, `talk` is to be driven; else `run` does it all.

    `stream` says whose random numbers torch's default generator must give while it runs, and `bare` is `run` without
    seeing to that. Where that is None, it takes random numbers in another way.
    """

    def __init__(
        self, call: Call, rule: Rule, shares: AnyShares, rank: int, random: KernelRandomness, device: torch.device
    ) -> None:
        self.call, self.rule, self.rank, self.random, self.device = call, rule, rank, random, device
        self.pieces = rule_pieces(call, rule, shares)
        placed = zip(rule.gives, call.node.results, strict=True)
        self.shapes = tuple(give.local_shape(value.shape, self.pieces, rank) for give, value in placed)
        self.implementation, self.talks = _implementation_of(call, rule)
        self.stream: Stream = ""
        self.bare: RunOp | None = None
        self.run: RunOp = self._own if self.talks else self._prepared()
        if not self.talks and not self.stream:
            self.bare = self.run

    def talk(self, operands: Operands) -> Talking:
        """Compute the piece, asking the other devices on the way."""
        made = self.implementation(self._local(operands))
        if isinstance(made, Generator):
            made = yield from made
        return listed(made)

    def _prepared(self) -> RunOp:
        node, implementation = self.call.node, self.implementation
        if self.shapes and all(0 in shape for shape in self.shapes):
            return self._nothing
        if _draws(self.call):
            return self._drawing()
        # Torch's own losses are wrong going backward where an operand is broadcast; their implementation here is not.
        alike = len({*self.call.shapes}) == 1
        if implementation is Local.run or (_is_whole(self.rule) and "empty" not in node.op and alike):
            return prepared_call(node, self.device)
        if implementation in (to_local_shape, expand_to_local_shape):
            # Most of what has an implementation of its own: all that it needs is known.
            shape, expands = self.shapes[0], implementation is expand_to_local_shape
            return lambda operands: [operands[0].expand(shape) if expands else operands[0].reshape(shape)]
        return self._own

    def _drawing(self) -> RunOp:
        node, give, rank = self.call.node, self.rule.gives[0], self.rank if self.pieces else None
        kernel: RunOp = self._own
        if not self.random.by_position and (node.op in _NATIVE or self.implementation is Local.run):
            kernel = prepared_call(node, self.device)
            if node.op in _ATTENTION and give.is_shard and give.dim == len(self.call.results[0]) - 1:
                # Dropped attention weights have no dim for the columns of values: cut along them, all drop alike.
                rank = None
            self.bare = kernel
        self.stream = "shared" if rank is None else "own"

        def drawn(operands: Operands) -> list[Tensor]:
            with self.random.drawing(node.name, rank):
                return kernel(operands)

        return drawn

    def _own(self, operands: Operands) -> list[Tensor]:
        return listed(self.implementation(self._local(operands)))

    def _nothing(self, operands: Operands) -> list[Tensor]:
        """Results without elements need no kernel, and some kernels refuse to make them."""
        made = []
        for shape, value in zip(self.shapes, self.call.node.results, strict=True):
            zeros = torch.zeros(shape, dtype=value.torch_dtype, device=self.device)
            made.append(connected(zeros, operands) if value.grad and torch.is_grad_enabled() else zeros)
        return made

    def _local(self, operands: Operands) -> Local:
        return Local(self.call, self.rule, tuple(operands), self.shapes, self.rank, self.pieces, self.random)


def answered(talking: Talking, answer: Callable[[Ask], Tensor]) -> Any:
    """What a talk returns when each of its questions is answered so."""
    try:
        ask = next(talking)
        while True:
            ask = talking.send(answer(ask))
    except StopIteration as stop:
        return stop.value


def rule_pieces(call: Call, rule: Rule, shares: AnyShares) -> tuple[int, ...]:
    """The pieces of the index this rule cuts."""
    cut = call.cut_by(rule)
    return () if cut is None else pieces_of(cut[0], cut[1].shape, shares)


def _implementation_of(call: Call, rule: Rule) -> tuple[Implementation, bool]:
    """The function that computes a piece, and whether it may talk to the other devices."""
    entry = describe(call.node.op)
    if rule.how not in ("plain", "sfb"):
        talk = next((t for t in (entry.talks(call) if entry and entry.talks else ()) if t.how == rule.how), None)
        if talk is None:
            raise ProgramError(f"{call.node.op} has no implementation {rule.how!r}", do="derive the rules anew")
        return talk.implementation, True
    return (entry.local if entry is not None and entry.local is not None else Local.run), False


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


def _is_whole(rule: Rule) -> bool:
    """On whole values the op itself will do, whatever implementation it has for pieces; but for `empty` and its like,
    whose implementation gives zeros where the op gives what memory held."""
    return all(placement.is_whole for placement in (*rule.needs, *rule.gives))


# The op of a node as a function


def prepared_call(node: Node, device: torch.device) -> RunOp:
    """The op of a node as a function of its operands, everything else filled in."""
    # A value that was gathered may lie in memory in another order than on one device, where a view of it was possible.
    function = resolve_op("aten.reshape.default" if node.op == "aten.view.default" else node.op)
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
            return lambda operands: listed(function(*operands, *rest, **kwargs))

        def simple(operands: Operands) -> list[Tensor]:
            filled = args.copy()
            for place, number in order:
                filled[place] = operands[number]
            return listed(function(*filled, **kwargs))

        return simple

    def general(operands: Operands) -> list[Tensor]:
        filled = args.copy()
        for place, arg in positional:
            filled[place] = _filled(arg, operands)
        by_name = kwargs | {name: _filled(arg, operands) for name, arg in named}
        return listed(function(*filled, **by_name))

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


# Sufficient factor broadcasting


def wanted_by_factors(call: Call, rule: Rule) -> frozenset[int]:
    """The operands whose gradient comes from factors."""
    return frozenset(k for k, need in enumerate(rule.needs) if need == I and call.operands[k].grad)


class ByFactors:
    """One op under one `[sfb]` rule; `plain` is the rule it runs by, `beside` are the operands that the gradients
    are made of."""

    def __init__(
        self, call: Call, rule: Rule, beside: Iterable[int], random: KernelRandomness, device: torch.device
    ) -> None:
        self.call, self.rule, self.plain = call, rule, replace(rule, how="plain")
        self.wanted, self.beside = wanted_by_factors(call, rule), tuple(sorted(beside))
        self.random, self.device = random, device

    def held(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The operands as the op gets them: those whose gradient comes from factors get none through it."""
        return [t.detach() if need == I else t for need, t in zip(self.rule.needs, operands, strict=True)]

    def gradients(
        self, factors: Mapping[int, Tensor], of_results: Sequence[Tensor]
    ) -> Generator[Ask, Tensor, list[Tensor | None]]:
        """The whole gradients of the wanted operands, None for the others. `factors` are those `beside` them."""
        whole: dict[int, Tensor] = {}
        for k in self.beside:
            need, value = self.rule.needs[k], self.call.operands[k]
            at = f"factor {k} of %{self.call.node.name}"
            whole[k] = (yield Ask(factors[k], need, I, shape=value.shape, what=at)) if need.is_shard else factors[k]
        dy = []
        for give, value, gradient in zip(self.rule.gives, self.call.node.results, of_results, strict=True):
            at = f"gradient of %{value.name}"
            dy.append((yield Ask(gradient, give, I, shape=value.shape, what=at)) if give.is_shard else gradient)
        by_hand = _of_linear(self.call, whole, dy)
        found = by_hand if by_hand.keys() >= self.wanted else self._by_running(whole, dy)
        return [found.get(k) if k in self.wanted else None for k in range(len(self.call.operands))]

    def _by_running(self, whole: dict[int, Tensor], dy: Sequence[Tensor]) -> dict[int, Tensor | None]:
        """What the op on one device gives, with zeros for operands whose elements do not enter the gradient."""
        operands = [
            whole[k] if k in whole else torch.zeros(value.shape, dtype=value.torch_dtype, device=dy[0].device)
            for k, value in enumerate(self.call.operands)
        ]
        trained = [operands[k].requires_grad_() for k in sorted(self.wanted)]
        one_device = Rule((I,) * len(self.rule.needs), (I,) * len(self.rule.gives))
        kernel = LocalKernel(self.call, one_device, (1.0,), 0, self.random, self.device)
        with torch.enable_grad(), surroundings(self.call.node.context):
            gradients = torch.autograd.grad(kernel.run(operands), trained, dy, allow_unused=True)
        return dict(zip(sorted(self.wanted), gradients, strict=True))


def _of_linear(call: Call, whole: Mapping[int, Tensor], dy: Sequence[Tensor]) -> dict[int, Tensor | None]:
    """Weight and bias gradients of the op this is mostly used for, without running it forward again."""
    if call.node.op != "aten.linear.default" or 0 not in whole:
        return {}
    rows = dy[0].reshape(-1, dy[0].shape[-1])
    x = whole[0].reshape(-1, whole[0].shape[-1]).to(rows.dtype)
    found: dict[int, Tensor | None] = {1: (rows.t() @ x.conj()).to(call.operands[1].torch_dtype)}
    if len(call.operands) > 2:
        found[2] = rows.sum(0).to(call.operands[2].torch_dtype)
    return found
