"""Small clusters to test with."""

from __future__ import annotations

from lopsided.cluster.cluster import Cluster, Kind, Link


def kind(name: str = "v100", node: str = "box", nodes: int = 1, count: int = 1, speed: float = 1e13) -> Kind:
    return Kind(name, node, nodes, count, (("f32", speed),), 9e11, 2**34, 8e-6)


def cluster(*kinds: Kind, name: str = "c") -> Cluster:
    return Cluster(name, "", kinds, Link(1e-5, 1e10), Link(5e-5, 1e9))
