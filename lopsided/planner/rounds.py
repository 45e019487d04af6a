"""In how many rounds the batch is computed: as many as it takes to fit, and more where that pays.

In: what is asked for (`Asked`), and the planner of one number of rounds. Out: plans.

The one idea: a batch in k rounds is another graph, that of one round, with k among the decisions of its step. So it is
planned as any other, and the plans of different numbers are compared by their whole steps. Rounds free activations and
cost: smaller kernels with the same overhead, and whatever is sent in each. So they are tried where memory is what holds
the step up: nothing fits, parts run again, parameters are gathered again, or a device is nearly full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from lopsided.cluster.cluster import Cluster
from lopsided.errors import DoesNotFitError
from lopsided.ir.graph import Graph
from lopsided.ir.program import RuleBook
from lopsided.ops.derive import derive_rules
from lopsided.planner.candidates import BETTER, memory_limits
from lopsided.planner.plan_data import Plan
from lopsided.schedule.rounds import NoRoundsError, batch_size, in_rounds

# Beyond 0.85 of what a plan may fill of a device, memory may be what decides.
_FULL = 0.85


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


def in_best_rounds(
    task: _Task,
    cluster: Cluster,
    wanted: int | None,
    planned: Callable[[_Task, Cluster, int], tuple[Plan, ...]],
    most: int = 1,
) -> tuple[Plan, ...]:
    """The plans with the quickest step of those in `wanted` rounds, or in any number that is worth a try."""
    if wanted is not None:
        return planned(in_so_many(task, wanted), cluster, most)
    best: tuple[Plan, ...] = ()
    why: DoesNotFitError | None = None
    try:
        best = planned(task, cluster, most)
    except DoesNotFitError as error:
        why = error
    if best and not _is_short(best[0]) and all(plan.microbatches == 1 for plan in task.known):
        return best
    baselines = best[0].baselines if best else ()
    refused: NoRoundsError | None = None
    for count in _counts(task):
        try:
            made = planned(in_so_many(task, count), cluster, most)
        except DoesNotFitError:
            continue
        except NoRoundsError as error:
            refused = error
            break
        if best and made[0].step_s >= best[0].step_s * BETTER:
            break
        best = tuple(replace(plan, baselines=baselines or plan.baselines) for plan in made)
    if best:
        return best
    if why is None:
        raise DoesNotFitError("no plan was found", do="give more memory")
    raise _said_with_rounds(why, refused, batch_size(task.graph))


def _is_short(plan: Plan) -> bool:
    """Whether memory decides how the step is done."""
    if plan.reruns or plan.on_host or plan.state_bits or plan.regather:
        return True
    limits = [
        limit for limit, kind in zip(memory_limits(plan.on), plan.on.kinds, strict=True) for _ in range(kind.devices)
    ]
    return any(held > _FULL * limit for held, limit in zip(plan.memory_bytes, limits, strict=True))


def _counts(task: Asked) -> Iterator[int]:
    """Numbers of rounds that divide the batch, each about twice the one before; those of known plans with them."""
    rows = batch_size(task.graph)
    known = {plan.microbatches for plan in task.known}
    last = 1
    for count in range(2, rows + 1):
        if rows % count == 0 and (count >= 2 * last or count in known):
            last = count
            yield count


def _said_with_rounds(why: DoesNotFitError, refused: NoRoundsError | None, rows: int) -> DoesNotFitError:
    """Why nothing fits, and what rounds have to do with it."""
    tried = (
        f"{refused.what} ({refused.where.splitlines()[0] if refused.where else ''})"
        if refused is not None
        else f"not in up to {rows} rounds of the batch either"
        if rows > 1
        else "the batch has one row"
    )
    return DoesNotFitError(why.what, where=why.where, do=why.do, **why.facts, rounds=tried)
