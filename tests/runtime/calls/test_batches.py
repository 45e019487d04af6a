"""Every process loads its own rows of the same batches, and can go on where it stopped."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import BatchError
from lopsided.ir.graph import Leaf, Value
from lopsided.ir.placement import I, Placement, S, Shares
from lopsided.models.zoo import SMALL
from lopsided.runtime.calls.batches import shard
from tests.support.jobs import Run, classic, model_of, parallel_of

SHARES = Shares((0.5, 0.3, 0.2, 0.0))
BATCH = 10
ROWS = S(0)


def model(
    place: int = 0,
    *,
    x: Placement = ROWS,
    y: Placement = ROWS,
    x_shape: tuple[int, ...] = (BATCH, 2),
    shares: Shares = SHARES,
    rank: int | None = None,
) -> Any:
    """What a loader asks of a parallel model with the batch {"x": ..., "y": ...}."""
    placed = {"x": (x_shape, "f32", x), "y": ((BATCH,), "i64", y)}
    return SimpleNamespace(
        world=SimpleNamespace(
            rank=max(place, 0) if rank is None else rank, size=len(shares), place=place, device=torch.device("cpu")
        ),
        shares=shares,
        inputs={
            name: (Leaf(Value(name, shape, dtype), "input", name), at) for name, (shape, dtype, at) in placed.items()
        },
        rebuild_batch=lambda tensors: dict(zip(placed, tensors, strict=True)),
        handed_out=lambda which: None,
    )


class Numbers(Dataset[dict[str, Tensor]]):
    """Sample k is k; remembers who was asked for."""

    def __init__(self, length: int = 40) -> None:
        self.length, self.asked = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        self.asked.append(k)
        return {"x": torch.full((2,), float(k)), "y": torch.tensor(k)}


def samples(batches: Sequence[dict[str, Tensor]]) -> list[list[int]]:
    return [batch["y"].tolist() for batch in batches]


def global_batches(make: Callable[[], Any], epochs: int = 1, **options: Any) -> list[list[int]]:
    """The batches of all processes joined, each process with a loader and a seed of its own."""
    per_process = []
    for place in range(len(SHARES)):
        torch.manual_seed(7)
        loader = shard(make(), model(place, **options))
        per_process.append([part for _ in range(epochs) for part in samples(list(loader))])
    return [[*chain(*parts)] for parts in zip(*per_process, strict=True)]


def test_each_process_loads_its_own_rows_and_no_others() -> None:
    for place, rows in enumerate((range(5), range(5, 8), range(8, 10), range(0))):
        data = Numbers()
        found = samples(list(shard(DataLoader(data, batch_size=BATCH), model(place))))
        assert found == [[10 * batch + row for row in rows] for batch in range(4)]
        assert data.asked == ([*chain(*found)] or [0])


def test_rows_are_cut_in_units_by_the_shares_of_their_name() -> None:
    shares = Shares((0.5, 0.5), named=(("part", (0.2, 0.8)),))
    at = S(0, unit=2, by="part")
    loader = shard(DataLoader(Numbers(), batch_size=BATCH), model(1, x=at, y=at, shares=shares))
    assert samples(list(loader))[0] == [2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(("x", "y"), [(I, S(0)), (S(1), S(0)), (I, I), (S(0, outer=2), S(0)), (S(0, unit=5), S(0))])
def test_where_a_tensor_is_not_cut_in_the_same_rows_all_are_loaded(x: Placement, y: Placement) -> None:
    for place in (0, 3):
        found = list(shard(DataLoader(Numbers(), batch_size=BATCH), model(place, x=x, y=y)))
        assert samples(found) == [list(range(start, start + 10)) for start in range(0, 40, 10)]


def test_a_tensor_without_rows_may_depend_on_all_rows() -> None:
    """A mask made by the collate function, say."""
    found = list(shard(DataLoader(Numbers(), batch_size=BATCH), model(1, x_shape=(7, 7), x=I)))
    assert samples(found)[0] == list(range(10))


@pytest.mark.parametrize(
    "sampler",
    [
        None,
        lambda: SubsetRandomSampler(range(30)),
        lambda: WeightedRandomSampler([1.0 + k for k in range(40)], 40),
        lambda: SubsetRandomSampler(range(30), generator=torch.Generator().manual_seed(random.randrange(1000))),
    ],
)
def test_shuffled_epochs_are_the_same_for_all_and_differ_from_each_other(sampler: Callable[[], Any] | None) -> None:
    torch.manual_seed(1)

    def make() -> Any:
        how = {"shuffle": True} if sampler is None else {"sampler": sampler()}
        # A user's generator decides the seed, and would be rank 0's.
        return DataLoader(Numbers(), batch_size=BATCH, generator=torch.Generator().manual_seed(3), **how)

    joined = global_batches(make, epochs=2)
    assert len(joined) == (8 if sampler is None else len(joined))
    half = len(joined) // 2
    assert all(len(batch) == BATCH for batch in joined)
    assert joined[:half] != joined[half:]
    if sampler is None:
        assert sorted(chain(*joined[:4])) == list(range(40)) == sorted(chain(*joined[4:]))


class InNoOrder:
    """A sampler of a stranger, which draws from Python's generator whenever it is asked."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        for _ in range(40):
            yield random.randrange(40) if torch.rand(()) > 0.5 else 0


