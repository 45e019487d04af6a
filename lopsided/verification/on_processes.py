"""The proof of sameness on local processes, for anyone's model: programs given as texts, run for real.

In: the MODEL of a command line and a plan, or shares. Out: `Claim`s, what was compared, the worst error and where.

    jobs_of_plan            a step in float64 and a short training, by the plan
    jobs_at_large           the same by the classics, and steps of random programs
    prove                   runs the jobs on a `WorkerPool`
    on_simulated_devices    the step of a plan, where there are too many devices for processes

Texts travel to the processes, not objects: each builds the model itself, and takes rank 0's numbers. There
`compare_step` and `compare_training` say how the same it is (`Sameness`): the worst relative errors of loss, gradients
and buffers in float64, and of the losses of a short training in float32. One device is the simulator's, which draws the
same random numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lopsided.capturing.call import arguments_of, flatten_batch, in_form_of
from lopsided.capturing.capture_graph import capture
from lopsided.capturing.retype import in_dtype
from lopsided.cluster.cluster import Cluster, Kind, Link
from lopsided.cluster.cluster_file import parse_cluster
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import World, meet
from lopsided.errors import PlanError
from lopsided.executor.compiled import NOTHING_MADE, Made, made_so_far
from lopsided.ir.graph import DTYPES, Graph
from lopsided.ir.graph_text import parse_graph
from lopsided.ir.op_call import TOLERANCE, default_dtype_of, in_float64
from lopsided.ir.placement import Shares
from lopsided.ir.program import Program, one_device, parse_program
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.ops.simulated_devices import SeededRandomness
from lopsided.ops.trial import relative_error
from lopsided.planner.baselines import STATE, data_parallel, stored_cut
from lopsided.planner.plan_data import Breakdown, Plan, SearchReport
from lopsided.planner.plan_file import load_plan
from lopsided.planner.search_cost import SharePrices
from lopsided.runtime.agreement import differences, in_group_order
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parameters.norms import clip_grad_norm_
from lopsided.runtime.parameters.piece_tensors import plain, plain_gradient
from lopsided.schedule.cost import Costs, Scale, optimizer_named
from lopsided.schedule.decisions import Decisions, OnHost, Rerun
from lopsided.schedule.rounds import Rounds, in_rounds, may_draw
from lopsided.schedule.stretches import most_nodes
from lopsided.verification.simulator import Simulation, simulate
from lopsided.verification.verifier import (
    calm_of,
    compare,
    copied,
    floor_of,
    random_program,
    random_shares,
    widened,
    with_tensors,
)

STEPS = 20
CURVE_TOLERANCE = {"f64": 1e-7, "f32": 1e-4, "f16": 2e-2, "bf16": 1e-1}
"""How far, relatively, the losses of a short training may be from one device's: some tens of roundings in half
precision, where sums in another order round to other numbers, and more where training magnifies them."""


Built = tuple[nn.Module, object]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model as every process can build it."""

    spec: str
    batch: int | None
    seed: int
    dtype: str  # of its parameters; "" for its own


