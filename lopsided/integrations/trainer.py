"""`transformers.Trainer` on unequal devices.

In: what a `Trainer` takes, and a plan, a cluster, or neither. Out: a `Trainer` whose losses, metrics and checkpoints
are those of the plain one on a single device with the global batch.

    from lopsided.integrations.trainer import Trainer       # instead of: from transformers import Trainer

The global batch is `per_device_train_batch_size` times the number of processes, as it is under DDP, so hyperparameters
stay what they were; which process works on how many of its rows is the plan's. The model is parallelized when the first
loader is made. `trainer.model` then holds this process's pieces, and `trainer.parallel_model` is what is trained.

`OnUnequalDevices` does the same for other subclasses of `transformers.Trainer`, written before them:

    class Distiller(OnUnequalDevices, MyTrainer): ...
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import find_batch_size
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from lopsided.capturing.call import take_apart
from lopsided.cluster.cluster import Cluster
from lopsided.errors import CheckpointError, InputError
from lopsided.integrations.accelerate import UnequalAccelerator
from lopsided.integrations.preparing import (
    check_all_are_known,
    first_batch,
    planned_optimizer,
    random_numbers_untouched,
)
from lopsided.integrations.sharded_batches import FedBatch, ShardedBatches, fed_batch
from lopsided.planner.plan_data import Plan
from lopsided.runtime.calls.batches import shard
from lopsided.runtime.calls.call_form import HandedOut
from lopsided.runtime.calls.outputs import gather
from lopsided.runtime.checkpoint import checkpoint
from lopsided.runtime.checkpoint.state import load_full_state_dict, whole
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parallelizing import parallelize
from lopsided.runtime.parameters.adoption import check_bare

_ITEMS = "num_items_in_batch"
# The folder with the optimizer's state in a checkpoint of the Trainer's.
_STATE = "lopsided"
_WHOLE_BATCH = FedBatch(HandedOut(), is_cut=False)


# For the type checker, a mixin's methods of the Trainer's are there.
_OfTrainer: Any = object


class OnUnequalDevices(_OfTrainer):  # type: ignore[misc]
    """What a `Trainer` does otherwise where the model and the batch are cut unequally."""

    parallel_model: Parallel | None = None
    # The Trainer's own, which are set here, too.
    args: Any
    model: Any
    accelerator: Any
    label_smoother: Any
    compute_loss_func: Any
    gather_function: Any

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | Path | None = None,
        cluster: Cluster | str | Path | None = None,
        parallel: Mapping[str, Any] | None = None,
        pad: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """`parallel` has more arguments of `lopsided.parallelize` (and `batch`, an example of the global batch, if the
        first of the training set is not to be planned for). `pad` is that of `lopsided.shard`."""
        self._how = {"plan": plan, "cluster": cluster, **(parallel or {})}
        self._pad, self._rows, self._fed = pad, 0, _WHOLE_BATCH
        self._loss_is_next = False  # of what is gathered in evaluation
        super().__init__(*args, **kwargs)
        check_bare(self.model)
        check_all_are_known(self.args.world_size, "write TrainingArguments(use_cpu=True)")
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise InputError(
                "the training arguments ask for DeepSpeed or FSDP, which would shard the model a second time",
                where="TrainingArguments",
                do="leave deepspeed= and fsdp= out: the plan says what every device stores",
            )
        if self.args.train_sampling_strategy == "batch_rebalance":
            raise InputError(
                "batches that are balanced over processes can not be cut by a plan",
                where="TrainingArguments(train_sampling_strategy='batch_rebalance')",
                do="take another strategy: the plan balances the devices",
            )
        self.args = copy.copy(self.args)  # the script's own stay as they are
        # The loss is the global one already: nothing is averaged over devices, and nothing has to make up for it.
        self.args.average_tokens_across_devices = False
        self.args._n_gpu = min(self.args.n_gpu, 1)
        if self.label_smoother is not None:
            self.label_smoother = self._of_whole(self.label_smoother)
        if self.compute_loss_func is not None:
            self.compute_loss_func = self._of_whole(self.compute_loss_func)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator = UnequalAccelerator.of(self.accelerator)

    # The model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Only its pieces go there."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model if self.parallel_model is None else self.parallel_model

    def _parallelized(self, loader: DataLoader[Any]) -> Parallel:
        if self.parallel_model is None or self.parallel_model.module is not self.model:
            how = dict(self._how)
            batch = how.pop("batch", None)
            with random_numbers_untouched(), self.autocast_smart_context_manager():
                self.model.train()
                example = self._as_called(batch if batch is not None else first_batch(loader))
                optimizer = planned_optimizer(str(self.args.optim))
                # There is one CPU, which accelerate numbers and tensors do not.
                device = self.args.device if self.args.device.type != "cpu" else "cpu"
                options = {"device": device, "seed": self.args.seed, "optimizer": optimizer} | how
                self.parallel_model = parallelize(self.model, example, **options)
            world = self.parallel_model.world
            if len(world.ranks) < world.size and not self.parallel_model.has_loss:
                raise InputError(
                    f"the plan uses {len(world.ranks)} of {world.size} processes, and the others could not compute a "
                    "loss outside of the model",
                    where="Trainer(compute_loss_func=...), or label_smoothing_factor",
                    do=f"start {len(world.ranks)} processes, or save the plan and use `lopsided run plan.json`",
                )
            self.accelerator.parallel = self.parallel_model
        return self.parallel_model

    def _as_called(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch as `compute_loss` calls the model with it."""
        call = dict(batch)
        items = super()._get_num_items_in_batch([call], torch.device("cpu"))
        if self.label_smoother is not None or self.compute_loss_func is not None:
            call.pop("labels", None)
        if items is not None and self.model_accepts_loss_kwargs:
            call[_ITEMS] = items
        return call

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        if self.accelerator.mixed_precision in ("no", None):
            return nullcontext()
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    # Batches

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[..., Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        if not is_training and self.parallel_model is None and self.train_dataset is not None:
            self.get_train_dataloader()  # the plan is for training
        rows = batch_size * self.args.world_size
        with self._batch_size_in_args(rows):  # which is what samples are grouped by length for
            loader = super()._get_dataloader(dataset, description, rows, sampler_fn, is_training, dataloader_key)
        pm = self._parallelized(loader)
        return ShardedBatches(shard(loader, pm, pad=self._pad, besides=[_ITEMS]), loader, pm.handed_out)

    @contextmanager
    def _batch_size_in_args(self, rows: int) -> Iterator[None]:
        """Inside, the arguments say how many rows the global batch has."""
        own = self.args
        self.args = copy.copy(own)
        self.args.per_device_train_batch_size = self.args.per_device_eval_batch_size = rows
        try:
            yield
        finally:
            self.args = own

    def _run_epoch(self, **given: Any) -> None:
        epoch, skip = given["epoch"], given["steps_trained_in_current_epoch"]
        resumes = given["resume_from_checkpoint"] is not None and epoch == given["epochs_trained"]
        given["train_dataloader"].start(epoch, skip if resumes and not self.args.ignore_data_skip else 0)
        super()._run_epoch(**given)

    def _begin_batch(self, inputs: Any) -> None:
        """The model is about to be called with this batch."""
        self._fed = fed_batch(inputs) or _WHOLE_BATCH
        self._rows = self._fed.handed_out.rows or find_batch_size(inputs) or 0
        if self.parallel_model is not None:
            self.parallel_model.handed_out(self._fed.handed_out)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self._begin_batch(inputs)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Items of the global batches, of which this process has counted those in its own rows."""
        items = super()._get_num_items_in_batch(batch_samples, device)
        if items is None or self.args.world_size == 1:
            return items
        # In evaluation the batch has been moved to the device, and is the one that was begun.
        fed = fed_batch(batch_samples[0]) or self._fed
        # Where batches are not cut, everybody has counted all of them, and a process that takes no part nothing.
        dist.all_reduce(items, dist.ReduceOp.SUM if fed.is_cut else dist.ReduceOp.MAX)
        return items

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        if not self._fed.is_cut:
            counted = self.state.num_input_tokens_seen - before
            self.state.num_input_tokens_seen = before + counted // len(self._trained.world.ranks)

    # Losses and metrics

    def _of_whole(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A loss that the model does not know, of the whole output, the same on every process."""

        def of_whole(outputs: Any, labels: Any, *args: Any, **kwargs: Any) -> Tensor:
            parts, rebuild = take_apart(outputs)
            return loss_fn(rebuild([self._whole(part) for part in parts]), self._whole(labels), *args, **kwargs)

        return of_whole

    def _whole(self, rows: Any) -> Any:
        """Tensors with this process's rows of the last batch, each with all rows."""
        return pytree.tree_map_only(Tensor, self._gathered, rows)

    def _gathered(self, rows: Tensor) -> Tensor:
        pm = self.parallel_model
        if pm is None or not rows.dim():
            return rows
        return gather(rows, pm)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        self._begin_batch(inputs)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self._loss_is_next = loss is not None
        if "inputs" in self.args.include_for_metrics:
            inputs.update({name: self._whole(value) for name, value in inputs.items()})
        return loss, self._whole(logits), self._whole(labels)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.gather_function = self._whole_already
        return super().evaluation_loop(*args, **kwargs)

    def _whole_already(self, gathered: Any) -> Any:
        """Takes the place of a gather: all is whole, except that the loss counts once for every row."""
        if not self._loss_is_next:
            return gathered
        self._loss_is_next = False
        return gathered[:1].expand(self._rows)

    # Checkpoints

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        if self.parallel_model is None:
            super()._save(output_dir, state_dict)
            return
        ours, model = self.model, whole(self.parallel_model)
        if model is not None:
            self.model = model
            try:
                super()._save(output_dir)
            finally:
                self.model = ours

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir) / _STATE
        checkpoint.save(self._trained, self._bare_optimizer, folder, scheduler=self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        if folder is None:
            return
        if (Path(folder) / _STATE).is_dir():
            checkpoint.load(self._trained, self._bare_optimizer, Path(folder) / _STATE, scheduler=self.lr_scheduler)
        elif (Path(folder) / "optimizer.pt").exists():
            raise CheckpointError(
                "the optimizer's state was saved by a Trainer on one device, or under DDP",
                where=folder,
                do="begin with its weights: from_pretrained(folder) and train() without resume_from_checkpoint",
            )

    def _load_from_checkpoint(self, folder: str, model: nn.Module | None = None) -> None:
        if self.parallel_model is None or self.parallel_model.module is not self.model:
            super()._load_from_checkpoint(folder, model)
        else:
            self._load_weights(Path(folder))

    def _load_best_model(self) -> None:
        self._load_weights(Path(self.state.best_model_checkpoint))

    def _load_weights(self, folder: Path) -> None:
        """Load a saved model into this process's pieces. Rank 0 needs the folder."""
        source = _weights_in(folder) if self._trained.world.rank == 0 else None
        load_full_state_dict(self._trained, source, strict=not getattr(self.model, "_keys_to_ignore_on_save", None))

    @property
    def _trained(self) -> Parallel:
        if self.parallel_model is None:
            raise InputError("the model is not parallel yet", where="Trainer", do="train or evaluate first")
        return self.parallel_model

    @property
    def _bare_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without the wrapper of accelerate."""
        return cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))


class Trainer(OnUnequalDevices, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with `plan=` or `cluster=`; without either, the devices are measured."""


def _weights_in(folder: Path) -> Mapping[str, Tensor] | Path:
    """The weights that `save_pretrained` wrote, in one file or several."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return folder / SAFE_WEIGHTS_NAME
    names: Sequence[str] = sorted({*json.loads(index.read_text())["weight_map"].values()})
    return {key: value for name in names for key, value in load_file(folder / Path(name).name).items()}
