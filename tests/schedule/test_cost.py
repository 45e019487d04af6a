"""Prices in closed form: rooflines, measured tables, conversions, gathered factors, optimizers, pieces."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lopsided
from lopsided.cluster.cluster import Cluster, Kind, Link, Measured
from lopsided.cluster.collectives import Network
from lopsided.errors import InputError, ProgramError, SharesError
from lopsided.ir.graph import Graph, Node, Value
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, P, Placement, R, S, Shares
from lopsided.models import by_name as models
from lopsided.models import zoo
from lopsided.ops.op import Call
from lopsided.schedule.cost import (
    FREE,
    OPTIMIZERS,
    Affine,
    Costs,
    Scale,
    Transfer,
    conversion,
    cut_of,
    fitted_line,
    optimizer_named,
    rule_cut,
    transfer_s,
)
from lopsided.schedule.flops import call_text
from tests.support import clusters
from tests.support.jobs import book_of

BATCH, WIDE, NARROW = 8, 10, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.down(torch.relu(self.up(x))).view(-1, 2, NARROW)
        return nn.functional.mse_loss(h, y)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return lopsided.capture(Block(), {"x": torch.randn(BATCH, NARROW), "y": torch.randn(BATCH // 2, 2, NARROW)})


def kind(flops: float = 1e3, bytes_per_s: float = 1e18, launch_s: float = 0.5, count: int = 2, **more: Any) -> Kind:
    return clusters.kind(count=count, speed=flops, bytes_per_s=bytes_per_s, memory=2**30, launch_s=launch_s, **more)


def cluster(*kinds: Kind) -> Cluster:
    return clusters.cluster(*kinds or (kind(),), link=Link(1e-3, 1e9))


def node_of(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if node.name == name)


def priced(graph: Graph, where: Cluster, optimizer: str = "sgd") -> Costs:
    return Costs(graph, where, optimizer_named(optimizer))


# Seconds of an op

FLOPS = 2 * BATCH * WIDE * NARROW
BY_ROWS = Rule((S(0), R, R), (S(0),))
WHOLE = Rule((I, I, I), (I,))
BY_FACTORS = Rule((S(0), I, I), (S(0),), "sfb")


def test_what_computes_scales_with_its_piece(graph: Graph) -> None:
    cost = priced(graph, cluster()).op(node_of(graph, "linear_1"), BY_ROWS)
    assert cost.forward == (Affine(0.5, FLOPS / 1e3),)
    # Gradients of the input and of the weight, three kernels with the bias.
    assert cost.backward == (Affine(1.5, 2 * FLOPS / 1e3),)
    assert cost.cut == ("", BATCH)
    assert (cost.talks, cost.back_talks) == ((), ())


def test_what_is_not_cut_does_not_scale(graph: Graph) -> None:
    cost = priced(graph, cluster()).op(node_of(graph, "linear_1"), WHOLE)
    assert cost.forward == (Affine(0.5 + FLOPS / 1e3, 0.0),)
    assert cost.cut is None


def test_what_moves_bytes_reads_whole_weights_and_pieces_of_the_rest(graph: Graph) -> None:
    cost = priced(graph, cluster(kind(flops=1e18, bytes_per_s=1e3))).op(node_of(graph, "linear_1"), BY_ROWS)
    weights, rows = 4 * (NARROW * WIDE + NARROW), 4 * BATCH * (NARROW + WIDE)
    assert cost.forward == (Affine(0.5 + weights / 1e3, rows / 1e3),)


def test_the_side_of_the_roof_is_decided_at_equal_shares(graph: Graph) -> None:
    weights, rows = 4 * (NARROW * WIDE + NARROW), 4 * BATCH * (NARROW + WIDE)
    for devices in (1, 2, 1000):
        even = 1 / devices
        flops_per_s = 2.0
        found = priced(graph, cluster(kind(flops_per_s, 1.0, 0.0, devices))).op(node_of(graph, "linear_1"), BY_ROWS)
        computing, moving = FLOPS * even / flops_per_s, weights + rows * even
        assert found.forward[0].at(even) == pytest.approx(max(computing, moving))


def test_the_side_of_the_roof_is_decided_at_shares_by_speed(graph: Graph) -> None:
    """One device that is nearly all of a cluster is bound by arithmetic, as if alone; 63 slow ones by bytes."""
    weights, rows = 4 * (NARROW * WIDE + NARROW), 4 * BATCH * (NARROW + WIDE)
    speed = 1e9 * FLOPS / (weights + rows) / 2
    both = cluster(kind(speed, 1e9, 0.0, 1), kind(speed / 1e6, 1e3, 0.0, 63))
    fast, slow = priced(graph, both).op(node_of(graph, "linear_1"), BY_ROWS).forward
    assert fast == Affine(0.0, FLOPS / speed)
    assert slow.constant > 0


def test_each_kind_has_its_price(graph: Graph) -> None:
    slow, fast = priced(graph, cluster(kind(1e3), kind(2e3))).op(node_of(graph, "linear_1"), BY_ROWS).forward
    assert slow.slope == 2 * fast.slope


def test_views_are_free(graph: Graph) -> None:
    cost = priced(graph, cluster()).op(node_of(graph, "view"), Rule((S(0, unit=2),), (S(0),)))
    assert cost.forward == cost.backward == (FREE,)


def test_no_gradient_no_backward(graph: Graph) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    frozen = lopsided.capture(model, torch.randn(3, 4), loss_fn=lambda out, batch: out.sum())
    costs = priced(frozen, cluster())
    first, second = (costs.op(node, WHOLE) for node in frozen.nodes if "linear" in node.name)
    assert first.backward == (FREE,)
    # Nor is the gradient of the second one's input computed: only its weight's, and its bias's.
    assert second.backward == (Affine(2 * 0.5 + 2 * 3 * 4 * 4 / 1e3, 0.0),)


def test_repeated_layers_are_priced_once() -> None:
    model, batch = models.load("mlp:layers=6,width=24,classes=7,batch=7")
    deep = lopsided.capture(model, batch)
    costs = priced(deep, cluster())
    inner = [node for node in deep.nodes if "linear" in node.name and node.results[0].shape == (7, 24)][1:]
    assert len(inner) > 2
    assert len({id(costs.op(node, BY_ROWS)) for node in inner}) == 1
    assert costs.op(inner[0], BY_ROWS) is not costs.op(inner[0], BY_FACTORS)


@pytest.mark.parametrize("name", ["mlp", "vgg19", "gpt2", "bert-moe"])
def test_every_rule_of_a_model_has_a_price(name: str) -> None:
    book = book_of(zoo.SMALL[name])
    costs = priced(book.graph, cluster(kind(), kind(3e3)))
    for node in book.graph.nodes:
        for rule in book.rules[node.name]:
            cost = costs.op(node, rule)
            for affine in (*cost.forward, *cost.backward):
                assert 0 <= affine.constant < math.inf
                assert 0 <= affine.slope < math.inf
            assert all(talk.whole_bytes > 0 and not talk.hides for talk in (*cost.talks, *cost.back_talks))
            assert not any(talk.cuts and talk.collective == "all_reduce" for talk in (*cost.talks, *cost.back_talks))


# Gathered factors


def test_gathered_factors_cost_whole_gradients_and_two_gathers(graph: Graph) -> None:
    cost = priced(graph, cluster()).op(node_of(graph, "linear_1"), BY_FACTORS)
    plain = priced(graph, cluster()).op(node_of(graph, "linear_1"), BY_ROWS)
    assert cost.forward == plain.forward
    (backward,) = cost.backward
    assert backward.slope == pytest.approx(FLOPS / 1e3)  # the input's gradient, by pieces
    assert backward.constant == pytest.approx(1.5 + FLOPS / 1e3)  # the weight's, whole, and all launches
    x, dy = cost.back_talks
    assert (x.collective, x.whole_bytes, x.cuts) == ("all_gather", 4 * BATCH * WIDE, (("", BATCH),))
    assert (dy.collective, dy.whole_bytes, dy.cuts) == ("all_gather", 4 * BATCH * NARROW, (("", BATCH),))
    assert cost.talks == ()


def test_only_factors_are_gathered(graph: Graph) -> None:
    """Columns cut: the input's gradient needs the weight and dy, not the bias."""
    rule = Rule((I, S(0), S(0)), (S(1),), "sfb")
    cost = priced(graph, cluster()).op(node_of(graph, "linear_1"), rule)
    assert [talk.whole_bytes for talk in cost.back_talks] == [4 * NARROW * WIDE, 4 * BATCH * NARROW]


