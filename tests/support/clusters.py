"""Small clusters that are made up: the one builder that all tests use.

`kind` and `cluster` have every figure of a device and of a link as an option, so that a test names those it is about.
"""

from __future__ import annotations

from typing import Any

from lopsided.cluster.cluster import Cluster, Kind, Link

WITHIN, BETWEEN = Link(1e-5, 1e10), Link(5e-5, 1e9)


def kind(
    name: str = "v100",
    node: str = "box",
    nodes: int = 1,
    count: int = 1,
    *,
    speed: float = 1e13,
    bytes_per_s: float = 9e11,
    memory: float = 2**34,
    launch_s: float = 8e-6,
    **more: Any,
) -> Kind:
    """Devices alike. `speed` is in FLOP/s of f32, `memory` in bytes; `more` are the other fields of a `Kind`."""
    return Kind(name, node, nodes, count, (("f32", speed),), bytes_per_s, int(memory), launch_s, **more)


def kinds(*speeds: float, name: str = "k", node: str = "box", **each: Any) -> tuple[Kind, ...]:
    """A kind for each speed, k0, k1 and so on; `{}` in the node's name is the kind's number."""
    return tuple(kind(f"{name}{k}", node.format(k), speed=speed, **each) for k, speed in enumerate(speeds))


def cluster(*kinds: Kind, link: Link | None = None, name: str = "c", **more: Any) -> Cluster:
    """Kinds and the links between them: the same link within nodes and between them, if one is given."""
    links = {"within": link or WITHIN, "between": link or BETWEEN}
    return Cluster(name, "", kinds, **(links | more))
