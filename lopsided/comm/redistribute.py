"""Changing the placement of a value for real: this process's part in, this process's part out.

In: a `Communicator` and the shares. Out: `Redistributor`, whose `move` is `imaginary.move` seen from one device, whose
`convert` carries gradients too, and whose `gather` and `scatter` serve several tensors with one collective.

A collective sends flat runs of elements, one run for each device. Where a shard is cut along the outermost dim the
whole tensor already lies like that, and nothing is copied (`Layout.is_flat`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lopsided.calibration.run_record import CONVERSIONS
from lopsided.cluster.collectives import Network
from lopsided.comm.communicator import Communicator, Handle
from lopsided.ir.placement import Placement, Shares, join_pieces, pieces_of, place_in_zeros, start_of, take_piece
from lopsided.ops.simulated_devices import cotangent

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A shard of a tensor of this shape, for every device."""

    placement: Placement
    shape: Shape
    pieces: tuple[int, ...]  # in units

    @cached_property
    def local_shapes(self) -> tuple[Shape, ...]:
        return tuple(self.placement.local_shape(self.shape, self.pieces, d) for d in range(len(self.pieces)))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many elements each device holds."""
        return tuple(map(math.prod, self.local_shapes))

    @cached_property
    def largest(self) -> float:
        """Devices × the largest fraction: 1 for equal pieces."""
        total = sum(self.pieces)
        return len(self.pieces) * max(self.pieces) / total if total else 1.0

    @cached_property
    def is_flat(self) -> bool:
        """The devices' pieces lie one after the other in the whole tensor."""
        return self.placement.outer == 1 and math.prod(self.shape[: self.placement.dim]) == 1

    def piece(self, whole: Tensor, device: int) -> Tensor:
        return take_piece(whole, self.placement, self.pieces, device)

    def runs(self, whole: Tensor) -> list[Tensor]:
        """What each device gets of a whole tensor, as flat runs."""
        return [self.piece(whole, d).reshape(-1) for d in range(len(self.pieces))]

    def joined(self, runs: Sequence[Tensor]) -> Tensor:
        """The whole tensor from everybody's flat run."""
        return join_pieces([run.view(s) for run, s in zip(runs, self.local_shapes, strict=True)], self.placement)

    def indices(self, device: int) -> range | list[int]:
        """Where along the dim of the cut a device's elements lie."""
        at = self.placement
        start, size = start_of(self.pieces, device) * at.unit, self.pieces[device] * at.unit
        if at.outer == 1:
            return range(start, start + size)
        block = self.shape[at.dim] // at.outer
        return [outer * block + k for outer in range(at.outer) for k in range(start, start + size)]


