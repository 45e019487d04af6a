"""Parts of a cluster that may be faster than all of it.

In: a `Cluster`. Out: smaller ones. A slow device may cost more than it brings, and so may one with little memory or
one behind a slow link.

Of few kinds all subsets are parts. Of many, the quickest and those with most memory, in numbers that halve, and all
but one, two, four, ...: their number grows with the logarithm of the number of kinds. Of one kind there are a handful,
however many devices it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lopsided.cluster.cluster import Cluster

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
    """Of few kinds all subsets; of many the fastest, and those with most memory. Large ones first."""
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
