"""Buffers are found by any of their names, where they are now, and copied all at once."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from lopsided.runtime.parameters.buffers import Buffers


class Twice(nn.Module):
    """A module under two names, buffers of three dtypes, one of them of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.second = self.first
        self.register_buffer("seen", torch.tensor([True, False]))
        self.buffers_by_name = Buffers(self)


def test_every_name_of_a_shared_buffer_leads_to_it():
    model = Twice()
    assert model.buffers_by_name["first.running_mean"] is model.first.running_mean
    assert model.buffers_by_name["second.running_mean"] is model.first.running_mean
    assert model.buffers_by_name["seen"] is model.seen


def test_a_buffer_that_was_replaced_is_read_and_written_where_it_is_now():
    model = Twice()
    model.first.running_mean = torch.tensor([1.0, 2.0, 3.0])
    model.double()
    assert model.buffers_by_name["first.running_mean"].tolist() == [1.0, 2.0, 3.0]
    model.buffers_by_name.update({"first.running_mean": torch.tensor([4.0, 5.0, 6.0])})
    assert model.first.running_mean.dtype == torch.float64
    assert model.first.running_mean.tolist() == [4.0, 5.0, 6.0]


def test_new_values_of_all_dtypes_come_at_once_and_copies_stay_as_they_were():
    model = Twice()
    names = ("first.running_mean", "first.running_var", "first.num_batches_tracked", "seen")
    before = model.buffers_by_name.copies(names)
    values = {
        "first.running_mean": torch.tensor([1.0, -0.0, float("nan")]),
        "first.running_var": torch.tensor([2.0, 3.0, 4.0]),
        "first.num_batches_tracked": torch.tensor(7),
        "seen": torch.tensor([False, True]),
    }
    model.buffers_by_name.update(values)
    assert [before[name].tolist() for name in names] == [[0.0] * 3, [1.0] * 3, 0, [True, False]]
    for name, value in values.items():
        torch.testing.assert_close(model.buffers_by_name[name], value, rtol=0, atol=0, equal_nan=True)


def test_a_backward_pass_still_has_what_it_saved_of_a_buffer():
    model = Twice()
    weight = torch.ones(3, requires_grad=True)
    old = model.buffers_by_name.copies(["first.running_var"])["first.running_var"]
    loss = (weight * old).sum()
    model.buffers_by_name.update({"first.running_var": torch.full((3,), 5.0)})
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_module_that_holds_its_buffers_is_gone_when_nobody_needs_it():
    gc.disable()
    try:
        model = Twice()
        known = weakref.ref(model)
        del model
        assert known() is None
    finally:
        gc.enable()
