"""One calibration: lines are corrected as little as makes steps add up, and each observation corrects its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopsided.calibration.calibrate import (
    DRY_RUN,
    OWN_PART,
    RUN,
    Expected,
    LineCorrection,
    ObservedCalls,
    ObservedTransfers,
    Scope,
    calibrate,
    line_correction,
)
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import Network
from lopsided.cluster.devices import Kind, Link, Measured
from lopsided.schedule.cost import Affine


def step_of(expected: Expected, step_s: float) -> ObservedCalls:
    return ObservedCalls(0, Scope.CALLS, expected, step_s)


def correction_by(*steps: ObservedCalls) -> LineCorrection | None:
    return line_correction(steps, DRY_RUN)


def steps_of(line: Affine, share: float, share_s: float, whole_s: float, calls: int = 100) -> list[ObservedCalls]:
    """All calls of a step are one line; nothing lies around them."""
    return [
        step_of(Expected(line.constant, line.slope * fraction, 0.0, calls), step_s)
        for fraction, step_s in ((share, share_s), (1.0, whole_s))
    ]


def total(correction: LineCorrection | None, line: Affine, calls: int = 100) -> Affine:
    assert correction is not None
    one = correction.of(Affine(line.constant / calls, line.slope / calls))
    return Affine(calls * one.constant, calls * one.slope)


def test_a_step_beyond_belief_corrects_nothing() -> None:
    near, far = step_of(Expected(0.2, 0.8, 0.5, 9), 1.6), step_of(Expected(0.2, 0.8, 0.5, 9), 9.0)
    assert correction_by(near) == LineCorrection(pytest.approx(1.1), pytest.approx(1.1))
    assert correction_by(near, far) == correction_by(near)
    assert correction_by(near, step_of(Expected(0.0, 0.0, 0.5, 0), 9.0)) == correction_by(near)
    assert correction_by(far, near) is None
    assert correction_by(step_of(Expected(0.2, 0.8, 0.5, 9), 0.6)) is None


def test_what_was_right_stays() -> None:
    line = Affine(0.2, 0.8)
    found = correction_by(*steps_of(line, 0.25, 0.4, 1.0))
    assert found == LineCorrection(
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
    share = step_of(Expected(0.01, 0.02, 0.0, 300, talking=100), 0.09)
    whole = step_of(Expected(0.004, 0.03, 0.0, 300), 0.035)
    found = correction_by(share, whole)
    assert found is not None
    told = [
        found.constants * step.expected.constant_s
        + found.slopes * step.expected.scaling_s
        + found.each_s * step.expected.calls
        + found.talking_s * step.expected.talking
        for step in (share, whole)
    ]
    assert told == [pytest.approx(0.09, rel=0.01), pytest.approx(0.035, rel=0.01)]
    assert found.talking_s > 2e-4


def test_one_call_that_asks_has_not_all_that_two_steps_differ_by() -> None:
    """A step with half of the batch took a quarter longer than told, the whole one as long: a busy moment, perhaps."""
    share = step_of(Expected(0.01, 0.39, 0.0, 150, talking=1), 0.5)
    whole = step_of(Expected(0.01, 0.79, 0.0, 150), 0.8)
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


# The cluster


def cluster_of(*kinds: Kind) -> Cluster:
    return Cluster("made up", "", kinds, Link(1e-5, 1e9), Link(1e-4, 1e8))


def kind_of(name: str, *, contention: float = 1.0, measured: tuple[Measured, ...] = ()) -> Kind:
    return Kind(name, "box", 1, 1, (("f32", 1e9),), 1e9, 2**30, 1e-6, measured=measured, contention=contention)


TABLE = (
    Measured("op(f32[8])", ((0.5, 1.0), (1.0, 2.0)), ((1.0, 3.0),)),
    Measured("update:sgd(f32[1048576])", ((1.0, 4.0),)),
)


def seen(scope: Scope, was_s: float, is_s: float, kind: int = 0, **more: Any) -> ObservedCalls:
    return ObservedCalls(kind, scope, Expected(was_s, 0.0, 0.0, 1), is_s, **more)


def test_each_scope_corrects_its_own() -> None:
    cluster = cluster_of(kind_of("a", measured=TABLE))
    (was,) = cluster.kinds
    op, update = TABLE

    def now(*observed: ObservedCalls) -> Kind:
        return calibrate(cluster, observed).cluster.kinds[0]

    twice = replace(op, forward=((0.5, 2.0), (1.0, 4.0)), backward=((1.0, 6.0),))
    assert now(seen(Scope.EVERYTHING, 1.0, 2.0)) == was.taking(2.0)
    assert now(seen(Scope.CALLS, 1.0, 2.0)) == replace(was, measured=(twice, update))
    longer = replace(update, forward=((1.0, 8.0),))
    assert now(seen(Scope.UPDATES, 1.0, 2.0, what="sgd")) == replace(was, measured=(op, longer))
    assert now(seen(Scope.UPDATES, 1.0, 2.0, what="adamw")) == was
    forward, backward = replace(op, forward=twice.forward), replace(op, backward=twice.backward)
    assert now(seen(Scope.CALL, 1.0, 2.0, what=op.call)) == replace(was, measured=(forward, update))
    assert now(seen(Scope.CALL, 1.0, 2.0, what=op.call, backward=True)) == replace(was, measured=(backward, update))
    assert now() == was


def test_limits_clamp_or_refuse() -> None:
    cluster = cluster_of(kind_of("a", measured=TABLE))
    far = seen(Scope.CALLS, 1.0, 1e3)
    for limits in (RUN, OWN_PART):
        (told,) = calibrate(cluster, [far], limits=limits).corrections
        assert (told.factor, told.was_s, told.is_s) == (limits.high, 1.0, 1e3)
    refused = calibrate(cluster, [far], limits=DRY_RUN)
    assert (refused.cluster, refused.corrections) == (cluster, ())


def test_devices_that_had_no_part_follow_those_they_are_alike_to() -> None:
    cluster = cluster_of(kind_of("a", measured=TABLE), kind_of("b", measured=TABLE), kind_of("c"))
    found = calibrate(cluster, [seen(Scope.EVERYTHING, 1.0, 2.0)], ran_on=cluster_of(cluster.kinds[0]))
    a, b, c = found.cluster.kinds
    assert (a, b, c) == (*(kind.taking(2.0) for kind in cluster.kinds[:2]), cluster.kinds[2])
    assert [one.kind for one in found.corrections] == ["a"]


def test_an_estimate_of_few_devices_is_longer_with_all_at_work() -> None:
    cluster = cluster_of(kind_of("a", contention=3.0))
    one = seen(Scope.CALL, 1.0, 2.0, what="new(f32[8])", line=Affine(0.0, 1.0))
    found = calibrate(cluster, [one], ran_on=cluster_of(kind_of("a", contention=1.5)))
    assert found.cluster.kinds[0].measured == (Measured("new(f32[8])", ((0.25, 1.0), (0.5, 2.0), (1.0, 4.0))),)


def test_links_are_corrected_from_what_was_measured_or_else_from_the_model() -> None:
    one = cluster_of(kind_of("a"), kind_of("b"))
    two = replace(one, collectives=(("all_gather", "padded", Link(1e-3, 1e6, 0.5)),))
    took = [ObservedTransfers("all_gather", "padded", 1.0, 2.0), ObservedTransfers("all_reduce", "tree", 1.0, 2.0)]
    found = calibrate(two, (), took)
    assert found.cluster == replace(two, collectives=(("all_gather", "padded", Link(2e-3, 5e5, 0.5)),))
    assert [told.what for told in found.corrections] == ["all_gather, padded"]
    was, now = (
        next(way for way in Network(cluster).ways("all_gather") if way.implementation == "padded")
        for cluster in (one, calibrate(one, (), took).cluster)
    )
    assert now.seconds(2**20) == pytest.approx(2 * was.seconds(2**20))
