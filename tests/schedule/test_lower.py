"""Programs laid out in time: what is sent, where it stands, and whether it hides."""

from __future__ import annotations

import random
import runpy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lopsided
from lopsided.ir.graph import Graph
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, P, R, S
from lopsided.ir.program import Program, RuleBook, parse_program
from lopsided.models import zoo
from lopsided.ops.simulated_devices import cotangent
from lopsided.schedule.cost import FREE, Costs, Transfer, conversion, optimizer_named
from lopsided.schedule.decisions import Decisions
from lopsided.schedule.lower import lower, rebucketed
from lopsided.schedule.pricing import Computed
from lopsided.schedule.schedule import Redistribute
from lopsided.verification.verifier import random_program
from tests.support import ROOT
from tests.support.clusters import cluster, kind
from tests.support.jobs import book_of
from tests.support.models import ByHand, example
from tests.support.schedules import Flat, lay_out

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "02_write_a_program.py"))
CLUSTER = cluster(kind(count=2))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return lopsided.capture(EXAMPLE["Block"](), {"x": torch.randn(8, 6), "y": torch.randn(8, 6)})


def laid_out(text: str, graph: Graph, *, regather: bool = False) -> Flat:
    program = parse_program(EXAMPLE[text], graph)
    return lay_out(program, Costs(graph, CLUSTER, optimizer_named("adamw")), regather=regather)


def texts(items: tuple[Computed | Transfer, ...]) -> list[str]:
    """One word or line an item."""
    return [
        f"{item.what} {item.collective}" if isinstance(item, Transfer) else f"{'∂' * item.backward}{item.node}"
        for item in items
    ]


def test_data_parallelism_sums_every_gradient_behind_the_backward_pass(graph: Graph) -> None:
    schedule = laid_out("DATA_PARALLEL", graph)
    assert texts(schedule.forward) == ["linear", "relu", "linear_1", "mse_loss", "mse_loss P→I all_reduce"]
    assert texts(schedule.backward) == [
        "∂mse_loss",
        "∂linear_1",
        "∂down_bias P→I all_reduce",
        "∂down_weight P→I all_reduce",
        "∂relu",
        "∂linear",
        "∂up_bias P→I all_reduce",
        "∂up_weight P→I all_reduce",
    ]
    hiding = [item for item in schedule.transfers if item.hides]
    sent = {item.what.split()[0].removeprefix("∂"): item.whole_bytes for item in hiding}
    assert sent == {leaf.value.name: leaf.value.bytes for leaf in graph.parameters}
    assert not any(item.ahead for item in hiding)
    assert [item.node for item in schedule.optimizer] == [name.value.name for name in graph.parameters]


def test_zero_gathers_ahead_and_scatters_gradients(graph: Graph) -> None:
    schedule = laid_out("ZERO", graph)
    assert texts(schedule.forward)[:2] == ["up_weight S0→R all_gather", "linear"]
    gathers = [item for item in schedule.transfers if item.ahead]
    assert [item.cuts for item in gathers] == [(("", 10),), (("", 6),)]
    assert Counter(item.collective for item in schedule.backward if isinstance(item, Transfer)) == {
        "reduce_scatter": 2,
        "all_reduce": 2,
    }
    assert [item.cut for item in schedule.optimizer] == [("", 10), None, ("", 6), None]


def test_only_what_the_backward_pass_needs_is_gathered_again(graph: Graph) -> None:
    """The first weight is not needed: its input has no gradient."""
    kept, freed = (laid_out("ZERO", graph, regather=regather) for regather in (False, True))
    assert freed.forward == kept.forward
    more = [item for item in freed.backward if item not in kept.backward]
    assert [(item.what, item.hides, item.ahead) for item in more if isinstance(item, Transfer)] == [
        ("down_weight S0→R", True, True)
    ]
    assert texts(freed.backward).index("down_weight S0→R all_gather") == texts(freed.backward).index("∂linear_1") - 1


