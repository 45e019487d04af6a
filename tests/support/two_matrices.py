"""Two matrices on one device, and the same stored in pieces by three processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from lopsided.runtime.parallel import Parallel
from tests.support.jobs import plan_of, prices_of
from tests.support.small_net import HERE, THREE, Products


def numbers(seed: int = 0) -> Tensor:
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(seed)).to(HERE, torch.float64)


def products(seed: int = 0) -> Products:
    torch.manual_seed(seed)
    return Products().to(HERE, torch.float64)


def planned(cut: bool = True) -> Plan:
    book = derive_rules(capture(products(), (numbers(),)))
    program = data_parallel(book, prices_of(book.graph, THREE))
    return plan_of(stored_cut(program) if cut else program, THREE)


def small(*, cut: bool = True, **how: Any) -> tuple[Products, Parallel]:
    """Two matrices on one device, and stored in pieces (or whole) by three processes."""
    return products(), lopsided.parallelize(products(), (numbers(),), plan=planned(cut), **how)


def told(job: Callable[[], object]) -> str:
    """What is refused; "" if nothing is."""
    try:
        job()
    except lopsided.LopsidedError as error:
        return str(error)
    return ""
