"""Graph + table → the rule book: every way each node of a graph can be run.

In: a `Graph`. Out: a `RuleBook` with the rules of every node and the placements of every leaf. Two ideas beyond reading
the table:

*Variants.* A dim can be cut in more than one way: the 768 columns of a projection that is seen as 12 heads of 64 later
must be cut between heads. Which ways matter follows from the ops around it, so they are handed along the graph from op
to op until nothing new appears (`_spread`), and ways that lead nowhere are dropped where others lead on (`_prune`).

*Fixed values.* What depends on nothing that varies (masks, rotary tables) is computed whole on every device, and cut
by slicing where it meets a cut value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lopsided.errors import NotationError
from lopsided.ir.graph import WHOLE_KINDS, Graph, Leaf, Node, signature
from lopsided.ir.notation import PLAIN, Bound, Rule, Variant, Where, bind, derive, parse_line
from lopsided.ir.placement import I, Placement, R, S
from lopsided.ir.program import RuleBook, whole_rule
from lopsided.ops import describe
from lopsided.ops.experiment import rules_by_experiment
from lopsided.ops.op import Call, Talk

_MOST_VARIANTS = 6


@dataclass(frozen=True, slots=True)
class Described:
    """The line of one call, bound to its shapes, with the talking rules the op brings along."""

    bound: Bound
    talks: tuple[Talk, ...]
    text: str

    @property
    def indices(self) -> tuple[str, ...]:
        """Every index some rule may cut."""
        return tuple(dict.fromkeys([*self.bound.cuttable, *(talk.index for talk in self.talks)]))


def describe_call(call: Call, *, exact: bool = True) -> Described | None:
    """The op's line for this call, or None if nobody has described the op."""
    entry = describe(call.node.op)
    if entry is None:
        return None
    written = entry.line if isinstance(entry.line, str) else entry.line(call)
    text, sizes = (written, {}) if isinstance(written, str) else written
    # A line names either every tensor argument of the op, or just those that this call gives.
    named = len(parse_line(text).operands)
    slots = call.operands if named == len(call.operands) else call.tensor_slots()
    try:
        bound = bind(parse_line(text), [None if slot is None else slot.shape for slot in slots], call.results, sizes)
    except NotationError as error:
        raise NotationError(f"{call.node.op}: {error.what}", where=error.where, do=error.do) from None
    talks = tuple(
        talk
        for talk in (entry.talks(call) if entry.talks is not None else ())
        if bound.lengths.get(talk.index, 1) > 1 and (talk.exact or not exact)
    )
    return Described(bound, talks, text)


def call_rules(
    call: Call, variants: Mapping[str, Sequence[Variant]] | None = None, *, exact: bool = True
) -> tuple[Rule, ...]:
    """The rules of one call: from its line, or by experiment."""
    described = describe_call(call, exact=exact)
    if described is None:
        return rules_by_experiment(call)
    return tuple(rule for rule in _described_rules(described, variants) if _sensible(rule, call))


def _described_rules(described: Described, variants: Mapping[str, Sequence[Variant]] | None) -> Iterator[Rule]:
    yield from derive(described.bound, variants)
    for talk in described.talks:
        for variant in (variants or {}).get(talk.index, (PLAIN,)):
            rule = _talking_rule(described.bound, talk, variant)
            if not (talk.in_one_block and any(p.outer > 1 for p in (*rule.needs, *rule.gives))):
                yield rule


def _talking_rule(bound: Bound, talk: Talk, variant: Variant) -> Rule:
    def place(where: Mapping[str, Where], otherwise: Placement) -> Placement:
        return where[talk.index].placed(variant) if talk.index in where else otherwise

    needs = tuple(place(where, R) for where in bound.operands)
    return Rule(needs, tuple(place(where, talk.lacking) for where in bound.results), talk.how)


def _sensible(rule: Rule, call: Call) -> bool:
    """Not: truth values as terms of a sum, and factor broadcasting where no factor has a gradient or masks differ."""
    if any(placement.kind == "P" and value.dtype == "bool" for placement, value in call.placed(rule)):
        return False
    if rule.how == "sfb":
        entry = describe(call.node.op)
        trained = any(need == I and value.grad for need, value in zip(rule.needs, call.operands, strict=True))
        trained = trained and any(value.grad for value in call.node.results)
        return trained and not (entry is not None and entry.random)
    return True


# The book


def derive_rules(graph: Graph, *, exact: bool = True) -> RuleBook:
    """The rule book of a graph. `exact=False` allows rules that relax the model, too: local batch statistics."""
    described: dict[object, Described | None] = {}
    calls: dict[str, tuple[Call, object]] = {}
    for node in graph.nodes:
        if node.name not in graph.fixed:
            call = Call.of(node, graph.values)
            key = signature(node, graph.values)
            calls[node.name] = call, key
            if key not in described:
                described[key] = _described_or_not(call, exact)
    lines = {name: d for name, (_, key) in calls.items() if (d := described[key]) is not None}
    variants = _variants(graph, lines)
    known: dict[object, tuple[Rule, ...]] = {}
    rules: dict[str, tuple[Rule, ...]] = {}
    for node in graph.nodes:
        if node.name in graph.fixed:
            rules[node.name] = (whole_rule(node),)
            continue
        call, key = calls[node.name]
        mine = variants.get(node.name, {})
        full_key = (key, tuple(mine.items()))
        if full_key not in known:
            known[full_key] = _book_rules(call, described[key], mine)
        rules[node.name] = known[full_key]
    cuts: dict[str, dict[Placement, None]] = {}
    for node in graph.nodes:
        for k, name in enumerate(node.operands):
            cuts.setdefault(name, {}).update((r.needs[k], None) for r in rules[node.name] if r.needs[k].is_shard)
    leaves = {leaf.value.name: _leaf_placements(leaf, cuts.get(leaf.value.name, {})) for leaf in graph.leaves}
    return RuleBook(
        graph, rules, leaves, tuple(n for n in graph.nodes if n.name in calls and n.name not in lines), exact
    )


