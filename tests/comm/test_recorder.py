"""Recording a run: every op and collective is noted, on every device, and training is not changed by it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lopsided.calibration.comparison import compare_run
from lopsided.calibration.run_record import COMPUTE, NETWORK, OPTIMIZER, Run, load_run, parse_run, run_text
from lopsided.comm.recorder import Recorder
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import meet
from lopsided.errors import InputError
from lopsided.ir.placement import Shares
from lopsided.models.by_name import load
from lopsided.planner.planner import plan
from lopsided.runtime.checkpoint.state import full_state_dict
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parallelizing import parallelize
from lopsided.runtime.train import train
from tests.support.jobs import Run as Program
from tests.support.jobs import classic, cluster_of, parsed

SPEC = "gpt2:layers=1,width=16,heads=2,seq=8,vocab=32,dropout=0,batch=6"
SHARES = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))


@pytest.fixture(autouse=True)
def _leave_no_group() -> Iterator[None]:
    """A world of one that a test made goes with it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def recorded(program: Program, order: tuple[int, ...], path: str) -> tuple[list[float], str]:
    """Losses of six steps, of which the last five are recorded; and the run, as its first process has it."""
    torch.manual_seed(0)
    model, batch = load(program.spec)
    plan = parsed(program)
    pm = Parallel(model, batch, plan.graph, plan, meet(plan))
    recording = pm.record(path or None, model="small", skipped=1, timed=2, recorded=2) if order else None
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    losses = []
    for _ in range(7):
        loss = pm(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert recording is None or recording.is_done
    # What is sent after the last recorded step is sent as ever.
    assert full_state_dict(pm)
    pm.close()
    return losses, run_text(recording.run) if recording is not None and recording.run is not None else ""


@pytest.mark.parametrize("name", ["dp", "zero", "zero-again"])
def test_everything_that_a_step_does_is_noted(worker_pools: object, name: str, tmp_path: Path) -> None:
    pool: WorkerPool = worker_pools(3)  # type: ignore[operator]
    program = classic(SPEC, name, SHARES)
    told = pool.run(recorded, program, (0,), str(tmp_path / "run.json"))
    assert [bool(text) for _, text in told] == [True, False, False]
    run: Run = parse_run(told[0][1])
    assert load_run(tmp_path / "run.json") == run
    assert len(run.timed_s) == 2
    nodes = {node.name for node in run.plan.graph.nodes}
    for device in run.devices:
        assert [bool(step.spans) for step in device.steps] == [False, False, True, True]
        for step in device.recorded:
            computed = [span for span in step.spans if span.lane == COMPUTE]
            assert nodes <= {span.what for span in computed}
            assert any(span.what.startswith("∂") for span in computed)
            assert OPTIMIZER in {span.what for span in computed}
            # One thing at a time.
            assert all(a.end_s <= b.start_s + 1e-6 for a, b in itertools.pairwise(computed))
    sent = [[span.collective for span in d.recorded[0].spans if span.lane == NETWORK] for d in run.devices]
    assert sent[0] == sent[1] == sent[2]
    assert ("all_gather" in sent[0]) == (name != "dp")
    assert ("reduce_scatter" if name != "dp" else "all_reduce") in sent[0]
    found = compare_run(run)
    assert all(line.measured > 0 for line in (*found.busy, *found.collectives))


def test_recording_does_not_change_what_is_computed(worker_pools: object) -> None:
    pool: WorkerPool = worker_pools(3)  # type: ignore[operator]
    program = classic(SPEC, "zero", SHARES)
    plain, noted = (pool.run(recorded, program, order, "")[0][0] for order in ((), (0,)))
    assert plain == noted


def test_one_device_records_too() -> None:
    done = train(SPEC, steps=4, record=True, measure_s=0.5)
    assert done.run is not None
    assert len(done.losses) == 4
    assert done.losses[-1] < done.losses[0]
    assert [len(d.recorded) for d in done.run.devices] == [1]
    assert compare_run(done.run).collectives == ()


def test_too_few_steps_and_unknown_optimizers_are_refused() -> None:
    with pytest.raises(InputError, match="2 steps are too few"):
        train(SPEC, steps=2, record=True, measure_s=0.2)
    with pytest.raises(InputError, match="no optimizer for 'lion'"):
        train(SPEC, optimizer="lion")


def test_the_optimizer_is_the_plans() -> None:
    module, batch = load(SPEC)
    planned = plan(module, batch, cluster_of(1), optimizer="sgd")
    assert train(SPEC, plan=planned, steps=3).plan.optimizer == "sgd"
    with pytest.raises(InputError, match="the plan is for sgd, not for adamw"):
        train(SPEC, plan=planned, steps=3, optimizer="adamw")


def test_a_recording_times_a_step_or_more() -> None:
    module, batch = load(SPEC)
    pm = parallelize(module, batch, cluster=cluster_of(1))
    with pytest.raises(InputError, match="0 timed"):
        pm.record(timed=0)
    pm.close()


def test_what_stands_still_is_not_computing() -> None:
    recorder = Recorder(torch.device("cpu"))
    recorder.end_step()
    recorder.mark("op")
    sent = recorder.starts("a sum", "all_reduce", "ring", 8, 1.0)
    with recorder.standing(sent):
        pass
    recorder.idle()
    recorder.end_step()
    ((_, step),) = recorder.finished()
    assert [span.what for span in step.spans if span.lane == COMPUTE] == ["op", "op"]
    (network,) = [span for span in step.spans if span.lane == NETWORK]
    assert (network.what, network.collective, network.bytes) == ("a sum", "all_reduce", 8)
    assert network.end_s >= network.start_s
