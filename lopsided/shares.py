"""Unequal shares for a program: a linear program over kinds of devices, then lengths cut in whole units.

In: a `Schedule`, what is held (`Holding`s), a cluster with its network, and reference shares, at which the ways of
collectives are first chosen. Out: `Balance`, with `Shares` that have every length in the schedule cut to the unit.

The one idea: everything is per *kind*. Devices alike have equal shares, so there is one unknown per kind and per name
of shares ("" for work, "state" for what is stored, a segment's name), and 1,024 devices cost what 8 cost.

    minimise    step
    subject to  Σ_k devices_k · share(k, name) = 1                             for every name
                leg ≥ Σ_computes constant + slope · share(k, name)             for every kind k        `_Program._leg`
                largest(names) ≥ devices · share(k, name)                      for every kind and name `_largest`
                step ≥ Σ legs between blocking transfers + Σ blocking          `_Program.in_a_row`
                step ≥ Σ legs + Σ messages on any other path                   `_Program.path`, when violated
                Σ_holdings bytes · (share(k, name) or 1) ≤ limit_k             for every kind          `_held`
    a message   takes latency + bytes · (a + b · largest), by a way that is fixed while the program is solved

A leg is what devices compute from one moment they have in common to another, and lasts as long as the slowest. Equal
legs are one unknown, so depth costs nothing.

Where the paths come from: `timeline` runs a step with clocks t_k (one per kind) and a lane for messages, and is made
of sums and maxima only (`_Walk` does the same to folded parts, and remembers what was the maximum):

    computing                 t_k = t_k + seconds_k
    a blocking message        t_k = lane = max(t, lane) + seconds
    a bucket of gradients     lane = max(t, lane) + seconds                     waited for by the optimizer
    a bucket of parameters    the same                                          waited for by its first consumer
    waiting for a message     t_k = max(t_k, its end)

So a step is its longest path, a convex function of the shares, and every path is a row. Too many to write down: solve
with those known, let the walk say which path is longest there, add it, until no path is longer than the program said.
What a hiding message exposes is what is left of it on the longest path.

Whole units (`_Rounding`): only the largest piece of each kind matters, so the unknowns are levels q_k with
Σ devices_k · q_k ≥ length. For one leg the best levels are all those that finish by the earliest possible moment, found
by bisection (`_View.finish_together`); then units move between kinds while that helps (`_View.improved`), and the
outcome is taken where it beats the largest remainder in the walk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from scipy.optimize import linprog

from lopsided import timeline
from lopsided.cluster import Cluster
from lopsided.collectives import Network, Way
from lopsided.cost import Cut, Scale, Transfer
from lopsided.errors import DoesNotFitError, LopsidedError, SharesError
from lopsided.memory import Holding, describe_excess
from lopsided.placement import Shares
from lopsided.schedule import GATHERS_AT_ONCE, Compute, Item, Schedule

_TIE = 1e-6
"""What full memories and skewed shares cost, in steps: only to choose between shares that are equally fast."""

_EXACT = 1e-9
"""Relative accuracy of a solution."""

_FEW = 4
"""Units per device below which other cuts than those near the shares are tried."""

# Limits that are not usually met: paths added, choices of ways, attempts to fit in whole units, moves of units, sweeps
# over all cuts. And one that is, with a deep model: events walked to make the last improvements.
_PATHS, _CHOICES, _REPAIRS, _MOVES, _SWEEPS, _STEPS = 60, 4, 4, 64, 4, 20_000

PerKind = tuple[float, ...]


class Sizes(Protocol):
    """How large pieces are, per kind of device; `lopsided.cost.Scale` is one."""

    def fractions(self, cut: Cut | None) -> PerKind: ...

    def largest(self, cuts: tuple[Cut, ...]) -> float: ...


@dataclass(frozen=True, slots=True)
class Point:
    """Shares before rounding: for each name, the share of one device of each kind. Unknown names are work."""

    shares: Mapping[str, PerKind]
    counts: tuple[int, ...]

    def of(self, name: str) -> PerKind:
        return self.shares.get(name, self.shares[""])

    def fractions(self, cut: Cut | None) -> PerKind:
        return (1.0,) * len(self.counts) if cut is None else self.of(cut[0])

    def largest(self, cuts: tuple[Cut, ...]) -> float:
        return sum(self.counts) * max(max(self.of(name)) for name, _ in cuts) if cuts else 1.0

    def per_device(self, name: str) -> PerKind:
        return tuple(share for share, count in zip(self.of(name), self.counts, strict=True) for _ in range(count))

    def as_shares(self, totals: Mapping[Cut, Sequence[int]]) -> Shares:
        """Every device's shares, with these units of each kind dealt out to its devices."""
        named = tuple((name, self.per_device(name)) for name in self.shares if name)
        cuts = tuple((name, length, self._dealt(totals[name, length])) for name, length in sorted(totals))
        return Shares(self.per_device(""), named, cuts)

    def _dealt(self, totals: Sequence[int]) -> tuple[int, ...]:
        pieces: list[int] = []
        for total, count in zip(totals, self.counts, strict=True):
            each, more = divmod(total, count)
            pieces += [each + 1] * more + [each] * (count - more)
        return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Balance:
    """The best shares found, and what they promise."""

    shares: Shares
    point: Point  # the shares before rounding, per kind
    objective_s: float  # the step before rounding
    bound_s: float  # no shares are faster, with collectives by the same ways
    rounded_s: float  # the step in whole units
    memory_bytes: PerKind  # of the fullest device of each kind, in whole units
    solves: int