def _described_or_not(call: Call, exact: bool) -> Described | None:
    """The op's line; a line that does not fit a legal call is a gap in the table, and an experiment fills it."""
    try:
        return describe_call(call, exact=exact)
    except NotationError:
        return None


def _book_rules(
    call: Call, described: Described | None, variants: Mapping[str, tuple[Variant, ...]]
) -> tuple[Rule, ...]:
    if described is None:
        return rules_by_experiment(call)
    return tuple(dict.fromkeys(rule for rule in _described_rules(described, variants) if _sensible(rule, call)))


def _leaf_placements(leaf: Leaf, cuts: Mapping[Placement, None]) -> tuple[Placement, ...]:
    """A parameter is stored whole or cut along any dim, an input is loaded so; what is fixed is whole."""
    if leaf.kind in WHOLE_KINDS:
        return (I,)
    plain = [S(d) for d, size in enumerate(leaf.value.shape) if size > 1]
    return tuple(dict.fromkeys([I, *plain, *cuts]))


# Variants

_Place = tuple[str, int]  # a dim of a value
_Ways = dict[str, dict[str, tuple[Variant, ...]]]  # node → index → variants


def _variants(graph: Graph, lines: Mapping[str, Described]) -> _Ways:
    """For each node and index, how the index may be divided before it is cut."""
    carried: dict[str, list[tuple[str, list[tuple[_Place, Where, bool]]]]] = {}
    for node in graph.nodes:
        if node.name in lines:
            carried[node.name] = list(_carried(graph, node, lines[node.name]))
    ways = _spread(lines, carried)
    _prune(graph, lines, carried, ways)
    return ways


def _carried(graph: Graph, node: Node, line: Described) -> Iterator[tuple[str, list[tuple[_Place, Where, bool]]]]:
    """Each index with the dims that carry it: (value, dim), where in the dim, and whether it is a result."""
    for index in line.indices:
        places = []
        for name, where in zip(node.operands, line.bound.operands, strict=True):
            if index in where and name not in graph.fixed:
                places.append(((name, where[index].dim), where[index], False))
        for value, where in zip(node.results, line.bound.results, strict=True):
            if index in where:
                places.append(((value.name, where[index].dim), where[index], True))
        yield index, places


def _as_variant(way: Variant, where: Where, length: int) -> Variant | None:
    """A cut of a whole dim as a division of the index that lies in it, if it is one."""
    outer, unit = way
    if outer % where.outer or unit % where.unit:
        return None
    variant = (outer // where.outer, unit // where.unit)
    parts = variant[0] * variant[1]
    return variant if length % parts == 0 and length // parts > 1 else None


def _in_dim(variant: Variant, where: Where) -> Variant:
    return (where.outer * variant[0], where.unit * variant[1])


def _spread(
    lines: Mapping[str, Described], carried: Mapping[str, list[tuple[str, list[tuple[_Place, Where, bool]]]]]
) -> _Ways:
    seen: dict[_Place, dict[Variant, None]] = {}
    ways: dict[str, dict[str, dict[Variant, None]]] = {}
    names = list(carried)
    changed, sweep = True, 0
    while changed and sweep < 16:
        changed = False
        for name in names if sweep % 2 == 0 else reversed(names):
            for index, places in carried[name]:
                mine = ways.setdefault(name, {}).setdefault(index, {PLAIN: None})
                length = lines[name].bound.lengths[index]
                for place, where, _ in places:
                    for way in seen.get(place, ()):
                        variant = _as_variant(way, where, length)
                        if variant is not None and variant not in mine and len(mine) < _MOST_VARIANTS:
                            mine[variant] = None
                for place, where, _ in places:
                    at = seen.setdefault(place, {})
                    for variant in mine:
                        way = _in_dim(variant, where)
                        if way not in at:
                            at[way] = None
                            changed = True
        sweep += 1
    return {name: {index: tuple(v) for index, v in indices.items()} for name, indices in ways.items()}


def _prune(
    graph: Graph,
    lines: Mapping[str, Described],
    carried: Mapping[str, list[tuple[str, list[tuple[_Place, Where, bool]]]]],
    ways: _Ways,
) -> None:
    """Drop a variant that its neighbours cannot continue, where another variant of the same index can be continued."""
    while True:
        made: dict[_Place, set[Variant]] = {}
        used: dict[_Place, set[Variant]] = {}
        for name, indices in carried.items():
            for index, places in indices:
                for place, where, is_result in places:
                    ends = made if is_result else used
                    ends.setdefault(place, set()).update(_in_dim(v, where) for v in ways[name][index])
        changed = False
        for name, indices in carried.items():
            for index, places in indices:
                mine = ways[name][index]
                if len(mine) > 1:
                    kept = tuple(
                        v
                        for v in mine
                        if all(
                            place not in other or _in_dim(v, where) in other[place]
                            for place, where, is_result in places
                            for other in [used if is_result else made]
                        )
                    )
                    if kept and kept != mine:
                        ways[name][index] = kept
                        changed = True
        if not changed:
            return
