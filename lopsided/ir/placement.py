"""What a device holds of a value, and how a length is cut into unequal pieces.

In: nothing. Out: `Placement` (`I`, `R`, `P`, `S(dim)`), `Shares`, and `cut`, the integer pieces of a length.

A shard placement names more than a dim. "Cuts belong to indices, not to tensors": twenty rows of seven seen as one
dim of 140 must be cut between rows. So a shard sees its dim as `outer × length × unit` elements and cuts
the `length` in the middle: `S0/7` above, with unit 7. An outer count lets the three matrices of a fused
query-key-value projection be cut alike (`S0x3/64`: three blocks, each cut in heads of 64).

Not everything need be cut alike: a device may store more than it computes. A shard can name the shares that cut it
(`S0@state`); without a name it is cut by the work shares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

import torch
from torch import Tensor

from lopsided.errors import ProgramError, SharesError


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """One of `I`, `R`, `P`, or a shard `S` along `dim`, cut in the middle of `outer × length × unit`.

    `by` names the shares that say how long each device's piece is; "" is the work shares.

    >>> str(S(2)), str(S(0, unit=7)), str(S(1, outer=3, unit=64)), str(S(0, by="state"))
    ('S2', 'S0/7', 'S1x3/64', 'S0@state')
    """

    kind: str
    dim: int = -1
    outer: int = 1
    unit: int = 1
    by: str = ""
    # Placements are keys everywhere: their hash is computed once.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.kind, self.dim, self.outer, self.unit, self.by)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_whole(self) -> bool:
        """Every device holds the whole value (`I` and `R` differ in what their gradient is)."""
        return self.kind in ("I", "R")

    def __str__(self) -> str:
        if not self.is_shard:
            return self.kind
        outer = f"x{self.outer}" if self.outer > 1 else ""
        unit = f"/{self.unit}" if self.unit > 1 else ""
        by = f"@{self.by}" if self.by else ""
        return f"S{self.dim}{outer}{unit}{by}"

    __repr__ = __str__

    def length(self, shape: Sequence[int]) -> int:
        """How many units there are to cut."""
        return shape[self.dim] // (self.outer * self.unit)

    def fits(self, shape: Sequence[int]) -> bool:
        if not self.is_shard:
            return True
        return 0 <= self.dim < len(shape) and shape[self.dim] % (self.outer * self.unit) == 0

    def cut_by(self, by: str) -> Placement:
        """The same placement, cut by the shares of this name."""
        return S(self.dim, self.outer, self.unit, by) if self.is_shard else self

    def local_shape(self, shape: Sequence[int], pieces: Sequence[int], device: int) -> tuple[int, ...]:
        """The shape of what `device` holds, given the pieces (in units) of every device."""
        if not self.is_shard:
            return tuple(shape)
        local = list(shape)
        local[self.dim] = self.outer * pieces[device] * self.unit
        return tuple(local)


I = Placement("I")  # noqa: E741  (the paper-and-pencil name; `lopsided.ir.placement.I` is clear where it is used)
R = Placement("R")
P = Placement("P")


@cache
def S(dim: int, outer: int = 1, unit: int = 1, by: str = "") -> Placement:
    return Placement("S", dim, outer, unit, by)


_TEXT = re.compile(r"S(\d+)(?:x([1-9]\d*))?(?:/([1-9]\d*))?(?:@(\w+))?")


def parse_placement(text: str) -> Placement:
    """The placement that prints as `text`."""
    if text in ("I", "R", "P"):
        return Placement(text)
    match = _TEXT.fullmatch(text)
    if not match:
        raise ProgramError(
            f"{text!r} is not a placement", do="write I, R, P, S<dim>, S<dim>/<unit> or S<dim>x<outer>/<unit>"
        )
    dim, outer, unit, by = match.groups()
    return S(int(dim), int(outer or 1), int(unit or 1), by or "")


def check_shares(shares: Sequence[float]) -> tuple[float, ...]:
    """The shares as a tuple, refused unless they are fractions of one."""
    if not shares:
        raise SharesError("there are no shares", do="give one share per device, for example 0.5,0.3,0.2")
    whole = sum(shares)
    if min(shares) >= 0 and abs(whole - 1) <= 1e-6:
        # Exactly one, so that pieces of however long a dim sum to its length.
        return tuple(share / whole for share in shares)
    text = ", ".join(f"{share:g}" for share in shares)
    if any(not math.isfinite(share) for share in shares):
        raise SharesError(f"shares must be finite numbers, got {text}", do="give each device a fraction of the work")
    if any(share < 0 for share in shares):
        raise SharesError(f"a share is negative: {text}", do="give a device that should do nothing a share of 0")
    raise SharesError(
        f"shares sum to {whole:g}, not 1: {text}",
        do="divide each by their sum: " + ", ".join(f"{share / whole:.4g}" for share in shares)
        if whole
        else "give at least one device something to do",
    )


@lru_cache(maxsize=65536)
def cut(length: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Cut `length` units into pieces as near to the shares as whole units allow (largest remainder).

    >>> cut(7, (0.5, 0.3, 0.2))
    (4, 2, 1)
    >>> cut(2, (0.25, 0.25, 0.5)), cut(5, (0.0, 1.0))
    ((1, 0, 1), (0, 5))
    """
    ideal = [length * share for share in shares]
    pieces = [math.floor(x + 1e-9) for x in ideal]
    # Ties go to the device with the lower number, so that a cut is a function of its arguments. A device with a
    # share of 0 never gets a unit, even when rounding leaves one over.
    by_remainder = sorted((d for d in range(len(shares)) if shares[d] > 0), key=lambda d: (pieces[d] - ideal[d], d))
    for k in range(length - sum(pieces)):
        pieces[by_remainder[k % len(by_remainder)]] += 1
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Shares:
    """How unequal the pieces are: the work shares, shares with a name, and cuts that are settled to the unit.

    A name that is not there stands for the work shares. `cuts` holds (name, length, pieces) where rounding was chosen
    with more in mind than nearness to the shares.

    >>> shares = Shares((0.5, 0.3, 0.2), named=(("state", (0.2, 0.4, 0.4)),), cuts=(("", 7, (3, 2, 2)),))
    >>> shares.cut(7), shares.cut(10), shares.cut(10, "state")
    ((3, 2, 2), (5, 3, 2), (2, 4, 4))
    """

    work: tuple[float, ...]
    named: tuple[tuple[str, tuple[float, ...]], ...] = ()
    cuts: tuple[tuple[str, int, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        check_shares(self.work)
        for name, shares in self.named:
            check_shares(shares)
            if len(shares) != len(self.work):
                raise SharesError(
                    f"there are {len(shares)} shares {name!r} for {len(self.work)} devices",
                    do="give one share per device",
                )
        for name, length, pieces in self.cuts:
            if len(pieces) != len(self.work) or min(pieces) < 0 or sum(pieces) != length:
                raise SharesError(
                    f"the cut of {length} by {name or 'work'!r} is not one: {', '.join(map(str, pieces))}",
                    do=f"give {len(self.work)} pieces of 0 or more that sum to {length}",
                )

    def __len__(self) -> int:
        return len(self.work)

    def __iter__(self) -> Iterator[float]:
        return iter(self.work)

    def of(self, by: str = "") -> tuple[float, ...]:
        """The fractions of this name."""
        return next((shares for name, shares in self.named if name == by), self.work)

    def cut(self, length: int, by: str = "") -> tuple[int, ...]:
        settled = next((p for name, total, p in self.cuts if name == by and total == length), None)
        return cut(length, self.of(by)) if settled is None else settled


AnyShares = Shares | tuple[float, ...]


def pieces_of(placement: Placement, shape: Sequence[int], shares: AnyShares) -> tuple[int, ...]:
    """The pieces of a value under a shard placement, in units, one per device."""
    length = placement.length(shape)
    return shares.cut(length, placement.by) if isinstance(shares, Shares) else cut(length, shares)


def start_of(pieces: Sequence[int], device: int) -> int:
    return sum(pieces[:device])


def take_piece(whole: Tensor, placement: Placement, pieces: Sequence[int], device: int) -> Tensor:
    """The part of a whole value that `device` holds under a shard placement."""
    dim, start, count = placement.dim, start_of(pieces, device), pieces[device]
    if placement.outer == 1:
        return whole.narrow(dim, start * placement.unit, count * placement.unit)
    blocks = _in_blocks(whole, placement)
    return blocks.narrow(dim + 1, start * placement.unit, count * placement.unit).flatten(dim, dim + 1)


def _in_blocks(tensor: Tensor, placement: Placement) -> Tensor:
    """The dim of the placement as two: its outer blocks, and what each holds."""
    shape, dim = tensor.shape, placement.dim
    return tensor.reshape(*shape[:dim], placement.outer, shape[dim] // placement.outer, *shape[dim + 1 :])


def join_pieces(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole value whose pieces these are: the inverse of `take_piece` over all devices."""
    dim = placement.dim
    if placement.outer == 1:
        return torch.cat(list(parts), dim)
    blocks = [_in_blocks(part, placement) for part in parts]
    return torch.cat(blocks, dim + 1).flatten(dim, dim + 1)


def place_in_zeros(
    part: Tensor, placement: Placement, shape: Sequence[int], pieces: Sequence[int], device: int
) -> Tensor:
    """A whole-sized value that is this device's piece where it belongs and zero elsewhere."""
    whole = part.new_zeros(tuple(shape))
    dim, start, count = placement.dim, start_of(pieces, device), pieces[device]
    if placement.outer == 1:
        whole.narrow(dim, start * placement.unit, count * placement.unit).copy_(part)
    else:
        into = _in_blocks(whole, placement).narrow(dim + 1, start * placement.unit, count * placement.unit)
        into.copy_(_in_blocks(part, placement))
    return whole
