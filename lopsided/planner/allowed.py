"""Techniques that change what is computed, by name: the planner takes them only where the user allows it.

In: names. Out: the set of them, checked.

    8bit-state    optimizer state is kept in 8 bits a number (`lopsided.schedule.coded_state`)

What changes nothing (running again, micro-batches, chunked losses, host memory) needs nobody's leave.
"""

from __future__ import annotations

from collections.abc import Iterable

from lopsided.errors import InputError, shown

EIGHT_BIT_STATE = "8bit-state"
TECHNIQUES = (EIGHT_BIT_STATE,)


def allowed(names: Iterable[str], where: str = "allow") -> frozenset[str]:
    """
    >>> sorted(allowed(["8bit-state"]))
    ['8bit-state']
    """
    found = frozenset((names,) if isinstance(names, str) else names)
    if strangers := sorted(map(str, found - {*TECHNIQUES})):
        raise InputError(
            f"{shown(strangers[0])} is no technique that could be allowed",
            where=where,
            do=f"choose from {', '.join(TECHNIQUES)}; what changes no numbers is used without being asked for",
        )
    return found
