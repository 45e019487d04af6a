"""Which models fit on clusters that people own, and how quick a step is. Writes results/fits.json.

python benchmarks/fits.py [--models llama-1b,...] [--clusters "3090+3060;..."] [--cells] [--seconds 120]
                          [--to LINES] [--add LINES ...]

Ten models, planned as people would (bf16, or f16 where a device knows no bf16; AdamW; sequences of 2048 for language
models), on ten clusters; and the cells of planning.md, models of the zoo in f32, that had no plan before anything ran
again, in rounds or in chunks. Beside every plan stands the best configuration made by hand that the same timeline and
the same count of memory say fits (`by_hand`). Planning is measured in seconds of the processor, beside an export of
the same model.

Results are added to those in the file; a pair is planned anew when it is asked for. Several runs at once write lines
(`--to`, which goes on where it ended), which `--add` puts into the file.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import record
import torch
from by_hand import ByHand

from lopsided.capturing.capture_graph import capture
from lopsided.capturing.retype import in_dtype
from lopsided.cluster.cluster import Cluster, Kind, Link
from lopsided.cluster.cluster_file import load_cluster
from lopsided.errors import DoesNotFitError
from lopsided.ir.graph import Graph
from lopsided.ir.program import RuleBook
from lopsided.models import by_name as models
from lopsided.ops.derive import derive_rules
from lopsided.planner.planner import plan_graph
from lopsided.schedule.cost import Scale, optimizer_named
from lopsided.schedule.host_state import host_bytes_per_kind

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


def _kind(
    name: str, node: str, count: int, bf16: float, f32: float, bytes_per_s: float, gib: float, host: float = 12
) -> Kind:
    """Half of the peak FLOP/s of NVIDIA's datasheets is assumed to be reached, as in the presets, and so many GB/s to
    the host's memory."""
    speeds = (("bf16", bf16 * 5e11), ("f16", bf16 * 5e11), ("f32", f32 * 5e11))
    rates = (bytes_per_s * 1e9, int(gib * 2**30), 8e-6)
    return Kind(name, node, 1, count, speeds, *rates, host_bytes_per_s=host * 1e9)


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
            _kind("rtx4070", "one", 1, 58, 29, 256, 8, 8),
            _kind("rtx4060", "two", 1, 44, 22, 256, 8, 8),
            _kind("rtx3050", "three", 1, 20, 10, 192, 6, 8),
        ),
        PCIE,
        Link(1e-4, 0.11e9),
    ),
    Cluster(
        "A100-80+3x3060", "", (_kind("a100", "box", 1, 312, 19.5, 2039, 80, 24), _rtx("3060", "box", 3)), PCIE, PCIE
    ),
    Cluster(
        "8xH100+8xA100, 200 Gbit",
        "",
        (_kind("h100", "a", 8, 989, 67, 3350, 80, 48), _kind("a100", "b", 8, 312, 19.5, 2039, 80, 24)),
        Link(1e-5, 200e9),
        Link(3e-5, 22e9),
    ),
)
PRESETS = ("3090+3060", "2xA6000+2x2080Ti", "8xA100+8xV100", "4xH100+4xA100+8xL4")
CLUSTERS = {cluster.name: cluster for cluster in (*map(load_cluster, PRESETS), *BY_HAND)}


CELLS: tuple[tuple[str, str, int], ...] = (
    *(("bert", cluster, 128) for cluster in ("hap-64", "hap-4")),
    *(("bert-moe", cluster, 128) for cluster in ("hap-64", "hap-4")),
    *(("gpt2", c, batch) for c in ("hap-64", "hap-4", "2xA6000+2x2080Ti", "equal-8") for batch in (32, 128)),
    *(("llama", c, batch) for c in ("hap-64", "hap-4", "2xA6000+2x2080Ti", "equal-8") for batch in (8, 32, 128)),
    *(("t5", cluster, 128) for cluster in ("hap-64", "hap-4", "2xA6000+2x2080Ti")),
)
"""Of planning.md: a model of the zoo in f32, a preset, and the batch a device, where nothing fitted."""


def planned(graph: Graph, book: RuleBook, cluster: Cluster, seconds: float) -> dict[str, Any]:
    """What the planner says of a pair."""
    used = time.process_time()
    try:
        plan = plan_graph(graph, cluster, book=book, time_limit_s=seconds)
    except DoesNotFitError as error:
        told = {key: error.facts[key] for key in ("uses", "biggest", "rounds", "host") if key in error.facts}
        return {"fits": False, "why": error.what, "do": error.do, **told, "planning_cpu_s": time.process_time() - used}
    seconds_cpu = time.process_time() - used
    again = [rerun for rerun in plan.reruns if rerun.level != "chunked"]
    filled = host_bytes_per_kind(plan.schedule, optimizer_named(plan.optimizer), Scale(plan.on, plan.shares))
    return {
        "fits": True,
        "step_s": plan.step_s,
        "devices": len(plan.devices),
        "rounds": plan.microbatches,
        "reruns": len(again),
        "some_kinds": any(rerun.kinds for rerun in again),
        "rows": [rerun.rows for rerun in plan.reruns if rerun.level == "chunked"],
        "on_host": [f"{one.percent} % on {plan.on.kinds[one.kind].name}" for one in plan.on_host],
        "host_bytes": max(filled),
        "regather": plan.regather,
        "planning_cpu_s": seconds_cpu,
    }


