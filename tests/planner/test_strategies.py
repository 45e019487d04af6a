"""The known strategies are found, not built in: printed programs, and the traffic that closed forms say they have.

`UPDATE_GOLDEN=1 pytest tests/planner/test_strategies.py` writes the printed programs anew. Small models are planned for
devices that are slow enough to be worth sharing, and the programs are run on as many imaginary devices.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster, Link
from lopsided.cluster.cluster_file import load_cluster
from lopsided.cluster.coefficients import KIND, coefficient
from lopsided.ir.graph import Graph, Leaf, Node
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import TOLERANCE, in_float64
from lopsided.ir.placement import I, P, Placement, R, S, Shares
from lopsided.ir.program import Program, RuleBook, check_program, one_device, parse_program
from lopsided.models import by_name as models
from lopsided.ops.derive import derive_rules
from lopsided.planner.pins import stores_of
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import plan_graph
from lopsided.planner.search import search
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, Transfer, optimizer_named
from lopsided.verification.simulator import simulate
from lopsided.verification.verifier import compare
from tests.support import clusters
from tests.support.schedules import Flat, lay_out

GOLDEN = Path(__file__).parent / "golden"
LATENCY_S = 1e-7
LARGE_BATCH = "mlp:layers=6,width=32,classes=32,batch=256"
WIDE = "mlp:layers=6,width=256,classes=256,batch=32"
LARGE_HEAD = "mlp:layers=6,width=32,classes=2048,batch=128"
TRANSFORMER = "gpt2:layers=2,width=64,heads=4,seq=16,vocab=64,dropout=0,tied=no,batch=4"
MIXTURE = "bert-moe:layers=2,width=16,heads=2,ffn=128,seq=16,vocab=32,experts=8,dropout=0,batch=32"

RESERVE = coefficient(KIND, "memory_reserve").default or 0.0


# Helpers


@cache
def book_of(spec: str) -> RuleBook:
    with torch.device("meta"):
        graph = capture(*models.load(spec))
    return derive_rules(graph)


def printed(name: str, text: str | Iterable[str]) -> None:
    """Compare with the golden file of this name."""
    text, path = text if isinstance(text, str) else "\n".join(text) + "\n", GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"if the change is meant: UPDATE_GOLDEN=1 pytest {Path(__file__).name}"


def lines(program: Program, *parts: str) -> list[str]:
    return [line for line in str(program).splitlines() if any(part in line for part in parts)]


def slow(cluster: Cluster, speed: float = 1e-2) -> Cluster:
    """The same network without much latency, between devices for which a small model is work enough."""
    kinds = [
        replace(kind, flops_per_s=tuple((dtype, speed * f) for dtype, f in kind.flops_per_s), launch_s=0.0)
        for kind in cluster.kinds
    ]
    return replace(
        cluster,
        kinds=tuple(kinds),
        within=replace(cluster.within, latency_s=LATENCY_S),
        between=replace(cluster.between, latency_s=LATENCY_S),
        collectives=tuple((name, way, replace(link, latency_s=LATENCY_S)) for name, way, link in cluster.collectives),
    )


def ring(devices: int, flops_per_s: float) -> Cluster:
    """Devices alike with memory so fast that only products count, and links without latency."""
    alike = clusters.kind("gpu", count=devices, speed=flops_per_s, bytes_per_s=1e15, memory=2**40, launch_s=0.0)
    return clusters.cluster(alike, link=Link(1e-12, 1e9), name="ring")


def with_memory(cluster: Cluster, size: int) -> Cluster:
    return replace(cluster, kinds=tuple(replace(kind, memory_bytes=size) for kind in cluster.kinds))


def bytes_per_s(cluster: Cluster, collective: str, way: str) -> float:
    return next(link.bytes_per_s for name, w, link in cluster.collectives if (name, w) == (collective, way))


def by_speed(cluster: Cluster) -> Shares:
    speeds = [kind.speed for kind in cluster.kinds for _ in range(kind.devices)]
    return Shares(tuple(speed / sum(speeds) for speed in speeds))


class Searched:
    """One search at shares by speed, and what its program sends."""

    def __init__(
        self,
        book: RuleBook,
        cluster: Cluster,
        *,
        optimizer: str = "sgd",
        shares: Shares | None = None,
        stores: Callable[[Leaf], tuple[Placement, ...]] | None = None,
        allowed: Callable[[Node, Rule], bool] = lambda node, rule: True,
    ) -> None:
        self.costs = Costs(book.graph, cluster, optimizer_named(optimizer))
        self.scale = Scale(cluster, shares or by_speed(cluster))
        self.prices = SharePrices(self.costs, self.scale)
        found = search(
            book, self.prices, stores=stores or (lambda leaf: stores_of(book)[leaf.value.name]), allowed=allowed
        )
        assert found.gap == 0
        check_program(found.program, book)
        self.program, self.cost_s = found.program, found.cost_s
        self.schedule = lay_out(found.program, self.costs)


def schedule_of(plan: Plan) -> Flat:
    costs = Costs(plan.graph, plan.on, optimizer_named(plan.optimizer))
    return lay_out(plan.program, costs, regather=plan.regather, bucket_bytes=plan.bucket_bytes)


def transfers(items: Iterable[object]) -> list[Transfer]:
    return [item for item in items if isinstance(item, Transfer)]


def sent(items: Iterable[object], more_than: int = 0) -> Counter[tuple[str, int]]:
    """How often each collective sends how many bytes."""
    return Counter((t.collective, t.whole_bytes) for t in transfers(items) if t.whole_bytes > more_than)


def stored(program: Program) -> dict[str, Placement]:
    """How every parameter is stored, by its name in the model."""
    placed = dict(program.leaves)
    return {leaf.target: placed[leaf.value.name] for leaf in program.graph.parameters}


def used(program: Program) -> dict[str, set[tuple[Placement, ...]]]:
    """In which chains every parameter is used."""
    names = {leaf.value.name: leaf.target for leaf in program.graph.parameters}
    found: dict[str, set[tuple[Placement, ...]]] = {}
    for step in program.steps:
        for name, chain in zip(step.node.operands, step.chains, strict=True):
            if name in names:
                found.setdefault(names[name], set()).add(chain)
    return found


def parameter_bytes(graph: Graph) -> Counter[int]:
    return Counter(leaf.value.bytes for leaf in graph.parameters)


def assert_right(spec: str, program: Program, shares: Shares) -> None:
    """The program computes on unequal imaginary devices what one device does, in float64."""
    torch.manual_seed(0)
    model, batch = models.load(spec)
    wide = in_float64(capture(model, batch))
    found = simulate(parse_program(str(program), wide), model, batch, shares)
    error, where = compare(found, simulate(one_device(wide), model, batch, (1.0,)))
    assert error <= TOLERANCE, where


# Data parallelism


def test_data_parallelism_for_a_large_batch() -> None:
    """Alpa's case: the traffic is one all-reduce of every parameter."""
    book, cluster = book_of(LARGE_BATCH), slow(load_cluster("hap-4"))
    found = Searched(book, cluster)
    printed("data_parallelism", str(found.program))
    assert set(stored(found.program).values()) == {I}
    assert all(chains == {(I, R)} for chains in used(found.program).values())
    schedule = found.schedule
    assert sent(schedule.forward, more_than=4) == Counter()
    assert sent(schedule.backward) == Counter({("all_reduce", n): k for n, k in parameter_bytes(book.graph).items()})
    assert_right(LARGE_BATCH, found.program, by_speed(cluster))
    # The whole planner cuts the batch as well, and then hides some gathering behind the forward pass.
    plan = plan_graph(book.graph, cluster, book=book, optimizer="sgd")
    assert plan.on == cluster
    assert all(step.rule.gives[0] in (S(0), P) for step in plan.program.steps)
    classic = next(b for b in plan.baselines if b.name == "dp-cp")
    assert 0.9 * classic.step_s < plan.step_s <= classic.step_s * (1 + 1e-9)


