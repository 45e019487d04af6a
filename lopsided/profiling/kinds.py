"""Ranks become kinds of devices: who is alike, what each is called, what they measured together.

In: of every rank where it sits (`RankHost`) and what it found (`Found`). Out: `Kind`s, in the order of the ranks.

Ranks that are neighbours, sit in one host, have the same hardware and differ by less than a tenth become one kind.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lopsided.cluster.coefficients import KIND, coefficient
from lopsided.cluster.devices import Kind, Measured
from lopsided.comm.backend_choice import NO_NCCL, Nccl, nccl_here
from lopsided.comm.recorder import hardware_of
from lopsided.profiling.noise import noise, typical
from lopsided.profiling.op_times import OpJob, Speeds

_ALIKE = 1.1


# Seats


@dataclass(frozen=True, slots=True)
class RankHost:
    """Where a process sits, and what it has there."""

    host: str
    boot: str  # machines may be called alike
    hardware: str
    gpu: str  # its serial number; "" for a CPU
    memory_bytes: int  # of the GPU or the host, what no other program holds
    speeds: Speeds
    host_bytes_per_s: float = 0.0  # between the GPU and its host's memory
    host_memory_bytes: int = 0  # what is left of the host's memory
    nccl: Nccl = NO_NCCL


def seat_of(device: torch.device, speeds: Speeds, host_bytes_per_s: float = 0.0) -> RankHost:
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text().strip() if boot.is_file() else ""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        serial = str(getattr(facts, "uuid", torch.cuda.current_device() if device.index is None else device.index))
        about = (platform.node(), identity, facts.name, serial, _free_on_gpu(device), speeds)
        return RankHost(*about, host_bytes_per_s, free_memory(), nccl_here())
    return RankHost(platform.node(), identity, hardware_of(device), "", free_memory(), speeds)


def _free_on_gpu(device: torch.device) -> int:
    """What no other program holds of a GPU: what is free, and what this process has taken of it."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + int(torch.cuda.memory_reserved(device))


def free_memory() -> int:
    """What this host, or the container around us, has left."""
    facts = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", facts.read_text() if facts.is_file() else "", re.MULTILINE)
    free = int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current")]
    if all(path.is_file() for path in limits):
        most, used = (path.read_text().strip() for path in limits)
        if most.isdigit() and used.isdigit():
            free = min(free, int(most) - int(used))
    return max(free, 2**20)


