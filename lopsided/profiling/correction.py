"""What calls that were measured one by one are to be corrected by, so that they add up to the steps that were run.

In: of a step with a device's share of the batch and, where that was run, of one with the whole, what its calls add up
to and what it took (`Rehearsed`). Out: a `CallCorrection` of every call of that device, and its table so corrected.

    seconds of a call      constant + slope · fraction                                     `fitted_line`
    corrected              constants · constant + each_s + slopes · slope · fraction
                           and talking_s more of a call that asks others on its way

With one step there is one number to find: everything takes so many times as long. With two there is more to tell. Where
a host does not keep up with its device, a step takes as long with a piece of the batch as with all of it: calls then
have something in common that no fraction changes (`each_s`). And alone no call has anyone to ask: what asking takes its
host shows in the step with a share only. Of all corrections that make both steps add up, the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import lsq_linear

from lopsided.profiling.kinds import Found, Took
from lopsided.schedule.cost import FREE, Affine, fitted_line

LEAST, LARGEST = 0.25, 8.0
"""Beyond these, what was run is not what was priced."""

_LITTLE = 0.05  # is left of what scales, and of what does not: no call takes no time
_TALK = 4.0  # calls: what one that talks does besides, about
_LEAST_NEWS = 1e-2
"""What a correction weighs against a step that is missed by as much."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of a pass there and back, by tables: of so many calls that were measured (and of them so many that talk),
    what does not scale with a fraction and what does; and of the rest: estimates, and what lies around calls."""

    constant_s: float
    scaling_s: float
    rest_s: float
    calls: int
    talking: int = 0

    @property
    def measured_s(self) -> float:
        return self.constant_s + self.scaling_s

    @property
    def all_s(self) -> float:
        return self.measured_s + self.rest_s


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A step, by tables and by the clock."""

    told: Expected
    step_s: float

    @property
    def calls_s(self) -> float:
        """What its measured calls took."""
        return self.step_s - self.told.rest_s

    @property
    def ratio(self) -> float:
        return self.calls_s / self.told.measured_s

    @property
    def is_believable(self) -> bool:
        return self.told.measured_s > 0 and LEAST <= self.ratio <= LARGEST


@dataclass(frozen=True, slots=True)
class CallCorrection:
    constants: float
    slopes: float
    each_s: float = 0.0
    talking_s: float = 0.0

    def of(self, line: Affine, *, talks: bool = False) -> Affine:
        """
        >>> Correction(1.0, 2.0, 0.5, 0.25).of(Affine(1.0, 4.0), talks=True)
        Affine(constant=1.75, slope=8.0)
        """
        extra_s = self.each_s + (self.talking_s if talks else 0.0)
        return Affine(self.constants * line.constant + extra_s, self.slopes * line.slope)


def correction_by(share: Rehearsed, whole: Rehearsed | None) -> CallCorrection | None:
    """None where a device's own step is beyond belief; a step with the whole batch that is counts for nothing.

    >>> correction_by(Rehearsed(Expected(0.1, 0.7, 0.2, 8), 1.08), None)
    Correction(constants=1.1, slopes=1.1, each_s=0.0, talking_s=0.0)
    """
    if not share.is_believable:
        return None
    ratio = round(share.ratio, 6)
    if whole is None or not whole.is_believable:
        return CallCorrection(ratio, ratio)
    # Rows: the steps, then what is left as it is. Columns: constants, slopes, what calls have in common, and talking;
    # the last two in units of a mean call: where one call in hundreds talks, it has not all that two steps differ by.
    common_s = share.calls_s / max(share.told.calls, 1)
    talking_s = _TALK * common_s
    steps = [(step.told, step.calls_s) for step in (share, whole)]
    rows = [
        [told.constant_s / took, told.scaling_s / took, told.calls * common_s / took, told.talking * talking_s / took]
        for told, took in steps
    ]
    known = [1.0, 1.0, _LEAST_NEWS, _LEAST_NEWS, 0.0, 0.0]
    bounds = ([_LITTLE, _LITTLE, 0.0, 0.0], [LARGEST, LARGEST, np.inf, np.inf])
    found = lsq_linear([*rows, *(_LEAST_NEWS * np.eye(4))], known, bounds).x
    constants, slopes, common, talking = (round(float(number), 6) for number in found)
    return CallCorrection(constants, slopes, common * common_s, talking * talking_s)


def corrected(found: Found, correction: CallCorrection, talking: frozenset[str] = frozenset()) -> Found:
    """Every point as far from its line as it was, `talking` calls apart; updates are no part of what was rehearsed."""
    points: dict[str, list[tuple[float, Took]]] = {}
    for (text, fraction), took in found.items():
        if not text.startswith("update:"):
            points.setdefault(text, []).append((fraction, took))
    lines = {text: _there_and_back(own) for text, own in points.items()}

    def longer(text: str, fraction: float, took: Took) -> Took:
        there, back = (_times(correction, line, fraction, text in talking) for line in lines[text])
        backward_s = None if took.backward_s is None else back * took.backward_s
        return replace(took, forward_s=there * took.forward_s, backward_s=backward_s)

    return {key: longer(*key, took) if key[0] in lines else took for key, took in found.items()}


def _there_and_back(points: Sequence[tuple[float, Took]]) -> tuple[Affine, Affine]:
    back = [(fraction, took.backward_s) for fraction, took in points if took.backward_s is not None]
    return fitted_line([(fraction, took.forward_s) for fraction, took in points]), fitted_line(back) if back else FREE


def _times(correction: CallCorrection, line: Affine, fraction: float, talks: bool) -> float:
    """How many times as long a call takes with a fraction of it."""
    before = line.at(fraction)
    return correction.of(line, talks=talks).at(fraction) / before if before else 1.0