def test_the_halves_of_an_all_reduce_where_they_cost_no_more() -> None:
    """On a ring an all-reduce is a reduce-scatter and an all-gather. Between the two, the update is divided."""
    book, cluster = book_of(LARGE_BATCH), ring(4, flops_per_s=3e10)
    found = Searched(book, cluster)
    whole = sum(leaf.value.bytes for leaf in book.graph.parameters)
    for items, collective in ((found.schedule.forward, "all_gather"), (found.schedule.backward, "reduce_scatter")):
        halves = [t for t in transfers(items) if t.hides]
        assert {t.collective for t in halves} == {collective}
        assert sum(t.whole_bytes for t in halves) == whole
    kept = Searched(book, cluster, stores=lambda leaf: (I,))
    assert sent(kept.schedule.backward) == Counter(
        {("all_reduce", n): k for n, k in parameter_bytes(book.graph).items()}
    )
    update_s = 3 * whole / cluster.kinds[0].bytes_per_s
    assert kept.cost_s - found.cost_s == pytest.approx(update_s * 3 / 4, rel=1e-3)
    assert_right(LARGE_BATCH, found.program, Shares((0.4, 0.3, 0.2, 0.1)))


# Tensor parallelism


def test_column_and_row_cuts_of_wide_layers() -> None:
    """Alpa's case: layers − 1 all-reduces of activations, forward and backward together, and nothing else."""
    book, cluster = book_of(WIDE), slow(load_cluster("hap-4"), 2e-2)
    plan = plan_graph(book.graph, cluster, book=book, optimizer="sgd")
    printed("column_and_row_cuts", str(plan.program))
    weights = [placement for name, placement in stored(plan.program).items() if name.endswith("weight")]
    assert weights == [S(0), S(1)] * 3
    schedule = schedule_of(plan)
    assert sent(schedule.forward) == Counter({("all_reduce", 32 * 256 * 4): 3})
    assert sent(schedule.backward) == Counter({("all_reduce", 32 * 256 * 4): 2})
    network_s = 5 * (LATENCY_S + 32 * 256 * 4 / bytes_per_s(cluster, "all_reduce", "ring"))
    assert plan.breakdown.blocking_s == pytest.approx(network_s)
    assert_right(WIDE, plan.program, plan.shares)