def test_tensor_parallelism_sums_one_activation(graph: Graph) -> None:
    schedule = laid_out("TENSOR_PARALLEL", graph)
    (transfer,) = schedule.transfers
    assert (transfer.what, transfer.collective, transfer.hides) == ("linear_1 P→I", "all_reduce", False)
    assert transfer.whole_bytes == 4 * 8 * 6


def test_one_device_sends_nothing(graph: Graph) -> None:
    program = lopsided.one_device(graph)
    schedule = lay_out(program, Costs(graph, CLUSTER, optimizer_named("sgd")))
    assert schedule.transfers == ()


def test_a_cotangent_is_converted_after_the_last_consumer_has_run_backward() -> None:
    """Two layers share a copy of the weight and of the activation between them."""
    model = ByHand(lambda m, x: (m.lin(m.lin(x)) * m.lin(x)).sum())
    graph = lopsided.capture(model, {"x": example()})
    program = lopsided.one_device(graph)
    shared = Rule((S(0), R, R), (S(0),))
    steps = []
    for step in program.steps:
        if step.node.op == "aten.linear.default":
            chain = (I, S(0)) if step.node.operands[0] == "x" else (S(0),)
            steps.append(replace(step, rule=shared, chains=(chain, (I, R), (I, R))))
        elif step.node.op.startswith("aten.mul"):
            steps.append(replace(step, rule=Rule((S(0), S(0)), (S(0),)), chains=((S(0),), (S(0),))))
        else:
            steps.append(replace(step, rule=Rule((S(0),), (P,)), chains=((S(0),),)))
    program = replace(program, steps=tuple(steps), loss=(P, I))
    schedule = lay_out(program, Costs(graph, CLUSTER, optimizer_named("sgd")))
    backward = texts(schedule.backward)
    assert backward.count("∂lin_weight P→I all_reduce") == 1
    assert backward[-2:] == ["∂lin_bias P→I all_reduce", "∂lin_weight P→I all_reduce"]
    assert backward[-3] == f"∂{program.steps[0].node.name}"


def test_activations_block(graph: Graph) -> None:
    text = EXAMPLE["DATA_PARALLEL"].replace("%relu: S0, ", "%relu: S0→I→S0, ")
    program = parse_program(text, graph)
    schedule = lay_out(program, Costs(graph, CLUSTER, optimizer_named("sgd")))
    blocking = [item for item in schedule.transfers if not item.hides]
    # The copy as S0 is there already: only the detour's first half is made, and nothing of it used.
    assert [item.what for item in blocking] == ["relu S0→I", "mse_loss P→I"]


def test_buffers_and_fixed_values() -> None:
    model = ByHand(lambda m, x: (m.lin(x) + (m.ema * 2)).sum())
    graph = lopsided.capture(model, {"x": example()})
    program = lopsided.one_device(graph)
    schedule = lay_out(program, Costs(graph, CLUSTER, optimizer_named("sgd")))
    fixed = next(iter(node.name for node in graph.nodes if node.name in graph.fixed))
    assert [item.node for item in schedule.forward if isinstance(item, Computed)].count(fixed) == 1
    assert fixed not in [item.node for item in schedule.backward if isinstance(item, Computed)]


@pytest.fixture(scope="module", params=["mlp", "gpt2", "resnet50"])
def book(request: pytest.FixtureRequest) -> RuleBook:
    return book_of(zoo.SMALL[request.param])


