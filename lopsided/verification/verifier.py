"""Proof by trial: random programs on unequal simulated devices against one device, in float64.

In: a model, a batch, shares. Out: `Verification` — the worst relative error over loss, gradients and buffers, the worst
program, and how often every placement and conversion was used. First the captured graph is compared with the model
itself, then every program with the graph on one device.

In a random program (`random_program`) any rule may follow any other, with whatever conversions that takes, detours
included, and shares may be zero. `compiled`, stretches of it run as functions that Inductor makes; one device never
does.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lopsided.capturing.call import LossFn, flatten_batch, in_form_of, loss_of
from lopsided.capturing.capture_graph import check_model, trace, without_unused
from lopsided.capturing.eager_check import tensors_of
from lopsided.capturing.saved_tensors import record_saved
from lopsided.errors import ModelError
from lopsided.executor.compiled import Made, made_so_far
from lopsided.ir.graph import Graph, Node, Value
from lopsided.ir.notation import Rule
from lopsided.ir.op_call import TOLERANCE, in_float64, run_graph
from lopsided.ir.placement import I, P, Placement, R, check_shares
from lopsided.ir.program import Chain, Program, RuleBook, Step, check_program, one_device
from lopsided.ops.derive import derive_rules
from lopsided.ops.trial import relative_error
from lopsided.schedule.decisions import Decisions
from lopsided.schedule.stretches import most_nodes
from lopsided.verification.simulator import Simulation, simulate

# With more parameters than this, memory is looked at before anything is run.
_LARGE = 2_000_000


@dataclass(frozen=True, slots=True)
class Trial:
    """One program, its shares, and the worst of its errors with where it was."""

    program: Program
    shares: tuple[float, ...]
    error: float
    where: str


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of a verification."""

    graph: Graph
    capture_error: float
    capture_tolerance: float
    trials: tuple[Trial, ...]
    placements: Mapping[str, int]
    conversions: Mapping[str, int]
    rules: Mapping[str, int]
    by_experiment: tuple[str, ...]
    functions: Made  # that were compiled

    @property
    def worst(self) -> Trial:
        return max(self.trials, key=lambda trial: trial.error)

    @property
    def passed(self) -> bool:
        return self.capture_error <= self.capture_tolerance and all(trial.error <= TOLERANCE for trial in self.trials)


