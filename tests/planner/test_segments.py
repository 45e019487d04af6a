"""Parts of a model with shares of their own: the same result, and never a slower step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Link
from lopsided.errors import ProgramError
from lopsided.ir.graph import Graph
from lopsided.ir.op_call import TOLERANCE, in_float64
from lopsided.ir.placement import S, Shares
from lopsided.ir.program import Program, check_program, one_device, parse_program
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.planner import plan_graph, predict
from lopsided.planner.segments import found_segments, given_segments
from lopsided.verification.simulator import simulate
from lopsided.verification.verifier import compare
from tests.support.clusters import cluster, kind


def unlike() -> Cluster:
    """One kind is good at arithmetic, the other at moving bytes: no one pair of shares suits all parts of a model."""
    pair = {"count": 2, "launch_s": 1e-6}
    strong, quick = kind("a", speed=20e12, bytes_per_s=300e9, **pair), kind("b", speed=5e12, bytes_per_s=900e9, **pair)
    both = (replace(one, flops_per_s=(*one.flops_per_s, ("f64", one.speed))) for one in (strong, quick))
    return cluster(*both, link=Link(1e-6, 2e10))


def names_in(program: Program) -> set[str]:
    placed = [p for step in program.steps for p in (*step.rule.needs, *step.rule.gives)]
    return {p.by for p in placed if p.is_shard}


TWO_CUTS = """
%up_weight = parameter "up.weight" : S0
%up_bias = parameter "up.bias" : S0
%down_weight = parameter "down.weight" : I
%down_bias = parameter "down.bias" : I
%x = input "x" : I
%linear = aten.linear.default(%x: I→R, %up_weight: S0, %up_bias: S0) : S1
%relu = aten.relu.default(%linear: S1) : S1
%linear_1 = aten.linear.default(%relu: S1→S0, %down_weight: I→R, %down_bias: I→R) : S0
%square = aten.square.default(%linear_1: S0) : S0
%sum_1 = aten.sum.default(%square: S0) : P
return %sum_1: P→I
"""


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 9), torch.nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().sum()


@pytest.fixture(scope="module")
def two() -> tuple[Two, dict[str, torch.Tensor], Graph]:
    torch.manual_seed(0)
    model, batch = Two().double(), {"x": torch.randn(7, 6).double()}
    return model, batch, capture(model, batch)


def test_what_no_rule_ties_together_gets_shares_of_its_own(two: tuple[Two, dict[str, torch.Tensor], Graph]) -> None:
    model, batch, graph = two
    program = parse_program(TWO_CUTS, graph)
    weights = {"linear": 10.0, "relu": 1.0}
    apart = found_segments(program, lambda step: weights.get(step.node.name, 0.5))
    check_program(apart, derive_rules(graph))
    by_node = {step.node.name: step.rule.gives[0].by for step in apart.steps}
    assert by_node == {"linear": "", "relu": "", "linear_1": "part1", "square": "part1", "sum_1": ""}
    assert dict(apart.leaves)["up_weight"] == S(0)
    shares = Shares((0.5, 0.3, 0.2), named=(("part1", (0.1, 0.2, 0.7)),))
    error, where = compare(simulate(apart, model, batch, shares), simulate(one_device(graph), model, batch, (1.0,)))
    assert error <= TOLERANCE, where


def test_a_program_with_one_cut_has_one_segment(two: tuple[Two, dict[str, torch.Tensor], Graph]) -> None:
    _, _, graph = two
    program = one_device(graph)
    assert found_segments(program, lambda step: 1.0) == program


@pytest.mark.parametrize(("spec", "batch"), [("mlp", 64), ("vgg19", 256)])
def test_segments_are_found_where_they_pay(spec: str, batch: int) -> None:
    with torch.device("meta"):
        graph = capture(*load(spec, batch=batch))
    made = plan_graph(graph, unlike())
    assert len(names_in(made.program) - {"state"}) > 1
    # All parts cut by the work shares take longer: rounding aside, that is one choice of the linear program.
    alike = Shares(made.shares.work, tuple(named for named in made.shares.named if named[0] == "state"))
    assert made.step_s < predict(made.program, alike, made.on, made.optimizer, made.regather, made.bucket_bytes)[0]


def test_a_segmented_plan_computes_what_one_device_computes() -> None:
    module, batch = load("mlp:width=48,batch=12")
    graph = in_float64(capture(module, batch))
    book = given_segments(derive_rules(graph), ["hidden.0", "hidden.2"])
    assert {p.by for rules in book.rules.values() for rule in rules for p in rule.gives if p.is_shard} > {
        "",
        "segment1",
    }
    made = plan_graph(graph, unlike(), segments=["hidden.0", "hidden.2"])
    expected = simulate(one_device(graph), module, batch, (1.0,))
    error, where = compare(simulate(made.program, module, batch, made.shares), expected)
    assert error <= TOLERANCE, where


def test_a_rule_cut_by_two_names_is_refused(two: tuple[Two, dict[str, torch.Tensor], Graph]) -> None:
    _, _, graph = two
    text = TWO_CUTS.replace("%up_weight: S0,", "%up_weight: S0→S0@other,")
    with pytest.raises(ProgramError, match="cut by different shares"):
        check_program(parse_program(text, graph), derive_rules(graph))
