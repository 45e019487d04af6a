"""What devices hold, in closed form, and what is said when it is too much."""

from __future__ import annotations

import random
import runpy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lopsided
from lopsided.cluster.cluster import Cluster
from lopsided.errors import DoesNotFitError
from lopsided.ir.graph import Graph
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, R, S, Shares
from lopsided.ir.program import Program, RuleBook, parse_program
from lopsided.models import by_name as models
from lopsided.models import zoo
from lopsided.planner.baselines import stored_cut
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.decisions import Decisions, OnHost
from lopsided.schedule.excess import check_fits, describe_excess
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import USES, Holding, bytes_per_kind, saved_by, stored
from lopsided.schedule.pricing import price
from lopsided.verification.verifier import random_program, random_shares
from tests.support import ROOT, clusters
from tests.support.jobs import book_of
from tests.support.models import ByHand, example
from tests.support.schedules import held_by

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "02_write_a_program.py"))
ADAMW, SGD = optimizer_named("adamw"), optimizer_named("sgd")
BATCH, NARROW, WIDE = 8, 6, 10


def cluster(*counts: int, memory: int = 2**30) -> Cluster:
    return clusters.cluster(*(clusters.kind(f"k{n}", count=count, memory=memory) for n, count in enumerate(counts)))


@pytest.fixture(scope="module")
def graph() -> Graph:
    batch = {"x": torch.randn(BATCH, NARROW), "y": torch.randn(BATCH, NARROW)}
    return lopsided.capture(EXAMPLE["Block"](), batch)


def by_use(held: tuple[Holding, ...], scale: Scale | None = None) -> dict[str, tuple[int, ...]]:
    scale = scale or Scale(cluster(2), (0.5, 0.5))
    return {use: bytes_per_kind([h for h in held if h.use == use], scale) for use in USES}


def test_data_parallelism_with_adamw_holds_16_bytes_a_parameter(graph: Graph) -> None:
    program = parse_program(EXAMPLE["DATA_PARALLEL"], graph)
    parameters = sum(leaf.value.elements for leaf in graph.parameters)
    found = by_use(held_by(program, ADAMW, devices=2))
    assert found["parameter"] == found["gradient"] == (4 * parameters,)
    assert found["optimizer"] == (8 * parameters,)
    assert found["gathered"] == (0,)
    assert by_use(held_by(program, SGD))["optimizer"] == (0,)


def test_zero_holds_a_piece_and_what_it_gathers(graph: Graph) -> None:
    program = parse_program(EXAMPLE["ZERO"], graph)
    matrices, biases = 2 * WIDE * NARROW, WIDE + NARROW
    found = by_use(held_by(program, ADAMW, devices=2))
    state = found["parameter"][0] + found["gradient"][0] + found["optimizer"][0]
    assert state == 16 * matrices // 2 + 16 * biases
    assert found["gathered"] == (4 * matrices,)


def test_state_is_cut_by_its_own_shares(graph: Graph) -> None:
    text = (
        EXAMPLE["ZERO"]
        .replace(": S0\n%up_bias", ": S0@state\n%up_bias")
        .replace("up_weight: S0→R", "up_weight: S0@state→R")
    )
    program = parse_program(text, graph)
    scale = Scale(cluster(1, 1), Shares((0.5, 0.5), named=(("state", (0.2, 0.8)),)))
    held = [h for h in held_by(program, ADAMW) if h.what == "up_weight" and h.use != "gathered"]
    assert bytes_per_kind(held, scale) == (16 * 2 * NARROW, 16 * 8 * NARROW)


