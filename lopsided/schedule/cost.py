"""What a choice costs: seconds of an op, of a conversion and of an update, affine in a device's share.

In: a `Graph` and a `Cluster`. Out: `Costs`, which prices a node under a rule for every kind of device (`OpCost`), and
`Transfer`s, which say what is sent without saying how long that takes. Nothing here depends on shares; `Scale` brings
them in: how large the pieces of each kind are.

    seconds of an op          measured(f), where the kind has measured it                  `fitted_line`
                              launch · kernels + max(flops(f) / flops_per_s,
                                                     bytes(f) / bytes_per_s) otherwise     `_roofline`
    flops(f)                  flops · f if the rule cuts anything, else flops
    bytes(f)                  Σ bytes of shards · f + Σ bytes of whole values
    gathered factors (SFB)    pieces of the shards' gradients + whole gradients            `Costs._by_factors`
    around every op           + overhead, forward and backward                             `Costs.overheads`
    around a conversion       + overhead + packing · 2 · bytes / bytes_per_s, if measured   `Costs.packing`
    seconds of a transfer     those of the cheapest way                                    `transfer_s`
    seconds of an update      + state / host_bytes_per_s there and back, if in host memory  `Costs.fetched`
                              measured(f), where the kind has measured the optimizer;
                              launch / 30 + bytes moved(f) / bytes_per_s otherwise         `Costs.update`

A maximum of two affine functions is not affine. Which side of the roof binds is decided at shares by speed, near which
good shares lie, and that side is used for every f: exact there, and from below elsewhere. A device whose share is 0
still pays the constant part.

Calls with equal signatures have one price, so the depth of a model costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lopsided.cluster.cluster import Cluster, Kind, Measured
from lopsided.cluster.collectives import Network
from lopsided.errors import InputError, NotationError, SharesError
from lopsided.ir.graph import DTYPES, Graph, Leaf, Node, Value, reruns, signature
from lopsided.ir.notation import Algebra, Nonlinear, Operand, Product, Rule, Sum
from lopsided.ir.placement import AnyShares, I, Placement, Shares
from lopsided.ops.derive import describe_call
from lopsided.ops.op import Call
from lopsided.ops.simulated_devices import cotangent
from lopsided.schedule.flops import Work, call_texts, exchanges, work_of

Cut = tuple[str, int]
"""An index that is cut: the name of the shares that cut it ("" for work), and its length in units."""


@dataclass(frozen=True, slots=True)
class Affine:
    """Seconds as a function of the fraction a device has.

    >>> Affine(1.0, 4.0).at(0.25)
    2.0
    """

    constant: float = 0.0
    slope: float = 0.0

    def at(self, fraction: float) -> float:
        return self.constant + self.slope * fraction

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.constant + other.constant, self.slope + other.slope)


FREE = Affine()


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective over all devices.

    `whole_bytes` are those of the joined tensor, `cuts` those of the shards it starts from or ends in. One that `hides`
    runs behind computation: the synchronisation of a gradient, which nobody waits for before the optimizer, or, if it
    may be started `ahead` of its place, the gathering of a parameter. Others block.
    """

    what: str
    collective: str
    whole_bytes: int
    cuts: tuple[Cut, ...] = ()
    hides: bool = False
    ahead: bool = False
    dtype: str = ""  # of what is sent, where several may be sent as one
    per_device: bool = False  # `whole_bytes` are for one device: what is sent grows with their number

    def bytes_among(self, devices: int) -> int:
        return self.whole_bytes * devices if self.per_device else self.whole_bytes


@dataclass(frozen=True, slots=True)
class OpCost:
    """One node under one rule: seconds per kind, and what it sends by itself.

    `forwards` is how often a step runs it forward: the nodes of a checkpointed region twice.
    """

    forward: tuple[Affine, ...]
    backward: tuple[Affine, ...]
    cut: Cut | None
    talks: tuple[Transfer, ...] = ()
    back_talks: tuple[Transfer, ...] = ()
    forwards: int = 1

    def seconds(self, fractions: Sequence[float]) -> tuple[float, ...]:
        """What each kind computes in a whole step."""
        both = zip(self.forward, self.backward, fractions, strict=True)
        return tuple(self.forwards * there.at(f) + back.at(f) for there, back, f in both)

    @property
    def sent(self) -> tuple[Transfer, ...]:
        """What is sent for it in a whole step."""
        return (*self.talks * self.forwards, *self.back_talks)


