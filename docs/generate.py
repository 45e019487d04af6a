"""Write the generated docs: rules.md from the table, coverage.md and benchmarks.md from benchmark results.

python docs/generate.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lopsided.ops import FAMILIES, TABLE
from lopsided.rules import describe_call
from lopsided.samples import sampled_ops, samples_of
from lopsided.validate import as_call

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
NOTE = "<!-- Written by `make docs`; edit docs/generate.py or the table instead. -->\n"

NOTATION = """
An op is described by one line: what its operands' dims are called, how the operands combine, and what the results' dims
are called. Everything else is derived.

| written | means |
|---|---|
| `... i * o i + o -> ... o` | `linear`: lower case is independent and may be cut; absent on the right: summed |
| `K` | capital: the op couples along it, keep it whole (a talking rule may still cut it) |
| `a + b` | summands: each must be partial for the result to be partial |
| `a * b` | linear in each operand separately: one partial operand passes through, and factor broadcasting applies |
| `f[a, b]` | not linear in these operands |
| `{a + b}` | a group, as in `f[...] * {... + ...}` for `where` |
| `(a b)` | a merged dim, outermost first: cutting `a` has unit `b`, cutting `b` has `a` as outer count |
| `1`, `()` | a dim of length one; a tensor without dims |
| `...` | any leading dims, aligned at the right as broadcasting does |

From a line follow: all `I`; all `R`; for every index that may be cut, `S` where it is carried and `R` where it is
not; the `P` rules of sums and products; and `[sfb]` rules, where a factor that lacks the cut index is used as
`I` and its gradient comes from gathered factors. A dim of length one is broadcast: that operand does not
carry the index.

The lines below are those of the first sample of each op; ops whose line depends on arguments have more.
"""


def rules_page() -> str:
    lines = [NOTE, "# The notation and the table\n", NOTATION]
    sampled: dict[str, list[str]] = {}
    for op in sampled_ops():
        key = op if op in TABLE else op.rpartition(".")[0]
        sampled.setdefault(key if key in TABLE else "by tag", []).append(op)
    for family, entries in FAMILIES.items():
        lines.append(f"\n## {family}\n\n| op | line | beside the line |\n|---|---|---|")
        for name, entry in entries.items():
            op = next(iter(sampled.get(name, [])), "")
            text, talks = "", []
            if op:
                call, _ = as_call(samples_of(op)[0])
                described = describe_call(call, exact=False)
                text, talks = (described.text, [talk.how for talk in described.talks]) if described else ("", [])
            beside = [
                *(f"cut anyway: {how}" for how in dict.fromkeys(talks)),
                *(["random"] if entry.random else []),
            ]
            lines.append(f"| `{name}` | `{text}` | {', '.join(beside)} |")
    tagged = sorted({op.rpartition(".")[0] for op in sampled.get("by tag", [])})
    lines.append(
        f"\n## pointwise by tag\n\n{len(tagged)} more ops that torch tags as pointwise are `f[..., ...] -> ...`:\n"
    )
    lines.append(", ".join(f"`{op}`" for op in tagged) + "\n")
    return "\n".join(lines)


def coverage_page(data: dict[str, Any]) -> str:
    rows = data["rows"]
    captured = [row for row in rows if row["captured"]]
    refused = [row for row in rows if not row["captured"]]
    classes = {row["spec"].split(":")[1] for row in captured}
    worst = max(row["worst_error"] for row in captured)
    lines = [
        NOTE,
        "# Hugging Face architectures\n",
        f"Randomly initialised, small; `{data['about']['command']}`, torch {data['about']['torch']}.\n",
        f"**{len(classes)} architectures captured** ({len(captured)} with both kinds of attention counted), each run "
        f"as {data['programs']} random programs on three unequal devices: worst relative error {worst:.0e} against "
        f"one device in float64, {sum(row['passed'] for row in captured)} of {len(captured)} within 1e-9. "
        f"{sum(bool(row['only_whole']) for row in captured)} have an op that can only run whole because nobody "
        "described it.\n",
        "| architecture | attention | nodes | ops | rules by experiment | worst error |\n|---|---|---|---|---|---|",
    ]
    for row in captured:
        experiments = ", ".join(f"`{op}`" for op in row["by_experiment"])
        lines.append(
            f"| `{row['spec']}` | {row['attention']} | {row['nodes']} | {row['ops']} | {experiments} "
            f"| {row['worst_error']:.0e} |"
        )
    lines.append("\n## Not captured\n\nThese build and train, and are refused with the line that stands in the way.\n")
    lines.append("| architecture | what | where | what to change |\n|---|---|---|---|")
    lines += [f"| `{r['spec']}` | {r['what']} | `{r['where']}` | {r['do']} |" for r in refused]
    return "\n".join(lines) + "\n"


def benchmarks_page(data: dict[str, Any]) -> str:
    about = data["about"]
    lines = [
        NOTE,
        "# Times and memory\n",
        f"`{about['command']}`, torch {about['torch']}, {about['machine']}; medians of shuffled repetitions.\n",
        "| model | `torch.export` alone | capture and rules | ratio |\n|---|---|---|---|",
    ]
    for case in data["against_export"]:
        export, ours = (
            sorted(case["seconds"][key])[len(case["seconds"][key]) // 2] for key in ("export", "capture and rules")
        )
        lines.append(f"| `{case['model']}` | {export:.2f} s | {ours:.2f} s | {case['ratio']:.2f} |")
    large, check = data["llama_70b"], data["verify"]
    lines.append(
        f"\nA Llama of {large['parameters'] / 1e9:.1f} billion parameters on `meta`: {large['nodes']} nodes, "
        f"capture and rules in {large['seconds']:.1f} s, peak memory of the whole process {large['peak_gb']:.2f} GB.\n"
    )
    lines.append(
        f"`lopsided verify {check['model']} --programs {check['programs']}`: {check['wall_s']:.1f} s from the prompt "
        f"and back, worst relative error {check['worst_error']:.0e}.\n"
    )
    return "\n".join(lines)


def main() -> None:
    (HERE / "rules.md").write_text(rules_page())
    for name, page, source in (
        ("coverage", coverage_page, "coverage"),
        ("benchmarks", benchmarks_page, "algebra"),
    ):
        results = RESULTS / f"{source}.json"
        if results.exists():
            (HERE / f"{name}.md").write_text(page(json.loads(results.read_text())))


if __name__ == "__main__":
    main()
