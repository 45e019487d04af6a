"""Sufficient factor broadcasting for real: the gradient of a whole weight from gathered factors.

In: an op, a rule `[sfb]`, this device's tensors. Out: this device's results; going backward, the factors and the
gradients of the results are gathered, and every device computes the whole gradient of the `I` operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lopsided.comm.communicator import Label
from lopsided.comm.redistribute import Redistributor
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import surroundings
from lopsided.ir.placement import I
from lopsided.ops.op import Call
from lopsided.schedule.cost import factors_beside

Results = list[Tensor]
RunRule = Callable[[Call, Rule, Sequence[Tensor]], Results]


class ByFactors:
    """One op under one `[sfb]` rule. `run` computes a rule on this device's tensors."""

    def __init__(self, call: Call, rule: Rule, exchange: Redistributor, run: RunRule) -> None:
        self.call, self.rule, self.exchange, self.run = call, rule, exchange, run
        self.plain = replace(rule, how="plain")
        self.wanted = [k for k, need in enumerate(rule.needs) if need == I and call.operands[k].grad]
        self.beside = tuple(sorted(factors_beside(call, frozenset(self.wanted))))

    def __call__(self, operands: Sequence[Tensor]) -> Results:
        held = [t.detach() if need == I else t for need, t in zip(self.rule.needs, operands, strict=True)]
        results = self.run(self.call, self.plain, held)
        if not torch.is_grad_enabled() or not any(operands[k].requires_grad for k in self.wanted):
            return results
        return list(_ByFactors.apply(self, len(results), *results, *operands))  # type: ignore[no-untyped-call]

    def gradients(self, factors: Mapping[int, Tensor], of_results: Sequence[Tensor]) -> list[Tensor | None]:
        """The whole gradients of the wanted operands, None for the others. `factors` are those `beside` them."""
        name, gather = self.call.node.name, self.exchange.move
        whole: dict[int, Tensor] = {}
        for k in self.beside:
            need, value = self.rule.needs[k], self.call.operands[k]
            at = Label(f"factor {k} of %{name}", f"∂{name}")
            whole[k] = gather(factors[k], need, I, value.shape, at) if need.is_shard else factors[k]
        dy = []
        for give, value, gradient in zip(self.rule.gives, self.call.node.results, of_results, strict=True):
            at = Label(f"gradient of %{value.name}", f"∂{name}")
            dy.append(gather(gradient, give, I, value.shape, at) if give.is_shard else gradient)
        found: list[Tensor | None] = [None] * len(self.call.operands)
        if (by_hand := _of_linear(self.call, whole, dy)).keys() >= {*self.wanted}:
            for k in self.wanted:
                found[k] = by_hand[k]
            return found
        for k, value in enumerate(self.call.operands):
            if k not in whole:  # its elements do not enter the gradient
                whole[k] = torch.zeros(value.shape, dtype=value.torch_dtype, device=dy[0].device)
        for k in self.wanted:
            whole[k].requires_grad_()
        one_device = Rule((I,) * len(self.rule.needs), (I,) * len(self.rule.gives))
        with torch.enable_grad(), surroundings(self.call.node.context):
            made = self.run(self.call, one_device, [whole[k] for k in range(len(whole))])
            gradients = torch.autograd.grad(made, [whole[k] for k in self.wanted], dy, allow_unused=True)
        for k, gradient in zip(self.wanted, gradients, strict=True):
            found[k] = gradient
        return found


def _of_linear(call: Call, whole: Mapping[int, Tensor], dy: Sequence[Tensor]) -> dict[int, Tensor]:
    """Weight and bias gradients of the op this is mostly used for, without running it forward again."""
    if call.node.op != "aten.linear.default" or 0 not in whole:
        return {}
    rows = dy[0].reshape(-1, dy[0].shape[-1])
    x = whole[0].reshape(-1, whole[0].shape[-1]).to(rows.dtype)
    found = {1: (rows.t() @ x).to(call.operands[1].torch_dtype)}
    if len(call.operands) > 2:
        found[2] = rows.sum(0).to(call.operands[2].torch_dtype)
    return found


class _ByFactors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, by_factors: ByFactors, results: int, *tensors: Tensor) -> Any:
        ctx.by_factors = by_factors
        ctx.save_for_backward(*(tensors[results + k] for k in by_factors.beside))
        return tuple(result.view_as(result) for result in tensors[:results])

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor) -> Any:
        factors = zip(ctx.by_factors.beside, ctx.saved_tensors, strict=True)
        found = ctx.by_factors.gradients({k: factor.detach() for k, factor in factors}, of_results)
        # The other operands get theirs through the results, as ever.
        return (None, None, *of_results, *found)
