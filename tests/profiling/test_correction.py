"""Calls are corrected as little as makes steps add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopsided.profiling.correction import CallCorrection, Expected, Rehearsed, correction_by
from lopsided.schedule.cost import Affine


def steps_of(line: Affine, share: float, share_s: float, whole_s: float, calls: int = 100) -> list[Rehearsed]:
    """All calls of a step are one line; nothing lies around them."""
    return [
        Rehearsed(Expected(line.constant, line.slope * fraction, 0.0, calls), step_s)
        for fraction, step_s in ((share, share_s), (1.0, whole_s))
    ]


def total(correction: CallCorrection | None, line: Affine, calls: int = 100) -> Affine:
    assert correction is not None
    one = correction.of(Affine(line.constant / calls, line.slope / calls))
    return Affine(calls * one.constant, calls * one.slope)


def test_a_step_beyond_belief_corrects_nothing() -> None:
    near, far = Rehearsed(Expected(0.2, 0.8, 0.5, 9), 1.6), Rehearsed(Expected(0.2, 0.8, 0.5, 9), 9.0)
    assert correction_by(near, None) == CallCorrection(pytest.approx(1.1), pytest.approx(1.1))
    assert correction_by(near, far) == correction_by(near, None)
    assert correction_by(near, Rehearsed(Expected(0.0, 0.0, 0.5, 0), 9.0)) == correction_by(near, None)
    assert correction_by(far, near) is None
    assert correction_by(Rehearsed(Expected(0.2, 0.8, 0.5, 9), 0.6), None) is None


def test_what_was_right_stays() -> None:
    line = Affine(0.2, 0.8)
    found = correction_by(*steps_of(line, 0.25, 0.4, 1.0))
    assert found == CallCorrection(
        pytest.approx(1.0, abs=1e-3), pytest.approx(1.0, abs=1e-3), pytest.approx(0.0, abs=1e-4)
    )


def test_a_host_that_does_not_keep_up_takes_its_time_for_every_call() -> None:
    """A device that would do it in a hundredth of a second, and all of its calls have next to nothing constant."""
    line = Affine(0.0001, 0.01)
    found = correction_by(*steps_of(line, 0.25, 0.02, 0.021))
    corrected = total(found, line)
    assert corrected.at(0.25) == pytest.approx(0.02, rel=0.01)
    assert corrected.at(1.0) == pytest.approx(0.021, rel=0.01)
    assert found is not None
    assert found.constants == pytest.approx(1.0, abs=0.05)
    assert found.each_s == pytest.approx(0.0196 / 100, rel=0.05)


def test_no_call_takes_no_time() -> None:
    """Not even where a step grows faster than the batch, which no line can say."""
    found = correction_by(*steps_of(Affine(0.3, 0.7), 0.5, 0.2, 1.0))
    assert found is not None
    assert min(found.constants, found.slopes) > 0
    flat = found.of(Affine(0.1, 0.0))
    assert flat.at(0.5) > 0


def test_what_asking_takes_is_no_matter_of_those_who_ask_nobody() -> None:
    """Normed together a step takes as long with half of the batch as three times all of it alone."""
    share = Rehearsed(Expected(0.01, 0.02, 0.0, 300, talking=100), 0.09)
    whole = Rehearsed(Expected(0.004, 0.03, 0.0, 300), 0.035)
    found = correction_by(share, whole)
    assert found is not None
    told = [
        found.constants * step.told.constant_s
        + found.slopes * step.told.scaling_s
        + found.each_s * step.told.calls
        + found.talking_s * step.told.talking
        for step in (share, whole)
    ]
    assert told == [pytest.approx(0.09, rel=0.01), pytest.approx(0.035, rel=0.01)]
    assert found.talking_s > 2e-4


def test_one_call_that_asks_has_not_all_that_two_steps_differ_by() -> None:
    """A step with half of the batch took a quarter longer than told, the whole one as long: a busy moment, perhaps."""
    share = Rehearsed(Expected(0.01, 0.39, 0.0, 150, talking=1), 0.5)
    whole = Rehearsed(Expected(0.01, 0.79, 0.0, 150), 0.8)
    found = correction_by(share, whole)
    assert found is not None
    assert found.talking_s < 5 * 0.5 / 150
    told = found.constants * 0.01 + found.slopes * 0.79 + 150 * found.each_s
    assert told == pytest.approx(0.8, rel=0.01)


@given(
    constant=st.floats(0.0, 1.0),
    slope=st.floats(0.1, 1.0),
    constants=st.floats(0.5, 4.0),
    slopes=st.floats(0.5, 4.0),
    share=st.floats(0.05, 0.8),
)
def test_steps_that_can_add_up_do(constant: float, slope: float, constants: float, slopes: float, share: float) -> None:
    line, real = Affine(constant, slope), Affine(constants * constant, slopes * slope)
    corrected = total(correction_by(*steps_of(line, share, real.at(share), real.at(1.0))), line)
    for fraction in (share, 1.0):
        assert corrected.at(fraction) == pytest.approx(real.at(fraction), rel=0.02)
