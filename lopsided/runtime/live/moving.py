"""Other shares while training: every piece goes to where the new shares want it, in place, without a restart.

In: a parallel module, and a plan with the same program and other shares. Out: the same module, whose parameters,
gradients and optimizer states are the pieces of the new plan; parameters stay the objects they are, so optimizers and
whoever else holds them go on. What was made of the old shares (programs, exchange, inputs) is made anew.

One tensor at a time is whole on every device, for as long as it is moved. Nothing is changed before all ranks have
agreed that the plan can be taken, and what they hold of each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.optim import Optimizer

from lopsided.errors import DoesNotFitError, PlanError
from lopsided.ir.placement import Shares
from lopsided.planner.baselines import STATE
from lopsided.planner.candidates import memory_limits
from lopsided.planner.plan_data import Plan
from lopsided.planner.planner import predict
from lopsided.runtime.agreement import cuts_of, in_group_order
from lopsided.runtime.checkpoint.optimizer_state import State, number_of, optimizer_kept
from lopsided.runtime.checkpoint.tensor_file import DTYPES
from lopsided.runtime.control_plane import accord_of
from lopsided.runtime.parameters.host_state import kept as kept_between_steps
from lopsided.runtime.parameters.piece_tensors import PieceParameter, plain, plain_gradient
from lopsided.runtime.parameters.pieces import Piece, piece_of

if TYPE_CHECKING:
    from lopsided.runtime.parallel import Parallel


def with_shares(plan: Plan, work: tuple[float, ...], note: str = "") -> Plan:
    """The plan with other shares of the work. Shares of parts of the model change alike; those of the state, which
    memory decides, do not."""
    before = plan.shares
    factors = [new / old if old else 0.0 for new, old in zip(work, before.work, strict=True)]
    named = []
    for name, fractions in before.named:
        scaled = [part * factor for part, factor in zip(fractions, factors, strict=True)]
        if name != STATE and sum(scaled) > 0:
            fractions = tuple(part / sum(scaled) for part in scaled)
        named.append((name, fractions))
    # What was settled to the unit of the state's cuts stays settled.
    cuts = tuple(cut for cut in before.cuts if cut[0] == STATE)
    shares = Shares(work, tuple(named), cuts)
    step_s, breakdown, memory = predict(plan.program, shares, plan.on, *plan.how)
    over = [d for d, most in enumerate(memory_limits(plan.on)) if memory[d] > most]
    if over:
        raise DoesNotFitError(
            f"{plan.devices[over[0]]} has no room for so large a share",
            where="replan",
            do="leave the shares as they are",
        )
    notes = (*plan.notes, note) if note else plan.notes
    return replace(plan, shares=shares, step_s=step_s, breakdown=breakdown, memory_bytes=memory, notes=notes)


def cuts_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans of one program cut everything alike: shares round to whole rows and heads."""
    return all(
        one.shares.cut(at.length(shape), at.by) == other.shares.cut(at.length(shape), at.by)
        for at, shape in cuts_of(one.program)
    )


def bytes_to_move(pm: Parallel, plan: Plan) -> int:
    """Of parameters whose pieces change, with two tensors of state for each."""
    changed = _changed(pm, in_group_order(plan, pm.world))
    return 3 * sum(math.prod(piece.shape) * piece.dtype.itemsize for piece in changed.values())


def check_movable(pm: Parallel, plan: Plan) -> None:
    """Refuse a plan that needs a restart."""
    why = ""
    if str(plan.program) != str(pm.plan.program):
        why = "its program is another one"
    elif plan.on_host != pm.plan.on_host:
        why = "it keeps other optimizer state in host memory"
    elif plan.state_bits != pm.plan.state_bits:
        why = "it keeps optimizer state in another number of bits"
    elif plan.on.devices != pm.plan.on.devices or len(pm.world.ranks) < pm.world.size:
        why = "it is for other devices, or some process has no device"
    elif pm.recording is not None and not pm.recording.is_done:
        why = "a recording is under way"
    elif pm.has_copies:
        why = "the module was copied, and its copy holds pieces too"
    if why:
        raise PlanError(
            f"this plan cannot be taken while training: {why}",
            where="pm.replan",
            do="save a checkpoint, start again with the new plan, and load it",
        )


