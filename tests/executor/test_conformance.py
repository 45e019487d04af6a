"""What is priced is what runs: the collectives that real processes issue are exactly those of the schedule.

Every model of the zoo × {data parallel, stored cut, stored cut and gathered again, tensor, the planner's choice, random
programs} × {one dtype, mixed dtypes}: kind, algorithm, bytes, members, hidden or blocking, and the order.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.collectives import Network
from lopsided.comm.communicator import Communicator, Handle, as_label
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import meet
from lopsided.executor.instructions import RunNode
from lopsided.ir.graph_text import parse_graph
from lopsided.ir.placement import Shares
from lopsided.ir.program import Chain, Program
from lopsided.models import zoo
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import plan_graph
from lopsided.planner.recompute import blocks_of
from lopsided.planner.search import search
from lopsided.runtime.parallel import Parallel
from lopsided.schedule.cost import Scale
from lopsided.schedule.decisions import LEVELS, Rerun
from lopsided.schedule.loss_heads import loss_heads
from lopsided.schedule.rounds import in_rounds
from lopsided.schedule.schedule import (
    Bucket,
    Exchange,
    GatherBucket,
    Redistribute,
    ReduceBucket,
    Schedule,
)
from lopsided.verification.verifier import random_program
from tests.support.jobs import Run, cluster_of, parsed, prices_of, run_of

SHARES = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))
BUCKET = 2**11  # bytes: small enough that every model has several buckets
PROGRAMS = ("dp", "zero", "zero-again", "tensor", "recut", "planned", "random-0", "random-1")


class Mixed(nn.Module):
    """The model under autocast, with every second matrix of a layer in half precision."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        shared = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        for layer in layers[::2]:
            if id(layer.weight) not in shared:
                layer.to(torch.bfloat16)

    def forward(self, **batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**batch)


