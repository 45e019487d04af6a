"""Programs for calls that the plan did not know: in evaluation, under another autocast, of another shape, without
labels.

In: the plan, and calls. Out: `Programs`, those of a model in training, each made when it is first needed, on the plan's
storage and with decisions of its own (`lopsided.planner.same_storage`), and agreed on by all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lopsided.capturing.call import LossFn, in_form_of
from lopsided.capturing.capture_graph import Captured, Returned, capture_call
from lopsided.capturing.reads import Reads
from lopsided.comm.world import World, odd_ones, waiting
from lopsided.errors import BatchError, CaptureError, TrainingError, WorldError
from lopsided.executor.executor import Executor
from lopsided.ir.program import Program
from lopsided.planner.plan_data import Plan
from lopsided.planner.same_storage import StoredProgram, parse_stored_program, stored_program
from lopsided.runtime.agreement import from_first
from lopsided.runtime.calls.call_form import CallForm, Given, Signature
from lopsided.runtime.parameters.adoption import replaced
from lopsided.runtime.parameters.pieces import Piece
from lopsided.schedule.rounds import NoRoundsError, Rounds, batch_size, in_rounds

MOST_PROGRAMS = 64
"""So many different calls (shapes, modes, arguments that are not tensors) have programs of their own."""

MOST_READS = 8
"""For so many values of what forward reads from attributes one of them is captured."""


class InOneRoundWarning(UserWarning):
    """A call of a model that is trained in rounds, and is itself computed at once."""


def fewest_rounds(rows: int, most: int, planned: int) -> int:
    """So many equal rounds of `most` rows or fewer, or as planned where that will do.

    >>> fewest_rounds(32, 8, 4), fewest_rounds(16, 8, 4), fewest_rounds(18, 8, 4), fewest_rounds(6, 8, 1)
    (4, 4, 3, 1)
    """
    if planned == 1 or (rows % planned == 0 and rows <= most * planned):
        return planned
    return next(count for count in range(max(-(-rows // max(most, 1)), 1), rows + 1) if rows % count == 0)


@dataclass(frozen=True)
class CallProgram:
    """One captured call of the model: its program on these devices, and what it returns."""

    program: Program
    returned: Returned
    has_loss: bool
    reads: Reads
    executor: Executor
    rounds: Rounds  # the program is that of one


class Programs:
    """The programs of a model, by the signatures of its calls. `compile_program(program, outputs)` makes it run."""

    def __init__(
        self,
        model: nn.Module,
        pieces: Mapping[str, Piece],
        plan: Plan,
        world: World,
        side: dist.ProcessGroup | None,
        form: CallForm,
        loss_fn: LossFn | None,
        compile_program: Callable[[StoredProgram, tuple[str, ...]], Executor],
    ) -> None:
        # In a tuple, since a module's children would be registered where this is kept.
        self._model, self._pieces, self._plan, self._world = (model,), pieces, plan, world
        self._side, self._form, self._loss_fn, self._compile = side, form, loss_fn, compile_program
        self._calls: dict[Signature, list[CallProgram]] = {}
        self._frozen: set[str] = set()  # numbers that the model needs as numbers

    def add_planned(self, signature: Signature, captured: Captured) -> None:
        """The call that was planned. What is returned beside the loss may need more than the plan has."""
        rounds = in_rounds(captured.whole, self._plan.microbatches, captured.returned.names)
        is_planned = captured.whole is captured.graph and (
            rounds.count == 1 or rounds.graph.fingerprint == self._plan.graph.fingerprint
        )
        planned = StoredProgram(self._plan.program, self._plan.decisions)
        self._add(signature, captured, planned if is_planned else self._agreed(rounds), rounds)

    def has(self, signature: Signature) -> bool:
        return signature in self._calls

    def find(self, signature: Signature) -> CallProgram | None:
        """The program of this call, if there is one and what forward reads is what it was."""
        return next((found for found in self._calls.get(signature, ()) if found.reads.holds()), None)

    def make(self, given: Given, signature: Signature) -> tuple[Given, CallProgram]:
        """A program for a call that is made for the first time, on the same pieces, and the call as it takes it."""
        self._check_room(signature)
        varying = next((names for known in self._calls if (names := signature.varying_numbers(known))), set())
        if varying - self._frozen:
            self._form.varying |= varying
            try:
                as_inputs = self._form.read_batch(given.batch)
                wider = replace(signature, inputs=as_inputs.inputs_of(signature), others=as_inputs.others)
                return as_inputs, self.find(wider) or self._captured(as_inputs, wider)
            except CaptureError:
                # The model needs it as a number: every value has a program of its own.
                self._form.varying -= varying
                self._frozen |= varying
        return given, self._captured(given, signature)

    def _captured(self, given: Given, signature: Signature) -> CallProgram:
        captured = self._capture(given, signature)
        self._check_alike(captured)
        for stored in captured.stored:
            stored.leave_word()
        rounds = self._rounds(captured, signature)
        return self._add(signature, captured, self._agreed(rounds), rounds)

    def _rounds(self, captured: Captured, signature: Signature) -> Rounds:
        """As few as have at most as many rows as a planned one; where the call cannot be in rounds, it is in one."""
        rows, names = batch_size(captured.whole), captured.returned.names
        count = fewest_rounds(rows, batch_size(self._plan.graph), self._plan.microbatches)
        try:
            if count > 1 and any(has_gradient for *_, has_gradient in signature.inputs):
                raise NoRoundsError("an input has a gradient", do="plan without rounds")
            return in_rounds(captured.whole, count, names)
        except NoRoundsError as error:
            if any(signature.mode):
                warnings.warn(
                    InOneRoundWarning(f"a batch of {rows} rows is computed at once: {error.what}"), stacklevel=2
                )
            return in_rounds(captured.whole, 1)

    def _add(self, signature: Signature, captured: Captured, stored: StoredProgram, rounds: Rounds) -> CallProgram:
        executor = self._compile(stored, tuple(dict.fromkeys(captured.returned.names)))
        made = CallProgram(stored.program, captured.returned, captured.has_loss, captured.reads, executor, rounds)
        self._calls.setdefault(signature, []).append(made)
        return made

    def why_anew(self, signature: Signature) -> str:
        """Why there is no program for this call."""
        known = self._calls.get(signature)
        return f"other than before: {known[-1].reads.changed()}" if known else "not known yet"

    def _check_alike(self, captured: Captured) -> None:
        """All ranks must have captured the same: what forward reads may be set on one rank alone."""
        if self._side is None:
            return
        mine = {"the graph": captured.whole.fingerprint, **captured.reads.facts}
        told: list[dict[str, str]] = [mine] * len(self._world.ranks)
        with waiting("what all ranks captured"):
            dist.all_gather_object(told, mine, group=self._side)
        if all(one == mine for one in told):
            return
        read = odd_ones({rank: {**one, "the graph": ""} for rank, one in zip(self._world.ranks, told, strict=True)})
        raise WorldError(
            f"ranks captured different programs: {read or 'their graphs differ'}",
            where=f"rank {self._world.rank}",
            do="set what forward reads (attributes, variables of the script, hooks) alike on every rank",
        )

    def _check_room(self, signature: Signature) -> None:
        known = self._calls.get(signature, [])
        if len(known) >= MOST_READS:
            raise TrainingError(
                f"forward or the loss reads what changes again and again: {known[-1].reads.changed()}",
                where=f"rank {self._world.rank}",
                do="pass it to forward as an argument (a number that varies becomes an input), or make it a buffer",
            )
        if len(self._calls) >= MOST_PROGRAMS:
            raise BatchError(
                f"this is the {MOST_PROGRAMS + 1}th different call, and each takes a program: {signature}",
                where=f"rank {self._world.rank}",
                do="pad batches to a few lengths: lopsided.shard(loader, pm, pad=...)",
            )

    def _agreed(self, rounds: Rounds) -> StoredProgram:
        """What rank 0 chooses, on every rank. Without bystanders: they wait for the loss."""
        plan = replace(self._plan, microbatches=rounds.count)
        text = from_first(lambda: str(stored_program(rounds.graph, plan)), self._side, self._world.ranks[0])
        return parse_stored_program(text, rounds.graph)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _capture(self, given: Given, signature: Signature) -> Captured:
        """The model captured for this call, on tensors without memory."""
        model, device = self._model[0], self._world.device
        with FakeTensorMode(allow_non_fake_inputs=True):
            whole = {
                name: nn.Parameter(
                    torch.empty(piece.shape, dtype=piece.dtype, device=device), requires_grad=piece.trained
                )
                for name, piece in self._pieces.items()
            }
            tensors = [
                torch.empty(shape, dtype=dtype, device=device, requires_grad=grad)
                for _, shape, dtype, grad in signature.inputs
            ]
        batch = in_form_of(given.batch, *given.rebuild(tensors))
        loss_fn = None if self._form.is_forward_alone(given) else self._loss_fn
        with replaced(model, whole, self._pieces):
            return capture_call(model, batch, loss_fn=loss_fn, needs_loss=False)
