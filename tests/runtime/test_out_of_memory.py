"""A device that is out of memory ends the run everywhere, and says how to plan with that knowledge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lopsided.calibration.calibrate import with_memory_seen
from lopsided.calibration.run_record import DeviceRun, Run, load_run, run_text, save_run
from lopsided.errors import RunError, TrainingError
from lopsided.planner.candidates import memory_limits
from lopsided.planner.plan_file import save_plan
from lopsided.runtime.out_of_memory import is_out_of_memory
from tests.support import ROOT, plans
from tests.support.launched import unused_port

SCRIPT = """
import sys
import torch
import lopsided
from lopsided.models.by_name import load
from lopsided.planner.plan_file import load_plan

model, batch = load("gpt2:layers=1,width=16,heads=2,seq=6,vocab=31,dropout=0,batch=6")
pm = lopsided.parallelize(model, batch, plan=load_plan(sys.argv[1]), quiet=True)
opt = torch.optim.AdamW(pm.parameters())
for step in range(4):
    loss = pm(**batch)
    if step == 2 and pm.world.rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    loss.backward()
    opt.step()
"""


def test_a_run_ends_everywhere_and_says_how_to_plan_anew(tmp_path: Path) -> None:
    from lopsided.capturing.capture_graph import capture
    from lopsided.ir.placement import Shares
    from lopsided.models.by_name import load
    from lopsided.ops.derive import derive_rules
    from lopsided.planner.baselines import data_parallel
    from tests.support import jobs

    graph = capture(*load("gpt2:layers=1,width=16,heads=2,seq=6,vocab=31,dropout=0,batch=6"))
    shares = Shares((0.5, 0.5))
    plan = jobs.plan_of(data_parallel(derive_rules(graph), jobs.prices_of(graph, shares)), shares)
    plan = replace(plan, memory_bytes=(3 * 2**30, 3 * 2**30))
    file, script = tmp_path / "plan.json", tmp_path / "train.py"
    save_plan(plan, file)
    script.write_text(SCRIPT)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "OMP_NUM_THREADS": "1"}
    common |= {"PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(file)],
            cwd=tmp_path,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=300)[1] for process in running]
    assert all(process.returncode == 1 for process in running)
    written = "rank1_out_of_memory.json"
    device = plan.devices[1]
    full = told[1]
    assert f"{device} is out of memory" in full + told[0]
    assert "predicted" in full
    assert "3.00 GiB" in full
    assert "Tried to allocate 2.00 GiB" in full
    assert f"--known {written}" in full
    assert "out of memory" in told[0]  # whose culprit it names
    run = load_run(tmp_path / written, failed=True)
    assert run.out_of_memory == device
    assert run.devices[1].peak_bytes > 0
    assert not run.devices[1].steps


def failed(held: int, predicted: int) -> Run:
    plan = plans.plan_of()
    plan = replace(plan, memory_bytes=tuple(predicted for _ in plan.devices))
    devices = [DeviceRun(name, "", 0, ()) for name in plan.devices]
    devices[-1] = replace(devices[-1], peak_bytes=held)
    return Run("block", torch.__version__, plan, tuple(devices), plan.devices[-1])


@pytest.mark.parametrize(("held", "predicted"), [(1.0, 0.8), (0.5, 0.8), (0.9, 0.9), (0.0, 0.8)])
def test_the_plan_that_failed_does_not_fit_any_more(held: float, predicted: float) -> None:
    whole = plans.plan_of().cluster.kinds[-1].memory_bytes
    run = failed(int(held * whole), int(predicted * whole))
    before = run.plan.cluster
    after = with_memory_seen(before, [run])
    limit = memory_limits(after)[-1]
    assert limit < min(predicted, held or predicted) * whole
    assert memory_limits(after)[:-1] == memory_limits(before)[:-1]
    assert with_memory_seen(before, [replace(run, out_of_memory="")]) == before
    # What was learnt does not get forgotten by a second run that says less.
    assert memory_limits(with_memory_seen(after, [run]))[-1] <= limit


def test_a_run_that_ended_so_is_of_use_for_planning_only(tmp_path: Path) -> None:
    run = failed(2**20, 2**20)
    path = tmp_path / "run.json"
    save_run(run, path)
    assert load_run(path, failed=True) == run
    with pytest.raises(RunError, match="it has no steps"):
        load_run(path)
    text = run_text(run)
    path.write_text(json.dumps(json.loads(text) | {"out_of_memory": "box/none"}))
    with pytest.raises(RunError, match="no device of its plan"):
        load_run(path, failed=True)
    elsewhere = replace(run.plan.cluster, kinds=(replace(run.plan.cluster.kinds[0], node="other"),))
    with pytest.raises(RunError, match="does not have"):
        with_memory_seen(elsewhere, [run])


def test_what_is_and_what_is_not_out_of_memory() -> None:
    cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: ...")
    assert all(map(is_out_of_memory, (torch.OutOfMemoryError("x"), MemoryError(), cpu)))
    assert not any(map(is_out_of_memory, (RuntimeError("x"), TrainingError("can't allocate memory"), ValueError())))
