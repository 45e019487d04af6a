"""Fifty batches of different lengths under one plan. Writes results/shapes.json.

python benchmarks/shapes.py [--quick]

Predicted: a step of every length under the plan for all of them, against a plan made for that length alone, the same
on just the devices that the plan for all uses, and against filling up everything to the greatest length; processor's
seconds to plan. Trained: losses on three unequal processes against one device's, how many programs were made, and
processor's seconds with few lengths and with the greatest alone. `--quick` tries a small case and writes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster_file import load_cluster
from lopsided.comm.worker_pool import WorkerPool
from lopsided.models.by_name import load
from lopsided.planner.ablation import DEVICES
from lopsided.planner.planner import plan_graph
from lopsided.planner.same_storage import plan_for_shapes, step_on
from lopsided.runtime.calls.shapes import lengths_of

EVERY = 10  # of so many lengths one is planned without being filled up
BATCHES, MEDIAN, SIGMA, LONGEST = 50, 128, 0.6, 512
GOALS = {"of_its_own_plan": 1.03, "faster": 1.5, "worst": 1e-9, "programs": 5}
CASES = (
    ("gpt2:layers=4,width=256,heads=8,vocab=8000,batch=32,dropout=0,seq={}", "3090+3060"),
    ("gpt2:layers=4,width=256,heads=8,vocab=8000,batch=32,dropout=0,seq={}", "2xA6000+2x2080Ti"),
    ("bert:layers=4,width=512,heads=8,vocab=8000,batch=24,dropout=0,seq={}", "2xA6000+2x2080Ti"),
    ("gpt2:layers=4,width=256,heads=8,vocab=8000,batch=32,dropout=0,seq={}", "hap-4"),
)
TRAINED, PROCESSES = "gpt2:layers=2,width=96,heads=4,vocab=50,batch=6,dropout=0,seq={}", 3
CLUSTER = Path(__file__).parent / "scripts" / "three.toml"


def lengths_drawn(count: int, median: float, longest: int) -> list[int]:
    """Different lengths at the quantiles of a log-normal distribution, the greatest among them."""
    normal = statistics.NormalDist()
    found = [round(median * 2.718281828 ** (SIGMA * normal.inv_cdf((k + 0.5) / count))) for k in range(count)]
    for k in range(1, count):
        found[k] = max(found[k], found[k - 1] + 1)
    return [*(min(length, longest - count + k) for k, length in enumerate(found[:-1])), longest]


def few(model: str, drawn: list[int]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The lengths that are run, and how often."""
    example = load(model.format(drawn[-1]))[1]
    batches = ({name: part[:, :length] for name, part in example.items()} for length in drawn)  # type: ignore[attr-defined]
    found = lengths_of(example, batches)
    return found.lengths, found.often


def predicted(model: str, cluster: str, drawn: list[int]) -> dict[str, Any]:
    lengths, often = few(model, drawn)
    graphs = [capture(*load(model.format(length))) for length in lengths]
    # The example batch is the longest.
    began_s = time.process_time()
    common = plan_for_shapes(graphs[::-1], often[::-1], load_cluster(cluster))
    together_s = time.process_time() - began_s
    steps = [step_on(graph, common) for graph in graphs]
    began_s = time.process_time()
    own = [plan_graph(graph, load_cluster(cluster)).step_s for graph in graphs]
    each_s = (time.process_time() - began_s) / len(graphs)
    # Stored as suits this length best, on all the devices that store the common plan.
    there = [plan_graph(graph, common.on, without=(DEVICES,)).step_s for graph in graphs]
    filled = sum(step_s * times for step_s, times in zip(steps, often, strict=True))
    some = drawn[EVERY // 2 :: EVERY]
    upto = {length: next(step_s for n, step_s in zip(lengths, steps, strict=True) if n >= length) for length in some}
    unfilled = statistics.fmean(
        upto[length] / plan_graph(capture(*load(model.format(length))), load_cluster(cluster)).step_s for length in some
    )
    return {
        "model": model.format("*"),
        "cluster": cluster,
        "lengths": [
            {"length": n, "often": part, "step_s": step_s, "alone_s": alone_s, "there_s": there_s}
            for n, part, step_s, alone_s, there_s in zip(lengths, often, steps, own, there, strict=True)
        ],
        "devices": common.on.devices,
        "planning": {"together_s": together_s, "each_s": each_s},
        "unfilled": unfilled,
        "faster": own[-1] / filled,
    }


# Trained


def batch_of(length: int) -> dict[str, Tensor]:
    """Text of one length, the same in every process."""
    rows, vocab = 6, 50
    text = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": text, "labels": text}


def model_of(longest: int) -> nn.Module:
    torch.manual_seed(0)
    return load(TRAINED.format(longest))[0]


def losses_alone(drawn: list[int]) -> list[float]:
    torch.set_default_dtype(torch.float64)
    longest = drawn[-1]
    model = model_of(longest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for length in drawn:
        loss = model(**batch_of(length))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.set_default_dtype(torch.float32)
    return losses


def trained(drawn: list[int]) -> tuple[list[float], int, float, float]:
    """Losses, how many programs were made, and processor's seconds with few lengths and with the greatest alone."""
    torch.set_default_dtype(torch.float64)
    longest = drawn[-1]
    batches = [batch_of(length) for length in drawn]
    pm = lopsided.parallelize(model_of(longest), batch_of(longest), cluster=CLUSTER, batches=batches, quiet=True)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    losses = []
    for batch in lopsided.shard(batches, pm, pad={"input_ids": 0, "labels": -100}):
        loss = pm(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    made = len(pm._programs._calls)
    spent = {}
    for to, padded in (("few", [*pm.planned_lengths]), ("greatest", [longest])):
        began_s = time.process_time()
        for batch in lopsided.shard(batches, pm, pad={"input_ids": 0, "labels": -100}, lengths=padded):
            pm(**batch).backward()
            pm.zero_grad()
        spent[to] = time.process_time() - began_s
    torch.set_default_dtype(torch.float32)
    return losses, made, spent["few"], spent["greatest"]


def train(drawn: list[int]) -> dict[str, Any]:
    with WorkerPool(1, timeout_s=900) as one, WorkerPool(PROCESSES, timeout_s=900) as three:
        expected = one.run(losses_alone, drawn)[0]
        found = three.run(trained, drawn)
    worst = max(abs(a - b) / abs(b) for losses, *_ in found for a, b in zip(losses, expected, strict=True))
    return {
        "model": TRAINED.format("*"),
        "processes": PROCESSES,
        "worst": worst,
        "programs": max(made for _, made, _, _ in found),
        "bucketed_s": sum(few_s for *_, few_s, _ in found),
        "padded_s": sum(greatest_s for *_, greatest_s in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small case; nothing is written")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    count, median, longest = (6, 8, 32) if quick else (BATCHES, MEDIAN, LONGEST)
    drawn = lengths_drawn(count, median, longest)
    rows = []
    for model, cluster in () if quick else CASES:
        rows.append(row := predicted(model, cluster, drawn))
        each = ", ".join(f"{one['length']}: {one['step_s'] / one['alone_s']:.3f}" for one in row["lengths"])
        print(f"{row['model']} on {row['cluster']}: {each}; faster {row['faster']:.2f}", flush=True)
    short = lengths_drawn(count, median / 2, longest // 2) if not quick else drawn
    found = train(short)
    print(found)
    if not quick:
        told = {"batches": count, "median": median, "sigma": SIGMA, "longest": longest, "goals": GOALS}
        print(record.write("shapes", {**told, "rows": rows, "trained": found | {"longest": short[-1]}}))


if __name__ == "__main__":
    main()
