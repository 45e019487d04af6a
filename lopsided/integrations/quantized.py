"""Frozen weights in four or eight bits: what QLoRA trains beside.

In: a model whose large weights are frozen, such as one that PEFT has given adapters. Out: the same model, where every
frozen `nn.Linear` holds its weight as codes with a scale for each block of 64 elements, and makes it anew when it is
used. That is ordinary PyTorch: codes and scales are frozen parameters, which the planner stores at their size, cuts,
and sends as bytes where a weight must be gathered.

    nf4     the 16 values of NormalFloat (QLoRA, arXiv:2305.14314, appendix E), two codes a byte: 4.5 bits an element
    int8    a linear scale: 8.5 bits an element

Going backward the weight is needed again. Under `gradient_checkpointing_enable`, which QLoRA is used with, it is made
again; without, it is kept from forward to backward as the weight it stands for would be.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lopsided.errors import InputError

Form = Literal["nf4", "int8"]
BLOCK = 64

# Quantiles of a normal distribution, zero among them, scaled to [-1, 1].
NF4: tuple[float, ...] = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635)
NF4 += (-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725)
NF4 += (0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


class QuantizedLinear(nn.Module):
    """A linear layer whose frozen weight is kept as codes. Made by `quantize_frozen`."""

    table: Tensor  # the values of the codes

    def __init__(self, linear: nn.Linear, form: Form) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.form, self.dtype = form, weight.dtype
        scales, codes = _quantized(weight, form)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias
        if form == "nf4":
            self.register_buffer("table", torch.tensor(NF4, dtype=self.dtype, device=codes.device), persistent=False)
        self.training = linear.training

    @property
    def weight(self) -> Tensor:
        """The weight itself, made of its codes."""
        blocks = (self.out_features, self.in_features // BLOCK, BLOCK)
        if self.form == "int8":
            values = self.codes.to(self.dtype)
        else:
            pairs = torch.stack((self.codes & 15, self.codes >> 4), dim=-1)
            values = self.table[pairs.flatten(1).int()]
        return (values.reshape(blocks) * self.scales.unsqueeze(-1)).reshape(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, form={self.form}"


def _quantized(weight: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows, columns // BLOCK, BLOCK)
    largest = blocks.abs().amax(-1)
    if form == "int8":
        scales = largest / 127
        codes = (blocks / scales.clamp(min=1e-30).unsqueeze(-1)).round().to(torch.int8).reshape(rows, columns)
        return scales.to(weight.dtype), codes
    # A code for every value between two of the table.
    table = torch.tensor(NF4, device=weight.device)
    ends = (table[1:] + table[:-1]) / 2
    found = torch.bucketize(blocks / largest.clamp(min=1e-30).unsqueeze(-1), ends).to(torch.uint8)
    pairs = found.reshape(rows, columns // 2, 2)
    return largest.to(weight.dtype), pairs[..., 0] | (pairs[..., 1] << 4)


def quantize_frozen(model: nn.Module, form: Form = "nf4") -> nn.Module:
    """Replace every frozen `nn.Linear` of the model by one that holds codes; returns the model.

    Before `parallelize`, and after adapters were added. Trained layers stay, and so do weights that several modules
    share, the output of a model of `transformers`, and rows that are no whole number of blocks.
    """
    if form not in ("nf4", "int8"):
        raise InputError(f"there is no form {form!r}", where="quantize_frozen", do="choose nf4 or int8")
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    output = getattr(model, "get_output_embeddings", lambda: None)()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child is not output and _can_be_replaced(child, holders):
                setattr(module, name, QuantizedLinear(child, form))
    return model


def _can_be_replaced(linear: nn.Linear, holders: dict[int, int]) -> bool:
    is_frozen = not any(parameter.requires_grad for parameter in linear.parameters())
    return is_frozen and holders[id(linear.weight)] == 1 and not linear.in_features % BLOCK
