"""The single-device training graph as plain data: what `capture` hands on and everything else reads.

In: nodes and leaves. Out: `Graph`, which prints and checks itself (`graph_text` reads it back). One line per node:

    %h: ∂f32[4, 8, 16] = aten.embedding.default(%wte, %tokens)  ; saves %tokens  ; at "gpt.py":41 "GPT.forward"

`∂` marks a value with a gradient. After the call follow, where there is something to say, its context (`autocast`,
`no_grad`, `recompute`), what its backward pass keeps, and its line in the user's model.

Activation checkpointing: a region keeps what it takes from outside, and nothing of what its nodes save. Its backward
pass first runs all of it forward again (`reruns`). Parameters that are gathered in a region are gathered once more for
that, and stay until the region has run backward; nothing else that a region sends forward is spared (`retaken`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lopsided.errors import GraphError

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
LAYOUTS: dict[str, torch.layout] = {
    "strided": torch.strided,
    "sparse_coo": torch.sparse_coo,
    "sparse_csr": torch.sparse_csr,
    "sparse_csc": torch.sparse_csc,
    "sparse_bsr": torch.sparse_bsr,
    "sparse_bsc": torch.sparse_bsc,
    "jagged": torch.jagged,
}
MEMORY_FORMATS: dict[str, torch.memory_format] = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph: its name, shape, dtype, and whether a gradient flows through it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    grad: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        return self.elements * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"%{self.name}: {'∂' if self.grad else ''}{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value of the graph."""

    name: str


@dataclass(frozen=True, slots=True)
class Atom:
    """An argument that is a torch constant: a dtype, device, layout or memory format, by name."""

    kind: str
    name: str

    def resolve(self) -> object:
        """The constant itself. Names are looked up in tables, never in torch: they may come from a stranger."""
        tables: dict[str, Mapping[str, object]] = {
            "dtype": DTYPES,
            "layout": LAYOUTS,
            "memory_format": MEMORY_FORMATS,
        }
        if self.kind == "device":
            if (device := device_named(self.name)) is not None:
                return device
            raise GraphError(f"there is no device {self.name!r}", do="write it like cpu, cuda or cuda:1")
        if self.kind not in tables:
            raise GraphError(
                f"there is no kind of constant {self.kind!r}", do=f"use one of device, {', '.join(tables)}"
            )
        if self.name not in tables[self.kind]:
            raise GraphError(f"there is no {self.kind} {self.name!r}", do=f"use one of {', '.join(tables[self.kind])}")
        return tables[self.kind][self.name]


def device_named(name: str) -> torch.device | None:
    if not re.fullmatch(r"[a-z]{1,20}(:[0-9]{1,2})?", name):
        return None
    try:
        return torch.device(name)
    except RuntimeError:
        return None


Arg = None | bool | int | float | complex | str | Ref | Atom | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Context:
    """What surrounds a node: the autocast it runs under (`cpu:bf16`, `cpu:off`), and whether gradients are on.

    `recompute` is the number of the checkpointed region it belongs to, from 1 on, or 0: the nodes of a region keep
    nothing for the backward pass, which runs them again.
    """

    autocast: str = ""
    grad: bool = True
    recompute: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """The line of the user's model a node comes from."""

    file: str = ""
    line: int = 0
    function: str = ""
    module: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "unknown line"
        inside = ", ".join(part for part in (self.function, self.module and f"module {self.module}") if part)
        return f"{where} ({inside})" if inside else where


@dataclass(frozen=True, slots=True)
class Saved:
    """What the backward pass of a node keeps: values of the graph, and bytes of its own making."""

    values: tuple[str, ...] = ()
    extra_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One call of an op."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[Value, ...]
    context: Context = Context()
    saved: Saved = Saved()
    source: Source = Source()
    # The names of its tensor arguments, in the order of the call; a value used twice stands twice.
    operands: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        operands = tuple(_refs((self.args, tuple(value for _, value in self.kwargs))))
        object.__setattr__(self, "operands", operands)

    @property
    def name(self) -> str:
        return self.results[0].name


def _refs(arg: object) -> Iterator[str]:
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for part in arg:
            yield from _refs(part)


