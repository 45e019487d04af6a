"""torch.export, with what it would lose put right.

In: a module and its tensors. Out: an `ExportedProgram` whose graph is flat. Seven things export does not tell:

    no_grad inside autocast        one of the two is lost: markers stay where they are  `_flat_regions`
    a torch.autograd.Function      its backward is lost: refused, unless its forward's  `_functions_watched`
    buffers a submodule assigns    the new value is lost: written to the buffer instead `assignments`
    other attributes assigned      tracing tensors are left behind: put back            `_attributes_kept`
    hooks on gradients             they are lost: refused                               `_hooks_watched`
    what is recomputed             torch.utils.checkpoint leaves no trace: nodes marked `region_of`
    batch norm that talks          SyncBatchNorm would: here it is batch norm            `alone`
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx
from torch.distributions import Distribution
from torch.export import ExportedProgram
from torch.fx import traceback
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from lopsided.errors import CaptureError

_QUIET = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


def export_flat(module: nn.Module, tensors: tuple[Tensor, ...]) -> ExportedProgram:
    """The exported program. Gradients are on, whatever surrounds the call: this is a training step."""
    with (
        quiet(),
        _flat_regions(),
        _functions_watched(),
        _hooks_watched(),
        _distributions_unchecked(),
        _checkpoints_marked(),
        _attributes_kept(module),
        _diagonals_masked(),
        alone(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        return torch.export.export(module, tensors, strict=False)


@contextmanager
def _hooks_watched() -> Iterator[None]:
    """A hook on a tensor's gradient would be lost without a word."""

    def refuse(self: Tensor, hook: Callable[..., Any]) -> None:
        raise CaptureError(
            "the model hooks the gradient of a tensor (register_hook), which a captured graph would not call",
            do="write what the hook does to the gradient as an op of the forward pass",
        )

    with patch.object(Tensor, "register_hook", refuse):
        yield


@contextmanager
def _distributions_unchecked() -> Iterator[None]:
    """torch.distributions looks at the values of its arguments, which a trace does not have, to refuse bad ones."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def alone() -> Iterator[None]:
    """In here the model is run as on one device, also in a script for DistributedDataParallel whose batch norms were
    converted to ask the other processes: in every plan they are of the whole batch as they stand."""
    with patch.object(nn.SyncBatchNorm, "forward", _BatchNorm.forward):
        yield


@contextmanager
def _diagonals_masked() -> Iterator[None]:
    """`fill_diagonal_` has no form that returns a new tensor; `masked_fill_` has."""
    plain = Tensor.fill_diagonal_

    def fill_diagonal_(self: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
        if wrap and self.shape[0] > self.shape[1]:
            return plain(self, fill_value, wrap)
        places = torch.meshgrid(*(torch.arange(n, device=self.device) for n in self.shape), indexing="ij")
        return self.masked_fill_(torch.stack([place == places[0] for place in places]).all(0), fill_value)

    with patch.object(Tensor, "fill_diagonal_", fill_diagonal_):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings, no log, no half-made graph on stderr: what matters is in the exception."""
    logs = [logging.getLogger(name) for name in _QUIET]
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


