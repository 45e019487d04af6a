"""Local worker processes that talk over gloo: a small cluster on one machine.

In: how many. Out: `WorkerPool`, which runs a function in every worker and returns what each returned. Workers stay, so
that many short jobs pay for one start. If one fails, the others are ended and its traceback is told.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from lopsided import interrupts
from lopsided.errors import RankError

_GRACE_S = 20.0
"""How long the others have to answer when one has failed: enough to say what they make of it."""
PRELOAD = ["torch", "torch.distributed", "lopsided"]
"""What a server imports before it forks workers."""


class WorkerPool:
    """`size` processes in one gloo group. Use it as a context; `run` is called from the parent.

    `cores` pins each worker: one list of core numbers per worker. Every worker has one thread unless told otherwise.

    >>> with WorkerPool(2) as pool:  # doctest: +SKIP
    ...     pool.run(function, argument)  # [function(argument) in worker 0, ... in worker 1]
    """

    def __init__(
        self, size: int, *, cores: Sequence[Sequence[int]] | None = None, threads: int = 1, timeout_s: float = 120.0
    ) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="lopsided-")
        interrupts.folders.add(self._folder.name)
        # A server that has imported torch once and forks: a worker starts in a tenth of a second.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        interrupts.folders.add(util.get_temp_dir())  # of the server's sockets
        self._pipes: list[Connection] = []
        self._workers: list[BaseProcess] = []
        try:
            # Nobody but this machine is listened to: the store by itself would listen on every address. The listener
            # itself is handed on: a port that was found free may be somebody else's when a worker asks for it.
            with deaf_to_interrupts(), socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                for rank in range(size):
                    mine, theirs = context.Pipe()
                    pinned = list(cores[rank]) if cores is not None else None
                    meeting = listener if rank == 0 else None
                    worker = context.Process(
                        target=_work, args=(rank, size, port, meeting, theirs, pinned, threads, timeout_s), daemon=True
                    )
                    worker.start()
                    theirs.close()
                    self._pipes.append(mine)
                    self._workers.append(worker)
        except KeyboardInterrupt:
            self._end()
            raise

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is KeyboardInterrupt:
            self._end()
        else:
            self.close()

    @property
    def folder(self) -> str:
        """A folder for what workers write; it goes when the pool does."""
        return self._folder.name

    @property
    def alive(self) -> bool:
        return bool(self._workers) and all(worker.is_alive() for worker in self._workers)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """What `job(*args)` returns in each worker; raises what the first to fail says."""
        outcomes = self.outcomes(job, *args)
        for rank, (fine, _) in enumerate(outcomes):
            if not fine:
                self.close()
                told = "\n".join(f"--- worker {r} ---\n{text}" for r, (good, text) in enumerate(outcomes) if not good)
                raise RankError(f"worker {rank} failed:\n{told}", do="see its traceback above")
        return [result for _, result in outcomes]

    def outcomes(self, job: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """Whether each worker finished, and what it returned or the text of its traceback."""
        for pipe in self._pipes:
            pipe.send((job, args))
        found: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + self.timeout_s
        while len(found) < self.size:
            left = until - time.monotonic()
            waiting = [rank for rank in range(self.size) if rank not in found]
            ready = wait([self._pipes[rank] for rank in waiting], timeout=max(left, 0))
            for rank in [rank for rank in waiting if self._pipes[rank] in ready]:
                try:
                    found[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    self._workers[rank].join(5)
                    code = self._workers[rank].exitcode
                    found[rank] = (False, f"the process ended with exit code {code}")
            if any(not fine for fine, _ in found.values()):
                until = min(until, time.monotonic() + _GRACE_S)
            if left <= 0:
                for rank in waiting:
                    found.setdefault(rank, (False, "no answer in time"))
        return [found[rank] for rank in range(self.size)]

    def kill(self, rank: int) -> None:
        """End one worker as a crash would."""
        self._workers[rank].kill()

    def _end(self) -> None:
        """End all workers at once: one that lived on would write that it had lost its peers."""
        for worker in self._workers:
            worker.kill()
        self.close()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.join(0.5)
            if worker.is_alive():
                worker.kill()
                worker.join()
        self._pipes, self._workers = [], []
        self._folder.cleanup()
        interrupts.folders.discard(self._folder.name)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C waits until this is over, and is not heard at all by processes that are started in here.

    It is for the parent, which ends its workers without a word. A worker that is half started would be left behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # which alone hears of signals
        return
    heard: list[int] = []
    resource_tracker.ensure_running()  # started later, it would undo what follows
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if heard:
            # Also where something failed: it may be that what was waited for has been ended meanwhile.
            raise KeyboardInterrupt


def _work(
    rank: int,
    size: int,
    port: int,
    listener: socket.socket | None,
    pipe: Connection,
    cores: list[int] | None,
    threads: int,
    timeout_s: float,
) -> None:
    """A worker: joins the group, then does what it is told until the pipe closes."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(threads)
    # What torchrun would set.
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    patience = timedelta(seconds=timeout_s)
    heard = listener.detach() if listener is not None else None
    store = TCPStore("127.0.0.1", port, size, rank == 0, timeout=patience, master_listen_fd=heard)
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    while True:
        try:
            job, args = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            break
        try:
            outcome = (True, job(*args))
        except BaseException:
            outcome = (False, traceback.format_exc())
        try:
            pipe.send(outcome)
        except (OSError, BrokenPipeError):
            break
    # Peers may be gone already; leaving without saying goodbye is then all there is to do.
    os._exit(0)
