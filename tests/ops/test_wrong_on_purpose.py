"""Mistakes on purpose: an entry of the table that is wrong in one way must be caught in exactly that way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lopsided.ir.placement import P
from lopsided.ops import TABLE, describe
from lopsided.ops.losses import classified
from lopsided.ops.op import Call, Local, Op, Talk, number
from lopsided.ops.products import convolution
from lopsided.ops.reduce import linear as sum_line
from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample, sample, validate

_draw = Draw(0)


def _mask_per_device(local: Local) -> Tensor:
    """Dropout whose devices draw as they like on whole values, where all should drop the same."""
    x, p = local.tensors[0], number(local.call.arg("p"))
    whole = not local.rule.gives[0].is_shard
    own = torch.rand(x.shape, generator=torch.Generator().manual_seed(local.device))
    return x * ((own if whole and local.device else local.draw()) >= p) / (1 - p)


def _lookup_without_offset(local: Local) -> Tensor:
    table, index = local.tensors
    if not table.shape[0]:
        return table.new_zeros(local.shapes[0]) + 0 * table.sum()
    mine = index < table.shape[0]
    return table[torch.where(mine, index, 0)] * mine.unsqueeze(-1)


def _lookup(call: Call) -> list[Talk]:
    return [Talk("V", "table", _lookup_without_offset, P, in_one_block=True)]


def _rows_as_independent(call: Call) -> str:
    return classified(call).replace("N", "n")


@dataclass(frozen=True)
class Mistake:
    name: str
    op: str
    entry: Op
    call: Sample
    wrong: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def _mistake(
    name: str, entry: Op, op: str, *args: Any, wrong: tuple[str, ...] = (), missing: tuple[str, ...] = ()
) -> Mistake:
    """`op` is the full name of the op called; its packet is the entry that is replaced."""
    return Mistake(name, op.rpartition(".")[0], entry, sample(op, *args), wrong, missing)


MISTAKES = [
    _mistake(
        "a bias as a factor",
        Op("... i * o i * o -> ... o"),
        "aten.linear.default",
        *(_draw.real(5, 3), _draw.real(7, 3), _draw.real(7)),
        wrong=("P, R, R → P", "R, P, R → P", "R, R, P → P", "S1, S1, R → P"),
        missing=("R, P, P → P", "P, R, P → P", "S1, S1, P → P"),
    ),
    _mistake(
        "softmax as independent",
        Op("f[a b] -> a b"),
        "aten.softmax.int",
        _draw.real(5, 3),
        1,
        wrong=("S1 → S1",),
    ),
    _mistake("a mean as a sum", Op(sum_line), "aten.mean.dim", _draw.real(5, 3), [1], wrong=("S1 → P",)),
    _mistake(
        "a largest as linear",
        Op("... X -> ... Y"),
        "aten.max_pool1d.default",
        _draw.real(5, 3, 7),
        [3],
        wrong=("P → P",),
    ),
    _mistake(
        "groups that do not shrink with their piece",
        Op(convolution),
        "aten.conv1d.default",
        *(_draw.real(2, 6, 5), _draw.real(9, 2, 3), None, [1], [0], [1], 3),
        wrong=("S1/2, S0/3 → S1/3", "S1x3, S1 → P"),
    ),
    _mistake(
        "layer norm as independent",
        Op("f[... d] * d + d -> ... d"),
        "aten.layer_norm.default",
        *(_draw.real(5, 3), [3], _draw.real(3), _draw.real(3)),
        wrong=("S1, S0, S0 → S1",),
    ),
    _mistake(
        "a mean of means",
        Op(_rows_as_independent),
        "aten.cross_entropy_loss.default",
        *(_draw.real(5, 3), _draw.below(3, 5)),
        wrong=("S0, S0 → P",),
    ),
    _mistake(
        "a mask of its own on every device",
        Op("... -> ...", local=_mask_per_device, random=True),
        "aten.dropout.default",
        *(_draw.real(5, 3), 0.5, True),
        wrong=("I → I", "R → R", "P → P"),
    ),
    _mistake(
        "a table cut without an offset",
        Op("V d * f[...] -> ... d", talks=_lookup),
        "aten.embedding.default",
        *(_draw.real(7, 3), _draw.below(7, 5)),
        wrong=("S0, R → P  [table]",),
    ),
    _mistake("halves as pairs", Op("f[a (b B)] -> a b"), "aten.glu.default", _draw.real(5, 6), wrong=("S1/2 → S1",)),
    _mistake(
        "a running sum as independent",
        Op("a b -> a b"),
        "aten.cumsum.default",
        _draw.real(5, 3),
        1,
        wrong=("S1 → S1",),
    ),
    _mistake("relu as linear", Op("... -> ..."), "aten.relu.default", _draw.real(5, 3), wrong=("P → P",)),
    _mistake(
        "a product that may not be cut where it is summed",
        Op("m I * I n -> m n"),
        "aten.mm.default",
        *(_draw.real(5, 3), _draw.real(3, 7)),
        missing=("S1, S0 → P",),
    ),
    _mistake(
        "a linear op as nonlinear",
        Op("f[...] -> ..."),
        "aten.neg.default",
        _draw.real(5, 3),
        missing=("P → P",),
    ),
    _mistake(
        "a batch that may not be cut",
        Op("f[N C, N] -> N"),
        "aten.cross_entropy_loss.default",
        *(_draw.real(5, 3), _draw.below(3, 5), None, 0),
        missing=("S0, S0 → S0",),
    ),
]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    describe.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    describe.cache_clear()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_caught(mistake: Mistake, table: pytest.MonkeyPatch) -> None:
    table.setitem(TABLE, mistake.op, mistake.entry)
    finding = validate(mistake.call)
    assert tuple(str(rule) for rule, _ in finding.wrong) == mistake.wrong
    assert tuple(map(str, finding.missing)) == mistake.missing
