"""Talking implementations in half precision: close to one device, and in the dtype of the node's result."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lopsided.ir.graph import DTYPE_NAMES, Context
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import call_op, resolve_op, surroundings
from lopsided.ir.placement import Placement, join_pieces
from lopsided.ops.derive import call_rules
from lopsided.ops.op import Call
from lopsided.ops.sample import Sample, sample
from lopsided.ops.simulated_devices import Parts, SeededRandomness, cotangent, run_rule, sum_parts
from lopsided.ops.trial import distribute, relative_error, run_whole
from lopsided.ops.validator import as_call

SHARES = (0.5, 0.2, 0.3)
HALVES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
ROWS, CLASSES = 3000, 12

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")


def _reals(dtype: torch.dtype, *shape: int, scale: float = 3.0, grad: bool = True, seed: int = 0) -> Tensor:
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.4
    return (drawn * scale).to(dtype).requires_grad_(grad)


def _classes(*shape: int) -> Tensor:
    return torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(7))


def _samples(dtype: torch.dtype, parameters: torch.dtype) -> list[Sample]:
    """Calls with a talking rule; `parameters` are those that autocast keeps in float32."""

    def half(*shape: int, scale: float = 3.0) -> Tensor:
        return _reals(dtype, *shape, scale=scale)

    def parameter(*shape: int, grad: bool = True) -> Tensor:
        return (_reals(parameters, *shape).detach().abs() + 0.1).requires_grad_(grad)

    rows, running = half(6, 512), (parameter(8, grad=False), parameter(8, grad=False))
    cross_entropy, batch_norm = "aten.cross_entropy_loss.default", "aten.batch_norm.default"
    reduced = [
        sample("aten.softmax.int", rows, -1),
        sample("aten.log_softmax.int", rows, -1),
        sample("aten.logsumexp.default", rows, [1]),
        sample("aten.linalg_vector_norm.default", half(6, 512, scale=90.0), 2, [1]),
        sample("aten.linalg_vector_norm.default", rows, 3, [1]),
        sample("aten.var.correction", rows, [1]),
        sample("aten.var_mean.correction", half(6, 512, scale=90.0), [1]),
        sample("aten.std.correction", half(ROWS), [0], correction=0),
        sample("aten.amax.default", torch.zeros(ROWS, dtype=dtype, requires_grad=True), [0]),
        sample("aten.cumsum.default", half(4, 300), 1),
    ]
    norms = [
        sample("aten.layer_norm.default", half(6, 512, scale=90.0), [512], parameter(512), parameter(512)),
        sample("aten.rms_norm.default", half(6, 512, scale=90.0), [512], parameter(512)),
        sample("aten.rms_norm.default", half(6, 512, scale=1e-2), [512]),
        sample("lopsided.batch_norm.default", half(ROWS, 8), parameter(8), parameter(8), *running, 0.1, 1e-5),
        sample(batch_norm, half(ROWS, 8), parameter(8), parameter(8), None, None, True, 0.1, 1e-5, False),
    ]
    losses = [
        sample(cross_entropy, half(ROWS, CLASSES), _classes(ROWS)),
        # With more rows one device overflows in float16: it adds up what smoothing adds before it divides.
        sample(cross_entropy, half(ROWS // 2, CLASSES), _classes(ROWS // 2), None, 1, 3, 0.1),
        sample(cross_entropy, half(30, CLASSES, 100), _classes(30, 100)),
    ]
    return [*reduced, *norms, *losses]


def _talking(call: Call, exact: bool = True) -> list[Rule]:
    return [rule for rule in call_rules(call, exact=exact) if rule.how not in ("plain", "sfb")]


def _joined(parts: Parts, placement: Placement) -> Tensor:
    wide = [part.detach().float() for part in parts]
    return (
        join_pieces(wide, placement) if placement.is_shard else sum_parts(wide) if placement.kind == "P" else wide[-1]
    )


def _under(call: Call, autocast: str) -> Call:
    """The call as capture would note it under autocast: with the dtypes its results then have."""
    if not autocast:
        return call
    context = Context(autocast)
    operands = [torch.zeros(v.shape, dtype=v.torch_dtype) for v in call.operands]
    node = replace(call.node, context=context)
    with surroundings(context):
        made = call_op(node, operands, torch.device("cpu"))
    outs = list(made) if isinstance(made, tuple | list) else [made]
    values = [replace(v, dtype=DTYPE_NAMES[t.dtype]) for v, t in zip(node.results, outs, strict=True)]
    return Call(replace(node, results=tuple(values)), call.operands)


@dataclass(frozen=True)
class Outcome:
    """Results, and the gradients of operands that have one."""

    results: list[Tensor]
    gradients: list[Tensor]


def _one_device(call: Call, tensors: list[Tensor], cotangents: list[Tensor]) -> Outcome:
    leaves = [t.detach().clone().requires_grad_(v.grad) for t, v in zip(tensors, call.operands, strict=True)]
    made = run_whole(call, leaves, SeededRandomness(0, (1.0,)))
    trained = [k for k, out in enumerate(made) if out.requires_grad]
    torch.autograd.backward([made[k] for k in trained], [cotangents[k].to(made[k].dtype) for k in trained])
    return Outcome([out.detach() for out in made], [_gradient(leaf) for leaf in leaves if leaf.requires_grad])


def _by_rule(call: Call, tensors: list[Tensor], cotangents: list[Tensor], rule: Rule) -> Outcome:
    generator = torch.Generator().manual_seed(1)
    placed = [
        [part.detach().clone().requires_grad_(v.grad) for part in distribute(t, need, SHARES, generator)]
        for t, need, v in zip(tensors, rule.needs, call.operands, strict=True)
    ]
    made = run_rule(call, rule, placed, SHARES, SeededRandomness(0, SHARES))
    ends, seeds = [], []
    for parts, give, value, dy in zip(made, rule.gives, call.node.results, cotangents, strict=True):
        assert [part.dtype for part in parts] == [value.torch_dtype] * len(SHARES)
        if parts[0].requires_grad:
            ends += parts
            seeds += distribute(dy.to(value.torch_dtype), cotangent(give), SHARES, generator)
    torch.autograd.backward(ends, seeds)
    return Outcome(
        [_joined(parts, give) for parts, give in zip(made, rule.gives, strict=True)],
        [
            _joined([_gradient(part) for part in parts], cotangent(need))
            for parts, need, value in zip(placed, rule.needs, call.operands, strict=True)
            if value.grad
        ],
    )


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _in_float64(call: Call) -> Call:
    """No sample here names a dtype in its arguments."""
    results = tuple(replace(value, dtype="f64") for value in call.node.results)
    operands = tuple(replace(v, dtype="f64") if v.torch_dtype.is_floating_point else v for v in call.operands)
    return Call(replace(call.node, results=results, context=Context()), operands)


def _check(call: Call, tensors: list[Tensor], rule: Rule, tolerance: float) -> None:
    cotangents = [_reals(torch.float64, *value.shape, grad=False, seed=1) for value in call.node.results]
    expected = _one_device(call, tensors, cotangents)
    assert [t.dtype for t in expected.results] == [value.torch_dtype for value in call.node.results]
    found = _by_rule(call, tensors, cotangents, rule)
    for result, one in zip(found.results, expected.results, strict=True):
        assert relative_error(result, one.float()) < tolerance
    # Kernels make gradients from results that are rounded already: what is exact is the judge of both.
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    exact = _one_device(_in_float64(call), wide, cotangents)
    for gradient, one, truth in zip(found.gradients, expected.gradients, exact.gradients, strict=True):
        allowed = relative_error(one.double(), truth) + tolerance
        assert relative_error(gradient.double(), truth) < min(allowed, 5 * tolerance)


@pytest.mark.parametrize("autocast", ["", "cpu"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_talks_in_half_precision_are_those_of_one_device(dtype: torch.dtype, autocast: str) -> None:
    under = f"{autocast}:{DTYPE_NAMES[dtype]}" if autocast else ""
    # CPU kernels take float32 parameters beside bfloat16, not beside float16.
    mixed = bool(autocast) and dtype == torch.bfloat16
    for example in _samples(dtype, torch.float32 if mixed else dtype):
        call, tensors = as_call(example)
        call = _under(call, under)
        rules = _talking(call)
        assert rules, f"{example} has no talking rule"
        for rule in rules:
            try:
                _check(call, tensors, rule, TOLERANCE[dtype])
            except Exception as error:
                raise AssertionError(f"{example} by {rule} under {under or 'no autocast'}") from error


def test_local_batch_statistics_keep_the_dtype_of_the_node() -> None:
    x, scale = _reals(torch.bfloat16, 40, 8), _reals(torch.float32, 8)
    running = [torch.zeros(8), torch.ones(8)]
    example = sample("lopsided.batch_norm.default", x, scale, scale.detach(), *running, 0.1, 1e-5)
    call, tensors = as_call(example)
    (rule,) = [rule for rule in _talking(call, exact=False) if rule.how == "batch_norm_local"]
    shares = (0.0, 0.6, 0.4)
    placed = [distribute(t, need, shares, torch.Generator()) for t, need in zip(tensors, rule.needs, strict=True)]
    made = run_rule(call, rule, placed, shares, SeededRandomness(0, shares))
    for parts, value in zip(made, call.node.results, strict=True):
        assert {part.dtype for part in parts} == {value.torch_dtype}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_mean_does_not_overflow(dtype: torch.dtype) -> None:
    """The sums of these losses are beyond what float16 can hold, their means are not: not even one device can."""
    errors, rows = "aten.mse_loss.default", "aten.cross_entropy_loss.default"
    for example in (
        sample(errors, _reals(dtype, ROWS, scale=60.0), _reals(dtype, ROWS, seed=1)),
        sample(rows, _reals(dtype, ROWS, CLASSES, scale=99.0), _classes(ROWS)),
    ):
        call, tensors = as_call(example)
        expected = resolve_op(call.node.op)(*(t.float() if t.is_floating_point() else t for t in tensors))
        rules = [rule for rule in call_rules(call) if rule.gives[0].kind == "P"]
        assert rules
        for rule in rules:
            pairs = zip(tensors, rule.needs, strict=True)
            placed = [distribute(t, need, SHARES, torch.Generator()) for t, need in pairs]
            parts = run_rule(call, rule, placed, SHARES, SeededRandomness(0, SHARES))[0]
            assert relative_error(sum_parts([part.float() for part in parts]), expected) < TOLERANCE[dtype]


def test_local_implementations_under_autocast_give_the_dtype_of_the_node() -> None:
    """Float32 operands, bfloat16 results; a device without a piece adds its bias or its zeros in that dtype, too."""
    q, k, v = (_reals(torch.float32, 2, 4, 5, 6, seed=seed) for seed in range(3))
    shares = (0.0, 0.6, 0.4)
    for example in (
        sample("aten.scaled_dot_product_attention.default", q, k, v, dropout_p=0.4),
        sample("aten.scaled_dot_product_attention.default", q, k, v, is_causal=True),
        sample("aten.conv1d.default", *(_reals(torch.float32, *shape) for shape in ((2, 4, 7), (6, 4, 3), (6,)))),
        sample("aten.linear.default", *(_reals(torch.float32, *shape) for shape in ((5, 4), (6, 4), (6,)))),
    ):
        call, tensors = as_call(example)
        call = _under(call, "cpu:bf16")
        assert call.node.results[0].torch_dtype == torch.bfloat16
        for rule in call_rules(call):
            pairs = zip(tensors, rule.needs, strict=True)
            placed = [distribute(t, need, shares, torch.Generator().manual_seed(1)) for t, need in pairs]
            (parts,) = run_rule(call, rule, placed, shares, SeededRandomness(0, shares))
            assert {part.dtype for part in parts} == {torch.bfloat16}, f"{example} by {rule}"
            (whole,) = run_whole(call, tensors, SeededRandomness(0, (1.0,)))
            assert relative_error(_joined(parts, rule.gives[0]), whole.float()) < TOLERANCE[torch.bfloat16]
