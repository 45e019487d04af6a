"""Rules by experiment, for ops that nobody has described.

In: a `Call`. Out: the rules that held when they were tried. Every way to cut one length out of the operands and
results is a hypothesis; it is tried on small inputs with unequal pieces, forward and backward, and kept if the joined
values are those of one device. The same enumeration tells the validator which valid rules a line
in the table does not derive.

Most hypotheses are wrong, and a kernel given operands that do not fit may do worse than raise. So the experiment runs
in a forked child: a hypothesis at which the child dies is refuted, and the model's process goes on.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import select
import signal
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lopsided.ir.graph import DTYPE_NAMES, Arg, Ref, Value, signature
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import TOLERANCE, call_op, listed, widen_node, widen_value
from lopsided.ir.placement import I, P, Placement, R, S
from lopsided.ops.op import Call
from lopsided.ops.trial import edge_operands, random_operands, try_rule

# An op with many tensors has exponentially many hypotheses; so many are tried.
MOST_HYPOTHESES = 2000
_LARGE = 1 << 18
_PATIENCE_S = 60.0
_MOST_DEATHS = 50
_known: dict[object, tuple[Rule, ...]] = {}


def whole_rules(call: Call) -> tuple[Rule, ...]:
    return tuple(Rule((p,) * len(call.operands), (p,) * len(call.node.results)) for p in (I, R))


def rules_by_experiment(call: Call) -> tuple[Rule, ...]:
    """All rules that hold for this call, the whole ones first; remembered by the call's signature."""
    key = signature(call.node, {value.name: value for value in call.operands})
    if key not in _known:
        _known[key] = (*whole_rules(call), *_found(call))
    return _known[key]


def _found(call: Call) -> tuple[Rule, ...]:
    small, sets = _shrunk(Call(widen_node(call.node), tuple(map(widen_value, call.operands))))
    return held(small, sets, tuple(itertools.islice(hypotheses(small), MOST_HYPOTHESES))) if sets else ()


def held(call: Call, sets: Sequence[list[Tensor]], candidates: Sequence[Rule]) -> tuple[Rule, ...]:
    """Those of the candidates that hold: on every set of operands, because an op may be linear for small numbers only,
    and on zeros, masked rows and other values at the edge, which are put into the first.

    One at which the child dies or hangs does not hold; the next child goes on.
    """
    verdicts = b""
    deaths = 0
    while len(verdicts) < len(candidates) and deaths < _MOST_DEATHS:
        verdicts += _told_by_child(call, sets, candidates[len(verdicts) :])
        if len(verdicts) < len(candidates):
            verdicts += b"0"
            deaths += 1
    return tuple(rule for rule, verdict in zip(candidates, verdicts, strict=False) if verdict == ord("1"))


def _told_by_child(call: Call, sets: Sequence[list[Tensor]], candidates: Sequence[Rule]) -> bytes:
    """A "1" or "0" for each candidate, from a child; fewer if it did not live to say."""
    # Where there is a GPU, autograd refuses to run in a fork: better unguarded than not at all.
    if not hasattr(os, "fork") or torch.cuda.is_available():
        return b"".join(_verdicts(call, sets, candidates))
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns about forks of processes with threads; this child takes one thread and no lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _be_silent()
            gc.disable()  # it would write to every object of the parent, and so copy them
            torch.set_num_threads(1)
            for verdict in _verdicts(call, sets, candidates):
                os.write(writing, verdict)
        finally:
            os._exit(0)
    os.close(writing)
    told = _read(reading, child)
    os.waitpid(child, 0)
    return told


def _verdicts(call: Call, sets: Sequence[list[Tensor]], candidates: Sequence[Rule]) -> Iterator[bytes]:
    edges: list[list[Tensor]] | None = None
    for rule in candidates:
        good = all(holds(call, operands, rule) for operands in sets)
        if good:
            edges = [*edge_operands(call, sets[0]).values()] if edges is None else edges
            good = all(holds(call, operands, rule, edge=True) for operands in edges)
        yield b"1" if good else b"0"


