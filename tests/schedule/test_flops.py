"""The work of a call: flops as torch counts them, bytes by hand, and what talking implementations ask."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from lopsided.capturing.capture_graph import capture
from lopsided.errors import ProgramError
from lopsided.ir.graph import Atom, Context, Graph, Node, Ref, Saved, Value, signature
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, P, R, S
from lopsided.models import by_name as models
from lopsided.models import zoo
from lopsided.ops.derive import call_rules
from lopsided.ops.op import Ask, Call, Local, Talk, Talking
from lopsided.ops.validator import as_call, sampled_ops, samples_of
from lopsided.schedule import flops as work
from lopsided.schedule.flops import Exchanged, Work, asked, call_text, exchanges, is_product, work_of


@cache
def _captured(spec: str) -> Graph:
    return capture(*models.load(spec))


def _calls(graph: Graph) -> list[Call]:
    return [Call(node, tuple(graph.values[name] for name in node.operands)) for node in graph.nodes]


@cache
def _sampled() -> tuple[Call, ...]:
    return tuple(as_call(example)[0] for op in sampled_ops() for example in samples_of(op))


def _talking_rules() -> Iterator[tuple[Call, Rule]]:
    for call in _sampled():
        for rule in call_rules(call, exact=False):
            if rule.how not in ("plain", "sfb"):
                yield call, rule


def _node(op: str, *args: Value | int | float | bool | None, out: Value, **about: Any) -> Call:
    """A call on these values."""
    given = tuple(Ref(arg.name) if isinstance(arg, Value) else arg for arg in args)
    return Call(Node(op, given, (), (out,), **about), tuple(arg for arg in args if isinstance(arg, Value)))


def _value(name: str, *shape: int, dtype: str = "f32", grad: bool = True) -> Value:
    return Value(name, shape, dtype, grad)


def _check(call: Call) -> Work:
    found = work_of(call)
    operands, results = len(call.operands), len(call.node.results)
    assert len(found.gradient_flops) == operands
    assert len(found.forward_bytes) == len(found.gradient_bytes) == operands + results
    numbers = [found.forward_flops, *found.gradient_flops, *found.forward_bytes, *found.gradient_bytes, *found.kernels]
    assert all(type(number) is int and number >= 0 for number in numbers), call.node
    assert all(flops == 0 for flops, v in zip(found.gradient_flops, call.operands, strict=True) if not v.grad)
    if not any(value.grad for value in call.node.results):
        assert not any((*found.gradient_flops, *found.gradient_bytes, found.kernels[1]))
    return found


# Everything has its price


def test_every_sampled_call_has_its_work() -> None:
    for call in _sampled():
        _check(call)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_call_of_the_zoo_has_its_work(name: str) -> None:
    for call in _calls(_captured(zoo.SMALL[name])):
        _check(call)


def test_equal_calls_have_equal_work() -> None:
    graph = _captured(zoo.SMALL["gpt2"])
    found: dict[object, Work] = {}
    for call in _calls(graph):
        assert found.setdefault(signature(call.node, graph.values), work_of(call)) == work_of(call)


def test_it_takes_no_time() -> None:
    calls = _calls(_captured(zoo.SMALL["bert"]))
    for call in calls:
        work_of(call)
    start = time.perf_counter()
    for call in calls:
        work_of(call)
    # About 20 microseconds each; the rest is for machines that do other things, too.
    assert (time.perf_counter() - start) / len(calls) < 500e-6


# Flops


def _by_torch(spec: str) -> tuple[int, int]:
    """What torch counts, forward and backward; it has no formula for the CPU's attention kernel, so that lends one."""
    aten = torch.ops.aten

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return sdpa_flop(query, key, value)

    def attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return sdpa_backward_flop(gradient, query, key, value)

    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }
    module, batch = models.load(spec)
    with FlopCounterMode(display=False, custom_mapping=formulas) as forward:
        loss = module(**batch)
    with FlopCounterMode(display=False, custom_mapping=formulas) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


_KEPT_SCORES = "the CPU takes a kernel that keeps scores and does not compute them again: 2 × forward, not 2.5 ×"
_BACKWARD_BEYOND = {
    "unet": (0.003, f"heads lie transposed in memory: {_KEPT_SCORES}"),
    "t5": (0.018, f"biases of scores are trained: {_KEPT_SCORES}"),
}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_flops_are_those_torch_counts(name: str) -> None:
    # With dropout the CPU takes the kernel that keeps scores everywhere.
    spec = zoo.SMALL[name] + (",dropout=0" if "dropout" in zoo.sizes(name) else "")
    forward = backward = 0
    for call in _calls(_captured(spec)):
        if is_product(call.node.op):
            found = work_of(call)
            forward += found.forward_flops
            backward += sum(found.gradient_flops)
    counted_forward, counted_backward = _by_torch(spec)
    assert forward == counted_forward
    if name in _BACKWARD_BEYOND:
        beyond, _reason = _BACKWARD_BEYOND[name]
        assert counted_backward < backward < counted_backward * (1 + beyond)
    else:
        assert backward == counted_backward


