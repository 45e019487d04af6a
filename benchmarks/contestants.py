"""What trains in the proof: each contestant is the same model, set up the way its users do, a step at a time.

In: an `Entry` (who, and with which rows or which plan) and this rank's device. Out: an object with `step()`, which
trains one step on the same global batch and gives what this rank adds to the global loss.

    ddp         DistributedDataParallel on this rank's rows. Gradients are averaged over ranks, so each rank's loss is
                weighted such that the average is the gradient of the global loss, whatever the rows
    fsdp2       fully_shard on every block and then on the whole model, equal rows
    deepspeed   ZeRO stage 1 or 3, equal rows, torch's AdamW; only where `import deepspeed` works
    plan        lopsided.parallelize by a plan
    alone       the fastest rank with all rows; the others rest

Each may be compiled, as one would: DistributedDataParallel and one device by `torch.compile` around the module, FSDP2
block by block, a plan by `parallelize(compile=True)`. Otherwise a plan runs as it comes, which is compiled on a GPU.

All train with AdamW in float32 (under autocast where the model says so), begin with the same weights, and are given the
same batch, so losses can be compared step by step.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lopsided.comm.world import backend_among, tell
from lopsided.models import by_name as models
from lopsided.planner.plan_file import load_plan
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parallelizing import parallelize

SEED = 0
LEARNING_RATE = 1e-4
IGNORED = -100
"""The label that cross_entropy leaves out."""

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with its global batch. `sums` says that its loss is the sum over rows; else it is their mean."""

    name: str
    spec: str
    sums: bool = False
    autocast: str = ""  # "bf16", or nothing

    def built(self, device: torch.device) -> tuple[nn.Module, Batch]:
        """The same everywhere and every time."""
        torch.manual_seed(SEED)
        model, batch = models.load(self.spec)
        model.to(device)
        return model, {key: value.to(device) for key, value in batch.items() if isinstance(value, Tensor)}

    @contextlib.contextmanager
    def casting(self, device: torch.device) -> Iterator[None]:
        if not self.autocast:
            yield
            return
        with torch.autocast(device.type, {"bf16": torch.bfloat16}[self.autocast]):
            yield


@dataclass(frozen=True, slots=True)
class Entry:
    """Who takes part, how it is set up, and with what."""

    name: str
    way: str
    rows: tuple[int, ...] = ()  # of each rank
    plan: str = ""  # a file
    stage: int = 0  # of ZeRO
    compiled: bool = False


