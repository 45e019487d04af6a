"""The noise that is reported covers what a repeated measurement finds, and what stands out is said. Made-up times."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lopsided.profiling.noise import ANEW, NoiseStats, noise, notices, typical


def steady(draw: random.Random) -> list[list[float]]:
    return [[draw.gauss(1.0, 0.05) for _ in range(2)] for _ in range(3)]


def drifting(draw: random.Random) -> list[list[float]]:
    """What is looked at in one turn shares its luck."""
    return [[level * draw.gauss(1.0, 0.01) for _ in range(2)] for level in (draw.gauss(1.0, 0.05) for _ in range(3))]


def hiccups(draw: random.Random) -> list[list[float]]:
    return [[draw.gauss(1.0, 0.03) + (0.5 if draw.random() < 0.05 else 0.0) for _ in range(4)] for _ in range(3)]


def rationed(draw: random.Random) -> list[list[float]]:
    """Now and then a process has used up its turn of the processor."""
    return [[0.3 + draw.expovariate(1.0) for _ in range(12)] for _ in range(2)]


@pytest.mark.parametrize("times", [steady, drifting, hiccups, rationed])
def test_measured_again_it_lies_within_the_noise_of_both(times: Callable[[random.Random], list[list[float]]]) -> None:
    draw, within = random.Random(0), 0
    for _ in range(400):
        one, other = times(draw), times(draw)
        a, b = (typical([s for turn in look for s in turn]) for look in (one, other))
        within += abs(a - b) <= noise(one) * a + noise(other) * b
    assert within >= 0.95 * 400


def test_noise_is_not_just_large() -> None:
    """Of a spread of a twentieth it is some hundredths; of none, what is left when all is started anew."""
    draw = random.Random(1)
    found = [noise(steady(draw)) for _ in range(200)]
    assert 0.03 < sum(found) / len(found) < 0.1
    assert noise([[1.0, 1.0], [1.0, 1.0]]) == ANEW


def test_nothing_can_be_said_of_one_look() -> None:
    assert noise([[1.0]]) == ANEW
    assert noise([]) == ANEW


def test_one_bad_moment_is_no_rule() -> None:
    assert typical([1.0, 1.0, 1.0, 1.0, 1.0, 50.0]) == 1.0
    assert typical([2.0, 4.0]) == 3.0


def told(
    paces: list[float], calm: list[NoiseStats] | None = None, hardware: list[str] | None = None
) -> list[tuple[str, str, str]]:
    names = [f"box/cpu-{k}" for k in range(len(paces))]
    found = notices(names, hardware or ["cpu"] * len(paces), paces, calm or [NoiseStats()] * len(paces))
    return [(notice.about, notice.device, notice.text) for notice in found]


def test_a_straggler_is_named() -> None:
    assert told([1.0, 1.1, 1.2]) == []
    ((about, device, text),) = told([1.0, 2.0, 1.0])
    assert (about, device) == ("straggler", "box/cpu-1")
    assert "2.0 times as long as box/cpu-0" in text


def test_other_hardware_does_not_straggle() -> None:
    assert told([1.0, 9.0], hardware=["fast", "slow"]) == []


def test_a_quota_is_given_as_the_reason() -> None:
    ((_, _, text),) = told([1.0, 4.0], [NoiseStats(), NoiseStats(got=0.25, quota=0.25)])
    assert "runs 25% of the time" in text
    assert "may use 25% of a processor" in text


def test_a_busy_host_is_told_once() -> None:
    busy = NoiseStats(others=0.4)
    found = told([1.0, 1.0], [busy, busy])
    assert [(about, device) for about, device, _ in found] == [("busy", "box/cpu-0")]
    assert "expect 40%" in found[0][2]


def test_repeats_that_scatter_and_drift_are_told() -> None:
    found = told([1.0], [NoiseStats(scatter=0.5, drift=0.2)])
    assert [about for about, _, _ in found] == ["busy", "drift"]
    assert "scatter by 50%" in found[0][2]
    assert "20% slower" in found[1][2]
