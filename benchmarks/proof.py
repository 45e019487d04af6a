"""The proof: on really unequal hardware, does the plan beat what people would otherwise run?

python benchmarks/proof.py --lab lab-cpu                       all models, all contestants
python benchmarks/proof.py --lab lab-cpu --ablate all          what each addition brings, into ablation-LAB.json
python benchmarks/proof.py --lab lab-cpu --zoo                 the rest of the zoo: how well steps are predicted
python benchmarks/proof.py --lab lab-cpu --compiled            all contestants compiled, into proof-compiled-LAB.json
python benchmarks/proof.py --lab lab-nccl --nccl PATH --compiled    over the NCCL in this file (docs/lab.md)
python benchmarks/proof.py --lab lab-cpu --quick               small and short, nothing written

In: the name of a lab (`benchmarks/lab.py`). Out: benchmarks/results/proof-LAB.json, a row per model (with `--ablate`:
ablation-LAB.json, in which plans alone compete, and plain data parallelism). For every model:

    profile   in the lab, at the lab's speeds (`race.py`)
    plan      outside of it, at full speed: Lopsided, HAP (every addition left out), and what `--ablate` asks for
    try       in the lab, what `parallelize(tries=...)` does: of up to `--tries` of our plans the one that is quickest
              over some steps, before anyone races (not with `--ablate`, where plans are compared as they are planned)
    race      in the lab, all contestants in the same processes (`race.py`). A step takes as long as its slowest rank
    again     if the same work (`beat.py`) took otherwise in the race than in the profile; the steadiest attempt counts

Losses are compared step by step: a contestant that does not train the same model is marked, and its times do not count.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
from beat import UNSTEADY, drift
from contestants import Entry, Subject
from lab import NCCL_LIBRARY, SPECS, Lab, build
from race import SCRIPT, Pace, Race
from subjects import ON_CPU, QUICK, REST, RESTS, SUBJECTS

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import parse_cluster
from lopsided.ir.placement import cut
from lopsided.ops.derive import derive_rules
from lopsided.planner.ablation import ADDITIONS, HAP, additions_named
from lopsided.planner.candidates import speed_dtype
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import parse_plan, save_plan
from lopsided.planner.planner import plan_graph, plan_rivals
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.timeline import NETWORK, Timeline, run

OURS = "lopsided"
RIVAL = "rival-"
BASELINES = ("dp-ev", "dp-cp", "fsdp2", "deepspeed-1", "deepspeed-3")
CONTESTANTS = (*BASELINES, HAP, OURS, "alone")
COMPILED = ("dp-ev", "dp-cp", "fsdp2", OURS, "alone")
"""Who can be compiled."""
PREDICTED_AS = {"dp-ev": "dp-ev", "dp-cp": "dp-cp", "fsdp2": "fsdp", "deepspeed-3": "fsdp", "alone": "single"}
"""The planner's own figure for what others run."""

SAME_AT_FIRST, SAME_LATER = 1e-4, 1e-2
SAME_UNDER_AUTOCAST = 2e-2
"""How far losses may differ, as a part: sums are ordered otherwise, and AdamW makes much of small gradients."""

Made = Callable[[Cluster, torch.device], Iterable[tuple[str, Plan]]]
"""Plans by name for a measured cluster; one of them is ours."""
Group = Sequence[tuple[Subject, Made]]
"""Models that share their processes."""


def race_in(lab: Lab, subject: Subject, who: Sequence[str], make: Made, pace: Pace) -> dict[str, Any]:
    """The row of one model: the contestants that are asked for, and every plan that is made."""
    return next(races_in(lab, [(subject, make)], who, pace))[1]


