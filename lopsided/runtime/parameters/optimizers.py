"""Is an optimizer right on pieces? One that treats every element on its own is; others are found by experiment.

In: optimizers, as they take their first step. Out: a warning where one that looks at whole parameters (LAMB's norms,
Adafactor's factors, Muon's orthogonal updates) holds parameters that are stored cut.

The experiment: a small parameter is trained whole, and in two unequal pieces by two optimizers, with the same
gradients. If the pieces joined are the whole, the optimizer is elementwise.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lopsided.runtime.parameters.adoption import adopt_parameters
from lopsided.runtime.parameters.host_state import (
    closure_is_done,
    end_failed_steps,
    is_under_way,
    step_in_slices,
    watch_steps,
)
from lopsided.runtime.parameters.piece_tensors import step_begins, step_ends
from lopsided.runtime.parameters.pieces import Piece

if TYPE_CHECKING:
    from lopsided.runtime.parallel import Parallel

_TOLERANCE = 1e-6
_SCALES = (1.0, 30.0, 0.03, 1.0)
"""Of the gradients in the experiment, one a step: what is clipped or adapted shows at some of them."""

_TRIAL = {"lr": 0.05, "capturable": False, "fused": False, "differentiable": False}
"""Options that the experiment sets itself: a step large enough to see (a warm-up may start at 0), and no GPU needed."""


class NotElementwiseWarning(UserWarning):
    """An optimizer that looks at whole parameters holds some that are stored in pieces."""


# The watch

_models: weakref.WeakSet[Parallel] = weakref.WeakSet()
_holds: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[Parallel]] = weakref.WeakKeyDictionary()
_elementwise: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that hold pieces and are
_watching = False


def watch_optimizers(pm: Parallel) -> None:
    """From now on every optimizer is checked at its first step with parameters of this model, which is told of each
    step."""
    global _watching
    _models.add(pm)
    if not _watching:
        register_optimizer_step_pre_hook(_check)
        register_optimizer_step_post_hook(_tell)
        _watching = True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if is_under_way(optimizer):
        return None
    if optimizer not in _holds:
        adopt_parameters(optimizer)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = [pm for pm in _models if not held.isdisjoint(id(p) for _, p in pm.named_parameters())]
        if not found:
            return None
        _holds[optimizer] = weakref.WeakSet(found)
        for pm in found:
            own = dict(pm.named_parameters())
            _check_with(optimizer, pm, {id(own[name]): name for name in own if _is_in_pieces(pm.pieces.get(name))})
    watch_steps(optimizer, is_sliceable=lambda: is_sliceable(optimizer))
    if not any(map(callable, (*args, *kwargs.values()))):
        _begin(optimizer)
        return None
    _begin_own(optimizer)
    return tuple(_outside(optimizer, arg) for arg in args), {k: _outside(optimizer, v) for k, v in kwargs.items()}


def _begin(optimizer: Optimizer) -> None:
    """Gradients are complete, and what follows is the optimizer's own."""
    for pm in _holds[optimizer]:
        pm.before_step(optimizer)
    _begin_own(optimizer)


def _begin_own(optimizer: Optimizer) -> None:
    step_begins(optimizer in _elementwise, (p for group in optimizer.param_groups for p in group["params"]))


