"""Processes are matched to the plan's devices, and what does not match is refused on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lopsided.cluster.cluster import Cluster, Kind, parts, single_devices
from lopsided.cluster.cluster_file import load_cluster
from lopsided.comm.rank_mapping import RankInfo, devices_in, find_seats, model_of, strange_hardware, torchrun_line
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import World, begin, check_same, group_of, meet, share_plan, side_group
from lopsided.errors import WorldError
from tests.support import clusters
from tests.support.clusters import cluster

GIB = 2**30
NAMES = {"3090": "NVIDIA GeForce RTX 3090", "3060": "NVIDIA GeForce RTX 3060", "a100": "NVIDIA A100-SXM4-40GB"}


def kind(name: str, node: str = "box", gib: int = 8, **more: Any) -> Kind:
    return clusters.kind(name, node, memory=gib * GIB, **more)


def cpus(*hosts: str) -> list[RankInfo]:
    seen: dict[str, int] = {}
    told = []
    for rank, host in enumerate(hosts):
        seen[host] = seen.get(host, -1) + 1
        told.append(RankInfo(rank, host, seen[host], "cpu", "cpu", 0))
    return told


def gpus(*described: tuple[str, str, int]) -> list[RankInfo]:
    """(host, model, GiB) of each."""
    there = cpus(*(host for host, _, _ in described))
    return [
        RankInfo(one.rank, one.host, one.local_rank, f"cuda:{one.local_rank}", NAMES.get(model, model), gib * GIB)
        for one, (_, model, gib) in zip(there, described, strict=True)
    ]


def seats(told: list[RankInfo], whole: Cluster, on: Cluster | None = None) -> dict[int, int]:
    found = find_seats(told, whole, on or whole)
    return dict(zip(found.ranks, found.order, strict=True))


# Which device a process is


def test_in_order_where_nothing_tells() -> None:
    assert seats(cpus("h", "h", "h"), cluster(kind("fast"), kind("slow", count=2))) == {0: 0, 1: 1, 2: 2}


def test_several_nodes_tried_out_on_one_machine_go_in_order() -> None:
    assert seats(cpus("h", "h", "h"), cluster(kind("a", "x"), kind("b", "y"), kind("c", "z"))) == {0: 0, 1: 1, 2: 2}


def test_hardware_is_matched_by_name_whatever_order_cuda_lists_it_in() -> None:
    box = cluster(kind("rtx3090", gib=24), kind("rtx3060", gib=12))
    assert seats(gpus(("h", "3060", 12), ("h", "3090", 24)), box) == {0: 1, 1: 0}


def test_hardware_is_matched_by_what_was_measured() -> None:
    box = cluster(kind("big", source="measured on NVIDIA GeForce RTX 3090"), kind("small", source="RTX 3060"))
    assert seats(gpus(("h", "3060", 12), ("h", "3090", 24)), box) == {0: 1, 1: 0}


def test_hardware_is_matched_by_memory_where_names_do_not_tell() -> None:
    assert seats(gpus(("h", "x", 12), ("h", "x", 24)), cluster(kind("big", gib=24), kind("low", gib=12))) == {
        0: 1,
        1: 0,
    }


def test_hosts_are_matched_to_nodes_by_size() -> None:
    whole = cluster(kind("a", "wide", count=3), kind("a", "narrow"))
    assert seats(cpus("h", "g", "g", "g"), whole) == {0: 3, 1: 0, 2: 1, 3: 2}


def test_hosts_are_matched_to_nodes_by_hardware() -> None:
    whole = cluster(kind("a100", "big", count=2, gib=40), kind("3090", "small", count=2, gib=24))
    told = gpus(("h", "3090", 24), ("h", "3090", 24), ("g", "a100", 40), ("g", "a100", 40))
    assert seats(told, whole) == {0: 2, 1: 3, 2: 0, 3: 1}


def test_kinds_that_share_nodes() -> None:
    """Devices are numbered kind by kind, so those of a node are not next to each other."""
    whole = cluster(kind("fast", "box", nodes=2), kind("slow", "box", nodes=2))
    assert whole.device_names == ("box-1/fast-1", "box-2/fast-1", "box-1/slow-1", "box-2/slow-1")
    assert seats(cpus("h", "h", "g", "g"), whole) == {0: 0, 1: 2, 2: 1, 3: 3}


def test_devices_that_are_not_used_are_bystanders() -> None:
    whole = cluster(kind("slow"), kind("fast", count=2))
    assert seats(cpus("h", "h", "h"), whole, whole.only([1])) == {1: 0, 2: 1}
    assert seats(cpus("h", "h"), whole, whole.only([1])) == {0: 0, 1: 1}


def test_a_thousand_processes() -> None:
    whole = load_cluster("mixed-1024")
    hosts = [name.split("/")[0] for name in whole.device_names]
    assert seats(cpus(*hosts), whole) == {k: k for k in range(1024)}


@pytest.mark.parametrize("name", ["hap-64", "3090+3060", "4xH100+4xA100+8xL4", "2xA6000+2x2080Ti"])
def test_parts_of_a_cluster_are_found_in_it(name: str) -> None:
    whole = load_cluster(name)
    for part in (whole, *parts(whole, "f32"), *single_devices(whole), whole.without_device(whole.device_names[0])):
        found = devices_in(part, whole)
        assert len({*found}) == part.devices
        likeness = [kind.likeness for kind in whole.kinds for _ in range(kind.devices)]
        assert [likeness[k] for k in found] == [k.likeness for k in part.kinds for _ in range(k.devices)]


def test_a_part_whose_names_are_counted_anew() -> None:
    whole = cluster(kind("gpu", gib=8), kind("gpu", gib=16))
    part = whole.only([1])
    assert part.device_names[0] == whole.device_names[0]  # and yet another device
    assert devices_in(part, whole) == (1,)


def test_models() -> None:
    names = ("NVIDIA GeForce RTX 4070 Ti", "NVIDIA L4", "Tesla V100-SXM2-32GB", "rtx2080ti", "cpu", "worker-2", "gpu0")
    assert [model_of(name) for name in names] == ["4070ti", "l4", "v100", "2080ti", "", "", ""]


def test_a_plan_for_gpus_on_processors_is_said_to_be_one() -> None:
    preset = cluster(kind("rtx3090", "x"), kind("rtx3060", "y"), name="two")
    assert "cluster two with rtx3090, rtx3060, and 2 of 2 processes have no GPU" in strange_hardware(
        cpus("h", "h"), preset
    )
    assert not strange_hardware(cpus("h", "h"), cluster(kind("a", "x"), kind("b", "y")))
    assert not strange_hardware(cpus("h"), cluster(kind("rtx3090", "x"), kind("host", "y")))  # of which one is none


# Refusals


def test_a_wrong_number_of_processes() -> None:
    whole = cluster(kind("a", "x", count=2), kind("b", "y"))
    with pytest.raises(WorldError, match=r"there are 4 processes, and the plan wants 3 \(2 on x, 1 on y\)") as told:
        find_seats(cpus("h", "h", "g", "g"), whole, whole)
    assert "2 on h, 2 on g" in told.value.where
    assert "torchrun --nnodes 2" in told.value.do
    with pytest.raises(WorldError, match=r"wants 1 \(1 on y\), or 3 for all"):
        find_seats(cpus("h", "h"), whole, whole.only([1]))


def test_how_to_start() -> None:
    assert torchrun_line(cluster(kind("a", count=3))) == "torchrun --nproc-per-node 3 train.py"
    assert "--nproc-per-node 2 train.py" in torchrun_line(cluster(kind("a", nodes=2, count=2)))


def test_processes_that_are_spread_otherwise() -> None:
    with pytest.raises(WorldError, match=r"wants 3 on x, 1 on y, and .* otherwise: 2 on h, 2 on g"):
        seats(cpus("h", "h", "g", "g"), cluster(kind("a", "x", count=3), kind("b", "y")))


def test_too_little_memory() -> None:
    box = cluster(kind("gpu", count=2, gib=24))
    with pytest.raises(WorldError, match=r"rank 1 \(h, cuda:1: .* 3060, 12 GiB\) should be box/gpu-2 \(24 GiB\)"):
        seats(gpus(("h", "3090", 24), ("h", "3060", 12)), box)
    seats(gpus(("h", "3090", 23), ("h", "3090", 23)), box)


def test_other_hardware() -> None:
    box = cluster(kind("rtx3060", gib=12))
    with pytest.raises(WorldError, match=r"RTX 3090, 24 GiB. should be box/rtx3060-1"):
        seats(gpus(("h", "3090", 24)), box)
    assert seats(cpus("h"), box) == {0: 0}


# Real processes


def a_plan(whole: Cluster, on: Cluster | None = None) -> Any:
    return SimpleNamespace(cluster=whole, on=on or whole)


def join(whole: Cluster, on: Cluster) -> tuple[Any, ...]:
    world = meet(a_plan(whole, on), device=torch.device("cpu"))
    group, side = group_of(world, 60), side_group(world, 60)
    total = torch.ones(2)
    for k, one in enumerate((group, side)):
        if one is not None:
            dist.all_reduce(total[k], group=one)
    return world.ranks, world.order, world.place, world.takes_part, total.tolist()


def disagree(odd: int) -> str:
    world = World(dist.get_rank(), dist.get_world_size(), (), (), torch.device("cpu"))
    check_same(world, {"graph": "aa", "torch": "2.13"})
    with pytest.raises(WorldError) as told:
        check_same(world, {"graph": "bb" if world.rank == odd else "aa", "torch": "2.13"})
    return told.value.what


def share() -> tuple[str, str]:
    text = "a plan, with ≈ 3 odd letters"
    got = share_plan(text if dist.get_rank() == 0 else None)
    with pytest.raises(WorldError) as told:
        share_plan(None, "the model does not fit" if dist.get_rank() == 0 else "")
    return got, told.value.what


def test_meeting(worker_pools: Callable[[int], WorkerPool]) -> None:
    whole = cluster(kind("slow"), kind("fast", count=2))
    found = worker_pools(3).run(join, whole, whole.only([1]))
    assert found == [
        ((1, 2), (0, 1), -1, False, [1.0, 1.0]),
        ((1, 2), (0, 1), 0, True, [2.0, 2.0]),
        ((1, 2), (0, 1), 1, True, [2.0, 2.0]),
    ]


def test_facts_that_differ_are_named_on_every_rank(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert worker_pools(3).run(disagree, 1) == ["ranks disagree: graph is bb on rank 1, aa on ranks 0, 2"] * 3


def test_the_plan_of_rank_0(worker_pools: Callable[[int], WorkerPool]) -> None:
    told = ("a plan, with ≈ 3 odd letters", "rank 0 has no plan: the model does not fit")
    assert worker_pools(2).run(share) == [told] * 2


ALONE = """
import torch, torch.distributed as dist
from types import SimpleNamespace
from lopsided.comm.world import begin, check_same, default_store, group_of, meet, share_plan, side_group
from lopsided.comm.watchdog import Watchdog
from lopsided.cluster.cluster import Cluster, Kind, Link
begin()
one = Cluster("x", "", (Kind("a", "n", 1, 1, (("f32", 1e9),), 1e9, 1, 0.0),), Link(0, 1e9), Link(0, 1e9))
world = meet(SimpleNamespace(cluster=one, on=one))
check_same(world, {"a": "b"})
share_plan("text")
total = torch.ones(2)
dist.all_reduce(total, group=group_of(world, 5))
watch = Watchdog(world, default_store(), 5, side=side_group(world, 5), every_s=0.05)
watch.start_handshake(1, "p", "x", training=True, sync=True)
watch.finish_handshake()
print(world.rank, world.size, world.place, total.tolist())
"""


def run_alone(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=60)


def test_a_world_of_one() -> None:
    done = run_alone(ALONE, LOPSIDED_DEVICE="cpu")
    assert (done.stdout.split(), done.returncode) == (["0", "1", "0", "[1.0,", "1.0]"], 0), done.stderr


def test_half_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPSIDED_DEVICE", "cpu")
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WorldError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"):
        begin()


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPSIDED_DEVICE", "cuda:99")
    with pytest.raises(WorldError, match="no device 'cuda:99'"):
        begin()
    monkeypatch.delenv("LOPSIDED_DEVICE")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("RANK", "6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(WorldError, match=r"rank 6 on .* has local rank 2, and there are 2 GPUs"):
        begin()
