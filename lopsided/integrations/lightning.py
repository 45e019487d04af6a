"""Lightning on unequal devices: a strategy.

In: what a `lightning.pytorch.Trainer` trains, and a plan, a cluster, or neither. Out: losses, metrics and checkpoints
of one device with the global batch.

    from lopsided.integrations.lightning import LopsidedStrategy

    trainer = Trainer(strategy=LopsidedStrategy(plan="plan.json"), accelerator=..., devices=..., ...)

The global batch is the loader's batch size times the number of processes, as under DDP. The model is parallelized when
`fit` begins, with the first batch of the training loader: its `training_step` is what is captured and planned (see
`lightning_steps`), its other steps have programs of their own on the same pieces.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from lopsided.capturing.call import Arguments
from lopsided.cluster.cluster import Cluster
from lopsided.errors import CheckpointError, InputError
from lopsided.integrations.lightning_steps import Steps, replay, whole
from lopsided.integrations.preparing import first_batch, of_all_processes, random_numbers_untouched
from lopsided.planner.plan_data import Plan
from lopsided.runtime.calls.batches import ShardedLoader, shard
from lopsided.runtime.calls.call_form import HandedOut
from lopsided.runtime.checkpoint import checkpoint as pieces
from lopsided.runtime.checkpoint.state import full_state_dict, load_full_state_dict
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parallelizing import parallelize

# The LightningModule's name inside of `Steps`.
_MODULE = "lightning."
# The end of the name of the folder with the optimizer's state, beside a checkpoint.
_BESIDE = ".lopsided"


class LopsidedStrategy(DDPStrategy):  # type: ignore[misc]
    """`plan`, `cluster`, or neither: the devices are measured.

    `batch` is an example of the global batch, if that is not what the training loader gives; `parallel` has more
    arguments of `lopsided.parallelize`.
    """

    pm: Parallel | None = None

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        cluster: Cluster | str | Path | None = None,
        batch: object = None,
        parallel: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._how = {"plan": plan, "cluster": cluster, **(parallel or {})}
        self._example = batch
        self._rows = 0
        self._loaded: Path | None = None

    # The model

    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        self.accelerator.setup(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False  # rows are handed out by the plan
        # What steps log is of the whole batch.
        warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
        self.model = self.precision_plugin.convert_module(module)
        fits = trainer.state.fn == TrainerFn.FITTING
        if self.pm is None or self.pm.module.lightning is not module:
            if not fits:
                raise InputError(
                    f"{trainer.state.fn.value} is called with a model that was not trained with this strategy",
                    where="LopsidedStrategy",
                    do="evaluate with the trainer that fitted it, or on one device: "
                    "MyModule.load_from_checkpoint(path) and a Trainer without this strategy",
                )
            self.pm = self._parallelized(trainer, module)
        if fits:
            self.setup_optimizers(trainer)
            if len(self.optimizers) > 1:
                raise InputError(
                    f"configure_optimizers returns {len(self.optimizers)} optimizers",
                    where=type(module).__name__,
                    do="use one, with several groups of parameters",
                )
        self.setup_precision_plugin()

    def _parallelized(self, trainer: pl.Trainer, module: pl.LightningModule) -> Parallel:
        if not module.automatic_optimization:
            raise InputError(
                "automatic_optimization is off: a training_step that calls optimizers can not be captured",
                where=type(module).__name__,
                do="return the loss, or write the loop yourself with lopsided.parallelize (docs/training.md)",
            )
        with random_numbers_untouched():
            batch = self._example
            if batch is None:
                loader = _request_dataloader(trainer.fit_loop._data_source)
                if not isinstance(loader, DataLoader):
                    raise InputError(
                        f"the training loader is a {type(loader).__name__}, and what it gives is not known yet",
                        where="LopsidedStrategy",
                        do="give batch=, an example of the global batch",
                    )
                batch = first_batch(of_all_processes(loader, self.world_size))
            example = _plain(self.batch_to_device(batch))
            count = 2 if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else 1
            device = self.root_device if self.root_device.type != "cpu" else "cpu"
            options: dict[str, Any] = {"device": device, **self._how}
            module.train()
            with self.precision_plugin.train_step_context():
                call = Arguments((example, "training_step", count))
                pm = parallelize(Steps(module), call, **options)
        if len(pm.world.ranks) < pm.world.size:
            raise InputError(
                f"the plan uses {len(pm.world.ranks)} devices, and {pm.world.size} processes train",
                where="LopsidedStrategy",
                do=f"start {len(pm.world.ranks)} processes, or save the plan and use `lopsided run plan.json`",
            )
        for metric in module.modules():
            if hasattr(metric, "sync_on_compute"):
                metric.sync_on_compute = False  # every process gives it all rows
        return pm

    def model_to_device(self) -> None:
        """Only its pieces go there."""

    @property
    def _trained(self) -> Parallel:
        if self.pm is None:
            raise InputError("the model is not parallel yet", where="LopsidedStrategy", do="call trainer.fit first")
        return self.pm

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._step("training_step", *args, *kwargs.values())

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", *args, *kwargs.values())

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._step("test_step", *args, *kwargs.values())

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", *args, *kwargs.values())

    def _step(self, step: str, batch: Any, *others: Any) -> Any:
        pm, module = self._trained, self.lightning_module
        # Lightning sets the mode of the LightningModule, which is inside of these.
        pm.training = pm.module.training = module.training
        made = pm(_plain(batch), step, 1 + len(others), *others[1:])
        found = replay(module, pm, made, self._rows)
        # Predictions are handed on without their batch: nobody could tell whose rows they are.
        return whole(found, pm) if step == "predict_step" else found

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self._trained.no_sync():
            yield

    # Batches

    def process_dataloader(self, dataloader: Any) -> Any:
        pm = self._trained
        loader = of_all_processes(dataloader, self.world_size) if isinstance(dataloader, DataLoader) else dataloader
        if not isinstance(loader, Sized):
            raise InputError(
                f"a {type(loader).__name__} without a length would be asked for batches ahead of the step",
                where="LopsidedStrategy",
                do="give it a __len__, the number of its batches",
            )
        try:
            len(loader)
        except TypeError as error:
            raise InputError(
                f"a dataset has no length: {error}", where="LopsidedStrategy", do="give it a __len__"
            ) from error
        return _Batches(shard(cast(Any, loader), pm), self._hand_out)

    def _hand_out(self, batch: HandedOut) -> None:
        self._rows = batch.rows
        self._trained.handed_out(batch)

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {name.removeprefix(_MODULE): value for name, value in full_state_dict(self._trained).items()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state = {f"{_MODULE}{name}": value for name, value in checkpoint["state_dict"].items()}
        load_full_state_dict(self._trained, state if self.is_global_zero else None, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Tensor]:
        return {}  # it is in pieces, and has a folder of its own

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        folder = _beside(cast(Path, self._loaded))
        if not folder.is_dir():
            raise CheckpointError(
                "the optimizer's state was saved on one device, or under DDP",
                where=str(self._loaded),
                do="begin with its weights: MyModule.load_from_checkpoint(path), and fit without ckpt_path",
            )
        pieces.load(self._trained, self._bare_optimizer, folder)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint:
            pieces.save(self._trained, self._bare_optimizer, _beside(Path(filepath)), keep=1)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._loaded = Path(checkpoint_path).resolve()
        found: dict[str, Any] = super().load_checkpoint(
            checkpoint_path, weights_only=True if weights_only is None else weights_only
        )
        return found

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(Path(filepath)), ignore_errors=True)

    @property
    def _bare_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.optimizers[0]
        return cast(torch.optim.Optimizer, getattr(optimizer, "_optimizer", optimizer))

    def teardown(self) -> None:
        """Pieces stay where they are."""
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """It has arguments, and so no name."""


def _beside(path: Path) -> Path:
    return path.with_name(path.name + _BESIDE)


def _plain(batch: Any) -> Any:
    """A batch of tensors in tuples, lists and dicts; what hides tensors is refused."""
    if isinstance(batch, Mapping):
        return {name: _plain(part) for name, part in batch.items()}
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        return type(batch)(_plain(part) for part in batch)
    for leaf in pytree.tree_leaves(batch):
        if not isinstance(leaf, Tensor | bool | int | float | complex | str | None):
            raise InputError(
                f"the batch holds a {type(leaf).__name__}, and what is in it is not known",
                where="LopsidedStrategy",
                do="let the collate function give tensors in tuples, lists or dicts",
            )
    return batch


class _Batches:
    """This process's rows of global batches, as a loader with a length and a position."""

    def __init__(self, sharded: ShardedLoader, hand_out: Callable[[HandedOut], None]) -> None:
        self._sharded, self._hand_out = sharded, hand_out

    def __len__(self) -> int:
        return len(self._sharded)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._sharded:
            self._hand_out(self._sharded.handed_out)
            # Without rows it is made like the call that was planned, of which it is the first argument.
            yield batch.args[0] if isinstance(batch, Arguments) else batch

    def state_dict(self) -> dict[str, int]:
        return self._sharded.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        done = state["batches"] >= len(self)
        self._sharded.load_state_dict({**state, "epoch": state["epoch"] + 1, "batches": 0} if done else state)
