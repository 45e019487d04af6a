"""Shares in whole units: every length of a step, cut so that the step takes least.

In: the step (`FoldedStep`, `MemoryRows`) and shares before rounding, with the walk at them. Out: `Units` for every cut,
and what they cost (`Price`).

The one idea: only the largest piece of each kind matters, its *level* q_k, and one length can be looked at alone while
all others stay as they are.

    levels      Σ_k devices_k · q_k ≥ length                                            `_Ladder`
    price       Σ_legs max_k (seconds without units + seconds per unit · q_k)
                + Σ_messages seconds(devices · max q / length)                          `_View.prices`
    one leg     has all levels that finish by the earliest moment that is late enough   `_View.finish_together`
    many        units move between kinds while that helps                               `_View.improved`
    lengths     one after the other until none changes                                  `Rounding._by_legs`
    the step    the cheapest of all these along the critical path, and the nearest      `Rounding.best`
                units, then moves that shorten it                                       `Rounding._by_path`

The price of one length is a guess: what hides costs the part that was exposed before rounding. The critical path
decides, and the nearest units (largest remainder) take part, so the outcome is never worse than those.

Of few kinds every pair exchanges units. Of many, those that are last in some leg give, and those that are first overall
take (`_View.givers`, `_View.takers`): so many moves as a constant, each priced in a row of one array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lopsided.cluster.collectives import Network
from lopsided.schedule.cost import Cut
from lopsided.schedule.critical_path import CriticalPath, FoldedStep, FractionalShares, MemoryRows, Message, PerKind

_FEW = 4
"""Units per device below which other cuts than those near the shares are tried."""

_FEW_KINDS = 4
"""Kinds up to which every two exchange units; of more, so many give and so many take."""

_HALVINGS = 60
"""Of a span of time, until what is left of it is less than the last bits of a float."""

# Limits that are not usually met: moves of units, sweeps over all cuts. And one that is, with a deep model: events
# walked to make the last improvements.
_MOVES, _SWEEPS, _EVENTS = 64, 4, 20_000

Levels = tuple[int, ...]
"""Of each kind, the largest piece of a device, in units."""


@dataclass(frozen=True)
class Units:
    """Whole units: for each cut, what all devices of a kind have together, dealt out as evenly as can be."""

    cuts: tuple[tuple[Cut, tuple[int, ...]], ...]
    counts: tuple[int, ...]

    @cached_property
    def totals(self) -> dict[Cut, tuple[int, ...]]:
        return dict(self.cuts)

    @cached_property
    def _fractions(self) -> dict[Cut | None, PerKind]:
        whole: dict[Cut | None, PerKind] = {None: (1.0,) * len(self.counts)}
        return whole | {cut: tuple(q / cut[1] for q in self.levels(cut)) for cut in self.totals}

    def levels(self, cut: Cut) -> Levels:
        return tuple(-(-total // count) for total, count in zip(self.totals[cut], self.counts, strict=True))

    def fractions(self, cut: Cut | None) -> PerKind:
        # A length of 0 is not cut.
        return self._fractions.get(cut, (0.0,) * len(self.counts))

    def largest(self, cuts: tuple[Cut, ...]) -> float:
        return sum(self.counts) * max(max(self.fractions(cut)) for cut in cuts) if cuts else 1.0

    def with_cut(self, cut: Cut, totals: tuple[int, ...]) -> Units:
        return Units(tuple((other, totals if other == cut else old) for other, old in self.cuts), self.counts)


def nearest(length: int, shares: Sequence[float], counts: Sequence[int]) -> tuple[int, ...]:
    """`lopsided.ir.placement.cut`, by largest remainder, for kinds: the units of all devices of each kind together.

    >>> nearest(7, (0.2, 0.3), (2, 2))
    (3, 4)
    """
    pieces = [math.floor(length * share + 1e-9) for share in shares]
    order = sorted((k for k in range(len(shares)) if shares[k] > 0), key=lambda k: (pieces[k] - length * shares[k], k))
    totals = [piece * count for piece, count in zip(pieces, counts, strict=True)]
    left = length - sum(totals)
    while left > 0:
        for k in order:
            given = min(left, counts[k])
            totals[k] += given
            left -= given
    return tuple(totals)


class Price(NamedTuple):
    """What units cost, in the order in which they are compared: what fits is better than what is fast."""

    over_bytes: float  # the limits, on all devices together
    seconds: float

    def beats(self, other: Price) -> bool:
        """Whether it is better by more than the last bits, for which units would move for ever."""
        if self.over_bytes != other.over_bytes:
            return self.over_bytes < other.over_bytes
        return self.seconds < other.seconds * (1 - 1e-12)


# One length


@dataclass(frozen=True, slots=True)
class _Ladder:
    """The levels that one length can have: Σ counts · levels ≥ length."""

    length: int
    counts: tuple[int, ...]

    @property
    def fewest(self) -> int:
        """Units by which the levels of a kind grow at least."""
        return min(self.counts)

    def units(self, levels: Sequence[int]) -> int:
        return sum(count * q for count, q in zip(self.counts, levels, strict=True))

    def trimmed(self, levels: Sequence[int]) -> Levels:
        """Without levels that are not needed: those of the largest kinds that can be spared go first."""
        spare = self.units(levels) - self.length
        if spare < self.fewest:
            return tuple(levels)
        kept = list(levels)
        for k in sorted(range(len(kept)), key=lambda k: (-self.counts[k], k)):
            less = min(kept[k], spare // self.counts[k])
            kept[k] -= less
            spare -= less * self.counts[k]
        return tuple(kept)

    def totals(self, levels: Levels) -> tuple[int, ...]:
        """Units of each kind. Levels may allow for more than there are: one kind has that much less."""
        trimmed = self.trimmed(levels)
        totals = [count * q for count, q in zip(self.counts, trimmed, strict=True)]
        k = max((k for k in range(len(totals)) if trimmed[k]), key=lambda k: (self.counts[k], -k))
        totals[k] -= sum(totals) - self.length
        return tuple(totals)

    def moves(self, levels: Levels, givers: Sequence[int], takers: Sequence[int]) -> Iterator[Levels]:
        """Moves from each giver to each taker, in small steps and large ones."""
        spare = self.units(levels) - self.length
        for source in (k for k in givers if levels[k]):
            for step in sorted({1, levels[source] // 8 or 1, levels[source]}):
                for to in takers:
                    if to != source:
                        yield self._moved(levels, source, to, step, spare)

    def _moved(self, levels: Levels, source: int, to: int, step: int, spare: int) -> Levels:
        missing = step * self.counts[source] - spare
        more = max(0, -(-missing // self.counts[to]))
        moved = list(levels)
        moved[source] -= step
        moved[to] += more
        return self.trimmed(moved) if more * self.counts[to] - missing >= self.fewest else tuple(moved)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message of which parts are cut by the length, and parts are not."""

    message: Message
    weight: float  # how often it is sent, of what hides only as far as it is exposed
    others: float  # Σ bytes · largest of the parts that are not
    beside: list[tuple[int, float]]  # of those that are: bytes, and largest by what else cuts them

    def seconds(self, network: Network, largest: float) -> float:
        size = self.message.size
        skewed = self.others + sum(part * max(other, largest) for part, other in self.beside)
        skew = skewed / size if size else 1.0
        return self.weight * network.best(self.message.collective, size, skew).seconds(size, skew)


