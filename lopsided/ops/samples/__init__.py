"""Samples: small calls of every op in the table, for the validator and the tests.

In: nothing. Out: `samples_of(op)` and `sampled_ops()`, by the names the table uses; ops that are picked up by
torch's pointwise tag have samples, too. Sizes are distinct and partly even, so that a length tells an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from lopsided.ops import TABLE
from lopsided.ops.samples import (
    indexing,
    linalg,
    losses,
    norms,
    pointwise,
    products,
    reduce,
    tagged,
    views,
    windows,
)
from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample

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
    tagged.samples,
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
    "aten.nextafter": "it differs from its operand by less than any tolerance: it only seems linear",
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
            if family is tagged.samples and example.op in written:
                continue
            packet = example.op.rpartition(".")[0]
            found.setdefault(example.op if example.op in TABLE else packet, []).append(example)
    return found
