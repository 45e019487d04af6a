"""What does not fit, in words: on which device, by how much, what takes the room, and what would make it fit.

In: `Holding`s, shares, limits. Out: a `DoesNotFitError`, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lopsided.cluster.cluster import Kind
from lopsided.errors import DoesNotFitError
from lopsided.schedule.cost import Scale
from lopsided.schedule.memory import USES, Holding, bytes_per_kind


def describe_excess(
    held: Sequence[Holding],
    scale: Scale,
    limits: Sequence[int] | None = None,
    *,
    what: str = "the program",
    smaller_batch: bool = True,
) -> DoesNotFitError | None:
    """What to say if a device does not have the memory: which, how much is missing, what takes it. None if all fits.

    `limits` are the bytes that may be filled on each kind: all of a device's memory, unless given. A `smaller_batch` is
    among what would help, unless the batch is computed in rounds anyway.
    """
    needed = bytes_per_kind(held, scale)
    kinds = scale.cluster.kinds
    room = [kind.memory_bytes for kind in kinds] if limits is None else limits
    k = max(range(len(kinds)), key=lambda k: needed[k] - room[k])
    kind, missing = kinds[k], needed[k] - room[k]
    if missing <= 0:
        return None
    start = scale.cluster.spans[k][0]
    here = [holding for holding in held if holding.on.have(k)]
    by_use = dict.fromkeys(USES, 0.0)
    by_name: dict[str, float] = {}
    for holding in here:
        size = holding.bytes * scale.fractions(holding.cut)[k]
        by_use[holding.use] += size
        by_name[holding.what] = by_name.get(holding.what, 0.0) + size
    uses = [(use, size) for use, size in by_use.items() if size >= 1]
    biggest = sorted(by_name.items(), key=lambda item: (-item[1], item[0]))[:5]
    uses_of = {name: [h.use for h in here if h.what == name] for name, _ in biggest}
    return DoesNotFitError(
        f"{what} needs {_gib(needed[k])} on {scale.cluster.device_names[start]}{_more(kind)}, "
        f"which has {_gib(kind.memory_bytes)}{_of_which(kind, room[k])}: {_gib(missing)} too much",
        where=f"cluster {scale.cluster.name}",
        uses=", ".join(f"{use} {_gib(size)}" for use, size in sorted(uses, key=lambda item: -item[1])),
        biggest="; ".join(f"%{name} ({', '.join(dict.fromkeys(uses_of[name]))}) {_gib(s)}" for name, s in biggest),
        do=_remedies(by_use, missing, _gib(missing), smaller_batch),
    )


def _remedies(by_use: Mapping[str, float], missing: float, text: str, smaller_batch: bool) -> str:
    """What would make it fit, each with whether it is enough by itself."""
    of_batch = sum(by_use[use] for use in ("saved", "recomputed", "working"))
    ways = [f"another {text} on that device"]
    if smaller_batch and of_batch > missing:
        part = math.floor(100 * (1 - missing / of_batch))
        ways.append(f"a batch of at most {part} % of this one")
    if (state := by_use["optimizer"]) > 0:
        enough = "" if state > missing else " (not enough by itself)"
        ways.append(f"an optimizer with less state: it takes {_gib(state)}{enough}")
    return "; or ".join([*ways, "a narrower dtype, or more devices"])


def check_fits(
    held: Sequence[Holding],
    scale: Scale,
    limits: Sequence[int] | None = None,
    *,
    what: str = "the program",
    host: DoesNotFitError | None = None,
    smaller_batch: bool = True,
) -> None:
    """Refuse what does not fit, in words; and say what else did not fit in the memory of a host."""
    error = describe_excess(held, scale, limits, what=what, smaller_batch=smaller_batch)
    if error is not None:
        facts = error.facts if host is None else error.facts | {"host": host.what}
        raise DoesNotFitError(error.what, where=error.where, do=error.do, **facts)


def _more(kind: Kind) -> str:
    return f" and {kind.devices - 1} like it" if kind.devices > 1 else ""


def _of_which(kind: Kind, room: int) -> str:
    return "" if room == kind.memory_bytes else f" ({_gib(room)} of it usable)"


def _gib(size: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit / 10:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} B"
