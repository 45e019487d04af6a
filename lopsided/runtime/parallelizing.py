"""`parallelize`: from a model as written for one device to a module that trains on the processes of this world.

In: a model, a batch, and a plan (or a cluster, or nothing). Out: `Parallel`. In order: capture the model, compare what
was captured with it, agree on a plan (read, made for a cluster, or made for devices that are measured now), try several
if asked to, meet the processes that take part, cut the parameters. What is done is told as it is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lopsided.capturing.call import LossFn
from lopsided.capturing.capture_graph import capture_call, check_captured
from lopsided.cluster.cluster import Cluster
from lopsided.comm.rank_mapping import strange_hardware
from lopsided.comm.watchdog import watched_start
from lopsided.comm.world import (
    TIMEOUT_S,
    begin,
    check_same,
    meet,
    share_plan,
)
from lopsided.ir.graph import Graph
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import plan_text
from lopsided.runtime.agreement import (
    agreed_lengths,
    agreed_plans,
    compiled_where_wanted,
    digest_of,
    from_first,
    strange_speeds,
)
from lopsided.runtime.autotune import quickest
from lopsided.runtime.calls.shapes import at_length
from lopsided.runtime.live.paced import check_replan
from lopsided.runtime.parallel import CHECK_EVERY, Parallel
from lopsided.runtime.parameters.adoption import check_bare
from lopsided.runtime.progress import Announcer, about_plan, shown
from lopsided.runtime.recording import RECORD_VARIABLE

_COMPARED = "compared"


def parallelize(
    model: nn.Module,
    batch: object,
    plan: Plan | str | Path | None = None,
    *,
    cluster: Cluster | str | Path | None = None,
    batches: Iterable[object] | None = None,
    loss_fn: LossFn | None = None,
    optimizer: str = "adamw",
    device: torch.device | str | None = None,
    init: Callable[[nn.Module], None] | None = None,
    seed: int | None = None,
    timeout_s: float = TIMEOUT_S,
    check_every: int = CHECK_EVERY,
    check_capture: bool = True,
    on_nan: str = "stop",
    bucket_bytes: int | None = None,
    microbatches: int | None = None,
    allow: Iterable[str] = (),
    compile: bool | None = None,
    measure_s: float | None = None,
    tries: int = 1,
    replan: str = "off",
    quiet: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Parallel:
    """`model` on the processes of this world, one a device, by `plan` (a file or a `Plan`).

    Without a plan one is made for `cluster`; without that, by measuring the devices for `measure_s` (20 s, or 5 for a
    small model). With `batches`, a list or a loader like those to come, it is made for the lengths they have, otherwise
    for that of `batch`. If `tries` is more than 1, so many are made, each is run for some steps on random numbers, and
    the quickest is taken. The batch is an example of the global batch, all devices together. What is done is shown on
    rank 0's terminal, unless `quiet`, and given to `progress`. A model built on `meta` is initialised
    piece by piece, by `init(module)` or by the modules' own ways. Every `check_every` steps replicas are compared; 0
    for never. With `check_capture`, one step of what was captured is first compared with one of the model as it is, on
    the example batch or some rows of it. A loss that is not finite ends the run; with `on_nan="warn"` or `"ignore"` the
    script decides. With `compile`, what a device does between two communications runs as functions that Inductor
    compiles; that is the default where there is a GPU. Gradients and gathered parameters are sent `bucket_bytes` at a
    time, if not as the plan says. The batch is computed in `microbatches` rounds, if not as the plan says, or as it
    takes to fit. A plan that is made here changes the numbers that are computed only by what is named in `allow`:
    `"8bit-state"`, optimizer state in 8 bits. With `replan="auto"` devices that turn out slower or faster than planned
    get other shares while training.
    """
    check_replan(replan)
    check_bare(model)
    where = begin(torch.device(device) if device is not None else None, timeout_s=timeout_s)
    is_first = dist.get_rank() == 0
    with watched_start(where, timeout_s) as at_work, shown(quiet=quiet, is_first=is_first):
        tell = Announcer(_both(at_work, progress), logs=is_first)
        tell("capturing the model")
        captured = capture_call(model, batch, loss_fn=loss_fn, needs_loss=False)
        graph = captured.graph
        elements = sum(leaf.value.elements for leaf in graph.parameters)
        tell(f"captured {len(graph.nodes):,} calls and {elements:,} parameters in {tell.seconds:.1f} s")
        if check_capture:
            tell("comparing what was captured with the model")
            skipped = from_first(lambda: check_captured(model, batch, loss_fn, captured) or _COMPARED)
            if skipped != _COMPARED:
                tell(f"what was captured is not compared with the model: {skipped}")
        lengths = None if batches is None else agreed_lengths(batch, batches, tell)

        def shapes() -> list[tuple[Graph, float]]:
            """Of every length, the graph, and how often it is met."""
            found: list[tuple[Graph, float]] = []
            if lengths is None:
                return found
            for length, often in zip(lengths.lengths, lengths.often, strict=True):
                other = at_length(batch, length, lengths.dims)
                found.append((capture_call(model, other, loss_fn=loss_fn, needs_loss=False).graph, often))
            return found

        about = (graph, plan, cluster, optimizer, where, measure_s, tries, tell, shapes, microbatches, allow)
        plans = agreed_plans(*about)
        plans = compiled_where_wanted(plans, compile, where)
        chosen = quickest(plans, where, timeout_s=timeout_s, progress=tell)[0] if tries > 1 else plans[0]
        world = meet(chosen, device=where, timeout_s=timeout_s)
        check_same(
            world,
            {"the graph": graph.fingerprint, "the plan": digest_of(plan_text(chosen)), "torch": torch.__version__[:4]},
        )
        if doubt := strange_hardware(world.told, chosen.cluster) or (strange_speeds(chosen, world) if cluster else ""):
            tell.warn(doubt)
        for line in about_plan(chosen):
            tell(line)
        if why := world.backend_choice.why:
            tell(f"talking over {world.backend}: {why}")
        tell("cutting the parameters")
        pm = Parallel(
            model,
            batch,
            captured,
            chosen,
            world,
            loss_fn=loss_fn,
            init=init,
            seed=int(share_plan(str(torch.initial_seed() if seed is None else seed))) % 2**62,
            timeout_s=timeout_s,
            check_every=check_every,
            on_nan=on_nan,
            bucket_bytes=bucket_bytes,
            quiet=quiet,
        )
        if replan == "auto":
            pm.watch_pace()
        pm.planned_lengths = lengths.lengths if lengths is not None else ()
        tell(f"ready after {tell.seconds:.1f} s")
    if path := os.environ.get(RECORD_VARIABLE):
        pm.record(path)
    return pm


def _both(one: Callable[[str], None], other: Callable[[str], None]) -> Callable[[str], None]:
    def tell(text: str) -> None:
        one(text)
        other(text)

    return tell
