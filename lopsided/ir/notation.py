"""The index language: one line says what an op computes, and its rules follow.

In: a line such as `... i * o i + o -> ... o`, and the shapes of a call. Out: `Rule`s, the ways to place its operands
and results on devices. docs/rules.md explains the language; in short:

    a            independent along this index: it may be cut; if absent on the right, it is summed
    K            the op couples along this index: keep it whole
    a + b        summands            a * b        linear in each operand separately
    f[a, b]      not linear          {a + b}      a group, for `f[c] * {a + b}`
    (a b)        a merged dim, outermost first        1   a dim of length one        ()   a scalar
    ...          any leading dims, aligned at the right as broadcasting does

The derivation, for a line with operands x₁ … xₙ:

    all I → I, all R → R                                                       `_whole_rules`
    P → P where exactly one factor of every summand is P, the others R         `_partial`
    cut an index the results carry: S where carried, R where not → S           `_cut_rules`
    cut an index the results lack: as above, a summand that lacks it is P → P  `_partial`
    cut as before, but factors that lack the index are I: their gradient comes
    from gathered factors (sufficient factor broadcasting)                     `_sfb_needs`
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from lopsided.errors import NotationError
from lopsided.ir.placement import I, P, Placement, R, S

Dim = tuple[str, ...]  # the indices merged into one dim, outermost first; ("...",) and ("1",) are special
Spec = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    number: int


@dataclass(frozen=True, slots=True)
class Nonlinear:
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Product:
    factors: tuple[Algebra, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    terms: tuple[Algebra, ...]


Algebra = Operand | Nonlinear | Product | Sum


@dataclass(frozen=True, slots=True)
class Line:
    """A parsed line: the dims of every operand and result, and how the operands combine."""

    text: str
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    algebra: Algebra | None


@dataclass(frozen=True, slots=True)
class Where:
    """Where a tensor carries an index: the middle of `outer × length × unit` elements of `dim`."""

    dim: int
    outer: int = 1
    unit: int = 1

    def placed(self, variant: Variant) -> Placement:
        return S(self.dim, self.outer * variant[0], self.unit * variant[1])


Variant = tuple[int, int]  # how an index is itself divided before it is cut: (outer, unit)
PLAIN: Variant = (1, 1)


@dataclass(frozen=True, slots=True)
class Bound:
    """A line bound to the shapes of one call."""

    lengths: Mapping[str, int]
    operands: tuple[Mapping[str, Where], ...]
    results: tuple[Mapping[str, Where], ...]
    algebra: Algebra | None
    cuttable: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to run an op: the placements it needs, those it gives, and how it is carried out.

    `how` is "plain" (call the op on the pieces), "sfb" (the same, with gradients of the `I` operands from gathered
    factors), or the name of an implementation the op brings along (`lopsided.ops`).
    """

    needs: tuple[Placement, ...]
    gives: tuple[Placement, ...]
    how: str = "plain"
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.needs, self.gives, self.how)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        how = "" if self.how == "plain" else f"  [{self.how}]"
        return f"{', '.join(map(str, self.needs)) or '-'} → {', '.join(map(str, self.gives))}{how}"


# Parsing


_TOKEN = re.compile(r"\s*(->|\.\.\.|f\[|[A-Za-z]\d*|[()\[\]{}*+,1]|\S)")


