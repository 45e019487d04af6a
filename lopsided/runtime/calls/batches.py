"""Each process loads its own share of every batch.

In: a loader of global batches, as one device would use it, and the parallel model. Out: `ShardedLoader`, which hands
this process its rows, epoch after epoch, and can go on in the middle of one.

The order of samples is a function of a seed that rank 0 draws once, and of the epoch: every process walks through the
same global indices and loads only the rows that are its own. So a position is a number of global batches, and means the
same in another world and under another plan.

- A `DataLoader` over a map-style dataset: rows of others are not loaded. Random samplers of torch draw from a
  generator made of the seed; samplers of your own are iterated as they are, with the default generators of torch,
  Python and numpy seeded alike on every process while they draw.
- Anything else (a list of batches, a generator, an `IterableDataset`): every process iterates, and so loads,
  everything, and keeps its rows. It must give every process the same batches: of whole numbers in them some are
  compared.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lopsided.capturing.call import in_form_of, named_leaves
from lopsided.comm.world import World, group_to_talk, waiting
from lopsided.errors import BatchError
from lopsided.ir.graph import Leaf
from lopsided.ir.placement import Placement, Shares, pieces_of, start_of
from lopsided.runtime.calls.call_form import HandedOut, told_of_batch, told_of_samples
from lopsided.runtime.parallel import Parallel

_END = object()
_MANY = 1 << 20


def shard(
    loader: Iterable[Any],
    pm: Parallel,
    *,
    pad: Mapping[str, float] | None = None,
    lengths: Sequence[int] = (),
    besides: Sequence[str] = (),
) -> ShardedLoader:
    """The batches of `loader`, of which this process gets what it needs. `loader` makes global batches.

    Where samples have different lengths, `pad` names the tensors with a length (their second dim) and what fills them
    up: `pad={"input_ids": 0, "labels": -100}`. Every batch is then as long as its longest sample on any process, up to
    the next of a few `lengths` (of the planned length, by default), each of which has a program of its own.

    `besides` names planned inputs that the loader does not make: the script adds them, the same on every process.
    """
    return ShardedLoader(loader, pm, _Padding(pad, lengths, pm) if pad is not None else None, besides)


class ShardedLoader:
    """Iterable once per epoch, like a `DataLoader`. Left in the middle, the next iteration begins the next epoch.

    A process without rows gets batches of zero rows, with the entries that the loader's batches have. To know these it
    loads one sample, once; where it can not, it takes those of the batch given to `parallelize`.
    Random augmentations differ from process to process, as rows do; where all load the same rows they are the same.
    """

    def __init__(
        self, loader: Iterable[Any], pm: Parallel, padding: _Padding | None = None, besides: Sequence[str] = ()
    ) -> None:
        self._loader, self._pm, self._besides = loader, pm, besides
        self._tell, self._padding = pm.handed_out, padding
        self.handed_out = HandedOut()  # the last batch
        self._planned = pm.shares
        self._rows = self._rows_now(tells=pm.world.rank == 0)
        self._source: _Indexed | _Streamed
        if isinstance(loader, DataLoader) and loader.batch_sampler is not None and _by_index(loader):
            self._source = _Indexed(loader, self._rows, pm, besides)
        else:
            self._source = _Streamed(loader, self._rows, tells=pm.world.rank == 0)
        self.epoch = 0
        self.batches = 0  # handed out in this epoch
        self.seed = _agreed(_drawn_seed(loader), self._source.count(), pm.world)
        self._goes_on = False

    def _rows_now(self, *, tells: bool) -> _Rows:
        """The rows of this process by the plan there is."""
        made = {name: placed for name, placed in self._pm.inputs.items() if name not in self._besides}
        rows = _rows_of(self._pm, made)
        return _check_loader(self._loader, rows, tells=tells) if isinstance(self._loader, DataLoader) else rows

    @property
    def is_cut(self) -> bool:
        """Whether a process gets rows of its own of every batch; if not, each gets all rows."""
        return self._rows.at is not None

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        if not self._goes_on and self.batches:
            self.epoch, self.batches = self.epoch + 1, 0
        self._goes_on = False
        for batch, rows, content in self._followed():
            self.batches += 1
            if self._padding is not None:
                batch = self._padding.fill(batch)
            # Of a batch that all have whole nobody has rows, though with one row it looks as if one process had them.
            cut = rows if self.is_cut else 0
            self.handed_out = HandedOut(f"batch {self.batches} of epoch {self.epoch}{content}", cut)
            self.handed_out.mark(batch)
            self._tell(self.handed_out)
            yield batch
        self._tell(HandedOut())  # what comes next was not cut here
        self.epoch, self.batches = self.epoch + 1, 0

    def _followed(self) -> Iterator[_Batch]:
        """The batches of this epoch that are left; when shares change on the way, those that are left then, anew."""
        self._follow()
        while True:
            for found in self._source.open(_mixed(self.seed, self.epoch), skip=self.batches):
                yield found
                if self._follow() and self._source.opens_anew:
                    break
            else:
                return

    def _follow(self) -> bool:
        """Take the rows of another plan, if there is one now."""
        if self._planned is self._pm.shares:
            return False
        self._planned, self._rows = self._pm.shares, self._rows_now(tells=False)
        self._source = self._source.by_rows(self._rows)
        return True

    def state_dict(self) -> dict[str, int]:
        """Where it is, the same on every process."""
        return {"epoch": self.epoch, "batches": self.batches, "seed": self.seed, "rows": self._rows.batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next iteration goes on behind the last batch that was handed out."""
        if missing := [name for name in ("epoch", "batches", "seed") if name not in state]:
            raise BatchError(
                f"the loader's state has no {', '.join(missing)}",
                where=f"a state with {', '.join(map(str, state)) or 'nothing'}",
                do="give what state_dict() of a sharded loader returned",
            )
        before, now, batches = int(state.get("rows", 0)), self._rows.batch, int(state["batches"])
        if before and now and before != now:
            if batches * before % now:
                raise BatchError(
                    f"{batches} batches of {before} rows were handed out, which is no whole number of batches of {now}",
                    where=f"epoch {state['epoch']} of the saved run",
                    do=f"plan with a batch of {before} again, or resume from the end of an epoch",
                )
            batches = batches * before // now
        self.epoch, self.batches, self.seed = int(state["epoch"]), batches, int(state["seed"])
        self._goes_on = True