# Shares


def cut_of(placement: Placement, shape: Sequence[int]) -> Cut | None:
    """What a placement cuts of a value of this shape."""
    return (placement.by, placement.length(shape)) if placement.is_shard else None


class Scale:
    """How large pieces are: the only place where shares meet costs. Answers are remembered."""

    def __init__(self, cluster: Cluster, shares: AnyShares) -> None:
        self.cluster = cluster
        self.shares = shares if isinstance(shares, Shares) else Shares(shares)
        if len(self.shares) != cluster.devices:
            raise SharesError(
                f"there are {len(self.shares)} shares for {cluster.devices} devices",
                where=f"cluster {cluster.name}",
                do="give one share per device",
            )
        self._spans = cluster.spans
        self._whole = (1.0,) * len(self._spans)
        self._fractions: dict[Cut, tuple[float, ...]] = {}
        self._expected: dict[str, tuple[float, ...]] = {}
        self._largest: dict[tuple[Cut, ...], float] = {(): 1.0}

    def fractions(self, cut: Cut | None) -> tuple[float, ...]:
        """For each kind, the largest piece of a device over the whole length; 1 for what is not cut."""
        if cut is None:
            return self._whole
        found = self._fractions.get(cut)
        if found is None:
            by, length = cut
            pieces = self.shares.cut(length, by)
            found = tuple(max(pieces[start:stop]) / max(length, 1) for start, stop in self._spans)
            self._fractions[cut] = found
        return found

    def expected(self, cut: Cut | None) -> tuple[float, ...]:
        """The same before lengths are rounded to units: the largest share of each kind."""
        if cut is None:
            return self._whole
        found = self._expected.get(cut[0])
        if found is None:
            shares = self.shares.of(cut[0])
            found = self._expected[cut[0]] = tuple(max(shares[start:stop]) for start, stop in self._spans)
        return found

    def largest(self, cuts: tuple[Cut, ...]) -> float:
        """Devices × the largest fraction any device has: 1 for equal pieces, n if one device has everything."""
        found = self._largest.get(cuts)
        if found is None:
            found = self.cluster.devices * max(max(self.fractions(cut)) for cut in cuts)
            self._largest[cuts] = found
        return found


def transfer_s(transfer: Transfer, network: Network, scale: Scale) -> float:
    """Seconds of a transfer by its cheapest implementation."""
    size, largest = transfer.bytes_among(scale.cluster.devices), scale.largest(transfer.cuts)
    return network.best(transfer.collective, size, largest).seconds(size, largest)


# Conversions


def collective_of(source: Placement, to: Placement) -> str:
    """What is sent to change a placement, gradients aside; "" where nothing is."""
    if source == to or source.is_whole or to.kind == "P":
        return ""
    if source.kind == "P":
        return "reduce_scatter" if to.is_shard else "all_reduce"
    return "all_to_all" if to.is_shard else "all_gather"


@lru_cache(maxsize=65536)
def conversion(value: Value, source: Placement, to: Placement) -> tuple[Transfer | None, Transfer | None]:
    """What a conversion sends forward and, if the value has a gradient, backward: its transpose.

    A slice, a place in zeros and a value kept on one device send nothing and are taken to be free. The gradient of a
    value has the value's dtype.
    """
    forward = _sent(value, source, to, value.name)
    backward = _sent(value, cotangent(to), cotangent(source), f"∂{value.name}") if value.grad else None
    return forward, backward


def _sent(value: Value, source: Placement, to: Placement, name: str) -> Transfer | None:
    collective = collective_of(source, to)
    if not collective:
        return None
    cuts = tuple(cut for placement in (source, to) if (cut := cut_of(placement, value.shape)) is not None)
    return Transfer(f"{name} {source}→{to}", collective, value.bytes, tuple(dict.fromkeys(cuts)), dtype=value.dtype)


