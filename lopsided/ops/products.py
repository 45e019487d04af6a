"""Products: linear in each operand, so partial sums pass through and sufficient factor broadcasting applies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lopsided.ops.op import Call, Local, Op, Talk, Written, letters, number, spec
from lopsided.placement import P


def matmul(call: Call) -> str:
    first, second = (len(shape) for shape in call.shapes)
    left = "i" if first == 1 else "... m i"
    right = "i" if second == 1 else "... i n"
    out = " ".join([*(["..."] if max(first, second) > 1 else []), *(["m"] if first > 1 else []), *(["n"] if second > 1 else [])])
    # One operand is a vector, the other a matrix without leading dims: nothing for '...' to stand for is no harm.
    return f"{left} * {right} -> {out or '()'}"


def einsum(call: Call) -> str:
    equation = str(call.arg("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        used = [c for c in sorted(set(left)) if c.isalpha() and left.count(c) == 1]
        right = ("..." if "..." in left else "") + "".join(used)
    if any(len(set(t.replace("...", ""))) != len(t.replace("...", "")) for t in (*terms, right)):
        # A letter twice in one operand takes a diagonal.
        ins = [spec([f"{c}{k}" for c in letters(len(s), range(len(s)))]) for k, s in enumerate(call.shapes)]
        return f"{' * '.join(ins)} -> {spec([f'{c}99' for c in letters(len(call.results[0]), range(len(call.results[0])))])}"
    return f"{' * '.join(map(_einsum_spec, terms))} -> {_einsum_spec(right)}"


def _einsum_spec(term: str) -> str:
    # Einsum tells letters by case; here the case has a meaning, so capitals become numbered letters.
    out = []
    for part in term.replace("...", ".").strip():
        out.append("..." if part == "." else part if part.islower() else f"{part.lower()}1")
    return spec(out)


def _spatial(rank: int, capital: str) -> str:
    return " ".join(f"{capital}{k}" for k in range(rank))


def convolution(call: Call) -> Written:
    """`n (g i) space * (g o) i window + (g o) -> n (g o) space`; transposed ones keep weights as `(g i) o window`."""
    x, weight = call.shapes[0], call.shapes[1]
    rank = len(weight) - 2
    groups = int(call.arg("groups"))
    batch = "n " if len(x) == rank + 2 else ""
    transposed = "transpose" in call.node.op or bool(call.arg("transposed"))
    g_in, g_out = ("(g i)", "(g o)") if groups > 1 else ("i", "o")
    kernel = f"{g_in} o {_spatial(rank, 'K')}" if transposed else f"{g_out} i {_spatial(rank, 'K')}"
    line = f"{batch}{g_in} {_spatial(rank, 'X')} * {kernel} + {g_out} -> {batch}{g_out} {_spatial(rank, 'Y')}"
    channels = x[-rank - 1]
    outputs = weight[1] if transposed else weight[0] // groups
    return line, {"g": groups, "i": channels // groups, "o": outputs} if groups > 1 else {}


def convolution_of_piece(local: Local) -> object:
    x, weight = local.tensors[0], local.tensors[1]
    rank = weight.dim() - 2
    channels = x.shape[-rank - 1]
    if not channels or not weight.shape[1]:
        # Kernels refuse a convolution over no channels; as a term of a sum it is the bias alone.
        out = x.new_zeros(local.shapes[0], dtype=local.call.node.results[0].torch_dtype) + 0 * (x.sum() + weight.sum())
        return out + local.tensors[2].reshape(-1, *[1] * rank) if len(local.tensors) > 2 else out
    whole_groups = int(local.call.arg("groups"))
    transposed = "transpose" in local.call.node.op or bool(local.call.arg("transposed"))
    if whole_groups == 1:
        return local.run()
    out_channels = local.shapes[0][-rank - 1]
    if transposed:
        groups = out_channels // weight.shape[1]
    else:
        groups = channels // weight.shape[1]
    return local.run(groups=groups)


# Attention


def attention(call: Call) -> Written:
    """`f[query, key] * value * f[mask]`, cut by batch, by heads (whole groups where heads share keys), by query rows."""
    q, k = call.shapes[0], call.shapes[1]
    lead = ["..."] if len(q) != 4 else ["b"]
    heads, groups = q[-3] if len(q) > 2 else 1, k[-3] if len(k) > 2 else 1
    sizes: dict[str, int] = {}
    rows = "T" if call.arg("is_causal") else "t"
    if len(q) != 4:
        ends = ("... {} D", "... S D", "... S e", "... {} e")
        query, key, value, out = (end.format(rows) for end in ends)
        full = ["...", rows, "S"]
    else:
        if heads != groups and groups > 1:
            query_heads, key_heads = "(g r)", "g"
            sizes = {"g": groups, "r": heads // groups}
        else:
            query_heads, key_heads = "h", "h"
        query, out = f"b {query_heads} {rows} D", f"b {query_heads} {rows} e"
        key, value = f"b {key_heads} S D", f"b {key_heads} S e"
        full = [*lead, query_heads, rows, "S"]
    line = f"f[{query}, {key}] * {value}"
    if len(call.operands) > 3:
        mask = len(call.shapes[3])
        line += f" * f[{spec(full[-mask:]) if len(q) == 4 else f'... {rows} S'}]"
    return f"{line} -> {out}", sizes


def _scores(local: Local, rows_from: int) -> Tensor:
    """Attention weights of this device's query rows before dropout, as the plain kernel computes them."""
    query, key = local.tensors[0], local.tensors[1]
    scale = local.call.arg("scale")
    key = _repeated(key, query)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else number(scale))
    if local.call.arg("is_causal"):
        scores = scores.masked_fill(~_causal(query, key, rows_from), -math.inf)
    if len(local.tensors) > 3:
        mask = local.tensors[3]
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def _repeated(key: Tensor, query: Tensor) -> Tensor:
    if key.dim() < 3 or key.shape[-3] in (1, query.shape[-3]) or not key.shape[-3]:
        return key
    return key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)


