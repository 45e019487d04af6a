"""Random numbers of a run: on whole values the same everywhere, on pieces each device its own.

In: a seed that all processes share. Out: `RankRandomness`, two streams of this process: `shared` advances alike on
every process, `own` belongs to its rank. Ops that draw from torch's default generator do so from the stream they
should.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from lopsided.ir.placement import Placement
from lopsided.ops.op import Local


class RankRandomness:
    """Two generators on the device of this process."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self.device = device
        self._shared = torch.Generator(device).manual_seed(seed)
        self._own = torch.Generator(device).manual_seed(seed + 1 + rank)
        self._drawing: torch.Generator | None = None  # the stream that torch's default generator is now

    def uniform(self, local: Local, shape: Sequence[int], placement: Placement, *, normal: bool = False) -> Tensor:
        """This device's part of a tensor of random numbers."""
        draw = torch.randn if normal else torch.rand
        if placement.is_shard:
            shape = placement.local_shape(shape, local.pieces, local.device)
        generator = self._own if placement.is_shard else self._shared
        self._put_back()
        return draw(tuple(shape), generator=generator, device=self.device)

    @contextmanager
    def streams(self) -> Iterator[None]:
        """In here `draw_from` chooses; torch's default generator is put back afterwards."""
        default = self._default()
        kept = default.get_state()
        try:
            yield
        finally:
            self._put_back()
            default.set_state(kept)

    @property
    def by_position(self) -> bool:
        return False

    def drawing(self, node: str, rank: int | None) -> AbstractContextManager[None]:
        """From here on the stream of this rank's own, or the one that all share, until another is wanted."""
        self.draw_from(own=rank is not None)
        return nullcontext()

    def draw_from(self, *, own: bool) -> None:
        """Torch's default generator goes on where this stream stopped. It stays there until another is wanted."""
        self._switch(self._own if own else self._shared)

    def _switch(self, to: torch.Generator) -> None:
        if self._drawing is not to:
            self._put_back()
            self._default().set_state(to.get_state())
            self._drawing = to

    def _put_back(self) -> None:
        if self._drawing is not None:
            self._drawing.set_state(self._default().get_state())
            self._drawing = None

    def _default(self) -> torch.Generator:
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator

    def state(self) -> dict[str, Tensor]:
        self._put_back()
        return {"shared": self._shared.get_state(), "own": self._own.get_state()}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Go on from a state; a stream that is not in it stays where it is."""
        self._put_back()
        for name, generator in (("shared", self._shared), ("own", self._own)):
            if name in state:
                generator.set_state(state[name])


def streams_of(random: object) -> AbstractContextManager[None]:
    """What surrounds a pass that draws; with other than real random numbers, nothing."""
    return random.streams() if isinstance(random, RankRandomness) else nullcontext()
