"""Which models fit on clusters that people own, and how quick a step is. Writes results/fits.json and docs/fits.md.

python benchmarks/fits.py [--models llama-1b,...] [--clusters ...] [--seconds 60]

Ten models, planned as people would (bf16, AdamW, sequences of 2048 for language models), on ten clusters. Beside every
plan stands the best configuration made by hand that the same timeline and the same count of memory say fits: data
parallelism, ZeRO or ZeRO gathered again, equal shares or shares by speed, with no checkpointing or with one level of
it in every block alike, the loss whole or in chunks. Results are added to those in the file; a pair is planned anew
when it is asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import record
import torch

from lopsided.capturing.capture_graph import capture
from lopsided.capturing.retype import in_dtype
from lopsided.cluster.cluster import Cluster, Kind, Link
from lopsided.cluster.cluster_file import load_cluster
from lopsided.errors import DoesNotFitError, LopsidedError
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.ir.program import RuleBook, one_device
from lopsided.models import by_name as models
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.candidates import memory_limits, shares_by
from lopsided.planner.planner import plan_graph
from lopsided.planner.recompute import blocks_of
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Calls, Costs, Scale, optimizer_named
from lopsided.schedule.decisions import LEVELS, Decisions, Rerun
from lopsided.schedule.loss_heads import loss_heads
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, holdings
from lopsided.schedule.pricing import price
from lopsided.schedule.timeline import run

PAGE = Path(__file__).parents[1] / "docs" / "fits.md"
ADAMW = optimizer_named("adamw")

_LLAMA = "kv_heads=8,seq=2048,vocab=128256"
MODELS: dict[str, str] = {
    "resnet50": "resnet50:image=224,classes=1000,batch=256",
    "gpt2-medium": "gpt2:layers=24,width=1024,heads=16,seq=1024,vocab=50257,batch=64",
    "bert-large": "bert:layers=24,width=1024,heads=16,seq=512,vocab=30522,batch=128",
    "vit-l": "vit:layers=24,width=1024,heads=16,image=224,patch=16,classes=1000,batch=512",
    "unet-sdxl": "unet:layers=2,width=320,factors=1-2-4,heads=10,image=128,batch=32",
    "llama-1b": f"llama:layers=16,width=2048,heads=32,ffn=8192,{_LLAMA},batch=32",
    "llama-3b": f"llama:layers=28,width=3072,heads=24,ffn=8192,{_LLAMA},batch=32",
    "llama-8b": f"llama:layers=32,width=4096,heads=32,ffn=14336,{_LLAMA},batch=32",
    "t5-3b": "t5:layers=24,width=2048,heads=32,ffn=8192,seq=512,target_seq=512,vocab=32128,batch=64",
    "mixtral": "bert-moe:layers=32,width=4096,heads=32,ffn=14336,experts=8,seq=2048,vocab=32000,batch=32",
}
"""Of the zoo, at the sizes of the models they are named after; Mixtral is its mixture of experts with attention both
ways, T5 a wide one of three thousand million parameters."""


def _kind(name: str, node: str, count: int, bf16: float, f32: float, bytes_per_s: float, gib: float) -> Kind:
    """Half of the peak FLOP/s of NVIDIA's datasheets is assumed to be reached, as in the presets."""
    speeds = (("bf16", bf16 * 5e11), ("f16", bf16 * 5e11), ("f32", f32 * 5e11))
    return Kind(name, node, 1, count, speeds, bytes_per_s * 1e9, int(gib * 2**30), 8e-6)


def _rtx(name: str, node: str, count: int = 1) -> Kind:
    figures = {"3060": (25.5, 12.7, 360, 12), "3090": (71, 35.6, 936, 24), "4090": (165, 82.6, 1008, 24)}
    return _kind(f"rtx{name}", node, count, *figures[name])


PCIE, FAST = Link(2e-5, 10e9), Link(1e-5, 24e9)
BY_HAND: tuple[Cluster, ...] = (
    Cluster("4090+3060", "", (_rtx("4090", "desktop"), _rtx("3060", "desktop")), PCIE, PCIE),
    Cluster("2x3090 and 2x3060, 1 Gbit", "", (_rtx("3090", "a", 2), _rtx("3060", "b", 2)), PCIE, Link(1e-4, 0.11e9)),
    Cluster("2x3090 and 2x3060, 10 Gbit", "", (_rtx("3090", "a", 2), _rtx("3060", "b", 2)), PCIE, Link(5e-5, 1.1e9)),
    Cluster(
        "three laptops",
        "RTX 4070, 4060 and 3050 of laptops",
        (
            _kind("rtx4070", "one", 1, 58, 29, 256, 8),
            _kind("rtx4060", "two", 1, 44, 22, 256, 8),
            _kind("rtx3050", "three", 1, 20, 10, 192, 6),
        ),
        PCIE,
        Link(1e-4, 0.11e9),
    ),
    Cluster("A100-80+3x3060", "", (_kind("a100", "box", 1, 312, 19.5, 2039, 80), _rtx("3060", "box", 3)), PCIE, PCIE),
    Cluster(
        "8xH100+8xA100, 200 Gbit",
        "",
        (_kind("h100", "a", 8, 989, 67, 3350, 80), _kind("a100", "b", 8, 312, 19.5, 2039, 80)),
        Link(1e-5, 200e9),
        Link(3e-5, 22e9),
    ),
)
PRESETS = ("3090+3060", "2xA6000+2x2080Ti", "8xA100+8xV100", "4xH100+4xA100+8xL4")
CLUSTERS = {cluster.name: cluster for cluster in (*map(load_cluster, PRESETS), *BY_HAND)}


