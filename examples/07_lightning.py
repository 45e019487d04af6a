"""Lightning on devices that are not alike: one argument more.

    torchrun --nproc-per-node 2 examples/07_lightning.py        # the processes are measured and a plan is made

For so small a model the plan may use one device alone: the strategy then says how many processes to start. Run alone
(`python examples/07_lightning.py`) it trains on one device. Needs `pip install lopsided[lightning]`.
"""

import os
import tempfile
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lopsided.integrations.lightning import LopsidedStrategy

warnings.filterwarnings("ignore", module="lightning")  # of loader workers and log intervals


class Classifier(pl.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        loss = nn.functional.cross_entropy(self.layers(x), target)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, target = batch
        self.accuracy(self.layers(x), target)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: str) -> None:
    pl.seed_everything(0, verbose=False)
    x = torch.randn(240, 32)
    data = TensorDataset(x, x[:, :10].argmax(1))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        strategy=LopsidedStrategy(parallel={"measure_s": 3}),  # or plan="plan.json", or cluster="cluster.toml"
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=processes // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=4,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(folder, filename="last")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # The batch size of a process: times their number it is the global one, as under DDP.
    trainer.fit(
        Classifier(), DataLoader(data, 24 // processes, shuffle=True), DataLoader(data, 24 // processes, shuffle=False)
    )
    if trainer.is_global_zero:
        found = {name: round(float(value), 3) for name, value in trainer.callback_metrics.items()}
        print(f"{found}; saved to {folder}")
        print(Classifier.load_from_checkpoint(f"{folder}/last.ckpt", weights_only=True).device)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
