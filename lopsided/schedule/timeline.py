"""An event simulation of a training step: the one number all comparisons use.

In: a `PricedStep`, a `Network` and a `Scale` (the shares). Out: `Timeline`: seconds of the step and where they go.

Every kind of device has a lane of computation (devices of a kind do the same at the same time), and all share one
lane of communication, first in, first out, as one stream of a communication library is.

    a transfer that blocks       starts when every kind has arrived and the lane is free; all leave together
    a bucket of gradients        is sent when every kind has arrived at its place in the schedule: its last gradient is
                                 there. Nobody waits for it but the optimizer
    a bucket of parameters       is started likewise, ahead of its use; who takes the first parameter of it waits for it
    the optimizer                starts when all gradients are synchronised
    the step                     ends with the slowest kind

What is sent behind computing is not quite free. As long as anyone computes beside it, it is `Cluster.comm_slowdown`
times as long under way, and takes a part (`Kind.compute_slowdown`) of what those compute meanwhile: communication
threads use the core that computes, kernels of a communication library the multiprocessors. When all stand and wait for
it, the rest of it takes what it takes alone. A slowdown below one says that transfers in a row overlap: then it is the
last in the row alone that takes as long as it does by itself.

A bucket pays the latency once. Its bytes add up, and so does bytes × largest, since the price of an algorithm is linear
in both.

Each lane's time adds up to the step: compute + optimizer + blocking + exposed + waiting. A lane that stands still is
*exposed* to communication while the network is busy with a transfer that should have hidden, and *waits* for slower
devices otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lopsided.cluster.collectives import Network
from lopsided.schedule.cost import Scale, Transfer
from lopsided.schedule.pricing import Computed, PricedStep
from lopsided.schedule.schedule import (
    Bucket,
    Chunked,
    Compute,
    Exchange,
    GatherBucket,
    Item,
    Recompute,
    Redistribute,
    Stretch,
)

NETWORK = "network"

_AS_LATE = 1e-9
"""By this part two lanes may be later by different times, and have moved alike."""

_LEAST_LEFT = 0.05
"""The least part of its speed that a device keeps beside what is sent: one that is slowed down for good never ends."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something on a lane: a kind's name, or "network", of which it also says what is sent how. `id` names the item."""

    lane: str
    what: str
    start_s: float
    end_s: float
    collective: str = ""
    way: str = ""
    whole_bytes: int = 0
    hides: bool = False
    id: str = ""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """How one kind of device spends the step; with `blocking_s` of the timeline, these add up to it."""

    kind: str
    compute_s: float
    optimizer_s: float
    waiting_s: float
    exposed_s: float

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step in seconds: by phase, by lane, and by what the network did."""

    forward_s: float
    backward_s: float  # until all gradients are synchronised
    optimizer_s: float
    lanes: tuple[DeviceTime, ...]  # one per kind
    blocking_s: float
    hiding_s: float  # what could run behind computation, hidden or not
    events: tuple[Event, ...] = ()

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def critical(self) -> DeviceTime:
        """The lane that has most to do."""
        return max(self.lanes, key=lambda lane: lane.busy_s)

    @property
    def compute_s(self) -> tuple[float, ...]:
        return tuple(lane.compute_s for lane in self.lanes)

    @property
    def waiting_s(self) -> tuple[float, ...]:
        return tuple(lane.waiting_s for lane in self.lanes)

    @property
    def exposed_s(self) -> float:
        """How long the critical lane stood still for transfers that should have hidden."""
        return self.critical.exposed_s

    @property
    def hidden_s(self) -> float:
        return max(self.hiding_s - self.exposed_s, 0.0)

    @property
    def breakdown(self) -> dict[str, float]:
        """Where the critical lane's time goes; adds up to the step."""
        lane = self.critical
        return {
            "compute": lane.compute_s,
            "optimizer": lane.optimizer_s,
            "blocking": self.blocking_s,
            "exposed": lane.exposed_s,
            "waiting": lane.waiting_s,
        }


