"""A distribution of batches: few lengths that stand for all, one storage for them, and one device's losses."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import BatchError, PlanError
from lopsided.ir.placement import I, S, Shares
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.planner import plan_graph
from lopsided.planner.same_storage import StoredProgram, plan_for_shapes, step_on, stored_program
from lopsided.runtime.calls.shapes import _fewest_filled, at_length, lengths_of
from lopsided.schedule.lower import lower
from lopsided.verification.verifier import random_program
from tests.support.jobs import cluster_of, plan_of

SPEC = "gpt2:layers=1,width=16,heads=2,vocab=31,dropout=0,batch=6,seq={}"


def batch_of(length: int) -> dict[str, Tensor]:
    return {name: torch.full((6, length), length) for name in ("input_ids", "labels")}


def test_lengths_are_those_that_fill_up_least() -> None:
    counts = Counter({3: 5, 4: 1, 9: 7, 10: 2, 20: 1})
    best = min(
        (sum(n * min(top for top in tops if top >= length) for length, n in counts.items()), tops)
        for few in (1, 2, 3)
        for rest in itertools.combinations(sorted(counts)[:-1], few - 1)
        for tops in [(*rest, 20)]
    )
    assert _fewest_filled(counts, 3) == best[1]
    assert _fewest_filled(counts, 9) == (3, 4, 9, 10, 20)


def test_how_often_batches_are_filled_up_to_each() -> None:
    found = lengths_of(batch_of(8), [batch_of(n) for n in (2, 2, 3, 8)], most=2)
    assert found.lengths == (3, 8)
    assert found.often == (0.75, 0.25)
    assert found.dims == (("input_ids", 1), ("labels", 1))
    longer = at_length(batch_of(3), 5, found.dims)
    assert {name: tuple(part.shape) for name, part in longer.items()} == {"input_ids": (6, 5), "labels": (6, 5)}  # type: ignore[attr-defined]


def test_batches_that_are_alike_have_no_lengths() -> None:
    assert lengths_of(batch_of(8), [batch_of(8)]).lengths == ()


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "there are no batches"),
        ([{"input_ids": torch.ones(6, 4)}], "not like the example"),
        ([{"input_ids": torch.ones(6, 4), "labels": torch.ones(6, 5)}, batch_of(6)], "several lengths"),
    ],
)
def test_what_is_no_distribution_of_lengths_is_refused(batches: list[object], words: str) -> None:
    with pytest.raises(BatchError, match=words):
        lengths_of(batch_of(8), batches)


def test_the_storage_is_the_best_for_all_together() -> None:
    """No shape's own plan is better for the distribution, and the plan is one of the first graph."""
    graphs, often, where = [capture(*load(SPEC.format(n))) for n in (12, 4)], (0.5, 0.5), cluster_of(3)
    plan = plan_for_shapes(graphs, often, where)
    assert plan.graph is graphs[0]

    def expected(offer: lopsided.Plan) -> float:
        return sum(part * step_on(graph, offer) for graph, part in zip(graphs, often, strict=True))

    assert expected(plan) <= min(expected(plan_graph(graph, where)) for graph in graphs) * (1 + 1e-9)
    with pytest.raises(PlanError, match="every shape needs"):
        plan_for_shapes(graphs, (1.0,), where)


def trained() -> tuple[list[float], list[float], int]:
    """Losses on processes and on one device, and how many programs were made."""
    torch.manual_seed(0)
    model, alone = load(SPEC.format(12))[0], load(SPEC.format(12))[0]
    alone.load_state_dict(model.state_dict())
    texts = [torch.randint(0, 31, (6, length)) for length in (3, 4, 5, 6, 8, 9, 11, 12)]
    batches = [{"input_ids": text, "labels": text} for text in texts]
    pm = lopsided.parallelize(model, batches[-1], cluster=cluster_of(3), batches=batches)
    losses = [float(pm(**batch)) for batch in lopsided.shard(batches, pm, pad={"input_ids": 0, "labels": -100})]
    made = [program for programs in pm._programs._calls.values() for program in programs]
    for one in made:
        # What was predicted for a length is what runs: the program, the size of buckets, what is gathered again.
        planned = StoredProgram(pm.plan.program, pm.plan.decisions)
        chosen = planned if one.program == planned.program else stored_program(one.program.graph, pm.plan)
        assert one.executor.schedule == lower(chosen.program, chosen.decisions)
    return losses, [float(alone(**batch)) for batch in batches], len(made)


def test_every_length_has_one_devices_loss_and_programs_are_few(worker_pools: Callable[[int], WorkerPool]) -> None:
    for losses, expected, programs in worker_pools(3).run(trained):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert programs == 5


class Two(nn.Module):
    """Two inputs that need not be cut alike."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.one(x).square().sum() + self.other(y).square().sum()


def losses_of_short_batches() -> tuple[list[float], list[float]]:
    """On processes, where x is cut in rows and y is whole everywhere, and on one device."""
    torch.manual_seed(0)
    model, alone = Two(), Two()
    alone.load_state_dict(model.state_dict())
    whole = {name: torch.randn(7, 3) for name in ("x", "y")}
    batches = [{name: part[rows] for name, part in whole.items()} for rows in (slice(6), slice(6, 7), slice(2))]
    book = derive_rules(capture(model, batches[0]))
    drawn = (random_program(book, random.Random(seed)) for seed in itertools.count())
    program = next(one for one in drawn if (dict(one.leaves)["x"], dict(one.leaves)["y"]) == (S(0), I))
    pm = lopsided.parallelize(model, batches[0], plan_of(program, Shares((0.5, 0.3, 0.2))), quiet=True)
    return [float(pm(**one)) for one in lopsided.shard(batches, pm)], [float(alone(**one)) for one in batches]


def test_a_batch_of_one_row_that_all_have_whole_is_not_one_processs_rows(
    worker_pools: Callable[[int], WorkerPool],
) -> None:
    for losses, expected in worker_pools(3).run(losses_of_short_batches):
        assert losses == pytest.approx(expected, rel=1e-5)
