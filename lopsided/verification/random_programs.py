"""Random valid programs: what the oracle is fed with.

In: a `RuleBook` and a random state. Out: a `Program` in which any rule may follow any other, with whatever conversions
that takes, detours included, and random shares with zeros among them.
"""

from __future__ import annotations

import random

from lopsided.ir.graph import Value
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, P, Placement, R
from lopsided.ir.program import Chain, Program, Step
from lopsided.ir.rule_book import RuleBook

_DETOUR = 0.15


def random_program(book: RuleBook, state: random.Random) -> Program:
    """A legal program with every choice left to chance."""
    graph = book.graph
    facts: dict[str, list[Placement]] = {}
    # Every cut the rules know of a value: where detours can lead.
    cuts: dict[str, dict[Placement, None]] = {}
    for node in graph.nodes:
        for rule in book.rules[node.name]:
            for name, need in zip(node.operands, rule.needs, strict=True):
                if need.is_shard:
                    cuts.setdefault(name, {})[need] = None

    def chain_to(value: Value, need: Placement) -> Chain:
        have = facts[value.name]
        if need in have and state.random() < 0.5:
            return (need,)
        chain = [state.choice(have)]
        if state.random() < _DETOUR:
            stops = [I, R, *([P] if value.dtype != "bool" else []), *cuts.get(value.name, ())]
            stop = state.choice(stops)
            if stop != chain[-1]:
                chain.append(stop)
        if chain[-1] != need:
            chain.append(need)
        have += [placement for placement in chain[1:] if placement not in have]
        return tuple(chain)

    leaves = []
    for leaf in graph.leaves:
        placement = state.choice(book.leaves[leaf.value.name])
        leaves.append((leaf.value.name, placement))
        facts[leaf.value.name] = [placement]
    steps = []
    for node in graph.nodes:
        rule = _choose(book.rules[node.name], state)
        chains = tuple(chain_to(graph.values[name], need) for name, need in zip(node.operands, rule.needs, strict=True))
        steps.append(Step(node, rule, chains))
        for value, give in zip(node.results, rule.gives, strict=True):
            facts[value.name] = [give]
    loss = chain_to(graph.values[graph.loss], I)
    updates = tuple(chain_to(graph.values[name], I) for _, name in graph.updates)
    return Program(graph, tuple(leaves), tuple(steps), loss, updates)


def _choose(rules: tuple[Rule, ...], state: random.Random) -> Rule:
    """Talking and factor-broadcasting rules are few among many plain ones: give each kind its chance."""
    kinds = list(dict.fromkeys(rule.how for rule in rules))
    kind = state.choice(kinds) if state.random() < 0.3 else None
    return state.choice([rule for rule in rules if kind is None or rule.how == kind])


def random_shares(devices: int, state: random.Random) -> tuple[float, ...]:
    """Unequal shares; every third time one device has nothing to do."""
    weights = [state.uniform(0.1, 1.0) for _ in range(devices)]
    if devices > 1 and state.random() < 1 / 3:
        weights[state.randrange(devices)] = 0.0
    total = sum(weights)
    return tuple(weight / total for weight in weights)
