"""The search as a problem of choices: which rule runs each node, and which copies of a value are made.

In: a `RuleBook` and `Prices`. Out: `Choices`: a `Problem`, and the way back from an assignment to a `Program`.

A node is a variable: its rules. A value with several consumers is a variable: the set of placements it is made
available in, closed under free conversions (`closure`), so that a copy is paid for once and shared by all. A value
with one consumer is a table of conversion prices between two nodes' rules. What is not a variable:

    parameters of one node   stored the cheapest way for each rule, folded into the node's prices   (late leaves)
    inputs, fixed values, and what follows from them without a gradient by cheap ops: to be had in any placement

Calls with equal signatures share their tables, which is how equal layers are recognised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lopsided.errors import ProgramError
from lopsided.ir.graph import Leaf, Node, Value, reruns, retaken, signature
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, P, Placement, R
from lopsided.ir.program import Chain, Program, RuleBook, Step
from lopsided.planner.search.copies import (
    Needs,
    Price,
    Prices,
    Tree,
    Trees,
    cheapest_store,
    closure,
    generators,
    price_of,
)
from lopsided.planner.search.problem import Assignment, Factor, Problem, Table

_MOST_SETS = 512  # of copies of one value; beyond, only sets of at most `_MOST_COPIES` are considered
_MOST_COPIES = 3
_ANY_VALUE = frozenset({I, R, P})  # placements that need no dim to cut


@dataclass(frozen=True)
class Choices:
    """The problem, and what its variables stand for."""

    book: RuleBook
    problem: Problem
    rules: Mapping[str, tuple[int, tuple[Rule, ...]]]  # node → its variable and what it chooses from
    copies: Mapping[str, tuple[int, tuple[Needs, ...]]]  # value → its variable and what it chooses from
    stores: Mapping[str, tuple[Placement, ...]]  # parameter → how it may be stored
    free: frozenset[str]  # values to be had in any placement
    prices: Prices
    trees: Callable[[Value], Trees]  # of a value that is not free
    complete: bool  # no set of copies was left out

    def program(self, assignment: Assignment) -> Program:
        return _Writer(self, assignment).program()


Stores = Callable[[Leaf], tuple[Placement, ...]]
Tables = dict[object, Table]  # by what they were made of


def choices(
    book: RuleBook,
    prices: Prices,
    *,
    stores: Stores | None = None,
    allowed: Callable[[Node, Rule], bool] = lambda node, rule: True,
    conversions: Tables | None = None,
) -> Choices:
    """The problem of a rule book. `stores` and `allowed` narrow it: how parameters are kept, which rules are used.

    `conversions` keeps tables that depend on the prices of activations' conversions alone, for the next search with
    the same of these.
    """
    keep = {} if conversions is None else conversions
    return _Builder(book, prices, stores or (lambda leaf: book.leaves[leaf.value.name]), allowed, keep).build()


def free_values(book: RuleBook, prices: Prices, allowed: Callable[[Node, Rule], bool]) -> frozenset[str]:
    """Inputs, fixed values, and what follows from them by cheap ops without a gradient, however they are run."""
    graph = book.graph
    free = {leaf.value.name for leaf in graph.leaves if leaf.kind != "parameter"} | set(graph.fixed)
    for node in graph.nodes:
        if (
            all(name in free for name in node.operands)
            and not any(value.grad for value in node.results)
            and (node.name in graph.fixed or prices.is_cheap(node))
            and all(allowed(node, rule) for rule in book.rules[node.name])
        ):
            free.update(value.name for value in node.results)
    return frozenset(free)


class _Builder:
    def __init__(
        self,
        book: RuleBook,
        prices: Prices,
        stores: Stores,
        allowed: Callable[[Node, Rule], bool],
        conversions: Tables,
    ) -> None:
        self.book, self.graph, self.prices = book, book.graph, prices
        self.reruns = reruns(self.graph)
        self.retaken = retaken(self.graph)
        self.stores, self.allowed = stores, allowed
        self.free = free_values(book, prices, allowed)
        self.leaves = {leaf.value.name: leaf for leaf in self.graph.leaves}
        self.sizes: list[int] = []
        self.factors: list[Factor] = []
        self.known: Tables = {}  # equal ones are one object
        self.conversions = conversions
        self.menus: dict[object, tuple[Rule, ...]] = {}
        self.signatures: dict[str, int] = {}
        self.known_sets: dict[object, tuple[Needs, ...]] = {}
        self.numbers: dict[object, int] = {}  # of signatures: short keys
        self.kept_stores: dict[str, tuple[Placement, ...]] = {}
        self.placements: dict[str, Needs] = {}  # that copies of each value can have
        self.known_trees: dict[object, Trees] = {}
        self.complete = True

    def build(self) -> Choices:
        graph = self.graph
        nodes = [node for node in graph.nodes if any(value.name not in self.free for value in node.results)]
        consumers = self._consumers(nodes)
        shared = {name for name, users in consumers.items() if name not in self.free and len(users) > 1}
        rules: dict[str, tuple[int, tuple[Rule, ...]]] = {}
        copies: dict[str, tuple[int, tuple[Needs, ...]]] = {}
        for node in nodes:
            key = (signature(node, graph.values), self.reruns.get(node.name))
            self.signatures[node.name] = self.numbers.setdefault(key, len(self.numbers))
        menus = {node.name: self._menu(node) for node in nodes}
        for leaf in graph.parameters:
            self.kept_stores[leaf.value.name] = self.stores(leaf)
        self._collect_placements(nodes, menus)
        for leaf in graph.parameters:
            if leaf.value.name in shared:
                self._add_shared(leaf.value, consumers, menus, copies)
                self._leaf_factor(leaf, copies[leaf.value.name])
        for node in nodes:
            menu = menus[node.name]
            variable = self._variable(len(menu))
            rules[node.name] = (variable, menu)
            self._node_factor(node, menu, variable, shared)
            for name in dict.fromkeys(node.operands):
                if name in copies:
                    self._use_factor(node, menu, variable, name, copies[name])
            for k, value in enumerate(node.results):
                if value.name in self.free:
                    continue
                if value.name in shared:
                    self._add_shared(value, consumers, menus, copies)
                    self._make_factor(node, k, menu, variable, copies[value.name])
        for node in nodes:
            for k, value in enumerate(node.results):
                users = consumers.get(value.name, ())
                if value.name not in self.free and len(users) == 1:
                    self._hand_on(node, k, rules, users[0])
        return Choices(
            self.book,
            Problem(tuple(self.sizes), tuple(self.factors)),
            rules,
            copies,
            self.kept_stores,
            self.free,
            self.prices,
            self.trees,
            self.complete,
        )

    def _variable(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _factor(self, scope: tuple[int, ...], key: object, make: Callable[[], Table], tables: Tables) -> None:
        table = tables.get(key)
        if table is None:
            table = tables[key] = make()
        if table.ndim > 1 and not table.any():
            return
        self.factors.append(Factor(scope, table))

    def _consumers(self, nodes: Sequence[Node]) -> dict[str, list[Node | None]]:
        """Who takes each value; None stands for an end of the graph, where a value must be `I`."""
        users: dict[str, list[Node | None]] = {}
        for node in nodes:
            for name in dict.fromkeys(node.operands):
                users.setdefault(name, []).append(node)
        for name in dict.fromkeys((self.graph.loss, *(name for _, name in self.graph.updates))):
            users.setdefault(name, []).append(None)
        return users

    def _menu(self, node: Node) -> tuple[Rule, ...]:
        rules = self.book.rules[node.name]
        menu = tuple(rule for rule in rules if self.allowed(node, rule))
        if not menu:
            raise ProgramError(
                f"no rule of {node.op} is left to choose from",
                where=f"%{node.name}, {node.source}",
                do="pin less",
            )
        # One object for equal menus, so that it can be a key.
        return self.menus.setdefault(menu, menu)

    # Tables. A key names everything a table depends on.

    def _needs(self, user: Node | None, name: str, menu: tuple[Rule, ...] | None) -> tuple[Needs, ...]:
        """For each rule of the consumer, the placements it takes the value in."""
        if user is None or menu is None:
            return (frozenset({I}),)
        slots = [k for k, operand in enumerate(user.operands) if operand == name]
        return tuple(frozenset(rule.needs[k] for k in slots) for rule in menu)

    def _price(self, value: Value) -> Price:
        return price_of(value, self.leaves.get(value.name), self.prices)

    def _collect_placements(self, nodes: Sequence[Node], menus: Mapping[str, tuple[Rule, ...]]) -> None:
        """What copies may be made by way of: the cuts that rules know, and what any value can be."""
        found = self.placements
        met: dict[int, list[Needs]] = {}  # of a menu: the operands' placements, then the results'
        for name, stores in self.kept_stores.items():
            found[name] = _ANY_VALUE.union(stores)
        for node in nodes:
            menu = menus[node.name]
            if id(menu) not in met:
                columns = zip(*((*rule.needs, *rule.gives) for rule in menu), strict=True)
                met[id(menu)] = [frozenset(column) for column in columns]
            names = (*node.operands, *(value.name for value in node.results))
            for name, placements in zip(names, met[id(menu)], strict=True):
                found[name] = found.get(name, _ANY_VALUE) | placements

    def trees(self, value: Value) -> Trees:
        """One object for equal values, so that prices are asked for once."""
        placements = self.placements[value.name]
        key = (self._value_key(value), placements)
        trees = self.known_trees.get(key)
        if trees is None:
            trees = self.known_trees[key] = Trees(placements, self._price(value))
        return trees

    def _node_factor(self, node: Node, menu: tuple[Rule, ...], variable: int, shared: set[str]) -> None:
        """What each rule costs by itself, with its own parameters fetched the cheapest way."""
        own = [
            self.leaves[name]
            for name in dict.fromkeys(node.operands)
            if name in self.leaves and name not in self.free and name not in shared
        ]
        slots = [[k for k, name in enumerate(node.operands) if name == leaf.value.name] for leaf in own]
        kept = tuple(self.kept_stores[leaf.value.name] for leaf in own)
        key = ("node", self.signatures[node.name], id(menu), kept, tuple(map(tuple, slots)))

        def make() -> Table:
            table = np.array([self.prices.rule(node, rule) for rule in menu])
            for leaf, places in zip(own, slots, strict=True):
                fetched = {
                    needs: self.fetched(leaf, needs)[0]
                    for needs in {frozenset(rule.needs[k] for k in places) for rule in menu}
                }
                table = table + [fetched[frozenset(rule.needs[k] for k in places)] for rule in menu]
            return table

        self._factor((variable,), key, make, self.known)

    def fetched(self, leaf: Leaf, needs: Needs) -> tuple[float, Placement]:
        return cheapest_store(leaf, self.kept_stores[leaf.value.name], needs, self.prices, self.trees(leaf.value))

    def _add_shared(
        self,
        value: Value,
        consumers: Mapping[str, Sequence[Node | None]],
        menus: Mapping[str, tuple[Rule, ...]],
        copies: dict[str, tuple[int, tuple[Needs, ...]]],
    ) -> None:
        """A variable for the copies of a value that several consumers take."""
        options = [
            self._needs(user, value.name, menus[user.name] if user is not None else None)
            for user in consumers[value.name]
        ]
        key = ("copies", self._value_key(value), tuple(dict.fromkeys(options)), len(options))
        sets = self.known_sets.get(key)
        if sets is None:
            sets = self.known_sets[key] = self._sets_of_copies(value, options)
        copies[value.name] = (self._variable(len(sets)), sets)

    def _value_key(self, value: Value) -> object:
        leaf = self.leaves.get(value.name)
        again = value.name in self.retaken
        return (value.shape, value.dtype, value.grad, again, self.kept_stores.get(value.name) if leaf else None)

    def _sets_of_copies(self, value: Value, options: Sequence[tuple[Needs, ...]]) -> tuple[Needs, ...]:
        """Every union of one choice per consumer, closed; consumers with equal choices are worth at most one each."""
        price = self._price(value)
        known = sorted({p for option in options for needs in option for p in needs})
        sets: dict[Needs, None] = {frozenset(): None}
        for option in options:
            distinct = list(dict.fromkeys(option))
            grown = {closure(have | needs, known, price): None for have in sets for needs in distinct}
            if len(grown) > _MOST_SETS:
                self.complete = False
                grown = {s: None for s in grown if len(generators(s, price)) <= _MOST_COPIES}
            if grown.keys() == sets.keys():
                # One more consumer of the same sort changes nothing any more.
                continue
            sets = grown
        return tuple(sorted(sets, key=lambda s: (len(s), sorted(s))))

    def _leaf_factor(self, leaf: Leaf, copies: tuple[int, tuple[Needs, ...]]) -> None:
        variable, sets = copies
        key = ("leaf", self._value_key(leaf.value), self.placements[leaf.value.name], sets)

        def make() -> Table:
            return np.array([self.fetched(leaf, needs)[0] for needs in sets])

        self._factor((variable,), key, make, self.known)

    def _use_factor(
        self, node: Node, menu: tuple[Rule, ...], variable: int, name: str, copies: tuple[int, tuple[Needs, ...]]
    ) -> None:
        """No price: a rule may only take what is there."""
        shared, sets = copies
        needs = self._needs(node, name, menu)
        key = ("use", sets, needs)

        def make() -> Table:
            return np.array([[0.0 if need <= have else math.inf for need in needs] for have in sets])

        # A leaf's variable and a result's variable both come before their consumers'.
        self._factor((shared, variable), key, make, self.conversions)

    def _make_factor(
        self, node: Node, k: int, menu: tuple[Rule, ...], variable: int, copies: tuple[int, tuple[Needs, ...]]
    ) -> None:
        shared, sets = copies
        value = node.results[k]
        gives = tuple(rule.gives[k] for rule in menu)
        key = ("make", self._value_key(value), self.placements[value.name], sets, gives)

        def make() -> Table:
            trees = self.trees(value)
            return np.array([trees.prices(gives, copies) for copies in sets]).T

        self._factor((variable, shared), key, make, self.conversions)

    def _hand_on(
        self, node: Node, k: int, rules: Mapping[str, tuple[int, tuple[Rule, ...]]], user: Node | None
    ) -> None:
        """A value with one consumer: the price of every pair of rules."""
        value = node.results[k]
        variable, menu = rules[node.name]
        gives = tuple(rule.gives[k] for rule in menu)
        taker = rules[user.name] if user is not None else None
        needs = self._needs(user, value.name, taker[1] if taker is not None else None)
        key = ("hand on", self._value_key(value), gives, needs, user is None)

        def make() -> Table:
            trees = self.trees(value)
            table = np.array([trees.prices(gives, need) for need in needs]).T
            return table[:, 0] if user is None else table

        self._factor((variable,) if taker is None else (variable, taker[0]), key, make, self.conversions)


# The way back


class _Writer:
    """An assignment as a program."""

    def __init__(self, chosen: Choices, assignment: Assignment) -> None:
        self.chosen, self.graph = chosen, chosen.book.graph
        self.rules = {name: menu[assignment[variable]] for name, (variable, menu) in chosen.rules.items()}
        self.needs: dict[str, dict[Placement, None]] = {}  # of every value, in the order they are met
        self.facts: dict[str, dict[Placement, None]] = {}
        self.trees: dict[str, Tree] = {}

    def program(self) -> Program:
        graph = self.graph
        self._collect_needs()
        leaves = []
        for leaf in graph.leaves:
            placement = self._stored(leaf)
            leaves.append((leaf.value.name, placement))
            self._have(leaf.value, placement)
        steps = []
        for node in graph.nodes:
            rule = self.rules[node.name]
            chains = tuple(self._chain(name, need) for name, need in zip(node.operands, rule.needs, strict=True))
            steps.append(Step(node, rule, chains))
            for value, give in zip(node.results, rule.gives, strict=True):
                self._have(value, give)
        loss = self._chain(graph.loss, I)
        updates = tuple(self._chain(name, I) for _, name in graph.updates)
        return Program(graph, tuple(leaves), tuple(steps), loss, updates)

    def _collect_needs(self) -> None:
        """What every value is taken as; nodes whose values are free are given the rule that suits their consumers."""
        for name in (self.graph.loss, *(name for _, name in self.graph.updates)):
            self.needs.setdefault(name, {})[I] = None
        for node in reversed(self.graph.nodes):
            if node.name not in self.rules:
                self.rules[node.name] = self._suiting(node)
            for name, need in zip(node.operands, self.rules[node.name].needs, strict=True):
                self.needs.setdefault(name, {})[need] = None

    def _suiting(self, node: Node) -> Rule:
        """A rule that gives just what is needed, or else the one that runs whole, from which all else is sliced."""
        wanted = [tuple(self.needs.get(value.name, ())) for value in node.results]
        whole = Rule((I,) * len(node.operands), (I,) * len(node.results))
        if node.name in self.graph.fixed or any(len(w) > 1 or not all(p.is_shard for p in w) for w in wanted):
            return whole
        for rule in self.chosen.book.rules[node.name]:
            suits = all(not w or w[0] == give for w, give in zip(wanted, rule.gives, strict=True))
            if suits and rule.how == "plain" and any(wanted):
                return rule
        return whole

    def _stored(self, leaf: Leaf) -> Placement:
        needs = frozenset(self.needs.get(leaf.value.name, ()))
        if leaf.kind == "parameter":
            stores = self.chosen.stores[leaf.value.name]
            return cheapest_store(leaf, stores, needs, self.chosen.prices, self.chosen.trees(leaf.value))[1]
        only = next(iter(needs)) if len(needs) == 1 else I
        return only if leaf.kind == "input" and only.is_shard else I

    def _have(self, value: Value, placement: Placement) -> None:
        self.facts[value.name] = {placement: None}
        needs = self.needs.get(value.name, {})
        if value.name in self.chosen.free:
            # Held whole it is cut for nothing; held cut it is taken as it is.
            self.trees[value.name] = dict.fromkeys(needs, placement)
        elif needs.keys() - {placement}:
            self.trees[value.name] = self.chosen.trees(value).tree(placement, needs)

    def _chain(self, name: str, need: Placement) -> Chain:
        """From a copy that is there to the one that is needed; what is made on the way stays."""
        chain = [need]
        while chain[0] not in self.facts[name]:
            chain.insert(0, self.trees[name][chain[0]])
        self.facts[name].update(dict.fromkeys(chain))
        return tuple(chain)
