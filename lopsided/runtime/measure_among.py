"""How fast the fastest devices talk among themselves, the others left out.

In: a cluster whose collectives were measured among all of its devices. Out: parts of it that are worth asking
(`parts_to_ask`), and what the cluster is to know of such a part (`known_among`).

The planner leaves out the slowest first. A ring goes at the pace of whoever is slowest to send, which a host with
little of a processor may be; messages to everyone are not held back by it. So no one factor would do for all ways. And
the quicker something is sent by itself, the more computing beside it slows it down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lopsided.cluster import Cluster, Part
from lopsided.runtime.measure_links import Fit

_PARTS_OF_ALL = (3 / 4, 1 / 2, 1 / 4)
"""What is in between is taken to be like the next larger one."""


def parts_to_ask(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Kinds of devices, by their numbers, the fastest: about three quarters of all devices, a half, a quarter."""
    order = sorted(range(len(cluster.kinds)), key=lambda k: (-cluster.kinds[k].speed, k))
    fastest = [tuple(sorted(order[:count])) for count in range(1, len(order))]
    sizes = {part: sum(cluster.kinds[k].devices for k in part) for part in fastest}
    asked = {
        min(fastest, key=lambda part: abs(sizes[part] - wanted * cluster.devices))
        for wanted in _PARTS_OF_ALL
        if fastest
    }
    yield from (part for part in reversed(fastest) if part in asked and sizes[part] > 1)


def known_among(
    cluster: Cluster, names: Sequence[str], fits: Sequence[Fit], stretch: float, drags: Sequence[float]
) -> Part:
    """What was measured with equal pieces; what unequal ones cost is taken from all devices together."""
    skews = {(collective, way): link.skew for collective, way, link in cluster.collectives}
    ways = [(fit.collective, fit.way, replace(fit.link, skew=skews.get((fit.collective, fit.way)))) for fit in fits]
    return Part(tuple(names), tuple(ways), stretch, tuple(drags))
