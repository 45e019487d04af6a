"""What the search adds up: against the costs it is made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster_file import load_cluster
from lopsided.ir.graph import Graph, Leaf
from lopsided.ir.placement import I, P, R, S, Shares
from lopsided.ops.derive import derive_rules
from lopsided.planner.search_cost import Hidden, SharePrices
from lopsided.schedule.cost import Costs, Scale, conversion, optimizer_named, transfer_s
from lopsided.schedule.decisions import BUCKET_BYTES

HAP = load_cluster("hap-64")
SHARES = Shares((1 / 64,) * 64)


@pytest.fixture(scope="module")
def graph() -> Graph:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big, self.small = nn.Linear(4096, 4096), nn.LayerNorm(4096)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.small(self.big(x))).sum()

    with torch.device("meta"):
        return capture(Net(), {"x": torch.randn(128, 4096)})


@pytest.fixture(scope="module")
def costs(graph: Graph) -> Costs:
    return Costs(graph, HAP, optimizer_named("adamw"))


def leaf_of(graph: Graph, target: str) -> Leaf:
    return next(leaf for leaf in graph.parameters if leaf.target == target)


def test_a_rule_costs_its_slowest_kind_forward_and_backward(graph: Graph, costs: Costs) -> None:
    prices = SharePrices(costs, Scale(HAP, SHARES))
    node = graph.nodes[0]
    rule = next(r for r in derive_rules(graph).rules[node.name] if r.gives == (S(0),) and r.how == "plain")
    cost = costs.op(node, rule)
    each = [there.at(1 / 64) + back.at(1 / 64) for there, back in zip(cost.forward, cost.backward, strict=True)]
    assert prices.rule(node, rule) == pytest.approx(max(each))
    assert each[1] > each[0]


def test_a_conversion_is_paid_both_ways(graph: Graph, costs: Costs) -> None:
    prices, scale = SharePrices(costs, Scale(HAP, SHARES)), Scale(HAP, SHARES)
    value = graph.nodes[0].results[0]
    there, back = conversion(value, S(0), R)
    assert there is not None
    assert back is not None
    both = transfer_s(there, costs.network, scale) + transfer_s(back, costs.network, scale)
    assert prices.convert(value, S(0), R) == pytest.approx(both)
    assert prices.convert(value, R, S(0)) == prices.convert(value, R, I) == prices.convert(value, I, P) == 0


def test_what_hides_costs_the_rest(graph: Graph, costs: Costs) -> None:
    leaf, scale = leaf_of(graph, "big.weight"), Scale(HAP, SHARES)
    full = SharePrices(costs, scale)
    ahead = SharePrices(costs, scale, hidden=Hidden(ahead=1.0))
    after = SharePrices(costs, scale, hidden=Hidden(after=0.5))
    gathered, summed = full.fetch(leaf, S(0), R), full.fetch(leaf, I, R)
    assert 0 < ahead.fetch(leaf, S(0), R) < gathered
    assert ahead.fetch(leaf, I, R) == summed
    assert after.fetch(leaf, I, R) == pytest.approx(summed / 2)
    again = SharePrices(costs, scale, regather=True)
    there, _ = conversion(leaf.value, S(0), R)
    assert there is not None
    assert again.fetch(leaf, S(0), R) == pytest.approx(gathered + transfer_s(there, costs.network, scale))


def test_small_parameters_share_a_latency(graph: Graph, costs: Costs) -> None:
    leaf, scale = leaf_of(graph, "small.weight"), Scale(HAP, SHARES)
    _, back = conversion(leaf.value, I, R)
    assert back is not None
    alone = transfer_s(back, costs.network, scale)
    together = SharePrices(costs, scale).fetch(leaf, I, R)
    way = costs.network.best("all_reduce", BUCKET_BYTES)
    assert together == pytest.approx(alone - way.latency_s * (1 - leaf.value.bytes / BUCKET_BYTES))


def test_held_bytes_cost_what_memory_is_worth(graph: Graph, costs: Costs) -> None:
    leaf, scale = leaf_of(graph, "big.weight"), Scale(HAP, SHARES)
    free, dear = SharePrices(costs, scale), SharePrices(costs, scale, byte_s=(1e-9, 0.0))
    # Parameter, gradient and two copies of state, on the first kind only.
    whole = 4 * leaf.value.bytes * 1e-9
    assert dear.store(leaf, I) - free.store(leaf, I) == pytest.approx(whole)
    assert dear.store(leaf, S(0)) - free.store(leaf, S(0)) == pytest.approx(whole / 64)
    gathered = dear.fetch(leaf, S(0), R) - free.fetch(leaf, S(0), R)
    assert gathered == pytest.approx(leaf.value.bytes * 1e-9)
    assert dear.fetch(leaf, S(0), P) - free.fetch(leaf, S(0), P) == pytest.approx(gathered)
    node = graph.nodes[0]
    cut, kept = (
        next(r for r in derive_rules(graph).rules[node.name] if r.gives == (g,) and r.how == "plain") for g in (S(0), I)
    )
    saved = [dear.rule(node, r) - free.rule(node, r) for r in (cut, kept)]
    assert saved[1] == pytest.approx(64 * saved[0])


def test_only_cheap_nodes_are_cheap(graph: Graph, costs: Costs) -> None:
    prices = SharePrices(costs, Scale(HAP, SHARES))
    by_op = {node.op: prices.is_cheap(node) for node in graph.nodes}
    assert not by_op["aten.linear.default"]
    assert by_op["aten.relu.default"]
