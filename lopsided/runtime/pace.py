"""When to give devices other shares while training: a decision over the times that their steps took.

In: of every device its share of the work and how long it computed in a step, look after look. Out: other shares, or
nothing. Nothing here talks or keeps time, so all processes that hear the same times come to the same answer, and tests
can tell it any story.

A device that has the share w and computes for t seconds works at the speed w / t. With shares in proportion to speed
all compute for 1 / Σ (w / t); the step would gain max t less that. What is not worth it:

    gain < `LEAST_GAIN` of a step                         noise, and shares that are good enough
    a gain that only one look shows                       a busy moment
    gain · steps of the next `HORIZON_S` < what it costs  moving pieces, making programs
    shares that promise what the last ones did not keep   each time the promise was kept by less than half, the next
                                                          one must be twice as large: it never goes to and fro
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LOOK = 20
"""Steps between two looks. The median of so many is what a device is held to take."""

LEAST_GAIN = 0.1
CONFIRMED = 2
"""So many looks in a row must promise the gain."""

HORIZON_S = 300.0
"""The next minutes, in which what moving costs must be gained."""

_COOLS = 2  # looks after a change that say nothing: programs are new, caches cold
_KEPT = 0.5  # of a promise, to be believed again


@dataclass(frozen=True, slots=True)
class PaceSeen:
    """What a look saw of a step, on every device: the whole of it, and for how long each computed."""

    step_s: float
    own_s: tuple[float, ...]


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


@dataclass(slots=True)
class Balancing:
    """The decision, look after look; `cost_s` is what a change takes."""

    cost_s: float = 1.0
    _promising: int = 0
    _cools: int = 0
    _least: float = LEAST_GAIN
    _promised: tuple[float, float] | None = field(default=None)  # the step that was, and what was to be gained

    def look(self, shares: Sequence[float], pace: PaceSeen) -> tuple[float, ...] | None:
        """Other shares, if they are worth it."""
        if self._cools:
            self._cools -= 1
            return None
        self._judge(pace)
        gained = gain_s(shares, pace.own_s)
        steps = HORIZON_S / pace.step_s if pace.step_s > 0 else 0.0
        worth = gained > self._least * pace.step_s and gained * steps > self.cost_s
        self._promising = self._promising + 1 if worth else 0
        if self._promising < CONFIRMED:
            return None
        self._promising, self._cools = 0, _COOLS
        self._promised = pace.step_s, gained
        return in_proportion(shares, pace.own_s)

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