def test_talking_rules_send_what_their_implementation_asks() -> None:
    book = book_of(zoo.SMALL["mlp"])
    loss = book.graph.nodes[-1]
    rule = next(rule for rule in book.rules[loss.name] if rule.how == "vocabulary")
    cost = priced(book.graph, cluster()).op(loss, rule)
    assert {talk.collective for talk in cost.talks} == {"all_reduce"}
    assert all(talk.whole_bytes <= 4 * 7 for talk in cost.talks)  # a number a row
    assert cost.cut == ("", 7)
    plain = priced(book.graph, cluster()).op(loss, Rule((I, I), (I,)))
    assert (plain.talks, plain.back_talks) == ((), ())


# Measured seconds


def test_measured_seconds_take_the_place_of_the_roofline(graph: Graph) -> None:
    node = node_of(graph, "linear_1")
    table = Measured(call_text(node, graph.values), ((0.5, 3.0), (1.0, 5.0)), ((0.5, 6.0), (1.0, 10.0)))
    where = cluster(kind(measured=(table,)), kind())
    costs = priced(graph, where)
    assert costs.op(node, BY_ROWS).forward[0] == Affine(1.0, 4.0)
    assert costs.op(node, BY_ROWS).backward[0] == Affine(2.0, 8.0)
    assert costs.op(node, WHOLE).forward[0] == Affine(5.0, 0.0)
    assert costs.op(node, BY_ROWS).forward[1] == Affine(0.5, FLOPS / 1e3)
    # Half of the backward flops are the weight's: they take half of the whole's seconds.
    assert costs.op(node, BY_FACTORS).backward[0] == Affine(1.0 + 5.0, 4.0)
    relu = node_of(graph, "relu")
    assert costs.op(relu, Rule((S(0),), (S(0),))).forward[0] == costs.op(relu, Rule((S(0),), (S(0),))).forward[1]


