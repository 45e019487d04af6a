"""In-place ops made functional: the same graph without any value that changes.

In: calls in the order the model makes them, some of which write into a tensor, perhaps through a view. Out:
pure nodes. A write makes a new version of the tensor that owns the memory; every view of it that is used
later is taken again from the new version.

    h[:, 0] = 0        →   s  = select(h, 1, 0);  f = fill(s, 0);  h2 = select_scatter(h, f, 1, 0)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch._ops import OpOverload

from lopsided.errors import CaptureError
from lopsided.ir.graph import DTYPE_NAMES, Arg, Atom, Leaf, Node, Ref, Value
from lopsided.ir.op_call import resolve_op

# In-place ops whose functional form has another name.
_RENAMED = {
    "normal_": "normal_functional",
    "zero_": "zero",
    "detach_": "detach",
}
# Ops that take another tensor only for its shape or dtype, written as the op that takes these as arguments:
# the other tensor's values do not matter, and its placement must not.
_AS = {
    "aten.expand_as.default": "aten.expand.default",
    "aten.view_as.default": "aten.reshape.default",
    "aten.reshape_as.default": "aten.reshape.default",
    "aten.type_as.default": "aten.to.dtype",
}
_NEW = {"new_zeros": 0, "new_ones": 1, "new_empty": 0}
# Ops that hand their first argument on. A constant needs no copy here, because nothing is written to.
_SAME = ("aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten.alias.default")
# Views of the same elements in the same order: what is written goes back by a reshape.
_SAME_ORDER = (
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "detach",
    "to",
    "contiguous",
    "view_as",
    "ravel",
    "alias",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
)
# The dtype of the real and imaginary parts of complex numbers.
_PARTS = {"c64": "f32", "c128": "f64"}
_REORDERED = ("t", "transpose", "permute", "numpy_T", "mT", "movedim", "moveaxis", "swapaxes", "swapdims")


@dataclass(frozen=True, slots=True)
class _View:
    parent: str
    node: Node
    which: int = 0  # of the node's results


class Functional:
    """Collects nodes; `append` takes calls as the model made them and adds pure ones."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.updates: dict[str, str] = {}
        self.region = 0  # that is being traced: what is added now is recomputed with it, whenever its view was taken
        self._values: dict[str, Value] = {}
        self._leaves: dict[str, Leaf] = {}
        self._newer: dict[str, str] = {}
        self._version_of: dict[str, str] = {}
        self._views: dict[str, _View] = {}
        self._made: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._trained: set[str] = set()
        self._clock = 0

    def add_leaf(self, leaf: Leaf) -> None:
        self._leaves[leaf.value.name] = leaf
        self._values[leaf.value.name] = leaf.value
        if leaf.value.grad:
            self._trained.add(leaf.value.name)

    def value(self, name: str) -> Value:
        return self._values[self.current(name)]

    def current(self, name: str) -> str:
        """The name under which this tensor's content is now known; retakes a view of memory since written."""
        while name in self._newer:
            name = self._newer[name]
        view = self._views.get(name)
        if view is None or self._made[name] >= self._written.get(self._root(name), -1):
            return name
        retaken = replace(view.node, args=(Ref(self.current(view.parent)), *view.node.args[1:]))
        results = tuple(replace(value, name=self._fresh(value.name)) for value in retaken.results)
        new = self._add_all(replace(retaken, results=results))[view.which]
        self._newer[name] = new
        self._views[new] = view
        return new

    def append(self, node: Node, target: OpOverload | None, *, is_view: bool = False) -> tuple[str, ...]:
        """Add one call; returns the names of its results. `is_view`: they share memory with an argument."""
        if node.op in _SAME and isinstance(node.args[0], Ref):
            return (node.args[0].name,)
        if _is_identity(node, self._values, is_view):
            return node.operands
        node = _without_likeness(node)
        written = _written_argument(target)
        if target is not None and written is not None:
            return (self._write(node, target, written),)
        node = self._refreshed(node)
        names = self._add_all(node)
        if is_view and isinstance(node.args[0], Ref):
            for which, name in enumerate(names):
                self._views[name] = _View(node.args[0].name, node, which)
        return names

    def assign(self, name: str, content: str, node: Node) -> None:
        """The tensor `name` now has the content of another value, which `node` made for it."""
        self._replace(self.current(name), content, node)

    def _refreshed(self, node: Node) -> Node:
        def fresh(arg: Arg) -> Arg:
            if isinstance(arg, Ref):
                return Ref(self.current(arg.name))
            return tuple(map(fresh, arg)) if isinstance(arg, tuple) else arg

        return replace(node, args=tuple(map(fresh, node.args)), kwargs=tuple((k, fresh(v)) for k, v in node.kwargs))

    def _add_all(self, node: Node) -> tuple[str, ...]:
        self._clock += 1
        self.nodes.append(replace(node, context=replace(node.context, recompute=self.region)))
        trained = node.context.grad and "detach" not in node.op and any(name in self._trained for name in node.operands)
        for value in node.results:
            self._values[value.name] = value
            self._made[value.name] = self._clock
            if trained and (value.torch_dtype.is_floating_point or value.torch_dtype.is_complex):
                self._trained.add(value.name)
        return tuple(value.name for value in node.results)

    def _add(self, node: Node, like: Value | None = None) -> str:
        """Add a node of our own making, with one result under a fresh name."""
        value = like or node.results[0]
        return self._add_all(replace(node, results=(replace(value, name=self._fresh(value.name)),)))[0]

    def _fresh(self, name: str) -> str:
        fresh, k = name, 1
        while fresh in self._values:
            fresh, k = f"{name}_v{k}", k + 1
        return fresh

    def _root(self, name: str) -> str:
        """The first version of the tensor that owns this memory: what all versions and views of it share."""
        while name in self._views or name in self._version_of:
            name = self._views[name].parent if name in self._views else self._version_of[name]
        return name

    def _write(self, node: Node, target: OpOverload, written: int) -> str:
        into = dict(node.kwargs).get("out")
        destination = into if into is not None else node.args[0] if node.args else None
        if not isinstance(destination, Ref) or (written != 0 and into is None):
            raise _refusal(node, f"{node.op} writes into an argument")
        if into is not None:
            node = replace(node, kwargs=tuple((key, arg) for key, arg in node.kwargs if key != "out"))
        if torch.Tag.inplace_view in target.tags and "detach" not in node.op:
            raise CaptureError(
                f"{node.op} changes the shape of a tensor in place",
                where=str(node.source),
                do="give the result a name: x = x.unsqueeze(0) in place of x.unsqueeze_(0)",
            )
        node = self._refreshed(node)
        if node.context.autocast:
            # Autocast leaves in-place ops alone, and not their functional forms.
            device = node.context.autocast.partition(":")[0]
            node = replace(node, context=replace(node.context, autocast=f"{device}:off"))
        self_name = self.current(destination.name)
        self._refuse_leaf(self_name, node)
        old = self._values[self_name]
        if node.op == "aten.copy_.default":
            # A copy of its own: the source may be written to later, and must not change with the destination.
            copy = replace(node, op="aten.clone.default", args=node.args[1:2], kwargs=())
            source = node.args[1]
            made = self._add(
                copy, replace(self._values[source.name], name=old.name) if isinstance(source, Ref) else None
            )
        else:
            functional = _functional_form(node, target)
            made = self._add(replace(node, op=str(functional)), _result_of(functional, node, self._values))
        if (self._values[made].shape, self._values[made].dtype) != (old.shape, old.dtype):
            made = self._like(made, old, node)
        self._refuse_behind_gradient(self_name, made, node)
        self._replace(self_name, made, node)
        return made

    def _refuse_leaf(self, name: str, node: Node) -> None:
        leaf = self._leaves.get(self._root(name))
        if leaf is not None and leaf.kind == "parameter":
            raise CaptureError(
                f"forward writes into the parameter {leaf.target}",
                where=str(node.source),
                do="change parameters in the optimizer, or keep this state in a buffer",
            )
        if leaf is not None and leaf.kind == "constant" and "lifted_tensor" not in leaf.target:
            raise CaptureError(
                f"forward writes into the tensor {leaf.target}, which is neither a parameter nor a buffer",
                where=str(node.source),
                do="register it with register_buffer(name, tensor, persistent=False)",
            )

    def _refuse_behind_gradient(self, name: str, content: str, node: Node) -> None:
        """A write that autograd does not see changes a value and keeps its gradient: no pure op does that."""
        hidden = not node.context.grad
        while name in self._views:
            view = self._views[name]
            hidden = hidden or not view.node.context.grad or "detach" in view.node.op
            name = self.current(view.parent)
        if hidden and (name in self._trained or content in self._trained):
            raise CaptureError(
                f"{node.op} changes a value behind the back of its gradient",
                where=str(node.source),
                do="write x = x + (new - x).detach() in place of a write under no_grad or through detach()",
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

    def _scattered(self, scatter: Node, parent: Value) -> str:
        """Add the node that puts content back. Torch cannot go backward through one on complex numbers: there it is
        one on their real and imaginary parts."""
        if (
            scatter.op not in ("aten.slice_scatter.default", "aten.select_scatter.default")
            or parent.dtype not in _PARTS
        ):
            return self._add(scatter, parent)
        parts = []
        for name in scatter.operands:
            value = self._values[name]
            shown = replace(value, shape=(*value.shape, 2), dtype=_PARTS[value.dtype])
            parts.append(Ref(self._add(replace(scatter, op="aten.view_as_real.default", args=(Ref(name),)), shown)))
        dim, *rest = scatter.args[2:] or (0,)
        # Counted from the left: parts have one dim more.
        at = dim % len(parent.shape) if isinstance(dim, int) else dim
        both = replace(parent, shape=(*parent.shape, 2), dtype=_PARTS[parent.dtype])
        put = self._add(replace(scatter, args=(*parts, at, *rest)), both)
        return self._add(replace(scatter, op="aten.view_as_complex.default", args=(Ref(put),)), parent)

    def _replace(self, name: str, content: str, node: Node) -> None:
        """`name` now holds `content`: so does the memory it is a view of, and every other view of it."""
        root = self._root(name)
        view = self._views.get(name)
        if view is not None:
            parent = self.current(view.parent)
            scatter = _put_back(view.node, self._values[parent], content)
            self._replace(parent, self._scattered(replace(scatter, source=node.source), self._values[parent]), node)
            self._views[content] = view
        elif content != root:
            self._version_of[content] = root
        self._newer[name] = content
        self._clock += 1
        self._written[root] = self._made[content] = self._clock


def _is_identity(node: Node, values: dict[str, Value], is_view: bool) -> bool:
    """The op hands on what it is given, memory and all: a view of the same shape, a cast to its own dtype."""
    packet = node.op.split(".")[1]
    if packet in ("dropout", "alpha_dropout", "feature_dropout"):
        return not (node.args[1] and node.args[2])
    if packet not in ("broadcast_tensors", "expand", "view", "reshape", "slice", "to"):
        return False
    if not (is_view or packet == "broadcast_tensors") or not (node.context.grad or packet == "to"):
        # A cast to another memory format copies, and a view taken under no_grad has no gradient.
        return False
    before = [(values[name].shape, values[name].dtype) for name in node.operands]
    return before == [(value.shape, value.dtype) for value in node.results]


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


def _functional_form(node: Node, target: OpOverload) -> OpOverload:
    """The op that returns what this one writes: its name without the underscore, the same arguments."""
    namespace, _, packet = target._schema.name.partition("::")
    name = _RENAMED.get(packet, packet.removesuffix("_"))
    found = getattr(getattr(torch.ops, namespace), name, None) if packet not in ("set_", "resize_") else None
    types = [str(argument.type) for argument in target._schema.arguments if argument.name != "out"]
    for overload in found.overloads() if found is not None else ():
        form: OpOverload = getattr(found, overload)
        written = any(a.alias_info is not None and a.alias_info.is_write for a in form._schema.arguments)
        if not written and [str(argument.type) for argument in form._schema.arguments] == types:
            return form
    raise _refusal(node, f"{node.op} has no form that returns a new tensor")


def _refusal(node: Node, what: str) -> CaptureError:
    return CaptureError(
        what, where=str(node.source), do="write the update as a new tensor: x = x + y in place of x += y"
    )


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
    if view.results[0].dtype != parent.dtype or len(view.results) > 1:
        raise _refusal(view, f"a view made by {view.op} is written into")
    if packet in ("select", "slice", "diagonal"):
        op, args = f"aten.{packet}_scatter.default", (Ref(parent.name), put, *rest)
    elif packet == "narrow" and all(isinstance(number, int) for number in rest):
        dim, start, length = rest
        op, args = "aten.slice_scatter.default", (Ref(parent.name), put, dim, start, start + length)  # type: ignore[operator]
    elif packet in _REORDERED:
        op, args = "aten.permute.default", (put, _way_back(view, len(parent.shape)))
    elif packet in _SAME_ORDER:
        op, args = "aten.reshape.default", (put, parent.shape)
    else:
        raise _refusal(view, f"a view made by {view.op} is written into")
    return replace(view, op=op, args=args, kwargs=())


def _way_back(view: Node, rank: int) -> tuple[int, ...]:
    """The order of dims that undoes a view, found by taking it of a shape whose dims are all different."""
    probe = torch.empty(tuple(range(2, rank + 2)), device="meta")
    args = [list(arg) if isinstance(arg, tuple) else arg for arg in view.args[1:]]
    moved = resolve_op(view.op)(probe, *args)
    return tuple(moved.shape.index(size) for size in probe.shape)
