"""What is chosen beside the program and the shares, by name: it prints, is in plan files, and parses back.

In: text, or what the planner chose. Out: `Decisions`, which `lower` turns into a `Schedule`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Literal

from lopsided.errors import ProgramError

BUCKET_BYTES = 25 * 2**20
"""How many bytes of small tensors are sent together: what DistributedDataParallel does unless told otherwise."""


Level = Literal["cheap", "attention", "whole", "offload", "chunked"]
LEVELS: tuple[Level, ...] = ("cheap", "attention", "whole")
"""What of a region runs again: what costs hardly more than reading its operands; products of computed values (which is
what attention is), too; or the products with parameters as well. Each holds less than the one before.

Of `offload`, nothing runs again: what its nodes save travels to the memory of the host and back.

`chunked` is another matter: a loss and the product before it, forward and backward together, some rows at a time, so
that nothing of it is kept and nothing runs again (`lopsided.schedule.loss_heads`)."""
REGION_LEVELS: tuple[Level, ...] = (*LEVELS, "offload")


@dataclass(frozen=True, slots=True)
class Rerun:
    """A region that the planner has run again in the backward pass in place of keeping what its nodes save; or,
    chunked, `rows` at a time.

    `kinds` are the numbers of the kinds of devices that do so, in the order of the cluster; without, all do, and so
    they do where the region sends something forward. The others keep what they would keep anyway.
    """

    first: str  # node
    last: str
    level: Level = "whole"
    kinds: tuple[int, ...] = ()
    rows: int = 0  # at a time, of what is chunked

    def __str__(self) -> str:
        level = f"{self.rows}-rows" if self.level == "chunked" else self.level
        on = f":{'+'.join(map(str, self.kinds))}" if self.kinds else ""
        return f"{self.first}..{self.last}:{level}{on}"


_RERUN = re.compile(
    r"([^\s.:,]+)\.\.([^\s.:,]+):(?:(cheap|attention|whole|offload)(?::(\d{1,4}(?:\+\d{1,4})*))?|([1-9]\d{0,11})-rows)"
)


def parse_rerun(text: str) -> Rerun:
    """The region that prints as `text`."""
    match = _RERUN.fullmatch(text)
    if match is None:
        raise ProgramError(
            f"{text[:80]!r} names no region that runs again",
            do="write FIRST..LAST:LEVEL, two nodes and one of cheap, attention, whole, offload, or N-rows",
        )
    if match[5]:
        return Rerun(match[1], match[2], "chunked", rows=int(match[5]))
    level: Level = next(level for level in REGION_LEVELS if level == match[3])
    return Rerun(match[1], match[2], level, tuple(map(int, match[4].split("+"))) if match[4] else ())


@dataclass(frozen=True, slots=True)
class OnHost:
    """Devices of a kind keep optimizer state in the memory of their host, and fetch it for the update.

    That of the first trained parameters, in the order of the graph, which together have so many percent of all bytes.
    """

    kind: int
    percent: int = 100

    def __str__(self) -> str:
        return f"{self.kind}:{self.percent}"


_ON_HOST = re.compile(r"(\d{1,4}):(\d{1,3})")


def parse_on_host(text: str) -> OnHost:
    """The decision that prints as `text`."""
    match = _ON_HOST.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= 100:
        raise ProgramError(
            f"{text[:80]!r} does not say whose optimizer state is in host memory",
            do="write KIND:PERCENT, the number of a kind of devices and 1 to 100",
        )
    return OnHost(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class Decisions:
    """What is chosen beside the program and the shares. Whole numbers and yes or no, so that they print and parse."""

    bucket_bytes: int = BUCKET_BYTES  # a bucket is sent when it has as many
    prefetch: int = 2  # buckets of gathered parameters at once: one in use, the next on its way
    regather: bool = False  # gathered copies are freed after their forward use and gathered again for the backward pass
    recompute: bool = True  # the regions that the model checkpoints run again; otherwise they keep what they save
    overlap: bool = True  # buckets travel behind computing; otherwise everyone waits for them
    stretch: int = 0  # at most so many nodes, between two communications, run as one function; 0: each by itself
    reruns: tuple[Rerun, ...] = ()  # beside those that the model checkpoints, in the order of the program
    on_host: tuple[OnHost, ...] = ()  # optimizer state in the memory of the host, by kind of device
    microbatches: int = 1  # rounds of the two passes, each of as many rows of the batch; the program is that of one
    state_bits: int = 0  # of a number of optimizer state between updates; 0: as the optimizer keeps it

    def __str__(self) -> str:
        usual = Decisions()
        rare = {
            name for name in ("stretch", "microbatches", "state_bits") if getattr(self, name) == getattr(usual, name)
        }
        numbers = [f for f in fields(self) if f.name not in LISTED and f.name not in rare]
        told = [f"{field.name}={int(getattr(self, field.name))}" for field in numbers]
        listed = ((name, getattr(self, name)) for name in LISTED)
        return " ".join([*told, *(f"{name}={','.join(map(str, one))}" for name, one in listed if one)])


LISTED = ("reruns", "on_host")
"""The decisions that are lists, of what prints without a space."""


_DECISIONS = re.compile(r"((?:\w+=\d+(?: |$))+)(?:reruns=(\S+) ?)?(?:on_host=(\S+))?")


def parse_decisions(text: str) -> Decisions:
    """The decisions that print as `text`.

    >>> chosen = Decisions(regather=True, on_host=(OnHost(1),))
    >>> parse_decisions(str(chosen)) == chosen
    True
    """
    known = {field.name: field.type for field in fields(Decisions) if field.name not in LISTED}
    match = _DECISIONS.fullmatch(text)
    if match is None:
        raise ProgramError(f"{text[:80]!r} are no decisions", do=f"give name=number for {', '.join(known)}")
    given: dict[str, int | bool] = {}
    for name, number in (pair.split("=") for pair in match[1].split()):
        if name not in known or len(number) > 18:
            raise ProgramError(f"there is no decision {name}={number[:20]}", do=f"give {', '.join(known)}")
        given[name] = bool(int(number)) if known[name] == "bool" else int(number)
    reruns = tuple(map(parse_rerun, match[2].split(","))) if match[2] else ()
    on_host = tuple(map(parse_on_host, match[3].split(","))) if match[3] else ()
    return replace(Decisions(), **given, reruns=reruns, on_host=on_host)  # type: ignore[arg-type]