# By hand


class ByHand:
    """Configurations that a competent engineer would try, each lowered once for all clusters."""

    def __init__(self, graph: Graph, book: RuleBook) -> None:
        self.graph, self.book, self.calls = graph, book, Calls(graph)
        nodes, heads = graph.nodes, loss_heads(graph)
        levels: list[tuple[Rerun, ...]] = [()]
        for level in LEVELS:
            levels.append(tuple(Rerun(nodes[a].name, nodes[b - 1].name, level) for a, b in blocks_of(graph)))
        if heads:
            inside = {name for head in heads for name in head.nodes}
            chunks = tuple(head.chunked() for head in heads)
            blocks = blocks_of(graph, inside)
            levels.append(chunks)
            for level in LEVELS:
                levels.append((*(Rerun(nodes[a].name, nodes[b - 1].name, level) for a, b in blocks), *chunks))
        self.levels = levels

    def best(self, on: Cluster) -> tuple[float, str]:
        """The quickest that fits on all devices; infinite where none does."""
        costs = Costs(self.graph, on, ADAMW, self.calls)
        found = [(float("inf"), "none")]
        speeds = [kind.flops("bf16") for kind in on.kinds]
        plain = data_parallel(self.book, SharePrices(costs, Scale(on, shares_by(on, [1.0 for _ in speeds]))))
        for how, program, regather in (
            ("dp", plain, False),
            ("zero", stored_cut(plain), False),
            ("zero again", stored_cut(plain), True),
        ):
            for reruns in self.levels:
                level = _told(reruns)
                schedule = lower(program, Decisions(regather=regather, reruns=reruns))
                priced = price(schedule, costs)
                held = holdings(schedule, ADAMW, devices=on.devices)
                for shared, weights in (("equal", [1.0 for _ in speeds]), ("by speed", speeds)):
                    scale = Scale(on, shares_by(on, weights))
                    memory = bytes_per_kind(held, scale)
                    if all(used <= limit for used, limit in zip(memory, memory_limits(on), strict=True)):
                        name = f"{how}, {shared}, {level}"
                        found.append((run(priced, costs.network, scale).step_s, name))
        return min(found)

    def alone(self, on: Cluster) -> tuple[float, str]:
        """The same on one device, where every way to store parameters is the same."""
        costs, scale = Costs(self.graph, on, ADAMW, self.calls), Scale(on, Shares((1.0,)))
        found = [(float("inf"), "none")]
        for reruns in self.levels:
            schedule = lower(one_device(self.graph), Decisions(reruns=reruns))
            if bytes_per_kind(holdings(schedule, ADAMW), scale)[0] <= memory_limits(on)[0]:
                level = _told(reruns)
                step_s = run(price(schedule, costs), costs.network, scale).step_s
                found.append((step_s, f"{level}, on one {on.kinds[0].name}"))
        return min(found)

    def anywhere(self, on: Cluster) -> tuple[float, str]:
        single = (replace(on, kinds=(replace(kind, nodes=1, count=1),)) for kind in on.kinds)
        return min(self.best(on), *map(self.alone, single))


def _told(reruns: Sequence[Rerun]) -> str:
    level = next((rerun.level for rerun in reruns if rerun.level != "chunked"), "no")
    return f"{level} checkpointing{', loss in chunks' if any(r.level == 'chunked' for r in reruns) else ''}"


# Pairs