def run(priced: PricedStep, network: Network, scale: Scale, *, events: bool = False) -> Timeline:
    """Simulate one training step."""
    lanes = _Lanes(network, scale, priced.computed, [] if events else None)
    rounds, number, forward = priced.schedule.decisions.microbatches, 0, 0.0
    before: _State | None = None
    while number < rounds:
        there, back = priced.schedule.round(number)
        begun = max(lanes.now)
        lanes.run(there)
        between = tuple(lanes.now)
        forward += max(between) - begun
        lanes.run(back)
        number += 1
        if not events and 1 < number < rounds - 1:
            # All rounds that are left but the last are alike.
            after = lanes.state()
            if before is not None and (later := before.repeats_in(after)) is not None:
                left = rounds - 1 - number
                for times in range(1, left + 1):
                    forward += max(_later(between, later, times)) - max(_later(before.now, later, times))
                lanes.repeat(before, later, left)
                number = rounds - 1
            before = after
    lanes.wait_for(lanes.last_gradients)
    backward = max(lanes.now) - forward
    computed = lanes.computed
    lanes.computed = [0.0] * len(computed)
    lanes.compute(priced.updates)
    end = max(lanes.now)
    kinds = scale.cluster.kinds
    return Timeline(
        forward,
        backward,
        end - forward - backward,
        tuple(
            DeviceTime(
                kind.name, computed[k], lanes.computed[k], lanes.waiting[k] + end - lanes.now[k], lanes.exposed[k]
            )
            for k, kind in enumerate(kinds)
        ),
        lanes.blocking,
        lanes.hiding,
        lanes.all_events(),
    )


@dataclass(slots=True)
class _Hiding:
    """A bucket that is sent: when it starts, and when it ends if computing goes on beside it."""

    bucket: Bucket
    largest: float
    alone_s: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _State:
    """What the rest of a simulation depends on, and what was added up so far."""

    now: tuple[float, ...]
    free: float
    under_way: tuple[tuple[float, float, float], ...]  # of buckets: start, end, and seconds alone
    sent: tuple[int, float]  # buckets, and seconds of what blocks
    sums: tuple[float, ...]

    def repeats_in(self, later: _State) -> tuple[float, ...] | None:
        """By how much every lane is later, if what follows can only be what followed before.

        Either all clocks and all that is under way are later by the same, or each kind computes by itself.
        """
        moved = tuple(b - a for a, b in zip(self.now, later.now, strict=True))
        if self.sent == later.sent and not self.under_way and not later.under_way:
            return moved
        most = max(moved)
        if len(self.under_way) != len(later.under_way):
            return None
        both = zip(self.under_way, later.under_way, strict=True)
        by = [later.free - self.free, *moved, *(b[k] - a[k] for a, b in both for k in (0, 1))]
        same = all(abs(each - most) <= _AS_LATE * most for each in by)
        return moved if same and [a[2] for a in self.under_way] == [b[2] for b in later.under_way] else None


def _later(clocks: Sequence[float], by: Sequence[float], times: int) -> list[float]:
    return [now + times * more for now, more in zip(clocks, by, strict=True)]


