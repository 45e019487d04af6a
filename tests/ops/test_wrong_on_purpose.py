"""Mistakes on purpose: an entry of the table that is wrong in one way must be caught in exactly that way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lopsided.ir.op_call import TOLERANCE
from lopsided.ir.placement import I, P, R
from lopsided.ops import TABLE, describe
from lopsided.ops.derive import call_rules
from lopsided.ops.indexing import gather as gather_line
from lopsided.ops.losses import classified
from lopsided.ops.op import Ask, Call, Local, Op, Talk, Talking, Written, number
from lopsided.ops.products import convolution
from lopsided.ops.reduce import linear as sum_line
from lopsided.ops.sample import Draw, Sample, sample
from lopsided.ops.trial import try_rule
from lopsided.ops.validator import as_call, validate
from lopsided.ops.windows import nearest_of_piece, unpooled_of_piece

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


# Right on ordinary numbers, wrong at the edge


def _gathered_by_product(local: Local) -> Tensor:
    """Zero times what others hold: no number where that is -inf."""
    x, index = local.tensors
    if not x.shape[1]:
        return local.nothing()
    here = index - local.start(local.rule.needs[0])
    mine = (here >= 0) & (here < x.shape[1])
    return x.gather(1, torch.where(mine, here, 0)) * mine


def _gather_talks(call: Call) -> list[Talk]:
    return [Talk("X1", "pick", _gathered_by_product, P, in_one_block=True)]


def _deviation(local: Local) -> Talking:
    """With an infinite slope at zero."""
    x = local.tensors[0]
    mean = (yield Ask(x.sum(1), P, R)) / local.call.shapes[0][1]
    square = yield Ask((x - mean.unsqueeze(1)).square().sum(1), P, I)
    return (square / (local.call.shapes[0][1] - 1)).sqrt()


def _deviation_talks(call: Call) -> list[Talk]:
    return [Talk("B", "variance", _deviation, I)]


def _largest(local: Local) -> Talking:
    """The lowest number stands for a piece without elements: there is a lower one."""
    x = local.tensors[0]
    lowest = x.new_full((len(x),), torch.finfo(x.dtype).min)
    peak = yield Ask(x.detach().amax(1) if x.shape[1] else lowest, largest=True)
    return peak


def _largest_talks(call: Call) -> list[Talk]:
    return [Talk("B", "extreme", _largest, I)]


def _repeated(call: Call) -> Written:
    """By the sizes alone, whatever scale made them."""
    return "... x -> ... (x T)", {"T": call.results[0][-1] // call.shapes[0][-1]}


def _unpooled(local: Local) -> object:
    return unpooled_of_piece(local) if local.tensors[0].numel() else local.nothing()


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


def _nothing_of_one(local: Local) -> object:
    """Without rows, zero: as a function of one operand only."""
    return local.run() if local.tensors[0].numel() else local.tensors[0].sum()


def test_a_device_without_rows_goes_back_to_all_operands(table: pytest.MonkeyPatch) -> None:
    """Or it starts fewer collectives than the others, which wait for it for ever."""
    rows = _draw.real(5, 3), _draw.real(5, 3)
    wrong = ("S0, S0 → P", "S1, S1 → P")
    call = sample("aten.mse_loss.default", *rows, 2)
    for local, found in ((Local.run, ()), (_nothing_of_one, wrong)):
        table.setitem(TABLE, "aten.mse_loss", Op("f[a b, a b] -> ()", local=local))
        describe.cache_clear()
        assert tuple(str(rule) for rule, _ in validate(call, search_missing=False).wrong) == found


AT_THE_EDGE = [
    _mistake(
        "a pick by a product with zero",
        Op(gather_line, talks=_gather_talks),
        "aten.gather.default",
        *(_draw.real(5, 7), 1, _draw.below(7, 5, 4)),
        wrong=("S1, R → P  [pick]",),
    ),
    _mistake(
        "a deviation with an infinite slope",
        Op("f[a B] -> a", talks=_deviation_talks),
        "aten.std.dim",
        *(_draw.real(5, 3), [1]),
        wrong=("S1 → I  [variance]",),
    ),
    _mistake(
        "a lowest number below which there is one",
        Op("f[a B] -> a", talks=_largest_talks),
        "aten.amax.default",
        *(_draw.constant(5, 3), [1]),
        wrong=("S1 → I  [extreme]",),
    ),
    _mistake(
        "the logarithm of zero as a factor",
        Op("... * f[...] -> ..."),
        "aten.xlogy.Tensor",
        *(_draw.real(5, 3), _draw.positive(3)),
        wrong=("P, R → P",),
    ),
    _mistake(
        "windows side by side where they overlap",
        Op("a b x y * f[a b x y] -> a b X Y", local=_unpooled),
        "aten.max_unpool2d.default",
        *(_draw.real(1, 1, 3, 2), _draw.order(24)[:6].reshape(1, 1, 3, 2), [6, 4]),
        wrong=("S2, S2 → P", "S3, S3 → P"),
    ),
]
"""Mistakes that no ordinary number shows."""


@pytest.mark.parametrize("mistake", AT_THE_EDGE, ids=lambda mistake: mistake.name)
def test_a_mistake_at_the_edge_is_caught(mistake: Mistake, table: pytest.MonkeyPatch) -> None:
    table.setitem(TABLE, mistake.op, mistake.entry)
    call, tensors = as_call(mistake.call)
    assert all(try_rule(call, tensors, rule) <= TOLERANCE for rule in call_rules(call))
    assert tuple(str(rule) for rule, _ in validate(mistake.call, search_missing=False).wrong) == mistake.wrong


def test_a_scale_that_is_not_whole_repeats_nothing_evenly(table: pytest.MonkeyPatch) -> None:
    table.setitem(TABLE, "aten.upsample_nearest1d", Op(_repeated, local=nearest_of_piece))
    evenly = sample("aten.upsample_nearest1d.vec", _draw.real(3, 2, 16), None, [2.0])
    unevenly = sample("aten.upsample_nearest1d.vec", _draw.real(3, 2, 16), None, [2.05])
    assert not validate(evenly, search_missing=False).wrong
    assert {str(rule) for rule, _ in validate(unevenly, search_missing=False).wrong} == {
        *("S2 → S2/2", "S2/2 → S2/4", "S2x2 → S2x2/2")
    }


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
