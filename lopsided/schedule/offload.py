"""Saved activations in the memory of the host: what travels there and back, how long that takes, and what it fills.

In: a `Schedule` with regions of level `offload`. Out: seconds a node takes longer, forward and backward alike
(`travelling`), and bytes of host memory (`offloaded_bytes_per_kind`).

Nothing is taken to hide behind computing, neither way. On a GPU what is saved leaves behind what its region computes,
so some of the way there does; what comes back is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping

from lopsided.cluster.cluster import Cluster
from lopsided.schedule.cost import FREE, Affine, Scale
from lopsided.schedule.host_state import pinned
from lopsided.schedule.memory import sent_to_host
from lopsided.schedule.schedule import Schedule


def travelling(schedule: Schedule, cluster: Cluster) -> Mapping[str, tuple[Affine, ...]]:
    """Of every node whose saved tensors travel, the seconds one way, per kind."""
    found: dict[str, tuple[Affine, ...]] = {}
    for region, node, held in sent_to_host(schedule):
        whole, cut = (sum(one.bytes for one in held if (one.cut is None) == is_whole) for is_whole in (True, False))
        if whole or cut:
            # Where host memory is the device's own, it is read and written there.
            links = [kind.host_bytes_per_s or kind.bytes_per_s / 2 for kind in cluster.kinds]
            found[node] = tuple(
                Affine(whole / per_s, cut / per_s) if region.is_on(k) else FREE for k, per_s in enumerate(links)
            )
    return found


def offloaded_bytes_per_kind(schedule: Schedule, scale: Scale) -> tuple[int, ...]:
    """Bytes of host memory that each device of a kind fills with what is saved."""
    found = [0] * len(scale.cluster.kinds)
    for region, _, held in sent_to_host(schedule):
        for one in held:
            for k, fraction in enumerate(scale.fractions(one.cut)):
                found[k] += pinned(round(one.bytes * fraction)) if region.is_on(k) else 0
    return tuple(found)