class Redistributor:
    """Conversions between the devices of a plan. `shares` are in the order of the wire's ranks."""

    def __init__(self, wire: Communicator, shares: Shares, network: Network) -> None:
        self.wire, self.shares, self.network = wire, shares, network
        self.rank, self.size = wire.rank, wire.size
        self._layouts: dict[tuple[Placement, Shape], Layout] = {}
        self._ways: dict[tuple[str, int, float], str] = {}

    def layout(self, placement: Placement, shape: Sequence[int]) -> Layout:
        key = (placement, tuple(shape))
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = Layout(*key, pieces_of(placement, key[1], self.shares))
        return found

    def way(self, collective: str, whole_bytes: int, largest: float) -> str:
        """The implementation the plan's prices choose."""
        key = (collective, whole_bytes, largest)
        if key not in self._ways:
            self._ways[key] = self.network.best(*key).implementation
        return self._ways[key]

    # One value

    def move(self, part: Tensor, source: Placement, to: Placement, shape: Sequence[int], what: str = "") -> Tensor:
        """Change the placement of a value; no gradient."""
        if source == to or (source.is_whole and to.is_whole):
            return part
        if self.wire.recorder is None:
            return self._moved(part, source, to, shape, what)
        with self.wire.recorder.during(CONVERSIONS):
            return self._moved(part, source, to, shape, what)

    def _moved(self, part: Tensor, source: Placement, to: Placement, shape: Sequence[int], what: str) -> Tensor:
        if to.kind == "P":
            if source.is_whole:
                return part if self.rank == 0 else torch.zeros_like(part)
            return place_in_zeros(part, source, shape, self.layout(source, shape).pieces, self.rank)
        if source.is_whole:
            return self.layout(to, shape).piece(part, self.rank)
        if source.kind == "P":
            return self._sum(part, what) if to.is_whole else self._scatter(part, self.layout(to, shape), what)
        if to.is_whole:
            return self._gather(part, self.layout(source, shape), what)
        return self._reshard(part, self.layout(source, shape), self.layout(to, shape), what)

    def _sum(self, part: Tensor, what: str) -> Tensor:
        # In place on a copy: the term itself may be needed elsewhere.
        total = part.clone(memory_format=torch.contiguous_format)
        self.wire.all_reduce(total.view(-1), what=what).wait()
        return total

    def _gather(self, part: Tensor, layout: Layout, what: str) -> Tensor:
        way = self.way("all_gather", _bytes(layout.shape, part), layout.largest)
        flat = self.wire.all_gather(_flat(part), layout.counts, what=what, way=way).wait()
        return flat.view(layout.shape) if layout.is_flat else layout.joined(flat.split(layout.counts))

    def _scatter(self, part: Tensor, layout: Layout, what: str) -> Tensor:
        way = self.way("reduce_scatter", _bytes(layout.shape, part), layout.largest)
        flat = _flat(part) if layout.is_flat else torch.cat(layout.runs(part))
        handle = self.wire.reduce_scatter(flat, layout.counts, what=what, way=way)
        return handle.wait().view(layout.local_shapes[self.rank])

    def _reshard(self, part: Tensor, source: Layout, to: Layout, what: str) -> Tensor:
        largest = max(source.largest, to.largest)
        if self.way("all_to_all", _bytes(source.shape, part), largest) == "gather":
            return to.piece(self._gather(part, source, what), self.rank)
        if source.placement.dim == to.placement.dim:
            return self._recut(part, source, to, what)
        given = [take_piece(part, to.placement, to.pieces, d).reshape(-1) for d in range(self.size)]
        shapes = []
        for shape in source.local_shapes:
            local = list(shape)
            local[to.placement.dim] = to.local_shapes[self.rank][to.placement.dim]
            shapes.append(tuple(local))
        taken = self._all_to_all(given, [math.prod(shape) for shape in shapes], what)
        parts = [run.view(shape) for run, shape in zip(taken, shapes, strict=True)]
        return join_pieces(parts, source.placement)

    def _recut(self, part: Tensor, source: Layout, to: Layout, what: str) -> Tensor:
        """From one cut of a dim to another cut of the same dim: everybody sends what the others now hold."""
        dim, row = source.placement.dim, math.prod(source.shape) // max(source.shape[source.placement.dim], 1)
        mine, wanted = source.indices(self.rank), to.indices(self.rank)
        place = {index: k for k, index in enumerate(mine)}
        given = []
        for d in range(self.size):
            rows = [place[index] for index in to.indices(d) if index in place]
            given.append(part.index_select(dim, torch.tensor(rows, dtype=torch.long, device=part.device)).reshape(-1))
        into = {index: k for k, index in enumerate(wanted)}
        rows_from = [[into[index] for index in source.indices(d) if index in into] for d in range(self.size)]
        taken = self._all_to_all(given, [len(rows) * row for rows in rows_from], what)
        made = part.new_empty(to.local_shapes[self.rank])
        for run, rows in zip(taken, rows_from, strict=True):
            shape = list(made.shape)
            shape[dim] = len(rows)
            made.index_copy_(dim, torch.tensor(rows, dtype=torch.long, device=part.device), run.view(shape))
        return made

    def _all_to_all(self, given: Sequence[Tensor], take: list[int], what: str) -> tuple[Tensor, ...]:
        give = [run.numel() for run in given]
        taken: tuple[Tensor, ...] = (
            self.wire.all_to_all(torch.cat(list(given)), give, take, what=what).wait().split(take)
        )
        return taken

    # With gradients

    def convert(self, part: Tensor, source: Placement, to: Placement, shape: Shape, what: str = "") -> Tensor:
        """Change the placement of a value, forward and backward."""
        if source == to:
            return part
        if not (part.requires_grad and torch.is_grad_enabled()):
            return self.move(part, source, to, shape, what)
        made: Tensor = _Convert.apply(self, source, to, shape, what, part)  # type: ignore[no-untyped-call]
        return made

    # Several values at once

    def start_gather(self, parts: Sequence[Tensor], layouts: Sequence[Layout], what: str) -> Gathering:
        """Gather several pieces (of one dtype) with one collective."""
        whole_bytes = sum(_bytes(layout.shape, parts[0]) for layout in layouts)
        skewed = sum(_bytes(layout.shape, parts[0]) * layout.largest for layout in layouts)
        way = self.way("all_gather", whole_bytes, skewed / whole_bytes if whole_bytes else 1.0)
        flat = _flat(parts[0]) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        counts = [sum(layout.counts[d] for layout in layouts) for d in range(self.size)]
        return Gathering(self.wire.all_gather(flat, counts, what=what, way=way), counts, layouts)

    def start_scatter(self, wholes: Sequence[Tensor], layouts: Sequence[Layout], what: str) -> Handle:
        """Add up several whole tensors (of one dtype) over the devices, everybody keeping flat runs of its pieces."""
        whole_bytes = sum(whole.nbytes for whole in wholes)
        skewed = sum(w.nbytes * layout.largest for w, layout in zip(wholes, layouts, strict=True))
        way = self.way("reduce_scatter", whole_bytes, skewed / whole_bytes if whole_bytes else 1.0)
        counts = [sum(layout.counts[d] for layout in layouts) for d in range(self.size)]
        if len(wholes) == 1 and layouts[0].is_flat:
            # Alone in the world the result is the tensor itself, which may belong to others too.
            flat = _flat(wholes[0]).clone() if self.size == 1 else _flat(wholes[0])
        else:
            runs = [layout.runs(whole) for whole, layout in zip(wholes, layouts, strict=True)]
            flat = torch.cat([of_tensor[d] for d in range(self.size) for of_tensor in runs])
        return self.wire.reduce_scatter(flat, counts, what=what, way=way)