def _be_silent() -> None:
    """A kernel that dies may say so at length; here that is an answer like any other."""
    faulthandler.disable()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _read(reading: int, child: int) -> bytes:
    """What the child has to say; a kernel that hangs is ended."""
    told = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], _PATIENCE_S)[0]:
            part = pipe.read(1 << 16)
            if not part:
                return told
            told += part
    os.kill(child, signal.SIGKILL)
    return told


def holds(call: Call, operands: list[Tensor], rule: Rule, edge: bool = False) -> bool:
    """Two devices forward first, because most hypotheses fail there; then three with other pieces, with gradients."""
    if try_rule(call, operands, rule, (0.6, 0.4), backward=False, edge=edge) > TOLERANCE:
        return False
    return all(
        try_rule(call, operands, rule, shares, seed=7, edge=edge) <= TOLERANCE
        for shares in ((0.5, 0.2, 0.3), (0.25, 0.75))
    )


def hypotheses(call: Call) -> Iterator[Rule]:
    """Each way to cut one length, or to pass partial sums, through this call."""
    summable = [value.dtype != "bool" for value in call.operands]
    lengths = sorted({size for shape in (*call.shapes, *call.results) for size in shape if size > 1})
    result_sums = all(value.dtype != "bool" for value in call.node.results)
    sums = [[R, P] if ok else [R] for ok in summable]
    if result_sums:
        for needs in itertools.product(*sums):
            if P in needs:
                yield Rule(tuple(needs), (P,) * len(call.results))
    for length in lengths:
        cuts = [[R, *_cuts(value, length)] for value in call.operands]
        outs = [[*_cuts(value, length)] for value in call.node.results]
        for needs in itertools.product(*cuts):
            if not any(need.is_shard for need in needs):
                continue
            for gives in itertools.product(*outs):
                yield Rule(tuple(needs), tuple(gives))
        if result_sums:
            mixed = [cut + ([P] if ok else []) for cut, ok in zip(cuts, summable, strict=True)]
            for needs in itertools.product(*mixed):
                if any(need.is_shard for need in needs):
                    yield Rule(tuple(needs), (P,) * len(call.results))


def _cuts(value: Value, length: int) -> list[Placement]:
    return [S(d) for d, size in enumerate(value.shape) if size == length]


def _shrunk(call: Call) -> tuple[Call, list[list[Tensor]]]:
    """The call on sizes small enough to try many times, or as it is where it cannot be shrunk; with operands for it."""
    elements = sum(value.elements for value in call.operands)
    if elements > _LARGE:
        sizes = sorted({size for shape in (*call.shapes, *call.results) for size in shape if size > 1})
        # Different sizes stay different and in order, and equal ones equal.
        small = _resized(call, {size: min(size, 3 + k) for k, size in enumerate(sizes)})
        if small is not None and (sets := random_operands(small)):
            return small, sets
    return call, random_operands(call) if elements <= 64 * _LARGE else []


def _resized(call: Call, smaller: dict[int, int]) -> Call | None:
    def resize(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(resize(part) for part in arg)
        return smaller.get(arg, arg) if isinstance(arg, int) and not isinstance(arg, bool) else arg

    operands = tuple(replace(v, shape=tuple(smaller.get(s, s) for s in v.shape)) for v in call.operands)
    node = replace(
        call.node,
        args=tuple(arg if isinstance(arg, Ref) else resize(arg) for arg in call.node.args),
        kwargs=tuple((key, resize(arg)) for key, arg in call.node.kwargs),
    )
    try:
        meta = [torch.empty(v.shape, dtype=v.torch_dtype, device="meta") for v in operands]
        made = call_op(node, meta, torch.device("meta"))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    results = tuple(
        replace(value, shape=tuple(out.shape), dtype=DTYPE_NAMES[out.dtype])
        for value, out in zip(node.results, listed(made), strict=True)
    )
    return Call(replace(node, results=results), operands)
