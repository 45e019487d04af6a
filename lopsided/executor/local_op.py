"""One op as the executor runs it: a `LocalKernel` whose questions are answered by collectives.

In: a `Call`, a `Rule`, a `Redistributor`, random numbers. Out: `LocalOp`, whose `run` maps this device's operands to
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lopsided.comm.communicator import Label
from lopsided.comm.redistribute import Redistributor
from lopsided.executor.randomness import RankRandomness
from lopsided.ir.notation import Rule
from lopsided.ops.local_kernel import ByFactors, LocalKernel, Operands, RunOp, answered, wanted_by_factors
from lopsided.ops.op import Ask, Call, connected
from lopsided.ops.simulated_devices import SeededRandomness
from lopsided.schedule.cost import factors_beside

__all__ = ["AnyRandomness", "LocalOp", "RunOp", "connected"]

AnyRandomness = RankRandomness | SeededRandomness


class LocalOp:
    """One op by one rule, prepared: what can be settled before the run is settled here."""

    def __init__(
        self, call: Call, rule: Rule, exchange: Redistributor, random: AnyRandomness, device: torch.device
    ) -> None:
        self.exchange, self.name = exchange, call.node.name
        self.what = f"%{call.node.name} [{rule.how}]"  # is asked
        self.kernel: LocalKernel | None = None  # that does it all without the other devices
        if rule.how == "sfb":
            beside = factors_beside(call, wanted_by_factors(call, rule))
            self.run: RunOp = self._with_factors(ByFactors(call, rule, beside, random, device))
            return
        kernel = LocalKernel(call, rule, exchange.shares, exchange.rank, random, device)
        self.run = kernel.run
        if kernel.talks:
            self.run = lambda operands: answered(kernel.talk(operands), self.answer)
        else:
            self.kernel = kernel

    def _with_factors(self, by_factors: ByFactors) -> RunOp:
        call, plain, exchange = by_factors.call, by_factors.plain, self.exchange
        kernel = LocalKernel(call, plain, exchange.shares, exchange.rank, by_factors.random, by_factors.device)

        def run(operands: Operands) -> list[Tensor]:
            results = kernel.run(by_factors.held(operands))
            if not torch.is_grad_enabled() or not any(operands[k].requires_grad for k in by_factors.wanted):
                return results
            return list(_WithFactors.apply(self, by_factors, len(results), *results, *operands))  # type: ignore[no-untyped-call]

        return run

    def answer(self, ask: Ask) -> Tensor:
        """What the others say. Questions of a backward pass have words of their own."""
        what = Label(ask.what or self.what, f"∂{self.name}" if ask.what else self.name)
        if ask.largest:
            peak = ask.tensor.detach().clone(memory_format=torch.contiguous_format)
            self.exchange.communicator.maximum(peak.view(-1), what=what).wait()
            return peak
        shape = tuple(ask.tensor.shape) if ask.shape is None else ask.shape
        back = Label(f"gradient of {what}", f"∂{self.name}")
        return self.exchange.convert(ask.tensor, ask.source, ask.to, shape, what, back)


class _WithFactors(torch.autograd.Function):
    """The results as they are; going backward, the factors are gathered and the wanted gradients computed."""

    @staticmethod
    def forward(ctx: Any, op: LocalOp, by_factors: ByFactors, results: int, *tensors: Tensor) -> Any:
        ctx.about = (op, by_factors)
        ctx.save_for_backward(*(tensors[results + k] for k in by_factors.beside))
        return tuple(result.view_as(result) for result in tensors[:results])

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor) -> Any:
        op, by_factors = ctx.about
        factors = zip(by_factors.beside, ctx.saved_tensors, strict=True)
        talking = by_factors.gradients({k: factor.detach() for k, factor in factors}, of_results)
        found: Sequence[Tensor | None] = answered(talking, op.answer)
        # The other operands get theirs through the results, as ever.
        return (None, None, None, *of_results, *found)
