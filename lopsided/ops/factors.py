"""Sufficient factor broadcasting: the gradient of a whole weight from gathered factors.

In: an op and a rule `[sfb]`. Out: `ByFactors`, whose `gradients` asks for the factors and the gradients of the results,
and then computes the whole gradient of the `I` operands, the same on every device. Forward the op runs as ever.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lopsided.ir.notation import Rule
from lopsided.ir.op_call import surroundings
from lopsided.ir.placement import I
from lopsided.ops.local_kernel import KernelRandomness, LocalKernel
from lopsided.ops.op import Ask, Call


def wanted_by_factors(call: Call, rule: Rule) -> frozenset[int]:
    """The operands whose gradient comes from factors."""
    return frozenset(k for k, need in enumerate(rule.needs) if need == I and call.operands[k].grad)


class ByFactors:
    """One op under one `[sfb]` rule; `plain` is the rule it runs by, `beside` are the operands that the gradients
    are made of."""

    def __init__(
        self, call: Call, rule: Rule, beside: Iterable[int], random: KernelRandomness, device: torch.device
    ) -> None:
        self.call, self.rule, self.plain = call, rule, replace(rule, how="plain")
        self.wanted, self.beside = wanted_by_factors(call, rule), tuple(sorted(beside))
        self.random, self.device = random, device

    def held(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The operands as the op gets them: those whose gradient comes from factors get none through it."""
        return [t.detach() if need == I else t for need, t in zip(self.rule.needs, operands, strict=True)]

    def gradients(
        self, factors: Mapping[int, Tensor], of_results: Sequence[Tensor]
    ) -> Generator[Ask, Tensor, list[Tensor | None]]:
        """The whole gradients of the wanted operands, None for the others. `factors` are those `beside` them."""
        whole: dict[int, Tensor] = {}
        for k in self.beside:
            need, value = self.rule.needs[k], self.call.operands[k]
            at = f"factor {k} of %{self.call.node.name}"
            whole[k] = (yield Ask(factors[k], need, I, shape=value.shape, what=at)) if need.is_shard else factors[k]
        dy = []
        for give, value, gradient in zip(self.rule.gives, self.call.node.results, of_results, strict=True):
            at = f"gradient of %{value.name}"
            dy.append((yield Ask(gradient, give, I, shape=value.shape, what=at)) if give.is_shard else gradient)
        by_hand = _of_linear(self.call, whole, dy)
        found = by_hand if by_hand.keys() >= self.wanted else self._by_running(whole, dy)
        return [found.get(k) if k in self.wanted else None for k in range(len(self.call.operands))]

    def _by_running(self, whole: dict[int, Tensor], dy: Sequence[Tensor]) -> dict[int, Tensor | None]:
        """From the op on one device, with zeros for operands whose elements do not enter the gradient."""
        operands = [
            whole[k] if k in whole else torch.zeros(value.shape, dtype=value.torch_dtype, device=dy[0].device)
            for k, value in enumerate(self.call.operands)
        ]
        trained = [operands[k].requires_grad_() for k in sorted(self.wanted)]
        one_device = Rule((I,) * len(self.rule.needs), (I,) * len(self.rule.gives))
        kernel = LocalKernel(self.call, one_device, (1.0,), 0, self.random, self.device)
        with torch.enable_grad(), surroundings(self.call.node.context):
            gradients = torch.autograd.grad(kernel.run(operands), trained, dy, allow_unused=True)
        return dict(zip(sorted(self.wanted), gradients, strict=True))


def _of_linear(call: Call, whole: Mapping[int, Tensor], dy: Sequence[Tensor]) -> dict[int, Tensor | None]:
    """Weight and bias gradients of the op this is mostly used for, without running it forward again."""
    if call.node.op != "aten.linear.default" or 0 not in whole:
        return {}
    rows = dy[0].reshape(-1, dy[0].shape[-1])
    x = whole[0].reshape(-1, whole[0].shape[-1]).to(rows.dtype)
    found: dict[int, Tensor | None] = {1: (rows.t() @ x.conj()).to(call.operands[1].torch_dtype)}
    if len(call.operands) > 2:
        found[2] = rows.sum(0).to(call.operands[2].torch_dtype)
    return found
