"""What cannot be captured is refused: what, the user's line, and what to change."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.support.models import ByHand, Forward, LanguageModel, assert_captured, example, refused


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return dy * (s + x * s * (1 - s))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, by: float) -> Tensor:
        return x * by

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.by, None


class Reverse(Scale):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return -dy * ctx.by, None


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class BoundedRoot(torch.autograd.Function):
    """As the square root, with a gradient that stays a number where the root's does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy / (4 * x).clamp(min=1e-6).sqrt()


def test_autograd_functions_whose_backward_is_that_of_their_forward() -> None:
    assert_captured(ByHand(lambda m, x: BoundedRoot.apply(m.lin(x).abs()).pow(2).sum()), {"x": example()})
    assert_captured(ByHand(lambda m, x: Swish.apply(m.lin(x)).pow(2).sum()), {"x": example()})
    assert_captured(ByHand(lambda m, x: Scale.apply(m.lin(x), 3.0).pow(2).sum()), {"x": example()})


@pytest.mark.parametrize(("function", "rest"), [(Reverse, (2.0,)), (Round, ())])
def test_autograd_functions_with_a_backward_of_their_own_are_refused(function: Any, rest: tuple[float, ...]) -> None:
    model = ByHand(lambda m, x: function.apply(m.lin(x), *rest).pow(2).sum())
    error = refused(model, {"x": example()})
    assert f"{function.__name__}, an autograd function whose backward is not the gradient of its forward" in error.what
    assert "test_diagnosis.py" in error.where
    assert "custom_op" in error.do


