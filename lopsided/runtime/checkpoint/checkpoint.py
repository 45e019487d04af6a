"""Checkpoints: a training run in a folder, from which any other cluster and plan can go on.

In: a parallel module, its optimizer, and what else goes on (a scheduler, a loader). Out: `save`, `load`, and `convert`,
which writes the model of a checkpoint as one plain file.

    folder/step-00000010/rank-00000.safetensors ...   every process's chunks of parameters, optimizer state, generators
                         metadata.json                which tensors there are, and where their chunks lie
                         training.json                step, options of the optimizer, scheduler, loader

`torch.distributed.checkpoint` plans who writes and reads what; `storage` keeps it. A checkpoint is
written as `.step-00000010.partial` and gets its name when all of it is on disk, so one that has a name is complete,
and a crash leaves the one before. What a crash leaves behind is cleared by the next save.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from lopsided.comm.world import waiting, working
from lopsided.errors import CheckpointError, LopsidedError, shown
from lopsided.executor.randomness import RankRandomness
from lopsided.runtime.checkpoint.folder import (
    TRAINING,
    SchedulerRecord,
    Table,
    Training,
    as_plain,
    check_digests,
    clear,
    few,
    find,
    from_plain,
    give_name,
    keep_only,
    partial,
    read_training,
    refuse,
    restore,
    sync_folder,
    write_file,
    written,
)
from lopsided.runtime.checkpoint.optimizer_state import optimizer_kept, optimizer_wanted
from lopsided.runtime.checkpoint.state import Kept, model_kept, model_wanted, spread, tensors_of
from lopsided.runtime.checkpoint.storage import Held, LoadPlanner, SafeReader, SafeWriter, SavePlanner, check_files
from lopsided.runtime.checkpoint.tensor_file import TensorEntry, write_tensors
from lopsided.runtime.control_plane import ControlPlane, accord_of

if TYPE_CHECKING:
    from lopsided.runtime.parallel import Parallel

_log = logging.getLogger("lopsided")

_PLAIN, _TORCH = ".safetensors", (".pt", ".pth", ".bin")


class Stateful(Protocol):
    """A scheduler, or a loader: what has a position and can go on from it."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run in training: everything that has a state."""

    pm: Parallel
    optimizer: Optimizer | None
    loader: Stateful | None = None
    scheduler: Stateful | None = None


# Saving