def planned(graph: Graph, book: RuleBook, cluster: Cluster, seconds: float) -> dict[str, Any]:
    """What the planner says of a pair."""
    used = time.process_time()
    try:
        plan = plan_graph(graph, cluster, book=book, time_limit_s=seconds)
    except DoesNotFitError as error:
        told = {"uses": error.facts.get("uses", ""), "biggest": error.facts.get("biggest", ""), "do": error.do}
        return {"fits": False, "why": error.what, **told, "planning_cpu_s": time.process_time() - used}
    kinds = {kind for rerun in plan.reruns for kind in rerun.kinds}
    return {
        "fits": True,
        "step_s": plan.step_s,
        "devices": len(plan.devices),
        "reruns": sum(rerun.level != "chunked" for rerun in plan.reruns),
        "rows": [rerun.rows for rerun in plan.reruns if rerun.level == "chunked"],
        "on_host": [f"{one.percent} % on {plan.on.kinds[one.kind].name}" for one in plan.on_host],
        "apart": bool(kinds),
        "regather": plan.regather,
        "planning_cpu_s": time.process_time() - used,
    }


def pairs(names: Sequence[str], clusters: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    for name in names:
        try:
            with torch.device("meta"):
                model, batch = models.load(MODELS[name])
            used = time.process_time()
            graph = in_dtype(capture(model, batch), "bf16")
            capture_s = time.process_time() - used
            book = derive_rules(graph)
        except LopsidedError as error:
            yield {"model": name, "cluster": "", "fits": False, "why": error.what}
            continue
        hand = ByHand(graph, book)
        for place in clusters:
            told = planned(graph, book, CLUSTERS[place], seconds)
            hand_s, how = hand.anywhere(CLUSTERS[place])
            told |= {"hand": how, "hand_s": hand_s if how != "none" else None, "capture_cpu_s": capture_s}
            yield {"model": name, "cluster": place, **told}


# The page


def page(found: Sequence[Mapping[str, Any]]) -> str:
    fit = [one for one in found if one["fits"]]
    by_hand = [one for one in found if one.get("hand_s")]
    again = [one for one in fit if one["reruns"]]
    chunked = [one for one in fit if one.get("rows")]
    gains = [one["hand_s"] / one["step_s"] for one in fit if one.get("hand_s")]
    slower = [gain for gain in gains if gain < 0.95]
    said = f"Of {len(found)} pairs {len(fit)} have a plan, {len(again)} of them with something run again and "
    said += f"{len(chunked)} with the loss in chunks; by hand "
    said += f"{len(by_hand)} fit."
    if gains:
        said += f" Where both do, the plan is {statistics.median(gains):.2f} times as fast in the median, and in "
        said += f"{len(slower)} pairs more than 5 % slower."
    lines = [
        "# What fits",
        "",
        "Generated by `python benchmarks/fits.py` from `benchmarks/results/fits.json`. Steps are predicted, in bf16",
        "and with AdamW; planning is in seconds of the processor. The runner has the sizes of models and batches.",
        "",
        said,
        "",
        "| model | cluster | plan | runs again | rows of the loss | best by hand | by hand | planning |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        plan = f"{one['step_s']:.3g} s on {one['devices']}" if one["fits"] else "does not fit"
        blocks = f"{one['reruns']} blocks{' on some kinds' if one['apart'] else ''}" if one.get("reruns") else ""
        hand = f"{one['hand_s']:.3g} s" if one.get("hand_s") else "does not fit"
        took = f"{one.get('planning_cpu_s', 0.0):.1f} s"
        rows = ", ".join(f"{count:,}" for count in one.get("rows", ()))
        cells = (one["model"], one["cluster"], plan, blocks, rows, hand, one.get("hand", ""), took)
        lines.append(f"| {' | '.join(cells)} |")
    if without := [one for one in found if not one["fits"]]:
        lines += ["", "## What does not fit, and what is missing", ""]
        for one in without:
            lines.append(f"- **{one['model']} on {one['cluster'] or 'anything'}**: {one['why']}.")
            lines += [f"  {what}: {one[key]}." for key, what in _PROOF.items() if one.get(key)]
    return "\n".join(lines) + "\n"


_PROOF = {"uses": "What takes it", "biggest": "The biggest", "do": "What would make it fit"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=";".join(CLUSTERS), help="separated by ;")
    parser.add_argument("--seconds", type=float, default=60.0, help="for planning a pair")
    parser.add_argument("--add", type=Path, help="lines that this printed elsewhere, in place of planning")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    path = record.RESULTS / "fits.json"
    before = json.loads(path.read_text())["pairs"] if path.exists() else []
    found = {(one["model"], one["cluster"]): one for one in before}
    if asked.add is not None:
        new: Iterable[dict[str, Any]] = map(json.loads, asked.add.read_text().splitlines())
    else:
        new = pairs(asked.models.split(","), asked.clusters.split(";"), asked.seconds)
    for one in new:
        found[one["model"], one["cluster"]] = one
        print(json.dumps(one), flush=True)
        record.write("fits", {"pairs": [*found.values()]})
    order = [(model, cluster) for model in MODELS for cluster in ("", *CLUSTERS)]
    PAGE.write_text(page([found[pair] for pair in order if pair in found]))


if __name__ == "__main__":
    main()