class _Lanes:
    """The state of the simulation: plain numbers, one per kind."""

    def __init__(
        self, network: Network, scale: Scale, computed: Mapping[str, Computed], events: list[Event] | None
    ) -> None:
        self.network, self.scale, self.items, self.events = network, scale, computed, events
        self.kinds = [kind.name for kind in scale.cluster.kinds]
        self.left = tuple(max(1 - kind.compute_slowdown, _LEAST_LEFT) for kind in scale.cluster.kinds)
        self.undisturbed = all(left == 1 for left in self.left)
        self.comm_slowdown = network.cluster.comm_slowdown
        self.now = [0.0] * len(self.kinds)
        self.computed, self.waiting, self.exposed = [list(self.now) for _ in range(3)]
        self.free = 0.0  # when the network's lane is, if computing goes on
        self.hiding_ones: list[_Hiding] = []  # in the order they are sent
        self.gathers: dict[str, int] = {}  # numbers of the buckets of parameters among these, by id
        self.last_gradients = -1  # the number of the last bucket of gradients
        self.passed = 0  # how many of these are over for all kinds
        self.over = [0] * len(self.kinds)  # how many are over for each kind
        self.blocking = self.hiding = 0.0
        self._computing: dict[tuple[tuple[int, object], ...], tuple[float, ...]] = {}
        self._sending: dict[tuple[str, float, float], float] = {}

    def run(self, items: Sequence[Item]) -> None:
        """One pass, forward or backward."""
        stretch: list[Computed] = []  # what is computed without a break
        for item in items:
            if isinstance(item, Compute):
                if (computed := self.items.get(item.id)) is not None:
                    stretch.append(computed)
                continue
            if isinstance(item, Recompute | Stretch | Chunked) or (
                isinstance(item, Redistribute)
                and item.bucket not in self.gathers
                and (item.bucket or not item.transfer)
            ):
                continue
            self.compute(stretch)
            stretch = []
            if isinstance(item, Redistribute):
                if item.bucket in self.gathers:
                    self.wait_for(self.gathers[item.bucket])
                elif item.transfer is not None:
                    self.block(item.id, item.transfer)
            elif isinstance(item, Exchange):
                self.block(item.id, item.transfer)
            else:
                self.send(item)
        self.compute(stretch)

    def state(self) -> _State:
        under_way = tuple((one.start, one.end, one.alone_s) for one in self._under_way())
        sums = (*self.computed, *self.waiting, *self.exposed, self.blocking, self.hiding)
        return _State(
            tuple(self.now), max(self.free, min(self.now)), under_way, (len(self.hiding_ones), self.blocking), sums
        )

    def _under_way(self) -> Sequence[_Hiding]:
        """What was sent that somebody still meets."""
        earliest = min(self.now)
        first = next((k for k, one in enumerate(self.hiding_ones) if one.end > earliest), len(self.hiding_ones))
        return self.hiding_ones[first:]

    def repeat(self, before: _State, later: Sequence[float], times: int) -> None:
        """The last round so many times more, after which every lane is `later` by as much each time."""
        for one in self._under_way():
            one.start += times * max(later)
            one.end += times * max(later)
        self.free += times * max(later)
        self.now = _later(self.now, later, times)
        sums = [b + times * (b - a) for a, b in zip(before.sums, self.state().sums, strict=True)]
        kinds = len(self.kinds)
        self.computed, self.waiting, self.exposed = (sums[k * kinds : (k + 1) * kinds] for k in range(3))
        self.blocking, self.hiding = sums[3 * kinds :]

    def compute(self, stretch: Sequence[Computed]) -> None:
        """What is computed without a break, as one; who wants to see each sees it in between."""
        if not stretch:
            return
        if self.events is not None:
            at, over, computed = self.now, list(self.over), self.computed
            for item in stretch:
                before = self.now
                self._compute_for(self._taken([item]))
                what = f"∂{item.node}" if item.backward else item.node
                for kind, start, end in zip(self.kinds, before, self.now, strict=True):
                    self.events.append(Event(kind, what, start, end, id=item.id))
            # The step is the same to the last digit, whoever looks.
            self.now, self.over, self.computed = at, over, computed
        self._compute_for(self._taken(stretch))

    def _taken(self, stretch: Sequence[Computed]) -> tuple[float, ...]:
        """Seconds of each kind, undisturbed. Layers are alike, and added up once."""
        key = tuple((id(item.seconds), item.cut) for item in stretch)
        seconds = self._computing.get(key)
        if seconds is None:
            if len(stretch) == 1:
                fractions = self.scale.fractions(stretch[0].cut)
                seconds = tuple(affine.at(f) for affine, f in zip(stretch[0].seconds, fractions, strict=True))
            else:
                seconds = tuple(map(sum, zip(*(self._taken([item]) for item in stretch), strict=True)))
            self._computing[key] = seconds
        return seconds

    def _compute_for(self, seconds: Sequence[float]) -> None:
        if self.undisturbed:
            ends = [start + taken for start, taken in zip(self.now, seconds, strict=True)]
        else:
            both = enumerate(zip(self.now, seconds, strict=True))
            ends = [self._computed(k, start, taken) for k, (start, taken) in both]
        self.computed = [c + end - start for c, start, end in zip(self.computed, self.now, ends, strict=True)]
        self.now = ends

    def _computed(self, k: int, now: float, seconds: float) -> float:
        """When a kind has computed for so long, beside what is sent meanwhile."""
        left = self.left[k]
        while left < 1 and self.over[k] < len(self.hiding_ones):
            one = self.hiding_ones[self.over[k]]
            if now + seconds <= one.start:
                break
            before = max(one.start - now, 0.0)
            now, seconds = now + before, seconds - before
            if now + seconds / left <= one.end:
                return now + seconds / left
            now, seconds = max(one.end, now), seconds - max(one.end - now, 0.0) * left
            self.over[k] += 1
        return now + seconds

    def block(self, name: str, transfer: Transfer) -> None:
        largest = self.scale.largest(transfer.cuts)
        size = transfer.bytes_among(self.scale.cluster.devices)
        self.stand_for(name, transfer.what, transfer.collective, size, largest)

    def stand_for(self, name: str, what: str, collective: str, size: int, largest: float) -> None:
        """All wait for all, and then for what is sent."""
        self.wait_for(len(self.hiding_ones) - 1)
        start = max(*self.now, self.free)
        self.stand_still(start)
        taken = self.seconds(collective, size, largest)
        self.blocking += taken
        self.free = start + taken
        self.now = [self.free] * len(self.now)
        self.note(name, what, start, self.free, collective, size, largest, hides=False)

    def send(self, bucket: Bucket) -> None:
        """Put a bucket on the network's lane, now that the last kind has arrived."""
        size = bucket.whole_bytes
        skewed = sum(one.whole_bytes * self.scale.largest(one.cuts) for one in bucket.transfers)
        largest = skewed / size if size else 1.0
        if not bucket.hides:
            self.stand_for(bucket.id, bucket.what, bucket.collective, size, largest)
            return
        start = max(*self.now, self.free)
        taken = self.seconds(bucket.collective, size, largest)
        self.hiding += taken
        self.free = start + self.comm_slowdown * taken
        number = len(self.hiding_ones)
        self.hiding_ones.append(_Hiding(bucket, largest, taken, start, self.free))
        if isinstance(bucket, GatherBucket):
            self.gathers[bucket.id] = number
        else:
            self.last_gradients = number

    def wait_for(self, number: int) -> None:
        """All stand still until a bucket has come through. It hurries now that nobody computes beside it."""
        if number < self.passed:
            return
        arrived = clock = max(self.now)
        last, overlapping = len(self.hiding_ones) - 1, min(self.comm_slowdown, 1.0)
        for k, one in enumerate(self.hiding_ones[self.passed :], self.passed):
            if one.end <= arrived:
                continue
            left_s = one.alone_s if one.start >= arrived else (one.end - arrived) / self.comm_slowdown
            one.start = min(one.start, clock)
            awaited = overlapping if k < last else 1.0
            clock = one.end = clock + left_s * (awaited if k <= number else self.comm_slowdown)
        if clock > arrived:
            self.free = clock
        self.stand_still(self.hiding_ones[number].end)
        self.passed = number + 1

    def seconds(self, collective: str, size: int, largest: float) -> float:
        key = (collective, size, largest)
        taken = self._sending.get(key)
        if taken is None:
            taken = self._sending[key] = self.network.best(*key).seconds(size, largest)
        return taken

    def stand_still(self, until: float) -> None:
        earliest = min(self.now)
        if earliest >= until:
            return
        hiding: list[tuple[float, float]] = []  # when the network was busy meanwhile
        for one in reversed(self.hiding_ones):
            if one.end <= earliest:
                break
            hiding.append((one.start, min(one.end, until)))
        for k, now in enumerate(self.now):
            if now < until:
                exposed = 0.0
                for start, end in hiding:
                    exposed += max(end - max(start, now), 0.0)
                self.exposed[k] += exposed
                self.waiting[k] += until - now - exposed
                self.now[k] = until

    def note(
        self, name: str, what: str, start: float, end: float, collective: str, size: int, largest: float, *, hides: bool
    ) -> None:
        if self.events is not None:
            way = self.network.best(collective, size, largest).implementation
            self.events.append(Event(NETWORK, what, start, end, collective, way, size, hides, name))

    def all_events(self) -> tuple[Event, ...]:
        """Those of each lane in the order of time."""
        if self.events is None:
            return ()
        for one in self.hiding_ones:
            sent = one.bucket
            self.note(
                sent.id, sent.what, one.start, one.end, sent.collective, sent.whole_bytes, one.largest, hides=True
            )
        return tuple(sorted(self.events, key=lambda event: (event.start_s, event.end_s)))
