"""How fast the fastest devices talk among themselves, the others left out.

In: a cluster whose collectives were measured among all of its devices. Out: parts of it that are worth asking
(`parts_to_ask`), and by what to multiply what the cluster says of such a part (`factor_of`), from an all_reduce that
was measured in it.

The planner leaves out the slowest first. A collective among all goes at the pace of whoever is slowest to send, which
a host with little of a processor may be, and what is known of links between two does not tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from lopsided.cluster import FACTORS_AMONG, Cluster
from lopsided.runtime.measure_links import Fit

_PARTS_OF_ALL = (3 / 4, 1 / 2, 1 / 4)
"""What is in between is taken to be like the next larger one."""
_LEAST_BYTES = 2**17
"""What is smaller says little of what training sends."""


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


def factor_of(part: Cluster, fit: Fit) -> float:
    """Seconds of what was measured over what the part says of itself, in the mean."""
    link = next(link for *named, link in part.collectives if named == [fit.collective, fit.way])
    points = [point for point in fit.points if point.bytes >= _LEAST_BYTES] or fit.points
    off = statistics.fmean(
        math.log(point.seconds / (link.latency_s + point.bytes / link.bytes_per_s)) for point in points
    )
    return min(max(math.exp(off), FACTORS_AMONG[0]), FACTORS_AMONG[1])