_Batch = tuple[Any, int, str]  # what this process gets, the rows of the whole batch, and what tells it from others


# Which rows


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows a process needs of a batch: its part, cut as `at` says, or all where some tensor is not cut in rows."""

    batch: int  # rows of a planned batch; 0 where tensors do not have the same number
    at: Placement | None  # None: all
    shares: Shares
    place: int
    planned: tuple[int, ...]  # the first dims of the batch's tensors

    @property
    def all(self) -> bool:
        return self.at is None and self.place >= 0

    @property
    def never(self) -> bool:
        """Whether this process has no row of any batch."""
        start, stop = self.part(_MANY * (self.at.unit if self.at is not None else 1))
        return start == stop

    def fits(self, rows: int) -> bool:
        return self.at is None or self.at.fits((rows,))

    def part(self, rows: int) -> tuple[int, int]:
        """From which row to which of a batch with so many."""
        if self.place < 0:
            return 0, 0
        if self.at is None:
            return 0, rows
        pieces = pieces_of(self.at, (rows,), self.shares)
        start = start_of(pieces, self.place) * self.at.unit
        return start, start + pieces[self.place] * self.at.unit


def _rows_of(pm: Parallel, inputs: Mapping[str, tuple[Leaf, Placement]]) -> _Rows:
    shapes = [leaf.value.shape for leaf, _ in inputs.values()]
    planned = tuple(sorted({shape[0] for shape in shapes if shape}))
    batch = planned[0] if len(planned) == 1 else 0
    # What a collate function makes of some rows is only known to be right where it is rows itself. Anything else, a
    # mask or a count, may depend on all of them.
    cuts = {_rows_per_process(leaf, at, pm.shares) for leaf, at in inputs.values()}
    is_cut = len(cuts) == 1 and None not in cuts and batch
    at = next(at for _, at in inputs.values()) if is_cut else None
    return _Rows(batch, at, pm.shares, pm.world.place, planned)


def _rows_per_process(leaf: Leaf, at: Placement, shares: Shares) -> tuple[int, ...] | None:
    """How many rows each process has of a tensor; None where it is not cut in rows."""
    if not at.is_shard or at.dim != 0 or at.outer != 1:
        return None
    return tuple(count * at.unit for count in pieces_of(at, leaf.value.shape, shares))


def _by_index(loader: DataLoader[Any]) -> bool:
    return not isinstance(loader.dataset, IterableDataset)


def _check_loader(loader: DataLoader[Any], rows: _Rows, *, tells: bool) -> _Rows:
    """The rows, with the size of a batch settled; or a refusal of a loader whose batches cannot be cut."""
    if any(isinstance(sampler, DistributedSampler) for sampler in _samplers(loader)):
        raise BatchError(
            "the loader has a DistributedSampler, which gives every process other samples",
            where="DataLoader(sampler=DistributedSampler(...))",
            do="leave it out and write shuffle=True: shard() hands every process its rows of the same global batch",
        )
    made_in_order = getattr(loader, "in_order", True) or not loader.num_workers
    if not made_in_order and not _by_index(loader):
        raise BatchError(
            "the loader hands out batches in any order, so processes would work on different ones",
            where="DataLoader(in_order=False)",
            do="leave in_order=False out",
        )
    sampler = loader.batch_sampler
    given = sampler.batch_size if type(sampler) is BatchSampler else loader.batch_size
    if given is None or not rows.planned:
        return rows
    if given not in rows.planned and tells:
        expected = " or ".join(map(str, rows.planned))
        warnings.warn(
            f"the loader makes batches of {given} samples, and the plan is for {expected}. batch_size is that of all "
            "devices together, of which each loads its share. Batches of another size work, in evaluation for "
            "example; what is planned for them is quicker",
            stacklevel=4,
        )
    return replace(rows, batch=given)


def _samplers(loader: DataLoader[Any]) -> Iterator[object]:
    """The samplers of a loader, from the outermost inwards."""
    seen: list[object] = []
    for found in (loader.batch_sampler, loader.sampler):
        while found is not None and not any(found is one for one in seen):
            seen.append(found)
            yield found
            found = getattr(found, "sampler", None)


# Randomness


def _mixed(*what: object) -> int:
    """A seed made of what is given."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, what)).encode()).digest()[:7], "big")


