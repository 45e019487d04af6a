"""From export's graph to ours: one walk over the nodes that `torch.export` made.

In: a model and its `ExportedProgram`. Out: a `Graph` of pure calls, with the names of what is returned beside the loss.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from lopsided.capturing.diagnosis import source_of
from lopsided.capturing.export import region_of
from lopsided.capturing.functionalize import Functional
from lopsided.errors import CaptureError
from lopsided.ir.graph import DTYPE_NAMES, Arg, Atom, Context, Graph, Leaf, Node, Ref, Source, Value
from lopsided.ir.grouped_mm import GROUPED_MM

_LARGEST_CONSTANT = 1 << 20
# Checks that export leaves in the graph; they constrain nothing that a captured shape does not already fix.
_CHECKS = ("_assert", "sym_constrain", "_functional_assert")
_IN_PLACE_OF = {"transformers.grouped_mm_fallback.default": GROUPED_MM}
"""Ops of other libraries that are known to compute the same as one of ours."""


def surrounding_autocast() -> str:
    """The autocast that capture is called under: part of what the model computes."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return f"{device}:{DTYPE_NAMES[torch.get_autocast_dtype(device)]}"
    return ""


def numbered(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes with their checkpointed regions numbered from 1 in order of first appearance."""
    numbers = {0: 0}
    return tuple(
        replace(node, context=replace(node.context, recompute=numbers.setdefault(node.context.recompute, len(numbers))))
        for node in nodes
    )


class Tracer:
    """Walks the exported graph once, inlining sub-graphs, and collects leaves, nodes and buffer updates."""

    def __init__(self, model: nn.Module, exported: ExportedProgram, inputs: list[str], replaced: set[str]) -> None:
        self.replaced = replaced
        self.context = Context(surrounding_autocast())
        self.regions: dict[fx.Node, str] = {}
        self.within = 0  # the checkpointed sub-graph that is being inlined
        self.model, self.exported, self.inputs = model, exported, iter(inputs)
        self.leaves: list[Leaf] = []
        self.body = Functional()
        self.names: dict[fx.Node, Arg] = {}
        self.taken: set[str] = set()
        self.tied: dict[int, str] = {}
        self.unknown: dict[fx.Node, CaptureError] = {}

    def graph(self) -> tuple[Graph, tuple[str, ...]]:
        """The graph, and the names of the values that are returned beside the loss."""
        specs = iter(self.exported.graph_signature.input_specs)
        module = self.exported.graph_module
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.leaf(node, next(specs))
        with warnings.catch_warnings():
            # Retracing an op on meta tensors may warn about what the model does; that is not news here.
            warnings.simplefilter("ignore")
            results = self.inline(module)
        self.body.region = 0
        loss = self.body.current(_name_of(results[0], "the loss"))
        updates = tuple((b, self.body.current(v)) for b, v in self.body.updates.items() if self.body.current(v) != v)
        self.refuse_shared_memory([buffer for buffer, _ in updates])
        returned = tuple(self.body.current(_name_of(result, "what the model returns")) for result in results[1:])
        return Graph(tuple(self.leaves), numbered(self.body.nodes), loss, updates), returned

    def refuse_shared_memory(self, changed: list[str]) -> None:
        """A buffer that changes must not be seen through another tensor of the model, unless it is that tensor."""
        tensors = {
            leaf.target: getattr(self.model, f"get_{leaf.kind}")(leaf.target)
            for leaf in self.leaves
            if leaf.kind in ("parameter", "buffer")
        }
        owners: dict[int, str] = {}
        for name, tensor in tensors.items():
            other = owners.setdefault(tensor.untyped_storage()._cdata, name)
            if other != name and (name in changed or other in changed) and tensor.numel():
                raise CaptureError(
                    f"the buffers {other} and {name} share memory, and forward writes into it",
                    do="register one of them, and take the other from it in forward",
                )

    def leaf(self, node: fx.Node, spec: Any) -> None:
        target = (spec.target or "").removeprefix("model.")
        value = node.meta.get("val", None)
        if spec.kind == InputKind.USER_INPUT:
            if not isinstance(value, Tensor):
                raise CaptureError(f"input {node.name} is not a tensor", do="pass numbers as Python values")
            key = next(self.inputs)
            name = _plain(key)
            self.add_leaf(node, Leaf(self.value(f"input_{name}" if name[:1].isdigit() else name, value), "input", key))
        elif spec.kind == InputKind.PARAMETER:
            parameter = self.model.get_parameter(target)
            if id(parameter) in self.tied:
                self.also(node, self.tied[id(parameter)], target)
                return
            typed = self.value(_plain(target), parameter)
            self.tied[id(parameter)] = typed.name
            self.add_leaf(node, Leaf(replace(typed, grad=parameter.requires_grad), "parameter", target))
        elif spec.kind == InputKind.BUFFER:
            buffer = self.model.get_buffer(target)
            if id(buffer) in self.tied:
                self.also(node, self.tied[id(buffer)], target)
                return
            typed = self.value(_plain(target), buffer)
            self.tied[id(buffer)] = typed.name
            self.add_leaf(node, Leaf(typed, "buffer", target))
            self.body.updates[target] = typed.name
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            self.add_leaf(node, self.constant(node, spec.target))
        else:
            raise CaptureError(f"the model holds {spec.target}, which is not a tensor", do="keep it out of forward")

    def add_leaf(self, node: fx.Node, leaf: Leaf) -> None:
        self.leaves.append(leaf)
        self.body.add_leaf(leaf)
        self.names[node] = Ref(leaf.value.name)

    def also(self, node: fx.Node, name: str, target: str) -> None:
        at = next(k for k, leaf in enumerate(self.leaves) if leaf.value.name == name)
        self.leaves[at] = replace(self.leaves[at], also=(*self.leaves[at].also, target))
        self.names[node] = Ref(name)

    def constant(self, node: fx.Node, target: str) -> Leaf:
        tensor = self.exported.constants[target]
        if target.removeprefix("model.") in self.replaced:
            raise CaptureError(
                f"forward reads and replaces the tensor {target.removeprefix('model.')}, which is not a buffer",
                do="register it with register_buffer(name, tensor, persistent=False)",
            )
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.numel() > _LARGEST_CONSTANT:
            raise CaptureError(
                f"the model uses the tensor {target.removeprefix('model.')}, which is neither a parameter nor a buffer",
                do="register it with register_buffer(name, tensor, persistent=False)",
            )
        return Leaf(
            self.value(_plain(target.removeprefix("model.")), tensor),
            "constant",
            target,
            data=tuple(tensor.flatten().tolist()),
        )

    def value(self, name: str, tensor: Tensor) -> Value:
        fresh, k = name, 1
        while fresh in self.taken:
            fresh, k = f"{name}_{k}", k + 1
        self.taken.add(fresh)
        if tensor.dtype not in DTYPE_NAMES:
            raise CaptureError(
                f"%{fresh} has dtype {tensor.dtype}, which graphs do not have",
                do=f"use {', '.join(DTYPE_NAMES.values())}",
            )
        return Value(fresh, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])

    # Nodes

    def inline(self, module: fx.GraphModule) -> tuple[Arg, ...]:
        """Append the nodes of a (sub-)graph whose placeholders already have names; returns its outputs."""
        for node in module.graph.nodes:
            if node.op == "call_function":
                self.call(node, module)
            elif node.op == "get_attr":
                attribute = _attribute(module, str(node.target))
                if isinstance(attribute, Tensor):
                    raise CaptureError(f"sub-graph holds a tensor {node.target}", do="register it as a buffer")
            elif node.op == "output":
                outputs = node.args[0]
                return tuple(self.arg(out) for out in (outputs if isinstance(outputs, tuple | list) else (outputs,)))
        return ()

    def call(self, node: fx.Node, module: fx.GraphModule) -> None:
        target = node.target
        name = str(target)
        source = source_of(node)
        self.body.region = self.within or region_of(node)
        if name.endswith("getitem>") or name == "<built-in function getitem>":
            container, index = self.names[node.args[0]], node.args[1]  # type: ignore[index]
            self.names[node] = container[index]  # type: ignore[index]
        elif target is torch._C._set_grad_enabled:
            self.context = replace(self.context, grad=bool(node.args[0]))
        elif name.startswith("<function _enter_autocast"):
            self.regions[node] = self.context.autocast
            self.context = replace(self.context, autocast=_autocast(*node.args))
        elif name.startswith("<function _exit_autocast"):
            self.context = replace(self.context, autocast=self.regions[node.args[0]])  # type: ignore[index]
        elif "activation_checkpoint" in name:
            body, *rest = node.args
            outer = self.within
            # Any number that no other region has; nested ones belong to the outermost.
            self.within = self.body.region or -len(self.names)
            self.subgraph(node, module, body, rest)
            self.within = outer
        elif isinstance(target, OpOverload) and target.name().partition("::")[2].startswith(_CHECKS):
            return
        elif isinstance(target, OpOverload) and target._schema.is_mutable and node.meta.get("val") is None:
            raise CaptureError(
                f"{target} writes into its arguments and returns nothing",
                where=str(source),
                do="write the op so that it returns a new tensor",
            )
        elif not isinstance(target, OpOverload) or not _is_tensors(node.meta.get("val")):
            # Most end in a check, which is dropped; refused where an op needs it.
            given = next((arg for arg in node.args if isinstance(arg, fx.Node) and arg in self.unknown), None)
            self.unknown[node] = self.refusal(node, source) if given is None else self.unknown[given]
        else:
            self.op(node, target, source)

    def refusal(self, node: fx.Node, source: Source) -> CaptureError:
        called = getattr(node.target, "__name__", str(node.target))
        return CaptureError(
            f"the model calls {called}, which is not an op on tensors",
            where=str(source),
            do="write it with tensor operations of fixed shape, without torch.vmap or other transforms",
        )

    def subgraph(self, node: fx.Node, module: fx.GraphModule, body: Any, rest: list[Any]) -> None:
        inner = _attribute(module, str(body.target))
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        for placeholder, given in zip(placeholders, rest, strict=True):
            self.names[placeholder] = self.arg(given)
        self.names[node] = self.inline(inner)

    def op(self, node: fx.Node, target: OpOverload, source: Source) -> None:
        results = tuple(self.results(node))
        args = tuple(self.arg(arg) for arg in node.args)
        # In the order of the schema, so that operands are listed alike however the call was written.
        order = [argument.name for argument in target._schema.arguments]
        kwargs = tuple((key, self.arg(node.kwargs[key])) for key in sorted(node.kwargs, key=order.index))
        name = _IN_PLACE_OF.get(str(target), str(target))
        call = Node(name, args, kwargs, results, self.context, source=source)
        if call.op == "aten.batch_norm.default":
            self.names[node] = self.batch_norm(call)
            return
        if call.op == "aten.instance_norm.default" and args[3] is not None and args[5]:
            raise CaptureError(
                "instance norm changes its running statistics",
                where=str(source),
                do="build it with track_running_stats=False",
            )
        names = self.body.append(call, target, is_view=_is_view(node))
        single = isinstance(node.meta["val"], Tensor)
        self.names[node] = Ref(names[0]) if single else tuple(Ref(name) for name in names)

    def results(self, node: fx.Node) -> Iterator[Value]:
        made = node.meta["val"]
        tensors = [made] if isinstance(made, Tensor) else list(made)
        for k, tensor in enumerate(tensors):
            yield self.value(node.name if len(tensors) == 1 else f"{node.name}_{k}", tensor)

    def batch_norm(self, call: Node) -> Ref:
        """Batch norm in training changes its buffers behind the scenes: make them results of the node."""
        x, weight, bias, mean, var, training, momentum, eps, *_ = call.args
        if not (training and isinstance(mean, Ref) and isinstance(var, Ref)):
            return Ref(self.body.append(call, torch.ops.aten.batch_norm.default)[0])
        if self.body.region and isinstance(momentum, float):
            # Run again in the backward pass, torch moves the statistics by the same batch once more.
            momentum *= 2 - momentum
        buffers = [self.body.value(name) for name in (mean.name, var.name)]
        changed = tuple(
            Value(self.fresh(f"{call.name}_{which}"), buffer.shape, buffer.dtype)
            for which, buffer in zip(("mean", "var"), buffers, strict=True)
        )
        args = (x, weight, bias, mean, var, momentum, eps)
        node = replace(call, op="lopsided.batch_norm.default", args=args, results=(*call.results, *changed))
        names = self.body.append(node, None)
        self.body.assign(mean.name, names[1], node)
        self.body.assign(var.name, names[2], node)
        return Ref(names[0])

    def fresh(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            if arg in self.unknown:
                raise self.unknown[arg]
            return self.names[arg]
        if isinstance(arg, tuple | list):
            return tuple(self.arg(part) for part in arg)
        if isinstance(arg, torch.dtype):
            return Atom("dtype", DTYPE_NAMES[arg])
        if isinstance(arg, torch.device):
            return Atom("device", "cpu")  # stands for the device the graph is run on, wherever it was captured
        if isinstance(arg, torch.layout | torch.memory_format):
            kind = "layout" if isinstance(arg, torch.layout) else "memory_format"
            return Atom(kind, str(arg).removeprefix("torch."))
        if arg is None or isinstance(arg, bool | int | float | complex | str):
            return arg
        raise CaptureError(f"an op takes {arg!r}, which depends on the data", do="make the number a Python constant")


def _plain(path: str) -> str:
    """A dotted path as the name of a value."""
    return re.sub(r"\W", "_", path)


def _is_tensors(made: object) -> bool:
    return isinstance(made, Tensor) or (isinstance(made, tuple | list) and all(isinstance(t, Tensor) for t in made))


def _name_of(arg: Arg, what: str) -> str:
    if not isinstance(arg, Ref):
        raise CaptureError(f"{what} does not depend on the batch or the parameters", do="return the training loss")
    return arg.name


def _autocast(device: Any, dtype: Any, enabled: Any, _: Any) -> str:
    under = dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(str(device))
    return f"{device}:{DTYPE_NAMES[under] if enabled else 'off'}"


def _is_view(node: fx.Node) -> bool:
    """Whether what a call returns shares the memory of its first argument; a `reshape` may or may not."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or not isinstance(base := first.meta.get("val"), Tensor):
        return False
    made = node.meta["val"]
    return any(
        isinstance(part, Tensor) and part.untyped_storage()._cdata == base.untyped_storage()._cdata
        for part in (made if isinstance(made, tuple | list) else [made])
    )


def _attribute(module: nn.Module, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found
