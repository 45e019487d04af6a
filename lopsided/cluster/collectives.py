"""What it costs when devices talk: every collective, every way to carry it out, linear in bytes and in skew.

In: a `Cluster`. Out: `Network`, which lists and picks `Algorithm`s.

The one idea: a way is three numbers, `latency + bytes · (a + b · largest)`, so that the search can compare ways and a
linear program can use them. `bytes` are those of the whole (joined) tensor, `largest` is the number of devices times
the largest device's fraction: 1 when pieces are equal, n when one device has everything.

From the links (n devices in N nodes, g of them in the node; l, B a link's latency and bytes/s). A ring goes node by
node: it crosses each node's link once and is as fast as the slowest link on it, B = min(within, between).

| collective, way                          | latency                    | seconds a byte              | function     |
|------------------------------------------|----------------------------|-----------------------------|--------------|
| once around the ring                     | A = (N−1)·l_between        |                             | `_around`    |
|                                          |   + (n−N)·l_within         |                             |              |
| all_reduce, ring                         | 2·A                        | 2·(n−1)/n / B               | `_modelled`  |
| all_reduce, tree                         | 2·(⌈log2 N⌉·l_between      | 2 / B                       | `_modelled`  |
|                                          |   + ⌈log2 g⌉·l_within)     |                             |              |
| all_gather, reduce_scatter: padded       | A                          | largest · (n−1)/n / B       | `_modelled`  |
| ... grouped: n broadcasts or reduces     | A + (n−1)·l                | (n−1)/n / (B · GROUPED)     | `_modelled`  |
| ... all_to_all: own piece to each other  | ⌈log2 n⌉·l                 | largest · E / n             | `_modelled`  |
| all_to_all, direct                       | ⌈log2 n⌉·l                 | largest · E / n²            | `_modelled`  |
| a byte from every device to every other  |                            | E = max((g−1) / B_within,   | `_exchange`  |
|                                          |                            |   g·(n−g) / B_between)      |              |
| all_reduce, scatter+gather               | padded reduce_scatter and padded all_gather, equal pieces| `_composed` |
| all_to_all, gather                       | padded all_gather; each keeps its slice                  | `_composed` |

The devices of a node share its link for what they send each other directly, hence g·(n−g). That a device's n−1
messages cost ⌈log2 n⌉ latencies lies between a network where all are in flight at once and one that waits for each. A
group of broadcasts loads each link with all pieces but one, unpadded, yet fills it less well: GROUPED. Ring and tree
are the same call, and the communication library takes the better one by itself.

From measurements, where the cluster has them: the measured latency and bytes/s of the whole tensor take the place of
the model's, at equal pieces (`_fitted`). What was not measured then is the model's, corrected by as much as the model
is off for the nearest way that was (`_corrected`): else a way would win just because nobody measured it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from lopsided.cluster.cluster import Cluster, Link
from lopsided.errors import ClusterError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

# How much of the ring's bytes/s a group of broadcasts or reduces reaches: the mean of the four ratios that were
# profiled on the clusters of the presets hap-64 and hap-4 (0.67, 0.63 for all_gather, 0.58, 0.75 for reduce_scatter).
GROUPED = 0.66

# Ways that do the same on the wire, the nearest relations of each other.
_FAMILIES = (
    (("all_gather", "padded"), ("reduce_scatter", "padded"), ("all_reduce", "ring"), ("all_reduce", "tree")),
    (("all_gather", "grouped"), ("reduce_scatter", "grouped")),
    (("all_to_all", "direct"), ("all_gather", "all_to_all"), ("reduce_scatter", "all_to_all")),
)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to carry out a collective, and its price."""

    collective: str
    implementation: str
    latency_s: float
    s_per_byte: float
    s_per_largest_byte: float

    def seconds(self, whole_bytes: float, largest: float = 1.0) -> float:
        return self.latency_s + whole_bytes * (self.s_per_byte + self.s_per_largest_byte * largest)

    @property
    def s_per_byte_if_equal(self) -> float:
        return self.s_per_byte + self.s_per_largest_byte


_Ways = dict[tuple[str, str], Algorithm]


@dataclass(frozen=True)
class Network:
    """The prices of a cluster's collectives. Nothing here grows with the number of devices.

    >>> from lopsided.cluster.cluster_file import load_cluster
    >>> network = Network(load_cluster("hap-64"))
    >>> [network.best("all_gather", 2**30, largest).implementation for largest in (1.0, 30.0)]
    ['padded', 'grouped']
    """

    cluster: Cluster

    @cached_property
    def _ways(self) -> dict[str, tuple[Algorithm, ...]]:
        modelled = _modelled(self.cluster)
        fitted = {
            (collective, way): _fitted(modelled[collective, way], link)
            for collective, way, link in self.cluster.collectives
        }
        if ("all_reduce", "ring") in fitted:
            # Measured was the call, whichever of the two the library took.
            del modelled["all_reduce", "tree"]
        ways = {key: fitted[key] if key in fitted else _corrected(key, modelled, fitted) for key in modelled}
        every = [*ways.values(), *_composed(ways)]
        if self.cluster.devices == 1:
            every = [Algorithm(way.collective, way.implementation, 0.0, 0.0, 0.0) for way in every]
        return {name: tuple(way for way in every if way.collective == name) for name in COLLECTIVES}

    def ways(self, collective: str) -> tuple[Algorithm, ...]:
        """Every way to carry it out, in a fixed order."""
        if collective not in self._ways:
            raise ClusterError(f"there is no collective {collective!r}", do=f"choose from {', '.join(COLLECTIVES)}")
        return self._ways[collective]

    def best(self, collective: str, whole_bytes: float, largest: float = 1.0) -> Algorithm:
        """The cheapest way; of equals the first in `ways`."""
        return min(self.ways(collective), key=lambda way: way.seconds(whole_bytes, largest))