class Checkpointed(nn.Module):
    """Two regions that run again, and a layer that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24), nn.Dropout(0.1)) for _ in range(2)
        )
        self.head = nn.Linear(24, 7)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(x), labels)


def built(spec: str) -> tuple[nn.Module, dict[str, object]]:
    """`mixed ` in front of a spec makes it so."""
    torch.manual_seed(0)
    if spec == "checkpointed":
        return Checkpointed(), {"x": torch.randn(9, 24), "labels": torch.arange(9) % 7}
    model, batch = load(spec.removeprefix("mixed "))
    return (Mixed(model) if spec.startswith("mixed ") else model), batch


def run_named(spec: str, name: str) -> Run:
    if name.endswith(" in stretches"):
        return replace(run_named(spec, name.removesuffix(" in stretches")), stretch=24)
    if name.endswith(" in chunks"):
        run = run_named(spec, name.removesuffix(" in chunks"))
        heads = loss_heads(parse_graph(run.graph))
        return replace(run, reruns=(*run.reruns, *(head.chunked(rows=16) for head in heads)))
    if name.endswith(" in blocks"):
        run = run_named(spec, name.removesuffix(" in blocks"))
        graph = parse_graph(run.graph)
        levels = itertools.cycle(LEVELS)
        heads = {name for head in loss_heads(graph) for name in head.nodes}
        spans = [(graph.nodes[start].name, graph.nodes[stop - 1].name) for start, stop in blocks_of(graph, heads)]
        return replace(run, reruns=tuple(Rerun(*span, level) for span, level in zip(spans, levels, strict=False)))
    if name.endswith(" in rounds"):
        return in_three_rounds(spec, name.removesuffix(" in rounds"))
    model, batch = built(spec)
    book = derive_rules(capture(model, batch))
    prices = prices_of(book.graph, SHARES)
    if name.startswith("random"):
        seed = int(name.removeprefix("random-"))
        program = random_program(book, random.Random(seed))
        return run_of(spec, program, SHARES, regather=bool(seed % 2))
    if name == "planned":
        plan = plan_graph(book.graph, cluster_of(3, speeds=[4e6, 8e6, 12e6]), book=book)
        if plan.on.devices == 3:
            return run_of(spec, plan.program, plan.shares, regather=plan.regather)
    if name in ("tensor", "recut"):
        program = search(book, prices).program
        return run_of(spec, recut(program) if name == "recut" else program, SHARES)
    program = data_parallel(book, prices)
    if name in ("zero", "zero-again"):
        return run_of(spec, stored_cut(program), SHARES, regather=name == "zero-again")
    return run_of(spec, program, SHARES)


def in_three_rounds(spec: str, name: str) -> Run:
    model, batch = built(spec)
    graph = in_rounds(capture(model, batch), 3).graph
    program = data_parallel(derive_rules(graph), prices_of(graph, SHARES))
    if name == "random":
        program = random_program(derive_rules(graph), random.Random(3))
    run = run_of(spec, program if name in ("dp", "random") else stored_cut(program), SHARES)
    reruns = tuple(
        Rerun(graph.nodes[start].name, graph.nodes[stop - 1].name)
        for start, stop in (blocks_of(graph) if name == "blocks" else ())
    )
    return replace(run, regather=name == "zero-again", reruns=reruns, microbatches=3)


def recut(program: Program) -> Program:
    """Parameters that are used as they are stored, cut, are stored in other pieces: memory has shares of its own."""
    parameters = {leaf.value.name for leaf in program.graph.parameters}
    other = {name: p.cut_by("state") for name, p in program.leaves if name in parameters and p.is_shard}

    def chain(name: str, made: Chain) -> Chain:
        return (other[name], *made) if name in other and made[0] == stored[name] else made

    stored = dict(program.leaves)
    steps = tuple(replace(step, chains=tuple(map(chain, step.node.operands, step.chains))) for step in program.steps)
    return replace(program, leaves=tuple((name, other.get(name, p)) for name, p in program.leaves), steps=steps)


# What is issued


@dataclass(frozen=True)
class Issued:
    """A collective: for which item, what it is, how it is carried out, and whether it was waited for at once."""

    item: str
    collective: str
    algorithm: str
    whole_bytes: int
    hides: bool


def issued(run: Run) -> tuple[list[Issued], list[Issued]]:
    """In a worker: what one step sends, forward and backward."""
    plan = replace(parsed(run), bucket_bytes=BUCKET)
    model, batch = built(run.spec)
    pm = Parallel(model, batch, capture(model, batch) if run.microbatches > 1 else plan.graph, plan, meet(plan))
    pm.train()
    log: list[tuple[str, object]] = []
    with pytest.MonkeyPatch.context() as patch:
        _listen(patch, log)
        loss = pm(**batch)
        forward = [*log]
        log.clear()
        loss.backward()
        backward = [*log]
    pm.close()
    return list(_told(forward)), list(_told(backward))


def _listen(patch: pytest.MonkeyPatch, log: list[tuple[str, object]]) -> None:
    begin, wait, run_node = Communicator._begin, Handle.wait, RunNode.run

    def begins(self: Communicator, what, result, run, source, target, about, then=()):  # type: ignore[no-untyped-def]
        handle = begin(self, what, result, run, source, target, about, then)
        if as_label(what).item:
            log.append(("sent", (handle, as_label(what).item, about)))
        return handle

    def waits(self: Handle) -> Tensor:
        log.append(("waits", self))
        return wait(self)

    def runs(self: RunNode, slots, this):  # type: ignore[no-untyped-def]
        log.append(("runs", self.node.name))
        run_node(self, slots, this)
        for result in (slots[slot] for slot in self.results):
            if result.requires_grad:
                result.register_hook(lambda _: log.append(("runs", f"∂{self.node.name}")))

    patch.setattr(Communicator, "_begin", begins)
    patch.setattr(Handle, "wait", waits)
    patch.setattr(RunNode, "run", runs)
    # What runs as one function runs node by node in the same place.
    patch.setattr("lopsided.executor.compiled.function_of", lambda nodes, operands: None)


def _told(log: Sequence[tuple[str, object]]) -> Iterator[Issued]:
    for k, (event, about) in enumerate(log):
        if event == "sent":
            handle, item, (collective, algorithm, size, _) = about  # type: ignore[misc]
            waited = k + 1 < len(log) and log[k + 1] == ("waits", handle)
            yield Issued(item, collective, algorithm, size, hides=not waited)


# What is expected


def expected(plan: Plan, schedule: Schedule) -> tuple[list[Issued], list[Issued]]:
    network, scale = Network(plan.on), Scale(plan.on, plan.shares)

    def sent(name: str, collective: str, size: int, skewed: float, hides: bool) -> Iterator[Issued]:
        if size:
            algorithm = network.best(collective, size, skewed / size).implementation
            if (collective, algorithm) == ("all_to_all", "gather"):
                collective, algorithm = "all_gather", "padded"
            yield Issued(name, collective, algorithm, size, hides)

    def told(items: Sequence[object]) -> Iterator[Issued]:
        for item in items:
            if isinstance(item, Bucket):
                skewed = sum(one.whole_bytes * scale.largest(one.cuts) for one in item.transfers)
                yield from sent(item.id, item.collective, item.whole_bytes, skewed, True)
            elif isinstance(item, Exchange) or (isinstance(item, Redistribute) and item.transfer and not item.bucket):
                one = item.transfer
                size = one.bytes_among(plan.on.devices)
                yield from sent(item.id, one.collective, size, size * scale.largest(one.cuts), False)

    # The rounds before the last run forward and backward before the last runs forward.
    *before, (forward, backward) = schedule.rounds()
    return list(told([*(item for both in before for items in both for item in items), *forward])), list(told(backward))


def plain(found: Sequence[Issued]) -> list[Issued]:
    """Exchanges inside a node are told by their node; what a region runs again by what it ran before."""
    return [replace(one, item=one.item.partition(" #")[0].removesuffix(" again")) for one in found]


def differences(spec: str, name: str, pool: WorkerPool) -> list[str]:
    run = run_named(spec, name)
    plan = replace(parsed(run), bucket_bytes=BUCKET)
    wanted = [plain(one) for one in expected(plan, plan.schedule)]
    at_once = needed_at_once(plan.schedule)
    found: list[str] = []
    for rank, passes in enumerate(pool.run(issued, run)):
        for what, want, got in zip(("forward", "backward"), wanted, map(plain, passes), strict=True):
            got = [replace(one, hides=True) if one.item in at_once else one for one in got]
            if want != got:
                k = next(k for k, (a, b) in enumerate(zip([*want, None], [*got, None], strict=False)) if a != b)
                near = f"{want[k - 1 : k + 2]} != {got[k - 1 : k + 2]}"
                found.append(f"rank {rank} {what} {k} of {len(want)}, {len(got)} issued: {near}")
    return found


def needed_at_once(schedule: Schedule) -> set[str]:
    """Buckets behind which nothing is computed: they are taken right away, or end the backward pass."""
    found = {item.id for item in itertools.takewhile(lambda i: isinstance(i, ReduceBucket), schedule.backward[::-1])}
    for item, after in itertools.pairwise(schedule.passes):
        if isinstance(item, GatherBucket) and isinstance(after, Redistribute) and after.bucket == item.id:
            found.add(item.id)
    return found


CASES = [(model, name, dtypes) for model in zoo.SMALL for name in PROGRAMS for dtypes in ("one", "mixed")]


@pytest.mark.sampled(32)
@pytest.mark.parametrize(("model", "name", "dtypes"), CASES)
def test_the_collectives_issued_are_those_of_the_schedule(
    model: str, name: str, dtypes: str, worker_pools: Callable[[int], WorkerPool]
) -> None:
    spec = zoo.SMALL[model] if dtypes == "one" else f"mixed {zoo.SMALL[model]}"
    assert differences(spec, name, worker_pools(3)) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_regions_that_run_again_issue_what_the_schedule_says(
    name: str, worker_pools: Callable[[int], WorkerPool]
) -> None:
    assert differences("checkpointed", name, worker_pools(3)) == []


@pytest.mark.parametrize("name", ["dp", "zero-again", "random-1"])
def test_planned_regions_issue_what_the_schedule_says(name: str, worker_pools: Callable[[int], WorkerPool]) -> None:
    assert differences(zoo.SMALL["llama"], f"{name} in blocks", worker_pools(3)) == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*PROGRAMS, "zero-again in blocks", "dp in blocks"])
@pytest.mark.parametrize("model", ["gpt2", "llama", "t5", "resnet50"])
def test_stretches_issue_what_the_schedule_says(
    model: str, name: str, worker_pools: Callable[[int], WorkerPool]
) -> None:
    assert differences(zoo.SMALL[model], f"{name} in stretches", worker_pools(3)) == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["dp", "zero", "zero-again", "blocks", "random"])
@pytest.mark.parametrize("model", ["gpt2", "t5", "vit"])
def test_rounds_issue_what_the_schedule_says(model: str, name: str, worker_pools: Callable[[int], WorkerPool]) -> None:
    spec = re.sub(r"batch=\d+", "batch=6", zoo.SMALL[model])
    assert differences(spec, f"{name} in rounds", worker_pools(3)) == []


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*PROGRAMS, "zero-again in blocks", "dp in blocks", "dp in stretches"])
@pytest.mark.parametrize("model", ["gpt2", "llama", "mixed bert", "t5"])
def test_losses_in_chunks_issue_what_the_schedule_says(
    model: str, name: str, worker_pools: Callable[[int], WorkerPool]
) -> None:
    kind, _, small = model.rpartition(" ")
    spec = f"{kind} {zoo.SMALL[small]}".strip()
    assert differences(spec, f"{name} in chunks", worker_pools(3)) == []


def test_parameters_of_two_dtypes_never_share_a_bucket() -> None:
    run = run_named(f"mixed {zoo.SMALL['mlp']}", "dp")
    schedule = replace(parsed(run), bucket_bytes=2**30).schedule
    buckets = [item for item in schedule.backward if isinstance(item, Bucket)]
    assert sorted(bucket.dtype for bucket in buckets) == ["bf16", "f32"]
    assert all({one.dtype for one in bucket.transfers} == {bucket.dtype} for bucket in buckets)


def test_a_recut_parameter_travels_behind_computing() -> None:
    schedule = parsed(run_named(zoo.SMALL["gpt2"], "recut")).schedule
    moved = [item for item in schedule.redistributed if "@state" in str(item.source)]
    assert moved
    assert all(item.bucket and item.transfer and item.transfer.collective == "all_to_all" for item in moved)
