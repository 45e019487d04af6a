"""Every collective, every algorithm, every dtype, pieces of every size: what one process would compute.

The checks take a `Communicator` and run in every process of a pool, on gloo. What is done differently on NCCL runs on
threads that swap tensors as NCCL would (`Stage`), and for real where there are GPUs.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lopsided.cluster.cluster_file import load_cluster
from lopsided.cluster.collectives import Network
from lopsided.comm.backends import Flight, NcclBackend
from lopsided.comm.communicator import Communicator, Handle
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import ClusterError, RankError, WorldError

ALGORITHMS = ("padded", "grouped", "all_to_all", "")
HALF = (torch.float16, torch.bfloat16)
ADDED = (torch.float64, torch.float32, *HALF, torch.float8_e4m3fn, torch.int64, torch.int32, torch.int16)
MOVED = (*ADDED, torch.float8_e5m2, torch.uint8, torch.bool, torch.complex64)
COUNTS = {
    2: ((3, 2), (4, 4), (0, 5), (1, 0), (0, 0)),
    3: ((3, 2, 1), (2, 2, 2), (0, 4, 0), (5, 0, 2), (0, 0, 0)),
    4: ((3, 2, 1, 7), (1, 1, 1, 1), (0, 0, 6, 0), (2, 0, 0, 9), (0, 0, 0, 0)),
}
SIZES = (2, 3, 4)


def network() -> Network:
    return Network(load_cluster("hap-4"))


def wired(device: str = "cpu", **options: Any) -> Communicator:
    group = dist.group.WORLD
    assert group is not None
    return Communicator(group, torch.device(device), network(), **options)


def holds(communicator: Communicator, rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank has: small whole numbers, whose sums all these dtypes hold exactly."""
    return ((torch.arange(count) * 3 + rank) % 4).to(dtype).to(communicator.device)


def total(communicator: Communicator, count: int, dtype: torch.dtype) -> Tensor:
    every = [holds(communicator, rank, count, dtype).double() for rank in range(communicator.size)]
    return torch.stack(every).sum(0).to(dtype)


def equal(one: Tensor, other: Tensor) -> bool:
    # As bytes: torch compares no small floats.
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# Checks, run by every process at once. Each returns how many it made.


def gathers(communicator: Communicator) -> int:
    cases = list(itertools.product(COUNTS[communicator.size], ALGORITHMS, MOVED))
    for counts, algorithm, dtype in cases:
        pieces = [holds(communicator, rank, count, dtype) for rank, count in enumerate(counts)]
        mine = pieces[communicator.rank].clone()
        assert equal(communicator.all_gather(mine, counts, algorithm=algorithm).wait(), torch.cat(pieces)), (
            counts,
            algorithm,
            dtype,
        )
        out = torch.zeros(sum(counts), dtype=dtype, device=communicator.device)
        assert communicator.all_gather(mine, counts, algorithm=algorithm, out=out).wait() is out
        assert equal(out, torch.cat(pieces)), (counts, algorithm, dtype)
        # From its own place in what is filled.
        out = torch.zeros_like(out)
        place = out.split(list(counts))[communicator.rank]
        place.copy_(mine)
        assert equal(communicator.all_gather(place, counts, algorithm=algorithm, out=out).wait(), torch.cat(pieces)), (
            counts,
            algorithm,
            dtype,
        )
        assert equal(mine, pieces[communicator.rank]), (counts, algorithm, dtype)
    return len(cases)


def scatters(communicator: Communicator) -> int:
    cases = list(itertools.product(COUNTS[communicator.size], ALGORITHMS, ADDED))
    for counts, algorithm, dtype in cases:
        whole = holds(communicator, communicator.rank, sum(counts), dtype)
        piece = communicator.reduce_scatter(whole, counts, algorithm=algorithm).wait()
        assert equal(piece, total(communicator, sum(counts), dtype).split(list(counts))[communicator.rank]), (
            counts,
            algorithm,
            dtype,
        )
        assert piece.untyped_storage().nbytes() == piece.nbytes, "the piece keeps a larger buffer alive"
        assert equal(whole, holds(communicator, communicator.rank, sum(counts), dtype)), "what was given has changed"
    return len(cases)