# What was found


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of a job, and how far, relatively, the same measured again might be. `backward_s` is None where nothing
    flows back."""

    forward_s: float
    backward_s: float | None
    noise: float = 0.0


Found = dict[tuple[str, float], Took]
"""By call and fraction."""

Turns = tuple[list[list[float]], list[list[float]]]
"""Forward and backward: times, turn by turn."""


def took(turns: Turns, wall_per_now: float = 1.0) -> Took:
    there, back = ([seconds for turn in way for seconds in turn] for way in turns)
    noises = [noise(way) for way in turns if any(way)]
    return Took(wall_per_now * typical(there), wall_per_now * typical(back) if back else None, statistics.fmean(noises))


def with_table(found: Found, table: Sequence[Measured]) -> Found:
    """What was found, with the seconds of a table that has been corrected. How noisy they are does not change."""
    now = dict(found)
    for entry in table:
        backward = dict(entry.backward)
        for fraction, seconds in entry.forward:
            key = (entry.call, fraction)
            now[key] = replace(found[key], forward_s=seconds, backward_s=backward.get(fraction))
    return now


# Kinds


def rank_kinds(seats: Sequence[RankHost], found: Sequence[Found]) -> tuple[Kind, ...]:
    """Every rank as a kind of its own, which has all that the rank measured."""
    return tuple(
        Kind(
            *(f"rank{rank}", "host", 1, 1, seat.speeds.flops_per_s, seat.speeds.bytes_per_s, seat.memory_bytes),
            seat.speeds.launch_s,
            measured=tuple(_table([own], list(own))),
        )
        for rank, (seat, own) in enumerate(zip(seats, found, strict=True))
    )


def kinds_of(
    seats: Sequence[RankHost],
    found: Sequence[Found],
    jobs: Sequence[OpJob],
    compute_slowdowns: Sequence[float],
    overheads: Sequence[float],
    contentions: Sequence[float] = (),
    reserves: Sequence[float] = (),
) -> tuple[Kind, ...]:
    """Runs of ranks that are alike. Without `contentions` nobody is taken to crowd anyone, and without `reserves` the
    usual part of memory is left free."""
    usual = coefficient(KIND, "memory_reserve").default or 0.0
    # Only what all have measured: else one device would be priced by a clock and another by an estimate.
    keys = [key for key in found[0] if all(key in table for table in found)]
    rates = paces(seats, found, jobs)
    runs: list[list[int]] = []
    for rank, seat in enumerate(seats):
        last = runs[-1] if runs else []
        with_me = [rates[member] for member in (*last, rank)]
        if last and _same_place(seats[last[0]], seat) and max(with_me) <= _ALIKE * min(with_me):
            last.append(rank)
        else:
            runs.append([rank])
    nodes = node_names(seats)
    names = _kind_names([(nodes[run[0]], _word(seats[run[0]]), rates[run[0]]) for run in runs])
    return tuple(
        Kind(
            name,
            nodes[run[0]],
            1,
            len(run),
            _mean_flops([seats[rank].speeds for rank in run]),
            statistics.fmean(seats[rank].speeds.bytes_per_s for rank in run),
            memory_of(seats[run[0]], seats),
            statistics.fmean(seats[rank].speeds.launch_s for rank in run),
            f"measured: {printable(seats[run[0]].hardware)}",
            tuple(_table([found[rank] for rank in run], keys)),
            statistics.fmean(compute_slowdowns[rank] for rank in run),
            statistics.fmean(overheads[rank] for rank in run),
            statistics.fmean(contentions[rank] for rank in run) if contentions else 1.0,
            max(reserves[rank] for rank in run) if reserves else usual,
            statistics.fmean(seats[rank].host_bytes_per_s for rank in run),
            min(seat.host_memory_bytes for seat in seats if _same_host(seat, seats[run[0]])) // 2**20 * 2**20,
        )
        for run, name in zip(runs, names, strict=True)
    )


def paces(seats: Sequence[RankHost], found: Sequence[Found], jobs: Sequence[OpJob]) -> list[float]:
    """One number of each to compare devices by: seconds of all that was measured, as often as the graph calls it."""
    common = [job for job in jobs if all(job.key in table for table in found)]
    if not common:
        return [1 / seat.speeds.flops_per_s[0][1] for seat in seats]
    return [
        sum(job.distinct.times * (table[job.key].forward_s + (table[job.key].backward_s or 0.0)) for job in common)
        for table in found
    ]


def _same_host(one: RankHost, other: RankHost) -> bool:
    return (one.host, one.boot) == (other.host, other.boot)


def _same_place(one: RankHost, other: RankHost) -> bool:
    return (one.host, one.boot, one.hardware, not one.gpu) == (other.host, other.boot, other.hardware, not other.gpu)


def _table(found: Sequence[Found], keys: Sequence[tuple[str, float]]) -> Iterator[Measured]:
    """The mean over the ranks of a kind."""
    fractions: dict[str, list[float]] = {}
    for text, fraction in keys:
        fractions.setdefault(text, []).append(fraction)
    for text, same in fractions.items():
        forward, backward = [], []
        for fraction in same:
            all_took = [table[text, fraction] for table in found]
            forward.append((fraction, statistics.fmean(one.forward_s for one in all_took)))
            back = [one.backward_s for one in all_took if one.backward_s is not None]
            if len(back) == len(all_took):
                backward.append((fraction, statistics.fmean(back)))
        yield Measured(text, tuple(forward), tuple(backward))


def _mean_flops(speeds: Sequence[Speeds]) -> tuple[tuple[str, float], ...]:
    dtypes = [dtype for dtype, _ in speeds[0].flops_per_s]
    return tuple((dtype, statistics.fmean(dict(one.flops_per_s)[dtype] for one in speeds)) for dtype in dtypes)


def chip_of(seat: RankHost) -> tuple[str, ...]:
    """What a process computes on. A chip's long number is its own, whatever its host is called: two may share one."""
    return (seat.gpu,) if len(seat.gpu) > 8 else (seat.host, seat.boot, seat.gpu)


def memory_of(seat: RankHost, seats: Sequence[RankHost]) -> int:
    """The memory of one process, to the MiB: those without a GPU share what their host has left, those on one GPU its
    memory."""
    same = [s for s in seats if chip_of(s) == chip_of(seat)]
    return max(min(s.memory_bytes for s in same) // len(same) // 2**20, 1) * 2**20


# Names


def node_names(seats: Sequence[RankHost]) -> list[str]:
    """The name of each rank's host; different hosts have different names."""
    known: dict[tuple[str, str], str] = {}
    for seat in seats:
        if (seat.host, seat.boot) not in known:
            name = re.sub(r"[^\w.-]+", "-", seat.host, flags=re.ASCII).strip("-.")[:80] or "host"
            taken = sum(other == name or other.startswith(f"{name}~") for other in known.values())
            known[seat.host, seat.boot] = f"{name}~{taken + 1}" if taken else name
    return [known[seat.host, seat.boot] for seat in seats]


def _word(seat: RankHost) -> str:
    """What people call the hardware: "NVIDIA GeForce RTX 2080 Ti" is an rtx-2080-ti."""
    if not seat.gpu:
        return "cpu"
    words = re.findall(r"[a-z0-9]+", seat.hardware.lower())
    telling = [word for word in words if word not in ("nvidia", "geforce", "tesla", "amd", "instinct", "graphics")]
    return "-".join(telling)[:60] or "gpu"


def _kind_names(runs: Sequence[tuple[str, str, float]]) -> list[str]:
    """Of each (node, hardware, pace): the hardware, and how fast it is among its like in the node."""
    names = []
    for node, word, pace in runs:
        like = sorted(other for where, what, other in runs if (where, what) == (node, word))
        classes = [like[0]]
        for other in like:
            if other > _ALIKE * classes[-1]:
                classes.append(other)
        mine = max(k for k, start in enumerate(classes) if start <= pace)
        labels = {1: [""], 2: ["-fast", "-slow"], 3: ["-fast", "-middle", "-slow"]}
        label = labels[len(classes)][mine] if len(classes) in labels else f"-speed{mine + 1}"
        names.append((node, word + label))
    counted = [names[:k].count(name) for k, name in enumerate(names)]
    return [name if not before else f"{name}-also{before}" for (_, name), before in zip(names, counted, strict=True)]


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)[:200]