class _Unrounded(Scale):
    """Pieces as large as the shares say, as if every length could be cut anywhere."""

    def fractions(self, cut: Cut | None) -> PerKind:
        return self.expected(cut)


def predicted(schedule: Schedule, network: Network, cluster: Cluster, shares: Shares) -> float:
    """Seconds of a step before lengths are rounded: what the linear program minimises, at any shares."""
    return timeline.run(schedule, network, _Unrounded(cluster, shares)).step_s


# The step, folded


@dataclass(frozen=True, slots=True)
class _Segment:
    """What is computed without a break, per kind: seconds that do not depend on shares, and slopes per cut."""

    constants: PerKind
    slopes: tuple[tuple[Cut, PerKind], ...]

    def at(self, sizes: Sizes) -> list[float]:
        seconds = list(self.constants)
        for cut, slopes in self.slopes:
            for k, fraction in enumerate(sizes.fractions(cut)):
                seconds[k] += slopes[k] * fraction
        return seconds


def _segment(item: Compute) -> _Segment:
    constants = tuple(s.constant for s in item.seconds)
    slopes = tuple(s.slope for s in item.seconds)
    if item.cut is None:
        return _Segment(tuple(a + b for a, b in zip(constants, slopes, strict=True)), ())
    return _Segment(constants, ((item.cut, slopes),))


def _joined(parts: Iterable[_Segment], kinds: int) -> _Segment:
    constants = [0.0] * kinds
    slopes: dict[Cut, list[float]] = {}
    for part in parts:
        constants = [a + b for a, b in zip(constants, part.constants, strict=True)]
        for cut, more in part.slopes:
            slopes[cut] = [a + b for a, b in zip(slopes.get(cut, [0.0] * kinds), more, strict=True)]
    return _Segment(tuple(constants), tuple((cut, tuple(slopes[cut])) for cut in sorted(slopes)))


