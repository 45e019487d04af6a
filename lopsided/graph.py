"""The single-device training graph as plain data: what `capture` hands on and everything else reads.

In: nodes and leaves. Out: `Graph`, which prints, parses back and checks itself. One line per node:

    %h: ∂f32[4, 8, 16] = aten.embedding.default(%wte, %tokens)  ; saves %tokens  ; at "gpt.py":41 "GPT.forward"

`∂` marks a value with a gradient. After the call follow, where there is something to say, its context (`autocast`,
`no_grad`, `recompute`), what its backward pass keeps, and its line in the user's model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
            if (device := _device(self.name)) is not None:
                return device
            raise GraphError(f"there is no device {self.name!r}", do="write it like cpu, cuda or cuda:1")
        if self.kind not in tables:
            raise GraphError(
                f"there is no kind of constant {self.kind!r}", do=f"use one of device, {', '.join(tables)}"
            )
        if self.name not in tables[self.kind]:
            raise GraphError(f"there is no {self.kind} {self.name!r}", do=f"use one of {', '.join(tables[self.kind])}")
        return tables[self.kind][self.name]


def _device(name: str) -> torch.device | None:
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


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value the graph starts from. `target` is its name in the model or batch; tied parameters have `also` names.

    A constant carries its elements in `data`, flat.
    """

    value: Value
    kind: str  # "input", "parameter", "buffer" or "constant"
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
        fixed = {leaf.value.name for leaf in self.leaves if leaf.kind in ("buffer", "constant")}
        for node in self.nodes:
            if all(name in fixed for name in node.operands):
                fixed.update(value.name for value in node.results)
        return frozenset(fixed)

    @property
    def parameters(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.kind == "parameter")

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what the graph computes; names of files and lines do not enter."""
        return hashlib.sha256(self.text(sources=False).encode()).hexdigest()[:16]

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
        if leaf.kind not in ("input", "parameter", "buffer", "constant"):
            raise GraphError(f"%{leaf.value.name} is a leaf of unknown kind {leaf.kind!r}", do="see docs/glossary.md")
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


# Parsing: `parse_graph(str(graph)) == graph`; nothing in a text is ever evaluated.

OWN_NAMESPACES = ("aten", "lopsided")
"""Where the ops of a text come from, unless `parse_graph` is told of more."""

_WORDS: dict[str, Arg] = {"None": None, "True": True, "False": False}
_DEEPEST = 32
"""How deep the lists of an argument may nest: torch's own go two deep, and Python's stack ends near a thousand."""

_TOKEN = re.compile(
    r'\s*("(?:[^"\\]|\\.)*"|%[\w.]+|(?:dtype|device|layout|memory_format):[\w:]+'
    r"|\([^()]*j\)|[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?j?|inf\b|nan\b)|[A-Za-z_][\w.]*|∂|[\[\](){}=,;:+]|\S)"
)


class _Reader:
    """Tokens of one line, with what to say when they are not what was expected."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number, self.position = text, number, 0
        self.tokens: list[str] = _TOKEN.findall(text)

    def fail(self, why: str, do: str = "compare with a printed graph") -> GraphError:
        line = self.text.strip()
        shown = line if len(line) <= 500 else f"{line[:500]}..."
        return GraphError(f"graph text does not parse: {why}", where=f"line {self.number}: {shown}", do=do)

    @property
    def next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.next
        self.position += 1
        return token

    def accept(self, token: str) -> bool:
        if self.next != token:
            return False
        self.position += 1
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.fail(f"expected {token!r}, found {self.next or 'the end'!r}")

    def string(self) -> str:
        value = self.arg()
        if not isinstance(value, str):
            raise self.fail(f"expected a quoted name, found {value!r}")
        return value

    def name(self) -> str:
        token = self.take()
        if not token.startswith("%"):
            raise self.fail(f"expected a value such as %x, found {token!r}")
        return token[1:]

    def integer(self) -> int:
        token = self.take()
        # No size or count of bytes is beyond 64 bits, and int() itself gives up on thousands of digits.
        if not re.fullmatch(r"\+?[0-9]{1,19}", token) or int(token) >= 2**63:
            raise self.fail(f"expected a whole number, found {_short(token)}")
        return int(token)

    def listed(self, close: str) -> Iterator[None]:
        while not self.accept(close):
            yield
            if self.next != close:
                self.expect(",")

    def value(self) -> Value:
        name = self.name()
        self.expect(":")
        grad = self.accept("∂")
        dtype = self.take()
        self.expect("[")
        shape = tuple(self.integer() for _ in self.listed("]"))
        return Value(name, shape, dtype, grad)

    def arg(self, depth: int = 0) -> Arg:
        if depth > _DEEPEST:
            raise self.fail(f"lists nest more than {_DEEPEST} deep")
        token = self.take()
        if token == "[":
            return tuple(self.arg(depth + 1) for _ in self.listed("]"))
        if token.startswith("%") and len(token) > 1:
            return Ref(token[1:])
        if token in _WORDS:
            return _WORDS[token]
        if not token.startswith('"') and len(token) > 1 and ":" in token:
            return self.atom(token)
        try:
            return _literal(token)
        except ValueError:
            raise self.fail(f"{_short(token)} is not an argument") from None

    def atom(self, token: str) -> Atom:
        kind, _, name = token.partition(":")
        atom = Atom(kind, name)
        try:
            atom.resolve()
        except GraphError as error:
            raise self.fail(error.what, error.do) from None
        return atom

    def op(self, namespaces: Collection[str]) -> str:
        name = self.take()
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+){2}", name):
            raise self.fail(f"expected the name of an op such as aten.linear.default, found {_short(name)}")
        namespace = name.partition(".")[0]
        if namespace not in namespaces:
            raise self.fail(
                f"{name} is not an op of {' or '.join(namespaces)}",
                f"if you trust the text, parse_graph(text, namespaces=({namespace!r},)) lets it use your own ops",
            )
        return name


