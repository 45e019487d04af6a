"""The answer: which program on which devices with which shares, what it is predicted to take, and compared with what.

In: what `planner` found. Out: `Plan`, plain data. `plan_file` writes it to JSON and reads it back, `listing` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

from lopsided.cluster.cluster import Cluster
from lopsided.codec import Key, Line, Seconds, SecondsOrInf, Whole
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.ir.program import Program
from lopsided.schedule.cost import Costs, optimizer_named
from lopsided.schedule.decisions import BUCKET_BYTES, Decisions, OnHost, Rerun
from lopsided.schedule.lower import lower
from lopsided.schedule.pricing import PricedStep, price
from lopsided.schedule.rounds import batch_size
from lopsided.schedule.schedule import Schedule
from lopsided.schedule.stretches import most_nodes

INTERRUPTED = "interrupted"
"""How the note begins that says so."""

# A difference of sums: what should be 0 can be a rounding below.
_Part = Annotated[float, Key(least=-1e-9, most=1e12)]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A strategy everyone knows, on the same model and cluster. One that does not fit in memory cannot be run."""

    name: Line
    about: Line
    step_s: SecondsOrInf
    fits: bool


@dataclass(frozen=True, slots=True)
class SearchReport:
    """How the program was found. `cost_s` and `bound_s` are those of the search that found it, in its own prices."""

    seconds: Seconds
    states: Whole
    cost_s: SecondsOrInf
    bound_s: SecondsOrInf
    gap: SecondsOrInf
    why: Line  # "proven", "time limit", "interrupted", or the name of the classic that was not beaten
    searches: Whole
    rounds: tuple[Line, ...]  # what was tried, in order, and what came of it


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the busiest devices' time goes in a step; adds up to it. `hidden_s` is beside: it costs nothing."""

    compute_s: _Part
    optimizer_s: _Part
    blocking_s: _Part
    exposed_s: _Part
    waiting_s: _Part
    hidden_s: _Part


@dataclass(frozen=True)
class Plan:
    """A plan. `on` is the part of `cluster` that takes part; `shares` and `memory_bytes` have an entry for each of its
    devices, in its order."""

    cluster: Cluster
    on: Cluster
    program: Program
    shares: Shares
    optimizer: str
    regather: bool  # gathered parameters are freed after use and gathered again in the backward pass
    step_s: float
    breakdown: Breakdown
    memory_bytes: tuple[int, ...]
    baselines: tuple[Baseline, ...]
    search: SearchReport
    without_device: tuple[tuple[str, float], ...]  # of every device of the cluster: the step without it
    without_node: tuple[tuple[str, float], ...]
    notes: tuple[str, ...] = ()
    capture_s: float = 0.0
    planning_s: float = 0.0
    bucket_bytes: int = BUCKET_BYTES  # of gradients and gathered parameters that are sent at a time
    stretch: int = 0  # at most so many nodes run as one compiled function
    reruns: tuple[Rerun, ...] = ()  # regions that run again in the backward pass in place of keeping what they save
    on_host: tuple[OnHost, ...] = ()  # optimizer state in the memory of the host, by kind of device
    microbatches: int = 1  # the batch is computed in so many rounds; the graph and the program are those of one
    state_bits: int = 0  # of a number of optimizer state between updates; 0: as the optimizer keeps it

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that take part."""
        return self.on.device_names

    @property
    def rows(self) -> int:
        """Rows of the global batch, all rounds together; 0 where inputs have none."""
        return batch_size(self.graph) * self.microbatches

    @property
    def decisions(self) -> Decisions:
        """What is chosen beside the program and the shares."""
        return Decisions(
            self.bucket_bytes,
            regather=self.regather,
            stretch=self.stretch,
            reruns=self.reruns,
            on_host=self.on_host,
            microbatches=self.microbatches,
            state_bits=self.state_bits,
        )

    def compiled(self) -> Plan:
        """With stretches that run as compiled functions."""
        return replace(self, stretch=self.stretch or most_nodes(self.on.devices, len(self.program.steps)))

    @property
    def how(self) -> tuple[str, bool, int, tuple[Rerun, ...], tuple[OnHost, ...], int, int]:
        """What `predict` is told beside the program, the shares and the devices."""
        kept = (self.reruns, self.on_host, self.microbatches, self.state_bits)
        return (self.optimizer, self.regather, self.bucket_bytes, *kept)

    @property
    def kind_numbers(self) -> tuple[int, ...]:
        """The kind's number of each device that takes part."""
        return self.on.kind_numbers

    @cached_property
    def schedule(self) -> Schedule:
        """What every device does in a step: what was priced, and what the runtime runs."""
        return lower(self.program, self.decisions)

    def costs(self) -> Costs:
        """What computing and sending costs on its devices."""
        return Costs(self.graph, self.on, optimizer_named(self.optimizer))

    def priced(self, costs: Costs) -> PricedStep:
        """Its schedule with what computing costs."""
        return price(self.schedule, costs)

    @property
    def interrupted(self) -> bool:
        """Whether the planner was stopped before its end: this is the best it had found."""
        return any(note.startswith(INTERRUPTED) for note in self.notes)

    def share_of(self, device: str, by: str = "") -> float:
        """The share of any device of the cluster; 0 for one that does not take part."""
        return self.shares.of(by)[self.devices.index(device)] if device in self.devices else 0.0

    def memory_of(self, device: str) -> int:
        return self.memory_bytes[self.devices.index(device)] if device in self.devices else 0

    @property
    def best_baseline(self) -> Baseline | None:
        """The fastest classic that fits."""
        return min((b for b in self.baselines if b.fits), key=lambda b: b.step_s, default=None)
