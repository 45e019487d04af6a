"""The state of an optimizer, apart from who holds which piece.

In: an optimizer of the local pieces. Out, to save: its tensors by the names of the parameters, cut as these are, and
the rest as plain data (`optimizer_kept`). To load: where the tensors go on this process, whatever its pieces are now,
and a function that puts the state together (`optimizer_wanted`).

A tensor that is shaped as the local piece is the state of each element and is cut as the parameter. One that has a
single element (a count of steps) is a number. Anything else belongs to the parameter as a whole, which some process
would have to hold: fine where the parameter is whole, refused where it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lopsided.errors import CheckpointError, shown
from lopsided.runtime.checkpoint.folder import (
    Group,
    OptimizerRecord,
    Record,
    Table,
    as_plain,
    few,
    from_plain,
    refuse,
)
from lopsided.runtime.checkpoint.state import Kept, wanted_pieces
from lopsided.runtime.checkpoint.storage import Held
from lopsided.runtime.checkpoint.tensor_file import DTYPES, NAMES, check_dtype
from lopsided.runtime.control_plane import ControlPlane
from lopsided.runtime.parameters.coded_state import Coded
from lopsided.runtime.parameters.host_state import is_apart, is_coded
from lopsided.runtime.parameters.host_state import kept as kept_between_steps
from lopsided.runtime.parameters.pieces import Piece

if TYPE_CHECKING:
    from lopsided.runtime.parallel import Parallel

Form = Mapping[str, object]
"""What is said of one entry of the state: of a tensor its "shape" and "dtype", with its "number" where it has but one
element; of anything else its "value"."""

State = Mapping[str, Mapping[str, Form]]  # by parameter and key

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how a device computes, not what: they stay as the new optimizer has them."""

_PARAMETERS = ("params", "param_names")


def _named(pm: Parallel, optimizer: Optimizer) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """The parameters of each group with the names under which they are saved."""
    first = {name: piece.name for piece in pm.pieces.values() for name in (piece.name, *piece.also)}
    names: dict[int, str] = {}
    for name, parameter in pm.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), first.get(name, name))
    for number, group in enumerate(optimizer.param_groups):
        strangers = [p for p in group["params"] if id(p) not in names]
        if strangers:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {list(strangers[0].shape)} that the model does not have",
                where=f"parameter group {number} of {type(optimizer).__name__}",
                do="make the optimizer from the parameters of the parallel module",
            )
        yield [(names[id(p)], p) for p in group["params"]]


def _key(name: str, key: str) -> str:
    return f"optimizer.{name}.{key}"


# Saving


def optimizer_kept(pm: Parallel, optimizer: Optimizer, accord: ControlPlane) -> tuple[dict[str, Kept], OptimizerRecord]:
    """The tensors of the optimizer's state, and all else of it as plain data. Every rank must call this."""
    of = type(optimizer).__name__

    def told() -> State:
        return {
            name: {key: _form(value, f"{key} of {name} in {of}") for key, value in optimizer.state.get(p, {}).items()}
            for group in _named(pm, optimizer)
            for name, p in group
        }

    everybody = accord.all(told)
    # Of ranks that take part: others hold nothing. What they all said decides, so all decide alike.
    settled = accord.each(lambda: _settled(pm, [everybody[rank] for rank in pm.world.ranks], of))
    kept = {}
    for group in _named(pm, optimizer):
        for name, parameter in group:
            piece = pm.pieces.get(name)
            cut = piece if piece is not None and piece.is_cut and 0 not in piece.shape else None
            for key, form in settled[name].items():
                if "number" in form or "value" in form:
                    continue
                local = optimizer.state.get(parameter, {}).get(key)
                if isinstance(local, Coded) and cut is not None and len(cut.chunks()) > 1:
                    # Each of its boxes would be written out by itself. One that is all of it is, when it is saved.
                    local = local.decode(torch.device("cpu"))
                dtype = DTYPES[str(form["dtype"])]
                shape = cut.shape if cut else tuple(form["shape"])  # type: ignore[arg-type]
                kept[_key(name, key)] = Kept(shape, dtype, local, cut)
    groups = []
    for named, given in zip(_named(pm, optimizer), optimizer.param_groups, strict=True):
        options = {key: value for key, value in given.items() if key not in _PARAMETERS}
        plain = {key: as_plain(value, f'"{key}" of a parameter group of {of}') for key, value in options.items()}
        groups.append(Group(tuple(name for name, _ in named), plain))
    return kept, OptimizerRecord(of, tuple(groups), settled)


