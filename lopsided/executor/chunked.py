"""A loss and the product before it, some rows at a time, forward and backward together.

In: the instructions of a head (`lopsided.schedule.loss_heads`). Out: `RunChunked`, one instruction in their place.

The one idea: the gradient of a sum over rows is known row by row, but for the gradient of the sum itself, by which
everything is multiplied at last. So every chunk of rows goes forward, to its loss, and back at once, and its logits
are forgotten. What is kept for the backward pass are the gradient of the rows and that of the matrix, both of the plain
sum: a mean is divided after it, and what scales the loss (for float16) comes last, so nothing small is lost on the way.

    p = softmax(logits)                  in float32, in the memory of the logits' copy
    loss of a row                        log Σ exp − (1 − s) · logit of the target − s · mean of all
    its gradient                         p − (1 − s) · [target] − s / classes              s: label smoothing
    rows that are ignored                nothing
    of the matrix                        added up in float32 over all chunks

Logits that the model also returns are made once more, whole, when somebody looks at them (`Unmade`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lopsided.comm.recorder import Recorder
from lopsided.errors import TrainingError
from lopsided.executor.instructions import Instruction, Pass, RunNode, Slots, as_planned, surrounded
from lopsided.ir.placement import P, R
from lopsided.ops.local_kernel import RunOp
from lopsided.ops.op import Ask, Call, accumulating, number
from lopsided.schedule.loss_heads import CASTS, LINEAR, SHIFTS, VIEWS
from lopsided.schedule.schedule import compute_id

_MEAN = 1


@dataclass(frozen=True, slots=True)
class Between:
    """What is done to logits between the product and the loss, element by element."""

    run: RunOp
    node: RunNode


@dataclass(frozen=True)
class Unmade:
    """A value that is made when it is first looked at."""

    make: Callable[[], Tensor]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def made(self) -> Tensor:
        return self.make()


@dataclass(slots=True)
class RunChunked(Instruction):
    """`nodes` from the product to the loss; `shown` are numbers of those of them whose results are asked for."""

    nodes: tuple[RunNode, ...]
    loss: Call
    rows: int
    answer: Callable[[Ask], Tensor] | None  # of other devices that have other rows
    between: tuple[Between, ...]
    shown: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        return (*self.nodes[0].operands, self.nodes[-1].operands[1])

    @property
    def writes(self) -> tuple[int, ...]:
        return (*self.nodes[-1].results, *(self.nodes[k].results[0] for k in self.shown))

    @property
    def by_rows(self) -> bool:
        """Whether the matrix has a row for every class, and not a column."""
        return self.nodes[0].node.op == LINEAR

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which logits are multiplied."""
        return self.nodes[0].node.results[0].torch_dtype

    def run(self, slots: Slots, this: Pass) -> None:
        x, matrix, *bias = (slots[k] for k in self.nodes[0].operands)
        target, last = slots[self.nodes[-1].operands[1]], self.nodes[-1]
        for shift in (node for node in self.nodes if node.node.op in SHIFTS):
            x = shift.op([x])[0]
        rows = x.reshape(-1, x.shape[-1])
        total: Tensor = _InChunks.apply(  # type: ignore[no-untyped-call]
            self, this.recorder, torch.is_grad_enabled(), target, rows, matrix, *bias
        )
        if self.loss.arg("reduction") == _MEAN:
            count = (target != int(self.loss.arg("ignore_index"))).to(total.dtype).sum()
            total = total / (self.answer(Ask(count, P, R)) if self.answer is not None else count)
        if this.recorder is not None:
            this.recorder.idle()
        result = total.to(last.node.results[0].torch_dtype)
        has_gradient = last.has_gradient[0] and torch.is_grad_enabled()
        slots[last.results[0]] = as_planned(result, [x, matrix, *bias], has_gradient, None, ())
        for k in self.shown:
            slots[self.nodes[k].results[0]] = self._unmade(k, [slots[s] for s in self.nodes[0].operands])

    def _unmade(self, last: int, operands: Sequence[Tensor]) -> Unmade:
        """What a node before the loss makes."""
        differentiable = torch.is_grad_enabled() and self.nodes[last].has_gradient[0]
        versions = [operand._version for operand in operands]
        value = self.nodes[last].node.results[0]

        def make() -> Tensor:
            if versions != [operand._version for operand in operands]:
                raise TrainingError(
                    f"the output %{value.name} is looked at after what it is made of has changed: its loss is computed "
                    "some rows at a time, and the output itself when it is first looked at",
                    do="look at it before optimizer.step()",
                )
            made = [operand.detach() for operand in operands]
            with torch.no_grad():
                for node in self.nodes[: last + 1]:
                    with surrounded(node.context, None):
                        made = node.op(made)
            return _NoWayBack.apply(made[0].requires_grad_()) if differentiable else made[0]  # type: ignore[no-untyped-call]

        return Unmade(make, value.torch_dtype, operands[0].device)

    # One chunk

    def logits(self, rows: Tensor, matrix: Tensor, bias: Sequence[Tensor]) -> Tensor:
        if self.by_rows:
            return torch.nn.functional.linear(rows, matrix, *bias)
        return rows @ matrix

    def loss_of(self, logits: Tensor, target: Tensor, *, going_back: bool) -> tuple[Tensor, Tensor]:
        """The sum of the rows' losses, and the gradient of the logits, or what is left of these. They are used up."""
        if not self.between:
            wide = accumulating(logits)
            loss = self._cross_entropy(wide, target, going_back=going_back)
            return loss, wide.to(logits.dtype)
        with torch.set_grad_enabled(going_back):
            source = logits.requires_grad_(going_back)
            made = [source]
            for one in self.between:
                with surrounded(one.node.context, None):
                    made = one.run(made)
        wide = accumulating(made[0].detach())
        if wide.dtype == made[0].dtype:
            wide = wide.clone()  # the functions between may have kept it
        loss = self._cross_entropy(wide, target, going_back=going_back)
        if not going_back:
            return loss, logits
        return loss, torch.autograd.grad(made[0], source, wide.to(made[0].dtype))[0]

    def _cross_entropy(self, logits: Tensor, target: Tensor, *, going_back: bool) -> Tensor:
        """In place of the logits comes their gradient."""
        smoothing, classes = number(self.loss.arg("label_smoothing") or 0), logits.shape[1]
        counted = target != int(self.loss.arg("ignore_index"))
        places = torch.where(counted, target, 0).unsqueeze(1)
        logits.sub_(logits.amax(1, keepdim=True))
        loss = logits.gather(1, places).squeeze(1).mul_(smoothing - 1)
        if smoothing:
            loss -= logits.sum(1) * (smoothing / classes)
        total = logits.exp_().sum(1, keepdim=True)
        loss += total.squeeze(1).log()
        if going_back:
            logits.div_(total)
            if smoothing:
                logits.sub_(smoothing / classes)
            logits.scatter_add_(1, places, logits.new_full(places.shape, smoothing - 1))
            logits.masked_fill_(~counted.unsqueeze(1), 0)
        return loss.masked_fill_(~counted, 0).sum()


