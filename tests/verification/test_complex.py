"""Complex parameters, activations and writes: on imaginary devices and on real processes what one device computes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import lopsided
from lopsided.comm.worker_pool import WorkerPool
from lopsided.ir.placement import Shares
from lopsided.verification.verifier import widened
from tests.support.complex_models import FourierOperator, operator
from tests.support.jobs import at_random, classic, step, training
from tests.support.models import assert_captured

OPERATOR = "tests.support.complex_models:operator"
SHARES = Shares((0.7, 0.3), named=(("state", (0.4, 0.6)),))


def test_writes_into_complex_zeros_are_captured() -> None:
    assert_captured(*operator())


def test_complex_programs_are_those_of_one_device() -> None:
    found = lopsided.verify(*operator(), programs=40)
    assert found.passed, f"capture {found.capture_error}; {found.worst.where}: {found.worst.error}"


def test_complex_numbers_on_processes(worker_pools: Callable[[int], WorkerPool]) -> None:
    runs = [classic(OPERATOR, name, SHARES) for name in ("dp", "zero-again", "planned")]
    runs += [at_random(OPERATOR, SHARES, seed) for seed in range(6)]
    for found in worker_pools(2).run(step, runs):
        assert max(error for error, _ in found) < 1e-9, found


def test_complex_parameters_train_on_processes(worker_pools: Callable[[int], WorkerPool]) -> None:
    for found in worker_pools(2).run(training, classic(OPERATOR, "zero-again", SHARES), 10, math.inf):
        assert len(found.expected) == 10
        assert max(found.curve_errors) < 1e-4


def test_a_wide_copy_keeps_imaginary_parts() -> None:
    model = FourierOperator()
    imaginary = model.weight.imag.clone()
    wide = widened(model)
    assert wide.weight.dtype == torch.complex128
    assert torch.equal(wide.weight.imag, imaginary.double())  # type: ignore[union-attr]
