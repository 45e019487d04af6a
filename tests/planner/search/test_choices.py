"""The search against every program there is: random small graphs, rule books and prices."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.errors import ProgramError
from lopsided.ir.graph import Graph, Leaf, Node, Ref, Value
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, P, Placement, R, S
from lopsided.ir.program import Program, RuleBook, check_program
from lopsided.models import zoo
from lopsided.planner.search import search
from lopsided.planner.search.choices import choices
from lopsided.planner.search.copies import Trees
from lopsided.planner.search.copies import price_of as price_of_value
from tests.support.jobs import book_of

PLACEMENTS = (I, R, P, S(0), S(1))


@dataclass(frozen=True)
class RandomPrices:
    """Prices by the shape of things: equal calls and values have equal prices, slices and zeros are free.

    Where there is no gradient, `I` and `R` are the same. A detour is often cheaper than going straight.
    """

    seed: int
    cheap: bool = False

    def _price(self, *what: object) -> float:
        return float(random.Random(f"{self.seed} {what}").choice((1, 2, 3, 5, 8, 13)))

    def rule(self, node: Node, rule: Rule) -> float:
        return self._price("rule", node.op, str(rule))

    def convert(self, value: Value, source: Placement, to: Placement) -> float:
        if not value.grad:
            source, to = (R if placement == I else placement for placement in (source, to))
        free = source == R or to == P
        return 0.0 if free or source == to else self._price("convert", value.shape, str(source), str(to))

    def store(self, leaf: Leaf, placement: Placement) -> float:
        return self._price("store", leaf.value.shape, str(placement))

    def fetch(self, leaf: Leaf, stored: Placement, to: Placement) -> float:
        return self.convert(leaf.value, stored, to)

    def is_cheap(self, node: Node) -> bool:
        return self.cheap


@st.composite
def books(draw: st.DrawFn) -> RuleBook:
    """Small graphs in which values fork, join, are used twice, are tied; each node has a few random rules."""
    count = draw(st.integers(1, 4))
    weights = draw(st.integers(0, 2))
    leaves = [Leaf(Value("x", (4, 4), "f32"), "input", "x")]
    leaves += [Leaf(Value(f"w{k}", (4, 4), "f32", grad=True), "parameter", f"w{k}") for k in range(weights)]
    values = [leaf.value for leaf in leaves]
    nodes, rules = [], {}
    placements = st.sampled_from(PLACEMENTS)
    for k in range(count):
        operands = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))
        is_last = k == count - 1
        grad = any(value.grad for value in operands)
        result = Value(f"v{k}", () if is_last else (4, 4), "f32", grad=grad)
        # Ops of the same name are the same call: what is solved for one is remembered for the other.
        op = f"aten.op{draw(st.integers(0, 1))}.default"
        node = Node(op, tuple(Ref(value.name) for value in operands), (), (result,))
        menu: dict[Rule, None] = {}
        for _ in range(draw(st.integers(1, 3))):
            needs = tuple(draw(placements) for _ in operands)
            gives = draw(st.sampled_from((I, R, P))) if is_last else draw(placements)
            menu[Rule(needs, (gives,))] = None
        nodes.append(node)
        rules[node.name] = tuple(menu)
        values.append(result)
    graph = Graph(tuple(leaves), tuple(nodes), nodes[-1].name)
    stored = {leaf.value.name: (I, S(0), S(1)) for leaf in leaves}
    return RuleBook(graph, rules, stored, ())


def cheapest_by_enumeration(book: RuleBook, prices: RandomPrices) -> float:
    """Every choice of rules and stores; for each value, every order in which its copies could be made."""
    graph = book.graph
    menus = [book.rules[node.name] for node in graph.nodes]
    parameters = [leaf for leaf in graph.leaves if leaf.kind == "parameter"]
    best = math.inf
    for rules in itertools.product(*menus):
        needs: dict[str, set[Placement]] = {graph.loss: {I}}
        for node, rule in zip(graph.nodes, rules, strict=True):
            for name, need in zip(node.operands, rule.needs, strict=True):
                needs.setdefault(name, set()).add(need)
        price = sum(prices.rule(node, rule) for node, rule in zip(graph.nodes, rules, strict=True))
        for node, rule in zip(graph.nodes, rules, strict=True):
            value = node.results[0]
            price += spread(value, rule.gives[0], needs.get(value.name, set()), placements_of(value, book), prices)
        for leaf in parameters:
            wanted = needs.get(leaf.value.name, set())
            known = placements_of(leaf.value, book)
            price += (
                0
                if not wanted
                else min(
                    prices.store(leaf, stored) + spread(leaf.value, stored, wanted, known, prices)
                    for stored in book.leaves[leaf.value.name]
                )
            )
        best = min(best, price)
    return best


def placements_of(value: Value, book: RuleBook) -> set[Placement]:
    """What a copy of the value can be made by way of."""
    found = {I, R, P, *book.leaves.get(value.name, ())}
    for node in book.graph.nodes:
        for rule in book.rules[node.name]:
            found.update(need for name, need in zip(node.operands, rule.needs, strict=True) if name == value.name)
            found.update(give for result, give in zip(node.results, rule.gives, strict=True) if result == value)
    return found


def spread(
    value: Value, start: Placement, wanted: set[Placement], placements: set[Placement], prices: RandomPrices
) -> float:
    """The cheapest order of making the wanted copies, and any others on the way if that helps, each from one there."""
    if not wanted - {start}:
        return 0.0
    best = math.inf
    others = placements - wanted - {start}
    detours = itertools.chain.from_iterable(itertools.combinations(others, k) for k in range(len(others) + 1))
    sets = [wanted.union(more) - {start} for more in detours]
    for order in itertools.chain.from_iterable(itertools.permutations(sorted(targets)) for targets in sets):
        have, price = [start], 0.0
        for target in order:
            price += min(prices.convert(value, source, target) for source in have)
            have.append(target)
        best = min(best, price)
    return best


def price_of(program: Program, prices: RandomPrices) -> float:
    """What a written program costs: rules, conversions made once, stores."""
    leaves = {leaf.value.name: leaf for leaf in program.graph.leaves}
    price = sum(prices.rule(step.node, step.rule) for step in program.steps)
    price += sum(prices.convert(value, source, to) for value, source, to in program.conversions())
    used = {name for step in program.steps for name in step.node.operands}
    kept = [(leaves[name], placement) for name, placement in program.leaves if name in used]
    return price + sum(prices.store(leaf, placement) for leaf, placement in kept if leaf.kind == "parameter")


@given(books(), st.integers(0, 10**6), st.booleans())
@settings(max_examples=400)
def test_the_search_finds_what_enumeration_finds(book: RuleBook, seed: int, reduce: bool) -> None:
    prices = RandomPrices(seed)
    found = search(book, prices, reduce=reduce)
    assert found.cost_s == pytest.approx(cheapest_by_enumeration(book, prices))
    assert found.gap == 0
    check_program(found.program, book)
    assert price_of(found.program, prices) == pytest.approx(found.cost_s)


@given(books(), st.integers(0, 10**6))
def test_what_is_remembered_and_what_is_reduced_change_nothing(book: RuleBook, seed: int) -> None:
    prices = RandomPrices(seed)
    costs = [search(book, prices, reduce=r, remember=m).cost_s for r in (False, True) for m in (False, True)]
    assert costs == pytest.approx([costs[0]] * 4)


@given(books(), st.integers(0, 10**6))
def test_a_search_is_deterministic(book: RuleBook, seed: int) -> None:
    assert search(book, RandomPrices(seed)).program == search(book, RandomPrices(seed)).program


@given(st.integers(0, 10**6), st.sampled_from(PLACEMENTS), st.frozensets(st.sampled_from(PLACEMENTS)))
def test_a_tree_costs_what_it_is_said_to_and_none_is_cheaper(
    seed: int, start: Placement, wanted: frozenset[Placement]
) -> None:
    value, prices = Value("v", (4, 4), "f32", grad=True), RandomPrices(seed)
    trees = Trees(PLACEMENTS, price_of_value(value, None, prices))
    tree = trees.tree(start, wanted)
    assert wanted <= {start, *tree}
    (price,) = trees.prices([start], wanted)
    assert price == sum(prices.convert(value, source, to) for to, source in tree.items())
    assert price == spread(value, start, set(wanted), set(PLACEMENTS), prices)


def test_copies_are_made_by_way_of_one_that_nobody_needs() -> None:
    dear = {(P, I): 9.0, (P, R): 9.0, (P, S(1)): 9.0, (P, S(0)): 1.0, (S(0), R): 2.0}
    trees = Trees(PLACEMENTS, lambda source, to: dear.get((source, to), 0.0 if source in (to, R) else 5.0))
    assert trees.prices([P, S(0)], frozenset({R})) == [3, 2]
    assert trees.tree(P, [R]) == {S(0): P, R: S(0)}
    assert trees.tree(P, [I, S(1)]) == {S(0): P, R: S(0), I: R, S(1): R}


def test_a_converted_copy_is_shared_by_all_consumers() -> None:
    x = Leaf(Value("x", (4,), "f32"), "input", "x")
    made = Node("aten.make.default", (Ref("x"),), (), (Value("h", (4,), "f32", grad=True),))
    users = [Node("aten.use.default", (Ref("h"),), (), (Value(f"u{k}", (4,), "f32", grad=True),)) for k in range(3)]
    end = Node("aten.end.default", tuple(Ref(f"u{k}") for k in range(3)), (), (Value("loss", (), "f32", grad=True),))
    graph = Graph((x,), (made, *users, end), "loss")
    rules = {
        "h": (Rule((I,), (S(0),)),),
        **{f"u{k}": (Rule((R,), (I,)),) for k in range(3)},
        "loss": (Rule((I, I, I), (I,)),),
    }
    found = search(RuleBook(graph, rules, {"x": (I,)}, ()), CountingPrices())
    assert [(v.name, s, t) for v, s, t in found.program.conversions()] == [("h", S(0), R)]
    assert found.cost_s == 1


class CountingPrices(RandomPrices):
    """Only conversions cost anything: one second each."""

    def __init__(self) -> None:
        super().__init__(0)

    def rule(self, node: Node, rule: Rule) -> float:
        return 0.0

    def convert(self, value: Value, source: Placement, to: Placement) -> float:
        return 0.0 if source in (to, R) else 1.0


def test_inputs_and_what_follows_from_them_are_had_in_any_placement() -> None:
    x = Leaf(Value("x", (4, 4), "f32"), "input", "x")
    mask = Node("aten.mask.default", (Ref("x"),), (), (Value("m", (4, 4), "f32"),))
    first = Node("aten.a.default", (Ref("m"),), (), (Value("a", (4, 4), "f32", grad=True),))
    second = Node("aten.b.default", (Ref("a"), Ref("m")), (), (Value("b", (), "f32", grad=True),))
    graph = Graph((x,), (mask, first, second), "b")
    rules = {
        "m": (Rule((I,), (I,)), Rule((S(0),), (S(0),))),
        "a": (Rule((S(0),), (S(1),)),),
        "b": (Rule((S(1), S(1)), (I,)),),
    }
    book = RuleBook(graph, rules, {"x": (I, S(0), S(1))}, ())
    assert choices(book, RandomPrices(0, cheap=True)).free == {"x", "m"}
    program = search(book, RandomPrices(0, cheap=True)).program
    check_program(program, book)
    # Wanted in two ways it is made whole and sliced, wanted in one way it is made so.
    assert program.steps[0].rule == rules["m"][0]
    one_way = {**rules, "b": (Rule((S(1), S(0)), (I,)),)}
    program = search(RuleBook(graph, one_way, book.leaves, ()), RandomPrices(0, cheap=True)).program
    assert program.steps[0].rule == rules["m"][1]
    assert dict(program.leaves) == {"x": S(0)}


def test_rules_that_do_not_fit_together_are_refused() -> None:
    x = Leaf(Value("x", (4,), "f32"), "input", "x")
    node = Node("aten.a.default", (Ref("x"),), (), (Value("a", (), "f32", grad=True),))
    book = RuleBook(Graph((x,), (node,), "a"), {"a": (Rule((I,), (S(0),)),)}, {"x": (I,)}, ())
    with pytest.raises(ProgramError, match="no program of the rule book fits together"):
        search(book, NoWayBack(0))
    with pytest.raises(ProgramError, match=r"no rule of aten\.a\.default is left"):
        search(book, RandomPrices(0), allowed=lambda node, rule: False)


class NoWayBack(RandomPrices):
    def convert(self, value: Value, source: Placement, to: Placement) -> float:
        return math.inf


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet50", "bert-moe"])
def test_real_models_are_solved_to_the_end(name: str) -> None:
    book, prices = book_of(zoo.SMALL[name]), RandomPrices(3, cheap=True)
    found = search(book, prices)
    assert found.why == "proven"
    assert found.gap == 0
    assert search(book, prices, remember=False).cost_s == pytest.approx(found.cost_s)
    check_program(found.program, book)


def test_out_of_time_a_legal_program_is_returned_with_its_gap() -> None:
    book, prices = book_of(zoo.SMALL["t5"]), RandomPrices(3, cheap=True)
    hurried = search(book, prices, reduce=False, time_limit_s=0.0)
    assert hurried.why == "time limit"
    assert hurried.gap > 0
    check_program(hurried.program, book)
    assert hurried.bound_s <= search(book, prices).cost_s <= hurried.cost_s