def reduces(communicator: Communicator) -> int:
    cases = list(itertools.product((0, 1, 4, 7, 24), ("ring", "tree", "scatter+gather", ""), ADDED))
    for count, algorithm, dtype in cases:
        flat = holds(communicator, communicator.rank, count, dtype)
        assert communicator.all_reduce(flat, algorithm=algorithm).wait() is flat
        assert equal(flat, total(communicator, count, dtype)), (count, algorithm, dtype)
    for dtype in ADDED:
        flat = holds(communicator, communicator.rank, 5, dtype)
        every = [holds(communicator, rank, 5, dtype).double() for rank in range(communicator.size)]
        assert communicator.maximum(flat).wait() is flat
        assert equal(flat, torch.stack(every).amax(0).to(dtype)), dtype
    # Complex numbers by their parts.
    phases = torch.tensor([1 + 2j, 3 - 1j, -1j], device=communicator.device)
    turns = communicator.size * (communicator.size + 1) / 2
    counts = [3, *[0] * (communicator.size - 1)]
    piece = communicator.reduce_scatter(phases * (communicator.rank + 1), counts).wait()
    assert equal(piece, phases[: counts[communicator.rank]] * turns)
    assert equal(communicator.all_reduce(phases * (communicator.rank + 1)).wait(), phases * turns)
    # Any of them.
    flags = torch.tensor([False, communicator.rank == 0, True], device=communicator.device)
    assert communicator.all_reduce(flags).wait().tolist() == [False, True, True]
    return len(cases)


def moves(communicator: Communicator) -> int:
    size, checked = communicator.size, 0
    for dtype in MOVED:
        for source in range(size):
            flat = holds(communicator, communicator.rank, 5, dtype)
            assert communicator.broadcast(flat, source).wait() is flat
            assert equal(flat, holds(communicator, source, 5, dtype)), (source, dtype)
        # How many elements go from whom to whom: some to oneself, none along some ways, none at all.
        for goes in (lambda a, b: (a * 3 + b) % 4, lambda a, b: a == 0 and b == 1, lambda a, b: a == b, lambda a, b: 0):
            give = [int(goes(communicator.rank, peer)) for peer in range(size)]
            take = [int(goes(peer, communicator.rank)) for peer in range(size)]
            sent = holds(communicator, communicator.rank, sum(give), dtype)
            expected = []
            for peer in range(size):
                theirs = [int(goes(peer, other)) for other in range(size)]
                expected.append(holds(communicator, peer, sum(theirs), dtype).split(theirs)[communicator.rank])
            assert equal(communicator.all_to_all(sent, give, take).wait(), torch.cat(expected)), (give, dtype)
            checked += 1
    return checked


def all_in_flight(communicator: Communicator) -> int:
    """Started one after the other, waited for in another order."""
    counts = COUNTS[communicator.size][0]
    length = sum(counts)
    under_way: list[tuple[Handle, Tensor]] = []
    for algorithm, dtype in itertools.product(ALGORITHMS, (torch.float32, torch.bfloat16, torch.float8_e4m3fn)):
        pieces = [holds(communicator, rank, count, dtype) for rank, count in enumerate(counts)]
        under_way.append(
            (communicator.all_gather(pieces[communicator.rank], counts, algorithm=algorithm), torch.cat(pieces))
        )
        whole = holds(communicator, communicator.rank, length, dtype)
        summed = total(communicator, length, dtype)
        under_way.append(
            (
                communicator.reduce_scatter(whole, counts, algorithm=algorithm),
                summed.split(list(counts))[communicator.rank],
            )
        )
        under_way.append((communicator.all_reduce(holds(communicator, communicator.rank, length, dtype)), summed))
        under_way.append(
            (
                communicator.broadcast(holds(communicator, communicator.rank, 3, dtype), 1),
                holds(communicator, 1, 3, dtype),
            )
        )
    for handle, expected in reversed(under_way):
        result = handle.wait()
        assert equal(result, expected)
        assert handle.wait() is result
    return len(under_way)


def parameters(communicator: Communicator) -> None:
    """What trains is sent as it is, and nothing of it is recorded."""
    counts = COUNTS[communicator.size][0]
    for algorithm in ALGORITHMS:
        piece = torch.ones(counts[communicator.rank], device=communicator.device, requires_grad=True)
        assert not communicator.all_gather(piece, counts, algorithm=algorithm).wait().requires_grad
        whole = torch.ones(sum(counts), device=communicator.device, requires_grad=True)
        assert not communicator.reduce_scatter(whole, counts, algorithm=algorithm).wait().requires_grad
    with torch.inference_mode():
        assert (
            communicator.all_reduce(torch.ones(3, device=communicator.device)).wait().tolist()
            == [communicator.size] * 3
        )


