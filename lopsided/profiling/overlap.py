"""What computing and sending cost each other when they run at the same time.

In: talkers, and how much to send. Out: `Beside`: this rank's drag, and the stretch of what is sent.

Collectives over gloo are carried by threads that need a processor, those over NCCL by some of the GPU's. Some
all_reduces are started one after the other, as a backward pass starts them, and blocks of computing run until all have
come through:

    drag    = computing lost / seconds the all_reduces took meanwhile
    stretch = seconds of one among them / seconds of one when all stand and wait for it

Who has more than one thread to carry with (gloo has two) gets several through in less than one after the other: where
computing leaves the threads alone, as on a GPU, stretch is less than one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from lopsided.cluster.cluster import LEAST_STRETCH, MOST_STRETCH
from lopsided.comm.communicator import Handle
from lopsided.profiling.links import Talkers
from lopsided.profiling.noise import typical

LARGEST_BYTES = 16 * 2**20
SMALLEST_BYTES = 2**20

_FEWEST, _MOST = 2, 16
_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Beside:
    """`drag` of this rank, from 0 to 1, and `stretch`, the same on all ranks."""

    drag: float
    stretch: float


def measure_beside(talkers: Talkers, size_bytes: int, budget_s: float) -> Beside:
    """All ranks call this. Rounds of both take turns, so that a busy moment falls on either."""
    council, wire, load = talkers.council, talkers.wire, talkers.load
    length = max(size_bytes // talkers.dtype.itemsize, 1)
    flats = [torch.zeros(length, dtype=talkers.dtype, device=talkers.device) for _ in range(_IN_A_ROW)]

    def begin(how_many: int) -> list[Handle]:
        load()
        council.gather()
        return [wire.all_reduce(flat, what="measuring", way="ring") for flat in flats[:how_many]]

    once = council.slowest(_alone(begin(1)[0], talkers.device))
    rounds = min(max(int(budget_s / ((3 + _IN_A_ROW) * once + 0.01)), _FEWEST), _MOST)
    alone, beside, drags = [], [], []
    for _ in range(rounds):
        alone.append(council.mean([_alone(begin(1)[0], talkers.device)])[0])
        block_s = _block(talkers, alone[-1])
        took, lost = _while_computing(begin(_IN_A_ROW), talkers, block_s)
        drags.append(lost)
        beside.append(council.mean([took])[0] / _IN_A_ROW)
    stretch = typical(beside) / typical(alone)
    return Beside(min(max(typical(drags), 0.0), 1.0), min(max(stretch, LEAST_STRETCH), MOST_STRETCH))


def _alone(handle: Handle, device: torch.device) -> float:
    started = time.perf_counter()
    handle.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _block(talkers: Talkers, lasting_s: float) -> float:
    """Seconds of a block, all ranks computing and nothing being sent."""
    talkers.council.gather()
    blocks, started, passed = 0, time.perf_counter(), 0.0
    while passed < lasting_s or blocks < 2:
        talkers.load()
        blocks += 1
        passed = time.perf_counter() - started
    return passed / blocks


def _while_computing(handles: Sequence[Handle], talkers: Talkers, block_s: float) -> tuple[float, float]:
    """Seconds of the collectives, and which part of them computing lost."""
    landed = threading.Event()
    started, ended = time.perf_counter(), 0.0

    def land() -> None:
        nonlocal ended
        with _own_stream(talkers.device):
            for handle in handles:
                handle.wait()
            if talkers.device.type == "cuda":
                torch.cuda.current_stream(talkers.device).synchronize()
        ended = time.perf_counter()
        landed.set()

    waiting = threading.Thread(target=land, name="lopsided-landing", daemon=True)
    waiting.start()
    blocks = 0
    while not landed.is_set():
        talkers.load()
        blocks += 1
    passed = time.perf_counter() - started
    waiting.join()
    took = max(ended - started, 1e-9)
    return took, (passed - blocks * block_s) / took


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Waiting for NCCL makes a stream wait: not the one that computes."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