# Optimizers


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps and moves for a parameter, in multiples of the parameter's own bytes."""

    name: str
    state: int  # copies kept from step to step, in the parameter's dtype, as torch keeps them
    passes: int  # times a byte of the parameter's size is read or written in one update


OPTIMIZERS: dict[str, Optimizer] = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("sgd", 0, 3),  # reads p and g, writes p
        Optimizer("momentum", 1, 5),  # and reads and writes the average
        Optimizer("adam", 2, 7),
        Optimizer("adamw", 2, 7),
        Optimizer("adagrad", 1, 5),
        Optimizer("rmsprop", 1, 5),
        Optimizer("lion", 1, 5),
        Optimizer("adafactor", 0, 6),  # row and column sums only; p and g are read twice, an update in between
    )
}
UPDATED_ELEMENTS = 2**20
"""Of the tensor that an update is measured for; smaller ones are its fractions."""

_TENSORS_PER_LAUNCH = 30
"""A fused update takes some 30 tensors in one kernel: as many as fit in its arguments."""


def optimizer_named(name: str) -> Optimizer:
    if name not in OPTIMIZERS:
        raise InputError(
            f"there is no optimizer {name!r}",
            do=f"choose the one that keeps what yours keeps: {', '.join(OPTIMIZERS)}",
        )
    return OPTIMIZERS[name]


def update_call(optimizer: str, dtype: str) -> str:
    """What the measured update of one tensor is called among the measured calls."""
    return f"update:{optimizer}({dtype}[{UPDATED_ELEMENTS}])"


# Ops


