"""The plan becomes a module: `parallelize` returns one whose forward pass is the distributed step.

In: a model as written for one device, a batch, and a plan (or a cluster, or nothing). Out: `Parallel`. Its parameters
are this process's pieces under their own names; its forward pass gives the global loss; `backward()` leaves finished
gradients.

The submodules of a `Parallel` are the model's own, with their parameters replaced by pieces, so no process holds what
it does not need; the model is used up by it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lopsided.capturing.call import LossFn, flatten_batch
from lopsided.capturing.capture_graph import capture, surrounding_autocast
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.collectives import Network
from lopsided.comm.communicator import Communicator
from lopsided.comm.redistribute import Redistributor
from lopsided.comm.watchdog import Watchdog
from lopsided.comm.world import (
    TIMEOUT_S,
    World,
    begin,
    check_same,
    default_store,
    group_of,
    meet,
    share_plan,
    side_group,
)
from lopsided.errors import BatchError, TrainingError
from lopsided.executor.executor import Executor
from lopsided.executor.gradients import Gradients
from lopsided.executor.local_op import AnyRandomness
from lopsided.executor.randomness import RankRandomness
from lopsided.ir.graph import Graph, Leaf
from lopsided.ir.placement import Placement, pieces_of, take_piece
from lopsided.ir.program import Program, parse_program
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import plan_text
from lopsided.runtime import replicas
from lopsided.runtime.adoption import Adopted, adopt, replaced
from lopsided.runtime.agreement import agreed_plans, digest_of, from_first, in_group_order
from lopsided.runtime.autotune import quickest
from lopsided.runtime.buffers import Buffers
from lopsided.runtime.initial import initialise
from lopsided.runtime.last_loss import LastLoss
from lopsided.runtime.modes import program_for
from lopsided.runtime.optimizers import watch_optimizers
from lopsided.runtime.pieces import Piece, piece_of
from lopsided.runtime.recording import RECORD_VARIABLE, RECORDED, SKIPPED, TIMED, Recording, start_recording
from lopsided.schedule.lower import lower

CHECK_EVERY = 100
"""So many forward passes in training lie between two comparisons of replicas."""

Mode = tuple[bytes, str]  # of every module whether it is in training, and the autocast


def parallelize(
    model: nn.Module,
    batch: object,
    plan: Plan | str | Path | None = None,
    *,
    cluster: Cluster | str | Path | None = None,
    loss_fn: LossFn | None = None,
    optimizer: str = "adamw",
    device: torch.device | str | None = None,
    init: Callable[[nn.Module], None] | None = None,
    seed: int | None = None,
    timeout_s: float = TIMEOUT_S,
    check_every: int = CHECK_EVERY,
    bucket_bytes: int | None = None,
    measure_s: float = 20.0,
    tries: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Parallel:
    """`model` on the processes of this world, one a device, by `plan` (a file or a `Plan`).

    Without a plan one is made for `cluster`; without that, by measuring the devices for `measure_s`. If `tries` is more
    than 1, so many are made, each is run for some steps on random numbers, and the quickest is taken. The batch is an
    example of the global batch, all devices together; only its shapes matter. A model built on `meta` is initialised
    piece by piece, by `init(module)` or by the modules' own ways. Every `check_every` steps replicas are compared; 0
    for never. Gradients and gathered parameters are sent `bucket_bytes` at a time, if not as the plan says.
    """
    where = begin(torch.device(device) if device is not None else None, timeout_s=timeout_s)
    progress("capturing the model")
    graph = capture(model, batch, loss_fn=loss_fn)
    plans = agreed_plans(graph, plan, cluster, optimizer, where, measure_s, tries, progress)
    chosen = quickest(plans, where, timeout_s=timeout_s, progress=progress)[0] if tries > 1 else plans[0]
    world = meet(chosen, device=where)
    check_same(
        world,
        {"the graph": graph.fingerprint, "the plan": digest_of(plan_text(chosen)), "torch": torch.__version__[:4]},
    )
    progress("cutting the parameters")
    pm = Parallel(
        model,
        batch,
        graph,
        chosen,
        world,
        loss_fn=loss_fn,
        init=init,
        seed=int(share_plan(str(torch.initial_seed() if seed is None else seed))) % 2**62,
        timeout_s=timeout_s,
        check_every=check_every,
        bucket_bytes=bucket_bytes,
    )
    if path := os.environ.get(RECORD_VARIABLE):
        pm.record(path)
    return pm


class Parallel(nn.Module):
    """A model on the devices of a plan, seen from one of them. Made by `parallelize`."""

    plan: Plan
    world: World
    steps_done: int  # backward passes that were synchronised

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        graph: Graph,
        plan: Plan,
        world: World,
        *,
        loss_fn: LossFn | None = None,
        init: Callable[[nn.Module], None] | None = None,
        seed: int = 0,
        timeout_s: float = TIMEOUT_S,
        check_every: int = CHECK_EVERY,
        bucket_bytes: int | None = None,
        randomness: AnyRandomness | None = None,
    ) -> None:
        super().__init__()
        self.__dict__ |= {"plan": plan, "world": world, "steps_done": 0}
        self._graph, self._loss_fn, self._check_every = graph, loss_fn, check_every
        self._decisions = plan.decisions
        if bucket_bytes is not None:
            self._decisions = replace(self._decisions, bucket_bytes=bucket_bytes)
        self._forwards = 0
        self._syncing = True
        self._handed_out = ""  # which batch a sharded loader gave last
        self._tensors, self._rebuild = flatten_batch(batch)
        self._several = isinstance(batch, Mapping | tuple | list)
        self._is_mapping = isinstance(batch, Mapping)
        self._constants = _constants(batch)
        self.shares = in_group_order(plan, world)
        network = Network(plan.on)
        group = group_of(world, timeout_s)
        self._side = side_group(world, timeout_s)
        self.watch = Watchdog(world, default_store(), timeout_s, side=self._side)
        weakref.finalize(self, self.watch.stop)
        self.wire = Communicator(group, world.device, network, timeout_s=timeout_s, watch=self.watch) if group else None
        # In a tuple, so that it does not become a submodule: its children are ours.
        self._model = (model,)
        self.pieces = self._take_pieces(model, init, seed)
        self._modes: dict[Mode, Executor] = {}
        self._constant_tensors: dict[int, Tensor] = {}
        self.randomness: AnyRandomness = randomness or RankRandomness(seed, max(world.place, 0), world.device)
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []  # in the order of their first steps
        self._last_loss = LastLoss(self._here())
        if self.wire is not None:
            self._exchange = Redistributor(self.wire, self.shares, network)
            self._gradients = Gradients(self._exchange)
            # Weakly: a module that nobody needs is gone at once, and its watch with it.
            this = weakref.ref(self)
            self._gradients.on_finish = lambda: _step_is_done(this())
        self.recording: Recording | None = None
        self.training = model.training
        self._every_module = list(self.modules())
        self._buffers_by_name = Buffers(self)
        self._programs = {self._mode(): plan.program}
        watch_optimizers(self)

    # Parameters

    def _take_pieces(self, model: nn.Module, init: Callable[[nn.Module], None] | None, seed: int) -> dict[str, Piece]:
        """Replace the model's parameters by this process's pieces, and adopt its submodules."""
        stored = dict(self.plan.program.leaves)
        pieces = {
            leaf.target: piece_of(leaf, stored[leaf.value.name], self.shares, self.world.place)
            for leaf in self._graph.parameters
        }
        needed = {leaf.target for leaf in self._graph.leaves if leaf.kind == "buffer"}
        local = initialise(model, pieces, self.world.device, init=init, seed=seed, needed=needed)
        adopt(model, pieces, local)
        self._modules.update(model._modules)
        self._parameters.update(model._parameters)
        self._buffers.update(model._buffers)
        self._non_persistent_buffers_set |= model._non_persistent_buffers_set
        self._adopted = Adopted(self, pieces)
        return pieces

    def _here(self) -> str:
        return f"rank {self.world.rank}"

    # The batch

    @cached_property
    def inputs(self) -> dict[str, tuple[Leaf, Placement]]:
        """The tensors of a batch by name, and how each is placed."""
        stored = dict(self.plan.program.leaves)
        return {leaf.target: (leaf, stored[leaf.value.name]) for leaf in self._graph.leaves if leaf.kind == "input"}

    def rebuild_batch(self, tensors: list[Tensor]) -> object:
        """A batch as it was given to `parallelize`, of these tensors in the order of `inputs`."""
        args, kwargs = self._rebuild(tensors)
        return kwargs if self._is_mapping else args if self._several else args[0]

    def handed_out(self, which: str) -> None:
        """A sharded loader has given this batch: all ranks must train on parts of the same."""
        self._handed_out = f", {which}"

    def _check_inputs(self, given: Mapping[str, Tensor]) -> None:
        planned = ", ".join(f"{name} {list(leaf.value.shape)}" for name, (leaf, _) in self.inputs.items())
        missing = [f"no {name!r}" for name in self.inputs if name not in given]
        unknown = [f"{name!r}, which was not planned" for name in given if name not in self.inputs]
        for what in (*missing, *unknown):
            raise BatchError(f"the batch has {what}", where=self._here(), do=f"give what was planned: {planned}")
        for name, (leaf, placement) in self.inputs.items():
            shape, whole = tuple(given[name].shape), leaf.value.shape
            local = self._local_shape(leaf, placement)
            if shape not in (whole, local):
                part = f" (this rank's part: {list(local)})" if local != whole else ""
                raise BatchError(
                    f"{name} has shape {list(shape)}, planned was {list(whole)}{part}",
                    where=self._here(),
                    do="give batches of the planned shape (drop_last=True for a loader), or plan anew for this one",
                )

    def _local_shape(self, leaf: Leaf, placement: Placement) -> tuple[int, ...]:
        pieces = pieces_of(placement, leaf.value.shape, self.shares) if placement.is_shard else ()
        return placement.local_shape(leaf.value.shape, pieces, self.world.place)

    def _local_inputs(self, given: Mapping[str, Tensor], program: Program) -> dict[str, Tensor]:
        """This rank's part of every input, by the name of its value, on its device."""
        placed = dict(program.leaves)
        return {
            leaf.value.name: self._local_input(leaf, placed[leaf.value.name], given[leaf.target])
            for leaf in program.graph.leaves
            if leaf.kind == "input"
        }

    def _local_input(self, leaf: Leaf, wanted: Placement, tensor: Tensor) -> Tensor:
        value, placement = leaf.value, self.inputs[leaf.target][1]
        if tensor.shape != self._local_shape(leaf, placement):
            tensor = take_piece(tensor, placement, pieces_of(placement, value.shape, self.shares), self.world.place)
        tensor = tensor.to(self.world.device, value.torch_dtype, non_blocking=True)
        # Batches come as they were planned; a program of another mode may want them otherwise.
        return self._exchange.move(tensor, placement, wanted, value.shape, f"the input {leaf.target}")

    # The step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The global loss of a batch: the whole one, or this rank's share of it."""
        self._last_loss.check()
        self._adopted.check(self.world.device, self._here())
        if args and kwargs:
            raise BatchError(
                "the batch comes partly by position and partly by name",
                where=self._here(),
                do="call the model as its batch was given to parallelize: pm(**batch) or pm(*batch)",
            )
        tensors, _ = flatten_batch(kwargs or args)
        self._check_constants(args, kwargs)
        if self.wire is None:
            return self._loss_of_others()
        mode = self._mode()
        self.wire.recorder = self.recording.noting if self.recording is not None and self.training else None
        self._forwards += 1
        self.watch.at_step(self._forwards)
        self._check_inputs(tensors)
        self.watch.start_handshake(
            self._forwards,
            f"{mode[1] or 'no autocast'}, {'gradients' if torch.is_grad_enabled() else 'no gradients'}, "
            f"{mode[0].count(0)} modules in evaluation",
            self._told_inputs(tensors),
            training=self.training,
            sync=self._syncing,
        )
        if mode not in self._modes:
            self.watch.finish_handshake()  # all ranks must be here to agree on a program
        steps, program = self._steps(mode)
        local = self._local_inputs(tensors, program)
        loss, updates, own = steps.run(self._leaves(program) | local)
        with self.wire.recorder.handshaking() if self.wire.recorder is not None else nullcontext():
            self.watch.finish_handshake()
        self._buffers_by_name.update(updates)
        if self.training and self._check_every and self._forwards % self._check_every == 0:
            self._compare_replicas()
        self._last_loss.remember(loss, own, self._forwards)
        self._send_to_bystanders(loss)
        if loss.requires_grad:
            self._gradients.reset()
            loss = _Loss.apply(self, loss)  # type: ignore[no-untyped-call]
        return loss.reshape(())

    def _told_inputs(self, given: Mapping[str, Tensor]) -> str:
        """What all ranks must agree on: shapes of their batches, and now and then what is in inputs that are whole."""
        looks = self._check_every and (self._forwards <= 2 or self._forwards % self._check_every == 0)
        told = []
        for name, (leaf, placement) in self.inputs.items():
            # Where one rank has all of an input, its share looks like the whole, and the others' do not.
            parts = pieces_of(placement, leaf.value.shape, self.shares) if placement.is_shard else ()
            whole = looks and given[name].shape == leaf.value.shape and (not parts or max(parts) < sum(parts))
            content = f" holding {int(replicas.digest(given[name])) & 0xFFFFFFFF:08x}" if whole else ""
            told.append(f"{name} {list(leaf.value.shape)}{content}")
        return ", ".join(told) + self._handed_out

    def _leaves(self, program: Program) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        # A buffer that gets a new value is still needed as it was when going backward.
        changed = {buffer for buffer, _ in program.graph.updates} if torch.is_grad_enabled() else set()
        kept = self._buffers_by_name.copies(
            leaf.target for leaf in program.graph.leaves if leaf.kind == "buffer" and leaf.target in changed
        )
        for leaf in program.graph.leaves:
            name = leaf.value.name
            if leaf.kind == "parameter":
                found[name] = self._adopted.by_name[leaf.target]
            elif leaf.kind == "buffer":
                found[name] = kept[leaf.target] if leaf.target in kept else self._buffers_by_name[leaf.target]
            elif leaf.kind == "constant":
                found[name] = self._constant(leaf)
        return found

    def _constant(self, leaf: Leaf) -> Tensor:
        # By identity: to compare it, all of its elements would be looked at.
        if id(leaf) not in self._constant_tensors:
            with torch.inference_mode(False):
                made = torch.tensor(leaf.data, dtype=leaf.value.torch_dtype, device=self.world.device)
            self._constant_tensors[id(leaf)] = made.reshape(leaf.value.shape)
        return self._constant_tensors[id(leaf)]

    def _steps(self, mode: Mode) -> tuple[Executor, Program]:
        """The instructions of this mode, made at its first use."""
        if mode not in self._modes:
            if mode not in self._programs:
                self._programs[mode] = self._program_in(mode)
            self._modes[mode] = Executor(
                lower(self._programs[mode], self._decisions),
                self._exchange,
                self._gradients,
                self.randomness,
                self._adopted.by_name,
                self.world.device,
            )
        return self._modes[mode], self._programs[mode]

    def _program_in(self, mode: Mode) -> Program:
        """Capture the model in this mode, on tensors without memory, and agree on a program with the others."""
        graph = self._captured()
        # Without bystanders: they wait for the loss.
        make = lambda: str(program_for(graph, self.plan))  # noqa: E731
        text = from_first(make, self._side, self.world.ranks[0])
        return parse_program(text, graph)

    def _mode(self) -> Mode:
        return bytes(module.training for module in self._every_module), surrounding_autocast()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _captured(self) -> Graph:
        model = self._model[0]
        model.training = self.training  # its modules are ours
        with FakeTensorMode(allow_non_fake_inputs=True):
            whole = {
                name: nn.Parameter(
                    torch.empty(piece.shape, dtype=piece.dtype, device=self.world.device), requires_grad=piece.trained
                )
                for name, piece in self.pieces.items()
            }
            tensors = [
                torch.empty(leaf.value.shape, dtype=leaf.value.torch_dtype, device=self.world.device)
                for leaf, _ in self.inputs.values()
            ]
        args, kwargs = self._rebuild(tensors)
        batch: object = kwargs if self._is_mapping else args if self._several else args[0]
        with replaced(model, whole, self.pieces):
            return capture(model, batch, loss_fn=self._loss_fn)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.wire is not None:
            self._gradients.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add up gradients on this device; the next one outside sends the sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def close(self) -> None:
        """Stop watching the other ranks. The end of the process does it too."""
        self.watch.stop()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when an optimizer with parameters of this model is about to take a step."""
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        if self.wire is not None and self._gradients.has_kept:
            raise TrainingError(
                "the gradients were not synchronised: the last backward pass was under no_sync()",
                where=self._here(),
                do="leave the last backward pass before optimizer.step() outside of no_sync()",
            )

        if self.recording is not None:
            self.recording.before_update()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when it has taken it. Of several optimizers, the last to step for the first time ends a step."""
        if self.recording is not None and self.wire is not None and optimizer is self._optimizers[-1]():
            # What is sent between steps (a checkpoint, a comparison of replicas) belongs to none.
            self.wire.recorder = None
            self.recording.after_update()

    # What is recorded

    def record(
        self,
        path: str | Path | None = None,
        *,
        model: str = "",
        skipped: int = SKIPPED,
        timed: int = TIMED,
        recorded: int = RECORDED,
    ) -> Recording | None:
        """From here on, time some steps and record all that happens in some others.

        After so many more steps of the optimizer the first process's `Recording.run` has what was found, and it is
        written to `path`. Every process of the run calls this at the same place; those without a device get None.
        """
        self.recording = start_recording(
            self,
            self.plan,
            self.world,
            self._side,
            path,
            model=model or type(self._model[0]).__name__,
            skipped=skipped,
            timed=timed,
            recorded=recorded,
        )
        return self.recording

    def before_saving(self) -> None:
        """What must hold before anything is saved: a finite loss, and replicas that are equal."""
        self._last_loss.check()
        if self.wire is not None:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        alive = [optimizer for known in self._optimizers if (optimizer := known()) is not None]
        for optimizer in alive:
            replicas.check(self, optimizer)
        if not alive:
            replicas.check(self)

    # Ranks whose device the plan does not use

    def _loss_of_others(self) -> Tensor:
        self._forwards += 1
        self.watch.at_step(self._forwards)
        loss = torch.zeros((), device=self.world.device, dtype=self._graph.values[self._graph.loss].torch_dtype)
        self._tell_all(loss)
        if not torch.is_grad_enabled():
            return loss
        followed: Tensor = _Followed.apply(self, loss.requires_grad_())  # type: ignore[no-untyped-call]
        return followed

    def _send_to_bystanders(self, loss: Tensor) -> None:
        if len(self.world.ranks) < self.world.size:
            self._tell_all(loss.detach().clone().reshape(()))

    def _tell_all(self, loss: Tensor) -> None:
        """From the first rank that takes part to all of the world."""
        self.watch.entering("the loss, told to all ranks")
        # By way of the host where processes share a GPU: NCCL refuses two of them.
        told = loss if self.world.backend_of_all == "nccl" else loss.cpu()
        try:
            dist.broadcast(told, self.world.ranks[0])
            loss.copy_(told)
        except RuntimeError as error:
            raise self.watch.explain(error, "the loss, told to all ranks") from error
        finally:
            self.watch.left()

    def _check_constants(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = _constants(kwargs or args)
        if given != self._constants:
            raise BatchError(
                f"the batch was planned with {self._constants} and has {given}",
                where=self._here(),
                do="give the same values that are not tensors, or plan anew",
            )


def _step_is_done(pm: Parallel | None) -> None:
    if pm is not None and pm._syncing:
        pm.__dict__["steps_done"] += 1


def _constants(batch: object) -> dict[str, str]:
    """What is in a batch beside tensors; captured once, it cannot change."""
    entries: Mapping[Any, Any] = batch if isinstance(batch, Mapping) else {}
    return {str(key): repr(value) for key, value in entries.items() if isinstance(value, bool | int | float | str)}


class _Loss(torch.autograd.Function):
    """The end of a forward pass and the start of its backward pass."""

    @staticmethod
    def forward(ctx: Any, pm: Parallel, loss: Tensor) -> Tensor:
        ctx.pm = pm
        ctx.save_for_backward(loss)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        try:
            _ = ctx.saved_tensors
        except RuntimeError:
            raise TrainingError(
                "backward() was called again without a forward pass", do="call loss = pm(...) before each backward()"
            ) from None
        ctx.pm._gradients.syncing = ctx.pm._syncing
        ctx.pm._gradients.begin()
        return None, gradient


class _Followed(torch.autograd.Function):
    """The loss on a rank that takes no part: its backward pass counts, and does nothing else."""

    @staticmethod
    def forward(ctx: Any, pm: Parallel, loss: Tensor) -> Tensor:
        ctx.pm = pm
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _step_is_done(ctx.pm)
        return None, gradient