def _causal(query: Tensor, key: Tensor, rows_from: int) -> Tensor:
    ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
    return ones.tril(diagonal=rows_from)


def attention_of_piece(local: Local) -> object:
    p = number(local.call.arg("dropout_p") or 0)
    if p == 0:
        return local.run()
    weights = _scores(local, 0)
    # The mask belongs to scores, which are no result: drawn whole as (batch, heads, rows, keys) and cut like the rows.
    shape = (*local.call.node.results[0].shape[:-1], local.call.shapes[1][-2])
    give = local.rule.gives[0]
    along_scores = give.is_shard and give.dim < len(shape) - 1
    drawn = local.random.uniform(local, shape, give if along_scores else P)
    return (weights * (drawn >= p).to(weights.dtype) / (1 - p)) @ _repeated(local.tensors[2], local.tensors[0])


def attention_rows(local: Local) -> object:
    """Query rows cut under a causal mask: the mask of row i starts where this device's rows do."""
    query, key = local.tensors[0], local.tensors[1]
    start = local.start(local.rule.needs[0])
    p = number(local.call.arg("dropout_p") or 0)
    if p == 0 and query.numel():
        mask = _causal(query, key, start)
        return local.run(attn_mask=mask, is_causal=False)
    weights = _scores(local, start)
    if p:
        shape = (*local.call.node.results[0].shape[:-1], local.call.shapes[1][-2])
        weights = weights * (local.random.uniform(local, shape, local.rule.gives[0]) >= p).to(weights.dtype) / (1 - p)
    return weights @ _repeated(local.tensors[2], query)


def _attention_talks(call: Call) -> list[Talk]:
    if not call.arg("is_causal") or len(call.operands) > 3:
        return []
    return [Talk("T", "causal_rows", attention_rows, P, in_one_block=True)]


# Recurrent layers


def recurrent(call: Call) -> str:
    """LSTM, GRU and RNN over padded batches: only the batch may be cut."""
    x, results = call.shapes[0], call.results
    first = bool(call.arg("batch_first"))
    sequence = ("n X0 X1" if first else "X0 n X1") if len(x) == 3 else "X0 X1"
    state = "L n H" if len(x) == 3 else "L H"
    states = sum(len(shape) == len(results[1]) and shape[0] == results[1][0] for shape in call.shapes[1:3])
    hidden = [f"L n H{k}" if len(x) == 3 else f"L H{k}" for k in range(len(results) - 1)]
    weights = [spec([f"{c}{k + 10}" for c in letters(len(s), range(len(s)))]) for k, s in enumerate(call.shapes[1 + len(hidden) :])]
    out = sequence.replace("X1", "Y1")
    del state, states
    return f"f[{', '.join([sequence, *hidden, *weights])}] -> {', '.join([out, *hidden])}"


def grouped_mm(call: Call) -> Written:
    """Tokens sorted by expert times a stack of matrices: the token groups are data, so only columns may be cut."""
    if len(call.shapes[0]) == 2 and len(call.shapes[1]) == 3:
        return "T i * E i n * f[E] -> T n"
    return " * ".join(
        spec([f"{c}{k}" for c in letters(len(s), range(len(s)))]) if k < 2 else "f[Z9]" for k, s in enumerate(call.shapes)
    ) + f" -> {spec([f'{c}99' for c in letters(len(call.results[0]), range(len(call.results[0])))])}"


_ATTENTION: dict[str, Any] = {"local": attention_of_piece, "talks": _attention_talks, "random": True}

PRODUCTS: dict[str, Op] = {
    "aten.linear": Op("... i * o i + o -> ... o"),
    "aten.matmul": Op(matmul),
    "aten.mm": Op("m i * i n -> m n"),
    "aten.bmm": Op("b m i * b i n -> b m n"),
    "aten.mv": Op("m i * i -> m"),
    "aten.dot": Op("i * i -> ()"),
    "aten.vdot": Op("i * i -> ()"),
    "aten.outer": Op("m * n -> m n"),
    "aten.ger": Op("m * n -> m n"),
    "aten.addmm": Op(lambda call: f"{_broadcast(call, 'm n')} + m i * i n -> m n"),
    "aten.addmv": Op(lambda call: f"{_broadcast(call, 'm')} + m i * i -> m"),
    "aten.baddbmm": Op(lambda call: f"{_broadcast(call, 'b m n')} + b m i * b i n -> b m n"),
    "aten.addbmm": Op(lambda call: f"{_broadcast(call, 'm n')} + b m i * b i n -> m n"),
    "aten.bilinear": Op("... i * ... j * o i j + o -> ... o"),
    "aten.einsum": Op(einsum),
    **{f"aten.conv{d}d": Op(convolution, local=convolution_of_piece) for d in (1, 2, 3)},
    **{f"aten.conv_transpose{d}d": Op(convolution, local=convolution_of_piece) for d in (1, 2, 3)},
    "aten.convolution": Op(convolution, local=convolution_of_piece),
    "aten.scaled_dot_product_attention": Op(attention, **_ATTENTION),
    "aten.lstm": Op(recurrent),
    "aten.gru": Op(recurrent),
    "aten.rnn_tanh": Op(recurrent),
    "aten.rnn_relu": Op(recurrent),
    "aten._grouped_mm": Op(grouped_mm),
}


def _broadcast(call: Call, names: str) -> str:
    rank = len(call.shapes[0])
    return spec(names.split()[-rank:]) if rank else "()"
