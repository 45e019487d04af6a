"""Train on devices that are not alike: the loop is the one you know.

    torchrun --nproc-per-node 2 examples/05_train.py            # the processes are measured and a plan is made
    lopsided run plan.json examples/05_train.py                 # by a plan

Run alone (`python examples/05_train.py`) it trains on one device.
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lopsided

BATCH = 24  # of all devices together


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), target)


def main(folder: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 32)
    data = TensorDataset(x, x[:, :10].argmax(1))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)

    pm = lopsided.parallelize(Net(), (x[:BATCH], data.tensors[1][:BATCH]), measure_s=3)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    batches = lopsided.shard(loader, pm)  # each rank loads its own rows only
    for epoch in range(4):
        for inputs, target in batches:
            loss = pm(inputs, target)  # the loss of the whole batch, on every rank
            loss.backward()
            lopsided.clip_grad_norm_(pm, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if pm.world.rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    lopsided.save_checkpoint(pm, optimizer, folder, loader=batches)
    if pm.world.rank == 0:
        each = zip(pm.plan.devices, pm.plan.shares, strict=True)
        shares = ", ".join(f"{device} {share:.0%}" for device, share in each)
        print(f"step {pm.steps_done} saved; shares: {shares}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
