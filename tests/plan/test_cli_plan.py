"""The commands about plans as a person meets them: what they print, how wide, and what they refuse."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans_by_hand import DATA_PARALLEL, ZERO, plan_of

from lopsided.cli_plan import (
    WIDTH,
    baseline_lines,
    breakdown_lines,
    device_lines,
    diff_lines,
    plan_json,
    program_lines,
    progress_text,
    search_lines,
    worth_text,
)
from lopsided.cluster import parse_cluster, preset_names
from lopsided.plandiff import diff_plans
from lopsided.planfile import load_plan
from lopsided.search import Progress

SMALL = "bert:layers=4,width=32,heads=2,vocab=97,seq=8,batch=16"
ON = "2xA6000+2x2080Ti"


def lopsided(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lopsided", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """A plan made by the command: its file, what was printed, and the same as JSON."""
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    printed = lopsided("plan", SMALL, "--cluster", ON, "-o", str(file))
    assert printed.returncode == 0, printed.stderr
    assert printed.stderr == ""
    told = lopsided("plan", SMALL, "--cluster", ON, "--json")
    assert told.returncode == 0, told.stderr
    return file, printed.stdout, json.loads(told.stdout)


# plan


def test_plan_prints_all_of_the_answer(made: tuple[Path, str, dict[str, Any]]) -> None:
    file, printed, _ = made
    assert printed.startswith(f"{SMALL} on {ON}\na step of ")
    for word in ("program", "devices", "a step", "compared with", "search", "× ", "without one", "gap", str(file)):
        assert word in printed
    assert max(map(len, printed.splitlines())) <= WIDTH


def test_plan_as_json_has_what_scripts_need(made: tuple[Path, str, dict[str, Any]]) -> None:
    file, _, told = made
    plan = load_plan(file)
    devices = set(plan.cluster.device_names)
    assert told["model"] == SMALL
    assert told["batch"] == 16
    assert told["cluster"] == ON
    assert told["step_s"] == plan.step_s
    assert told["shares"]["work"].keys() == told["shares"]["state"].keys() == devices
    assert sum(told["shares"]["work"].values()) == pytest.approx(1)
    assert told["memory_bytes"].keys() == told["memory_limit_bytes"].keys() == devices
    assert all(told["memory_bytes"][name] <= told["memory_limit_bytes"][name] for name in devices)
    assert {"seconds", "states", "cost_s", "bound_s", "gap"} <= told["search"].keys()
    assert {"dp-ev", "dp-cp"} <= told["baselines"].keys()
    assert told["without"].keys() == devices
    assert {"capture_s", "without_node", "breakdown", "regather", "notes", "program"} <= told.keys()


def test_show_prints_the_same_from_the_file(made: tuple[Path, str, dict[str, Any]]) -> None:
    file, printed, told = made
    shown = lopsided("show", str(file))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[1:] == printed.splitlines()[1:-2]
    full = lopsided("show", str(file), "--full").stdout
    assert len(full.splitlines()) > len(printed.splitlines())
    assert ", each" in printed
    assert ", each" not in full
    again = json.loads(lopsided("show", str(file), "--json").stdout)
    same = ("step_s", "breakdown", "shares", "memory_bytes", "baselines", "without", "program", "notes")
    assert {key: again[key] for key in same} == {key: told[key] for key in same}


def test_pins_segments_and_options_reach_the_planner(tmp_path: Path) -> None:
    arguments = ["plan", SMALL, "--cluster", ON, "--optimizer", "sgd", "--dtype", "bf16", "--time-limit", "60"]
    arguments += ["--pin", "layers.*.up.weight=I", "--segment", "layers.*", "--batch", "8"]
    done = lopsided(*arguments, "-o", "plan.json", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    plan = load_plan(tmp_path / "plan.json")
    assert told["batch"] == 8
    assert told["optimizer"] == plan.optimizer == "sgd"
    assert {leaf.value.dtype for leaf in plan.graph.parameters} == {"bf16"}
    pinned = [line for line in told["program"] if "up.weight" in line and "= parameter" in line]
    assert len(pinned) == 4
    assert all(line.endswith(" : I") for line in pinned)


def test_a_large_model_is_planned_without_its_memory() -> None:
    """Seven billion parameters: more than fits here in float32."""
    done = lopsided("plan", "llama:layers=32,width=4096,seq=128,batch=16", "--cluster", "equal-8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step_s"] > 0


def test_a_model_that_fits_nowhere_is_refused() -> None:
    done = lopsided("plan", "llama:layers=32,width=4096,seq=128,batch=16", "--cluster", "3090+3060", "--json")
    assert done.returncode == 2
    told = json.loads(done.stdout)
    assert told["error"] == "DoesNotFitError"
    assert "GiB" in done.stderr


# diff


def test_diff_says_what_differs(made: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    file, _, _ = made
    told = json.loads(file.read_text())
    told["regather"] = not told["regather"]
    (tmp_path / "edited.json").write_text(json.dumps(told))
    same = lopsided("diff", str(file), str(file))
    assert (same.returncode, same.stdout) == (0, "the plans are the same\n")
    done = lopsided("diff", str(file), str(tmp_path / "edited.json"))
    assert done.returncode == 0, done.stderr
    assert "parameters gathered again" in done.stdout
    found = json.loads(lopsided("diff", str(file), str(tmp_path / "edited.json"), "--json").stdout)
    assert found["same_graph"] is True
    assert any(d["what"] == "parameters gathered again" for d in found["differences"])


def test_an_illegal_edit_is_refused(made: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    file, _, _ = made
    told = json.loads(file.read_text())
    number = next(k for k, line in enumerate(told["program"]) if "aten.linear.default" in line)
    told["program"][number] = told["program"][number].rpartition(" : ")[0] + " : S1/3"
    (tmp_path / "edited.json").write_text(json.dumps(told))
    done = lopsided("show", str(tmp_path / "edited.json"), "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"] == "PlanError"
    assert f"line {number + 1}" in done.stderr
    assert "use one of its rules" in done.stderr


# clusters


def test_clusters_are_listed_and_printed() -> None:
    done = lopsided("clusters")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in preset_names())
    assert "16 v100 (16.0 GiB), 48 p100 (16.0 GiB) in 8 nodes" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= WIDTH
    copied = parse_cluster(lopsided("clusters", "hap-64").stdout)
    assert copied.devices == 64
    told = json.loads(lopsided("clusters", "--json").stdout)
    assert {cluster["name"] for cluster in told["clusters"]} == {*preset_names()}


# Refusals

BAD = {
    "no cluster": (["plan", SMALL], "--cluster"),
    "preset": (["plan", SMALL, "--cluster", "hap-46"], "hap-64"),
    "preset to print": (["clusters", "hap-46"], "hap-64"),
    "optimizer": (["plan", SMALL, "--cluster", ON, "--optimizer", "adamv"], "adamw"),
    "dtype": (["plan", SMALL, "--cluster", ON, "--dtype", "bf61"], "bf16"),
    "pin": (["plan", SMALL, "--cluster", ON, "--pin", "nothing=I"], "nothing=I"),
    "pin without a placement": (["plan", SMALL, "--cluster", ON, "--pin", "layers"], "PATTERN=PLACEMENT"),
    "pin that cannot be": (["plan", SMALL, "--cluster", ON, "--pin", "words.weight=S7"], "S7"),
    "time limit": (["plan", SMALL, "--cluster", ON, "--time-limit", "nan"], "--time-limit"),
    "model": (["plan", "brett", "--cluster", ON], "bert"),
    "file": (["show", "nowhere.json"], "nowhere.json"),
    "not a plan": (["show", __file__], "not JSON"),
    "second file": (["diff", __file__, "nowhere.json"], "not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_a_few_lines(case: str) -> None:
    arguments, word = BAD[case]
    done = lopsided(*arguments)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 8


# Lines, without a process


@pytest.mark.parametrize("text", [DATA_PARALLEL, ZERO])
def test_tables_are_aligned_and_narrow(text: str) -> None:
    plan = plan_of(text)
    lines = [*program_lines(plan), *device_lines(plan), *breakdown_lines(plan), *baseline_lines(plan)]
    assert max(len(line) for whole in lines for line in whole.split("\n")) <= WIDTH
    head, *rows = program_lines(plan)
    ends = head.index("compute") + len("compute")
    assert rows[0][:ends].endswith(("µs", "ms", " s"))


def test_long_calls_are_wrapped_between_operands() -> None:
    lines = [line for whole in program_lines(plan_of(ZERO)) for line in whole.split("\n")]
    assert any("linear_1 = linear(relu: S0, down.weight: S0@state→R," in line for line in lines)
    assert "      down.bias: I→R) : S0" in lines


def test_device_lines_show_shares_memory_and_worth() -> None:
    head, big, *small = device_lines(plan_of())
    assert "work" in head
    assert "state" in head
    assert "50.00 %" in big
    assert "20.00 %" in big
    assert "of 8.0 GiB" in big
    assert "+100.0 %" in big
    assert "no difference" in small[0]
    assert "nothing fits without" in small[1]


def test_baselines_that_do_not_fit_say_so() -> None:
    fits, single = baseline_lines(plan_of())
    assert "3.00 ×" in fits
    assert "does not fit" in single


def test_what_was_not_found_is_not_printed_as_a_number() -> None:
    plan = plan_of()
    lost = replace(plan, search=replace(plan.search, cost_s=math.inf, bound_s=0.0, gap=math.inf))
    assert "cost –, bound 0, no bound" in "\n".join(search_lines(lost))
    assert plan_json(lost)["search"]["cost_s"] is None  # type: ignore[index]
    assert "best none yet" in progress_text(Progress(3, math.inf, 0.0, 61.0))
    assert worth_text(1.0, None) == ""
    assert "2.0" not in worth_text(1.0, math.inf)


def test_differences_are_printed_narrow() -> None:
    lines = [*diff_lines(diff_plans(plan_of(), plan_of(ZERO)))]
    assert "how parameters are stored" in lines
    assert any(line.split() == ["up.weight", "I", "→", "S0@state"] for line in lines)
    assert max(map(len, lines)) <= WIDTH
