"""Warnings of this project are errors in tests; what another package says about itself is reported and no more."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.support import ROOT

OURS = ("lopsided", "lopsided.planner.planner", "tests.ir.test_graph")
THEIRS = ("transformers.modeling_utils", "torch.nn", "lopsidedly", "testsuite.lopsided")
DEPRECATIONS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, UserWarning)


def warn_in(module: str, category: type[Warning]) -> None:
    """What `warnings.warn` does in a function of this module."""
    exec("import warnings\nwarnings.warn('made up', category)", {"__name__": module, "category": category})


@pytest.mark.parametrize("module", OURS)
@pytest.mark.parametrize("category", DEPRECATIONS)
def test_a_warning_of_this_project_is_an_error(module: str, category: type[Warning]) -> None:
    with pytest.raises(category, match="made up"):
        warn_in(module, category)


@pytest.mark.parametrize("module", THEIRS)
@pytest.mark.parametrize("category", DEPRECATIONS)
def test_a_deprecation_of_another_package_is_none(module: str, category: type[Warning]) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warn_in(module, category)
    assert [one.category for one in heard] == [category]


@pytest.mark.parametrize("module", [*OURS, *THEIRS])
def test_numbers_that_overflow_are_errors_everywhere(module: str) -> None:
    with pytest.raises(RuntimeWarning, match="made up"):
        warn_in(module, RuntimeWarning)


def test_our_own_warnings_are_errors_wherever_they_point() -> None:
    """Every class of warning that the library defines stands in the list of `pyproject.toml`."""
    classes = {
        f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}.{name}"
        for path in (ROOT / "lopsided").rglob("*.py")
        for name in re.findall(r"^class (\w+Warning)\(", path.read_text(), flags=re.M)
    }
    assert classes
    listed = (ROOT / "pyproject.toml").read_text()
    assert [name for name in classes if f'"error::{name}"' not in listed] == []


SESSION = """
import warnings

def warn_in(module):
    exec("import warnings; warnings.warn('made up in ' + __name__, FutureWarning)", {"__name__": module})

def test_ours():
    warn_in("lopsided.made_up")

def test_theirs():
    warn_in("transformers.made_up")
"""


def test_a_run_of_tests_reports_the_one_and_fails_for_the_other(tmp_path: Path) -> None:
    (tmp_path / "test_made_up.py").write_text(SESSION)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", str(tmp_path)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert "1 failed, 1 passed, 1 warning" in done.stdout, done.stdout + done.stderr
    assert re.search(r"FAILED .*test_made_up.py::test_ours", done.stdout)
    assert "FutureWarning: made up in transformers.made_up" in done.stdout
