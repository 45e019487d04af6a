"""How fast a plan trains, and how well its memory was predicted. Writes results/runtime.json.

python benchmarks/runtime.py [--cuda] [--quick] [--rounds 15] [--only equal,zero,alone,memory]

Every case runs both subjects in the same processes, block after block in an order that is shuffled anew in each round.
A block is one or a few whole steps: forward, backward, AdamW, zero_grad. What counts is the ratio of the two subjects
within a round, and of these the median; the spread is that of the middle half. On a machine that does other things too,
the ratio of processor seconds tells more; it is written beside.

    equal    a data-parallel plan with equal shares       against `DistributedDataParallel`, as it comes
    zero     the same, stored cut and gathered again      against FSDP2: `fully_shard` on every layer and on the whole
    alone    a one-device plan                            against the plain model
    memory   the most that is held at once in a step      against the plan's prediction

Processes talk over gloo. With `--cuda` all of them share one GPU, and results/runtime-cuda.json is written.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lopsided import capture, derive_rules, parallelize
from lopsided.cluster.cluster import Cluster, Kind, Link
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import RankError
from lopsided.ir.placement import Shares
from lopsided.ir.program import Program, one_device
from lopsided.models import by_name as models
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan, SearchReport
from lopsided.planner.plan_file import parse_plan, plan_text
from lopsided.planner.planner import plan_graph, predict
from lopsided.planner.search_cost import SharePrices
from lopsided.schedule.cost import Costs, Scale, optimizer_named

GOALS = {"equal": 1.05, "zero": 1.05, "alone": 1.02, "memory": 0.10}
KINDS = tuple(GOALS)
PEERS = {"equal": "ddp", "zero": "fsdp", "alone": "plain"}
DEVICES = 4
WARM_UP = 3
OURS = "lopsided"
TIMEOUT_S = 150.0
FSDP2 = (
    "fully_shard on every layer and then on the whole model, over a one-dimensional device mesh, in float32, all else "
    "as it comes: layers are gathered again in the backward pass, what belongs to the root (embeddings, head) is not"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model whose batch is that of all devices together, and how often it is run."""

    kind: str
    model: str
    devices: int = DEVICES
    steps: int = 1  # in a block
    plan: str = ""  # what is planned, where that is not told by the kind
    note: str = ""


def cases(cuda: bool) -> list[Case]:
    if not cuda:
        gpt, bert = "gpt2:layers=4,width=384,seq=128,vocab=8192", "bert:layers=4,width=384,seq=128,vocab=8192"
        return [
            *(Case(kind, f"{model},batch=8") for kind in ("equal", "zero") for model in (gpt, bert)),
            *(Case("alone", f"{model},batch=2", 1) for model in (gpt, bert)),
            # Without dropout: with it, the CPU's attention keeps its scores, which no GPU's does.
            *(
                Case("memory", f"{model},dropout=0,batch=16", plan=plan)
                for model in (gpt, bert)
                for plan in ("equal", "zero", "unequal")
            ),
        ]
    small = "gpt2:layers=6,width=128,seq=64,vocab=1000,batch=2"
    gpt, bert = "gpt2:layers=4,seq=512,vocab=16384", "bert:layers=4,vocab=16384"
    return [
        *(
            Case(kind, model, steps=1)
            for kind in ("equal", "zero")
            for model in (f"{gpt},batch=16", f"{bert},batch=64")
        ),
        *(Case("alone", model, 1, steps=5) for model in ("gpt2:seq=512,batch=8", "bert:batch=32")),
        Case("alone", small, 1, steps=10, note="kernels so small that launching them takes longer"),
        *(
            Case("memory", model, plan=plan)
            for model in (f"{gpt},batch=32", f"{bert},batch=128")
            for plan in ("equal", "zero", "unequal")
        ),
    ]


# Plans


def cluster_of(speeds: Sequence[float], cuda: bool) -> Cluster:
    """Devices of these relative speeds, alike otherwise."""
    kinds = [
        Kind(
            f"{'gpu' if cuda else 'cpu'}{k}" if len(set(speeds)) > 1 else "one",
            "box",
            1,
            speeds.count(speed),
            (("f32", speed * 1e10),),
            1e10,
            2**36,
            1e-6,
        )
        for k, speed in enumerate(dict.fromkeys(speeds))
    ]
    return Cluster("box", "", tuple(kinds), Link(1e-5, 1e9), Link(1e-4, 1e9))


