"""Changing the placement of a value for real: this process's part in, this process's part out.

In: a `Communicator` and the shares. Out: `Redistributor`, whose `move` is `simulated_devices.move` seen from one
device, whose `convert` carries gradients too, and whose `gather` and `scatter` serve several tensors with one
collective.

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
from lopsided.comm.communicator import Communicator, Handle, What
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
    """Conversions between the devices of a plan. `shares` are in the order of the communicator's ranks."""

    def __init__(self, communicator: Communicator, shares: Shares, network: Network) -> None:
        self.communicator, self.shares, self.network = communicator, shares, network
        self.rank, self.size = communicator.rank, communicator.size
        self._layouts: dict[tuple[Placement, Shape], Layout] = {}
        self._ways: dict[tuple[str, int, float], str] = {}
        self._reshards: dict[tuple[Layout, Layout, torch.device], _Reshard] = {}

    def layout(self, placement: Placement, shape: Sequence[int]) -> Layout:
        key = (placement, tuple(shape))
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = Layout(*key, pieces_of(placement, key[1], self.shares))
        return found

    def algorithm(self, collective: str, whole_bytes: int, largest: float) -> str:
        """The implementation the plan's prices choose."""
        key = (collective, whole_bytes, largest)
        if key not in self._ways:
            self._ways[key] = self.network.best(*key).implementation
        return self._ways[key]

    # One value

    def move(self, part: Tensor, source: Placement, to: Placement, shape: Sequence[int], what: What = "") -> Tensor:
        """Change the placement of a value; no gradient."""
        if source == to or (source.is_whole and to.is_whole):
            return part
        if self.communicator.recorder is None:
            return self._moved(part, source, to, shape, what)
        with self.communicator.recorder.during(CONVERSIONS):
            return self._moved(part, source, to, shape, what)

    def _moved(self, part: Tensor, source: Placement, to: Placement, shape: Sequence[int], what: What) -> Tensor:
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

    def _sum(self, part: Tensor, what: What) -> Tensor:
        # In place on a copy: the term itself may be needed elsewhere.
        total = part.clone(memory_format=torch.contiguous_format)
        self.communicator.all_reduce(total.view(-1), what=what).wait()
        return total

    def _gather(self, part: Tensor, layout: Layout, what: What) -> Tensor:
        algorithm = self.algorithm("all_gather", _bytes(layout.shape, part), layout.largest)
        flat = self.communicator.all_gather(_flat(part), layout.counts, what=what, algorithm=algorithm).wait()
        return flat.view(layout.shape) if layout.is_flat else layout.joined(flat.split(layout.counts))

    def _scatter(self, part: Tensor, layout: Layout, what: What) -> Tensor:
        algorithm = self.algorithm("reduce_scatter", _bytes(layout.shape, part), layout.largest)
        flat = _flat(part) if layout.is_flat else torch.cat(layout.runs(part))
        handle = self.communicator.reduce_scatter(flat, layout.counts, what=what, algorithm=algorithm)
        return handle.wait().view(layout.local_shapes[self.rank])

    def _reshard(self, part: Tensor, source: Layout, to: Layout, what: What) -> Tensor:
        return self.start_reshard([part], [source], [to], what).wait()[0]

    # With gradients

    def convert(
        self, part: Tensor, source: Placement, to: Placement, shape: Shape, what: What = "", back: What = ""
    ) -> Tensor:
        """Change the placement of a value, forward and, under the label `back`, backward."""
        if source == to:
            return part
        if not (part.requires_grad and torch.is_grad_enabled()):
            return self.move(part, source, to, shape, what)
        made: Tensor = _Convert.apply(self, source, to, shape, (what, back or f"gradient of {what}"), part)  # type: ignore[no-untyped-call]
        return made

    # Several values at once

    def start_gather(
        self, parts: Sequence[Tensor], layouts: Sequence[Layout], what: What, *, algorithm: str = ""
    ) -> Gathering:
        """Gather several pieces (of one dtype) with one collective."""
        whole_bytes = sum(_bytes(layout.shape, parts[0]) for layout in layouts)
        skewed = sum(_bytes(layout.shape, parts[0]) * layout.largest for layout in layouts)
        algorithm = algorithm or self.algorithm("all_gather", whole_bytes, skewed / whole_bytes if whole_bytes else 1.0)
        flat = _flat(parts[0]) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        counts = [sum(layout.counts[d] for layout in layouts) for d in range(self.size)]
        return Gathering(self.communicator.all_gather(flat, counts, what=what, algorithm=algorithm), counts, layouts)

    def start_scatter(self, wholes: Sequence[Tensor], layouts: Sequence[Layout], what: What) -> Handle:
        """Add up several whole tensors (of one dtype) over the devices, everybody keeping flat runs of its pieces."""
        whole_bytes = sum(whole.nbytes for whole in wholes)
        skewed = sum(w.nbytes * layout.largest for w, layout in zip(wholes, layouts, strict=True))
        algorithm = self.algorithm("reduce_scatter", whole_bytes, skewed / whole_bytes if whole_bytes else 1.0)
        counts = [sum(layout.counts[d] for layout in layouts) for d in range(self.size)]
        if len(wholes) == 1 and layouts[0].is_flat:
            # Alone in the world the result is the tensor itself, which may belong to others too.
            flat = _flat(wholes[0]).clone() if self.size == 1 else _flat(wholes[0])
        else:
            runs = [layout.runs(whole) for whole, layout in zip(wholes, layouts, strict=True)]
            flat = torch.cat([of_tensor[d] for d in range(self.size) for of_tensor in runs])
        return self.communicator.reduce_scatter(flat, counts, what=what, algorithm=algorithm)

    def start_reshard(
        self, parts: Sequence[Tensor], sources: Sequence[Layout], targets: Sequence[Layout], what: What
    ) -> Resharding | _GatheredAndCut:
        """Change how several tensors (of one dtype) are cut, with one collective."""
        both = [*zip(sources, targets, strict=True)]
        sizes = [_bytes(source.shape, part) for source, part in zip(sources, parts, strict=True)]
        whole_bytes = sum(sizes)
        skewed = sum(n * max(a.largest, b.largest) for n, (a, b) in zip(sizes, both, strict=True))
        largest = skewed / whole_bytes if whole_bytes else 1.0
        if self.algorithm("all_to_all", whole_bytes, largest) == "gather":
            return _GatheredAndCut(self.start_gather(parts, sources, what, algorithm="padded"), targets, self.rank)
        reshards = [self._between(source, to, part.device) for (source, to), part in zip(both, parts, strict=True)]
        given = [reshard.given(part) for reshard, part in zip(reshards, parts, strict=True)]
        take = [[math.prod(reshard.shapes[d]) for reshard in reshards] for d in range(self.size)]
        runs = [of_tensor[d] for d in range(self.size) for of_tensor in given]
        give = [sum(of_tensor[d].numel() for of_tensor in given) for d in range(self.size)]
        flat = torch.cat(runs)
        counts = [sum(of_device) for of_device in take]
        handle = self.communicator.all_to_all(flat, give, counts, what=what, whole_bytes=whole_bytes, largest=largest)
        return Resharding(handle, take, reshards)

    def _between(self, source: Layout, to: Layout, device: torch.device) -> _Reshard:
        key = (source, to, device)
        if key not in self._reshards:
            self._reshards[key] = _Reshard(source, to, self.rank, device)
        return self._reshards[key]


