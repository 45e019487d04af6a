"""Calls added to an exported graph, each with the value it would make.

In: an `fx.Graph` that is walked from front to back. Out: nodes in front of the one at hand, with the same source,
region and autocast, and `key`, which two nodes share only if they have equal values: the same op of equal values, none
of which was written to in between, and without randomness.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

_KEPT = ("stack_trace", "nn_module_stack", "custom", "source_fn_stack")
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "exponential", "uniform")


class Emission:
    """Adds calls in front of `at`, the node of the walk."""

    at: fx.Node

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph, self.mode = graph, mode
        self._autocasts: dict[fx.Node, tuple[Any, ...]] = {}
        self._numbers: dict[object, int] = {}
        self._keys: dict[fx.Node, int] = {}
        self._first: dict[int, fx.Node] = {}
        self._writes: dict[int, int] = {}

    def visit(self, node: fx.Node) -> None:
        """The walk has come to `node`."""
        self.at = node
        if node.op != "call_function":
            return
        name = str(node.target)
        if name.startswith("<function _enter_autocast"):
            self._autocasts[node] = tuple(node.args)
        elif name.startswith("<function _exit_autocast"):
            del self._autocasts[node.args[0]]  # type: ignore[arg-type]
        elif isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, fx.Node):
                    for storage in _storages(given):
                        self._writes[storage] = self._writes.get(storage, 0) + 1

    def call(self, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: self.at.meta[key] for key in _KEPT if key in self.at.meta}
        given, named = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
        with self.mode, torch.no_grad(), self._autocast():
            node.meta["val"] = target(*given, **named)
        return node

    def item(self, of: fx.Node, k: int) -> fx.Node:
        """One of several results."""
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(operator.getitem, (of, k))
        node.meta = {**of.meta, "val": of.meta["val"][k]}
        return node

    def once(self, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        """The node that has this value already, or a new one; of calls without gradients."""
        made = self.call(target, *args, **kwargs)
        found = self.first(made)
        if found is not made:
            self.graph.erase_node(made)
        return found

    def first(self, node: fx.Node) -> fx.Node:
        """The first node that has the value of `node`. Every node is asked for in order: what is written to later then
        has another key."""
        return self._first.setdefault(self.key(node), node)

    def key(self, node: fx.Node) -> int:
        """A number that another node has only if its value is the same."""
        if node not in self._keys:
            what = self._described(node)
            self._keys[node] = self._numbers.setdefault(what, len(self._numbers))
        return self._keys[node]

    def _described(self, node: fx.Node) -> object:
        name = str(node.target)
        target = node.target
        is_drawn = isinstance(target, OpOverload) and (
            torch.Tag.nondeterministic_seeded in target.tags or any(word in name for word in _RANDOM)
        )
        if node.op != "call_function" or is_drawn or (isinstance(target, OpOverload) and target._schema.is_mutable):
            return node

        def part(arg: Any) -> object:
            if isinstance(arg, fx.Node):
                return "node", self.key(arg), tuple(self._writes.get(s, 0) for s in _storages(arg))
            if isinstance(arg, tuple | list):
                return tuple(map(part, arg))
            return type(arg), str(arg)

        autocasts = tuple(str(given) for given in self._autocasts.values())
        return target, part(node.args), tuple((k, part(v)) for k, v in sorted(node.kwargs.items())), autocasts

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self._autocasts:
            return nullcontext()
        device, dtype, enabled, cached = list(self._autocasts.values())[-1]
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached)


def _storages(node: fx.Node) -> tuple[int, ...]:
    made = node.meta.get("val")
    parts = made if isinstance(made, tuple | list) else [made]
    return tuple(part.untyped_storage()._cdata for part in parts if isinstance(part, Tensor))
