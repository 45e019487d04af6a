"""The folder of a run's checkpoints: which are complete, how one gets its name, and what a crash has left.

In: a folder. Out: the checkpoints in it. One that has a name is complete: it gets it when all of it is on disk.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from lopsided.errors import CheckpointError, shown
from lopsided.runtime.checkpoint.plain import read_json
from lopsided.runtime.checkpoint.state import few
from lopsided.runtime.checkpoint.storage import FORMAT, VERSION, sync_folder

TRAINING = "training.json"

_NAME = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"\.step-\d{8,}\.(partial|removed)")
_SET_ASIDE = re.compile(r"\.(step-\d{8,})\.replaced")
_MOST_TRAINING_BYTES = 128 * 2**20
_log = logging.getLogger(__name__)


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


def read_training(path: Path) -> dict[str, Any]:
    """What `training.json` says, as far as any reader needs it."""
    told = read_json(path / TRAINING, _MOST_TRAINING_BYTES)

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(what, where=str(path / TRAINING), do="use a checkpoint that was saved by this library")

    if told.get("format") != FORMAT or told.get("version") != VERSION:
        raise refuse(f"this is {shown(told.get('format'))}, version {shown(told.get('version'))}")
    names, tied, step = told.get("names"), told.get("tied"), told.get("step")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refuse('"names" is no list of names')
    if not isinstance(tied, dict) or not all(isinstance(name, str) for name in tied.values()):
        raise refuse('"tied" does not say what is tied to what')
    if type(step) is not int or step < 0:
        raise refuse(f'"step" is {shown(step)}')
    return told
