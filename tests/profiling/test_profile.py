"""`lopsided profile` by itself, on processes, by torchrun, and what it prints. No times are asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lopsided.cli.app import app
from lopsided.cluster.cluster_file import load_cluster
from lopsided.cluster.devices import Link
from lopsided.errors import InputError
from lopsided.profiling.links import Fit, LinkSample
from lopsided.profiling.measure import Measurement, ProfileLine
from lopsided.profiling.noise import Notice
from lopsided.profiling.profile import STANDARD, in_percent, standard
from lopsided.report.run_tables import PROFILE_WIDTH, measurement_lines
from lopsided.schedule.cost import update_call

MODEL = "gpt2:layers=1,width=32,heads=4,seq=10,vocab=61,batch=6"


def profile(*words: str) -> str:
    result = CliRunner().invoke(app, ["profile", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_one_machine_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    told = profile(MODEL, "--budget", "0.5", "-o", str(file))
    cluster = load_cluster(file)
    assert (cluster.name, cluster.devices) == ("mine", 1)
    assert update_call("adamw", "f32") in {entry.call for entry in cluster.kinds[0].measured}
    assert "1 device on 1 host" in told
    assert "GFLOP/s" in told or "MFLOP/s" in told
    assert f"written to {file}" in told


def test_processes_are_started(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    found = json.loads(profile(MODEL, "--budget", "0.5", "--processes", "2", "--json", "-o", str(file)))
    cluster = load_cluster(file)
    assert cluster.devices == len(found["devices"]) == 2
    assert found["cluster"] == cluster.text()
    assert {entry["collective"] for entry in found["collectives"]} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    }
    assert all(entry["points"] for entry in found["collectives"])
    assert {"call", "kind", "times", "step_s", "error", "noise"} <= {*found["calls"][0]}


@pytest.mark.slow
def test_by_torchrun_rank_0_tells(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    words = ["--standalone", "--nproc-per-node", "2", "-m", "lopsided"]
    words += ["profile", MODEL, "--budget", "0.5", "-o", str(file)]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("2 devices on 1 host") == 1
    assert load_cluster(file).devices == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quick", "--budget", "3"], "--quick is a budget"),
        (["--budget", "0"], "no time to measure in"),
        (["--budget", "nan"], "no time to measure in"),
        (["--dtype", "int8"], "no floating dtype"),
        (["--optimizer", "nosuch"], "no optimizer"),
        (["-o", "/nowhere/at/all/cluster.toml"], "cannot be written"),
        (["--from-run", "/nowhere/run.json"], "no such file"),
    ],
)
def test_what_cannot_be_is_refused_before_time_is_spent(words: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        CliRunner().invoke(app, ["profile", MODEL, *words], catch_exceptions=False)


def test_processes_of_torchrun_are_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="torchrun has started"):
        CliRunner().invoke(app, ["profile", MODEL, "--processes", "2"], catch_exceptions=False)


def test_the_standard_set_has_products_attention_and_convolutions() -> None:
    wanted = standard(None, 2)
    ops = {node.op for graph in wanted.graphs for node in graph.nodes}
    for name in ("linear", "scaled_dot_product_attention", "layer_norm", "conv2d", "cross_entropy_loss"):
        assert any(name in op for op in ops)
    assert len(wanted.graphs) >= len(STANDARD)
    assert {leaf.value.dtype for graph in standard("bf16", 2).graphs for leaf in graph.parameters} == {"bf16"}


def test_progress_in_percent() -> None:
    steps = list[int]()
    progress = in_percent(lambda: steps.append(1))
    for done in range(1, 8):
        progress(done, 7)
    assert len(steps) == 100


def made_up() -> Measurement:
    cluster = load_cluster("hap-4")
    kinds = tuple(replace(kind, contention=1.1 + 0.1 * number) for number, kind in enumerate(cluster.kinds))
    cluster = replace(cluster, kinds=kinds, packing=3.21)
    call = "aten.linear.default(f32[512, 128, 4096], f32[16384, 4096], f32[16384])" * 2
    lines = tuple(
        ProfileLine(kind, call, 12, 0.0123 * (kind + 1), 0.17, 0.03)
        for kind in range(len(cluster.kinds))
        for _ in range(12)
    )
    fit = Fit("reduce_scatter", "all_to_all", Link(1.2e-3, 1.3e9, 0.4), 0.1, 0.2, (LinkSample(4096, 1.0, 1e-3),))
    text = "takes 2.0 times as long as another one with a very long name, the same hardware: it runs 50% of the time"
    notice = Notice("straggler", cluster.device_names[0], text)
    slowdown = tuple(0.1 * k for k in range(cluster.devices))
    return Measurement(cluster, 0.1, 0.2, 12.0, lines, (fit,), slowdown, 1.5, 0.9, (notice,), (1.02, 1.09, 1.0, 1.05))


def test_lines_fit_a_terminal_and_name_the_worst() -> None:
    lines = [*measurement_lines(made_up())]
    assert max(map(len, lines)) <= PROFILE_WIDTH
    text = "\n".join(lines)
    assert "worst fits" in text
    assert "17 %" in text
    assert "straggler" in text
    assert "1.50 times as long" in text
    assert "devices that share a chip are 1.10 to 1.20 times as fast alone" in text
    assert "gathered and scattered takes 3.2 times as long as to read and write" in text
    assert "a whole step takes 1.00 to 1.09 times as long as its calls one by one" in text