@dataclass(frozen=True, slots=True)
class ProcessesJob:
    """A program and its shares, in texts and numbers: what can be sent to another process."""

    what: str
    subject: Subject
    graph: str
    program: str
    shares: Shares
    regather: bool
    reruns: tuple[Rerun, ...]
    microbatches: int
    cluster: str
    namespaces: tuple[str, ...]
    trains: bool  # STEPS steps in its own dtype, or one in float64
    tolerance: float
    on_host: tuple[OnHost, ...] = ()
    stretch: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What was compared with one device, how far it is off at most, and where."""

    what: str
    error: float
    where: str
    tolerance: float
    functions: Made = NOTHING_MADE  # of all processes

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


# What is to be run


def planned(subject: Subject, file: str, graph: Graph) -> tuple[Subject, Plan]:
    """The plan in a file, refused unless it is one for the captured graph, in its own dtype or another."""
    plan = load_plan(file, namespaces=graph.namespaces)
    differs = differences(plan.graph, in_rounds(graph, plan.microbatches).graph)
    dtype = _dtype_of(plan.graph)
    if differs and dtype != _dtype_of(graph):
        retyped = in_rounds(in_dtype(graph, dtype), plan.microbatches).graph
        if plan.graph.fingerprint == retyped.fingerprint:
            return replace(subject, dtype=dtype), plan
    if differs:
        raise PlanError(
            "the plan belongs to another model or batch: " + "; ".join(differs),
            where=file,
            do="give the model and batch that were planned (--batch), or plan these with `lopsided plan`",
        )
    return subject, plan


def jobs_of_plan(subject: Subject, plan: Plan) -> list[ProcessesJob]:
    both = _both("the plan", subject, plan.program, plan.shares, plan.regather, plan.on)
    return [
        replace(job, reruns=plan.reruns, on_host=plan.on_host, microbatches=plan.microbatches, stretch=plan.stretch)
        for job in both
    ]


def jobs_at_large(
    subject: Subject,
    graph: Graph,
    shares: Sequence[float] | None,
    processes: int,
    programs: int,
    *,
    compiled: bool = False,
) -> list[ProcessesJob]:
    """The classics, and random programs, every second with the given shares."""
    book, where = derive_rules(graph), _alike(processes)
    state = random.Random(subject.seed)
    first = tuple(shares) if shares is not None else random_shares(processes, state)
    fractions = Shares(first, ((STATE, random_shares(processes, state)),))
    prices = SharePrices(Costs(graph, where, optimizer_named("adamw")), Scale(where, fractions))
    plain = data_parallel(book, prices)
    cut = stored_cut(plain)
    jobs = [
        *_both("data parallel", subject, plain, fractions, False, where),
        *_both("ZeRO", subject, cut, fractions, False, where),
        *_both("ZeRO, gathered again", subject, cut, fractions, True, where),
    ]
    for k in range(programs):
        own = fractions if k % 2 == 0 else Shares(random_shares(processes, state))
        jobs.append(
            _step(
                f"{programs} random program{'s' if programs > 1 else ''}",
                subject,
                random_program(book, state, calm=calm_of(k, compiled=compiled)),
                own,
                k % 4 > 1,
                where,
            )
        )
    most = most_nodes(processes, len(graph.nodes)) if compiled else 0
    return [replace(job, stretch=most) for job in jobs]


def _both(
    what: str, subject: Subject, program: Program, shares: Shares, regather: bool, where: Cluster
) -> list[ProcessesJob]:
    step = _step(what, subject, program, shares, regather, where)
    dtype = subject.dtype or _dtype_of(program.graph)
    training = f"{what}: {STEPS} AdamW steps in {_in_full(dtype)}"
    return [step, replace(step, what=training, trains=True, tolerance=CURVE_TOLERANCE.get(dtype, 1e-4))]


def _step(
    what: str, subject: Subject, program: Program, shares: Shares, regather: bool, where: Cluster
) -> ProcessesJob:
    graph = program.graph
    return ProcessesJob(
        f"{what}: a step in float64",
        subject,
        graph.text(),
        str(program),
        shares,
        regather,
        (),
        1,
        where.text(),
        graph.namespaces,
        False,
        TOLERANCE,
    )


def _alike(devices: int) -> Cluster:
    kind = Kind("cpu", "here", 1, devices, (("f32", 1e10),), 1e10, 2**34, 1e-6)
    return Cluster("here", "", (kind,), Link(1e-5, 1e9), Link(1e-4, 1e9))


def _dtype_of(graph: Graph) -> str:
    """The narrowest of the parameters: what decides how far roundings go."""
    found = [leaf.value.dtype for leaf in graph.parameters if leaf.value.torch_dtype.is_floating_point]
    return max(found, key=lambda dtype: torch.finfo(DTYPES[dtype]).eps, default="f32")


def _in_full(dtype: str) -> str:
    return str(DTYPES[dtype]).removeprefix("torch.")


# Running it


def on_simulated_devices(subject: Subject, plan: Plan) -> Claim:
    """A step by the plan on simulated devices, in this process."""
    wide = in_wide(plan)
    whole = in_float64(_whole_graph(plan, *_loaded(subject)))
    model, batch = _cast(*_loaded(subject), "f64")
    expected = _alone(whole, plan.microbatches, model, batch, subject.seed)
    about, rounds = (wide.program, model, batch, wide.shares), in_rounds(whole, plan.microbatches)
    before = made_so_far()
    found = simulate(
        *about, seed=subject.seed, decisions=wide.decisions, kinds=wide.kind_numbers, rounds=_if_several(rounds)
    )
    error, where = compare(found, expected)
    return Claim("the plan: a step in float64", error, where, TOLERANCE, made_so_far().since(before))


def prove(pool: WorkerPool, jobs: Sequence[ProcessesJob], progress: Callable[[], None] = lambda: None) -> list[Claim]:
    """A claim for each job, those of one name together in one: the worst."""
    found: dict[str, Claim] = {}
    for job in jobs:
        for rank, (error, where, functions) in enumerate(pool.run(compared, job)):
            claim = Claim(job.what, error, f"{where}, rank {rank}", job.tolerance)
            before = found.get(job.what, claim)
            functions = before.functions.and_also(functions)
            found[job.what] = replace(before if claim.error <= before.error else claim, functions=functions)
        progress()
    return list(found.values())


def compared(job: ProcessesJob) -> tuple[float, str, Made]:
    """The worst error as this worker sees it, where, and what it compiled."""
    before = made_so_far()
    return (*_compared(job), made_so_far().since(before))


def _compared(job: ProcessesJob) -> tuple[float, str]:
    plan = _parsed(job)
    model, batch = _built(job.subject)
    world = meet(plan, device=torch.device("cpu"))
    if not job.trains:
        step = compare_step(model, batch, plan, world, seed=job.subject.seed)
        return step.error, step.where
    training = compare_training(model, batch, plan, world, steps=STEPS, seed=job.subject.seed)
    errors = training.curve_errors
    worst = max(range(len(errors)), key=errors.__getitem__, default=-1)
    ended = f" ({len(errors)} compared: then that of one device is no number)" if len(errors) < STEPS else ""
    return (errors[worst] if errors else math.inf), f"loss of step {worst + 1}{ended}"


@lru_cache(maxsize=1)
def _graph(text: str, namespaces: tuple[str, ...]) -> Graph:
    return parse_graph(text, namespaces=namespaces)


def _parsed(job: ProcessesJob) -> Plan:
    """A plan around the program; what it would predict is of no interest here."""
    program = parse_program(job.program, _graph(job.graph, job.namespaces))
    where = parse_cluster(job.cluster)
    nothing = Breakdown(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    report = SearchReport(0.0, 0, 0.0, 0.0, 0.0, "", 0, ())
    memory = (0,) * len(job.shares)
    made = Plan(where, where, program, job.shares, "adamw", job.regather, 0.0, nothing, memory, (), report, (), ())
    return replace(made, reruns=job.reruns, on_host=job.on_host, microbatches=job.microbatches, stretch=job.stretch)


@lru_cache(maxsize=1)
def _built(subject: Subject) -> Built:
    """The model and the batch, the same on every process whatever its function draws its numbers from."""
    model, batch = _loaded(subject)
    tensors, rebuild = flatten_batch(batch)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), *tensors.values()):
            _take_from_rank_0(tensor)
    return model, in_form_of(batch, *rebuild(list(tensors.values())))


def _loaded(subject: Subject) -> Built:
    torch.manual_seed(subject.seed)
    model, batch = load(subject.spec, batch=subject.batch)
    return _cast(model, batch, subject.dtype) if subject.dtype else (model, batch)


def _cast(model: nn.Module, batch: object, dtype: str) -> Built:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(DTYPES[dtype]) if tensor.dtype.is_floating_point else tensor

    # Not by `Module.to`, which takes complex parameters for real ones.
    return model._apply(cast), with_tensors(batch, cast)


def _take_from_rank_0(tensor: Tensor) -> None:
    if not tensor.numel():
        return
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    dist.broadcast(flat, 0)
    theirs = flat.view(tensor.dtype).reshape(tensor.shape)
    if not torch.equal(theirs, tensor):
        tensor.copy_(theirs)


@dataclass(frozen=True, slots=True)
class Sameness:
    """Seen from one process. `where` names what has the worst error in float64; `curve` are the losses of a training
    on the processes, `expected` those of one device."""

    error: float
    where: str
    curve: tuple[float, ...] = ()
    expected: tuple[float, ...] = ()

    @property
    def curve_errors(self) -> list[float]:
        return [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(self.curve, self.expected, strict=True)]


def compare_step(model: nn.Module, batch: object, plan: Plan, world: World, *, seed: int = 0) -> Sameness:
    """One forward and backward pass in float64."""
    wide, graph = in_wide(plan), in_float64(_whole_graph(plan, model, batch))

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(world.device, torch.float64 if tensor.dtype.is_floating_point else tensor.dtype)

    model64, batch64 = widened(copied(model).to(world.device)), with_tensors(batch, moved)
    expected = _alone(graph, plan.microbatches, model64, batch64, seed)
    pm = seeded(copied(model64), batch64, graph, wide, world, seed)
    with default_dtype_of(wide.graph):
        loss = _loss_of(pm, batch64)
        loss.backward()
    errors = [(relative_error(loss.detach(), expected.loss), "loss")]
    floor = floor_of(expected)
    for name, parameter in pm.named_parameters():
        piece = pm.pieces[name]
        if piece.trained and piece.rank >= 0:
            whole = expected.gradients[name]
            # Its numbers alone: pieces are compared one by one, and a piece that knows it is one asks the others.
            gradient = plain_gradient(parameter)
            found = torch.zeros_like(plain(parameter)) if gradient is None else plain(gradient)
            errors.append((_error(found, piece.take(whole), whole, floor), f"gradient of {name}"))
    for name, buffer in expected.buffers.items() if world.takes_part else ():
        errors.append((relative_error(pm.get_buffer(name), buffer), f"buffer {name}"))
    pm.close()
    worst = max(errors, key=lambda pair: pair[0])
    return Sameness(*worst)


def _error(found: Tensor, expected: Tensor, whole: Tensor, floor: float) -> float:
    """The error of a piece, relative to the largest element of the whole."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    scale = max(whole.abs().max().item(), floor)
    error = (found - expected).abs().max().item() / scale
    return math.inf if math.isnan(error) else error