class _Parser:
    """Recursive descent over the tokens of one line."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.tokens: list[str] = _TOKEN.findall(text)
        self.specs: list[Spec] = []

    def fail(self, why: str) -> NotationError:
        seen = " ".join(self.tokens[: self.position])
        return NotationError(
            f"rule line does not parse: {why}",
            where=f"{self.text!r}, after {seen!r}" if seen else repr(self.text),
            do="write operands, '->' and results, for example '... i * o i + o -> ... o' (docs/rules.md)",
        )

    @property
    def next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def accept(self, token: str) -> bool:
        if self.next == token:
            self.position += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.fail(f"expected {token!r}, found {self.next or 'the end'!r}")

    def line(self) -> Line:
        algebra = None if self.next == "->" else self.expression()
        self.expect("->")
        operands = tuple(self.specs)
        results = [self.spec()]
        while self.accept(","):
            results.append(self.spec())
        if self.position < len(self.tokens):
            raise self.fail(f"unexpected {self.next!r}")
        known = {name for spec in operands for dim in spec for name in dim}
        for spec in (*operands, *results):
            flat = [name for dim in spec for name in dim if name not in ("...", "1")]
            if repeated := next((n for n in flat if flat.count(n) > 1), None):
                raise self.fail(f"index {repeated!r} stands twice in one tensor")
        if "..." not in known and any(("...",) in spec for spec in results) and operands:
            raise self.fail("'...' on the right has no '...' on the left")
        return Line(self.text, operands, tuple(results), algebra)

    def expression(self) -> Algebra:
        terms = [self.term()]
        while self.accept("+"):
            terms.append(self.term())
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    def term(self) -> Algebra:
        factors = [self.factor()]
        while self.accept("*"):
            factors.append(self.factor())
        return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def factor(self) -> Algebra:
        if self.accept("{"):
            group = self.expression()
            self.expect("}")
            return group
        if self.accept("f["):
            operands = [self.operand()]
            while self.accept(","):
                operands.append(self.operand())
            self.expect("]")
            return Nonlinear(tuple(operands))
        return self.operand()

    def operand(self) -> Operand:
        self.specs.append(self.spec())
        return Operand(len(self.specs) - 1)

    def spec(self) -> Spec:
        if self.next == "(" and self.tokens[self.position + 1 : self.position + 2] == [")"]:
            self.position += 2
            return ()
        dims: list[Dim] = []
        while True:
            if self.next in ("...", "1") or (self.next[:1].isalpha() and self.next != "f["):
                dims.append((self.next,))
                self.position += 1
            elif self.accept("("):
                merged: list[str] = []
                while self.next[:1].isalpha() and self.next != "f[":
                    merged.append(self.next)
                    self.position += 1
                self.expect(")")
                dims.append(tuple(merged))
            else:
                break
        if not dims:
            raise self.fail(f"expected an operand, found {self.next or 'the end'!r}")
        if dims.count(("...",)) > 1:
            raise self.fail("'...' stands twice in one tensor")
        return tuple(dims)


@cache
def parse_line(text: str) -> Line:
    """The line written as `text`.

    >>> parse_line("... i * o i + o -> ... o").operands
    ((('...',), ('i',)), (('o',), ('i',)), (('o',),))
    """
    return _Parser(text).line()


# Binding


def bind(
    line: Line,
    operands: Sequence[Sequence[int] | None],
    results: Sequence[Sequence[int]],
    sizes: Mapping[str, int] | None = None,
) -> Bound:
    """Give every index its length from the shapes of a call; an operand that is None is left out.

    A dim of length one whose index is longer elsewhere is broadcast: that tensor does not carry the index.
    """
    if len(operands) != len(line.operands) or len(results) != len(line.results):
        raise NotationError(
            f"rule line has {len(line.operands)} operands and {len(line.results)} results, "
            f"the call has {len(operands)} and {len(results)}",
            where=repr(line.text),
            do="give every tensor argument of the op its place in the line",
        )
    expanded = [
        None if shape is None else _expand(spec, len(shape), line)
        for spec, shape in zip((*line.operands, *line.results), (*operands, *results), strict=True)
    ]
    shapes = [*operands, *results]
    lengths = _lengths(line, expanded, shapes, dict(sizes or {}))
    carried = [
        {} if spec is None or shape is None else _carried(line, spec, shape, lengths)
        for spec, shape in zip(expanded, shapes, strict=True)
    ]
    kept = [k for k, shape in enumerate(operands) if shape is not None]
    numbers = {old: new for new, old in enumerate(kept)}
    cuttable = [a for a, n in lengths.items() if n > 1 and a[0] == a[0].lower()]
    return Bound(
        lengths,
        tuple(carried[k] for k in kept),
        tuple(carried[len(operands) :]),
        _keep(line.algebra, numbers),
        tuple(a for a in cuttable if any(a in c for c in carried)),
    )


def _expand(spec: Spec, rank: int, line: Line) -> list[Dim]:
    named = len(spec) - spec.count(("...",))
    if ("...",) not in spec:
        if named != rank:
            raise NotationError(
                f"rule line names {named} dims, the tensor has {rank}",
                where=repr(line.text),
                do="name every dim, or use '...'",
            )
        return list(spec)
    if named > rank:
        raise NotationError(
            f"rule line needs {named} dims, the tensor has {rank}",
            where=repr(line.text),
            do="shorten the line",
        )
    at = spec.index(("...",))
    # Counted from the right, so that operands of different rank line up as broadcasting does. "~" sorts and reads
    # apart from user letters, and is lower case: it may be cut.
    filler: list[Dim] = [(f"~{k}",) for k in reversed(range(rank - named))]
    return [*spec[:at], *filler, *spec[at + 1 :]]


def _lengths(
    line: Line,
    specs: Sequence[list[Dim] | None],
    shapes: Sequence[Sequence[int] | None],
    lengths: dict[str, int],
) -> dict[str, int]:
    merged: list[tuple[Dim, int]] = []
    ones: set[str] = set()
    for spec, shape in zip(specs, shapes, strict=True):
        for dim, size in zip(spec or (), shape or (), strict=True):
            if dim == ("1",):
                continue
            if size == 1:
                ones.update(dim)
            elif len(dim) > 1:
                merged.append((dim, size))
            elif lengths.setdefault(dim[0], size) != size:
                raise NotationError(
                    f"index {dim[0]!r} has length {lengths[dim[0]]} and length {size}",
                    where=repr(line.text),
                    do="use different letters for dims that are not the same",
                )
    for dim, size in merged:
        for name in dim:
            if name in ones:
                lengths.setdefault(name, 1)
        unknown = [name for name in dim if name not in lengths]
        known = 1
        for name in dim:
            known *= lengths.get(name, 1)
        if len(unknown) > 1 or (known and size % known) or (not unknown and known != size):
            raise NotationError(
                f"merged dim ({' '.join(dim)}) does not fit length {size}",
                where=repr(line.text),
                do="give the sizes of its parts",
            )
        if unknown:
            lengths[unknown[0]] = size // known if known else 0
    return lengths


def _carried(line: Line, spec: list[Dim], shape: Sequence[int], lengths: Mapping[str, int]) -> dict[str, Where]:
    carried: dict[str, Where] = {}
    for position, (dim, size) in enumerate(zip(spec, shape, strict=True)):
        if dim == ("1",) or size < 2:
            continue
        outer, unit = 1, size
        for name in dim:
            unit //= lengths[name]
            carried[name] = Where(position, outer, unit)
            outer *= lengths[name]
    return carried


def _keep(algebra: Algebra | None, numbers: Mapping[int, int]) -> Algebra | None:
    """The algebra without operands that were not given."""
    if isinstance(algebra, Operand):
        return Operand(numbers[algebra.number]) if algebra.number in numbers else None
    if isinstance(algebra, Nonlinear):
        kept = tuple(Operand(numbers[o.number]) for o in algebra.operands if o.number in numbers)
        return Nonlinear(kept) if kept else None
    if isinstance(algebra, Product | Sum):
        children = algebra.factors if isinstance(algebra, Product) else algebra.terms
        parts = tuple(part for child in children if (part := _keep(child, numbers)) is not None)
        if len(parts) < 2:
            return parts[0] if parts else None
        return Product(parts) if isinstance(algebra, Product) else Sum(parts)
    return None


# Deriving


def derive(bound: Bound, variants: Mapping[str, Iterable[Variant]] | None = None) -> tuple[Rule, ...]:
    """All rules that follow from a bound line, in a stable order without repetition."""
    rules = [*_whole_rules(bound)]
    for assignment in _partial(bound.algebra, None, bound):
        rules.append(Rule(_needs(bound, assignment, {}), (P,) * len(bound.results)))
    for index in bound.cuttable:
        for variant in (variants or {}).get(index, (PLAIN,)):
            rules.extend(_cut_rules(bound, index, variant))
    return tuple(dict.fromkeys(rules))


def _whole_rules(bound: Bound) -> Iterator[Rule]:
    for whole in (I, R) if bound.operands else (I,):
        yield Rule((whole,) * len(bound.operands), (whole,) * len(bound.results))


def _cut_rules(bound: Bound, index: str, variant: Variant) -> Iterator[Rule]:
    gives = tuple(where[index].placed(variant) if index in where else P for where in bound.results)
    shards = {k: where[index].placed(variant) for k, where in enumerate(bound.operands) if index in where}
    if any(give.is_shard for give in gives):
        needs = tuple(shards.get(k, R) for k in range(len(bound.operands)))
        yield Rule(needs, gives)
        by_factors = _sfb_needs(bound, index)
        if by_factors and all(give.is_shard for give in gives):
            yield Rule(tuple(I if k in by_factors else need for k, need in enumerate(needs)), gives, "sfb")
    else:
        for assignment in _partial(bound.algebra, index, bound):
            yield Rule(_needs(bound, assignment, shards), gives)


def _needs(bound: Bound, partial: frozenset[int], shards: Mapping[int, Placement]) -> tuple[Placement, ...]:
    return tuple(shards.get(k, P if k in partial else R) for k in range(len(bound.operands)))


def _operands(algebra: Algebra | None) -> Iterator[int]:
    if isinstance(algebra, Operand):
        yield algebra.number
    elif isinstance(algebra, Nonlinear):
        yield from (operand.number for operand in algebra.operands)
    elif isinstance(algebra, Product | Sum):
        for child in algebra.factors if isinstance(algebra, Product) else algebra.terms:
            yield from _operands(child)


def _carries(algebra: Algebra, index: str | None, bound: Bound) -> bool:
    return index is not None and any(index in bound.operands[k] for k in _operands(algebra))


def _partial(algebra: Algebra | None, index: str | None, bound: Bound) -> Iterator[frozenset[int]]:
    """Each set of operands that, placed as P (and the cut ones as S), makes this a term of a sum over devices."""
    if isinstance(algebra, Operand):
        yield frozenset() if _carries(algebra, index, bound) else frozenset({algebra.number})
    elif isinstance(algebra, Nonlinear):
        if _carries(algebra, index, bound):
            yield frozenset()
    elif isinstance(algebra, Product):
        cut = [factor for factor in algebra.factors if _carries(factor, index, bound)]
        if len(cut) > 1:
            # Two factors cut alike contract piece by piece, if every part of each is cut.
            if all(not isinstance(factor, Sum) for factor in cut):
                yield frozenset()
        else:
            for factor in cut or algebra.factors:
                yield from _partial(factor, index, bound)
    elif isinstance(algebra, Sum):
        for parts in itertools.product(*(list(_partial(term, index, bound)) for term in algebra.terms)):
            yield frozenset().union(*parts)


def _sfb_needs(bound: Bound, index: str) -> frozenset[int]:
    """The operands whose gradient can be had from gathered factors when `index` is cut: none if there is no product."""

    def lacking(algebra: Algebra) -> Iterator[int]:
        if isinstance(algebra, Operand) and not _carries(algebra, index, bound):
            yield algebra.number
        elif isinstance(algebra, Product | Sum):
            for child in algebra.factors if isinstance(algebra, Product) else algebra.terms:
                yield from lacking(child)

    def has_product(algebra: Algebra | None) -> bool:
        if isinstance(algebra, Sum):
            return any(has_product(term) for term in algebra.terms)
        return (
            isinstance(algebra, Product)
            and _carries(algebra, index, bound)
            and any(isinstance(f, Operand) and not _carries(f, index, bound) for f in algebra.factors)
        )

    if bound.algebra is None or not has_product(bound.algebra):
        return frozenset()
    return frozenset(lacking(bound.algebra))
