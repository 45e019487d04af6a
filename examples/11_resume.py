"""A run stops, and goes on by another plan: a checkpoint belongs to no cluster and to no number of processes.

    torchrun --nproc-per-node 2 examples/11_resume.py runs 2    # trains two epochs, saves, stops
    python examples/11_resume.py runs 4                         # goes on to the fourth, on one device

Run alone (`python examples/11_resume.py`) it does both in a folder of its own.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lopsided

BATCH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), target)


def train(folder: str, epochs: int) -> None:
    """Up to so many epochs in all, from the last checkpoint where there is one."""
    torch.manual_seed(0)
    x = torch.randn(160, 8)
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)

    batch = (x[:BATCH], data.tensors[1][:BATCH])
    pm = lopsided.parallelize(Net(), batch, measure_s=2)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    batches = lopsided.shard(loader, pm)
    if any(Path(folder).glob("step-*")):
        lopsided.load_checkpoint(pm, optimizer, folder, loader=batches)
        if pm.world.rank == 0:
            print(f"goes on from step {pm.steps_done}, on {len(pm.world.ranks)} devices")
    while batches.epoch < epochs:
        for inputs, target in batches:
            loss = pm(inputs, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        lopsided.save_checkpoint(pm, optimizer, folder, loader=batches, keep=2)
        if pm.world.rank == 0:
            print(f"epoch {batches.epoch}, step {pm.steps_done}: loss {loss.item():.3f}")
    pm.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            train(folder, 2)
            train(folder, 4)