class Calls:
    """The calls of a graph: which are alike, and what they have to do, on whatever cluster. Remembers its answers."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.reruns = reruns(graph)
        self._numbers: dict[object, int] = {}  # of signatures
        self._number_of: dict[str, int] = {}
        self._works: dict[int, Work] = {}

    def number(self, node: Node) -> int:
        """A number for what the call is: the same for calls with equal signatures that are recomputed alike."""
        number = self._number_of.get(node.name)
        if number is None:
            key = (signature(node, self.graph.values), self.reruns.get(node.name))
            number = self._numbers.setdefault(key, len(self._numbers))
            self._number_of[node.name] = number
        return number

    def work(self, node: Node) -> Work:
        number = self.number(node)
        work = self._works.get(number)
        if work is None:
            work = self._works[number] = work_of(Call.of(node, self.graph.values))
        return work


class Costs:
    """Prices of everything a program can be made of, on one cluster with one optimizer. Remembers what it priced.

    Costs of the same graph on several clusters may have the `calls` in common.
    """

    def __init__(self, graph: Graph, cluster: Cluster, optimizer: Optimizer, calls: Calls | None = None) -> None:
        self.graph, self.cluster, self.optimizer = graph, cluster, optimizer
        self.network = Network(cluster)
        self.calls = calls or Calls(graph)
        self.overheads = tuple(kind.overhead_s for kind in cluster.kinds)
        # Seconds in which a byte that is sent is read and written once more, to lie beside others or in its place. A
        # device whose process only gives orders (a GPU) does that at a speed at which it does not count.
        # Unless somebody saw that it does.
        counts = [bool(kind.overhead_s) or cluster.packing > 1 for kind in cluster.kinds]
        self.packing = tuple(
            cluster.packing * 2 / kind.bytes_per_s if one else 0.0
            for kind, one in zip(cluster.kinds, counts, strict=True)
        )
        self._total: dict[str, float] = {}  # FLOP/s of all devices together, by dtype
        self._tables: tuple[dict[str, Measured], ...] = tuple({m.call: m for m in k.measured} for k in cluster.kinds)
        self._ops: dict[tuple[int, Rule], OpCost] = {}
        self._updates: dict[tuple[int, str, bool], tuple[Affine, ...]] = {}

    def number(self, node: Node) -> int:
        """A number for what the call is (`Calls.number`)."""
        return self.calls.number(node)

    def work(self, node: Node) -> Work:
        return self.calls.work(node)

    def op(self, node: Node, rule: Rule) -> OpCost:
        """What a node costs under a rule, whatever the shares."""
        key = (self.number(node), rule)
        cost = self._ops.get(key)
        if cost is None:
            cost = self._ops[key] = self._price(Call.of(node, self.graph.values), self.work(node), rule)
        return cost

    def update(self, leaf: Leaf, placement: Placement) -> tuple[Affine, ...]:
        """The optimizer's seconds for a parameter stored so, per kind; nothing for one that is not trained."""
        size = leaf.value.bytes if leaf.kind == "parameter" and leaf.value.grad else 0
        key = (size, leaf.value.dtype, placement.is_shard)
        seconds = self._updates.get(key)
        if seconds is None:
            seconds = self._updates[key] = tuple(
                self._update(kind, table, *key) for kind, table in zip(self.cluster.kinds, self._tables, strict=True)
            )
        return seconds

    def fetched(self, state_bytes: int, placement: Placement) -> tuple[Affine, ...]:
        """What it takes more to update a parameter so, per kind, where its state is in host memory: it is fetched, and
        taken back."""
        found = []
        for kind in self.cluster.kinds:
            # Where host memory is the device's own, it is read and written there.
            per_s = kind.host_bytes_per_s or kind.bytes_per_s / 2
            seconds = 2 * state_bytes / per_s
            found.append(Affine(0.0, seconds) if placement.is_shard else Affine(seconds, 0.0))
        return tuple(found)

    def _update(self, kind: Kind, table: Mapping[str, Measured], size: int, dtype: str, is_cut: bool) -> Affine:
        if not size:
            return FREE
        measured = table.get(update_call(self.optimizer.name, dtype))
        if measured is not None:
            fitted = fitted_line(measured.forward)
            whole = size / DTYPES[dtype].itemsize / UPDATED_ELEMENTS
            pieces = Affine(fitted.constant, fitted.slope * whole)
            return pieces if is_cut else Affine(pieces.at(1.0), 0.0)
        moving, launch = self.optimizer.passes * size / kind.bytes_per_s, kind.launch_s / _TENSORS_PER_LAUNCH
        return Affine(launch, moving) if is_cut else Affine(launch + moving, 0.0)

    def _price(self, call: Call, work: Work, rule: Rule) -> OpCost:
        cut = rule_cut(call, rule)
        cut_at = [placement.is_shard for placement in (*rule.needs, *rule.gives)]
        wanted = _wanted(call, rule)
        gathered = _gathered(call, rule, wanted)
        texts = call_texts(call.node, self.graph.values, rule.how) if any(self._tables) else ()
        forward, backward = [], []
        for kind, table in zip(self.cluster.kinds, self._tables, strict=True):
            measured = next((table[text] for text in texts if text in table), None)
            if measured is not None:
                forward.append(_fraction_or_all(fitted_line(measured.forward), cut))
            else:
                forward.append(
                    self._roofline(
                        kind, work.dtype, work.kernels[0], work.forward_flops, work.forward_bytes, cut_at, cut
                    )
                )
            if measured is not None and measured.backward:
                backward.append(_split(fitted_line(measured.backward), cut, work, wanted))
            elif wanted:
                backward.append(self._by_factors(kind, call, work, cut_at, cut, wanted, gathered))
            else:
                flops = sum(work.gradient_flops)
                backward.append(
                    self._roofline(kind, work.dtype, work.kernels[1], flops, work.gradient_bytes, cut_at, cut)
                )
        if any(self.overheads):
            forward = [_later(affine, extra) for affine, extra in zip(forward, self.overheads, strict=True)]
            if any(value.grad for value in call.node.results):
                backward = [_later(affine, extra) for affine, extra in zip(backward, self.overheads, strict=True)]
        talks, back_talks = _sent_by(call, rule)
        forwards = 2 if call.node.name in self.calls.reruns else 1
        return OpCost(tuple(forward), tuple(backward), cut, talks, back_talks, forwards)

    def _roofline(
        self,
        kind: Kind,
        dtype: str,
        kernels: float,
        flops: float,
        sizes: Sequence[float],
        cut_at: Sequence[bool],
        cut: Cut | None,
    ) -> Affine:
        """The side of the roof that binds at shares by speed."""
        launch = kind.launch_s * kernels
        computing = flops / kind.flops(dtype)
        pieces = sum(size for size, is_cut in zip(sizes, cut_at, strict=True) if is_cut) / kind.bytes_per_s
        wholes = sum(size for size, is_cut in zip(sizes, cut_at, strict=True) if not is_cut) / kind.bytes_per_s
        if cut is None:
            return Affine(launch + max(computing, wholes), 0.0)
        share = kind.flops(dtype) / self._flops(dtype)
        if computing * share >= wholes + pieces * share:
            return Affine(launch, computing)
        return Affine(launch + wholes, pieces)

    def _flops(self, dtype: str) -> float:
        if dtype not in self._total:
            self._total[dtype] = sum(kind.devices * kind.flops(dtype) for kind in self.cluster.kinds)
        return self._total[dtype]

    def _by_factors(
        self,
        kind: Kind,
        call: Call,
        work: Work,
        cut_at: Sequence[bool],
        cut: Cut | None,
        wanted: frozenset[int],
        gathered: Sequence[Transfer],
    ) -> Affine:
        """Backward by gathered factors: pieces of the other gradients, and the wanted ones whole on every device."""
        operands = len(call.operands)
        trained = sum(v.grad for v in call.operands)
        part = len(wanted) / trained
        own = [k for k in range(operands) if k not in wanted]
        reads = work.gradient_bytes[operands:]
        # A product reads the gradient of its result once for every gradient it makes.
        sizes = [work.gradient_bytes[k] for k in own] + [size * (1 - part) for size in reads]
        flags = [cut_at[k] for k in own] + list(cut_at[operands:])
        flops = sum(work.gradient_flops[k] for k in own)
        pieces = self._roofline(kind, work.dtype, work.kernels[1] * (1 - part), flops, sizes, flags, cut)
        sizes = [work.gradient_bytes[k] for k in wanted] + [size * part for size in reads]
        sizes += [transfer.whole_bytes for transfer in gathered if not transfer.what.startswith("∂")]
        flops = sum(work.gradient_flops[k] for k in wanted)
        wholes = self._roofline(kind, work.dtype, work.kernels[1] * part, flops, sizes, [False] * len(sizes), None)
        return pieces + wholes