class DependsOnData(nn.Module):
    """Does what it is told, each on a line of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if self.how == "branch" and h.sum() > 0:  # branch
            h = h * 2
        if self.how == "size":
            h = h[: int(x.argmax().item())]  # size
        if self.how == "unique":
            h = h[x.argmax(-1).unique()]  # unique
        if self.how == "two masks":
            h = h[x[:, 0] > 0] - h[x[:, 0] <= 0]  # two masks
        if self.how == "float":
            h = h * float(x.sum())  # float
        if self.how == "loop":
            for _ in range(int(x.argmax())):  # loop
                h = h + 1
        return h.sum()


@pytest.mark.parametrize("how", ["branch", "size", "unique", "two masks", "float", "loop"])
def test_what_depends_on_data_is_refused_with_the_line(how: str) -> None:
    error = refused(DependsOnData(how), {"x": example()})
    lines = Path(__file__).read_text().splitlines()
    line = next(k for k, text in enumerate(lines, 1) if text.endswith(f"# {how}"))
    assert f"test_diagnosis.py:{line}" in error.where, error
    assert re.search(r"torch\.where|keep it a tensor|use a table", error.do), error


def by_assert(m: Any, x: Tensor) -> Tensor:
    assert (x.abs() < 100).all()
    return m.lin(x).sum()


def by_while(m: Any, x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x / 2
    return m.lin(x).sum()


def by_if(m: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x * 2
    return m.lin(x).sum()


def by_size(m: Any, x: Tensor) -> Tensor:
    return m.lin(x[: int(x.argmax())]).sum()


def by_format(m: Any, x: Tensor) -> Tensor:
    _ = f"{x.sum():.3f}"
    return m.lin(x).sum()


def by_numpy(m: Any, x: Tensor) -> Tensor:
    return m.lin(x).sum() * float(x.detach().numpy().mean())


def fails(m: Any, x: Tensor) -> Tensor:
    raise KeyError("mask")


def fails_traced(m: Any, x: Tensor) -> Tensor:
    if type(x) is not Tensor:
        raise KeyError("cache")
    return m.lin(x).sum()


@pytest.mark.parametrize(
    ("forward", "what", "do"),
    [
        (by_assert, "asserts something", "take the assert out"),
        (by_while, "repeats something", "a fixed number of times"),
        (by_if, "branches in Python", "compute both ways"),
        (by_size, "needs a whole number", "as a Python integer"),
        (by_format, "prints or formats", "print it outside"),
        (by_numpy, "leaves torch for numpy", "write it with torch"),
        (fails, "does not run on this batch", "make one step of the model alone run"),
        (fails_traced, "runs on this batch, and not while it is traced", "write that line with torch"),
    ],
)
def test_causes_are_told_apart(forward: Forward, what: str, do: str) -> None:
    error = refused(ByHand(forward), {"x": example()})
    assert what in error.what
    assert do in error.do


def test_a_model_without_a_scalar_is_refused() -> None:
    assert "returns a (4, 6) torch.float32 tensor as its loss" in refused(nn.Linear(6, 6), example()).what
    model = ByHand(lambda m, x: [m.lin(x)])
    assert "returns no scalar loss but list" in refused(model, {"x": example()}).what
    model = ByHand(lambda m, x: {"logits": m.lin(x)})
    assert "returns no scalar loss but dict" in refused(model, {"x": example()}).what
    model = ByHand(lambda m, x: (m.lin(x) > 0).sum())
    error = refused(model, {"x": example()})
    assert "returns a () torch.int64 tensor as its loss" in error.what
    assert "loss_fn=" in error.do


def test_a_batch_that_does_not_fit_is_refused() -> None:
    error = refused(LanguageModel(), {"tokens": example()})
    assert "the batch does not fit LanguageModel.forward: missing a required argument: 'input_ids'" in error.what
    assert "input_ids" in error.where
    assert "too many positional arguments" in refused(nn.Linear(6, 6), (example(), example())).what


def test_a_shape_that_does_not_fit_is_refused_with_the_line() -> None:
    error = refused(ByHand(lambda m, x: (m.lin(x) @ x).sum()), {"x": example()})
    assert "test_diagnosis.py" in error.where
    assert "4x6 and 4x6" in error.facts["cause"]


def test_writing_into_a_parameter_is_refused() -> None:
    def normalise(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.lin.weight[0].div_(2)
        return m.lin(x).sum()

    error = refused(ByHand(normalise), {"x": example()})
    assert error.what == "forward writes into the parameter lin.weight"
    assert "support/models.py" in error.where


def behind_detach(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    h.detach().clamp_(0)
    return h.sum()


def behind_no_grad(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    with torch.no_grad():
        h[0].mul_(2)
    return h.sum()


def gradient_through_a_detached_view(m: Any, x: Tensor) -> Tensor:
    seen = m.ema.detach()
    seen.add_(m.lin(x))
    return (seen * m.ema).sum()


@pytest.mark.parametrize("hidden", [behind_detach, behind_no_grad, gradient_through_a_detached_view])
def test_writes_that_autograd_does_not_see_are_refused(hidden: Forward) -> None:
    error = refused(ByHand(hidden), {"x": example()})
    assert "changes a value behind the back of its gradient" in error.what
    assert "support/models.py" in error.where


def unsqueezed(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    h.unsqueeze_(0)
    return h.sum()


def transposed(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x) * 1
    h.t_()
    return h.sum()


def through_another_dtype(m: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.view(torch.int32).add_(1)
    return m.lin(y).sum()


def through_a_chunk(m: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.chunk(2, 1)[0].add_(1)
    return m.lin(y).sum()


def without_a_functional_form(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x).t() * 1
    h.fill_diagonal_(0.5, wrap=True)
    return h.sum()


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (unsqueezed, "aten.unsqueeze_.default changes the shape of a tensor in place"),
        (transposed, "aten.t_.default changes the shape of a tensor in place"),
        (through_another_dtype, "a view made by aten.view.dtype is written into"),
        (through_a_chunk, "a view made by aten.chunk.default is written into"),
        (without_a_functional_form, "aten.fill_diagonal_.default has no form that returns a new tensor"),
    ],
)
def test_writes_that_have_no_pure_form_are_refused(written: Forward, words: str) -> None:
    error = refused(ByHand(written), {"x": example()})
    assert words in error.what
    assert "support/models.py" in error.where


def test_state_outside_of_buffers_is_refused() -> None:
    def writes(m: Any, x: Tensor) -> Tensor:
        m.seen.add_(1)
        return (m.lin(x) * m.seen).sum()

    def replaces(m: Any, x: Tensor) -> Tensor:
        m.seen = m.seen + 1
        return (m.lin(x) * m.seen).sum()

    for stateful, words in (
        (writes, "writes into the tensor"),
        (replaces, "reads and replaces the tensor seen"),
    ):
        model = ByHand(stateful)
        model.seen = torch.ones(6)
        error = refused(model, {"x": example()})
        assert words in error.what
        assert "register_buffer" in error.do


def test_buffers_that_share_memory_and_change_are_refused() -> None:
    def write_one_read_both(m: Any, x: Tensor) -> Tensor:
        m.ema.add_(1)
        return (m.lin(x) * m.seen).sum()

    model = ByHand(write_one_read_both)
    model.register_buffer("seen", model.ema.view(4, 6))
    assert "share memory" in refused(model, {"x": example()}).what


def test_instance_norm_with_running_statistics_is_refused() -> None:
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    model = ByHand(lambda m, x: m.parts[0](m.lin(x).reshape(2, 2, 6)).sum(), norm)
    assert "instance norm changes its running statistics" in refused(model, {"x": example()}).what


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    def grows(m: Any, x: Tensor) -> Tensor:
        m.ema = torch.cat([m.ema, x])
        return m.lin(x).sum()

    assert "changes the buffer ema" in refused(ByHand(grows), {"x": example()}).what


def test_reentrant_checkpoints_are_refused() -> None:
    model = ByHand(lambda m, x: checkpoint(m.lin, m.lin(x), use_reentrant=True).sum())
    error = refused(model, {"x": example()})
    assert "reentrant" in error.what
    assert "use_reentrant=False" in error.do


def test_dtypes_that_graphs_do_not_have_are_refused() -> None:
    model = ByHand(lambda m, x: m.lin(x.float()).sum())
    assert "torch.uint16" in refused(model, {"x": torch.zeros(4, 6, dtype=torch.uint16)}).what


def test_tensors_on_different_devices_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(6, 6)
    weight = torch.ones(6)
    assert "different devices" in refused(model, example(), loss_fn=lambda out, _: (out * weight).sum()).what


def test_a_refusal_leaves_nothing_on_the_streams(capfd: pytest.CaptureFixture[str]) -> None:
    refused(DependsOnData("branch"), {"x": example()})
    refused(ByHand(lambda m, x: m.parts[0](x).sum(), nn.BatchNorm1d(6, momentum=None)), {"x": example()})
    assert capfd.readouterr() == ("", "")


class Noting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_a_batch_of_another_shape_is_refused_without_torchs_own_log() -> None:
    log, noting = logging.getLogger("torch._subclasses.fake_tensor"), Noting()
    with FakeTensorMode(allow_non_fake_inputs=True):  # as a step of a new shape is captured
        given = torch.empty(4, 9)
    log.addHandler(noting)
    try:
        assert "does not run on this batch" in refused(ByHand(lambda m, x: m.lin(x).sum()), {"x": given}).what
    finally:
        log.removeHandler(noting)
    assert noting.records == []


def test_hooks_are_refused() -> None:
    def hooked(m: Any, x: Tensor) -> Tensor:
        h = m.lin(x)
        h.register_hook(lambda gradient: gradient * 2)
        return h.sum()

    error = refused(ByHand(hooked), {"x": example()})
    assert "register_hook" in error.what
    assert "test_diagnosis.py" in error.where
    model = ByHand(lambda m, x: m.lin(x).sum())
    model.lin.register_full_backward_hook(lambda *_: None)
    assert "module lin has a backward hook" in refused(model, {"x": example()}).what


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, output: Tensor, batch: object) -> Tensor:
            return (output * self.weight).sum()

    assert "parameters to train" in refused(nn.Linear(6, 6), example(), loss_fn=Weighted()).what


def test_only_modules_are_captured() -> None:
    assert "function" in refused(lambda x: x.sum(), {"x": example()}).what  # type: ignore[arg-type]
