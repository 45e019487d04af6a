"""The proof: contestants train the same model, results are judged rightly, and pictures are made of nothing else."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from lopsided.cluster.cluster import Cluster, Kind, Link
from lopsided.comm.worker_pool import WorkerPool
from lopsided.planner.ablation import ADDITIONS, HAP
from lopsided.planner.plan_file import save_plan
from tests.support.clusters import cluster, kind

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import accuracy  # noqa: E402
import beat  # noqa: E402
import cells  # noqa: E402
import contestants  # noqa: E402
import figures  # noqa: E402
import page  # noqa: E402
import proof  # noqa: E402
import race  # noqa: E402
import subjects  # noqa: E402

MEAN = contestants.Subject("gpt2", "gpt2:layers=2,width=32,heads=2,seq=8,vocab=64,dropout=0,batch=8")
SUM = contestants.Subject("bert", "bert:layers=2,width=32,heads=2,seq=8,vocab=64,dropout=0,batch=8", sums=True)
VGG = contestants.Subject("vgg19", "vgg19:width=8,ffn=64,dropout=0,batch=8", sums=True)


def host(number: int, speed: float) -> Kind:
    figures = {"speed": speed * 1e9, "bytes_per_s": speed * 1e9, "launch_s": 1e-9}
    return kind(f"d{number}", f"n{number}", **figures)


def two_hosts() -> Cluster:
    return cluster(host(0, 3), host(1, 1), link=Link(1e-6, 1e10))


# Contestants


def trained(benchmarks: str, subject: dict[str, Any], entries: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """In a worker: losses of each contestant, or why there are none."""
    if benchmarks not in sys.path:
        sys.path.insert(0, benchmarks)
    import contestants as own  # of the worker, which has not read this file's imports
    import torch.distributed as dist

    found: dict[str, Any] = {}
    for told in entries:
        entry = own.Entry(**told)
        made = own.enter(own.Subject(**subject), entry, torch.device("cpu"))
        if isinstance(made, str):
            found[entry.name] = made
            continue
        losses = torch.stack([made.step() for _ in range(steps)])
        dist.all_reduce(losses)
        found[entry.name] = losses.tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("subject", [MEAN, SUM, VGG], ids=lambda subject: subject.name)
def test_everyone_trains_the_same_model(subject: contestants.Subject, tmp_path: Path) -> None:
    plans = dict(proof.plans_for(subject, (HAP,), ("overlap",), two_hosts(), torch.device("cpu")))
    paths = {name: str(tmp_path / f"{name}.json") for name in plans}
    for name, plan in plans.items():
        save_plan(plan, paths[name])
    entries = [
        {"name": "alone", "way": "alone", "rows": (8, 0)},
        {"name": "dp-ev", "way": "ddp", "rows": (4, 4)},
        {"name": "dp-cp", "way": "ddp", "rows": (6, 2)},
        {"name": "fsdp2", "way": "fsdp2", "rows": (4, 4)},
        *({"name": name, "way": "plan", "plan": path} for name, path in paths.items()),
    ]
    told = {"name": subject.name, "spec": subject.spec, "sums": subject.sums}
    with WorkerPool(2) as pool:
        both = pool.run(trained, str(BENCHMARKS), told, entries, 3)
    assert both[0] == both[1]
    wanted = both[0]["alone"]
    assert len(set(wanted)) == 3, "it learns nothing"
    for name, losses in both[0].items():
        assert losses == pytest.approx(wanted, rel=1e-3), name


@pytest.mark.slow
def test_compiled_everyone_trains_the_same_model(tmp_path: Path) -> None:
    subject = contestants.Subject("gpt2", "gpt2:layers=1,width=16,heads=2,seq=8,vocab=32,dropout=0,batch=8")
    plans = dict(proof.plans_for(subject, (), (), two_hosts(), torch.device("cpu")))
    save_plan(plans[proof.OURS].compiled(), str(tmp_path / "plan.json"))
    entries = [
        {"name": "eager", "way": "alone", "rows": (8, 0)},
        {"name": "alone", "way": "alone", "rows": (8, 0), "compiled": True},
        {"name": "dp-ev", "way": "ddp", "rows": (4, 4), "compiled": True},
        {"name": "dp-cp", "way": "ddp", "rows": (6, 2), "compiled": True},
        {"name": "fsdp2", "way": "fsdp2", "rows": (4, 4), "compiled": True},
        {"name": proof.OURS, "way": "plan", "plan": str(tmp_path / "plan.json"), "compiled": True},
    ]
    with WorkerPool(2, timeout_s=600) as pool:
        both = pool.run(trained, str(BENCHMARKS), {"name": "gpt2", "spec": subject.spec}, entries, 3)
    assert both[0] == both[1]
    for name, losses in both[0].items():
        assert losses == pytest.approx(both[0]["eager"], rel=1e-3), name


def test_who_races_compiled_is_told_so(tmp_path: Path) -> None:
    plans = dict(proof.plans_for(MEAN, (), (), two_hosts(), torch.device("cpu")))
    for compiled in (False, True):
        entries = list(proof.entries_for(MEAN, plans, proof.COMPILED, two_hosts(), tmp_path, compiled=compiled))
        assert [entry.name for entry in entries] == ["dp-ev", "dp-cp", "fsdp2", "alone", proof.OURS]
        assert {entry.compiled for entry in entries} == {compiled}
        told = race.Race(MEAN, tuple(entries), race.Pace(1, 2, 3, 4, 5))
        (tmp_path / "race.json").write_text(told.text())
        assert race.read_race(tmp_path / "race.json") == told


def test_a_contestant_that_cannot_be_there_says_why() -> None:
    with WorkerPool(2) as pool:
        entries = [{"name": "nobody", "way": "plan", "plan": "/nowhere.json"}]
        told = pool.run(trained, str(BENCHMARKS), {"name": "gpt2", "spec": MEAN.spec}, entries, 1)
    assert "no such file" in told[0]["nobody"]
    assert told[0] == told[1]


def test_blocks_are_the_layers_and_never_parts_of_them() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)])
            self.head = nn.Linear(2, 2)

    model = Deep()
    assert contestants.blocks_of(model) == list(model.layers)
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert contestants.blocks_of(plain) == [plain[0], plain[2]]


@pytest.mark.parametrize("subject", [*subjects.ON_CPU, *subjects.ON_NCCL, *subjects.QUICK], ids=lambda s: s.spec[:40])
def test_models_that_sum_are_those_that_say_so(subject: contestants.Subject) -> None:
    """The losses of parts, weighted as said, are that of the whole."""
    name, _, sizes = subject.spec.partition(":")
    kept = [size for size in sizes.split(",") if size.split("=")[0] not in ("batch", "layers", "width", "ffn", "vocab")]
    small = {"vgg19": ["width=4", "ffn=16"], "gpt2": ["layers=1", "width=96", "vocab=64"]}
    more = small.get(name, ["layers=1", "width=96"])
    kept = [size for size in kept if not size.startswith(("seq", "image"))]
    spec = f"{name}:" + ",".join([*kept, *more, *(["seq=8"] if name not in ("vgg19", "vit") else []), "batch=4"])
    model, batch = contestants.Subject(name, spec, sums=subject.sums).built(torch.device("cpu"))
    halves = [{k: v[at : at + 2] for k, v in batch.items()} for at in (0, 2)]
    every = contestants.counted(batch["labels"])
    parts = [1.0 if subject.sums else contestants.counted(half["labels"]) / every for half in halves]
    with torch.no_grad():
        whole = float(model(**batch))
        together = sum(part * float(model(**half)) for part, half in zip(parts, halves, strict=True))
    assert together == pytest.approx(whole, rel=1e-4)


# Judging


def test_rows_follow_weights_and_nobody_has_none() -> None:
    assert proof.rows_by([1, 1, 1, 1], 24) == (6, 6, 6, 6)
    assert proof.rows_by([4, 2, 1, 1], 48) == (24, 12, 6, 6)
    rows = proof.rows_by([100, 1, 1], 8)
    assert sum(rows) == 8
    assert min(rows) == 1


def test_losses_are_the_same_up_to_rounding_and_no_further() -> None:
    wanted = [5.0, 4.0, 3.0]
    assert proof._are_same([5.0, 4.001, 3.002], wanted, MEAN)
    assert not proof._are_same([5.01, 4.0, 3.0], wanted, MEAN), "before the first update nothing may differ"
    assert not proof._are_same([5.0, 4.2, 3.0], wanted, MEAN)
    assert not proof._are_same([math.nan] * 3, wanted, MEAN)
    assert not proof._are_same([], wanted, MEAN)


def test_a_race_is_told_whole(tmp_path: Path) -> None:
    entries = (contestants.Entry("dp-cp", "ddp", (6, 2)), contestants.Entry("x", "plan", plan="x.json"))
    told = race.Race(SUM, entries, race.Pace(1, 2, 3, 4, 5))
    (tmp_path / "race.json").write_text(told.text())
    assert race.read_race(tmp_path / "race.json") == told


def test_the_quickest_of_rivals_races(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans = dict(proof.plans_for(MEAN, (HAP,), (), two_hosts(), torch.device("cpu"), tries=3))
    rivals = [name for name in plans if name.startswith(proof.RIVAL)]
    assert len(rivals) > 1
    second = plans[rivals[1]]

    def in_the_lab(lab: object, script: list[str], pace: race.Pace) -> str:
        assert script[1:] == ["try", str(tmp_path)]
        files = race.rival_files(tmp_path, MEAN)
        told = {"plan": files[1].read_text(), "tried": [{"taken": number == 1} for number in range(len(files))]}
        (tmp_path / f"{MEAN.name}-tried.json").write_text(json.dumps(told))
        return ""

    monkeypatch.setattr(proof, "_in_the_lab", in_the_lab)
    made = {MEAN.name: plans}
    tried, trouble = proof._tried(cast(Any, None), tmp_path, made, race.Pace(1, 2, 3, 4, 5))
    assert not trouble
    assert list(made[MEAN.name]) == [proof.OURS, HAP]
    assert str(made[MEAN.name][proof.OURS].program) == str(second.program)
    assert [one["taken"] for one in tried[MEAN.name]] == [False, True, *[False] * (len(rivals) - 2)]


def test_without_rivals_nothing_is_tried(tmp_path: Path) -> None:
    plans = dict(proof.plans_for(MEAN, (), (), two_hosts(), torch.device("cpu")))
    assert list(plans) == [proof.OURS]
    assert proof._tried(cast(Any, None), tmp_path, {MEAN.name: plans}, race.Pace(1, 2, 3, 4, 5)) == ({}, "")


def test_what_ranks_saw_becomes_a_row() -> None:
    plans = dict(proof.plans_for(MEAN, (HAP,), ("sfb",), two_hosts(), torch.device("cpu")))
    entries = [contestants.Entry("dp-ev", "ddp", (4, 4)), contestants.Entry("wrong", "ddp", (4, 4))]
    entries += [contestants.Entry("deepspeed-1", "deepspeed", (4, 4)), contestants.Entry(proof.OURS, "plan")]
    losses = {"dp-ev": [5.0, 4.0], "wrong": [5.0, 3.0], proof.OURS: [5.0, 4.0]}

    def rank(slow: float) -> dict[str, Any]:
        return {
            "seconds": {name: [slow, 2 * slow, 3 * slow] for name in losses},
            "waited": {name: [0.1, 0.2, 0.3] for name in losses},
            "losses": losses,
            "unavailable": {"deepspeed-1": "No module"},
            "most_bytes": 1,
        }

    row = proof.told_of(MEAN, two_hosts(), plans, entries, [rank(1.0), rank(0.5)])
    found = row["contestants"]
    assert found["dp-ev"]["measured_s"] == 2.0, "the slowest rank, the median round"
    assert found["dp-ev"]["same"]
    assert not found["wrong"]["same"]
    assert found["deepspeed-1"] == {"unavailable": "No module"}
    assert found[proof.OURS]["error"] == pytest.approx(plans[proof.OURS].step_s / 2 - 1)
    assert found[proof.OURS]["waited_s"] == [0.2, 0.2]
    # This model's plan has no factors to gather, so without them it is the same.
    if plans["no-sfb"].program == plans[proof.OURS].program:
        assert found["no-sfb"]["same_as"] == proof.OURS
    assert json.loads(json.dumps(row)) == row
    said = proof.said("lab", "gpt2", row | {"took_s": {"all": 1.0}, "drift": 0.01})
    assert "deepspeed-1" in said
    assert "proves little" not in said
    assert "1.20 times as long" in proof.said("lab", "gpt2", row | {"took_s": {"all": 1.0}, "drift": 0.2})


def test_drift_is_that_of_the_rank_that_changed_most() -> None:
    profile = [[1.0, 1.2], [2.0, 2.0]]
    assert beat.drift(profile, profile) == 0
    assert beat.drift(profile, [[1.2, 1.2, 1.2], [1.0, 1.0, 1.0]]) == -0.5
    assert beat.drift(profile, [[2.2, 2.2], [2.0, 2.0]]) == pytest.approx(1.0)


def test_of_attempts_the_steadiest_counts_whoever_won_in_it() -> None:
    drifts = {"mean": [0.2, -0.01], "sum": [-0.3, 0.15, 0.2], "calm": [0.02]}
    times: Counter[str] = Counter()

    def once(group: proof.Group) -> Iterator[tuple[contestants.Subject, dict[str, Any]]]:
        for subject, _ in group:
            number, name = times[subject.name], subject.name
            times[name] += 1
            ours = {"measured_s": 1.0 + number, "predicted_s": 0.5}
            found = {proof.OURS: ours, "dp-ev": {"measured_s": 3.0}, "deepspeed-1": {"unavailable": "no"}}
            yield subject, {"drift": drifts[name][number], "contestants": found}

    group = [(contestants.Subject(name, ""), cast(Any, None)) for name in drifts]
    rows = {subject.name: row for subject, row in proof.steadiest(once, group, 3)}
    assert times == {"mean": 2, "sum": 3, "calm": 1}, "measured again until it was steady, three times at most"
    assert [rows[name]["drift"] for name in drifts] == [-0.01, 0.15, 0.02]
    assert rows["sum"]["contestants"][proof.OURS]["measured_s"] == 2.0
    assert [one["drift"] for one in rows["sum"]["attempts"]] == drifts["sum"]
    assert rows["sum"]["attempts"][0]["measured_s"] == {proof.OURS: 1.0, "dp-ev": 3.0}
    assert rows["sum"]["attempts"][0]["predicted_s"] == 0.5
    assert len(rows["calm"]["attempts"]) == 1


def test_the_drawn_timeline_is_the_predicted_step() -> None:
    plan = dict(proof.plans_for(MEAN, (), (), two_hosts(), torch.device("cpu")))[proof.OURS]
    lanes = proof.compact(proof.timeline_of(plan))
    assert {*lanes} == {"network", *(f"{kind.node} {kind.name}" for kind in plan.on.kinds)}
    assert max(span[1] for spans in lanes.values() for span in spans) == pytest.approx(plan.step_s * 1e3, abs=0.01)
    for spans in lanes.values():
        assert all(a[1] <= b[0] + 2e-3 for a, b in itertools.pairwise(spans))


# Accuracy


@pytest.mark.slow
def test_programs_are_many_and_different() -> None:
    three = cluster(*two_hosts().kinds, host(2, 1), link=Link(1e-6, 1e9))
    found = dict(accuracy.programs(MEAN, three, torch.device("cpu")))
    assert len(found) >= accuracy.FEWEST
    assert len({accuracy._key(plan) for plan in found.values()}) == len(found)
    steps = [plan.step_s for plan in found.values()]
    assert max(steps) > 1.5 * min(steps), "too much alike to be told apart"


def test_errors_and_ranks_count_only_who_trained_the_same() -> None:
    def row(predicted: float, measured: float, same: bool = True) -> dict[str, Any]:
        return {"predicted_s": predicted, "measured_s": measured, "error": predicted / measured - 1, "same": same}

    rows = [row(1.1, 1.0), row(1.8, 2.0), row(3.0, 3.0), row(100.0, 4.0, same=False)]
    found = accuracy.errors(rows)
    assert found["count"] == 3
    assert found["worst"] == pytest.approx(0.1)
    assert found["mean"] == pytest.approx(0.2 / 3)
    assert accuracy.rank_correlation(rows) == 1.0
    assert accuracy.rank_correlation([row(3, 1), row(2, 2), row(1, 3)]) == -1.0
    assert math.isnan(accuracy.rank_correlation(rows[:1]))
    assert accuracy.errors([])["count"] == 0


def test_the_clock_may_disagree_with_itself() -> None:
    def row(*rounds: float) -> dict[str, Any]:
        return {"rounds_s": rounds, "error": 0.0, "same": True}

    assert accuracy.clock_with_itself([row(1.0, 1.1, 1.0), row(2.0, 2.2, 9.0), row(7.0, 3.0, 8.0)]) == 1.0
    assert accuracy.clock_with_itself([row(1.0, 3.0), row(2.0, 2.0), row(3.0, 1.0)]) == -1.0
    assert math.isnan(accuracy.clock_with_itself([row(1.0), row(2.0), row(3.0)]))


# Pictures


def contestant(seconds: float, **more: Any) -> dict[str, Any]:
    predicted = seconds * more.pop("off", 1.05)
    return {
        "rounds_s": [seconds * 0.98, seconds, seconds * 1.03],
        "measured_s": seconds,
        "losses": [5.0],
        "off": [0.0],
        "same": more.pop("same", True),
        "predicted_s": predicted,
        "error": predicted / seconds - 1,
        **more,
    }


def model_row(ours: float, best: float, hap: float) -> dict[str, Any]:
    plan = {
        "devices": ["a", "b"],
        "shares": {"work": [0.7, 0.3]},
        "breakdown": {"compute": 0.8 * ours, "optimizer": 0.1 * ours, "blocking": 0.1 * ours, "hidden": 0.0},
        "timeline": {"network": [[10.0, 40.0]], "fast": [[0.0, 30.0], [40.0, 70.0]], "slow <1>": [[0.0, 70.0]]},
    }
    return {
        "spec": "gpt2:layers=2",
        "autocast": "",
        "parameters": 1_000_000,
        "devices": ["a", "b", "c"],
        "contestants": {
            "dp-ev": contestant(2.0),
            "dp-cp": contestant(best, off=1.3),
            "fsdp2": contestant(1.0, same=False),
            "deepspeed-1": {"unavailable": "No module named 'deepspeed'"},
            HAP: contestant(hap, **plan),
            proof.OURS: contestant(ours, **plan),
        },
    }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    about = {"command": "c", "commit": "abc", "torch": "2", "machine": "m"}
    pace = {"rounds": 3, "steps": 1}
    for lab in ("lab-cpu", "lab-even"):
        models = {"gpt2": model_row(0.8, 1.2, 1.1), "bert": model_row(1.5, 1.4, 1.6)}
        told = {"about": about, "pace": pace, "lab": lab, "what": f"{lab} & more", "models": models}
        (folder / f"proof-{lab}.json").write_text(json.dumps(told))
    ablated = model_row(0.8, 1.2, 1.1)
    ablated["contestants"] |= {f"no-{name}": contestant(0.8 + 0.05 * k) for k, name in enumerate(ADDITIONS[1:])}
    ablated["contestants"]["no-sfb"] = {"same_as": proof.OURS, "predicted_s": 0.8}
    told = {"about": about, "pace": pace, "lab": "lab-cpu", "what": "", "models": {"gpt2": ablated}}
    (folder / "ablation-lab-cpu.json").write_text(json.dumps(told))
    programs = {
        "lab": "lab-cpu",
        "model": "gpt2",
        "programs": 12,
        "enough": True,
        "rank_correlation": 0.97,
        "errors": {"count": 12, "mean": 0.05, "worst": 0.12},
        "row": model_row(0.8, 1.2, 1.1),
    }
    (folder / "programs-lab-cpu.json").write_text(json.dumps(programs))
    return folder


def test_pictures_and_page_are_made_of_results(results: Path, tmp_path: Path) -> None:
    written = figures.write(results, tmp_path / "docs")
    names = {path.name for path in written}
    assert {"proof.md", "speedup.svg", "predicted.svg", "ablation.svg", "timeline-lab-cpu-bert.svg"} <= names
    for path in written:
        if path.suffix == ".svg":
            root = ElementTree.fromstring(path.read_text())
            width, height = (float(root.attrib[key]) for key in ("width", "height"))
            for element in root.iter():
                for key, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
                    if key in element.attrib:
                        assert -1 <= float(element.attrib[key]) <= limit + 1, (path.name, element.attrib)
            assert "prefers-color-scheme" in path.read_text()
    text = (tmp_path / "docs" / "proof.md").read_text()
    assert "| 1 of 24, 22 not measured | **not reached** |" in text
    assert "2.50× (gpt2, lab-cpu) | reached |" in text
    assert "trains otherwise" in text
    assert "No module named 'deepspeed'" in text
    assert "0.970 | reached |" in text
    for line in text.splitlines():
        if "](figures/" in line:
            assert (tmp_path / "docs" / line.partition("](")[2].partition(")")[0]).is_file()


def test_a_goal_that_some_runs_reach_is_not_reached() -> None:
    told = {"lab": "lab-cpu", "model": "gpt2", "programs": 12, "enough": True, "rank_correlation": 0.96}

    def said(**more: Any) -> str:
        return [*page.goals([], [], [{**told, **more}])][-1]

    assert said().endswith("| 0.960 | reached |")
    assert said(other_runs=[0.97]).endswith("| 0.960; all runs 0.960 to 0.970 | reached |")
    assert said(other_runs=[0.8, 0.9]).endswith("| 0.960; all runs 0.800 to 0.960 | **reached in 1 of 3 runs** |")
    assert said(enough=False).endswith("| **not reached** |")


def test_attempts_that_do_not_count_are_told() -> None:
    def attempt(drift: float, ours: float) -> dict[str, Any]:
        return {"drift": drift, "predicted_s": 0.9, "measured_s": {proof.OURS: ours, "dp-ev": 2.0, "dp-cp": 1.5}}

    row = model_row(0.8, 1.2, 1.1) | {"drift": 0.01, "attempts": [attempt(-0.2, 1.0), attempt(0.01, 0.8)]}
    steady = model_row(0.8, 1.2, 1.1) | {"drift": 0.02, "attempts": [attempt(0.02, 0.8)]}
    before = model_row(0.8, 1.2, 1.1)
    told = [*page.set_aside([cells.Cell("lab-cpu", name, one) for name, one in (("bert", row), ("vit", steady))])]
    assert told[1:] == [
        "- bert on `lab-cpu`, machine -20% (+1% above): predicted 900 ms, measured 1000 (-10.0%), 1.50× of the best "
        "baseline"
    ]
    assert not [*page.set_aside([cells.Cell("lab-cpu", "gpt2", before)])]


def test_a_goal_that_is_reached_has_no_timeline(results: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "figures").mkdir(parents=True)
    (docs / "figures" / "timeline-lab-gone-gpt2.svg").write_text("old")
    written = {path.name for path in figures.write(results, docs)}
    assert "timeline-lab-cpu-gpt2.svg" not in written
    assert not (docs / "figures" / "timeline-lab-gone-gpt2.svg").exists()


def test_without_results_the_page_says_so(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    figures.write(tmp_path / "results", tmp_path / "docs")
    assert "Nothing was measured yet" in (tmp_path / "docs" / "proof.md").read_text()


def test_cells_compare_round_by_round() -> None:
    cell = cells.Cell("lab-cpu", "gpt2", model_row(0.8, 1.2, 1.1))
    assert cell.best_baseline == "dp-cp", "what trains otherwise does not count"
    assert cell.faster(proof.OURS) == pytest.approx(2.5)
    assert cell.margin == pytest.approx(1.5)
    assert cell.reached
    assert math.isnan(cell.faster("fsdp2"))
    assert figures._ticks(2.3) == [0, 1, 2, 3]
    assert figures._ticks(0.9)[-1] >= 0.9
