"""Attention: cut by batch, by heads, by query rows, by value columns; keys stay whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lopsided.ir.placement import P, R
from lopsided.ops.op import Call, Local, Op, Talk, Written, accumulating, number, spec
from lopsided.ops.sample import Draw, Sample, sample


def attention(call: Call) -> Written:
    """`f[query, key] * value * f[mask]`; where heads share keys, whole groups or alike within every group."""
    q, k = call.shapes[0], call.shapes[1]
    rows = "T" if call.arg("is_causal") else "t"
    sizes: dict[str, int] = {}
    query_lead, key_lead = ["..."], ["..."]
    if len(q) == 4:
        heads, groups = q[1], k[1]
        shared = heads != groups and groups > 1
        query_lead, key_lead = (["b", "(g r)"], ["b", "g"]) if shared else (["b", "h"], ["b", "h"])
        sizes = {"g": groups, "r": heads // groups} if shared else {}
    query, key = spec([*query_lead, rows, "D"]), spec([*key_lead, "S", "D"])
    value, out = spec([*key_lead, "S", "e"]), spec([*query_lead, rows, "e"])
    line = f"f[{query}, {key}] * {value}"
    if len(call.operands) > 3:
        full = [*query_lead, rows, "S"]
        mask = full[-len(call.shapes[3]) :] if len(q) == 4 else ["...", rows, "S"]
        line += f" * f[{spec(mask)}]"
    return f"{line} -> {out}", sizes


def _weights(local: Local, rows_from: int) -> Tensor:
    """Attention weights of this device's query rows, dropped where dropout says so."""
    query, key = local.tensors[0], _repeated(local.tensors[1], local.tensors[0])
    scale = local.call.arg("scale")
    scores = accumulating(query @ key.transpose(-2, -1))
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else number(scale))
    if local.call.arg("is_causal"):
        scores = scores.masked_fill(~_causal(query, key, rows_from), -math.inf)
    if len(local.tensors) > 3:
        mask = local.tensors[3]
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # A row that may see nothing has weights of zero, as in torch's own kernels.
    weights, p = torch.ops.aten._safe_softmax.default(scores, -1), _dropout(local.call)
    if not p:
        return local.as_result(weights)
    # The mask belongs to scores, which are no result: drawn as (batch, heads, rows, keys), cut like rows.
    shape = (*local.call.node.results[0].shape[:-1], local.call.shapes[1][-2])
    give = local.rule.gives[0]
    drawn = local.random.uniform(local, shape, give if give.is_shard and give.dim < len(shape) - 1 else R)
    return local.as_result(weights * (drawn >= p).to(weights.dtype) / (1 - p))


def _attended(local: Local, rows_from: int) -> Tensor:
    value = local.as_result(_repeated(local.tensors[2], local.tensors[0]))
    return local.as_result(_weights(local, rows_from) @ value)


def _dropout(call: Call) -> float:
    return number(call.arg("dropout_p") or 0)


def _repeated(key: Tensor, query: Tensor) -> Tensor:
    """Keys or values, once per head that shares them."""
    if key.dim() < 3 or key.shape[-3] in (0, 1, query.shape[-3]):
        return key
    return key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)


def _causal(query: Tensor, key: Tensor, rows_from: int) -> Tensor:
    ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
    return ones.tril(diagonal=rows_from)


def attention_of_piece(local: Local) -> object:
    if not _dropout(local.call):
        return local.run()
    return _attended(local, 0)


def attention_rows(local: Local) -> object:
    """Query rows cut under a causal mask: the mask of row i starts where this device's rows do."""
    query, key = local.tensors[0], local.tensors[1]
    start = local.start(local.rule.needs[0])
    if not _dropout(local.call) and query.numel():
        return local.run(attn_mask=_causal(query, key, start), is_causal=False)
    return _attended(local, start)


def _attention_talks(call: Call) -> list[Talk]:
    if not call.arg("is_causal") or len(call.operands) > 3:
        return []
    return [Talk("T", "causal_rows", attention_rows, P, in_one_block=True)]


ATTENTION: dict[str, Op] = {
    "aten.scaled_dot_product_attention": Op(attention, local=attention_of_piece, talks=_attention_talks, random=True),
}


# Samples


def samples(draw: Draw) -> Iterator[Sample]:
    def attend(heads: int = 4, groups: int = 4, *mask: torch.Tensor, **kwargs: Any) -> Sample:
        q, k, v = draw.real(2, heads, 5, 6), draw.real(2, groups, 7, 6), draw.real(2, groups, 7, 3)
        return sample("aten.scaled_dot_product_attention.default", q, k, v, *mask, **kwargs)

    yield attend()
    yield attend(scale=0.3)
    yield attend(is_causal=True)
    yield attend(dropout_p=0.4)
    yield attend(dropout_p=0.4, is_causal=True)
    yield attend(4, 2, enable_gqa=True)
    yield attend(4, 2, enable_gqa=True, is_causal=True)
    yield attend(4, 1, enable_gqa=True)
    yield attend(4, 2, enable_gqa=True, dropout_p=0.4)
    keep = draw.truths(5, 7)
    keep[:, 0] = True
    yield attend(4, 4, keep)
    yield attend(4, 4, draw.real(2, 1, 5, 7))
    yield attend(4, 4, draw.constant(1, 4, 1, 7))
    yield attend(4, 2, draw.constant(4, 5, 7), enable_gqa=True)
    yield attend(4, 4, keep, dropout_p=0.4)
    unseen = keep.clone()
    unseen[1] = False
    yield attend(4, 4, unseen, dropout_p=0.4)
    rank3 = [draw.real(3, 5, 6), draw.real(3, 7, 6), draw.real(3, 7, 4)]
    yield sample("aten.scaled_dot_product_attention.default", *rank3)
    yield sample("aten.scaled_dot_product_attention.default", *rank3, draw.constant(5, 7))
    yield sample("aten.scaled_dot_product_attention.default", *rank3, is_causal=True)
