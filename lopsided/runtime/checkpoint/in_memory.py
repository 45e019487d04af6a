"""Checkpoints in main memory, made every few steps: who loses a process, or a node, goes on from there.

In: what `Checkpoints` has. Out: `InMemory`: `step()` saves when it is time, `latest()` finds what the nodes that are
left hold together, if that is everything.

    every rank writes, into the folder in memory of its node (`memory_folder`):
        what it alone holds: its pieces, its generators      `keep_copies` other nodes get a copy, behind training
        its part of what all hold                            which is shared out among the ranks of each node anew
    all have written → the folder gets its name → all have named it → the one before is removed

So at any moment there is one that all nodes have, and no rank goes on from another step than the others: what was found
is told to all, and all come to the same answer. Of what all hold, the copy of the lowest rank is used everywhere.

How often is measured: what training waits for (copying to main memory) may take `PART_OF_TIME` of it, and the rest must
be done before the next. Nothing is written where there is no room for the next beside the one before.
"""

from __future__ import annotations

import math
import secrets
import shutil
import socket
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import planner as torch_planner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.futures import Future

from lopsided.comm.world import waiting, working
from lopsided.errors import CheckpointError, DamagedError, InputError
from lopsided.runtime.checkpoint.checkpoint import LiveRun, Saving, captured, finish_last, random_key
from lopsided.runtime.checkpoint.folder import (
    Record,
    Stored,
    Table,
    TableFile,
    Training,
    clear,
    give_name,
    partial,
    remove,
    steps_in,
    written,
)
from lopsided.runtime.checkpoint.memory_folder import Fragment, MemoryPart, open_home, parts_in, room_in, write_part
from lopsided.runtime.checkpoint.state import spread
from lopsided.runtime.checkpoint.storage import Held, SafeReader, fill, resolved
from lopsided.runtime.checkpoint.tensor_file import TensorFile, box_of
from lopsided.runtime.control_plane import ControlPlane, accord_of

PART_OF_TIME = 0.02
"""How much of the time training may wait for these checkpoints."""

_LATEST = 5  # checkpoints, whose median wait is the next one's: one that fell into a busy moment puts off none
_MOST_STEPS = 100_000
# A copy is sent in parts of 64 MiB, which is how much a rank holds of one that comes.
_SENT_BYTES = 2**26
_SHARED = random_key(0, "shared")
_now_s = time.monotonic


def steps_between(waits_s: float, behind_s: float, step_s: float) -> int:
    """After how many steps the next is due, if training waits so long for one, and it is done so long after.

    >>> steps_between(0.004, 0.1, 0.05), steps_between(0.001, 2.0, 0.05), steps_between(0.0, 0.0, 0.05)
    (4, 40, 1)
    """
    if step_s <= 0:
        return 1
    return max(min(math.ceil(max(waits_s / PART_OF_TIME, behind_s) / step_s), _MOST_STEPS), 1)


def receivers(nodes: Sequence[int], copies: int) -> tuple[tuple[int, ...], ...]:
    """The ranks that keep copies of each rank's pieces: one on each of the next nodes.

    >>> receivers([0, 0, 1], 1), receivers([0, 0], 1)
    (((2,), (2,), (0,)), ((), ()))
    """
    names = sorted({*nodes})
    on = {node: [rank for rank, its in enumerate(nodes) if its == node] for node in names}
    found = []
    for rank, node in enumerate(nodes):
        after = [names[(names.index(node) + k) % len(names)] for k in range(1, min(copies, len(names) - 1) + 1)]
        found.append(tuple(on[other][on[node].index(rank) % len(on[other])] for other in after))
    return tuple(found)


