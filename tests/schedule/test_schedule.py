"""The lowered step as a text: printed, parsed back, and refused where no device could carry it out."""

from __future__ import annotations

import random
import runpy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lopsided
from lopsided.errors import ProgramError
from lopsided.ir.program import Program, parse_program
from lopsided.models import zoo
from lopsided.schedule.decisions import Decisions
from lopsided.schedule.lower import lower
from lopsided.schedule.schedule import (
    Bucket,
    Compute,
    Recompute,
    Redistribute,
    Schedule,
    check_schedule,
    parse_schedule,
)
from lopsided.verification.verifier import random_program
from tests.executor.test_conformance import built
from tests.support import ROOT
from tests.support.jobs import book_of

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "02_write_a_program.py"))


@pytest.fixture(scope="module")
def program() -> Program:
    graph = lopsided.capture(EXAMPLE["Block"](), {"x": torch.randn(8, 6), "y": torch.randn(8, 6)})
    return parse_program(EXAMPLE["ZERO"], graph)


def test_a_step_reads_as_what_a_device_does(program: Program) -> None:
    assert (
        str(lower(program, Decisions(regather=True)))
        == """\
step bucket_bytes=26214400 prefetch=2 regather=1 recompute=1 overlap=1
forward
  gather.0 = all_gather f32 up_weight S0→R, down_weight S0→R
  convert up_bias I→R
  take up_weight S0→R by gather.0
  run linear
  run relu
  convert down_bias I→R
  take down_weight S0→R by gather.0
  run linear_1
  run mse_loss
  convert mse_loss P→I
backward
  gather.1 = all_gather f32 down_weight S0→R again
  back mse_loss
  take down_weight S0→R again by gather.1
  back linear_1
  give ∂down_weight P→S0 by reduce.0
  give ∂down_bias P→I by reduce.1
  back relu
  back linear
  give ∂up_weight P→S0 by reduce.0
  give ∂up_bias P→I by reduce.1
  reduce.0 = reduce_scatter f32 ∂down_weight P→S0, ∂up_weight P→S0
  reduce.1 = all_reduce f32 ∂down_bias P→I, ∂up_bias P→I
update
  update up_weight S0
  update up_bias I
  update down_weight S0
  update down_bias I
"""
    )


@pytest.mark.parametrize("model", ["mlp", "gpt2", "resnet50", "bert-moe"])
@given(
    seed=st.integers(0, 10**6),
    bucket=st.sampled_from([1, 1000, 2**20]),
    prefetch=st.integers(1, 4),
    regather=st.booleans(),
    overlap=st.booleans(),
)
def test_every_schedule_is_legal_and_parses_back(
    model: str, seed: int, bucket: int, prefetch: int, regather: bool, overlap: bool
) -> None:
    made = random_program(book_of(zoo.SMALL[model]), random.Random(seed))
    schedule = lower(made, Decisions(bucket, prefetch, regather, overlap=overlap))
    check_schedule(schedule)
    assert parse_schedule(str(schedule), made) == schedule
    assert lower(made, schedule.decisions) == schedule  # ids are a function of the program
    for item in schedule.passes:
        if isinstance(item, Bucket):
            assert item.hides == overlap


def test_regions_run_again_unless_that_is_decided_otherwise() -> None:
    made = lopsided.one_device(lopsided.capture(*built("checkpointed")))
    again = lower(made)
    regions = [item for item in again.backward if isinstance(item, Recompute)]
    assert len(regions) == 2
    assert {item.node for item in again.computes if item.phase == "again"} == {n for r in regions for n in r.nodes}
    kept = lower(made, Decisions(recompute=False))
    assert not [item for item in kept.backward if isinstance(item, Recompute)]
    assert all(item.phase != "again" for item in kept.computes)
    check_schedule(again)
    check_schedule(kept)


def changed(schedule: Schedule, what: str) -> Schedule:
    forward, backward, update = schedule.forward, schedule.backward, schedule.update
    if what == "left out":
        return replace(schedule, forward=tuple(i for i in forward if i.id != "relu"))
    if what == "twice":
        return replace(schedule, forward=(*forward, forward[-1]))
    if what == "too early":
        gather = next(i for i in forward if isinstance(i, Bucket))
        return replace(schedule, forward=(*(i for i in forward if i is not gather), gather))
    if what == "sent too early":
        reduce = next(i for i in backward if isinstance(i, Bucket))
        return replace(schedule, backward=(reduce, *(i for i in backward if i is not reduce)))
    if what == "not made":
        return replace(schedule, forward=tuple(i for i in forward if i.id != "up_bias I→R"))
    if what == "backward in order":
        computes = [i for i in backward if isinstance(i, Compute)]
        rest = [i for i in backward if not isinstance(i, Compute)]
        return replace(schedule, backward=(*reversed(computes), *rest))
    if what == "another bucket":
        astray = next(i for i in backward if isinstance(i, Redistribute) and i.bucket)
        return replace(schedule, backward=tuple(replace(i, bucket="reduce.9") if i is astray else i for i in backward))
    return replace(schedule, update=update[:-1])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("left out", "relu"),
        ("twice", "there twice"),
        ("too early", "taken before"),
        ("sent too early", "given after"),
        ("not made", "runs before it has up_bias as R"),
        ("backward in order", "backward too late"),
        ("another bucket", "reduce"),
        ("not updated", "trained or updated, and not both"),
    ],
)
def test_what_no_device_can_do_is_refused(program: Program, what: str, says: str) -> None:
    with pytest.raises(ProgramError, match=says) as caught:
        check_schedule(changed(lower(program), what))
    assert caught.value.do


@pytest.mark.parametrize(
    ("line", "by", "says"),
    [
        ("  run relu", "  fly relu", "does not parse"),
        ("  run relu", "  run sigmoid", "no node"),
        ("take up_weight S0→R", "take up_weight S0→Q", "Q"),
        ("take up_weight", "take in_weight", "no value"),
        ("prefetch=2", "lookahead=2", "no decision"),
        ("gather.0 = all_gather f32 up_weight S0→R,", "gather.0 = all_gather f32 up_weight S1→R,", "nobody takes"),
        ("gather.0 = all_gather f32", "gather.0 = all_to_all f32", "not all of gather.0"),
        ("  run linear_1", "  exchange run linear_1 #3", "has no exchange 3"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused(program: Program, line: str, by: str, says: str) -> None:
    text = str(lower(program))
    assert line in text
    with pytest.raises(ProgramError, match=says) as caught:
        parse_schedule(text.replace(line, by, 1), program)
    assert caught.value.do
