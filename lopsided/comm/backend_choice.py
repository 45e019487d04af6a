"""Which backend processes talk over: NCCL among GPUs, where it takes them all, and gloo otherwise.

In: what every process tells of its GPU (`chips`, "" for none) and of its NCCL (`Nccl`). Out: `BackendChoice`, the same
on every process, with why it is not NCCL.

NCCL refuses two processes on one GPU, unless it is version 2.30 or later and told by NCCL_MULTI_RANK_GPU_ENABLE=1 to
take them. What counts is the library that is loaded: another may have been preloaded than torch was built with, and
`torch.cuda.nccl.version()` tells the one it was built with.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

SHARING = (2, 30)
"""The first version of NCCL that takes several processes on one GPU."""
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_LIBRARY = "libnccl.so.2"

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nccl:
    """What a process has of NCCL: the version that is loaded, () for none, and whether it may share its GPU."""

    version: Version = ()
    may_share: bool = False


NO_NCCL = Nccl()


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """`why` it is not NCCL, where processes have GPUs; else ""."""

    name: str
    why: str = ""


def nccl_here() -> Nccl:
    """Of this process."""
    if not dist.is_nccl_available():
        return NO_NCCL
    version = loaded_version() or tuple(torch.cuda.nccl.version())[:3]
    return Nccl(version, os.environ.get(SHARING_VARIABLE) == "1")


def loaded_version() -> Version:
    """Of the shared library in this process; () if NCCL is not one, or not there."""
    try:
        # Only if it is loaded already: this must not load another beside torch's own.
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        number = ctypes.c_int()
        failed = library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ()
    return () if failed else _parts(number.value)


def _parts(number: int) -> Version:
    """
    >>> _parts(23007), _parts(2809)
    ((2, 30, 7), (2, 8, 9))
    """
    major, rest = divmod(number, 10_000 if number >= 10_000 else 1000)
    return (major, *divmod(rest, 100))


def choose_backend(chips: Sequence[Hashable], nccl: Sequence[Nccl]) -> BackendChoice:
    """For processes on these chips, each with this NCCL."""
    on = [chip for chip in chips if chip]
    if not on:
        return BackendChoice("gloo")
    if len(on) < len(chips):
        return BackendChoice("gloo", f"{len(chips) - len(on)} of {len(chips)} processes have no GPU")
    if not all(one.version for one in nccl):
        return BackendChoice("gloo", "torch was built without NCCL")
    together = max(Counter(on).values())
    if together == 1:
        return BackendChoice("nccl")
    oldest = min(one.version for one in nccl)
    if oldest < SHARING:
        needed, found = ".".join(map(str, SHARING)), ".".join(map(str, oldest))
        why = f"NCCL takes several from version {needed} on, and {found} is loaded"
    elif not all(one.may_share for one in nccl):
        why = f"NCCL takes several only with {SHARING_VARIABLE}=1"
    else:
        return BackendChoice("nccl")
    return BackendChoice("gloo", f"{together} processes share a GPU, and {why}")
