"""A distributed program: an ordered list of rules with the conversions between them. Prints, parses back, is checked.

In: a `Graph`, all that its programs may be made of (`RuleBook`), and choices. Out: `Program`. One line per leaf and
node; an operand shows the placement it is taken in and, after arrows, what it is converted to:

    %w = parameter "mlp.weight" : S0
    %h = aten.linear.default(%x: S0, %w: S0→R) : S0
    return %loss: P→I

A converted copy is a fact like any other: whoever needs it later takes it from there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lopsided.errors import ProgramError
from lopsided.ir.graph import Graph, Leaf, Node, Value
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, Placement, parse_placement

Fact = tuple[str, Placement]  # a value in a placement
Chain = tuple[Placement, ...]  # from a fact that exists, through conversions, to what is needed


@dataclass(frozen=True, slots=True)
class Step:
    """One node, run by one rule, with the chain of conversions of each operand."""

    node: Node
    rule: Rule
    chains: tuple[Chain, ...]

    @property
    def taken(self) -> list[tuple[str, Chain]]:
        """Each operand with its chain."""
        return list(zip(self.node.operands, self.chains, strict=True))

    @property
    def needed(self) -> list[Fact]:
        """Each operand as the rule needs it."""
        return list(zip(self.node.operands, self.rule.needs, strict=True))

    @property
    def made(self) -> list[Fact]:
        """Each result as the rule gives it."""
        return [(value.name, give) for value, give in zip(self.node.results, self.rule.gives, strict=True)]


@dataclass(frozen=True, slots=True)
class Program:
    """How every leaf is stored, how every node is run, and how the loss and the buffers become whole again."""

    graph: Graph
    leaves: tuple[tuple[str, Placement], ...]
    steps: tuple[Step, ...]
    loss: Chain
    updates: tuple[Chain, ...] = ()

    def for_graph(self, graph: Graph) -> Program:
        """The same choices for another graph with the same names."""
        nodes = {node.name: node for node in graph.nodes}
        steps = tuple(replace(step, node=nodes[step.node.name]) for step in self.steps)
        return replace(self, graph=graph, steps=steps)

    def conversions(self) -> Iterator[tuple[Value, Placement, Placement]]:
        """Every conversion the program makes, once each, in order."""
        made: set[Fact] = {(name, placement) for name, placement in self.leaves}
        values = self.graph.values

        def along(name: str, chain: Chain) -> Iterator[tuple[Value, Placement, Placement]]:
            for source, to in itertools.pairwise(chain):
                if (name, to) not in made:
                    made.add((name, to))
                    yield values[name], source, to

        for step in self.steps:
            for name, chain in step.taken:
                yield from along(name, chain)
            made.update(step.made)
        yield from along(self.graph.loss, self.loss)
        for (_, name), chain in zip(self.graph.updates, self.updates, strict=True):
            yield from along(name, chain)

    def __str__(self) -> str:
        return print_program(self)


# Printing


def _chain(chain: Chain) -> str:
    return "→".join(map(str, chain))


def _leaf_line(leaf: Leaf, placement: Placement) -> str:
    return f'%{leaf.value.name} = {leaf.kind} "{leaf.target}" : {placement}'


def _step_line(step: Step) -> str:
    operands = [f"%{name}: {_chain(chain)}" for name, chain in step.taken]
    names = ", ".join(f"%{value.name}" for value in step.node.results)
    gives = ", ".join(map(str, step.rule.gives))
    how = "" if step.rule.how == "plain" else f" [{step.rule.how}]"
    return f"{names} = {step.node.op}({', '.join(operands)}) : {gives}{how}"


def print_program(program: Program) -> str:
    leaves = {leaf.value.name: leaf for leaf in program.graph.leaves}
    lines = [_leaf_line(leaves[name], placement) for name, placement in program.leaves]
    lines += [_step_line(step) for step in program.steps]
    for (buffer, name), chain in zip(program.graph.updates, program.updates, strict=True):
        lines.append(f'update "{buffer}" = %{name}: {_chain(chain)}')
    return "\n".join([*lines, f"return %{program.graph.loss}: {_chain(program.loss)}"]) + "\n"


# Parsing

_LEAF = re.compile(r'%([\w.]+) = (\w+) "(.*)" : (\S+)')
_STEP = re.compile(r"((?:%[\w.]+(?:, )?)+) = ([\w.]+)\((.*)\) : ([^\[]+?)(?: \[(\w+)\])?")
_UPDATE = re.compile(r'update "(.*)" = %([\w.]+): (\S+)')
_RETURN = re.compile(r"return %([\w.]+): (\S+)")


def parse_program(text: str, graph: Graph) -> Program:
    """The program for `graph` that prints as `text`. `check_program` says whether it is legal."""
    nodes = {tuple(value.name for value in node.results): node for node in graph.nodes}
    leaves: list[tuple[str, Placement]] = []
    steps: list[Step] = []
    updates: dict[str, Chain] = {}
    loss: Chain = ()
    for number, line in enumerate(text.splitlines(), 1):
        where = f"line {number}: {line.strip()}"
        line = line.strip()
        if not line:
            continue
        if match := _RETURN.fullmatch(line):
            if match[1] != graph.loss:
                raise ProgramError(
                    f"the program returns %{match[1]}, the graph %{graph.loss}",
                    where=where,
                    do="return the loss",
                )
            if loss:
                raise ProgramError("the program returns twice", where=where, do="return the loss once")
            loss = _parse_chain(match[2], where)
        elif match := _UPDATE.fullmatch(line):
            if (match[1], match[2]) not in graph.updates:
                raise ProgramError(
                    f'the graph does not update "{match[1]}" with %{match[2]}',
                    where=where,
                    do="leave the line out",
                )
            if match[1] in updates:
                raise ProgramError(f'"{match[1]}" is updated twice', where=where, do="update every buffer once")
            updates[match[1]] = _parse_chain(match[3], where)
        elif match := _LEAF.fullmatch(line):
            if match[1] in {name for name, _ in leaves}:
                raise ProgramError(f"%{match[1]} is placed twice", where=where, do="give every leaf one line")
            leaves.append((match[1], placement_at(match[4], where)))
        elif match := _STEP.fullmatch(line):
            steps.append(_parse_step(match, nodes, where))
        else:
            raise ProgramError("program text does not parse", where=where, do="compare with a printed program")
    for buffer, _ in graph.updates:
        if buffer not in updates:
            raise ProgramError(
                f"the program does not update the buffer {buffer}", do=f'add a line: update "{buffer}" = ...'
            )
    return Program(graph, tuple(leaves), tuple(steps), loss, tuple(updates[buffer] for buffer, _ in graph.updates))


def _parse_step(match: re.Match[str], nodes: Mapping[tuple[str, ...], Node], where: str) -> Step:
    names = tuple(name.strip().removeprefix("%") for name in match[1].split(","))
    node = nodes.get(names)
    if node is None:
        raise ProgramError(f"the graph has no node %{names[0]} of this form", where=where, do="name the graph's nodes")
    if node.op != match[2]:
        raise ProgramError(
            f"%{names[0]} is {node.op} in the graph, not {match[2]}", where=where, do="name the graph's ops"
        )
    operands = [part.strip() for part in match[3].split(",") if part.strip()]
    chains = []
    for expected, operand in zip(node.operands, operands, strict=False):
        name, _, chain = operand.partition(": ")
        if name != f"%{expected}":
            raise ProgramError(
                f"%{names[0]} takes %{expected} here, not {name}", where=where, do="keep the graph's order"
            )
        chains.append(_parse_chain(chain, where))
    if len(operands) != len(node.operands):
        raise ProgramError(
            f"%{names[0]} takes {len(node.operands)} operands, not {len(operands)}",
            where=where,
            do="name all",
        )
    gives = tuple(placement_at(part.strip(), where) for part in match[4].split(","))
    return Step(node, Rule(tuple(chain[-1] for chain in chains), gives, match[5] or "plain"), tuple(chains))


def _parse_chain(text: str, where: str) -> Chain:
    return tuple(placement_at(part, where) for part in text.split("→"))


def placement_at(text: str, where: str) -> Placement:
    try:
        return parse_placement(text)
    except ProgramError as error:
        raise ProgramError(error.what, where=where, do=error.do) from None


# Checking


def check_program(program: Program, book: RuleBook) -> None:
    """Refuse an illegal program, in words: what, where, and which choices there are."""
    graph = program.graph
    if graph is not book.graph and graph != book.graph:
        raise ProgramError(
            "the program and the rule book belong to different graphs",
            do="derive the rules of the program's graph",
        )
    placed = dict(program.leaves)
    for leaf in graph.leaves:
        at = placed.get(leaf.value.name, I)
        if at.cut_by("") not in book.leaves[leaf.value.name]:
            raise ProgramError(
                f"%{leaf.value.name} ({leaf.kind} {leaf.target}) cannot be placed {at}",
                where=str(leaf.value),
                do=f"choose one of {', '.join(map(str, book.leaves[leaf.value.name]))}",
            )
    for step in program.steps:
        rules = book.rules[step.node.name]
        if in_work_shares(step.rule) not in rules and len(step.chains) == len(step.node.operands):
            raise ProgramError(
                f"{step.node.op} has no rule {step.rule}",
                where=_step_line(step),
                do=f"use one of its rules: {'; '.join(map(str, rules))}",
            )
    check_facts(program)


def in_work_shares(rule: Rule) -> Rule:
    """The rule without the names of the shares that cut it, as the rule book has it."""
    if not any(placement.by for placement in (*rule.needs, *rule.gives)):
        return rule
    return Rule(tuple(p.cut_by("") for p in rule.needs), tuple(p.cut_by("") for p in rule.gives), rule.how)


def check_facts(program: Program) -> None:
    """Refuse a program that takes what is not there, leaves something out, or does not end whole."""
    graph = program.graph
    facts: set[Fact] = set()
    placed = dict(program.leaves)
    for leaf in graph.leaves:
        name = leaf.value.name
        if name not in placed:
            raise ProgramError(f"%{name} ({leaf.kind} {leaf.target}) has no placement", do="give every leaf a line")
        facts.add((name, placed[name]))
    if unknown := next((name for name in placed if name not in {leaf.value.name for leaf in graph.leaves}), None):
        raise ProgramError(f"%{unknown} is not a leaf of the graph", do="leave the line out")
    done: set[str] = set()
    for step in program.steps:
        _check_step(step, facts, graph, done)
        done.add(step.node.name)
    if missing := next((node for node in graph.nodes if node.name not in done), None):
        raise ProgramError(
            f"%{missing.name} = {missing.op} is not run", where=str(missing.source), do="run every node once"
        )
    ends = [(graph.loss, program.loss, "the loss")]
    ends += [(name, chain, f"buffer {b}") for (b, name), chain in zip(graph.updates, program.updates, strict=True)]
    for name, chain, what in ends:
        _check_chain(graph.values[name], chain, facts, f"return {what}")
        if chain[-1] != I:
            raise ProgramError(
                f"{what} ends as {chain[-1]}",
                where=f"%{name}",
                do="convert it to I: every device needs it whole",
            )


def _check_step(step: Step, facts: set[Fact], graph: Graph, done: set[str]) -> None:
    node = step.node
    if len(step.chains) != len(node.operands):
        raise ProgramError(
            f"%{node.name} takes {len(node.operands)} operands, not {len(step.chains)}",
            where=node.op,
            do="name all",
        )
    where = _step_line(step)
    if node.name in done:
        raise ProgramError(f"%{node.name} is run twice", where=where, do="run every node once")
    for name, chain in step.taken:
        _check_chain(graph.values[name], chain, facts, where)
    if tuple(chain[-1] for chain in step.chains) != step.rule.needs:
        raise ProgramError(
            f"%{node.name}: its operands do not end as its rule needs: {step.rule}",
            where=where,
            do="convert them",
        )
    names = {p.by for p in (*step.rule.needs, *step.rule.gives) if p.is_shard}
    if len(names) > 1:
        raise ProgramError(
            f"%{node.name} is cut by different shares: {', '.join(name or 'work' for name in sorted(names))}",
            where=where,
            do="cut all its operands and results by the same shares",
        )
    facts.update(step.made)


def _check_chain(value: Value, chain: Chain, facts: set[Fact], where: str) -> None:
    if not chain:
        raise ProgramError(f"%{value.name} is taken in no placement", where=where, do="name the placement it has")
    if (value.name, chain[0]) not in facts:
        has = ", ".join(str(p) for name, p in sorted(facts) if name == value.name) or "none yet"
        raise ProgramError(
            f"%{value.name} is not available as {chain[0]}", where=where, do=f"start from what it has: {has}"
        )
    for source, to in itertools.pairwise(chain):
        if source == to:
            raise ProgramError(
                f"%{value.name} is converted from {source} to itself", where=where, do="leave the arrow out"
            )
        if not to.fits(value.shape):
            raise ProgramError(
                f"%{value.name} cannot be placed {to}",
                where=f"{where}\n          {value}",
                do="name a dim it has, in units that divide it",
            )
        if to.kind == "P" and value.dtype == "bool":
            raise ProgramError(
                f"%{value.name} holds truth values, which do not add up",
                where=where,
                do="keep it whole or cut",
            )
        facts.add((value.name, to))


def whole_rule(node: Node) -> Rule:
    """Everything is whole, as on one device."""
    return Rule((I,) * len(node.operands), (I,) * len(node.results))


def one_device(graph: Graph) -> Program:
    """The program that runs everything whole."""
    steps = [Step(node, whole_rule(node), ((I,),) * len(node.operands)) for node in graph.nodes]
    leaves = tuple((leaf.value.name, I) for leaf in graph.leaves)
    return Program(graph, leaves, tuple(steps), (I,), ((I,),) * len(graph.updates))


@dataclass(frozen=True)
class RuleBook:
    """All that a program may be made of."""

    graph: Graph
    rules: Mapping[str, tuple[Rule, ...]]  # by node name
    leaves: Mapping[str, tuple[Placement, ...]]  # by leaf name
    by_experiment: tuple[Node, ...]  # nodes whose op nobody has described
    exact: bool = True

    @property
    def only_whole(self) -> tuple[Node, ...]:
        """Nodes found by experiment to run only whole: those that a line in the table might help."""
        return tuple(
            node for node in self.by_experiment if all(p.is_whole for rule in self.rules[node.name] for p in rule.gives)
        )
