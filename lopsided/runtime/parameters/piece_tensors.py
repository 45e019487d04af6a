"""Tensors that know they are pieces: a sum, a norm or a maximum over one is that of the whole tensor.

In: this process's piece of a parameter that is stored cut. Out: `PieceParameter`, an `nn.Parameter` whose gradient,
`data` and elementwise results are pieces too (`PieceTensor`).

    elementwise ops, views, in-place ops     local; what has as many elements as the piece is a piece
    sum, mean, norm, max, any, all, dot      of the whole, on every process: all that hold pieces must call it
    a reduction over the dim that is cut,    refused, but inside of an optimizer's step, which is asked
    a median, a standard deviation           by experiment whether it is right on pieces (`optimizers`)
    pieces joined with whole tensors         may be changed, not reduced

So `torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0)` and norms made by hand are those of one device, and
`torch.amp.GradScaler` finds on every process what has overflowed on one. The executor works on plain tensors (`plain`).
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.nn import functional as F
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils as foreach_module

from lopsided.comm.communicator import Communicator
from lopsided.errors import TrainingError
from lopsided.runtime.parameters.pieces import Piece

Arguments = Sequence[Any]
Keywords = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Of:
    """What a tensor is a piece of."""

    name: str
    communicator: Communicator
    together: Callable[[str], None]  # all processes that hold pieces are about to make this call
    count: int  # elements of the whole
    cut: int  # the dim that is cut, while the tensor has the shape of the piece
    local_shape: tuple[int, ...]
    mixed: bool = False  # joined with tensors that all processes hold: no element would count once


class PieceWarning(UserWarning):
    """A piece is written to a file as if it were the whole."""


def _tell_of_a_part(of: Of) -> None:
    warnings.warn(
        f"what is written is this process's piece of {of.name}, {list(of.local_shape)}, and not the whole. "
        "torch.save(lopsided.full_state_dict(pm), path) writes whole tensors, and lopsided.save_checkpoint whatever a "
        "run needs to go on; every rank calls them",
        PieceWarning,
        stacklevel=3,
    )


class PieceTensor(Tensor):
    """A tensor with one element for every element of a piece."""

    of: Of

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # Printing looks for the largest element, and one process may print alone.
        return repr(plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        _tell_of_a_part(self.of)
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> PieceTensor:
        return memo.setdefault(id(self), _marked(plain(self).clone(), self.of))  # type: ignore[no-any-return]


class PieceParameter(nn.Parameter):
    """A parameter of which this process holds a piece."""

    of: Of

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{plain(self)!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        _tell_of_a_part(self.of)
        return nn.Parameter(plain(self).detach(), self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> PieceParameter:
        if id(self) not in memo:
            memo[id(self)] = _parameter(plain(self).detach().clone(), self.requires_grad, self.of)
        return memo[id(self)]  # type: ignore[no-any-return]


_TYPES = (PieceTensor, PieceParameter)

# As DTensor does: optimizers and clip_grad_norm_ take the quick way through lists of these types.
optimizer_module._foreach_supported_types += [PieceParameter]
foreach_module._foreach_supported_types += [*_TYPES]  # type: ignore[list-item]


def piece_parameter(
    piece: Piece, local: Tensor, communicator: Communicator | None, together: Callable[[str], None]
) -> nn.Parameter:
    """A parameter of this process's values; one that knows what it is a piece of, if others hold pieces too."""
    if communicator is None or not piece.is_cut or len(piece.counts) == 1:
        return nn.Parameter(local, requires_grad=piece.trained)
    of = Of(piece.name, communicator, together, math.prod(piece.shape), piece.placement.dim, piece.local_shape)
    return _parameter(local, piece.trained, of)


def plain(tensor: Tensor) -> Tensor:
    """The same tensor without this knowledge; gradients find their way to it."""
    if type(tensor) not in _TYPES:
        return tensor
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def plain_gradient(parameter: Tensor) -> Tensor | None:
    with DisableTorchFunctionSubclass():
        return parameter.grad


def _parameter(local: Tensor, trained: bool, of: Of) -> PieceParameter:
    made = Tensor._make_subclass(PieceParameter, local, trained)
    made.of = of
    return made


