"""Every rank starts from rank 0's values, as data-parallel trainers do.

In: a model that every rank has built for itself, perhaps from another seed. Out: its parameters and buffers, in place,
are those of rank 0. Digests are compared first (8 bytes a tensor), and only what differs is sent, in chunks. What is on
`meta` has no values yet, and is drawn the same everywhere (`initial`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lopsided.comm.world import World, group_to_talk, odd_ones, waiting
from lopsided.errors import WorldError
from lopsided.runtime.parameters.replicas import digest

_CHUNK_BYTES = 2**24


@torch.no_grad()
def take_first_values(model: nn.Module, world: World) -> tuple[str, ...]:
    """Give every rank rank 0's values; the names of tensors that differed. All ranks call it."""
    held = dict(_tensors(model))
    if world.size == 1 or not held:
        return ()
    mine = torch.stack([_said(tensor) for tensor in held.values()])
    group = group_to_talk()
    _check_outline(held, world, group)
    heard = [torch.empty_like(mine) for _ in range(world.size)]
    with waiting("digests of the first values"):
        dist.all_gather(heard, mine, group=group)
    differs = torch.stack(heard).ne(heard[0]).any(0).tolist()
    names = tuple(name for name, is_other in zip(held, differs, strict=True) if is_other)
    for name in names:
        for part in _parts(held[name].data):
            sent = part.to("cpu", copy=True, memory_format=torch.contiguous_format)
            # As bytes, since gloo does not know every dtype.
            with waiting("rank 0's first values"):
                dist.broadcast(sent.view(-1).view(torch.uint8), 0, group=group)
            if world.rank != 0:
                part.copy_(sent)
    return names


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _said(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64) if tensor.is_meta else digest(tensor).cpu()


def _check_outline(held: dict[str, Tensor], world: World, group: dist.ProcessGroup) -> None:
    """Ranks that have other tensors than others would wait for each other, or start from two sets of values."""
    on_meta = sum(tensor.is_meta for tensor in held.values())
    facts = {
        "the number of tensors": str(len(held)),
        "the number of those on meta": str(on_meta),
        "their bytes": str(sum(tensor.nbytes for tensor in held.values())),
    }
    told = [facts] * world.size
    with waiting("the outlines of the models"):
        dist.all_gather_object(told, facts, group=group)
    if found := odd_ones(dict(enumerate(told))):
        raise WorldError(
            f"models are not built alike: {found}",
            where=f"rank {world.rank}",
            do="build the same model on every rank, on a real device everywhere or on meta everywhere; "
            "load_full_state_dict(pm, state) then gives it the values that rank 0 has",
        )


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Views of at most a chunk, or of one row."""
    if not tensor.numel():
        return
    rows = tensor.view(-1) if tensor.is_contiguous() else tensor
    yield from rows.split(max(_CHUNK_BYTES * len(rows) // tensor.nbytes, 1)) if rows.dim() else (rows,)
