"""In how many rounds the batch is computed: as many as it takes to fit, and more where that pays.

In: what is asked for (`Asked`), and the search in one number of rounds. Out: plans.

The one idea: a batch in k rounds is another graph, that of one round, with k among the decisions of its step. So it is
planned as any other, and the plans of different numbers are compared by their whole steps. Rounds free activations and
cost: smaller kernels with the same overhead, and whatever is sent in each. So they are tried where memory is what holds
the step up: where nothing fits, or where something that does not fit would be quicker than all that does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from lopsided.cluster.cluster import Cluster
from lopsided.errors import DoesNotFitError
from lopsided.ir.graph import Graph
from lopsided.ir.program import RuleBook
from lopsided.ops.derive import derive_rules
from lopsided.planner.candidates import BETTER, GAIN, Candidate
from lopsided.planner.plan_data import Baseline, Plan
from lopsided.schedule.rounds import NoRoundsError, batch_size, in_rounds

# Where nothing that does not fit takes less than 0.995 of the best step that fits, memory decides nothing.
_AS_GOOD = 0.995
# Rounds are dear where without want of memory a step takes 1.2 times as long in them.
_DEAR = 1.2
# What takes more than 1.1 times the best step is not looked at on fewer devices.
_CLOSE = 1.1


class Asked(Protocol):
    """What is planned, and in how many rounds."""

    @property
    def graph(self) -> Graph: ...
    @property
    def rules(self) -> RuleBook: ...
    @property
    def known(self) -> Sequence[Plan]: ...
    @property
    def microbatches(self) -> int: ...


_Task = TypeVar("_Task", bound=Asked)


def in_so_many(task: _Task, count: int) -> _Task:
    """What is asked for, with the graph of one of so many rounds."""
    if count == 1:
        return task
    graph = in_rounds(task.graph, count).graph
    changed: dict[str, Any] = {"graph": graph, "rules": derive_rules(graph), "microbatches": count}
    return replace(task, **changed)  # type: ignore[type-var]


class Searched(Protocol):
    """What a search in some number of rounds has come to."""

    @property
    def fits(self) -> bool: ...
    @property
    def step_s(self) -> float:
        """Of the best that fits."""

    @property
    def least_s(self) -> float:
        """Of anything that was seen, whether it fits or not: with less memory no step gets shorter."""

    @property
    def lack(self) -> float:
        """Where nothing fits, how full the fullest device would be with what comes nearest: 1 is its limit."""

    @property
    def rounds_to_fit(self) -> int:
        """In how many rounds nothing would have to be freed, about; 0 if in none."""

    @property
    def rounds_with_all_freed(self) -> int:
        """In how many there is room, about, with all freed that can be; 0 if in none."""

    @property
    def is_freed(self) -> bool:
        """Whether the best step does more for want of memory."""

    @property
    def is_broken_off(self) -> bool: ...
    @property
    def baselines(self) -> tuple[Baseline, ...]: ...
    def free(self) -> None:
        """Make fit what does not."""

    def rest_devices(self) -> None:
        """Look for something better without some of the devices."""

    def plans(self, most: int) -> tuple[Plan, ...]:
        """The best, the quickest first; refused, in words, where nothing fits."""


def in_best_rounds(
    task: _Task,
    cluster: Cluster,
    wanted: int | None,
    searched: Callable[[_Task, Cluster, float], Searched],
    most: int = 1,
) -> tuple[Plan, ...]:
    """The plans with the quickest step of those in `wanted` rounds, or in any number that is worth a try."""
    at_once = searched(in_so_many(task, 1 if wanted is None else wanted), cluster, math.inf)
    if wanted is not None:
        at_once.free()
        return at_once.plans(most)
    has_room = at_once.fits and at_once.least_s >= at_once.step_s * _AS_GOOD
    if has_room and all(plan.microbatches == 1 for plan in task.known):
        return at_once.plans(most)
    trial = _Trial(task, cluster, searched, at_once)
    best = trial.best()
    if best is not None:
        plans = best.plans(most)
        # What the classics would take is told of the batch at once, where that fits.
        of_classics = at_once.baselines if at_once.fits and best is not at_once else ()
        return tuple(replace(plan, baselines=of_classics or plan.baselines) for plan in plans)
    try:
        return min(trial.made.values(), key=lambda one: one.lack).plans(most)
    except DoesNotFitError as why:
        raise _said_with_rounds(why, trial.refused, max(trial.made), batch_size(task.graph)) from None


class _Trial:
    """Numbers of rounds, tried one after the other: the first with which nothing should have to be freed, then more as
    long as memory is short, and fewer as long as a step could be shorter by that; these first where rounds are dear.
    """

    def __init__(
        self, task: _Task, cluster: Cluster, searched: Callable[[_Task, Cluster, float], Searched], at_once: Searched
    ) -> None:
        self._searched: Callable[[int, float], Searched] = lambda count, known_s: searched(
            in_so_many(task, count), cluster, known_s
        )
        self.counts = [1, *_counts(task)]
        self.known = {plan.microbatches for plan in task.known}
        self.made = {1: at_once}
        self.freed: set[int] = set()  # those in which all was made to fit that may lead to something better
        self.refused: NoRoundsError | None = None
        self.chosen: Searched | None = at_once if at_once.fits else None

    def best(self) -> Searched | None:
        at_once = self.made[1]
        if at_once.is_broken_off:
            return self.chosen
        for number, first in enumerate(self._starts()):
            was_better, found = self._try(self.counts[first])
            if number and not was_better:
                continue
            if found is None or found.least_s < at_once.least_s * _DEAR:
                self._more(first, found)
                self._fewer(first)
            else:
                self._fewer(first)
                if found.least_s < self._step_s * GAIN:
                    self._more(first, found)
        for count in self.known - {*self.made}:
            self._try(count)
        for made in sorted(self.made.values(), key=lambda made: made.least_s) if self.chosen is not None else ():
            self._freed(made)
        self._rest_devices()
        return self.chosen

    def _starts(self) -> list[int]:
        """Where nothing fits with nothing freed in any number, it may be best to free much in few rounds, or little in
        many."""
        at_once, last = self.made[1], len(self.counts) - 1
        wanted = [at_once.rounds_to_fit] if at_once.rounds_to_fit else [at_once.rounds_with_all_freed, math.inf]
        found = (
            next((k for k, count in enumerate(self.counts) if count >= max(size, 2)), last) for size in wanted if size
        )
        return list(dict.fromkeys(found))

    def _more(self, first: int, found: Searched | None) -> None:
        """More rounds than that many, as long as memory is short and each number is better than the one before."""
        for k in range(first + 1, len(self.counts)):
            if self.refused or (found is not None and _has_room(found)):
                break
            was_better, found = self._try(self.counts[k])
            if self.chosen is not None and not was_better:
                break

    def _fewer(self, first: int) -> None:
        """Fewer rounds: the less overhead, and the more is to be freed."""
        for k in reversed(range(first)):
            is_promising = self.made[1].least_s < self._step_s * GAIN
            if not is_promising or not (self._try(self.counts[k])[0] or self.refused):
                break

    def _rest_devices(self) -> None:
        """With fewer devices other numbers of rounds may be best. What is chosen is tried so anyway."""
        if self.chosen is None:
            return
        before = self.chosen
        before.rest_devices()
        for made in self.made.values():
            is_near = made.fits and made.step_s < _CLOSE * self._step_s and made.least_s < self._step_s * GAIN
            if made is not before and is_near and not made.is_broken_off:
                made.rest_devices()
                if made.step_s < self._step_s * BETTER:
                    self.chosen = made

    @property
    def _step_s(self) -> float:
        return self.chosen.step_s if self.chosen is not None else math.inf

    def _try(self, count: int) -> tuple[bool, Searched | None]:
        """Whether so many rounds are better than all before."""
        if count not in self.made and not self.refused:
            try:
                made = self.made[count] = self._searched(count, self._step_s)
            except NoRoundsError as error:
                self.refused = error
                return False, None
            if made.fits and made.step_s < self._step_s * BETTER:
                # Before anything is made to fit, more rounds are tried: something else may fit in them.
                self.chosen = made
                return True, made
        known = self.made.get(count)
        return known is not None and self._freed(known), known

    def _freed(self, made: Searched) -> bool:
        if id(made) not in self.freed and made.least_s < self._step_s * GAIN and not made.is_broken_off:
            self.freed.add(id(made))
            made.free()
        if made.fits and made.step_s < self._step_s * BETTER:
            self.chosen = made
            return True
        return False


def _has_room(made: Searched) -> bool:
    """Whether the best step does no more for want of memory, and nothing that does not fit would be quicker."""
    return made.fits and not made.is_freed and made.least_s >= made.step_s * GAIN


def is_freed(candidate: Candidate) -> bool:
    """Whether a step does more for want of memory."""
    return bool(candidate.reruns or candidate.on_host or candidate.state_bits or candidate.regather)


def _counts(task: Asked) -> Iterator[int]:
    """Numbers of rounds that divide the batch, each about twice the one before; those of known plans with them."""
    rows = batch_size(task.graph)
    known = {plan.microbatches for plan in task.known}
    last = 1
    for count in range(2, rows + 1):
        if rows % count == 0 and (count >= 2 * last or count in known):
            last = count
            yield count


def _said_with_rounds(why: DoesNotFitError, refused: NoRoundsError | None, most: int, rows: int) -> DoesNotFitError:
    """Why nothing fits, and what rounds have to do with it."""
    tried = (
        f"{refused.what} ({refused.where.splitlines()[0] if refused.where else ''})"
        if refused is not None
        else "the batch has one row"
        if rows < 2
        else f"not in up to {most} rounds of the batch either"
        if most > 1
        else "there was no time to try rounds of the batch"
    )
    return DoesNotFitError(why.what, where=why.where, do=why.do, **why.facts, rounds=tried)
