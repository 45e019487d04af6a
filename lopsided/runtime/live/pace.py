"""When to give devices other shares while training: a decision over the times that their steps took.

In: of every device its share of the work and how long it computed in a step, look after look. Out: other shares, or
nothing. Nothing here talks or keeps time, so all processes that hear the same times come to the same answer, and tests
can tell it any story.

A device that has the share w and computes for t seconds works at the speed w / t. With shares in proportion to speed
all compute for 1 / Σ (w / t); the step would gain max t less that. What is not worth it:

    gain < `LEAST_GAIN` of a step                         shares that are good enough
    gain < `_ERRORS` standard errors of what was seen     noise
    a gain that only one look shows                       a busy moment; the mean of both counts, and must show it, too
    gain · steps of the next `HORIZON_S` < what it costs  moving pieces, making programs
    shares that promise what the last ones did not keep   each time the promise was kept by less than half, the next
                                                          one must be twice as large: it never goes to and fro
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

LOOK = 7
"""Steps between two looks, at the least. The median of so many is what a device is held to take. With two looks to
believe it, and a step in which medians are told, other shares come at most 18 steps after a device has changed."""

_LOOK_S = 0.2  # steps of a millisecond are looked at less often
_MOST_STEPS = 200

LEAST_GAIN = 0.1
CONFIRMED = 2
"""So many looks in a row must promise the gain."""

HORIZON_S = 300.0
"""The next minutes, in which what moving costs must be gained."""

_ERRORS = 3.0  # a gain so many times as large as what is uncertain is none of chance
_COOLS = 2  # looks after a change that say nothing: programs are new, caches cold
_KEPT = 0.5  # of a promise, to be believed again


@dataclass(frozen=True, slots=True)
class PaceSeen:
    """What a look saw of a step, on every device: the whole of it, for how long each computed, and how far off the
    least certain of these may be."""

    step_s: float
    own_s: tuple[float, ...]
    error_s: float = 0.0


def in_proportion(shares: Sequence[float], own_s: Sequence[float]) -> tuple[float, ...]:
    """Shares with which all would compute for as long. A device without a share keeps none: its speed is not known.

    >>> in_proportion((0.5, 0.5), (0.3, 0.1))
    (0.25, 0.75)
    """
    speeds = [share / seconds if share and seconds > 0 else 0.0 for share, seconds in zip(shares, own_s, strict=True)]
    whole = sum(speeds)
    return tuple(speed / whole for speed in speeds) if whole > 0 else tuple(shares)


def gain_s(shares: Sequence[float], own_s: Sequence[float]) -> float:
    """By how much the slowest device would compute for less.

    >>> round(gain_s((0.5, 0.5), (0.3, 0.1)), 9)
    0.15
    """
    speeds = [share / seconds for share, seconds in zip(shares, own_s, strict=True) if share and seconds > 0]
    return max(max(own_s) - 1 / sum(speeds), 0.0) if speeds else 0.0


def median_and_error(seconds: Sequence[float]) -> tuple[float, float]:
    """The median, and its standard error by the median distance from it, as for a normal distribution.

    >>> median, error = median_and_error([1.0, 1.0, 2.0, 2.0, 9.0])
    >>> median, round(error, 2)
    (2.0, 0.83)
    """
    middle = statistics.median(seconds)
    spread = 1.4826 * statistics.median(abs(one - middle) for one in seconds)
    return middle, math.sqrt(math.pi / 2 / len(seconds)) * spread


def steps_to_look(step_s: float) -> int:
    """After how many steps to look again.

    >>> steps_to_look(0.05), steps_to_look(0.004), steps_to_look(0.0)
    (7, 50, 200)
    """
    return min(max(math.ceil(_LOOK_S / step_s), LOOK), _MOST_STEPS) if step_s > 0 else _MOST_STEPS


@dataclass(slots=True)
class Balancing:
    """The decision, look after look; `cost_s` is what a change takes."""

    cost_s: float = 1.0
    _promising: list[tuple[float, ...]] = field(default_factory=list)  # what the last looks saw that promised a gain
    _cools: int = 0
    _least: float = LEAST_GAIN
    _promised: tuple[float, float] | None = field(default=None)  # the step that was, and what was to be gained

    def look(self, shares: Sequence[float], pace: PaceSeen) -> tuple[float, ...] | None:
        """Other shares, if they are worth it."""
        if self._cools:
            self._cools -= 1
            return None
        self._judge(pace)
        if not self._is_worth(gain_s(shares, pace.own_s), pace):
            self._promising = []
            return None
        self._promising = [*self._promising, pace.own_s][-CONFIRMED:]
        own_s = tuple(sum(of_one) / len(of_one) for of_one in zip(*self._promising, strict=True))
        gained = gain_s(shares, own_s)
        if len(self._promising) < CONFIRMED or not self._is_worth(gained, pace):
            return None
        self._promising, self._cools = [], _COOLS
        self._promised = pace.step_s, gained
        return in_proportion(shares, own_s)

    def _is_worth(self, gained: float, pace: PaceSeen) -> bool:
        steps = HORIZON_S / pace.step_s if pace.step_s > 0 else 0.0
        return gained > max(self._least * pace.step_s, _ERRORS * pace.error_s) and gained * steps > self.cost_s

    def refused(self) -> None:
        """The shares could not be given: they do not fit, or round to those there are. Nothing was promised then."""
        self._promised = None

    def _judge(self, pace: PaceSeen) -> None:
        """Was the last promise kept?"""
        if self._promised is None:
            return
        (before_s, promised_s), self._promised = self._promised, None
        if before_s - pace.step_s < _KEPT * promised_s:
            self._least = min(2 * self._least, 1.0)
        else:
            self._least = LEAST_GAIN