def _drawn_seed(loader: Iterable[Any]) -> int:
    """A seed from where the loader would draw its own, so that a seeded script stays one."""
    generator = loader.generator if isinstance(loader, DataLoader) else None
    if generator is None and isinstance(loader, DataLoader):
        generator = next((g for s in _samplers(loader) if (g := getattr(s, "generator", None)) is not None), None)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _agreed(seed: int, count: int, world: World) -> int:
    """Rank 0's seed, if all have the same number of batches: a process with fewer would leave the others waiting."""
    if world.size == 1 or not dist.is_available() or not dist.is_initialized():
        return seed
    told = torch.tensor([seed, count], dtype=torch.int64)
    with waiting("the seed of the loader"):
        dist.broadcast(told, 0, group=group_to_talk())
    seed, expected = (int(number) for number in told.tolist())
    if count != expected:
        raise BatchError(
            f"rank {world.rank} has {count} batches in an epoch and rank 0 has {expected}",
            where="shard(loader, pm)",
            do="give every process a loader over the same whole dataset",
        )
    return seed


class _Dice:
    """Random numbers of its own: inside, the default generators go on where they stopped when it was left."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: tuple[Any, ...] | None = None
        self._outside: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outside = self._states()
        if self._inside is None:
            # Only the CPU's: torch.manual_seed would seed every GPU too.
            torch.default_generator.manual_seed(self._seed)
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
        else:
            self._restore(self._inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = self._states()
        self._restore(self._outside)

    @staticmethod
    def _states() -> tuple[Any, ...]:
        return torch.default_generator.get_state(), random.getstate(), np.random.get_state()

    @staticmethod
    def _restore(states: tuple[Any, ...]) -> None:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _iterated(opened: Callable[[], Iterator[Any]], dice: _Dice) -> Iterator[Any]:
    """What an iterator gives, which draws from these dice while it is asked and not in between."""
    with dice:
        iterator = opened()
    while True:
        with dice:
            found = next(iterator, _END)
        if found is _END:
            return
        yield found


def _seed_samplers(loader: DataLoader[Any], seed: int) -> None:
    for sampler in _samplers(loader):
        if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
            sampler.generator = torch.Generator().manual_seed(seed)


# A dataset that can be asked for any sample


class _Indices:
    """A batch sampler that gives what it is set to. A loader with workers that stay asks it once an epoch."""

    def __init__(self) -> None:
        self.batches: Iterator[Sequence[Any]] = iter(())

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return self.batches


class _Indexed:
    """A loader of its own for the rows of this process."""

    def __init__(self, loader: DataLoader[Any], rows: _Rows, pm: Parallel, besides: Sequence[str]) -> None:
        self._loader, self._rows, self._pm, self._besides = loader, rows, pm, besides
        sampler = loader.batch_sampler
        self._sampler: Iterable[Sequence[Any]] = sampler  # type: ignore[assignment]
        self._tells = pm.world.rank == 0
        self._indices = _Indices()
        # Of batches that were drawn and not handed out yet (workers are ahead): the rows in all, and of this process.
        self._drawn: deque[tuple[int, int, str]] = deque()
        self._sample: Any = None  # the index of some sample, as soon as one is drawn
        self._example: Any = None  # a batch of one sample, where it was needed
        self._own = None if rows.never else self._loader_of_own()
        self._nothing = [
            torch.zeros((0, *value.shape[1:]) if value.shape else (), dtype=value.torch_dtype)
            for value in (leaf.value for leaf, _ in pm.inputs.values())
        ]

    opens_anew = True

    def by_rows(self, rows: _Rows) -> _Indexed:
        """The same for other rows."""
        return _Indexed(self._loader, rows, self._pm, self._besides)

    def _loader_of_own(self) -> DataLoader[Any]:
        loader = self._loader
        # Batches come in order (no in_order=False), or processes would work on different ones. Without a generator,
        # workers are seeded by the dice that are rolled when the loader is opened.
        return DataLoader(
            loader.dataset,
            batch_sampler=self._indices,  # type: ignore[arg-type]
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
        )

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def count(self) -> int:
        return _length(self._sampler)

    def open(self, seed: int, skip: int) -> Iterator[_Batch]:
        """The batches of an epoch from number `skip` on."""
        wanted = itertools.islice(self._global_batches(seed), skip, None)
        own, rows = self._own, self._rows
        if own is None:
            return ((self._no_rows(), len(indices), told_of_samples(indices)) for indices in wanted)
        # Rows that several processes load must be the same for all; rows of one are augmented on their own.
        dice = _Dice(_mixed(seed, skip, "all" if rows.all else rows.part(rows.batch)[0]))
        self._drawn.clear()
        self._indices.batches = (part for indices in wanted if (part := self._part(indices)))
        return self._in_order(_iterated(lambda: iter(own), dice))

    def _part(self, indices: Sequence[Any]) -> list[Any]:
        part = list(itertools.islice(indices, *self._rows.part(len(indices))))
        self._drawn.append((len(indices), len(part), told_of_samples(indices)))
        return part

    def _in_order(self, loaded: Iterator[Any]) -> Iterator[_Batch]:
        """What was loaded, with batches of no rows where a small batch has none for this process."""
        for batch in loaded:
            while not self._drawn[0][1]:
                yield self._no_rows(), *self._next_drawn()
            yield batch, *self._next_drawn()
        while self._drawn:
            yield self._no_rows(), *self._next_drawn()

    def _next_drawn(self) -> tuple[int, str]:
        rows, _, content = self._drawn.popleft()
        return rows, content

    def _no_rows(self) -> Any:
        # Tensors of their own: each knows which batch it is of.
        batch = self._pm.rebuild_batch([part.detach() for part in self._nothing])
        if isinstance(batch, Mapping):
            batch = {name: part for name, part in batch.items() if name not in self._besides}
        if self._example is None:
            self._example = self._of_one_sample(batch)
        return _with_entries_of(self._example, batch)

    def _of_one_sample(self, otherwise: Any) -> Any:
        """What the loader makes of one sample: batches without rows have the same entries. Where the data is not at
        hand, those that were planned."""
        with _Dice(0):
            try:
                return self._loader.collate_fn([self._loader.dataset[self._sample]])
            except Exception:
                return otherwise

    def _global_batches(self, seed: int) -> Iterator[Sequence[Any]]:
        _seed_samplers(self._loader, seed)
        for indices in _iterated(lambda: iter(self._sampler), _Dice(_mixed(seed, "order"))):
            if not self._rows.fits(len(indices)):
                self._tells = _tell_of_a_short_batch(len(indices), self._rows.batch, self._tells)
                continue
            self._sample = next(iter(indices), self._sample)
            yield indices


def _with_entries_of(example: Any, planned: Any) -> Any:
    """The entries of `example`, which have no rows here: those of `planned` that it has, and the others of its own."""
    if isinstance(example, Mapping) and isinstance(planned, Mapping):
        return {name: planned[name] if name in planned else _without_rows(part) for name, part in example.items()}
    if type(example) in (list, tuple) and isinstance(planned, list | tuple) and len(example) != len(planned):
        return type(example)([*planned[: len(example)], *map(_without_rows, example[len(planned) :])])
    return planned


def _without_rows(part: Any) -> Any:
    """An entry of a batch, as it is where no sample is in it."""
    if isinstance(part, Mapping):
        return {name: _without_rows(each) for name, each in part.items()}
    if isinstance(part, list | tuple) and not any(isinstance(each, Tensor) for each in part):
        return type(part)()
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[:0] if tensor.dim() else tensor.detach(), part)


def _length(of: object) -> int:
    """How many batches there are, or -1 where nobody knows."""
    try:
        return len(of)  # type: ignore[arg-type]
    except TypeError:
        return -1


def _tell_of_a_short_batch(got: int, planned: int, tells: bool) -> bool:
    if tells:
        warnings.warn(
            f"a batch of {got} rows is left out, and all others that can not be cut as the planned {planned} are",
            stacklevel=3,
        )
    return False


# Anything else that gives batches


class _Streamed:
    """Every process goes through all batches and keeps its rows of each. Other rows need no other batches, which could
    perhaps not be had twice."""

    opens_anew = False

    def by_rows(self, rows: _Rows) -> _Streamed:
        """This for other rows."""
        self._rows = rows
        return self

    def __init__(self, loader: Iterable[Any], rows: _Rows, *, tells: bool) -> None:
        self._loader, self._rows, self._tells = loader, rows, tells

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def count(self) -> int:
        return _length(self._loader)

    def open(self, seed: int, skip: int) -> Iterator[_Batch]:
        for batch in itertools.islice(self._whole_batches(seed), skip, None):
            rows = self._rows_in(batch)
            mine = batch if self._rows.all else _with_rows(batch, rows, *self._rows.part(rows))
            yield mine, rows, told_of_batch(batch)

    def _rows_in(self, batch: Any) -> int:
        """The planned number where some tensor has it, or else the number that all have."""
        lengths = set(_lengths(batch))
        return lengths.pop() if len(lengths) == 1 else self._rows.batch

    def _whole_batches(self, seed: int) -> Iterator[Any]:
        if isinstance(self._loader, DataLoader):
            _seed_samplers(self._loader, seed)
        for batch in _iterated(lambda: iter(self._loader), _Dice(_mixed(seed, "all"))):
            if self._rows.batch and not self._rows.fits(rows := self._rows_in(batch)):
                self._tells = _tell_of_a_short_batch(rows, self._rows.batch, self._tells)
                continue
            yield batch


def _lengths(batch: object) -> Iterator[int]:
    """The first dims of the tensors in a batch."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch.shape[0]
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _lengths(part)
    elif isinstance(batch, tuple | list):
        for part in batch:
            yield from _lengths(part)