def test_without_a_measured_backward_the_roofline_fills_the_gap(graph: Graph) -> None:
    node = node_of(graph, "linear_1")
    table = Measured(call_text(node, graph.values), ((1.0, 5.0),))
    cost = priced(graph, cluster(kind(measured=(table,)))).op(node, BY_ROWS)
    assert cost.forward == (Affine(0.0, 5.0),)
    assert cost.backward == (Affine(1.5, 2 * FLOPS / 1e3),)


@given(
    st.lists(st.tuples(st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0]), st.floats(0, 10)), min_size=1, max_size=6),
    st.floats(0, 10),
    st.floats(0, 20),
)
def test_no_legal_line_fits_better(points: list[tuple[float, float]], constant: float, slope: float) -> None:
    def error(affine: Affine) -> float:
        return sum((affine.at(x) - y) ** 2 for x, y in points)

    fitted = fitted_line(points)
    assert fitted.constant >= 0
    assert fitted.slope >= 0
    assert error(fitted) <= error(Affine(constant, slope)) + 1e-9


# Conversions

NOTHING = ""
AR, AG, RS, AA = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
TABLE = {
    (I, R): (NOTHING, AR),
    (I, S(0)): (NOTHING, AG),
    (I, P): (NOTHING, NOTHING),
    (R, I): (NOTHING, NOTHING),
    (R, S(0)): (NOTHING, NOTHING),
    (R, P): (NOTHING, NOTHING),
    (S(0), I): (AG, NOTHING),
    (S(0), R): (AG, RS),
    (S(0), S(1)): (AA, AA),
    (S(0), S(0, by="state")): (AA, AA),
    (S(0), P): (NOTHING, NOTHING),
    (P, I): (AR, NOTHING),
    (P, R): (AR, AR),
    (P, S(0)): (RS, AG),
}


