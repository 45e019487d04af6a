"""A step as a function of how large pieces are: its seconds, its longest path, and the bytes it holds.

In: a `PricedStep`, what is held (`Holding`s), and `Sizes`: whole units, or shares before rounding (`FractionalShares`).
Out: `FoldedStep` and `MemoryRows`, from which linear programs are made, and `CriticalPath`, the step at some sizes.

The one idea: a schedule is folded once, and walked for many sizes. What is computed without a break is one `Segment`,
affine in the shares; transfers that are sent together are one `Message`; equal ones are kept once, so depth costs
little. A walk meets the same events in the same order as `timeline`, with clocks t_k (one per kind) and a lane for
messages. All it does is add and take maxima, and it remembers what was the maximum:

    computing                 t_k = t_k + Σ constant + slope · fraction_k        `Segment.at`
    a blocking message        t_k = lane = max(t, lane) + seconds                `CriticalPath._meet`
    a bucket of gradients     lane = max(t, lane) + seconds                      waited for by the optimizer
    a bucket of parameters    the same                                           waited for by its first consumer
    either of them            t_k += slowdown_k · its seconds beside computing       `FoldedStep._send`
    waiting for a message     t_k = max(t_k, its end)
    seconds of a message      latency + bytes · (a + b · largest)                `Message.largest`
    the step                  max(t), the length of its longest path             `CriticalPath.path`
    bytes on a kind           Σ_holdings bytes · (fraction_k or 1)               `MemoryRows.held`

Of many rounds all but the first and the last are folded into one that takes as long as they do together: every segment
and message of it counts so many times.

So a step is a convex function of the shares as long as messages keep their ways, and every path is a lower bound.
Where sending drags on computing or is stretched by it, a walk is an approximation: it charges all of the drag when
something is sent, and has it under way as if nobody computed. The timeline, which decides, knows better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import Algorithm, Network
from lopsided.errors import DoesNotFitError
from lopsided.ir.placement import Shares
from lopsided.schedule.cost import Cut, Scale, Transfer
from lopsided.schedule.excess import describe_excess
from lopsided.schedule.memory import Holding, Kinds
from lopsided.schedule.pricing import Computed, PricedStep
from lopsided.schedule.schedule import (
    Bucket,
    Compute,
    Exchange,
    GatherBucket,
    Item,
    Redistribute,
)

PerKind = tuple[float, ...]


class Sizes(Protocol):
    """How large pieces are, per kind of device; `lopsided.schedule.cost.Scale` is one."""

    def fractions(self, cut: Cut | None) -> PerKind: ...

    def largest(self, cuts: tuple[Cut, ...]) -> float: ...


@dataclass(frozen=True, slots=True)
class FractionalShares:
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


# The schedule, folded


@dataclass(frozen=True, slots=True)
class Segment:
    """What is computed without a break, per kind: seconds that do not depend on shares, and slopes per cut."""

    constants: PerKind
    slopes: tuple[tuple[Cut, PerKind], ...]

    def repeated(self, times: int) -> Segment:
        if times == 1:
            return self
        slopes = tuple((cut, tuple(times * each for each in every)) for cut, every in self.slopes)
        return Segment(tuple(times * each for each in self.constants), slopes)

    def at(self, sizes: Sizes) -> list[float]:
        """Seconds of each kind."""
        seconds = list(self.constants)
        for cut, slopes in self.slopes:
            for k, fraction in enumerate(sizes.fractions(cut)):
                seconds[k] += slopes[k] * fraction
        return seconds


def _segment(item: Computed) -> Segment:
    constants = tuple(s.constant for s in item.seconds)
    slopes = tuple(s.slope for s in item.seconds)
    if item.cut is None:
        return Segment(tuple(a + b for a, b in zip(constants, slopes, strict=True)), ())
    return Segment(constants, ((item.cut, slopes),))


def _joined(parts: Iterable[Segment], kinds: int) -> Segment:
    constants = [0.0] * kinds
    slopes: dict[Cut, list[float]] = {}
    for part in parts:
        constants = [a + b for a, b in zip(constants, part.constants, strict=True)]
        for cut, more in part.slopes:
            slopes[cut] = [a + b for a, b in zip(slopes.get(cut, [0.0] * kinds), more, strict=True)]
    return Segment(tuple(constants), tuple((cut, tuple(slopes[cut])) for cut in sorted(slopes)))


@dataclass(frozen=True, slots=True)
class Message:
    """One or more transfers that are sent as one: bytes by what cuts them. What stands for several rounds is sent so
    many times."""

    collective: str
    parts: tuple[tuple[tuple[Cut, ...], int], ...]
    times: int = 1

    @property
    def size(self) -> int:
        return sum(size for _, size in self.parts)

    def largest(self, sizes: Sizes) -> float:
        """The largest piece of the parts together, weighted by bytes: the price of a way is linear in both."""
        return sum(size * sizes.largest(cuts) for cuts, size in self.parts) / self.size if self.size else 1.0

    def way(self, network: Network, sizes: Sizes) -> Algorithm:
        return network.best(self.collective, self.size, self.largest(sizes))

    def seconds(self, way: Algorithm, largest: float) -> float:
        """In all, by this way."""
        return self.times * way.seconds(self.size, largest)


def _message(transfers: Sequence[Transfer], devices: int, times: int) -> Message:
    parts: dict[tuple[Cut, ...], int] = {}
    for transfer in transfers:
        parts[transfer.cuts] = parts.get(transfer.cuts, 0) + transfer.bytes_among(devices)
    return Message(transfers[0].collective, tuple(sorted(parts.items())), times)


_COMPUTE, _BLOCK, _SEND, _MARK, _AWAIT = "compute", "block", "send", "mark", "await"
_GRADIENTS = -1
"""The mark of the last bucket of gradients; buckets of parameters are numbered from 0."""


def _rounds(count: int) -> list[tuple[int, int]]:
    """The rounds that are folded one by one, and for how many each stands.

    >>> _rounds(3), _rounds(8)
    ([(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 6), (7, 1)])
    """
    return [(0, 1), (1, count - 2), (count - 1, 1)] if count > 2 else [(number, 1) for number in range(count)]


class FoldedStep:
    """A schedule as events over distinct segments and messages, in the order in which `timeline` meets them."""

    def __init__(self, priced: PricedStep, network: Network) -> None:
        self.kinds = len(network.cluster.kinds)
        self._network, self._slowdowns = network, tuple(kind.compute_slowdown for kind in network.cluster.kinds)
        self._computed = priced.computed
        self.events: list[tuple[str, int]] = []
        self._segments: dict[Segment, int] = {}
        self._messages: dict[Message, int] = {}
        self._runs: dict[tuple[object, ...], int] = {}  # layers are alike, and joined once
        self._running: list[Computed] = []
        self._awaited = 0
        self._gathers: dict[str, int] = {}  # numbers of the buckets of parameters that were sent last, by id
        self._gathered = 0  # how many buckets of parameters were sent
        self._times = 1  # what is added counts so often
        for number, times in _rounds(priced.schedule.decisions.microbatches):
            if times != self._times:
                self._flush()
                self._times = times
            for items in priced.schedule.round(number):
                self._add_pass(items)
        self._add(_AWAIT, _GRADIENTS)
        self._running += priced.updates
        self._flush()
        self.segments, self.messages = tuple(self._segments), tuple(self._messages)

    def _flush(self) -> None:
        if self._running:
            # Calls that are alike have the same prices, not only equal ones: comparing these would take longer.
            key = (self._times, *((item.cut, id(item.seconds)) for item in self._running))
            if key not in self._runs:
                joined = _joined(map(_segment, self._running), self.kinds).repeated(self._times)
                self._runs[key] = self._segments.setdefault(joined, len(self._segments))
            self.events.append((_COMPUTE, self._runs[key]))
            self._running = []

    def _add(self, manner: str, number: int) -> None:
        self._flush()
        self.events.append((manner, number))

    def _send(self, manner: str, transfers: Sequence[Transfer]) -> None:
        message = _message(transfers, self._network.cluster.devices, self._times)
        self._add(manner, self._messages.setdefault(message, len(self._messages)))
        if manner == _SEND and any(self._slowdowns):
            # In equal pieces: handling bytes takes what it takes, however unequal they are.
            alone_s = self._network.best(message.collective, message.size).seconds(message.size)
            taken = self._times * alone_s * self._network.cluster.comm_slowdown
            segment = Segment(tuple(taken * slowdown for slowdown in self._slowdowns), ())
            self.events.append((_COMPUTE, self._segments.setdefault(segment, len(self._segments))))

    def _add_pass(self, items: Sequence[Item]) -> None:
        """Forward or backward. What is sent when, and with what else, is as the schedule has it."""
        for item in items:
            if isinstance(item, Compute):
                if (computed := self._computed.get(item.id)) is not None:
                    self._running.append(computed)
            elif isinstance(item, Redistribute):
                if item.bucket in self._gathers:
                    self._await(self._gathers[item.bucket])
                elif not item.bucket and item.transfer is not None:
                    self._send(_BLOCK, [item.transfer])
            elif isinstance(item, Exchange):
                self._send(_BLOCK, [item.transfer])
            elif isinstance(item, Bucket):
                self._send(_SEND if item.hides else _BLOCK, item.transfers)
                if item.hides and isinstance(item, GatherBucket):
                    self._gathers[item.id] = self._gathered
                    self._gathered += 1
                    self._add(_MARK, self._gathers[item.id])
                elif item.hides:
                    self._add(_MARK, _GRADIENTS)

    def _await(self, number: int) -> None:
        """Only the first who takes something of a bucket waits for it."""
        if number >= self._awaited:
            self._awaited = number + 1
            self._add(_AWAIT, number)

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
    def sent(self) -> list[tuple[int, bool]]:
        """Every message that is sent, and whether it hides."""
        return [(number, manner == _SEND) for manner, number in self.events if manner in (_BLOCK, _SEND)]

    def joined(self, segments: Iterable[int]) -> Segment:
        return _joined((self.segments[number] for number in segments), self.kinds)

    def cuts(self) -> set[Cut]:
        sent = {cut for message in self.messages for cuts, _ in message.parts for cut in cuts}
        return sent | {cut for segment in self.segments for cut, _ in segment.slopes}

    def ways(self, network: Network, sizes: Sizes) -> tuple[Algorithm, ...]:
        return tuple(message.way(network, sizes) for message in self.messages)


# The step at some sizes


@dataclass(frozen=True, slots=True)
class Path:
    """What decides when something ends: a message, or what is computed from one event to another, after what is before.

    Linked from its end, because paths that part have their beginnings in common.
    """

    before: Path | None
    message: int = -1  # the number of a message; -1: it is none
    start: int = 0
    stop: int = 0


class CriticalPath:
    """A step at some sizes: how long it takes, and its longest path."""

    def __init__(self, load: FoldedStep, sizes: Sizes, ways: Sequence[Algorithm]) -> None:
        self.seconds = [segment.at(sizes) for segment in load.segments]
        self.prices = [
            message.seconds(way, message.largest(sizes)) for message, way in zip(load.messages, ways, strict=True)
        ]
        self.times = [0.0] * load.kinds
        self.since: list[tuple[Path | None, int]] = [(None, 0)] * load.kinds  # each clock's last wait
        self.lane = 0.0  # when the network is free
        self.sent: Path | None = None  # the path to the end of its last message
        self.marks: dict[int, tuple[float, Path | None]] = {}
        for place, (manner, number) in enumerate(load.events):
            self._meet(place, manner, number)
        self.step_s, self.path = self._arrived(len(load.events))

    def _meet(self, place: int, manner: str, number: int) -> None:
        if manner == _COMPUTE:
            self.times = [a + b for a, b in zip(self.times, self.seconds[number], strict=True)]
        elif manner == _MARK:
            self.marks[number] = (self.lane, self.sent)
        elif manner == _AWAIT:
            end, path = self.marks.get(number, (0.0, None))  # there may be no gradients
            for k, time in enumerate(self.times):
                if end > time:
                    self.times[k], self.since[k] = end, (path, place)
        else:
            start, path = self._arrived(place)
            if self.lane > start:
                start, path = self.lane, self.sent
            self.lane, self.sent = start + self.prices[number], Path(path, number)
            if manner == _BLOCK:
                self.times = [self.lane] * len(self.times)
                self.since = [(self.sent, place)] * len(self.times)

    def _arrived(self, place: int) -> tuple[float, Path]:
        """When the last kind gets to this place, and the path it took."""
        slowest = max(self.times)
        before, start = self.since[self.times.index(slowest)]
        return slowest, Path(before, start=start, stop=place)


# Memory


class MemoryRows:
    """What devices hold, by what cuts it, and what each kind has room for."""

    def __init__(self, cluster: Cluster, holdings: Sequence[Holding], limits: Sequence[float]) -> None:
        # What is fetched for the update comes when activations have gone: it takes their room.
        holdings = tuple(holding for holding in holdings if holding.use != "streamed")
        self.cluster, self.holdings, self.limits = cluster, holdings, tuple(limits)
        self.counts = tuple(kind.devices for kind in cluster.kinds)
        nothing = (0,) * len(self.counts)
        here = {on: tuple(map(on.have, range(len(self.counts)))) for on in {holding.on for holding in holdings}}
        totals: dict[tuple[Cut | None, Kinds], int] = {}
        for holding in holdings:
            key = (holding.cut, holding.on)
            totals[key] = totals.get(key, 0) + holding.bytes
        # Bytes on each kind, in whole tensors.
        by_cut: dict[Cut | None, tuple[int, ...]] = {}
        for (cut, on), size in totals.items():
            before = by_cut.get(cut, nothing)
            by_cut[cut] = tuple(a + size * has for a, has in zip(before, here[on], strict=True))
        self.whole = by_cut.get(None, nothing)
        self.cut: dict[Cut, tuple[int, ...]] = {cut: sizes for cut, sizes in by_cut.items() if cut is not None}

    def held(self, sizes: Sizes, *, but: Cut | None = None) -> list[float]:
        """Bytes on the fullest device of each kind, without those of one cut."""
        totals = [float(size) for size in self.whole]
        for cut, each in self.cut.items():
            if cut != but:
                totals = [a + size * b for a, size, b in zip(totals, each, sizes.fractions(cut), strict=True)]
        return totals

    def over(self, sizes: Sizes) -> list[float]:
        """How far each kind is over its limit; a byte is forgiven to arithmetic."""
        room = zip(self.held(sizes), self.limits, strict=True)
        return [held - limit if held > limit + 1 else 0.0 for held, limit in room]

    def tightened(self, over: Sequence[float]) -> MemoryRows:
        """The limits with so many bytes less room."""
        return MemoryRows(
            self.cluster, self.holdings, [max(a - b, 1.0) for a, b in zip(self.limits, over, strict=True)]
        )

    def excess(self, shares: Shares, scale: type[Scale]) -> DoesNotFitError:
        """What does not fit, in words."""
        error = describe_excess(self.holdings, scale(self.cluster, shares), [int(limit) for limit in self.limits])
        return error or DoesNotFitError(
            "the program fills the memory of every device to the last byte",
            where=f"cluster {self.cluster.name}",
            do="use a smaller batch, an optimizer with less state, or more devices",
        )
