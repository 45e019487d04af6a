"""The folder of a run's checkpoints: which are complete, how one gets its name, what a crash left, and its JSON files.

In: a folder. Out: the checkpoints in it. One that has a name is complete: it gets it when all of it is on disk. Its
files may come from strangers, whose table of tensors can only be refused: every name is that of a plain file in the
folder, the chunks of a tensor lie side by side along one dim and fill it, and the files are as large as what they are
said to hold. What optimizers, schedulers and loaders say of themselves is JSON, and the same values back: tuples,
counters and numbers that are not finite too, each marked by the one key "~".
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from lopsided.codec import FileKind, Key, Place, Whole, encode, parse_json, read_text
from lopsided.errors import CheckpointError, DamagedError, shown
from lopsided.runtime.checkpoint.tensor_file import DTYPES, NAMES, digest_of_file

FORMAT, VERSION = "lopsided-checkpoint", 1
TABLE, TRAINING = "metadata.json", "training.json"
CHECKPOINT_FILE = FileKind(
    DamagedError,
    "checkpoint",
    "lopsided.save_checkpoint makes one",
    format=FORMAT,
    version=VERSION,
    most_bytes=512 * 2**20,
    do="use a checkpoint that was saved by this library and not changed",
)

_NAME = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"\.step-\d{8,}\.(partial|removed)")
_SET_ASIDE = re.compile(r"\.(step-\d{8,})\.replaced")
_FILE = re.compile(r"(rank|whole)-\d{5,7}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_DIMS, _MOST_ELEMENTS = 64, 2**50
_FIRST_FEW = 5
_log = logging.getLogger(__name__)

T = TypeVar("T")


def refuse(what: str, where: str | Path = "a value of the checkpoint") -> DamagedError:
    """The error for a checkpoint that is not as it was saved."""
    return DamagedError(what, where=str(where), do=CHECKPOINT_FILE.do)


def few(items: list[str]) -> str:
    """The first few, and how many more."""
    more = len(items) - _FIRST_FEW
    return ", ".join(items[:_FIRST_FEW]) + (f" and {more} more" if more > 0 else "")


# Checkpoints in a folder


def written(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def partial(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it has a name."""
    return folder / f".step-{step:08d}.partial"


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in names if match)