def without_i(node: Node, rule: Rule) -> bool:
    """Whole values that are trained are `R`: every device is given its own gradient of them."""
    return I not in rule.gives or not any(value.grad for value in node.results)


def test_i_where_r_would_pay_another_all_reduce() -> None:
    """What all compute whole has the same gradient everywhere. As `R`, the gradients of the loss would be added up."""
    book, cluster = book_of(WIDE), slow(load_cluster("hap-4"), 2e-2)

    def whole_loss(node: Node, rule: Rule) -> bool:
        return "cross_entropy" not in node.op or rule.gives[0].is_whole

    found = Searched(book, cluster, allowed=whole_loss)
    without = Searched(book, cluster, allowed=lambda node, rule: whole_loss(node, rule) and without_i(node, rule))
    size = 32 * 256 * 4
    assert sent(found.schedule.transfers) == Counter({("all_reduce", size): 5})
    assert sent(without.schedule.transfers) == Counter({("all_reduce", size): 6})
    all_reduce_s = LATENCY_S + size / bytes_per_s(cluster, "all_reduce", "ring")
    assert without.cost_s - found.cost_s == pytest.approx(all_reduce_s)
    # Nor is there another way out that costs as little.
    assert Searched(book, cluster, allowed=without_i).cost_s > found.cost_s


