"""Which backend is taken: by the chips, by the NCCL that is loaded, and by what that was told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lopsided.comm import backend_choice
from lopsided.comm.backend_choice import SHARING_VARIABLE, BackendChoice, Nccl, choose_backend, nccl_here
from lopsided.comm.rank_mapping import RankInfo
from lopsided.comm.world import World
from lopsided.demo import contest
from lopsided.profiling import topology
from lopsided.profiling.kinds import RankHost
from lopsided.profiling.op_times import Speeds

BUNDLED, NEW = Nccl((2, 28, 9)), Nccl((2, 30, 7))
TOLD = Nccl((2, 30, 7), may_share=True)
LONG = "GPU-2b4f-one", "GPU-2b4f-two"  # serial numbers

CASES: dict[str, tuple[list[str], list[Nccl], str, str]] = {
    # chips, what each process has of NCCL: the backend, and words of why not NCCL
    "processors": (["", ""], [Nccl(), Nccl()], "gloo", ""),
    "a GPU each": ([*LONG], [BUNDLED] * 2, "nccl", ""),
    "alone": ([LONG[0]], [BUNDLED], "nccl", ""),
    "without NCCL": ([*LONG], [BUNDLED, Nccl()], "gloo", "built without NCCL"),
    "one without a GPU": ([LONG[0], ""], [TOLD] * 2, "gloo", "1 of 2 processes have no GPU"),
    "shared, too old": ([LONG[0]] * 2, [TOLD, Nccl((2, 28, 9), True)], "gloo", "2.30 on, and 2.28.9 is loaded"),
    "shared, not told": ([LONG[0]] * 2, [TOLD, NEW], "gloo", f"only with {SHARING_VARIABLE}=1"),
    "shared": ([LONG[0]] * 2, [TOLD] * 2, "nccl", ""),
    "some shared": ([LONG[0], LONG[0], LONG[1]], [TOLD] * 3, "nccl", ""),
    "some shared, too old": ([LONG[0], LONG[0], LONG[1]], [BUNDLED] * 3, "gloo", "2 processes share a GPU"),
}


@pytest.mark.parametrize("case", CASES)
def test_all_who_ask_are_told_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chips, nccl, name, why = CASES[case]
    found = choose_backend(chips, nccl)
    assert (found.name, bool(found.why)) == (name, bool(why))
    assert why in found.why

    ranks = range(len(chips))
    told = tuple(
        RankInfo(k, "h", k, "cuda:0" if chip else "cpu", "x", 1, chip, own)
        for k, chip, own in zip(ranks, chips, nccl, strict=True)
    )
    world = World(0, len(chips), tuple(ranks), tuple(ranks), torch.device("cpu"), told)
    assert (world.backend, world.backend_of_all, world.backend_choice) == (name, name, found)

    speeds = Speeds((), 0.0, 0.0)
    seats = [RankHost("h", "1", "x", chip, 1, speeds, nccl=own) for chip, own in zip(chips, nccl, strict=True)]
    assert topology._backend(seats) == name

    if len(set(nccl)) == 1:  # workers of the demo have what their parent has
        monkeypatch.setattr(contest, "nccl_here", lambda: nccl[0])
        assert contest.backend_on([f"cuda:{LONG.index(chip)}" if chip else "cpu" for chip in chips]) == name


def test_those_who_take_part_may_be_told_otherwise_than_all() -> None:
    told = tuple(RankInfo(k, "h", k, "cuda:0", "x", 1, LONG[k > 1], BUNDLED) for k in range(3))
    assert World(0, 3, (0, 2), (0, 1), torch.device("cpu"), told).backend == "nccl"
    assert World(0, 3, (0, 1), (0, 1), torch.device("cpu"), told).backend == "gloo"
    assert World(0, 3, (0, 2), (0, 1), torch.device("cpu"), told).backend_of_all == "gloo"


def test_what_is_loaded_counts_and_not_what_torch_was_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setenv(SHARING_VARIABLE, "1")
    monkeypatch.setattr(backend_choice, "loaded_version", lambda: (2, 30, 7))
    assert nccl_here() == TOLD
    monkeypatch.setattr(backend_choice, "loaded_version", lambda: ())  # linked into torch
    monkeypatch.setenv(SHARING_VARIABLE, "0")
    assert nccl_here() == BUNDLED
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert nccl_here() == Nccl()
    assert choose_backend([LONG[0]], [nccl_here()]) == BackendChoice("gloo", "torch was built without NCCL")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")
def test_a_preloaded_library_is_asked_for_its_version(tmp_path: Path) -> None:
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *version) { *version = 23007; return 0; }\n")
    words = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", str(library), str(source)]
    subprocess.run(words, check=True)
    ask = [sys.executable, "-c", "from lopsided.comm.backend_choice import loaded_version; print(loaded_version())"]
    env = {**os.environ, "LD_PRELOAD": str(library)}
    assert subprocess.run(ask, env=env, capture_output=True, text=True, check=True).stdout == "(2, 30, 7)\n"
    assert backend_choice.loaded_version() != (2, 30, 7)  # here, where it is not
