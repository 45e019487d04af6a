"""The global batch in k rounds: the graph of one round, made from the graph of the whole batch.

In: a `Graph` of the whole batch, and k. Out: `Rounds`: a graph with a k-th of the batch whose losses and gradients,
added up over the rounds, are those of the whole batch; or a refusal in words.

The one idea: rounds are an axis like devices, and every op's rules say already what a cut along it means. A value is

    invariant (I)    the same in every round: parameters, tables, what depends on nothing that varies
    cut (S)          the rows of the round
    partial (P)      a term: the sum over the rounds is the value

The inputs are cut, every node runs by a rule that takes its operands as they are, and the loss has to end as a term.
Rounds do not talk while they run, so rules that talk are no rules here. Two conversions are left:

    I → P            a k-th of the value in every round                               `_Cutter._part_of`
    anything of inputs alone, as whole or cut as it is wanted: computed before the rounds, of the whole batch, and
    given to each as a leaf (`precomputed`)                                           `_Cutter._ahead`

So a mean over rows that count is its sum in the round, divided by the count of the whole batch. What couples the rows
of the batch otherwise (batch norm in training, losses that compare rows) has no rounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lopsided.capturing.saved_tensors import record_saved
from lopsided.errors import InputError
from lopsided.ir.graph import DTYPE_NAMES, Arg, Atom, Graph, Leaf, Node, Ref, Saved, Value, signature
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import aten_overload, call_op, listed, surroundings
from lopsided.ir.placement import I, P, Placement, join_pieces, take_piece
from lopsided.ir.program import whole_rule
from lopsided.ops import describe
from lopsided.ops.derive import derive_rules
from lopsided.ops.losses import elementwise_of_piece, rowwise_of_piece
from lopsided.ops.norms import group_norm_of_piece
from lopsided.ops.op import Call
from lopsided.ops.parts import part_of_piece, parts_of_piece, repeat_interleave_of_piece
from lopsided.ops.products import convolution_of_piece
from lopsided.ops.reduce import mean_of_piece
from lopsided.ops.views import expand_to_local_shape, new_of_local_shape, to_local_shape
from lopsided.ops.windows import nearest_of_piece, unpooled_of_piece

# How torch's losses number their reductions.
_SUM, _MEAN = 2, 1
_MEAN_OF_ROWS = "mean_of_rows"


class NoRoundsError(InputError):
    """A graph whose batch cannot be computed in rounds."""


def batch_size(graph: Graph) -> int:
    """The first dim that most inputs have."""
    sizes = Counter(leaf.value.shape[0] for leaf in graph.leaves if leaf.kind == "input" and leaf.value.shape)
    return sizes.most_common(1)[0][0] if sizes else 0


@dataclass(frozen=True)
class Rounds:
    """A batch in `count` rounds: the graph of one, and how each value of `whole` is placed over them.

    `ahead` are nodes that run once before the rounds, on the whole batch; `precomputed` leaves of the round's graph
    get what they make.
    """

    count: int
    whole: Graph
    graph: Graph
    placed: Mapping[str, Placement]
    ahead: tuple[Node, ...] = ()
    precomputed: tuple[tuple[str, str, Placement], ...] = ()  # a leaf, the value it is of, and how it is cut

    @property
    def inputs(self) -> Mapping[str, Placement]:
        """The inputs by their names in the batch, and how each is cut."""
        return {leaf.target: self.placed[leaf.value.name] for leaf in self.whole.leaves if leaf.kind == "input"}

    @property
    def needed_ahead(self) -> frozenset[str]:
        """The leaves of the whole graph that are needed before the rounds."""
        used = {name for node in self.ahead for name in node.operands} | {source for _, source, _ in self.precomputed}
        return frozenset(leaf.value.name for leaf in self.whole.leaves if leaf.value.name in used)

    def compute_ahead(self, leaves: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """What the rounds take from the whole batch, by the leaf that gets it, whole, of the leaves needed for it."""
        values = dict(leaves)
        with torch.no_grad():
            for node in self.ahead:
                with surroundings(node.context):
                    made = call_op(node, [values[name] for name in node.operands], device)
                values.update((value.name, tensor) for value, tensor in zip(node.results, listed(made), strict=True))
        return {leaf: values[source].detach() for leaf, source, _ in self.precomputed}

    def of_round(self, whole: Tensor, at: Placement, number: int) -> Tensor:
        """The part of a whole value that a round has."""
        return take_piece(whole, at, self._pieces(at, whole.shape), number) if at.is_shard else whole

    def _pieces(self, at: Placement, shape: Sequence[int]) -> tuple[int, ...]:
        return (at.length(shape) // self.count,) * self.count

    def joined(self, parts: Sequence[Tensor], at: Placement) -> Tensor:
        """A value of which every round has made its part."""
        if at.is_shard:
            return join_pieces(parts, at)
        return torch.stack(list(parts)).sum(0).to(parts[0].dtype) if at.kind == "P" else parts[-1]


def in_rounds(graph: Graph, count: int, kept: Iterable[str] = ()) -> Rounds:
    """The graph of one of `count` rounds; `kept` names values that are wanted beside the loss.

    Refused, with the line of the user's model, where the rounds would compute something else than the whole batch.
    """
    rows = batch_size(graph)
    if count < 1 or rows < count or rows % count:
        divisors = [k for k in range(1, rows + 1) if rows % k == 0]
        raise NoRoundsError(
            f"a batch of {rows} rows cannot be computed in {count} equal rounds",
            do=f"choose one of {', '.join(map(str, divisors[:12]))}" if divisors else "give the batch rows",
        )
    if count == 1:
        return Rounds(1, graph, graph, dict.fromkeys(graph.values, I))
    return _Cutter(graph, rows, count).cut(tuple(kept))


class _Cutter:
    """Walks a graph, with every value placed over the rounds, and writes the graph of one round."""

    def __init__(self, graph: Graph, rows: int, count: int) -> None:
        self.graph, self.rows, self.count = graph, rows, count
        self.rules = derive_rules(graph).rules
        self.placed: dict[str, Placement] = {}
        self.made: dict[tuple[str, Placement], str] = {}  # the value of the round's graph that a placed value is
        self.values: dict[str, Value] = {}  # of the round's graph
        self.leaves: list[Leaf] = []
        self.nodes: list[Node] = []
        self.makers = {value.name: (node, k) for node in graph.nodes for k, value in enumerate(node.results)}
        self.given = self._given()
        self.counts: list[Node] = []  # nodes of our own that run before the rounds
        self.precomputed: list[tuple[str, str, Placement]] = []

    def _given(self) -> set[str]:
        """Values that inputs alone decide: neither parameters nor random numbers."""
        found = {leaf.value.name for leaf in self.graph.leaves if leaf.kind != "parameter"}
        for node in self.graph.nodes:
            if found.issuperset(node.operands) and not may_draw(node):
                found.update(value.name for value in node.results)
        return found

    def cut(self, kept: tuple[str, ...]) -> Rounds:
        for leaf in self.graph.leaves:
            self._leaf(leaf)
        for node in self.graph.nodes:
            self._node(node)
        loss = self.take(self.graph.loss, P)
        if loss is None:
            raise NoRoundsError(
                f"the loss %{self.graph.loss} is not a sum over the rows of the batch",
                do="return a loss that is a sum or a mean over rows",
            )
        updates = tuple((buffer, self._update(buffer, name)) for buffer, name in self.graph.updates)
        for name in kept:
            self._keep(name)
        names = tuple(self.made[name, self.placed[name]] for name in kept if (name, self.placed[name]) in self.made)
        nodes, leaves = self._needed([loss, *names, *(name for _, name in updates)])
        made = record_saved(Graph(leaves, nodes, loss, updates))
        _check_shapes(made)
        used = {leaf.value.name for leaf in leaves}
        precomputed = tuple(one for one in self.precomputed if one[0] in used)
        return Rounds(self.count, self.graph, made, self.placed, self._before(precomputed), precomputed)

    def _needed(self, ends: Sequence[str]) -> tuple[tuple[Node, ...], tuple[Leaf, ...]]:
        wanted, nodes = {*ends}, list[Node]()
        for node in reversed(self.nodes):
            if any(value.name in wanted for value in node.results):
                nodes.append(node)
                wanted.update(node.operands)
        leaves = [leaf for leaf in self.leaves if leaf.value.name in wanted or leaf.kind in ("parameter", "input")]
        return tuple(reversed(nodes)), tuple(leaves)

    def _before(self, precomputed: Sequence[tuple[str, str, Placement]]) -> tuple[Node, ...]:
        wanted, nodes = {source for _, source, _ in precomputed}, list[Node]()
        for node in reversed([*self.graph.nodes, *self.counts]):
            if any(value.name in wanted for value in node.results):
                nodes.append(node)
                wanted.update(node.operands)
        return tuple(reversed(nodes))

    def _keep(self, name: str) -> None:
        """A value that is wanted has its own name, also where it was computed before the rounds."""
        at = self.placed[name]
        made = self.take(name, at)
        if made is not None and made != name:
            value = replace(self.values[made], name=name)
            self.nodes.append(Node("aten.clone.default", (Ref(made),), (), (value,)))
            self.made[name, at] = name
            self.values[name] = value

    def _update(self, buffer: str, name: str) -> str:
        made = self.take(name, I)
        if made is None:
            raise NoRoundsError(
                f"the buffer {buffer} is made of all rows of the batch", do="plan without rounds, or freeze the buffer"
            )
        return made

    # Leaves and nodes

    def _leaf(self, leaf: Leaf) -> None:
        value, name = leaf.value, leaf.value.name
        at = Placement("S", 0) if leaf.kind == "input" and value.shape and value.shape[0] == self.rows else I
        self._placed(name, at, replace(value, shape=self._shape(value, at)))
        self.leaves.append(replace(leaf, value=self.values[name]))

    def _placed(self, name: str, at: Placement, value: Value) -> None:
        """A value of the graph is `value` of the round's."""
        self.placed.setdefault(name, at)
        self.made[name, at] = value.name
        self.values[value.name] = value

    def _shape(self, value: Value, at: Placement) -> tuple[int, ...]:
        """What a round has of a shape."""
        if not at.is_shard:
            return value.shape
        pieces = (at.length(value.shape) // self.count,)
        return at.local_shape(value.shape, pieces, 0)

    def _node(self, node: Node) -> None:
        if all(self.placed[name] == I for name in node.operands):
            rule = whole_rule(node)
            if any(self.take(name, I) is None for name in node.operands):
                raise self._refusal(node)
            self._emit(node, rule)
            return
        priced = [(price, rule) for rule in self._rules(node) if (price := self._price(node, rule)) is not None]
        best = min(priced, key=lambda pair: (pair[0], str(pair[1])), default=None)
        inputs_alone = self.given.issuperset(value.name for value in node.results)
        if inputs_alone and (best is None or best[0] >= _AHEAD):
            # It is computed before the rounds, if somebody asks for it.
            self.placed.update((value.name, I) for value in node.results)
            return
        if best is None:
            raise self._refusal(node)
        self._emit(node, best[1])

    def _rules(self, node: Node) -> list[Rule]:
        """Rules by which pieces are computed without a word to others, and that of a mean over rows that count."""
        found = []
        for rule in self.rules[node.name]:
            if rule.how == _MEAN_OF_ROWS or (rule.how == "plain" and self._localised(node, rule) is not None):
                found.append(rule)
        return found

    def _price(self, node: Node, rule: Rule) -> int | None:
        """What has to be converted for a rule; None where it cannot be."""
        total = 0
        for name, need in zip(node.operands, rule.needs, strict=True):
            price = self._price_of(name, need)
            if price is None:
                return None
            total += price
        if rule.how == _MEAN_OF_ROWS and not self.given.issuperset(node.operands[1:]):
            return None  # which rows count must be known before the rounds
        return total

    def _price_of(self, name: str, need: Placement, depth: int = 0) -> int | None:
        at, wanted = self.placed[name], I if need.is_whole else need
        if at == wanted:
            return 0 if (name, at) in self.made else _AHEAD
        if (name, wanted) in self.made:
            return 1
        if wanted.is_shard and not self._divides(self.graph.values[name], wanted):
            return None
        if at == I and wanted == P and self.graph.values[name].torch_dtype.is_floating_point:
            return 1
        if at == I and wanted.is_shard and self._remade_by(name, wanted, depth) is not None:
            return 1
        return _AHEAD if name in self.given else None

    def _divides(self, value: Value, at: Placement) -> bool:
        return at.fits(value.shape) and at.length(value.shape) == self.rows

    def _remade_by(self, name: str, wanted: Placement, depth: int) -> Rule | None:
        """A rule by which the node that makes an invariant value makes a part of it (`expand` to the batch)."""
        if depth > _DEEPEST or name not in self.makers:
            return None
        node, k = self.makers[name]
        for rule in self.rules[node.name]:
            fits = rule.how == "plain" and rule.gives[k] == wanted and self._localised(node, rule) is not None
            operands = zip(node.operands, rule.needs, strict=True)
            if fits and all(self._price_of(one, need, depth + 1) is not None for one, need in operands):
                return rule
        return None

    def take(self, name: str, need: Placement) -> str | None:
        """The value of the round's graph that has a value of the graph as it is needed; made now, if need be."""
        wanted = I if need.is_whole else need
        if (name, wanted) in self.made:
            return self.made[name, wanted]
        at = self.placed[name]
        if at == I and wanted == P and self.graph.values[name].torch_dtype.is_floating_point:
            return self._part_of(name)
        if at == I and wanted.is_shard and (rule := self._remade_by(name, wanted, 0)) is not None:
            self._emit(self.makers[name][0], rule, f".{_in_name(wanted)}")
            return self.made[name, wanted]
        return self._ahead(name, wanted) if name in self.given else None

    def _part_of(self, name: str) -> str | None:
        """What a round has of an invariant value: every round as much."""
        whole = self.take(name, I)
        if whole is None:
            return None
        value = replace(self.values[whole], name=f"{name}.of_round")
        node = Node("aten.mul.Tensor", (Ref(whole), 1 / self.count), (), (value,))
        self.nodes.append(node)
        self._placed(name, P, value)
        return value.name

    def _ahead(self, name: str, wanted: Placement) -> str:
        """What inputs alone decide is computed before the rounds."""
        value = self.graph.values[name]
        return self._leaf_ahead(value, name, wanted)

    def _leaf_ahead(self, value: Value, source: str, wanted: Placement) -> str:
        leaf_name = f"{source}.ahead{'' if wanted == I else f'.{_in_name(wanted)}'}"
        made = Value(leaf_name, self._shape(value, wanted), value.dtype)
        self.leaves.append(Leaf(made, "precomputed", leaf_name))
        self.precomputed.append((leaf_name, source, wanted))
        self._placed(source, wanted, made)
        return leaf_name

    # Writing a node

    def _emit(self, node: Node, rule: Rule, suffix: str = "") -> None:
        names = [self.take(name, need) for name, need in zip(node.operands, rule.needs, strict=True)]
        if any(name is None for name in names):
            raise self._refusal(node)
        operands = [Ref(name) for name in names if name is not None]
        if rule.how == _MEAN_OF_ROWS:
            self._mean_of_rows(node, operands)
            return
        form = self._localised(node, rule)
        if form is None:
            raise self._refusal(node)
        results = [
            replace(value, name=value.name + suffix, shape=self._shape(value, give))
            for value, give in zip(node.results, rule.gives, strict=True)
        ]
        if form.part == 1:
            self._append(form.node, operands, results)
        else:
            raw = replace(results[0], name=f"{results[0].name}.unweighted")
            self._append(form.node, operands, [raw])
            mul = Node(
                "aten.mul.Tensor", (Ref(raw.name), form.part), (), (results[0],), node.context, Saved(), node.source
            )
            self.nodes.append(mul)
        for value, give, result in zip(node.results, rule.gives, results, strict=True):
            at = I if give.is_whole else give
            if (value.name, at) not in self.made:
                self._placed(value.name, at, result)

    def _append(self, node: Node, operands: Sequence[Ref], results: Sequence[Value]) -> None:
        feed = iter(operands)
        args = tuple(_refilled(arg, feed) for arg in node.args)
        kwargs = tuple((key, _refilled(arg, feed)) for key, arg in node.kwargs)
        self.nodes.append(replace(node, args=args, kwargs=kwargs, results=tuple(results), saved=Saved()))
        self.values.update((value.name, value) for value in results)

    def _mean_of_rows(self, node: Node, operands: Sequence[Ref]) -> None:
        """The sum of the round's rows, divided by the count of those of the whole batch that are not ignored."""
        value = node.results[0]
        call = Call.of(node, self.graph.values)
        count = self._count(node, call)
        total = replace(value, name=f"{value.name}.sum")
        if value.dtype == "f16":
            # A sum over many rows leaves what float16 can say.
            each = Value(f"{value.name}.each", self._rows_shape(call), value.dtype, value.grad)
            self._append(_with(node, "reduction", 0), operands, [each])
            wide = replace(total, dtype="f32")
            summed = Node(
                "aten.sum.default", (Ref(each.name),), (("dtype", Atom("dtype", "f32")),), (wide,), node.context
            )
            mean = replace(value, name=f"{value.name}.wide", dtype="f32")
            divided = Node("aten.div.Tensor", (Ref(total.name), Ref(count)), (), (mean,), node.context)
            narrow = Node("aten.to.dtype", (Ref(mean.name), Atom("dtype", "f16")), (), (value,), node.context)
            self.nodes += [summed, divided, narrow]
            self.values.update((one.results[0].name, one.results[0]) for one in (summed, divided, narrow))
        else:
            self._append(_with(node, "reduction", _SUM), operands, [total])
            self.nodes.append(
                Node("aten.div.Tensor", (Ref(total.name), Ref(count)), (), (value,), node.context, Saved(), node.source)
            )
        self._placed(value.name, P, value)

    def _rows_shape(self, call: Call) -> tuple[int, ...]:
        target = self.take(call.operands[1].name, self.placed[call.operands[1].name])
        return self.values[str(target)].shape

    def _count(self, node: Node, call: Call) -> str:
        """What the rows of the whole batch count: 1 or their class weight, 0 if they are ignored."""
        target, weight = call.operands[1], call.operands[2] if len(call.operands) > 2 else None
        ignored = int(call.arg("ignore_index"))
        name = f"{node.name}.count"
        dtype = "i64" if weight is None else weight.dtype
        if weight is None:
            counts = Value(f"{name}.rows", target.shape, "bool")
            self.counts.append(Node("aten.ne.Scalar", (Ref(target.name), ignored), (), (counts,)))
        else:
            is_ignored = Value(f"{name}.ignored", target.shape, "bool")
            classes = Value(f"{name}.classes", target.shape, target.dtype)
            weights = Value(f"{name}.weights", target.shape, dtype)
            counts = Value(f"{name}.rows", target.shape, dtype)
            self.counts += [
                Node("aten.eq.Scalar", (Ref(target.name), ignored), (), (is_ignored,)),
                Node("aten.masked_fill.Scalar", (Ref(target.name), Ref(is_ignored.name), 0), (), (classes,)),
                Node("aten.index.Tensor", (Ref(weight.name), (Ref(classes.name),)), (), (weights,)),
                Node("aten.masked_fill.Scalar", (Ref(weights.name), Ref(is_ignored.name), 0), (), (counts,)),
            ]
        total = Value(name, (), dtype)
        self.counts.append(Node("aten.sum.default", (Ref(counts.name),), (), (total,)))
        return self._leaf_ahead(total, name, I)

    # What a call is on the rows of a round

    def _localised(self, node: Node, rule: Rule) -> _Form | None:
        """The call that computes a round's part by a rule; None where none is known."""
        placed = (*rule.needs, *rule.gives)
        if not any(p.is_shard for p in placed):
            return _Form(node)
        values = [self.graph.values[name] for name in node.operands]
        if not all(self._divides(v, p) for v, p in zip((*values, *node.results), placed, strict=True) if p.is_shard):
            return None
        entry = describe(node.op)
        local = entry.local if entry is not None else None
        shapes = [self._shape(value, give) for value, give in zip(node.results, rule.gives, strict=True)]
        call = Call.of(node, self.graph.values)
        # A reference in the place of every operand, in their order.
        refs = [Ref(name) for name in node.operands]
        if local is to_local_shape:
            return (
                _Form(replace(node, op="aten.reshape.default", args=(refs[0], shapes[0]), kwargs=()))
                if len(refs) == 1
                else None
            )
        if local is expand_to_local_shape:
            return (
                _Form(replace(node, op="aten.expand.default", args=(refs[0], shapes[0]), kwargs=()))
                if len(refs) == 1
                else None
            )
        if local is new_of_local_shape:
            return _Form(_with(node, "size", shapes[0]))
        if local is repeat_interleave_of_piece:
            return _Form(_with(node, "output_size", None))
        if local is mean_of_piece:
            return _Form(node, self._part_of_mean(call, rule, shapes[0]))
        if local in (elementwise_of_piece, rowwise_of_piece):
            is_part = call.arg("reduction") == _MEAN and rule.gives[0] == P
            return _Form(node, 1 / self.count if is_part else 1)
        along_first = all(p.dim == 0 for p in placed if p.is_shard)
        splits = local in (part_of_piece, parts_of_piece)
        if splits and any(v.shape[:1] != values[0].shape[:1] for v in node.results):
            return None  # it takes rows of the batch apart
        as_it_is = splits or local in _AS_THEY_ARE or (entry is not None and entry.random)
        return _Form(node) if local is None or (as_it_is and along_first) else None

    def _part_of_mean(self, call: Call, rule: Rule, shape: tuple[int, ...]) -> float:
        """A mean over rows counts by the round's part of them."""
        x = call.operands[0]
        mine = math.prod(self._shape(x, rule.needs[0])) / math.prod(shape)
        return mine / (x.elements / call.node.results[0].elements)

    def _refusal(self, node: Node) -> NoRoundsError:
        cut = [name for name in node.operands if self.placed.get(name, I) != I]
        batch_norm = "batch_norm" in node.op
        why = (
            "batch norm in training takes its statistics of the whole batch"
            if batch_norm
            else "no rule of it computes the rows of a round by themselves"
        )
        operands = ", ".join(f"%{name}: {self.placed.get(name, I)}" for name in node.operands)
        return NoRoundsError(
            f"the batch cannot be computed in rounds: {why}",
            where=f"%{node.name} = {node.op}({operands})\n          {node.source}",
            effect=f"{', '.join(f'%{name}' for name in cut[:4])} would hold a part of the batch only",
            do="plan without rounds" + (", or use a norm of each row (group norm, layer norm)" if batch_norm else ""),
        )


_AS_THEY_ARE = (convolution_of_piece, group_norm_of_piece, nearest_of_piece, unpooled_of_piece)
"""How pieces are computed by ops that are called on some rows as on all; their pieces along other dims differ."""

# The price of computing something before the rounds: more than any conversion within one.
_AHEAD = 100
# So many nodes, one behind the other, are made again for a part of what they make.
_DEEPEST = 8


@dataclass(frozen=True, slots=True)
class _Form:
    """A call, and which part of what it returns the round's term is."""

    node: Node
    part: float = 1


def _in_name(at: Placement) -> str:
    return f"S{at.dim}_{at.outer}_{at.unit}" if at.is_shard else at.kind


def _refilled(arg: Arg, feed: Iterable[Ref]) -> Arg:
    if isinstance(arg, Ref):
        return next(iter(feed))
    if isinstance(arg, tuple):
        return tuple(_refilled(part, feed) for part in arg)
    return arg


def _with(node: Node, name: str, given: Arg) -> Node:
    """The call with another value for an argument."""
    overload = aten_overload(node.op)
    if any(key == name for key, _ in node.kwargs) or overload is None:
        return replace(node, kwargs=tuple((key, given if key == name else arg) for key, arg in node.kwargs))
    arguments = [argument for argument in overload._schema.arguments if not argument.kwarg_only]
    place = next((k for k, argument in enumerate(arguments) if argument.name == name), None)
    if place is None:
        return replace(node, kwargs=(*node.kwargs, (name, given)))
    args = [*node.args, *(argument.default_value for argument in arguments[len(node.args) : place])]
    return replace(node, args=(*args[:place], given, *args[place + 1 :]))


def may_draw(node: Node) -> bool:
    """Whether a call may take random numbers."""
    entry = describe(node.op)
    overload = aten_overload(node.op)
    tagged = overload is not None and torch.Tag.nondeterministic_seeded in overload.tags
    return tagged or overload is None or (entry.random if entry is not None else overload.namespace != "aten")


def _check_shapes(graph: Graph) -> None:
    """Refuse a graph whose calls do not make what they are said to, found out without memory."""
    known: set[object] = set()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for node in graph.nodes:
            key = signature(node, graph.values)
            if key in known:
                continue
            known.add(key)
            operands = [torch.empty(v.shape, dtype=v.torch_dtype) for v in (graph.values[n] for n in node.operands)]
            try:
                made = call_op(node, operands, torch.device("cpu"))
                found = [(tuple(t.shape), DTYPE_NAMES[t.dtype]) for t in listed(made)]
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                found = [((), str(error))]
            said = [(value.shape, value.dtype) for value in node.results]
            wrong = [f[0] != s[0] for f, s in zip(found, said, strict=False)]
            if len(found) != len(said) or any(wrong):
                raise NoRoundsError(
                    "the batch cannot be computed in rounds: a call depends on its size",
                    where=f"%{node.name} = {node.op}\n          {node.source}",
                    effect=f"it would make {found[0]} and not {said[0]}",
                    do="plan without rounds",
                )
