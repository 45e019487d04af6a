"""What a training loop of another library tells about training before it begins.

In: its loader, its optimizer, its model. Out: an example of the batch, the call of the model that the batch is for, the
loader of all processes together, and the optimizer that is planned for.
"""

from __future__ import annotations

import inspect
import itertools
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lopsided.capturing.call import LossFn
from lopsided.errors import InputError
from lopsided.schedule.cost import OPTIMIZERS


def planned_optimizer(name: str) -> str:
    """The optimizer of the planner's that keeps what this one keeps: `adamw_torch_fused` is AdamW."""
    first = name.rpartition(".")[2].lower().split("_")[0]
    return first if first in OPTIMIZERS else "adamw"


def first_batch(loader: DataLoader[Any]) -> Any:
    """An example of what the loader makes. Only its shapes matter."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or loader.batch_sampler is None:
        return next(iter(loader))
    indices = range(min(len(dataset), getattr(loader.batch_sampler, "batch_size", 1)))
    return loader.collate_fn([dataset[k] for k in indices])


def check_all_are_known(count: int, do: str) -> None:
    """Refuse to go on where a library takes each of several processes for the only one."""
    started = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)
    if count == 1 < started:
        raise InputError(
            f"{started} processes were started, and accelerate takes each for the only one: there is no GPU here",
            where="accelerate",
            do=do,
        )


_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def of_all_processes(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """A loader of global batches, of one that is written for one of `count` processes."""
    if count == 1 or (loader.batch_size is None and loader.batch_sampler is None):
        return loader
    sampler: Any = loader.batch_sampler
    sampled: dict[str, Any]
    if isinstance(loader.dataset, IterableDataset):
        sampled = {"batch_size": (loader.batch_size or 1) * count, "drop_last": loader.drop_last}
    elif type(sampler) is BatchSampler:
        sampled = {"batch_sampler": BatchSampler(sampler.sampler, sampler.batch_size * count, sampler.drop_last)}
    else:
        sampled = {"batch_sampler": _Joined(sampler, count)}
    return DataLoader(loader.dataset, **sampled, **{name: getattr(loader, name) for name in _KEPT})


class _Joined:
    """Batches of indices, several joined to one: the global batches of processes that have them in turns."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.sampler, self._count = sampler, count  # under this name samplers inside of samplers are found

    def __len__(self) -> int:
        return -(-len(self.sampler) // self._count)

    def __iter__(self) -> Iterator[list[Any]]:
        batches = (batch for batch in self.sampler)  # Lightning's sampler begins anew whenever it is asked for one
        while several := [*itertools.islice(batches, self._count)]:
            yield [*itertools.chain.from_iterable(several)]


def call_of(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> Any:
    """The entries of a batch that a loop calls the model with: by name, or by position as many as forward takes."""
    batch = dict(batch) if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, list) else batch
    if loss_fn is not None:
        return batch  # which takes what forward does not
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if isinstance(batch, dict):
        names = {parameter.name for parameter in parameters}
        is_open = inspect.Parameter.VAR_KEYWORD in kinds
        return {name: value for name, value in batch.items() if is_open or name in names}
    if not isinstance(batch, tuple) or inspect.Parameter.VAR_POSITIONAL in kinds:
        return batch
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [parameter for parameter in parameters if parameter.kind in by_position]
    required = [parameter for parameter in taken if parameter.default is parameter.empty]
    return batch if len(batch) <= len(taken) else batch[: len(required)]


@contextmanager
def random_numbers_untouched() -> Iterator[None]:
    """What is drawn in here does not change what is drawn afterwards."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)
