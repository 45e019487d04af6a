"""`accelerate` on unequal devices.

In: a script that is written for `accelerate`, and a plan, a cluster, or neither. Out: the same script with one import
changed, whose losses, metrics and checkpoints are those of one device with the global batch.

    from lopsided.integrations.accelerate import Accelerator       # instead of: from accelerate import Accelerator

The global batch is the loader's batch size times the number of processes, as `accelerate` has it under DDP, or the
loader's own with `split_batches`. Where the model, or `loss_fn`, makes the loss, each process loads the rows that the
plan gives it. Where the script makes it of outputs, every process loads the whole batch, and outputs are whole: that is
right on every plan, and costs gathering them.

`UnequalAccelerator` is what other training loops are given that prepare models and batches themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
from accelerate.utils import DistributedType, convert_to_fp32
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from lopsided.capturing.call import LossFn
from lopsided.cluster.cluster import Cluster
from lopsided.comm.world import group_to_talk, share_plan
from lopsided.errors import InputError
from lopsided.integrations.preparing import (
    call_of,
    check_all_are_known,
    first_batch,
    of_all_processes,
    planned_optimizer,
    random_numbers_untouched,
)
from lopsided.integrations.sharded_batches import ShardedBatches
from lopsided.planner.plan_data import Plan
from lopsided.runtime.calls.batches import shard
from lopsided.runtime.calls.outputs import gather
from lopsided.runtime.checkpoint import checkpoint
from lopsided.runtime.checkpoint.state import full_state_dict
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parallelizing import parallelize
from lopsided.runtime.parameters.adoption import check_bare
from lopsided.runtime.parameters.norms import clip_grad_norm_

# The folder with the model's pieces and the optimizer's in a saved state.
_STATE = "lopsided"


class UnequalAccelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Neither wraps the model nor shards loaders. `parallel` is the model in training, once there is one."""

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
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        # Of parameters without a gradient it does not matter whether they are given.
        trained = {id(parameter) for parameter in self.parallel.parameters() if parameter.requires_grad}
        if trained <= {*map(id, given)}:
            return clip_grad_norm_(self.parallel, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model.module if isinstance(model, Parallel) else super().unwrap_model(model, *args, **kwargs)


class Accelerator(UnequalAccelerator):
    """`accelerate.Accelerator` with `plan=` or `cluster=`; without either, the devices are measured.

    `loss_fn` and what stands in `parallel` are arguments of `lopsided.parallelize`; `pad` is one of `lopsided.shard`.
    `batch` is an example of what the model is called with, the global batch, if that is not what the first loader that
    is prepared gives.
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | Path | None = None,
        cluster: Cluster | str | Path | None = None,
        loss_fn: LossFn | None = None,
        batch: object = None,
        pad: Mapping[str, float] | None = None,
        parallel: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_all_are_known(self.num_processes, "write Accelerator(cpu=True), or start it by accelerate launch --cpu")
        self._how = {"plan": plan, "cluster": cluster, "loss_fn": loss_fn, **(parallel or {})}
        self._example, self._pad = batch, pad
        if self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise InputError(
                f"accelerate is configured for {self.distributed_type.value}, which would cut the model a second time",
                where="Accelerator, or the configuration of accelerate launch",
                do="take a configuration without it: the plan says what every device stores",
            )

    # What is prepared

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """The model is parallelized first, whatever its place among the arguments, since loaders need its plan."""
        trained = [one for one in args if isinstance(one, nn.Module) and _is_trained(one)]
        if len(trained) > 1:
            raise InputError(
                f"{len(trained)} models are trained: {', '.join(type(one).__name__ for one in trained)}",
                where="Accelerator.prepare",
                do="put them into one module whose forward takes an argument that says which step it is "
                "(docs/training.md, several objectives)",
            )
        if trained and not isinstance(trained[0], Parallel):
            loader = next((one for one in args if isinstance(one, DataLoader)), None)
            optimizer = next((type(one).__name__ for one in args if isinstance(one, torch.optim.Optimizer)), "AdamW")
            made = self._parallelized(trained[0], loader, optimizer)
            args = tuple(made if one is trained[0] else one for one in args)
        elif trained:
            self.parallel = cast(Parallel, trained[0])
        return super().prepare(*args, device_placement=device_placement)

    def _parallelized(self, model: nn.Module, loader: DataLoader[Any] | None, optimizer: str) -> Parallel:
        check_bare(model)
        if self._example is None and loader is None:
            raise InputError(
                "there is no batch to plan for",
                where="Accelerator.prepare",
                do="prepare the model together with its loader, or give Accelerator(batch=...) an example of what the "
                "model is called with, of all devices together",
            )
        with random_numbers_untouched():
            batch = self._example
            if batch is None:
                whole_batch = first_batch(self._of_all(cast(DataLoader[Any], loader)))
                batch = call_of(model, whole_batch, cast(LossFn | None, self._how["loss_fn"]))
            # There is one CPU, which accelerate numbers and tensors do not.
            device = self.device if self.device.type != "cpu" else "cpu"
            options: dict[str, Any] = {"device": device, "optimizer": planned_optimizer(optimizer), **self._how}
            with self._casting():
                pm = parallelize(model, batch, **options)
        if len(pm.world.ranks) < pm.world.size and not pm.has_loss:
            raise InputError(
                f"the plan uses {len(pm.world.ranks)} of {pm.world.size} processes, and the loss is the script's own, "
                "which the others could not compute",
                where="Accelerator.prepare",
                do="give Accelerator(loss_fn=...), or start as many processes as the plan uses",
            )
        if self.native_amp:
            pm = _Casting.of(pm, self.autocast)
        self.parallel = pm
        return pm

    def _casting(self) -> AbstractContextManager[Any]:
        return self.autocast() if self.native_amp else nullcontext()

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not _is_trained(model):
            return model.to(self.device)
        pm = model if isinstance(model, Parallel) else self._parallelized(model, None, "AdamW")
        if all(known is not pm for known in self._models):
            self._models.append(pm)
        return pm

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        if isinstance(data_loader, ShardedBatches):
            return data_loader
        pm = self.parallel
        if pm is None:
            raise InputError(
                "a loader is prepared before the model, whose plan says who loads what",
                where="Accelerator.prepare",
                do="prepare the model together with its loaders, or before them",
            )
        loader = super().prepare_data_loader(self._of_all(data_loader))
        # Where the script makes the loss, all rows are everybody's.
        besides = () if pm.has_loss else tuple(pm.inputs)
        made = ShardedBatches(
            shard(loader, pm, pad=self._pad, besides=besides), loader, pm.handed_out, device=self.device
        )
        self._dataloaders.append(made)
        return made

    def _of_all(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        return loader if self.split_batches else of_all_processes(loader, self.num_processes)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> Any:
        if isinstance(dataloader, ShardedBatches):
            return dataloader.without_first(num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> AbstractContextManager[None]:
        """Nothing to do: processes take part in all batches, whatever rows they have."""
        return nullcontext()

    # What processes know together

    def gather(self, tensor: Any) -> Any:
        """Rows of the last batch, of all processes and as often as they were there. A number, or a tensor without a row
        for each of the batch's, is gathered as `accelerate` does it: what each process has, one behind the other."""
        return super().gather(tensor) if self.parallel is None else pytree.tree_map_only(Tensor, self._whole, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if self.parallel is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        if not use_gather_object and all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(input_data)):
            return self.gather(input_data)
        # Objects, a list of them with one for each of this process's rows.
        told = self._told((self.parallel.last_cut is not None, input_data))
        everyone = [told[rank] for rank in self.parallel.world.ranks]
        if not everyone[0][0]:
            return everyone[0][1]
        return [one for _, given in everyone for one in (given if isinstance(given, list | tuple) else [given])]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if self.parallel is None:
            return super().reduce(tensor, reduction, scale)
        return pytree.tree_map_only(Tensor, lambda one: self._reduced(one, reduction) * scale, tensor)

    def _whole(self, tensor: Tensor) -> Tensor:
        pm = cast(Parallel, self.parallel)
        tensor = tensor if tensor.dim() else tensor[None]
        cut = pm.last_cut
        told = self._told((tensor.shape[0], -1 if cut is None else cut.mine))
        lengths, rows = zip(*(told[rank] for rank in pm.world.ranks), strict=True)
        each = {length // mine if mine else 1 for length, mine in zip(lengths, rows, strict=True) if length or mine}
        fits = all(not length % mine if mine else not length for length, mine in zip(lengths, rows, strict=True))
        if -1 in rows or (fits and len(each) == 1):
            return gather(tensor, pm)
        if len({length for length, _ in told}) == 1:
            one_by_one: Tensor = super().gather(tensor)
            return one_by_one
        raise InputError(
            f"processes gather tensors of {', '.join(map(str, lengths))} rows, and have "
            f"{', '.join(map(str, rows))} rows of the batch",
            where="Accelerator.gather",
            do="gather what has a row for each of the batch's, or a number",
        )

    def _reduced(self, tensor: Tensor, reduction: str) -> Tensor:
        pm = cast(Parallel, self.parallel)
        told = self._told((pm.last_cut is not None, tensor.tolist() if reduction == "mean" else None))
        is_cut, first = told[pm.world.ranks[0]]
        alike = {repr(told[rank][1]) for rank in pm.world.ranks}
        if reduction == "mean" and is_cut and len(alike) > 1:
            raise InputError(
                "a mean over processes is asked for, which have unequal numbers of rows",
                where="Accelerator.reduce(reduction='mean')",
                do="reduce sums and counts, or gather_for_metrics what the mean is of; a loss is global already",
            )
        if is_cut and reduction == "sum":
            summed: Tensor = super().reduce(tensor, reduction)
            return summed
        return torch.tensor(first, dtype=tensor.dtype, device=tensor.device) if reduction == "mean" else tensor

    def _told(self, mine: Any) -> list[Any]:
        told: list[Any] = [mine] * self.num_processes
        if self.num_processes > 1:
            dist.all_gather_object(told, mine, group=group_to_talk())
        return told

    # Saving

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Whole tensors. Every process calls it."""
        return full_state_dict(model) if isinstance(model, Parallel) else super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """What `accelerate` saves besides models, optimizers and schedulers, and these for any plan to resume from."""
        with self._without_pieces():
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        with self._without_pieces():
            super().load_state(input_dir, load_kwargs, **kwargs)

    @contextmanager
    def _without_pieces(self) -> Iterator[None]:
        """Inside, `accelerate` knows of nothing that is in pieces, and its hooks, once it has settled the folder, save
        and load that."""
        pm, optimizer, scheduler = self._in_pieces()
        lists = ("_models", "_optimizers", "_schedulers", "_dataloaders")
        before = {name: getattr(self, name) for name in lists}
        self.__dict__.update({name: [] for name in lists})

        def save(models: Any, weights: Any, folder: str) -> None:
            checkpoint.save(pm, optimizer, Path(folder) / _STATE, scheduler=scheduler, keep=1)

        def load(models: Any, folder: str) -> None:
            checkpoint.load(pm, optimizer, Path(folder) / _STATE, scheduler=scheduler)

        hooks = super().register_save_state_pre_hook(save), super().register_load_state_pre_hook(load)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.__dict__.update(before)

    def _in_pieces(self) -> tuple[Parallel, torch.optim.Optimizer | None, Any]:
        if self.parallel is None or len(self._optimizers) > 1 or len(self._schedulers) > 1:
            raise InputError(
                "no model was prepared"
                if self.parallel is None
                else f"{len(self._optimizers)} optimizers and {len(self._schedulers)} schedulers were prepared",
                where="Accelerator.save_state or load_state",
                do="prepare a model first"
                if self.parallel is None
                else "use lopsided.save_checkpoint and load_checkpoint, which take one of each",
            )
        optimizer = next((one.optimizer for one in self._optimizers), None)
        scheduler = next((one.scheduler for one in self._schedulers), None)
        return self.parallel, optimizer, scheduler

    def register_save_state_pre_hook(self, hook: Any) -> Any:
        raise _no_hooks("save")

    def register_load_state_pre_hook(self, hook: Any) -> Any:
        raise _no_hooks("load")

    def free_memory(self, *objects: Any) -> Any:
        self.parallel = None
        return super().free_memory(*objects)


def _no_hooks(what: str) -> InputError:
    return InputError(
        f"a hook of {what}_state is given models, and processes hold pieces of theirs",
        where=f"Accelerator.register_{what}_state_pre_hook",
        do="save what you need of accelerator.get_state_dict(model), which is whole, after save_state",
    )


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


class _Casting(Parallel):
    """A parallel model whose calls are under the accelerator's autocast, as those of models it prepares are."""

    casting: Callable[[], AbstractContextManager[Any]]

    @classmethod
    def of(cls, pm: Parallel, casting: Callable[[], AbstractContextManager[Any]]) -> _Casting:
        pm.__class__ = cls
        vars(pm)["casting"] = casting
        made: Any = pm
        return cast(_Casting, made)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.casting():
            output = super().forward(*args, **kwargs)
        # In training only what is looked at is brought here.
        return output if torch.is_grad_enabled() else convert_to_fp32(output)

    def _loss(self, output: object, *args: Any, **kwargs: Any) -> Tensor:
        with self.casting():
            return super()._loss(output, *args, **kwargs)
