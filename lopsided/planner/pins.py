"""What the user fixes of a plan: how parameters are stored, and how values are made.

In: pins as text, `encoder.*.weight=I` or `%value=S0`, and a `RuleBook`. Out: `Limits` of the search.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from lopsided.errors import InputError, ProgramError
from lopsided.ir.graph import Leaf, Node
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, Placement, parse_placement
from lopsided.ir.program import RuleBook
from lopsided.planner.baselines import STATE, stored_so
from lopsided.planner.candidates import Limits


def limits_of(book: RuleBook, pins: Sequence[str], deadline: float) -> Limits:
    """What pins leave to choose from. A pin is `parameter pattern=placement` or `%value pattern=placement`."""
    stored: dict[str, Placement] = {}
    given: dict[str, Placement] = {}
    for pin in pins:
        pattern, _, text = pin.rpartition("=")
        if not pattern:
            raise InputError(f"{pin!r} is not a pin", do='write PATTERN=PLACEMENT, for example "encoder.*.weight=I"')
        try:
            placement = parse_placement(text.strip())
        except ProgramError as error:
            raise InputError(error.what, where=f"pin {pin!r}", do="write I, S<dim> or S<dim>@state") from None
        if pattern.startswith("%"):
            _pin_values(book, pattern[1:], placement, pin, given)
        else:
            _pin_parameters(book, pattern, placement, pin, stored)

    every = stores_of(book)

    def stores(leaf: Leaf) -> tuple[Placement, ...]:
        name = leaf.value.name
        return (stored[name],) if name in stored else every[name]

    def allowed(node: Node, rule: Rule) -> bool:
        placed = zip(node.results, rule.gives, strict=True)
        return not given or all(given.get(value.name, give) == give for value, give in placed)

    return Limits(stores, allowed, stored, given, deadline)


def stores_of(book: RuleBook) -> dict[str, tuple[Placement, ...]]:
    """How each parameter may be stored: whole, cut by the state shares to be gathered for use, or as some op takes it.

    In this order: where a parameter is gathered anyway, how much each device stores is not tied to what it computes.
    """
    taken: dict[str, dict[Placement, None]] = {leaf.value.name: {} for leaf in book.graph.parameters}
    for node in book.graph.nodes:
        for k, name in enumerate(node.operands):
            if name in taken:
                taken[name].update((rule.needs[k], None) for rule in book.rules[node.name] if rule.needs[k].is_shard)
    return {
        leaf.value.name: tuple(dict.fromkeys((I, stored_so(leaf), *taken[leaf.value.name])))
        for leaf in book.graph.parameters
    }


def _pin_parameters(book: RuleBook, pattern: str, placement: Placement, pin: str, stored: dict[str, Placement]) -> None:
    found = [
        leaf
        for leaf in book.graph.parameters
        if any(fnmatch.fnmatchcase(name, pattern) for name in (leaf.target, *leaf.also))
    ]
    if not found:
        names = [leaf.target for leaf in book.graph.parameters]
        raise InputError(
            f"no parameter matches the pin {pin!r}",
            do=f"choose from {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}",
        )
    for leaf in found:
        plain = book.leaves[leaf.value.name]
        choices = dict.fromkeys([*plain, *(p.cut_by(STATE) for p in plain)])
        if placement not in choices:
            raise InputError(
                f"{leaf.target} cannot be stored {placement}",
                where=f"pin {pin!r}",
                do=f"choose from {', '.join(map(str, choices))}",
            )
        _add_pin(stored, leaf.value.name, placement, leaf.target, pin)


def _pin_values(book: RuleBook, pattern: str, placement: Placement, pin: str, given: dict[str, Placement]) -> None:
    found = [
        (node, k)
        for node in book.graph.nodes
        for k, value in enumerate(node.results)
        if fnmatch.fnmatchcase(value.name, pattern)
    ]
    if not found:
        raise InputError(f"no value matches the pin {pin!r}", do="name values as `lopsided capture` prints them")
    for node, k in found:
        choices = dict.fromkeys(rule.gives[k] for rule in book.rules[node.name])
        if placement not in choices:
            raise InputError(
                f"%{node.results[k].name} cannot be made {placement}",
                where=f"pin {pin!r}",
                do=f"choose from {', '.join(map(str, choices))}",
            )
        _add_pin(given, node.results[k].name, placement, f"%{node.results[k].name}", pin)


def _add_pin(pinned: dict[str, Placement], name: str, placement: Placement, shown: str, pin: str) -> None:
    if pinned.setdefault(name, placement) != placement:
        raise InputError(
            f"{shown} is pinned twice, as {pinned[name]} and as {placement}",
            where=f"pin {pin!r}",
            do="leave one of the pins out, or narrow its pattern",
        )
