"""Unequal shares for a program: a linear program over kinds of devices, then lengths cut in whole units.

In: a `PricedStep`, what is held (`Holding`s), a cluster with its network, and reference shares, at which the ways of
collectives are first chosen. Out: `Balance`, with `Shares` that have every length in the schedule cut to the unit.

The one idea: everything is per *kind*. Devices alike have equal shares, so there is one unknown per kind and per name
of shares ("" for work, "state" for what is stored, a segment's name), and 1,024 devices cost what 8 cost.

    minimise    step
    subject to  Σ_k devices_k · share(k, name) = 1                        for every name            `_whole`
                leg ≥ Σ_computes constant + slope · share(k, name)        for every kind k          `_leg`
                largest(names) ≥ devices · share(k, name)                 for every kind and name   `_largest`
                step ≥ Σ legs between blocking transfers + Σ blocking                               `_in_a_row`
                step ≥ Σ legs + Σ messages on any other path              when violated             `_along`
                Σ_holdings bytes · (share(k, name) or 1) ≤ limit_k        for every kind            `_held`
    a message   takes latency + bytes · (a + b · largest), by a way that is fixed while the program is solved

A leg is what devices compute from one moment they have in common to another, and lasts as long as the slowest. Equal
legs are one unknown, so depth costs nothing.

A step is its longest path (`critical_path`), and every path is a row. Too many to write down: solve with those known,
let the walk say which path is longest there, add it, until no path is longer than the program said
(`_LinearProgram.best`). What a hiding message exposes is what is left of it on the longest path.

The answer is rounded to whole units (`rounding`). Those may not fit where fractions do: then the program is
solved again with less room (`balance`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import linprog

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import Algorithm, Network
from lopsided.errors import DoesNotFitError, LopsidedError, SharesError
from lopsided.ir.placement import Shares
from lopsided.planner.rounding import Price, Rounding, Units
from lopsided.schedule.cost import Cut, Scale
from lopsided.schedule.critical_path import CriticalPath, FoldedStep, FractionalShares, MemoryRows, Path, PerKind, Sizes
from lopsided.schedule.memory import Holding
from lopsided.schedule.pricing import PricedStep

_TIE = 1e-6
"""What full memories and skewed shares cost, in steps: only to choose between shares that are equally fast."""

_EXACT = 1e-9
"""Relative accuracy of a solution."""

# Limits that are not usually met: paths added, choices of ways, attempts to fit in whole units.
_PATHS, _CHOICES, _ATTEMPTS = 60, 4, 4


@dataclass(frozen=True, slots=True)
class Balance:
    """The best shares found, and what they promise."""

    shares: Shares
    point: FractionalShares  # the shares before rounding, per kind
    objective_s: float  # the step before rounding
    bound_s: float  # no shares are faster, with collectives by the same ways
    rounded_s: float  # the step in whole units
    memory_bytes: PerKind  # of the fullest device of each kind, in whole units
    solves: int


class NoSharesFitError(DoesNotFitError):
    """No shares of a program fit; with the `nearest` least memory is missing."""

    nearest: Shares


def _none_fit(memory: MemoryRows, nearest: Shares, scale: type[Scale]) -> NoSharesFitError:
    told = memory.excess(nearest, scale)
    error = NoSharesFitError(told.what, where=told.where, do=told.do, **told.facts)
    error.nearest = nearest
    return error


# The linear program


class _Unrounded(Scale):
    """Pieces as large as the shares say, as if every length could be cut anywhere."""

    def fractions(self, cut: Cut | None) -> PerKind:
        return self.expected(cut)


@dataclass(slots=True)
class _Row:
    """`Σ weights[column] · column + constant`."""

    constant: float = 0.0
    weights: dict[int, float] = field(default_factory=dict)

    def add(self, column: int, weight: float) -> None:
        self.weights[column] = self.weights.get(column, 0.0) + weight


@dataclass(frozen=True, slots=True)
class _Solution:
    point: FractionalShares
    step_s: float


class _LinearProgram:
    """Rows that are at most 0. The unknown of a share is that of all devices of a kind together, and seconds are in
    units of a step: the solver's tolerances are absolute, so figures should be near 1."""

    def __init__(
        self, load: FoldedStep, memory: MemoryRows, names: Sequence[str], ways: Sequence[Algorithm], unit_s: float
    ) -> None:
        self.load, self.memory, self.names, self.ways, self.unit_s = load, memory, names, ways, unit_s
        self.counts = memory.counts
        self.columns: dict[tuple[object, ...], int] = {}
        self.rows: list[_Row] = []
        for name in names:
            for k in range(load.kinds):
                self._column("share", name, k)
        self.step = self._column("step")
        self._at_most(self._in_a_row(), self.step)
        full = self._column("full")
        self.cost = {self.step: 1.0, full: _TIE}
        for k in range(load.kinds):
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
        row.constant += message.seconds(way, 0.0) / self.unit_s
        for cuts, size in message.parts:
            seconds = message.times * way.s_per_largest_byte * size / self.unit_s
            if not cuts:
                row.constant += seconds
            elif seconds:
                row.add(self._largest(name for name, _ in cuts), seconds)

    def _in_a_row(self) -> _Row:
        """Stage after stage, with the blocking messages between them: as if what hides took no time."""
        row = _Row()
        for segments, count in self.load.stages.items():
            row.add(self._leg(segments), count)
        for number, hides in self.load.sent:
            if not hides:
                self._add_message(row, number)
        return row

    def _along(self, path: Path | None) -> _Row:
        row = _Row()
        while path is not None:
            if path.message >= 0:
                self._add_message(row, path.message)
            elif segments := self.load.computed(path.start, path.stop):
                row.add(self._leg(segments), 1.0)
            path = path.before
        return row

    def _held(self, k: int) -> _Row:
        """What a device of this kind holds, as a part of its limit."""
        limit = max(self.memory.limits[k], 1.0)
        row = _Row(self.memory.whole[k] / limit)
        for (name, _), sizes in self.memory.cut.items():
            row.add(self._share(name, k), sizes[k] / limit / self.counts[k])
        return row

    def best(self) -> tuple[_Solution, int]:
        """The best shares and how many solves they took."""
        solves, solution = 1, self.solve()
        while solves < _PATHS:
            walk = CriticalPath(self.load, solution.point, self.ways)
            if walk.step_s <= solution.step_s + 10 * _EXACT * self.unit_s:
                break
            self._at_most(self._along(walk.path), self.step)
            solves, solution = solves + 1, self.solve()
        return solution, solves

    def solve(self, *, elastic: bool = False) -> _Solution:
        """The best shares for the paths so far.

        An elastic program always has an answer: the shares with which least memory is missing, whatever the step.
        """
        # The last columns are what each kind lacks, as a part of its limit. They move as paths bring new columns, so
        # the rows they are in are made anew.
        kinds, lacking = self.load.kinds, len(self.columns)
        rows = list(self.rows)
        for k in range(kinds):
            row = self._held(k)
            row.constant -= 1.0
            row.add(lacking + k, -1.0)
            rows.append(row)
        width = lacking + kinds
        matrix = np.zeros((len(rows), width))
        for place, row in enumerate(rows):
            matrix[place, list(row.weights)] = list(row.weights.values())
        cost = np.zeros(width)
        if elastic:
            cost[lacking:] = np.multiply(self.counts, self.memory.limits) / max(self.memory.limits)
        else:
            cost[list(self.cost)] = list(self.cost.values())
        outcome = linprog(
            cost,
            A_ub=matrix,
            b_ub=[-row.constant for row in rows],
            A_eq=self._whole(width),
            b_eq=np.ones(len(self.names)),
            bounds=[(0.0, None)] * lacking + [(0.0, None if elastic else 0.0)] * kinds,
            method="highs",
            options={"primal_feasibility_tolerance": _EXACT, "dual_feasibility_tolerance": _EXACT},
        )
        if outcome.status == 2 and not elastic:
            raise _none_fit(self.memory, self.solve(elastic=True).point.as_shares({}), _Unrounded)
        if outcome.status != 0:
            raise LopsidedError(
                f"no shares were found: {_SENTENCES.get(outcome.status, 'the solver gave up')}",
                where=f"a linear program of {len(rows)} rows and {lacking} unknowns",
                do="look for figures in the cluster file that are off by powers of ten",
                solver=str(outcome.message),
            )
        found = [float(x) for x in outcome.x]
        shares = {name: self._cleaned([found[self._share(name, k)] for k in range(kinds)]) for name in self.names}
        return _Solution(FractionalShares(shares, self.counts), found[self.step] * self.unit_s)

    def _whole(self, width: int) -> np.ndarray:
        """The rows that sum the shares of each name."""
        rows = np.zeros((len(self.names), width))
        for row, name in zip(rows, self.names, strict=True):
            row[[self._share(name, k) for k in range(self.load.kinds)]] = 1.0
        return rows

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


