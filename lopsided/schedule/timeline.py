"""An event simulation of a training step: the one number all comparisons use.

In: a `Schedule`, a `Network` and a `Scale` (the shares). Out: `Timeline`: seconds of the step and where they go.

Every kind of device has a lane of computation (devices of a kind do the same at the same time), and all share one
lane of communication, first in, first out, as one stream of a communication library is.

    a transfer that blocks       starts when every kind has arrived and the lane is free; all leave together
    a gradient                   joins a bucket of its collective. A full bucket (`Schedule.bucket_bytes`) is sent when
                                 its last gradient is there on every kind; nobody waits for it but the optimizer
    a gathered parameter         is gathered together with what the next consumers need, up to as much. Two such buckets
                                 exist at once: the next is started when the consumer of the one before it begins. The
                                 consumer waits for its own
    the optimizer                starts when all gradients are synchronised
    the step                     ends with the slowest kind

What is sent behind computing is not quite free. As long as anyone computes beside it, it is `Cluster.stretch` times as
long under way, and takes a part (`Kind.drag`) of what those compute meanwhile: communication threads use the core that
computes, kernels of a communication library the multiprocessors. When all stand and wait for it, the rest of it takes
what it takes alone. A stretch below one says that transfers in a row overlap: then it is the last in the row alone that
takes as long as it does by itself.

A bucket pays the latency once. Its bytes add up, and so does bytes × largest, since the price of a way is linear in
both.

Each lane's time adds up to the step: compute + optimizer + blocking + exposed + waiting. A lane that stands still is
*exposed* to communication while the network is busy with a transfer that should have hidden, and *waits* for slower
devices otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lopsided.cluster.collectives import Network
from lopsided.schedule.cost import Scale, Transfer
from lopsided.schedule.layout import BUCKET_BYTES, GATHERS_AT_ONCE, Compute, Item, Schedule

NETWORK = "network"

_LEAST_LEFT = 0.05  # of computing beside what is sent


@dataclass(frozen=True, slots=True)
class Event:
    """Something on a lane: a kind's name, or "network", of which it also says what is sent how."""

    lane: str
    what: str
    start_s: float
    end_s: float
    collective: str = ""
    way: str = ""
    whole_bytes: int = 0
    hides: bool = False


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


def run(schedule: Schedule, network: Network, scale: Scale, *, events: bool = False) -> Timeline:
    """One training step."""
    lanes = _Lanes(network, scale, schedule.bucket_bytes, [] if events else None)
    lanes.run(schedule.forward)
    forward = max(lanes.now)
    lanes.run(schedule.backward)
    lanes.wait_for(lanes.last_gradients)
    backward = max(lanes.now) - forward
    computed = lanes.computed
    lanes.computed = [0.0] * len(computed)
    for item in schedule.optimizer:
        lanes.compute(item)
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
class _Bucket:
    """Transfers that are sent as one. `skewed` is the sum of bytes × largest."""

    collective: str
    names: list[str]
    size: int = 0
    skewed: float = 0.0

    def add(self, transfer: Transfer, scale: Scale) -> None:
        self.names.append(transfer.what)
        self.size += transfer.whole_bytes
        self.skewed += transfer.whole_bytes * scale.largest(transfer.cuts)

    @property
    def largest(self) -> float:
        return self.skewed / self.size if self.size else 1.0

    @property
    def what(self) -> str:
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        return ", ".join(self.names[:3]) + more


@dataclass(slots=True)
class _Gather:
    """Buckets (one for each collective) that are gathered together for the consumer at `wanted_at` and later ones."""

    wanted_at: int
    buckets: list[_Bucket]


@dataclass(slots=True)
class _Hiding:
    """A bucket that is sent: when it starts, and when it ends if computing goes on beside it."""

    bucket: _Bucket
    alone_s: float
    start: float
    end: float


