"""What a whole call costs on one device, without any device in it, and what a talking rule exchanges.

In: a `Call`, and a `Rule` for `exchanges`. Out: `Work` (flops, bytes and launches, each part apart so that a caller can
scale those a rule cuts), `Exchanged`s, and the text under which measured seconds are kept. No op is run for `work_of`:
flops follow from the op's line, bytes from shapes and from what the backward pass keeps.

    a product that contracts indices       2 · Π lengths of its indices, pair by pair     `_product`
    its gradients                          the same again for every factor
    convolution                            2 · places · weight / channels                 `_convolution`
    attention                              2 · heads · rows · keys · (d + e), and 2.5 ×   `_attention`
    recurrent layers                       2 · steps · weights                            `_recurrent`
    anything else                          1 an element of the bigger side

    forward bytes                          operands are read, results written; views move nothing
    backward bytes                         gradients of results and what was kept are read, those of operands written

What a talking implementation asks of other devices is found by asking it: its generator runs on tensors that have
shapes but no memory, and every answer is its own question. The transpose of an all-reduce `P → R` is another one, that
of `P → I` is free (`lopsided.ops.simulated_devices.cotangent`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lopsided.errors import NotationError, ProgramError
from lopsided.ir.graph import DTYPES, Arg, Atom, Node, Ref, Value, print_arg
from lopsided.ir.grouped_mm import GROUPED_MM
from lopsided.ir.notation import Algebra, Bound, Nonlinear, Operand, Product, Rule, Sum
from lopsided.ir.op_call import aten_overload, surroundings
from lopsided.ir.placement import I, P, Placement, R
from lopsided.ops import FAMILIES, describe
from lopsided.ops.derive import describe_call
from lopsided.ops.op import Call, Local, Talk


@dataclass(frozen=True, slots=True)
class Work:
    """One call, whole, on one device."""

    dtype: str  # the dtype it computes in
    forward_flops: int
    gradient_flops: tuple[int, ...]  # of computing each operand's gradient
    forward_bytes: tuple[int, ...]  # moved, of each operand and then of each result
    gradient_bytes: tuple[int, ...]  # moved in the backward pass, likewise
    kernels: tuple[int, int]  # launched forward and backward


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A collective inside a talking rule."""

    collective: str
    whole_bytes: int
    backward: bool
    per_device: bool = False  # as many bytes for every device that takes part


# Kinds of ops

