"""Parts of a model with shares of their own.

In: a `Program`, or a `RuleBook` and patterns. Out: the same with its shards named after the shares that cut them.

*Found*: an index that is cut in one part of a program and another index in another part have nothing to do with each
other: between them lies a conversion that can change the shares for nothing. So the shards of a program fall into
groups tied together by rules (`_groups`), and each may have its own shares. Groups that look alike (the same
part of every layer) share them, and beyond a handful the smaller ones are left with the work shares.

*Given*: the nodes of the modules that match a pattern get shares of that name, and what passes between differently
named parts must be converted, which the search prices as the all-to-all that it is.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lopsided.errors import InputError
from lopsided.ir.graph import Node, signature
from lopsided.ir.notation import Rule
from lopsided.ir.placement import Placement
from lopsided.ir.program import Chain, Fact, Program, RuleBook, Step

MOST_SEGMENTS = 6


def found_segments(program: Program, weight: Callable[[Step], float]) -> Program:
    """The program with shares of its own for each group of shards; the heaviest group keeps the work shares."""
    groups = _groups(program)
    roots = {step.node.name: groups.get(_first_shard(step)) for step in program.steps}
    described: dict[int, list[object]] = {}
    weights: dict[int, float] = {}
    for step in program.steps:
        root = roots[step.node.name]
        if root is not None:
            described.setdefault(root, []).append((signature(step.node, program.graph.values), step.rule))
            weights[root] = weights.get(root, 0.0) + weight(step)
    alike: dict[tuple[object, ...], list[int]] = {}
    for root, look in described.items():
        alike.setdefault(tuple(look), []).append(root)
    ranked = sorted(alike.values(), key=lambda members: (-sum(weights[m] for m in members), members[0]))
    names: dict[int, str] = {}
    for number, members in enumerate(ranked[:MOST_SEGMENTS]):
        # Other names than those of given segments, with which they have nothing to do.
        names.update((member, f"part{number}" if number else "") for member in members)
    return _renamed(program, lambda fact: names.get(groups.get(fact, -1), ""))


def _first_shard(step: Step) -> Fact:
    return next((fact for fact in (*step.made, *step.needed) if fact[1].is_shard), ("", Placement("I")))


def _groups(program: Program) -> dict[Fact, int]:
    """The shards of a program by the group they are tied to: those of one rule are cut alike."""
    parent: list[int] = []
    number: dict[Fact, int] = {}

    def find(k: int) -> int:
        while parent[k] != k:
            parent[k] = parent[parent[k]]
            k = parent[k]
        return k

    for step in program.steps:
        first = -1
        for fact in (*step.needed, *step.made):
            # Stored parameters have shares of their own already.
            if not fact[1].is_shard or fact[1].by:
                continue
            if fact not in number:
                number[fact] = len(parent)
                parent.append(len(parent))
            if first >= 0:
                parent[find(number[fact])] = find(first)
            first = find(number[fact])
    return {fact: find(k) for fact, k in number.items()}


def _renamed(program: Program, name_of: Callable[[Fact], str]) -> Program:
    def place(name: str, placement: Placement) -> Placement:
        if not placement.is_shard or placement.by:
            return placement
        return placement.cut_by(name_of((name, placement)))

    def chain(name: str, placements: Chain) -> Chain:
        return tuple(place(name, p) for p in placements)

    steps = []
    for step in program.steps:
        node = step.node
        needs = tuple(place(name, p) for name, p in zip(node.operands, step.rule.needs, strict=True))
        gives = tuple(place(value.name, p) for value, p in zip(node.results, step.rule.gives, strict=True))
        chains = tuple(chain(name, c) for name, c in zip(node.operands, step.chains, strict=True))
        steps.append(Step(node, Rule(needs, gives, step.rule.how), chains))
    return Program(
        program.graph,
        tuple((name, place(name, placement)) for name, placement in program.leaves),
        tuple(steps),
        chain(program.graph.loss, program.loss),
        tuple(chain(name, c) for (_, name), c in zip(program.graph.updates, program.updates, strict=True)),
    )


# Given segments


def given_segments(book: RuleBook, patterns: Sequence[str]) -> RuleBook:
    """The rule book with the nodes of matching modules cut by shares named after their pattern."""
    if "" in patterns:
        raise InputError("a segment has no name", do='name modules by a pattern, for example "encoder.*"')
    patterns = tuple(dict.fromkeys(patterns))
    names = [f"segment{k}" for k in range(1, len(patterns) + 1)]
    of_node: dict[str, str] = {}
    for node in book.graph.nodes:
        for name, pattern in zip(names, patterns, strict=True):
            if _matches(node, pattern):
                of_node.setdefault(node.name, name)
    for name, pattern in zip(names, patterns, strict=True):
        if name not in of_node.values():
            modules = sorted({node.source.module for node in book.graph.nodes if node.source.module})
            raise InputError(
                f"no module matches the segment {pattern!r} that an earlier one does not",
                do=f"choose from {', '.join(modules[:8])}{', ...' if len(modules) > 8 else ''}",
            )
    known: dict[tuple[int, str], tuple[Rule, ...]] = {}
    rules: dict[str, tuple[Rule, ...]] = {}
    for node_name, menu in book.rules.items():
        name = of_node.get(node_name, "")
        if (id(menu), name) not in known:
            known[id(menu), name] = tuple(_cut_by(rule, name) for rule in menu)
        rules[node_name] = known[id(menu), name]
    leaves = _leaves(book, rules)
    return replace(book, rules=rules, leaves=leaves)


def _matches(node: Node, pattern: str) -> bool:
    module = node.source.module
    return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"{pattern}.*")


def _cut_by(rule: Rule, name: str) -> Rule:
    return Rule(tuple(p.cut_by(name) for p in rule.needs), tuple(p.cut_by(name) for p in rule.gives), rule.how)


def _leaves(book: RuleBook, rules: Mapping[str, tuple[Rule, ...]]) -> dict[str, tuple[Placement, ...]]:
    """A leaf may be stored as some consumer takes it, whichever shares that goes by."""
    found = {name: dict.fromkeys(placements) for name, placements in book.leaves.items()}
    for node in book.graph.nodes:
        for k, name in enumerate(node.operands):
            if name in found and len(found[name]) > 1:
                found[name].update((rule.needs[k], None) for rule in rules[node.name] if rule.needs[k].is_shard)
    return {name: tuple(placements) for name, placements in found.items()}
