"""Measured once: remembered by hardware and graph, checked, and measured anew where the file cannot be used."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster_file import parse_cluster
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.graph import Graph
from lopsided.models import zoo
from lopsided.profiling import profile as room
from lopsided.profiling.profile import cache_folder, digest, keep, measure_once, read

CPU = torch.device("cpu")


def graph_of(batch: int = 4) -> Graph:
    return capture(*zoo.build("mlp", layers=2, width=16, classes=5, batch=batch))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOPSIDED_CACHE", "1")
    # A machine that others use, too, may be found to have changed.
    monkeypatch.setattr(room, "_SPEED_OFF", 1e9)
    monkeypatch.setattr(room, "_LINK_OFF", 1e9)
    return tmp_path / "lopsided" / "clusters"


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def test_it_is_measured_once(home: Path) -> None:
    first = measure_once(graph_of(), CPU, budget_s=0.1)
    (file,) = files(home)
    assert parse_cluster(file.read_text()) == first
    assert measure_once(graph_of(), CPU, budget_s=0.1) == first
    assert files(home) == [file]


def test_another_batch_or_optimizer_is_another_measurement(home: Path) -> None:
    measure_once(graph_of(), CPU, budget_s=0.1)
    measure_once(graph_of(8), CPU, budget_s=0.1)
    measure_once(graph_of(), CPU, budget_s=0.1, optimizers=("sgd",))
    assert len(files(home)) == 3


@pytest.mark.parametrize("text", ["", "not a cluster", "name = 3", "[[devices]]\n"])
def test_a_damaged_file_is_measured_anew(home: Path, text: str) -> None:
    first = measure_once(graph_of(), CPU, budget_s=0.1)
    (file,) = files(home)
    file.write_text(text)
    measure_once(graph_of(), CPU, budget_s=0.1)
    assert parse_cluster(file.read_text()).kinds[0].name == first.kinds[0].name


def test_an_old_file_is_measured_anew(home: Path) -> None:
    measure_once(graph_of(), CPU, budget_s=0.1)
    (file,) = files(home)
    long_ago = time.time() - 31 * 24 * 3600
    os.utime(file, (long_ago, long_ago))
    measure_once(graph_of(), CPU, budget_s=0.1)
    assert file.stat().st_mtime > long_ago + 1000


def test_hardware_that_changed_is_measured_anew(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_once(graph_of(), CPU, budget_s=0.1)
    (file,) = files(home)
    text = file.read_text()
    flops = parse_cluster(text).kinds[0].flops("f32")
    file.write_text(text.replace(f"f32 = {flops!r}", f"f32 = {flops * 1e6!r}"))
    monkeypatch.setattr(room, "_SPEED_OFF", 1000.0)  # a busy machine is off by ten
    again = measure_once(graph_of(), CPU, budget_s=0.1)
    assert again.kinds[0].flops("f32") < 1000 * flops


def test_it_can_be_turned_off(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_once(graph_of(), CPU, budget_s=0.1, cache=False)
    monkeypatch.setenv("LOPSIDED_CACHE", "0")
    measure_once(graph_of(), CPU, budget_s=0.1)
    assert files(home) == []
    assert cache_folder() is None


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file" / "folder", "name", "text")
    keep(tmp_path, "name", "text")
    assert read(tmp_path, "name") == "text"
    assert read(tmp_path, "other") == ""
    assert not list(tmp_path.glob("*.part"))


def test_a_digest_tells_all_facts_apart() -> None:
    facts = [["host", "cpu", "", 1], "2.13", "graph", ["adamw"], 20.0]
    others = [[["host", "gpu", "", 1], *facts[1:]], [*facts[:-1], 10.0], [*facts[:3], ["sgd"], 20.0]]
    assert len({digest(facts), *map(digest, others)}) == 4


def in_worker(folder: str, budget_s: float) -> str:
    os.environ |= {"XDG_CACHE_HOME": folder, "LOPSIDED_CACHE": "1"}
    room._SPEED_OFF = room._LINK_OFF = 1e9  # as above
    try:
        return measure_once(graph_of(), CPU, budget_s=budget_s).text()
    finally:
        os.environ["LOPSIDED_CACHE"] = "0"


def test_all_ranks_remember_the_same(worker_pools: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    first = worker_pools(2).run(in_worker, str(tmp_path), 0.3)
    again = worker_pools(2).run(in_worker, str(tmp_path), 0.3)
    assert len({*first, *again}) == 1
    assert len(files(tmp_path / "lopsided" / "clusters")) == 1
