"""Plans under tight memory against what is configured by hand, on random small clusters."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from pathlib import Path

import pytest

from lopsided.cluster.cluster import Cluster, Link
from lopsided.errors import DoesNotFitError
from lopsided.planner.planner import plan_graph
from tests.support import clusters
from tests.support.jobs import book_of

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
with contextlib.suppress(ValueError):
    sys.path.remove(str(BENCHMARKS))
sys.path.append(str(BENCHMARKS))

from by_hand import ByHand  # noqa: E402

# A plan has to be as good as 1.05 times the best by hand.
CLOSE = 1.05
SPECS = (
    "llama:layers=2,width=24,heads=3,kv_heads=3,ffn=40,seq=16,vocab=61,batch=16",
    "gpt2:layers=2,width=24,heads=3,seq=16,vocab=61,batch=12,dropout=0",
    "vit:layers=2,width=24,heads=3,image=16,patch=4,classes=7,batch=24,dropout=0",
)
BY_HAND = {spec: ByHand(book_of(spec).graph, book_of(spec)) for spec in SPECS}


def tight(state: random.Random) -> Cluster:
    """One to three kinds of devices, of which few have the memory for their part of the batch at once."""
    made = [
        clusters.kind(
            f"k{k}",
            f"n{k}" if state.random() < 0.5 else "box",
            count=state.randint(1, 2),
            speed=10 ** state.uniform(8.5, 10),
            bytes_per_s=10 ** state.uniform(8, 9),
            memory=10 ** state.uniform(5.3, 6.3),
            launch_s=10 ** state.uniform(-6.5, -5),
            host_bytes_per_s=10 ** state.uniform(7.5, 9) if state.random() < 0.7 else 0.0,
        )
        for k in range(state.randint(1, 3))
    ]
    return clusters.cluster(*made, link=Link(1e-6, 10 ** state.uniform(7.5, 9.5)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(30))
def test_a_plan_is_as_good_as_the_best_by_hand(seed: int) -> None:
    """And where nobody would have one by hand, there may still be one."""
    state = random.Random(seed)
    spec, on = state.choice(SPECS), tight(state)
    book = book_of(spec)
    hand_s, how = BY_HAND[spec].anywhere(on)
    try:
        plan = plan_graph(book.graph, on, book=book)
    except DoesNotFitError:
        assert hand_s == math.inf, how
        return
    assert plan.step_s <= CLOSE * hand_s, (how, plan.microbatches, plan.reruns, plan.on_host)
