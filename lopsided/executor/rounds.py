"""A step of several rounds: forward and backward of all but the last, and forward of the last.

In: an `Executor` of one round, what its leaves are in each, and the gradient that the loss is expected to get. Out:
`RoundsRan`: what every round made, and the sums of gradients (`RoundSums`) that the last round's backward pass takes
over.

A loss is the sum of its rounds' terms, so its gradient is theirs too: a round runs backward as soon as it has run
forward, by the gradient that the loss got in the step before, and only one round's activations are in memory. What the
loss then really gets multiplies the sums (`taken_over`): a loss scale that has changed, a loss divided by a number. Of
a scale that is a power of two this is exact to the last digit, of any other number as exact as its product.

Small gradients in float16 are lost unless they are scaled before they are made. As long as the scale is not known, in
the first step, rounds run for their values first, and all of them again going backward (`run_for_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lopsided.errors import TrainingError
from lopsided.executor.chunked import Unmade
from lopsided.executor.executor import Executor, Ran
from lopsided.executor.gradients import Gradients, RoundSums
from lopsided.executor.randomness import RankRandomness
from lopsided.ir.graph import Graph


@dataclass
class RoundsRan:
    """What the rounds made, in their order; of all but the last, without gradients."""

    rounds: list[Ran]
    upstream: Tensor  # by which those before the last went backward
    sums: RoundSums | None  # None once they were taken over
    again: Callable[[Tensor], RoundsRan] | None = None  # all rounds, where the gradient was not known

    @property
    def loss(self) -> Tensor:
        """The loss of the whole batch, without a gradient."""
        return _total([ran.loss.detach() for ran in self.rounds])

    @property
    def own(self) -> Tensor:
        """This device's own term of it."""
        return _total([ran.own for ran in self.rounds])

    def taken_over(self, gradients: Gradients, upstream: Tensor) -> None:
        """The last round goes backward now, by `upstream`: what those before it have made is scaled alike."""
        if self.sums is None:
            raise TrainingError(
                "backward() was called twice on a loss that was computed in rounds",
                do="call loss = pm(...) before each backward()",
            )
        sums, self.sums = self.sums, None
        factor = upstream.detach().reshape(()).to(torch.float64) / self.upstream.to(torch.float64)
        if upstream.device.type != "cpu" or float(factor) != 1:
            sums.multiply(factor)
        gradients.take_over(sums)


def detached(part: Tensor | Unmade) -> Tensor | Unmade:
    """An output without what led to it. One that is not made yet has nothing."""
    return part if isinstance(part, Unmade) else part.detach()


def is_narrow(graph: Graph) -> bool:
    """Whether gradients of a graph are made in float16."""
    return any(value.dtype == "f16" for value in graph.values.values()) or any(
        node.context.autocast.endswith(":f16") for node in graph.nodes
    )


def _total(terms: list[Tensor]) -> Tensor:
    wide = torch.stack([term.reshape(()) for term in terms])
    return wide.sum(dtype=torch.float64 if wide.dtype == torch.float64 else torch.float32).to(wide.dtype)


def run_rounds(
    executor: Executor,
    gradients: Gradients,
    parameters: Iterable[nn.Parameter],
    leaves: Callable[[int], Mapping[str, Tensor]],
    upstream: Tensor,
) -> RoundsRan:
    """The rounds of a step up to the backward pass of the last. `leaves` gives those of a round by its number."""
    count = executor.schedule.decisions.microbatches
    if count == 1:
        return RoundsRan([executor.run(leaves(0))], upstream, RoundSums())
    # Without a backward pass copies go after their use.
    kept: dict[int, Tensor] | None = {} if executor.schedule.keeps_copies and torch.is_grad_enabled() else None
    sums, done = RoundSums(), list[Ran]()
    with gradients.adding_to(sums, parameters):
        for number in range(count - 1):
            ran = executor.run(leaves(number), kept)
            if ran.loss.requires_grad:
                torch.autograd.backward([ran.loss], [upstream.to(ran.loss).expand_as(ran.loss)])
                gradients.round_ends()
            outputs = {name: detached(part) for name, part in ran.outputs.items()}
            done.append(replace(ran, loss=ran.loss.detach(), outputs=outputs))
    return RoundsRan([*done, executor.run(leaves(count - 1), kept)], upstream, sums)


def run_for_values(
    executor: Executor,
    gradients: Gradients,
    parameters: Iterable[nn.Parameter],
    leaves: Callable[[int], Mapping[str, Tensor]],
) -> RoundsRan:
    """The rounds of a step without gradients, to be run again when it is known what the loss gets."""
    random, trained = executor.random, list(parameters)
    before = random.state() if isinstance(random, RankRandomness) else None
    with torch.no_grad():
        done = [executor.run(leaves(number)) for number in range(executor.schedule.decisions.microbatches)]

    def again(upstream: Tensor) -> RoundsRan:
        after = random.state() if isinstance(random, RankRandomness) else None
        if isinstance(random, RankRandomness) and before is not None:
            random.set_state(before)
        try:
            with torch.enable_grad():
                return run_rounds(executor, gradients, trained, leaves, upstream)
        finally:
            if isinstance(random, RankRandomness) and after is not None:
                random.set_state(after)

    return RoundsRan(done, torch.ones(()), RoundSums(), again)