def test_flops_of_a_model_of_medium_size() -> None:
    spec = "gpt2:layers=2,width=64,dropout=0"
    found = [work_of(call) for call in _calls(_captured(spec)) if is_product(call.node.op)]
    assert (sum(w.forward_flops for w in found), sum(sum(w.gradient_flops) for w in found)) == _by_torch(spec)


@pytest.mark.parametrize(
    ("op", "shapes", "flops"),
    [
        ("aten.mm.default", [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
        ("aten.bmm.default", [(2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        ("aten.matmul.default", [(2, 1, 3, 4), (6, 4, 5)], 2 * 2 * 6 * 3 * 4 * 5),
        ("aten.addmm.default", [(5,), (3, 4), (4, 5)], 2 * 3 * 4 * 5),
        ("aten.dot.default", [(7,), (7,)], 14),
        ("aten.outer.default", [(3,), (4,)], 12),
        ("aten.bilinear.default", [(2, 3), (2, 4), (5, 3, 4)], 2 * 3 * 4 + 2 * 2 * 3 * 4 * 5),
    ],
)
def test_products(op: str, shapes: list[tuple[int, ...]], flops: int) -> None:
    operands = [_value(f"x{k}", *shape) for k, shape in enumerate(shapes)]
    out = tuple(torch.ops.aten.__getattr__(op.split(".")[1])(*[torch.zeros(shape) for shape in shapes]).shape)
    found = work_of(_node(op, *operands, out=_value("y", *out)))
    assert found.forward_flops == flops
    factors = [0 if op.startswith("aten.addmm") and k == 0 else flops for k in range(len(shapes))]
    assert list(found.gradient_flops) == factors


def test_einsum_multiplies_pair_by_pair_and_sums_lone_indices_first() -> None:
    def flops(equation: str, *shapes: tuple[int, ...]) -> int:
        operands = tuple(_value(f"x{k}", *shape) for k, shape in enumerate(shapes))
        out = torch.einsum(equation, *[torch.zeros(shape) for shape in shapes]).shape
        args = (equation, tuple(Ref(v.name) for v in operands))
        return work_of(Call(Node("aten.einsum.default", args, (), (_value("y", *out),)), operands)).forward_flops

    assert flops("bsd,bsec->becd", (2, 3, 4), (2, 3, 5, 6)) == 2 * 2 * 3 * 4 * 5 * 6
    assert flops("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)) == 2 * 2 * 3 * 4 + 2 * 2 * 4 * 5
    assert flops("ij,jk->k", (100, 2), (2, 3)) == max(2 * 2 * 3, 200)
    assert flops("ii,ij->j", (4, 4), (4, 5)) == 20


def test_experts_are_picked_not_summed() -> None:
    tokens, stack, ends = _value("x", 16, 8), _value("w", 4, 8, 24), _value("e", 4, dtype="i32", grad=False)
    found = work_of(_node("aten._grouped_mm.default", tokens, stack, ends, out=_value("y", 16, 24)))
    assert found.forward_flops == 2 * 16 * 8 * 24
    assert found.gradient_flops == (found.forward_flops, found.forward_flops, 0)


def test_transposed_convolution_counts_places_of_the_input() -> None:
    x, weight = _value("x", 2, 6, 5, 5), _value("w", 6, 4, 3, 3)
    found = work_of(_node("aten.conv_transpose2d.input", x, weight, out=_value("y", 2, 4, 7, 7)))
    assert found.forward_flops == 2 * x.elements * 4 * 9


def test_attention_costs_two_and_a_half_times_as_much_backward() -> None:
    query, key, value = _value("q", 2, 6, 5, 8), _value("k", 2, 3, 7, 8), _value("v", 2, 3, 7, 4)
    out = _value("y", 2, 6, 5, 4)
    call = _node("aten.scaled_dot_product_attention.default", query, key, value, out=out)
    forward = 2 * 2 * 6 * 5 * 7 * (8 + 4)
    assert work_of(call).forward_flops == forward
    # Scores and their gradient, (d + e) each, then d for the query, d for the keys, e for the values.
    assert sum(work_of(call).gradient_flops) == 2 * 2 * 6 * 5 * 7 * (8 + 4 + 8 + 8 + 4)


def test_recurrent_layers_meet_every_weight_at_every_step() -> None:
    lstm = torch.nn.LSTM(6, 5, num_layers=2, batch_first=True)
    x, state = torch.zeros(3, 7, 6), torch.zeros(2, 3, 5)
    given = [_value("x", *x.shape, grad=False), *(_value(n, *state.shape, grad=False) for n in "hc")]
    weights = [_value(name, *p.shape) for name, p in lstm.named_parameters()]
    refs = tuple(Ref(v.name) for v in given[1:]), tuple(Ref(v.name) for v in weights)
    args = (Ref("x"), *refs, True, 2, 0.0, True, False, True)
    results = (_value("y", 3, 7, 5), _value("h1", 2, 3, 5), _value("c1", 2, 3, 5))
    found = _check(Call(Node("aten.lstm.input", args, (), results), (*given, *weights)))
    assert found.forward_flops == 2 * 3 * 7 * (20 * 6 + 20 * 5 + 20 * 5 + 20 * 5)
    assert sum(found.gradient_flops) == 2 * found.forward_flops
    assert found.kernels == (14, 14)


# Bytes


def test_a_product_reads_operands_and_writes_results() -> None:
    x, weight, bias = _value("x", 8, 4, grad=False), _value("w", 6, 4), _value("b", 6)
    call = _node("aten.linear.default", x, weight, bias, out=_value("y", 8, 6), saved=Saved(("x",)))
    assert work_of(call) == Work(
        dtype="f32",
        forward_flops=2 * 8 * 4 * 6,
        gradient_flops=(0, 2 * 8 * 4 * 6, 0),
        forward_bytes=(128, 96, 24, 192),
        gradient_bytes=(128, 96, 24, 2 * 192),  # the result's gradient is read for the weight and for the bias
        kernels=(1, 2),
    )


def test_without_gradient_nothing_goes_back() -> None:
    x, y = _value("x", 8, 4, grad=False), _value("y", 8, 4, grad=False)
    assert work_of(_node("aten.relu.default", x, out=y)) == Work("f32", 32, (0,), (128, 128), (0, 0), (1, 0))


def test_an_embedding_reads_rows_and_writes_a_dense_gradient() -> None:
    table, tokens = _value("w", 1000, 4), _value("t", 3, dtype="i64", grad=False)
    found = work_of(_node("aten.embedding.default", table, tokens, out=_value("y", 3, 4), saved=Saved(("t",))))
    assert found == Work("f32", 12, (12, 0), (0, 24, 96), (16000, 24, 48), (1, 1))


def test_what_an_op_keeps_of_its_own_goes_with_its_biggest_tensor() -> None:
    logits, target = _value("x", 8, 16), _value("t", 8, dtype="i64", grad=False)
    call = _node("aten.cross_entropy_loss.default", logits, target, out=_value("y"), saved=Saved(("t",), 512))
    assert work_of(call).forward_bytes == (1024, 64, 4)
    assert work_of(call).gradient_bytes == (1024, 64, 4)


@pytest.mark.parametrize("op", ["view", "reshape", "flatten", "transpose", "permute", "unsqueeze", "detach", "t"])
def test_views_are_free(op: str) -> None:
    for example in samples_of(f"aten.{op}"):
        found = work_of(as_call(example)[0])
        assert not any((found.forward_flops, *found.gradient_flops, *found.forward_bytes, *found.gradient_bytes))
        assert found.kernels == (0, 0)


def test_the_gradient_of_a_part_is_copied() -> None:
    part = work_of(_node("aten.slice.Tensor", _value("x", 4, 6), 0, 1, 3, out=_value("y", 2, 6)))
    assert part == Work("f32", 0, (0,), (0, 0), (96, 48), (0, 1))
    halves = Node("aten.split.Tensor", (Ref("x"), 2), (), (_value("y", 2, 6), _value("z", 2, 6)))
    assert work_of(Call(halves, (_value("x", 4, 6),))).gradient_bytes == (96, 48, 48)


@pytest.mark.parametrize(("p", "train", "free"), [(0.1, True, False), (0.0, True, True), (0.1, False, True)])
def test_dropout_that_drops_nothing_is_free(p: float, train: bool, free: bool) -> None:
    found = work_of(_node("aten.dropout.default", _value("x", 4), p, train, out=_value("y", 4)))
    assert (found.kernels == (0, 0)) == free == (not any(found.forward_bytes))


def test_a_conversion_to_the_same_dtype_is_free() -> None:
    def converted(dtype: str) -> Work:
        args = (Ref("x"), Atom("dtype", dtype))
        return work_of(Call(Node("aten.to.dtype", args, (), (_value("y", 4, dtype=dtype),)), (_value("x", 4),)))

    assert not any(converted("f32").forward_bytes)
    assert converted("bf16").forward_bytes == (16, 8)


def test_tensors_that_only_lend_their_shape_are_not_read() -> None:
    x, y = _value("x", 4), _value("y", 4, grad=False)
    assert work_of(_node("aten.zeros_like.default", x, out=y)).forward_bytes == (0, 16)


# Autocast


def test_autocast_computes_in_its_dtype_and_casts() -> None:
    x, weight, y = _value("x", 8, 4, dtype="bf16"), _value("w", 6, 4), _value("y", 8, 6, dtype="bf16")
    about = {"context": Context("cuda:bf16"), "saved": Saved(("x",), 48)}  # the narrow copy of the weight is kept
    found = work_of(_node("aten.linear.default", x, weight, out=y, **about))
    assert found.dtype == "bf16"
    assert found.forward_bytes == (64, 96 + 48 + 48, 96)
    assert found.gradient_bytes == (64 + 64, 96 + 48 + 48 + 48, 2 * 96)
    assert found.kernels == (2, 3)


def test_autocast_leaves_other_ops_and_double_precision_alone() -> None:
    x, y = _value("x", 8, 4), _value("y", 8, 4)
    assert work_of(_node("aten.relu.default", x, out=y, context=Context("cuda:bf16"))).dtype == "f32"
    off = _node("aten.mm.default", x, _value("w", 4, 4), out=y, context=Context("cuda:off"))
    assert work_of(off).dtype == "f32"
    wide = [_value("x", 8, 4, dtype="f64"), _value("w", 4, 4, dtype="f64")]
    mm = _node("aten.mm.default", *wide, out=_value("y", 8, 4, dtype="f64"), context=Context("cpu:bf16"))
    assert work_of(mm).dtype == "f64"


def test_a_model_under_autocast() -> None:
    module, batch = models.load(zoo.SMALL["mlp"])
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(module, batch)
    found = [_check(call) for call in _calls(graph) if is_product(call.node.op)]
    assert found
    assert {w.dtype for w in found} == {"bf16"}


# The text of a call


def test_the_text_of_a_call() -> None:
    values = {v.name: v for v in (_value("x", 32, 128, 768), _value("w", 768, 768), _value("b", 768))}
    node = Node("aten.linear.default", (Ref("x"), Ref("w"), Ref("b")), (), (_value("y", 32, 128, 768),))
    assert call_text(node, values) == "aten.linear.default(f32[32, 128, 768], f32[768, 768], f32[768])"
    under = replace(node, context=Context("cuda:bf16"))
    assert call_text(under, values).endswith("f32[768]) autocast bf16")
    assert call_text(under, values, "causal").endswith("f32[768]) autocast bf16 by causal")
    assert call_text(node, values, "sfb") == call_text(node, values)


def test_the_text_names_settings_that_are_not_defaults() -> None:
    values = {v.name: v for v in (_value("x", 2, 3, 9, 9), _value("w", 4, 3, 3, 3))}
    node = Node("aten.conv2d.default", (Ref("x"), Ref("w"), None, (2, 2), (0, 0)), (), (_value("y", 2, 4, 4, 4),))
    assert call_text(node, values) == "aten.conv2d.default(f32[2, 3, 9, 9], f32[4, 3, 3, 3], stride=[2, 2])"
    joined = Node("aten.cat.default", ((Ref("x"), Ref("x")), 1), (), (_value("y", 2, 6, 9, 9),))
    assert call_text(joined, values) == "aten.cat.default([f32[2, 3, 9, 9], f32[2, 3, 9, 9]], dim=1)"
    scaled = Node("aten.mul.Scalar", (Ref("x"), 3), (), (_value("y", 2, 3, 9, 9),))
    assert call_text(scaled, values) == "aten.mul.Scalar(f32[2, 3, 9, 9])"


def test_every_sampled_call_has_a_text_of_one_line() -> None:
    for call in _sampled():
        text = call_text(call.node, {value.name: value for value in call.operands})
        assert text.startswith(f"{call.node.op}(")
        assert "\n" not in text


# Exchanges


def _rule(call: Call, how: str) -> Rule:
    return next(rule for rule in call_rules(call) if rule.how == how)


def _both(*sizes: int) -> tuple[Exchanged, ...]:
    return tuple(Exchanged("all_reduce", size, backward) for size in sizes for backward in (False, True))


def _layer_norm(grad: bool = True, dtype: str = "f32") -> Call:
    x, scale = _value("x", 4, 5, 6, grad=grad, dtype=dtype), _value("w", 6, grad=grad, dtype=dtype)
    args = (Ref("x"), (6,), Ref("w"))
    y = _value("y", 4, 5, 6, grad=grad, dtype=dtype)
    return Call(Node("aten.layer_norm.default", args, (), (y,)), (x, scale))


def test_a_cut_layer_norm_adds_up_twice_each_way() -> None:
    call = _layer_norm()
    assert exchanges(call, _rule(call, "layer_norm")) == _both(80, 80)


def test_sums_are_in_the_dtype_they_are_added_up_in() -> None:
    call = _layer_norm(dtype="bf16")
    assert exchanges(call, _rule(call, "layer_norm")) == _both(80, 80)


def test_without_gradient_nothing_is_exchanged_backward() -> None:
    forward = (Exchanged("all_reduce", 80, False), Exchanged("all_reduce", 80, False))
    call = _layer_norm(grad=False)
    assert exchanges(call, _rule(call, "layer_norm")) == forward
    call = _layer_norm()
    outside = replace(call, node=replace(call.node, context=Context(grad=False)))
    assert exchanges(outside, _rule(call, "layer_norm")) == forward


def test_the_largest_has_no_gradient() -> None:
    call = _node("aten.softmax.int", _value("x", 4, 6), -1, out=_value("y", 4, 6))
    assert exchanges(call, _rule(call, "softmax")) == (Exchanged("all_reduce", 16, False), *_both(16))


def test_a_result_that_is_the_same_everywhere_sends_nothing_back() -> None:
    x = _value("x", 4, 6)
    norm = Call(Node("aten.linalg_vector_norm.default", (Ref("x"), 2.0, (1,)), (), (_value("y", 4),)), (x,))
    assert exchanges(norm, _rule(norm, "vector_norm")) == (Exchanged("all_reduce", 16, False),)


def test_a_mean_over_rows_asks_for_their_count() -> None:
    logits, target = _value("x", 8, 16), _value("t", 8, dtype="i64", grad=False)
    call = _node("aten.cross_entropy_loss.default", logits, target, out=_value("y"))
    assert exchanges(call, _rule(call, "mean_of_rows")) == (Exchanged("all_reduce", 4, False),)


def test_plain_rules_exchange_nothing() -> None:
    call = _layer_norm()
    assert exchanges(call, Rule((R, R), (R,))) == ()
    assert exchanges(call, Rule((S(0), I), (S(0),), "sfb")) == ()


def test_no_sampled_talk_needs_the_estimate() -> None:
    assert [f"{call.node.op} by {rule}" for call, rule in _talking_rules() if asked(call, rule) is None] == []


def test_what_talks_is_a_generator_function() -> None:
    """`asked` takes anything else for silent without running it."""
    for call, rule in _talking_rules():
        implementation = work._talk(call, rule).implementation
        says_so = "Talking" in str(inspect.signature(implementation).return_annotation)
        assert inspect.isgeneratorfunction(implementation) == says_so, (call.node.op, rule.how)


def _with(monkeypatch: pytest.MonkeyPatch, talking: Any) -> tuple[Exchanged, ...]:
    call = _layer_norm()
    monkeypatch.setattr(work, "_talk", lambda call, rule: Talk("D0", "layer_norm", talking, P))
    return exchanges(call, _rule(call, "layer_norm"))


def test_what_meta_tensors_refuse_is_tried_on_fake_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(local: Local) -> Talking:
        if local.tensors[0].is_meta:
            # What torch raises for an op that has no kernel for meta tensors.
            raise NotImplementedError("no kernel")
        yield Ask(local.tensors[0].sum((0, 1)), P, R)

    assert _with(monkeypatch, picky) == _both(24)


def test_what_runs_nowhere_is_taken_to_exchange_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def looking(local: Local) -> Talking:
        yield Ask(local.tensors[0] * float(local.tensors[0].sum().item()), P, R)

    assert _with(monkeypatch, looking) == _both(4 * 5 * 6 * 4)


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ProgramError, match="no implementation 'hearsay'"):
        exchanges(_layer_norm(), Rule((R, R), (R,), "hearsay"))