def _outside(optimizer: Optimizer, given: Any) -> Any:
    """A closure is the script's, in the midst of a step: norms that it takes are of the whole, and gradients are
    complete when it returns."""
    if not callable(given):
        return given

    def closure(*args: Any, **kwargs: Any) -> Any:
        step_ends()
        end_failed_steps()  # or one whose closure is called again
        found = given(*args, **kwargs)
        _begin(optimizer)
        closure_is_done(optimizer)
        return found

    return closure


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tell(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_under_way(optimizer):
        return
    step_ends()
    for pm in _holds.get(optimizer, ()):
        pm.after_step(optimizer)


def settings_of(optimizers: Iterable[Optimizer]) -> str:
    """What ranks must have set alike: learning rates and all other numbers of every group."""
    return "; ".join(
        f"{type(optimizer).__name__} "
        + ", ".join(" ".join(f"{key}={group[key]}" for key in group if _is_number(group[key])) for group in groups)
        for optimizer in optimizers
        for groups in (optimizer.param_groups,)
    )


def _is_number(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    # To look at a tensor on a GPU would wait for it.
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain or (isinstance(value, Tensor) and value.is_cpu and value.dim() == 0)


def _is_in_pieces(piece: Piece | None) -> bool:
    """A cut that leaves everything to one device is none."""
    return piece is not None and piece.is_cut and max(piece.counts) < sum(piece.counts)


def _check_with(optimizer: Optimizer, pm: Parallel, cut: Mapping[int, str]) -> None:
    groups = [group for group in optimizer.param_groups if any(id(p) in cut for p in group["params"])]
    if not groups:
        return
    # Every process makes the experiment, for an optimizer may talk to the others in its step. One tells.
    verdict = _verdict(optimizer, groups)
    if verdict:
        _elementwise.add(optimizer)
    if verdict or pm.world.place != 0:
        return
    names = [cut[id(p)] for group in groups for p in group["params"] if id(p) in cut]
    stored = f"{len(names)} of its parameters are stored in pieces ({', '.join(names[:3])}"
    stored += ", ...)" if len(names) > 3 else ")"
    kind = type(optimizer).__name__
    if verdict is None:
        said = f"{kind} could not be tried on pieces, and {stored}. If it looks at whole parameters, for norms or "
        said += "factors, training will differ from one device; then "
    else:
        said = f"{kind} is not elementwise: what it does to one element depends on others of the same parameter (norms "
        said += f"or factors over the whole), and {stored}. Training will differ from one device. To be the same, "
    said += 'store them whole (`lopsided plan --pin "*=I"`, or lopsided.plan(..., pins=["*=I"])) '
    said += "or use an elementwise optimizer, such as AdamW"
    warnings.warn(said, NotElementwiseWarning, stacklevel=4)


# The experiment

_verdicts: dict[tuple[type[Optimizer], str], bool | None] = {}


def is_elementwise(optimizer: Optimizer) -> bool | None:
    """Whether it treats every element on its own, with the options it has. None where that cannot be tried."""
    return _verdict(optimizer, optimizer.param_groups)


def _verdict(optimizer: Optimizer, groups: Iterable[Mapping[str, Any]]) -> bool | None:
    found = []
    for group in groups:
        options = {name: value for name, value in group.items() if name != "params"}
        key = (type(optimizer), repr(sorted({**optimizer.defaults, **options, **_TRIAL}.items(), key=lambda o: o[0])))
        if key not in _verdicts:
            _verdicts[key] = _tried(type(optimizer), dict(optimizer.defaults), options)
        found.append(_verdicts[key])
    return _all_of(found)


def _all_of(verdicts: Sequence[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True


def _tried(kind: type[Optimizer], defaults: dict[str, Any], options: dict[str, Any]) -> bool | None:
    draw = torch.Generator("cpu").manual_seed(0)
    found = []
    for shape, dims in (((7, 5), (0, 1)), ((7,), (0,))):
        start = torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu")
        slopes = torch.logspace(-1, 1, 7, dtype=torch.float64, device="cpu").reshape(-1, *[1] * (len(shape) - 1))
        gradients = [scale * slopes * torch.randn(shape, generator=draw, dtype=torch.float64) for scale in _SCALES]
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
                warnings.simplefilter("ignore")
                whole = _trained(kind, defaults, options, start, gradients)
                joined = [_trained_in_pieces(kind, defaults, options, start, gradients, dim) for dim in dims]
        except Exception:  # whatever an optimizer of a stranger may raise: some take only matrices, or need a closure
            continue
        if whole.isfinite().all():
            found.append(all(torch.allclose(one, whole, rtol=_TOLERANCE, atol=_TOLERANCE) for one in joined))
    return _all_of(found)


def _trained_in_pieces(
    kind: type[Optimizer],
    defaults: dict[str, Any],
    options: dict[str, Any],
    start: Tensor,
    gradients: Sequence[Tensor],
    dim: int,
) -> Tensor:
    def cut(whole: Tensor) -> tuple[Tensor, ...]:
        return whole.narrow(dim, 0, 2), whole.narrow(dim, 2, whole.shape[dim] - 2)

    parts = zip(cut(start), zip(*map(cut, gradients), strict=True), strict=True)
    return torch.cat([_trained(kind, defaults, options, part, steps) for part, steps in parts], dim)


def _trained(
    kind: type[Optimizer], defaults: dict[str, Any], options: dict[str, Any], start: Tensor, gradients: Sequence[Tensor]
) -> Tensor:
    parameter = nn.Parameter(start.clone())
    optimizer = _made(kind, defaults, options, [parameter])
    for gradient in gradients:

        def closure(gradient: Tensor = gradient) -> Tensor:
            parameter.grad = gradient.clone()
            return (parameter.detach() * gradient).sum()

        closure()
        try:
            optimizer.step()
        except TypeError:  # some must have a closure
            optimizer.step(closure)  # type: ignore[arg-type]
    return parameter.detach()


def _made(
    kind: type[Optimizer], defaults: dict[str, Any], options: dict[str, Any], parameters: Sequence[nn.Parameter]
) -> Optimizer:
    torch.default_generator.manual_seed(0)
    takes = inspect.signature(kind).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    defaults, options = (
        {n: _TRIAL.get(n, v) if v is not None else v for n, v in d.items()} for d in (defaults, options)
    )
    # Some optimizers keep among their defaults what their constructor does not take.
    given = {name: value for name, value in defaults.items() if anything or name in takes}
    return kind([{"params": [*parameters], **options}], **given)


def is_sliceable(optimizer: Optimizer) -> bool:
    """Whether it may update some parameters after the others, with the options it has: tried, as `is_elementwise` is.

    One that looks at all of them together, or counts steps where nobody knows of it, may not.
    """
    kind, defaults = type(optimizer), dict(optimizer.defaults)
    options = {
        name: value for name, value in optimizer.param_groups[0].items() if name not in ("params", "param_names")
    }
    draw = torch.Generator("cpu").manual_seed(0)
    start = [torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu") for shape in ((4, 6), (5, 3))]
    gradients = [
        [scale * torch.randn(p.shape, generator=draw, dtype=torch.float64) for p in start] for scale in _SCALES
    ]

    def trained(*, sliced: bool) -> list[Tensor]:
        parameters = [nn.Parameter(values.clone()) for values in start]
        made = _made(kind, defaults, options, parameters)
        for given in gradients:
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient.clone()
            if sliced:
                step_in_slices(made, [[parameter] for parameter in parameters])
            else:
                made.step()
        return [parameter.detach() for parameter in parameters]

    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            warnings.simplefilter("ignore")
            return all(map(torch.equal, trained(sliced=True), trained(sliced=False)))
    except Exception:  # whatever an optimizer of a stranger may raise
        return False