def test_samplers_of_a_stranger_draw_alike_whatever_is_drawn_outside() -> None:
    found = []
    for place in (0, 0, 1):
        torch.manual_seed(7)
        random.seed(place)
        loader = shard(DataLoader(Numbers(), batch_size=BATCH, sampler=InNoOrder()), model(place, x=I))
        rows = []
        for batch in loader:
            random.random()
            torch.rand(3 + place)
            rows += batch["y"].tolist()
        found.append(rows)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) > 5


def test_drawing_the_order_leaves_the_default_generators_alone() -> None:
    loader = shard(DataLoader(Numbers(), batch_size=BATCH, shuffle=True, sampler=None), model())
    before = torch.random.get_rng_state(), random.getstate()
    list(loader)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Noisy(Numbers):
    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return {"x": torch.rand(2), "y": torch.tensor(k)}


def test_augmentations_are_alike_only_where_all_load_the_same_rows() -> None:
    def first(place: int, x: Placement) -> Tensor:
        torch.manual_seed(7)
        found: Tensor = next(iter(shard(DataLoader(Noisy(), batch_size=BATCH), model(place, x=x))))["x"]
        return found

    assert torch.equal(first(0, I), first(1, I))
    assert not torch.equal(first(0, S(0))[:3], first(1, S(0)))


def test_a_process_without_rows_asks_for_one_sample() -> None:
    for place in (3, -1):
        data = Numbers()
        loader = shard(DataLoader(data, batch_size=BATCH, shuffle=True), model(place))
        found = list(loader)
        assert len(data.asked) == 1
        assert len(found) == len(loader) == 4
        assert [(t.shape, t.dtype) for t in found[0].values()] == [((0, 2), torch.float32), ((0,), torch.int64)]


class Others(Numbers):
    """Without y, which was planned, and with what was not."""

    def __getitem__(self, k: int) -> Any:
        return {"x": super().__getitem__(k)["x"], "place": torch.tensor([k, k]), "name": f"sample {k}"}


class Absent(Numbers):
    def __getitem__(self, k: int) -> dict[str, Tensor]:
        raise FileNotFoundError(k)


def test_batches_without_rows_have_the_entries_of_the_loader() -> None:
    for place, length in ((3, 20), (-1, 20), (2, 11)):  # never any rows, and none of a short batch
        loader = shard(DataLoader(Others(length), batch_size=BATCH), model(place))
        before = torch.get_rng_state()
        *_, last = loader
        assert torch.equal(before, torch.get_rng_state())
        assert [*last] == ["x", "place", "name"]
        assert (last["x"].shape, last["place"].shape, last["name"]) == ((0, 2), (0, 2), [])
    first, *_ = shard(DataLoader(Absent(), batch_size=BATCH), model(3))
    assert [*first] == ["x", "y"]


def test_a_bystander_gets_nothing_even_if_others_need_all() -> None:
    found = list(shard(DataLoader(Numbers(), batch_size=BATCH), model(-1, x=I)))
    assert [batch["x"].shape for batch in found] == [(0, 2)] * 4


def test_workers_and_the_collate_function_are_those_of_the_loader() -> None:
    loader = DataLoader(
        Numbers(), batch_size=BATCH, num_workers=1, persistent_workers=True, prefetch_factor=3, collate_fn=_sum_up
    )
    sharded = shard(loader, model(1))
    assert list(sharded) == list(sharded) == [5 + 6 + 7, 15 + 16 + 17, 25 + 26 + 27, 35 + 36 + 37]


def _sum_up(rows: list[dict[str, Tensor]]) -> int:
    return sum(int(row["y"]) for row in rows)


def test_the_incomplete_batch_is_cut_as_the_others_are() -> None:
    for place, rows in enumerate(([40], [41], [42], [])):
        loader = shard(DataLoader(Numbers(43), batch_size=BATCH), model(place))
        found = list(loader)
        assert len(loader) == len(found) == 5
        assert samples(found)[-1] == rows
    assert len(list(shard(DataLoader(Numbers(43), batch_size=BATCH, drop_last=True), model()))) == 4