def run_chunked(
    nodes: Sequence[RunNode],
    calls: Sequence[Call],
    rows: int,
    answer: Callable[[Ask], Tensor] | None,
    shown: Sequence[int],
    prepared: Callable[[RunNode], RunOp],
) -> RunChunked:
    """The nodes of a head as one instruction. `prepared` makes an op a function of operands of whatever form."""
    between = [
        Between(prepared(node), node)
        for node, call in zip(nodes[1:-1], calls[1:-1], strict=True)
        if node.node.op not in (*SHIFTS, *VIEWS) and not _widens(call)
    ]
    return RunChunked(tuple(nodes), calls[-1], rows, answer, tuple(between), tuple(shown))


def _widens(call: Call) -> bool:
    """Whether it is a cast to what the loss is computed in anyway."""
    before, after = call.operands[0].torch_dtype, call.node.results[0].torch_dtype
    wide = torch.float32 if before.itemsize < torch.float32.itemsize else before
    return call.node.op in CASTS and after in (wide, before)


class _InChunks(torch.autograd.Function):
    """The sum of the losses of all rows."""

    @staticmethod
    def forward(
        ctx: Any,
        head: RunChunked,
        recorder: Recorder | None,
        going_back: bool,
        target: Tensor,
        rows: Tensor,
        matrix: Tensor,
        *bias: Tensor,
    ) -> Tensor:
        needed = [going_back and needs for needs in ctx.needs_input_grad[4:]]
        ctx.dtypes = [tensor.dtype for tensor in (rows, matrix, *bias)]
        gradients = _Sums(head, rows, matrix, bias, needed)
        used = [tensor.to(head.dtype) for tensor in (matrix, *bias)]
        total = accumulating(rows.new_zeros((), dtype=head.dtype))
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(rows.device.type, enabled=False))
            for start in range(0, rows.shape[0], head.rows):
                part = rows[start : start + head.rows].to(head.dtype)
                _mark(recorder, head.nodes[0], backward=False)
                logits = head.logits(part, used[0], used[1:])
                _mark(recorder, head.nodes[-1], backward=False)
                labels = target[start : start + head.rows]
                loss, logits = head.loss_of(logits, labels, going_back=any(needed))
                total = total + loss
                _mark(recorder, head.nodes[0], backward=True)
                gradients.add(start, part, logits, used[0])
        ctx.needed = needed
        ctx.save_for_backward(*gradients.kept)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        kept = iter(ctx.saved_tensors)
        found = [
            _times(next(kept), gradient, dtype) if needs else None
            for needs, dtype in zip(ctx.needed, ctx.dtypes, strict=True)
        ]
        return (None, None, None, None, *found)