def compare_training(
    model: nn.Module,
    batch: object,
    plan: Plan,
    world: World,
    *,
    steps: int = 20,
    seed: int = 0,
    lr: float = 1e-3,
    max_norm: float = math.inf,
) -> Sameness:
    """`steps` steps of AdamW in the plan's own dtype, the same batch every time, on the processes and on one device; as
    long as the loss of one device is a number."""
    alone, whole = copied(model).to(world.device), _whole_graph(plan, model, batch)
    pm = seeded(copied(model), batch, whole, plan, world, seed)
    ours = torch.optim.AdamW(pm.parameters(), lr=lr)
    theirs = torch.optim.AdamW(alone.parameters(), lr=lr)
    curve, expected = [], []
    # Convolutions on a GPU round to 10 bits unless told otherwise, which is another matter.
    exact, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    for _ in range(steps):
        # Once for all, on rank 0: the processes may share few cores.
        told = torch.zeros((), dtype=torch.float64)
        if world.rank == 0:
            told.fill_(_step_alone(whole, plan.microbatches, alone, batch, theirs, seed, max_norm))
        dist.broadcast(told, 0)
        one = told.item()
        if not math.isfinite(one):
            break  # there is nothing to compare with: the curves end here
        expected.append(one)
        loss = _loss_of(pm, batch)
        loss.backward()
        if math.isfinite(max_norm):
            clip_grad_norm_(pm, max_norm)
        ours.step()
        ours.zero_grad()
        curve.append(loss.item())
    torch.backends.cudnn.allow_tf32 = exact
    pm.close()
    return Sameness(0.0, "", tuple(curve), tuple(expected))