def _form(value: object, where: str) -> Form:
    if not isinstance(value, Tensor):
        return {"value": as_plain(value, where)}
    check_dtype(value.dtype, where)
    if is_traceable_wrapper_subclass(value) and not isinstance(value, Coded):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, of which nobody knows here how its pieces are put together",
            where="save",
            do="use the optimizer with plain state (torch.optim.AdamW), and let the plan keep it in 8 bits: "
            "lopsided plan --allow 8bit-state",
        )
    form = {"shape": list(value.shape), "dtype": NAMES[value.dtype]}
    return form | {"number": as_plain(value, where)} if value.numel() == 1 else form


def _settled(pm: Parallel, told: Sequence[State], of: str) -> dict[str, dict[str, Form]]:
    """One form for all. `told` is what each of those that take part has."""
    found: dict[str, dict[str, Form]] = {}
    for name in dict.fromkeys(name for state in told for name in state):
        keys = dict.fromkeys(key for state in told for key in state.get(name, {}))
        piece = pm.pieces.get(name)
        found[name] = {
            key: _one_form(name, key, [state.get(name, {}).get(key) for state in told], piece, of) for key in keys
        }
    return found


def _one_form(name: str, key: str, forms: Sequence[Form | None], piece: Piece | None, of: str) -> Form:
    first = next(form for form in forms if form is not None)
    if piece is None or not piece.is_cut:
        if None in forms:
            raise CheckpointError(
                f"rank {forms.index(None)} of those that take part has no {key!r} of {name}, others have",
                where=of,
                do="step the optimizer on every rank",
            )
        is_number = "number" in first and (not first["shape"] or piece is None or first["shape"] != list(piece.shape))
        return first if is_number or "value" in first else _tensor(first)
    shapes = [piece.placement.local_shape(piece.shape, piece.counts, rank) for rank in range(len(forms))]
    # An optimizer may skip a piece without elements.
    pairs = [(form, shape) for form, shape in zip(forms, shapes, strict=True) if form is not None or 0 not in shape]
    if all(form is not None and form.get("shape") == list(shape) for form, shape in pairs):
        return _tensor(first)
    if all(form is not None and form.keys() & {"number", "value"} for form, _ in pairs):
        return first
    shown_shape = first.get("shape", "no tensor")
    raise CheckpointError(
        f"{of} keeps {key!r} of {name} with shape {shown_shape}, and {name} is cut: its state cannot be put together",
        where=f"{name}, {list(piece.shape)} as {piece.placement}",
        do="use an optimizer whose state has the parameter's shape, or a plan that keeps this parameter whole",
    )


def _tensor(form: Form) -> Form:
    return {"shape": form["shape"], "dtype": form["dtype"]}


# Loading


def optimizer_wanted(
    pm: Parallel, optimizer: Optimizer, told: OptimizerRecord, table: Table, where: str, *, in_order: bool
) -> tuple[dict[str, Held], Callable[[], None]]:
    """Where this process wants the tensors of the state, and what to call when they are there.

    `in_order`: the parameter groups must be in the order in which they were saved.
    """
    of = type(optimizer).__name__
    if told.of != of:
        raise CheckpointError(
            f"the checkpoint is of {shown(told.of)}, and the optimizer is {of}",
            where=where,
            do=f"make an optimizer of that class, or load without one: load(pm, None, ...) starts {of} anew",
        )
    groups = list(_named(pm, optimizer))
    options = _options(optimizer, groups, told.groups, in_order, where)
    wanted: dict[str, Held] = {}
    rebuilt: dict[int, dict[str, object]] = {}
    apart: list[tuple[nn.Parameter, str, Tensor]] = []
    for number, (name, parameter) in enumerate(pair for group in groups for pair in group):
        entries: dict[str, object] = {}
        for key, form in told.state.get(name, {}).items():
            if "value" in form:
                entries[key] = from_plain(form["value"])
            elif "number" in form:
                entries[key] = number_of(form, f"{shown(key)} of {name} in the optimizer's state", where)
            elif (record := table.get(_key(name, key))) is not None:
                room, wanted[_key(name, key)] = _room(record, pm.pieces.get(name), parameter, key, of, where)
                if is_apart(parameter):
                    apart.append((parameter, key, room))
                else:
                    entries[key] = room
            else:
                raise refuse(f"{shown(key)} of {name} in the optimizer's state is not there", where)
        if entries:
            rebuilt[number] = entries

    def put_together() -> None:
        at = 0
        param_groups = []
        for group, each in zip(groups, options, strict=True):
            param_groups.append({**each, "params": list(range(at, at + len(group)))})
            at += len(group)
        optimizer.load_state_dict({"state": rebuilt, "param_groups": param_groups})
        # That would take them to the device, which may not have the room for all of them.
        while apart:
            parameter, key, room = apart.pop()
            coded = is_coded(parameter)
            optimizer.state[parameter][key] = kept_between_steps(parameter, key, room) if coded else room

    return wanted, put_together


