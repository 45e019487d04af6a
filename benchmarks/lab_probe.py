"""Measures the lab it runs in: how fast every host computes, and every link carries. Started by `lab.py --check`.

In: nothing but the process group that torchrun describes. Out: one line of JSON from rank 0. The one idea: all hosts
compute at the same time, as they will in training; links are measured one pair after the other, and then all at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from typing import Any

import lab
import torch
import torch.distributed as dist
from torch import Tensor

SHORT_S, LONG_S = 0.003, 0.03
PINGS, SMALLS, BULKS, REDUCES = 20, 8, 4, 4
SMALL_BYTES = 100_000
TOKENS, WIDTHS = (262_144, 133_120, 78_592), (512, 768, 1536, 2048)
SETTLE_S = 0.05
"""A few periods of the quota, so that what was used up in getting ready is not missed in what follows."""


class Product:
    """A matrix product, done again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size = 192 if device.type == "cpu" else 4096
        self._left = torch.randn(size, size, device=device)
        self.seconds(3)

    def seconds(self, times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            self._left @ self._left
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    def times_in(self, target_s: float) -> int:
        """How many fill about `target_s`, here and now."""
        return max(1, round(4 * target_s / min(self.seconds(4) for _ in range(20))))

    def speed(self, times: int, for_s: float) -> dict[str, float]:
        """Products per second in blocks of `times`, and how the seconds of a block vary, as a part of their mean."""
        blocks: list[float] = []
        until = time.perf_counter() + for_s
        while time.perf_counter() < until:
            blocks.append(self.seconds(times))
        mean_s = statistics.fmean(blocks)
        return {"per_s": times / mean_s, "block_s": mean_s, "variation": statistics.pstdev(blocks) / mean_s}


def worst_error(device: torch.device) -> float:
    """How far products of bf16 are from those of float32, of what a layer's weights get from many tokens.

    The libraries choose kernels by the multiprocessors a process has, and not all of them are right on every part.
    """
    torch.manual_seed(0)
    worst = 0.0
    for tokens in TOKENS:
        for width in WIDTHS:
            left, right = (torch.randn(tokens, size, device=device).bfloat16() for size in (width, WIDTHS[0]))
            wanted = left.float().T @ right.float()
            off = float((left.T @ right - wanted).norm() / wanted.norm())
            worst = max(worst, off if off == off else float("inf"))
    return worst


def transfers_s(source: int, target: int, data: Tensor, times: int) -> list[float]:
    """Seconds of `data` from one rank to another and a short answer back. Only the source knows them."""
    rank, answer = dist.get_rank(), torch.zeros(8, dtype=torch.uint8)
    found: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        if rank == source:
            dist.send(data, target)
            dist.recv(answer, target)
        elif rank == target:
            dist.recv(data, source)
            dist.send(answer, source)
        found.append(time.perf_counter() - began)
    return found


def from_all(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def hosts(device: torch.device, for_s: float) -> list[Any]:
    """Every host at full speed with nobody beside, then all of them together at the speeds they were given."""
    mine: dict[str, Any] = {}
    rank, product = dist.get_rank(), Product(device)
    lengths = {"short": SHORT_S, "long": LONG_S}
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == rank:
            times = {name: product.times_in(length) for name, length in lengths.items()}
            mine["alone"] = product.speed(times["long"], 0.6)
            if device.type == "cuda":
                mine["off"] = worst_error(device)
    lab.start_line(rank)
    for name in lengths:
        dist.barrier()
        mine[name] = product.speed(times[name], for_s)
    return from_all(mine)


def links(size: int) -> list[dict[str, float]]:
    """Every pair of ranks, both ways."""
    blank = {
        name: torch.zeros(n, dtype=torch.uint8) for name, n in (("ping", 8), ("small", SMALL_BYTES), ("bulk", size))
    }
    found = []
    for source in range(dist.get_world_size()):
        for target in range(dist.get_world_size()):
            if source == target:
                continue
            seconds = {}
            for name, times in (("ping", PINGS), ("small", SMALLS), ("bulk", BULKS)):
                dist.barrier()
                time.sleep(SETTLE_S)
                seconds[name] = statistics.median(transfers_s(source, target, blank[name], times))
            seconds = from_all(seconds)[source]
            rates = {f"{name}_mbit": blank[name].nbytes * 8e-6 / seconds[name] for name in ("small", "bulk")}
            found.append({"from": source, "to": target, "round_trip_s": seconds["ping"], **rates})
    return found


def all_reduces_s(size: int) -> list[float]:
    numbers, found = torch.zeros(size // 4), []
    for _ in range(REDUCES):
        dist.barrier()
        time.sleep(SETTLE_S)
        began = time.perf_counter()
        dist.all_reduce(numbers)
        found.append(time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0, help="how long hosts compute")
    parser.add_argument("--bytes", type=int, default=4_000_000, help="the size of a transfer; 0 leaves links out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(os.environ.get("LOPSIDED_DEVICE", "cpu"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found: dict[str, Any] = {"hosts": hosts(device, options.seconds), "bytes": options.bytes}
    if options.bytes:
        found |= {"links": links(options.bytes), "all_reduces_s": all_reduces_s(options.bytes)}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
