"""Nodes that run as one function: where stretches begin and end, and what moves with them."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lopsided.capturing.capture_graph import capture
from lopsided.ir.placement import Shares
from lopsided.ir.program import one_device
from lopsided.models import zoo
from lopsided.models.by_name import load
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.schedule.decisions import Decisions
from lopsided.schedule.lower import lower
from lopsided.schedule.schedule import (
    Compute,
    Exchange,
    Redistribute,
    Schedule,
    Stretch,
    check_schedule,
    parse_schedule,
)
from lopsided.schedule.stretches import STRETCH, STRETCH_ALONE, most_nodes
from tests.support.jobs import book_of, prices_of

SHARES = Shares((0.5, 0.2, 0.3))


def stretches_of(schedule: Schedule) -> list[tuple[str, ...]]:
    return [item.nodes for item in schedule.forward if isinstance(item, Stretch)]


def test_a_schedule_with_stretches_prints_parses_and_is_sound() -> None:
    book = book_of(zoo.SMALL["gpt2"])
    program = stored_cut(data_parallel(book, prices_of(book.graph, SHARES)))
    schedule = lower(program, Decisions(stretch=24, regather=True))
    check_schedule(schedule)
    text = str(schedule)
    assert "stretch=24" in text
    assert str(parse_schedule(text, program)) == text
    assert stretches_of(parse_schedule(text, program)) == stretches_of(schedule) != []


def test_everything_runs_once_and_in_the_order_of_the_program() -> None:
    book = book_of(zoo.SMALL["t5"])
    program = data_parallel(book, prices_of(book.graph, SHARES))
    schedule, plain = lower(program, Decisions(stretch=16)), lower(program)
    assert [c.id for c in schedule.computes] == [c.id for c in plain.computes]
    sent = [sorted((t.what, t.whole_bytes) for t in one.transfers) for one in (schedule, plain)]
    assert sent[0] == sent[1]


def test_inside_of_a_stretch_nothing_is_sent_taken_or_given() -> None:
    book = book_of(zoo.SMALL["bert"])
    program = stored_cut(data_parallel(book, prices_of(book.graph, SHARES)))
    schedule = lower(program, Decisions(stretch=24))
    for nodes in stretches_of(schedule):
        for items, names in ((schedule.forward, nodes), (schedule.backward, nodes[::-1])):
            places = [k for k, i in enumerate(items) if isinstance(i, Compute) and i.node in names]
            between = items[places[0] : places[-1] + 1] if places else ()
            assert not [item for item in between if isinstance(item, Redistribute | Exchange)]


def test_gradients_that_travel_in_buckets_end_no_stretch() -> None:
    """In data parallelism every parameter's gradient is sent; layers are functions all the same."""
    book = book_of(zoo.SMALL["gpt2"])
    program = data_parallel(book, prices_of(book.graph, SHARES))
    schedule = lower(program, Decisions(stretch=24))
    check_schedule(schedule)
    inside = [schedule.steps[name].node for nodes in stretches_of(schedule) for name in nodes]
    parameters = {leaf.value.name for leaf in book.graph.parameters}
    with_one = [node for node in book.graph.nodes if parameters.intersection(node.operands)]
    assert sum(node in inside for node in with_one) > len(with_one) / 2
    assert max(map(len, stretches_of(schedule))) > 12


def test_layers_that_repeat_are_cut_alike() -> None:
    model, batch = load("llama:layers=8,width=48,heads=6,kv_heads=3,ffn=56,seq=10,vocab=61,batch=5")
    program = one_device(capture(model, batch))
    ops = {step.node.name: step.node.op for step in program.steps}
    found = [tuple(ops[name] for name in nodes) for nodes in stretches_of(lower(program, Decisions(stretch=40)))]
    assert len(found) == 8
    assert len(set(found)) == 3  # the first, the last, and those between


def test_a_node_that_talks_is_in_no_stretch() -> None:
    book = book_of(zoo.SMALL["resnet50"])
    program = data_parallel(book, prices_of(book.graph, SHARES))
    schedule = lower(program, Decisions(stretch=64))
    talking = {item.node for item in schedule.forward if isinstance(item, Exchange)}
    assert talking
    assert talking.isdisjoint(itertools.chain(*stretches_of(schedule)))


def test_a_region_that_runs_again_is_not_joined_with_what_is_around_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside = checkpoint(lambda h: self.b(torch.relu(h)), torch.relu(self.a(x)), use_reentrant=False)
            return self.c(torch.relu(inside)).sum()

    program = one_device(capture(Net(), {"x": torch.randn(3, 6)}))
    schedule = lower(program, Decisions(stretch=64))
    check_schedule(schedule)
    region = {*schedule.recomputed}
    assert region
    for nodes in stretches_of(schedule):
        assert {*nodes} <= region or region.isdisjoint(nodes)


def test_one_device_runs_a_model_as_one_function_unless_it_is_deep() -> None:
    assert most_nodes(1, 300) == STRETCH_ALONE
    assert most_nodes(1, 3000) == STRETCH
    assert most_nodes(2, 300) == STRETCH
