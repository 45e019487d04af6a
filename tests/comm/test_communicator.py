"""Every collective, every way, every dtype, pieces of every size: what one process would compute from all of them.

The checks take a `Communicator` and run in every process of a crew, on gloo. What is done differently on NCCL runs on
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

WAYS = ("padded", "grouped", "all_to_all", "")
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


def holds(wire: Communicator, rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank has: small whole numbers, whose sums all these dtypes hold exactly."""
    return ((torch.arange(count) * 3 + rank) % 4).to(dtype).to(wire.device)


def total(wire: Communicator, count: int, dtype: torch.dtype) -> Tensor:
    every = [holds(wire, rank, count, dtype).double() for rank in range(wire.size)]
    return torch.stack(every).sum(0).to(dtype)


def equal(one: Tensor, other: Tensor) -> bool:
    # As bytes: torch compares no small floats.
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# Checks, run by every process at once. Each returns how many it made.


def gathers(wire: Communicator) -> int:
    cases = list(itertools.product(COUNTS[wire.size], WAYS, MOVED))
    for counts, way, dtype in cases:
        pieces = [holds(wire, rank, count, dtype) for rank, count in enumerate(counts)]
        mine = pieces[wire.rank].clone()
        assert equal(wire.all_gather(mine, counts, algorithm=way).wait(), torch.cat(pieces)), (counts, way, dtype)
        out = torch.zeros(sum(counts), dtype=dtype, device=wire.device)
        assert wire.all_gather(mine, counts, algorithm=way, out=out).wait() is out
        assert equal(out, torch.cat(pieces)), (counts, way, dtype)
        # From its own place in what is filled.
        out = torch.zeros_like(out)
        place = out.split(list(counts))[wire.rank]
        place.copy_(mine)
        assert equal(wire.all_gather(place, counts, algorithm=way, out=out).wait(), torch.cat(pieces)), (
            counts,
            way,
            dtype,
        )
        assert equal(mine, pieces[wire.rank]), (counts, way, dtype)
    return len(cases)


def scatters(wire: Communicator) -> int:
    cases = list(itertools.product(COUNTS[wire.size], WAYS, ADDED))
    for counts, way, dtype in cases:
        whole = holds(wire, wire.rank, sum(counts), dtype)
        piece = wire.reduce_scatter(whole, counts, algorithm=way).wait()
        assert equal(piece, total(wire, sum(counts), dtype).split(list(counts))[wire.rank]), (counts, way, dtype)
        assert piece.untyped_storage().nbytes() == piece.nbytes, "the piece keeps a larger buffer alive"
        assert equal(whole, holds(wire, wire.rank, sum(counts), dtype)), "what was given has changed"
    return len(cases)


def reduces(wire: Communicator) -> int:
    cases = list(itertools.product((0, 1, 4, 7, 24), ("ring", "tree", "scatter+gather", ""), ADDED))
    for count, way, dtype in cases:
        flat = holds(wire, wire.rank, count, dtype)
        assert wire.all_reduce(flat, algorithm=way).wait() is flat
        assert equal(flat, total(wire, count, dtype)), (count, way, dtype)
    for dtype in ADDED:
        flat = holds(wire, wire.rank, 5, dtype)
        every = [holds(wire, rank, 5, dtype).double() for rank in range(wire.size)]
        assert wire.maximum(flat).wait() is flat
        assert equal(flat, torch.stack(every).amax(0).to(dtype)), dtype
    # Complex numbers by their parts.
    phases = torch.tensor([1 + 2j, 3 - 1j, -1j], device=wire.device)
    turns = wire.size * (wire.size + 1) / 2
    counts = [3, *[0] * (wire.size - 1)]
    piece = wire.reduce_scatter(phases * (wire.rank + 1), counts).wait()
    assert equal(piece, phases[: counts[wire.rank]] * turns)
    assert equal(wire.all_reduce(phases * (wire.rank + 1)).wait(), phases * turns)
    # Any of them.
    flags = torch.tensor([False, wire.rank == 0, True], device=wire.device)
    assert wire.all_reduce(flags).wait().tolist() == [False, True, True]
    return len(cases)