def _marked(tensor: Tensor, of: Of) -> PieceTensor:
    with DisableTorchFunctionSubclass():
        made = tensor.as_subclass(PieceTensor)
    made.of = of
    return made


# Every call with a piece among its arguments


def _run(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    if torch.compiler.is_compiling():
        raise TrainingError(
            "a compiled function works on parameters that are stored in pieces, which it does not know",
            where="torch.compile around a function of parameters, or the step of an optimizer that is not elementwise",
            do="leave torch.compile out there; torch.compile(optimizer.step) works where every element is on its own",
        )
    if _step[0] == "elementwise":
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in _LAYERS and _step[0] == "outside" and (piece := _piece_in((*args, *kwargs.values()))) is not None:
        raise TrainingError(
            f"a layer of the model is called by itself, and this process has a piece of its parameter {piece.of.name}",
            do="call pm(...), or take lopsided.whole(pm) on rank 0 to generate and to evaluate by hand",
        )
    if func in _DRAWS and _step[0] == "outside" and type(args[0]) in _TYPES:
        raise TrainingError(
            f"{func.__name__} would draw for this process's piece of {args[0].of.name}, of other sizes than the whole",
            where="a parameter that is stored in pieces",
            do="initialise the model before parallelize, or load whole tensors with lopsided.load_full_state_dict",
        )
    reduction = _REDUCTIONS.get(func)
    if reduction is not None and type(args[0]) in _TYPES and not _of_two(reduction, args, kwargs):
        return _reduced(reduction, func, args, kwargs)
    if (special := _SPECIAL.get(func)) is not None:
        with DisableTorchFunctionSubclass():
            return special(func, args, kwargs)
    with DisableTorchFunctionSubclass():
        piece = _piece_in(args)
        if _step[0] == "outside" and len(args) + len(kwargs) > 1:
            for together in _together(args, kwargs):
                _refuse_the_whole(together, func.__name__)
        result = func(*args, **kwargs)
        if type(result) is Tensor and func not in _FACTORIES:
            return _marked(result, piece.of) if piece is not None and result.numel() == piece.numel() else result
        if type(result) is list and args and type(args[0]) in (list, tuple):  # of one of torch's _foreach_ functions
            pairs = zip(result, args[0], strict=True)
            return [_marked(one, given.of) if type(given) in _TYPES else one for one, given in pairs]
    return result


def _together(args: Arguments, kwargs: Keywords) -> Iterator[Arguments]:
    """What a call combines with each other: its arguments, or those at the same place of the lists that one of torch's
    _foreach_ functions gets."""
    given = (*args, *kwargs.values())
    lists = [one for one in given if type(one) in (list, tuple) and any(type(t) in _TYPES for t in one)]
    if not lists:
        yield given
        return
    others = [one for one in given if type(one) in (list, tuple) and len(one) == len(lists[0])]
    yield from zip(*others, strict=True)


def _refuse_the_whole(together: Arguments, name: str) -> None:
    """A tensor as large as the whole of a piece is not combined with it, nor is a piece that is cut otherwise. Shapes
    alone need not tell: a piece of one row would be broadcast."""
    piece = _piece_in(together)
    if piece is None:
        return
    of, held = piece.of, piece.numel()
    whole = next((t for t in together if type(t) in (Tensor, nn.Parameter) and t.numel() == of.count != held), None)
    alike: Iterator[Any] = (t for t in together if type(t) in _TYPES and t.of.count == of.count)
    other = next((t for t in alike if t.numel() != held), None)
    if whole is not None:
        what = f"a whole tensor, {list(whole.shape)}"
    elif other is not None:
        what = f"one of {other.of.name}, {list(other.shape)}, which is cut otherwise"
    else:
        return
    raise TrainingError(
        f"{name} combines a piece of {of.name}, {list(piece.shape)}, with {what}",
        where="a parameter that is stored in pieces",
        do='store both alike: lopsided.plan(..., pins=["*=I"]) stores parameters whole, and copy.deepcopy(pm) has '
        "the same pieces; or use lopsided.full_state_dict(pm) and load_full_state_dict for whole tensors",
    )


def _of_two(reduction: _Reduction, args: Arguments, kwargs: Keywords) -> bool:
    """The larger or the smaller of two tensors, element by element."""
    return reduction.dim_at == 1 and ("other" in kwargs or (len(args) > 1 and isinstance(args[1], Tensor)))


def _named(name: str) -> list[Any]:
    """A function of torch's by its name, and the method of that name."""
    path, _, last = name.rpartition(".")
    found = [getattr(getattr(torch, path) if path else torch, last, None), getattr(Tensor, name, None)]
    return [function for function in found if function is not None]


def _piece_in(args: Arguments) -> Any:
    return next((given for given in args if type(given) in _TYPES), None)


_LAYERS = {
    F.linear,
    F.embedding,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    F.layer_norm,
    F.group_norm,
    F.batch_norm,
    F.bilinear,
}
"""What modules do with their parameters, and nobody else."""

# Ways to initialise, by the sizes of what they are given.
_DRAWS = {
    Tensor.uniform_,
    Tensor.normal_,
    Tensor.bernoulli_,
    Tensor.random_,
    Tensor.exponential_,
    nn.init.uniform_,
    nn.init.normal_,
    nn.init.kaiming_uniform_,
}
_FACTORIES = {
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    Tensor.new_empty,
    Tensor.new_zeros,
}
"""What is made like a piece is not made of it: states of optimizers are plain tensors."""

_step = ["outside"]  # or "elementwise", or "any": which sort of optimizer takes its step


_plain_now: list[tuple[Any, type]] = []  # pieces that are plain tensors while an optimizer takes its step


def step_begins(elementwise: bool, parameters: Iterable[Tensor] = ()) -> None:
    """An optimizer takes its step, which is local. To one that is elementwise its parameters and their gradients are
    plain tensors until it ends: that is quicker, and `torch.compile` knows them."""
    step_ends()
    _step[0] = "elementwise" if elementwise else "any"
    for parameter in parameters if elementwise else ():
        for tensor in (parameter, plain_gradient(parameter)):
            if type(tensor) in _TYPES:
                _plain_now.append((tensor, type(tensor)))
                tensor.__class__ = nn.Parameter if type(tensor) is PieceParameter else Tensor


def step_ends() -> None:
    _step[0] = "outside"
    while _plain_now:
        tensor, kind = _plain_now.pop()
        tensor.__class__ = kind


# Reductions


@dataclass(frozen=True, slots=True)
class _Reduction:
    """`dim_at` is the position of the dims among the arguments. Without `whole` there is none over all processes."""

    dim_at: int
    whole: Callable[[Tensor, Of, str, Arguments, Keywords], Tensor] | None = None


def _reduced(reduction: _Reduction, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A reduction to one number is that of the whole; one over some dims is local where none of them is cut."""
    piece, name = args[0], func.__name__
    dims = kwargs.get("dim", args[reduction.dim_at] if len(args) > reduction.dim_at else None)
    with DisableTorchFunctionSubclass():
        if not isinstance(dims, int | list | tuple) or dims == ():
            if reduction.whole is not None and not piece.of.mixed:
                return reduction.whole(plain(piece), piece.of, name, args[1:], kwargs)
            why = "it joins pieces with whole tensors" if piece.of.mixed else "it cannot be put together from pieces"
        else:
            along = {dim % max(piece.dim(), 1) for dim in ([dims] if isinstance(dims, int) else dims)}
            if not piece.of.mixed and piece.shape == piece.of.local_shape and piece.of.cut not in along:
                return func(*args, **kwargs)
            why = f"it goes along dim {', '.join(map(str, sorted(along)))}, which is cut"
        if _step[0] != "outside" and not piece.of.mixed:
            return func(*args, **kwargs)
    raise TrainingError(
        f"{name}() would be of this process's piece of {piece.of.name} alone: {why}",
        where="a parameter that is stored in pieces",
        do="use norms and sums over all elements, lopsided.clip_grad_norm_(pm, ...), or lopsided.full_state_dict(pm) "
        'for whole tensors; or store parameters whole (pins=["*=I"])',
    )


class _Everywhere(torch.autograd.Function):
    """Numbers that are added up over all processes. Each of them goes backward from its own copy of the result."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, of: Of, what: str) -> Tensor:
        of.together(what)
        return of.communicator.all_reduce(numbers.detach().clone(), what=f"{what} of {of.name}").wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None


def _added_up(numbers: Tensor, of: Of, what: str) -> Tensor:
    """The sum over all processes, in double precision whatever they are."""
    found: Tensor = _Everywhere.apply(numbers.double().reshape(-1), of, what)  # type: ignore[no-untyped-call]
    return found.view(numbers.shape)


def _largest(numbers: Tensor, of: Of, what: str) -> Tensor:
    """The largest over all processes, in double precision. A maximum over processes may lose what is not a number: that
    travels beside it."""
    of.together(what)
    mine = numbers.detach().double().reshape(-1)
    sent = torch.cat([mine.masked_fill(mine.isnan(), -math.inf), mine.isnan().double()])
    found, is_nan = of.communicator.maximum(sent, what=f"{what} of {of.name}").wait().chunk(2)
    return found.masked_fill(is_nan > 0, math.nan).view(numbers.shape)


def _sum(local: Tensor, of: Of, name: str, args: Arguments, kwargs: Keywords) -> Tensor:
    found = getattr(local, name)(dtype=kwargs.get("dtype"))
    return _added_up(found, of, name).to(found.dtype)


def _count_nonzero(local: Tensor, of: Of, name: str, args: Arguments, kwargs: Keywords) -> Tensor:
    return _added_up(local.count_nonzero(), of, name).long()


def _mean(local: Tensor, of: Of, name: str, args: Arguments, kwargs: Keywords) -> Tensor:
    return (_added_up(local.sum(dtype=torch.float64), of, name) / of.count).to(kwargs.get("dtype") or local.dtype)


def _maximum(local: Tensor, of: Of, name: str, args: Arguments, kwargs: Keywords) -> Tensor:
    mine = local.amax() if local.numel() else torch.full((), -math.inf, device=local.device)
    return _largest(mine, of, name).to(local.dtype)


def _minimum(local: Tensor, of: Of, name: str, args: Arguments, kwargs: Keywords) -> Tensor:
    mine = local.amin() if local.numel() else torch.full((), math.inf, device=local.device)
    return -_largest(-mine.double(), of, name).to(local.dtype)


def _any(local: Tensor, of: Of, name: str, args: Arguments, kwargs: Keywords) -> Tensor:
    return _largest(local.any(), of, name).bool()


def _all(local: Tensor, of: Of, name: str, args: Arguments, kwargs: Keywords) -> Tensor:
    return ~_largest(~local.all(), of, name).bool()


def _dot(local: Tensor, of: Of, name: str, args: Arguments, kwargs: Keywords) -> Tensor:
    return _added_up(local.dot(plain(args[0])), of, name).to(local.dtype)


def _norm(local: Tensor, of: Of, name: str, args: Arguments, kwargs: Keywords) -> Tensor:
    order = kwargs.get("p", kwargs.get("ord", args[0] if args else None))
    if order not in (None, "fro") and not isinstance(order, int | float):
        raise TrainingError(
            f"there is no {order!r} norm of {of.name} from its pieces", do='use another order, or store it whole: "*=I"'
        )
    found = _norms([local], of, 2.0 if order in (None, "fro") else float(order), name, kwargs.get("dtype"))[0]
    return found.to(kwargs.get("dtype") or local.dtype)


def _norms(local: Sequence[Tensor], of: Of, order: float, name: str, dtype: torch.dtype | None) -> Tensor:
    """The norm of each whole, in double precision: one number a tensor is exchanged."""
    if math.isinf(order):
        sign = math.copysign(1.0, order)
        nothing = torch.full((), 0.0 if sign > 0 else math.inf, dtype=torch.float64, device=local[0].device)
        extremes = [(sign * one.detach().abs().double()).amax() if one.numel() else sign * nothing for one in local]
        return sign * _largest(torch.stack(extremes), of, name)
    norms = torch._foreach_norm(list(local), order, dtype=torch.float32 if local[0].dtype in _HALF else dtype)
    if order == 0:
        return _added_up(torch.stack(norms), of, name)
    # In double precision the power of a norm in single precision neither overflows nor vanishes.
    powers = _added_up(torch.stack(norms).double().pow(order), of, name)
    # The gradient of a root at zero is not finite; that of a norm is zero there.
    return powers.where(powers != 0, 1.0).pow(1 / order).where(powers != 0, powers)


_HALF = (torch.float16, torch.bfloat16)

_REDUCTIONS: dict[Any, _Reduction] = {
    function: reduction
    for names, reduction in {
        ("sum", "nansum"): _Reduction(1, _sum),
        ("mean",): _Reduction(1, _mean),
        ("max", "amax"): _Reduction(1, _maximum),
        ("min", "amin"): _Reduction(1, _minimum),
        ("any",): _Reduction(1, _any),
        ("all",): _Reduction(1, _all),
        ("count_nonzero",): _Reduction(1, _count_nonzero),
        ("dot", "vdot", "inner"): _Reduction(9, _dot),
        ("norm", "linalg.norm", "linalg.vector_norm", "linalg.matrix_norm"): _Reduction(2, _norm),
        ("std", "var", "prod", "median", "logsumexp", "argmax", "argmin", "nanmean", "nanmedian"): _Reduction(1),
        ("quantile", "renorm", "histc"): _Reduction(2),
    }.items()
    for name in names
    for function in _named(name)
}


# Lists of tensors, some of them pieces


def _foreach_norm(func: Any, args: Arguments, kwargs: Keywords) -> list[Tensor]:
    tensors = list(args[0])
    order = float(kwargs.get("ord", args[1] if len(args) > 1 else 2))
    dtype = kwargs.get("dtype", args[2] if len(args) > 2 else None)
    found = (
        list(func([plain(one) for one in tensors], order, dtype=dtype))
        if not math.isinf(order)
        else [
            torch.linalg.vector_norm(plain(one), order, dtype=dtype) if type(one) not in _TYPES else plain(one)
            for one in tensors
        ]
    )
    pieces = [k for k, one in enumerate(tensors) if type(one) in _TYPES]
    for kind in {tensors[k].dtype for k in pieces}:
        alike = [k for k in pieces if tensors[k].dtype == kind]
        wholes = _norms([plain(tensors[k]) for k in alike], tensors[alike[0]].of, order, "norm", dtype)
        for k, whole in zip(alike, wholes.to(dtype or kind).unbind(), strict=True):
            found[k] = whole
    return found


def _unscale(func: Any, args: Arguments, kwargs: Keywords) -> None:
    """`GradScaler`: what has overflowed on one process has overflowed on all."""
    grads, found_inf, scale = args
    func([plain(one) for one in grads], found_inf, scale)
    of = _piece_in(grads).of
    found_inf.copy_(_largest(found_inf, of, "GradScaler.unscale_"))


def _join(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    given = kwargs.get("tensors", args[0] if args else ())
    result = func([plain(one) for one in given], *args[1:], **{k: v for k, v in kwargs.items() if k != "tensors"})
    pieces = [one.of for one in given if type(one) in _TYPES]
    mixed = len(pieces) < len(given) or any(of.mixed for of in pieces)
    names = pieces[0].name + (f" and {len(given) - 1} more" if len(given) > 1 else "")
    return _marked(result, replace(pieces[0], name=names, count=sum(of.count for of in pieces), cut=-1, mixed=mixed))


def _address(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """safetensors asks for it to write what lies there; others, to compare addresses."""
    asking = sys._getframe(3)  # before this function, `_run` and `__torch_function__`
    if asking.f_globals.get("__name__") == "safetensors.torch":
        _tell_of_a_part(args[0].of)
    return func(*args, **kwargs)


_SPECIAL: dict[Any, Callable[[Any, Arguments, Keywords], Any]] = {
    Tensor.data_ptr: _address,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.hstack), _join),
}
