"""The validator: every derived rule right on real kernels, and every valid rule that was not derived.

In: samples, small calls of the ops in the table. Out: `Finding`s. Each rule is run in float64 on unequal pieces, also
with an empty piece, and joined values and gradients are compared with one device: on ordinary numbers, then on those at
the edge (`edge_operands`). Then every hypothesis that the table did not derive is tried, up to a limit for ops
with many tensors, and those that hold are listed.

`sampled_ops()` and `samples_of(op)` have the samples of all families, by the names the table uses; ops that are picked
up by torch's pointwise tag have samples, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lopsided.errors import RuleError
from lopsided.ir.graph import DTYPE_NAMES, Arg, Atom, Node, Ref, Value
from lopsided.ir.notation import PLAIN, Rule, Variant
from lopsided.ir.op_call import TOLERANCE, listed, resolve_op
from lopsided.ops import (
    TABLE,
    attention,
    draws,
    indexing,
    linalg,
    losses,
    norms,
    parts,
    pointwise,
    products,
    reduce,
    views,
    windows,
)
from lopsided.ops.derive import call_rules, describe_call
from lopsided.ops.experiment import MOST_HYPOTHESES, held, hypotheses
from lopsided.ops.op import Call
from lopsided.ops.sample import Draw, Sample
from lopsided.ops.trial import edge_operands, try_rule

_SHARES = ((0.5, 0.2, 0.3), (0.0, 0.6, 0.4))


@dataclass(frozen=True, slots=True)
class Finding:
    """What validation found for one sample."""

    sample: Sample
    line: str
    rules: tuple[tuple[Rule, float], ...]  # with the worst error of each
    missing: tuple[Rule, ...]

    @property
    def tolerance(self) -> float:
        """Rounding of the widest kernel there is: a few ops have none for float64."""
        tensors = [t for arg in self.sample.args for t in (arg if isinstance(arg, list | tuple) else [arg])]
        narrow = any(isinstance(t, Tensor) and t.dtype == torch.float32 for t in tensors)
        return 1e-5 if narrow else TOLERANCE

    @property
    def wrong(self) -> tuple[tuple[Rule, float], ...]:
        return tuple((rule, error) for rule, error in self.rules if not error <= self.tolerance)


def as_call(example: Sample) -> tuple[Call, list[Tensor]]:
    """A sample as a node of a graph would be, and its tensors in order."""
    tensors: list[Tensor] = []
    values: list[Value] = []

    def convert(arg: Any) -> Arg:
        if isinstance(arg, Tensor):
            value = Value(f"x{len(tensors)}", tuple(arg.shape), DTYPE_NAMES[arg.dtype], arg.requires_grad)
            tensors.append(arg.detach())
            values.append(value)
            return Ref(value.name)
        if isinstance(arg, list | tuple):
            return tuple(convert(part) for part in arg)
        if isinstance(arg, torch.dtype):
            return Atom("dtype", DTYPE_NAMES[arg])
        if arg is None or isinstance(arg, bool | int | float | complex | str):
            return arg
        raise RuleError(
            f"a sample of {example.op} has an argument {arg!r}", do="use tensors, numbers, strings and dtypes"
        )

    args = tuple(convert(arg) for arg in example.args)
    kwargs = tuple((key, convert(arg)) for key, arg in example.kwargs.items())
    with torch.random.fork_rng(devices=[]):
        made = listed(resolve_op(example.op)(*example.args, **example.kwargs))
    results = tuple(
        Value(f"y{k}", tuple(out.shape), DTYPE_NAMES[out.dtype], out.requires_grad) for k, out in enumerate(made)
    )
    return Call(Node(example.op, args, kwargs, results), tuple(values)), tensors


def validate(example: Sample, *, search_missing: bool = True) -> Finding:
    """Try every rule of one sample, and every hypothesis that is not a rule."""
    call, tensors = as_call(example)
    described = describe_call(call)
    rules = call_rules(call, _variants(call))
    edges = edge_operands(call, tensors)

    def worst(rule: Rule) -> float:
        ordinary = max(try_rule(call, tensors, rule, shares) for shares in _SHARES)
        at_edges = (try_rule(call, edited, rule, _SHARES[-1], edge=True) for edited in edges.values())
        return max([ordinary, *at_edges])

    tried = tuple((rule, worst(rule)) for rule in rules)
    missing = _missing(call, tensors, rules) if search_missing else ()
    return Finding(example, described.text if described is not None else "by experiment", tried, missing)


def _variants(call: Call) -> dict[str, tuple[Variant, ...]]:
    """Plain cuts, and cuts in twos and of two halves alike where lengths allow: ops must not care."""
    described = describe_call(call)
    if described is None:
        return {}
    found = {}
    for index in described.indices:
        length = described.bound.lengths[index]
        more: Sequence[Variant] = ((1, 2), (2, 1)) if length % 2 == 0 and length > 2 else ()
        found[index] = (PLAIN, *more)
    return found


def _missing(call: Call, tensors: list[Tensor], rules: Sequence[Rule]) -> tuple[Rule, ...]:
    known = {(rule.needs, rule.gives) for rule in rules}
    tried = itertools.islice(hypotheses(call), MOST_HYPOTHESES)
    candidates = [rule for rule in tried if (rule.needs, rule.gives) not in known]
    return held(call, [tensors], candidates)


# The samples of all families

# A family draws its tensors from a stream of its own, numbered by its place here.
_FAMILIES: tuple[Callable[[Draw], Iterator[Sample]], ...] = (
    pointwise.samples,
    views.samples,
    products.samples,
    linalg.samples,
    reduce.samples,
    norms.samples,
    losses.samples,
    indexing.samples,
    windows.samples,
    pointwise.samples_by_tag,
    draws.samples,
    parts.samples,
    attention.samples,
)

_DTYPE_OR_SHAPE_ONLY = "of one operand only the shape or dtype matters: it could be placed anyhow"
_WEIGHTS = "weights and target probabilities could be terms of a sum; they are constants, which nobody holds so"
_ZEROS = "zeros are a sum of zeros: they could be given as terms of a sum, however the operand is placed"

# Rules that hold and that the table does not derive, by op, with the reason.
KNOWN_MISSING: dict[str, str] = {
    "aten.bernoulli": _DTYPE_OR_SHAPE_ONLY,
    "aten.expand_as": _DTYPE_OR_SHAPE_ONLY,
    "aten.fill.Tensor": _DTYPE_OR_SHAPE_ONLY,
    "aten.reshape_as": _DTYPE_OR_SHAPE_ONLY,
    "aten.to.other": _DTYPE_OR_SHAPE_ONLY,
    "aten.type_as": _DTYPE_OR_SHAPE_ONLY,
    "aten.view_as": _DTYPE_OR_SHAPE_ONLY,
    "aten.binary_cross_entropy": _WEIGHTS,
    "aten.binary_cross_entropy_with_logits": _WEIGHTS,
    "aten.cross_entropy_loss": _WEIGHTS,
    "aten.multi_margin_loss": _WEIGHTS,
    "aten.empty_like": _ZEROS,
    "aten.new_empty": _ZEROS,
    "aten.new_zeros": _ZEROS,
    "aten.special_xlog1py": "at minus one, terms of both signs times the logarithm of zero add up to no number",
}


def sampled_ops() -> list[str]:
    """Every op with a sample, as the table names it."""
    return sorted(_by_op())


def known_reason(op: str) -> str:
    """Why the table leaves out rules of this op that hold, if that is known."""
    return KNOWN_MISSING.get(op) or KNOWN_MISSING.get(op.rpartition(".")[0], "")


def samples_of(op: str) -> list[Sample]:
    return list(_by_op().get(op, ()))


@lru_cache(maxsize=1)
def _by_op() -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for seed, family in enumerate(_FAMILIES):
        written = {example.op for examples in found.values() for example in examples}
        for example in family(Draw(seed)):
            if family is pointwise.samples_by_tag and example.op in written:
                continue
            packet = example.op.rpartition(".")[0]
            found.setdefault(example.op if example.op in TABLE else packet, []).append(example)
    return found
