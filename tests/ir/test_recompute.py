"""Activation checkpointing: found by capture, kept by every pass, and known to memory, time and prices."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lopsided
from lopsided.capturing.retype import in_dtype
from lopsided.cluster.cluster import Cluster, Link
from lopsided.errors import DoesNotFitError, GraphError
from lopsided.ir.graph import Graph, reruns
from lopsided.ir.graph_text import parse_graph
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import in_float64
from lopsided.ir.placement import I, R, S
from lopsided.ir.program import Program, parse_program
from lopsided.models import by_name as models
from lopsided.ops.derive import derive_rules
from lopsided.planner.balance import balance
from lopsided.planner.plan_file import load_plan, save_plan
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule import timeline
from lopsided.schedule.cost import Costs, Scale, Transfer, optimizer_named
from lopsided.schedule.critical_path import CriticalPath, FoldedStep
from lopsided.schedule.decisions import Decisions
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, holdings, saved_by
from lopsided.schedule.pricing import Computed
from lopsided.schedule.schedule import Redistribute, nodes_of
from lopsided.verification.verifier import random_program, random_shares
from tests.support import clusters
from tests.support.models import ByHand, example
from tests.support.schedules import held_by, lay_out

# Bound before capture, as `from torch.utils.checkpoint import checkpoint` and transformers do.
checkpoint: Any = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
SGD = optimizer_named("sgd")
BATCH, NARROW, WIDE = 8, 6, 24


def cluster(*counts: int, memory: int = 2**30) -> Cluster:
    figures = {"speed": 1e9, "bytes_per_s": 1e9, "memory": memory, "launch_s": 1e-6}
    made = (clusters.kind(f"k{n}", count=count, **figures) for n, count in enumerate(counts))
    return clusters.cluster(*made, link=Link(1e-5, 1e8))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Blocks(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(NARROW, 1)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        for block in self.blocks:
            x = checkpoint(block, x) if self.checkpointed else block(x)
        return self.head(x).pow(2).sum()


def captured(checkpointed: bool) -> Graph:
    return lopsided.capture(Blocks(checkpointed), {"x": torch.randn(BATCH, NARROW)})


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured(True)


@pytest.fixture(scope="module")
def plain() -> Graph:
    return captured(False)


def regions(graph: Graph) -> list[int]:
    """The numbers along the nodes, each stretch once."""
    return [number for number, _ in itertools.groupby(node.context.recompute for node in graph.nodes)]


def regions_of(forward: Callable[[Any, Tensor], Tensor]) -> list[int]:
    return regions(lopsided.capture(ByHand(forward), {"x": example()}))


# Capture


def test_checkpointed_blocks_are_numbered(graph: Graph, plain: Graph) -> None:
    assert regions(graph) == [0, 1, 2, 0]
    assert [node.source.module for node in graph.nodes if node.context.recompute == 2] == [
        *("blocks.1.up", "blocks.1", "blocks.1.down", "blocks.1")
    ]
    assert regions(plain) == [0]
    assert [node.saved for node in graph.nodes] == [node.saved for node in plain.nodes]


def test_regions_are_part_of_the_text_and_of_the_fingerprint(graph: Graph, plain: Graph) -> None:
    assert "  ; recompute 2  ; saves" in str(graph)
    assert parse_graph(str(graph)) == graph
    assert graph.fingerprint != plain.fingerprint
    without = str(graph).replace("  ; recompute 1", "").replace("  ; recompute 2", "")
    assert parse_graph(without).fingerprint == plain.fingerprint
    with pytest.raises(GraphError, match="whole number"):
        parse_graph(str(graph).replace("recompute 2", "recompute two"))


def test_a_checkpoint_inside_another_belongs_to_it() -> None:
    inner = lambda m: lambda h: checkpoint(m.lin, h).relu()  # noqa: E731
    assert regions_of(lambda m, x: checkpoint(m.lin, checkpoint(inner(m), m.lin(x))).sum()) == [0, 1, 2, 0]


def test_where_no_gradient_is_nothing_is_recomputed() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = checkpoint(m.lin, x)
        return checkpoint(m.lin, h + x).sum()

    assert regions_of(forward) == [0, 1, 0]
    graph = lopsided.capture(ByHand(lambda m, x: m.lin(checkpoint(torch.sin, x)).sum()), {"x": example()})
    assert regions(graph) == [1, 0]
    assert reruns(graph) == {}


def test_a_region_that_nothing_needs_leaves_no_gap() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        checkpoint(m.lin, x)
        return checkpoint(m.lin, x).sum()

    assert regions_of(forward) == [1, 0]


def test_a_view_of_a_region_retaken_outside_is_outside() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.lin(x)
        top = checkpoint(lambda t: h[:1] * 1.0 + t[:1], x)
        view = checkpoint(lambda t: h[:1], x)
        h.mul_(2.0)
        return (view * top).sum()

    assert regions_of(forward)[-1] == 0
    assert regions_of(forward).count(1) == 1


def test_checkpointed_layers_of_transformers() -> None:
    pytest.importorskip("transformers")
    model, batch = models.load("hf:GPT2LMHeadModel")
    inner: Any = model.model
    if hasattr(inner, "activation_checkpointing_enable"):
        inner.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:  # as it was called before transformers 5.23
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert regions(lopsided.capture(model.train(), batch)) == [0, *range(1, len(inner.transformer.h) + 1), 0]
    assert regions(lopsided.capture(model.eval(), batch)) == [0]


def test_other_dtypes_keep_regions(graph: Graph) -> None:
    for other in (in_dtype(graph, "bf16"), in_float64(graph)):
        assert regions(other) == regions(graph)
        assert [v.dtype for v in other.nodes[0].results] != [v.dtype for v in graph.nodes[0].results]


def test_a_graph_does_not_depend_on_the_device_it_was_captured_on() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return (m.lin(x) + torch.arange(x.shape[1], device=x.device)).sum()

    here = lopsided.capture(ByHand(forward), {"x": example()})
    there = lopsided.capture(ByHand(forward).to("meta"), {"x": example().to("meta")})
    assert "device:cpu" in str(here)
    assert here.text(sources=False) == there.text(sources=False)


def test_simulation_is_what_the_model_computes(graph: Graph) -> None:
    torch.manual_seed(0)
    model, batch = Blocks(True).double(), {"x": torch.randn(BATCH, NARROW, dtype=torch.float64)}
    graph = lopsided.capture(model, batch)
    program = random_program(derive_rules(graph), random.Random(1))
    found = lopsided.simulate(program, model, batch, (0.5, 0.3, 0.2))
    model(**batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


# Memory

ROW = 4 * BATCH * NARROW


def test_a_region_keeps_what_it_takes_and_recomputes_the_rest(graph: Graph) -> None:
    held = [h for h in held_by(lopsided.one_device(graph), SGD) if h.use in ("saved", "recomputed")]
    assert [(h.what, h.use, h.bytes) for h in held] == [
        ("x", "saved", ROW),
        ("sin", "saved", ROW),
        ("add", "saved", ROW),
        ("add_1", "saved", ROW),
        ("linear_4", "saved", 4 * BATCH),
        ("relu", "recomputed", 4 * BATCH * WIDE),
    ]


def test_checkpointing_holds_less(graph: Graph, plain: Graph) -> None:
    scale = Scale(cluster(1), (1.0,))
    (with_regions,), (without,) = (bytes_per_kind(held_by(lopsided.one_device(g), SGD), scale) for g in (graph, plain))
    assert without - with_regions == 4 * BATCH * WIDE  # of the other block


def test_a_node_of_a_region_pays_for_what_comes_from_outside(graph: Graph) -> None:
    nodes = {node.name: node for node in graph.nodes}
    up = saved_by(graph, nodes["linear"], Rule((S(0), R, R), (S(0),)))
    assert [(h.what, h.bytes, h.cut) for h in up] == [("sin", ROW, ("", BATCH))]
    assert saved_by(graph, nodes["linear_1"], Rule((S(0), R, R), (S(0),))) == ()
    assert saved_by(graph, nodes["relu"], Rule((I,), (I,))) == ()


def zero(graph: Graph) -> Program:
    """Data parallelism with weights stored cut."""
    text = str(lopsided.one_device(graph)).replace(": I", ": S0")
    for leaf in graph.parameters:
        weight = len(leaf.value.shape) > 1 and leaf.value.shape[0] > 1
        name, stored = f'"{leaf.target}" : S0', "S0" if weight else "I"
        text = text.replace(name, f'"{leaf.target}" : {stored}')
        text = text.replace(f"%{leaf.value.name}: S0", f"%{leaf.value.name}: {stored}→R")
    text = text.replace("= aten.sum.default(%pow_1: S0) : S0", "= aten.sum.default(%pow_1: S0) : P")
    return parse_program(text.replace("return %sum_1: S0", "return %sum_1: P→I"), graph)


@pytest.mark.parametrize("regather", [False, True])
def test_a_region_gathers_again_and_holds_what_it_gathers(graph: Graph, regather: bool) -> None:
    program = zero(graph)
    schedule = lower(program, Decisions(regather=regather))
    takes = [(item, node) for item, node in zip(schedule.backward, nodes_of(schedule.backward), strict=True)]
    again = {node: [item.id] for item, node in takes if isinstance(item, Redistribute) and item.phase == "again"}
    assert {node: [name.removesuffix(" again") for name in names] for node, names in again.items()} == {
        "linear": ["blocks_0_up_weight S0→R"],
        "linear_1": ["blocks_0_down_weight S0→R"],
        "linear_2": ["blocks_1_up_weight S0→R"],
        "linear_3": ["blocks_1_down_weight S0→R"],
    }
    gathered = [h.what for h in holdings(schedule, SGD) if h.use == "gathered"]
    assert gathered == ["blocks_0_up_weight", "blocks_0_down_weight", "blocks_1_up_weight"]


# Time


def texts(items: tuple[Computed | Transfer, ...]) -> list[str]:
    return [item.what if isinstance(item, Transfer) else f"{'∂' * item.backward}{item.node}" for item in items]


def test_a_region_runs_again_before_its_backward_pass(graph: Graph) -> None:
    schedule = lay_out(zero(graph), Costs(graph, cluster(2), SGD))
    backward = [text for text in texts(schedule.backward) if "bias" not in text]
    assert backward[backward.index("∂linear_4") + 2 :] == [
        "blocks_1_up_weight S0→R",
        "linear_2",
        "relu_1",
        "blocks_1_down_weight S0→R",
        "linear_3",
        "add_1",
        "∂add_1",
        "∂linear_3",
        "∂blocks_1_down_weight P→S0",
        "∂relu_1",
        "∂linear_2",
        "∂blocks_1_up_weight P→S0",
        "blocks_0_up_weight S0→R",
        "linear",
        "relu",
        "blocks_0_down_weight S0→R",
        "linear_1",
        "add",
        "∂add",
        "∂linear_1",
        "∂blocks_0_down_weight P→S0",
        "∂relu",
        "∂linear",
        "∂blocks_0_up_weight P→S0",
    ]
    assert [item.backward for item in schedule.forward if isinstance(item, Computed)] == [False] * 12


def test_the_step_is_longer_by_the_forward_pass_of_the_regions(graph: Graph, plain: Graph) -> None:
    on = cluster(1)
    scale = Scale(on, (1.0,))
    costs = Costs(graph, on, SGD)
    longer, shorter = (
        timeline.run(lay_out(lopsided.one_device(g), Costs(g, on, SGD)).priced, costs.network, scale)
        for g in (graph, plain)
    )
    steps = [step for step in lopsided.one_device(graph).steps if step.node.context.recompute]
    again = sum(costs.op(step.node, step.rule).forward[0].at(1.0) for step in steps)
    assert longer.step_s - shorter.step_s == pytest.approx(again, rel=1e-9)
    assert longer.forward_s == pytest.approx(shorter.forward_s, rel=1e-9)


@given(st.integers(0, 10**6))
def test_prices_timeline_and_walk_agree(seed: int) -> None:
    rng, graph = random.Random(seed), captured_once()
    on = cluster(1, 2)
    program = random_program(derive_rules(graph), rng)
    costs, scale = Costs(graph, on, SGD), Scale(on, random_shares(on.devices, rng))
    schedule = lay_out(program, costs, regather=rng.random() < 0.5)
    load, ran = FoldedStep(schedule.priced, costs.network), timeline.run(schedule.priced, costs.network, scale)
    assert CriticalPath(load, scale, load.ways(costs.network, scale)).step_s == pytest.approx(ran.step_s, rel=1e-9)
    prices = SharePrices(costs, scale)
    computed = sum(prices.rule(step.node, step.rule) for step in program.steps)
    assert max(ran.compute_s) <= computed * (1 + 1e-9)


@functools.cache
def captured_once() -> Graph:
    return captured(True)


def test_shares_of_a_recomputing_program_are_the_best(graph: Graph) -> None:
    """Twice the speed gets twice the rows, and the linear program foresees the timeline's step."""
    kinds = clusters.kinds(2e9, 1e9, bytes_per_s=1e18, launch_s=0.0)
    on = clusters.cluster(*kinds, link=Link(0.0, 1e18))
    program, costs = zero(graph), Costs(graph, on, SGD)
    schedule = lay_out(program, costs)
    found = balance(schedule.priced, held_by(program, SGD), on, costs.network, reference=lopsided.Shares((0.5, 0.5)))
    assert found.point.of("")[0] == pytest.approx(2 / 3, abs=0.05)
    ran = timeline.run(schedule.priced, costs.network, Scale(on, found.shares))
    assert found.rounded_s == pytest.approx(ran.step_s, rel=1e-6)


