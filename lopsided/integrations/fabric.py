"""Lightning Fabric on unequal devices: a strategy.

In: a script for `lightning.fabric.Fabric`, an example of the batch, and a plan, a cluster, or neither. Out: losses and
checkpoints of one device with the global batch.

    from lopsided.integrations.fabric import FabricStrategy

    fabric = Fabric(strategy=FabricStrategy(batch=batch, plan="plan.json"), accelerator=..., devices=...)

The global batch is the loader's batch size times the number of processes. Where the model, or `loss_fn`, makes the
loss, each process loads the rows that the plan gives it; where the script makes it, every process loads whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.utils.data import DataLoader

from lopsided.capturing.call import LossFn
from lopsided.cluster.cluster import Cluster
from lopsided.errors import CheckpointError, InputError
from lopsided.integrations.preparing import call_of, of_all_processes, random_numbers_untouched
from lopsided.planner.plan_data import Plan
from lopsided.runtime.calls.batches import shard
from lopsided.runtime.checkpoint import checkpoint as pieces
from lopsided.runtime.checkpoint.state import full_state_dict, load_full_state_dict
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parallelizing import parallelize
from lopsided.runtime.parameters.adoption import check_bare

_STATE, _REST = "lopsided", "rest.ckpt"


class _NoSync(_BackwardSyncControl):  # type: ignore[misc]
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled and isinstance(module, Parallel) else nullcontext()


class FabricStrategy(DDPStrategy):  # type: ignore[misc]
    """`batch` is an example of the global batch, as the model is called with it. `plan`, `cluster`, or neither: the
    devices are measured. `loss_fn` and what stands in `parallel` are arguments of `lopsided.parallelize`."""

    pm: Parallel | None = None

    def __init__(
        self,
        batch: object,
        plan: Plan | str | Path | None = None,
        cluster: Cluster | str | Path | None = None,
        loss_fn: LossFn | None = None,
        parallel: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._example = batch
        self._how = {"plan": plan, "cluster": cluster, "loss_fn": loss_fn, **(parallel or {})}
        self._backward_sync_control = _NoSync()

    # The model

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self.pm is not None:
            raise InputError(
                "a second model is set up",
                where="Fabric.setup",
                do="put both into one module whose forward takes an argument that says which step it is "
                "(docs/training.md, several objectives)",
            )
        check_bare(module)
        device = self.root_device if self.root_device.type != "cpu" else "cpu"
        options: dict[str, Any] = {"device": device, **self._how}
        batch = call_of(module, self._example, cast(LossFn | None, self._how["loss_fn"]))
        with random_numbers_untouched(), self.precision.forward_context():
            self.pm = parallelize(module, batch, **options)
        world = self.pm.world
        if len(world.ranks) < world.size:
            raise InputError(
                f"the plan uses {len(world.ranks)} devices, and {world.size} processes train",
                where="Fabric.setup",
                do=f"start {len(world.ranks)} processes, or save the plan and use `lopsided run plan.json`",
            )
        return self.pm

    def module_to_device(self, module: nn.Module) -> None:
        """Only its pieces go there."""

    @property
    def _trained(self) -> Parallel:
        if self.pm is None:
            raise InputError(
                "no model is set up, whose plan says who loads what",
                where="Fabric",
                do="call fabric.setup(model, optimizer) before fabric.setup_dataloaders(loader)",
            )
        return self.pm

    # Batches

    @property
    def distributed_sampler_kwargs(self) -> None:
        """None: rows are handed out by the plan."""

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        pm = self._trained
        besides = () if pm.has_loss else tuple(pm.inputs)
        return shard(of_all_processes(dataloader, self.world_size), pm, besides=besides)

    # Checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return full_state_dict(module) if isinstance(module, Parallel) else super().get_module_state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: Any, strict: bool = True) -> None:
        if isinstance(module, Parallel):
            load_full_state_dict(module, state_dict if self.is_global_zero else None, strict=strict)
        else:
            super().load_module_state_dict(module, state_dict, strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """A folder: model and optimizer for any plan, and a file with the rest."""
        pm, optimizer, rest = _sorted(state)
        folder = Path(path)
        rest = self._convert_stateful_objects_in_state(rest, filter=filter or {})
        pieces.save(pm or self._trained, optimizer, folder / _STATE, keep=1)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint=rest, path=folder / _REST, storage_options=storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder = Path(path)
        if not (folder / _STATE).is_dir() or not isinstance(state, dict):
            raise CheckpointError(
                "this is no folder that was saved with this strategy, or it is loaded without the objects it goes into",
                where=str(path),
                do="load with fabric.load(path, {'model': model, 'optimizer': optimizer, ...}); for a plain state dict "
                "lopsided.load_full_state_dict",
            )
        pm, optimizer, rest = _sorted(state)
        pieces.load(pm or self._trained, optimizer, folder / _STATE)
        left: dict[str, Any] = super().load_checkpoint(folder / _REST, rest, strict, weights_only is not False)
        state.update({name: value for name, value in rest.items() if name in state})
        return left


def _sorted(state: Mapping[str, Any]) -> tuple[Parallel | None, torch.optim.Optimizer | None, dict[str, Any]]:
    """The model, the optimizer, and what else there is."""
    models = [value for value in state.values() if isinstance(value, Parallel)]
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    if len(models) > 1 or len(optimizers) > 1:
        raise InputError("several models or optimizers are saved", where="Fabric", do="save one of each")
    known = [*models, *optimizers]
    rest = {name: value for name, value in state.items() if all(value is not one for one in known)}
    return next(iter(models), None), next(iter(optimizers), None), rest