@dataclass(frozen=True, slots=True)
class Gathering:
    """Several tensors on their way to being whole."""

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


class _Reshard:
    """One tensor, from one cut of it to another: what a device gives to each other one, and what it makes of theirs.

    Which elements that are lies on the device, once for all steps: a GPU's host waits for what it copies there.
    """

    def __init__(self, source: Layout, to: Layout, rank: int, device: torch.device) -> None:
        self.source, self.to, self.rank, self.device = source, to, rank, device
        self.recuts = source.placement.dim == to.placement.dim

    def given(self, part: Tensor) -> list[Tensor]:
        """A flat run for each device."""
        devices = range(len(self.to.pieces))
        if not self.recuts:
            return [take_piece(part, self.to.placement, self.to.pieces, d).reshape(-1) for d in devices]
        return [part.index_select(self.source.placement.dim, places).reshape(-1) for places in self._from]

    @cached_property
    def shapes(self) -> list[Shape]:
        """The shapes of what comes from each device."""
        found = []
        for d, shape in enumerate(self.source.local_shapes):
            local = list(self.to.local_shapes[self.rank] if self.recuts else shape)
            dim = self.to.placement.dim
            local[dim] = len(self._into[d]) if self.recuts else self.to.local_shapes[self.rank][dim]
            found.append(tuple(local))
        return found

    @cached_property
    def _from(self) -> list[Tensor]:
        """For each device, where along the dim what goes there is."""
        place = {index: k for k, index in enumerate(self.source.indices(self.rank))}
        devices = range(len(self.to.pieces))
        return [_places([place[i] for i in self.to.indices(d) if i in place], self.device) for d in devices]

    @cached_property
    def _places_into(self) -> list[Tensor]:
        return [_places(places, self.device) for places in self._into]

    @cached_property
    def _into(self) -> list[list[int]]:
        """For each device, where along the dim what comes from it goes."""
        place = {index: k for k, index in enumerate(self.to.indices(self.rank))}
        devices = range(len(self.source.pieces))
        return [[place[index] for index in self.source.indices(d) if index in place] for d in devices]

    def made(self, runs: Sequence[Tensor]) -> Tensor:
        parts = [run.view(shape) for run, shape in zip(runs, self.shapes, strict=True)]
        if not self.recuts:
            return join_pieces(parts, self.source.placement)
        made = parts[0].new_empty(self.to.local_shapes[self.rank])
        for part, places in zip(parts, self._places_into, strict=True):
            made.index_copy_(self.to.placement.dim, places, part)
        return made