class Contestant:
    """Trains a step at a time. `active` on ranks that have something to do."""

    active = True

    def __init__(self, subject: Subject, device: torch.device, trained: nn.Module, batch: Batch) -> None:
        self.subject, self.device, self.trained, self.batch = subject, device, trained, batch
        self.optimizer = torch.optim.AdamW(trained.parameters(), lr=LEARNING_RATE)

    def loss(self) -> Tensor:
        with self.subject.casting(self.device):
            loss: Tensor = self.trained(**self.batch)
        return loss

    def step(self) -> Tensor:
        """One step; what this rank adds to the global loss."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def waited_s(self) -> float:
        """How long this rank stood for others, in all, where that is known."""
        return 0.0


class _OwnRows(Contestant):
    """Of each rank its rows of the batch, and gradients that are averaged over ranks."""

    def __init__(self, subject: Subject, device: torch.device, rows: Sequence[int], trained: nn.Module, batch: Batch):
        rank = dist.get_rank()
        first = sum(rows[:rank])
        own = {k: v[first : first + rows[rank]] for k, v in batch.items()}
        super().__init__(subject, device, trained, own)
        self.part = 1.0 if subject.sums else counted(own["labels"]) / counted(batch["labels"])

    def weighted(self) -> tuple[Tensor, Tensor]:
        """What this rank adds to the global loss, and that times the ranks over which gradients are averaged."""
        own = self.loss() * self.part
        return own, own * dist.get_world_size()

    def step(self) -> Tensor:
        own, averaged = self.weighted()
        averaged.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return own.detach()


def counted(labels: Tensor) -> int:
    """Over how many labels a mean is taken: a part of the rows has not the same part of them."""
    return int((labels != IGNORED).sum())


def _ddp(subject: Subject, entry: Entry, device: torch.device) -> Contestant:
    model, batch = subject.built(device)
    trained: nn.Module = DistributedDataParallel(model, process_group=_group(device))
    return _OwnRows(subject, device, entry.rows, _compiled(trained, entry), batch)


def _compiled(module: nn.Module, entry: Entry) -> nn.Module:
    """In place: what it is called and what it holds stay as they are."""
    if entry.compiled:
        module.compile()
    return module


def _fsdp(subject: Subject, entry: Entry, device: torch.device) -> Contestant:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, batch = subject.built(device)
    mesh = DeviceMesh.from_group(_group(device), device.type)
    blocks = blocks_of(model)
    for block in blocks:
        fully_shard(_compiled(block, entry), mesh=mesh)
    fully_shard(model if blocks else _compiled(model, entry), mesh=mesh)
    return _OwnRows(subject, device, entry.rows, model, batch)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What is gathered together: the members of every list of modules that has parameters."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    inside = {id(other) for one in lists for other in one.modules() if other is not one}
    return [
        child
        for one in lists
        if id(one) not in inside
        for child in one.children()
        if any(True for _ in child.parameters())
    ]


class _DeepSpeed(_OwnRows):
    """The engine has its own backward pass and its own step."""

    def __init__(self, subject: Subject, device: torch.device, entry: Entry) -> None:
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        # It is no dependency, and is not there for everyone.
        import deepspeed  # type: ignore[import-not-found]

        model, batch = subject.built(device)
        super().__init__(subject, device, entry.rows, model, batch)
        # Its own linear layer would take the place of torch's for everyone in this process.
        settings = {
            "train_micro_batch_size_per_gpu": entry.rows[0],
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": entry.stage, "memory_efficient_linear": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # nobody else clips; its default is 1
            "steps_per_print": 10**9,
        }
        engine: Any = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=settings, dist_init_required=False
        )[0]
        self.trained = self.engine = engine

    def step(self) -> Tensor:
        own, averaged = self.weighted()
        self.engine.backward(averaged)
        self.engine.step()
        return own.detach()


class _ByPlan(Contestant):
    """Ours. Its loss is the global one, so one rank tells it."""

    trained: Parallel

    def __init__(self, subject: Subject, entry: Entry, device: torch.device) -> None:
        model, batch = subject.built(device)
        with subject.casting(device):
            plan = load_plan(entry.plan)
            parallel = parallelize(model, batch, plan, device=device, check_every=0, compile=entry.compiled or None)
        super().__init__(subject, device, parallel, batch)
        self.active = parallel.world.takes_part

    def step(self) -> Tensor:
        loss = super().step()
        return loss if dist.get_rank() == self.trained.world.ranks[0] else torch.zeros_like(loss)

    @property
    def waited_s(self) -> float:
        return self.trained.communicator.waited_s if self.trained.communicator is not None else 0.0


class _Resting(Contestant):
    """A rank that has nothing to do."""

    active = False

    def __init__(self) -> None:
        pass

    def step(self) -> Tensor:
        return torch.zeros(())


def _alone(subject: Subject, entry: Entry, device: torch.device) -> Contestant:
    if not entry.rows[dist.get_rank()]:
        return _Resting()
    model, batch = subject.built(device)
    return Contestant(subject, device, _compiled(model, entry), batch)


WAYS: dict[str, Callable[[Subject, Entry, torch.device], Contestant]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp,
    "deepspeed": lambda subject, entry, device: _DeepSpeed(subject, device, entry),
    "plan": _ByPlan,
    "alone": _alone,
}


def enter(subject: Subject, entry: Entry, device: torch.device) -> Contestant | str:
    """The contestant, or on every rank why one of them cannot have it."""
    made: Contestant | None = None
    trouble = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = WAYS[entry.way](subject, entry, device)
    except Exception as error:
        # Whatever it is, the others go on without this contestant.
        trouble = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, trouble)
    troubles = [one for one in told if one]
    if troubles or made is None:
        return troubles[0] if troubles else "nothing was made"
    return made


_groups: dict[str, Any] = {}


def _group(device: torch.device) -> Any:
    """What we talk over, everyone talks over; on CPUs that is what there is anyway."""
    if device.type != "cuda":
        return dist.group.WORLD
    backend = backend_among(tell(device)).name
    if backend not in _groups:
        _groups[backend] = dist.new_group(backend=backend)
    return _groups[backend]