@dataclass(frozen=True, slots=True)
class _Message:
    """One or more transfers that are sent as one: bytes by what cuts them."""

    collective: str
    parts: tuple[tuple[tuple[Cut, ...], int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.parts)

    def largest(self, sizes: Sizes) -> float:
        """Of the parts together, weighted by bytes: the price of a way is linear in both."""
        return sum(size * sizes.largest(cuts) for cuts, size in self.parts) / self.size if self.size else 1.0

    def way(self, network: Network, sizes: Sizes) -> Way:
        return network.best(self.collective, self.size, self.largest(sizes))


def _message(transfers: Sequence[Transfer]) -> _Message:
    parts: dict[tuple[Cut, ...], int] = {}
    for transfer in transfers:
        parts[transfer.cuts] = parts.get(transfer.cuts, 0) + transfer.whole_bytes
    return _Message(transfers[0].collective, tuple(sorted(parts.items())))


_COMPUTE, _BLOCK, _SEND, _MARK, _AWAIT = "compute", "block", "send", "mark", "await"
_GRADIENTS = -1
"""The mark of the last bucket of gradients; gathers are numbered from 0."""


class _Load:
    """A schedule as events over distinct segments and messages, in the order in which `timeline` meets them."""

    def __init__(self, schedule: Schedule, kinds: int) -> None:
        self.kinds = kinds
        self.events: list[tuple[str, int]] = []
        self._segments: dict[_Segment, int] = {}
        self._messages: dict[_Message, int] = {}
        self._runs: dict[tuple[object, ...], int] = {}
        self._running: list[Compute] = []
        self._gathers = 0
        self._add_pass(schedule.forward)
        self._add_pass(schedule.backward)
        self._add(_AWAIT, _GRADIENTS)
        self._running += schedule.optimizer
        self._flush()
        self.segments, self.messages = tuple(self._segments), tuple(self._messages)

    def _flush(self) -> None:
        if self._running:
            key = tuple((item.cut, item.seconds) for item in self._running)
            if key not in self._runs:
                joined = _joined(map(_segment, self._running), self.kinds)
                self._runs[key] = self._segments.setdefault(joined, len(self._segments))
            self.events.append((_COMPUTE, self._runs[key]))
            self._running = []

    def _add(self, manner: str, number: int) -> None:
        self._flush()
        self.events.append((manner, number))

    def _send(self, manner: str, transfers: Sequence[Transfer]) -> None:
        message = _message(transfers)
        self._add(manner, self._messages.setdefault(message, len(self._messages)))

    def _add_pass(self, items: Sequence[Item]) -> None:
        gathers = _gathers(items)
        first, started = self._gathers, 0
        wanted = {position: number for number, (position, _) in enumerate(gathers)}
        self._gathers += len(gathers)
        filling: dict[str, list[Transfer]] = {}

        def start_gathers(until: int) -> None:
            nonlocal started
            while started < min(until, len(gathers)):
                self._send_together(gathers[started][1])
                self._add(_MARK, first + started)
                started += 1

        start_gathers(GATHERS_AT_ONCE)
        for position, item in enumerate(items):
            if isinstance(item, Compute):
                if position in wanted:
                    start_gathers(min(wanted[position] + GATHERS_AT_ONCE, started + 1))
                    self._add(_AWAIT, first + wanted[position])
                self._running.append(item)
            elif not item.hides:
                self._send(_BLOCK, [item])
            elif not item.ahead:
                bucket = filling.setdefault(item.collective, [])
                bucket.append(item)
                if sum(transfer.whole_bytes for transfer in bucket) >= timeline.BUCKET_BYTES:
                    self._send(_SEND, filling.pop(item.collective))
                    self._add(_MARK, _GRADIENTS)
        start_gathers(len(gathers))
        if len(items) in wanted:
            self._add(_AWAIT, first + wanted[len(items)])
        for bucket in filling.values():
            self._send(_SEND, bucket)
            self._add(_MARK, _GRADIENTS)

    def _send_together(self, transfers: Sequence[Transfer]) -> None:
        for collective in dict.fromkeys(transfer.collective for transfer in transfers):
            self._send(_SEND, [transfer for transfer in transfers if transfer.collective == collective])

    def computed(self, start: int, stop: int) -> tuple[int, ...]:
        """The segments between two events, in an order that is the same for equal legs."""
        return tuple(sorted(number for manner, number in self.events[start:stop] if manner == _COMPUTE))

    @cached_property
    def stages(self) -> dict[tuple[int, ...], int]:
        """What is computed between blocking messages, and how often the same."""
        counts: dict[tuple[int, ...], int] = {}
        blocks = [place for place, (manner, _) in enumerate(self.events) if manner == _BLOCK]
        for start, stop in zip([-1, *blocks], [*blocks, len(self.events)], strict=True):
            segments = self.computed(start + 1, stop)
            if segments:
                counts[segments] = counts.get(segments, 0) + 1
        return counts

    @property
    def sent(self) -> list[tuple[str, int]]:
        return [(manner, number) for manner, number in self.events if manner in (_BLOCK, _SEND)]

    def joined(self, segments: Iterable[int]) -> _Segment:
        return _joined((self.segments[number] for number in segments), self.kinds)

    def cuts(self) -> set[Cut]:
        sent = {cut for message in self.messages for cuts, _ in message.parts for cut in cuts}
        return sent | {cut for segment in self.segments for cut, _ in segment.slopes}

    def ways(self, network: Network, sizes: Sizes) -> tuple[Way, ...]:
        return tuple(message.way(network, sizes) for message in self.messages)


def _gathers(items: Sequence[Item]) -> list[tuple[int, list[Transfer]]]:
    """What is gathered ahead, in the order it is wanted, in buckets, each with the place of its first consumer."""
    found: list[tuple[int, list[Transfer]]] = []
    coming: list[Transfer] = []
    for position, item in enumerate(items):
        if isinstance(item, Transfer):
            coming += [item] if item.ahead else []
        elif coming:
            size = sum(transfer.whole_bytes for transfer in coming)
            if not found or sum(t.whole_bytes for t in found[-1][1]) + size > timeline.BUCKET_BYTES:
                found.append((position, []))
            found[-1][1].extend(coming)
            coming = []
    return [*found, (len(items), coming)] if coming else found


@dataclass(frozen=True, slots=True)
class _Leg:
    """The last part of a path: a message, or what is computed from one event to another."""

    before: _Leg | None
    message: int = -1
    start: int = 0
    stop: int = 0


class _Walk:
    """A step at some sizes: how long it takes, and its longest path."""

    def __init__(self, load: _Load, sizes: Sizes, ways: Sequence[Way]) -> None:
        self.seconds = [segment.at(sizes) for segment in load.segments]
        self.prices = [
            way.seconds(message.size, message.largest(sizes)) for message, way in zip(load.messages, ways, strict=True)
        ]
        self.times = [0.0] * load.kinds
        self.since: list[tuple[_Leg | None, int]] = [(None, 0)] * load.kinds  # each clock's last wait
        self.lane = 0.0  # when it is free
        self.sent: _Leg | None = None  # the path to the end of its last message
        self.marks: dict[int, tuple[float, _Leg | None]] = {}
        for place, (manner, number) in enumerate(load.events):
            self._meet(place, manner, number)
        self.step_s, self.path = self._arrived(len(load.events))

    def _meet(self, place: int, manner: str, number: int) -> None:
        if manner == _COMPUTE:
            self.times = [a + b for a, b in zip(self.times, self.seconds[number], strict=True)]
        elif manner == _MARK:
            self.marks[number] = (self.lane, self.sent)
        elif manner == _AWAIT:
            end, leg = self.marks.get(number, (0.0, None))
            for k, time in enumerate(self.times):
                if end > time:
                    self.times[k], self.since[k] = end, (leg, place)
        else:
            arrived, leg = self._arrived(place)
            if self.lane > arrived:
                arrived, leg = self.lane, self.sent
            self.lane, self.sent = arrived + self.prices[number], _Leg(leg, number)
            if manner == _BLOCK:
                self.times = [self.lane] * len(self.times)
                self.since = [(self.sent, place)] * len(self.times)

    def _arrived(self, place: int) -> tuple[float, _Leg | None]:
        """When the last kind gets to this place, and the path it took."""
        slowest = max(self.times)
        before, start = self.since[self.times.index(slowest)]
        return slowest, _Leg(before, start=start, stop=place)


# Memory


class _Memory:
    """What devices hold, by what cuts it, and what each kind has room for."""

    def __init__(self, cluster: Cluster, holdings: Sequence[Holding], limits: Sequence[float]) -> None:
        self.cluster, self.holdings, self.limits = cluster, holdings, tuple(limits)
        self.counts = tuple(kind.devices for kind in cluster.kinds)
        self.whole = sum(holding.bytes for holding in holdings if holding.cut is None)
        self.cut: dict[Cut, int] = {}
        for holding in holdings:
            if holding.cut is not None:
                self.cut[holding.cut] = self.cut.get(holding.cut, 0) + holding.bytes

    def held(self, sizes: Sizes, *, but: Cut | None = None) -> list[float]:
        """Bytes on the fullest device of each kind, without those of one cut."""
        totals = [float(self.whole)] * len(self.counts)
        for cut, size in self.cut.items():
            if cut != but:
                totals = [a + size * b for a, b in zip(totals, sizes.fractions(cut), strict=True)]
        return totals

    def over(self, sizes: Sizes) -> list[float]:
        """How far each kind is over its limit; a byte is forgiven to arithmetic."""
        room = zip(self.held(sizes), self.limits, strict=True)
        return [held - limit if held > limit + 1 else 0.0 for held, limit in room]

    def tightened(self, over: Sequence[float]) -> _Memory:
        return _Memory(self.cluster, self.holdings, [max(a - b, 1.0) for a, b in zip(self.limits, over, strict=True)])

    def excess(self, shares: Shares, scale: type[Scale]) -> LopsidedError:
        """What does not fit, in words."""
        kinds = zip(self.cluster.kinds, self.limits, strict=True)
        limited = replace(self.cluster, kinds=tuple(replace(k, memory_bytes=max(int(limit), 1)) for k, limit in kinds))
        error = describe_excess(self.holdings, scale(limited, shares))
        return error or DoesNotFitError(
            "the program fills the memory of every device to the last byte",
            where=f"cluster {self.cluster.name}",
            do="use a smaller batch, an optimizer with less state, or more devices",
        )


# The linear program


@dataclass(slots=True)
class _Row:
    """`Σ weights[column] · column + constant`."""

    constant: float = 0.0
    weights: dict[int, float] = field(default_factory=dict)

    def add(self, column: int, weight: float) -> None:
        self.weights[column] = self.weights.get(column, 0.0) + weight


@dataclass(frozen=True, slots=True)
class _Solution:
    point: Point
    step_s: float


class _Program:
    """The rows. The unknown of a share is that of all devices of a kind together; seconds are in units of a step."""

    def __init__(self, load: _Load, limits: _Memory, names: Sequence[str], ways: Sequence[Way], unit_s: float) -> None:
        self.load, self.limits, self.names, self.ways, self.unit_s = load, limits, names, ways, unit_s
        self.counts = limits.counts
        self.columns: dict[tuple[object, ...], int] = {}
        self.rows: list[_Row] = []
        self.full_rows: list[_Row] = []
        for name in names:
            for k in range(load.kinds):
                self._column("share", name, k)
        self.step = self._column("step")
        self._at_most(self.in_a_row(), self.step)
        full = self._column("full")
        self.cost = {self.step: 1.0, full: _TIE}
        for k in range(load.kinds):
            self.full_rows.append(self._held(k))
            self._at_most(self._held(k), full)
        for name in names:
            self.cost[self._largest((name,))] = 0.1 * _TIE / sum(self.counts)

    def _column(self, *key: object) -> int:
        return self.columns.setdefault(key, len(self.columns))

    def _share(self, name: str, k: int) -> int:
        return self.columns["share", self._known(name), k]

    def _known(self, name: str) -> str:
        return name if name in self.names else ""

    def _at_most(self, row: _Row, column: int) -> None:
        row.add(column, -1.0)
        self.rows.append(row)

    def _largest(self, names: Iterable[str]) -> int:
        key = ("largest", *sorted({self._known(name) for name in names}))
        if key not in self.columns:
            column = self._column(*key)
            for name in key[1:]:
                for k, count in enumerate(self.counts):
                    self._at_most(_Row(0.0, {self._share(name, k): sum(self.counts) / count}), column)
        return self.columns[key]

    def _leg(self, segments: tuple[int, ...]) -> int:
        """How long the slowest kind takes for these."""
        if ("leg", segments) not in self.columns:
            column, joined = self._column("leg", segments), self.load.joined(segments)
            for k, count in enumerate(self.counts):
                row = _Row(joined.constants[k] / self.unit_s)
                for (name, _), slopes in joined.slopes:
                    row.add(self._share(name, k), slopes[k] / self.unit_s / count)
                self._at_most(row, column)
        return self.columns["leg", segments]

    def _add_message(self, row: _Row, number: int) -> None:
        message, way = self.load.messages[number], self.ways[number]
        row.constant += way.seconds(message.size, 0.0) / self.unit_s
        for cuts, size in message.parts:
            seconds = way.s_per_largest_byte * size / self.unit_s
            if not cuts:
                row.constant += seconds
            elif seconds:
                row.add(self._largest(name for name, _ in cuts), seconds)

    def in_a_row(self) -> _Row:
        """Stage after stage, with the blocking messages between them: as if what hides took no time."""
        row = _Row()
        for segments, count in self.load.stages.items():
            row.add(self._leg(segments), count)
        for manner, number in self.load.sent:
            if manner == _BLOCK:
                self._add_message(row, number)
        return row

    def path(self, leg: _Leg | None) -> _Row:
        row = _Row()
        while leg is not None:
            if leg.message >= 0:
                self._add_message(row, leg.message)
            elif segments := self.load.computed(leg.start, leg.stop):
                row.add(self._leg(segments), 1.0)
            leg = leg.before
        return row

    def _held(self, k: int) -> _Row:
        """What a device of this kind holds, as a part of its limit."""
        limit = max(self.limits.limits[k], 1.0)
        row = _Row(self.limits.whole / limit)
        for (name, _), size in self.limits.cut.items():
            row.add(self._share(name, k), size / limit / self.counts[k])
        return row

    def best(self) -> tuple[_Solution, int]:
        """The best shares and how many solves they took."""
        solves, solution = 1, self.solve()
        while solves < _PATHS:
            walk = _Walk(self.load, solution.point, self.ways)
            if walk.step_s <= solution.step_s + 10 * _EXACT * self.unit_s:
                break
            self._at_most(self.path(walk.path), self.step)
            solves, solution = solves + 1, self.solve()
        return solution, solves

    def solve(self, *, elastic: bool = False) -> _Solution:
        """The best shares for the paths so far.

        An elastic program always has an answer: the shares with which least memory is missing, whatever the step.
        """
        width, kinds = len(self.columns), self.load.kinds
        rows = [
            *self.rows,
            *(_Row(row.constant - 1.0, {**row.weights, width + k: -1.0}) for k, row in enumerate(self.full_rows)),
        ]
        above = np.zeros((len(rows), width + kinds))
        for place, row in enumerate(rows):
            above[place, list(row.weights)] = list(row.weights.values())
        whole = np.zeros((len(self.names), width + kinds))
        for place, name in enumerate(self.names):
            whole[place, [self._share(name, k) for k in range(kinds)]] = 1.0
        cost = np.zeros(width + kinds)
        if elastic:
            cost[width:] = np.multiply(self.counts, self.limits.limits) / max(self.limits.limits)
        else:
            cost[list(self.cost)] = list(self.cost.values())
        outcome = linprog(
            cost,
            A_ub=above,
            b_ub=[-row.constant for row in rows],
            A_eq=whole,
            b_eq=np.ones(len(self.names)),
            bounds=[(0.0, None)] * width + [(0.0, None if elastic else 0.0)] * kinds,
            method="highs",
            options={"primal_feasibility_tolerance": _EXACT, "dual_feasibility_tolerance": _EXACT},
        )
        if outcome.status == 2 and not elastic:
            raise self.limits.excess(self.solve(elastic=True).point.as_shares({}), _Unrounded)
        if outcome.status != 0:
            raise LopsidedError(
                f"no shares were found: {_SENTENCES.get(outcome.status, 'the solver gave up')}",
                where=f"a linear program of {len(rows)} rows and {width} unknowns",
                do="look for figures in the cluster file that are off by powers of ten",
                solver=str(outcome.message),
            )
        found = [float(x) for x in outcome.x]
        shares = {name: self._cleaned([found[self._share(name, k)] for k in range(kinds)]) for name in self.names}
        return _Solution(Point(shares, self.counts), found[self.step] * self.unit_s)

    def _cleaned(self, parts: Sequence[float]) -> PerKind:
        # The solver's last bits are noise: a share of 1e-12 would keep a device that should rest.
        kept = [part if part > 10 * _EXACT else 0.0 for part in parts]
        return tuple(part / sum(kept) / count for part, count in zip(kept, self.counts, strict=True))


_SENTENCES = {
    1: "the solver came to its limit of iterations",
    2: "no shares sum to one, so some figure is not a number",
    3: "the step can be made shorter without end, so something has a negative price",
    4: "the solver met numbers it cannot tell apart",
}


# Whole units


@dataclass(frozen=True)
class _Units:
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

    def levels(self, cut: Cut) -> tuple[int, ...]:
        """Of each kind, the largest piece of a device."""
        return tuple(-(-total // count) for total, count in zip(self.totals[cut], self.counts, strict=True))

    def fractions(self, cut: Cut | None) -> PerKind:
        return self._fractions.get(cut, self._nothing)

    def largest(self, cuts: tuple[Cut, ...]) -> float:
        return sum(self.counts) * max(max(self.fractions(cut)) for cut in cuts) if cuts else 1.0

    @property
    def _nothing(self) -> PerKind:
        """Of a length of 0, which there is no need to cut."""
        return (0.0,) * len(self.counts)

    def with_cut(self, cut: Cut, totals: tuple[int, ...]) -> _Units:
        return _Units(tuple((other, totals if other == cut else old) for other, old in self.cuts), self.counts)


def nearest(length: int, shares: Sequence[float], counts: Sequence[int]) -> tuple[int, ...]:
    """`lopsided.placement.cut`, by largest remainder, for kinds: the units of all devices of each kind together.

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


_Levels = tuple[int, ...]
_Price = tuple[float, float]
"""Bytes over the limits, and seconds: what fits is better than what is fast."""


class _View:
    """The step as a function of the levels of one cut, all others as they are; hiding messages count for the part of
    them that is exposed."""

    def __init__(self, rounding: _Rounding, cut: Cut, units: _Units) -> None:
        self.length, self.counts, self.network = cut[1], units.counts, rounding.network
        kinds = range(len(self.counts))
        self.legs: list[tuple[int, list[float], list[float]]] = []  # how often, seconds at level 0, seconds a unit
        for segment, count in rounding.legs:
            slopes = dict(segment.slopes).get(cut)
            if slopes is not None:
                at = segment.at(units)
                level = units.levels(cut)
                unit = [slopes[k] / self.length for k in kinds]
                self.legs.append((count, [at[k] - unit[k] * level[k] for k in kinds], unit))
        self.messages: list[tuple[float, str, int, float, list[tuple[int, float]]]] = []
        for message, weight in rounding.messages:
            cut_parts = [(cuts, size) for cuts, size in message.parts if cut in cuts]
            if cut_parts:
                others = sum(size * units.largest(cuts) for cuts, size in message.parts if cut not in cuts)
                beside = [(size, _largest_but(cut, cuts, units)) for cuts, size in cut_parts]
                self.messages.append((weight, message.collective, message.size, others, beside))
        memory = rounding.memory
        self.byte_per_unit = memory.cut.get(cut, 0) / self.length
        self.room = [a - b for a, b in zip(memory.limits, memory.held(units, but=cut), strict=True)]

    def price(self, levels: _Levels) -> _Price:
        devices = sum(self.counts)
        seconds = sum(
            count * max(a + b * q for a, b, q in zip(at, unit, levels, strict=True)) for count, at, unit in self.legs
        )
        largest = devices * max(levels) / self.length
        for weight, collective, size, others, beside in self.messages:
            skew = (others + sum(part * max(other, largest) for part, other in beside)) / size if size else 1.0
            seconds += weight * self.network.best(collective, size, skew).seconds(size, skew)
        parts = zip(self.counts, levels, self.room, strict=True)
        over = sum(count * max(self.byte_per_unit * q - room - 1, 0.0) for count, q, room in parts)
        return over, seconds

    def finish_together(self) -> _Levels | None:
        """The levels that finish earliest, if all legs were one: by bisection on the moment, then level by level."""
        kinds = range(len(self.counts))
        at = [sum(count * leg[k] for count, leg, _ in self.legs) for k in kinds]
        unit = [sum(count * slope[k] for count, _, slope in self.legs) for k in kinds]
        if not all(u > 0 for u in unit):
            return None
        cap = [self.length] * len(self.counts)
        if self.byte_per_unit:
            cap = [min(self.length, max(0, math.floor((room + 1) / self.byte_per_unit))) for room in self.room]
        if self._units(cap) < self.length:
            return None

        def by(moment: float) -> list[int]:
            return [min(cap[k], max(0, math.floor((moment - at[k]) / unit[k]))) for k in kinds]

        early, late = min(at), max(at[k] + unit[k] * (self.length + 1) for k in kinds)
        for _ in range(60):
            middle = (early + late) / 2
            early, late = (early, middle) if self._units(by(middle)) >= self.length else (middle, late)
        levels = by(early)
        while self._units(levels) < self.length:
            k = min((k for k in kinds if levels[k] < cap[k]), key=lambda k: at[k] + unit[k] * (levels[k] + 1))
            levels[k] += 1
        return self._trimmed(levels)

    def _units(self, levels: Sequence[int]) -> int:
        return sum(count * q for count, q in zip(self.counts, levels, strict=True))

    def _trimmed(self, levels: Sequence[int]) -> _Levels:
        """Without levels that are not needed: those of the largest kinds that can be spared go first."""
        kept, spare = list(levels), self._units(levels) - self.length
        for k in sorted(range(len(kept)), key=lambda k: (-self.counts[k], k)):
            less = min(kept[k], spare // self.counts[k])
            kept[k] -= less
            spare -= less * self.counts[k]
        return tuple(kept)

    def totals(self, levels: _Levels) -> tuple[int, ...]:
        """Units of each kind; one kind has fewer than its level allows, as many as there are not."""
        trimmed = self._trimmed(levels)
        totals = [count * q for count, q in zip(self.counts, trimmed, strict=True)]
        k = max((k for k in range(len(totals)) if trimmed[k]), key=lambda k: (self.counts[k], -k))
        totals[k] -= sum(totals) - self.length
        return tuple(totals)

    def improved(self, levels: _Levels) -> tuple[_Price, _Levels]:
        """Moves levels from one kind to another while that helps."""
        price = self.price(levels)
        for _ in range(_MOVES):
            best = min(((self.price(move), move) for move in self.moves(levels)), default=(price, levels))
            if not _better(best[0], price):
                break
            price, levels = best
        return price, levels

    def moves(self, levels: _Levels) -> list[_Levels]:
        """From each kind to each other, in small steps and large ones."""
        kinds = range(len(self.counts))
        steps = [(k, step) for k in kinds for step in sorted({1, levels[k] // 8, levels[k]} - {0}) if step <= levels[k]]
        return [self._moved(levels, k, to, step) for k, step in steps for to in kinds if to != k]

    def _moved(self, levels: _Levels, source: int, to: int, step: int) -> _Levels:
        moved = list(levels)
        moved[source] -= step
        moved[to] += max(0, -(-(self.length - self._units(moved)) // self.counts[to]))
        return self._trimmed(moved)


def _largest_but(cut: Cut, cuts: tuple[Cut, ...], units: _Units) -> float:
    return units.largest(tuple(other for other in cuts if other != cut)) if len(cuts) > 1 else 0.0


def _better(one: _Price, other: _Price) -> bool:
    if one[0] != other[0]:
        return one[0] < other[0]
    return one[1] < other[1] * (1 - 1e-12)


class _Rounding:
    """Whole units for every cut, near a point."""

    def __init__(self, load: _Load, network: Network, memory: _Memory, answer: _Answer) -> None:
        self.load, self.network, self.memory = load, network, memory
        point = answer.point
        self.legs = [(load.joined(segments), count) for segments, count in load.stages.items()]
        sent = [(number, answer.walk.prices[number], manner == _SEND) for manner, number in load.sent]
        hiding = sum(price for _, price, hides in sent if hides)
        in_a_row = sum(count * max(segment.at(point)) for segment, count in self.legs)
        in_a_row += sum(price for _, price, hides in sent if not hides)
        exposed = min(max((answer.walk.step_s - in_a_row) / hiding, 0.0), 1.0) if hiding else 0.0
        weights: dict[int, float] = {}
        for number, _, hides in sent:
            weights[number] = weights.get(number, 0.0) + (exposed if hides else 1.0)
        self.messages = [(load.messages[number], weight) for number, weight in weights.items()]
        self.cuts = sorted(cut for cut in load.cuts() | set(memory.cut) if cut[1])
        counts = point.counts
        self.near = _Units(tuple((cut, nearest(cut[1], point.of(cut[0]), counts)) for cut in self.cuts), counts)

    def price(self, units: _Units) -> _Price:
        over = sum(count * b for count, b in zip(units.counts, self.memory.over(units), strict=True))
        return over, _Walk(self.load, units, self.load.ways(self.network, units)).step_s

    def best(self, polish: bool) -> tuple[_Units, _Price]:
        """By largest remainder, or something better."""
        legs = self._by_legs(self.near)
        starts = [self.near, legs]
        starts += [self.near.with_cut(cut, legs.totals[cut]) for cut in self.cuts]
        if polish:
            starts += [self._by_legs(self.near.with_cut(cut, totals)) for cut, totals in self._one_kind_alone()]
        prices = {start: self.price(start) for start in starts}
        units = min(prices, key=prices.__getitem__)
        return self._by_walk(units, prices[units]) if polish else (units, prices[units])

    def _one_kind_alone(self) -> Iterator[tuple[Cut, tuple[int, ...]]]:
        """Where there are few units, shares mean little: a kind may be better off without any."""
        counts = self.near.counts
        for cut in self.cuts:
            if cut[1] < _FEW * sum(counts):
                for k in range(len(counts)):
                    yield cut, tuple(cut[1] if k == other else 0 for other in range(len(counts)))

    def _by_legs(self, units: _Units) -> _Units:
        """Cut by cut, the others as they are, until none changes."""
        for _ in range(_SWEEPS):
            before = units
            for cut in self._by_weight():
                view = _View(self, cut, units)
                starts = [units.levels(cut), *filter(None, [view.finish_together()])]
                price, levels = min(view.improved(start) for start in starts)
                if _better(price, view.price(units.levels(cut))):
                    units = units.with_cut(cut, view.totals(levels))
            if units == before:
                break
        return units

    def _by_walk(self, units: _Units, price: _Price) -> tuple[_Units, _Price]:
        """Moves of single levels while the whole step gets shorter, as long as that is soon done."""
        left = _STEPS // len(self.load.events)
        improved = True
        while improved and left > 0:
            improved = False
            for cut in self._by_weight():
                view = _View(self, cut, units)
                for levels in view.moves(units.levels(cut)):
                    trial = units.with_cut(cut, view.totals(levels))
                    left -= 1
                    if left > 0 and _better(found := self.price(trial), price):
                        units, price, improved = trial, found, True
        return units, price

    def _by_weight(self) -> list[Cut]:
        """Those that decide most come first; the others adapt to them."""
        weight = dict.fromkeys(self.cuts, 0.0)
        for segment, count in self.legs:
            for cut, slopes in segment.slopes:
                weight[cut] += count * max(slopes)
        return sorted(self.cuts, key=lambda cut: (-weight[cut], cut))


# The answer


def balance(
    schedule: Schedule,
    holdings: Sequence[Holding],
    cluster: Cluster,
    network: Network,
    *,
    reference: Shares,
    names: Sequence[str] | None = None,
    memory_limits: Sequence[float] | None = None,
    judge: Callable[[Shares], float] | None = None,
    polish: bool = True,
) -> Balance:
    """The shares with which a step takes least.

    `names` are those of the shares that may differ from the work shares: every name that occurs, unless given.
    `memory_limits` are bytes for each kind: all of a device's memory, unless given. A `judge` (seconds of a step, at
    shares in whole units) has the last word between the best units and the nearest. Without `polish`, whole units are
    found faster, and are sometimes a little worse.
    """
    limits = [kind.memory_bytes for kind in cluster.kinds] if memory_limits is None else memory_limits
    if len(limits) != len(cluster.kinds):
        raise SharesError(
            f"there are {len(limits)} memory limits for {len(cluster.kinds)} kinds of devices",
            where=f"cluster {cluster.name}",
            do="give one limit per kind",
        )
    load, memory = _Load(schedule, len(cluster.kinds)), _Memory(cluster, holdings, limits)
    if names is None:
        names = sorted({name for name, _ in (*load.cuts(), *memory.cut)})
    names, scale = tuple(dict.fromkeys(("", *names))), Scale(cluster, reference)
    answer = _solved(load, memory, network, names, scale)
    rounding = _Rounding(load, network, memory, answer)
    units, (over, rounded_s) = rounding.best(polish)
    tight, attempts = memory, 0
    while over:
        # Whole units are larger than what they round: leave as much room as was missing.
        does_not_fit = memory.excess(answer.point.as_shares(units.totals), Scale)
        tight, attempts = tight.tightened(memory.over(units)), attempts + 1
        if attempts == _REPAIRS:
            raise does_not_fit
        try:
            answer = _solved(load, tight, network, names, scale)
        except DoesNotFitError:
            raise does_not_fit from None
        rounding = _Rounding(load, network, memory, answer)
        units, (over, rounded_s) = rounding.best(polish)
    shares = answer.point.as_shares(units.totals)
    if judge is not None and units != rounding.near and not any(memory.over(rounding.near)):
        nearer = answer.point.as_shares(rounding.near.totals)
        if judge(nearer) < judge(shares):
            shares, units, rounded_s = nearer, rounding.near, rounding.price(rounding.near)[1]
    held = tuple(memory.held(units))
    return Balance(shares, answer.point, answer.walk.step_s, answer.bound_s, rounded_s, held, answer.solves)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The best shares before rounding, by the cheapest ways there, and what the linear program said of its own."""

    point: Point
    walk: _Walk
    bound_s: float
    solves: int


def _solved(load: _Load, memory: _Memory, network: Network, names: Sequence[str], reference: Sizes) -> _Answer:
    """The program needs fixed ways: the cheapest at the reference. If others are at its answer, again with those."""
    ways = load.ways(network, reference)
    unit_s = _Walk(load, reference, ways).step_s or 1.0
    answers: list[_Answer] = []
    tried: set[tuple[Way, ...]] = set()
    while ways not in tried and len(tried) < _CHOICES:
        tried.add(ways)
        solution, solves = _Program(load, memory, names, ways, unit_s).best()
        ways = load.ways(network, solution.point)
        walk = _Walk(load, solution.point, ways)
        answers.append(_Answer(solution.point, walk, solution.step_s, solves))
    best = min(answers, key=lambda answer: answer.walk.step_s)
    return replace(best, solves=sum(answer.solves for answer in answers))
