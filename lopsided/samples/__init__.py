"""Samples: small calls of every op in the table, for the validator and the tests.

In: nothing. Out: `samples_of(op)` and `sampled_ops()`, by the names the table uses; ops that are picked up by torch's
pointwise tag have samples, too. Sizes are distinct and partly even, so that a length tells which index is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from lopsided.ops import TABLE
from lopsided.samples import indexing, linalg, losses, norms, pointwise, products, reduce, tagged, views, windows
from lopsided.samples.draw import Draw
from lopsided.validate import Sample

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

KNOWN_MISSING: dict[str, str] = {}


def sampled_ops() -> list[str]:
    """Every op with a sample, as the table names it."""
    return sorted(_by_op())


def samples_of(op: str) -> list[Sample]:
    return list(_by_op().get(op, ()))


@lru_cache(maxsize=1)
def _by_op() -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for seed, family in enumerate(_FAMILIES):
        for example in family(Draw(seed)):
            packet = example.op.rpartition(".")[0]
            found.setdefault(example.op if example.op in TABLE else packet, []).append(example)
    return found