def _places(of: Sequence[int], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(of, dtype=torch.long, device=device)


@dataclass(frozen=True, slots=True)
class Resharding:
    """Several tensors on their way from one cut to another."""

    handle: Handle
    take: Sequence[Sequence[int]]  # elements of each tensor, from each device
    reshards: Sequence[_Reshard]

    def wait(self) -> list[Tensor]:
        counts = [sum(of_device) for of_device in self.take]
        runs = [
            run.split(list(of_device))
            for run, of_device in zip(self.handle.wait().split(counts), self.take, strict=True)
        ]
        return [reshard.made([of_device[k] for of_device in runs]) for k, reshard in enumerate(self.reshards)]


@dataclass(frozen=True, slots=True)
class _GatheredAndCut:
    """Several tensors on their way to being whole, of which pieces are kept."""

    gathering: Gathering
    targets: Sequence[Layout]
    rank: int

    def wait(self) -> list[Tensor]:
        return [to.piece(whole, self.rank) for to, whole in zip(self.targets, self.gathering.wait(), strict=True)]


Moving = Gathering | Resharding | _GatheredAndCut


def _flat(tensor: Tensor) -> Tensor:
    """All elements in a row. A vector with gaps is one to `reshape` already."""
    return tensor.reshape(-1).contiguous()


def _bytes(shape: Sequence[int], like: Tensor) -> int:
    return math.prod(shape) * like.element_size()


class _Convert(torch.autograd.Function):
    """A conversion; backward is its transpose."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Redistributor,
        source: Placement,
        to: Placement,
        shape: Shape,
        labels: tuple[What, What],
        part: Tensor,
    ) -> Tensor:
        ctx.way = (exchange, source, to, shape, labels[1])
        return exchange.move(part, source, to, shape, labels[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        exchange, source, to, shape, label = ctx.way
        back = exchange.move(gradient, cotangent(to), cotangent(source), shape, label)
        return None, None, None, None, None, back
