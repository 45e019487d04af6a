"""How long planning takes and what it gains. Writes results/planner.json, results/quality.json and results/kinds.json.

python benchmarks/planner.py [--speed] [--quality] [--kinds] [--quick] [--repeats 3]

Speed is a ratio to `torch.export` of the same model, timed in the same process, in turn and in shuffled order:

    search   from rule book to proven optimum: costs, prices, choices, bound, A*, the program; nothing is remembered
    whole    `plan_graph` with the rule book given: all candidates, shares, simulation, what each device is worth

Quality is the predicted step of the plan against the strategies everyone knows, on every model of the zoo. Kinds is the
whole answer where devices differ, and deep models on many devices, as ratios to export. With no option the first two
are run; with `--quick` a few cases once each, and nothing is written.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import record
import torch

from lopsided import LopsidedError, capture, derive_rules
from lopsided.capturing.retype import in_dtype
from lopsided.cluster.cluster import Cluster, Kind, Link
from lopsided.cluster.cluster_file import load_cluster
from lopsided.ir.program import RuleBook, check_program
from lopsided.models import by_name as models
from lopsided.models import zoo
from lopsided.planner.baselines import data_parallel
from lopsided.planner.candidates import Limits
from lopsided.planner.pins import stores_of
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import plan_graph
from lopsided.planner.proposals import CandidatePool
from lopsided.planner.search import Found, search
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, conversion, optimizer_named

HAP_BATCH = 32 * 64  # 32 a device on hap-64
DEVICES_BATCH = 1024  # what the smallest of these clusters has room for
LAYERS = (12, 24, 48, 96)
CLUSTERS_BY_SIZE = ("equal-8", "hap-64", "mixed-1024")
QUALITY_CLUSTERS = ("hap-64", "hap-4", "2xA6000+2x2080Ti", "equal-8")
QUALITY_BATCHES = (8, 32, 128)  # a device
GOALS = {"search": 0.5, "whole": 3.0, "devices": 2.0, "gap": 0.0}
PEERS = (
    {
        "name": "meta-pytorch/autoparallel",
        "what": "integer program, 8 equal devices, from model to runnable graph",
        "seconds": {"vgg19": 3, "vit": 18, "bert": 26, "bert-moe": 53},
        "note": "its default settings hit an assertion on bert and bert-moe",
    },
    {
        "name": "meta-pytorch/autoparallel, by its own notes",
        "what": "LLaMA-3 8B on a two-dimensional mesh of 64: building and solving",
        "seconds": {"llama (8B)": 15 + 36},
        "note": "",
    },
)
"""What the nearest living peer takes, for scale: another task (equal devices only), timed elsewhere."""

NOTHING = 0.01
"""Less than this is no gain: a prediction is not that exact."""

LONG_ENOUGH_S = 45.0
"""What one case may spend on repetitions of one action; the first is always made."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model with a global batch on a cluster."""

    model: str
    cluster: str = "hap-64"
    batch: int = HAP_BATCH
    dtype: str = "f32"
    optimizer: str = "adamw"
    whole: bool = True

    @property
    def told(self) -> dict[str, Any]:
        names = ("model", "cluster", "batch", "dtype", "optimizer")
        return {name: getattr(self, name) for name in names} | {"devices": load_cluster(self.cluster).devices}


HAP = tuple(Case(model) for model in ("vit", "bert", "bert-moe", "bert-moe:experts=128", "vgg19"))
LLAMA = Case("llama:layers=80,width=8192", "mixed-1024", 64, "bf16")
DEPTH = tuple(Case(f"bert:layers={layers}", whole=False) for layers in LAYERS)

Action = Callable[[], object]


# Timing


def in_turn(actions: dict[str, Action], repeats: int) -> dict[str, Any]:
    """Every repetition of every action, in shuffled order; each is made once before, unless it is long.

    Beside seconds those of the processor are written: on a machine that does other things too, they tell more.
    """
    shuffle = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    cpu: dict[str, list[float]] = {name: [] for name in actions}

    def keep(name: str, taken: tuple[float, float]) -> None:
        seconds[name].append(taken[0])
        cpu[name].append(taken[1])

    for name, action in actions.items():
        first = timed(action)
        if first[0] > LONG_ENOUGH_S / 2:
            keep(name, first)
    for _ in range(repeats):
        for name in shuffle.sample(list(actions), len(actions)):
            if not seconds[name] or sum(seconds[name]) + seconds[name][-1] < LONG_ENOUGH_S:
                keep(name, timed(actions[name]))
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "median_s": {name: statistics.median(taken) for name, taken in seconds.items()},
        "median_cpu_s": {name: statistics.median(taken) for name, taken in cpu.items()},
    }


