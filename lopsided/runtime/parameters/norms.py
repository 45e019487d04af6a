"""The norm of the whole model's gradient, of which every process holds pieces.

In: the parallel model after its backward pass. Out: the norm that one device would see, and gradients scaled by it.

A norm of order p adds up: |g|^p = Σ over pieces |piece|^p. Every element is counted once: pieces by who holds them, a
parameter that all hold whole by one process, a tied parameter under its first name. One number is exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lopsided.comm.communicator import Communicator
from lopsided.comm.world import waiting
from lopsided.errors import InputError, TrainingError
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parameters.piece_tensors import plain_gradient

_HALF = (torch.float16, torch.bfloat16)


def clip_grad_norm_(
    pm: Parallel, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; returns the norm they had.

    The same as `torch.nn.utils.clip_grad_norm_` of the model on one device, on every process. All must call it.
    """
    norm = grad_norm(pm, norm_type, call="clip_grad_norm_")
    if error_if_nonfinite and not math.isfinite(norm.item()):
        here = [name for name, grad in _gradients(pm) if not grad.isfinite().all()]
        raise TrainingError(
            f"the norm of the gradient is {norm.item()}",
            where=f"on this process: {', '.join(here[:8])}{', ...' if len(here) > 8 else ''}" if here else "",
            do="look for a learning rate that is too high or an input that is not finite, or skip this step",
        )
    # Multiplied also where nothing changes: asking would wait for the device.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grads in _by_dtype([grad for _, grad in _gradients(pm)]).values():
        torch._foreach_mul_(grads, factor)
    return norm


@torch.no_grad()
def grad_norm(pm: Parallel, norm_type: float = 2.0, *, call: str = "grad_norm") -> Tensor:
    """The norm of the whole model's gradient, on every process. All must call it."""
    order, world = float(norm_type), pm.world
    if order == 0 or math.isnan(order):
        raise InputError(
            f"there is no norm of order {order:g} over several parameters",
            where=f"norm_type={norm_type}",
            do="use 2, 1, inf or another order",
        )
    pm.together(call)
    total = torch.zeros(1, dtype=torch.float64, device=world.device)
    if pm.communicator is not None:
        norms = _norms(_counted_here(pm), order, world.device)
        total = (
            _extreme(norms, order, pm.communicator) if math.isinf(order) else _power_sum(norms, order, pm.communicator)
        )
    if len(world.ranks) < world.size:
        with waiting(call):
            dist.broadcast(total, world.ranks[0])
    exact = any(piece.dtype == torch.float64 for piece in pm.pieces.values())
    return total[0].to(torch.float64 if exact else torch.float32)


def _gradients(pm: Parallel) -> Iterator[tuple[str, Tensor]]:
    """The gradients that this process holds: norms are of these, and added up once for all."""
    for name, parameter in pm.named_parameters():
        gradient = plain_gradient(parameter)
        if gradient is not None and gradient.numel():
            yield name, gradient


def _counted_here(pm: Parallel) -> list[Tensor]:
    """The gradients this process counts. Those that all hold are dealt out, so that no process does it all."""
    place, devices = pm.world.place, len(pm.world.ranks)
    turns = {name: turn for turn, name in enumerate(pm.pieces)}
    return [grad for name, grad in _gradients(pm) if pm.pieces[name].is_cut or turns[name] % devices == place]


def _by_dtype(grads: Sequence[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Lists of one dtype each, which is what the fast kernels want."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        found.setdefault(grad.dtype, []).append(grad)
    return found


def _norms(grads: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """The norm of each, in double precision."""
    norms: list[Tensor] = []
    for dtype, alike in _by_dtype(grads).items():
        norms += torch._foreach_norm(alike, order, dtype=torch.float32 if dtype in _HALF else None)
    return torch.stack(norms).double() if norms else torch.zeros(0, dtype=torch.float64, device=device)


def _power_sum(norms: Tensor, order: float, communicator: Communicator) -> Tensor:
    # In double precision the power of a norm in single precision neither overflows nor vanishes.
    powers = norms.pow(order).sum().reshape(1)
    return communicator.all_reduce(powers, what="the norm of the gradient").wait().pow(1 / order)


def _extreme(norms: Tensor, order: float, communicator: Communicator) -> Tensor:
    """The largest element, or the smallest for an order of -inf."""
    sign = 1.0 if order > 0 else -1.0
    largest = torch.finfo(torch.float64).max
    nothing = torch.full((1,), 0.0 if order > 0 else -math.inf, dtype=torch.float64, device=norms.device)
    # A maximum over processes may lose what is not a number, so that travels as infinity, and infinity as the largest.
    mine = torch.cat([nothing, sign * norms]).amax().reshape(1)
    sent = mine.clamp(max=largest).where(~mine.isnan(), math.inf)
    found = communicator.maximum(sent, what="the norm of the gradient").wait()
    found = found.where(found < largest, math.inf).where(found != math.inf, math.nan)
    return sign * found