def races_in(
    lab: Lab, subjects: Group, who: Sequence[str], pace: Pace, *, compiled: bool = False
) -> Iterator[tuple[Subject, dict[str, Any]]]:
    """The row of each model. They are profiled in the same processes, one after the other, and race in others.

    If one fails, those that came before it are told, and then what went wrong.
    """
    started = time.perf_counter()
    device = torch.device("cuda:0" if lab.spec.kind == "gpu" else "cpu")
    with tempfile.TemporaryDirectory(prefix="proof-") as name:
        folder = Path(name)
        (folder / "subjects.json").write_text(json.dumps([asdict(subject) for subject, _ in subjects]))
        trouble = _in_the_lab(lab, [str(SCRIPT), "profile", str(folder), "--measure", str(pace.measure_s)], pace)
        subjects = [(one, make) for one, make in subjects if (folder / f"{one.name}-cluster.json").is_file()]
        (folder / "subjects.json").write_text(json.dumps([asdict(subject) for subject, _ in subjects]))
        profiled = time.perf_counter()
        measured = {one.name: json.loads((folder / f"{one.name}-cluster.json").read_text()) for one, _ in subjects}
        jobs = [(parse_cluster(measured[one.name]["toml"], "measured"), make, device) for one, make in subjects]
        ready = {}
        made = {one.name: planned for (one, _), planned in zip(subjects, _planned(jobs), strict=True)}
        if compiled:  # tried so, too
            made = {name: (on, {n: p.compiled() for n, p in plans.items()}, s) for name, (on, plans, s) in made.items()}
        planned = time.perf_counter()
        tried, trouble_trying = _tried(lab, folder, {name: plans for name, (_, plans, _) in made.items()}, pace)
        trouble += trouble_trying
        for subject, _ in subjects:
            cluster, plans, planning_s = made[subject.name]
            entries = tuple(entries_for(subject, plans, who, cluster, folder, compiled=compiled))
            (folder / f"{subject.name}-race.json").write_text(Race(subject, entries, pace).text())
            ready[subject.name] = cluster, plans, entries, planning_s
        tried_at = time.perf_counter()
        trouble += _in_the_lab(lab, [str(SCRIPT), "race", str(folder)], pace) if subjects else ""
        ended = time.perf_counter()
        for subject, _ in subjects:
            cluster, plans, entries, planning_s = ready[subject.name]
            names = [f"{subject.name}-rank-{rank}.json" for rank in range(cluster.devices)]
            if not all((folder / name).is_file() for name in names):
                break
            ranks = [json.loads((folder / name).read_text()) for name in names]
            row = told_of(subject, cluster, plans, entries, ranks)
            row["measurement"] = measured[subject.name]
            row["beats_s"] = [rank["beats"] for rank in ranks]
            row["drift"] = drift(measured[subject.name]["beats_s"], row["beats_s"])
            row["tried"] = tried.get(subject.name, [])
            row["took_s"] = {
                "profile": (profiled - started) / len(subjects),
                "plan": planning_s,
                "try": (tried_at - planned) / len(subjects),
                "race": (ended - tried_at) / len(subjects),
                "all": (ended - started) / len(subjects),
                **ranks[0]["took_s"],
            }
            yield subject, row
    if trouble:
        raise SystemExit(trouble)


def steadiest(
    race: Callable[[Group], Iterable[tuple[Subject, dict[str, Any]]]], group: Group, attempts: int
) -> Iterator[tuple[Subject, dict[str, Any]]]:
    """The row of each model; that of the steadiest attempt, where the machine changed and it is measured again.

    A row that is not the last word comes, too. Which attempt counts is decided by work in which no contestant has a
    part (`beat.py`), and what the others gave is told in the row.
    """
    best: dict[str, dict[str, Any]] = {}
    attempted: dict[str, list[dict[str, Any]]] = {}
    for _ in range(attempts):
        for subject, row in race(group):
            known = best.setdefault(subject.name, row)
            if abs(row["drift"]) < abs(known["drift"]):
                best[subject.name] = row
            measured = {name: one["measured_s"] for name, one in row["contestants"].items() if "measured_s" in one}
            predicted = row["contestants"].get(OURS, {}).get("predicted_s")
            told = attempted.setdefault(subject.name, [])
            told.append({"drift": row["drift"], "predicted_s": predicted, "measured_s": measured})
            yield subject, {**best[subject.name], "attempts": list(told)}
        group = [(subject, make) for subject, make in group if abs(best[subject.name]["drift"]) > UNSTEADY]
        if not group:
            return


