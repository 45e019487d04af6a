"""Scripts in forked processes run and end as `python SCRIPT` would have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lopsided.runtime import forked, torchrun
from tests.support.launched import run_script

FORKED = Path(forked.__file__)
SCRIPT = """
import atexit, json, os, pickle, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import numpy, torch
class Of: pass
beside = __import__("beside")
last = lambda word: open("order", "a").write(word)
atexit.register(last, "exit")
def late():
    time.sleep(0.3)
    last("thread ")
threading.Thread(target=late).start()
pool = ThreadPoolExecutor(1)
pool.submit(int)  # its thread waits for more, as compilers' do
found = {
    "argv": sys.argv, "name": __name__, "file": __file__, "beside": beside.ANSWER,
    "sent": type(pickle.loads(pickle.dumps(Of()))) is Of,
    "leads": os.getsid(0) == os.getpid(),
    "drawn": int(numpy.random.randint(2**31)),
    "cuda": torch.cuda.is_initialized(),
    "threads": len(os.listdir(f"/proc/{os.getppid()}/task")),
    "interrupted": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "blocked": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []),
}
json.dump(found, open(sys.argv[1], "w"))
last("script ")
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("ANSWER = 42\n")
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_does_not_see_that_it_was_forked(place: Path) -> None:
    drawn = []
    for name in ("one.json", "two.json"):
        Path("order").unlink(missing_ok=True)
        ran = run_script(FORKED, place, "scripts/train.py", name, "a b")
        assert (ran.status, ran.stderr) == (0, "")
        assert Path("order").read_text() == "script thread exit"
        found = json.loads(Path(name).read_text())
        assert found.pop("threads") == 1
        drawn.append(found.pop("drawn"))
        assert found == {
            "argv": ["scripts/train.py", name, "a b"],
            "name": "__main__",
            "file": "scripts/train.py",
            "beside": 42,
            "sent": True,
            "leads": True,
            "cuda": False,
            "interrupted": True,
            "blocked": False,
        }
    assert drawn[0] != drawn[1]


def test_a_module_is_found_as_python_finds_it(place: Path) -> None:
    Path("pack").mkdir()
    Path("pack", "inner.py").write_text("import sys, pack\nprint(__name__, __spec__.name, sys.argv[1:])\n")
    Path("pack", "__init__.py").touch()
    assert run_script(FORKED, place, "-m", "pack.inner", "x").stdout == "__main__ pack.inner ['x']\n"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("1 / 0", 1, 'Traceback (most recent call last):\n  File "end.py", line 1, in <module>\n    1 / 0\n'),
        ("def f(:", 1, '  File "end.py", line 1\n    def f(:\n'),
        ("raise KeyboardInterrupt", 130, "Traceback (most recent call last):\n"),
    ],
)
def test_how_it_ended_is_told(place: Path, body: str, status: int, said: str) -> None:
    Path("end.py").write_text(body + "\n")
    ran = run_script(FORKED, place, "end.py")
    assert ran.status == status
    assert ran.stderr.startswith(said)
    assert bool(said) == bool(ran.stderr)
    assert os.fspath(FORKED) not in ran.stderr


ASKED = """
import importlib, sys, torch
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init"):
    setattr(torch.cuda, name, lambda *args, name=name: asked.append(name))
for module in sys.argv[1:]:
    importlib.import_module(module)
assert not asked, asked
"""


def test_the_server_asks_for_no_device() -> None:
    """A driver that was asked before a fork refuses to work after it."""
    modules = [*torchrun.PRELOAD, *torchrun._LATER]
    assert subprocess.run([sys.executable, "-c", ASKED, *modules]).returncode == 0