class _Sums:
    """The gradients of the plain sum, as chunks add to them. Sums over rows are wide, and narrow only in the end."""

    def __init__(
        self, head: RunChunked, rows: Tensor, matrix: Tensor, bias: Sequence[Tensor], needed: Sequence[bool]
    ) -> None:
        self.head, (self.for_rows, self.for_matrix, *self.for_bias) = head, needed
        wide = accumulating(rows.new_empty((), dtype=head.dtype)).dtype
        self.rows = torch.empty_like(rows) if self.for_rows else None
        self.sums = [
            torch.zeros_like(tensor, dtype=wide) for tensor, one in zip((matrix, *bias), needed[1:], strict=True) if one
        ]

    @property
    def kept(self) -> list[Tensor]:
        return [*([self.rows] if self.rows is not None else []), *self.sums]

    def add(self, start: int, part: Tensor, back: Tensor, matrix: Tensor) -> None:
        """`back` is the gradient of the logits of the rows `part`."""
        if self.rows is not None:
            self.rows[start : start + part.shape[0]] = back @ (matrix if self.head.by_rows else matrix.t())
        if self.for_matrix:
            factors = (back.t(), part) if self.head.by_rows else (part.t(), back)
            if self.sums[0].dtype == part.dtype:
                self.sums[0].addmm_(*factors)
            else:
                self.sums[0] += factors[0] @ factors[1]
        if any(self.for_bias):
            self.sums[-1] += back.sum(0, dtype=self.sums[-1].dtype)


def _times(sums: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in the dtype asked for, without a wide copy on the way."""
    return torch.mul(sums, gradient, out=torch.empty_like(sums, dtype=dtype))


def _mark(recorder: Recorder | None, node: RunNode, *, backward: bool) -> None:
    if recorder is not None:
        item = compute_id(node.node.name, "backward" if backward else "forward")
        recorder.mark(item, item)


class _NoWayBack(torch.autograd.Function):
    """The identity on logits that were made once more, which refuses a gradient."""

    @staticmethod
    def forward(ctx: Any, made: Tensor) -> Tensor:
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise TrainingError(
            "a loss outside of the model was made of logits whose own loss is computed some rows at a time: they have "
            "no way back",
            do="pass it to parallelize as loss_fn=, or plan without chunks: plan --without chunks",
        )