class InMemory:
    """Checkpoints in memory of one training run. Every rank makes one, and calls its methods at the same places."""

    def __init__(self, run: LiveRun, folder: Path, *, keep_copies: int) -> None:
        if isinstance(keep_copies, bool) or not isinstance(keep_copies, int) or keep_copies < 0:
            raise InputError(
                f"keep_copies is {keep_copies!r}",
                where="Checkpoints",
                do="give 0, 1 or more, or None for none in memory",
            )
        self._run = run
        accord = accord_of(run.pm)
        self._home = accord.each(lambda: open_home(folder))
        hosts = accord.all(lambda: f"{socket.gethostname()} {self._home}")
        names = [*dict.fromkeys(hosts)]
        self._nodes = [names.index(host) for host in hosts]  # the number of each rank's node
        self._neighbours = [rank for rank, node in enumerate(self._nodes) if node == self._nodes[accord.rank]]
        self._leads = self._neighbours[0] == accord.rank
        self._to = receivers(self._nodes, keep_copies)
        # What was being written when the processes before ended; nobody writes before all are here.
        accord.each(lambda: clear(self._home) if self._leads else None)
        self._made = accord.first(lambda: secrets.token_hex(8))
        if keep_copies >= len(names) and keep_copies:
            accord.warn("keep_copies=%d, and the nodes to keep copies on are %d", keep_copies, len(names) - 1)
        self._off = False
        self._since, self._after, self._looked_s = 0, 1, _now_s()
        self._waits_s: deque[float] = deque(maxlen=_LATEST)
        self._behind_s, self._is_first = 0.0, True
        self._last: Saving | None = None

    # Saving

    def step(self) -> None:
        """A step of training is done; save if it is time."""
        self._since += 1
        if self._off or self._since < self._after:
            return
        accord, now_s = accord_of(self._run.pm), _now_s()
        idle = accord.saving is None or accord.saving.done
        waits_s = statistics.median_low(self._waits_s) if self._waits_s else 0.0
        after = steps_between(waits_s, self._behind_s, (now_s - self._looked_s) / self._since)
        # The clocks differ, and the threads that write: the first rank's count.
        idle, self._after = accord.first(lambda: (idle, after))
        self._since, self._looked_s = 0, now_s
        if idle:
            self.save()

    def save(self) -> None:
        """Save now, beside training. Every rank must call this."""
        pm, accord, began_s = self._run.pm, accord_of(self._run.pm), _now_s()
        last = accord.saving
        try:
            finish_last(accord)
        except CheckpointError as error:
            accord.warn("the last checkpoint could not be saved: %s", error.what)
            if last is self._last:
                self._off = True
                return
        accord.each(pm.before_saving)
        state = captured(self._run, accord)
        alone, alike = dict[str, Held](), dict[str, Held]()
        if pm.world.place >= 0:
            cut = {key: each for key, each in state.kept.items() if each.piece is not None}
            alone = spread(cut, pm.world.place, len(pm.world.ranks)) | dict(state.random)
            holding = [rank for rank in self._neighbours if rank in pm.world.ranks]
            whole = {key: each for key, each in state.kept.items() if key not in cut}
            alike = spread(whole, holding.index(accord.rank), len(holding))
            # The one stream that any world goes on with is the same everywhere.
            alone.pop(_SHARED, None)
            if holding[0] == accord.rank:
                alike[_SHARED] = state.random[random_key(pm.world.place, "shared")]
        mine = (_bytes_of(alone), _bytes_of(alike), room_in(self._home))
        told = accord.all(lambda: (state.training if accord.rank == 0 else None, mine))
        training = told[0][0]
        if training is None or self._is_short([sizes for _, sizes in told]):
            self._off = True
            return
        alone, alike = ({key: each.copied() for key, each in held.items()} for held in (alone, alike))
        path = written(self._home, training.step)
        self._last = Saving(path, lambda: self._written(alone, alike, training, accord))
        self._last.start()
        accord.saving = self._last
        # The first takes longer than those to come, and is no measure of them.
        if not self._is_first:
            self._waits_s.append(_now_s() - began_s)
        self._is_first = False

    def _is_short(self, told: Sequence[tuple[int, int, int]]) -> bool:
        """Whether some node has no room: for this checkpoint in its folder, beside the one before, and once more, as it
        is copied before it is written."""
        for node in sorted({*self._nodes}):
            ranks = [rank for rank, its in enumerate(self._nodes) if its == node]
            own = sum(told[rank][0] + told[rank][1] for rank in ranks)
            copies = sum(told[rank][0] for rank, to in enumerate(self._to) for other in to if other in ranks)
            room = min(told[rank][2] for rank in ranks)
            if 2 * (own + copies) + own > room:
                accord_of(self._run.pm).warn(
                    "no checkpoints are kept in memory: on the node of rank %d they need %.3g MB, twice while one is "
                    "written, and %.3g MB more then; there are %.3g MB (in a container, see its --shm-size)",
                    ranks[0],
                    (own + copies) / 1e6,
                    own / 1e6,
                    room / 1e6,
                )
                return True
        return False

    def _written(
        self, alone: Mapping[str, Held], alike: Mapping[str, Held], training: Training, accord: ControlPlane
    ) -> None:
        """Write a checkpoint, in a thread beside training on all ranks."""
        try:
            self._write(alone, alike, training, accord)
        except BaseException:
            if self._leads:
                shutil.rmtree(partial(self._home, training.step), ignore_errors=True)
            raise

    def _write(
        self, alone: Mapping[str, Held], alike: Mapping[str, Held], training: Training, accord: ControlPlane
    ) -> None:
        began_s, group = _now_s(), accord.group_of_saves
        beside, path = partial(self._home, training.step), written(self._home, training.step)

        def write() -> list[int]:
            with working(f"writing its part of {path.name} in memory"):
                beside.mkdir(exist_ok=True)
                if alike:
                    write_part(beside, f"whole-{accord.rank:05d}", alike, self._made, training)
                if alone:
                    write_part(beside, f"rank-{accord.rank:05d}", alone, self._made, training)
                return [file.stat().st_size for file in (_files(beside, accord.rank) if alone else ())]

        sizes = accord.all(write, group)
        if any(self._to):
            accord.all(lambda: self._copy(beside, sizes, accord), group)
        accord.all(lambda: give_name(beside, path) if self._leads else None, group)
        if self._leads:
            for step in steps_in(self._home):
                if step != training.step:
                    remove(written(self._home, step))
        self._behind_s = _now_s() - began_s

    def _copy(self, beside: Path, sizes: Sequence[Sequence[int]], accord: ControlPlane) -> None:
        """Send what this rank alone holds, and take what others do."""
        group, sent = accord.group_of_saves, []
        for to in self._to[accord.rank]:
            for path, size in zip(_files(beside, accord.rank), sizes[accord.rank], strict=False):
                for part in torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).split(_SENT_BYTES):
                    sent.append((dist.isend(part, to, group), part))
        for source in (rank for rank, to in enumerate(self._to) if accord.rank in to):
            for path, size in zip(_files(beside, source), sizes[source], strict=False):
                with path.open("wb") as file:
                    for at in range(0, size, _SENT_BYTES):
                        part = torch.empty(min(_SENT_BYTES, size - at), dtype=torch.uint8)
                        with waiting(f"pieces of rank {source}, to be kept here too"):
                            dist.recv(part, source, group)
                        file.write(part.numpy().data)
        with waiting("those who keep pieces of this rank"):
            for sending, _ in sent:
                if sending is not None:
                    sending.wait()

    def close(self) -> None:
        """At the end of training, when nothing is under way: nobody needs them any more."""
        accord = accord_of(self._run.pm)
        accord.each(lambda: shutil.rmtree(self._home, ignore_errors=True) if self._leads else None)

    # Going on

    def latest(self) -> tuple[SafeReader, Training] | None:
        """The latest checkpoint of which the nodes there are hold everything. Every rank must call this."""
        accord, mine = accord_of(self._run.pm), self._neighbours

        def found() -> list[tuple[str, MemoryPart]]:
            with working("checking what is in memory"):
                return [*parts_in(self._home, mine.index(accord.rank), len(mine))]

        heard = accord.all(found)
        sets: dict[tuple[int, str], dict[str, MemoryPart]] = defaultdict(dict)
        holders: dict[tuple[int, str], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for rank, parts in enumerate(heard):
            near = {other for other, node in enumerate(self._nodes) if node == self._nodes[rank]}
            for name, part in parts:
                which = part.step, part.made
                if sets[which].setdefault(name, part).digest == part.digest:
                    holders[which][f"{name}.safetensors"] |= near
        for step, made in sorted(sets, reverse=True):
            held = sets[step, made]
            training = next(iter(held.values())).training
            if (table := whole_table(held, training)) is not None:
                return MemoryReader(written(self._home, step), table, holders[step, made], accord), training
        return None


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank-{rank:05d}.safetensors", folder / f"rank-{rank:05d}.json"


def _bytes_of(held: Mapping[str, Held]) -> int:
    return sum(box.nbytes for each in held.values() for box in each.boxes)


def whole_table(parts: Mapping[str, MemoryPart], training: Training) -> Table | None:
    """The tensors of these parts, put together; nothing, unless that is all there was."""
    fragments: dict[str, Fragment] = {}
    chunks: dict[str, dict[tuple[int, ...], Stored]] = defaultdict(dict)
    # Of what several have, the lowest rank's counts.
    for name in sorted(parts, key=lambda name: (name.partition("-")[2], name)):
        for key, fragment in parts[name].tensors.items():
            fragments.setdefault(key, fragment)
            for chunk in fragment.chunks:
                chunks[key].setdefault(chunk.offsets, chunk)
    needed = {f"model.{training.tied.get(name, name)}" for name in training.names} | {_SHARED}
    for name, state in (training.optimizer.state if training.optimizer else {}).items():
        needed |= {f"optimizer.{name}.{key}" for key, form in state.items() if not form.keys() & {"number", "value"}}
    if not needed <= fragments.keys():
        return None
    try:
        return {key: Record(one.dtype, one.shape, tuple(chunks[key].values())) for key, one in fragments.items()}
    except DamagedError:  # which says what is not filled
        return None


class MemoryReader(SafeReader):
    """Reads what lies in the memory of this node, and is sent the rest: a chunk at a time, to all that want it."""

    def __init__(self, folder: Path, table: Table, holders: Mapping[str, set[int]], accord: ControlPlane) -> None:
        super().__init__(folder)
        self.__dict__["tables"] = TableFile(tensors=table)
        self._holders, self._accord = holders, accord

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan  # the files were compared with their digests

    def read_data(self, plan: LoadPlan, planner: torch_planner.LoadPlanner) -> Future[None]:
        accord = self._accord
        items: dict[tuple[str, str], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            stored = self.stored(item)
            items[stored.file, stored.key].append(item)
        wanted = accord.all(lambda: {place for place in items if accord.rank not in self._holders[place[0]]})
        missing = {place for each in wanted for place in each}
        outline = {
            (stored.file, stored.key): (stored.sizes, record.dtype)
            for record in self.table.values()
            for stored in record.chunks
        }
        for place in sorted(missing | items.keys()):
            file, key = place
            if accord.rank in self._holders[file]:
                with TensorFile(self.folder / file) as opened:
                    value = opened.whole(key).contiguous()
            else:
                sizes, dtype = outline[place]
                value = torch.empty(sizes, dtype=dtype)
            if place in missing:
                accord.send(value, min(self._holders[file]))
            for item in items.get(place, ()):
                fill(planner, item, box_of(value, item.storage_offsets, item.lengths))
        return resolved(None)
