"""Optimizer state kept in 8 bits a number: of which parameters, the bytes that takes, and the seconds.

In: what was decided (`Decisions.state_bits`), an `Optimizer`, a parameter. Out: of every parameter in how many bits its
state is kept (`bits_of_state`), bytes (`state_bytes`), and what an update takes more (`coding`).

    kept     a byte for each number, and a scale in f32 for each block of `BLOCK` of them, within a device's piece
    update   a slice of the state is written out as the optimizer made it, updated, and put into 8 bits again

The state of small parameters stays as it is: there is little to free, and norms and biases are worth their digits.
"""

from __future__ import annotations

from lopsided.errors import ProgramError
from lopsided.ir.graph import Leaf, Value
from lopsided.ir.placement import Placement
from lopsided.ir.program import Program
from lopsided.schedule.cost import Affine, Costs, Optimizer

BITS = 8
BLOCK = 256
"""Numbers that have a scale in common, as everybody has it who keeps state so."""
LEAST_ELEMENTS = 4096
"""Of a parameter, all devices together, whose state is kept so."""
AT_A_TIME = 2**20
"""Numbers are written out and put back so many at a time: what that works with is a few times as many bytes."""

_SCALE_BYTES = 4
_MOVED_BYTES = 54
"""Bytes that are read and written for each number of the state in an update, beside the update itself: 21 to write it
out (its code, that as an index, the entry of the table, times the scale), 33 to put it back (largest of the block,
divided by it, bits as an index, code)."""
_KERNELS = 10


def bits_of_state(program: Program, bits: int) -> dict[str, int]:
    """Of every parameter whose state is kept in few bits, in how many."""
    if bits not in (0, BITS):
        raise ProgramError(
            f"optimizer state cannot be kept in {bits} bits", do=f"give {BITS}, or 0 to keep it as it is"
        )
    return {value.name: bits for value in program.graph.updated if is_coded(value, bits)}


def is_coded(value: Value, bits: int) -> bool:
    return bool(bits) and value.elements >= LEAST_ELEMENTS and value.torch_dtype.is_floating_point


def state_bytes(optimizer: Optimizer, value: Value, bits: int) -> int:
    """What an optimizer keeps of a whole parameter from step to step."""
    return optimizer.state * (coded_bytes(value.elements) if is_coded(value, bits) else value.bytes)


def coded_bytes(elements: int) -> int:
    """
    >>> coded_bytes(1000), coded_bytes(0)
    (1016, 0)
    """
    return elements + _SCALE_BYTES * -(-elements // BLOCK)


def coding(costs: Costs, leaf: Leaf, placement: Placement) -> tuple[Affine, ...]:
    """What it takes more to update a parameter so, per kind, where its state is kept in 8 bits."""
    numbers = costs.optimizer.state * leaf.value.elements
    found = []
    for kind in costs.cluster.kinds:
        launches = _KERNELS * kind.launch_s
        constant, slope = costs.optimizer.state * launches, numbers * _MOVED_BYTES / kind.bytes_per_s
        slope += launches * (numbers // AT_A_TIME)
        found.append(Affine(constant, slope) if placement.is_shard else Affine(constant + slope, 0.0))
    return tuple(found)