@contextmanager
def _flat_regions() -> Iterator[None]:
    """Without the passes that move no-grad and autocast regions into sub-graphs.

    With torch 2.13, `with autocast(): with no_grad():` comes out of them as autocast alone.
    """

    def unchanged(graph: Any, signature: Any) -> tuple[Any, Any]:
        return graph, signature

    with (
        patch.object(replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", unchanged),
        patch.object(replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", unchanged),
    ):
        yield


# Checkpoints

_REGION = "lopsided.recompute"


@contextmanager
def _checkpoints_marked() -> Iterator[None]:
    """Nodes traced inside torch.utils.checkpoint carry the number of their region; `region_of` reads it.

    Every form of non-reentrant checkpointing runs its forward under this hook, and only where gradients are on. A
    function imported long before is still caught, since the hook is looked up when it is called.
    """
    hook: Any = checkpoint._checkpoint_hook
    frame: Any = checkpoint._CheckpointFrame
    begun = open_now = 0

    class Marking(hook):  # type: ignore[misc]
        def __enter__(self) -> Any:
            nonlocal begun, open_now
            self.marks = ExitStack()
            if not open_now:
                # A checkpoint inside another is recomputed with it: the outermost counts.
                begun += 1
                self.marks.enter_context(traceback.preserve_node_meta())
                self.marks.enter_context(traceback.annotate({_REGION: begun}))
            open_now += 1
            return super().__enter__()

        def __exit__(self, *raised: Any) -> Any:
            nonlocal open_now
            open_now -= 1
            self.marks.close()
            return super().__exit__(*raised)

    # Nothing is run again while tracing. A checkpoint inside another would hand its inputs to the outer one, which
    # looks at them without gradients, and the trace would go on without.
    with (
        patch.object(checkpoint, "_checkpoint_hook", Marking),
        patch.object(frame, "save_inputs", lambda self, *args: None, create=True),
    ):
        yield


def region_of(node: fx.Node) -> int:
    """The number of the checkpointed region a node was traced in; 0 for none."""
    number = (node.meta.get("custom") or {}).get(_REGION, 0)
    return int(number)


# Attributes


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """No attribute is left with a tensor of the trace: those become what they were.

    Others may change: a flag that says "hooks are installed" must not be put back while the hooks stay.
    """
    before = [(part, dict(part.__dict__)) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes in before:
            for key, held in list(part.__dict__.items()):
                if held is not attributes.get(key) and _is_traced(held):
                    if key in attributes:
                        part.__dict__[key] = attributes[key]
                    else:
                        del part.__dict__[key]


def _is_traced(held: object) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(held))


@contextmanager
def assignments(module: nn.Module, replaced: set[str]) -> Iterator[None]:
    """Surrounds a forward pass: what it assigns to a buffer (`self.mean = ...`) is written into the buffer.

    Names of other tensors that it assigns anew are added to `replaced`.
    """
    before = {
        name: (
            part,
            dict(part._buffers),
            {key: held for key, held in part.__dict__.items() if isinstance(held, Tensor)},
        )
        for name, part in module.named_modules()
    }
    yield
    for name, (part, buffers, others) in before.items():
        for key, old in buffers.items():
            new = part._buffers.get(key)
            if new is not old and isinstance(old, Tensor) and isinstance(new, Tensor):
                _write_buffer(part, key, old, new)
        replaced.update(
            f"{name}.{key}" if name else key for key, old in others.items() if part.__dict__.get(key) is not old
        )


def _write_buffer(part: nn.Module, name: str, old: Tensor, new: Tensor) -> None:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise CaptureError(
            f"forward changes the buffer {name} of {type(part).__name__} from {old.dtype} {list(old.shape)} "
            f"to {new.dtype} {list(new.shape)}",
            do="keep the shape and dtype of a buffer from step to step",
        )
    old.copy_(new.detach())
    part._buffers[name] = old


# Autograd functions


@contextmanager
def _functions_watched() -> Iterator[None]:
    """Refuse a `torch.autograd.Function` whose backward is not its forward's, which is all export keeps."""
    original = torch.autograd.Function.__dict__["apply"]
    agreed: dict[object, bool] = {}

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__ == "CheckpointFunction":
            raise CaptureError(
                "the model uses reentrant checkpointing, whose gradients cannot be captured",
                do="pass use_reentrant=False to torch.utils.checkpoint",
            )
        if not cls.__module__.startswith("torch."):
            key = (cls, *(tuple(arg.shape) if isinstance(arg, Tensor) else repr(arg) for arg in args))
            if key not in agreed:
                agreed[key] = _in_a_thread(lambda: _gradients_agree(cls, args))
            if not agreed[key]:
                raise CaptureError(
                    f"the model uses {cls.__name__}, an autograd function whose backward "
                    "is not the gradient of its forward",
                    do="use x + (y - x).detach(), or a torch.library.custom_op with register_autograd",
                )
        return original.__func__(cls, *args, **kwargs)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def _in_a_thread(ask: Callable[[], bool]) -> bool:
    """Tracing modes belong to a thread: in another one, tensors are real."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return bool(answers and answers[0])


_MOST = 1 << 20


def _gradients_agree(cls: Any, args: tuple[Any, ...]) -> bool:
    """Whether on random numbers its backward gives what autograd makes of its forward; small shapes first."""
    sizes = sorted({size for arg in args if isinstance(arg, Tensor) for size in arg.shape if size > 1})
    small = {size: min(size, 2 + k) for k, size in enumerate(sizes)}
    as_is = {size: size for size in sizes}
    for shrink in (small, as_is):
        shapes = [tuple(shrink.get(s, s) for s in arg.shape) if isinstance(arg, Tensor) else None for arg in args]
        if sum(torch.Size(shape).numel() for shape in shapes if shape is not None) > _MOST:
            return False
        generator = torch.Generator().manual_seed(0)
        values = [
            _random(arg, shape, generator) if shape is not None else arg
            for arg, shape in zip(args, shapes, strict=True)
        ]
        try:
            return _same_gradients(cls, values)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
            continue
    return False


def _random(like: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if like.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, 2, shape, generator=generator).to(like.dtype)


class _Context(FunctionCtx):
    """What a forward may do to its context when nobody will ask for a backward."""

    needs_input_grad = (True,) * 64

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass


def _same_gradients(cls: Any, values: list[Any]) -> bool:
    def gradients(call: Callable[..., Any]) -> list[Tensor]:
        leaves = [
            v.detach().clone().requires_grad_(v.dtype.is_floating_point) if isinstance(v, Tensor) else v for v in values
        ]
        made = call(*leaves)
        outs = [out for out in (made if isinstance(made, tuple | list) else [made]) if isinstance(out, Tensor)]
        total = sum(
            (out * torch.arange(1, out.numel() + 1, dtype=out.dtype).reshape(out.shape)).sum()
            for out in outs
            if out.dtype.is_floating_point
        )
        wanted = [v for v in leaves if isinstance(v, Tensor) and v.requires_grad]
        if not isinstance(total, Tensor) or not total.requires_grad:
            return [torch.zeros_like(v) for v in wanted]
        found = torch.autograd.grad(total, wanted, allow_unused=True)
        return [torch.zeros_like(v) if g is None else g for v, g in zip(wanted, found, strict=True)]

    own = _apply_of(cls)
    if cls.setup_context is not torch.autograd.Function.setup_context:
        traced = cls.forward
    else:
        traced = lambda *a: cls.forward(_Context(), *a)  # noqa: E731
    return all(map(_agree, gradients(own), gradients(traced)))


def _agree(own: Tensor, traced: Tensor) -> bool:
    """Equal wherever autograd's gradient is a number: a backward may exist to bound it where it is none."""
    finite = traced.isfinite()
    return bool(finite.any()) and torch.allclose(own[finite], traced[finite], rtol=1e-6, atol=1e-8)


def _apply_of(cls: Any) -> Callable[..., Any]:
    """The function's own apply, not the one that watches."""
    found: Callable[..., Any] = super(torch.autograd.Function, cls).apply
    return found
