"""What the backward pass of every node keeps, found by running the graph's ops on fake tensors.

In: a `Graph`. Out: the same graph with `Node.saved` and `Value.grad` filled in. Ops run one at a time on tensors that
have shapes but no memory, with hooks on what autograd packs; equal calls are run once, so depth costs nothing.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lopsided.ir.graph import Context, Graph, Node, Saved, Value, signature
from lopsided.ir.op_call import call_op, surroundings


@dataclass(frozen=True, slots=True)
class _Kept:
    """What one call keeps, in terms of its operands and results by position; and which results have a gradient."""

    operands: tuple[int, ...]
    results: tuple[int, ...]
    extra_bytes: int
    grads: tuple[bool, ...]


def record_saved(graph: Graph) -> Graph:
    """The graph with gradients and saved tensors filled in."""
    values = {leaf.value.name: leaf.value for leaf in graph.leaves}
    known: dict[object, _Kept] = {}
    nodes = []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for node in graph.nodes:
            operands = [values[name] for name in node.operands]
            key = signature(node, values)
            if key not in known:
                known[key] = _run(node, operands)
            kept = known[key]
            results = tuple(replace(v, grad=g) for v, g in zip(node.results, kept.grads, strict=True))
            names = [operands[k].name for k in kept.operands] + [results[k].name for k in kept.results]
            saved = Saved(tuple(dict.fromkeys(names)), kept.extra_bytes)
            nodes.append(replace(node, results=results, saved=saved))
            values.update((value.name, value) for value in results)
    return Graph(graph.leaves, tuple(nodes), graph.loss, graph.updates)


def _run(node: Node, operands: list[Value]) -> _Kept:
    # Fake tensors live on the CPU whatever the model is on: its attention kernel keeps what flash attention keeps
    # elsewhere, while a `meta` tensor would choose the plain one and keep the whole score matrix.
    fakes = [torch.empty(v.shape, dtype=v.torch_dtype, requires_grad=v.grad) for v in operands]
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with surroundings(on_the_host(node.context)), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = call_op(node, fakes, torch.device("cpu"))
    results = list(made) if isinstance(made, tuple | list) else [made]
    given = {_memory(fake): k for k, fake in reversed(list(enumerate(fakes)))}
    produced = {_memory(result): k for k, result in reversed(list(enumerate(results)))}
    from_operands, from_results, extra = set(), set(), {}
    for tensor in packed:
        memory = _memory(tensor)
        if memory in given:
            from_operands.add(given[memory])
        elif memory in produced:
            from_results.add(produced[memory])
        else:
            extra[memory] = tensor.untyped_storage().nbytes()
    grads = tuple(bool(result.requires_grad) for result in results)
    return _Kept(tuple(sorted(from_operands)), tuple(sorted(from_results)), sum(extra.values()), grads)


def on_the_host(context: Context) -> Context:
    """The same with the processor's autocast in place of another device's, which would leave its tensors alone."""
    _, colon, dtype = context.autocast.partition(":")
    return replace(context, autocast=f"cpu{colon}{dtype}") if colon else context


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
