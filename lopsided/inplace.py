"""In-place ops made functional: the same graph without any value that changes.

In: calls in the order the model makes them, some of which write into a tensor, perhaps through a view. Out: pure
nodes. A write makes a new version of the tensor that owns the memory; every view of it that is used later is taken
again from the new version.

    h[:, 0] = 0        →   s  = select(h, 1, 0);  f = fill(s, 0);  h2 = select_scatter(h, f, 1, 0)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch._ops import OpOverload

from lopsided.errors import CaptureError
from lopsided.graph import DTYPE_NAMES, Arg, Atom, Leaf, Node, Ref, Value

# In-place ops whose functional form has another name.
_RENAMED = {
    "normal_": "normal_functional",
    "zero_": "zero",
    "detach_": "detach",
}
# Ops that take another tensor only for its shape or dtype, written as the op that takes these as arguments: the other
# tensor's values do not matter, and its placement must not.
_AS = {"aten.expand_as.default": "aten.expand.default", "aten.view_as.default": "aten.reshape.default",
       "aten.reshape_as.default": "aten.reshape.default", "aten.type_as.default": "aten.to.dtype"}
_NEW = {"new_zeros": 0, "new_ones": 1, "new_empty": 0}
# Ops that hand their first argument on. A constant needs no copy here, because nothing is written to.
_SAME = ("aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten.alias.default")
# Annotated as views by torch, but new memory unless shape, dtype and order are already right.
_MAYBE_VIEWS = ("aten.to.", "aten.contiguous.", "aten.reshape.", "aten.flatten.", "aten.type_as.")


@dataclass(frozen=True, slots=True)
class _View:
    parent: str
    node: Node


class Functional:
    """Collects nodes; `append` takes calls as the model made them and adds pure ones."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.updates: dict[str, str] = {}
        self._values: dict[str, Value] = {}
        self._leaves: dict[str, Leaf] = {}
        self._newer: dict[str, str] = {}
        self._version_of: dict[str, str] = {}
        self._views: dict[str, _View] = {}
        self._made: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._clock = 0

    def add_leaf(self, leaf: Leaf) -> None:
        self._leaves[leaf.value.name] = leaf
        self._values[leaf.value.name] = leaf.value

    def value(self, name: str) -> Value:
        return self._values[self.current(name)]

    def current(self, name: str) -> str:
        """The name under which this tensor's present content is known; retakes a view of memory since written."""
        while name in self._newer:
            name = self._newer[name]
        view = self._views.get(name)
        if view is None or self._made[name] >= self._written.get(self._root(name), -1):
            return name
        retaken = self._add(replace(view.node, args=(Ref(self.current(view.parent)), *view.node.args[1:])))
        self._newer[name] = retaken
        self._views[retaken] = view
        return retaken

    def append(self, node: Node, target: OpOverload | None) -> tuple[str, ...]:
        """Add one call; returns the names of its results."""
        if node.op in _SAME and isinstance(node.args[0], Ref):
            return (node.args[0].name,)
        node = _without_likeness(node)
        written = _written_argument(target)
        if target is not None and written is not None:
            return (self._write(node, target, written),)
        node = self._refreshed(node)
        names = self._add_all(node)
        if target is not None and (parent := _viewed(node, target, self._values)) is not None:
            for name in names:
                self._views[name] = _View(parent, node)
        return names

    def assign(self, name: str, content: str) -> None:
        """The tensor `name` now has the content of another value."""
        self._newer[self.current(name)] = content

    def _refreshed(self, node: Node) -> Node:
        def fresh(arg: Arg) -> Arg:
            if isinstance(arg, Ref):
                return Ref(self.current(arg.name))
            return tuple(map(fresh, arg)) if isinstance(arg, tuple) else arg

        return replace(node, args=tuple(map(fresh, node.args)), kwargs=tuple((k, fresh(v)) for k, v in node.kwargs))

    def _add_all(self, node: Node) -> tuple[str, ...]:
        self._clock += 1
        self.nodes.append(node)
        for value in node.results:
            self._values[value.name] = value
            self._made[value.name] = self._clock
        return tuple(value.name for value in node.results)

    def _add(self, node: Node, like: Value | None = None) -> str:
        """Add a node of our own making, with one result under a fresh name."""
        value = like or node.results[0]
        name, k = value.name, 1
        while name in self._values:
            name, k = f"{value.name}_v{k}", k + 1
        return self._add_all(replace(node, results=(replace(value, name=name),)))[0]

    def _root(self, name: str) -> str:
        """The first version of the tensor that owns this memory: what all versions and views of it share."""
        while name in self._views or name in self._version_of:
            name = self._views[name].parent if name in self._views else self._version_of[name]
        return name

    def _write(self, node: Node, target: OpOverload, written: int) -> str:
        destination = node.args[written]
        if not isinstance(destination, Ref) or written != 0:
            raise _refusal(node, f"{node.op} writes into an argument")
        node = self._refreshed(node)
        self_name = self.current(destination.name)
        self._refuse_parameter(self_name, node)
        old = self._values[self_name]
        if node.op == "aten.copy_.default" and isinstance(node.args[1], Ref):
            made = node.args[1].name
        else:
            functional = _functional_form(node, target)
            made = self._add(replace(node, op=str(functional)), _result_of(functional, node, self._values))
        if (self._values[made].shape, self._values[made].dtype) != (old.shape, old.dtype):
            made = self._like(made, old, node)
        self._replace(self_name, made, node)
        return made

    def _refuse_parameter(self, name: str, node: Node) -> None:
        leaf = self._leaves.get(self._root(name))
        if leaf is not None and leaf.kind == "parameter":
            raise CaptureError(
                f"forward writes into the parameter {leaf.target}",
                where=str(node.source),
                do="change parameters in the optimizer, or keep this state in a buffer",
            )

    def _like(self, name: str, old: Value, node: Node) -> str:
        """Cast and expand to what the destination was: an in-place op never changes dtype or shape."""
        value = self._values[name]
        if value.dtype != old.dtype:
            cast = replace(node, op="aten.to.dtype", args=(Ref(name), Atom("dtype", old.dtype)), kwargs=())
            name = self._add(cast, replace(value, dtype=old.dtype))
        if value.shape != old.shape:
            expand = replace(node, op="aten.expand.default", args=(Ref(name), old.shape), kwargs=())
            name = self._add(expand, replace(old, name=value.name))
        return name

    def _replace(self, name: str, content: str, node: Node) -> None:
        """`name` now holds `content`: so does the memory it is a view of, and every other view of that memory."""
        root = self._root(name)
        view = self._views.get(name)
        if view is not None:
            parent = self.current(view.parent)
            scatter = _put_back(view.node, self._values[parent], content)
            self._replace(parent, self._add(replace(scatter, source=node.source), self._values[parent]), node)
            self._views[content] = view
        elif content != root:
            self._version_of[content] = root
        self._newer[name] = content
        self._clock += 1
        self._written[root] = self._made[content] = self._clock


