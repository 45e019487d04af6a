"""Where checkpoints lie that are kept in main memory: one folder a node, which outlives the processes that write there.

In: the folder of a run's checkpoints. Out: a folder in memory for it, and what is in it.

    /dev/shm/lopsided-0/4026531836-77-1234/5c0e.../step-00000010/rank-00003.safetensors    what rank 3 alone holds
                                                                 whole-00003.safetensors   what all hold, rank 3's part
                                                                 rank-00003.json ...       what is in each

The second name is that of the process which started this one (torchrun's agent): what lies there is for those that it
starts next, and is removed with it. A node has its own ranks' files and those of which it keeps copies, so a folder is
no checkpoint by itself. Only its user can write there: who else made such a folder before is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lopsided.codec import FileKind, Place, Whole, parse_json, read_text
from lopsided.errors import CheckpointError, DamagedError
from lopsided.profiling.kinds import free_memory
from lopsided.runtime.checkpoint.folder import Digest, Dtype, Sizes, Stored, Training, steps_in, write_file, written
from lopsided.runtime.checkpoint.storage import Held, chunk_entry
from lopsided.runtime.checkpoint.tensor_file import TensorEntry, digest_of_file, write_tensors

MEMORY = Path("/dev/shm")

FORMAT, VERSION = "lopsided-part", 1
_PART_FILE = FileKind(
    DamagedError,
    "part of a checkpoint in memory",
    "lopsided.Checkpoints(keep_copies=) makes one",
    format=FORMAT,
    version=VERSION,
    most_bytes=512 * 2**20,
    do="go on from the last checkpoint",
)


# Folders


def home_of(folder: Path) -> Path:
    """Where the processes of this node keep what belongs to this folder of checkpoints."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    starter = multiprocessing.parent_process()  # of a process that a server has forked, who asked for it
    return _of_user() / _name_of(os.getppid() if starter is None or starter.pid is None else starter.pid) / digest


def open_home(folder: Path) -> Path:
    """The same, made where it is missing. What processes that are gone have left there is removed."""
    if not MEMORY.is_dir():
        raise CheckpointError(
            f"there is no file system in memory at {MEMORY}",
            where="keep_copies",
            do="leave keep_copies out: checkpoints are on the disk then",
        )
    user, home = _of_user(), home_of(folder)
    user.mkdir(mode=0o700, exist_ok=True)
    if user.is_symlink() or user.stat().st_uid != os.getuid() or user.stat().st_mode & 0o077:
        raise CheckpointError(
            "this folder is not this user's alone", where=str(user), do="remove it, or leave keep_copies out"
        )
    namespace = _name_of(os.getpid()).split("-")[0]
    for left in user.iterdir():
        space, number, _ = (*left.name.split("-"), "", "")[:3]
        if space == namespace and number.isdecimal() and _name_of(int(number)) != left.name:
            shutil.rmtree(left, ignore_errors=True)
    home.mkdir(parents=True, exist_ok=True)
    return home


def kept_for_children() -> Path:
    """What processes keep that this one started: to be removed when it ends."""
    return _of_user() / _name_of(os.getpid())


def _of_user() -> Path:
    return MEMORY / f"lopsided-{os.getuid()}"


def _name_of(process: int) -> str:
    """A process, told from others that had its number before or have it in another container."""
    began, space = "0", "0"
    with contextlib.suppress(OSError, IndexError):
        space = os.stat("/proc/self/ns/pid").st_ino.__str__()
        began = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{space}-{process}-{began}"


def room_in(home: Path) -> int:
    """How many bytes may lie there, those that do now among them."""
    found = os.statvfs(MEMORY)
    return min(found.f_bavail * found.f_frsize, free_memory()) + bytes_in(home)


def bytes_in(home: Path) -> int:
    return sum(path.stat().st_size for path in home.glob("*step-*/*") if path.is_file())


# What is in them


@dataclass(frozen=True, slots=True)
class Fragment:
    """A tensor as far as one file has it."""

    dtype: Dtype
    shape: Sizes
    chunks: tuple[Stored, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """What one rank has of a checkpoint that is called `made`: the same on all parts that belong together."""

    format: str = FORMAT
    version: int = VERSION
    made: str
    step: Whole
    digest: Digest
    tensors: Mapping[str, Fragment]
    training: Training


def write_part(folder: Path, name: str, held: Mapping[str, Held], made: str, training: Training) -> None:
    file = f"{name}.safetensors"
    boxes, entries, tensors = {}, list[TensorEntry](), {}
    for key, each in held.items():
        stored = []
        for chunk, box in zip(each.chunks, each.boxes, strict=True):
            entry = chunk_entry(key, each.shape, each.dtype, chunk)
            entries.append(entry)
            boxes[entry.key] = box
            stored.append(Stored(chunk.offsets, chunk.sizes, file, entry.key))
        if stored:
            tensors[key] = Fragment(each.dtype, each.shape, tuple(stored))
    digest = write_tensors(folder / file, entries, boxes.__getitem__)
    part = MemoryPart(made=made, step=training.step, digest=digest, tensors=tensors, training=training)
    write_file(folder / f"{name}.json", part)


def parts_in(home: Path, number: int, of: int) -> Iterator[tuple[str, MemoryPart]]:
    """The parts that are as they were written; one process of several on this node looks at every so manieth."""
    paths = [path for step in steps_in(home) for path in sorted(written(home, step).glob("*.json"))]
    for path in paths[number::of]:
        with contextlib.suppress(DamagedError, OSError):
            part = parse_json(MemoryPart, read_text(path, _PART_FILE), Place(_PART_FILE, str(path)))
            if digest_of_file(path.with_suffix(".safetensors")) == part.digest:
                yield path.stem, part