class _Lanes:
    """The state of the simulation: plain numbers, one per kind."""

    def __init__(self, network: Network, scale: Scale, bucket_bytes: int, events: list[Event] | None) -> None:
        self.network, self.scale, self.bucket_bytes, self.events = network, scale, bucket_bytes, events
        self.kinds = [kind.name for kind in scale.cluster.kinds]
        # Who is slowed down for good would never end.
        self.left = tuple(max(1 - kind.drag, _LEAST_LEFT) for kind in scale.cluster.kinds)
        self.undisturbed = all(left == 1 for left in self.left)
        self.stretch = network.cluster.stretch
        self.now = [0.0] * len(self.kinds)
        self.computed, self.waiting, self.exposed = [list(self.now) for _ in range(3)]
        self.free = 0.0  # when the network's lane is, if computing goes on
        self.hiding_ones: list[_Hiding] = []  # in the order they are sent
        self.last_gradients = -1  # their number among these
        self.passed = 0  # so many of them are over for all,
        self.over = [0] * len(self.kinds)  # and for each
        self.blocking = self.hiding = 0.0
        self._computing: dict[tuple[int, object], tuple[float, ...]] = {}
        self._sending: dict[tuple[str, float, float], float] = {}

    def run(self, items: Sequence[Item]) -> None:
        """One pass, forward or backward."""
        coming = [_gather(at, sent, self.scale) for at, sent in gathers(items, self.bucket_bytes)]
        wanted = {gather.wanted_at: number for number, gather in enumerate(coming)}
        there: list[int] = []  # the last bucket of each gather, by its number
        filling: dict[str, _Bucket] = {}
        for gather in coming[:GATHERS_AT_ONCE]:
            there.append(self.start(gather))
        for position, item in enumerate(items):
            if isinstance(item, Compute):
                if position in wanted:
                    number = wanted[position]
                    if len(there) < len(coming) and len(there) < number + GATHERS_AT_ONCE:
                        there.append(self.start(coming[len(there)]))
                    self.wait_for(there[number])
                self.compute(item)
            elif item.ahead:
                continue
            elif item.hides:
                bucket = filling.setdefault(item.collective, _Bucket(item.collective, []))
                bucket.add(item, self.scale)
                if bucket.size >= self.bucket_bytes:
                    self.last_gradients = self.send(filling.pop(item.collective))
            else:
                self.block(item)
        for gather in coming[len(there) :]:
            there.append(self.start(gather))
        if coming and coming[-1].wanted_at == len(items):
            self.wait_for(there[-1])
        for bucket in filling.values():
            self.last_gradients = self.send(bucket)

    def compute(self, item: Compute) -> None:
        key = (id(item.seconds), item.cut)
        seconds = self._computing.get(key)
        if seconds is None:
            fractions = self.scale.fractions(item.cut)
            seconds = tuple(affine.at(f) for affine, f in zip(item.seconds, fractions, strict=True))
            self._computing[key] = seconds
        if self.undisturbed:
            ends = [start + taken for start, taken in zip(self.now, seconds, strict=True)]
        else:
            both = enumerate(zip(self.now, seconds, strict=True))
            ends = [self._computed(k, start, taken) for k, (start, taken) in both]
        if self.events is not None:
            what = f"∂{item.node}" if item.backward else item.node
            for kind, start, end in zip(self.kinds, self.now, ends, strict=True):
                self.events.append(Event(kind, what, start, end))
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

    def block(self, transfer: Transfer) -> None:
        self.wait_for(len(self.hiding_ones) - 1)
        start = max(*self.now, self.free)
        self.stand_still(start)
        size, largest = transfer.whole_bytes, self.scale.largest(transfer.cuts)
        taken = self.seconds(transfer.collective, size, largest)
        self.blocking += taken
        self.free = start + taken
        self.now = [self.free] * len(self.now)
        self.note(transfer.what, start, self.free, transfer.collective, size, largest, hides=False)

    def start(self, gather: _Gather) -> int:
        return [self.send(bucket) for bucket in gather.buckets][-1]

    def send(self, bucket: _Bucket) -> int:
        """Put a bucket on the network's lane, now that the last kind has arrived; its number."""
        start = max(*self.now, self.free)
        taken = self.seconds(bucket.collective, bucket.size, bucket.largest)
        self.hiding += taken
        self.free = start + self.stretch * taken
        self.hiding_ones.append(_Hiding(bucket, taken, start, self.free))
        return len(self.hiding_ones) - 1

    def wait_for(self, number: int) -> None:
        """All stand still until a bucket has come through. It hurries now that nobody computes beside it."""
        if number < self.passed:
            return
        arrived = clock = max(self.now)
        last, overlapping = len(self.hiding_ones) - 1, min(self.stretch, 1.0)
        for k, one in enumerate(self.hiding_ones[self.passed :], self.passed):
            if one.end <= arrived:
                continue
            left_s = one.alone_s if one.start >= arrived else (one.end - arrived) / self.stretch
            one.start = min(one.start, clock)
            awaited = overlapping if k < last else 1.0
            clock = one.end = clock + left_s * (awaited if k <= number else self.stretch)
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
        for k, now in enumerate(self.now):
            if now < until:
                exposed = self._hiding_between(now, until)
                self.exposed[k] += exposed
                self.waiting[k] += until - now - exposed
                self.now[k] = until

    def _hiding_between(self, start: float, stop: float) -> float:
        total = 0.0
        for one in reversed(self.hiding_ones):
            if one.end <= start:
                break
            total += max(min(one.end, stop) - max(one.start, start), 0.0)
        return total

    def note(
        self, what: str, start: float, end: float, collective: str, size: int, largest: float, *, hides: bool
    ) -> None:
        if self.events is not None:
            way = self.network.best(collective, size, largest).implementation
            self.events.append(Event(NETWORK, what, start, end, collective, way, size, hides))

    def all_events(self) -> tuple[Event, ...]:
        """Those of each lane in the order of time."""
        if self.events is None:
            return ()
        for one in self.hiding_ones:
            bucket = one.bucket
            self.note(bucket.what, one.start, one.end, bucket.collective, bucket.size, bucket.largest, hides=True)
        return tuple(sorted(self.events, key=lambda event: (event.start_s, event.end_s)))


def gathers(items: Sequence[Item], bucket_bytes: int = BUCKET_BYTES) -> list[tuple[int, list[Transfer]]]:
    """What is gathered ahead, in the order it is wanted, in buckets, each with the place of its first consumer.

    What one consumer wants is never parted: it would wait for both parts. What has no consumer is there at the end.
    """
    found: list[tuple[int, list[Transfer]]] = []
    coming: list[Transfer] = []
    size = 0  # of the bucket that is filling
    for position, item in enumerate(items):
        if isinstance(item, Transfer):
            if item.ahead:
                coming.append(item)
        elif coming:
            more = sum(transfer.whole_bytes for transfer in coming)
            if not found or size + more > bucket_bytes:
                found.append((position, []))
                size = 0
            found[-1][1].extend(coming)
            size += more
            coming = []
    return [*found, (len(items), coming)] if coming else found


def _gather(wanted_at: int, transfers: Sequence[Transfer], scale: Scale) -> _Gather:
    gather = _Gather(wanted_at, [])
    _fill(gather, transfers, scale)
    return gather


def _fill(gather: _Gather, transfers: Sequence[Transfer], scale: Scale) -> None:
    for transfer in transfers:
        bucket = next((b for b in gather.buckets if b.collective == transfer.collective), None)
        if bucket is None:
            bucket = _Bucket(transfer.collective, [])
            gather.buckets.append(bucket)
        bucket.add(transfer, scale)