# The answer


def balance(
    priced: PricedStep,
    holdings: Sequence[Holding],
    cluster: Cluster,
    network: Network,
    *,
    reference: Shares,
    names: Sequence[str] | None = None,
    tied: Collection[str] = (),
    memory_limits: Sequence[float] | None = None,
    judge: Callable[[Shares], float] | None = None,
    polish: bool = True,
) -> Balance:
    """The shares with which a step takes least.

    `names` are those of the shares that may differ from the work shares: every name that occurs, unless given, but
    those that are `tied` to the work shares.
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
    load, memory = FoldedStep(priced, network), MemoryRows(cluster, holdings, limits)
    if names is None:
        names = sorted({name for name, _ in (*load.cuts(), *memory.cut)} - {*tied})
    names, scale = tuple(dict.fromkeys(("", *names))), Scale(cluster, reference)

    def rounded(room: MemoryRows) -> tuple[_Answer, Rounding, Units, Price]:
        answer = _solved(load, room, network, names, scale)
        rounding = Rounding(load, network, memory, answer.point, answer.walk)
        return answer, rounding, *rounding.best(polish)

    answer, rounding, units, price = rounded(memory)
    tight, attempts = memory, 1
    while price.over_bytes:
        does_not_fit = _none_fit(memory, answer.point.as_shares(units.totals), Scale)
        if attempts == _ATTEMPTS:
            raise does_not_fit
        # Whole units are larger than what they round: leave as much room as was missing.
        tight, attempts = tight.tightened(memory.over(units)), attempts + 1
        try:
            answer, rounding, units, price = rounded(tight)
        except DoesNotFitError:
            raise does_not_fit from None
    near = rounding.near
    if judge is not None and units != near and not any(memory.over(near)):
        as_shares = answer.point.as_shares
        if judge(as_shares(near.totals)) < judge(as_shares(units.totals)):
            units, price = near, rounding.price(near)
    return Balance(
        answer.point.as_shares(units.totals),
        answer.point,
        objective_s=answer.walk.step_s,
        bound_s=answer.bound_s,
        rounded_s=price.seconds,
        memory_bytes=tuple(memory.held(units)),
        solves=answer.solves,
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """The best shares before rounding, by the cheapest ways there, and what the linear program said of its own."""

    point: FractionalShares
    walk: CriticalPath
    bound_s: float
    solves: int


def _solved(load: FoldedStep, memory: MemoryRows, network: Network, names: Sequence[str], reference: Sizes) -> _Answer:
    """The program needs fixed ways: the cheapest at the reference. If others are at its answer, again with those."""
    ways = load.ways(network, reference)
    unit_s = CriticalPath(load, reference, ways).step_s or 1.0
    answers: list[_Answer] = []
    tried: set[tuple[Algorithm, ...]] = set()
    while ways not in tried and len(tried) < _CHOICES:
        tried.add(ways)
        solution, solves = _LinearProgram(load, memory, names, ways, unit_s).best()
        ways = load.ways(network, solution.point)
        walk = CriticalPath(load, solution.point, ways)
        answers.append(_Answer(solution.point, walk, solution.step_s, solves))
    best = min(answers, key=lambda answer: answer.walk.step_s)
    return replace(best, solves=sum(answer.solves for answer in answers))