def plan_for(case: Case, cuda: bool) -> Plan:
    """What is asked for, predicted as any plan is."""
    model, batch = models.load(case.model)
    graph = capture(model, batch)
    what = case.plan or case.kind
    if what == "unequal":
        return plan_graph(graph, cluster_of((4.0, 4.0, 2.0, 1.0), cuda))
    where, shares = cluster_of((1.0,) * case.devices, cuda), Shares((1 / case.devices,) * case.devices)
    if what == "alone":
        return by_hand(one_device(graph), shares, where)
    prices = SharePrices(Costs(graph, where, optimizer_named("adamw")), Scale(where, shares))
    program = data_parallel(derive_rules(graph), prices)
    return by_hand(stored_cut(program) if what == "zero" else program, shares, where, regather=what == "zero")


def by_hand(program: Program, shares: Shares, where: Cluster, *, regather: bool = False) -> Plan:
    step_s, breakdown, memory = predict(program, shares, where, "adamw", regather)
    report = SearchReport(0.0, 0, 0.0, 0.0, 0.0, "by hand", 0, ())
    return Plan(where, where, program, shares, "adamw", regather, step_s, breakdown, memory, (), report, (), ())


# What the processes do. Each is one of a group; the functions run in all of them at once.

Step = Callable[[], Tensor]


