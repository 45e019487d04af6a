"""Losses over many classes, some rows at a time: logits are never there all at once.

In: a `Graph`, and for `chunks_of` a `Program` with decisions. Out: `LossHead`s, what of a graph may run so, and those
of them that do.

The one idea: a cross-entropy adds up over rows, and so does the product before it going backward. So some rows are
multiplied, their loss and its gradient are taken, and the gradient is multiplied on, to that of the rows and that of
the matrix, before the next rows begin. Of the logits, and of what a loss makes of them, one chunk is there; nothing is
computed twice. What is kept are the two gradients, which the backward pass would have begun with anyway; it multiplies
them by the gradient of the loss.

    product     `linear`, or a product with a matrix                       rows × features → rows × classes
    between     shifted rows, views of rows, casts, elementwise functions  of logits alone
    loss        cross-entropy by class numbers, a mean or a sum            of rows × classes

The rows of a device may be all or a part of them. Where the classes are cut, each device has a part of the logits only,
and the head runs as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lopsided.errors import ProgramError
from lopsided.ir.graph import Graph, Node, reruns
from lopsided.ir.program import Program, Step
from lopsided.ops.op import Call
from lopsided.schedule.decisions import Decisions, Rerun

CHUNK_ELEMENTS = 2**26
"""Logits in a chunk, about: 256 MiB of them in float32. More rows keep a GPU no busier; with fewer, adding up the
gradient of the matrix once a chunk begins to count."""

LINEAR = "aten.linear.default"
PRODUCTS = (LINEAR, "aten.matmul.default", "aten.mm.default")
SHIFTS = ("aten.slice.Tensor",)
RESHAPES = ("aten.view.default", "aten.reshape.default", "aten.flatten.using_ints", "aten._unsafe_view.default")
VIEWS = (*RESHAPES, "aten.contiguous.default", "aten.clone.default")
CASTS = ("aten.to.dtype", "aten.to.dtype_layout", "aten._to_copy.default")
_LOSS = "aten.cross_entropy_loss.default"
_NO_REDUCTION = 0


@dataclass(frozen=True, slots=True)
class LossHead:
    """A product, what is made of its result alone, and the loss of that: the nodes that logits pass, in order."""

    nodes: tuple[str, ...]
    rows: int  # of logits
    classes: int

    @property
    def first(self) -> str:
        return self.nodes[0]

    @property
    def last(self) -> str:
        return self.nodes[-1]

    def chunked(self, rows: int = 0) -> Rerun:
        """The decision to run it so many rows at a time: as many as `CHUNK_ELEMENTS` asks for, unless said."""
        usual = 1 << max(CHUNK_ELEMENTS // self.classes, 1).bit_length() - 1
        return Rerun(self.first, self.last, "chunked", rows=rows or usual)


def loss_heads(graph: Graph) -> tuple[LossHead, ...]:
    """What may run some rows at a time, in the order of the graph."""
    makers = {value.name: node for node in graph.nodes for value in node.results}
    uses: dict[str, int] = {}
    for name in (*(name for node in graph.nodes for name in node.operands), *(name for _, name in graph.updates)):
        uses[name] = uses.get(name, 0) + 1
    own = reruns(graph)
    found = (_head(graph, node, makers, uses) for node in graph.nodes if node.op == _LOSS)
    return tuple(head for head in found if head is not None and not any(name in own for name in head.nodes))


def _head(graph: Graph, loss: Node, makers: Mapping[str, Node], uses: Mapping[str, int]) -> LossHead | None:
    """The head that ends with a loss, if it is of a form that may be chunked."""
    call = Call.of(loss, graph.values)
    shape = call.shapes[0]
    by_number = len(call.operands) == 2 and not call.operands[1].torch_dtype.is_floating_point
    if not by_number or len(shape) != 2 or call.arg("reduction") == _NO_REDUCTION or not loss.results[0].grad:
        return None
    nodes, name = [loss], loss.operands[0]
    while True:
        node = makers.get(name)
        if node is None or uses[name] != 1 or name == graph.loss or len(node.results) != 1 or not node.results[0].grad:
            return None
        nodes.append(node)
        if node.op in PRODUCTS:
            break
        if not _is_between(graph, node):
            return None
        name = node.operands[0]
    nodes.reverse()
    product, *between = nodes[:-1]
    matrix = graph.values[product.operands[1]].shape
    # Rows are picked before they are put in a row: then they may be picked of what is multiplied.
    picks = [node.op in SHIFTS for node in between]
    reshaped = next((k for k, node in enumerate(between) if node.op in RESHAPES), len(between))
    if len(matrix) != 2 or any(picks[reshaped:]) or product.results[0].shape[-1] != shape[1]:
        return None
    return LossHead(tuple(node.name for node in nodes), *shape)


def _is_between(graph: Graph, node: Node) -> bool:
    """Whether a node treats every row of logits by itself, and nothing else."""
    if len(node.operands) != 1:
        return False
    before, after = graph.values[node.operands[0]].shape, node.results[0].shape
    if not before or not after or before[-1] != after[-1]:
        return False
    if node.op in SHIFTS:
        call = Call(node, (graph.values[node.operands[0]],))
        dim = call.arg("dim")
        return isinstance(dim, int) and 0 <= dim < len(before) - 1 and call.arg("step") in (None, 1)
    if node.op in VIEWS:
        return graph.values[node.operands[0]].elements == node.results[0].elements
    return before == after and (node.op in CASTS or node.op in _ELEMENTWISE)


_ELEMENTWISE = tuple(
    f"aten.{name}"
    for name in ("mul.Tensor", "div.Tensor", "mul.Scalar", "div.Scalar", "tanh.default", "neg.default", "clamp.default")
)
"""What models do to logits, with numbers."""


def head_of(graph: Graph, rerun: Rerun) -> LossHead:
    """The head that a decision names."""
    found = next((h for h in loss_heads(graph) if (h.first, h.last) == (rerun.first, rerun.last)), None)
    if found is None:
        raise ProgramError(
            f"{rerun.first[:60]!r} to {rerun.last[:60]!r} is no loss that can run some rows at a time",
            where=f"region {str(rerun)[:200]}",
            do="name a product, and the cross-entropy that alone uses its result",
        )
    return found


def chunks_of(program: Program, decisions: Decisions) -> tuple[tuple[LossHead, int], ...]:
    """The heads that run some rows at a time in this program, and how many."""
    steps: dict[str, Step] = {}
    found = []
    for rerun in decisions.reruns:
        if rerun.level == "chunked":
            steps = steps or {step.node.name: step for step in program.steps}
            head = head_of(program.graph, rerun)
            if _rows_alone([steps[name] for name in head.nodes]):
                found.append((head, rerun.rows))
    return tuple(found)


def _rows_alone(steps: Sequence[Step]) -> bool:
    """Whether a device has whole rows of logits, and nobody else needs to know what becomes of them."""
    product, *between, loss = steps
    if any(step.rule.how != "plain" for step in (product, *between)) or loss.rule.how not in ("plain", "mean_of_rows"):
        return False
    if any(len(step.chains[0]) > 1 for step in (*between, loss)):
        return False
    placed = [product.rule.gives[0], *(step.rule.gives[0] for step in between)]
    whole = all(placement.is_whole for placement in placed)
    return (whole or all(p.is_shard for p in placed)) and product.rule.needs[1].is_whole
