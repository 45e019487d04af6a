"""How far to believe what a clock said: the typical of several times, and by how much another look would differ.

In: times of the same thing, turn by turn: what is looked at in one turn lies close together in time, turns lie apart.
Out: one time (`typical`) and its `noise`; and of ranks that measured the same, what is worth saying (`notices`).

Times of one turn share its luck (a busy moment, a warm chip), so turns have a noise of their own, beside that of their
times. Whoever measures again will mostly find the same within the noise of both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ANEW = 0.04
"""By so much the same process, started anew, is faster or slower, however long it is looked at (docs/profiling.md)."""

_STRAGGLES = 1.25  # times as long as the quickest of the same hardware
_SCATTERS = 0.15  # between the quickest and the middle of repeats
_DRIFTS = 0.08  # from the first turn to the last
_OTHERS = 0.05  # of the processors' time
_SHARED = 0.9  # of the time a process runs that has a processor to itself


def typical(times: Sequence[float]) -> float:
    """The mean without the quickest and the slowest sixth, or of three and more at least one of each: sums of means are
    means, and one bad moment is no rule.

    >>> typical([1.0, 1.0, 2.0, 2.0, 3.0, 90.0]), typical([1.0, 2.0, 90.0])
    (2.0, 2.0)
    """
    middle = sorted(times)
    away = max(len(middle) // 6, min(len(middle) - 1, 2) // 2)
    return statistics.fmean(middle[away : len(middle) - away])


def noise(turns: Sequence[Sequence[float]]) -> float:
    """Two standard errors of the typical time, as a fraction of it: of times around their turn's and of turns around
    each other; and what processes differ by when they are started anew.

    >>> round(noise([[1.0, 1.1], [1.0, 1.1]]), 3), round(noise([[1.0, 1.1], [2.0, 2.1]]), 3)
    (0.068, 0.747)
    """
    times = [seconds for turn in turns for seconds in turn]
    middle = typical(times) if times else 0.0
    if len(times) < 2 or not middle:
        return ANEW
    levels = [typical(turn) for turn in turns if turn]
    # Without the slowest sixth, as in what is typical.
    kept = sorted(times)[: max(len(times) - len(times) // 6, 2)]
    squared = statistics.variance(kept) / len(times)
    squared += statistics.variance(levels) / len(levels) if len(levels) > 1 else 0.0
    return math.hypot(2 * math.sqrt(squared) / middle, ANEW)


# What is worth saying


@dataclass(frozen=True, slots=True)
class NoiseStats:
    """What a rank noticed while it measured."""

    scatter: float = 0.0  # of repeats: middle over quickest, less one
    drift: float = 0.0  # last turn over first, less one
    others: float = 0.0  # part of its host's processors that worked for someone else
    stolen: float = 0.0  # part of them that the machine under a virtual one kept
    got: float = 1.0  # part of the time that its one thread was let run
    quota: float = 0.0  # processors that this process may use at most; 0 where it may use all


@dataclass(frozen=True, slots=True)
class Notice:
    """Something about a device that a reader of the figures should know."""

    about: str  # straggler, busy or drift
    device: str
    text: str


def notices(
    devices: Sequence[str], hardware: Sequence[str], paces: Sequence[float], calm: Sequence[NoiseStats]
) -> list[Notice]:
    """What stands out, by device: its name, its hardware, seconds for the same work, what it noticed."""
    found = []
    for name, chip, pace, mine in zip(devices, hardware, paces, calm, strict=True):
        like = [(other, n) for other, c, n in zip(paces, hardware, devices, strict=True) if c == chip]
        best, quickest = min(like)
        if pace > _STRAGGLES * best:
            why = f": it runs {mine.got:.0%} of the time" if mine.got < _SHARED else ""
            why += f", it may use {mine.quota:.0%} of a processor" if mine.quota else ""
            found.append(
                Notice(
                    "straggler", name, f"takes {pace / best:.1f} times as long as {quickest}, the same hardware{why}"
                )
            )
    told: set[tuple[float, float]] = set()
    for name, mine in zip(devices, calm, strict=True):
        expect = max(mine.scatter, mine.others, mine.stolen)
        reasons = []
        if mine.others > _OTHERS and (mine.others, mine.stolen) not in told:
            reasons.append(f"{mine.others:.0%} of its host's processors worked for others")
        if mine.stolen > _OTHERS and (mine.others, mine.stolen) not in told:
            reasons.append(f"{mine.stolen:.0%} of them were taken by the machine underneath")
        told.add((mine.others, mine.stolen))
        # Under a quota a call runs or stands still, whoever else there is.
        if mine.scatter > _SCATTERS and not mine.quota:
            reasons.append(f"repeats scatter by {mine.scatter:.0%}")
        if reasons:
            text = f"measured while something else ran: expect {expect:.0%} ({', '.join(reasons)})"
            found.append(Notice("busy", name, text))
        if abs(mine.drift) > _DRIFTS and not mine.quota:
            changed = "slower" if mine.drift > 0 else "faster"
            found.append(Notice("drift", name, f"became {abs(mine.drift):.0%} {changed} while it was measured"))
    return found
