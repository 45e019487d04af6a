"""The commands about plans as a person meets them: what they print, how wide, and what they refuse."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopsided.calibration.run_record import DeviceRun, Run, save_run
from lopsided.cli import app as cli
from lopsided.cluster.cluster_file import load_cluster, parse_cluster, preset_names
from lopsided.errors import PlanError
from lopsided.ir.placement import Shares
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import load_plan
from lopsided.planner.search import Progress
from lopsided.report.plan_diff import diff_plans, difference_tables
from lopsided.report.plan_tables import (
    baseline_table,
    breakdown_table,
    device_table,
    header_lines,
    plan_json,
    plan_sections,
    program_table,
    progress_text,
    search_lines,
    worth_table,
    worth_text,
)
from lopsided.report.table import WIDTH, Table, text_lines
from tests.support.commands import lopsided
from tests.support.plans import DATA_PARALLEL, SHARES, ZERO, plan_of

SMALL = "bert:layers=4,width=32,heads=2,vocab=97,seq=8,batch=16"
ON = "2xA6000+2x2080Ti"


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
    assert " parameters in f32, a global batch of 16: input_ids i64[16, 8], labels i64[16, 8]\n" in printed
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
    done = lopsided(*arguments, "-o", str(tmp_path / "plan.json"), "--json")
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
    done = lopsided(
        "plan",
        "llama:layers=32,width=4096,seq=128,batch=16",
        "--cluster",
        "equal-8",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step_s"] > 0


def test_a_model_that_fits_nowhere_is_refused() -> None:
    done = lopsided(
        "plan",
        "llama:layers=2,width=16384,heads=64,kv_heads=8,ffn=65536,seq=128,batch=16",
        "--cluster",
        "3090+3060",
        "--json",
    )
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
    "dtype in torch's words": (["plan", SMALL, "--cluster", ON, "--dtype", "bfloat16"], "did you mean bf16?"),
    "where the preset was named": (["plan", SMALL, "--cluster", "hap-46"], "--cluster 'hap-46'"),
    "no folder": (["plan", SMALL, "--cluster", ON, "-o", "/no/folder/plan.json"], "there is no folder"),
    "a folder to write to": (["plan", SMALL, "--cluster", ON, "-o", "/"], "this is a directory"),
    "a folder to show": (["show", "/"], "this is a directory"),
    "a device to show": (["show", "/dev/zero"], "not a plain file"),
    "a cluster that is not TOML": (["plan", SMALL, "--cluster", __file__], "docs/clusters.md"),
    "a size that is none": (["plan", "hf:GPT2LMHeadModel:n_layer=x", "--cluster", ON], "is not a whole number"),
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


# How it can end


def test_an_interrupt_is_told_in_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lopsided.cli.plan_commands.load_plan", interrupted)
    done = lopsided("show", "plan.json")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    monkeypatch.setattr(cli, "app", interrupted)
    assert lopsided("show", "plan.json") == done


def raw(file: Path, end: str, **environment: str) -> tuple[int, str, str]:
    """`show` in a shell: how it ended, and what came out of the pipe."""
    script = f'"{sys.executable}" -m lopsided show "{file}" {end}; exit "${{PIPESTATUS[0]}}"'
    env = {**os.environ, **environment}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=env)
    return done.returncode, done.stdout, done.stderr


def test_readers_may_stop_reading(made: tuple[Path, str, dict[str, Any]]) -> None:
    assert raw(made[0], "| head -n 0") == (141, "", "")


def test_streams_may_know_ascii_only(made: tuple[Path, str, dict[str, Any]]) -> None:
    code, printed, complaints = raw(made[0], "", PYTHONIOENCODING="ascii")
    assert (code, complaints) == (0, "")
    assert " us" in printed
    assert printed.isascii()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_disks_may_be_full(made: tuple[Path, str, dict[str, Any]]) -> None:
    code, _, complaints = raw(made[0], "> /dev/full")
    assert code == 1
    assert complaints.startswith("the output cannot be written: No space left on device\n")
    assert len(complaints.splitlines()) == 2


def test_a_plan_that_cannot_be_kept_is_still_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise PlanError("the plan cannot be written: no room")

    monkeypatch.setattr("lopsided.cli.plan_commands.save_plan", full)
    done = lopsided("plan", SMALL, "--cluster", ON, "-o", str(tmp_path / "plan.json"))
    assert done.returncode == 2
    assert "compared with" in done.stdout
    assert "written to" not in done.stdout
    assert "no room" in done.stderr


def test_help_says_what_can_be_pinned() -> None:
    told = " ".join(lopsided("plan", "--help").stdout.split())
    for words in ('"%linear_3=S0"', "S0@state", "Can be repeated, and each gets shares of its own"):
        assert words in told


# Lines, without a process


def lines_of(table: Table) -> list[str]:
    return [*text_lines(table)]


def program_lines(plan: Plan) -> list[str]:
    return lines_of(program_table(plan, brief=True))


def section_of(plan: Plan, title: str, *, full: bool = False) -> list[str]:
    return dict(plan_sections(plan, full=full)).get(title, [])


@pytest.mark.parametrize("text", [DATA_PARALLEL, ZERO])
def test_tables_are_aligned_and_narrow(text: str) -> None:
    plan = plan_of(text)
    tables = (device_table(plan), breakdown_table(plan), baseline_table(plan))
    lines = [*program_lines(plan), *(line for table in tables for line in lines_of(table))]
    assert max(map(len, lines)) <= WIDTH
    head, *rows = program_lines(plan)
    ends = head.index("compute") + len("compute")
    assert rows[0][:ends].endswith(("µs", "ms", " s"))


def test_long_calls_are_wrapped_between_operands() -> None:
    lines = program_lines(plan_of(ZERO))
    assert any("linear_1 = linear(relu: S0, down.weight: S0@state→R," in line for line in lines)
    assert "      down.bias: I→R) : S0" in lines


def test_device_lines_show_shares_memory_and_worth() -> None:
    head, big, *small = lines_of(device_table(plan_of()))
    assert "work" in head
    assert "state" in head
    assert "50.00 %" in big
    assert "20.00 %" in big
    assert "of 8.0 GiB" in big
    assert "+100.0 %" in big
    assert "no difference" in small[0]
    assert "nothing fits without" in small[1]


def test_nodes_have_a_heading_of_their_own() -> None:
    assert section_of(plan_of(), "nodes") == []
    plan = replace(plan_of(), without_node=tuple((f"box-{k}", 1e9 if k < 3 else math.inf) for k in range(1, 5)))
    head, *rows = lines_of(worth_table(plan, devices=False))
    assert head.split() == ["node", "without", "one"]
    assert [row.split("(2)")[0].strip() for row in rows] == ["box-1 … box-2", "box-3 … box-4"]


def test_long_names_do_not_make_long_lines() -> None:
    text = plan_of().cluster.text().replace('"box"', f'"{"long-name-" * 9}"')
    cluster = parse_cluster(text)
    plan = replace(plan_of(), cluster=cluster, on=cluster, without_device=((cluster.device_names[2], math.inf),))
    lines = lines_of(device_table(plan))
    assert max(map(len, lines)) <= WIDTH
    assert sum("long-name" in line for line in lines) == 3


def with_segments() -> Plan:
    """The same plan with shares of their own for six parts of the model, one of them in use."""
    text = DATA_PARALLEL.replace("linear: S0) : S0", "linear: S0→S0@segment1) : S0@segment1")
    text = text.replace("relu: S0, ", "relu: S0@segment1→S0, ")
    named = tuple((f"segment{k}", (0.6, 0.2, 0.2)) for k in range(1, 7))
    return plan_of(text, replace(SHARES, named=(*SHARES.named, *named)))


def test_shares_of_parts_are_a_line_or_a_table() -> None:
    plan = with_segments()
    head, *rows = section_of(plan, "devices")
    assert head.split()[:4] == ["device", "work", "state", "memory"]
    assert rows[-1] == "  6 parts of the model have shares of their own (--full shows them)"
    assert max(map(len, rows)) <= WIDTH
    assert section_of(plan, "parts of the model with shares of their own") == []
    assert not any("--full" in line for line in section_of(plan, "devices", full=True))
    first, big, *_ = section_of(plan, "parts of the model with shares of their own", full=True)
    assert first.startswith("  segment1: 1 step of ")
    assert big.split() == ["box/big-1", "60.00", "%"]


def test_full_tables_are_aligned() -> None:
    head, *lines = section_of(plan_of(ZERO), "program", full=True)
    ends = head.index("compute") + len("compute")
    steps = [line for line in lines if " = " in line]
    assert max(len(line.split("  ")[1]) for line in steps) > 68
    assert all(line[:ends].endswith(("µs", "ms", " s")) for line in steps)
    assert len({line.index("#") for line in steps if "#" in line}) == 1


def test_the_header_says_what_is_trained() -> None:
    assert [*header_lines(plan_of())] == ["136 parameters in f32, a global batch of 70: x f32[70, 6], y f32[70, 6]"]
    small = " ".join(header_lines(plan_of(), "hf:BertModel"))
    assert "built small unless sizes are given" in small
    assert "hf:CLASS:hidden_size=768" in small


def test_what_was_taken_is_a_sentence() -> None:
    plan = plan_of()

    def said(why: str) -> str:
        return "\n".join(search_lines(replace(plan, search=replace(plan.search, why=why))))

    assert "proven, no program is cheaper\n" in said("proven")
    assert "own prices, which know no overlap; they are not the step time" in said("proven")
    assert "the plan is" not in said("proven")
    assert 'the plan is the classic "single": nothing' in said("proven; taken is single")
    assert "a variation, with part of the parameters stored cut" in said("time limit; taken is partly stored cut")
    assert "ended by the time limit" in said("time limit; taken is partly stored cut")


def test_zeros_are_left_out() -> None:
    plan = plan_of()
    rows = lines_of(breakdown_table(replace(plan, breakdown=replace(plan.breakdown, hidden_s=1e-9))))
    assert not any("hidden" in row for row in rows)
    alone = plan_of(shares=Shares((1.0, 0.0, 0.0)))
    assert not any(" 0.0 µs" in line for line in program_lines(alone))


def test_baselines_that_do_not_fit_say_so() -> None:
    _, ours, fits, single = lines_of(baseline_table(plan_of()))
    assert "this plan" in ours
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
    tables = difference_tables(diff_plans(plan_of(), plan_of(ZERO)))
    assert "how parameters are stored" in [table.title for table in tables]
    lines = [line for table in tables for line in lines_of(table)]
    assert any(line.split() == ["up.weight", "I", "→", "S0@state"] for line in lines)
    assert max(map(len, lines)) <= WIDTH


def test_what_a_run_that_was_out_of_memory_knows_is_planned_with(tmp_path: Path) -> None:
    first, again, ended = (tmp_path / name for name in ("plan.json", "again.json", "out_of_memory.json"))
    small = tmp_path / "small.toml"
    small.write_text(load_cluster("3090+3060").text().replace('"24 GiB"', '"600 kB"').replace('"12 GiB"', '"600 kB"'))
    command = ("plan", "mlp:width=64,batch=64", "--cluster", str(small))
    assert lopsided(*command, "-o", str(first)).returncode == 0
    made = load_plan(first)
    device = made.devices[0]
    held = made.memory_of(device)
    seen = [DeviceRun(name, "", held if name == device else 0, ()) for name in made.devices]
    save_run(Run("mlp", "2.13.0", made, tuple(seen), device), ended)
    done = lopsided(*command, "--known", str(ended), "-o", str(again))
    assert done.returncode == 0, done.stderr
    after = load_plan(again)
    kinds = zip(made.cluster.kinds, after.cluster.kinds, strict=True)
    assert [one.memory_reserve < other.memory_reserve for one, other in kinds] == [True, False]
    assert after.memory_of(device) < held
    # There is nothing in it to compare.
    done = lopsided("compare", str(ended))
    assert done.returncode == 2
    assert "it has no steps" in done.stderr


def test_what_changes_numbers_is_used_where_it_is_allowed(tmp_path: Path) -> None:
    small, file = tmp_path / "small.toml", tmp_path / "plan.json"
    text = load_cluster("3090+3060").text().replace('"24 GiB"', '"1300 kB"').replace('"12 GiB"', '"1300 kB"')
    small.write_text("\n".join(line for line in text.splitlines() if not line.startswith("host_bytes_per_s")) + "\n")
    command = ("plan", "mlp:width=128,batch=8", "--cluster", str(small), "--pin", "*=I")
    refused = lopsided(*command)
    assert refused.returncode == 2, refused.stderr
    assert "--allow 8bit-state" in refused.stderr
    done = lopsided(*command, "--allow", "8bit-state", "-o", str(file))
    assert done.returncode == 0, done.stderr
    assert load_plan(file).state_bits == 8
    assert "is kept in 8 bits" in " ".join(done.stdout.split())
    wrong = lopsided(*command, "--allow", "8bit")
    assert wrong.returncode == 2
    assert "'8bit' is no technique that could be allowed" in wrong.stderr
    assert "--allow" in wrong.stderr