def moves(wire: Communicator) -> int:
    size, checked = wire.size, 0
    for dtype in MOVED:
        for source in range(size):
            flat = holds(wire, wire.rank, 5, dtype)
            assert wire.broadcast(flat, source).wait() is flat
            assert equal(flat, holds(wire, source, 5, dtype)), (source, dtype)
        # How many elements go from whom to whom: some to oneself, none along some ways, none at all.
        for goes in (lambda a, b: (a * 3 + b) % 4, lambda a, b: a == 0 and b == 1, lambda a, b: a == b, lambda a, b: 0):
            give = [int(goes(wire.rank, peer)) for peer in range(size)]
            take = [int(goes(peer, wire.rank)) for peer in range(size)]
            sent = holds(wire, wire.rank, sum(give), dtype)
            expected = []
            for peer in range(size):
                theirs = [int(goes(peer, other)) for other in range(size)]
                expected.append(holds(wire, peer, sum(theirs), dtype).split(theirs)[wire.rank])
            assert equal(wire.all_to_all(sent, give, take).wait(), torch.cat(expected)), (give, dtype)
            checked += 1
    return checked


def all_in_flight(wire: Communicator) -> int:
    """Started one after the other, waited for in another order."""
    counts = COUNTS[wire.size][0]
    length = sum(counts)
    under_way: list[tuple[Handle, Tensor]] = []
    for way, dtype in itertools.product(WAYS, (torch.float32, torch.bfloat16, torch.float8_e4m3fn)):
        pieces = [holds(wire, rank, count, dtype) for rank, count in enumerate(counts)]
        under_way.append((wire.all_gather(pieces[wire.rank], counts, algorithm=way), torch.cat(pieces)))
        whole = holds(wire, wire.rank, length, dtype)
        summed = total(wire, length, dtype)
        under_way.append((wire.reduce_scatter(whole, counts, algorithm=way), summed.split(list(counts))[wire.rank]))
        under_way.append((wire.all_reduce(holds(wire, wire.rank, length, dtype)), summed))
        under_way.append((wire.broadcast(holds(wire, wire.rank, 3, dtype), 1), holds(wire, 1, 3, dtype)))
    for handle, expected in reversed(under_way):
        result = handle.wait()
        assert equal(result, expected)
        assert handle.wait() is result
    return len(under_way)


def parameters(wire: Communicator) -> None:
    """What trains is sent as it is, and nothing of it is recorded."""
    counts = COUNTS[wire.size][0]
    for way in WAYS:
        piece = torch.ones(counts[wire.rank], device=wire.device, requires_grad=True)
        assert not wire.all_gather(piece, counts, algorithm=way).wait().requires_grad
        whole = torch.ones(sum(counts), device=wire.device, requires_grad=True)
        assert not wire.reduce_scatter(whole, counts, algorithm=way).wait().requires_grad
    with torch.inference_mode():
        assert wire.all_reduce(torch.ones(3, device=wire.device)).wait().tolist() == [wire.size] * 3


def half_precision(wire: Communicator) -> None:
    count, spread = 512, wire.size + 1
    for dtype, way in itertools.product(HALF, WAYS[:3]):
        draws = [
            torch.randn(count * wire.size, generator=torch.Generator().manual_seed(rank)) for rank in range(wire.size)
        ]
        rounded = [draw.to(dtype) for draw in draws]
        place = slice(wire.rank * count, (wire.rank + 1) * count)
        exact = torch.stack([part[place].double() for part in rounded]).sum(0)
        # Every partial sum a library makes is rounded once, by half a unit in the last place.
        most = torch.stack([part[place].double().abs() for part in rounded]).sum(0) * torch.finfo(dtype).eps / 2
        piece = wire.reduce_scatter(rounded[wire.rank].to(wire.device), [count] * wire.size, algorithm=way).wait().cpu()
        assert ((piece.double() - exact).abs() <= most * spread).all(), (dtype, way)
        if way == "all_to_all":
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
def test_on_gloo(crews: Callable[[int], WorkerPool], check: str, size: int) -> None:
    made = crews(size).run(checked, check)
    assert len(set(made)) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_check