def half_precision(communicator: Communicator) -> None:
    count, spread = 512, communicator.size + 1
    for dtype, algorithm in itertools.product(HALF, ALGORITHMS[:3]):
        draws = [
            torch.randn(count * communicator.size, generator=torch.Generator().manual_seed(rank))
            for rank in range(communicator.size)
        ]
        rounded = [draw.to(dtype) for draw in draws]
        place = slice(communicator.rank * count, (communicator.rank + 1) * count)
        exact = torch.stack([part[place].double() for part in rounded]).sum(0)
        # Every partial sum a library makes is rounded once, by half a unit in the last place.
        most = torch.stack([part[place].double().abs() for part in rounded]).sum(0) * torch.finfo(dtype).eps / 2
        piece = (
            communicator.reduce_scatter(
                rounded[communicator.rank].to(communicator.device), [count] * communicator.size, algorithm=algorithm
            )
            .wait()
            .cpu()
        )
        assert ((piece.double() - exact).abs() <= most * spread).all(), (dtype, algorithm)
        if algorithm == "all_to_all":
            assert torch.equal(piece, torch.stack([part[place].float() for part in rounded]).sum(0).to(dtype)), dtype


CHECKS = (gathers, scatters, reduces, moves, all_in_flight, parameters, half_precision)


def checked(name: str, device: str = "cpu", backend: str = "gloo") -> object:
    if backend == "gloo":
        return globals()[name](wired(device))
    place = torch.device("cuda", dist.get_rank())
    group = dist.new_group(backend=backend, device_id=place)
    return globals()[name](Communicator(group, place, network()))


each_check = pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])


@pytest.mark.parametrize("size", SIZES)
@each_check
def test_on_gloo(worker_pools: Callable[[int], WorkerPool], check: str, size: int) -> None:
    made = worker_pools(size).run(checked, check)
    assert len(set(made)) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_check
def test_cuda_tensors_over_gloo(worker_pools: Callable[[int], WorkerPool], check: str) -> None:
    made = worker_pools(3).run(checked, check, "cuda:0")
    assert len(set(made)) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_check
def test_on_nccl(worker_pools: Callable[[int], WorkerPool], check: str) -> None:
    made = worker_pools(min(torch.cuda.device_count(), 4)).run(checked, check, "cuda", "nccl")
    assert len(set(made)) == 1


def nccl_calls() -> bool:
    """One GPU is enough to see that NCCL takes the calls as they are made."""
    place = torch.device("cuda", 0)
    lane = NcclBackend(dist.new_group(backend="nccl", device_id=place), place, timedelta(seconds=60))
    full, empty = torch.arange(6.0, device=place), lambda: torch.zeros(6, device=place)
    flights: list[tuple[Flight, Tensor]] = []
    for algorithm in ALGORITHMS[:3]:
        gathered, scattered = empty(), empty()
        flights.append((lane.all_gather(full, gathered, [6], algorithm), gathered))
        flights.append((lane.reduce_scatter(full, scattered, [6], algorithm), scattered))
    for algorithm in ("ring", "scatter+gather"):
        flat = full.clone()
        flights.append(((lane.all_reduce(flat, algorithm), None), flat))
    for (works, finish), result in flights:
        for work in works:
            work.wait()
        if finish is not None:
            finish()
        assert equal(result, full)
    return True


