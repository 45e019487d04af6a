"""The strategies everyone knows, as programs: candidates of the planner, and what its answer is compared with.

In: a `RuleBook` and prices. Out: programs.

    dp-ev    data parallelism, equal shares           parameters I→R, every value cut along the batch
    dp-cp    data parallelism, shares by speed        the same
    fsdp     ZeRO-3, equal shares                     the same, parameters stored S0@state→R and gathered again
    tensor   tensor parallelism, shares by speed      the cheapest program that never cuts the batch
    single   everything on the fastest device

Data parallelism is written by walking the graph and keeping the batch cut wherever an op allows it. For tensor
parallelism the batch is taken away and the search is asked: no hand-written one can then be better.
"""

from __future__ import annotations

from collections.abc import Collection

from lopsided.ir.graph import Leaf, Node
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, Placement, S
from lopsided.ir.program import Chain, Program, RuleBook, Step
from lopsided.planner.search.copies import Prices
from lopsided.schedule.rounds import batch_size

STATE = "state"
"""The name of the shares by which stored parameters are cut."""


def data_parallel(book: RuleBook, prices: Prices) -> Program:
    """Every value cut along the batch, parameters whole and used as `R`."""
    return _Walk(book, prices).program()


def stored_cut(program: Program, which: Collection[str] | None = None) -> Program:
    """The same program with its parameters (all, or these) stored cut and gathered for use, as ZeRO-3 and FSDP do."""
    kept = {
        leaf.value.name: stored_so(leaf)
        for leaf in program.graph.parameters
        if which is None or leaf.value.name in which
    }
    made: set[tuple[str, Placement]] = set()

    def chain_of(name: str, chain: Chain) -> Chain:
        if name not in kept or not kept[name].is_shard:
            return chain
        if (name, chain[-1]) in made:
            return chain[-1:]
        made.add((name, chain[-1]))
        return (kept[name], chain[-1])

    steps = tuple(Step(s.node, s.rule, tuple(chain_of(n, c) for n, c in s.taken)) for s in program.steps)
    leaves = tuple((name, kept.get(name, placement)) for name, placement in program.leaves)
    return Program(program.graph, leaves, steps, program.loss, program.updates)


def stored_so(leaf: Leaf) -> Placement:
    """Cut along the longest dim, so that there is something for everyone; the first of equals."""
    shape = leaf.value.shape
    dims = [d for d, size in enumerate(shape) if size > 1]
    return S(max(dims, key=lambda d: (shape[d], -d)), by=STATE) if dims else I


class _Walk:
    """Node by node, the rule that fits what is there."""

    def __init__(self, book: RuleBook, prices: Prices) -> None:
        self.book, self.graph, self.prices = book, book.graph, prices
        self.parameters = self.graph.parameter_names
        self.fixed = self.graph.fixed
        self.facts: dict[str, dict[Placement, None]] = {}

    def program(self) -> Program:
        graph, batch = self.graph, batch_size(self.graph)
        leaves = []
        for leaf in graph.leaves:
            rows = leaf.kind == "input" and leaf.value.shape and leaf.value.shape[0] == batch > 1
            placement = S(0) if rows else I
            leaves.append((leaf.value.name, placement))
            self.facts[leaf.value.name] = {placement: None}
        steps = []
        for node in graph.nodes:
            rule = self._rule(node)
            chains = tuple(self._take(name, need) for name, need in zip(node.operands, rule.needs, strict=True))
            steps.append(Step(node, rule, chains))
            for value, give in zip(node.results, rule.gives, strict=True):
                self.facts[value.name] = {give: None}
        loss = self._take(graph.loss, I)
        updates = tuple(self._take(name, I) for _, name in graph.updates)
        return Program(graph, tuple(leaves), tuple(steps), loss, updates)

    def _rule(self, node: Node) -> Rule:
        every = [rule for rule in self.book.rules[node.name] if rule.how != "sfb"]
        # Used as `R`, and so summed where they are updated; as `I` only where there is no other way.
        rules = [rule for rule in every if self._parameters_are(node, rule, "R")]
        rules = rules or [rule for rule in every if self._parameters_are(node, rule, "IR")]
        if not any(have.is_shard for name in node.operands for have in self.facts[name]):
            # It has no batch: every device computes it.
            rules = [rule for rule in rules if not any(p.is_shard for p in (*rule.needs, *rule.gives))]
        return min(
            rules,
            key=lambda rule: (
                self._uncut(node, rule),
                self._price(node, rule),
                self._converted(node, rule),
                str(rule),
            ),
        )

    def _uncut(self, node: Node, rule: Rule) -> int:
        """How many operands that are cut along the batch would no longer be."""
        placed = zip(node.operands, rule.needs, strict=True)
        return sum(not need.is_shard for name, need in placed if any(have.is_shard for have in self.facts[name]))

    def _converted(self, node: Node, rule: Rule) -> int:
        """How many operands are not there as the rule needs them: of equal prices, what is there is kept."""
        return sum(need not in self.facts[name] for name, need in zip(node.operands, rule.needs, strict=True))

    def _parameters_are(self, node: Node, rule: Rule, kinds: str) -> bool:
        placed = zip(node.operands, rule.needs, strict=True)
        return all(need.kind in kinds for name, need in placed if name in self.parameters)

    def _price(self, node: Node, rule: Rule) -> float:
        moved = 0.0
        for name, need in zip(node.operands, rule.needs, strict=True):
            if name not in self.parameters and need not in self.facts[name]:
                moved += self._nearest(name, need)[0]
        return moved + self.prices.rule(node, rule)

    def _nearest(self, name: str, need: Placement) -> tuple[float, Placement]:
        value = self.graph.values[name]
        return min((self.prices.convert(value, have, need), have) for have in self.facts[name])

    def _take(self, name: str, need: Placement) -> Chain:
        if need in self.facts[name]:
            return (need,)
        source = I if name in self.parameters else self._nearest(name, need)[1]
        self.facts[name][need] = None
        return (source, need)


def batch_dims(program: Program) -> dict[str, int]:
    """For each value that data parallelism keeps cut, the dim that is its batch."""
    dims = {name: placement.dim for name, placement in program.leaves if placement.is_shard and not placement.by}
    for step in program.steps:
        for name, give in step.made:
            if give.is_shard:
                dims[name] = give.dim
    return dims


def leaves_batch_whole(dims: dict[str, int], node: Node, rule: Rule) -> bool:
    """Whether a rule cuts no value along its batch."""
    placed = [*zip(node.operands, rule.needs, strict=True)]
    placed += [(value.name, give) for value, give in zip(node.results, rule.gives, strict=True)]
    return not any(p.is_shard and dims.get(name) == p.dim for name, p in placed)