def rule_cut(call: Call, rule: Rule) -> Cut | None:
    """The index a rule cuts."""
    cut = call.cut_by(rule)
    return None if cut is None else cut_of(cut[0], cut[1].shape)


# Measured seconds


def fitted_line(points: Sequence[tuple[float, float]]) -> Affine:
    """Least squares through (fraction, seconds), with neither part negative.

    Where the free fit has a negative part the best legal one lies on the edge: through the origin, or constant.

    >>> fitted_line(((0.5, 3.0), (1.0, 5.0)))
    Affine(constant=1.0, slope=4.0)
    """
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    squares = sum(x * x for x, _ in points)
    if spread == 0:
        # One point says nothing about what does not scale.
        return Affine(0.0, mean_y / mean_x) if mean_x else Affine(mean_y, 0.0)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    constant = mean_y - slope * mean_x
    if slope < 0:
        return Affine(mean_y, 0.0)
    return Affine(constant, slope) if constant >= 0 else Affine(0.0, sum(x * y for x, y in points) / squares)


def _later(seconds: Affine, extra: float) -> Affine:
    return Affine(seconds.constant + extra, seconds.slope)


def _fraction_or_all(fitted: Affine, cut: Cut | None) -> Affine:
    return fitted if cut is not None else Affine(fitted.at(1.0), 0.0)


def _split(fitted: Affine, cut: Cut | None, work: Work, wanted: frozenset[int]) -> Affine:
    """A measured backward pass; under gathered factors the wanted gradients take their part of its flops, whole."""
    total = sum(work.gradient_flops)
    part = sum(work.gradient_flops[k] for k in wanted) / total if total else 0.0
    pieces = _fraction_or_all(fitted, cut)
    return Affine(pieces.constant * (1 - part) + fitted.at(1.0) * part, pieces.slope * (1 - part))


