"""Training scripts as people write them, started by torchrun: one agent, two unequal ones, and a rank that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lopsided.capturing.capture_graph import capture
from lopsided.ir.placement import Shares
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_file import save_plan
from lopsided.runtime.launch import MODULE
from tests.support import clusters
from tests.support.jobs import cluster_of, plan_of, prices_of
from tests.support.launched import Started, unused_port

SPEC = "gpt2:layers=1,width=16,heads=2,seq=6,vocab=31,dropout=0,batch=6"
LOOPBACK = "0100007F"  # as /proc/net/tcp spells it
SHARES = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))

SCRIPT = """
import argparse, json, os, sys
from pathlib import Path
import torch
import lopsided
from lopsided.models.by_name import load

def listens(process):
    # The addresses at which a process listens, as the kernel spells them.
    mine = {os.readlink(fd) for fd in Path(f"/proc/{process}/fd").iterdir() if os.path.lexists(fd)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]

options = argparse.ArgumentParser()
options.add_argument("--plan")
options.add_argument("--out", required=True)
options.add_argument("--fails", type=int, default=-1)
given = options.parse_args()

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model, batch = load("SPEC")
rows = torch.randint(31, (30, 6))
data = [{"input_ids": row, "labels": row} for row in rows]
loader = torch.utils.data.DataLoader(data, batch_size=6, shuffle=False)

alone, curve = load("SPEC")[0], []
alone.load_state_dict(model.state_dict())
opt = torch.optim.AdamW(alone.parameters(), lr=1e-2)
for whole in loader:
    loss = alone(**whole)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    opt.step(); opt.zero_grad()
    curve.append(loss.item())

pm, losses = lopsided.parallelize(model, batch, plan=given.plan, timeout_s=60), []
opt = torch.optim.AdamW(pm.parameters(), lr=1e-2)
for step, part in enumerate(lopsided.shard(loader, pm)):
    if step == 2 and pm.world.rank == given.fails:
        raise RuntimeError("the disk is full")
    loss = pm(**part)
    loss.backward()
    lopsided.clip_grad_norm_(pm, 0.5)
    opt.step(); opt.zero_grad()
    losses.append(loss.item())
found, wanted = lopsided.full_state_dict(pm), alone.state_dict()
told = {
    "losses": losses, "curve": curve, "keys": list(found) == list(wanted), "rows": part["input_ids"].shape[0],
    "error": max((found[name] - wanted[name]).abs().max().item() for name in wanted),
    "local": int(os.environ["LOCAL_WORLD_SIZE"]), "listens": listens(os.getpid()) + listens(os.getppid()),
}
Path(given.out, f"{pm.world.rank}.json").write_text(json.dumps(told))
""".replace("SPEC", SPEC)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, a plan for one node and one for two."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(SCRIPT)
    torch.manual_seed(0)
    model, batch = load(SPEC)
    graph = capture(model.double(), batch)
    program = stored_cut(data_parallel(derive_rules(graph), prices_of(graph, SHARES)))
    plan = plan_of(program, SHARES, regather=True)
    save_plan(plan, folder / "one.json")
    kind = cluster_of(1).kinds[0]
    kinds = tuple(replace(kind, node=node, count=count) for node, count in (("big", 2), ("small", 1)))
    two = clusters.cluster(*kinds)
    save_plan(replace(plan, cluster=two, on=two), folder / "two.json")
    return folder


def told(folder: Path) -> Iterator[dict[str, object]]:
    for rank in range(3):
        yield json.loads((folder / f"{rank}.json").read_text())


def assert_trained(folder: Path, said: str, per_node: list[int]) -> None:
    for rank, one in enumerate(told(folder)):
        assert one["losses"] == pytest.approx(one["curve"], rel=1e-9), said
        assert len(one["losses"]) == 5
        assert one["keys"]
        assert one["error"] < 1e-9
        assert one["local"] == per_node[rank]
    assert [one["rows"] for one in told(folder)] == [3, 1, 2]


def test_torchrun_trains_as_one_device_does(place: Path, tmp_path: Path) -> None:
    run = Started(
        place, MODULE, "--standalone", "--nproc-per-node", 3, "train.py", "--plan", "one.json", "--out", tmp_path
    )
    said = run.end()
    assert run.returncode == 0, said
    assert_trained(tmp_path, said, [3, 3, 3])


def test_lopsided_run_needs_the_plan_only(place: Path, tmp_path: Path) -> None:
    run = Started(place, "lopsided", "run", "one.json", "train.py", "--out", tmp_path)
    said = run.end()
    assert run.returncode == 0, said
    assert_trained(tmp_path, said, [3, 3, 3])
    # The agent's store, and the processes' own.
    assert [{*one["listens"]} for one in told(tmp_path)] == [{LOOPBACK}] * 3


@pytest.mark.slow
def test_nodes_with_different_numbers_of_processes(place: Path, tmp_path: Path) -> None:
    master = f"127.0.0.1:{unused_port()}"
    agents = [
        Started(place, "lopsided", "run", "two.json", "--node", node, "--master", master, "train.py", "--out", tmp_path)
        for node in ("big", "small")
    ]
    said = "".join(agent.end() for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert_trained(tmp_path, said, [2, 2, 1])


def test_a_rank_that_fails_ends_the_run_with_its_name_and_reason(place: Path, tmp_path: Path) -> None:
    run = Started(place, "lopsided", "run", "one.json", "train.py", "--out", tmp_path, "--fails", 1)
    said = run.end()
    assert run.returncode == 1
    assert "[rank1]: RuntimeError: the disk is full" in said
    assert not list(tmp_path.iterdir())
