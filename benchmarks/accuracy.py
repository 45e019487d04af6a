"""How well a step is predicted: many different programs of one model, each predicted and each run.

python benchmarks/accuracy.py --lab lab-cpu                  one model, at least 12 programs, in the lab
python benchmarks/accuracy.py --summary                      the errors in all results that are there

In: the name of a lab. Out: benchmarks/results/programs-LAB.json: of every program its predicted and measured step, the
rank correlation between the two, and that of the clock with itself: of every other round with the rounds between. No
prediction can be expected to rank programs better than the clock that ranks them.

The programs are the classics with several shares and on parts of the cluster, tensor parallelism, stored whole and cut,
gathered once and twice, and what the planner finds with and without its additions: a wide spread of predicted steps, of
which those far above the slowest baseline are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
from contestants import Subject
from lab import SPECS, build
from proof import OURS, race_in, said
from race import Pace
from scipy.stats import spearmanr
from subjects import ON_CPU, QUICK, SUBJECTS

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.ir.program import Program, RuleBook
from lopsided.ops.derive import derive_rules
from lopsided.planner.ablation import ADDITIONS, HAP
from lopsided.planner.baselines import batch_dims, data_parallel, leaves_batch_whole, stored_cut
from lopsided.planner.pins import stores_of
from lopsided.planner.plan_data import Plan, SearchReport
from lopsided.planner.planner import plan_graph, predict
from lopsided.planner.search import search
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, optimizer_named

FEWEST = 12
MOST_TIMES_OURS = 8.0
"""A program that takes longer than so many of our steps would take all the time there is."""


def programs(subject: Subject, cluster: Cluster, device: torch.device, *, most: int = 20) -> Iterator[tuple[str, Plan]]:
    """Different programs with their predictions, ours first."""
    with subject.casting(device):
        graph = capture(*subject.built(device))
    book = derive_rules(graph)
    ours = plan_graph(graph, cluster, book=book)
    yield OURS, ours
    known = {_key(ours)}
    count = 1
    for name, plan in _candidates(graph, book, cluster):
        if _key(plan) in known or plan.step_s > MOST_TIMES_OURS * ours.step_s or count >= most:
            continue
        known.add(_key(plan))
        count += 1
        yield name, plan


def _key(plan: Plan) -> tuple[object, ...]:
    return plan.on.fingerprint, str(plan.program), plan.shares, plan.regather, plan.bucket_bytes


def _candidates(graph: Graph, book: RuleBook, cluster: Cluster) -> Iterator[tuple[str, Plan]]:
    ranks = [kind for kind in cluster.kinds for _ in range(kind.devices)]
    speeds = [kind.speed for kind in ranks]
    by_speed, equal = _shares(speeds), _shares([1.0] * len(ranks))
    flat = _shares([speed**0.5 for speed in speeds])
    plain = _data_parallel(graph, book, cluster)
    cut = stored_cut(plain)
    powers = {"equal": 0.0, "flatter": 0.25, "flat": 0.5, "skewed": 0.75, "by speed": 1.0, "steep": 1.5}
    for name, power in powers.items():
        shares = _shares([speed**power for speed in speeds])
        yield f"dp {name}", _by_hand(plain, shares, cluster, cluster)
    for name, shares, again in (("equal", equal, True), ("by speed", by_speed, False), ("flat", flat, False)):
        yield f"zero {name}{' again' if again else ''}", _by_hand(cut, shares, cluster, cluster, regather=again)
    yield "tensor by speed", _by_hand(_tensor(graph, book, cluster, by_speed, plain), by_speed, cluster, cluster)
    yield "tensor flat", _by_hand(_tensor(graph, book, cluster, flat, plain), flat, cluster, cluster)
    order = sorted(range(len(cluster.kinds)), key=lambda k: -cluster.kinds[k].speed)
    for count in range(1, len(order)):
        part = cluster.only(order[:count])
        own = _shares([kind.speed for kind in part.kinds for _ in range(kind.devices)])
        yield f"dp on {part.devices}", _by_hand(plain, own, cluster, part)
        if part.devices > 1:
            yield f"zero on {part.devices}", _by_hand(cut, own, cluster, part)
    yield HAP, plan_graph(graph, cluster, book=book, without=(HAP,))
    for addition in ADDITIONS:
        yield f"no-{addition}", plan_graph(graph, cluster, book=book, without=(addition,))
    for pin, stores in _pins(book):
        yield pin, plan_graph(graph, cluster, book=book, pins=stores, without=("devices",))


def _pins(book: RuleBook) -> Iterator[tuple[str, list[str]]]:
    """The largest matrices stored cut, whether or not that is best."""
    largest = sorted(book.graph.parameters, key=lambda leaf: -leaf.value.elements)[:8]
    stores = stores_of(book)
    pins = [f"{leaf.target}={stores[leaf.value.name][1]}" for leaf in largest if len(stores[leaf.value.name]) > 1]
    yield "large stored cut", pins
    yield "large stored whole", [f"{leaf.target}=I" for leaf in largest]


def _shares(weights: Sequence[float]) -> Shares:
    part = tuple(weight / sum(weights) for weight in weights)
    return Shares(part, named=(("state", (1 / len(part),) * len(part)),))


def _data_parallel(graph: Graph, book: RuleBook, cluster: Cluster) -> Program:
    equal = _shares([1.0] * cluster.devices)
    return data_parallel(book, SharePrices(Costs(graph, cluster, optimizer_named("adamw")), Scale(cluster, equal)))


def _tensor(graph: Graph, book: RuleBook, cluster: Cluster, shares: Shares, plain: Program) -> Program:
    prices = SharePrices(Costs(graph, cluster, optimizer_named("adamw")), Scale(cluster, shares))
    stores, dims = stores_of(book), batch_dims(plain)
    return search(
        book,
        prices,
        stores=lambda leaf: stores[leaf.value.name],
        allowed=lambda node, rule: leaves_batch_whole(dims, node, rule),
    ).program


def _by_hand(program: Program, shares: Shares, cluster: Cluster, on: Cluster, *, regather: bool = False) -> Plan:
    step_s, breakdown, memory = predict(program, shares, on, "adamw", regather)
    report = SearchReport(0.0, 0, 0.0, 0.0, 0.0, "by hand", 0, ())
    return Plan(cluster, on, program, shares, "adamw", regather, step_s, breakdown, memory, (), report, (), ())


# Figures


def errors(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Mean and worst of how far predictions are off, as parts of what was measured."""
    off = [abs(row["error"]) for row in rows if "error" in row and row["same"]]
    if not off:
        return {"count": 0, "mean": math.nan, "worst": math.nan}
    return {"count": len(off), "mean": statistics.fmean(off), "worst": max(off)}


