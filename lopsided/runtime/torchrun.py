"""torchrun, without its own account of a run that failed: the processes have told why.

In: the words of torchrun's line. Out: the run, and its exit status. Processes that could not tell, because a signal
ended them, are named. The store through which the processes of one machine find each other listens on the loopback
address alone (`--standalone`). With `--start-method forkserver` processes are forked from a server that has imported
torch and this library once (`forked`): those that are started again are there after a tenth of a second.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

from torch._C._distributed_c10d import TCPStore
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lopsided import interrupts
from lopsided.comm.worker_pool import PRELOAD, deaf_to_interrupts
from lopsided.runtime import forked

_log = logging.getLogger("lopsided")

_LATER = ("torch.export._trace",)  # what torch imports when it first captures a model, which takes half a second
_LOOPBACK = "127.0.0.1"
_LONGEST_FOLDER = 70  # bytes; the path of a socket has 104 at the most, of which its name takes 32
_FIRST_SIGNAL = "SIGTERM"  # by which torchrun ends the others


def main(words: list[str]) -> int:
    """The exit status of a run: 0, or that of the first process that failed."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    given = run.parse_args(words)
    store = _on_loopback(given) if given.standalone else None
    if given.start_method == "forkserver" and not given.no_python and not given.run_path:
        _fork_scripts(given)
    try:
        run.run(given)
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode < 0 and failure.signal_name() != _FIRST_SIGNAL:
                _log.critical("rank %d was ended by %s%s", rank, failure.signal_name(), _hint(failure))
        return max(error.get_first_failure()[1].exitcode, 1)
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        del store
    return 0


def _on_loopback(given: Namespace) -> TCPStore:
    """Where all processes are on this machine, nobody else is listened to: torchrun's own store for them would listen
    on every address. To be kept for as long as the run: it is found again by its port."""
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    given.standalone, given.node_rank = False, 0
    given.rdzv_backend, given.rdzv_endpoint = "static", f"{_LOOPBACK}:{port}"
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TCPStore(
        _LOOPBACK, port, 1, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


def _fork_scripts(given: Namespace) -> None:
    """Have scripts run as a function of forked processes, and start the server: it imports while the agent begins."""
    script = ["-m", given.training_script] if given.module else [given.training_script]
    given.training_script_args = [*script, *given.training_script_args]
    given.training_script, given.module, given.run_path = forked.__file__, False, True
    if run.determine_local_world_size(given.nproc_per_node) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # which torchrun would set later, and is read with torch
    forkserver.set_forkserver_preload([*PRELOAD, *_LATER])
    # Of the server's socket. It is removed by its maker at the very end: not in a folder that is removed before.
    folder, tempfile.tempdir = tempfile.tempdir, None
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    interrupts.folders.add(util.get_temp_dir())
    tempfile.tempdir = folder
    # Who removes what an interrupt leaves need not tell.
    with _environment("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker"):
        resource_tracker.ensure_running()
    with _environment("PYTHONUNBUFFERED", "1"), deaf_to_interrupts():  # torchrun's `python -u`
        forkserver.ensure_running()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Of processes that are started in here."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ |= {} if before is None else {name: before}


def _hint(failure: ProcessFailure) -> str:
    return ": a process that is killed was often out of memory" if failure.signal_name() == "SIGKILL" else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
