"""Programs print, parse back, and are refused in words where they are illegal."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lopsided
from lopsided.errors import ProgramError
from lopsided.ir.graph import Graph
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, P, R, S
from lopsided.ir.program import Program, RuleBook, check_program, parse_program
from lopsided.models import zoo
from lopsided.ops.derive import derive_rules
from lopsided.verification.verifier import random_program, random_shares
from tests.support.jobs import book_of
from tests.support.models import ByHand, example


@pytest.fixture(scope="module")
def book() -> RuleBook:
    """Batch norm, a comparison and a loss: shards, sums, talk, truth values, buffers that change."""
    norm = nn.BatchNorm1d(6)
    model = ByHand(lambda m, x: (m.parts[0](m.lin(x)) * (x > 0)).sum(), norm)
    return derive_rules(lopsided.capture(model, {"x": example()}))


@pytest.fixture
def graph(book: RuleBook) -> Graph:
    return book.graph


@pytest.fixture
def program(graph: Graph) -> Program:
    return lopsided.one_device(graph)


@pytest.mark.parametrize("name", zoo.SMALL)
def test_random_programs_parse_back_and_are_legal(name: str) -> None:
    book = book_of(zoo.SMALL[name])
    for seed in range(3):
        program = random_program(book, random.Random(seed))
        check_program(program, book)
        again = parse_program(str(program), book.graph)
        assert again == program
        assert list(again.conversions()) == list(program.conversions())
    check_program(lopsided.one_device(book.graph), book)


def test_random_choices_repeat() -> None:
    model = ByHand(lambda m, x: m.lin(x).sum())
    book = derive_rules(lopsided.capture(model, {"x": example()}))
    assert random_program(book, random.Random(5)) == random_program(book, random.Random(5))


def test_random_shares_are_shares_and_sometimes_nothing() -> None:
    state = random.Random(0)
    drawn = [random_shares(3, state) for _ in range(100)]
    assert all(sum(shares) == pytest.approx(1) for shares in drawn)
    assert 15 < sum(0.0 in shares for shares in drawn) < 60
    assert random_shares(1, state) == (1.0,)


DATA_PARALLEL = """\
%lin_weight = parameter "lin.weight" : I
%lin_bias = parameter "lin.bias" : S0
%x = input "x" : S0
%linear = aten.linear.default(%x: S0, %lin_weight: I→R, %lin_bias: S0→R) : S0
%relu = aten.relu.default(%linear: S0) : S0
%sum_1 = aten.sum.default(%relu: S0) : P
return %sum_1: P→I
"""


def test_a_program_written_by_hand() -> None:
    model, batch = ByHand(lambda m, x: F.relu(m.lin(x)).sum()), {"x": example()}
    graph = lopsided.capture(model, batch)
    program = parse_program(DATA_PARALLEL, graph)
    check_program(program, derive_rules(graph))
    assert str(program) == DATA_PARALLEL
    assert [(value.name, str(a), str(b)) for value, a, b in program.conversions()] == [
        ("lin_weight", "I", "R"),
        ("lin_bias", "S0", "R"),
        ("sum_1", "P", "I"),
    ]
    found = lopsided.simulate(program, model, batch, (0.5, 0.0, 0.3, 0.2))
    alone = lopsided.simulate(lopsided.one_device(graph), model, batch, (1.0,))
    torch.testing.assert_close(found.gradients, alone.gradients)
    torch.testing.assert_close(found.loss, alone.loss)


def test_a_conversion_is_made_once() -> None:
    model = ByHand(lambda m, x: (m.lin(x) * m.lin(x)).sum())
    graph = lopsided.capture(model, {"x": example()})
    program = lopsided.one_device(graph)
    first, second, *rest = program.steps
    twice = tuple(
        replace(step, rule=Rule((S(0), R, R), (S(0),)), chains=((I, S(0)), (I, R), (I, R))) for step in (first, second)
    )
    made = [(value.name, str(to)) for value, _, to in replace(program, steps=(*twice, *rest)).conversions()]
    assert made == [("x", "S0"), ("lin_weight", "R"), ("lin_bias", "R")]


# Texts that are no program


def text_of(program: Program, old: str = "", new: str = "") -> str:
    text = str(program)
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("return %sum_1: I", "return %linear: I", "the program returns %linear, the graph %sum_1"),
        ("return %sum_1: I", "return %sum_1: I\nreturn %sum_1: I", "the program returns twice"),
        ("return %sum_1: I", "give %sum_1: I", "program text does not parse"),
        ("%x: I, %lin_weight: I", "%lin_weight: I, %x: I", "%linear takes %x here, not %lin_weight"),
        ("%x: I, %lin_weight: I, ", "%x: I, ", "%linear takes %lin_weight here, not %lin_bias"),
        (", %lin_bias: I)", ")", "%linear takes 3 operands, not 2"),
        (
            "aten.linear.default",
            "aten.matmul.default",
            "%linear is aten.linear.default in the graph, not aten.matmul.default",
        ),
        ("%linear = aten", "%line = aten", "the graph has no node %line of this form"),
        ('"x" : I', '"x" : Q', "'Q' is not a placement"),
        ("%x: I, ", "%x: I→S, ", "'S' is not a placement"),
        (
            '"lin.bias" : I',
            '"lin.bias" : I\n%lin_bias = parameter "lin.bias" : R',
            "%lin_bias is placed twice",
        ),
        ('update "parts.0.running_mean"', 'update "mean"', 'the graph does not update "mean" with'),
    ],
)
def test_a_text_that_is_no_program_is_refused_with_its_line(program: Program, old: str, new: str, words: str) -> None:
    with pytest.raises(ProgramError) as refused:
        parse_program(text_of(program, old, new), program.graph)
    assert words in refused.value.what
    assert refused.value.where.startswith("line ")
    assert refused.value.do


def test_a_buffer_that_is_not_updated_is_refused(program: Program) -> None:
    lines = [line for line in str(program).splitlines() if "num_batches" not in line or "update" not in line]
    with pytest.raises(ProgramError, match=r"the program does not update the buffer parts\.0\.num_batches_tracked"):
        parse_program("\n".join(lines), program.graph)


def test_a_buffer_updated_twice_is_refused(program: Program) -> None:
    line = next(line for line in str(program).splitlines() if line.startswith("update"))
    with pytest.raises(ProgramError, match="is updated twice"):
        parse_program(text_of(program, line, f"{line}\n{line}"), program.graph)


# Programs that are illegal


def refusal(program: Program, book: RuleBook) -> ProgramError:
    with pytest.raises(ProgramError) as refused:
        check_program(program, book)
    assert refused.value.do
    return refused.value


def with_step(program: Program, name: str, **changes: object) -> Program:
    steps = tuple(replace(step, **changes) if step.node.name == name else step for step in program.steps)
    assert any(step.node.name == name for step in program.steps)
    return replace(program, steps=steps)


def test_leaves_must_be_placed_where_they_can_be(program: Program, book: RuleBook) -> None:
    rest = program.leaves[1:]
    assert refusal(replace(program, leaves=rest), book).what == "%lin_weight (parameter lin.weight) has no placement"
    error = refusal(replace(program, leaves=(("lin_weight", P), *rest)), book)
    assert error.what == "%lin_weight (parameter lin.weight) cannot be placed P"
    assert error.do == "choose one of I, S0, S1"
    error = refusal(replace(program, leaves=(*program.leaves, ("ghost", I))), book)
    assert error.what == "%ghost is not a leaf of the graph"


def test_a_buffer_cannot_be_cut(program: Program, book: RuleBook) -> None:
    leaves = tuple((name, S(0) if "running_mean" in name else placement) for name, placement in program.leaves)
    assert "cannot be placed S0" in refusal(replace(program, leaves=leaves), book).what


def test_every_node_is_run_once_and_in_order(program: Program, book: RuleBook) -> None:
    error = refusal(replace(program, steps=program.steps[:-1]), book)
    assert error.what == "%sum_1 = aten.sum.default is not run"
    error = refusal(replace(program, steps=(*program.steps, program.steps[-1])), book)
    assert error.what == "%sum_1 is run twice"
    error = refusal(replace(program, steps=program.steps[::-1]), book)
    assert "is not available as I" in error.what
    assert error.do == "start from what it has: none yet"


def test_operands_start_from_what_there_is(program: Program, book: RuleBook) -> None:
    rule = Rule((R, R, R), (R,))
    error = refusal(with_step(program, "linear", rule=rule, chains=((R,), (I, R), (I, R))), book)
    assert error.what == "%x is not available as R"
    assert error.do == "start from what it has: I"
    assert error.where.startswith("%linear = aten.linear.default(%x: R, ")


def test_chains_must_lead_somewhere(program: Program, book: RuleBook) -> None:
    rule = Rule((R, R, R), (R,))
    chains = ((I, R), (I, R), (I, R))
    error = refusal(with_step(program, "linear", rule=rule, chains=((I, I, R), *chains[1:])), book)
    assert error.what == "%x is converted from I to itself"
    error = refusal(with_step(program, "linear", rule=rule, chains=((), *chains[1:])), book)
    assert error.what == "%x is taken in no placement"
    error = refusal(with_step(program, "linear", rule=rule, chains=((I, S(2)), *chains[1:])), book)
    assert error.what == "%x cannot be placed S2"
    error = refusal(with_step(program, "linear", rule=rule, chains=((I, S(1, 1, 4)), *chains[1:])), book)
    assert error.what == "%x cannot be placed S1/4"
    error = refusal(with_step(program, "linear", rule=rule, chains=((I,), *chains[1:])), book)
    assert error.what == "%linear: its operands do not end as its rule needs: R, R, R → R"
    error = refusal(with_step(program, "linear", rule=rule, chains=chains[1:]), book)
    assert error.what == "%linear takes 3 operands, not 2"


def test_truth_values_do_not_add_up(program: Program, book: RuleBook) -> None:
    steps = {step.node.name: step for step in program.steps}
    of_truth = next(step for step in steps.values() if step.node.operands[-1] == "gt")
    chains = (*of_truth.chains[:-1], (I, P, I))
    error = refusal(with_step(program, of_truth.node.name, chains=chains), book)
    assert error.what == "%gt holds truth values, which do not add up"


def test_a_rule_must_be_in_the_book(program: Program, book: RuleBook) -> None:
    rule = Rule((P, P, P), (P,))
    error = refusal(with_step(program, "linear", rule=rule, chains=((I, P),) * 3), book)
    assert error.what == "aten.linear.default has no rule P, P, P → P"
    assert "S0, R, R → S0" in error.do
    error = refusal(with_step(program, "linear", rule=Rule((I, I, I), (R,))), book)
    assert error.what == "aten.linear.default has no rule I, I, I → R"


def test_loss_and_buffers_end_whole(program: Program, book: RuleBook) -> None:
    error = refusal(replace(program, loss=(I, R)), book)
    assert error.what == "the loss ends as R"
    assert refusal(replace(program, loss=()), book).what == "%sum_1 is taken in no placement"
    ((name, _), *_) = book.graph.updates
    error = refusal(replace(program, updates=((I, R), *program.updates[1:])), book)
    assert error.what == f"buffer {name} ends as R"


def test_a_program_of_another_graph_is_refused(book: RuleBook) -> None:
    other = lopsided.capture(ByHand(lambda m, x: m.lin(x).sum()), {"x": example()})
    assert "belong to different graphs" in refusal(lopsided.one_device(other), book).what
