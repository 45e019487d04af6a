"""The steps of a `LightningModule` as calls of one module, and what they do on the side.

In: a `LightningModule` and a batch. Out: `Steps`, whose forward pass is one of its steps, and which returns, beside
what the step returns, what it logs and what it gives to metrics. A step is only run to capture it, so whatever else it
does would be done once and never again: it is refused.

    self.log("loss", loss)               returned, and logged anew in every step with the value of the whole batch
    self.accuracy(logits, target)        its arguments are returned, and the metric is called with the whole of them
    batch_idx, self.current_epoch        refused: they change from step to step
    self.outputs.append(logits)          refused
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from lopsided.errors import InputError
from lopsided.runtime.calls.outputs import gather
from lopsided.runtime.parallel import Parallel

_CONSTANT: tuple[str, ...] = ("training", "validating", "testing", "predicting", "evaluating", "world_size")
_CONSTANT += ("max_epochs", "max_steps", "accumulate_grad_batches")
_MISSING = object()


@dataclass
class Logged:
    """A call of `self.log`. The value is a tensor, a number, the path of a metric, or what a metric gave (`Batch`)."""

    name: str
    value: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class Updated:
    """A call of a metric."""

    path: str
    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class MetricAt:
    path: str


@dataclass(frozen=True)
class Batch:
    """What a metric gives for a batch: known when it is called, by the number of that call."""

    number: int

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse("the value of a metric for one batch is computed with", "log it as it is, or log the metric")


@dataclass
class Seen:
    """What a step did on the side."""

    logged: list[Logged] = field(default_factory=list)
    updated: list[Updated] = field(default_factory=list)


class Steps(nn.Module):
    """`forward(batch, step, count)` is the step of that name, called with a batch and so many arguments in all."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.lightning = module
        self.training = module.training

    def forward(self, batch: Any, step: str, count: int, loader: int | None = None) -> dict[str, Any]:
        module = self.lightning
        with watched(module) as seen:
            given = (batch, Unknown("batch_idx"), loader)[:count]
            returned = getattr(module, step)(*given)
        loss, rest = _split(returned)
        if step == "training_step" and loss is None:
            _refuse("training_step returns no loss", "return a scalar, or a dict with 'loss'")
        made = {"loss": loss, "rest": rest, "logged": seen.logged, "updated": seen.updated}
        # A graph ends in a number, also that of a step which only feeds metrics.
        return made if loss is not None else made | {"nothing": torch.zeros((), device=_device_of(batch))}


def _split(returned: Any) -> tuple[Tensor | None, Any]:
    if isinstance(returned, Tensor) and returned.numel() == 1 and returned.is_floating_point():
        return returned, None
    if isinstance(returned, Mapping) and isinstance(returned.get("loss"), Tensor):
        return returned["loss"], {key: value for key, value in returned.items() if key != "loss"}
    return None, returned


def _device_of(batch: Any) -> torch.device | None:
    return next((leaf.device for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)), None)


def replay(module: Any, pm: Parallel, made: Mapping[str, Any], rows: int) -> Any:
    """Do on the side what a step does, with what it made; return what it returns."""

    values = [
        getattr(module.get_submodule(one.path), one.method)(*whole(one.args, pm), **whole(one.options, pm))
        for one in made["updated"]
    ]
    for one in made["logged"]:
        value = one.value
        if isinstance(value, MetricAt):
            value = module.get_submodule(value.path)
        elif isinstance(value, Batch):
            value = values[value.number]
        options = one.options | {"sync_dist": False}  # it is of the whole batch
        if options.get("batch_size") is None:
            options["batch_size"] = rows or None
        module.log(one.name, value, *one.args, **options)
    loss, rest = made["loss"], made["rest"]
    return rest if loss is None else loss if rest is None else {"loss": loss, **rest}


def whole(given: Any, pm: Parallel) -> Any:
    """The tensors in it, with the rows of all processes."""
    return pytree.tree_map_only(Tensor, lambda part: gather(part.detach(), pm) if part.dim() else part, given)


# While a step is captured


@contextmanager
def watched(module: nn.Module) -> Iterator[Seen]:
    """Inside, `self.log` and metrics note that they were called, and what changes from step to step is refused."""
    seen = Seen()
    paths = {id(part): path for path, part in module.named_modules()}
    put: list[tuple[dict[str, Any], str, Any]] = []

    def replace(owner: nn.Module, name: str, value: Any) -> None:
        put.append((owner.__dict__, name, owner.__dict__.get(name, _MISSING)))
        owner.__dict__[name] = value

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        known = MetricAt(paths[id(value)]) if isinstance(value, Metric) else value
        seen.logged.append(Logged(name, known, args, options))

    def noted(path: str, method: str) -> Callable[..., Batch]:
        def call(*args: Any, **options: Any) -> Batch:
            seen.updated.append(Updated(path, method, args, options))
            return Batch(len(seen.updated) - 1)

        return call

    replace(module, "log", log)
    replace(module, "_trainer", _Guard(module.__dict__.get("_trainer")))
    inside: list[str] = []
    for path, part in module.named_modules():
        if isinstance(part, Metric | MetricCollection) and not any(path.startswith(f"{one}.") for one in inside):
            inside.append(path)
            for method in ("forward", "update"):
                replace(part, method, noted(path, method))
            for method in ("compute", "reset"):
                replace(part, method, _refused(f"a step calls {path}.{method}", "do it in on_..._epoch_end"))
    before = _sizes(module)
    try:
        yield seen
    finally:
        for attributes, name, value in reversed(put):
            if value is _MISSING:
                del attributes[name]
            else:
                attributes[name] = value
    if changed := [name for name, size in _sizes(module).items() if before.get(name) != size]:
        _refuse(
            f"a step adds to {changed[0]}, which would be done once and not in every step",
            "log it, give it to a metric, or return it and add it in on_train_batch_end or on_validation_batch_end",
        )


def _sizes(module: nn.Module) -> dict[str, int]:
    own = {*vars(nn.Module())}
    return {
        f"self.{path}.{key}" if path else f"self.{key}": len(value)
        for path, part in module.named_modules()
        if not isinstance(part, Metric | MetricCollection)
        for key, value in vars(part).items()
        if key not in own and isinstance(value, list | dict | set | deque)
    }


def _refuse(what: str, do: str) -> NoReturn:
    raise InputError(what, where="a step of the LightningModule", do=do)


def _refused(what: str, do: str) -> Callable[..., NoReturn]:
    return lambda *args, **options: _refuse(what, do)


class _Guard:
    """Takes the place of the trainer: what does not change may be read."""

    __slots__ = ("_trainer",)

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _CONSTANT:
            _refuse(
                f"a step uses the trainer's {name}, which is captured once and may change",
                "use it in a hook (on_train_batch_start, on_train_epoch_end), or keep what the step needs of it in a "
                "buffer that a hook writes to",
            )
        return getattr(self._trainer, name)


class Unknown:
    """Takes the place of a number that changes from step to step: nothing can be done with it but hand it on."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._use()

    def _use(self, *args: Any) -> NoReturn:
        _refuse(
            f"a step uses {self.__dict__['_name']}, which changes from step to step",
            "use it in a hook such as on_train_batch_start, or put what depends on it into the batch",
        )


for _name in ("bool", "int", "index", "float", "add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod", "eq", "ne"):
    setattr(Unknown, f"__{_name}__", cast(Any, Unknown._use))
for _name in ("floordiv", "rfloordiv", "truediv", "rtruediv", "lt", "le", "gt", "ge", "hash", "str", "format", "neg"):
    setattr(Unknown, f"__{_name}__", cast(Any, Unknown._use))