@pytest.mark.skipif(not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a GPU and NCCL")
def test_nccl_takes_the_calls(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert worker_pools(1).run(nccl_calls) == [True]


class Stage:
    """Threads that stand for processes: each call waits for the others', and works as it does on NCCL."""

    def __init__(self, size: int) -> None:
        self.size, self.shown, self.all_here = size, [None] * size, threading.Barrier(size, timeout=60)

    def swap(self, rank: int, mine: Any) -> list[Any]:
        self.shown[rank] = mine
        self.all_here.wait()
        every = list(self.shown)
        self.all_here.wait()
        return every


class Actor:
    """A process group of one rank on a `Stage`: the calls of `ProcessGroup` that the lanes use."""

    def __init__(self, stage: Stage, rank: int) -> None:
        self.stage, self._rank = stage, rank
        self.done = SimpleNamespace(wait=lambda: True)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.stage.size

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=lambda: "nccl")

    def _swap(self, tensor: Tensor) -> list[Tensor]:
        return self.stage.swap(self._rank, tensor.clone())

    def _sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._swap(tensor)).sum(0, dtype=tensor.dtype)

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> object:
        [flat] = tensors
        largest = options.reduceOp == dist.ReduceOp.MAX
        flat.copy_(torch.stack(self._swap(flat)).amax(0) if largest else self._sum(flat))
        return self.done

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> object:
        tensors[0].copy_(self._swap(tensors[0])[options.rootRank])
        return self.done

    def reduce(self, tensors: list[Tensor], options: dist.ReduceOptions) -> object:
        summed = self._sum(tensors[0])
        if self._rank == options.rootRank:
            tensors[0].copy_(summed)
        return self.done

    def _allgather_base(self, whole: Tensor, piece: Tensor, options: object) -> object:
        whole.copy_(torch.cat(self._swap(piece)))
        return self.done

    def _reduce_scatter_base(self, piece: Tensor, whole: Tensor, options: object) -> object:
        piece.copy_(self._sum(whole).view(self.stage.size, -1)[self._rank])
        return self.done

    def alltoall(self, came: list[Tensor], given: list[Tensor], options: object) -> object:
        every = self.stage.swap(self._rank, [part.clone() for part in given])
        for peer, part in enumerate(came):
            part.copy_(every[peer][self._rank])
        return self.done

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> object:
        return self.done


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", [gathers, scatters, reduces, moves, all_in_flight], ids=lambda check: check.__name__)
def test_as_on_nccl(check: Callable[[Communicator], int], size: int) -> None:
    stage = Stage(size)
    with ThreadPoolExecutor(size) as pool:
        wires = [Communicator(Actor(stage, rank), torch.device("cpu"), network()) for rank in range(size)]  # type: ignore[arg-type]
        assert len(set(pool.map(check, wires))) == 1


def alone() -> Communicator:
    """The only rank of a group that can do nothing."""
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1, _get_backend=lambda _: SimpleNamespace(name=lambda: "gloo"))
    return Communicator(group, torch.device("cpu"), network())  # type: ignore[arg-type]


def test_one_device_sends_nothing_and_copies_nothing() -> None:
    communicator = alone()
    flat = torch.arange(4.0)
    handles = [
        communicator.all_reduce(flat),
        communicator.maximum(flat),
        communicator.broadcast(flat, 0),
        communicator.all_gather(flat, [4]),
        communicator.reduce_scatter(flat, [4]),
        communicator.all_to_all(flat, [4], [4]),
    ]
    assert all(handle.wait() is flat for handle in handles)
    out = torch.zeros(4)
    assert communicator.all_gather(flat, [4], out=out).wait() is out
    assert torch.equal(out, flat)
    assert communicator.waited_s == 0.0


class Asked:
    """A network that is asked, and answers what it was told to."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm, self.questions = algorithm, []

    def best(self, *question: Any) -> SimpleNamespace:
        self.questions.append(question)
        return SimpleNamespace(implementation=self.algorithm)


def asks() -> list[tuple[Any, ...]]:
    communicator, told = wired(), Asked("all_to_all")
    communicator.network = told  # type: ignore[assignment]
    counts = [6, 2]
    assert communicator.all_gather(torch.ones(counts[communicator.rank]), counts).wait().sum() == 8
    assert (
        communicator.reduce_scatter(torch.ones(8, dtype=torch.float64), counts).wait().sum()
        == 2 * counts[communicator.rank]
    )
    told.algorithm = "ring"
    communicator.all_reduce(torch.ones(8)).wait()
    assert communicator.waited_s > 0
    return told.questions


def test_the_network_chooses(worker_pools: Callable[[int], WorkerPool]) -> None:
    asked = [("all_gather", 32, 1.5), ("reduce_scatter", 64, 1.5), ("all_reduce", 32, 1.0)]
    assert worker_pools(2).run(asks) == [asked, asked]


def refused() -> list[str]:
    """Nothing of it is started, so that the other processes do not wait."""
    communicator, said = wired(), []
    wrong: list[Callable[[], object]] = [
        lambda: communicator.all_gather(torch.ones(3), [4, 4], what="w1"),
        lambda: communicator.all_gather(torch.ones(4), [4, 4], out=torch.ones(7)),
        lambda: communicator.all_gather(torch.ones(4), [4, 4, 4]),
        lambda: communicator.reduce_scatter(torch.ones(7), [4, 4]),
        lambda: communicator.all_to_all(torch.ones(7), [4, 4], [4, 4]),
        lambda: communicator.all_reduce(torch.ones(2, dtype=torch.uint64), what="phases"),
        lambda: communicator.all_reduce(torch.ones(2), algorithm="padded"),
        lambda: communicator.all_gather(torch.ones(4), [4, 4], algorithm="ring"),
        lambda: communicator.maximum(torch.ones(2, dtype=torch.complex64), what="phases"),
    ]
    for attempt in wrong:
        try:
            attempt()
        except (WorldError, ClusterError) as error:
            said.append(str(error))
    assert len(said) == len(wrong)
    return said


def test_what_cannot_be_is_refused(worker_pools: Callable[[int], WorkerPool]) -> None:
    said = worker_pools(2).run(refused)[1]
    assert said[0].startswith("w1: 3 elements where 4 were agreed on\n  where   rank 1 of 2")
    assert said[2].startswith("a collective: 3 counts for 2 devices")
    assert said[5].startswith("phases: torch.uint64 cannot be added up")
    assert said[8].startswith("phases: torch.complex64 has no largest number")
    assert said[7] == "all_gather cannot be carried out as 'ring'\n  do      choose from padded, grouped, all_to_all"


def without_a_backend() -> str:
    with pytest.raises(WorldError) as error:
        Communicator(dist.group.WORLD, torch.device("meta"), network())  # type: ignore[arg-type]
    return str(error.value)


def test_a_device_the_group_cannot_serve(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert worker_pools(2).run(without_a_backend)[0].startswith("the process group cannot carry meta tensors")


class Witness:
    """A watch that only writes down."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def entering(self, what: str) -> None:
        self.seen.append(f"entering {what}")

    def left(self) -> None:
        self.seen.append("left")

    def explain(self, error: Exception, what: str) -> RankError:
        self.seen.append(f"explain {what}")
        return RankError(f"rank 1 ended during {what}", do="see its output")