_VIEWS_UNSAID = (
    *("_unsafe_view", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "meshgrid"),
    *("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
)
"""Views whose schema does not say so."""

_PICKS = ("embedding", "embedding_bag", "gather", "index", "index_select", "take", "take_along_dim")
"""Ops that read a few places of their first operand."""

_DROPOUT = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_CONVOLUTIONS = (
    *("conv1d", "conv2d", "conv3d", "convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
_RECURRENT = (
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)
_MULTIPLYING = ("product", "convolution", "attention", "recurrent")


@cache
def _kind(op: str) -> str:
    """How the work of an op is counted."""
    namespace, _, rest = op.partition(".")
    packet = rest.partition(".")[0]
    if op == GROUPED_MM:
        return "product"
    if namespace == "aten":
        if packet in _CONVOLUTIONS:
            return "convolution"
        if packet in _RECURRENT:
            return "recurrent"
        if packet == "scaled_dot_product_attention":
            return "attention"
        products = FAMILIES["products"]
        if op in products or f"aten.{packet}" in products:
            return "product"
        if packet in _PICKS:
            return "pick"
        if packet in _DROPOUT:
            return "dropout"
        if packet.endswith("_like") or packet.startswith("new_"):
            return "making"
        if packet in ("to", "type_as"):
            return "conversion"
        if packet == "contiguous":
            return "other"  # models call it where it copies
        if packet in _VIEWS_UNSAID:
            return "view"
    overload = aten_overload(op)
    returns = overload._schema.returns if overload is not None else ()
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return "view" if is_view else "other"


def is_product(op: str) -> bool:
    """Whether an op multiplies: a product of matrices, a convolution, attention, a recurrent layer."""
    return _kind(op) in _MULTIPLYING


def _is_view(call: Call, kind: str) -> bool:
    """Whether the results are the operand's own memory, seen differently."""
    if kind == "conversion":
        return call.operands[0].dtype == call.node.results[0].dtype
    if kind == "dropout":
        return not call.arg("train") or call.arg("p") == 0
    return kind == "view"


# The work of a call


def work_of(call: Call) -> Work:
    """The work of one call, whole, on one device."""
    node, kind = call.node, _kind(call.node.op)
    flows = any(v.grad for v in call.operands) and any(v.grad for v in node.results)
    dtype = _dtype(call, kind)
    if _is_view(call, kind):
        return _view(call, dtype, flows)
    forward, gradients, steps = _flops(call, kind)
    is_multiplying = kind in _MULTIPLYING
    trained = sum(v.grad for v in call.operands) if flows else 0
    # A product has a kernel for every gradient; each reads the gradient of the result.
    backward_kernels = trained if kind in ("product", "convolution") else min(trained, 1) * steps
    casts = [is_multiplying and _is_cast(call, value, dtype) for value in call.operands]
    bytes_forward, bytes_backward = _bytes(call, kind, dtype, casts, flows, max(backward_kernels // steps, 1))
    return Work(
        dtype,
        forward,
        tuple(f if flows and v.grad else 0 for f, v in zip(gradients, call.operands, strict=True)),
        bytes_forward,
        bytes_backward,
        (
            steps + sum(casts),
            backward_kernels + (sum(c and v.grad for c, v in zip(casts, call.operands, strict=True)) if flows else 0),
        ),
    )


def _dtype(call: Call, kind: str) -> str:
    """What it computes in: under autocast products compute in its dtype, but not in place of double precision."""
    values = (*call.node.results, *call.operands)
    found = next((v.dtype for v in values if v.torch_dtype.is_floating_point or v.torch_dtype.is_complex), None)
    if found is None:
        return values[0].dtype
    _, _, under = call.node.context.autocast.partition(":")
    return under if kind in _MULTIPLYING and under in DTYPES and found in ("f32", "f16", "bf16") else found


def _is_cast(call: Call, value: Value, dtype: str) -> bool:
    return bool(call.node.context.autocast) and value.dtype != dtype and value.torch_dtype.is_floating_point


def _view(call: Call, dtype: str, flows: bool) -> Work:
    """Free; backward, too, where every element is seen once in one result. A part's gradient is copied into zeros."""
    values = (*call.operands, *call.node.results)
    nothing = (0,) * len(values)
    operands, results = call.operands, call.node.results
    seen_once = [v.elements for v in operands[: len(results)]] == [v.elements for v in results]
    copied = flows and not seen_once
    return Work(
        dtype,
        0,
        (0,) * len(operands),
        nothing,
        tuple(v.bytes if v.grad else 0 for v in values) if copied else nothing,
        (0, int(copied)),
    )


def _bytes(
    call: Call, kind: str, dtype: str, casts: Sequence[bool], flows: bool, reads: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes moved forward and backward; gradients of results are read `reads` times."""
    operands, results, saved = call.operands, call.node.results, call.node.saved
    forward = [v.bytes for v in operands]
    if kind == "pick":
        forward[0] = 0
    elif kind == "making":
        forward = [0] * len(operands)
    backward = [v.bytes if v.grad else 0 for v in operands]
    # Attention keeps what flash attention keeps: kernels that keep scores are for devices nobody plans for.
    extra = saved.extra_bytes if kind != "attention" else 0
    for k, value in enumerate(operands):
        is_kept = value.name in saved.values or kind == "attention"
        if casts[k]:
            # The copy is written and read; its gradient is written, read, and written wide.
            copy = value.elements * DTYPES[dtype].itemsize
            forward[k] += 2 * copy
            backward[k] += 2 * copy if value.grad else 0
            if not is_kept and extra >= copy and any(v.grad for j, v in enumerate(operands) if j != k):
                backward[k] += copy
                extra -= copy
            elif is_kept:
                backward[k] += copy
        elif is_kept:
            backward[k] += value.bytes
    forward += [v.bytes for v in results]
    if kind == "pick":
        # As many rows are read as the result needs: fewer where it is cut, however large the table.
        forward[len(operands)] += _picked(call) * operands[0].torch_dtype.itemsize
    backward += [
        (reads * v.bytes if v.grad else 0) + (v.bytes if v.name in saved.values or kind == "attention" else 0)
        for v in results
    ]
    if not flows:
        return tuple(forward), (0,) * len(backward)
    # What the op keeps beside operands and results (a mask, statistics) goes with the biggest of them.
    elements = [v.elements for v in (*operands, *results)]
    biggest = elements.index(max(elements))
    forward[biggest] += extra
    backward[biggest] += extra
    return tuple(forward), tuple(backward)


def _picked(call: Call) -> int:
    """How many elements of its first operand an op picks."""
    if "embedding_bag" in call.node.op:
        return call.operands[1].elements * call.shapes[0][1]
    return call.node.results[0].elements


def _flops(call: Call, kind: str) -> tuple[int, Sequence[int], int]:
    """Flops forward, flops of each operand's gradient, and how many kernels run one after the other."""
    if kind == "convolution":
        return _convolution(call)
    if kind == "attention":
        return _attention(call)
    if kind == "recurrent":
        return _recurrent(call)
    if kind == "product" and (found := _products(call)) is not None:
        return found
    sides = call.node.results if kind in ("pick", "making") else (*call.operands, *call.node.results)
    flops = max((v.elements for v in sides), default=0)
    return flops, (flops,) * len(call.operands), 1


def _products(call: Call) -> tuple[int, Sequence[int], int] | None:
    """The products in the op's line; None if it multiplies nothing. Summands beside a product (a bias) are not
    counted."""
    try:
        described = describe_call(call)
    except NotationError:
        return None
    if described is None:
        return None
    total, gradients = 0, [0] * len(call.operands)
    for product in _products_in(described.bound.algebra):
        factors = [tuple(_plain(factor)) for factor in product.factors]
        factors = [operands for operands in factors if operands]
        if len(factors) < 2:
            return None
        flops = _product([_indices(operands, described.bound) for operands in factors], described.bound)
        # A diagonal is not seen in a line that keeps all dims whole.
        flops = max(flops, *(call.operands[k].elements for operands in factors for k in operands))
        total += flops
        for operands in factors:
            for k in operands:
                gradients[k] += flops
    return (total, gradients, 1) if total else None


def _products_in(algebra: Algebra | None) -> Iterator[Product]:
    if isinstance(algebra, Product):
        yield algebra
    elif isinstance(algebra, Sum):
        for term in algebra.terms:
            yield from _products_in(term)


def _plain(algebra: Algebra) -> Iterator[int]:
    """The operands of a factor that are multiplied, not asked where a group of rows ends."""
    if isinstance(algebra, Operand):
        yield algebra.number
    elif not isinstance(algebra, Nonlinear):
        for part in algebra.factors if isinstance(algebra, Product) else algebra.terms:
            yield from _plain(part)


def _indices(operands: Iterable[int], bound: Bound) -> frozenset[str]:
    return frozenset(index for k in operands for index in bound.operands[k])


def _product(factors: Sequence[frozenset[str]], bound: Bound) -> int:
    """Factors multiplied from left to right; what one carries alone, and no result, is summed or picked before."""
    results: frozenset[str] = frozenset(index for where in bound.results for index in where)
    shared = [
        indices & results.union(*(other for j, other in enumerate(factors) if j != k))
        for k, indices in enumerate(factors)
    ]
    flops, left = 0, shared[0]
    for k, right in enumerate(shared[1:], 1):
        both, later = left | right, results.union(*shared[k + 1 :])
        flops += (2 if both - later else 1) * math.prod(bound.lengths[index] for index in both)
        left = both & later
    return flops


def _convolution(call: Call) -> tuple[int, Sequence[int], int]:
    """Every place of the result (of the input, if transposed) meets one channel's weights."""
    x, weight = call.operands[:2]
    transposed = "transpose" in call.node.op or (".convolution." in call.node.op and bool(call.arg("transposed")))
    places = x if transposed else call.node.results[0]
    flops = 2 * places.elements * math.prod(weight.shape[1:])
    return flops, (flops, flops, *(0,) * (len(call.operands) - 2)), 1


def _attention(call: Call) -> tuple[int, Sequence[int], int]:
    """Scores and their use; backward, scores once more, their gradient, and one product for each operand."""
    query, key, value = call.shapes[:3]
    pairs = math.prod(call.results[0][:-1]) * key[-2]
    scores, use = 2 * pairs * query[-1], 2 * pairs * value[-1]
    gradients = [scores, scores, use, *(0,) * (len(call.operands) - 3)]
    first = next((k for k, v in enumerate(call.operands) if v.grad), 0)
    gradients[first] += scores + use
    return scores + use, gradients, 1


def _recurrent(call: Call) -> tuple[int, Sequence[int], int]:
    """Every row of the input meets every weight; time steps wait for each other."""
    x, op = call.operands[0], call.node.op
    is_cell, is_packed = "_cell" in op, op.endswith(".data")
    states = len(call.results) - (not is_cell)
    first = 1 + states + is_packed
    rows = math.prod(x.shape[:-1])
    gradients = [0] * first + [2 * rows * v.elements if len(v.shape) == 2 else 0 for v in call.operands[first:]]
    flops = sum(gradients)
    # Gradients of what flows inside cost as much again, also where the input has none.
    for k, value in enumerate(call.operands):
        if value.grad:
            gradients[k] += flops
            break
    if is_cell:
        return flops, gradients, 1
    matrices = sum(len(v.shape) == 2 for v in call.operands[first:])
    by_rows = len(x.shape) == 3 and bool(call.arg("batch_first"))
    length = call.shapes[1][0] if is_packed else x.shape[1] if by_rows else x.shape[0]
    return flops, gradients, max(length * (matrices // 2), 1)


# The text of a call


def call_text(node: Node, values: Mapping[str, Value], how: str = "plain") -> str:
    """A call as measured tables name it: operands by dtype and shape, and the settings that shape the work; and by what
    it is carried out, where that is not the op itself (`Rule.how`).

    Numbers that are merely computed with (a scale, an epsilon) are left out, so are defaults.
    """
    overload = aten_overload(node.op)
    arguments = overload._schema.arguments if overload is not None else []
    names = {argument.name: argument for argument in arguments}
    parts: list[str] = []
    given = [(arguments[k].name if k < len(arguments) else f"_{k}", arg) for k, arg in enumerate(node.args)]
    for name, arg in (*given, *node.kwargs):
        if _holds_tensors(arg):
            parts.append(_operand_text(arg, values))
            continue
        argument = names.get(name)
        if argument is not None and (str(argument.type) == "number" or _is_default(arg, argument.default_value)):
            continue
        if arg is None or isinstance(arg, float | complex) or (isinstance(arg, Atom) and arg.kind != "dtype"):
            continue
        if name not in ("pin_memory", "cudnn_enable", "cudnn_enabled"):
            parts.append(f"{name}={print_arg(arg)}")
    under = f" autocast {node.context.autocast.partition(':')[2]}" if node.context.autocast else ""
    return carried_out(f"{node.op}({', '.join(parts)}){under}", how)


def carried_out(text: str, how: str) -> str:
    """The text of a call that is carried out so."""
    return text if how in ("plain", "sfb") else f"{text} by {how}"


def asks_others(text: str) -> bool:
    """Whether a call of this text asks other devices on its way: it is carried out by something else than its op."""
    return " by " in text.rpartition(")")[2]


def call_texts(node: Node, values: Mapping[str, Value], how: str) -> tuple[str, ...]:
    """The names under which a table may have what a call takes, the nearest first: the op alone will do."""
    text = call_text(node, values)
    return tuple(dict.fromkeys((carried_out(text, how), text)))


def _holds_tensors(arg: Arg) -> bool:
    return isinstance(arg, Ref) or (isinstance(arg, tuple) and any(isinstance(part, Ref) for part in arg))


def _operand_text(arg: Arg, values: Mapping[str, Value]) -> str:
    if isinstance(arg, Ref):
        value = values[arg.name]
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(arg, tuple):
        return f"[{', '.join(_operand_text(part, values) for part in arg)}]"
    return print_arg(arg)


def _is_default(arg: Arg, default: object) -> bool:
    return arg == (tuple(default) if isinstance(default, list) else default)


# What talking rules exchange


def exchanges(call: Call, rule: Rule) -> tuple[Exchanged, ...]:
    """The collectives that carry out a rule inside the op; plain rules have none.

    An implementation that cannot be asked without a device is taken to exchange its results.
    """
    found = asked(call, rule)
    if found is not None:
        return found
    size = sum(value.bytes for value in call.node.results)
    passes = (False, True) if any(value.grad for value in call.node.results) else (False,)
    return tuple(Exchanged("all_reduce", size, backward) for backward in passes)


def asked(call: Call, rule: Rule) -> tuple[Exchanged, ...] | None:
    """What the implementation of a rule asks, found by running it on tensors without memory; None if it will not."""
    if rule.how in ("plain", "sfb"):
        return ()
    talk = _talk(call, rule)
    if not inspect.isgeneratorfunction(talk.implementation):
        return ()
    # `meta` is quicker; as fake tensors on the CPU, shapes come from ops that want to know a device.
    ways: tuple[tuple[str, Callable[[], AbstractContextManager[object]]], ...]
    ways = (("meta", nullcontext), ("cpu", FakeTensorMode))
    for device, mode in ways:
        try:
            with mode(), torch.inference_mode(False), torch.enable_grad(), surroundings(call.node.context):
                alone, beside = (list(_driven(call, rule, talk, torch.device(device), n)) for n in (1, 2))
                # A cut `cumsum` sends a row for every device: with two devices, it sends twice as much.
                return tuple(
                    replace(one, per_device=other.whole_bytes == 2 * one.whole_bytes > 0)
                    for one, other in zip(alone, beside, strict=True)
                )
        except Exception:
            continue  # Whatever an implementation stumbles over without numbers, planning goes on.
    return None


def _talk(call: Call, rule: Rule) -> Talk:
    entry = describe(call.node.op)
    talks = entry.talks(call) if entry is not None and entry.talks is not None else ()
    found = next((talk for talk in talks if talk.how == rule.how), None)
    if found is None:
        raise ProgramError(f"{call.node.op} has no implementation {rule.how!r}", do="derive the rules anew")
    return found


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Random numbers without memory: only their shape matters here."""

    device: torch.device

    def uniform(self, local: Local, shape: Sequence[int], placement: Placement, *, normal: bool = False) -> Tensor:
        return torch.empty(tuple(shape), dtype=torch.float64, device=self.device)


def _driven(call: Call, rule: Rule, talk: Talk, device: torch.device, devices: int) -> Iterator[Exchanged]:
    """One imaginary device that has everything, among so many."""
    length = next((p.length(value.shape) for p, value in call.placed(rule) if p.is_shard), None)
    pieces = () if length is None else (length, *[0] * (devices - 1))
    tensors = tuple(
        torch.empty(
            value.shape,
            dtype=value.torch_dtype,
            device=device,
            requires_grad=value.grad and (value.torch_dtype.is_floating_point or value.torch_dtype.is_complex),
        )
        for value in call.operands
    )
    talking = talk.implementation(Local(call, rule, tensors, call.results, 0, pieces, _Shapes(device)))
    if not isinstance(talking, Generator):
        return
    answer: Tensor | None = None
    while True:
        try:
            ask = talking.send(answer)
        except StopIteration:
            return
        answer = ask.tensor
        size = ask.tensor.numel() * ask.tensor.element_size()
        if ask.largest or (ask.source == P and ask.to.is_whole):
            yield Exchanged("all_reduce", size, False)
        # The gradient of what is `R` comes in terms of a sum; that of `I` is whole.
        if not ask.largest and ask.to == R and ask.source in (P, I) and ask.tensor.requires_grad:
            yield Exchanged("all_reduce", size, True)