def test_cuda_tensors_over_gloo(crews: Callable[[int], WorkerPool], check: str) -> None:
    made = crews(3).run(checked, check, "cuda:0")
    assert len(set(made)) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_check
def test_on_nccl(crews: Callable[[int], WorkerPool], check: str) -> None:
    made = crews(min(torch.cuda.device_count(), 4)).run(checked, check, "cuda", "nccl")
    assert len(set(made)) == 1


def nccl_calls() -> bool:
    """One GPU is enough to see that NCCL takes the calls as they are made."""
    place = torch.device("cuda", 0)
    lane = NcclBackend(dist.new_group(backend="nccl", device_id=place), place, timedelta(seconds=60))
    full, empty = torch.arange(6.0, device=place), lambda: torch.zeros(6, device=place)
    flights: list[tuple[Flight, Tensor]] = []
    for way in WAYS[:3]:
        gathered, scattered = empty(), empty()
        flights.append((lane.all_gather(full, gathered, [6], way), gathered))
        flights.append((lane.reduce_scatter(full, scattered, [6], way), scattered))
    for way in ("ring", "scatter+gather"):
        flat = full.clone()
        flights.append(((lane.all_reduce(flat, way), None), flat))
    for (works, finish), result in flights:
        for work in works:
            work.wait()
        if finish is not None:
            finish()
        assert equal(result, full)
    return True


