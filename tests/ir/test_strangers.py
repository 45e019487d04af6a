"""A graph text from a stranger is refused in words, or makes tensors of tensors: it reaches no file and no process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lopsided
from lopsided.errors import GraphError
from lopsided.ir.graph import Atom, print_arg
from lopsided.ir.graph_text import parse_graph
from lopsided.ir.op_call import OWN, aten_overload, impurity, resolve_op

LEAF = '%x: f32[2] = input "x"\n'


def with_arg(arg: str) -> str:
    return f"{LEAF}%y: f32[] = aten.sum.default(%x, {arg})\nreturn %y"


def refused(text: str) -> GraphError:
    with pytest.raises(GraphError) as caught:
        parse_graph(text)
    assert caught.value.where.startswith("line ")
    assert len(caught.value.where) < 600
    assert caught.value.do
    return caught.value


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ("(abcj)", "'(abcj)' is not an argument"),
        ("(1+2+3j)", "is not an argument"),
        ("(" + "1+" * 100_000 + "1j)", "is not an argument"),
        ("-(" + "[" * 1000 + "j)", "is not an argument"),
        ("[" * 100_000, "lists nest more than"),
        ("[" * 50 + "]" * 50, "lists nest more than"),
        ("9" * 10_000, "is not an argument"),
        ('"\\q"', "is not an argument"),
        ('"\\ud8"', "is not an argument"),
        ("1_0", "unexpected"),
        ("dtype:foo", "there is no dtype 'foo'"),
        ("dtype:float32", "there is no dtype 'float32'"),
        ("layout:load", "there is no layout 'load'"),
        ("layout:channels_last", "there is no layout"),
        ("memory_format:ops", "there is no memory_format 'ops'"),
        ("device:nowhere", "there is no device 'nowhere'"),
        ("device:cpu:0:0", "there is no device"),
        ("device:cuda:999", "there is no device"),
        ("device:__class__", "there is no device"),
        ("dtype:", "'dtype' is not an argument"),
        (":", "':' is not an argument"),
        ("%", "'%' is not an argument"),
        ("dim=0, dim=1", "'dim' is not the name of a new argument"),
        ("%x=1", "'%x' is not the name of a new argument"),
    ],
)
def test_arguments_that_are_none_are_refused(arg: str, words: str) -> None:
    error = refused(with_arg(arg))
    assert words in error.what or (words == "unexpected" and "expected" in error.what)
    assert len(error.what) < 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'%x: f32[{"9" * 5000}] = input "x"\nreturn %x', "expected a whole number"),
        (f'%x: f32[{2**63}] = input "x"\nreturn %x', "expected a whole number"),
        ('%x: f32[2], %z: f32[2] = input "x"\nreturn %x', "input stands for one value, not 2"),
        (f"{LEAF}%y: f32[] = aten.sum.default(%x)  ; autocast disk:bf16\nreturn %y", "no autocast 'disk:bf16'"),
        (f"{LEAF}%y: f32[] = aten.sum.default(%x)  ; autocast cpu:foo\nreturn %y", "no autocast 'cpu:foo'"),
        (f"{LEAF}%y: f32[] = aten.sum(%x)\nreturn %y", "expected the name of an op"),
        (f"{LEAF}%y: f32[] = (%x)\nreturn %y", "expected the name of an op"),
        (f"{LEAF}%y: f32[] = \nreturn %y", "expected the name of an op"),
    ],
)
def test_lines_that_are_none_are_refused(text: str, words: str) -> None:
    assert words in refused(text).what


@given(
    st.text(alphabet=st.sampled_from('%x[](){}=,;:+-."\\\\ j1e_∂ \ninf aten dtype:f32 sum default return'), max_size=60)
)
def test_any_text_is_a_graph_or_refused(text: str) -> None:
    for whole in (text, with_arg(text), f"{LEAF}%y: f32[] = {text}\nreturn %y"):
        try:
            graph = parse_graph(whole)
        except GraphError:
            continue
        assert str(parse_graph(str(graph))) == str(graph)


@pytest.mark.parametrize(
    ("atom", "constant"),
    [
        (Atom("dtype", "bf16"), torch.bfloat16),
        (Atom("device", "cuda:1"), torch.device("cuda:1")),
        (Atom("layout", "sparse_coo"), torch.sparse_coo),
        (Atom("memory_format", "channels_last_3d"), torch.channels_last_3d),
    ],
)
def test_constants_resolve(atom: Atom, constant: object) -> None:
    assert atom.resolve() == constant
    assert print_arg(parse_graph(with_arg(print_arg(atom))).nodes[0].args[1]) == print_arg(atom)


@pytest.mark.parametrize(
    "atom", [Atom("dtype", "foo"), Atom("layout", "load"), Atom("device", "x"), Atom("module", "os"), Atom("", "")]
)
def test_constants_outside_the_tables_do_not_resolve(atom: Atom) -> None:
    with pytest.raises(GraphError) as caught:
        atom.resolve()
    assert caught.value.do


def test_a_text_cannot_make_a_file(tmp_path: Path) -> None:
    file = tmp_path / "made"
    graph = parse_graph(
        f'{LEAF}%f: f32[4] = aten.from_file.default("{file}", True, 4)\n%y: f32[] = aten.sum.default(%f)\nreturn %y'
    )
    with pytest.raises(GraphError, match="from_file") as caught:
        lopsided.simulate(lopsided.one_device(graph), torch.nn.Module(), {"x": torch.ones(2)}, (1.0,))
    assert caught.value.do
    assert not file.exists()


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("aten.from_file.default", "takes a string, 'filename'"),
        ("aten.save.default", "returns something else"),
        ("aten.add_.Tensor", "writes to its arguments"),
        ("aten.add.out", "writes to its arguments"),
        ("aten.item.default", "returns something else"),
        ("aten.warn.default", "returns something else"),
        ("aten.size.default", "returns something else"),
    ],
)
def test_ops_with_effects_are_refused(op: str, words: str) -> None:
    assert aten_overload(op) is not None  # its schema can still be looked at
    with pytest.raises(GraphError) as caught:
        resolve_op(op)
    assert op in caught.value.what
    assert words in caught.value.what


@pytest.mark.parametrize(
    "op",
    [
        "aten.linear.default",
        "aten.einsum.default",
        "aten.gelu.default",
        "aten.div.Tensor_mode",
        "aten.pad.default",
        "aten.conv2d.padding",
        "aten.linalg_norm.ord_str",
        "aten.scatter_reduce.two",
        "aten.meshgrid.indexing",
        "aten.arange.start",
        "aten.full.default",
        "aten.rand.default",
        "aten.split.Tensor",
        "aten.view.default",
        "aten.scaled_dot_product_attention.default",
    ],
)
def test_ops_of_models_are_pure(op: str) -> None:
    overload = aten_overload(op)
    assert overload is not None
    assert impurity(overload) is None
    assert resolve_op(op) is overload


def test_our_own_ops_are_known() -> None:
    assert all(resolve_op(name) is function for name, function in OWN.items())


@torch.library.custom_op("strangers_tests::twice", mutates_args=())
def twice(x: torch.Tensor, note: str) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("strangers_tests::shout", mutates_args=("x",))
def shout(x: torch.Tensor) -> None:
    x.mul_(2)


def test_ops_of_others_need_consent() -> None:
    text = f'{LEAF}%t: f32[2] = strangers_tests.twice.default(%x, "any")\n%y: f32[] = aten.sum.default(%t)\nreturn %y'
    error = refused(text)
    assert "strangers_tests.twice.default is not an op of aten or lopsided" in error.what
    assert "namespaces=('strangers_tests',)" in error.do
    graph = parse_graph(text, namespaces=("strangers_tests",))
    assert str(graph) == text + "\n"
    assert resolve_op(graph.nodes[0].op)(torch.ones(2), "any").tolist() == [2, 2]
    with pytest.raises(GraphError, match="writes to its arguments"):
        resolve_op("strangers_tests.shout.default")


@pytest.mark.parametrize(
    "op", ["prims.add.default", "profiler._record_function_enter_new.default", "os.system.default"]
)
def test_ops_of_torch_beyond_aten_need_consent_too(op: str) -> None:
    assert "is not an op of aten or lopsided" in refused(f"{LEAF}%y: f32[] = {op}(%x)\nreturn %y").what
