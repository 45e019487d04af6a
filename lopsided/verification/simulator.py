"""Any program on N simulated devices, in one process, with gradients: the executor of a run, over threads.

In: a `Program`, the model and batch it was captured from, shares. Out: `Simulation` — loss, every parameter's gradient
and every changed buffer, joined from the devices. One device is the special case of a single share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lopsided.capturing.eager_check import tensors_of
from lopsided.comm.communicator import Communicator
from lopsided.comm.in_process import run_ranks
from lopsided.comm.redistribute import Redistributor
from lopsided.executor.executor import Executor
from lopsided.executor.gradients import Gradients
from lopsided.executor.rounds import run_rounds
from lopsided.ir.op_call import default_dtype_of
from lopsided.ir.placement import Placement, Shares, check_shares, join_pieces, pieces_of, take_piece
from lopsided.ir.program import Program, check_facts
from lopsided.ops.simulated_devices import SeededRandomness
from lopsided.ops.trial import relative_error
from lopsided.schedule.decisions import Decisions
from lopsided.schedule.lower import lower
from lopsided.schedule.rounds import Rounds
from lopsided.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the devices computed together. `spread` is how far, relatively, replicas are apart that should be
    equal."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    spread: float


def simulate(
    program: Program,
    model: nn.Module,
    batch: object,
    shares: Sequence[float] | Shares,
    *,
    seed: int = 0,
    decisions: Decisions | None = None,
    kinds: Sequence[int] = (),
    rounds: Rounds | None = None,
    expected: float = 1.0,
) -> Simulation:
    """Run `program` on one simulated device per share: forward, backward, and join the results.

    Of a batch in `rounds` it is the program of one; those before the last go backward by the gradient that is
    `expected` of the loss.

    `kinds` are the numbers of the devices' kinds, where `decisions` tell some apart; otherwise each is one of its own.
    Random ops draw from `seed`: what a device draws for its piece is the piece of what one device would draw. Whether
    the rules of the program are rules of its ops is for `check_program` to say.
    """
    fractions = shares if isinstance(shares, Shares) else Shares(check_shares(shares))
    check_facts(program)
    with torch.inference_mode(False), torch.enable_grad():
        sources = tensors_of(rounds.whole if rounds is not None else program.graph, model, batch)
        device = next((tensor.device for tensor in sources.values()), torch.device("cpu"))
        # Every call of torch takes longer where a default device is set, if only to what it is anyway.
        with nullcontext() if device == torch.get_default_device() else device:
            schedule = lower(program, decisions)
            number_of_rounds = schedule.decisions.microbatches
            by_round = [sources] if rounds is None else [_of_round(rounds, sources, k) for k in range(number_of_rounds)]
            numbers = kinds or range(len(fractions))
            with default_dtype_of(program.graph):
                ranks = run_ranks(
                    len(fractions),
                    device,
                    lambda communicator: _run_rank(
                        schedule, by_round, expected, fractions, seed, communicator, device, numbers[communicator.rank]
                    ),
                )
    return _joined(program, ranks)


@dataclass(frozen=True, slots=True)
class _RankRun:
    """What one device has in the end: the loss, its pieces of the gradients, the new buffers."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def _of_round(rounds: Rounds, sources: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """The leaves of a round, whole."""
    device = next((tensor.device for tensor in sources.values()), torch.device("cpu"))
    ahead = rounds.compute_ahead({name: sources[name] for name in rounds.needed_ahead}, device)
    cut = {leaf: at for leaf, _, at in rounds.precomputed}
    return {
        leaf.value.name: rounds.of_round(ahead[leaf.value.name], cut[leaf.value.name], number)
        if leaf.kind == "precomputed"
        else rounds.of_round(sources[leaf.value.name], rounds.placed[leaf.value.name], number)
        for leaf in rounds.graph.leaves
    }


def _run_rank(
    schedule: Schedule,
    by_round: Sequence[Mapping[str, Tensor]],
    expected: float,
    shares: Shares,
    seed: int,
    communicator: Communicator,
    device: torch.device,
    kind: int,
) -> _RankRun:
    parameters, program = dict[str, nn.Parameter](), schedule.program
    placements = dict(program.leaves)

    def leaves_of(number: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for leaf in program.graph.leaves:
            name = leaf.value.name
            if leaf.kind == "parameter" and leaf.target in parameters:
                found[name] = parameters[leaf.target]
                continue
            # Every device gets memory of its own.
            piece = _piece(by_round[number][name], placements[name], shares, communicator.rank).clone()
            found[name] = piece
            if leaf.kind == "parameter":
                found[name] = parameters[leaf.target] = nn.Parameter(piece, requires_grad=leaf.value.grad)
        return found

    leaves_of(0)  # which makes the parameters
    exchange = Redistributor(communicator, shares, communicator.network)
    gradients = Gradients(exchange)
    executor = Executor(schedule, exchange, gradients, SeededRandomness(seed, shares), parameters, device, kind=kind)
    with _each_cast_its_own():
        upstream = torch.tensor(expected, dtype=torch.float64, device=device)
        ran = run_rounds(executor, gradients, parameters.values(), leaves_of, upstream)
        last = ran.rounds[-1]
        if last.loss.requires_grad:
            ran.taken_over(gradients, torch.ones((), device=device))
            last.loss.reshape(()).backward()
            gradients.finish()
    trained = {target: parameter for target, parameter in parameters.items() if parameter.requires_grad}
    found = {target: torch.zeros_like(p) if p.grad is None else p.grad for target, p in trained.items()}
    return _RankRun(ran.loss.reshape(()), found, last.updates)


@contextmanager
def _each_cast_its_own() -> Iterator[None]:
    """Without autocast's cache. With it, gradients of the uses of a weight are added up in the narrow dtype, and what
    is compared at the last digits would depend on which uses share a cast."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _piece(whole: Tensor, placement: Placement, shares: Shares, rank: int) -> Tensor:
    if not placement.is_shard:
        return whole
    return take_piece(whole, placement, pieces_of(placement, whole.shape, shares), rank)


def _joined(program: Program, ranks: Sequence[_RankRun]) -> Simulation:
    placements = dict(program.leaves)
    replicas = [[rank.loss for rank in ranks]]
    replicas += [[rank.buffers[name] for rank in ranks] for name in ranks[0].buffers]
    gradients = {}
    for leaf in program.graph.parameters:
        if not leaf.value.grad:
            continue
        placement, parts = placements[leaf.value.name], [rank.gradients[leaf.target] for rank in ranks]
        if placement.is_shard:
            gradients[leaf.target] = join_pieces(parts, placement)
        else:
            gradients[leaf.target] = parts[0]
            replicas.append(parts)
    return Simulation(ranks[0].loss, gradients, ranks[0].buffers, max(map(_spread, replicas)))


def _spread(replicas: Sequence[Tensor]) -> float:
    """How far, relatively, values that should be equal are apart."""
    return max((relative_error(part, replicas[0]) for part in replicas[1:]), default=0.0)
