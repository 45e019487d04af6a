"""A run goes on with the devices there are: fewer, or again as many, and its losses are those of one device."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm.rank_mapping import RankInfo, cluster_of_those_there
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import WorldError
from lopsided.ir.placement import Shares
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_file import save_plan
from lopsided.runtime.agreement import ELASTIC_VARIABLE
from lopsided.runtime.checkpoint import memory_folder
from tests.support.clusters import cluster, kind
from tests.support.jobs import plan_of, prices_of
from tests.support.launched import Started

Pools = Callable[[int], WorkerPool]

SPEC = "mlp:layers=2,width=12,classes=5,batch=8"
STEPS = 9
PART = 3  # steps before the world changes


def gpu(rank: int, host: str, name: str, gib: int) -> RankInfo:
    return RankInfo(rank, host, rank, f"cuda:{rank}", name, gib * 2**30, f"chip {host} {rank}")


def test_the_part_of_a_cluster_that_is_there() -> None:
    big = kind("a100", node="big", count=2, memory=40 * 2**30)
    old = kind("v100", node="old", count=2, memory=16 * 2**30)
    whole = cluster(big, old)
    a100, v100 = "NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB"
    one_gone = [gpu(0, "x", v100, 16), gpu(1, "y", a100, 40), gpu(2, "y", a100, 40)]
    left = cluster_of_those_there(one_gone, whole)
    assert left is not None
    assert [(each.node, each.name, each.count) for each in left.kinds] == [("big", "a100", 2), ("old", "v100", 1)]
    node_gone = cluster_of_those_there([gpu(0, "x", v100, 16), gpu(1, "x", v100, 16)], whole)
    assert node_gone is not None
    assert [(each.node, each.name, each.count) for each in node_gone.kinds] == [("old", "v100", 2)]
    tried_here = cluster_of_those_there([RankInfo(k, "here", k, "cpu", "cpu", 0) for k in range(3)], whole)
    assert tried_here is not None
    assert tried_here.devices == 3
    strangers = [gpu(0, "x", "NVIDIA GeForce RTX 3060", 12), gpu(1, "y", a100, 40)]
    assert cluster_of_those_there(strangers, whole) is None
    assert cluster_of_those_there([gpu(k, "x", a100, 40) for k in range(5)], whole) is None
    assert cluster_of_those_there([], whole) is None


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(4)
    return [
        (torch.randn(12, generator=made), torch.randint(0, 5, (), generator=made)) for _ in range(8 * (STEPS // 2 + 1))
    ]


def named(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(load(SPEC)[1], batch, strict=True))


def alone() -> list[float]:
    """The losses of one device, over two epochs."""
    torch.manual_seed(0)
    model, losses = load(SPEC)[0], list[float]()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    while len(losses) < STEPS:
        for batch in DataLoader(data(), batch_size=8, shuffle=False):
            if len(losses) < STEPS:
                loss = model(**named(batch))
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.item())
    return losses


def go_on(
    plan: str, folder: str, until: int, every: int = 1, keep_copies: int | None = None
) -> tuple[list[float], int, int]:
    """Go on from the folder up to this step, whatever the world: losses, from where, on how many devices."""
    torch.manual_seed(0)
    model, batch = load(SPEC)
    os.environ[ELASTIC_VARIABLE] = "1"
    try:
        pm = lopsided.parallelize(model, batch, plan=plan, timeout_s=60, measure_s=1.0)
    finally:
        del os.environ[ELASTIC_VARIABLE]
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    batches = lopsided.shard(DataLoader(data(), batch_size=8, shuffle=False), pm)
    kept = lopsided.Checkpoints(pm, opt, folder, every=every, loader=batches, keep_copies=keep_copies)
    began, losses = kept.resume(), list[float]()
    while began + len(losses) < until:
        for part in batches:
            loss = pm(**named(part))
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
            kept.step()
            if began + len(losses) == until:
                break
    kept.close()
    pm.close()
    return losses, began, pm.plan.on.devices


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For three devices, of unlike speeds, and all needed."""
    torch.manual_seed(0)
    model, batch = load(SPEC)
    shares = Shares((0.5, 0.25, 0.25), named=(("state", (0.25, 0.5, 0.25)),))
    program = stored_cut(data_parallel(derive_rules(capture(model, batch)), prices_of(capture(model, batch), shares)))
    path = tmp_path_factory.mktemp("elastic") / "plan.json"
    save_plan(plan_of(program, shares, regather=True), path)
    return path


def test_fewer_devices_then_more_go_on_with_the_losses_of_one(worker_pools: Pools, plan: Path, tmp_path: Path) -> None:
    found = list[float]()
    for size in (3, 2, 3):
        told = worker_pools(size).run(go_on, str(plan), str(tmp_path / "run"), len(found) + PART)
        losses, began, _ = told[0]
        assert all(one[0] == losses for one in told)
        assert began == len(found)
        found += losses
    assert found == pytest.approx(alone(), rel=1e-5)


def refuse(plan: str) -> str:
    model, batch = load(SPEC)
    try:
        lopsided.parallelize(model, batch, plan=plan, timeout_s=60)
    except WorldError as error:
        return error.what
    return "went on"


def test_a_plan_is_no_wish_unless_it_is_said_so(worker_pools: Pools, plan: Path) -> None:
    assert {*worker_pools(2).run(refuse, str(plan))} == {"there are 2 processes, and the plan wants 3 (3 on box)"}


SCRIPT = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, ROOT)
import torch
import torch.distributed as dist
import lopsided
from lopsided.runtime.checkpoint.checkpoint import finish_last
from lopsided.runtime.control_plane import accord_of
from tests.runtime import test_elastic as test

torch.set_num_threads(1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    saving = lopsided.Checkpoints.step
    def step(self):
        saving(self)
        if self._run.pm.steps_done == 4:
            self._in_memory.save()
            finish_last(accord_of(self._run.pm))
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    lopsided.Checkpoints.step = step
losses, began, _ = test.go_on(os.environ["LOPSIDED_PLAN"], "run", test.STEPS, 1000, 0)
Path(f"{dist.get_rank()}.json").write_text(json.dumps([losses, began]))
""".replace("ROOT", repr(str(Path(__file__).parents[2])))


def test_a_process_that_is_killed_is_started_again_and_goes_on_from_memory(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = Started(tmp_path, "lopsided", "run", "--elastic", "--max-restarts", 2, plan, "train.py")
    said = run.end()
    assert run.returncode == 0, said
    for rank in range(3):
        losses, began = json.loads((tmp_path / f"{rank}.json").read_text())
        assert began == 4, said
        assert losses == pytest.approx(alone()[began:], rel=1e-5)
    # What was in memory is gone with the agent.
    assert not list(memory_folder.MEMORY.glob(f"lopsided-{os.getuid()}/*-{run.pid}-*"))
