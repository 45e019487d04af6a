"""One thread and the same random numbers for every test; what is shared; and what is sampled.

`make test` runs a sample of the long lists: of the parameters of a test marked `sampled(n)`, always the same n, spread
evenly over them. `make test-all` gives `--all`: every parameter, and the tests marked `slow`.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from lopsided.comm.worker_pool import WorkerPool
from tests.support.shared_pools import shared_pools

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: two that share two cores would wait by spinning
os.environ["LOPSIDED_CACHE"] = "0"  # nothing that is measured here is kept, or read from an earlier run
# A shell that starts the tests in the background has them, and all they start, ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "lopsided", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("lopsided")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there now stays: the collector need not look at it again and again, in here and in processes that are
    forked. Tests make millions of small objects, few of them in cycles, beside models that are captured once."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


GOLDEN = 0.6180339887


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run slow tests, and every parameter of those that are sampled")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow or not in the sample, unless all is asked for, or a test by its name."""
    if config.getoption("--all") or any("::" in argument for argument in config.args):
        return
    lists: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            lists[item.nodeid.partition("[")[0]].append(item)
    kept = {item for found in lists.values() for item in sample(found)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """As many of one test's items as its mark says, so that every parameter takes its values equally often.

    The next item is one whose values were taken least. Among several of those it is the one whose number, times the
    golden ratio, has the smallest fraction: these are spread over the list.
    """
    mark = items[0].get_closest_marker("sampled")
    if mark is None:
        return items
    values = [tuple(item.callspec.indices.items()) for item in items]  # type: ignore[attr-defined]
    taken: Counter[tuple[str, int]] = Counter()
    found: list[int] = []
    while len(found) < min(mark.args[0], len(items)):
        left = (k for k in range(len(items)) if k not in found)
        found.append(min(left, key=lambda k: (sum(taken[value] for value in values[k]), k * GOLDEN % 1)))
        taken.update(values[found[-1]])
    return [items[k] for k in sorted(found)]


@pytest.fixture(scope="session")
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether all is tried that could be, as in `make test-all`: more programs, more steps, more seeds."""
    return bool(request.config.getoption("--all"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def worker_pools() -> Iterator[Callable[[int], WorkerPool]]:
    """Worker processes that tests share."""
    with shared_pools() as pools:
        yield pools
