"""The strategies everyone knows, written by rule: what they store, what they send, and that they are right."""

from __future__ import annotations

import pytest
import torch

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster_file import load_cluster
from lopsided.ir.graph import Graph
from lopsided.ir.op_call import TOLERANCE, in_float64
from lopsided.ir.placement import I, Placement, R, S
from lopsided.ir.program import Program, RuleBook, check_program, one_device
from lopsided.models import zoo
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import batch_dims, data_parallel, leaves_batch_whole, stored_cut
from lopsided.planner.search import search
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.rounds import batch_size
from lopsided.verification.simulator import simulate
from lopsided.verification.verifier import compare
from tests.support.schedules import lay_out

EIGHT = load_cluster("equal-8")


def prices_of(graph: Graph) -> SharePrices:
    return SharePrices(Costs(graph, EIGHT, optimizer_named("adamw")), Scale(EIGHT, (1 / 8,) * 8))


def dp(book: RuleBook) -> Program:
    return data_parallel(book, prices_of(book.graph))


@pytest.mark.parametrize("name", [*zoo.SMALL])
def test_data_parallelism_and_zero_compute_what_one_device_computes(name: str) -> None:
    module, batch = load(zoo.SMALL[name])
    graph = in_float64(capture(module, batch))
    book = derive_rules(graph)
    expected = simulate(one_device(graph), module, batch, (1.0,))
    for program in (dp(book), stored_cut(dp(book))):
        check_program(program, book)
        error, where = compare(simulate(program, module, batch, (0.5, 0.3, 0.2)), expected)
        assert error <= TOLERANCE, where


@pytest.fixture(scope="module")
def gpt() -> RuleBook:
    with torch.device("meta"):
        return derive_rules(capture(*load("gpt2:layers=2", batch=16)))


def test_data_parallelism_cuts_the_batch_and_sums_every_gradient_once(gpt: RuleBook) -> None:
    program = dp(gpt)
    assert batch_size(gpt.graph) == 16
    stored = dict(program.leaves)
    assert {stored[leaf.value.name] for leaf in gpt.graph.parameters} == {I}
    uses = {to for value, _, to in program.conversions() if value.name in stored and stored[value.name] == I}
    assert uses <= {R}
    schedule = lay_out(program, Costs(gpt.graph, EIGHT, optimizer_named("adamw")))
    hiding = [t for t in schedule.transfers if t.hides]
    assert {t.collective for t in hiding} == {"all_reduce"}
    assert sum(t.whole_bytes for t in hiding) == sum(leaf.value.bytes for leaf in gpt.graph.parameters)


def test_zero_gathers_every_parameter_and_scatters_its_gradient(gpt: RuleBook) -> None:
    program = stored_cut(dp(gpt))
    total = sum(leaf.value.bytes for leaf in gpt.graph.parameters)
    costs = Costs(gpt.graph, EIGHT, optimizer_named("adamw"))
    sent: dict[str, int] = {}
    for transfer in lay_out(program, costs, regather=True).transfers:
        if transfer.hides:
            sent[transfer.collective] = sent.get(transfer.collective, 0) + transfer.whole_bytes
    assert sent["reduce_scatter"] == total
    # What the backward pass does not look at, such as biases, is not gathered again.
    assert total < sent["all_gather"] <= 2 * total
    kept = lay_out(program, costs, regather=False)
    assert sum(t.whole_bytes for t in kept.transfers if t.collective == "all_gather") == total
    # Nothing but the loss, a scalar, is waited for.
    assert sum(t.whole_bytes for t in kept.transfers if not t.hides) <= 64


def test_some_parameters_can_be_stored_cut(gpt: RuleBook) -> None:
    one = gpt.graph.parameters[0].value.name
    program = stored_cut(dp(gpt), {one})
    check_program(program, gpt)
    cut = {name for name, placement in program.leaves if placement.by == "state"}
    assert cut == {one}


def test_tensor_parallelism_never_cuts_the_batch(gpt: RuleBook) -> None:
    dims = batch_dims(dp(gpt))
    assert all(dims[leaf.value.name] == 0 for leaf in gpt.graph.leaves if leaf.kind == "input")
    found = search(gpt, prices_of(gpt.graph), allowed=lambda node, rule: leaves_batch_whole(dims, node, rule))
    placed: list[tuple[str, Placement]] = []
    for step in found.program.steps:
        placed += [(value.name, give) for value, give in zip(step.node.results, step.rule.gives, strict=True)]
    assert not any(p.is_shard and dims.get(name) == p.dim for name, p in placed)
    assert any(placement.is_shard for _, placement in found.program.leaves)


def test_an_input_of_another_length_is_not_cut() -> None:
    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(5, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return ((self.layer(x) - y) * weight).square().sum()

    book = derive_rules(capture(Weighted(), {"x": torch.randn(8, 5), "y": torch.randn(8, 3), "weight": torch.randn(3)}))
    assert {leaf.target: p for leaf, (_, p) in zip(book.graph.leaves, dp(book).leaves, strict=True)} == {
        "layer.weight": I,
        "layer.bias": I,
        "x": S(0),
        "y": S(0),
        "weight": I,
    }
