"""Seconds for everything that is computed in a lowered step.

In: a `Schedule` and the `Costs` of a cluster. Out: `PricedStep`: affine seconds for each kind of device, by the id of
what takes them. What is sent has no seconds yet: those depend on shares (`lopsided.schedule.timeline`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lopsided.ir.program import Step
from lopsided.schedule.coded_state import coding, state_bytes
from lopsided.schedule.cost import FREE, Affine, Costs, Cut, cut_of
from lopsided.schedule.offload import travelling
from lopsided.schedule.schedule import Chunked, Compute, Phase, Schedule

# Bytes of an element of a sum over rows, at least.
_WIDE = 4


@dataclass(frozen=True, slots=True)
class Computed:
    """Seconds of one item for each kind of device. `cut` says which fraction of them a device has."""

    id: str
    node: str
    phase: Phase
    seconds: tuple[Affine, ...]
    cut: Cut | None

    @property
    def backward(self) -> bool:
        return self.phase == "backward"


@dataclass(frozen=True)
class PricedStep:
    """A schedule with what its computing costs. What costs nothing has no entry."""

    schedule: Schedule
    computed: Mapping[str, Computed]  # by id: the passes, then the updates

    @cached_property
    def computes(self) -> tuple[Computed, ...]:
        """What is computed in both passes of every round, in order."""
        once = tuple(self.computed[item.id] for item in self.schedule.passes if item.id in self.computed)
        return once * self.schedule.decisions.microbatches

    @cached_property
    def updates(self) -> tuple[Computed, ...]:
        """What the optimizer does for each parameter. Here `node` is the parameter."""
        return tuple(self.computed[item.id] for item in self.schedule.update if item.id in self.computed)


def price(schedule: Schedule, costs: Costs) -> PricedStep:
    """What the computing of a step costs on a cluster."""
    around = any((*costs.overheads, *costs.packing))
    on_some = {node: region for region in schedule.regions.values() if region.kinds for node in region.nodes}
    partly: dict[object, tuple[Affine, ...]] = {}  # one for calls that are alike
    away = travelling(schedule, costs.cluster) if schedule.offloaded else {}
    found: dict[str, Computed] = {}
    for item in schedule.passes:
        if isinstance(item, Compute):
            step = schedule.steps[item.node]
            cost = costs.op(step.node, step.rule)
            seconds = cost.backward if item.phase == "backward" else cost.forward
            if item.node in schedule.chunked:
                seconds = _in_chunks(seconds, costs, item, step, schedule.chunked[item.node])
            if around and item.conversions:
                seconds = _with_conversions(seconds, costs, item)
            if item.phase == "again" and item.node in on_some:
                region, every = on_some[item.node], seconds
                seconds = partly.setdefault(
                    (every, region.kinds),
                    tuple(affine if region.runs_on(k) else FREE for k, affine in enumerate(every)),
                )
            if item.node in away and item.phase != "again":
                seconds = tuple(s + more for s, more in zip(seconds, away[item.node], strict=True))
            if any(affine != FREE for affine in seconds):
                found[item.id] = Computed(item.id, item.node, item.phase, seconds, cost.cut)
    leaves = {leaf.value.name: leaf for leaf in schedule.program.graph.parameters}
    updated = {value.name for value in schedule.program.graph.updated}
    for update in schedule.update:
        if update.parameter not in updated:
            continue  # optimizers pass over what has no gradient
        leaf = leaves[update.parameter]
        seconds = costs.update(leaf, update.placement)
        if update.bits and costs.optimizer.state:
            both = zip(seconds, coding(costs, leaf, update.placement), strict=True)
            seconds = tuple(s + more for s, more in both)
        if update.on_host:
            size = state_bytes(costs.optimizer, leaf.value, update.bits)
            both = zip(seconds, costs.fetched(size, update.placement), strict=True)
            seconds = tuple(s + more if k in update.on_host else s for k, (s, more) in enumerate(both))
        cut = cut_of(update.placement, leaf.value.shape)
        found[update.id] = Computed(update.id, update.parameter, "backward", seconds, cut)
    return PricedStep(schedule, found)


def _in_chunks(
    seconds: tuple[Affine, ...], costs: Costs, item: Compute, step: Step, chunked: Chunked
) -> tuple[Affine, ...]:
    """Prices with what every chunk takes beside its rows: launches, and going back the sum over chunks of the gradient
    of the matrix, which is read and written in a wide dtype where the product does not add to it itself."""
    values, work = costs.graph.values, costs.work(step.node)
    logits = values[step.node.results[0].name]
    chunks = values[step.node.operands[0]].elements / values[step.node.operands[0]].shape[-1] / chunked.rows
    moved = 0
    if item.backward and item.node == chunked.nodes[0] and logits.torch_dtype.itemsize < _WIDE:
        summed = (values[name] for name in step.node.operands[1:])
        moved = sum(v.elements * (2 * _WIDE + 2 * logits.torch_dtype.itemsize) for v in summed if v.grad)
    cut = costs.op(step.node, step.rule).cut
    found = []
    for affine, kind in zip(seconds, costs.cluster.kinds, strict=True):
        more = max(chunks - 1, 0.0) * (kind.launch_s * work.kernels[item.backward] + moved / kind.bytes_per_s)
        found.append(affine + (Affine(more) if cut is None else Affine(0.0, more)))
    return tuple(found)


def _with_conversions(seconds: tuple[Affine, ...], costs: Costs, item: Compute) -> tuple[Affine, ...]:
    """Prices with what a process takes around the conversions made for a node: its own work, and packing what is
    sent."""
    around = zip(seconds, costs.overheads, costs.packing, strict=True)
    return tuple(
        s + Affine(item.conversions * overhead_s + item.packed_bytes * packing_s) for s, overhead_s, packing_s in around
    )
