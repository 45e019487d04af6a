"""Ctrl-C ends every command at once, without a traceback, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lopsided import interrupts
from lopsided.comm.worker_pool import deaf_to_interrupts
from lopsided.planner.plan_file import save_plan
from tests.support.plans import plan_of

STUBBORN = """
import os, signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(f"{os.getpid()}.started").touch()
time.sleep(300)
"""


def interrupted(folder: Path, words: list[str], ready: Callable[[int], bool]) -> tuple[int, str]:
    """A command in a terminal of its own, interrupted when its process is ready: status, and stderr."""
    temporary = folder / "temporary"
    temporary.mkdir()
    # Inductor's cache is among the temporary files unless it is said, and stays.
    environment = {**os.environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    command = [sys.executable, "-m", "lopsided", *words]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment, start_new_session=True
    ) as run:
        until = time.monotonic() + 120
        while not ready(run.pid) and run.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGINT)
        said = run.communicate(timeout=60)[1]
    assert list(temporary.iterdir()) == []
    return run.returncode, said


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs to see what a process has loaded")
@pytest.mark.parametrize("library", ["libtorch_global_deps", "libscipy_openblas-"])
def test_while_importing(library: str, tmp_path: Path) -> None:
    """Interrupted while torch is being imported, and later, while scipy is."""

    def loaded(process: int) -> bool:
        try:
            return library in Path(f"/proc/{process}/maps").read_text()
        except OSError:
            return False

    assert interrupted(tmp_path, ["clusters"], loaded) == (130, "interrupted\n")


@pytest.mark.parametrize("how", [[], ["--elastic"]], ids=["started", "forked"])
def test_a_run_ends_with_scripts_that_would_go_on(how: list[str], tmp_path: Path) -> None:
    save_plan(plan_of(), tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(STUBBORN)
    started = lambda: list(tmp_path.glob("*.started"))  # noqa: E731
    status, said = interrupted(tmp_path, ["run", *how, "plan.json", "train.py"], lambda _: len(started()) == 3)
    assert status == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said
    for mark in started():
        assert not interrupts._lives(int(mark.stem))


def test_a_library_is_nobodys_command(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        ("python", "-m", "lopsided", "plan"): True,
        ("python", "-m", "torch.distributed.run", "-m", "lopsided", "train"): False,
        ("python", "-X", "dev", "-m", "lopsided"): True,
        ("python", "train.py", "-m", "lopsided"): False,
    }
    for line, wanted in words.items():
        monkeypatch.setattr(sys, "orig_argv", list(line))
        assert interrupts.is_command() == wanted
    monkeypatch.setattr(sys, "orig_argv", ["python", "/usr/bin/lopsided", "plan"])
    monkeypatch.setattr(sys, "argv", ["/usr/bin/lopsided", "plan"])
    assert interrupts.is_command()
    monkeypatch.setattr(sys, "orig_argv", ["python", "/usr/bin/lopsided", "run", "plan.json", "-m", "train"])
    assert interrupts.is_command()
    for given in (["train.py"], []):
        monkeypatch.setattr(sys, "argv", given)
        assert not interrupts.is_command()


def test_what_fails_because_it_was_interrupted_is_an_interrupt() -> None:
    """A server that is ended while a worker is asked of it: that is how the guard ends what was started."""

    def start() -> None:
        with deaf_to_interrupts():
            signal.raise_signal(signal.SIGINT)
            raise EOFError

    with pytest.raises(KeyboardInterrupt):
        start()
