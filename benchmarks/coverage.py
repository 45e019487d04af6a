"""Capture and verify every Hugging Face architecture of the sample. Writes results/coverage.json.

python benchmarks/coverage.py [--programs 10] [--only Llama]
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import record
import torch

from lopsided import LopsidedError, capture, derive_rules, verify
from lopsided.models.by_name import load

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.architectures import ARCHITECTURES, EAGER_ONLY, REFUSED, with_eager_attention


def one(spec: str, programs: int) -> dict[str, Any]:
    """Capture, derive, verify: what stands and what does not."""
    started = time.perf_counter()
    torch.manual_seed(0)
    try:
        model, batch = load(spec)
        graph = capture(model, batch)
        book = derive_rules(graph)
        result = verify(model, batch, shares=(0.5, 0.3, 0.2), programs=programs)
    except LopsidedError as error:
        # Where the model's code lies differs from machine to machine: from the package on is enough.
        where = error.where.partition("site-packages/")[2] or error.where
        return {"spec": spec, "captured": False, "what": error.what, "where": where, "do": error.do}
    return {
        "spec": spec,
        "captured": True,
        "nodes": len(graph.nodes),
        "ops": len({node.op for node in graph.nodes}),
        "by_experiment": sorted({node.op for node in book.by_experiment}),
        "only_whole": sorted({node.op for node in book.only_whole}),
        "worst_error": result.worst.error,
        "passed": result.passed,
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for spec in (*ARCHITECTURES, *REFUSED):
        if arguments.only not in spec:
            continue
        eager_only = spec.split(":")[1] in EAGER_ONLY or spec in REFUSED
        for attention in ["eager"] if eager_only else ["sdpa", "eager"]:
            row = one(
                with_eager_attention(spec) if attention == "eager" and not eager_only else spec,
                arguments.programs,
            )
            rows.append(row | {"attention": attention})
            if row["captured"]:
                print(
                    f"{'same' if row['passed'] else 'WRONG':<8}{row['worst_error']:.0e}  {row['nodes']:>5} nodes  "
                    f"{attention:<6}{spec}",
                    flush=True,
                )
            else:
                print(f"refused  {row['what']}  {row['where']}  {spec}", flush=True)
    print(record.write("coverage", {"programs": arguments.programs, "rows": rows}))


if __name__ == "__main__":
    main()
