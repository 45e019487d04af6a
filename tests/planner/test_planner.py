"""The whole answer: plans are right, fit, beat the classics, and are a function of what they are made from."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.capturing.retype import in_dtype
from lopsided.cluster.cluster import Cluster, Link
from lopsided.cluster.cluster_file import load_cluster
from lopsided.cluster.coefficients import KIND, coefficient
from lopsided.errors import DoesNotFitError, InputError, PlanError
from lopsided.ir.graph import Graph
from lopsided.ir.op_call import TOLERANCE, in_float64
from lopsided.ir.placement import I, S, Shares
from lopsided.ir.program import check_program, one_device
from lopsided.models import zoo
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.candidates import Limits
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import plan, plan_graph, predict
from lopsided.planner.proposals import CandidatePool
from lopsided.planner.search import Progress
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Scale, optimizer_named
from lopsided.schedule.decisions import BUCKET_BYTES
from lopsided.verification.simulator import simulate
from lopsided.verification.verifier import compare
from tests.support import clusters

RESERVE = coefficient(KIND, "memory_reserve").default or 0.0


def cluster(
    *speeds: float, memory: tuple[float, ...] = (), bytes_per_s: float = 1e9, latency_s: float = 1e-6, nodes: int = 1
) -> Cluster:
    """Devices of these speeds, in TFLOP/s, one kind each, in as many nodes (1 or one each)."""
    kinds = tuple(
        clusters.kind(
            f"d{k}",
            f"n{k}" if nodes > 1 else "n",
            speed=speed * 1e12,
            bytes_per_s=speed * 1e11,
            memory=memory[k] if memory else 2**34,
            launch_s=1e-6,
        )
        for k, speed in enumerate(speeds)
    )
    return clusters.cluster(*kinds, link=Link(latency_s, bytes_per_s))


NETWORKS = {"slow": (1e7, 1e-4), "middling": (1e9, 1e-5), "fast": (1e12, 1e-9)}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", [*zoo.SMALL])
def test_a_plan_computes_what_one_device_computes(name: str, network: str) -> None:
    module, batch = load(zoo.SMALL[name])
    bytes_per_s, latency_s = NETWORKS[network]
    # Captured as it is and widened as a graph; `simulate` takes its tensors in the graph's dtypes.
    wide = in_float64(capture(module, batch))
    # Launches cost nothing here, so that small models are worth distributing.
    on = cluster(1, 3, 2, bytes_per_s=bytes_per_s, latency_s=latency_s)
    on = replace(on, kinds=tuple(replace(kind, launch_s=1e-12) for kind in on.kinds))
    made = plan_graph(wide, on)
    check_program(made.program, derive_rules(wide))
    together = simulate(made.program, module, batch, made.shares)
    error, where = compare(together, simulate(one_device(wide), module, batch, (1.0,)))
    assert error <= TOLERANCE, where
    assert all(made.step_s <= b.step_s * (1 + 1e-9) for b in made.baselines if b.fits)


class Wide(nn.Module):
    """Two big layers around a small batch."""

    def __init__(self, width: int = 256, hidden: int = 1024) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().sum()


@pytest.fixture(scope="module")
def wide() -> Graph:
    return capture(Wide(), {"x": torch.randn(64, 256)})


def parameter_bytes(graph: Graph) -> int:
    return sum(leaf.value.bytes for leaf in graph.parameters)


def test_a_plan_is_a_function_of_graph_and_cluster(wide: Graph) -> None:
    first, second = (plan_graph(wide, cluster(1, 2)) for _ in range(2))
    assert (first.program, first.shares, first.step_s) == (second.program, second.shares, second.step_s)
    assert first.without_device == second.without_device


def test_short_of_memory_parameters_are_stored_cut_and_gathered(wide: Graph) -> None:
    whole = 4 * parameter_bytes(wide)
    plenty = plan_graph(wide, cluster(1, 1, bytes_per_s=1e13))
    short = plan_graph(wide, cluster(1, 1, bytes_per_s=1e13, memory=(whole, whole)))
    stored = dict(short.program.leaves)
    cut = [leaf for leaf in wide.parameters if stored[leaf.value.name].is_shard]
    assert cut
    assert all(used <= whole * (1 - RESERVE) for used in short.memory_bytes)
    assert max(plenty.memory_bytes) >= max(short.memory_bytes)
    assert short.step_s >= plenty.step_s * (1 - 1e-9)
    # What does not fit is not a baseline to be beaten.
    assert not next(b for b in short.baselines if b.name == "dp-ev").fits


def test_state_goes_where_memory_is_and_work_where_speed_is(wide: Graph) -> None:
    """Two devices of one speed; the second has half the memory of the first, and a whole copy fits on neither."""
    whole = 4 * parameter_bytes(wide)
    on = cluster(1, 1, bytes_per_s=1e13, memory=(whole * 1.7, whole * 0.95))
    book = derive_rules(wide)
    limits = Limits(lambda leaf: book.leaves[leaf.value.name], lambda node, rule: True)
    shop = CandidatePool(wide, book, optimizer_named("adamw"), limits, lambda _: None)
    program = stored_cut(data_parallel(book, SharePrices(shop.costs(on), Scale(on, shop.equal(on)))))
    made = shop.balanced("zero", on, program, shop.equal(on), True)
    assert made is not None
    assert made.fits
    work, state = made.shares.of(), made.shares.of("state")
    assert state[0] > state[1] + 0.2
    assert abs(work[0] - work[1]) < 0.05


def test_what_fits_nowhere_is_refused_with_the_tensor_the_device_and_the_bytes(wide: Graph) -> None:
    with pytest.raises(DoesNotFitError) as refused:
        plan_graph(wide, cluster(1, 1, memory=(2**20, 2**20)))
    text = str(refused.value)
    assert "n/d0-1" in text or "n/d1-1" in text
    assert "too much" in text
    assert "up_weight" in text or "down_weight" in text


def test_a_device_that_costs_more_than_it_brings_is_left_out(wide: Graph) -> None:
    made = plan_graph(wide, cluster(10, 0.01, bytes_per_s=1e6))
    assert made.devices == ("n/d0-1",)
    assert made.share_of("n/d1-1") == 0
    assert dict(made.without_device)["n/d1-1"] == made.step_s
    assert dict(made.without_device)["n/d0-1"] > made.step_s
    assert any("n/d1-1 is left out" in note for note in made.notes)


def test_every_device_and_node_has_its_worth() -> None:
    module, batch = load("gpt2:layers=2,width=256", batch=64)
    on = cluster(3, 3, 2, bytes_per_s=1e11, nodes=3)
    made = plan_graph(capture(module, batch), on)
    assert [name for name, _ in made.without_device] == list(on.device_names)
    assert [name for name, _ in made.without_node] == list(on.node_names)
    alone = dict(made.without_device)
    assert alone["n0/d0-1"] == pytest.approx(alone["n1/d1-1"], rel=0.05)
    assert made.step_s <= alone["n2/d2-1"] * 1.001 <= alone["n0/d0-1"] * 1.002
    assert alone["n0/d0-1"] == pytest.approx(dict(made.without_node)["n0"])


def test_one_device_is_one_device(wide: Graph) -> None:
    made = plan_graph(wide, cluster(1))
    assert made.shares == Shares((1.0,)) or made.shares.work == (1.0,)
    assert made.without_device == ()
    assert made.breakdown.blocking_s == made.breakdown.exposed_s == 0


def test_predict_agrees_with_the_plan(wide: Graph) -> None:
    made = plan_graph(wide, cluster(1, 2, 3))
    step_s, breakdown, memory = predict(
        made.program, made.shares, made.on, made.optimizer, made.regather, made.bucket_bytes
    )
    assert (step_s, breakdown, memory) == (made.step_s, made.breakdown, made.memory_bytes)
    parts = (breakdown.compute_s, breakdown.optimizer_s, breakdown.blocking_s, breakdown.exposed_s, breakdown.waiting_s)
    assert sum(parts) == pytest.approx(step_s)


def test_how_much_is_sent_at_a_time_is_planned() -> None:
    """Where sending takes as long as computing, small buckets leave early; where only latency counts, large ones do."""
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))  # 4 MiB of weights each
    graph = capture(layers, torch.ones(512, 1024), loss_fn=lambda out, _: out.sum())
    slow, late = (
        plan_graph(graph, cluster(1, 1, bytes_per_s=speed, latency_s=latency_s), pins=["*=I"])
        for speed, latency_s in ((4e9, 1e-6), (1e13, 1e-2))
    )
    assert slow.bucket_bytes < BUCKET_BYTES == late.bucket_bytes
    at_once = predict(slow.program, slow.shares, slow.on, slow.optimizer, slow.regather)[0]
    assert slow.step_s < at_once
    assert plan_graph(graph, slow.cluster, pins=["*=I"], without=["overlap"]).bucket_bytes == BUCKET_BYTES


def stored_in(made: Plan) -> dict[str, object]:
    placed = dict(made.program.leaves)
    return {leaf.target: placed[leaf.value.name] for leaf in made.graph.parameters}


def test_pins_are_kept(wide: Graph) -> None:
    fast = cluster(1, 2, bytes_per_s=1e13)
    made = plan_graph(wide, fast, pins=["*.weight=S1", "up.bias=I"])
    assert stored_in(made)["up.weight"] == stored_in(made)["down.weight"] == S(1)
    assert stored_in(made)["up.bias"] == I
    # Also where a classic that does not keep it would be faster.
    assert made.step_s > plan_graph(wide, fast).step_s
    value = wide.nodes[0].name
    made = plan_graph(wide, cluster(1, 2), pins=[f"%{value}=S1"])
    assert made.program.steps[0].rule.gives[0] == S(1)


@pytest.mark.parametrize(
    ("pin", "says"),
    [
        ("up.weight", "is not a pin"),
        ("up.weight=S7", "up.weight cannot be stored S7"),
        ("up.weight=Q", "is not a placement"),
        ("nothing.*=I", "no parameter matches"),
        ("%nothing=I", "no value matches"),
        ("%linear=S5", "cannot be made S5"),
    ],
)
def test_a_pin_that_cannot_be_kept_is_refused(wide: Graph, pin: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        plan_graph(wide, cluster(1, 2), pins=[pin])


def test_given_segments_have_shares_of_their_own(wide: Graph) -> None:
    made = plan_graph(wide, cluster(1, 2, bytes_per_s=1e13), segments=["down"])
    check_program(made.program, derive_rules(wide))
    placed = {p.by for step in made.program.steps for p in (*step.rule.needs, *step.rule.gives) if p.is_shard}
    assert placed <= {"", "segment1"}
    with pytest.raises(InputError, match="no module matches the segment 'sideways'"):
        plan_graph(wide, cluster(1, 2), segments=["sideways"])


def test_a_time_limit_ends_with_the_best_so_far(wide: Graph) -> None:
    made = plan_graph(wide, cluster(1, 2), time_limit_s=0.0)
    check_program(made.program, derive_rules(wide))
    assert all(made.step_s <= b.step_s * (1 + 1e-9) for b in made.baselines if b.fits)


def test_progress_is_reported() -> None:
    seen: list[Progress] = []
    plan(Wide(), {"x": torch.randn(64, 256)}, cluster(1, 2), progress=seen.append)
    assert all(p.bound <= p.best * (1 + 1e-9) for p in seen)


def test_another_dtype_halves_the_parameters(wide: Graph) -> None:
    narrow = in_dtype(wide, "bf16")
    assert parameter_bytes(narrow) * 2 == parameter_bytes(wide)
    assert in_dtype(wide, "f32") is wide
    with pytest.raises(InputError, match="there is no floating dtype 'i8'"):
        in_dtype(wide, "i8")


def test_a_preset_can_be_named() -> None:
    made = lopsided.plan(Wide(), {"x": torch.randn(64, 256)}, "3090+3060", optimizer="sgd", dtype="bf16")
    assert made.cluster == load_cluster("3090+3060")
    assert made.capture_s > 0
    assert math.isfinite(made.step_s)


def test_an_unknown_optimizer_is_refused(wide: Graph) -> None:
    with pytest.raises(InputError, match="there is no optimizer 'adamx'"):
        plan_graph(wide, cluster(1), optimizer="adamx")


class Deep(nn.Module):
    def __init__(self, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().sum()


@pytest.fixture(scope="module")
def deep() -> Graph:
    return capture(Deep(), {"x": torch.randn(64, 128)})


def test_pins_that_do_not_fit_are_refused_not_dropped(deep: Graph) -> None:
    small = 0.9 * 4 * parameter_bytes(deep)
    assert plan_graph(deep, cluster(1, 1, bytes_per_s=1e10, memory=(small, small))).step_s > 0
    with pytest.raises(DoesNotFitError, match="no program was found that fits"):
        plan_graph(deep, cluster(1, 1, bytes_per_s=1e10, memory=(small, small)), pins=["*=I"])


def test_a_pin_on_what_is_free_is_kept() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * ((mask > 0).float() * 2)).square().sum()

    graph = capture(Masked(), {"x": torch.randn(32, 64), "mask": torch.randn(32, 64)})
    made = plan_graph(graph, cluster(1, 1, bytes_per_s=1e13), pins=["%mul=S1"])
    assert next(step for step in made.program.steps if step.node.name == "mul").rule.gives == (S(1),)


def test_pins_that_contradict_each_other_are_refused(deep: Graph) -> None:
    with pytest.raises(InputError, match=r"layers\.0\.weight is pinned twice, as I and as S0"):
        plan_graph(deep, cluster(1, 1), pins=["*.weight=I", "layers.0.*=S0"])


def test_a_pin_to_what_was_chosen_changes_nothing(deep: Graph) -> None:
    free = plan_graph(deep, cluster(1, 2, bytes_per_s=1e13))
    chosen = stored_in(free)["layers.0.weight"]
    pinned = plan_graph(deep, cluster(1, 2, bytes_per_s=1e13), pins=[f"layers.0.weight={chosen}"])
    assert pinned.step_s == pytest.approx(free.step_s, rel=5e-3)


@pytest.mark.parametrize("nodes", [1, 2])
def test_devices_with_little_memory_are_left_out_where_nothing_fits_on_them(deep: Graph, nodes: int) -> None:
    size = parameter_bytes(deep)
    on = cluster(2, 2, 1, 1, memory=(0.02 * size, 0.02 * size, 3.5 * size, 3.5 * size), bytes_per_s=1e11, nodes=nodes)
    made = plan_graph(deep, on)
    assert made.step_s <= plan_graph(deep, on.only([2, 3])).step_s * 1.001
    assert {name.rpartition("/")[2] for name in made.devices} <= {"d2-1", "d3-1"}


def test_given_and_found_segments_do_not_mix() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x))).square().mean() + (x @ self.a.weight.T).square().mean()

    torch.manual_seed(0)
    graph = capture(Shared(), {"x": torch.randn(9, 16)})
    on = cluster(1, 3, 2, bytes_per_s=1e14, latency_s=1e-13)
    plain = plan_graph(graph, on)
    made = plan_graph(graph, on, segments=["b"])
    check_program(made.program, derive_rules(graph))
    names = {p.by for step in made.program.steps for p in (*step.rule.needs, *step.rule.gives) if p.is_shard}
    assert names - {""} <= {name for name, _ in made.shares.named}
    # Equal shares are a choice of segments too.
    assert made.step_s <= plain.step_s * 1.001
    assert [b.step_s for b in made.baselines] == [b.step_s for b in plain.baselines]
    with pytest.raises(InputError, match="a segment has no name"):
        plan_graph(graph, on, segments=[""])


def test_no_device_is_worth_more_than_its_node() -> None:
    four = {"count": 4, "bytes_per_s": 1e11, "launch_s": 1e-6}
    kinds = (clusters.kind(n, f"{n}-box", speed=s * 1e12, **four) for n, s in (("a", 4.0), ("b", 1.0)))
    on = clusters.cluster(*kinds, within=Link(1e-6, 1e11), between=Link(1e-5, 1e9))
    module, batch = load("gpt2:layers=2,width=128", batch=32)
    made = plan_graph(capture(module, batch), on)
    nodes = dict(made.without_node)
    assert all(step_s <= nodes[name.partition("/")[0]] for name, step_s in made.without_device)


def test_interrupted_the_best_plan_so_far_is_returned(deep: Graph) -> None:
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 3:
            raise KeyboardInterrupt

    made = plan_graph(deep, cluster(1, 2), progress=interrupt)
    assert "interrupted: this is the best so far" in made.notes
    assert made.without_device == ()
    check_program(made.program, derive_rules(deep))
    assert all(made.step_s <= b.step_s * (1 + 1e-9) for b in made.baselines if b.fits)


def test_a_time_limit_is_spoken_of(deep: Graph) -> None:
    assert (
        "the time limit was reached: this is the best so far" in plan_graph(deep, cluster(1, 2), time_limit_s=0).notes
    )
    with pytest.raises(InputError, match="is not one"):
        plan_graph(deep, cluster(1, 2), time_limit_s=float("nan"))


def test_attention_keeps_no_more_in_half_precision() -> None:
    with torch.device("meta"):
        graph = capture(*load("gpt2:layers=2,width=128", batch=8))
    wide, narrow = (plan_graph(g, cluster(1)) for g in (graph, in_dtype(graph, "bf16")))
    assert narrow.memory_bytes[0] < 0.7 * wide.memory_bytes[0]


def test_on_a_part_of_the_cluster_data_parallelism_there_is_compared_as_well(deep: Graph) -> None:
    on = cluster(10, 10, 0.001, bytes_per_s=1e12, latency_s=1e-9)
    made = plan_graph(deep, on)
    assert made.devices == ("n/d0-1", "n/d1-1")
    part = next(b for b in made.baselines if b.name == "dp-part")
    assert made.step_s <= part.step_s < next(b for b in made.baselines if b.name == "dp-ev").step_s


def test_a_plan_that_is_known_is_never_beaten_by_a_slower_one(wide: Graph) -> None:
    on = cluster(4, 2, 1)
    first = plan_graph(wide, on)
    # The clock said otherwise: the first device is half as fast, the network twice.
    corrected = replace(
        on,
        kinds=tuple(replace(k, flops_per_s=(("f32", k.speed / (2 if n == 0 else 1)),)) for n, k in enumerate(on.kinds)),
        within=replace(on.within, bytes_per_s=2 * on.within.bytes_per_s),
    )
    part = corrected
    for device in corrected.device_names:
        part = part if device in first.devices else part.without_device(device)
    now_s, *_ = predict(first.program, first.shares, part, first.optimizer, first.regather, first.bucket_bytes)
    again = plan_graph(wide, corrected, known=[first])
    assert again.step_s <= now_s * (1 + 1e-9)
    # With no time to search, it is what is known.
    hurried = plan_graph(wide, on, time_limit_s=0, known=[first])
    assert hurried.step_s <= first.step_s * (1 + 1e-9)
    with pytest.raises(PlanError, match="another model"):
        plan_graph(capture(*load("mlp")), on, known=[first])
    elsewhere = replace(on, kinds=tuple(replace(kind, node="elsewhere") for kind in on.kinds))
    with pytest.raises(PlanError, match="does not have as it was"):
        plan_graph(wide, elsewhere, known=[first])


def test_a_known_plan_may_leave_out_devices_that_are_alike(wide: Graph) -> None:
    fast, slow = cluster(8, 0.01).kinds
    on = clusters.cluster(replace(fast, count=2), replace(slow, count=2), link=Link(1e-6, 1e9))
    first = plan_graph(wide, on)
    assert len(first.devices) < on.devices
    assert plan_graph(wide, on, known=[first]).step_s <= first.step_s * (1 + 1e-9)
