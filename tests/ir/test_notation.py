"""The index language: every construct, what follows from it, and what is refused."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopsided.errors import NotationError
from lopsided.ir.notation import Nonlinear, Operand, Product, Rule, Sum, Where, bind, derive, parse_line
from lopsided.ir.placement import I, P, R, S

Shapes = Sequence[tuple[int, ...] | None]


def rules(
    line: str, operands: Shapes, results: Sequence[tuple[int, ...]], sizes: Mapping[str, int] | None = None
) -> str:
    return "\n".join(map(str, derive(bind(parse_line(line), operands, results, sizes))))


def expected(text: str) -> str:
    return textwrap.dedent(text).strip()


# Golden lists


def test_linear() -> None:
    assert rules("... i * o i + o -> ... o", [(4, 6), (5, 6), (5,)], [(4, 5)]) == expected("""
        I, I, I → I
        R, R, R → R
        P, R, P → P
        R, P, P → P
        S0, R, R → S0
        S0, I, I → S0  [sfb]
        S1, S1, P → P
        R, S0, S0 → S1
        I, S0, S0 → S1  [sfb]
    """)


def test_linear_without_bias() -> None:
    assert rules("... i * o i + o -> ... o", [(2, 3, 6), (5, 6), None], [(2, 3, 5)]) == expected("""
        I, I → I
        R, R → R
        P, R → P
        R, P → P
        S0, R → S0
        S0, I → S0  [sfb]
        S1, R → S1
        S1, I → S1  [sfb]
        S2, S1 → P
        R, S0 → S2
        I, S0 → S2  [sfb]
    """)


def test_attention_with_grouped_queries() -> None:
    line = "f[b (g r) T D, b g S D] * b g S e -> b (g r) T e"
    shapes = [(2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)]
    assert rules(line, shapes, [(2, 6, 5, 4)], {"g": 3, "r": 2}) == expected("""
        I, I, I → I
        R, R, R → R
        R, R, P → P
        S1/2, S1, S1 → S1/2
        S1x3, R, R → S1x3
        S1x3, R, I → S1x3  [sfb]
        S0, S0, S0 → S0
        R, R, S3 → S3
    """)


def test_layer_norm() -> None:
    assert rules("f[... D0] * D0 + D0 -> ... D0", [(4, 5, 6), (6,), (6,)], [(4, 5, 6)]) == expected("""
        I, I, I → I
        R, R, R → R
        R, P, P → P
        S0, R, R → S0
        S0, I, I → S0  [sfb]
        S1, R, R → S1
        S1, I, I → S1  [sfb]
    """)


def test_where() -> None:
    assert rules("f[...] * {... + ...} -> ...", [(4, 5), (4, 5), (1,)], [(4, 5)]) == expected("""
        I, I, I → I
        R, R, R → R
        R, P, P → P
        S0, S0, R → S0
        S1, S1, R → S1
    """)


def test_cross_entropy_summed_over_rows() -> None:
    assert rules("f[n C, n] -> ()", [(4, 5), (4,)], [()]) == expected("""
        I, I → I
        R, R → R
        S0, S0 → P
    """)


def test_an_op_without_operands() -> None:
    assert rules("-> a b", [], [(3, 4)]) == "- → I\n- → S0\n- → S1"


# What each construct means


def test_a_capital_index_is_never_cut() -> None:
    assert rules("f[a K] -> a K", [(3, 4)], [(3, 4)]) == "I → I\nR → R\nS0 → S0"


def test_an_index_that_ends_on_the_left_is_summed() -> None:
    assert rules("a b -> a", [(3, 4)], [(3,)]) == "I → I\nR → R\nP → P\nS0 → S0\nS1 → P"


def test_a_sum_needs_every_summand_partial() -> None:
    assert "P, P → P" in rules("a + a -> a", [(3,), (3,)], [(3,)])
    assert "P, R → P" not in rules("a + a -> a", [(3,), (3,)], [(3,)])


def test_a_product_needs_exactly_one_factor_partial() -> None:
    lines = rules("a * a * a -> a", [(3,)] * 3, [(3,)]).splitlines()
    assert [line for line in lines if "P" in line] == ["P, R, R → P", "R, P, R → P", "R, R, P → P"]


def test_nothing_partial_goes_through_what_is_not_linear() -> None:
    assert "P" not in rules("f[a, a] -> a", [(3,), (3,)], [(3,)])
    assert "P, R → P" in rules("a * f[a] -> a", [(3,), (3,)], [(3,)])
    assert "R, P → P" not in rules("a * f[a] -> a", [(3,), (3,)], [(3,)])


def test_what_is_not_linear_and_not_cut_cannot_be_a_summand_of_a_partial_result() -> None:
    # f[b] would be added once per device.
    assert rules("a b + f[b] -> b", [(3, 4), (4,)], [(4,)]) == "I, I → I\nR, R → R\nS1, S0 → S0"


def test_factors_cut_alike_contract_piece_by_piece() -> None:
    assert "S0, S0 → P" in rules("i * i -> ()", [(3,), (3,)], [()])
    # The second summand of the group is not cut, so the product of pieces is not a piece of the product.
    assert "→ P" not in rules("f[i] * {i + ()} -> ()", [(3,), (3,), ()], [()]).replace("R, P, P → P", "")


def test_merged_dims_are_cut_in_units_and_in_blocks() -> None:
    assert rules("a b -> (a b)", [(4, 5)], [(20,)]) == "I → I\nR → R\nP → P\nS0 → S0/5\nS1 → S0x4"
    found = rules("(a b c) -> a (b c)", [(24,)], [(2, 12)], {"b": 3})
    assert sorted(found.splitlines()[3:]) == ["S0/12 → S0", "S0x2/4 → S1/4", "S0x6 → S1x3"]


def test_an_index_can_be_divided_before_it_is_cut() -> None:
    bound = bind(parse_line("a b -> (a b)"), [(4, 6)], [(24,)])
    assert Rule((S(1, 1, 3),), (S(0, 4, 3),)) in derive(bound, {"b": [(1, 3)]})
    assert Rule((S(0, 2, 1),), (S(0, 2, 6),)) in derive(bound, {"a": [(2, 1)]})


def test_broadcast_dims_do_not_carry_the_index() -> None:
    bound = bind(parse_line("... + ... -> ..."), [(4, 1, 6), (5, 1)], [(4, 5, 6)])
    assert bound.operands == ({"~2": Where(0), "~0": Where(2)}, {"~1": Where(0)})
    assert rules("... + ... -> ...", [(4, 1, 6), (5, 1)], [(4, 5, 6)]).splitlines()[3:] == [
        "S0, R → S0",
        "S2, R → S2",
        "R, S0 → S1",
    ]


def test_dims_of_length_one_are_not_cut() -> None:
    assert rules("a b -> a b", [(1, 1)], [(1, 1)]) == "I → I\nR → R\nP → P"
    assert rules("1 a -> a", [(1, 3)], [(3,)]) == "I → I\nR → R\nP → P\nS1 → S0"


def test_dims_of_length_zero_are_not_cut() -> None:
    assert "S0" not in rules("a b -> a b", [(0, 3)], [(0, 3)])


def test_several_results() -> None:
    assert rules("f[a b] -> a, b", [(3, 4)], [(3,), (4,)]) == "I → I, I\nR → R, R\nS0 → S0, P\nS1 → P, S0"


def test_scalars() -> None:
    assert rules("() * a -> a", [(), (3,)], [(3,)]).splitlines()[-2:] == ["R, S0 → S0", "I, S0 → S0  [sfb]"]


def test_a_line_is_read_as_sums_of_products() -> None:
    line = parse_line("a + b * f[c, d] * {e + g} -> h")
    assert line.algebra == Sum(
        (
            Operand(0),
            Product((Operand(1), Nonlinear((Operand(2), Operand(3))), Sum((Operand(4), Operand(5))))),
        )
    )
    assert parse_line("x1 (y2 z) 1 ... -> ()").operands == ((("x1",), ("y2", "z"), ("1",), ("...",)),)


def test_f_is_an_index_unless_a_bracket_follows() -> None:
    assert parse_line("e f * f g -> e g").operands == ((("e",), ("f",)), (("f",), ("g",)))


def test_operands_that_are_left_out_leave_the_algebra() -> None:
    bound = bind(parse_line("a * b + c -> d"), [(3,), None, None], [(5,)])
    assert bound.algebra == Operand(0)
    assert bind(parse_line("f[a, b] -> ()"), [None, None], [()]).algebra is None


@given(st.permutations(range(3)), st.lists(st.integers(2, 9), min_size=3, max_size=3, unique=True))
def test_a_permutation_is_cut_where_its_dims_go(order: list[int], sizes: list[int]) -> None:
    names = "abc"
    line = f"{' '.join(names)} -> {' '.join(names[d] for d in order)}"
    found = derive(bind(parse_line(line), [tuple(sizes)], [tuple(sizes[d] for d in order)]))
    cuts = {rule for rule in found if rule.gives[0].is_shard}
    assert cuts == {Rule((S(d),), (S(order.index(d)),)) for d in range(3)}


@given(st.sampled_from([I, R, P]), st.integers(0, 3))
def test_a_rule_prints_what_it_needs_and_gives(whole: object, dim: int) -> None:
    assert str(Rule((I, S(dim)), (R,), "sfb")) == f"I, S{dim} → R  [sfb]"


# Refusals


@pytest.mark.parametrize(
    ("line", "why", "after"),
    [
        ("", "expected an operand, found 'the end'", ""),
        ("a", "expected '->', found 'the end'", "a"),
        ("a -> ", "expected an operand, found 'the end'", "a ->"),
        ("a -> b ]", "unexpected ']'", "a -> b"),
        ("a a -> a", "index 'a' stands twice in one tensor", "a a"),
        ("(a b) a -> a", "index 'a' stands twice in one tensor", "( a b ) a"),
        ("a -> b b", "index 'b' stands twice in one tensor", "a -> b b"),
        ("(a -> a", "expected ')', found '->'", "( a"),
        ("f[a -> a", "expected ']', found '->'", "f[ a"),
        ("{a + b -> a", "expected '}', found '->'", "{ a + b"),
        ("a ** b -> a", "expected an operand, found '*'", "a *"),
        ("... ... -> ...", "'...' stands twice in one tensor", "... ..."),
        ("a -> ...", "'...' on the right has no '...' on the left", "a -> ..."),
        ("a, b -> a", "expected '->', found ','", "a"),
        ("a -> b,", "expected an operand, found 'the end'", "a -> b ,"),
        ("a + -> b", "expected an operand, found '->'", "a +"),
        ("a ? b -> b", "expected '->', found '?'", "a"),
        ("f[] -> a", "expected an operand, found ']'", "f["),
        ("f[f[a]] -> a", "expected an operand, found 'f['", "f["),
        ("{} -> a", "expected an operand, found '}'", "{"),
        ("2 -> a", "expected an operand, found '2'", ""),
        ("a -> b -> c", "unexpected '->'", "a -> b"),
        ("(a 1) -> a", "expected ')', found '1'", "( a"),
        ("(a (b c)) -> a", "expected ')', found '('", "( a"),
        ("() a -> a", "expected '->', found 'a'", "( )"),
        ("a - b -> a", "expected '->', found '-'", "a"),
        ("a => b", "expected '->', found '='", "a"),
    ],
)
def test_a_typo_is_pointed_at(line: str, why: str, after: str) -> None:
    with pytest.raises(NotationError) as refused:
        parse_line(line)
    assert refused.value.what == f"rule line does not parse: {why}"
    assert refused.value.where.startswith(repr(line))
    if after:
        assert f"after '{after}" in refused.value.where
    assert "docs/rules.md" in refused.value.do


@pytest.mark.parametrize(
    ("line", "operands", "results", "words"),
    [
        ("a -> a", [(3,), (3,)], [(3,)], "1 operands and 1 results, the call has 2 and 1"),
        ("a -> a", [(3,)], [(3,), (3,)], "1 operands and 1 results, the call has 1 and 2"),
        ("a b -> a", [(3,)], [(3,)], "names 2 dims, the tensor has 1"),
        ("a -> a", [(3, 4)], [(3,)], "names 1 dims, the tensor has 2"),
        ("... a b -> a", [(3,)], [(3,)], "needs 2 dims, the tensor has 1"),
        ("a * a -> a", [(3,), (4,)], [(3,)], "index 'a' has length 3 and length 4"),
        ("(a b) -> a", [(7,)], [(2,)], "merged dim (a b) does not fit length 7"),
        ("(a b) -> (b a)", [(12,)], [(12,)], "merged dim (a b) does not fit length 12"),
        ("... + ... -> ...", [(3,), (4,)], [(4,)], "index '~0' has length 3 and length 4"),
    ],
)
def test_a_line_that_does_not_fit_the_call_is_refused(
    line: str, operands: Shapes, results: Sequence[tuple[int, ...]], words: str
) -> None:
    with pytest.raises(NotationError) as refused:
        bind(parse_line(line), operands, results)
    assert words in refused.value.what
    assert refused.value.where == repr(line)
    assert refused.value.do
