"""What is priced is what runs: the collectives that real processes issue are exactly those of the schedule.

Every model of the zoo × {data parallel, stored cut, stored cut and gathered again, tensor, the planner's choice, random
programs} × {one dtype, mixed dtypes}: kind, algorithm, bytes, members, hidden or blocking, and the order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from lopsided.capturing.capture_graph import capture
from lopsided.cluster.collectives import Network
from lopsided.comm.communicator import Communicator, Handle, as_label
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import meet
from lopsided.executor.instructions import RunNode
from lopsided.ir.placement import Shares
from lopsided.models import zoo
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import plan_graph
from lopsided.planner.search import search
from lopsided.runtime.parallel import Parallel
from lopsided.schedule.cost import Scale
from lopsided.schedule.schedule import Bucket, Exchange, Redistribute, Schedule
from lopsided.verification.random_programs import random_program
from tests.support.jobs import Run, cluster_of, parsed, prices_of, run_of

SHARES = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))
BUCKET = 2**11  # bytes: small enough that every model has several buckets
PROGRAMS = ("dp", "zero", "zero-again", "tensor", "planned", "random-0", "random-1")


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


def built(spec: str) -> tuple[nn.Module, dict[str, object]]:
    """`mixed ` in front of a spec makes it so."""
    torch.manual_seed(0)
    model, batch = load(spec.removeprefix("mixed "))
    return (Mixed(model) if spec.startswith("mixed ") else model), batch


def run_named(spec: str, name: str) -> Run:
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
    if name == "tensor":
        return run_of(spec, search(book, prices).program, SHARES)
    program = data_parallel(book, prices)
    if name in ("zero", "zero-again"):
        return run_of(spec, stored_cut(program), SHARES, regather=name == "zero-again")
    return run_of(spec, program, SHARES)


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
    pm = Parallel(model, batch, plan.graph, plan, meet(plan))
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

    patch.setattr(Communicator, "_begin", begins)
    patch.setattr(Handle, "wait", waits)
    patch.setattr(RunNode, "run", runs)


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
                skewed = one.whole_bytes * scale.largest(one.cuts)
                yield from sent(item.id, one.collective, one.whole_bytes, skewed, False)

    return list(told(schedule.forward)), list(told(schedule.backward))


def plain(found: Sequence[Issued]) -> list[Issued]:
    """Exchanges inside a node are told by their node; what a region runs again by what it ran before.

    The last buckets of a pass are waited for right away, because nothing is left to compute: that is no news.
    """
    return [replace(one, item=one.item.partition(" #")[0].removesuffix(" again")) for one in found]


def differences(spec: str, name: str, crew: WorkerPool) -> list[str]:
    run = run_named(spec, name)
    plan = replace(parsed(run), bucket_bytes=BUCKET)
    wanted = [plain(one) for one in expected(plan, plan.schedule)]
    found: list[str] = []
    for rank, passes in enumerate(crew.run(issued, run)):
        for what, want, got in zip(("forward", "backward"), wanted, map(plain, passes), strict=True):
            got = [one if one.hides or not _is_bucket(one) else replace(one, hides=True) for one in got]
            if want != got:
                k = next(k for k, (a, b) in enumerate(zip([*want, None], [*got, None], strict=False)) if a != b)
                near = f"{want[k - 1 : k + 2]} != {got[k - 1 : k + 2]}"
                found.append(f"rank {rank} {what} {k} of {len(want)}, {len(got)} issued: {near}")
    return found


def _is_bucket(one: Issued) -> bool:
    return one.item.startswith(("gather.", "reduce."))


CASES = [(model, name, dtypes) for model in zoo.SMALL for name in PROGRAMS for dtypes in ("one", "mixed")]


@pytest.mark.parametrize(("model", "name", "dtypes"), CASES)
def test_the_collectives_issued_are_those_of_the_schedule(
    model: str, name: str, dtypes: str, crews: Callable[[int], WorkerPool]
) -> None:
    spec = zoo.SMALL[model] if dtypes == "one" else f"mixed {zoo.SMALL[model]}"
    assert differences(spec, name, crews(3)) == []
