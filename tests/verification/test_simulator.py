"""Conversions are what the algebra says, forward and transposed; unequal devices compute what one does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lopsided
from lopsided.errors import CaptureError, ProgramError, RuleError, SharesError
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, P, Placement, R, S, cut, join_pieces
from lopsided.ir.program import Program, RuleBook, check_program
from lopsided.ops.derive import derive_rules
from lopsided.ops.local_kernel import rule_pieces
from lopsided.ops.op import Call
from lopsided.ops.simulated_devices import SeededRandomness, convert, cotangent, move, run_rule, sum_parts
from lopsided.ops.trial import distribute
from tests.support.models import ByHand, example

PLACEMENTS = (I, R, P, S(0), S(1), S(1, 1, 2), S(1, 2, 1), S(1, 3, 2))
PAIRS = [(a, b) for a in PLACEMENTS for b in PLACEMENTS if a != b]
SHARES = ((0.5, 0.3, 0.2), (0.0, 0.7, 0.3), (0.2, 0.0, 0.8), (1.0, 0.0), (1.0,), (0.1, 0.1, 0.1, 0.7))
SHAPE = (5, 12, 2)


def whole(parts: list[Tensor], placement: Placement) -> Tensor:
    """The value that devices hold together."""
    if placement.is_shard:
        return join_pieces(parts, placement)
    if placement == P:
        return sum_parts(parts)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def product(parts: list[Tensor], gradients: list[Tensor], placement: Placement) -> float:
    """The inner product of a value and a cotangent: of one copy if invariant, else over all devices."""
    terms = [(a * b).sum().item() for a, b in zip(parts, gradients, strict=True)]
    return terms[0] if placement == I else sum(terms)


def draw(placement: Placement, shares: tuple[float, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    return [part.clone() for part in distribute(value, placement, shares, generator)]


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize(("source", "to"), PAIRS, ids=lambda p: str(p))
def test_a_conversion_keeps_the_value_and_its_backward_is_its_transpose(
    source: Placement, to: Placement, shares: tuple[float, ...]
) -> None:
    x = [part.requires_grad_() for part in draw(source, shares, 0)]
    y = convert(x, source, to, SHAPE, shares)
    assert torch.allclose(whole(y, to), whole(x, source), rtol=1e-12)
    pieces = cut(to.length(SHAPE), shares) if to.is_shard else ()
    assert [tuple(part.shape) for part in y] == [to.local_shape(SHAPE, pieces, d) for d in range(len(shares))]
    dy = draw(cotangent(to), shares, 1)
    torch.autograd.backward(y, dy)
    dx = [part.grad for part in x]
    assert all(gradient is not None for gradient in dx)
    # Along a chain rule of identities the cotangent's value stays, and <Ax, y> = <x, Aᵀy>.
    assert torch.allclose(whole(dx, cotangent(source)), whole(dy, cotangent(to)), rtol=1e-12)
    assert product(y, dy, to) == pytest.approx(product(x, dx, source), rel=1e-9)


TABLE = {
    # from → to: forward, backward, as the design has them
    "I→R": ("nothing", "all-reduce"),
    "I→S0": ("slice", "all-gather"),
    "I→P": ("keep on one", "nothing"),
    "R→I": ("nothing", "keep on one"),
    "R→S0": ("slice", "place in zeros"),
    "R→P": ("keep on one", "keep on one"),
    "S0→I": ("all-gather", "slice"),
    "S0→R": ("all-gather", "reduce-scatter"),
    "S0→S1": ("all-to-all", "all-to-all"),
    "S0→P": ("place in zeros", "slice"),
    "P→I": ("all-reduce", "nothing"),
    "P→R": ("all-reduce", "all-reduce"),
    "P→S0": ("reduce-scatter", "all-gather"),
}
BY_NAME = {str(p): p for p in PLACEMENTS}


def by_hand(how: str, parts: list[Tensor], a: Placement, b: Placement, shares: tuple[float, ...]) -> list[Tensor]:
    """What a collective does, with dense arrays and nothing of the library but the lengths of pieces."""
    rows = torch.tensor(cut(SHAPE[0], shares)).cumsum(0).tolist()
    columns = torch.tensor(cut(SHAPE[1], shares)).cumsum(0).tolist()
    bounds = [(0 if d == 0 else rows[d - 1], rows[d]) for d in range(len(shares))]
    if how == "nothing":
        return parts
    if how == "keep on one":
        return [part if d == 0 else part * 0 for d, part in enumerate(parts)]
    if how == "all-reduce":
        return [sum(parts, torch.zeros(())) for _ in parts]
    if how == "slice":
        return [part[low:high] for part, (low, high) in zip(parts, bounds, strict=True)]
    if how == "all-gather":
        return [torch.cat(parts) for _ in parts]
    if how == "reduce-scatter":
        return [sum(parts, torch.zeros(()))[low:high] for low, high in bounds]
    if how == "place in zeros":
        padded = [torch.zeros(SHAPE, dtype=torch.float64) for _ in parts]
        for pad, part, (low, high) in zip(padded, parts, bounds, strict=True):
            pad[low:high] = part
        return padded
    ends = [(0 if d == 0 else columns[d - 1], columns[d]) for d in range(len(shares))]
    if a == S(0):
        return [torch.cat(parts)[:, low:high] for low, high in ends]
    return [torch.cat(parts, 1)[low:high] for low, high in bounds]


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_the_design(name: str, shares: tuple[float, ...]) -> None:
    source, to = (BY_NAME[part] for part in name.split("→"))
    forward, backward = TABLE[name]
    x = [part.requires_grad_() for part in draw(source, shares, 2)]
    y = convert(x, source, to, SHAPE, shares)
    for found, expected in zip(y, by_hand(forward, [p.detach() for p in x], source, to, shares), strict=True):
        torch.testing.assert_close(found.detach(), expected)
    dy = draw(cotangent(to), shares, 3)
    torch.autograd.backward(y, dy)
    for part, expected in zip(x, by_hand(backward, dy, to, source, shares), strict=True):
        torch.testing.assert_close(part.grad, expected)


def test_the_table_is_complete() -> None:
    kinds = {(a.kind, b.kind) for a, b in PAIRS if not (a.is_shard and b.is_shard)} | {("S", "S")}
    assert {tuple(part[0] for part in name.split("→")) for name in TABLE} == kinds
    assert {(cotangent(b).kind, cotangent(a).kind) for a, b in kinds_as_placements(kinds)} == kinds


def kinds_as_placements(kinds: set[tuple[str, str]]) -> list[tuple[Placement, Placement]]:
    return [
        (Placement(a, 0) if a == "S" else Placement(a), Placement(b, 1) if b == "S" else Placement(b)) for a, b in kinds
    ]


@given(st.lists(st.sampled_from(PLACEMENTS), min_size=2, max_size=6), st.sampled_from(SHARES))
def test_detours_change_nothing(chain: list[Placement], shares: tuple[float, ...]) -> None:
    x = [part.requires_grad_() for part in draw(chain[0], shares, 4)]
    y = x
    for source, to in itertools.pairwise(chain):
        y = convert(y, source, to, SHAPE, shares)
    assert torch.allclose(whole(y, chain[-1]), whole(x, chain[0]), rtol=1e-10)
    if y is not x:
        dy = draw(cotangent(chain[-1]), shares, 5)
        torch.autograd.backward(y, dy)
        dx = [torch.zeros_like(p) if p.grad is None else p.grad for p in x]
        assert torch.allclose(whole(dx, cotangent(chain[0])), whole(dy, cotangent(chain[-1])), rtol=1e-10)


def test_whole_numbers_convert_too() -> None:
    value = torch.arange(12).reshape(3, 4)
    for source in (I, R, P, S(0)):
        parts = move([value, value], I, source, value.shape, (0.6, 0.4))
        for to in (I, R, P, S(1)):
            assert torch.equal(whole(convert(parts, source, to, value.shape, (0.6, 0.4)), to), value)


# Programs


def agree(found: lopsided.Simulation, alone: lopsided.Simulation) -> None:
    assert found.spread < 1e-9
    torch.testing.assert_close(found.loss, alone.loss, rtol=1e-9, atol=1e-9)
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(
            found.gradients[name], gradient, rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name, buffer in alone.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-9, atol=1e-9)


def with_rule(book: RuleBook, op: str, wanted: Callable[[Rule], bool]) -> Program:
    """Everything whole, but for the nodes of one op: those run by the first rule that is wanted, if any."""
    graph = book.graph
    program = lopsided.one_device(graph)
    facts = dict(program.leaves)
    steps = []

    def chain(name: str, need: Placement) -> tuple[Placement, ...]:
        have = facts[name]
        return (have,) if have == need else (have, need)

    for step in program.steps:
        rule = next(filter(wanted, book.rules[step.node.name]), step.rule) if step.node.op == op else step.rule
        steps.append(replace(step, rule=rule, chains=tuple(map(chain, step.node.operands, rule.needs))))
        facts.update((value.name, give) for value, give in zip(step.node.results, rule.gives, strict=True))
    made = replace(
        program,
        steps=tuple(steps),
        loss=chain(graph.loss, I),
        updates=tuple(chain(name, I) for _, name in graph.updates),
    )
    check_program(made, book)
    return made


def kth_rules(book: RuleBook, op: str, k: int) -> list[Rule]:
    return [book.rules[node.name][k] for node in book.graph.nodes if node.op == op and k < len(book.rules[node.name])]


def double(model: nn.Module, x: Tensor | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
    return model.double(), {"x": (example() if x is None else x).double()}


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_factors_gathered_give_the_whole_gradient_on_every_device(shares: tuple[float, ...]) -> None:
    model, batch = double(ByHand(lambda m, x: m.lin(m.lin(x)).pow(2).sum()))
    book = derive_rules(lopsided.capture(model, batch))
    alone = lopsided.simulate(lopsided.one_device(book.graph), model, batch, (1.0,))
    for first in (I, S(0)):  # rows cut, weight whole; columns of the weight cut, input whole
        program = with_rule(
            book, "aten.linear.default", lambda r, f=first: r.how == "sfb" and (r.needs[0] == I) == (f == I)
        )
        assert any(step.rule.how == "sfb" for step in program.steps)
        agree(lopsided.simulate(program, model, batch, shares), alone)


def test_every_rule_of_every_node_by_itself() -> None:
    def mixed(m: Any, x: Tensor) -> Tensor:
        h = F.layer_norm(m.lin(x), (6,), m.lin.bias, None)
        a, b = h.reshape(2, 2, 6).chunk(2, dim=2)
        scores = (a @ b.transpose(1, 2)).softmax(-1)
        c = torch.cat([scores @ b, a], dim=1)
        gate = torch.where(c > 0, c, c * 0.1)
        return (gate.mean(dim=1) * c.amax(dim=1)).sum() / c.shape[0] + h.std()

    model, batch = double(ByHand(mixed))
    book = derive_rules(lopsided.capture(model, batch))
    alone = lopsided.simulate(lopsided.one_device(book.graph), model, batch, (1.0,))
    for op in dict.fromkeys(node.op for node in book.graph.nodes):
        most = max(len(book.rules[node.name]) for node in book.graph.nodes if node.op == op)
        for k in range(most):
            program = with_rule(book, op, lambda rule, k=k, name=op: rule in kth_rules(book, name, k))
            agree(lopsided.simulate(program, model, batch, (0.5, 0.0, 0.3, 0.2)), alone)


HARD: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a value used in many placements": lambda m, x: (lambda h: (h * h).sum() + (h @ h.t()).sum() + h.sum(0).prod())(
        m.lin(x)
    ),
    "a parameter used twice, transposed": lambda m, x: (m.lin(x) @ m.lin.weight * m.lin.bias).pow(2).sum(),
    "a parameter that is the loss": lambda m, x: m.lin.weight.pow(2).sum() + m.lin.bias.sum() * x.sum(),
    "scalars": lambda m, x: (m.lin(x).sum() * m.lin.bias[0] + m.lin.weight.mean()).exp().log1p() * x[0, 0],
    "expanded values": lambda m, x: (m.lin(x)[:, :1].expand(4, 6) * m.lin.bias.expand(4, 6) + x).pow(2).mean(),
    "results nobody uses": lambda m, x: (
        lambda h: h.max(1)[0].sum() + h.topk(3)[0][:, 1].sum() + h.split(2, 1)[1].sum()
    )(m.lin(x)),
    "mixed dtypes": lambda m, x: (m.lin(x) * (x > 0) * x.argmax(1, keepdim=True) + (x > 0).sum()).sum(),
    "dims of length one": lambda m, x: (
        (m.lin(x).unsqueeze(1) * x.unsqueeze(2)[:, :1]).squeeze(1).sum(0, keepdim=True).pow(2).sum()
    ),
    "sums of sums": lambda m, x: (m.lin(x).sum(0).sum() + m.lin(x).mean(1).mean()) * m.lin.weight.sum(),
    "views of views": lambda m, x: (m.lin(x).t().reshape(3, 2, 4).permute(2, 0, 1).flatten(1)[:, 1:5:2] ** 2).sum(),
    "complex numbers": lambda m, x: torch.fft.rfft(m.lin(x), dim=1).abs().pow(2).sum(),
    "cumulative": lambda m, x: (m.lin(x).cumsum(0) * m.lin(x).cumsum(1).flip(1)).sum() + m.lin(x).logsumexp(1).sum(),
    "norms": lambda m, x: m.lin(x).norm() + m.lin(x).norm(dim=1).sum() + F.normalize(m.lin(x), dim=0).sum(),
    "einsum": lambda m, x: torch.einsum("ni,oi,no->", x, m.lin.weight, m.lin(x)),
    "gather and scatter": lambda m, x: (
        lambda h, i: h.gather(1, i).sum() + torch.zeros(4, 6, dtype=h.dtype).scatter_add(1, i, h * x).pow(2).sum()
    )(m.lin(x), x.argsort(1)),
    "a gradient that stops": lambda m, x: (m.lin(x) * m.lin(x).detach() - m.lin(x).detach().mean()).sum(),
    "nothing trained in the loss": lambda m, x: (m.lin(x) * 0).sum() + x.sum(),
    "infinities behind a mask": lambda m, x: m.lin(x).masked_fill(x > 0, float("-inf")).exp().sum(),
    "sorted": lambda m, x: (m.lin(x).sort(1)[0] * torch.arange(6.0)).sum() + m.lin(x).cumprod(0).sum(),
    "stacked and unbound": lambda m, x: (lambda a, b, c, d: torch.stack([a * b, c, d], 1).sum(0).prod())(
        *m.lin(x).unbind(0)
    ),
    "rolled and repeated": lambda m, x: (
        m.lin(x).roll(1, 1).repeat(2, 3)[:, ::2] * m.lin(x).repeat_interleave(2, 0).tile(1, 2)[:, :9]
    ).sum(),
    "outer products": lambda m, x: (torch.outer(m.lin.bias, m.lin(x)[0]) @ m.lin.weight).tril().sum(),
    "cross entropy": lambda m, x: F.cross_entropy(m.lin(x), x.argmax(1)) + F.cross_entropy(m.lin(x), x.softmax(1)),
}


@pytest.mark.parametrize("name", HARD)
def test_random_programs_compute_what_one_device_computes(name: str) -> None:
    found = lopsided.verify(ByHand(HARD[name]), {"x": example()}, programs=40, seed=3)
    assert found.capture_error < 1e-9
    assert found.passed, f"{found.worst.where}: {found.worst.error} with {found.worst.shares}\n{found.worst.program}"


def test_one_device_and_many() -> None:
    model, batch = double(ByHand(lambda m, x: m.lin(x).pow(2).mean()))
    book = derive_rules(lopsided.capture(model, batch))
    alone = lopsided.simulate(lopsided.one_device(book.graph), model, batch, (1.0,))
    for seed in range(10):
        program = lopsided.random_program(book, random.Random(seed))
        for shares in SHARES:
            agree(lopsided.simulate(program, model, batch, shares), alone)
        agree(lopsided.simulate(program, model, batch, (1 / 9,) * 9), alone)


# Random numbers


def dropout_masks(rule: Rule, shares: tuple[float, ...], seed: int = 0) -> list[Tensor]:
    model = ByHand(lambda m, x: F.dropout(m.lin(x), 0.5).sum())
    graph = lopsided.capture(model, {"x": torch.ones(64, 6)})
    node = next(node for node in graph.nodes if "dropout" in node.op)
    call = Call(node, tuple(graph.values[name] for name in node.operands))
    ones = torch.ones(64, 6)
    (parts,) = run_rule(
        call,
        rule,
        [move([ones for _ in shares], R, rule.needs[0], ones.shape, shares)],
        shares,
        SeededRandomness(seed, shares),
    )
    return [part != 0 for part in parts]


def test_dropout_drops_alike_on_whole_values() -> None:
    first, *others = dropout_masks(Rule((I,), (I,)), (0.5, 0.3, 0.2))
    assert all(torch.equal(first, other) for other in others)
    assert 0.3 < first.float().mean() < 0.7
    assert not torch.equal(first, dropout_masks(Rule((I,), (I,)), (1.0,), seed=1)[0])


def test_dropout_drops_each_piece_on_its_own() -> None:
    pieces = dropout_masks(Rule((S(0),), (S(0),)), (0.5, 0.5))
    assert not torch.equal(*pieces)
    assert torch.equal(torch.cat(pieces), dropout_masks(Rule((I,), (I,)), (1.0,))[0])


def test_two_layers_drop_different_elements() -> None:
    model = ByHand(
        lambda m, x: (
            (F.dropout(torch.ones_like(x), 0.5) * F.dropout(torch.ones_like(x), 0.5)).sum() + m.lin(x).sum() * 0
        )
    )
    batch = {"x": torch.ones(100, 6)}
    graph = lopsided.capture(model, batch)
    kept = lopsided.simulate(lopsided.one_device(graph), model, batch, (1.0,)).loss / 4 / 600
    assert 0.15 < kept < 0.35


# Batch norm that is relaxed


def local_batch_norm(shares: tuple[float, ...]) -> tuple[lopsided.Simulation, nn.Module, dict[str, Tensor]]:
    model, batch = double(
        ByHand(lambda m, x: m.parts[0](m.lin(x)).pow(3).sum(), nn.BatchNorm1d(6, momentum=0.3)),
        torch.randn(11, 6),
    )
    with torch.no_grad():
        model.parts[0].running_mean.normal_()
    graph = lopsided.capture(model, batch)
    assert all(rule.how != "batch_norm_local" for rules in derive_rules(graph).rules.values() for rule in rules)
    book = derive_rules(graph, exact=False)
    program = with_rule(book, "lopsided.batch_norm.default", lambda rule: rule.how == "batch_norm_local")
    return lopsided.simulate(program, model, batch, shares), model, batch


@pytest.mark.parametrize("shares", [(0.5, 0.3, 0.2), (0.0, 0.6, 0.4), (1.0,)], ids=str)
def test_relaxed_batch_norm_is_batch_norm_of_each_piece(shares: tuple[float, ...]) -> None:
    found, model, batch = local_batch_norm(shares)
    pieces = [count for count in cut(11, shares) if count]
    loss = torch.zeros((), dtype=torch.float64)
    mean, var = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    h = model.lin(batch["x"])
    for part in h.split(pieces):
        norm = nn.BatchNorm1d(6, momentum=0.3).double()
        norm.load_state_dict(model.parts[0].state_dict())
        loss = loss + norm(part).pow(3).sum()
        mean += norm.running_mean * len(part) / 11
        var += norm.running_var * len(part) / 11
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    torch.testing.assert_close(found.gradients["lin.weight"], model.lin.weight.grad)
    torch.testing.assert_close(found.buffers["parts.0.running_mean"], mean)
    torch.testing.assert_close(found.buffers["parts.0.running_var"], var)


# Refusals


@pytest.fixture
def simple() -> tuple[Program, nn.Module, dict[str, Tensor]]:
    model, batch = ByHand(lambda m, x: m.lin(x).sum()), {"x": example()}
    return lopsided.one_device(lopsided.capture(model, batch)), model, batch


def test_what_the_program_was_not_made_for_is_refused(
    simple: tuple[Program, nn.Module, dict[str, Tensor]],
) -> None:
    program, model, batch = simple
    with pytest.raises(CaptureError, match=r"input x has shape \(3, 6\), the graph was captured with \(4, 6\)"):
        lopsided.simulate(program, model, {"x": batch["x"][:3]}, (1.0,))
    with pytest.raises(CaptureError, match="the batch has no input 'x'"):
        lopsided.simulate(program, model, {"y": batch["x"]}, (1.0,))
    with pytest.raises(CaptureError, match=r"the model has no parameter 'lin\.weight'"):
        lopsided.simulate(program, nn.Linear(6, 6), batch, (1.0,))
    with pytest.raises(CaptureError, match=r"parameter lin\.weight is on meta"):
        lopsided.simulate(program, model.to("meta"), batch, (1.0,))


def test_bad_shares_are_refused(simple: tuple[Program, nn.Module, dict[str, Tensor]]) -> None:
    with pytest.raises(SharesError, match="shares sum to"):
        lopsided.simulate(*simple, (0.5, 0.4))


def test_a_rule_that_gives_another_shape_is_refused() -> None:
    graph = lopsided.capture(ByHand(lambda m, x: m.lin(x).sum()), {"x": example()})
    node = graph.nodes[0]
    call = Call(node, tuple(graph.values[name] for name in node.operands))
    wrong = Rule((S(0), R, R), (R,))
    operands = [
        move([torch.zeros(v.shape)] * 2, R, need, v.shape, (0.5, 0.5))
        for v, need in zip(call.operands, wrong.needs, strict=True)
    ]
    with pytest.raises(RuleError, match=r"gives \[\(2, 6\)\] on device 0, not \[\(4, 6\)\]"):
        run_rule(call, wrong, operands, (0.5, 0.5), SeededRandomness(0, (0.5, 0.5)))
    with pytest.raises(ProgramError, match=r"cuts lengths 4, 6 as one"):
        rule_pieces(call, Rule((S(0), R, R), (S(1),)), (0.5, 0.5))
    with pytest.raises(ProgramError, match="has no implementation 'magic'"):
        run_rule(call, Rule((R, R, R), (R,), "magic"), operands, (0.5, 0.5), SeededRandomness(0, (0.5, 0.5)))
