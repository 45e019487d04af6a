"""What a region saves for its backward pass, in the memory of the host.

In: instructions. Out: `Offloaded`, an instruction that runs them with hooks around what autograd saves (`HostStore`).

A memory is sent once, whoever saves views of it, and comes back when the first of them is asked for, until the last
has been. What the region takes from outside, parameters and their copies stay where they are: others hold them. On a
GPU what is saved leaves on a stream of its own for pinned memory, while the region goes on computing. The region ends
with a wait for that stream, so no more is on the device than one region saves, and its memory can be used again in the
order of one stream. What comes back does so on the stream that asks for it, which waits. On a CPU both are the same
memory, told apart by copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lopsided.executor.instructions import Instruction, Pass, Slots, TakeCopy, run_all

_streams: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(slots=True)
class Offloaded(Instruction):
    """Instructions whose saved tensors are in host memory until the backward pass."""

    inside: list[Instruction]
    takes: tuple[int, ...]  # slots from outside
    gives: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        return self.takes

    @property
    def writes(self) -> tuple[int, ...]:
        return self.gives

    def run(self, slots: Slots, this: Pass) -> None:
        if not torch.is_grad_enabled():
            run_all(self.inside, slots, this)
            return
        store = HostStore()
        for slot in self.takes:
            store.leave(slots[slot])
        with torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack):
            for instruction in self.inside:
                run_all([instruction], slots, this)
                if isinstance(instruction, TakeCopy):
                    store.leave(slots[instruction.to])
        store.done()


class _Memory:
    """The memory of saved tensors, on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.here: Tensor | None = _bytes_of(tensor)  # as long as its region runs: its address is not another's
        self._device = tensor.device
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if self._device.type != "cuda":
            self._host = self.here.clone()
            return
        self._host = torch.empty(self.here.numel(), dtype=torch.uint8, pin_memory=True)
        if self._device not in _streams:
            _streams[self._device] = torch.cuda.Stream(self._device)
        stream = _streams[self._device]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(self.here, non_blocking=True)
            self._arrived = stream.record_event()

    def leave(self) -> None:
        """Free what is on the device, for whatever comes later on the current stream."""
        self._wait()
        self.here = None

    def _wait(self) -> None:
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)

    def fetched(self) -> Tensor:
        """All of it on the device, for as long as anybody may ask for it."""
        if self._back is None:
            self._wait()
            self._back = self._host.to(self._device, non_blocking=True)
        return self._back


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor as it lay in its memory."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class HostStore:
    """Hooks for what one run of a region saves."""

    # By address. What stays is held, or its address could become another's while the region runs.
    _left: dict[int, Tensor] = field(default_factory=dict)
    _sent: dict[int, _Memory] = field(default_factory=dict)

    def leave(self, tensor: object) -> None:
        """What is in this memory stays on the device."""
        if isinstance(tensor, Tensor):
            self._left[_address(tensor)] = tensor.detach()

    def pack(self, tensor: Tensor) -> Tensor | _Part:
        address = _address(tensor)
        if tensor.numel() < 2 or address in self._left or address == 0:
            return tensor
        memory = self._sent.get(address)
        if memory is None:
            memory = self._sent[address] = _Memory(tensor.detach())
        return _Part(memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: Tensor | _Part) -> Tensor:
        if not isinstance(kept, _Part):
            return kept
        storage = kept.memory.fetched().untyped_storage()
        made = torch.empty(0, dtype=kept.dtype, device=storage.device)
        return made.set_(storage, kept.offset, kept.size, kept.stride)

    def done(self) -> None:
        """The region has run: addresses may become another's."""
        for memory in self._sent.values():
            memory.leave()
        self._sent.clear()
        self._left.clear()


def _address(tensor: Tensor) -> int:
    """Of a tensor's memory; 0 where it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided and tensor.numel() else 0


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