def test_two_all_reduces_each_way_in_a_transformer_layer() -> None:
    """Megatron's layer. The residual stream and its norms are `I`: their gradients need no all-reduce."""
    book, cluster = book_of(TRANSFORMER), slow(load_cluster("hap-4"))
    # Memory so fast that only products and the network count.
    cluster = replace(cluster, kinds=tuple(replace(kind, bytes_per_s=1e13) for kind in cluster.kinds))
    found = Searched(book, cluster)
    printed("transformer_layer", str(found.program))
    size, layers = 4 * 16 * 64 * 4, 2
    rows = 4 * 16 * 4
    assert sent(found.schedule.forward, more_than=rows) == Counter({("all_reduce", size): 2 * layers})
    # And one for the norm before the head, which is cut by columns as well.
    assert sent(found.schedule.backward, more_than=rows) == Counter({("all_reduce", size): 2 * layers + 1})
    kept = stored(found.program)
    whole = {name for name, placement in kept.items() if placement == I}
    assert whole == {name for name in kept if "norm" in name or "words" in name or "positions" in name}
    assert_right(TRANSFORMER, found.program, Shares((0.5, 0.25, 0.25)))

    without = Searched(book, cluster, allowed=without_i)
    added = [t for t in transfers(without.schedule.backward) if t.hides]
    assert sorted(t.whole_bytes for t in added) == sorted(
        leaf.value.bytes for leaf in book.graph.parameters if leaf.target in whole
    )
    # Every one of these pays an all-reduce of its own; the norm before the head then saves that of its input.
    saved = size / bytes_per_s(cluster, "all_reduce", "ring")
    paid = sum(t.whole_bytes for t in added) / bytes_per_s(cluster, "all_reduce", "ring")
    assert without.cost_s - found.cost_s == pytest.approx(paid - saved, abs=2 * LATENCY_S)


# ZeRO


def test_parameters_stored_cut_and_gathered_where_memory_is_short() -> None:
    book, cluster = book_of(LARGE_BATCH), slow(load_cluster("hap-4"))
    roomy = plan_graph(book.graph, cluster, book=book)
    assert I in stored(roomy.program).values()
    limit = 178_000
    assert max(roomy.memory_bytes) > (1 - RESERVE) * limit
    short = plan_graph(book.graph, with_memory(cluster, limit), book=book, microbatches=1)
    printed("stored_cut", str(short.program))
    assert max(short.memory_bytes) <= (1 - RESERVE) * limit
    # As many as it takes, no more; and what the backward pass does not look at, the biases, is gathered once.
    cut = {leaf for leaf in book.graph.parameters if stored(short.program)[leaf.target].is_shard}
    assert 2 * sum(leaf.value.bytes for leaf in cut) > sum(leaf.value.bytes for leaf in book.graph.parameters)
    for leaf in cut:
        assert used(short.program)[leaf.target] == {(stored(short.program)[leaf.target], R)}
    schedule = schedule_of(short)
    sizes = Counter(leaf.value.bytes for leaf in cut)
    times = 2 if short.regather else 1
    gathered = sent(t for t in schedule.transfers if t.collective == "all_gather")
    assert {n: k for (_, n), k in gathered.items()} == {n: times * k if n > 128 else k for n, k in sizes.items()}
    scattered = sent(t for t in schedule.transfers if t.collective == "reduce_scatter")
    assert {n: k for (_, n), k in scattered.items()} == sizes
    # It costs something: where there is room it is not done.
    assert short.step_s > roomy.step_s
    assert next(b.step_s for b in short.baselines if b.name == "fsdp") > short.step_s
    assert_right(LARGE_BATCH, short.program, short.shares)


# Mixtures of experts


def test_all_to_all_around_experts() -> None:
    """HAP's model on HAP's cluster, two experts a device: two all-to-all each way in every mixture."""
    mixtures = 6
    book = book_of(f"bert-moe:experts=128,batch={32 * 64}")
    found = Searched(book, load_cluster("hap-64"), optimizer="adam")
    printed("experts", lines(found.program, "einsum", 'feed_forward.up"', 'feed_forward.down"'))
    ends = ("feed_forward.up", "feed_forward.down")
    experts = {name: placement for name, placement in stored(found.program).items() if name.endswith(ends)}
    assert len(experts) == 2 * mixtures
    assert set(experts.values()) == {S(0)}
    assert all(used(found.program)[name] == {(S(0),)} for name in experts)
    # becd: every sequence's tokens for every expert, ceil(128 / 128 * 1.25) * 2 of them.
    dispatched = 32 * 64 * 128 * 4 * 768 * 4
    for items in (found.schedule.forward, found.schedule.backward):
        exchanged = [t for t in transfers(items) if t.collective == "all_to_all"]
        assert sent(exchanged) == Counter({("all_to_all", dispatched): 2 * mixtures})


