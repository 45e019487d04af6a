"""The table: one entry per op, one file per family, nothing but declarations and local implementations.

`describe(op)` finds an op's entry by its full name (`aten.max.other`), then by its packet (`aten.max`), then
by torch's pointwise tag. An op without an entry has its rules found by experiment (`lopsided.ops.experiment`).
"""

from __future__ import annotations

from functools import cache

from lopsided.ops.attention import ATTENTION
from lopsided.ops.draws import RANDOM
from lopsided.ops.indexing import INDEXING
from lopsided.ops.linalg import LINALG
from lopsided.ops.losses import LOSSES
from lopsided.ops.norms import NORMS
from lopsided.ops.op import Op
from lopsided.ops.parts import PARTS
from lopsided.ops.pointwise import POINTWISE, by_tag
from lopsided.ops.products import PRODUCTS
from lopsided.ops.reduce import REDUCE
from lopsided.ops.views import VIEWS
from lopsided.ops.windows import WINDOWS

FAMILIES: dict[str, dict[str, Op]] = {
    "pointwise": POINTWISE,
    "random": RANDOM,
    "views": VIEWS,
    "parts": PARTS,
    "products": PRODUCTS,
    "attention": ATTENTION,
    "linalg": LINALG,
    "reduce": REDUCE,
    "norms": NORMS,
    "losses": LOSSES,
    "indexing": INDEXING,
    "windows": WINDOWS,
}
TABLE: dict[str, Op] = {name: op for family in FAMILIES.values() for name, op in family.items()}


@cache
def describe(op: str) -> Op | None:
    """The entry for an op, or None if nobody has described it."""
    return TABLE.get(op) or TABLE.get(op.rpartition(".")[0]) or by_tag(op)
