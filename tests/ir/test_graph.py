"""Graphs print, parse back to themselves, and are refused in words where they cannot run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lopsided
from lopsided.errors import GraphError
from lopsided.ir.graph import (
    DTYPES,
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
    print_arg,
    signature,
)
from lopsided.ir.graph_text import parse_graph
from lopsided.models import by_name as models
from lopsided.models import zoo
from tests.support.models import ByHand, example


@pytest.mark.parametrize("name", zoo.SMALL)
def test_graphs_of_the_zoo_parse_back(name: str) -> None:
    model, batch = models.load(zoo.SMALL[name])
    graph = lopsided.capture(model, batch)
    assert parse_graph(str(graph)) == graph
    without_sources = parse_graph(graph.text(sources=False))
    assert without_sources.text(sources=False) == graph.text(sources=False)
    assert without_sources.fingerprint == graph.fingerprint


def a_graph(*args: Arg, kwargs: tuple[tuple[str, Arg], ...] = (), **node: object) -> Graph:
    """One input, one node with these arguments, a scalar loss."""
    x, y = Value("x", (2, 3), "f32"), Value("y", (), "f32", True)
    call = Node("aten.op.default", (Ref("x"), *args), kwargs, (y,))
    return Graph((Leaf(x, "input", "x"),), (replace(call, **node),), "y")


FLAT: st.SearchStrategy[Arg] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.sampled_from([Atom("dtype", name) for name in DTYPES]),
    st.sampled_from([Atom("device", "cuda:0"), Atom("layout", "strided"), Atom("memory_format", "channels_last")]),
    st.just(Ref("x")),
)
ARGS = st.recursive(FLAT, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


@given(st.lists(ARGS, max_size=4), st.lists(ARGS, max_size=2))
def test_every_kind_of_argument_parses_back(args: list[Arg], more: list[Arg]) -> None:
    graph = a_graph(*args, kwargs=tuple((f"key{k}", arg) for k, arg in enumerate(more)))
    again = parse_graph(str(graph))
    assert again == graph
    # 1, 1.0 and True are equal, and not the same argument.
    assert str(again) == str(graph)


@pytest.mark.parametrize("number", [math.nan, complex(math.nan, math.inf), complex(-0.0, -2), -0.0, 1e300, -math.inf])
def test_numbers_that_are_not_equal_to_themselves_parse_back(number: complex) -> None:
    graph = a_graph(number)
    assert str(parse_graph(str(graph))) == str(graph)
    assert type(parse_graph(str(graph)).nodes[0].args[1]) is type(number)


@given(
    st.sampled_from(["", "cpu:bf16", "cpu:off", "cuda:f16"]),
    st.booleans(),
    st.lists(st.sampled_from(["x", "y"]), max_size=2, unique=True),
    st.integers(0, 10**12),
    st.text(min_size=1),
    st.integers(0, 10**5),
    st.text(),
)
def test_notes_parse_back(
    autocast: str, grad: bool, saved: list[str], extra: int, file: str, line: int, function: str
) -> None:
    graph = a_graph(
        context=Context(autocast, grad),
        saved=Saved(tuple(saved), extra),
        source=Source(file, line, function, "layers.0.mlp"),
    )
    assert parse_graph(str(graph)) == graph


def test_constants_ties_and_updates_parse_back() -> None:
    x, w = Value("x", (2,), "f32"), Value("w", (2,), "f32", True)
    c, b = Value("c", (3,), "c64"), Value("b", (), "i64")
    leaves = (
        Leaf(x, "input", 'data."odd name".0'),
        Leaf(w, "parameter", "head.weight", also=("embed.weight", "other")),
        Leaf(c, "constant", "c", data=(1 + 2j, complex(0, math.inf), -1j)),
        Leaf(Value("e", (0,), "bool"), "constant", "e"),
        Leaf(b, "buffer", "steps"),
    )
    nodes = (
        Node("aten.dot.default", (Ref("x"), Ref("w")), (), (Value("y", (), "f32", True),)),
        Node("aten.add.Tensor", (Ref("b"), 1), (), (Value("b2", (), "i64"),)),
    )
    graph = Graph(leaves, nodes, "y", (("steps", "b2"),))
    assert parse_graph(str(graph)) == graph


def test_a_printed_graph_is_readable() -> None:
    model = ByHand(lambda m, x: torch.relu(m.lin(x)).sum())
    assert lopsided.capture(model, {"x": example()}).text(sources=False) == (
        '%lin_weight: ∂f32[6, 6] = parameter "lin.weight"\n'
        '%lin_bias: ∂f32[6] = parameter "lin.bias"\n'
        '%x: f32[4, 6] = input "x"\n'
        "%linear: ∂f32[4, 6] = aten.linear.default(%x, %lin_weight, %lin_bias)  ; saves %x\n"
        "%relu: ∂f32[4, 6] = aten.relu.default(%linear)  ; saves %relu\n"
        "%sum_1: ∂f32[] = aten.sum.default(%relu)\n"
        "return %sum_1\n"
    )


def test_text_of_arguments() -> None:
    assert print_arg((1, -math.inf, None, "a\nb", (Ref("x"), Atom("dtype", "f32")))) == (
        '[1, -inf, None, "a\\nb", [%x, dtype:f32]]'
    )


def test_values_know_their_size() -> None:
    value = Value("x", (3, 4), "bf16")
    assert (value.elements, value.bytes, value.torch_dtype) == (12, 24, torch.bfloat16)


def test_fixed_values_depend_on_nothing_that_varies() -> None:
    def masked(m: object, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, 6).tril() * m.ema[0]  # type: ignore[attr-defined]
        return (m.lin(x) @ mask).sum()  # type: ignore[attr-defined]

    graph = lopsided.capture(ByHand(masked), {"x": example()})
    assert {"ones", "tril", "mul"} <= graph.fixed
    assert not {"linear", "x", "lin_weight", graph.loss} & graph.fixed


def test_equal_calls_have_equal_signatures_and_numbers_keep_their_type() -> None:
    one, two, three = (a_graph(arg) for arg in (1, 1.0, True))
    assert len({signature(graph.nodes[0], graph.values) for graph in (one, two, three)}) == 3
    assert signature(one.nodes[0], one.values) == signature(a_graph(1).nodes[0], one.values)


# Refusals


X, Y = Value("x", (2,), "f32"), Value("y", (), "f32")
INPUT = Leaf(X, "input", "x")
SUM = Node("aten.sum.default", (Ref("x"),), (), (Y,), source=Source("model.py", 7))


@pytest.mark.parametrize(
    ("leaves", "nodes", "loss", "updates", "words"),
    [
        ((INPUT, INPUT), (SUM,), "y", (), "%x is defined twice"),
        ((INPUT,), (SUM, SUM), "y", (), "%y is defined twice"),
        ((), (SUM,), "y", (), "aten.sum.default uses %x, which is not defined before it"),
        ((INPUT,), (SUM,), "z", (), "the graph returns %z, which is not defined"),
        ((INPUT,), (SUM,), "x", (), "the loss %x is not a scalar"),
        ((INPUT,), (SUM,), "y", (("b", "z"),), "the graph returns %z, which is not defined"),
        ((INPUT,), (replace(SUM, results=()),), "y", (), "aten.sum.default has no result"),
        ((replace(INPUT, kind="weight"),), (SUM,), "y", (), "%x is a leaf of unknown kind 'weight'"),
        ((replace(INPUT, value=replace(X, dtype="f8")),), (SUM,), "y", (), "%x has an unknown dtype 'f8'"),
        (
            (replace(INPUT, kind="constant", data=(1.0,)),),
            (SUM,),
            "y",
            (),
            "constant %x has 1 elements, its shape needs 2",
        ),
    ],
)
def test_an_illegal_graph_is_refused(
    leaves: tuple[Leaf, ...],
    nodes: tuple[Node, ...],
    loss: str,
    updates: tuple[tuple[str, str], ...],
    words: str,
) -> None:
    with pytest.raises(GraphError) as refused:
        Graph(leaves, nodes, loss, updates)
    assert refused.value.what == words
    assert refused.value.do


LEAF = '%x: f32[2] = input "x"\n'
CALL = "%y: f32[] = aten.sum.default(%x)\n"


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("", "graph text has no 'return' line", ""),
        (LEAF + CALL, "graph text has no 'return' line", ""),
        (LEAF + "%y: f32[] = aten.sum.default(%x\nreturn %y", "expected ',', found 'the end'", "line 2"),
        (LEAF + "%y f32[] = aten.sum.default(%x)\nreturn %y", "expected ':', found 'f32'", "line 2"),
        (
            LEAF + "y: f32[] = aten.sum.default(%x)\nreturn %y",
            "expected a value such as %x, found 'y'",
            "line 2",
        ),
        (
            LEAF + "%y: f32[a] = aten.sum.default(%x)\nreturn %y",
            "expected a whole number, found 'a'",
            "line 2",
        ),
        (LEAF + "%y: f32[] = aten.sum.default(%x) ; saved %x\nreturn %y", "unknown note 'saved'", "line 2"),
        (LEAF + "%y: f32[] = aten.sum.default(%x) extra\nreturn %y", "unexpected 'extra'", "line 2"),
        (
            LEAF + "%y: f32[] = aten.sum.default(__import__)\nreturn %y",
            "'__import__' is not an argument",
            "line 2",
        ),
        ("%x: f32[2] = input x\nreturn %x", "'x' is not an argument", "line 1"),
        ("%x: f32[2] = input 3\nreturn %x", "expected a quoted name, found 3", "line 1"),
        ('%x: f32[2] = constant "x" 3\nreturn %x', "a constant needs a list of numbers", "line 1"),
        ('%x: f32[2] = constant "x" ["a"]\nreturn %x', "a constant needs a list of numbers", "line 1"),
        (LEAF + CALL + "return y", "expected a value such as %x, found 'y'", "line 3"),
        (LEAF + CALL + "update steps = %y\nreturn %y", "'steps' is not an argument", "line 3"),
    ],
)
def test_a_text_that_is_no_graph_is_refused_with_its_line(text: str, words: str, line: str) -> None:
    with pytest.raises(GraphError) as refused:
        parse_graph(text)
    assert words in refused.value.what
    assert refused.value.where.startswith(line)
    assert refused.value.do


def test_an_unknown_op_is_refused_when_it_is_run() -> None:
    graph = parse_graph(LEAF + "%y: f32[] = aten.no_such_op.default(%x)\nreturn %y")
    with pytest.raises(GraphError, match=r"there is no op 'aten\.no_such_op\.default'"):
        lopsided.simulate(lopsided.one_device(graph), torch.nn.Module(), {"x": torch.ones(2)}, (1.0,))


@pytest.mark.parametrize(
    "op",
    [
        "os.system",
        "torch.load.default",
        "aten.__class__.mro",
        "aten.sum",
        "aten",
        "",
        "builtins.eval.default",
    ],
)
def test_only_registered_ops_are_looked_up(op: str) -> None:
    from lopsided.ir.op_call import resolve_op

    with pytest.raises(GraphError, match="there is no op"):
        resolve_op(op)