def _tried(
    lab: Lab, folder: Path, made: dict[str, dict[str, Plan]], pace: Pace
) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Of each model, what its rivals were predicted to take and took, and what went wrong. The quickest becomes ours;
    rivals leave the plans."""
    rivals = {name: [plans.pop(key) for key in [*plans] if key.startswith(RIVAL)] for name, plans in made.items()}
    for name, listed in rivals.items():
        for number, plan in enumerate(listed):
            save_plan(plan, str(folder / f"{name}-rival-{number}.json"))
    trouble = _in_the_lab(lab, [str(SCRIPT), "try", str(folder)], pace) if any(rivals.values()) else ""
    found = {}
    for name in rivals:
        path = folder / f"{name}-tried.json"
        if path.is_file():
            told = json.loads(path.read_text())
            made[name][OURS] = parse_plan(told["plan"])
            found[name] = told["tried"]
    return found, trouble


_Job = tuple[Cluster, Made, torch.device]


def _planned(jobs: Sequence[_Job]) -> list[tuple[Cluster, dict[str, Plan], float]]:
    """The plans for each, and seconds; side by side if there are several."""
    if len(jobs) < 2:
        return [_plan(job) for job in jobs]
    with ProcessPoolExecutor(len(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_plan, jobs))


def _plan(job: _Job) -> tuple[Cluster, dict[str, Plan], float]:
    cluster, make, device = job
    began = time.perf_counter()
    return cluster, dict(make(cluster, device)), time.perf_counter() - began


KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
"""What is freed stays in the process: else what one contestant has freed decides how fast another gets it anew."""


def _in_the_lab(lab: Lab, script: Sequence[str], pace: Pace) -> str:
    """What went wrong; nothing, if all is well."""
    done = lab.run(script, env=KEEPS_MEMORY, fast_start=True, timeout_s=600 + pace.measure_s * 8 + pace.most_s * 3)
    failed = [one for one in done if one.returncode]
    if not failed:
        return ""
    return f"{failed[0].host}: {' '.join(script)}\n{failed[0].stdout[-2000:]}\n{failed[0].stderr[-6000:]}\n"


def plans_for(
    subject: Subject, who: Sequence[str], ablate: Sequence[str], cluster: Cluster, device: torch.device, tries: int = 1
) -> Iterator[tuple[str, Plan]]:
    """Ours first, always: what others are predicted to take is told by it. Where several are tried, ours is a rival."""
    with subject.casting(device):
        graph = capture(*subject.built(device))
    book = derive_rules(graph)
    rivals = plan_rivals(graph, cluster, tries, book=book)
    yield OURS, rivals[0]
    if tries > 1:
        for number, rival in enumerate(rivals):
            yield f"{RIVAL}{number}", rival
    if HAP in who:
        yield HAP, plan_graph(graph, cluster, book=book, without=(HAP,))
    for name in ablate:
        yield f"no-{name}", plan_graph(graph, cluster, book=book, without=tuple(name.split("+")))


def entries_for(
    subject: Subject,
    plans: dict[str, Plan],
    who: Sequence[str],
    cluster: Cluster,
    folder: Path,
    *,
    compiled: bool = False,
) -> Iterator[Entry]:
    graph = plans[OURS].graph
    sizes = [leaf.value.shape[0] for leaf in graph.leaves if leaf.kind == "input"]
    batch, ranks = max(sizes), cluster.devices
    speeds = [kind.flops(speed_dtype(graph)) for kind in cluster.kinds for _ in range(kind.devices)]
    equal = rows_by([1.0] * ranks, batch)
    for name in who:
        if name in ("dp-ev", "dp-cp"):
            yield Entry(name, "ddp", equal if name == "dp-ev" else rows_by(speeds, batch), compiled=compiled)
        elif name == "fsdp2":
            yield Entry(name, "fsdp2", equal, compiled=compiled)
        elif name.startswith("deepspeed"):
            yield Entry(name, "deepspeed", equal, stage=int(name.rpartition("-")[2]))
        elif name == "alone":
            fastest = max(range(ranks), key=lambda rank: speeds[rank])
            rows = tuple(batch if rank == fastest else 0 for rank in range(ranks))
            yield Entry(name, "alone", rows, compiled=compiled)
    for number, (name, plan) in enumerate(plans.items()):
        if (name != OURS or OURS in who) and not twin(name, plans):
            path = folder / f"{subject.name}-plan-{number}.json"
            save_plan(plan, str(path))
            yield Entry(name, "plan", plan=str(path), compiled=compiled)


def twin(name: str, plans: dict[str, Plan]) -> str:
    """The name of an earlier plan that does the very same; "" if there is none."""

    def does(plan: Plan) -> tuple[object, ...]:
        return plan.on.fingerprint, plan.program, plan.shares, plan.regather, plan.bucket_bytes

    for other, plan in plans.items():
        if other == name:
            return ""
        if does(plan) == does(plans[name]):
            return other
    return ""


def rows_by(weights: Sequence[float], batch: int) -> tuple[int, ...]:
    """Rows in proportion, at least one each: a mean over no rows is not a number."""
    rows = list(cut(batch, tuple(weight / sum(weights) for weight in weights)))
    while min(rows) == 0 and batch >= len(rows):
        rows[rows.index(0)] += 1
        rows[rows.index(max(rows))] -= 1
    return tuple(rows)


# What is made of it


def told_of(
    subject: Subject, cluster: Cluster, plans: dict[str, Plan], entries: Sequence[Entry], ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    graph = plans[OURS].graph
    predicted = {baseline.name: baseline for baseline in plans[OURS].baselines}
    found: dict[str, Any] = {}
    reference = _reference(ranks[0]["losses"])
    for entry in entries:
        name = entry.name
        if name in ranks[0]["unavailable"]:
            found[name] = {"unavailable": ranks[0]["unavailable"][name]}
            continue
        rounds = [max(taken) for taken in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
        losses = ranks[0]["losses"][name]
        row: dict[str, Any] = {
            "rounds_s": rounds,
            "measured_s": statistics.median(rounds),
            "losses": losses,
            "off": _off(losses, reference),
            "same": _are_same(losses, reference, subject),
        }
        if entry.rows:
            row["rows"] = list(entry.rows)
        if name in plans:
            row |= _told_plan(plans[name])
            row["waited_s"] = [statistics.median(rank["waited"][name]) for rank in ranks]
        elif name in PREDICTED_AS and predicted[PREDICTED_AS[name]].fits:
            row["predicted_s"] = predicted[PREDICTED_AS[name]].step_s
        if "predicted_s" in row:
            row["error"] = row["predicted_s"] / row["measured_s"] - 1
        found[name] = row
    for name, plan in plans.items():
        if (same_as := twin(name, plans)) in found:
            found[name] = {"same_as": same_as, "predicted_s": plan.step_s}
    return {
        "spec": subject.spec,
        "autocast": subject.autocast,
        "parameters": sum(leaf.value.elements for leaf in graph.parameters),
        "graph": graph.fingerprint,
        "cluster": cluster.text(),
        "devices": list(cluster.device_names),
        "most_bytes": [rank["most_bytes"] for rank in ranks],
        "contestants": found,
    }


def _reference(losses: dict[str, list[float]]) -> list[float]:
    """Those of one device; if it did not take part, those of plain data parallelism, or whoever came first."""
    return next((losses[name] for name in ("alone", "dp-ev") if name in losses), next(iter(losses.values())))


def _off(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [abs(own - wanted) / abs(wanted) for own, wanted in zip(losses, reference, strict=False)]


def _are_same(losses: Sequence[float], reference: Sequence[float], subject: Subject) -> bool:
    off = _off(losses, reference)
    if len(losses) != len(reference) or not all(map(math.isfinite, (*losses, *reference))):
        return False
    if subject.autocast:
        return bool(off) and max(off) <= SAME_UNDER_AUTOCAST
    return bool(off) and off[0] <= SAME_AT_FIRST and max(off) <= SAME_LATER


def _told_plan(plan: Plan) -> dict[str, Any]:
    b = plan.breakdown
    return {
        "predicted_s": plan.step_s,
        "devices": list(plan.devices),
        "shares": {by or "work": list(plan.shares.of(by)) for by in ("", *(name for name, _ in plan.shares.named))},
        "regather": plan.regather,
        "bucket_bytes": plan.bucket_bytes,
        "memory_bytes": list(plan.memory_bytes),
        "breakdown": {
            part: getattr(b, f"{part}_s")
            for part in ("compute", "optimizer", "blocking", "exposed", "waiting", "hidden")
        },
        "why": plan.search.why,
        "notes": list(plan.notes),
        "planning_s": plan.planning_s,
        "timeline": compact(timeline_of(plan)),
    }


def timeline_of(plan: Plan) -> Timeline:
    """The predicted step with all that happens in it, every kind of device called by where it is."""
    kinds = (replace(kind, name=f"{kind.node} {kind.name}"[:100]) for kind in plan.on.kinds)
    on = replace(plan.on, kinds=tuple(kinds))
    costs = Costs(plan.graph, on, optimizer_named(plan.optimizer))
    return run(plan.priced(costs), costs.network, Scale(on, plan.shares), events=True)


def compact(timeline: Timeline) -> dict[str, list[list[float]]]:
    """When every kind of device computes and when something is sent, in milliseconds; what adjoins is one."""
    lanes: dict[str, list[list[float]]] = {NETWORK: []}
    for event in timeline.events:
        start, end = event.start_s * 1e3, event.end_s * 1e3
        lane = lanes.setdefault(event.lane, [])
        if lane and start - lane[-1][1] < 1e-3 and event.lane != NETWORK:
            lane[-1][1] = end
        elif end > start:
            lane.append([start, end])
    return {name: [[round(a, 3), round(b, 3)] for a, b in spans] for name, spans in lanes.items()}


def said(lab: str, model: str, row: dict[str, Any]) -> str:
    """A few lines to read."""
    found = {name: one for name, one in row["contestants"].items() if "measured_s" in one}
    slowest = found.get("dp-ev", {}).get("measured_s", 0.0)
    took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in row["took_s"].items())
    lines = [f"{lab} {model} ({row['parameters'] / 1e6:.1f} M parameters; seconds: {took})"]
    if abs(row["drift"]) > UNSTEADY:
        lines.append(f"  the machine took {1 + row['drift']:.2f} times as long as while profiling: this proves little")
    for name, one in sorted(found.items(), key=lambda item: item[1]["measured_s"]):
        error = f", predicted {one['predicted_s'] * 1e3:.0f} ms ({one['error']:+.0%})" if "error" in one else ""
        wrong = "" if one["same"] else f"  LOSSES DIFFER by {max(one['off']):.1%}"
        faster = f" {slowest / one['measured_s']:.2f}× dp-ev" if slowest else ""
        uses = f", {len(one['devices'])} devices" if "devices" in one else ""
        lines.append(f"  {name:<18}{one['measured_s'] * 1e3:7.0f} ms{faster}{error}{uses}{wrong}")
    for one in row.get("tried", ()):
        seconds = f"{one['tried_s'] * 1e3:7.0f} ms" if one["tried_s"] is not None else "did not run"
        told = f"predicted {one['predicted_s'] * 1e3:.0f} ms, {one['devices']} devices"
        lines.append(f"  {'tried':<18}{seconds}, {told}{', taken' if one['taken'] else ''}")
    lines += [f"  {n:<18}the same plan as {c['same_as']}" for n, c in row["contestants"].items() if "same_as" in c]
    lines += [f"  {n:<18}unavailable: {c['unavailable']}" for n, c in row["contestants"].items() if "unavailable" in c]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", choices=tuple(SPECS), default="lab-cpu")
    parser.add_argument("--models", default="", help="which, with commas between; all unless given")
    parser.add_argument("--contestants", default="", help=f"some of {', '.join(CONTESTANTS)}, with commas between")
    parser.add_argument("--ablate", default="", help="additions, with commas between (several at once with +), or all")
    parser.add_argument("--zoo", action="store_true", help="the rest of the zoo, planned and alone, into zoo-LAB.json")
    parser.add_argument("--compiled", action="store_true", help=f"all compiled, of {', '.join(COMPILED)}")
    parser.add_argument("--nccl", default="", metavar="PATH", help="a libnccl.so.2 to load, for labs that talk over it")
    parser.add_argument("--tries", type=int, default=3, help="of our plans; the quickest races")
    parser.add_argument("--attempts", type=int, default=3, help="at most, where the machine changes under a model")
    parser.add_argument("--steps", type=int, default=2, help="in a round, beside the first, which does not count")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", type=float, default=12.0, metavar="SECONDS")
    parser.add_argument("--most", type=float, default=150.0, metavar="SECONDS", help="after which no round begins")
    parser.add_argument("--quick", action="store_true", help="two tiny models, two rounds, nothing written")
    parser.add_argument("-o", "--output", default="", help="another file in benchmarks/results")
    options = parser.parse_args()
    spec = SPECS[options.lab]
    usual = RESTS.get(spec.name, REST) if options.zoo else SUBJECTS.get(spec.name, ON_CPU)
    listed = QUICK if options.quick else usual
    wanted = options.models.split(",") if options.models else [subject.name for subject in listed]
    ablate = ADDITIONS if options.ablate == "all" else tuple(filter(None, options.ablate.split(",")))
    for name in ablate:
        additions_named(name.split("+"))
    if options.nccl:
        os.environ[NCCL_LIBRARY] = options.nccl
    known = COMPILED if options.compiled else CONTESTANTS
    some = ("dp-ev", HAP, OURS) if ablate else (OURS, "alone") if options.zoo else known
    who = tuple(options.contestants.split(",")) if options.contestants else some
    # Two, since DistributedDataParallel makes its buckets anew in its second step.
    pace = Pace(options.measure, 2, options.rounds, options.steps, options.most)
    if options.quick:
        pace = Pace(min(options.measure, 4.0), 1, 2, 1, 20.0)
    kind = "ablation" if ablate else "zoo" if options.zoo else "proof-compiled" if options.compiled else "proof"
    path = record.RESULTS / (Path(options.output).name or f"{kind}-{spec.name}.json")
    rows: dict[str, Any] = json.loads(path.read_text())["models"] if path.is_file() and not options.quick else {}
    if options.compiled and (ablate or options.zoo):
        parser.error("--compiled is for the proof itself")
    unknown = [*({*wanted} - {one.name for one in listed}), *({*who} - {*known})]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}")
    with build(spec) as lab:
        if not lab.is_whole and not options.quick:
            parser.error("hosts without shares and links prove nothing (is this root?); --quick tries the script")
        subjects = {one.name: one for one in listed}
        tries = 1 if ablate or options.quick else options.tries
        racing = [(subjects[name], partial(plans_for, subjects[name], who, ablate, tries=tries)) for name in wanted]
        # To start processes takes longer than a race on a GPU. Hosts with a quota are given it once in their life.
        groups = [racing] if spec.kind == "gpu" else [[one] for one in racing]
        attempts = 1 if options.quick else options.attempts
        race = lambda group: races_in(lab, group, who, pace, compiled=options.compiled)  # noqa: E731
        for subject, row in (told for group in groups for told in steadiest(race, group, attempts)):
            print(said(spec.name, subject.name, row), flush=True)
            rows[subject.name] = {**row, "by": {**record.about(), "pace": asdict(pace), "contestants": list(who)}}
            if not options.quick:
                # After each model, so that what was measured stays whatever comes.
                about = {"lab": spec.name, "what": spec.about, "hosts": [asdict(host) for host in spec.hosts]}
                record.write(path.stem, {**about, "pace": asdict(pace), "models": rows})


if __name__ == "__main__":
    main()