class Saving:
    """A save, done or under way. `path` is where it is when `wait` returns."""

    def __init__(self, path: Path, job: Callable[[], None]) -> None:
        self.path = path
        self._job = job
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.told = False  # somebody knows that it failed

    def run(self) -> None:
        try:
            self._job()
        except BaseException as error:
            self._error = error
            if self._thread is not None:
                # The next save raises it, but there may be none.
                _log.warning("%s was not saved: %s", self.path.name, str(error).partition("\n")[0])
        finally:
            del self._job  # and the copies it holds

    def start(self) -> None:
        # Not a daemon: a script that ends after its last save still saves.
        self._thread = threading.Thread(target=self.run, name=f"save {self.path.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when all is on disk, or raise what kept it from there. Before the process group ends, call this."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self.told = True
            raise self._error


def save(
    pm: Parallel,
    optimizer: Optimizer | None,
    folder: str | Path,
    *,
    loader: Stateful | None = None,
    scheduler: Stateful | None = None,
    wait: bool = True,
    keep: int | None = None,
    then: Callable[[Path], None] | None = None,
) -> Saving:
    """Save a run as `folder/step-...`, named by the steps it has done. Every rank must call this.

    With `wait=False` it returns as soon as everything is copied to main memory, and writes while training goes on. A
    save waits for the one before. `keep` is how many checkpoints up to this one are left in the folder. `then` is
    called on rank 0 with the checkpoint when it is complete.
    """
    pm.together("save_checkpoint")
    accord, folder = accord_of(pm), Path(folder).absolute()
    finish_last(accord)
    step = pm.steps_done
    _check_alike(accord.all(lambda: (step, str(folder), keep)))
    accord.each(pm.before_saving)
    state = captured(LiveRun(pm, optimizer, loader, scheduler), accord)
    held, training = spread(state.kept, pm.world.place, len(pm.world.ranks)) | dict(state.random), state.training
    if not wait:
        held = {key: each.copied() for key, each in held.items()}
    writer = _Writer(folder, step, training, keep, then or (lambda _: None))
    saving = Saving(writer.path, lambda: _write(held, writer, accord))
    if wait:
        saving.run()
        saving.wait()
    else:
        saving.start()
        accord.saving = saving
    return saving


def finish_last(accord: ControlPlane) -> None:
    """Wait for the save under way. If nobody was told that it failed, all are now."""
    last, accord.saving = accord.saving, None
    if last is not None:
        known = last.told

        def tell() -> None:
            try:
                last.wait()
            except LopsidedError:
                if not known:
                    raise

        accord.each(tell)


def _check_alike(told: list[tuple[int, str, int | None]]) -> None:
    first, to, _ = told[0]
    for rank, (step, folder, keep) in enumerate(told):
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep is {keep}", where="save", do="keep 1 checkpoint or more, or None for all")
        if (step, folder) != (first, to):
            raise CheckpointError(
                f"rank {rank} saves step {step} to {folder}, rank 0 step {first} to {to}",
                where="save",
                do="save the same step to the same folder on every rank",
            )


@dataclass(frozen=True, slots=True)
class RunState:
    """What is saved of a run: its tensors and who holds how much of each, this process's generators, and the rest."""

    kept: Mapping[str, Kept]
    random: Mapping[str, Held]
    training: Training


def captured(run: LiveRun, accord: ControlPlane) -> RunState:
    """What is to be saved; nothing is copied. Every rank must call this."""
    pm = run.pm
    named = accord.each(lambda: tensors_of(pm))
    kept, told = model_kept(named), None
    if run.optimizer is not None:
        state, told = optimizer_kept(pm, run.optimizer, accord)
        kept |= state
    random = {
        random_key(pm.world.place, stream): Held.whole(state_of.shape, state_of.dtype, state_of)
        for stream, state_of in (_generators(pm).items() if pm.world.place >= 0 else ())
    }

    def rest() -> Training:
        position = None if run.loader is None else as_plain(run.loader.state_dict(), "the loader's state")
        schedule = None
        if run.scheduler is not None:
            state = as_plain(run.scheduler.state_dict(), "the scheduler's state")
            schedule = SchedulerRecord(type(run.scheduler).__name__, state)
        return Training(
            step=pm.steps_done,
            graph=pm.plan.graph.fingerprint,
            run=_run(pm),
            names=tuple(pm.state_dict()),
            tied={also: each.name for each in named for also in each.names[1:]},
            optimizer=told,
            scheduler=schedule,
            loader=position,
        )

    return RunState(kept, random, accord.each(rest))


def _run(pm: Parallel) -> str:
    """A digest of what decides which process draws which random numbers: the plan, and who is who."""
    shares, world = pm.plan.shares, pm.world
    told = [str(pm.plan.program), shares.work, shares.named, shares.cuts, world.size, world.ranks, world.order]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _streams(pm: Parallel) -> RankRandomness:
    """Only verification draws from other ones, and saves nothing."""
    return cast(RankRandomness, pm.randomness)


def _generators(pm: Parallel) -> dict[str, Tensor]:
    """The states of this process's generators, of the run and of torch."""
    states = {**_streams(pm).state(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def random_key(place: int, stream: str) -> str:
    return f"random.{place}.{stream}"


class _Writer(SafeWriter):
    """Writes beside the checkpoints, and gives what it wrote its name when all is there."""

    def __init__(
        self, folder: Path, step: int, training: Training, keep: int | None, then: Callable[[Path], None]
    ) -> None:
        self.path = written(folder, step)
        super().__init__(partial(folder, step))
        self.root, self.step, self.training, self.keep, self.then = folder, step, training, keep, then

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            clear(self.root)
        super().set_up_storage_writer(is_coordinator)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.beside[TRAINING] = write_file(self.folder / TRAINING, self.training)
        super().finish(metadata, results)
        give_name(self.folder, self.path)
        if self.keep is not None:
            keep_only(self.root, self.keep, self.step)
        self.then(self.path)


def _write(held: dict[str, Held], writer: _Writer, accord: ControlPlane) -> None:
    try:
        _in_torch(
            lambda: dcp.state_dict_saver.save(
                held, storage_writer=writer, planner=SavePlanner(), process_group=accord.group_of_saves
            ),
            writer.path,
        )
    except BaseException:
        if accord.rank == 0:
            shutil.rmtree(writer.folder, ignore_errors=True)
        raise


def _in_torch(job: Callable[[], object], path: Path) -> None:
    """Do what `torch.distributed.checkpoint` does, and say in our words what failed on which rank."""
    try:
        with waiting(f"others at {path.name}"):
            job()
    except CheckpointException as failed:
        rank, (error, _) = next(iter(failed.failures.items()))
        if isinstance(error, LopsidedError):
            raise CheckpointError(error.what, where=error.where, do=error.do, rank=str(rank)) from None
        raise CheckpointError(
            f"rank {rank} failed: {type(error).__name__}: {error}", where=str(path), do="see the reason, and try again"
        ) from error


# Loading


def load(
    pm: Parallel,
    optimizer: Optimizer | None,
    folder: str | Path,
    *,
    loader: Stateful | None = None,
    scheduler: Stateful | None = None,
    step: int | None = None,
    verify: bool = True,
) -> int:
    """Go on from a checkpoint: the latest, or that of `step`, which is returned. Every rank must call this.

    The plan, the number of processes and the shares may be others than those it was saved under: every process reads
    what it holds now. The optimizer is a fresh one of the same class, with the same groups of parameters. Nothing is
    changed if the checkpoint does not fit, or is not as it was saved: `verify` reads every file once, each process some
    of them.
    """
    pm.together("load_checkpoint")
    accord, folder = accord_of(pm), Path(folder).absolute()
    finish_last(accord)

    def found() -> tuple[Path, Training]:
        restore(folder)
        path = find(folder, step)
        told = read_training(path)
        if path != written(folder, told.step):
            raise CheckpointError(
                f"the folder of this checkpoint is not that of its step, {told.step}",
                where=str(path),
                do="give the folder the name it was saved under",
            )
        return path, told

    path, training = accord.first(found)
    reader = SafeReader(path)
    if verify:
        with working(f"checking {path.name}"):
            accord.each(lambda: check_digests(path, reader.tables.files, accord.rank, pm.world.size))
    return go_on(LiveRun(pm, optimizer, loader, scheduler), reader, training)


def go_on(run: LiveRun, reader: SafeReader, training: Training) -> int:
    """Take over the tensors that the reader has, and the rest; the steps that were done. Every rank must call this."""
    pm, optimizer, loader, scheduler = run.pm, run.optimizer, run.loader, run.scheduler
    accord, path = accord_of(pm), reader.folder
    random: dict[str, Tensor] = {}

    def prepared() -> tuple[dict[str, Held], list[Callable[[], object]]]:
        wanted, then = model_wanted(tensors_of(pm), reader.table, str(path)), list[Callable[[], object]]()
        if scheduler is not None:
            then.append(_scheduler_wanted(scheduler, training.scheduler, path))
        if loader is not None:
            position = _state_of("loader", training.loader, path)
            then.append(lambda: loader.load_state_dict(position))
        if optimizer is not None:
            if training.optimizer is None:
                raise CheckpointError("no optimizer was saved", where=str(path), do="load(pm, None, ...)")
            state, put_together = optimizer_wanted(
                pm, optimizer, training.optimizer, reader.table, str(path), in_order=scheduler is not None
            )
            wanted |= state
            then.append(put_together)
        wanted |= _random_wanted(pm, training, reader.table, random)
        return wanted, then

    wanted, then = accord.each(prepared)
    _in_torch(
        lambda: dcp.state_dict_loader.load(
            wanted, storage_reader=reader, planner=LoadPlanner(), process_group=accord.group
        ),
        path,
    )
    accord.each(lambda: [apply() for apply in then] and None)
    _set_generators(pm, random)
    pm.steps_done = training.step
    return pm.steps_done


def _scheduler_wanted(given: Stateful, told: SchedulerRecord | None, path: Path) -> Callable[[], object]:
    """What brings a scheduler where it was."""
    if told is not None and told.of != type(given).__name__:
        raise CheckpointError(
            f"the checkpoint is of a {shown(told.of)}, and the scheduler is {type(given).__name__}",
            where=str(path),
            do="make a scheduler of the same class",
        )
    state = _state_of("scheduler", told and told.state, path)
    # A scheduler takes every name it is given for one of its own.
    if strange := [shown(key) for key in state if key not in given.state_dict()]:
        raise CheckpointError(f"the scheduler has no {few(strange)}", where=str(path), do="load without scheduler=")
    return lambda: given.load_state_dict(state)


def _state_of(what: str, told: object, path: Path) -> dict[str, Any]:
    state = from_plain(told)
    if not isinstance(state, dict):
        raise CheckpointError(f"no {what} was saved", where=str(path), do=f"load without {what}=")
    return state


def _random_wanted(pm: Parallel, training: Training, table: Table, random: dict[str, Tensor]) -> dict[str, Held]:
    """The states of generators that go on: all, in the same run; in another one only the stream that all share."""
    same = training.run == _run(pm) and pm.world.place >= 0
    wanted = {}
    for stream, now in _generators(pm).items():
        if not same and stream != "shared":
            continue
        key = random_key(pm.world.place if same else 0, stream)
        record = table.get(key)
        # Generators of CPUs and GPUs have different states.
        if record is not None and (record.shape, record.dtype) == (tuple(now.shape), now.dtype):
            random[stream] = torch.empty_like(now)
            wanted[key] = Held.whole(record.shape, record.dtype, random[stream])
    return wanted


def _set_generators(pm: Parallel, random: Mapping[str, Tensor]) -> None:
    _streams(pm).set_state({stream: state for stream, state in random.items() if stream not in ("cpu", "cuda")})
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])


# One plain file


def convert(folder: str | Path, to: str | Path) -> Path:
    """Write the model of a checkpoint (of one step, or the latest in a folder of several) to the file `to`.

    The file is plain: a `.safetensors` file, written a tensor at a time, or one as `torch.save` writes it. Every key of
    the original model's state dict is there, those of tied parameters too. No other process is needed.
    """
    folder, to = Path(folder), Path(to)
    if to.suffix not in (_PLAIN, *_TORCH):
        raise CheckpointError(
            f"{shown(to.name)} does not say which kind of file it is to be",
            where=str(to),
            do=f"end its name in {_PLAIN} or {', '.join(_TORCH)}",
        )
    path = folder if (folder / TRAINING).exists() else find(folder, None)
    training, reader = read_training(path), SafeReader(path)
    stored = {name: f"model.{training.tied.get(name, name)}" for name in training.names}
    missing = [name for name, key in stored.items() if key not in reader.table]
    if missing:
        raise refuse(f"the checkpoint has no {shown(missing[0])}", path)
    check_digests(path, reader.tables.files)
    check_files(path, {key: reader.table[key] for key in stored.values()})
    # Beside it first: whoever reads `to` finds all of it or nothing new.
    beside = to.with_name(f".{to.name}.partial")
    try:
        if to.suffix == _PLAIN:
            records = {name: reader.table[key] for name, key in stored.items()}
            entries = [TensorEntry(name, record.dtype, record.shape) for name, record in records.items()]
            write_tensors(beside, entries, lambda name: reader.whole(stored[name]), {"format": "pt"})
        else:
            wholes = {key: reader.whole(key) for key in dict.fromkeys(stored.values())}
            with beside.open("wb") as file:
                torch.save({name: wholes[key] for name, key in stored.items()}, file)
                file.flush()
                os.fsync(file.fileno())
        os.rename(beside, to)
        sync_folder(to.absolute().parent)
    except OSError as error:
        raise CheckpointError(
            f"the file cannot be written: {error.strerror or error}",
            where=str(to),
            do="name a file in a folder with room",
        ) from None
    finally:
        beside.unlink(missing_ok=True)
    return to
