"""Small plans whose every part is known: two layers on three devices of two kinds."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import parse_cluster
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.ir.program import parse_program
from lopsided.planner.plan_data import Baseline, Plan, SearchReport
from lopsided.planner.planner import predict


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.up(x).relu()), y)


DATA_PARALLEL = """\
%up_weight = parameter "up.weight" : I
%up_bias = parameter "up.bias" : I
%down_weight = parameter "down.weight" : I
%down_bias = parameter "down.bias" : I
%x = input "x" : S0
%y = input "y" : S0
%linear = aten.linear.default(%x: S0, %up_weight: I→R, %up_bias: I→R) : S0
%relu = aten.relu.default(%linear: S0) : S0
%linear_1 = aten.linear.default(%relu: S0, %down_weight: I→R, %down_bias: I→R) : S0
%mse_loss = aten.mse_loss.default(%linear_1: S0, %y: S0) : P
return %mse_loss: P→I
"""
ZERO = DATA_PARALLEL.replace('weight" : I', 'weight" : S0@state').replace("weight: I→R", "weight: S0@state→R")

TOML = """\
name = "three"
about = "a large device and two small ones"
[[devices]]
name = "big"
node = "box"
flops_per_s = { f32 = 2e12 }
bytes_per_s = 9e11
memory = "8 GiB"
[[devices]]
name = "small"
node = "box"
count = 2
flops_per_s = { f32 = 1e12 }
bytes_per_s = 4e11
memory = "4 GiB"
[links.within]
latency_s = 1e-5
bytes_per_s = 1e10
"""


@functools.cache
def graph() -> Graph:
    return capture(Block(), {"x": torch.randn(70, 6), "y": torch.randn(70, 6)})


@functools.cache
def cluster() -> Cluster:
    return parse_cluster(TOML)


SHARES = Shares((0.5, 0.25, 0.25), named=(("state", (0.2, 0.4, 0.4)),), cuts=(("", 70, (36, 17, 17)),))


def plan_of(text: str = DATA_PARALLEL, shares: Shares = SHARES, *, regather: bool = False) -> Plan:
    program = parse_program(text, graph())
    step_s, breakdown, memory = predict(program, shares, cluster(), "adamw", regather)
    return Plan(
        cluster=cluster(),
        on=cluster(),
        program=program,
        shares=shares,
        optimizer="adamw",
        regather=regather,
        step_s=step_s,
        breakdown=breakdown,
        memory_bytes=memory,
        baselines=(Baseline("dp-ev", "equal shares", 3 * step_s, True), Baseline("single", "one", math.inf, False)),
        search=SearchReport(0.25, 1234, 0.1, 0.1, 0.0, "proven", 3, ("seed: 41 ms", "again: 40 ms")),
        without_device=(("box/big-1", 2 * step_s), ("box/small-1", step_s), ("box/small-2", math.inf)),
        without_node=(),
        notes=("a note with an arrow →",),
        capture_s=0.1,
        planning_s=1 / 3,
    )
