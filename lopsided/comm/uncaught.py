"""An error of ours that ends a run is told once: whole by the first rank, in one line by the others.

In: the store through which the processes found each other. Out: a hook for exceptions that nobody catches. Errors of
this library say what, where and do; of the traceback only the script's own lines are of use. All ranks usually raise
the same, so who comes first tells it. `LOPSIDED_VERBOSE=1` shows every traceback whole, on every rank; what is no
error of ours is always shown so.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lopsided.errors import LopsidedError

VERBOSE_VARIABLE = "LOPSIDED_VERBOSE"
"""The environment variable that shows tracebacks, set by `-v`."""

# Seconds that the store may take to say who came first.
_ASK_S = 3.0
_TOLD = "lopsided/told"
_NOT_THE_SCRIPTS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")

_hooked = False


def tell_once() -> None:
    """Tell errors once from here on. Called again, it does nothing."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, LopsidedError) or is_verbose():
            before(kind, error, trace)
        elif (first := told_by()) == rank_here():
            short = scripts_part(trace)
            before(kind, bare(error).with_traceback(short), short)
        else:
            before(kind, in_a_line(error, first), None)

    sys.excepthook = hook


def is_verbose() -> bool:
    return os.environ.get(VERBOSE_VARIABLE, "0") not in ("", "0")


def told_by() -> int:
    """The rank that tells of an error: the first that asks. Where nobody knows, every rank."""

    def ask() -> int:
        store = distributed_c10d._get_default_store()
        return int(store.compare_set(_TOLD, "", str(rank_here())).decode())

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rank_here()
    answer = within(_ASK_S, ask)
    return answer if isinstance(answer, int) else rank_here()


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def bare(error: LopsidedError) -> LopsidedError:
    """The error without what led to it, which it says itself."""
    error.__cause__ = error.__context__ = None
    return error


def in_a_line(error: LopsidedError, first: int) -> LopsidedError:
    what = next(iter(error.what.splitlines()), "")
    return type(error)(f"{what} [rank {first} tells more; {VERBOSE_VARIABLE}=1 shows all]")


def scripts_part(trace: TracebackType | None) -> TracebackType | None:
    """The frames of the script's own lines; all, if there are none."""
    frames = []
    link = trace
    while link is not None:
        if not link.tb_frame.f_code.co_filename.startswith(_NOT_THE_SCRIPTS):
            frames.append(link)
        link = link.tb_next
    found: TracebackType | None = None
    for frame in reversed(frames):
        found = TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return found or trace


def within(seconds: float, ask: Callable[[], object]) -> object:
    """What it answers; None if it fails or takes longer. The store may be gone, or not answer."""
    answers: list[object] = []

    def run() -> None:
        try:
            answers.append(ask())
        except (RuntimeError, ValueError, OSError):
            answers.append(None)

    thread = threading.Thread(target=run, name="lopsided-ask", daemon=True)
    try:
        thread.start()
        thread.join(seconds)
    except RuntimeError:  # From Python 3.12 on no thread starts once the interpreter goes.
        run()
    return answers[0] if answers else None
