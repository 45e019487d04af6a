"""Write the generated docs: rules.md from the table, coverage.md, benchmarks.md, planning.md, runtime-benchmarks.md,
scripts.md, shapes.md, fits.md, memory.md and faults-measured.md from benchmark results.

python docs/generate.py
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fits_pages import fits_page, memory_page

from lopsided.ops import FAMILIES, TABLE
from lopsided.ops.derive import describe_call
from lopsided.ops.validator import as_call, sampled_ops, samples_of

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


def scripts_page(data: dict[str, Any]) -> str:
    goals, rows = data["goals"], data["rows"]
    met = all(row[dtype]["worst"] < goal for row in rows for dtype, goal in goals.items())
    said = ", ".join(f"{goal:.0e} in {dtype}" for dtype, goal in goals.items())
    lines = [
        NOTE,
        "# Scripts that people have\n",
        f"`{data['about']['command']}`, commit {data['about']['commit']}, torch {data['about']['torch']}.\n",
        f"The loops of {len(rows)} public training scripts, in our own words, small and on made-up data "
        "([benchmarks/scripts](../benchmarks/scripts)). Each is written twice, for DistributedDataParallel and for "
        f"Lopsided. The first trains {data['steps']} steps on one device, the second on {data['processes']} processes "
        "that are planned for as devices of speeds 2 : 3 : 5, over gloo.\n",
        f"*Difference* is the worst of all losses and metrics that either loop sees, relative to one device's; goal: "
        f"{said} ({_met(met)}). *Changed* are the lines of the loop that differ from the one for "
        "DistributedDataParallel; replaced lines count once, or as often as the longer of both.\n",
        "| script | what is in it | lines | changed | shares of the work | float32 | float64 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        about = " ".join(row["about"].split()).rstrip(".")
        shares = "; ".join(" : ".join(f"{share:.2f}" for share in shares) for shares in row["shares"])
        differences = " | ".join(f"{row[dtype]['worst']:.0e}" for dtype in goals)
        path = f"../benchmarks/scripts/{row['script']}.py"
        lines.append(
            f"| [`{row['script']}`]({path}) | {about} | {row['lines']['ddp']} | {row['lines']['changed']} "
            f"| {shares} | {differences} |"
        )
    return "\n".join(lines) + "\n"


def shapes_page(data: dict[str, Any]) -> str:
    goals, trained, rows = data["goals"], data["trained"], data["rows"]
    worst = max(one["step_s"] / one["alone_s"] for row in rows for one in row["lengths"])
    met = {
        "own": _met(worst <= goals["of_its_own_plan"]),
        "faster": _met(min(row["faster"] for row in rows) >= goals["faster"]),
        "worst": _met(trained["worst"] < goals["worst"]),
        "programs": _met(trained["programs"] <= goals["programs"]),
    }
    several, kept = _on_the_same_devices(rows, goals["of_its_own_plan"])
    many, ratio = data["batches"], trained["padded_s"] / trained["bucketed_s"]
    lines = [
        NOTE,
        "# Batches of any length\n",
        f"`{data['about']['command']}`, commit {data['about']['commit']}, torch {data['about']['torch']}, "
        f"{data['about']['machine']}.\n",
        f"{many} batches of {many} lengths, at the quantiles of a log-normal distribution (median {data['median']}, "
        f"sigma {data['sigma']}, at most {data['longest']}), as samplers that group by length make them. One "
        "`parallelize(batches=...)` plans for all of them, and no plan is made afterwards. A batch is filled up to the "
        "next of the lengths that were chosen for the distribution, each with a program on the same storage.\n",
        "## Predicted\n",
        "*Of its own plan*: a step under the common plan over one under a plan made for that length alone, for each "
        f"length that is run; goal: at most {goals['of_its_own_plan']} ({met['own']}). *Unfilled*: over a plan "
        "made for a batch's own length, not filled up, the mean of every tenth. *Faster*: than filling up "
        f"everything to the greatest length, under a plan for that; goal: {goals['faster']} ({met['faster']}).{kept}\n",
        "| model | cluster | lengths | of its own plan, each | unfilled | faster |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        each = ", ".join(f"{one['step_s'] / one['alone_s']:.3f}" for one in row["lengths"])
        lengths = ", ".join(str(one["length"]) for one in row["lengths"])
        cells = (f"`{row['model']}`", row["cluster"], lengths, each, f"{row['unfilled']:.2f}", f"{row['faster']:.2f} ×")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Where short and long batches want different devices, storage is where the whole distribution wants it, and "
        f"the rarer lengths pay.{several}\n",
        "## Trained\n",
        f"`{trained['model']}`, at most {trained['longest']} long, on {trained['processes']} processes, planned "
        f"for as devices of speeds 2 : 3 : 5, over gloo, in float64: {many} steps of AdamW, each on another length, "
        "against one device on the same batches as they are. Worst relative difference of a loss: "
        f"{trained['worst']:.0e} ({met['worst']}). Programs: {trained['programs']} ({met['programs']}; goal: at most "
        f"{goals['programs']}). Filled up to the greatest length, the same batches take {ratio:.2f} times the "
        "processor's time, in the same processes and with programs ready.",
    ]
    return "\n".join(lines) + "\n"


def _on_the_same_devices(rows: Sequence[dict[str, Any]], goal: float) -> tuple[str, str]:
    """What planning for all lengths takes, and how steps compare with plans that use the devices of the common plan;
    nothing where that was not recorded."""
    if not all("planning" in row for row in rows):
        return "", ""
    worst = max(one["step_s"] / one["there_s"] for row in rows for one in row["lengths"])
    times = [row["planning"]["together_s"] / row["planning"]["each_s"] for row in rows]
    planning = f" Planning for all takes {min(times):.1f} to {max(times):.1f} times the processor's time of one plan."
    same = (
        f" Over a plan for that length alone which uses all the devices of the common plan, stored as suits it best, a "
        f"step takes at most {worst:.3f} ({_met(worst <= goal)}): what is lost beyond that is lost to the devices."
    )
    return planning, same


def planning_page(
    speed: dict[str, Any], kinds: dict[str, Any], quality: dict[str, Any], against_random: dict[str, Any]
) -> str:
    return "\n".join(
        [
            NOTE,
            "# Planning: how long it takes and what it gains\n",
            *_speed(speed),
            *_depth(speed),
            *_devices(speed),
            *_kinds(kinds),
            *_peers(speed),
            *_against_random(against_random),
            *_quality(quality),
        ]
    )


def runtime_page(cpu: dict[str, Any], cuda: dict[str, Any], compiled: dict[str, Any]) -> str:
    return "\n".join(
        [
            NOTE,
            "# Training: how fast a plan runs, and how well its memory was predicted\n",
            "Both subjects run in the same processes, block after block in shuffled order. A ratio is the median over "
            "rounds of ours to theirs within a round, with its middle half in parentheses; a step is forward, "
            "backward, AdamW and zero_grad. Processor seconds, of all processes together, tell more where a machine "
            "does other things too.\n",
            f"FSDP2 here: {cpu['fsdp2']}.\n",
            *_trained(cpu, "## On the CPU: processes of one thread each, over gloo\n"),
            *_trained(cuda, f"## On a GPU: processes that share one {cuda['device']}, over gloo\n"),
            *_compiled(compiled),
        ]
    )


def _compiled(data: dict[str, Any]) -> list[str]:
    subjects = {"plain": "plain", "compile": "torch.compile", "eager": "ours, eager", "stretches": "ours, compiled"}
    ready = "first three steps: torch.compile | ours"
    lines = [
        f"## Compiled: one device, one {data['device']}, bf16 autocast\n",
        f"`{data['about']['command']}`, torch {data['about']['torch']}. Seconds of a step; the ratio is the "
        "median over rounds of ours, compiled, to torch.compile's within a round. Goal: at most 1.02×.\n",
        f"| model | {' | '.join(subjects.values())} | ratio | {ready} |",
        "|---" * (len(subjects) + 4) + "|",
    ]
    for row in data["cases"]:
        steps = [_seconds(statistics.median(row["seconds"][name])) for name in subjects]
        ratio, first = row["ratios"]["stretches"], row["first_3_steps_s"]
        met = "" if ratio <= 1.02 else " (**not met**)"
        took = f"{first['compile']:.0f} s | {first['stretches']:.0f} s"
        lines.append(f"| `{row['model']}` | {' | '.join(steps)} | {ratio:.3f}{met} | {took} |")
    return [*lines, ""]


def _trained(data: dict[str, Any], title: str) -> list[str]:
    goals, met = data["goals"], data["met"]
    against = {"equal": ("ddp", "data parallelism"), "zero": ("fsdp", "ZeRO"), "alone": ("plain", "one device")}
    lines = [
        title,
        f"{_made_by(data)}; {data['rounds']} rounds. Goals: at most {goals['equal']}× of DistributedDataParallel "
        f"({_met(met['equal'])}), at most {goals['zero']}× of FSDP2 ({_met(met['zero'])}), at most {goals['alone']}× "
        f"of the plain model ({_met(met['alone'])}), memory within {goals['memory']:.0%} ({_met(met['memory'])}).\n",
        *([f"{data['note']}\n"] if "note" in data else []),
        "| plan | model | processes | against | its step | ours | ratio | processor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, (peer, said) in against.items():
        for row in data[kind]:
            head = f"| {said} | `{row['model']}` | {row['devices']} | {peer} "
            if "error" in row:
                lines.append(f"{head}| {row['error']} | | | |")
                continue
            (low, high), middle = row["middle_half"], row["median_s"]
            lines.append(
                f"{head}| {_seconds(middle[peer])} | {_seconds(middle['lopsided'])} "
                f"| {row['ratio']:.3f} ({low:.3f} to {high:.3f}) | {row['cpu_ratio']:.3f} |"
            )
    lines += ["", "| plan | model | work shares | most held, MiB | predicted | worst |", "|---|---|---|---|---|---|"]
    for row in data["memory"]:
        head = f"| {row['plan']} | `{row['model']}` "
        if "error" in row:
            lines.append(f"{head}| | {row['error']} | | |")
            continue
        shares = ", ".join(f"{share:.2f}" for share in row["shares"])
        measured, predicted = (
            ", ".join(f"{size / 2**20:.0f}" for size in row[key]) for key in ("measured_bytes", "predicted_bytes")
        )
        lines.append(f"{head}| {shares} | {measured} | {predicted} | {row['worst']:+.1%} |")
    return [*lines, ""]


def _made_by(data: dict[str, Any]) -> str:
    about = data["about"]
    return (
        f"`{about['command']}`, commit {about['commit']}, torch {about['torch']}, {about['machine']}; "
        f"{data['wall_s'] / 60:.0f} min in all"
    )


def _met(yes: bool) -> str:
    return "met" if yes else "**not met**"


def _speed(data: dict[str, Any]) -> list[str]:
    goals, met = data["goals"], data["met"]
    lines = [
        "## Seconds, as ratios to `torch.export`\n",
        f"{_made_by(data)}; medians of shuffled repetitions, each beside an export of the same model in the same "
        "process. *One search* goes from rule book to proven optimum with nothing remembered; the *whole answer* has "
        "all candidates, shares, simulation and the step without each device.\n",
        f"Goals: one search at most {goals['search']}× ({_met(met['search'])}), the whole answer at most "
        f"{goals['whole']:g}× ({_met(met['whole'])}), gap 0 everywhere ({_met(met['gap'])}).\n",
        "| model | cluster | batch | nodes | export | one search | ratio | gap | states | expanded | whole answer "
        "| ratio | searches |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in data["cases"]:
        middle, ratio, search = case["median_s"], case["ratio"], case["search"]
        once = " (once)" if len(case["seconds"]["whole"]) == 1 else ""
        kind = "" if case["dtype"] == "f32" else f", {case['dtype']}"
        lines.append(
            f"| `{case['model']}` | `{case['cluster']}` | {case['batch']:,}{kind} | {case['nodes']:,} "
            f"| {middle['export']:.2f} s | {middle['search']:.3f} s | {ratio['search']:.2f} | {search['gap']:.2g} "
            f"| {search['states']:,} | {search['expanded']:,} | {middle['whole']:.2f} s{once} | {ratio['whole']:.2f} "
            f"| {case['whole']['searches']} |"
        )
    return [*lines, ""]


def _depth(data: dict[str, Any]) -> list[str]:
    cases, grown = data["depth"], data["growth"]
    lines = [
        "### Depth\n",
        f"From first to last row export grows {grown['export']:.1f}-fold and one search {grown['search']:.1f}-fold;"
        f" goal: no more than export ({_met(data['met']['depth'])}).\n",
        "| model | nodes | export | one search | ratio | gap | states | parts remembered |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{case['model']}` | {case['nodes']:,} | {case['median_s']['export']:.2f} s "
        f"| {case['median_s']['search']:.3f} s | {case['ratio']['search']:.2f} | {case['search']['gap']:.2g} "
        f"| {case['search']['states']:,} | {case['search']['remembered']:,} |"
        for case in cases
    ]
    return [*lines, ""]


def _devices(data: dict[str, Any]) -> list[str]:
    clusters = list(data["devices"][0]["on"])
    lines = [
        "### Devices\n",
        f"The same model and the same batch of {data['devices'][0]['batch']:,} on larger and larger clusters; goal for "
        f"one search: at most {data['goals']['devices']:g}× from first to last ({_met(data['met']['devices'])}).\n",
        f"| model | | {' | '.join(f'`{name}`' for name in clusters)} | last / first |",
        f"|---|---|{'---|' * len(clusters)}---|",
    ]
    for case in data["devices"]:
        for part in case["ratio"]:
            said = {"search": "one search", "whole": "whole answer"}[part]
            seconds = " | ".join(f"{case['median_s'][f'{part} {name}']:.3f} s" for name in clusters)
            lines.append(f"| `{case['model']}` | {said} | {seconds} | {case['ratio'][part]:.2f} |")
    return [*lines, ""]


def _kinds(data: dict[str, Any]) -> list[str]:
    goals, rows = data["goals"], data["rows"]
    by_kinds = [row for row in rows if row["cluster"].endswith("devices")]
    deep = [row for row in rows if row not in by_kinds]
    met = {
        "kinds": all(row["ratio"] <= goals["kinds"] for row in by_kinds),
        "depth": all(row["ratio"] <= goals["depth"] for row in deep),
    }
    loads = [row["load"] for row in rows]
    lines = [
        "### Kinds of devices\n",
        f"{_made_by(data)}. The whole answer once each, as a ratio of the processor's seconds to those of an export of "
        f"the same model just before, on a machine that did other things too (load {min(loads):.1f} to "
        f"{max(loads):.1f}). Goals: at most {goals['kinds']:g}× where devices differ ({_met(met['kinds'])}), at most "
        f"{goals['depth']:g}× for deep models on many devices ({_met(met['depth'])}).\n",
        "| model | batch | cluster | export | whole answer | ratio | searches | devices used | step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        kind = "" if row["dtype"] == "f32" else f", {row['dtype']}"
        lines.append(
            f"| `{row['model']}` | {row['batch']:,}{kind} | {row['cluster']} | {row['export_cpu_s']:.2f} s "
            f"| {row['cpu_s']:.2f} s | {row['ratio']:.2f} | {row['searches']} | {row['used']:,} of {row['devices']:,} "
            f"| {_seconds(row['step_s'])} |"
        )
    return [*lines, ""]


def _against_random(data: dict[str, Any]) -> list[str]:
    goals = data["goals"]
    met = data["most"] <= goals["most"] and data["median"] <= goals["median"]
    lines = [
        "## Against random programs\n",
        f"{_made_by(data)}. Small models on random clusters of one to three kinds. Rivals of a plan are "
        f"{data['programs']} programs that are the cheapest at prices which are off by random factors, on random parts "
        "of the cluster, each with balanced shares and judged as candidates of the planner are. Plans are at most "
        f"{data['most']:.2%} off the best found, {data['median']:.2%} in the median; goal: at most "
        f"{goals['most']:.1%}, and {goals['median']:.2%} ({_met(met)}).\n",
        "| model | batch | devices, TFLOP/s each | plan's step | best found | off |",
        "|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        kinds = ", ".join(f"{count} × {speed / 1e12:.3g}" for count, speed in row["kinds"])
        lines.append(
            f"| `{row['model']}` | {row['batch']} | {kinds} | {_seconds(row['plan_s'])} | {_seconds(row['best_s'])} "
            f"| {row['off']:.2%} |"
        )
    return [*lines, ""]


def _peers(data: dict[str, Any]) -> list[str]:
    lines = [
        "### For scale\n",
        "What others take. The task is not the same (equal devices only, and part of it is building the graph), nor is "
        "the machine.\n",
        "| who | what | seconds | |",
        "|---|---|---|---|",
    ]
    for peer in data["peers"]:
        seconds = ", ".join(f"{model} {taken}" for model, taken in peer["seconds"].items())
        lines.append(f"| {peer['name']} | {peer['what']} | {seconds} | {peer['note']} |")
    return [*lines, ""]


def _quality(data: dict[str, Any]) -> list[str]:
    rows = data["rows"]
    planned = [row for row in rows if "error" not in row]
    compared = [row for row in planned if row["over_classics"] is not None]
    gained = [row for row in compared if not row["nothing_gained"]]
    alone = [row for row in planned if row["over_classics"] is None]
    over_dp = sorted(row["over_dp"] for row in planned if row["over_dp"] is not None)
    over_classics = sorted(row["over_classics"] for row in compared)
    over_part = sorted(row["over_part"] for row in planned if row["over_part"] is not None)
    unproven = sum(row["gap"] > 0 for row in planned)
    return [
        "## Predicted speed-up\n",
        f"{_made_by(data)}. Every zoo model at its default size in float32 with AdamW; steps are predicted by the "
        "event simulation, for the plan and for the classics alike.\n",
        f"Of {len(rows)} cells, {len(rows) - len(planned)} fit in no way that was found, {len(alone)} fit only as "
        f"planned here and in no classic way, {len(gained)} gain 1 % or more over the best classic that fits, and "
        f"{len(compared) - len(gained)} gain nothing. Median {_middle(over_dp):.2f}× over the best of DP-EV and DP-CP "
        f"(from {over_dp[0]:.2f}× to {over_dp[-1]:.2f}×), {_middle(over_classics):.2f}× over the best of all classics "
        f"(from {over_classics[0]:.2f}× to {over_classics[-1]:.2f}×). Plans with a gap above 0: {unproven}.\n",
        "Some of this is won by leaving devices out. The third figure of a cell is over the best of all these and of "
        "data parallelism by speed on just the devices that the plan uses: what remains for someone who knew which. "
        f"Its median is {_middle(over_part):.2f}× (from {over_part[0]:.2f}× to {over_part[-1]:.2f}×).\n",
        *_since_before(planned),
        *_weak_baselines(planned),
        *_speed_ups(rows),
        *_cells(rows),
    ]


def _since_before(planned: list[dict[str, Any]]) -> list[str]:
    """How plans compare with those of the results that were there before."""
    changes = sorted((row["step_s"] / row["before_s"] - 1, _place(row)) for row in planned if row.get("before_s"))
    if not changes:
        return []
    new = sum(row.get("before_s") is None for row in planned)
    shorter = sum(change < -NO_WORSE for change, _ in changes)
    (best, at_best), (worst, at_worst) = changes[0], changes[-1]
    met = "met" if worst <= NO_WORSE else "**not met**"
    return [
        f"Against the run before, in {len(changes)} cells that both fit: {shorter} steps are shorter by more than "
        f"0.5 %, most {at_best} ({best:+.1%}); the one that is worst is {at_worst} ({worst:+.2%}; goal: at most "
        f"+0.5 %, {met}). {new} cells fit that did not.\n"
    ]


NO_WORSE = 0.005
"""A plan may be predicted slower by so much than before, as a fraction of its step."""


def _place(row: dict[str, Any]) -> str:
    return f"`{row['model']}` on `{row['cluster']}`, {row['batch_per_device']} a device"


def _weak_baselines(planned: list[dict[str, Any]]) -> list[str]:
    """A warning where data parallelism is not what its name says; nothing where it is."""
    cells: dict[tuple[str, str], int] = {}
    for row in planned:
        if row["dp_uncut"]:
            cells[row["model"], row["cluster"]] = max(row["dp_uncut"], cells.get((row["model"], row["cluster"]), 0))
    if not cells:
        return []
    told = ", ".join(f"`{model}` on `{cluster}` ({count})" for (model, cluster), count in cells.items())
    return [
        "**Weak baselines.** In these cells the data parallelism that is compared with runs some calls whole and not "
        f"on pieces of the batch (how many), so that the speed-up over it and over FSDP may be too high: {told}.\n"
    ]


def _middle(ordered: list[float]) -> float:
    return ordered[len(ordered) // 2]


def _speed_ups(rows: list[dict[str, Any]]) -> list[str]:
    """A line per model: over data parallelism / over all classics / over these on the plan's own devices."""
    clusters = list(dict.fromkeys(row["cluster"] for row in rows))
    batches = sorted({row["batch_per_device"] for row in rows})
    cells = {(row["model"], row["cluster"], row["batch_per_device"]): row for row in rows}
    lines = [
        "Over the best of DP-EV and DP-CP / over the best of all classics (DP-EV, DP-CP, FSDP, tensor parallelism, one "
        "device) / over these and data parallelism on the plan's devices; *only* where nothing of that kind fits in "
        "memory, – where the plan does not either.\n",
        "| model | a device | " + " | ".join(f"`{name}`" for name in clusters) + " |",
        "|---|---|" + "---|" * len(clusters),
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        for batch in batches:
            told = " | ".join(_both(cells.get((model, cluster, batch), {"error": ""})) for cluster in clusters)
            lines.append(f"| `{model}` | {batch} | {told} |")
    return [*lines, ""]


def _both(row: dict[str, Any]) -> str:
    if "error" in row:
        return "–"
    keys = ("over_dp", "over_classics", "over_part")
    return " / ".join("*only*" if row[key] is None else f"{row[key]:.2f}×" for key in keys)


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "### Every cell\n",
        "*Nothing gained* is said, with its reason, where the best classic that fits comes within 1 % of the plan.\n",
        "| model | cluster | a device | step | best classic | its step | devices used | memory by | gap | planned in "
        "| nothing gained |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| `{row['model']}` | `{row['cluster']}` | {row['batch_per_device']} "
        if "error" in row:
            lines.append(f"{head}| does not fit | | | | | | {row['planning_s']:.1f} s | {row['error']} |")
            continue
        there = {name: seconds for name, seconds in row["baselines"].items() if seconds is not None}
        best = min(there, key=lambda name: there[name], default="none fits")
        lines.append(
            f"{head}| {_seconds(row['step_s'])} | {best} | {_seconds(there[best]) if there else ''} "
            f"| {', '.join(f'{count} {kind}' for kind, count in row['kinds_used'].items())} | {_memory_by(row)} "
            f"| {row['gap']:.2g} "
            f"| {row['planning_s']:.1f} s | {row['nothing_gained']} |"
        )
    return [*lines, ""]


def _memory_by(row: dict[str, Any]) -> str:
    """What a plan does for the sake of memory."""
    told = [f"{row['rounds']} rounds"] if row.get("rounds", 1) > 1 else []
    told += [f"{row['runs_again']} blocks again"] if row.get("runs_again") else []
    told += ["the loss in chunks"] if row.get("chunked") else []
    told += ["state on the host"] if row.get("on_host") else []
    return ", ".join(told)


def _seconds(taken: float) -> str:
    return f"{taken * 1e3:.3g} ms" if taken < 1 else f"{taken:.3g} s"


def main() -> None:
    (HERE / "rules.md").write_text(rules_page())
    for name, page, sources in PAGES:
        results = [RESULTS / f"{source}.json" for source in sources]
        if all(path.exists() for path in results):
            (HERE / f"{name}.md").write_text(page(*(json.loads(path.read_text()) for path in results)))


def faults_page(
    faults: dict[str, Any],
    soak: dict[str, Any],
    pace: dict[str, Any],
    goodput: dict[str, Any],
    strangers: dict[str, Any],
) -> str:
    lines = [
        NOTE,
        "# Faults, measured\n",
        "What the words mean is in the head of each benchmark; how it works, in [faults.md](faults.md).\n",
    ]
    for part in (
        _goals(faults, soak, pace, goodput, strangers),
        _kills(faults),
        _goodput(goodput),
        _paces(pace),
        _soaked(soak),
    ):
        lines += part
    return "\n".join([*lines, *_strangers(strangers)]) + "\n"


def _from(data: dict[str, Any]) -> str:
    about = data["about"]
    load = f"; load {about['load']}" if "load" in about else ""
    return f"`{about['command']}`, commit {about['commit']}, torch {about['torch']}, {about['machine']}{load}.\n"


def _goals(
    faults: dict[str, Any],
    soak: dict[str, Any],
    pace: dict[str, Any],
    goodput: dict[str, Any],
    strangers: dict[str, Any],
) -> list[str]:
    told, slow, noise = faults["summary"], pace["slow"], pace["noise"]
    on, memory = told["median_next_step_s"], told["median_next_step_from_memory_s"]
    lost = told["checkpoints_lost"] + told["orphans"]
    follow = [slow[which]["steps_to_follow"] for which in ("slowed", "let_go")]
    growth = _growth(soak)
    soaked = [[one[step] for step in sorted(one, key=int)] for one in soak["ranks"]]
    more = [last[key] - first[key] for first, last in soaked for key in ("descriptors", "threads")]
    bad = sum(one[key] for one in strangers["formats"].values() for key in ("tracebacks", "hangs", "above_1_GiB"))
    rows = [
        (
            "every run that lost a process goes on",
            f"{told['went_on']} of {told['kills']}",
            told["went_on"] == told["kills"],
        ),
        (
            "with the losses of one device",
            f"{told['same_losses']} of {told['kills']}",
            told["same_losses"] == told["kills"],
        ),
        ("no checkpoint lost, no orphan", f"{lost}", lost == 0),
        ("median from the death to the next step, 15 s at the most", _s(on), on is not None and on <= 15),
        ("the same from memory, 5 s at the most", _s(memory), memory is not None and memory <= 5),
        ("goodput at a kill a minute, 90 % at least", f"{goodput['goodput']:.1%}", goodput["goodput"] >= 0.9),
        (
            "a device slowed to a third, and let go: followed within 20 steps",
            ", ".join("never" if one is None else str(one) for one in follow),
            all(one is not None and one <= 20 for one in follow),
        ),
        (f"noise of 10 % in {noise['steps']} steps changes nothing", str(noise["changes"]), noise["changes"] == 0),
        (
            f"memory after a soak of {soak['steps']:,} steps as before, to 2 %",
            f"{growth:+.1%}",
            growth <= 0.02,
        ),
        ("descriptors and threads as before", ", ".join(f"{each:+d}" for each in more), not any(more)),
        ("watching, under 1 % of a step of 50 ms", f"{pace['watched']['cost']:.2%}", pace["watched"]["cost"] < 0.01),
        ("files of strangers: tracebacks, hangs, memory", str(bad), bad == 0),
    ]
    return [
        "| goal | found | |\n|---|---|---|",
        *(f"| {goal} | {found} | {_met(met)} |" for goal, found, met in rows),
        "",
    ]


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _growth(soak: dict[str, Any]) -> float:
    pairs = [[one[step]["memory_kB"] for step in sorted(one, key=int)] for one in soak["ranks"]]
    return float(max(last / first - 1 for first, last in pairs))


def _kills(data: dict[str, Any]) -> list[str]:
    told = data["summary"]
    lines = [
        "## Kills\n",
        _from(data),
        "| killed while it was at | runs | went on | from memory | to the next step |\n|---|---|---|---|---|",
    ]
    for phase in sorted(told["killed_while"]):
        runs = [one for one in data["runs"] if one.get("killed_while") == phase]
        times = [one["next_step_s"] for one in runs if one["next_step_s"] is not None]
        counts = " | ".join(str(sum(bool(one[key]) for one in runs)) for key in ("went_on", "from_memory"))
        lines.append(f"| {phase} | {len(runs)} | {counts} | {_s(statistics.median(times) if times else None)} |")
    worlds = {0: "as many", -1: "one fewer", 1: "one more"}
    counts = Counter(worlds[one["change"]] for one in data["runs"] if one["went_on"])
    went_on = ", ".join(f"{words} {counts[words]}" for words in worlds.values())
    return [*lines, f"\nWorlds that went on: {went_on}. Start-up of the interpreter is not counted.\n"]


def _goodput(data: dict[str, Any]) -> list[str]:
    lost, starts = data["lost_s"], data["start_s"]
    return [
        "## Goodput\n",
        _from(data),
        f"{data['steps']:,} steps of {1e3 * data['step_s']:.0f} ms in {data['seconds'] / 60:.1f} minutes with "
        f"{data['kills']} kills, of which {data['went_on']} were gone on from: {data['goodput']:.1%} of what there "
        f"would have been without. A kill cost {statistics.median(lost):.1f} s, of which "
        f"{statistics.median(starts):.1f} s until new processes had started and imported (medians).\n",
    ]


def _paces(data: dict[str, Any]) -> list[str]:
    lines = [
        "## A device slows down\n",
        _from(data),
        "| | first steps | then | by a plan for it | followed after | shares |\n|---|---|---|---|---|---|",
    ]
    for which, words in (("slowed", "to a third"), ("let_go", "let go")):
        one = data["slow"][which]
        first = f"{1e3 * one['first_step_s']:.0f} ms" if "first_step_s" in one else ""
        shares = ", ".join(f"{share:.0%}" for share in one["shares"])
        follow = "never" if one["steps_to_follow"] is None else f"{one['steps_to_follow']} steps"
        lines.append(
            f"| {words} | {first} | {1e3 * one['after_step_s']:.0f} ms "
            f"| {1e3 * one['reference_step_s']:.0f} ms | {follow} | {shares} |"
        )
    most = max(data["watched"]["a_step"], key=lambda one: sum(one.values()) - one["calls_s"])
    parts = {"notes and looks": "step_done", "the start of a handshake": "start_handshake"}
    parts |= {"its end": "finish_handshake", "threads": "threads_s"}
    took = ", ".join(f"{words} {1e6 * most[key]:.0f} µs" for words, key in parts.items())
    return [*lines, "", f"Watching takes of a processor, in a step of 50 ms: {took}.", ""]


def _soaked(data: dict[str, Any]) -> list[str]:
    lines = [
        "## Soak\n",
        _from(data),
        f"{data['steps']:,} steps with checkpoints on disk and in memory, evaluation and changes of shares.\n",
    ]
    lines.append("| rank | after steps | memory | descriptors | threads |\n|---|---|---|---|---|")
    for rank, one in enumerate(data["ranks"]):
        for step in sorted(one, key=int):
            at = one[step]
            lines.append(
                f"| {rank} | {step} | {at['memory_kB'] / 1e3:.0f} MB | {at['descriptors']} | {at['threads']} |"
            )
    return [*lines, ""]


def _strangers(data: dict[str, Any]) -> list[str]:
    lines = [
        "## Files of strangers\n",
        _from(data),
        "| format | files | read | refused | tracebacks | hangs | above 1 GiB | longest |\n" + "|---" * 8 + "|",
    ]
    for name, one in data["formats"].items():
        counts = " | ".join(
            f"{one[key]:,}" for key in ("files", "read", "refused", "tracebacks", "hangs", "above_1_GiB")
        )
        lines.append(f"| {name} | {counts} | {one['longest_s']:.1f} s |")
    return lines


PAGES: tuple[tuple[str, Callable[..., str], tuple[str, ...]], ...] = (
    ("coverage", coverage_page, ("coverage",)),
    ("benchmarks", benchmarks_page, ("algebra",)),
    ("planning", planning_page, ("planner", "kinds", "quality", "against_random")),
    ("runtime-benchmarks", runtime_page, ("runtime", "runtime-cuda", "compiled-cuda")),
    ("scripts", scripts_page, ("scripts",)),
    ("shapes", shapes_page, ("shapes",)),
    ("fits", lambda data: f"{NOTE}\n{fits_page(data)}", ("fits",)),
    ("memory", lambda data: f"{NOTE}\n{memory_page(data)}", ("memory",)),
    ("faults-measured", faults_page, ("faults", "soak", "pace", "goodput", "strangers")),
)

if __name__ == "__main__":
    main()
