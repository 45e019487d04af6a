"""A graph from its text: `parse_graph(str(graph)) == graph`.

In: text as `graph` prints it. Out: a checked `Graph`, or a `GraphError` that names the line. Nothing in a text is ever
evaluated, and ops come from namespaces that the caller knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import replace

from lopsided.errors import GraphError
from lopsided.ir.graph import (
    DTYPES,
    LEAF_KINDS,
    Arg,
    Atom,
    Context,
    Graph,
    Leaf,
    Node,
    Ref,
    Saved,
    Source,
    Value,
    device_named,
)

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
            if reader.next in LEAF_KINDS:
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
    if device_named(device) is None or dtype not in (*DTYPES, "off"):
        raise reader.fail(f"there is no autocast {_short(f'{device}:{dtype}')}", "write it like cpu:bf16 or cuda:off")
    return f"{device}:{dtype}"
