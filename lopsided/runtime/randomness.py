"""Random numbers of a run: on whole values the same everywhere, on pieces each device its own.

In: a seed that all processes share. Out: `Randomness`, two streams of this process: `shared` advances alike on every
process, `own` belongs to its rank. Ops that draw from torch's default generator do so from the stream they should.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lopsided.ops.op import Local
from lopsided.placement import Placement


class Randomness:
    """Two generators on the device of this process."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self.device = device
        self._shared = torch.Generator(device).manual_seed(seed)
        self._own = torch.Generator(device).manual_seed(seed + 1 + rank)

    def uniform(self, local: Local, shape: Sequence[int], placement: Placement, *, normal: bool = False) -> Tensor:
        """This device's part of a tensor of random numbers."""
        draw = torch.randn if normal else torch.rand
        if placement.is_shard:
            shape = placement.local_shape(shape, local.pieces, local.device)
        generator = self._own if placement.is_shard else self._shared
        return draw(tuple(shape), generator=generator, device=self.device)

    @contextmanager
    def stream(self, *, own: bool) -> Iterator[None]:
        """Torch's default generator goes on where the stream stopped, and is put back afterwards."""
        default = (
            torch.cuda.default_generators[self.device.index or 0]
            if self.device.type == "cuda"
            else torch.default_generator
        )
        generator = self._own if own else self._shared
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)

    def state(self) -> dict[str, Tensor]:
        return {"shared": self._shared.get_state(), "own": self._own.get_state()}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Go on from a state; a stream that is not in it stays where it is."""
        for name, generator in (("shared", self._shared), ("own", self._own)):
            if name in state:
                generator.set_state(state[name])
