"""Ranks that are threads: collectives as on processes, one error for all, no rank left waiting; the executor over them
computes what an independent oracle does."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lopsided
from lopsided.comm.in_process import InProcessCommunicator, run_ranks
from lopsided.errors import WorldError
from lopsided.ir.graph import Graph
from lopsided.ir.op_call import TOLERANCE, in_float64
from lopsided.ir.placement import Shares
from lopsided.models import by_name as models
from lopsided.models import zoo
from lopsided.ops.derive import derive_rules
from lopsided.verification.simulator import Simulation, simulate
from lopsided.verification.verifier import compare, random_program, random_shares
from tests.support.models import ByHand, example
from tests.support.oracle import simulate_by_lists

CPU = torch.device("cpu")
COUNTS = ((3, 2, 1), (2, 2, 2), (0, 4, 0), (5, 0, 2), (0, 0, 0))
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.complex128)


def holds(rank: int, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return ((torch.arange(count) * 3 + rank) % 5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_collectives(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    total, size = sum(counts), len(counts)

    def run(communicator: InProcessCommunicator) -> list[Tensor]:
        rank, mine = communicator.rank, holds(communicator.rank, total, dtype)
        sums = communicator.all_reduce(mine.clone(), what="a sum")
        whole = communicator.all_gather(holds(rank, counts[rank], dtype), counts, what="a gather")
        piece = communicator.reduce_scatter(mine, counts, what="a scatter")
        swapped = communicator.all_to_all(holds(rank, total, dtype), counts, [counts[rank]] * size, what="an exchange")
        copied = communicator.broadcast(mine.clone(), 1, what="a copy")
        # In any order; and again the same when asked again.
        found = [handle.wait() for handle in (copied, swapped, piece, whole, sums)]
        assert found[0] is copied.wait()
        return found

    every = [holds(rank, total, dtype) for rank in range(size)]
    summed = every[0] + every[1] + every[2]
    joined = torch.cat([holds(rank, counts[rank], dtype) for rank in range(size)])
    for rank, (copied, swapped, piece, whole, sums) in enumerate(run_ranks(size, CPU, run)):
        assert torch.equal(sums, summed)
        assert torch.equal(whole, joined)
        assert torch.equal(piece, summed.split(counts)[rank])
        assert torch.equal(swapped, torch.cat([held.split(counts)[rank] for held in every]))
        assert torch.equal(copied, every[1])


def test_the_largest_and_a_gather_into_memory_that_is_given() -> None:
    def run(communicator: InProcessCommunicator) -> tuple[Tensor, Tensor]:
        out = torch.zeros(4)
        mine = out[communicator.rank * 2 : communicator.rank * 2 + 2].fill_(communicator.rank + 1)
        whole = communicator.all_gather(mine, (2, 2), out=out).wait()
        assert whole is out
        return communicator.maximum(torch.tensor([1.0, -2.0]) * (1 - 2 * communicator.rank)).wait(), whole

    for largest, whole in run_ranks(2, CPU, run):
        assert largest.tolist() == [1.0, 2.0]
        assert whole.tolist() == [1.0, 1.0, 2.0, 2.0]


def test_a_rank_alone_copies_nothing_and_starts_no_thread() -> None:
    x, before = torch.ones(3), threading.active_count()

    def run(communicator: InProcessCommunicator) -> bool:
        made = (
            communicator.all_reduce(x),
            communicator.all_gather(x, (3,)),
            communicator.reduce_scatter(x, (3,)),
            communicator.broadcast(x, 0),
        )
        return all(
            handle.wait() is x for handle in (*made, communicator.maximum(x), communicator.all_to_all(x, (3,), (3,)))
        )

    assert run_ranks(1, CPU, run) == [True]
    assert threading.active_count() == before


def test_sums_are_taken_in_the_order_of_the_ranks() -> None:
    terms = (1e16, 1.0, -1e16, 1.0)
    found = run_ranks(
        4,
        CPU,
        lambda communicator: communicator.all_reduce(torch.tensor([terms[communicator.rank]]).double()).wait().item(),
    )
    assert found == [((terms[0] + terms[1]) + terms[2]) + terms[3]] * 4


def test_threads_are_kept_for_the_next_run() -> None:
    names = [run_ranks(4, CPU, lambda communicator: threading.current_thread().name) for _ in range(3)]
    assert len({name for run in names for name in run[1:]}) <= 6
    assert {run[0] for run in names} == {threading.current_thread().name}


def test_the_state_of_the_caller_is_that_of_every_rank() -> None:
    def run(_: object) -> tuple[Any, ...]:
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device(), cast

    with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert run_ranks(3, CPU, run) == [(False, False, torch.device("meta"), torch.bfloat16)] * 3
    with torch.inference_mode():
        assert run_ranks(3, CPU, run)[1][1]
    assert run_ranks(3, CPU, run) == [(True, False, CPU, None)] * 3
    assert torch.autograd.is_multithreading_enabled()


# Errors


@pytest.mark.parametrize("failing", range(3))
@pytest.mark.parametrize("at", range(3))
def test_an_error_of_one_rank_ends_all(failing: int, at: int) -> None:
    ended = []

    def run(communicator: InProcessCommunicator) -> None:
        try:
            for k in range(3):
                if k == at and communicator.rank == failing:
                    raise KeyError(f"rank {failing}")
                communicator.all_reduce(torch.ones(2)).wait()
        finally:
            ended.append(communicator.rank)

    with pytest.raises(KeyError, match=f"rank {failing}"):
        run_ranks(3, CPU, run)
    assert len(set(ended)) == len(ended)
    # The threads are free again.
    assert run_ranks(3, CPU, lambda communicator: communicator.rank) == [0, 1, 2]


def test_an_error_going_backward_ends_all() -> None:
    def run(communicator: InProcessCommunicator) -> None:
        x = torch.ones(2, requires_grad=True)
        y = x * 2

        def hook(gradient: Tensor) -> Tensor:
            if communicator.rank == 1:
                raise ValueError("no gradient here")
            return communicator.all_reduce(gradient.clone()).wait()

        y.register_hook(hook)
        y.sum().backward()

    with pytest.raises(ValueError, match="no gradient here"):
        run_ranks(3, CPU, run)


def test_ranks_that_start_different_collectives_are_told() -> None:
    def run(communicator: InProcessCommunicator) -> None:
        communicator.all_reduce(torch.ones(2), what=f"w{communicator.rank // 2}").wait()

    with pytest.raises(WorldError, match="rank 2 starts all_reduce of w1 where another starts all_reduce of w0"):
        run_ranks(3, CPU, run)


@pytest.mark.parametrize("leaving", range(3))
def test_a_rank_that_does_not_take_part_is_noticed(leaving: int) -> None:
    def run(communicator: InProcessCommunicator) -> None:
        if communicator.rank != leaving:
            communicator.all_reduce(torch.ones(2), what="w").wait()

    with pytest.raises(WorldError, match=r"wait for each other for ever: .* waits for all_reduce of w"):
        run_ranks(3, CPU, run)


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(WorldError, match="3 elements where 2 were agreed on"):
        run_ranks(2, CPU, lambda communicator: communicator.all_gather(torch.ones(3), (2, 2)).wait())


def test_a_forked_process_has_threads_of_its_own() -> None:
    run_ranks(3, CPU, lambda communicator: communicator.rank)
    child = os.fork()
    if child == 0:
        os._exit(0 if run_ranks(3, CPU, lambda communicator: communicator.rank) == [0, 1, 2] else 1)
    assert os.waitpid(child, 0)[1] == 0


# Against an oracle


def differ(found: Simulation, expected: Simulation) -> tuple[float, str]:
    assert found.gradients.keys() == expected.gradients.keys()
    assert found.buffers.keys() == expected.buffers.keys()
    return compare(found, expected)


def wide(graph: Graph, batch: dict[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
    return in_float64(graph), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


@pytest.mark.parametrize("name", zoo.SMALL)
def test_random_programs_of_the_zoo_as_an_oracle_computes_them(name: str) -> None:
    model, batch = models.load(zoo.SMALL[name])
    graph, batch = wide(lopsided.capture(model, batch), batch)
    model, book, state = model.double(), derive_rules(graph), random.Random(name)
    for devices in (2, 3, 4):
        program, fractions = random_program(book, state), random_shares(devices, state)
        shares = Shares(fractions, (("state", random_shares(devices, state)),))
        expected = simulate_by_lists(program, model, batch, shares, seed=devices)
        error, where = differ(simulate(program, model, batch, shares, seed=devices), expected)
        assert error <= TOLERANCE, f"{where}: {error} with {shares}\n{program}"


def drops(m: Any, x: Tensor) -> Tensor:
    h = nn.functional.dropout(m.parts[0](m.lin(x)), 0.4)
    return (h * torch.rand_like(h)).pow(2).mean() + nn.functional.dropout(m.lin.weight, 0.3).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "random numbers": lambda: ByHand(drops, nn.Dropout(0.2)),
    "buffers": lambda: ByHand(lambda m, x: m.parts[0](m.lin(x)).pow(3).sum(), nn.BatchNorm1d(6)),
    "nothing trained in the loss": lambda: ByHand(lambda m, x: x.sum() + (m.lin(x) * 0).sum().detach()),
}


@pytest.mark.parametrize("name", MODELS)
def test_random_programs_as_an_oracle_computes_them(name: str) -> None:
    model, batch = MODELS[name]().double(), {"x": example().double()}
    book, state = derive_rules(lopsided.capture(model, batch)), random.Random(1)
    for _ in range(10):
        program, shares = random_program(book, state), random_shares(3, state)
        error, where = differ(simulate(program, model, batch, shares), simulate_by_lists(program, model, batch, shares))
        assert error <= TOLERANCE, f"{where}: {error} with {shares}\n{program}"
