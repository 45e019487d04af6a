"""Which nodes run as one function: stretches of a program between two communications that all devices wait for.

In: the lowered steps of a program in order. Out: the same in groups; a group of several is a stretch, which a device
may compile as one function.

A stretch takes its parameters before it begins and gives their gradients when its backward pass is over, so it must not
be long where gradients travel behind computing. It ends

    before a node that waits      for a conversion that sends something, forward or backward
    around a node that talks      which sends something by itself
    with a checkpointed region    which runs again as a whole, but for nodes that are spared that: these stand alone
    where the model is narrow     after at most so many nodes, where the fewest values with a gradient lead on: between
                                  two layers. The latest such place is taken, so layers that repeat are cut alike

This is a function of the program alone, and so the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lopsided.ir.program import Program, Step

STRETCH = 64
"""At most so many nodes where gradients travel behind computing: about the two or three layers of which a bucket of
gradients is."""
STRETCH_ALONE = 512
"""Where nothing is sent, a model of up to so many nodes is one function: fewer calls, and no borders between layers. A
deeper one is cut into layers, of which few are different ones."""


def most_nodes(devices: int, nodes: int) -> int:
    """How many nodes may run as one function."""
    return STRETCH_ALONE if devices == 1 and nodes <= STRETCH_ALONE else STRETCH


@dataclass(frozen=True, slots=True)
class Joinable:
    """A step that may be part of a stretch with those before it, if `takes`, what is converted for it, is there by
    then. None: it stands alone."""

    step: Step
    takes: tuple[str, ...] | None
    regions: tuple[int, int]  # the region that runs again, and the one that saves in host memory; or -1


def grouped(program: Program, candidates: Sequence[Joinable], most: int) -> Iterator[range]:
    """The numbers of the candidates, stretch by stretch. Those of none are alone."""
    leading = _leading_on(program)
    start = 0
    while start < len(candidates):
        reach = start + 1 + _together(candidates[start:])
        stop = reach
        if reach - start > most:
            stop = min(range(start + most, start, -1), key=lambda end: leading[end - 1])
        yield range(start, stop)
        start = stop


def _together(candidates: Sequence[Joinable]) -> int:
    """How many candidates may join the first."""
    first = candidates[0]
    if first.takes is None:
        return 0
    made: set[str] = set()
    for count, one in enumerate(candidates):
        if one.takes is None or one.regions != first.regions or made.intersection(one.takes):
            return count - 1
        made.update(value.name for value in one.step.node.results)
    return len(candidates) - 1


def _leading_on(program: Program) -> list[int]:
    """After each node, how many values with a gradient are still needed."""
    last: dict[str, int] = {}
    for k, step in enumerate(program.steps):
        last |= dict.fromkeys(step.node.operands, k)
    ends: dict[int, int] = {}
    count, found = 0, []
    for k, step in enumerate(program.steps):
        for value in step.node.results:
            if value.grad and last.get(value.name, k) > k:
                count += 1
                ends[last[value.name]] = ends.get(last[value.name], 0) + 1
        count -= ends.get(k, 0)
        found.append(count)
    return found
