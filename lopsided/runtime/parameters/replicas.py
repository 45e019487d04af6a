"""Replicas that should be equal: compared by digest, reported, repaired.

In: a parallel module. Out: `Drift`s. What a plan stores whole on every device is updated on every device, and unlike
devices round differently, so copies can drift apart in the last bits. A digest of each is compared (8 bytes a tensor);
only what differs is sent.

    digest of a tensor   its bytes as 64-bit words w, in chunks of at most 2**18
    of a chunk           sum over k of mix(mix(w_k) · r_k), r_k odd and different for every place k
    of chunks            d ← d · ODD + digest of the chunk

All arithmetic is on integers modulo 2**64, so that neither the device nor the order of the sum matters.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lopsided.comm.communicator import Communicator
from lopsided.comm.world import odd_ones, these
from lopsided.errors import WorldError
from lopsided.runtime.parameters.coded_state import Coded

if TYPE_CHECKING:
    from lopsided.runtime.parallel import Parallel

_CHUNK_BYTES = 8 * 2**18
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio's bits
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9, of splitmix64


@dataclass(frozen=True, slots=True)
class Drift:
    """A tensor that is not equal everywhere: on which ranks of the world it differs from the first's, by how much."""

    name: str
    ranks: tuple[int, ...]
    largest: float

    def __str__(self) -> str:
        return f"{self.name} on {these(self.ranks)} by up to {self.largest:.3g}"


class DriftWarning(UserWarning):
    """Replicas were not equal."""


# Digests


def digest(tensor: Tensor) -> Tensor:
    """One int64, on the tensor's device, that is equal for equal bits in the same places."""
    found = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    for chunk in _chunks(tensor.detach()):
        words = _words(chunk)
        mixed = (words >> 32).bitwise_xor_(words).mul_(_weights(words.device)[: len(words)])
        found = found * _ODD + mixed.bitwise_xor_(mixed >> 32).sum()
    return found