@pytest.mark.parametrize(("source", "to"), TABLE)
def test_conversions_send_what_the_algebra_says(source: Placement, to: Placement) -> None:
    value = Value("v", (4, 6), "bf16", True)
    sent = [transfer.collective if transfer else NOTHING for transfer in conversion(value, source, to)]
    assert tuple(sent) == TABLE[source, to]
    cuts = tuple(c for c in (cut_of(source, (4, 6)), cut_of(to, (4, 6))) if c)
    for transfer in conversion(value, source, to):
        if transfer is not None:
            assert transfer.whole_bytes == 2 * 4 * 6
            assert set(transfer.cuts) == set(cuts)
            assert not transfer.hides
    assert conversion(Value("v", (4, 6), "bf16"), source, to)[1] is None


def test_a_transfer_takes_its_cheapest_way() -> None:
    costs = cluster(kind(count=4))
    scale = Scale(costs, (0.97, 0.01, 0.01, 0.01))
    network = Network(costs)
    transfer = Transfer("w", "all_gather", 10**9, (("", 100),))
    assert scale.largest(transfer.cuts) == pytest.approx(4 * 0.97)
    wanted = min(way.seconds(10**9, 4 * 0.97) for way in network.ways("all_gather"))
    assert transfer_s(transfer, network, scale) == pytest.approx(wanted)


# Optimizers


def test_updates_are_bound_by_memory(graph: Graph) -> None:
    weight = next(leaf for leaf in graph.leaves if leaf.target == "up.weight")
    size = weight.value.bytes
    for name, passes in (("sgd", 3), ("momentum", 5), ("adamw", 7)):
        costs = priced(graph, cluster(kind(bytes_per_s=100.0, launch_s=30.0)), name)
        assert costs.update(weight, S(0)) == (Affine(1.0, passes * size / 100),)
        assert costs.update(weight, I) == (Affine(1.0 + passes * size / 100, 0.0),)
    inputs = next(leaf for leaf in graph.leaves if leaf.kind == "input")
    assert priced(graph, cluster()).update(inputs, I) == (FREE,)


def test_what_optimizers_keep() -> None:
    kept = {name: optimizer.state for name, optimizer in OPTIMIZERS.items()}
    assert kept == {
        "sgd": 0,
        "momentum": 1,
        "adam": 2,
        "adamw": 2,
        "adagrad": 1,
        "rmsprop": 1,
        "lion": 1,
        "adafactor": 0,
    }


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match="there is no optimizer 'adan'") as refused:
        optimizer_named("adan")
    assert "adamw" in refused.value.do


# Pieces


def test_fractions_are_those_of_the_largest_piece_of_a_kind() -> None:
    where = cluster(kind(count=2), kind(count=1))
    shares = Shares((0.4, 0.4, 0.2), named=(("state", (0.1, 0.2, 0.7)),), cuts=(("", 6, (3, 1, 2)),))
    scale = Scale(where, shares)
    assert scale.fractions(None) == (1.0, 1.0)
    assert scale.fractions(("", 10)) == (0.4, 0.2)
    assert scale.fractions(("", 7)) == (3 / 7, 1 / 7)
    assert scale.expected(("", 7)) == (0.4, 0.2)
    assert scale.fractions(("", 6)) == (3 / 6, 2 / 6)
    assert scale.fractions(("state", 10)) == (0.2, 0.7)
    assert scale.largest(()) == 1.0
    assert scale.largest((("", 10), ("state", 10))) == pytest.approx(3 * 0.7)


def test_equal_pieces_have_no_skew() -> None:
    scale = Scale(cluster(kind(count=4)), (0.25,) * 4)
    assert scale.largest((("", 8),)) == 1.0


def test_shares_for_other_devices_are_refused() -> None:
    with pytest.raises(SharesError, match="there are 3 shares for 2 devices"):
        Scale(cluster(), (0.5, 0.25, 0.25))


def test_a_rule_cuts_one_index(graph: Graph) -> None:
    node = node_of(graph, "linear_1")
    call = Call(node, tuple(graph.values[name] for name in node.operands))
    assert rule_cut(call, WHOLE) is None
    with pytest.raises(ProgramError, match="cuts lengths 6, 8 as one"):
        rule_cut(call, Rule((S(0), S(0), R), (S(0),)))