def _literal(token: str) -> Arg:
    """The string or number a token is; ValueError if it is none."""
    if token.startswith('"'):
        text: str = json.loads(token)
        return text
    if token.startswith("(") or re.fullmatch(r"[-+]?[0-9][^a-zA-Z]*([eE][-+]?[0-9]+)?j", token):
        return complex(token)
    if re.fullmatch(r"[-+]?[0-9]+", token):
        return int(token)
    if re.fullmatch(r"[-+]?([0-9].*|inf|nan)", token):
        return float(token)
    raise ValueError(token)


def _short(token: str) -> str:
    return repr(token if len(token) <= 60 else f"{token[:60]}...")


def parse_graph(text: str, *, namespaces: Collection[str] = ()) -> Graph:
    """The graph that prints as `text`, which may come from a stranger.

    It can name ops of torch's `aten` and our own, and those of `namespaces`, such as `("example",)` for ops you
    registered as `example::...`.
    """
    allowed = (*OWN_NAMESPACES, *namespaces)
    leaves: list[Leaf] = []
    nodes: list[Node] = []
    updates: list[tuple[str, str]] = []
    loss = ""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        reader = _Reader(line, number)
        if reader.accept("return"):
            loss = reader.name()
        elif reader.accept("update"):
            buffer = reader.string()
            reader.expect("=")
            updates.append((buffer, reader.name()))
        else:
            results = [reader.value()]
            while reader.accept(","):
                results.append(reader.value())
            reader.expect("=")
            if reader.next in ("input", "parameter", "buffer", "constant"):
                if len(results) > 1:
                    raise reader.fail(f"{reader.next} stands for one value, not {len(results)}")
                leaves.append(_leaf(reader, results[0]))
            else:
                nodes.append(_node(reader, tuple(results), allowed))
        if reader.next:
            raise reader.fail(f"unexpected {reader.next!r}")
    if not loss:
        raise GraphError("graph text has no 'return' line", do="end it with 'return %loss'")
    return Graph(tuple(leaves), tuple(nodes), loss, tuple(updates))


def _leaf(reader: _Reader, value: Value) -> Leaf:
    kind, target = reader.take(), reader.string()
    if kind == "constant":
        data = reader.arg()
        if not isinstance(data, tuple) or not all(isinstance(x, bool | int | float | complex) for x in data):
            raise reader.fail("a constant needs a list of numbers")
        return Leaf(value, kind, target, data=tuple(x for x in data if isinstance(x, bool | int | float | complex)))
    also: list[str] = []
    while reader.accept("also"):
        also.append(reader.string())
    return Leaf(value, kind, target, tuple(also))


def _node(reader: _Reader, results: tuple[Value, ...], namespaces: Collection[str]) -> Node:
    op = reader.op(namespaces)
    reader.expect("(")
    args: list[Arg] = []
    kwargs: list[tuple[str, Arg]] = []
    for _ in reader.listed(")"):
        after = reader.tokens[reader.position + 1 : reader.position + 2]
        if after == ["="]:
            key = reader.take()
            if not key.isidentifier() or any(key == other for other, _ in kwargs):
                raise reader.fail(f"{_short(key)} is not the name of a new argument")
            reader.expect("=")
            kwargs.append((key, reader.arg()))
        else:
            args.append(reader.arg())
    context, saved, source = Context(), Saved(), Source()
    while reader.accept(";"):
        note = reader.take()
        if note == "autocast":
            context = replace(context, autocast=_autocast(reader))
        elif note == "no_grad":
            context = replace(context, grad=False)
        elif note == "recompute":
            context = replace(context, recompute=reader.integer())
        elif note == "saves":
            names: list[str] = []
            while reader.next.startswith("%"):
                names.append(reader.name())
            saved = Saved(tuple(names), reader.integer() if reader.next.startswith("+") else 0)
        elif note == "at":
            file = reader.string()
            reader.expect(":")
            line = reader.integer()
            source = Source(file, line, reader.string(), reader.string())
        else:
            raise reader.fail(f"unknown note {note!r}")
    return Node(op, tuple(args), tuple(kwargs), results, context, saved, source)


def _autocast(reader: _Reader) -> str:
    device = reader.take()
    reader.expect(":")
    dtype = reader.take()
    if _device(device) is None or dtype not in (*DTYPES, "off"):
        raise reader.fail(f"there is no autocast {_short(f'{device}:{dtype}')}", "write it like cpu:bf16 or cuda:off")
    return f"{device}:{dtype}"
