"""The plan as a module: `Parallel`, whose forward pass is the distributed step.

In: a model as written for one device, what was captured of it, a plan, the processes that take part. Out: a module
whose parameters are this process's pieces under their own names; its forward pass gives the global loss; `backward()`
leaves finished gradients.

The submodules of a `Parallel` are the model's own, with their parameters replaced by pieces, so no process holds what
it does not need; the model is used up by it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lopsided.capturing.call import LossFn, in_form_of
from lopsided.capturing.capture_graph import Captured, Returned
from lopsided.capturing.reads import Reads
from lopsided.capturing.tracer import surrounding_autocast
from lopsided.cluster.collectives import Network
from lopsided.comm.communicator import Communicator
from lopsided.comm.redistribute import Redistributor
from lopsided.comm.watchdog import Watchdog
from lopsided.comm.world import (
    TIMEOUT_S,
    World,
    default_store,
    group_of,
    side_group,
    waiting,
)
from lopsided.errors import BatchError, TrainingError
from lopsided.executor.executor import Executor
from lopsided.executor.gradients import Gradients
from lopsided.executor.local_op import AnyRandomness
from lopsided.executor.randomness import RankRandomness
from lopsided.executor.rounds import RoundsRan, is_narrow, run_for_values, run_rounds
from lopsided.ir.graph import Graph, Leaf
from lopsided.ir.placement import Placement, Shares
from lopsided.ir.program import Program
from lopsided.planner.plan_data import Plan
from lopsided.planner.same_storage import StoredProgram
from lopsided.runtime.agreement import (
    in_group_order,
    kinds_in_group_order,
)
from lopsided.runtime.calls import outputs
from lopsided.runtime.calls.call_form import CallForm, Given, HandedOut, Signature
from lopsided.runtime.calls.inputs import Inputs
from lopsided.runtime.calls.last_loss import LastLoss
from lopsided.runtime.calls.output_rounds import outputs_of_rounds
from lopsided.runtime.calls.outputs import OutputPart, RowCut, awaited_in, awaited_outputs, gather, hand_on, with_loss
from lopsided.runtime.calls.programs import CallProgram, Programs
from lopsided.runtime.checkpoint.state import save_whole
from lopsided.runtime.live.moving import take_shares
from lopsided.runtime.live.paced import Paced
from lopsided.runtime.out_of_memory import explain
from lopsided.runtime.parameters import replicas
from lopsided.runtime.parameters.adoption import Adopted, adopt, check_not_inside, hand_over, wrapped
from lopsided.runtime.parameters.buffers import Buffers
from lopsided.runtime.parameters.host_state import end_failed_steps, keep_coded, keep_on_host
from lopsided.runtime.parameters.initial import initialise, take_first_values
from lopsided.runtime.parameters.optimizers import settings_of, watch_optimizers
from lopsided.runtime.parameters.parameter_hooks import ParameterHooks
from lopsided.runtime.parameters.piece_tensors import plain, step_ends
from lopsided.runtime.parameters.pieces import Piece, piece_of
from lopsided.runtime.progress import compiling
from lopsided.runtime.recording import RECORDED, SKIPPED, TIMED, Recording, start_recording
from lopsided.schedule.lower import lower

CHECK_EVERY = 100
"""So many forward passes in training lie between two comparisons of replicas."""


class Parallel(nn.Module):
    """A model on the devices of a plan, seen from one of them. Made by `parallelize`."""

    plan: Plan
    world: World
    steps_done: int  # backward passes that were synchronised
    planned_lengths: tuple[int, ...] = ()  # of the distribution of batches that was planned for

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        captured: Captured | Graph,
        plan: Plan,
        world: World,
        *,
        loss_fn: LossFn | None = None,
        init: Callable[[nn.Module], None] | None = None,
        seed: int = 0,
        timeout_s: float = TIMEOUT_S,
        check_every: int = CHECK_EVERY,
        on_nan: str = "stop",
        bucket_bytes: int | None = None,
        randomness: AnyRandomness | None = None,
        quiet: bool = True,
    ) -> None:
        super().__init__()
        self.__dict__ |= {"plan": plan, "world": world, "steps_done": 0}
        self._captured = captured if isinstance(captured, Captured) else _of_loss_alone(captured)
        self._graph, self._check_every = self._captured.graph, check_every
        for stored in self._captured.stored:
            stored.leave_word()
        # A loss that is a module must not become a submodule, whose tensors would be saved with the model's.
        self.__dict__["_loss_fn"] = loss_fn
        # If the user says it, in place of what is chosen for each program.
        self._bucket_bytes = bucket_bytes
        self._forwards = 0
        self._syncing, self._quiet = True, quiet
        self._handed_out = HandedOut()
        self._batch = batch
        self.last_cut: RowCut | None = None  # of the last batch's rows
        self.shares = in_group_order(plan, world)
        network = Network(plan.on)
        group = group_of(world, timeout_s)
        self._side = side_group(world, timeout_s)
        self.watch = Watchdog(world, default_store(), timeout_s, side=self._side)
        weakref.finalize(self, self.watch.stop)
        self.watch.explains = partial(explain, weakref.ref(self))
        self.communicator = (
            Communicator(group, world.device, network, timeout_s=timeout_s, watch=self.watch) if group else None
        )
        self.pieces = self._take_pieces(model, init, seed)
        self._form, self._programs = self._no_programs()
        self._constant_tensors: dict[int, Tensor] = {}
        self.randomness: AnyRandomness = randomness or RankRandomness(seed, max(world.place, 0), world.device)
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []  # in the order of their first steps
        self._updates = 0  # steps they have taken
        self._last_loss = LastLoss(self._here(), on_nan)
        # The gradient that losses get: that of the last, which is mostly that of the next.
        self._upstream = torch.ones((), dtype=torch.float64, device=world.device)
        self._knows_upstream = False
        if self.communicator is not None:
            self._exchange = Redistributor(self.communicator, self.shares, network)
            self._gradients = self._collector()
        self._all_on_host = self.largest(int(world.device.type != "cpu")) == 0
        self.recording: Recording | None = None
        self._paced: Paced | None = None
        self._copies: weakref.WeakSet[Parallel] = weakref.WeakSet()
        self.training = model.training
        self._every_module = list(self.modules())
        self._buffers_by_name = Buffers(self)
        self._inputs = self._new_inputs()
        self._planned = self._signature(self._form.read_batch(batch), None)
        watch_optimizers(self)
        self._paced = Paced(self, self._side)
        self.__dict__["_of_model"] = {*vars(model)} - {*vars(self)} - {*vars(nn.Module())}

    # The model's own attributes

    @property
    def module(self) -> nn.Module:
        """The model itself, whose parameters are this rank's pieces now."""
        return self._model[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model" not in self.__dict__:
                raise
        return getattr(self._model[0], name)

    def __getitem__(self, key: Any) -> Any:
        """`pm[2]`, where the model is a sequence of modules."""
        return self._model[0][key]  # type: ignore[index]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_is_fsdp_managed_module":  # which FSDP and fully_shard set
            raise wrapped("FSDP")
        # What forward reads is the model's: `pm.tau = 0.5` must reach it.
        if self._is_of_model(name) and not isinstance(value, nn.Module | nn.Parameter):
            setattr(self._model[0], name, value)
        else:
            super().__setattr__(name, value)

    def _is_of_model(self, name: str) -> bool:
        """Whether an attribute that is set from outside is the model's: it was there, or nobody knows it yet."""
        of_model = self.__dict__.get("_of_model")
        if of_model is None:  # while this is being built
            return False
        own = (self.__dict__, self._buffers, self._modules, self._parameters)
        return name in of_model or not (
            name.startswith("_") or hasattr(type(self), name) or any(name in names for names in own)
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Pieces, as `state_dict()` gives them, or whole tensors, of which this rank takes its pieces."""
        pieces = {name: piece for piece in self.pieces.values() for name in (piece.name, *piece.also)}
        mine = dict(state_dict)
        for name in pieces.keys() & mine.keys():
            piece, tensor = pieces[name], mine[name]
            if isinstance(tensor, Tensor) and tuple(tensor.shape) == piece.shape != piece.local_shape:
                mine[name] = piece.take(tensor)
        return super().load_state_dict(mine, *args, **kwargs)

    @property
    def has_loss(self) -> bool:
        """Whether the model or `loss_fn` makes the loss; if not, the script does, of outputs."""
        return self._captured.has_loss

    def train(self, mode: bool = True) -> Parallel:
        self._model[0].training = mode
        return super().train(mode)

    # Parameters

    def _take_pieces(self, model: nn.Module, init: Callable[[nn.Module], None] | None, seed: int) -> dict[str, Piece]:
        """Replace the model's parameters by this process's pieces, and adopt its submodules."""
        stored = dict(self.plan.program.leaves)
        pieces = {
            leaf.target: piece_of(leaf, stored[leaf.value.name], self.shares, self.world.place)
            for leaf in self._graph.parameters
        }
        take_first_values(model, self.world)
        needed = {leaf.target for leaf in self._graph.leaves if leaf.kind == "buffer"}
        local = initialise(model, pieces, self.world.device, init=init, seed=seed, needed=needed)
        before = dict(model.named_parameters(remove_duplicate=False))
        adopt(model, pieces, local, self.communicator, partial(self.watch.call, bystanders=False))
        hand_over(before, dict(model.named_parameters(remove_duplicate=False)))
        self._hold(model, pieces)
        return pieces

    def _collector(self) -> Gradients:
        made = Gradients(self._exchange)
        # Weakly: a module that nobody needs is gone at once, and its watch with it.
        this = weakref.ref(self)
        hooks = ParameterHooks(self._adopted.by_name)
        made.on_begin, made.quiet = hooks.begin, hooks.quiet
        made.on_finish = lambda: _pass_is_done(this(), hooks)
        return made

    def _hold(self, model: nn.Module, pieces: Mapping[str, Piece]) -> None:
        """Take over the submodules, parameters and buffers of a model whose parameters are pieces."""
        # In a tuple, so that it does not become a submodule: its children are ours.
        self._model = (model,)
        self._modules.update(model._modules)
        self._parameters.update(model._parameters)
        self._buffers.update(model._buffers)
        self._non_persistent_buffers_set |= model._non_persistent_buffers_set
        self._adopted = Adopted(self, pieces, model)
        if self.world.takes_part and (self.plan.on_host or self.plan.state_bits):
            kind, updates = kinds_in_group_order(self.plan, self.world)[self.world.place], self.plan.schedule.update
            away = {update.parameter for update in updates if kind in update.on_host}
            coded = {update.parameter for update in updates if update.bits}
            for keep, names in ((keep_on_host, away), (keep_coded, coded)):
                targets = [leaf.target for leaf in self.plan.graph.parameters if leaf.value.name in names]
                keep(self._adopted.by_name[target] for target in targets)
        save_whole(model, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        """The same pieces with values of their own, on the same processes: for averages of weights. All ranks copy."""
        made = type(self).__new__(type(self))
        nn.Module.__init__(made)
        made.__dict__ |= {name: value for name, value in self.__dict__.items() if name not in made.__dict__}
        made._copied_from = (self,)  # which keeps watch for both
        made._copies, made._paced = weakref.WeakSet(), None
        self._copies.add(made)
        made.training = self.training
        made._hold(copy.deepcopy(self._model[0], memo), self.pieces)
        made._optimizers, made._updates, made.recording = [], 0, None
        made._last_loss = copy.copy(self._last_loss)
        if self.communicator is not None:
            made._gradients = made._collector()
        made._every_module = list(made.modules())
        made._buffers_by_name = Buffers(made)
        made._inputs = made._new_inputs()
        made._form, made._programs = made._no_programs()
        watch_optimizers(made)
        memo[id(self)] = made
        return made

    def _new_inputs(self) -> Inputs:
        exchange = self._exchange if self.communicator is not None else None
        made = Inputs(self._graph, self.plan.program, self.world, exchange, self.plan.microbatches)
        made.table = self._table
        return made

    def _table(self, leaf: Leaf) -> Tensor:
        """A buffer or a constant."""
        return self._constant(leaf) if leaf.kind == "constant" else self._buffers_by_name[leaf.target]

    def _no_programs(self) -> tuple[CallForm, Programs]:
        model, loss_fn = self._model[0], self._loss_fn
        form = CallForm(model, self._batch, loss_fn)
        made = Programs(model, self.pieces, self.plan, self.world, self._side, form, loss_fn, self._compiled)
        return form, made

    def _here(self) -> str:
        return f"rank {self.world.rank}"

    # The batch

    @property
    def inputs(self) -> dict[str, tuple[Leaf, Placement]]:
        """The tensors of a batch by name, and how each is placed."""
        return self._inputs.by_name

    def rebuild_batch(self, tensors: list[Tensor]) -> object:
        """A batch as it was given to `parallelize`, of these tensors in the order of `inputs`."""
        return in_form_of(self._batch, *self._form.read_batch(self._batch).rebuild(tensors))

    def handed_out(self, batch: HandedOut) -> None:
        """A sharded loader has given this batch: all ranks must train on parts of the same."""
        self._handed_out = batch

    def largest(self, number: int) -> int:
        """The largest of the numbers that the ranks which take part give; all of them call this."""
        told = torch.tensor([number])
        if self.communicator is not None and self.communicator.size > 1:
            with waiting("the largest number of any rank"):
                dist.all_reduce(told, dist.ReduceOp.MAX, group=self._side)
        return int(told)

    def _check_entries(self, given: Given) -> None:
        if complaint := self._form.complaint(given, self.inputs):
            planned = ", ".join(f"{name} {list(leaf.value.shape)}" for name, (leaf, _) in self.inputs.items())
            raise BatchError(f"the batch has {complaint}", where=self._here(), do=f"give what was planned: {planned}")

    def _signature(self, given: Given, cut: RowCut | None) -> Signature:
        inputs = tuple(
            (
                name,
                self._inputs.whole_shape(name, tensor, cut),
                self._inputs.dtype_of(name, tensor),
                tensor.requires_grad,
            )
            for name, tensor in given.tensors.items()
        )
        modes = bytes(module.training for module in self._every_module)
        return Signature(modes, surrounding_autocast(), inputs, given.others)

    # The step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for a batch, the whole one or this rank's share of it, with the global loss.

        With a loss function, its loss. Called without what the loss function needs, the model's output, which becomes
        known when `loss_fn` is called with it.
        """
        given = self._form.read(args, kwargs)
        is_forward_alone = self._form.is_forward_alone(given)
        if self.training and torch.is_grad_enabled() and is_forward_alone:
            return awaited_outputs(given, self._captured.returned, self.world.device)
        if self.communicator is None:
            return self._follow(given, has_loss=self._captured.has_loss and not is_forward_alone)
        found, ran, cut = self._step(given, self.communicator)
        loss, *parts = self._handed_on(found, ran, cut)
        made = found.returned.rebuilt(loss, parts, has_loss=found.has_loss)
        return made if found.returned.loss is None else with_loss(made)

    def _step(self, given: Given, communicator: Communicator) -> tuple[CallProgram, RoundsRan, RowCut | None]:
        self._begin_step()
        communicator.recorder = self.recording.noting if self.recording is not None and self.training else None
        handed_out = self._handed_out.of(given.tensors.values())
        cut = self._inputs.cut_of(handed_out, given.tensors)
        signature = self._signature(given, cut)
        found = self._find(signature)
        if found is None:
            self._check_entries(given)
        # On the host some elements of whole inputs are looked at in every step. Elsewhere looking waits for the device.
        now_and_then = self._check_every and (self._forwards <= 2 or self._forwards % self._check_every == 0)
        some = bool(self._check_every) and self._all_on_host
        told = self._inputs.told(given.tensors, signature, cut, all_of_it=bool(now_and_then), some=some)
        self.watch.start_handshake(
            self._forwards,
            f"{signature.autocast or 'no autocast'}, {'gradients' if torch.is_grad_enabled() else 'no gradients'}, "
            f"{signature.mode.count(0)} modules in evaluation",
            told + str(handed_out),
            found.reads.text if found else self._programs.why_anew(signature),
            f"after {self._updates} steps, {settings_of(self.optimizers())}" if self._updates else "",
            training=self.training,
            sync=self._syncing,
        )
        if found is None:
            self.watch.finish_handshake()  # all ranks must be here to agree on a program
            given, found = self._programs.make(given, signature)
        local = self._inputs.local(given, cut, found.program, found.rounds, self._exchange)
        leaves = self._leaves(found.program)
        trained = self._adopted.by_name.values() if found.rounds.count > 1 and torch.is_grad_enabled() else ()

        def of_round(number: int) -> dict[str, Tensor]:
            return leaves | local(number)

        new = 0 if found.executor.has_run else found.executor.functions
        with compiling(new, quiet=self._quiet, is_first=self.world.place == 0):
            if trained and not self._knows_upstream and is_narrow(found.program.graph):
                ran = run_for_values(found.executor, self._gradients, trained, of_round)
            else:
                ran = run_rounds(found.executor, self._gradients, trained, of_round, self._upstream)
        with communicator.recorder.handshaking() if communicator.recorder is not None else nullcontext():
            self.watch.finish_handshake()
        # Every round has started from the same, and ends with the same.
        self._buffers_by_name.update(ran.rounds[-1].updates)
        if self.training and self._check_every and self._forwards % self._check_every == 0:
            self._compare_replicas()
        if found.has_loss:
            self._last_loss.remember(ran.loss, ran.own, self._forwards)
        self._send_to_bystanders(ran.loss)
        self.last_cut = cut
        return found, ran, cut

    def _handed_on(self, found: CallProgram, ran: RoundsRan, cut: RowCut | None) -> list[Tensor]:
        """The loss and what is returned besides, as the caller gets them."""
        names = list(dict.fromkeys(found.returned.names))
        loss = ran.rounds[-1].loss
        if found.rounds.count > 1:
            if ran.again is not None:
                loss = loss.detach().requires_grad_()
            if loss.requires_grad:
                self._gradients.reset()
                (loss,) = _StepEnd.apply(self, ran, loss)  # type: ignore[no-untyped-call]
            else:
                loss = ran.loss
            handed = outputs_of_rounds(found.rounds, ran, found.executor.placed, names, self._exchange, cut)
            return [loss.reshape(()), *(handed[name] for name in found.returned.names)]
        parts = [ran.rounds[-1].outputs[name] for name in names]
        if loss.requires_grad:
            self._gradients.reset()
            moving = [k for k, part in enumerate(parts) if isinstance(part, Tensor) and part.requires_grad]
            loss, *moved = _StepEnd.apply(self, ran, loss, *(parts[k] for k in moving))  # type: ignore[no-untyped-call]
            for k, part in zip(moving, moved, strict=True):
                parts[k] = part
        values = found.program.graph.values
        placed, dropped = found.executor.placed, found.returned.dropped if loss.requires_grad else ()
        handed = {
            name: hand_on(
                OutputPart(part, placed[name], values[name].shape, name, name in dropped), self._exchange, cut
            )
            for name, part in zip(names, parts, strict=True)
        }
        return [loss.reshape(()), *(handed[name] for name in found.returned.names)]

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
                found[name] = plain(self._adopted.by_name[leaf.target])
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

    def _compiled(self, stored: StoredProgram, outputs: tuple[str, ...]) -> Executor:
        bucket_bytes = stored.decisions.bucket_bytes if self._bucket_bytes is None else self._bucket_bytes
        kinds = kinds_in_group_order(self.plan, self.world)
        return Executor(
            lower(stored.program, replace(stored.decisions, bucket_bytes=bucket_bytes, stretch=self.plan.stretch)),
            self._exchange,
            self._gradients,
            self.randomness,
            self._adopted.by_name,
            self.world.device,
            outputs,
            kinds[self.world.place] if self.world.takes_part else 0,
        )

    def _find(self, signature: Signature) -> CallProgram | None:
        if signature == self._planned and not self._programs.has(signature):
            self._programs.add_planned(signature, self._captured)
        return self._programs.find(signature)

    # The loss function

    @property
    def loss_fn(self) -> Callable[..., Tensor]:
        """The loss function of the model, for loops that call it: `loss = pm.loss_fn(pm(x), target)`."""
        return self._loss

    def _loss(self, output: object, *args: Any, **kwargs: Any) -> Tensor:
        if self._loss_fn is None:
            raise TrainingError(
                "there is no loss function", where=self._here(), do="pass it to parallelize: loss_fn=criterion"
            )
        awaited = awaited_in(output)
        if awaited is None:
            # In evaluation the output is there, and every rank makes the same loss of the whole of it.
            whole = pytree.tree_map_only(Tensor, lambda part: gather(part, self), (output, args, kwargs))
            loss: Tensor = self._loss_fn(whole[0], *whole[1], **whole[2])
            return loss
        if self.communicator is None:
            loss, awaited.parts = self._followed_loss(), self._no_rows(awaited.given)
        else:
            found, ran, cut = self._step(self._form.with_left(awaited.given, args, kwargs), self.communicator)
            loss, *awaited.parts = self._handed_on(found, ran, cut)
        return loss

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """What `parallelize(compile=True)` does, from the next step on. All ranks call it."""
        self.together("pm.compile")
        self.__dict__["plan"] = self.plan.compiled()
        self._form, self._programs = self._no_programs()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.communicator is not None:
            self._gradients.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add up gradients on this device; the next one outside sends the sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """The switch of DistributedDataParallel, for loops that set it in place of `no_sync`."""
        return self._syncing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, on: bool) -> None:
        self._syncing = on

    def remember_upstream(self, gradient: Tensor) -> None:
        """The gradient that a loss has got. By none, and by what is not finite, nothing can be scaled."""
        wide = gradient.detach().reshape(()).to(torch.float64)
        self._upstream = torch.where(wide.isfinite() & (wide != 0), wide, self._upstream)
        self._knows_upstream = True

    def together(self, call: str) -> None:
        """A call that every rank must make begins: refused if others make another one, or none within `timeout_s`."""
        self.watch.call(call)

    def close(self) -> None:
        """Stop watching the other ranks. The end of the process does it too."""
        self.watch.stop()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when an optimizer with parameters of this model is about to take a step."""
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        if self.communicator is not None and self._gradients.has_kept:
            raise TrainingError(
                "the gradients were not synchronised: the last backward pass was under no_sync()",
                where=self._here(),
                do="leave the last backward pass before optimizer.step() outside of no_sync()",
            )

        if self.recording is not None:
            self.recording.before_update()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when it has taken it. Of several optimizers, the last to step for the first time ends a step."""
        self._updates += 1
        if self.recording is not None and self.communicator is not None and optimizer is self._optimizers[-1]():
            # What is sent between steps (a checkpoint, a comparison of replicas) belongs to none.
            self.communicator.recorder = None
            self.recording.after_update()
        if self._paced is not None and optimizer is self._optimizers[-1]():
            self._paced.step_done()

    # Other shares while training

    def replan(self, plan: Plan | None = None) -> bool:
        """Take another plan with the same program, or shares by what devices took in the last steps; whether any
        piece was moved. Every rank calls it, between two steps."""
        self.together("pm.replan")
        if plan is None:
            return self._paced is not None and self._paced.now()
        take_shares(self, plan)
        return True

    def watch_pace(self) -> Paced:
        """From now on shares are changed when that is worth it."""
        if self._paced is None:
            self._paced = Paced(self, self._side)
        self._paced.follows = True
        return self._paced

    @property
    def has_copies(self) -> bool:
        """Whether a copy of this module holds pieces by the same plan."""
        return len(self._copies) > 0 or "_copied_from" in self.__dict__

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have taken steps, in the order of their first."""
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def parameter(self, name: str) -> nn.Parameter:
        """This rank's piece of a parameter, whatever module it is in."""
        return self._adopted.by_name[name]

    def now_by(self, plan: Plan, shares: Shares, changed: Mapping[str, Piece]) -> None:
        """The pieces have moved: what was made of the old shares is made anew."""
        self.pieces.update(changed)
        self.__dict__["plan"] = plan
        self.shares = shares
        if self.communicator is not None:
            self._exchange = Redistributor(self.communicator, self.shares, Network(plan.on))
            self._gradients = self._collector()
        self._form, self._programs = self._no_programs()
        self._inputs = self._new_inputs()
        self._handed_out = HandedOut()
        if self._paced is not None:
            self._paced.begin_anew()

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
        self.together("pm.record")
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
        if self.communicator is not None:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        alive = [optimizer for known in self._optimizers if (optimizer := known()) is not None]
        for optimizer in alive:
            replicas.check(self, optimizer)
        if not alive:
            replicas.check(self)

    # Wrappers that would train it a second time

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """DistributedDataParallel asks for this as it is built."""
        raise wrapped("DistributedDataParallel")

    def _replicate_for_data_parallel(self) -> nn.Module:
        raise wrapped("DataParallel")

    # Ranks whose device the plan does not use

    def _begin_step(self) -> None:
        step_ends()  # of an optimizer whose step has failed
        end_failed_steps()
        check_not_inside(self)
        self._last_loss.check()
        self._adopted.check(self.world.device, self._here())
        self._forwards += 1
        self.watch.at_step(self._forwards)
        outputs.remember(self)

    def _follow(self, given: Given, *, has_loss: bool) -> Any:
        """The loss, as the others tell it, and no rows of anything else."""
        return self._captured.returned.rebuilt(self._followed_loss(), self._no_rows(given), has_loss=has_loss)

    def _followed_loss(self) -> Tensor:
        self._begin_step()
        loss = torch.zeros((), device=self.world.device, dtype=self._graph.values[self._graph.loss].torch_dtype)
        self._tell_all(loss)
        if torch.is_grad_enabled():
            loss = _Followed.apply(self, loss.requires_grad_())  # type: ignore[no-untyped-call]
        return loss

    def _no_rows(self, given: Given) -> list[Tensor]:
        """Outputs on a rank that has no rows of a batch; given the whole batch, it would have to have the whole."""
        named, device = [self._captured.whole.values[name] for name in self._captured.returned.names], self.world.device
        if any(tensor.dim() and tensor.shape[0] for tensor in given.tensors.values()):
            return [outputs.not_here(value.shape, value.torch_dtype, device, self._here()) for value in named]
        return [torch.zeros((0, *value.shape[1:]), dtype=value.torch_dtype, device=device) for value in named]

    def _send_to_bystanders(self, loss: Tensor) -> None:
        if len(self.world.ranks) < self.world.size:
            self._tell_all(loss.detach().clone().reshape(()))

    def _tell_all(self, loss: Tensor) -> None:
        """From the first rank that takes part to all of the world."""
        self.watch.entering("the loss, told to all ranks")
        # By way of the host where they talk over gloo.
        told = loss if self.world.backend_of_all == "nccl" else loss.cpu()
        try:
            dist.broadcast(told, self.world.ranks[0])
            loss.copy_(told)
        except RuntimeError as error:
            raise self.watch.explain(error, "the loss, told to all ranks") from error
        finally:
            self.watch.left()


def _pass_is_done(pm: Parallel | None, hooks: ParameterHooks) -> None:
    hooks.finish()
    _step_is_done(pm)


def _step_is_done(pm: Parallel | None) -> None:
    if pm is not None and pm._syncing:
        pm.__dict__["steps_done"] += 1


def _of_loss_alone(graph: Graph) -> Captured:
    """A graph of which nothing but the loss is known to be returned."""
    return Captured(graph, graph, Returned((), lambda _: None, None), True, Reads(), graph)


class _StepEnd(torch.autograd.Function):
    """The end of a forward pass and the start of its backward pass, from the loss or from anything else returned."""

    @staticmethod
    def forward(ctx: Any, pm: Parallel, ran: RoundsRan, loss: Tensor, *parts: Tensor) -> Any:
        ctx.pm, ctx.ran = pm, ran if len(ran.rounds) > 1 else None
        ctx.save_for_backward(loss)
        ctx.set_materialize_grads(False)
        total = loss.view_as(loss) if ctx.ran is None else ran.loss.view_as(loss)
        return (total, *(part.view_as(part) for part in parts))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # with create_graph=True
            raise TrainingError(
                "a gradient through the parallel model is to be differentiated again (create_graph=True): its backward "
                "pass is no graph",
                do="penalise gradients of a part that is not parallel, or take differences of two forward passes: "
                "pm(x + e * v) - pm(x)",
            )
        try:
            (loss,) = ctx.saved_tensors
        except RuntimeError:
            raise TrainingError(
                "backward() was called again without a forward pass", do="call loss = pm(...) before each backward()"
            ) from None
        ctx.pm._gradients.syncing = ctx.pm._syncing
        ctx.pm._gradients.begin()
        if ctx.ran is not None and gradient is not None:
            ran = ctx.ran if ctx.ran.again is None else ctx.ran.again(gradient.detach().to(torch.float64))
            ran.taken_over(ctx.pm._gradients, gradient)
            ctx.pm.remember_upstream(gradient)
            if ctx.ran.again is not None:
                last = ran.rounds[-1].loss
                torch.autograd.backward([last], [gradient.expand_as(last)])
                ctx.ran.sums = None
        # The whole of the backward pass runs, as it was planned, also where the loss itself was not asked for.
        return None, None, torch.zeros_like(loss) if gradient is None else gradient, *others


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