def _with_rows(batch: Any, rows: int, start: int, stop: int) -> Any:
    """The batch with these rows of its tensors. What it does not know stays: the model cuts what comes whole."""
    if isinstance(batch, Tensor):
        return batch.narrow(0, start, stop - start) if batch.dim() and batch.shape[0] == rows else batch
    if isinstance(batch, MutableMapping):
        cut = copy.copy(batch)
        for name, part in batch.items():
            cut[name] = _with_rows(part, rows, start, stop)
        return cut
    if isinstance(batch, tuple | list):
        parts = [_with_rows(part, rows, start, stop) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


# Batches of different lengths


class _Padding:
    """Fills tensors up to a length that all processes have in common, one of a few."""

    def __init__(self, values: Mapping[str, float], lengths: Sequence[int], pm: Parallel) -> None:
        named = {name: leaf.value.shape[1] for name, (leaf, _) in pm.inputs.items() if len(leaf.value.shape) > 1}
        if unknown := [name for name in values if name not in named]:
            raise BatchError(
                f"pad names {unknown[0]!r}, which is no tensor of the batch with a length",
                where="shard(loader, pm, pad=...)",
                do=f"name {', '.join(named) or 'tensors with two dims'}",
            )
        planned = max(named[name] for name in values)
        self._values, self._pm = dict(values), pm
        self._lengths = sorted({*map(int, lengths)}) or list(pm.planned_lengths) or _ladder(planned)

    def fill(self, batch: Any) -> Any:
        leaves, spec = named_leaves(batch)
        longest = max((t.shape[1] for name in self._values if _has_length(t := leaves.get(name))), default=0)
        length = self._next(self._pm.largest(longest))
        for name, value in self._values.items():
            tensor = leaves.get(name)
            if not _has_length(tensor):
                continue
            if not tensor.shape[0]:
                leaves[name] = tensor.new_zeros((0, length, *tensor.shape[2:]))
            elif tensor.shape[1] < length:
                missing = [0, 0] * (tensor.dim() - 2) + [0, length - tensor.shape[1]]
                leaves[name] = torch.nn.functional.pad(tensor, missing, value=value)
        return in_form_of(batch, *pytree.tree_unflatten(list(leaves.values()), spec))

    def _next(self, length: int) -> int:
        found = next((step for step in self._lengths if step >= length), 0)
        if not found:
            raise BatchError(
                f"a batch has samples of length {length}, and the longest that is planned is {self._lengths[-1]}",
                where="shard(loader, pm, pad=...)",
                do="plan with a batch of the greatest length, cut samples, or give lengths=",
            )
        return found


def _has_length(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 1


def _ladder(longest: int) -> list[int]:
    """Five lengths up to the longest, in steps of about a quarter of it where most text is short."""
    return sorted({max(round(longest * part), 1) for part in (0.25, 0.375, 0.5, 0.75, 1.0)})
