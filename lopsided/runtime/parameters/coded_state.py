"""Numbers in 8 bits: tensors of optimizer state as they are kept between updates.

In: a tensor, and whether what it holds is never negative. Out: `Coded`, a tensor that reads like the one it was made
of: whatever is done with it is done with its numbers written out, and what is written to it is coded. Saved to a file
or copied deeply it is an ordinary tensor. `Coded.encode` and `Coded.decode` are what updates use.

Every `BLOCK` numbers of a piece have a scale, their largest magnitude, and each is the nearest entry of a table times
that (Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022). The tables are the paper's "dynamic"
ones, as torchao and bitsandbytes have them, but for two entries:

    signed      -1 takes the place of the negative entry nearest to 0. So the largest of a block is kept exactly, and
                what has been read and is coded again is the same: checkpoints go on to the last bit
    unsigned    what is not 0 never becomes 0: a second moment of 0 under a first one that is not would be a step
                without bounds

The entry is looked up by the upper bits of a number, so a number that is nearly between two entries may be given the
other one. Numbers that are none make none of their block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lopsided.schedule.coded_state import AT_A_TIME, BLOCK

NEVER_NEGATIVE = frozenset(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"))
"""What torch's optimizers call their averages and sums of squares."""

_SHIFT = 12  # of the 32 bits of a float: sign, exponent and 11 bits of the fraction are looked up
_CELLS = 1 << 32 - _SHIFT


class Coded(Tensor):
    """A tensor in 8 bits a number, of the dtype and shape that it had."""

    codes: Tensor  # a byte for each number, flat
    scales: Tensor  # f32, one for each block
    signed: bool

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, of: Tensor, is_signed: bool) -> Coded:
        # Numbers lie as they lay: the update of a kernel that runs through memory needs that.
        strides = torch.empty_like(of, device="meta").stride()
        made: Coded = Tensor._make_wrapper_subclass(cls, of.shape, strides, dtype=of.dtype, device=codes.device)
        made.codes, made.scales, made.signed = codes, scales, is_signed
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    @staticmethod
    def of(value: Tensor, *, is_signed: bool, pinned_on_host: bool = False) -> Coded:
        """A tensor in 8 bits, where it is or in the memory of the host."""
        place = torch.device("cpu") if pinned_on_host else value.device
        pinned = pinned_on_host and value.device.type == "cuda"
        codes = torch.empty(value.numel(), dtype=torch.uint8, device=place, pin_memory=pinned)
        scales = torch.empty(-(-value.numel() // BLOCK), dtype=torch.float32, device=place, pin_memory=pinned)
        return Coded(codes, scales, value, is_signed).encode(value)

    @torch.no_grad()
    def encode(self, value: Tensor) -> Coded:
        """Take these numbers in place of those it has. On a GPU that is in the order of the current stream."""
        if value.stride() != self.stride():
            value = torch.empty_strided(self.shape, self.stride(), dtype=value.dtype, device=value.device).copy_(value)
        flat = value.detach().as_strided((value.numel(),), (1,))
        for start in range(0, flat.numel(), AT_A_TIME):
            codes, scales = _coded(flat[start : start + AT_A_TIME], self.signed)
            self.codes[start : start + len(codes)].copy_(codes, non_blocking=True)
            self.scales[start // BLOCK : start // BLOCK + len(scales)].copy_(scales, non_blocking=True)
        return self

    @torch.no_grad()
    def decode(self, device: torch.device | None = None) -> Tensor:
        """Its numbers, written out, where it is or on another device."""
        place = device or self.codes.device
        made = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=place)
        flat = made.as_strided((made.numel(),), (1,))
        table = _entries(self.signed, place)
        for start in range(0, flat.numel(), AT_A_TIME):
            codes = self.codes[start : start + AT_A_TIME].to(place, non_blocking=True)
            scales = self.scales[start // BLOCK : (start + AT_A_TIME) // BLOCK].to(place, non_blocking=True)
            found = table.index_select(0, codes.int())
            whole = len(codes) // BLOCK * BLOCK
            found[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
            found[whole:].mul_(scales[whole // BLOCK :])
            flat[start : start + len(codes)].copy_(found)
        return made

    @property
    def kept_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Coded({list(self.shape)}, {self.dtype}, {self.device}, {'signed' if self.signed else 'unsigned'})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decode().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = memo[id(self)] = self.decode()
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        written: dict[int, tuple[Coded, Tensor]] = {}

        def plain(one: Any) -> Any:
            return written.setdefault(id(one), (one, one.decode()))[1] if isinstance(one, Coded) else one

        found = func(*tree_map(plain, args), **tree_map(plain, dict(kwargs or {})))
        if func._schema.is_mutable:
            for coded, numbers in written.values():
                coded.encode(numbers)
            back = {id(numbers): coded for coded, numbers in written.values()}
            found = tree_map(lambda one: back.get(id(one), one), found)
        return found


def _coded(flat: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """The codes of some numbers, and the scales of their blocks; the last may be shorter."""
    numbers = flat.float()
    whole = len(numbers) // BLOCK * BLOCK
    blocks = [part for part in (numbers[:whole].view(-1, BLOCK), numbers[whole:].view(1, -1)) if part.numel()]
    scales = [part.abs().amax(1).clamp_min_(_TINY) for part in blocks]
    divided = torch.cat([(part / scale[:, None]).view(-1) for part, scale in zip(blocks, scales, strict=True)])
    cells = divided.view(torch.int32).bitwise_right_shift_(_SHIFT)
    cells = cells.bitwise_and_(_CELLS - 1) if is_signed else cells.clamp_min_(0)
    return _codes(is_signed, flat.device).index_select(0, cells), torch.cat(scales)


_TINY = torch.finfo(torch.float32).tiny


# Tables


@lru_cache(maxsize=16)
def _entries(is_signed: bool, device: torch.device) -> Tensor:
    """The entry of each code, the smallest first."""
    return torch.tensor(table(is_signed=is_signed), dtype=torch.float32, device=device)


def table(*, is_signed: bool) -> tuple[float, ...]:
    """256 numbers from -1, or 0, to 1, thickest at 0: of each power of ten twice as many as of the next smaller.

    >>> len(table(is_signed=True)), table(is_signed=True)[0], table(is_signed=False)[0], table(is_signed=False)[-1]
    (256, -1.0, 0.0, 1.0)
    """
    found = [0.0, 1.0]
    powers = 7
    for power in range(powers):
        steps = 2 ** (power + (0 if is_signed else 1))
        width = 0.9 / steps
        middles = [10.0 ** (power - powers + 1) * (0.1 + width * (k + 0.5)) for k in range(steps)]
        found += middles + ([-middle for middle in middles] if is_signed else [])
    found.sort()
    if is_signed:
        found.remove(max(entry for entry in found if entry < 0))
        found.insert(0, -1.0)
    return tuple(found)


@lru_cache(maxsize=16)
def _codes(is_signed: bool, device: torch.device) -> Tensor:
    """The code of every cell: of all numbers with the same upper bits."""
    entries = _entries(is_signed, torch.device("cpu"))
    cells = torch.arange(_CELLS if is_signed else _CELLS // 2, dtype=torch.int64)
    middles = (cells << _SHIFT | 1 << _SHIFT - 1).to(torch.int32).view(torch.float32)
    found = torch.bucketize(middles.nan_to_num(nan=1.0).clamp(-1.0, 1.0), (entries[1:] + entries[:-1]) / 2)
    if not is_signed:
        found[1:].clamp_min_(1)
    return found.to(torch.uint8).to(device)
