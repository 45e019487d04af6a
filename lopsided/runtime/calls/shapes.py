"""Which lengths batches have: a few that stand for all of them, and the example batch at each.

In: an example batch and others as a loader makes them. Out: `Lengths`: up to five lengths and how often batches are
filled up to each, chosen so that least is filled up,

    argmin over lengths l_1 < … < l_k = longest   Σ over batches b   (least l_i ≥ length(b))

and `at_length`, the example with another length. Batches differ from each other in one length; how many rows they have
does not count, since a short last batch is met once an epoch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lopsided.capturing.call import in_form_of, named_leaves
from lopsided.errors import BatchError

MOST_LENGTHS = 5
"""Each has a program of its own."""

# So many batches of a loader are looked at.
_MOST_BATCHES = 1000


@dataclass(frozen=True)
class Lengths:
    """`lengths` go up; `often` has of each the fraction of batches that are filled up to it. `dims` are the dims of the
    batch's entries that have the length."""

    lengths: tuple[int, ...]
    often: tuple[float, ...]
    dims: tuple[tuple[str, int], ...]


def lengths_of(batch: object, batches: Iterable[object], most: int = MOST_LENGTHS) -> Lengths:
    """The lengths of a distribution of batches."""
    ours = _shapes(batch)
    with torch.random.fork_rng(devices=[]):
        seen = [_shapes(one) for one in itertools.islice(batches, _MOST_BATCHES)]
    if not seen:
        raise BatchError("there are no batches to plan for", where="batches=", do="give some, or leave it out")
    _check_alike(ours, seen)
    dims = tuple(
        (name, dim)
        for name, shape in ours.items()
        for dim in range(1, len(shape))
        if any(one[name][dim] != shape[dim] for one in seen)
    )
    counts: Counter[int] = Counter()
    for one in seen:
        found = {one[name][dim] for name, dim in dims}
        if len(found) > 1:
            raise BatchError(
                f"a batch has several lengths: {', '.join(f'{name} {list(one[name])}' for name, _ in dims)}",
                where="batches=",
                do="leave batches= out, and fill batches up to a few lengths: lopsided.shard(loader, pm, pad=...)",
            )
        counts.update(found)
    lengths = _fewest_filled(counts, most)
    often = [0] * len(lengths)
    for length, times in counts.items():
        often[next(k for k, up_to in enumerate(lengths) if up_to >= length)] += times
    return Lengths(lengths, tuple(times / len(seen) for times in often), dims)


def at_length(batch: object, length: int, dims: Sequence[tuple[str, int]]) -> object:
    """The batch with another length: its elements again from the beginning, or fewer of them."""
    leaves, spec = named_leaves(batch)
    for name, dim in dims:
        tensor = leaves[name]
        places = torch.arange(length, device=tensor.device) % max(tensor.shape[dim], 1)
        leaves[name] = tensor.index_select(dim, places)
    return in_form_of(batch, *pytree.tree_unflatten(list(leaves.values()), spec))


def _shapes(batch: object) -> dict[str, tuple[int, ...]]:
    leaves, _ = named_leaves(batch)
    return {name: tuple(value.shape) for name, value in leaves.items() if isinstance(value, Tensor)}


def _check_alike(ours: dict[str, tuple[int, ...]], seen: Sequence[dict[str, tuple[int, ...]]]) -> None:
    for one in seen:
        if one.keys() != ours.keys() or any(len(one[name]) != len(shape) for name, shape in ours.items()):
            theirs = ", ".join(f"{name} {list(shape)}" for name, shape in one.items())
            raise BatchError(
                f"a batch is not like the example: {theirs}",
                where="batches=",
                do=f"give batches with {', '.join(f'{name} {list(shape)}' for name, shape in ours.items())}",
            )


def _fewest_filled(counts: Counter[int], most: int) -> tuple[int, ...]:
    """Up to `most` lengths, the greatest among them, for which all batches together are shortest."""
    lengths = sorted(counts)
    before = [0, *itertools.accumulate(counts[length] for length in lengths)]

    @cache
    def best(end: int, left: int) -> tuple[float, tuple[int, ...]]:
        """For the first `end` lengths, the last of which is chosen, with `left` more to choose."""
        top = lengths[end - 1]
        found: tuple[float, tuple[int, ...]] = (float(before[end] * top), (top,))
        for cut in range(1, end) if left else ():
            cost, chosen = best(cut, left - 1)
            found = min(found, (cost + (before[end] - before[cut]) * top, (*chosen, top)))
        return found

    return best(len(lengths), most - 1)[1] if lengths else ()
