"""What an update takes is measured in seconds a tensor, at the sizes that a model has. The clock is made up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lopsided.profiling import overhead as measure_updates
from lopsided.profiling.noise import typical
from lopsided.profiling.overhead import FRACTIONS, measure_update
from lopsided.schedule.cost import UPDATED_ELEMENTS

CPU = torch.device("cpu")
AROUND_S, AN_ELEMENT_S = 1e-5, 1e-9


class Clock:
    """Stands still but for updates."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


class Slow(torch.optim.SGD):
    """So many seconds for every tensor, and so many for each of its elements."""

    def __init__(self, parameters: list[nn.Parameter], clock: Clock) -> None:
        super().__init__(parameters, lr=0.0)
        self.clock = clock

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.clock.seconds += AROUND_S + AN_ELEMENT_S * parameter.numel()


@pytest.mark.parametrize("fractions", [FRACTIONS, (0.001, 0.25)])
def test_seconds_are_those_of_one_tensor(monkeypatch: pytest.MonkeyPatch, fractions: tuple[float, ...]) -> None:
    clock = Clock()
    monkeypatch.setitem(measure_updates._MAKERS, "sgd", lambda parameters: Slow(parameters, clock))
    found = measure_update("sgd", "f32", CPU, 2**28, 0.0, clock.now, fractions)
    assert tuple(found) == fractions
    for fraction, turns in found.items():
        expected = AROUND_S + AN_ELEMENT_S * round(fraction * UPDATED_ELEMENTS)
        assert typical([s for turn in turns for s in turn]) == pytest.approx(expected)


def test_nobody_measures_what_torch_has_not() -> None:
    assert measure_update("lion", "f32", CPU, 2**28, 0.0) == {}
