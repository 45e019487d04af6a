"""Pairs of a program and shares, made in every sensible way and judged by the timeline of a whole step.

In: a `Graph`, its `RuleBook`, clusters. Out: `Candidate`s. `CandidatePool` holds what they are made with and keeps the
best; each of its methods is one way to make some:

    classics         the strategies everyone knows, with the shares everyone gives them
    plain_balanced   data parallelism and ZeRO with the best shares for them
    balanced         a given program with the best shares for it
    partly_stored_cut, segmented, rebucketed, rechunked, settled     what else may be made of a good one

`part_search` makes others, by searching, and `freeing` what fits of those that do not.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from lopsided.cluster.cluster import FEW_KINDS, Cluster, single_devices
from lopsided.cluster.devices import Kind, Link
from lopsided.errors import DoesNotFitError
from lopsided.ir.graph import Graph, Node
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, Shares
from lopsided.ir.program import Program, RuleBook, Step, one_device, whole_rule
from lopsided.planner.ablation import CHUNKS, OVERLAP, SEGMENTS, STATE_SHARES
from lopsided.planner.allowed import EIGHT_BIT_STATE
from lopsided.planner.balance import NoSharesFitError, balance
from lopsided.planner.baselines import STATE, batch_dims, data_parallel, leaves_batch_whole, stored_cut
from lopsided.planner.candidates import (
    BETTER,
    Candidate,
    Learned,
    Limits,
    LoweredCandidate,
    Sort,
    excess,
    memory_limits,
    shares_by,
    speed_dtype,
    stored_in,
)
from lopsided.planner.estimate import StepEstimate
from lopsided.planner.host_state import on_every_host
from lopsided.planner.recompute import Span, blocks_of, everything, on_every_kind
from lopsided.planner.search import ChoiceSpace, Conversions, Found, Progress, search
from lopsided.planner.search_cost import NOTHING_HIDDEN, Hidden, RulePrices, Saves, SharePrices
from lopsided.planner.segments import found_segments
from lopsided.schedule.coded_state import BITS
from lopsided.schedule.cost import Calls, Costs, Optimizer, Scale
from lopsided.schedule.critical_path import FoldedStep
from lopsided.schedule.decisions import BUCKET_BYTES, Decisions, OnHost, Rerun
from lopsided.schedule.excess import check_fits
from lopsided.schedule.host_state import host_bytes_per_kind, host_excess
from lopsided.schedule.loss_heads import LossHead, chunks_of, loss_heads
from lopsided.schedule.lower import lower, rebucketed
from lopsided.schedule.memory import EVERY_KIND, Holding, bytes_per_kind, holdings
from lopsided.schedule.offload import offloaded_bytes_per_kind
from lopsided.schedule.pricing import PricedStep, price
from lopsided.schedule.schedule import Schedule
from lopsided.schedule.timeline import run

_PARTS = (0.25, 0.5, 0.75)  # of the parameters' bytes, stored cut
_REMEMBERED = 24  # programs laid out
_BUCKETS = tuple(size * 2**20 for size in (16, 8, 4, 2, 1))  # beside what everyone sends at a time
_NEAR = 1.25  # times the best predicted step: what is further off is not worth a try
_CLOSE = 1.02  # times the best predicted step: what may still become the best
_LEADERS = 2  # beside the best are looked at so
_BITS = 4  # of a number of devices: how exact it has to be to tell which step works with most memory
_NO_WORK_S = 1e-12  # of an op that computes nothing


@dataclass(frozen=True, slots=True)
class AtShares:
    """What searches with the same shares on the same devices have in common."""

    scale: Scale
    rules: RulePrices = field(default_factory=dict)
    conversions: Conversions = field(default_factory=Conversions)


class CandidatePool:
    """What candidates are made with; remembers prices and counts searches."""

    def __init__(
        self,
        graph: Graph,
        book: RuleBook,
        optimizer: Optimizer,
        limits: Limits,
        progress: Callable[[Progress], None],
        without: frozenset[str] = frozenset(),
        microbatches: int = 1,
        allow: frozenset[str] = frozenset(),
    ) -> None:
        self.graph, self.book, self.optimizer = graph, book, optimizer
        self.state_bits = BITS if EIGHT_BIT_STATE in allow and optimizer.state else 0  # that state may be kept in
        self.microbatches = microbatches  # the graph is that of one round of so many
        self.plain_book = book  # without segments
        self.limits, self.progress, self.without = limits, progress, without
        self.dtype = speed_dtype(graph)
        self.trained = {leaf.value.name for leaf in graph.parameters if leaf.value.grad}
        self.best: Candidate | None = None
        self.of_sort: dict[Sort, Candidate] = {}  # the best of each
        self.of_part: dict[str, Candidate] = {}  # the best on these devices, by their fingerprint
        self.learned: dict[str, Learned] = {}  # what searches found out about these devices
        self.tried: list[Candidate] = []  # until one fits
        self.short_of_host: DoesNotFitError | None = None  # what had too little memory in a host
        self.too_small: list[Cluster] = []  # on which no program was found to fit
        self.leanest: list[tuple[Holding, ...]] = []  # what programs hold where only memory counts
        self.started = time.perf_counter()
        self.searches = self.states = self.balances = 0
        self.first: Found | None = None  # search of the whole cluster without other limits than the user's
        self.plain: tuple[tuple[str, Program, bool], ...] = ()
        self.log: list[str] = []
        self.interrupted = False
        self.fewest_devices = 1  # a plan may use
        self.frees = True  # what does not fit is made to, by recomputation and state in host memory
        self.known_s = math.inf  # the step of a plan that was found otherwise: what takes longer is of no use
        self.least_s = math.inf  # of any candidate, whether it fits or not
        self._calls = Calls(graph)
        self._costs: dict[str, Costs] = {}
        self._by_speed: dict[str, Shares] = {}
        self._laid: dict[tuple[str, int, bool, int, _Kept], LoweredCandidate] = {}
        self._lowered: dict[tuple[int, bool, int, _Kept], Schedule] = {}
        self._held: dict[tuple[int, bool, int, _Kept, int], tuple[Program, tuple[Holding, ...]]] = {}
        self._found: list[Program] = []  # the last few
        self._working: dict[str, np.ndarray] = {}
        self._saved: Saves = {}
        self._at: dict[tuple[str, Shares], AtShares] = {}
        self._space: ChoiceSpace | None = None  # of the book and the limits
        self.made_to_fit: dict[tuple[str, int, Shares, bool], Candidate | None] = {}  # what it came to, by the base

    @property
    def chosen(self) -> Candidate:
        """The best candidate that fits."""
        if self.best is not None:
            return self.best
        if not self.tried:
            raise DoesNotFitError("no program that keeps the pins was found", do="pin less")
        nearest = self.nearest
        how = (nearest.regather, nearest.bucket_bytes, nearest.reruns, nearest.on_host, nearest.state_bits)
        held = self.laid_out(nearest.on, nearest.program, *how).held
        levels = {rerun.level for rerun in nearest.reruns}
        ways = ["its parameters cut and gathered for use"] if any(h.use == "gathered" for h in held) else []
        ways += ["what can be made again not kept"] if levels - {"chunked"} else []
        ways += ["its loss some rows at a time"] if "chunked" in levels else []
        ways += [f"optimizer state in {nearest.state_bits} bits"] if nearest.state_bits else []
        ways += ["optimizer state in host memory"] if nearest.on_host else []
        even = f" with {' and '.join(ways)}" if ways else ""
        even = f" in {self.microbatches} rounds{even}" if self.microbatches > 1 else even
        what = f"no program was found that fits: {f'even{even}, ' if even else ''}the one that comes nearest"
        about = (held, Scale(nearest.on, nearest.shares), memory_limits(nearest.on))
        try:
            check_fits(*about, what=what, host=self.short_of_host, smaller_batch=self.microbatches == 1)
        except DoesNotFitError as error:
            if self.state_bits or not self.optimizer.state:
                raise
            do = f"{error.do}; or --allow {EIGHT_BIT_STATE}, which changes the numbers of training a little"
            raise DoesNotFitError(error.what, where=error.where, do=do, **error.facts) from None
        return nearest

    @property
    def nearest(self) -> Candidate:
        """Where nothing fits: of those that use most devices, the one that comes nearest tells best what is missing."""
        return min(self.tried, key=lambda candidate: (-candidate.on.devices, excess(candidate)))

    # Judging

    def costs(self, on: Cluster) -> Costs:
        key = on.fingerprint
        if key not in self._costs:
            self._costs[key] = Costs(self.graph, on, self.optimizer, self._calls)
        return self._costs[key]

    def judge(
        self,
        name: str,
        on: Cluster,
        program: Program,
        shares: Shares,
        regather: bool,
        found: Found | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        reruns: tuple[Rerun, ...] = (),
        on_host: tuple[OnHost, ...] = (),
        state_bits: int = 0,
    ) -> Candidate:
        """The candidate that a pair is; the best that fits is kept."""
        laid = self.laid_out(on, program, regather, bucket_bytes, reruns, on_host, state_bits)
        scale = Scale(on, shares)
        timeline = run(laid.priced, self.costs(on).network, scale)
        memory = bytes_per_kind(laid.held, scale)
        fits = all(used <= limit for used, limit in zip(memory, memory_limits(on), strict=True))
        too_much: DoesNotFitError | None = None
        if on_host or laid.priced.schedule.offloaded:
            schedule = laid.priced.schedule
            filled = zip(
                host_bytes_per_kind(schedule, self.optimizer, scale),
                offloaded_bytes_per_kind(schedule, scale),
                strict=True,
            )
            too_much = host_excess(on, [state + saved for state, saved in filled])
            fits = fits and too_much is None
            self.short_of_host = self.short_of_host or too_much
        sort = (on.devices, laid.stored)
        about = (
            name,
            on,
            program,
            shares,
            regather,
            timeline,
            memory,
            fits,
            sort,
            found,
            bucket_bytes,
            reruns,
            on_host,
            state_bits,
        )
        candidate = Candidate(*about)
        may_be_chosen = on.devices >= self.fewest_devices and self.limits.respected_by(program)
        if candidate.beats(self.best) and may_be_chosen:
            self.best = candidate
        if may_be_chosen and candidate.beats(self.of_sort.get(sort)):
            self.of_sort[sort] = candidate
        if may_be_chosen and candidate.beats(self.of_part.get(on.fingerprint)):
            self.of_part[on.fingerprint] = candidate
        if self.best is None and may_be_chosen and too_much is None:
            self.tried.append(candidate)
        if may_be_chosen:
            self.least_s = min(self.least_s, candidate.step_s)
        return candidate

    @property
    def bar_s(self) -> float:
        """The best step that is known of."""
        return min(self.known_s, self.best.step_s if self.best is not None else math.inf)

    def laid_out(
        self,
        on: Cluster,
        program: Program,
        regather: bool,
        bucket_bytes: int,
        reruns: tuple[Rerun, ...] = (),
        on_host: tuple[OnHost, ...] = (),
        state_bits: int = 0,
    ) -> LoweredCandidate:
        """What does not depend on shares. The last few are remembered: each is judged with several."""
        # The step that works with most is that of the device with the largest share. About how many of them there are
        # says as well which that is, and is the same for parts that are about as large.
        speeds = [kind.flops(self.dtype) for kind in on.kinds]
        fewest = sum(kind.devices * speed for kind, speed in zip(on.kinds, speeds, strict=True)) / max(speeds)
        fewest = _about(max(round(fewest), 1))
        # Neither depends on the cluster, so parts of it share them.
        kept = (reruns, on_host, state_bits)
        schedule = self.lowered(program, regather, bucket_bytes, kept)
        held = _remembered(
            self._held,
            (id(program), regather, bucket_bytes, kept, fewest),
            lambda: (program, holdings(schedule, self.optimizer, devices=fewest)),
        )[1]
        return _remembered(
            self._laid,
            (on.fingerprint, id(program), regather, bucket_bytes, kept),
            lambda: LoweredCandidate(program, self._price(on, schedule), held, stored_in(program)),
        )

    def lowered(self, program: Program, regather: bool, bucket_bytes: int, kept: _Kept) -> Schedule:
        """A program is lowered once, and its buckets are filled anew for every size of them."""

        def make() -> Schedule:
            if bucket_bytes != BUCKET_BYTES:
                return rebucketed(self.lowered(program, regather, BUCKET_BYTES, kept), bucket_bytes)
            reruns, on_host, state_bits = kept
            decisions = Decisions(
                regather=regather,
                overlap=OVERLAP not in self.without,
                reruns=reruns,
                on_host=on_host,
                microbatches=self.microbatches,
                state_bits=state_bits,
            )
            return lower(program, decisions)

        return _remembered(self._lowered, (id(program), regather, bucket_bytes, kept), make)

    def _price(self, on: Cluster, schedule: Schedule) -> PricedStep:
        """What is computed costs the same with all sizes of buckets."""
        decisions = schedule.decisions
        kept = (decisions.reruns, decisions.on_host, decisions.state_bits)
        key = (on.fingerprint, id(schedule.program), decisions.regather, BUCKET_BYTES, kept)
        if key in self._laid:
            return PricedStep(schedule, self._laid[key].priced.computed)
        return price(schedule, self.costs(on))

    def equal(self, on: Cluster) -> Shares:
        return self._by(on, [1.0 for _ in on.kinds])

    def by_speed(self, on: Cluster) -> Shares:
        key = on.fingerprint
        if key not in self._by_speed:
            self._by_speed[key] = self._by(on, [kind.flops(self.dtype) for kind in on.kinds])
        return self._by_speed[key]

    def by_memory(self, on: Cluster) -> Shares:
        return self._by(on, [float(kind.memory_bytes) for kind in on.kinds])

    def _by(self, on: Cluster, weights: Sequence[float]) -> Shares:
        return shares_by(on, weights, tied=STATE_SHARES in self.without)

    def is_promising(self, part: Cluster) -> bool:
        """Whether searching on a part may lead to something: not on fewer devices of kinds of which more were too few,
        not where there is no room for what keeps least, whatever the shares, and not where even work that is divided
        perfectly takes longer than the best."""
        kinds, names = {kind.likeness for kind in part.kinds}, set(part.device_names)
        for small in self.too_small:
            if kinds == {kind.likeness for kind in small.kinds} and names <= set(small.device_names):
                return False
        if self.leanest and not any(has_room(part, held) for held in self.leanest):
            return False
        return self.first is None or self.ideal_s(part) < self.bar_s

    # Making

    def classics(self, on: Cluster) -> Iterator[Candidate]:
        """The strategies everyone knows."""
        prices = SharePrices(self.costs(on), Scale(on, self.equal(on)))
        program = data_parallel(self.book, prices)
        yield self.judge("dp-ev", on, program, self.equal(on), False)
        yield (by_speed := self.judge("dp-cp", on, program, self.by_speed(on), False))
        cut = stored_cut(program)
        yield self.judge("fsdp", on, cut, self.equal(on), True)
        dims = batch_dims(program)
        found = self.search(on, self.by_speed(on), allowed=lambda node, rule: leaves_batch_whole(dims, node, rule))
        yield self.judge("tensor", on, found.program, self.by_speed(on), False)
        yield self._single(on)
        # Not what anyone has, but what the classics could be with the right shares.
        self.plain = (("dp balanced", program, False), ("zero balanced", cut, False), ("zero balanced", cut, True))
        self.partly_stored_cut(by_speed)

    def _single(self, on: Cluster) -> Candidate:
        """Everything on the fastest device that has the memory. Of many kinds, the first that is expected to be it."""
        whole = one_device(self.graph)
        made: list[Candidate] = []
        alone = sorted(single_devices(on), key=lambda part: float(self._working_s(part.kinds[0]).sum()))
        for part in alone:
            if (
                len(alone) <= FEW_KINDS
                or not made
                or (not made[-1].fits and made[-1].memory[0] <= memory_limits(part)[0])
            ):
                made.append(self.judge("single", part, whole, Shares((1.0,)), False))
        return min(made, key=lambda single: (not single.fits, single.step_s))

    def rivals(self, on: Sequence[Cluster], most: int) -> list[Candidate]:
        """The best of other sorts than the best, the quickest first: those whose step is predicted to be near it."""
        for part in on:
            if part.devices > 1:
                list(self.plain_balanced(part))
        best = self.chosen
        others = [one for sort, one in self.of_sort.items() if sort != best.sort and one.step_s < _NEAR * best.step_s]
        return sorted(others, key=lambda one: one.step_s)[:most]

    def classic_on_part(self, cluster: Cluster) -> list[Candidate]:
        """Data parallelism on just the devices of the best candidate, where these are not all: a fairer comparison."""
        on = self.chosen.on
        if on.fingerprint == cluster.fingerprint or on.devices == 1:
            return []
        program, shares = self.plain[0][1], self.by_speed(on)
        return [self.judge("dp-part", on, program, shares, False, bucket_bytes=BUCKET_BYTES)]

    def within(self, book: RuleBook, limits: Limits) -> CandidatePool:
        """This pool, searching another rule book of the same graph from now on."""
        self.book, self.limits = book, limits
        self._at.clear()
        self._space = None
        return self

    def plain_on(self, on: Cluster) -> list[Candidate]:
        """Data parallelism, and ZeRO that holds least, with shares by speed."""
        shares = self.by_speed(on)
        return [self.judge(name, on, program, shares, regather) for name, program, regather in self.plain[::2]]

    def plain_balanced(self, on: Cluster) -> Iterator[Candidate]:
        """Data parallelism and ZeRO with the best shares for them, each sent in what suits it best."""
        made: Candidate | None = None
        for name, program, regather in self.plain:
            if regather and made is not None:
                # Gathering again takes longer and is for those who have to.
                continue
            bucket_bytes = self.bucket_for(self.judge(name, on, program, self.by_speed(on), regather))
            made = self.balanced(name, on, program, self.by_speed(on), regather, bucket_bytes=bucket_bytes)
            if made is not None:
                yield made

    def search(
        self,
        on: Cluster,
        shares: Shares,
        *,
        hidden: Hidden = NOTHING_HIDDEN,
        byte_s: tuple[float, ...] = (),
        regather: bool = False,
        allowed: Callable[[Node, Rule], bool] | None = None,
    ) -> Found:
        at = self._at.setdefault((on.fingerprint, shares), AtShares(Scale(on, shares)))
        prices = SharePrices(
            self.costs(on),
            at.scale,
            hidden=hidden,
            byte_s=byte_s,
            regather=regather,
            microbatches=self.microbatches,
            saves=self._saved,
            rules=at.rules,
        )
        if allowed is not None:
            space = ChoiceSpace(self.book, prices, stores=self.limits.stores, allowed=allowed)
        else:
            space = self._space or ChoiceSpace(
                self.book, prices, stores=self.limits.stores, allowed=self.limits.allowed
            )
            self._space = space
        found = search(
            self.book,
            prices,
            space=space,
            conversions=at.conversions,
            time_limit_s=self.limits.left_s,
            progress=self.progress,
        )
        found = replace(found, program=self._the_same(found.program))
        self.searches += 1
        self.states += found.states
        if allowed is None and self.first is None:
            self.first = found
        self.progress(Progress(self.states, found.cost_s, found.bound_s, time.perf_counter() - self.started))
        return found

    def _the_same(self, program: Program) -> Program:
        """A program that other searches found too, on whatever devices, is lowered once."""
        known = next((one for one in self._found if one == program), None)
        if known is None:
            self._found = [program, *self._found[: _REMEMBERED - 1]]
        return known or program

    def balanced(
        self,
        name: str,
        on: Cluster,
        program: Program,
        reference: Shares,
        regather: bool,
        found: Found | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        reruns: tuple[Rerun, ...] = (),
        on_host: tuple[OnHost, ...] = (),
        state_bits: int = 0,
        polish: bool = False,
    ) -> Candidate | None:
        """The program with the best shares for it; None if none fit in memory. Polished, whole units fit better."""
        kept = (reruns, on_host, state_bits)
        if len(on.kinds) == 1 and not any(name != STATE for name, _ in reference.named):
            # Devices alike have equal shares.
            equal = self.equal(on)
            about = (name, on, program, equal, regather, found)
            made = self.judge_kept(about, bucket_bytes, kept)
            return made if made.fits else None
        network, laid = self.costs(on).network, self.laid_out(on, program, regather, bucket_bytes, *kept)
        self.balances += 1
        try:
            shares = balance(
                laid.priced,
                laid.held,
                on,
                network,
                reference=reference,
                tied=(STATE,) if STATE_SHARES in self.without else (),
                memory_limits=memory_limits(on),
                polish=polish,
                judge=lambda shares: run(laid.priced, network, Scale(on, shares)).step_s,
            ).shares
        except NoSharesFitError as error:
            if self.best is None:
                # What comes nearest to fitting tells what is missing.
                self.judge_kept((name, on, program, error.nearest, regather, found), bucket_bytes, kept)
            return None
        return self.judge_kept((name, on, program, shares, regather, found), bucket_bytes, kept)

    def judge_kept(self, about: _About, bucket_bytes: int, kept: _Kept) -> Candidate:
        """`judge`, with what is given everywhere in one."""
        reruns, on_host, state_bits = kept
        return self.judge(*about, bucket_bytes=bucket_bytes, reruns=reruns, on_host=on_host, state_bits=state_bits)

    @cached_property
    def heads(self) -> tuple[LossHead, ...]:
        """Losses that may run some rows at a time."""
        return () if CHUNKS in self.without else loss_heads(self.graph)

    def chunked_in(self, program: Program) -> tuple[Rerun, ...]:
        """The losses of a program that can run some rows at a time, by their rules."""
        every = tuple(head.chunked() for head in self.heads)
        found = {head.first for head, _ in chunks_of(program, Decisions(reruns=every))}
        return tuple(rerun for rerun in every if rerun.first in found)

    def with_chunks(self, program: Program, reruns: tuple[Rerun, ...]) -> tuple[Rerun, ...]:
        """In the order of the program."""
        chunked = self.chunked_in(program)
        if not chunked:
            return reruns
        places = {node.name: k for k, node in enumerate(self.graph.nodes)}
        return tuple(sorted({*reruns, *chunked}, key=lambda rerun: places[rerun.first]))

    @cached_property
    def blocks(self) -> tuple[Span, ...]:
        """What may run again together."""
        return blocks_of(self.graph, {name for head in self.heads for name in head.nodes})

    def everything(self, program: Program) -> tuple[Rerun, ...]:
        """All that may run again or in chunks, of a program."""
        return self.with_chunks(program, everything(self.graph, self.blocks))

    def again(self, candidate: Candidate, program: Program | None = None, *, polish: bool = False) -> Candidate | None:
        """A candidate, or another program in its place, with the best shares."""
        return self.balanced(
            candidate.name,
            candidate.on,
            program or candidate.program,
            candidate.shares,
            candidate.regather,
            candidate.found,
            bucket_bytes=candidate.bucket_bytes,
            reruns=candidate.reruns,
            on_host=candidate.on_host,
            state_bits=candidate.state_bits,
            polish=polish,
        )

    def elsewhere(self, candidate: Candidate, on: Cluster) -> Candidate | None:
        """The same program on other devices, with the best shares there."""
        how = (self.by_speed(on), candidate.regather, candidate.found)
        return self.balanced(candidate.name, on, candidate.program, *how, bucket_bytes=candidate.bucket_bytes)

    def partly_stored_cut(self, candidate: Candidate) -> None:
        """The same program with some of its whole parameters stored cut: those used last, as there is time to gather.

        Equal layers have equal prices, so a search cuts the parameters of all or of none. Between the two may lie what
        just fits, or what computation just hides.
        """
        on, program = candidate.on, candidate.program
        placed = dict(program.leaves)
        order = [name for step in reversed(program.steps) for name in step.node.operands]
        whole = [name for name in dict.fromkeys(order) if name in self.trained and placed[name] == I]
        sizes = [self.graph.values[name].bytes for name in whole]
        if on.devices == 1 or not whole:
            return
        made = []
        for part in _PARTS:
            last = sum(size <= part * sum(sizes) for size in itertools.accumulate(sizes))
            made.append(self._changed(candidate, "partly stored cut", stored_cut(program, frozenset(whole[:last]))))
        self.again(min(made, key=lambda c: (not c.fits, c.step_s)))

    def _changed(
        self, candidate: Candidate, name: str = "", program: Program | None = None, bucket_bytes: int = 0
    ) -> Candidate:
        """A candidate with another program or other buckets."""
        return self.judge(
            name or candidate.name,
            candidate.on,
            program or candidate.program,
            candidate.shares,
            candidate.regather,
            candidate.found,
            bucket_bytes=bucket_bytes or candidate.bucket_bytes,
            reruns=candidate.reruns,
            on_host=candidate.on_host,
            state_bits=candidate.state_bits,
        )

    def bucket_on(self, on: Cluster) -> int:
        """How much to send at a time on these devices: what suits data parallelism by speed."""
        if on.devices == 1 or not self.plain:
            return BUCKET_BYTES
        return self.bucket_for(self.judge("dp-cp", on, self.plain[0][1], self.by_speed(on), False))

    def bucket_for(self, candidate: Candidate) -> int:
        """How much to send at a time: what suits this candidate best.

        Small buckets leave early and hide better, large ones pay latencies less often. Of those that are as good the
        largest is taken.
        """
        if candidate.on.devices == 1 or OVERLAP in self.without:
            return candidate.bucket_bytes
        kept = (candidate.reruns, candidate.on_host, candidate.state_bits)
        how = (candidate.regather, candidate.bucket_bytes, *kept)
        laid = self.laid_out(candidate.on, candidate.program, *how)
        network, scale = self.costs(candidate.on).network, Scale(candidate.on, candidate.shares)
        steps: dict[int, float] = {}
        last, last_s = laid.priced.schedule, candidate.step_s
        for size in _BUCKETS:
            again = rebucketed(last, size)
            if (again.forward, again.backward) != (last.forward, last.backward):
                # What is computed costs what it did.
                last, last_s = again, run(PricedStep(again, laid.priced.computed), network, scale).step_s
            steps[size] = last_s
        best_s = min(*steps.values(), candidate.step_s)
        if candidate.step_s * BETTER <= best_s:
            return candidate.bucket_bytes
        return next(size for size, step_s in steps.items() if step_s * BETTER <= best_s)

    def rebucketed(self, candidate: Candidate) -> None:
        """The same pair, sent in what suits it best."""
        bucket_bytes = self.bucket_for(candidate)
        if bucket_bytes != candidate.bucket_bytes:
            self.again(self._changed(candidate, bucket_bytes=bucket_bytes))

    def rechunked(self, candidate: Candidate) -> None:
        """The same pair with more rows of a loss at a time, as long as that fits and is quicker."""
        most = {head.first: head.rows for head in self.heads}
        while candidate.fits:
            reruns = tuple(
                replace(rerun, rows=2 * rerun.rows) if 0 < rerun.rows < most.get(rerun.first, 0) else rerun
                for rerun in candidate.reruns
            )
            if reruns == candidate.reruns:
                return
            about = (candidate.name, candidate.on, candidate.program, candidate.shares, candidate.regather)
            kept = (reruns, candidate.on_host, candidate.state_bits)
            more = self.judge_kept((*about, candidate.found), candidate.bucket_bytes, kept)
            if not more.beats(candidate):
                return
            candidate = more

    def settled(self, candidate: Candidate) -> None:
        """The same pair once more, with more care for whole units."""
        self.again(candidate, polish=True)

    def segmented(self, candidate: Candidate) -> Candidate | None:
        """The same program with shares of its own for each part of the model."""
        if SEGMENTS in self.without:
            return None
        costs = self.costs(candidate.on)

        def weight(step: Step) -> float:
            cost = costs.op(step.node, step.rule)
            return sum(affine.slope for affine in (*cost.forward * cost.forwards, *cost.backward))

        program = found_segments(candidate.program, weight)
        if program == candidate.program:
            return None
        return self.again(candidate, program)

    def leaders(self) -> list[Candidate]:
        """The best candidate of each part that is about as good as the best of all, this first."""
        near = [one for one in self.of_part.values() if one.step_s < _CLOSE * self.chosen.step_s]
        others = sorted((one for one in near if one is not self.chosen), key=lambda one: one.step_s)
        return [self.chosen, *others[:_LEADERS]]

    def estimate(self, candidate: Candidate, whole: Cluster | None = None) -> StepEstimate:
        """What its program would take on parts of its devices, or of a whole cluster, whose kinds are others."""
        on = whole or candidate.on
        kept = (on_every_kind(candidate), on_every_host(candidate, on), candidate.state_bits)
        laid = self.laid_out(on, candidate.program, candidate.regather, candidate.bucket_bytes, *kept)
        return StepEstimate(FoldedStep(laid.priced, self.costs(on).network), laid.held, on)

    def ideal_s(self, on: Cluster) -> float:
        """What a step takes at least: all work divided at will over all devices, and nothing sent."""
        per_s = np.zeros(len(self.graph.nodes))
        for kind in on.kinds:
            per_s += kind.devices / self._working_s(kind)
        return float((1 / per_s).sum()) * self.microbatches

    def _working_s(self, kind: Kind) -> np.ndarray:
        """Seconds of every node on one such device, launches aside; next to nothing where it does no work."""
        key = kind.likeness
        if key not in self._working:
            nowhere = Link(0.0, 1.0)
            alone = Cluster("one", "", (replace(kind, nodes=1, count=1),), nowhere, nowhere)
            costs = Costs(self.graph, alone, self.optimizer, self._calls)
            seconds = []
            for node in self.graph.nodes:
                whole = costs.op(node, whole_rule(node))
                there, back = costs.work(node).kernels
                seconds.append(whole.seconds((1.0,))[0] - (there * whole.forwards + back) * kind.launch_s)
            self._working[key] = np.maximum(np.array(seconds), _NO_WORK_S)
        return self._working[key]


_Kept = tuple[tuple[Rerun, ...], tuple[OnHost, ...], int]
"""The same, and in how many bits optimizer state is kept."""

_About = tuple[str, Cluster, Program, Shares, bool, Found | None]
"""What is judged: its name, the devices, the program and shares, whether it gathers again, and where it comes from."""


def _about(count: int) -> int:
    """A number, or, of large ones, the next smaller that ends in zeros.

    >>> [_about(count) for count in (5, 16, 17, 9_984)]
    [5, 16, 16, 9216]
    """
    beyond = max(count.bit_length() - _BITS, 0)
    return count >> beyond << beyond


def has_room(part: Cluster, held: Sequence[Holding]) -> bool:
    """Whether these devices may have room for what is held at once, were what is cut divided as suits their memory."""
    at_once = [one for one in held if one.use not in ("waiting", "streamed") and one.on == EVERY_KIND]
    whole = sum(one.bytes for one in at_once if one.cut is None)
    cut = sum(one.bytes for one in at_once if one.cut is not None)
    rooms = [limit - whole for limit in memory_limits(part)]
    return min(rooms) >= 0 and sum(kind.devices * room for kind, room in zip(part.kinds, rooms, strict=True)) >= cut


_Key = TypeVar("_Key")
_Made = TypeVar("_Made")


def _remembered(known: dict[_Key, _Made], key: _Key, make: Callable[[], _Made]) -> _Made:
    """What is known, or made now; of too many the oldest is forgotten."""
    if key not in known:
        if len(known) >= _REMEMBERED:
            known.pop(next(iter(known)))
        known[key] = make()
    return known[key]
