"""Time and memory of capture, rules and verify, as ratios inside one run. Writes results/algebra.json.

python benchmarks/algebra.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import record
import torch

from lopsided import capture, derive_rules
from lopsided.models import zoo

SEVENTY_B = {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672}
VERIFY = "gpt2:layers=2,width=64"

_MEMORY = """
import json, resource, sys, time, torch
from lopsided import capture, derive_rules
from lopsided.models import zoo
sizes = json.loads(sys.argv[1])
with torch.device("meta"):
    model, batch = zoo.build("llama", **sizes)
started = time.perf_counter()
graph = capture(model, batch)
book = derive_rules(graph)
print(json.dumps({
    "parameters": sum(leaf.value.elements for leaf in graph.parameters), "nodes": len(graph.nodes),
    "seconds": time.perf_counter() - started,
    "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
}))
"""


def timed(action: Any) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def against_export(name: str, repeats: int) -> dict[str, Any]:
    """Capture plus rules, and export alone, in shuffled order."""
    with torch.device("meta"):
        model, batch = zoo.build(name)
    actions = {
        "export": lambda: torch.export.export(model, (), batch, strict=False),
        "capture and rules": lambda: derive_rules(capture(model, batch)),
    }
    for action in actions.values():
        action()
    seconds: dict[str, list[float]] = {key: [] for key in actions}
    for _ in range(repeats):
        for key in random.sample(list(actions), len(actions)):
            seconds[key].append(timed(actions[key]))
    ratio = statistics.median(seconds["capture and rules"]) / statistics.median(seconds["export"])
    return {"model": name, "seconds": seconds, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    warnings.simplefilter("ignore")
    cases = [against_export(name, repeats) for name in ("bert", "gpt2", "vit", "bert-moe", "resnet50", "t5")]
    for case in cases:
        print(f"{case['model']:<10} capture and rules / export: {case['ratio']:.2f}")
    told = subprocess.run(
        [sys.executable, "-c", _MEMORY, json.dumps(SEVENTY_B)], capture_output=True, text=True, check=True
    )
    large = json.loads(told.stdout)
    print(f"llama 70B  {large['nodes']} nodes, {large['seconds']:.1f} s, peak {large['peak_gb']:.2f} GB")
    command = [sys.executable, "-m", "lopsided", "verify", VERIFY, "--programs", "50", "--json"]
    wall = timed(
        lambda: record_verify.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    )
    verified = json.loads(record_verify[0])
    print(f"verify     {VERIFY}, 50 programs: {wall:.1f} s, worst error {verified['worst_error']:.1e}")
    verified = {key: verified[key] for key in ("model", "programs", "worst_error", "passed", "seconds")} | {
        "wall_s": wall
    }
    print(record.write("algebra", {"against_export": cases, "llama_70b": large, "verify": verified}))


record_verify: list[str] = []

if __name__ == "__main__":
    main()
