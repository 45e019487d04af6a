"""What the search adds up: seconds of every choice, at given shares.

In: `Costs` and a `Scale`. Out: `SharePrices`.

    rule      max over kinds of (forward + backward) + what it sends                  `rule`
    convert   forward and backward transfer of an activation: everyone waits          `convert`
    fetch     the same of a parameter; the part that hides behind computation is free `fetch`, `Hidden`
    store     the slowest kind's update                                               `store`
    memory    + bytes held on each kind × a price per byte, where memory is short

What a checkpointed region computes, converts and gathers forward counts twice, and of its memory what it takes from
outside, in the placement it is used in.

A sum of maxima is more than a step takes, a full bucket's latency less than a half-full one's, and the hidden part
is an estimate: prices propose, the timeline disposes.
"""

from __future__ import annotations

from typing import NamedTuple

from lopsided.ir.graph import Leaf, Node, Value, retaken
from lopsided.ir.notation import Rule
from lopsided.ir.placement import Placement
from lopsided.schedule.cost import Costs, Scale, Transfer, conversion, cut_of, transfer_s
from lopsided.schedule.decisions import BUCKET_BYTES
from lopsided.schedule.memory import Holding, saved_by, stored

Saves = dict[tuple[int, Rule], tuple[Holding, ...]]  # what a call keeps under a rule, by the number of its signature
RulePrices = dict[tuple[int, Rule], float]  # seconds of a call under a rule, memory aside


class Hidden(NamedTuple):
    """Which part of parameter traffic computation covers: gathering ahead of its use, and gradients after theirs."""

    ahead: float = 0.0
    after: float = 0.0


NOTHING_HIDDEN = Hidden()


class SharePrices:
    """Prices at these shares.

    `hidden` is what computation is expected to cover of parameter traffic; `byte_s` the price of a byte held
    on a device of each kind; with `regather`, gathered parameters are gathered a second time in the backward pass. The
    batch is computed in `microbatches` rounds, and the graph is that of one.
    What calls keep and what they take depends on none of these: `saves` and `rules` carry that from one search to the
    next.
    """

    def __init__(
        self,
        costs: Costs,
        scale: Scale,
        *,
        hidden: Hidden = NOTHING_HIDDEN,
        byte_s: tuple[float, ...] = (),
        regather: bool = False,
        microbatches: int = 1,
        saves: Saves | None = None,
        rules: RulePrices | None = None,
    ) -> None:
        self.costs, self.scale = costs, scale
        self.hidden, self.byte_s, self.regather = hidden, byte_s, regather
        # Prices are those of one round: of what is done once for all rounds, each has its part.
        self._once = 1 / microbatches
        self._retaken = retaken(costs.graph)
        # Of a device in the mean: which one will be the slowest is not known yet.
        kinds = costs.cluster.kinds
        self._compute_slowdown = sum(kind.compute_slowdown * kind.devices for kind in kinds) / costs.cluster.devices
        self._saves = {} if saves is None else saves
        self._rules = {} if rules is None else rules
        self._conversions: dict[object, float] = {}
        self._fetches: dict[object, float] = {}
        self._stores: dict[object, float] = {}

    def rule(self, node: Node, rule: Rule) -> float:
        key = (self.costs.number(node), rule)
        seconds = self._rules.get(key)
        if seconds is None:
            cost = self.costs.op(node, rule)
            computing = max(cost.seconds(self.scale.fractions(cost.cut)))
            seconds = self._rules[key] = computing + sum(self._seconds(transfer) for transfer in cost.sent)
        return seconds + (self._held(self._saved(node, rule)) if self.byte_s else 0.0)

    def _saved(self, node: Node, rule: Rule) -> tuple[Holding, ...]:
        key = (self.costs.number(node), rule)
        if key not in self._saves:
            self._saves[key] = saved_by(self.costs.graph, node, rule)
        return self._saves[key]

    def convert(self, value: Value, source: Placement, to: Placement) -> float:
        again = value.name in self._retaken
        key = (value.shape, value.dtype, value.grad, again, source, to)
        seconds = self._conversions.get(key)
        if seconds is None:
            there, back = conversion(value, source, to)
            sent = (there, there if again else None, back)
            seconds = self._conversions[key] = sum(self._seconds(t) for t in sent if t is not None)
        return seconds

    def store(self, leaf: Leaf, placement: Placement) -> float:
        key = (leaf.kind, leaf.value.shape, leaf.value.dtype, leaf.value.grad, placement)
        seconds = self._stores.get(key)
        if seconds is None:
            fractions = self.scale.fractions(cut_of(placement, leaf.value.shape))
            updates = zip(self.costs.update(leaf, placement), fractions, strict=True)
            seconds = max(update.at(f) for update, f in updates) * self._once
            seconds += self._held(stored(leaf, placement, self.costs.optimizer)) if self.byte_s else 0.0
            self._stores[key] = seconds
        return seconds

    def fetch(self, leaf: Leaf, stored: Placement, to: Placement) -> float:
        value = leaf.value
        recomputed = value.name in self._retaken
        key = (value.shape, value.dtype, value.grad, recomputed, stored, to)
        seconds = self._fetches.get(key)
        if seconds is None:
            seconds = self._fetches[key] = self._fetch(value, stored, to, recomputed)
        return seconds

    def _fetch(self, value: Value, stored: Placement, to: Placement, recomputed: bool) -> float:
        there, back = conversion(value, stored, to)
        seconds = 0.0
        if there is not None:
            again = there.collective == "all_gather" and (recomputed or (self.regather and value.grad))
            times = (2 if again else 1) * (1 if self.regather else self._once)
            seconds += self._bucketed(there) * times * self._shown(self.hidden.ahead)
        if back is not None:
            times = 1 if self.regather and back.collective == "reduce_scatter" else self._once
            seconds += self._bucketed(back) * times * self._shown(self.hidden.after)
        # A term of a sum is as large as the whole, and only what was gathered can be gathered again.
        if self.byte_s and stored.is_shard and (to.kind == "P" or (to.is_whole and not (self.regather or recomputed))):
            seconds += self._held((Holding(value.name, "gathered", value.bytes, None),))
        return seconds

    def _shown(self, hidden: float) -> float:
        """The part of a second that still counts if this much of it is covered: what is covered slows computing."""
        return 1 - hidden * (1 - self._compute_slowdown)

    def is_cheap(self, node: Node) -> bool:
        touched = sum(v.elements for v in node.results)
        touched += sum(self.costs.graph.values[name].elements for name in node.operands)
        return self.costs.work(node).forward_flops <= 2 * touched

    def _seconds(self, transfer: Transfer) -> float:
        return transfer_s(transfer, self.costs.network, self.scale)

    def _bucketed(self, transfer: Transfer) -> float:
        """Small transfers travel together and share one latency."""
        largest = self.scale.largest(transfer.cuts)
        way = self.costs.network.best(transfer.collective, max(transfer.whole_bytes, BUCKET_BYTES), largest)
        full = transfer.whole_bytes / max(transfer.whole_bytes, BUCKET_BYTES)
        return way.seconds(transfer.whole_bytes, largest) - way.latency_s * (1 - full)

    def _held(self, holdings: tuple[Holding, ...]) -> float:
        total = 0.0
        for holding in holdings:
            fractions = self.scale.fractions(holding.cut)
            total += holding.bytes * sum(price * f for price, f in zip(self.byte_s, fractions, strict=True))
        return total
