"""An error of ours that ends a run is told once; everything else as Python does."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lopsided.comm import uncaught
from lopsided.comm.uncaught import VERBOSE_VARIABLE, in_a_line, scripts_part, tell_once
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import BatchError, LopsidedError
from lopsided.ir.placement import check_shares


def caught() -> LopsidedError:
    try:
        check_shares(())
    except LopsidedError as error:
        return error
    raise AssertionError


def told_on_every_rank(verbose: bool) -> str:
    """What a rank writes when the same error ends all of them."""
    tell_once()
    if dist.get_rank() == 0:
        distributed_c10d._get_default_store().delete_key(uncaught._TOLD)
    dist.barrier()
    before = uncaught.os.environ.get(VERBOSE_VARIABLE, "")
    uncaught.os.environ[VERBOSE_VARIABLE] = "1" if verbose else ""
    error, stderr = caught(), io.StringIO()
    try:
        with redirect_stderr(stderr):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        uncaught.os.environ[VERBOSE_VARIABLE] = before
    return stderr.getvalue()


def test_one_rank_tells_all_of_it_and_others_a_line(worker_pools: Callable[[int], WorkerPool]) -> None:
    whole, line = sorted(worker_pools(2).run(told_on_every_rank, False), key=len, reverse=True)
    assert "there are no shares" in whole
    assert "  do      give one share per device" in whole
    assert "test_uncaught.py" in whole
    assert "placement.py" not in whole
    assert line.strip().count("\n") == 0
    assert "there are no shares" in line
    assert "tells more" in line


def test_every_rank_tells_everything_where_that_is_wanted(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert all("placement.py" in text for text in worker_pools(2).run(told_on_every_rank, True))


def test_a_trace_without_lines_of_the_script_stays() -> None:
    error = caught()
    assert error.__traceback__ is not None
    inner = error.__traceback__.tb_next
    assert scripts_part(inner) is inner


def test_a_line_keeps_the_class_and_the_first_line() -> None:
    short = in_a_line(BatchError("two rows\nare missing", where="here", do="add them"), 3)
    assert isinstance(short, BatchError)
    assert str(short) == f"two rows [rank 3 tells more; {VERBOSE_VARIABLE}=1 shows all]"