Done = Collection[tuple[str, str, str, int]]


class Subject:
    """A model with a batch, captured once for all clusters."""

    def __init__(self, spec: str, batch: int | None = None) -> None:
        with torch.device("meta"):
            model, inputs = models.load(spec, batch=batch)
        used = time.process_time()
        torch.export.export(model, (), dict(inputs), strict=False)  # type: ignore[call-overload]
        self.export_cpu_s = time.process_time() - used
        self.graph = capture(model, inputs)
        self._in: dict[str, tuple[Graph, RuleBook, ByHand]] = {}

    def on(self, cluster: Cluster, dtype: str, seconds: float) -> dict[str, Any]:
        if dtype not in self._in:
            graph = in_dtype(self.graph, dtype)
            book = derive_rules(graph)
            self._in[dtype] = graph, book, ByHand(graph, book)
        graph, book, hand = self._in[dtype]
        told = planned(graph, book, cluster, seconds)
        used = time.process_time()
        hand_s, how = hand.anywhere(cluster)
        by_hand = {"hand": how, "hand_s": hand_s if how != "none" else None, "hand_cpu_s": time.process_time() - used}
        return {"dtype": dtype, **told, **by_hand, "export_cpu_s": self.export_cpu_s}


def pairs(names: Iterable[str], clusters: Sequence[str], seconds: float, done: Done) -> Iterator[dict[str, Any]]:
    for name in names:
        places = [CLUSTERS[place] for place in clusters if ("pair", name, place, 0) not in done]
        subject = Subject(MODELS[name]) if places else None
        for cluster in places if subject is not None else ():
            dtype = "bf16" if all("bf16" in dict(kind.flops_per_s) for kind in cluster.kinds) else "f16"
            yield {"what": "pair", "model": name, "cluster": cluster.name, **subject.on(cluster, dtype, seconds)}


def cells(names: Iterable[str], seconds: float, done: Done) -> Iterator[dict[str, Any]]:
    for model, place, each in CELLS:
        if model in names and ("cell", model, place, each) not in done:
            cluster = load_cluster(place)
            found = Subject(model, each * cluster.devices).on(cluster, "f32", seconds)
            yield {"what": "cell", "model": model, "cluster": place, "batch": each, **found}


def _key(one: dict[str, Any]) -> tuple[str, str, str, int]:
    return one["what"], one["model"], one["cluster"], one.get("batch", 0)


def _in_order(found: dict[tuple[str, str, str, int], dict[str, Any]]) -> dict[str, Any]:
    order = [("pair", model, cluster, 0) for model in MODELS for cluster in CLUSTERS]
    order += [("cell", *cell) for cell in CELLS]
    rows = [found[key] for key in order if key in found]
    asked = {"pairs": len(MODELS) * len(CLUSTERS), "cells": len(CELLS)}
    return {"asked": asked} | {f"{what}s": [one for one in rows if one["what"] == what] for what in ("pair", "cell")}


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="with commas; all, unless given")
    parser.add_argument("--clusters", default=";".join(CLUSTERS), help="separated by ;")
    parser.add_argument("--cells", action="store_true", help="those cells in place of the pairs")
    parser.add_argument("--seconds", type=float, default=120.0, help="for planning a pair")
    parser.add_argument("--to", type=Path, help="a file to add lines to, in place of results/fits.json")
    parser.add_argument("--add", type=Path, nargs="*", help="such files, in place of planning")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    path = record.RESULTS / "fits.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    found = {_key(one): one for part in ("pairs", "cells") for one in before.get(part, ())}
    names = asked.models.split(",") if asked.models else [*MODELS, *(model for model, _, _ in CELLS)]
    done = {_key(one) for one in _lines(asked.to)} if asked.to is not None and asked.to.exists() else set()
    if asked.add:
        new: Iterable[dict[str, Any]] = (one for file in asked.add for one in _lines(file))
    elif asked.cells:
        new = cells(names, asked.seconds, done)
    else:
        new = pairs([name for name in names if name in MODELS], asked.clusters.split(";"), asked.seconds, done)
    for one in new:
        print(json.dumps(one), flush=True)
        if asked.to is not None:
            with asked.to.open("a") as lines:
                lines.write(json.dumps(one) + "\n")
        else:
            found[_key(one)] = one
            record.write("fits", _in_order(found))


if __name__ == "__main__":
    main()
