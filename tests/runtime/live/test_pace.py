"""When shares change while training: told as stories of step times, with noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from lopsided.runtime.live.pace import LOOK, Balancing, PaceSeen, gain_s, in_proportion, median_and_error

SPEEDS = (3.0, 2.0, 1.0)
Story = Callable[[int], tuple[float, ...]]  # the speeds of the devices, by look


def told(story: Story, looks: int, noise: float, seed: int = 0) -> Iterator[tuple[int, tuple[float, ...], float]]:
    """The looks at which shares changed, the new ones, and the step that followed over the best there is."""
    dice, decision, shares = random.Random(seed), Balancing(cost_s=1.0), tuple(s / sum(SPEEDS) for s in SPEEDS)
    for look in range(looks):
        speeds = story(look)

        def took(share: float, speed: float) -> tuple[float, float]:
            whole_s = 0.05 * 6 * share / speed
            return median_and_error([max(whole_s * (1 + noise * dice.gauss(0, 1)), 1e-6) for _ in range(LOOK)])

        own_s, errors_s = zip(*map(took, shares, speeds), strict=True)
        found = decision.look(shares, PaceSeen(max(own_s), own_s, max(errors_s)))
        if found is not None:
            shares = found
            yield look, shares, max(w / s for w, s in zip(shares, speeds, strict=True)) * sum(speeds)


@pytest.mark.parametrize("seed", range(20))
def test_noise_changes_nothing(seed: int) -> None:
    assert list(told(lambda look: SPEEDS, 500 // LOOK + 1, 0.1, seed)) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_device_slowed_to_a_third_and_back_is_followed_once_each(seed: int) -> None:
    changes = list(told(lambda look: (1.0, 2.0, 1.0) if 10 <= look < 30 else SPEEDS, 50, 0.05, seed))
    assert [look for look, _, _ in changes] == [11, 31]  # the second look that promised it
    assert all(off < 1.1 for _, _, off in changes)


def test_a_busy_moment_changes_nothing() -> None:
    assert list(told(lambda look: (0.5, 2.0, 1.0) if look % 4 == 3 else SPEEDS, 100, 0.02)) == []


@pytest.mark.parametrize("period", [2, 3, 4, 5, 8])
def test_it_does_not_go_to_and_fro(period: int) -> None:
    """A device that is slow and fast in turn: each change disappoints, and the next must promise twice as much."""
    changes = list(told(lambda look: (1.0, 2.0, 1.0) if look // period % 2 else SPEEDS, 400, 0.05))
    assert len(changes) <= 2 * 400 // (2 * period)


def test_what_costs_more_than_it_gains_is_left() -> None:
    decision = Balancing(cost_s=1e6)
    slow = PaceSeen(0.3, (0.3, 0.1, 0.1))
    assert [decision.look((0.5, 0.25, 0.25), slow) for _ in range(5)] == [None] * 5


def test_a_promise_that_was_not_kept_is_believed_less() -> None:
    """The device is slow whatever its share: what it does is not work that can be shared."""
    decision, shares, changed = Balancing(cost_s=0.01), (0.5, 0.5), 0
    for _ in range(200):
        found = decision.look(shares, PaceSeen(0.3, (0.3, 0.1)))
        changed, shares = changed + (found is not None), found or shares
    assert changed <= 4


def test_a_device_without_a_share_keeps_none() -> None:
    assert in_proportion((0.6, 0.4, 0.0), (0.2, 0.1, 0.01)) == pytest.approx((3 / 7, 4 / 7, 0.0))
    assert gain_s((0.6, 0.4, 0.0), (0.2, 0.1, 0.01)) == pytest.approx(0.2 - 1 / 7)
    assert in_proportion((1.0, 0.0), (0.0, 0.0)) == (1.0, 0.0)