def _whole_graph(plan: Plan, model: nn.Module, batch: object) -> Graph:
    """The graph of the whole batch: of a batch in rounds the plan has that of one."""
    return plan.graph if plan.microbatches == 1 else capture(model, batch)


def _if_several(rounds: Rounds) -> Rounds | None:
    return rounds if rounds.count > 1 else None


def _alone(whole: Graph, microbatches: int, model: nn.Module, batch: object, seed: int) -> Simulation:
    """What one device makes of the batch at once; in the same rounds where something is drawn, as each draws anew."""
    if microbatches == 1 or not any(map(may_draw, whole.nodes)):
        return simulate(one_device(whole), model, batch, (1.0,), seed=seed)
    rounds = in_rounds(whole, microbatches)
    decisions = Decisions(microbatches=microbatches)
    return simulate(one_device(rounds.graph), model, batch, (1.0,), seed=seed, decisions=decisions, rounds=rounds)


def _step_alone(
    whole: Graph,
    microbatches: int,
    model: nn.Module,
    batch: object,
    optimizer: torch.optim.Optimizer,
    seed: int,
    max_norm: float,
) -> float:
    found = _alone(whole, microbatches, model, batch, seed)
    for name, parameter in model.named_parameters():
        parameter.grad = found.gradients.get(name)
    if math.isfinite(max_norm):
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    with torch.no_grad():
        for name, buffer in found.buffers.items():
            model.get_buffer(name).copy_(buffer)
    return float(found.loss.item())


def _loss_of(pm: Parallel, batch: object) -> Tensor:
    call = arguments_of(batch)
    loss: Tensor = pm(*call.args, **call.kwargs)
    return loss


def seeded(model: nn.Module, batch: object, graph: Graph, plan: Plan, world: World, seed: int) -> Parallel:
    """A parallel model whose random numbers are those that one device would draw."""
    random = SeededRandomness(seed, in_group_order(plan, world))
    return Parallel(model, batch, graph, plan, world, seed=seed, randomness=random)


def in_wide(plan: Plan) -> Plan:
    """The plan for the same model in float64."""
    graph = in_float64(plan.graph)
    return replace(plan, program=plan.program.for_graph(graph))
