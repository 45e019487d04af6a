"""Cuts are whole, near and complete; pieces, joins and zeros are inverses; bad shares are refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lopsided.errors import ProgramError, SharesError
from lopsided.ir.placement import (
    I,
    P,
    Placement,
    R,
    S,
    check_shares,
    cut,
    join_pieces,
    parse_placement,
    place_in_zeros,
    start_of,
    take_piece,
)


@st.composite
def fractions(draw: st.DrawFn, most: int = 6) -> tuple[float, ...]:
    """Shares, some of them zero, that sum to one."""
    weights = draw(st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1.0)), min_size=1, max_size=most))
    if not sum(weights):
        weights[draw(st.integers(0, len(weights) - 1))] = 1.0
    return check_shares([weight / sum(weights) for weight in weights])


@given(st.integers(0, 10**9), fractions())
def test_a_cut_sums_to_its_length(length: int, shares: tuple[float, ...]) -> None:
    pieces = cut(length, shares)
    assert sum(pieces) == length
    assert all(piece >= 0 for piece in pieces)


@given(st.integers(0, 10**6), fractions())
def test_a_cut_is_as_near_to_the_shares_as_whole_units_allow(length: int, shares: tuple[float, ...]) -> None:
    ideal = [length * share for share in shares]
    pieces = cut(length, shares)
    assert all(abs(piece - x) < 1 for piece, x in zip(pieces, ideal, strict=True))
    # Largest remainder: moving one unit from a device to another never brings the pieces nearer.
    off = [piece - x for piece, x in zip(pieces, ideal, strict=True)]
    over = max((o for o, piece in zip(off, pieces, strict=True) if piece), default=0.0)
    under = min((o for o, share in zip(off, shares, strict=True) if share), default=0.0)
    assert over - under <= 1 + 1e-6


@given(st.integers(0, 10**6), fractions())
def test_no_share_means_no_piece(length: int, shares: tuple[float, ...]) -> None:
    pieces = cut(length, shares)
    assert all(piece == 0 for piece, share in zip(pieces, shares, strict=True) if share == 0)


@given(st.integers(0, 10**4), fractions())
def test_a_cut_is_a_function_of_its_arguments(length: int, shares: tuple[float, ...]) -> None:
    assert cut(length, shares) == cut.__wrapped__(length, shares)


def test_ties_go_to_the_lower_number() -> None:
    assert cut(1, (0.5, 0.5)) == (1, 0)
    assert cut(4, (1 / 3, 1 / 3, 1 / 3)) == (2, 1, 1)
    assert cut(3, (0.0, 0.5, 0.5)) == (0, 2, 1)


def test_shares_that_sum_almost_to_one_still_cut_long_lengths_whole() -> None:
    shares = check_shares((0.5, 0.5000009))
    assert sum(shares) == pytest.approx(1, abs=1e-15)
    assert sum(cut(10**9, shares)) == 10**9


@st.composite
def placed(draw: st.DrawFn) -> tuple[torch.Tensor, Placement, tuple[int, ...]]:
    """A tensor, a shard placement that fits it, and pieces."""
    outer, unit = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length = draw(st.integers(0, 7))
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, outer * length * unit)
    placement = S(dim, outer, unit)
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1
    return whole, placement, cut(placement.length(shape), draw(fractions(4)))


@given(placed())
def test_pieces_join_to_the_whole(case: tuple[torch.Tensor, Placement, tuple[int, ...]]) -> None:
    whole, placement, pieces = case
    parts = [take_piece(whole, placement, pieces, d) for d in range(len(pieces))]
    for d, part in enumerate(parts):
        assert tuple(part.shape) == placement.local_shape(whole.shape, pieces, d)
    assert torch.equal(join_pieces(parts, placement), whole)


@given(placed())
def test_pieces_in_zeros_sum_to_the_whole(case: tuple[torch.Tensor, Placement, tuple[int, ...]]) -> None:
    whole, placement, pieces = case
    total = torch.zeros_like(whole)
    for d in range(len(pieces)):
        part = take_piece(whole, placement, pieces, d)
        zeros = place_in_zeros(part, placement, whole.shape, pieces, d)
        assert torch.equal(take_piece(zeros, placement, pieces, d), part)
        assert int((zeros != 0).sum()) == part.numel()
        total += zeros
    assert torch.equal(total, whole)


def test_a_fused_projection_is_cut_alike_in_each_block() -> None:
    whole = torch.arange(12)
    placement = S(0, outer=3, unit=2)
    assert placement.length(whole.shape) == 2
    assert take_piece(whole, placement, (1, 1), 0).tolist() == [0, 1, 4, 5, 8, 9]
    assert take_piece(whole, placement, (1, 1), 1).tolist() == [2, 3, 6, 7, 10, 11]
    assert start_of((3, 0, 2), 2) == 3


@given(
    st.one_of(
        st.sampled_from([I, R, P]),
        st.builds(S, st.integers(0, 9), st.integers(1, 99), st.integers(1, 9999)),
    )
)
def test_a_placement_parses_back(placement: Placement) -> None:
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize("text", ["", "X", "S", "s0", "S-1", "S0/0", "S0x0", "S0/", "S0/2x3", "I ", "S0x3/", "RR"])
def test_a_text_that_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(ProgramError) as refused:
        parse_placement(text)
    assert refused.value.what == f"{text!r} is not a placement"
    assert "S<dim>" in refused.value.do


def test_a_placement_fits_dims_that_its_units_divide() -> None:
    assert S(1, 3, 2).fits((5, 12))
    assert not S(1, 3, 2).fits((5, 14))
    assert not S(2).fits((5, 12))
    assert S(0).fits((0,))
    assert I.fits(())
    assert not S(0).fits(())


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((), "there are no shares"),
        ((0.5, 0.4), "shares sum to 0.9, not 1"),
        ((0.0, 0.0), "shares sum to 0, not 1"),
        ((1.5, -0.5), "a share is negative: 1.5, -0.5"),
        ((math.nan, 1.0), "shares must be finite numbers, got nan, 1"),
        ((math.inf,), "shares must be finite numbers"),
        ((2, 1), "shares sum to 3, not 1"),
    ],
)
def test_bad_shares_are_refused(shares: tuple[float, ...], words: str) -> None:
    with pytest.raises(SharesError) as refused:
        check_shares(shares)
    assert words in refused.value.what
    assert refused.value.do


def test_the_refusal_says_what_the_shares_should_be() -> None:
    with pytest.raises(SharesError, match=r"0\.6667, 0\.3333"):
        check_shares((2, 1))
