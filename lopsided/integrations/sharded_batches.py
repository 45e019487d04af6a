"""Sharded batches as a `DataLoader` of `accelerate`: for training loops that are not written for Lopsided.

In: a loader of whole global batches and the parallel model. Out: `ShardedBatches`, which behaves as a loader that
`accelerate` has prepared, and whose batches know which they are (`FedBatch`): such loops fetch several before they
train on the first, so the loader's last batch is not always the one that the model is called with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from lopsided.runtime.calls.batches import ShardedLoader
from lopsided.runtime.calls.call_form import HandedOut

# The attribute of a tensor that knows its batch.
_FED = "lopsided_fed"


@dataclass(frozen=True)
class FedBatch:
    """Which batch a tensor belongs to; `is_cut` if it holds this process's rows only."""

    handed_out: HandedOut
    is_cut: bool


def fed_batch(batch: Any) -> FedBatch | None:
    """Which batch of a sharded loader this is; None for any other."""
    found = (vars(tensor).get(_FED) for tensor in pytree.tree_leaves(batch) if isinstance(tensor, Tensor))
    return next((fed for fed in found if fed is not None), None)


class _Batches(IterableDataset[Any]):
    """The batches of an epoch, as a dataset: what `accelerate` can make another loader of to skip some."""

    def __init__(self, sharded: ShardedLoader, samples: object, device: torch.device | None) -> None:
        self.sharded, self._samples, self._device = sharded, samples, device
        self.skipped = 0

    def __len__(self) -> int:
        """Samples, not batches: how many there are is asked of a loader's dataset."""
        if not isinstance(self._samples, Sized):
            raise TypeError(f"{type(self._samples).__name__} has no length")
        return len(self._samples)

    def __iter__(self) -> Iterator[Any]:
        # Whoever skips batches iterates over them: in place of each, nothing is loaded.
        yield from itertools.repeat(None, self.skipped)
        self.skipped = 0
        for batch in self.sharded:
            fed = FedBatch(self.sharded.handed_out, self.sharded.is_cut)
            yield pytree.tree_map_only(Tensor, partial(_noted, fed, self._device), _plain(batch))


def _plain(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def _noted(fed: FedBatch, device: torch.device | None, tensor: Tensor) -> Tensor:
    """Another tensor object: batches without rows are made of the same ones again and again."""
    made = tensor.to(device).view_as(tensor) if device is not None else tensor.view_as(tensor)
    vars(made)[_FED] = fed
    return made


def _as_it_is(batch: Any) -> Any:
    return batch


class ShardedBatches(DataLoader[Any], DataLoaderStateMixin):  # type: ignore[misc]
    """This process's rows of the batches of `loader`, which makes global ones; on `device`, if that is given."""

    def __init__(
        self,
        sharded: ShardedLoader,
        loader: DataLoader[Any],
        tell: Callable[[HandedOut], None],
        *,
        device: torch.device | None = None,
        skip: int = 0,
    ) -> None:
        self._batches = _Batches(sharded, loader.dataset, device)
        super().__init__(self._batches, batch_size=None, collate_fn=_as_it_is)
        self._whole, self._tell, self._device, self._skip = loader, tell, device, skip
        self.gradient_state = GradientState()
        self.iteration = 0  # which epoch comes next

    def __len__(self) -> int:
        return len(self._batches.sharded) - self._skip

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.begin()
        self.set_epoch(self.iteration)
        if self._skip:
            self._go_to(self.iteration, self._skip)
        try:
            # One ahead, to know which is the last.
            ahead, behind = itertools.tee(super().__iter__())
            next(ahead, None)
            for batch in behind:
                self.end_of_dataloader = next(ahead, ahead) is ahead
                fed = fed_batch(batch)
                self._tell(fed.handed_out if fed is not None else HandedOut())
                yield batch
            self.iteration += 1
        finally:
            self._tell(HandedOut())
            self.end()

    def set_epoch(self, epoch: int) -> None:
        """As `accelerate` does: the samplers and the dataset are told."""
        self.iteration = epoch
        sampler: Any = self._whole.batch_sampler
        for told in (sampler, getattr(sampler, "sampler", None), self._whole.dataset):
            if (set_epoch := getattr(told, "set_epoch", None)) is not None:
                set_epoch(epoch)

    def start(self, epoch: int, skip: int = 0) -> None:
        """The next iteration is this epoch, whose first `skip` batches will be skipped."""
        self.set_epoch(epoch)
        self._go_to(epoch, skip)
        self._batches.skipped = skip

    def without_first(self, count: int) -> ShardedBatches:
        """A loader that begins behind so many batches."""
        made = ShardedBatches(self._batches.sharded, self._whole, self._tell, device=self._device, skip=count)
        made.iteration = self.iteration
        return made

    def _go_to(self, epoch: int, batches: int) -> None:
        sharded = self._batches.sharded
        sharded.load_state_dict({"epoch": epoch, "batches": batches, "seed": sharded.seed})
