"""What a model is trained on: kinds of devices, the nodes they sit in, the links between them.

In: plain values. Out: `Cluster`, which prints as TOML and loads back equal (`cluster_file.py`).

The one idea: devices that are alike are one *kind*, written once, so a cluster of a thousand devices is as small as one
of eight. A kind is found `count` times in each of `nodes` nodes; kinds with the same node name share those nodes.

    name = "two-boxes"
    [[devices]]
    name = "a100"                                  # devices are called big-1/a100-1, big-1/a100-2, ...
    node = "big"
    nodes = 2                                      # big-1 and big-2; one node keeps its plain name
    count = 8                                      # in each node
    flops_per_s = { f32 = 19.5e12, bf16 = 312e12 } # or a number, which means f32
    efficiency = 0.5                               # of these peaks is reached; multiplied in when loaded
    bytes_per_s = 1555e9                           # of the device's memory
    memory = "40 GiB"                              # or a number of bytes
    launch_s = 8e-6                                # the least an op takes
    [links.within]                                 # a device's link to the others of its node
    latency_s = 1e-5
    bytes_per_s = 2e11
    [links.between]                                # a node's link to the other nodes, shared by its devices
    latency_s = 3e-5
    bytes_per_s = 12.5e9
    [collectives.all_gather]                       # where measured: seconds = latency + bytes of the whole / (bytes/s)
    padded = { latency_s = 2e-4, bytes_per_s = 8.2e8 }

What else may be given: `compute_slowdown`, `overhead_s` and `contention` of devices, `skew` of a collective,
`comm_slowdown` and `packing` of the whole, which `coefficients.py` explains; and links between two nodes that are not
as fast as the others:

    [[links.pair]]
    nodes = ["big-1", "small"]
    latency_s = 1e-3
    bytes_per_s = 2.5e7

A device is described as it is when all n devices of its node work. With a `contention` of c, what then takes t seconds
takes t / c alone, and t / c · (1 + (c − 1) · (m − 1) / (n − 1)) when m of them work (`Kind.with_fewer`): so it is in a
smaller cluster, which has that last factor for its contention.

A part of a cluster may be faster than all of it (`parts`): a slow device may cost more than it brings, and so may one
with little memory or behind a slow link. Of few kinds all subsets are parts. Of many, the quickest and those with most
memory, in numbers that halve, and all but one, two, four, ...: their number grows with the logarithm of the number of
kinds. Of one kind there are a handful, however many devices it has.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from lopsided.cluster.coefficients import CLUSTER, check_coefficients, given_coefficients
from lopsided.cluster.devices import (
    MOST_DEVICES,
    check_name,
    check_words,
)
from lopsided.cluster.devices import Kind as Kind
from lopsided.cluster.devices import Link as Link
from lopsided.cluster.devices import Measured as Measured
from lopsided.codec import Inline, toml_text
from lopsided.errors import ClusterError, close_words, shown

# What can be measured of each collective. Others are put together from these (see collectives.py).
MEASURABLE: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring",),
    "all_gather": ("padded", "grouped", "all_to_all"),
    "reduce_scatter": ("padded", "grouped", "all_to_all"),
    "all_to_all": ("direct",),
}


def _node_names(node: str, nodes: int) -> list[str]:
    return [node] if nodes == 1 else [f"{node}-{k}" for k in range(1, nodes + 1)]


@dataclass(frozen=True)
class Cluster:
    """Kinds of devices and the links between them. Devices are numbered kind by kind, in a kind node by node.

    `collectives` holds what was measured: (collective, implementation, latency and bytes/s of the whole tensor).
    `pairs` are links between two nodes that are unlike `between`. What its numbers mean: `coefficients.py`.
    """

    name: str
    about: str
    kinds: tuple[Kind, ...]
    within: Link
    between: Link
    collectives: tuple[tuple[str, str, Link], ...] = ()
    pairs: tuple[tuple[str, str, Link], ...] = ()
    comm_slowdown: float = 1.0
    packing: float = 1.0

    def __post_init__(self) -> None:
        where = f"cluster {shown(self.name)}"
        check_name(self.name, "cluster", where)
        check_words(self.about, "about", where)
        if not self.kinds:
            raise ClusterError("the cluster has no devices", where=where, do="add a [[devices]] table")
        if self.devices > MOST_DEVICES:
            raise ClusterError(
                f"{self.devices:,} devices are too many", where=where, do=f"plan for at most {MOST_DEVICES:,}"
            )
        for node, group in self._by_node.items():
            if len({kind.nodes for kind in group}) > 1:
                raise ClusterError(
                    f"kinds that share node {shown(node)} disagree on how many there are",
                    where=where,
                    do="give them the same nodes = ..., or different node names",
                )
        twice = [name for name, times in Counter(self.node_names).items() if times > 1]
        if twice:
            raise ClusterError(
                f"two nodes are called {shown(twice[0])}",
                where=where,
                do="rename one of them (several nodes of one name are numbered: box-1, box-2, ...)",
            )
        for collective, implementation, _ in self.collectives:
            if implementation not in MEASURABLE.get(collective, ()):
                raise ClusterError(
                    f"{shown(collective)} by {shown(implementation)} cannot be measured",
                    where=where,
                    do="choose from " + ", ".join(f"{c} ({', '.join(ways)})" for c, ways in MEASURABLE.items()),
                )
        if len({entry[:2] for entry in self.collectives}) < len(self.collectives):
            raise ClusterError("a collective was measured twice", where=where, do="keep one of its entries")
        self._check_pairs(where)
        check_coefficients(CLUSTER, self, where)
        # One order, so that equal clusters are equal however they were written.
        object.__setattr__(self, "collectives", tuple(sorted(self.collectives, key=lambda entry: entry[:2])))

    def _check_pairs(self, where: str) -> None:
        names = {*self.node_names} if self.pairs else set()
        for one, other, _ in self.pairs:
            if one == other or not {one, other} <= names:
                raise ClusterError(
                    f"there is no link between nodes {shown(one)} and {shown(other)}",
                    where=where,
                    do=f"name two of {', '.join(map(shown, self.node_names[:8]))}",
                )
        single = {group[0].node for group in self._by_node.values() if group[0].nodes == 1}
        if named := next((name for pair in self.pairs for name in pair[:2] if name not in single), None):
            raise ClusterError(
                f"node {shown(named)} has a link of its own, and is one of several of one name",
                where=where,
                do="give it an entry of its own under [[devices]]: those of one name are alike",
            )
        if len({frozenset(pair[:2]) for pair in self.pairs}) < len(self.pairs):
            raise ClusterError("a link between two nodes is given twice", where=where, do="keep one of them")

    # Devices and nodes

    @property
    def devices(self) -> int:
        return sum(kind.devices for kind in self.kinds)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and stop of each kind's device indices."""
        stops = accumulate(kind.devices for kind in self.kinds)
        return tuple((stop - kind.devices, stop) for kind, stop in zip(self.kinds, stops, strict=True))

    @cached_property
    def kind_numbers(self) -> tuple[int, ...]:
        """The number of each device's kind."""
        return tuple(k for k, kind in enumerate(self.kinds) for _ in range(kind.devices))

    @property
    def device_kinds(self) -> tuple[Kind, ...]:
        """The kind of each device."""
        return tuple(self.kinds[k] for k in self.kind_numbers)

    @cached_property
    def _by_node(self) -> dict[str, tuple[Kind, ...]]:
        groups: dict[str, list[Kind]] = {}
        for kind in self.kinds:
            groups.setdefault(kind.node, []).append(kind)
        return {node: tuple(group) for node, group in groups.items()}

    @property
    def nodes(self) -> int:
        return sum(group[0].nodes for group in self._by_node.values())

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """How many devices a node has: every size there is, once."""
        return tuple(sorted({sum(kind.count for kind in group) for group in self._by_node.values()}))

    def beside(self, kind: Kind) -> int:
        """How many devices a node of this kind has, of whatever kind."""
        return sum(other.count for other in self._by_node[kind.node])

    @cached_property
    def node_names(self) -> tuple[str, ...]:
        return tuple(name for node, group in self._by_node.items() for name in _node_names(node, group[0].nodes))

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """`node/kind-number`; the number counts devices of that name in their node."""
        names: list[str] = []
        before: Counter[tuple[str, str]] = Counter()
        for kind in self.kinds:
            first = before[kind.node, kind.name] + 1
            before[kind.node, kind.name] += kind.count
            for node in _node_names(kind.node, kind.nodes):
                names += [f"{node}/{kind.name}-{k}" for k in range(first, first + kind.count)]
        return tuple(names)

    def _likeness_of_node(self, node: str) -> str:
        holds: Counter[str] = Counter()
        for kind in self._by_node[node]:
            holds[kind.likeness] += kind.count
        return json.dumps(sorted(holds.items()))

    def alike_devices(self) -> tuple[tuple[str, ...], ...]:
        """The names of devices that can stand in for each other: alike, in nodes that are alike."""
        groups: dict[tuple[str, str], list[str]] = {}
        for kind, (start, stop) in zip(self.kinds, self.spans, strict=True):
            key = (kind.likeness, self._likeness_of_node(kind.node))
            groups.setdefault(key, []).extend(self.device_names[start:stop])
        return tuple(tuple(group) for group in groups.values())

    def alike_nodes(self) -> tuple[tuple[str, ...], ...]:
        """The names of nodes that can stand in for each other."""
        groups: dict[str, list[str]] = {}
        for node, kinds in self._by_node.items():
            groups.setdefault(self._likeness_of_node(node), []).extend(_node_names(node, kinds[0].nodes))
        return tuple(tuple(group) for group in groups.values())

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of all that a plan depends on: not of names, not of what is said about the devices."""
        number = {node: k for k, node in enumerate(self._by_node)}
        kinds = [[number[kind.node], kind.nodes, kind.count, kind.likeness] for kind in self.kinds]
        links = [[float(x.latency_s), float(x.bytes_per_s)] for x in (self.within, self.between)]
        measured = [[c, i, float(x.latency_s), float(x.bytes_per_s)] for c, i, x in self.collectives]
        facts: list[object] = [kinds, links, measured]
        if self.pairs or self.comm_slowdown != 1 or any(x.skew is not None for _, _, x in self.collectives):
            place = {name: k for k, name in enumerate(self.node_names)}
            pairs = sorted([*sorted([place[a], place[b]]), x.latency_s, x.bytes_per_s] for a, b, x in self.pairs)
            facts += [pairs, self.comm_slowdown, [x.skew for _, _, x in self.collectives]]
        if self.packing != 1:
            facts.append(self.packing)
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    # Smaller clusters

    def without_device(self, name: str) -> Cluster:
        """The cluster without one device.

        Its node is then unlike the others of its name and becomes an entry of its own, the last by number (of just
        two, both keep their names); the devices left in it are counted anew. Alike as they were, nobody can tell.
        """
        if name not in self.device_names:
            raise _no_such("device", name, self)
        index = self.device_names.index(name)
        gone = self.kind_numbers[index]
        node, number = self.kinds[gone].node, (index - self.spans[gone][0]) // self.kinds[gone].count
        odd, rest = _parted(node, self.kinds[gone].nodes, number)
        kinds = []
        for k, kind in enumerate(self.kinds):
            if kind.node != node:
                kinds.append(kind)
                continue
            if rest is not None:
                kinds.append(replace(kind, node=rest, nodes=kind.nodes - 1))
            if count := kind.count - (k == gone):
                was = self.beside(kind)
                kinds.append(replace(kind.with_fewer(was, was - 1), node=odd, nodes=1, count=count))
        return self.smaller(kinds, name)

    def without_node(self, name: str) -> Cluster:
        """The cluster without one node and all devices in it."""
        if name not in self.node_names:
            raise _no_such("node", name, self)
        kinds = []
        for kind in self.kinds:
            names = _node_names(kind.node, kind.nodes)
            if name not in names:
                kinds.append(kind)
                continue
            _, rest = _parted(kind.node, kind.nodes, names.index(name))
            if rest is not None:
                kinds.append(replace(kind, node=rest, nodes=kind.nodes - 1))
        return self.smaller(kinds, name)

    def only(self, kinds: Iterable[int]) -> Cluster:
        """The cluster of these kinds, by their number, in their order here."""
        wanted = {*kinds}
        unknown = sorted(wanted - {*range(len(self.kinds))})
        if unknown:
            raise ClusterError(
                f"there is no kind {unknown[0]}",
                where=f"cluster {shown(self.name)}",
                do=f"choose from 0 to {len(self.kinds) - 1}",
            )
        kept = [kind for k, kind in enumerate(self.kinds) if k in wanted]
        left = Counter[str]()
        for kind in kept:
            left[kind.node] += kind.count
        return self.smaller([k.with_fewer(self.beside(k), left[k.node]) for k in kept], "all of its kinds")

    def smaller(self, kinds: Sequence[Kind], gone: str) -> Cluster:
        """The cluster of these of its devices: links as they were, what was measured among all of them scaled."""
        if not kinds:
            raise ClusterError(
                f"without {gone} no device is left", where=f"cluster {shown(self.name)}", do="keep at least one device"
            )
        left = replace(self, kinds=tuple(kinds), collectives=(), pairs=())
        names = {*left.node_names} if self.pairs else set()
        pairs = tuple(pair for pair in self.pairs if {*pair[:2]} <= names)
        left = replace(left, pairs=pairs)
        # What was measured between nodes says nothing about the inside of one.
        if left.nodes == 1 < self.nodes:
            return left
        return replace(left, collectives=tuple(self._for_fewer(left, *entry) for entry in self.collectives))

    def _for_fewer(self, left: Cluster, collective: str, way: str, link: Link) -> tuple[str, str, Link]:
        """A measured collective among the devices that are left.

        A ring of n passes (n − 1) / n of the bytes over its slowest link in n − 1 hops, and so, all links alike, do
        messages to everyone; an all_to_all passes an n-th of that.
        """
        was, now = self.devices, left.devices
        if now == 1:
            return collective, way, link
        hops = (now - 1) / (was - 1)
        amount = hops * was / now * (was / now if collective == "all_to_all" else 1.0)
        old, new = self.slowest, left.slowest
        latency_s = link.latency_s * hops * (new.latency_s / old.latency_s if old.latency_s else 1.0)
        bytes_per_s = min(max(link.bytes_per_s / amount * new.bytes_per_s / old.bytes_per_s, 1.0), 1e18)
        return collective, way, Link(latency_s, bytes_per_s, link.skew)

    # Links

    @cached_property
    def slowest(self) -> Link:
        """The slowest link of a ring that goes node by node through all devices."""
        links = [self.within] if self.devices > self.nodes else []
        links += self.ring_between
        return Link(max(link.latency_s for link in links), min(link.bytes_per_s for link in links))

    @cached_property
    def ring_between(self) -> tuple[Link, ...]:
        """The links of that ring that join nodes; of nodes with no link of their own, one for all."""
        if self.nodes == 1:
            return () if self.devices > 1 else (self.between,)
        if not self.pairs:
            return (self.between,)
        named = {frozenset(pair[:2]): pair[2] for pair in self.pairs}
        names = self.node_names
        around = zip(names, (*names[1:], names[0]), strict=True)
        return tuple(named.get(frozenset(pair), self.between) for pair in around)

    # Text

    def text(self) -> str:
        """TOML that loads back to an equal cluster."""
        measured: dict[str, dict[str, object]] = {}
        for collective, algorithm, link in self.collectives:
            measured.setdefault(collective, {})[algorithm] = Inline(link.table())
        links: dict[str, object] = {"within": self.within.table(), "between": self.between.table()}
        if self.pairs:
            links["pair"] = [{"nodes": [one, other], **link.table()} for one, other, link in self.pairs]
        about = {"about": self.about} if self.about else {}
        devices = [kind.table() for kind in self.kinds]
        numbers = given_coefficients(CLUSTER, self)
        return toml_text(
            {"name": self.name, **about, **numbers, "devices": devices, "links": links, "collectives": measured}
        )


def _parted(node: str, nodes: int, number: int) -> tuple[str, str | None]:
    """New names when one of several nodes is set apart: of that node, and of the others (None: there are none)."""
    names = _node_names(node, nodes)
    if nodes <= 2:
        return names[number], names[1 - number] if nodes == 2 else None
    return names[-1], node


def _no_such(what: str, name: str, cluster: Cluster) -> ClusterError:
    names = cluster.device_names if what == "device" else cluster.node_names
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return ClusterError(
        f"there is no {what} {shown(name)}",
        where=f"cluster {shown(cluster.name)}",
        do=f"{close_words(name, names[:2000])}it has {listed}",
    )


FEW_KINDS = 3
"""Kinds of which all subsets are tried."""

_SIZES = 6
"""Into so many sizes, halves unless there are too many of these, a kind is cut at the most."""


def parts(cluster: Cluster, dtype: str, *, by_memory: bool = True) -> Iterator[Cluster]:
    """What may be faster than all of a cluster: some of its kinds, half of the fastest, a node of several.

    Of many kinds also those with most memory, unless nobody is short of it.
    """
    seen = {cluster.fingerprint}

    def new(part: Cluster) -> bool:
        known = part.fingerprint in seen
        seen.add(part.fingerprint)
        return not known

    order = sorted(range(len(cluster.kinds)), key=lambda k: (-cluster.kinds[k].flops(dtype), k))
    roomiest = sorted(order, key=lambda k: -cluster.kinds[k].memory_bytes) if by_memory else order
    for kinds in _subsets(order, roomiest):
        if new(part := cluster.only(kinds)) and part.devices > 1:
            yield part
    for part in _fewer_of_a_kind(cluster.only(order[:1])):
        if new(part):
            yield part
    if cluster.nodes > 1:
        for alike in cluster.alike_nodes():
            # Nodes of one kind are among the halves of the fastest, or slower than those.
            part = _only_node(cluster, alike[0])
            if len(part.kinds) > 1 and new(part):
                yield part


def _subsets(order: Sequence[int], roomiest: Sequence[int]) -> Iterator[Sequence[int]]:
    """All subsets of few kinds; of many the fastest, and those with most memory. Large ones first."""
    if len(order) <= FEW_KINDS:
        for size in range(len(order) - 1, 0, -1):
            yield from itertools.combinations(order, size)
        return
    powers = [2**k for k in range(len(order).bit_length())]
    counts = {len(order) - power for power in powers} | {len(order) // power for power in powers[1:]}
    for count in sorted((count for count in counts if count > 0), reverse=True):
        yield order[:count]
        yield roomiest[:count]


def _fewer_of_a_kind(cluster: Cluster) -> Iterator[Cluster]:
    """Of a cluster of one kind fewer and fewer of its nodes, then of the devices of one node; two at the least."""
    (kind,) = cluster.kinds
    for nodes in _sizes(kind.nodes):
        fewer = replace(kind, node=kind.node if nodes > 1 else f"{kind.node}-1", nodes=nodes)
        if fewer.devices > 1:
            yield cluster.smaller([fewer], "some of its nodes")
    node = kind.node if kind.nodes == 1 else f"{kind.node}-1"
    for count in _sizes(kind.count):
        if count > 1:
            fewer = replace(kind.with_fewer(kind.count, count), node=node, nodes=1, count=count)
            yield cluster.smaller([fewer], "some of its devices")


def _sizes(size: int) -> Iterator[int]:
    """Smaller and smaller sizes, down to one."""
    ratio = max(2.0, size ** (1 / _SIZES))
    while size > 1:
        size = max(int(size / ratio), 1)
        yield size


def _only_node(cluster: Cluster, name: str) -> Cluster:
    kinds = []
    for kind in cluster.kinds:
        names = [kind.node] if kind.nodes == 1 else [f"{kind.node}-{k}" for k in range(1, kind.nodes + 1)]
        if name in names:
            kinds.append(replace(kind, node=name, nodes=1))
    return cluster.smaller(kinds, "all other nodes")


def single_devices(cluster: Cluster) -> Iterator[Cluster]:
    """One device of each kind, by itself."""
    for kind in cluster.kinds:
        node = kind.node if kind.nodes == 1 else f"{kind.node}-1"
        alone = replace(kind.with_fewer(cluster.beside(kind), 1), node=node, nodes=1, count=1)
        yield Cluster(cluster.name, cluster.about, (alone,), cluster.within, cluster.between)