def test_regathered_copies_are_there_two_at_once() -> None:
    model, batch = models.load("mlp:layers=6,width=24,classes=7,batch=7")
    graph = lopsided.capture(model, batch)
    text = str(lopsided.one_device(graph))
    for leaf in graph.parameters:
        name = leaf.value.name
        text = text.replace(f'"{leaf.target}" : I', f'"{leaf.target}" : S0').replace(f"%{name}: I", f"%{name}: S0→I")
    program = parse_program(text, graph)
    sizes = sorted((leaf.value.bytes for leaf in graph.parameters), reverse=True)
    assert by_use(held_by(program, SGD))["gathered"] == (sum(sizes),)
    assert by_use(held_by(program, SGD, regather=True))["gathered"] == (sum(sizes[:2]),)


def test_saved_activations_are_counted_once_and_cut(graph: Graph) -> None:
    """relu keeps its result, and the next layer keeps the same; the loss keeps both its inputs."""
    held = held_by(parse_program(EXAMPLE["DATA_PARALLEL"], graph), ADAMW)
    saved = {h.what: (h.bytes, h.cut) for h in held if h.use == "saved"}
    rows = ("", BATCH)
    assert saved == {
        "x": (4 * BATCH * NARROW, rows),
        "y": (4 * BATCH * NARROW, rows),
        "relu": (4 * BATCH * WIDE, rows),
        "linear_1": (4 * BATCH * NARROW, rows),
    }
    assert len([h for h in held if h.use == "saved"]) == 4
    assert by_use(held)["saved"] == (4 * BATCH // 2 * (3 * NARROW + WIDE),)


def test_a_copy_in_another_placement_is_held_too(graph: Graph) -> None:
    text = EXAMPLE["TENSOR_PARALLEL"].replace("%linear_1: P→I, ", "%linear_1: P→S0→I, ")
    held = held_by(parse_program(text, graph), ADAMW)
    # The loss keeps the whole copy; its terms and its piece are not kept.
    saved = {(h.what, h.cut) for h in held if h.use == "saved"}
    assert saved == {("x", None), ("y", None), ("relu", ("", WIDE)), ("linear_1", None)}


class Heads(nn.Module):
    """One projection, seen three times."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(NARROW, 3 * NARROW)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(BATCH, 3, NARROW).unbind(1)
        return (q.exp() * k * v).sum()


def test_views_share_memory() -> None:
    graph = lopsided.capture(Heads(), {"x": torch.randn(BATCH, NARROW)})
    held = held_by(lopsided.one_device(graph), SGD)
    saved = [h for h in held if h.use == "saved"]
    whole = 4 * BATCH * NARROW
    # Of the projection: k and v are kept, which are parts of the same memory.
    assert sorted(h.bytes for h in saved if h.what.startswith("linear")) == [3 * whole]
    assert not any(h.what.startswith(("unbind", "view")) for h in saved)


@pytest.mark.parametrize("name", ["mlp", "vgg19", "llama", "resnet50"])
def test_what_is_saved_is_what_autograd_keeps(name: str) -> None:
    """The whole model, run for real, keeps these bytes beside parameters, buffers and the batch."""
    model, batch = models.load(zoo.SMALL[name])
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _loss = model(**batch)
    kept.update((tensor.untyped_storage().data_ptr(), tensor) for tensor in batch.values())
    real = sum(tensor.untyped_storage().nbytes() for memory, tensor in kept.items() if memory not in own)
    graph = lopsided.capture(model, batch)
    held = held_by(lopsided.one_device(graph), SGD)
    # A mask of dropout has a number an element here, and a byte on the GPUs that are planned for.
    masks = [node for node in graph.nodes if node.op.startswith("aten.dropout.") and node.saved.extra_bytes]
    real -= sum(node.saved.extra_bytes - node.results[0].elements for node in masks)
    # Statistics of a batch norm are results of the captured op, and kept a second time inside it.
    assert sum(h.bytes for h in held if h.use == "saved") == pytest.approx(real, rel=0.01 if name == "resnet50" else 0)


def test_attention_keeps_no_scores() -> None:
    """Whatever the CPU does with dropout: operands, the result and a number a row."""
    model = ByHand(lambda m, x: attention(m.lin(x).view(2, 1, 2, 6)).sum())
    graph = lopsided.capture(model, {"x": example()})
    node = next(node for node in graph.nodes if "attention" in node.name)
    rule = Rule((I,) * len(node.operands), (I,))
    assert saved_by(graph, node, rule) == (
        Holding("linear", "saved", 4 * 24, None),
        Holding(node.name, "saved", 4 * 24, None),
        Holding(f"{node.name} (its own)", "saved", 4 * 4, None),
    )


def attention(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def test_what_one_node_keeps(graph: Graph) -> None:
    linear = next(node for node in graph.nodes if node.name == "linear_1")
    rows = ("", BATCH)
    assert saved_by(graph, linear, Rule((S(0), R, R), (S(0),))) == (Holding("relu", "saved", 4 * BATCH * WIDE, rows),)
    assert saved_by(graph, linear, Rule((I, I, I), (I,))) == (Holding("relu", "saved", 4 * BATCH * WIDE, None),)


def test_casts_of_whole_weights_are_kept_whole() -> None:
    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.down(torch.relu(self.up(x))).float().sum()

    graph = lopsided.capture(Autocast(), {"x": torch.randn(BATCH, NARROW)})
    linear = next(node for node in graph.nodes if node.name == "linear_1")
    found = saved_by(graph, linear, Rule((S(0), R, R), (S(0),)))
    assert Holding("linear_1 (its own)", "saved", 2 * WIDE * NARROW, None) in found
    assert sum(h.bytes for h in found) == 2 * BATCH * WIDE + 2 * WIDE * NARROW


def test_masks_scale_with_their_piece() -> None:
    model = ByHand(lambda m, x: nn.functional.dropout(m.lin(x), 0.5).sum())
    graph = lopsided.capture(model, {"x": example()})
    dropout = next(node for node in graph.nodes if "dropout" in node.name)
    assert dropout.saved.extra_bytes
    found = saved_by(graph, dropout, Rule((S(0),), (S(0),)))
    assert Holding(f"{dropout.name} (its own)", "saved", dropout.results[0].elements, ("", 4)) in found


def test_gradients_of_gathered_parameters_wait_for_each_other(graph: Graph) -> None:
    whole = parse_program(EXAMPLE["DATA_PARALLEL"], graph)
    assert not any(h.use == "waiting" for h in held_by(whole, SGD))
    (waiting,) = [h for h in held_by(stored_cut(whole), SGD) if h.use == "waiting"]
    assert waiting.bytes == sum(leaf.value.bytes for leaf in graph.parameters)


def test_buffers_are_whole_and_frozen_parameters_have_no_state() -> None:
    model = ByHand(lambda m, x: (m.lin(x) * m.ema).sum())
    model.lin.bias.requires_grad_(False)
    graph = lopsided.capture(model, {"x": example()})
    found = {(h.what, h.use): h for h in held_by(lopsided.one_device(graph), ADAMW)}
    assert found["ema", "buffer"] == Holding("ema", "buffer", 4 * 4 * 6, None)
    assert {use for what, use in found if what == "lin_bias"} == {"parameter"}
    weight = next(leaf for leaf in graph.parameters if leaf.target == "lin.weight")
    assert [(h.use, h.bytes, h.cut) for h in stored(weight, S(1), ADAMW)] == [
        ("parameter", 144, ("", 6)),
        ("gradient", 144, ("", 6)),
        ("optimizer", 288, ("", 6)),
    ]


def test_working_memory_is_that_of_the_largest_step(graph: Graph) -> None:
    """relu has an operand that nobody keeps, its gradient, and that of its result. Gradients of matrices are held."""
    data_parallel = held_by(parse_program(EXAMPLE["DATA_PARALLEL"], graph), SGD, devices=2)
    working = [h for h in data_parallel if h.use == "working"]
    rows = 4 * BATCH * WIDE
    assert working == [Holding("relu", "working", 3 * rows, ("", BATCH))]
    zero = held_by(parse_program(EXAMPLE["ZERO"], graph), SGD, devices=BATCH)
    # Gathered, a matrix has a whole gradient for a while.
    assert [h for h in zero if h.use == "working" and h.cut is None] == [
        Holding("linear", "working", 4 * WIDE * NARROW, None)
    ]


@pytest.fixture(scope="module", params=["mlp", "gpt2"])
def book(request: pytest.FixtureRequest) -> RuleBook:
    return book_of(zoo.SMALL[request.param])


def memory(program: Program, scale: Scale, **options: bool) -> tuple[int, ...]:
    return bytes_per_kind(held_by(program, ADAMW, devices=scale.cluster.devices, **options), scale)


@given(seed=st.integers(0, 10**6))
def test_random_programs_hold_what_they_hold(book: RuleBook, seed: int) -> None:
    state = random.Random(seed)
    program = random_program(book, state)
    scale = Scale(cluster(2, 1), random_shares(3, state))
    kept, freed = (memory(program, scale, regather=regather) for regather in (False, True))
    assert all(a >= b > 0 for a, b in zip(kept, freed, strict=True))
    held = held_by(program, ADAMW)
    assert all(h.use in USES and h.bytes > 0 for h in held)
    copies = [(h.what, h.use, h.cut, h.bytes) for h in held if h.use not in ("saved", "gathered", "working")]
    assert len(set(copies)) == len(copies)


# What does not fit


def test_what_does_not_fit_is_said_in_words(graph: Graph) -> None:
    held = (
        Holding("w2", "parameter", 10 * 2**30, None),
        Holding("w2", "optimizer", 20 * 2**30, ("state", 10)),
        Holding("h", "saved", 2**30, ("", 8)),
    )
    where = cluster(2, 1, memory=16 * 2**30)
    scale = Scale(where, Shares((0.25, 0.25, 0.5), named=(("state", (0.4, 0.4, 0.2)),)))
    assert bytes_per_kind(held, scale) == (int(18.25 * 2**30), int(14.5 * 2**30))
    error = describe_excess(held, scale)
    assert error is not None
    assert error.what == (
        f"the program needs 18.2 GiB on {where.device_names[0]} and 1 like it, which has 16.0 GiB: 2.2 GiB too much"
    )
    assert error.facts["uses"] == "parameter 10.0 GiB, optimizer 8.0 GiB, saved 0.2 GiB"
    assert error.facts["biggest"].startswith("%w2 (parameter, optimizer) 18.0 GiB; %h (saved)")
    assert error.do
    with pytest.raises(DoesNotFitError, match=r"18\.2 GiB"):
        check_fits(held, scale)


def test_what_fits_is_not_worth_a_word() -> None:
    held = (Holding("w", "parameter", 100, None),)
    scale = Scale(cluster(1, memory=100), (1.0,))
    assert describe_excess(held, scale) is None
    check_fits(held, scale)


def test_a_parameter_that_nobody_uses_has_no_gradient_and_no_state() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle, self.frozen = nn.Linear(4, 4), nn.Linear(9, 9), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x)).sum()

    graph = lopsided.capture(Idle(), {"x": torch.randn(3, 4)})
    held = held_by(lopsided.one_device(graph), ADAMW)
    uses = {what: {one.use for one in held if one.what == what} for what in ("used_weight", "idle_weight")}
    assert uses == {"used_weight": {"parameter", "gradient", "optimizer"}, "idle_weight": {"parameter"}}
    assert {one.use for one in held if one.what == "frozen_weight"} == {"parameter"}
    schedule = lower(lopsided.one_device(graph), Decisions(on_host=(OnHost(0),)))
    priced = price(schedule, Costs(graph, cluster(1), ADAMW))
    assert {one.node for one in priced.updates} == {"used_weight", "used_bias"}
    assert {one.parameter for one in schedule.update if one.on_host} == {"used_weight", "used_bias"}