def rank_correlation(rows: Iterable[Mapping[str, Any]]) -> float:
    """Spearman's, between predicted and measured steps."""
    pairs = [(row["predicted_s"], row["measured_s"]) for row in rows if "error" in row and row["same"]]
    if len(pairs) < 3:
        return math.nan
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def clock_with_itself(rows: Iterable[Mapping[str, Any]]) -> float:
    """Spearman's, between what every other round measured and what the rounds between did."""
    rounds = [row["rounds_s"] for row in rows if "error" in row and row["same"]]
    if len(rounds) < 3 or min(map(len, rounds)) < 2:
        return math.nan
    halves = ([statistics.median(one[start::2]) for one in rounds] for start in (0, 1))
    return float(spearmanr(*halves).statistic)


def summary(results: Path) -> Iterator[str]:
    """A line for each result."""
    for path in sorted(results.glob("proof-*.json")):
        models = json.loads(path.read_text())["models"]
        for who, of in (("our plans", lambda name: name == OURS), ("all", lambda name: True)):
            found = errors(row for model in models.values() for name, row in model["contestants"].items() if of(name))
            yield f"{path.stem} {who}: {found['count']} steps, mean {found['mean']:.1%}, worst {found['worst']:.1%}"
    for path in sorted(results.glob("programs-*.json")):
        told = json.loads(path.read_text())
        yield (
            f"{path.stem}: {told['programs']} programs of {told['model']}, rank correlation "
            f"{told['rank_correlation']:.3f} (the clock's with itself {clock_of(told):.3f}), "
            f"mean {told['errors']['mean']:.1%}, worst {told['errors']['worst']:.1%}"
        )


def clock_of(told: Mapping[str, Any]) -> float:
    """What a result says of the clock."""
    return clock_with_itself(told["row"]["contestants"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", choices=tuple(SPECS), default="lab-cpu")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--most", type=int, default=20, help="programs")
    parser.add_argument("--measure", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round, nothing written")
    parser.add_argument("--summary", action="store_true", help="the errors in all results that are there")
    options = parser.parse_args()
    if options.summary:
        print("\n".join(summary(record.RESULTS)) or "there are no results")
        return
    spec = SPECS[options.lab]
    listed = QUICK if options.quick else SUBJECTS.get(spec.name, ON_CPU)
    subject = next(one for one in listed if one.name == options.model)
    pace = Pace(options.measure, 2, options.rounds, 1, 300.0)
    if options.quick:
        pace = Pace(4.0, 1, 1, 1, 20.0)
    with build(spec) as lab:
        if not lab.is_whole and not options.quick:
            parser.error("hosts without shares and links prove nothing (is this root?); --quick tries the script")
        row = race_in(lab, subject, (OURS, "alone"), partial(programs, subject, most=options.most), pace)
    print(said(spec.name, subject.name, row), flush=True)
    rows = list(row["contestants"].values())
    counted = sum("error" in one and one["same"] for one in rows)
    found = {
        "lab": spec.name,
        "model": subject.name,
        "programs": counted,
        "enough": counted >= FEWEST,
        "rank_correlation": rank_correlation(rows),
        "errors": errors(rows),
        "pace": asdict(pace),
        "row": row,
    }
    print(
        f"{counted} programs, rank correlation {found['rank_correlation']:.3f}, of the clock with itself "
        f"{clock_of(found):.3f}, errors {found['errors']}"
    )
    if not options.quick:
        record.write(f"programs-{spec.name}", found)


if __name__ == "__main__":
    main()
