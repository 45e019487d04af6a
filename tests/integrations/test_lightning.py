"""Lightning and Fabric on three unequal processes: losses, metrics and checkpoints of one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import LopsidedError
from lopsided.ir.placement import Shares
from tests.support.classifier import BATCH, NONE_FOR_ONE, SHARES, classifier, plan_for, samples
from tests.support.data import farthest, gap

pytest.importorskip("lightning")

Told = list[dict[str, float]]


def module_of(habit: str = "") -> Any:
    """A classifier as a LightningModule; with a habit of a step that can not be captured."""
    import lightning.pytorch as pl
    from torchmetrics.classification import MulticlassAccuracy

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = classifier()
            self.accuracy = MulticlassAccuracy(5, average="micro")
            self.kept: list[torch.Tensor] = []
            self.automatic_optimization = habit != "manual"

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch["x"])
            loss = F.cross_entropy(logits, batch["labels"])
            if habit == "index" and batch_idx % 2 == 0:
                loss = loss * 2
            if habit == "epoch":
                loss = loss * (1 + self.current_epoch)
            if habit == "append":
                self.kept.append(loss)
            self.log("train_loss", loss, prog_bar=True)
            self.log_dict({"size": logits.pow(2).mean(), "one": 1.0}, on_epoch=True)
            self.log("number", loss.item() * 2)
            return {"loss": loss, "logits": logits.detach()}

        def _evaluate(self, batch: Any, name: str) -> torch.Tensor:
            logits = self.net(batch["x"])
            loss = F.cross_entropy(logits, batch["labels"])
            self.accuracy(logits, batch["labels"])
            self.log(f"{name}_accuracy", self.accuracy)
            self.log(f"{name}_loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self._evaluate(batch, "val")

        def test_step(self, batch: Any) -> None:
            self.accuracy.update(self.net(batch["x"]), batch["labels"])
            self.log("test_accuracy", self.accuracy)

        def predict_step(self, batch: Any) -> torch.Tensor:
            return self.net(batch["x"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    return Lit()


def trainer_of(folder: str, plan: tuple[str, Shares] | None, **more: Any) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lopsided.integrations.lightning import LopsidedStrategy

    class Told(pl.Callback):
        def __init__(self) -> None:
            self.told: list[dict[str, float]] = []

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.told.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    how: dict[str, Any] = {"accelerator": "cpu", "logger": False, "max_epochs": 2, "num_sanity_val_steps": 1}
    how |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    how |= more
    how |= {"enable_progress_bar": False, "enable_model_summary": False}
    kept = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    if plan is None:
        return pl.Trainer(devices=1, callbacks=[Told(), kept], **how)
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # as torchrun has it
    batch = next(iter(DataLoader(samples(BATCH), batch_size=BATCH)))
    from lopsided.capturing.call import Arguments
    from lopsided.integrations.lightning_steps import Steps

    module = module_of()
    made = plan_for(Steps(module), Arguments((batch, "training_step", 2)), *plan)
    return pl.Trainer(devices=3, strategy=LopsidedStrategy(plan=made), callbacks=[Told(), kept], **how)


def loaders(each: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(samples(31), batch_size=each), DataLoader(samples(17), batch_size=each)


def trained(
    folder: str, plan: tuple[str, Shares] | None = None, resume: str | None = None
) -> tuple[Told, list[Any], dict[str, torch.Tensor], list[torch.Tensor]]:
    module = module_of()
    trainer = trainer_of(folder, plan)
    train, quiz = loaders(BATCH if plan is None else BATCH // 3)
    trainer.fit(module, train, quiz, ckpt_path=resume)
    scores = trainer.test(module, quiz, verbose=False)
    weights = type(module).load_from_checkpoint(f"{folder}/epoch=1.ckpt", weights_only=True).state_dict()
    return trainer.callbacks[0].told, scores, weights, trainer.predict(module, quiz)


@pytest.mark.parametrize(("how", "shares"), [("dp", SHARES), ("zero", NONE_FOR_ONE)], ids=["dp", "zero"])
def test_a_fit_is_that_of_one_device(
    one: WorkerPool, three: WorkerPool, tmp_path: Path, how: str, shares: Shares
) -> None:
    ((expected, scores, weights, predicted),) = one.run(trained, str(tmp_path / "one"))
    results = three.run(trained, str(tmp_path / "three"), (how, shares))
    for found, tested, saved, predictions in results:
        torch.testing.assert_close(predictions, predicted, atol=1e-5, rtol=0)
        assert gap(found, expected) < 1e-5
        assert gap(tested, scores) < 1e-6
        assert farthest(saved, weights) < 1e-5
    assert len(expected) == 6
    assert {"train_loss", "size_epoch", "number", "val_accuracy", "val_loss"} <= expected[-1].keys()
    assert [len(rows) for rows in predicted] == [12, 5]
    again = three.run(trained, str(tmp_path / "again"), (how, shares), str(tmp_path / "three" / "epoch=0.ckpt"))
    for found, _, saved, _ in again:
        assert max(abs(found[k]["train_loss"] - expected[3 + k]["train_loss"]) for k in range(3)) < 1e-5
        assert farthest(saved, weights) < 1e-5


def refused(folder: str, plain: str) -> list[str]:
    told = []
    for habit in ("index", "epoch", "append", "manual"):
        train, quiz = loaders(4)
        clip = {"gradient_clip_val": None, "accumulate_grad_batches": 1} if habit == "manual" else {}
        try:
            trainer_of(folder, ("dp", SHARES), **clip).fit(module_of(habit), train, quiz)
        except LopsidedError as error:
            told.append(str(error))
    for wrong in (
        lambda: trainer_of(folder, ("dp", SHARES)).test(module_of(), loaders(4)[1]),
        lambda: trainer_of(folder, ("dp", SHARES)).fit(module_of(), *loaders(4), ckpt_path=plain),
    ):
        try:
            wrong()
        except LopsidedError as error:
            told.append(str(error))
    return told


def test_what_can_not_be_captured_is_refused(one: WorkerPool, three: WorkerPool, tmp_path: Path) -> None:
    one.run(trained, str(tmp_path / "one"))
    expected = [
        "a step uses batch_idx",
        "a step uses the trainer's current_epoch",
        "a step adds to self.kept",
        "automatic_optimization is off",
        "test is called with a model that was not trained with this strategy",
        "the optimizer's state was saved on one device",
    ]
    for told in three.run(refused, str(tmp_path / "three"), str(tmp_path / "one" / "epoch=0.ckpt")):
        assert all(words in text for words, text in zip(expected, told, strict=True)), told


def fabricated(
    folder: str, plan: tuple[str, Shares] | None = None, outside: bool = False, resume: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The usual loop of Fabric, with accumulation, clipping and a checkpoint in the middle."""
    from lightning.fabric import Fabric

    from lopsided.integrations.fabric import FabricStrategy

    model = classifier()
    each, strategy = BATCH, {}
    if plan is not None:
        os.environ["TORCHELASTIC_RUN_ID"] = "tests"
        whole = next(iter(DataLoader(samples(BATCH), batch_size=BATCH)))
        batch = {"x": whole["x"]} if outside else whole
        each, strategy = BATCH // 3, {"strategy": FabricStrategy(batch, plan_for(classifier(), batch, *plan))}
    fabric = Fabric(accelerator="cpu", devices=1 if plan is None else 3, **strategy)
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(samples(48), batch_size=each))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume:
        fabric.load(f"{folder}/state", state)
    losses = []
    for k, batch in enumerate(loader):
        if resume and k < state["step"]:
            continue
        with fabric.no_backward_sync(model, enabled=k % 2 == 0) if plan else fabric.init_tensor():
            output = model(batch["x"]) if outside else model(**batch)
            loss = F.cross_entropy(output, batch["labels"]) if outside else output["loss"]
            fabric.backward(loss)
        losses.append(loss.item())
        if k % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
        if k == 1 and not resume:
            fabric.save(f"{folder}/state", state | {"step": 2})
    return losses, fabric.strategy.get_module_state_dict(model._forward_module)


@pytest.mark.parametrize("outside", [False, True], ids=["loss-inside", "loss-outside"])
def test_a_loop_of_fabric_is_that_of_one_device(
    one: WorkerPool, three: WorkerPool, tmp_path: Path, outside: bool
) -> None:
    ((expected, weights),) = one.run(fabricated, str(tmp_path / "one"), None, outside)
    for resume in (False, True):
        for losses, state in three.run(fabricated, str(tmp_path / "three"), ("zero", SHARES), outside, resume):
            assert losses == pytest.approx(expected[2:] if resume else expected, abs=1e-5)
            assert farthest(state, weights) < 1e-5