def leaves(algorithm: str, watched: bool) -> tuple[list[str], list[str]]:
    """Rank 1 ends; what rank 0 says in a collective under algorithm, when asked again, and when it starts another."""
    witness = Witness()
    communicator, store = wired(watch=witness if watched else None), dist.distributed_c10d._get_default_store()
    if communicator.rank == 1:
        store.wait(["rank 0 has started it"])
        os._exit(0)
    said, handle = [], communicator.all_gather(torch.ones(2**20), [2**20, 1], what="layer 3", algorithm=algorithm)
    store.set("rank 0 has started it", "")
    for attempt in (handle.wait, handle.wait, lambda: communicator.all_reduce(torch.ones(4), what="norm").wait()):
        try:
            attempt()
        except RankError as error:
            said.append(str(error))
    return said, witness.seen


@pytest.mark.parametrize("algorithm", ALGORITHMS[:3])
def test_a_process_that_ends_is_told(algorithm: str) -> None:
    with WorkerPool(2) as pool:
        (fine, outcome), _ = pool.outcomes(leaves, algorithm, False)
    assert fine, outcome
    again, said = outcome[0][:2], outcome[0][2]
    assert again[0] == again[1]
    assert again[0].startswith("layer 3 did not finish: ")
    assert "rank 0 of 2" in again[0]
    assert "timeout_s" in again[0]
    assert said.startswith("norm did not finish: ")


def test_the_watch_explains() -> None:
    with WorkerPool(2) as pool:
        (fine, outcome), _ = pool.outcomes(leaves, "padded", True)
    assert fine, outcome
    said, seen = outcome
    assert said[0].startswith("rank 1 ended during layer 3")
    assert seen[:3] == ["entering layer 3", "explain layer 3", "left"]
    assert "explain norm" in seen


def stays_away(algorithm: str) -> str:
    communicator = wired(timeout_s=0.5)
    if communicator.rank == 1:
        time.sleep(3)
        return ""
    with pytest.raises(RankError) as error:
        communicator.all_gather(torch.ones(2), [2, 1], what="layer 3", algorithm=algorithm).wait()
    return str(error.value)


@pytest.mark.parametrize("algorithm", ["grouped", "all_to_all"])
def test_a_process_that_stays_away_is_not_waited_for_longer_than_the_timeout(algorithm: str) -> None:
    with WorkerPool(2) as pool:
        assert pool.run(stays_away, algorithm)[0].startswith("layer 3 did not finish: ")


def test_own_trouble_is_not_blamed_on_others() -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    communicator = Communicator(Actor(Stage(2), 0), torch.device("cpu"), network())  # type: ignore[arg-type]
    communicator._backend.empty = full  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError):
        communicator.all_gather(torch.ones(1), [1, 2], algorithm="padded")