def test_all_to_all_around_experts_is_right() -> None:
    """The same on eight devices alike, small enough to be run (on three)."""
    found = Searched(book_of(MIXTURE), ring(8, flops_per_s=3e10))
    printed("experts_small", lines(found.program, "einsum"))
    assert sum(t.collective == "all_to_all" for t in found.schedule.transfers) == 4
    assert_right(MIXTURE, found.program, Shares((0.5, 0.3, 0.2)))


# Sufficient factors


def whole(leaf: Leaf) -> tuple[Placement, ...]:
    return (I,)


def by_rows_or_factors(node: Node, rule: Rule) -> bool:
    """Data parallelism, with gradients by whichever way."""
    return node.op != "aten.linear.default" or rule.needs[0] == S(0)


def test_factors_instead_of_gradients_of_big_layers() -> None:
    """VGG-19 with every parameter on every device, 8 images each: 8·4·(25088 + 4096) numbers instead of 25088·4096."""
    cluster, rows = load_cluster("hap-4"), 8 * 4
    book = book_of(f"vgg19:batch={rows}")
    found = Searched(book, cluster, optimizer="adamw", stores=whole)
    printed("factors", lines(found.program, "linear.default"))
    layers = [step for step in found.program.steps if step.node.op == "aten.linear.default"]
    how = [step.rule.how for step in layers]
    assert how == ["sfb", "sfb", "plain"]
    for step, columns in zip(layers, (25088, 4096), strict=False):
        factors = [t for t in found.schedule.transfers if t.what.startswith(f"{step.node.name}: ")]
        assert [(t.collective, t.whole_bytes) for t in factors] == [
            ("all_gather", rows * columns * 4),
            ("all_gather", rows * 4096 * 4),
        ]
    by_gradients = Searched(book, cluster, optimizer="adamw", stores=whole, allowed=lambda n, r: r.how != "sfb")
    assert by_gradients.cost_s > found.cost_s
    # The planner agrees, with shares and devices of its own choice.
    plan = plan_graph(book.graph, cluster, book=book, pins=["*=I"])
    assert [step.rule.how for step in plan.program.steps if step.node.op == "aten.linear.default"] == how


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(25088, 4096, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x)
        return scores.relu().sum()