def test_workers_that_are_ahead_keep_the_order_where_a_process_has_no_rows() -> None:
    batches = [[0, 1], list(range(10)), [2], list(range(10, 20)), [3, 4]]
    loader = DataLoader(Numbers(), batch_sampler=batches, num_workers=1, prefetch_factor=4)
    assert samples(list(shard(loader, model(2)))) == [[], [8, 9], [], [18, 19], []]


def test_another_batch_size_than_planned_is_told_and_cut_by_the_same_shares() -> None:
    with pytest.warns(UserWarning, match="batches of 4 samples, and the plan is for 10"):
        found = samples(list(shard(DataLoader(Numbers(), batch_size=4), model())))
    assert found[:2] == [[0, 1], [4, 5]]
    with pytest.warns(UserWarning, match="the plan is for 10"):
        shard(DataLoader(Numbers(), batch_sampler=BatchSampler(range(40), 4, False)), model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard(DataLoader(Numbers(), batch_size=4), model(1))  # rank 0 alone tells


def test_a_distributed_sampler_is_refused() -> None:
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=0)
    for how in ({"batch_size": BATCH, "sampler": sampler}, {"batch_sampler": BatchSampler(sampler, BATCH, True)}):
        with pytest.raises(BatchError, match="other samples") as refused:
            shard(DataLoader(Numbers(), **how), model())
        assert "shuffle=True" in refused.value.do


def test_batch_samplers_of_a_stranger_are_taken_by_their_batches() -> None:
    batches = [list(range(10)), [3, 4], list(range(9, -1, -1))]
    found = list(shard(DataLoader(Numbers(), batch_sampler=batches), model(1)))
    assert samples(found) == [[5, 6, 7], [4], [4, 3, 2]]


def test_rows_that_cannot_be_cut_are_left_out_with_a_warning() -> None:
    pairs = S(0, unit=2)
    batches = [list(range(10)), list(range(3)), list(range(4))]
    with pytest.warns(UserWarning, match="a batch of 3 rows is left out"):
        found = list(shard(DataLoader(Numbers(), batch_sampler=batches), model(0, x=pairs, y=pairs)))
    assert samples(found) == [[0, 1, 2, 3, 4, 5], [0, 1]]


# Other sources


def whole_batch(start: int, rows: int = BATCH) -> dict[str, Tensor]:
    numbers = torch.arange(start, start + rows)
    return {"x": numbers[:, None].expand(rows, 2).float(), "y": numbers}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        numbers = Numbers()
        yield from (numbers[k] for k in range(40))


@pytest.mark.parametrize(
    "source",
    [
        lambda: [whole_batch(0), whole_batch(10)],
        lambda: (whole_batch(start) for start in (0, 10)),
        lambda: DataLoader(Stream(), batch_size=BATCH),
        lambda: DataLoader([whole_batch(0), whole_batch(10)], batch_size=None),
    ],
)
def test_of_anything_else_rows_are_kept(source: Callable[[], Any]) -> None:
    for place, rows in enumerate((range(5), range(5, 8), range(8, 10), range(0))):
        found = list(shard(source(), model(place)))
        assert samples(found[:2]) == [[*rows], [10 + row for row in rows]]
        assert found[0]["x"].shape == (len(rows), 2)
    assert samples(list(shard(source(), model(0, x=I))))[1] == list(range(10, 20))


def test_rows_are_cut_wherever_tensors_are() -> None:
    batch = (torch.arange(10), [torch.arange(20).reshape(10, 2), "name"], torch.arange(3))
    first, (second, name), rest = next(iter(shard([batch], model(1))))
    assert (first.tolist(), second.shape, name, len(rest)) == ([5, 6, 7], (3, 2), "name", 3)


def test_short_batches_of_anything_else_are_cut_as_well() -> None:
    found = list(shard([whole_batch(0), whole_batch(10, rows=3)], model()))
    assert samples(found) == [[0, 1, 2, 3, 4], [10]]


# Going on


def test_goes_on_in_the_middle_of_an_epoch_on_other_processes_without_loading_again() -> None:
    def make() -> Any:
        return DataLoader(Numbers(), batch_size=BATCH, shuffle=True)

    expected = global_batches(make, epochs=3)
    torch.manual_seed(7)
    first = shard(make(), model(0))
    list(first)
    for _ in zip(range(2), first, strict=False):
        state = first.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 2)
    torch.manual_seed(99)
    data, fewer = Numbers(), Shares((0.3, 0.7))
    second = shard(DataLoader(data, batch_size=BATCH, shuffle=True), model(1, shares=fewer))
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert samples(list(second)) == [batch[3:] for batch in expected[6:8]]
    assert len(data.asked) == 2 * 7
    assert samples(list(second)) == [batch[3:] for batch in expected[8:]]


