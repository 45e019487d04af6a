"""Search and balance in turn on one part of a cluster, from several shares to begin with.

In: a `CandidatePool` and the devices to use. Out: candidates, which the pool keeps.

    fitting     one search and one balance; where memory is short, at the lowest price of memory at which all fits
    improve     the same in turn: the search proposes a program for given shares, the balance shares for that program

The one idea: what is learned on the way (what computation hides, what a byte is worth, how much to send at a time)
belongs to the part. So what is found for some devices is the same whether they are all there is or a part of more, and
a cluster is never planned worse than a part of it that is tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from lopsided.cluster.cluster import Cluster
from lopsided.ir.placement import Shares
from lopsided.ir.program import one_device
from lopsided.planner.ablation import OVERLAP
from lopsided.planner.candidates import GAIN, Candidate, Learned, memory_limits
from lopsided.planner.freeing import made_to_fit
from lopsided.planner.host_state import on_hosts
from lopsided.planner.proposals import CandidatePool
from lopsided.planner.search_cost import NOTHING_HIDDEN, Hidden
from lopsided.schedule.decisions import BUCKET_BYTES

# Search and balance take two turns more after the first from a seed.
_ROUNDS = 2
# The prices of memory that are tried: a device's whole memory is worth so many times its work.
_CHEAPEST, _DEAREST = 1e-2, 1e2
# Of the programs that do not fit, the two quickest are tried with something run again.
_SHORT = 2
# How often what lies between two prices of memory is halved.
_HALVINGS = 3
# Of what computation hides of parameter traffic.
ESTIMATES = (NOTHING_HIDDEN, Hidden(0.9, 0.0), Hidden(0.9, 0.9))
# A part whose first candidate takes 1.15 times the best step is left at that.
_FAR = 1.15
# A part whose first seed led to more than 1.1 times the best step has no other seeds.
_CLOSE = 1.1

Turns = dict[tuple[Shares, Hidden], Candidate]  # what a turn of search and balance came to, by what it began with


class PartSearch:
    """The search on one part, with what it has learned there."""

    def __init__(self, pool: CandidatePool, on: Cluster, learned: Learned | None = None) -> None:
        self.pool, self.on = pool, on
        if learned is None:
            learned = Learned(NOTHING_HIDDEN if OVERLAP in pool.without else None, bucket_bytes=pool.bucket_on(on))
        self.hidden, self.bucket_bytes = learned.hidden, learned.bucket_bytes
        self.memory_price, self.regather = learned.memory_price, learned.regather
        self._known: dict[bool, list[tuple[Candidate, bool]]] = {}  # what searches came to
        self._turns: Turns = {}
        self._said: list[str] = []

    @property
    def learned(self) -> Learned:
        return Learned(self.hidden, self.memory_price, self.regather, self.bucket_bytes)

    def improve(self) -> None:
        """Search and balance in turn, until that helps no more."""
        shown = " + ".join(f"{kind.devices} {kind.name}" for kind in self.on.kinds)
        for number, (seed, shares) in enumerate(self._seeds()):
            self._said = []
            best = self._from_seed(f"from {seed}", shares)
            self.pool.log.append(f"{shown} from {seed}: {', '.join(self._said)}")
            nothing_fits = best is None and self.pool.best is not None
            if number == 0 and self.on.devices > 1 and not nothing_fits and not self._is_hopeless(best):
                list(self.pool.plain_balanced(self.on))
            if best is None or self.memory_price or self._is_far(best, _CLOSE):
                break
        self.pool.learned[self.on.fingerprint] = self.learned

    def _is_far(self, candidate: Candidate | None, times: float = _FAR) -> bool:
        return candidate is not None and candidate.step_s > times * self.pool.bar_s

    def _is_hopeless(self, candidate: Candidate | None) -> bool:
        """Whether all that is known on these devices is far off the best.

        Where data parallelism is near it, a search that has the wrong estimate of what hides says little.
        """
        return self._is_far(candidate) and self._is_far(self.pool.of_part.get(self.on.fingerprint, candidate))

    def _from_seed(self, name: str, shares: Shares) -> Candidate | None:
        best = self._first_turn(name, shares)
        for _ in range(_ROUNDS):
            if best is None or self._is_far(best) or _are_alike(best.shares, shares):
                break
            again = self._turn(name, best.shares, self.hidden or NOTHING_HIDDEN)
            if again is None or not again.beats(best):
                break
            best = again
        return best

    def _first_turn(self, name: str, shares: Shares) -> Candidate | None:
        """What is hidden is not a sum and so has no price. The first time four estimates are tried: nothing is hidden,
        gathering ahead of use is, all is, or as much as the work would cover. The best is kept for later."""
        if self.hidden is not None:
            return self._turn(name, shares, self.hidden)
        best: Candidate | None = None
        for estimate in (*ESTIMATES, None):
            hidden = estimate or self._covered(best)
            if self._is_hopeless(best) or (self.memory_price and estimate not in ESTIMATES[:2]):
                # Where memory decides, what is hidden does not.
                continue
            if estimate is None and any(max(abs(hidden[k] - e[k]) for k in (0, 1)) < 0.15 for e in ESTIMATES):
                continue
            made = self._turn(name, shares, hidden)
            if made is None:
                break
            if best is None or made.step_s < best.step_s:
                best, self.hidden = made, hidden
        return best

    def _turn(self, name: str, shares: Shares, hidden: Hidden) -> Candidate | None:
        """One search and one balance; None if nothing fits or time is up. Says what came of it."""
        if (shares, hidden) in self._turns:
            return self._turns[shares, hidden]
        if not self.pool.limits.left_s and self.pool.first is not None:
            self._said.append("out of time")
            return None
        made = self.fitting(name, shares, hidden)
        if made is None:
            self._said.append("does not fit")
            self.pool.too_small.append(self.on)
            return None
        is_known = any(made is candidate for candidate in self._turns.values())
        self._said.append(f"{made.step_s * 1e3:.4g} ms{' again' if is_known else ''}")
        self._turns[shares, hidden] = made
        return made

    def fitting(self, name: str, shares: Shares, hidden: Hidden) -> Candidate | None:
        """One search and one balance; where memory is short, the same with a price for holding bytes.

        And what was found and does not fit, with what it saves run again in place of kept: that may be quicker.
        """
        found = self._fitting(name, shares, hidden)
        return found or (self._freed() if self.pool.frees else None)

    def free(self) -> None:
        """What was found and does not fit, made to; and what is found at the shares of the best of that."""
        made = self._freed()
        if made is None or not self.pool.limits.left_s or made is not self.pool.best:
            return
        found, _ = self._found(made.name, made.shares, self.hidden or NOTHING_HIDDEN, self.memory_price, self.regather)
        if found.program != made.program:
            made_to_fit(self.pool, found)

    def _freed(self) -> Candidate | None:
        made = [freed for base in self._short() if (freed := made_to_fit(self.pool, base)) is not None]
        return min(made, key=lambda freed: freed.step_s, default=None)

    def _short(self) -> list[Candidate]:
        """What does not fit: the quickest that searches found, and the plain programs."""
        pool, on = self.pool, self.on
        if on.devices == 1:
            return [pool.judge("single", on, one_device(pool.graph), Shares((1.0,)), False)]
        found = [made for known in self._known.values() for made, _ in known if not made.fits]
        plain = [
            pool.judge(name, on, program, pool.by_speed(on), regather, bucket_bytes=self.bucket_bytes)
            for name, program, regather in pool.plain
        ]
        return [*sorted(found, key=lambda made: made.step_s)[:_SHORT], *(one for one in plain if not one.fits)]

    def _fitting(self, name: str, shares: Shares, hidden: Hidden) -> Candidate | None:
        """At the lowest price of memory at which all fits. Once found, it is where the next search begins."""
        if self.on.devices == 1:
            # Every program comes to the same there; the plainest is taken.
            proof = self.pool.search(self.on, shares)
            alone = self.pool.judge("single", self.on, one_device(self.pool.graph), Shares((1.0,)), False, proof)
            return alone if alone.fits else None
        made, short = self._found(name, shares, hidden, self.memory_price, self.regather)
        if made.fits and (self.memory_price or not short):
            return made
        if self._is_far(made, _CLOSE) or made.step_s > self.pool.known_s * GAIN:
            # What fits takes longer than what does not.
            return made
        best = made if made.fits else None
        for regather in (False, True):
            # At a price beyond all others the program holds as little as any can: if that does not fit, none does.
            least, _ = self._found(name, shares, hidden, _DEAREST, regather)
            if regather:
                kept = (self.pool.everything(least.program), on_hosts(self.on), self.pool.state_bits)
                laid = self.pool.laid_out(self.on, least.program, regather, least.bucket_bytes, *kept)
                self.pool.leanest.append(laid.held)
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
            if not self.pool.limits.left_s:
                break
            middle = (low + high) / 2
            made, short = self._found(least.name, shares, hidden, math.exp(middle), least.regather)
            if made.beats(best):
                best = made
            if short if natural else not made.fits:
                low = middle
            else:
                high = middle
        self.memory_price, self.regather = math.exp(high), least.regather
        return best

    def _found(
        self, name: str, shares: Shares, hidden: Hidden, memory_price: float, regather: bool
    ) -> tuple[Candidate, bool]:
        """One search at a price of memory and the best shares for what it finds; and whether memory is short of that.

        Short it is also where shares can be found that fit: they are then not the fastest.
        """
        pool, on = self.pool, self.on
        ideal_s = pool.ideal_s(on)
        byte_s = tuple(memory_price * ideal_s / limit for limit in memory_limits(on)) if memory_price else ()
        found = pool.search(on, shares, hidden=hidden, byte_s=byte_s, regather=regather)
        known = self._known.setdefault(regather, [])
        for made, short in known:
            if made.program == found.program:
                return made, short
        # What suits data parallelism suits some programs, and what everyone sends at a time suits others.
        as_is = _best(
            pool.judge(name, on, found.program, shares, regather, found, bucket_bytes=size)
            for size in dict.fromkeys((self.bucket_bytes, BUCKET_BYTES))
        )
        balanced = pool.balanced(
            name, on, found.program, shares, regather, found, bucket_bytes=as_is.bucket_bytes, polish=not as_is.fits
        )
        best = _best([as_is, balanced] if balanced else [as_is])
        known.append((best, not as_is.fits))
        return known[-1]

    def _covered(self, candidate: Candidate | None) -> Hidden:
        """What computation like this candidate's would cover if all parameters were gathered, and all synchronised."""
        if candidate is None:
            return NOTHING_HIDDEN
        network = self.pool.costs(candidate.on).network
        size = sum(leaf.value.bytes for leaf in self.pool.graph.parameters if leaf.value.grad)
        gathering, summing = (network.best(c, size).seconds(size) for c in ("all_gather", "all_reduce"))
        # The backward pass computes twice what the forward pass does.
        forward_s = candidate.timeline.critical.compute_s / 3
        return Hidden(
            min(forward_s / gathering, 1.0) if gathering else 0.0,
            min(2 * forward_s / summing, 1.0) if summing else 0.0,
        )

    def _seeds(self) -> Iterator[tuple[str, Shares]]:
        pool, on = self.pool, self.on
        seeds = [("shares by speed", pool.by_speed(on))]
        if len(on.kinds) > 1:
            seeds += [("equal shares", pool.equal(on)), ("shares by memory", pool.by_memory(on))]
        seen: list[tuple[float, ...]] = []
        for name, shares in seeds:
            if not any(max(abs(a - b) for a, b in zip(shares, s, strict=True)) < 1e-9 for s in seen):
                seen.append(shares.work)
                yield name, shares


def _best(made: Iterable[Candidate]) -> Candidate:
    return min(made, key=lambda candidate: (not candidate.fits, candidate.step_s))


def _are_alike(shares: Shares, others: Shares) -> bool:
    """Whether a search with one would find what it finds with the other."""
    names = {name for name, _ in (*shares.named, *others.named)}
    return all(abs(a - b) < 1e-9 for by in ("", *names) for a, b in zip(shares.of(by), others.of(by), strict=True))
