"""Is the old card worth adding? Describe two computers, plan a model on them, and read the answer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import lopsided

CLUSTER = """
name = "under-two-desks"

[[devices]]
name = "new"
node = "desk-1"
flops_per_s = { f32 = 20e12, bf16 = 60e12 }
bytes_per_s = 900e9
memory = "24 GiB"
launch_s = 8e-6

[[devices]]
name = "old"
node = "desk-2"
flops_per_s = { f32 = 5e12 }
bytes_per_s = 450e9
memory = "11 GiB"
launch_s = 1e-5

[links.between]          # what a cable carries, and how long the first byte takes
bytes_per_s = 1.2e9
latency_s = 5e-5
"""


class Classifier(nn.Module):
    """An ordinary model, written for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(
            *[layer for k in range(6) for layer in (nn.Conv2d(64 if k else 3, 64, 3, padding=1), nn.ReLU())]
        )
        self.decide = nn.Linear(64, 100)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.decide(self.look(images).mean((2, 3))), labels)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(CLUSTER)
        with torch.device("meta"):  # shapes are enough to plan
            model = Classifier()
            batch = {"images": torch.randn(256, 3, 64, 64), "labels": torch.zeros(256, dtype=torch.long)}
        plan = lopsided.plan(model, batch, file)
        lopsided.save_plan(plan, Path(folder) / "plan.json")  # `lopsided show plan.json` prints all of it
        again = lopsided.load_plan(Path(folder) / "plan.json")
    print(f"a step takes {plan.step_s * 1e3:.1f} ms; read back from its file it is the same plan: {again == plan}")
    for device in plan.cluster.device_names:
        without = dict(plan.without_device)[device]
        print(f"  {device:<14} does {plan.share_of(device):.0%} of the work; without it: {without * 1e3:.1f} ms")
    for baseline in plan.baselines:
        print(f"  {baseline.name:<7} {baseline.step_s * 1e3:6.1f} ms  {baseline.about}")


if __name__ == "__main__":
    main()
