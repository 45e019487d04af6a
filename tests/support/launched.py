"""Commands and scripts that tests start beside themselves."""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lopsided.comm.worker_pool import PRELOAD

PATIENCE_S = 110


def unused_port() -> int:
    """A port to meet at, below those that the system gives to whoever asks for any: no other connection takes it
    between here and the meeting."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as found:
            if found.connect_ex(("127.0.0.1", port)):
                return port


class Started(subprocess.Popen[str]):
    """A command whose output is taken together, and which is ended if the test leaves early."""

    def __init__(self, folder: Path, *words: object) -> None:
        command = [sys.executable, "-m", *map(str, words)]
        environment = {name: value for name, value in os.environ.items() if name != "LOPSIDED_PLAN"}
        super().__init__(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment
        )

    def end(self) -> str:
        try:
            return self.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            self.terminate()  # torchrun then ends its workers
            raise AssertionError(f"did not end\n{self.communicate()[0]}") from None


@dataclass(frozen=True)
class Ran:
    status: int | None  # None: it did not end
    stdout: str
    stderr: str


def run_script(script: Path, folder: Path, *arguments: str) -> Ran:
    """As `python SCRIPT ARGUMENTS`, in a process forked from one that has imported torch, which takes four seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    out, err = folder / "stdout", folder / "stderr"
    process = context.Process(target=_be_script, args=([str(script), *arguments], str(out), str(err)))
    process.start()
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Ran(None, out.read_text(), err.read_text())
    return Ran(process.exitcode, out.read_text(), err.read_text())


def _be_script(words: list[str], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