def find(folder: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the latest."""
    steps = steps_in(folder)
    if not steps:
        raise CheckpointError(
            "there is no checkpoint in this folder", where=str(folder), do="name the folder of `save`"
        )
    if step is not None and step not in steps:
        raise CheckpointError(
            f"there is no checkpoint of step {step}", where=str(folder), do=f"choose of {few(list(map(str, steps)))}"
        )
    return written(folder, steps[-1] if step is None else step)


def give_name(written: Path, path: Path) -> None:
    aside = path.with_name(f".{path.name}.replaced")
    if path.exists():
        # Two steps, since a folder cannot replace one that is not empty. `restore` undoes the first.
        os.rename(path, aside)
    os.rename(written, path)
    sync_folder(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove(path: Path) -> None:
    """First its name, so that none is half there under its name. A checkpoint that cannot be removed does no harm."""
    aside = path.with_name(f".{path.name}.removed")
    try:
        os.rename(path, aside)
        shutil.rmtree(aside)
    except OSError as error:
        _log.warning("an old checkpoint cannot be removed: %s", error)


def keep_only(folder: Path, count: int, step: int) -> None:
    """Keep so many of the checkpoints up to this step."""
    older = [each for each in steps_in(folder) if each < step]
    for each in older[: len(older) + 1 - count]:
        remove(written(folder, each))


def restore(folder: Path) -> None:
    """A checkpoint that was set aside for one of the same step, which then did not come, gets its name back."""
    for aside in folder.iterdir() if folder.is_dir() else ():
        match = _SET_ASIDE.fullmatch(aside.name)
        if match and not (folder / match[1]).exists():
            os.rename(aside, folder / match[1])


def clear(folder: Path) -> None:
    """Remove what saves that did not come to an end have left."""
    restore(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFT_OVER.fullmatch(path.name) or _SET_ASIDE.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """What was made, renamed or removed in the folder stays so, even if the machine stops."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# The files of one: `metadata.json`, the table of its tensors, and `training.json`, all that is no tensor

Sizes = Annotated[
    tuple[Annotated[int, Key(least=0, most=_MOST_ELEMENTS)], ...],
    Key(fits=lambda sizes: len(sizes) <= _MOST_DIMS, wanted=f"at most {_MOST_DIMS} numbers"),
]


def _read_dtype(value: object, place: Place) -> torch.dtype:
    if not isinstance(value, str) or value not in DTYPES:
        raise place.wrong(value, f"one of {', '.join(DTYPES)}")
    return DTYPES[value]


Dtype = Annotated[torch.dtype, Key(read=_read_dtype, write=lambda dtype: NAMES[dtype])]


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk of a tensor, and where it is."""

    offsets: Sizes
    sizes: Sizes
    file: Annotated[str, Key(fits=_FILE.fullmatch, wanted="the name of a process's file")]
    key: str


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor of a checkpoint. Its chunks lie side by side along one dim and fill it: parameters are cut along one."""

    dtype: Dtype
    shape: Sizes
    chunks: tuple[Stored, ...]

    def __post_init__(self) -> None:
        # Dims of 0 count as 1: a tensor without elements must not have others beyond measure.
        if math.prod(max(size, 1) for size in self.shape) > _MOST_ELEMENTS:
            raise refuse(f"shape {shown(list(self.shape))} is too large to be true")
        dims = len(self.shape)
        if any(len(each.offsets) != dims or len(each.sizes) != dims for each in self.chunks):
            raise refuse(f"a chunk has not its {dims} dims")
        if not self._is_filled():
            raise refuse(f"the chunks do not fill the shape {list(self.shape)}, or overlap")

    def _is_filled(self) -> bool:
        dims = range(len(self.shape))
        cut = [dim for dim in dims if any(each.sizes[dim] != self.shape[dim] for each in self.chunks)]
        if not cut:
            return len(self.chunks) == 1 and not any(self.chunks[0].offsets)
        along, end = cut[0], 0
        for each in sorted(self.chunks, key=lambda each: each.offsets):
            wanted = [(end, each.sizes[dim]) if dim == along else (0, self.shape[dim]) for dim in dims]
            if [*zip(each.offsets, each.sizes, strict=True)] != wanted or not each.sizes[along]:
                return False
            end += each.sizes[along]
        return end == self.shape[along]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Table = Mapping[str, Record]


Digest = Annotated[str, Key(fits=_DIGEST.fullmatch, wanted="a SHA-256 digest")]
_Digests = Annotated[
    Mapping[str, Digest],
    Key(
        fits=lambda digests: all(name == TRAINING or _FILE.fullmatch(name) for name in digests),
        wanted=f"{TRAINING} and files of processes",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """`files` has the digests of all files beside this one; checkpoints of the version before have none."""

    format: str = FORMAT
    version: int = VERSION
    tensors: Table
    files: _Digests = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group of an optimizer: the names of its parameters, and its options as plain data."""

    parameters: tuple[str, ...]
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """What is saved of an optimizer beside tensors. `state` is by parameter and key (`optimizer_state.Form`)."""

    of: Annotated[str, Key("class")]
    groups: tuple[Group, ...]
    state: Mapping[str, Mapping[str, Mapping[str, object]]]


@dataclass(frozen=True, slots=True)
class SchedulerRecord:
    of: Annotated[str, Key("class")]
    state: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All of a run that is no tensor."""

    format: str = FORMAT
    version: int = VERSION
    step: Whole
    graph: str  # its fingerprint
    run: str  # a digest of what decides which process draws which random numbers
    names: tuple[str, ...]  # those in the model's state dict
    tied: Mapping[str, str]  # names of tensors that are stored under another one
    optimizer: OptimizerRecord | None = None
    scheduler: SchedulerRecord | None = None
    loader: object = None


def write_file(path: Path, file: object) -> str:
    """Written when this returns, even if the machine stops. Returns the digest of what was written."""
    data = json.dumps(encode(file), indent=1, allow_nan=False).encode()
    with path.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
    return hashlib.sha256(data).hexdigest()


def _read_file(path: Path, cls: type[T]) -> T:
    # A link may lead anywhere, and a pipe would wait for ever.
    if path.is_symlink() or not path.is_file():
        raise refuse("there is no such file, or it is not a plain one", path)
    return parse_json(cls, read_text(path, CHECKPOINT_FILE), Place(CHECKPOINT_FILE, str(path)))


def read_training(path: Path) -> Training:
    return _read_file(path / TRAINING, Training)


def read_table(folder: Path) -> Table:
    """The tensors of a checkpoint."""
    return read_tables(folder).tensors


def read_tables(folder: Path) -> TableFile:
    """What there is in a checkpoint: no more in a file than it holds, and nothing there twice."""
    found = _read_file(folder / TABLE, TableFile)
    table = found.tensors
    claimed: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    for record in table.values():
        for each in record.chunks:
            if (each.file, each.key) in seen:
                raise refuse(f"{shown(each.key)} is the place of two chunks", folder / each.file)
            seen.add((each.file, each.key))
            claimed[each.file] += math.prod(each.sizes) * record.dtype.itemsize
    for file, size in claimed.items():
        path = folder / file
        if path.is_symlink() or not path.is_file():
            raise refuse("this file is missing, or not a plain one", path)
        if (there := path.stat().st_size) < size:
            raise refuse(f"the file has {there:,} bytes, less than the {size:,} it should hold", path)
    return found


def check_digests(folder: Path, digests: Mapping[str, str], part: int = 0, parts: int = 1) -> None:
    """Are these files as they were saved? One process of `parts` looks at every so manieth."""
    for name in sorted(digests)[part::parts]:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise refuse("this file is missing, or not a plain one", path)
        if digest_of_file(path) != digests[name]:
            raise DamagedError(
                f"{name} is not as it was saved: its digest is another one",
                where=str(path),
                do=_the_one_before(folder),
            )


def _the_one_before(path: Path) -> str:
    match = _NAME.fullmatch(path.name)
    older = [step for step in steps_in(path.parent) if match and step < int(match[1])]
    if not older:
        return "take a copy of this checkpoint; there is none before it in its folder"
    return f"load the checkpoint before: step={older[-1]}"


# Plain data

_MARK = "~"
_DEEPEST = 50


def as_plain(value: object, where: str) -> object:
    """The value as JSON can hold it; `where` says whose it is, should it be none of those."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_MARK: "float", "of": str(value)}
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return as_plain(value.item(), where)
    if isinstance(value, list):
        return [as_plain(each, where) for each in value]
    if isinstance(value, tuple):
        return {_MARK: "tuple", "of": [as_plain(each, where) for each in value]}
    if isinstance(value, Mapping):
        if not isinstance(value, Counter) and all(isinstance(key, str) and key != _MARK for key in value):
            return {str(key): as_plain(each, where) for key, each in value.items()}
        pairs = [[as_plain(key, where), as_plain(each, where)] for key, each in value.items()]
        return {_MARK: "counter" if isinstance(value, Counter) else "pairs", "of": pairs}
    raise CheckpointError(
        f"a {type(value).__name__} cannot be saved", where=where, do="keep numbers, texts, lists and dicts there"
    )


def from_plain(value: object, depth: int = 0) -> object:
    """The inverse of `as_plain`, except that a tensor comes back as its number."""
    if depth > _DEEPEST:
        raise refuse(f"lists nest more than {_DEEPEST} deep")
    if isinstance(value, list):
        return [from_plain(each, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: from_plain(each, depth + 1) for key, each in value.items()}
    of = from_plain(value.get("of"), depth + 1)
    try:
        if value.keys() == {_MARK, "of"} and isinstance(of, str if value[_MARK] == "float" else list):
            return _MADE[value[_MARK]](of)
    except (KeyError, TypeError, ValueError):
        pass
    raise refuse(f"{shown(value)} is no value that is saved")


_MADE: dict[str, Callable[[Any], object]] = {
    "float": lambda text: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[text],
    "tuple": tuple,
    "pairs": dict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
