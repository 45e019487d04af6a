"""What does not fit, made to fit: with as much freed as it takes, and the best shares for that.

In: a `Candidate`, and the pool that it is of. Out: another that fits, or None. Freed is what is cheapest by the byte:
a loss in chunks, saved activations that run again (`recompute`), optimizer state in host memory (`host_state`), and
state in eight bits where that is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lopsided.cluster.cluster import Cluster
from lopsided.ir.program import Program
from lopsided.planner.candidates import BETTER, Candidate, memory_limits
from lopsided.planner.host_state import StateOnHost, on_hosts
from lopsided.planner.proposals import CandidatePool, has_room
from lopsided.planner.recompute import Recomputation
from lopsided.schedule.cost import Scale
from lopsided.schedule.decisions import BUCKET_BYTES, OnHost, Rerun
from lopsided.schedule.memory import bytes_per_kind

_NEARLY = 1.02  # times the best step on the same devices: what is further off without recomputation is left at that
_MORE_FREED = 6  # times more is freed where too little was
_MARGIN = 1.1  # times what is missing is freed more
_PARTS = (0.5, 0.75)  # of what is missing, freed where shares make room for the rest
# The uses of memory of which a round has less than the batch.
_OF_A_ROUND = ("saved", "recomputed", "working")

_Less = tuple[tuple[Rerun, ...], tuple[OnHost, ...]]
"""What is not kept where it would be: what runs again, and what is in host memory."""
_ALL_KEPT: _Less = ((), ())


def rounds_to_fit(pool: CandidatePool, cluster: Cluster, *, is_freed: bool = False) -> int:
    """In how many rounds there is room, with shares by speed and nothing freed or all that can be: by data parallelism
    or ZeRO that keeps what it gathers, or else by ZeRO that gathers again. 0 if in none.

    Activations get less with the number of rounds, and sums of gradients that are sent behind the last get more.
    """
    for again in (False, True):
        plain = [program for _, program, regather in pool.plain if regather == again]
        tried = [_rounds_of(pool, cluster, program, again, is_freed) for program in plain]
        if any(tried):
            return min(filter(None, tried))
    return 0


def _rounds_of(pool: CandidatePool, cluster: Cluster, program: Program, regather: bool, is_freed: bool) -> int:
    """In how many rounds there is room for a program; 0 if in none."""
    less = (pool.everything(program), on_hosts(cluster)) if is_freed else _ALL_KEPT
    held = pool.laid_out(cluster, program, regather, BUCKET_BYTES, *less).held
    scale = Scale(cluster, pool.by_speed(cluster))
    of_round = bytes_per_kind([h for h in held if h.use in _OF_A_ROUND], scale)
    always = bytes_per_kind([h for h in held if h.use not in _OF_A_ROUND], scale)
    sums = sum(h.bytes for h in held if h.use == "gathered") if not regather else 0
    rooms = [limit - size - sums for limit, size in zip(memory_limits(cluster), always, strict=True)]
    if any(room <= 0 for room in rooms):
        return 0
    needed = max(math.ceil(size / room) for size, room in zip(of_round, rooms, strict=True))
    return max(needed, 1) * pool.microbatches


def made_to_fit(pool: CandidatePool, candidate: Candidate) -> Candidate | None:
    """One that does not fit, with as much run again in the backward pass, or optimizer state in host memory, or in
    fewer bits where that is allowed, as it takes, and the best shares for that.

    None where nothing helps, or where it would not become the best of its devices: it takes no less time for that.
    """
    # What is freed makes no step shorter.
    best = pool.of_part.get(candidate.on.fingerprint)
    best_s = min(pool.known_s, best.step_s if best is not None else math.inf)
    if candidate.fits or candidate.step_s >= best_s * _NEARLY:
        return None
    key = (candidate.on.fingerprint, id(candidate.program), candidate.shares, candidate.regather)
    if key not in pool.made_to_fit:
        made = [one for one in _with_less(pool, candidate, best) if one is not None and one.fits]
        fitting = min(made, key=lambda one: one.step_s, default=None)
        pool.made_to_fit[key] = fitting if fitting is None else _no_more_on_host(pool, fitting)
    return pool.made_to_fit[key]


def _with_less(pool: CandidatePool, candidate: Candidate, best: Candidate | None) -> Iterator[Candidate | None]:
    """What may come of it, with optimizer state as it is, and in fewer bits where that is allowed."""
    yield from _recomputing(pool, candidate)
    if not pool.state_bits or candidate.state_bits:
        return
    coded = _less_kept(pool, replace(candidate, state_bits=pool.state_bits), _ALL_KEPT)
    if best is None or coded.step_s < best.step_s * _NEARLY:
        yield coded
        yield pool.again(coded)
        if not coded.fits:
            yield from _recomputing(pool, coded)


def _recomputing(pool: CandidatePool, candidate: Candidate) -> Iterator[Candidate | None]:
    """What may come of it: more and more is freed until that is enough, also of what shares could make room for."""
    if (chunked := pool.chunked_in(candidate.program)) and chunked != candidate.reruns:
        # A loss in chunks costs next to nothing, so that comes first.
        candidate = _less_kept(pool, candidate, _ALL_KEPT)
        yield candidate
        yield pool.again(candidate)
        if candidate.fits:
            return
    schedule = pool.lowered(candidate.program, candidate.regather, candidate.bucket_bytes, ((), (), 0))
    tried = Recomputation(pool.blocks, candidate, schedule, pool.costs(candidate.on))
    state = StateOnHost(candidate, pool.optimizer)
    if not _can_fit(pool, candidate, tried, state.everything()):
        if pool.best is None:
            # What comes nearest to fitting tells what is missing.
            yield from (_less_kept(pool, candidate, (reruns, state.everything())) for reruns in tried.everything())
        return
    if _can_fit(pool, candidate, tried, ()):
        yield from _freeing(pool, candidate, tried, None)
    if not state.kinds:
        return
    # Less runs again where state is in host memory. It pays where that alone does not take longer than the best.
    best = pool.of_part.get(candidate.on.fingerprint)
    over = [max(used - limit, 0.0) for used, limit in zip(candidate.memory, memory_limits(candidate.on), strict=True)]
    # Nothing runs again: what that sends is not in its price.
    alone = _less_kept(pool, candidate, ((), state.freeing(over)))
    yield alone
    yield pool.again(alone)
    least = _less_kept(pool, candidate, ((), state.freeing(_beyond(over, tried.cheaper_than(state.byte_s)))))
    if best is None or least.step_s < best.step_s * _NEARLY:
        yield from _freeing(pool, candidate, tried, state)


def _can_fit(pool: CandidatePool, candidate: Candidate, tried: Recomputation, on_host: tuple[OnHost, ...]) -> bool:
    """Whether there is room with all run again that can be, were every cut tensor divided as suits the memory."""
    on, how = candidate.on, (candidate.on, candidate.program, candidate.regather, candidate.bucket_bytes)
    stays = ("parameter", "gradient", "buffer") if on_host else ("parameter", "gradient", "buffer", "optimizer")
    as_it_is = pool.laid_out(*how, candidate.reruns, (), candidate.state_bits).held
    if not has_room(on, [one for one in as_it_is if one.use in stays]):
        return False
    every = (pool.with_chunks(candidate.program, reruns) for reruns in tried.everything())
    return any(has_room(on, pool.laid_out(*how, reruns, on_host, candidate.state_bits).held) for reruns in every)


def _freeing(
    pool: CandidatePool, candidate: Candidate, tried: Recomputation, state: StateOnHost | None
) -> Iterator[Candidate | None]:
    on, limits = candidate.on, memory_limits(candidate.on)

    def freeing(wanted: Sequence[float]) -> _Less:
        if state is None:
            return tried.freeing(wanted), ()
        on_host = state.freeing(_beyond(wanted, cheap))
        return tried.freeing(_beyond(wanted, state.freed(on_host))), on_host

    # What runs again for less than it takes to fetch state comes first.
    cheap = tried.cheaper_than(state.byte_s) if state is not None else ()
    over = [max(used - limit, 0.0) for used, limit in zip(candidate.memory, limits, strict=True)]
    seen: set[_Less] = {_ALL_KEPT}
    wanted, made, fitting_s = over, candidate, math.inf
    for _ in range(_MORE_FREED):
        kept = freeing(wanted)
        if kept in seen:
            break
        seen.add(kept)
        made = _less_kept(pool, candidate, kept)
        again = pool.again(made)
        yield again
        if made.fits:
            yield made
            break
        if again is not None and again.fits:
            fitting_s = min(fitting_s, again.step_s)
        if made.step_s >= fitting_s * BETTER:
            # With more freed, these shares would take longer than others do that fit.
            break
        left = [max(used - limit, 0.0) for used, limit in zip(made.memory, limits, strict=True)]
        wanted = [w + more * _MARGIN for w, more in zip(wanted, left, strict=True)]
    if made.fits or fitting_s < math.inf:
        for part in _PARTS if len(on.kinds) > 1 else ():
            fewer = freeing([size * part for size in wanted])
            if fewer not in seen:
                seen.add(fewer)
                yield pool.again(_less_kept(pool, candidate, fewer))
        # What everyone does, with the shares as they are: more freed than these need on some kinds of devices.
        yield _less_kept(pool, candidate, (next(tried.everything()), ()))
        return
    for reruns in tried.everything():
        made = _less_kept(pool, candidate, (reruns, state.everything() if state is not None else ()))
        yield made
        yield pool.again(made)
        if made.fits:
            return


def _no_more_on_host(pool: CandidatePool, candidate: Candidate) -> Candidate:
    """The same, with state back on devices that have room now that shares were balanced, as long as that helps."""
    for _ in range(_MORE_FREED if candidate.on_host else 0):
        limits = memory_limits(candidate.on)
        room = [limit - used for used, limit in zip(candidate.memory, limits, strict=True)]
        on_host = StateOnHost(candidate, pool.optimizer).back(candidate.on_host, room)
        if on_host == candidate.on_host:
            break
        less = _less_kept(pool, candidate, (candidate.reruns, on_host))
        made = [one for one in (less, pool.again(less)) if one is not None and one.fits]
        quickest = min(made, key=lambda one: one.step_s, default=candidate)
        if quickest.step_s >= candidate.step_s * BETTER:
            break
        candidate = quickest
    return candidate


def _less_kept(pool: CandidatePool, candidate: Candidate, less: _Less) -> Candidate:
    """With this, and with losses in chunks."""
    kept = (pool.with_chunks(candidate.program, less[0]), less[1], candidate.state_bits)
    about = (candidate.name, candidate.on, candidate.program, candidate.shares, candidate.regather, candidate.found)
    return pool.judge_kept(about, candidate.bucket_bytes, kept)


def _beyond(wanted: Sequence[float], freed: Sequence[float]) -> list[float]:
    return [max(size - less, 0.0) for size, less in zip(wanted, freed, strict=True)]
