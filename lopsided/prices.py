"""What the search adds up: seconds of every choice, at given shares.

In: `Costs` and a `Scale`. Out: `SharePrices`.

    rule      max over kinds of (forward + backward) + what it sends                  `rule`
    convert   forward and backward transfer of an activation: everyone waits          `convert`
    fetch     the same of a parameter; the part that hides behind computation is free `fetch`
    store     the slowest kind's update                                               `store`
    memory    + bytes held on each kind × a price per byte, where memory is short

A sum of maxima is an upper bound of what a step takes, and the hidden part is an estimate: prices propose, the timeline
disposes.
"""

from __future__ import annotations

from lopsided.cost import Costs, Scale, Transfer, conversion, cut_of, transfer_s
from lopsided.graph import Leaf, Node, Value
from lopsided.memory import Holding, saved_by, stored
from lopsided.notation import Rule
from lopsided.placement import Placement
from lopsided.timeline import BUCKET_BYTES


class SharePrices:
    """Prices at these shares.

    `hidden` is the part of parameter traffic that computation is expected to cover; `byte_s` the price of a byte held
    on a device of each kind; with `regather`, gathered parameters are gathered a second time in the backward pass.
    """

    def __init__(
        self,
        costs: Costs,
        scale: Scale,
        *,
        hidden: float = 0.0,
        byte_s: tuple[float, ...] = (),
        regather: bool = False,
    ) -> None:
        self.costs, self.scale = costs, scale
        self.hidden, self.byte_s, self.regather = hidden, byte_s, regather
        self._conversions: dict[object, float] = {}
        self._fetches: dict[object, float] = {}

    def rule(self, node: Node, rule: Rule) -> float:
        cost = self.costs.op(node, rule)
        fractions = self.scale.fractions(cost.cut)
        computing = max(
            there.at(f) + back.at(f) for there, back, f in zip(cost.forward, cost.backward, fractions, strict=True)
        )
        talking = sum(self._seconds(transfer) for transfer in (*cost.talks, *cost.back_talks))
        held = self._held(saved_by(self.costs.graph, node, rule)) if self.byte_s else 0.0
        return computing + talking + held

    def convert(self, value: Value, source: Placement, to: Placement) -> float:
        key = (value.shape, value.dtype, value.grad, source, to)
        seconds = self._conversions.get(key)
        if seconds is None:
            sent = conversion(value, source, to)
            seconds = self._conversions[key] = sum(self._seconds(t) for t in sent if t is not None)
        return seconds

    def store(self, leaf: Leaf, placement: Placement) -> float:
        fractions = self.scale.fractions(cut_of(placement, leaf.value.shape))
        updates = zip(self.costs.update(leaf, placement), fractions, strict=True)
        updating = max(update.at(f) for update, f in updates)
        return updating + (self._held(stored(leaf, placement, self.costs.optimizer)) if self.byte_s else 0.0)

    def fetch(self, leaf: Leaf, stored: Placement, to: Placement) -> float:
        value = leaf.value
        key = (value.shape, value.dtype, value.grad, stored, to)
        seconds = self._fetches.get(key)
        if seconds is None:
            seconds = self._fetches[key] = self._fetch(value, stored, to)
        return seconds

    def _fetch(self, value: Value, stored: Placement, to: Placement) -> float:
        there, back = conversion(value, stored, to)
        sent = [transfer for transfer in (there, back) if transfer is not None]
        if self.regather and there is not None and there.collective == "all_gather" and value.grad:
            sent.append(there)
        seconds = sum(self._bucketed(transfer) for transfer in sent) * (1 - self.hidden)
        if self.byte_s and not self.regather and stored.is_shard and to.is_whole:
            seconds += self._held((Holding(value.name, "gathered", value.bytes, None),))
        return seconds

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
