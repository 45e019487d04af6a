"""Pairs of a program and shares, made in every sensible way and judged by the timeline of a whole step.

In: a `Graph`, its `RuleBook`, a `Cluster`. Out: `Candidate`s. `CandidatePool` holds what they are made with; each of
its methods is one way to make some:

    classic     the strategies everyone knows, with the shares everyone gives them
    improve     search and balance in turn from several seeds, on one part of a cluster
    fitting     one search and one balance; where memory is short, at the lowest price of memory at which all fits
    find_bucket                                how much to send at a time, from then on
    partly_stored_cut, segmented, rebucketed, settled      what else may be made of a good one
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.subclusters import single_devices
from lopsided.errors import DoesNotFitError
from lopsided.ir.graph import Graph, Node
from lopsided.ir.notation import Rule
from lopsided.ir.placement import I, Shares
from lopsided.ir.program import Program, Step, one_device
from lopsided.ir.rule_book import RuleBook
from lopsided.planner.ablation import OVERLAP, SEGMENTS, STATE_SHARES
from lopsided.planner.balance import balance
from lopsided.planner.baselines import STATE, batch_dims, data_parallel, leaves_batch_whole, stored_cut
from lopsided.planner.candidates import (
    BETTER,
    Candidate,
    Limits,
    LoweredCandidate,
    Sort,
    excess,
    memory_limits,
    shares_by,
    speed_dtype,
    stored_in,
)
from lopsided.planner.search import Found, Progress, Tables, search
from lopsided.planner.search_cost import NOTHING_HIDDEN, Hidden, Saves, SharePrices
from lopsided.planner.segments import found_segments
from lopsided.schedule.cost import Costs, Optimizer, Scale
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, check_fits, holdings
from lopsided.schedule.pricing import PricedStep, price
from lopsided.schedule.schedule import BUCKET_BYTES, Decisions
from lopsided.schedule.timeline import run

_ROUNDS = 2  # of search and balance in turn, after the first from a seed
_CHEAPEST, _DEAREST = 1e-2, 1e2  # prices of memory: how many times its work a device's whole memory is worth
_HALVINGS = 3  # of what lies between them
_PARTS = (0.25, 0.5, 0.75)  # of the parameters' bytes, stored cut
_ESTIMATES = (NOTHING_HIDDEN, Hidden(0.9, 0.0), Hidden(0.9, 0.9))
_REMEMBERED = 8  # programs laid out
_BUCKETS = tuple(size * 2**20 for size in (16, 8, 4, 2, 1))  # beside what everyone sends at a time
_NEAR = 1.25  # times the best predicted step: what is further off is not worth a try

Turns = dict[tuple[Shares, Hidden], Candidate]  # what a turn of search and balance came to, by what it began with


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
    ) -> None:
        self.graph, self.book, self.optimizer = graph, book, optimizer
        self.plain_book = book  # without segments
        self.limits, self.progress, self.without = limits, progress, without
        self.dtype = speed_dtype(graph)
        self.trained = {leaf.value.name for leaf in graph.parameters if leaf.value.grad}
        self.best: Candidate | None = None
        self.of_sort: dict[Sort, Candidate] = {}  # the best of each
        self.memory_price, self.regather = 0.0, False  # at which the last search that was short of memory ended
        self.bucket_bytes = BUCKET_BYTES
        self.tried: list[Candidate] = []  # until one fits
        self.too_small: list[Cluster] = []  # on which no program was found to fit
        self.started = time.perf_counter()
        self.searches = self.states = 0
        self.first: Found | None = None  # search of the whole cluster without other limits than the user's
        self.plain: tuple[tuple[str, Program, bool], ...] = ()
        # The estimate that led to the best program.
        self.last_hidden: Hidden | None = NOTHING_HIDDEN if OVERLAP in without else None
        self.log: list[str] = []
        self.interrupted = False
        self.fewest_devices = 1  # a plan may use
        self._costs: dict[str, Costs] = {}
        self._ideal: dict[str, float] = {}
        self._laid: dict[tuple[str, int, bool, int], LoweredCandidate] = {}
        self._saved: Saves = {}
        self._known: dict[tuple[str, bool], list[tuple[Candidate, bool]]] = {}  # what searches on a part came to
        self._conversions: dict[tuple[str, Shares], Tables] = {}

    @property
    def chosen(self) -> Candidate:
        """The best candidate that fits."""
        if self.best is not None:
            return self.best
        if not self.tried:
            raise DoesNotFitError("no program that keeps the pins was found", do="pin less")
        # Of those that use most devices, the one that comes nearest tells best what is missing.
        nearest = min(self.tried, key=lambda candidate: (-candidate.on.devices, excess(candidate)))
        held = self.laid_out(nearest.on, nearest.program, nearest.regather, nearest.bucket_bytes).held
        cut = "even with its parameters cut and gathered for use, " if any(h.use == "gathered" for h in held) else ""
        what = f"no program was found that fits: {cut}the one that comes nearest"
        check_fits(held, Scale(nearest.on, nearest.shares), memory_limits(nearest.on), what=what)
        return nearest

    # Judging

    def costs(self, on: Cluster) -> Costs:
        key = on.fingerprint
        if key not in self._costs:
            self._costs[key] = Costs(self.graph, on, self.optimizer)
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
        bucket_bytes: int = 0,
    ) -> Candidate:
        """The candidate that a pair is; the best that fits is kept."""
        bucket_bytes = bucket_bytes or self.bucket_bytes
        laid, scale = self.laid_out(on, program, regather, bucket_bytes), Scale(on, shares)
        timeline = run(laid.priced, self.costs(on).network, scale)
        memory = bytes_per_kind(laid.held, scale)
        fits = all(used <= limit for used, limit in zip(memory, memory_limits(on), strict=True))
        sort = (on.devices, laid.stored)
        candidate = Candidate(name, on, program, shares, regather, timeline, memory, fits, sort, found, bucket_bytes)
        may_be_chosen = on.devices >= self.fewest_devices and self.limits.respected_by(program)
        if candidate.beats(self.best) and may_be_chosen:
            self.best = candidate
        if may_be_chosen and candidate.beats(self.of_sort.get(sort)):
            self.of_sort[sort] = candidate
        if self.best is None and may_be_chosen:
            self.tried.append(candidate)
        return candidate

    def laid_out(self, on: Cluster, program: Program, regather: bool, bucket_bytes: int) -> LoweredCandidate:
        """What does not depend on shares. The last few are remembered: each is judged with several."""
        key = (on.fingerprint, id(program), regather, bucket_bytes)
        if key not in self._laid:
            if len(self._laid) >= _REMEMBERED:
                self._laid.pop(next(iter(self._laid)))
            decisions = Decisions(bucket_bytes, regather=regather, overlap=OVERLAP not in self.without)
            schedule = lower(program, decisions)
            # The step that works with most is that of the device with the largest share.
            fewest = max(round(1 / max(self.by_speed(on))), 1)
            held = holdings(schedule, self.optimizer, devices=fewest)
            self._laid[key] = LoweredCandidate(program, price(schedule, self.costs(on)), held, stored_in(program))
        return self._laid[key]

    def equal(self, on: Cluster) -> Shares:
        return self._by(on, [1.0 for _ in on.kinds])

    def by_speed(self, on: Cluster) -> Shares:
        return self._by(on, [kind.flops(self.dtype) for kind in on.kinds])

    def by_memory(self, on: Cluster) -> Shares:
        return self._by(on, [float(kind.memory_bytes) for kind in on.kinds])

    def _by(self, on: Cluster, weights: Sequence[float]) -> Shares:
        return shares_by(on, weights, tied=STATE_SHARES in self.without)

    def is_promising(self, part: Cluster) -> bool:
        """Whether improving on a part may lead to something: not on fewer devices of kinds of which more were too few,
        and not where even work that is divided perfectly takes longer than the best."""
        kinds = {kind.likeness for kind in part.kinds}
        for small in self.too_small:
            if kinds == {kind.likeness for kind in small.kinds} and set(part.device_names) <= set(small.device_names):
                return False
        return self.best is None or self.first is None or self.ideal_s(part) < self.best.step_s

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
        whole = one_device(self.graph)
        singles = [self.judge("single", part, whole, Shares((1.0,)), False) for part in single_devices(on)]
        yield min(singles, key=lambda single: (not single.fits, single.step_s))
        # Not what anyone has, but what the classics could be with the right shares.
        self.plain = (("dp balanced", program, False), ("zero balanced", cut, False), ("zero balanced", cut, True))
        self.partly_stored_cut(by_speed)

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
        """This workshop, searching another rule book of the same graph from now on."""
        self.book, self.limits = book, limits
        self._known.clear()
        self._conversions.clear()
        return self

    def plain_balanced(self, on: Cluster) -> Iterator[Candidate]:
        """Data parallelism and ZeRO with the best shares for them."""
        made: Candidate | None = None
        for name, program, regather in self.plain:
            if regather and made is not None:
                # Gathering again takes longer and is for those who have to.
                continue
            made = self.balanced(name, on, program, self.by_speed(on), regather)
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
        prices = SharePrices(
            self.costs(on), Scale(on, shares), hidden=hidden, byte_s=byte_s, regather=regather, saves=self._saved
        )
        found = search(
            self.book,
            prices,
            stores=self.limits.stores,
            allowed=self.limits.allowed if allowed is None else allowed,
            conversions=self._conversions.setdefault((on.fingerprint, shares), {}),
            time_limit_s=self.limits.left_s,
            progress=self.progress,
        )
        self.searches += 1
        self.states += found.states
        if allowed is None and self.first is None:
            self.first = found
        self.progress(Progress(self.states, found.cost_s, found.bound_s, time.perf_counter() - self.started))
        return found

    def balanced(
        self,
        name: str,
        on: Cluster,
        program: Program,
        reference: Shares,
        regather: bool,
        found: Found | None = None,
        *,
        polish: bool = False,
    ) -> Candidate | None:
        """The program with the best shares for it; None if none fit in memory. Polished, whole units fit better."""
        if len(on.kinds) == 1 and not any(name != STATE for name, _ in reference.named):
            # Devices alike have equal shares.
            made = self.judge(name, on, program, self.equal(on), regather, found)
            return made if made.fits else None
        network, laid = self.costs(on).network, self.laid_out(on, program, regather, self.bucket_bytes)
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
        except DoesNotFitError:
            return None
        return self.judge(name, on, program, shares, regather, found)

    def fitting(self, name: str, on: Cluster, shares: Shares, hidden: Hidden) -> Candidate | None:
        """One search and one balance. Where memory is short, at the lowest price for holding bytes at which all fits.

        That price, once found, is where the next search begins.
        """
        if on.devices == 1:
            # Every program comes to the same there; the plainest is taken.
            proof = self.search(on, shares)
            alone = self.judge("single", on, one_device(self.graph), Shares((1.0,)), False, proof)
            return alone if alone.fits else None
        made, short = self._found(name, on, shares, hidden, self.memory_price, self.regather)
        if made.fits and (self.memory_price or not short):
            return made
        best = made if made.fits else None
        for regather in (False, True):
            # At a price beyond all others the program holds as little as any can: if that does not fit, none does.
            least, _ = self._found(name, on, shares, hidden, _DEAREST, regather)
            if least.fits:
                found = self._cheapest_that_fits(least, shares, hidden, natural=best is not None)
                return found if best is None or found.beats(best) else best
        return best

    def _cheapest_that_fits(self, least: Candidate, shares: Shares, hidden: Hidden, natural: bool) -> Candidate:
        """Between a price of memory at which all fits and none: halved, in powers, a few times.

        With any shares, or, where that is so without a price, with those that suit the work (`natural`).
        """
        best, low, high = least, math.log(self.memory_price or _CHEAPEST), math.log(_DEAREST)
        for _ in range(_HALVINGS):
            if not self.limits.left_s:
                break
            middle = (low + high) / 2
            made, short = self._found(least.name, least.on, shares, hidden, math.exp(middle), least.regather)
            if made.beats(best):
                best = made
            if short if natural else not made.fits:
                low = middle
            else:
                high = middle
        self.memory_price, self.regather = math.exp(high), least.regather
        return best

    def _found(
        self, name: str, on: Cluster, shares: Shares, hidden: Hidden, memory_price: float, regather: bool
    ) -> tuple[Candidate, bool]:
        """One search at a price of memory and the best shares for what it finds; and whether memory is short of that.

        Short it is also where shares can be found that fit: they are then not the fastest.
        """
        ideal_s = self.ideal_s(on)
        byte_s = tuple(memory_price * ideal_s / limit for limit in memory_limits(on)) if memory_price else ()
        found = self.search(on, shares, hidden=hidden, byte_s=byte_s, regather=regather)
        known = self._known.setdefault((on.fingerprint, regather), [])
        for made, short in known:
            if made.program == found.program:
                return made, short
        as_is = self.judge(name, on, found.program, shares, regather, found)
        balanced = self.balanced(name, on, found.program, shares, regather, found, polish=not as_is.fits)
        both = [as_is, balanced] if balanced else [as_is]
        best = min(both, key=lambda candidate: (not candidate.fits, candidate.step_s))
        known.append((best, not as_is.fits))
        return known[-1]

    def improve(self, on: Cluster, *, seeds: int = 3) -> None:
        """Search and balance in turn, from several shares to begin with."""
        known: Turns = {}
        if on.devices > 1:
            list(self.plain_balanced(on))
        for seed, shares in itertools.islice(self._seeds(on), seeds):
            said: list[str] = []
            best = self._first_turn(f"from {seed}", on, shares, known, said)
            for _ in range(_ROUNDS):
                if best is None or _are_alike(best.shares, shares):
                    break
                hidden = self.last_hidden or NOTHING_HIDDEN
                again = self._turn(f"from {seed}", on, best.shares, hidden, known, said)
                if again is None or not again.beats(best):
                    break
                best = again
            self.log.append(f"{_said(on)} from {seed}: {', '.join(said)}")
            if best is None or self.memory_price:
                break

    def _first_turn(self, name: str, on: Cluster, shares: Shares, known: Turns, said: list[str]) -> Candidate | None:
        """What is hidden is not a sum and so has no price. The first time four estimates are tried: nothing is hidden,
        gathering ahead of use is, all is, or as much as the work would cover. The best is kept for later."""
        if self.last_hidden is not None:
            return self._turn(name, on, shares, self.last_hidden, known, said)
        best: Candidate | None = None
        for estimate in (*_ESTIMATES, None):
            hidden = estimate or self._covered(best)
            if self.memory_price and estimate not in _ESTIMATES[:2]:
                # Where memory decides, what is hidden does not.
                continue
            if estimate is None and any(max(abs(hidden[k] - e[k]) for k in (0, 1)) < 0.15 for e in _ESTIMATES):
                continue
            made = self._turn(name, on, shares, hidden, known, said)
            if made is None:
                break
            if best is None or made.step_s < best.step_s:
                best, self.last_hidden = made, hidden
        return best

    def _turn(
        self, name: str, on: Cluster, shares: Shares, hidden: Hidden, known: Turns, said: list[str]
    ) -> Candidate | None:
        """One search and one balance; None if nothing fits or time is up. Says what came of it."""
        if (shares, hidden) in known:
            return known[shares, hidden]
        if not self.limits.left_s and self.first is not None:
            said.append("out of time")
            return None
        made = self.fitting(name, on, shares, hidden)
        if made is None:
            said.append("does not fit")
            self.too_small.append(on)
            return None
        is_known = any(made is candidate for candidate in known.values())
        said.append(f"{made.step_s * 1e3:.4g} ms{' again' if is_known else ''}")
        known[shares, hidden] = made
        return made

    def _covered(self, candidate: Candidate | None) -> Hidden:
        """What computation like this candidate's would cover if all parameters were gathered, and all synchronised."""
        if candidate is None:
            return NOTHING_HIDDEN
        network = self.costs(candidate.on).network
        size = sum(leaf.value.bytes for leaf in self.graph.parameters if leaf.value.grad)
        gathering, summing = (network.best(c, size).seconds(size) for c in ("all_gather", "all_reduce"))
        # The backward pass computes twice what the forward pass does.
        forward_s = candidate.timeline.critical.compute_s / 3
        return Hidden(
            min(forward_s / gathering, 1.0) if gathering else 0.0,
            min(2 * forward_s / summing, 1.0) if summing else 0.0,
        )

    def _seeds(self, on: Cluster) -> Iterator[tuple[str, Shares]]:
        seeds = [("shares by speed", self.by_speed(on))]
        if len(on.kinds) > 1:
            seeds += [("equal shares", self.equal(on)), ("shares by memory", self.by_memory(on))]
        seen: list[tuple[float, ...]] = []
        for name, shares in seeds:
            if not any(max(abs(a - b) for a, b in zip(shares, s, strict=True)) < 1e-9 for s in seen):
                seen.append(shares.work)
                yield name, shares

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
            cut = stored_cut(program, frozenset(whole[:last]))
            made.append(self.judge("partly stored cut", on, cut, candidate.shares, candidate.regather, candidate.found))
        best = min(made, key=lambda c: (not c.fits, c.step_s))
        self.balanced("partly stored cut", on, best.program, best.shares, best.regather, candidate.found)

    def find_bucket(self, candidate: Candidate) -> None:
        """How much to send at a time, for all that is made from now on, is what suits this candidate best.

        Small buckets leave early and hide better, large ones pay latencies less often. Of those that are as good the
        largest is taken.
        """
        if candidate.on.devices == 1 or OVERLAP in self.without:
            return
        laid = self.laid_out(candidate.on, candidate.program, candidate.regather, candidate.bucket_bytes)
        network, scale = self.costs(candidate.on).network, Scale(candidate.on, candidate.shares)
        steps = {size: run(self._rebucketed(laid, size), network, scale).step_s for size in _BUCKETS}
        best_s = min(*steps.values(), candidate.step_s)
        if candidate.step_s * BETTER <= best_s:
            self.bucket_bytes = candidate.bucket_bytes
        else:
            self.bucket_bytes = next(size for size, step_s in steps.items() if step_s * BETTER <= best_s)

    def _rebucketed(self, laid: LoweredCandidate, bucket_bytes: int) -> PricedStep:
        """The same step with other buckets: what is computed costs what it did."""
        before = laid.priced.schedule
        again = lower(laid.program, replace(before.decisions, bucket_bytes=bucket_bytes))
        return PricedStep(again, laid.priced.computed)

    def rebucketed(self, candidate: Candidate) -> None:
        """The same pair, sent in what suits it best."""
        self.find_bucket(candidate)
        if self.bucket_bytes != candidate.bucket_bytes:
            on, program, found = candidate.on, candidate.program, candidate.found
            self.judge(candidate.name, on, program, candidate.shares, candidate.regather, found)
            self.balanced(candidate.name, on, program, candidate.shares, candidate.regather, found)

    def settled(self, candidate: Candidate) -> None:
        """The same pair once more, with more care for whole units."""
        self.balanced(
            candidate.name,
            candidate.on,
            candidate.program,
            candidate.shares,
            candidate.regather,
            candidate.found,
            polish=True,
        )

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
        return self.balanced(
            candidate.name, candidate.on, program, candidate.shares, candidate.regather, candidate.found
        )

    def ideal_s(self, on: Cluster) -> float:
        """What a step takes at least: all work divided at will over all devices, and nothing sent."""
        key = on.fingerprint
        if key not in self._ideal:
            self._ideal[key] = self._ideal_s(on)
        return self._ideal[key]

    def _ideal_s(self, on: Cluster) -> float:
        costs, total = self.costs(on), 0.0
        for node in self.graph.nodes:
            whole = costs.op(node, Rule((I,) * len(node.operands), (I,) * len(node.results)))
            there, back = costs.work(node).kernels
            per_s = 0.0
            launches = there * whole.forwards + back
            for kind, seconds in zip(on.kinds, whole.seconds((1.0,) * len(on.kinds)), strict=True):
                working = seconds - launches * kind.launch_s
                per_s += kind.devices / working if working > 1e-12 else math.inf
            total += 1 / per_s
        return total


def _are_alike(shares: Shares, others: Shares) -> bool:
    """Whether a search with one would find what it finds with the other."""
    names = {name for name, _ in (*shares.named, *others.named)}
    return all(abs(a - b) < 1e-9 for by in ("", *names) for a, b in zip(shares.of(by), others.of(by), strict=True))


def _said(on: Cluster) -> str:
    return " + ".join(f"{kind.devices} {kind.name}" for kind in on.kinds)