def test_at_the_end_of_an_epoch_there_is_nothing_left_of_it() -> None:
    loader = shard(DataLoader(Numbers(), batch_size=BATCH), model())
    for _ in loader:
        state = loader.state_dict()
    again = shard(DataLoader(Numbers(), batch_size=BATCH), model())
    again.load_state_dict(state)
    assert list(again) == []
    assert (again.epoch, len(list(again))) == (1, 4)


def test_an_epoch_that_is_left_is_over() -> None:
    loader = shard(DataLoader(Numbers(), batch_size=BATCH), model())
    next(iter(loader))
    assert len(list(loader)) == 4
    assert loader.epoch == 2


def test_anything_else_goes_on_as_well() -> None:
    loader = shard([whole_batch(start) for start in (0, 10, 20)], model())
    loader.load_state_dict({"epoch": 4, "batches": 2, "seed": 5})
    assert samples(list(loader)) == [[20, 21, 22, 23, 24]]
    assert loader.epoch == 5


def test_a_position_counts_samples_where_batches_have_another_size() -> None:
    loader = shard(DataLoader(Numbers(), batch_size=BATCH), model())
    loader.load_state_dict({"epoch": 0, "batches": 4, "seed": 5, "rows": 5})
    assert samples(list(loader))[0] == [20, 21, 22, 23, 24]
    with pytest.raises(BatchError, match="no whole number of batches of 10"):
        loader.load_state_dict({"epoch": 0, "batches": 3, "seed": 5, "rows": 5})
    with pytest.raises(BatchError, match="has no epoch, seed"):
        loader.load_state_dict({"batches": 1})


# Processes


def _in_processes(length: int) -> list[list[int]]:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # everyone would draw another order
    loader = DataLoader(Numbers(length if rank else 40), batch_size=BATCH, shuffle=True)
    return samples(list(shard(loader, model(rank, shares=Shares((0.5, 0.3, 0.2))))))


def test_processes_agree_on_the_order_of_rank_0(worker_pools: Callable[[int], WorkerPool]) -> None:
    joined = [[*chain(*parts)] for parts in zip(*worker_pools(3).run(_in_processes, 40), strict=True)]
    assert sorted(chain(*joined)) == list(range(40))


def _refused(length: int) -> str:
    try:
        _in_processes(length)
    except BatchError as error:
        return error.what
    return ""


def test_processes_with_fewer_batches_are_refused(worker_pools: Callable[[int], WorkerPool]) -> None:
    said = worker_pools(3).run(_refused, 30)
    assert said == ["", "rank 1 has 3 batches in an epoch and rank 0 has 4", said[1].replace("rank 1", "rank 2")]


# A model


class Lines(Dataset[dict[str, Tensor]]):
    def __init__(self, batch: dict[str, Tensor], copies: int) -> None:
        self.batch, self.rows = batch, len(next(iter(batch.values())))
        self.copies = copies

    def __len__(self) -> int:
        return self.rows * self.copies

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return {name: (tensor[k % self.rows] + k // self.rows) % 50 for name, tensor in self.batch.items()}


def _losses(run: Run) -> tuple[list[float], list[float], list[float]]:
    """Of batches of which every process loads its share, one by one and all fetched ahead, and of the same whole ones.
    The last batch is short."""
    pm = parallel_of(run)
    data = Lines(model_of(run.spec)[1], 3)  # type: ignore[arg-type]
    loader = DataLoader(Subset(data, range(len(data) - 1)), batch_size=data.rows)
    with torch.no_grad():
        one_by_one = [float(pm(**batch)) for batch in shard(loader, pm)]
        ahead = [float(pm(**batch)) for batch in list(shard(loader, pm))]
        return one_by_one, ahead, [float(pm(**batch)) for batch in loader]


@pytest.mark.parametrize("shares", [Shares((0.5, 0.25, 0.25)), Shares((0.5, 0.5, 0.0))])
def test_a_model_takes_shares_of_batches(worker_pools: Callable[[int], WorkerPool], shares: Shares) -> None:
    run = classic(SMALL["llama"], "dp", shares)  # which draws nothing
    for one_by_one, ahead, of_wholes in worker_pools(3).run(_losses, run):
        assert len(ahead) == 3
        assert one_by_one == ahead
        assert ahead == pytest.approx(of_wholes, rel=1e-6)