def _options(
    optimizer: Optimizer,
    groups: Sequence[Sequence[tuple[str, nn.Parameter]]],
    told: Sequence[Group],
    in_order: bool,
    where: str,
) -> list[dict[str, Any]]:
    """The saved options of each group of the optimizer; groups are known by their parameters."""

    def other(what: str) -> CheckpointError:
        do = "make the optimizer with the same parameters in the same groups as when it was saved"
        return CheckpointError(what, where=where, do=do)

    saved = {frozenset(group.parameters): group.options for group in told}
    here = [frozenset(name for name, _ in group) for group in groups]
    mine, theirs = frozenset[str]().union(*here), frozenset[str]().union(*saved)
    if theirs - mine:
        raise other(f"the optimizer lacks {few([shown(name) for name in sorted(theirs - mine)])}")
    if mine - theirs:
        raise other(f"the saved optimizer did not have {few(sorted(mine - theirs))}")
    if in_order and here != list(saved):
        # Schedulers count groups.
        raise other("the groups of the optimizer are in another order than when it was saved")
    found = []
    for names, group, fresh in zip(here, groups, optimizer.param_groups, strict=True):
        if names not in saved:
            named = group[0][0] if group else "no parameter"
            raise other(f"the group of {named} has other parameters than when it was saved")
        # Schedulers add options of their own ("initial_lr"), which a fresh optimizer may not have yet.
        read = {key: from_plain(value) for key, value in saved[names].items() if key not in (*_HOW, *_PARAMETERS)}
        for key, value in read.items():
            # A number, in a tensor where the fresh one is one.
            if isinstance(now := fresh.get(key), Tensor) and isinstance(value, bool | int | float):
                read[key] = torch.full_like(now, value)
        found.append({key: value for key, value in fresh.items() if key != "params"} | read)
    return found


def number_of(form: Form, what: str, where: str) -> Tensor:
    """A number of the state, in a tensor of its shape."""
    number, shape = from_plain(form["number"]), form.get("shape")
    dtype = DTYPES.get(str(form.get("dtype")))
    if dtype is None or not isinstance(shape, list) or len(shape) > 64 or any(size != 1 for size in shape):
        raise refuse(f"{what} is not a number", where)
    if not isinstance(number, bool | int | float):
        raise refuse(f"{what} is {shown(number)}, not a number", where)
    try:
        return torch.full([1] * len(shape), number, dtype=dtype)
    except (RuntimeError, OverflowError):
        raise refuse(f"{what} is {shown(number)}, too large for {dtype}", where) from None


def _room(
    record: Record, piece: Piece | None, parameter: nn.Parameter, key: str, of: str, where: str
) -> tuple[Tensor, Held]:
    """An empty tensor for a part of the state, and what of it this process wants."""
    device = torch.device("cpu") if is_apart(parameter) else parameter.device
    if piece is not None and record.shape == piece.shape:
        local = torch.empty(piece.local_shape, dtype=record.dtype, device=device)
        return local, wanted_pieces(record, piece, local)
    if piece is not None and piece.is_cut:
        raise CheckpointError(
            f"{of} keeps {key!r} of {piece.name} with shape {list(record.shape)}, and {piece.name} is cut by this plan",
            where=where,
            do="use a plan that keeps this parameter whole, as the one it was saved under did",
        )
    local = torch.empty(record.shape, dtype=record.dtype, device=device)
    return local, wanted_pieces(record, None, local)
