"""A step of this tree beside a step of another one, such as the last release. Writes results/versions.json.

python benchmarks/versions.py CHECKOUT [--rounds 21] [--steps 10] [--only alone,equal,stored]

CHECKOUT is a folder with another version of the project, as `git worktree add CHECKOUT COMMIT` makes it. Both versions
train the same models in processes of their own, which live as long as the comparison does and take turns: a block of
steps of one, then of the other, in an order that is shuffled in each round. What counts is the ratio of the two within
a round, of these the median, with the middle half as spread; of the clock and, since machines do other things too, of
the processor's seconds.

    alone     a small GPT, and one of many small calls, on one device
    equal     the same on two devices that are alike and well connected: data parallelism
    stored    two devices with so little memory that parameters are stored cut and gathered for use

This file is what the processes run as well (`--serve`), on nothing but torch and what `lopsided` exports, so that it
runs on versions whose modules lie elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).parents[1]
WARM_UP = 3
CASES: dict[str, tuple[str, int, dict[str, int]]] = {
    "alone, many small calls": ("alone", 1, {"layers": 8, "width": 32, "batch": 4, "seq": 16}),
    "alone": ("alone", 1, {"layers": 4, "width": 192, "batch": 8, "seq": 64}),
    "equal": ("equal", 2, {"layers": 4, "width": 128, "batch": 8, "seq": 64}),
    "stored": ("stored", 2, {"layers": 4, "width": 128, "batch": 8, "seq": 64}),
}
"""By name: which memory devices have, how many processes, and the sizes of the model."""

MEMORY = {"alone": 2**34, "equal": 2**34, "stored": 0}  # bytes; 0: three quarters of what parameters and state take


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        batch, seq, width = h.shape
        q, k, v = self.qkv(self.norm_1(h)).view(batch, seq, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return h + self.down(functional.gelu(self.up(self.norm_2(h))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, width), nn.Linear(width, 512)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h)
        return functional.cross_entropy(self.head(h).flatten(0, 1), target.flatten())


def cluster_text(memory: str, devices: int, parameter_bytes: int) -> str:
    """A cluster file for devices that are alike and well connected."""
    size = MEMORY[memory] or int(4 * parameter_bytes * 0.75) + 48 * 2**20
    return f"""name = "{memory}"
[[devices]]
name = "cpu"
node = "box"
count = {devices}
flops_per_s = {{ f32 = 2e9 }}
bytes_per_s = 2e9
memory = "{size} B"
launch_s = 1e-5
[links.within]
latency_s = 1e-5
bytes_per_s = 1e10
"""


def serve(case: str, folder: str) -> None:
    """Train, a block for every number of steps that comes in, and tell what each took."""
    memory, devices, sizes = CASES[case]
    torch.set_num_threads(1)
    import lopsided

    torch.manual_seed(0)
    model = Model(sizes["layers"], sizes["width"])
    shape = (sizes["batch"], sizes["seq"])
    batch = {"ids": torch.randint(0, 512, shape), "target": torch.randint(0, 512, shape)}
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    path = Path(folder) / f"cluster-{os.environ.get('RANK', '0')}.toml"
    path.write_text(cluster_text(memory, devices, held))
    plan = lopsided.plan(model, batch, lopsided.load_cluster(path))
    pm = lopsided.parallelize(model, batch, plan=plan)
    opt = torch.optim.AdamW(pm.parameters(), lr=1e-4)
    loss = torch.zeros(())

    def block(steps: int) -> tuple[float, float]:
        wall, used = time.perf_counter(), time.process_time()
        nonlocal loss
        for _ in range(steps):
            loss = pm(**batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
        return (time.perf_counter() - wall) / steps, (time.process_time() - used) / steps

    block(WARM_UP)
    stored = sum("@state" in str(placement) for _, placement in plan.program.leaves)
    print(json.dumps({"stored_cut": stored, "devices": len(plan.devices), "predicted_s": plan.step_s}), flush=True)
    for line in sys.stdin:
        print(json.dumps([*block(int(line)), float(loss.detach())]), flush=True)


class Side:
    """The processes of one version."""

    def __init__(self, checkout: Path, case: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = CASES[case][1]
        self.folder = tempfile.TemporaryDirectory()
        about = {"PYTHONPATH": str(checkout), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        about |= {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "LOPSIDED_CACHE": "0"}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", case, self.folder.name]
        self.ranks = [
            subprocess.Popen(
                command,
                cwd=self.folder.name,
                env={**os.environ, **about, "RANK": str(k), "LOCAL_RANK": str(k), "LOCAL_WORLD_SIZE": str(world)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for k in range(world)
        ]
        self.told, *_ = [self._read(rank) for rank in self.ranks]

    def _read(self, rank: subprocess.Popen[str]) -> Any:
        assert rank.stdout is not None
        while line := rank.stdout.readline():
            if line.startswith(("{", "[")):
                return json.loads(line)
        raise SystemExit("a process ended before it had trained; what it said is above")

    def block(self, steps: int) -> tuple[float, float, float]:
        """Seconds of a step by the clock, of all processors, and the loss."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        found = [self._read(rank) for rank in self.ranks]
        return max(one[0] for one in found), sum(one[1] for one in found), found[0][2]

    def close(self) -> None:
        for rank in reversed(self.ranks):  # the first has the store, which the others talk to until they end
            assert rank.stdin is not None
            rank.stdin.close()
            rank.wait(60)
        self.folder.cleanup()


def compared(case: str, other: Path, rounds: int, steps: int) -> dict[str, Any]:
    sides = {"this": Side(ROOT, case), "other": Side(other, case)}
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
    order = random.Random(case)
    for _ in range(rounds):
        for name in order.sample(sorted(sides), len(sides)):
            seen[name].append(sides[name].block(steps))
    plans = {name: side.told for name, side in sides.items()}
    for side in sides.values():
        side.close()
    told: dict[str, Any] = {"case": case, "plans": plans, "rounds": seen}
    for k, what in enumerate(("clock", "processor")):
        ratios = sorted(a[k] / b[k] for a, b in zip(seen["this"], seen["other"], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        told[what] = {"ratio": middle, "low": low, "high": high}
    told["same_losses"] = max(abs(a[2] / b[2] - 1) for a, b in zip(seen["this"], seen["other"], strict=True))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", help="a folder with another version")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--only", default="", help="cases whose names begin so, with commas between")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(*given.serve)
        return
    if given.checkout is None or not (given.checkout / "lopsided" / "__init__.py").is_file():
        raise SystemExit("name a folder with another version: git worktree add FOLDER COMMIT makes one")
    import record

    where = given.checkout.resolve()
    commit = subprocess.run(["git", "-C", str(where), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    wanted = [case for case in CASES if case.startswith(tuple(given.only.split(",")))]
    rows = []
    for case in wanted:
        row = compared(case, where, given.rounds, given.steps)
        rows.append(row)
        for what in ("clock", "processor"):
            r = row[what]
            print(f"{case:26} {what:9}  {r['ratio']:.3f} of before  ({r['low']:.3f} to {r['high']:.3f})", flush=True)
        print(f"{'':26} losses apart by {row['same_losses']:.1e}; {row['plans']}")
    record.write("versions", {"other": commit.stdout.strip(), "steps": given.steps, "rows": rows})


if __name__ == "__main__":
    main()
