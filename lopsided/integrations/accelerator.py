"""An `Accelerator` that leaves the model and the batches to Lopsided.

In: the `Accelerator` that a training loop made. Out: the same one as `UnequalAccelerator`: it neither wraps the model
nor shards loaders, and clips by the norm of the whole gradient.
"""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader

from lopsided.comm.world import share_plan
from lopsided.runtime.norms import clip_grad_norm_
from lopsided.runtime.parallel import Parallel


class UnequalAccelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`parallel` is the model in training, once there is one."""

    parallel: Parallel | None = None

    @classmethod
    def of(cls, accelerator: accelerate.Accelerator) -> UnequalAccelerator:
        """The same object: whoever holds it, or a method of it, holds this one."""
        accelerator.__class__ = cls
        made: UnequalAccelerator = accelerator
        return made

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """A loader of whole batches on every process, in the order they have on one device."""
        prepared = prepare_data_loader(
            data_loader,
            num_processes=1,
            process_index=0,
            put_on_device=False,
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
        )
        loader: DataLoader[Any] = prepared.base_dataloader
        sampler = getattr(loader.batch_sampler, "sampler", None)
        if self.num_processes > 1 and isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = int(share_plan(str(sampler.initial_seed)))
        return loader

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        if self.parallel is None:
            norm: Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return norm
        self.unscale_gradients()
        return clip_grad_norm_(self.parallel, max_norm, norm_type)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model.module if isinstance(model, Parallel) else super().unwrap_model(model, *args, **kwargs)
