"""Reshapes at random: every rule runs on every device, idle ones too, and moves elements as torch does."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from lopsided.ir.op_call import TOLERANCE
from lopsided.ops.derive import call_rules
from lopsided.ops.op import Call
from lopsided.ops.sample import sample
from lopsided.ops.trial import try_rule
from lopsided.ops.validator import as_call

_SHARES = ((0.5, 0.2, 0.3), (0.0, 0.6, 0.4), (0.7, 0.3))


def _reshaped(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Call, list[torch.Tensor]]:
    elements = torch.arange(math.prod(before), dtype=torch.float64).reshape(before).requires_grad_()
    return as_call(sample("aten.reshape.default", elements, list(after)))


@st.composite
def _reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same small primes, in any order and in any groups; a group without a prime is a dim of one."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), max_size=7))

    def shape() -> tuple[int, ...]:
        order = draw(st.permutations(primes))
        ends = sorted(draw(st.lists(st.integers(0, len(order)), max_size=4)))
        groups = zip([0, *ends], [*ends, len(order)], strict=True)
        return tuple(math.prod(order[start:end]) for start, end in groups)

    return shape(), shape()


@settings(max_examples=200)
@given(_reshapes())
def test_every_rule_of_a_random_reshape_runs_and_is_right(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    call, tensors = _reshaped(*shapes)
    for rule in call_rules(call):
        for shares in _SHARES:
            assert try_rule(call, tensors, rule, shares) <= TOLERANCE, f"{shapes} {rule} {shares}"


@pytest.mark.parametrize(
    ("before", "after", "cuts"),
    [
        # Boundaries at 6, 18, 144 and at 12: what the shapes share lies before the first and after the last of them.
        ((6, 3, 8, 8), (12, 96), ["S0 → S0/2", "S3 → S1x12"]),
        ((6, 3, 8), (12, 12), ["S0 → S0/2"]),
        ((4, 6), (6, 4), []),
        ((12, 7), (4, 21), ["S0/3 → S0", "S0x4 → S1/7", "S1 → S1x3"]),
    ],
)
def test_what_may_be_cut_when_boundaries_cross(
    before: tuple[int, ...], after: tuple[int, ...], cuts: list[str]
) -> None:
    call, _ = _reshaped(before, after)
    assert [str(rule) for rule in call_rules(call) if rule.needs[0].is_shard] == cuts
