"""The command line as a person meets it: output, exit status, short errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import lopsided

SMALL = "mlp:layers=2,width=12,classes=5,batch=7"


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a shell starts it. Importing takes seconds: other tests run it in this process."""
    command = [sys.executable, "-m", "lopsided", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_verify_says_what_it_did() -> None:
    done = process("verify", SMALL, "--shares", ".5,.3,.2", "--programs", "12")
    assert done.returncode == 0, done.stderr
    assert "same as one device" in done.stdout
    assert "placements" in done.stdout
    assert "I→R" in done.stdout


def test_verify_as_json() -> None:
    done = lopsided("verify", SMALL, "--programs", "12", "--json")
    told = json.loads(done.stdout)
    assert told["passed"] is True
    assert told["programs"] == 12
    assert told["worst_error"] <= told["tolerance"] == 1e-9
    assert {"I", "R", "P", "S"} <= told["placements"].keys()


def test_verify_fails_with_status_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A model whose loss differs from call to call in a way that no seed controls cannot equal one device.
    (tmp_path / "loose.py").write_text(
        "import itertools, torch\n"
        "CALLS = itertools.count(1)\n"
        "class Loose(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).sum() * next(CALLS)\n"
        "def make():\n"
        "    return Loose(3, 2), {'x': torch.randn(5, 3)}\n"
    )
    done = lopsided("verify", "loose.py:make", "--programs", "2")
    assert done.returncode == 1
    assert "not the same as one device" in done.stdout


def test_capture_prints_a_graph_and_its_rules() -> None:
    done = lopsided("capture", SMALL, "--rules")
    assert done.returncode == 0, done.stderr
    assert "aten.linear.default" in done.stdout
    assert "S0, R, R → S0" in done.stdout
    told = json.loads(lopsided("capture", SMALL, "--json").stdout)
    assert told["nodes"] > 3
    assert told["only_whole"] == []


def test_rules_of_one_op() -> None:
    done = lopsided("rules", "--op", "linear")
    assert done.returncode == 0, done.stderr
    assert "... i * o i + o -> ... o" in done.stdout
    assert "0 wrong" in done.stdout
    told = json.loads(lopsided("rules", "--op", "aten.softmax", "--json").stdout)
    assert told["wrong"] == []
    assert told["rules"] > 4


BAD = {
    "zoo name": (["verify", "brett"], "bert"),
    "zoo key": (["verify", "bert:widht=3"], "width"),
    "zoo value": (["verify", "bert:width=wide"], "width"),
    "missing file": (["verify", "nowhere.py:make"], "nowhere.py"),
    "missing function": (["verify", f"{__file__}:nothing"], "nothing"),
    "missing module": (["verify", "no.such.module:make"], "no.such.module"),
    "missing class": (["verify", "hf:LlamaForCausalLn"], "Llama"),
    "shares sum": (["verify", SMALL, "--shares", ".5,.4"], "sum to 0.9"),
    "shares sign": (["verify", SMALL, "--shares", "1.5,-.5"], "negative"),
    "shares words": (["verify", SMALL, "--shares", "half,half"], "not a list of numbers"),
    "op": (["rules", "--op", "linaer"], "linear"),
    "a line with a typo": (["rules", "--op", "linear", "--line", "... i ** o i -> ... o"], "does not parse"),
    "a line that does not fit": (["rules", "--op", "linear", "--line", "a b * c -> a c"], "aten.linear.default"),
    "a line for no op": (["rules", "--line", "... -> ..."], "--op"),
    "a directory": (["verify", str(Path(__file__).parent)], "a directory"),
    "no command": (["plam"], "plam"),
    "programs": (["verify", SMALL, "--programs", "0"], "programs"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_a_few_lines(case: str) -> None:
    arguments, word = BAD[case]
    done = lopsided(*arguments)
    said = done.stderr
    assert done.returncode == 2
    assert word in said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 8


def test_a_line_is_tried_without_touching_the_table() -> None:
    wrong = lopsided("rules", "--op", "softmax", "--line", "f[...] -> ...")
    assert wrong.returncode == 1
    assert "WRONG" in wrong.stdout
    weak = lopsided("rules", "--op", "mm", "--line", "m I * I n -> m n")
    assert weak.returncode == 0
    assert "should an index be lower case?" in weak.stdout


def test_an_error_as_json() -> None:
    done = process("verify", "brett", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"] == "ModelError"


def test_no_scalar_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(3, 2), {'input': torch.randn(5, 3)}\n"
    )
    done = lopsided("verify", "mine.py:make")
    assert done.returncode == 2
    assert "(5, 2)" in done.stderr
    assert "loss_fn" in done.stderr


def test_verbose_shows_the_traceback() -> None:
    assert "Traceback" in lopsided("verify", "brett", "-v").stderr
