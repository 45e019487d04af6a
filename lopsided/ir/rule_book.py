"""All that a program may be made of: the rules of every node, the placements of every leaf.

In: what `lopsided.ops.derive` found. Out: `RuleBook`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lopsided.ir.graph import Graph, Node
from lopsided.ir.notation import Rule
from lopsided.ir.placement import Placement


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