@dataclass(frozen=True, slots=True)
class Gathering:
    """Several tensors on their way."""

    handle: Handle
    counts: Sequence[int]  # of elements, from each device
    layouts: Sequence[Layout]

    def wait(self) -> list[Tensor]:
        flat = self.handle.wait()
        if len(self.layouts) == 1 and self.layouts[0].is_flat:
            return [flat.view(self.layouts[0].shape)]
        from_each = [
            run.split([layout.counts[d] for layout in self.layouts]) for d, run in enumerate(flat.split(self.counts))
        ]
        return [layout.joined([runs[k] for runs in from_each]) for k, layout in enumerate(self.layouts)]


def _flat(tensor: Tensor) -> Tensor:
    """All elements in a row. A vector with gaps is one to `reshape` already."""
    return tensor.reshape(-1).contiguous()


def _bytes(shape: Sequence[int], like: Tensor) -> int:
    return math.prod(shape) * like.element_size()


class _Convert(torch.autograd.Function):
    """A conversion; backward is its transpose."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Redistributor, source: Placement, to: Placement, shape: Shape, what: str, part: Tensor
    ) -> Tensor:
        ctx.way = (exchange, source, to, shape, what)
        return exchange.move(part, source, to, shape, what)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        exchange, source, to, shape, what = ctx.way
        back = exchange.move(gradient, cotangent(to), cotangent(source), shape, f"gradient of {what}")
        return None, None, None, None, None, back
