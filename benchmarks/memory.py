"""What a plan says that its devices hold, against what they hold, with each technique. Writes results/memory.json.

python benchmarks/memory.py [--models gpt2,llama] [--techniques plain,whole]

Two processes of one thread each train over gloo, one with more of the batch than the other. A plan is made by hand for
each model, way to store parameters and technique; its prediction is what `predict` says. What is measured is the most
bytes of tensors at once in the third step, by the account of torch's own allocator (a profiler sees every allocation
and every release, of whatever thread). What libraries take beside (threads, MKL, gloo) is no matter of a plan, and not
in there. Where optimizer state is in host memory, a CPU has both memories in one, so there it is added to the
prediction. Dropout is off: with it, the CPU's attention keeps its scores, which no GPU's does.

What is on its way between devices is counted once, though gloo copies it: up to ten buckets. So buckets are small
here, in proportion to the models, as they are in training.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import record
import torch
from runtime import Step, cluster_of, peak_bytes
from torch import Tensor

from lopsided import capture, derive_rules, parallelize
from lopsided.cluster.cluster import Cluster
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.models import by_name as models
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan, SearchReport
from lopsided.planner.plan_file import parse_plan, plan_text
from lopsided.planner.planner import predict
from lopsided.planner.recompute import blocks_of
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, cut_of, optimizer_named
from lopsided.schedule.decisions import LEVELS, Decisions, OnHost, Rerun
from lopsided.schedule.loss_heads import loss_heads
from lopsided.schedule.rounds import NoRoundsError, in_rounds

GOAL = 0.10
OPTIMIZER = "adamw"
# These are to models of some 15 MiB what 25 MiB are to those of a GiB and more.
BUCKET_BYTES = 2**18
WORK, TIMEOUT_S = (0.625, 0.375), 240.0
MODELS = {
    "gpt2": "gpt2:layers=3,width=256,heads=4,seq=128,vocab=4096,dropout=0,batch=16",
    "llama": "llama:layers=3,width=256,heads=4,kv_heads=2,ffn=768,seq=128,vocab=4096,batch=16",
    "bert": "bert:layers=3,width=256,heads=4,seq=128,vocab=4096,dropout=0,batch=16",
    "vit": "vit:layers=3,width=256,heads=4,image=96,patch=8,classes=1000,dropout=0,batch=16",
    "resnet50": "resnet50:image=64,classes=1000,batch=16",
}
STORED = ("whole", "gathered again")
TECHNIQUES = ("plain", "whole", "4 rounds", "chunks", "state on the host", "cheap", "4 rounds and whole", "attention")


def plan_for(spec: str, stored: str, technique: str) -> Plan | None:
    """None where a model cannot: there are no rounds with batch norm, and no chunks without a loss over words."""
    graph = capture(*models.load(spec))
    rounds = int(technique[0]) if "rounds" in technique else 1
    try:
        graph = in_rounds(graph, rounds).graph
    except NoRoundsError:
        return None
    where = _cluster()
    kept = optimizer_named(OPTIMIZER)
    shares = Shares(WORK, named=(("state", (0.5, 0.5)),))
    program = data_parallel(derive_rules(graph), SharePrices(Costs(graph, where, kept), Scale(where, shares)))
    program = program if stored == "whole" else stored_cut(program)
    shares = shares if stored != "whole" else Shares(WORK)
    reruns = _reruns(graph, technique)
    if reruns is None:
        return None
    on_host = (OnHost(0), OnHost(1)) if technique == "state on the host" else ()
    regather = stored == "gathered again"
    decisions = Decisions(BUCKET_BYTES, regather=regather, reruns=reruns, on_host=on_host, microbatches=rounds)
    how = (decisions.regather, decisions.bucket_bytes, reruns, on_host, rounds)
    step_s, breakdown, memory = predict(program, shares, where, OPTIMIZER, *how)
    report = SearchReport(0.0, 0, 0.0, 0.0, 0.0, "by hand", 0, ())
    made = Plan(
        where, where, program, shares, OPTIMIZER, decisions.regather, step_s, breakdown, memory, (), report, (), ()
    )
    return replace(made, bucket_bytes=BUCKET_BYTES, reruns=reruns, on_host=on_host, microbatches=rounds)


def _cluster() -> Cluster:
    """Two devices that differ only in name, with a host."""
    made = cluster_of((2.0, 1.0), False)
    return replace(made, kinds=tuple(replace(kind, host_bytes_per_s=1e9) for kind in made.kinds))


def _reruns(graph: Graph, technique: str) -> tuple[Rerun, ...] | None:
    if technique == "chunks":
        heads = loss_heads(graph)
        return tuple(head.chunked(max(head.rows // 32, 1)) for head in heads) or None
    level = next((level for level in LEVELS if technique.endswith(level)), None)
    if level is None:
        return ()
    return tuple(Rerun(graph.nodes[a].name, graph.nodes[b - 1].name, level) for a, b in blocks_of(graph))


def host_bytes(plan: Plan) -> list[int]:
    """Of every device the optimizer state that is in host memory, which a CPU allocates where it has all else."""
    kept, scale, values = optimizer_named(plan.optimizer), Scale(plan.on, plan.shares), plan.graph.values
    found = [0.0, 0.0]
    for update in plan.schedule.update:
        fractions = scale.fractions(cut_of(update.placement, values[update.parameter].shape))
        for k in update.on_host:
            found[k] += kept.state * values[update.parameter].bytes * fractions[k]
    return [round(size) for size in found]


def measured(spec: str, text: str) -> int:
    """What this process holds at its peak."""
    device = torch.device("cpu")

    def made() -> Step:
        torch.manual_seed(0)
        model, batch = models.load(spec)
        trained = parallelize(model, batch, parse_plan(text), device=device)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)

        def step() -> Tensor:
            loss: Tensor = trained(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    found = peak_bytes(made, device)
    gc.collect()
    return found


def rows(names: list[str], techniques: list[str]) -> Iterator[dict[str, Any]]:
    with WorkerPool(len(WORK), timeout_s=TIMEOUT_S) as pool:
        for technique in techniques:
            for name in names:
                for stored in STORED:
                    plan = plan_for(MODELS[name], stored, technique)
                    if plan is None:
                        continue
                    predicted = [a + b for a, b in zip(plan.memory_bytes, host_bytes(plan), strict=True)]
                    held = pool.run(measured, MODELS[name], plan_text(plan))
                    off = [a / b - 1 for a, b in zip(held, predicted, strict=True)]
                    about = {"model": name, "stored": stored, "technique": technique}
                    yield about | {"measured_bytes": held, "predicted_bytes": predicted, "off": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="with commas; all, unless given; then nothing is written")
    parser.add_argument("--techniques", default="", help="likewise")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    found: list[dict[str, Any]] = []
    names = asked.models.split(",") if asked.models else [*MODELS]
    techniques = asked.techniques.split(",") if asked.techniques else [*TECHNIQUES]
    for row in rows(names, techniques):
        sizes = zip(row["measured_bytes"], row["predicted_bytes"], row["off"], strict=True)
        told = ", ".join(f"{a / 2**20:.1f} of {b / 2**20:.1f} MiB ({off:+.1%})" for a, b, off in sizes)
        print(f"{row['model']:<9} {row['stored']:<15} {row['technique']:<19} {told}", flush=True)
        found.append(row)
        if not (asked.models or asked.techniques):
            # So that an interrupted run leaves what it has.
            about = {"goal": GOAL, "models": MODELS, "shares": WORK, "wall_s": time.perf_counter() - started}
            record.write("memory", about | {"rows": found})


if __name__ == "__main__":
    main()
