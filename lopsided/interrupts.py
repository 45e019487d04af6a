"""Ctrl-C ends a command at once, wherever it is: no traceback, status 130, no process and no folder left behind.

In: the signal. Out: the end of this process. Only the command line is treated so; where this library is imported by a
script of somebody else's, nothing is changed.

    while importing   nothing was started yet: the process ends where it is (`end_while_importing`)
    from then on      `guard`: the main thread gets a KeyboardInterrupt, as ever, and a thread looks after it. A main
                      thread that has not come to an end after `LEAVE_S` is in a library, or waits for somebody: the
                      thread ends the process then, and all processes that it started

The thread hears of the signal by the descriptor that the interpreter writes to before any Python code runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType

STATUS = 130
_NAME = "lopsided"
_stderr = 2
_said = False


def is_command() -> bool:
    """Whether this process is the command line, not a script that imports this library."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word == "-m":
            return next(words, "") == _NAME
        if word in ("-X", "-W"):
            next(words, "")
        elif not word.startswith("-"):
            # A script may set `sys.argv`, and call the command line as a function: what the process was started with
            # counts. What follows are words of the script: `lopsided run plan.json -m module`.
            return [word] == sys.argv[:1] and os.path.basename(word) == _NAME
    return False


def end_while_importing() -> None:
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_here)


def _end_here(number: int, frame: FrameType | None) -> None:
    say()
    os._exit(STATUS)


def say() -> None:
    """That it was interrupted, once."""
    global _said
    if not _said:
        _said = True
        with contextlib.suppress(OSError):
            os.write(_stderr, b"interrupted\n")


end_while_importing()  # before the imports below, which take longer than those above

import select
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LEAVE_S = 1.0
"""How long the main thread has to come to an end by itself."""

# Seconds from a request to end, which a script may hear, to the end itself.
_GRACE_S = 0.5

folders: set[str] = set()
"""What is to be removed when the process ends; who makes a temporary folder adds it."""

_interrupted = threading.Event()
_ending = threading.Lock()
_leave_s = LEAVE_S


def guard() -> None:
    """From here on Ctrl-C ends the command, however long the main thread takes to hear of it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        return
    global _stderr
    _stderr = os.dup(2)  # what is told goes there also while a command keeps quiet what libraries write
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A child that is forked would write into this pipe.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGINT, _interrupt)
    _mute()
    threading.Thread(target=_look_after, args=(reader,), name="lopsided-interrupts", daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Once: another one in the middle of what the first set going would leave it half done."""
    if not _interrupted.is_set():
        _interrupted.set()
        raise KeyboardInterrupt


def _mute() -> None:
    """An interrupt that falls into a finalizer, a callback or a thread is no news to anybody."""
    hooks = sys.excepthook, sys.unraisablehook

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            hooks[0](kind, error, trace)

    def on_unraisable(told: sys.UnraisableHookArgs) -> None:
        if not issubclass(told.exc_type, KeyboardInterrupt):
            hooks[1](told)

    sys.excepthook, sys.unraisablehook = on_error, on_unraisable


def _look_after(reader: int) -> None:
    _await_interrupt(reader, None)
    _await_interrupt(reader, _leave_s)  # a second one does not wait
    say()
    end()


def _await_interrupt(reader: int, most_s: float | None) -> None:
    until = None if most_s is None else time.monotonic() + most_s
    while until is None or time.monotonic() < until:
        left = None if until is None else max(until - time.monotonic(), 0.0)
        if select.select([reader], [], [], left)[0] and signal.SIGINT in os.read(reader, 64):
            return


@contextlib.contextmanager
def answering(most_s: float) -> Iterator[None]:
    """In here an interrupt asks for what there is so far, which may take so long; a second one ends the command."""
    global _leave_s
    before, _leave_s = _leave_s, most_s
    try:
        yield
    finally:
        _leave_s = before


def end(status: int = STATUS) -> None:
    """End this process and all that it started, and remove what it keeps among the temporary files."""
    _ending.acquire()  # for good: once what was started ends, the main thread comes here too, and would leave before
    _end_all(_descendants())
    for folder in [*folders]:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(Exception):
        if sys.stderr.isatty():
            os.write(2, b"\x1b[?25h")  # a live line hides the cursor
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def stay_if_ending() -> None:
    """Does not return while the process is being ended: what the main thread makes of its end is no news."""
    if _ending.locked():
        threading.Event().wait()


def _end_all(processes: list[int]) -> None:
    until = time.monotonic() + _GRACE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process, number)
        while number == signal.SIGTERM and time.monotonic() < until and any(map(_lives, processes)):
            time.sleep(0.02)


def _lives(process: int) -> bool:
    """Whether it has not ended, or its parent has not asked for its status yet."""
    with contextlib.suppress(OSError, IndexError):
        return _fields(process)[0] not in "ZX"
    return False


def _fields(process: int) -> list[str]:
    """What the kernel says of a process, from its state on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _descendants() -> list[int]:
    """The processes that this one started, and those that they did."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                children.setdefault(int(_fields(int(entry.name))[1]), []).append(int(entry.name))
    found = list(children.get(os.getpid(), ()))
    for process in found:  # which grows
        found += children.get(process, ())
    return [process for process in found if not _cleans_up(process)]


def _cleans_up(process: int) -> bool:
    """Whether it removes what the others leave, once they have ended, and ends by itself."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False