# What ops send


def sent_by(graph: Graph, node: Node, rule: Rule) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """What a node sends by itself under a rule, forward and backward: most rules send nothing."""
    if rule.how == "plain":
        return (), ()
    key = (signature(node, graph.values), rule)
    found = _SENT.get(key)
    if found is None:
        if len(_SENT) >= _MOST_SENT:
            _SENT.clear()
        found = _SENT[key] = _sent_by(Call.of(node, graph.values), rule)
    return found


_SENT: dict[object, tuple[tuple[Transfer, ...], tuple[Transfer, ...]]] = {}
_MOST_SENT = 10_000
"""So many answers are remembered: a process that plans for days should not grow."""


def _sent_by(call: Call, rule: Rule) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    talks, back_talks = _talks(call, rule, rule_cut(call, rule))
    return talks, (*back_talks, *_gathered(call, rule, _wanted(call, rule)))


def _talks(call: Call, rule: Rule, cut: Cut | None) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    if rule.how in ("plain", "sfb"):
        return (), ()
    forward: list[Transfer] = []
    backward: list[Transfer] = []
    for exchange in exchanges(call, rule):
        cuts = () if cut is None or exchange.collective == "all_reduce" else (cut,)
        what = f"{'∂' if exchange.backward else ''}{call.node.op} [{rule.how}]"
        into = backward if exchange.backward else forward
        into.append(Transfer(what, exchange.collective, exchange.whole_bytes, cuts, per_device=exchange.per_device))
    return tuple(forward), tuple(backward)


def _wanted(call: Call, rule: Rule) -> frozenset[int]:
    """The operands whose gradient comes from gathered factors under this rule."""
    if rule.how != "sfb":
        return frozenset()
    needed = zip(rule.needs, call.operands, strict=True)
    return frozenset(k for k, (need, value) in enumerate(needed) if need == I and value.grad)


def _gathered(call: Call, rule: Rule, wanted: frozenset[int]) -> tuple[Transfer, ...]:
    """What is gathered backward for the wanted gradients: the gradients of results, and the factors beside them.

    They block: a runtime may find a way to hide them, but a plan should not count on it.
    """
    if not wanted:
        return ()
    factors = factors_beside(call, wanted)
    found = []
    for k, (need, value) in enumerate(zip(rule.needs, call.operands, strict=True)):
        cut = cut_of(need, value.shape)
        if cut is not None and k in factors:
            found.append(Transfer(f"{call.node.op} operand {k} {need}→I", "all_gather", value.bytes, (cut,)))
    for k, (give, value) in enumerate(zip(rule.gives, call.node.results, strict=True)):
        cut = cut_of(give, value.shape)
        if cut is not None and value.grad:
            found.append(Transfer(f"∂{call.node.op} result {k} {give}→I", "all_gather", value.bytes, (cut,)))
    return tuple(found)


def factors_beside(call: Call, wanted: frozenset[int]) -> frozenset[int]:
    """The operands that the gradients of `wanted` are made of: those they are multiplied with."""
    try:
        described = describe_call(call)
    except NotationError:
        described = None
    if described is None:
        return frozenset(range(len(call.operands)))
    return frozenset(_beside(described.bound.algebra, wanted))


def _beside(algebra: Algebra | None, wanted: frozenset[int]) -> set[int]:
    if isinstance(algebra, Sum):
        return {k for term in algebra.terms for k in _beside(term, wanted)}
    if not isinstance(algebra, Product):
        return set()
    inside = [_inside(factor) for factor in algebra.factors]
    found = {k for factor in algebra.factors for k in _beside(factor, wanted)}
    for j, operands in enumerate(inside):
        if operands & wanted:
            found |= {k for i, others in enumerate(inside) if i != j for k in others}
    return found


def _inside(algebra: Algebra) -> set[int]:
    if isinstance(algebra, Operand):
        return {algebra.number}
    if isinstance(algebra, Nonlinear):
        return {operand.number for operand in algebra.operands}
    return {k for part in (algebra.factors if isinstance(algebra, Product) else algebra.terms) for k in _inside(part)}