WHOLE_KINDS = ("buffer", "constant", "precomputed")
"""Leaves that every device has whole."""
LEAF_KINDS = ("input", "parameter", *WHOLE_KINDS)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value the graph starts from. `target` is its name in the model or batch; tied parameters have `also` names.

    A constant carries its elements in `data`, flat. What is `precomputed` is made of the whole batch's inputs before
    the rounds that the graph is one of (`lopsided.schedule.rounds`).
    """

    value: Value
    kind: str  # one of LEAF_KINDS
    target: str
    also: tuple[str, ...] = ()
    data: tuple[bool | int | float | complex, ...] = ()


@dataclass(frozen=True)
class Graph:
    """Leaves, nodes in an order that runs, the scalar loss, and the buffers that end with a new value."""

    leaves: tuple[Leaf, ...]
    nodes: tuple[Node, ...]
    loss: str
    updates: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def values(self) -> Mapping[str, Value]:
        found = {leaf.value.name: leaf.value for leaf in self.leaves}
        for node in self.nodes:
            found.update((value.name, value) for value in node.results)
        return found

    @cached_property
    def fixed(self) -> frozenset[str]:
        """Values that depend on nothing that varies (masks, rotary tables): computed whole on every device."""
        fixed = {leaf.value.name for leaf in self.leaves if leaf.kind in WHOLE_KINDS}
        for node in self.nodes:
            if all(name in fixed for name in node.operands):
                fixed.update(value.name for value in node.results)
        return frozenset(fixed)

    @property
    def parameters(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.kind == "parameter")

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        return frozenset(leaf.value.name for leaf in self.parameters)

    @cached_property
    def updated(self) -> tuple[Value, ...]:
        """The parameters that get a gradient: trained ones that something uses."""
        used = {name for node in self.nodes for name in node.operands}
        return tuple(leaf.value for leaf in self.parameters if leaf.value.grad and leaf.value.name in used)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what the graph computes; names of files and lines do not enter."""
        return hashlib.sha256(self.text(sources=False).encode()).hexdigest()[:16]

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Where its ops come from: `aten`, ours, and those of whoever wrote the model."""
        return tuple(dict.fromkeys(node.op.partition(".")[0] for node in self.nodes))

    def text(self, *, sources: bool = True) -> str:
        return print_graph(self, sources=sources)

    def __str__(self) -> str:
        return self.text()


def signature(node: Node, values: Mapping[str, Value]) -> object:
    """What a call is, names aside: calls with equal signatures have the same rules, price and saved tensors.

    Whether it is recomputed is not part of that.
    """
    context = node.context
    return (
        node.op,
        _described(node.args, values),
        _described(tuple(node.kwargs), values),
        tuple((value.shape, value.dtype) for value in node.results),
        (context.autocast, context.grad),
    )


def _described(arg: object, values: Mapping[str, Value]) -> object:
    if isinstance(arg, Ref):
        value = values[arg.name]
        return (value.shape, value.dtype, value.grad)
    if isinstance(arg, tuple):
        return tuple(_described(part, values) for part in arg)
    # 1, True and 1.0 are equal in Python, and not the same argument.
    return (type(arg), arg)


def check(graph: Graph) -> None:
    """Refuse a graph that cannot be run, in words."""
    known: set[str] = set()

    def define(value: Value) -> None:
        if value.name in known:
            raise GraphError(f"%{value.name} is defined twice", do="give every value its own name")
        if value.dtype not in DTYPES:
            raise GraphError(
                f"%{value.name} has an unknown dtype {value.dtype!r}", do=f"use one of {', '.join(DTYPES)}"
            )
        known.add(value.name)

    for leaf in graph.leaves:
        if leaf.kind not in LEAF_KINDS:
            raise GraphError(
                f"%{leaf.value.name} is a leaf of unknown kind {leaf.kind!r}", do=f"use one of {', '.join(LEAF_KINDS)}"
            )
        if leaf.kind == "constant" and len(leaf.data) != leaf.value.elements:
            raise GraphError(
                f"constant %{leaf.value.name} has {len(leaf.data)} elements, its shape needs {leaf.value.elements}",
                do="give every element",
            )
        define(leaf.value)
    for node in graph.nodes:
        for name in node.operands:
            if name not in known:
                raise GraphError(
                    f"{node.op} uses %{name}, which is not defined before it",
                    where=str(node.source),
                    do="order the nodes so that they run",
                )
        if not node.results:
            raise GraphError(f"{node.op} has no result", where=str(node.source), do="leave it out")
        for value in node.results:
            define(value)
    for name in (graph.loss, *(value for _, value in graph.updates)):
        if name not in known:
            raise GraphError(f"the graph returns %{name}, which is not defined", do="return a value of the graph")
    if graph.values[graph.loss].elements != 1:
        raise GraphError(f"the loss %{graph.loss} is not a scalar", do="return a loss with one element")


# Printing: arguments are Python literals, `%name` for a value, `dtype:f32` for a torch constant.


def print_arg(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return f"%{arg.name}"
    if isinstance(arg, Atom):
        return f"{arg.kind}:{arg.name}"
    if isinstance(arg, tuple):
        return f"[{', '.join(map(print_arg, arg))}]"
    if isinstance(arg, complex):
        # Both parts with their signs: -2j alone would read back as (0-2j) or (-0-2j).
        return f"({arg.real!r}{'' if str(arg.imag).startswith('-') else '+'}{arg.imag!r}j)"
    if isinstance(arg, str):
        return json.dumps(arg, ensure_ascii=False)
    return repr(arg)


def print_node(node: Node, *, sources: bool = True) -> str:
    call = [print_arg(arg) for arg in node.args] + [f"{key}={print_arg(arg)}" for key, arg in node.kwargs]
    results = ", ".join(map(str, node.results))
    notes = [f"{results} = {node.op}({', '.join(call)})"]
    if node.context.autocast:
        notes.append(f"autocast {node.context.autocast}")
    if not node.context.grad:
        notes.append("no_grad")
    if node.context.recompute:
        notes.append(f"recompute {node.context.recompute}")
    if node.saved != Saved():
        extra = [f"+{node.saved.extra_bytes}"] if node.saved.extra_bytes else []
        notes.append(" ".join(["saves", *(f"%{name}" for name in node.saved.values), *extra]))
    if sources and node.source != Source():
        source = node.source
        words = map(print_arg, (source.file, source.function, source.module))
        notes.append("at {}:{} {} {}".format(*[next(words), source.line, *words]))
    return "  ; ".join(notes)


def print_leaf(leaf: Leaf) -> str:
    if leaf.kind == "constant":
        return f"{leaf.value} = constant {print_arg(leaf.target)} {print_arg(leaf.data)}"
    also = "".join(f" also {print_arg(name)}" for name in leaf.also)
    return f"{leaf.value} = {leaf.kind} {print_arg(leaf.target)}{also}"


def print_graph(graph: Graph, *, sources: bool = True) -> str:
    lines = [print_leaf(leaf) for leaf in graph.leaves]
    lines += [print_node(node, sources=sources) for node in graph.nodes]
    lines += [f"update {print_arg(buffer)} = %{value}" for buffer, value in graph.updates]
    return "\n".join([*lines, f"return %{graph.loss}"]) + "\n"


def reruns(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Every node that runs again, by name, with the operands that come from outside its region, parameters apart.

    A region without a gradient has no backward pass, and is none.
    """
    parameters = graph.parameter_names
    found: dict[str, tuple[int, ...]] = {}
    for number, region in itertools.groupby(graph.nodes, key=lambda node: node.context.recompute):
        nodes = list(region)
        if not number or not any(value.grad for node in nodes for value in node.results):
            continue
        inside = set(parameters)
        for node in nodes:
            found[node.name] = tuple(k for k, name in enumerate(node.operands) if name not in inside)
            inside.update(value.name for value in node.results)
    return found


def retaken(graph: Graph) -> frozenset[str]:
    """What is taken again: if it is converted for that, then twice."""
    again = reruns(graph)
    return frozenset(name for node in graph.nodes if node.name in again for name in node.operands)