@dataclass(frozen=True, slots=True)
class _Moved:
    """What one parameter is now: its values and its gradient."""

    value: Tensor
    gradient: Tensor | None


def take_shares(pm: Parallel, plan: Plan) -> None:
    """Move every piece to where the plan wants it. All ranks call it between two steps, with the same plan."""
    accord = accord_of(pm)
    accord.each(lambda: check_movable(pm, plan))
    shares = in_group_order(plan, pm.world)
    changed = _changed(pm, shares)
    # What all hold, before anything moves: a rank without elements may have no state.
    states = [(optimizer, *optimizer_kept(pm, optimizer, accord)) for optimizer in pm.optimizers()]
    graded = accord.all(lambda: {name for name in changed if plain_gradient(pm.parameter(name)) is not None})
    with torch.no_grad(), DisableTorchFunctionSubclass():
        moved = {}
        for name, piece in changed.items():
            parameter, old = pm.parameter(name), pm.pieces[name]
            gradient = None
            if any(name in each for each in graded):
                mine = plain_gradient(parameter)
                gradient = _move(pm, old, piece, mine if mine is not None else torch.zeros_like(plain(parameter)))
            moved[name] = _Moved(_move(pm, old, piece, plain(parameter).detach()), gradient)
        for optimizer, kept, record in states:
            new = {
                key: _move(pm, pm.pieces[name], changed[name], each.local, each.dtype)
                for name in changed
                for key, each in _of_parameter(kept, name)
            }
            _give_state(pm, optimizer, record.state, changed, new)
        for name, one in moved.items():
            _give(pm.parameter(name), one, changed[name])
    pm.now_by(plan, shares, changed)


def _changed(pm: Parallel, shares: Shares) -> dict[str, Piece]:
    """The new pieces of parameters that are cut otherwise by these shares."""
    stored = dict(pm.plan.program.leaves)
    found = {}
    for leaf in pm.plan.graph.parameters:
        piece = piece_of(leaf, stored[leaf.value.name], shares, pm.world.place)
        if piece.is_cut and piece.counts != pm.pieces[leaf.target].counts:
            found[leaf.target] = piece
    return found


def _move(pm: Parallel, old: Piece, new: Piece, local: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's new piece of a tensor of which every rank has its old one."""
    if pm.communicator is None:  # a rank without a device, of which `check_movable` knows
        return new.take(torch.empty(0))
    shapes = [old.placement.local_shape(old.shape, old.counts, rank) for rank in range(len(old.counts))]
    counts = [math.prod(shape) for shape in shapes]
    device = pm.world.device
    mine = (
        torch.empty(0, dtype=dtype, device=device)
        if local is None
        else local.detach().to(device).reshape(-1).contiguous()
    )
    flat = pm.communicator.all_gather(mine, counts, what=f"{old.name}, moved").wait()
    whole = old.join([part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)])
    return new.take(whole).clone(memory_format=torch.contiguous_format)


def _of_parameter(kept: Mapping[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    prefix = f"optimizer.{name}."
    for key, each in kept.items():
        if key.startswith(prefix) and each.piece is not None and each.piece.name == name:
            yield key, each


def _give_state(
    pm: Parallel, optimizer: Optimizer, told: State, changed: Mapping[str, Piece], moved: Mapping[str, Tensor]
) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name in changed:
        parameter = pm.parameter(name)
        if id(parameter) not in held or name not in told:
            continue
        state = optimizer.state[parameter]
        for key, form in told[name].items():
            if (tensor := moved.get(f"optimizer.{name}.{key}")) is not None:
                state[key] = kept_between_steps(parameter, key, tensor)
            elif key not in state and "number" in form:
                # A rank that had no elements counted no steps.
                state[key] = number_of(form, key, "replan").to(DTYPES[str(form["dtype"])])
            elif key not in state and "value" in form:
                state[key] = form["value"]


def _give(parameter: nn.Parameter, one: _Moved, piece: Piece) -> None:
    parameter.grad = None
    parameter.data = one.value
    if type(parameter) is PieceParameter:
        parameter.of = replace(parameter.of, local_shape=piece.local_shape)
    if one.gradient is not None:
        parameter.grad = one.gradient
