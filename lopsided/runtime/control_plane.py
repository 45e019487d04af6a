"""How the processes of a parallel module agree on its state.

In: a parallel module. Out: `ControlPlane`, once for each module: groups of processes apart from training, in which all
raise what one of them refuses. Every rank of the world is in them, bystanders too, so their ranks are the global ones.

The groups are gloo whatever training uses: what is agreed on lies in main memory. A save that runs beside training has
one to itself, since collectives of two threads must not mix.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lopsided.comm.world import lasting_group, patience_s, waiting
from lopsided.errors import CheckpointError, LopsidedError

if TYPE_CHECKING:
    from lopsided.runtime.checkpoint.checkpoint import Saving
    from lopsided.runtime.parallel import Parallel

T = TypeVar("T")

_log = logging.getLogger("lopsided")


class ControlPlane:
    """The processes of the world, when they talk about the state of a parallel module."""

    def __init__(self) -> None:
        ranks = range(dist.get_world_size())
        self.group = lasting_group("state", ranks, "gloo", patience_s())
        self.group_of_saves = lasting_group("saves", ranks, "gloo", patience_s())
        self.saving: Saving | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def all(self, job: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
        """What `job` returned on each rank. If it fails on one, it fails on all. A thread beside training has the
        group of saves."""
        group = group or self.group
        mine: tuple[T | None, LopsidedError | None] = (None, None)
        own: Exception | None = None
        try:
            mine = (job(), None)
        except LopsidedError as error:
            own, mine = error, (None, error)
        except Exception as error:
            own, mine = error, (None, _failed(self.rank, error))
        told: list[tuple[T | None, LopsidedError | None]] = [mine] * dist.get_world_size(group)
        with waiting("what all ranks say of their state"):
            dist.all_gather_object(told, mine, group=group)
        if own is not None:
            raise own
        for _, refused in told:
            if refused is not None:
                raise refused
        return [result for result, _ in told]  # type: ignore[misc]

    def each(self, job: Callable[[], T]) -> T:
        """What `job` returned here, if it failed nowhere."""
        mine: list[T] = []
        self.all(lambda: mine.append(job()))
        return mine[0]

    def first(self, job: Callable[[], T]) -> T:
        """What `job` returned on rank 0, the only one that does it."""
        return self.all(lambda: job() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def warn(self, text: str, *args: object) -> None:
        """Written to the log once, by rank 0."""
        if self.rank == 0:
            _log.warning(text, *args)

    def send(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor in main memory with that of the rank `source`."""
        if tensor.numel():
            # As bytes, since gloo does not know every dtype.
            with waiting(f"a tensor of rank {source}'s state"):
                dist.broadcast(tensor.view(-1).view(torch.uint8), src=source, group=self.group)


def _failed(rank: int, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"rank {rank} failed: {type(error).__name__}: {error}", where=f"rank {rank}", do="see its traceback"
    )


_accord: tuple[object, float, ControlPlane] | None = None  # default group, patience


def accord_of(pm: Parallel) -> ControlPlane:
    """The accord of the world that this module is in. The first call makes it and must be made by all ranks."""
    global _accord
    default = dist.group.WORLD
    if _accord is None or _accord[:2] != (default, patience_s()):
        before = _accord[2].saving if _accord is not None and _accord[0] is default else None
        _accord = (default, patience_s(), ControlPlane())
        _accord[2].saving = before
    return _accord[2]
