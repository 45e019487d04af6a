"""The tensors of a batch: whether a rank was given rows or a whole, and its part of each as a program wants it.

In: the plan's inputs and their placements, what a call gives. Out: `Inputs`: how the rows of a batch are cut
(`cut_of`), shapes of the whole, this rank's part on its device, and what all ranks must agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lopsided.comm.redistribute import Redistributor
from lopsided.comm.world import World
from lopsided.errors import BatchError
from lopsided.ir.graph import Graph, Leaf
from lopsided.ir.placement import I, Placement, S
from lopsided.ir.program import Program
from lopsided.runtime.calls.call_form import Given, HandedOut, Signature
from lopsided.runtime.calls.outputs import RowCut
from lopsided.runtime.parameters import replicas
from lopsided.schedule.rounds import Rounds

Shape = tuple[int, ...]


def of_all_rounds(at: Placement, rounds: int) -> Placement:
    """How all rounds together are placed, each of which is placed so: a rank has its rows of every round in a row."""
    return S(at.dim, 1, at.unit * rounds, at.by) if at.is_shard and at.dim == 0 and at.outer == 1 else at


def row_cut_of_round(cut: RowCut | None, rounds: Rounds) -> RowCut | None:
    """How the rows of one round are cut, of a batch of which each rank has its rows."""
    if cut is None or rounds.count == 1:
        return cut
    if cut.at.unit % rounds.count:
        raise BatchError(
            f"{cut.rows} rows, cut by {cut.at}, are not equal rows of {rounds.count} rounds on every rank",
            do="give batches of as many rows as were planned, or a part of them that is",
        )
    return RowCut(cut.exchange, S(0, 1, cut.at.unit // rounds.count, cut.at.by), cut.rows // rounds.count)


def _no_table(leaf: Leaf) -> Tensor:
    raise BatchError(f"there is no {leaf.kind} {leaf.target}", do="call the parallel model, which has it")


class Inputs:
    """What was planned of a batch, on the ranks that take part; `exchange` is None on others."""

    def __init__(
        self, graph: Graph, program: Program, world: World, exchange: Redistributor | None, rounds: int = 1
    ) -> None:
        stored = dict(program.leaves)
        self.by_name: dict[str, tuple[Leaf, Placement]] = {
            leaf.target: (leaf, of_all_rounds(stored[leaf.value.name], rounds))
            for leaf in graph.leaves
            if leaf.kind == "input"
        }
        self._world, self._exchange = world, exchange
        self.table: Callable[[Leaf], Tensor] = _no_table  # the tensor of a buffer or a constant
        cuts = {at for _, at in self.by_name.values() if at.is_shard and at.dim == 0 and at.outer == 1}
        self._rows_at = cuts.pop() if len(cuts) == 1 else None

    def cut_of(self, handed_out: HandedOut, tensors: Mapping[str, Tensor]) -> RowCut | None:
        """How the rows of this batch are cut, if a sharded loader gave this rank its rows; None for a whole batch."""
        at, rows, exchange = self._rows_at, handed_out.rows, self._exchange
        if at is None or exchange is None or exchange.size == 1 or not rows or not at.fits((rows,)):
            return None
        cut = RowCut(exchange, at, rows)
        first = {tensor.shape[0] for tensor in tensors.values() if tensor.dim()}
        # Where one rank has all rows, what it is given looks like a whole batch.
        return cut if cut.mine in first and (rows not in first or cut.is_with_one) else None

    def _is_rows(self, name: str, cut: RowCut | None) -> bool:
        """Whether this rank was given its rows of an input."""
        return cut is not None and name in self.by_name and self.by_name[name][1].is_shard

    def whole_shape(self, name: str, tensor: Tensor, cut: RowCut | None) -> Shape:
        """The shape of the whole of what this rank was given."""
        shape = tuple(tensor.shape)
        if cut is None or not self._is_rows(name, cut):
            return shape
        if not shape or shape[0] != cut.mine:
            raise BatchError(
                f"{name} has shape {list(shape)}, and this rank's part of the batch is {cut.mine} of {cut.rows} rows",
                where=f"rank {self._world.rank}",
                do="give every tensor of the batch in this rank's rows, as lopsided.shard does, or every one whole",
            )
        return (cut.rows, *shape[1:])

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Inputs of the plan are converted to what was planned; others stay what they are."""
        return self.by_name[name][0].value.torch_dtype if name in self.by_name else tensor.dtype

    def local(
        self, given: Given, cut: RowCut | None, program: Program, rounds: Rounds, exchange: Redistributor
    ) -> Callable[[int], dict[str, Tensor]]:
        """This rank's part of every input in a round, by the name of its value, on its device."""
        placed = dict(program.leaves)
        leaves = [leaf for leaf in program.graph.leaves if leaf.kind == "input"]
        moved = {
            leaf.target: given.tensors[leaf.target].to(self._world.device, leaf.value.torch_dtype, non_blocking=True)
            for leaf in leaves
        }
        ahead = self._ahead(moved, cut, rounds, exchange)
        rows_at = row_cut_of_round(cut, rounds)

        def of_round(number: int) -> dict[str, Tensor]:
            found = {name: rounds.of_round(whole, at, number) for name, (whole, at) in ahead.items()}
            for leaf in leaves:
                value, name, tensor = leaf.value, leaf.target, moved[leaf.target]
                if rows_at is not None and self._is_rows(name, cut):
                    tensor, at = tensor.narrow(0, number * rows_at.mine, rows_at.mine), rows_at.at
                else:
                    tensor, at = rounds.of_round(tensor, rounds.placed[value.name], number), I
                found[value.name] = exchange.convert(
                    tensor, at, placed[value.name], value.shape, f"the input {name}", f"gradient of the input {name}"
                )
            return found

        return of_round

    def _ahead(
        self, moved: Mapping[str, Tensor], cut: RowCut | None, rounds: Rounds, exchange: Redistributor
    ) -> dict[str, tuple[Tensor, Placement]]:
        """What the rounds take from the whole batch, whole, and how they cut it."""
        if not rounds.precomputed:
            return {}
        leaves: dict[str, Tensor] = {}
        for leaf in rounds.whole.leaves:
            if leaf.value.name in rounds.needed_ahead:
                leaves[leaf.value.name] = self._whole(leaf, moved, cut, exchange)
        made = rounds.compute_ahead(leaves, self._world.device)
        return {name: (made[name], at) for name, _, at in rounds.precomputed}

    def _whole(self, leaf: Leaf, moved: Mapping[str, Tensor], cut: RowCut | None, exchange: Redistributor) -> Tensor:
        if leaf.kind != "input":
            return self.table(leaf)
        tensor = moved[leaf.target].detach()
        if cut is None or not self._is_rows(leaf.target, cut):
            return tensor
        return exchange.convert(tensor, cut.at, I, leaf.value.shape, f"the whole of the input {leaf.target}")

    def told(
        self, given: Mapping[str, Tensor], signature: Signature, cut: RowCut | None, *, all_of_it: bool, some: bool
    ) -> str:
        """What all ranks must agree on: shapes, and of inputs that are whole what is in them, all of it or some."""
        told = []
        for name, shape, _, _ in signature.inputs:
            content = ""
            if (all_of_it or some) and not self._is_rows(name, cut) and not self._is_with_one(name, shape):
                seen = given[name] if all_of_it else replicas.some_of(given[name])
                content = f" holding {int(replicas.digest(seen)) & 0xFFFFFFFF:08x}"
            told.append(f"{name} {list(shape)}{content}")
        return ", ".join([*told, *(f"{name}={value!r}" for name, value in signature.others)])

    def _is_with_one(self, name: str, shape: Shape) -> bool:
        """Where one rank has all of an input, its share looks like the whole, and the others' do not."""
        at = self.by_name[name][1] if name in self.by_name else I
        if self._exchange is None or not at.is_shard or not at.fits(shape):
            return False
        pieces = self._exchange.layout(at, shape).pieces
        return max(pieces) == sum(pieces)
