"""Digests see every bit and its place; copies that drifted apart are named, measured and repaired."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lopsided.cluster.collectives import Network
from lopsided.comm.communicator import Communicator
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import World
from lopsided.errors import WorldError
from lopsided.ir.placement import I, S
from lopsided.runtime.parameters import replicas
from lopsided.runtime.parameters.pieces import Piece
from lopsided.runtime.parameters.replicas import DriftWarning, check, compare_replicas, digest, repair
from tests.support import clusters

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn),
)


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 7 % 5).reshape(shape).to(dtype)


# Digests


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_sees_every_element(dtype: torch.dtype) -> None:
    tensor = some(dtype, 3, 7)
    found = digest(tensor)
    assert (found.dtype, found.shape) == (torch.int64, ())
    assert found == digest(tensor.clone())
    for k in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1)[k] = 1 if tensor.view(-1)[k] == 0 else 0
        assert digest(other) != found


@settings(deadline=None)
@given(st.integers(0, 63), st.integers(0, 63), st.integers(0, 63), st.integers(0, 63))
def test_bits_that_flip_do_not_cancel(place: int, bit: int, other_place: int, other_bit: int) -> None:
    tensor = torch.arange(64)
    changed = tensor.clone()
    for k, b in {(place, bit), (other_place, other_bit)}:
        changed[k] ^= torch.tensor(1) << b
    assert digest(changed) != digest(tensor)


def test_a_digest_sees_places() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert digest(tensor) != digest(tensor.flip(0))
    assert digest(torch.zeros(4)) != digest(torch.zeros(6))
    assert digest(torch.tensor([0.0, 1.0])) != digest(torch.tensor([-0.0, 1.0]))


def test_how_a_tensor_lies_in_memory_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_CHUNK_BYTES", 64)
    for shape in ((6, 5, 3), (40, 2, 1), (2, 40, 1), (1, 1, 50), (0, 3, 2)):
        tensor = torch.randn(shape)
        assert digest(tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == digest(tensor)
    long = torch.randn(101)
    assert digest(torch.stack([long, long], 1)[:, 0]) == digest(long)
    assert digest(torch.cat([torch.zeros(1), long])[1:]) == digest(long)
    assert digest(long.conj().neg().neg()) == digest(long)


def test_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(100)
    monkeypatch.setattr(replicas, "_CHUNK_BYTES", 64)
    found = digest(tensor)
    swapped = torch.cat([tensor[8:16], tensor[:8], tensor[16:]])
    assert digest(swapped) != found
    assert digest(tensor.clone()) == found


# Replicas


class Fake(nn.Module):
    """A module of two layers, one cut, with all that is needed of a parallel one."""

    def __init__(self) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.whole = nn.Linear(3, 2).to(torch.bfloat16)
        self.cut = nn.Linear(3, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)
        with torch.no_grad():
            self.cut.weight.fill_(rank)
        ranks = tuple(range(size))
        self.__dict__["world"] = World(rank, size, ranks, ranks, torch.device("cpu"))
        self.__dict__["pieces"] = {
            name: Piece(
                *(name, (), tuple(parameter.shape), parameter.dtype),
                *((S(0), (1,) * size) if name == "cut.weight" else (I, ())),
                rank,
            )
            for name, parameter in self.named_parameters()
        }
        group = dist.group.WORLD
        assert group is not None
        network = Network(clusters.cluster(clusters.kind(count=size)))
        self.__dict__["communicator"] = Communicator(group, torch.device("cpu"), network, timeout_s=60)


def trained() -> tuple[Fake, torch.optim.Optimizer]:
    pm = Fake()
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.1)
    for parameter in pm.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return pm, optimizer


def as_rows(drifts: tuple[replicas.Drift, ...]) -> list[tuple[Any, ...]]:
    return [(drift.name, drift.ranks, drift.largest) for drift in drifts]


def drift_apart() -> list[Any]:
    pm, optimizer = trained()
    before = as_rows(compare_replicas(pm, optimizer))
    versions = [parameter._version for parameter in pm.parameters()]
    with torch.no_grad():
        if dist.get_rank() == 1:
            pm.whole.weight.data[0, 1] += 0.5
            pm.norm.num_batches_tracked += 3
        if dist.get_rank() == 2:
            optimizer.state[pm.whole.bias]["exp_avg"][1] = float("nan")
    found = compare_replicas(pm, optimizer)
    repair(pm, found, optimizer)
    after = as_rows(compare_replicas(pm, optimizer))
    same = versions == [parameter._version for parameter in pm.parameters()]
    return [before, as_rows(found), after, same, pm.cut.weight[0, 0].item() == pm.cut.weight[1, 2].item()]


def warned(mend: bool) -> tuple[list[str], int, int]:
    pm, optimizer = trained()
    if dist.get_rank() == 1:
        pm.norm.running_mean.add_(2.0)  # type: ignore[union-attr,operator]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = check(pm, mend=mend)
    assert all(issubclass(one.category, DriftWarning) for one in said)
    return [str(one.message) for one in said], len(found), len(compare_replicas(pm, optimizer))


def other_state() -> str:
    pm, optimizer = trained()
    if dist.get_rank() == 1:
        del optimizer.state[pm.whole.weight]["exp_avg"]
    with pytest.raises(WorldError) as told:
        compare_replicas(pm, optimizer)
    return told.value.what


def test_drift_is_found_measured_and_repaired(worker_pools: Callable[[int], WorkerPool]) -> None:
    for before, found, after, same_version, own in worker_pools(3).run(drift_apart):
        assert before == []
        assert found[0][:2] == ("whole.weight", (1,))
        assert found[0][2] == pytest.approx(0.5, rel=0.01)
        assert found[1:] == [
            ("norm.num_batches_tracked", (1,), 3.0),
            ("whole.bias (exp_avg)", (2,), float("inf")),
        ]
        assert after == []
        assert same_version  # so that a repair may come between a forward and its backward pass
        assert own  # pieces of cut parameters are nobody else's business


def test_the_first_rank_warns(worker_pools: Callable[[int], WorkerPool]) -> None:
    said = ["1 replicas had drifted apart, repaired from rank 0: norm.running_mean on rank 1 by up to 2"]
    assert worker_pools(2).run(warned, True) == [(said, 1, 0), ([], 1, 0)]
    left = [said[0].replace("repaired from rank 0", "not repaired")]
    assert worker_pools(2).run(warned, False) == [(left, 1, 1), ([], 1, 1)]


def test_ranks_with_other_state_are_named(worker_pools: Callable[[int], WorkerPool]) -> None:
    for told in worker_pools(3).run(other_state):
        assert told.startswith("replicas cannot be compared: the number of tensors is 18 on rank 1, 19 on ranks 0, 2")


def test_one_device_has_no_replicas(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert [len(row[1]) for row in worker_pools(1).run(drift_apart)] == [0]