def _used(cluster: Cluster) -> list[Link]:
    """The links that a ring through all devices uses."""
    links = list(cluster.ring_between) if cluster.nodes > 1 else []
    if cluster.devices > cluster.nodes:
        links.append(cluster.within)
    return links


def _around(cluster: Cluster) -> float:
    """Latency of a message that goes around the ring to all others."""
    n, nodes = cluster.devices, cluster.nodes
    hop = max(link.latency_s for link in cluster.ring_between) if nodes > 1 else 0.0
    return (nodes - 1) * hop + (n - nodes) * cluster.within.latency_s


def _exchange(cluster: Cluster) -> float:
    """Seconds until every device has sent every other one byte."""
    n = cluster.devices
    inside = [(size - 1) / cluster.within.bytes_per_s for size in cluster.node_sizes]
    slowest = min((link.bytes_per_s for link in cluster.ring_between), default=cluster.between.bytes_per_s)
    outside = [size * (n - size) / slowest for size in cluster.node_sizes]
    return max(*inside, *outside)


def _doublings(count: int) -> int:
    return (count - 1).bit_length()


def _modelled(cluster: Cluster) -> _Ways:
    """The table at the top of this file, row by row."""
    n, around, exchange, used = cluster.devices, _around(cluster), _exchange(cluster), _used(cluster)
    slowest = min((link.bytes_per_s for link in used), default=math.inf)
    hop = max((link.latency_s for link in used), default=0.0)
    part = (n - 1) / n
    up_the_tree = (
        _doublings(cluster.nodes) * cluster.between.latency_s
        + _doublings(cluster.node_sizes[-1]) * cluster.within.latency_s
    )
    direct = _doublings(n) * hop
    ways = [
        Algorithm("all_reduce", "ring", 2 * around, 2 * part / slowest, 0.0),
        Algorithm("all_reduce", "tree", 2 * up_the_tree, 2 / slowest, 0.0),
    ]
    for collective in ("all_gather", "reduce_scatter"):
        ways += [
            Algorithm(collective, "padded", around, 0.0, part / slowest),
            Algorithm(collective, "grouped", around + (n - 1) * hop, part / (slowest * GROUPED), 0.0),
            Algorithm(collective, "all_to_all", direct, 0.0, exchange / n),
        ]
    ways.append(Algorithm("all_to_all", "direct", direct, 0.0, exchange / n**2))
    return {(way.collective, way.implementation): way for way in ways}


def _fitted(model: Algorithm, link: Link) -> Algorithm:
    """What was measured with equal pieces, growing with skew as was measured, or as the model does."""
    if link.skew is not None and model.s_per_byte_if_equal:
        growing = link.skew / link.bytes_per_s
        return replace(
            model, latency_s=link.latency_s, s_per_byte=1 / link.bytes_per_s - growing, s_per_largest_byte=growing
        )
    # With one device the model has no seconds to scale, and nothing is sent.
    scale = 1 / link.bytes_per_s / model.s_per_byte_if_equal if model.s_per_byte_if_equal else 0.0
    return replace(
        model,
        latency_s=link.latency_s,
        s_per_byte=model.s_per_byte * scale,
        s_per_largest_byte=model.s_per_largest_byte * scale,
    )


def _corrected(
    key: tuple[str, str], modelled: Mapping[tuple[str, str], Algorithm], fitted: Mapping[tuple[str, str], Algorithm]
) -> Algorithm:
    """The model's way, off by as much as it is for the nearest way that was measured."""
    way = modelled[key]
    own = next(family for family in _FAMILIES if key in family)
    near = next((k for family in (own, *_FAMILIES) for k in family if k in fitted), None)
    if near is None or not modelled[near].s_per_byte_if_equal:
        return way
    scale = fitted[near].s_per_byte_if_equal / modelled[near].s_per_byte_if_equal
    # Where the model has next to no latency to compare with, its own is kept.
    slower = fitted[near].latency_s / modelled[near].latency_s if modelled[near].latency_s > 1e-12 else 1.0
    return replace(
        way,
        latency_s=way.latency_s * slower,
        s_per_byte=way.s_per_byte * scale,
        s_per_largest_byte=way.s_per_largest_byte * scale,
    )


def _composed(ways: Mapping[tuple[str, str], Algorithm]) -> list[Algorithm]:
    """Collectives made of others."""
    gather, scatter = ways["all_gather", "padded"], ways["reduce_scatter", "padded"]
    both = gather.s_per_byte_if_equal + scatter.s_per_byte_if_equal
    return [
        Algorithm("all_reduce", "scatter+gather", scatter.latency_s + gather.latency_s, both, 0.0),
        replace(gather, collective="all_to_all", implementation="gather"),
    ]
