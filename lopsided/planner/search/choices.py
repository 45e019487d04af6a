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
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np

from lopsided.errors import ProgramError
from lopsided.ir.graph import Leaf, Node, Value, reruns, retaken, signature
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, P, Placement, R
from lopsided.ir.program import Chain, Program, RuleBook, Step, whole_rule
from lopsided.planner.search.copies import (
    Free,
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
from lopsided.planner.search.reduction import Eliminations

# Sets of copies of one value; beyond, only sets of at most `_MOST_COPIES` are considered.
_MOST_SETS = 512
_MOST_COPIES = 3
_T = TypeVar("_T")
# Placements that need no dim to cut.
_ANY_VALUE = frozenset({I, R, P})


Stores = Callable[[Leaf], tuple[Placement, ...]]
Allowed = Callable[[Node, Rule], bool]
Pattern = tuple[Free, ...]
"""For every sort of value of which copies are made, the conversions that cost nothing."""


@dataclass(frozen=True, slots=True)
class Conversions:
    """What depends on the prices of activations' conversions alone: for the next search with the same of these."""

    tables: dict[object, Table] = field(default_factory=dict)
    trees: dict[object, Trees] = field(default_factory=dict)


@dataclass(frozen=True)
class Choices:
    """The problem of one search, and what its variables stand for."""

    space: ChoiceSpace
    factor_graph: FactorGraph
    problem: Problem
    pricing: Pricing

    @property
    def free(self) -> frozenset[str]:
        return self.space.free

    @property
    def complete(self) -> bool:
        """No set of copies was left out."""
        return self.factor_graph.complete

    def program(self, assignment: Assignment) -> Program:
        return _Writer(self, assignment).program()


def choices(
    book: RuleBook, prices: Prices, *, stores: Stores | None = None, allowed: Allowed = lambda node, rule: True
) -> Choices:
    """The problem of a rule book. `stores` and `allowed` narrow it: how parameters are kept, which rules are used."""
    return ChoiceSpace(book, prices, stores=stores, allowed=allowed).priced(prices)


def free_values(book: RuleBook, prices: Prices, allowed: Allowed) -> frozenset[str]:
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


# Prices


class Pricing:
    """What copies cost in one search. Equal values are asked for once."""

    def __init__(self, space: ChoiceSpace, prices: Prices, conversions: Conversions) -> None:
        self.space, self.prices, self.conversions = space, prices, conversions
        self._prices: dict[object, Price] = {}
        self._trees: dict[object, Trees] = {}

    def price(self, value: Value) -> Price:
        key = self.space.value_key(value)
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = price_of(value, self.space.leaves.get(value.name), self.prices)
        return price

    def trees(self, value: Value) -> Trees:
        """The ways to have copies of a value that is not free."""
        placements = self.space.placements[value.name]
        key = (self.space.value_key(value), placements)
        known = self._trees if value.name in self.space.leaves else self.conversions.trees
        trees = known.get(key)
        if trees is None:
            trees = known[key] = Trees(placements, self.price(value))
        return trees

    def fetched(self, leaf: Leaf, needs: Needs) -> tuple[float, Placement]:
        """What a parameter costs that is used in these placements, and how it is stored then."""
        stores = self.space.stores[leaf.value.name]
        return cheapest_store(leaf, stores, needs, self.prices, self.trees(leaf.value))


Make = Callable[[Pricing], Table]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a table is made. A key names everything but prices that it depends on."""

    key: object
    make: Make
    lasts: bool  # it depends on the prices of activations' conversions alone

    def table(self, pricing: Pricing) -> Table:
        known = pricing.conversions.tables if self.lasts else {}
        table = known.get(self.key)
        if table is None:
            table = known[self.key] = self.make(pricing)
        return table


@dataclass(frozen=True)
class FactorGraph:
    """Variables, and where which tables stand."""

    sizes: tuple[int, ...]
    places: tuple[tuple[tuple[int, ...], int], ...]  # variables, and the number of the table
    recipes: tuple[Recipe, ...]
    rules: Mapping[str, tuple[int, tuple[Rule, ...]]]  # node → its variable and what it chooses from
    copies: Mapping[str, tuple[int, tuple[Needs, ...]]]  # value → its variable and what it chooses from
    complete: bool

    def problem(self, pricing: Pricing) -> Problem:
        tables = [recipe.table(pricing) for recipe in self.recipes]
        # What costs nothing, whatever is chosen, ties nothing together.
        counts = [table.ndim == 1 or bool(table.any()) for table in tables]
        return Problem(self.sizes, tuple(Factor(scope, tables[k]) for scope, k in self.places if counts[k]))


# What there is to choose from


class ChoiceSpace:
    """What a search chooses from, whatever it costs: made once, and priced for every search.

    Prices matter in two ways only: which ops are cheap, and which conversions are free (`Pattern`). The former are
    taken to be the same in all searches; of the latter there are few patterns, with a `FactorGraph` each.
    """

    def __init__(
        self,
        book: RuleBook,
        prices: Prices,
        *,
        stores: Stores | None = None,
        allowed: Allowed = lambda node, rule: True,
    ) -> None:
        self.book, self.graph = book, book.graph
        self.eliminations: Eliminations = {}
        self.free = free_values(book, prices, allowed)
        self.leaves = {leaf.value.name: leaf for leaf in self.graph.leaves}
        self.stores = {
            leaf.value.name: stores(leaf) if stores else book.leaves[leaf.value.name] for leaf in self.graph.parameters
        }
        self.nodes = [node for node in self.graph.nodes if any(value.name not in self.free for value in node.results)]
        self._retaken = retaken(self.graph)
        self._value_keys: dict[str, object] = {}
        self._equal: dict[object, object] = {}  # one object for equal ones, which is a shorter key
        self.signatures = self._signatures()
        self.menus = {node.name: self._menu(node, allowed) for node in self.nodes}
        self.placements = self._placements()
        self.consumers = self._consumers()
        self.options: dict[str, tuple[tuple[Needs, ...], ...]] = {}  # of the values that several take
        for name, users in self.consumers.items():
            if name not in self.free and len(users) > 1:
                self.options[name] = self.same(tuple(self.needs(user, name) for user in users))
        self._sorts: dict[object, Value] = {
            (self.value_key(value), id(self.options[value.name])): value for value in self.shared
        }
        self._factor_graphs: dict[Pattern, FactorGraph] = {}

    def priced(self, prices: Prices, conversions: Conversions | None = None) -> Choices:
        """The problem at these prices."""
        pricing = Pricing(self, prices, conversions or Conversions())
        free = {sort: self._free_conversions(value, pricing) for sort, value in self._sorts.items()}
        pattern = tuple(free.values())
        if pattern not in self._factor_graphs:
            self._factor_graphs[pattern] = _Builder(self, free).factor_graph()
        factor_graph = self._factor_graphs[pattern]
        return Choices(self, factor_graph, factor_graph.problem(pricing), pricing)

    @property
    def shared(self) -> list[Value]:
        return [self.graph.values[name] for name in self.options]

    def _free_conversions(self, value: Value, pricing: Pricing) -> Free:
        price, known = pricing.price(value), copies_of(self.options[value.name])
        return frozenset((p, q) for p in known for q in known if price(p, q) == 0)

    def same(self, one: _T) -> _T:
        return cast(_T, self._equal.setdefault(one, one))

    def value_key(self, value: Value) -> object:
        """The same object for values that are equal but for their names."""
        key = self._value_keys.get(value.name)
        if key is None:
            again = value.name in self._retaken
            key = (value.shape, value.dtype, value.grad, again, value.name in self.leaves, self.stores.get(value.name))
            self._value_keys[value.name] = key = self.same(key)
        return key

    def _signatures(self) -> dict[str, int]:
        numbers: dict[object, int] = {}
        again = reruns(self.graph)
        keys = {node.name: (signature(node, self.graph.values), again.get(node.name)) for node in self.nodes}
        return {name: numbers.setdefault(key, len(numbers)) for name, key in keys.items()}

    def _menu(self, node: Node, allowed: Allowed) -> tuple[Rule, ...]:
        menu = tuple(rule for rule in self.book.rules[node.name] if allowed(node, rule))
        if not menu:
            raise ProgramError(
                f"no rule of {node.op} is left to choose from",
                where=f"%{node.name}, {node.source}",
                do="pin less",
            )
        return self.same(menu)

    def _consumers(self) -> dict[str, list[Node | None]]:
        """Who takes each value; None stands for an end of the graph, where a value must be `I`."""
        users: dict[str, list[Node | None]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.operands):
                users.setdefault(name, []).append(node)
        for name in dict.fromkeys((self.graph.loss, *(name for _, name in self.graph.updates))):
            users.setdefault(name, []).append(None)
        return users

    def needs(self, user: Node | None, name: str) -> tuple[Needs, ...]:
        """For each rule of the consumer, the placements it takes the value in."""
        if user is None:
            return (frozenset({I}),)
        slots = [k for k, operand in enumerate(user.operands) if operand == name]
        return self.same(tuple(frozenset([rule.needs[k] for k in slots]) for rule in self.menus[user.name]))

    def _placements(self) -> dict[str, Needs]:
        """What copies may be made by way of: the cuts that rules know, and what any value can be."""
        found = {name: _ANY_VALUE.union(stores) for name, stores in self.stores.items()}
        met: dict[int, list[Needs]] = {}  # of a menu: the operands' placements, then the results'
        for node in self.nodes:
            menu = self.menus[node.name]
            if id(menu) not in met:
                columns = zip(*((*rule.needs, *rule.gives) for rule in menu), strict=True)
                met[id(menu)] = [frozenset(column) for column in columns]
            names = (*node.operands, *(value.name for value in node.results))
            for name, placements in zip(names, met[id(menu)], strict=True):
                found[name] = found.get(name, _ANY_VALUE) | placements
        return found


def copies_of(options: Sequence[tuple[Needs, ...]]) -> list[Placement]:
    """Everything that some consumer takes."""
    return sorted({p for option in options for needs in option for p in needs})


class _Builder:
    """Variables and tables of a space, where these conversions are free."""

    def __init__(self, space: ChoiceSpace, free: Mapping[object, Free]) -> None:
        self.space, self.free_conversions = space, free
        self.sizes: list[int] = []
        self.places: list[tuple[tuple[int, ...], int]] = []
        self.numbers: dict[object, int] = {}  # of tables, by their keys
        self.recipes: list[Recipe] = []
        self.rules: dict[str, tuple[int, tuple[Rule, ...]]] = {}
        self.copies: dict[str, tuple[int, tuple[Needs, ...]]] = {}
        self.known_sets: dict[object, tuple[Needs, ...]] = {}
        self.complete = True

    def factor_graph(self) -> FactorGraph:
        space = self.space
        for leaf in space.graph.parameters:
            if leaf.value.name in space.options:
                self._add_shared(leaf.value)
                self._leaf_factor(leaf)
        for node in space.nodes:
            menu = space.menus[node.name]
            self.rules[node.name] = (self._variable(len(menu)), menu)
            self._node_factor(node)
            for name in dict.fromkeys(node.operands):
                if name in self.copies:
                    self._use_factor(node, name)
            for k, value in enumerate(node.results):
                if value.name in space.options:
                    self._add_shared(value)
                    self._make_factor(node, k)
        for node in space.nodes:
            for k, value in enumerate(node.results):
                users = space.consumers.get(value.name, ())
                if value.name not in space.free and len(users) == 1:
                    self._hand_on(node, k, users[0])
        return FactorGraph(
            tuple(self.sizes), tuple(self.places), tuple(self.recipes), self.rules, self.copies, self.complete
        )

    def _variable(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _factor(self, scope: tuple[int, ...], key: object, make: Make, *, lasts: bool) -> None:
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.recipes)
            self.recipes.append(Recipe(key, make, lasts))
        self.places.append((scope, number))

    # Tables

    def _node_factor(self, node: Node) -> None:
        """What each rule costs by itself, with its own parameters fetched the cheapest way."""
        space, (variable, menu) = self.space, self.rules[node.name]
        own = [
            space.leaves[name]
            for name in dict.fromkeys(node.operands)
            if name in space.leaves and name not in space.free and name not in space.options
        ]
        slots = tuple(tuple(k for k, name in enumerate(node.operands) if name == leaf.value.name) for leaf in own)
        stores = tuple(space.stores[leaf.value.name] for leaf in own)

        def make(pricing: Pricing) -> Table:
            table = np.array([pricing.prices.rule(node, rule) for rule in menu])
            for leaf, places in zip(own, slots, strict=True):
                wanted = [frozenset(rule.needs[k] for k in places) for rule in menu]
                fetched = {needs: pricing.fetched(leaf, needs)[0] for needs in set(wanted)}
                table = table + [fetched[needs] for needs in wanted]
            return table

        self._factor((variable,), ("node", space.signatures[node.name], id(menu), stores, slots), make, lasts=False)

    def _add_shared(self, value: Value) -> None:
        """A variable for the copies of a value that several consumers take."""
        options = self.space.options[value.name]
        key = (self.space.value_key(value), id(options))
        if key not in self.known_sets:
            self.known_sets[key] = self.space.same(self._sets_of_copies(options, self.free_conversions[key]))
        sets = self.known_sets[key]
        self.copies[value.name] = (self._variable(len(sets)), sets)

    def _sets_of_copies(self, options: Sequence[tuple[Needs, ...]], free: Free) -> tuple[Needs, ...]:
        """Every union of one choice per consumer, closed; consumers with equal choices are worth at most one each."""
        known = copies_of(options)
        sets: dict[Needs, None] = {frozenset(): None}
        for option in options:
            distinct = list(dict.fromkeys(option))
            grown = {closure(have | needs, known, free): None for have in sets for needs in distinct}
            if len(grown) > _MOST_SETS:
                self.complete = False
                grown = {s: None for s in grown if len(generators(s, free)) <= _MOST_COPIES}
            if grown.keys() == sets.keys():
                # One more consumer of the same sort changes nothing any more.
                continue
            sets = grown
        return tuple(sorted(sets, key=lambda s: (len(s), sorted(s))))

    def _leaf_factor(self, leaf: Leaf) -> None:
        variable, sets = self.copies[leaf.value.name]
        key = ("leaf", self.space.value_key(leaf.value), self.space.placements[leaf.value.name], sets)

        def make(pricing: Pricing) -> Table:
            return np.array([pricing.fetched(leaf, needs)[0] for needs in sets])

        self._factor((variable,), key, make, lasts=False)

    def _use_factor(self, node: Node, name: str) -> None:
        """No price: a rule may only take what is there."""
        (variable, _), (shared, sets) = self.rules[node.name], self.copies[name]
        needs = self.space.needs(node, name)

        def make(pricing: Pricing) -> Table:
            return np.array([[0.0 if need <= have else math.inf for need in needs] for have in sets])

        # A leaf's variable and a result's variable both come before their consumers'.
        self._factor((shared, variable), ("use", sets, needs), make, lasts=True)

    def _make_factor(self, node: Node, k: int) -> None:
        value = node.results[k]
        (variable, menu), (shared, sets) = self.rules[node.name], self.copies[value.name]
        gives = tuple(rule.gives[k] for rule in menu)
        key = ("make", self.space.value_key(value), self.space.placements[value.name], sets, gives)

        def make(pricing: Pricing) -> Table:
            trees = pricing.trees(value)
            return np.array([trees.prices(gives, copies) for copies in sets]).T

        self._factor((variable, shared), key, make, lasts=True)

    def _hand_on(self, node: Node, k: int, user: Node | None) -> None:
        """A value with one consumer: the price of every pair of rules."""
        value = node.results[k]
        variable, menu = self.rules[node.name]
        gives = tuple(rule.gives[k] for rule in menu)
        needs = self.space.needs(user, value.name)
        key = ("hand on", self.space.value_key(value), gives, needs, user is None)

        def make(pricing: Pricing) -> Table:
            trees = pricing.trees(value)
            table: Table = np.array([trees.prices(gives, need) for need in needs]).T
            return table[:, 0] if user is None else table

        scope = (variable,) if user is None else (variable, self.rules[user.name][0])
        self._factor(scope, key, make, lasts=True)


# The way back


class _Writer:
    """An assignment as a program."""

    def __init__(self, chosen: Choices, assignment: Assignment) -> None:
        self.space, self.pricing, self.graph = chosen.space, chosen.pricing, chosen.space.graph
        self.rules = {name: menu[assignment[variable]] for name, (variable, menu) in chosen.factor_graph.rules.items()}
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
        whole = whole_rule(node)
        if node.name in self.graph.fixed or any(len(w) > 1 or not all(p.is_shard for p in w) for w in wanted):
            return whole
        for rule in self.space.book.rules[node.name]:
            suits = all(not w or w[0] == give for w, give in zip(wanted, rule.gives, strict=True))
            if suits and rule.how == "plain" and any(wanted):
                return rule
        return whole

    def _stored(self, leaf: Leaf) -> Placement:
        needs = frozenset(self.needs.get(leaf.value.name, ()))
        if leaf.kind == "parameter":
            return self.pricing.fetched(leaf, needs)[1]
        only = next(iter(needs)) if len(needs) == 1 else I
        return only if leaf.kind == "input" and only.is_shard else I

    def _have(self, value: Value, placement: Placement) -> None:
        self.facts[value.name] = {placement: None}
        needs = self.needs.get(value.name, {})
        if value.name in self.space.free:
            # Held whole it is cut for nothing; held cut it is taken as it is.
            self.trees[value.name] = dict.fromkeys(needs, placement)
        elif needs.keys() - {placement}:
            self.trees[value.name] = self.pricing.trees(value).tree(placement, needs)

    def _chain(self, name: str, need: Placement) -> Chain:
        """The chain from a copy that is there to the one that is needed; what is made on the way stays."""
        chain = [need]
        while chain[0] not in self.facts[name]:
            chain.insert(0, self.trees[name][chain[0]])
        self.facts[name].update(dict.fromkeys(chain))
        return tuple(chain)
