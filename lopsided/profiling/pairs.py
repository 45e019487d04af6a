"""Links between two nodes that are unlike the others: some boxes may sit behind a slow one.

In: talkers, and the node of each rank. Out: the link that most pairs of nodes have, and the pairs that are slower.

One process of each of two nodes sends to the other and receives from it while the rest stands by, pair after pair.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import torch

from lopsided.cluster.devices import Link
from lopsided.profiling.links import Talkers, line_through
from lopsided.profiling.load import wait_for

MOST_NODES = 8
"""There are n · (n - 1) / 2 pairs: of more nodes that would take too long."""

_SIZES = (2**12, 2**18, 2**20)
_LOOKS = 4
_SLOWER = 2.0  # times what the quickest pairs take
_TOLD_BYTES = 2**20


def unlike_pairs(talkers: Talkers, nodes: Sequence[str], usual: Link) -> tuple[Link, tuple[tuple[str, str, Link], ...]]:
    """The link between most nodes (`usual`, where all are alike) and the pairs that are slower than that."""
    first = {node: nodes.index(node) for node in dict.fromkeys(nodes)}
    found = {
        (one, other): _between(talkers, first[one], first[other]) for one, other in itertools.combinations(first, 2)
    }
    seconds = {pair: link.latency_s + _TOLD_BYTES / link.bytes_per_s for pair, link in found.items()}
    quickest = min(seconds.values())
    slow = [pair for pair in found if seconds[pair] > _SLOWER * quickest]
    if not slow:
        return usual, ()
    others = [link for pair, link in found.items() if pair not in slow]
    near = Link(
        statistics.median(link.latency_s for link in others), statistics.median(link.bytes_per_s for link in others)
    )
    return near, tuple((one, other, found[one, other]) for one, other in slow)


def _between(talkers: Talkers, one: int, other: int) -> Link:
    wire, council = talkers.wire, talkers.council
    points = []
    for size in _SIZES:
        count = size // talkers.dtype.itemsize
        peers = {one: other, other: one}
        counts = [count if peers.get(wire.rank) == rank else 0 for rank in range(wire.size)]
        send = torch.zeros(sum(counts), dtype=talkers.dtype, device=talkers.device)
        times = []
        for _ in range(_LOOKS + 1):
            council.gather()
            started = time.perf_counter()
            wire.all_to_all(send, counts, counts, what="measuring").wait()
            wait_for(talkers.device)
            # Only the two know: the others had nothing to wait for.
            times.append(council.slowest(time.perf_counter() - started))
        # The least: whoever was not running just then says nothing about the link.
        points.append((float(size), min(times[1:])))
    latency_s, s_per_byte, _ = line_through(points)
    return Link(latency_s, min(max(1 / max(s_per_byte, 1e-18), 1.0), 1e18))
