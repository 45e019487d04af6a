"""How far plans are from the best of many random programs with balanced shares. Writes results/against_random.json.

python benchmarks/against_random.py [--cases 12] [--programs 150]

A case is a small model on a random cluster of one to three kinds. A program that is random in every choice is never
near the best; so its rivals are the cheapest programs at prices that are off by random factors, on random parts of the
cluster and from random shares. Each is balanced and judged as candidates of the planner are.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
import warnings
from typing import Any

import record

from lopsided import capture, derive_rules
from lopsided.cluster.cluster import Cluster, Kind, Link, parts
from lopsided.ir.graph import Leaf, Node, Value
from lopsided.ir.notation import Rule
from lopsided.ir.placement import Placement
from lopsided.models import by_name as models
from lopsided.planner.candidates import shares_by
from lopsided.planner.pins import limits_of
from lopsided.planner.planner import plan_graph
from lopsided.planner.proposals import CandidatePool
from lopsided.planner.search import search
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Scale, optimizer_named

MODELS = ("mlp", "bert:layers=2,width=256", "gpt2:layers=2,width=256", "t5:layers=2,width=256")
GOALS = {"most": 0.027, "median": 0.0003}  # of how far plans are off
NOISE = 0.7  # standard deviation of the logarithm of a factor


class NoisyPrices:
    """Prices that are off by a factor each, the same one whenever they are asked for."""

    def __init__(self, prices: SharePrices, state: random.Random) -> None:
        self.prices, self.state = prices, state
        self.factors: dict[object, float] = {}

    def off(self, key: object, seconds: float) -> float:
        if key not in self.factors:
            self.factors[key] = math.exp(self.state.gauss(0, NOISE))
        return seconds * self.factors[key]

    def rule(self, node: Node, rule: Rule) -> float:
        return self.off((self.prices.costs.number(node), rule), self.prices.rule(node, rule))

    def convert(self, value: Value, source: Placement, to: Placement) -> float:
        return self.off((value.shape, source, to), self.prices.convert(value, source, to))

    def store(self, leaf: Leaf, placement: Placement) -> float:
        return self.off((leaf.value.shape, placement), self.prices.store(leaf, placement))

    def fetch(self, leaf: Leaf, stored: Placement, to: Placement) -> float:
        return self.off((leaf.value.shape, stored, to), self.prices.fetch(leaf, stored, to))

    def is_cheap(self, node: Node) -> bool:
        return self.prices.is_cheap(node)


def random_cluster(state: random.Random) -> Cluster:
    kinds = tuple(
        Kind(
            f"d{k}",
            "box" if state.random() < 0.5 else f"box{k}",
            1,
            state.randint(1, 4),
            (("f32", (speed := 10 ** state.uniform(11.5, 13.5))),),
            speed / 15,
            16 * 2**30,
            10 ** state.uniform(-6, -5),
        )
        for k in range(state.randint(1, 3))
    )
    speed = 10 ** state.uniform(8.5, 11)
    return Cluster("random", "", kinds, Link(1e-5, 4 * speed), Link(3e-5, speed))


def case(number: int, programs: int) -> dict[str, Any]:
    state = random.Random(number)
    model, batch = state.choice(MODELS), state.choice((16, 64, 256))
    graph = capture(*models.load(model, batch=batch))
    on = random_cluster(state)
    book = derive_rules(graph)
    started = time.perf_counter()
    plan = plan_graph(graph, on, book=book)
    planning_s = time.perf_counter() - started
    limits = limits_of(book, (), math.inf)
    pool = CandidatePool(graph, book, optimizer_named("adamw"), limits, lambda _: None)
    places = [part for part in (on, *parts(on, pool.dtype)) if part.devices > 1]
    for _ in range(programs if places else 0):
        part = state.choice((on, *places) if on.devices > 1 else places)
        shares = shares_by(part, [kind.speed * state.uniform(0.3, 1) for kind in part.kinds])
        prices = NoisyPrices(SharePrices(pool.costs(part), Scale(part, shares)), state)
        found = search(book, prices, stores=limits.stores, allowed=limits.allowed)
        regather, bucket_bytes = state.random() < 0.2, 2 ** state.randint(20, 25)
        pool.judge("random", part, found.program, shares, regather, bucket_bytes=bucket_bytes)
        pool.balanced("random", part, found.program, shares, regather, bucket_bytes=bucket_bytes)
    best_s = min(pool.best.step_s, plan.step_s) if pool.best is not None else plan.step_s
    row = {"model": model, "batch": batch, "kinds": [(kind.devices, kind.speed) for kind in on.kinds]}
    row |= {"plan_s": plan.step_s, "best_s": best_s, "off": plan.step_s / best_s - 1, "planning_s": planning_s}
    print(f"{number:3} {model:<26}{batch:>4} on {on.devices} devices  off {row['off']:.3%}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--programs", type=int, default=150)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    rows = [case(number, chosen.programs) for number in range(chosen.cases)]
    off = [row["off"] for row in rows]
    print(f"at most {max(off):.2%} off, median {statistics.median(off):.2%}")
    results = {
        "goals": GOALS,
        "programs": chosen.programs,
        "most": max(off),
        "median": statistics.median(off),
        "rows": rows,
    }
    print(record.write("against_random", results | {"wall_s": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