class _View:
    """The step as a function of the levels of one cut, all others as they are.

    A row of `at_zero` and `per_unit` is a leg, a column a kind: seconds with none of the units, and for each of them.
    """

    def __init__(self, rounding: Rounding, cut: Cut, units: Units) -> None:
        self.length, self.counts, self.network = cut[1], units.counts, rounding.network
        self.ladder = _Ladder(self.length, self.counts)
        levels = np.array(units.levels(cut), dtype=float)
        cut_legs = [(segment, times, s) for segment, times in rounding.legs for by, s in segment.slopes if by == cut]
        shape = (len(cut_legs), len(self.counts))
        self.times = np.array([times for _, times, _ in cut_legs], dtype=float)
        self.per_unit = np.array([slopes for _, _, slopes in cut_legs]).reshape(shape) / self.length
        now = np.array([segment.at(units) for segment, _, _ in cut_legs]).reshape(shape)
        self.at_zero = now - self.per_unit * levels
        self.sent: list[_Sent] = []
        for message, weight in rounding.messages:
            cut_parts = [(size, set(cuts) - {cut}) for cuts, size in message.parts if cut in cuts]
            if cut_parts:
                others = sum(size * units.largest(cuts) for cuts, size in message.parts if cut not in cuts)
                beside = [(size, units.largest(tuple(cuts))) for size, cuts in cut_parts]
                self.sent.append(_Sent(message, weight, others, beside))
        self._sending: dict[float, float] = {}
        memory = rounding.memory
        self.bytes_per_unit = np.array(memory.cut.get(cut, (0,) * len(self.counts)), dtype=float) / self.length
        # The byte more is what `MemoryRows.over` forgives.
        self.room = np.array(memory.limits) - memory.held(units, but=cut) + 1

    def prices(self, many: Sequence[Levels]) -> list[Price]:
        """What each of these levels costs."""
        levels = np.array(many, dtype=float)
        legs = (self.at_zero + self.per_unit * levels[:, None, :]).max(axis=2)
        seconds = legs @ self.times
        over_bytes = np.maximum(self.bytes_per_unit * levels - self.room, 0.0) @ np.array(self.counts, dtype=float)
        largest = sum(self.counts) * levels.max(axis=1) / self.length
        priced = zip(over_bytes.tolist(), seconds.tolist(), largest.tolist(), strict=True)
        return [Price(over, computing + self._sent_s(skew)) for over, computing, skew in priced]

    def _sent_s(self, largest: float) -> float:
        if largest not in self._sending:
            self._sending[largest] = sum(sent.seconds(self.network, largest) for sent in self.sent)
        return self._sending[largest]

    def givers(self, levels: Levels) -> list[int]:
        """Who may give units away: of many kinds those that are last in a leg, hold most, or lack memory most."""
        kinds = range(len(self.counts))
        if len(self.counts) <= _FEW_KINDS:
            return [*kinds]
        ends = self.at_zero + self.per_unit * np.array(levels)
        weights = np.array(self.times * ends.max(axis=1)) if len(ends) else np.zeros(0)
        last = [int(ends[leg].argmax()) for leg in np.argsort(-weights, kind="stable")]
        lacking = self.bytes_per_unit * np.array(levels) - self.room
        first = [int(lacking.argmax())] if lacking.max() > 0 else []
        return [*dict.fromkeys((*first, max(kinds, key=lambda k: (levels[k], -k)), *last))][:_FEW_KINDS]

    def takers(self, levels: Levels) -> list[int]:
        """Who may take more: of many kinds those that would be done first with one unit more, and have room for it."""
        if len(self.counts) <= _FEW_KINDS:
            return [*range(len(self.counts))]
        more = np.array(levels) + 1.0
        ends = self.times @ (self.at_zero + self.per_unit * more)
        ends = np.where(self.bytes_per_unit * more > self.room, np.inf, ends)
        return [int(k) for k in np.argsort(ends, kind="stable")[:_FEW_KINDS]]

    def finish_together(self) -> Levels | None:
        """The levels that finish earliest, if all legs were one: by bisection on the moment, then level by level.

        None if some kind takes any number of units in no time, or memory is too small.
        """
        at_zero, per_unit = self.times @ self.at_zero, self.times @ self.per_unit
        if not (per_unit > 0).all():
            return None
        most = np.full(len(self.counts), float(self.length))
        held = self.bytes_per_unit > 0
        fitting = np.maximum(0.0, np.floor(self.room[held] / self.bytes_per_unit[held]))
        most[held] = np.minimum(most[held], fitting)
        counts = np.array(self.counts, dtype=float)
        if most @ counts < self.length:
            return None

        def by(moment: float) -> np.ndarray:
            levels: np.ndarray = np.minimum(most, np.maximum(0.0, np.floor((moment - at_zero) / per_unit)))
            return levels

        early, late = float(at_zero.min()), float((at_zero + per_unit * (self.length + 1)).max())
        for _ in range(_HALVINGS):
            middle = (early + late) / 2
            early, late = (early, middle) if by(middle) @ counts >= self.length else (middle, late)
        levels = by(early)
        while levels @ counts < self.length:
            levels[int(np.where(levels < most, at_zero + per_unit * (levels + 1), np.inf).argmin())] += 1
        return self.ladder.trimmed([int(q) for q in levels])

    def improved(self, levels: Levels) -> tuple[Price, Levels]:
        """Moves levels from one kind to another while that helps."""
        (price,) = self.prices([levels])
        for _ in range(_MOVES):
            moves = [*self.ladder.moves(levels, self.givers(levels), self.takers(levels))]
            if not moves:
                break
            best = min(zip(self.prices(moves), moves, strict=True))
            if not best[0].beats(price):
                break
            price, levels = best
        return price, levels