@pytest.mark.skipif(not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a GPU and NCCL")
def test_nccl_takes_the_calls(crews: Callable[[int], WorkerPool]) -> None:
    assert crews(1).run(nccl_calls) == [True]


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
    wire = alone()
    flat = torch.arange(4.0)
    handles = [
        wire.all_reduce(flat),
        wire.maximum(flat),
        wire.broadcast(flat, 0),
        wire.all_gather(flat, [4]),
        wire.reduce_scatter(flat, [4]),
        wire.all_to_all(flat, [4], [4]),
    ]
    assert all(handle.wait() is flat for handle in handles)
    out = torch.zeros(4)
    assert wire.all_gather(flat, [4], out=out).wait() is out
    assert torch.equal(out, flat)
    assert (wire.sent_bytes, wire.waited_s) == (0, 0.0)


class Asked:
    """A network that is asked, and answers what it was told to."""

    def __init__(self, way: str) -> None:
        self.way, self.questions = way, []

    def best(self, *question: Any) -> SimpleNamespace:
        self.questions.append(question)
        return SimpleNamespace(implementation=self.way)


def asks() -> list[tuple[Any, ...]]:
    wire, told = wired(), Asked("all_to_all")
    wire.network = told  # type: ignore[assignment]
    counts = [6, 2]
    assert wire.all_gather(torch.ones(counts[wire.rank]), counts).wait().sum() == 8
    assert wire.reduce_scatter(torch.ones(8, dtype=torch.float64), counts).wait().sum() == 2 * counts[wire.rank]
    assert wire.sent_bytes == 4 * counts[wire.rank] + 8 * counts[1 - wire.rank]
    told.way = "ring"
    wire.all_reduce(torch.ones(8)).wait()
    assert wire.waited_s > 0
    return told.questions


def test_the_network_chooses(crews: Callable[[int], WorkerPool]) -> None:
    asked = [("all_gather", 32, 1.5), ("reduce_scatter", 64, 1.5), ("all_reduce", 32, 1.0)]
    assert crews(2).run(asks) == [asked, asked]


def refused() -> list[str]:
    """Nothing of it is started, so that the other processes do not wait."""
    wire, said = wired(), []
    wrong: list[Callable[[], object]] = [
        lambda: wire.all_gather(torch.ones(3), [4, 4], what="w1"),
        lambda: wire.all_gather(torch.ones(4), [4, 4], out=torch.ones(7)),
        lambda: wire.all_gather(torch.ones(4), [4, 4, 4]),
        lambda: wire.reduce_scatter(torch.ones(7), [4, 4]),
        lambda: wire.all_to_all(torch.ones(7), [4, 4], [4, 4]),
        lambda: wire.all_reduce(torch.ones(2, dtype=torch.uint64), what="phases"),
        lambda: wire.all_reduce(torch.ones(2), algorithm="padded"),
        lambda: wire.all_gather(torch.ones(4), [4, 4], algorithm="ring"),
        lambda: wire.maximum(torch.ones(2, dtype=torch.complex64), what="phases"),
    ]
    for attempt in wrong:
        try:
            attempt()
        except (WorldError, ClusterError) as error:
            said.append(str(error))
    assert len(said) == len(wrong)
    return said


def test_what_cannot_be_is_refused(crews: Callable[[int], WorkerPool]) -> None:
    said = crews(2).run(refused)[1]
    assert said[0].startswith("w1: 3 elements where 4 were agreed on\n  where   rank 1 of 2")
    assert said[2].startswith("a collective: 3 counts for 2 devices")
    assert said[5].startswith("phases: torch.uint64 cannot be added up")
    assert said[8].startswith("phases: torch.complex64 has no largest number")
    assert said[7] == "all_gather cannot be carried out as 'ring'\n  do      choose from padded, grouped, all_to_all"


def without_a_backend() -> str:
    with pytest.raises(WorldError) as error:
        Communicator(dist.group.WORLD, torch.device("meta"), network())  # type: ignore[arg-type]
    return str(error.value)


def test_a_device_the_group_cannot_serve(crews: Callable[[int], WorkerPool]) -> None:
    assert crews(2).run(without_a_backend)[0].startswith("the process group cannot carry meta tensors")


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


def leaves(way: str, watched: bool) -> tuple[list[str], list[str]]:
    """Rank 1 ends; what rank 0 says in a collective under way, when asked again, and when it starts another."""
    witness = Witness()
    wire, store = wired(watch=witness if watched else None), dist.distributed_c10d._get_default_store()
    if wire.rank == 1:
        store.wait(["rank 0 has started it"])
        os._exit(0)
    said, handle = [], wire.all_gather(torch.ones(2**20), [2**20, 1], what="layer 3", algorithm=way)
    store.set("rank 0 has started it", "")
    for attempt in (handle.wait, handle.wait, lambda: wire.all_reduce(torch.ones(4), what="norm").wait()):
        try:
            attempt()
        except RankError as error:
            said.append(str(error))
    return said, witness.seen


@pytest.mark.parametrize("way", WAYS[:3])
def test_a_process_that_ends_is_told(way: str) -> None:
    with WorkerPool(2) as crew:
        (fine, outcome), _ = crew.outcomes(leaves, way, False)
    assert fine, outcome
    again, said = outcome[0][:2], outcome[0][2]
    assert again[0] == again[1]
    assert again[0].startswith("layer 3 did not finish: ")
    assert "rank 0 of 2" in again[0]
    assert "timeout_s" in again[0]
    assert said.startswith("norm did not finish: ")


def test_the_watch_explains() -> None:
    with WorkerPool(2) as crew:
        (fine, outcome), _ = crew.outcomes(leaves, "padded", True)
    assert fine, outcome
    said, seen = outcome
    assert said[0].startswith("rank 1 ended during layer 3")
    assert seen[:3] == ["entering layer 3", "explain layer 3", "left"]
    assert "explain norm" in seen


def stays_away(way: str) -> str:
    wire = wired(timeout_s=0.5)
    if wire.rank == 1:
        time.sleep(3)
        return ""
    with pytest.raises(RankError) as error:
        wire.all_gather(torch.ones(2), [2, 1], what="layer 3", algorithm=way).wait()
    return str(error.value)


@pytest.mark.parametrize("way", ["grouped", "all_to_all"])
def test_a_process_that_stays_away_is_not_waited_for_longer_than_the_timeout(way: str) -> None:
    with WorkerPool(2) as crew:
        assert crew.run(stays_away, way)[0].startswith("layer 3 did not finish: ")


def test_own_trouble_is_not_blamed_on_others() -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    wire = Communicator(Actor(Stage(2), 0), torch.device("cpu"), network())  # type: ignore[arg-type]
    wire._backend.empty = full  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError):
        wire.all_gather(torch.ones(1), [1, 2], algorithm="padded")
