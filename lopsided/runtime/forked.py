"""A training script in a process that was forked from one which has imported torch and this library.

In: a script, or `-m` and a module, with arguments. Out: what `python` would do with these words, in this process.

torchrun starts processes by a fork server (`--start-method forkserver`) as functions, and this file is the function's
script. The server has one thread and has initialised no device, so what is forked from it may do both. A function that
torchrun started has to return, and otherwise ends with its own status; what Python does at the end of a script
(exceptions shown, threads awaited, exit functions called) is done here.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
from types import TracebackType

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from lopsided.interrupts import STATUS

_NOT_THE_SCRIPTS = (__file__, "<frozen runpy>", runpy.__file__)


def main(words: list[str]) -> None:
    """Returns if the script ended well."""
    os.setsid()  # Ctrl-C in the terminal is the agent's, as with processes that are not forked
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _prctl_pr_set_pdeathsig(signal.SIGTERM)  # with the server, without a traceback
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # else all would draw what the server would have drawn
    if status := _ran(words):
        sys.exit(status)


def _ran(words: list[str]) -> int | str | None:
    """As what a script gives to `sys.exit`."""
    status: int | str | None = 0
    try:
        _run(words)
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        status = STATUS if isinstance(error, KeyboardInterrupt) else 1
        error.__traceback__ = _scripts_part(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]  # pools are told to end, and threads awaited
    atexit._run_exitfuncs()
    return status


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _scripts_part(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that have led to the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _NOT_THE_SCRIPTS:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])