def test_factors_up_to_the_batch_where_gradients_are_smaller() -> None:
    """rows·(C + O)·4 / all_gather + 2·rows·C·O / FLOP/s, whole instead of a part, against C·O·4 / all_reduce."""
    n, c, o = 4, 25088, 4096
    cluster = ring(n, flops_per_s=1e13)
    link, flops_per_s = cluster.within, cluster.kinds[0].speed
    gradients_s = 2 * (n - 1) / n * c * o * 4 / link.bytes_per_s
    a_row_s = (n - 1) / n * (c + o) * 4 / link.bytes_per_s + (1 - 1 / n) * 2 * c * o / flops_per_s
    crossover = gradients_s / a_row_s
    for rows, how in ((int(crossover * 0.97) // 4 * 4, "sfb"), (int(crossover * 1.03) // 4 * 4, "plain")):
        with torch.device("meta"):
            book = derive_rules(capture(Layer(), {"x": torch.empty(rows, c)}))
        found = Searched(book, cluster, stores=whole, allowed=by_rows_or_factors)
        assert found.program.steps[0].rule.how == how


@pytest.mark.parametrize("is_fast", [True, False])
def test_factors_rather_than_cut_weights_where_all_to_all_is_slow(is_fast: bool) -> None:
    """With all choices open, a row cut fed by two fast all-to-alls sends less. Where these are as slow as gathering,
    the factors of the biggest layer win."""
    cluster = load_cluster("hap-64")
    if not is_fast:
        measured = {(name, way): link for name, way, link in cluster.collectives}
        measured["all_to_all", "direct"] = measured["all_gather", "padded"]
        for name in ("all_gather", "reduce_scatter"):
            measured[name, "all_to_all"] = measured[name, "padded"]
        cluster = replace(cluster, collectives=tuple((*key, link) for key, link in measured.items()))
    found = Searched(book_of(f"vgg19:image=224,batch={8 * 64}"), cluster, optimizer="adamw")
    printed(f"factors_{'fast' if is_fast else 'slow'}_all_to_all", lines(found.program, "linear.default"))
    biggest = next(step for step in found.program.steps if step.node.op == "aten.linear.default")
    assert biggest.rule.how == ("plain" if is_fast else "sfb")


def test_factors_are_right() -> None:
    spec = "mlp:layers=3,width=128,classes=128,batch=8"
    found = Searched(book_of(spec), slow(load_cluster("hap-4"), 1e-1), stores=whole, allowed=by_rows_or_factors)
    assert "sfb" in {step.rule.how for step in found.program.steps}
    assert_right(spec, found.program, found.scale.shares)


# Skew, and a large head


def one_fast_device() -> Cluster:
    cluster = slow(load_cluster("hap-4"))
    fast, slower = cluster.kinds
    one = replace(fast, count=1, flops_per_s=(("f32", 17e9),))
    three = replace(slower, count=3, flops_per_s=(("f32", 1e9),))
    return replace(cluster, kinds=(one, three))


def test_a_group_of_broadcasts_where_one_device_has_most_rows() -> None:
    book, cluster = book_of(LARGE_HEAD), one_fast_device()
    plan = plan_graph(book.graph, cluster, book=book, optimizer="sgd")
    printed("most_rows_on_one_device", str(plan.program))
    assert plan.shares.work[0] > 0.8
    costs, scale = Costs(book.graph, plan.on, optimizer_named("sgd")), Scale(plan.on, plan.shares)
    moved = [t for t in schedule_of(plan).transfers if t.cuts and not t.hides]
    assert [(t.what, t.collective) for t in moved] == [
        ("relu_4 S0→R", "all_gather"),
        ("∂relu_4 P→S0", "reduce_scatter"),
    ]
    even = Scale(plan.on, Shares((0.25,) * 4))
    for transfer in moved:
        name, size, largest = transfer.collective, transfer.whole_bytes, scale.largest(transfer.cuts)
        assert costs.network.best(name, size, even.largest(transfer.cuts)).implementation == "padded"
        assert costs.network.best(name, size, largest).implementation == "grouped"
        # Padded to the largest piece, n times that is sent: as much worse as that is more.
        padded, grouped = (bytes_per_s(cluster, name, way) for way in ("padded", "grouped"))
        crossover = padded / grouped
        assert 1 < crossover < largest
        assert costs.network.best(name, size, crossover * 0.99).implementation == "padded"
        assert costs.network.best(name, size, crossover * 1.01).implementation == "grouped"
    assert_right(LARGE_HEAD, plan.program, plan.shares)


def test_vocabulary_cut_for_a_large_head() -> None:
    """Of the scores of every word nothing is sent: only numbers a row."""
    cluster, rows, vocabulary = load_cluster("hap-4"), 4 * 128, 128256
    book = book_of(f"llama:layers=2,width=256,heads=4,seq=128,vocab={vocabulary},batch=4")
    plan = plan_graph(book.graph, cluster, book=book)
    printed("vocabulary", lines(plan.program, "head", "cross_entropy"))
    assert stored(plan.program)["head.weight"] == S(0)
    loss = next(step for step in plan.program.steps if "cross_entropy" in step.node.op)
    assert loss.rule.how == "vocabulary"
    schedule = schedule_of(plan)
    exchanged = [t for t in schedule.transfers if t.what.startswith(loss.node.name)]
    assert sent(exchanged, more_than=4) == Counter({("all_reduce", rows * 4): 3})
    assert max(t.whole_bytes for t in schedule.transfers) < rows * vocabulary * 4
    found = Searched(book, cluster, optimizer="adamw")
    without = Searched(book, cluster, optimizer="adamw", allowed=lambda node, rule: rule.how != "vocabulary")
    assert without.cost_s > found.cost_s