def timed(action: Action) -> tuple[float, float]:
    """Seconds on the clock and of the processor."""
    conversion.cache_clear()
    gc.collect()
    started, used = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - started, time.process_time() - used


class Subject:
    """A captured case, and what is done with it."""

    def __init__(self, case: Case) -> None:
        with torch.device("meta"):
            self.model, self.batch = models.load(case.model, batch=case.batch)
        graph = capture(self.model, self.batch)
        self.graph = in_dtype(graph, case.dtype)
        self.book = derive_rules(self.graph)
        self.optimizer = case.optimizer
        self.found: dict[str, Found] = {}
        self.plans: dict[str, Plan] = {}

    def export(self) -> None:
        torch.export.export(self.model, (), dict(self.batch), strict=False)

    def search(self, cluster: str) -> None:
        on = load_cluster(cluster)
        costs = Costs(self.graph, on, optimizer_named(self.optimizer))
        prices = SharePrices(costs, Scale(on, shares_by_speed(on)))
        stores = stores_of(self.book)
        self.found[cluster] = search(self.book, prices, stores=lambda leaf: stores[leaf.value.name])

    def plan(self, cluster: str) -> None:
        self.plans[cluster] = plan_graph(self.graph, load_cluster(cluster), book=self.book, optimizer=self.optimizer)

    def plan_on(self, cluster: Cluster) -> None:
        self.plans[cluster.name] = plan_graph(self.graph, cluster, book=self.book, optimizer=self.optimizer)

    def report(self, cluster: str) -> dict[str, Any]:
        """What the last search and the last plan came to."""
        found = self.found[cluster]
        check_program(found.program, self.book)
        names = ("gap", "why", "states", "expanded", "remembered", "cost_s", "bound_s")
        told: dict[str, Any] = {"nodes": len(self.graph.nodes), "search": {n: getattr(found, n) for n in names}}
        if cluster in self.plans:
            plan = self.plans[cluster]
            check(plan, self.book)
            told["whole"] = {
                "gap": plan.search.gap,
                "why": plan.search.why,
                "states": plan.search.states,
                "searches": plan.search.searches,
                "step_s": plan.step_s,
                "devices_used": plan.on.devices,
                "rounds": list(plan.search.rounds),
            }
        return told


def shares_by_speed(cluster: Cluster) -> tuple[float, ...]:
    speeds = [kind.speed for kind in cluster.kinds for _ in range(kind.devices)]
    return tuple(speed / sum(speeds) for speed in speeds)


# Speed


def against_export(case: Case, repeats: int) -> dict[str, Any]:
    """One search and the whole answer, each as a ratio to export."""
    subject = Subject(case)
    actions: dict[str, Action] = {"export": subject.export, "search": partial(subject.search, case.cluster)}
    if case.whole:
        actions["whole"] = partial(subject.plan, case.cluster)
    taken = in_turn(actions, repeats)
    ratio, cpu_ratio = (
        {name: middle[name] / middle["export"] for name in middle if name != "export"}
        for middle in (taken["median_s"], taken["median_cpu_s"])
    )
    seconds = ", ".join(f"{name} {middle:.2f} s" for name, middle in taken["median_s"].items())
    print(f"{case.model:<28}", seconds, shown(ratio), f"(processor {shown(cpu_ratio)})", flush=True)
    return case.told | taken | {"ratio": ratio, "cpu_ratio": cpu_ratio} | subject.report(case.cluster)


def shown(ratios: dict[str, float]) -> str:
    return "→ " + ", ".join(f"{name} {ratio:.2f}×" for name, ratio in ratios.items())