def subject(name: str, case: Case, plan: str, device: torch.device) -> Step:
    """One whole step of training, on this process's rows of the batch."""
    torch.manual_seed(0)
    model, batch = models.load(case.model)
    model.to(device)
    batch = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    rank, size = dist.get_rank(), dist.get_world_size()
    if name == OURS:
        ours = parallelize(model, batch, parse_plan(plan), device=device)
        trained: nn.Module = ours
        cut, rank = ours.shares.cut, max(ours.world.place, 0)
    else:
        trained, cut = wrapped(name, model, device), Shares((1 / size,) * size).cut
    if case.kind == "memory":  # some plans do not cut the batch, or not it alone
        cut = Shares((1.0,)).cut
        rank = 0
    rows = {key: _rows(tensor, cut, rank) for key, tensor in batch.items() if isinstance(tensor, Tensor)}
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)

    def step() -> Tensor:
        loss: Tensor = trained(**rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _rows(tensor: Tensor, cut: Callable[[int], Sequence[int]], rank: int) -> Tensor:
    counts = cut(tensor.shape[0])
    return tensor.narrow(0, sum(counts[:rank]), counts[rank])


def wrapped(name: str, model: nn.Module, device: torch.device) -> nn.Module:
    if name == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if name == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def race(case: Case, plan: str, place: str, rounds: int) -> dict[str, list[list[float]]]:
    """For each subject and each round: seconds of a block, and seconds of this process's processor."""
    device = torch.device(place)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps = {name: subject(name, case, plan, device) for name in (PEERS[case.kind], OURS)}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    taken: dict[str, list[list[float]]] = {name: [] for name in steps}
    shuffle = random.Random(0)  # the same on all
    gc.collect()
    gc.disable()  # or one subject pays for the garbage of the other
    for _ in range(rounds):
        for name in shuffle.sample(list(steps), len(steps)):
            gc.collect()
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            for _ in range(case.steps):
                steps[name]()
            _settle(device)
            taken[name].append([time.perf_counter() - started, time.process_time() - used])
    gc.enable()
    return taken


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def most_held(case: Case, plan: str, place: str) -> int:
    """Bytes of tensors at the worst moment of the third step, when optimizer state and gradients exist."""
    device = torch.device(place)
    return peak_bytes(lambda: subject(OURS, case, plan, device), device)


def peak_bytes(made: Callable[[], Step], device: torch.device) -> int:
    """The most bytes of tensors at once in the third of the steps that are made."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if device.type == "cuda":
        step = made()
        for _ in range(2):
            step()
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    # The profiler counts from where it is started, so it is there before the model is.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        step = made()
        for _ in range(2):
            step()
        gc.collect()
        with torch.profiler.record_function("the step"):
            step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return _peak(json.loads(path.read_text())["traceEvents"])


def _peak(events: Sequence[dict[str, Any]]) -> int:
    """The most that was allocated at once during the step, by the allocator's own account."""
    step = next(event for event in events if event.get("name") == "the step" and event.get("ph") == "X")
    changes = sorted(
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    )
    held = most = 0
    for at, size in changes:
        held += size
        if step["ts"] <= at <= step["ts"] + step["dur"]:
            most = max(most, held)
    return most


# What is made of it


def raced(case: Case, rounds: int, cuda: bool) -> dict[str, Any]:
    plan, peer = plan_for(case, cuda), PEERS[case.kind]
    with WorkerPool(case.devices, timeout_s=TIMEOUT_S) as pool:
        told = pool.run(race, case, plan_text(plan), "cuda:0" if cuda else "cpu", rounds)
    # A step takes as long as its slowest process; processor seconds add up.
    seconds = {n: [max(rank[n][k][0] for rank in told) / case.steps for k in range(rounds)] for n in (peer, OURS)}
    cpu = {n: [sum(rank[n][k][1] for rank in told) / case.steps for k in range(rounds)] for n in (peer, OURS)}
    ratios, cpu_ratios = (
        [ours / theirs for ours, theirs in zip(of[OURS], of[peer], strict=True)] for of in (seconds, cpu)
    )
    found = asdict(case) | {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "median_s": {name: statistics.median(taken) for name, taken in seconds.items()},
        "ratio": statistics.median(ratios),
        "middle_half": _middle_half(ratios),
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_middle_half": _middle_half(cpu_ratios),
    }
    low, high = found["middle_half"]
    print(
        f"{case.kind:<7}{case.model:<56} {peer} {found['median_s'][peer]:.3f} s, ours {found['median_s'][OURS]:.3f} s "
        f"→ {found['ratio']:.3f}× ({low:.3f} to {high:.3f}; processor {found['cpu_ratio']:.3f}×)",
        flush=True,
    )
    return found


def _middle_half(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def weighed(case: Case, cuda: bool) -> dict[str, Any]:
    plan = plan_for(case, cuda)
    with WorkerPool(case.devices, timeout_s=TIMEOUT_S) as pool:
        held = pool.run(most_held, case, plan_text(plan), "cuda:0" if cuda else "cpu")
    # Devices the plan does not use hold nothing worth counting.
    rows = [(m, p) for m, p in zip(held, plan.memory_bytes, strict=False)]
    off = [measured / predicted - 1 for measured, predicted in rows]
    worst = max(off, key=abs)
    print(
        f"memory {case.plan:<8}{case.model:<56}",
        ", ".join(f"{measured / 2**20:.0f} of {predicted / 2**20:.0f}" for measured, predicted in rows),
        f"MiB → {worst:+.1%} at worst",
        flush=True,
    )
    return asdict(case) | {
        "shares": list(plan.shares.work),
        "measured_bytes": held,
        "predicted_bytes": list(plan.memory_bytes),
        "off": off,
        "worst": worst,
    }


def _is_met(kind: str, row: dict[str, Any]) -> bool:
    """A peer that cannot run is no goal."""
    if "error" in row:
        return kind != "memory"
    return bool(abs(row["worst"]) <= GOALS[kind] if kind == "memory" else row["ratio"] <= GOALS[kind])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="processes that share one GPU")
    parser.add_argument("--quick", action="store_true", help="the first case of each kind, few rounds, nothing written")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default=",".join(KINDS), help="which kinds, with commas between")
    options = parser.parse_args()
    kinds = options.only.split(",")
    chosen = [case for case in cases(options.cuda) if case.kind in kinds]
    rounds = options.rounds
    if options.quick:
        chosen, rounds = [next(case for case in chosen if case.kind == kind) for kind in kinds], 3
    started = time.perf_counter()
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for case in chosen:
        try:
            row = weighed(case, options.cuda) if case.kind == "memory" else raced(case, rounds, options.cuda)
        except RankError as error:
            # A peer that cannot run here, such as one that gloo does not serve on a GPU.
            lines = [line for line in str(error).splitlines() if "Error" in line]
            row = asdict(case) | {"error": lines[-1] if lines else str(error)}
            print(case.kind, case.model, row["error"], flush=True)
        rows[case.kind].append(row)
    met = {kind: all(_is_met(kind, row) for row in found) for kind, found in rows.items()}
    print("goals met:", met)
    if not options.quick:
        about = {"goals": GOALS, "met": met, "fsdp2": FSDP2, "rounds": rounds}
        where = {"device": torch.cuda.get_device_name()} if options.cuda else {}
        wall = {"wall_s": time.perf_counter() - started}
        record.write("runtime-cuda" if options.cuda else "runtime", about | where | wall | rows)


if __name__ == "__main__":
    main()
