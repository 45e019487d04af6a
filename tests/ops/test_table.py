"""The table on real kernels: every rule of every sample is right, and no rule is missing without a reason.

Missing rules are searched for samples of at most four tensors: hypotheses grow exponentially with tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lopsided.ops import TABLE, describe
from lopsided.ops.sample import Sample
from lopsided.ops.validator import KNOWN_MISSING, sampled_ops, samples_of, validate

# Some ops in the table are deprecated, and say so.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

_MOST_TENSORS = 4


def _tensors(arg: Any) -> list[Tensor]:
    if isinstance(arg, Tensor):
        return [arg]
    return [t for part in arg for t in _tensors(part)] if isinstance(arg, list | tuple) else []


def _check(example: Sample, op: str) -> None:
    tensors = _tensors([*example.args, *example.kwargs.values()])
    finding = validate(example, search_missing=len(tensors) <= _MOST_TENSORS)
    wrong = [f"{rule}  off by {error:.1e}" for rule, error in finding.wrong]
    assert not wrong, f"{example}\n  {finding.line}\n  " + "\n  ".join(wrong)
    missing = [str(rule) for rule in finding.missing if op not in KNOWN_MISSING]
    assert not missing, f"{example}\n  {finding.line}\n  missing " + "\n  missing ".join(missing)


@pytest.mark.parametrize("op", sampled_ops())
def test_every_rule_is_right_and_none_is_missing(op: str, everything: bool) -> None:
    for example in samples_of(op) if everything else samples_of(op)[::2]:
        assert describe(example.op) is not None, f"{example.op} is not in the table"
        _check(example, op)


def test_every_entry_has_a_sample() -> None:
    assert [op for op in TABLE if not samples_of(op)] == []


def test_every_entry_is_an_op() -> None:
    for op in TABLE:
        namespace, packet, *overload = op.split(".")
        if namespace == "aten":
            found = getattr(torch.ops.aten, packet)
            assert not overload or overload[0] in found.overloads(), f"{op} does not exist"


def test_what_is_known_to_be_missing_is_missing() -> None:
    for op in KNOWN_MISSING:
        assert any(validate(example).missing for example in samples_of(op)), f"{op} misses no rule any more"
