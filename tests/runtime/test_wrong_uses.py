"""What goes wrong around `pm` is told, with what, where and what to do."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import lopsided
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.placement import Shares
from tests.support.jobs import classic, parsed
from tests.support.small_net import THREE, batch_of, both, named, net, planned


def refused(what: str) -> str:
    _, pm = both("zero")
    try:
        if what == "name":
            pm(tokens=batch_of()["tokens"])
        elif what == "more":
            pm(**batch_of(), mask=torch.ones(3))
        elif what == "replaced":
            pm.get_submodule("up").weight = nn.Parameter(torch.zeros(12, 8))
            pm(**batch_of())
        elif what == "dtype":
            pm.float()
            pm(**batch_of())
        elif what == "twice":
            loss = pm(**batch_of())
            loss.backward()
            loss.backward()
        elif what == "nan":
            with torch.no_grad():
                pm.get_parameter("norm.bias").fill_(float("nan"))
            pm(**batch_of())  # on a GPU it is looked at in the next one
            pm(**batch_of())
        elif what == "model":
            smaller = net()
            del smaller.frozen.bias
            smaller.frozen.register_parameter("bias", None)
            lopsided.parallelize(smaller, batch_of(), plan=pm.plan)
        elif what == "batch":
            model = net()
            lopsided.parallelize(model, batch_of(rows=8), plan=pm.plan)
        elif what == "world":
            model = net()
            lopsided.parallelize(model, batch_of(), plan=planned(model, "dp", Shares((0.5, 0.5))))
    except lopsided.LopsidedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("name", ("BatchError", "no 'target'")),
        ("more", ("BatchError", "'mask', which was not planned")),
        ("replaced", ("TrainingError", "up.weight was replaced")),
        ("dtype", ("TrainingError", "embed.weight was torch.float64")),
        ("twice", ("TrainingError", "without a forward pass")),
        ("nan", ("TrainingError", "the loss is nan")),
        ("model", ("Error", "parameter frozen.bias is planned and not there")),
        ("batch", ("Error", "tokens was planned as i64[10, 4] and is i64[8, 4]")),
        ("world", ("WorldError", "3 processes")),
    ],
)
def test_what_is_refused(worker_pools: Callable[[int], WorkerPool], what: str, told: tuple[str, ...]) -> None:
    for rank, text in enumerate(worker_pools(3).run(refused, what)):
        assert all(part in text for part in told), f"rank {rank}: {text}"
        assert "\n  do      " in text


def different_batches() -> str:
    """Every rank gives another batch, as under a DistributedSampler."""
    model = net()
    shares = Shares((0.5, 0.2, 0.3))
    pm = lopsided.parallelize(model, batch_of(), plan=planned(model, "dp", shares))
    try:
        pm(**batch_of(pm.world.rank))
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


def test_ranks_with_different_batches_are_told(worker_pools: Callable[[int], WorkerPool]) -> None:
    for text in worker_pools(3).run(different_batches):
        assert "ranks do not do the same" in text
        assert "holding" in text
        assert "give each rank its rows" in text


def different_batches_later() -> str:
    """Alike at first, and then one rank draws its own noise."""
    model = net()
    pm = lopsided.parallelize(model, batch_of(), plan=planned(model, "dp", THREE))
    try:
        for k in range(5):
            pm(**batch_of(k if k < 4 else 10 + pm.world.rank))
    except lopsided.LopsidedError as error:
        return f"{pm._forwards}: {error}"
    return ""


def test_whole_batches_are_compared_in_every_step(worker_pools: Callable[[int], WorkerPool]) -> None:
    for text in worker_pools(3).run(different_batches_later):
        assert text.startswith("5: ranks do not do the same")


def skips_a_batch() -> str:
    _, pm = both()
    loader = DataLoader(TensorDataset(*batch_of(rows=30).values()), batch_size=10, collate_fn=named)
    try:
        for k, batch in enumerate(lopsided.shard(loader, pm)):
            if k != 1 or pm.world.rank != 1:
                pm(**batch)
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


def test_a_rank_that_skips_a_batch_is_named(worker_pools: Callable[[int], WorkerPool]) -> None:
    for text in worker_pools(3).run(skips_a_batch):
        assert re.search("batch 3 of epoch 0 holding [0-9a-f]{8} on rank 1", text)
        assert re.search("batch 2 of epoch 0 holding [0-9a-f]{8} on ranks 0, 2", text)


class OwnOrder(Sampler[int]):
    """Draws by random numbers of its own, which nobody seeds alike."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(dist.get_rank()).sample(range(30), 30))

    def __len__(self) -> int:
        return 30


def other_samples(kind: str) -> str:
    """Every rank goes through other samples, and keeps its rows of each batch: none would see what the others have."""
    _, pm = both()
    rank = pm.world.rank
    if kind == "stream":
        loader: Any = [batch_of(3 * k + rank) for k in range(3)]
    else:
        data = TensorDataset(*batch_of(rows=30).values())
        loader = DataLoader(data, batch_size=10, collate_fn=named, sampler=OwnOrder())
    try:
        for batch in lopsided.shard(loader, pm):
            pm(**batch)
    except lopsided.LopsidedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["stream", "sampler"])
def test_ranks_that_go_through_other_samples_are_told(worker_pools: Callable[[int], WorkerPool], kind: str) -> None:
    for text in worker_pools(3).run(other_samples, kind):
        assert "batch 1 of epoch 0 holding" in text
        assert "all the same whole batch" in text


def drifted() -> tuple[list[str], bool]:
    model = net()
    pm = lopsided.parallelize(model, batch_of(), plan=planned(model), check_every=2)
    if pm.world.rank == 1:
        with torch.no_grad():
            pm.get_parameter("up.weight")[0, 0] += 1e-3
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            pm(**batch_of())
    return [str(w.message) for w in heard], torch.equal(pm.get_parameter("up.weight"), net().up.weight)


def test_drift_is_told_and_repaired(worker_pools: Callable[[int], WorkerPool]) -> None:
    found = worker_pools(3).run(drifted)
    assert "up.weight" in "".join(found[0][0])
    assert all(repaired for _, repaired in found)


def test_a_run_can_be_sent_to_another_process() -> None:
    run = classic("mlp:layers=3,width=24,classes=7,batch=7", "zero", THREE)
    assert str(parsed(run).program) == run.program
