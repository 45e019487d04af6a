"""A checkpoint as one plain file of the model's state dict.

In: the folder of a checkpoint. Out: a `.safetensors` file, written a tensor at a time, or a `.pt`/`.bin` file as
`torch.save` writes it. Every key of the original model's state dict is there, those of tied parameters too. No other
process is needed.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lopsided.errors import CheckpointError, shown
from lopsided.runtime.checkpoint.folder import TRAINING, find, read_training
from lopsided.runtime.checkpoint.storage import SafeReader, check_files, sync_folder
from lopsided.runtime.checkpoint.tensor_file import TensorEntry, write_tensors

_PLAIN, _TORCH = ".safetensors", (".pt", ".pth", ".bin")


def convert(folder: str | Path, to: str | Path) -> Path:
    """Write the model of a checkpoint (of one step, or the latest in a folder of several) to the file `to`."""
    folder, to = Path(folder), Path(to)
    if to.suffix not in (_PLAIN, *_TORCH):
        raise CheckpointError(
            f"{shown(to.name)} does not say which kind of file it is to be",
            where=str(to),
            do=f"end its name in {_PLAIN} or {', '.join(_TORCH)}",
        )
    path = folder if (folder / TRAINING).exists() else find(folder, None)
    training, reader = read_training(path), SafeReader(path)
    stored = {name: f"model.{training['tied'].get(name, name)}" for name in training["names"]}
    missing = [name for name, key in stored.items() if key not in reader.table]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {shown(missing[0])}", where=str(path), do="use a checkpoint that was not changed"
        )
    check_files(path, {key: reader.table[key] for key in stored.values()})
    # Beside it first: whoever reads `to` finds all of it or nothing new.
    partial = to.with_name(f".{to.name}.partial")
    try:
        if to.suffix == _PLAIN:
            records = {name: reader.table[key] for name, key in stored.items()}
            entries = [TensorEntry(name, record.dtype, record.shape) for name, record in records.items()]
            write_tensors(partial, entries, lambda name: reader.whole(stored[name]), {"format": "pt"})
        else:
            wholes = {key: reader.whole(key) for key in dict.fromkeys(stored.values())}
            with partial.open("wb") as file:
                torch.save({name: wholes[key] for name, key in stored.items()}, file)
                file.flush()
                os.fsync(file.fileno())
        os.rename(partial, to)
        sync_folder(to.absolute().parent)
    except OSError as error:
        raise CheckpointError(
            f"the file cannot be written: {error.strerror or error}",
            where=str(to),
            do="name a file in a folder with room",
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return to
