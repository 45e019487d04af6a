"""Jobs for worker processes: programs given as texts, run for real and compared with one device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Link
from lopsided.comm.world import meet
from lopsided.ir.graph import Graph
from lopsided.ir.graph_text import parse_graph
from lopsided.ir.placement import Shares
from lopsided.ir.program import Program, RuleBook, parse_program
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Breakdown, Plan, SearchReport
from lopsided.planner.planner import plan_graph
from lopsided.planner.search import search
from lopsided.planner.search_cost import SharePrices
from lopsided.runtime.parallel import Parallel
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.decisions import Rerun
from lopsided.verification.on_processes import Sameness, compare_step, compare_training
from lopsided.verification.verifier import random_program
from tests.support.clusters import cluster, kind, kinds


@dataclass(frozen=True)
class Run:
    """A program and its shares, as texts and numbers: what can be sent to another process."""

    spec: str
    graph: str
    program: str
    shares: Shares
    regather: bool = False
    reruns: tuple[Rerun, ...] = ()
    stretch: int = 0
    microbatches: int = 1  # the graph is that of one


def cluster_of(devices: int, speeds: Sequence[float] = ()) -> Cluster:
    """Devices alike, or one kind for each speed."""
    figures = {"bytes_per_s": 1e10, "launch_s": 1e-9}
    made = kinds(*speeds, name="cpu-", **figures) or (kind("cpu", count=devices, speed=1e10, **figures),)
    return cluster(*made, link=Link(1e-7, 1e12), name="box")


def plan_of(program: Program, shares: Shares, *, regather: bool = False) -> Plan:
    """A plan around a program; its predictions are nothing to go by."""
    where = cluster_of(len(shares))
    nothing = Breakdown(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    report = SearchReport(0.0, 0, 0.0, 0.0, 0.0, "by hand", 0, ())
    memory = (0,) * len(shares)
    return Plan(where, where, program, shares, "adamw", regather, 1.0, nothing, memory, (), report, (), ())


@cache
def model_of(spec: str) -> tuple[nn.Module, dict[str, object]]:
    torch.manual_seed(0)
    return load(spec)


@cache
def book_of(spec: str) -> RuleBook:
    return derive_rules(capture(*model_of(spec)))


def run_of(
    spec: str, program: Program, shares: Shares, *, regather: bool = False, reruns: tuple[Rerun, ...] = ()
) -> Run:
    return Run(spec, program.graph.text(), str(program), shares, regather, reruns)


def prices_of(graph: Graph, shares: Shares) -> SharePrices:
    where = cluster_of(len(shares))
    return SharePrices(Costs(graph, where, optimizer_named("adamw")), Scale(where, shares))


def classic(spec: str, name: str, shares: Shares) -> Run:
    """One of the strategies everyone knows."""
    book = book_of(spec)
    prices = prices_of(book.graph, shares)
    if name == "dp":
        return run_of(spec, data_parallel(book, prices), shares)
    if name == "planned":
        # So slow that all are needed, and unlike.
        where = cluster_of(len(shares), speeds=[4e6 * (k + 1) for k in range(len(shares))])
        plan = plan_graph(book.graph, where, book=book)
        return run_of(spec, plan.program, plan.shares, regather=plan.regather)
    if name in ("zero", "zero-again"):
        program = stored_cut(data_parallel(book, prices))
        return run_of(spec, program, shares, regather=name == "zero-again")
    return run_of(spec, search(book, prices).program, shares)


def at_random(spec: str, shares: Shares, seed: int) -> Run:
    return run_of(spec, random_program(book_of(spec), random.Random(seed)), shares, regather=bool(seed % 2))


def parsed(run: Run) -> Plan:
    graph = parse_graph(run.graph)
    plan = plan_of(parse_program(run.program, graph), run.shares, regather=run.regather)
    if any(rerun.kinds for rerun in run.reruns):
        where = cluster_of(0, [1e10] * len(run.shares))
        plan = replace(plan, cluster=where, on=where)
    return replace(plan, reruns=run.reruns, stretch=run.stretch, microbatches=run.microbatches)


# Jobs


def step(runs: list[Run]) -> list[tuple[float, str]]:
    found = []
    for run in runs:
        plan = parsed(run)
        same: Sameness = compare_step(*model_of(run.spec), plan, meet(plan))
        found.append((same.error, same.where))
    return found


def training(run: Run, steps: int, max_norm: float) -> Sameness:
    plan = parsed(run)
    return compare_training(*model_of(run.spec), plan, meet(plan), steps=steps, max_norm=max_norm)


def parallel_of(run: Run) -> Parallel:
    plan = parsed(run)
    torch.manual_seed(0)
    model, batch = load(run.spec)
    return Parallel(model, batch, plan.graph, plan, meet(plan))