def some_of(tensor: Tensor) -> Tensor:
    """At most a thousand elements, evenly spread: what a glance at a batch costs does not grow with it."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(flat.numel() // 1000, 1)]


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Flat and contiguous parts, which are copies only where the tensor is not contiguous."""
    if torch.is_complex(tensor):
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(_CHUNK_BYTES // tensor.element_size())
        return
    # The same chunks, some rows at a time: a digest does not depend on how a tensor lies in memory.
    full = _CHUNK_BYTES // tensor.element_size()
    held: list[Tensor] = []
    size = 0
    for rows in tensor.split(max(full * len(tensor) // tensor.numel(), 1)) if tensor.numel() else ():
        rest = rows.reshape(-1)
        while size + len(rest) >= full:
            yield torch.cat([*held, rest[: full - size]])
            rest, held, size = rest[full - size :], [], 0
        held.append(rest)
        size += len(rest)
    if size:
        yield torch.cat(held)


def _words(chunk: Tensor) -> Tensor:
    """The bytes as int64, filled up with zeros; a copy where they do not begin at a multiple of 8."""
    data = chunk.view(torch.uint8)
    if rest := -len(data) % 8:
        data = torch.nn.functional.pad(data, (0, rest))
    elif data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


@cache
def _weights(device: torch.device) -> Tensor:
    """An odd number for each place in a chunk."""
    places = torch.arange(1, _CHUNK_BYTES // 8 + 1, device=device) * _ODD
    places = (places >> 31).bitwise_xor_(places).mul_(_MIX)
    return (places >> 29).bitwise_xor_(places).bitwise_or_(1)


# Comparing and repairing


def compare_replicas(pm: Parallel, optimizer: torch.optim.Optimizer | None = None) -> tuple[Drift, ...]:
    """What differs among parameters that every device holds whole, their optimizer's state, and buffers.

    All ranks call it, and get the same answer; a bystander, which holds nothing, gets none.
    """
    communicator = pm.communicator
    if communicator is None or communicator.size == 1:
        return ()
    held = _replicas(pm, optimizer)
    _check_names(pm, communicator, list(held))
    device = pm.world.device
    if not held:
        return ()
    mine = torch.stack([digest(tensor).to(device) for tensor in held.values()])
    told = (
        communicator.all_gather(mine, [len(mine)] * communicator.size, what="digests of replicas")
        .wait()
        .view(communicator.size, -1)
    )
    # One transfer from the device, not one for each tensor.
    rows = told.eq(told[0]).logical_not_().t().tolist()
    drifts = []
    for (name, tensor), row in zip(held.items(), rows, strict=True):
        if any(row):
            ranks = tuple(pm.world.ranks[k] for k, differs in enumerate(row) if differs)
            drifts.append(Drift(name, ranks, _largest_difference(tensor, name, communicator, device)))
    return tuple(drifts)


def repair(pm: Parallel, drifts: Sequence[Drift], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Give every rank what the first one has, in place. All ranks call it, with the same drifts."""
    communicator = pm.communicator
    if communicator is None or not drifts:
        return
    held = _replicas(pm, optimizer)
    for drift in drifts:
        for part, first in _beside_the_first(held[drift.name], drift.name, communicator, pm.world.device):
            part.copy_(first)


def check(pm: Parallel, optimizer: torch.optim.Optimizer | None = None, *, mend: bool = True) -> tuple[Drift, ...]:
    """Compare; if something differs, warn (on the first rank) and repair it."""
    drifts = compare_replicas(pm, optimizer)
    if drifts:
        if pm.world.place == 0:
            warnings.warn(_told(drifts, mend, pm.world.ranks[0]), DriftWarning, stacklevel=2)
        if mend:
            repair(pm, drifts, optimizer)
    return drifts


def _told(drifts: Sequence[Drift], mend: bool, first: int) -> str:
    worst = sorted(drifts, key=lambda drift: -drift.largest)[:5]
    more = f", and {len(drifts) - 5} more" if len(drifts) > 5 else ""
    done = f"repaired from rank {first}" if mend else "not repaired"
    return f"{len(drifts)} replicas had drifted apart, {done}: {', '.join(map(str, worst))}{more}"


def _replicas(pm: Parallel, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """What should be equal everywhere, by name, in an order that is the same on every rank.

    As `.data`: a repair between the forward and the backward pass must not look like a change of what was saved.
    """
    parameters = dict(pm.named_parameters(remove_duplicate=False))
    whole = {name: parameters[name] for name, piece in pm.pieces.items() if piece.placement.kind == "I"}
    held = {name: parameter.data for name, parameter in whole.items()}
    held |= {name: buffer.data for name, buffer in pm.named_buffers()}
    if optimizer is not None:
        for name, parameter in whole.items():
            state = optimizer.state.get(parameter, {})
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for key in sorted(tensors):
                held |= {f"{name} ({what}{key})": part for what, part in _kept_as(tensors[key]).items()}
    return held


def _kept_as(state: Tensor) -> dict[str, Tensor]:
    """The tensors that hold it: what is kept in few bits is a tensor by its looks alone."""
    if isinstance(state, Coded):
        return {"codes of ": state.codes, "scales of ": state.scales}
    if is_traceable_wrapper_subclass(state):
        return {f"{name} of ": getattr(state, name) for name in state.__tensor_flatten__()[0]}
    return {"": state.data}


def _check_names(pm: Parallel, communicator: Communicator, names: Sequence[str]) -> None:
    """Ranks that have other tensors than others cannot be compared, and would wait for each other."""
    said = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7], "big")
    mine = torch.tensor([said, len(names)], device=pm.world.device)
    told = (
        communicator.all_gather(mine, [2] * communicator.size, what="names of replicas")
        .wait()
        .view(communicator.size, 2)
        .tolist()
    )
    heard = {
        rank: {"the number of tensors": str(count), "the digest of their names": f"{name:014x}"}
        for rank, (name, count) in zip(pm.world.ranks, told, strict=True)
    }
    if found := odd_ones(heard):
        raise WorldError(
            f"replicas cannot be compared: {found}",
            where=f"rank {pm.world.rank}",
            do="update the same parameters with the same optimizer on every rank",
        )


def _beside_the_first(
    tensor: Tensor, name: str, communicator: Communicator, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a tensor, each with what the first rank has there. Moved as bytes: every dtype, and bit by bit."""
    rows = tensor.view(-1) if tensor.is_contiguous() else tensor
    for part in rows.split(max(_CHUNK_BYTES * len(rows) // max(tensor.nbytes, 1), 1)):
        # Some state of optimizers stays on the CPU, where NCCL cannot fetch it.
        first = part.to(device, copy=True, memory_format=torch.contiguous_format).view(-1)
        communicator.broadcast(first.view(torch.uint8), 0, what=f"{name} of the first rank").wait()
        yield part, first.view(part.shape)


def _largest_difference(tensor: Tensor, name: str, communicator: Communicator, device: torch.device) -> float:
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    largest = torch.zeros(1, dtype=torch.float64, device=device)
    for part, first in _beside_the_first(tensor, name, communicator, device):
        mine = part.to(device)
        difference = (mine.to(kind) - first.to(kind)).abs()
        # No number against a number is as different as can be; two that are none are not.
        difference[mine.isnan() != first.isnan()] = float("inf")
        largest = torch.maximum(largest, difference.nan_to_num(nan=0.0, posinf=float("inf")).max())
    return float(communicator.maximum(largest, what=f"drift of {name}").wait().item())