@torch.inference_mode(False)
@torch.enable_grad()
def verify(
    model: nn.Module,
    batch: object,
    *,
    shares: Sequence[float] | None = None,
    devices: int = 3,
    programs: int = 50,
    seed: int = 0,
    loss_fn: LossFn | None = None,
    compiled: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Verification:
    """Run random programs of `model` and compare. Every second one has the given shares, the others random ones.

    `compiled`, they run as they do with `parallelize(compile=True)`, and two of every four gather parameters again.
    """
    first = check_shares(shares) if shares is not None else None
    check_model(model, loss_fn)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("no parameter of the model requires a gradient", do="train at least one parameter")
    if sum(p.numel() for p in model.parameters()) > _LARGE:
        check_memory(trace(model, batch, loss_fn=loss_fn), len(first or ()) or devices)
    model64, batch64 = copied(model).double(), with_tensors(batch, _double)
    try:
        _run_model(model64, batch64, loss_fn)
    except Exception:
        # A model may insist on a dtype. The graph is widened all the same; only the model itself stays as it is. One
        # that does not run at all is refused below, with its line.
        model64, batch64 = model, batch
    traced = record_saved(trace(model64, batch64, loss_fn=loss_fn))
    graph = without_unused(traced)
    capture_error = _capture_error(traced, model64, batch64, loss_fn, seed)
    wide = in_float64(graph)
    book = derive_rules(wide)
    reference = simulate(one_device(wide), model64, batch64, (1.0,), seed=seed)
    _check_finite(reference)
    state = random.Random(seed)
    used: dict[str, Counter[str]] = {"placements": Counter(), "conversions": Counter(), "rules": Counter()}
    trials, before = [], made_so_far()
    for k in range(programs):
        program = random_program(book, state, calm=calm_of(k, compiled=compiled))
        check_program(program, book)
        fractions = first if first is not None and k % 2 == 0 else random_shares(len(first or ()) or devices, state)
        most = most_nodes(len(fractions), len(wide.nodes)) if compiled else 0
        decisions = Decisions(stretch=most, regather=compiled and k % 4 > 1)
        found = simulate(program, model64, batch64, fractions, seed=seed, decisions=decisions)
        error, where = compare(found, reference)
        trials.append(Trial(program, fractions, error, where))
        _count(program, used)
        progress(k + 1)
    ops = tuple(dict.fromkeys(node.op for node in book.by_experiment))
    # What the model insists to compute in float32 is compared in float32. The kernels are the same, but gradients of
    # what is written in place are added up in another order.
    tolerance = TOLERANCE if model64 is not model and not _has_narrow_gradients(graph) else 1e-5
    return Verification(
        graph,
        capture_error,
        tolerance,
        tuple(trials),
        used["placements"],
        used["conversions"],
        used["rules"],
        ops,
        made_so_far().since(before),
    )


def _has_narrow_gradients(graph: Graph) -> bool:
    """Whether something between a parameter and the loss is narrower than float64."""
    trained = {leaf.value.name for leaf in graph.parameters if leaf.value.grad}
    for node in graph.nodes:
        if node.context.grad and not trained.isdisjoint(node.operands):
            floating = [value for value in node.results if value.torch_dtype.is_floating_point]
            if any(value.dtype != "f64" for value in floating):
                return True
            trained.update(value.name for value in floating)
    return False


def _count(program: Program, used: dict[str, Counter[str]]) -> None:
    for step in program.steps:
        used["rules"][step.rule.how] += 1
        used["placements"].update(give.kind for give in step.rule.gives)
    used["placements"].update(placement.kind for _, placement in program.leaves)
    for _, source, to in program.conversions():
        name = f"{source.kind}→{to.kind}" + ("'" if source.is_shard and to.is_shard else "")
        used["conversions"][name] += 1


def suspects(result: Verification) -> list[tuple[str, Rule, int, int]]:
    """Rules that programs which differ have and others have not: op, rule, and how many programs of each kind."""
    failing: Counter[tuple[str, Rule]] = Counter()
    others: Counter[tuple[str, Rule]] = Counter()
    for trial in result.trials:
        used = {(step.node.op, step.rule) for step in trial.program.steps}
        (others if trial.error <= TOLERANCE else failing).update(used)
    ranked = sorted(failing, key=lambda pair: (others[pair] - failing[pair], str(pair)))
    return [(op, rule, failing[op, rule], others[op, rule]) for op, rule in ranked]


def floor_of(expected: Simulation) -> float:
    """A gradient that is nothing but rounding (a key's bias under softmax) is measured against the largest there is."""
    return 1e-5 * max((g.abs().max().item() for g in expected.gradients.values() if g.numel()), default=1.0)


def compare(found: Simulation, expected: Simulation) -> tuple[float, str]:
    """The worst relative error, and what has it."""
    errors = [
        (relative_error(found.loss, expected.loss), "loss"),
        (found.spread, "replicas that should be equal"),
    ]
    floor = floor_of(expected)
    for name, gradient in expected.gradients.items():
        errors.append((relative_error(found.gradients[name], gradient, floor), f"gradient of {name}"))
    largest = max((b.abs().max().item() for b in expected.buffers.values() if b.dtype.is_floating_point), default=1.0)
    for name, buffer in expected.buffers.items():
        errors.append((relative_error(found.buffers[name], buffer, largest * 1e-5), f"buffer {name}"))
    return max(errors, key=lambda pair: pair[0])


def check_memory(graph: Graph, devices: int, *, processes: bool = False) -> None:
    """Refuse before the machine does: every device may hold every value in float64, and its gradient."""
    needed = 2 * devices * sum(value.bytes for value in in_float64(graph).values.values())
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > has:
        raise ModelError(
            f"verifying this model in float64 on {devices} {'processes' if processes else 'simulated devices'} may "
            f"take {needed / 1e9:.0f} GB, and this machine has {has / 1e9:.0f} GB",
            do="choose a smaller batch (--batch) or smaller sizes; rules do not depend on size",
        )


def _check_finite(reference: Simulation) -> None:
    """Nothing can be compared with a number that is none."""
    named = {"loss": reference.loss, **{f"gradient of {name}": g for name, g in reference.gradients.items()}}
    for name, tensor in named.items():
        if not bool(tensor.isfinite().all()):
            raise ModelError(
                f"the {name} is not finite on one device, so there is nothing to compare with",
                do="give a batch on which the model computes finite numbers",
            )


def with_tensors(batch: object, changed: Callable[[Tensor], Tensor]) -> object:
    """A batch of the same form with its tensors changed."""
    tensors, rebuild = flatten_batch(batch)
    return in_form_of(batch, *rebuild([changed(tensor) for tensor in tensors.values()]))


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype.is_floating_point else tensor.clone()


def _run_model(model: nn.Module, batch: object, loss_fn: LossFn | None) -> tuple[nn.Module, Tensor]:
    """A copy of the model after one forward and backward pass, and its loss."""
    eager = copied(model)
    cached = torch.is_autocast_cache_enabled()
    try:
        # With its cache, autocast adds up a weight's gradients in the small dtype.
        torch.set_autocast_cache_enabled(False)
        loss = loss_of(eager, batch, loss_fn)
    finally:
        torch.set_autocast_cache_enabled(cached)
    loss.backward()
    return eager, loss


def _capture_error(graph: Graph, model: nn.Module, batch: object, loss_fn: LossFn | None, seed: int) -> float:
    """How far the captured graph, run op by op in the model's order, is from the model itself."""
    torch.manual_seed(seed)
    try:
        eager, loss = _run_model(model, batch, loss_fn)
    except Exception as error:
        raise ModelError(
            f"{model._get_name()} is captured, but does not run: {type(error).__name__}: {error}",
            do="make model(**batch) and its backward pass run first",
        ) from error
    values: dict[str, Tensor] = {}
    for name, tensor in tensors_of(graph, model, batch).items():
        values[name] = tensor.clone().requires_grad_(graph.values[name].grad)
    leaves = dict(values)
    where = next((value.device for value in values.values()), torch.device("cpu"))
    torch.manual_seed(seed)
    run_graph(graph, values, where)
    if values[graph.loss].requires_grad:
        values[graph.loss].backward()
    found, expected = {}, {}
    for leaf in graph.parameters:
        if leaf.value.grad:
            parameter = eager.get_parameter(leaf.target)
            zero = torch.zeros_like(parameter)
            expected[leaf.target] = zero if parameter.grad is None else parameter.grad
            gradient = leaves[leaf.value.name].grad
            found[leaf.target] = zero if gradient is None else gradient
    buffers = {buffer: values[name].detach() for buffer, name in graph.updates}
    after = {buffer: eager.get_buffer(buffer) for buffer, _ in graph.updates}
    worst, _ = compare(
        Simulation(values[graph.loss].detach().reshape(()), found, buffers, 0.0),
        Simulation(loss.detach().reshape(()), expected, after, 0.0),
    )
    return worst


_DETOUR = 0.15
_CALM = (0.0, 0.7, 0.9, 0.95)
"""Of compiled programs, in turn: where all is left to chance, hardly two nodes follow each other unconverted."""


def calm_of(number: int, *, compiled: bool) -> float:
    return _CALM[number % len(_CALM)] if compiled else 0.0


def random_program(book: RuleBook, state: random.Random, *, calm: float = 0.0) -> Program:
    """A legal program with every choice left to chance; but that so many nodes, of all, take computed values as they
    are, if they can."""
    graph = book.graph
    stored = {leaf.value.name for leaf in graph.parameters}
    facts: dict[str, list[Placement]] = {}
    calm_now = False
    # Every cut the rules know of a value: where detours can lead.
    cuts: dict[str, dict[Placement, None]] = {}
    for node in graph.nodes:
        for rule in book.rules[node.name]:
            for name, need in zip(node.operands, rule.needs, strict=True):
                if need.is_shard:
                    cuts.setdefault(name, {})[need] = None

    def chain_to(value: Value, need: Placement) -> Chain:
        have = facts[value.name]
        if need in have and (calm_now or state.random() < 0.5):
            return (need,)
        chain = [state.choice(have)]
        if state.random() < _DETOUR:
            stops = [I, R, *([P] if value.dtype != "bool" else []), *cuts.get(value.name, ())]
            stop = state.choice(stops)
            if stop != chain[-1]:
                chain.append(stop)
        if chain[-1] != need:
            chain.append(need)
        have += [placement for placement in chain[1:] if placement not in have]
        return tuple(chain)

    leaves = []
    for leaf in graph.leaves:
        placement = state.choice(book.leaves[leaf.value.name])
        leaves.append((leaf.value.name, placement))
        facts[leaf.value.name] = [placement]
    steps = []
    for node in graph.nodes:
        rules = book.rules[node.name]
        calm_now = calm > 0 and state.random() < calm
        if calm_now:
            rules = tuple(rule for rule in rules if _takes_what_is_there(node, rule, facts, stored)) or rules
        rule = _choose(rules, state)
        chains = tuple(chain_to(graph.values[name], need) for name, need in zip(node.operands, rule.needs, strict=True))
        steps.append(Step(node, rule, chains))
        for value, give in zip(node.results, rule.gives, strict=True):
            facts[value.name] = [give]
    calm_now = False
    loss = chain_to(graph.values[graph.loss], I)
    updates = tuple(chain_to(graph.values[name], I) for _, name in graph.updates)
    return Program(graph, tuple(leaves), tuple(steps), loss, updates)


def _takes_what_is_there(
    node: Node, rule: Rule, facts: Mapping[str, Sequence[Placement]], stored: Collection[str]
) -> bool:
    """Without a conversion of anything computed."""
    needs = zip(node.operands, rule.needs, strict=True)
    return all(name in stored or need in facts[name] for name, need in needs)


def _choose(rules: tuple[Rule, ...], state: random.Random) -> Rule:
    """Talking and factor-broadcasting rules are few among many plain ones: give each kind its chance."""
    kinds = list(dict.fromkeys(rule.how for rule in rules))
    kind = state.choice(kinds) if state.random() < 0.3 else None
    return state.choice([rule for rule in rules if kind is None or rule.how == kind])


def random_shares(devices: int, state: random.Random) -> tuple[float, ...]:
    """Unequal shares; every third time one device has nothing to do."""
    weights = [state.uniform(0.1, 1.0) for _ in range(devices)]
    if devices > 1 and state.random() < 1 / 3:
        weights[state.randrange(devices)] = 0.0
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model to run or change, of its own memory, whatever it keeps beside its parameters.

    Tensors that forward computed and left on the module are copied without their history:
    `torch.nn.utils.weight_norm` and `torch.nn.utils.prune` leave `weight` there, and compute it anew in every pass.
    """
    memory: dict[int, object] = {}
    for part in model.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                # As `copy.deepcopy` keeps what it has copied: by the identity of what was copied.
                memory[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, memory)
    except Exception as error:
        raise ModelError(
            f"{model._get_name()} cannot be copied: {error}",
            do="keep locks, files and lists of computed tensors out of the module",
        ) from error


def widened(model: nn.Module) -> nn.Module:
    """The model in float64, complex numbers in complex128: `Module.to(torch.float64)` would drop imaginary parts."""

    def wide(tensor: Tensor) -> Tensor:
        if tensor.dtype.is_floating_point:
            return tensor.double()
        return tensor.to(torch.complex128) if tensor.dtype.is_complex else tensor

    model._apply(wide)
    return model