@given(seed=st.integers(0, 10**6))
def test_random_programs_send_what_they_convert(book: RuleBook, seed: int) -> None:
    program = random_program(book, random.Random(seed))
    costs = Costs(book.graph, CLUSTER, optimizer_named("adam"))
    schedule = lay_out(program, costs)
    there: Counter[str] = Counter()
    back: Counter[str] = Counter()
    for value, source, to in program.conversions():
        sent, returned = conversion(value, source, to)
        there.update([sent.what] if sent else [])
        back.update([returned.what] if returned else [])
    for step in program.steps:
        cost = costs.op(step.node, step.rule)
        there.update(f"{step.node.name}: {talk.what}" for talk in cost.talks)
        back.update(f"{step.node.name}: {talk.what}" for talk in cost.back_talks)
    assert Counter(item.what for item in schedule.forward if isinstance(item, Transfer)) == there
    # A cotangent that nobody has, since nothing that leads to the loss used the copy, is not sent.
    returned_back = Counter(item.what for item in schedule.backward if isinstance(item, Transfer))
    assert returned_back <= back
    lowered = schedule.priced.schedule
    made = {(item.value, item.to): item for item in lowered.redistributed}
    for step in program.steps:
        if f"∂{step.node.name}" in lowered.items:
            for copy in zip(step.node.operands, step.rule.needs, strict=True):
                if copy in made and (
                    sent_back := conversion(book.graph.values[copy[0]], made[copy].source, copy[1])[1]
                ):
                    assert returned_back[sent_back.what] == 1
    stored = dict(program.leaves)
    parameters = {leaf.value.name for leaf in book.graph.parameters}
    for item in schedule.priced.schedule.passes:
        if isinstance(item, Redistribute) and item.transfer is not None:
            one_end = cotangent(item.to) if item.phase == "backward" else item.source
            assert bool(item.bucket) == (item.value in parameters and one_end == stored[item.value])
    for transfer in schedule.transfers:
        assert transfer.ahead == (transfer.hides and not transfer.what.startswith("∂"))
    assert all(any(a != FREE for a in item.seconds) for item in schedule.computes)
    assert sorted_by_graph(program, schedule)


def sorted_by_graph(program: Program, schedule: Flat) -> bool:
    order = {step.node.name: k for k, step in enumerate(program.steps)}
    there = [order[item.node] for item in schedule.forward if isinstance(item, Computed)]
    back = [order[item.node] for item in schedule.backward if isinstance(item, Computed)]
    return there == sorted(there) and back == sorted(back, reverse=True)


@given(seed=st.integers(0, 2**32), regather=st.booleans(), overlap=st.booleans())
def test_other_buckets_are_filled_as_if_lowered_with_them(
    book: RuleBook, seed: int, regather: bool, overlap: bool
) -> None:
    program = random_program(book, random.Random(seed))
    schedule = lower(program, Decisions(regather=regather, overlap=overlap))
    for bucket_bytes in (2**20, 4096, 256, 1):
        decisions = replace(schedule.decisions, bucket_bytes=bucket_bytes)
        schedule = rebucketed(schedule, bucket_bytes)
        assert schedule == lower(program, decisions)


def test_what_lies_around_ops_and_conversions_is_charged_where_it_was_measured(graph: Graph) -> None:
    """Data parallelism on a processor: every op costs its overhead twice, every parameter a copy of its gradient."""
    slow = replace(CLUSTER, kinds=tuple(replace(kind, overhead_s=0.5) for kind in CLUSTER.kinds))
    program = parse_program(EXAMPLE["DATA_PARALLEL"], graph)
    optimizer = optimizer_named("adamw")
    plain, charged = (lay_out(program, Costs(graph, on, optimizer)) for on in (CLUSTER, slow))

    def total(schedule: Flat) -> float:
        items = (item for item in (*schedule.forward, *schedule.backward) if isinstance(item, Computed))
        return sum(item.seconds[0].constant for item in items)

    ops = len(program.steps) + sum(any(v.grad for v in step.node.results) for step in program.steps)
    copies = list(graph.parameters)
    packed = sum(leaf.value.bytes for leaf in copies) * 2 / CLUSTER.kinds[0].bytes_per_s
    assert total(charged) - total(plain) == pytest.approx(0.5 * (ops + 2 * len(copies)) + packed)
