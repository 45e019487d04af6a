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

What is sent behind computing is not quite free: it drags on it, by a part of the seconds it is under way (`Kind.drag`:
communication threads use the core that computes, kernels of a communication library the multiprocessors). Beside
computing it is under way for longer (`Cluster.stretch`). A device pays when it sends, and pays nothing if it then
stands still anyway; the lane is free when the transfer would be over if nobody computed: so it is for what is awaited.

A bucket pays the latency once. Its bytes add up, and so does bytes × largest, since the price of a way is linear in
both.

Each lane's time adds up to the step: compute + optimizer + blocking + exposed + waiting. A lane that stands still is
*exposed* to communication while the network is busy with a transfer that should have hidden, and *waits* for slower
devices otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lopsided.collectives import Network
from lopsided.cost import Scale, Transfer
from lopsided.schedule import BUCKET_BYTES, GATHERS_AT_ONCE, Compute, Item, Schedule

NETWORK = "network"


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
class Lane:
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
    lanes: tuple[Lane, ...]  # one per kind
    blocking_s: float
    hiding_s: float  # what could run behind computation, hidden or not
    events: tuple[Event, ...] = ()

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def critical(self) -> Lane:
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
    lanes.stand_still(lanes.synchronised)
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
            Lane(kind.name, computed[k], lanes.computed[k], lanes.waiting[k] + end - lanes.now[k], lanes.exposed[k])
            for k, kind in enumerate(kinds)
        ),
        lanes.blocking,
        lanes.hiding,
        tuple(lanes.events or ()),
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
    def what(self) -> str:
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        return ", ".join(self.names[:3]) + more


@dataclass(slots=True)
class _Gather:
    """Buckets (one for each collective) that are gathered together for the consumer at `wanted_at` and later ones."""

    wanted_at: int
    buckets: list[_Bucket]


class _Lanes:
    """The state of the simulation: plain numbers, one per kind."""

    def __init__(self, network: Network, scale: Scale, bucket_bytes: int, events: list[Event] | None) -> None:
        self.network, self.scale, self.bucket_bytes, self.events = network, scale, bucket_bytes, events
        self.kinds = [kind.name for kind in scale.cluster.kinds]
        self.drags = tuple(kind.drag for kind in scale.cluster.kinds)
        self.now = [0.0] * len(self.kinds)
        self.computed, self.waiting, self.exposed = [list(self.now) for _ in range(3)]
        self.free = 0.0  # when the network's lane is
        self.hidden: list[tuple[float, float]] = []  # when it was busy with what hides
        self.synchronised = 0.0  # when the last gradient is
        self.blocking = self.hiding = 0.0
        self._computing: dict[tuple[int, object], tuple[float, ...]] = {}
        self._sending: dict[tuple[str, float, float], float] = {}

    def run(self, items: Sequence[Item]) -> None:
        """One pass, forward or backward."""
        coming = [_gather(at, sent, self.scale) for at, sent in gathers(items, self.bucket_bytes)]
        wanted = {gather.wanted_at: number for number, gather in enumerate(coming)}
        there: list[float] = []  # when each gather is done
        filling: dict[str, _Bucket] = {}
        for gather in coming[:GATHERS_AT_ONCE]:
            there.append(self.start(gather))
        for position, item in enumerate(items):
            if isinstance(item, Compute):
                if position in wanted:
                    number = wanted[position]
                    if len(there) < len(coming) and len(there) < number + GATHERS_AT_ONCE:
                        there.append(self.start(coming[len(there)]))
                    self.stand_still(there[number])
                self.compute(item)
            elif item.ahead:
                continue
            elif item.hides:
                bucket = filling.setdefault(item.collective, _Bucket(item.collective, []))
                bucket.add(item, self.scale)
                if bucket.size >= self.bucket_bytes:
                    self.synchronised = self.send(filling.pop(item.collective))
            else:
                self.block(item)
        for gather in coming[len(there) :]:
            there.append(self.start(gather))
        if coming and coming[-1].wanted_at == len(items):
            self.stand_still(there[-1])
        for bucket in filling.values():
            self.synchronised = self.send(bucket)

    def compute(self, item: Compute) -> None:
        key = (id(item.seconds), item.cut)
        seconds = self._computing.get(key)
        if seconds is None:
            fractions = self.scale.fractions(item.cut)
            seconds = tuple(affine.at(f) for affine, f in zip(item.seconds, fractions, strict=True))
            self._computing[key] = seconds
        if self.events is not None:
            what = f"∂{item.node}" if item.backward else item.node
            for kind, start, taken in zip(self.kinds, self.now, seconds, strict=True):
                self.events.append(Event(kind, what, start, start + taken))
        self.charge(seconds)

    def block(self, transfer: Transfer) -> None:
        start = max(*self.now, self.free)
        self.stand_still(start)
        size = transfer.whole_bytes
        taken = self.seconds(transfer.collective, size, self.scale.largest(transfer.cuts))
        self.blocking += taken
        self.free = start + taken
        self.now = [self.free] * len(self.now)
        self.note(transfer.what, start, transfer.collective, size, self.scale.largest(transfer.cuts), hides=False)

    def start(self, gather: _Gather) -> float:
        end = 0.0
        for bucket in gather.buckets:
            end = self.send(bucket)
        return end

    def send(self, bucket: _Bucket) -> float:
        """Put a bucket on the network's lane, now that the last kind has arrived; when it is done."""
        start = max(*self.now, self.free)
        largest = bucket.skewed / bucket.size if bucket.size else 1.0
        taken = self.seconds(bucket.collective, bucket.size, largest)
        self.hiding += taken
        self.free = start + taken
        self.hidden.append((start, self.free))
        self.note(bucket.what, start, bucket.collective, bucket.size, largest, hides=True)
        if any(self.drags):
            dragged = [dragged_s(self.network, bucket.collective, bucket.size) * drag for drag in self.drags]
            if self.events is not None:
                told = zip(self.kinds, self.now, dragged, strict=True)
                self.events += [Event(kind, f"drag of {bucket.what}", now, now + taken) for kind, now, taken in told]
            self.charge(dragged)
        return self.free

    def charge(self, seconds: Sequence[float]) -> None:
        """What a transfer takes from computing."""
        self.now = [a + b for a, b in zip(self.now, seconds, strict=True)]
        self.computed = [a + b for a, b in zip(self.computed, seconds, strict=True)]

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
        for begun, ended in reversed(self.hidden):
            if ended <= start:
                break
            total += max(min(ended, stop) - max(begun, start), 0.0)
        return total

    def note(self, what: str, start: float, collective: str, size: int, largest: float, *, hides: bool) -> None:
        if self.events is not None:
            way = self.network.best(collective, size, largest).implementation
            self.events.append(Event(NETWORK, what, start, self.free, collective, way, size, hides))


def dragged_s(network: Network, collective: str, size: int) -> float:
    """The seconds of a transfer of which a device's drag takes a part: how long it is under way beside computing.

    In equal pieces: handling bytes takes what it takes, however unequal they are.
    """
    return network.best(collective, size).seconds(size) * network.cluster.stretch


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