def by_devices(model: str, repeats: int) -> dict[str, Any]:
    """The same model and batch on clusters of 8, 64 and 1,024 devices, in turn; for one model the whole answer too."""
    subject = Subject(Case(model, batch=DEVICES_BATCH))
    parts = ("search", "whole") if model == "bert" else ("search",)
    actions: dict[str, Action] = {f"search {name}": partial(subject.search, name) for name in CLUSTERS_BY_SIZE}
    if "whole" in parts:
        actions |= {f"whole {name}": partial(subject.plan, name) for name in CLUSTERS_BY_SIZE}
    taken = in_turn(actions, repeats)
    first, *_, last = CLUSTERS_BY_SIZE
    ratio, cpu_ratio = (
        {name: middle[f"{name} {last}"] / middle[f"{name} {first}"] for name in parts}
        for middle in (taken["median_s"], taken["median_cpu_s"])
    )
    print(f"{model:<28} 8 to 1,024 devices", shown(ratio), f"(processor {shown(cpu_ratio)})", flush=True)
    told = {"model": model, "batch": DEVICES_BATCH, "ratio": ratio, "cpu_ratio": cpu_ratio}
    return told | taken | {"on": {cluster: subject.report(cluster) for cluster in CLUSTERS_BY_SIZE}}


def growth(cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How many times longer the last case takes than the first."""
    first, last = cases[0]["median_s"], cases[-1]["median_s"]
    return {name: last[name] / first[name] for name in ("export", "search")}


def speed(repeats: int, quick: bool) -> dict[str, Any]:
    if quick:
        return {"cases": [against_export(case, 1) for case in (Case("bert:layers=2"), Case("vgg19"))]}
    started = time.perf_counter()
    cases = [against_export(case, repeats) for case in (*HAP, LLAMA)]
    depth = [against_export(case, repeats) for case in DEPTH]
    devices = [by_devices(case.model, repeats) for case in HAP if ":" not in case.model]
    grown = growth(depth)
    print(f"bert from {LAYERS[0]} to {LAYERS[-1]} layers", shown(grown))
    searches = [*cases, *depth, *(on for case in devices for on in case["on"].values())]
    met = {
        "search": all(case["ratio"]["search"] <= GOALS["search"] for case in cases),
        "whole": all(case["ratio"]["whole"] <= GOALS["whole"] for case in cases),
        "depth": grown["search"] <= grown["export"],
        "devices": all(case["ratio"]["search"] <= GOALS["devices"] for case in devices),
        "gap": all(
            case[part]["gap"] <= GOALS["gap"] for case in searches for part in ("search", "whole") if part in case
        ),
    }
    print("goals met:", met)
    return {
        "goals": GOALS,
        "peers": PEERS,
        "met": met,
        "cases": cases,
        "depth": depth,
        "growth": grown,
        "devices": devices,
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time(),
    }


# Many kinds


def all_different(kinds: int, nodes: int = 1, count: int = 1) -> Cluster:
    """So many kinds of devices, each in nodes of its own, with speeds and memories drawn at random."""
    state = random.Random(0)
    drawn = []
    for k in range(kinds):
        speed, memory = 5e12 * 4 ** state.random(), state.choice((16, 24, 32, 48)) * 2**30
        flops = (("f32", speed), ("bf16", 4 * speed))
        drawn.append(Kind(f"d{k}", f"n{k}", nodes, count, flops, speed / 12, memory, 8e-6))
    name = f"{kinds} kinds, {kinds * nodes * count:,} devices"
    return Cluster(name, "", tuple(drawn), Link(1e-5, 5e10), Link(3e-5, 5e9))


def by_kinds(quick: bool) -> dict[str, Any]:
    """The whole answer where devices differ: once each, beside an export of the same model; they are long enough to
    tell. Ratios are of the processor's seconds, which other work on the machine changes least."""
    started = time.perf_counter()
    rows = []
    for case, places in MANY[:1] if quick else MANY:
        subject = Subject(case)
        for on in [load_cluster(one) if isinstance(one, str) else one for one in (places[:2] if quick else places)]:
            (export_s, export_cpu_s), (taken_s, cpu_s) = (
                timed(action) for action in (subject.export, partial(subject.plan_on, on))
            )
            plan = subject.plans[on.name]
            row = case.told | {"cluster": on.name, "kinds": len(on.kinds), "devices": on.devices}
            row |= {"export_s": export_s, "export_cpu_s": export_cpu_s, "whole_s": taken_s, "cpu_s": cpu_s}
            row |= {"ratio": cpu_s / export_cpu_s, "step_s": plan.step_s}
            rows.append(row | {"searches": plan.search.searches, "used": plan.on.devices, "load": os.getloadavg()[0]})
            print(f"{case.model:<28}{on.name:<30} {cpu_s:.1f} s → {cpu_s / export_cpu_s:.2f}×", flush=True)
    return {"goals": {"kinds": 6.0, "depth": 3.0}, "rows": rows, "wall_s": time.perf_counter() - started}


BY_KINDS = tuple(all_different(kinds) for kinds in (4, 8, 16, 32, 64))
MANY: tuple[tuple[Case, tuple[Cluster | str, ...]], ...] = (
    (Case("bert", batch=256), BY_KINDS),
    (Case("bert", batch=2**14), (all_different(16, 8, 8), all_different(16, 78, 8))),
    (Case("llama:layers=32", batch=64, dtype="bf16"), BY_KINDS[-1:]),
    (Case("llama:layers=32", batch=2**13, dtype="bf16"), (all_different(16, 78, 8),)),
    (Case("gpt2:layers=96", batch=256), ("mixed-1024",)),
    (LLAMA, ("mixed-1024",)),
)


# Quality


def quality(quick: bool) -> dict[str, Any]:
    """Every model on every cluster with every batch; each model is captured once for each global batch."""
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    before = steps_before()
    for model in ("mlp", "vgg19") if quick else zoo.ZOO:
        for row in rows_of(model, QUALITY_BATCHES[1:2] if quick else QUALITY_BATCHES):
            rows.append(row | {"before_s": before.get(cell(row))})
        results = {
            "wall_s": time.perf_counter() - started,
            "cpu_s": time.process_time(),
            "rows": in_order(rows),
        }
        if not quick:
            # So that an interrupted run leaves what it has.
            record.write("quality", results)
    return results


def cell(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["model"], row["cluster"], row["batch_per_device"]


def steps_before() -> dict[tuple[str, str, int], float]:
    """The step of every cell in the results that this run writes over."""
    path = record.RESULTS / "quality.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {cell(row): row["step_s"] for row in rows if "step_s" in row}


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = list(zoo.ZOO)
    return sorted(
        rows,
        key=lambda row: (names.index(row["model"]), QUALITY_CLUSTERS.index(row["cluster"]), row["batch_per_device"]),
    )


def rows_of(model: str, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    by_batch: dict[int, list[tuple[Cluster, int]]] = {}
    for cluster in map(load_cluster, QUALITY_CLUSTERS):
        for each in batches:
            by_batch.setdefault(each * cluster.devices, []).append((cluster, each))
    for batch, places in by_batch.items():
        subject = Subject(Case(model, batch=batch))
        for cluster, each in places:
            row = {"model": model, "cluster": cluster.name, "batch_per_device": each, "batch": batch}
            row |= planned(subject, cluster)
            print(told_briefly(row), flush=True)
            yield row


def check(plan: Plan, book: RuleBook) -> None:
    """The program keeps to its rules. One that computes the batch in rounds is of the graph of one round."""
    check_program(plan.program, book if plan.microbatches == 1 else derive_rules(plan.graph))


def planned(subject: Subject, cluster: Cluster) -> dict[str, Any]:
    """One cell of the table; where nothing fits, what stands in the way."""
    started = time.perf_counter()
    try:
        plan = plan_graph(subject.graph, cluster, book=subject.book, optimizer=subject.optimizer)
    except LopsidedError as error:
        return {"error": str(error).splitlines()[0], "planning_s": time.perf_counter() - started}
    seconds = time.perf_counter() - started
    check(plan, subject.book)
    baselines = {b.name: b.step_s if b.fits else None for b in plan.baselines}
    row = {
        "step_s": plan.step_s,
        "baselines": baselines,
        "over_dp": speed_up(baselines, plan.step_s, ("dp-ev", "dp-cp")),
        "over_classics": speed_up(baselines, plan.step_s, CLASSICS),
        "over_part": speed_up(baselines, plan.step_s),
        "devices_used": plan.on.devices,
        "kinds_used": {kind.name: kind.devices for kind in plan.on.kinds},
        "ideal_s": ideal_s(subject.book, cluster, subject.optimizer),
        "breakdown": {name: getattr(plan.breakdown, name) for name in plan.breakdown.__slots__},
        "rounds": plan.microbatches,
        "runs_again": sum(rerun.level != "chunked" for rerun in plan.reruns),
        "chunked": any(rerun.level == "chunked" for rerun in plan.reruns),
        "on_host": bool(plan.on_host),
        "gap": plan.search.gap,
        "why": plan.search.why,
        "searches": plan.search.searches,
        "planning_s": seconds,
    }
    return row | {"dp_uncut": uncut(subject.book, cluster, subject.optimizer), "nothing_gained": why_nothing(row)}


def uncut(book: RuleBook, cluster: Cluster, optimizer: str) -> int:
    """How many calls the baselines' data parallelism does not run on pieces of the batch: there should be none.

    A baseline that is not what its name says makes a plan look better than it is.
    """
    equal = (1 / cluster.devices,) * cluster.devices
    prices = SharePrices(Costs(book.graph, cluster, optimizer_named(optimizer)), Scale(cluster, equal))
    program = data_parallel(book, prices)
    cut = {name for name, placement in program.leaves if placement.is_shard}
    count = 0
    for step in program.steps:
        # What has no batch, such as embedded positions, is rightly computed whole.
        has_batch = any(name in cut for name in step.node.operands)
        count += has_batch and not any(placement.is_shard for placement in (*step.rule.needs, *step.rule.gives))
        cut.update(v.name for v, give in zip(step.node.results, step.rule.gives, strict=True) if give.is_shard)
    return count


def ideal_s(book: RuleBook, cluster: Cluster, optimizer: str) -> float:
    """All work divided at will over all devices and nothing sent: no strategy is predicted faster."""
    limits = Limits(lambda leaf: (), lambda node, rule: True)
    return CandidatePool(book.graph, book, optimizer_named(optimizer), limits, lambda _: None).ideal_s(cluster)


CLASSICS = ("dp-ev", "dp-cp", "fsdp", "tensor", "single")


def fastest(baselines: dict[str, float | None], names: Sequence[str] = ()) -> str:
    """The name of the fastest baseline that fits, among these if any are named; empty if none fits."""
    there = {name: s for name, s in baselines.items() if s is not None and (not names or name in names)}
    return min(there, key=lambda name: there[name], default="")


def speed_up(baselines: dict[str, float | None], step_s: float, names: Sequence[str] = ()) -> float | None:
    best = baselines.get(fastest(baselines, names))
    return None if best is None else best / step_s


def why_nothing(row: dict[str, Any]) -> str:
    """Why a plan gains less than a hundredth over the best classic; empty where it gains more."""
    if row["over_classics"] is None or row["over_classics"] - 1 >= NOTHING:
        return ""
    best = fastest(row["baselines"], CLASSICS)
    if best == "single":
        return "one device is as fast: more of them would send longer than they would save"
    part = {name: seconds / row["step_s"] for name, seconds in row["breakdown"].items()}
    computing = part["compute_s"] + part["optimizer_s"]
    could = row["baselines"][best] / row["ideal_s"] - 1
    if could < 5 * NOTHING:
        return f"{best} is within {could:.1%} of all work divided perfectly and nothing sent"
    if computing >= 0.9:
        return f"{computing:.0%} of the step is computation; {best} leaves {part['exposed_s']:.1%} of sending exposed"
    beside = {"blocking": part["blocking_s"], "exposed": part["exposed_s"], "waiting": part["waiting_s"]}
    rest = ", ".join(f"{name} {size:.0%}" for name, size in beside.items() if size >= 0.02)
    return f"computation {computing:.0%}, {rest}: no program found sends less than {best}"


def told_briefly(row: dict[str, Any]) -> str:
    head = f"{row['model']:<9}{row['cluster']:<18}{row['batch_per_device']:>4} a device  {row['planning_s']:5.1f} s  "
    if "error" in row:
        return f"{head}{row['error']}"
    dp, classics = (f"{row[key]:.2f}×" if row[key] else "–" for key in ("over_dp", "over_classics"))
    return f"{head}over dp {dp}, over classics {classics}, gap {row['gap']:.2g}  {row['nothing_gained']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="only how long planning takes")
    parser.add_argument("--quality", action="store_true", help="only what it gains")
    parser.add_argument("--kinds", action="store_true", help="only how long it takes where devices differ")
    parser.add_argument("--quick", action="store_true", help="a few cases, once each; nothing is written")
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    if chosen.kinds:
        results = by_kinds(chosen.quick)
        if not chosen.quick:
            print(record.write("kinds", results))
        return
    both = chosen.speed == chosen.quality
    if both or chosen.speed:
        results = speed(chosen.repeats, chosen.quick)
        if not chosen.quick:
            print(record.write("planner", results))
    if both or chosen.quality:
        results = quality(chosen.quick)
        if not chosen.quick:
            print(record.write("quality", results))


if __name__ == "__main__":
    main()