# All lengths


class Rounding:
    """Whole units for every cut, near a point; `walk` is the step there."""

    def __init__(
        self, load: FoldedStep, network: Network, memory: MemoryRows, point: FractionalShares, walk: CriticalPath
    ) -> None:
        self.load, self.network, self.memory = load, network, memory
        self.legs = [(load.joined(segments), times) for segments, times in load.stages.items()]
        hiding = sum(walk.prices[number] for number, hides in load.sent if hides)
        in_a_row = sum(times * max(segment.at(point)) for segment, times in self.legs)
        in_a_row += sum(walk.prices[number] for number, hides in load.sent if not hides)
        exposed = min(max((walk.step_s - in_a_row) / hiding, 0.0), 1.0) if hiding else 0.0
        weights: dict[int, float] = {}
        for number, hides in load.sent:
            weights[number] = weights.get(number, 0.0) + (exposed if hides else 1.0)
        self.messages = [(load.messages[k], weight * load.messages[k].times) for k, weight in weights.items()]
        self.cuts = sorted(cut for cut in load.cuts() | set(memory.cut) if cut[1])
        self.by_weight = self._by_weight()
        counts = point.counts
        self.near = Units(tuple((cut, nearest(cut[1], point.of(cut[0]), counts)) for cut in self.cuts), counts)

    def _by_weight(self) -> list[Cut]:
        """Those that decide most come first; the others adapt to them."""
        weight = dict.fromkeys(self.cuts, 0.0)
        for segment, times in self.legs:
            for cut, slopes in segment.slopes:
                if cut in weight:
                    weight[cut] += times * max(slopes)
        return sorted(self.cuts, key=lambda cut: (-weight[cut], cut))

    def price(self, units: Units) -> Price:
        over = sum(count * b for count, b in zip(units.counts, self.memory.over(units), strict=True))
        return Price(over, CriticalPath(self.load, units, self.load.ways(self.network, units)).step_s)

    def best(self, polish: bool) -> tuple[Units, Price]:
        """The nearest units, or something better; without `polish`, sooner."""
        legs = self._by_legs(self.near)
        starts = [self.near, legs]
        few = len(self.near.counts) <= _FEW_KINDS
        starts += [self.near.with_cut(cut, legs.totals[cut]) for cut in (self.cuts if few else self.by_weight[:1])]
        if polish and few:
            starts += [self._by_legs(alone) for alone in self._one_kind_alone()]
        prices = {start: self.price(start) for start in starts}
        units = min(prices, key=prices.__getitem__)
        return self._by_path(units, prices[units]) if polish else (units, prices[units])

    def _one_kind_alone(self) -> Iterator[Units]:
        """Where there are few units, shares mean little: a kind may be better off without any."""
        counts = self.near.counts
        for cut in self.cuts:
            if cut[1] < _FEW * sum(counts):
                for k in range(len(counts)):
                    yield self.near.with_cut(cut, tuple(cut[1] if k == other else 0 for other in range(len(counts))))

    def _by_legs(self, units: Units) -> Units:
        """Cut by cut, the others as they are, until none changes."""
        for _ in range(_SWEEPS):
            before = units
            for cut in self.by_weight:
                view, now = _View(self, cut, units), units.levels(cut)
                together = view.finish_together()
                starts = [now] if together is None else [now, together]
                if len(now) > _FEW_KINDS:
                    starts = [min(zip(view.prices(starts), starts, strict=True))[1]]
                price, levels = min(view.improved(start) for start in starts)
                if price.beats(view.prices([now])[0]):
                    units = units.with_cut(cut, view.ladder.totals(levels))
            if units == before:
                break
        return units

    def _by_path(self, units: Units, price: Price) -> tuple[Units, Price]:
        """Moves of levels while the whole step gets shorter, as long as that is soon done."""
        trials = _EVENTS // (len(self.load.events) * max(len(units.counts) // _FEW_KINDS, 1))
        improved = True
        while improved:
            improved = False
            for cut in self.by_weight:
                view, levels = _View(self, cut, units), units.levels(cut)
                for move in view.ladder.moves(levels, view.givers(levels), view.takers(levels)):
                    trials -= 1
                    if trials <= 0:
                        return units, price
                    trial = units.with_cut(cut, view.ladder.totals(move))
                    if (found := self.price(trial)).beats(price):
                        units, price, improved = trial, found, True
        return units, price