def _without_likeness(node: Node) -> Node:
    value, packet = node.results[0], node.op.split(".")[1]
    if node.op in _AS:
        like = Atom("dtype", value.dtype) if packet == "type_as" else value.shape
        return replace(node, op=_AS[node.op], args=(node.args[0], like), kwargs=())
    if packet in _NEW or packet == "new_full":
        content = node.args[2] if packet == "new_full" else _NEW[packet]
        device = Atom("device", "cpu")  # stands for the device the graph is run on
        kwargs = (("dtype", Atom("dtype", value.dtype)), ("device", device))
        return replace(node, op="aten.full.default", args=(value.shape, content), kwargs=kwargs)
    return node


def _written_argument(target: OpOverload | None) -> int | None:
    if target is None:
        return None
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return position
    return None


def _viewed(node: Node, target: OpOverload, values: dict[str, Value]) -> str | None:
    """The tensor that the results of this call are views of."""
    returns = target._schema.returns
    if not returns or returns[0].alias_info is None or not isinstance(node.args[0], Ref):
        return None
    parent = values[node.args[0].name]
    if node.op.startswith(_MAYBE_VIEWS) and (parent.shape, parent.dtype) != (node.results[0].shape, node.results[0].dtype):
        return None
    return parent.name


def _functional_form(node: Node, target: OpOverload) -> OpOverload:
    packet = target._schema.name.partition("::")[2]
    name = _RENAMED.get(packet, packet.removesuffix("_"))
    overload = target._overloadname or "default"
    found = getattr(getattr(torch.ops.aten, name, None), overload, None)
    if not isinstance(found, OpOverload) or packet in ("set_", "resize_"):
        raise _refusal(node, f"{node.op} has no form that returns a new tensor")
    return found


def _refusal(node: Node, what: str) -> CaptureError:
    return CaptureError(what, where=str(node.source), do="write the update as a new tensor: x = x + y in place of x += y")


def _result_of(op: OpOverload, node: Node, values: dict[str, Value]) -> Value:
    """What the functional form returns: it may promote where the in-place op would not."""

    def to_meta(arg: Arg) -> object:
        if isinstance(arg, Ref):
            value = values[arg.name]
            return torch.empty(value.shape, dtype=value.torch_dtype, device="meta")
        if isinstance(arg, tuple):
            return [to_meta(part) for part in arg]
        return arg.resolve() if isinstance(arg, Atom) else arg

    args = [to_meta(arg) for arg in node.args]
    made = op(*args, **{key: to_meta(arg) for key, arg in node.kwargs})
    return replace(node.results[0], shape=tuple(made.shape), dtype=DTYPE_NAMES[made.dtype])


def _put_back(view: Node, parent: Value, content: str) -> Node:
    """The node that puts changed content of a view back into its parent."""
    packet = view.op.split(".")[1]
    put, rest = Ref(content), view.args[1:]
    if packet in ("select", "slice", "diagonal"):
        op, args = f"aten.{packet}_scatter.default", (Ref(parent.name), put, *rest)
    elif packet in ("transpose", "t"):
        op, args = view.op, (put, *rest)
    elif packet == "permute":
        op, args = view.op, (put, _inverse_order(rest[0]))
    elif packet in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "detach", "to", "contiguous"):
        op, args = "aten.reshape.default", (put, parent.shape)
    else:
        raise _refusal(view, f"a view made by {view.op} is written into")
    return replace(view, op=op, args=args, kwargs=())


def _inverse_order(order: Arg) -> Arg:
    dims = [d for d in order if isinstance(d, int)] if isinstance(order, tuple) else []
    positive = [d % len(dims) for d in dims]
    return tuple(positive.index(k) for k in range(len(positive)))