def test_prices_count_twice_what_is_recomputed(graph: Graph, plain: Graph) -> None:
    on = cluster(2)
    scale = Scale(on, (0.5, 0.5))
    twice, once = (SharePrices(Costs(g, on, SGD), scale) for g in (graph, plain))
    rule = Rule((S(0), R, R), (S(0),))
    inside, outside = ([g.nodes[k] for g in (graph, plain)] for k in (1, -3))
    forward = twice.costs.op(inside[0], rule).forward[0].at(0.5)
    assert twice.rule(inside[0], rule) - once.rule(inside[1], rule) == pytest.approx(forward, rel=1e-9)
    assert twice.rule(outside[0], rule) == once.rule(outside[1], rule)
    value = graph.values["relu"]
    there, both = (p.convert(value, S(0), I) for p in (once, twice))
    assert both == pytest.approx(2 * there)  # backward it is a slice


# Plans


def test_a_plan_knows_what_is_recomputed(tmp_path: Any) -> None:
    batch = {"x": torch.randn(64, NARROW)}
    plans = [lopsided.plan(Blocks(checkpointed), batch, cluster(1, 1)) for checkpointed in (True, False)]
    assert plans[0].step_s > plans[1].step_s
    assert max(plans[0].memory_bytes) < max(plans[1].memory_bytes)
    save_plan(plans[0], tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plans[0]


def test_what_does_not_fit_fits_when_it_is_recomputed() -> None:
    batch = {"x": torch.randn(4096, NARROW)}
    (needed,) = lopsided.plan(Blocks(True), batch, cluster(1)).memory_bytes
    tight = cluster(1, memory=int(needed * 1.12))  # not all of it is filled
    assert lopsided.plan(Blocks(True), batch, tight).memory_bytes == (needed,)
    with pytest.raises(DoesNotFitError):
        lopsided.plan(Blocks(False), batch, tight, microbatches=1)
    assert lopsided.plan(Blocks(False), batch, tight).microbatches > 1
