"""Who takes part: local workers of honestly unequal speed, by what the machine has.

In: nothing. Out: `Setting`: a device for each worker, the cores it is pinned to, and words for both.

Without a GPU one worker has a core to itself and two share another, so that they are about half as fast: nobody is
slowed down on purpose, and no rights are needed.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from lopsided.demo.contest import Size

_MOST_GPUS = 8
_WORKERS = 3
# Few samples a step, so that what is sent and what the optimizer does matter beside what is computed.
_ON_CORES = Size(layers=2, width=768, heads=24, seq=16, batch=12)
_ON_GPUS = Size(layers=4, width=768, heads=12, seq=256, batch=96)


@dataclass(frozen=True, slots=True)
class Setting:
    """`devices` has an entry for each worker, and so have `cores`, unless nobody is pinned."""

    devices: tuple[str, ...]
    cores: tuple[tuple[int, ...], ...] | None
    about: str
    size: Size


def find_setting() -> Setting:
    """What this machine allows."""
    gpus = min(torch.cuda.device_count(), _MOST_GPUS)
    if gpus:
        return _on_gpus([torch.cuda.get_device_name(k) for k in range(gpus)])
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return on_cores(allowed, _siblings(allowed[0]) if allowed else ())


def on_cores(allowed: list[int], siblings: Collection[int]) -> Setting:
    """Three workers on these cores; `siblings` are threads of the first one's core."""
    devices = ("cpu",) * _WORKERS
    if not allowed:
        about = "three workers that go where the system puts them: it cannot pin them to cores"
        return Setting(devices, None, about, _ON_CORES)
    first, *others = allowed
    if not others:
        about = f"one core ({first}), which all three workers share: they are about equally fast"
        return Setting(devices, ((first,),) * _WORKERS, about, _ON_CORES)
    second = next((core for core in others if core not in siblings), others[0])
    about = f"two cores: worker 0 has core {first} to itself, workers 1 and 2 share core {second}"
    return Setting(devices, ((first,), (second,), (second,)), about, _ON_CORES)


def _on_gpus(names: list[str]) -> Setting:
    if len(names) == 1:
        about = f"one GPU ({names[0]}), which three workers share over gloo: they are about equally fast"
        return Setting(("cuda:0",) * _WORKERS, None, about, _ON_GPUS)
    kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    return Setting(tuple(f"cuda:{k}" for k in range(len(names))), None, f"one worker a GPU: {kinds}", _ON_GPUS)


def _siblings(core: int) -> tuple[int, ...]:
    """Which others are threads of the same core: two of them are not as fast as two cores."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    found: list[int] = []
    for part in path.read_text().strip().split(",") if path.is_file() else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
