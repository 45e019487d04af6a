"""The commands that show a plan: what they write, say and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lopsided.calibration.run_record import save_run
from lopsided.planner.plan_file import save_plan
from tests.support.commands import lopsided
from tests.support.plans import DATA_PARALLEL, ZERO, plan_of
from tests.support.recorded_runs import run_of


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    plan = plan_of(ZERO)
    save_plan(plan, tmp_path / "mine.json")
    save_run(run_of(plan), tmp_path / "run.json")
    save_run(run_of(plan_of(DATA_PARALLEL)), tmp_path / "other.json")
    return {name: str(tmp_path / name) for name in ("mine.json", "run.json", "other.json", "page.html", "trace.json")}


def test_a_page_is_written_and_named_after_the_plan(files: dict[str, str]) -> None:
    code, said, _ = lopsided("report", files["mine.json"], "-o", files["page.html"])
    assert code == 0
    assert said.startswith(f"written to {files['page.html']}, ")
    page = Path(files["page.html"]).read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "<h1>mine</h1>" in page


def test_a_page_with_a_run_is_named_after_the_model(files: dict[str, str]) -> None:
    code, said, _ = lopsided(
        "report", files["mine.json"], "--run", files["run.json"], "-o", files["page.html"], "--json"
    )
    assert code == 0
    page = Path(files["page.html"]).read_text(encoding="utf-8")
    assert json.loads(said) == {"file": files["page.html"], "bytes": len(page.encode())}
    assert "<h1>block</h1>" in page
    assert 'id="run"' in page


def test_a_trace_is_written(files: dict[str, str]) -> None:
    code, _, _ = lopsided("trace", files["mine.json"], "--run", files["run.json"], "-o", files["trace.json"])
    assert code == 0
    told = json.loads(Path(files["trace.json"]).read_text(encoding="utf-8"))
    assert {event["ph"] for event in told["traceEvents"]} == {"M", "X"}


@pytest.mark.parametrize("command", ["report", "trace"])
def test_refusals(command: str, files: dict[str, str], tmp_path: Path) -> None:
    out = ("-o", str(tmp_path / "out"))
    code, _, said = lopsided(command, files["mine.json"], "--run", files["other.json"], *out)
    assert (code, "another plan" in said) == (2, True)
    code, _, said = lopsided(command, files["mine.json"], "--run", files["mine.json"], *out)
    assert (code, "not a run" in said) == (2, True)
    code, _, said = lopsided(command, str(tmp_path / "nothing.json"), *out)
    assert (code, "no such file" in said) == (2, True)
    code, _, said = lopsided(command, files["mine.json"], "-o", str(tmp_path / "nowhere" / "out"))
    assert (code, "cannot be written" in said) == (2, True)
    assert not (tmp_path / "out").exists()
